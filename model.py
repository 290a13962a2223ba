"""LLaMA-style transformer: sizes by name, summed loss, key-value cache, Hugging Face weights.

    x <- x + W_out attention(rotary(W_qkv norm(x)))
    x <- x + W_down (silu(gate) * up),    [gate, up] = W_gate_up norm(x)

The architecture of the paper's models: RMSNorm before each half of a block, rotary positions
(with Llama 3.1's stretching), SwiGLU, grouped-query attention, tied or untied head, no biases.
Two things differ from the common layout, both for speed. Query, key and value are one matrix,
gate and up are another; the Hugging Face tensors are their rows, so that import and export
only join and cut. And the loss of a large vocabulary never builds the (B, T, V) logits.

Letters in shapes: B sequences, T positions, C width, D width of a head, H query heads, G
key-value heads, V vocabulary, N positions whose target counts.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # target of a position that does not count, as in data.py
LARGE_VOCABULARY = 4096  # tokens; above it the loss is chunked
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}  # logits that the chunked loss holds at once
CACHE_BYTES = 2**21  # of them, what passes through the softmax together on a CPU
PLAIN_ATTENTION = 512  # positions up to which plain bf16 attention beats the CPU's fused kernel


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary wavelengths for texts longer than in pre-training.

    Wavelengths above original / low_freq_factor positions grow by `factor`, those below
    original / high_freq_factor stay, those between are interpolated (see `rotary_tables`).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # positions


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a transformer. `ModelConfig(**json)` reads what `dataclasses.asdict` wrote."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int  # each serves heads / kv_heads query heads
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
        if self.width % (2 * self.heads):  # rotary turns pairs
            raise ValueError(f"width {self.width} does not give {self.heads} heads of even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads")

    @property
    def head_dim(self) -> int:
        """D, width of one attention head."""
        return self.width // self.heads


SIZES = {
    # 788,608 parameters
    "tiny": ModelConfig(264, 128, 4, 4, 4, 320, tied=True),
    # 215.3M parameters; GPT-2's vocabulary of 50,257 padded to a multiple of 64: A19
    "215m": ModelConfig(50_304, 1024, 13, 16, 16, 2736, tied=True),
    "llama3.1-8b": ModelConfig(
        128_256, 4096, 32, 32, 8, 14_336, tied=False, max_seq_len=131_072,
        rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
}  # fmt: skip


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the positions 0 to length - 1.

        angle(t, i) = t f_i,    f_i = theta^(-2i/D),    i = 0 .. D/2 - 1

    With stretching f_i becomes f_i ((1 - s_i) / factor + s_i), where s_i runs from 0 at the
    longest wavelengths to 1 at the shortest:

        s_i = clamp((original f_i / 2 pi - low) / (high - low), 0, 1)

    Args:
        config: model shape; gives theta, D and the optional stretching.
        length: positions.

    Returns:
        cos and sin, (length, 1, D) fp32 on the CPU, each angle at i and at i + D/2; the first
        half of sin is negated (see `rotate`).

    Source: transformers, `modeling_rope_utils`; in fp32 as there, so that logits agree.
    """
    exponent = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent  # (D/2,)
    if config.rope_scaling is not None:
        rope = config.rope_scaling
        low, high = rope.low_freq_factor, rope.high_freq_factor
        turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * ((1 - kept) / rope.factor + kept)
    angle = torch.outer(torch.arange(length, device="cpu").float(), frequency)  # (T, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i + D/2}) by the angle of its position.

        [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]

    Args:
        x: (B, T, heads, D), fp32 or bf16.
        cos: (T, 1, D) fp32.
        sin: (T, 1, D) fp32, its first half negated: then swapping the halves of x suffices.

    Returns:
        (B, T, heads, D); fp32 for bf16 too, whose own cosines would be off by 0.4 %.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the stream x (..., C); the weight (C,) is bf16 where FSDP2 gathers it as such."""
    return F.rms_norm(x, weight.shape, weight.type_as(x), eps)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention; the queries are the last T of S positions.

    Args:
        q: (B, H, T, D).
        k: (B, G, S, D), S >= T.
        v: (B, G, S, D).

    Returns:
        (B, H, T, D).
    """
    (H, T, D), (G, S) = q.shape[1:], k.shape[1:3]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and S <= PLAIN_ATTENTION:
        # In bf16 the CPU's fused kernel takes twice as long, mostly in its backward pass.
        k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
        future = torch.full((T, S), -math.inf, dtype=q.dtype).triu(S - T + 1)
        return torch.softmax(q @ k.mT * D**-0.5 + future, -1) @ v
    mask = None
    if 1 < T < S:  # is_causal would let the first query see the first key only
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    causal = T == S
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=H != G)


