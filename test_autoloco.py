"""Tests in the paper's order: rules, workers, codecs, data, model, runs, evaluation, README.

A test is a claim; `# Sabotage:` says what to break in the program to see it go red.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import gzip
import importlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoloco
import data
import diloco
import eval as evaluation
import model
import quant
import train
from experiments import bench
from experiments import run as experiments
from model import IGNORE
from quant import BLOCK, CODECS, SLAB, Chunk, chunks, payload_bytes

# =================================================================================================
# The rules: inner rate, mapper, correction, controller, schedules, replay (A, B)
# =================================================================================================

C4 = autoloco.Rules(50_000, 4e-4, 1000, 500)
SFT_RULES = autoloco.Rules(6490, 1e-5, 200, 100)
TINY_RULES = autoloco.Rules(2000, 1e-3, 40, 20)
WIDE = replace(C4, min_horizon=50)  # 1.50 and H_min are told apart
CALM = replace(C4, max_horizon=500)  # nothing to propose
NORMALISED = replace(C4, normalise=True)

# A deviation in units of the floor sigma; with a history of zeros it is the z score itself.
LOCO_SIGMAS = dict(supports=0.5, consistent=2.0, moderate=4.0, severe=7.0, nonfinite=math.nan)
LOCO_WORSE = ("moderate", "severe", "nonfinite")


class LocoRow(NamedTuple):
    """One driven interval: its plan, measurement, decision, and the state after it."""

    plan: autoloco.Plan
    seen: autoloco.Observation
    decision: autoloco.Decision
    state: autoloco.State

    @property
    def after(self) -> autoloco.Controller:
        return self.state.controller


def loco_trace(trace: str) -> dict[int, str]:
    """Interval -> verdict of `moderate@9 severe@14`."""
    return {int(t.split("@")[1]): t.split("@")[0] for t in trace.split()}


def loco_drive(
    rules, trace="", stop=None, family="", sigmas=lambda t: 0, density=lambda t: 100, state=None
):
    """Run the loop of B.5 on made-up statistics: D = Lambda^2 exp(x / 10), C = exp(-x / 10) / 2.

    The intervals of `trace` deviate by what their verdict needs.
    """
    bad = {interval: LOCO_SIGMAS[verdict] for interval, verdict in loco_trace(trace).items()}
    state, rows = state or autoloco.start(rules), list[LocoRow]()
    while state.step < rules.steps and len(rows) != stop:
        planned = autoloco.plan(rules, state)
        x = bad.get(planned.interval, sigmas(planned.interval))
        lam = math.fsum(autoloco.inner_lr(rules, planned.step + i) for i in range(planned.steps))
        seen = autoloco.Observation(
            drift=lam**2 * math.exp(x / 10 if family != "coherence" else 0.0),
            coherence=0.5 * math.exp(-x / 10 if family != "drift" else 0.0),
            exposure=lam,
            tokens=planned.steps * density(planned.interval),
        )
        state, decision = autoloco.complete(rules, state, planned, seen)
        rows.append(LocoRow(planned, seen, decision, state))
    return rows


def loco_runs(steps: Iterable[int]) -> str:
    """`8x500 5x550 250`."""
    groups = [(len(list(same)), value) for value, same in itertools.groupby(steps)]
    return " ".join(f"{n}x{value}" if n > 1 else str(value) for n, value in groups)


def loco_rate(rules: autoloco.Rules, step: int) -> float:
    """The inner learning rate, written down once more."""
    if step >= rules.steps:
        return 0.0
    if step < rules.warmup:
        return (step + 1) * rules.lr / rules.warmup
    p = (step - rules.warmup) / (rules.steps - rules.warmup)
    return rules.lr * math.cos(math.pi * p / 2) ** 2  # the half-angle form of (1 + cos) / 2


def loco_work(rules: autoloco.Rules, step: int, steps: int) -> float:
    """Exposure as the plain sum of `loco_rate`."""
    return sum(loco_rate(rules, s) for s in range(step, step + steps))


# ---------------------------------------------------------------- inner rate and exposure (B.2)


# Sabotage: inner_lr takes s / w instead of (s + 1) / w; the cosine counts from step 0.
@pytest.mark.parametrize("warmup, step, share", [
    (1000, 0, 1 / 1000), (1000, 499, 1 / 2), (1000, 999, 1), (1000, 1000, 1),
    (1000, 13_250, (2 + math.sqrt(2)) / 4), (1000, 25_500, 1 / 2),
    (1000, 37_750, (2 - math.sqrt(2)) / 4), (1000, 50_000, 0), (1000, 50_001, 0), (0, 0, 1),
    (100_000, 49_999, 1 / 2), (100_000, 50_000, 0),
])  # fmt: skip
def test_the_rate_is_a_line_to_the_maximum_then_a_cosine_and_zero_from_the_end(warmup, step, share):
    got = autoloco.inner_lr(replace(C4, warmup=warmup), step)
    assert got == pytest.approx(4e-4 * share, rel=1e-12)


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 300), st.integers(0, 400), st.integers(0, 320), st.integers(0, 320))
def test_exposure_is_the_plain_sum_and_nothing_comes_after_the_end(steps, warmup, start, count):
    rules = autoloco.Rules(steps, 1e-3, warmup, 10)
    assert autoloco.exposure(rules, start, count) == pytest.approx(
        loco_work(rules, start, count), rel=1e-9
    )


# ---------------------------------------------------------------- token mapper (A.3)


LOCO_BASE, LOCO_LONG = (500, 500, 50_000), (550, 550, 110_000)


# Sabotage: TOKEN_RETENTION weighs the new density; base_tokens is the mean; intervals of any
# horizon, remainders or a fourth interval calibrate.
@pytest.mark.parametrize("intervals, base_tokens, density", [
    ([LOCO_BASE], None, 100), ([LOCO_BASE, LOCO_LONG], None, 110),
    ([LOCO_BASE, (500, 500, 90_000)], None, 108),
    ([LOCO_BASE, (500, 500, 52_000), (500, 500, 51_000)], 51_000, 100.56),
    ([LOCO_BASE, (500, 500, 90_000), (500, 500, 60_000)], 60_000, 109.2),
    ([LOCO_BASE, (500, 250, 25_000), (500, 500, 52_000), LOCO_LONG], None, 110.36),
    ([LOCO_BASE, LOCO_LONG, LOCO_LONG, LOCO_BASE, LOCO_BASE, (500, 500, 90_000)], 50_000, 121.851),
])  # fmt: skip
def test_three_recipe_intervals_calibrate_and_a_new_density_weighs_a_tenth(
    intervals, base_tokens, density
):
    mapper = autoloco.Mapper()
    for interval in intervals:
        mapper = autoloco.update_mapper(C4, mapper, *interval)
    assert mapper.base_tokens == base_tokens
    assert mapper.tokens_per_step == pytest.approx(density, rel=1e-12)
    if base_tokens is None:
        assert [autoloco.map_horizon(C4, mapper, h) for h in (350, 500, 750)] == [350, 500, 750]


# Sabotage: map_horizon rounds down; it has no lower limit of one granule; it caps at H_max.
def test_a_horizon_maps_to_the_nearest_granule():
    for base_tokens, density, horizon, steps in (
        (51_000, 100.56, 550, 550),  # 56,100 / 5,028 = 11.16 granules
        (50_000, 105.3, 500, 450),  # 9.497
        (50_000, 105.3, 750, 700),  # 14.245
        (52_500, 100.0, 500, 550),  # 10.5: half a granule rounds up, not to the even
        (50_000, 1e9, 350, 50),  # at least one granule
        (50_000, 93.75, 750, 800),  # 16: H_max bounds tokens and not steps
    ):
        mapper = autoloco.Mapper((base_tokens,) * 3, density)
        assert autoloco.map_horizon(C4, mapper, horizon) == steps


# ---------------------------------------------------------------- outer correction (B.2 to B.4)


# Sabotage: interval_ratio is not held at 1 below the base; normaliser adds epsilon at ratio 1.
def test_ratio_is_one_up_to_the_base_exposure_and_the_normaliser_jumps_above_it():
    ratios = [autoloco.interval_ratio(work, 2.0) for work in (1.0, 2.0, 3.0)]
    assert ratios == [1.0, 1.0, 1.5]
    above = math.nextafter(1.0, 2.0)
    expected = [1.0, above + 1e-12, 1.5 + 1e-12]
    assert [autoloco.normaliser(rho) for rho in (1.0, above, 1.5)] == expected


# Sabotage: plan takes the base comparator from step 0, or H_base steps of it at any density.
@pytest.mark.parametrize("step, horizon, density, steps, base, ratio", [
    (4000, 550, 100.0, 550, 500, 1.09981), (13_000, 750, 100.0, 750, 500, 1.494968),
    (13_000, 750, 105.3, 700, 450, 1.550352), (49_750, 750, 100.0, 250, 500, 1.0),
])  # fmt: skip
def test_interval_ratios_are_the_published_ones(step, horizon, density, steps, base, ratio):
    mapper = autoloco.Mapper((50_000,) * 3, density)
    controller = autoloco.Controller(horizon, horizon)
    planned = autoloco.plan(C4, autoloco.State(step, 23, mapper, controller))
    assert planned.steps == steps
    assert planned.base_exposure == pytest.approx(loco_work(C4, step, base), rel=1e-10)
    again = max(1, loco_work(C4, step, steps) / loco_work(C4, step, base))
    assert planned.interval_ratio == pytest.approx(again, rel=1e-10)
    assert planned.interval_ratio == pytest.approx(ratio, abs=5e-6)


# Sabotage: mu_0 ** (1 / rho); kappa without rho; the inverse quotient; no bound.
@pytest.mark.parametrize("base, ratio, mu, kappa, unbounded", [
    (0.9, 1.1, 0.890567, 1.203759, 1.203759), (0.9, 1.5, 0.853815, 2.0, 2.192775),
    (0.7, 1.2, 0.651805, 1.392780, 1.392780), (0.7, 1.5, 0.585662, 2.0, 2.071690),
    (0.0, 1.5, 0.0, 1.5, 1.5), (0.9, 2.0, 0.81, 2.0, 3.8),
])  # fmt: skip
def test_momentum_and_scale_have_the_values_worked_by_hand(base, ratio, mu, kappa, unbounded):
    got = autoloco.momentum_retention(base, ratio)
    assert got == pytest.approx(mu, abs=5e-7)
    assert autoloco.step_scale(got, base, ratio, 2.0) == pytest.approx(kappa, abs=5e-7)
    assert autoloco.step_scale(got, base, ratio, math.inf) == pytest.approx(unbounded, abs=5e-7)


def test_a_long_interval_moves_a_constant_input_like_as_many_base_intervals():
    rho, mu = 1.3, 0.9**1.3
    # A normalised pseudo-gradient is one base interval's; its steady step is kappa / (1 - mu).
    steady = autoloco.step_scale(mu, 0.9, rho, 2.0) / (1 - mu)
    assert steady == pytest.approx(rho / (1 - 0.9), rel=1e-14)


# Sabotage: normalisation hangs on the momentum switch; max_step_scale is not read.
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("scale, most", [(False, 2.0), (True, 1.25), (True, 2.0), (True, 4.0)])
def test_the_switches_are_independent_and_the_bound_is_the_rules(normalise, momentum, scale, most):
    switches = {"normalise": normalise, "adjust_momentum": momentum, "scale_step": scale}
    rules = replace(C4, **switches, max_step_scale=most)
    state = autoloco.State(13_000, 23, autoloco.Mapper(), autoloco.Controller(750, 750))
    planned = autoloco.plan(rules, state)
    rho = planned.interval_ratio
    mu = 0.9**rho if momentum else 0.9
    kappa = min(most, rho * (1 - mu) / (1 - 0.9)) if scale else 1.0
    assert planned.divisor == (rho + 1e-12 if normalise else 1.0)
    assert (planned.momentum, planned.step_scale) == (mu, pytest.approx(kappa))


def test_at_the_base_horizon_in_a_remainder_and_on_one_horizon_the_plan_is_exactly_dilocos():
    rows, one = loco_drive(NORMALISED), replace(NORMALISED, min_horizon=500, max_horizon=500)
    only = loco_drive(one, "severe@20 nonfinite@33")
    assert loco_runs(row.plan.steps for row in only) == "100x500"
    for planned in (row.plan for row in [*rows[:8], rows[-1], *only]):
        assert (planned.interval_ratio, planned.divisor) == (1.0, 1.0)
        assert (planned.momentum, planned.step_scale) == (0.9, 1.0)


# ---------------------------------------------------------------- residuals and verdicts (A.1, A.2)


# Sabotage: r_D without the factor 2; the sign of r_C flipped; arithmetic means.
@pytest.mark.parametrize("reference, seen, expected", [
    ([(2.0, 0.5, 3.0)], (16.0, 0.25, 6.0), (math.log(2), math.log(2))),  # ln 8 - 2 ln 2
    ([(1.0, 0.5, 1.0)], (2.0, 0.5, 1.0), (math.log(2), 0.0)),  # more drift is worse
    ([(1.0, 0.5, 1.0)], (1.0, 0.4, 1.0), (0.0, math.log(1.25))),  # less coherence is worse
    ([(1.0, 0.5, 1.0)], (4.0, 0.5, 2.0), (0.0, 0.0)),  # twice the exposure, four times the drift
    ([(1.0, 0.1, 1.0), (4.0, 0.9, 1.0)], (2.0, 0.3, 1.0), (0.0, 0.0)),  # geometric means
])  # fmt: skip
def test_residuals_have_the_values_worked_by_hand(reference, seen, expected):
    levels = tuple(autoloco.level(autoloco.Observation(*one, 1)) for one in reference)
    got = autoloco.residuals(levels, autoloco.Observation(*seen, 1))
    assert got == pytest.approx(expected, abs=1e-12)


# Sabotage: robust_z takes the lower middle as median, or adds the floor.
def test_robust_z_has_the_value_worked_by_hand_and_a_floor_of_a_tenth():
    history = (0.4, 0.0, 0.2, 0.1)
    assert autoloco.centre_and_scale(history) == pytest.approx((0.15, 0.14826), abs=1e-12)
    for residual, z in ((0.5, 2.36072), (0.15, 0.0), (-0.2, -2.36072)):
        assert autoloco.robust_z(residual, history) == pytest.approx(z, abs=5e-6)
    assert autoloco.robust_z(0.25, (0.0,) * 16) == 0.25 / 0.10


# Sabotage: severe above 6 instead of from 6.
def test_verdicts_change_exactly_at_six_three_and_one():
    below = {z: math.nextafter(z, -math.inf) for z in (6.0, 3.0)}
    for verdict, scores in {
        "severe": (1e300, 6.0),
        "moderate": (below[6.0], 3.0),
        "consistent": (below[3.0], math.nextafter(1.0, 2.0)),
        "supports": (1.0, 0.0, -50.0),
    }.items():
        assert {autoloco.judge(z) for z in scores} == {verdict}


# Sabotage: Observation.finite reads 0.
@pytest.mark.parametrize("name", ["drift", "coherence", "exposure"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_statistic_that_is_not_finite_and_positive_counts_as_non_finite(name, value):
    good = autoloco.Observation(1.0, 1.001, 1.0, 1)  # coherence slightly above 1 is read
    assert good.finite and not replace(good, **{name: value}).finite


# Sabotage: level without the square of the exposure.
@pytest.mark.parametrize("rules", [CALM, replace(SFT_RULES, max_horizon=100), C4])
def test_pure_learning_rate_decay_leaves_level_and_residuals_where_they_were(rules):
    rows = loco_drive(rules)
    assert rows[-2].seen.exposure < 0.01 * rows[0].seen.exposure
    for row in rows[:-1]:
        assert autoloco.level(row.seen) == pytest.approx((0.0, math.log(2)), abs=1e-9)
    judged = [row for row in rows if row.decision.residual_drift is not None]
    assert len(judged) > 50 and {row.plan.phase for row in judged} >= {"variability", "monitor"}
    for row in judged:
        assert row.decision.residual_drift == pytest.approx(0.0, abs=1e-9)
        assert row.decision.residual_coherence == pytest.approx(0.0, abs=1e-12)


# ---------------------------------------------------------------- controller: traces (A.1 to A.3)

# rules, what deviates, horizons of the intervals, their last phases
TO_650 = "8x500 5x550 5x600 5x650"
LOCO_TRACES = [
    # Warm-up, reference, variability and monitor are 2, 2, 3, 1 in every recipe.
    # Sabotage: REFERENCE_INTERVALS 1; VARIABILITY_INTERVALS 2.
    (C4, "", "8x500 550", "wwrrvvvmc"),
    (SFT_RULES, "", "8x100 110", "wwrrvvvmc"),
    (TINY_RULES, "", "8x20 22", "wwrrvvvmc"),
    # The warm-up takes every interval that starts in it. Sabotage: it ends one interval early.
    (replace(C4, warmup=0), "", "3x500", "rrv"),
    (replace(C4, warmup=500), "", "4x500", "wrrv"),
    (replace(C4, warmup=501), "", "5x500", "wwrrv"),
    # It ignores what is not finite, and nothing is judged before monitor.
    (C4, "nonfinite@1 nonfinite@2", "8x500 2x550", "wwrrvvvmcv"),
    (C4, "severe@1 severe@2 severe@4 severe@6", "8x500", "wwrrvvvm"),
    # A non-finite interval does not count for the first reference. Sabotage: it does, or reduces.
    (C4, "nonfinite@3 nonfinite@5", "10x500 2x550", "wwrrrrvvvmcv"),
    # A first moderate holds, a second in a row reduces by 1.20: 500 to 416.7, 750 to 625.
    # Sabotage: one moderate reduces, or proposes; a normal interval does not end the row.
    (C4, "moderate@8", "9x500 550", "mmc"),
    (C4, "moderate@8 moderate@9", "9x500 400", "mmr"),
    (C4, "moderate@28 moderate@29", TO_650 + " 6x750 600", "mmr"),
    (CALM, "moderate@8 moderate@10 consistent@11 moderate@12", "14x500", "vmmmmmmm"),
    # Severe reduces at once by 1.50: 500 to 333.3, 750 to 500 exactly; down to H_min, and
    # re-estimates also there. Sabotage: 1.20 for severe; reduced_horizon goes below H_min.
    (WIDE, "severe@8", "8x500 300", "mr"),
    (C4, "severe@28", TO_650 + " 5x750 500", "mr"),
    (C4, "severe@8", "8x500 5x350 400", "mrvvvmc"),
    (replace(C4, min_horizon=500), "severe@8", "13x500 550", "mrvvvmc"),
    # Non-finite reduces by 1.50 (350 is more than 15 % above 300: no candidate), a second one in a
    # row to H_min, also across the re-estimation. Sabotage: re-estimation drops the flag; a finite
    # reference does not end the row.
    (WIDE, "nonfinite@8", "8x500 6x300", "mrvvvmm"),
    (WIDE, "nonfinite@8 nonfinite@9 nonfinite@10", "8x500 300 3x50", "mrrrv"),
    (WIDE, "nonfinite@8 nonfinite@10", "8x500 2x300 200", "mrvr"),
    (WIDE, "nonfinite@5", "5x500 300", "vr"),
    (WIDE, "severe@8 nonfinite@9", "8x500 300 200", "mrr"),
    # A rejected candidate's is the first of two. Sabotage: it does not count.
    (WIDE, "moderate@9 nonfinite@10", "8x500 550 500 300", "crr"),
    (WIDE, "nonfinite@9 nonfinite@10", "8x500 550 500 50", "crr"),
    (WIDE, "nonfinite@9 nonfinite@11", "8x500 550 2x500 300", "crvr"),
    # A supporting candidate is adopted at once, a consistent one after one more that is not worse.
    (C4, "", "8x500 5x550 600", "cvvvmc"),
    (C4, "consistent@9 supports@10", "8x500 6x550 600", "ccvvvmc"),
    (C4, "consistent@9 consistent@10", "8x500 6x550 600", "ccvvvmc"),
    # A worse one is rejected, until decay retires the bound. Sabotage: the preview starts at the
    # interval's start.
    *((C4, f"{verdict}@9", "8x500 550 6x500", "crvvvmm") for verdict in LOCO_WORSE),
    *((C4, f"consistent@9 {verdict}@10", "8x500 2x550 500", "ccr") for verdict in LOCO_WORSE),
    (C4, "moderate@9", "8x500 550 14x500 550", "mc"),
    # Adoption at H_max is like any other.
    (C4, "", TO_650 + " 17x750", "mcvvv" + "m" * 13),
]


@pytest.mark.parametrize("rules, trace, horizons, phases", LOCO_TRACES)
def test_the_controller_takes_the_path_worked_by_hand(rules, trace, horizons, phases):
    count = sum(int(run.split("x")[0]) if "x" in run else 1 for run in horizons.split())
    rows = loco_drive(rules, trace, stop=count)
    assert loco_runs(row.plan.horizon for row in rows) == horizons
    assert "".join(row.plan.phase[0] for row in rows).endswith(phases)
    for row in rows:
        judged = row.plan.phase in ("monitor", "candidate")
        verdict = loco_trace(trace).get(row.plan.interval, "supports") if judged else None
        assert row.decision.verdict == verdict
        assert (row.decision.z is None) == (verdict in (None, "nonfinite"))


# Sabotage: HISTORY 15; the earliest 16 stay.
def test_the_history_keeps_the_latest_sixteen_residuals():
    rows = loco_drive(CALM, stop=40, sigmas=lambda t: math.sin(t) / 2)
    assert [len(row.after.history) for row in rows[6:22]] == [*range(3, 17), 16, 16]
    centre = (math.sin(3) + math.sin(4)) / 4
    latest = [(math.sin(interval) / 2 - centre) / 10 for interval in range(25, 41)]
    for family in zip(*rows[-1].after.history, strict=True):
        assert family == pytest.approx(latest, abs=1e-9)


# ---------------------------------------------------------------- controller: proposals (A.2)


def loco_propose(
    accepted, observed, preview=lambda h: (h, float(h)), left=10**6, bound=None, rules=C4
):
    """The proposed horizon and the bound afterwards; one step is worth one unit of exposure."""
    state = autoloco.Controller(accepted, accepted, bound=bound)
    state, _ = autoloco.propose(rules, state, observed, preview, left)
    return state.horizon, state.bound


LOCO_FINE = {"rules": autoloco.Rules(10**6, 1e-3, 0, 100, 70, 150, 5)}
LOCO_TIED = {"preview": lambda h: (h - 50 * (h > 500), h - 50.0 * (h > 500))}  # 550 maps to 500
LOCO_PROPOSALS = [
    # The longest within the cap: 575 and 747.5; H_min of seven granules can grow: 402.5.
    # Sabotage: the shortest candidate; candidates start one granule too high; H_max is left out.
    (500, 500.0, {}, 550), (500, 650.0, {}, 700), (500, 9e9, {}, 750), (350, 350.0, {}, 400),
    # Exactly at the cap, in spite of floats, but not above. Sabotage: the cap without tolerance.
    (100, 100.0, LOCO_FINE, 115),
    (100, 100.0, {**LOCO_FINE, "preview": lambda h: (h, h * (1 + 1e-8))}, 110),
    # The cap is on the measured exposure: 598 / 0.9 = 664, and 540.5 although 1.15 x 500 admits
    # 550. Sabotage: the cap on a preview of the accepted horizon.
    (500, 520.0, {"preview": lambda h: (h, 0.9 * h)}, 650), (500, 470.0, {}, 500),
    # A candidate fits in the steps left. Sabotage: it must leave a step over, or may be longer.
    (500, 700.0, {"left": 750}, 750), (500, 700.0, {"left": 749}, 700),
    (500, 700.0, {"left": 549}, 500),
    # It maps to more steps than the accepted horizon. Sabotage: to as many.
    (500, 460.0, LOCO_TIED, 500), (500, 500.0, LOCO_TIED, 600),
    (750, 9e9, {}, 750),  # nothing lies above H_max
    # Below a bound: nearest to the geometric midpoint, 512.3 (the mean is 550) and 591.6, within
    # the cap of 460. Sabotage: the arithmetic midpoint; the longest; the bound itself.
    (350, 1e3, {"bound": (750, 750.0)}, 500), (500, 1e3, {"bound": (700, 700.0)}, 600),
    (350, 400.0, {"bound": (750, 750.0)}, 450), (500, 500.0, {"bound": (550, 550.0)}, 500),
]  # fmt: skip


@pytest.mark.parametrize("accepted, observed, changes, horizon", LOCO_PROPOSALS)
def test_the_proposal_is_worked_by_hand_and_the_bound_stays(accepted, observed, changes, horizon):
    assert loco_propose(accepted, observed, **changes) == (horizon, changes.get("bound"))


# Sabotage: the bound retires only below 0.90, or from 0.90 upwards.
def test_a_bound_retires_at_exactly_nine_tenths_of_its_exposure():
    for previewed, expected in ((90.0 + 1e-9, (500, (550, 100.0))), (90.0, (750, None))):
        preview = {550: (550, previewed)}
        assert expected == loco_propose(
            500, 500.0, lambda h, p=preview: p.get(h, (h, 1.0)), bound=(550, 100.0)
        )


# ---------------------------------------------------------------- controller: candidates (A.2)


# Sabotage: a reduction or an adoption drops the bound.
def test_reductions_and_adoptions_keep_the_bound():
    rows = loco_drive(C4, "moderate@9 severe@14", stop=20)  # 350 for five intervals, then 400
    assert (rows[19].plan.phase, rows[19].after.accepted) == ("candidate", 400)
    assert rows[13].after.bound == rows[19].after.bound == (550, rows[8].seen.exposure)


def test_the_rules_import_nothing_but_the_standard_library():
    imported = re.findall(r"^ *(?:import|from) (\w+)", inspect.getsource(autoloco), re.M)
    assert {*imported} <= set(sys.stdlib_module_names) - {"time", "datetime", "random"}


# ---------------------------------------------------------------- the whole controller, once more


def by_one_loop(
    rules: autoloco.Rules, statistics: Iterable[tuple[float, float, int]]
) -> tuple[list[tuple[int, int, int, str | None]], set[str]]:
    """Sections 3.1 and A.1 to A.3 once more, as one loop, written without the other in sight.

    The reference is kept as ln(D / Lambda^2) and never moves. Returns (steps, horizon, accepted,
    verdict) of every interval, and the branches taken.
    """
    q, base = rules.ladder.step, rules.base_horizon
    low, top = rules.ladder[0], rules.ladder[-1]
    sums = [0.0, *itertools.accumulate(loco_rate(rules, s) for s in range(rules.steps))]
    step, accepted, horizon, tau = 0, base, base, 0.0
    calibration: list[int] = []
    queue = ["r", "r", "v", "v", "v"]
    references: list[tuple[float, float]] = []
    histories: tuple[list[float], list[float]] = ([], [])
    first, failed, doubtful, tried, bound = True, False, False, False, None
    out: list[tuple[int, int, int, str | None]] = []
    branches: set[str] = set()

    def mapped(h: int) -> int:
        if len(calibration) < 3:
            return h
        return max(q, q * math.floor(sorted(calibration)[1] * h / base / (tau * q) + 0.5))

    def ahead(h: int) -> float:
        return sums[min(step + mapped(h), rules.steps)] - sums[step]

    def restart(h: int, phases: str, bad: bool = False) -> None:
        nonlocal accepted, horizon, queue, first, failed, doubtful, tried
        accepted = horizon = h
        queue, first, failed, doubtful, tried = list(phases), False, bad, False, False
        for kept in (references, *histories):
            kept.clear()

    def down(divisor: Fraction) -> int:
        return max([low, *(h for h in range(low, accepted, q) if h * divisor <= accepted)])

    def median(xs: Iterable[float]) -> float:
        xs = sorted(xs)
        return (xs[(len(xs) - 1) // 2] + xs[len(xs) // 2]) / 2

    def z(values: list[float], r: float) -> float:
        centre = median(values)
        return (r - centre) / max(0.1, 1.4826 * median(abs(v - centre) for v in values))

    for x, c, tokens in statistics:
        begun, steps = step, min(mapped(horizon), rules.steps - step)
        lam = sums[step + steps] - sums[step]
        entry = (steps, horizon, accepted)
        count, step = tokens * steps, step + steps
        tau = tokens if not out else 0.9 * tau + 0.1 * tokens
        if horizon == base == steps and len(calibration) < 3:
            calibration.append(count)
        if step == rules.steps:
            out.append((*entry, None))  # the last interval decides nothing
            break
        phase = "w" if begun < rules.warmup else queue.pop(0) if queue else "mc"[horizon > accepted]
        verdict, finite = None, math.isfinite(x)
        if phase == "w":
            branches.add(f"warm-up {'as long' if steps == horizon else 'mapped'}")
        elif phase in "rv" and finite:
            if phase == "r" or not references:
                references.append((x, math.log(c)))
                failed = False
            else:
                for values, r in zip(histories, loco_residual(references, x, c), strict=True):
                    values.append(r)
        elif phase == "r" and first:
            queue.insert(0, "r")
            branches.add("reference ignores")
        elif phase in "rvm" and not finite:
            verdict = "nonfinite" if phase == "m" else None
            branches.add(f"nonfinite {phase} {'again' if failed else 'once'}")
            restart(low if failed else down(Fraction(3, 2)), "rvvv", bad=True)
        elif phase in "mc":
            rs = loco_residual(references, x, c) if finite else (math.inf, math.inf)
            score = max(z(values[-16:], r) for values, r in zip(histories, rs, strict=True))
            grade = sum(score >= limit for limit in (math.nextafter(1, 2), 3, 6))
            verdict = ("supports", "consistent", "moderate", "severe")[grade]
            verdict = verdict if finite else "nonfinite"
            branches.add(f"{phase} {verdict} {int(tried or doubtful)}")
            if phase == "c" and grade >= 2:
                bound = (horizon, lam)
                restart(accepted, "rvvv", bad=not finite)
            elif phase == "c" and grade == 1 and not tried:
                tried = True
            elif phase == "c":
                restart(horizon, "vvv")
                references.append((x, math.log(c)))
            elif grade == 3:
                restart(down(Fraction(3, 2)), "rvvv")
            elif grade == 2 and doubtful:
                restart(down(Fraction(6, 5)), "rvvv")
            elif grade == 2:
                doubtful = True
            else:
                doubtful = False
                for values, r in zip(histories, rs, strict=True):
                    values.append(r)
                if bound and ahead(bound[0]) <= 0.9 * bound[1]:
                    bound = None
                    branches.add("bound retires")
                options = [
                    h
                    for h in range(accepted + q, (bound[0] - q if bound else top) + 1, q)
                    if mapped(accepted) < mapped(h) <= rules.steps - step
                    and ahead(h) <= lam * 1.15 * (1 + 1e-9)
                ]
                if options and bound:
                    horizon = min(options, key=lambda h: abs(h - math.sqrt(accepted * bound[0])))
                    branches.add("below a bound")
                elif options:
                    horizon = max(options)
        out.append((*entry, verdict))
    return out, branches


def loco_residual(references: list[tuple[float, float]], x: float, c: float) -> tuple[float, float]:
    """Distance from the mean reference in log units: of drift, and of coherence (down is worse)."""
    n = len(references)
    return x - sum(r[0] for r in references) / n, sum(r[1] for r in references) / n - math.log(c)


def loco_statistics(generator: random.Random) -> Iterator[tuple[float, float, int]]:
    """(ln(D / Lambda^2), C, tokens a step) of one interval after the other, at random."""
    noise, trouble = generator.choice((0.001, 0.05)), generator.choice((0.05, 0.15, 0.3))
    uneven = generator.choice((0, 0, 15, 40))
    while True:
        size = generator.choice((0.15, 0.2, 0.45, 1.0, math.nan))
        x = generator.gauss(0, noise) + (size if generator.random() < trouble else 0)
        c = 0.5 * math.exp(-generator.gauss(0, noise))
        if generator.random() < trouble / 3:
            c *= math.exp(-generator.choice((0.15, 0.45, 1.0)))
        yield x, c, 100 + generator.randint(-uneven, uneven)


def test_a_second_reading_of_the_rules_takes_every_decision_alike():
    generator, branches, intervals = random.Random(2609_36662), set(), 0
    for _ in range(400):
        q = generator.choice((2, 3, 5))
        steps, warmup = generator.randrange(400, 1800), generator.randrange(q * 6)
        warmup *= generator.choice((1, 10))  # 10: the mapper calibrates inside
        low, top = generator.choice((2, 7)) * q, generator.choice((10, 15, 20)) * q
        rules = autoloco.Rules(steps, 1e-3, warmup, 10 * q, low, top, q)
        first, second = itertools.tee(loco_statistics(generator))
        expected, seen = by_one_loop(rules, first)
        state, got = autoloco.start(rules), []
        while state.step < steps:
            planned, (x, c, tokens) = autoloco.plan(rules, state), next(second)
            lam = autoloco.exposure(rules, planned.step, planned.steps)
            drift, tokens = lam * lam * math.exp(x), tokens * planned.steps
            observation = autoloco.Observation(drift, c, lam, tokens)
            state, decision = autoloco.complete(rules, state, planned, observation)
            got.append((planned.steps, planned.horizon, planned.accepted, decision.verdict))
        assert got == expected
        branches |= seen
        intervals += len(got)
    assert intervals > 10_000
    grades = itertools.product("mc", ("supports", "consistent", "moderate", "severe"), "01")
    assert branches >= {" ".join(grade) for grade in grades} | {
        "reference ignores", "bound retires", "below a bound", "warm-up as long", "warm-up mapped",
        "nonfinite m once", "nonfinite v once", "nonfinite r once", "nonfinite r again",
        "c nonfinite 0", "c nonfinite 1",
    }  # fmt: skip


# ---------------------------------------------------------------- golden schedules (F.2, E.2)

# rules, what deviates, executed intervals
GOLDEN = [
    (C4, "", TO_650 + " 49x750 250"),
    (C4, "moderate@9", "8x500 550 14x500 5x550 5x600 5x700 38x750 700"),
    (C4, "moderate@8", "9x500 5x550 5x600 5x650 48x750 500"),
    (C4, "moderate@8 moderate@9", "9x500 5x400 5x450 5x500 5x550 5x600 5x700 39x750 250"),
    (C4, "consistent@9 moderate@10", "8x500 2x550 13x500 5x550 5x600 5x700 38x750 650"),
    (SFT_RULES, "", "8x100 5x110 5x120 5x140 25x150 90"),
    (TINY_RULES, "", "8x20 5x22 5x24 5x26 49x30 10"),
    (NORMALISED, "", TO_650 + " 49x750 250"),
    # A non-finite verdict is ignored in warm-up and reference, and acts in variability.
    (replace(WIDE, steps=4500), "nonfinite@1 nonfinite@3 nonfinite@6", "6x500 5x300"),
]


def loco_simulated(rules: autoloco.Rules, trace: str = "") -> list[int]:
    """Executed steps of a dry run in which verdicts are replaced as `trace` says."""
    return [planned.steps for planned, _ in autoloco.simulate(rules, loco_trace(trace))]


# Sabotage: linear decay instead of cosine (72 intervals).
@pytest.mark.parametrize("rules, trace, schedule", GOLDEN)
def test_verdicts_and_statistics_alike_give_the_published_schedule(rules, trace, schedule):
    steps = loco_simulated(rules, trace)
    assert (loco_runs(steps), sum(steps)) == (schedule, rules.steps)
    assert trace or len(steps) == (49 if rules is SFT_RULES else 73)  # published for C4 and SFT
    rows = loco_drive(rules, trace)
    assert [row.plan.steps for row in rows] == steps and rows[-1].decision.next_horizon is None


@pytest.mark.parametrize("sequence", [(500,) * 100, (10, 990, 13_822, 35_178)])
def test_a_fixed_schedule_is_executed_as_given(sequence):
    rules = replace(NORMALISED, sequence=sequence)
    rows = loco_drive(rules)
    assert loco_replayed(loco_log(rules, rows)) == len(sequence)
    assert tuple(row.plan.steps for row in rows) == sequence
    assert [row.decision.next_horizon for row in rows] == [*sequence[1:], None]
    assert {(row.plan.phase, row.decision.verdict) for row in rows} == {("fixed", None)}
    assert all((row.plan.interval_ratio > 1) == (row.plan.steps > 500) for row in rows)


# ---------------------------------------------------------------- rules, given and derived


@pytest.mark.parametrize("base, granularity, shortest, longest", [
    (500, 50, 350, 750), (100, 10, 70, 150), (20, 2, 14, 30), (25, 1, 7, 37), (21, 1, 7, 31),
    (35, 1, 7, 52), (105, 7, 49, 154), (7, 1, 7, 10), (1, 1, 1, 1),
])  # fmt: skip
def test_what_is_not_given_follows_from_the_base_horizon(base, granularity, shortest, longest):
    rules = autoloco.Rules(30 * base, 1e-3, 0, base)
    assert rules.ladder == range(shortest, longest + 1, granularity) and base in rules.ladder
    assert (rules.granularity, rules.min_horizon, rules.max_horizon) == (
        granularity, shortest, longest
    )  # fmt: skip
    assert sum(loco_simulated(rules)) == 30 * base


@pytest.mark.parametrize("change, words", [
    ({"steps": 0}, "steps=0"), ({"lr": 0.0}, "lr=0.0"), ({"lr": math.nan}, "lr=nan"),
    ({"warmup": -1}, "warmup=-1"), ({"base_horizon": 510}, "base_horizon=510"),
    ({"min_horizon": 0}, "min_horizon=0"), ({"min_horizon": 550}, "min_horizon=550, base"),
    ({"max_horizon": 725}, "max_horizon=725"), ({"granularity": 0}, "granularity=0"),
    ({"outer_momentum": 1.0}, "outer_momentum=1.0"), ({"max_step_scale": 0.9}, "max_step_scale=0"),
    ({"controller": "mine"}, "controller=mine: one of autoloco"),
    ({"sequence": (500, 0, 49_500)}, "horizons="), ({"sequence": (500,) * 99}, "horizons= .*49500"),
])  # fmt: skip
def test_an_impossible_rule_is_refused_and_names_its_value(change, words):
    with pytest.raises(ValueError, match="^" + words):
        replace(C4, **change)


# ---------------------------------------------------------------- replay

# A rejection, a bound that retires, a confirmed adoption and a reduction.
EVENTFUL = "moderate@9 consistent@24 moderate@29 moderate@30"


def loco_log(rules: autoloco.Rules, rows: Iterable[LocoRow]) -> list[dict[str, Any]]:
    """Header and records as they come back from a file."""
    lines = [autoloco.header(rules, recipe="c4-215m")]
    lines += [autoloco.record(row.plan, row.seen, row.state.mapper, row.decision) for row in rows]
    return [json.loads(json.dumps(line, allow_nan=False)) for line in lines]


@pytest.fixture(scope="module")
def loco_clean() -> list[dict[str, Any]]:
    """A log of an eventful run at a density that moves."""
    rows = loco_drive(
        NORMALISED, EVENTFUL,
        density=lambda t: 100 + t % 7, sigmas=lambda t: t % 3 / 10,
    )  # fmt: skip
    reasons = " ".join(row.decision.reason for row in rows)
    assert all(word in reasons for word in ("reject", "retired", "confirmed", "reduce by 1.20"))
    return loco_log(NORMALISED, rows)


def loco_replayed(lines: Sequence[Mapping[str, Any]]) -> int:
    """Replay a log given as header and records; its number of intervals."""
    return autoloco.last_state(autoloco.rules_from_header(lines[0]), lines[1:]).interval


def loco_edited(lines: list[dict[str, Any]], number: int, **changes: Any) -> list[dict[str, Any]]:
    """A copy of a log with changes in one line of the file, counted from 1; ... drops a value."""
    line = {name: v for name, v in (lines[number - 1] | changes).items() if v is not ...}
    return [*lines[: number - 1], line, *lines[number:]]


# Sabotage: a null statistic is finite.
def test_the_state_is_a_function_of_the_log_in_which_non_finite_is_null():
    rules = replace(WIDE, normalise=True)
    rows = loco_drive(rules, "nonfinite@3 moderate@10 consistent@25 nonfinite@30", stop=40)
    lines = loco_log(rules, rows)
    assert autoloco.last_state(rules, []) == autoloco.start(rules)
    assert [one.after for one in autoloco.replay(rules, lines[1:])] == [row.state for row in rows]
    assert autoloco.last_state(rules, lines[1:21]) == rows[19].state
    for line in lines[1:]:
        null = {line[name] for name in ("drift", "coherence", "residual_drift", "z")} == {None}
        assert null == (line["interval"] in (3, 30)) == (not line["finite"])


# Sabotage: record takes the step at which the interval began.
def test_a_log_line_has_the_columns_of_the_run_folder_and_counts_completed_steps(loco_clean):
    columns = (
        "interval step steps horizon accepted phase verdict next_horizon reason drift coherence "
        "exposure base_exposure tokens tokens_per_step residual_drift residual_coherence z "
        "interval_ratio divisor momentum step_scale finite"
    )
    assert all(set(line) == set(columns.split()) for line in loco_clean[1:])
    executed = itertools.accumulate(line["steps"] for line in loco_clean[1:])
    assert [line["step"] for line in loco_clean[1:]] == list(executed)
    assert loco_clean[-1]["step"] == 50_000


# Sabotage: replay does not compare the reason; it believes the exposure.
LOCO_EDITS: list[tuple[str, Any]] = [
    *((name, lambda value: value * 1.0001) for name in ("drift", "coherence", "exposure")),
    *((name, lambda value: value + 1e-9) for name in ("momentum", "step_scale", "divisor", "z")),
    *((name, lambda value: value + 1e-9) for name in ("interval_ratio", "base_exposure")),
    *((name, lambda value: value + 50) for name in ("tokens", "step", "interval", "accepted")),
    *((name, lambda value: value + 50) for name in ("next_horizon", "steps", "horizon")),
    *((name, None) for name in ("residual_drift", "phase", "verdict", "tokens")),
    ("drift", ...), ("drift", 10**400), ("drift", 1e308), ("drift", "x"), ("drift", []),
    ("tokens", ...), ("tokens", 10**400), ("tokens", math.inf), ("tokens", 0),
    ("tokens_per_step", 0.1), ("reason", "supports: try 600"), ("finite", False),
]  # fmt: skip


@pytest.mark.parametrize("column, change", LOCO_EDITS, ids=lambda value: str(value)[:12])
def test_replay_names_the_line_of_an_edited_missing_or_absurd_value(loco_clean, column, change):
    line = loco_clean[8]
    assert (line["interval"], line["phase"], line["verdict"]) == (8, "monitor", "supports")
    with pytest.raises(ValueError, match="^line 9: "):
        value = change(line[column]) if callable(change) else change
        loco_replayed(loco_edited(loco_clean, 9, **{column: value}))


def test_replay_knows_the_exposure_where_nothing_is_judged(loco_clean):
    with pytest.raises(ValueError, match="line 2: interval 1: exposure"):
        loco_replayed(loco_edited(loco_clean, 2, exposure=loco_clean[1]["exposure"] * 1.0001))


# Sabotage: lines are counted without the header.
def test_replay_names_the_first_missing_swapped_or_additional_line(loco_clean):
    lines = loco_clean
    assert loco_replayed(lines[:20]) == 19  # an interrupted run is no fault
    for damaged, words in (
        (lines[:30] + lines[31:], "line 31: interval 30: "),
        ([*lines[:30], lines[31], lines[30], *lines[32:]], "line 31: interval 30: "),
        ([*lines, lines[-1]], f"line {len(lines) + 1}: the run was over"),
    ):
        with pytest.raises(ValueError, match=words):
            loco_replayed(damaged)


# ---------------------------------------------------------------- headers of other programs


def loco_header(lines: list[dict[str, Any]], part: str, **changes: Any) -> list[dict[str, Any]]:
    """A copy of a log with changes in the header's `rules` or `constants`."""
    return loco_edited(lines, 1, **{part: loco_edited([lines[0][part]], 1, **changes)[0]})


