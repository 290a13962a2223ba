"""Codecs for pseudo-gradients on the wire: fp32, bf16 and blockwise int8 (G).

Every codec turns a 1-D fp32 chunk into a fixed number of bytes and back. The result depends only on
shapes and values: not on threads, ranks or how many chunks share a buffer. There is no error
feedback: what a round trip loses is lost (G).

| codec | bytes for n elements of one tensor | error of an element x                               |
|-------|------------------------------------|-----------------------------------------------------|
| fp32  | 4 n                                | none, bit for bit                                   |
| bf16  | 2 n                                | 2**-8 |x| (2**-134 where x is subnormal)            |
| int8  | n + 4 ceil(n / 4096)               | scale/2 of its block, plus 2**-16 scale of rounding |
"""

import math
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
    """Elements start to stop of a flattened tensor, in blocks of equal length."""

    tensor: int  # index of the tensor in the list that was cut
    start: int
    stop: int
    block: int  # elements of each block; it divides stop - start


def chunks(numels: Sequence[int], slab: int = SLAB) -> list[Chunk]:
    """Cut every tensor into slabs of whole blocks and a ragged tail, which is a block of its own.

    All ranks must pass the same numbers, of local shards where parameters are sharded. `slab`, a
    multiple of BLOCK, changes speed and the order of bytes in a message, never a decoded value.

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
    """What every codec does; it has no state, and reads no value back to the host.

    Chunks can lie one after the other in one buffer: bf16 needs an even offset, which its own give.
    """

    name: str  # for the command line and the log
    element_bytes: int
    block_bytes = 0

    def nbytes(self, chunk: Chunk) -> int:
        """Encoded bytes of one chunk."""
        numel = chunk.stop - chunk.start
        return self.element_bytes * numel + self.block_bytes * (numel // chunk.block)

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Write the encoding of `source`, (n,) fp32, over all of `out`, (nbytes,) uint8."""
        raise NotImplementedError

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Write the decoded numbers over all of `out`, (n,) fp32, and return it."""
        raise NotImplementedError


class Float32(Codec):
    """The bytes of the numbers themselves: exact, zeros' signs and NaN payloads included."""

    name, element_bytes = "fp32", 4

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Copy as bytes: `out` may start where fp32 could not, behind an int8 tail."""
        out.copy_(source.view(torch.uint8))

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Copy back."""
        out.view(torch.uint8).copy_(encoded)
        return out


class BFloat16(Codec):
    """The upper half of the fp32 number, rounded to nearest, ties to even, as IEEE has it.

    inf and NaN stay; a finite |x| >= (2 - 2**-8) 2**127 rounds up to inf.
    """

    name, element_bytes = "bf16", 2

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Round; `out` must start at an even byte of its storage."""
        out.view(torch.bfloat16).copy_(source)

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Widen, exactly."""
        return out.copy_(encoded.view(torch.bfloat16))


class Int8(Codec):
    """Blocks of int8 with one fp32 scale each; on the wire all scales come first, then the values.

        scale = absmax / 127 + 2**-126               G, A24; the scale of an all-zero block is 0
        q     = clip(round(x / scale), -127, 127)    half to even
        x'    = q * scale
        |x - x'| <= scale (1/2 + 2**-16)             every element of a finite block

    The 2**-126, fp32's smallest normal number, keeps x / scale in range for subnormal numbers; it
    is rounded away where absmax is above 2**-94. A block below 2**-143 counts as zeros. One with
    inf or NaN decodes to NaN as a whole. fp32's largest number overflows to inf.
    """

    name, element_bytes, block_bytes = "int8", 1, 4

    def encode(self, source: Tensor, block: int, out: Tensor) -> None:
        """Scale, divide and round block by block."""
        head, body = self._split(out, source.numel(), block)
        rows = source.view(-1, block)
        # amax and amin straight from the source beat abs() and one reduction, which writes a copy;
        # torch.aminmax and vector_norm(inf) are not vectorised: over ten times slower.
        absmax = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
        scale = absmax.div_(LEVELS).add_(SMALLEST_NORMAL)
        scale.nan_to_num_(nan=math.nan, posinf=math.nan)  # q * inf would be +-inf for some q
        # Only an all-zero block has no more than the guard. It sends 0, but divides by the guard.
        head.copy_(torch.threshold(scale, SMALLEST_NORMAL, 0.0).view(-1).view(torch.int8))
        # No clip is needed: scale >= (1 - 2**-24) absmax / 127 keeps |x / scale| below 127.5.
        body.copy_((rows / scale).round_().view(-1))

    def decode(self, encoded: Tensor, block: int, out: Tensor) -> Tensor:
        """Widen into `out` and scale there: int8 times fp32 would allocate a fp32 copy."""
        head, body = self._split(encoded, out.numel(), block)
        # Scales are copied as bytes first: behind a tail of odd length they lie at an odd address.
        scale = head.clone().view(torch.float32).view(-1, 1)
        out.copy_(body).view(-1, block).mul_(scale)
        return out

    @staticmethod
    def _split(encoded: Tensor, numel: int, block: int) -> tuple[Tensor, ...]:
        """Scale bytes and values of an encoding, both as int8 views."""
        head = 4 * (numel // block)
        assert encoded.numel() == head + numel and numel % block == 0, (
            f"{numel} elements in blocks of {block} do not encode to {encoded.numel()} bytes"
        )
        return encoded.view(torch.int8).split_with_sizes((head, numel))


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}


def payload_bytes(codec: Codec, numels: Sequence[int]) -> int:
    """Bytes of one encoded pseudo-gradient, the logical payload: one direction, per worker.

        fp32: sum 4 n;   bf16: sum 2 n;   int8: sum (n + 4 ceil(n / 4096))       G

    >>> payload_bytes(CODECS["int8"], [4097, 1, 0])
    4110
    """
    slab = BLOCK * (max(numels, default=0) // BLOCK + 1)  # at most two chunks a tensor
    return sum(codec.nbytes(chunk) for chunk in chunks(numels, slab))
