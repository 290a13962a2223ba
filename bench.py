"""Speed, memory and bytes against the machine's limits and against plain versions.

    python bench.py sync|codec|wire|step|workers|memory|link [--quick]
    python bench.py bytes                  # what travels, for every model and recipe; no timing

Each command prints one table. A row has the limit that was measured in the same run, a plain
version, ours, and a ratio: its smallest, median and largest value over alternating pairs, so that a
busy machine disturbs both sides alike. Exit code 1 where the median misses its target, 2 for a
command line that means nothing. On a GPU the same commands time with events, and print MFU and
memory bandwidth.

The plain versions are written for this comparison, short and in the manner of what they are named
after: none is somebody else's code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autoloco
import diloco
import quant
import train
from data import Batch
from model import SIZES, ModelConfig, Transformer, parameter_shapes

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
MB, GB = 1e6, 1e9


# ---------------------------------------------------------------- rows, timing, processes


@dataclass
class Row:
    """One line of a table.

    Args:
        what: what is compared.
        unit: of limit, plain and ours.
        limit: what the machine allows, measured in the same run; NaN where there is none.
        plain: the plain version; NaN where there is none.
        ours: this code.
        meaning: which ratio is shown, such as `ours / limit`.
        ratios: of every alternating pair.
        target: `<= 1.8`, `>= 1.5`, or empty.
    """

    what: str
    unit: str
    limit: float
    plain: float
    ours: float
    meaning: str
    ratios: Sequence[float]
    target: str = ""

    @property
    def met(self) -> bool:
        """Whether the median ratio keeps the target; true where there is none."""
        if not self.target:
            return True
        sign, bound = self.target.split()
        middle = statistics.median(self.ratios)
        return middle <= float(bound) if sign == "<=" else middle >= float(bound)


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""

    def number(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

    lines = [
        "| what | unit | limit | plain | ours | ratio | min | median | max | target | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        middle = statistics.median(row.ratios)
        cells = [row.what, row.unit, *map(number, (row.limit, row.plain, row.ours)), row.meaning]
        cells += map(number, (min(row.ratios), middle, max(row.ratios)))
        cells += [row.target or "-", ("met" if row.met else "MISSED") if row.target else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def wall(function: Callable[[], Any]) -> float:
    """Wall-clock time of one call; on a GPU between two events on its stream."""
    if not GPU:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    function()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def seconds(function: Callable[[], Any]) -> float:
    """Time of one call that waits for nobody: with a single CPU thread its CPU time, which does
    not count when a neighbour has the core, else `wall`.
    """
    if GPU or torch.get_num_threads() > 1:
        return wall(function)
    began = time.process_time()
    function()
    return time.process_time() - began


def alternate(
    functions: Sequence[Callable[[], Any]],
    pairs: int,
    between: Callable[[], Any] = lambda: None,
    clock: Callable[[Callable[[], Any]], float] = seconds,
) -> list[list[float]]:
    """Times of several functions that take turns, after one warm-up call of each.

    Args:
        functions: what to time; the order is reversed in every other round.
        pairs: rounds.
        between: run before every call, not timed.
        clock: `seconds`, or another way to take the time.
    Returns:
        For each function its times, in the order of the rounds.
    """
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(-1, pairs):
        order = list(range(len(functions)))
        for index in order[::-1] if turn % 2 else order:
            between()
            taken = clock(functions[index])
            if turn >= 0:
                times[index].append(taken)
    return times


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Ratio of each pair."""
    return [a / b for a, b in zip(above, below, strict=True)]


def middle(values: Sequence[float], scale: float = 1.0) -> float:
    """Median, times a scale for the unit."""
    return statistics.median(values) * scale


@contextmanager
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are appended here do not outlive the block, whatever ends it."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def launch(
    task: str,
    options: dict[str, Any],
    world: int = 1,
    hosts: Sequence[tuple[str, str]] = (),
    timeout: float = 600.0,
) -> list[dict[str, Any]]:
    """Run `TASKS[task](**options)` in fresh processes, one a rank, with one thread each.

    Args:
        task: key of TASKS.
        options: its arguments.
        world: number of ranks.
        hosts: (network namespace, address) of each rank; by default all on loopback.
        timeout: seconds; then they are killed.
    Returns:
        What each rank returned.
    Raises:
        RuntimeError: a rank failed; with the end of its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "rank", task, json.dumps(options)]
    deadline = time.monotonic() + timeout
    with children() as ranks:
        for rank in range(world):
            names = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world)
            own = os.environ | {name: str(value) for name, value in names.items()}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            prefix: list[str] = []
            if hosts:
                own |= {"MASTER_ADDR": hosts[0][1], "GLOO_SOCKET_IFNAME": "bench0"}
                prefix = ["ip", "netns", "exec", hosts[rank][0]]
            ranks.append(
                subprocess.Popen(
                    prefix + command,
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        results = []
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            if process.returncode:
                raise RuntimeError(f"{task}: rank {rank} failed:\n{output[-2000:]}")
            results.append(json.loads(output.rsplit("RESULT ", 1)[1]))
    return results


def peak_memory(function: Callable[[], Any]) -> int:
    """Largest resident memory of this process while `function` runs, bytes (GPU: allocated)."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    function()
    return memory_now("VmHWM")


