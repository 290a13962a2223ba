"""AutoLoCo (arXiv:2609.36662) as pure functions of scalars: nothing here touches a tensor, a clock
or a process.

Read it in the paper's order: inner learning rate and exposure (B.2), token mapper (A.3), outer
correction (B.2 to B.4), interval controller (3.1, A.1, A.2, A.3), one interval (B.5), replay of a
recorded run. Every rank runs these functions on the same reduced scalars and so takes the same
decision; `replay` takes them again from the log.

    paper       code                  meaning, unit
    s           step                  inner optimizer step, counted over the whole run
    t           interval              outer interval, ended by one synchronisation; counted from 1
    T, w        steps, warmup         steps of the run, and of its learning-rate warm-up
    eta(s)      inner_lr              inner learning rate at step s
    h           horizon               token-equivalent horizon, reference steps, a multiple of q_H
    q_H         granularity           spacing of admissible horizons, steps
    H_t         steps                 executed local steps of interval t
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
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

EXPOSURE_CAP = 1.15  # A.2: a candidate's previewed exposure over the accepted interval's
BOUND_RETIRES = 0.90  # A.2: a rejected bound's previewed exposure over its recorded one
HISTORY = 16  # A.1: residuals kept by each family
SCALE_FLOOR = 0.10  # A10: 10 % in drift or coherence is never called a deviation of many sigmas
MAD_TO_SIGMA = 1.4826  # A10: of a normal distribution
SEVERE, MODERATE, SUPPORTS = 6.0, 3.0, 1.0  # A11: thresholds of z
REFERENCE_INTERVALS, VARIABILITY_INTERVALS = 2, 3  # A.1
TOKEN_RETENTION = 0.9  # A.3: beta; A3: it weighs the old value
MAX_STEP_SCALE = 1.5  # A14: kappa_max
RATIO_EPS = 1e-12  # A22: the epsilon of B.3

CONSTANTS = {name: value for name, value in globals().items() if name.isupper()}

VERDICTS = ("supports", "consistent", "moderate", "severe", "nonfinite")


@dataclass(frozen=True)
class Rules:
    """The constants of one run: all that the plan of an interval and a replay need.

    Args:
        steps: T, inner steps of the run, >= 1.
        lr: eta_max, peak inner learning rate, > 0.
        warmup: w, steps of linear warm-up, >= 0.
        base_horizon: H_base, the recipe horizon, steps.
        min_horizon: H_min, steps (A5: 7 q_H).
        max_horizon: H_max, steps.
        granularity: q_H, steps.
        outer_momentum: mu_0, in [0, 1).
        sequence: executed steps of every interval, for fixed schedules; None lets the controller
            choose.
        normalise: divide the mean pseudo-gradient by rho (B.3).
        adjust_momentum: mu_0 ** rho instead of mu_0 (B.4).
        scale_step: kappa instead of 1 (B.4).
    Raises:
        ValueError: a value out of range; the message names the flag.
    """

    steps: int
    lr: float
    warmup: int
    base_horizon: int
    min_horizon: int
    max_horizon: int
    granularity: int
    outer_momentum: float
    sequence: tuple[int, ...] | None = None
    normalise: bool = False
    adjust_momentum: bool = False
    scale_step: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: at least 1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"--lr {self.lr}: a finite number above 0")
        if self.warmup < 0:
            raise ValueError(f"--warmup {self.warmup}: not below 0")
        if self.base_horizon < 1:
            raise ValueError(f"--base-horizon {self.base_horizon}: at least 1")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"--outer-momentum {self.outer_momentum}: in [0, 1)")
        if self.sequence is not None:
            if any(steps < 1 for steps in self.sequence):
                raise ValueError("--horizons: every interval has at least 1 step")
            if sum(self.sequence) != self.steps:
                raise ValueError(
                    f"--horizons add up to {sum(self.sequence)} steps, --steps is {self.steps}"
                )
            return
        if self.granularity < 1:
            raise ValueError(f"--granularity {self.granularity}: at least 1")
        for name in ("min_horizon", "base_horizon", "max_horizon"):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value < 1 or value % self.granularity:
                raise ValueError(
                    f"{flag} {value} is not a multiple of --granularity {self.granularity}"
                )
        if not self.min_horizon <= self.base_horizon <= self.max_horizon:
            raise ValueError(
                f"--min-horizon {self.min_horizon}, --base-horizon {self.base_horizon}, "
                f"--max-horizon {self.max_horizon}: they must not decrease in this order"
            )

    @property
    def corrected(self) -> bool:
        """Whether any part of the outer correction is on."""
        return self.normalise or self.adjust_momentum or self.scale_step

    @property
    def warmup_intervals(self) -> int:
        """Intervals that the inner-rate warm-up spans: ceil(w / H_base), A.1."""
        return -(-self.warmup // self.base_horizon)

    @cached_property
    def rates(self) -> list[float]:
        """The inner learning rate of every step, computed once; see `inner_lr`."""
        return [inner_lr(self, step) for step in range(self.steps)]


# ---------------------------------------------------------------- inner learning rate, exposure
# (B.2)


def inner_lr(rules: Rules, step: int) -> float:
    """Inner learning rate of one step: linear warm-up, then cosine to 0.

        eta(s) = eta_max (s + 1) / w                            s < w                   A20
        eta(s) = eta_max (1 + cos(pi p)) / 2,  p = (s - w) / (T - w)                    A20, A23

    Args:
        rules: the run's constants.
        step: s, >= 0; from T on the rate is 0, so that a preview past the end adds nothing.
    Returns:
        eta(s), in [0, eta_max].
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

    Summed exactly (fsum): a preview and the later measurement of the same steps are equal, bit for
    bit.

    Args:
        rules: the run's constants.
        start: s, >= 0.
        count: H, steps; those past the end of the run add nothing.
    Returns:
        Lambda, >= 0.
    """
    return math.fsum(rules.rates[start : start + count])


# ---------------------------------------------------------------- token mapper (A.3)


@dataclass(frozen=True)
class Mapper:
    """State of the token mapper.

    Args:
        counts: global non-padding tokens of up to three recipe-horizon intervals.
        tokens_per_step: tau; None before the first interval.
    """

    counts: tuple[int, ...] = ()
    tokens_per_step: float | None = None

    @property
    def base_tokens(self) -> float | None:
        """M_base, the median of the first three recipe-horizon counts (A.3); None before."""
        return float(statistics.median(self.counts)) if len(self.counts) == 3 else None


def update_mapper(rules: Rules, mapper: Mapper, horizon: int, steps: int, tokens: int) -> Mapper:
    """Take in one completed interval.

        tau <- 0.9 tau + 0.1 (tokens_t / H_t);  the first interval sets tau             A.3, A3

    Args:
        rules: the run's constants.
        mapper: the state before.
        horizon: h of the interval; its count calibrates M_base if h = H_base, three times.
        steps: H_t, executed, >= 1.
        tokens: non-padding tokens of all workers in the interval, >= 1.
    Returns:
        The state after.

    >>> rules = Rules(5000, 4e-4, 0, 500, 350, 750, 50, 0.9)
    >>> mapper = Mapper()
    >>> for count in (50_000, 52_000, 51_000):
    ...     mapper = update_mapper(rules, mapper, 500, 500, count)
    >>> mapper.base_tokens, round(mapper.tokens_per_step, 6)
    (51000.0, 100.56)
    """
    assert steps >= 1 and tokens >= 1, "an interval has steps and tokens"
    density = tokens / steps
    old = mapper.tokens_per_step
    tau = density if old is None else TOKEN_RETENTION * old + (1.0 - TOKEN_RETENTION) * density
    counts = mapper.counts
    if len(counts) < 3 and horizon == rules.base_horizon and steps == rules.base_horizon:
        counts = (*counts, tokens)
    return Mapper(counts, tau)


def map_horizon(rules: Rules, mapper: Mapper, horizon: int) -> int:
    """Executable steps of a token-equivalent horizon.

        M(h) = M_base h / H_base;  steps(h) = q_H floor(M(h) / (tau q_H) + 1/2) >= q_H   A.3, A4

    One to one before M_base exists.

    Args:
        rules: the run's constants.
        mapper: the mapper's state, already updated by the latest interval.
        horizon: h, reference steps.
    Returns:
        Steps, a multiple of q_H; not capped by the end of the run.

    >>> rules = Rules(5000, 4e-4, 0, 500, 350, 750, 50, 0.9)
    >>> mapper = Mapper((50_000, 50_000, 50_000), 105.3)
    >>> map_horizon(rules, mapper, 500), map_horizon(rules, mapper, 750)
    (450, 700)
    """
    if mapper.base_tokens is None or mapper.tokens_per_step is None:
        return horizon
    budget = mapper.base_tokens * horizon / rules.base_horizon
    multiples = math.floor(budget / (mapper.tokens_per_step * rules.granularity) + 0.5)
    return rules.granularity * max(1, multiples)


# ---------------------------------------------------------------- outer correction (B.2 to B.4)


def interval_ratio(selected: float, base: float) -> float:
    """Local work of an interval against the base interval's, from the same scheduler position.

        rho_t = 1 if Lambda(s_t, H_t) <= Lambda(s_t, H_base_t), else their ratio        B.2

    Args:
        selected: Lambda(s_t, H_t), >= 0.
        base: Lambda(s_t, H_base_t), > 0 wherever a step is left.
    Returns:
        rho_t, >= 1.
    """
    return 1.0 if selected <= base else selected / base


def normaliser(ratio: float) -> float:
    """Divisor of the mean pseudo-gradient where normalisation is on.

        g_t = mean Delta / (rho_t + eps) if rho_t > 1, else mean Delta                  B.3, A22

    Args:
        ratio: rho_t, >= 1.
    Returns:
        The divisor; exactly 1 at rho_t = 1, so that the update is DiLoCo's bit for bit (D.2).
    """
    return ratio + RATIO_EPS if ratio > 1.0 else 1.0


def momentum_retention(base: float, ratio: float) -> float:
    """Outer momentum for an interval that stands for `ratio` base intervals.

        mu_t = mu_0 ** rho_t                                                            B.4

    Args:
        base: mu_0, outer momentum of one base interval, in [0, 1).
        ratio: rho_t, interval ratio, >= 1.
    Returns:
        mu_t, in [0, mu_0].
    Raises:
        ValueError: base or ratio out of range.

    >>> round(momentum_retention(0.9, 1.5), 6), round(momentum_retention(0.7, 1.5), 6)
    (0.853815, 0.585662)
    """
    if not 0 <= base < 1 or not ratio >= 1:
        raise ValueError(f"momentum {base} must be in [0, 1) and the interval ratio {ratio} >= 1")
    return float(base**ratio)


def step_scale(momentum: float, base: float) -> float:
    """Bounded scale of the outer step: what a lower momentum takes from a constant input's
    response, it gives back.

        kappa_t = min(kappa_max, (1 - mu_t) / (1 - mu_0))                          B.4, C.3, A14

    Args:
        momentum: mu_t, in [0, mu_0].
        base: mu_0, in [0, 1).
    Returns:
        kappa_t, in [1, kappa_max].

    >>> round(step_scale(momentum_retention(0.9, 1.5), 0.9), 6)
    1.46185
    >>> round(step_scale(momentum_retention(0.7, 1.5), 0.7), 6)
    1.381127
    """
    return min(MAX_STEP_SCALE, (1.0 - momentum) / (1.0 - base))


# ---------------------------------------------------------------- interval controller (3.1, A.1 to
# A.3)


@dataclass(frozen=True)
class Observation:
    """What one completed interval measured, reduced over all workers.

    Args:
        drift: D_t; not finite or not above 0 counts as non-finite.
        coherence: C_t; slightly above 1 is possible under quantisation.
        exposure: Lambda_t, measured.
        tokens: non-padding tokens of all workers.
    """

    drift: float
    coherence: float
    exposure: float
    tokens: int

    @property
    def finite(self) -> bool:
        """Whether the controller can read the interval."""
        values = (self.drift, self.coherence, self.exposure)
        return all(math.isfinite(value) and value > 0 for value in values)


@dataclass(frozen=True)
class Profile:
    """The accepted horizon's reference: D_ref, C_ref and the exposure Lambda_ref that they belong
    to.
    """

    drift: float
    coherence: float
    exposure: float

    def moved(self, exposure: float) -> Profile:
        """Follow the schedule to the latest accepted interval's exposure.

            Lambda_ref <- Lambda;  D_ref <- D_ref (Lambda / Lambda_ref)^2               A.1, A8

        so that a pure learning-rate decay leaves r_D where it was: the two moves cancel in it.
        """
        return Profile(self.drift * (exposure / self.exposure) ** 2, self.coherence, exposure)


@dataclass(frozen=True)
class Controller:
    """State of the interval controller.

    Args:
        phase: warmup, reference, variability, monitor or candidate.
        accepted: the accepted horizon, reference steps.
        horizon: the next interval's horizon: `accepted`, or a candidate above it.
        seen: intervals that the phase has taken in.
        initial: whether the profile is the run's first, which takes two reference intervals.
        pending: observations that the reference is being estimated from.
        profile: the accepted reference; None until it is estimated.
        drift_history: residuals r_D of up to 16 normal intervals.
        coherence_history: the same for r_C.
        moderate: whether the interval before was a first moderate one.
        nonfinite: whether the interval before reduced the horizon as non-finite.
        bound: rejected horizon and the exposure measured when it was rejected; None if there is
            none.
    """

    phase: str
    accepted: int
    horizon: int
    seen: int = 0
    initial: bool = True
    pending: tuple[Observation, ...] = ()
    profile: Profile | None = None
    drift_history: tuple[float, ...] = ()
    coherence_history: tuple[float, ...] = ()
    moderate: bool = False
    nonfinite: bool = False
    bound: tuple[int, float] | None = None


@dataclass(frozen=True)
class Decision:
    """What the controller made of one interval: the log's columns from `phase` to `reason`, and the
    residuals.

    Args:
        phase: the phase that the interval was executed in; `fixed` where no controller decides.
        verdict: one of VERDICTS; None where nothing was judged.
        next_horizon: horizon of the next interval; None after the last.
        reason: the branch taken, in words.
        residual_drift: r_D, None where there is no reference or no finite statistic.
        residual_coherence: r_C, likewise.
        z: the larger robust z; None where nothing was judged.
    """

    phase: str
    verdict: str | None
    next_horizon: int | None
    reason: str
    residual_drift: float | None = None
    residual_coherence: float | None = None
    z: float | None = None


Preview = Callable[[int], tuple[int, float]]
"""Horizon -> (executable steps, exposure) from the scheduler position where the next interval
starts.
"""


def residuals(profile: Profile, observation: Observation) -> tuple[float, float]:
    """Deviation from the accepted reference in log units; positive is worse.

        r_D = ln(D_t / D_ref) - 2 ln(Lambda_t / Lambda_ref)                             A.1, A7
        r_C = ln(C_ref / C_t)

    Displacement grows with the exposure (C.2), energy with its square.

    Args:
        profile: the accepted reference.
        observation: a finite interval.
    Returns:
        (r_D, r_C).
    """
    # Differences of logarithms: a quotient could overflow where each statistic is finite.
    work = math.log(observation.exposure) - math.log(profile.exposure)
    r_drift = math.log(observation.drift) - math.log(profile.drift) - 2.0 * work
    return r_drift, math.log(profile.coherence) - math.log(observation.coherence)


def robust_z(residual: float, history: tuple[float, ...]) -> float:
    """Distance of a residual from the history's centre in robust sigmas.

        centre = median(history);  scale = max(0.10, 1.4826 median |r - centre|)        A.1, A10
        z = (r - centre) / scale

    Args:
        residual: r, log units.
        history: at least one earlier residual of the same family.
    Returns:
        z; positive is worse.

    >>> round(robust_z(0.5, (0.0, 0.1, 0.2, 0.4)), 5)
    2.36072
    """
    # statistics.median averages the two middle values; torch.median would take the lower one.
    centre = statistics.median(history)
    spread = statistics.median(abs(value - centre) for value in history)
    return (residual - centre) / max(SCALE_FLOOR, MAD_TO_SIGMA * spread)


def judge(z: float) -> str:
    """Verdict of a z score (A11): severe from 6, moderate from 3, consistent above 1, else
    supports.

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

    Integer arithmetic: h/1.50 = 2h/3 and h/1.20 = 5h/6, so no quotient falls below its multiple by
    rounding.

    >>> rules = Rules(50_000, 4e-4, 0, 500, 350, 750, 50, 0.9)
    >>> [reduced_horizon(rules, h, severe=False) for h in (500, 600, 350)]
    [400, 500, 350]
    >>> [reduced_horizon(rules, h, severe=True) for h in (750, 600, 500)]
    [500, 400, 350]
    """
    numerator, denominator = (2, 3) if severe else (5, 6)
    multiples = numerator * horizon // (denominator * rules.granularity)
    return max(rules.min_horizon, multiples * rules.granularity)


def propose(
    rules: Rules, state: Controller, observed: float, preview: Preview, steps_left: int
) -> tuple[Controller, str]:
    """Choose the next interval's horizon after one that does not deviate (A.2).

    A rejected bound retires when the preview of its horizon is <= 0.90 of its recorded exposure.
    The candidate is the longest admissible horizon above the accepted one that fits in the run and
    whose previewed exposure is <= 1.15 x the exposure measured in the interval just completed;
    while a bound is active, the one strictly between accepted and bound that is nearest to their
    geometric midpoint, within the same cap (A21).

    Args:
        rules: the run's constants.
        state: a `monitor` state.
        observed: measured exposure of the interval just completed.
        preview: from the next interval's start.
        steps_left: steps of the run from there.
    Returns:
        The state with the next horizon, and the branch in words.
    """
    words = ""
    if state.bound is not None and preview(state.bound[0])[1] <= BOUND_RETIRES * state.bound[1]:
        words = f"bound {state.bound[0]} retired; "
        state = replace(state, bound=None)
    above = rules.max_horizon + 1 if state.bound is None else state.bound[0]
    accepted_steps = preview(state.accepted)[0]
    cap = EXPOSURE_CAP * (1.0 + 1e-9) * observed  # in floats 1.15 * 100 < 115
    admissible = []
    for horizon in range(state.accepted + rules.granularity, above, rules.granularity):
        steps, previewed = preview(horizon)
        if accepted_steps < steps <= steps_left and previewed <= cap:
            admissible.append(horizon)
    if not admissible:
        return state, f"{words}no longer horizon is admissible, stay at {state.accepted}"
    if state.bound is None:
        chosen = admissible[-1]
    else:
        midpoint = math.sqrt(state.accepted * state.bound[0])
        chosen = min(admissible, key=lambda horizon: abs(horizon - midpoint))
        words += f"below bound {state.bound[0]}: "
    return replace(state, phase="candidate", horizon=chosen, seen=0), f"{words}try {chosen}"


def _re_estimate(state: Controller, horizon: int, nonfinite: bool = False) -> Controller:
    """Accept `horizon` and estimate its profile anew, with empty histories (A.3, A9)."""
    return Controller(
        "reference", horizon, horizon, initial=False, nonfinite=nonfinite, bound=state.bound
    )


def _reduce_nonfinite(rules: Rules, state: Controller) -> tuple[Controller, str]:
    """Non-finite statistics: reduce by 1.50; a second time in a row, down to H_min (A.2, A13)."""
    if state.nonfinite:
        horizon, words = rules.min_horizon, "non-finite again, fall back to"
    else:
        horizon = reduced_horizon(rules, state.accepted, severe=True)
        words = "non-finite, reduce by 1.50 to"
    return _re_estimate(state, horizon, nonfinite=True), f"{words} {horizon}"


def _take_in(
    state: Controller, observation: Observation, r_drift: float, r_coherence: float
) -> Controller:
    """Let a normal interval into the histories and move the reference to its exposure (A.1)."""
    assert state.profile is not None
    return replace(
        state,
        profile=state.profile.moved(observation.exposure),
        drift_history=(*state.drift_history, r_drift)[-HISTORY:],
        coherence_history=(*state.coherence_history, r_coherence)[-HISTORY:],
        moderate=False,
    )


def _estimate(observations: tuple[Observation, ...]) -> Profile:
    """Geometric means of the reference intervals (A.1), moved to the last one's exposure (A8)."""
    mean = Profile(
        statistics.geometric_mean(o.drift for o in observations),
        statistics.geometric_mean(o.coherence for o in observations),
        statistics.geometric_mean(o.exposure for o in observations),
    )
    return mean.moved(observations[-1].exposure)