def test_a_header_that_lacks_a_newer_field_or_constant_takes_its_default_and_replays(loco_clean):
    lines = loco_header(loco_clean, "rules", max_step_scale=..., controller=..., sequence=...)
    lines = loco_header(lines, "constants", SEVERE=..., HISTORY=...)
    assert loco_replayed(lines) == len(loco_clean) - 1
    later = loco_header(loco_clean, "constants", ADDED_LATER=3)
    assert loco_replayed(later) == len(loco_clean) - 1
    assert loco_replayed(loco_edited(loco_clean, 9, divisor=...)) == len(loco_clean) - 1


@pytest.mark.parametrize("part, changes, words", [
    ("rules", {"typo": 1}, "rules has an unknown typo"), ("rules", {"steps": ...}, "rules: .*ste"),
    ("rules", {"granularity": 50.0}, "rules: "), ("rules", {"sequence": [49_999, 1.0]}, "rules: "),
    ("rules", {"controller": []}, "rules: "), ("rules", {"steps": 0}, "steps=0"),
    ("constants", {"SEVERE": 5.0}, "written with SEVERE 5.0; it is 6.0 now"),
])  # fmt: skip
def test_a_header_of_other_rules_is_refused_by_name(loco_clean, part, changes, words):
    with pytest.raises(ValueError, match=words):
        autoloco.rules_from_header(loco_header(loco_clean, part, **changes)[0])


@pytest.mark.parametrize("change, words", [
    ({"max_horizon": 500}, "line 9: interval 8: next_horizon is 550"),
    ({"max_step_scale": 1.1}, "line 10: interval 9: step_scale is 1.2"),
])  # fmt: skip
def test_another_rule_fails_at_the_first_line_that_it_changes(loco_clean, change, words):
    with pytest.raises(ValueError, match=words):
        loco_replayed(loco_header(loco_clean, "rules", **change))


def test_rules_in_the_middle_of_a_log_replace_those_before():
    short = replace(C4, steps=4000)
    rows = loco_drive(short)
    more = loco_drive(C4, stop=12, state=rows[-1].state)  # the run is extended
    first, then = loco_log(short, rows), loco_log(C4, more)
    taken = list(autoloco.replay(short, [*first[1:], *then]))
    assert [one.rules for one in taken] == [short] * len(rows) + [C4] * 12
    assert taken[-1].after == more[-1].state
    with pytest.raises(ValueError, match="line 10: the run was over at step 4000"):
        loco_replayed([*first, *then[1:]])
    damaged = loco_header(then, "rules", typo=1)
    with pytest.raises(ValueError, match="line 10: rules has an unknown typo"):
        loco_replayed([*first, *damaged])


def test_a_rule_of_ones_own_runs_is_logged_and_replays(monkeypatch):
    def alternate(rules, state, planned, observation, preview, left, verdict=None):
        other = rules.min_horizon if planned.horizon == rules.max_horizon else rules.max_horizon
        decision = autoloco.Decision("supports", other if left else None, "the other one")
        return replace(state, accepted=other, horizon=other), decision

    monkeypatch.setitem(autoloco.CONTROLLERS, "alternate", alternate)
    rules = replace(C4, controller="alternate")
    rows = loco_drive(rules, stop=6)
    assert loco_runs(row.plan.steps for row in rows) == "500 750 350 750 350 750"
    lines = loco_log(rules, rows)
    assert loco_replayed(lines) == 6
    assert all(map(autoloco.explain, autoloco.replay(rules, lines[1:])))
    with pytest.raises(ValueError, match="line 2: interval 1: verdict is 'supports'"):
        loco_replayed(loco_header(lines, "rules", controller="autoloco"))
    monkeypatch.delitem(autoloco.CONTROLLERS, "alternate")
    with pytest.raises(ValueError, match="controller=alternate"):
        loco_replayed(lines)


# ---------------------------------------------------------------- explanation


def test_an_explanation_prints_the_numbers_of_the_log_and_of_the_rules():
    rules = replace(NORMALISED, max_step_scale=1.1)
    rows = loco_drive(
        rules, EVENTFUL + " nonfinite@40 severe@86", sigmas=lambda t: t % 3 / 10,
        density=lambda t: 100 + t % 7,
    )  # fmt: skip
    lines, seen = loco_log(rules, rows)[1:], ""
    for one, line in zip(autoloco.replay(rules, lines), lines, strict=True):
        text, before = autoloco.explain(one), one.before.controller
        told = [line[name] for name in ("phase", "verdict", "reason", "horizon", "next_horizon")]
        exact = ("drift", "exposure", "interval_ratio", "momentum", "step_scale")
        told += [f"{line[name]:.6g}" for name in exact if line[name] is not None]
        if line["z"] is not None:
            told.append(f"{line['z']:+.2f}, the worse of the two: {line['verdict']}")
            pair = line["residual_drift"], line["residual_coherence"]
            for residual, family in zip(pair, zip(*before.history, strict=True), strict=True):
                centre, scale = autoloco.centre_and_scale(family)
                told.append(f"({residual:+.4f} - centre {centre:+.4f}) / scale {scale:.4f}")
        if before.bound:
            told.append(f"{before.bound[0]} was rejected at exposure {before.bound[1]:.6g}")
        proposes = line["phase"] == "monitor" and line["verdict"] in ("supports", "consistent")
        told += [f"= {1.15 * line['exposure']:.6g} of exposure"] * proposes
        assert text.count(": chosen") == (proposes and line["next_horizon"] > line["accepted"])
        assert [word for word in told if str(word or "") not in text] == []
        assert line["finite"] or "not finite" in text
        seen += text
    words = "bounded at 1.1|below its bound|steps are left|above the cap|not below the rejected"
    assert all(word in seen for word in words.split("|"))


# ---------------------------------------------------------------- the command line


def loco_write(path: Path, lines: Iterable[Mapping[str, Any]]) -> str:
    """Write a log as a run does; its path as typed."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_replay_exits_with_0_and_a_count_as_a_user_types_it(loco_clean, tmp_path):
    path = loco_write(tmp_path / "intervals.jsonl", loco_clean)
    command = [sys.executable, autoloco.__file__, "replay", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{len(loco_clean) - 1} ") and "50000 of 50000" in done.stdout


# Sabotage: a difference exits with 0.
@pytest.mark.parametrize("command", ["replay", "explain"])
def test_a_difference_exits_with_1_and_names_the_place(loco_clean, tmp_path, capsys, command):
    path = loco_write(tmp_path / "log", loco_edited(loco_clean, 9, next_horizon=600))
    assert autoloco.main([command, path]) == 1
    out, err = capsys.readouterr()
    words = "interval 8: next_horizon is 600 in the log, the rule gives 550"
    assert out == "" and err.startswith(f"{path}: line 9: {words}") and err.count("\n") == 1


def test_explain_shows_one_interval_or_all(loco_clean, tmp_path, capsys):
    path = loco_write(tmp_path / "intervals.jsonl", loco_clean[:12])
    assert autoloco.main(["explain", path, "9"]) == 0
    one = capsys.readouterr().out
    assert autoloco.main(["explain", path]) == 0
    every = capsys.readouterr().out
    assert one.startswith("interval 9: ") and one.strip() in every
    assert re.findall(r"^interval (\d+)", every, re.M) == [str(n) for n in range(1, 12)]


def test_a_torn_last_line_is_dropped_and_said(loco_clean, tmp_path, capsys):
    path = Path(loco_write(tmp_path / "intervals.jsonl", loco_clean[:12]))
    os.truncate(path, path.stat().st_size - 20)
    assert autoloco.main(["replay", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("10 ") and "torn" in captured.err


# ---------------------------------------------------------------- tests on several processes


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Bit-identity holds at a fixed number of threads; a fork must not inherit a pool of them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    adamw(nn.Linear(1, 1))  # imports torch's compiler, seconds that no fork then needs


class Ended(NamedTuple):
    """How a rank ended: what its function returned, its exit code, its standard error."""

    value: Any
    code: int
    error: str


class Launch:
    """`function(*arguments)` on each of `world` processes, as torchrun would start them.

    They are forked, so a closure will do, and nothing is imported again; with `environments`, one a
    rank, they are fresh processes, and the function must be one of this file. They meet in a file.
    """

    def __init__(
        self,
        world: int,
        function: Callable[..., Any],
        *arguments: Any,
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        context: Any = multiprocessing.get_context("spawn" if environments else "fork")
        self.folder = tempfile.TemporaryDirectory()
        self.processes = []
        before = dict(os.environ)
        for rank in range(world):
            names: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
            names |= {"LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
            names |= {"AUTOLOCO_RENDEZVOUS": f"file://{self.folder.name}/meeting"}
            names |= {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
            more = environments[rank] if environments else {}
            os.environ |= {name: str(value) for name, value in names.items()} | dict(more)
            log = os.path.join(self.folder.name, str(rank))
            process = context.Process(target=one_rank, args=(log, function, arguments))
            process.start()
            self.processes.append(process)
            os.environ.clear()
            os.environ.update(before)

    def wait(self, seconds: float = 300.0) -> list[Ended]:
        """How the ranks ended; what still runs after these seconds is killed."""
        until = time.monotonic() + seconds
        ended = []
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, until - time.monotonic()))
            process.kill()  # no effect on one that has ended
            process.join()
            log = Path(self.folder.name, str(rank))
            value = log.with_suffix(".value")
            found = torch.load(value, weights_only=False) if value.exists() else None
            words = log.read_text(errors="replace") if log.exists() else ""
            ended.append(Ended(found, process.exitcode, words))
        self.folder.cleanup()
        return ended


def one_rank(log: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """One process of a launch. It leaves as train.py does, without any clean-up."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # pytest's own is captured elsewhere
    sys.stdout = open(os.devnull, "w")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        torch.save(function(*arguments), log + ".value")
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stderr.flush()
    os._exit(code)


def on_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Any]:
    """What the function returned on each rank; an error on one of them is the test's."""
    ended = Launch(world, function, *arguments, **options).wait()
    assert not any(rank.code for rank in ended), "\n".join(rank.error for rank in ended)
    return [rank.value for rank in ended]


