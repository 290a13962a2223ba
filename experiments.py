"""The experiments behind README's tables: one command each.

    python experiments.py main published ablation wires sft workers restraint
    python experiments.py            # only write README's tables again

As many runs at a time as there are cores, one process of one thread each. A run that is finished is
not repeated, also if another experiment made it. Summaries are kept in assets/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import autoloco
import diloco
import eval as evaluation
import train

TUNING_SEED = 100  # not among the reported ones
# Outer rate and momentum, the same points for every arm. At a rate of 1.0 DiLoCo's validation loss
# on the tuning seed was 1.518 with momentum 0.7 (0.7: 1.511) and 1.959 with 0.9 (0.7: 1.583).
GRID = ((0.7, 0.9), (0.7, 0.7), (0.7, 0.5))
TUNED = "--outer-lr 0.7 --outer-momentum 0.7"  # the best point of every arm, see `main`'s table
RESULTS = Path(__file__).parent / "assets" / "results"
README = Path(__file__).parent / "README.md"
BASELINES = ("diloco", "linear", "qsr", "autoloco")
CONTROLS = ("as few, even", "as few, even, corrected", "as few, random")

Rows = list[dict[str, Any]]


class Job(NamedTuple):
    """One run of an arm.

    Attributes:
        arm: as the table names it.
        seed: of the run.
        flags: all other flags of train.py.
        base: the arm that it is compared with.
    """

    arm: str
    seed: int
    flags: str
    base: str = ""

    @property
    def config(self) -> train.Config:
        """Settings that it trains with."""
        return train.parse([*self.flags.split(), "--seed", str(self.seed)])[0]

    @property
    def name(self) -> str:
        """Run folder: equal settings are the same run, however the flags put them."""
        return f"experiment-{zlib.crc32(repr(self.config).encode()):08x}-{self.seed}"

    @property
    def argv(self) -> list[str]:
        """Arguments of train.py."""
        return [*self.flags.split(), "--seed", str(self.seed), "--name", self.name, "--overwrite"]

    def finished(self) -> bool:
        """Whether the run folder holds this run, complete."""
        folder = Path("runs", self.name)
        if not (folder / "summary.json").exists():
            return False
        return train.load_config(folder) == replace(self.config, name=self.name)

    def execute(self) -> None:
        """Train, in a process of its own.

        Raises:
            RuntimeError: with its last lines.
        """
        command = [sys.executable, str(Path(train.__file__)), *self.argv]
        single = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=single, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(self.argv)}: {done.stderr[-500:]}")


def execute(jobs: Sequence[Job]) -> Rows:
    """Run what is not finished; a row for each job, in their order."""
    from tqdm import tqdm

    missing = list({job.name: job for job in jobs if not job.finished()}.values())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in tqdm(pool.map(Job.execute, missing), total=len(missing), unit="run"):
            pass
    rows = []
    for job in jobs:
        row = evaluation.read_run(Path("runs", job.name)).row
        command = f"train.py {job.flags} --seed {job.seed}"
        source = train.read_json(Path("runs", job.name, "env.json"))["source_sha256"]
        about = {"arm": job.arm, "base": job.base, "command": command, "run": job.name}
        rows.append(row | about | {"source_sha256": source})
    if len({row["source_sha256"] for row in rows}) > 1:
        print("some of these runs were made with other sources of the program", file=sys.stderr)
    return rows


# ---------------------------------------------------------------- arms


def flags(arm: str, seed: int, rate: float, momentum: float, count: int = 0) -> str:
    """Flags of an arm of the main comparison.

    Args:
        arm: ddp, a baseline or a control.
        seed: of the random intervals.
        rate: outer learning rate.
        momentum: outer momentum of a base interval.
        count: synchronisations of a control.
    """
    if arm == "ddp":
        return "--method ddp"
    if arm in BASELINES:
        return f"--method {arm} --outer-lr {rate} --outer-momentum {momentum}"
    weights = [1.0] * count
    if arm == "as few, random":
        drawn = random.Random(seed)
        weights = [drawn.uniform(0.5, 1.5) for _ in weights]
    if arm == "as few, even, corrected":  # AutoLoCo's correction at the largest horizon, always
        base, momentum = momentum, autoloco.momentum_retention(momentum, 1.5)
        rate *= autoloco.step_scale(momentum, base)
    ends = [round(train.Config.steps * end / sum(weights)) for end in accumulate(weights)]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    horizons = diloco.format_runs(diloco.run_lengths(lengths)).replace(" ", ",")
    return f"--method diloco --horizons {horizons} --outer-lr {rate} --outer-momentum {momentum}"


def compare(seeds: Iterable[int], points: dict[str, Sequence[tuple[float, float]]]) -> Rows:
    """Every arm at its settings, first those that need no other's number of intervals.

    Args:
        seeds: of the runs.
        points: arm -> (outer rate, outer momentum), one or several.
    """
    fewest: dict[int, int] = {}  # seed -> synchronisations of AutoLoCo, which the controls take

    def rows_of(arms: Iterable[str]) -> Rows:
        chosen = [(arm, seed, point) for seed in seeds for arm in arms for point in points[arm]]
        return execute(
            [
                Job(arm, seed, flags(arm, seed, *point, fewest.get(seed, 0)), "diloco")
                for arm, seed, point in chosen
            ]
        )

    rows = rows_of([arm for arm in points if arm not in CONTROLS])
    for row in rows:
        if row["arm"] == "autoloco":
            count = row["synchronisations"]
            fewest[row["seed"]] = min(count, fewest.get(row["seed"], count))
    return rows + rows_of([arm for arm in points if arm in CONTROLS])


# ---------------------------------------------------------------- experiments


def main_comparison(seeds: range) -> dict[str, Rows]:
    """All methods and controls, each at the best point of one grid on another seed (4.2)."""
    tuning = compare([TUNING_SEED], dict.fromkeys((*BASELINES, *CONTROLS), GRID))
    best: dict[str, Sequence[tuple[float, float]]] = {"ddp": GRID[:1]}
    for arm, rows in evaluation.by_arm(tuning).items():
        place = min(range(len(GRID)), key=lambda at: rows[at]["val_loss"])
        best[arm] = [GRID[place]]
    return {"tuning": tuning, "runs": compare(seeds, best)}


def published(seeds: range) -> dict[str, Rows]:
    """AutoLoCo and DiLoCo at the base momentum of the paper's main runs (A15)."""
    return {"runs": compare(seeds, dict.fromkeys(("diloco", "autoloco"), GRID[:1]))}


