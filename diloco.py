"""DiLoCo: K local-update workers, their pseudo-gradients, the synchronisation and the baselines'
schedules.

The only file with collectives. K workers live on any number of ranks that divides K: a rank hosts
K/ranks replicas and steps them in turn on one module, whose parameters and AdamW state are
switched. Or one worker is sharded over several ranks with FSDP2. Every worker's pseudo-gradient
takes the same path through the codec and is summed in worker order, so the result does not depend
on the layout, bit for bit.

    paper       code        meaning
    K, k        workers     local-update workers; one of them
    theta       shared      parameters at the interval's start, the same on all workers
    theta_k     local       parameters of worker k
    Delta_k     delta       pseudo-gradient theta - theta_k: uphill, the outer step subtracts it
    m           momentum    outer momentum buffer
    g           mean        decoded mean pseudo-gradient
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoloco
from data import IGNORE, Batch
from quant import GPU_SLAB, SLAB, Chunk, Codec, chunks

# ---------------------------------------------------------------- fixed schedules (E.2)


def fixed_schedule(steps: int, horizon: int) -> tuple[int, ...]:
    """DiLoCo's intervals: `horizon` steps each, the last one what is left (E.2).

    >>> fixed_schedule(22, 5)
    (5, 5, 5, 5, 2)
    """
    left = steps % horizon
    return (horizon,) * (steps // horizon) + ((left,) if left else ())


def linear_schedule(steps: int, base_horizon: int) -> tuple[int, ...]:
    """Linear-Interval: H grows linearly over steps/H_base synchronisations (E.2; 10 -> 990 over 100
    for C4).

    From H_base/50, at least 1, to 2 H_base less that. The ends of the intervals are rounded, not
    their lengths, so the sum is exactly `steps`.

    >>> schedule = linear_schedule(50_000, 500)
    >>> len(schedule), sum(schedule), schedule[0], schedule[-1]
    (100, 50000, 10, 990)
    """
    count = max(1, math.ceil(steps / base_horizon))
    first = max(1.0, base_horizon / 50)
    slope = (2 * base_horizon - 2 * first) / max(1, count - 1)
    ends = list(accumulate(first + slope * i for i in range(count)))
    cuts = sorted({round(steps * end / ends[-1]) for end in ends} - {0})
    return tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))


def qsr_horizon(alpha: float, lr: float, base_horizon: int, left: int) -> int:
    """Quadratic Synchronisation Rule (E.2, A23).

        H = max(H_base, floor((alpha / eta)^2)), at most the steps left

    Args:
        alpha: growth coefficient, in units of the learning rate.
        lr: eta at the interval's start, >= 0.
        base_horizon: H_base, steps.
        left: steps left in the run, >= 1.
    Returns:
        H, steps.

    >>> qsr_horizon(0.3, 0.1, 4, 100)  # (0.3/0.1)**2 is 8.999999999999998 in floats
    9
    >>> qsr_horizon(0.3, 0.0, 4, 100)
    100
    """
    # Clamped before the conversion: eta may be 0, and a product overflows to inf where ** raises.
    square = (alpha / lr) * (alpha / lr) if lr > 0 else math.inf
    return (
        left if square >= left else min(left, max(base_horizon, math.floor(square * (1 + 1e-12))))
    )


def qsr_schedule(rules: autoloco.Rules) -> tuple[int, ...]:
    """QSR's intervals over a whole run: H_base during the warm-up, then alpha = sqrt(H_base)
    eta_max (E.2, A23).
    """
    intervals: list[int] = []
    alpha, step = math.sqrt(rules.base_horizon) * rules.lr, 0
    while step < rules.steps:
        left = rules.steps - step
        if step < rules.warmup:
            intervals.append(min(left, rules.base_horizon))
        else:
            lr = autoloco.inner_lr(rules, step)
            intervals.append(qsr_horizon(alpha, lr, rules.base_horizon, left))
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


def parse_intervals(text: str) -> tuple[int, ...]:
    """Inverse of `format_runs`; commas separate as well.

    Raises:
        ValueError: naming --horizons and the part that is not `STEPS` or `COUNTxSTEPS`.

    >>> parse_intervals("2x500,250")
    (500, 500, 250)
    """
    intervals: list[int] = []
    for part in text.replace(",", " ").split():
        count, _, steps = part.rpartition("x")
        if not steps.isdecimal() or not (count or "1").isdecimal() or int(steps) < 1:
            raise ValueError(f"--horizons {part}: give STEPS or COUNTxSTEPS, such as 8x500,250")
        if int(count or "1") > 10**6:  # before a list of that length exists
            raise ValueError(f"--horizons {part}: at most 10^6 intervals")
        intervals += [int(steps)] * int(count or "1")
    return tuple(intervals)


# ---------------------------------------------------------------- ranks


class Failure(RuntimeError):
    """The run cannot go on, and it is not the user's mistake: one line for them, no traceback."""


class LostPeer(Failure):
    """Another rank is gone or did not arrive in time; the message names it."""


class Stop(Exception):
    """SIGTERM or SIGINT came to some rank: finish the step, save, leave with 0."""