def train_rank(line: str, hook: Callable[[], Any] | None = None) -> int:
    """`python train.py LINE` in a process of its own, with a hook; rank 0's words are in `said`."""
    sys.stdout = open("said" if os.environ["RANK"] == "0" else os.devnull, "w", buffering=1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if hook:
        hook()
    return train.main(line.split())


def train_complaints(error: str) -> list[str]:
    """The lines `train.py: ...`, without that name; there is no traceback."""
    assert "Traceback" not in error, error
    lines = re.split("[\r\n]", error)
    return [x.removeprefix("train.py: ") for x in lines if x.startswith("train.py: ")]


def train_ranks(ranks: int, line: str, hook: Any = None) -> tuple[list[int], list[list[str]]]:
    """Exit codes (minus a signal's number) and complaints of ranks without torchrun."""
    ended = Launch(ranks, train_rank, line, hook).wait()
    codes = [rank.code or rank.value for rank in ended]
    return codes, [train_complaints(rank.error) for rank in ended]


def train_on(ranks: int, line: str, name: str, hook: Any = None) -> None:
    """A run without complaints in runs/NAME of the working directory."""
    ended = train_ranks(ranks, f"{line} --name {name} --overwrite", hook)
    assert ended == ([0] * ranks, [[]] * ranks)


def train_rows(name: str, log: str = "intervals") -> list[dict]:
    lines = Path("runs", name, f"{log}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][log == "intervals" :]


def train_summary(name: str) -> dict[str, Any]:
    return train.read_json(Path("runs", name, "summary.json"))


def train_end_state(name: str) -> dict:
    """All that a run leaves, but for times and the bytes that rank 0 sent."""
    last = max(Path("runs", name, "checkpoint").glob("step-*[0-9]"))
    hidden = ("seconds", "local_seconds", "sync_seconds", "sent_bytes")
    rows = [*train_rows(name), train_summary(name)]
    return {
        "step": last.name,
        "tensors": {f.name: train.sha256(f) for f in sorted(last.glob("*.safetensors"))},
        "intervals": [{k: v for k, v in row.items() if k not in hidden} for row in rows],
        "metrics": Path("runs", name, "metrics.jsonl").read_text(),
    }


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines, in an uncompressed gzip file if the name says so."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 0) if path.suffix == ".gz" else content)
    return path


def write_shards(folder: Path, count: int, longest: int, order: int = 1) -> None:
    """C4-shaped documents of 2 to `longest` words: some are shorter than a sequence, so that token
    density varies.
    """
    for name in ("c4-train.00000", "c4-train.00001", "c4-validation.00000"):
        rng = random.Random(name)
        lengths = [rng.randint(2, longest) for _ in range(count)]
        texts = [" ".join(rng.choices(("one", "two", "three", "four"), k=n)) for n in lengths]
        rows = [{"text": text, "url": "", "timestamp": ""} for text in texts[::order]]
        write_rows(folder / f"{name}.json.gz", rows)


# ---------------------------------------------------------------- workers and synchronisation


NARROW = replace(model.SIZES["tiny"], width=32, layers=2, heads=2, kv_heads=1, ffn_width=48)
LR = 1e-2


class Words:
    """Batches of random full-length documents, a pure function of (worker, step)."""

    def batch(self, worker: int, step: int) -> data.Batch:
        rng = np.random.default_rng((worker, step))
        tokens = torch.from_numpy(rng.integers(0, 256, (2, 17)))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return data.Batch(inputs, targets, inputs.numel(), ())


WORDS = Words()


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def narrow(size: model.ModelConfig = NARROW) -> model.Transformer:
    network = model.Transformer(size)
    network.init_weights(0)
    return network


def workers_of(
    count: int, optimizer: Any = adamw, cls: Any = diloco.LocalUpdate, codec: Any = None, **options
) -> Any:
    network = narrow()
    ranks, options = diloco.Ranks(workers=count), {"clip": 1.0} | options
    inner = optimizer(network)
    optimizers = inner if isinstance(inner, list) else [inner]
    return cls(network, optimizers, ranks, codec or CODECS["fp32"], **options)


def plan_of(
    steps: int, start: int = 0, ratio=1.0, divisor=1.0, momentum=0.9, scale=1.0
) -> autoloco.Plan:
    return autoloco.Plan(
        1, start, steps, steps, steps, "fixed", 1.0, ratio, divisor, momentum, scale
    )


def local_phase(workers: diloco.Workers, plan: autoloco.Plan, source: Any = WORDS) -> None:
    workers.begin(plan.steps)
    for step in range(plan.step, plan.step + plan.steps):
        for row, worker in enumerate(workers.ranks.hosted):
            workers.step(row, source.batch(worker, step), LR)


def run_interval(workers: diloco.Workers, plan: autoloco.Plan) -> diloco.Measured:
    local_phase(workers, plan)
    return workers.synchronise(plan)


def plain_step(network: nn.Module, inner: torch.optim.Optimizer, batch: data.Batch) -> None:
    inner.zero_grad()
    count = int((batch.targets != IGNORE).sum())
    (network(batch.inputs, batch.targets) / count).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    inner.step()


def oracle(
    workers: int,
    plans: Iterable[autoloco.Plan],
    source: Any = WORDS,
    optimizer: Any = adamw,
    size: model.ModelConfig = NARROW,
    lr_at: Callable[[int], float] = lambda step: LR,
) -> Iterator[tuple[list[Tensor], list[list[Tensor]]]]:
    """K plain models and torch's own optimizers, one process, one line an equation: theta after
    each interval, and the pseudo-gradients.
    """
    models = [narrow(size) for _ in range(workers)]
    optimizers = [optimizer(network) for network in models]
    theta = [p.detach().clone() for p in models[0].parameters()]
    m = [torch.zeros_like(t) for t in theta]
    for plan in plans:
        for worker, (network, inner) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(plan.step, plan.step + plan.steps):
                for group in inner.param_groups:
                    group["lr"] = lr_at(step)
                plain_step(network, inner, source.batch(worker, step))
        deltas = [
            [t - p.detach() for t, p in zip(theta, network.parameters(), strict=True)]
            for network in models
        ]
        for t, momentum, *parts in zip(theta, m, *deltas, strict=True):
            mean = sum(parts[1:], parts[0]) / workers / plan.divisor
            momentum.mul_(plan.momentum).add_(mean)
            t.add_(mean.add(momentum, alpha=plan.momentum), alpha=-0.7 * plan.step_scale)
        for network in models:
            for p, t in zip(network.parameters(), theta, strict=True):
                p.data.copy_(t)
        yield [t.clone() for t in theta], deltas


def energy(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


# Sabotage: flip the sign of Delta, drop 1/K, drop mu in g + mu m.
def test_synchronised_parameters_equal_a_plain_oracle_bit_for_bit():
    plans = [
        plan_of(3),
        plan_of(4, 3, ratio=1.5, divisor=1.5, momentum=0.9**1.5, scale=1.4),
        plan_of(2, 7),
    ]
    workers = workers_of(3)
    for plan, (theta, deltas) in zip(plans, oracle(3, plans), strict=True):
        values = run_interval(workers, plan).values
        for mine, plain in zip(workers.shared, theta, strict=True):
            assert torch.equal(mine, plain.view(-1))
        mean = [sum(parts) / 3 for parts in zip(*deltas, strict=True)]
        drift = sum(map(energy, deltas)) / 3
        assert values["drift"] == pytest.approx(drift, rel=1e-6)
        assert values["coherence"] == pytest.approx(energy(mean) / drift, rel=1e-5)
        apart = [[d - m for d, m in zip(delta, mean, strict=True)] for delta in deltas]
        disagreement = sum(map(energy, apart)) / 3  # C.1
        assert disagreement == pytest.approx(drift * (1 - values["coherence"]), rel=1e-4)
        assert 0 < values["coherence"] < 1


def test_outer_lr_one_without_momentum_is_plain_averaging():
    plan, workers = plan_of(4, momentum=0.0), workers_of(3, outer_lr=1.0)
    start = [t.clone() for t in workers.shared]
    ((_, deltas),) = oracle(3, [plan])
    run_interval(workers, plan)
    for mine, theta, *parts in zip(workers.shared, start, *deltas, strict=True):
        average = sum(theta.view_as(part) - part for part in parts) / 3
        torch.testing.assert_close(mine, average.view(-1), rtol=1e-5, atol=1e-7)


def test_ddp_is_one_model_on_the_mean_gradient_bit_for_bit():
    workers, network = workers_of(3, cls=diloco.DataParallel), narrow()
    inner = adamw(network)
    inner.param_groups[0]["lr"] = LR
    for step in range(4):
        gradients = []
        for worker in range(3):
            batch = WORDS.batch(worker, step)
            inner.zero_grad()
            (network(batch.inputs, batch.targets) / batch.targets.numel()).backward()
            gradients.append([p.grad.clone() for p in network.parameters()])
        for p, *parts in zip(network.parameters(), *gradients, strict=True):
            p.grad = sum(parts[1:], parts[0]) / 3
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        inner.step()
        run_interval(workers, plan_of(1, step))
    for mine, expected in zip(workers.shared, network.parameters(), strict=True):
        assert torch.equal(mine, expected.detach().view(-1))


# Sabotage: skip the momentum, or an out-of-place operation that is never assigned.
def test_twenty_outer_steps_equal_torch_sgd_with_nesterov():
    generator = torch.Generator().manual_seed(1)
    theta, m = torch.randn(1000, generator=generator), torch.zeros(1000)
    plain = torch.nn.Parameter(theta.clone())
    outer = torch.optim.SGD([plain], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(20):
        g = torch.randn(1000, generator=generator)
        plain.grad = g.clone()
        outer.step()
        diloco.nesterov(theta, m, g, 0.9, 0.7)
        assert torch.equal(theta, plain.detach())


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [(False, (-0.33, -3.945941, -6.327054)), (True, (-0.33, -3.080827, -5.272940))],
)
def test_outer_step_follows_the_series_worked_by_hand(normalise, expected):
    theta, m = torch.ones(1), torch.zeros(1)
    for rho, value in zip((1.0, 1.5, 1.0), expected, strict=True):
        mu = autoloco.momentum_retention(0.9, rho)
        g = torch.ones(1) / (autoloco.normaliser(rho) if normalise else 1.0)
        diloco.nesterov(theta, m, g, mu, 0.7 * autoloco.step_scale(mu, 0.9, rho, 2.0))
        assert float(theta) == pytest.approx(value, abs=2e-6)


def test_without_a_finite_worker_the_interval_is_discarded():
    workers = workers_of(2)
    run_interval(workers, plan_of(2))
    before = {name: value.clone() for name, value in workers.shared_state().items()}
    local_phase(workers, plan_of(1, 2))
    for replica in workers.replicas:
        replica.local[3][0] = math.inf
    assert workers.synchronise(plan_of(1, 2)).excluded == (0, 1)
    after = workers.shared_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(workers.replicas[1].local[3], workers.shared[3])


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    inputs = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    targets = inputs.roll(-1, 1)
    for row, length in enumerate((16, 3, 9, 1)):
        targets[row, length:] = IGNORE
    found = []
    for micro in (0, 1, 3):
        workers = workers_of(1, micro_batch=micro)
        loss, count, tokens = workers.backward(data.Batch(inputs, targets, 28, ()))
        assert (count, tokens) == (29, 28)
        found.append((loss, torch.cat([p.grad.view(-1) for p in workers.parameters])))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-6)


def test_checksum_sees_one_changed_bit_and_odd_sizes():
    tensors = [torch.randn(7), torch.randn(8)]
    before = diloco.checksum(tensors)
    for tensor in tensors:
        for index in range(tensor.numel()):
            tensor.view(torch.int32)[index] ^= 1
            assert diloco.checksum(tensors) != before
            tensor.view(torch.int32)[index] ^= 1
    assert diloco.checksum(tensors) == before


# ---------------------------------------------------------------- what a fork plugs in


def heavy_ball(theta: Tensor, momentum: Tensor, g: Tensor, retention: float, step: float) -> Tensor:
    momentum.mul_(retention).add_(g)
    theta.add_(momentum, alpha=-step)
    return momentum


def test_another_outer_step_is_one_function():
    workers = workers_of(1, outer_step=heavy_ball)
    theta = [torch.nn.Parameter(t.clone()) for t in workers.shared]
    outer = torch.optim.SGD(theta, lr=0.7, momentum=0.9)
    for start in (0, 2, 4):
        local_phase(workers, plan_of(2, start))
        for t, local in zip(theta, workers.replicas[0].local, strict=True):
            t.grad = t.detach() - local
        outer.step()
        assert workers.synchronise(plan_of(2, start)).values["update_norm"] > 0
        assert all(torch.equal(a, b) for a, b in zip(theta, workers.shared, strict=True))


class Float8(quant.Codec):
    """One byte a number, in units of 1e-3."""

    name, element_bytes = "fp8", 1

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        out.view(torch.float8_e4m3fn).copy_(source * 1e3)

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        return out.copy_(encoded.view(torch.float8_e4m3fn)).div_(1e3)


class ErrorFeedback(diloco.LocalUpdate):
    """What a worker's codec loses is added to its next pseudo-gradient; and one more statistic."""

    worker_buffers = ("lost",)

    def pseudo_gradient(self, row: int) -> Tensor:
        square = super().pseudo_gradient(row)
        replica = self.replicas[row]
        for chunk in self.wire.chunks:
            delta, lost = (diloco.cut(t, chunk) for t in (replica.local, replica.buffers["lost"]))
            delta.add_(lost)
            lost.copy_(delta - self.wire.round_trip(chunk, delta))
        return square

    def synchronise(self, plan: autoloco.Plan) -> diloco.Measured:
        measured = super().synchronise(plan)
        own = torch.tensor([energy(replica.buffers["lost"]) for replica in self.replicas])
        lost = self.ranks.gather(own.double()).sum()
        return measured._replace(values=measured.values | {"lost_energy": float(lost)})


def muon_and_adamw(network: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and "block" in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in network.parameters() if id(p) not in chosen]
    first = torch.optim.Muon([{"params": matrices, "lr_ratio": 2.0}])
    return [first, torch.optim.AdamW(rest)]


def adafactor(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(network.parameters())


@pytest.mark.parametrize("optimizer", [adamw, muon_and_adamw, adafactor])
@pytest.mark.parametrize("at", [0, 1])
def test_a_restored_worker_goes_on_bit_for_bit_with_what_was_plugged_in(optimizer, at):
    options: dict[str, Any] = {"cls": ErrorFeedback, "codec": Float8(), "outer_step": heavy_ball}
    straight, resumed = (workers_of(2, optimizer, **options) for _ in range(2))
    measured = run_interval(straight, plan_of(2))
    assert measured.values["lost_energy"] > 0
    straight.begin(3)
    for step in range(at):  # worker 0 is one step ahead, as after a signal
        straight.step(0, WORDS.batch(0, 2 + step), LR)
    files = [straight.shared_state(), *(straight.worker_state(row) for row in range(2))]
    files = [{name: value.clone() for name, value in file.items()} for file in files]
    resumed.load_shared(files[0])
    for row, file in enumerate(files[1:]):
        resumed.load_worker(row, file)
        again = resumed.worker_state(row)
        assert again.keys() == file.keys()
        assert all(torch.equal(again[name], file[name]) for name in file)
    assert resumed.done == [at, 0]
    found = []
    for workers in straight, resumed:
        for row in range(2):
            for step in range(workers.done[row], 3):
                workers.step(row, WORDS.batch(row, 2 + step), LR)
        last = workers.synchronise(plan_of(3, 2))
        assert run_interval(workers, plan_of(1, 5)).values["lost_energy"] > 0
        found.append((last.values, diloco.checksum(workers.shared), last.records["loss"].tolist()))
    assert found[0] == found[1]


# Sabotage: leave the buffers of an excluded worker as they are.
def test_an_excluded_worker_s_own_buffers_start_again_too():
    workers = workers_of(2, cls=ErrorFeedback, codec=CODECS["int8"])
    run_interval(workers, plan_of(2))
    assert workers.replicas[1].buffers["lost"][0].any()
    local_phase(workers, plan_of(2))
    workers.replicas[1].local[0][0] = math.nan
    assert workers.synchronise(plan_of(2)).excluded == (1,)
    assert not any(lost.any() for lost in workers.replicas[1].buffers["lost"])
    assert torch.equal(workers.replicas[1].local[0], workers.shared[0])
    assert all(theta.isfinite().all() for theta in workers.shared)


def test_a_group_s_lr_ratio_multiplies_the_scheduled_rate():
    workers = workers_of(1, muon_and_adamw)
    workers.set_lr(0.5)
    assert [o.param_groups[0]["lr"] for o in workers.optimizers] == [1.0, 0.5]


def own_loop() -> tuple[list[str], float]:
    """README's loop as printed: its decisions, and the last error."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "LocalUpdate(" in b)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names["decisions"], float(names["error"])


def test_readme_s_loop_around_your_own_model_learns_and_decides_the_same_on_two_ranks():
    (decisions, error), (others, _) = on_ranks(2, own_loop)
    assert decisions == others and any("adopt" in reason for reason in decisions)
    assert error < 0.3  # from 1.7


# ---------------------------------------------------------------- schedules (E.2)


def test_linear_interval_grows_from_10_to_990_and_always_sums_to_the_budget():
    schedule = diloco.linear_schedule(C4)
    assert (len(schedule), schedule[0], schedule[-1]) == (100, 10, 990)
    assert all(8 <= b - a <= 11 for a, b in itertools.pairwise(schedule))
    for steps, base in itertools.product((1, 2, 99, 100, 101, 2999), (1, 7, 100, 300)):
        schedule = diloco.linear_schedule(autoloco.Rules(steps, 4e-4, 1000, base))
        assert sum(schedule) == steps and min(schedule) >= 1


def test_qsr_gives_the_reported_41_synchronisations():
    schedule = diloco.qsr_schedule(C4)
    assert len(schedule) == 41 and sum(schedule) == 50_000
    assert schedule[:6] == (500, 500, 500, 500, 501, 502)
    assert schedule[-5:] == (1743, 2172, 2966, 4907, 13822)


# Sabotage: int((alpha / lr) ** 2).
@pytest.mark.parametrize(
    ("lr", "base", "left", "steps"),
    [(0.1, 1, 100, 9), (0, 1, 100, 100), (1e-200, 1, 100, 100), (0.3, 7, 5, 5)],
)
def test_qsr_survives_the_rounding_trap_and_a_vanishing_rate(lr, base, left, steps):
    assert diloco.qsr_horizon(0.3, lr, base, left) == steps


# ---------------------------------------------------------------- the wire (G)

WIRE_NUMELS = [1, 7, 0, 1003, 4095, 4096, 4097, 3 * BLOCK + 5, *[5000] * 6]


def wire_deltas(repetition: int, worker: int) -> list[Tensor]:
    """A worker's tensors, in every repetition of another scale."""
    generator = torch.Generator().manual_seed(1000 * repetition + worker)
    scale = 10.0 ** ((7 * repetition + worker) % 9 - 6)
    return [torch.randn(numel, generator=generator) * scale for numel in WIRE_NUMELS]


def wire_included(repetition: int) -> list[bool]:
    """Which of three workers count: all, two, one."""
    rest = repetition % 3
    return [rest == 0 or (worker != repetition // 3 % 3) == (rest == 1) for worker in range(3)]


def wire_sums(ranks: diloco.Ranks) -> list[int]:
    """Checksums of the mean as one rank decodes it, by repetition and codec."""
    wires = [diloco.Wire(ranks, codec, WIRE_NUMELS) for codec in CODECS.values()]
    sums = []
    for repetition in range(60):
        hosted = [wire_deltas(repetition, worker) for worker in ranks.hosted]
        for wire in wires:
            copies = [[tensor.clone() for tensor in tensors] for tensors in hosted]
            out = [torch.full((numel,), math.nan) for numel in WIRE_NUMELS]
            found = list(wire.mean(copies, wire_included(repetition)))
            assert [chunk for chunk, _ in found] == wire.chunks
            for chunk, mean in found:
                diloco.cut(out, chunk).copy_(mean)
            sums.append(diloco.checksum(out))
    return sums


def plain_sums() -> Iterator[int]:
    """The same from the definition, a block at a time, without a wire."""

    def coded(codec: quant.Codec, x: Tensor, chunk: Chunk) -> Tensor:
        encoded = torch.empty(codec.nbytes(chunk), dtype=torch.uint8)
        codec.encode(x, chunk.block, encoded)
        return codec.decode(encoded, chunk.block, torch.empty(len(x)))

    for repetition in range(60):
        workers = [wire_deltas(repetition, k) for k in range(3) if wire_included(repetition)[k]]
        for codec in CODECS.values():
            out = [torch.full((numel,), math.nan) for numel in WIRE_NUMELS]
            for chunk in chunks(WIRE_NUMELS, BLOCK):
                total = torch.zeros(chunk.stop - chunk.start)
                for tensors in workers:
                    total += coded(codec, diloco.cut(tensors, chunk), chunk)
                diloco.cut(out, chunk).copy_(coded(codec, total / len(workers), chunk))
            yield diloco.checksum(out)


def test_the_mean_of_three_processes_is_the_plain_one_bit_for_bit_60_times(monkeypatch):
    monkeypatch.setattr(diloco, "SLAB", 2 * BLOCK)  # many chunks of few numbers
    monkeypatch.setattr(diloco, "PIECE_BYTES", 2 * BLOCK)  # several pieces travel at a time
    plain = list(plain_sums())
    assert wire_sums(diloco.Ranks(workers=3)) == plain
    assert on_ranks(3, lambda: wire_sums(diloco.connect(3)[0])) == [plain] * 3


# Sabotage: a plain all-gather, which sends K - 1 payloads a rank.
@pytest.mark.parametrize("per_rank", [1, 2])
def test_four_ranks_send_what_the_shapes_give(per_rank):
    def sent() -> list[int]:
        ranks, _ = diloco.connect(4 * per_rank)
        counts = []
        for codec in CODECS.values():
            ranks.bytes_sent = 0
            hosted = [[torch.ones(40_000), torch.ones(9)] for _ in ranks.hosted]
            list(diloco.Wire(ranks, codec, [40_000, 9]).mean(hosted, [True] * ranks.workers))
            counts.append(ranks.bytes_sent)
        return counts

    for codec, *counts in zip(CODECS.values(), *on_ranks(4, sent), strict=True):
        # Each other rank's part of every hosted worker's delta, then the own part of the mean.
        assert sum(counts) == 3 * (per_rank + 1) * payload_bytes(codec, [40_000, 9])


# ---------------------------------------------------------------- ranks


@pytest.fixture(scope="session")
def rank_place(tmp_path_factory) -> Iterator[Path]:
    """A folder with documents in two orders; its name is not plain."""
    folder = tmp_path_factory.mktemp("mit Leerzeichen und ö")
    write_shards(folder / "shards", 60, 30)
    write_shards(folder / "shuffled", 60, 30, order=-1)
    return folder


@pytest.fixture
def at_shards(rank_place, monkeypatch) -> Path:
    monkeypatch.chdir(rank_place)
    return rank_place


RANK_LINE = (
    "--data shards --batch-size 1 --seq-len 32 --val-documents 6 --warmup 10 --base-horizon 10 "
    "--granularity 1 --steps 120 --workers 2"
)


def decided_run(line: str) -> tuple[int, list[Any]]:
    """A whole run on this rank; its exit code, and every state and checksum that it came to."""
    complete, summed, seen = autoloco.complete, diloco.checksum, list[Any]()

    def watched(*arguments: Any) -> Any:
        seen.append(complete(*arguments))
        return seen[-1]

    def checked(tensors: Iterable[Tensor]) -> int:
        seen.append(summed(tensors))
        return int(seen[-1])

    autoloco.complete, diloco.checksum = watched, checked
    return train_rank(line), seen


OTHER_MACHINE = {  # not ATen's "default": without fused multiply-add theta itself differs
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",  # threads that spin would starve the other rank
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}


# Sabotage: take the norms of the mean and of the update from each rank's own dots.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["autoloco", "ddp"])
def test_ranks_on_different_machines_decide_the_same_to_the_end(at_shards, method):
    line = f"{RANK_LINE} --method {method} --name {method} --overwrite --steps 60 --base-horizon 4"
    (code, first), (_, second) = on_ranks(2, decided_run, line, environments=[{}, OTHER_MACHINE])
    assert code == 0 and len(first) == 2 * len(train_rows(method))
    assert first == second


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("--lr 1e-3", "--lr: rank 1 has 0.001, rank 0 has 0.002"),
        ("--workers 4", "--workers: rank 1 has 4, rank 0 has 2"),
        ("", "rank 1 has"),  # documents in another order under the same name
    ],
)
def test_ranks_that_were_started_differently_end_with_one_line(at_shards, tmp_path, other, words):
    def hook() -> None:
        if os.environ["RANK"] == "1":
            os.symlink(at_shards / ("shards" if other else "shuffled"), tmp_path / "shards")
            os.chdir(tmp_path)
            parse = train.parse
            train.parse = lambda argv: parse([*argv, *other.split()])

    codes, ((line,), after) = train_ranks(2, f"{RANK_LINE} --name different", hook)
    assert codes == [2, 2] and words in line and after == []  # rank 0 speaks for all
    assert not Path("runs/different").exists()


@pytest.mark.parametrize("number, shards", [(signal.SIGSTOP, 1), (signal.SIGKILL, 2)])
def test_a_lost_or_hung_rank_ends_the_others_within_the_timeout(at_shards, number, shards):
    line = f"{RANK_LINE} --workers {2 // shards} --ranks-per-worker {shards} --checkpoint-every 1"
    line += f" --timeout-minutes 0.05 --overwrite --name lost{shards}"

    def hook() -> None:
        step = diloco.LocalUpdate.step

        def last(workers: Any, row: int, batch: Any, lr: float) -> None:
            if workers.done[row] == 5 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), number)
            step(workers, row, batch, lr)

        diloco.LocalUpdate.step = last

    launch = Launch(2, train_rank, line, hook)
    launch.processes[0].join(20)
    launch.processes[1].kill()
    first, _ = launch.wait()
    (words,) = train_complaints(first.error)
    assert first.value == 1 and "another rank is gone" in words and "--timeout-minutes" in words


def ddp_beside_a_store_that_hangs() -> tuple[int, int]:
    """How often 40 steps look for a signal, and the checksum."""
    looks, watch = list[Any](), diloco.Ranks.watch

    def check(keys: Any) -> None:
        looks.append(keys)
        time.sleep(60)

    diloco.Ranks.watch = lambda ranks, _: watch(ranks, SimpleNamespace(check=check))
    ranks, _ = diloco.connect(2)
    time.sleep(1.2)
    network = narrow()
    workers = diloco.DataParallel(network, [adamw(network)], ranks)
    run_interval(workers, plan_of(40))
    return len(looks), diloco.checksum(workers.shared)


def test_a_store_that_hangs_holds_nobody_up():
    began = time.monotonic()
    (looks, first), (_, second) = on_ranks(2, ddp_beside_a_store_that_hangs)
    assert looks == 1 and first == second and time.monotonic() - began < 30


# ---------------------------------------------------------------- whole runs on several ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "--steps 280 --lr 5e-1",  # far too high: the controller adopts, holds, reduces
        "--steps 280 --lr 5e-1 --wire int8",
        "--steps 20 --method ddp",
    ],
)
def test_the_layout_changes_nothing(at_shards, line):
    for ranks in (1, 2, 4):
        train_on(ranks, f"{RANK_LINE} --workers 4 {line}", f"on{ranks}")
    states = [train_end_state(f"on{ranks}") for ranks in (1, 2, 4)]
    assert states[0] == states[1] == states[2]
    reasons = " ".join(row["reason"] for row in train_rows("on4"))
    assert "ddp" in line or ("adopt" in reasons and "reduce" in reasons)


