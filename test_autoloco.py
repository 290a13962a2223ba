"""Tests in the paper's order: each name is a claim, each oracle worked by hand."""

from __future__ import annotations

import ast
import base64
import dataclasses
import functools
import gzip
import hashlib
import http.server
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, asdict, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autoloco
import autoloco as A
import bench
import data
import diloco
import eval as evaluation
import experiments
import model
import model as model_module
import quant
import train
from model import IGNORE, SIZES, Cache, ModelConfig, RopeScaling, Transformer
from quant import BLOCK, CODECS, SLAB, Chunk, chunks, payload_bytes

# =================================================================================================
# The rules: inner rate, mapper, correction, controller, schedules, replay (A, B)
# =================================================================================================


C4 = A.Rules(50_000, 4e-4, 1000, 500, 350, 750, 50, 0.9)
SFT = A.Rules(6490, 1e-5, 200, 100, 70, 150, 10, 0.9)
TINY = A.Rules(2000, 1e-3, 40, 20, 14, 30, 2, 0.9)
WIDE = replace(C4, min_horizon=50)  # 1.50 and H_min are told apart
CALM = replace(C4, max_horizon=500)  # nothing to propose
FULL: dict[str, Any] = {"normalise": True, "adjust_momentum": True, "scale_step": True}

# A deviation in units of the floor sigma; with a history of zeros it is the z score itself.
SIGMAS = {"supports": 0.5, "consistent": 2.0, "moderate": 4.0, "severe": 7.0, "nonfinite": math.nan}


class Row(NamedTuple):
    """One driven interval: its plan, measurement, decision, and the state after it."""

    plan: A.Plan
    seen: A.Observation
    decision: A.Decision
    state: A.State

    @property
    def after(self) -> A.Controller:
        """The controller after the interval."""
        return self.state.controller


def drive(
    rules: A.Rules,
    trace: str = "",
    stop: int | None = None,
    family: str = "both",
    sigmas: Callable[[int], float] = lambda interval: 0.0,
    density: Callable[[int], int] = lambda interval: 100,
) -> list[Row]:
    """Run the loop of B.5 on made-up statistics: D = Lambda^2 exp(x / 10), C = exp(-x / 10) / 2.

    `trace` is `moderate@9 severe@14`: the intervals whose statistics deviate that much.
    """
    bad = {int(t.split("@")[1]): SIGMAS[t.split("@")[0]] for t in trace.split()}
    state = A.start(rules)
    rows: list[Row] = []
    while state.step < rules.steps and len(rows) != stop:
        planned = A.plan(rules, state)
        x = bad.get(planned.interval, sigmas(planned.interval))
        lam = math.fsum(A.inner_lr(rules, planned.step + i) for i in range(planned.steps))
        seen = A.Observation(
            drift=lam**2 * math.exp(x / 10 if family != "coherence" else 0.0),
            coherence=0.5 * math.exp(-x / 10 if family != "drift" else 0.0),
            exposure=lam,
            tokens=planned.steps * density(planned.interval),
        )
        state, decision = A.complete(rules, state, planned, seen)
        rows.append(Row(planned, seen, decision, state))
    return rows


def run_lengths(steps: Iterable[int]) -> str:
    """`8x500 5x550 250`."""
    groups = [(len(list(same)), value) for value, same in itertools.groupby(steps)]
    return " ".join(f"{n}x{value}" if n > 1 else str(value) for n, value in groups)


def horizons(rows: Sequence[Row]) -> str:
    """The token-equivalent horizons of the intervals, as run lengths."""
    return run_lengths(row.plan.horizon for row in rows)


def phases(rows: Sequence[Row]) -> str:
    """The phases of the intervals by their first letters."""
    return "".join(row.decision.phase[0] for row in rows)


def rate(rules: A.Rules, step: int) -> float:
    """The inner learning rate, written down once more."""
    if step >= rules.steps:
        return 0.0
    if step < rules.warmup:
        return (step + 1) * rules.lr / rules.warmup
    p = (step - rules.warmup) / (rules.steps - rules.warmup)
    return rules.lr * math.cos(math.pi * p / 2) ** 2  # the half-angle form of (1 + cos) / 2


def work(rules: A.Rules, step: int, steps: int) -> float:
    """Exposure as the plain sum of `rate`."""
    return sum(rate(rules, s) for s in range(step, step + steps))


# ---------------------------------------------------------------- inner rate and exposure (B.2)


def test_c4_warm_up_is_a_line_from_a_thousandth_of_the_maximum():
    assert A.inner_lr(C4, 0) == 4e-4 / 1000
    assert A.inner_lr(C4, 499) == 2e-4
    assert A.inner_lr(C4, 999) == A.inner_lr(C4, 1000) == 4e-4


def test_cosine_passes_through_its_known_values():
    assert A.inner_lr(C4, 25_500) == pytest.approx(2e-4, rel=1e-12)
    assert A.inner_lr(C4, 13_250) == pytest.approx(4e-4 * (2 + math.sqrt(2)) / 4, rel=1e-12)
    assert A.inner_lr(C4, 37_750) == pytest.approx(4e-4 * (2 - math.sqrt(2)) / 4, rel=1e-12)


@pytest.mark.parametrize("rules", [C4, SFT, TINY])
def test_last_step_still_learns_and_from_the_end_on_the_rate_is_zero(rules):
    assert 0 < A.inner_lr(rules, rules.steps - 1) < rules.lr * 1e-5
    assert [A.inner_lr(rules, rules.steps + i) for i in (0, 1, 1000)] == [0.0] * 3


def test_without_warm_up_the_first_step_has_the_maximum():
    assert A.inner_lr(replace(C4, warmup=0), 0) == 4e-4


@pytest.mark.parametrize("warmup", [50_000, 100_000])
def test_warm_up_as_long_as_the_run_or_longer_never_leaves_the_line(warmup):
    rules = replace(C4, warmup=warmup)
    for step in (0, 24_999, 49_999):
        assert A.inner_lr(rules, step) == pytest.approx(4e-4 * (step + 1) / warmup, rel=1e-12)
    assert A.inner_lr(rules, 50_000) == 0.0


def test_warm_up_exposure_is_the_triangular_number():
    assert A.exposure(C4, 0, 500) == pytest.approx(4e-4 * (500 * 501 / 2) / 1000, rel=1e-14)
    assert A.exposure(C4, 500, 500) == pytest.approx(4e-4 * (500 * 1501 / 2) / 1000, rel=1e-14)


@settings(derandomize=True, deadline=None)
@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    start=st.integers(0, 320),
    count=st.integers(0, 320),
)
def test_exposure_is_the_plain_sum_and_nothing_comes_after_the_end(steps, warmup, start, count):
    rules = A.Rules(steps, 1e-3, warmup, 10, 5, 15, 1, 0.9)
    assert A.exposure(rules, start, count) == pytest.approx(work(rules, start, count), rel=1e-9)


def test_exposures_of_neighbours_add_up():
    parts = A.exposure(C4, 700, 500) + A.exposure(C4, 1200, 550)
    assert A.exposure(C4, 700, 1050) == pytest.approx(parts, rel=1e-14)


def test_preview_equals_the_later_measurement_bit_for_bit():
    rows = drive(C4, stop=30)
    for row in rows:
        assert row.seen.exposure == A.exposure(C4, row.plan.step, row.plan.steps)


# ---------------------------------------------------------------- token mapper (A.3)


def mapper_after(*intervals: tuple[int, int, int], rules: A.Rules = C4) -> A.Mapper:
    """A mapper that has taken in intervals of (horizon, steps, tokens)."""
    mapper = A.Mapper()
    for horizon, steps, tokens in intervals:
        mapper = A.update_mapper(rules, mapper, horizon, steps, tokens)
    return mapper


def test_published_counts_give_the_budget_and_density_worked_by_hand():
    mapper = mapper_after((500, 500, 50_000), (500, 500, 52_000), (500, 500, 51_000))
    assert mapper.base_tokens == 51_000
    assert mapper.tokens_per_step == pytest.approx(100.56, rel=1e-12)
    assert A.map_horizon(C4, mapper, 550) == 550  # 56,100 / 5,028 = 11.16


def test_denser_tokens_shorten_the_steps_to_the_nearest_granule():
    mapper = A.Mapper((50_000,) * 3, 105.3)  # 9.497 and 14.245 granules
    assert A.map_horizon(C4, mapper, 500) == 450
    assert A.map_horizon(C4, mapper, 750) == 700


def test_half_a_granule_rounds_up():
    assert A.map_horizon(C4, A.Mapper((47_500,) * 3, 100.0), 500) == 500  # 9.5 granules
    assert A.map_horizon(C4, A.Mapper((52_500,) * 3, 100.0), 500) == 550  # 10.5, not to the even


def test_first_interval_sets_the_density_and_later_ones_weigh_a_tenth():
    assert mapper_after((500, 500, 50_000)).tokens_per_step == 100
    mapper = mapper_after((500, 500, 50_000), (550, 550, 110_000))
    assert mapper.tokens_per_step == pytest.approx(0.9 * 100 + 0.1 * 200, rel=1e-12)


def test_horizons_map_one_to_one_until_three_recipe_intervals_are_counted():
    mapper = mapper_after((500, 500, 50_000), (500, 500, 90_000))
    assert mapper.base_tokens is None
    assert [A.map_horizon(C4, mapper, h) for h in (350, 500, 750)] == [350, 500, 750]
    mapper = A.update_mapper(C4, mapper, 500, 500, 60_000)
    assert mapper.base_tokens == 60_000  # the median, not the mean; tau 100, 108, 109.2
    assert A.map_horizon(C4, mapper, 500) == 550  # 60,000 / 5,460 = 10.99


def test_only_the_first_three_recipe_horizon_intervals_calibrate():
    shorter = (550, 550, 1_000_000)
    mapper = mapper_after((500, 500, 50_000), shorter, (500, 500, 52_000), shorter)
    assert mapper.base_tokens is None
    mapper = A.update_mapper(C4, mapper, 500, 500, 51_000)
    mapper = A.update_mapper(C4, mapper, 500, 500, 999_999)
    assert mapper.base_tokens == 51_000


def test_a_remainder_at_the_recipe_horizon_does_not_calibrate():
    assert mapper_after((500, 250, 25_000)).counts == ()


def test_an_interval_maps_to_at_least_one_granule():
    assert A.map_horizon(C4, A.Mapper((50_000,) * 3, 1e9), 350) == 50


def test_the_longest_horizon_bounds_tokens_and_not_steps():
    assert A.map_horizon(C4, A.Mapper((50_000,) * 3, 93.75), 750) == 800  # 75,000 / 4,687.5 = 16


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 400), st.integers(1, 10**6), st.integers(3, 60))
def test_at_constant_density_every_admissible_horizon_maps_to_itself(granularity, density, count):
    base = 10 * granularity
    rules = A.Rules(10**6, 1e-3, 0, base, base, base, granularity, 0.9)
    mapper = mapper_after(*[(base, base, base * density)] * count, rules=rules)
    for horizon in range(granularity, 2 * base, granularity):
        assert A.map_horizon(rules, mapper, horizon) == horizon


def test_the_new_horizon_is_mapped_after_the_latest_density():
    rows = drive(CALM, stop=5, density=lambda interval: 160 if interval == 4 else 100)
    # tau = 0.9 * 100 + 0.1 * 160 = 106: 50,000 / 5,300 = 9.43 granules
    assert [row.plan.steps for row in rows] == [500, 500, 500, 500, 450]
    assert rows[4].plan.horizon == 500


# ---------------------------------------------------------------- outer correction (B.2 to B.4)


def test_interval_ratio_is_one_up_to_the_base_exposure_and_the_quotient_above():
    assert A.interval_ratio(0.5, 1.0) == A.interval_ratio(1.0, 1.0) == 1.0
    assert A.interval_ratio(3.0, 2.0) == 1.5


def test_interval_ratios_of_c4_are_the_published_ones():
    rows = drive(C4, stop=24)
    for row, step, steps, ratio in (
        (rows[8], 4000, 550, 1.09981),
        (rows[23], 13_000, 750, 1.494968),
    ):
        assert (row.plan.step, row.plan.steps) == (step, steps)
        assert row.plan.interval_ratio == pytest.approx(ratio, abs=5e-7)
        again = work(C4, step, steps) / work(C4, step, 500)
        assert row.plan.interval_ratio == pytest.approx(again, rel=1e-10)
        assert row.plan.base_exposure == pytest.approx(work(C4, step, 500), rel=1e-10)


def test_momentum_and_scale_have_the_values_worked_by_hand():
    for base, mu, kappa in ((0.9, 0.853815, 1.461850), (0.7, 0.585662, 1.381127)):
        assert A.momentum_retention(base, 1.5) == pytest.approx(mu, abs=5e-7)
        assert A.step_scale(A.momentum_retention(base, 1.5), base) == pytest.approx(kappa, abs=5e-7)


def test_an_interval_of_two_bases_keeps_what_two_base_intervals_keep():
    assert A.momentum_retention(0.9, 2.0) == pytest.approx(0.9 * 0.9, rel=1e-14)


@pytest.mark.parametrize("base, ratio", [(1.0, 1.0), (-0.1, 1.0), (0.9, 0.99), (0.9, math.nan)])
def test_impossible_momentum_or_ratio_is_refused(base, ratio):
    with pytest.raises(ValueError):
        A.momentum_retention(base, ratio)


def outer_series(normalise: bool) -> list[float]:
    """The shared parameter, from 1, after pseudo-gradients 1, 1, 1 at rho = 1, 1.5, 1."""
    theta, m, series = 1.0, 0.0, []
    for ratio in (1.0, 1.5, 1.0):
        mu = A.momentum_retention(0.9, ratio)
        g = 1.0 / (A.normaliser(ratio) if normalise else 1.0)
        m = mu * m + g
        theta -= 0.7 * A.step_scale(mu, 0.9) * (g + mu * m)
        series.append(theta)
    return series


def test_three_nesterov_steps_give_the_series_worked_by_hand():
    assert outer_series(False) == pytest.approx([-0.33, -2.972982, -5.354095], abs=5e-7)


def test_the_normalised_series_is_the_one_worked_by_hand():
    assert outer_series(True) == pytest.approx([-0.33, -2.340649, -4.532762], abs=5e-7)


@settings(derandomize=True, deadline=None)
@given(st.floats(0, 1, exclude_max=True))
def test_at_ratio_one_the_correction_is_exactly_dilocos(base):
    mu = A.momentum_retention(base, 1.0)
    assert (A.normaliser(1.0), mu, A.step_scale(mu, base)) == (1.0, base, 1.0)


@settings(derandomize=True, deadline=None)
@given(st.floats(0, 0.999), st.floats(1, 1.5))
def test_the_bound_on_the_scale_never_binds_up_to_ratio_one_and_a_half(base, ratio):
    kappa = A.step_scale(base**ratio, base)
    assert kappa == (1 - base**ratio) / (1 - base)
    assert 1 <= kappa < 1.5


def test_the_scale_is_bounded_at_one_and_a_half():
    assert (1 - 0.9**3) / (1 - 0.9) > 2.7
    assert A.step_scale(0.9**3, 0.9) == 1.5


def test_scale_restores_the_response_to_a_constant_input():
    mu = 0.9**1.3
    assert A.step_scale(mu, 0.9) / (1 - mu) == pytest.approx(1 / (1 - 0.9), rel=1e-14)


def test_the_normaliser_jumps_to_ratio_plus_epsilon_only_above_one():
    assert A.normaliser(1.5) == 1.5 + 1e-12
    assert A.normaliser(math.nextafter(1.0, 2.0)) == math.nextafter(1.0, 2.0) + 1e-12


def test_the_three_switches_are_independent():
    for normalise, momentum, scale in itertools.product((False, True), repeat=3):
        rules = replace(C4, normalise=normalise, adjust_momentum=momentum, scale_step=scale)
        planned = drive(rules, stop=24)[23].plan
        rho = planned.interval_ratio
        mu = 0.9**rho if momentum else 0.9
        assert planned.divisor == (rho + 1e-12 if normalise else 1.0)
        assert planned.momentum == mu
        assert planned.step_scale == pytest.approx((1 - mu) / (1 - 0.9) if scale else 1.0)


def test_at_the_base_horizon_and_in_a_remainder_the_plan_is_exactly_dilocos():
    rows = drive(replace(C4, **FULL))
    for row in [*rows[:8], rows[-1]]:
        planned = row.plan
        assert (planned.interval_ratio, planned.divisor) == (1.0, 1.0)
        assert (planned.momentum, planned.step_scale) == (0.9, 1.0)


def test_one_admissible_horizon_is_diloco_throughout():
    rows = drive(replace(C4, min_horizon=500, max_horizon=500, **FULL), "severe@20 nonfinite@33")
    assert run_lengths(row.plan.steps for row in rows) == "100x500"
    assert {row.plan.momentum for row in rows} == {0.9}
    assert {row.plan.divisor for row in rows} == {row.plan.step_scale for row in rows} == {1.0}


def test_the_base_comparator_is_mapped_to_steps_at_the_same_density():
    mapper = A.Mapper((50_000,) * 3, 105.3)  # 500 -> 450, 750 -> 700
    planned = A.plan(C4, A.State(13_000, 23, mapper, A.Controller("monitor", 750, 750)))
    assert planned.steps == 700
    ratio = work(C4, 13_000, 700) / work(C4, 13_000, 450)
    assert planned.interval_ratio == pytest.approx(ratio, rel=1e-10)


# ---------------------------------------------------------------- residuals and verdicts (A.1, A.2)


def test_residuals_have_the_values_worked_by_hand():
    profile = A.Profile(drift=2.0, coherence=0.5, exposure=3.0)
    r_drift, r_coherence = A.residuals(profile, A.Observation(16.0, 0.25, 6.0, 1))
    assert r_drift == pytest.approx(math.log(2))  # ln 8 - 2 ln 2
    assert r_coherence == pytest.approx(math.log(2))


def test_more_drift_or_less_coherence_is_worse():
    profile = A.Profile(1.0, 0.5, 1.0)
    assert A.residuals(profile, A.Observation(2.0, 0.5, 1.0, 1)) == (math.log(2), 0.0)
    assert A.residuals(profile, A.Observation(1.0, 0.4, 1.0, 1))[1] > 0


def test_twice_the_exposure_explains_four_times_the_drift():
    assert A.residuals(A.Profile(1.0, 0.5, 1.0), A.Observation(4.0, 0.5, 2.0, 1)) == (0.0, 0.0)


def test_robust_z_has_the_value_worked_by_hand():
    history = (0.4, 0.0, 0.2, 0.1)
    assert A.robust_z(0.5, history) == pytest.approx(2.36072, abs=5e-6)
    assert A.robust_z(0.15, history) == pytest.approx(0.0, abs=1e-12)
    assert A.robust_z(-0.2, history) == pytest.approx(-2.36072, abs=5e-6)


def test_a_quiet_history_is_scored_with_a_floor_of_a_tenth():
    assert A.robust_z(0.25, (0.0,) * 16) == 0.25 / 0.10


def test_verdicts_change_exactly_at_six_three_and_one():
    def below(z: float) -> float:
        return math.nextafter(z, -math.inf)

    assert [A.judge(z) for z in (1e300, 6.0)] == ["severe"] * 2
    assert [A.judge(z) for z in (below(6.0), 3.0)] == ["moderate"] * 2
    assert [A.judge(z) for z in (below(3.0), math.nextafter(1.0, 2.0))] == ["consistent"] * 2
    assert [A.judge(z) for z in (1.0, 0.0, -50.0)] == ["supports"] * 3


@pytest.mark.parametrize("family", ["drift", "coherence"])
def test_the_worse_family_decides(family):
    row = drive(C4, "severe@8", family=family, stop=8)[7]
    assert row.decision.verdict == "severe"
    assert row.decision.z == pytest.approx(7.0, abs=1e-9)


@pytest.mark.parametrize("name", ["drift", "coherence", "exposure"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_statistic_that_is_not_finite_and_positive_counts_as_non_finite(name, value):
    good = A.Observation(1.0, 0.5, 1.0, 1)
    assert good.finite
    assert not replace(good, **{name: value}).finite


def test_coherence_slightly_above_one_is_read():
    assert A.Observation(1.0, 1.001, 1.0, 1).finite


@pytest.mark.parametrize("rules", [CALM, replace(SFT, max_horizon=100), C4])
def test_pure_learning_rate_decay_leaves_the_residuals_at_zero(rules):
    rows = [row for row in drive(rules) if row.decision.residual_drift is not None]
    assert len(rows) > 50
    assert {row.decision.phase for row in rows} >= {"variability", "monitor"}
    assert rows[-2].seen.exposure < 0.01 * rows[0].seen.exposure
    for row in rows:
        assert row.decision.residual_drift == pytest.approx(0.0, abs=1e-9)
        assert row.decision.residual_coherence == pytest.approx(0.0, abs=1e-12)


def test_residuals_are_measured_from_the_reference_however_far_the_rate_has_decayed():
    rows = drive(CALM, sigmas=lambda interval: interval % 5 / 10)
    centre = (0.3 + 0.4) / 2  # intervals 3 and 4, geometric mean
    for row in rows[4:]:
        expected = (row.plan.interval % 5 / 10 - centre) / 10
        assert row.decision.residual_drift == pytest.approx(expected, abs=1e-9)
        assert row.decision.residual_coherence == pytest.approx(expected, abs=1e-9)


def test_the_reference_drift_moves_with_the_square_of_the_exposure():
    moved = A.Profile(8.0, 0.5, 2.0).moved(1.0)
    assert (moved.drift, moved.coherence, moved.exposure) == (2.0, 0.5, 1.0)


def test_the_reference_exposure_is_the_latest_accepted_intervals():
    rows = drive(CALM, "moderate@10", stop=11)
    for row in (rows[3], rows[4], rows[8]):
        assert row.after.profile.exposure == row.seen.exposure
    assert rows[9].after.profile == rows[8].after.profile
    assert rows[10].after.profile.exposure == rows[10].seen.exposure
    assert rows[10].after.profile.drift == pytest.approx(rows[10].seen.exposure ** 2)


# ---------------------------------------------------------------- controller: first phases (A.1)


def test_the_phases_up_to_the_first_candidate_are_two_two_three_one():
    assert phases(drive(C4, stop=9)) == "wwrrvvvmc"
    assert phases(drive(SFT, stop=9)) == phases(drive(TINY, stop=9)) == "wwrrvvvmc"


@pytest.mark.parametrize("warmup, intervals", [(0, 0), (1, 1), (500, 1), (501, 2), (1000, 2)])
def test_warm_up_spans_every_interval_that_it_touches(warmup, intervals):
    rules = replace(C4, warmup=warmup)
    assert rules.warmup_intervals == intervals
    assert phases(drive(rules, stop=intervals + 3)) == "w" * intervals + "rrv"


def test_warm_up_ignores_non_finite_statistics():
    rows = drive(C4, "nonfinite@1 nonfinite@2", stop=10)
    assert phases(rows) == "wwrrvvvmcv"
    assert horizons(rows) == "8x500 2x550"


def test_nothing_is_judged_before_the_monitor():
    rows = drive(C4, "severe@1 severe@2 severe@4 severe@6", stop=7)
    assert {row.decision.verdict for row in rows} == {None}
    assert {row.decision.z for row in rows} == {None}
    assert {row.decision.next_horizon for row in rows} == {500}


def test_a_non_finite_interval_does_not_count_for_the_first_reference():
    rows = drive(C4, "nonfinite@3 nonfinite@5", stop=12)
    assert phases(rows) == "wwrrrrvvvmcv"
    assert horizons(rows) == "10x500 2x550"


def test_the_first_reference_is_the_geometric_mean_of_two_intervals():
    row = drive(C4, stop=5, sigmas=lambda interval: 6.0 if interval == 4 else 0.0)[4]
    # Drift e^0 and e^0.6 in units of Lambda^2, coherence e^0 and e^-0.6 in halves.
    assert row.decision.residual_drift == pytest.approx(-0.3, abs=1e-9)
    assert row.decision.residual_coherence == pytest.approx(-0.3, abs=1e-9)


def test_the_three_variability_residuals_start_the_history():
    rows = drive(C4, stop=7, sigmas=lambda interval: {5: 1.0, 6: -2.0, 7: 3.0}.get(interval, 0.0))
    assert rows[3].after.drift_history == ()
    assert rows[6].after.drift_history == pytest.approx((0.1, -0.2, 0.3), abs=1e-9)
    assert rows[6].after.coherence_history == pytest.approx((0.1, -0.2, 0.3), abs=1e-9)


def test_the_history_keeps_the_latest_sixteen_residuals():
    rows = drive(CALM, stop=40, sigmas=lambda interval: math.sin(interval) / 2)
    assert [len(row.after.drift_history) for row in rows[6:22]] == [*range(3, 17), 16, 16]
    centre = (math.sin(3) + math.sin(4)) / 4
    latest = [(math.sin(interval) / 2 - centre) / 10 for interval in range(25, 41)]
    assert rows[-1].after.drift_history == pytest.approx(latest, abs=1e-9)
    assert rows[-1].after.coherence_history == pytest.approx(latest, abs=1e-9)


def test_moderate_intervals_never_enter_the_history():
    rows = drive(CALM, "moderate@12", stop=12)
    assert rows[11].after.drift_history == rows[10].after.drift_history
    assert rows[11].after.coherence_history == rows[10].after.coherence_history


def test_consistent_monitor_intervals_enter_the_history():
    rows = drive(CALM, "consistent@12", stop=12)
    assert rows[11].decision.verdict == "consistent"
    assert rows[11].after.drift_history[-1] == pytest.approx(0.2, abs=1e-9)


def test_candidate_intervals_never_enter_the_history():
    rows = drive(C4, "consistent@9", stop=9)
    assert len(rows[7].after.drift_history) == 4
    assert rows[8].after.drift_history == rows[7].after.drift_history
    assert rows[8].after.coherence_history == rows[7].after.coherence_history


@pytest.mark.parametrize("trace", ["severe@8", "nonfinite@8", "moderate@9", "supports@9"])
def test_re_estimation_clears_the_histories(trace):
    interval = int(trace[-1])
    after = drive(C4, trace, stop=interval)[-1].after
    assert after.drift_history == after.coherence_history == ()


# ---------------------------------------------------------------- controller: monitor (A.2, A.3)


@pytest.mark.parametrize("verdict", ["supports", "consistent"])
def test_a_normal_monitor_interval_proposes(verdict):
    row = drive(C4, f"{verdict}@8", stop=8)[7]
    assert (row.decision.verdict, row.decision.next_horizon) == (verdict, 550)
    assert (row.after.phase, row.after.accepted, row.after.horizon) == ("candidate", 500, 550)


def test_the_first_moderate_holds_and_proposes_nothing():
    rows = drive(C4, "moderate@8", stop=10)
    assert (rows[7].decision.verdict, rows[7].decision.next_horizon) == ("moderate", 500)
    assert phases(rows) == "wwrrvvvmmc"


def test_two_moderates_in_a_row_reduce_by_a_fifth():
    assert horizons(drive(C4, "moderate@8 moderate@9", stop=10)) == "9x500 400"  # 416.7
    assert drive(C4, "moderate@28 moderate@29", stop=30)[29].plan.horizon == 600  # 750 -> 625


def test_moderate_supports_moderate_is_not_in_a_row():
    rows = drive(CALM, "moderate@8 moderate@10 consistent@11 moderate@12", stop=14)
    assert horizons(rows) == "14x500"
    assert phases(rows) == "wwrrvvvmmmmmmm"


def test_a_severe_interval_reduces_at_once_by_a_third():
    assert horizons(drive(WIDE, "severe@8", stop=9)) == "8x500 300"  # 333.3
    assert drive(C4, "severe@28", stop=29)[28].plan.horizon == 500  # 750 / 1.5 exactly


def test_a_first_moderate_does_not_soften_a_severe_one():
    assert horizons(drive(WIDE, "moderate@8 severe@9", stop=10)) == "9x500 300"


def test_a_reduction_stops_at_the_shortest_horizon():
    assert horizons(drive(C4, "severe@8", stop=9)) == "8x500 350"


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 60), st.integers(1, 400), st.integers(1, 100), st.booleans())
def test_a_reduced_horizon_is_the_largest_admissible_one_below_the_quotient(low, up, q, severe):
    rules = A.Rules(10**6, 1e-3, 0, low * q, low * q, (low + up) * q, q, 0.9)
    horizon = (low + up) * q
    quotient = Fraction(horizon) / (Fraction(3, 2) if severe else Fraction(6, 5))
    below = [h for h in range(low * q, horizon + 1, q) if h <= quotient]
    assert A.reduced_horizon(rules, horizon, severe=severe) == max([low * q, *below])


def test_after_a_reduction_come_one_reference_three_variability_and_one_monitor_interval():
    rows = drive(C4, "severe@8", stop=14)
    assert phases(rows)[8:] == "rvvvmc"
    assert horizons(rows) == "8x500 5x350 400"


def test_a_reduction_at_the_shortest_horizon_re_estimates_too():
    rows = drive(replace(C4, min_horizon=500), "severe@8", stop=14)
    assert horizons(rows) == "13x500 550"
    assert phases(rows)[8:] == "rvvvmc"


def test_a_non_finite_monitor_interval_reduces_by_a_third():
    rows = drive(WIDE, "nonfinite@8", stop=14)
    assert horizons(rows) == "8x500 6x300"  # 350 is more than 15 % longer: no candidate
    assert phases(rows)[7:] == "mrvvvmm"
    assert rows[7].decision.verdict == "nonfinite"
    assert (rows[7].decision.residual_drift, rows[7].decision.z) == (None, None)


def test_non_finite_again_in_the_re_estimated_reference_falls_to_the_shortest_horizon():
    rows = drive(WIDE, "nonfinite@8 nonfinite@9", stop=11)
    assert horizons(rows) == "8x500 300 2x50"
    assert phases(rows)[7:] == "mrrv"


def test_a_third_non_finite_interval_stays_at_the_shortest_horizon():
    rows = drive(WIDE, "nonfinite@8 nonfinite@9 nonfinite@10", stop=12)
    assert horizons(rows) == "8x500 300 3x50"


def test_a_finite_interval_between_two_non_finite_ones_starts_the_count_again():
    rows = drive(WIDE, "nonfinite@8 nonfinite@10", stop=11)
    assert horizons(rows) == "8x500 2x300 200"


def test_a_non_finite_variability_interval_reduces():
    assert horizons(drive(WIDE, "nonfinite@5", stop=6)) == "5x500 300"
    assert horizons(drive(WIDE, "nonfinite@7 nonfinite@8", stop=9)) == "7x500 300 50"


@pytest.mark.parametrize("before", ["severe@8", "moderate@8"])
def test_a_non_finite_interval_after_another_deviation_is_the_first_of_its_kind(before):
    rows = drive(WIDE, f"{before} nonfinite@9", stop=10)
    assert horizons(rows) == {"s": "8x500 300 200", "m": "9x500 300"}[before[0]]


def test_a_non_finite_reference_after_a_return_reduces():
    rows = drive(WIDE, "moderate@9 nonfinite@10", stop=11)
    assert horizons(rows) == "8x500 550 500 300"


# ---------------------------------------------------------------- controller: proposals (A.2)


def propose(
    accepted: int,
    observed: float,
    preview: Callable[[int], tuple[int, float]] = lambda h: (h, float(h)),
    left: int = 10**6,
    bound: tuple[int, float] | None = None,
    rules: A.Rules = C4,
) -> A.Controller:
    """A proposal where one step is worth one unit of exposure, unless `preview` says otherwise."""
    state = A.Controller("monitor", accepted, accepted, bound=bound)
    return A.propose(rules, state, observed, preview, left)[0]


def test_the_candidate_is_the_longest_horizon_within_the_cap():
    assert propose(500, 500.0).horizon == 550  # 575
    assert propose(500, 650.0).horizon == 700  # 747.5
    assert propose(500, 9e9).horizon == 750
    assert propose(350, 350.0).horizon == 400  # 402.5: why H_min is seven granules


def test_a_candidate_exactly_at_the_cap_is_admitted_in_spite_of_floats():
    rules = A.Rules(10**6, 1e-3, 0, 100, 70, 150, 5, 0.9)
    assert 1.15 * 100.0 < 115.0
    assert propose(100, 100.0, rules=rules).horizon == 115
    over = propose(100, 100.0, lambda h: (h, h * (1 + 1e-8)), rules=rules)
    assert over.horizon == 110


def test_the_cap_is_on_the_measured_exposure_not_on_a_preview_of_the_accepted_horizon():
    assert propose(500, 520.0, lambda h: (h, 0.9 * h)).horizon == 650  # 598 / 0.9 = 664
    nothing = propose(500, 470.0)  # 540.5, although 1.15 x 500 admits 550
    assert (nothing.phase, nothing.horizon) == ("monitor", 500)


def test_a_candidate_must_fit_in_the_steps_left():
    assert propose(500, 700.0, left=750).horizon == 750
    assert propose(500, 700.0, left=749).horizon == 700
    assert propose(500, 700.0, left=549).horizon == 500


def test_a_candidate_must_map_to_more_steps_than_the_accepted_horizon():
    steps = {500: 500, 550: 500, 600: 550, 650: 600, 700: 650, 750: 700}
    assert propose(500, 460.0, lambda h: (steps[h], float(steps[h]))).horizon == 500
    assert propose(500, 500.0, lambda h: (steps[h], float(steps[h]))).horizon == 600


def test_at_the_longest_horizon_nothing_is_proposed():
    assert propose(750, 9e9).phase == "monitor"


def test_below_a_bound_the_candidate_is_nearest_the_geometric_midpoint():
    assert propose(350, 1000.0, bound=(750, 750.0)).horizon == 500  # 512.3; the mean is 550
    assert propose(500, 1000.0, bound=(700, 700.0)).horizon == 600  # 591.6


def test_the_midpoint_stays_within_the_cap():
    assert propose(350, 400.0, bound=(750, 750.0)).horizon == 450  # 460


def test_between_neighbours_there_is_nothing_to_propose_until_the_bound_retires():
    kept = propose(500, 500.0, bound=(550, 550.0))
    assert (kept.phase, kept.horizon, kept.bound) == ("monitor", 500, (550, 550.0))


def test_a_bound_retires_at_exactly_nine_tenths_of_its_exposure():
    kept = propose(500, 500.0, lambda h: (h, 90.0 + 1e-9 if h == 550 else 1.0), bound=(550, 100.0))
    assert (kept.horizon, kept.bound) == (500, (550, 100.0))
    retired = propose(500, 500.0, lambda h: (h, 90.0 if h == 550 else 1.0), bound=(550, 100.0))
    assert (retired.horizon, retired.bound) == (750, None)


# ---------------------------------------------------------------- controller: candidates (A.2)


def test_a_supporting_candidate_is_adopted_at_once():
    rows = drive(C4, "supports@9", stop=14)
    after = rows[8].after
    assert (after.phase, after.accepted, after.horizon) == ("variability", 550, 550)
    assert phases(rows)[8:] == "cvvvmc"
    assert horizons(rows) == "8x500 5x550 600"


def test_the_adopting_interval_is_the_new_reference():
    rows = drive(C4, "supports@9", stop=10)
    seen = rows[8].seen
    assert asdict(rows[8].after.profile) == pytest.approx(
        dict(drift=seen.drift, coherence=seen.coherence, exposure=seen.exposure), rel=1e-14
    )
    assert rows[9].decision.residual_drift == pytest.approx(-0.05, abs=1e-9)


@pytest.mark.parametrize("second", ["supports", "consistent"])
def test_a_consistent_candidate_is_adopted_after_one_more_that_is_not_worse(second):
    rows = drive(C4, f"consistent@9 {second}@10", stop=15)
    assert (rows[8].after.phase, rows[8].after.accepted) == ("candidate", 500)
    assert (rows[9].after.phase, rows[9].after.accepted) == ("variability", 550)
    assert rows[9].after.profile.drift == pytest.approx(rows[9].seen.drift, rel=1e-14)
    assert phases(rows)[8:] == "ccvvvmc"
    assert horizons(rows) == "8x500 6x550 600"