def decide(
    rules: Rules,
    state: Controller,
    observation: Observation,
    preview: Preview,
    steps_left: int,
    verdict: str | None = None,
) -> tuple[Controller, Decision]:
    """One completed interval in, the next horizon out: the interval controller (3.1, A.1, A.2,
    A.3).

    Args:
        rules: the run's constants.
        state: before the interval's statistics are read.
        observation: the completed interval.
        preview: horizon -> (steps, exposure) from the end of the interval.
        steps_left: steps of the run from there; at 0 nothing is decided.
        verdict: replaces the judgement of this interval, for "what if" questions.
    Returns:
        The state after, and the decision with its branch in words.
    """
    assert verdict is None or verdict in VERDICTS, f"unknown verdict {verdict}"
    phase, finite = state.phase, observation.finite and verdict != "nonfinite"
    r_drift = r_coherence = z = None
    if finite and state.profile is not None:
        r_drift, r_coherence = residuals(state.profile, observation)
    if phase not in ("monitor", "candidate") or steps_left == 0:
        verdict = None
    elif not finite:
        verdict = "nonfinite"
    else:
        assert r_drift is not None and r_coherence is not None
        z = max(
            robust_z(r_drift, state.drift_history),
            robust_z(r_coherence, state.coherence_history),
        )
        verdict = verdict or judge(z)

    if steps_left == 0:
        words = "the run ends here, nothing to decide"
    elif phase == "warmup":
        state, words = _after_warmup(rules, state)
    elif phase == "reference":
        state, words = _after_reference(rules, state, observation, finite)
    elif phase == "variability":
        if finite:
            assert r_drift is not None and r_coherence is not None
            state = _take_in(state, observation, r_drift, r_coherence)
            done = state.seen + 1
            words = f"variability {done} of {VARIABILITY_INTERVALS}"
            last = done == VARIABILITY_INTERVALS
            state = replace(state, phase="monitor" if last else phase, seen=0 if last else done)
        else:
            state, words = _reduce_nonfinite(rules, state)
    elif phase == "monitor":
        state, words = _after_monitor(
            rules, state, observation, verdict, r_drift, r_coherence, preview, steps_left
        )
    else:
        state, words = _after_candidate(state, observation, verdict)
    following = state.horizon if steps_left else None
    return state, Decision(phase, verdict, following, words, r_drift, r_coherence, z)


