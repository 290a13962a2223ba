"""Train with AutoLoCo or one of its baselines: the paper's algorithm box (B.5) is `train` below.

    python train.py                              # the tiny recipe, 4 workers, on all cores
    torchrun --standalone --nproc-per-node 2 train.py --method diloco
    python train.py --recipe c4-215m --dry-run   # what it would do and cost, without doing it

A run writes `runs/NAME/`: config.json, env.json, metrics.jsonl, intervals.jsonl, checkpoint/,
summary.json. Exit codes: 0 done or saved on request, 2 the user's mistake, 1 anything else.

In this file: the loop; methods, knobs, recipes; cost before you pay; the run folder, checkpoints;
building a run; the command line.
"""

from __future__ import annotations

import os
import signal
import sys

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its notes on waiting are not for users
if __name__ == "__main__":  # what torch's import, which takes seconds, must not miss
    if sys.platform == "win32":
        sys.exit("train.py: Windows is not supported; use WSL")
    for number in (signal.SIGINT, signal.SIGTERM):  # the shell or torchrun says that it came
        signal.signal(number, signal.SIG_DFL)

import argparse
import fcntl
import hashlib
import json
import logging
import math
import platform
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import autoloco
import data
import diloco
import model
import quant
from model import ModelConfig, naming

Scores = dict[str, float]

# ---------------------------------------------------------------- the algorithm box (B.5)


def train(run: Run, workers: diloco.Workers, source: data.Source) -> bool:
    """Plan, local phase, synchronise, decide. False: a signal came, and all is saved."""
    rules, ranks = run.config.rules, run.ranks
    while run.state.step < rules.steps:
        # The first rank's plan, so that no library's last bit parts the ranks: H_t, rho, mu, kappa.
        plan = ranks.share(autoloco.plan(rules, run.state))
        if not any(workers.done):
            workers.begin(plan.steps)
        with run.counting("local_seconds"):
            for step in range(plan.step + min(workers.done), plan.step + plan.steps):
                if workers.stop_asked():
                    break
                lr = autoloco.inner_lr(rules, step)  # eta(s)
                for index, worker in enumerate(ranks.hosted):
                    if workers.done[index] <= step - plan.step:  # ahead only after a resume
                        workers.step(index, source.batch(worker, step), lr)  # nothing travels
                run.show(plan)
        if ranks.any(ranks.stopping):  # ALL RANKS: one reduction ends every local phase
            save_checkpoint(run, workers)
            return False
        with run.counting("sync_seconds"):
            measured = workers.synchronise(plan)  # Delta_k, D_t, C_t; theta, m
            # ALL RANKS: the same weights, or the run is no longer one.
            bits = f"{diloco.checksum(workers.shared):016x}"
            ranks.agree({"shared parameters": bits}, diloco.Failure, ranks.ranks_per_worker)
        seen = autoloco.observe(rules, plan, measured.values, measured.tokens)
        run.state, decision = autoloco.complete(rules, run.state, plan, seen)
        row = autoloco.record(plan, seen, run.state.mapper, decision) | measured.values
        last = run.state.step == rules.steps
        every = run.config.eval_every
        score = every and plan.interval % every == 0 and not last
        found = validate(workers.model, source, ranks, run.config.dtype) if score else {}
        run.log(plan, measured, row | {"checksum": bits}, found)
        if last or (plan.interval % run.config.checkpoint_every == 0 and not measured.excluded):
            save_checkpoint(run, workers)
    return True


@torch.no_grad()
def validate(
    network: torch.nn.Module, source: data.Source, ranks: diloco.Ranks, dtype: str
) -> Scores:
    """Token-averaged negative log-likelihood of the synchronised model on the validation documents
    (E.1): `val_loss` in nats a token, `bits_per_byte`, `val_tokens`.

    Draws no random number and changes nothing. Ranks share the batches; sums are taken in batch
    order, so the result does not depend on how many there are.
    """
    mine = ranks.rank // ranks.ranks_per_worker
    rows = []
    for index, batch in enumerate(source.validation()):
        sums = [0.0, 0.0, 0.0]
        if index % ranks.groups == mine:
            inputs = batch.inputs.to(ranks.device)
            with torch.autocast(ranks.device.type, torch.bfloat16, enabled=dtype == "bf16"):
                loss = float(network(inputs, batch.targets))
            kept = batch.targets[batch.targets != model.IGNORE]
            sums = [loss, float(len(kept)), float(source.tokenizer.token_bytes[kept].sum())]
        rows.append(sums)
    every = ranks.gather(torch.tensor(rows, dtype=torch.float64).view(-1))
    loss, tokens, size = every[:: ranks.ranks_per_worker].sum(0).view(-1, 3).sum(0).tolist()
    return {
        "val_loss": loss / max(1.0, tokens),
        "bits_per_byte": loss / math.log(2) / max(1.0, size),
        "val_tokens": tokens,
    }


# ---------------------------------------------------------------- methods, knobs, recipes


class Method(NamedTuple):
    """How a method differs from another, and the only place where it does."""

    schedule: Callable[[autoloco.Rules], tuple[int, ...]] | None = None  # None: a controller
    controller: str = "autoloco"  # of autoloco.CONTROLLERS; its method's outer step is corrected
    workers: type[diloco.Workers] = diloco.LocalUpdate
    outer_step: Callable[..., torch.Tensor] = diloco.nesterov
    defaults: Mapping[str, Any] = {}  # over the recipe's


METHODS = {
    "autoloco": Method(),
    "diloco": Method(diloco.fixed_schedule),
    "linear": Method(diloco.linear_schedule),  # A16: with DiLoCo's outer step
    "qsr": Method(diloco.qsr_schedule),
    # Gradients are not pseudo-gradients: a recipe's narrow wire is not for them.
    "ddp": Method(diloco.fixed_schedule, workers=diloco.DataParallel, defaults={"wire": "fp32"}),
}