def test_two_processes_hold_the_oracle_s_parameters_after_each_synchronisation(at_shards):
    train_on(2, f"{RANK_LINE} --steps 45 --lr 1e-3", "oracle")
    rows, config = train_rows("oracle"), train.load_config(Path("runs/oracle"))
    source, state, plans = data.open_source(config), autoloco.start(config.rules), []
    for row in rows:
        plans.append(autoloco.plan(config.rules, state))
        seen = autoloco.Observation(row["drift"], row["coherence"], row["exposure"], row["tokens"])
        state, _ = autoloco.complete(config.rules, state, plans[-1], seen)

    def inner(network: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {
                "params": [p for p in network.parameters() if (p.ndim > 1) == matrices],
                "weight_decay": 0.1 * matrices,
            }
            for matrices in (True, False)
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    expected = oracle(2, plans, source, inner, model.SIZES["tiny"], config.rules.rates.__getitem__)
    for row, (theta, _) in zip(rows, expected, strict=True):
        assert row["checksum"] == f"{diloco.checksum(t.view(-1) for t in theta):016x}"


# ---------------------------------------------------------------- workers sharded with FSDP2

# 15 intervals of 4 steps and more: warm-up, reference, variability, monitor, candidates.
FSDP_LINE = (
    "--data shards --steps 60 --base-horizon 4 --warmup 8 --lr 5e-4 --seq-len 48 --val-documents 6 "
    "--workers 2"
)
FSDP_SHARDED = FSDP_LINE + " --ranks-per-worker 2"


@pytest.fixture(scope="session")
def sharded(rank_place) -> str:
    """Two workers of two ranks each."""
    with contextlib.chdir(rank_place):
        train_on(4, FSDP_SHARDED, "sharded")
    return "sharded"


def farthest(one: str, other: str, key: str = "loss") -> float:
    """Largest difference of a metric over all steps."""
    pairs = zip(train_rows(one, "metrics"), train_rows(other, "metrics"), strict=True)
    return max(abs(a[key] - b[key]) for a, b in pairs)


def test_two_workers_of_two_ranks_decide_and_lose_as_two_unsharded_workers_do(at_shards, sharded):
    train_on(1, FSDP_LINE, "whole")
    measured = ("drift", "coherence", "update_norm")
    pairs = list(zip(train_rows(sharded), train_rows("whole"), strict=True))
    for one, other in pairs:
        for key in ("interval", "steps", "horizon", "accepted", "phase", "verdict", "tokens"):
            assert one[key] == other[key]
        for key in measured:  # sums over the shards
            assert one[key] == pytest.approx(other[key], rel=1e-3)
    assert {row["horizon"] for row, _ in pairs} == {4, 6}  # it did decide
    assert farthest(sharded, "whole") < 1e-4
    assert farthest(sharded, "whole", "grad_norm") < 1e-3
    assert farthest(sharded, "whole", "tokens") == 0
    one, other = train_summary(sharded), train_summary("whole")
    assert one["val_loss"] == pytest.approx(other["val_loss"], abs=1e-4)
    assert one["payload_bytes"] == other["payload_bytes"]


def test_loss_of_a_sharded_run_equals_its_summary(at_shards, sharded):
    measured = evaluation.loss(Path("runs", sharded))
    assert measured["val_loss"] == pytest.approx(train_summary(sharded)["val_loss"], abs=1e-6)


def test_several_workers_a_rank_together_with_sharding_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    for workers, shards in ((4, 2), (2, 3), (4, 4)):
        line = f"--workers {workers} --ranks-per-worker {shards} --name refused"
        assert train.main(line.split()) == 2
        assert capsys.readouterr().err.startswith("train.py: --ranks-per-worker")
    assert not Path("runs/refused").exists()


@pytest.mark.slow
def test_a_sharded_run_resumed_inside_an_interval_equals_the_straight_one(at_shards, sharded):
    def hook() -> None:
        if os.environ["RANK"] == "3":
            train_at(1, 26, train_kill)

    train_on(4, f"{FSDP_SHARDED} --checkpoint-every 1", "cut", hook)
    where = max(Path("runs/cut/checkpoint").glob("step-*"))
    assert len(list(where.glob("worker-*-shard-*.safetensors"))) == 4
    inside = int(where.name.removeprefix("step-"))
    assert train_rows("cut")[-1]["step"] < inside < 60  # before its synchronisation
    assert train_ranks(4, "--resume --name cut") == ([0] * 4, [[]] * 4)
    assert train_end_state("cut") == train_end_state(sharded)
    assert len(train_end_state("cut")["tensors"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "sharded_only", "bound"),
    [
        ("--wire int8", "", 1e-3),
        ("--dtype bf16 --wire bf16", "", 0.2),  # embedding and norms are gathered in bf16 as well
        ("--method ddp --steps 24 --base-horizon 8", "", 1e-4),
        ("--steps 24", "--activation-checkpointing --eval-every 1", 1e-4),
        ("--steps 8", "--compile", 1e-4),
    ],
)
def test_sharded_runs_stay_close_to_unsharded_ones(at_shards, changes, sharded_only, bound):
    train_on(4, f"{FSDP_SHARDED} {changes} {sharded_only}", "sharded-changed")
    train_on(1, f"{FSDP_LINE} {changes}", "whole-changed")
    assert farthest("sharded-changed", "whole-changed") < bound
    config, _ = train.parse(f"{FSDP_SHARDED} {changes}".split())
    steps = config.base_horizon if config.method == "ddp" else 1
    assert train_rows("sharded-changed")[0]["payload_bytes"] == train.payload(config) * steps


@pytest.mark.slow
def test_a_sharded_run_starts_from_a_sharded_run_and_from_its_export(at_shards, sharded):
    assert evaluation.main(["export", f"runs/{sharded}", "exported"]) == 0
    line = "--steps 8 --init-from "
    train_on(4, f"{FSDP_SHARDED} {line}runs/{sharded}", "from-run")
    train_on(4, f"{FSDP_SHARDED} {line}exported", "from-export")
    train_on(1, f"{FSDP_LINE} {line}runs/{sharded}", "whole-from-run")
    assert train_rows("from-run", "metrics") == train_rows("from-export", "metrics")
    assert farthest("from-run", "whole-from-run") < 1e-5


def fsdp_against_one_process() -> dict[str, Any]:
    """fp64: four ranks share one worker of two rows a batch, so that some ranks have no row, and
    some hold no element of some parameters: 6 rows over 4 ranks are 2, 2, 2, 0.
    """
    torch.set_default_dtype(torch.float64)
    config, _ = train.parse(f"{FSDP_LINE} --workers 1 --ranks-per-worker 4".split())
    ranks, _ = diloco.connect(1, 4, 1.0)
    source, differences, aliased = data.open_source(config), [], True

    def trained(config: train.Config, ranks: diloco.Ranks) -> tuple[diloco.Workers, Tensor]:
        workers = train.build_workers(config, ranks, source)
        local_phase(workers, plan_of(12), source)
        records = workers._collect()
        return workers, torch.stack([records[name] for name in diloco.RECORD])

    for tied in (True, False):
        model.SIZES["tiny"] = model.ModelConfig(264, 6, 2, 1, 1, 5, tied=tied)
        whole, expected = trained(replace(config, ranks_per_worker=1), diloco.Ranks())
        for options in ({}, {"micro_batch": 1}, {"activation_checkpointing": True}):
            workers, records = trained(replace(config, **options), ranks)
            differences.append(float((records - expected).abs().max()))
            for p, q in zip(workers.parameters, whole.parameters, strict=True):
                full: Any = p.detach()
                differences.append(float((full.full_tensor() - q.detach()).abs().max()))
        # What FSDP2 computes with is the memory that a synchronisation writes to.
        for flat, p in zip(workers.replicas[0].local, workers.parameters, strict=True):
            aliased &= flat.data_ptr() == diloco.local_tensor(p).data_ptr()
    numels = [diloco.local_tensor(p).numel() for p in workers.parameters]
    assert numels == train.shard_numels(replace(config), ranks.shard) and aliased
    assert len(source.batch(0, 0).inputs) == 2
    return {"largest": max(differences), "empty": numels.count(0)}


# Sabotage: let FSDP2 average the shards' gradients.
@pytest.mark.slow
def test_sharded_training_equals_unsharded_with_empty_shards_and_ranks_without_rows(at_shards):
    ended = on_ranks(4, fsdp_against_one_process)
    assert max(rank["largest"] for rank in ended) < 1e-12
    assert ended[3]["empty"] > 3


# ---------------------------------------------------------------- codecs (G)

QUANT_TINY = 2.0**-126  # fp32's smallest normal number: the guard in the int8 scale
QUANT_EDGES = [0, 1, 4095, 4096, 4097, SLAB - 1, SLAB, SLAB + 1, 2 * SLAB + BLOCK + 5]
QUANT_NUMELS = st.lists(st.one_of(st.integers(0, 3 * SLAB), st.sampled_from(QUANT_EDGES)))
INT8 = CODECS["int8"]
CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def quant_encoded(codec: quant.Codec, source: Tensor, block: int) -> Tensor:
    size = codec.nbytes(Chunk(0, 0, source.numel(), block))
    out = torch.full((size,), 0x5A, dtype=torch.uint8, device=source.device)
    codec.encode(source, block, out)
    return out


def quant_round_trip(codec: quant.Codec, source: Tensor) -> Tensor:
    """A tensor through the codec, chunk by chunk, in one buffer without padding."""
    cut = chunks([len(source)], SLAB)
    sizes = [codec.nbytes(chunk) for chunk in cut]
    wire, result = torch.empty(sum(sizes), dtype=torch.uint8), torch.full_like(source, 12345.0)
    for chunk, part in zip(cut, wire.split(sizes), strict=True):
        codec.encode(source[chunk.start : chunk.stop], chunk.block, part)
    for chunk, part in zip(cut, wire.split(sizes), strict=True):
        codec.decode(part, chunk.block, result[chunk.start : chunk.stop])
    return result


def through_int8(source: Tensor) -> Tensor:
    return quant_round_trip(INT8, source)


def plain_int8(block: Tensor) -> tuple[Tensor, Tensor]:
    """G's formula for one finite block, written for reading: scale and values."""
    absmax = block.abs().max()
    scale = absmax / 127 + QUANT_TINY
    if scale == QUANT_TINY:  # zeros
        return torch.zeros(()), torch.zeros(block.numel(), dtype=torch.int8)
    return scale, (block / scale).round().clamp(-127, 127).to(torch.int8)


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def block_values() -> st.SearchStrategy[list[float]]:
    """Blocks of ordinary, tiny and huge numbers."""
    largest = float(torch.finfo(torch.float32).max)
    bounds = (1.0, QUANT_TINY, largest)
    kinds = (st.floats(-bound, bound, width=32) for bound in bounds)
    return st.one_of(*(st.lists(kind, min_size=1, max_size=40) for kind in kinds))


@settings(derandomize=True, deadline=None)
@given(QUANT_NUMELS, st.sampled_from([BLOCK, SLAB, 2 * SLAB]))
def test_chunks_cover_every_element_once_and_take_the_plain_formula(numels, slab):
    plain = {
        "fp32": sum(4 * n for n in numels),
        "bf16": sum(2 * n for n in numels),
        "int8": sum(n + 4 * math.ceil(n / 4096) for n in numels),
    }
    for name, size in plain.items():
        assert payload_bytes(CODECS[name], numels) == size
        assert sum(CODECS[name].nbytes(chunk) for chunk in chunks(numels, slab)) == size
    ends: dict[int, int] = {tensor: 0 for tensor, numel in enumerate(numels) if numel}
    order = []
    for tensor, start, stop, block in chunks(numels, slab):
        assert ends[tensor] == start < stop <= start + slab and start % BLOCK == 0
        tail = numels[tensor] % BLOCK  # alone, and last
        assert (block, (stop - start) % BLOCK) in ((BLOCK, 0), (tail, tail))
        assert block == BLOCK or stop == numels[tensor] == start + block
        ends[tensor] = stop
        order.append((tensor, start))
    assert order == sorted(order) and ends == {t: n for t, n in enumerate(numels) if n}


@CODEC
def test_encode_and_decode_never_read_a_value_back(codec: quant.Codec) -> None:
    # Tensors on the meta device have no values: a hidden .item() or host synchronisation raises.
    source = torch.empty(2 * BLOCK, device="meta")
    wire = quant_encoded(codec, source, BLOCK)
    assert codec.decode(wire, BLOCK, torch.empty_like(source)).shape == source.shape


def test_fp32_keeps_every_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (SLAB + 7,), generator=torch.Generator().manual_seed(1))
    source = bits.to(torch.int32).view(torch.float32)  # NaN payloads, infinities, subnormals
    result = quant_round_trip(CODECS["fp32"], source)
    assert torch.equal(result.view(torch.int32), source.view(torch.int32))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=70))
def test_bf16_is_within_two_to_the_minus_eight(values: list[float]) -> None:
    source = torch.tensor(values)
    error = (quant_round_trip(CODECS["bf16"], source).double() - source.double()).abs()
    assert bool((error <= (2.0**-8 * source.double().abs()).clamp_min(2.0**-134)).all())


# Sabotage: divide by 128, floor instead of round, or one scale for the whole chunk.
@pytest.mark.parametrize("numel", QUANT_EDGES[1:])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-30, 1e-38, 1e30, 0.0])
def test_int8_is_the_plain_formula_bit_for_bit(numel: int, size: float) -> None:
    source = gaussian(numel, seed=numel) * size
    pairs = [plain_int8(block) for block in source.split(BLOCK)]
    expected = torch.cat([values.float() * scale for scale, values in pairs])
    assert torch.equal(through_int8(source), expected)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(block_values())