def _after_warmup(rules: Rules, state: Controller) -> tuple[Controller, str]:
    """Nothing is judged while the inner rate warms up; non-finite statistics are ignored (A.1)."""
    done, total = state.seen + 1, rules.warmup_intervals
    phase = "reference" if done >= total else "warmup"
    return replace(
        state, phase=phase, seen=0 if done >= total else done
    ), f"warm-up {done} of {total}"


def _after_reference(
    rules: Rules, state: Controller, observation: Observation, finite: bool
) -> tuple[Controller, str]:
    """Estimate the reference (A.1); only a re-estimate reduces on a non-finite interval (A.2)."""
    if not finite and state.initial:
        return state, "reference: non-finite, does not count"
    if not finite:
        return _reduce_nonfinite(rules, state)
    pending = (*state.pending, observation)
    needed = REFERENCE_INTERVALS if state.initial else 1
    words = f"reference {len(pending)} of {needed}"
    if len(pending) < needed:
        return replace(state, pending=pending), words
    profile = _estimate(pending)
    return replace(state, phase="variability", profile=profile, pending=(), nonfinite=False), words


def _after_monitor(
    rules: Rules,
    state: Controller,
    observation: Observation,
    verdict: str | None,
    r_drift: float | None,
    r_coherence: float | None,
    preview: Preview,
    steps_left: int,
) -> tuple[Controller, str]:
    """Monitor the accepted horizon: reduce, hold, or propose a longer one (A.2)."""
    if verdict == "nonfinite":
        return _reduce_nonfinite(rules, state)
    if verdict == "severe":
        horizon = reduced_horizon(rules, state.accepted, severe=True)
        return _re_estimate(state, horizon), f"severe deviation, reduce by 1.50 to {horizon}"
    if verdict == "moderate" and state.moderate:  # A12: two in a row
        horizon = reduced_horizon(rules, state.accepted, severe=False)
        return _re_estimate(state, horizon), f"second moderate, reduce by 1.20 to {horizon}"
    if verdict == "moderate":
        return replace(state, moderate=True), f"first moderate, hold {state.accepted}"
    assert r_drift is not None and r_coherence is not None
    state = _take_in(state, observation, r_drift, r_coherence)
    state, words = propose(rules, state, observation.exposure, preview, steps_left)
    return state, f"{verdict}: {words}"