def ablation(seeds: range) -> dict[str, Rows]:
    """Horizon, momentum, scale, normalisation, added one after the other (4.3)."""
    arms = {
        "diloco": "--method diloco",
        "horizon only": "--method autoloco --no-adjust-momentum --no-scale-step",
        "+ momentum": "--method autoloco --no-scale-step",
        "+ scale (full)": "--method autoloco",
        "+ normalisation": "--method autoloco --normalise",
    }
    jobs = [
        Job(
            f"{arm}, momentum {momentum}",
            seed,
            f"{settings} --outer-lr 0.7 --outer-momentum {momentum}",
            f"diloco, momentum {momentum}",
        )
        for momentum in (0.9, 0.7)
        for arm, settings in arms.items()
        for seed in seeds
    ]
    return {"runs": execute(jobs)}


def wires(seeds: range) -> dict[str, Rows]:
    """Rounding on the wire: fp32 and int8, from scratch."""
    jobs = [
        Job(wire, seed, f"--method autoloco {TUNED} --wire {wire}", "fp32")
        for wire in ("fp32", "int8")
        for seed in seeds
    ]
    return {"runs": execute(jobs)}


def sft(seeds: range) -> dict[str, Rows]:
    """fp32, bf16 and int8 on the wire of the fine-tuning recipe (G.2), after a `tiny` run."""
    first = [Job("start", seed, f"--method autoloco {TUNED}") for seed in seeds]
    execute(first)
    jobs = [
        Job(
            f"{method}, {wire}",
            start.seed,
            f"--recipe tiny-sft --init-from runs/{start.name} --method {method} --wire {wire}",
            "diloco, fp32" if wire == "fp32" else f"{method}, fp32",
        )
        for method in ("diloco", "autoloco")
        for wire in ("fp32", "bf16", "int8")
        for start in first
    ]
    return {"runs": execute(jobs)}


def workers(seeds: range) -> dict[str, Rows]:
    """2 to 16 workers in one process: more tokens a step, since every worker keeps its batch."""
    jobs = [
        Job(f"{method}, {count} workers", seed, settings, f"diloco, {count} workers")
        for count in (2, 4, 8, 16)
        for method in ("diloco", "autoloco")
        for settings in [f"--method {method} {TUNED} --workers {count}"]
        for seed in seeds
    ]
    return {"runs": execute(jobs)}


def restraint(seeds: range) -> dict[str, Rows]:
    """Where the controller should hold back: rates far too high, workers with different text."""
    cases = ["", *(f"--lr {rate}" for rate in ("2e-2", "5e-2", "1e-1", "2e-1"))]
    cases += ["--partition module", "--partition module --lr 2e-2"]
    jobs = [
        Job(case or "recipe", seeds[0], f"--method autoloco {TUNED} {case}".strip())
        for case in cases
    ]
    return {"runs": execute(jobs)}


