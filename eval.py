"""Look at a finished run: its loss, a sample, its weights for other programs.

    python eval.py loss RUN                   # token-averaged loss, bits per byte
    python eval.py sample RUN --prompt TEXT
    python eval.py export RUN DIR             # a Hugging Face Llama folder

RUN is a run folder; its latest whole checkpoint is read. Draws from its own generator.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import diloco
import model
import train


def open_run(path: Path) -> tuple[train.Config, model.Transformer]:
    """Configuration and synchronised model of a run.

    Args:
        path: a run folder.
    Returns:
        The run's config, and the model in fp32 on the best device.
    Raises:
        ValueError: no run there, or no whole checkpoint.
    """
    if not (path / "config.json").exists():
        raise ValueError(f"{path}: is no run folder")
    config = train.Config(**train.read_json(path / "config.json")["config"])
    size, weights = train.load_weights(path)
    network = model.Transformer(size)
    network.load_state_dict(weights)
    return config, network.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def loss(path: Path) -> dict[str, float]:
    """Validation loss of a run's checkpoint (E.1), as training measures it at its end.

    Args:
        path: a run folder.
    Returns:
        `val_loss` in nats a token, `bits_per_byte`, `val_tokens`.
    """
    config, network = open_run(path)
    ranks = diloco.Ranks(0, 1, config.workers, device=network.embedding.device)
    return train.validate(network, train.open_source(config), ranks, config.dtype)


@torch.no_grad()
def generate(
    network: model.Transformer,
    prompt: Tensor,
    most: int,
    *,
    stop: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    """Continue a prompt token by token, with a key-value cache.

    Args:
        network: the model.
        prompt: (T,) int64, at least one token.
        most: largest number of new tokens.
        stop: token that ends the text.
        temperature: 0 takes the likeliest token.
        top_k: draw from the k likeliest; 0 from all.
        seed: of the own generator.
    Returns:
        The new tokens, without `stop`.
    """
    device = network.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    cache, inputs, new = model.Cache(), prompt[None].to(device), []
    for _ in range(min(most, network.config.max_seq_len - len(prompt))):
        logits = network.logits(inputs, cache, last=True)[0, -1]
        if temperature == 0:
            token = logits.argmax()
        else:
            if top_k:
                logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
            weights = (logits / temperature).softmax(0)
            token = torch.multinomial(weights, 1, generator=generator)[0]
        if int(token) == stop:
            break
        new.append(int(token))
        inputs = token.view(1, 1)
    return new


def sample(path: Path, prompt: str, most: int, temperature: float, top_k: int, seed: int) -> str:
    """Text that a run's model continues `prompt` with; arguments as for `generate`."""
    config, network = open_run(path)
    source = train.open_source(config)
    tokens = torch.tensor([source.eot, *source.tokenizer.encode_ordinary(prompt)])
    longest = network.config.max_seq_len
    if len(tokens) >= longest:
        raise ValueError(f"--prompt: {len(tokens)} tokens, the model reads {longest}")
    options = dict(temperature=temperature, top_k=top_k, seed=seed)
    return source.tokenizer.decode(generate(network, tokens, most, stop=source.end, **options))


def main(argv: list[str]) -> int:
    """Command line; exit code 2 and one line for the user's mistakes."""
    parser = argparse.ArgumentParser(prog="eval.py", allow_abbrev=False, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("loss", help="validation loss and bits per byte")
    one.add_argument("run", type=Path)
    one = commands.add_parser("sample", help="continue a text")
    one.add_argument("run", type=Path)
    one.add_argument("--prompt", default="", help="text to continue")
    one.add_argument("--tokens", type=int, default=200, help="largest number of new tokens [200]")
    one.add_argument("--temperature", type=float, default=0.8, help="0: likeliest token [0.8]")
    one.add_argument("--top-k", type=int, default=50, help="draw from the k likeliest, 0: all [50]")
    one.add_argument("--seed", type=int, default=0, help="of the draw [0]")
    one = commands.add_parser("export", help="write a Hugging Face Llama folder")
    one.add_argument("run", type=Path)
    one.add_argument("dir", type=Path)
    given = parser.parse_args(argv)
    try:
        if given.command == "loss":
            measured = loss(given.run)
            print(
                f"{measured['val_loss']:.4f} nats a token, {measured['bits_per_byte']:.4f} "
                f"bits per byte, over {measured['val_tokens']:,.0f} tokens"
            )
        elif given.command == "sample":
            if given.temperature < 0 or given.tokens < 1 or given.top_k < 0:
                raise ValueError("--temperature and --top-k: not below 0, --tokens: at least 1")
            options = (given.tokens, given.temperature, given.top_k, given.seed)
            print(given.prompt + sample(given.run, given.prompt, *options))
        elif given.command == "export":
            _, network = open_run(given.run)
            model.save_hf(given.dir, network.config, network.state_dict())
            print(f"wrote {given.dir}")
    except ValueError as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