def memory_now(name: str = "VmRSS") -> int:
    """Resident memory of this process, bytes (GPU: allocated)."""
    if GPU:
        return torch.cuda.memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def numels_of(size: str) -> list[int]:
    """Elements of each parameter of a model by name."""
    return [shape.numel() for shape in parameter_shapes(SIZES[size]).values()]


# ---------------------------------------------------------------- synchronisation


class Parameters(nn.Module):
    """Parameters without a model: random numbers of the given sizes."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        for index, numel in enumerate(numels):
            values = torch.randn(numel, device=DEVICE).mul_(0.02)
            self.register_parameter(f"p{index}", nn.Parameter(values))


def workers_on(
    network: nn.Module, ranks: diloco.Ranks | None = None, codec: str = "fp32", **options: Any
) -> diloco.LocalUpdate:
    """The workers of train.py around any module; alone by default."""
    groups = [{"params": list(network.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    ranks = ranks or diloco.Ranks(0, 1, 1, device=DEVICE)
    options = {"outer_lr": 0.7} | options
    return diloco.LocalUpdate(network, optimizer, ranks, quant.CODECS[codec], **options)


def first_plan() -> autoloco.Plan:
    """The plan of an interval of the C4 recipe at the base horizon."""
    rules = train.Config(**train.RECIPES["c4-215m"]).rules
    return autoloco.plan(rules, autoloco.start(rules))


def plain_synchronise(
    local: Sequence[Tensor], shared: Sequence[Tensor], outer: torch.optim.Optimizer
) -> None:
    """Plain: one parameter after the other, in the manner of OpenDiLoCo, without statistics.

    A fresh pseudo-gradient, torch's own SGD with Nesterov momentum, a fresh copy of the result.
    """
    for theta_k, theta in zip(local, shared, strict=True):
        theta.grad = theta - theta_k
    outer.step()
    outer.zero_grad()
    for theta_k, theta in zip(local, shared, strict=True):
        theta_k.copy_(theta.clone())


def plain_outer(workers: diloco.LocalUpdate) -> torch.optim.Optimizer:
    """torch's SGD on the workers' own shared parameters and momentum, with the C4 recipe's plan."""
    plan = first_plan()
    rate = workers.outer_lr * plan.step_scale
    outer = torch.optim.SGD(workers.shared, rate, plan.momentum, nesterov=True, foreach=False)
    for theta, momentum in zip(workers.shared, workers.momentum, strict=True):
        outer.state[theta]["momentum_buffer"] = momentum
    return outer


def traffic(local: Sequence[Tensor], shared: Sequence[Tensor], momentum: Sequence[Tensor]) -> None:
    """Limit: the 5 reads and 4 writes of the parameters that a synchronisation cannot avoid.

    Reads theta, theta_k, then Delta, m, theta; writes Delta, m, theta, theta_k. Each sweep covers
    all parameters, so that none finds its input in the cache.
    """
    for delta, theta in zip(local, shared, strict=True):
        torch.sub(theta, delta, out=delta)  # 2 reads, 1 write
    for m, delta in zip(momentum, local, strict=True):
        m.add_(delta)  # 2 reads, 1 write
    for theta in shared:
        theta.mul_(1.0)  # 1 read, 1 write
    for theta_k in local:
        theta_k.fill_(0.01)  # 1 write


def bench_sync(quick: bool) -> list[Row]:
    """Synchronisation at 215M in fp32 with statistics, without communication."""
    pairs = 3 if quick else 11
    numels = numels_of("215m")
    workers, plan = workers_on(Parameters(numels)), first_plan()
    local, shared, momentum = workers.replicas[0].flat, workers.shared, workers.momentum
    outer = plain_outer(workers)

    def move() -> None:  # a pseudo-gradient that is not zero
        for theta_k, theta in zip(local, shared, strict=True):
            torch.mul(theta, 0.999, out=theta_k)

    def ours() -> None:
        workers.begin(0)
        workers.synchronise(plan)

    limit, loop, fast = alternate(
        (
            lambda: traffic(local, shared, momentum),
            lambda: plain_synchronise(local, shared, outer),
            ours,
        ),
        pairs,
        move,
    )
    values = (middle(limit), middle(loop), middle(fast))
    gbps = 9 * 4 * sum(numels) / middle(limit) / GB
    print(f"memory traffic at the limit: {gbps:.0f} GB/s (5 reads and 4 writes of {sum(numels):,})")
    what = "synchronisation, 215M, fp32, with statistics"
    return [
        Row(what, "s", *values, "ours / limit", ratios(fast, limit), "<= 1.8"),
        Row(what, "s", *values, "plain / ours", ratios(loop, fast), ">= 1.5"),
        control_row(local, shared, pairs),
    ]