# What each recipe changes; the command line overrides it. C4: AdamW's numbers are A17, the outer
# step's A14 and A15; 80 GB hold 32 sequences at a time.
_C4: dict[str, Any] = dict(
    model="215m", data="c4", tokenizer="gpt2", seq_len=1024, val_documents=4096,
    workers=8, batch_size=128, micro_batch=32, steps=50_000, warmup=1000, lr=4e-4,
    base_horizon=500, outer_momentum=0.9, max_step_scale=2.0,
    wire="bf16", dtype="bf16", compile=True,
)  # fmt: skip
# DiLoCo's best outer momentum and AutoLoCo's best kappa_max on the tuning seed (RESULTS.md).
_TINY: dict[str, Any] = dict(outer_momentum=0.7, max_step_scale=1.75)
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-sft": _TINY | dict(
        data="doctests", seq_len=256, steps=600, warmup=20, lr=5e-4, base_horizon=10,
        normalise=True, wire="bf16",
    ),
    "c4-215m": _C4,
    "c4-215m-ablation": _C4 | dict(workers=4, outer_momentum=0.7),  # A25
    # One GPU of 24 GB, all workers on it; give --data PATH for local files.
    "one-gpu": _C4 | dict(
        model="85m", workers=4, batch_size=16, micro_batch=16, val_documents=1024,
        steps=5000, warmup=200, lr=6e-4, base_horizon=100,
    ),
    # Global batches of 32: --batch-size 2 with 16 workers. The inner rate is A18, its warm-up A6.
    "ultrachat-8b": _C4 | dict(
        model="llama3.1-8b", data="ultrachat", tokenizer="llama3", seq_len=2048,
        val_documents=1000, batch_size=4, micro_batch=0, steps=6490, warmup=200, lr=1e-5,
        base_horizon=100, normalise=True,
    ),
}  # fmt: skip

# Where a knob has an effect; elsewhere giving it warns.
NEEDS: dict[str, Callable[[Config], bool]] = {
    "--dry-run": lambda config: config.dry_run,
    "a controller": lambda config: config.rules.sequence is None,
    "a method whose outer step is corrected": lambda config: not METHODS[config.method].schedule,
    "a method that synchronises pseudo-gradients": lambda config: config.method != "ddp",
    "initial weights that are drawn": lambda config: not config.init_from,
}
DRY, CONTROLLED, CORRECTED, LOCAL, DRAWN = NEEDS


def knob(default: Any, words: str, **about: Any) -> Any:
    """A field of Config and its flag: help; `least` and `most`, or `choices`; `needs` of NEEDS;
    `free`: a resume may change it; `group`: a heading of --help begins here.
    """
    return field(default=default, metadata={"help": words, **about})


@dataclass(frozen=True)
class Config:
    """Every knob of a run, as the command line names them."""

    recipe: str = knob("tiny", "named set of defaults", choices=RECIPES, group="what runs")
    method: str = knob("autoloco", "how workers synchronise", choices=METHODS)
    name: str = knob("", "run folder runs/NAME; by default RECIPE-METHOD-SEED", free=True)
    seed: int = knob(0, "of initial weights and order of documents", least=0, most=2**63 - 1)
    steps: int = knob(2000, "T, inner optimizer steps of every worker", most=10**7)
    workers: int = knob(4, "K, local-update workers", least=1)
    ranks_per_worker: int = knob(1, "S, processes that shard one worker with FSDP2", least=1)

    model: str = knob("tiny", "size by name", choices=model.SIZES, needs=DRAWN, group="model, data")
    vocab_size: int = knob(0, "rows of the embedding; 0: the size's own", least=0, needs=DRAWN)
    init_from: str = knob("", "start from a Hugging Face Llama folder or a run folder")
    data: str = knob("docstrings", "docstrings, doctests, c4, ultrachat, or a path to local files")
    tokenizer: str = knob("bytes", "bytes, gpt2, llama3, or a folder; by default --init-from's")
    partition: str = knob("iid", "deal documents at random or by source", choices=("iid", "module"))
    long_documents: str = knob("cut", "what exceeds --seq-len", choices=("cut", "split"))
    batch_size: int = knob(2, "sequences of one worker and step", least=1)
    micro_batch: int = knob(0, "sequences of one forward pass; 0: the whole batch", least=0)
    seq_len: int = knob(128, "tokens of a sequence", least=1)
    val_documents: int = knob(512, "validation documents", least=1)
    eval_every: int = knob(0, "validate every N intervals as well; 0: at the end", least=0)

    lr: float = knob(2e-3, "eta_max, peak inner learning rate", group="inner optimizer (AdamW)")
    warmup: int = knob(40, "w, steps of linear warm-up", most=10**9)
    weight_decay: float = knob(0.1, "of matrices; norms are not decayed", least=0)
    beta1: float = knob(0.9, "AdamW's first decay", least=0, most=0.999999)
    beta2: float = knob(0.95, "AdamW's second decay", least=0, most=0.999999)
    grad_clip: float = knob(1.0, "largest gradient norm of a worker; 0: no clipping", least=0)

    base_horizon: int = knob(20, "H_base, steps", most=10**9, group="intervals")
    min_horizon: int | None = knob(None, "H_min [7 granularities]", needs=CONTROLLED)
    max_horizon: int | None = knob(None, "H_max [1.5 base horizons]", needs=CONTROLLED)
    granularity: int | None = knob(None, "q_H [H_base's tenth or less]", needs=CONTROLLED)
    horizons: str = knob("", "execute these steps, such as 8x500,5x550,250", needs=LOCAL)

    normalise: bool = knob(False, "divide by rho (B.3)", needs=CORRECTED, group="outer optimizer")
    adjust_momentum: bool = knob(True, "mu_0 ** rho (B.4)", needs=CORRECTED)
    scale_step: bool = knob(True, "scale the outer step by kappa (B.4)", needs=CORRECTED)
    max_step_scale: float = knob(2.0, "kappa_max, largest kappa", needs=CORRECTED)
    outer_lr: float = knob(0.7, "alpha_0", least=0, needs=LOCAL)
    outer_momentum: float = knob(0.9, "mu_0", needs=LOCAL)

    wire: str = knob("fp32", "what travels", choices=quant.CODECS, group="numbers and machine")
    dtype: str = knob("fp32", "of computation; states stay fp32", choices=("fp32", "bf16"))
    compile: bool = knob(False, "torch.compile", free=True)
    activation_checkpointing: bool = knob(False, "recompute activations in the backward pass")

    checkpoint_every: int = knob(10, "in intervals", least=1, free=True, group="life of a run")
    max_bad_intervals: int = knob(3, "stop after N non-finite intervals in a row", least=1)
    timeout_minutes: float = knob(30.0, "of any wait for a rank", least=1e-3, most=1e6, free=True)
    wandb: str = knob("", "project of Weights & Biases that gets the logs too", free=True)
    resume: bool = knob(False, "continue runs/NAME from its latest checkpoint", free=True)
    overwrite: bool = knob(False, "delete the run that runs/NAME holds")

    dry_run: bool = knob(False, "print schedule, memory and cost", group="without training")
    json: bool = knob(False, "the last line is a JSON object", needs=DRY)
    verdicts: str = knob("", "replace verdicts, such as 8=moderate,9=severe", needs=DRY)
    link_gbps: float = knob(1.0, "rate of the link, Gbit/s", least=1e-9, needs=DRY)
    link_ms: float = knob(0.0, "delay of a synchronisation, ms", least=0, needs=DRY)
    step_seconds: float = knob(0.0, "of an inner step; 0: its FLOPs on a GPU", least=0, needs=DRY)

    def __post_init__(self) -> None:
        """Check every value; nothing exists yet that a mistake could damage."""
        for one in fields(self):
            value, about = getattr(self, one.name), one.metadata
            least, most = about.get("least", -math.inf), about.get("most", 10**9)
            if isinstance(value, int | float) and not least <= value <= most:
                raise ValueError(f"{flag(one.name)} {value}: from {least:g} to {most:g}")
        if not re.fullmatch(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}", self.name or "default"):
            raise ValueError(f"--name {self.name}: up to 200 letters, digits, '.', '_' and '-'")
        self.rules  # noqa: B018  its checks name the flags
        self.replaced_verdicts  # noqa: B018

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path("runs", self.name or f"{self.recipe}-{self.method}-{self.seed}")

    @cached_property
    def shape(self) -> ModelConfig:
        """Shape of the model: by name, or that of the folder whose weights it starts from."""
        if self.init_from or self.resume:
            return run_shape(self.folder if self.resume else Path(self.init_from))
        size = model.SIZES[self.model]
        return replace(size, vocab_size=self.vocab_size or size.vocab_size)

    @cached_property
    def rules(self) -> autoloco.Rules:
        """The paper's constants of this run."""
        method, own = METHODS[self.method], asdict(self)
        known = {one.name: own[one.name] for one in fields(autoloco.Rules) if one.name in own}
        known["controller"] = method.controller
        if method.schedule:  # the outer step follows rho where a controller chooses the intervals
            known |= {"normalise": False, "adjust_momentum": False, "scale_step": False}
        try:
            if self.horizons and self.method != "ddp":
                known["sequence"] = diloco.parse_runs(self.horizons)
            elif method.schedule:
                base = autoloco.Rules(**known, sequence=(self.steps,))
                known["sequence"] = method.schedule(base)
            return autoloco.Rules(**known)
        except ValueError as error:
            raise ValueError(re.sub(r"\b(\w+)=", lambda m: flag(m[1]) + " ", str(error))) from None

    @cached_property
    def replaced_verdicts(self) -> dict[int, str]:
        """`--verdicts` as interval -> verdict."""
        verdicts = {}
        for part in filter(None, self.verdicts.split(",")):
            interval, _, verdict = part.partition("=")
            if not interval.isdecimal() or verdict not in autoloco.VERDICTS:
                allowed = ", ".join(autoloco.VERDICTS)
                raise ValueError(f"--verdicts {part}: give such as 8=moderate, one of {allowed}")
            verdicts[int(interval)] = verdict
        return verdicts


