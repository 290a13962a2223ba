"""Speed, memory and bytes against the machine's limits and against plain versions.

    python -m experiments.bench sync|codec|wire|step|workers|memory|link [--quick] [--write]
    python -m experiments.bench bytes [--write]      # what travels, by model and recipe; no timing
    python -m experiments.bench gpu                  # what to run first on a GPU

One table a command. A row has the limit that was measured in the same run, a plain version, ours,
and a ratio: smallest, median and largest over alternating pairs, so that a busy machine disturbs
both sides alike. Exit code 1 where a median misses its target, 2 for a command line that means
nothing. The plain versions were written for this comparison: none is somebody else's code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autoloco
import diloco
import eval as evaluation
import quant
import train
from data import Batch
from experiments.run import write_table
from model import SIZES, ModelConfig, Transformer, parameter_shapes

MB, GB = 1e6, 1e9
CPU, GPU = torch.device("cpu"), torch.device("cuda")
Functions = dict[str, Callable[[], Any]]
ROOT = Path(train.__file__).resolve().parent

# ---------------------------------------------------------------- rows, timing, processes


class Row(NamedTuple):
    """One line of a table: samples in `unit`, and a goal such as `ours / limit <= 1.8`, which the
    median of the pairs' ratios must keep.
    """

    what: str
    unit: str
    goal: str
    limit: Sequence[float] = ()
    plain: Sequence[float] = ()
    ours: Sequence[float] = ()

    @property
    def ratios(self) -> list[float]:
        """Of every alternating pair; the samples themselves where the goal is for one alone."""
        above, slash, below, *_ = (self.goal + " - -").split(" ")
        values = getattr(self, above)
        others = getattr(self, below) if slash == "/" else [1.0] * len(values)
        return [a / b for a, b in zip(values, others, strict=True)]

    @property
    def verdict(self) -> str:
        """Whether the goal is kept; empty where it has no bound."""
        *_, sign, bound = self.goal.split(" ")
        if sign not in ("<=", ">="):
            return ""
        excess = statistics.median(self.ratios) - float(bound)
        return "met" if (excess <= 0 if sign == "<=" else excess >= 0) else "MISSED"


def table(rows: Iterable[Row]) -> str:
    """Rows as a Markdown table."""

    def number(values: Sequence[float]) -> str:
        middle = statistics.median(values) if values else None
        return "-" if middle is None else f"{middle:.3g}" if middle < 1000 else f"{middle:,.0f}"

    cells = []
    for row in rows:
        samples = (row.limit, row.plain, row.ours, [min(row.ratios)], row.ratios, [max(row.ratios)])
        cells.append([row.what, row.unit, *map(number, samples), row.goal, row.verdict])
    return evaluation.table(
        "what | unit | limit | plain | ours | min | median | max | goal | ", cells
    )


def seconds(function: Callable[[], Any]) -> float:
    """Time of one call: in the main process with a single thread its CPU time, which does not count
    when a neighbour has the core.
    """
    alone = torch.get_num_threads() == 1 and "RANK" not in os.environ
    clock = time.process_time if alone else time.perf_counter
    began = clock()
    function()
    return clock() - began


def alternate(
    functions: Functions,
    pairs: int,
    between: Callable[[], Any] = lambda: None,
    clock: Callable[[Callable[[], Any]], float] = seconds,
) -> dict[str, list[float]]:
    """Times of functions that take turns, in reversed order every other round, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-1, pairs):
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            between()
            taken = clock(functions[name])
            times[name] += [taken] * (turn >= 0)
    return times


