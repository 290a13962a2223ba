"""AutoLoCo (arXiv:2609.36662) as pure functions of scalars: no tensor, no clock, no process.

In the paper's order: inner learning rate and exposure (B.2), token mapper (A.3), outer correction
(B.2 to B.4), interval controller (3.1, A.1 to A.3), one interval (B.5); then the log of a run, its
replay and its explanation. `plan` before an interval and `complete` after it are all that a
training loop calls.

    paper       code                  meaning, unit
    s           step                  inner optimizer step, counted over the whole run
    t           interval              outer interval, ended by one synchronisation; counted from 1
    T, w        rules.steps, warmup   steps of the run, and of its learning-rate warm-up
    eta(s)      inner_lr              inner learning rate at step s
    h           horizon               token-equivalent horizon, reference steps, a multiple of q_H
    q_H         granularity           spacing of admissible horizons, steps
    H_t         plan.steps            executed local steps of interval t
    Lambda_t    exposure              accumulated inner learning rate of interval t
    D_t, C_t    drift, coherence      local-drift energy, aggregation coherence
    M_base      base_tokens           tokens of one recipe-horizon interval, over all workers
    tau         tokens_per_step       running estimate of non-padding tokens a step, all workers
    rho_t       interval_ratio        exposure over the base interval's from the same position
    mu_0, mu_t  outer_momentum, momentum    base and corrected outer momentum
    kappa_t     step_scale            bounded scale of the outer step

Assumptions are tagged `# A7`; README's ledger explains each one.
"""

from __future__ import annotations

import json
import math
import operator
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

EXPOSURE_CAP = 1.15  # A.2: a candidate's previewed exposure over the interval's just completed
BOUND_RETIRES = 0.90  # A.2: a rejected bound's previewed exposure over its recorded one
HISTORY = 16  # A.1: residuals that are kept
SCALE_FLOOR = 0.10  # A10: 10 % in drift or coherence is never called a deviation of many sigmas
MAD_TO_SIGMA = 1.4826  # A10: of a normal distribution
SEVERE, MODERATE, SUPPORTS = 6.0, 3.0, 1.0  # A11: thresholds of z
REFERENCE_INTERVALS, VARIABILITY_INTERVALS = 2, 3  # A.1
TOKEN_RETENTION = 0.9  # A.3: beta; A3: it weighs the old value
RATIO_EPS = 1e-12  # A22: the epsilon of B.3

CONSTANTS = {name: value for name, value in globals().items() if name.isupper()}

VERDICTS = ("supports", "consistent", "moderate", "severe", "nonfinite")

Pair = tuple[float, float]  # of the two residual families: drift, coherence


