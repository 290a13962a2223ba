"""LLaMA-style transformer: named sizes, summed loss, key-value cache, Hugging Face weights in and out.

    x <- x + W_out attention(rotary(W_qkv norm(x)))
    x <- x + W_down (silu(gate) * up),    [gate, up] = W_gate_up norm(x)

The architecture of the paper's models: RMSNorm before each half of a block, rotary positions (with Llama 3.1's
stretching), SwiGLU, grouped-query attention, tied or untied head, no biases. Three decisions differ from the
common layout, all for speed: query, key and value are one matrix, gate and up are another (the Hugging Face
tensors are their rows, so import and export only cut and join); and the loss of a large vocabulary never
builds the (B, T, V) logits.

Letters in shapes: B sequences, T positions, C width, D width of a head, H query heads, G key-value heads,
N positions whose target counts, V vocabulary.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # target of a position that does not count, as in data.py
LARGE_VOCABULARY = 4096  # above it the loss is chunked
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}  # logits that the chunked loss holds at once
CACHE_BYTES = 2**21  # of them, fp32, in a CPU's cache
PLAIN_ATTENTION = 512  # longest sequence for which plain bf16 attention beats the CPU's fused kernel


import os
SPARSE=bool(int(os.environ.get('SPARSE','0')))
@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary wavelengths beyond the length of pre-training.

    Wavelengths above `original / low_freq_factor` positions grow by `factor`, those below
    `original / high_freq_factor` stay, those between are interpolated.

    Source: transformers, `modeling_rope_utils._compute_llama3_parameters`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # positions

    def __post_init__(self) -> None:
        """Raises ValueError for factors that do not describe a stretching."""
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError("rope_scaling needs 0 < low_freq_factor < high_freq_factor")
        if self.factor <= 0 or self.original_max_position_embeddings < 1:
            raise ValueError("rope_scaling needs a positive factor and original length")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a transformer; `ModelConfig(**json)` reads what `dataclasses.asdict` wrote."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int  # key-value heads, each shared by heads / kv_heads query heads
    ffn_width: int
    tied: bool  # the head is the embedding
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    max_seq_len: int = 1024  # positions

    def __post_init__(self) -> None:
        """Raises ValueError where the numbers do not make a model."""
        if isinstance(self.rope_scaling, dict):  # from JSON
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "ffn_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not an even multiple of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads")

    @property
    def head_dim(self) -> int:
        """D, width of one attention head."""
        return self.width // self.heads


SIZES = {
    # 788,608 parameters: SwiGLU width 2.5 x, which multiples of 64 make cheap on a CPU
    "tiny": ModelConfig(264, 128, 4, 4, 4, 320, tied=True),
    # A19: 215.3M parameters; the vocabulary is GPT-2's 50,257 padded to a multiple of 64
    "215m": ModelConfig(50_304, 1024, 13, 16, 16, 2736, tied=True),
    "llama3.1-8b": ModelConfig(
        128_256, 4096, 32, 32, 8, 14_336, False, 500_000.0, RopeScaling(8, 1, 4, 8192), 1e-5, 131_072
    ),
}


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the rotary positions 0 to length - 1.

        angle(t, i) = t * theta^(-2i/D),    i = 0 .. D/2 - 1, each used for dimensions i and i + D/2

    Args:
        config: model shape; gives theta, D and the optional stretching.
        length: positions.

    Returns:
        cos and sin, both (length, 1, D) fp32 on the CPU; the first half of sin is negated (see `rotate`).

    Source: transformers' half-rotation convention; in fp32 as there, so that logits agree.
    """
    exponent = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent  # (D/2,)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * ((1 - kept) / scaling.factor + kept)
    angle = torch.outer(torch.arange(length, device="cpu").float(), frequency)[:, None]  # (T, 1, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x_i, x_{i+D/2}) by their position's angles.

        [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]

    Args:
        x: (B, T, heads, D), fp32 or bf16.
        cos: (T, 1, D) fp32.
        sin: (T, 1, D) fp32, first half negated, so that swapping the halves is all that is left to do.

    Returns:
        Same shape; fp32 also for bf16 input (bf16 angles would be off by 0.4 %).
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention of the last T of S positions.

    Args:
        q: (B, H, T, D).
        k: (B, G, S, D), S >= T.
        v: (B, G, S, D).

    Returns:
        (B, H, T, D).
    """
    T, S = q.shape[2], k.shape[2]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < S <= PLAIN_ATTENTION:
        # The CPU's fused kernel is 2x slower than this in bf16, backward above all.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        future = torch.full((T, S), -math.inf, dtype=q.dtype).triu(S - T + 1)
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + future, -1) @ v
    mask = None
    if 1 < T < S:  # SDPA's own causal mask starts at the first key, not at the first new one
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=T == S, enable_gqa=q.shape[1] != k.shape[1]
    )


class Cache:
    """Keys and values of the positions read so far, which `Transformer.logits` extends.

    Attributes:
        length: positions read.
        keys: per block (B, G, length, D).
        values: per block (B, G, length, D).
    """

    def __init__(self) -> None:
        """An empty cache, for any model and batch."""
        self.length = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new keys and values (B, G, T, D) of one block; returns all of them (B, G, S, D)."""
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), 2)
            v = torch.cat((self.values[layer], v), 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each on normalised input and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Uninitialised parameters of block number `layer`."""
        super().__init__()
        self.config, self.layer = config, layer
        C, D = config.width, config.head_dim
        self.attention_norm = nn.Parameter(torch.empty(C))
        self.qkv = nn.Parameter(torch.empty((config.heads + 2 * config.kv_heads) * D, C))
        self.out = nn.Parameter(torch.empty(C, C))
        self.mlp_norm = nn.Parameter(torch.empty(C))
        self.gate_up = nn.Parameter(torch.empty(2 * config.ffn_width, C))
        self.down = nn.Parameter(torch.empty(C, config.ffn_width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """The block's output (B, T, C) for the stream x (B, T, C) and the tables of its positions."""
        (B, T, C), H, G = x.shape, self.config.heads, self.config.kv_heads
        qkv = F.linear(F.rms_norm(x, (C,), self.attention_norm, self.config.norm_eps), self.qkv)
        # Queries and keys turn together. split, unlike slices, has a backward without zero fills.
        qk, v = qkv.view(B, T, H + 2 * G, -1).split((H + G, G), 2)
        q, k = rotate(qk, cos, sin).type_as(v).transpose(1, 2).split((H, G), 1)  # (B, H|G, T, D)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        x = x + F.linear(attention(q, k, v).transpose(1, 2).reshape(B, T, C), self.out)
        normed = F.rms_norm(x, (C,), self.mlp_norm, self.config.norm_eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Transformer(nn.Module):
    """The language model. Parameters are uninitialised until `init_weights` or a load.

    Can be built under `torch.device("meta")` and materialised with `to_empty`: it has no buffers. Under FSDP2 shard
    the blocks and then the model itself; embedding, last norm and head belong to the root (the loss reads the
    head's weight directly). `for block in model.blocks: block.compile()` compiles all that is worth it.

    Attributes:
        activation_checkpointing: recompute each block in the backward pass instead of keeping its activations.
    """

    def __init__(self, config: ModelConfig, activation_checkpointing: bool = False) -> None:
        """Builds the parameters without setting them.

        Args:
            config: model shape.
            activation_checkpointing: see the attribute.
        """
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.width))
        if not config.tied:
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self._tables: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Sets every parameter: norms 1, matrices normal with deviation 0.02.

        The projections that write to the stream get 0.02 / sqrt(2 layers), so that its variance does not grow
        with depth. Numbers come from an own CPU generator in parameter order: the same bits on every rank and
        device, sharded (FSDP2) or not, and no other random stream moves.

        Args:
            seed: of the generator.

        Source: GPT-2 (2019), section 2.3; nanoGPT.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, device="cpu")
            if decayed(name, parameter):
                residual = name.endswith((".out", ".down"))
                depth = 2 * self.config.layers if residual else 1
                value.normal_(0.0, 0.02 / math.sqrt(depth), generator=generator)
            assign(parameter, value)

    def hidden(self, inputs: Tensor, cache: Cache | None = None) -> Tensor:
        """Normalised output of the last block.

        Args:
            inputs: (B, T) int64 token ids.
            cache: positions before these, extended in place.

        Returns:
            (B, T, C).

        Raises:
            ValueError: more positions than the model has.
        """
        start = 0 if cache is None else cache.length
        stop = start + inputs.shape[1]
        if stop > self.config.max_seq_len:
            raise ValueError(f"{stop} positions, but the model has {self.config.max_seq_len}")
        # Not buffers: nothing to shard, save or materialise, and Llama's 131,072 positions are never all built.
        if self._tables is None or len(self._tables[0]) < stop or self._tables[0].device != inputs.device:
            length = 1 << (stop - 1).bit_length()
            cos, sin = rotary_tables(self.config, length)
            self._tables = cos.to(inputs.device), sin.to(inputs.device)
        cos, sin = (table[start:stop] for table in self._tables)
        x = F.embedding(inputs, self.embedding, sparse=SPARSE)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin, cache)
        if cache is not None:
            cache.length = stop
        return F.rms_norm(x, (self.config.width,), self.norm, self.config.norm_eps)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed negative log-likelihood of the targets that count.

            sum over targets != -100 of -log p(target | inputs up to it)

        Args:
            inputs: (B, T) int64 token ids.
            targets: (B, T) int64, IGNORE where nothing counts.

        Returns:
            fp32 scalar (fp64 for an fp64 model), in nats; 0 with zero gradients where every target is ignored.
        """
        # Before the blocks: a GPU answers at once, so that the host can run ahead of it later.
        rows = (targets.reshape(-1) != IGNORE).nonzero().squeeze(1)  # (N,)
        return summed_loss(
            self.hidden(inputs).flatten(0, 1), self._head_weight(), targets.reshape(-1), rows
        )

    def logits(self, inputs: Tensor, cache: Cache | None = None, last: bool = False) -> Tensor:
        """Logits of every position, for sampling and evaluation.

        Not `forward`: under FSDP2 register it with `register_fsdp_forward_method`.

        Args:
            inputs: (B, T) int64 token ids.
            cache: positions before these, extended in place.
            last: only of the last position, which is all that sampling needs.

        Returns:
            (B, T, V), or (B, 1, V) with `last`; fp32 at least.
        """
        hidden = self.hidden(inputs, cache)
        return _widen(F.linear(hidden[:, -1:] if last else hidden, self._head_weight()))

    def _head_weight(self) -> Tensor:
        return self.embedding if self.config.tied else self.head


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """Sum of -log softmax(hidden @ weight^T)[target] over some rows.

    Args:
        hidden: (rows in all, C).
        weight: (V, C) of the head.
        targets: (rows in all,) int64.
        rows: (N,) int64, the rows that count.

    Returns:
        Scalar, fp32 at least.
    """
    if len(weight) > LARGE_VOCABULARY:
        return _ChunkedLoss.apply(hidden, weight, targets, rows, torch.is_grad_enabled())
    if len(rows) < len(hidden):
        hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
    return F.cross_entropy(_widen(F.linear(hidden, weight)), targets, reduction="sum")


class _ChunkedLoss(torch.autograd.Function):
    """`summed_loss` that holds the logits of a few rows at a time.

    The forward pass also computes the gradients, since the logits are at hand: p - 1[target] times weight or
    hidden. The backward pass only scales them.

    Source: the idea of Liger Kernel's fused linear cross-entropy (arXiv:2410.10989, section 3.2).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, training: bool
    ) -> Tensor:
        device, V = hidden.device.type, len(weight)
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        wide = torch.promote_types(weight.dtype, torch.float32)
        narrow = weight.to(dtype)
        size = max(1, CHUNK_BYTES[device] // (V * dtype.itemsize))
        block = max(1, CACHE_BYTES // (V * wide.itemsize)) if device == "cpu" else size
        buffer = torch.empty(min(size, max(1, len(rows))), V, dtype=dtype, device=hidden.device)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden, grad_weight = torch.zeros_like(hidden) if training else None, None
        with torch.autocast(device, enabled=False):
            for chunk in rows.split(size):
                inputs = hidden[chunk].to(dtype)  # (n, C)
                logits = torch.mm(inputs, narrow.T, out=buffer[: len(chunk)])  # (n, V)
                # Few rows at a time through the softmax: on a CPU they never leave the cache.
                for part, target in zip(logits.split(block), targets[chunk, None].split(block), strict=True):
                    logp = torch.log_softmax(part, -1, dtype=wide)
                    loss -= logp.gather(1, target).sum()
                    if training:  # the gradient p - 1[target] takes the place of the logits
                        part.copy_(logp.exp_().scatter_add_(1, target, logp.new_full(target.shape, -1)))
                if training:
                    grad_hidden[chunk] = (logits @ narrow).to(hidden.dtype)
                    if grad_weight is None:
                        grad_weight = (logits.T @ inputs).to(wide)
                    elif dtype == wide:
                        grad_weight.addmm_(logits.T, inputs)
                    else:
                        grad_weight += logits.T @ inputs
        if training and grad_weight is None:  # nothing counts
            grad_weight = torch.zeros_like(weight, dtype=wide)
        ctx.gradients, ctx.dtype = (grad_hidden, grad_weight), weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the chunked loss can be differentiated once"
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        grad_hidden.mul_(scale)
        return grad_hidden, grad_weight.mul_(scale).to(ctx.dtype), None, None, None


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copies a full tensor into a parameter, or this rank's part of it into an FSDP2 shard.

    Args:
        parameter: changed in place; a plain tensor or a DTensor.
        value: same full shape; the same on every rank, since nothing is communicated.
    """
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shape of every parameter in the order of `named_parameters`; a tied head counts once; allocates nothing."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters.

    >>> parameter_count(SIZES["llama3.1-8b"])
    8030261248
    """
    return sum(shape.numel() for shape in parameter_shapes(config).values())


def decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, the embedding included, not to norms (A17)."""
    return parameter.ndim >= 2
