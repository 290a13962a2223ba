"""The runs behind RESULTS.md: one command an experiment.

    python -m experiments.run readings main published ablation sft wires workers restraint
    python -m experiments.run frontier longer
    python -m experiments.run                # only write RESULTS.md's tables and the figures again

As many runs at a time as there are cores, one process of one thread each. Every finished run is a
line of results/runs.jsonl, and none is repeated, whichever experiment needs it. A table shows what
is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import cache
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tqdm import tqdm

import autoloco
import diloco
import eval as evaluation
import train

HERE = Path(__file__).resolve().parent
KEPT, PAGE = HERE / "results" / "runs.jsonl", HERE / "RESULTS.md"
TUNING_SEED = 100  # not among the reported ones
POINTS = ((0.7, 0.5), (0.7, 0.7), (0.7, 0.9), (0.5, 0.7), (0.5, 0.9), (1.0, 0.7))  # alpha_0, mu_0
LONGER = " --steps 10000 --warmup 200 --base-horizon 100"
OLD_KAPPA = "--train-with-old-kappa"

Row = dict[str, Any]  # a finished run
Found = dict[str, list[Row]]  # part of an experiment -> its runs
Point = tuple[float, float]  # alpha_0, mu_0
Seeds = Mapping[Point | None, Sequence[int]]


class Job(NamedTuple):
    """One run of an arm, which is compared with the arm `base` seed by seed."""

    arm: str
    seed: int
    flags: str  # of train.py; before them OLD_KAPPA for the old reading of B.4
    base: str = "diloco"
    start: str = ""  # run whose weights it begins with

    @property
    def config(self) -> train.Config:
        """Settings that it trains with."""
        given = self.flags.removeprefix(OLD_KAPPA).split()
        return train.parse([*given, "--seed", str(self.seed)])[0]

    @property
    def name(self) -> str:
        """Run folder: equal settings are the same run, however they were given."""
        settings = [self.flags.startswith(OLD_KAPPA), self.start, *evaluation.settings(self.config)]
        return f"experiment-{zlib.crc32(repr(settings).encode()):08x}-{self.seed}"

    def train(self) -> Row:
        """Its summary; trained in a process of its own."""
        folder = Path("runs", self.name)
        module = "experiments.run" if self.flags.startswith(OLD_KAPPA) else "train"
        command = ["-m", module, *self.flags.split(), "--seed", str(self.seed)]
        command += ["--init-from", f"runs/{self.start}"] if self.start else []
        more = [sys.executable, *command, "--name", folder.name, "--overwrite"]
        alone = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        done = subprocess.run(more, env=alone, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-500:]}")
        one = evaluation.read_run(folder)
        ends = [max(1, len(one.smoothed) * part // 20) for part in range(1, 21)]
        return one.row | {
            "run": self.name,
            "command": " ".join(["python", *command]),
            "corpus": train.read_facts(folder)["data"].get("sha256"),
            "curve": [[sent(one, end), round(one.smoothed[end - 1], 5)] for end in ends],
            "update": [*one.update_norms.values()][-1],  # median, at the longest horizon
        }


def sent(run: evaluation.Run, step: int) -> float:
    """MB that one worker has sent by the end of a step."""
    return sum(row["payload_bytes"] for row in run.intervals if row["step"] <= step) / 1e6


PROBES = [f"--method {method}" for method in train.METHODS]
PROBES += ["--wire int8", "--normalise", "--no-scale-step --workers 2", "--partition module"]
PROBES += ["--recipe tiny-sft --method diloco", OLD_KAPPA]
PROBE = " --steps 60 --warmup 6 --base-horizon 4 --val-documents 16 --outer-lr 0.7"
PROBE += " --outer-momentum 0.9 --max-step-scale 1.5"
BITS = {
    "metrics": ("loss", "grad_norm"),
    "intervals": ("steps", "drift", "coherence", "momentum", "step_scale", "checksum"),
}


@cache
def program() -> str:
    """Hash of what this program computes: losses, weights and decisions of short runs of every
    kind. Runs of an equal program on an equal machine can be set side by side; a change that only
    reads differently keeps them.
    """
    jobs = [Job("", 0, probe + PROBE) for probe in PROBES]
    with ThreadPoolExecutor(diloco.cores()) as pool:
        [*pool.map(Job.train, jobs)]
    bits = [
        [row[key] for key in keys]
        for job, (log, keys) in product(jobs, BITS.items())
        for row in autoloco.read_rows(Path("runs", job.name, f"{log}.jsonl"))[0]
        if keys[0] in row
    ]
    return hashlib.sha256(json.dumps(bits).encode()).hexdigest()[:16]


def train_with_old_kappa(argv: list[str]) -> int:
    """train.py with the first reading of B.4, kappa = min(1.5, (1 - mu) / (1 - mu_0)): no rho."""

    def step_scale(momentum: float, base: float, ratio: float, most: float) -> float:
        return min(1.5, (1 - momentum) / (1 - base))

    autoloco.step_scale = step_scale
    return train.main(argv)


class Lab(NamedTuple):
    """The kept runs. Only a lab that trains adds what is missing; another does without."""

    store: Path
    trains: bool

    def known(self) -> dict[str, Row]:
        """The kept runs of this program by name; of the latest one where none is trained."""
        rows = autoloco.read_rows(self.store)[0] if self.store.exists() else []
        wanted = program() if self.trains else [None, *(row["program"] for row in rows)][-1]
        return {row["run"]: row for row in rows if row["program"] == wanted}

    def execute(self, jobs: Sequence[Job]) -> list[Row]:
        """A row a job, in order."""
        if self.trains:
            known = self.known()
            self.finish({job.name: job for job in jobs if job.name not in known})
        known = self.known()
        found = ((job, known.get(job.name)) for job in jobs)
        return [row | dict(arm=job.arm, base=job.base) for job, row in found if row]

    def finish(self, jobs: Mapping[str, Job]) -> None:
        """Train these, keeping every run as it comes; the bar counts steps, also of what runs."""
        self.store.parent.mkdir(parents=True, exist_ok=True)
        steps = sum(job.config.steps for job in jobs.values())
        with ThreadPoolExecutor(diloco.cores()) as pool, tqdm(total=steps, unit="step") as bar:
            running = {pool.submit(job.train) for job in jobs.values()}
            try:
                while running:
                    done, running = wait(running, 10, FIRST_COMPLETED)
                    with open(self.store, "a") as store:
                        for one in done:
                            store.write(json.dumps(one.result() | {"program": program()}) + "\n")
                    bar.n = sum(map(steps_done, jobs))
                    bar.refresh()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def steps_done(name: str) -> int:
    """Of a run that may not have begun."""
    log = Path("runs", name, "metrics.jsonl")
    return len(autoloco.read_rows(log)[0]) if log.exists() else 0


# ---------------------------------------------------------------- arms

METHODS = {name: f"--method {name}" for name in ("ddp", "diloco", "linear", "qsr", "autoloco")}
CONTROLS = ("as few, even", "as few, random")
FRONTIER = {f"diloco, H {h}": f"--base-horizon {h}" for h in (10, 14, 20, 27, 35, 45, 60, 80)}
FRONTIER |= {f"autoloco, H up to {h}": f"--max-horizon {h}" for h in (30, 40, 60, 80)}
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
    if arm == "ddp":
        return METHODS[arm] + more
    if arm not in CONTROLS:
        return f"--method {arm.split(',')[0]} {FRONTIER.get(arm, '')}" + outer(point) + more
    draw, steps = random.Random(seed), train.parse(more.split())[0].steps
    weights = [draw.uniform(0.5, 1.5) if arm == "as few, random" else 1.0 for _ in range(count)]
    ends = [0, *(round(steps * end / sum(weights)) for end in accumulate(weights))]
    lengths = [end - start for start, end in pairwise(ends)]
    horizons = diloco.format_runs(diloco.run_lengths(lengths)).replace(" ", ",")
    return f"--method diloco --horizons {horizons}" + outer(point) + more


def compare(
    lab: Lab, seeds: Sequence[int], points: Mapping[str, Sequence[Point]], more: str = ""
) -> list[Row]:
    """Every arm at its points, the controls last: they take AutoLoCo's fewest synchronisations."""
    rows: list[Row] = []
    for late in (False, True):
        jobs = []
        for seed, arm in product(seeds, (arm for arm in points if (arm in CONTROLS) == late)):
            same = [row for row in rows if (row["arm"], row["seed"]) == ("autoloco", seed)]
            count = min((row["synchronisations"] for row in same), default=0)
            if count or not late:
                jobs += [Job(arm, seed, flags(arm, seed, p, count, more)) for p in points[arm]]
        rows += lab.execute(jobs)
    return rows


