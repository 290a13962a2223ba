"""LLaMA-style transformer: sizes by name, summed loss, Hugging Face weights.

    x <- x + W_out attention(rotary(W_qkv norm(x)))
    x <- x + W_down (silu(gate) * up),    [gate, up] = W_gate_up norm(x)

For speed, query, key and value are one matrix, gate and up another, whose rows are the Hugging
Face tensors; and the loss of a large vocabulary never builds the (B, T, V) logits.

Letters in shapes: B sequences, T positions, C width, D width of a head, H query heads, G
key-value heads, V vocabulary, n rows of a chunk.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # target of a position that does not count
LARGE_VOCABULARY = 4096  # tokens; above it the loss is chunked
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}  # logits that the chunked loss holds at once
CACHE_BYTES = 2**21  # of them, what passes through the softmax together on a CPU
# What a shape may hold, by type: a damaged file's counts would exhaust the memory.
RANGES = {bool: ((bool,), 0, 1), int: ((int,), 1, 2**24), float: ((int, float), 1e-30, 1e30)}
# What a damaged file can do to the code that reads it, beside a ValueError.
WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary wavelengths; `rotary_tables` has the formula."""

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
        for shape in filter(None, (self, self.rope_scaling)):
            for name, kind in type(shape).__annotations__.items():
                if kind in RANGES:
                    value, (types, least, most) = getattr(shape, name), RANGES[kind]
                    if type(value) not in types or not least <= value <= most:
                        words = f"no {kind.__name__} from {least:,} to {most:,}"
                        raise ValueError(f"{name} is {value!r}, {words}")
        if self.width % (2 * self.heads):  # rotary turns pairs
            raise ValueError(f"width {self.width} does not give {self.heads} heads of even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads")

    @property
    def head_dim(self) -> int:
        """D, width of one attention head."""
        return self.width // self.heads