def _after_candidate(
    state: Controller, observation: Observation, verdict: str | None
) -> tuple[Controller, str]:
    """Test a longer horizon against the accepted profile: adopt, confirm, or reject (A.2)."""
    confirmed = state.seen == 1
    if verdict == "supports" or (verdict == "consistent" and confirmed):
        # The adopting interval itself initialises the new reference: only so is the remainder 250.
        adopted = Controller(
            "variability",
            state.horizon,
            state.horizon,
            initial=False,
            profile=_estimate((observation,)),
            bound=state.bound,
        )
        return adopted, f"{verdict}: adopt {state.horizon}" + (", confirmed" if confirmed else "")
    if verdict == "consistent":
        return replace(state, seen=1), f"consistent: one more interval at {state.horizon}"
    bound = (state.horizon, observation.exposure)
    back = _re_estimate(replace(state, bound=bound), state.accepted)
    return back, f"{verdict}: reject {state.horizon}, return to {state.accepted}"


# ---------------------------------------------------------------- one interval (B.5)


@dataclass(frozen=True)
class State:
    """Everything that the plan of the next interval depends on: scheduler position, mapper,
    controller.
    """

    step: int
    interval: int
    mapper: Mapper
    controller: Controller


@dataclass(frozen=True)
class Plan:
    """One interval before it runs: how long, and how its outer update is corrected (B.5, first
    half).

    Args:
        interval: t, from 1.
        step: s_t, scheduler position of its first step.
        steps: H_t, executed local steps.
        horizon: h, token-equivalent; for fixed schedules the steps themselves.
        accepted: the accepted horizon at this time.
        base_exposure: Lambda(s_t, H_base_t), the scheduler-aligned comparator.
        interval_ratio: rho_t.
        divisor: of the mean pseudo-gradient (B.3); 1 without normalisation.
        momentum: mu_t.
        step_scale: kappa_t.
    """

    interval: int
    step: int
    steps: int
    horizon: int
    accepted: int
    base_exposure: float
    interval_ratio: float
    divisor: float
    momentum: float
    step_scale: float


