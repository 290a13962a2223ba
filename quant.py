"""Codecs for pseudo-gradients on the wire: fp32, bf16 and blockwise int8 (G).

Every codec turns a 1-D fp32 chunk into a fixed number of bytes and back. What a chunk is
(`chunks`), how many bytes it takes (`Codec.nbytes`) and what the numbers are afterwards depends
only on shapes and values: not on threads, on ranks or on how many chunks share a buffer. This file
knows no process groups.

| codec | bytes for n elements of one tensor | error of an element x                               |
|-------|------------------------------------|-----------------------------------------------------|
| fp32  | 4 n                                | none, bit for bit                                   |
| bf16  | 2 n                                | 2**-8 |x| (2**-134 where x is subnormal)            |
| int8  | n + 4 ceil(n / 4096)               | scale/2 of its block, plus 2**-16 scale of rounding |

No error feedback: what a round trip loses is lost (G). Averaging in fp32 is the caller's.

Source: the paper's appendix G; the fp32 scale absmax / 127 is A24.
"""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096  # elements that share one int8 scale, G
SLAB = 64 * BLOCK  # elements of the largest chunk: source and scratch stay in a core's cache
GPU_SLAB = 8 * SLAB  # the same on a GPU, where a chunk costs about ten kernel launches

LEVELS = 127.0  # int8 is used symmetrically: -127 .. 127, never -128
SMALLEST_NORMAL = 2.0**-126  # of fp32


class Chunk(NamedTuple):
    """A run of whole blocks of equal length inside one tensor: the unit of encoding.

    Attributes:
        tensor: index of the tensor in the list that was cut.
        start: first element, an offset into the flattened tensor.
        stop: one past the last element.
        block: elements of each block; it divides stop - start.
    """

    tensor: int
    start: int
    stop: int
    block: int


def chunks(numels: Sequence[int], slab: int = SLAB) -> list[Chunk]:
    """Cut every tensor into slabs of whole blocks and a ragged tail.

    Blocks are cut inside each tensor (G), so a chunk never crosses one. The last
    numel % BLOCK elements are a chunk of their own, with one block of that length. An empty tensor
    gives no chunk, a 0-d tensor (numel 1) one of a single element.

    Args:
        numels: elements of each tensor, in the order in which they travel; of each local shard
            where parameters are sharded. All ranks must pass the same numbers.
        slab: elements of the largest chunk, a multiple of BLOCK. It changes speed and the order of
            bytes inside the message, never a decoded value.

    Returns:
        Chunks ordered by tensor, then by start; together they cover every element once.

    >>> chunks([1, 0, 9000])  # doctest: +NORMALIZE_WHITESPACE
    [Chunk(tensor=0, start=0, stop=1, block=1),
     Chunk(tensor=2, start=0, stop=8192, block=4096),
     Chunk(tensor=2, start=8192, stop=9000, block=808)]
    """
    assert slab > 0 and slab % BLOCK == 0, f"slab {slab} is not a multiple of {BLOCK}"
    cut = []
    for tensor, numel in enumerate(numels):
        full = numel - numel % BLOCK
        for start in range(0, full, slab):
            cut.append(Chunk(tensor, start, min(start + slab, full), BLOCK))
        if full < numel:
            cut.append(Chunk(tensor, full, numel, numel - full))
    return cut


class Codec:
    """What every codec does: a chunk of fp32 numbers to a fixed number of bytes and back.

    A codec has no state. The chunks of a message can lie one after the other in one uint8 buffer
    without padding: int8 and fp32 read and write at any byte offset, bf16 needs an even one, which
    it always finds as its own chunks are even. Nothing here reads a value back to the host, so on a
    GPU both directions only queue kernels.

    Attributes:
        name: word for the command line and the log.
    """

    name: str

    def nbytes(self, chunk: Chunk) -> int:
        """Encoded bytes of one chunk; additive over the blocks, however they are grouped."""
        raise NotImplementedError

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Write the encoding of `source` over all of `out`.

        Args:
            source: one chunk, (n,) fp32, contiguous, unchanged. No gradient flows: call it on
                tensors that require none, or under no_grad.
            block: elements of each block, `Chunk.block`; it divides n.
            out: (nbytes,) uint8, contiguous, on the same device; overwritten.
        """
        raise NotImplementedError

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Write the decoded numbers over all of `out`.

        Args:
            encoded: (nbytes,) uint8, contiguous, as `encode` wrote it; unchanged.
            block: elements of each block, as for `encode`.
            out: (n,) fp32, contiguous, on the same device; overwritten. It must not share memory
                with `encoded`.

        Returns:
            `out`.
        """
        raise NotImplementedError