def point_of(row: Row) -> Point:
    """Outer rate and momentum of a run, as its command gives them."""
    rate, momentum = re.findall(r"--outer-(?:lr|momentum) (\S+)", row["command"])
    return float(rate), float(momentum)


def best(tuning: list[Row]) -> dict[str, Sequence[Point]]:
    """Arm -> the point of its lowest validation loss."""
    chosen = {
        arm: min(rows, key=lambda row: row["val_loss"] or math.inf)
        for arm, rows in evaluation.by_arm(tuning).items()
    }
    return {arm: [point_of(row)] for arm, row in chosen.items()}


def tuned(lab: Lab, arms: Iterable[str], points: Sequence[Point], seeds: Sequence[int]) -> Found:
    """Every arm at its best of these points on another seed (4.2); DDP has none to choose."""
    tuning = compare(lab, [TUNING_SEED], {arm: points for arm in arms if arm != "ddp"})
    chosen = {"ddp": points} | best(tuning)
    at = {arm: chosen[arm][:1] for arm in arms if arm in chosen}
    return {"tuning": tuning, "runs": compare(lab, seeds, at)}


def paired(lab: Lab, arms: Mapping[str, str], seeds: Seeds, base: str = "diloco") -> Found:
    """Arms with their flags, at points with each its seeds (None: at the recipe's); `METHOD, CASE`
    is compared with `base, CASE` on the same seed.
    """
    jobs = []
    for (point, usual), (arm, settings) in product(seeds.items(), arms.items()):
        at, more = (case(point), outer(point)) if point else ("", "")
        of = base + arm[len(arm.split(",")[0]) :] + at
        jobs += [Job(arm + at, seed, settings + more, of) for seed in usual]
    return {"runs": lab.execute(jobs)}


