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
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

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
Point = tuple[float, ...]  # alpha_0, mu_0


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

    @property
    def log(self) -> Path:
        """A line for each step done."""
        return Path("runs", self.name, "metrics.jsonl")

    def train(self) -> dict[str, Any]:
        """Its summary; trained in a process of its own, unless this program has finished it."""
        folder = self.log.parent
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

        known, aside = kept(self.folder), self.folder / "unfinished.json"
        missing = {job.name: job for job in jobs if job.name not in known}
        total = sum(job.config.steps for job in missing.values())
        with ThreadPoolExecutor(diloco.cores()) as pool, tqdm(total=total, unit="step") as bar:
            running = {name: pool.submit(job.train) for name, job in missing.items()}
            try:
                while running:
                    time.sleep(1.0)
                    logs = [job.log for job in missing.values() if job.log.exists()]
                    bar.update(sum(log.read_bytes().count(b"\n") for log in logs) - bar.n)
                    bar.set_postfix_str(
                        f"{len(running)} of {len(missing)} runs left", refresh=False
                    )
                    for name in [name for name, future in running.items() if future.done()]:
                        known[name] = running.pop(name).result()
                        keep(aside, {"runs": list(known.values())})
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
BOUNDS = {f"bound {most}": f"--max-step-scale {most}" for most in (1.5, 1.75, 2.0)}
READINGS = {"without rho": "", **BOUNDS, "no bound": "--max-step-scale 1000"}
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
    lab: Lab, seeds: Iterable[int], points: Mapping[str, Sequence[Point]], more: str = ""
) -> Rows:
    """Every arm at its points, the controls last: they take AutoLoCo's fewest synchronisations."""
    counts: dict[int, list[int]] = {seed: [] for seed in seeds}
    rows: Rows = []
    for late in (False, True):
        jobs = [
            Job(arm, seed, flags(arm, seed, point, min(counts[seed], default=0), more), "diloco")
            for seed, arm in product(counts, points)
            for point in points[arm]
            if (arm in CONTROLS) == late
        ]
        rows += lab.execute(jobs)
        for row in rows:
            if row["arm"] == "autoloco":
                counts[row["seed"]].append(row["synchronisations"])
    return rows


def point_of(row: dict[str, Any]) -> Point:
    """Outer rate and momentum of a run, as its command gives them."""
    words = row["command"].split()
    return tuple(float(words[words.index(flag) + 1]) for flag in outer((0, 0)).split()[::2])


def best(tuning: Rows) -> dict[str, list[Point]]:
    """Arm -> the point of its lowest validation loss; DDP has no point to choose."""

    def loss(row: dict[str, Any]) -> float:
        return row["val_loss"] or math.inf

    arms = evaluation.by_arm(row for row in tuning if row["arm"] != "ddp").items()
    chosen = {arm: [point_of(min(rows, key=loss))] for arm, rows in arms}
    return chosen | {row["arm"]: [POINTS[0]] for row in tuning if row["arm"] == "ddp"}


def tuned(lab: Lab, arms: Iterable[str], points: Sequence[Point], usual: int) -> Found:
    """Every arm at its best of these points on another seed (4.2)."""
    tuning = compare(lab, [TUNING_SEED], dict.fromkeys(arms, points))
    return {"tuning": tuning, "runs": compare(lab, lab.seeds(usual), best(tuning))}


def paired(lab: Lab, arms: Mapping[str, str], usual: int, base: str = "diloco") -> Found:
    """Arms with their flags; `METHOD, CASE` is compared with `base, CASE` on the same seed."""
    jobs = [
        Job(arm, seed, settings, base + arm[len(arm.split(",")[0]) :])
        for (arm, settings), seed in product(arms.items(), lab.seeds(usual))
    ]
    return {"runs": lab.execute(jobs)}


# ---------------------------------------------------------------- experiments


def readings(lab: Lab) -> Found:
    """Readings of B.4's kappa (A14), beside the paper's facts."""
    found: Found = {"runs": []}
    for momentum, usual in ((0.7, 3), (0.9, 1)):
        point, arms = outer((0.7, momentum)), {}
        for arm in ("diloco", "horizon only", "+ momentum"):  # the same in every reading
            arms[f"{arm}, {momentum}"] = ABLATION[arm] + point
        for arm, (reading, bound) in product(("full", "+ normalisation"), READINGS.items()):
            old = f"{OLD_KAPPA} " if not bound else ""
            arms[f"{arm} {reading}, {momentum}"] = f"{old}{ABLATION[arm]}{point} {bound}"
        found["runs"] += paired(lab, arms, usual)["runs"]
    return found