@pytest.mark.parametrize("verdict", ["moderate", "severe", "nonfinite"])
def test_a_worse_candidate_is_rejected_and_the_accepted_horizon_returns(verdict):
    rows = drive(C4, f"{verdict}@9", stop=15)
    horizon, measured = rows[8].after.bound
    assert (horizon, rows[8].after.accepted) == (550, 500)
    assert measured == pytest.approx(work(C4, 4000, 550), rel=1e-10)
    assert phases(rows)[8:] == "crvvvmm"
    assert horizons(rows) == "8x500 550 6x500"


@pytest.mark.parametrize("verdict", ["moderate", "severe", "nonfinite"])
def test_a_worse_second_candidate_is_rejected_with_its_own_exposure(verdict):
    rows = drive(C4, f"consistent@9 {verdict}@10", stop=11)
    horizon, measured = rows[9].after.bound
    assert (horizon, rows[10].plan.horizon, rows[10].decision.phase) == (550, 500, "reference")
    assert measured == pytest.approx(work(C4, 4550, 550), rel=1e-10)


def test_candidates_are_judged_against_the_accepted_profile():
    rows = drive(C4, "consistent@9 consistent@10", stop=10)
    for row in rows[8:]:
        assert row.decision.residual_drift == pytest.approx(0.2, abs=1e-9)
        assert row.plan.accepted == 500


def test_decay_retires_the_bound_and_the_rejected_horizon_is_tried_again():
    rows = drive(C4, "moderate@9", stop=24)
    assert horizons(rows) == "8x500 550 14x500 550"
    left = [work(C4, row.plan.step, 550) / work(C4, 4000, 550) for row in rows[22:24]]
    assert left[0] > 0.90 >= left[1]
    assert rows[21].after.bound is not None and rows[22].after.bound is None


def test_a_reduction_keeps_the_bound():
    for trace in ("moderate@9 severe@14", "moderate@9 nonfinite@10 nonfinite@11"):
        rows = drive(C4, trace, stop=14)
        assert rows[13].after.accepted == 350
        assert rows[13].after.bound == rows[8].after.bound == (550, rows[8].seen.exposure)


def test_an_adoption_below_the_bound_keeps_it():
    rows = drive(C4, "moderate@9 severe@14", stop=20)  # 350 for five intervals, then 400
    assert (rows[19].decision.phase, rows[19].after.accepted) == ("candidate", 400)
    assert rows[19].after.bound == rows[8].after.bound


def test_a_new_rejection_replaces_the_bound():
    rows = drive(C4, "moderate@9 severe@14 moderate@20", stop=20)
    assert rows[19].after.bound == (400, rows[19].seen.exposure)
    assert rows[19].after.accepted == 350


def test_adoption_at_the_longest_horizon_is_like_any_other():
    rows = drive(C4, stop=40)
    assert [row.plan.horizon for row in rows[22:25]] == [650, 750, 750]
    assert phases(rows)[22:] == "mcvvv" + "m" * 13


@pytest.mark.parametrize("verdict", ["moderate", "severe", "nonfinite"])
def test_the_last_interval_of_the_run_decides_nothing(verdict):
    rows = drive(C4, f"{verdict}@73")
    decision = rows[-1].decision
    assert (rows[-1].plan.steps, len(rows)) == (250, 73)
    assert (decision.verdict, decision.next_horizon, decision.z) == (None, None, None)
    assert rows[-1].after == rows[-2].after


def test_a_state_cannot_be_changed_in_place_and_a_decision_repeats():
    row = drive(C4, stop=8)[7]
    with pytest.raises(FrozenInstanceError):
        row.after.accepted = 600
    observed = row.seen, lambda h: (h, h * 4e-4), 9000
    assert A.decide(C4, row.after, *observed) == A.decide(C4, row.after, *observed)


def test_every_state_survives_a_trip_through_json():
    for row in drive(WIDE, "nonfinite@3 moderate@10 consistent@25 severe@30", stop=40):
        values = json.loads(json.dumps(asdict(row.state), allow_nan=False))
        assert A.state_from_dict(values) == row.state


