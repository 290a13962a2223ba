"""Tables and plots of finished runs; `eval.py report` prints them, `experiments.py` keeps them.

A row is what a run's `summary.json` holds, with `arm` (its settings without the seed), `seed`, and
`base`: the arm that it is compared with, seed by seed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import autoloco
import diloco
import train

MARKS = {"supports": "^", "consistent": "o", "moderate": "s", "severe": "v", "nonfinite": "X"}


@dataclass(frozen=True)
class Run:
    """What a run folder recorded.

    Args:
        path: the folder.
        config: its configuration.
        rules: the constants that its log was written under.
        summary: its totals and final losses.
        metrics: a row a step.
        intervals: a row a synchronisation.
    """

    path: Path
    config: train.Config
    rules: autoloco.Rules
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    intervals: list[dict[str, Any]]

    @cached_property
    def arm(self) -> str:
        """The run's settings apart from its seed, as the command line gives them."""
        recipe = train.Config(**{"recipe": self.config.recipe, **train.RECIPES[self.config.recipe]})
        idle = train.RESUME_MAY_CHANGE | {"recipe", "method", "seed"}
        settings, usual = asdict(self.config), asdict(recipe)
        changed = [
            f"{name.replace('_', '-')} {value}"
            for name, value in settings.items()
            if name not in idle and value != usual[name]
        ]
        return ", ".join([f"{self.config.recipe} {self.config.method}", *changed])

    @cached_property
    def smoothed(self) -> list[float]:
        """Training loss averaged over 2 % of the run's steps up to each step (A.2's final loss)."""
        losses = [math.nan if row["loss"] is None else row["loss"] for row in self.metrics]
        window = max(1, len(losses) // 50)
        sums = [0.0, *accumulate(losses)]
        ends = range(1, len(sums))
        return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in ends]

    @property
    def update_norms(self) -> dict[int, float]:
        """Horizon -> median norm of the outer update (4.3)."""
        norms: dict[int, list[float]] = {}
        for row in self.intervals:
            if row["update_norm"] is not None:
                norms.setdefault(row["horizon"], []).append(row["update_norm"])
        return {horizon: statistics.median(norms[horizon]) for horizon in sorted(norms)}

    @property
    def row(self) -> dict[str, Any]:
        """The run as a row of `results`."""
        verdicts = Counter(row["verdict"] for row in self.intervals if row["verdict"])
        seed = {"arm": self.arm, "seed": self.config.seed}
        return seed | self.summary | {"verdicts": dict(verdicts)}


def read_run(path: Path) -> Run:
    """Read a finished run.

    Raises:
        ValueError: naming the missing or damaged file.
    """
    config, summary = train.load_config(path), train.read_json(path / "summary.json")
    rules, intervals, _ = autoloco.read_log(str(path / "intervals.jsonl"))
    file = path / "metrics.jsonl"
    try:
        metrics = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        raise ValueError(f"{file}: missing or damaged") from None
    return Run(path, config, rules, summary, metrics, intervals)


# ---------------------------------------------------------------- tables


def table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; `head` names the columns, separated by |."""
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and, from two values on, their standard deviation."""
    mean = format(statistics.fmean(values), f"{sign}.4f")
    return mean + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def between(values: Iterable[float | None]) -> str:
    """Smallest and largest value; None is a run that never came there."""
    values = list(values)
    known = sorted(value for value in values if value is not None)
    if not known:
        return "never"
    first, last = (f"{x:,.4g}" if isinstance(x, float) else f"{x:,}" for x in (known[0], known[-1]))
    never = f" ({len(values) - len(known)} never)" if len(known) < len(values) else ""
    return (first if first == last else f"{first} to {last}") + never