def control_row(local: Sequence[Tensor], shared: Sequence[Tensor], pairs: int) -> Row:
    """Controller, mapper and statistics against an interval of 500 steps.

    The interval is taken as short as it can be: one sequence of 1,024 a step at the rate of the
    machine's large matrix products. The recipe has 128 sequences. The statistics are the three
    norms of a synchronisation (D, C and the update), here with the reads from memory that the real
    ones share with the update.
    """
    rules = train.Config(**train.RECIPES["c4-215m"]).rules
    state = autoloco.start(rules)
    chunks = quant.chunks([tensor.numel() for tensor in local])

    def control() -> None:
        planned = autoloco.plan(rules, state)
        observation = autoloco.Observation(1.0, 0.5, planned.base_exposure, 10**6)
        autoloco.complete(rules, state, planned, observation)
        sums = []
        for tensors in (local, shared, local):
            for chunk in chunks:
                part = tensors[chunk.tensor][chunk.start : chunk.stop]
                sums.append(torch.dot(part, part))
        torch.stack(sums).double().sum().item()

    count = sum(tensor.numel() for tensor in local)
    product = Product(torch.float32)
    controls, products = alternate((control, product), pairs)
    interval = [500 * 6 * count * 1024 / (product.flops / taken) for taken in products]
    percent = [100 * c / i for c, i in zip(controls, interval, strict=True)]
    what = "controller, mapper, statistics / interval of 500 steps, 215M"
    nan = math.nan
    return Row(what, "s", middle(interval), nan, middle(controls), "%", percent, "<= 0.3")


# ---------------------------------------------------------------- codecs


def plain_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain: G's formula, one fresh tensor an operation; (q, scale) of blocks of 4,096."""
    rows = x.view(-1, quant.BLOCK)
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().clamp(-127, 127).to(torch.int8), scale


def bench_codec(quick: bool) -> list[Row]:
    """Encode and decode against a copy of the tensor; error on Gaussian data."""
    numel = (1 << 24) if quick else (1 << 27)
    if GPU:
        numel = 1 << 28
    pairs = 7 if quick else 15
    source = torch.randn(numel, device=DEVICE)
    target = torch.empty_like(source)
    slab = quant.GPU_SLAB if GPU else quant.SLAB
    cut = quant.chunks([numel], slab)
    rows = []
    for codec in quant.CODECS.values():
        ends = [0]
        for chunk in cut:
            ends.append(ends[-1] + codec.nbytes(chunk))
        message = torch.empty(ends[-1], dtype=torch.uint8, device=DEVICE)

        def through(
            step: Callable[..., Any],
            tensor: Tensor,
            encodes: bool,
            message: Tensor = message,
            ends: list[int] = ends,
        ) -> None:
            for index, chunk in enumerate(cut):
                part = tensor[chunk.start : chunk.stop]
                encoded = message[ends[index] : ends[index + 1]]
                if encodes:
                    step(part, chunk.block, encoded)
                else:
                    step(encoded, chunk.block, part)

        functions: list[Callable[[], Any]] = [
            partial(target.copy_, source),
            partial(through, codec.encode, source, True),
            partial(through, codec.decode, target, False),
        ]
        if int8 := codec.name == "int8":
            q, scale = plain_int8(source)
            functions += [partial(plain_int8, source), partial(torch.mul, q, scale)]
        copy, encode, decode, *plain = alternate(functions, pairs)
        encode_plain, decode_plain = plain or [[math.nan], [math.nan]]
        for way, times, slow, bound in (
            ("encode", encode, encode_plain, "<= 2.5"),
            ("decode", decode, decode_plain, "<= 1.1"),
        ):
            values = (middle(copy, 1e3), middle(slow, 1e3), middle(times, 1e3))
            what = f"{codec.name} {way}, {numel / 2**20:.0f} Mi elements"
            against = ratios(times, copy)
            rows.append(Row(what, "ms", *values, "ours / copy", against, bound if int8 else ""))
        if int8:
            error = (target - source).norm() / source.norm()
            mean = torch.zeros_like(source)  # of 8 workers, then encoded once more
            exact = torch.zeros_like(source)
            for worker in range(8):
                own = torch.randn(
                    numel, generator=torch.Generator(DEVICE).manual_seed(worker), device=DEVICE
                )
                exact += own
                through(codec.encode, own, True)
                through(codec.decode, target, False)
                mean += target
            through(codec.encode, mean, True)
            through(codec.decode, target, False)
            both = (target - exact).norm() / exact.norm()
            for what, value, bound in (("one encode", error, "<= 0.9"), ("both", both, "<= 1.3")):
                name = f"int8 relative L2 error, Gaussian, after {what}"
                percent = 100 * float(value)
                rows.append(Row(name, "%", math.nan, math.nan, percent, "%", [percent], bound))
    gbps = 8 * numel / middle(copy) / GB
    print(f"copy: {gbps:.0f} GB/s")
    return rows