def usual(recipe: str) -> Config:
    """The settings of a recipe."""
    return Config(**{"recipe": recipe, **RECIPES[recipe]})


RESUME_MAY_CHANGE = {one.name for one in fields(Config) if one.metadata.get("free")}


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


# ---------------------------------------------------------------- cost before you pay

SUSTAINED_FLOPS = 400e12  # of a GPU: 40 % of an H100's dense bf16 peak
FITS = 72e9  # bytes of an 80 GB GPU


def totals(config: Config, intervals: Sequence[int]) -> dict[str, Any]:
    """What a summary, the last line of a dry run and its rows share; `saved` is the share of the
    payload of DiLoCo over the same steps, in the recipe's wire.
    """
    steps = [1] * sum(intervals) if config.method == "ddp" else list(intervals)
    sent, wire = payload(config) * len(steps), usual(config.recipe).wire
    diloco_s = payload(replace(config, wire=wire)) * math.ceil(config.steps / config.base_horizon)
    return {
        "synchronisations": len(steps),
        "intervals": diloco.run_lengths(steps),
        "payload_bytes": sent,
        "saved": 1 - sent / diloco_s,
    }


def shard_numels(config: Config, shard: int) -> list[int]:
    """Elements of each parameter on one rank of a worker: FSDP2 cuts dimension 0 as torch.chunk."""
    numels = []
    for shape in model.parameter_shapes(config.shape).values():
        rows = math.ceil(shape[0] / config.ranks_per_worker)
        numels.append(min(rows, max(0, shape[0] - shard * rows)) * shape[1:].numel())
    return numels


def payload(config: Config) -> int:
    """Logical payload of one synchronisation: a worker's encoded pseudo-gradient, all shards."""
    shards = (shard_numels(config, shard) for shard in range(config.ranks_per_worker))
    return sum(quant.payload_bytes(quant.CODECS[config.wire], numels) for numels in shards)


def step_flops(size: ModelConfig, sequences: int, length: int) -> float:
    """FLOPs of forward and backward pass.

        of a token: 6 (parameters in matrix products) + 12 layers C T

    Source: PaLM (arXiv:2204.02311), appendix B.
    """
    lookup = 0 if size.tied else size.vocab_size * size.width
    products = model.parameter_count(size) - lookup
    return sequences * length * (6 * products + 12 * size.layers * size.width * length)


def memory_per_gpu(config: Config, hosted: int) -> dict[str, float]:
    """Estimate of one GPU's memory in bytes, by purpose, for R `hosted` workers of a rank.

        states       4 n (R (3 + w) + 1 + s)    parameters and AdamW of R workers, gradients; s
                     shared and w worker buffers, as the method's workers declare them
        wire         2 e (2 R (G-1)/G + 1) / P  of two pieces parts sent and received, of two means
        copies       2 n in bf16; S > 1: c (3 b + 2 r) + 4 max(b, r), as FSDP2 gathers two blocks
                     and the rest, and reduces the gradient of one and the rest in fp32
        activations  tokens (layers (16 C + c (5 C + 3 D G' + 4 F)) + 16 C); with checkpointing
                     tokens (layers 4 C + one layer's + 16 C)
        loss         a chunk's logits as c bytes, twice as fp32; 4 V C for the head's gradient

    n parameters of a rank (S-th part), b and r of a block and outside of blocks, e encoded bytes of
    n, P pieces, c bytes of a number in computation, G groups of ranks, D G' width of keys, F of
    SwiGLU. ddp holds R gradients and one model. Not in it: what torch and the driver need, and
    fragmentation; `FITS` leaves a tenth for them.
    """
    size, S, groups = config.shape, config.ranks_per_worker, config.workers // hosted
    local, whole = shard_numels(config, 0), model.parameter_shapes(size)
    n, c = sum(local), 2 if config.dtype == "bf16" else 4
    kind = METHODS[config.method].workers
    buffers = 1 + len(kind.shared_buffers) + hosted * (3 + len(kind.worker_buffers))
    if config.method == "ddp":
        buffers = 3 + hosted
    encoded = quant.payload_bytes(quant.CODECS[config.wire], local)
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
    logits = min(tokens * size.vocab_size * c, model.CHUNK_BYTES["cuda"])
    return {
        "states": 4 * n * buffers,
        "wire": encoded * (4 * hosted * (1 - 1 / groups) + 2) / diloco.PIECES if groups > 1 else 0,
        "copies": copies,
        "activations": tokens * (kept + 16 * C),
        "loss": logits * (1 + 8 / c) + 4 * size.vocab_size * C,
    }