def launch(
    function: Callable[..., Any], world: int = 1, hosts: Sequence[str] = (), **options: Any
) -> list[Any]:
    """What `function(**options)` returned in each of `world` fresh processes, ranks of one launch.

    The function stands in an importable module; `hosts` are the ranks' network namespaces, by
    default all are on loopback. RuntimeError: a rank failed, with the end of its output.
    """
    module = function.__module__.replace("__main__", "experiments.bench")
    words = ["-m", "experiments.bench", "rank", module, function.__name__, json.dumps(options)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names: dict[str, Any] = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS=1)
    names |= dict(WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, PYTHONPATH=ROOT)
    names |= dict(MASTER_ADDR="10.77.0.1", GLOO_SOCKET_IFNAME="bench0") if hosts else {}
    streams: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks, results = [], []
    try:
        for rank in range(world):
            own = names | dict(RANK=rank, LOCAL_RANK=rank)
            environment = os.environ | {name: str(value) for name, value in own.items()}
            command = ["ip", "netns", "exec", hosts[rank]] if hosts else []
            command += [sys.executable, *words]
            ranks.append(subprocess.Popen(command, env=environment, **streams))
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(f"{function.__name__}: rank {rank} failed:\n{output[-2000:]}")
            results.append(json.loads(output.rsplit("RESULT ", 1)[1]))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return results


def peak_memory() -> int:
    """Largest resident memory of this process until now, bytes."""
    # Not getrusage, whose maximum a new process inherits from the one that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def numels_of(size: str) -> list[int]:
    """Elements of each parameter of a model by name."""
    return [shape.numel() for shape in parameter_shapes(SIZES[size]).values()]


# ---------------------------------------------------------------- synchronisation


class Parameters(nn.Module):
    """Parameters without a model: random numbers of the given sizes."""

    def __init__(self, numels: Sequence[int], device: torch.device = CPU) -> None:
        super().__init__()
        values = (torch.randn(numel).mul_(0.02).to(device) for numel in numels)
        self.all = nn.ParameterList(map(nn.Parameter, values))


def workers_on(
    network: nn.Module, ranks: diloco.Ranks | None = None, codec: str = "fp32", **options: Any
) -> diloco.LocalUpdate:
    """The workers of train.py around any module; alone by default."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    ranks = ranks or diloco.Ranks(device=next(network.parameters()).device)
    return diloco.LocalUpdate(network, [optimizer], ranks, quant.CODECS[codec], **options)


def displace(workers: diloco.LocalUpdate) -> None:
    """Move the local parameters, so that the pseudo-gradient is not zero."""
    for theta_k, theta in zip(workers.replicas[0].local, workers.shared, strict=True):
        torch.mul(theta, 0.999, out=theta_k)


def c4_state() -> tuple[autoloco.Rules, autoloco.State]:
    """The C4 recipe's rules, and the state before its first interval."""
    rules = train.Config(**train.RECIPES["c4-215m"]).rules
    return rules, autoloco.start(rules)


def plain_outer(workers: diloco.LocalUpdate) -> Callable[[], None]:
    """Plain: one parameter after the other, in the manner of OpenDiLoCo, without statistics.

    A fresh pseudo-gradient, torch's own SGD with Nesterov momentum, a fresh copy of the result, on
    the workers' own tensors.
    """
    local, shared, plan = workers.replicas[0].local, workers.shared, autoloco.plan(*c4_state())
    rate = workers.outer_lr * plan.step_scale
    outer = torch.optim.SGD(shared, rate, plan.momentum, nesterov=True, foreach=False)
    for theta, momentum in zip(shared, workers.buffers["momentum"], strict=True):
        outer.state[theta]["momentum_buffer"] = momentum

    def synchronise() -> None:
        for theta_k, theta in zip(local, shared, strict=True):
            theta.grad = theta - theta_k
        outer.step()
        outer.zero_grad()
        for theta_k, theta in zip(local, shared, strict=True):
            theta_k.copy_(theta.clone())

    return synchronise