def state_from_dict(values: Mapping[str, Any]) -> State:
    """Inverse of `dataclasses.asdict` on a State that went through JSON.

    Args:
        values: the dictionary.
    Returns:
        The state, equal to the saved one.
    """
    mapper, controller = dict(values["mapper"]), dict(values["controller"])
    mapper["counts"] = tuple(mapper["counts"])
    controller["pending"] = tuple(Observation(**each) for each in controller["pending"])
    if controller["profile"] is not None:
        controller["profile"] = Profile(**controller["profile"])
    for name in ("drift_history", "coherence_history", "bound"):
        if controller[name] is not None:
            controller[name] = tuple(controller[name])
    return State(values["step"], values["interval"], Mapper(**mapper), Controller(**controller))


def start(rules: Rules) -> State:
    """The state before the first interval."""
    phase = "warmup" if rules.warmup_intervals else "reference"
    horizon = rules.base_horizon
    return State(0, 0, Mapper(), Controller(phase, horizon, horizon))


def plan(rules: Rules, state: State) -> Plan:
    """Before an interval (B.5): map the horizon to steps, set the outer correction (B.2 to B.4).

    Args:
        rules: the run's constants.
        state: before the interval; at least one step is left.
    Returns:
        The interval's plan. At rho_t = 1 it is DiLoCo's: divisor 1, mu_0, kappa 1 (D.2).
    """
    left = rules.steps - state.step
    assert left > 0, "the run is over"
    if rules.sequence is not None:
        steps = rules.sequence[state.interval]
        horizon, accepted, base_steps = steps, steps, rules.base_horizon
        if rules.corrected:  # the comparator is the base token interval
            base_steps = map_horizon(rules, state.mapper, rules.base_horizon)
    else:
        horizon, accepted = state.controller.horizon, state.controller.accepted
        steps = min(map_horizon(rules, state.mapper, horizon), left)
        base_steps = map_horizon(rules, state.mapper, rules.base_horizon)
    base = exposure(rules, state.step, base_steps)
    ratio = interval_ratio(exposure(rules, state.step, steps), base)
    mu = rules.outer_momentum
    if rules.adjust_momentum:
        mu = momentum_retention(rules.outer_momentum, ratio)
    return Plan(
        interval=state.interval + 1,
        step=state.step,
        steps=steps,
        horizon=horizon,
        accepted=accepted,
        base_exposure=base,
        interval_ratio=ratio,
        divisor=normaliser(ratio) if rules.normalise else 1.0,
        momentum=mu,
        step_scale=step_scale(mu, rules.outer_momentum) if rules.scale_step else 1.0,
    )