def dry_run(config: Config) -> dict[str, Any]:
    """Print what a run would execute, hold, send and wait for on a link, where every verdict
    supports, beside the other methods on the same base horizon; returns the same for JSON.

        hours = synchronisations (payload 8 / rate + delay) / 3600
        utilisation = computing / (computing + hours)
    """
    count, S = model.parameter_count(config.shape), config.ranks_per_worker
    positions = config.steps * config.workers * config.batch_size * config.seq_len
    flops = step_flops(config.shape, math.ceil(config.batch_size / S), config.seq_len)
    again = 4 / 3 if config.activation_checkpointing else 1.0
    step_seconds = config.step_seconds or flops * again / SUSTAINED_FLOPS
    source = "as given" if config.step_seconds else "its FLOPs at 400 TFLOP/s, as on a large GPU"
    computing = config.steps * step_seconds / 3600
    methods: dict[str, dict[str, Any]] = {}
    for name, method in METHODS.items():
        own: dict[str, Any] = dict.fromkeys(("min_horizon", "max_horizon", "granularity"))
        own |= {key: getattr(usual(config.recipe), key) for key in METHODS[config.method].defaults}
        own |= {"method": name, "horizons": "", **method.defaults}
        other = config if name == config.method else replace(config, **own)
        walked = autoloco.simulate(other.rules, other.replaced_verdicts)
        row = totals(other, [plan.steps for plan, _ in walked])
        seconds = row["payload_bytes"] * 8 / (config.link_gbps * 1e9)
        hours = (seconds + row["synchronisations"] * config.link_ms / 1e3) / 3600
        methods[name] = row | {"hours": hours, "utilisation": computing / (computing + hours)}
    shown = {
        "recipe": f"{config.recipe}, method {config.method}",
        "model": f"{config.init_from or config.model}, {count:,} parameters",
        "steps": f"{config.steps:,} on {config.workers} workers",
        "input positions": f"{positions / 1e9:,.3f} G",
        "intervals": diloco.format_runs(methods[config.method]["intervals"]),
        "payload": f"{payload(config) / 1e9:,.3f} GB a worker and direction, as {config.wire}",
        "link": f"{config.link_gbps:g} Gbit/s and {config.link_ms:g} ms",
        "step": f"{step_seconds:.3g} s, {source}",
    }
    for hosted, shards in ((config.workers, 1), (1, 1), (1, 8)) if S == 1 else ((1, S),):
        memory = memory_per_gpu(replace(config, ranks_per_worker=shards), hosted)
        words = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in memory.items())
        total, gpus = sum(memory.values()), config.workers // hosted * shards
        fits = "fits" if total <= FITS else "does not fit"
        layout = f" (--ranks-per-worker {shards})" if shards > 1 else ""
        shown[f"memory on {gpus}"] = f"{total / 1e9:.3g} GB a GPU, {fits} in 80{layout}: {words}"
        if hosted == 1 and shards == S:
            result = methods[config.method] | {"memory_bytes": memory, "methods": methods}
            if total <= FITS:
                break
    for name, words in shown.items():
        print(f"{name:18}{words}")
    columns = ("syncs", "GB", "payload", "h on link", "h in all", "computing")
    print("\n" + f"{'':10}" + "".join(f"{column:>17}" for column in columns))
    for name, row in methods.items():
        print(
            f"{name:10}{row['synchronisations']:17,}{row['payload_bytes'] / 1e9:17,.3f}"
            f"{saved_words(row['saved']):>17}{row['hours']:17.3g}{computing + row['hours']:17.3g}"
            f"{100 * row['utilisation']:15.1f} %"
        )
    if config.json:
        print(json.dumps(result))
    return result


def saved_words(saved: float) -> str:
    """Payload against DiLoCo's: 0.27 is "27.0 % less", -19 is "20 x DiLoCo's"."""
    if saved < -0.5:
        return f"{1 - saved:,.0f} x DiLoCo's"
    return f"{100 * abs(saved):.1f} % {'less' if saved >= 0 else 'more'}"


# ---------------------------------------------------------------- the run folder

LOGS = ("metrics", "intervals")  # NAME.jsonl: a row a step; a header, then a row an interval
WRITES = re.compile(  # paths of all that a run writes
    r"(config|env|summary|tasks)\.json(\.tmp)?|(metrics|intervals)\.jsonl"
    r"|checkpoint(/(partial|(damaged-)?step-\d{8}(-before)?)(/manifest\.json(\.tmp)?|/\S+\.safetensors)?)?"
)


class Run:
    """A run folder, which rank 0 writes, and where the run stands, which is what its log says."""

    def __init__(self, config: Config, ranks: diloco.Ranks) -> None:
        self.config, self.folder, self.ranks = config, config.folder, ranks
        self.state = autoloco.start(config.rules)
        self.rows: list[dict[str, Any]] = []  # of intervals
        self.spent: dict[str, Any] = defaultdict(int)  # on this interval, also before a stop
        self.loss, self.payload = "-", payload(config)
        self.bar: Any = tqdm(disable=True)
        self.wandb: Any = None

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Count the seconds of a part of the interval, and the bytes that it sends."""
        began, sent = time.perf_counter(), self.ranks.bytes_sent
        yield
        if self.ranks.device.type == "cuda":  # its unfinished kernels belong to this part
            torch.cuda.synchronize()
        self.spent[name] += time.perf_counter() - began
        self.spent["sent_bytes"] += self.ranks.bytes_sent - sent

    def show(self, plan: autoloco.Plan) -> None:
        """A step is done."""
        words = f"loss {self.loss}, horizon {plan.horizon}, interval {plan.interval}"
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update()

    def log(
        self, plan: autoloco.Plan, measured: diloco.Measured, row: dict[str, Any], found: Scores
    ) -> None:
        """Append what an interval measured and decided; a row of metrics a step, whose loss is the
        token-weighted mean over all workers. Failure after too many bad intervals.
        """
        sums = {name: values.sum(0) for name, values in measured.records.items()}
        self.loss = f"{float(sums['loss'].sum() / sums['targets'].sum()):.3f}"
        columns = {
            "step": range(plan.step + 1, plan.step + plan.steps + 1),
            "loss": (sums["loss"] / sums["targets"]).tolist(),  # without targets null, not 0
            "tokens": sums["tokens"].long().tolist(),
            "lr": self.config.rules.rates[plan.step : plan.step + plan.steps],
            "grad_norm": (sums["grad_norm"] / self.config.workers).tolist(),
        }
        steps = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        steps[-1] |= found
        times = plan.steps if self.config.method == "ddp" else 1
        row |= {"payload_bytes": self.payload * times, "excluded": list(measured.excluded)}
        self.rows.append(row | self.spent)
        self.spent.clear()
        self.append("metrics", steps)
        self.append("intervals", self.rows[-1:])
        if found and not self.bar.disable:
            self.bar.write(f"step {row['step']}: validation loss {found['val_loss']:.4f}")
        most = self.config.max_bad_intervals
        if sum(bool(row["excluded"]) for row in self.rows[-most:]) == most:
            raise diloco.Failure(
                f"--max-bad-intervals: {most} in a row with a non-finite worker, the last with "
                f"{row['excluded']}: the run diverges, try a lower --lr than {self.config.lr}"
            )

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to a log; a number that is not finite is null."""
        if self.ranks.rank == 0:
            with open(self.folder / f"{name}.jsonl", "a") as file:
                file.writelines(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)
        for row in rows if self.wandb else ():
            self.wandb.log(row, step=row["step"])


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy for JSON: a number that is not finite is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def read_json(path: Path) -> Any:
    """A JSON file."""
    with naming(path):
        return json.loads(path.read_text())