def traffic(local: Sequence[Tensor], shared: Sequence[Tensor], momentum: Sequence[Tensor]) -> None:
    """Limit: the 5 reads and 4 writes of the parameters that a synchronisation cannot avoid.

    Each sweep covers all parameters, so that none finds its input in the cache.
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
    """Synchronisation at 215M in fp32 with statistics, without communication; the controller."""
    workers, plan = workers_on(Parameters(numels_of("215m"))), autoloco.plan(*c4_state())
    local, pairs = workers.replicas[0].local, 3 if quick else 11
    functions: Functions = {
        "limit": partial(traffic, local, workers.shared, workers.buffers["momentum"]),
        "plain": plain_outer(workers),
        "ours": partial(workers.synchronise, plan),
    }
    times = alternate(functions, pairs, partial(displace, workers))
    what = "synchronisation, 215M, fp32, with statistics"
    rows = [
        Row(what, "s", goal, **times) for goal in ("ours / limit <= 1.8", "plain / ours >= 1.5")
    ]
    # An interval is at least 500 steps of a sequence of 1,024 at the rate of large products; 0.3 %
    # of it are allowed. The norms read memory here, which the real ones share with the update.
    large = Product(torch.float32, 1e10)
    (rules, state), slabs = c4_state(), [x for t in local for x in t.split(quant.SLAB)] * 3

    def control() -> None:
        seen = autoloco.Observation(1.0, 0.5, 1.0, 10**6)
        autoloco.complete(rules, state, autoloco.plan(rules, state), seen)
        torch.stack([torch.dot(slab, slab) for slab in slabs]).double().sum().item()

    times = alternate({"ours": control, "limit": large}, pairs)
    times["limit"] = [
        500 * 6 * sum(map(len, local)) * 1024 / large.flops * t for t in times["limit"]
    ]
    what = "controller, mapper, statistics / interval of 500 steps, 215M"
    return [*rows, Row(what, "s", "ours / limit <= 0.003", **times)]


# ---------------------------------------------------------------- codecs


def plain_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain: G's formula, one fresh tensor an operation; (q, scale) of blocks of 4,096."""
    rows = x.view(-1, quant.BLOCK)
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().clamp(-127, 127).to(torch.int8), scale


class Message:
    """A tensor's encoding, chunk by chunk in one buffer."""

    def __init__(self, codec: quant.Codec, numel: int) -> None:
        self.codec, self.chunks = codec, quant.chunks([numel])
        sizes = [codec.nbytes(chunk) for chunk in self.chunks]
        self.parts = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)

    def encode(self, source: Tensor) -> None:
        """Encode all of it."""
        for chunk, part in zip(self.chunks, self.parts, strict=True):
            self.codec.encode(source[chunk.start : chunk.stop], chunk.block, part)

    def decode(self, target: Tensor) -> Tensor:
        """Decode all of it."""
        for chunk, part in zip(self.chunks, self.parts, strict=True):
            self.codec.decode(part, chunk.block, target[chunk.start : chunk.stop])
        return target


def bench_codec(quick: bool) -> list[Row]:
    """Encode and decode against a copy of the tensor (limit); error on Gaussian data."""
    source, pairs, rows = torch.randn(1 << (24 if quick else 27)), 7 if quick else 15, []
    target, what = torch.empty_like(source), f"{len(source) >> 20} Mi elements"
    copy = {"limit": partial(target.copy_, source)}
    for name, codec in quant.CODECS.items():
        message = Message(codec, len(source))
        encode: Functions = {**copy, "ours": partial(message.encode, source)}
        decode: Functions = {**copy, "ours": partial(message.decode, target)}
        if name == "int8":
            encode["plain"] = partial(plain_int8, source)
            decode["plain"] = partial(torch.mul, *plain_int8(source))
        for way, functions, bound in (("encode", encode, 2.5), ("decode", decode, 1.1)):
            goal = "ours / limit" + (f" <= {bound}" if name == "int8" else "")
            times = alternate(functions, pairs)
            rows.append(Row(f"{name} {way}, {what}", "s", goal, **times))

    def coded(x: Tensor) -> Tensor:
        message.encode(x)
        return message.decode(torch.empty_like(x))

    message, workers = Message(quant.CODECS["int8"], 1 << 22), torch.randn(8, 1 << 22)
    once = torch.stack([coded(x) for x in workers])
    for when, found, exact, most in (
        ("one encode", once, workers, "0.9"),
        ("both", coded(once.mean(0)), workers.mean(0), "1.3"),
    ):
        error = [100 * float((found - exact).norm() / exact.norm())]
        goal, what = f"ours <= {most}", f"int8 relative L2 error, Gaussian, after {when}"
        rows.append(Row(what, "%", goal, ours=error))
    return rows


# ---------------------------------------------------------------- the wire