def complete(
    rules: Rules, state: State, planned: Plan, observation: Observation, verdict: str | None = None
) -> tuple[State, Decision]:
    """Take in the completed interval: mapper first, then the controller chooses the next horizon
    (A.3, B.5).

    Args:
        rules: the run's constants.
        state: the state that `planned` was made from.
        planned: the executed interval.
        observation: what it measured.
        verdict: replaces the controller's judgement, for "what if" questions.
    Returns:
        The state of the next interval, and the decision.
    """
    step = planned.step + planned.steps
    mapper = update_mapper(rules, state.mapper, planned.horizon, planned.steps, observation.tokens)
    if rules.sequence is not None:
        following = rules.sequence[planned.interval] if step < rules.steps else None
        decision = Decision("fixed", None, following, "fixed schedule")
        return State(step, planned.interval, mapper, state.controller), decision

    def preview(horizon: int) -> tuple[int, float]:
        steps = map_horizon(rules, mapper, horizon)
        return steps, exposure(rules, step, steps)

    controller, decision = decide(
        rules, state.controller, observation, preview, rules.steps - step, verdict
    )
    return State(step, planned.interval, mapper, controller), decision


def simulate(
    rules: Rules, verdicts: Mapping[int, str] | None = None
) -> Iterator[tuple[Plan, Decision]]:
    """Walk through a run in which every interval shows normal statistics: the schedule that a dry
    run prints.

    Drift goes with the square of the exposure and coherence and token density stay constant, so
    every residual is 0 and every judged interval supports an increase.

    Args:
        rules: the run's constants.
        verdicts: interval (from 1) -> verdict that replaces the judgement of that interval.
    Yields:
        The plan and the decision of each interval.
    """
    state = start(rules)
    while state.step < rules.steps:
        planned = plan(rules, state)
        work = exposure(rules, planned.step, planned.steps)
        observation = Observation(work * work, 0.5, work, planned.steps)
        verdict = (verdicts or {}).get(planned.interval)
        state, decision = complete(rules, state, planned, observation, verdict)
        yield planned, decision