def load_config(folder: Path) -> Config:
    """The config of a run's start; a knob that it lacks takes its default, as the run did."""
    path = folder / "config.json"
    whole, facts = read_json(path), read_facts(folder)
    with naming(path):
        if facts.get("config_sha256", digest := sha256(path)) != digest:
            raise ValueError("changed since the run began; env.json has its checksum")
        return Config(**(whole["config"] | {"resume": False, "overwrite": False}))


def read_facts(folder: Path) -> dict[str, Any]:
    """What `begin` wrote to env.json."""
    path = folder / "env.json"
    with naming(path):
        facts: dict[str, Any] = read_json(path)
        return facts | {"data": dict(facts["data"])}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all, through to the disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    to_disk(temporary)
    temporary.replace(path)


def to_disk(path: Path) -> None:
    """fsync, where the file system can."""
    with open(path, "rb") as file, suppress(OSError):
        os.fsync(file.fileno())


def sha256(path: Path, size: int | None = None) -> str:
    """Checksum of a file, or of its first `size` bytes."""
    if size is not None:
        return hashlib.sha256(path.read_bytes()[:size]).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def program_sha256() -> str:
    """Hash of the files that decide what a run computes."""
    names = ("train.py", "autoloco.py", "diloco.py", "model.py", "data.py", "quant.py")
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in names)).hexdigest()


def launch_name() -> str:
    """Names this launch, the same after a restart by torchrun; empty under plain python."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{name} of {os.getppid()} on {platform.node()}" if name else ""


@contextmanager
def owned(config: Config) -> Iterator[bool]:
    """Own the run folder until the end; yields whether an earlier run is continued. Whoever comes
    second touches nothing. What ends before its first file leaves nothing.
    """
    folder, resumes, overwrites, free = config.folder, config.resume, config.overwrite, False
    # torchrun repeats the command line: a restart continues the run of this launch, and no other.
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        with suppress(ValueError, KeyError, TypeError):
            if read_json(folder / "config.json")["launch"] == launch_name():
                resumes = bool(checkpoints(folder))
                overwrites = not resumes

    try:
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            free = True
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = free or {path.name for path in folder.iterdir()} <= {"config.json", "env.json"}
    except BlockingIOError:
        raise ValueError(f"{folder}: another process is writing this run") from None
    except OSError:
        pass  # not every file system has locks
    try:
        if not (free or resumes or overwrites):
            raise ValueError(f"{folder} exists: give --resume, --overwrite or --name")
        if not resumes:
            check_only_a_run(folder)
        yield resumes
    finally:
        with suppress(OSError):
            folder.rmdir()  # if nothing is in it
        os.close(descriptor)


def write_settings(config: Config, facts: Mapping[str, Any]) -> None:
    """config.json; env.json, which has its checksum and what a rerun would have to match."""
    path, whole = config.folder / "config.json", {"config": asdict(config)}
    write_json(path, whole | {"shape": asdict(config.shape), "launch": launch_name()})
    write_json(config.folder / "env.json", {**facts, "config_sha256": sha256(path)})


def check_only_a_run(folder: Path) -> None:
    """Refuse to delete a folder that holds anything but a run; ValueError names what."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not WRITES.fullmatch(path.relative_to(folder).as_posix()):
            words = "nothing that a run writes; nothing was deleted"
            raise ValueError(f"--overwrite: {path} is {words}")


# ---------------------------------------------------------------- checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, the latest first."""
    return sorted((folder / "checkpoint").glob("step-*[0-9]"), reverse=True)


def tensor_files(config: Config, shard: int, workers: Iterable[int] = ()) -> list[str]:
    """Files of one shard: what all workers share, then each of these workers' own."""
    end = f"-shard-{shard:02d}" if config.ranks_per_worker > 1 else ""
    names = ["shared", *(f"worker-{worker:02d}" for worker in workers)]
    return [f"{name}{end}.safetensors" for name in names]


def save_checkpoint(run: Run, workers: diloco.Workers) -> None:
    """Write `checkpoint/step-XXXXXXXX`, also in the middle of an interval; the last two are kept.

    Every rank writes its files; when all have, rank 0 writes the manifest and renames the folder,
    so a checkpoint is whole or not there. OSError on all ranks where one could not write.
    """
    ranks, parent, files, problem = run.ranks, run.folder / "checkpoint", {}, ""
    partial = parent / "partial"
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # whatever is wrong shows at the first file
            partial.mkdir(parents=True)
    ranks.any(False)  # ALL RANKS: nobody writes before the folder is there
    try:
        for row, name in enumerate(tensor_files(run.config, ranks.shard, ranks.hosted), -1):
            if row < 0 and ranks.rank >= ranks.ranks_per_worker:
                continue  # the first worker's ranks save what all share
            state = workers.shared_state() if row < 0 else workers.worker_state(row)
            host = {key: tensor.cpu().contiguous() for key, tensor in state.items()}
            save_file(host, partial / name)
            to_disk(partial / name)
            files[name] = sha256(partial / name)
    except (OSError, SafetensorError) as error:
        problem = f"{partial}: {error}: not saved; earlier checkpoints stay"
    found = ranks.gather_objects((files, problem, max(workers.done)))
    every, problems, done = zip(*found, strict=True)
    if any(problems):
        raise OSError(next(filter(None, problems)))
    target = parent / f"step-{run.state.step + max(done):08d}"
    if ranks.rank == 0:
        logs = {}
        for name in LOGS:
            log = run.folder / f"{name}.jsonl"
            to_disk(log)
            logs[name] = [log.stat().st_size, sha256(log)]
        manifest = {
            "files": {name: digest for own in every for name, digest in own.items()},
            "logs": logs,  # bytes and checksum up to here
            "unfinished": run.spent,
        }
        write_json(partial / "manifest.json", manifest)
        before = parent / f"{target.name}-before"
        shutil.rmtree(before, ignore_errors=True)
        if target.exists():  # saved on request at the same step, maybe before its synchronisation
            target.rename(before)
        partial.rename(target)
        for old in (before, *checkpoints(run.folder)[2:]):
            shutil.rmtree(old, ignore_errors=True)