EXPERIMENTS: dict[str, Callable[[range], dict[str, Rows]]] = {
    "main": main_comparison,
    "published": published,
    "ablation": ablation,
    "wires": wires,
    "sft": sft,
    "workers": workers,
    "restraint": restraint,
}


# ---------------------------------------------------------------- results and README


def keep(name: str, found: dict[str, Rows]) -> None:
    """Write assets/results/NAME.json: a run a line, so that differences are readable."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, rows in found.items():
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        parts.append(f' "{key}": [\n{lines}\n ]')
    (RESULTS / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


def draw(rows: Rows) -> None:
    """README's plots: the methods of the main comparison on seed 0."""
    methods = [row for row in rows if row["arm"] in ("ddp", *BASELINES) and row["seed"] == 0]
    runs = [evaluation.read_run(Path("runs", row["run"])) for row in methods]
    _, controller = evaluation.draw(runs, RESULTS.parent)
    controller.replace(RESULTS.parent / "controller.png")


def on_the_way(arms: dict[str, Rows]) -> str:
    """Paired differences of the smoothed training loss to DiLoCo's after each quarter.

    Args:
        arms: arm -> rows; only those count that have kept their `quarters`.
    """

    def after(quarter: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda row: row["quarters"][quarter]

    known = {arm: [row for row in rows if "quarters" in row] for arm, rows in arms.items()}
    base, lines = known.pop("diloco"), []
    for arm, rows in known.items():
        apart = [evaluation.paired(rows, base, after(quarter)) for quarter in base[0]["quarters"]]
        lines.append((arm, len(apart[0]), *(evaluation.spread(values, "+") for values in apart)))
    return evaluation.table(" | ".join(["arm", "seeds", *base[0]["quarters"]]), lines)


def tables(name: str, found: dict[str, Rows]) -> str:
    """Markdown of an experiment's kept results."""
    if name == "restraint":
        cases = (
            (
                row["arm"],
                evaluation.spread([row["train_loss"]]),
                row["synchronisations"],
                diloco.format_runs(row["intervals"]),
                "; ".join(row["held"]) or "-",
            )
            for row in found["runs"]
        )
        head = "case | train loss | syncs | executed intervals | interval: where it held back"
        return evaluation.table(head, cases)
    text = evaluation.results(found["runs"])
    arms = evaluation.by_arm(found["runs"])
    if control := arms.get("as few, even"):
        apart = evaluation.paired(arms["autoloco"], control)
        below = sum(difference < 0 for difference in apart)
        text += f"\nautoloco less `as few, even`: {evaluation.spread(apart, '+')} in validation "
        text += f"loss, below it on {below} of {len(apart)} seeds.\n"
    if name == "main":
        text += "\nSmoothed training loss less that of `diloco` on the same seed, on the way:\n\n"
        text += on_the_way(arms)
    if "tuning" in found:
        lines = []
        for arm, rows in evaluation.by_arm(found["tuning"]).items():
            losses = [row["val_loss"] for row in rows]
            bold = ("**" if loss == min(losses) else "" for loss in losses)
            cells = (f"{b}{loss:.4f}{b}" for b, loss in zip(bold, losses, strict=True))
            lines.append((arm, *cells))
        points = (f"{rate:g}, {momentum:g}" for rate, momentum in GRID)
        text += "\n" + evaluation.table(" | ".join(["arm", *points]), lines)
    return text


def written(text: str) -> str:
    """README with every experiment's table as assets/results has it, where it has a place."""
    for name in EXPERIMENTS:
        path = RESULTS / f"{name}.json"
        if path.exists() and f"<!-- table: {name} -->" in text:
            start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
            before, _, rest = text.partition(start)
            text = before + start + tables(name, train.read_json(path)) + rest[rest.index(end) :]
    return text


def main(argv: list[str]) -> int:
    """Run the experiments named; then write README's tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N - 1 [5]")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in EXPERIMENTS]:
        print(f"experiments.py: {unknown[0]}: one of {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    if not 1 <= given.seeds <= TUNING_SEED:
        print(f"experiments.py: --seeds {given.seeds}: 1 to {TUNING_SEED}", file=sys.stderr)
        return 2
    try:
        for name in given.names:
            found = EXPERIMENTS[name](range(given.seeds))
            keep(name, found)
            if name == "main":
                draw(found["runs"])
    except (RuntimeError, ValueError) as error:
        print(f"experiments.py: {error}", file=sys.stderr)
        return 1
    README.write_text(written(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