# ---------------------------------------------------------------- the wire


def interface_bytes() -> int:
    """Bytes that the kernel counted as sent on this namespace's interface."""
    return int(Path("/sys/class/net/bench0/statistics/tx_bytes").read_text())


def task_wire(numel: int, pairs: int, counted: bool) -> dict[str, Any]:
    """One rank: an fp32 all-reduce and `Wire.mean` in every codec take turns."""
    world = int(os.environ["WORLD_SIZE"])
    ranks, _ = diloco.connect(world, 1, 5.0)
    delta = torch.randn(numel, device=DEVICE)
    dist.all_reduce(torch.zeros(1, device=DEVICE))  # connect everyone

    def all_reduce() -> None:
        """Plain: the mean as a framework's all-reduce gives it."""
        dist.all_reduce(delta)
        delta.div_(world)

    def mean(wire: diloco.Wire) -> Callable[[], None]:
        def through() -> None:
            for chunk, part in wire.mean([[delta]], [True] * world):
                delta[chunk.start : chunk.stop].copy_(part)

        return through

    def together(function: Callable[[], Any]) -> float:
        dist.barrier()
        return float(ranks.gather(torch.tensor([wall(function)]).double()).max())

    wires = {name: diloco.Wire(ranks, codec, [numel]) for name, codec in quant.CODECS.items()}
    functions = {"all_reduce": all_reduce} | {name: mean(wire) for name, wire in wires.items()}
    times = alternate(list(functions.values()), pairs, clock=together)
    result: dict[str, Any] = {"times": dict(zip(functions, times, strict=True))}
    for name in wires if counted else ():
        dist.barrier()
        kernel, sent = interface_bytes(), ranks.bytes_sent
        functions[name]()
        time.sleep(0.5)  # what a rank has written may still wait in its socket
        dist.barrier()
        result[name] = [interface_bytes() - kernel, ranks.bytes_sent - sent]
    diloco.disconnect()
    return result