def test_the_rules_import_nothing_but_the_standard_library():
    imported = set()
    for node in ast.walk(ast.parse(Path(A.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported <= set(sys.stdlib_module_names) - {"time", "datetime", "random"}


# ---------------------------------------------------------------- the whole controller, once more


def by_one_loop(
    rules: A.Rules, statistics: Sequence[tuple[float, float, int]]
) -> tuple[list[tuple[int, int, int, str | None]], set[str]]:
    """Sections 3.1 and A.1 to A.3 once more, as one loop over a queue of phases, without a profile.

    The reference is kept as ln(D / Lambda^2) and never moves. Returns (steps, horizon, accepted,
    verdict) of every interval, and the branches taken.
    """
    q, low, top, base = (
        rules.granularity, rules.min_horizon, rules.max_horizon, rules.base_horizon
    )  # fmt: skip
    sums = [0.0, *itertools.accumulate(rate(rules, s) for s in range(rules.steps))]
    step, accepted, horizon, tau = 0, base, base, 0.0
    calibration: list[int] = []
    queue = ["w"] * math.ceil(rules.warmup / base) + ["r", "r", "v", "v", "v"]
    references: list[tuple[float, float]] = []
    histories: tuple[list[float], list[float]] = ([], [])
    first, failed, doubtful, tried, bound = True, False, False, False, None
    out: list[tuple[int, int, int, str | None]] = []
    branches = set()

    def mapped(h: int) -> int:
        if len(calibration) < 3:
            return h
        return max(q, q * math.floor(sorted(calibration)[1] * h / base / (tau * q) + 0.5))

    def ahead(h: int) -> float:
        return sums[min(step + mapped(h), rules.steps)] - sums[step]

    def restart(h: int, phases: str) -> None:
        nonlocal accepted, horizon, queue, first, failed, doubtful, tried
        accepted = horizon = h
        queue, first, failed, doubtful, tried = list(phases), False, False, False, False
        references.clear()
        histories[0].clear()
        histories[1].clear()

    def down(divisor: Fraction) -> int:
        return max([low, *(h for h in range(low, accepted, q) if h * divisor <= accepted)])

    def z(values: list[float], r: float) -> float:
        def median(xs: list[float]) -> float:
            xs = sorted(xs)
            return (xs[(len(xs) - 1) // 2] + xs[len(xs) // 2]) / 2

        centre = median(values)
        return (r - centre) / max(0.1, 1.4826 * median([abs(v - centre) for v in values]))

    for x, c, tokens in statistics:
        steps = min(mapped(horizon), rules.steps - step)
        lam = sums[step + steps] - sums[step]
        entry = (steps, horizon, accepted)
        count, step = tokens * steps, step + steps
        tau = tokens if not out else 0.9 * tau + 0.1 * tokens
        if horizon == base == steps and len(calibration) < 3:
            calibration.append(count)
        if step == rules.steps:
            out.append((*entry, None))  # the last interval decides nothing
            break
        phase = queue.pop(0) if queue else "mc"[horizon != accepted]
        verdict, finite = None, math.isfinite(x)
        if phase in "rv" and finite:
            if phase == "r" or not references:
                references.append((x, math.log(c)))
                failed = False
            else:
                for values, r in zip(histories, residual(references, x, c), strict=True):
                    values.append(r)
        elif phase == "r" and first:
            queue.insert(0, "r")
            branches.add("reference ignores")
        elif phase in "rvm" and not finite:
            verdict = "nonfinite" if phase == "m" else None
            branches.add(f"nonfinite {phase} {'again' if failed else 'once'}")
            restart(low if failed else down(Fraction(3, 2)), "rvvv")
            failed = True
        elif phase in "mc":
            rs = residual(references, x, c) if finite else (math.inf, math.inf)
            score = max(z(values[-16:], r) for values, r in zip(histories, rs, strict=True))
            grade = sum(score >= limit for limit in (math.nextafter(1, 2), 3, 6))
            verdict = ("supports", "consistent", "moderate", "severe")[grade]
            verdict = verdict if finite else "nonfinite"
            branches.add(f"{phase} {verdict} {int(tried or doubtful)}")
            if phase == "c" and grade >= 2:
                bound = (horizon, lam)
                restart(accepted, "rvvv")
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


def residual(references: list[tuple[float, float]], x: float, c: float) -> tuple[float, float]:
    """Distance from the mean reference in log units: of drift, and of coherence (down is worse)."""
    n = len(references)
    return x - sum(r[0] for r in references) / n, sum(r[1] for r in references) / n - math.log(c)


def test_a_second_reading_of_the_rules_takes_every_decision_alike():
    generator, branches, intervals = random.Random(2609_36662), set(), 0
    for _ in range(400):
        q = generator.choice((2, 3, 5))
        rules = A.Rules(
            generator.randrange(400, 1800), 1e-3, generator.randrange(0, 6 * q),
            10 * q, generator.choice((2, 7)) * q, generator.choice((10, 15, 20)) * q, q, 0.9,
        )  # fmt: skip
        noise, trouble = generator.choice((0.001, 0.05)), generator.choice((0.05, 0.15, 0.3))
        uneven = generator.choice((0, 0, 15))
        statistics = []
        for _ in range(rules.steps):
            size = generator.choice((0.15, 0.2, 0.45, 1.0, math.nan))
            x = generator.gauss(0, noise) + (size if generator.random() < trouble else 0)
            c = 0.5 * math.exp(-generator.gauss(0, noise))
            if generator.random() < trouble / 3:
                c *= math.exp(-generator.choice((0.15, 0.45, 1.0)))
            statistics.append((x, c, 100 + generator.randint(-uneven, uneven)))
        expected, seen = by_one_loop(rules, statistics)
        state, got = A.start(rules), []
        for x, c, tokens in statistics:
            planned = A.plan(rules, state)
            lam = work(rules, planned.step, planned.steps)
            observation = A.Observation(lam * lam * math.exp(x), c, lam, tokens * planned.steps)
            state, decision = A.complete(rules, state, planned, observation)
            got.append((planned.steps, planned.horizon, planned.accepted, decision.verdict))
            if state.step == rules.steps:
                break
        assert got == expected
        branches |= seen
        intervals += len(got)
    assert intervals > 10_000
    assert branches >= {
        "reference ignores", "bound retires", "below a bound",
        "nonfinite m once", "nonfinite v once", "nonfinite r once", "nonfinite r again",
        "m supports 0", "m supports 1", "m consistent 0", "m consistent 1",
        "m moderate 0", "m moderate 1", "m severe 0", "m severe 1",
        "c supports 0", "c supports 1", "c consistent 0", "c consistent 1", "c moderate 0",
        "c moderate 1", "c severe 0", "c severe 1", "c nonfinite 0", "c nonfinite 1",
    }  # fmt: skip


# ---------------------------------------------------------------- golden schedules (F.2, E.2)

GOLDEN = [
    ("", "8x500 5x550 5x600 5x650 49x750 250"),
    ("moderate@9", "8x500 550 14x500 5x550 5x600 5x700 38x750 700"),
    ("moderate@8", "9x500 5x550 5x600 5x650 48x750 500"),
    ("moderate@8 moderate@9", "9x500 5x400 5x450 5x500 5x550 5x600 5x700 39x750 250"),
    ("consistent@9 moderate@10", "8x500 2x550 13x500 5x550 5x600 5x700 38x750 650"),
]


def simulated(rules: A.Rules, trace: str = "", stop: int | None = None) -> list[int]:
    """Executed steps of a dry run in which verdicts are replaced as `trace` says."""
    verdicts = {int(t.split("@")[1]): t.split("@")[0] for t in trace.split()}
    return [planned.steps for planned, _ in itertools.islice(A.simulate(rules, verdicts), stop)]


@pytest.mark.parametrize("trace, schedule", GOLDEN)
def test_c4_executes_the_published_schedule_and_its_variants(trace, schedule):
    steps = simulated(C4, trace)
    assert run_lengths(steps) == schedule
    assert sum(steps) == 50_000


@pytest.mark.parametrize("trace, schedule", GOLDEN)
def test_statistics_that_deviate_that_much_give_the_same_schedules(trace, schedule):
    assert run_lengths(row.plan.steps for row in drive(C4, trace)) == schedule


def test_c4_executes_73_intervals():
    assert len(simulated(C4)) == 73


def test_sft_executes_49_intervals():
    steps = simulated(SFT)
    assert run_lengths(steps) == "8x100 5x110 5x120 5x140 25x150 90"
    assert (len(steps), sum(steps)) == (49, 6490)


def test_tiny_has_the_proportions_of_c4():
    steps = simulated(TINY)
    assert run_lengths(steps) == "8x20 5x22 5x24 5x26 49x30 10"
    assert len(steps) == 73


def test_the_outer_switches_do_not_change_the_schedule():
    assert simulated(replace(C4, **FULL)) == simulated(C4)


def test_a_replaced_non_finite_verdict_acts_in_every_phase():
    assert run_lengths(simulated(C4, "nonfinite@1 nonfinite@3", 10)) == "9x500 550"
    assert run_lengths(simulated(WIDE, "nonfinite@6", 7)) == "6x500 300"
    assert run_lengths(simulated(WIDE, "nonfinite@8 nonfinite@9", 10)) == "8x500 300 50"


@pytest.mark.parametrize("sequence", [(500,) * 100, (10, 990, 13_822, 35_178)])
def test_a_fixed_schedule_is_executed_as_given(sequence):
    rules = replace(C4, sequence=sequence, **FULL)
    plans = list(A.simulate(rules))
    assert tuple(planned.steps for planned, _ in plans) == sequence
    following = [decision.next_horizon for _, decision in plans]
    assert following == [*sequence[1:], None]
    assert {decision.verdict for _, decision in plans} == {None}
    for planned, _ in plans:
        if planned.steps <= 500:
            assert (planned.interval_ratio, planned.momentum) == (1.0, 0.9)
        else:
            base = work(C4, planned.step, 500)
            assert planned.interval_ratio == pytest.approx(
                work(C4, planned.step, planned.steps) / base, rel=1e-9
            )


def c4_sums(decay: Callable[[float], float]) -> list[float]:
    """Exposure of C4's first 0, 1, 2, ... steps in units of the maximal rate."""
    rates = [(s + 1) / 1000 if s < 1000 else decay((s - 1000) / 49_000) for s in range(50_000)]
    return [0.0, *itertools.accumulate(rates)]


COSINE = c4_sums(lambda p: (1 + math.cos(math.pi * p)) / 2)
LINEAR = c4_sums(lambda p: 1 - p)


def walk(granularity: int, first: int, level: int, sums: list[float]) -> list[int]:
    """The schedule of a run in which every candidate is adopted, from the phase lengths alone."""
    step, horizon, wait, out = 0, 500, first, []
    while step < 50_000:
        steps = min(horizon, 50_000 - step)
        measured = sums[step + steps] - sums[step]
        out.append(steps)
        step, wait = step + steps, wait - 1
        if wait <= 0:
            for longer in range(horizon + granularity, min(750, 50_000 - step) + 1, granularity):
                if sums[step + longer] - sums[step] <= 1.15 * (1 + 1e-9) * measured:
                    horizon, wait = longer, level
    return out


def test_phase_lengths_alone_explain_the_published_schedule():
    assert walk(50, 8, 5, COSINE) == simulated(C4)
    assert len(walk(50, 8, 5, LINEAR)) == 72


def test_only_the_papers_granularity_and_phase_lengths_give_73_and_250():
    grid = itertools.product((5, 10, 20, 25, 50, 75, 125), range(6, 11), range(3, 8))
    walks = {combination: walk(*combination, COSINE) for combination in grid}
    assert len(walks) == 175
    fits = [c for c, steps in walks.items() if (len(steps), steps[-1]) == (73, 250)]
    assert fits == [(50, 8, 5)]


# ---------------------------------------------------------------- rules that cannot be


@pytest.mark.parametrize(
    "change, flag",
    [
        ({"steps": 0}, "--steps"),
        ({"lr": 0.0}, "--lr"),
        ({"lr": math.inf}, "--lr"),
        ({"lr": math.nan}, "--lr"),
        ({"warmup": -1}, "--warmup"),
        ({"base_horizon": 0}, "--base-horizon"),
        ({"base_horizon": 510}, "--base-horizon"),
        ({"min_horizon": 0}, "--min-horizon"),
        ({"min_horizon": 375}, "--min-horizon"),
        ({"min_horizon": 550}, "--min-horizon"),
        ({"max_horizon": 725}, "--max-horizon"),
        ({"max_horizon": 450}, "--max-horizon"),
        ({"granularity": 0}, "--granularity"),
        ({"outer_momentum": 1.0}, "--outer-momentum"),
        ({"outer_momentum": -0.1}, "--outer-momentum"),
        ({"outer_momentum": math.nan}, "--outer-momentum"),
        ({"sequence": (500, 0, 49_500)}, "--horizons"),
        ({"sequence": (500,) * 99}, "--horizons"),
    ],
)
def test_an_impossible_rule_is_refused_and_names_its_flag(change, flag):
    with pytest.raises(ValueError, match=flag):
        replace(C4, **change)


# ---------------------------------------------------------------- replay

EVENTFUL = "moderate@9 consistent@24 moderate@29 moderate@30"


def logged(rules: A.Rules, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Header and records as they come back from a file."""
    lines = [A.header(rules, recipe="c4-215m")]
    lines += [A.record(row.plan, row.seen, row.state.mapper, row.decision) for row in rows]
    return [json.loads(json.dumps(line, allow_nan=False)) for line in lines]


@pytest.fixture(scope="module")
def clean() -> list[dict[str, Any]]:
    """A log with a rejection, a confirmed adoption and a reduction, at a density that moves."""
    rows = drive(
        replace(C4, **FULL), EVENTFUL,
        density=lambda interval: 100 + interval % 7, sigmas=lambda interval: interval % 3 / 10,
    )  # fmt: skip
    reasons = " ".join(row.decision.reason for row in rows)
    assert all(word in reasons for word in ("reject", "retired", "confirmed", "reduce by 1.20"))
    return logged(replace(C4, **FULL), rows)


def replayed(lines: Sequence[Mapping[str, Any]]) -> int:
    """Replay a log given as header and records."""
    return A.replay(A.rules_from_dict(lines[0]["rules"]), lines[1:]).interval


def edited(lines: list[dict[str, Any]], number: int, **changes: Any) -> list[dict[str, Any]]:
    """A copy of a log with changes in one line of the file, counted from 1."""
    return [{**line, **changes} if i == number else line for i, line in enumerate(lines, 1)]


def test_a_run_with_a_rejection_and_a_reduction_replays_after_a_trip_through_json(clean):
    assert replayed(clean) == len(clean) - 1


def test_a_fixed_schedule_replays():
    rules = replace(C4, sequence=(10, 990, 13_822, 35_178), **FULL)
    assert replayed(logged(rules, drive(rules))) == 4


def test_an_interrupted_run_replays_as_far_as_it_went(clean):
    assert replayed(clean[:20]) == 19


def test_a_log_line_has_the_columns_of_the_run_folder(clean):
    columns = (
        "interval step steps horizon accepted phase verdict next_horizon reason drift coherence "
        "exposure base_exposure tokens tokens_per_step residual_drift residual_coherence z "
        "interval_ratio momentum step_scale finite"
    )
    assert all(set(line) == set(columns.split()) for line in clean[1:])


def test_a_log_line_counts_completed_steps(clean):
    executed = itertools.accumulate(line["steps"] for line in clean[1:])
    assert [line["step"] for line in clean[1:]] == list(executed)
    assert clean[-1]["step"] == 50_000


@pytest.mark.parametrize(
    "column, change",
    [
        ("drift", lambda value: value * 1.0001),
        ("coherence", lambda value: value * 1.0001),
        ("exposure", lambda value: value * 1.0001),
        ("tokens", lambda value: value + 1),
        ("verdict", lambda value: "consistent"),
        ("next_horizon", lambda value: value + 50),
        ("reason", lambda value: value + "."),
        ("phase", lambda value: "candidate"),
        ("momentum", lambda value: value + 1e-9),
        ("step_scale", lambda value: value + 1e-9),
        ("interval_ratio", lambda value: value + 1e-9),
        ("base_exposure", lambda value: value + 1e-9),
        ("steps", lambda value: value - 50),
        ("horizon", lambda value: value + 50),
        ("accepted", lambda value: 600),
        ("residual_drift", lambda value: None),
        ("z", lambda value: value + 1e-9),
        ("finite", lambda value: False),
        ("tokens_per_step", lambda value: value + 1e-9),
        ("step", lambda value: value + 1),
        ("interval", lambda value: value + 1),
    ],
)
def test_replay_fails_at_an_edited_value_and_names_the_line(clean, column, change):
    line = clean[8]
    assert (line["interval"], line["phase"], line["verdict"]) == (8, "monitor", "supports")
    with pytest.raises(ValueError, match="line 9: interval 8: "):
        replayed(edited(clean, 9, **{column: change(line[column])}))


def test_replay_says_what_the_rule_gives(clean):
    with pytest.raises(ValueError, match="next_horizon is 600 in the log, the rule gives 550"):
        replayed(edited(clean, 9, next_horizon=600))


@pytest.mark.parametrize("interval", [5, 8, 9, 24, 30])
def test_replay_fails_at_an_edited_drift_in_every_phase_with_a_residual(clean, interval):
    line = clean[interval]
    with pytest.raises(ValueError, match=f"line {interval + 1}: interval {interval}: residual_d"):
        replayed(edited(clean, interval + 1, drift=line["drift"] * 1.000001))


def test_an_edited_reference_shows_at_the_first_residual_against_it(clean):
    assert [clean[interval]["phase"] for interval in (4, 5)] == ["reference", "variability"]
    with pytest.raises(ValueError, match="line 6: interval 5: residual_drift"):
        replayed(edited(clean, 5, drift=clean[4]["drift"] * 1.000001))


def test_replay_knows_the_exposure_even_where_nothing_is_judged(clean):
    with pytest.raises(ValueError, match="line 2: interval 1: exposure"):
        replayed(edited(clean, 2, exposure=clean[1]["exposure"] * 1.0001))


def test_replay_names_the_place_of_a_missing_line(clean):
    with pytest.raises(ValueError, match="line 31: interval 30: "):
        replayed(clean[:30] + clean[31:])


def test_replay_names_the_first_of_two_swapped_lines(clean):
    with pytest.raises(ValueError, match="line 31: interval 30: "):
        replayed([*clean[:30], clean[31], clean[30], *clean[32:]])


def test_replay_refuses_lines_after_the_end_of_the_run(clean):
    with pytest.raises(ValueError, match=f"line {len(clean) + 1}: the run was over"):
        replayed([*clean, clean[-1]])


@pytest.mark.parametrize("column", ["drift", "tokens", "momentum", "z"])
def test_replay_names_the_line_that_lacks_a_column(clean, column):
    line = {name: value for name, value in clean[8].items() if name != column}
    with pytest.raises(ValueError, match="line 9: .*" + column):
        replayed([*clean[:8], line, *clean[9:]])


@pytest.mark.parametrize(
    "column, value",
    [("tokens", 0), ("tokens", math.inf), ("drift", 10**400), ("drift", 1e308)],
)
def test_replay_names_the_line_of_an_absurd_number(clean, column, value):
    with pytest.raises(ValueError, match="line 9: "):
        replayed(edited(clean, 9, **{column: value}))


def test_a_header_with_another_rule_fails_at_the_first_line_that_it_changes(clean):
    rules = {**clean[0]["rules"], "max_horizon": 500}
    with pytest.raises(ValueError, match="line 9: interval 8: next_horizon is 550"):
        replayed([{"rules": rules}, *clean[1:]])


@pytest.mark.parametrize("change", [{"steps": None}, {"typo": 1}])
def test_a_header_with_a_missing_or_unknown_rule_is_refused(clean, change):
    rules = {**clean[0]["rules"], **change}
    rules = {
        name: value for name, value in rules.items() if value is not None or name == "sequence"
    }
    with pytest.raises(ValueError, match="rules"):
        replayed([{"rules": rules}, *clean[1:]])


@pytest.mark.parametrize("trace", ["nonfinite@6", "nonfinite@8 nonfinite@9", "nonfinite@9"])
def test_non_finite_statistics_are_null_and_replay(trace):
    lines = logged(C4, drive(C4, trace, stop=15))
    nulls = [line for line in lines[1:] if line["drift"] is None]
    assert len(nulls) == trace.count("@")
    for line in nulls:
        assert (line["finite"], line["residual_drift"], line["z"]) == (False, None, None)
    assert replayed(lines) == 15


def test_a_log_with_replaced_verdicts_does_not_pass_for_a_measured_one():
    state, rows = A.start(C4), []
    for planned, decision in itertools.islice(A.simulate(C4, {8: "moderate"}), 10):
        lam = A.exposure(C4, planned.step, planned.steps)
        seen = A.Observation(lam * lam, 0.5, lam, planned.steps)
        mapper = A.update_mapper(C4, state.mapper, planned.horizon, planned.steps, seen.tokens)
        state = A.State(planned.step + planned.steps, planned.interval, mapper, state.controller)
        rows.append(Row(planned, seen, decision, state))
    with pytest.raises(ValueError, match="line 9: interval 8: verdict is 'moderate'"):
        replayed(logged(C4, rows))


# ---------------------------------------------------------------- the command line


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> str:
    """Write a log as a run does; its path as typed."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def typed(*arguments: str) -> tuple[int, str, str]:
    """`python autoloco.py ...` as a user types it: exit code, output, error output."""
    command = [sys.executable, A.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_replay_exits_with_0_and_a_count(clean, tmp_path):
    code, out, err = typed("replay", write(tmp_path / "intervals.jsonl", clean))
    assert (code, err) == (0, "")
    assert str(len(clean) - 1) in out


def test_replay_exits_with_1_and_one_line_that_names_the_place(clean, tmp_path):
    path = write(tmp_path / "intervals.jsonl", edited(clean, 9, next_horizon=600))
    code, out, err = typed("replay", path)
    assert (code, out) == (1, "")
    assert "line 9" in err and "next_horizon" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("replay",), ("play", "x"), ("replay", "absent.jsonl")])
def test_misuse_exits_with_2_and_one_line(arguments, capsys):
    assert A.main(list(arguments)) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[]\n", "{}\n", "not json\n", '{"rules": 3}\n'])
def test_a_file_that_is_no_log_exits_with_2_and_is_named(content, tmp_path, capsys):
    path = tmp_path / "intervals.jsonl"
    path.write_text(content, encoding="utf-8")
    assert A.main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_torn_last_line_is_dropped_and_said(clean, tmp_path, capsys):
    path = Path(write(tmp_path / "intervals.jsonl", clean[:12]))
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert A.main(["replay", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("10 ") and "torn" in captured.err


# ---------------------------------------------------------------- sabotages

# Changes of autoloco.py that were made on a copy, one at a time, and the test that went red.
SABOTAGES = [
    (
        "inner_lr: s / w instead of (s + 1) / w",
        "test_c4_warm_up_is_a_line_from_a_thousandth_of_the_maximum",
    ),
    (
        "inner_lr: the cosine counts from step 0, not from the end of the warm-up",
        "test_cosine_passes_through_its_known_values",
    ),
    (
        "inner_lr: the rate is not 0 after the end",
        "test_last_step_still_learns_and_from_the_end_on_the_rate_is_zero",
    ),
    ("exposure: one step too few", "test_warm_up_exposure_is_the_triangular_number"),
    (
        "TOKEN_RETENTION: 0.1 on the old density, 0.9 on the new",
        "test_first_interval_sets_the_density_and_later_ones_weigh_a_tenth",
    ),
    (
        "base_tokens: the mean of the three counts",
        "test_horizons_map_one_to_one_until_three_recipe_intervals_are_counted",
    ),
    (
        "update_mapper: intervals of any horizon calibrate",
        "test_only_the_first_three_recipe_horizon_intervals_calibrate",
    ),
    (
        "update_mapper: a remainder calibrates",
        "test_a_remainder_at_the_recipe_horizon_does_not_calibrate",
    ),
    ("map_horizon: round down", "test_half_a_granule_rounds_up"),
    ("map_horizon: no lower limit of one granule", "test_an_interval_maps_to_at_least_one_granule"),
    (
        "complete: map the new horizon with the old density",
        "test_the_new_horizon_is_mapped_after_the_latest_density",
    ),
    (
        "plan: the base comparator is H_base steps at any density",
        "test_the_base_comparator_is_mapped_to_steps_at_the_same_density",
    ),
    (
        "plan: the base comparator starts at step 0",
        "test_interval_ratios_of_c4_are_the_published_ones",
    ),
    (
        "interval_ratio: not held at 1 below the base",
        "test_interval_ratio_is_one_up_to_the_base_exposure_and_the_quotient_above",
    ),
    ("normaliser: epsilon also at ratio 1", "test_at_ratio_one_the_correction_is_exactly_dilocos"),
    (
        "momentum_retention: mu_0 ** (1 / rho)",
        "test_momentum_and_scale_have_the_values_worked_by_hand",
    ),
    (
        "step_scale: the inverse quotient",
        "test_three_nesterov_steps_give_the_series_worked_by_hand",
    ),
    ("step_scale: no bound", "test_the_scale_is_bounded_at_one_and_a_half"),
    ("MAX_STEP_SCALE: 1.25", "test_the_bound_on_the_scale_never_binds_up_to_ratio_one_and_a_half"),
    ("plan: normalisation hangs on the momentum switch", "test_the_three_switches_are_independent"),
    (
        "Observation.finite: 0 is read",
        "test_a_statistic_that_is_not_finite_and_positive_counts_as_non_finite",
    ),
    (
        "residuals: r_D without the factor 2",
        "test_pure_learning_rate_decay_leaves_the_residuals_at_zero",
    ),
    ("residuals: the sign of r_C flipped", "test_more_drift_or_less_coherence_is_worse"),
    (
        "Profile.moved: without the square",
        "test_pure_learning_rate_decay_leaves_the_residuals_at_zero",
    ),
    (
        "_take_in: the reference stays at its first exposure",
        "test_the_reference_exposure_is_the_latest_accepted_intervals",
    ),
    (
        "_estimate: the drift is not moved to the last interval's exposure",
        "test_residuals_are_measured_from_the_reference_however_far_the_rate_has_decayed",
    ),
    (
        "_estimate: arithmetic means",
        "test_the_first_reference_is_the_geometric_mean_of_two_intervals",
    ),
    ("robust_z: the lower middle as median", "test_robust_z_has_the_value_worked_by_hand"),
    ("robust_z: the floor is added, not a maximum", "test_robust_z_has_the_value_worked_by_hand"),
    ("judge: above 6 instead of from 6", "test_verdicts_change_exactly_at_six_three_and_one"),
    ("judge: consistent from 1", "test_verdicts_change_exactly_at_six_three_and_one"),
    ("decide: z of the drift alone", "test_the_worse_family_decides"),
    ("decide: the last interval decides", "test_the_last_interval_of_the_run_decides_nothing"),
    (
        "_after_reference: a non-finite interval counts at the start too",
        "test_a_non_finite_interval_does_not_count_for_the_first_reference",
    ),
    ("warmup_intervals: rounded down", "test_warm_up_spans_every_interval_that_it_touches"),
    ("REFERENCE_INTERVALS: 1", "test_the_phases_up_to_the_first_candidate_are_two_two_three_one"),
    ("VARIABILITY_INTERVALS: 2", "test_c4_executes_the_published_schedule_and_its_variants"),
    ("HISTORY: 15", "test_the_history_keeps_the_latest_sixteen_residuals"),
    ("_take_in: the earliest 16 stay", "test_the_history_keeps_the_latest_sixteen_residuals"),
    (
        "_after_monitor: a first moderate enters the history",
        "test_moderate_intervals_never_enter_the_history",
    ),
    (
        "_take_in: does not end a row of moderates",
        "test_moderate_supports_moderate_is_not_in_a_row",
    ),
    ("_after_monitor: one moderate reduces", "test_the_first_moderate_holds_and_proposes_nothing"),
    (
        "reduced_horizon: 1.20 for severe, 1.50 for moderate",
        "test_two_moderates_in_a_row_reduce_by_a_fifth",
    ),
    ("reduced_horizon: below H_min", "test_a_reduction_stops_at_the_shortest_horizon"),
    ("_re_estimate: the histories stay", "test_re_estimation_clears_the_histories"),
    (
        "_re_estimate: the count of non-finite intervals is dropped",
        "test_non_finite_again_in_the_re_estimated_reference_falls_to_the_shortest_horizon",
    ),
    (
        "_after_reference: a finite reference does not end a row of non-finite ones",
        "test_a_finite_interval_between_two_non_finite_ones_starts_the_count_again",
    ),
    ("_re_estimate: the bound is dropped", "test_a_reduction_keeps_the_bound"),
    (
        "propose: the bound retires from 0.90 upwards",
        "test_a_bound_retires_at_exactly_nine_tenths_of_its_exposure",
    ),
    (
        "propose: the bound retires only below 0.90",
        "test_a_bound_retires_at_exactly_nine_tenths_of_its_exposure",
    ),
    (
        "propose: candidates start one granule too high",
        "test_the_candidate_is_the_longest_horizon_within_the_cap",
    ),
    (
        "propose: H_max itself is left out",
        "test_the_candidate_is_the_longest_horizon_within_the_cap",
    ),
    (
        "propose: the bound itself is a candidate",
        "test_between_neighbours_there_is_nothing_to_propose_until_the_bound_retires",
    ),
    (
        "propose: the cap without tolerance",
        "test_a_candidate_exactly_at_the_cap_is_admitted_in_spite_of_floats",
    ),
    (
        "propose: the cap on a preview of the accepted horizon",
        "test_the_cap_is_on_the_measured_exposure_not_on_a_preview_of_the_accepted_horizon",
    ),
    (
        "propose: a candidate may map to the same steps",
        "test_a_candidate_must_map_to_more_steps_than_the_accepted_horizon",
    ),
    ("propose: a candidate must leave a step over", "test_a_candidate_must_fit_in_the_steps_left"),
    (
        "propose: a candidate may be longer than the run",
        "test_a_candidate_must_fit_in_the_steps_left",
    ),
    ("propose: the shortest candidate", "test_the_candidate_is_the_longest_horizon_within_the_cap"),
    (
        "propose: the arithmetic midpoint",
        "test_below_a_bound_the_candidate_is_nearest_the_geometric_midpoint",
    ),
    (
        "propose: the longest below the bound",
        "test_below_a_bound_the_candidate_is_nearest_the_geometric_midpoint",
    ),
    (
        "complete: preview from the interval's start",
        "test_decay_retires_the_bound_and_the_rejected_horizon_is_tried_again",
    ),
    (
        "_after_candidate: a consistent one is adopted at once",
        "test_a_consistent_candidate_is_adopted_after_one_more_that_is_not_worse",
    ),
    (
        "_after_candidate: a fresh reference after an adoption",
        "test_a_supporting_candidate_is_adopted_at_once",
    ),
    ("_after_candidate: an adoption drops the bound", "test_an_adoption_below_the_bound_keeps_it"),
    ("_after_candidate: the first bound stays", "test_a_new_rejection_replaces_the_bound"),
    (
        "_after_candidate: no bound is recorded",
        "test_a_worse_candidate_is_rejected_and_the_accepted_horizon_returns",
    ),
    (
        "_after_candidate: a candidate enters the history",
        "test_candidate_intervals_never_enter_the_history",
    ),
    (
        "replay: the reason is not compared",
        "test_replay_fails_at_an_edited_value_and_names_the_line",
    ),
    (
        "replay: the exposure is believed",
        "test_replay_knows_the_exposure_even_where_nothing_is_judged",
    ),
    (
        "replay: lines are counted without the header",
        "test_replay_names_the_place_of_a_missing_line",
    ),
    ("record: a null statistic is finite", "test_non_finite_statistics_are_null_and_replay"),
    ("record: the step at which the interval began", "test_a_log_line_counts_completed_steps"),
    ("state_from_dict: the bound stays a list", "test_every_state_survives_a_trip_through_json"),
    (
        "main: a difference exits with 0",
        "test_replay_exits_with_1_and_one_line_that_names_the_place",
    ),
]


def test_every_sabotage_names_a_test_of_this_file():
    assert all(callable(globals().get(test)) for _, test in SABOTAGES)


# =================================================================================================
# Workers and synchronisation (C, D)
# =================================================================================================


# ---------------------------------------------------------------- workers and synchronisation


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Bit-identity holds at a fixed number of threads; processes started here inherit it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


SMALL = replace(model.SIZES["tiny"], width=32, layers=2, heads=2, kv_heads=1, ffn_width=48)


class Words:
    """Batches of random full-length documents, a pure function of (worker, step)."""

    def __init__(self, batch_size=2, seq_len=16, seed=0):
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed

    def batch(self, worker, step):
        rng = np.random.default_rng((self.seed, worker, step))
        tokens = torch.from_numpy(rng.integers(0, 256, (self.batch_size, self.seq_len + 1)))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return data.Batch(inputs, targets, inputs.numel(), ())


def adamw(network, lr=1e-2):
    return torch.optim.AdamW(network.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(network, lr=1e-2):
    return torch.optim.SGD(network.parameters(), lr=lr)


def workers_of(count, optimizer=adamw, wire="fp32", cls=diloco.LocalUpdate, seed=0, **options):
    network = model.Transformer(SMALL)
    network.init_weights(seed)
    ranks = diloco.Ranks(0, 1, count)
    if cls is diloco.LocalUpdate:
        options = {"outer_lr": 0.7} | options
    return cls(network, optimizer(network), ranks, quant.CODECS[wire], **options)


def plan_of(steps, start=0, interval=1, ratio=1.0, divisor=1.0, momentum=0.9, scale=1.0):
    return autoloco.Plan(interval, start, steps, steps, steps, 1.0, ratio, divisor, momentum, scale)


def run_interval(workers, source, plan):
    workers.begin(plan.steps)
    for step in range(plan.step, plan.step + plan.steps):
        for row, worker in enumerate(workers.ranks.hosted):
            workers.step(row, source.batch(worker, step))
    return workers.synchronise(plan)


def oracle(workers, source, plans, optimizer=adamw, outer_lr=0.7, size=SMALL, lr_at=None):
    """K plain models and torch's own optimizers, one process, one line an equation."""
    models, optimizers = [], []
    for _ in range(workers):
        network = model.Transformer(size)
        network.init_weights(0)
        models.append(network)
        optimizers.append(optimizer(network))
    theta = [p.detach().clone() for p in models[0].parameters()]
    m = [torch.zeros_like(t) for t in theta]
    history = []
    for plan in plans:
        for worker, (network, inner) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(plan.step, plan.step + plan.steps):
                batch = source.batch(worker, step)
                for group in inner.param_groups if lr_at else ():
                    group["lr"] = lr_at(step)
                inner.zero_grad()
                count = int((batch.targets != data.IGNORE).sum())
                (network(batch.inputs, batch.targets) / count).backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                inner.step()
        deltas = [
            [t - p.detach() for t, p in zip(theta, network.parameters(), strict=True)]
            for network in models
        ]
        for i, (t, momentum) in enumerate(zip(theta, m, strict=True)):
            mean = deltas[0][i].clone()
            for delta in deltas[1:]:
                mean += delta[i]
            mean /= workers
            mean /= plan.divisor
            momentum.mul_(plan.momentum).add_(mean)
            t.add_(mean.add(momentum, alpha=plan.momentum), alpha=-outer_lr * plan.step_scale)
        for network in models:
            for p, t in zip(network.parameters(), theta, strict=True):
                p.data.copy_(t)
        history.append(([t.clone() for t in theta], deltas))
    return history


def test_synchronised_parameters_equal_a_plain_oracle_bit_for_bit():
    plans = [
        plan_of(3),
        plan_of(4, 3, 2, ratio=1.5, divisor=1.5, momentum=0.9**1.5, scale=1.4),
        plan_of(2, 7, 3),
    ]
    workers, source = workers_of(3), Words()
    for plan, (theta, deltas) in zip(plans, oracle(3, source, plans), strict=True):
        statistics = run_interval(workers, source, plan)
        for mine, plain in zip(workers.shared, theta, strict=True):
            assert torch.equal(mine, plain.view(-1))
        energies = [sum(float(d.double().square().sum()) for d in delta) for delta in deltas]
        mean = [sum(parts) / 3 for parts in zip(*deltas, strict=True)]
        share = sum(float(d.double().square().sum()) for d in mean) / (sum(energies) / 3)
        assert statistics.drift == pytest.approx(sum(energies) / 3, rel=1e-6)
        assert statistics.coherence == pytest.approx(share, rel=1e-5)


def test_endpoint_disagreement_is_drift_times_one_minus_coherence():
    workers, source = workers_of(4), Words()
    ((_, deltas),) = oracle(4, source, [plan_of(5)])
    statistics = run_interval(workers, source, plan_of(5))
    mean = [sum(parts) / 4 for parts in zip(*deltas, strict=True)]
    apart = sum(
        float((d - m).double().square().sum())
        for delta in deltas
        for d, m in zip(delta, mean, strict=True)
    )
    drift, coherence = statistics.drift, statistics.coherence
    assert apart / 4 == pytest.approx(drift * (1 - coherence), rel=1e-4)
    assert 0 < coherence < 1


def test_outer_lr_one_without_momentum_is_plain_averaging():
    plan, source = plan_of(4, momentum=0.0), Words()
    workers = workers_of(3, outer_lr=1.0)
    start = [t.clone() for t in workers.shared]
    ((_, deltas),) = oracle(3, source, [plan])
    run_interval(workers, source, plan)
    for mine, theta, *parts in zip(workers.shared, start, *deltas, strict=True):
        average = sum(theta.view_as(part) - part for part in parts) / 3
        torch.testing.assert_close(mine, average.view(-1), rtol=1e-5, atol=1e-7)


def test_one_worker_with_outer_lr_one_and_no_momentum_is_plain_adamw():
    workers, source = workers_of(1, outer_lr=1.0), Words()
    network = model.Transformer(SMALL)
    network.init_weights(0)
    inner = adamw(network)
    start = [p.detach().clone() for p in network.parameters()]
    for step in range(5):
        batch = source.batch(0, step)
        inner.zero_grad()
        (network(batch.inputs, batch.targets) / batch.targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        inner.step()
    run_interval(workers, source, plan_of(5, momentum=0.0))
    for mine, plain, theta in zip(workers.shared, network.parameters(), start, strict=True):
        # theta - (theta - theta_k) is not theta_k in floats: one ulp of the larger operand.
        plain = plain.detach().view(-1)
        larger = torch.maximum(theta.view(-1).abs(), plain.abs())
        ulp = torch.nextafter(larger, torch.tensor(math.inf)) - larger
        assert ((mine - plain).abs() <= ulp).all()


def test_one_sgd_step_per_interval_is_data_parallel_sgd():
    workers, source = workers_of(3, sgd, outer_lr=1.0, clip=0.0), Words()
    network = model.Transformer(SMALL)
    network.init_weights(0)
    plain = sgd(network)
    for step in range(4):
        plain.zero_grad()
        for worker in range(3):
            batch = source.batch(worker, step)
            (network(batch.inputs, batch.targets) / batch.targets.numel() / 3).backward()
        plain.step()
        run_interval(workers, source, plan_of(1, step, step + 1, momentum=0.0))
    for mine, expected in zip(workers.shared, network.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.detach().view(-1), rtol=1e-5, atol=1e-7)


def test_ddp_is_one_model_on_the_mean_gradient_bit_for_bit():
    workers, source = workers_of(3, cls=diloco.DataParallel), Words()
    network = model.Transformer(SMALL)
    network.init_weights(0)
    inner = adamw(network)
    for step in range(3):
        gradients = []
        for worker in range(3):
            batch = source.batch(worker, step)
            inner.zero_grad()
            (network(batch.inputs, batch.targets) / batch.targets.numel()).backward()
            gradients.append([p.grad.clone() for p in network.parameters()])
        for p, first, *rest in zip(network.parameters(), *gradients, strict=True):
            for gradient in rest:
                first += gradient
            p.grad = first / 3
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        inner.step()
    run_interval(workers, source, plan_of(3))
    for mine, expected in zip(workers.shared, network.parameters(), strict=True):
        assert torch.equal(mine, expected.detach().view(-1))


def test_twenty_outer_steps_equal_torch_sgd_with_nesterov():
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(1000, generator=generator)
    plain = torch.nn.Parameter(theta.clone())
    outer = torch.optim.SGD([plain], lr=0.7, momentum=0.9, nesterov=True)
    m, scratch = torch.zeros(1000), torch.empty(1000)
    for _ in range(20):
        g = torch.randn(1000, generator=generator)
        plain.grad = g.clone()
        outer.step()
        diloco.nesterov(theta, m, g, 0.9, 0.7, scratch)
        assert torch.equal(theta, plain.detach())


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [(False, (-0.33, -2.972982, -5.354095)), (True, (-0.33, -2.340649, -4.532762))],
)
def test_outer_step_follows_the_series_worked_by_hand(normalise, expected):
    theta, m, scratch = torch.ones(1), torch.zeros(1), torch.empty(1)
    for rho, value in zip((1.0, 1.5, 1.0), expected, strict=True):
        mu = autoloco.momentum_retention(0.9, rho)
        g = torch.ones(1) / (autoloco.normaliser(rho) if normalise else 1.0)
        diloco.nesterov(theta, m, g, mu, 0.7 * autoloco.step_scale(mu, 0.9), scratch)
        assert float(theta) == pytest.approx(value, abs=2e-6)


def test_synchronisation_leaves_the_inner_moments_alone():
    workers, source = workers_of(2), Words()
    plan = plan_of(3)
    workers.begin(3)
    for step in range(3):
        for row in range(2):
            workers.step(row, source.batch(row, step))
    before = [{k: v.clone() for k, v in workers.worker_state(row).items()} for row in range(2)]
    workers.synchronise(plan)
    workers.begin(3)
    for row in range(2):
        after = workers.worker_state(row)
        moments = [name for name in after if name.startswith("exp_avg")]
        assert len(moments) == 2 * len(workers.names)
        for name in moments:
            assert torch.equal(after[name], before[row][name]) and after[name].abs().max() > 0
    assert not torch.equal(before[0][moments[0]], before[1][moments[0]])


def test_a_non_finite_worker_is_left_out_and_starts_again():
    source, plan = Words(), plan_of(2)
    workers = workers_of(3)
    workers.begin(2)
    for step in range(2):
        for row in range(3):
            workers.step(row, source.batch(row, step))
    workers.replicas[1].flat[0][5] = math.nan
    deltas = [
        [t - flat for t, flat in zip(workers.shared, workers.replicas[row].flat, strict=True)]
        for row in (0, 2)
    ]
    expected = [t.clone() for t in workers.shared]
    for t, a, b in zip(expected, *deltas, strict=True):
        mean = (a + b) / 2
        t.add_(mean.add(mean, alpha=0.9), alpha=-0.7)
    statistics = workers.synchronise(plan)
    assert statistics.excluded == (1,) and math.isnan(statistics.drift)
    assert all(torch.equal(a, b) for a, b in zip(workers.shared, expected, strict=True))
    assert not workers.replicas[1].state and workers.replicas[0].state
    assert torch.equal(workers.replicas[1].flat[0], workers.shared[0])


def test_without_a_finite_worker_the_interval_is_discarded():
    source, workers = Words(), workers_of(2)
    run_interval(workers, source, plan_of(2))
    before = [t.clone() for t in workers.shared + workers.momentum]
    workers.begin(1)
    for row in range(2):
        workers.step(row, source.batch(row, 2))
        workers.replicas[row].flat[3][0] = math.inf
    statistics = workers.synchronise(plan_of(1, 2, 2))
    assert statistics.excluded == (0, 1)
    after = workers.shared + workers.momentum
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(workers.replicas[1].flat[3], workers.shared[3])


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    inputs = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    targets = inputs.roll(-1, 1)
    for row, length in enumerate((16, 3, 9, 1)):
        targets[row, length:] = data.IGNORE
    gradients, losses = [], []
    for micro in (0, 1, 3):
        workers = workers_of(1, micro_batch=micro)
        loss, count, _ = workers.backward(data.Batch(inputs, targets, 29, ()))
        gradients.append(torch.cat([p.grad.view(-1) for p in workers.parameters]))
        losses.append(float(loss))
        assert count == 29
    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-7)
        assert loss == pytest.approx(losses[0], rel=1e-6)


def test_checksum_sees_one_changed_bit_and_odd_sizes():
    tensors = [torch.randn(7), torch.randn(8)]
    before = diloco.checksum(tensors)
    for tensor in tensors:
        for index in range(tensor.numel()):
            tensor.view(torch.int32)[index] ^= 1
            assert diloco.checksum(tensors) != before
            tensor.view(torch.int32)[index] ^= 1
    assert diloco.checksum(tensors) == before


# ---------------------------------------------------------------- schedules


def test_fixed_horizons_end_with_the_remainder():
    ends = list(accumulate(diloco.fixed_schedule(22, 5)))
    assert ends == [5, 10, 15, 20, 22]
    assert diloco.run_lengths(diloco.fixed_schedule(6490, 100)) == [[64, 100], [1, 90]]


def test_linear_interval_grows_from_10_to_990_and_sums_to_the_budget():
    schedule = diloco.linear_schedule(50_000, 500)
    assert (len(schedule), sum(schedule), schedule[0], schedule[-1]) == (100, 50_000, 10, 990)
    assert all(8 <= b - a <= 11 for a, b in pairwise(schedule))


@given(st.integers(1, 3000), st.integers(1, 300))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_linear_interval_always_sums_to_the_budget(steps, base):
    schedule = diloco.linear_schedule(steps, base)
    assert sum(schedule) == steps and min(schedule) >= 1


def test_qsr_gives_the_reported_41_synchronisations():
    schedule = diloco.qsr_schedule(autoloco.Rules(50_000, 4e-4, 1000, 500, 350, 750, 50, 0.9))
    assert len(schedule) == 41 and sum(schedule) == 50_000
    assert schedule[:6] == (500, 500, 500, 500, 501, 502)
    assert schedule[-5:] == (1743, 2172, 2966, 4907, 13822)


def test_qsr_survives_the_rounding_trap_and_a_vanishing_rate():
    assert diloco.qsr_horizon(0.3, 0.1, 1, 100) == 9
    assert diloco.qsr_horizon(0.3, 0.0, 1, 100) == 100
    assert diloco.qsr_horizon(0.3, 1e-200, 1, 100) == 100
    assert diloco.qsr_horizon(0.3, 0.3, 7, 5) == 5


# =================================================================================================
# Codecs and bytes (G)
# =================================================================================================


QUANT_TINY = 2.0**-126  # fp32's smallest normal number: the guard in the int8 scale
EDGES = [0, 1, 7, 1003, 4095, 4096, 4097, SLAB - 1, SLAB, SLAB + 1, 2 * SLAB + BLOCK + 5]
CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def encoded(codec: quant.Codec, source: Tensor, block: int) -> Tensor:
    out = torch.full((codec.nbytes(Chunk(0, 0, source.numel(), block)),), 0x5A, dtype=torch.uint8)
    codec.encode(source, block, out)
    return out


def round_trip(codec: quant.Codec, source: Tensor, slab: int = SLAB) -> Tensor:
    """One tensor through the codec, chunk by chunk, in one buffer without padding."""
    cut = chunks([source.numel()], slab)
    sizes = [codec.nbytes(chunk) for chunk in cut]
    wire = torch.full((sum(sizes),), 0x5A, dtype=torch.uint8)
    result = torch.full_like(source, 12345.0)
    for chunk, part in zip(cut, wire.split(sizes), strict=True):
        codec.encode(source[chunk.start : chunk.stop], chunk.block, part)
    for chunk, part in zip(cut, wire.split(sizes), strict=True):
        target = result[chunk.start : chunk.stop]
        assert codec.decode(part, chunk.block, target) is target
    return result


def plain_int8(block: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of SPEC 7 for one finite block, written for reading: scale and values."""
    absmax = block.abs().max()
    scale = absmax / 127 + QUANT_TINY
    if scale == QUANT_TINY:  # zeros
        return torch.zeros(()), torch.zeros(block.numel(), dtype=torch.int8)
    return scale, (block / scale).round().clamp(-127, 127).to(torch.int8)


def plain_round_trip(source: Tensor) -> Tensor:
    pairs = [plain_int8(block) for block in source.split(BLOCK)]
    return torch.cat([values.float() * scale for scale, values in pairs])


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    return ((approximate - exact).double().norm() / exact.double().norm()).item()


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def block_values() -> st.SearchStrategy[list[float]]:
    """Blocks of ordinary, tiny and huge numbers, mixed and apart."""
    subnormal = st.floats(-QUANT_TINY, QUANT_TINY, width=32)
    near = st.floats(-1.0, 1.0, width=32)
    return st.one_of(
        *(st.lists(kind, min_size=1, max_size=40) for kind in (near, subnormal, FINITE))
    )


# Bytes


@pytest.mark.parametrize("numel", EDGES)
def test_payload_is_the_plain_formula_at_block_boundaries(numel: int) -> None:
    assert payload_bytes(CODECS["fp32"], [numel]) == 4 * numel
    assert payload_bytes(CODECS["bf16"], [numel]) == 2 * numel
    assert payload_bytes(CODECS["int8"], [numel]) == numel + 4 * math.ceil(numel / 4096)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3 * SLAB), st.sampled_from(EDGES)), max_size=8))
def test_payload_is_the_plain_formula_and_what_the_chunks_take(numels: list[int]) -> None:
    plain = {
        "fp32": sum(4 * n for n in numels),
        "bf16": sum(2 * n for n in numels),
        "int8": sum(n + 4 * math.ceil(n / 4096) for n in numels),
    }
    for name, codec in CODECS.items():
        assert payload_bytes(codec, numels) == plain[name]
        assert sum(codec.nbytes(chunk) for chunk in chunks(numels)) == plain[name]


def test_int8_payload_of_sixteen_gigabytes_of_bf16_is_half_plus_a_thousandth() -> None:
    bf16, int8 = (payload_bytes(CODECS[name], [8_030_261_248]) for name in ("bf16", "int8"))
    assert bf16 == 16_060_522_496  # SPEC 7: 16.0605 GB
    assert int8 == 8_030_261_248 + 4 * 1_960_513


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 3 * SLAB), st.sampled_from(EDGES)), max_size=6),
    st.sampled_from([BLOCK, SLAB, 2 * SLAB]),
)
def test_chunks_cover_every_element_once_in_whole_blocks_of_one_tensor(
    numels: list[int], slab: int
) -> None:
    at = {tensor: 0 for tensor, numel in enumerate(numels) if numel}
    order = []
    for tensor, start, stop, block in chunks(numels, slab):
        assert at[tensor] == start < stop <= numels[tensor]
        assert stop - start <= slab and start % BLOCK == 0
        if block == BLOCK:
            assert (stop - start) % BLOCK == 0
        else:  # the ragged tail, alone
            assert stop - start == block == numels[tensor] % BLOCK and stop == numels[tensor]
        at[tensor] = stop
        order.append((tensor, start))
    assert order == sorted(order)
    assert at == {tensor: numel for tensor, numel in enumerate(numels) if numel}


def test_scalars_give_one_chunk_and_empty_tensors_none() -> None:
    shapes = [torch.zeros(()), torch.zeros(0), torch.zeros(3, 0), torch.zeros(5)]
    assert chunks([tensor.numel() for tensor in shapes]) == [
        Chunk(0, 0, 1, 1),
        Chunk(3, 0, 5, 5),
    ]
    assert chunks([]) == [] and all(payload_bytes(codec, []) == 0 for codec in CODECS.values())


def test_int8_message_is_the_fp32_scales_and_then_the_values() -> None:
    source = torch.tensor([127.0, -2.0, 0.5, 1.5, 254.0, 1.0, 3.0, 5.0])  # halves go to even
    wire = encoded(CODECS["int8"], source, block=4)
    assert wire[:8].view(torch.float32).tolist() == [1.0, 2.0]
    assert wire[8:].view(torch.int8).tolist() == [127, -2, 0, 2, 127, 0, 2, 2]


# Every codec


@CODEC
@pytest.mark.parametrize("numel", EDGES)
def test_zeros_travel_exactly_at_every_size(codec: quant.Codec, numel: int) -> None:
    assert torch.equal(round_trip(codec, torch.zeros(numel)), torch.zeros(numel))


@CODEC
def test_encoding_leaves_the_source_and_decoding_leaves_the_message(codec: quant.Codec) -> None:
    source = gaussian(3 * BLOCK)
    wire = encoded(codec, source, BLOCK)
    before = wire.clone()
    codec.decode(wire, BLOCK, torch.empty(3 * BLOCK))
    assert torch.equal(source, gaussian(3 * BLOCK)) and torch.equal(wire, before)


@CODEC
def test_chunks_of_many_tensors_share_one_buffer_without_padding(codec: quant.Codec) -> None:
    tensors = [gaussian(n, seed=n) for n in (7, 2 * BLOCK + 1003, 1, 4095, 4097, 3 * BLOCK)]
    cut = chunks([tensor.numel() for tensor in tensors])
    sizes = [codec.nbytes(chunk) for chunk in cut]
    wire = torch.empty(sum(sizes), dtype=torch.uint8)
    for (tensor, start, stop, block), part in zip(cut, wire.split(sizes), strict=True):
        codec.encode(tensors[tensor][start:stop], block, part)
    together = [torch.empty_like(tensor) for tensor in tensors]
    for (tensor, start, stop, block), part in zip(cut, wire.split(sizes), strict=True):
        codec.decode(part, block, together[tensor][start:stop])
    for source, result in zip(tensors, together, strict=True):
        assert torch.equal(result, round_trip(codec, source))


@CODEC
def test_slab_size_and_threads_do_not_change_a_decoded_bit(codec: quant.Codec) -> None:
    source = gaussian(2 * SLAB + 3 * BLOCK + 1003)
    expected = round_trip(codec, source)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for slab in (BLOCK, 3 * BLOCK, SLAB, 2 * SLAB):
                assert torch.equal(round_trip(codec, source, slab), expected)
    finally:
        torch.set_num_threads(threads)


@CODEC
def test_a_second_thread_does_not_disturb_the_first(codec: quant.Codec) -> None:
    sources = [gaussian(SLAB + 99, seed) for seed in range(4)]
    expected = [round_trip(codec, source) for source in sources]
    wrong = []

    def work(index: int) -> None:
        for _ in range(10):
            if not torch.equal(round_trip(codec, sources[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@CODEC
def test_encode_and_decode_never_read_a_value_back(codec: quant.Codec) -> None:
    # Tensors on the meta device have no values: a hidden .item() or host synchronisation raises.
    source = torch.empty(2 * BLOCK, device="meta")
    size = codec.nbytes(Chunk(0, 0, 2 * BLOCK, BLOCK))
    wire = torch.empty(size, dtype=torch.uint8, device="meta")
    codec.encode(source, BLOCK, wire)
    assert codec.decode(wire, BLOCK, torch.empty_like(source)).shape == source.shape


@CODEC
def test_first_use_in_inference_mode_does_not_spoil_later_use(codec: quant.Codec) -> None:
    source = gaussian(2077)  # a shape of its own, so that its scratch is made in there
    with torch.inference_mode():
        first = round_trip(codec, source)
    assert torch.equal(round_trip(codec, source), first)


def test_fp32_keeps_every_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (SLAB + 7,), generator=torch.Generator().manual_seed(1))
    source = bits.to(torch.int32).view(torch.float32)  # NaN payloads, infinities, subnormals
    result = round_trip(CODECS["fp32"], source)
    assert torch.equal(result.view(torch.int32), source.view(torch.int32))


# bf16


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=70))
def test_bf16_is_within_two_to_the_minus_eight(values: list[float]) -> None:
    source = torch.tensor(values)
    error = (round_trip(CODECS["bf16"], source).double() - source.double()).abs()
    assert bool((error <= (2.0**-8 * source.double().abs()).clamp_min(2.0**-134)).all())


def test_bf16_rounds_halves_to_even_and_keeps_what_is_not_finite() -> None:
    ulp = 2.0**-7  # of bf16 between 1 and 2
    source = torch.tensor([1 + ulp / 2, 1 + 1.5 * ulp, -1 - ulp / 2, 3.4e38, -math.inf, -0.0])
    source = torch.cat([source, torch.full((70,), math.nan)])
    result = round_trip(CODECS["bf16"], source)
    assert result[:4].tolist() == [1.0, 1 + 2 * ulp, -1.0, math.inf]
    assert result[4].item() == -math.inf and math.copysign(1, result[5].item()) == -1
    assert bool(result[6:].isnan().all())


# int8


@pytest.mark.parametrize("numel", EDGES[1:])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-30, 1e-38, 1e30])
def test_int8_is_the_plain_formula_bit_for_bit(numel: int, size: float) -> None:
    source = gaussian(numel, seed=numel) * size
    assert torch.equal(round_trip(CODECS["int8"], source), plain_round_trip(source))


@settings(derandomize=True, deadline=None, max_examples=400)
@given(block_values())
def test_int8_bytes_are_the_plain_formula_for_any_finite_block(values: list[float]) -> None:
    source = torch.tensor(values)
    scale, integers = plain_int8(source)
    wire = encoded(CODECS["int8"], source, source.numel())
    assert torch.equal(wire[:4], scale.view(1).view(torch.uint8))
    assert torch.equal(wire[4:].view(torch.int8), integers)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(block_values())
def test_int8_error_is_within_half_a_scale_per_element(values: list[float]) -> None:
    source = torch.tensor(values)
    if source.abs().max() == torch.finfo(torch.float32).max:
        source = source / 2  # the one number that overflows has its own test
    wire = encoded(CODECS["int8"], source, source.numel())
    scale = wire[:4].view(torch.float32).double()
    result = CODECS["int8"].decode(wire, source.numel(), torch.empty_like(source))
    error = (result.double() - source.double()).abs()
    # A block below 2**-143 counts as zeros: scale 0.
    assert bool((error <= (scale * (0.5 + 2.0**-16)).clamp_min(2.0**-143)).all())
    assert scale <= source.abs().max().double() / 127 * (1 + 2.0**-23) + 2 * QUANT_TINY


def test_int8_scale_is_absmax_over_127_wherever_a_gradient_lives() -> None:
    for exponent in range(-94, 128):
        absmax = torch.tensor([1.7320508 * 2.0**exponent])
        scale = encoded(CODECS["int8"], absmax, 1)[:4].view(torch.float32)
        assert torch.equal(scale, absmax / 127)


def test_int8_zeros_have_scale_zero_and_zero_bytes() -> None:
    wire = encoded(CODECS["int8"], torch.tensor([0.0, -0.0] * BLOCK), BLOCK)
    assert int(wire.count_nonzero()) == 0


def test_int8_constants_lose_nothing_but_rounding() -> None:
    for value in (1.0, -0.3, 1e-3, 12345.678, -1e-25, 1e30):
        result = round_trip(CODECS["int8"], torch.full((BLOCK + 9,), value))
        assert (result - value).abs().max() <= 2.0**-22 * abs(value)


def test_int8_outlier_touches_its_own_block_only() -> None:
    source = gaussian(3 * BLOCK)
    calm = round_trip(CODECS["int8"], source)
    source[BLOCK + 17] = 1e6
    result = round_trip(CODECS["int8"], source)
    assert torch.equal(result[:BLOCK], calm[:BLOCK])
    assert torch.equal(result[2 * BLOCK :], calm[2 * BLOCK :])
    assert result[BLOCK + 17].item() == pytest.approx(1e6, rel=2.0**-22)
    assert int(result[BLOCK : 2 * BLOCK].count_nonzero()) == 1


def test_int8_subnormal_blocks_keep_their_sign_and_stay_bounded() -> None:
    source = gaussian(2 * BLOCK + 77).clamp(-1, 1) * QUANT_TINY
    result = round_trip(CODECS["int8"], source)
    assert bool((result * source >= 0).all())  # x / scale never wraps around in int8
    assert (result.double() - source.double()).abs().max() <= QUANT_TINY
    below = torch.full((70,), 2.0**-149)
    assert torch.equal(round_trip(CODECS["int8"], below), torch.zeros(70))


def test_int8_largest_number_overflows_visibly_and_its_neighbour_does_not() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert round_trip(CODECS["int8"], largest).item() == math.inf
    neighbour = torch.nextafter(largest, torch.zeros(1))
    assert round_trip(CODECS["int8"], neighbour).item() == pytest.approx(neighbour.item(), rel=1e-6)


@pytest.mark.parametrize("numel", [1, 7, 1003, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_int8_block_with_inf_or_nan_decodes_to_nan_and_no_other_does(
    numel: int, bad: float
) -> None:
    for place in {0, numel // 2, numel - 1}:
        source = gaussian(numel)
        calm = round_trip(CODECS["int8"], source)
        source[place] = bad
        result = round_trip(CODECS["int8"], source)
        hit = torch.arange(numel) // BLOCK == place // BLOCK
        assert bool(result[hit].isnan().all())
        assert torch.equal(result[~hit], calm[~hit])


def test_int8_block_full_of_mixed_infinities_and_nan_decodes_to_nan() -> None:
    source = torch.tensor([math.inf, -math.inf, math.nan, 0.0] * BLOCK)
    assert bool(round_trip(CODECS["int8"], source).isnan().all())


def test_int8_scale_of_a_block_with_inf_is_nan_so_that_no_value_can_hide_it() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        wire = encoded(CODECS["int8"], torch.tensor([0.0, bad, 1.0]), 3)
        wire[4:] = torch.arange(1, 4)  # whatever the values of such a block happen to be
        assert bool(CODECS["int8"].decode(wire, 3, torch.empty(3)).isnan().all())


def test_int8_gaussian_error_is_below_nine_thousandths_once_and_thirteen_after_the_mean() -> None:
    workers = [gaussian(64 * BLOCK, seed) for seed in range(4)]
    once = [round_trip(CODECS["int8"], delta) for delta in workers]
    assert max(map(relative_error, once, workers)) <= 0.009
    mean = sum(workers[1:], workers[0]) / 4
    decoded = round_trip(CODECS["int8"], sum(once[1:], once[0]) / 4)
    assert relative_error(decoded, mean) <= 0.013


def test_int8_refuses_a_message_of_the_wrong_size() -> None:
    with pytest.raises(AssertionError, match="do not encode to"):
        CODECS["int8"].encode(torch.zeros(8), 4, torch.empty(12, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="do not encode to"):
        CODECS["int8"].decode(torch.empty(16, dtype=torch.uint8), 3, torch.zeros(8))


# =================================================================================================
# The model and its weights
# =================================================================================================


STRETCHED = RopeScaling(8.0, 1.0, 4.0, 32)  # bends the wavelengths of heads as small as ours


def load_hf(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and parameters of a Hugging Face folder, as `--init-from` reads them."""
    config = model.read_config(folder)
    return config, dict(model.read_weights(folder, config, dtype))


MODEL_SMALL = ModelConfig(61, 32, 2, 4, 2, 48, tied=True, rope_scaling=STRETCHED, max_seq_len=64)
KINDS = {
    "tied": dataclasses.replace(MODEL_SMALL, kv_heads=4, rope_scaling=None),
    "untied": dataclasses.replace(MODEL_SMALL, kv_heads=4, rope_scaling=None, tied=False),
    "grouped": dataclasses.replace(MODEL_SMALL, kv_heads=1, rope_scaling=None),
    "stretched": dataclasses.replace(MODEL_SMALL, tied=False, rope_theta=500_000.0),
}


def make(config: ModelConfig, seed: int = 1) -> Transformer:
    """A model whose logits are not all but equal, norms included."""
    model = Transformer(config)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(config: ModelConfig, *shape: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, shape, generator=generator)


def gradients(model: Transformer, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = model(inputs, targets)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def plain_loss(model: Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model.logits(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def chunked(monkeypatch: pytest.MonkeyPatch, rows: int = 3, block: int = 2) -> None:
    """Makes the models of these tests take the chunked loss, a few rows at a time."""
    monkeypatch.setattr(model_module, "LARGE_VOCABULARY", 1)
    monkeypatch.setattr(model_module, "CHUNK_BYTES", {"cpu": rows * 4 * MODEL_SMALL.vocab_size})
    monkeypatch.setattr(model_module, "CACHE_BYTES", block * 4 * MODEL_SMALL.vocab_size)


# Sizes


def test_sizes_have_the_published_numbers_of_parameters() -> None:
    assert model_module.parameter_count(SIZES["llama3.1-8b"]) == 8_030_261_248
    assert model_module.parameter_count(SIZES["215m"]) == 215_329_792
    assert 750_000 < model_module.parameter_count(SIZES["tiny"]) < 850_000


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_shapes_are_those_of_the_model_in_its_order(kind: str) -> None:
    shapes = model_module.parameter_shapes(KINDS[kind])
    named = dict(Transformer(KINDS[kind]).named_parameters())
    assert list(shapes.items()) == [(name, value.shape) for name, value in named.items()]
    assert ("head" in shapes) == (kind in ("untied", "stretched"))


def test_matrices_decay_and_norms_do_not() -> None:
    named = Transformer(MODEL_SMALL).named_parameters()
    kept = {name.split(".")[-1] for name, p in named if not model_module.decayed(name, p)}
    assert kept == {"attention_norm", "mlp_norm", "norm"}


def test_config_survives_json() -> None:
    for config in (*SIZES.values(), *KINDS.values()):
        assert ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("change", [{"heads": 3}, {"kv_heads": 3}, {"layers": 0}, {"heads": 32}])
def test_impossible_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="heads|layers"):
        dataclasses.replace(MODEL_SMALL, **change)


def test_importing_the_model_imports_none_of_the_slow_parts_of_torch() -> None:
    code = "import sys, torch; old = set(sys.modules); import model; print(*set(sys.modules) - old)"
    folder = Path(model_module.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    new = done.stdout.split()
    assert "model" in new, done.stderr
    slow = ("torch._dynamo", "torch._inductor", "torch.optim", "torch.distributed", "transformers")
    assert not [name for name in new if name.startswith(slow)]


# Initialisation


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, second = Transformer(MODEL_SMALL), Transformer(MODEL_SMALL)
    torch.manual_seed(1)
    first.init_weights(5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second.init_weights(5)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    second.init_weights(6)
    assert not torch.equal(first.embedding, second.embedding)


def test_a_model_from_the_meta_device_gets_the_same_initial_weights() -> None:
    with torch.device("meta"):
        late = Transformer(MODEL_SMALL)
    late.to_empty(device="cpu")
    late.init_weights(5)
    early = Transformer(MODEL_SMALL)
    early.init_weights(5)
    for a, b in zip(late.parameters(), early.parameters(), strict=True):
        assert torch.equal(a, b)
    inputs = tokens(MODEL_SMALL, 1, 8)
    assert torch.equal(late.logits(inputs), early.logits(inputs))


def test_initial_deviation_is_002_and_less_for_projections_to_the_stream() -> None:
    model = Transformer(SIZES["tiny"])
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            assert (parameter == 1).all()
        else:
            residual = name.endswith((".out", ".down"))
            expected = 0.02 / 8**0.5 if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    config = SIZES["tiny"]
    model = Transformer(config)
    model.init_weights(0)
    loss = model(tokens(config, 2, 64), tokens(config, 2, 64, seed=3)) / 128
    assert loss.item() == pytest.approx(torch.tensor(config.vocab_size).log().item(), abs=0.1)


# Architecture


def test_rotation_is_by_position_times_frequency() -> None:
    config = dataclasses.replace(
        MODEL_SMALL, rope_scaling=None, width=16
    )  # D = 4: frequencies 1, 1/100
    cos, sin = model_module.rotary_tables(config, 8)
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 8, 1, 4)
    turned = model_module.rotate(x, cos, sin)[0, 7, 0]
    slow, fast = torch.tensor(0.07), torch.tensor(7.0)
    expected = torch.stack((fast.cos(), -2 * slow.sin(), fast.sin(), 2 * slow.cos()))
    torch.testing.assert_close(turned, expected)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    cos, sin = model_module.rotary_tables(MODEL_SMALL, 20)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    turned_q = model_module.rotate(q.expand(1, 20, 1, 8), cos, sin)[0, :, 0]
    turned_k = model_module.rotate(k.expand(1, 20, 1, 8), cos, sin)[0, :, 0]
    products = turned_q @ turned_k.T
    for distance in range(5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(products[0, 0], products[0, 4])


def test_stretching_leaves_short_wavelengths_and_slows_long_ones_by_the_factor() -> None:
    config = dataclasses.replace(MODEL_SMALL, width=256)  # D = 64
    plain = model_module.rotary_tables(dataclasses.replace(config, rope_scaling=None), 2)[1]
    bent = model_module.rotary_tables(config, 2)[1]
    ratio = (plain[1, 0, 32:].asin() / bent[1, 0, 32:].asin()).tolist()
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(8, rel=1e-4)
    assert any(1.1 < r < 7 for r in ratio)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_no_earlier_logit(kind: str) -> None:
    model, inputs = make(KINDS[kind]), tokens(KINDS[kind], 2, 12)
    changed = inputs.clone()
    changed[:, 7] += 1
    a, b = model.logits(inputs), model.logits(changed % KINDS[kind].vocab_size)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])


def test_grouped_attention_is_attention_with_repeated_keys_and_values() -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))
    torch.testing.assert_close(
        model_module.attention(q, k, v), model_module.attention(q, *repeated)
    )


@pytest.mark.parametrize("new", [1, 3, 6])
def test_plain_bf16_attention_is_the_fused_one(new: int) -> None:
    q, k, v = torch.randn(2, 4, new, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    fused = model_module.attention(q, k, v)
    plain = model_module.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(plain.float(), fused, atol=0.03, rtol=0.03)


def test_too_many_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="65 positions, but the model has 64"):
        Transformer(MODEL_SMALL).logits(tokens(MODEL_SMALL, 1, 65))


def test_activation_checkpointing_changes_no_bit() -> None:
    model = make(MODEL_SMALL)
    inputs, targets = tokens(MODEL_SMALL, 2, 12), tokens(MODEL_SMALL, 2, 12, seed=3)
    loss, kept = gradients(model, inputs, targets)
    model.activation_checkpointing = True
    runs: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, _: runs.append(block.layer))
    again, recomputed = gradients(model, inputs, targets)
    assert runs == [0, 1, 1, 0]  # forward, then each anew in the backward pass
    assert torch.equal(loss, again)
    for a, b in zip(kept, recomputed, strict=True):
        assert torch.equal(a, b)


# Loss


def test_loss_is_the_sum_over_targets_that_count() -> None:
    model, inputs, targets = (
        make(MODEL_SMALL),
        tokens(MODEL_SMALL, 2, 6),
        tokens(MODEL_SMALL, 2, 6, seed=3),
    )
    targets[0, 2:] = IGNORE
    log_p = model.logits(inputs).log_softmax(-1)
    by_hand = -sum(
        log_p[b, t, targets[b, t]] for b in range(2) for t in range(6) if targets[b, t] != IGNORE
    )
    loss = model(inputs, targets)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss, by_hand)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_chunked_loss_and_gradients_equal_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    ignored: float,
) -> None:
    model = make(KINDS[kind]).to(dtype)
    inputs, targets = tokens(KINDS[kind], 2, 11), tokens(KINDS[kind], 2, 11, seed=3)
    targets[torch.rand(2, 11, generator=torch.Generator().manual_seed(4)) < ignored] = IGNORE
    expected = plain_loss(model, inputs, targets)
    chunked(monkeypatch)
    loss = model(inputs, targets)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    # Some scale other than 1, as the division by the number of tokens gives.
    wanted = torch.autograd.grad(expected / 7, list(model.parameters()))
    found = torch.autograd.grad(loss / 7, list(model.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_batch_without_targets_has_loss_and_gradients_zero(
    monkeypatch: pytest.MonkeyPatch, kind: str, large: bool
) -> None:
    if large:
        chunked(monkeypatch)
    inputs = tokens(MODEL_SMALL, 2, 6)
    loss, grads = gradients(make(KINDS[kind]), inputs, torch.full_like(inputs, IGNORE))
    assert loss == 0 and not any(grad.any() for grad in grads)


def test_chunked_loss_under_bf16_autocast_takes_the_log_sum_exp_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs, targets = (
        make(MODEL_SMALL),
        tokens(MODEL_SMALL, 4, 32),
        tokens(MODEL_SMALL, 4, 32, seed=3),
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected, wanted = gradients(model, inputs, targets)  # plain path
        chunked(monkeypatch, rows=50)
        loss, found = gradients(model, inputs, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.01 * b.norm()


def test_chunked_loss_without_gradients_computes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(monkeypatch)
    model, inputs, targets = (
        make(MODEL_SMALL),
        tokens(MODEL_SMALL, 2, 6),
        tokens(MODEL_SMALL, 2, 6, seed=3),
    )
    expected = model(inputs, targets)
    with torch.no_grad(), _Shapes() as seen:
        loss = model(inputs, targets)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)
    assert (MODEL_SMALL.vocab_size, MODEL_SMALL.width) not in seen.shapes


def test_chunked_loss_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, targets = (
        make(MODEL_SMALL),
        tokens(MODEL_SMALL, 4, 32),
        tokens(MODEL_SMALL, 4, 32, seed=3),
    )
    with _Shapes() as plain:
        model(inputs, targets).backward()
    chunked(monkeypatch, rows=8)
    with _Shapes() as ours:
        model(inputs, targets).backward()
    assert (128, MODEL_SMALL.vocab_size) in plain.shapes
    two_dimensional = (shape for shape in ours.shapes if shape[1:] == (MODEL_SMALL.vocab_size,))
    assert {rows for rows, _ in two_dimensional} == {8, 2, MODEL_SMALL.width}  # the last: weight^T


class _Shapes(TorchDispatchMode):
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


def test_large_vocabularies_take_the_chunked_loss_and_small_ones_do_not() -> None:
    for vocabulary, chunked in ((4096, False), (4097, True)):
        model = make(dataclasses.replace(MODEL_SMALL, vocab_size=vocabulary))
        loss = model(tokens(MODEL_SMALL, 1, 4), tokens(MODEL_SMALL, 1, 4, seed=3))
        assert loss.grad_fn is not None
        assert ("Chunked" in loss.grad_fn.name()) == chunked


def test_training_can_follow_an_evaluation_in_inference_mode() -> None:
    model, inputs = make(MODEL_SMALL), tokens(MODEL_SMALL, 1, 6)
    with torch.inference_mode():
        model.logits(inputs)
    model(inputs, inputs).backward()


def test_chunked_loss_refuses_a_second_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(monkeypatch)
    loss = make(MODEL_SMALL)(tokens(MODEL_SMALL, 1, 6), tokens(MODEL_SMALL, 1, 6, seed=3))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()


@pytest.mark.parametrize("large", [False, True])
def test_doubling_the_padding_changes_neither_loss_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        chunked(monkeypatch)
    model = make(MODEL_SMALL).double()
    lengths = (5, 12, 9)

    def padded(width: int) -> tuple[Tensor, list[Tensor]]:
        inputs, targets = tokens(MODEL_SMALL, 3, width, seed=9), torch.full((3, width), IGNORE)
        for row, length in enumerate(lengths):  # what stands in the padding must not matter
            inputs[row, :length] = tokens(MODEL_SMALL, length, seed=row)
            targets[row, :length] = tokens(MODEL_SMALL, length, seed=10 + row)
        return gradients(model, inputs, targets)

    (loss, grads), (again, twice) = padded(16), padded(32)
    torch.testing.assert_close(again, loss, rtol=1e-14, atol=0)
    for a, b in zip(twice, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("large", [False, True])
def test_sequences_of_a_batch_add_up(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    if large:
        chunked(monkeypatch)
    model = make(MODEL_SMALL).double()
    inputs, targets = tokens(MODEL_SMALL, 3, 10), tokens(MODEL_SMALL, 3, 10, seed=3)
    targets[0, 4:], targets[1, 7:] = IGNORE, IGNORE
    loss, grads = gradients(model, inputs, targets)
    parts = [gradients(model, inputs[i : i + 1], targets[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    for total, *pieces in zip(grads, *(part[1] for part in parts), strict=True):
        torch.testing.assert_close(sum(pieces), total)


# Key-value cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(7, 1, 1, 1, 1, 1), (1,) * 12, (4, 5, 3)])
def test_incremental_logits_equal_the_full_ones(kind: str, pieces: tuple[int, ...]) -> None:
    model, inputs = make(KINDS[kind]), tokens(KINDS[kind], 2, 12)
    cache = Cache()
    with torch.no_grad():
        full = model.logits(inputs)
        parts = [model.logits(piece, cache) for piece in inputs.split(pieces, 1)]
        last = model.logits(inputs, last=True)
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=0)
    torch.testing.assert_close(last, full[:, -1:], atol=1e-5, rtol=0)


# Hugging Face weights


def random_state(config: ModelConfig, seed: int = 1) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in make(config, seed).named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_export_then_import_is_bit_identical(tmp_path: Path, kind: str) -> None:
    state = random_state(KINDS[kind])
    model_module.save_hf(tmp_path / "out", KINDS[kind], state)
    config, again = load_hf(tmp_path / "out")
    assert config == KINDS[kind]
    assert list(again) == list(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    Transformer(config).load_state_dict(again)


def test_bf16_weights_come_back_as_bf16_and_as_fp32(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in random_state(MODEL_SMALL).items()}
    model_module.save_hf(tmp_path, MODEL_SMALL, state)
    for dtype in (torch.bfloat16, torch.float32):
        again = load_hf(tmp_path, dtype)[1]
        assert all(again[name].dtype == dtype for name in state)
        assert all(torch.equal(again[name], state[name].to(dtype)) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_logits_of_an_export(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, model = KINDS[kind], make(KINDS[kind])
    model_module.save_hf(tmp_path, config, model.state_dict())
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    inputs = tokens(config, 2, 48)
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(inputs), other(inputs).logits, atol=1e-4, rtol=0, check_stride=False
        )


@pytest.mark.parametrize("layout", ["older", "newer"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_saved_by_transformers_has_the_same_logits_here(
    tmp_path: Path, kind: str, sharded: bool, layout: str
) -> None:
    transformers = pytest.importorskip("transformers")
    config = KINDS[kind]
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3"} | dataclasses.asdict(config.rope_scaling)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.ffn_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=1e-3,  # large enough to be noticed
            tie_word_embeddings=config.tied,
            initializer_range=0.2,
            rope_parameters=rope,
        )
    ).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    if layout == "older":
        raw = json.loads((tmp_path / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        if config.rope_scaling:
            rope["type"] = rope.pop("rope_type")
            raw["rope_scaling"] = rope
        (tmp_path / "config.json").write_text(json.dumps(raw))
    read, state = load_hf(tmp_path)
    assert read == dataclasses.replace(config, norm_eps=1e-3)
    model = Transformer(read)
    model.load_state_dict(state)
    inputs = tokens(config, 2, 48)
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(inputs), theirs(inputs).logits, atol=1e-4, rtol=0, check_stride=False
        )


def test_the_config_of_llama_31_in_its_older_layout_is_the_named_size(tmp_path: Path) -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert model_module.read_config(tmp_path) == SIZES["llama3.1-8b"]


def edit_json(file: Path, **changes: object) -> None:
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value != "remove"}))


def edit_weights(file: Path, **changes: Tensor | None) -> None:
    """Adds, replaces or (None) removes tensors; `__` stands for a dot."""
    state: dict[str, Tensor | None] = dict(load_file(file))
    state |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in state.items() if value is not None}, file)


def shard(folder: Path) -> Path:
    """Turns the only weights file into two shards with an index."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in set(where.values()):
        save_file({name: state[name] for name in state if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return index


BAD = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: no such file"),
    "not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json: cannot be read"),
    "a list": (lambda d: (d / "config.json").write_text("[1]"), "config.json: cannot be read"),
    "not a Llama": (
        lambda d: edit_json(d / "config.json", model_type="gpt2"),
        "config.json: model_type is 'gpt2'",
    ),
    "no width": (
        lambda d: edit_json(d / "config.json", hidden_size="remove"),
        "config.json: 'hidden_size' is missing",
    ),
    "no heads": (lambda d: edit_json(d / "config.json", num_attention_heads=0), "config.json: "),
    "text": (lambda d: edit_json(d / "config.json", num_hidden_layers="two"), "config.json: "),
    "head_dim": (
        lambda d: edit_json(d / "config.json", head_dim=16),
        "config.json: head_dim is 16",
    ),
    "bias": (
        lambda d: edit_json(d / "config.json", attention_bias=True),
        "config.json: attention_bias is True",
    ),
    "rope type": (
        lambda d: edit_json(d / "config.json", rope_scaling={"type": "yarn", "factor": 2.0}),
        "config.json: rope_type is 'yarn'",
    ),
    "half a rope": (
        lambda d: edit_json(d / "config.json", rope_scaling={"rope_type": "llama3", "factor": 8}),
        "config.json: 'low_freq_factor' is missing",
    ),
    "rope is a number": (lambda d: edit_json(d / "config.json", rope_scaling=3), "config.json: "),
    "no weights": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "model.safetensors: no such file",
    ),
    "cut short": (
        lambda d: (d / "model.safetensors").write_bytes(
            (d / "model.safetensors").read_bytes()[:-9]
        ),
        "model.safetensors: cannot be read",
    ),
    "garbage": (
        lambda d: (d / "model.safetensors").write_bytes(b"\x80\x04garbage" * 9),
        "model.safetensors: cannot be read",
    ),
    "missing tensor": (
        lambda d: edit_weights(d / "model.safetensors", model__norm__weight=None),
        "model.safetensors: no tensor model.norm.weight",
    ),
    "wrong shape": (
        lambda d: edit_weights(d / "model.safetensors", model__norm__weight=torch.ones(31)),
        r"model.safetensors: model.norm.weight is \(31,\), not \(32,\)",
    ),
    "bias tensor": (
        lambda d: edit_weights(
            d / "model.safetensors", model__layers__0__mlp__up_proj__bias=torch.ones(48)
        ),
        "model.safetensors: model.layers.0.mlp.up_proj.bias has no place",
    ),
    "missing shard": (
        lambda d: (shard(d), (d / "model-1.safetensors").unlink()),
        "model-1.safetensors: no such file",
    ),
    "index without a map": (
        lambda d: shard(d).write_text('{"metadata": {}}'),
        "index.json: cannot be read",
    ),
    "shard outside": (
        lambda d: edit_json(shard(d), weight_map={"model.norm.weight": "../model-9.safetensors"}),
        "model-9.safetensors: no such file",
    ),
    "tensor in no shard": (
        lambda d: edit_json(shard(d), weight_map={"x": "model-0.safetensors"}),
        "index.json: no tensor ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weight_folders_are_refused_in_one_line_that_names_the_file(
    tmp_path: Path, case: str
) -> None:
    break_it, message = BAD[case]
    model_module.save_hf(tmp_path, MODEL_SMALL, random_state(MODEL_SMALL))
    break_it(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_leftovers_of_old_exports_are_ignored(tmp_path: Path) -> None:
    state = random_state(MODEL_SMALL)
    model_module.save_hf(tmp_path, MODEL_SMALL, state)
    edit_weights(
        tmp_path / "model.safetensors",
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        lm_head__weight=state["embedding"].clone(),
    )
    again = load_hf(tmp_path)[1]
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_exporting_an_incomplete_state_is_refused(tmp_path: Path) -> None:
    for change in ({"norm": None}, {"norm": torch.ones(3)}, {"extra": torch.ones(3)}):
        state = {k: v for k, v in (random_state(MODEL_SMALL) | change).items() if v is not None}
        with pytest.raises(ValueError, match=f"cannot export: {next(iter(change))}"):
            model_module.save_hf(tmp_path / "out", MODEL_SMALL, state)
    assert not (tmp_path / "out").exists()


# FSDP2 and torch.compile


SHARDED = {"tied": True, "stretched": False}  # kind -> activation checkpointing


def _sharded_rank(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model_module.LARGE_VOCABULARY = 1
    for kind, checkpointing in SHARDED.items():
        config, mine = KINDS[kind], slice(rank, rank + 1)
        with torch.device("meta"):
            model = Transformer(config, activation_checkpointing=checkpointing)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        model.init_weights(5)
        loss = model(tokens(config, 2, 12)[mine], tokens(config, 2, 12, seed=3)[mine])
        loss.backward()
        result = {"loss": loss.detach()}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
            result[name] = parameter.full_tensor().detach()
            result["gradient of " + name] = gradient.full_tensor()
        torch.save(result, f"{folder}/{kind}-{rank}.pt")
    dist.destroy_process_group()


def test_a_sharded_model_has_the_weights_loss_and_gradients_of_an_unsharded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.multiprocessing.spawn(_sharded_rank, (str(tmp_path),), nprocs=2)
    monkeypatch.setattr(model_module, "LARGE_VOCABULARY", 1)
    for kind in SHARDED:
        config, model = KINDS[kind], Transformer(KINDS[kind])
        model.init_weights(5)
        loss, grads = gradients(model, tokens(config, 2, 12), tokens(config, 2, 12, seed=3))
        ranks = [torch.load(tmp_path / f"{kind}-{rank}.pt") for rank in range(2)]
        torch.testing.assert_close(ranks[0]["loss"] + ranks[1]["loss"], loss)
        for (name, parameter), grad in zip(model.named_parameters(), grads, strict=True):
            for rank in ranks:
                assert torch.equal(rank[name], parameter), name
                torch.testing.assert_close(2 * rank["gradient of " + name], grad)  # FSDP2 averages


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_has_the_same_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, large: bool, whole: bool
) -> None:
    if large:
        chunked(monkeypatch)
    model, inputs, targets = (
        make(MODEL_SMALL),
        tokens(MODEL_SMALL, 2, 12),
        tokens(MODEL_SMALL, 2, 12, seed=3),
    )
    targets[0, 8:] = IGNORE
    loss, grads = gradients(model, inputs, targets)
    if whole:
        model.compile()
    else:
        for block in model.blocks:
            block.compile()
    again, compiled = gradients(model, inputs, targets)
    torch.testing.assert_close(again, loss)
    for a, b in zip(compiled, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# =================================================================================================
# Documents, tokens, batches (E.1)
# =================================================================================================


MAIN = Path(__file__).resolve().parent.parent / "main"
sys.path.insert(0, str(MAIN))


SETTINGS: dict[str, Any] = {
    "seq_len": 16,
    "batch_size": 2,
    "workers": 3,
    "seed": 7,
    "partition": "iid",
    "val_documents": 4,
    "chat": False,
    "init_from": "",
}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def source_of(path: Path | str, tokenizer: str = "bytes", **changes: Any) -> data.Source:
    return data.open_source(str(path), tokenizer, **{**SETTINGS, **changes})


def data_write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines, gzipped if the name says so."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts(name: str, count: int) -> list[dict[str, Any]]:
    stamp = "2019-04-25T12:57:54Z"
    return [
        {"text": f"{name} {i}", "timestamp": stamp, "url": f"http://host{i}.org/{name}"}
        for i in range(count)
    ]


def c4_folder(root: Path, sizes: tuple[int, ...]) -> Path:
    """A folder in C4's layout: one training shard a size, and a validation shard of five rows."""
    for at, size in enumerate(sizes):
        name = f"c4-train.{at:05d}-of-{len(sizes):05d}.json.gz"
        data_write(root / name, texts(f"train{at}", size))
    data_write(root / "c4-validation.00000-of-00001.json.gz", texts("held", 5))
    return root


def conversations(path: Path, count: int, **extra: Any) -> Path:
    """A folder of `count` training conversations and three for validation."""
    rows = [{"messages": TURNS, "url": f"http://host{i:03d}.org/", **extra} for i in range(count)]
    data_write(path / "train.jsonl", rows)
    data_write(path / "test.jsonl", rows[:3])
    return path


def bpe_file(folder: Path, chains: tuple[bytes, ...] = (b" the", b"and", b"\n\n", b"  ")) -> Path:
    """A small `tokenizer.model` in tiktoken's format: the bytes, and every prefix of each chain."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [chain[:end] for chain in chains for end in range(2, len(chain) + 1)]
    lines = [f"{base64.b64encode(token).decode()} {at}\n" for at, token in enumerate(tokens)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder / "tokenizer.model"


def ids_of(source: data.Source, worker: int, steps: range) -> list[str]:
    return [name for step in steps for name in source.batch(worker, step).ids]


# ------------------------------------------------------------------------------- batches (E.1, A.3)


def test_a_batch_holds_the_tokens_their_successors_and_padding_worked_by_hand(
    tmp_path: Path,
) -> None:
    """begin=256, end=257; the end token is an input without a successor, and pads."""
    file = data_write(
        tmp_path / "x.jsonl", [{"text": "held"}, {"text": "ab"}, {"text": "abcdefgh"}]
    )
    batch = source_of(file, workers=1, seq_len=6).batch(0, 0)
    n = data.IGNORE
    assert batch.inputs.tolist() == [[256, 97, 98, 257, 257, 257], [256, 97, 98, 99, 100, 101]]
    assert batch.targets.tolist() == [[97, 98, 257, n, n, n], [97, 98, 99, 100, 101, 102]]
    assert batch.tokens == 3 + 6
    assert batch.ids == ("x.jsonl:2", "x.jsonl:3")
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64


def test_documents_of_known_lengths_give_the_exact_token_count(tmp_path: Path) -> None:
    lengths = [0, 1, 5, 14, 15, 16, 17, 100]
    data_write(tmp_path / "train.jsonl", [{"text": "x" * length} for length in lengths])
    data_write(tmp_path / "test.jsonl", [{"text": "x" * length} for length in lengths])
    for seq_len in (16, 32):
        source = source_of(tmp_path, workers=1, batch_size=8, seq_len=seq_len, val_documents=8)
        expected = sum(min(length + 1, seq_len) for length in lengths)
        for batch in (source.batch(0, 0), *source.validation()):
            assert batch.tokens == expected == int((batch.targets != data.IGNORE).sum())


def test_doubling_the_padding_adds_only_padding(tmp_path: Path) -> None:
    c4_folder(tmp_path, (9,))
    short, long = (source_of(tmp_path, seq_len=length).batch(0, 1) for length in (16, 32))
    assert short.tokens == long.tokens
    assert torch.equal(short.targets, long.targets[:, :16])
    assert bool((long.targets[:, 16:] == data.IGNORE).all())


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama3"])
def test_a_plain_document_is_framed_by_the_tokenizers_own_specials(
    tmp_path: Path, tokenizer: str
) -> None:
    c4_folder(tmp_path, (3, 3, 3))
    size = len(bpe_file(tmp_path).read_text().splitlines())
    source = source_of(tmp_path, tokenizer)
    begin, end = (size, size) if tokenizer == "gpt2" else (size, size + 1)
    assert (source.eot, source.end) == (begin, end)
    batch = source.batch(0, 0)
    first = batch.inputs[0, : int((batch.targets[0] != data.IGNORE).sum()) + 1].tolist()
    assert first[0] == begin and first[-1] == end
    assert re.fullmatch(r"train\d 0", source.tokenizer.decode(first[1:-1]))
    assert source.vocab_size == size + (1 if tokenizer == "gpt2" else 256)


def test_batches_leave_the_global_generators_alone(tmp_path: Path) -> None:
    before = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())
    for source in (
        source_of(c4_folder(tmp_path / "c4", (5, 5, 5))),
        source_of(conversations(tmp_path / "chat", 9), chat=True, seq_len=64),
    ):
        source.batch(0, 0)
        list(source.validation())
    after = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


# -------------------------------------------------------------------- dealing documents to workers


def sources(root: Path, **changes: Any) -> Iterator[data.Source]:
    """One source of every dealing: shared rows, whole shards, all in memory, ranges by module."""
    yield source_of(c4_folder(root / "rows", (10,)), **changes)
    yield source_of(c4_folder(root / "shards", (5, 2, 4, 6, 3)), **changes)
    chat = conversations(root / "chat", 10)
    for partition in ("iid", "module"):
        yield source_of(chat, chat=True, partition=partition, **{**changes, "seq_len": 64})


def test_a_batch_is_the_same_whenever_and_in_whatever_order_it_is_asked_for(tmp_path: Path) -> None:
    straight = [
        {(k, s): source.batch(k, s) for s in range(12) for k in range(3)}
        for source in sources(tmp_path)
    ]
    asked = [(k, s) for s in range(12) for k in range(3)]
    random.Random(0).shuffle(asked)
    for source, expected in zip(sources(tmp_path), straight, strict=True):
        for k, s in asked:
            batch = source.batch(k, s)
            assert batch.ids == expected[k, s].ids
            assert torch.equal(batch.inputs, expected[k, s].inputs)
            assert torch.equal(batch.targets, expected[k, s].targets)


def test_a_resume_continues_at_the_very_next_document(tmp_path: Path) -> None:
    for first, second in zip(sources(tmp_path), sources(tmp_path), strict=True):
        for worker in range(3):
            straight = ids_of(first, worker, range(20))
            assert ids_of(second, worker, range(9, 20)) == straight[18:]


@pytest.mark.parametrize("sizes", [(10,), (7, 3), (2, 8), (3, 3, 4), (1, 2, 3, 4)])
def test_ten_documents_for_three_workers_neither_hang_nor_repeat(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    source = source_of(c4_folder(tmp_path, sizes), batch_size=1)
    everything: list[str] = []
    for worker in range(3):
        names = ids_of(source, worker, range(24))
        own = len(set(names))
        everything += names[:own]
        for at, name in enumerate(names):  # epoch after epoch of exactly its own documents
            assert name == names[at % own]
    assert len(everything) == len(set(everything)) == 10


def test_shards_go_to_workers_whole_and_disjoint_in_an_order_that_the_seed_shuffles(
    tmp_path: Path,
) -> None:
    c4_folder(tmp_path, (4,) * 7)
    orders = set()
    for seed in range(5):
        source = source_of(tmp_path, seed=seed, batch_size=4)
        own = [[source.batch(k, s).ids for s in range(3 if k == 0 else 2)] for k in range(3)]
        files = [[names[0].split(":")[0] for names in batches] for batches in own]
        for batches in own:
            for names in batches:  # a shard from its first to its last row
                assert [name.split(":")[1] for name in names] == ["1", "2", "3", "4"]
        assert len({file for some in files for file in some}) == 7
        orders.add(str(files))
    assert len(orders) == 5


def test_a_worker_without_a_document_is_refused_and_does_not_spin(tmp_path: Path) -> None:
    c4_folder(tmp_path, (2,))
    with pytest.raises(ValueError, match=r"00000-of-00001.json.gz: no training document.*worker 2"):
        source_of(tmp_path)


def test_a_far_step_of_a_small_file_is_reached_without_reading_every_epoch(tmp_path: Path) -> None:
    source = source_of(c4_folder(tmp_path, (10,)))
    began = time.perf_counter()
    # 2 * 10^9 documents: worker 0 has lines 1, 4, 7, 10.
    assert source.batch(0, 10**9).ids == source.batch(0, 0).ids
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 1), (3, 2), (4, 3), (2, 13)])
def test_no_document_repeats_within_an_epoch(tmp_path: Path, workers: int, batch_size: int) -> None:
    conversations(tmp_path, 10)
    source = source_of(tmp_path, chat=True, seq_len=64, workers=workers, batch_size=batch_size)
    names: list[str] = []
    for step in range(30 // (workers * batch_size) + 1):
        for worker in range(workers):
            names += source.batch(worker, step).ids
    epochs = [names[first : first + 10] for first in range(0, 30, 10)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 10
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_global_batch_is_the_same_however_many_workers_share_it(tmp_path: Path) -> None:
    conversations(tmp_path, 100)
    split = {
        tuple(
            name
            for worker in range(workers)
            for name in source_of(
                tmp_path, chat=True, seq_len=64, workers=workers, batch_size=8 // workers
            )
            .batch(worker, 5)
            .ids
        )
        for workers in (1, 2, 4, 8)
    }
    assert len(split) == 1


def test_module_partition_gives_workers_different_sources(tmp_path: Path) -> None:
    conversations(tmp_path, 32)
    source = source_of(tmp_path, chat=True, seq_len=64, partition="module", workers=4, batch_size=1)
    own = [Counter(ids_of(source, worker, range(16))) for worker in range(4)]
    lines = [sorted(int(name.split(":")[1]) for name in names) for names in own]
    # Urls sort as lines do here: equal contiguous ranges, each seen twice in two epochs.
    assert lines == [list(range(first, first + 8)) for first in (1, 9, 17, 25)]
    assert all(set(names.values()) == {2} for names in own)


def test_module_partition_is_refused_where_documents_cannot_be_sorted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--partition module: .* streamed"):
        source_of(c4_folder(tmp_path / "c4", (9,)), partition="module")
    conversations(tmp_path / "chat", 9, url="")
    with pytest.raises(ValueError, match="--partition module: .* 'url'"):
        source_of(tmp_path / "chat", partition="module", chat=True, seq_len=64)


def test_validation_is_the_first_documents_in_order_and_the_same_every_time(tmp_path: Path) -> None:
    source = source_of(c4_folder(tmp_path, (9,)), batch_size=3)
    first, again = ([batch.ids for batch in source.validation()] for _ in range(2))
    name = "c4-validation.00000-of-00001.json.gz"
    assert first == again == [(f"{name}:1", f"{name}:2", f"{name}:3"), (f"{name}:4",)]
    assert source.describe()["validation_documents"] == 4


def test_without_validation_files_every_twentieth_line_is_held_out(tmp_path: Path) -> None:
    file = data_write(tmp_path / "x.json.gz", texts("x", 45))
    source = source_of(file, workers=2)
    held = [name for batch in source.validation() for name in batch.ids]
    assert held == ["x.json.gz:1", "x.json.gz:21", "x.json.gz:41"]
    own = [ids_of(source, worker, range(10)) for worker in range(2)]
    assert len({*own[0], *own[1]}) == 40 and not {*own[0], *own[1]} & {*held}
    assert "held out" in source.describe()["validation"]


# -------------------------------------------------------------------------------- damaged files


def damaged(path: Path, kind: str) -> tuple[Path, int]:
    """Spoil line 4 of a good file, or the whole file; returns the file and the line to be named."""
    rows = [json.dumps(row).encode() for row in texts("x", 9)]
    file, line = path / "c4-train.00000-of-00001.json.gz", 4
    spoilt = {
        "not json": b'{"text": ',
        "blank": b"",
        "not an object": b'["text"]',
        "no text": b'{"content": "x"}',
        "text is a number": b'{"text": 3}',
        "not utf-8": b'{"text": "\xff"}',
        "half a surrogate": b'{"text": "\\ud800"}',
    }
    rows[3] = spoilt.get(kind, rows[3])
    content = gzip.compress(b"\n".join(rows) + b"\n")
    if kind == "empty":
        content, line = b"", 1
    elif kind == "gzip of nothing":
        content, line = gzip.compress(b""), 1
    elif kind == "not gzip":
        content, line = b"\n".join(rows), 1
    elif kind == "cut gzip":
        # Stored, not deflated: the cut falls into line 4.
        whole = gzip.compress(b"\n".join(rows) + b"\n", compresslevel=0)
        content = whole[: whole.index(b"x 3")]
    elif kind == "flipped gzip":
        content = content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]
        line = 10  # the checksum is read after the last line
    file.write_bytes(content)
    return file, line


@pytest.mark.parametrize(
    "kind",
    [
        *("empty", "gzip of nothing", "not gzip", "cut gzip", "flipped gzip", "not json", "blank"),
        *("not an object", "no text", "text is a number", "not utf-8", "half a surrogate"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_file_and_line(tmp_path: Path, kind: str) -> None:
    file, line = damaged(c4_folder(tmp_path, (9,)), kind)
    with pytest.raises(ValueError) as caught:
        source = source_of(tmp_path, workers=1, batch_size=1)
        ids = [source.batch(0, step).ids[0] for step in range(10)]
        pytest.fail(f"read {ids}")
    assert str(caught.value).startswith(f"{file}:{line}: "), caught.value
    assert "\n" not in str(caught.value)


def test_a_damaged_first_line_and_a_damaged_validation_file_are_found_at_the_opening(
    tmp_path: Path,
) -> None:
    c4_folder(tmp_path, (9, 9, 9, 9))
    first = data_write(tmp_path / "c4-train.00002-of-00004.json.gz", [{"content": "x"}] * 3)
    with pytest.raises(ValueError, match=f"{re.escape(str(first))}:1: no field 'text'"):
        for seed in range(9):  # a worker's first shard is checked; later ones when they are reached
            source_of(tmp_path, seed=seed)
    c4_folder(tmp_path, (9, 9, 9, 9))
    held = tmp_path / "c4-validation.00000-of-00001.json.gz"
    held.write_bytes(held.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"{re.escape(str(held))}:.*broken gzip"):
        source_of(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x"},
        {"messages": "x"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ],
)
def test_a_malformed_conversation_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    file = data_write(tmp_path / "train.jsonl", [{"messages": TURNS}, row])
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}:2: .*'messages'"):
        source_of(tmp_path, chat=True)


def test_paths_names_and_combinations_that_make_no_sense_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    c4 = c4_folder(tmp_path / "c4", (9,))
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("docstring", "bytes", {}, "--data docstring: no such file"),
        (str(tmp_path / "empty"), "bytes", {}, "no training file"),
        (str(c4), "byte", {}, "--tokenizer byte: unknown"),
        (str(c4), "llama3", {}, "--tokenizer llama3: .*tokenizer.model"),
        (str(c4), "bytes", {"partition": "by-module"}, "--partition by-module: unknown"),
        ("doctests", "bytes", {}, "--data doctests holds conversations"),
        ("docstrings", "bytes", {"chat": True}, "--data docstrings holds plain texts"),
        (str(c4), "gpt2", {"chat": True}, "--tokenizer gpt2 has no chat tokens"),
    ]
    for name, tokenizer, changes, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            source_of(name, tokenizer, **changes)
        assert "\n" not in str(caught.value)


def test_c4s_own_subfolder_is_found(tmp_path: Path) -> None:
    c4_folder(tmp_path / "en", (9,))
    assert source_of(tmp_path).batch(0, 0).ids[0] == "c4-train.00000-of-00001.json.gz:1"


# ------------------------------------------------------------------------------------ tokenizers


def samples() -> list[str]:
    generator = random.Random(0)
    letters = "abc XYZ 019 \n\t .,!? 'll 're \u00e9\u00df\u4e2d\u6587\U0001f600 \u00a0<|>"
    return ["", " ", "the end\n\nand  the rest", "<|eot_id|> <|endoftext|>"] + [
        "".join(generator.choice(letters) for _ in range(generator.randrange(80)))
        for _ in range(300)
    ]


def test_the_byte_tokenizer_round_trips_and_its_short_cut_equals_tiktoken() -> None:
    tokenizer, file = data.load_tokenizer("bytes", [])
    assert file is None and tokenizer.n_vocab == 261
    for text in samples():
        ids = data.encode(tokenizer, text)
        assert ids.tolist() == list(text.encode()) == tokenizer.encode(text, disallowed_special=())
        assert tokenizer.decode(ids.tolist()) == text
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"]
    specials = [tokenizer.encode_single_token(f"<|{name}|>") for name in names]
    assert specials == [256, 257, 258, 259, 260]


def test_our_gpt2_pattern_cuts_text_as_tiktokens_does(tmp_path: Path) -> None:
    from tiktoken_ext import openai_public

    ours, _ = data.load_tokenizer("gpt2", [bpe_file(tmp_path).parent])
    theirs = tiktoken.Encoding(
        "theirs",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=data._read_ranks(tmp_path / "tokenizer.model"),
        special_tokens={"<|endoftext|>": 256 + 7},
    )
    for text in samples():
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)


def test_llama_specials_have_the_published_ids() -> None:
    """With Llama 3.1's 128,000 ordinary tokens."""
    published = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|finetune_right_pad_id|>": 128004,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
        "<|python_tag|>": 128010,
        "<|reserved_special_token_247|>": 128255,
    }
    numbered = {name: 128000 + at for at, name in enumerate(data.LLAMA_SPECIALS)}
    assert published.items() <= numbered.items() and len(numbered) == 256


def test_token_bytes_add_up_to_the_bytes_of_the_text(tmp_path: Path) -> None:
    c4_folder(tmp_path, (9,))
    bpe_file(tmp_path)
    for tokenizer in ("bytes", "gpt2", "llama3"):
        source = source_of(tmp_path, tokenizer)
        assert source.token_bytes.shape == (source.vocab_size,)
        assert source.token_bytes[[source.eot, source.end]].tolist() == [0, 0]
        for text in samples():
            ids = torch.tensor(data.encode(source.tokenizer, text).astype(np.int64))
            assert int(source.token_bytes[ids].sum()) == len(text.encode())


def test_a_changed_tokenizer_file_is_read_anew(tmp_path: Path) -> None:
    bpe_file(tmp_path)
    before, file = data.load_tokenizer("gpt2", [tmp_path / "nowhere", tmp_path])
    assert file == tmp_path / "tokenizer.model"
    bpe_file(tmp_path, (b"other",))
    after, _ = data.load_tokenizer("gpt2", [tmp_path])
    assert before.n_vocab == 264 and after.n_vocab == 261
    assert before.encode("other") != after.encode("other") == [256 + 3]


def test_the_weights_tokenizer_is_preferred_to_the_one_beside_the_data(tmp_path: Path) -> None:
    c4 = c4_folder(tmp_path / "c4", (9,))
    bpe_file(c4)
    own = bpe_file(tmp_path / "weights" / "original", (b"x",) * 0)
    source = source_of(c4, "llama3", init_from=str(tmp_path / "weights"))
    assert source.tokenizer_file == own and source.vocab_size == 512
    assert source.describe()["tokenizer"] == f"llama3 from {own}"
    assert source_of(c4, "llama3").tokenizer_file == c4 / "tokenizer.model"


@pytest.mark.parametrize(
    ("line", "spoilt"),
    [(3, "AA"), (5, "!!!! 4"), (7, "BQ== six"), (258, "IHQ= 300"), (1, "AQ== 0")],
)
def test_a_damaged_tokenizer_file_is_named_with_its_line(
    tmp_path: Path, line: int, spoilt: str
) -> None:
    file = bpe_file(tmp_path)
    lines = file.read_text().splitlines()
    lines[line - 1] = spoilt
    file.write_text("\n".join(lines) + "\n")
    # A token that is there twice is noticed at its second line.
    named = 2 if line == 1 else line
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}:{named}: "):
        data.load_tokenizer("llama3", [tmp_path])


def test_a_tokenizer_file_without_a_token_for_every_byte_is_refused(tmp_path: Path) -> None:
    file = bpe_file(tmp_path)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:200]))
    with pytest.raises(ValueError, match="tokenizer.model:200: ends without a token for byte 200"):
        data.load_tokenizer("gpt2", [tmp_path])


def test_ids_that_exceed_the_models_vocabulary_are_named_with_file_and_line(tmp_path: Path) -> None:
    c4_folder(tmp_path, (9,))
    file = bpe_file(tmp_path)  # 263 lines, <|endoftext|> is 263
    source = source_of(tmp_path, "gpt2")
    data.check_vocabulary(source, 264)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}:261: .*263.* ends at 259"):
        data.check_vocabulary(source, 260)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}:263: "):
        data.check_vocabulary(source, 263)  # only the special token does not fit
    with pytest.raises(ValueError, match="^--tokenizer bytes: ids reach 260"):
        data.check_vocabulary(source_of(tmp_path), 256)


# ------------------------------------------------------------------------------------------ chat


def test_the_assistant_mask_is_exact_token_by_token(tmp_path: Path) -> None:
    """Two turns, written out; capital letters are the special tokens of the byte tokenizer."""
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": " Yo \n"},
        {"role": "user", "content": "<|eot_id|>"},
        {"role": "assistant", "content": ""},
    ]
    file = data_write(tmp_path / "train.jsonl", [{"messages": messages}])
    data_write(tmp_path / "test.jsonl", [{"messages": messages}])
    batch = source_of(file.parent, chat=True, workers=1, batch_size=1, seq_len=100).batch(0, 0)
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
    ids: list[int] = []
    mask = ""
    for text, marks in written:
        ids += [special.get(letter, ord(letter)) for letter in text]
        mask += marks
    assert len(ids) == len(mask)
    assert batch.inputs[0, : len(ids)].tolist() == ids
    assert batch.inputs[0, len(ids) :].tolist() == [257] * (100 - len(ids))
    expected = [i if m == "^" else data.IGNORE for i, m in zip(ids[1:], mask[1:], strict=True)]
    assert batch.targets[0, : len(ids) - 1].tolist() == expected
    assert set(batch.targets[0, len(ids) - 1 :].tolist()) == {data.IGNORE}
    assert batch.tokens == len(ids) - 1  # the user's count
    assert batch.inputs[0].tolist().count(256) == 1


def test_llama_tokens_of_a_conversation_equal_those_of_its_rendered_template(
    tmp_path: Path,
) -> None:
    bpe_file(tmp_path)
    tokenizer, _ = data.load_tokenizer("llama3", [tmp_path])
    for text in samples():
        messages = (("user", text), ("assistant", f"{text}the"))
        rendered = "<|begin_of_text|>" + "".join(
            f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}<|eot_id|>"
            for role, content in messages
        )
        if "<|eot_id|>" in text:
            continue  # as a template renders it, the user could end the turn; here it is text
        ids, predicted = data.encode_chat(tokenizer, messages, 10**6)
        assert ids.tolist() == tokenizer.encode(rendered, allowed_special="all")
        answer = f"{text}the".strip() + "<|eot_id|>"
        assert tokenizer.decode(ids[predicted].tolist()) == answer


def test_conversations_that_truncation_leaves_without_a_target_are_dropped_and_counted(
    tmp_path: Path,
) -> None:
    # With an n-byte question the answer's first token is at index 22 + n: 1 begin, 8 + n + 1 for
    # the user's turn (header 1 + 4 + 1 + 2), 13 - 1 for the assistant's header.
    rows = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}]}
        for n in (1, 9, 10, 11, 50)
    ]
    rows += [{"messages": TURNS[:1]}, {"messages": []}, {"messages": TURNS}]
    data_write(tmp_path / "train.jsonl", rows)
    data_write(tmp_path / "test.jsonl", rows[::-1])
    first = 1 + 8 + 10 + 1 + 13
    source = source_of(tmp_path, chat=True, workers=1, batch_size=4, seq_len=first, val_documents=3)
    assert sorted(source.batch(0, 0).ids) == [f"train.jsonl:{line}" for line in (1, 2, 3, 8)]
    assert source.describe()["dropped"] == 4 and source.describe()["documents"] == 4
    (held,) = source.validation()
    assert held.ids == ("test.jsonl:1", "test.jsonl:6", "test.jsonl:7")  # the first three valid
    for batch in (source.batch(0, 0), held):
        assert bool((batch.targets != data.IGNORE).any(dim=1).all())


