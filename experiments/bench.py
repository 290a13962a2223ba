"""Speed and memory against the machine's limits and against plain versions.

    python -m experiments.bench sync|codec|wire|step|memory|start [--quick] [--write]

One table a command. Ours stands beside a limit and a plain version that were measured in the same
run, taking turns; a ratio is the median of the turns, with the smallest and the largest. Times are
CPU seconds of one thread, which do not count when a neighbour has the core; only on the wire and
at start-up the clock on the wall counts. Exit code 1 where a goal is missed. The plain versions
were written for this comparison: none is somebody else's code. On Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import autoloco
import diloco
import eval as evaluation
import quant
import train
from data import Batch
from experiments.run import write_table
from model import SIZES, ModelConfig, Transformer, parameter_shapes

MIB = 2**20
RULES = train.usual("c4-215m").rules
PLAN = autoloco.plan(RULES, autoloco.start(RULES))  # of the first interval

# ---------------------------------------------------------------- rows, turns, launches

HEAD = "what | unit | ours | limit | ours / limit | plain | ours / plain"
Samples = Mapping[str, Sequence[float]]  # of `ours`, and as many of `limit`, of `plain` or of both
Functions = Mapping[str, Callable[[], Any]]
Clock = Callable[[Callable[[], Any]], float]


def row(what: str, unit: str, samples: Samples, **goals: float) -> list[str]:
    """A line of the table. A goal is the largest median of ours / limit or ours / plain."""
    cells = [what, unit, f"{median(samples['ours']):,.4g}"]
    for name in ("limit", "plain"):
        if name not in samples:
            cells += ["-", "-"]
            continue
        ratios = [a / b for a, b in zip(samples["ours"], samples[name], strict=True)]
        ratio = f"{median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
        if name in goals:
            verdict = "met" if median(ratios) <= goals[name] else "MISSED"
            ratio += f", goal {goals[name]}: {verdict}"
        cells += [f"{median(samples[name]):,.4g}", ratio]
    return cells


def cpu_seconds(function: Callable[[], Any]) -> float:
    """Of one call, in all threads."""
    began = time.process_time()
    function()
    return time.process_time() - began


def take_turns(functions: Functions, turns: int, clock: Clock = cpu_seconds) -> Samples:
    """Times of functions that take turns, in reversed order every other round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            times[name].append(clock(functions[name]))
    return {name: taken[1:] for name, taken in times.items()}  # the first round warms up