# ---------------------------------------------------------------- the log of a run, and its replay


def rules_from_dict(values: Mapping[str, Any]) -> Rules:
    """Rules from the header line of `intervals.jsonl`.

    Args:
        values: the header's `rules` object.
    Returns:
        The run's constants.
    Raises:
        ValueError: a missing, unknown or impossible value.
    """
    known = {field.name for field in fields(Rules)}
    if set(values) != known:
        raise ValueError(f"rules: exactly {', '.join(sorted(known))} are needed")
    try:
        sequence = None if values["sequence"] is None else tuple(values["sequence"])
        return Rules(**{**values, "sequence": sequence})
    except TypeError as error:
        raise ValueError(f"rules: a value of the wrong type ({error})") from None


def record(
    planned: Plan, observation: Observation, mapper: Mapper, decision: Decision
) -> dict[str, Any]:
    """The scalars of one interval as a log line holds them: read by the controller, decided,
    corrected.

    Args:
        planned: the plan.
        observation: the measurement; a non-finite number is null, with `finite` false.
        mapper: after the interval.
        decision: the decision.
    Returns:
        A JSON-ready dictionary, the log's columns in order.
    """
    measured = {
        name: value if math.isfinite(value) else None for name, value in asdict(observation).items()
    }
    return {
        "interval": planned.interval,
        "step": planned.step + planned.steps,  # completed steps
        "steps": planned.steps,
        "horizon": planned.horizon,
        "accepted": planned.accepted,
        "phase": decision.phase,
        "verdict": decision.verdict,
        "next_horizon": decision.next_horizon,
        "reason": decision.reason,
        "drift": measured["drift"],
        "coherence": measured["coherence"],
        "exposure": measured["exposure"],
        "base_exposure": planned.base_exposure,
        "tokens": observation.tokens,
        "tokens_per_step": mapper.tokens_per_step,
        "residual_drift": decision.residual_drift,
        "residual_coherence": decision.residual_coherence,
        "z": decision.z,
        "interval_ratio": planned.interval_ratio,
        "momentum": planned.momentum,
        "step_scale": planned.step_scale,
        "finite": observation.finite,
    }