def test_nothing_left_after_truncation_is_one_clear_line(tmp_path: Path) -> None:
    conversations(tmp_path, 5)
    with pytest.raises(ValueError, match="too few documents fit: 0 for training .*5 dropped"):
        source_of(tmp_path, chat=True, seq_len=8)


# ----------------------------------------------------------------------------- built-in corpora


@functools.cache
def built_in(name: str, **changes: Any) -> data.Source:
    tiny = {"seq_len": 128, "workers": 4, "val_documents": 10**6, "chat": name == "doctests"}
    return source_of(name, **{**tiny, **changes})


def modules(documents: list[data.Document]) -> set[str]:
    return {document.url.split("/")[-1].split("#")[0] for document in documents}


def test_a_third_of_tinys_documents_is_shorter_than_the_sequence() -> None:
    """Or token counts were constant, and the mapper (A.3) had nothing to map."""
    source = built_in("docstrings")
    assert isinstance(source, data.Indexed)
    padded = [
        int(source.batch(worker, step).targets[row, -1] == data.IGNORE)
        for step in range(500)
        for worker in range(4)
        for row in range(2)
    ]
    assert 0.2 < float(np.mean(padded)) < 0.5
    counts = [sum(source.batch(k, s).tokens for k in range(4)) for s in range(200)]
    assert np.std(counts) > 0.02 * np.mean(counts)