# $1 names a bridge, $2 hosts in network namespaces stand on it, $3 Mbit/s is the rate of each link
# in both directions (empty: as it is). Nothing outside the namespaces is touched.
SHAPE = """set -e
ip netns add $1; ip -n $1 link add bridge0 type bridge; ip -n $1 link set bridge0 up
slow() { test -z "$3" || tc -n $1 qdisc add dev $2 root tbf rate $3mbit burst 128kb limit 4mb; }
for i in $(seq $2); do
  ip netns add $1-$i; ip -n $1-$i link set lo up
  ip -n $1 link add port$i type veth peer name bench0 netns $1-$i
  ip -n $1 link set port$i master bridge0 up
  ip -n $1-$i addr add 10.77.0.$i/24 dev bench0; ip -n $1-$i link set bench0 up
  slow $1 port$i $3; slow $1-$i bench0 $3
done"""


@contextmanager
def shaped_hosts(count: int, mbit: float | None) -> Iterator[list[str]]:
    """Network namespaces on one bridge, which go when the block ends."""
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)] or os.geteuid():
        raise RuntimeError(f"a shaped link needs root and iproute2 (missing: {missing})")
    bridge = f"bench-{os.getpid()}"
    hosts = [f"{bridge}-{i}" for i in range(1, count + 1)]
    try:
        words = ["bash", "-c", SHAPE, "shape", bridge, str(count), str(mbit or "")]
        subprocess.run(words, check=True, capture_output=True)
        yield hosts
    finally:
        for name in (*hosts, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def interface_bytes() -> int:
    """Bytes that the kernel counted as sent on this namespace's interface, if it has one."""
    file = Path("/sys/class/net/bench0/statistics/tx_bytes")
    time.sleep(0.5)  # what a rank has written may still wait in its socket
    return int(file.read_text()) if file.exists() else 0


def counted_row(what: str, kernel: float, sent: float) -> Row:
    """Bytes as the kernel counted them, headers included (plain), against the ranks' own count."""
    return Row(what + ", bytes", "MB", "plain / ours <= 1.05", (), [kernel / MB], [sent / MB])


def averaged(numel: int, pairs: int) -> dict[str, Any]:
    """One rank: an fp32 all-reduce and `Wire.mean` in every codec take turns; bytes of one mean."""
    ranks, _ = diloco.connect(int(os.environ["WORLD_SIZE"]), 1, 5.0)
    delta = torch.randn(numel)

    def all_reduce() -> None:
        dist.all_reduce(delta)
        delta.div_(ranks.world)

    def mean(wire: diloco.Wire) -> None:
        for chunk, part in wire.mean([[delta]], [True] * ranks.world):
            delta[chunk.start : chunk.stop].copy_(part)

    def together(function: Callable[[], Any]) -> float:
        dist.barrier()
        return float(ranks.gather(torch.tensor([seconds(function)]).double()).max())

    wires = {name: diloco.Wire(ranks, codec, [numel]) for name, codec in quant.CODECS.items()}
    functions = {name: partial(mean, wire) for name, wire in wires.items()}
    times = alternate({"all_reduce": all_reduce} | functions, pairs, clock=together)
    counts = {}
    for name, function in functions.items():
        dist.barrier()
        kernel, sent = interface_bytes(), ranks.bytes_sent
        function()
        sent = ranks.bytes_sent - sent
        dist.barrier()
        counts[name] = [interface_bytes() - kernel, sent]
    ranks.leave()
    return {"times": times, "bytes": counts}


def bench_wire(quick: bool) -> list[Row]:
    """The mean of 4 ranks against an fp32 all-reduce: loopback, then links of 1 Gbit/s."""
    rows, large = [], (1 << 23) if quick else sum(numels_of("215m"))
    found = {("loopback", large): launch(averaged, 4, numel=large, pairs=5)}
    small = 4_000_000 if quick else 10_000_000
    try:
        with shaped_hosts(4, 1000) as hosts:
            found["1 Gbit/s", small] = launch(averaged, 4, hosts, numel=small, pairs=5)
    except RuntimeError as error:
        print(f"no link of 1 Gbit/s: {error}")
    goals = {"loopback int8": " >= 1.2", "1 Gbit/s int8": " >= 3.8", "1 Gbit/s bf16": " >= 1.9"}
    for (where, numel), ranks in found.items():
        times = ranks[0]["times"]
        for name, codec in quant.CODECS.items():
            # Every rank sends 3/4 of its encoding, then its quarter of the mean to 3 others.
            limit = [2 * 3 / 4 * quant.payload_bytes(codec, [numel]) * 8 / 1e9]
            goal = "plain / ours" + goals.get(f"{where} {name}", "")
            samples = (limit if where != "loopback" else (), times["all_reduce"], times[name])
            rows.append(Row(f"{where}, 4 ranks, {numel:,} elements, {name}", "s", goal, *samples))
    for name in quant.CODECS if len(found) > 1 else ():
        kernel, sent = (sum(rank["bytes"][name][i] for rank in ranks) for i in (0, 1))
        rows.append(counted_row(f"1 Gbit/s, one mean, {name}", kernel, sent))
    return rows


# ---------------------------------------------------------------- whole runs


def trained(folder: str, flags: str) -> dict[str, Any]:
    """One rank of a training run; bytes that the kernel counted, and peak memory of the GPU."""
    os.chdir(folder)
    before = interface_bytes()
    if code := train.main([*flags.split(), "--name", "run"]):
        raise RuntimeError(f"train.py ended with {code}")
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"kernel": interface_bytes() - before, "peak": peak}