def readings(lab: Lab) -> Found:
    """B.4's readings beside the paper's facts; before them what the tiny recipes' defaults follow:
    DiLoCo's best point, and kappa_max there and at the published momentum.
    """
    tuning = compare(lab, [TUNING_SEED], {"diloco": POINTS})
    here = {*best(tuning).get("diloco", ()), PUBLISHED["diloco"][0]}
    bounds = {f"autoloco, {kappa}": METHODS["autoloco"] + bound for kappa, bound in KAPPAS.items()}
    tried = paired(lab, bounds, dict.fromkeys(sorted(here), [TUNING_SEED]))["runs"]
    return {"tuning": tuning, "bounds": tried} | paired(lab, READINGS, READING_SEEDS)


def sft(lab: Lab) -> Found:
    """Fine-tuning (E.3, G.2) after a `tiny` run: wires, with and without normalisation."""
    starts = [Job("start", seed, METHODS["autoloco"]) for seed in range(3)]
    lab.execute(starts)
    jobs = []
    for start in starts:
        if lab.trains and not Path("runs", start.name, "summary.json").exists():
            start.train()  # its row is kept, its weights are not here
        for (arm, more), wire in product(SFT.items(), ("fp32", "bf16", "int8")):
            settings, base = f"--recipe tiny-sft {more} --wire {wire}", f"diloco, {wire}"
            jobs.append(Job(f"{arm}, {wire}", start.seed, settings, base, start.name))
    return {"runs": lab.execute(jobs)}


def longer(lab: Lab) -> Found:
    """Five times the steps and the base horizon, at the main comparison's points."""
    points = best(compare(lab, [TUNING_SEED], dict.fromkeys(PUBLISHED, POINTS)))
    return {"runs": compare(lab, range(3), points, LONGER)}