@pytest.mark.parametrize("name", ["docstrings", "doctests"])
def test_no_module_and_no_text_is_in_both_training_and_validation(name: str) -> None:
    source = built_in(name, seq_len=512)
    assert isinstance(source, data.Indexed)
    assert len(source.documents) > 5000 and len(source._held) > 256
    assert not modules(source.documents) & modules(source._held)
    assert not {d.content for d in source.documents} & {d.content for d in source._held}
    facts = source.describe()
    assert facts["corpus"][f"{name}_train"] == facts["documents"] + facts["dropped"]
    assert len(facts["sha256"]) == 64 and facts["packages"]["torch"].startswith("2.")


def test_module_partition_of_the_docstrings_gives_workers_different_modules() -> None:
    source = built_in("docstrings", partition="module")
    assert isinstance(source, data.Indexed)
    own = [source.documents[a:b] for a, b in zip(source._cuts, source._cuts[1:], strict=False)]
    assert max(map(len, own)) - min(map(len, own)) <= 1
    for first in range(4):
        for second in range(first):
            assert len(modules(own[first]) & modules(own[second])) <= 1  # the one at a cut


def test_doctests_are_several_thousand_real_exchanges_of_code_and_output() -> None:
    source = built_in("doctests", seq_len=512)
    assert isinstance(source, data.Indexed)
    turns = [d.content for d in source.documents if isinstance(d.content, tuple)]
    assert len(turns) == len(source.documents) and sum(len(t) > 2 for t in turns) > len(turns) / 3
    for each in turns:
        assert [role for role, _ in each] == ["user", "assistant"] * (len(each) // 2)
        assert not any(text.startswith(">>>") for _, text in each[::2])


def test_a_batch_of_tiny_takes_less_than_a_fifth_of_a_millisecond() -> None:
    source = built_in("docstrings")
    best = 1.0
    for first in range(0, 1000, 100):
        began = time.perf_counter()
        for step in range(first, first + 100):
            source.batch(0, step)
        best = min(best, (time.perf_counter() - began) / 100)
    assert best < 2e-4


BUILD = """
import sys, data
print(data.build_corpus(("jinja2", "mpmath")))
assert not {"jinja2", "mpmath"} & set(sys.modules), "a package was imported"
"""


def run(code: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(MAIN), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_build_at_once_get_one_corpus_and_another_build_gives_the_same_bytes(
    tmp_path: Path,
) -> None:
    caches = [tmp_path / "one", tmp_path / "one", tmp_path / "two"]
    processes = [run(BUILD, AUTOLOCO_CACHE=str(cache)) for cache in caches]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    folders = [Path(out.strip()) for out, _ in results]
    assert folders[0] == folders[1] and folders[0].name == folders[2].name
    # Nothing half-built is left over.
    assert {p.name for p in caches[0].iterdir()} <= {folders[0].name, f"{folders[0].name}.lock"}
    built = [
        {
            str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(folder.rglob("*.*"))
        }
        for folder in folders
    ]
    assert built[0] == built[2] and len(built[0]) == 1 + 5 + 2
    for file in folders[0].rglob("*.gz"):
        assert file.read_bytes()[4:8] == bytes(4), "a time of writing in the gzip header"


def test_a_fresh_corpus_is_local_data_in_c4s_layout_split_by_module_without_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOLOCO_CACHE", str(tmp_path))
    corpus = data.build_corpus(("mpmath",))
    source = source_of(corpus / "docstrings", val_documents=10**6)
    assert isinstance(source, data.Streamed) and len(source.shards) == 4
    assert source.batch(0, 0).tokens > 2
    training, held = list(data.documents_of(source.shards, False, "")), source._held
    assert held and not modules(training) & modules(held)
    letters = [re.sub(r"[\W\d_]+", "", str(d.content)).lower() for d in [*training, *held]]
    assert len(set(letters)) == len(letters)
    held_texts, texts = ([str(d.content) for d in documents] for documents in (held, training))
    assert not data._near_copies(held_texts, texts)


def test_a_missing_package_and_a_cache_that_cannot_be_written_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no_such_package: pip install -r requirements.txt"):
        data.build_corpus(("no_such_package",))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOLOCO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="cache: cannot write the corpus .*set AUTOLOCO_CACHE"):
        data.build_corpus(("jinja2",))


def test_docstrings_are_cut_at_paragraphs_after_96_bytes_and_lose_their_rules() -> None:
    text = "Title\n=====\n\n" + "a" * 88 + "\n\nb\n  indented  \n\nrest\n----\nx : int"
    assert list(data._records(text)) == [
        "Title\n\n" + "a" * 88 + "\n\nb\n  indented",
        "rest\nx : int",
    ]


def test_doctests_become_turns_and_code_without_output_joins_the_next() -> None:
    text = """Sum.

    >>> import math
    >>> for i in range(2):
    ...     print(i)  # doctest: +SKIP
    0
    1

    And

    >>> 1 + 1
    2
    >>> done = True
    """
    assert data._conversation(text) == [
        {"role": "user", "content": "import math\nfor i in range(2):\n    print(i)"},
        {"role": "assistant", "content": "0\n1"},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
    ]


def test_a_near_copy_of_a_training_text_is_not_validation() -> None:
    train = "The quick brown fox jumps over the lazy dog near the river bank today"
    close = train.replace("today", "tonight").replace("The quick", "the quick")
    far = "A wholly different sentence about adaptive synchronisation of several workers"
    assert data._near_copies([close, far], [train]) == [close]


# --------------------------------------------------------------------------- the hub, and offline

OPEN = """
import json, sys, time
import data
began = time.perf_counter()
try:
    source = data.open_source(sys.argv[1], "bytes", **json.loads(sys.argv[2]))
except ValueError as error:
    print(json.dumps([str(error), time.perf_counter() - began]))
else:
    print(json.dumps([seen(source), source.describe()]))
"""
SEEN = """
def seen(source):
    batches = [source.batch(k, s) for s in range(6) for k in range(source.workers)]
    return [[list(b.ids), b.inputs.tolist()] for b in [*batches, *source.validation()]]
"""


def opened(name: str, **environment: str) -> Any:
    """What a fresh process gets: the hub's client reads its environment once, when imported."""
    code = f"import sys; sys.argv = {['', name, json.dumps(SETTINGS)]}{SEEN}{OPEN}"
    process = run(code, **environment)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out)


def test_c4_with_the_hub_switched_off_is_one_line_at_once(tmp_path: Path) -> None:
    message, seconds = opened("c4", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert message.startswith("--data c4: allenai/c4 could not be reached (HF_HUB_OFFLINE is set)")
    assert "--data PATH" in message and "\n" not in message
    assert seconds < 5  # under 1 on an idle machine, most of it `import datasets`


@pytest.mark.parametrize(
    ("name", "tokenizer", "remedy"),
    [
        ("c4", "bytes", "--data PATH"),
        ("ultrachat", "bytes", "--data PATH"),
        ("c4", "gpt2", "TIKTOKEN_CACHE_DIR .* tokenizer.model"),
    ],
)
def test_what_cannot_be_reached_is_one_line_at_once_without_the_libraries_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tokenizer: str, remedy: str
) -> None:
    """Nobody listens at that port, so this holds with a network too."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    flag = "--tokenizer gpt2" if tokenizer == "gpt2" else f"--data {name}"
    began = time.perf_counter()
    with pytest.raises(ValueError, match=f"^{flag}: .* could not be reached .*{remedy}") as caught:
        source_of(name, tokenizer, chat=name == "ultrachat")
    assert time.perf_counter() - began < 2 and "\n" not in str(caught.value)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as its client asks for to stream one repository."""

    repo = "allenai/c4"
    files: dict[str, bytes] = {}
    sha = "c0ffee" + "0" * 34
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """Facts of the repository, listings of its folders, and its files or ranges of them."""
        path = self.path.partition("?")[0]
        api, resolve = f"/api/datasets/{self.repo}", f"/datasets/{self.repo}/resolve/{self.sha}/"
        headers, status = {"X-Repo-Commit": self.sha, "ETag": '"1"', "Accept-Ranges": "bytes"}, 200
        body = b"{}"
        if path in (api, f"{api}/revision/{self.sha}"):
            files = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": self.repo, "sha": self.sha, "siblings": files}).encode()
        elif path.startswith(f"{api}/tree/{self.sha}"):
            folder = path.removeprefix(f"{api}/tree/{self.sha}").strip("/")
            names = [n for n in self.files if n.rpartition("/")[0] == folder]
            rows = [
                {"type": "file", "path": n, "size": len(self.files[n]), "oid": "1"} for n in names
            ]
            if not folder:
                rows.append({"type": "directory", "path": "en", "size": 0, "oid": "1"})
            body = json.dumps(rows).encode()
        elif path.startswith(resolve) and (name := path.removeprefix(resolve)) in self.files:
            body = self.files[name]
            if wanted := self.headers.get("Range"):
                first, last = wanted.removeprefix("bytes=").split("-")
                end = min(int(last or len(body)), len(body) - 1)
                headers["Content-Range"] = f"bytes {first}-{end}/{len(body)}"
                body, status = body[int(first) : end + 1], 206
        else:
            headers["X-Error-Code"], status = "EntryNotFound", 404
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


def test_c4_streamed_through_datasets_equals_the_same_shards_read_from_disk(tmp_path: Path) -> None:
    folder = c4_folder(tmp_path / "c4", (5, 7, 6, 4))
    card = "---\nconfigs:\n- config_name: en\n  data_files:\n"
    for split in ("train", "validation"):
        card += f"  - split: {split}\n    path: en/c4-{split}.*.json.gz\n"
    Hub.files = {f"en/{file.name}": file.read_bytes() for file in folder.iterdir()}
    Hub.files["README.md"] = f"{card}---\n".encode()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        streamed, facts = opened("c4", NO_PROXY="127.0.0.1", **hub)
        server.shutdown()
    namespace: dict[str, Any] = {}
    exec(SEEN, namespace)
    assert streamed == namespace["seen"](source_of(folder))
    assert facts["revision"] == Hub.sha and facts["shards"] == 4


# =================================================================================================
# Runs as a user starts them
# =================================================================================================


# ---------------------------------------------------------------- runs as a user starts them

HERE = Path(train.__file__).parent
QUICK = (
    "--batch-size 1 --seq-len 32 --val-documents 8 --warmup 10 --granularity 1 --base-horizon 10"
)
# A rate far too high: the controller adopts twice, holds, and reduces.
RECKLESS = f"{QUICK} --steps 280 --lr 5e-2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory; the signal handlers of a run do not outlive the test."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def trained(line, name="run"):
    """Run in this process, as `python train.py LINE`; returns the log's header and rows."""
    assert train.main([*line.split(), "--name", name, "--overwrite"]) == 0
    return log_of(name)