class Float32(Codec):
    """The bytes of the numbers themselves: exact, zeros' signs and NaN payloads included."""

    name = "fp32"

    def nbytes(self, chunk: Chunk) -> int:
        """4 bytes an element."""
        return 4 * (chunk.stop - chunk.start)

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Copy. As bytes, because `out` may start where fp32 could not: behind an int8 tail."""
        out.copy_(source.view(torch.uint8))

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Copy back."""
        out.view(torch.uint8).copy_(encoded)
        return out


class BFloat16(Codec):
    """The upper half of the fp32 number, rounded to nearest, ties to even.

        |x - decode(encode(x))| <= 2**-8 |x|         normal x

    Constants, outliers and zeros (with their sign) do not influence their neighbours. Subnormals
    are kept to within 2**-134 (half of bf16's own smallest). inf and NaN stay what they are (a NaN
    may lose its payload); a finite |x| >= (2 - 2**-8) 2**127 rounds up to inf, as IEEE has it.
    """

    name = "bf16"

    def nbytes(self, chunk: Chunk) -> int:
        """2 bytes an element."""
        return 2 * (chunk.stop - chunk.start)

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Round; `out` must start at an even byte of its storage (torch refuses an odd one)."""
        out.view(torch.bfloat16).copy_(source)

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Widen, exactly."""
        return out.copy_(encoded.view(torch.bfloat16))