def test_int8_bytes_are_the_plain_formula_and_errors_within_half_a_scale(values):
    source = torch.tensor(values)
    scale, integers = plain_int8(source)
    wire = quant_encoded(INT8, source, source.numel())
    assert torch.equal(wire[:4], scale.view(1).view(torch.uint8))
    assert torch.equal(wire[4:].view(torch.int8), integers)
    if source.abs().max() < torch.finfo(torch.float32).max:  # that one overflows, see below
        result = INT8.decode(wire, source.numel(), torch.empty_like(source))
        error = (result.double() - source.double()).abs()
        # A block below 2**-143 counts as zeros: scale 0.
        assert bool((error <= (scale.double() * (0.5 + 2.0**-16)).clamp_min(2.0**-143)).all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_int8_block_with_inf_or_nan_decodes_to_nan_and_no_other_does(bad: float) -> None:
    source = gaussian(3 * BLOCK + 5)
    calm = through_int8(source)
    source[[BLOCK, -1]] = bad
    result, hit = through_int8(source), torch.arange(len(source)) // BLOCK % 2 == 1
    assert bool(result[hit].isnan().all()) and torch.equal(result[~hit], calm[~hit])
    wire = quant_encoded(INT8, torch.tensor([0.0, bad, -bad, 1.0]), 4)
    wire[4:] = torch.arange(1, 5)  # whatever the values of such a block happen to be
    assert bool(INT8.decode(wire, 4, torch.empty(4)).isnan().all())


def test_int8_message_is_the_fp32_scales_and_then_the_values() -> None:
    source = torch.tensor([127.0, -2.0, 0.5, 1.5, 254.0, 1.0, 3.0, 5.0])  # halves go to even
    wire = quant_encoded(INT8, source, block=4)
    assert wire[:8].view(torch.float32).tolist() == [1.0, 2.0]
    assert wire[8:].view(torch.int8).tolist() == [127, -2, 0, 2, 127, 0, 2, 2]
    with pytest.raises(AssertionError, match="do not encode to"):
        INT8.decode(wire[1:], 4, torch.empty(8))


# ------------------------------------------------------------------------------------------------
# Documents, tokens, batches (E.1)
# ------------------------------------------------------------------------------------------------

DATA_CONFIG: dict[str, Any] = {
    **{"tokenizer": "bytes", "init_from": "", "seq_len": 16, "batch_size": 2, "workers": 3},
    **{"seed": 7, "partition": "iid", "val_documents": 4, "long_documents": "cut"},
}
DATA_TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture(autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` writes goes into a temporary folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


def data_source(path: Path | str, **changes: Any) -> data.Source:
    return data.open_source(SimpleNamespace(**{**DATA_CONFIG, "data": str(path), **changes}))


def data_texts(name: str, count: int) -> list[dict[str, Any]]:
    urls = [f"http://host{i}.org/{name}" for i in range(count)]
    return [{"text": f"{name} {i}", "timestamp": "0", "url": url} for i, url in enumerate(urls)]


def data_c4(root: Path, *sizes: int) -> Path:
    """A folder in C4's layout: one training shard a size, and a validation shard of five rows."""
    for at, size in enumerate(sizes):
        name = f"c4-train.{at:05d}-of-{len(sizes):05d}.json.gz"
        write_rows(root / name, data_texts(f"train{at}", size))
    write_rows(root / "c4-validation.00000-of-00001.json.gz", data_texts("held", 5))
    return root


def data_chat(path: Path, count: int, train: str = "train.jsonl", **extra: Any) -> Path:
    """A folder of `count` training conversations and three for validation."""
    rows = [{"messages": DATA_TURNS, "url": f"http://h{i:03d}.org/", **extra} for i in range(count)]
    write_rows(path / train, rows)
    write_rows(path / "test.jsonl", rows[:3])
    return path


def data_bpe(folder: Path, chains: tuple[bytes, ...] = (b" the", b"and", b"\n\n", b"  ")) -> Path:
    """A small `tokenizer.model` in tiktoken's format: the bytes, and every prefix of each chain."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [chain[:end] for chain in chains for end in range(2, len(chain) + 1)]
    lines = [f"{base64.b64encode(token).decode()} {at}\n" for at, token in enumerate(tokens)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder / "tokenizer.model"


def data_json_tokenizer(folder: Path, specials: tuple[str, ...], **config: Any) -> Path:
    """A small `tokenizer.json` as Hugging Face writes it: byte-level BPE of a few sentences."""
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.pre_tokenizer, built.decoder = level, tokenizers.decoders.ByteLevel()
    options = {"special_tokens": list(specials), "initial_alphabet": level.alphabet()}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, **options)
    built.train_from_iterator(["the end and the rest of the text"] * 9, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def data_ids(source: data.Source, worker: int, steps: range) -> list[str]:
    return [name for step in steps for name in source.batch(worker, step).ids]


def data_held(source: data.Source) -> list[str]:
    return [name for batch in source.validation() for name in batch.ids]


# ------------------------------------------------------------------------------- batches (E.1, A.3)


def test_a_batch_holds_the_tokens_their_successors_and_padding_worked_by_hand(tmp_path):
    """begin=256, end=257; the end token is an input without a successor, and pads."""
    rows = [{"text": "held"}, {"text": "ab"}, {"text": "abcdefgh"}]
    batch = data_source(write_rows(tmp_path / "x.jsonl", rows), workers=1, seq_len=6).batch(0, 0)
    n = IGNORE
    assert batch.inputs.tolist() == [[256, 97, 98, 257, 257, 257], [256, 97, 98, 99, 100, 101]]
    # Sabotage: shift the targets by none or by two.
    assert batch.targets.tolist() == [[97, 98, 257, n, n, n], [97, 98, 99, 100, 101, 102]]
    assert batch.tokens == 3 + 6 and batch.ids == ("x.jsonl:2", "x.jsonl:3")
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64


def test_documents_of_known_lengths_give_the_exact_token_count(tmp_path):
    lengths = [0, 1, 5, 14, 15, 16, 17, 100]
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": "x" * length} for length in lengths])
    for seq_len in (16, 32):  # doubling the padding adds only padding
        source = data_source(tmp_path, workers=1, batch_size=8, seq_len=seq_len, val_documents=8)
        expected = sum(min(length + 1, seq_len) for length in lengths)
        for batch in (source.batch(0, 0), *source.validation()):
            assert batch.tokens == expected == int((batch.targets != IGNORE).sum())
        share = sum(min(length, seq_len) for length in lengths) / sum(lengths)
        assert source.facts["text_read_share"] == round(share, 4)
        assert any(f"{share:.2%} of the text" in note for note in source.notes)


def data_every_dealing(root: Path, **changes: Any) -> Iterator[data.Source]:
    """Shared rows, whole shards, indexed conversations, ranges by module, pieces of texts."""
    yield data_source(data_c4(root / "rows", 10), **changes)
    yield data_source(data_c4(root / "shards", 5, 2, 4, 6, 3), **changes)
    chat = data_chat(root / "chat", 10, "train.jsonl.gz")
    for partition in ("iid", "module"):
        yield data_source(chat, partition=partition, **{**changes, "seq_len": 64})
    yield data_source(root / "rows", long_documents="split", **{**changes, "seq_len": 4})


def test_a_batch_is_the_same_in_whatever_order_it_is_asked_for_and_after_a_resume(tmp_path):
    before = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())
    asked = [(k, s) for s in range(12) for k in range(3)]
    straight = [{at: source.batch(*at) for at in asked} for source in data_every_dealing(tmp_path)]
    for source, expected in zip(data_every_dealing(tmp_path), straight, strict=True):
        list(source.validation())
        for at in random.Random(0).sample(asked, len(asked)):
            batch = source.batch(*at)
            assert batch.ids == expected[at].ids
            assert torch.equal(batch.inputs, expected[at].inputs)
            assert torch.equal(batch.targets, expected[at].targets)
    for source, expected in zip(data_every_dealing(tmp_path), straight, strict=True):
        assert source.batch(1, 9).ids == expected[1, 9].ids  # the first that is asked for
    assert torch.equal(before[0], torch.get_rng_state())  # global generators are left alone
    assert before[1:] == (str(np.random.get_state()), random.getstate())


# -------------------------------------------------------------------- dealing documents to workers


@pytest.mark.parametrize("sizes", [(10,), (7, 3), (2, 8), (3, 3, 4), (1, 2, 3, 4)])
def test_ten_documents_for_three_workers_neither_hang_nor_repeat(tmp_path, sizes):
    source = data_source(data_c4(tmp_path, *sizes), batch_size=1)
    everything: list[str] = []
    for worker in range(3):
        names = data_ids(source, worker, range(24))
        own = len(set(names))
        everything += names[:own]
        for at, name in enumerate(names):  # epoch after epoch of exactly its own documents
            assert name == names[at % own]
    assert len(everything) == len(set(everything)) == 10
    if sizes == (10,):  # 2 * 10^9 documents in one file are reached without reading every epoch
        assert source.batch(0, 2 * 10**9).ids == source.batch(0, 0).ids


def test_shards_go_to_workers_whole_and_disjoint_in_an_order_that_the_seed_shuffles(tmp_path):
    data_c4(tmp_path, *(4,) * 7)
    orders = set()
    for seed in range(5):
        source = data_source(tmp_path, seed=seed, batch_size=4)
        own = [source.batch(k, s).ids for k in range(3) for s in range(3 if k == 0 else 2)]
        files = tuple(names[0].split(":")[0] for names in own)
        for names, file in zip(own, files, strict=True):  # from first to last row
            assert names == tuple(f"{file}:{line}" for line in (1, 2, 3, 4))
        assert len(set(files)) == 7
        orders.add(files)
    assert len(orders) == 5


def test_no_document_repeats_in_an_epoch_and_a_global_batch_is_the_same_for_any_workers(tmp_path):
    data_chat(tmp_path, 10)
    orders = set()
    for workers, batch_size in ((1, 12), (3, 4), (4, 3), (2, 6)):
        source = data_source(tmp_path, seq_len=64, workers=workers, batch_size=batch_size)
        names = [n for s in range(5) for k in range(workers) for n in source.batch(k, s).ids]
        epochs = [tuple(names[first : first + 10]) for first in range(0, 60, 10)]
        assert all(len(set(epoch)) == 10 for epoch in epochs) and len(set(epochs)) == 6
        orders.add(tuple(names))
    assert len(orders) == 1


def test_module_partition_gives_workers_different_sources(tmp_path):
    data_chat(tmp_path, 32)
    source = data_source(tmp_path, seq_len=64, partition="module", workers=4, batch_size=1)
    own = [Counter(data_ids(source, worker, range(16))) for worker in range(4)]
    lines = [sorted(int(name.split(":")[1]) for name in names) for names in own]
    # Urls sort as lines do here: equal contiguous ranges, each seen twice in two epochs.
    assert lines == [list(range(first, first + 8)) for first in (1, 9, 17, 25)]
    assert all(set(names.values()) == {2} for names in own)


def test_without_validation_files_every_twentieth_row_is_held_out(tmp_path):
    file = write_rows(tmp_path / "x.json.gz", data_texts("x", 45))
    source = data_source(file, workers=2)
    assert data_held(source) == ["x.json.gz:1", "x.json.gz:21", "x.json.gz:41"]
    own = [data_ids(source, worker, range(10)) for worker in range(2)]
    assert len({*own[0], *own[1]}) == 40 and not {*own[0], *own[1]} & {*data_held(source)}
    assert "held out" in source.facts["validation"]
    name = "c4-validation.00000-of-00001.json.gz"
    source = data_source(data_c4(tmp_path / "c4" / "en", 9).parent, batch_size=3)
    for _ in range(2):  # the first documents in order, the same every time
        ids = [batch.ids for batch in source.validation()]
        assert ids == [(f"{name}:1", f"{name}:2", f"{name}:3"), (f"{name}:4",)]
    assert source.facts["validation_documents"] == 4


def test_files_that_leave_a_worker_with_a_tenth_of_its_share_are_noted(tmp_path):
    for at, size in enumerate((400, 400, 9)):
        write_rows(tmp_path / f"{at}.jsonl", data_texts("x", size))
    (note,) = [note for note in data_source(tmp_path).notes if "uneven" in note]
    assert "one file" in note
    write_rows(tmp_path / "2.jsonl", data_texts("x", 200))
    assert not any("uneven" in note for note in data_source(tmp_path).notes)


# ----------------------------------------------------------------------- files of the user's own


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    import datasets

    texts = [f"text {i}\nof two lines" for i in range(50)]
    rows = [{"text": text} for text in texts]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "x.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=table, test=table.select(range(3))).save_to_disk(tmp_path / "splits")
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.txt").write_text("\n\n".join(texts))
    write_rows(tmp_path / "x.jsonl", rows)
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    for at, text in enumerate(texts):
        (tmp_path / "docs" / "deep" / f"{at:02d}.md").write_text(text)
    (tmp_path / "docs" / "tokenizer.json").write_text("{}")  # no data
    expected = {text for at, text in enumerate(texts) if at % 20}
    for name in ("x.jsonl", "x.parquet", "x.json", "x.txt", "docs", "saved", "splits"):
        source = data_source(tmp_path / name, workers=1, batch_size=47, seq_len=32)
        ids = [row[row < 256].tolist() for row in source.batch(0, 0).inputs]
        found = {*map(source.tokenizer.decode, ids)}
        # The batch is an epoch, but for the folder with a split of its own.
        assert found == expected or (name == "splits" and found < {*texts}), name
        assert len(data_held(source)) == 3
    table = datasets.Dataset.from_list([{"messages": DATA_TURNS}] * 30)
    table.to_parquet(tmp_path / "chat.parquet")
    assert data_source(tmp_path / "chat.parquet", seq_len=64).chat


def test_a_documents_pieces_are_consecutive_and_lose_nothing(tmp_path):
    rows = [{"text": "held"}, {"text": "abcdefghij"}, {"text": ""}, {"text": "kl"}]
    file = write_rows(tmp_path / "x.jsonl", rows)
    source = data_source(file, workers=1, seq_len=4, batch_size=5, long_documents="split")
    batch = source.batch(0, 0)
    pieces = sorted(bytes(t for t in row.tolist() if 0 <= t < 256) for row in batch.targets)
    assert pieces == [b"", b"abcd", b"efgh", b"ij", b"kl"]
    assert batch.inputs[:, 0].tolist() == [256] * 5  # each is a document
    assert source.facts["text_read_share"] == 1.0 and source.facts["documents"] == 5
    cut = data_source(file, workers=1, seq_len=4)
    assert 0.4 < cut.facts["text_read_share"] < 0.6 and "split reads all" in cut.notes[-1]
    with pytest.raises(ValueError, match="--long-documents split: .* conversations"):
        data_source(data_chat(tmp_path / "chat", 9), long_documents="split")


def test_conversations_are_read_by_line_and_a_plain_file_is_mapped(tmp_path):
    for name in ("train.jsonl", "train.jsonl.gz"):
        source = data_source(data_chat(tmp_path / name, 10, name), seq_len=64)
        assert isinstance(source, data.Indexed)
        shards = {shard for shard, _ in (document.content for document in source._ranges[0])}
        (content,) = (shard.rows._content[0] for shard in shards)
        assert isinstance(content, np.memmap) == (".gz" not in name)


# -------------------------------------------------------------------------------- damaged files


@contextlib.contextmanager
def one_line(words: str) -> Iterator[None]:
    """What is done inside is refused in one line."""
    with pytest.raises(ValueError, match=words) as caught:
        yield
    assert "\n" not in str(caught.value)


DATA_WRONG_ROWS = [b'{"text": ', b"[" * 10**5, b'["text"]', b'{"content": "x"}', b'{"text": 3}']
DATA_WRONG_ROWS += [b'{"text": "\xff"}', b'{"text": "\\ud800"}']


def test_a_damaged_row_or_file_is_one_line_that_names_file_and_line(tmp_path):
    file = data_c4(tmp_path, 9) / "c4-train.00000-of-00001.json.gz"
    whole = file.read_bytes()
    rows, flipped = gzip.decompress(whole).splitlines(), bytearray(whole)
    flipped[-8] ^= 1  # the checksum, which is read after the last line
    wrong = [gzip.compress(b"\n".join([*rows[:3], row, *rows[4:]])) for row in DATA_WRONG_ROWS]
    cases = [*((4, content) for content in wrong), (4, whole[: whole.find(b"train0 3")])]
    for line, content in [*cases, (1, b""), (1, b"\n".join(rows)), (10, bytes(flipped))]:
        file.write_bytes(content)
        with one_line(f"^{re.escape(str(file))}:{line}: "):
            source = data_source(tmp_path, workers=1, batch_size=1)
            pytest.fail(f"read {[source.batch(0, step).ids[0] for step in range(10)]}")


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_counted(tmp_path):
    rows = [json.dumps({"text": f"t{i}"}) for i in range(4)]
    file = tmp_path / "x.jsonl"
    file.write_text(f"\n\ufeff{rows[0]}\n\n{rows[1]}\n  \n{rows[2]}\n{rows[3]}\n\n")
    source = data_source(file, workers=1, batch_size=3)
    assert data_held(source) == ["x.jsonl:2"]
    for step in (0, 1):
        assert source.batch(0, step).ids == ("x.jsonl:4", "x.jsonl:6", "x.jsonl:7")


def test_a_damaged_validation_file_is_found_at_the_opening(tmp_path):
    held = data_c4(tmp_path, 9, 9, 9, 9) / "c4-validation.00000-of-00001.json.gz"
    os.truncate(held, held.stat().st_size // 2)
    with pytest.raises(ValueError, match=f"{re.escape(str(held))}:.*cannot be read"):
        data_source(tmp_path)


def test_a_malformed_conversation_is_named_with_file_and_line(tmp_path):
    file = tmp_path / "train.jsonl"
    turns = [{"role": "user"}, {"role": "robot", "content": "x"}]
    turns += [{"role": "user", "content": content} for content in (None, "\ud800")]
    for row in [{"text": "x"}, {"messages": "x"}, *({"messages": [turn]} for turn in turns)]:
        write_rows(file, [{"messages": DATA_TURNS}, row])
        with pytest.raises(ValueError, match=f"{re.escape(str(file))}:2: .*'messages'"):
            data_source(tmp_path)


def test_paths_names_and_combinations_that_make_no_sense_are_one_line(tmp_path):
    c4, chat = data_c4(tmp_path / "c4", 9), data_chat(tmp_path / "chat", 9, url="")
    few, empty = data_c4(tmp_path / "few", 2), tmp_path / "empty"
    empty.mkdir()
    for name, content in (("csv", b"a"), ("parquet", b"x"), ("json", b"{"), ("txt", b"\xff")):
        (tmp_path / f"x.{name}").write_bytes(content)
    cases = [
        ("docstring", {}, "--data docstring: no training file; what can be read: docstrings, "),
        (empty, {}, "no training file; what can be read: "),
        (tmp_path / "x.csv", {}, "x.csv: no training file; what can be read: .* .jsonl, "),
        (tmp_path / "no.jsonl", {}, "no.jsonl:1: cannot be read .*No such file"),
        (tmp_path / "no.txt", {}, "no.txt: cannot be read"),
        (tmp_path / "x.parquet", {}, "x.parquet: cannot be read"),
        (tmp_path / "x.json", {}, "x.json: cannot be read"),
        (tmp_path / "x.txt", {}, "x.txt: cannot be read"),
        (c4, {"tokenizer": "byte"}, "--tokenizer byte: not one of bytes, gpt2, llama3"),
        (c4, {"tokenizer": "llama3"}, "--tokenizer llama3: .*tokenizer.model"),
        (c4, {"partition": "module"}, "--partition module: .* streamed"),
        (chat, {"partition": "module", "seq_len": 64}, "--partition module: .* 'url'"),
        (chat, {"seq_len": 8}, "too few documents fit: 0 for training .*9 dropped"),
        (few, {}, r"00000-of-00001.json.gz: no training document.*worker 2"),
    ]
    data_bpe(chat)
    cases.append((chat, {"tokenizer": "gpt2"}, "--tokenizer gpt2 from .*: conversations need"))
    for path, changes, message in cases:
        with one_line(message):
            data_source(path, **changes)


# ------------------------------------------------------------------------------------ tokenizers


def data_samples() -> list[str]:
    generator = random.Random(0)
    letters = "abc XYZ 019 \n\t .,!? 'll 're \u00e9\u00df\u4e2d\u6587\U0001f600 \u00a0<|>"
    return ["", " ", "the end\n\nand  the rest", "<|eot_id|> <|endoftext|>"] + [
        "".join(generator.choice(letters) for _ in range(generator.randrange(80)))
        for _ in range(300)
    ]


@pytest.mark.parametrize("name", ["bytes", "gpt2", "llama3", "json"])
def test_text_round_trips_its_bytes_add_up_and_specials_frame_a_document(tmp_path, name):
    size = len(data_bpe(tmp_path).read_text().splitlines())
    frames = {"bytes": (256, 257), "gpt2": (size, size), "llama3": (size, size + 1), "json": (0, 0)}
    begin, end = frames[name]
    if name == "json":
        specials = ("<|endoftext|>", "<|eot_id|>")
        name = str(data_json_tokenizer(tmp_path / "hf", specials, eos_token="<|endoftext|>"))
    source = data_source(data_c4(tmp_path, 3, 3, 3), tokenizer=name)
    tokenizer = source.tokenizer
    assert (tokenizer.begin, tokenizer.end) == (begin, end)
    sizes = tokenizer.token_bytes
    assert sizes.shape == (source.vocab_size,) and sizes[[begin, end]].tolist() == [0, 0]
    for text in data_samples():  # the name of a special token is text like any other
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert int(sizes[torch.tensor(ids.astype(np.int64))].sum()) == len(text.encode())
    batch = source.batch(0, 0)
    first = batch.inputs[0, : int((batch.targets[0] != IGNORE).sum()) + 1].tolist()
    assert first[0] == begin and first[-1] == end
    assert re.fullmatch(r"train\d 0", tokenizer.decode(first[1:-1]))


def test_gpt2s_pattern_and_llamas_special_ids_are_the_published_ones(tmp_path):
    from tiktoken_ext.openai_public import r50k_pat_str

    ours = data.open_tokenizer("gpt2", [data_bpe(tmp_path).parent]).encoding
    known = dict(mergeable_ranks=ours._mergeable_ranks, special_tokens={})
    theirs = tiktoken.Encoding("x", pat_str=r50k_pat_str, **known)
    for text in data_samples():
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
    assert [data.LLAMA_SPECIALS.index(f"<|{name}|>") for name in names] == [0, 1, 6, 7, 9]
    assert data.BYTE_SPECIALS == tuple(f"<|{name}|>" for name in names)
    assert data.LLAMA_SPECIALS[10::245] == ("<|python_tag|>", "<|reserved_special_token_247|>")
    assert len(data.LLAMA_SPECIALS) == 256


def test_a_tokenizer_is_found_by_name_beside_the_weights_first_or_by_path(tmp_path):
    c4 = data_c4(tmp_path / "c4", 9)
    data_bpe(c4)
    own = data_bpe(tmp_path / "weights" / "original", ())
    places = data.tokenizer_folders(SimpleNamespace(init_from="w", data=str(c4 / "x.jsonl")))
    assert places == [Path("w"), c4]
    assert data.tokenizer_folders(SimpleNamespace(init_from="", data="c4")) == []
    source = data_source(c4, tokenizer="llama3", init_from=str(tmp_path / "weights"))
    assert source.vocab_size == 512
    assert source.tokenizer.name == source.facts["tokenizer"] == f"llama3 from {own}"
    name = data_source(c4, tokenizer="llama3").tokenizer.name
    assert name == f"llama3 from {c4 / 'tokenizer.model'}"
    for path in (tmp_path / "weights", own):
        assert data.open_tokenizer(str(path)).vocab_size == 512
    assert data.has_tokenizer(tmp_path / "weights") and not data.has_tokenizer(tmp_path)


def test_a_json_tokenizer_takes_begin_end_and_chat_from_its_folder(tmp_path, monkeypatch):
    specials = data.BYTE_SPECIALS
    llama = {"bos_token": specials[0], "eos_token": {"content": specials[1]}}
    chat = data.open_tokenizer(str(data_json_tokenizer(tmp_path / "llama", specials, **llama)))
    assert (chat.begin, chat.end, chat.chat, chat.turn_end) == (0, 1, True, 4)
    plain = data.open_tokenizer(str(data_json_tokenizer(tmp_path / "x", ("<s>",), eos_token="<s>")))
    assert (plain.begin, plain.end, plain.chat, plain.turn_end) == (0, 0, False, None)
    data_json_tokenizer(tmp_path / "none", ("<s>",), eos_token=None)
    data_json_tokenizer(tmp_path / "other", ("<s>",), bos_token="<t>")
    data_json_tokenizer(tmp_path / "cut", ("<s>",))
    (tmp_path / "cut" / "tokenizer.json").write_text('{"model":')
    need = "cannot be read; it needs the package tokenizers, and .* bos_token or eos_token"
    for name, message in {"none": "''", "other": "'<t>'", "cut": "EOF", "x": "import"}.items():
        if name == "x":
            monkeypatch.setitem(sys.modules, "tokenizers", None)  # it is an optional package
        with one_line(f"{name}/tokenizer.json: {need}.*{message}"):
            data.open_tokenizer(str(tmp_path / name))


def test_a_damaged_tokenizer_file_is_named_with_its_line(tmp_path):
    file = data_bpe(tmp_path)
    lines = file.read_text().splitlines()
    for line, spoilt in ((3, "AA"), (5, "!!!! 4"), (7, "BQ== six"), (258, "IHQ= 300"), (200, "")):
        file.write_text("\n".join([*lines[: line - 1], spoilt, *lines[line:]]) + "\n")
        with one_line(f"^{re.escape(str(file))}:{line}: "):
            data.open_tokenizer("llama3", [tmp_path])
    file.write_text("\n".join(lines[:200]) + "\n")
    with one_line("tokenizer.model: no token for some of the 256 bytes"):
        data.open_tokenizer(str(tmp_path))


def test_gpt2_without_its_vocabulary_is_one_line_and_with_it_tiktokens_own(monkeypatch):
    from tiktoken_ext import openai_public

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("nothing answers")

    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", unreachable)
    with pytest.raises(ValueError, match=r"^--tokenizer gpt2: .* fetched \(nothing answers\)$"):
        data.open_tokenizer("gpt2")
    numbers = {bytes([value]): value for value in range(256)} | {b" the": 256}
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **_: numbers)
    tokenizer = data.open_tokenizer("gpt2")
    assert tokenizer.name == "gpt2" and tokenizer.begin == tokenizer.end == 257
    assert tokenizer.encode("a the").tolist() == [97, 256]


def test_a_vocabulary_that_does_not_fit_or_is_hardly_used_is_told_with_what_to_do(tmp_path):
    source = data_source(data_c4(tmp_path, 9))
    before = list(source.notes)
    data.check_vocabulary(source, 261)
    assert source.notes == before
    with pytest.raises(ValueError, match="^--tokenizer bytes: ids reach 260.*--vocab-size 261"):
        data.check_vocabulary(source, 260)
    data.check_vocabulary(source, 49152)
    assert "261 of the model's 49152" in source.notes[-1]


# ------------------------------------------------------------------------------------------ chat


def test_the_assistant_mask_is_exact_token_by_token(tmp_path):
    """Two turns, written out; capital letters are the special tokens of the byte tokenizer."""
    roles = ("system", "user", "assistant", "user", "assistant")
    contents = ("S", " Hi\n", " Yo \n", "<|eot_id|>", "")
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    write_rows(tmp_path / "train.jsonl", [{"messages": messages}])
    write_rows(tmp_path / "test.jsonl", [{"messages": messages}])
    batch = data_source(tmp_path, workers=1, batch_size=1, seq_len=100).batch(0, 0)
    special = {"B": 256, "(": 258, ")": 259, "E": 260}
    #         . is not predicted, ^ is
    written = (
        ("B(", ".."),
        *(("system", "......"), (")", "."), ("\n\n", ".."), ("S", "."), ("E(", "..")),
        *(("user", "...."), (")", "."), ("\n\n", ".."), ("Hi", ".."), ("E(", "..")),
        *(("assistant", "........."), (")", "."), ("\n\n", ".."), ("Yo", "^^"), ("E", "^")),
        *(("(", "."), ("user", "...."), (")", "."), ("\n\n", ".."), ("<|eot_id|>", "." * 10)),
        *(("E(", ".."), ("assistant", "........."), (")", "."), ("\n\n", ".."), ("E", "^")),
    )
    ids = [special.get(letter, ord(letter)) for text, _ in written for letter in text]
    mask = "".join(marks for _, marks in written)
    assert len(ids) == len(mask)
    assert batch.inputs[0].tolist() == ids + [257] * (100 - len(ids))
    # Sabotage: count the user's tokens in the loss.
    expected = [i if m == "^" else IGNORE for i, m in zip(ids[1:], mask[1:], strict=True)]
    assert batch.targets[0].tolist() == expected + [IGNORE] * (101 - len(ids))
    assert batch.tokens == len(ids) - 1  # the user's count


@pytest.mark.parametrize("kind", ["llama3", "json"])
def test_tokens_of_a_conversation_equal_those_of_its_rendered_template(tmp_path, kind):
    data_bpe(tmp_path)
    if kind == "json":
        names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        kind = str(data_json_tokenizer(tmp_path / "hf", data.BYTE_SPECIALS, **names))
    tokenizer = data.open_tokenizer(kind, [tmp_path])
    # As transformers sets it up.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(data.CHAT_TEMPLATE)
    begins = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    for text in data_samples()[:60]:
        if "<|eot_id|>" in text:
            continue  # as a template renders it, the user could end the turn; here it is text
        messages = (("user", text), ("assistant", f"{text}the"))
        dicts = [{"role": role, "content": content} for role, content in messages]
        fields = {"messages": dicts, "bos_token": "<|begin_of_text|>"}
        rendered = template.render(**fields)
        assert template.render(**fields, add_generation_prompt=True) == rendered + begins
        ids, predicted = data.encode_chat(tokenizer, messages, 10**6)
        if isinstance(tokenizer, data.JsonTokenizer):
            tokenizer.encoding.encode_special_tokens = False
            parsed = tokenizer.encode(rendered).tolist()
            tokenizer.encoding.encode_special_tokens = True
        else:
            parsed = tokenizer.encoding.encode(rendered, allowed_special="all")
        assert ids.tolist() == parsed
        assert tokenizer.decode(ids[predicted]) == f"{text}the".strip() + "<|eot_id|>"


def test_conversations_that_truncation_leaves_without_a_target_are_dropped_and_counted(tmp_path):
    # With an n-byte question the answer's first token is at index 22 + n: 1 begin, 8 + n + 1 for
    # the user's turn (header 1 + 4 + 1 + 2), 13 - 1 for the assistant's header.
    rows = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}]}
        for n in (1, 9, 10, 11, 50)
    ]
    rows += [{"messages": DATA_TURNS[:1]}, {"messages": []}, {"messages": DATA_TURNS}]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "test.jsonl", rows[::-1])
    first = 1 + 8 + 10 + 1 + 13
    source = data_source(tmp_path, workers=1, batch_size=4, seq_len=first, val_documents=3)
    assert sorted(source.batch(0, 0).ids) == [f"train.jsonl:{line}" for line in (1, 2, 3, 8)]
    assert source.facts["dropped"] == 4 and source.facts["documents"] == 4
    (held,) = source.validation()
    assert held.ids == ("test.jsonl:1", "test.jsonl:6", "test.jsonl:7")  # the first three valid
    for batch in (source.batch(0, 0), held):
        assert bool((batch.targets != IGNORE).any(dim=1).all())


# ----------------------------------------------------------------------------- built-in corpora


@functools.cache
def data_built_in(name: str, **changes: Any) -> data.Source:
    return data_source(name, **{"seq_len": 128, "workers": 4, "val_documents": 10**6, **changes})


def data_documents(source: data.Source) -> list[data.Document]:
    assert isinstance(source, data.Indexed)
    return [source._whole(document) for own in source._ranges for document in own]


def data_modules(documents: list[data.Document]) -> set[str]:
    return {document.url.split("/")[-1].split("#")[0] for document in documents}


def test_a_third_of_tinys_documents_is_shorter_than_the_sequence():
    """Or token counts were constant, and the mapper (A.3) had nothing to map."""
    source = data_built_in("docstrings")
    batches = [source.batch(at % 4, at // 4) for at in range(2000)]
    padded = torch.cat([batch.targets[:, -1] == IGNORE for batch in batches])
    assert 0.2 < float(padded.float().mean()) < 0.5
    counts = np.array([batch.tokens for batch in batches]).reshape(-1, 4).sum(axis=1)
    assert counts.std() > 0.02 * counts.mean()


@pytest.mark.parametrize("name", ["docstrings", "doctests"])
def test_no_module_and_no_text_is_in_both_training_and_validation(name):
    source = data_built_in(name, seq_len=512)
    training = data_documents(source)
    assert len(training) > 5000 and len(source.held) > 256
    assert not data_modules(training) & data_modules(source.held)
    assert not {d.content for d in training} & {d.content for d in source.held}
    facts = source.facts
    assert facts["corpus"][f"{name}_train"] == facts["documents"] + facts["dropped"]
    assert len(facts["sha256"]) == 64 and facts["packages"]["torch"].startswith("2.")
    if name == "doctests":  # several thousand real exchanges of code and output
        assert sum(len(d.content) > 2 for d in training) > len(training) / 3
        for turns in (document.content for document in training):
            assert [role for role, _ in turns] == ["user", "assistant"] * (len(turns) // 2)
            assert not any(text.startswith(">>>") for _, text in turns[::2])


def test_the_corpus_hash_is_noted_beside_that_of_the_recorded_results(monkeypatch):
    source = data_built_in("doctests", seq_len=512)
    found = source.facts["corpus_sha256"]
    for recorded, words in ((found, "as the recorded results"), ("f" * 64, "losses will differ")):
        monkeypatch.setitem(data.RECORDED_SHA256, "doctests", recorded)
        (note,) = [n for n in data_source("doctests", seq_len=512).notes if n.startswith("corpus")]
        assert found[:8] in note and words in note


@pytest.mark.slow
def test_processes_that_build_at_once_get_one_corpus_and_each_build_the_same_bytes(tmp_path):
    def build() -> str:
        cache = ("one", "one", "two")[int(os.environ["RANK"])]
        os.environ["AUTOLOCO_CACHE"] = str(tmp_path / cache)
        return str(data.build_corpus(("jinja2", "mpmath")))

    ended = Launch(3, build).wait()
    assert sum("once: docstrings of jinja2, mpmath" in rank.error for rank in ended) == 2
    folders = [Path(rank.value) for rank in ended]
    assert folders[0] == folders[1] and folders[0].name == folders[2].name
    # Nothing half-built is left over.
    left = {path.name for path in (tmp_path / "one").iterdir()}
    assert left <= {folders[0].name, f"{folders[0].name}.lock"}
    built = [{file.name: file.read_bytes() for file in root.rglob("*.*")} for root in folders]
    assert built[0] == built[2] and len(built[0]) == 1 + 5 + 2
    zipped = [content for name, content in built[0].items() if name != "corpus.json"]
    assert all(content[4:8] == bytes(4) for content in zipped), "a time in the gzip header"


def test_a_fresh_corpus_is_in_c4s_layout_split_by_module_without_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOLOCO_CACHE", str(tmp_path))
    source = data_source(data.build_corpus(("mpmath",)) / "docstrings", val_documents=10**6)
    assert isinstance(source, data.Streamed) and source.facts["shards"] == 4
    shards = [shard for dealt, *_ in source._dealt for shard in dealt]
    training, held = [d for shard in shards for _, d in source._read(shard)], source.held
    assert held and training and not data_modules(training) & data_modules(held)
    letters = [re.sub(r"[\W\d_]+", "", str(d.content)).lower() for d in [*training, *held]]
    assert len(set(letters)) == len(letters)
    assert not data._near_copies([d.content for d in held], [d.content for d in training])
    with pytest.raises(ValueError, match="no_such_package: pip install -r requirements.txt"):
        data.build_corpus(("no_such_package",))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOLOCO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="cache: cannot be written .*set AUTOLOCO_CACHE"):
        data.build_corpus(("jinja2",))


def test_docstrings_are_cut_at_paragraphs_and_doctests_become_turns():
    text = "Title\n=====\n\n" + "a" * 88 + "\n\nb\n  indented  \n\nrest\n----\nx : int"
    assert list(data._records(text)) == [
        "Title\n\n" + "a" * 88 + "\n\nb\n  indented",
        "rest\nx : int",
    ]
    text = "Sum.\n\n>>> import math\n>>> for i in range(2):\n...     print(i)  # doctest: +SKIP\n"
    text += "0\n1\n\nAnd\n\n>>> 1 + 1\n2\n>>> done = True\n"
    turns = ["import math\nfor i in range(2):\n    print(i)", "0\n1", "1 + 1", "2"]
    messages = data._conversation(text)
    assert [message["content"] for message in messages] == turns
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    train = "The quick brown fox jumps over the lazy dog near the river bank today"
    close = train.replace("today", "tonight").replace("The quick", "the quick")
    far = "A wholly different sentence about adaptive synchronisation of several workers"
    assert data._near_copies([close, far], [train]) == [close]


# --------------------------------------------------------------------------- the hub, and offline


def test_c4_streamed_through_datasets_equals_the_same_shards_read_from_disk(tmp_path, monkeypatch):
    """The library streams the files as it does the hub's; only where they are is replaced."""
    import datasets
    from huggingface_hub import constants

    folder, load = data_c4(tmp_path / "c4", 5, 7, 6, 4), datasets.load_dataset

    def from_disk(repo: str, name: str, split: str, revision: str, streaming: bool) -> Any:
        assert (repo, name, revision) == ("allenai/c4", "en", "c0ffee")
        files = {split: sorted(map(str, folder.glob(f"c4-{split}.*")))}
        return load("json", data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    info = SimpleNamespace(sha="c0ffee")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: info)
    streamed, read = data_source("c4"), data_source(folder)
    assert streamed.facts["revision"] == "c0ffee" and streamed.facts["shards"] == 4
    for worker, step in [(k, s) for s in range(6) for k in range(3)]:
        ours, theirs = read.batch(worker, step), streamed.batch(worker, step)
        assert ours.ids == theirs.ids and torch.equal(ours.inputs, theirs.inputs)
    assert data_held(streamed) == data_held(read)


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("name", ["c4", "ultrachat"])
def test_a_hub_out_of_reach_is_one_line_at_once(name, offline, monkeypatch):
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    reason = r"\(HF_HUB_OFFLINE is set\)" if offline else "refused"
    with one_line(
        f"^--data {name}: .* could not be reached.*{reason}.*--data PATH reads local files"
    ):
        data_source(name)


# ---------------------------------------------------------------- the model and its weights

MODEL_SMALL = model.ModelConfig(
    *(61, 32, 2, 4, 2, 48),
    tied=True,
    rope_scaling=model.RopeScaling(8.0, 1.0, 4.0, 32),  # bends the wavelengths of heads this small
    max_seq_len=64,
)
MODEL_KINDS = {
    "tied": replace(MODEL_SMALL, kv_heads=4, rope_scaling=None),
    "untied": replace(MODEL_SMALL, kv_heads=4, rope_scaling=None, tied=False),
    "grouped": replace(MODEL_SMALL, kv_heads=1, rope_scaling=None),
    "stretched": replace(MODEL_SMALL, tied=False, rope_theta=500_000.0),
}


def model_load(folder, dtype=torch.float32):
    """Shape and parameters of a Hugging Face folder, as `--init-from` reads them."""
    config = model.read_config(folder)
    return config, dict(model.read_weights(folder, config, dtype))


def model_make(config: model.ModelConfig, seed: int = 1) -> model.Transformer:
    """A model whose logits are not all but equal, norms included."""
    network = model.Transformer(config)
    network.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network


def model_tokens(config: model.ModelConfig, *shape: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, shape, generator=generator)


def model_batch(*shape: int) -> tuple[Tensor, Tensor]:
    return model_tokens(MODEL_SMALL, *shape), model_tokens(MODEL_SMALL, *shape, seed=3)


def model_gradients(network, inputs, targets):
    loss = network(inputs, targets)
    return loss.detach(), list(torch.autograd.grad(loss, list(network.parameters())))


def model_chunked(monkeypatch, rows: int = 3, block: int = 2) -> None:
    """Makes the models of these tests take the chunked loss, a few rows at a time."""
    monkeypatch.setattr(model, "LARGE_VOCABULARY", 1)
    monkeypatch.setattr(model, "CHUNK_BYTES", {"cpu": rows * 4 * MODEL_SMALL.vocab_size})
    monkeypatch.setattr(model, "CACHE_BYTES", block * 4 * MODEL_SMALL.vocab_size)


class ModelShapes(TorchDispatchMode):
    """Records the shape of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.shapes.add(tuple(value.shape))
        return result


def test_sizes_have_their_numbers_of_parameters():
    counts = {name: model.parameter_count(size) for name, size in model.SIZES.items()}
    assert counts["llama3.1-8b"] == 8_030_261_248 and counts["215m"] == 215_329_792
    assert 750_000 < counts["tiny"] < 850_000
    assert 13e6 < counts["15m"] < 16e6 and 80e6 < counts["85m"] < 90e6


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_parameter_shapes_are_those_of_the_model_in_its_order_and_only_matrices_decay(kind):
    shapes = model.parameter_shapes(MODEL_KINDS[kind])
    named = dict(model.Transformer(MODEL_KINDS[kind]).named_parameters())
    assert list(shapes.items()) == [(name, value.shape) for name, value in named.items()]
    assert ("head" in shapes) == (kind in ("untied", "stretched"))
    kept = {name.split(".")[-1] for name, value in named.items() if not model.decayed(name, value)}
    assert kept == {"attention_norm", "mlp_norm", "norm"}


@pytest.mark.parametrize("change", [{"heads": 3}, {"kv_heads": 3}, {"layers": 0}, {"tied": "no"}])
def test_impossible_shapes_are_refused(change):
    with one_line("head|layers|tied"):
        replace(MODEL_SMALL, **change)


def test_initial_weights_depend_on_the_seed_alone_also_from_the_meta_device():
    with torch.device("meta"):
        networks = [model.Transformer(MODEL_SMALL)]
    networks = [networks[0].to_empty(device="cpu"), model.Transformer(MODEL_SMALL)]
    for seed, network in enumerate(networks):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        network.init_weights(5)
        assert torch.equal(state, torch.get_rng_state())
    for first, second in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(first, second)
    networks[1].init_weights(6)
    assert not torch.equal(networks[0].embedding, networks[1].embedding)


def test_initial_deviation_is_002_less_to_the_stream_and_the_first_loss_a_uniform_guess():
    config = model.SIZES["tiny"]
    network = model.Transformer(config)
    network.init_weights(0)
    for name, parameter in network.named_parameters():
        if name.endswith("norm"):
            assert (parameter == 1).all()
        else:
            expected = 0.02 / 8**0.5 if name.endswith((".out", ".down")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
    loss = network(model_tokens(config, 2, 64), model_tokens(config, 2, 64, seed=3)) / 128
    assert loss.item() == pytest.approx(torch.tensor(config.vocab_size).log().item(), abs=0.1)


def test_rotation_is_by_position_times_frequency():  # Sabotage: the other half negated
    config = replace(MODEL_SMALL, rope_scaling=None, width=16)  # frequencies 1, 1/100
    cos, sin = model.rotary_tables(config, 8, torch.device("cpu"))
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 8, 1, 4)
    turned = model.rotate(x, cos, sin)[0, 7, 0]
    slow, fast = torch.tensor(0.07), torch.tensor(7.0)
    expected = torch.stack((fast.cos(), -2 * slow.sin(), fast.sin(), 2 * slow.cos()))
    torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_later_token_changes_no_earlier_logit(kind):  # Sabotage: attention without the mask
    network, inputs = model_make(MODEL_KINDS[kind]), model_tokens(MODEL_KINDS[kind], 2, 12)
    changed = inputs.clone()
    changed[:, 7] += 1
    a, b = network.logits(inputs), network.logits(changed % MODEL_KINDS[kind].vocab_size)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])
    torch.testing.assert_close(network.logits(inputs, last=True), a[:, -1:], atol=1e-5, rtol=0)


def test_too_many_positions_are_refused():
    with pytest.raises(ValueError, match="65 positions, but the model has 64"):
        model.Transformer(MODEL_SMALL).logits(model_tokens(MODEL_SMALL, 1, 65))


def test_activation_checkpointing_changes_no_bit():
    network, (inputs, targets) = model_make(MODEL_SMALL), model_batch(2, 12)
    loss, kept = model_gradients(network, inputs, targets)
    network.activation_checkpointing = True
    runs: list[int] = []
    for at, block in enumerate(network.blocks):
        block.register_forward_pre_hook(lambda block, _, at=at: runs.append(at))
    again, recomputed = model_gradients(network, inputs, targets)
    assert runs == [0, 1, 1, 0]  # forward, then each anew in the backward pass
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("kind", MODEL_KINDS)
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_chunked_loss_and_gradients_equal_the_plain_ones(
    monkeypatch, kind, dtype, tolerance, ignored
):
    network = model_make(MODEL_KINDS[kind]).to(dtype)
    inputs, targets = model_batch(2, 11)
    targets[torch.rand(2, 11, generator=torch.Generator().manual_seed(4)) < ignored] = IGNORE
    expected, wanted = model_gradients(network, inputs, targets)
    scores = network.logits(inputs).flatten(0, 1)
    plain = F.cross_entropy(scores, targets.flatten(), reduction="sum")
    torch.testing.assert_close(expected, plain.detach(), rtol=tolerance, atol=0)
    model_chunked(monkeypatch)
    loss = network(inputs, targets)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.detach(), expected, rtol=tolerance, atol=0)
    # Some scale other than 1, as the division by the number of tokens gives.
    found = torch.autograd.grad(loss / 7, list(network.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b / 7, rtol=tolerance, atol=10 * tolerance)
        assert ignored < 1 or not a.any()


def test_chunked_loss_under_bf16_autocast_takes_the_log_sum_exp_in_fp32(monkeypatch):
    network, (inputs, targets) = model_make(MODEL_SMALL), model_batch(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, wanted = model_gradients(network, inputs, targets)  # plain path
        model_chunked(monkeypatch, rows=50)
        loss, found = model_gradients(network, inputs, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.01 * b.norm()


def test_chunked_loss_never_holds_all_logits_nor_gradients_that_nobody_asked_for(monkeypatch):
    network, (inputs, targets), V = model_make(MODEL_SMALL), model_batch(4, 32), 61
    with ModelShapes() as plain:
        network(inputs, targets).backward()
    model_chunked(monkeypatch, rows=8)
    with ModelShapes() as ours:
        expected = network(inputs, targets)
        expected.backward()
    assert (128, V) in plain.shapes
    rows = {shape[0] for shape in ours.shapes if shape[1:] == (V,)}
    assert rows == {8, 2, MODEL_SMALL.width}  # chunk, block, and the head's transpose
    with torch.no_grad(), ModelShapes() as seen:
        loss = network(inputs, targets)
    assert not loss.requires_grad and torch.equal(loss, expected)
    assert (V, MODEL_SMALL.width) not in seen.shapes


def test_large_vocabularies_take_the_chunked_loss_which_is_differentiated_once():
    for vocabulary, chunked in ((4096, False), (4097, True)):
        network = model_make(replace(MODEL_SMALL, vocab_size=vocabulary))
        loss = network(*model_batch(1, 4))
        assert ("Chunked" in loss.grad_fn.name()) == chunked
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()


@pytest.mark.parametrize("large", [False, True])
def test_neither_padding_nor_the_rest_of_a_batch_changes_a_sequence(monkeypatch, large):
    if large:
        model_chunked(monkeypatch)
    network, lengths = model_make(MODEL_SMALL).double(), (5, 12, 9)

    def padded(width: int, rows: slice = slice(None)):
        inputs = model_tokens(MODEL_SMALL, 3, width, seed=9)
        targets = torch.full((3, width), IGNORE)
        for row, length in enumerate(lengths):  # what stands in the padding must not matter
            inputs[row, :length] = model_tokens(MODEL_SMALL, length, seed=row)
            targets[row, :length] = model_tokens(MODEL_SMALL, length, seed=10 + row)
        loss, gradients = model_gradients(network, inputs[rows], targets[rows])
        return torch.cat([loss.view(1), *(g.view(-1) for g in gradients)])

    alone = [padded(16, slice(row, row + 1)) for row in range(3)]
    torch.testing.assert_close(sum(alone), padded(32), rtol=1e-7, atol=1e-9)


# Hugging Face weights


def model_state(config: model.ModelConfig) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model_make(config).named_parameters()}


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_export_then_import_is_bit_identical_and_transformers_computes_its_logits(tmp_path, kind):
    config, network = MODEL_KINDS[kind], model_make(MODEL_KINDS[kind])
    state = model_state(config)
    model.save_hf(tmp_path, config, state)
    read, again = model_load(tmp_path)
    assert read == config and list(again) == list(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    transformers = pytest.importorskip("transformers")
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    inputs = model_tokens(config, 2, 48)
    with torch.no_grad():
        theirs = other(inputs).logits
        torch.testing.assert_close(
            network.logits(inputs), theirs, atol=1e-4, rtol=0, check_stride=False
        )


@pytest.mark.parametrize("sharded, layout", [(False, "older"), (True, "newer")])
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_model_saved_by_transformers_has_the_same_logits_here(tmp_path, kind, sharded, layout):
    transformers = pytest.importorskip("transformers")
    config = MODEL_KINDS[kind]
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3"} | asdict(config.rope_scaling)
    torch.manual_seed(0)
    names = {hf: getattr(config, own) for own, hf in model.HF_FIELDS.items() if own != "rope_theta"}
    names |= {"rms_norm_eps": 1e-3, "initializer_range": 0.2}  # large enough to be noticed
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**names, rope_parameters=rope))
    theirs.eval().save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    if layout == "older":
        raw = json.loads((tmp_path / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        if config.rope_scaling:
            rope["type"] = rope.pop("rope_type")
            raw["rope_scaling"] = rope
        (tmp_path / "config.json").write_text(json.dumps(raw))
    read, state = model_load(tmp_path)
    assert read == replace(config, norm_eps=1e-3)
    network, inputs = model.Transformer(read), model_tokens(config, 2, 48)
    network.load_state_dict(state)
    with torch.no_grad():
        logits, expected = network.logits(inputs), theirs(inputs).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0, check_stride=False)


def model_edit_weights(folder: Path, **changes: Tensor | None) -> None:
    """Adds, replaces or (None) removes tensors; `__` stands for a dot."""
    file = folder / "model.safetensors"
    state: dict[str, Tensor | None] = dict(load_file(file))
    state |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in state.items() if value is not None}, file)


def model_config(**changes: object):
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def model_norm(value: Tensor | None):
    return lambda d: model_edit_weights(d, model__norm__weight=value)


def model_file(name: str, text: str):
    return lambda d: (d / name).write_text(text)


def model_index(*names: str):
    """Only an index that names these weights files is there."""
    where = json.dumps({"weight_map": {str(at): name for at, name in enumerate(names)}})

    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(where)

    return edit


MODEL_BAD = {
    "not JSON": (model_file("config.json", "{"), "config.json: Expecting property name"),
    "not a Llama": (model_config(model_type="gpt2"), "model_type is 'gpt2'"),
    "no width": (model_file("config.json", '{"model_type": "llama"}'), "KeyError..hidden_size"),
    "huge": (model_config(vocab_size=10**20), "vocab_size is 1000"),
    "bias": (model_config(attention_bias=True), "attention_bias is True"),
    "rope type": (model_config(rope_scaling={"type": "yarn"}), "rope_type is 'yarn'"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    "cut short": (model_file("model.safetensors", "{"), "model.safetensors: cannot be read"),
    "missing tensor": (model_norm(None), "no tensor model.norm.weight"),
    "wrong shape": (model_norm(torch.ones(31)), r"model.norm.weight is \(31,\), not \(32,\)"),
    "bias tensor": (
        lambda d: model_edit_weights(d, model__norm__bias=torch.ones(32)),
        "model.safetensors: model.norm.bias has no place",
    ),
    "missing shard": (model_index("model-1.safetensors"), "model-1.safetensors: cannot be read"),
    "shard outside": (model_index("../model-9.safetensors"), "model-9.safetensors: cannot be read"),
}


@pytest.mark.parametrize("case", MODEL_BAD)
def test_bad_weight_folders_are_refused_in_one_line_that_names_the_file(tmp_path, case):
    break_it, message = MODEL_BAD[case]
    model.save_hf(tmp_path, MODEL_SMALL, model_state(MODEL_SMALL))
    break_it(tmp_path)
    with one_line(f"^{re.escape(str(tmp_path))}.*{message}"):
        model_load(tmp_path)


def test_weights_to_start_from_are_finite(tmp_path, monkeypatch):
    model.save_hf(tmp_path, MODEL_SMALL, model_state(MODEL_SMALL))
    model_norm(torch.full((32,), math.inf))(tmp_path)
    monkeypatch.setattr(data, "check_vocabulary", lambda *_: None)
    source: Any = None
    with one_line(f"^--init-from {re.escape(str(tmp_path))}: norm is not finite"):
        train.build_workers(train.Config(init_from=str(tmp_path)), diloco.Ranks(), source)


def test_bf16_weights_come_back_as_bf16_and_as_fp32_without_leftovers_of_old_exports(tmp_path):
    state = {name: value.bfloat16() for name, value in model_state(MODEL_SMALL).items()}
    model.save_hf(tmp_path, MODEL_SMALL, state)
    inv_freq = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    model_edit_weights(tmp_path, lm_head__weight=state["embedding"].clone(), **inv_freq)
    for dtype in (torch.bfloat16, torch.float32):
        again = model_load(tmp_path, dtype)[1]
        assert again.keys() == state.keys() and {v.dtype for v in again.values()} == {dtype}
        assert all(torch.equal(again[name], state[name].to(dtype)) for name in state)


# ------------------------------------------------------------------------------------------------
# Runs as users start them
# ------------------------------------------------------------------------------------------------

# 17,000 parameters; intervals of about 10 steps, the 8th is a candidate, the last one a remainder.
TRAIN_MINI = model.ModelConfig(264, 32, 1, 2, 2, 64, tied=True)
TRAIN_TINY = model.SIZES["tiny"]
TRAIN_LINE = (
    "--data shards --batch-size 1 --seq-len 16 --val-documents 4 --warmup 10 --base-horizon 10 "
    "--granularity 1 --lr 1e-3 --steps 96 --workers 2 --checkpoint-every 1"
)
TRAIN_NAMED = f"{TRAIN_LINE} --name run"
TRAIN_AGAIN = "--resume --name run"
TRAIN_40 = f"{TRAIN_LINE} --steps 40"
TRAIN_OPTIONS = [f"--method {method}" for method in train.METHODS] + ["--wire int8", "--wire bf16"]
TRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture
def train_place(tmp_path, monkeypatch):
    """A working directory with shards and the small model; no handler outlives a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # one process
    monkeypatch.setitem(model.SIZES, "tiny", TRAIN_MINI)
    write_shards(Path("shards"), 40, 9)
    handlers = {number: signal.getsignal(number) for number in TRAIN_SIGNALS}
    yield tmp_path
    assert {number: signal.getsignal(number) for number in TRAIN_SIGNALS} == handlers


def train_run(line: str) -> int:
    """`python train.py LINE` in this process."""
    return train.main(line.split())


def train_refused(capsys, line: str) -> str:
    """The one line on stderr, without the program's name, that comes with exit code 2."""
    capsys.readouterr()
    assert train_run(line) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"train\.py: [^\n\r]+\n", error), error
    return error.removeprefix("train.py: ").strip()


def train_kill(number: int = signal.SIGTERM, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


def train_at(worker: int, step: int, act: Callable[..., Any], *words: Any, patch=setattr) -> None:
    """Act when that worker asks for its batch of that step."""
    original = data.Source.batch

    def batch(self, w, s):
        if (w, s) == (worker, step):
            act(*words)
        return original(self, w, s)

    patch(data.Source, "batch", batch)


def train_before(module: Any, name: str, act: Callable[..., Any], *words: Any) -> None:
    """Act before a function of the program."""
    original = getattr(module, name)
    setattr(module, name, lambda *a: [act(*words), original(*a)][1])


def train_cut(line: str, step: int, worker: int = 0, number: int = signal.SIGTERM) -> None:
    """Run until a signal comes in that step; it comes twice."""
    with pytest.MonkeyPatch.context() as patch:
        train_at(worker, step, train_kill, number, 2, patch=patch.setattr)
        assert train_run(line) == 0


class TrainCommand:
    """A command in a process of its own, its words in files."""

    def __init__(self, *words: str, **environment: str) -> None:
        with open("out", "wb") as out, open("err", "wb") as err:
            whole = os.environ | environment
            command = [sys.executable, *words]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=whole)

    @classmethod
    def plain(cls, line: str) -> TrainCommand:
        """Plain `python train.py` on several cores."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("OMP_NUM_THREADS")
            return cls(train.__file__, *line.split())

    @classmethod
    def torchrun(cls, line: str, hook: str, restarts: int = 0) -> TrainCommand:
        """Two ranks with the small model; the hook is the name of a function of this file."""
        name = Path(__file__).stem
        Path("rank.py").write_text(
            f"import sys; sys.path.insert(0, {str(README_HOME)!r})\n"
            f"import model, {name} as tests\nmodel.SIZES['tiny'] = tests.TRAIN_MINI\n"
            f"if __name__ == '__main__':\n    tests.{hook}()\n"
            f"    tests.train.leave(tests.train.main({line.split()!r}))\n"
        )
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return cls(*words, "--max-restarts", str(restarts), "rank.py")

    def until(self, ready: Callable[[], Any], seconds: float = 100) -> Any:
        """Wait for what the command does; returns it."""
        deadline = time.monotonic() + seconds
        while not (found := ready()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert found, Path("err").read_text()
        return found

    def wait(self) -> int:
        return self.process.wait(200)

    def family(self) -> list[int]:
        """The process and its children."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]


@functools.cache
def train_finished(line: str) -> tuple[dict, Path]:
    """End state of the undisturbed run in this process, and its folder for copies."""
    assert train_run(f"{line} --name straight --overwrite") == 0
    folder = Path("runs/straight").rename(f"../finished-{abs(hash(line))}")
    Path("runs/straight").symlink_to(folder.resolve())
    state = train_end_state("straight")
    Path("runs/straight").unlink()
    return state, folder.resolve()


def train_straight(line: str) -> dict:
    return train_finished(line)[0]


def train_tree(folder: str) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def train_sign(folder: Path) -> None:
    """Give every manifest of a run the checksums of what now stands there."""
    for path in folder.glob("checkpoint/*/manifest.json"):
        manifest = train.read_json(path)
        manifest["files"] = {f: train.sha256(path.parent / f) for f in manifest["files"]}
        train.write_json(path, manifest)
    facts = train.read_json(folder / "env.json")
    facts["config_sha256"] = train.sha256(folder / "config.json")
    train.write_json(folder / "env.json", facts)


# ---------------------------------------------------------------- what a run executes and leaves


def test_a_run_folder_holds_what_an_audit_needs(train_place):
    assert train_run(f"{TRAIN_NAMED} --steps 22 --base-horizon 5 --method diloco") == 0
    rows, metrics = train_rows("run"), train_rows("run", "metrics")
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 22]
    more = "payload_bytes sent_bytes checksum excluded local_seconds sync_seconds update_norm"
    assert all(set(row) >= {*more.split()} for row in rows)  # beside the controller's
    assert [row["step"] for row in metrics] == list(range(1, 23))
    assert set(metrics[0]) == {"step", "loss", "tokens", "lr", "grad_norm"}
    # Sabotage: the rate is one step ahead.
    rules = train.load_config(Path("runs/run")).rules
    assert [row["lr"] for row in metrics] == [autoloco.inner_lr(rules, s) for s in range(22)]
    summary = train_summary("run")
    words = "synchronisations intervals payload_bytes saved train_loss val_loss bits_per_byte"
    assert set(summary) == {*words.split(), "seconds", "sent_bytes"}
    assert summary["intervals"] == [[4, 5], [1, 2]] and summary["saved"] == 0
    assert summary["train_loss"] == metrics[-1]["loss"]  # of the last 2 % of the steps, at least 1
    assert train.read_json(Path("runs/run/config.json"))["shape"] == asdict(TRAIN_MINI)
    facts = train.read_json(Path("runs/run/env.json"))
    assert len(facts["source_sha256"]) == 64 and facts["data"]["shards"] == 2
    header = json.loads(Path("runs/run/intervals.jsonl").read_text().split("\n")[0])
    assert header["method"] == "diloco" and header["rules"]["base_horizon"] == 5
    checkpoints = sorted(path.name for path in Path("runs/run/checkpoint").iterdir())
    assert checkpoints == ["step-00000020", "step-00000022"]


def test_a_ladder_of_one_rung_is_diloco_bit_for_bit(train_place):
    short = "--seq-len 8"  # than every document
    assert train_run(f"{TRAIN_NAMED} {short} --min-horizon 10 --max-horizon 10") == 0
    rows = train_rows("run")
    assert {row["horizon"] for row in rows} == {10} and rows[-1]["steps"] == 6
    *expected, _ = train_straight(f"{TRAIN_LINE} {short} --method diloco")["intervals"]
    assert [row["checksum"] for row in rows] == [row["checksum"] for row in expected]


def test_evaluation_in_mid_run_does_not_change_training(train_place):
    assert train_run(f"{TRAIN_NAMED} --eval-every 1") == 0
    found, straight = train_end_state("run"), train_straight(TRAIN_LINE)
    scored = [row for row in train_rows("run", "metrics") if "val_loss" in row]
    assert [row["step"] for row in scored] == [row["step"] for row in train_rows("run")][:-1]
    assert scored[0]["val_loss"] > scored[-1]["val_loss"] > 0
    assert found["intervals"] == straight["intervals"] and found["tensors"] == straight["tensors"]


def test_logged_loss_is_the_token_weighted_mean_over_workers(train_place):
    assert train_run(f"{TRAIN_NAMED} --workers 3 --steps 2 --batch-size 2 --horizons 1,1") == 0
    source = data.open_source(train.load_config(Path("runs/run")))
    network = model.Transformer(TRAIN_MINI)
    network.init_weights(0)
    batches = [source.batch(worker, 0) for worker in range(3)]
    with torch.no_grad():
        total = sum(float(network(b.inputs, b.targets)) for b in batches)
    # Sabotage: the loss is not weighted by tokens, or is the first worker's.
    count = sum(int((b.targets != IGNORE).sum()) for b in batches)
    row, _ = train_rows("run", "metrics")
    assert row["loss"] == pytest.approx(total / count, rel=1e-6)
    assert row["tokens"] == sum(b.tokens for b in batches)


# ---------------------------------------------------------------- command lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--recipe tinny", "--recipe: invalid choice: 'tinny' (choose from 'tiny', "),
        ("--method autolocco", "--method: invalid choice: 'autolocco'"),
        ("--outer-momentun 1", "unrecognized arguments: --outer-momentun 1"),
        ("--steps 0", "--steps 0: "),
        ("--steps two", "--steps: invalid int value: 'two'"),
        ("--lr nan", "--lr nan: "),
        ("--outer-lr -1", "--outer-lr -1.0: from 0 to "),
        ("--outer-momentum 1", "--outer-momentum 1.0: in [0, 1)"),
        ("--base-horizon 25 --granularity 2", "--base-horizon 25 is not a multiple of --gr"),
        ("--horizons 3,x", "--horizons x"),
        ("--horizons 3,4", "--horizons must add up to 7 steps"),
        ("--verdicts 8=bad", "--verdicts 8=bad: give such as 8=moderate, one of "),
        ("--name ../there", "--name ../there"),
        ("--data nowhere/at/all", "nowhere/at/all"),
        ("--seq-len 9999", "--seq-len 9999: the model has 1024 positions"),
        ("--ranks-per-worker 2", "--ranks-per-worker 2: 4 workers cannot share 1 ranks"),
        ("--name file --overwrite", "runs/file: "),
        ("--name run", "runs/run exists: give --resume, --overwrite or --name"),
        ("--name run --overwrite --init-from runs/run", "--init-from runs/run: is the run itself"),
        ("--resume", "runs/tiny-autoloco-0/config.json: cannot be read"),
        (f"{TRAIN_AGAIN} --overwrite", "--overwrite True: runs/run was started with False"),
        (f"{TRAIN_AGAIN} --workers 4", "--workers 4: runs/run was started with 2"),
        (f"{TRAIN_AGAIN} --recipe tiny-sft", "--recipe tiny-sft: runs/run was started with tiny"),
        (f"{TRAIN_AGAIN} --steps 10", "--steps 10: runs/run was started with 40"),
        (f"{TRAIN_AGAIN} --min-horizon 9", "--min-horizon 9: runs/run was started with None"),
        (f"{TRAIN_AGAIN} --dry-run", "--dry-run True: runs/run was started with False"),
        ("autoloco.py", "usage: "),
        ("autoloco.py explain x 3 4", "usage: "),
        ("autoloco.py replay absent", "absent: cannot be read"),
        ("autoloco.py replay runs/file", "runs/file: line 1: "),
        ("autoloco.py replay runs/run/metrics.jsonl", "metrics.jsonl: line 1: "),
        ("autoloco.py explain runs/run/intervals.jsonl 99", "interval 99 is not in this log"),
        ("eval.py loss nowhere", "nowhere/config.json: cannot be read"),
        ("eval.py tasks runs/run --tasks bbh --limits 3", "--limits"),
        ("eval.py sample runs/run --tokens 0", "--tokens: at least 1"),
        (f"eval.py sample runs/run --prompt {'x' * 16}", "--prompt: 17 tokens"),
    ],
)
def test_wrong_input_gets_one_line_and_code_2_before_anything_is_touched(
    train_place, capsys, line, words
):
    shutil.copytree(train_finished(TRAIN_40)[1], "runs/run")
    Path("runs/file").write_text("mine")
    before = train_tree(".")
    if line.startswith(("autoloco.py", "eval.py")):
        program, *argv = line.split()
        assert {"autoloco.py": autoloco, "eval.py": evaluation}[program].main(argv) == 2
        said = capsys.readouterr()
        assert said.out == "" and words in said.err and said.err.count("\n") == 1
    else:
        line = line if "--resume" in line or "--data" in line else f"--data shards {line}"
        assert words in train_refused(capsys, line)
    assert train_tree(".") == before


@pytest.mark.slow
def test_without_a_compiler_the_last_line_names_no_compile(tmp_path):
    lacking = {"PATH": "", "CXX": "/no/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, train.__file__, "--compile", "--steps", "2", "--base-horizon", "2"]
    environment = os.environ | lacking | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("; --no-compile trains without it\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--method diloco --no-normalise", "--normalise has no effect: it needs a method whose "),
        ("--horizons 100x20 --min-horizon 8", "--min-horizon has no effect: it needs a controller"),
        ("--method ddp --outer-lr 1", "--outer-lr has no effect: it needs a method that sync"),
        ("--data doctests --seq-len 64 --json", ""),
    ],
)
def test_settings_without_effect_are_warned_of(capsys, line, words):
    assert train_run(f"{line} --dry-run") == 0
    error = capsys.readouterr().err
    assert error.count("\n") == bool(words) and words in error


TRAIN_ODD = (
    "0 -1 1.5 nan inf -inf 1e400 1e-320 99999999999999999999 0x10 1_000 true , = 3x 0x5 x 5x0 "
    "99999999x99999999 8= =severe .. / a/b tiny average -- é 7 1e-5 3"
)


@pytest.mark.slow
def test_300_command_lines_are_accepted_or_answered_with_one_line(train_place, capsys):
    rng, seen, before = random.Random(3), {0: 0, 2: 0}, train_tree(".")
    for _ in range(300):
        argv = [f"--recipe={rng.choice(list(train.RECIPES))}", "--dry-run"]
        for one in rng.sample(fields(train.Config), rng.randint(0, 2)):
            values = [*one.metadata.get("choices", ()), *TRAIN_ODD.split()]
            switch = isinstance(one.default, bool) and rng.random() < 0.9
            argv.append(train.flag(one.name) + f"={rng.choice(values)}" * (not switch))
        code = train.main(argv)
        said = capsys.readouterr()
        seen[code] += 1
        if code == 2:
            assert said.out == "" and re.fullmatch(r"train\.py: [^\n]+\n", said.err), (argv, said)
        else:
            assert said.out.startswith("recipe ")
            assert all(line.startswith("warning: ") for line in said.err.splitlines())
        assert train_tree(".") == before, argv
    assert min(seen.values()) >= 90, seen


# ---------------------------------------------------------------- resume

TRAIN_QUICK = ("--method autoloco", "--method ddp", "--wire int8")


@pytest.mark.parametrize(
    "options",
    [
        options if options in TRAIN_QUICK else pytest.param(options, marks=pytest.mark.slow)
        for options in TRAIN_OPTIONS
    ],
)
def test_an_interrupted_run_ends_as_the_straight_one_bit_for_bit(train_place, capsys, options):
    straight = train_straight(f"{TRAIN_LINE} {options}")
    rows = straight["intervals"][:-1]
    starts = {row["phase"]: row["step"] - row["steps"] for row in rows[:-1]}
    assert ("candidate" in starts) == ("method" not in options or "autoloco" in options)
    middle = rows[2]["step"] + rows[3]["steps"] // 2
    candidate = starts.get("candidate", 70) + 2
    steps = (3, middle, rows[1]["step"], rows[-1]["step"] - 1, candidate)
    for number, step in enumerate(steps):
        line = f"{TRAIN_NAMED} {options} --overwrite"
        train_cut(line, step, number % 2, TRAIN_SIGNALS[number % 4])
        assert "continue with --resume --name run" in capsys.readouterr().out, step
        assert not Path("runs/run/summary.json").exists()
        assert train_run(f"{TRAIN_AGAIN} --checkpoint-every 4") == 0, step
        assert train_end_state("run") == straight, step


def test_a_finished_run_goes_on_for_more_steps_and_its_log_replays(train_place, capsys):
    assert train_run(f"{TRAIN_LINE} --steps 40 --name run") == 0
    assert train_run("--resume --name run --steps 60") == 0
    assert "extended from 40 to 60 steps" in capsys.readouterr().out
    rules, rows, _ = autoloco.read_log(Path("runs/run/intervals.jsonl"))
    assert (rules.steps, autoloco.last_state(rules, rows).step) == (40, 60)
    assert train.load_config(Path("runs/run")).steps == 60
    assert train_run(f"{TRAIN_LINE} --steps 40 --method linear --name other") == 0
    assert train_run("--resume --name other --steps 60") == 2
    assert "does not begin as the run did" in capsys.readouterr().err


def test_weights_and_biases_gets_the_rows_of_a_run_and_its_resume(train_place, monkeypatch):
    began, steps = set(), set[int]()
    project = SimpleNamespace(log=lambda row, step: steps.add(step), finish=lambda: None)
    service = SimpleNamespace(init=lambda id, **about: began.add(id) or project)
    monkeypatch.setitem(sys.modules, "wandb", service)
    assert train_run(f"{TRAIN_LINE} --steps 40 --name run --wandb project") == 0
    assert train_run("--resume --name run --steps 60 --wandb project") == 0
    assert len(began) == 1 and steps == {*range(1, 61)}


def test_a_resume_needs_nothing_outside_the_run_folder_but_its_data(train_place):
    shutil.copytree(train_finished(TRAIN_40)[1], "runs/source")
    line = f"{TRAIN_LINE} --init-from runs/source"
    assert train_run(f"{line} --name straight") == 0
    train_cut(f"{line} --name run", 44, 1)
    shutil.rmtree("runs/source")
    assert train_run(TRAIN_AGAIN) == 0
    assert train_end_state("run") == train_end_state("straight") != train_straight(TRAIN_LINE)
    assert evaluation.main(["loss", "runs/run"]) == 0


def test_time_before_a_stop_is_counted(train_place):
    with pytest.MonkeyPatch.context() as patch:
        train_at(0, 3, time.sleep, 1, patch=patch.setattr)
        train_cut(f"{TRAIN_NAMED} --steps 20", 5)
    assert train_run(TRAIN_AGAIN) == 0
    assert train_summary("run")["seconds"] >= 1


def test_a_resume_on_other_documents_is_refused(train_place, capsys):
    shutil.copytree(train_finished(TRAIN_40)[1], "runs/run")
    with gzip.open("shards/c4-train.00002.json.gz", "wt") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    answer = train_refused(capsys, TRAIN_AGAIN)
    assert "--data shards: " in answer and "runs/run/env.json" in answer
    assert "without it this is accepted" in answer
    facts = train.read_json(Path("runs/run/env.json"))
    train.write_json(Path("runs/run/env.json"), facts | {"data": {}})
    assert train_run(TRAIN_AGAIN) == 0


def test_a_run_from_before_a_field_was_added_reads_and_an_unknown_field_is_named(
    train_place, capsys
):
    train_cut(TRAIN_NAMED, 44)
    path = Path("runs/run/config.json")
    saved = train.read_json(path)
    del saved["config"]["beta1"], saved["config"]["max_step_scale"], saved["config"]["horizons"]
    train.write_json(path, saved | {"config": saved["config"] | {"seeds": 0}})
    train_sign(path.parent)
    assert "keyword argument 'seeds'" in train_refused(capsys, TRAIN_AGAIN)
    train.write_json(path, saved)
    train_sign(path.parent)
    assert train_run(TRAIN_AGAIN) == 0
    assert train_end_state("run") == train_straight(TRAIN_LINE)


# ---------------------------------------------------------------- signals, lost peers, full disks


def train_both(one: Callable[[], Any], *more: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: [act() for act in (one, *more)]


def train_stop(worker: int, step: int, number: int = signal.SIGTERM) -> Callable[[], Any]:
    """A signal comes to the rank of a worker, twice where it can."""
    return lambda: train_at(worker, step, train_kill, number, 1 + (number != signal.SIGKILL))


def train_dawdle(worker: int, step: int, seconds: float = 1.5) -> Callable[[], Any]:
    return lambda: train_at(worker, step, time.sleep, seconds)


def train_full(size: int) -> Callable[[], Any]:
    """No file of the second worker's rank grows beyond a size, from step 35 on."""
    return lambda: train_at(1, 35, resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))


def train_dies_in_the_exchange() -> None:
    """The second rank of three, in the second half of its third synchronisation."""
    if os.environ["RANK"] == "1":
        calls = iter(range(6))
        train_before(diloco.Ranks, "exchange", lambda: train_kill(9) if next(calls) == 5 else None)


def train_torn() -> None:
    """Killed while it writes a line."""

    def tear() -> None:
        for log in train.LOGS:
            with open(f"runs/run/{log}.jsonl", "a") as file:
                file.write('{"step": 9')
        train_kill(signal.SIGKILL)

    train_at(0, 57, tear)


def train_other_weights() -> None:
    """One bit of the second rank's shared parameters changes in the second synchronisation."""
    original = diloco.LocalUpdate.synchronise

    def synchronise(self: Any, plan: autoloco.Plan) -> diloco.Measured:
        measured = original(self, plan)
        if plan.interval == 2 and os.environ["RANK"] == "1":
            self.shared[0].view(torch.int32)[5] ^= 1
        return measured

    setattr(diloco.LocalUpdate, "synchronise", synchronise)  # noqa: B010


TRAIN_GONE = r"rank \d: another rank is gone, or slower than --timeout-minutes \("
TRAIN_FULL = (
    r"(rank \d: )?runs/run/checkpoint/partial: .*File too large.*: not saved; "
    r"earlier checkpoints stay"
)
TRAIN_LOG = r"\[Errno \d+\] File too large"
TRAIN_DIFFER = r"(rank 0: )?shared parameters: rank 1 has \w{16}, rank 0 has \w{16}"


@pytest.mark.parametrize(
    ("options", "ranks", "hook", "codes", "words", "after"),
    [
        ("", 2, train_both(train_stop(0, 23), train_dawdle(1, 22)), [0, 0], "", 2),
        ("", 2, train_both(train_stop(1, 23), train_dawdle(0, 22)), [0, 0], "", 1),
        ("--method ddp", 2, train_stop(1, 35), [0, 0], "", 1),
        ("--wire int8", 2, train_stop(0, 35, signal.SIGHUP), [0, 0], "", 1),
        ("--wire int8", 1, train_stop(1, 35), [0], "", 2),
        ("", 1, lambda: train_before(train, "build_workers", train_kill, 2), [0], "", 1),
        ("", 2, train_stop(1, 25, signal.SIGKILL), [1, -9], TRAIN_GONE, 1),
        ("--method ddp", 2, train_stop(0, 25, signal.SIGKILL), [-9, 1], TRAIN_GONE, 2),
        ("--workers 3", 3, train_dies_in_the_exchange, [1, -9, 1], TRAIN_GONE, 1),
        ("--checkpoint-every 4", 1, train_torn, [-9], "", 1),
        ("", 1, train_full(60_000), [1], TRAIN_FULL, 1),
        ("", 2, train_full(60_000), [1, 1], TRAIN_FULL, 1),
        ("", 1, train_full(4000), [1], TRAIN_LOG, 1),
        ("--workers 3", 3, train_other_weights, [1, 1, 1], TRAIN_DIFFER, 1),
    ],
)
def test_what_ends_a_run_is_said_in_one_line_and_a_resume_ends_as_the_straight_one(
    train_place, capsys, options, ranks, hook, codes, words, after
):
    ended = train_ranks(ranks, f"{TRAIN_NAMED} {options} --timeout-minutes 0.2", hook)
    assert ended[0] == codes
    for code, said in zip(codes, ended[1], strict=True):
        assert len(said) <= (code == 1) and all(re.match(words, line) for line in said), said
    assert not words or any(ended[1])
    assert words or -9 in codes or "--resume --name run" in Path("said").read_text()
    assert train_ranks(after, TRAIN_AGAIN) == ([0] * after, [[]] * after)
    options = options if "every" not in options else ""
    assert train_end_state("run") == train_straight(f"{TRAIN_LINE} {options}")


def test_the_other_ranks_stop_in_the_middle_of_a_long_local_phase(train_place):
    def hook() -> None:
        train_stop(1, 5)()
        train_before(data.Source, "batch", time.sleep, 0.1 * (os.environ["RANK"] == "0"))

    line = f"{TRAIN_NAMED} --method diloco --base-horizon 2000 --steps 2000"
    assert train_ranks(2, line, hook) == ([0, 0], [[], []])
    (saved,) = Path("runs/run/checkpoint").iterdir()
    assert 6 <= int(saved.name.removeprefix("step-")) < 1000


def test_a_signal_before_training_begins_leaves_what_is_no_obstacle(train_place):
    hook = lambda: train_before(data, "open_source", train_kill, signal.SIGINT)  # noqa: E731
    assert train_ranks(1, TRAIN_NAMED, hook) == ([-signal.SIGINT], [[]])
    assert train_run(f"{TRAIN_NAMED} --steps 5") == 0


@pytest.mark.slow
def test_the_timeout_does_not_bound_the_local_phase(train_place):
    hook = train_both(train_dawdle(0, 3, 7), train_dawdle(1, 3, 8))
    line = f"{TRAIN_NAMED} --steps 20 --timeout-minutes 0.1"
    assert train_ranks(2, line, hook) == ([0, 0], [[], []])


def train_three_deaths() -> None:
    """Before the first checkpoint, then of rank 0, then at any point of a step."""
    attempt = (int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    late = threading.Timer(0.03, train_kill, (signal.SIGKILL,))
    deaths: dict[tuple[int, int], Any] = {
        (1, 0): (1, 4, train_kill, 9),
        (0, 1): (0, 47, train_kill, 9),
        (1, 2): (1, 60, late.start),
    }
    if attempt in deaths:
        train_at(*deaths[attempt])


def train_early_death() -> None:
    """Rank 0 dies at its first start."""
    if os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        train_kill(signal.SIGKILL)


def train_slowly() -> None:
    """Every step takes longer."""
    train_before(data.Source, "batch", time.sleep, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--method ddp"])
def test_torchrun_restarts_a_killed_rank_and_ends_as_the_undisturbed_run(train_place, options):
    launch = TrainCommand.torchrun(f"{TRAIN_NAMED} {options}", "train_three_deaths", 3)
    assert launch.wait() == 0
    said = Path("out").read_text()
    first, second = (int(step) for step in re.findall(r"resuming at step (\d+)", said))
    assert first == 40 and second >= 60 and said.count("run: ") == 4  # attempts
    assert train_end_state("run") == train_straight(f"{TRAIN_LINE} {options}")


@pytest.mark.slow
def test_a_restart_by_torchrun_touches_no_run_of_another_launch(train_place):
    shutil.copytree(train_finished(TRAIN_40)[1], "runs/run")
    before = train_tree("runs")
    assert TrainCommand.torchrun(TRAIN_NAMED, "time.time", 1).wait() == 1
    assert Path("err").read_text().count("train.py: runs/run exists: give --resume") == 2
    assert train_tree("runs") == before
    # With --overwrite a rank that dies before the old run is deleted changes nothing either.
    line = f"{TRAIN_NAMED} --steps 30 --overwrite"
    assert TrainCommand.torchrun(line, "train_early_death", 1).wait() == 0
    assert "resuming" not in Path("out").read_text() and len(train_rows("run")) == 3


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_all_ranks(train_place):
    launch = TrainCommand.torchrun(TRAIN_NAMED, "train_slowly")
    log = Path("runs/run/metrics.jsonl")
    launch.until(lambda: log.exists() and log.stat().st_size > 1000)
    launch.process.send_signal(signal.SIGTERM)
    launch.wait()
    assert "continue with --resume --name run" in Path("out").read_text()
    assert not Path("runs/run/summary.json").exists() and train_run(TRAIN_AGAIN) == 0
    assert train_end_state("run") == train_straight(TRAIN_LINE)


def train_alive(pids: list[int]) -> bool:
    """Whether one of them runs; one that nobody has waited for does not."""
    states = []
    for pid in pids:
        with contextlib.suppress(OSError):
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return not set(states) <= {"Z"}


TRAIN_MULTICORE = pytest.mark.skipif(diloco.cores() < 2, reason="one process on one core")


@pytest.mark.slow
@TRAIN_MULTICORE
@pytest.mark.parametrize(
    ("ranks", "who", "number"),
    [
        *((ranks, 0, number) for ranks in (0, 2) for number in (2, 15, 9)),
        *((2, who, number) for who in (1, 2) for number in (15, 9)),
    ],
)
def test_a_signal_or_a_dead_process_ends_the_start_of_plain_python_at_once(
    train_place, ranks, who, number
):
    launch = TrainCommand.plain(TRAIN_NAMED)
    # While it imports torch, or once the ranks are there and look for each other.
    launch.until(lambda: "libtorch" in Path(f"/proc/{launch.process.pid}/maps").read_text())
    pids = launch.until(lambda: len(launch.family()) > ranks and launch.family())
    os.kill(pids[who], number)
    launch.until(lambda: launch.process.poll() is not None and not train_alive(pids), 15)
    said = train_complaints(Path("err").read_text())
    assert launch.wait() in (1, -number) and len(said) == (launch.wait() == 1), said
    assert not Path("runs/run/summary.json").exists()


def train_listening(pids: list[int]) -> list[str]:
    """Addresses, hexadecimal, at which processes listen, but for loopback ones."""
    own = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for at in ("tcp", "tcp6") for line in open(f"/proc/net/{at}")]
    places = [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own
    ]
    return [place for place in places if place[-8:] not in ("0100007F", "01000000")]


@pytest.mark.slow
@TRAIN_MULTICORE
@pytest.mark.parametrize(
    ("who", "number", "code"),
    [(0, 2, 0), (0, signal.SIGTERM, 0), (0, signal.SIGUSR1, 0), (2, 9, 1), (0, 9, -9)],
)
def test_the_processes_of_plain_python_listen_to_nobody_else_and_stop_together(
    train_place, monkeypatch, who, number, code
):
    monkeypatch.setitem(model.SIZES, "tiny", TRAIN_TINY)
    line = f"{TRAIN_LINE} --steps 200 --checkpoint-every 3"
    launch, log = TrainCommand.plain(f"{line} --name run"), Path("runs/run/metrics.jsonl")
    launch.until(lambda: log.exists() and log.read_bytes().count(b"\n") > 40)
    pids = launch.family()
    assert len(pids) == 3 and train_listening(pids) == []
    os.kill(pids[who], number)
    launch.until(lambda: launch.process.poll() is not None and not train_alive(pids))
    said = train_complaints(Path("err").read_text())
    # A killed rank is named by the parent; the rank that misses it may have said so before.
    assert launch.wait() == code and len(said) in ((1, 2) if code == 1 else (0,)), said
    assert code == 1 or "continue with --resume --name run" in Path("out").read_text()
    assert not Path("runs/run/summary.json").exists() and train_run(TRAIN_AGAIN) == 0
    assert train_run(f"{line} --name straight") == 0
    assert train_end_state("run") == train_end_state("straight")


@pytest.mark.slow
def test_a_rank_left_in_the_environment_says_who_is_awaited_where(train_place):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519", "RANK": "0", "WORLD_SIZE": "2"}
    launch = TrainCommand(train.__file__, *TRAIN_NAMED.split(), **meeting)
    words = "rank 0 waits for 2 ranks at 127.0.0.1:29519 (RANK and WORLD_SIZE are set)"
    launch.until(lambda: words in Path("err").read_text(), 30)
    launch.process.send_signal(signal.SIGINT)
    launch.until(lambda: launch.process.poll() is not None, 10)


def test_an_empty_or_impossible_rank_is_no_traceback(train_place, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "")
    assert train_run(f"{TRAIN_NAMED} --steps 5") == 0
    monkeypatch.setenv("RANK", "2")
    assert "RANK=2 WORLD_SIZE=1" in train_refused(capsys, TRAIN_NAMED)


# ---------------------------------------------------------------- folders and files


def test_whoever_does_not_own_a_folder_touches_nothing_in_it(train_place, capsys):
    def wait() -> None:
        Path("opening").touch()
        while not Path("go").exists():
            time.sleep(0.02)

    first = Launch(1, train_rank, TRAIN_NAMED, lambda: train_before(train, "train", wait))
    while not Path("opening").exists():
        time.sleep(0.02)
    before = train_tree("runs")
    for line in (TRAIN_NAMED, f"{TRAIN_NAMED} --overwrite", TRAIN_AGAIN):
        answer = train_refused(capsys, line)
        assert answer == "runs/run: another process is writing this run"
    assert train_tree("runs") == before
    Path("go").touch()
    assert first.wait()[0].value == 0
    assert train_end_state("run") == train_straight(TRAIN_LINE)


@pytest.mark.parametrize(
    "foreign",
    ["a.jpg", "photos/a.jpg", "checkpoint/a.txt", "checkpoint/step-00000040/a.txt", "link"],
)
def test_overwrite_deletes_nothing_where_something_foreign_lies(train_place, capsys, foreign):
    shutil.copytree(train_finished(TRAIN_40)[1], "runs/run")
    path, named = Path("runs/run", foreign), foreign.removesuffix("/a.jpg")
    if foreign == "link":
        named = "checkpoint"
        Path("runs/run/checkpoint").rename("elsewhere")
        Path("runs/run/checkpoint").symlink_to(Path("elsewhere").resolve())
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    before = train_tree(".")
    answer = train_refused(capsys, f"{TRAIN_NAMED} --overwrite")
    assert answer.startswith(f"--overwrite: runs/run/{named} ")
    assert answer.endswith("nothing was deleted") and train_tree(".") == before


def test_overwrite_deletes_nothing_before_the_new_run_has_its_first_batch(train_place, capsys):
    shutil.copytree(train_finished(TRAIN_40)[1], "runs/run")
    before = train_tree("runs")
    for shard in Path("shards").glob("c4-train*"):
        shard.write_bytes(gzip.compress(b'{"text": 3}\n' * 40))
    assert "c4-train" in train_refused(capsys, f"{TRAIN_NAMED} --overwrite")
    assert train_tree("runs") == before


def test_a_rank_that_does_not_see_the_first_rank_s_folder_ends_all_with_one_line(train_place):
    shutil.copytree("shards", "elsewhere/shards")
    hook = lambda: os.environ["RANK"] == "1" and os.chdir("elsewhere")  # noqa: E731
    words = "runs/run: not every rank sees the folder of rank 0"
    assert train_ranks(2, TRAIN_NAMED, hook) == ([2, 2], [[words], []])


def test_a_run_needs_neither_locks_nor_synced_folders_nor_an_affinity(train_place, monkeypatch):
    def fails(*_: Any) -> None:
        raise OSError(95, "not supported")

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(fcntl, "flock", fails)
    monkeypatch.setattr(os, "fsync", fails)
    assert diloco.cores() >= 1
    train_cut(TRAIN_NAMED, 34)
    assert train_run(TRAIN_AGAIN) == 0
    assert train_end_state("run") == train_straight(TRAIN_LINE)


def train_edit(old: str, new: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


def train_flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 2
    path.write_bytes(content)


def train_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def train_tensor(change: Callable[[dict, str], Any]) -> Callable[[Path], Any]:
    """Change a tensor of a checkpoint, with the right checksum."""

    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors, min(name for name in tensors if name.startswith("shared.")))
        save_file(tensors, path)
        train_sign(path.parent.parent.parent)

    return damage


def train_nothing(path: Path) -> None:
    """A manifest that lists nothing lets nothing through."""
    train.write_json(path, train.read_json(path) | {"files": {}})


TRAIN_SHARED = "checkpoint/step-00000040/shared.safetensors"
TRAIN_WORKER = "checkpoint/step-00000040/worker-01.safetensors"
TRAIN_MANIFEST = "checkpoint/step-00000040/manifest.json"


@pytest.mark.parametrize(
    ("file", "damage", "words"),  # without words the checkpoint before it continues
    [
        (TRAIN_SHARED, train_flip, ""),
        (TRAIN_SHARED, train_tensor(lambda t, k: t.pop(k)), "cannot be read"),
        (TRAIN_WORKER, Path.unlink, ""),
        (TRAIN_MANIFEST, train_half, ""),
        (TRAIN_MANIFEST, train_nothing, ""),
        ("metrics.jsonl", train_edit('"step": 35', '"step": 36'), ""),
        ("intervals.jsonl", lambda path: os.truncate(path, path.stat().st_size - 9), ""),
        ("metrics.jsonl", train_edit('"step": 7,', '"step": 8,'), "changed since"),
        ("metrics.jsonl", train_half, "changed since"),
        ("intervals.jsonl", train_edit('"tokens": ', '"tokens": 1'), "changed since"),
        ("config.json", lambda path: path.write_text("[" * 10**5), "cannot be read"),
        ("config.json", train_edit('"lr": 0.001', '"lr": 0.003'), "changed since"),
        ("env.json", train_half, "line "),
        ("env.json", lambda path: path.write_text("[]"), "cannot be read"),
        ("checkpoint/*/shared.safetensors", train_flip, "changed since"),
        ("checkpoint", shutil.rmtree, "no whole checkpoint"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_and_the_checkpoint_before_it_continues(
    train_place, capsys, file, damage, words
):
    straight, folder = train_finished(TRAIN_40)
    shutil.copytree(folder, "runs/run")
    for path in Path("runs/run").glob(file):
        damage(path)
    before = train_tree("runs")
    capsys.readouterr()
    code = train_run(TRAIN_AGAIN)
    said = capsys.readouterr()
    lines = re.split("[\r\n]+", said.err)
    passed = [line for line in lines if line.startswith("DAMAGED CHECKPOINT runs/run/checkpoint/")]
    if words:
        assert code == 2 and train_tree("runs") == before
        (last,) = train_complaints(said.err)
        named = re.escape(f"runs/run/{file}").replace(r"\*", ".*").removesuffix("/checkpoint")
        assert any(re.search(f"{named}: .*{words}", line) for line in [*passed, last]), said.err
    else:
        assert code == 0 and "/step-00000040 is passed over: " in passed[0]
        assert f"runs/run/{file}: " in passed[0]
        assert "resuming at step 30" in said.out and train_end_state("run") == straight
        kept = sorted(path.name for path in Path("runs/run/checkpoint").iterdir())
        assert kept == ["damaged-step-00000040", "step-00000030", "step-00000040"]


def test_damaged_data_met_by_one_rank_ends_all_and_the_line_is_printed_once(train_place):
    shard = Path("shards/c4-train.00001.json.gz")
    rows = gzip.decompress(shard.read_bytes()).split(b"\n")
    rows[30] = b'{"text": 3}'
    shard.write_bytes(gzip.compress(b"\n".join(rows)))
    codes, ((gone,), (found,)) = train_ranks(2, f"{TRAIN_NAMED} --timeout-minutes 0.1")
    assert codes == [1, 2] and re.match(TRAIN_GONE, gone) and f"{shard}:31: " in found


# ---------------------------------------------------------------- values that are not finite


def train_poison(value: float, *where: tuple[int, int]) -> Callable[[], Any]:
    """A weight of a worker takes that value after its step."""

    def hook() -> None:
        batch, step = data.Source.batch, diloco.LocalUpdate.step
        latest: list[Any] = []

        def noted(self: Any, worker: int, at: int) -> data.Batch:
            latest[:] = [(worker, at)]
            return batch(self, worker, at)

        def poisoned(self: Any, row: int, *words: Any) -> None:
            step(self, row, *words)
            if latest[0] in where:
                self.replicas[row].local[0][3] = value

        data.Source.batch, diloco.LocalUpdate.step = noted, poisoned

    return hook


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_worker_that_is_not_finite_is_left_out_and_the_run_goes_on(train_place, value):
    states = []
    for ranks in (1, 2):
        ended = train_ranks(ranks, f"{TRAIN_NAMED} --overwrite", train_poison(value, (1, 73)))
        assert ended == ([0] * ranks, [[]] * ranks)
        states.append(train_end_state("run"))
    assert states[0] == states[1]
    (bad,) = [row for row in train_rows("run") if row["excluded"]]
    assert bad["excluded"] == [1] and bad["drift"] is None and not bad["finite"]
    assert bad["verdict"] == "nonfinite" and bad["step"] - bad["steps"] <= 73 < bad["step"]
    assert bad["update_norm"] > 0 and bad["next_horizon"] < bad["horizon"]
    losses = [row["loss"] for row in train_rows("run", "metrics")]
    unknown = [step for step, loss in enumerate(losses) if loss is None]
    assert unknown == list(range(74, bad["step"]))
    # Fresh AdamW state: it counts only the steps since; the other worker's counts them all.
    for worker, steps in ((0, 96), (1, 96 - bad["step"])):
        saved = load_file(f"runs/run/checkpoint/step-00000096/worker-{worker:02d}.safetensors")
        counts = {float(v) for k, v in saved.items() if k.startswith("optimizer.step.")}
        assert counts == {float(steps)}  # Sabotage: a worker left out keeps its AdamW state.


def test_a_run_stops_after_max_bad_intervals_with_the_checkpoints_before_them(train_place):
    hook = train_poison(math.nan, *[(1, step) for step in (25, 31, 47, 52, 60, 61, 62)])
    line = f"{TRAIN_NAMED} --method diloco --max-bad-intervals 3"
    codes, ((said,), other) = train_ranks(2, line, hook)
    assert codes == [1, 1] and other == []
    words = r"--max-bad-intervals: 3 in a row .* \[1\]: .* try a lower --lr than 0.001"
    assert re.search(words, said)
    assert [row["excluded"] for row in train_rows("run")] == [[], [], [1], [1], [1]]
    saved = sorted(path.name for path in Path("runs/run/checkpoint").iterdir())
    assert saved == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("method", ["autoloco", "ddp"])
def test_a_reckless_learning_rate_ends_in_one_line(train_place, capsys, method):
    line = f"{TRAIN_LINE} --lr 1e8 --method {method}"
    assert train_run(f"{line} --name run") == 1
    (said,) = train_complaints(capsys.readouterr().err)
    assert "--max-bad-intervals: 3 in a row" in said and "lower --lr" in said
    patient = f"{line} --max-bad-intervals 99"
    train_cut(f"{patient} --name run --overwrite", 55)
    assert train_run(TRAIN_AGAIN) == 0
    assert train_end_state("run") == train_straight(patient)


# ---------------------------------------------------------------- at random


@pytest.mark.slow
def test_runs_killed_at_20_random_points_end_as_the_straight_ones(train_place, capsys):
    rng = random.Random(7)
    for number in range(20):
        options = TRAIN_OPTIONS[number % len(TRAIN_OPTIONS)]
        stop, ranks = (signal.SIGKILL, signal.SIGTERM)[number % 2], 1 + number // 2 % 2
        worker, step = rng.randrange(2), rng.randrange(94)
        late = threading.Timer(rng.uniform(0, 0.02), train_kill, (stop,))
        hooks = [train_stop(worker, step, stop)]
        if number % 3:  # of 96 steps, so that a fast run is not over before it
            at = functools.partial(train_at, worker)
            hooks = [functools.partial(at, step, late.start), functools.partial(at, 94, late.join)]
        line = f"{TRAIN_NAMED} {options} --overwrite --checkpoint-every {rng.choice((1, 1, 3))}"
        codes, _ = train_ranks(ranks, f"{line} --timeout-minutes 0.1", train_both(*hooks))
        where = f"{stop.name} at step {step} of worker {worker}, {ranks} ranks, {options}: {codes}"
        assert not Path("runs/run/summary.json").exists(), where
        killed = [-9] + [1] * (ranks - 1)
        assert sorted(codes) == ([0] * ranks if stop == signal.SIGTERM else killed), where
        if any(Path("runs/run/checkpoint").glob("step-*")):
            assert train_ranks(3 - ranks, TRAIN_AGAIN)[0] == [0] * (3 - ranks), where
        else:
            assert "no whole checkpoint" in train_refused(capsys, TRAIN_AGAIN), where
            assert train_run(line) == 0
        assert train_end_state("run") == train_straight(f"{TRAIN_LINE} {options}"), where


def train_damage(path: Path, rng: random.Random) -> None:
    """Damage a file in one of the ways of disks, crashes and editors."""
    content = path.read_bytes()
    at = rng.randrange(len(content))
    left, right = content[:at], content[at + 1 :]
    changed = left + bytes([content[at] ^ 1 << rng.randrange(8)]) + right
    words = rng.choice((b"", b"{}", b"[]", b"null", b"7\n"))
    ways = (changed, changed, left, left + bytes(40) + right[39:], words, None)
    path.unlink()
    if (new := rng.choice(ways)) is not None:
        path.write_bytes(new)


@pytest.mark.slow
def test_120_damaged_files_are_survived_or_answered_with_one_line(train_place, capsys):
    line, whole = f"{TRAIN_LINE} --steps 42", Path("../whole").resolve()
    straight, rng, seen = train_straight(line), random.Random(3), {0: 0, 2: 0}
    train_cut(f"{line} --name run", 34)
    shutil.copytree(".", whole)
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    assert len(files) == 3 + 2 * 4 + 4
    for number in range(120):
        for folder in ("runs", "shards"):
            shutil.rmtree(folder)
        shutil.copytree(whole, ".", dirs_exist_ok=True)
        path = files[number % len(files)]
        train_damage(path, rng)
        before = train_tree("runs")
        capsys.readouterr()
        code = train_run(TRAIN_AGAIN)
        said = capsys.readouterr().err
        lines, where = train_complaints(said), f"{number}: {path}: {said}"
        seen[code] += 1
        if code == 0:
            assert lines == [] and train_end_state("run") == straight, where
        else:
            assert len(lines) == 1 and (path.parts[0] in lines[0] or path.name in lines[0]), where
            assert train_tree("runs") == before, where
    assert seen[0] >= 36 and seen[2] >= 36, seen


# ---------------------------------------------------------------- cost before you pay


def train_dry(line: str) -> dict:
    return train.dry_run(train.parse([*line.split(), "--dry-run"])[0])


@pytest.mark.parametrize(
    ("line", "count", "saved", "intervals"),
    [
        ("", 73, 27.0, "8x500 5x550 5x600 5x650 49x750 250"),
        ("--method diloco", 100, 0.0, "100x500"),
        ("--method linear", 100, 0.0, ""),
        ("--method qsr", 41, 59.0, ""),
        ("--method ddp --wire bf16", 50_000, -49_900.0, "50000x1"),
        ("--method ddp", 50_000, -99_900.0, "50000x1"),  # its gradients travel as fp32
        ("--recipe c4-215m-ablation", 73, 27.0, ""),
        ("--recipe ultrachat-8b", 49, 24.6, "8x100 5x110 5x120 5x140 25x150 90"),
        ("--recipe ultrachat-8b --method diloco", 65, 0.0, "64x100 90"),
        ("--recipe ultrachat-8b --wire int8", 49, 62.3, ""),
        ("--recipe tiny", 73, 27.0, "8x20 5x22 5x24 5x26 49x30 10"),
        ("--recipe tiny --base-horizon 35 --method diloco", 58, 0.0, "57x35 5"),
        ("--verdicts 9=moderate", 77, 23.0, "8x500 550 14x500 5x550 5x600 5x700 38x750 700"),
        ("--verdicts 8=moderate", 73, 27.0, "9x500 5x550 5x600 5x650 48x750 500"),
        ("--verdicts 8=moderate,9=moderate", 79, 21.0, "9x500 5x400 5x450 5x500 5x550 "),
        ("--verdicts 9=consistent,10=moderate", 77, 23.0, "8x500 2x550 13x500 5x550 "),
    ],
)
def test_a_dry_run_prints_the_published_schedules(capsys, line, count, saved, intervals):
    assert train_run(f"--recipe c4-215m {line} --dry-run --json") == 0
    said = capsys.readouterr().out
    result = json.loads(said.splitlines()[-1])
    assert (result["synchronisations"], round(100 * result["saved"], 1)) == (count, saved)
    assert f"intervals         {intervals}" in said


def test_the_published_payload_and_memory_follow_from_the_8b_model(capsys):
    result = train_dry("--recipe ultrachat-8b --ranks-per-worker 8")
    assert round(result["methods"]["diloco"]["payload_bytes"] / 1e9, 3) == 1043.934
    assert sum(result["memory_bytes"].values()) < train.FITS
    assert "memory on 64" in (said := capsys.readouterr().out) and "fits in 80" in said
    train_dry("--recipe ultrachat-8b")
    assert "does not fit in 80" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", train.RECIPES)
def test_a_dry_run_compares_all_methods(recipe, capsys):
    line = f"--recipe {recipe} --link-gbps 10 --link-ms 20 --step-seconds 0.5"
    result = train_dry(line)
    assert list(result)[:4] == ["synchronisations", "intervals", "payload_bytes", "saved"]
    table, said = result["methods"], capsys.readouterr().out
    steps = train.RECIPES[recipe].get("steps", 2000)
    assert list(table) == list(train.METHODS)
    assert table["autoloco"]["synchronisations"] == result["synchronisations"]
    assert table["ddp"]["synchronisations"] == steps
    for word in ("input positions", "parameters", "memory on", "payload", "on link", *table):
        assert word in said
    assert train_dry(f"{line} --method ddp")["methods"] == table  # ddp's wire is its own
    for row in table.values():
        link = row["payload_bytes"] * 8 / 10e9 + row["synchronisations"] * 0.02  # seconds
        assert row["hours"] == pytest.approx(link / 3600)
        assert row["utilisation"] == pytest.approx(0.5 * steps / (0.5 * steps + link))


def test_estimated_memory_of_states_is_what_two_workers_of_a_process_hold(train_place):
    config, _ = train.parse(TRAIN_NAMED.split())
    source = data.open_source(config)
    workers = train.build_workers(config, diloco.Ranks(0, 1, 2), source)
    workers.begin(1)
    for row in range(2):
        workers.step(row, source.batch(row, 0), 1e-3)
    held = [tensor for tensors in workers.buffers.values() for tensor in tensors]
    held += [p.grad for p in workers.parameters]
    for replica in workers.replicas:
        held += replica.tensors
        for state in replica.states:
            held += [x for values in state.values() for x in values.values() if x.dim()]
    assert sum(4 * t.numel() for t in held) == train.memory_per_gpu(config, 2)["states"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_estimated_memory_of_activations_is_what_autograd_keeps(dtype, monkeypatch):
    size = model.ModelConfig(264, 256, 3, 4, 2, 512, tied=True)
    monkeypatch.setitem(model.SIZES, "tiny", size)
    config, _ = train.parse(f"--dtype {dtype} --seq-len 1024".split())
    network = model.Transformer(size)
    network.init_weights(0)
    known, kept = {p.untyped_storage().data_ptr() for p in network.parameters()}, {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"),
    ):
        network.hidden(torch.zeros(2, 1024, dtype=torch.int64))
    held = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)
    estimate, tokens = train.memory_per_gpu(config, 1)["activations"], 2 * 1024
    if dtype == "bf16":
        held -= 2 * sum(p.numel() for name, p in network.named_parameters() if "blocks" in name)
    assert held + 8 * size.width * tokens == pytest.approx(estimate, rel=0.15)


# ---------------------------------------------------------------- what eval.py says of a run

EVAL_TALK = [{"role": "user", "content": " alpha "}]


@pytest.fixture(scope="module")
def eval_runs(tmp_path_factory):
    """Two short runs on tiny local files: `plain` on texts, `chat` fine-tuned from it."""
    home = tmp_path_factory.mktemp("eval")
    write_shards(home, 40, 20)
    talk = [*EVAL_TALK, {"role": "assistant", "content": "beta"}]
    for part, count in (("train", 40), ("test", 6)):
        write_rows(home / "chat" / f"{part}.jsonl", [{"messages": talk}] * count)
    common = "--workers 1 --batch-size 1 --seq-len 64 --val-documents 6 --warmup 5"
    plain = f"--name plain --steps 60 --data {home} --lr 5e-3 --base-horizon 5 --eval-every 2"
    chat = f"--recipe tiny-sft --name chat --steps 40 --init-from runs/plain --data {home}/chat"
    with contextlib.chdir(home):
        for line in (plain, chat):
            assert train.main(f"{line} {common}".split()) == 0
        yield home / "runs"


def eval_greedy(network, ids, most):
    """The likeliest tokens, the whole text read anew for each."""
    new = []
    for _ in range(most):
        with torch.no_grad():
            scores = network.logits(torch.tensor([[*ids, *new]]))[0, -1]
        new.append(int(scores[:261].argmax()))
    return new


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_the_loss_of_a_run_is_the_one_in_its_summary(eval_runs, name, capsys):
    summary = json.loads((eval_runs / name / "summary.json").read_text())
    found = evaluation.loss(eval_runs / name)
    assert found["val_loss"] == summary["val_loss"]
    assert found["bits_per_byte"] == summary["bits_per_byte"]
    assert evaluation.main(["loss", str(eval_runs / name)]) == 0
    assert f"{summary['val_loss']:.4f} nats a token" in capsys.readouterr().out
    if name == "chat":  # the assistant's tokens only; the one that ends a turn is a target too
        assert found["val_tokens"] == 6 * (len("beta") + 1)


def test_a_sample_repeats_with_its_seed_and_is_greedy_at_temperature_0(eval_runs, capsys):
    state, others = torch.get_rng_state(), random.getstate()  # Sabotage: the global generator
    texts = [evaluation.sample(eval_runs / "plain", "al", 30, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == others
    line = f"sample {eval_runs}/plain --prompt al --tokens 30 --seed 1"
    assert evaluation.main(line.split()) == 0
    assert capsys.readouterr().out == texts[0] + "\n"
    _, network = evaluation.open_run(eval_runs / "plain")
    greedy = "al" + data.open_tokenizer("bytes").decode(eval_greedy(network, [256, *b"al"], 9))
    assert evaluation.sample(eval_runs / "plain", "al", 9, temperature=0) == greedy


# Export: what transformers reads


EVAL_PIECES = ["the thing", "\n\n", "it's", "2000", *data.BYTE_SPECIALS, *data.GPT2_SPECIALS]
EVAL_TEXT = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(EVAL_PIECES)), max_size=6)


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "llama3", "a folder"])
@pytest.mark.parametrize("chat", [False, True])
def test_an_exported_tokenizer_gives_the_ids_that_training_reads(tmp_path, kind, chat):
    transformers = pytest.importorskip("transformers")
    if chat and kind == "gpt2":
        pytest.skip("has no tokens of a chat")
    data_bpe(tmp_path, (b" the", b"the", b"ing", b"he", b"00", b"  ", b"\n\n", b"'s", b"\xc3\xa9"))
    own = data.open_tokenizer("llama3" if kind == "a folder" else kind, [tmp_path])
    if kind == "a folder":  # of Hugging Face, by name
        evaluation.save_tokenizer(own, tmp_path / "theirs", not chat)
        own = data.open_tokenizer(str(tmp_path / "theirs"))
    evaluation.save_tokenizer(own, tmp_path, chat)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    split = {"split_special_tokens": True} if chat else {}

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(EVAL_TEXT.map("".join))
    def same(text):
        ids = own.encode(text).tolist()
        assert theirs(text, **split).input_ids == [own.begin, *ids]
        assert theirs(text, add_special_tokens=False, **split).input_ids == ids
        assert theirs.decode(ids) == text

    same()
    assert theirs.bos_token_id == own.begin
    assert theirs.eos_token_id == (own.turn_end if chat else own.end)
    assert (theirs.chat_template is not None) == chat


def test_an_exported_run_has_the_same_logits_answers_alike_and_stops_at_the_turn(
    eval_runs, tmp_path, monkeypatch
):
    transformers, own = pytest.importorskip("transformers"), data.open_tokenizer("bytes")
    evaluation.export(eval_runs / "chat", tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = tokenizer.apply_chat_template(EVAL_TALK, add_generation_prompt=True, return_dict=True)
    read, _ = data.encode_chat(own, (("user", " alpha "), ("assistant", "")), 1000)
    assert asked["input_ids"] == read[:-1].tolist()
    _, network = evaluation.open_run(eval_runs / "chat")
    ids, options = torch.tensor([asked["input_ids"]]), {"max_new_tokens": 9, "do_sample": False}
    with torch.no_grad():
        torch.testing.assert_close(network.logits(ids), other(ids).logits, atol=1e-4, rtol=0)
    made = other.generate(ids, **options)[0, ids.shape[1] :].tolist()
    made = [token for token in made if token not in (own.end, own.turn_end)]
    answer = evaluation.sample(eval_runs / "chat", " alpha ", 9, temperature=0)
    assert answer == " alpha \n\n" + tokenizer.decode(made)
    # Sabotage: no generation_config.json
    turn = other.generate(ids, **options, sequence_bias=[[[own.turn_end], 100.0]])
    assert turn[0, ids.shape[1] :].tolist() == [own.turn_end]
    logits = model.Transformer.logits

    def ends(network, ids, last=False):
        return logits(network, ids, last) + 100.0 * (torch.arange(264) == own.turn_end)

    monkeypatch.setattr(model.Transformer, "logits", ends)
    assert evaluation.sample(eval_runs / "chat", "beta", 9) == "beta\n\n"


def test_an_export_replaces_nothing_and_names_a_missing_library(eval_runs, monkeypatch, capsys):
    assert evaluation.main(["export", str(eval_runs / "plain"), str(eval_runs / "plain")]) == 2
    assert "is not empty" in capsys.readouterr().err
    for name, words in (("transformers", "export {} new"), ("lm_eval", "tasks {} --tasks bbh")):
        monkeypatch.setitem(sys.modules, name, None)
        assert evaluation.main(words.format(eval_runs / "plain").split()) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "pip install transformers, 'lm_eval[" in error
    assert not (eval_runs.parent / "new").exists()


# Downstream tasks by the harness's own model


def eval_task(folder, name, rows, **more):
    """Write NAME.yaml (JSON is YAML) and its data NAME.json."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text("\n".join(json.dumps(row) for row in rows))
    files = {"data_files": {"test": str(folder / f"{name}.json")}}
    task = dict(task=name, dataset_path="json", dataset_kwargs=files, test_split="test")
    task |= dict(doc_to_text="{{question}}", doc_to_target="{{answer}}")
    task |= dict(metric_list=[{"metric": "exact_match", "aggregation": "mean"}])
    task |= dict(generation_kwargs={"until": [], "max_gen_toks": 12})
    (folder / f"{name}.yaml").write_text(json.dumps(task | more))


@pytest.fixture
def eval_harness(monkeypatch, tmp_path):
    """The harness without its own 14,000 tasks, which take 8 s to index; nothing is looked up."""
    lm_tasks = pytest.importorskip("lm_eval.tasks")
    pytest.importorskip("accelerate")
    import datasets

    own = lm_tasks.TaskManager
    monkeypatch.setattr(lm_tasks, "TaskManager", lambda **kw: own(**kw, include_defaults=False))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    return tmp_path / "tasks"


def eval_measured(run, names, folder, *options):
    line = ["tasks", str(run), "--tasks", names, "--task-path", str(folder), *options]
    assert evaluation.main(line) == 0
    return json.loads((run / "tasks.json").read_text())


@pytest.mark.slow
def test_a_local_task_gives_the_number_worked_out_by_hand(eval_runs, eval_harness, capsys):
    _, network = evaluation.open_run(eval_runs / "plain")
    rows, own = [], data.open_tokenizer("bytes")
    for question in ("alpha", "gamma", "be", "delta"):
        made = own.decode(eval_greedy(network, [256, *question.encode()], 12))
        rows.append({"question": question, "answer": made if question != "be" else "no"})
    for name in ("one", "two"):
        eval_task(eval_harness, name, rows)
    found = eval_measured(eval_runs / "plain", "one,two", eval_harness, "--batch-size", "1")
    # Of n zeros and ones with mean p the standard error is sqrt(p (1 - p) / (n - 1)).
    expected = {"task": "one", "metric": "exact_match,none", "value": 0.75, "stderr": 0.25, "n": 4}
    expected |= {"shots": 0, "limit": None, "chat": False, "checkpoint": "step-00000060"}
    assert found[0] == pytest.approx(expected | {"lm_eval": sys.modules["lm_eval"].__version__})
    assert "| two | exact_match,none | 0.75 | 0.25 | 4 | 0 |" in capsys.readouterr().out
    # Asked again, a task's rows are replaced; those of other tasks of this checkpoint stay.
    [kept, again] = eval_measured(eval_runs / "plain", "one", eval_harness, "--limit", "1")
    assert kept["task"] == "two" and again["n"] == 1


@pytest.mark.slow
def test_a_fine_tuned_run_is_asked_in_the_chat_format_and_a_group_speaks_for_its_tasks(
    eval_runs, eval_harness
):
    text = evaluation.sample(eval_runs / "chat", "alpha", 12, temperature=0).split("\n\n", 1)[1]
    eval_task(eval_harness, "talk", [{"question": "alpha", "answer": text}])
    group = {"group": "both", "task": ["talk"]}
    group |= {"aggregate_metric_list": [{"metric": "exact_match"}]}
    (eval_harness / "both.yaml").write_text(json.dumps(group))
    [row] = eval_measured(eval_runs / "chat", "both", eval_harness)
    assert row["task"] == "both" and row["chat"] and row["value"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [("brokne", "is not in"), ("broken", "ZeroDivisionError")])
def test_what_the_harness_cannot_do_is_one_line(eval_runs, eval_harness, capsys, name, words):
    eval_task(eval_harness, "broken", [{"question": "a"}], doc_to_text="{{ 1 / 0 }}")
    line = ["tasks", str(eval_runs / "plain"), "--task-path", str(eval_harness), "--tasks", name]
    assert evaluation.main(line) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"eval.py: --tasks {name}: {words}")


# Reports


def eval_recorded(losses=(4.0,) * 100, seed=0, **changes):
    """A run that no program wrote."""
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    given = train.RECIPES["tiny"] | {"method": "diloco", "seed": seed, "steps": len(losses)}
    config = train.Config(**given | changes)
    verdicts = (None, "supports", "supports", "nonfinite", "moderate")
    log = [
        {"interval": at, "step": at * 20, "steps": 20, "horizon": 30 if at == 2 else 20}
        | {"update_norm": norm, "verdict": verdict, "reason": "abcde"[at - 1], "colour": 2.0 * at}
        | {"payload_bytes": 10, "excluded": []}
        for at, norm, verdict in zip(range(1, 6), (1.0, 5.0, 2.0, None, 6.0), verdicts, strict=True)
    ]
    return evaluation.Run(Path("run"), config, {}, metrics, log, [], "p")


def test_smoothed_losses_and_medians_of_statistics_by_hand():
    one = eval_recorded([4.0, 2.0] * 50)  # Sabotage: a window of 1 %; 2 % of 100 steps are 2
    assert one.smoothed == [4.0, *[3.0] * 99]
    assert eval_recorded([None, 2.0, None, None] * 25).smoothed[1:3] == [2.0, 2.0]
    assert one.update_norms == {20: 2.0, 30: 5.0}
    assert one.row["held"] == ["4: d", "5: e"]
    shown = evaluation.report([one])  # `colour` is a statistic that a fork added
    assert "| run | intervals | update norm | colour |" in shown
    assert "| run | 5x20 | 20: 2, 30: 5 | 20: 7, 30: 4 |" in shown


def test_labels_leave_out_what_all_share_and_hold_no_formula():
    runs = [eval_recorded(data="a$b$", lr=lr) for lr in (1e-3, 2e-3, 4e-3)]
    names, shared = evaluation.labels(runs)
    assert list(names.values()) == ["diloco, lr 0.001", "diloco", "diloco, lr 0.004"]
    assert shared == "tiny, diloco, steps 100, data a$b$, program p"
    names, _ = evaluation.labels([*runs, eval_recorded()])
    assert r"diloco, data a\$b\$, lr 0.004" in names.values()


def test_results_pair_the_runs_of_equal_seeds_by_hand():
    common = dict(train_loss=1.0, synchronisations=3, payload_bytes=2_000_000, saved=0.5, held=[])
    losses = {"a": (2.0, 3.0), "b": (2.5, 2.0)}
    rows = [
        common | dict(arm=arm, base="a", seed=seed, val_loss=loss)
        for arm, pair in losses.items()
        for seed, loss in zip((7, 8) if arm == "a" else (8, 7), pair, strict=True)
    ]
    assert evaluation.paired(rows[2:], rows[:2]) == [-0.5, 0.0]
    first, second = evaluation.results(rows).splitlines()[2:]
    ours = "| a | 2 | 1.0000 ± 0.0000 | 2.5000 ± 0.7071 | - | - | 3 | 0 | 2.0 MB | 50.0 % less |"
    assert first == ours and "| -0.2500 ± 0.3536 | 1 of 2 |" in second


def test_report_prints_every_table_and_draws_every_plot(eval_runs, tmp_path, capsys):
    scores = dict.fromkeys(evaluation.TASK_COLUMNS, 0.5)
    train.write_json(eval_runs / "plain" / "tasks.json", [scores])
    runs = [evaluation.read_run(eval_runs / name) for name in ("plain", "chat")]
    assert evaluation.main(["report", *(str(r.path) for r in runs), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    (eval_runs / "plain" / "tasks.json").unlink()
    for one in runs:
        assert one.smoothed[-1] == pytest.approx(one.summary["train_loss"], abs=1e-9)
        assert f"{one.summary['val_loss']:.4f}" in shown
        assert f"| {one.path.name} | {diloco.format_runs(one.summary['intervals'])} |" in shown
        assert (tmp_path / f"controller-{one.path.name}.png").stat().st_size > 20_000
    assert len(runs[0].validated) > 2 and (tmp_path / "loss.png").exists()  # on the way too
    assert "| plain | 0.5 | 0.5 |" in shown


def test_a_run_that_is_not_finished_is_reported_as_far_as_it_is(eval_runs, tmp_path, capsys):
    folder = tmp_path / "half"
    shutil.copytree(eval_runs / "plain", folder)
    (folder / "summary.json").unlink()
    rows = (folder / "intervals.jsonl").read_text().splitlines()[:3]  # the header and two
    end = json.loads(rows[-1])["step"]
    (folder / "intervals.jsonl").write_text("\n".join(rows) + "\n")
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:end]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1, "lo')  # torn
    assert evaluation.main(["report", str(folder), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{end} of 60 steps" in shown and (tmp_path / "controller-half.png").exists()
    (folder / "metrics.jsonl").write_text('{"step": 1, "lo\n')
    for place, name in ((tmp_path, "config.json"), (folder, "metrics.jsonl")):
        assert evaluation.main(["report", str(place)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert str(place / name) in line


# ---------------------------------------------------------------- benchmarks and experiments


def test_a_goal_is_judged_by_the_median_of_the_turns():
    samples = {"plain": [1, 2, 1], "ours": [1, 3.6, 9]}
    assert bench.row("x", "s", samples, plain=1.8)[-2:] == ["1", "1.8 (1 to 9), goal 1.8: met"]
    assert bench.row("x", "s", samples, plain=1.7)[-1] == "1.8 (1 to 9), goal 1.7: MISSED"
    cells = bench.row("x", "s", {"ours": [7], "limit": [2]})
    assert cells[2:] == ["7", "2", "3.5 (3.5 to 3.5)", "-", "-"]


# Sabotage: the sign of the pseudo-gradient, a skipped momentum, a theta that is not assigned.
def test_synchronisation_is_torchs_sgd_one_parameter_after_the_other_bit_for_bit():
    torch.manual_seed(0)
    numels, plan = [1, 7, 4095, 4096, 4097, 3 * SLAB + 5], bench.PLAN
    workers = bench.workers_on(bench.parameters(numels))
    plain = [theta.clone() for theta in workers.shared]
    step = workers.outer_lr * plan.step_scale
    outer = torch.optim.SGD(plain, step, plan.momentum, nesterov=True, foreach=False)
    for _ in range(3):
        for theta_k, theta in zip(workers.replicas[0].local, plain, strict=True):
            theta_k.copy_(theta + 0.01 * torch.randn_like(theta))
            theta.grad = theta - theta_k
        outer.step()
        workers.synchronise(plan)
        for found in (workers.shared, workers.replicas[0].local):
            assert all(map(torch.equal, found, plain))
    momentum = [outer.state[theta]["momentum_buffer"] for theta in plain]
    assert all(map(torch.equal, workers.buffers["momentum"], momentum))


def test_full_logits_and_chunked_loss_have_the_same_gradients():
    config = model.ModelConfig(5000, 32, 1, 2, 2, 64, tied=True)
    batch, found = bench.random_batch(config, 2, 16), []
    for kind in (bench.FullLogits, model.Transformer):
        network = kind(config)
        network.init_weights(0)
        loss = network(batch.inputs, batch.targets)
        loss.backward()
        found.append([loss, *(p.grad for p in network.parameters())])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sync", "codec"])
def test_quick_prints_its_table_and_judges_it(command):
    environment = os.environ | {"PYTHONPATH": str(README_HOME)}
    words = [sys.executable, "-m", "experiments.bench", command, "--quick"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) >= 3, done.stderr
    assert done.returncode == any("MISSED" in line for line in lines), done.stderr


def bench_counted(numel: int) -> dict[str, tuple[int, int]]:
    """One rank of 3: bytes of one mean, by the kernel's count for all, and by this rank's own."""
    ranks, _ = diloco.connect(3)
    found = {}

    def kernel() -> int:
        torch.distributed.barrier()
        [line] = re.findall(r"lo: *(.*)", Path("/proc/thread-self/net/dev").read_text())
        torch.distributed.barrier()
        return int(line.split()[8])

    for name, codec in CODECS.items():
        before, sent = kernel(), ranks.bytes_sent
        list(diloco.Wire(ranks, codec, [numel]).mean([[torch.randn(numel)]], [True] * 3))
        found[name] = kernel() - before, ranks.bytes_sent - sent
    ranks.leave()
    return found


@pytest.mark.slow
def test_the_kernel_counts_the_bytes_that_the_ranks_count():
    def apart() -> list[Any]:
        bench.leave_for_shaped_network(4)
        return bench.launch(bench_counted, 3, 500_000)

    try:
        with ThreadPoolExecutor(1) as thread:  # only this thread leaves
            found = thread.submit(apart).result()
    except (PermissionError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))
    for name in CODECS:
        assert 1 < found[0][name][0] / sum(rank[name][1] for rank in found) < 1.05


@pytest.mark.parametrize("arm", experiments.CONTROLS)
def test_controls_execute_as_many_intervals_as_they_are_told(arm):
    config, _ = train.parse(experiments.flags(arm, 3, (0.7, 0.9), 73, "").split())
    lengths = config.rules.sequence or ()
    assert (len(lengths), sum(lengths)) == (73, 2000)
    random = arm == "as few, random"
    assert random == (set(lengths) != {27, 28})
    other = experiments.flags(arm, 4, (0.7, 0.9), 73, "")
    assert random == (other != experiments.flags(arm, 3, (0.7, 0.9), 73, ""))


def test_the_old_reading_of_kappa_is_another_run_and_has_no_rho(monkeypatch):
    new, old = (experiments.Job("a", 0, flags, "") for flags in ("", experiments.OLD_KAPPA))
    assert new.config == old.config and new.name != old.name
    monkeypatch.setattr(train, "main", lambda argv: len(argv))
    monkeypatch.setattr(experiments.autoloco, "step_scale", None)
    assert experiments.main([experiments.OLD_KAPPA, "--steps", "20"]) == 2
    assert experiments.autoloco.step_scale(0.853815, 0.9, 1.5, 2.0) == pytest.approx(1.46185)


def test_results_page_is_what_the_kept_runs_give():
    kept = experiments.Lab(experiments.KEPT, trains=False)
    assert experiments.page(kept) == experiments.PAGE.read_text()
    assert len({(row["program"], row["corpus"]) for row in kept.known().values()}) <= 1


@pytest.mark.slow
def test_an_experiment_runs_once_and_keeps_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "program", lambda: "this one")
    flags = "--steps 20 --val-documents 4 --base-horizon 10 --method diloco"
    jobs = [experiments.Job("diloco", seed, flags) for seed in (0, 1)]
    reordered = "--method diloco --base-horizon 10 --steps 20 --val-documents 4 --outer-lr 0.7"
    assert jobs[0]._replace(flags=reordered).name == jobs[0].name != jobs[1].name
    lab = experiments.Lab(tmp_path / "runs.jsonl", trains=True)
    assert len(lab.execute(jobs)) == 2
    monkeypatch.setattr(experiments.Job, "train", None)  # nothing is left to run
    rows = lab.execute(jobs)
    assert [row["seed"] for row in rows] == [0, 1] and rows[0]["val_loss"] != rows[1]["val_loss"]
    assert len(rows[0]["curve"]) == 20 and rows[0]["program"] == "this one"
    assert evaluation.results(rows) in experiments.tables("wires", {"runs": rows})
    monkeypatch.setattr(experiments, "program", lambda: "another")
    assert not lab.known() and len(lab._replace(trains=False).known()) == 2


def test_an_unknown_experiment_is_refused():
    with pytest.raises(SystemExit) as leaving:
        experiments.main(["mian"])
    assert leaving.value.code == 2


# ------------------------------------------------------------------------------------------------
# README and the project's files
# ------------------------------------------------------------------------------------------------

README_HOME = Path(train.__file__).parent
README = (README_HOME / "README.md").read_text()
README_MODULES = (autoloco, data, diloco, evaluation, model, quant, train)
README_CODE = "".join(inspect.getsource(module) for module in README_MODULES)
# What the paper reports (SPEC's list), beside what a dry run prints.
README_REPORTED = (
    "2.7227 2.7233 2.8004 2.8020 2.8706 2.8694 2.8914 2.8793 2.7843 2.7842 2.8251 2.8310 2.8484 "
    "2.8116 36.45 47.50 37,336 38,217 0.0001 0.9112 0.8766 0.9016 0.8772 73 100 41 49 65 27.0 24.6 "
    "62.3 8x500"
).split()


def readme_section(heading: str) -> str:
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def readme_table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    rows = [line for line in readme_section(heading).splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def readme_named(dotted: str) -> object:
    """What `diloco.Wire.mean` and its like name."""
    module, *names = dotted.split(".")
    return functools.reduce(getattr, names, importlib.import_module(module))


def test_readme_has_at_most_300_lines_and_its_code_blocks_at_most_30():
    assert README.count("\n") <= 300
    assert max(map(len, README.splitlines())) <= 165
    for block in re.findall(r"^```\w*\n(.*?)^```$", README, re.S | re.M):
        assert len([line for line in block.splitlines() if line.strip()]) <= 30


def test_symbols_are_words_of_the_code_and_functions_name_their_section():
    rows = readme_table("Symbols and equations")
    assert len(rows) >= 20
    for _, meaning, sections, functions in rows:
        for word in re.findall(r"`(\w+)`", meaning):
            assert re.search(rf"\b{word}\b", README_CODE), word
        docs = [readme_named(name).__doc__ or "" for name in re.findall(r"`([\w.]+)`", functions)]
        for section in sections.split(", "):
            assert any(re.search(rf"\b{re.escape(section)}\b", doc) for doc in docs), functions
        for doc in docs:
            assert any(re.search(rf"\b{re.escape(s)}\b", doc) for s in sections.split(", ")), doc


def test_every_assumption_of_the_ledger_is_tagged_in_the_code_and_every_tag_has_an_entry():
    tags = [tag for row in readme_table("Assumption ledger") for tag in row[0].split(", ")]
    assert tags == [f"A{n}" for n in range(1, 27)]
    assert set(re.findall(r"\bA\d+\b", README_CODE)) == set(tags)


def test_results_hold_every_reported_number_of_the_paper():
    text = readme_section("Results")
    missing = [n for n in README_REPORTED if not re.search(rf"(?<![\d.]){re.escape(n)}\b", text)]
    assert not missing


def test_the_loop_that_readme_shows_is_made_of_the_calls_of_train():
    calls = re.findall(r"\w+\.\w+\(", readme_section("The algorithm in ten lines"))
    assert len(calls) >= 6
    assert all(call in inspect.getsource(train.train) for call in calls)


def test_places_where_to_put_what_exist():
    for _, files, place in readme_table("Where to put what"):
        owners = [importlib.import_module(name) for name in re.findall(r"`(\w+)\.py`", files)]
        sources = "".join(map(inspect.getsource, owners))
        first, *others = re.findall(r"`([\w.]+)`", place)
        assert first.split(".")[-1] in sources, first
        assert all(name.split(".")[-1] in README_CODE for name in others), others


def test_readme_s_train_commands_parse(capsys):
    commands = re.findall(r"(?:python|torchrun)\b[^`\n]*?\btrain\.py\b([^`\n]*)", README)
    assert len(commands) >= 10
    for words in commands:
        # What must exist, a folder or a run, is not opened here.
        words = re.sub(r"--init-from \S+|--resume|--name NAME", "", words.split("#")[0])
        assert train.parse(words.split())[0]


def test_readme_s_other_commands_are_known(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for script, main in (("eval", evaluation.main), ("autoloco", autoloco.main)):
        commands = re.findall(rf"\b{script}\.py ([^`\n#]+)", README)
        assert commands
        for words in commands:
            main(words.replace('"Returns the"', "text").split())
            said = capsys.readouterr().err
            assert not re.search("usage|arguments|choice|required", said), (words, said)
    for script in ("run", "bench"):
        source = (README_HOME / "experiments" / f"{script}.py").read_text()
        for name in re.findall(rf"experiments\.{script} (\w+)", README):
            assert re.search(rf"\b(bench_)?{name}\b", source), name


def test_readme_s_dry_run_is_what_the_program_prints(capsys):
    command, printed = re.search(r"\$ python train.py (.*)\n([^`]*)```", README).groups()
    assert train.main(command.split()) == 0
    lines = iter(capsys.readouterr().out.splitlines())
    assert all(line in lines for line in printed.splitlines())  # in order; a fork prints more


def test_pinned_packages_are_those_of_the_built_in_text():
    lines = (README_HOME / "requirements.txt").read_text().splitlines()
    pins = [re.match(r"([\w_]+)==\S+ +# \S", line)[1] for line in lines if "==" in line]
    assert sorted(pins) == sorted(data.PACKAGES)
    assert all("#" in line for line in lines if line)
    assert f"pip install '{evaluation.HARNESS}'\n" in README