SFT = {name: METHODS[name] for name in ("diloco", "autoloco")}
SFT["not normalised"] = "--method autoloco --no-normalise"
WIRES = {wire: f"--wire {wire}" for wire in ("fp32", "int8")}
WORKERS = {
    f"{method}, {count} workers": f"--method {method} --workers {count}"
    for count, method in product((2, 4, 8), ("diloco", "autoloco"))
}
# Where the controller should hold back: rates far too high, workers with different text.
RESTRAINT = {f"--lr {rate}": f"--lr {rate}" for rate in ("2e-3", "2e-2", "5e-2", "1e-1", "2e-1")}
RESTRAINT |= {text: text for text in ("--partition module", "--partition module --lr 2e-2")}
NEAR = ((0.7, 0.7), (0.5, 0.7))  # where methods were best
PUBLISHED = dict.fromkeys(("diloco", "autoloco", "as few, even"), [(0.7, 0.9)])  # A15
READING_SEEDS: Seeds = {(0.7, 0.7): range(3), (0.7, 0.9): range(1)}
ABLATION_SEEDS: Seeds = {(0.7, 0.7): range(5), (0.7, 0.9): range(2), (0.4, 0.7): range(5)}

EXPERIMENTS: dict[str, Callable[[Lab], Found]] = {
    "readings": readings,
    "main": lambda lab: tuned(lab, (*METHODS, *CONTROLS), POINTS, range(5)),
    "published": lambda lab: {"runs": compare(lab, range(5), PUBLISHED)},
    "ablation": lambda lab: paired(lab, ABLATION, ABLATION_SEEDS),
    "sft": sft,
    "wires": lambda lab: paired(lab, WIRES, {None: range(5)}, "fp32"),
    "workers": lambda lab: paired(lab, WORKERS, {None: range(1)}),
    "restraint": lambda lab: paired(lab, RESTRAINT, {None: range(1)}),
    "frontier": lambda lab: tuned(lab, FRONTIER, NEAR, range(3)),
    "longer": longer,
}


# ---------------------------------------------------------------- tables


def readings_table(rows: list[Row]) -> str:
    """How many of the paper's facts each reading agrees with, in training loss, on the seeds that
    all its arms have.
    """
    arms = evaluation.by_arm(rows)
    lines = [["the paper", "", "", *(fact[0] for fact in FACTS.values()), ""]]
    for point, kappa in product(filter(None, READING_SEEDS), ("without rho", *KAPPAS)):
        names = [*ABLATION][:3] + [f"{arm} {kappa}" for arm in [*ABLATION][3:]]
        runs = [{row["seed"]: row for row in arms.get(name + case(point), [])} for name in names]
        seeds = set.intersection(*map(set, runs))
        if not seeds:
            continue
        d, h, m, f, n = (fmean(own[seed]["train_loss"] for seed in seeds) for own in runs)
        _, u_h, u_m, u_f, u_n = (fmean(own[seed]["update"] for seed in seeds) for own in runs)
        values = [h - d, m - d, f - d, n - f, (f - h) / (m - h), u_m / u_h - 1, u_n / u_f - 1]
        found = zip(values, FACTS.values(), strict=True)
        agree = sum(low <= value <= high for value, (_, low, high) in found)
        cells = (f"{value:+.4f}" for value in values)
        lines.append([kappa, point[1], len(seeds), *cells, f"{agree} of {len(FACTS)}"])
    head = " | ".join(["reading", "momentum", "seeds", *FACTS, "agrees"])
    return evaluation.table(head, lines) if len(lines) > 1 else ""  # the paper's line alone


def tables(name: str, found: Found) -> str:
    """Markdown of an experiment's runs."""
    arms = evaluation.by_arm(found["runs"])
    text = evaluation.results(found["runs"]) if arms else ""
    if name == "readings":
        text += "\n" + readings_table(found["runs"])
        text += "\nkappa's bound on the tuning seed.\n\n" + evaluation.results(found["bounds"])
    if control := arms.get("as few, even"):
        apart = evaluation.paired(arms["autoloco"], control)
        below = sum(difference < 0 for difference in apart)
        text += "\nAutoLoCo minus `as few, even`, validation loss: "
        text += f"{evaluation.spread(apart, '+')}, below it on {below} of {len(apart)} seeds.\n"
    if "tuning" in found:
        lines = []
        for arm, rows in evaluation.by_arm(found["tuning"]).items():
            losses = {point_of(row): row["val_loss"] or math.inf for row in rows}
            least, cells = min(losses.values()), (losses.get(point) for point in POINTS)
            lines.append(
                [arm, *(f"{x:.4f}{' (best)' * (x == least)}" if x else "-" for x in cells)]
            )
        heads = (f"{rate}, {momentum}" for rate, momentum in POINTS)
        text += "\nTuning: validation loss at outer rate and momentum, on another seed.\n\n"
        text += evaluation.table(" | ".join(["arm", *heads]), lines)
    return text.lstrip()


