"""Train with AutoLoCo or one of its baselines: the paper's algorithm box (B.5) as one loop.

    python train.py                              # the tiny recipe, 4 workers in one process
    torchrun --standalone --nproc-per-node 2 train.py --method diloco
    python train.py --recipe c4-215m --dry-run   # what it would do and cost, without doing it

A run writes `runs/NAME/`: config.json, env.json, metrics.jsonl, intervals.jsonl, checkpoint/,
summary.json. Exit codes: 0 done or saved on request, 2 the user's mistake, 1 anything else.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import autoloco
import data
import diloco
import model
import quant

SOURCES = ("train.py", "autoloco.py", "diloco.py", "model.py", "data.py", "quant.py")
METHODS = ("autoloco", "diloco", "linear", "qsr", "ddp")


@dataclass(frozen=True)
class Config:
    """Every knob of a run. The comment behind a field is its help on the command line."""

    # what runs
    recipe: str = "tiny"  # named set of defaults: tiny, tiny-sft, c4-215m, ...
    method: str = "autoloco"  # autoloco, diloco, linear, qsr or ddp
    name: str = ""  # run folder runs/NAME; by default RECIPE-METHOD-SEED
    seed: int = 0  # of the initial weights and of the order of the documents
    steps: int = 2000  # inner optimizer steps of every worker
    workers: int = 4  # K, local-update workers
    ranks_per_worker: int = 1  # S, processes that shard one worker with FSDP2
    # model and data
    model: str = "tiny"  # size by name: tiny, 215m, llama3.1-8b
    init_from: str = ""  # start from a Hugging Face Llama folder or from a run folder
    data: str = "docstrings"  # docstrings, doctests, c4, ultrachat, or a path to local files
    tokenizer: str = "bytes"  # bytes, gpt2 or llama3
    chat: bool = False  # conversations: the loss is on the assistant's tokens
    partition: str = "iid"  # iid deals documents at random, module by source
    batch_size: int = 2  # sequences of one worker and step
    micro_batch: int = 0  # sequences of one forward pass; 0: the whole batch
    seq_len: int = 128  # tokens of a sequence, T
    val_documents: int = 512  # validation documents
    eval_every: int = 0  # validate every N intervals as well; 0: only at the end
    # inner optimizer (AdamW)
    lr: float = 2e-3  # eta_max, peak inner learning rate
    warmup: int = 40  # steps of linear warm-up
    weight_decay: float = 0.1  # of matrices; norms are not decayed
    beta1: float = 0.9  # AdamW's first decay
    beta2: float = 0.95  # AdamW's second decay
    grad_clip: float = 1.0  # largest gradient norm of a worker; 0: no clipping
    # intervals
    base_horizon: int = 20  # H_base, steps
    min_horizon: int | None = None  # H_min; by default 7 granularities
    max_horizon: int | None = None  # H_max; by default 1.5 base horizons
    granularity: int | None = None  # q_H; by default a tenth of the base horizon
    horizons: str = ""  # execute this sequence of steps instead, such as 8x500,5x550,250
    adapt: bool = True  # autoloco: let the controller choose horizons; else stay at the base
    # outer optimizer
    normalise: bool = False  # autoloco: divide the mean pseudo-gradient by rho (B.3)
    adjust_momentum: bool = True  # autoloco: mu_0 ** rho (B.4)
    scale_step: bool = True  # autoloco: scale the outer step by kappa (B.4)
    outer: str = "nesterov"  # nesterov, or average: plain averaging of the workers (A16)
    outer_lr: float = 0.7  # alpha_0
    outer_momentum: float = 0.9  # mu_0
    # numbers and machine
    wire: str = "fp32"  # what travels: fp32, bf16 or int8
    dtype: str = "fp32"  # computation: fp32 or bf16; parameters and states stay fp32
    compile: bool | None = None  # torch.compile; by default on a GPU only
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    # life of a run
    checkpoint_every: int = 10  # save every N intervals, and at the end
    max_bad_intervals: int = 3  # stop after N intervals in a row with a non-finite worker
    timeout_minutes: float = 30.0  # longest wait for the slowest rank at a synchronisation
    resume: bool = False  # continue runs/NAME from its latest checkpoint
    overwrite: bool = False  # delete what runs/NAME holds
    # questions that run nothing
    dry_run: bool = False  # print schedule, payload and time on a link, and stop
    json: bool = False  # with --dry-run: the last line is a JSON object
    verdicts: str = ""  # with --dry-run: replace verdicts, such as 8=moderate,9=severe
    link_gbps: float = 1.0  # with --dry-run: rate of the link, Gbit/s
    link_ms: float = 0.0  # with --dry-run: delay of a synchronisation, ms

    def __post_init__(self) -> None:
        """Check every value; nothing exists yet that a mistake could damage."""
        for name, allowed in (
            ("recipe", RECIPES),
            ("method", METHODS),
            ("model", model.SIZES),
            ("tokenizer", ("bytes", "gpt2", "llama3")),
            ("partition", ("iid", "module")),
            ("outer", ("nesterov", "average")),
            ("wire", quant.CODECS),
            ("dtype", ("fp32", "bf16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{_flag(name)} {_unknown(getattr(self, name), allowed)}")
        for name in ("steps", "workers", "ranks_per_worker", "batch_size", "base_horizon"):
            self._at_least(name, 1)
        for name in ("seq_len", "val_documents", "checkpoint_every", "max_bad_intervals"):
            self._at_least(name, 1)
        for name in ("seed", "micro_batch", "eval_every", "warmup", "weight_decay", "grad_clip"):
            self._at_least(name, 0)
        for name in ("outer_lr", "link_ms"):
            self._at_least(name, 0)
        for name in ("lr", "timeout_minutes", "link_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: a finite number above 0")
        for name in ("beta1", "beta2", "outer_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: in [0, 1)")
        if not re.fullmatch(r"[\w.\-]+", self.run_name) or self.run_name.startswith("."):
            raise ValueError(f"--name {self.name}: letters, digits, '.', '_' and '-' only")
        if self.resume and self.overwrite:
            raise ValueError("--resume and --overwrite exclude each other")
        self.rules  # noqa: B018  its checks name the flags
        self.parsed_verdicts  # noqa: B018

    def _at_least(self, name: str, least: int) -> None:
        if not least <= getattr(self, name) < math.inf:
            raise ValueError(f"{_flag(name)} {getattr(self, name)}: at least {least}")

    @property
    def run_name(self) -> str:
        """Name of the run folder."""
        return self.name or f"{self.recipe}-{self.method}-{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path("runs") / self.run_name

    @cached_property
    def rules(self) -> autoloco.Rules:
        """The paper's constants of this run. Here, and only here, a method differs from another."""
        base = self.base_horizon
        q = self.granularity if self.granularity is not None else max(1, base // 10)
        least = self.min_horizon if self.min_horizon is not None else min(7 * q, base)  # A5
        most = self.max_horizon if self.max_horizon is not None else base * 3 // 2 // q * q
        rules: dict[str, Any] = dict(
            steps=self.steps,
            lr=self.lr,
            warmup=self.warmup,
            base_horizon=self.base_horizon,
            min_horizon=least,
            max_horizon=most,
            granularity=q,
            outer_momentum=0.0 if self.outer == "average" else self.outer_momentum,
        )
        fixed = diloco.fixed_schedule(self.steps, self.base_horizon)
        if self.horizons and self.method != "ddp":
            rules["sequence"] = diloco.parse_intervals(self.horizons)
        elif self.method in ("diloco", "ddp"):
            rules["sequence"] = fixed
        elif self.method == "linear":
            rules["sequence"] = diloco.linear_schedule(self.steps, self.base_horizon)
        elif self.method == "qsr":
            rules["sequence"] = diloco.qsr_schedule(autoloco.Rules(**rules, sequence=fixed))
        elif not self.adapt:  # a ladder of one rung
            rules |= {"min_horizon": self.base_horizon, "max_horizon": self.base_horizon}
        if self.method == "autoloco":
            rules["normalise"] = self.normalise
            rules["adjust_momentum"] = self.adjust_momentum
            rules["scale_step"] = self.scale_step
        return autoloco.Rules(**rules)

    @cached_property
    def parsed_verdicts(self) -> dict[int, str]:
        """`--verdicts` as interval -> verdict."""
        verdicts = {}
        for part in filter(None, self.verdicts.split(",")):
            interval, _, verdict = part.partition("=")
            if not interval.strip().isdecimal() or int(interval) < 1:
                raise ValueError(f"--verdicts {part}: give INTERVAL=VERDICT, such as 8=moderate")
            if verdict not in autoloco.VERDICTS:
                raise ValueError(f"--verdicts {_unknown(verdict, autoloco.VERDICTS)}")
            verdicts[int(interval)] = verdict
        return verdicts


# What each recipe changes (SPEC section 9). The command line overrides it.
_C4: dict[str, Any] = dict(
    model="215m",
    data="c4",
    tokenizer="gpt2",
    steps=50_000,
    workers=8,
    batch_size=128,
    seq_len=1024,
    val_documents=4096,
    lr=4e-4,  # A17, with betas, weight decay and clipping
    warmup=1000,
    base_horizon=500,
    outer_momentum=0.9,  # A15
    wire="bf16",
    dtype="bf16",
)
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny-sft": dict(
        data="doctests",
        chat=True,
        steps=600,
        seq_len=256,
        lr=5e-4,
        warmup=20,
        base_horizon=10,
        normalise=True,
        wire="bf16",
    ),
    "c4-215m": _C4,
    "c4-215m-ablation": _C4 | dict(workers=4, outer_momentum=0.7),  # A25
    "ultrachat-8b": dict(
        model="llama3.1-8b",
        data="ultrachat",
        tokenizer="llama3",
        chat=True,
        steps=6490,
        workers=8,
        batch_size=4,  # global batches of 32: give --batch-size 2 with 16 workers
        seq_len=2048,
        val_documents=1000,
        lr=1e-5,  # A18
        warmup=200,  # A6
        base_horizon=100,
        normalise=True,
        wire="bf16",
        dtype="bf16",
    ),
}