@contextmanager
def shaped_hosts(count: int, mbit: float, delay_ms: float = 0.0) -> Iterator[list[tuple[str, str]]]:
    """Network namespaces on one bridge, each with a link of `mbit` Mbit/s in both directions.

    Nothing outside the namespaces is touched, and they go when the block ends.

    Args:
        count: how many.
        mbit: rate of each link; infinite for a link as it is.
        delay_ms: of each message on its way, ms.
    Yields:
        (namespace, address) of each.
    Raises:
        subprocess.CalledProcessError: the kernel has no netem, which a delay needs.
    """
    switch = f"bench-{os.getpid()}"
    hosts = [(f"{switch}-{i}", f"10.77.0.{i + 1}") for i in range(count)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def queue(where: str, link: str, *words: str) -> None:
        command = ["tc", "-n", where, "qdisc", "add", "dev", link, *words]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def shape(where: str, link: str, delay: float) -> None:
        if math.isfinite(mbit):
            limit = ["rate", f"{mbit}mbit", "burst", "128kb", "limit", "4mb"]
            queue(where, link, "root", "handle", "1:", "tbf", *limit)
        if delay:
            parent = ["parent", "1:1"] if math.isfinite(mbit) else ["root"]
            queue(where, link, *parent, "netem", "delay", f"{delay}ms", "limit", "100000")

    made: list[str] = []
    try:
        for name in (switch, *(name for name, _ in hosts)):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for index, (name, address) in enumerate(hosts):
            port = f"port{index}"
            peer = ["peer", "name", "bench0", "netns", name]
            ip("-n", switch, "link", "add", port, "type", "veth", *peer)
            ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "bench0")
            ip("-n", name, "link", "set", "bench0", "up")
            shape(switch, port, 0.0)
            shape(name, "bench0", delay_ms)
        yield hosts
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def cannot_shape() -> str:
    """Why no shaped link can be made here; empty if one can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"{' and '.join(missing)} missing: install iproute2" if missing else ""


def bench_wire(quick: bool) -> list[Row]:
    """The mean of 4 ranks against an fp32 all-reduce: loopback, then links of 1 Gbit/s."""
    large = (1 << 23) if quick else sum(numels_of("215m"))
    rows = []
    (first, *_) = launch("wire", dict(numel=large, pairs=5, counted=False), world=4)
    times = first["times"]
    for name in quant.CODECS:
        what = f"loopback, 4 ranks, {large / 1e6:.0f}M elements, {name}"
        values = (math.nan, middle(times["all_reduce"]), middle(times[name]))
        bound = ">= 1.2" if name == "int8" else ""
        pairs = ratios(times["all_reduce"], times[name])
        rows.append(Row(what, "s", *values, "all-reduce / ours", pairs, bound))
    if reason := cannot_shape():
        print(table(rows))
        raise RuntimeError(f"stopped before the link of 1 Gbit/s: {reason}")
    numel = 4_000_000 if quick else 10_000_000
    with shaped_hosts(4, 1000) as hosts:
        ranks = launch("wire", dict(numel=numel, pairs=5, counted=True), 4, hosts)
    times = ranks[0]["times"]
    for name, codec in quant.CODECS.items():
        # Every rank sends 3/4 of its encoding, then its quarter of the mean to 3 others.
        limit = 2 * 3 / 4 * quant.payload_bytes(codec, [numel]) * 8 / 1e9
        values = (limit, middle(times["all_reduce"]), middle(times[name]))
        bound = {"int8": ">= 3.8", "bf16": ">= 1.9"}.get(name, "")
        pairs = ratios(times["all_reduce"], times[name])
        what = f"1 Gbit/s, 4 ranks, {numel / 1e6:.0f}M elements, {name}"
        rows.append(Row(what, "s", *values, "all-reduce / ours", pairs, bound))
    for name in quant.CODECS:
        kernel, sent = (sum(rank[name][i] for rank in ranks) for i in (0, 1))
        apart = 100 * abs(kernel / sent - 1)
        what = f"bytes of one mean, {name}: the kernel's count / ours"
        rows.append(Row(what, "MB", math.nan, kernel / MB, sent / MB, "% apart", [apart], "<= 5.0"))
    return rows


# ---------------------------------------------------------------- whole runs on a slow link


def task_link(folder: str, argv: list[str]) -> dict[str, Any]:
    """One rank of a training run, and the bytes that the kernel counted on its interface."""
    os.chdir(folder)
    before = interface_bytes()
    if code := train.main(argv):
        raise RuntimeError(f"train.py ended with {code}")
    time.sleep(0.5)  # what a rank has written may still wait in its socket
    return {"kernel": interface_bytes() - before}


def can_delay() -> bool:
    """Whether the kernel can delay messages."""
    try:
        with shaped_hosts(1, math.inf, 1.0):
            return True
    except subprocess.CalledProcessError:
        return False


def bench_link(quick: bool) -> list[Row]:
    """Wall-clock time of training on links of 100 Mbit/s, beside payload / rate + delay.

    The communication that is measured is the run's time less that of the same run on links as they
    are. The prediction counts one payload in each direction and one delay a synchronisation.
    """
    if reason := cannot_shape():
        raise RuntimeError(reason)
    mbit, delay_ms, steps = 100.0, 20.0, 60 if quick else 300
    if not can_delay():
        print("this kernel has no netem, so the links have a rate and no delay")
        delay_ms = 0.0
    rows = []
    for method in ("ddp", "autoloco") if quick else ("ddp", "diloco", "autoloco"):
        for wire in ("int8",) if quick else ("fp32", "int8"):
            flags = f"--workers 2 --steps {steps} --method {method} --wire {wire} --overwrite"
            flags += " --name run --checkpoint-every 1000"
            taken: list[float] = []
            kernel = 0
            entries: list[dict[str, Any]] = []
            for rate, delay in ((math.inf, 0.0), (mbit, delay_ms)):
                with shaped_hosts(2, rate, delay) as hosts, tempfile.TemporaryDirectory() as folder:
                    options = dict(folder=folder, argv=flags.split())
                    ranks = launch("link", options, 2, hosts)
                    kernel = sum(rank["kernel"] for rank in ranks)
                    run = Path(folder, "runs/run")
                    _, entries, _ = autoloco.read_log(str(run / "intervals.jsonl"))
                    taken.append(train.read_json(run / "summary.json")["seconds"])
            count = steps if method == "ddp" else len(entries)
            payload, sent = (
                sum(e[f"{name}_bytes"] for e in entries) for name in ("payload", "sent")
            )
            predicted = payload * 8 / (mbit * 1e6) + count * delay_ms / 1e3
            what = f"{method} {wire}, {steps} steps, {count} synchronisations"
            shown = (predicted, taken[0], taken[1] - taken[0])
            ratio = [(taken[1] - taken[0]) / predicted]
            rows.append(Row(f"{what}: communication", "s", *shown, "measured / predicted", ratio))
            # Both ranks send what rank 0 sends, and a little to validate and to meet.
            apart = [100 * abs(kernel / (2 * sent) - 1)]
            shown = (math.nan, kernel / MB, 2 * sent / MB)
            rows.append(Row(f"{what}: the kernel's count / ours", "MB", *shown, "% apart", apart))
    print(
        f"links of {mbit:g} Mbit/s and {delay_ms:g} ms, 2 workers; limit: predicted communication,"
    )
    print("plain: the whole run on links as they are, ours: what the slow link added")
    return rows


# ---------------------------------------------------------------- the local step


class Product:
    """Limit: a large matrix product, timed by calling it.

    Args:
        dtype: of its factors.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        size = 8192 if GPU else 1024
        self.flops = 2 * size**3
        self.a, self.b = torch.randn(2, size, size, device=DEVICE, dtype=dtype)
        self.out = torch.empty_like(self.a)

    def __call__(self) -> None:
        """One product."""
        torch.mm(self.a, self.b, out=self.out)