@dataclass
class Ranks:
    """Where this process stands: rank = (worker group) * ranks_per_worker + shard.

    Args:
        rank: global rank.
        world: number of ranks.
        workers: K.
        ranks_per_worker: S; above 1 each rank hosts a shard of one worker.
        device: of parameters and computation.
        timeout: how long a synchronisation waits for the slowest rank.
        store: key-value store of the launch; None in a single process.
        wire_device: where encoded bytes travel from: the CPU under gloo.
    """

    rank: int
    world: int
    workers: int
    ranks_per_worker: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: timedelta = timedelta(minutes=30)
    store: Any = None
    wire_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: Any = None
    bytes_sent: int = 0
    met: list[str] = field(default_factory=list)
    next_look: float = 0.0

    @property
    def groups(self) -> int:
        """Ranks that exchange pseudo-gradients with each other: world / S."""
        return self.world // self.ranks_per_worker

    @property
    def shard(self) -> int:
        """Which shard of its worker this rank holds."""
        return self.rank % self.ranks_per_worker

    @property
    def everyone(self) -> range:
        """All ranks."""
        return range(self.world)

    @property
    def shards(self) -> range:
        """The ranks that share this one's worker: with S = 1 only itself."""
        first = self.rank - self.shard
        return range(first, first + self.ranks_per_worker)

    @property
    def hosted(self) -> range:
        """The workers of this rank, in worker order."""
        per_rank = self.workers // self.groups
        first = self.rank // self.ranks_per_worker * per_rank
        return range(first, first + per_rank)

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's vector, in rank order: the only scalars that travel.

        Args:
            values: (n,), float64 or int64, on the CPU; n is the same on all ranks.
        Returns:
            (world, n).
        """
        rows = values.repeat(self.world, 1)
        others = [(self.rank + i) % self.world for i in range(1, self.world)]
        # ALL RANKS: same length here, or this hangs.
        message = values.contiguous()
        sends = ((rank, message) for rank in others)
        self.exchange(sends, {rank: rows[rank] for rank in others})()
        return rows

    def exchange(
        self, sends: Iterable[tuple[int, Tensor]], receives: dict[int, Tensor]
    ) -> Callable[[], None]:
        """One message to and from each of some other ranks, in the same order on all of them.

        All are under way at once, so that every link is shared evenly: one after the other took
        1.15 times as long on links of 1 Gbit/s, since two ranks then send to the same one while
        another one waits.

        Args:
            sends: (rank, contiguous tensor), drawn one by one while those before it travel.
            receives: rank -> contiguous tensor, written.
        Returns:
            Waits until all messages have left and arrived; until then the tensors are in use.
        Raises:
            LostPeer: naming the rank that is gone; the returned function raises it too.
        """
        targets = [(target, peer) for peer, target in receives.items() if target.numel()]
        together = self.wire_device.type == "cuda"  # NCCL must know all of them as one group
        operations = [dist.P2POp(dist.irecv, *pair) for pair in targets if together]
        works: list[tuple[Any, int]] = []
        if not together:
            works = [(self._reach(peer, dist.irecv, t, peer), peer) for t, peer in targets]
        for peer, message in sends:
            if message.numel():
                self.bytes_sent += message.numel() * message.element_size()
                if together:
                    operations.append(dist.P2POp(dist.isend, message, peer))
                else:
                    works.append((self._reach(peer, dist.isend, message, peer), peer))
        if operations:
            works = [(work, -1) for work in self._reach(-1, dist.batch_isend_irecv, operations)]

        def finish() -> None:
            for work, peer in works:  # once each: gloo would never end a second wait
                self._reach(peer, work.wait)

        return finish

    def _reach(self, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise self._lost(str(error).splitlines()[0], self.everyone, peer) from None

    @contextmanager
    def naming_lost_shards(self) -> Iterator[None]:
        """Around collectives of one worker's ranks, which FSDP2 starts by itself.

        Raises:
            LostPeer: naming the rank that is gone, instead of the backend's error.
        """
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistBackendError) or "gloo" in str(error)):
                raise
            raise self._lost(str(error).splitlines()[0], self.shards) from None

    def _any_shard(self, stop: bool) -> bool:
        """Whether a rank of this worker knows of a signal. They are near each other, the store may
        be behind the slow link.
        """
        if len(self.shards) == 1:
            return stop
        flag = torch.tensor(int(stop))
        with self.naming_lost_shards():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.mesh.get_group("shard"))
        return bool(flag)

    def _lost(self, reason: str, party: range, peer: int = -1) -> LostPeer:
        """Name the ranks that are gone.

        After a timeout it is those that do not report one as well. After a closed connection it is
        the peer at its other end, for whoever sees it first; the others may wait for this rank.
        """
        self.store.set(f"left/{self.rank}", "")
        for _ in range(30):
            time.sleep(0.1)
            absent = [r for r in party if not self.store.check([f"left/{r}"])]
            if len(absent) < 2:
                break
        gone = [peer] if peer in absent else absent
        self.store.compare_set("lost", "", ", ".join(map(str, gone)) or "unknown")
        names = self.store.get("lost").decode()
        return self._leave(
            f"lost rank {names} in an exchange: gone, or slower than --timeout-minutes ({reason})"
        )

    def _leave(self, reason: str) -> LostPeer:
        """Without torchrun rank 0 holds the store, in which the others read why it leaves."""
        if self.rank == 0:
            time.sleep(2)
        return LostPeer(reason)

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.store is None:
            return text
        if self.rank == 0:
            self.store.set("shared text", text)
        self.store.wait(["shared text"], self.timeout)
        return self.store.get("shared text").decode()

    def asked_to_stop(self, stopping: Callable[[], bool]) -> bool:
        """Whether a signal came to some rank: to this one, which then tells the others, or to
        another, for which this one looks once a second.
        """
        if self.store is None:
            return stopping()
        if stopping():
            self.store.set("stop", "")
        elif time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + 1
        return self.store.check(["stop"])

    def meet(self, key: str, stopping: Callable[[], bool], party: range) -> None:
        """Go on together, or stop together: every rank of the party follows whoever settles `key`
        first.

        The last one to arrive settles it with "go", one that learns of a signal with "stop", one
        that waited too long with the names of the absent: no rank enters a collective that another
        one will not join. One worker's ranks do not use the store: nothing travels while workers
        train apart.

        Args:
            key: names the meeting, the same on all ranks of the party.
            stopping: whether this rank was asked to stop.
            party: the ranks that meet.
        Raises:
            Stop: all of the party stop here.
            LostPeer: naming the ranks that did not arrive within the timeout.
        """
        stop = self.asked_to_stop(stopping)
        if party != self.everyone or self.world == 1:
            if self._any_shard(stop):
                raise Stop
            return
        settled = f"{key}/settled"
        if stop:  # "go" takes this rank's arrival, so it cannot have been settled yet
            self.store.compare_set(settled, "", "stop")
        self.store.set(f"{key}/{self.rank}", "")
        if self.store.add(f"{key}/arrived", 1) == len(party):
            self.store.compare_set(settled, "", "go")
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not self.store.check([settled]):
            try:
                self.store.wait([settled], timedelta(seconds=1))
            except dist.DistStoreError:
                if self.asked_to_stop(stopping):
                    self.store.compare_set(settled, "", "stop")
                elif time.monotonic() > deadline:
                    absent = [str(r) for r in party if not self.store.check([f"{key}/{r}"])]
                    self.store.compare_set(settled, "", ", ".join(absent) or "go")
        outcome = self.store.get(settled).decode()
        if outcome == "stop":
            raise Stop
        if outcome != "go":
            raise self._leave(f"rank {outcome} did not arrive within --timeout-minutes")
        if self.rank == 0:  # all are here, so all have read the meeting before
            for old in self.met:
                self.store.delete_key(old)
        self.met = [settled, f"{key}/arrived", *(f"{key}/{r}" for r in party)]


def launched_ranks() -> tuple[int, int, int, int]:
    """Rank, world, local rank and local world of torchrun; 0, 1, 0, 1 under plain python."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world, local, local_world = (
        int(os.environ.get(name, default)) for name, default in zip(names, "0101", strict=True)
    )
    return rank, world, local, local_world