# A resume may change these; they do not touch what is computed.
RESUME_MAY_CHANGE = {"compile", "timeout_minutes", "checkpoint_every", "resume", "overwrite"}
DRY_RUN_ONLY = ("json", "verdicts", "link_gbps", "link_ms")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _unknown(value: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(allowed), 1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"{value!r}: unknown{hint} (one of {', '.join(allowed)})"


# ---------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of leaving; names the nearest flag."""

    def error(self, message: str) -> Any:
        """Turn argparse's complaint into one line."""
        raise ValueError(message)


def _parser() -> _Parser:
    """Flags from the fields of Config; the comment behind a field becomes its help."""
    parser = _Parser(
        prog="train.py",
        description="Train with AutoLoCo, DiLoCo, Linear-Interval, QSR or DDP.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    comments = dict(re.findall(r"^    (\w+): .*?  # (.+)$", Path(__file__).read_text(), re.M))
    for field in fields(Config):
        kind = str(field.type)
        shown = "" if field.default in ("", None, False, True) else f" [{field.default}]"
        options: dict[str, Any] = {"help": comments[field.name].replace("%", "%%") + shown}
        if kind.startswith("bool"):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = {"int": int, "float": float, "str": str}[kind.split(" ")[0]]
            options["metavar"] = kind.split(" ")[0].upper()
        parser.add_argument(_flag(field.name), **options)
    return parser


def parse(argv: list[str]) -> tuple[Config, dict[str, Any]]:
    """Command line -> checked Config; with --resume the run's own config is the base.

    Args:
        argv: arguments without the program's name.
    Returns:
        The config, and what the user gave.
    Raises:
        ValueError: one line naming the flag or the file.
    """
    parser = _parser()
    parsed, rest = parser.parse_known_args(argv)
    if rest:
        flags = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(rest[0].split("=")[0], flags, 1)
        raise ValueError(
            f"{rest[0]}: no such flag" + (f", did you mean {near[0]}?" if near else "")
        )
    given = vars(parsed)
    recipe = given.get("recipe", "tiny")
    config = Config(**(RECIPES.get(recipe, {}) | given))
    if not config.resume:
        return config, given
    saved = read_json(config.folder / "config.json")["config"]
    if set(saved) != {field.name for field in fields(Config)}:
        raise ValueError(f"{config.folder / 'config.json'}: written by another version")
    for name, value in given.items():
        if name not in RESUME_MAY_CHANGE | {"name"} and saved[name] != value:
            raise ValueError(
                f"{_flag(name)} {value}: runs/{config.run_name} was started with {saved[name]}"
            )
    allowed = {name: value for name, value in given.items() if name in RESUME_MAY_CHANGE}
    return Config(**(saved | allowed)), given


def without_effect(config: Config, given: Iterable[str]) -> list[str]:
    """Warnings for settings that the user gave and that change nothing."""
    idle = []
    if not config.dry_run:
        idle += [(name, "without --dry-run") for name in DRY_RUN_ONLY]
    switches = ("adapt", "normalise", "adjust_momentum", "scale_step")
    if config.method != "autoloco":
        idle += [(name, f"with --method {config.method}") for name in switches]
    if config.rules.sequence is not None:
        ladder = ("min_horizon", "max_horizon", "granularity", "verdicts")
        idle += [(name, "without the controller") for name in ladder]
    if config.method == "ddp":
        idle += [(name, "with ddp") for name in ("outer", "outer_lr", "outer_momentum", "horizons")]
    elif config.horizons:
        idle += [("adapt", "with --horizons")]
    if config.outer == "average":
        idle += [(name, "with --outer average") for name in ("outer_lr", "outer_momentum")]
    return [f"{_flag(name)} has no effect {why}" for name, why in idle if name in given]


# ---------------------------------------------------------------- cost before you pay


def synchronisations(config: Config, intervals: list[int]) -> int:
    """Synchronisations of a run: one an interval, for ddp one a step."""
    return sum(intervals) if config.method == "ddp" else len(intervals)


def diloco_payload(config: Config) -> int:
    """Logical payload of the recipe's own DiLoCo over the same steps, for `saved`."""
    recipe = {**{f.name: f.default for f in fields(Config)}, **RECIPES[config.recipe]}
    numels = [shape.numel() for shape in model.parameter_shapes(model.SIZES[config.model]).values()]
    each = quant.payload_bytes(quant.CODECS[recipe["wire"]], numels)
    return each * math.ceil(config.steps / recipe["base_horizon"])


def totals(config: Config, intervals: list[int], payload: int) -> dict[str, Any]:
    """The keys that a summary and the last line of a dry run share (SPEC section 10)."""
    if config.method == "ddp":
        intervals = [1] * sum(intervals)
    return {
        "synchronisations": len(intervals),
        "intervals": diloco.run_lengths(intervals),
        "payload_bytes": payload,
        "saved": 1 - payload / diloco_payload(config),
    }


def dry_run(config: Config) -> dict[str, Any]:
    """Print what a run would execute, send and wait for on a link; assume that every verdict
    supports.

    Args:
        config: the run.
    Returns:
        The totals.
    """
    size = model.SIZES[config.model]
    numels = [shape.numel() for shape in model.parameter_shapes(size).values()]
    each = quant.payload_bytes(quant.CODECS[config.wire], numels)
    walked = list(autoloco.simulate(config.rules, config.parsed_verdicts))
    intervals = [planned.steps for planned, _ in walked]
    count = synchronisations(config, intervals)
    result = totals(config, intervals, each * count)
    hours = count * (each * 8 / (config.link_gbps * 1e9) + config.link_ms / 1e3) / 3600
    positions = config.steps * config.workers * config.batch_size * config.seq_len
    print(f"recipe            {config.recipe}, method {config.method}")
    print(f"model             {config.model}, {sum(numels):,} parameters")
    print(f"steps             {config.steps:,} on {config.workers} workers")
    print(f"input positions   {positions / 1e9:,.3f} G")
    print(f"intervals         {diloco.format_runs(result['intervals'])}")
    print(f"synchronisations  {count:,}")
    print(
        f"payload           {each * count / 1e9:,.3f} GB a worker and direction, as {config.wire}"
    )
    print(f"against DiLoCo    {100 * result['saved']:.1f} % saved")
    print(f"on a link         {hours:,.2f} h at {config.link_gbps:g} Gbit/s, {config.link_ms:g} ms")
    for planned, decision in walked:
        if planned.interval in config.parsed_verdicts:
            print(f"interval {planned.interval:<4}     {decision.phase}: {decision.reason}")
    return result


# ---------------------------------------------------------------- files


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: naming the file.
    """
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"{path}: damaged, not JSON") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def environment(ranks: diloco.Ranks, source: data.Source) -> dict[str, Any]:
    """Versions, hardware, corpus and a hash of the program: what a rerun would have to match."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join((here / name).read_bytes() for name in SOURCES)).hexdigest()
    gpu = torch.cuda.get_device_name() if ranks.device.type == "cuda" else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "ranks": ranks.world,
        "source_sha256": digest,
        "data": source.describe(),
    }


class Log:
    """The run's JSON-lines files, written by rank 0 at every synchronisation.

    Args:
        folder: the run folder.
        writes: whether this rank writes.
    """

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self.writes = folder, writes

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to `name`.jsonl; a number that is not finite is null."""
        if self.writes:
            with open(self.folder / f"{name}.jsonl", "a") as file:
                for row in rows:
                    clean = {
                        key: None
                        if isinstance(value, float) and not math.isfinite(value)
                        else value
                        for key, value in row.items()
                    }
                    file.write(json.dumps(clean, allow_nan=False) + "\n")

    def cut(self, step: int, interval: int) -> None:
        """Cut both files back to a checkpoint, which is at `step` after `interval` intervals."""
        if not self.writes:
            return
        for name, lines in (("metrics", step), ("intervals", 1 + interval)):
            path = self.folder / f"{name}.jsonl"
            kept = path.read_bytes().split(b"\n")[:lines]
            if len(kept) < lines or (kept and not kept[-1]):
                raise ValueError(f"{path}: holds fewer lines than the checkpoint, {lines}")
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_bytes(b"".join(line + b"\n" for line in kept))
            temporary.replace(path)


# ---------------------------------------------------------------- checkpoints


@dataclass
class Progress:
    """Where a run stands, beside its tensors.

    Args:
        state: scheduler position, mapper and controller before the current interval.
        intervals: executed steps of every completed interval.
        payload_bytes: logical payload of a worker so far.
        sent_bytes: bytes that rank 0 sent so far.
        seconds: wall-clock time so far, over all resumes.
        bad: intervals in a row with a non-finite worker.
        loss: of the last interval.
    """

    state: autoloco.State
    intervals: list[int]
    payload_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    bad: int = 0
    loss: float = math.nan


class StopFlag:
    """Set by SIGTERM and SIGINT, as often as they come."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def _request(self, *_: Any) -> None:
        self.requested = True

    def __call__(self) -> bool:
        """Whether the run should stop."""
        return self.requested


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save

    with open(path, "wb") as file:
        file.write(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
        file.flush()
        os.fsync(file.fileno())


def _shard(ranks: diloco.Ranks, name: str) -> str:
    return f"{name}-shard-{ranks.shard:02d}" if ranks.ranks_per_worker > 1 else name


def save_checkpoint(
    folder: Path, ranks: diloco.Ranks, workers: diloco.Workers, progress: Progress, patience: float
) -> str:
    """Write `checkpoint/step-XXXXXXXX`, also in the middle of an interval, without collectives.

    Every rank writes its workers' files and then a note with their checksums; rank 0 gathers the
    notes into the manifest and renames the folder, so a checkpoint is whole or not there. The last
    two are kept.

    Args:
        folder: the run folder, on a file system that all ranks see.
        ranks: the launch.
        workers: parameters, AdamW states and records.
        progress: the rest of the state.
        patience: seconds that rank 0 waits for another rank to begin.
    Returns:
        The checkpoint's name; on ranks above 0 the temporary one.
    Raises:
        RuntimeError: on rank 0, naming the ranks that did not save.
        OSError: a full disk; the earlier checkpoints stay.
    """
    parent = folder / "checkpoint"
    partial = parent / f"partial-{progress.state.step:08d}"
    partial.mkdir(parents=True, exist_ok=True)
    (partial / f"rank-{ranks.rank:03d}.begun").touch()
    written: dict[str, dict[str, torch.Tensor]] = {}
    if ranks.rank < ranks.ranks_per_worker:
        written[_shard(ranks, "shared")] = workers.shared_state()
    for row, worker in enumerate(ranks.hosted):
        written[_shard(ranks, f"worker-{worker:02d}")] = workers.worker_state(row)
    files: dict[str, str] = {}
    for name, tensors in written.items():
        path = partial / f"{name}.safetensors"
        _write_tensors(path, tensors)
        files[path.name] = _sha256(path)
    note: dict[str, Any] = {"files": files, "done": max(workers.done)}
    write_json(partial / f"rank-{ranks.rank:03d}.json", note)
    if ranks.rank:
        return partial.name
    write_json(partial / "state.json", asdict(progress))
    notes = _wait_for_notes(partial, ranks.world, patience)
    manifest: dict[str, str] = {"state.json": _sha256(partial / "state.json")}
    for note in notes:
        manifest |= note["files"]
    for path in partial.glob("rank-*"):
        path.unlink()
    write_json(partial / "manifest.json", {"files": manifest})
    target = parent / f"step-{progress.state.step + max(note['done'] for note in notes):08d}"
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    for old in sorted(parent.glob("step-*"))[:-2]:
        shutil.rmtree(old)
    return target.name


def _wait_for_notes(partial: Path, world: int, patience: float) -> list[dict[str, Any]]:
    """All ranks' notes. A rank that has not begun after `patience` seconds is taken for dead."""
    deadline = time.monotonic() + patience
    while True:
        notes = sorted(partial.glob("rank-*.json"))
        if len(notes) == world:
            return [read_json(path) for path in notes]
        begun = {path.name for path in partial.glob("rank-*.begun")}
        missing = [rank for rank in range(world) if f"rank-{rank:03d}.begun" not in begun]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"no checkpoint: rank {missing[0]} did not save its workers")
        time.sleep(0.02)


def find_checkpoint(folder: Path) -> Path:
    """The latest whole checkpoint of a run; a damaged one is named on stderr and passed over.

    Raises:
        ValueError: there is none.
    """
    for path in sorted((folder / "checkpoint").glob("step-*"), reverse=True):
        try:
            listed = read_json(path / "manifest.json")["files"]
            for name, expected in listed.items():
                if _sha256(path / name) != expected:
                    raise ValueError(f"{path / name}: checksum differs")
            return path
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"DAMAGED checkpoint passed over: {error}", file=sys.stderr)
    raise ValueError(f"{folder}: holds no whole checkpoint")


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file.

    Raises:
        ValueError: naming the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def restore(path: Path, ranks: diloco.Ranks, workers: diloco.Workers) -> Progress:
    """Put a checkpoint into the workers; any number of ranks that divides K may do so.

    Args:
        path: a checkpoint folder, found by `find_checkpoint`.
        ranks: the launch.
        workers: receive their tensors.
    Returns:
        The rest of the state.
    """
    saved = read_json(path / "state.json")
    saved["state"] = autoloco.state_from_dict(saved["state"])
    workers.load_shared(load_tensors(path / f"{_shard(ranks, 'shared')}.safetensors"))
    for row, worker in enumerate(ranks.hosted):
        name = _shard(ranks, f"worker-{worker:02d}")
        workers.load_worker(row, load_tensors(path / f"{name}.safetensors"))
    return Progress(**saved)


