"""The runs behind RESULTS.md: one command an experiment.

    python -m experiments.run readings main published ablation sft wires workers restraint
    python -m experiments.run frontier longer
    python -m experiments.run                # only write RESULTS.md's tables and the figures again

As many runs at a time as there are cores, one process of one thread each. A run that the same
program has finished is not repeated, whichever experiment made it: summaries are kept in results/,
as they come. With --seeds an experiment is only tried: its summaries go to runs/experiments/, its
tables to the screen.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import autoloco
import diloco
import eval as evaluation
import train

HERE = Path(__file__).resolve().parent
RESULTS, TRIED, PAGE = HERE / "results", Path("runs", "experiments"), HERE / "RESULTS.md"
TUNING_SEED = 100  # not among the reported ones
POINTS = ((0.7, 0.5), (0.7, 0.7), (0.7, 0.9), (0.5, 0.7), (0.5, 0.9), (1.0, 0.7))  # alpha_0, mu_0
LONGER = " --steps 10000 --warmup 200 --base-horizon 100"
OLD_KAPPA = "--train-with-old-kappa"
PROGRAM = train.program_sha256()

Rows = list[dict[str, Any]]
Found = dict[str, Rows]  # part of an experiment -> summaries of its runs
Point = tuple[float, float]  # alpha_0, mu_0


class Job(NamedTuple):
    """One run of an arm, which is compared with the arm `base` seed by seed."""

    arm: str
    seed: int
    flags: str  # of train.py; before them OLD_KAPPA for the old reading of B.4
    base: str

    @property
    def config(self) -> train.Config:
        """Settings that it trains with."""
        given = self.flags.removeprefix(OLD_KAPPA).split()
        return train.parse([*given, "--seed", str(self.seed)])[0]

    @property
    def name(self) -> str:
        """Run folder: equal settings are the same run, however the flags put them."""
        key = f"{self.config}{self.flags.startswith(OLD_KAPPA)}".encode()
        return f"experiment-{zlib.crc32(key):08x}-{self.seed}"

    def train(self) -> dict[str, Any]:
        """Its summary; trained in a process of its own, unless this program has finished it."""
        folder = Path("runs", self.name)
        module = "experiments.run" if self.flags.startswith(OLD_KAPPA) else "train"
        command = ["-m", module, *self.flags.split(), "--seed", str(self.seed)]
        if not ((folder / "summary.json").exists() and hashes(folder)["program"] == PROGRAM):
            more = [sys.executable, *command, "--name", self.name, "--overwrite"]
            alone = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
            done = subprocess.run(more, env=alone, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr[-500:]}")
        return summary(folder) | {"command": " ".join(["python", *command]), "run": self.name}


def hashes(folder: Path) -> dict[str, Any]:
    """Of the program and the corpus that a run was made with."""
    environment = train.read_json(folder / "env.json")
    return {"program": environment["source_sha256"], "corpus": environment["data"].get("sha256")}


def summary(folder: Path) -> dict[str, Any]:
    """A finished run as a row: totals, hashes, the loss's curve, the median update at H_max."""
    one = evaluation.read_run(folder)
    ends = [max(1, len(one.smoothed) * part // 20) for part in range(1, 21)]
    more = {"curve": [round(one.smoothed[end - 1], 5) for end in ends]}
    return one.row | hashes(folder) | more | {"update": [*one.update_norms.values()][-1]}


def train_with_old_kappa(argv: list[str]) -> int:
    """train.py with the first reading of B.4, kappa = min(1.5, (1 - mu) / (1 - mu_0)): no rho."""

    def step_scale(momentum: float, base: float, ratio: float, most: float) -> float:
        return min(1.5, (1 - momentum) / (1 - base))

    autoloco.step_scale = step_scale
    return train.main(argv)


class Lab(NamedTuple):
    """Where an experiment keeps its summaries, and how many seeds are only tried."""

    folder: Path
    tried: int | None = None

    def seeds(self, usual: int) -> range:
        """Of the reported runs."""
        return range(self.tried or usual)

    def execute(self, jobs: Sequence[Job]) -> Rows:
        """Run what is not finished, keeping summaries as they come; a row a job, in order."""
        from tqdm import tqdm

        known = kept(self.folder)
        missing = {job.name: job for job in jobs if job.name not in known}
        with ThreadPoolExecutor(diloco.cores()) as pool:
            running = {pool.submit(job.train): name for name, job in missing.items()}
            try:
                for done in tqdm(as_completed(running), total=len(running), unit="run"):
                    known[running[done]] = done.result()
                    keep(self.folder / "unfinished.json", {"runs": list(known.values())})
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return [known[job.name] | dict(arm=job.arm, base=job.base) for job in jobs]


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """The summaries of this program in a folder of results, by run."""
    parts = [rows for path in folder.glob("*.json") for rows in train.read_json(path).values()]
    return {row["run"]: row for rows in parts for row in rows if row.get("program") == PROGRAM}


def keep(path: Path, found: Found) -> None:
    """Write summaries, a run a line, so that differences are readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, rows in found.items():
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        parts.append(f' "{key}": [\n{lines}\n ]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


# ---------------------------------------------------------------- arms

METHODS = {name: f"--method {name}" for name in ("ddp", "diloco", "linear", "qsr", "autoloco")}
CONTROLS = ("as few, even", "as few, random")
FRONTIER = {
    **{f"diloco, H {h}": f"--base-horizon {h}" for h in (10, 14, 20, 27, 35, 45, 60, 80)},
    **{f"autoloco, H up to {h}": f"--max-horizon {h}" for h in (30, 40, 60, 80)},
}
ABLATION = {
    "diloco": "--method diloco",
    "horizon only": "--method autoloco --no-adjust-momentum --no-scale-step",
    "+ momentum": "--method autoloco --no-scale-step",
    "full": "--method autoloco",
    "+ normalisation": "--method autoloco --normalise",
}
KAPPAS = {f"bound {most}": f" --max-step-scale {most}" for most in (1.5, 1.75, 2.0, 1000)}
READINGS = {arm: ABLATION[arm] for arm in ("diloco", "horizon only", "+ momentum")}
for arm in ("full", "+ normalisation"):
    READINGS[f"{arm} without rho"] = f"{OLD_KAPPA} {ABLATION[arm]}"
    READINGS |= {f"{arm} {kappa}": ABLATION[arm] + bound for kappa, bound in KAPPAS.items()}
# What the paper says, and between which values a reading agrees: written down before the runs.
FACTS = {
    "horizon only - DiLoCo": (0.0059, 0.0, math.inf),
    "momentum - DiLoCo": (0.0233, 0.0, math.inf),
    "full - DiLoCo": (-0.0135, -math.inf, 0.0),
    "normalised - full": ("above 0", 0.0, math.inf),
    "(full - horizon) / (momentum - horizon)": (-1.11, -2.22, -0.55),
    "update, momentum / horizon - 1": (-0.3645, -0.4645, -0.2645),
    "update, normalised / full - 1": (-0.4750, -0.5750, -0.3750),
}


def outer(point: Point) -> str:
    """Flags of an outer rate and momentum."""
    return f" --outer-lr {point[0]} --outer-momentum {point[1]}"


def case(point: Point) -> str:
    """End of the name of an arm at a point."""
    return f", {point[0]} / {point[1]}"


def flags(arm: str, seed: int, point: Point, count: int, more: str) -> str:
    """Flags of a method, of an arm of the frontier, or of a control with `count` intervals."""
    if arm in FRONTIER:
        return f"--method {arm.split(',')[0]} {FRONTIER[arm]}" + outer(point)
    if arm in METHODS:
        return METHODS[arm] + (outer(point) if arm != "ddp" else "") + more
    draw, steps = random.Random(seed), train.parse(more.split())[0].steps
    weights = [draw.uniform(0.5, 1.5) if arm == "as few, random" else 1.0 for _ in range(count)]
    ends = [round(steps * end / sum(weights)) for end in accumulate(weights)]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    horizons = diloco.format_runs(diloco.run_lengths(lengths)).replace(" ", ",")
    return f"--method diloco --horizons {horizons}" + outer(point) + more


def compare(
    lab: Lab, seeds: Sequence[int], points: Mapping[str, Sequence[Point]], more: str = ""
) -> Rows:
    """Every arm at its points, the controls last: they take AutoLoCo's fewest synchronisations."""
    rows: Rows = []
    for late in (False, True):
        jobs = []
        for seed, arm in product(seeds, (arm for arm in points if (arm in CONTROLS) == late)):
            same = [row for row in rows if (row["arm"], row["seed"]) == ("autoloco", seed)]
            count = min((row["synchronisations"] for row in same), default=0)
            jobs += [
                Job(arm, seed, flags(arm, seed, p, count, more), "diloco") for p in points[arm]
            ]
        rows += lab.execute(jobs)
    return rows


def point_of(row: dict[str, Any]) -> Point:
    """Outer rate and momentum of a run, as its command gives them."""
    rate, momentum = re.findall(r"--outer-(?:lr|momentum) (\S+)", row["command"])
    return float(rate), float(momentum)


def best(tuning: Rows) -> dict[str, Sequence[Point]]:
    """Arm -> the point of its lowest validation loss."""
    arms = evaluation.by_arm(tuning).items()
    return {
        arm: [point_of(min(rows, key=lambda row: row["val_loss"] or math.inf))]
        for arm, rows in arms
    }


def tuned(lab: Lab, arms: Iterable[str], points: Sequence[Point], usual: int) -> Found:
    """Every arm at its best of these points on another seed (4.2); DDP has none to choose."""
    tuning = compare(lab, [TUNING_SEED], {arm: points for arm in arms if arm != "ddp"})
    chosen = best(tuning)
    at = {arm: chosen.get(arm, points[:1]) for arm in arms}
    return {"tuning": tuning, "runs": compare(lab, lab.seeds(usual), at)}


def paired(lab: Lab, arms: Mapping[str, str], usual: int, base: str = "diloco") -> Found:
    """Arms with their flags; `METHOD, CASE` is compared with `base, CASE` on the same seed."""
    jobs = [
        Job(arm, seed, settings, base + arm[len(arm.split(",")[0]) :])
        for (arm, settings), seed in product(arms.items(), lab.seeds(usual))
    ]
    return {"runs": lab.execute(jobs)}


def at_points(lab: Lab, arms: Mapping[str, str], seeds: Mapping[Point, int]) -> Found:
    """Arms at several points, each with its own number of seeds."""
    found: Found = {"runs": []}
    for point, usual in seeds.items():
        here = {arm + case(point): settings + outer(point) for arm, settings in arms.items()}
        found["runs"] += paired(lab, here, usual)["runs"]
    return found


def sft(lab: Lab) -> Found:
    """Fine-tuning (E.3, G.2) after a `tiny` run: wires, with and without normalisation."""
    jobs = []
    for start in paired(lab, {"start": METHODS["autoloco"]}, 3)["runs"]:
        first = f"--recipe tiny-sft --init-from runs/{start['run']}"
        for (arm, more), wire in product(SFT.items(), ("fp32", "bf16", "int8")):
            settings = f"{first} {more} --wire {wire}"
            jobs.append(Job(f"{arm}, {wire}", start["seed"], settings, f"diloco, {wire}"))
    return {"runs": lab.execute(jobs)}


def longer(lab: Lab) -> Found:
    """Five times the steps and the base horizon, at the main comparison's points."""
    points = best(train.read_json(RESULTS / "main.json")["tuning"])
    arms = {arm: points[arm] for arm in PUBLISHED}
    return {"runs": compare(lab, lab.seeds(3), arms, LONGER)}


SFT = {name: METHODS[name] for name in ("diloco", "autoloco")}
SFT["not normalised"] = "--method autoloco --no-normalise"
WORKERS = {
    f"{method}, {count} workers": f"--method {method} --workers {count}"
    for count, method in product((2, 4, 8), ("diloco", "autoloco"))
}
# Where the controller should hold back: rates far too high, workers with different text.
RESTRAINT = {f"--lr {rate}": f"--lr {rate}" for rate in ("2e-3", "2e-2", "5e-2", "1e-1", "2e-1")}
RESTRAINT |= {text: text for text in ("--partition module", "--partition module --lr 2e-2")}
PUBLISHED = dict.fromkeys(("diloco", "autoloco", "as few, even"), [(0.7, 0.9)])  # A15
READING_SEEDS = {(0.7, 0.7): 3, (0.7, 0.9): 1}
ABLATION_SEEDS = {(0.7, 0.7): 5, (0.7, 0.9): 2, (0.4, 0.7): 5}

EXPERIMENTS: dict[str, Callable[[Lab], Found]] = {
    "readings": lambda lab: at_points(lab, READINGS, READING_SEEDS),
    "main": lambda lab: tuned(lab, (*METHODS, *CONTROLS), POINTS, 5),
    "published": lambda lab: {"runs": compare(lab, lab.seeds(5), PUBLISHED)},
    "ablation": lambda lab: at_points(lab, ABLATION, ABLATION_SEEDS),
    "sft": sft,
    "wires": lambda lab: paired(lab, {w: f"--wire {w}" for w in ("fp32", "int8")}, 5, "fp32"),
    "workers": lambda lab: paired(lab, WORKERS, 1),
    "restraint": lambda lab: paired(lab, RESTRAINT, 1),
    "frontier": lambda lab: tuned(lab, FRONTIER, POINTS[:2], 3),
    "longer": longer,
}


# ---------------------------------------------------------------- tables


def readings_table(rows: Rows) -> str:
    """How many of the paper's facts each reading agrees with, in training loss."""
    arms = evaluation.by_arm(rows)
    loss = {arm: fmean(row["train_loss"] for row in group) for arm, group in arms.items()}
    size = {arm: fmean(row["update"] for row in group) for arm, group in arms.items()}
    lines = [["the paper", "", *(fact[0] for fact in FACTS.values()), ""]]
    for point, kappa in product(READING_SEEDS, ("without rho", *KAPPAS)):
        names = (
            "diloco",
            "horizon only",
            "+ momentum",
            f"full {kappa}",
            f"+ normalisation {kappa}",
        )
        d, h, m, f, n = (name + case(point) for name in names)
        values = [
            *(loss[h] - loss[d], loss[m] - loss[d], loss[f] - loss[d], loss[n] - loss[f]),
            (loss[f] - loss[h]) / (loss[m] - loss[h]),
            *(size[m] / size[h] - 1, size[n] / size[f] - 1),
        ]
        found = zip(values, FACTS.values(), strict=True)
        agree = sum(low <= value <= high for value, (_, low, high) in found)
        cells = (f"{value:+.4f}" for value in values)
        lines.append([kappa, point[1], *cells, f"{agree} of {len(FACTS)}"])
    return evaluation.table(" | ".join(["reading", "momentum", *FACTS, "agrees"]), lines)


def restraint_table(rows: Rows) -> str:
    """Where the controller held back, and why."""
    lines = []
    for row in rows:
        loss, held = evaluation.spread([row["train_loss"]]), "; ".join(row["held"]) or "-"
        executed = diloco.format_runs(row["intervals"])
        lines.append([row["arm"], loss, row["synchronisations"], executed, held])
    head = "case | train loss | syncs | executed intervals | interval: where it held back"
    return evaluation.table(head, lines)


def tables(name: str, found: Found) -> str:
    """Markdown of an experiment's kept summaries."""
    if name == "restraint":
        return restraint_table(found["runs"])
    text, arms = evaluation.results(found["runs"]), evaluation.by_arm(found["runs"])
    if name == "readings":
        text += "\n" + readings_table(found["runs"])
    if control := arms.get("as few, even"):
        apart = evaluation.paired(arms["autoloco"], control)
        below = sum(difference < 0 for difference in apart)
        text += "\nAutoLoCo minus `as few, even`, validation loss: "
        text += f"{evaluation.spread(apart, '+')}, below it on {below} of {len(apart)} seeds.\n"
    if "tuning" in found:
        lines = []
        for arm, rows in evaluation.by_arm(found["tuning"]).items():
            losses = [row["val_loss"] or math.inf for row in rows]
            lines.append([arm, *(f"{x:.4f}{' (best)' * (x == min(losses))}" for x in losses)])
        heads = ("{:g}, {:g}".format(*point_of(row)) for row in rows)
        text += "\nTuning: validation loss at outer rate and momentum, on another seed.\n\n"
        text += evaluation.table(" | ".join(["arm", *heads]), lines)
    return text


def filled(page: str, name: str, text: str) -> str:
    """The page with a table in its place, between `<!-- table: NAME -->` and `<!-- end -->`."""
    start = f"<!-- table: {name} -->\n"
    if start not in page:
        raise ValueError(f"{PAGE}: no place for the table of {name}")
    before, _, rest = page.partition(start)
    return before + start + text + rest[rest.index("<!-- end -->") :]


def page() -> str:
    """RESULTS.md as the kept summaries give it."""
    text = PAGE.read_text()
    for name in EXPERIMENTS:
        if (path := RESULTS / f"{name}.json").exists():
            text = filled(text, name, tables(name, train.read_json(path)))
    return text


def write_table(name: str, text: str) -> None:
    """Put a table into RESULTS.md."""
    PAGE.write_text(filled(PAGE.read_text(), name, text))


# ---------------------------------------------------------------- figures

LOOKS = {  # label, colour, and where the label stands from the end of its line, in points
    "diloco": ("DiLoCo", "tab:blue", (5, -8)),
    "autoloco": ("AutoLoCo", "tab:red", (5, -9)),
    "linear": ("Linear", "tab:green", (5, 2)),
    "qsr": ("QSR", "tab:purple", (5, -3)),
    "as few, even": ("DiLoCo, as few rounds as AutoLoCo", "dimgray", (-12, -18)),
}


def band(axes: Any, arm: str, seeds: Sequence[Sequence[Point]]) -> None:
    """Mean and standard deviation over seeds of one curve, its name at its end."""
    words, colour, place = LOOKS[arm]
    points = [list(zip(*same, strict=True)) for same in zip(*seeds, strict=True)]
    x, y = ([fmean(values[k]) for values in points] for k in (0, 1))
    apart = [stdev(ys) if len(ys) > 1 else 0.0 for _, ys in points]
    axes.plot(x, y, color=colour, marker="." if len(x) < 15 else "")
    low, high = ([a + s * b for a, b in zip(y, apart, strict=True)] for s in (-1, 1))
    axes.fill_between(x, low, high, color=colour, alpha=0.1, lw=0)
    look: Any = {"color": colour, "ha": "left" if place[0] > 0 else "right"}
    axes.annotate(words, (x[-1], y[-1]), place, textcoords="offset points", **look)


def headline(axes: Any, rows: Rows) -> str:
    """Smoothed training loss against the payload that a worker has sent; title."""
    for arm in LOOKS:
        curves = []
        for row in evaluation.by_arm(row for row in rows if "curve" in row)[arm]:
            ends = list(accumulate(n for count, n in row["intervals"] for _ in range(count)))
            each, parts = row["payload_bytes"] / len(ends) / 1e6, len(row["curve"])
            steps = [ends[-1] * (k + 1) / parts for k in range(parts)]
            sent = [each * sum(end <= step for end in ends) for step in steps]
            # Without the fall of the first 15 % of the steps.
            curves.append(list(zip(sent, row["curve"], strict=True))[parts * 3 // 20 :])
        band(axes, arm, curves)
    axes.set(xlabel="sent by one worker so far, MB", ylabel="training loss, nats per token")
    return (
        f"0.8M-parameter model, four workers: mean and standard deviation over {len(curves)} seeds"
    )


def frontier(axes: Any, rows: Rows) -> str:
    """Validation loss against synchronisations; title."""
    for method in ("diloco", "autoloco"):
        arms = [group for arm, group in evaluation.by_arm(rows).items() if arm.startswith(method)]
        curves = [[(row["synchronisations"], row["val_loss"]) for row in group] for group in arms]
        band(axes, method, [sorted(seed, reverse=True) for seed in zip(*curves, strict=True)])
    axes.set(xlabel="synchronisations", ylabel="validation loss, nats a token")
    return "0.8M-parameter model, four workers: mean and standard deviation over seeds"


FIGURES = {"main": headline, "frontier": frontier}


def draw(name: str, rows: Rows) -> None:
    """The figure of an experiment; with the main one the controller's, where its run is here."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(FIGURES[name](axes, rows), fontsize=10, loc="left")
    figure.savefig(HERE / f"{FIGURES[name].__name__}.png", dpi=120)
    for row in rows:
        run = Path("runs", row.get("run", ""))
        if (row["arm"], row["seed"]) == ("autoloco", 0) and (run / "summary.json").exists():
            controller = evaluation.controller_figure(evaluation.read_run(run))
            controller.savefig(HERE / "controller.png", dpi=120)


# ---------------------------------------------------------------- command line


def main(argv: list[str]) -> int:
    """Run the experiments named; then write RESULTS.md's tables and the figures."""
    if argv[:1] == ["--train-with-old-kappa"]:
        return train_with_old_kappa(argv[1:])
    parser = argparse.ArgumentParser("run", description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, help="only try it: seeds 0 to N - 1, nothing is kept")
    given = parser.parse_args(argv)
    if not set(given.names) <= set(EXPERIMENTS):
        parser.error(f"NAME is one of {', '.join(EXPERIMENTS)}")
    if given.seeds is not None and not 1 <= given.seeds <= TUNING_SEED:
        parser.error(f"--seeds {given.seeds}: 1 to {TUNING_SEED}")
    lab = Lab(TRIED if given.seeds else RESULTS, given.seeds)
    try:
        for name in given.names:
            found = EXPERIMENTS[name](lab)
            keep(lab.folder / f"{name}.json", found)
            (lab.folder / "unfinished.json").unlink(missing_ok=True)
            if given.seeds:
                print(f"\n{name}\n\n{tables(name, found)}")
    except (RuntimeError, ValueError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    if not given.seeds:
        PAGE.write_text(page())
        for name in FIGURES:
            if (path := RESULTS / f"{name}.json").exists():
                draw(name, train.read_json(path)["runs"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