def read_manifest(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """A checkpoint's manifest, if both logs and the files `names`, which the run needs, agree."""
    file = path / "manifest.json"
    with naming(file):
        manifest: dict[str, Any] = read_json(file)
        signed = {path / name: [None, manifest["files"][name]] for name in names}
        signed |= {path.parents[1] / f"{name}.jsonl": manifest["logs"][name] for name in LOGS}
    for own, (size, digest) in signed.items():
        with naming(own):
            if sha256(own, size) != digest:
                raise ValueError(f"changed since {path.name}, which holds its checksum")
    return manifest


def latest(folder: Path, names: Sequence[str], ranks: diloco.Ranks) -> tuple[Path, dict[str, Any]]:
    """The latest checkpoint that is whole on every rank, and its manifest; one that is not is said
    and passed over.
    """
    for path in checkpoints(folder):
        manifest, why = {}, ""
        try:
            manifest = read_manifest(path, names)
        except ValueError as error:
            why = str(error)
        # ALL RANKS: the same checkpoint.
        if not (why := next(filter(None, ranks.gather_objects(why)), "")):
            return path, manifest
        if ranks.rank == 0:
            print(f"DAMAGED CHECKPOINT {path} is passed over: {why}", file=sys.stderr)
    raise ValueError(f"{folder}: no whole checkpoint; --overwrite starts again from the beginning")


def find_checkpoint(folder: Path) -> Path:
    """The latest checkpoint whose shared model is whole."""
    config = load_config(folder)
    names = [tensor_files(config, shard)[0] for shard in range(config.ranks_per_worker)]
    return latest(folder, names, diloco.Ranks())[0]


def restore(run: Run, workers: diloco.Workers) -> None:
    """Continue from the latest checkpoint that is whole on every rank. The logs are cut back to it,
    and the state is what they say. Later checkpoints are put aside.
    """
    ranks, log = run.ranks, run.folder / "intervals.jsonl"
    names = tensor_files(run.config, ranks.shard, ranks.hosted)
    path, manifest = latest(run.folder, names, ranks)
    for row, name in enumerate(names, -1):
        with naming(path / name):
            tensors = load_file(path / name)
            if row < 0:
                workers.load_shared(tensors)
            else:
                workers.load_worker(row, tensors)
    if ranks.rank == 0:
        for name in LOGS:
            os.truncate(run.folder / f"{name}.jsonl", manifest["logs"][name][0])
        for other in checkpoints(run.folder):
            if other.name > path.name:
                aside = path.parent / f"damaged-{other.name}"
                shutil.rmtree(aside, ignore_errors=True)
                other.rename(aside)
    ranks.share(None)  # ALL RANKS: nobody reads a log before it is cut
    rules, rows, _ = autoloco.read_log(log)
    run.rows = [row for row in rows if "rules" not in row]
    run.spent |= manifest["unfinished"]
    with naming(log):
        run.state = autoloco.last_state(rules, rows)


# ---------------------------------------------------------------- building a run


def shard_module(module: torch.nn.Module, ranks: diloco.Ranks, dtype: str) -> None:
    """Shard a module's parameters over the ranks of this worker with FSDP2; they become DTensors,
    fp32. With bf16 they are gathered as bf16; gradients are summed in fp32.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtypes = (torch.bfloat16, torch.float32) if dtype == "bf16" else (None, None)
    # cast_forward_inputs would round the rotary tables to bf16.
    policy = MixedPrecisionPolicy(dtypes[0], dtypes[1], cast_forward_inputs=False)
    mesh = DeviceMesh.from_group(ranks.shard_group, ranks.device.type)
    sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
    # The loss is divided by the whole worker's targets, so the shards' gradients add up. gloo knows
    # no PREMUL_SUM, which the factor would become.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def build_optimizer(config: Config, network: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The inner optimizers; a parameter belongs to one of them. A group's `lr_ratio` multiplies the
    learning rate that the schedule gives.
    """
    groups, named = [], list(network.named_parameters())
    for decays, decay in ((True, config.weight_decay), (False, 0.0)):
        chosen = [p for name, p in named if model.decayed(name, p) == decays]
        groups.append({"params": chosen, "weight_decay": decay})
    betas = (config.beta1, config.beta2)
    return [torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)]


def build_workers(config: Config, ranks: diloco.Ranks, source: data.Source) -> diloco.Workers:
    """Model, inner optimizers and workers of a run; parameters are the same bits on every rank."""
    data.check_vocabulary(source, config.shape.vocab_size)
    with torch.device("meta"):
        network = model.Transformer(config.shape, config.activation_checkpointing)
    for module in (*network.blocks, network):  # one after the other: the whole is never on one GPU
        module.to_empty(device=ranks.device, recurse=False)
        if config.compile and module is not network:
            module.compile()
        if ranks.ranks_per_worker > 1:
            shard_module(module, ranks, config.dtype)
    if config.init_from and not config.resume:
        parameters = dict(network.named_parameters())
        for name, value in load_weights(Path(config.init_from)):
            if not value.isfinite().all():
                raise ValueError(f"--init-from {config.init_from}: {name} is not finite")
            model.assign(parameters[name], value)
    else:
        network.init_weights(config.seed)
    method = METHODS[config.method]
    return method.workers(
        network,
        build_optimizer(config, network),
        ranks,
        quant.CODECS[config.wire],
        outer_lr=config.outer_lr,
        outer_step=method.outer_step,
        clip=config.grad_clip,
        micro_batch=config.micro_batch,
        autocast=torch.bfloat16 if config.dtype == "bf16" else None,
    )


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, and not one of Hugging Face's."""
    return (folder / "env.json").exists() or (folder / "intervals.jsonl").exists()


def run_shape(folder: Path) -> ModelConfig:
    """Model shape of a run folder or of a Hugging Face Llama folder; ValueError names the file."""
    if not is_run(folder):
        return model.read_config(folder)
    path = folder / "config.json"
    with naming(path):
        return model.ModelConfig(**read_json(path)["shape"])