# ---------------------------------------------------------------- validation


@torch.no_grad()
def validate(
    network: torch.nn.Module, source: data.Source, ranks: diloco.Ranks, dtype: str
) -> dict[str, float]:
    """Token-averaged negative log-likelihood of the synchronised model on the validation documents
    (E.1).

    Draws no random number and changes nothing. Ranks share the batches; sums are taken in batch
    order, so the result does not depend on how many there are.

    Args:
        network: maps (inputs, targets) to the summed loss.
        source: gives the validation batches.
        ranks: the launch.
        dtype: fp32 or bf16 computation.
    Returns:
        `val_loss`, nats a token; `bits_per_byte`; `val_tokens`.
    """
    mine = ranks.rank // ranks.ranks_per_worker
    rows = []
    for index, batch in enumerate(source.validation()):
        sums = [0.0, 0.0, 0.0]
        if index % ranks.groups == mine:
            inputs, targets = batch.inputs.to(ranks.device), batch.targets.to(ranks.device)
            with torch.autocast(ranks.device.type, torch.bfloat16, enabled=dtype == "bf16"):
                loss = float(network(inputs, targets))
            kept = batch.targets[batch.targets != data.IGNORE]
            sums = [loss, float(len(kept)), float(source.token_bytes[kept].sum())]
        rows.append(sums)
    every = ranks.gather(torch.tensor(rows, dtype=torch.float64).view(-1))
    loss, tokens, size = every[:: ranks.ranks_per_worker].sum(0).view(-1, 3).sum(0).tolist()
    return {
        "val_loss": loss / max(1.0, tokens),
        "bits_per_byte": loss / math.log(2) / max(1.0, size),
        "val_tokens": tokens,
    }