def keep_freed_memory(keep: bool = True) -> bool:
    """Let glibc reuse what is freed, rather than return it to the system and ask again.

    Fresh pages cost a step on a CPU up to 9 % (`bench.py step`); the largest memory of a run stays.

    Args:
        keep: False sets the defaults again.
    Returns:
        Whether this is glibc, and did so.
    """
    try:
        set_option = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another system, or another library
        return False
    mapped, trimmed = (0, 2**31 - 1) if keep else (65_536, 131_072)
    return bool(set_option(-4, mapped) and set_option(-1, trimmed))  # M_MMAP_MAX, M_TRIM_THRESHOLD


def connect(
    workers: int,
    ranks_per_worker: int,
    timeout_minutes: float,
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[Ranks, str]:
    """Join the other ranks of the launch, choose device and backend.

    gloo on CPUs, nccl on GPUs; more ranks than GPUs share them and fall to gloo, staged through the
    CPU.

    Args:
        workers: K, a multiple of world / ranks_per_worker (checked by the caller before anything
            exists).
        ranks_per_worker: S.
        timeout_minutes: wait for the slowest rank at a synchronisation.
        stopping: asked once a second while others are awaited.
    Returns:
        The ranks, and what was chosen, in words.
    """
    rank, world, local, local_world = launched_ranks()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // local_world)
        torch.set_num_threads(threads)
    timeout = timedelta(minutes=timeout_minutes)
    ranks = Ranks(rank, world, workers, ranks_per_worker, device, timeout)
    words = f"{device.type}, {threads} thread{'s' if threads > 1 else ''} a rank"
    if not gpus and keep_freed_memory():
        words += ", freed memory kept"
    if world == 1:
        return ranks, words
    nccl = bool(gpus) and local_world <= gpus
    if gpus and not nccl and ranks_per_worker > 1:
        raise ValueError(
            f"--ranks-per-worker {ranks_per_worker}: {local_world} ranks on {gpus} GPUs, and FSDP2 "
            "needs a GPU for each"
        )
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    # Ranks may start minutes apart, even where --timeout-minutes allows seconds at a later meeting.
    ranks.timeout = max(timeout, timedelta(minutes=10))
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=ranks.timeout)))
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise Failure(f"no meeting at {place} ({str(error).splitlines()[0]})") from None
    # A restarted launch keeps its store: a prefix keeps its keys apart from those of the attempt
    # that died.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ranks.store = dist.PrefixStore(f"autoloco-{attempt}", store)
    ranks.meet("start", stopping, ranks.everyone)
    ranks.timeout = timeout
    try:
        dist.init_process_group(
            backend, store=ranks.store, rank=rank, world_size=world, timeout=timeout
        )
    except RuntimeError as error:
        raise LostPeer(f"a rank left while all connected ({str(error).splitlines()[0]})") from None
    ranks.wire_device = device if nccl else torch.device("cpu")
    if ranks_per_worker > 1:
        shape = (world // ranks_per_worker, ranks_per_worker)
        ranks.mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("worker", "shard"))
    return ranks, f"{words}, {world} ranks over {'nccl' if nccl else 'gloo'}"


def connected() -> bool:
    """Whether this process has joined others."""
    return dist.is_initialized()