class Int8(Codec):
    """Blocks of int8 with one fp32 scale each.

        scale = absmax / 127 + 2**-126               G, A24; the scale of an all-zero block is 0
        q     = clip(round(x / scale), -127, 127)    half to even
        x'    = q * scale

    On the wire: the fp32 scales of the chunk's blocks in native byte order, then its int8 values.

    The 2**-126 (fp32's smallest normal number) is a guard. Rounding absorbs it wherever absmax is
    above 2**-94 (5e-29): there the scale is absmax / 127, bit for bit. It is for subnormal
    quotients, which keep a few bits or none: x / scale would leave the int8 range or be x / 0.

    Bound, for every element of a finite block:

        |x - x'| <= scale (1/2 + 2**-16)

    1/2 from rounding to integers, the rest from fp32's rounding of x / scale (2**-18) and of
    q * scale (2**-17). On Gaussian data the relative L2 error is 0.87 % after one encode and 1.23 %
    after the mean's, too. Specials:

    - Zeros: scale 0, decodes to +0. An element that is zero stays zero in any block.
    - Constants: every element is +-absmax, q is +-127, the error is rounding only: 2**-22 |x|
      wherever the guard is absorbed.
    - An outlier sets the scale of its block and of no other: beside 1e6 everything below 3937 in
      magnitude becomes zero.
    - Subnormals: in a block of nothing else the scale is below 2**-125, and so the error is below
      2**-126. A block below 2**-143 (1e-43) in magnitude counts as all-zero.
    - inf or NaN anywhere in a block: its scale is NaN and the whole block decodes to NaN, so that
      it is seen; the other blocks are untouched. The int8 values of such a block mean nothing.
    - The one finite number that overflows is fp32's largest itself: 127 * scale rounds up to inf.
    """

    name = "int8"

    def nbytes(self, chunk: Chunk) -> int:
        """One byte an element and four a block."""
        numel = chunk.stop - chunk.start
        return numel + 4 * (numel // chunk.block)

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Two reads of `source`, the second from the cache; allocates nothing after its first call.

        Raises:
            AssertionError: `out` has not the size that `nbytes` gives.
        """
        head, body = self._split(out, source.numel(), block)
        work = _WORKSPACE.get(source, block)
        rows = source.view(-1, block)
        # The largest and the negated smallest element are the candidates for absmax. Two reductions
        # straight from the source beat abs() and one, which writes a copy of it; torch.aminmax and
        # vector_norm(inf) would be one pass, and are not vectorised: over ten times slower.
        torch.amax(rows, 1, keepdim=True, out=work.high)
        torch.amin(rows, 1, keepdim=True, out=work.low)
        torch.addcdiv(work.guard, work.extremes, work.divisors, out=work.extremes)
        scale = torch.maximum(work.high, work.low, out=work.high)
        scale.nan_to_num_(nan=math.nan, posinf=math.nan)  # q * inf would be +-inf for some q
        # Only an all-zero block has no more than the guard. It sends 0, but divides by the guard.
        torch.threshold(scale, SMALLEST_NORMAL, 0.0, out=work.scales)
        # Divide: multiplying by 1 / scale rounds once more, so that q would differ from the plain
        # formula's near ties, and takes the same time, as memory is the limit. No clip is needed:
        # scale >= (1 - 2**-24) absmax / 127 keeps |x / scale| below 127.5.
        torch.div(rows, scale, out=work.rows).round_()
        body.copy_(work.flat)
        head.copy_(work.scale_bytes)

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Widen into `out`, then scale it there: int8 times fp32 would allocate a fp32 copy.

        Raises:
            AssertionError: `encoded` has not the size that `nbytes` gives.
        """
        head, body = self._split(encoded, out.numel(), block)
        work = _WORKSPACE.get(out, block)
        work.scale_bytes.copy_(head)
        out.copy_(body).view(-1, block).mul_(work.scales)
        return out

    @staticmethod
    def _split(encoded: Tensor, numel: int, block: int) -> tuple[Tensor, ...]:
        """Scale bytes and values of an encoding, both as int8 views.

        The scales are only ever copied as bytes: behind a tail of odd length they lie at an odd
        address, which cannot be viewed as fp32.
        """
        head = 4 * (numel // block)
        assert encoded.numel() == head + numel and numel % block == 0, (
            f"{numel} elements in blocks of {block} do not encode to {encoded.numel()} bytes"
        )
        return encoded.view(torch.int8).split_with_sizes((head, numel))


class _Views(NamedTuple):
    """Scratch of one shape (blocks, block): fp32 unless said otherwise."""

    rows: Tensor  # (blocks, block), x / scale
    flat: Tensor  # (blocks * block,), the same memory
    extremes: Tensor  # (2, blocks, 1), `high` above `low`
    high: Tensor  # (blocks, 1)
    low: Tensor  # (blocks, 1)
    scales: Tensor  # (blocks, 1), as they travel
    scale_bytes: Tensor  # (4 * blocks,) int8, the same memory as `scales`
    divisors: Tensor  # (2, 1, 1), 127 and -127
    guard: Tensor  # (), 2**-126


class _Workspace(threading.local):
    """Scratch memory of int8, one of the largest chunk's size per thread and device.

    The views are kept too: a slab's encode takes tens of microseconds, and one view takes one. Work
    queued on several CUDA streams by one thread would share the scratch: keep to one stream.
    """

    MOST_SHAPES = 256  # one per count of blocks and per length of a tail; then start over

    def __init__(self) -> None:
        self.memory: dict[torch.device, Tensor] = {}
        self.views: dict[tuple[torch.device, int, int], _Views] = {}

    def get(self, like: Tensor, block: int) -> _Views:
        """Scratch for the chunk `like`; its contents are whatever the last user left."""
        key = (like.device, like.numel(), block)
        if key not in self.views:
            self.views[key] = self._make(*key)
        return self.views[key]

    # Tensors made in inference mode could not be written to outside of it.
    @torch.inference_mode(mode=False)
    def _make(self, device: torch.device, numel: int, block: int) -> _Views:
        if device not in self.memory or self.memory[device].numel() < numel:
            self.memory[device] = torch.empty(max(numel, SLAB), device=device)
            self.views.clear()  # they would keep the smaller memory alive
        if len(self.views) >= self.MOST_SHAPES:
            self.views.clear()
        flat = self.memory[device][:numel]
        statistics = torch.empty(3, numel // block, 1, device=device)
        return _Views(
            rows=flat.view(-1, block),
            flat=flat,
            extremes=statistics[:2],
            high=statistics[0],
            low=statistics[1],
            scales=statistics[2],
            scale_bytes=statistics[2].view(-1).view(torch.int8),
            divisors=torch.tensor([LEVELS, -LEVELS], device=device).view(2, 1, 1),
            guard=torch.tensor(SMALLEST_NORMAL, device=device),
        )


_WORKSPACE = _Workspace()

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}


def payload_bytes(codec: Codec, numels: Sequence[int]) -> int:
    """Logical payload: bytes of one encoded pseudo-gradient, one direction, per worker.

        fp32: sum 4 n;   bf16: sum 2 n;   int8: sum (n + 4 ceil(n / 4096))       G

    Args:
        codec: one of CODECS.
        numels: elements of each tensor (each local shard where parameters are sharded).

    Returns:
        Bytes; what the network really carries depends on the schedule and is counted there.

    >>> payload_bytes(CODECS["int8"], [4097, 1, 0])
    4110
    """
    slab = BLOCK * (max(numels, default=0) // BLOCK + 1)  # at most two chunks a tensor
    return sum(codec.nbytes(chunk) for chunk in chunks(numels, slab))