def bench_link(quick: bool) -> list[Row]:
    """Wall-clock time of training on links of 100 Mbit/s, beside payload / rate.

    Limit is the prediction, plain the whole run on links as they are, ours what the slow link
    added. The prediction counts one payload in each direction a synchronisation.
    """
    rows, steps, wires = [], 60 if quick else 300, ("int8",) if quick else ("fp32", "int8")
    for method, wire in product(("ddp", "diloco", "autoloco"), wires):
        flags, taken = f"--workers 2 --steps {steps} --method {method} --wire {wire}", []
        for mbit in (None, 100):
            with shaped_hosts(2, mbit) as hosts, tempfile.TemporaryDirectory() as folder:
                ranks = launch(trained, 2, hosts, folder=folder, flags=flags)
                summary = train.read_json(Path(folder, "runs/run/summary.json"))
                taken.append(summary["seconds"])
        limit, ours = [summary["payload_bytes"] * 8 / 100e6], [taken[1] - taken[0]]
        what = f"{method} {wire}, {steps} steps, {summary['synchronisations']} synchronisations"
        rows.append(Row(what + ", communication", "s", "ours / limit", limit, taken[:1], ours))
        kernel, sent = sum(rank["kernel"] for rank in ranks), 2 * summary["sent_bytes"]
        rows.append(counted_row(what, kernel, sent))  # both ranks send what rank 0 sends
    return rows


# ---------------------------------------------------------------- the local step


class Product:
    """Limit: large matrix products with about as many FLOPs, timed by calling it."""

    def __init__(self, dtype: torch.dtype, flops: float, device: torch.device = CPU) -> None:
        size = 1024 if device == CPU else 8192
        self.count = max(1, round(flops / (2 * size**3)))
        self.flops = self.count * 2 * size**3
        self.a, self.b = torch.randn(2, size, size, device=device, dtype=dtype)
        self.out = torch.empty_like(self.a)

    def __call__(self) -> None:
        """All of them."""
        for _ in range(self.count):
            torch.mm(self.a, self.b, out=self.out)
        if self.out.is_cuda:
            torch.cuda.synchronize()


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
    """A model with initial weights."""
    network = kind(config)
    network.init_weights(0)
    return network


# GPT-2's vocabulary on the tiny shape and on one twice as wide: the wider the model, the smaller
# the share of the loss in a step, and the less a chunked loss can gain.
LARGE = {
    128: ModelConfig(50_304, 128, 4, 4, 4, 320, tied=True),
    256: ModelConfig(50_304, 256, 4, 4, 4, 704, tied=True),
}
SMALL = ModelConfig(512, 256, 4, 4, 4, 704, tied=True)  # width 256, small vocabulary
ROWS_TOKENS = (8, 256)  # of a batch


