"""DiLoCo: K local-update workers, their pseudo-gradients, the synchronisation; the baselines.

The method stands first: the outer step, the workers, their synchronisation; then the baselines'
schedules, the wire, and the ranks. The only file with collectives.

    paper       code        meaning
    K, k        workers     local-update workers; one of them
    theta       shared      parameters at the interval's start, the same on all workers
    theta_k     local       parameters of worker k
    Delta_k     delta       pseudo-gradient theta - theta_k: uphill, the outer step subtracts it
    m           momentum    outer momentum buffer
    g           mean        decoded mean pseudo-gradient

K workers live on any number of ranks that divides K: a rank hosts K/ranks replicas and steps them
in turn on one module, whose parameters and optimizer state are switched. Or one worker is sharded
over several ranks with FSDP2. Every pseudo-gradient takes the same path through the codec and is
summed in worker order, so the result does not depend on the layout, bit for bit.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, chain, compress, groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoloco
from model import IGNORE
from quant import CODECS, GPU_SLAB, SLAB, Chunk, Codec, chunks

# ---------------------------------------------------------------- the outer step (D.1, B.4)


def nesterov(
    theta: Tensor, momentum: Tensor, gradient: Tensor, retention: float, step: float
) -> Tensor:
    """Corrected Nesterov outer step, in place on all three tensors; returns g + mu_t m.

        m <- mu_t m + g;   theta <- theta - alpha_0 kappa_t (g + mu_t m)                D.1, B.4

    All (n,) fp32: theta the shared parameters, momentum m, which is never rescaled (B.4), gradient
    g the (normalised) mean pseudo-gradient; retention is mu_t, step alpha_0 kappa_t. The order of
    operations is torch.optim.SGD's, so that the two agree bit for bit.
    """
    momentum.mul_(retention).add_(gradient)
    gradient.add_(momentum, alpha=retention)
    theta.add_(gradient, alpha=-step)  # fused, and rounds differently from mul then add
    return gradient


# ---------------------------------------------------------------- workers

RECORD = ("loss", "targets", "tokens", "grad_norm")  # sums of one local step of one worker


class Measured(NamedTuple):
    """What one synchronisation measured, the same on every rank.

    `values` are its named statistics: log and report show whatever stands there.
    """

    values: dict[str, float]  # drift: D_t, not finite if a worker was not; coherence: C_t; ...
    records: dict[str, Tensor]  # name of RECORD -> (K, H_t) float64
    excluded: tuple[int, ...]  # workers left out because their pseudo-gradient was not finite

    @property
    def tokens(self) -> int:
        """Non-padding tokens of all workers."""
        return int(self.records["tokens"].sum())


class Replica:
    """One local-update worker of this rank: parameters, optimizer states, flat buffers by name."""

    def __init__(self, tensors: list[Tensor], states: list[Any], names: Iterable[str]) -> None:
        self.tensors, self.states = tensors, states
        self.local = [local_tensor(tensor) for tensor in tensors]
        self.buffers = {name: [torch.zeros_like(t) for t in self.local] for name in names}

    def restart(self, shared: list[Tensor]) -> None:
        """Start from the shared parameters, with nothing of its own."""
        for tensor, value in zip(self.local, shared, strict=True):
            tensor.copy_(value)
        for own in chain(*self.buffers.values()):
            own.zero_()
        for state in self.states:
            state.clear()


class Workers:
    """What local-update and data-parallel workers share: gradients of a batch, the records of an
    interval, and what a checkpoint holds.

    A subclass declares its buffers, each a flat fp32 tensor a parameter: the two lists below drive
    allocation, checkpoint, restore and the memory estimate.

    `model` maps (inputs, targets) to the summed loss, `optimizers` are
    the inner ones over its parameters, `clip` is the largest gradient norm (0: none), `micro_batch`
    the rows of a forward pass (0: the whole batch).
    """

    shared_buffers: tuple[str, ...] = ("shared",)  # of all workers, the same on every rank
    worker_buffers: tuple[str, ...] = ()  # of each worker, beside its own parameters
    one_model = False  # parameters and optimizer states belong to all workers together

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        ranks: Ranks,
        codec: Codec = CODECS["fp32"],
        *,
        outer_lr: float = 0.7,
        outer_step: Callable[..., Tensor] = nesterov,
        clip: float = 0.0,
        micro_batch: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.optimizers, self.ranks = model, list(optimizers), ranks
        self.outer_lr, self.outer_step = outer_lr, outer_step
        self.clip, self.micro_batch, self.autocast = clip or math.inf, micro_batch, autocast
        self.names = [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        states = [optimizer.state for optimizer in self.optimizers]
        own = Replica([p.data for p in self.parameters], states, self.worker_buffers)
        self.replicas = [own]
        self.wire = Wire(ranks, codec, [tensor.numel() for tensor in own.local])
        self.shared = own.local  # theta, flat: what all workers start an interval from
        more = {name: [torch.zeros_like(t) for t in own.local] for name in self.shared_buffers[1:]}
        self.buffers = {"shared": self.shared} | more
        self.begin(0)

    def begin(self, steps: int) -> None:
        """Start an interval of `steps` local steps."""
        self.done = [0] * len(self.ranks.hosted)  # steps of this interval, by hosted worker
        zeros = torch.zeros(len(RECORD), len(self.done), steps, dtype=torch.float64)
        self.records = dict(zip(RECORD, zeros.to(self.ranks.device), strict=True))

    def set_lr(self, lr: float) -> None:
        """Inner learning rate of the next step; a group's `lr_ratio`, if any, multiplies it."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_ratio", 1.0)

    def backward(self, batch: Any) -> tuple[Tensor, int, int]:
        """Gradient of the token-averaged loss of one worker's batch, in place of the one before.

        Micro-batches are weighted by their targets: each is divided by the targets of the whole
        batch. Under sharding each rank takes every S-th row. Returns loss sum, targets and
        non-padding tokens of the rows that this rank computed.
        """
        shards, shard, device = self.ranks.ranks_per_worker, self.ranks.shard, self.ranks.device
        total = max(1, int((batch.targets != IGNORE).sum()))
        # ALL RANKS of a worker: as many micro-batches on each, or FSDP2's collectives hang. A rank
        # with a row less, or none, gets one in which nothing counts.
        fill = (0, 0, 0, -len(batch.inputs) % shards)
        inputs = nn.functional.pad(batch.inputs, fill)[shard::shards]
        targets = nn.functional.pad(batch.targets, fill, value=IGNORE)[shard::shards]
        rows = self.micro_batch or len(inputs)
        loss_sum = torch.zeros((), device=device)
        for parameter in self.parameters:  # the model's own may be gathered ones of FSDP2
            parameter.grad = None
        mixed = torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            with mixed:
                loss = self.model(x.to(device, non_blocking=True), y)
            # FSDP2 adds the shards' gradients up (its divide factor is set to 1).
            (loss / total).backward()
            loss_sum += loss.detach()
        return loss_sum, int((targets != IGNORE).sum()), batch.tokens if shard == 0 else 0

    def _norm(self) -> Tensor:
        """Norm of a worker's gradients, all shards together."""
        norm = torch.nn.utils.get_total_norm(p.grad for p in self.parameters if p.grad is not None)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor under FSDP2

    def _update(self, norm: Tensor) -> None:
        """Clip the gradients, whose norm this is, and take the inner step."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        for optimizer in self.optimizers:
            optimizer.step()

    def _record(self, row: int, sums: tuple[Tensor, int, int], norm: Tensor) -> None:
        known = norm if self.ranks.shard == 0 else 0.0  # shards are summed
        for name, value in zip(RECORD, (*sums, known), strict=True):
            self.records[name][row, self.done[row]] = value
        self.done[row] += 1

    def _collect(self, **more: Tensor) -> dict[str, Tensor]:
        """The interval's records and `more`, each (hosted, n) float64, of all workers: (K, n). One
        vector a rank, summed over the shards of each worker, the same on all ranks.
        """
        columns, ranks = self.records | more, self.ranks
        rows = ranks.gather(torch.cat([one.cpu() for one in columns.values()], dim=1).view(-1))
        table = rows.view(ranks.groups, ranks.ranks_per_worker, len(ranks.hosted), -1).sum(1)
        widths = [one.shape[1] for one in columns.values()]
        found = table.view(ranks.workers, -1).split(widths, dim=1)
        return dict(zip(columns, found, strict=True))

    def stop_asked(self) -> bool:
        """Whether to leave the local phase. Ranks that share a worker leave at the same step, since
        its steps hold collectives.
        """
        asked = torch.tensor(int(self.ranks.stopping))
        if self.ranks.shard_group is not None:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.ranks.shard_group)
        return bool(asked)

    def step(self, row: int, batch: Any, lr: float) -> None:
        """One inner step of a hosted worker on its own batch."""
        raise NotImplementedError

    def synchronise(self, plan: autoloco.Plan) -> Measured:
        """End an interval: the same shared parameters and the same statistics on every rank."""
        raise NotImplementedError

    def switch(self, row: int) -> None:
        """Put a hosted worker's parameters and optimizer states (A2) into module and optimizers."""
        if len(self.replicas) > 1:
            replica = self.replicas[row]
            for parameter, tensor in zip(self.parameters, replica.tensors, strict=True):
                parameter.data = tensor
            for optimizer, state in zip(self.optimizers, replica.states, strict=True):
                optimizer.state = state

    # What a checkpoint holds, by `KIND.PARAMETER`.

    def shared_state(self) -> dict[str, Tensor]:
        """What all workers share."""
        return self._named(self.buffers) | (self._inner() if self.one_model else {})

    def worker_state(self, row: int) -> dict[str, Tensor]:
        """What belongs to one hosted worker; its own parameters only inside an interval."""
        found = self._own(row) | {"done": torch.tensor(self.done[row])}
        return found if self.one_model else found | self._inner()

    def load_shared(self, saved: Mapping[str, Tensor]) -> None:
        """Inverse of `shared_state`; every replica starts from the shared parameters."""
        for name, tensor in self._named(self.buffers).items():
            tensor.copy_(saved[name])
        for replica in self.replicas:
            replica.restart(self.shared)
        self._load_inner(saved)

    def load_worker(self, row: int, saved: Mapping[str, Tensor]) -> None:
        """Inverse of `worker_state`, after `load_shared`."""
        if self.records["loss"].shape[1] != len(saved["loss"]):
            self.begin(len(saved["loss"]))
        self.done[row] = int(saved["done"])
        for name, tensor in self._own(row).items():
            tensor.copy_(saved[name])
        self._load_inner(saved)

    def _own(self, row: int) -> dict[str, Tensor]:
        """Records and buffers of a hosted worker, which is switched in; between intervals its
        parameters are the shared ones.
        """
        found = {name: self.records[name][row] for name in RECORD}
        if self.one_model:
            return found
        self.switch(row)
        replica = self.replicas[row]
        own = {"local": replica.local} if self.done[row] else {}
        return found | self._named(replica.buffers | own)

    def _named(self, buffers: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        shapes = [unsharded(tensor).shape for tensor in self.replicas[0].tensors]
        return {
            f"{kind}.{name}": tensor.view(shape)
            for kind, tensors in buffers.items()
            for name, tensor, shape in zip(self.names, tensors, shapes, strict=True)
        }

    def _inner(self) -> dict[str, Tensor]:
        """Optimizer state of the worker that is switched in."""
        found = {}
        for optimizer in self.optimizers:
            for name, parameter in zip(self.names, self.parameters, strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    kind = "optimizer" if isinstance(value, Tensor) else "number"
                    found[f"{kind}.{key}.{name}"] = unsharded(torch.as_tensor(value))
        return found

    def _load_inner(self, saved: Mapping[str, Tensor]) -> None:
        """Inverse of `_inner`; a state has whatever shape its optimizer gave it."""
        owner: dict[Tensor, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            owner |= {p: optimizer for group in optimizer.param_groups for p in group["params"]}
        for full, value in saved.items():
            if full.startswith(("number.", "optimizer.")):
                kind, key, name = full.split(".", 2)
                parameter = self.parameters[self.names.index(name)]
                restored: Any = value.item() if kind == "number" else value.to(parameter.device)
                if hasattr(parameter, "placements") and value.shape == unsharded(parameter).shape:
                    restored = torch.zeros_like(parameter, dtype=value.dtype).detach()
                    unsharded(restored).copy_(value)
                owner[parameter].state[parameter][key] = restored


class LocalUpdate(Workers):
    """DiLoCo and AutoLoCo: workers that train apart and exchange pseudo-gradients (D.1, B.5)."""

    shared_buffers = ("shared", "momentum")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = self.replicas[0]
        self.replicas += [deepcopy(own) for _ in self.ranks.hosted[1:]]
        self.shared = self.buffers["shared"] = [tensor.clone() for tensor in own.local]

    def step(self, row: int, batch: Any, lr: float) -> None:
        """One inner step of a hosted worker on its own batch. No communication."""
        self.switch(row)
        self.set_lr(lr)
        sums = self.backward(batch)
        norm = self._norm()
        self._update(norm)
        self._record(row, sums, norm)

    def synchronise(self, plan: autoloco.Plan) -> Measured:
        """Average the pseudo-gradients, take the corrected outer step, give every worker the same
        parameters.

            D_t = 1/K sum_k ||Delta_k||^2,   C_t = ||mean_k Delta_k||^2 / D_t           C.1, A1

        Two passes over memory: Delta_k over the dead local weights with its norm; then mean,
        momentum, theta and write-back, chunk by chunk in the cache. D is of the local deltas before
        the codec, C's numerator of the mean as decoded (G.1). A worker whose Delta is not finite is
        left out, and starts again from the shared parameters with fresh inner states.
        """
        own = torch.stack([self.pseudo_gradient(row) for row in range(len(self.replicas))])
        records = self._collect(squares=own[:, None])
        squares = records.pop("squares")[:, 0]  # ||Delta_k||^2 of all workers, (K,)
        include = squares.isfinite().tolist()
        excluded = tuple(worker for worker, finite in enumerate(include) if not finite)
        for worker, replica in zip(self.ranks.hosted, self.replicas, strict=True):
            if worker in excluded:  # what is not finite in its buffers would stay so for good
                replica.restart(self.shared)
        mean_square, update_square = self._move(plan, include) if any(include) else (math.nan, 0.0)
        drift = float(squares.sum()) / self.ranks.workers
        values = {
            "drift": drift,
            "coherence": mean_square / drift if drift > 0 else math.nan,
            "update_norm": math.sqrt(update_square),
        }
        self.begin(0)
        return Measured(values, records, excluded)

    def pseudo_gradient(self, row: int) -> Tensor:
        """Write Delta_k = theta - theta_k over theta_k; returns ||Delta_k||^2, float64.

        fp32 dots of cache-sized chunks, float64 across chunks: float64 over whole tensors costs 4
        to 14 times a dot.
        """
        squares = torch.empty(len(self.wire.chunks), device=self.ranks.device)
        for square, chunk in zip(squares, self.wire.chunks, strict=True):
            delta = cut(self.replicas[row].local, chunk)
            torch.sub(cut(self.shared, chunk), delta, out=delta)
            torch.dot(delta, delta, out=square)
        return squares.double().sum()

    def _move(self, plan: autoloco.Plan, include: Sequence[bool]) -> tuple[float, float]:
        """Second pass; returns the squared norms of the decoded mean and of the update."""
        step, momentum = self.outer_lr * plan.step_scale, self.buffers["momentum"]
        # One allocation: small ones between those of the chunks would leave holes of their size.
        squares = torch.empty(2, len(self.wire.chunks), device=self.ranks.device)
        found = self.wire.mean([replica.local for replica in self.replicas], include)
        for (chunk, mean), square in zip(found, squares.T, strict=True):
            torch.dot(mean, mean, out=square[0])
            if plan.divisor != 1.0:
                mean = mean.div_(plan.divisor)
            theta = cut(self.shared, chunk)
            update = self.outer_step(theta, cut(momentum, chunk), mean, plan.momentum, step)
            torch.dot(update, update, out=square[1])
            for replica in self.replicas:
                cut(replica.local, chunk).copy_(theta)
        sums = squares.double().sum(1).cpu()
        # A dot differs in its last bit between kinds of processor and numbers of threads: the first
        # worker's ranks speak for all.
        sums = self.ranks.gather(sums)[: self.ranks.ranks_per_worker].sum(0)
        mean_square, update_square = sums.tolist()
        return mean_square, update_square * step * step


class DataParallel(Workers):
    """The DDP baseline (E.2): one model per rank, gradients averaged every step. Workers are
    weighted equally although their documents differ in length (A26).
    """

    one_model = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: list[Any] = []  # of each worker since the last step: sums, gradients
        self._stop = False

    def stop_asked(self) -> bool:
        """As all ranks learned in the latest step, whose gradients they averaged together."""
        return self._stop

    def step(self, row: int, batch: Any, lr: float) -> None:
        """Gradient of one hosted worker; after the last one, average, clip and step."""
        self.set_lr(lr)
        sums = self.backward(batch)
        self._pending.append((sums, [local_tensor(p.grad) for p in self.parameters]))
        if row < len(self.ranks.hosted) - 1:
            return
        gradients = [gradient for _, gradient in self._pending]
        for chunk, mean in self.wire.mean(gradients, [True] * self.ranks.workers):
            cut(gradients[-1], chunk).copy_(mean)
        norm = self._norm()
        # One small message a step: the first rank's norm, since a norm's last bit differs between
        # kinds of processor, and whether some rank was asked to stop.
        told = self.ranks.gather(torch.tensor([float(norm), self.ranks.stopping]).double())
        norm, self._stop = told[0, 0].to(norm), bool(told[:, 1].any())
        if norm.isfinite():
            self._update(norm)
        for index, (sums, _) in enumerate(self._pending):
            self._record(index, sums, norm)
        self._pending = []

    def synchronise(self, plan: autoloco.Plan) -> Measured:
        """Collect the interval's records. The workers never part: drift 0, coherence 1. A step
        whose gradient was not finite was skipped, and counts against all of them.
        """
        records = self._collect()
        finite = torch.stack(list(records.values())).isfinite().all(2).all(0).tolist()
        excluded = tuple(worker for worker, whole in enumerate(finite) if not whole)
        self.begin(0)
        return Measured({"drift": 0.0, "coherence": 1.0, "update_norm": 0.0}, records, excluded)


def unsharded(tensor: Any) -> Tensor:
    """This rank's elements in their shape: all of a tensor, or its FSDP2 shard."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_tensor(tensor: Any) -> Tensor:
    """This rank's elements of a parameter or gradient, flat."""
    return unsharded(tensor).view(-1)


def cut(tensors: Sequence[Tensor], chunk: Chunk) -> Tensor:
    """The elements of a chunk, of the list of flat tensors that was cut."""
    return tensors[chunk.tensor][chunk.start : chunk.stop]


# ---------------------------------------------------------------- fixed schedules (E.2)


def fixed_schedule(rules: autoloco.Rules) -> tuple[int, ...]:
    """DiLoCo's intervals: H_base steps each, the last one what is left (E.2).

    >>> fixed_schedule(autoloco.Rules(22, 1e-3, 0, 5))
    (5, 5, 5, 5, 2)
    """
    whole, left = divmod(rules.steps, rules.base_horizon)
    return (rules.base_horizon,) * whole + ((left,) if left else ())


def linear_schedule(rules: autoloco.Rules) -> tuple[int, ...]:
    """Linear-Interval: H grows linearly over T/H_base synchronisations, from H_base/50 (at least 1)
    to 2 H_base less that (E.2). The ends of the intervals are rounded, not their lengths, so the
    sum is exactly T.

    >>> schedule = linear_schedule(autoloco.Rules(50_000, 4e-4, 1000, 500))
    >>> len(schedule), sum(schedule), schedule[0], schedule[-1]
    (100, 50000, 10, 990)
    """
    count = max(1, math.ceil(rules.steps / rules.base_horizon))
    first = max(1.0, rules.base_horizon / 50)
    slope = (2 * rules.base_horizon - 2 * first) / max(1, count - 1)
    ends = list(accumulate(first + slope * i for i in range(count)))
    cuts = sorted({round(rules.steps * end / ends[-1]) for end in ends} - {0})
    return tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))


def qsr_horizon(alpha: float, lr: float, base_horizon: int, left: int) -> int:
    """Quadratic Synchronisation Rule (E.2, A23): alpha is its growth coefficient, in units of the
    learning rate; lr is eta at the interval's start, at least 0; `left` steps of the run are left.

        H = max(H_base, floor((alpha / eta)^2)), at most the steps left

    >>> qsr_horizon(0.3, 0.1, 4, 100)  # (0.3/0.1)**2 is 8.999999999999998 in floats
    9
    >>> qsr_horizon(0.3, 0.0, 4, 100)
    100
    """
    # Clamped before the conversion: eta may be 0, and a product overflows to inf where ** raises.
    square = min(left, (alpha / lr) * (alpha / lr) if lr > 0 else math.inf)
    return min(left, max(base_horizon, math.floor(square * (1 + 1e-12))))


def qsr_schedule(rules: autoloco.Rules) -> tuple[int, ...]:
    """QSR's intervals over a whole run: H_base during the warm-up, then alpha = sqrt(H_base)
    eta_max (E.2, A23).
    """
    intervals: list[int] = []
    alpha, step = math.sqrt(rules.base_horizon) * rules.lr, 0
    while step < rules.steps:
        lr = autoloco.inner_lr(rules, step) if step >= rules.warmup else rules.lr
        intervals.append(qsr_horizon(alpha, lr, rules.base_horizon, rules.steps - step))
        step += intervals[-1]
    return tuple(intervals)


def run_lengths(intervals: Iterable[int]) -> list[list[int]]:
    """Executed intervals as [count, steps] pairs.

    >>> run_lengths([500, 500, 250])
    [[2, 500], [1, 250]]
    """
    return [[len(list(group)), steps] for steps, group in groupby(intervals)]


def format_runs(runs: Iterable[Sequence[int]]) -> str:
    """[count, steps] pairs in the paper's notation (F.2).

    >>> format_runs([[2, 500], [1, 250]])
    '2x500 250'
    """
    return " ".join(f"{n}x{steps}" if n > 1 else str(steps) for n, steps in runs)


def parse_runs(text: str) -> tuple[int, ...]:
    """Inverse of `format_runs`; commas separate as well. ValueError names --horizons and the part.

    >>> parse_runs("2x500,250")
    (500, 500, 250)
    """
    intervals: list[int] = []
    for part in text.replace(",", " ").split():
        if not re.fullmatch(r"(\d{1,7}x)?0*[1-9]\d*", part):
            raise ValueError(f"--horizons {part}: give STEPS or COUNTxSTEPS, such as 8x500,250")
        count, _, steps = part.rpartition("x")
        intervals += [int(steps)] * int(count or "1")
    return tuple(intervals)


# ---------------------------------------------------------------- the wire (G)

PIECES = 4  # that a synchronisation travels in
PIECE_BYTES = 2**20  # at least, or a small model would wait for its messages
Receive = Callable[[], dict[int, Tensor]]  # waits for the message of each other group
Parts = Sequence[list[Chunk]]  # of a piece, by the group of ranks that averages them
Tensors = Sequence[Sequence[Tensor]]  # 1-D fp32 tensors of each worker of this rank


def average(rows: Sequence[Iterator[Tensor]]) -> Iterator[Tensor]:
    """fp32 mean of each chunk: summed in worker order, then divided, so that it does not depend on
    the layout. The first row is overwritten.
    """
    for total in rows[0]:
        for row in rows[1:]:
            total.add_(next(row))
        yield total.div_(len(rows)) if len(rows) > 1 else total


def begun_early(journeys: Iterable[Iterator[Any]]) -> Iterator[Iterator[Any]]:
    """Iterators without their first items, each of which is taken one iterator early: while a piece
    travels, the next one is encoded.
    """
    begun = ((journey, next(journey)) for journey in journeys)
    return (journey for (journey, _), _ in pairwise(chain(begun, [(iter(()), None)])))


class Wire:
    """The mean of one tensor list per worker, every part through the codec (G).

    All-to-all of encoded parts, fp32 mean of the own part in worker order, encoded once, then
    all-gather; piece by piece, so that one travels while the next is encoded. Of each piece whole
    chunks, hence whole blocks, are handed out, a contiguous part to each group of ranks.
    """

    def __init__(self, ranks: Ranks, codec: Codec, numels: Sequence[int]) -> None:
        self.ranks, self.codec = ranks, codec
        # A GPU wants few large chunks, a CPU those that stay in its cache.
        self.chunks = chunks(numels, SLAB if ranks.device.type == "cpu" else GPU_SLAB)
        sizes = [codec.nbytes(chunk) for chunk in self.chunks]
        self.me = ranks.rank // ranks.ranks_per_worker
        total = sum(sizes)
        count = min(PIECES, 1 + total // PIECE_BYTES)
        parts: Parts = [[] for _ in range(count * ranks.groups)]
        for chunk, before in zip(self.chunks, accumulate(sizes, initial=0), strict=False):
            parts[before * len(parts) // total].append(chunk)
        starts = range(0, len(parts), ranks.groups)
        self.pieces = [parts[at : at + ranks.groups] for at in starts]

    def mean(self, hosted: Tensors, include: Sequence[bool]) -> Iterator[tuple[Chunk, Tensor]]:
        """Average over workers, chunk by chunk, as every worker decodes it.

            mean = decode(encode(1/K' sum_k decode(encode(Delta_k))))                   G

        k in worker order over the K' included workers; `include` (K,) is the same on all ranks and
        has at least one. Yields every chunk in order with the decoded mean, (n,) fp32, which the
        caller may change; `hosted` is overwritten where that saves a copy.
        """
        journeys = (self._journey(parts, hosted, include) for parts in self.pieces)
        for journey in begun_early(begun_early(journeys)):
            yield from journey

    def _journey(self, parts: Parts, hosted: Tensors, include: Sequence[bool]) -> Iterator[Any]:
        """One piece in three steps: send the parts, send the mean, yield what `mean` yields."""
        own, here, at = parts[self.me], len(hosted), self.me * len(hosted)
        sizes = [sum(map(self.codec.nbytes, part)) for part in parts]
        sends = {
            group: self._encode(part * here, [cut(row, chunk) for row in hosted for chunk in part])
            for group, part in enumerate(parts)
            if group != self.me
        }
        receive = self.ranks.exchange(sends, [here * sizes[self.me]] * len(parts))
        yield
        # Of each worker its decoded chunks; the own workers stand between those of other ranks.
        rows = [self._decode(own, row) for each in receive().values() for row in each.chunk(here)]
        rows[at:at] = [map(self.round_trip, own, [cut(t, chunk) for chunk in own]) for t in hosted]
        means = average(list(compress(rows, include)))
        if not sends:  # nothing travels, so no message is made
            yield
            yield from zip(own, map(self.round_trip, own, means), strict=True)
            return
        mine = self._encode(own, means)
        receive = self.ranks.exchange(dict.fromkeys(sends, mine), sizes)
        del sends, rows
        yield
        messages = receive() | {self.me: mine}
        for group, part in enumerate(parts):
            yield from zip(part, self._decode(part, messages[group]), strict=True)

    def _encode(self, chunks: Sequence[Chunk], sources: Iterable[Tensor]) -> Tensor:
        """One message: the encodings of the chunks, one after the other."""
        sizes = [self.codec.nbytes(chunk) for chunk in chunks]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=self.ranks.device)
        for chunk, source, slot in zip(chunks, sources, message.split(sizes), strict=True):
            self.codec.encode(source, chunk.block, slot)
        return message

    def _decode(self, chunks: Sequence[Chunk], message: Tensor) -> Iterator[Tensor]:
        slots = message.split([self.codec.nbytes(chunk) for chunk in chunks])
        for chunk, slot in zip(chunks, slots, strict=True):
            out = torch.empty(chunk.stop - chunk.start, device=message.device)
            yield self.codec.decode(slot, chunk.block, out)

    def round_trip(self, chunk: Chunk, source: Tensor) -> Tensor:
        """decode(encode(source)), what the other side would see."""
        if self.codec.name == "fp32":
            return source
        return next(self._decode([chunk], self._encode([chunk], [source])))


# ---------------------------------------------------------------- ranks


class Disagreement(ValueError):
    """Ranks were started differently: the user's mistake, and all ranks know of it."""


class Failure(RuntimeError):
    """The run cannot go on, and it is not the user's mistake: one line for them, no traceback."""


@dataclass
class Ranks:
    """Where this process stands: rank = (worker group) * ranks_per_worker + shard."""

    rank: int = 0
    world: int = 1
    workers: int = 1  # K
    ranks_per_worker: int = 1  # S; above 1 each rank hosts a shard of one worker
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    wire_device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # CPU under gloo
    shard_group: Any = None  # of the ranks that share this one's worker; None where S is 1
    bytes_sent: int = 0
    stopping: bool = False  # a signal came, to this rank or to another
    _leaving: threading.Event = field(default_factory=threading.Event)
    _watch: threading.Thread | None = None

    @property
    def groups(self) -> int:
        """Ranks that exchange pseudo-gradients with each other: world / S."""
        return self.world // self.ranks_per_worker

    @property
    def shard(self) -> int:
        """Which shard of its worker this rank holds."""
        return self.rank % self.ranks_per_worker

    @property
    def hosted(self) -> range:
        """The workers of this rank, in worker order."""
        per_rank, group = self.workers // self.groups, self.rank // self.ranks_per_worker
        return range(group * per_rank, (group + 1) * per_rank)

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's vector, (world, n) in rank order.

        `values` is (n,) on the CPU, of the same length on all ranks.
        """
        if self.world == 1:
            return values[None]
        rows = values.new_empty(self.world, len(values))
        # ALL RANKS: same length here, or this hangs.
        dist.all_gather(list(rows), values.contiguous())
        self.bytes_sent += (self.world - 1) * values.numel() * values.element_size()
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small object, in rank order."""
        found = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found

    def share(self, value: Any) -> Any:
        """The first rank's small object, on every rank."""
        return self.gather_objects(value)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return any(self.gather_objects(flag))

    def agree(self, facts: Mapping[str, Any], error: type[Exception], apart: int = 1) -> None:
        """Compare what must be the same on all ranks, or on every `apart`-th; the error names what
        differs, and the rank.
        """
        found = self.gather_objects(dict(facts))
        for rank, own in enumerate(found):
            for name, value in found[rank % apart].items():
                if own.get(name) != value:
                    words = f"rank {rank} has {own.get(name)}, rank {rank % apart} has {value}"
                    raise error(f"{name}: {words}")

    def exchange(self, sends: Mapping[int, Tensor], sizes: Sequence[int]) -> Receive:
        """Begin to send one message of bytes to, and receive one of `sizes[group]` bytes from, each
        other group's rank of the same shard; staged where the wire is on the CPU and the device is
        not.
        """
        wire, S = self.wire_device, self.ranks_per_worker
        found = {g: torch.empty(sizes[g], dtype=torch.uint8, device=wire) for g in sends}
        operations = [
            dist.P2POp(call, tensor.to(wire), group * S + self.shard)
            for call, tensors in ((dist.irecv, found), (dist.isend, sends))
            for group, tensor in tensors.items()
            if tensor.numel()
        ]
        travelling = dist.batch_isend_irecv(operations) if operations else []
        self.bytes_sent += sum(tensor.nbytes for tensor in sends.values())

        def receive() -> dict[int, Tensor]:
            for work in travelling:
                work.wait()
            return {group: tensor.to(self.device) for group, tensor in found.items()}

        return receive

    def watch(self, store: Any) -> None:
        """Tell the other ranks of a signal that came to this one, and hear of theirs: one look a
        second, beside the training, so that a store that no longer answers holds nobody up.
        """

        def look() -> None:
            with suppress(RuntimeError):  # the next collective says what was lost
                while not self._leaving.wait(1.0):
                    if self.stopping:
                        return store.set("stop", "")
                    self.stopping = store.check(["stop"])

        self._watch = threading.Thread(target=look, daemon=True)
        self._watch.start()

    def leave(self) -> None:
        """End the watch and the process group, if there is one."""
        self._leaving.set()
        if self._watch:
            self._watch.join(5.0)
        if dist.is_initialized():
            dist.destroy_process_group()


def launched_ranks() -> tuple[int, int, int, int]:
    """Rank, world, local rank and local world of torchrun; 0, 1, 0, 1 under plain python."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = (os.environ.get(name) or default for name, default in zip(names, "0101", strict=True))
    rank, world, local, local_world = map(int, given)
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} WORLD_SIZE={world}: unset them, or start with torchrun")
    return rank, world, local, local_world


def cores() -> int:
    """Processor cores that this process may use; macOS cannot say which."""
    limited = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if limited else os.cpu_count() or 1


def keep_freed_memory(keep: bool = True) -> None:
    """Let glibc reuse what is freed, rather than return it to the system and ask again: fresh pages
    cost a step on a CPU up to 9 % (`bench step`).
    """
    mapped, trimmed = (0, 2**31 - 1) if keep else (65_536, 131_072)
    with suppress(OSError, AttributeError):  # another system, or another library
        set_option = ctypes.CDLL("libc.so.6").mallopt
        set_option(-4, mapped)  # M_MMAP_MAX
        set_option(-1, trimmed)  # M_TRIM_THRESHOLD


def lost(error: BaseException) -> bool:
    """Whether an error means that another rank is gone or too slow."""
    return isinstance(error, dist.DistError) or any(w in str(error) for w in ("gloo", "NCCL"))


def connect(
    workers: int,
    ranks_per_worker: int = 1,
    timeout_minutes: float = 30.0,
    same: Mapping[str, Any] | None = None,
) -> tuple[Ranks, str]:
    """Join the other ranks of the launch, choose device and backend; returns what was chosen in
    words too.

    gloo on CPUs, NCCL where every rank has a GPU of its own; ranks that share one fall to gloo,
    staged through the CPU. `same` must be equal on all ranks: ValueError names what differs.
    """
    rank, world, local, local_world = launched_ranks()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // local_world))
    threads = torch.get_num_threads()
    words = f"{device.type}, {threads} thread{'s' * (threads > 1)} a rank"
    ranks = Ranks(rank, world, workers, ranks_per_worker, device)
    if world == 1:
        return ranks, words
    store, own_gpu = _meet(rank, world, device, timeout_minutes)
    if gpus and not own_gpu and ranks_per_worker > 1:
        raise ValueError("--ranks-per-worker above 1: FSDP2 needs a GPU for every rank")
    backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    ranks.wire_device = device if own_gpu else torch.device("cpu")
    # One agreement before any other collective: ranks that were started differently would train to
    # another result, or wait for each other.
    ranks.agree(same or {}, Disagreement)
    if ranks_per_worker > 1:
        ranks.shard_group, _ = dist.new_subgroups(ranks_per_worker, timeout=timeout)
    ranks.watch(store)
    return ranks, f"{words}, {world} ranks over {'nccl' if own_gpu else 'gloo'}"


def _meet(rank: int, world: int, device: torch.device, minutes: float) -> tuple[Any, bool]:
    """The launch's store, once all ranks are there, and whether each of them has its own GPU."""
    # Ranks may start apart, even where --timeout-minutes allows seconds at a later meeting.
    joining = timedelta(minutes=max(minutes, 2.0))
    place = os.environ.get("AUTOLOCO_RENDEZVOUS", "env://")
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    waiting = f"rank {rank} waits for {world} ranks at {where} (RANK and WORLD_SIZE are set)"
    timer = threading.Timer(5.0, print, (waiting,), {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        store, _, _ = next(iter(dist.rendezvous(place, rank, world, timeout=joining)))
        # A restarted launch keeps its store: a prefix keeps its keys apart from those of the
        # attempt that died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"autoloco-{attempt}", store)
        gpu = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else ""
        store.set(f"here/{rank}", str(gpu))
        keys = [f"here/{other}" for other in range(world)]
        store.wait(keys, joining)
        store.set_timeout(timedelta(minutes=minutes))
    except (dist.DistError, ValueError) as error:
        raise Failure(f"no meeting at {where} ({str(error).splitlines()[0]})") from None
    finally:
        timer.cancel()
    return store, len(set(map(store.get, keys))) == world


def checksum(tensors: Iterable[Tensor]) -> int:
    """Sum of the bits of 1-D fp32 tensors in any order, modulo 2^64: the same for equal weights."""
    total = 0
    for tensor in tensors:
        pairs = tensor.numel() // 2 * 2
        total += int(tensor[:pairs].view(torch.int64).sum())
        total += int(tensor[pairs:].view(torch.int32).sum())
    return total % 2**64