def ablation(lab: Lab) -> Found:
    """Horizon, momentum, scale, normalisation, added one after the other (4.3)."""
    found: Found = {"runs": []}
    for point, usual in (((0.7, 0.7), 5), ((0.7, 0.9), 2), ((0.4, 0.7), 5)):
        words = f", {point[0]} / {point[1]}"
        arms = {arm + words: settings + outer(point) for arm, settings in ABLATION.items()}
        found["runs"] += paired(lab, arms, usual)["runs"]
    return found


def sft(lab: Lab) -> Found:
    """Fine-tuning (E.3, G.2) after a `tiny` run: wires, with and without normalisation."""
    found: Found = {"runs": []}
    starts = paired(lab, {"start": METHODS["autoloco"]}, 3)["runs"]
    for start in starts:
        first = f"--recipe tiny-sft --init-from runs/{start['run']}"
        arms = {
            f"{method}, {wire}": f"{first} --method {method} --wire {wire}"
            for method, wire in product(("diloco", "autoloco"), ("fp32", "bf16", "int8"))
        }
        arms["not normalised, bf16"] = arms["autoloco, bf16"] + " --no-normalise"
        jobs = [Job(arm, start["seed"], arms[arm], f"diloco, {arm[-4:]}") for arm in arms]
        found["runs"] += lab.execute(jobs)
    return found


def longer(lab: Lab) -> Found:
    """Five times the steps and the base horizon, at the main comparison's points."""
    points = best(train.read_json(RESULTS / "main.json")["tuning"])
    arms = {arm: points[arm] for arm in ("diloco", "autoloco", "as few, even")}
    return {"runs": compare(lab, lab.seeds(3), arms, LONGER)}


WORKERS = {
    f"{method}, {count} workers": f"--method {method} --workers {count}"
    for count, method in product((2, 4, 8), ("diloco", "autoloco"))
}
# Where the controller should hold back: rates far too high, workers with different text.
RESTRAINT = {f"--lr {rate}": f"--lr {rate}" for rate in ("2e-3", "2e-2", "5e-2", "1e-1", "2e-1")}
RESTRAINT |= {text: text for text in ("--partition module", "--partition module --lr 2e-2")}
PUBLISHED = dict.fromkeys(("diloco", "autoloco", "as few, even"), [(0.7, 0.9)])  # A15

EXPERIMENTS: dict[str, Callable[[Lab], Found]] = {
    "readings": readings,
    "main": lambda lab: tuned(lab, (*METHODS, *CONTROLS), POINTS, 5),
    "published": lambda lab: {"runs": compare(lab, lab.seeds(5), PUBLISHED)},
    "ablation": ablation,
    "sft": sft,
    "wires": lambda lab: paired(lab, {w: f"--wire {w}" for w in ("fp32", "int8")}, 5, "fp32"),
    "workers": lambda lab: paired(lab, WORKERS, 1),
    "restraint": lambda lab: paired(lab, RESTRAINT, 1),
    "frontier": lambda lab: tuned(lab, FRONTIER, POINTS[:2], 3),
    "longer": longer,
}


# ---------------------------------------------------------------- tables