def stepper(config: ModelConfig, full: bool = False, **options: Any) -> Callable[[], None]:
    """One local step of one worker, as a run takes it; with full logits and glibc as it comes."""
    network = network_of(config, FullLogits if full else Transformer)
    workers, batch = workers_on(network, clip=1.0, **options), random_batch(config, *ROWS_TOKENS)

    def step() -> None:
        diloco.keep_freed_memory(not full)
        workers.begin(1)
        workers.step(0, batch, 1e-4)

    return step


def step_memory(width: int, full: bool) -> float:
    """Peak memory of two local steps, beyond the interpreter and the libraries, MB."""
    before, step = peak_memory(), stepper(LARGE[width], full)
    step()
    step()
    return (peak_memory() - before) / MB


def bench_step(quick: bool) -> list[Row]:
    """The local step: large vocabulary against full logits, small one against the products."""
    pairs, rows = 1 if quick else 11, []
    for width, config in LARGE.items():
        times = alternate({"plain": stepper(config, True), "ours": stepper(config)}, pairs)
        what = f"local step, 50k vocabulary, width {width}, 8 x 256, fp32"
        rows.append(Row(what, "s", "plain / ours >= 1.4", **times))
        plain, ours = (launch(step_memory, width=width, full=full) for full in (True, False))
        what = f"peak memory, width {width}, parameters and AdamW state included"
        rows.append(Row(what, "MB", "ours / plain <= 0.45", (), plain, ours))
    flops = train.step_flops(SMALL, *ROWS_TOKENS)
    functions = {"fp32": stepper(SMALL), "bf16": stepper(SMALL, autocast=torch.bfloat16)}
    functions["limit"] = large = Product(torch.float32, flops)
    times = alternate(functions, 2 * pairs)
    limit = [flops / large.flops * taken for taken in times["limit"]]
    what, ours = "local step, width 256, vocabulary 512, 8 x 256", times["fp32"]
    return [
        *rows,
        Row(f"{what}, fp32", "s", "ours / limit <= 1.35", limit, (), ours),
        Row(f"{what}, bf16 (plain: fp32)", "s", "plain / ours >= 1.7", (), ours, times["bf16"]),
    ]


# ---------------------------------------------------------------- workers and start-up


def worked(workers: int, steps: int) -> list[float]:
    """One rank of a `tiny` run on random tokens: tokens per interval, its CPU seconds, MB."""
    ranks, _ = diloco.connect(workers, 1, 5.0)
    local, plan = workers_on(network_of(SIZES["tiny"]), ranks), autoloco.plan(*c4_state())
    batch, began = random_batch(SIZES["tiny"], 2, 128), 0.0
    for _ in range(2):  # the first one warms up
        began = time.process_time()
        local.begin(steps)
        for _, row in product(range(steps), range(len(ranks.hosted))):
            local.step(row, batch, 1e-4)
        local.synchronise(plan)
    taken = time.process_time() - began
    ranks.gather(torch.zeros(1))  # everybody's pages are still there: shared ones count once
    memory = Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()[0]
    ranks.gather(torch.zeros(1))
    ranks.leave()
    return [len(ranks.hosted) * steps * 256, taken, int(memory) * 1024 / MB]


def first_line() -> float:
    """Seconds from the start of `train.py` to its first progress line."""
    command, began = [sys.executable, str(ROOT / "train.py"), "--steps", "40"], time.perf_counter()
    streams: Any = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, **streams) as process,
    ):
        assert process.stderr is not None
        shown = b""
        while b"/40 [" not in shown and (more := os.read(process.stderr.fileno(), 999)):
            shown += more  # the bar's line has no end until the next one is drawn
        taken = time.perf_counter() - began
        process.terminate()
        process.stderr.read()
    return taken