def by_arm(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows that differ only in their seed, in the order of their first."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return arms


def paired(group: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> list[float]:
    """Differences of validation loss to the base's run of the same seed; negative is better."""
    other = {row["seed"]: row["val_loss"] for row in base}
    return [row["val_loss"] - other[row["seed"]] for row in group if row["seed"] in other]


def results(rows: Sequence[dict[str, Any]]) -> str:
    """Losses with their spread over seeds, paired differences, and what was sent."""
    arms, lines = by_arm(rows), []
    for name, group in arms.items():
        against, saved = group[0].get("base"), 100 * statistics.fmean(r["saved"] for r in group)
        differences = paired(group, arms.get(against or "", [])) if against != name else []
        below = sum(difference < 0 for difference in differences)
        lines.append(
            (
                name,
                len(group),
                spread([row["train_loss"] for row in group]),
                spread([row["val_loss"] for row in group]),
                spread(differences, "+") if differences else "-",
                f"{below} of {len(differences)}" if differences else "-",
                between(row["synchronisations"] for row in group),
                f"{statistics.fmean(row['payload_bytes'] for row in group) / 1e6:,.1f} MB",
                f"{saved:.1f} %",
                f"{statistics.fmean(row['seconds'] for row in group):,.0f} s",
            )
        )
    head = "arm | seeds | train loss | val loss | difference | below | syncs | payload | saved"
    return table(f"{head} | time", lines)


def report(runs: Sequence[Run]) -> str:
    """Markdown tables: results, threshold crossings (F.1), intervals (F.2, 4.3), tasks (E.3).

    Args:
        runs: finished runs; those that differ only in their seed make one arm.
    """
    base = next((one.arm for one in runs if one.config.method == "diloco"), None)
    parts = ["### Results\n", results([one.row | {"base": base} for one in runs])]
    if base:
        parts.append(f"\nDifferences of the validation loss are to `{base}`, seed by seed.\n")
    arms: dict[str, list[Run]] = {}
    for one in runs:
        arms.setdefault(one.arm, []).append(one)

    last = min(one.smoothed[-1] for one in runs)
    early = max(one.smoothed[len(one.smoothed) // 4] for one in runs)
    levels = [last + (early - last) * share for share in (0.8, 0.6, 0.4, 0.2, 0.1, 0.05)]
    crossings = (
        (name, *(between(_crossing(one, level) for one in group) for level in levels))
        for name, group in arms.items()
    )
    parts.append("\n### First step below a smoothed training loss (F.1)\n")
    parts.append(table(" | ".join(["arm", *(f"{level:.3f}" for level in levels)]), crossings))

    intervals = (
        (
            one.path.name,
            diloco.format_runs(one.summary["intervals"]),
            *(
                between(row[key] for row in one.intervals)
                for key in ("interval_ratio", "momentum", "step_scale")
            ),
            ", ".join(f"{horizon}: {norm:.3g}" for horizon, norm in one.update_norms.items()),
        )
        for one in runs
        if len(one.update_norms) <= 16  # of a linear schedule every horizon is another
    )
    parts.append("\n### Executed intervals (F.2), median update norm by horizon (4.3)\n")
    parts.append(table("run | intervals | rho | momentum | step scale | update norm", intervals))

    tasks = [
        (one.path.name, row["task"], row["metric"], row["value"], row["n"])
        for one in runs
        if (one.path / "tasks.json").exists()
        for row in train.read_json(one.path / "tasks.json")
    ]
    if tasks:
        parts += ["\n### Tasks (E.3)\n", table("run | task | metric | value | n", tasks)]
    return "".join(parts)


def _crossing(one: Run, level: float) -> int | None:
    return next((step for step, value in enumerate(one.smoothed, 1) if value <= level), None)


# ---------------------------------------------------------------- plots


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Loss against steps and bytes; of each controlled run horizons, bands and corrections.

    Args:
        runs: finished runs.
        folder: receives `loss.png`, and `controller-RUN.png` for each run with a controller.
    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    colours: dict[str, str] = {}
    for one in runs:
        new = one.arm not in colours
        style: dict[str, Any] = {"color": colours.setdefault(one.arm, f"C{len(colours)}")}
        style |= {"lw": 1.2, "alpha": 0.8, "label": one.arm if new else None}
        axes[0].plot([row["step"] for row in one.metrics], one.smoothed, **style)
        sent = list(accumulate(row["payload_bytes"] / 1e6 for row in one.intervals))
        axes[1].plot(sent, [one.smoothed[row["step"] - 1] for row in one.intervals], **style)
    low = min(min(one.smoothed) for one in runs)
    high = max(one.smoothed[len(one.smoothed) // 10] for one in runs)
    axes[0].set(xlabel="step", ylabel="training loss, nats a token", ylim=(low - 0.02, high))
    everyday = all(one.config.method != "ddp" for one in runs)
    axes[1].set(xlabel="payload of a worker, MB", xscale="linear" if everyday else "log")
    axes[1].legend(fontsize=8)
    files = [folder / "loss.png"]
    figure.savefig(files[0], dpi=120)
    plt.close(figure)
    for one in runs:
        if one.rules.sequence is None:
            figure, panels = plt.subplots(4, 1, figsize=(9, 10), sharex=True, layout="constrained")
            _draw_controller(one, panels)
            files.append(folder / f"controller-{one.path.name}.png")
            figure.savefig(files[-1], dpi=120)
            plt.close(figure)
    return files


def _draw_controller(one: Run, panels: Any) -> None:
    rows = one.intervals
    steps = [row["step"] for row in rows]
    panels[0].step(steps, [row["horizon"] for row in rows], where="pre", color="0.7", lw=1)
    for verdict, mark in MARKS.items():
        judged = [row for row in rows if row["verdict"] == verdict]
        if judged:
            at, horizons = [row["step"] for row in judged], [row["horizon"] for row in judged]
            panels[0].plot(at, horizons, mark, ms=5, label=verdict)
    panels[0].set(ylabel="horizon, steps", title=one.arm)
    if any(row["verdict"] for row in rows):
        panels[0].legend(fontsize=8, ncols=5, loc="lower right")
    for panel, name, sign in ((panels[1], "drift", 1), (panels[2], "coherence", -1)):
        bands = []
        for index, row in enumerate(rows):
            before = autoloco.replay(one.rules, rows[:index]).controller
            history = getattr(before, f"{name}_history")
            if row["z"] is not None and row[f"residual_{name}"] is not None:
                # A residual is a log ratio, so this is the statistic at another residual.
                limits = (_residual_at(z, history) for z in (autoloco.SUPPORTS, autoloco.MODERATE))
                apart = [sign * (limit - row[f"residual_{name}"]) for limit in limits]
                bands.append((row["step"], *(row[name] * math.exp(power) for power in apart)))
        panel.plot(steps, [row[name] for row in rows], ".-", lw=0.8, ms=4, label=name)
        if bands:
            ends, supports, moderate = zip(*bands, strict=True)
            panel.fill_between(ends, supports, moderate, alpha=0.25, label="consistent")
            panel.plot(ends, moderate, lw=0.8, color="C3", label="moderate from here")
        panel.set(ylabel=name)
        panel.legend(fontsize=8)
    panels[1].set(yscale="log")
    for name, words in (
        ("interval_ratio", "rho"),
        ("momentum", "momentum"),
        ("step_scale", "scale"),
    ):
        panels[3].step(steps, [row[name] for row in rows], where="pre", label=words)
    panels[3].set(xlabel="step", ylabel="outer correction")
    panels[3].legend(fontsize=8, loc="upper left")


def _residual_at(z: float, history: tuple[float, ...]) -> float:
    """The residual whose `autoloco.robust_z` is z: the score is linear in it."""
    at_zero, at_one = (autoloco.robust_z(residual, history) for residual in (0.0, 1.0))
    return (z - at_zero) / (at_one - at_zero)