def header(rules: Rules, **about: Any) -> dict[str, Any]:
    """First line of `intervals.jsonl`: all that a replay needs.

    Args:
        rules: the run's constants.
        **about: recipe, method and what else identifies the run.
    Returns:
        A JSON-ready dictionary; with the controller's own constants, so that a log that was written
        under other thresholds is not called wrong.
    """
    return about | {"rules": asdict(rules), "constants": CONSTANTS}


def _same(logged: Any, expected: Any) -> bool:
    """Equal; floats within 1e-12, since libraries differ in the last digit of cos, log and pow."""
    if isinstance(expected, float) and isinstance(logged, int | float):
        return math.isclose(logged, expected, rel_tol=1e-12, abs_tol=1e-12)
    return bool(logged == expected)


def replay(rules: Rules, records: Iterable[Mapping[str, Any]]) -> State:
    """Take every decision of a recorded run again, from the logged measurements alone.

    Args:
        rules: from the first line of `intervals.jsonl`.
        records: the following lines.
    Returns:
        The state after the last record.
    Raises:
        ValueError: at the first line whose plan or decision differs, saying how; or a damaged line.
    """
    state, count = start(rules), 0
    for logged in records:
        where = f"line {count + 2}"
        if state.step >= rules.steps:
            raise ValueError(f"{where}: the run was over at step {rules.steps}")
        try:
            drift, coherence, work = (
                math.nan if logged[name] is None else float(logged[name])
                for name in ("drift", "coherence", "exposure")
            )
            observation = Observation(drift, coherence, work, int(logged["tokens"]))
            if observation.tokens < 1:
                raise ValueError("no tokens")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}: damaged measurement ({error})") from None
        planned = plan(rules, state)
        state, decision = complete(rules, state, planned, observation)
        expected = record(planned, observation, state.mapper, decision)
        if expected["exposure"] is not None:
            expected["exposure"] = exposure(rules, planned.step, planned.steps)
        for name, value in expected.items():
            if name not in logged or not _same(logged[name], value):
                raise ValueError(
                    f"{where}: interval {planned.interval}: {name} is {logged.get(name)!r} "
                    f"in the log, the rule gives {value!r}"
                )
        count += 1
    return state


def read_log(path: str) -> tuple[Rules, list[dict[str, Any]], str | None]:
    """Read a JSON-lines log with a header.

    Args:
        path: an `intervals.jsonl`.
    Returns:
        The run's rules, the records, and a warning if a torn last line was dropped.
    Raises:
        ValueError: no file, or a damaged line; the message names the file and the line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    torn = lines.pop()  # a complete file ends with a newline
    warning = f"{path}: the torn last line was dropped" if torn else None
    values = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}: line {number} is not JSON") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}: line {number} is not a JSON object")
        values.append(value)
    if not values or not isinstance(values[0].get("rules"), dict):
        raise ValueError(f"{path}: line 1 is no header with the run's rules")
    for name, value in CONSTANTS.items():
        if values[0].get("constants", {}).get(name) != value:
            raise ValueError(f"{path}: line 1: written with another {name} than {value}")
    try:
        rules = rules_from_dict(values[0]["rules"])
    except ValueError as error:
        raise ValueError(f"{path}: line 1: {error}") from None
    return rules, values[1:], warning


def main(argv: list[str]) -> int:
    """Replay a log: exit 0 and a count, 1 at the first difference, 2 on misuse."""
    if len(argv) != 2 or argv[0] != "replay":
        print("usage: python autoloco.py replay RUN/intervals.jsonl", file=sys.stderr)
        return 2
    try:
        rules, records, warning = read_log(argv[1])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if warning:
        print(warning, file=sys.stderr)
    try:
        state = replay(rules, records)
    except ValueError as error:
        print(f"{argv[1]}: {error}", file=sys.stderr)
        return 1
    print(
        f"{state.interval} intervals replayed up to step {state.step} of {rules.steps}, "
        "every decision is the rule's"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