# ---------------------------------------------------------------- the run


def open_source(config: Config) -> data.Source:
    """The documents of a run; ValueError names a file or flag."""
    return data.open_source(
        config.data,
        config.tokenizer,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        workers=config.workers,
        seed=config.seed,
        partition=config.partition,
        val_documents=config.val_documents,
        chat=config.chat,
        init_from=config.init_from,
    )


def shard_module(module: torch.nn.Module, ranks: diloco.Ranks, dtype: str) -> None:
    """Shard a module's parameters over the ranks of this worker with FSDP2.

    Args:
        module: a block, or the model after its blocks; its parameters become DTensors, fp32.
        ranks: the launch; S above 1.
        dtype: of computation: with bf16 the parameters are gathered as bf16. Gradients are summed
            in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # cast_forward_inputs would round the rotary tables to bf16.
    policy = MixedPrecisionPolicy(
        torch.bfloat16 if dtype == "bf16" else None, torch.float32, cast_forward_inputs=False
    )
    fully_shard(module, mesh=ranks.mesh["shard"], mp_policy=policy)
    # The loss is divided by the whole worker's targets, so the shards' gradients add up. gloo knows
    # no PREMUL_SUM, which the factor would become.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def build_workers(config: Config, ranks: diloco.Ranks, source: data.Source) -> diloco.Workers:
    """Model, inner optimizer and workers of a run.

    Args:
        config: the run.
        ranks: the launch.
        source: its tokenizer's ids must fit into the model's vocabulary.
    Returns:
        Workers whose parameters are the same bits on every rank.
    """
    size, weights = model.SIZES[config.model], None
    if config.init_from:
        size, weights = load_weights(Path(config.init_from))
    data.check_vocabulary(source, size.vocab_size)
    with torch.device("meta"):
        network = model.Transformer(size, config.activation_checkpointing)
    for module in (*network.blocks, network):  # one after the other: the whole is never on one GPU
        module.to_empty(device=ranks.device, recurse=False)
        if ranks.ranks_per_worker > 1:
            shard_module(module, ranks, config.dtype)
    if weights is None:
        network.init_weights(config.seed)
    else:
        for name, parameter in network.named_parameters():
            model.assign(parameter, weights.pop(name))
    named = list(network.named_parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [p for name, p in named if model.decayed(name, p) == decays],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
    compiled = config.compile if config.compile is not None else ranks.device.type == "cuda"
    options: dict[str, Any] = dict(
        clip=config.grad_clip,
        micro_batch=config.micro_batch,
        autocast=torch.bfloat16 if config.dtype == "bf16" else None,
    )
    arguments = (torch.compile(network) if compiled else network, optimizer, ranks)
    codec = quant.CODECS[config.wire]
    if config.method == "ddp":
        return diloco.DataParallel(*arguments, codec, **options)
    outer_lr = 1.0 if config.outer == "average" else config.outer_lr
    return diloco.LocalUpdate(*arguments, codec, outer_lr=outer_lr, **options)


def load_weights(path: Path) -> tuple[model.ModelConfig, dict[str, torch.Tensor]]:
    """Model configuration and parameters of a run folder or of a Hugging Face Llama folder.

    Raises:
        ValueError: naming the folder or file.
    """
    if not (path / "intervals.jsonl").exists():
        return model.load_hf(path)
    saved = read_json(path / "config.json")["config"]
    checkpoint = find_checkpoint(path)
    shards = [load_tensors(shard) for shard in sorted(checkpoint.glob("shared*.safetensors"))]
    names = [name for name in shards[0] if name.startswith("shared.")]
    weights = {name.removeprefix("shared."): torch.cat([s[name] for s in shards]) for name in names}
    if saved["init_from"]:
        return load_weights(Path(saved["init_from"]))[0], weights
    return model.SIZES[saved["model"]], weights


def interval_rows(
    config: Config, planned: autoloco.Plan, statistics: diloco.Statistics
) -> list[dict[str, Any]]:
    """One metrics row a step: the loss is the token-weighted mean over all workers.

    Args:
        config: the run.
        planned: the interval.
        statistics: with the records of all workers.
    Returns:
        Rows with `step loss tokens lr grad_norm`.
    """
    rows = []
    sums = statistics.records.sum(0)
    lrs = statistics.records[0, :, 4].tolist()
    for offset, (loss, targets, tokens, norm, _) in enumerate(sums.tolist()):
        rows.append(
            {
                "step": planned.step + offset + 1,
                "loss": loss / targets if targets else math.nan,
                "tokens": int(tokens),
                "lr": lrs[offset],
                "grad_norm": norm / config.workers,
            }
        )
    return rows


def train(
    config: Config,
    ranks: diloco.Ranks,
    workers: diloco.Workers,
    source: data.Source,
    progress: Progress,
    log: Log,
    stopping: StopFlag,
    show: Any,
) -> None:
    """The algorithm box: plan, local phase, synchronise, decide (B.5).

    Args:
        config: the run.
        ranks: the launch.
        workers: the hosted workers.
        source: gives batch(worker, step).
        progress: updated in place.
        log: the run's files.
        stopping: SIGTERM or SIGINT came.
        show: called with each progress line's values.
    Raises:
        Stop: after a signal, at a step's end.
    """
    rules = config.rules
    everyone = ranks.gather(torch.tensor([workers.wire.payload_bytes]))
    payload = int(everyone[: ranks.ranks_per_worker].sum())
    while progress.state.step < rules.steps:
        began = time.perf_counter()
        planned = autoloco.plan(rules, progress.state)
        if not any(workers.done):
            workers.begin(planned.steps)
        for step in range(planned.step, planned.step + planned.steps):
            meeting = f"step-{step}" if workers.every_step else f"interval-{planned.interval}"
            ranks.meet(meeting, stopping, arrive=workers.every_step)
            workers.set_lr(autoloco.inner_lr(rules, step))
            for row, worker in enumerate(ranks.hosted):
                if workers.done[row] <= step - planned.step:  # ahead only after a resume
                    workers.step(row, source.batch(worker, step))
            show(step + 1, planned, progress)
        ranks.meet(f"interval-{planned.interval}", stopping, arrive=True)

        middle, sent = time.perf_counter(), ranks.bytes_sent
        statistics = workers.synchronise(planned)
        workers.begin(0)
        observation = autoloco.Observation(
            statistics.drift,
            statistics.coherence,
            math.fsum(statistics.records[0, :, 4].tolist()),  # the rates that were really used
            int(statistics.records[..., 2].sum()),
        )
        progress.state, decision = autoloco.complete(rules, progress.state, planned, observation)
        # ALL RANKS: same weights and same decision here, or the next collective hangs.
        bits = diloco.checksum(workers.shared)
        verdict = zlib.crc32(repr((progress.state, decision)).encode())
        diloco.agree(ranks, {"shared parameters": bits, "decision": verdict})
        ended = time.perf_counter()

        times = planned.steps if config.method == "ddp" else 1
        progress.intervals.append(planned.steps)
        progress.payload_bytes += payload * times
        progress.sent_bytes += ranks.bytes_sent - sent
        progress.seconds += ended - began
        progress.bad = progress.bad + 1 if statistics.excluded else 0
        rows = interval_rows(config, planned, statistics)
        progress.loss = sum(row["loss"] for row in rows) / len(rows)
        last = progress.state.step == rules.steps
        if config.eval_every and planned.interval % config.eval_every == 0 and not last:
            rows[-1] |= validate(workers.model, source, ranks, config.dtype)
        log.append("metrics", rows)
        entry = autoloco.record(planned, observation, progress.state.mapper, decision) | {
            "update_norm": statistics.update_norm,
            "payload_bytes": payload * times,
            "sent_bytes": ranks.bytes_sent - sent,
            "checksum": f"{bits % 2**64:016x}",
            "excluded": list(statistics.excluded),
            "local_seconds": middle - began,
            "sync_seconds": ended - middle,
        }
        log.append("intervals", [entry])
        if progress.bad >= config.max_bad_intervals:
            raise RuntimeError(
                f"{progress.bad} intervals in a row with non-finite workers "
                f"{list(statistics.excluded)}: stopped; the last good checkpoint is kept"
            )
        if (planned.interval % config.checkpoint_every == 0 or last) and not progress.bad:
            save_checkpoint(config.folder, ranks, workers, progress, 60 * config.timeout_minutes)


def finish(
    config: Config, progress: Progress, measured: dict[str, float], folder: Path
) -> dict[str, Any]:
    """Write summary.json and print the final table.

    Args:
        config: the run.
        progress: at its end.
        measured: validation.
        folder: the run folder.
    Returns:
        The summary.
    """
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    tail = losses[-max(1, len(losses) // 50) :]
    known = [loss for loss in tail if loss is not None]
    summary = totals(config, progress.intervals, progress.payload_bytes) | {
        "train_loss": sum(known) / len(known) if known else None,  # mean of the last 2 % of steps
        "val_loss": measured["val_loss"],
        "bits_per_byte": measured["bits_per_byte"],
        "seconds": round(progress.seconds, 1),
    }
    write_json(folder / "summary.json", summary)
    executed = diloco.format_runs(summary["intervals"])
    base = RECIPES[config.recipe].get("base_horizon", Config.base_horizon)
    print(f"\n{'':18}{'loss':>8}{'val loss':>10}{'syncs':>8}{'payload':>12}{'saved':>9}")
    print(
        f"{config.method:18}{summary['train_loss']:8.4f}{summary['val_loss']:10.4f}"
        f"{summary['synchronisations']:8}{progress.payload_bytes / 1e6:9.1f} MB"
        f"{100 * summary['saved']:7.1f} %"
    )
    print(
        f"{'DiLoCo schedule':18}{'-':>8}{'-':>10}{math.ceil(config.steps / base):8}"
        f"{diloco_payload(config) / 1e6:9.1f} MB{'0.0 %':>9}"
    )
    print(f"{progress.seconds:.1f} s, {summary['bits_per_byte']:.4f} bits per byte; {executed}")
    print(f"wrote {folder}")
    return summary


class Display:
    """Progress on stderr: a bar on a terminal, else a line now and then.

    Args:
        config: the run.
        start: first step.
        visible: only local rank 0 shows.
    """

    def __init__(self, config: Config, start: int, visible: bool) -> None:
        from tqdm import tqdm

        self.total, self.start, self.visible = config.steps, start, visible
        self.began = self.last = time.monotonic()
        self.bar: Any = None
        if visible and sys.stderr.isatty():
            self.bar = tqdm(total=config.steps, initial=start, unit="step", dynamic_ncols=True)

    def __call__(self, step: int, planned: autoloco.Plan, progress: Progress) -> None:
        """Show step, loss of the last interval, horizon, interval and time to go."""
        loss = f"loss {progress.loss:.3f}" if math.isfinite(progress.loss) else "loss -"
        words = f"{loss}, horizon {planned.horizon}, interval {planned.interval}"
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str(words, refresh=False)
        elif self.visible and (step == self.start + 1 or now - self.last > 5 or step == self.total):
            self.last = now
            left = (now - self.began) / (step - self.start) * (self.total - step)
            print(f"step {step}/{self.total}: {words}, {left:.0f} s to go", file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal clean."""
        if self.bar is not None:
            self.bar.close()