def on_the_way(arms: Found) -> str:
    """Paired differences of the smoothed training loss to DiLoCo's after each quarter."""

    def after(quarter: int) -> Callable[[dict[str, Any]], float]:
        return lambda row: row["curve"][len(row["curve"]) * quarter // 4 - 1]

    known = {arm: [row for row in rows if "curve" in row] for arm, rows in arms.items()}
    base, lines = known.pop("diloco"), []
    for arm, rows in known.items():
        apart = [evaluation.paired(rows, base, after(quarter)) for quarter in (1, 2, 3, 4)]
        lines.append([arm, len(apart[0]), *(evaluation.spread(values, "+") for values in apart)])
    head = "arm | seeds | after 25 % | after 50 % | after 75 % | after 100 %"
    return evaluation.table(head, lines)


def readings_table(rows: Rows) -> str:
    """How many of the paper's facts each reading agrees with, in training loss."""
    arms = evaluation.by_arm(rows)
    loss = {arm: fmean(row["train_loss"] for row in group) for arm, group in arms.items()}
    size = {arm: fmean(row["update"] for row in group) for arm, group in arms.items()}
    lines = [["the paper", "", *(fact[0] for fact in FACTS.values()), ""]]
    for momentum, reading in product((0.7, 0.9), READINGS):
        d, h, m = (f"{arm}, {momentum}" for arm in ("diloco", "horizon only", "+ momentum"))
        f, n = (f"{arm} {reading}, {momentum}" for arm in ("full", "+ normalisation"))
        values = [
            *(loss[h] - loss[d], loss[m] - loss[d], loss[f] - loss[d], loss[n] - loss[f]),
            (loss[f] - loss[h]) / (loss[m] - loss[h]),
            *(size[m] / size[h] - 1, size[n] / size[f] - 1),
        ]
        found = zip(values, FACTS.values(), strict=True)
        agree = f"{sum(low <= v <= high for v, (_, low, high) in found)} of {len(FACTS)}"
        lines.append(
            [reading, momentum, *(f"{v:+.4f}" for v in values), f"{agree} of {len(FACTS)}"]
        )
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
    if name == "main":
        text += "\nArm minus DiLoCo on the same seed, smoothed training loss on the way:\n\n"
        text += on_the_way(arms)
    if "tuning" in found:
        lines = []
        tuning = evaluation.by_arm(row for row in found["tuning"] if row["arm"] != "ddp")
        for arm, rows in tuning.items():
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

LOOKS = {
    "diloco": ("DiLoCo", "tab:blue"),
    "autoloco": ("AutoLoCo", "tab:red"),
    "linear": ("Linear", "tab:green"),
    "qsr": ("QSR", "tab:purple"),
    "as few, even": ("DiLoCo, as few", "tab:gray"),
}


def band(axes: Any, arm: str, seeds: Sequence[Sequence[Point]]) -> None:
    """Mean and standard deviation over seeds of one curve, its name at its end."""
    words, colour = LOOKS[arm]
    points = [list(zip(*same, strict=True)) for same in zip(*seeds, strict=True)]
    x, y = ([fmean(values[k]) for values in points] for k in (0, 1))
    apart = [stdev(ys) if len(ys) > 1 else 0.0 for _, ys in points]
    axes.plot(x, y, color=colour, marker="." if len(x) < 15 else "")
    low, high = ([a + s * b for a, b in zip(y, apart, strict=True)] for s in (-1, 1))
    axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    axes.annotate(f" {words}", (x[-1], y[-1]), color=colour, va="center")


def headline(axes: Any, rows: Rows) -> None:
    """Smoothed training loss against the payload that a worker has sent."""
    for arm in LOOKS:
        seeds = []
        for row in evaluation.by_arm(rows)[arm]:
            ends = list(accumulate(n for count, n in row["intervals"] for _ in range(count)))
            each = row["payload_bytes"] / len(ends) / 1e6
            steps = [ends[-1] * (k + 1) / len(row["curve"]) for k in range(len(row["curve"]))]
            sent = [each * sum(end <= step for end in ends) for step in steps]
            seeds.append(list(zip(sent, row["curve"], strict=True))[3:])
        band(axes, arm, seeds)
    axes.set(xlabel="payload of a worker, MB", ylabel="training loss, nats a token")


def frontier_figure(axes: Any, rows: Rows) -> None:
    """Validation loss against synchronisations."""
    for method in ("diloco", "autoloco"):
        arms = [group for arm, group in evaluation.by_arm(rows).items() if arm.startswith(method)]
        curves = [[(row["synchronisations"], row["val_loss"]) for row in group] for group in arms]
        band(axes, method, [sorted(seed, reverse=True) for seed in zip(*curves, strict=True)])
    axes.set(xlabel="synchronisations", ylabel="validation loss, nats a token")


FIGURES = {"main": ("headline", headline), "frontier": ("frontier", frontier_figure)}


def draw(name: str, rows: Rows) -> None:
    """The figure of an experiment; with the main one the controller's, where its run is here."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    file, picture = FIGURES[name]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    picture(axes, rows)
    axes.margins(x=0.15)
    figure.savefig(HERE / f"{file}.png", dpi=120)
    plt.close(figure)
    for row in rows:
        run = Path("runs", row["run"])
        if row["arm"] == "autoloco" and row["seed"] == 0 and run.exists():
            _, controller = evaluation.draw([evaluation.read_run(run)], TRIED)
            controller.replace(HERE / "controller.png")


# ---------------------------------------------------------------- command line


def main(argv: list[str]) -> int:
    """Run the experiments named; then write RESULTS.md's tables and the figures."""
    if argv[:1] == ["--train-with-old-kappa"]:
        return train_with_old_kappa(argv[1:])
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, help="only try it: seeds 0 to N - 1, nothing is kept")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in EXPERIMENTS]:
        parser.error(f"{unknown[0]}: one of {', '.join(EXPERIMENTS)}")
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
    PAGE.write_text(page())
    for name in FIGURES:
        path = RESULTS / f"{name}.json"
        if path.exists() and all("program" in row for row in train.read_json(path)["runs"]):
            draw(name, train.read_json(path)["runs"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