def bench_workers(quick: bool) -> list[Row]:
    """8 workers on 2 ranks against 8 processes; time to the first progress line."""
    rates: dict[str, list[float]] = {"plain": [], "ours": []}
    memory: dict[str, list[float]] = {"plain": [], "ours": []}
    for _, (name, world) in product(range(1 if quick else 3), (("plain", 8), ("ours", 2))):
        ranks = launch(worked, world, workers=8, steps=10 if quick else 40)
        tokens, taken, held = (sum(values) for values in zip(*ranks, strict=True))
        rates[name].append(tokens / taken)
        memory[name].append(held)
    what, first = (
        "8 workers, 8 processes and 2 ranks",
        [first_line() for _ in range(2 + 3 * (not quick))],
    )
    return [
        Row(f"{what}: tokens per CPU second", "1/s", "ours / plain >= 0.95", **rates),
        Row(f"{what}: memory", "MB", "ours / plain <= 0.4", **memory),
        Row("first progress line of train.py, corpus warm", "s", "ours <= 5.0", ours=first),
    ]


# ---------------------------------------------------------------- memory of a synchronisation


def sync_memory(codec: str, plain: bool) -> float:
    """Peak memory of the first synchronisation at 215M, beyond parameters, anchor, momentum, MiB.

    AdamW's state and the gradients of a run are not there: neither version touches them.
    """
    ranks, _ = diloco.connect(int(os.environ["WORLD_SIZE"]), 1, 5.0)
    plan, numels, before = autoloco.plan(*c4_state()), numels_of("215m"), 0
    for sizes in ([1 << 20], numels):  # a small one first loads threads and libraries
        before, workers = peak_memory(), workers_on(Parameters(sizes), ranks, codec)
        displace(workers)
        (plain_outer(workers) if plain else partial(workers.synchronise, plan))()
    ranks.leave()
    return (peak_memory() - before - 3 * 4 * sum(numels)) / 2**20


def bench_memory(quick: bool) -> list[Row]:
    """What a synchronisation needs beyond the state that a run keeps anyway."""
    rows = []
    for codec, world in (("fp32", 1), ("int8", 1), ("int8", 2))[: 1 if quick else 3]:
        ours = launch(sync_memory, world, codec=codec, plain=False)
        plain = launch(sync_memory, codec=codec, plain=True) if codec == "fp32" else ()
        # Parts sent and received, and the mean: the encoded bytes, twice.
        payload = quant.payload_bytes(quant.CODECS[codec], numels_of("215m")) / 2**20
        limit, what = 2 * payload if world > 1 else 0.0, f"{codec}, {world} rank(s)"
        goal, what = f"ours <= {limit + 64:.0f}", f"extra memory of a synchronisation, 215m, {what}"
        rows.append(Row(what, "MiB", goal, [limit], plain, ours))
    return rows


# ---------------------------------------------------------------- what travels


def bench_bytes(quick: bool = False) -> str:
    """Payload of a synchronisation by codec and model, and of a whole run by recipe; Markdown."""
    models, runs = [], []
    for size in SIZES:
        sizes = [quant.payload_bytes(codec, numels_of(size)) for codec in quant.CODECS.values()]
        models.append([size, *(f"{value:,}" for value in (sum(numels_of(size)), *sizes))])
    cases = [(name, method, "") for name in train.RECIPES for method in ("diloco", "autoloco")]
    for recipe, method, wire in [*cases, ("ultrachat-8b", "autoloco", "int8")]:
        config = train.Config(**(train.RECIPES[recipe] | dict(recipe=recipe, method=method)))
        config = replace(config, wire=wire or config.wire)
        intervals = [planned.steps for planned, _ in autoloco.simulate(config.rules, {})]
        found = train.totals(config, intervals)
        sent, saved = f"{found['payload_bytes'] / GB:,.3f}", f"{100 * found['saved']:.1f} %"
        runs.append((recipe, method, config.wire, len(intervals), sent, saved))
    head = "recipe | method | wire | synchronisations | payload of the run, GB | saved"
    sizes_head = " | ".join(["model", "parameters", *quant.CODECS])
    return evaluation.table(sizes_head, models) + "\n" + evaluation.table(head, runs)


# ---------------------------------------------------------------- the first thing on a GPU