def launch(function: Callable[..., Any], world: int, *given: Any) -> list[Any]:
    """What an importable function returned in each of `world` new processes, as under torchrun."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = LaunchConfig(1, 1, world, run_id="bench", start_method="spawn", local_addr="localhost")
    config.rdzv_backend, config.rdzv_endpoint = "c10d", "localhost:0"
    found = elastic_launch(config, function)(*given)
    return [found[rank] for rank in range(world)]


def peak_memory() -> float:
    """Of this process so far, MiB."""
    # Not getrusage, whose maximum a new process inherits from the one that started it.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def numels_of(size: str) -> list[int]:
    """Elements of each parameter of a model by name."""
    return [shape.numel() for shape in parameter_shapes(SIZES[size]).values()]


# ---------------------------------------------------------------- synchronisation


def parameters(numels: Sequence[int]) -> nn.Module:
    """Parameters without a model: random numbers of the given sizes."""
    return nn.ParameterList(torch.randn(numel).mul_(0.02) for numel in numels)


def workers_on(
    network: nn.Module, ranks: diloco.Ranks | None = None, codec: str = "fp32"
) -> diloco.LocalUpdate:
    """The workers of train.py around any module; alone by default."""
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    ranks = ranks or diloco.Ranks()
    return diloco.LocalUpdate(network, [optimizer], ranks, quant.CODECS[codec], clip=1.0)


def traffic(workers: diloco.LocalUpdate) -> None:
    """Limit: the 5 reads and 4 writes of the parameters that a synchronisation cannot avoid.

    Each sweep covers all parameters, so that none finds its input in the cache.
    """
    local, shared = workers.replicas[0].local, workers.shared
    for delta, theta in zip(local, shared, strict=True):
        torch.sub(theta, delta, out=delta)  # 2 reads, 1 write
    for m, delta in zip(workers.buffers["momentum"], local, strict=True):
        m.add_(delta)  # 2 reads, 1 write
    for theta in shared:
        theta.mul_(1.0)  # 1 read, 1 write
    for theta_k in local:
        theta_k.fill_(0.01)  # 1 write


def bench_sync(quick: bool) -> Iterator[list[str]]:
    """Synchronisation at 215M in fp32 with statistics, without communication."""
    workers = workers_on(parameters(numels_of("215m")))
    ours: Callable[[], Any] = partial(workers.synchronise, PLAN)
    times = take_turns({"limit": partial(traffic, workers), "ours": ours}, 3 if quick else 11)
    yield row("synchronisation, 215M, fp32, with statistics", "s", times, limit=1.8)


# ---------------------------------------------------------------- memory of a synchronisation


def sync_memory(world: int, codec: str) -> float:
    """One rank: peak memory of the first synchronisation at 215M, beyond parameters, anchor and
    momentum, MiB. AdamW's state and the gradients of a run, which it does not touch, are not there.
    """
    ranks, _ = diloco.connect(world)
    numels, before = numels_of("215m"), 0.0
    for sizes in ([MIB], numels):  # a small one first loads threads and libraries
        before, workers = peak_memory(), workers_on(parameters(sizes), ranks, codec)
        workers.synchronise(PLAN)
    ranks.leave()
    return peak_memory() - before - 3 * 4 * sum(numels) / MIB


def bench_memory(quick: bool) -> Iterator[list[str]]:
    """What a synchronisation needs beyond the state that a run keeps anyway."""
    # Between ranks as much as is encoded travels at a time: see train.memory_per_gpu.
    encoded = quant.payload_bytes(quant.CODECS["int8"], numels_of("215m")) / MIB
    for world, codec, travels in ((1, "fp32", 0.0), (2, "int8", encoded)):
        found = launch(sync_memory, world, world, codec)
        what = f"extra memory of a synchronisation, 215M, {codec}, ranks: {world}"
        yield row(what, "MiB", {"limit": [64 + travels] * world, "ours": found}, limit=1.0)


# ---------------------------------------------------------------- codecs


def bench_codec(quick: bool) -> Iterator[list[str]]:
    """int8's encode and decode against a copy of the tensor (limit)."""
    codec, turns = quant.CODECS["int8"], 7 if quick else 15
    source = torch.randn(MIB << (4 if quick else 7))
    target, chunk = torch.empty_like(source), quant.Chunk(0, 0, quant.SLAB, quant.BLOCK)
    sent = torch.empty(len(source) // quant.SLAB, codec.nbytes(chunk), dtype=torch.uint8)

    def encode() -> None:
        for part, encoded in zip(source.split(quant.SLAB), sent, strict=True):
            codec.encode(part, quant.BLOCK, encoded)

    def decode() -> None:
        for part, encoded in zip(target.split(quant.SLAB), sent, strict=True):
            codec.decode(encoded, quant.BLOCK, part)

    copy = partial(target.copy_, source)
    for what, function, goal in (("encode", encode, 2.5), ("decode", decode, 1.1)):
        times = take_turns({"limit": copy, "ours": function}, turns)
        yield row(f"int8 {what}, {len(source) // MIB} Mi elements", "s", times, limit=goal)


# ---------------------------------------------------------------- the wire


def leave_for_shaped_network(gbit: int) -> None:
    """Move this thread, and what it starts, into a network of its own: loopback with this rate.

    It vanishes with the last process in it; nothing outside is touched.
    """
    if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
        raise PermissionError("a shaped link needs root, and iproute2")
    rate = f"rate {gbit}gbit burst 256kb limit 16mb"
    shape = f"ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf {rate}"
    subprocess.run(shape, shell=True, check=True)


def averaged(numel: int, turns: int) -> Samples:
    """One rank of 4: an fp32 all-reduce and the mean in every codec; the slowest rank counts."""
    ranks, _ = diloco.connect(4)
    delta = torch.randn(numel)

    def mean(wire: diloco.Wire) -> None:
        for chunk, part in wire.mean([[delta]], [True] * ranks.world):
            delta[chunk.start : chunk.stop].copy_(part)

    def together(function: Callable[[], Any]) -> float:
        dist.barrier()
        began = time.perf_counter()
        function()
        dist.barrier()
        return time.perf_counter() - began

    functions: dict[str, Callable[[], Any]] = {"all_reduce": partial(dist.all_reduce, delta)}
    for name, codec in quant.CODECS.items():
        functions[name] = partial(mean, diloco.Wire(ranks, codec, [numel]))
    times = take_turns(functions, turns, together)
    ranks.leave()
    return times


def bench_wire(quick: bool) -> Iterator[list[str]]:
    """The mean of 4 ranks against an fp32 all-reduce, on 1 Gbit/s a rank."""
    numel, turns = 2_000_000 if quick else 10_000_000, 5
    leave_for_shaped_network(4)
    times = launch(averaged, 4, numel, turns)[0]
    for name, goal in {"fp32": 1.15, "bf16": 0.53, "int8": 0.26}.items():
        # Every rank sends 3/4 of its encoding, then its quarter of the mean to 3 others.
        bits = 2 * 3 / 4 * quant.payload_bytes(quant.CODECS[name], [numel]) * 8
        samples = {"limit": [bits / 1e9] * turns, "plain": times["all_reduce"], "ours": times[name]}
        yield row(f"1 Gbit/s, {name}, 4 ranks, {numel:,} elements", "s", samples, plain=goal)


# ---------------------------------------------------------------- the local step


class FullLogits(Transformer):
    """Plain: the same model with the logits of all positions at once, as in nanoGPT."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed loss."""
        logits = self.logits(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


LARGE = ModelConfig(50_304, 128, 4, 4, 4, 320, tied=True)  # `tiny` with GPT-2's vocabulary
KINDS = {"plain": FullLogits, "ours": Transformer}


def random_batch(config: ModelConfig, sequences: int, length: int) -> Batch:
    """Random tokens; every position counts."""
    tokens = torch.randint(config.vocab_size, (sequences, length + 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], sequences * length, ())


def stepper(kind: str) -> Callable[[], None]:
    """One local step of one worker, as a run takes it; the plain one with glibc as it comes."""
    network = KINDS[kind](LARGE)
    network.init_weights(0)
    workers, batch = workers_on(network), random_batch(LARGE, 8, 256)

    def step() -> None:
        diloco.keep_freed_memory(kind == "ours")
        workers.begin(1)
        workers.step(0, batch, 1e-4)

    return step


def step_memory(kind: str) -> float:
    """Peak memory of two local steps, beyond the interpreter and the libraries, MiB."""
    before, step = peak_memory(), stepper(kind)
    step()
    step()
    return peak_memory() - before


def bench_step(quick: bool) -> Iterator[list[str]]:
    """The local step with a large vocabulary, against full logits."""
    what = "50k vocabulary, width 128, 8 x 256, fp32"
    times = take_turns({kind: stepper(kind) for kind in KINDS}, 1 if quick else 5)
    yield row(f"local step, {what}", "s", times, plain=0.71)
    peaks = {kind: launch(step_memory, 1, kind) for kind in KINDS}
    yield row(f"peak memory with AdamW, {what}", "MiB", peaks, plain=0.45)


# ---------------------------------------------------------------- start-up


def first_line() -> float:
    """Seconds from the start of `train.py` to its first progress line."""
    command, began = [sys.executable, train.__file__, "--steps", "40"], time.perf_counter()
    streams: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "bufsize": 0}
    with tempfile.TemporaryDirectory() as folder:
        process, shown = subprocess.Popen(command, cwd=folder, **streams), b""
        assert process.stderr
        while b"/40 [" not in shown and (more := process.stderr.read(999)):
            shown += more  # the bar's line has no end until the next one is drawn
        taken = time.perf_counter() - began
        assert b"/40 [" in shown, shown
        process.terminate()
        process.communicate()
    return taken


def bench_start(quick: bool) -> Iterator[list[str]]:
    """Time to the first progress line."""
    turns = 1 if quick else 5
    first = {"limit": [5.0] * turns, "ours": [first_line() for _ in range(turns)]}
    yield row("first progress line of train.py, corpus warm", "s", first, limit=1.0)


# ---------------------------------------------------------------- command line

BENCHES = {
    bench.__name__.removeprefix("bench_"): bench
    for bench in (bench_sync, bench_codec, bench_wire, bench_step, bench_memory, bench_start)
}


def main(argv: list[str]) -> int:
    """Run one command and print its table; 1 where a goal is missed."""
    parser = argparse.ArgumentParser("bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md too")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # as a rank of a run has it on a CPU
    diloco.keep_freed_memory()
    text = evaluation.table(HEAD, BENCHES[given.name](given.quick))
    print(text, end="")
    if given.write:
        write_table(f"bench {given.name}", text)
    return 1 if "MISSED" in text else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