def torchrun(ranks, line, cwd, name="run"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(HERE / "train.py"), *line.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--name", name, "--overwrite"],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done


def log_of(name):
    rows = [json.loads(line) for line in Path("runs", name, "intervals.jsonl").open()]
    return rows[0], rows[1:]


def lines_of(name, file):
    return [json.loads(line) for line in Path("runs", name, file).open()]


def without_seconds(rows):
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def decided(rows):
    """All but what depends on the layout: time, and the bytes that rank 0 sent."""
    return [{k: v for k, v in row.items() if k != "sent_bytes"} for row in without_seconds(rows)]


@pytest.fixture
def full_documents(tmp_path):
    """C4-shaped shards whose documents are all longer than the sequence: constant density."""
    for part, count in (("train", 4), ("validation", 1)):
        for shard in range(count):
            path = tmp_path / "full" / f"c4-{part}.{shard:05d}-of-{count:05d}.json.gz"
            path.parent.mkdir(exist_ok=True)
            rng = random.Random(f"{part}{shard}")
            with gzip.open(path, "wt") as file:
                for _ in range(40):
                    text = " ".join(rng.choices(("one", "two", "three", "four"), k=40))
                    file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")
    return tmp_path / "full"


@pytest.mark.parametrize(
    ("recipe", "method", "count", "saved", "intervals"),
    [
        ("c4-215m", "autoloco", 73, 27.0, "8x500 5x550 5x600 5x650 49x750 250"),
        ("c4-215m", "diloco", 100, 0.0, "100x500"),
        ("c4-215m", "linear", 100, 0.0, None),
        ("c4-215m", "qsr", 41, 59.0, None),
        ("c4-215m", "ddp", 50_000, -49_900.0, "50000x1"),
        ("c4-215m-ablation", "autoloco", 73, 27.0, None),
        ("ultrachat-8b", "autoloco", 49, 24.6, "8x100 5x110 5x120 5x140 25x150 90"),
        ("ultrachat-8b", "diloco", 65, 0.0, "64x100 90"),
        ("ultrachat-8b --wire int8", "autoloco", 49, 62.3, None),
        ("tiny", "autoloco", 73, 27.0, "8x20 5x22 5x24 5x26 49x30 10"),
    ],
)
def test_dry_run_prints_the_published_schedules(capsys, recipe, method, count, saved, intervals):
    line = f"--recipe {recipe} --method {method} --dry-run --json"
    assert train.main(line.split()) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["synchronisations"] == count
    assert round(100 * result["saved"], 1) == saved
    if intervals:
        assert diloco.format_runs(result["intervals"]) == intervals


@pytest.mark.parametrize(
    ("verdicts", "intervals"),
    [
        ("9=moderate", "8x500 550 14x500 5x550 5x600 5x700 38x750 700"),
        ("8=moderate", "9x500 5x550 5x600 5x650 48x750 500"),
        ("8=moderate,9=moderate", "9x500 5x400 5x450 5x500 5x550 5x600 5x700 39x750 250"),
        ("9=consistent,10=moderate", "8x500 2x550 13x500 5x550 5x600 5x700 38x750 650"),
    ],
)
def test_dry_run_answers_what_if(capsys, verdicts, intervals):
    assert train.main(f"--recipe c4-215m --dry-run --verdicts {verdicts}".split()) == 0
    assert f" {intervals}\n" in capsys.readouterr().out


def test_the_published_payload_of_diloco_follows_from_the_8b_model():
    config = train.Config(recipe="ultrachat-8b", **train.RECIPES["ultrachat-8b"])
    assert round(train.diloco_payload(config) / 1e9, 3) == 1043.934


def test_a_run_folder_holds_what_an_audit_needs(folder):
    header, rows = trained(f"{QUICK} --steps 22 --base-horizon 5 --method diloco")
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 22]
    columns = (
        "interval step steps horizon accepted phase verdict next_horizon reason drift coherence "
        "exposure base_exposure tokens tokens_per_step residual_drift residual_coherence z "
        "interval_ratio momentum step_scale update_norm payload_bytes sent_bytes checksum "
        "local_seconds sync_seconds"
    ).split()
    assert all([name for name in row if name in columns] == columns for row in rows)
    metrics = lines_of("run", "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 23))
    assert set(metrics[0]) == {"step", "loss", "tokens", "lr", "grad_norm"}
    summary = train.read_json(Path("runs/run/summary.json"))
    assert set(summary) == {
        *("synchronisations", "intervals", "payload_bytes", "saved", "train_loss", "val_loss"),
        *("bits_per_byte", "seconds", "sent_bytes"),
    }
    assert summary["intervals"] == [[4, 5], [1, 2]]
    assert set(train.read_json(Path("runs/run/config.json"))["given"]) >= {"steps", "method"}
    assert len(train.read_json(Path("runs/run/env.json"))["source_sha256"]) == 64
    assert header["method"] == "diloco"


@pytest.mark.parametrize("method", train.METHODS)
def test_every_method_follows_the_closed_form_learning_rate(folder, method):
    trained(f"{QUICK} --steps 30 --workers 2 --lr 1e-3 --method {method}")
    for row in lines_of("run", "metrics.jsonl"):
        s = row["step"] - 1
        p = (s - 10) / 20
        expected = 1e-3 * ((s + 1) / 10 if s < 10 else (1 + math.cos(math.pi * p)) / 2)
        assert row["lr"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fixed", ["--no-adapt", "--min-horizon 10 --max-horizon 10"])
def test_a_ladder_of_one_rung_is_diloco_bit_for_bit(folder, full_documents, fixed):
    line = f"{QUICK} --steps 95 --workers 2 --data {full_documents}"
    _, diloco_rows = trained(f"{line} --method diloco")
    _, rows = trained(f"{line} {fixed}")
    assert [row["checksum"] for row in rows] == [row["checksum"] for row in diloco_rows]
    assert {row["horizon"] for row in rows} == {10} and rows[-1]["steps"] == 5


def test_given_horizons_are_executed(folder):
    _, rows = trained(f"{QUICK} --workers 2 --steps 25 --horizons 2x4,10,7")
    assert [row["steps"] for row in rows] == [4, 4, 10, 7]


def test_evaluation_in_mid_run_does_not_change_training(folder):
    line = f"{QUICK} --workers 2 --steps 40"
    _, plain = trained(line, "plain")
    _, evaluated = trained(f"{line} --eval-every 1", "evaluated")
    assert without_seconds(plain) == without_seconds(evaluated)
    with_loss = [row for row in lines_of("evaluated", "metrics.jsonl") if "val_loss" in row]
    assert [row["step"] for row in with_loss] == [10, 20, 30]


def test_logged_loss_is_the_token_weighted_mean_over_workers(folder):
    trained(f"{QUICK} --workers 3 --steps 1 --batch-size 2")
    config = train.Config(**train.read_json(Path("runs/run/config.json"))["config"])
    source, network = train.open_source(config), model.Transformer(model.SIZES["tiny"])
    network.init_weights(0)
    batches = [source.batch(worker, 0) for worker in range(3)]
    with torch.no_grad():
        total = sum(float(network(b.inputs, b.targets)) for b in batches)
    count = sum(int((b.targets != data.IGNORE).sum()) for b in batches)
    (row,) = lines_of("run", "metrics.jsonl")
    assert row["loss"] == pytest.approx(total / count, rel=1e-6)
    assert row["tokens"] == sum(b.tokens for b in batches)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_the_layout_changes_nothing_in_a_run_that_reduces(folder, wire):
    line = f"{RECKLESS} --wire {wire}"
    logs, weights = [], []
    for ranks in (1, 2, 4):
        done = torchrun(ranks, line, folder, f"on{ranks}")
        assert done.returncode == 0, done.stderr
        logs.append(decided(log_of(f"on{ranks}")[1]))
        weights.append(lines_of(f"on{ranks}", "metrics.jsonl"))
    assert logs[0] == logs[1] == logs[2] and weights[0] == weights[1] == weights[2]
    reasons = " ".join(row["reason"] for row in logs[0])
    assert "adopt" in reasons
    assert wire == "int8" or "reduce" in reasons  # rounding moves the residuals past their bounds
    assert (
        train.read_json(Path("runs/on1/summary.json"))["val_loss"]
        == (train.read_json(Path("runs/on4/summary.json"))["val_loss"])
    )


@pytest.mark.slow
def test_ddp_does_not_depend_on_the_layout(folder):
    line = f"{QUICK} --workers 4 --steps 20 --method ddp"
    for ranks in (1, 2):
        assert torchrun(ranks, line, folder, f"on{ranks}").returncode == 0
    assert decided(log_of("on1")[1]) == decided(log_of("on2")[1])


def test_two_processes_hold_the_oracle_s_parameters_after_each_synchronisation(folder):
    line = f"{QUICK} --workers 2 --steps 45 --lr 1e-3"
    done = torchrun(2, line, folder)
    assert done.returncode == 0, done.stderr
    _, rows = log_of("run")
    config = train.Config(**train.read_json(Path("runs/run/config.json"))["config"])
    source, state, plans = train.open_source(config), autoloco.start(config.rules), []
    for row in rows:
        plans.append(autoloco.plan(config.rules, state))
        seen = autoloco.Observation(row["drift"], row["coherence"], row["exposure"], row["tokens"])
        state, _ = autoloco.complete(config.rules, state, plans[-1], seen)

    def inner(network):
        named = list(network.named_parameters())
        decays = [{"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1}]
        decays += [{"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(decays, betas=(0.9, 0.95), fused=True)

    rates = config.rules.rates
    expected = oracle(2, source, plans, inner, size=model.SIZES["tiny"], lr_at=rates.__getitem__)
    for row, (theta, _) in zip(rows, expected, strict=True):
        bits = diloco.checksum(t.view(-1) for t in theta)
        assert row["checksum"] == f"{bits % 2**64:016x}"


def test_ranks_with_different_global_seeds_start_from_equal_weights():
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        network = model.Transformer(SMALL)
        network.init_weights(0)
        weights.append(torch.cat([p.detach().view(-1) for p in network.parameters()]))
    assert torch.equal(*weights)


def test_replay_of_a_run_that_reduces_passes_and_an_edited_one_fails(folder, capsys):
    header, rows = trained(f"{QUICK} --steps 280 --lr 3e-2 --workers 2")
    phases = {row["phase"] for row in rows}
    assert phases == {"warmup", "reference", "variability", "monitor", "candidate"}
    assert any("reduce" in row["reason"] or "reject" in row["reason"] for row in rows)
    log = Path("runs/run/intervals.jsonl")
    assert autoloco.main(["replay", str(log)]) == 0
    rows[8]["drift"] *= 1.01
    log.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))
    assert autoloco.main(["replay", str(log)]) == 1
    assert "line 10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--recipe tinny", "--recipe 'tinny': unknown, did you mean tiny?"),
        ("--method autolocco", "did you mean autoloco?"),
        ("--outer-momentun 0.9", "--outer-momentun: no such flag, did you mean --outer-momentum?"),
        ("--steps 0", "--steps 0: at least 1"),
        ("--steps two", "--steps: invalid int value: 'two'"),
        ("--lr -1", "--lr -1.0: a finite number above 0"),
        ("--lr nan", "--lr nan"),
        ("--outer-lr -1", "--outer-lr -1.0: at least 0"),
        ("--outer-momentum 1", "--outer-momentum 1.0: in [0, 1)"),
        ("--base-horizon 0", "--base-horizon 0: at least 1"),
        ("--base-horizon 25", "--base-horizon 25 is not a multiple of --granularity 2"),
        ("--max-horizon 18", "--max-horizon 18"),
        ("--horizons 3,x", "--horizons x"),
        ("--horizons 3,4", "--horizons add up to 7 steps, --steps is 2000"),
        ("--verdicts 8=bad", "--verdicts 'bad': unknown"),
        ("--name ../there", "--name ../there"),
        ("--resume", "cannot be read"),
        ("--data nowhere/at/all", "nowhere/at/all"),
        ("--resume --overwrite", "--resume and --overwrite exclude each other"),
    ],
)
def test_wrong_input_gets_one_line_and_code_2(folder, capsys, line, words):
    assert train.main(line.split()) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not any(folder.iterdir())


def test_a_folder_with_a_run_is_never_overwritten_unasked(folder, capsys):
    trained(f"{QUICK} --workers 1 --steps 10", "mine")
    before = Path("runs/mine/metrics.jsonl").read_bytes()
    assert train.main(f"{QUICK} --workers 1 --steps 10 --name mine".split()) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert Path("runs/mine/metrics.jsonl").read_bytes() == before


def test_workers_that_the_ranks_do_not_divide_are_one_line_under_torchrun(folder):
    done = torchrun(2, f"{QUICK} --workers 3 --steps 10", folder)
    assert done.returncode == 1
    ours = [line for line in done.stderr.splitlines() if line.startswith("train.py:")]
    assert ours == ["train.py: --workers 3: not divisible by 2 ranks"]
    assert not Path("runs").exists()


def test_settings_without_effect_are_warned_of(capsys):
    train.main("--method diloco --no-normalise --dry-run --granularity 3".split())
    error = capsys.readouterr().err
    assert "--normalise has no effect with --method diloco" in error
    assert "--granularity has no effect without the controller" in error


def test_the_corpus_has_short_documents_and_the_mapper_sees_them(folder):
    _, rows = trained(f"{QUICK} --workers 2 --steps 60 --seq-len 128")
    densities = [row["tokens"] / row["steps"] for row in rows]
    assert len(set(densities)) > 1 and all(0 < d < 2 * 128 for d in densities)


# ---------------------------------------------------------------- README


README = (HERE / "README.md").read_text()


def table_under(heading):
    """Rows of the first table below a README heading, as lists of cells."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_equation_map_names_functions_that_name_their_section():
    rows = table_under("Equation map")
    assert len(rows) > 15
    for section, _, function in rows:
        owner = sys.modules[function.strip("`").split(".")[0]]
        for name in function.strip("`").split(".")[1:]:
            owner = getattr(owner, name)
        assert re.search(rf"\b{re.escape(section)}\b", owner.__doc__), (section, function)


def test_the_symbol_table_uses_words_of_the_code():
    code = "".join((HERE / name).read_text() for name in train.SOURCES)
    for _, words, _ in table_under("Symbols"):
        for word in re.findall(r"`(\w+)`", words):
            assert re.search(rf"\b{word}\b", code), word


def test_every_assumption_of_the_ledger_is_tagged_in_the_code():
    code = "".join((HERE / name).read_text() for name in train.SOURCES)
    tags = [row[0] for row in table_under("Assumption ledger")]
    assert tags == [f"A{n}" for n in range(1, 26)]
    for tag in tags:
        assert re.search(rf"\b{tag}\b", code), tag
    assert set(re.findall(r"\bA\d+\b", code)) <= set(tags)


def test_the_readme_s_commands_are_ones_that_the_programs_know(capsys):
    commands = re.findall(r"(?:python|torchrun) .*?train\.py( .*)?$", README, re.M)
    assert len(commands) > 5
    for line in commands:
        train.parse(re.sub(r"--init-from \S+", "", line.split("#")[0]).split())


def test_the_readme_s_audit_and_installation_are_the_program_s(folder, capsys):
    trained(f"{QUICK} --steps 20 --method diloco")
    capsys.readouterr()
    assert autoloco.main(["replay", "runs/run/intervals.jsonl"]) == 0
    printed = capsys.readouterr().out
    shown = re.search(r"\$ python autoloco.py replay .*\n(.*\n)", README)[1]
    assert re.sub(r"\d+", "N", shown) == re.sub(r"\d+", "N", printed)
    assert f"pip install '{evaluation.HARNESS}'\n" in README


def test_the_readme_s_dry_run_is_what_the_program_prints(capsys):
    command, printed = re.search(r"\$ python train.py (.*)\n([^`]*)```", README).groups()
    assert train.main(command.split()) == 0
    assert capsys.readouterr().out == printed


# The same for the workers and the loop: each was tried, and its test went red.
SABOTAGES += [
    (
        "diloco.py: flip the sign of the pseudo-gradient",
        "test_synchronised_parameters_equal_a_plain_oracle_bit_for_bit",
    ),
    ("diloco.py: drop 1/K", "test_outer_lr_one_without_momentum_is_plain_averaging"),
    (
        "diloco.py: an out-of-place outer step that is never assigned",
        "test_twenty_outer_steps_equal_torch_sgd_with_nesterov",
    ),
    ("diloco.py: momentum is not kept", "test_outer_step_follows_the_series_worked_by_hand"),
    (
        "diloco.py: heavy ball instead of Nesterov",
        "test_twenty_outer_steps_equal_torch_sgd_with_nesterov",
    ),
    (
        "train.py: one local step too few",
        "test_two_processes_hold_the_oracle_s_parameters_after_each_synchronisation",
    ),
    (
        "diloco.py: workers do not take the new parameters",
        "test_synchronised_parameters_equal_a_plain_oracle_bit_for_bit",
    ),
    (
        "diloco.py: replicas share one AdamW state",
        "test_synchronised_parameters_equal_a_plain_oracle_bit_for_bit",
    ),
    (
        "diloco.py: a non-finite worker keeps its AdamW state",
        "test_a_non_finite_worker_is_left_out_and_starts_again",
    ),
    (
        "diloco.py: drift without 1/K",
        "test_endpoint_disagreement_is_drift_times_one_minus_coherence",
    ),
    (
        "diloco.py: normalisation multiplies",
        "test_synchronised_parameters_equal_a_plain_oracle_bit_for_bit",
    ),
    (
        "diloco.py: kappa is ignored",
        "test_synchronised_parameters_equal_a_plain_oracle_bit_for_bit",
    ),
    (
        "diloco.py: micro-batches weigh the same whatever their tokens",
        "test_micro_batches_give_the_gradient_of_the_whole_batch",
    ),
    (
        "train.py: loss is not weighted by tokens",
        "test_logged_loss_is_the_token_weighted_mean_over_workers",
    ),
    (
        "train.py: every rank feeds the same documents",
        "test_two_processes_hold_the_oracle_s_parameters_after_each_synchronisation",
    ),
    (
        "train.py: ranks start from different weights",
        "test_two_processes_hold_the_oracle_s_parameters_after_each_synchronisation",
    ),
    (
        "diloco.py: QSR's floor falls into the rounding trap",
        "test_qsr_survives_the_rounding_trap_and_a_vanishing_rate",
    ),
    (
        "train.py: the rate is one step ahead",
        "test_every_method_follows_the_closed_form_learning_rate",
    ),
]


# =================================================================================================
# Faults, exact resume, bad input
# =================================================================================================


# 17,000 parameters; intervals of about 10 steps, the 8th is a candidate, the last one a remainder.
MINI = model.ModelConfig(264, 32, 1, 2, 2, 64, tied=True)
LINE = (
    "--data shards --batch-size 1 --seq-len 16 --val-documents 4 --warmup 10 --base-horizon 10 "
    "--granularity 1 --lr 1e-3 --steps 96 --workers 2 --checkpoint-every 1"
)

# A rank as `python train.py` would run it, forked from a process that has imported everything:
# seconds of imports for every rank of every test are saved, and nothing else.
RANK = """
import os, resource, signal, sys, threading
os.chdir(FOLDER)
os.environ.update(ENVIRONMENT)
for stream, log in enumerate(LOGS, 1):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
import autoloco, data, diloco, model, train, torch
torch.set_num_threads(1)
model.SIZES["tiny"] = model.ModelConfig(**MINI)

def at(worker, step, act):  # when that worker (None: any) asks for its batch of that step
    original = data.Source.batch
    def batch(self, w, s):
        if worker in (None, w) and s == step:
            act()
        return original(self, w, s)
    data.Source.batch = batch

def kill(number, delay=0.0):
    if not delay:
        return os.kill(os.getpid(), number)
    late = threading.Timer(delay, os.kill, (os.getpid(), number))
    late.start()
    at(None, 94, late.join)  # of 96 steps, so that a fast run is not over before it

exec(HOOK)
sys.exit(train.main(ARGV))
"""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "torch._dynamo", "safetensors.torch", "tqdm"])


def start_forkserver() -> None:
    """Its preloaded modules are found through PYTHONPATH only (Python 3.11)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(train.__file__).parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


class Launch:
    """Ranks of one run, without torchrun: rank 0 hosts the store, nobody ends the survivors."""

    def __init__(self, line: str, ranks: int = 1, hooks: dict[int, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        start_forkserver()
        Path("rank.py").write_text(RANK)
        self.processes, self.logs = [], []
        for rank in range(ranks):
            logs = [str(Path(f"rank-{rank}.{stream}").resolve()) for stream in ("out", "err")]
            environment = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                environment[name] = str(rank if "RANK" in name else ranks)
            context = {
                "FOLDER": os.getcwd(),
                "ENVIRONMENT": environment,
                "LOGS": logs,
                "MINI": train.asdict(MINI),
                "HOOK": (hooks or {}).get(rank, ""),
                "ARGV": line.split(),
            }
            process = FORKS.Process(target=runpy.run_path, args=("rank.py", context, "__main__"))
            process.start()
            self.processes.append(process)
            self.logs.append([Path(log) for log in logs])

    def wait(self, timeout: float = 90) -> list[int]:
        """Exit codes; minus the signal's number where one ended the rank."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in self.processes if process.is_alive()]
        for process in hung:
            process.kill()
        assert not hung, f"ranks hang: {[self.errors(r) for r in range(len(self.processes))]}"
        return [process.exitcode or 0 for process in self.processes]

    def said(self, rank: int = 0) -> str:
        return self.logs[rank][0].read_text()

    def errors(self, rank: int = 0) -> str:
        return self.logs[rank][1].read_text()

    def complaints(self, rank: int = 0) -> list[str]:
        """The lines `train.py: ...`; there is no traceback."""
        assert "Traceback" not in self.errors(rank), self.errors(rank)
        return [x for x in self.errors(rank).splitlines() if x.startswith("train.py: ")]


def under_torchrun(line: str, hook: str = "", restarts: int = 0) -> subprocess.Popen:
    """torchrun on two ranks; the hook may ask for RANK and ATTEMPT."""
    context = {"FOLDER": os.getcwd(), "ENVIRONMENT": {}, "LOGS": [], "MINI": train.asdict(MINI)}
    hook = (
        "RANK, ATTEMPT = (int(os.environ[x]) for x in ('RANK', 'TORCHELASTIC_RESTART_COUNT'))\n"
        + hook
    )
    context |= {"HOOK": hook, "ARGV": line.split()}
    head = f"import sys; sys.path.insert(0, {str(Path(train.__file__).parent)!r})\n"
    head += "".join(f"{name} = {value!r}\n" for name, value in context.items())
    Path("rank.py").write_text(head + RANK)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*words, "--max-restarts", str(restarts), "rank.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make_shards(folder: Path) -> None:
    """C4-shaped documents, some shorter than the sequence, so that token density varies."""
    folder.mkdir()
    rng = random.Random(5)
    for name in ("c4-train.00000", "c4-train.00001", "c4-validation.00000"):
        with gzip.open(folder / f"{name}.json.gz", "wt") as file:
            for _ in range(40):
                text = " ".join(rng.choices(("one", "two", "three", "four"), k=rng.randint(2, 9)))
                file.write(json.dumps({"text": text, "url": "", "timestamp": ""}) + "\n")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with data and the mini model; no handler outlives the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(model.SIZES, "tiny", MINI)
    make_shards(tmp_path / "shards")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command(line: str) -> int:
    """`python train.py LINE` in this process."""
    return train.main(line.split())


def at(monkeypatch, worker, step, act):
    """Act when that worker asks for its batch of that step."""
    original = data.Source.batch

    def batch(self, w, s):
        if (w, s) == (worker, step):
            act()
        return original(self, w, s)

    monkeypatch.setattr(data.Source, "batch", batch)


def rows_of_log(name: str) -> list[dict]:
    rows = [json.loads(line) for line in Path("runs", name, "intervals.jsonl").open()]
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def end_state(name: str, *, layout: bool = True) -> dict:
    """All that a run leaves, but for times; without `layout` also but for the bytes sent."""
    last = sorted(Path("runs", name, "checkpoint").glob("step-*"))[-1]
    summary = json.loads(Path("runs", name, "summary.json").read_text())
    del summary["seconds"]
    rows = rows_of_log(name)
    if not layout:
        rows = [{k: v for k, v in row.items() if k != "sent_bytes"} for row in rows]
        del summary["sent_bytes"]
    return {
        "step": last.name,
        "tensors": {f.name: f.read_bytes() for f in sorted(last.glob("*.safetensors"))},
        "intervals": rows,
        "metrics": Path("runs", name, "metrics.jsonl").read_bytes(),
        "summary": summary,
    }


def same(name: str, straight: dict, *, layout: bool = True) -> None:
    """The run's end state is the straight run's, bit for bit."""
    state = end_state(name, layout=layout)
    for part, expected in straight.items():
        if part == "intervals" and not layout:
            expected = [{k: v for k, v in row.items() if k != "sent_bytes"} for row in expected]
        if part == "summary" and not layout:
            expected = {k: v for k, v in expected.items() if k != "sent_bytes"}
        assert state[part] == expected, part


def moments(name: str) -> dict[str, int]:
    """Steps at which to interrupt: one of each kind that a run has."""
    rows = rows_of_log(name)[1:]
    starts = {row["phase"]: row["step"] - row["steps"] for row in rows[:-1]}
    found = {
        "the first interval": 3,
        "the middle of an interval": rows[2]["step"] + rows[3]["steps"] // 2,
        "a boundary": rows[1]["step"],
        "the last remainder": rows[-1]["step"] - 1,
    }
    if "candidate" in starts:
        found["a candidate interval"] = starts["candidate"] + 2
    return found


@pytest.mark.parametrize("method", ["autoloco", "ddp"])
@pytest.mark.parametrize("wire", quant.CODECS)
def test_the_log_holds_the_bytes_that_the_shapes_give(place, method, wire):
    launch = Launch(f"{LINE} --workers 2 --method {method} --wire {wire} --name run", 2)
    assert launch.wait() == [0, 0]
    numels = [shape.numel() for shape in model.parameter_shapes(MINI).values()]
    payload = quant.payload_bytes(CODECS[wire], numels)
    for row in rows_of_log("run")[1:]:
        means = row["steps"] if method == "ddp" else 1
        assert row["payload_bytes"] == means * payload
        # To the other rank: its part and the mean of the own one, together a payload; then losses,
        # targets, tokens, norm and rate of every step, the drift, and two checksums.
        scalars = 5 * row["steps"] + (method != "ddp") + 2
        assert row["sent_bytes"] == means * payload + 8 * scalars


# ---------------------------------------------------------------- resume


METHODS_AND_WIRES = [(method, "fp32") for method in train.METHODS] + [
    ("autoloco", "int8"),
    ("autoloco", "bf16"),
]


@pytest.mark.parametrize(("method", "wire"), METHODS_AND_WIRES)
def test_an_interrupted_run_ends_as_the_straight_one_bit_for_bit(
    place, monkeypatch, capsys, method, wire
):
    line = f"{LINE} --method {method} --wire {wire}"
    assert command(f"{line} --name straight") == 0
    straight, points = end_state("straight"), moments("straight")
    assert ("a candidate interval" in points) == (method == "autoloco")
    for number, (what, step) in enumerate(points.items()):
        stop = (signal.SIGTERM, signal.SIGINT)[number % 2]
        with monkeypatch.context() as patch:
            at(patch, number % 2, step, lambda stop=stop: os.kill(os.getpid(), stop))
            assert command(f"{line} --name cut --overwrite") == 0, what
        assert "continue with --resume --name cut" in capsys.readouterr().out, what
        assert not Path("runs/cut/summary.json").exists()
        assert command("--resume --name cut") == 0, what
        same("cut", straight)


def test_a_run_interrupted_at_every_tenth_step_ends_as_the_straight_one(place, monkeypatch):
    assert command(f"{LINE} --name straight") == 0
    assert command(f"{LINE} --name cut --dry-run") == 0
    line = f"{LINE} --name cut"
    for step in range(0, 96, 10):
        with monkeypatch.context() as patch:
            at(patch, 0, step, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])
            assert command(line) == 0
        line = "--resume --name cut --checkpoint-every 4"
    assert command(line) == 0
    same("cut", end_state("straight"))


@pytest.mark.parametrize(
    ("method", "wire"), [("autoloco", "fp32"), ("autoloco", "int8"), ("ddp", "fp32")]
)
def test_a_checkpoint_of_two_processes_continues_on_one_and_the_other_way_round(
    place, method, wire
):
    line = f"{LINE} --method {method} --wire {wire}"
    assert command(f"{line} --name straight") == 0
    straight, points = end_state("straight"), moments("straight")
    step = points["the middle of an interval"]
    for before, after, kept in ((2, 1, "from-two"), (1, 2, "from-one"), (2, 2, "two")):
        stop = Launch(
            f"{line} --name {kept}",
            before,
            {before - 1: f"at(1, {step}, lambda: kill(signal.SIGTERM))"},
        )
        assert stop.wait() == [0] * before, stop.errors()
        assert f"continue with --resume --name {kept}" in stop.said()
        assert stop.complaints() == []
        again = Launch(f"--resume --name {kept}", after)
        assert again.wait() == [0] * after, again.errors()
        assert "resuming at step" in again.said()
        same(kept, straight, layout=False)


def test_a_resume_may_change_nothing_that_is_computed(place, capsys):
    assert command(f"{LINE} --name mine --steps 20") == 0
    before = tree("runs/mine")
    for flag, words in (
        ("--workers 4", "--workers 4: runs/mine was started with 2"),
        ("--method diloco", "--method diloco: runs/mine was started with autoloco"),
        ("--recipe tiny-sft", "--recipe tiny-sft: runs/mine was started with tiny"),
        ("--lr 2e-3", "--lr 0.002: runs/mine was started with 0.001"),
        ("--steps 30", "--steps 30: runs/mine was started with 20"),
        ("--dry-run", "--dry-run True: runs/mine was started with False"),
    ):
        assert refused(capsys, f"--resume --name mine {flag}") == words
    assert command("--resume --name mine --checkpoint-every 3 --timeout-minutes 2") == 0
    assert {n: c for n, c in tree("runs/mine").items() if "summary" not in n} == {
        n: c for n, c in before.items() if "summary" not in n
    }


def test_a_checkpoint_of_another_run_is_refused_and_the_setting_is_named(place, capsys):
    assert command(f"{LINE} --name mine --steps 20") == 0
    assert command(f"{LINE} --name other --steps 20 --wire int8") == 0
    shutil.rmtree("runs/mine/checkpoint")
    shutil.copytree("runs/other/checkpoint", "runs/mine/checkpoint")
    before = tree("runs")
    answer = refused(capsys, "--resume --name mine")
    assert answer == "--wire fp32: runs/mine/checkpoint/step-00000020 was saved with int8"
    assert tree("runs") == before


def test_a_copied_run_folder_continues_as_a_branch_and_leaves_the_original_alone(place):
    assert command(f"{LINE} --name mine --steps 20") == 0
    shutil.copytree("runs/mine", "runs/branch")
    before = tree("runs/mine")
    shutil.rmtree("runs/branch/checkpoint/step-00000020")
    assert command("--resume --name branch") == 0
    assert tree("runs/mine") == before
    same("branch", end_state("mine"))


def test_resume_with_nothing_there_is_an_error(place, capsys):
    assert "runs/none/config.json: cannot be read" in refused(capsys, "--resume --name none")
    assert not Path("runs").exists()
    assert command(f"{LINE} --name mine --steps 10") == 0
    shutil.rmtree("runs/mine/checkpoint")
    before = tree("runs")
    assert "runs/mine: no whole checkpoint" in refused(capsys, "--resume --name mine")
    assert tree("runs") == before


def test_a_resume_needs_nothing_outside_the_run_folder_but_its_data(place):
    assert command(f"{LINE} --name source --steps 20") == 0
    line = f"{LINE} --init-from runs/source"
    assert command(f"{line} --name straight") == 0
    with pytest.MonkeyPatch.context() as patch:
        at(patch, 1, 44, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert command(f"{line} --name cut") == 0
    shutil.rmtree("runs/source")
    assert command("--resume --name cut") == 0
    same("cut", end_state("straight"))
    assert evaluation.main(["loss", "runs/cut"]) == 0


def test_a_resume_takes_the_flags_that_the_run_was_started_with(place, capsys):
    ladder = "--base-horizon 20 --granularity 2 --min-horizon 14"
    assert command(f"{LINE} {ladder} --name mine --steps 40") == 0
    assert command("--resume --name mine --min-horizon 14") == 0
    capsys.readouterr()
    answer = refused(capsys, "--resume --name mine --min-horizon 16")
    assert answer == "--min-horizon 16: runs/mine was started with 14"


def test_time_before_a_stop_is_counted(place, monkeypatch):
    with monkeypatch.context() as patch:
        at(patch, 0, 3, lambda: time.sleep(1.5))
        at(patch, 0, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert command(f"{LINE} --name run --steps 20") == 0
    assert command("--resume --name run") == 0
    assert train.read_json(Path("runs/run/summary.json"))["seconds"] >= 1.5


def test_a_resume_on_other_documents_is_refused(place, capsys):
    assert command(f"{LINE} --name mine --steps 10") == 0
    with gzip.open("shards/c4-train.00002.json.gz", "wt") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    facts = train.read_json(Path("runs/mine/env.json"))
    for fact in ("shards", "sha256_of_names_and_sizes"):
        answer = refused(capsys, "--resume --name mine")
        assert f"--data shards: {fact} is" in answer and "runs/mine/env.json" in answer
        assert "without that entry the change is accepted" in answer
        del facts["data"][fact]
        train.write_json(Path("runs/mine/env.json"), facts)
    assert command("--resume --name mine") == 0


def tree(folder: str) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def refused(capsys, line: str) -> str:
    """The one line on stderr that comes with exit code 2."""
    capsys.readouterr()
    assert command(line) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: ") and error.count("\n") == 1, error
    return error.removeprefix("train.py: ").strip()


def test_the_c4_recipe_resumes_at_the_next_document(place, monkeypatch):
    # The recipe's own command, but for the width of its model.
    small = replace(SIZES["215m"], width=32, heads=2, kv_heads=2, ffn_width=64, layers=1)
    monkeypatch.setitem(model.SIZES, "215m", small)
    bpe_file(Path("shards"))
    line = "--recipe c4-215m --data shards --steps 8 --workers 2 --batch-size 1 --seq-len 128"
    seen: dict[str, list[tuple[int, int, tuple[str, ...]]]] = {}

    def ids(name: str, line: str) -> None:
        original = data.Source.batch

        def batch(self: data.Source, worker: int, step: int) -> data.Batch:
            found = original(self, worker, step)
            seen.setdefault(name, []).append((step, worker, found.ids))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(data.Source, "batch", batch)
            if name == "cut":
                at(patch, 1, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert command(line) == 0

    ids("straight", f"{line} --name straight")
    ids("cut", f"{line} --name cut")
    first = len(seen["cut"])
    ids("resumed", f"{line} --name cut --resume")
    drawn = {name: seen[name][2:] if name != "resumed" else seen[name] for name in seen}
    assert first == 2 + 8 and drawn["cut"] + drawn["resumed"] == drawn["straight"]
    assert len({one for _, _, batch in drawn["straight"] for one in batch}) == 16
    same("cut", end_state("straight"))


# ---------------------------------------------------------------- signals, lost peers


@pytest.mark.parametrize("method", ["autoloco", "ddp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_of_two_saves_all_of_them(place, method, rank):
    line = f"{LINE} --method {method} --steps 60"
    assert command(f"{line} --name straight") == 0
    # The other rank dawdles: it would reach the synchronisation much later.
    slow = f"import time\nat({1 - rank}, 22, lambda: time.sleep(1))"
    stop = f"at({rank}, 23, lambda: [kill(signal.SIGTERM) for _ in range(2)])"
    cut = Launch(f"{line} --name cut", 2, {rank: stop, 1 - rank: slow})
    assert cut.wait() == [0, 0], cut.errors()
    assert "continue with --resume --name cut" in cut.said(0)
    assert cut.said(1) == "" and cut.complaints(1) == []
    assert Launch("--resume --name cut", 2).wait() == [0, 0]
    same("cut", end_state("straight"), layout=False)


def test_the_other_ranks_stop_in_the_middle_of_a_long_local_phase(place):
    line = f"{LINE} --method diloco --base-horizon 2000 --steps 2000"
    began = time.monotonic()
    dawdle = (
        "import time; original = data.Source.batch\n"
        "data.Source.batch = lambda *a: [time.sleep(0.1), original(*a)][1]"
    )
    cut = Launch(f"{line} --name cut", 2, {0: dawdle, 1: "at(1, 5, lambda: kill(signal.SIGTERM))"})
    assert cut.wait() == [0, 0], cut.errors()
    (saved,) = Path("runs/cut/checkpoint").glob("step-*")
    assert 6 <= int(saved.name.removeprefix("step-")) < 1000
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_before_the_first_step_is_kept_in_mind(place, ranks):
    early = (
        "original = train.build_workers\n"
        "train.build_workers = lambda *a: [kill(signal.SIGINT), original(*a)][1]"
    )
    launch = Launch(f"{LINE} --name run", ranks, dict.fromkeys((0, 1), early))
    assert launch.wait() == [0] * ranks, launch.errors()
    assert "saved step-00000000; continue with --resume --name run" in launch.said()
    assert command("--resume --name run") == 0
    assert command(f"{LINE} --name straight") == 0
    same("run", end_state("straight"))


def test_a_signal_before_training_begins_leaves_nothing(place):
    early = "data.open_source = lambda *a, **b: kill(signal.SIGINT)"
    launch = Launch(f"{LINE} --name run", 1, {0: early})
    assert launch.wait() == [1]
    assert launch.complaints() == [
        "train.py: interrupted; what is saved stays, and --resume continues it"
    ]
    assert not Path("runs").exists()


def test_more_signals_while_saving_change_nothing(place):
    again = (
        "original = train.write_file\n"
        "def write(path, content):\n"
        "    'partial' in str(path) and kill(signal.SIGTERM)\n"
        "    return original(path, content)\n"
        "train.write_file = write\n"
        "at(0, 33, lambda: kill(signal.SIGINT))"
    )
    launch = Launch(f"{LINE} --name run --checkpoint-every 50", 1, {0: again})
    assert launch.wait() == [0], launch.errors()
    assert "saved step-00000034" in launch.said()
    assert command("--resume --name run") == 0
    assert command(f"{LINE} --name straight") == 0
    same("run", end_state("straight"))


@pytest.mark.parametrize(
    ("ranks", "lost", "where"),
    [
        (2, 1, "at(1, 25, lambda: kill(signal.SIGKILL))"),
        (2, 0, "at(0, 25, lambda: kill(signal.SIGKILL))"),
        (2, 1, "at(1, 25, lambda: kill(signal.SIGSTOP))"),
        (3, 1, "at(1, 25, lambda: kill(signal.SIGKILL))"),
        (3, 1, "EXCHANGE kill(signal.SIGKILL)"),
        (3, 1, "EXCHANGE kill(signal.SIGSTOP)"),
        (2, 1, "at(1, 25, lambda: sys.exit(7))"),
    ],
)
def test_survivors_stop_within_the_timeout_and_name_the_lost_rank(place, ranks, lost, where):
    if where.startswith("EXCHANGE"):  # in the second half of the third synchronisation
        where = (
            "original, calls = diloco.Wire._gather, []\n"
            "def gather(self, piece):\n"
            "    calls.append(piece)\n"
            f"    calls.count(piece) == 3 and {where.split(' ', 1)[1]}\n"
            "    return original(self, piece)\n"
            "diloco.Wire._gather = gather"
        )
    workers = f"--workers {ranks} --timeout-minutes 0.1"
    launch = Launch(f"{LINE} {workers} --name run", ranks, {lost: where})
    survivors = [rank for rank in range(ranks) if rank != lost]
    deadline = time.monotonic() + 60
    for rank in survivors:
        launch.processes[rank].join(max(0, deadline - time.monotonic()))
    launch.processes[lost].kill()
    codes = launch.wait()
    for rank in survivors:
        assert codes[rank] == 1, (codes, launch.errors(rank))
        (line,) = launch.complaints(rank)
        gone = line.removeprefix(f"train.py: rank {rank}: ")
        if rank == 2 and "holds the store" in gone:
            continue  # rank 0 saw it first, said so and took the store with it
        assert re.search(rf"rank {lost}\b", gone), line
        assert "--timeout-minutes" in line or lost == 0
    assert command(f"{LINE} --workers {ranks} --name straight") == 0
    assert command("--resume --name run") == 0
    same("run", end_state("straight"), layout=False)


def test_the_timeout_does_not_bound_the_local_phase(place):
    slow = "import time\nat(0, 3, lambda: time.sleep(7)); at(1, 3, lambda: time.sleep(8))"
    launch = Launch(f"{LINE} --steps 20 --timeout-minutes 0.1 --name run", 2, {0: slow, 1: slow})
    assert launch.wait() == [0, 0], launch.errors()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["autoloco", "ddp"])
def test_torchrun_restarts_a_killed_rank_and_ends_as_the_undisturbed_run(place, method):
    line = f"{LINE} --method {method}"
    assert command(f"{line} --name straight") == 0
    hook = (
        "if (RANK, ATTEMPT) == (1, 0): at(1, 4, lambda: kill(signal.SIGKILL))\n"  # no checkpoint
        "if (RANK, ATTEMPT) == (0, 1): at(0, 47, lambda: kill(signal.SIGKILL))\n"
        "if (RANK, ATTEMPT) == (1, 2): at(1, 60, lambda: kill(signal.SIGKILL, 0.03))\n"
    )
    launch = under_torchrun(f"{line} --name run", hook, restarts=3)
    out, errors = launch.communicate(timeout=200)
    assert launch.returncode == 0, errors
    first, second = (int(step) for step in re.findall(r"resuming at step (\d+)", out))
    assert first == 40 and second >= 60, (first, second)
    assert out.count("run: ") == 4  # attempts
    same("run", end_state("straight"), layout=False)


@pytest.mark.slow
def test_a_restart_by_torchrun_touches_no_run_of_another_launch(place, capfd):
    assert command(f"{LINE} --name run --steps 20") == 0
    before = tree("runs")
    for line in (f"{LINE} --name run", f"{LINE} --name run --steps 20"):
        launch = under_torchrun(line, restarts=1)
        _, errors = launch.communicate(timeout=200)
        assert launch.returncode == 1
        assert errors.count("train.py: runs/run already holds a run") == 2
        assert tree("runs") == before
    # With --overwrite a rank that dies before the old run is deleted changes nothing either.
    hook = "if RANK == ATTEMPT == 0: kill(signal.SIGKILL)"
    launch = under_torchrun(f"{LINE} --name run --steps 30 --overwrite", hook, restarts=1)
    out, errors = launch.communicate(timeout=200)
    assert launch.returncode == 0, errors
    assert "resuming" not in out and len(rows_of_log("run")) == 4


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_all_ranks(place):
    assert command(f"{LINE} --name straight") == 0
    slow = "original = data.Source.batch\nimport time\n"
    slow += "data.Source.batch = lambda *a: [time.sleep(0.1), original(*a)][1]"
    launch = under_torchrun(f"{LINE} --name run", slow)
    log = Path("runs/run/metrics.jsonl")
    while launch.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 20):
        time.sleep(0.1)
    launch.send_signal(signal.SIGTERM)
    out, errors = launch.communicate(timeout=100)
    assert "continue with --resume --name run" in out, errors
    assert not Path("runs/run/summary.json").exists()
    assert command("--resume --name run") == 0
    same("run", end_state("straight"), layout=False)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one process on one core")
@pytest.mark.parametrize("what", ["stop", "child", "parent"])
def test_the_processes_that_plain_python_starts_stop_together(place, monkeypatch, what):
    line = f"{LINE} --steps 1000 --max-horizon 10".split()
    monkeypatch.delenv("OMP_NUM_THREADS")
    process = subprocess.Popen(
        [sys.executable, train.__file__, *line, "--name", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = Path("runs/run/metrics.jsonl")
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 20):
        time.sleep(0.05)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1:]
    if what == "child":
        os.kill(int(child), signal.SIGKILL)
    else:
        process.send_signal(signal.SIGTERM if what == "stop" else signal.SIGKILL)
    out, errors = process.communicate(timeout=60)  # its pipes are open until the child has ended
    assert "Traceback" not in errors
    assert process.returncode == {"stop": 0, "child": 1, "parent": -signal.SIGKILL}[what]
    if what == "stop":
        assert "continue with --resume --name run" in out
    elif what == "child":
        assert re.search("^train.py: lost rank 1", errors, re.M)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.undo()
    os.chdir(place)
    assert Path("runs/run/checkpoint").exists() and not Path("runs/run/summary.json").exists()
    assert command("--resume --name run") == 0
    assert command(f"{' '.join(line)} --name straight") == 0
    same("run", end_state("straight"), layout=False)


# ---------------------------------------------------------------- disks, files


FAULTS_FULL = "at(%d, 35, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)))"


def test_a_full_disk_leaves_the_earlier_checkpoint_whole_and_says_so(place):
    assert command(f"{LINE} --name straight") == 0
    launch = Launch(f"{LINE} --name run", 1, {0: FAULTS_FULL % 0})
    assert launch.wait() == [1]
    (line,) = launch.complaints()
    assert line.startswith("train.py: runs/run/checkpoint/partial-00000040: File too large: not ")
    assert "the checkpoints before it stay" in line
    saved = sorted(path.name for path in Path("runs/run/checkpoint").glob("step-*"))
    assert saved == ["step-00000020", "step-00000030"]
    assert command("--resume --name run") == 0
    same("run", end_state("straight"))


def test_a_full_disk_of_one_rank_stops_the_others(place):
    launch = Launch(f"{LINE} --name run --timeout-minutes 0.1", 2, {1: FAULTS_FULL % 1})
    assert launch.wait() == [1, 1]
    assert "partial-00000040: File too large" in launch.complaints(1)[0]
    assert "no checkpoint: rank 1 did not save" in launch.complaints(0)[0]
    assert command("--resume --name run") == 0


def test_a_full_disk_under_the_log_is_one_line(place):
    full = "at(0, 35, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)))"
    launch = Launch(f"{LINE} --name run", 1, {0: full})
    assert launch.wait() == [1]
    assert launch.complaints() == ["train.py: runs/run/metrics.jsonl: File too large"]
    assert command(f"{LINE} --name straight") == 0
    assert command("--resume --name run") == 0
    same("run", end_state("straight"))


def change_a_byte(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["shared", "worker-01", "state", "manifest"])
@pytest.mark.parametrize("how", ["truncated", "one byte", "gone"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_continues(place, capsys, name, how):
    assert command(f"{LINE} --name run --steps 40") == 0
    straight, rng = end_state("run"), random.Random(f"{name}{how}")
    last = Path("runs/run/checkpoint/step-00000040")
    suffix = ".json" if name in ("state", "manifest") else ".safetensors"
    path = last / f"{name}{suffix}"
    if how == "gone":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    else:
        change_a_byte(path, rng)
    capsys.readouterr()
    assert command("--resume --name run") == 0
    said = capsys.readouterr()
    assert f"DAMAGED CHECKPOINT runs/run/checkpoint/{last.name} is passed over" in said.err
    assert "resuming at step 30" in said.out
    same("run", straight)
    kept = sorted(path.name for path in last.parent.iterdir())
    assert kept == ["damaged-step-00000040", "step-00000030", "step-00000040"]


def test_two_damaged_checkpoints_are_an_error_and_stay(place, capsys):
    assert command(f"{LINE} --name run --steps 40") == 0
    for path in Path("runs/run/checkpoint").glob("*/shared.safetensors"):
        change_a_byte(path, random.Random(1))
    before = tree("runs")
    capsys.readouterr()
    assert command("--resume --name run") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("DAMAGED CHECKPOINT") for line in lines] == [True, True, False]
    assert "no whole checkpoint" in lines[2]
    assert tree("runs") == before


def test_a_torn_last_line_of_a_log_is_dropped_and_said(place, capsys):
    assert command(f"{LINE} --name straight") == 0
    for log in ("metrics.jsonl", "intervals.jsonl"):
        killed = Launch(
            f"{LINE} --name run --overwrite --checkpoint-every 4",
            1,
            {0: "at(0, 57, lambda: kill(signal.SIGKILL))"},
        )
        assert killed.wait() == [-signal.SIGKILL]
        with open(f"runs/run/{log}", "r+") as file:
            file.truncate(Path("runs/run", log).stat().st_size - 9)
        capsys.readouterr()
        assert command("--resume --name run") == 0
        said = capsys.readouterr().err
        assert said.count(f"runs/run/{log}: the torn last line is dropped") == 1
        same("run", end_state("straight"))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (
            "metrics.jsonl",
            lambda c: c[: c.index(b"\n", 500)],
            "lines, but the checkpoint was saved",
        ),
        ("metrics.jsonl", lambda c: c.replace(b'{"step": 7,', b'{"step": 8,'), "line 7 is damaged"),
        ("metrics.jsonl", lambda c: c.replace(b'{"step": 7,', b'"step": 7,'), "line 7 is damaged"),
        ("metrics.jsonl", lambda c: c.replace(b'{"step": 7,', b"\xff"), "line 7 is damaged"),
        ("intervals.jsonl", lambda c: c.split(b"\n", 1)[1], "lines, but the checkpoint was saved"),
        ("intervals.jsonl", lambda c: b"[]\n" + c.split(b"\n", 1)[1], "line 1 is damaged"),
        ("intervals.jsonl", lambda c: b"", "0 lines, but the checkpoint was saved"),
        ("config.json", lambda c: c[:50], "damaged, not JSON"),
        ("config.json", lambda c: b"[1]", "damaged"),
        ("config.json", lambda c: b'{"config": 3}', "damaged"),
        ("config.json", lambda c: c.replace(b'"steps": 20', b'"steps": "x"'), "damaged"),
        ("config.json", lambda c: c.replace(b'"steps": 20', b'"steps": -20'), "--steps -20"),
        ("config.json", lambda c: c.replace(b'"seed": 0', b'"seeds": 0'), "another version"),
        ("env.json", lambda c: c[:50], "damaged, not JSON"),
        ("env.json", lambda c: b"[]", "damaged"),
    ],
)
def test_a_damaged_run_folder_is_one_line_that_names_the_file(place, capsys, file, change, words):
    assert command(f"{LINE} --name run --steps 20") == 0
    path = Path("runs/run", file)
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    assert path.read_bytes() != whole
    before = tree("runs")
    answer = refused(capsys, "--resume --name run")
    assert answer.startswith(f"runs/run/{file}: ") and words in answer
    assert tree("runs") == before


def test_a_changed_config_is_refused_by_the_checkpoint(place, capsys):
    assert command(f"{LINE} --name run --steps 20") == 0
    path = Path("runs/run/config.json")
    path.write_text(path.read_text().replace('"lr": 0.001', '"lr": 0.003'))
    answer = refused(capsys, "--resume --name run")
    assert answer == "--lr 0.003: runs/run/checkpoint/step-00000020 was saved with 0.001"


def test_damaged_data_met_by_one_rank_ends_all_and_the_line_is_printed_once(place):
    line = f"{LINE} --name run --timeout-minutes 0.1"
    assert command(f"{LINE} --name straight") == 0
    (shard,) = [path for path in Path("shards").iterdir() if "00001" in path.name]
    whole = shard.read_bytes()
    rows = gzip.decompress(whole).split(b"\n")
    rows[30] = b'{"text": 3}'
    shard.write_bytes(gzip.compress(b"\n".join(rows)))
    launch = Launch(line, 2)
    codes = launch.wait()
    assert sorted(codes) == [1, 2]
    (answer,) = launch.complaints(codes.index(2))
    assert answer == f"train.py: {shard}:31: 'text' is not TEXT in valid Unicode"
    assert f"rank {codes.index(2)}" in launch.complaints(codes.index(1))[0]


# ---------------------------------------------------------------- non-finite values, agreement


POISON = """
original = diloco.LocalUpdate.step
def step(self, row, batch):
    original(self, row, batch)
    if any((worker, step) in POISONED for worker, step in [(self.ranks.hosted[row], SEEN[row])]):
        self.replicas[row].flat[0][3] = float("%s")
    SEEN[row] += 1
diloco.LocalUpdate.step = step
"""


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_worker_that_is_not_finite_is_left_out_and_the_run_goes_on(place, value):
    hook = "POISONED, SEEN = {(1, 73)}, [0] * 2\n" + POISON % value
    logs = []
    for ranks in (1, 2):
        name = f"on{ranks}"
        launch = Launch(
            f"{LINE} --method autoloco --name {name}", ranks, dict.fromkeys((0, 1), hook)
        )
        assert launch.wait() == [0] * ranks, launch.errors()
        logs.append(end_state(name, layout=False))
    assert logs[0] == logs[1]
    rows = rows_of_log("on1")[1:]
    (bad,) = [row for row in rows if row["excluded"]]
    assert bad["excluded"] == [1] and bad["drift"] is None and not bad["finite"]
    assert bad["verdict"] == "nonfinite" and bad["step"] - bad["steps"] <= 73 < bad["step"]
    assert bad["update_norm"] > 0 and bad["next_horizon"] < bad["horizon"]
    losses = [json.loads(row)["loss"] for row in logs[0]["metrics"].splitlines()]
    assert [step for step, loss in enumerate(losses) if loss is None] == list(
        range(74, bad["step"])
    )
    # Fresh AdamW state: it counts only the steps since; the other worker's counts them all.
    last = Path("runs/on1/checkpoint/step-00000096")
    for worker, steps in ((0, 96), (1, 96 - bad["step"])):
        saved = train.load_tensors(last / f"worker-{worker:02d}.safetensors")
        assert {float(v) for k, v in saved.items() if k.startswith("step.")} == {float(steps)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interval_without_a_finite_worker_is_discarded(place, ranks):
    hook = "POISONED, SEEN = {(0, 34), (1, 33)}, [0] * 2\n" + POISON % "nan"
    launch = Launch(f"{LINE} --name run", ranks, dict.fromkeys((0, 1), hook))
    assert launch.wait() == [0] * ranks, launch.errors()
    rows = rows_of_log("run")[1:]
    assert [row["excluded"] for row in rows if row["excluded"]] == [[0, 1]]
    assert rows[3]["excluded"] and rows[3]["checksum"] == rows[2]["checksum"]
    assert rows[3]["update_norm"] == 0 and rows[4]["checksum"] != rows[3]["checksum"]
    assert autoloco.main(["replay", "runs/run/intervals.jsonl"]) == 0


def test_stops_between_bad_intervals_keep_the_checkpoint_before_them(place):
    poison = "POISONED, SEEN = {(1, step) for step in range(25, 96)}, [%d] * 2\n" + POISON % "nan"
    line, seen = f"{LINE} --method diloco --name run", 0
    for stop in (34, 44):
        hook = poison % seen + f"at(0, {stop - 1}, lambda: kill(signal.SIGTERM))"
        launch = Launch(line, 1, {0: hook})
        assert launch.wait() == [0], launch.errors()
        line, seen = "--resume --name run", stop
    bad = {
        path.name: train.read_json(path / "state.json")["bad"]
        for path in Path("runs/run/checkpoint").glob("step-*")
    }
    assert bad == {"step-00000020": 0, "step-00000034": 1, "step-00000044": 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stops_after_max_bad_intervals_with_the_checkpoint_before_them(place, ranks):
    poisoned = {(1, step) for step in (25, 31, 47, 52, 60, 61, 62)}
    hook = f"POISONED, SEEN = {poisoned}, [0] * 2\n" + POISON % "nan"
    hooks = dict.fromkeys((0, 1), hook)
    launch = Launch(f"{LINE} --method diloco --name run --max-bad-intervals 3", ranks, hooks)
    assert launch.wait() == [1] * ranks
    (line,) = launch.complaints()
    assert "--max-bad-intervals: 3 in a row" in line and "[1]" in line
    if ranks == 2:
        assert launch.complaints(1) == []
    assert [row["excluded"] for row in rows_of_log("run")[1:]] == [[], [], [1], [1], [1]]
    saved = sorted(path.name for path in Path("runs/run/checkpoint").iterdir())
    assert saved == ["step-00000010", "step-00000020"]


def test_ddp_skips_steps_that_are_not_finite_and_stops_too(place, capsys):
    assert command(f"{LINE} --method ddp --name run --lr 1e30 --checkpoint-every 1") == 1
    error = capsys.readouterr().err
    assert "--max-bad-intervals: 3 in a row" in error and "Traceback" not in error


def test_a_reckless_learning_rate_ends_in_one_line(place, capsys):
    assert command(f"{LINE} --name run --lr 1e30") == 1
    error = capsys.readouterr().err
    assert "--max-bad-intervals: 3 in a row" in error and "Traceback" not in error
    assert command(f"{LINE} --name all --lr 1e30 --max-bad-intervals 99") == 0
    assert end_state("all")["summary"]["intervals"]
    same_again = end_state("all")
    assert command("--resume --name all") == 0
    same("all", same_again)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (
            "original = diloco.LocalUpdate.synchronise\n"
            "def synchronise(self, plan):\n"
            "    statistics = original(self, plan)\n"
            "    if plan.interval == 2: self.shared[0].view(torch.int32)[5] ^= 1\n"
            "    return statistics\n"
            "diloco.LocalUpdate.synchronise = synchronise",
            "shared parameters: rank 1 differs from rank 0",
        ),
        (
            "original = autoloco.complete\n"
            "def complete(rules, state, planned, observation):\n"
            "    state, decision = original(rules, state, planned, observation)\n"
            "    if planned.interval == 2: decision = train.replace(decision, next_horizon=11)\n"
            "    return state, decision\n"
            "autoloco.complete = complete",
            "decision: rank 1 differs from rank 0",
        ),
    ],
)
def test_ranks_that_disagree_stop_at_once_and_the_rank_is_named(place, hook, words):
    launch = Launch(f"{LINE} --name run --workers 3", 3, {1: hook})
    assert launch.wait() == [1, 1, 1]
    assert launch.complaints(0) == [f"train.py: rank 0: {words}"]
    assert launch.complaints(1) == launch.complaints(2) == []
    assert len(rows_of_log("run")) == 2  # header and first interval
    assert command(f"{LINE} --name straight --workers 3") == 0
    assert command("--resume --name run") == 0
    same("run", end_state("straight"), layout=False)


def test_a_run_folder_belongs_to_one_process_at_a_time(place, capsys):
    assert command(f"{LINE} --name run --steps 20") == 0
    before = tree("runs")
    with train.owned(Path("runs/run")):
        for line in (f"{LINE} --name run --overwrite", "--resume --name run"):
            assert refused(capsys, line) == "runs/run: another process is writing this run"
    assert tree("runs") == before


def test_overwrite_deletes_nothing_before_the_new_run_has_its_first_batch(place, capsys):
    assert command(f"{LINE} --name run --steps 20") == 0
    before = tree("runs")
    for shard in Path("shards").glob("c4-train*"):
        lines = gzip.open(shard, "rt").readlines()
        with gzip.open(shard, "wt") as file:
            file.writelines(['{"text": 3}\n'] * len(lines))
    assert "c4-train" in refused(capsys, f"{LINE} --name run --overwrite")
    assert tree("runs") == before


def test_paths_that_cannot_be_a_run_folder_are_refused(place, capsys):
    Path("runs").mkdir()
    Path("runs/file").write_text("mine")
    assert refused(capsys, f"{LINE} --name file --overwrite").startswith("runs/file: ")
    assert command(f"{LINE} --name run --steps 10") == 0
    answer = refused(capsys, f"{LINE} --name run --overwrite --init-from runs/run")
    assert answer == "--init-from runs/run: is the run itself; give another --name"
    assert Path("runs/file").read_text() == "mine"


# ---------------------------------------------------------------- at random


@pytest.mark.slow
def test_runs_killed_at_20_random_points_end_as_the_straight_ones(place, capsys):
    rng = random.Random(7)
    for method, wire in METHODS_AND_WIRES:
        assert command(f"{LINE} --method {method} --wire {wire} --name {method}-{wire}") == 0
    ended = {signal.SIGKILL: 0, signal.SIGTERM: 0}
    for number in range(20):
        method, wire = METHODS_AND_WIRES[number % len(METHODS_AND_WIRES)]
        stop, ranks = (signal.SIGKILL, signal.SIGTERM)[number % 2], 1 + number // 2 % 2
        rank, step, delay = rng.randrange(ranks), rng.randrange(94), rng.uniform(0, 0.02)
        every = rng.choice((1, 1, 3))
        worker = rank if ranks == 2 else rng.randrange(2)
        line = f"{LINE} --method {method} --wire {wire} --name run --checkpoint-every {every}"
        killed = Launch(
            f"{line} --overwrite --timeout-minutes 0.1",
            ranks,
            {rank: f"at({worker}, {step}, lambda: kill({int(stop)}, {delay}))"},
        )
        codes = killed.wait()
        where = f"{stop.name} at step {step} of rank {rank} of {ranks}, {method}, {wire}: {codes}"
        ended[stop] += not Path("runs/run/summary.json").exists()
        if stop == signal.SIGTERM:
            assert codes == [0] * ranks, where
        else:
            assert codes[rank] == -stop and all(code == 1 for code in codes if code >= 0), where
        if any(Path("runs/run/checkpoint").glob("step-*")):
            again = Launch("--resume --name run", 3 - ranks)
            assert again.wait() == [0] * (3 - ranks), f"{where} {again.errors()}"
        else:
            assert "no whole checkpoint" in refused(capsys, "--resume --name run"), where
            assert command(f"{line} --overwrite") == 0
        same("run", end_state(f"{method}-{wire}"), layout=False)
    assert ended == {signal.SIGKILL: 10, signal.SIGTERM: 10}


def flag(name, *values):
    return st.sampled_from([f"--{name}={value}" for value in values])


GOOD = st.one_of(
    flag("steps", 1, 7, 100, 2000, 6490),
    flag("workers", 1, 2, 3, 8, 16),
    flag("seed", 0, 1, 2**31),
    flag("batch-size", 1, 2, 64),
    flag("micro-batch", 0, 1),
    flag("seq-len", 1, 32, 1024),
    flag("lr", 1e-5, 0.5, "3e-4"),
    flag("warmup", 0, 1, 20, 5000),
    flag("base-horizon", 1, 10, 20, 100),
    flag("outer", "average", "nesterov"),
    flag("outer-lr", 0, 0.7, 1),
    flag("outer-momentum", 0, 0.5, 0.99),
    flag("wire", "fp32", "bf16", "int8"),
    flag("dtype", "fp32", "bf16"),
    flag("partition", "iid", "module"),
    flag("eval-every", 0, 3),
    flag("checkpoint-every", 1, 50),
    flag("grad-clip", 0, 1, 0.1),
    flag("link-gbps", 0.1, 100),
    flag("link-ms", 0, 30),
    flag("timeout-minutes", 0.05, 600),
    flag("verdicts", "8=moderate", "3=severe,9=nonfinite", "1=consistent"),
    flag("name", "a", "run.1", "A_b-c"),
    st.sampled_from(
        "--no-adapt --normalise --no-scale-step --no-adjust-momentum --json --compile --overwrite "
        "--no-chat --activation-checkpointing".split()
    ),
)
NAMES = [f"--{field.name.replace('_', '-')}" for field in train.fields(train.Config)]
ODD = st.one_of(
    st.sampled_from(
        "0 -1 1.5 nan inf -inf 1e400 1e-320 99999999999999999999 0x10 1_000 true , = 3x 0x5 x 5x0 "
        "99999999x99999999 8= =severe .. / a/b tiny average".split()
    ),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)
FAULTS_BAD = st.one_of(
    st.builds(lambda name, value: f"{name}={value}", st.sampled_from(NAMES), ODD),
    st.builds(lambda name, value: f"{name}={value}", st.sampled_from(NAMES), ODD),
    st.sampled_from(NAMES),
    st.builds(lambda name, cut: name[:-cut], st.sampled_from(NAMES), st.integers(1, 3)),
    ODD,
)


def test_300_command_lines_are_accepted_or_answered_with_one_line(place, capsys):
    seen, before = {0: 0, 2: 0}, tree(".")

    @hypothesis.settings(
        max_examples=300, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(
        flag("recipe", *train.RECIPES),
        flag("method", *train.METHODS),
        st.lists(GOOD, max_size=3),
        st.one_of(st.just([]), st.lists(FAULTS_BAD, min_size=1, max_size=2)),
    )
    def one(recipe, method, good, bad):
        argv = [recipe, method, *good, *bad, "--dry-run"]
        capsys.readouterr()
        code = train.main(argv)
        said = capsys.readouterr()
        seen[code] += 1
        if code == 2:
            assert said.out == "" and re.fullmatch(r"train\.py: [^\n]+\n", said.err), (argv, said)
        else:
            assert said.out.startswith("recipe ")
            assert all(line.startswith("warning: ") for line in said.err.splitlines())
        assert tree(".") == before, argv

    one()
    assert seen[0] + seen[2] >= 300 and seen[0] >= 0.3 * (seen[0] + seen[2]), seen


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one of the ways of disks, crashes and editors."""
    content = path.read_bytes()
    place = rng.randrange(len(content))
    how = rng.choice(("bit", "bit", "cut", "hole", "junk", "empty", "gone", "folder", "json"))
    if how == "bit":
        change_a_byte(path, rng)
    elif how == "cut":
        path.write_bytes(content[:place])
    elif how == "hole":
        path.write_bytes(content[:place] + bytes(40) + content[place + 40 :])
    elif how == "junk":
        path.write_bytes(content[:place] + rng.randbytes(9) + content[place:])
    elif how in ("gone", "folder"):
        path.unlink()
        if how == "folder":
            path.mkdir()
    else:
        path.write_bytes(b"" if how == "empty" else rng.choice((b"{}", b"[]", b"null", b"7\n")))
    return how


@pytest.mark.slow
def test_120_damaged_files_are_survived_or_answered_with_one_line(place, capsys):
    with pytest.MonkeyPatch.context() as patch:
        at(patch, 1, 34, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert command(f"{LINE} --name run --steps 42") == 0
    shutil.copytree(".", "../whole")
    assert command("--resume --name run") == 0
    straight, rng, seen = end_state("run"), random.Random(3), {0: 0, 2: 0}
    straight_files = {name: straight.pop(name) for name in ("intervals", "metrics", "summary")}
    whole = Path("../whole")
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    files = [f for f in files if f.name not in ("rank.py",)]
    assert len(files) == 3 + 2 * 5 + 4
    for number in range(120):
        shutil.rmtree("runs")
        shutil.rmtree("shards")
        shutil.copytree(whole, ".", dirs_exist_ok=True)
        path = files[number % len(files)]
        how, before = damage(path, rng), tree(".")
        capsys.readouterr()
        code = command("--resume --name run")
        said = capsys.readouterr()
        lines = [x for x in said.err.splitlines() if not x.startswith(("step ", "DAMAGED CHECK"))]
        lines = [x for x in lines if not x.endswith("the torn last line is dropped")]
        where = f"{number}: {path}, {how}: {said.err}"
        seen[code] += 1
        if code == 0:
            assert lines == [], where
            same("run", straight)
            if path.suffix != ".jsonl":
                same("run", straight_files)
        else:
            assert len(lines) == 1 and lines[0].startswith("train.py: "), where
            assert path.parts[0] in lines[0] or path.name in lines[0], where
            if path.parts[0] == "runs":
                assert tree(".") == before, where
    assert seen[0] >= 36 and seen[2] >= 36


# =================================================================================================
# Workers of several ranks
# =================================================================================================


TRAIN = str(Path(train.__file__))
# 15 intervals of 4 steps and more: warm-up, reference, variability, monitor, candidates
RUN = (
    "--data shards --steps 60 --base-horizon 4 --warmup 8 --lr 5e-4 --seq-len 48 --val-documents 6 "
    "--workers 2"
)
FSDP_SHARDED = RUN + " --ranks-per-worker 2"


@pytest.fixture(scope="module", autouse=True)
def fsdp_place(tmp_path_factory):
    """A working directory with C4-shaped documents, some shorter than the sequence."""
    folder, before = tmp_path_factory.mktemp("fsdp"), os.getcwd()
    os.chdir(folder)
    Path("shards").mkdir()
    rng = random.Random(5)
    for name in ("c4-train.00000", "c4-train.00001", "c4-validation.00000"):
        with gzip.open(f"shards/{name}.json.gz", "wt") as file:
            for _ in range(200):
                text = " ".join(rng.choices(("one", "two", "three", "four"), k=rng.randint(5, 30)))
                file.write(json.dumps({"text": text, "url": "", "timestamp": ""}) + "\n")
    torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.chdir(before)


def agent(ranks: int, words: list[str], *options: str) -> subprocess.Popen:
    """One torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, *(options or ["--standalone"]), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(TRAIN).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*agents: subprocess.Popen) -> None:
    for process in agents:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output


def fsdp_run(line: str, name: str, ranks: int = 4) -> str:
    finish(agent(ranks, [TRAIN, *line.split(), "--name", name]))
    return name


def alone(line: str, name: str) -> str:
    assert train.main([*line.split(), "--name", name]) == 0
    return name


def rows(name: str, file: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in Path("runs", name, f"{file}.jsonl").open()]


def decisions(name: str) -> list[tuple]:
    keys = ("interval", "steps", "horizon", "accepted", "phase", "verdict", "next_horizon")
    return [tuple(row[key] for key in (*keys, "tokens")) for row in rows(name, "intervals")[1:]]


def farthest(one: str, other: str, key: str = "loss") -> float:
    """Largest difference of a metric over all steps."""
    pairs = zip(rows(one), rows(other), strict=True)
    return max(abs(a[key] - b[key]) for a, b in pairs)


def summary(name: str) -> dict:
    return json.loads(Path("runs", name, "summary.json").read_text())


def fsdp_end_state(name: str) -> dict:
    """All that a run leaves, but for times and what rank 0 sent."""
    last = sorted(Path("runs", name, "checkpoint").glob("step-*"))[-1]
    drop = ("local_seconds", "sync_seconds")
    return {
        "tensors": {f.name: f.read_bytes() for f in sorted(last.glob("*.safetensors"))},
        "intervals": [
            {key: value for key, value in row.items() if key not in drop}
            for row in rows(name, "intervals")
        ],
        "metrics": rows(name),
        "summary": {k: v for k, v in summary(name).items() if k != "seconds"},
    }


@pytest.fixture(scope="module")
def sharded(fsdp_place):
    """Two workers of two ranks each."""
    return fsdp_run(FSDP_SHARDED, "sharded")


@pytest.fixture(scope="module")
def whole(fsdp_place):
    """The same two workers in one process."""
    return alone(RUN, "whole")


# ---------------------------------------------------------------- two workers of two ranks


def test_two_workers_of_two_ranks_decide_and_lose_as_two_unsharded_workers_do(sharded, whole):
    assert decisions(sharded) == decisions(whole)
    assert {row[2] for row in decisions(sharded)} == {4, 6}  # it did decide
    assert farthest(sharded, whole) < 1e-4
    assert farthest(sharded, whole, "grad_norm") < 1e-3
    assert farthest(sharded, whole, "tokens") == 0
    assert summary(sharded)["val_loss"] == pytest.approx(summary(whole)["val_loss"], abs=1e-4)
    assert summary(sharded)["payload_bytes"] == summary(whole)["payload_bytes"]
    for one, other in zip(
        rows(sharded, "intervals")[1:], rows(whole, "intervals")[1:], strict=True
    ):
        for key in ("drift", "coherence", "update_norm"):  # sums over both dimensions of the mesh
            assert one[key] == pytest.approx(other[key], rel=1e-3)


def test_loss_of_a_sharded_run_equals_its_summary(sharded):
    measured = evaluation.loss(Path("runs", sharded))
    assert measured["val_loss"] == pytest.approx(summary(sharded)["val_loss"], abs=1e-6)


def test_several_workers_a_rank_together_with_sharding_are_refused(monkeypatch, capsys):
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    line = "--workers {} --ranks-per-worker {} --name refused"
    for workers, shards in ((4, 2), (2, 3), (4, 4)):
        assert train.main(line.format(workers, shards).split()) == 2
        assert capsys.readouterr().err.startswith("train.py: --ranks-per-worker")
    assert not Path("runs/refused").exists()


@pytest.mark.slow
def test_a_resume_in_the_middle_of_an_interval_equals_the_straight_run_bit_for_bit(sharded):
    line = [*FSDP_SHARDED.split(), "--name", "interrupted"]
    torchrun = agent(4, [TRAIN, *line])
    log = Path("runs/interrupted/metrics.jsonl")
    while not log.exists() or len(log.read_text().splitlines()) < 12:
        assert torchrun.poll() is None, torchrun.communicate()
        time.sleep(0.01)
    time.sleep(random.Random(0).random() / 5)
    torchrun.send_signal(signal.SIGTERM)
    torchrun.communicate(timeout=120)
    (where,) = Path("runs/interrupted/checkpoint").glob("step-*")
    assert 12 < int(where.name.removeprefix("step-")) < 60
    assert len(list(where.glob("worker-*-shard-*.safetensors"))) == 4
    fsdp_run("--resume", "interrupted")
    assert fsdp_end_state("interrupted") == fsdp_end_state(sharded)


@pytest.mark.slow
def test_activation_checkpointing_and_validation_change_nothing(sharded):
    fsdp_run(FSDP_SHARDED + " --activation-checkpointing --eval-every 1", "recomputed")
    assert farthest("recomputed", sharded) <= 1e-6
    assert decisions("recomputed") == decisions(sharded)


@pytest.mark.slow
def test_two_agents_give_the_result_of_one_bit_for_bit(sharded):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    options += ["--rdzv-id", "nodes", "--local-addr", "127.0.0.1"]
    words = [TRAIN, *FSDP_SHARDED.split(), "--name", "nodes"]
    finish(*[agent(2, words, *options) for _ in range(2)])
    assert fsdp_end_state("nodes") == fsdp_end_state(sharded)


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_of_a_sharded_worker_is_named(place, number):
    line = f"{LINE} --workers 1 --ranks-per-worker 2 --timeout-minutes 0.1 --name run"
    launch = Launch(line, 2, {1: f"at(0, 25, lambda: kill(signal.{number}))"})
    launch.processes[0].join(60)
    launch.processes[1].kill()
    assert launch.wait()[0] == 1
    (line,) = launch.complaints(0)
    assert "rank 1" in line and "--timeout-minutes" in line


@pytest.mark.slow
def test_sharded_int8_and_bf16_runs_stay_close_to_unsharded_ones():
    # With bf16 the shards also gather embedding and norms in it, which one process keeps in fp32.
    cases = (("int8", "--wire int8", 1e-3), ("bf16", "--dtype bf16 --wire bf16", 2e-2))
    for name, options, bound in cases:
        fsdp_run(f"{FSDP_SHARDED} {options}", f"sharded-{name}")
        alone(f"{RUN} {options}", f"whole-{name}")
        difference = summary(f"sharded-{name}")["val_loss"] - summary(f"whole-{name}")["val_loss"]
        assert abs(difference) < bound
        logged = rows(f"sharded-{name}", "intervals")[1]["payload_bytes"]
        config, _ = train.parse(f"{FSDP_SHARDED} {options}".split())
        assert logged == train.payload_per_synchronisation(config)


@pytest.mark.slow
def test_sharded_data_parallel_equals_unsharded():
    line = "--method ddp --steps 24 --base-horizon 8"
    fsdp_run(f"{FSDP_SHARDED} {line}", "sharded-ddp")
    alone(f"{RUN} {line}", "whole-ddp")
    assert farthest("sharded-ddp", "whole-ddp") < 1e-4


@pytest.mark.slow
def test_compiled_blocks_lose_the_same():
    line = "--steps 8 --base-horizon 4"
    fsdp_run(f"{FSDP_SHARDED} {line} --compile", "sharded-compiled")
    alone(f"{RUN} {line}", "whole-short")
    assert farthest("sharded-compiled", "whole-short") < 1e-4


@pytest.mark.slow
def test_a_sharded_run_starts_from_a_sharded_run_and_from_its_export(sharded):
    assert evaluation.main(["export", f"runs/{sharded}", "exported"]) == 0
    line = "--steps 8 --base-horizon 4 --init-from "
    fsdp_run(f"{FSDP_SHARDED} {line}runs/{sharded}", "from-run")
    fsdp_run(f"{FSDP_SHARDED} {line}exported", "from-export")
    alone(f"{RUN} {line}runs/{sharded}", "whole-from-run")
    assert rows("from-run") == rows("from-export")
    assert farthest("from-run", "whole-from-run") < 1e-5


# ---------------------------------------------------------------- against one process, in fp64

# Four ranks share one worker with two rows a batch, of a model in which some ranks hold no element
# of some parameters: 6 rows over 4 ranks are 2, 2, 2, 0.
FSDP_RANK = """
import json, sys
from dataclasses import replace
import torch
import autoloco, data, diloco, model, train

torch.set_default_dtype(torch.float64)
def main():  # a global Ranks would outlive the process group
    config, _ = train.parse(sys.argv[1:])
    ranks, _ = diloco.connect(1, 4, 1.0)
    source = train.open_source(config)
    found = {"differences": {}, "rows": len(source.batch(0, 0).inputs), "aliased": True}

    def trained(config, ranks, steps=12):
        workers = train.build_workers(config, ranks, source)
        workers.begin(steps)
        for step in range(steps):
            workers.set_lr(1e-2)
            workers.step(0, source.batch(0, step))
        return workers, workers._collect(torch.zeros(1, 1))[0][0]

    def full(p):
        return p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()

    for tied in True, False:
        model.SIZES["tiny"] = model.ModelConfig(264, 6, 2, 1, 1, 5, tied=tied)
        whole, expected = trained(replace(config, ranks_per_worker=1), diloco.Ranks(0, 1, 1))
        for options in {}, {"micro_batch": 1}, {"activation_checkpointing": True}:
            workers, records = trained(replace(config, **options), ranks)
            differences = [(records - expected).abs().max()]
            for p, q in zip(workers.parameters, whole.parameters, strict=True):
                differences.append((full(p) - full(q)).abs().max())
            found["differences"][tied, *options] = float(max(differences))
        # what FSDP2 computes with is the memory that a synchronisation writes to
        for flat, p in zip(workers.replicas[0].flat, workers.parameters, strict=True):
            found["aliased"] &= flat.data_ptr() == diloco.local_tensor(p).data_ptr()
    found["numels"] = [diloco.local_tensor(p).numel() for p in workers.parameters]
    found["predicted"] = list(train.shard_numels(config, ranks.shard).values())
    torch.save(found, f"found-{ranks.rank}.pt")

main()
diloco.disconnect()
"""


def test_sharded_training_equals_unsharded_with_empty_shards_and_ranks_without_rows():
    Path("rank.py").write_text(FSDP_RANK)
    finish(agent(4, ["rank.py", *RUN.split(), "--ranks-per-worker", "4", "--workers", "1"]))
    for rank in range(4):
        found = torch.load(f"found-{rank}.pt")
        assert found["rows"] == 2
        assert found["numels"] == found["predicted"] and found["aliased"]
        assert len(found["differences"]) == 6
        assert max(found["differences"].values()) < 1e-12, found["differences"]
    assert found["numels"].count(0) > 3


# ---------------------------------------------------------------- cost before you pay


def cost(line: str) -> dict:
    config, _ = train.parse([*line.split(), "--dry-run"])
    return train.dry_run(config)


def test_eight_workers_of_8b_fit_on_eight_nodes_of_eight_80_gb_gpus(capsys):
    result = cost("--recipe ultrachat-8b --ranks-per-worker 8")
    assert sum(result["memory_bytes"].values()) < train.FITS
    assert "memory on 64" in (said := capsys.readouterr().out) and "fits in 80" in said
    cost("--recipe ultrachat-8b")
    assert "does not fit in 80" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", train.RECIPES)
def test_a_dry_run_compares_all_methods_within_five_seconds(recipe, capsys):
    began = time.process_time()
    result = cost(f"--recipe {recipe} --link-gbps 10 --link-ms 20")
    assert time.process_time() - began < 5
    assert list(result)[:4] == ["synchronisations", "intervals", "payload_bytes", "saved"]
    table, said = result["methods"], capsys.readouterr().out
    assert list(table) == list(train.METHODS)
    assert table["autoloco"]["synchronisations"] == result["synchronisations"]
    assert table["ddp"]["synchronisations"] == train.RECIPES[recipe].get("steps", 2000)
    for word in ("input positions", "parameters", "memory on", "payload", "utilisation", *table):
        assert word in said
    for row in table.values():
        each = row["payload_bytes"] / row["synchronisations"]
        hours = row["synchronisations"] * (each * 8 / 10e9 + 0.02) / 3600
        assert row["hours"] == pytest.approx(hours)
        assert 0 < row["utilisation"] < 1


def test_utilisation_is_the_share_of_computing_in_the_whole_time():
    result = cost("--steps 3600 --step-seconds 1 --method diloco --link-ms 1800 --link-gbps 1e9")
    row = result["methods"]["diloco"]  # 180 synchronisations of 1.8 s beside 3600 s
    assert row["synchronisations"] == 180 and row["hours"] == pytest.approx(0.09)
    assert row["utilisation"] == pytest.approx(3600 / (3600 + 324))


def test_estimated_memory_of_states_is_what_two_workers_of_a_process_hold():
    config, _ = train.parse([*RUN.split()])
    source = train.open_source(config)
    workers = train.build_workers(config, diloco.Ranks(0, 1, 2), source)
    workers.begin(1)
    for row in range(2):
        workers.step(row, source.batch(row, 0))
    held = [*workers.shared, *workers.momentum]
    held += [tensor for replica in workers.replicas for tensor in replica.tensors]
    held += [p.grad for p in workers.parameters]
    for replica in workers.replicas:
        held += [
            value for state in replica.state.values() for value in state.values() if value.dim()
        ]
    assert sum(4 * t.numel() for t in held) == train.memory_per_gpu(config, 2)["states"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("switch", ["", "--activation-checkpointing"])
def test_estimated_memory_of_activations_is_what_autograd_keeps(dtype, switch, monkeypatch):
    size = model.ModelConfig(264, 256, 3, 4, 2, 512, tied=True)
    monkeypatch.setitem(model.SIZES, "tiny", size)
    config, _ = train.parse(f"--dtype {dtype} --seq-len 1024 {switch}".split())
    network = model.Transformer(size, config.activation_checkpointing)
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
    tokens = 2 * 1024
    if switch:  # one layer is recomputed at a time, later
        held += (
            train.memory_per_gpu(replace(config, activation_checkpointing=False), 1)["activations"]
            / 3
        )
    elif dtype == "bf16":
        held -= 2 * sum(p.numel() for name, p in network.named_parameters() if "blocks" in name)
    estimate = train.memory_per_gpu(config, 1)["activations"]
    assert held + 8 * size.width * tokens == pytest.approx(estimate, rel=0.15)


# =================================================================================================
# Evaluation (E.3)
# =================================================================================================


# ---------------------------------------------------------------- what eval.py measures
# Sabotages, each with the test that goes red: an answer scored one token late, or the cache of one
# answer used for the next (..._is_the_sum_of_the_models_log_softmax); rows of a batch not dropped
# from the cache (..._as_alone); no begin token, or two (..._training_reads); rolling windows that
# predict a token twice (..._predicts_each_token_once); draws from the global generator
# (..._leaves_the_global_generator_alone); the hub asked about a local file (..._nothing_looked_up).


WORDS = ("alpha", "beta", "gamma", "delta")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs on tiny local files: `plain` on texts, `chat` fine-tuned from it."""
    home = tmp_path_factory.mktemp("eval")
    rng = random.Random(0)
    for part, count in (("train", 40), ("validation", 6)):
        with gzip.open(home / f"c4-{part}.00000-of-00001.json.gz", "wt") as file:
            for _ in range(count):
                file.write(json.dumps({"text": " ".join(rng.choices(WORDS, k=20))}) + "\n")
    for part, count in (("train", 40), ("test", 6)):
        folder = home / "chat"
        folder.mkdir(exist_ok=True)
        with open(folder / f"{part}.jsonl", "w") as file:
            for _ in range(count):
                at = rng.randrange(3)
                talk = [{"role": "user", "content": WORDS[at]}]
                talk += [{"role": "assistant", "content": WORDS[at + 1]}]
                file.write(json.dumps({"messages": talk}) + "\n")
    # Enough for texts that differ and, in chat, for turns that end, whatever a CPU's rounding: of
    # five seeds and rates all did after 200 steps, four after 120.
    common = "--workers 1 --batch-size 2 --seq-len 64 --val-documents 6 --warmup 10"
    plain = f"--name plain --steps 120 --data {home} --lr 5e-3 {common}"
    chat = "--recipe tiny-sft --name chat --steps 300 --init-from runs/plain"
    chat += f" --data {home}/chat --lr 2e-3"
    before = Path.cwd(), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    os.chdir(home)
    for line in (plain, f"{chat} {common}"):
        assert train.main(line.split()) == 0
    yield home / "runs"
    os.chdir(before[0])
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before[1], strict=True):
        signal.signal(number, handler)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """The addresses that were looked up; what `tasks` switches off is on again afterwards."""
    pytest.importorskip("lm_eval")
    import datasets
    import evaluate
    from huggingface_hub import constants

    for module, name in (
        (constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (evaluate.config, "HF_EVALUATE_OFFLINE"),
    ):
        monkeypatch.setattr(module, name, False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = []

    def refuse(host, *_, **__):
        found.append(host)
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return found


def local_task(folder, name, rows, **settings):
    """Write NAME.yaml (JSON is YAML) and its data NAME.json."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text("\n".join(json.dumps(row) for row in rows))
    files = {"test": str(folder / f"{name}.json")}
    task = dict(task=name, dataset_path="json", dataset_kwargs={"data_files": files})
    task |= dict(test_split="test", doc_to_text="{{question}}") | settings
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def choice_task(folder, name, rows):
    local_task(
        folder,
        name,
        rows,
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}",
        metric_list=[{"metric": "acc", "aggregation": "mean"}],
    )


def text_task(folder, name, rows, **generation):
    local_task(
        folder,
        name,
        rows,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": [], "max_gen_toks": 12} | generation,
        metric_list=[{"metric": "exact_match", "aggregation": "mean"}],
    )


def measured(run, names, folder, *options):
    """Rows that the command writes for tasks."""
    line = ["tasks", str(run), "--tasks", names, "--task-path", str(folder), *options]
    assert evaluation.main(line) == 0
    return json.loads((run / "tasks.json").read_text())


def plain_nats(network, context, answer):
    """log p(answer | context) from one forward pass without a cache, token by token."""
    ids = [*context, *answer]
    with torch.no_grad():
        logp = network.logits(torch.tensor([ids]))[0].double().log_softmax(-1)
    return sum(float(logp[at - 1, ids[at]]) for at in range(len(context), len(ids)))


def plain_greedy(network, ids, most):
    """The likeliest tokens, the whole text read anew for each."""
    new = []
    for _ in range(most):
        with torch.no_grad():
            new.append(int(network.logits(torch.tensor([[*ids, *new]]))[0, -1].argmax()))
    return new


@pytest.fixture
def plain(runs):
    """Config, network and begin token of the run on texts."""
    config, network = evaluation.open_run(runs / "plain")
    return config, network, evaluation.open_tokenizer(config)[1]


@pytest.fixture
def wild():
    """A model whose likeliest token depends on every one before it."""
    network = model.Transformer(model.SIZES["tiny"])
    network.init_weights(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.mul_(6 if model.decayed(name, parameter) else 1)
    return network


def harness(plain, batch_size=4):
    pytest.importorskip("lm_eval")
    config, network, _ = plain
    return evaluation.harness_model(network, config, batch_size)


def requests(*arguments):
    return [SimpleNamespace(args=args, task_name="t") for args in arguments]


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_the_loss_of_a_run_is_the_one_in_its_summary(runs, name, capsys):
    summary = json.loads((runs / name / "summary.json").read_text())
    found = evaluation.loss(runs / name)
    assert found["val_loss"] == summary["val_loss"]
    assert found["bits_per_byte"] == summary["bits_per_byte"]
    assert evaluation.main(["loss", str(runs / name)]) == 0
    assert capsys.readouterr().out.startswith(f"{summary['val_loss']:.4f} nats a token")


def test_the_loss_after_fine_tuning_counts_the_assistants_tokens_only(runs):
    lines = (runs.parent / "chat" / "test.jsonl").read_text().splitlines()
    answers = [json.loads(line)["messages"][1]["content"] for line in lines]
    # The end-of-turn token is a target too.
    assert evaluation.loss(runs / "chat")["val_tokens"] == sum(len(a) + 1 for a in answers)


def test_an_answers_log_likelihood_is_the_sum_of_the_models_log_softmax(plain):
    _, network, begin = plain
    context = [begin, *b"alpha be"]
    likeliest = plain_greedy(network, context, 3)
    answers = [[*b"ta"], [*b"x"], [*b"gamma delta"], likeliest, []]
    found = evaluation.log_likelihoods(network, context, answers)
    for answer, (nats, greedy) in zip(answers, found, strict=True):
        assert nats == pytest.approx(plain_nats(network, context, answer), abs=1e-4)
        assert greedy == (answer == likeliest[: len(answer)])
    again = evaluation.log_likelihoods(network, context, answers[::-1])
    assert again[::-1] == found  # no answer reads another one's cache


def test_the_harness_reads_what_training_reads(plain):
    config, network, begin = plain
    found = harness(plain).loglikelihood(requests(("alpha be", "ta"), ("", "beta")))
    assert found[0][0] == pytest.approx(plain_nats(network, [begin, *b"alpha be"], b"ta"), abs=1e-4)
    assert found[1][0] == pytest.approx(plain_nats(network, [begin], b"beta"), abs=1e-4)
    # A special token's name is text like any other, as in training.
    assert harness(plain).tok_encode("<|eot_id|>") == [begin, *b"<|eot_id|>"]


def test_a_long_context_loses_its_beginning_and_is_counted(plain):
    config, network, begin = plain
    short = model.Transformer(dataclasses.replace(network.config, max_seq_len=16))
    short.load_state_dict(network.state_dict())
    lm = harness((config, short, begin))
    text, answer = "alpha beta gamma delta", "zz"
    [(nats, _)] = lm.loglikelihood(requests((text, answer)))
    # 15 tokens of context and the first of the answer are all that the model reads.
    assert nats == pytest.approx(
        plain_nats(network, text[-15:].encode(), answer.encode()), abs=1e-4
    )
    [written] = lm.generate_until(requests((text, {"max_gen_toks": 100})))
    ids = plain_greedy(network, text[-8:].encode(), 8)
    assert written.encode() == bytes(ids)[: len(written)] and len(written) == 8
    assert lm.cut == 2
    with pytest.raises(ValueError, match="17 tokens, too many"):
        lm.loglikelihood(requests(("a", "b" * 17)))


def test_the_rolling_log_likelihood_is_the_sum_over_the_text(plain):
    _, network, begin = plain
    text = "alpha beta delta"
    [nats] = harness(plain).loglikelihood_rolling(requests((text,)))
    assert nats == pytest.approx(plain_nats(network, [begin], text.encode()), abs=1e-3)


def test_a_rolling_log_likelihood_in_windows_predicts_each_token_once(plain):
    config, network, begin = plain
    short = model.Transformer(dataclasses.replace(network.config, max_seq_len=16))
    short.load_state_dict(network.state_dict())
    text = b"alpha beta delta gam"  # 20 tokens: 16 after the begin token, then 4 after 13 others
    [nats] = harness((config, short, begin)).loglikelihood_rolling(requests((text.decode(),)))
    by_hand = plain_nats(network, [begin], text[:16]) + plain_nats(network, text[3:16], text[16:])
    assert nats == pytest.approx(by_hand, abs=1e-3)


def test_generation_with_the_cache_is_greedy_without_it(wild):
    [new] = evaluation.generate(wild, torch.tensor([[256, *b"beta"]]), 40, lambda new: False)
    assert new == plain_greedy(wild, [256, *b"beta"], 40)
    assert len(set(new)) > 20


def test_rows_of_a_batch_that_end_at_different_steps_write_the_same_as_alone(wild):
    prompts = [[256, *text] for text in (b"alpha", b"gamma", b"delta", b"beta ")]
    alone = [plain_greedy(wild, ids, 12) for ids in prompts]
    lengths = (3, 12, 1, 7)
    ends = {tuple(new[:length]) for new, length in zip(alone, lengths, strict=True)}
    together = evaluation.generate(wild, torch.tensor(prompts), 12, lambda new: tuple(new) in ends)
    assert together == [new[:length] for new, length in zip(alone, lengths, strict=True)]


def test_a_text_ends_before_its_first_stop_and_keeps_its_place(plain):
    _, network, begin = plain
    texts = ["alpha", "be", "gamma", "a much longer one", "delta"]
    whole = [bytes(plain_greedy(network, [begin, *text.encode()], 12)).decode() for text in texts]
    stop = whole[0][4:6]
    options = {"until": [stop], "max_gen_toks": 12}
    for batch_size in (1, 4):
        found = harness(plain, batch_size).generate_until(requests(*((t, options) for t in texts)))
        assert found == [text.split(stop)[0] for text in whole]
    with pytest.raises(ValueError, match="greedy"):
        harness(plain).generate_until(requests(("a", {"do_sample": True, "temperature": 1.0})))


def test_a_rendered_conversation_has_the_tokens_that_training_reads():
    encoding, _ = data.load_tokenizer("bytes", [])
    talk = [("system", "Be brief."), ("user", " 1+1? "), ("assistant", "2"), ("user", "So?\n")]
    messages = [{"role": role, "content": content} for role, content in talk]
    ids, _ = data.encode_chat(encoding, talk, 10_000)
    rendered = encoding.encode(evaluation.render_chat(messages), allowed_special="all")
    header = rendered[len(ids) :]
    assert rendered[: len(ids)] == ids.tolist()
    assert encoding.decode(header) == "<|start_header_id|>assistant<|end_header_id|>\n\n"
    # A turn that is left open goes on: an answer's beginning that the task gives.
    text = evaluation.render_chat([*messages, {"role": "assistant", "content": "It is"}], False)
    assert encoding.encode(text, allowed_special="all") == [*rendered, *b"It is"]


def test_local_tasks_give_the_numbers_worked_out_by_hand_with_nothing_looked_up(
    plain, runs, offline, tmp_path, capsys
):
    _, network, begin = plain
    folder = tmp_path / "tasks"
    choices = [("alpha ", ["beta", "xqz"]), ("a list", ["of", "gamma", "!"]), ("be", ["ta", "at"])]
    rows = []
    for right, (question, answers) in zip((True, False, True), choices, strict=True):
        # The library puts a blank before an answer, and moves one that ends a question there.
        context = [begin, *question.rstrip().encode()]
        blanks = " " * (1 + question.endswith(" "))
        nats = [plain_nats(network, context, f"{blanks}{a}".encode()) for a in answers]
        best = nats.index(max(nats))
        answer = best if right else (best + 1) % len(answers)
        rows.append({"question": question, "choices": answers, "answer": answer})
    choice_task(folder, "local_choice", rows)
    written = {}
    for question in ("alpha", "gamma", "be", "delta"):
        ids = [begin, *question.encode()]
        written[question] = bytes(plain_greedy(network, ids, 12)).decode()
    stop = written["alpha"][5]
    answers = {question: text.split(stop)[0] for question, text in written.items()}
    rows = [{"question": q, "answer": answers[q] if q != "gamma" else "no"} for q in answers]
    text_task(folder, "local_text", rows, until=[stop])

    found = measured(runs / "plain", "local_choice,local_text", folder)
    assert offline == []
    common = {"shots": 0, "limit": None, "chat": False, "checkpoint": "step-00000120"}
    common |= {"filter": "none", "lm_eval": sys.modules["lm_eval"].__version__}
    # Of n zeros and ones with mean p the standard error is sqrt(p (1 - p) / (n - 1)).
    choice = {"task": "local_choice", "metric": "acc", "value": 2 / 3, "stderr": 1 / 3, "n": 3}
    text = {"task": "local_text", "metric": "exact_match", "value": 0.75, "stderr": 0.25, "n": 4}
    assert found == [pytest.approx(choice | common), pytest.approx(text | common)]
    printed = capsys.readouterr().out
    assert "| local_choice | acc | 0.6667 | 0.3333 | 3 | 0 |" in printed
    assert "| local_text | exact_match | 0.7500 | 0.2500 | 4 | 0 |" in printed

    # Asked again, a task's rows are replaced; those of other tasks of this checkpoint stay.
    [text_row, choice_row] = measured(runs / "plain", "local_choice", folder, "--limit", "1")
    assert text_row == pytest.approx(text | common)
    assert (choice_row["n"], choice_row["limit"], choice_row["stderr"]) == (1, 1, None)
    older = [choice_row | {"checkpoint": "step-00000040"}]
    (runs / "plain" / "tasks.json").write_text(json.dumps(older))
    [row] = measured(runs / "plain", "local_text", folder)
    assert row["task"] == "local_text"


def test_a_fine_tuned_run_is_asked_in_the_chat_format(runs, offline, tmp_path):
    config, network = evaluation.open_run(runs / "chat")
    encoding, _, ends = evaluation.open_tokenizer(config)
    assert [encoding.decode([end]) for end in sorted(ends)] == ["<|end_of_text|>", "<|eot_id|>"]
    answers = {}
    for question in ("alpha", "beta"):
        ids, _ = data.encode_chat(encoding, [("user", question), ("assistant", "")], 10_000)
        new = plain_greedy(network, ids[:-1].tolist(), 12)
        assert encoding.encode_single_token("<|eot_id|>") in new  # the turn ends
        answers[question] = encoding.decode(new).split("<|eot_id|>")[0]
    rows = [{"question": question, "answer": answer} for question, answer in answers.items()]
    text_task(tmp_path / "tasks", "talk", rows)
    [row] = measured(runs / "chat", "talk", tmp_path / "tasks")
    assert row["chat"] and row["value"] == 1.0
    [row] = measured(runs / "chat", "talk", tmp_path / "tasks", "--no-chat")
    assert not row["chat"] and row["value"] < 1.0


def test_a_group_speaks_for_its_tasks_and_the_papers_metrics_for_the_others(
    runs, offline, tmp_path
):
    folder = tmp_path / "tasks"
    for name, count in (("one", 1), ("two", 3)):
        text_task(folder, name, [{"question": "a", "answer": "no"}] * count)
    group = {"group": "both", "task": ["one", "two"]}
    group["aggregate_metric_list"] = [{"metric": "exact_match", "weight_by_size": True}]
    (folder / "both.yaml").write_text(json.dumps(group))
    (folder / "scores.py").write_text(
        "def process(doc, results):\n"
        "    names = ('prompt_level_strict_acc', 'prompt_level_loose_acc', 'inst_level_acc')\n"
        "    return dict(zip(names, (0.0, 1.0, 0.5)))\n"
    )
    text_task(folder, "follows", [{"question": "a", "answer": ""}])
    file = folder / "follows.yaml"
    file.write_text(file.read_text()[:-1] + ', "process_results": !function scores.process}')
    rows = measured(runs / "plain", "both,follows", folder)
    own = [row for row in rows if row["task"] in ("one", "two", "both", "follows")]
    found = {(row["task"], row["metric"]): (row["value"], row["n"]) for row in own}
    assert found == {
        ("follows", "prompt_level_strict_acc"): (0.0, 1),
        ("follows", "prompt_level_loose_acc"): (1.0, 1),
        ("both", "exact_match"): (0.0, 4),
    }
    assert offline == []


def test_a_task_that_runs_the_models_code_needs_a_flag(
    runs, offline, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    folder = tmp_path / "tasks"
    text_task(folder, "programs", [{"question": "def f():", "answer": ""}])
    file = folder / "programs.yaml"
    file.write_text(file.read_text()[:-1] + ', "unsafe_code": true}')
    line = ["tasks", str(runs / "plain"), "--tasks", "programs", "--task-path", str(folder)]
    assert evaluation.main(line) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "0"
    assert evaluation.main([*line, "--allow-code"]) == 0
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"


def test_a_missing_library_is_one_line_with_the_command_that_installs_it(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluation.main(["tasks", str(runs / "plain"), "--tasks", "bbh"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'lm_eval[ifeval]==" in error


def test_an_unknown_task_is_named_with_near_ones_and_the_papers_names_are_the_librarys(
    runs, offline, tmp_path, capsys
):
    from lm_eval import __version__

    text_task(tmp_path / "tasks", "own", [{"question": "a", "answer": ""}])
    line = ["tasks", str(runs / "plain"), "--tasks", "ifeval,mmlu_pro,bbh,humaneval_plus,ifbenhc"]
    assert evaluation.main([*line, "--task-path", str(tmp_path / "tasks")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and offline == []
    # The first name that is not known: the four before are.
    assert f"--tasks ifbenhc: lm_eval {__version__} has no such task" in error
    assert "ifeval" in error and "tasks has own" in error


def test_data_out_of_reach_is_one_line_and_is_not_waited_for(runs, offline, tmp_path, capsys):
    far = dict(dataset_path="someone/something", dataset_kwargs={}, doc_to_target="x")
    local_task(tmp_path / "tasks", "far", [], output_type="generate_until", **far)
    line = ["tasks", str(runs / "plain"), "--tasks", "far", "--task-path", str(tmp_path / "tasks")]
    assert evaluation.main(line) == 2
    error = capsys.readouterr().err
    assert error.startswith("eval.py: --tasks far: ") and "someone/something" in error
    assert error.count("\n") == 1 and offline == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("loss nowhere", "nowhere/config.json: cannot be read"),
        ("tasks nowhere --tasks bbh", "nowhere/config.json: cannot be read"),
        ("tasks runs/plain", "--tasks"),
        ("tasks runs/plain --tasks bbh --limit 0", "--limit"),
        ("tasks runs/plain --tasks bbh --batch-size 0", "--batch-size"),
        ("tasks runs/plain --tasks bbh --chat", "--chat: runs/plain was not trained"),
        ("tasks runs/plain --tasks bbh --task-path nowhere", "--task-path nowhere: is no folder"),
        ("tasks runs/plain --tasks bbh --limits 3", "--limits"),
        ("sample runs/plain --tokens 0", "--tokens: at least 1"),
        ("sample runs/plain --temperature -1", "--temperature"),
        (f"sample runs/plain --prompt {'x' * 1024}", "--prompt: 1025 tokens"),
        ("exprot runs/plain x", "exprot"),
        ("", "command"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(runs, line, words, capsys):
    if "--tasks bbh" in line:
        pytest.importorskip("lm_eval")
    assert evaluation.main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("eval.py: ") and words in error and error.count("\n") == 1


def test_a_run_of_another_version_is_named(runs, tmp_path, capsys):
    config = json.loads((runs / "plain" / "config.json").read_text())
    config["config"]["forgotten"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert evaluation.main(["loss", str(tmp_path)]) == 2
    assert "config.json: written by another version" in capsys.readouterr().err


def test_a_sample_repeats_with_its_seed_and_leaves_the_global_generator_alone(runs, capsys):
    state, others = torch.get_rng_state(), random.getstate()
    texts = [evaluation.sample(runs / "plain", "al", 30, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == others
    assert evaluation.main(f"sample {runs}/plain --prompt al --tokens 30 --seed 1".split()) == 0
    assert capsys.readouterr().out == texts[0] + "\n"


def test_a_sample_at_temperature_0_or_of_the_one_likeliest_is_greedy(plain, runs):
    _, network, begin = plain
    greedy = "al" + bytes(plain_greedy(network, [begin, *b"al"], 20)).decode()
    assert evaluation.sample(runs / "plain", "al", 20, temperature=0) == greedy
    assert evaluation.sample(runs / "plain", "al", 20, temperature=2, top_k=1) == greedy


def test_an_exported_run_reads_back_bit_for_bit_and_opens_in_transformers(plain, runs, tmp_path):
    _, network, begin = plain
    assert evaluation.main(["export", str(runs / "plain"), str(tmp_path / "hf")]) == 0
    size, weights = load_hf(tmp_path / "hf")
    assert size == network.config
    assert {name: bytes(t.numpy()) for name, t in weights.items()} == {
        name: bytes(t.numpy()) for name, t in network.state_dict().items()
    }
    transformers = pytest.importorskip("transformers")
    peer = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.tensor([[begin, *b"alpha beta"]])
    with torch.no_grad():
        torch.testing.assert_close(peer(ids).logits, network.logits(ids), rtol=0, atol=1e-4)


# =================================================================================================
# Benchmarks
# =================================================================================================


BENCH = Path(bench.__file__).resolve()


def run_bench(*words: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH), *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize("command", ["sync", "codec", "wire", "step", "workers", "memory", "bytes"])
def test_bench_knows_the_commands_and_quick(command):
    assert bench.parse([command, "--quick"]).quick
    assert not bench.parse([command]).quick


@pytest.mark.parametrize("words", [[], ["fast"], ["sync", "--quik"], ["sync", "--qui"]])
def test_bench_leaves_with_2_on_a_command_line_that_means_nothing(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        bench.main(words)
    assert leaving.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_target_is_judged_by_the_median_of_the_pairs():
    def row(target, ratios):
        return bench.Row("x", "s", 1.0, 2.0, 1.0, "a / b", ratios, target)

    assert row("<= 1.8", [1.0, 1.8, 9.0]).met and not row("<= 1.8", [1.0, 1.9, 1.9]).met
    assert row(">= 1.5", [0.1, 1.5, 1.6]).met and not row(">= 1.5", [1.4, 1.4, 9.0]).met
    assert row("", [7.0]).met
    printed = bench.table([row(">= 1.5", [1.25, 1.5, 4.0]), row("<= 1.0", [2.0])]).splitlines()
    assert printed[2] == "| x | s | 1 | 2 | 1 | a / b | 1.25 | 1.5 | 4 | >= 1.5 | met |"
    assert printed[3].endswith("| <= 1.0 | MISSED |")
    assert len({line.count("|") for line in printed}) == 1


def test_functions_take_turns_and_change_places():
    order = []
    times = bench.alternate(
        [lambda: order.append("a"), lambda: order.append("b")],
        2,
        between=lambda: order.append("."),
        clock=lambda function: function() or float(len(order)),
    )
    assert "".join(order) == ".b.a.a.b.b.a"  # the first round is the warm-up
    assert [len(t) for t in times] == [2, 2]


def test_fast_synchronisation_equals_the_per_parameter_loop_bit_for_bit():
    numels = [1, 7, 4095, 4096, 4097, 3 * quant.SLAB + 5]
    torch.manual_seed(0)
    workers = bench.workers_on(bench.Parameters(numels))
    twin = SimpleNamespace(
        outer_lr=workers.outer_lr,
        shared=[t.clone() for t in workers.shared],
        momentum=[t.clone() for t in workers.momentum],
    )
    outer = bench.plain_outer(twin)
    plan = bench.first_plan()
    for _ in range(3):
        local = [theta + 0.01 * torch.randn_like(theta) for theta in workers.shared]
        for theta_k, value in zip(workers.replicas[0].flat, local, strict=True):
            theta_k.copy_(value)
        bench.plain_synchronise(local, twin.shared, outer)
        workers.begin(0)
        workers.synchronise(plan)
        for mine, plain, theta_k in zip(
            workers.shared, twin.shared, workers.replicas[0].flat, strict=True
        ):
            assert torch.equal(mine, plain) and torch.equal(theta_k, plain)
        for mine, theta in zip(workers.momentum, twin.shared, strict=True):
            assert torch.equal(mine, outer.state[theta]["momentum_buffer"])


def test_full_logits_and_chunked_loss_have_the_same_gradients():
    config = model.ModelConfig(5000, 32, 1, 2, 2, 64, tied=True)
    batch = bench.random_batch(config, 2, 16)
    losses = []
    gradients = []
    for kind in (bench.FullLogits, model.Transformer):
        network = bench.network_of(config, kind)
        loss = network(batch.inputs, batch.targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in network.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for plain, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_plain_int8_is_the_codec_on_whole_blocks():
    x = torch.randn(8 * quant.BLOCK)
    encoded = torch.empty(8 * (quant.BLOCK + 4), dtype=torch.uint8)
    quant.CODECS["int8"].encode(x, quant.BLOCK, encoded)
    q, scale = bench.plain_int8(x)
    assert torch.equal(encoded[:32].view(torch.float32), scale.flatten())
    assert torch.equal(encoded[32:].view(torch.int8), q.flatten())


@pytest.mark.parametrize("size", model.SIZES)
def test_payload_of_every_model_by_name_is_what_its_shapes_give(size):
    numels = [shape.numel() for shape in model.parameter_shapes(model.SIZES[size]).values()]
    plain = {
        "fp32": sum(4 * n for n in numels),
        "bf16": sum(2 * n for n in numels),
        "int8": sum(n + 4 * -(-n // 4096) for n in numels),
    }
    line = next(row for row in bench.bytes_table().splitlines() if row.startswith(f"| {size} | "))
    for name, expected in plain.items():
        assert quant.payload_bytes(quant.CODECS[name], numels) == expected
        assert f" {expected:,} " in line
        if size != "llama3.1-8b":  # its scratch and buffers are not needed to count
            wire = diloco.Wire(diloco.Ranks(0, 1, 1), quant.CODECS[name], numels)
            assert wire.payload_bytes == expected


@pytest.mark.parametrize("codec", quant.CODECS)
def test_parts_of_the_ranks_cover_the_payload_once(codec):
    numels = [1, 7, 1003, 4097, 3 * quant.SLAB + 5]
    for world in (2, 3, 4):
        wires = [
            diloco.Wire(diloco.Ranks(rank, world, world), quant.CODECS[codec], numels)
            for rank in range(world)
        ]
        assert sum(wires[0].sizes) == wires[0].payload_bytes
        assert list(itertools.chain(*wires[0].parts)) == list(range(len(wires[0].chunks)))
        assert all(wire.parts == wires[0].parts for wire in wires)
        for rank, wire in enumerate(wires):
            assert wire.others == [(rank + i) % world for i in range(1, world)]


NUMELS = [1, 7, 0, 1003, 4095, 4096, 4097, SLAB + 5, *[5000] * 12]  # 33 chunks: four pieces


def deltas(repetition: int, worker: int) -> list[Tensor]:
    """A worker's tensors, in every repetition of another scale."""
    generator = torch.Generator().manual_seed(1000 * repetition + worker)
    scale = 10.0 ** ((7 * repetition + worker) % 9 - 6)
    return [torch.randn(numel, generator=generator) * scale for numel in NUMELS]


def included(repetition: int) -> list[bool]:
    """Which of three workers count: all, two, one."""
    rest = repetition % 3
    return [rest == 0 or (worker != repetition // 3 % 3) == (rest == 1) for worker in range(3)]


def wire_sums(wire: diloco.Wire, repetition: int) -> int:
    """Checksum of the mean as one rank decodes it."""
    hosted = [deltas(repetition, worker) for worker in wire.ranks.hosted]
    out = [torch.full((numel,), math.nan) for numel in NUMELS]
    for chunk, mean in wire.mean(hosted, included(repetition)):
        out[chunk.tensor][chunk.start : chunk.stop] = mean
    return diloco.checksum(out)


def plain_sum(codec: quant.Codec, repetition: int) -> int:
    """The same from the definition, a chunk at a time, without a wire."""

    def coded(x: Tensor, chunk: Chunk) -> Tensor:
        encoded = torch.empty(codec.nbytes(chunk), dtype=torch.uint8)
        codec.encode(x, chunk.block, encoded)
        return codec.decode(encoded, chunk.block, torch.empty(len(x)))

    workers = [deltas(repetition, k) for k in range(3) if included(repetition)[k]]
    out = [torch.full((numel,), math.nan) for numel in NUMELS]
    for chunk in chunks(NUMELS, BLOCK):
        here = slice(chunk.start, chunk.stop)
        total = torch.zeros(chunk.stop - chunk.start)
        for tensors in workers:
            total += coded(tensors[chunk.tensor][here], chunk)
        out[chunk.tensor][here] = coded(total / len(workers), chunk)
    return diloco.checksum(out)


def mean_on_three_ranks(rank: int, port: int, results: Any) -> None:
    """One of three processes: a checksum of each codec and repetition."""
    launch = dict(RANK=rank, WORLD_SIZE=3, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=3, MASTER_PORT=port)
    os.environ |= {name: str(value) for name, value in launch.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    ranks, _ = diloco.connect(3, 1, 1.0)
    sums = {}
    for name, codec in CODECS.items():
        wire = diloco.Wire(ranks, codec, NUMELS)
        assert wire.pieces == 4
        sums[name] = [wire_sums(wire, repetition) for repetition in range(200)]
    results.put(sums)
    diloco.disconnect()


def test_the_mean_of_three_processes_is_the_plain_one_bit_for_bit_200_times():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    processes = [
        spawn.Process(target=mean_on_three_ranks, args=(rank, port, results)) for rank in range(3)
    ]
    for process in processes:
        process.start()
    sums = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    for name, codec in CODECS.items():
        alone = diloco.Wire(diloco.Ranks(0, 1, 3), codec, NUMELS)
        for repetition in range(200):
            expected = plain_sum(codec, repetition)
            found = {ranks[name][repetition] for ranks in sums} | {wire_sums(alone, repetition)}
            assert found == {expected}, (name, repetition)


def test_bf16_is_averaged_in_fp32():
    wire = diloco.Wire(diloco.Ranks(0, 1, 64), CODECS["bf16"], [3])
    ((_, mean),) = wire.mean([[torch.full((3,), 1e-3)] for _ in range(64)], [True] * 64)
    value = float(torch.tensor(1e-3).bfloat16())
    assert mean.tolist() == [value] * 3  # a running bf16 sum would drift by several percent


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("size", "shards", "groups"), [("215m", 1, 8), ("llama3.1-8b", 8, 8)])
def test_the_wire_s_buffers_on_a_gpu_are_what_the_estimate_says(size, shards, groups, codec):
    recipe = "c4-215m" if shards == 1 else "ultrachat-8b"
    options = dict(recipe=recipe, ranks_per_worker=shards, workers=groups, wire=codec)
    config = train.Config(**(train.RECIPES[recipe] | options))
    ranks = diloco.Ranks(0, groups * shards, groups, shards, torch.device("meta"))
    wire = diloco.Wire(ranks, CODECS[codec], list(train.shard_numels(config, 0).values()))
    assert min(wire.sizes) > 0.5 * max(wire.sizes)
    for piece in range(wire.pieces):
        for group in range(groups):
            wire._buffer("mean", piece, group)
            if group != wire.me:
                wire._buffer("send", piece, group)
                wire._buffer(f"from {group}", piece, wire.me)
    held = sum(buffer.numel() for buffer in wire._buffers.values())
    assert held == pytest.approx(train.memory_per_gpu(config, 1)["wire"], rel=0.35)


def test_bytes_table_has_the_published_savings():
    printed = bench.bytes_table()
    assert "| c4-215m | autoloco | bf16 | 73 | 31.438 | 27.0 % |" in printed
    assert "| ultrachat-8b | diloco | bf16 | 65 | 1,043.934 | 0.0 % |" in printed
    assert "| ultrachat-8b | autoloco | int8 | 49 | 393.867 | 62.3 % |" in printed
    assert all(f"| {recipe} | diloco |" in printed for recipe in train.RECIPES)


def test_bytes_prints_its_table_and_leaves_with_0():
    done = run_bench("bytes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == bench.bytes_table()


def test_four_ranks_send_what_the_shapes_give():
    numel, world = 40_000, 4
    ranks = bench.launch("wire", dict(numel=numel, pairs=1, counted=False), world)
    assert [sorted(rank["times"]) for rank in ranks] == [
        ["all_reduce", "bf16", "fp32", "int8"] for _ in range(world)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sync", "codec", "step", "workers", "memory"])
def test_quick_prints_its_table_and_judges_it(command):
    done = run_bench(command, "--quick")
    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) >= 3, done.stderr
    assert (done.returncode == 1) == any("MISSED" in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(bool(bench.cannot_shape()), reason="needs root and iproute2")
def test_the_kernel_counts_the_bytes_that_the_ranks_count():
    with bench.shaped_hosts(3, 1000) as hosts:
        options = dict(numel=500_000, pairs=1, counted=True)
        ranks = bench.launch("wire", options, 3, hosts)
    for name, codec in quant.CODECS.items():
        kernel, sent = (sum(rank[name][i] for rank in ranks) for i in (0, 1))
        payload = quant.payload_bytes(codec, [500_000])
        assert payload * 4 <= sent <= payload * 4 + 1000  # 2 (K - 1) payloads, and no more
        assert abs(kernel / sent - 1) < 0.05
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"bench-{os.getpid()}" not in left.stdout


def test_a_failing_rank_is_named_with_the_end_of_its_output():
    with pytest.raises(RuntimeError, match="nothing: rank 0 failed"):
        bench.launch("nothing", json.loads("{}"))


# =================================================================================================
# Reports and experiments
# =================================================================================================
# Sabotages, each with the test that goes red: a window of 1 % of the steps, crossings at "<", pairs
# of different seeds (..._by_hand); a band of the wrong sign (..._the_rule_draws_the_line); README's
# table edited by hand (..._what_the_recorded_summaries_give).


def recorded(seed=0, losses=(), **summary):
    """A `evaluation.Run` that no run wrote."""
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    config = train.Config(method="diloco", seed=seed)
    intervals = [
        {"horizon": 20, "update_norm": 1.0, "verdict": None},
        {"horizon": 30, "update_norm": 5.0, "verdict": "supports"},
        {"horizon": 20, "update_norm": 2.0, "verdict": "supports"},
        {"horizon": 20, "update_norm": None, "verdict": "nonfinite", "interval": 4, "reason": "a"},
        {"horizon": 20, "update_norm": 6.0, "verdict": "moderate", "interval": 5, "reason": "b"},
    ]
    return evaluation.Run(Path("run"), config, config.rules, summary, metrics, intervals)


def test_smoothed_losses_crossings_and_update_norms_by_hand():
    one = recorded(losses=[4.0, 2.0] * 50)  # 2 % of 100 steps are 2
    assert one.smoothed == [4.0, *[3.0] * 99]
    assert evaluation._crossing(one, 3.0) == 2
    assert evaluation._crossing(one, 2.9) is None
    assert one.update_norms == {20: 2.0, 30: 5.0}
    assert one.row["verdicts"] == {"supports": 2, "nonfinite": 1, "moderate": 1}
    assert one.row["held"] == ["4: a", "5: b"]


def test_the_smoothed_loss_at_the_end_is_the_summary_s_training_loss(runs):
    one = evaluation.read_run(runs / "plain")
    assert one.smoothed[-1] == pytest.approx(one.summary["train_loss"], abs=1e-12)


def test_results_pair_the_runs_of_equal_seeds_by_hand():
    common = dict(train_loss=1.0, synchronisations=3, payload_bytes=2_000_000, saved=0.5, seconds=9)
    losses = {"a": (2.0, 3.0), "b": (2.5, 2.0)}
    rows = [
        common | dict(arm=arm, base="a", seed=seed, val_loss=loss)
        for arm, pair in losses.items()
        for seed, loss in zip((7, 8) if arm == "a" else (8, 7), pair, strict=True)
    ]
    assert evaluation.paired(rows[2:], rows[:2]) == [-0.5, 0.0]
    first, second = evaluation.results(rows).splitlines()[2:]
    assert (
        first == "| a | 2 | 1.0000 ± 0.0000 | 2.5000 ± 0.7071 | - | - | 3 | 2.0 MB | 50.0 % | 9 s |"
    )
    assert "| -0.2500 ± 0.3536 | 1 of 2 |" in second
    assert evaluation.between([None, 3, 2]) == "2 to 3 (1 never)"
    assert evaluation.between([None]) == "never"


def test_report_prints_every_table_and_draws_every_plot(runs, tmp_path, capsys):
    train.write_json(runs / "plain" / "tasks.json", [dict(task="t", metric="m", value=0.5, n=2)])
    folders = [str(runs / name) for name in ("plain", "chat")]
    assert evaluation.main(["report", *folders, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    (runs / "plain" / "tasks.json").unlink()
    for name in ("plain", "chat"):
        summary = train.read_json(runs / name / "summary.json")
        assert f"{summary['val_loss']:.4f}" in shown
        assert f"| {diloco.format_runs(summary['intervals'])} |" in shown
        assert (tmp_path / f"controller-{name}.png").stat().st_size > 20_000
    assert "| plain | t | m | 0.5 | 2 |" in shown
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_report_of_what_is_no_finished_run_is_one_line(runs, tmp_path, capsys):
    shutil.copytree(runs / "plain", tmp_path / "cut")
    (tmp_path / "cut" / "metrics.jsonl").write_text('{"step": 1, "lo')
    for folder, name in ((tmp_path, "config.json"), (tmp_path / "cut", "metrics.jsonl")):
        assert evaluation.main(["report", str(folder)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert str(folder / name) in line


def test_a_residual_at_the_rule_s_limit_is_where_the_rule_draws_the_line():
    history = (0.1, 0.3, 0.2, 0.6)
    for z in (A.SUPPORTS, A.MODERATE):
        assert A.robust_z(evaluation._residual_at(z, history), history) == pytest.approx(z)


@pytest.mark.parametrize("arm", experiments.CONTROLS)
def test_controls_execute_as_many_intervals_as_they_are_told(arm):
    config, _ = train.parse(experiments.flags(arm, 3, 0.7, 0.9, 73).split())
    lengths = config.rules.sequence
    assert (len(lengths), sum(lengths)) == (73, 2000)
    if arm == "as few, random":
        assert len(set(lengths)) > 10
        assert experiments.flags(arm, 4, 0.7, 0.9, 73) != experiments.flags(arm, 3, 0.7, 0.9, 73)
    else:
        assert set(lengths) == {27, 28}
    corrected = arm == "as few, even, corrected"
    assert config.outer_momentum == pytest.approx(0.853815 if corrected else 0.9, abs=1e-6)
    assert config.outer_lr == pytest.approx(0.7 * 1.46185 if corrected else 0.7, abs=1e-5)


def test_differences_on_the_way_are_paired_by_seed():
    arms = {
        "diloco": [{"seed": 0, "quarters": {"25 %": 2.0}}, {"seed": 1, "quarters": {"25 %": 3.0}}],
        "other": [{"seed": 1, "quarters": {"25 %": 3.3}}, {"seed": 0, "quarters": {"25 %": 2.1}}],
    }
    for rows in arms.values():
        rows.insert(0, {"seed": 2})  # recorded without them
    assert experiments.on_the_way(arms).splitlines()[2] == "| other | 2 | +0.2000 ± 0.1414 |"


def test_readme_s_tables_are_what_the_recorded_summaries_give():
    assert experiments.written(README) == README
    for name in experiments.EXPERIMENTS:
        recorded_here = (experiments.RESULTS / f"{name}.json").exists()
        assert recorded_here == (f"<!-- table: {name} -->" in README), name


@pytest.mark.slow
def test_an_experiment_runs_once_and_keeps_its_rows(folder, monkeypatch):
    flags = "--steps 20 --val-documents 4 --base-horizon 10 --method diloco"
    jobs = [experiments.Job("diloco", seed, flags, "diloco") for seed in (0, 1)]
    reordered = "--method diloco --base-horizon 10 --steps 20 --val-documents 4 --outer-lr 0.7"
    same = jobs[0]._replace(flags=reordered)
    assert same.name == jobs[0].name != jobs[1].name
    rows = experiments.execute(jobs)
    assert [row["seed"] for row in rows] == [0, 1]
    assert rows[0]["val_loss"] != rows[1]["val_loss"]
    monkeypatch.setattr(experiments.Job, "execute", None)  # nothing is left to run
    assert experiments.execute(jobs) == rows
    monkeypatch.setattr(experiments, "RESULTS", folder / "results")
    experiments.keep("main", {"runs": rows})
    assert train.read_json(folder / "results" / "main.json") == {"runs": rows}
    assert f"{rows[0]['saved']:.1%}".replace("%", " %") in experiments.tables(
        "main", {"runs": rows}
    )
    # One is a difference of running sums, the other a mean: equal but for the last digits.
    assert list(rows[0]["quarters"].values())[-1] == pytest.approx(rows[0]["train_loss"], rel=1e-12)