def step_flops(config: ModelConfig, sequences: int, length: int) -> int:
    """Operations of the matrix products in one step, forward and backward.

    6 per parameter of a matrix (the head among them, the embedding's look-up not) and token, and
    6 T C per layer and token for attention under the causal mask.
    """
    shapes = parameter_shapes(config)
    matrices = sum(shape.numel() for shape in shapes.values() if len(shape) == 2)
    if not config.tied:
        matrices -= shapes["embedding"].numel()
    return sequences * length * 6 * (matrices + config.layers * length * config.width)


class FullLogits(Transformer):
    """Plain: the same model with the logits of all positions at once, as in nanoGPT."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed loss."""
        logits = self.logits(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def random_batch(config: ModelConfig, sequences: int, length: int) -> Batch:
    """Random tokens; every position counts."""
    tokens = torch.randint(config.vocab_size, (sequences, length + 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], sequences * length, ())


def network_of(config: ModelConfig, kind: type[Transformer] = Transformer) -> Transformer:
    """A model with initial weights on the device."""
    with DEVICE:
        network = kind(config)
    network.init_weights(0)
    return network


def stepper(
    network: nn.Module, batch: Batch, kept: bool = True, **options: Any
) -> Callable[[], None]:
    """One local step of one worker, as a run takes it; without `kept` with glibc as it comes."""
    workers = workers_on(network, **options)

    def step() -> None:
        diloco.keep_freed_memory(kept)
        workers.begin(1)
        workers.step(0, batch)

    return step


# GPT-2's vocabulary on the tiny shape and on one twice as wide: the wider the model, the smaller
# the share of the loss in a step, and the less a chunked loss can gain.
LARGE = {
    128: ModelConfig(50_304, 128, 4, 4, 4, 320, tied=True),
    256: ModelConfig(50_304, 256, 4, 4, 4, 704, tied=True),
}
SMALL = ModelConfig(512, 256, 4, 4, 4, 704, tied=True)  # width 256, small vocabulary


def bench_step(quick: bool) -> list[Row]:
    """The local step: large vocabulary against full logits, small one against the products."""
    pairs, sequences, length = 3 if quick else 11, 8, 256
    nan = math.nan
    rows: list[Row] = []
    for width, config in LARGE.items():
        what = f"local step, 50k vocabulary, width {width}, {sequences} x {length}, fp32"
        batch = random_batch(config, sequences, length)
        full_logits = stepper(network_of(config, FullLogits), batch, kept=False)
        plain, ours = alternate([full_logits, stepper(network_of(config), batch)], pairs)
        values = (nan, middle(plain, 1e3), middle(ours, 1e3))
        gain = ratios(plain, ours)
        rows.append(Row(what, "ms", *values, "full logits / ours", gain, ">= 1.4"))
        options = dict(width=width, sequences=sequences, length=length)
        full, lean = (
            launch("step_memory", options | {"full": full})[0]["peak"] for full in (True, False)
        )
        what = f"peak memory, width {width}, parameters and AdamW state included"
        values = (nan, full / MB, lean / MB)
        rows.append(Row(what, "MB", *values, "ours / full logits", [lean / full], "<= 0.45"))
    batch, flops = random_batch(SMALL, 8, length), step_flops(SMALL, 8, length)
    product, narrow = Product(torch.float32), Product(torch.bfloat16)
    single, half, wide, low = alternate(
        (
            stepper(network_of(SMALL), batch),
            stepper(network_of(SMALL), batch, autocast=torch.bfloat16),
            product,
            narrow,
        ),
        2 * pairs,
    )
    limit = [taken * flops / product.flops for taken in wide]
    what = f"local step, width 256, vocabulary 512, 8 x {length}"
    rows += [
        Row(
            f"{what}, fp32",
            "ms",
            middle(limit, 1e3),
            nan,
            middle(single, 1e3),
            "ours / limit",
            ratios(single, limit),
            "<= 1.35",
        ),
        Row(
            f"{what}, bf16",
            "ms",
            middle(low, 1e3) * flops / narrow.flops,
            middle(single, 1e3),
            middle(half, 1e3),
            "fp32 / bf16",
            ratios(single, half),
            ">= 1.7",
        ),
    ]
    for name, times, product_s in (("fp32", single, wide), ("bf16", half, low)):
        rate = product.flops / middle(product_s) / 1e12
        share = 100 * flops / middle(times) / 1e12 / rate
        print(f"{name}: products reach {rate:.2f} TFLOP/s, the step uses {share:.0f} % (MFU)")
    return rows


def task_step_memory(width: int, sequences: int, length: int, full: bool) -> dict[str, Any]:
    """Peak memory of two local steps, beyond the interpreter and the libraries."""
    before = memory_now()
    config = LARGE[width]
    network = network_of(config, FullLogits if full else Transformer)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    batch = random_batch(config, sequences, length)
    inputs, targets = batch.inputs.to(DEVICE), batch.targets.to(DEVICE)

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            (network(inputs, targets) / batch.tokens).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()

    return {"peak": peak_memory(steps) - before}


# ---------------------------------------------------------------- workers and start-up


def task_workers(workers: int, steps: int) -> dict[str, Any]:
    """One rank of a `tiny` run on random tokens: CPU seconds of an interval, and memory."""
    ranks, _ = diloco.connect(workers, 1, 5.0)
    network = network_of(SIZES["tiny"])
    local, plan = workers_on(network, ranks), first_plan()
    batch = random_batch(SIZES["tiny"], 2, 128)

    def interval() -> None:
        local.begin(steps)
        for _ in range(steps):
            for row in range(len(ranks.hosted)):
                local.step(row, batch)
        ranks.gather(torch.zeros(1))
        local.synchronise(plan)

    interval()
    began = time.process_time()
    interval()
    taken = time.process_time() - began
    ranks.gather(torch.zeros(1))  # everybody's pages are still there: shared ones count once
    memory = Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()[0]
    ranks.gather(torch.zeros(1))
    diloco.disconnect()
    return {"cpu": taken, "memory": int(memory) * 1024, "tokens": len(ranks.hosted) * steps * 256}


def bench_workers(quick: bool) -> list[Row]:
    """8 workers on 2 ranks against 8 processes; time to the first progress line."""
    rates: dict[int, list[float]] = {2: [], 8: []}
    memory: dict[int, list[float]] = {2: [], 8: []}
    for _ in range(1 if quick else 3):
        for world in (8, 2):
            ranks = launch("workers", dict(workers=8, steps=10 if quick else 40), world)
            rates[world].append(sum(r["tokens"] for r in ranks) / sum(r["cpu"] for r in ranks))
            memory[world].append(sum(r["memory"] for r in ranks))
    first = [first_line() for _ in range(2 if quick else 5)]
    nan = math.nan
    return [
        Row(
            "8 workers: tokens per CPU second, 8 processes and 2 ranks",
            "1/s",
            nan,
            middle(rates[8]),
            middle(rates[2]),
            "ours / plain",
            ratios(rates[2], rates[8]),
            ">= 0.95",
        ),
        Row(
            "8 workers: memory, 8 processes and 2 ranks",
            "MB",
            nan,
            middle(memory[8], 1 / MB),
            middle(memory[2], 1 / MB),
            "ours / plain",
            ratios(memory[2], memory[8]),
            "<= 0.4",
        ),
        Row(
            "first progress line of train.py, corpus warm",
            "s",
            nan,
            nan,
            middle(first),
            "s",
            first,
            "<= 5.0",
        ),
    ]


def first_line() -> float:
    """Seconds from the start of `train.py` to its first progress line."""
    script = Path(train.__file__).resolve()
    with tempfile.TemporaryDirectory() as folder, children() as started:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(script), "--steps", "40"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 1/"):
                return time.perf_counter() - began
    raise RuntimeError("train.py ended without a progress line")


# ---------------------------------------------------------------- memory of a synchronisation


def task_sync_memory(size: str, codec: str, plain: bool) -> dict[str, Any]:
    """Peak memory of the first synchronisation, beyond parameters, anchor and momentum.

    AdamW's state and the gradients of a run are not there: neither version touches them.
    """
    world = int(os.environ["WORLD_SIZE"])
    ranks, plan = diloco.connect(world, 1, 5.0)[0], first_plan()
    warm = workers_on(Parameters([1 << 20]), ranks, codec)  # threads, libraries
    warm.synchronise(plan)
    plain_synchronise(warm.replicas[0].flat, warm.shared, plain_outer(warm))
    before = memory_now()
    numels = numels_of(size)
    workers = workers_on(Parameters(numels), ranks, codec)
    for theta_k in workers.replicas[0].flat:
        theta_k.mul_(0.999)
    outer = plain_outer(workers)

    def synchronise() -> None:
        if plain:
            plain_synchronise(workers.replicas[0].flat, workers.shared, outer)
        else:
            workers.synchronise(plan)

    peak = peak_memory(synchronise) - before - 3 * 4 * sum(numels)
    diloco.disconnect()
    return {"peak": peak}


def bench_memory(quick: bool) -> list[Row]:
    """What a synchronisation needs beyond the state that a run keeps anyway."""
    size = "215m"
    rows = []
    cases = [("fp32", 1)] if quick else [("fp32", 1), ("int8", 1), ("int8", 2)]
    for codec, world in cases:
        peaks = []
        for plain in (True, False):
            options = dict(size=size, codec=codec, plain=plain)
            if plain and (codec, world) != ("fp32", 1):
                peaks.append(math.nan)
            else:
                peaks.append(max(rank["peak"] for rank in launch("sync_memory", options, world)))
        what = f"extra memory of a synchronisation, {size}, {codec}, {world} rank(s)"
        target, limit = "<= 64", 0.0
        if world > 1:  # parts sent and received, and the mean: the encoded bytes, twice
            limit = 2.0 * quant.payload_bytes(quant.CODECS[codec], numels_of(size)) / 2**20
            target = f"<= {limit + 64:.0f}"
        plain_mib, ours_mib = (peak / 2**20 for peak in peaks)
        rows.append(Row(what, "MiB", limit, plain_mib, ours_mib, "MiB", [ours_mib], target))
    return rows


# ---------------------------------------------------------------- what travels


def bytes_table() -> str:
    """Payload of a synchronisation by codec and model, and of a whole run by recipe; Markdown."""
    lines = [
        "| model | parameters | fp32 | bf16 | int8 |",
        "|---|---|---|---|---|",
    ]
    for size in SIZES:
        numels = numels_of(size)
        each = [quant.payload_bytes(codec, numels) for codec in quant.CODECS.values()]
        cells = [size, f"{sum(numels):,}", *(f"{value:,}" for value in each)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| recipe | method | wire | synchronisations | payload of the run, GB | saved |",
        "|---|---|---|---|---|---|",
    ]
    cases = [(recipe, method, "") for recipe in train.RECIPES for method in ("diloco", "autoloco")]
    for recipe, method, wire in [*cases, ("ultrachat-8b", "autoloco", "int8")]:
        options = train.RECIPES[recipe] | ({"wire": wire} if wire else {})
        config = train.Config(**options | {"recipe": recipe, "method": method})
        intervals = [planned.steps for planned, _ in autoloco.simulate(config.rules, {})]
        codec = quant.CODECS[config.wire]
        payload = quant.payload_bytes(codec, numels_of(config.model)) * len(intervals)
        saved = train.totals(config, intervals, payload)["saved"]
        cells = [recipe, method, config.wire, str(len(intervals)), f"{payload / GB:,.3f}"]
        lines.append("| " + " | ".join(cells) + f" | {100 * saved:.1f} % |")
    return "\n".join(lines)


# ---------------------------------------------------------------- command line

COMMANDS: dict[str, Callable[[bool], list[Row]]] = {
    "sync": bench_sync,
    "codec": bench_codec,
    "wire": bench_wire,
    "step": bench_step,
    "workers": bench_workers,
    "memory": bench_memory,
    "link": bench_link,
}
TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "link": task_link,
    "wire": task_wire,
    "step_memory": task_step_memory,
    "workers": task_workers,
    "sync_memory": task_sync_memory,
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Command line -> command, quick, threads."""
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=[*COMMANDS, "bytes"])
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: within 50 s")
    parser.add_argument("--threads", type=int, help="of this process [one a core]")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run one command and print its table.

    Args:
        argv: arguments without the program's name.
    Returns:
        0; 1 where a target is missed or a measurement was not possible.
    """
    if argv[:1] == ["rank"]:  # a process that `launch` started
        print("RESULT " + json.dumps(TASKS[argv[1]](**json.loads(argv[2]))))
        return 0
    arguments = parse(argv)
    if arguments.command == "bytes":
        print(bytes_table())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave through every `finally`
    threads = arguments.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if GPU else f"{threads} CPU threads, wall clock"
    if not GPU and threads == 1:
        where = "1 CPU thread, CPU time"
    print(f"bench.py {arguments.command}: {where}, torch {torch.__version__}")
    try:
        rows = COMMANDS[arguments.command](arguments.quick)
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