def load_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of a run folder or of a Hugging Face Llama folder, one at a time, so that
    a rank that keeps a shard of an 8B model never holds the whole.
    """
    if not is_run(folder):
        yield from model.read_weights(folder, model.read_config(folder), torch.float32)
        return
    with ExitStack() as stack:  # FSDP2 cuts dimension 0, and some cuts are empty
        files = sorted(find_checkpoint(folder).glob("shared*.safetensors"))
        shards = [stack.enter_context(safe_open(file, "pt")) for file in files]
        for key in shards[0].keys():
            if key.startswith("shared."):
                parts = [shard.get_tensor(key) for shard in shards]
                yield key.removeprefix("shared."), torch.cat(parts)


def extend(run: Run, workers: diloco.Workers) -> None:
    """Go on with a run for more --steps than it was started with: a row of the log replaces its
    rules, so that a replay knows. The learning rate jumps to the longer schedule's.
    """
    rules, first = run.config.rules, run.ranks.rank == 0
    # ALL RANKS: the first one's reading, before it writes the longer run's settings.
    before = run.ranks.share(load_config(run.folder).steps if first else 0)
    if rules.steps == before:
        return
    executed = tuple(row["steps"] for row in run.rows)
    if rules.sequence is not None and rules.sequence[: len(executed)] != executed:
        raise ValueError(f"--steps {rules.steps}: its schedule does not begin as the run did")
    if first:
        print(f"extended from {before} to {rules.steps} steps: the learning rate jumps to theirs")
        run.append("intervals", [{"rules": asdict(rules)}])
        write_settings(run.config, read_facts(run.folder))
    save_checkpoint(run, workers)  # the one before belongs to the shorter run


def execute(config: Config) -> int:
    """One rank of a run, from its folder to the final table."""
    rank, world, local, _ = diloco.launched_ranks()
    S, K = config.ranks_per_worker, config.workers
    groups, rest = divmod(world, S)
    if rest or K % groups or (S > 1 and K != groups):  # several workers a rank, or several ranks
        raise ValueError(f"--ranks-per-worker {S}: {K} workers cannot share {world} ranks")
    if config.init_from and Path(config.init_from).resolve() == config.folder.resolve():
        raise ValueError(f"--init-from {config.init_from}: is the run itself; give another --name")

    def stop(*_: Any) -> None:
        ranks.stopping = True

    with ExitStack() as held:
        resumes = held.enter_context(owned(config)) if rank == 0 else config.resume
        facts = read_facts(config.folder)["data"] if resumes else {}
        source = data.open_source(config, facts.get("revision", ""))
        for name, value in source.facts.items():
            if facts.get(name, value) != value:
                words = f"{name} is {value}; {config.folder / 'env.json'} has {facts[name]}"
                raise ValueError(f"--data {config.data}: {words} (without it this is accepted)")
        same = {flag(n): v for n, v in asdict(config).items() if n not in RESUME_MAY_CHANGE}
        first = source.batch(0, 0)  # damaged data is found before an earlier run is deleted
        same |= {"program": program_sha256()[:16], "--data, its facts": source.facts}
        same |= {"--data, first documents": first.ids, "--data, sum": int(first.inputs.sum())}
        ranks, words = diloco.connect(K, S, config.timeout_minutes, same)
        resumes = ranks.share(resumes)
        run = Run(config, ranks)
        for number in STOPS:  # as often as they come, they save the run and end it
            held.callback(signal.signal, number, signal.signal(number, stop))
        workers = build_workers(config, ranks, source)
        if resumes:
            restore(run, workers)
            extend(run, workers)
        else:
            begin(run, source)
        at = run.state.step + max(workers.done)
        if rank == 0 and config.wandb:
            import wandb

            name = f"{config.folder.name}-{read_facts(config.folder).get('began', '')}"
            about: dict[str, Any] = {"id": name, "resume": "allow", "config": asdict(config)}
            run.wandb = wandb.init(project=config.wandb, **about)
        if local == 0:
            say_what_runs(config, workers, source, words)
            if resumes:
                print(f"resuming at step {at}")
            every = 0.1 if sys.stderr.isatty() else 10.0  # seconds; in a file a line now and then
            bar = tqdm(total=config.steps, initial=at, unit="step", mininterval=every)
            run.bar = held.enter_context(bar)
        if not train(run, workers, source):
            if rank == 0:
                print(f"saved; continue with --resume --name {config.folder.name}")
        else:
            measured = validate(workers.model, source, ranks, config.dtype)
            if rank == 0:
                finish(run, measured)
        if run.wandb:
            run.wandb.finish()
        ranks.leave()  # not after a failure: a library's clean-up may wait for a lost peer
    return 0


def begin(run: Run, source: data.Source) -> None:
    """Write a new run's first files, in place of an earlier run's; all ranks must see them."""
    config, ranks = run.config, run.ranks
    if ranks.rank == 0:
        for path in run.folder.iterdir():  # an earlier run's, all of it: see `check_only_a_run`
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        facts = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "gpu": torch.cuda.get_device_name() if ranks.device.type == "cuda" else None,
            "threads": torch.get_num_threads(),
            "ranks": ranks.world,
            "began": int(time.time()),
            "source_sha256": program_sha256(),
            "data": source.facts,
        }
        write_settings(config, facts)
        run.append("metrics", [])
        about = {name: getattr(config, name) for name in ("recipe", "method", "workers", "wire")}
        run.append("intervals", [autoloco.header(config.rules, **about)])
    ranks.share(None)  # ALL RANKS: nobody looks before rank 0 has written
    if ranks.any(not (run.folder / "env.json").exists()):
        raise diloco.Disagreement(f"{run.folder}: not every rank sees the folder of rank 0")


def say_what_runs(config: Config, workers: diloco.Workers, source: data.Source, words: str) -> None:
    """Print once what was decided for the user."""
    count = sum(p.numel() for p in workers.parameters)
    shown = ("data", "documents", "shards", "validation_documents", "tokenizer")
    print(
        f"{config.folder.name}: {config.method}, {config.workers} workers, {count:,} parameters",
        f"machine: {words}, {config.dtype}, wire {config.wire}",
        ", ".join(f"{name} {source.facts[name]}" for name in shown if name in source.facts),
        *source.notes,
        sep="\n",
    )
    if config.dtype == "bf16" and workers.ranks.device.type == "cpu":
        print("--dtype bf16: a CPU without bf16 units takes several times as long as with fp32")


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def finish(run: Run, measured: Scores) -> None:
    """Write summary.json, totals of the logs and final losses, and print the final table."""
    config, metrics = run.config, autoloco.read_rows(run.folder / "metrics.jsonl")[0]
    last = metrics[-max(1, len(metrics) // 50) :]  # 2 % of steps
    losses = [row["loss"] for row in last if row["loss"] is not None]
    seconds = sum(row["local_seconds"] + row["sync_seconds"] for row in run.rows)
    summary = totals(config, [row["steps"] for row in run.rows]) | {
        "sent_bytes": sum(row["sent_bytes"] for row in run.rows),  # by rank 0
        "train_loss": sum(losses) / len(losses) if losses else math.nan,
        "val_loss": measured["val_loss"],
        "bits_per_byte": measured["bits_per_byte"],
        "seconds": round(seconds, 1),
    }
    write_json(run.folder / "summary.json", finite(summary))
    print(
        f"\n{'':10}{'loss':>8}{'val loss':>10}{'syncs':>8}{'payload':>12}{'against DiLoCo':>20}\n"
        f"{config.method:10}{summary['train_loss']:8.4f}{summary['val_loss']:10.4f}"
        f"{summary['synchronisations']:8}{summary['payload_bytes'] / 1e6:9.1f} MB"
        f"{saved_words(summary['saved']):>20}\n"
        f"{summary['seconds']:.1f} s; {diloco.format_runs(summary['intervals'])}; in {run.folder}"
    )


# ---------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of leaving."""

    def error(self, message: str) -> Any:
        """Turn argparse's complaint into one line."""
        raise ValueError(message)