def apart(codec: str) -> float:
    """Relative L2 distance of a GPU's update from the CPU's: one worker's 215M synchronisation."""
    updates = []
    for device in (CPU, GPU):
        torch.manual_seed(0)
        workers = workers_on(Parameters(numels_of("215m"), device), codec=codec)
        before = torch.cat(workers.shared)
        displace(workers)
        workers.synchronise(autoloco.plan(*c4_state()))
        updates.append((torch.cat(workers.shared) - before).cpu())
    return float((updates[1] - updates[0]).norm() / updates[0].norm())


def gpu_rows(wire: str, world: int) -> list[Row]:
    """20 steps of `c4-215m` on made-up local shards: learns, fits, how fast."""
    with tempfile.TemporaryDirectory() as folder:
        texts = (" ".join(map(str, torch.randint(10**6, (900,)).tolist())) for _ in range(400))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        Path(folder, "shard.jsonl").write_text(lines)
        flags = f"--recipe c4-215m --data {folder}/shard.jsonl --tokenizer bytes --wire {wire}"
        flags += f" --workers {world} --steps 20 --base-horizon 10 --warmup 2 --val-documents 8"
        ranks, run = launch(trained, world, folder=folder, flags=flags), Path(folder, "runs/run")
        config, last = train.load_config(run), train.read_rows(run / "intervals.jsonl")[-1]
        losses = [row["loss"] for row in train.read_rows(run / "metrics.jsonl")]
    flops = train.step_flops(config.shape, config.batch_size, config.seq_len)
    best = alternate({"": Product(torch.bfloat16, flops, GPU)}, 3)[""]
    step, peak = [last["local_seconds"] / last["steps"]], max(rank["peak"] for rank in ranks) / GB
    what, estimate = f"c4-215m, {wire}, {world} GPU", sum(train.memory_per_gpu(config, 1).values())
    sync, interval = [last["sync_seconds"]], [500 * step[0]]
    return [
        Row(
            f"{what}: first and last loss", "", "ours / plain <= 0.99", (), losses[:1], losses[-1:]
        ),
        Row(f"{what}: memory, dry run", "GB", "ours / limit <= 1.1", [estimate / GB], (), [peak]),
        Row(f"{what}: step, MFU", "s", "limit / ours >= 0.1", best[:1], (), step),
        Row(f"{what}: synchronisation", "s", "ours / limit <= 0.05", interval, (), sync),
    ]


def bench_gpu(quick: bool) -> list[Row]:
    """What to run first on a GPU, within five minutes: it agrees with the CPU, trains and fits.

    One rank a GPU, over NCCL where there are several.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU is visible, so nothing was checked")
    rows, what = [], "update of a 215M synchronisation, relative L2 distance of GPU and CPU"
    for codec, bound in (("fp32", 1e-5), ("bf16", 1e-5), ("int8", 1e-3)):
        rows.append(Row(f"{what}, {codec}", "", f"ours <= {bound:g}", ours=[apart(codec)]))
    for wire in quant.CODECS:
        rows += gpu_rows(wire, torch.cuda.device_count())
    return rows


# ---------------------------------------------------------------- command line

BENCHES: tuple[Callable[[bool], Any], ...] = (
    *(bench_sync, bench_codec, bench_wire, bench_step, bench_workers, bench_memory, bench_link),
    *(bench_bytes, bench_gpu),
)
COMMANDS = {bench.__name__.removeprefix("bench_"): bench for bench in BENCHES}


def main(argv: list[str]) -> int:
    """Run one command and print its table; 1 where a target or a measurement is missed."""
    if argv[:1] == ["rank"]:  # a process that `launch` started
        function = getattr(importlib.import_module(argv[1]), argv[2])
        print("RESULT " + json.dumps(function(**json.loads(argv[3]))))
        return 0
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: within 50 s")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md too")
    parser.add_argument("--threads", type=int, default=diloco.cores(), help="[one a core]")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    diloco.keep_freed_memory()  # as a run has it
    print(f"bench {given.command}: {given.threads} CPU threads, torch {torch.__version__}\n")
    try:
        found = COMMANDS[given.command](given.quick)
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    text = found if isinstance(found, str) else table(found)
    print(text, end="")
    if given.write:
        write_table(given.command, text)
    return 1 if "| MISSED |" in text else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave through every `finally`
    sys.exit(main(sys.argv[1:]))