class Cache:
    """Keys and values of the positions read so far; `Transformer.logits` extends it.

    Attributes:
        length: positions read.
        keys: one (B, G, length, D) a block.
        values: the same.
    """

    def __init__(self) -> None:
        """An empty cache, for any model and batch."""
        self.length = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends (B, G, T, D) keys and values of one block and returns all, (B, G, S, D)."""
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), 2)
            v = torch.cat((self.values[layer], v), 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each of the normalised stream and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Parameters of block number `layer`, not set."""
        super().__init__()
        self.config, self.layer = config, layer
        C, D, ffn = config.width, config.head_dim, config.ffn_width
        self.attention_norm = nn.Parameter(torch.empty(C))
        self.qkv = nn.Parameter(torch.empty((config.heads + 2 * config.kv_heads) * D, C))
        self.out = nn.Parameter(torch.empty(C, C))
        self.mlp_norm = nn.Parameter(torch.empty(C))
        self.gate_up = nn.Parameter(torch.empty(2 * ffn, C))
        self.down = nn.Parameter(torch.empty(C, ffn))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """The stream after this block.

        Args:
            x: (B, T, C), the stream.
            cos: (T, 1, D) fp32, from `rotary_tables` for the T positions.
            sin: the same.
            cache: of earlier positions, extended in place.

        Returns:
            (B, T, C).
        """
        (B, T, C), H, G = x.shape, self.config.heads, self.config.kv_heads
        normed = normalise(x, self.attention_norm, self.config.norm_eps)
        # Queries and keys turn together. Unlike slices, split has a backward without zero fills.
        qk, v = F.linear(normed, self.qkv).view(B, T, H + 2 * G, -1).split((H + G, G), 2)
        q, k = rotate(qk, cos, sin).type_as(v).transpose(1, 2).split((H, G), 1)
        v = v.transpose(1, 2)  # now q is (B, H, T, D), k and v are (B, G, T, D)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        x = x + F.linear(attention(q, k, v).transpose(1, 2).reshape(B, T, C), self.out)

        normed = normalise(x, self.mlp_norm, self.config.norm_eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Transformer(nn.Module):
    """The language model. Parameters hold garbage until `init_weights` or a load sets them.

    It has no buffers, so it can be built under `torch.device("meta")` and materialised by
    `to_empty`. For FSDP2, shard each block and then the model: embedding, last norm and head
    must belong to the root, since the loss reads the head's weight itself. To compile, compile
    the blocks (`for block in model.blocks: block.compile()`); the rest gains nothing.

    Attributes:
        activation_checkpointing: whether the backward pass recomputes each block's
            activations, which are then not kept.
    """

    def __init__(self, config: ModelConfig, activation_checkpointing: bool = False) -> None:
        """Makes the parameters without setting them.

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
        """Sets norms to 1 and matrices to normal numbers of deviation 0.02.

        The projections that write to the stream get 0.02 / sqrt(2 layers): its variance then
        does not grow with depth. The numbers come from an own CPU generator in the order of the
        parameters: the same bits on every rank and device, sharded or not.

        Args:
            seed: of the generator.

        Source: GPT-2 (Radford et al. 2019), section 2.3.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, device="cpu")
            if decayed(name, parameter):
                writers = 2 * self.config.layers if name.endswith((".out", ".down")) else 1
                value.normal_(0.0, 0.02 / math.sqrt(writers), generator=generator)
            assign(parameter, value)

    def hidden(self, inputs: Tensor, cache: Cache | None = None) -> Tensor:
        """The normalised stream after the last block.

        Args:
            inputs: (B, T) int64, token ids.
            cache: of earlier positions, extended in place.

        Returns:
            (B, T, C).

        Raises:
            ValueError: more positions than the model has.
        """
        start = 0 if cache is None else cache.length
        stop = start + inputs.shape[1]
        if stop > self.config.max_seq_len:
            raise ValueError(f"{stop} positions, but the model has {self.config.max_seq_len}")
        cos, sin = self._rotary(start, stop, inputs.device)
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and cache is None
        x = _widen(F.embedding(inputs, self.embedding))  # the stream is fp32 in mixed precision too
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin, cache)
        if cache is not None:
            cache.length = stop
        return normalise(x, self.norm, self.config.norm_eps)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed negative log-likelihood of the targets that count, in nats.

            sum over targets != -100 of -log p(target | inputs so far)

        Args:
            inputs: (B, T) int64, token ids.
            targets: (B, T) int64, token ids, or IGNORE where nothing counts.

        Returns:
            Scalar, fp32 (fp64 for an fp64 model). Where every target is IGNORE it is 0 and so
            are its gradients. It can be differentiated once.

        Raises:
            ValueError: more positions than the model has.
        """
        targets, head = targets.flatten(), self._head()
        if len(head) <= LARGE_VOCABULARY:
            scores = _widen(F.linear(self.hidden(inputs).flatten(0, 1), head))
            return F.cross_entropy(scores, targets, ignore_index=IGNORE, reduction="sum")
        # Before the blocks: here a GPU answers at once, afterwards the host would wait for them.
        rows = (targets != IGNORE).nonzero().squeeze(1)
        hidden = self.hidden(inputs).flatten(0, 1)
        return _ChunkedLoss.apply(hidden, head, targets, rows, torch.is_grad_enabled())

    def logits(self, inputs: Tensor, cache: Cache | None = None, last: bool = False) -> Tensor:
        """Scores of the next token, for sampling and evaluation.

        Under FSDP2, `register_fsdp_forward_method(model, "logits")` first.

        Args:
            inputs: (B, T) int64, token ids; padding, if any, on the right.
            cache: of earlier positions, extended in place.
            last: only after the last position, all that sampling needs.

        Returns:
            (B, T, V), or (B, 1, V) with `last`; fp32 (fp64 for an fp64 model).

        Raises:
            ValueError: more positions than the model has.
        """
        hidden = self.hidden(inputs, cache)
        return _widen(F.linear(hidden[:, -1:] if last else hidden, self._head()))

    def _head(self) -> Tensor:
        return self.embedding if self.config.tied else self.head

    def _rotary(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # Tables grow on demand: Llama's 131,072 positions would take 134 MB. They are no buffers,
        # which FSDP2 and bf16 casts would touch.
        tables = self._tables
        if tables is None or len(tables[0]) < stop or tables[0].device != device:
            with torch.inference_mode(False):  # or training could not use what evaluation made
                cos, sin = rotary_tables(self.config, 1 << (stop - 1).bit_length())
                self._tables = tables = cos.to(device), sin.to(device)
        return tables[0][start:stop], tables[1][start:stop]


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss of the rows that count, with the logits of a few of them at a time.

    While they are at hand, the forward pass takes the gradients too, and the backward pass only
    scales them. With p = softmax(logits) and e = p - 1[target]:

        d loss / d hidden = e weight,    d loss / d weight = e^T hidden

    Source: Hsu et al., Liger Kernel, arXiv:2410.10989 (fused linear cross-entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, training: bool
    ) -> Tensor:
        device, V = hidden.device.type, len(weight)
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype  # of the products
        wide = torch.promote_types(weight.dtype, torch.float32)  # of softmax, loss and sums
        narrow = weight.to(dtype)
        size = max(1, CHUNK_BYTES.get(device, 2**30) // (V * dtype.itemsize))
        block = max(1, CACHE_BYTES // (V * wide.itemsize)) if device == "cpu" else size
        # One buffer for all chunks: fresh pages for each would cost more than the softmax.
        buffer = hidden.new_empty(min(size, len(rows)), V, dtype=dtype)
        loss = hidden.new_zeros((), dtype=wide)
        grad_hidden = hidden.new_zeros(hidden.shape if training else 0)
        grad_weight: Tensor | None = None
        with torch.autocast(device, enabled=False):
            for chunk in rows.split(size):
                inputs = hidden[chunk].to(dtype)  # (n, C)
                logits = torch.mm(inputs, narrow.T, out=buffer[: len(chunk)])  # (n, V)
                # On a CPU a few rows at a time, so that they stay in its cache.
                parts = zip(logits.split(block), targets[chunk, None].split(block), strict=True)
                for part, target in parts:  # (rows, V), (rows, 1)
                    top, score = part.amax(-1), part.gather(1, target).to(wide)
                    p = torch.softmax(part, -1, dtype=wide)
                    # log sum exp = top - log p(top): saves a second exp; p(top) >= 1/V is exact.
                    loss += (top.to(wide) - p.amax(-1).log()).sum() - score.sum()
                    if training:  # e takes the place of the logits
                        part.copy_(p.scatter_add_(1, target, -torch.ones_like(score)))
                if training:
                    grad_hidden[chunk] = (logits @ narrow).to(hidden.dtype)
                    if grad_weight is None:
                        grad_weight = (logits.T @ inputs).to(wide)
                    elif dtype == wide:
                        grad_weight.addmm_(logits.T, inputs)
                    else:  # sums over chunks in fp32
                        grad_weight += logits.T @ inputs
        if grad_weight is None and training:
            grad_weight = torch.zeros_like(weight, dtype=wide)
        ctx.gradients, ctx.dtype = (grad_hidden, grad_weight), weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the chunked loss can be differentiated once"
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        grad_weight = grad_weight.mul_(scale).to(ctx.dtype)
        return grad_hidden.mul_(scale), grad_weight, None, None, None


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copies a full tensor into a parameter, or this rank's part of it into an FSDP2 shard.

    Args:
        parameter: plain tensor or DTensor, changed in place.
        value: of the full shape, equal on all ranks: nothing is communicated.
    """
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor  # slow import

        assert isinstance(parameter, DTensor)
        value = value.to(parameter.device, parameter.dtype)
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shape of each parameter, as ordered in `named_parameters`, without allocating any.

    Args:
        config: model shape; a tied head is no parameter of its own.

    Returns:
        Name -> shape.
    """
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
    """Whether weight decay applies (A17): to matrices, the embedding among them, not to norms."""
    return parameter.ndim >= 2


# Fields of ModelConfig under their Hugging Face names.
HF_FIELDS = dict(
    vocab_size="vocab_size", width="hidden_size", layers="num_hidden_layers",
    heads="num_attention_heads", kv_heads="num_key_value_heads", ffn_width="intermediate_size",
    tied="tie_word_embeddings", rope_theta="rope_theta", norm_eps="rms_norm_eps",
    max_seq_len="max_position_embeddings",
)  # fmt: skip


def hf_layout(config: ModelConfig) -> dict[str, list[tuple[str, int]]]:
    """The Hugging Face tensors that each parameter stacks.

    Args:
        config: model shape.

    Returns:
        Own name -> [(Hugging Face name, its rows), ...] from top to bottom. Columns agree, and
        no row is permuted: `rotate` pairs dimensions as Hugging Face does.
    """
    C, ffn, kv = config.width, config.ffn_width, config.kv_heads * config.head_dim
    layout = {"embedding": [("model.embed_tokens", config.vocab_size)]}
    for i in range(config.layers):
        own, hf = f"blocks.{i}.", f"model.layers.{i}."
        layout[own + "attention_norm"] = [(hf + "input_layernorm", C)]
        attn = hf + "self_attn."
        layout[own + "qkv"] = [(attn + "q_proj", C), (attn + "k_proj", kv), (attn + "v_proj", kv)]
        layout[own + "out"] = [(attn + "o_proj", C)]
        layout[own + "mlp_norm"] = [(hf + "post_attention_layernorm", C)]
        layout[own + "gate_up"] = [(hf + "mlp.gate_proj", ffn), (hf + "mlp.up_proj", ffn)]
        layout[own + "down"] = [(hf + "mlp.down_proj", C)]
    layout["norm"] = [("model.norm", C)]
    if not config.tied:
        layout["head"] = [("lm_head", config.vocab_size)]
    return {own: [(f"{hf}.weight", n) for hf, n in parts] for own, parts in layout.items()}


def save_hf(path: str | Path, config: ModelConfig, state_dict: Mapping[str, Tensor]) -> None:
    """Writes a folder that `transformers` opens: config.json and model.safetensors.

    Args:
        path: folder, made if missing; files of these names are replaced.
        config: model shape.
        state_dict: full tensors by own name, in the dtype to write.

    Raises:
        ValueError: a parameter is missing, unknown or of another shape.
    """
    shapes = {name: tensor.shape for name, tensor in state_dict.items()}
    if wrong := sorted(dict(shapes.items() ^ parameter_shapes(config).items())):
        raise ValueError(f"{path}: cannot export: {wrong[0]} is missing, unknown or misshapen")
    tensors: dict[str, Tensor] = {}
    for name, parts in hf_layout(config).items():
        pieces = state_dict[name].detach().contiguous().split([rows for _, rows in parts])
        tensors |= {hf: piece for (hf, _), piece in zip(parts, pieces, strict=True)}
    raw = {hf: getattr(config, own) for own, hf in HF_FIELDS.items()}
    if config.rope_scaling:  # beside rope_theta: the older layout, which every version reads
        raw["rope_scaling"] = {"rope_type": "llama3"} | asdict(config.rope_scaling)
    raw |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(tensors["model.norm.weight"].dtype).removeprefix("torch."),
        "bos_token_id": None,  # absent, they would be 1 and 2, which are text to a byte tokenizer
        "eos_token_id": None,
    }
    Path(path).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(path, "model.safetensors"), metadata={"format": "pt"})
    Path(path, "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def read_config(folder: Path) -> ModelConfig:
    """Model shape from the config.json of a Hugging Face folder.

    Both layouts of the rotary settings: `rope_theta` beside `rope_scaling`, and, since
    transformers 5, `rope_parameters` with `rope_theta` inside.

    Args:
        folder: where config.json lies.

    Returns:
        The model's shape.

    Raises:
        ValueError: one line naming the file and what is wrong.
    """
    file = folder / "config.json"
    raw = _read(file, lambda file: dict(json.loads(file.read_text())))
    try:
        raw = {key: value for key, value in raw.items() if value is not None}
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        head_dim = raw["hidden_size"] // raw["num_attention_heads"]
        for key, value, supported in (
            ("model_type", raw.get("model_type"), "llama"),
            ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
            ("attention_bias", raw.get("attention_bias", False), False),
            ("mlp_bias", raw.get("mlp_bias", False), False),
            ("rope_type", rope_type, "default" if rope_type == "default" else "llama3"),
            ("partial_rotary_factor", rope.get("partial_rotary_factor", 1), 1),
            ("head_dim", raw.get("head_dim", head_dim), head_dim),
        ):
            if value != supported:
                raise ValueError(f"{key} is {value!r}, but only {supported!r} is supported")
        # transformers' defaults, where a key is absent
        raw = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0} | raw
        raw = {"num_key_value_heads": raw["num_attention_heads"]} | raw | rope
        scaling = None
        if rope_type == "llama3":
            scaling = RopeScaling(*(rope[field.name] for field in fields(RopeScaling)))
        return ModelConfig(**{own: raw[hf] for own, hf in HF_FIELDS.items()}, rope_scaling=scaling)
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def read_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a Hugging Face folder, one at a time.

    With `assign`, a rank that keeps a shard of an 8B model never holds the whole.

    Args:
        folder: with model.safetensors, or model.safetensors.index.json and its shards.
        config: model shape, from `read_config`.
        dtype: of the tensors.

    Yields:
        Own name and full CPU tensor, in the order of `named_parameters`.

    Raises:
        ValueError: one line naming the file and what is wrong.
    """
    source, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards = [source]
    if not source.exists():
        if not index.exists():
            raise ValueError(f"{source}: no such file, nor {index.name}; pickles are not read")
        names = _read(index, lambda file: json.loads(file.read_text())["weight_map"].values())
        source, shards = index, [folder / Path(name).name for name in sorted(set(names))]
    files: dict[str, tuple[Path, Any]] = {}
    for shard in shards:
        file = _read(shard, lambda shard: safe_open(shard, framework="pt"))
        files |= {hf: (shard, file) for hf in file.keys()}

    layout, shapes = hf_layout(config), parameter_shapes(config)
    known = {hf for parts in layout.values() for hf, _ in parts}
    known.add("lm_head.weight")  # some files repeat a tied head
    for hf, (shard, _) in files.items():
        if hf not in known and not hf.endswith(".rotary_emb.inv_freq"):  # in old files
            raise ValueError(f"{shard}: {hf} has no place in this model")
    for own, full in shapes.items():
        tensors = []
        for hf, rows in layout[own]:
            if hf not in files:
                raise ValueError(f"{source}: no tensor {hf}")
            shard, file = files[hf]
            tensor, shape = file.get_tensor(hf), (rows, *full[1:])
            if tensor.shape != shape:
                raise ValueError(f"{shard}: {hf} is {tuple(tensor.shape)}, not {shape}")
            tensors.append(tensor)
        yield own, torch.cat(tensors).to(dtype)  # cat copies, so that no file stays mapped


def _read(file: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(file)
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (OSError, LookupError, AttributeError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