def run(config: Config, given: Mapping[str, Any]) -> int:
    """Execute a checked config from the run folder to the final table.

    Args:
        config: the run.
        given: what the user set, for config.json.
    Returns:
        Exit code 0.
    Raises:
        ValueError: the user's mistake.
    """
    rank, world, local, _ = diloco.launched_ranks()
    folder, chief = config.folder, rank == 0
    if world % config.ranks_per_worker:
        raise ValueError(
            f"--ranks-per-worker {config.ranks_per_worker}: does not divide {world} ranks"
        )
    if config.workers % (world // config.ranks_per_worker):
        raise ValueError(
            f"--workers {config.workers}: not divisible by {world // config.ranks_per_worker} ranks"
        )
    if config.ranks_per_worker > 1 and config.workers != world // config.ranks_per_worker:
        raise ValueError("--ranks-per-worker above 1: one worker per group of ranks only")
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resume = config.resume or (restarted and any((folder / "checkpoint").glob("step-*")))
    if chief and not resume and folder.exists() and any(folder.iterdir()):
        if not (config.overwrite or restarted):
            raise ValueError(f"{folder} already holds a run: give --resume, --overwrite or --name")
    checkpoint = find_checkpoint(folder) if resume and chief else None
    source = open_source(config)
    ranks, words = diloco.connect(config.workers, config.ranks_per_worker, config.timeout_minutes)
    workers = build_workers(config, ranks, source)
    progress = Progress(autoloco.start(config.rules), [])
    if chief and not resume:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        changed = {name: value for name, value in asdict(config).items() if name in given}
        write_json(folder / "config.json", {"config": asdict(config), "given": changed})
        write_json(folder / "env.json", environment(ranks, source))
    log = Log(folder, chief)
    name = ranks.share(str(checkpoint or ""))
    if name:
        progress = restore(Path(name), ranks, workers)
        log.cut(progress.state.step, progress.state.interval)
    else:
        about = {name: getattr(config, name) for name in ("recipe", "method", "workers", "wire")}
        log.append("intervals", [autoloco.header(config.rules, **about)])
    if local == 0:
        count = sum(p.numel() for p in workers.parameters)
        print(f"{config.run_name}: {config.method}, {config.workers} workers, {count:,} parameters")
        print(f"machine: {words}, {config.dtype}, wire {config.wire}")
        facts, shown = source.describe(), ("data", "documents", "validation_documents", "tokenizer")
        print(", ".join(f"{name} {facts[name]}" for name in shown if name in facts))
        if name:
            print(f"resuming at step {progress.state.step + max(workers.done)}")
    stopping = StopFlag()
    display = Display(config, progress.state.step, local == 0)
    try:
        train(config, ranks, workers, source, progress, log, stopping, display)
    except diloco.Stop:
        display.close()
        where = save_checkpoint(folder, ranks, workers, progress, 10.0)
        if chief:
            print(f"saved {where}; continue with --resume --name {config.run_name}")
        return 0
    display.close()
    measured = validate(workers.model, source, ranks, config.dtype)
    if chief:
        finish(config, progress, measured, folder)
    return 0


def main(argv: list[str]) -> int:
    """Parse, check, run; see the module's exit codes.

    Args:
        argv: arguments without the program's name.
    Returns:
        The exit code.
    """
    speaks = diloco.launched_ranks()[2] == 0
    try:
        config, given = parse(argv)
        if speaks:
            for warning in without_effect(config, given):
                print(f"warning: {warning}", file=sys.stderr)
        if config.dry_run:
            if speaks:
                result = dry_run(config)
                if config.json:
                    print(json.dumps(result))
            return 0
        return run(config, given)
    except ValueError as error:
        if speaks:
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    finally:
        diloco.disconnect()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