def filled(page: str, name: str, text: str) -> str:
    """The page with a table in its place, between `<!-- table: NAME -->` and `<!-- end -->`."""
    start = f"<!-- table: {name} -->\n"
    if start not in page:
        raise ValueError(f"{PAGE}: no place for the table of {name}")
    before, _, rest = page.partition(start)
    return before + start + text + rest[rest.index("<!-- end -->") :]


def page(lab: Lab) -> str:
    """RESULTS.md as the kept runs give it; what was not run is not in it."""
    text = PAGE.read_text()
    for name, experiment in EXPERIMENTS.items():
        found = experiment(lab)
        text = filled(text, name, tables(name, found) if any(found.values()) else "")
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
    if not seeds:
        return
    words, colour, place = LOOKS[arm]
    points = [list(zip(*same, strict=True)) for same in zip(*seeds, strict=True)]
    x, y = ([fmean(values[k]) for values in points] for k in (0, 1))
    apart = [stdev(ys) if len(ys) > 1 else 0.0 for _, ys in points]
    axes.plot(x, y, color=colour, marker="." if len(x) < 15 else "")
    low, high = ([a + s * b for a, b in zip(y, apart, strict=True)] for s in (-1, 1))
    axes.fill_between(x, low, high, color=colour, alpha=0.1, lw=0)
    look: Any = {"color": colour, "ha": "left" if place[0] > 0 else "right"}
    axes.annotate(words, (x[-1], y[-1]), place, textcoords="offset points", **look)


def headline(axes: Any, rows: list[Row]) -> None:
    """Smoothed training loss against the payload that a worker has sent."""
    for arm in LOOKS:
        # Without the fall of the first 15 % of the steps.
        band(axes, arm, [row["curve"][3:] for row in rows if row["arm"] == arm])
    axes.set(xlabel="sent by one worker so far, MB", ylabel="training loss, nats per token")


def frontier(axes: Any, rows: list[Row]) -> None:
    """Validation loss against synchronisations."""
    for method in ("diloco", "autoloco"):
        arms = [group for arm, group in evaluation.by_arm(rows).items() if arm.startswith(method)]
        curves = [[(row["synchronisations"], row["val_loss"]) for row in group] for group in arms]
        band(axes, method, [sorted(seed, reverse=True) for seed in zip(*curves, strict=True)])
    axes.set(xlabel="synchronisations", ylabel="validation loss, nats a token")


FIGURES = {"main": headline, "frontier": frontier}


def draw(name: str, rows: list[Row]) -> None:
    """The figure of an experiment; with the main one the controller's, where its run is here."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    seeds = len({row["seed"] for row in rows})
    spread = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"0.8M-parameter model, four workers: {spread}"
    axes.set_title(title, fontsize=10, loc="left")
    FIGURES[name](axes, rows)
    figure.savefig(HERE / f"{FIGURES[name].__name__}.png", dpi=120)
    for row in rows:
        run = Path("runs", row["run"])
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
    names = parser.parse_args(argv).names
    if not set(names) <= set(EXPERIMENTS):
        parser.error(f"NAME is one of {', '.join(EXPERIMENTS)}")
    try:
        for name in names:
            EXPERIMENTS[name](Lab(KEPT, trains=True))
    except (RuntimeError, ValueError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    kept = Lab(KEPT, trains=False)
    PAGE.write_text(page(kept))
    for name in FIGURES:
        if rows := EXPERIMENTS[name](kept)["runs"]:
            draw(name, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