@dataclass(frozen=True)
class Rules:
    """The constants of one run: all that the plan of an interval and a replay need.

    A horizon or granularity that is not given follows from the base horizon. ValueError names a
    value that is out of range as `field=value`.

    >>> rules = Rules(50_000, 4e-4, warmup=1000, base_horizon=500)
    >>> rules.granularity, rules.min_horizon, rules.max_horizon
    (50, 350, 750)
    """

    steps: int  # T, at most 10^7
    lr: float  # eta_max, peak inner learning rate
    warmup: int  # w, steps
    base_horizon: int  # H_base, the recipe horizon, steps
    min_horizon: int | None = None  # H_min: 7 q_H                                          A5
    max_horizon: int | None = None  # H_max: 1.5 H_base
    granularity: int | None = None  # q_H: the largest divisor of H_base up to a tenth of it
    outer_momentum: float = 0.9  # mu_0
    sequence: tuple[int, ...] | None = None  # steps of every interval; None: a controller chooses
    normalise: bool = False  # divide the mean pseudo-gradient by rho (B.3)
    adjust_momentum: bool = True  # mu_0 ** rho instead of mu_0 (B.4)
    scale_step: bool = True  # kappa instead of 1 (B.4)
    max_step_scale: float = 2.0  # kappa_max                                                A14
    controller: str = "autoloco"  # key of CONTROLLERS

    def __post_init__(self) -> None:
        base, q = self.base_horizon, self.granularity
        for name, fits, allowed in (
            ("steps", 1 <= self.steps <= 10**7, "1 to 10^7"),
            ("lr", 0 < self.lr <= 1e38, "a finite number above 0"),
            ("warmup", self.warmup >= 0, "at least 0"),
            ("base_horizon", base >= 1, "at least 1"),
            ("granularity", q is None or q >= 1, "at least 1"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "in [0, 1)"),
            ("max_step_scale", self.max_step_scale >= 1, "at least 1"),
            ("controller", self.controller in CONTROLLERS, f"one of {', '.join(CONTROLLERS)}"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)}: {allowed}")
        if q is None:
            q = next((n for n in range(base // 10, 0, -1) if base % n == 0), 1)
        low = min(7 * q, base) if self.min_horizon is None else self.min_horizon  # A5
        top = base * 3 // 2 // q * q if self.max_horizon is None else self.max_horizon
        for name, value in (("granularity", q), ("min_horizon", low), ("max_horizon", top)):
            object.__setattr__(self, name, value)
        if self.sequence is not None:
            if min(self.sequence, default=0) < 1 or sum(self.sequence) != self.steps:
                total = f"add up to {sum(self.sequence)} steps, each at least 1"
                raise ValueError(f"horizons= must {total}: steps={self.steps}")
            return
        for name, value in (("base_horizon", base), ("min_horizon", low), ("max_horizon", top)):
            if value < 1 or value % q:
                raise ValueError(f"{name}={value} is not a multiple of granularity={q}")
        if base not in self.ladder:
            words = f"min_horizon={low}, base_horizon={base}, max_horizon={top}"
            raise ValueError(f"{words}: they must not decrease in this order")

    @property
    def ladder(self) -> range:
        """The admissible horizons: multiples of q_H from H_min to H_max."""
        assert self.min_horizon and self.max_horizon and self.granularity
        return range(self.min_horizon, self.max_horizon + 1, self.granularity)

    @cached_property
    def rates(self) -> list[float]:
        """The inner learning rate of every step, computed once; see `inner_lr`."""
        return [inner_lr(self, step) for step in range(self.steps)]


# ---------------------------------------------------------------- inner rate, exposure (B.2)


def inner_lr(rules: Rules, step: int) -> float:
    """Inner learning rate of one step: linear warm-up, then cosine to 0.

        eta(s) = eta_max (s + 1) / w                            s < w                   A20
        eta(s) = eta_max (1 + cos(pi p)) / 2,  p = (s - w) / (T - w)                    A20, A23

    From T on it is 0, so that a preview past the end of the run adds nothing.
    """
    if step >= rules.steps:
        return 0.0
    if step < rules.warmup:
        return rules.lr * ((step + 1) / rules.warmup)
    progress = (step - rules.warmup) / (rules.steps - rules.warmup)
    return rules.lr * (0.5 * (1.0 + math.cos(math.pi * progress)))


def exposure(rules: Rules, start: int, count: int) -> float:
    """Accumulated inner learning rate of `count` steps from the scheduler position `start`.

        Lambda(s, H) = sum of eta(s), ..., eta(s + H - 1)                               B.2

    Summed exactly (fsum): a preview and the later measurement of the same steps have equal bits.
    """
    return math.fsum(rules.rates[start : start + count])


# ---------------------------------------------------------------- token mapper (A.3)


@dataclass(frozen=True)
class Mapper:
    """What the token mapper remembers."""

    counts: tuple[int, ...] = ()  # global non-padding tokens of up to 3 recipe-horizon intervals
    tokens_per_step: float | None = None  # tau; None before the first interval

    @property
    def base_tokens(self) -> float | None:
        """M_base, the median of the first three recipe-horizon counts (A.3); None before."""
        return float(statistics.median(self.counts)) if len(self.counts) == 3 else None


def update_mapper(rules: Rules, mapper: Mapper, horizon: int, steps: int, tokens: int) -> Mapper:
    """Take in one completed interval of H_t `steps` and `tokens`, both at least 1.

        tau <- 0.9 tau + 0.1 (tokens_t / H_t);  the first interval sets tau             A.3, A3

    >>> rules, mapper = Rules(5000, 4e-4, 0, 500), Mapper()
    >>> for count in (50_000, 52_000, 51_000):
    ...     mapper = update_mapper(rules, mapper, 500, 500, count)
    >>> mapper.base_tokens, round(mapper.tokens_per_step, 6)
    (51000.0, 100.56)
    """
    if steps < 1 or tokens < 1:
        raise ValueError(f"{steps} steps with {tokens} tokens are no interval")
    density = tokens / steps
    old = mapper.tokens_per_step
    tau = density if old is None else TOKEN_RETENTION * old + (1.0 - TOKEN_RETENTION) * density
    counts = mapper.counts
    if len(counts) < 3 and horizon == steps == rules.base_horizon:
        counts = (*counts, tokens)
    return Mapper(counts, tau)


def map_horizon(rules: Rules, mapper: Mapper, horizon: int) -> int:
    """Executable steps of a token-equivalent horizon, not capped by the end of the run.

        M(h) = M_base h / H_base;  steps(h) = q_H floor(M(h) / (tau q_H) + 1/2) >= q_H   A.3, A4

    One to one before M_base exists.

    >>> rules, mapper = Rules(5000, 4e-4, 0, 500), Mapper((50_000, 50_000, 50_000), 105.3)
    >>> map_horizon(rules, mapper, 500), map_horizon(rules, mapper, 750)
    (450, 700)
    """
    if mapper.base_tokens is None or mapper.tokens_per_step is None:
        return horizon
    budget = mapper.base_tokens * horizon / rules.base_horizon
    multiples = math.floor(budget / (mapper.tokens_per_step * rules.ladder.step) + 0.5)
    return rules.ladder.step * max(1, multiples)


# ---------------------------------------------------------------- outer correction (B.2 to B.4)


def interval_ratio(selected: float, base: float) -> float:
    """Local work of an interval against the base interval's, from the same scheduler position.

    rho_t = 1 if Lambda(s_t, H_t) <= Lambda(s_t, H_base_t), else their ratio            B.2
    """
    return 1.0 if selected <= base else selected / base


def normaliser(ratio: float) -> float:
    """Divisor of the mean pseudo-gradient where normalisation is on.

        g_t = mean Delta / (rho_t + eps) if rho_t > 1, else mean Delta                  B.3, A22

    Exactly 1 at rho_t = 1, so that the update is DiLoCo's bit for bit (D.2).
    """
    return ratio + RATIO_EPS if ratio > 1.0 else 1.0


def momentum_retention(base: float, ratio: float) -> float:
    """Outer momentum for an interval that stands for `ratio` base intervals.

        mu_t = mu_0 ** rho_t                                                            B.4

    mu_0 in [0, 1) is the momentum of one base interval, rho_t >= 1 the interval ratio.

    >>> [round(momentum_retention(0.9, ratio), 6) for ratio in (1.1, 1.5)]
    [0.890567, 0.853815]
    """
    assert 0 <= base < 1 <= ratio, f"{base=}, {ratio=}"
    return base if ratio == 1.0 else float(base**ratio)


def step_scale(momentum: float, base: float, ratio: float, most: float) -> float:
    """Bounded scale of the outer step.

        kappa_t = min(kappa_max, rho_t (1 - mu_t) / (1 - mu_0))                         B.4, A14

    At a constant input, momentum mu lets the parameters move 1 / (1 - mu) times as far: with kappa
    a normalised interval of rho base intervals moves them as far as those together.

    >>> [round(step_scale(0.7**rho, 0.7, rho, 2.0), 6) for rho in (1.0, 1.2, 1.5)]
    [1.0, 1.39278, 2.0]
    """
    return min(most, ratio * (1.0 - momentum) / (1.0 - base))


# ---------------------------------------------------------------- interval controller (3.1, A.1-3)


@dataclass(frozen=True)
class Observation:
    """What one completed interval measured, reduced over all workers."""

    drift: float  # D_t
    coherence: float  # C_t; slightly above 1 is possible under quantisation
    exposure: float  # Lambda_t
    tokens: int  # non-padding tokens of all workers

    @property
    def finite(self) -> bool:
        """Whether the controller can read the interval: each statistic finite and above 0."""
        return all(0 < value < math.inf for value in (self.drift, self.coherence, self.exposure))


@dataclass(frozen=True)
class Controller:
    """State of the interval controller.

    A phase is the head of `queue`; where that is empty, `candidate` while the next horizon is above
    the accepted one, else `monitor`. During the warm-up of the inner rate the queue waits.
    """

    accepted: int  # the accepted horizon, reference steps
    horizon: int  # the next interval's: `accepted`, or a candidate above it
    queue: tuple[str, ...] = ()  # phases to come: `reference` and `variability`
    first: bool = False  # this is the run's first reference, which forgives what is not finite
    reference: tuple[Pair, ...] = ()  # levels of the reference intervals; their mean counts
    history: tuple[Pair, ...] = ()  # residuals of up to 16 normal intervals
    moderate: bool = False  # the interval before was a first moderate one
    nonfinite: bool = False  # the interval before was not finite
    confirming: bool = False  # the candidate has had one `consistent` interval
    bound: tuple[int, float] | None = None  # rejected horizon, exposure when it was rejected


@dataclass(frozen=True)
class Decision:
    """What the controller made of one interval."""

    verdict: str | None  # one of VERDICTS; None where nothing was judged
    next_horizon: int | None  # None after the last interval
    reason: str  # the branch taken, in words
    residual_drift: float | None = None
    residual_coherence: float | None = None
    z: float | None = None


Preview = Callable[[int], tuple[int, float]]  # horizon -> (steps, exposure) of the next interval


def level(seen: Observation) -> Pair:
    """An interval's statistics in log units, freed of how much local work it did; higher is worse.

        (ln D_t - 2 ln Lambda_t,  -ln C_t)                                              A7, A8

    Displacement grows with the exposure (C.2), energy with its square.
    """
    work = math.log(seen.exposure)
    return math.log(seen.drift) - 2.0 * work, -math.log(seen.coherence)


def residuals(reference: tuple[Pair, ...], seen: Observation) -> Pair:
    """Deviation from the accepted reference in log units; positive is worse.

        r_D = ln(D_t / D_ref) - 2 ln(Lambda_t / Lambda_ref)                             A.1, A7
        r_C = ln(C_ref / C_t)

    The reference is the mean level of its intervals, so D_ref and C_ref are geometric means. The
    paper lets Lambda_ref follow the latest accepted interval; D_ref then moves by the same factor
    squared (A8), and the two moves cancel in r_D: neither is kept.
    """
    drift, coherence = level(seen)
    usual_drift, usual_coherence = map(statistics.fmean, zip(*reference, strict=True))
    return drift - usual_drift, coherence - usual_coherence


def centre_and_scale(history: Sequence[float]) -> Pair:
    """Robust centre and sigma of one family's earlier residuals, at least one.

    centre = median(history);  scale = max(0.10, 1.4826 median |r - centre|)        A.1, A10
    """
    # statistics.median averages the two middle values; torch.median would take the lower one.
    centre = statistics.median(history)
    spread = statistics.median(abs(value - centre) for value in history)
    return centre, max(SCALE_FLOOR, MAD_TO_SIGMA * spread)


def robust_z(residual: float, history: Sequence[float]) -> float:
    """Distance of a residual from the history's centre in robust sigmas; positive is worse (A.1).

    >>> round(robust_z(0.5, (0.0, 0.1, 0.2, 0.4)), 5)
    2.36072
    """
    centre, scale = centre_and_scale(history)
    return (residual - centre) / scale


def judge(z: float) -> str:
    """Verdict of a z score (A11).

    >>> [judge(z) for z in (6.0, 5.9, 3.0, 2.9, 1.0)]
    ['severe', 'moderate', 'moderate', 'consistent', 'supports']
    """
    assert math.isfinite(z), "a non-finite interval is not scored"
    if z >= SEVERE:
        return "severe"
    if z >= MODERATE:
        return "moderate"
    return "consistent" if z > SUPPORTS else "supports"


def reduced_horizon(rules: Rules, horizon: int, *, severe: bool) -> int:
    """The largest admissible horizon not above h/1.50 (severe) or h/1.20 (moderate), at least H_min
    (A.3, A12).

    In integers: h/1.50 = 2h/3 and h/1.20 = 5h/6, so no quotient falls below its multiple by
    rounding.

    >>> rules = Rules(50_000, 4e-4, 0, 500)
    >>> [reduced_horizon(rules, h, severe=False) for h in (500, 600, 350)]
    [400, 500, 350]
    >>> [reduced_horizon(rules, h, severe=True) for h in (750, 600, 500)]
    [500, 400, 350]
    """
    numerator, denominator = (2, 3) if severe else (5, 6)
    multiples = numerator * horizon // (denominator * rules.ladder.step)
    return max(rules.ladder.start, multiples * rules.ladder.step)


def candidates(
    rules: Rules, state: Controller, observed: float, preview: Preview, left: int
) -> list[tuple[int, int, float, str]]:
    """Horizons above the accepted one: (horizon, its steps, its exposure, why not or "") (A.2).

    Admissible is what lies below an active bound, maps to more steps than the accepted horizon and
    to no more than are `left`, and previews at most 1.15 x the exposure `observed` in the interval
    just completed.
    """
    cap = EXPOSURE_CAP * (1.0 + 1e-9) * observed  # in floats 1.15 * 100 < 115
    fewest, found = preview(state.accepted)[0], []
    for horizon in range(state.accepted, rules.ladder.stop, rules.ladder.step)[1:]:
        steps, previewed = preview(horizon)
        why = ""
        if state.bound and horizon >= state.bound[0]:
            why = f"not below the rejected {state.bound[0]}"
        elif steps <= fewest:
            why = "no more steps than the accepted horizon"
        elif steps > left:
            why = f"only {left} steps are left"
        elif previewed > cap:
            why = "exposure above the cap"
        found.append((horizon, steps, previewed, why))
    return found


def propose(
    rules: Rules, state: Controller, observed: float, preview: Preview, left: int
) -> tuple[Controller, str]:
    """Choose the next interval's horizon after one that does not deviate (A.2).

    A rejected bound retires when the preview of its horizon is <= 0.90 of its recorded exposure.
    The candidate is the longest admissible horizon; below an active bound the one nearest to the
    geometric midpoint of accepted horizon and bound, within the same cap (A21).
    """
    words = ""
    if state.bound and preview(state.bound[0])[1] <= BOUND_RETIRES * state.bound[1]:
        words = f"bound {state.bound[0]} retired; "
        state = replace(state, bound=None)
    found = candidates(rules, state, observed, preview, left)
    admissible = [horizon for horizon, _, _, why in found if not why]
    if not admissible:
        return state, f"{words}no longer horizon is admissible, stay at {state.accepted}"
    chosen = admissible[-1]
    if state.bound:
        midpoint = math.sqrt(state.accepted * state.bound[0])
        chosen = min(admissible, key=lambda horizon: abs(horizon - midpoint))
        words += f"below bound {state.bound[0]}: "
    return replace(state, horizon=chosen), f"{words}try {chosen}"


def _estimate_anew(state: Controller, horizon: int, nonfinite: bool = False) -> Controller:
    """Accept `horizon`; estimate reference and history again (A.3, A9). A bound stays."""
    queue = ("reference",) + ("variability",) * VARIABILITY_INTERVALS
    return Controller(horizon, horizon, queue, nonfinite=nonfinite, bound=state.bound)


def _reduce(rules: Rules, state: Controller, verdict: str) -> tuple[Controller, str]:
    """Shorten the accepted horizon (A.2, A.3); non-finite twice in a row falls to H_min (A13)."""
    horizon = reduced_horizon(rules, state.accepted, severe=verdict != "moderate")
    words = {
        "moderate": "second moderate, reduce by 1.20",
        "severe": "severe deviation, reduce by 1.50",
        "nonfinite": "non-finite, reduce by 1.50",
    }[verdict]
    if verdict == "nonfinite" and state.nonfinite:
        horizon, words = rules.ladder.start, "non-finite again, fall back"
    return _estimate_anew(state, horizon, verdict == "nonfinite"), f"{words} to {horizon}"


def _normal(state: Controller, pair: Pair) -> Controller:
    """A normal interval enters the history (A.1)."""
    return replace(state, history=(*state.history, pair)[-HISTORY:], moderate=False)


def decide(
    rules: Rules,
    state: Controller,
    planned: Plan,
    seen: Observation,
    preview: Preview,
    left: int,
    verdict: str | None = None,
) -> tuple[Controller, Decision]:
    """One completed interval in, the next horizon out: the interval controller (3.1, A.1 to A.3).

    `preview` looks ahead from the interval's end, where `left` steps of the run are left; at 0
    nothing is decided. `verdict` replaces the judgement, for "what if" questions.
    """
    assert verdict is None or verdict in VERDICTS, f"unknown verdict {verdict}"
    phase, finite = planned.phase, seen.finite and verdict != "nonfinite"
    pair, z = None, None
    if finite and phase not in ("warmup", "reference"):
        pair = residuals(state.reference, seen)
    if phase not in ("monitor", "candidate") or left == 0:
        verdict = None
    elif pair is None:
        verdict = "nonfinite"
    else:
        families = zip(pair, zip(*state.history, strict=True), strict=True)
        z = max(robust_z(residual, family) for residual, family in families)
        verdict = verdict or judge(z)

    if left == 0:
        words = "the run ends here, nothing to decide"
    elif phase == "warmup":  # nothing is judged, and what is not finite is ignored
        words = "the inner rate warms up"
    elif phase == "reference" and finite:
        levels = (*state.reference, level(seen))
        state = replace(state, reference=levels, queue=state.queue[1:], nonfinite=False)
        words = f"reference, {state.queue.count('reference')} more to come"
    elif phase == "reference" and state.first:
        words = "reference: non-finite, does not count"
    elif phase == "variability" and pair:
        state = replace(_normal(state, pair), queue=state.queue[1:])
        words = f"variability, {len(state.queue)} more to come"
    elif phase == "candidate":
        state, words = _after_candidate(state, seen, verdict)
    elif not pair or verdict == "severe" or (verdict == "moderate" and state.moderate):
        # A12: two moderate ones in a row. A later reference that is not finite reduces too (A.2).
        state, words = _reduce(rules, state, verdict or "nonfinite")
    elif verdict == "moderate":
        state, words = replace(state, moderate=True), f"first moderate, hold {state.accepted}"
    else:
        state = _normal(state, pair)
        state, words = propose(rules, state, seen.exposure, preview, left)
        words = f"{verdict}: {words}"
    following = state.horizon if left else None
    drift, coherence = pair or (None, None)
    return state, Decision(verdict, following, words, drift, coherence, z)


def _after_candidate(
    state: Controller, seen: Observation, verdict: str | None
) -> tuple[Controller, str]:
    """Test a longer horizon against the accepted reference: adopt, confirm, or reject (A.2)."""
    if verdict == "supports" or (verdict == "consistent" and state.confirming):
        words = f"{verdict}: adopt {state.horizon}" + ", confirmed" * state.confirming
        adopted = _estimate_anew(state, state.horizon)
        # The adopting interval itself is the new reference: only so is the remainder 250.
        return replace(adopted, reference=(level(seen),), queue=adopted.queue[1:]), words
    if verdict == "consistent":
        return replace(state, confirming=True), f"consistent: one more interval at {state.horizon}"
    rejected = replace(state, bound=(state.horizon, seen.exposure))
    words = f"{verdict}: reject {state.horizon}, return to {state.accepted}"
    return _estimate_anew(rejected, state.accepted, verdict == "nonfinite"), words


# By Rules.controller; a rule of your own is one more entry.
CONTROLLERS = {"autoloco": decide}


# ---------------------------------------------------------------- one interval (B.5)


@dataclass(frozen=True)
class State:
    """Everything that the plan of the next interval depends on."""

    step: int  # scheduler position
    interval: int  # completed intervals
    mapper: Mapper
    controller: Controller


@dataclass(frozen=True)
class Plan:
    """One interval before it runs: how long, and how its outer update is corrected (B.5)."""

    interval: int  # t, from 1
    step: int  # s_t, scheduler position of its first step
    steps: int  # H_t
    horizon: int  # h; for fixed schedules the steps themselves
    accepted: int  # the accepted horizon at this time
    phase: str  # warmup, reference, variability, monitor, candidate; fixed without a controller
    base_exposure: float  # Lambda(s_t, H_base_t), the scheduler-aligned comparator
    interval_ratio: float  # rho_t
    divisor: float  # of the mean pseudo-gradient (B.3); 1 without normalisation
    momentum: float  # mu_t
    step_scale: float  # kappa_t


def start(rules: Rules) -> State:
    """The state before the first interval."""
    queue = ("reference",) * REFERENCE_INTERVALS + ("variability",) * VARIABILITY_INTERVALS
    controller = Controller(rules.base_horizon, rules.base_horizon, queue, first=True)
    return State(0, 0, Mapper(), controller)


def phase_of(rules: Rules, state: State) -> str:
    """The phase of the next interval; what starts inside the warm-up is not judged (A.1)."""
    controller = state.controller
    if rules.sequence is not None:
        return "fixed"
    if state.step < rules.warmup:
        return "warmup"
    waiting = "monitor" if controller.horizon == controller.accepted else "candidate"
    return controller.queue[0] if controller.queue else waiting


def plan(rules: Rules, state: State) -> Plan:
    """Before an interval (B.5): map the horizon to steps, set the outer correction (B.2 to B.4).

    At rho_t = 1 the correction is DiLoCo's: divisor 1, mu_0, kappa 1 (D.2).
    """
    if state.step >= rules.steps:
        raise ValueError(f"the run was over at step {rules.steps}")
    horizon, accepted = state.controller.horizon, state.controller.accepted
    steps = min(map_horizon(rules, state.mapper, horizon), rules.steps - state.step)
    if rules.sequence is not None:
        steps = horizon = accepted = rules.sequence[state.interval]
    base = exposure(rules, state.step, map_horizon(rules, state.mapper, rules.base_horizon))
    ratio = interval_ratio(exposure(rules, state.step, steps), base)
    mu_0 = rules.outer_momentum
    mu = momentum_retention(mu_0, ratio) if rules.adjust_momentum else mu_0
    scale = step_scale(mu, mu_0, ratio, rules.max_step_scale) if rules.scale_step else 1.0
    return Plan(
        interval=state.interval + 1,
        step=state.step,
        steps=steps,
        horizon=horizon,
        accepted=accepted,
        phase=phase_of(rules, state),
        base_exposure=base,
        interval_ratio=ratio,
        divisor=normaliser(ratio) if rules.normalise else 1.0,
        momentum=mu,
        step_scale=scale,
    )


def ahead(rules: Rules, mapper: Mapper, step: int) -> Preview:
    """Preview from the scheduler position `step`: horizon -> (steps, exposure)."""

    def preview(horizon: int) -> tuple[int, float]:
        steps = map_horizon(rules, mapper, horizon)
        return steps, exposure(rules, step, steps)

    return preview


def observe(rules: Rules, planned: Plan, measured: Mapping[str, float], tokens: int) -> Observation:
    """What the controller reads of an executed plan: D_t and C_t as measured, Lambda_t (B.2), and
    the tokens of all workers.
    """
    work = exposure(rules, planned.step, planned.steps)
    return Observation(measured["drift"], measured["coherence"], work, tokens)


def complete(
    rules: Rules, state: State, planned: Plan, seen: Observation, verdict: str | None = None
) -> tuple[State, Decision]:
    """Take in the completed interval: mapper first, then the controller chooses the next horizon
    (A.3, B.5). `verdict` replaces the controller's judgement, for "what if" questions.
    """
    step = planned.step + planned.steps
    mapper = update_mapper(rules, state.mapper, planned.horizon, planned.steps, seen.tokens)
    left, controller = rules.steps - step, state.controller
    if rules.sequence is not None:
        following = rules.sequence[planned.interval] if left else None
        decision = Decision(None, following, "fixed schedule")
    else:
        rule, preview = CONTROLLERS[rules.controller], ahead(rules, mapper, step)
        controller, decision = rule(rules, controller, planned, seen, preview, left, verdict)
    return State(step, planned.interval, mapper, controller), decision


def simulate(rules: Rules, verdicts: Mapping[int, str] = {}) -> Iterator[tuple[Plan, Decision]]:
    """A run in which every interval shows normal statistics: the schedule that a dry run prints.

    Drift goes with the square of the exposure, coherence and token density stay constant, so every
    residual is 0 and every judged interval supports an increase; `verdicts` (interval -> verdict)
    replaces judgements.
    """
    state = start(rules)
    while state.step < rules.steps:
        planned = plan(rules, state)
        work = exposure(rules, planned.step, planned.steps)
        seen = Observation(work * work, 0.5, work, planned.steps)
        state, decision = complete(rules, state, planned, seen, verdicts.get(planned.interval))
        yield planned, decision


# ---------------------------------------------------------------- the log of a run, and its replay


def header(rules: Rules, **about: Any) -> dict[str, Any]:
    """First line of `intervals.jsonl`: all that a replay needs, the controller's own constants
    included, so that a log that was written under other thresholds is not called wrong.
    """
    return about | {"rules": asdict(rules), "constants": CONSTANTS}


def record(planned: Plan, seen: Observation, mapper: Mapper, decision: Decision) -> dict[str, Any]:
    """One interval as a log line holds it: planned, measured, decided. A measurement that is not
    finite is null, with `finite` false.
    """
    measured = {
        name: value if math.isfinite(value) else None for name, value in asdict(seen).items()
    }
    ended = {"step": planned.step + planned.steps}  # completed steps
    more = {"tokens_per_step": mapper.tokens_per_step, "finite": seen.finite}
    return asdict(planned) | ended | asdict(decision) | measured | more


def rules_from_header(values: Mapping[str, Any]) -> Rules:
    """Rules of a log's header. A field that it lacks takes its default; ValueError says why a log
    cannot be replayed by these rules.
    """
    written, constants = values.get("rules"), values.get("constants", {})
    if not isinstance(written, dict) or not isinstance(constants, dict):
        raise ValueError("no header with the run's rules")
    if unknown := set(written) - {field.name for field in fields(Rules)}:
        raise ValueError(f"rules has an unknown {min(unknown)}")
    for name, value in constants.items():
        if CONSTANTS.get(name, value) != value:
            raise ValueError(f"written with {name} {value}; it is {CONSTANTS[name]} now")
    sequence = written.get("sequence")
    try:
        whole = None if sequence is None else tuple(map(operator.index, sequence))
        rules = Rules(**{**written, "sequence": whole})
        plan(rules, start(rules))  # here half a step is found, or another value of the wrong type
        return rules
    except TypeError as error:
        raise ValueError(f"rules: a missing value, or one of the wrong type ({error})") from None


def _same(logged: Any, expected: Any) -> bool:
    """Equal; floats within 1e-12, since libraries differ in the last digit of cos, log and pow."""
    if isinstance(expected, float) and isinstance(logged, float):
        return math.isclose(logged, expected, rel_tol=1e-12, abs_tol=1e-12)
    return bool(logged == expected)


class Replayed(NamedTuple):
    """One interval of a log, taken again."""

    rules: Rules
    before: State
    planned: Plan
    seen: Observation
    after: State
    decision: Decision


def _take_again(rules: Rules, state: State, logged: Mapping[str, Any]) -> Replayed:
    """One interval from what it measured; ValueError says how the row differs."""
    planned = plan(rules, state)
    try:
        measured = {
            name: math.nan if logged[name] is None else float(logged[name])
            for name in ("drift", "coherence", "tokens")
        }
        seen = observe(rules, planned, measured, int(measured["tokens"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"damaged measurement ({error})") from None
    after, decision = complete(rules, state, planned, seen)
    for name, value in record(planned, seen, after.mapper, decision).items():
        if name in logged and not _same(logged[name], value):  # an older log may lack a column
            words = f"{name} is {logged[name]!r} in the log, the rule gives {value!r}"
            raise ValueError(f"interval {planned.interval}: {words}")
    return Replayed(rules, state, planned, seen, after, decision)


def replay(rules: Rules, rows: Iterable[Mapping[str, Any]]) -> Iterator[Replayed]:
    """Take every decision of a recorded run again, from the logged drift, coherence and tokens.

    A row with `rules` replaces them from there on (a run that was extended). ValueError names the
    first line whose plan or decision differs, or that is damaged, and says how.
    """
    state = start(rules)
    for line, logged in enumerate(rows, 2):
        try:
            if "rules" in logged:
                rules = rules_from_header(logged)
                continue
            one = _take_again(rules, state, logged)
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from None
        state = one.after
        yield one


def last_state(rules: Rules, rows: Iterable[Mapping[str, Any]]) -> State:
    """The state after a log: decisions are a function of it, so nothing else need be saved."""
    return [start(rules), *(one.after for one in replay(rules, rows))][-1]


def read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Rows of a log, and whether a torn last line was dropped; ValueError names file and line."""
    try:
        *lines, torn = path.read_text().split("\n")  # a complete file ends with a newline
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append({**json.loads(line)})
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{path}: line {number} is not a JSON object") from None
    return rows, bool(torn)


def read_log(path: Path) -> tuple[Rules, list[dict[str, Any]], bool]:
    """Rules, rows, and whether a torn last line was dropped, of an `intervals.jsonl`.

    ValueError names the file, and the line if one is damaged.
    """
    rows, torn = read_rows(path)
    try:
        return rules_from_header(rows[0] if rows else {}), rows[1:], torn
    except ValueError as error:
        raise ValueError(f"{path}: line 1: {error}") from None


# ---------------------------------------------------------------- why this horizon


def _explain_judgement(one: Replayed) -> Iterator[str]:
    """Why `decide` judged and proposed as it did."""
    p, o, d, c = one.planned, one.seen, one.decision, one.before.controller
    if d.residual_drift is not None:
        both = f"drift {d.residual_drift:+.4f}, coherence {d.residual_coherence:+.4f}"
        words = f"log distance from {len(c.reference)} reference interval(s), positive is worse"
        yield f"residuals     {both}: {words}"
    if d.z is not None:
        pair, families = residuals(c.reference, o), zip(*c.history, strict=True)
        for name, r, family in zip(("drift", "coherence"), pair, families, strict=True):
            centre, scale = centre_and_scale(family)
            formula = f"({r:+.4f} - centre {centre:+.4f}) / scale {scale:.4f}"
            z = robust_z(r, family)
            yield f"z, {name:11}{formula} = {z:+.2f}, over {len(family)} intervals"
        bands = f"up to {SUPPORTS:g} supports, below {MODERATE:g} consistent, below {SEVERE:g}"
        words = f"{d.verdict} ({bands} moderate, else severe)"
        yield f"z             {d.z:+.2f}, the worse of the two: {words}"
    elif d.verdict:
        yield f"verdict       {d.verdict}: a statistic is not finite and above 0"
    if c.bound:
        yield f"bound         {c.bound[0]} was rejected at exposure {c.bound[1]:.6g}"
    if p.phase == "monitor" and d.verdict in ("supports", "consistent"):
        cap = EXPOSURE_CAP * o.exposure
        yield f"cap           {EXPOSURE_CAP} x {o.exposure:.6g} = {cap:.6g} of exposure"
        preview = ahead(one.rules, one.after.mapper, one.after.step)
        still = replace(c, bound=one.after.controller.bound)  # it may have retired just now
        left = one.rules.steps - one.after.step
        for horizon, steps, work, why in candidates(one.rules, still, o.exposure, preview, left):
            why = why or ("chosen" if horizon == d.next_horizon else "admissible")
            yield f"candidate     {horizon}: {steps} steps, {work:.6g}: {why}"


def explain(one: Replayed) -> str:
    """Why the controller chose the next horizon, and what the outer step did, with the numbers."""
    rules, p, o, d = one.rules, one.planned, one.seen, one.decision
    free = step_scale(p.momentum, rules.outer_momentum, p.interval_ratio, math.inf)
    held = "bounded at" if free > rules.max_step_scale else "below its bound of"
    why = f" ({free:.6g}, {held} {rules.max_step_scale:g})" if rules.scale_step else ""
    outer = f"rho {p.interval_ratio:.6g}, mu {p.momentum:.6g}, kappa {p.step_scale:.6g}{why}"
    following = f"next horizon {d.next_horizon}" if d.next_horizon else "no interval follows"
    lines = [
        f"interval {p.interval}: steps {p.step + 1} to {p.step + p.steps}, phase {p.phase}",
        f"horizon       {p.horizon} (accepted {p.accepted}), executed as {p.steps} steps",
        f"measured      drift D {o.drift:.6g}, coherence C {o.coherence:.4f}, "
        f"exposure {o.exposure:.6g}, {o.tokens:,} tokens",
        *(_explain_judgement(one) if CONTROLLERS[rules.controller] is decide else ()),
        f"outer step    {outer}",
        f"decision      {d.reason}; {following}",
    ]
    return "\n  ".join(lines)


def main(argv: list[str]) -> int:
    """`replay LOG` or `explain LOG [INTERVAL]`: 0, 1 where log and rules differ, 2 on misuse."""
    match argv:
        case ["replay" | "explain", path] | ["explain", path, _]:
            command, wanted = argv[0], argv[2:]
        case _:
            print("usage: python autoloco.py replay LOG | explain LOG [INTERVAL]", file=sys.stderr)
            return 2
    try:
        rules, rows, torn = read_log(Path(path))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if torn:
        print(f"{path}: the torn last line is dropped", file=sys.stderr)
    try:
        taken = list(replay(rules, rows))
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if command == "replay":
        step, steps = (taken[-1].after.step, taken[-1].rules.steps) if taken else (0, rules.steps)
        words = f"replayed up to step {step} of {steps}, every decision is the rule's"
        print(f"{len(taken)} intervals {words}")
        return 0
    shown = [explain(one) for one in taken if wanted in ([], [str(one.planned.interval)])]
    if not shown:
        print(f"{path}: interval {''.join(wanted) or 1} is not in this log", file=sys.stderr)
        return 2
    print("\n\n".join(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