def disconnect() -> None:
    """Leave the process group, if there is one.

    `Ranks` should be gone by then: a process group that is only freed when the interpreter ends can
    abort the process (half of the launches of a stress test whose `Ranks` was a global).
    """
    if connected():
        dist.destroy_process_group()


# ---------------------------------------------------------------- the wire (G)


class Wire:
    """The mean of one tensor list per worker, every part through the codec (G).

    All-to-all of encoded parts, fp32 mean of the own part in worker order, encoded once, then
    all-gather. Point-to-point messages carry it: gloo's all-gather of the same bytes is 2 to 3
    times slower. It goes through the tensors in pieces: while one travels, the one before it is
    averaged, and the one before that decoded and used.

    Args:
        ranks: the launch.
        codec: fp32, bf16 or int8.
        numels: elements of each tensor on this rank.
    """

    def __init__(self, ranks: Ranks, codec: Codec, numels: Sequence[int]) -> None:
        self.ranks, self.codec = ranks, codec
        # A GPU wants few large chunks, a CPU those that stay in its cache; parts want many.
        self.chunks = chunks(numels, SLAB if ranks.device.type == "cpu" else GPU_SLAB)
        sizes = [codec.nbytes(chunk) for chunk in self.chunks]
        self.payload_bytes = sum(sizes)
        groups = ranks.groups
        self.me = ranks.rank // ranks.ranks_per_worker
        self.others = [(self.me + i) % groups for i in range(1, groups)]  # the next ones first
        # Whole chunks, hence whole blocks, are handed out: every group has one contiguous part of
        # each piece, all of about equal bytes.
        self.pieces = max(1, min(4, len(sizes) // (2 * groups)))
        count, before = self.pieces * groups, 0
        self.parts: list[list[int]] = [[] for _ in range(count)]
        self.sizes = [0] * count  # bytes of each part
        for index, size in enumerate(sizes):
            part = before * count // self.payload_bytes
            self.parts[part].append(index)
            self.sizes[part] += size
            before += size
        largest = max((chunk.stop - chunk.start for chunk in self.chunks), default=0)
        self._total, self._part = torch.empty(2, largest, device=ranks.device)
        self._bytes = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=ranks.device)
        self._buffers: dict[str, Tensor] = {}

    def mean(
        self, hosted: Sequence[Sequence[Tensor]], include: Sequence[bool]
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Average over workers, chunk by chunk, as every worker decodes it.

        mean = decode(encode(1/K' sum_k decode(encode(Delta_k)))), k in worker order over the K'
        included workers.

        Args:
            hosted: for each worker of this rank its 1-D fp32 tensors; overwritten where that saves
                a copy.
            include: (K,), which workers count; the same on all ranks, at least one.
        Yields:
            Every chunk in order, with the decoded mean: (chunk.stop - chunk.start,) fp32, valid
            until the next one.
        """
        if self.ranks.groups == 1:
            for index, chunk in enumerate(self.chunks):
                parts = (
                    self._recode(index, _cut(tensors, chunk))
                    for tensors, counts in zip(hosted, include, strict=True)
                    if counts
                )
                yield chunk, self._recode(index, self._average(parts, sum(include)))
            return
        scattered: dict[int, Callable[[], None]] = {}
        gathered: dict[int, Callable[[], None]] = {}
        for piece in range(self.pieces + 2):
            if piece < self.pieces:
                scattered[piece] = self._scatter(piece, hosted)
            if 0 <= (before := piece - 1) < self.pieces:
                scattered[before]()
                self._reduce(before, hosted, include)
                gathered[before] = self._gather(before)
            if (oldest := piece - 2) >= 0:
                gathered[oldest]()
                for group in range(self.ranks.groups):
                    (means,) = self._buffer("mean", oldest, group)
                    for index, slot in self._slots(means, oldest, group):
                        chunk = self.chunks[index]
                        out = self._total[: chunk.stop - chunk.start]
                        yield chunk, self.codec.decode(slot, chunk.block, out)

    def _average(self, parts: Iterable[Tensor], count: int) -> Tensor:
        """Sum in worker order, then divide: the order does not depend on the layout."""
        total = None
        for part in parts:
            if total is None:
                total = self._total[: part.numel()].copy_(part) if count > 1 else part
            else:
                total.add_(part)
        assert total is not None, "at least one worker is included"
        return total.div_(count) if count > 1 else total

    def _recode(self, index: int, source: Tensor) -> Tensor:
        """decode(encode(source)), what the other side would see."""
        if self.codec.name == "fp32":
            return source
        chunk = self.chunks[index]
        encoded = self._bytes[: self.codec.nbytes(chunk)]
        self.codec.encode(source, chunk.block, encoded)
        return self.codec.decode(encoded, chunk.block, self._part[: source.numel()])

    def _buffer(self, kind: str, piece: int, group: int, copies: int = 1) -> Tensor:
        """Bytes of a group's part of a piece, (copies, n). There is room for two pieces, allocated
        once for the run.
        """
        size = self.sizes[piece * self.ranks.groups + group]
        key, most = f"{kind} {piece % 2} {group}", copies * max(self.sizes)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(most, dtype=torch.uint8, device=self.ranks.device)
        return self._buffers[key][: copies * size].view(copies, size)

    def _slots(self, message: Tensor, piece: int, group: int) -> Iterator[tuple[int, Tensor]]:
        """The chunks of a part, and where their encodings stand in its message."""
        start = 0
        for index in self.parts[piece * self.ranks.groups + group]:
            stop = start + self.codec.nbytes(self.chunks[index])
            yield index, message[start:stop]
            start = stop

    def _scatter(self, piece: int, hosted: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """Send every other group the hosted workers' encodings of its part, receive the own one."""

        def messages() -> Iterator[tuple[int, Tensor]]:
            for group in self.others:
                message = self._buffer("send", piece, group, len(hosted))
                for row, tensors in zip(message, hosted, strict=True):
                    for index, slot in self._slots(row, piece, group):
                        chunk = self.chunks[index]
                        self.codec.encode(_cut(tensors, chunk), chunk.block, slot)
                yield group, message

        receives = {
            group: self._buffer(f"from {group}", piece, self.me, len(hosted))
            for group in self.others
        }
        return self._exchange(messages(), receives)

    def _reduce(
        self, piece: int, hosted: Sequence[Sequence[Tensor]], include: Sequence[bool]
    ) -> None:
        """Encode the mean of the own part, summed in worker order."""
        rows: list[Sequence[Tensor] | Tensor] = []  # tensors of a hosted worker, bytes of another
        for group in range(self.ranks.groups):
            if group == self.me:
                rows += hosted
            else:
                rows += self._buffer(f"from {group}", piece, self.me, len(hosted))
        rows = [row for row, counts in zip(rows, include, strict=True) if counts]
        (means,) = self._buffer("mean", piece, self.me)
        start = 0
        for index, slot in self._slots(means, piece, self.me):
            chunk, here = self.chunks[index], slice(start, start + len(slot))
            start = here.stop
            out = self._part[: chunk.stop - chunk.start]
            parts = (
                self.codec.decode(row[here], chunk.block, out)
                if isinstance(row, Tensor)
                else self._recode(index, _cut(row, chunk))
                for row in rows
            )
            self.codec.encode(self._average(parts, len(rows)), chunk.block, slot)

    def _gather(self, piece: int) -> Callable[[], None]:
        """Send the own part's encoded mean to everyone, receive those of the others."""
        own = self._buffer("mean", piece, self.me).to(self.ranks.wire_device)
        receives = {group: self._buffer("mean", piece, group) for group in self.others}
        return self._exchange(((group, own) for group in self.others), receives)

    def _exchange(
        self, sends: Iterable[tuple[int, Tensor]], receives: dict[int, Tensor]
    ) -> Callable[[], None]:
        """One message to and from each other group's rank of the same shard."""
        wire, (S, shard) = self.ranks.wire_device, (self.ranks.ranks_per_worker, self.ranks.shard)
        # Where the wire is on the CPU and the tensors are not, this stages them.
        staged = {
            group: target if target.device == wire else torch.empty_like(target, device=wire)
            for group, target in receives.items()
        }
        finish = self.ranks.exchange(
            ((group * S + shard, message.to(wire)) for group, message in sends),
            {group * S + shard: target for group, target in staged.items()},
        )

        def arrived() -> None:
            finish()
            for group, target in receives.items():
                if staged[group] is not target:
                    target.copy_(staged[group])

        return arrived


def _cut(tensors: Sequence[Tensor], chunk: Chunk) -> Tensor:
    return tensors[chunk.tensor][chunk.start : chunk.stop]


def _stack(scalars: list[Tensor]) -> Tensor:
    return torch.stack(scalars) if scalars else torch.zeros(0)  # a shard may hold nothing


# ---------------------------------------------------------------- workers

RECORD = 5  # loss sum, targets, tokens, gradient norm, learning rate: of one local step


def _local(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's elements of a parameter or gradient, flat: all of it, or its FSDP2 shard."""
    return _local(parameter).view(-1)


def nesterov(
    theta: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    retention: float,
    step: float,
    scratch: Tensor,
) -> Tensor:
    """Corrected Nesterov outer step, in place on theta and momentum.

        m <- mu_t m + g;   theta <- theta - alpha_0 kappa_t (g + mu_t m)                D.1, B.4

    The order of operations is torch.optim.SGD's, so that the two agree bit for bit.

    Args:
        theta: (n,) fp32, shared parameters; changed in place.
        momentum: (n,) fp32, m; changed in place and never rescaled (B.4).
        gradient: (n,) fp32, g, the (normalised) mean pseudo-gradient.
        retention: mu_t, in [0, 1).
        step: alpha_0 kappa_t.
        scratch: (n,) fp32; written.
    Returns:
        g + mu_t m, in scratch.
    """
    momentum.mul_(retention).add_(gradient)
    torch.add(gradient, momentum, alpha=retention, out=scratch)
    theta.add_(scratch, alpha=-step)  # fused, and rounds differently from mul then add
    return scratch


@dataclass(frozen=True)
class Statistics:
    """What one synchronisation measured, the same on every rank.

    Args:
        drift: D_t (C.1); NaN if a worker was not finite.
        coherence: C_t.
        update_norm: norm of the change of the shared parameters.
        records: (K, H_t, 5) float64 on the CPU: loss sum, targets, tokens, gradient norm and
            learning rate of each local step.
        excluded: workers left out because their pseudo-gradient was not finite.
    """

    drift: float
    coherence: float
    update_norm: float
    records: Tensor
    excluded: tuple[int, ...]


class Workers:
    """What local-update and data-parallel workers share: gradients of a batch, and the records of
    an interval.

    Args:
        model: maps (inputs, targets) to the summed loss.
        optimizer: the inner optimizer over the model's parameters.
        ranks: the launch.
        codec: of what travels.
        clip: largest gradient norm; 0 does not clip.
        micro_batch: rows of a forward pass; 0 takes the whole batch.
        autocast: bfloat16 for mixed precision, None for fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        codec: Codec,
        *,
        clip: float = 1.0,
        micro_batch: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.clip, self.micro_batch, self.autocast = clip or math.inf, micro_batch, autocast
        self.shared: list[Tensor] = []
        self.names = [name.removeprefix("_orig_mod.") for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        self.wire = Wire(ranks, codec, [local_tensor(p).numel() for p in self.parameters])
        self.done = [0] * len(ranks.hosted)  # steps of this interval, by hosted worker
        self.records = torch.zeros(len(ranks.hosted), 0, RECORD, dtype=torch.float64)

    @property
    def party(self) -> range:
        """The ranks that meet before every step, since collectives run inside it."""
        return self.ranks.shards

    def begin(self, steps: int) -> None:
        """Start an interval of `steps` local steps."""
        size = (len(self.ranks.hosted), steps, RECORD)
        self.records = torch.zeros(size, dtype=torch.float64, device=self.ranks.device)
        self.done = [0] * len(self.ranks.hosted)

    def set_lr(self, lr: float) -> None:
        """Inner learning rate of the next step, the same on all workers."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, batch: Batch) -> tuple[Tensor, int, int]:
        """Accumulate the gradient of the token-averaged loss of one worker's batch.

        Micro-batches are weighted by their targets: every one is divided by the targets of the
        whole batch.

        Args:
            batch: the worker's batch; under sharding each rank takes every S-th row of it.
        Returns:
            Loss sum, targets and non-padding tokens of the rows that this rank computed.
        """
        shards, shard, device = self.ranks.ranks_per_worker, self.ranks.shard, self.ranks.device
        total = max(1, int((batch.targets != IGNORE).sum()))
        inputs, targets = batch.inputs[shard::shards], batch.targets[shard::shards]
        if len(inputs) < math.ceil(len(batch.inputs) / shards):
            # ALL RANKS of a worker: as many micro-batches here, or FSDP2's collectives hang. A rank
            # with a row less, or none, fills up with one in which nothing counts.
            inputs = torch.cat([inputs, batch.inputs[:1]])
            targets = torch.cat([targets, torch.full_like(batch.targets[:1], IGNORE)])
        rows = self.micro_batch or max(1, len(inputs))
        loss_sum = torch.zeros((), device=device)
        for start in range(0, len(inputs), rows):
            part = slice(start, start + rows)
            x, y = (t[part].to(device, non_blocking=True) for t in (inputs, targets))
            with self._precision():
                loss = self.model(x, y)
            # FSDP2 adds the shards' gradients up (its divide factor is set to 1).
            (loss / total).backward()
            loss_sum += loss.detach()
        own = int((targets != IGNORE).sum())
        return loss_sum, own, batch.tokens if shard == 0 else 0

    def _precision(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.autocast)

    def _clip(self) -> Tensor:
        """Clip the gradients' norm in place; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor under FSDP2

    def _record(self, row: int, loss: Tensor, targets: int, tokens: int, norm: Tensor) -> None:
        record = self.records[row, self.done[row]]
        record[0], record[1], record[2] = loss, targets, tokens
        if self.ranks.shard == 0:
            record[3], record[4] = norm, self.optimizer.param_groups[0]["lr"]
        self.done[row] += 1

    def _collect(self, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Travel with the interval's scalars: one vector a rank, summed over the shards of each
        worker.

        Args:
            extra: (hosted, n) float64, more scalars of each hosted worker.
        Returns:
            records (K, H, 5) and extra (K, n), the same on all ranks.
        """
        hosted, steps = len(self.ranks.hosted), self.records.shape[1]
        vector = torch.cat([extra.cpu(), self.records.cpu().view(hosted, -1)], dim=1)
        rows = self.ranks.gather(vector.view(-1))
        by_worker = rows.view(self.ranks.groups, self.ranks.ranks_per_worker, hosted, -1).sum(1)
        by_worker = by_worker.view(self.ranks.workers, -1)
        extra, records = by_worker.split([extra.shape[1], steps * RECORD], dim=1)
        return records.view(self.ranks.workers, steps, RECORD), extra

    def step(self, row: int, batch: Batch) -> None:
        """One inner step of a hosted worker on its own batch."""
        raise NotImplementedError

    def synchronise(self, plan: autoloco.Plan) -> Statistics:
        """End an interval: the same shared parameters and the same statistics on every rank."""
        raise NotImplementedError

    def shared_state(self) -> dict[str, Tensor]:
        """What all workers share, by name, for a checkpoint."""
        raise NotImplementedError

    def worker_state(self, row: int) -> dict[str, Tensor]:
        """What belongs to one hosted worker, by name; its records of this interval among it."""
        steps = torch.tensor(self.done[row])
        return {"records": self.records[row].cpu(), "done": steps}

    def load_shared(self, saved: dict[str, Tensor]) -> None:
        """Inverse of `shared_state`."""
        raise NotImplementedError

    def load_worker(self, row: int, saved: dict[str, Tensor]) -> None:
        """Inverse of `worker_state`."""
        if self.records.shape[1] != len(saved["records"]):
            self.begin(len(saved["records"]))
        self.records[row], self.done[row] = saved["records"], int(saved["done"])

    def _optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's tensors of the worker that is switched in, as `KEY.NAME`."""
        return {
            f"{key}.{name}": _local(value)
            for name, parameter in zip(self.names, self.parameters, strict=True)
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def _load_optimizer_state(self, saved: dict[str, Tensor]) -> None:
        self.optimizer.state.clear()
        parameters = dict(zip(self.names, self.parameters, strict=True))
        for full, value in saved.items():
            key, _, name = full.partition(".")
            if name in parameters and key not in ("shared", "momentum", "local"):
                parameter = parameters[name]
                like = torch.zeros_like(parameter) if value.dim() else torch.zeros(())
                like = like.to(parameter.device).detach()
                _local(like).copy_(value)
                self.optimizer.state[parameter][key] = like


class Replica:
    """One local-update worker of this rank: its parameters and its AdamW state, nothing else."""

    def __init__(self, tensors: list[Tensor], state: Any) -> None:
        self.tensors, self.state = tensors, state
        self.flat = [local_tensor(tensor) for tensor in tensors]


class LocalUpdate(Workers):
    """DiLoCo and AutoLoCo: workers that train apart and synchronise through pseudo-gradients (D.1,
    B.5).

    Args:
        outer_lr: alpha_0.
        **kwargs: see `Workers`.
    """

    def __init__(self, *args: Any, outer_lr: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outer_lr = outer_lr
        own = Replica([p.data for p in self.parameters], self.optimizer.state)
        self.replicas = [own]
        for _ in self.ranks.hosted[1:]:
            state: Any = defaultdict(dict)
            self.replicas.append(Replica([t.clone() for t in own.tensors], state))
        self.shared = [tensor.clone() for tensor in own.flat]
        self.momentum = [torch.zeros_like(tensor) for tensor in own.flat]
        size = max((chunk.stop - chunk.start for chunk in self.wire.chunks), default=0)
        self._scratch = torch.empty(size, device=self.ranks.device)

    def shared_state(self) -> dict[str, Tensor]:
        """Shared parameters and outer momentum."""
        state: dict[str, Tensor] = {}
        for name, like, theta, m in zip(
            self.names, self.replicas[0].tensors, self.shared, self.momentum, strict=True
        ):
            shape = _local(like).shape
            state |= {f"shared.{name}": theta.view(shape), f"momentum.{name}": m.view(shape)}
        return state

    def load_shared(self, saved: dict[str, Tensor]) -> None:
        """Inverse of `shared_state`; every replica starts from the shared parameters."""
        for i, name in enumerate(self.names):
            self.shared[i].copy_(saved[f"shared.{name}"].view(-1))
            self.momentum[i].copy_(saved[f"momentum.{name}"].view(-1))
            for replica in self.replicas:
                replica.flat[i].copy_(self.shared[i])

    def worker_state(self, row: int) -> dict[str, Tensor]:
        """AdamW state and records; inside an interval the worker's own parameters too."""
        self.switch(row)
        state = super().worker_state(row) | self._optimizer_state()
        if self.done[row]:
            flat = self.replicas[row].flat
            state |= {f"local.{name}": t for name, t in zip(self.names, flat, strict=True)}
        return state

    def load_worker(self, row: int, saved: dict[str, Tensor]) -> None:
        """Inverse of `worker_state`."""
        super().load_worker(row, saved)
        self.switch(row)
        self._load_optimizer_state(saved)
        if self.done[row]:
            for name, tensor in zip(self.names, self.replicas[row].flat, strict=True):
                tensor.copy_(saved[f"local.{name}"])

    def switch(self, row: int) -> None:
        """Put a hosted worker's parameters and AdamW state (A2) into module and optimizer."""
        if len(self.replicas) > 1:
            replica = self.replicas[row]
            for parameter, tensor in zip(self.parameters, replica.tensors, strict=True):
                parameter.data = tensor
            self.optimizer.state = replica.state

    def step(self, row: int, batch: Batch) -> None:
        """One AdamW step of a hosted worker on its own batch. No communication."""
        self.switch(row)
        self.optimizer.zero_grad(set_to_none=True)
        loss, targets, tokens = self.backward(batch)
        norm = self._clip()
        self.optimizer.step()
        self._record(row, loss, targets, tokens, norm)

    def synchronise(self, plan: autoloco.Plan) -> Statistics:
        """Average the pseudo-gradients, take the corrected Nesterov step, give every worker the
        same parameters.

            D_t = 1/K sum_k ||Delta_k||^2,   C_t = ||mean_k Delta_k||^2 / D_t           C.1, A1

        Two passes over memory: Delta_k over the dead local weights with its norm; then mean,
        momentum, theta and write-back, chunk by chunk in the cache. D is of the local deltas before
        the codec, C's numerator of the mean as decoded (G.1). A worker whose Delta is not finite is
        left out, and starts again from the shared parameters with a fresh AdamW state.

        Args:
            plan: divisor, momentum and scale of this interval.
        Returns:
            The interval's statistics, equal on all ranks.
        """
        squares = torch.stack([self._displace(replica.flat) for replica in self.replicas])
        records, norms = self._collect(squares[:, None])
        include = norms[:, 0].isfinite().tolist()
        excluded = tuple(worker for worker, finite in enumerate(include) if not finite)
        for row, worker in enumerate(self.ranks.hosted):
            if worker in excluded:
                self.replicas[row].state.clear()
        mean_square, update_square = self._outer_step(plan, include)
        drift = float(norms.sum()) / self.ranks.workers
        coherence = mean_square / drift if drift > 0 else math.nan
        return Statistics(drift, coherence, math.sqrt(update_square), records, excluded)

    def _displace(self, local: list[Tensor]) -> Tensor:
        """Write Delta_k = theta - theta_k over theta_k; returns ||Delta_k||^2.

        fp32 dots of cache-sized chunks, float64 across chunks: float64 over whole tensors costs 4
        to 14 times a dot.
        """
        squares = []
        for chunk in self.wire.chunks:
            delta = _cut(local, chunk)
            torch.sub(_cut(self.shared, chunk), delta, out=delta)
            squares.append(torch.dot(delta, delta))
        return _stack(squares).double().sum()

    def _outer_step(self, plan: autoloco.Plan, include: Sequence[bool]) -> tuple[float, float]:
        """Second pass; returns the squared norms of the decoded mean and of the update."""
        if not any(include):  # nothing to learn from: the interval is discarded
            for replica in self.replicas:
                for local, theta in zip(replica.flat, self.shared, strict=True):
                    local.copy_(theta)
            return math.nan, 0.0
        step = self.outer_lr * plan.step_scale
        means, updates = [], []
        deltas = [replica.flat for replica in self.replicas]
        for chunk, mean in self.wire.mean(deltas, include):
            means.append(torch.dot(mean, mean))
            if plan.divisor != 1.0:
                mean = mean.div_(plan.divisor)
            theta = _cut(self.shared, chunk)
            scratch = self._scratch[: mean.numel()]
            nesterov(theta, _cut(self.momentum, chunk), mean, plan.momentum, step, scratch)
            updates.append(torch.dot(scratch, scratch))
            for replica in self.replicas:
                _cut(replica.flat, chunk).copy_(theta)
        sums = torch.stack([_stack(means), _stack(updates)]).double().sum(1).cpu()
        if self.ranks.ranks_per_worker > 1:
            sums = self.ranks.gather(sums)[: self.ranks.ranks_per_worker].sum(0)
        mean_square, update_square = sums.tolist()
        return mean_square, update_square * step * step


class DataParallel(Workers):
    """The DDP baseline (E.2): one model per rank, gradients averaged every step, equal weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = [local_tensor(p) for p in self.parameters]
        self._pending: list[tuple[Tensor, int, int]] = []
        self._gradients: list[list[Tensor]] = []

    @property
    def party(self) -> range:
        """All ranks: they average gradients at every step."""
        return self.ranks.everyone

    def shared_state(self) -> dict[str, Tensor]:
        """Parameters and the one AdamW state."""
        state = {f"shared.{n}": _local(p) for n, p in zip(self.names, self.parameters, strict=True)}
        return state | self._optimizer_state()

    def load_shared(self, saved: dict[str, Tensor]) -> None:
        """Inverse of `shared_state`."""
        for name, tensor in zip(self.names, self.shared, strict=True):
            tensor.copy_(saved[f"shared.{name}"].view(-1))
        self._load_optimizer_state(saved)

    def step(self, row: int, batch: Batch) -> None:
        """Gradient of one hosted worker; after the last one, average, clip and step."""
        self.optimizer.zero_grad(set_to_none=True)
        self._pending.append(self.backward(batch))
        self._gradients.append([p.grad for p in self.parameters if p.grad is not None])
        assert len(self._gradients[-1]) == len(self.parameters), "a parameter without a gradient"
        if row < len(self.ranks.hosted) - 1:
            return
        everyone = [True] * self.ranks.workers
        hosted = [[local_tensor(g) for g in gradient] for gradient in self._gradients]
        for chunk, mean in self.wire.mean(hosted, everyone):
            _cut(hosted[-1], chunk).copy_(mean)
        norm = self._clip()
        if norm.isfinite():  # the same on all ranks: they hold the same mean
            self.optimizer.step()
        for index, (loss, targets, tokens) in enumerate(self._pending):
            self._record(index, loss, targets, tokens, norm)
        self._pending, self._gradients = [], []

    def synchronise(self, plan: autoloco.Plan) -> Statistics:
        """Collect the interval's records. The workers never part: drift 0, coherence 1. A step
        whose gradient was not finite was skipped, and counts against all of them.
        """
        records, _ = self._collect(torch.zeros(len(self.ranks.hosted), 0, dtype=torch.float64))
        finite = records.isfinite().all(2).all(1).tolist()
        return Statistics(0.0, 1.0, 0.0, records, tuple(k for k, ok in enumerate(finite) if not ok))


def checksum(tensors: Iterable[Tensor]) -> int:
    """Order-independent sum of the bits of fp32 tensors, modulo 2^64: equal weights have equal
    sums.

    Args:
        tensors: 1-D fp32.
    Returns:
        A signed 64-bit integer.
    """
    total = 0
    for tensor in tensors:
        pairs = tensor.numel() // 2 * 2
        total += int(tensor[:pairs].view(torch.int64).sum())
        total += int(tensor[pairs:].view(torch.int32).sum())
    return (total + 2**63) % 2**64 - 2**63


def agree(ranks: Ranks, values: dict[str, int]) -> None:
    """Compare checksums over the ranks that must hold the same; ranks of different shards are not
    compared.

    Args:
        ranks: the launch.
        values: name -> 64-bit integer.
    Raises:
        Failure: naming the value and the ranks that differ from the first.
    """
    rows = ranks.gather(torch.tensor(list(values.values()), dtype=torch.int64))
    for shard in range(ranks.ranks_per_worker):
        group = rows[shard :: ranks.ranks_per_worker]
        for column, name in enumerate(values):
            differ = (group[:, column] != group[0, column]).nonzero().flatten().tolist()
            if differ:
                which = ", ".join(str(g * ranks.ranks_per_worker + shard) for g in differ)
                raise Failure(f"{name}: rank {which} differs from rank {shard}")