SIZES = {
    # 788,608 parameters; as many tokens as bytes and special tokens, and some to spare
    "tiny": ModelConfig(264, 128, 4, 4, 4, 320, tied=True),
    # 14.3M parameters, on bytes too: with GPT-2's vocabulary more than half would be embedding
    "15m": ModelConfig(264, 384, 8, 6, 6, 1024, tied=True),
    # 85.4M and 215.3M; GPT-2's vocabulary of 50,257 padded to a multiple of 64: A19
    "85m": ModelConfig(50_304, 640, 11, 10, 10, 1664, tied=True),
    "215m": ModelConfig(50_304, 1024, 13, 16, 16, 2736, tied=True),
    "llama3.1-8b": ModelConfig(
        128_256, 4096, 32, 32, 8, 14_336, tied=False, max_seq_len=131_072,
        rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
}  # fmt: skip


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # or training could not use what an evaluation made
def rotary_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the positions 0 to length - 1, each (length, 1, D) fp32.

        angle(t, i) = t f_i,    f_i = theta^(-2i/D),    i = 0 .. D/2 - 1

    With stretching f_i becomes f_i ((1 - s_i) / factor + s_i), where s_i runs from 0 at the
    longest wavelengths to 1 at the shortest:

        s_i = clamp((original f_i / 2 pi - low) / (high - low), 0, 1)

    Each angle stands at i and at i + D/2; the first half of sin is negated (see `rotate`). Kept by
    a cache: as buffers, FSDP2 and casts to bf16 would touch them. Source: transformers,
    `modeling_rope_utils`; in fp32 and on the CPU as there, so that logits agree.
    """
    exponent = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent  # (D/2,)
    if rope := config.rope_scaling:
        low, high = rope.low_freq_factor, rope.high_freq_factor
        turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * ((1 - kept) / rope.factor + kept)
    angle = torch.outer(torch.arange(length, device="cpu").float(), frequency)  # (T, D/2)
    cos, sin = angle.cos(), angle.sin()
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    return cos.to(device), sin.to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i + D/2}) of x (B, T, heads, D) by the angle of its position.

        [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]

    The tables are fp32, and so is the result: cosines in bf16 would be off by 0.4 %.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the stream x (..., C); the weight (C,) is bf16 where FSDP2 gathers it as such."""
    return F.rms_norm(x, weight.shape, weight.type_as(x), eps)


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each of the normed stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        C, D, ffn = config.width, config.head_dim, config.ffn_width
        self.attention_norm = nn.Parameter(torch.empty(C))
        self.qkv = nn.Parameter(torch.empty((config.heads + 2 * config.kv_heads) * D, C))
        self.out = nn.Parameter(torch.empty(C, C))
        self.mlp_norm = nn.Parameter(torch.empty(C))
        self.gate_up = nn.Parameter(torch.empty(2 * ffn, C))
        self.down = nn.Parameter(torch.empty(C, ffn))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The stream (B, T, C) after this block; the tables are (T, 1, D) of `rotary_tables`."""
        (B, T, C), H, G = x.shape, self.config.heads, self.config.kv_heads
        normed = rms_norm(x, self.attention_norm, self.config.norm_eps)
        # Queries and keys turn together. Unlike slices, split has a backward without zero fills.
        qk, v = F.linear(normed, self.qkv).view(B, T, H + 2 * G, -1).split((H + G, G), 2)
        q, k = rotate(qk, cos, sin).type_as(v).transpose(1, 2).split((H, G), 1)
        v = v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)
        x = x + F.linear(mixed.transpose(1, 2).reshape(B, T, C), self.out)

        normed = rms_norm(x, self.mlp_norm, self.config.norm_eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Transformer(nn.Module):
    """The language model. Parameters hold garbage until `init_weights` or a load sets them.

    It has no buffers: it can be built under `torch.device("meta")` and materialised by `to_empty`.
    For FSDP2, shard each block and then the model: the loss reads the head's weight, which must
    belong to the root. To compile, compile the blocks; the rest gains nothing.
    """

    def __init__(self, config: ModelConfig, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing  # recompute, do not keep
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.width))
        if not config.tied:
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.width))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Sets norms to 1 and matrices to normal numbers of deviation 0.02.

        Those that write to the stream get 0.02 / sqrt(2 layers): its variance then does not grow
        with depth (Radford et al. 2019, 2.3). The same bits on every rank and device.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, device="cpu")
            if decayed(name, parameter):
                writers = 2 * self.config.layers if name.endswith((".out", ".down")) else 1
                value.normal_(0.0, 0.02 / math.sqrt(writers), generator=generator)
            assign(parameter, value)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed negative log-likelihood of the targets that count, in nats.

            sum over targets != IGNORE of -log p(target | inputs so far)

        Inputs and targets are (B, T) int64; a GPU need not be waited for where the targets are on
        the CPU. The scalar, fp32 (fp64 for an fp64 model), can be differentiated once.
        """
        targets, head = targets.flatten(), self._head()
        if len(head) <= LARGE_VOCABULARY:
            scores = _widen(F.linear(self.hidden(inputs).flatten(0, 1), head))
            targets = targets.to(inputs.device)
            return F.cross_entropy(scores, targets, ignore_index=IGNORE, reduction="sum")
        rows = (targets != IGNORE).nonzero().squeeze(1).to(inputs.device)
        targets = targets.to(inputs.device)
        hidden = self.hidden(inputs).flatten(0, 1)
        return _ChunkedLoss.apply(hidden, head, targets, rows, torch.is_grad_enabled())

    def logits(self, inputs: Tensor, last: bool = False) -> Tensor:
        """Scores of the next token, (B, T, V); with `last` after the last position alone.

        fp32 (fp64 for an fp64 model). FSDP2: first `register_fsdp_forward_method(model, "logits")`.
        """
        hidden = self.hidden(inputs)
        return _widen(F.linear(hidden[:, -1:] if last else hidden, self._head()))

    def hidden(self, inputs: Tensor) -> Tensor:
        """The normed stream after the last block, (B, T, C)."""
        length, most = inputs.shape[1], self.config.max_seq_len
        if length > most:
            raise ValueError(f"{length} positions, but the model has {most}")
        cos, sin = rotary_tables(self.config, length, inputs.device)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        x = _widen(F.embedding(inputs, self.embedding))  # the stream is fp32 in mixed precision too
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        return rms_norm(x, self.norm, self.config.norm_eps)

    def _head(self) -> Tensor:
        return self.embedding if self.config.tied else self.head


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss of the rows that count, with the logits of a few of them at a time.

    The forward pass takes the gradients too (Liger Kernel, arXiv:2410.10989):

        d loss / d hidden = e weight,    d loss / d weight = e^T hidden,    e = softmax - 1[target]
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
        grad_weight = torch.zeros_like(weight if training else weight[:0], dtype=wide)
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
                    if dtype == wide:
                        grad_weight.addmm_(logits.T, inputs)
                    else:  # sums over chunks in fp32
                        grad_weight += logits.T @ inputs
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
def assign(parameter: Any, value: Tensor) -> None:
    """Copies a full tensor, the same on all ranks, into a parameter or an FSDP2 shard of it."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor  # slow import

        value = value.to(parameter.device, parameter.dtype)
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Name -> shape, as ordered in `named_parameters`, without allocating any."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied head is none of its own.

    >>> parameter_count(SIZES["llama3.1-8b"])
    8030261248
    """
    return sum(shape.numel() for shape in parameter_shapes(config).values())


def decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies (A17): to matrices, the embedding among them, not to norms."""
    return parameter.ndim >= 2


# ---------------------------------------------------------------- Hugging Face weights


# Fields of ModelConfig under their Hugging Face names.
HF_FIELDS = dict(
    vocab_size="vocab_size", width="hidden_size", layers="num_hidden_layers",
    heads="num_attention_heads", kv_heads="num_key_value_heads", ffn_width="intermediate_size",
    tied="tie_word_embeddings", rope_theta="rope_theta", norm_eps="rms_norm_eps",
    max_seq_len="max_position_embeddings",
)  # fmt: skip


def hf_layout(config: ModelConfig) -> dict[str, list[tuple[str, int]]]:
    """Own name -> [(Hugging Face name, its rows), ...]: what each parameter stacks, from the top.

    No row is permuted: `rotate` pairs dimensions as Hugging Face does.
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


def save_hf(
    path: str | Path,
    config: ModelConfig,
    state_dict: Mapping[str, Tensor],
    begin: int | None = None,
    ends: Sequence[int] = (),
) -> None:
    """Writes the config.json and model.safetensors of a folder that `transformers` opens.

    The tensors are full, by own name, in the dtype to write; token `begin` begins a text, `ends`
    end a generation.
    """
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
        "bos_token_id": begin,  # absent, they would be 1 and 2, which are text to a byte tokenizer
        "eos_token_id": list(ends) or None,
    }
    Path(path).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(path, "model.safetensors"), metadata={"format": "pt"})
    Path(path, "config.json").write_text(json.dumps(raw, indent=2) + "\n")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What goes wrong with a file is a ValueError that begins with its path."""
    try:
        yield
    except ValueError as error:
        words = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: {words}") from None
    except (OSError, SafetensorError, *WRONG) as error:
        raise ValueError(f"{path}: cannot be read ({error!r})") from None


def read_config(folder: Path) -> ModelConfig:
    """Model shape from the config.json of a Hugging Face folder.

    Rotary settings: `rope_theta` beside `rope_scaling`, or, since transformers 5,
    `rope_parameters`. ValueError: one line naming file and fault, as in `read_weights`.
    """
    with naming(folder / "config.json"):
        return _config(json.loads((folder / "config.json").read_text()))


def _config(raw: dict[str, Any]) -> ModelConfig:
    raw = {key: value for key, value in raw.items() if value is not None}
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    raw = {"model_type": "unknown"} | raw | rope | {"rope_type": rope_type}
    only = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    only["rope_type"] = "default" if rope_type == "default" else "llama3"
    only["partial_rotary_factor"] = 1
    only["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    for key, supported in only.items():
        if raw.get(key, supported) != supported:
            raise ValueError(f"{key} is {raw[key]!r}, but only {supported!r} is supported")
    # transformers' defaults, where a key is absent
    absent: dict[str, Any] = {"num_key_value_heads": raw["num_attention_heads"]}
    absent |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
    raw = absent | raw
    scaling = None
    if rope_type == "llama3":
        scaling = RopeScaling(*(rope[field.name] for field in fields(RopeScaling)))
    return ModelConfig(**{own: raw[hf] for own, hf in HF_FIELDS.items()}, rope_scaling=scaling)


def read_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a Hugging Face folder, one at a time, in the order of `named_parameters`.

    Full CPU tensors: with `assign`, a rank that keeps a shard of an 8B model never holds it whole.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards, files = {single.name}, dict[str, tuple[Path, Any]]()
    if index.exists() and not single.exists():
        with naming(index):
            shards = {*json.loads(index.read_text())["weight_map"].values()}
    for shard in (folder / Path(name).name for name in sorted(shards)):  # none outside of it
        with naming(shard):
            file = safe_open(shard, framework="pt")
            files |= {hf: (shard, file) for hf in file.keys()}

    layout, shapes = hf_layout(config), parameter_shapes(config)
    known = {hf for parts in layout.values() for hf, _ in parts}
    known |= {"lm_head.weight"}  # some files repeat a tied head
    for hf, (shard, _) in files.items():
        if hf not in known and not hf.endswith(".rotary_emb.inv_freq"):  # in old files
            raise ValueError(f"{shard}: {hf} has no place in this model")
    for own, full in shapes.items():
        tensors = []
        for hf, rows in layout[own]:
            if hf not in files:
                raise ValueError(f"{folder}: no tensor {hf}")
            shard, file = files[hf]
            tensor, shape = file.get_tensor(hf), (rows, *full[1:])
            if tensor.shape != shape:
                raise ValueError(f"{shard}: {hf} is {tuple(tensor.shape)}, not {shape}")
            if not tensor.is_floating_point() or tensor.itemsize < 2:
                raise ValueError(f"{shard}: {hf} is {tensor.dtype}, not floats of 16 to 64 bits")
            tensors.append(tensor)
        yield own, torch.cat(tensors).to(dtype)  # cat copies, so that no file stays mapped