def flags_parser() -> Parser:
    """Flags from the fields of Config."""
    words = "Train with AutoLoCo, DiLoCo, Linear-Interval, QSR or DDP."
    exact: dict[str, Any] = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}
    parser = Parser("train.py", description=words, **exact)
    group: Any = parser
    types = {"int": int, "float": float, "str": str}
    for one in fields(Config):
        about, kind = one.metadata, str(one.type).split(" ")[0]
        if "group" in about:
            group = parser.add_argument_group(about["group"])
        shown = "" if one.default in ("", None) else f" [{one.default}]"
        options: dict[str, Any] = {"type": types.get(kind), "choices": about.get("choices")}
        if kind == "bool":
            options = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag(one.name), help=about["help"] + shown, **options)
    return parser


def parse(argv: list[str]) -> tuple[Config, dict[str, Any]]:
    """Command line -> checked Config, and what the user gave. ValueError names flag or file."""
    given = vars(flags_parser().parse_args(argv))
    if bare := [name for name, value in given.items() if isinstance(value, list)]:
        raise ValueError(f"{flag(bare[0])}: no value")  # what argparse makes of --steps=--
    if given.get("resume"):
        return resumed(given), given
    if given.get("init_from") and "tokenizer" not in given:
        source = Path(given["init_from"])
        if is_run(source):
            given["tokenizer"] = load_config(source).tokenizer
        elif data.has_tokenizer(source):
            given["tokenizer"] = str(source)
    recipe, method = given.get("recipe", Config.recipe), given.get("method", Config.method)
    config = Config(**{**RECIPES[recipe], **METHODS[method].defaults, **given})
    if config.seq_len > (positions := config.shape.max_seq_len):
        raise ValueError(f"--seq-len {config.seq_len}: the model has {positions} positions")
    return config, given


def resumed(given: Mapping[str, Any]) -> Config:
    """The config of the run to be continued, with what a resume may change."""
    named = {name: given[name] for name in ("recipe", "method", "name", "seed") if name in given}
    folder = Config(**named).folder
    config = replace(load_config(folder), name=folder.name, resume=True)
    for name, value in given.items():
        started = getattr(config, name)
        longer = name == "steps" and value > started  # see `extend`
        if name not in RESUME_MAY_CHANGE and started != value and not longer:
            raise ValueError(f"{flag(name)} {value}: {folder} was started with {started}")
    return replace(config, **{**given, "name": folder.name})


def without_effect(config: Config, given: Iterable[str]) -> list[str]:
    """Warnings for settings that the user gave and that change nothing."""
    return [
        f"{flag(one.name)} has no effect: it needs {one.metadata['needs']}"
        for one in fields(Config)
        if one.name in given and "needs" in one.metadata
        if not NEEDS[one.metadata["needs"]](config)
    ]


def spread(argv: list[str], count: int) -> int:
    """Without torchrun, on a CPU: the workers on `count` processes, which meet in a file.

    The layout changes no bit of the result, and at small matrices two processes of one thread are
    faster than one of two. A signal goes to all of them; if one dies, the others end.
    """
    from torch.multiprocessing import ProcessExitedException, start_processes

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    method = "fork" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (argv, count, f"file://{folder}/meeting")
        context: Any = start_processes(one_rank, arguments, count, False, start_method=method)

        def forward(*_: Any) -> None:
            for process in context.processes:
                process.terminate()

        for number in STOPS:
            signal.signal(number, forward)
        try:
            while not context.join(grace_period=1.0):
                pass
        except ProcessExitedException as error:
            if error.exit_code > 0:
                return int(error.exit_code)  # the rank has said why
            complain(f"rank {error.error_index} was ended by {error.signal_name}; so all ranks end")
            return 1
    return 0


def one_rank(index: int, argv: list[str], count: int, place: str) -> None:
    """A process that `spread` started."""
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    ranks = {"RANK": index, "WORLD_SIZE": count, "LOCAL_RANK": index, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ["AUTOLOCO_RENDEZVOUS"] = place
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    leave(main(argv))


def leave(code: int) -> None:
    """End this process, without the clean-up of libraries, which may wait for a lost peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def complain(what: object) -> None:
    """Say in one line, whatever it quotes, what ended the program."""
    print("train.py:", " ".join(str(what).split()), file=sys.stderr)


def main(argv: list[str]) -> int:
    """Parse, check, run; see the module's exit codes."""
    rank, world, local = 0, 1, 0
    try:
        rank, world, local, _ = diloco.launched_ranks()
        config, given = parse(argv)
        for warning in without_effect(config, given) if local == 0 else ():
            print(f"warning: {warning}", file=sys.stderr)
        if config.dry_run:
            dry_run(config)
            return 0
        if not {"OMP_NUM_THREADS", "RANK"} & {*os.environ} and not torch.cuda.is_available():
            counts = range(1, min(diloco.cores(), config.workers) + 1)
            count = max(n for n in counts if config.workers % n == 0)
            if count > 1 and config.ranks_per_worker == 1:
                return spread(argv, count)
        return execute(config)
    except (ValueError, ModuleNotFoundError) as error:
        code, words, known = 2, str(error), isinstance(error, diloco.Disagreement)
        if local and not torch.distributed.is_initialized():
            time.sleep(2)  # a mistake of all ranks ends this one before it repeats the line
    except (RuntimeError, OSError, MemoryError) as error:
        code, known = 1, isinstance(error, diloco.Failure)  # by all ranks
        words = str(error).split("\n")[0] or "out of memory"
        if diloco.lost(error):
            words = f"another rank is gone, or slower than --timeout-minutes ({words})"
        elif type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            words = f"torch.compile failed ({words}); --no-compile trains without it"
        elif not isinstance(error, diloco.Failure | OSError | MemoryError | torch.OutOfMemoryError):
            raise
    if local == 0 or not known:
        plain = known or world == 1 or (code == 2 and rank == 0)
        complain(words if plain else f"rank {rank}: {words}")
    return code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
