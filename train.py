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
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import autoloco
import data
import diloco
import model
import quant
from model import ModelConfig

SOURCES = ("train.py", "autoloco.py", "diloco.py", "model.py", "data.py", "quant.py")
METHODS = ("autoloco", "diloco", "linear", "qsr", "ddp")
# Largest values, where a larger one would exhaust the memory or overflow; 10^9 for the others.
MOST = {"steps": 10**7, "seed": 2**63 - 1, "lr": 1e38, "timeout_minutes": 1e6}


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
    timeout_minutes: float = 30.0  # wait for the slowest rank at a synchronisation; no limit before
    resume: bool = False  # continue runs/NAME from its latest checkpoint
    overwrite: bool = False  # delete what runs/NAME holds
    # questions that run nothing
    dry_run: bool = False  # print schedule, memory, payload and time on a link, and stop
    json: bool = False  # with --dry-run: the last line is a JSON object
    verdicts: str = ""  # with --dry-run: replace verdicts, such as 8=moderate,9=severe
    link_gbps: float = 1.0  # with --dry-run: rate of the link, Gbit/s
    link_ms: float = 0.0  # with --dry-run: delay of a synchronisation, ms
    step_seconds: float = 0.0  # with --dry-run: of an inner step; 0: its FLOPs at 400 TFLOP/s a GPU

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
        for name in ("outer_lr", "link_ms", "step_seconds"):
            self._at_least(name, 0)
        for name in ("min_horizon", "max_horizon", "granularity"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for name in ("lr", "timeout_minutes", "link_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: a finite number above 0")
            self._at_least(name, 0)
        for name in ("beta1", "beta2", "outer_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: in [0, 1)")
        if not re.fullmatch(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}", self.run_name):
            raise ValueError(f"--name {self.name}: up to 200 letters, digits, '.', '_' and '-'")
        self.rules  # noqa: B018  its checks name the flags
        self.parsed_verdicts  # noqa: B018

    def _at_least(self, name: str, least: int) -> None:
        value, most = getattr(self, name), MOST.get(name, 10**9)
        if not least <= value < math.inf:
            raise ValueError(f"{_flag(name)} {value}: at least {least}")
        if value > most:
            raise ValueError(f"{_flag(name)} {value}: at most {most}")

    @property
    def run_name(self) -> str:
        """Name of the run folder."""
        return self.name or f"{self.recipe}-{self.method}-{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path("runs") / self.run_name

    @property
    def shape(self) -> ModelConfig:
        """Shape of the model: by name, or that of the folder whose weights it starts from."""
        folder = str(self.folder) if self.resume else self.init_from
        return run_shape(Path(folder)) if folder else model.SIZES[self.model]

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


# What each recipe changes. The command line overrides it.
_C4: dict[str, Any] = dict(
    model="215m",
    data="c4",
    tokenizer="gpt2",
    steps=50_000,
    workers=8,
    batch_size=128,
    micro_batch=32,  # what 80 GB hold
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
RESUME_MAY_CHANGE = {
    *("name", "resume", "overwrite"),
    *("compile", "timeout_minutes", "checkpoint_every"),
}
DRY_RUN_ONLY = ("json", "verdicts", "link_gbps", "link_ms", "step_seconds")


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
    if given.get("resume"):
        if given.get("overwrite"):
            raise ValueError("--resume and --overwrite exclude each other")
        named = {
            name: given[name] for name in ("recipe", "method", "name", "seed") if name in given
        }
        folder = Config(**named).folder
        config = replace(load_config(folder), name=folder.name, resume=True)
        for name, value in given.items():
            if name not in RESUME_MAY_CHANGE and getattr(config, name) != value:
                started = getattr(config, name)
                raise ValueError(f"{_flag(name)} {value}: {folder} was started with {started}")
        return replace(config, **given | {"name": folder.name}), given
    config = Config(**(RECIPES.get(given.get("recipe", "tiny"), {}) | given))
    if config.seq_len > (positions := config.shape.max_seq_len):
        raise ValueError(f"--seq-len {config.seq_len}: the model has {positions} positions")
    return config, given


def without_effect(config: Config, given: Iterable[str]) -> list[str]:
    """Warnings for settings that the user gave and that change nothing, and for one not given."""
    idle = []
    if not config.dry_run:
        idle += [(name, "without --dry-run") for name in DRY_RUN_ONLY]
    if config.init_from:
        idle += [("model", "with --init-from")]
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
    elif not config.adapt:
        idle += [(name, "with --no-adapt") for name in ("min_horizon", "max_horizon")]
    if config.outer == "average":
        names = ("outer_lr", "outer_momentum", "adjust_momentum", "scale_step")
        idle += [(name, "with --outer average") for name in names]
    lines = [f"{_flag(name)} has no effect {why}" for name, why in idle if name in given]
    if config.chat and not (config.init_from or config.resume or config.dry_run):
        lines.append("no --init-from: fine-tuning starts from random weights")
    return lines


# ---------------------------------------------------------------- cost before you pay


SUSTAINED_FLOPS = 400e12  # of a GPU: 40 % of an H100's dense bf16 peak
FITS = 72e9  # bytes of an 80 GB GPU


def diloco_payload(config: Config) -> int:
    """Logical payload of the recipe's own DiLoCo over the same steps, for `saved`."""
    recipe = {**{f.name: f.default for f in fields(Config)}, **RECIPES[config.recipe]}
    numels = [shape.numel() for shape in model.parameter_shapes(config.shape).values()]
    each = quant.payload_bytes(quant.CODECS[recipe["wire"]], numels)
    return each * math.ceil(config.steps / recipe["base_horizon"])


def totals(config: Config, intervals: list[int], payload: int) -> dict[str, Any]:
    """The keys that a summary and the last line of a dry run share."""
    if config.method == "ddp":
        intervals = [1] * sum(intervals)
    return {
        "synchronisations": len(intervals),
        "intervals": diloco.run_lengths(intervals),
        "payload_bytes": payload,
        "saved": 1 - payload / diloco_payload(config),
    }


def shard_numels(config: Config, shard: int) -> dict[str, int]:
    """Elements of each parameter on one rank of a worker: FSDP2 cuts dimension 0 like torch.chunk.

    Args:
        config: gives model and S.
        shard: below S.
    """
    numels = {}
    for name, shape in model.parameter_shapes(config.shape).items():
        rows = math.ceil(shape[0] / config.ranks_per_worker)
        rows = min(rows, max(0, shape[0] - shard * rows))
        numels[name] = rows * shape[1:].numel()
    return numels


def payload_per_synchronisation(config: Config) -> int:
    """Logical payload of one synchronisation: a worker's encoded pseudo-gradient, all shards."""
    codec = quant.CODECS[config.wire]
    shards = [shard_numels(config, shard) for shard in range(config.ranks_per_worker)]
    return sum(quant.payload_bytes(codec, list(numels.values())) for numels in shards)


def step_seconds(config: Config) -> float:
    """Estimate of an inner step: --step-seconds, or FLOPs at a sustained rate.

        FLOPs of a token = 6 (parameters in matrix products) + 12 layers C T

    over the rows of one GPU, a third more with activation checkpointing. FSDP2's own traffic is
    taken to hide behind it.

    Source: PaLM (arXiv:2204.02311), appendix B.
    """
    size = config.shape
    lookup = 0 if size.tied else size.vocab_size * size.width
    products = model.parameter_count(size) - lookup
    flops = 6 * products + 12 * size.layers * size.width * config.seq_len
    tokens = math.ceil(config.batch_size / config.ranks_per_worker) * config.seq_len
    again = 4 / 3 if config.activation_checkpointing else 1.0
    return config.step_seconds or tokens * flops * again / SUSTAINED_FLOPS


def memory_per_gpu(config: Config, hosted: int) -> dict[str, float]:
    """Estimate of one GPU's memory in bytes, by purpose.

        states       4 n (3 R + 1) + 8 n    parameters and AdamW of R workers, gradients; shared, m
        wire         e (1/2 + R (G-1)/G)    the mean, sent and received parts: two pieces of four
        copies       2 n in bf16; S > 1: c (3 b + 2 r) + 4 max(b, r), as FSDP2 gathers two blocks
                     and the rest, and reduces the gradient of one and the rest in fp32
        activations  tokens (layers (16 C + c (5 C + 3 D G' + 4 F)) + 16 C); with checkpointing
                     tokens (layers 4 C + one layer's + 16 C)
        loss         logits as c bytes, twice as fp32; 4 V C for the gradient of a chunked head

    n parameters of a rank (S-th part), b and r of a block and outside of blocks, e encoded bytes of
    n, c bytes of a number in computation, G groups of ranks, D G' width of keys, F of SwiGLU, R
    hosted workers. ddp holds R gradients and neither shared parameters nor m. Not in it: what torch
    and the driver need, and fragmentation; `FITS` leaves a tenth for them.

    Args:
        config: the run.
        hosted: R, workers of a rank.
    Returns:
        Bytes by purpose.
    """
    size, S, groups = config.shape, config.ranks_per_worker, config.workers // hosted
    local, whole = shard_numels(config, 0), model.parameter_shapes(size)
    n, c = sum(local.values()), 2 if config.dtype == "bf16" else 4
    states = 4 * n * (3 * hosted + 1) + 8 * n
    if config.method == "ddp":
        states = 4 * n * (3 + hosted)
    encoded = quant.payload_bytes(quant.CODECS[config.wire], list(local.values()))
    wire = encoded * (0.5 + hosted * (groups - 1) / groups) if groups > 1 else 0
    rest = sum(shape.numel() for name, shape in whole.items() if not name.startswith("blocks."))
    block = (model.parameter_count(size) - rest) // size.layers
    copies = 2 * n if c == 2 else 0
    if S > 1:
        copies = c * (3 * block + 2 * rest) + 4 * max(block, rest)
    rows = math.ceil(config.batch_size / S)
    tokens = min(config.micro_batch or rows, rows) * config.seq_len
    C, keys = size.width, size.kv_heads * size.head_dim
    layer = 16 * C + c * (5 * C + 3 * keys + 4 * size.ffn_width)
    kept = size.layers * 4 * C + layer if config.activation_checkpointing else size.layers * layer
    logits, head = tokens * size.vocab_size * c, 0
    if size.vocab_size > model.LARGE_VOCABULARY:
        logits, head = min(logits, model.CHUNK_BYTES["cuda"]), 4 * size.vocab_size * C
    return {
        "states": states,
        "wire": wire,
        "copies": copies,
        "activations": tokens * (kept + 16 * C),
        "loss": logits * (1 + 8 / c) + head,
    }


def compare_methods(
    config: Config, walked: list[tuple[autoloco.Plan, autoloco.Decision]]
) -> dict[str, dict[str, float]]:
    """Cost of every method on the link of --link-gbps and --link-ms.

        hours = synchronisations (payload 8 / rate + delay) / 3600
        utilisation = computing / (computing + hours)

    Args:
        config: the run.
        walked: its own intervals; the other methods take theirs from the same base horizon.
    Returns:
        For each method `synchronisations payload_bytes saved hours utilisation`.
    """
    each = payload_per_synchronisation(config)
    delay = each * 8 / (config.link_gbps * 1e9) + config.link_ms / 1e3
    computing = config.steps * step_seconds(config) / 3600
    table: dict[str, dict[str, float]] = {}
    for method in METHODS:
        rows = walked
        if method != config.method:
            try:
                other = replace(config, method=method, horizons="", verdicts="")
            except ValueError:
                continue  # a ladder that does not fit is no mistake in a run without the controller
            rows = list(autoloco.simulate(other.rules))
        count = config.steps if method == "ddp" else len(rows)
        hours = count * delay / 3600
        table[method] = {
            "synchronisations": count,
            "payload_bytes": each * count,
            "saved": 1 - each * count / diloco_payload(config),
            "hours": hours,
            "utilisation": computing / (computing + hours),
        }
    return table


def dry_run(config: Config) -> dict[str, Any]:
    """Print what a run would execute, hold, send and wait for on a link, beside the other methods;
    assume that every verdict supports.

    Args:
        config: the run.
    Returns:
        The totals, parameters, input positions, bytes of a GPU (with one worker on S of them), and
        `compare_methods`.
    """
    walked = list(autoloco.simulate(config.rules, config.parsed_verdicts))
    methods = compare_methods(config, walked)
    mine, count = methods[config.method], model.parameter_count(config.shape)
    positions = config.steps * config.workers * config.batch_size * config.seq_len
    result = totals(config, [planned.steps for planned, _ in walked], int(mine["payload_bytes"]))
    print(f"recipe            {config.recipe}, method {config.method}")
    print(f"model             {config.model}, {count:,} parameters")
    print(f"steps             {config.steps:,} on {config.workers} workers")
    print(f"input positions   {positions / 1e9:,.3f} G")
    print(f"intervals         {diloco.format_runs(result['intervals'])}")
    memory = {}
    for hosted in (config.workers, 1) if config.ranks_per_worker == 1 else (1,):
        memory = memory_per_gpu(config, hosted)
        total, gpus = sum(memory.values()), config.workers // hosted * config.ranks_per_worker
        fits = "fits" if total <= FITS else "does not fit"
        words = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in memory.items())
        print(f"memory on {gpus:<8}{total / 1e9:.3g} GB a GPU, {fits} in 80: {words}")
    payload = payload_per_synchronisation(config) / 1e9
    print(f"payload           {payload:,.3f} GB a worker and direction, as {config.wire}")
    print(f"link              {config.link_gbps:g} Gbit/s and {config.link_ms:g} ms")
    source = "as given" if config.step_seconds else "its FLOPs at 400 TFLOP/s a GPU"
    print(f"step              {step_seconds(config):.3g} s, {source}")
    print(f"\n{'':12}{'syncs':>8}{'GB':>14}{'saved':>13}{'h on link':>12}{'utilisation':>13}")
    for method, row in methods.items():
        print(
            f"{method:12}{row['synchronisations']:8,}{row['payload_bytes'] / 1e9:14,.3f}"
            f"{100 * row['saved']:11,.1f} %{row['hours']:12.3g}{100 * row['utilisation']:11.1f} %"
        )
    for planned, decision in walked:
        if planned.interval in config.parsed_verdicts:
            print(f"interval {planned.interval:<4}     {decision.phase}: {decision.reason}")
    more = {"parameters": count, "input_positions": positions, "memory_bytes": memory}
    return result | more | {"methods": methods}


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


def load_config(folder: Path) -> Config:
    """The config that a run was started with.

    Raises:
        ValueError: naming the file.
    """
    path = folder / "config.json"
    saved = read_json(path)
    try:
        if set(saved["config"]) != {field.name for field in fields(Config)}:
            raise ValueError("written by another version of this program")
        return Config(**(saved["config"] | {"resume": False, "overwrite": False}))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (KeyError, TypeError):
        raise ValueError(f"{path}: damaged") from None


def read_facts(folder: Path) -> dict[str, Any]:
    """What `environment` wrote.

    Raises:
        ValueError: naming the file.
    """
    facts = read_json(folder / "env.json")
    if not isinstance(facts, dict) or not isinstance(facts.get("data"), dict):
        raise ValueError(f"{folder / 'env.json'}: damaged")
    return facts


def write_file(path: Path, content: bytes) -> str:
    """Write a file whole or not at all, through to the disk; returns its SHA-256."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)
    return hashlib.sha256(content).hexdigest()


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk, as a file's content alone does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> str:
    """Write a JSON file whole or not at all; returns its SHA-256."""
    return write_file(path, json.dumps(value, indent=1).encode() + b"\n")


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
        "launch": launch(),
        "data": source.describe(),
    }


def launch() -> str:
    """Names this launch, the same after a restart by torchrun; empty under plain python."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{name} of {os.getppid()} on {platform.node()}" if name else ""


class Log:
    """The run's JSON-lines files, written by rank 0 at every synchronisation.

    Args:
        folder: the run folder.
        writes: whether this rank writes.
    """

    FILES = {"metrics": ("step", 1), "intervals": ("interval", 0)}  # counted by, from

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self.writes = folder, writes

    def path(self, name: str) -> Path:
        """The file of `name`."""
        return self.folder / f"{name}.jsonl"

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to `name`.jsonl; a number that is not finite is null."""
        if not self.writes:
            return
        try:
            with open(self.path(name), "a") as file:
                for row in rows:
                    file.write(json.dumps(finite(row), allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(f"{self.path(name)}: {error.strerror}") from None

    def flush(self) -> None:
        """Put the files on the disk, as a checkpoint that counts their lines must find them."""
        for name in self.FILES:
            with open(self.path(name), "rb") as file:
                os.fsync(file.fileno())

    def kept(self, name: str, count: int) -> bytes:
        """The first `count` lines of `name`.jsonl.

        Raises:
            ValueError: naming the file, and the line that is missing or damaged.
        """
        path, (key, first) = self.path(name), self.FILES[name]
        try:
            lines = path.read_bytes().split(b"\n")[:-1]  # a complete file ends with a newline
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        if len(lines) < count:
            raise ValueError(f"{path}: {len(lines)} lines, but the checkpoint was saved at {count}")
        for number, line in enumerate(lines[:count], first):
            try:
                whole = json.loads(line).get(key, 0) == number
            except (ValueError, AttributeError):
                whole = False
            if not whole:
                raise ValueError(f"{path}: line {number + 1 - first} is damaged")
        return b"".join(line + b"\n" for line in lines[:count])

    def cut(self, state: autoloco.State) -> None:
        """Cut both files back to a checkpoint; says if a torn last line goes."""
        for name, kept in self.at(state).items() if self.writes else ():
            path = self.path(name)
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                print(f"{path}: the torn last line is dropped", file=sys.stderr)
            write_file(path, kept)

    def at(self, state: autoloco.State) -> dict[str, bytes]:
        """Both files as they were at a checkpoint: one row a step, header and one an interval."""
        counts = {"metrics": state.step, "intervals": 1 + state.interval}
        return {name: self.kept(name, count) for name, count in counts.items()}


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy for JSON: a number that is not finite is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


# ---------------------------------------------------------------- checkpoints


@dataclass
class Progress:
    """Where a run stands, beside its tensors.

    Args:
        state: scheduler position, mapper and controller before the current interval.
        intervals: executed steps of every completed interval.
        payload_bytes: logical payload of a worker so far.
        sent_bytes: bytes that rank 0 sent in completed intervals.
        unlogged_bytes: bytes that it sent in this one (ddp sends at every step).
        seconds: wall-clock time so far, over all resumes.
        bad: intervals in a row with a non-finite worker.
        loss: of the last interval.
    """

    state: autoloco.State
    intervals: list[int]
    payload_bytes: int = 0
    sent_bytes: int = 0
    unlogged_bytes: int = 0
    seconds: float = 0.0
    bad: int = 0
    loss: float = math.nan


class StopFlag:
    """Set by SIGTERM and SIGINT, as often as they come."""

    def __init__(self, others: Sequence[subprocess.Popen[bytes]]) -> None:
        self.requested, self.others = False, others
        signals = (signal.SIGTERM, signal.SIGINT)
        self.before = {number: signal.signal(number, self._request) for number in signals}

    def _request(self, *_: Any) -> None:
        self.requested = True
        for process in self.others:  # which this process started, so nobody else tells them
            process.terminate()

    def release(self) -> None:
        """All is saved: from here on a signal ends the process as usual."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.before[number])

    def __call__(self) -> bool:
        """Whether the run should stop."""
        return ended(self.others) or self.requested


def ended(others: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Whether a process that this one started is gone: False, or no return at all.

    Raises:
        LostPeer: naming it; without this the next meeting would wait for it.
    """
    for rank, process in enumerate(others, 1):
        if process.poll():
            raise diloco.LostPeer(f"lost rank {rank}, which ended with {process.returncode}")
    return False


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shard(ranks: diloco.Ranks, name: str) -> str:
    return f"{name}-shard-{ranks.shard:02d}" if ranks.ranks_per_worker > 1 else name


def save_checkpoint(
    config: Config,
    ranks: diloco.Ranks,
    workers: diloco.Workers,
    progress: Progress,
    log: Log,
    stopping: StopFlag,
    label: str,
) -> str:
    """Write `checkpoint/step-XXXXXXXX`, also in the middle of an interval, without collectives.

    Every rank writes its workers' files and then a note with their checksums; rank 0 gathers the
    notes into the manifest and renames the folder, so a checkpoint is whole or not there. The last
    two are kept, and the last one without a bad interval.

    Args:
        config: the run; its folder is on a file system that all ranks see.
        ranks: the launch.
        workers: parameters, AdamW states and records.
        progress: the rest of the state.
        log: the run's files, complete up to `progress`.
        stopping: whether there is little time.
        label: of the unfinished folder: a rank may save on request while rank 0 still gathers the
            notes of the interval before.
    Returns:
        The checkpoint's name; on ranks above 0 the temporary one.
    Raises:
        LostPeer: on rank 0, naming a rank that did not save.
        OSError: a full disk; the earlier checkpoints stay.
    """
    from safetensors.torch import save

    parent = config.folder / "checkpoint"
    partial = parent / f"partial-{label}"
    begun = partial / f"rank-{ranks.rank:03d}.begun"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        begun.touch()
        written: dict[str, dict[str, torch.Tensor]] = {}
        if ranks.rank < ranks.ranks_per_worker:
            written[_shard(ranks, "shared")] = workers.shared_state()
        for row, worker in enumerate(ranks.hosted):
            written[_shard(ranks, f"worker-{worker:02d}")] = workers.worker_state(row)
        files: dict[str, str] = {}
        for name, tensors in written.items():
            host = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
            files[f"{name}.safetensors"] = write_file(partial / f"{name}.safetensors", save(host))
        note: dict[str, Any] = {"files": files, "done": max(workers.done)}
        write_json(partial / f"rank-{ranks.rank:03d}.json", note)
        if ranks.rank:
            return partial.name
        log.flush()
        state = {"config": asdict(config)} | asdict(progress)
        manifest = {"state.json": write_json(partial / "state.json", state)}
        notes = _wait_for_notes(partial, ranks, stopping)
        for note in notes:
            manifest |= note["files"]
        for path in partial.glob("rank-*"):
            path.unlink()
        write_json(partial / "manifest.json", {"files": manifest})
        target = parent / f"step-{progress.state.step + max(note['done'] for note in notes):08d}"
        before = parent / f"{target.name}-before"
        if target.exists():  # saved on request at the same step, maybe before its synchronisation
            shutil.rmtree(before, ignore_errors=True)
            target.rename(before)
        partial.rename(target)
        sync_folder(parent)
        shutil.rmtree(before, ignore_errors=True)
        found = sorted(parent.glob("step-*"))
        kept = found[-2:]
        if progress.bad:  # the last one before the bad intervals stays as well
            kept += [path for path in found if not read_json(path / "state.json")["bad"]][-1:]
        for path in found:
            if path not in kept:
                shutil.rmtree(path)
        return target.name
    except OSError as error:
        begun.unlink(missing_ok=True)  # rank 0 need not wait for this one
        raise OSError(
            f"{partial}: {error.strerror}: not saved; the checkpoints before it stay"
        ) from None


def _wait_for_notes(partial: Path, ranks: diloco.Ranks, stopping: StopFlag) -> list[dict[str, Any]]:
    """All ranks' notes. When the run is stopped, a rank that has not begun to write after 10
    seconds is taken for dead: torchrun ends the others 30 seconds after it sent SIGTERM.
    """
    began, limit = time.monotonic(), ranks.timeout.total_seconds()
    while True:
        notes = {rank: partial / f"rank-{rank:03d}.json" for rank in ranks.everyone}
        missing = [rank for rank, note in notes.items() if not note.exists()]
        if not missing:
            return [read_json(note) for note in notes.values()]
        absent = [rank for rank in missing if not notes[rank].with_suffix(".begun").exists()]
        waited = time.monotonic() - began
        if waited > limit or (stopping() and absent and waited > 10):
            names = ", ".join(map(str, absent or missing))
            raise diloco.LostPeer(f"no checkpoint: rank {names} did not save its workers")
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
            print(f"DAMAGED CHECKPOINT {path} is passed over: {error}", file=sys.stderr)
    raise ValueError(f"{folder}: no whole checkpoint; --overwrite starts again from the beginning")


def check_checkpoint(config: Config, path: Path, log: Log) -> None:
    """Refuse a checkpoint that would not continue this run, before anything is touched.

    Args:
        config: the run.
        path: a checkpoint folder, found by `find_checkpoint`.
        log: the run's files.
    Raises:
        ValueError: naming the setting that differs, or a file.
    """
    saved = read_json(path / "state.json")
    for name, value in asdict(config).items():
        if name not in RESUME_MAY_CHANGE and saved["config"][name] != value:
            raise ValueError(
                f"{_flag(name)} {value}: {path} was saved with {saved['config'][name]}"
            )
    log.at(autoloco.state_from_dict(saved["state"]))


def check_data(config: Config, source: data.Source, facts: Mapping[str, Any]) -> None:
    """Refuse other documents than those that a run was started with.

    Args:
        config: the run.
        source: what was opened.
        facts: what its `describe` said at the start.
    Raises:
        ValueError: naming the fact that differs.
    """
    for name, value in source.describe().items():
        if name in facts and facts[name] != value:
            raise ValueError(
                f"--data {config.data}: {name} is {value}; {config.folder / 'env.json'}, from the "
                f"run's start, has {facts[name]} (without that entry the change is accepted)"
            )


def tidy_checkpoints(path: Path) -> None:
    """Put aside what a resume from `path` passed over, so that new checkpoints take its place."""
    for other in path.parent.iterdir():
        if other.name.startswith("partial-"):
            shutil.rmtree(other)
        elif other.name.startswith("step-") and other.name > path.name:
            aside = path.parent / f"damaged-{other.name}"
            shutil.rmtree(aside, ignore_errors=True)
            other.rename(aside)


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
    del saved["config"]
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


def open_source(config: Config, revision: str = "") -> data.Source:
    """The documents of a run, from the hub as of `revision`; ValueError names a file or flag."""
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
        revision=revision,
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

    dtypes = (torch.bfloat16, torch.float32) if dtype == "bf16" else (None, None)
    # cast_forward_inputs would round the rotary tables to bf16.
    policy = MixedPrecisionPolicy(dtypes[0], dtypes[1], cast_forward_inputs=False)
    sharded = fully_shard(module, mesh=ranks.mesh["shard"], mp_policy=policy)
    # The loss is divided by the whole worker's targets, so the shards' gradients add up. gloo knows
    # no PREMUL_SUM, which the factor would become.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def build_workers(config: Config, ranks: diloco.Ranks, source: data.Source) -> diloco.Workers:
    """Model, inner optimizer and workers of a run.

    Args:
        config: the run.
        ranks: the launch.
        source: its tokenizer's ids must fit into the model's vocabulary.
    Returns:
        Workers whose parameters are the same bits on every rank.
    """
    size, weights = config.shape, None
    if config.init_from and not config.resume:
        weights = load_weights(Path(config.init_from))
    data.check_vocabulary(source, size.vocab_size)
    compiled = config.compile if config.compile is not None else ranks.device.type == "cuda"
    with torch.device("meta"):
        network = model.Transformer(size, config.activation_checkpointing)
    for module in (*network.blocks, network):  # one after the other: the whole is never on one GPU
        module.to_empty(device=ranks.device, recurse=False)
        if compiled and module is not network:
            module.compile()
        if ranks.ranks_per_worker > 1:
            shard_module(module, ranks, config.dtype)
    if weights is None:
        network.init_weights(config.seed)
    else:
        parameters = dict(network.named_parameters())
        for name, value in weights:
            model.assign(parameters[name], value)
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
    options: dict[str, Any] = dict(
        clip=config.grad_clip,
        micro_batch=config.micro_batch,
        autocast=torch.bfloat16 if config.dtype == "bf16" else None,
    )
    arguments = (network, optimizer, ranks)
    codec = quant.CODECS[config.wire]
    if config.method == "ddp":
        return diloco.DataParallel(*arguments, codec, **options)
    outer_lr = 1.0 if config.outer == "average" else config.outer_lr
    return diloco.LocalUpdate(*arguments, codec, outer_lr=outer_lr, **options)


def run_shape(folder: Path) -> ModelConfig:
    """Model shape of a run folder or of a Hugging Face Llama folder.

    Raises:
        ValueError: naming the folder or file.
    """
    if not (folder / "intervals.jsonl").exists():
        return model.read_config(folder)
    try:
        return model.ModelConfig(**read_json(folder / "config.json")["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: damaged ({error})") from None


def load_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a run folder or of a Hugging Face Llama folder.

    Args:
        folder: where they lie.
    Returns:
        (name, full tensor) one at a time: a rank that keeps a shard of an 8B model never holds the
        whole.
    Raises:
        ValueError: naming the folder or file.
    """
    if (folder / "intervals.jsonl").exists():
        return _shared_parameters(find_checkpoint(folder))
    return model.read_weights(folder, model.read_config(folder), torch.float32)


def _shared_parameters(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The synchronised model of a checkpoint, from FSDP2's cuts on dimension 0; some are empty."""
    from safetensors import safe_open

    with ExitStack() as stack:
        files = sorted(checkpoint.glob("shared*.safetensors"))
        shards = [stack.enter_context(safe_open(file, "pt")) for file in files]
        for key in shards[0].keys():
            if key.startswith("shared."):
                parts = [shard.get_tensor(key) for shard in shards]
                yield key.removeprefix("shared."), torch.cat(parts)


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
        began, before = time.perf_counter(), ranks.bytes_sent - progress.unlogged_bytes
        planned = autoloco.plan(rules, progress.state)
        if not any(workers.done):
            workers.begin(planned.steps)
        try:
            for step in range(planned.step, planned.step + planned.steps):
                ranks.meet(f"step-{step} of {workers.party}", stopping, workers.party)
                workers.set_lr(autoloco.inner_lr(rules, step))
                for row, worker in enumerate(ranks.hosted):
                    if workers.done[row] <= step - planned.step:  # ahead only after a resume
                        batch = source.batch(worker, step)
                        with ranks.naming_lost_shards():
                            workers.step(row, batch)
                show(step + 1, planned, progress)
            ranks.meet(f"interval-{planned.interval}", stopping, ranks.everyone)
        except diloco.Stop:
            progress.unlogged_bytes = ranks.bytes_sent - before
            progress.seconds += time.perf_counter() - began
            raise

        middle = time.perf_counter()
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
        ended, sent = time.perf_counter(), ranks.bytes_sent - before
        progress.unlogged_bytes = 0

        times = planned.steps if config.method == "ddp" else 1
        progress.intervals.append(planned.steps)
        progress.payload_bytes += payload * times
        progress.sent_bytes += sent
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
            "sent_bytes": sent,
            "checksum": f"{bits % 2**64:016x}",
            "excluded": list(statistics.excluded),
            "local_seconds": middle - began,
            "sync_seconds": ended - middle,
        }
        log.append("intervals", [entry])
        if progress.bad >= config.max_bad_intervals:
            raise diloco.Failure(
                f"--max-bad-intervals: {progress.bad} in a row with a non-finite worker, the last "
                f"with {list(statistics.excluded)}; the checkpoint before them is kept"
            )
        # Two are kept, and those before a run of bad intervals must stay among them.
        if last or (planned.interval % config.checkpoint_every == 0 and not progress.bad):
            label = f"{progress.state.step:08d}"
            save_checkpoint(config, ranks, workers, progress, log, stopping, label)


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
        "sent_bytes": progress.sent_bytes,  # by rank 0
        "train_loss": sum(known) / len(known) if known else math.nan,  # of the last 2 % of steps
        "val_loss": measured["val_loss"],
        "bits_per_byte": measured["bits_per_byte"],
        "seconds": round(progress.seconds, 1),
    }
    write_json(folder / "summary.json", finite(summary))
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
    print(
        f"{progress.seconds:.1f} s, {summary['bits_per_byte']:.4f} bits per byte, "
        f"rank 0 sent {progress.sent_bytes / 1e6:.1f} MB; {executed}"
    )
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


@contextmanager
def spread_over_cores(
    config: Config, argv: list[str]
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Without torchrun, on a CPU: put the workers on as many processes as there are cores.

    The layout changes no bit of the result, and at small matrices two processes of one thread are
    faster than one of two. A given OMP_NUM_THREADS keeps everything in this process.

    Args:
        config: the run.
        argv: arguments, which the other processes get too.
    Yields:
        The other processes; this one has become rank 0.
    """
    cores = len(os.sched_getaffinity(0))
    most = min(cores, config.workers)
    ranks = max(n for n in range(1, most + 1) if config.workers % n == 0)
    if {"RANK", "OMP_NUM_THREADS"} & set(os.environ) or torch.cuda.is_available() or ranks == 1:
        yield ()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    command = [sys.executable, __file__, *argv]
    others = [
        subprocess.Popen(command, env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(1, ranks)
    ]
    try:
        yield others
    except BaseException:
        for process in others:
            process.kill()
        raise
    finally:
        for process in others:
            process.wait()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]  # another run in this process starts anew


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run folder; it goes again if nothing was written into it.

    Raises:
        ValueError: it is no folder, or another process owns it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is writing this run") from None
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()


def run(config: Config, given: Mapping[str, Any], argv: list[str]) -> int:
    """Execute a checked config from the run folder to the final table.

    Args:
        config: the run.
        given: what the user set, for config.json.
        argv: arguments, for the processes that this one starts.
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
    # torchrun repeats the command line: a restart continues the run of this launch, and no other.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    restarted &= (folder / "env.json").exists() and read_facts(folder).get("launch") == launch()
    resume = config.resume or (restarted and any((folder / "checkpoint").glob("step-*")))
    if config.init_from and Path(config.init_from).resolve() == folder.resolve():
        raise ValueError(f"--init-from {config.init_from}: is the run itself; give another --name")
    log, checkpoint, facts = Log(folder, chief), None, read_facts(folder)["data"] if resume else {}
    with ExitStack() as held:
        if chief:
            held.enter_context(owned(folder))
            if not (resume or restarted or config.overwrite):
                if any(path.suffix != ".tmp" for path in folder.iterdir()):
                    words = "already holds a run: give --resume, --overwrite or --name"
                    raise ValueError(f"{folder} {words}")
            if resume:
                checkpoint = find_checkpoint(folder)
                check_checkpoint(config, checkpoint, log)
        source = open_source(config, facts.get("revision", ""))
        if chief and resume:
            check_data(config, source, facts)
        others = held.enter_context(spread_over_cores(config, argv))
        return execute(config, given, source, checkpoint, log, others)


def execute(
    config: Config,
    given: Mapping[str, Any],
    source: data.Source,
    checkpoint: Path | None,
    log: Log,
    others: Sequence[subprocess.Popen[bytes]],
) -> int:
    """Join the other ranks, train, validate, summarise.

    Args:
        config: the run.
        given: what the user set, for config.json.
        source: the documents.
        checkpoint: what rank 0 resumes from; None starts anew.
        log: the run's files.
        others: ranks that this process started.
    Returns:
        Exit code 0.
    """
    rank, _, local, _ = diloco.launched_ranks()
    folder, chief = config.folder, rank == 0
    ranks, words = diloco.connect(
        config.workers, config.ranks_per_worker, config.timeout_minutes, partial(ended, others)
    )
    stopping = StopFlag(others)
    workers = build_workers(config, ranks, source)
    progress = Progress(autoloco.start(config.rules), [])
    if chief and not checkpoint:
        for worker in ranks.hosted:  # damaged data is found before an earlier run is deleted
            source.batch(worker, 0)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(folder / "env.json", environment(ranks, source))
        changed = {name: value for name, value in asdict(config).items() if name in given}
        held = {"config": asdict(config), "given": changed, "shape": asdict(config.shape)}
        write_json(folder / "config.json", held)
    if chief and checkpoint:
        tidy_checkpoints(checkpoint)
    name = ranks.share(str(checkpoint or ""))
    if name:
        progress = restore(Path(name), ranks, workers)
        log.cut(progress.state)
    else:
        log.append("metrics", [])
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
    display = Display(config, progress.state.step, local == 0)
    try:
        train(config, ranks, workers, source, progress, log, stopping, display)
    except diloco.Stop:
        display.close()
        where = save_checkpoint(config, ranks, workers, progress, log, stopping, "stop")
        if chief:
            print(f"saved {where}; continue with --resume --name {config.run_name}")
        return 0
    display.close()
    stopping.release()
    measured = validate(workers.model, source, ranks, config.dtype)
    if chief:
        finish(config, progress, measured, folder)
    return 0


def complain(what: object) -> None:
    """Say in one line, whatever it quotes, what ended the program."""
    print("train.py:", " ".join(str(what).split()), file=sys.stderr)


def main(argv: list[str]) -> int:
    """Parse, check, run; see the module's exit codes.

    Args:
        argv: arguments without the program's name.
    Returns:
        The exit code.
    """
    rank, world, local, _ = diloco.launched_ranks()
    speaks = local == 0  # for all, as long as all know the same
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
        return run(config, given, argv)
    except ValueError as error:
        if speaks or diloco.connected():
            complain(error)
        return 2
    except (diloco.Failure, OSError) as error:
        if speaks or type(error) is not diloco.Failure:
            complain(f"rank {rank}: {error}" if world > 1 else error)
        return 1
    except torch.distributed.DistError as error:
        why = str(error).splitlines()[0]
        lost = "lost rank 0 or torchrun, which holds the store: gone, or beyond --timeout-minutes"
        complain(f"rank {rank}: {lost} ({why})")
        return 1
    except KeyboardInterrupt:
        if speaks:
            complain("interrupted; what is saved stays, and --resume continues it")
        return 1
    finally:
        diloco.disconnect()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
