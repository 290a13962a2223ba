"""Documents, tokenizers and batches: a batch is a pure function of (seed, worker, step).

Reading order: `Batch`, `Source.batch`, the two ways in which documents are dealt to workers
(`Indexed`: all are in memory; `Streamed`: shards are read in order), then where they come from.

Symbols (README has all): K workers, worker k, step s; B = batch_size, documents a worker and step;
T = seq_len, tokens. Documents are truncated or padded to T and never packed (E.1); padding counts
neither in the loss nor in `Batch.tokens`. Nothing here touches a global random generator.
"""

import ast
import base64
import gc
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import tempfile
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

IGNORE = -100  # target of a position that predicts nothing
NAMED = {"docstrings": False, "c4": False, "doctests": True, "ultrachat": True}  # is it chat?
HOLD_OUT = 20  # without validation files, lines 1, 21, 41, ... of local files are validation

Messages = tuple[tuple[str, str], ...]  # (role, content) of each turn


class Batch(NamedTuple):
    """B documents as the model reads them.

    Attributes:
        inputs: (B, T) int64, a document's first T tokens, padded on the right with the end token.
        targets: (B, T) int64, the token after each input; `IGNORE` where there is nothing to
            predict (padding, a document's last token, in chat all that is not the assistant's).
        tokens: Non-padding positions of `inputs` that have a successor, the user's included. The
            sum over workers is what the token mapper counts (A.3).
        ids: "FILE:LINE" of each document.
    """

    inputs: Tensor
    targets: Tensor
    tokens: int
    ids: tuple[str, ...]


class Document(NamedTuple):
    """A text or a conversation; `url` orders `--partition module` and may be empty."""

    id: str
    content: str | Messages
    url: str


class Shard(NamedTuple):
    """A file, here or on the hub; `rows()` yields (line, row) from its start, lines from 1."""

    name: str
    path: str
    rows: Callable[[], Iterator[tuple[int, Any]]]


# ---------------------------------------------------------------------- batches and their dealing


@dataclass(kw_only=True, eq=False, repr=False)
class Source(ABC):
    """The documents of a run, dealt to K workers.

    Attributes:
        tokenizer: The encoding.
        tokenizer_file: The `tokenizer.model` that it was read from, if any.
        seq_len: T, tokens.
        batch_size: B, documents a worker and step.
        workers: K.
        seed: Of every order.
        chat: Documents are conversations.
        held: Validation documents; the first `val_documents` usable ones are taken.
        val_documents: See `held`.
        facts: What `describe` says about the data.
        vocab_size: Ids are below it.
        eot: Id that begins a document: <|begin_of_text|>, or GPT-2's <|endoftext|>.
        end: Id that ends a text, and pads: <|end_of_text|>, or GPT-2's <|endoftext|>.
    """

    tokenizer: tiktoken.Encoding
    tokenizer_file: Path | None
    seq_len: int
    batch_size: int
    workers: int
    seed: int
    chat: bool
    held: Iterable[Document]
    val_documents: int
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        """Look up the special tokens and read the validation documents."""
        self.vocab_size = self.tokenizer.n_vocab
        specials = GPT2_SPECIALS * 2 if self.tokenizer.name == "gpt2" else BYTE_SPECIALS[:2]
        self.eot, self.end = (self.tokenizer.encode_single_token(name) for name in specials)
        # Read now: a damaged validation file must not end a run of days in its last minute.
        usable = (document for document in self.held if self._usable(document.content))
        self._held = list(islice(usable, self.val_documents))
        self.facts["validation_documents"] = len(self._held)

    def batch(self, worker: int, step: int) -> Batch:
        """The documents of a worker at a step, as tensors.

        Args:
            worker: k, in [0, K).
            step: s, the inner step of the run, >= 0.

        Returns:
            A pure function of (seed, worker, step): asked again, in any order, it is the same.

        Raises:
            ValueError: A damaged row, named with file and line.
        """
        assert 0 <= worker < self.workers and step >= 0, f"no batch for {worker=}, {step=}"
        return self._collate(self._documents(worker, step))

    def validation(self) -> Iterator[Batch]:
        """The fixed validation documents, in order.

        Yields:
            Batches of B documents, the last one maybe smaller; the same at every call.
        """
        for first in range(0, len(self._held), self.batch_size):
            yield self._collate(self._held[first : first + self.batch_size])

    def describe(self) -> dict[str, Any]:
        """What was opened: counts, hash and versions.

        Returns:
            JSON-ready facts, for `env.json` and for one printed line.
        """
        file = f" from {self.tokenizer_file}" if self.tokenizer_file else ""
        name = f"{self.tokenizer.name}{file}"
        return {**self.facts, "tokenizer": name, "vocab_size": self.vocab_size}

    @cached_property
    def token_bytes(self) -> Tensor:
        """UTF-8 bytes that each token stands for, (vocab_size,) int64; 0 for specials."""
        sizes = torch.zeros(self.vocab_size, dtype=torch.int64)
        for token in self.tokenizer.token_byte_values():
            sizes[self.tokenizer.encode_single_token(token)] = len(token)
        return sizes

    @abstractmethod
    def _documents(self, worker: int, step: int) -> list[Document]:
        """The B documents of (worker, step)."""

    def _encode(self, content: str | Messages) -> tuple[np.ndarray, np.ndarray]:
        """Ids, (L,), and which of them are to be predicted, (L,) bool, with L <= T + 1."""
        if not isinstance(content, str):
            return encode_chat(self.tokenizer, content, self.seq_len + 1)
        body = encode(self.tokenizer, content)[: self.seq_len]
        ids = np.concatenate(([self.eot], body, [self.end]))[: self.seq_len + 1]
        return ids, np.ones(len(ids), bool)

    def _usable(self, content: str | Messages) -> bool:
        """Whether truncation leaves something to predict: of a conversation, an assistant token."""
        if isinstance(content, str):
            return True
        first = next((at for at, (role, _) in enumerate(content) if role == "assistant"), None)
        if first is None:
            return False
        # A text has no more tokens than bytes. The bound on the first assistant token's position
        # settles nearly every conversation without tokenising a gigabyte before the first step.
        bound = 14 + sum(5 + len((role + text).encode()) for role, text in content[:first])
        return bound <= self.seq_len or bool(self._encode(content)[1].any())

    def _collate(self, documents: Sequence[Document]) -> Batch:
        shape = (len(documents), self.seq_len)  # (B, T)
        inputs = np.full(shape, self.end, np.int64)
        targets = np.full(shape, IGNORE, np.int64)
        tokens = 0
        for row, document in enumerate(documents):
            ids, predicted = self._encode(document.content)
            inputs[row, : len(ids)] = ids[: self.seq_len]
            targets[row, : len(ids) - 1] = np.where(predicted[1:], ids[1:], IGNORE)
            tokens += len(ids) - 1
        names = tuple(document.id for document in documents)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), tokens, names)


@dataclass(kw_only=True, eq=False, repr=False)
class Indexed(Source):
    """All documents in memory: docstrings, doctests, UltraChat, local conversations.

    Step s, worker k, row i of the batch hold document number n of the run:

        n = (s K + k) B + i                                                           E.1
        document = permutation of epoch n // N [n % N]         N documents

    so global batches are shared, shuffled and split over the workers, and nothing repeats within
    an epoch, whatever N, K and B are. `--partition module` sorts documents by source (url), cuts
    them into K equal ranges, and deals n = s B + i of range k to worker k.

    Attributes:
        documents: Training documents; conversations without a target are dropped and counted.
        partition: "iid" or "module".
    """

    documents: list[Document]
    partition: str

    def __post_init__(self) -> None:
        """Drop what truncation leaves without a target, and cut the ranges."""
        super().__post_init__()
        before = len(self.documents)
        self.documents = [d for d in self.documents if self._usable(d.content)]
        count = len(self.documents)
        self.facts |= {"documents": count, "dropped": before - count}
        ranges = self.workers if self.partition == "module" else 1
        if count < ranges or not self._held:
            raise ValueError(
                f"--data {self.facts['data']}: too few documents fit: {count} for training "
                f"(needed: {ranges}), {before - count} dropped, {len(self._held)} for validation"
            )
        if self.partition == "module":
            if not all(document.url for document in self.documents):
                raise ValueError("--partition module: the documents need a 'url' to sort them by")
            self.documents.sort(key=lambda document: document.url.split("://")[-1])
        self._cuts = [at * count // ranges for at in range(ranges + 1)]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # of a range: (epoch, permutation)

    def _documents(self, worker: int, step: int) -> list[Document]:
        if self.partition == "module":
            own, first = worker, step * self.batch_size
        else:
            own, first = 0, (step * self.workers + worker) * self.batch_size
        low, count = self._cuts[own], self._cuts[own + 1] - self._cuts[own]
        documents = []
        for n in range(first, first + self.batch_size):
            epoch, place = divmod(n, count)
            if own not in self._orders or self._orders[own][0] != epoch:
                generator = np.random.default_rng([self.seed, epoch, own])
                self._orders[own] = (epoch, generator.permutation(count))
            documents.append(self.documents[low + self._orders[own][1][place]])
        return documents


@dataclass(kw_only=True, eq=False, repr=False)
class Streamed(Source):
    """Shards read in order: C4, and local files of its layout.

    The seed shuffles the shards, which go to workers whole: worker k reads every K-th, from the
    k-th on. Where there are fewer shards than workers, the n workers of a shard share its rows: row
    i goes to number i mod n of them. Either way no two workers hold the same document, and each
    starts again when it has seen all of its own. Step s, row i of the batch hold document number
    s B + i of the worker. There is no shuffle buffer over rows: a resume would lose its content.

    Attributes:
        shards: Training shards.
        part: Which of their rows are training data; see `rows_of`.
    """

    shards: list[Shard]
    part: str

    def __post_init__(self) -> None:
        """Shuffle the shards and deal them."""
        super().__post_init__()
        order = np.random.default_rng(self.seed).permutation(len(self.shards))
        shards = [self.shards[at] for at in order]
        self._open: dict[int, tuple[int, Iterator[Document]]] = {}  # worker: (next number, rows)
        self._dealt: list[tuple[list[Shard], int, int]] = []  # worker: (shards, sharers, own rank)
        for worker in range(self.workers):
            # One expression covers both cases: with enough shards, sharers is 1 and rank is 0.
            first, rank = worker % len(shards), worker // len(shards)
            sharers = len(range(first, self.workers, len(shards)))
            self._dealt.append((shards[first :: self.workers], sharers, rank))

    def check(self) -> None:
        """Read the first document of every worker, to report a wrong file before training starts.

        Raises:
            ValueError: A damaged file, or fewer documents than workers.
        """
        for worker in range(self.workers):
            next(self._stream(worker, 0))

    def _documents(self, worker: int, step: int) -> list[Document]:
        first = step * self.batch_size
        number, stream = self._open.pop(worker, (-1, iter(())))
        if number != first:
            stream = self._stream(worker, first)
        documents = list(islice(stream, self.batch_size))
        self._open[worker] = (first + self.batch_size, stream)
        return documents

    def _stream(self, worker: int, skip: int) -> Iterator[Document]:
        """The worker's documents from number `skip` on, for ever; skipped rows are not parsed."""
        shards, sharers, rank = self._dealt[worker]
        while True:
            own = 0
            for shard in shards:
                for number, (line, row) in enumerate(rows_of(shard, self.part)):
                    if number % sharers != rank:
                        continue
                    own += 1
                    if skip:
                        skip -= 1
                    else:
                        yield parse_row(shard, line, row, self.chat)
            if not own:  # or this loop would spin for ever
                raise ValueError(f"{shards[0].path}: no training document for worker {worker}")
            skip %= own


# -------------------------------------------------------------------------------------- tokenizers

# Llama 3.1's special tokens in the order of its vocabulary; the last 245 have no use yet.
LLAMA_SPECIALS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
    *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{at}|>" for at in range(3, 248)),
)
BYTE_SPECIALS = tuple(LLAMA_SPECIALS[at] for at in (0, 1, 6, 7, 9))
GPT2_SPECIALS = ("<|endoftext|>",)
# How text is cut before byte pairs merge, as published with each vocabulary.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


def load_tokenizer(name: str, folders: Sequence[Path]) -> tuple[tiktoken.Encoding, Path | None]:
    """Build a tokenizer by name, from a local `tokenizer.model` where there is one.

    Args:
        name: "bytes" (the 256 byte values and five specials), "gpt2" or "llama3".
        folders: Where to look for `tokenizer.model`; the first hit is taken. Not for "bytes".

    Returns:
        The encoding, and the file that it was read from, if any.

    Raises:
        ValueError: Unknown name, a damaged file (line named), or neither a file nor a network.
    """
    kinds = {
        "gpt2": (GPT2_PATTERN, GPT2_SPECIALS),  # A19
        "llama3": (LLAMA_PATTERN, LLAMA_SPECIALS),
    }
    if name == "bytes":
        ranks = {bytes([value]): value for value in range(256)}
        return _encoding(name, r"[\s\S]", ranks, BYTE_SPECIALS), None
    if name not in kinds:
        raise ValueError(f"--tokenizer {name}: unknown; there are bytes, {', '.join(kinds)}")
    for path in (folder / "tokenizer.model" for folder in folders):
        if path.is_file():
            pattern, specials = kinds[name]
            return _encoding(name, pattern, _read_ranks(path), specials), path
    remedy = "a tokenizer.model (tiktoken's format) beside local --data or in --init-from is read"
    if name == "llama3":
        raise ValueError(
            f"--tokenizer llama3: its file needs a licence and was not found; {remedy}"
        )
    default = os.environ.get("DATA_GYM_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache")
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", default)
    for url in (f"{GPT2_FILES}vocab.bpe", f"{GPT2_FILES}encoder.json"):
        # tiktoken downloads without a time limit, unless its cache has the address's SHA-1.
        if not cache or not Path(cache, hashlib.sha1(url.encode()).hexdigest()).exists():
            _reach(url, f"--tokenizer gpt2: {{}}; TIKTOKEN_CACHE_DIR is honoured, and {remedy}")
    return tiktoken.get_encoding(name), None


def check_vocabulary(source: Source, model_vocab: int) -> None:
    """Refuse a tokenizer whose ids exceed the model's embedding.

    Args:
        source: The opened data.
        model_vocab: Rows of the embedding.

    Raises:
        ValueError: An id is not below `model_vocab`; names the first such line of the file.
    """
    if source.vocab_size <= model_vocab:
        return
    where = f"--tokenizer {source.tokenizer.name}"
    if source.tokenizer_file:
        for line, _, rank in _rank_lines(source.tokenizer_file):
            where = f"{source.tokenizer_file}:{line}"
            if rank >= model_vocab:
                break  # else the specials do not fit, which follow the last line
    raise ValueError(
        f"{where}: ids reach {source.vocab_size - 1}, and the model's vocabulary ends at "
        f"{model_vocab - 1}"
    )


def encode(tokenizer: tiktoken.Encoding, text: str) -> np.ndarray:
    """Ids of a text, in which the name of a special token is text like any other.

    Args:
        tokenizer: From `load_tokenizer`.
        text: Any text.

    Returns:
        Ids, (L,) integers.
    """
    if tokenizer.name == "bytes":  # the ids are the bytes: no need to pass each through a regex
        return np.frombuffer(text.encode(), np.uint8)
    return np.array(tokenizer.encode(text, disallowed_special=()), np.int64)


def encode_chat(
    tokenizer: tiktoken.Encoding, messages: Messages, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    r"""Ids of a conversation in Llama 3.1's format, and which of them the assistant writes.

        <|begin_of_text|> and per message <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>

    TEXT is stripped as in Llama's template, whose default system message (dates) is left out. The
    loss is taken on the assistant's TEXT and its <|eot_id|> (E.1).

    Args:
        tokenizer: "bytes" or "llama3".
        messages: (role, content) of each turn.
        limit: Most tokens.

    Returns:
        Ids, (L,) int64, and whether each is to be predicted, (L,) bool, with L <= limit.
    """
    begin, _, start, end, eot = (tokenizer.encode_single_token(name) for name in BYTE_SPECIALS)
    ids, predicted = [begin], [False]
    for role, content in messages:
        # Both patterns end a piece at a line break before text, so "\n\n" and TEXT encoded apart
        # give the tokens that they give together, and the mask starts exactly at TEXT.
        header = [start, *encode(tokenizer, role), end, *encode(tokenizer, "\n\n")]
        body = [*encode(tokenizer, content.strip()), eot]
        ids += header + body
        predicted += [False] * len(header) + [role == "assistant"] * len(body)
        if len(ids) >= limit:
            break
    return np.array(ids[:limit], np.int64), np.array(predicted[:limit], bool)


def _encoding(
    name: str, pattern: str, ranks: dict[bytes, int], specials: Sequence[str]
) -> tiktoken.Encoding:
    """An encoding whose specials follow its ordinary tokens."""
    numbered = {special: len(ranks) + at for at, special in enumerate(specials)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=numbered)


def _rank_lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """(line, token, rank) of a file in tiktoken's format, a line "BASE64 RANK".

    tiktoken's own reader caches by path: it would read a changed file stale.
    """
    for line, row in read_lines(path):
        try:
            token, rank = row.split()
            yield line, base64.b64decode(token, validate=True), int(rank)
        except ValueError as error:  # binascii.Error is one
            raise ValueError(f"{path}:{line}: not 'BASE64 RANK' as tiktoken writes it") from error


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line, token, rank in _rank_lines(path):
        if rank != len(ranks) or token in ranks:
            raise ValueError(f"{path}:{line}: not a new token of rank {len(ranks)}")
        ranks[token] = rank
    for value in range(256):
        if bytes([value]) not in ranks:  # tiktoken would panic at the first text that has it
            raise ValueError(f"{path}:{len(ranks)}: ends without a token for byte {value}")
    return ranks


# --------------------------------------------------------------------------------- files and rows


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a plain file, or of a gzipped one if its name ends in `.gz`.

    Args:
        path: The file.

    Yields:
        (line, bytes), lines from 1.

    Raises:
        ValueError: The file is empty, not readable or broken gzip; names the line.
    """
    line = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for line, row in enumerate(file, 1):
                yield line, row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}:{line + 1}: broken gzip ({error})") from error
    except OSError as error:
        raise ValueError(f"{path}:{line + 1}: cannot be read ({error.strerror})") from error
    if line == 0:
        raise ValueError(f"{path}:1: the file is empty")


def rows_of(shard: Shard, part: str) -> Iterator[tuple[int, Any]]:
    """Rows of a shard, or those of one part of it.

    Args:
        shard: The shard.
        part: "validation" for every `HOLD_OUT`-th line from the first, "training" for the others,
            "" for all.

    Yields:
        (line, row), lines from 1.
    """
    for line, row in shard.rows():
        if not part or (part == "validation") == (line % HOLD_OUT == 1):
            yield line, row


def parse_row(shard: Shard, line: int, row: Any, chat: bool) -> Document:
    """The document of a row.

    Args:
        shard: Where the row is from.
        line: Its line.
        row: A JSON line, or an object that `datasets` decoded.
        chat: Take the field `messages`, not `text`.

    Returns:
        The document.

    Raises:
        ValueError: Not JSON, or a missing or malformed field; names file and line.
    """
    where, field = f"{shard.path}:{line}", "messages" if chat else "text"
    try:
        row = json.loads(row) if isinstance(row, bytes) else row
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from error
    if not isinstance(row, dict) or field not in row:
        raise ValueError(f"{where}: no field {field!r}")
    content = row[field]
    try:
        if chat:
            content = tuple((message["role"], message["content"]) for message in content)
            if not {role for role, _ in content} <= {"system", "user", "assistant"}:
                raise TypeError("unknown role")
        for text in [text for _, text in content] if chat else [content]:
            text.encode()
    except (TypeError, KeyError, AttributeError, UnicodeEncodeError) as error:
        shape = "[{'role': 'system'|'user'|'assistant', 'content': TEXT}, ...]" if chat else "TEXT"
        raise ValueError(f"{where}: {field!r} is not {shape} in valid Unicode") from error
    return Document(f"{shard.name}:{line}", content, str(row.get("url") or ""))


def documents_of(
    shards: Sequence[Shard], chat: bool, part: str, digest: Any = None
) -> Iterator[Document]:
    """Documents of shards, in order.

    Args:
        shards: The shards.
        chat: As for `parse_row`.
        part: As for `rows_of`.
        digest: A hash of `hashlib` that is fed every line, or None.

    Yields:
        Documents.
    """
    for shard in shards:
        for line, row in rows_of(shard, part):
            if digest:
                digest.update(row)
            yield parse_row(shard, line, row, chat)


def local_shards(path: Path) -> tuple[list[Shard], list[Shard]]:
    """Files of `--data PATH`: one file, or a folder of `.json.gz`, `.jsonl.gz` and `.jsonl` files.

    Args:
        path: The file or folder; C4's subfolder `en` is looked into.

    Returns:
        Training files, and validation files: those of a folder whose name has the word
        "validation", "valid", "val" or "test". Both in the order of their names.

    Raises:
        ValueError: No such path, or no training file in it.
    """
    if not path.exists():
        raise ValueError(f"--data {path}: no such file or folder, nor one of {', '.join(NAMED)}")
    files = [path]
    if path.is_dir():
        found = [file for folder in (path, path / "en") for file in sorted(folder.glob("*.json*"))]
        files = [file for file in found if file.name.endswith((".json.gz", ".jsonl.gz", ".jsonl"))]
    shards: tuple[list[Shard], list[Shard]] = ([], [])
    for file in files:
        word = re.search(r"(?<![a-z])(validation|valid|val|test)(?![a-z])", file.name.lower())
        shard = Shard(file.name, str(file), partial(read_lines, file))
        shards[word is not None and file != path].append(shard)
    if not shards[0]:
        raise ValueError(f"--data {path}: no training file *.json.gz, *.jsonl.gz or *.jsonl")
    return shards


def hub_shards(
    data: str, facts: dict[str, Any], revision: str = ""
) -> tuple[list[Shard], list[Shard]]:
    """Training and validation shards of C4 (en) or UltraChat-200k through `datasets`.

    Args:
        data: "c4" (its files as streams) or "ultrachat" (two tables).
        facts: Gets the revision.
        revision: The one to read; "" for the latest.

    Returns:
        Training shards and validation shards.

    Raises:
        ValueError: The hub cannot be reached: who names C4 gets C4 or this line, at once.
    """
    from huggingface_hub import constants

    streamed = data == "c4"
    repo = "allenai/c4" if streamed else "HuggingFaceH4/ultrachat_200k"
    path = f"./{data}" if Path(data).exists() else "PATH"
    message = f"--data {data}: {{}}; --data {path} reads local files of the same layout"
    pair: list[list[Shard]] = []
    if revision:
        facts["revision"] = revision
    try:
        if not constants.HF_HUB_OFFLINE:  # offline, a table may still be in the hub's own cache
            url = f"{constants.ENDPOINT}/api/datasets/{repo}?expand=sha"
            latest = _reach(url, message).json()["sha"]
            facts["revision"] = revision or latest
        import datasets  # takes 1 to 6 s, so after the check

        for split in ("train", "validation") if streamed else ("train_sft", "test_sft"):
            rows = datasets.load_dataset(
                repo,
                "en" if streamed else None,
                split=split,
                streaming=streamed,
                revision=facts.get("revision"),
            )
            parts = {split: rows}
            if streamed:
                rows, count = rows.select_columns(["text"]), rows.num_shards  # no datetime parsing
                parts = {
                    f"c4-{split}.{at:05d}-of-{count:05d}.json.gz": rows.shard(count, at)
                    for at in range(count)
                }
            pair.append(
                [Shard(n, f"{repo}/{n}", partial(enumerate, part, 1)) for n, part in parts.items()]
            )
    except (OSError, KeyError) as error:  # as the hub's errors are; not the hub that answered
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else str(error).split("\n")[0]
        raise ValueError(message.format(f"{repo} could not be reached ({reason})")) from error
    return pair[0], pair[1]


def _reach(url: str, message: str) -> Any:
    """Ask once and briefly: the libraries themselves retry for 24 s, or wait without a limit."""
    import requests  # tiktoken's client: the same proxies and certificates

    try:
        response = requests.get(url, timeout=(2, 10))
        response.raise_for_status()
    except requests.RequestException as error:
        reason = f"{url.split('?')[0]} could not be reached ({type(error).__name__})"
        raise ValueError(message.format(reason)) from error
    return response


# ------------------------------------------------------------------------- the built-in corpora

CORPUS_VERSION = 1  # of the rules below
# Packages that requirements.txt always brings; a fixed list, which optional ones do not change.
PACKAGES = (
    *("torch", "numpy", "sympy", "pandas", "networkx", "mpmath", "datasets", "huggingface_hub"),
    *("pyarrow", "fsspec", "jinja2", "tiktoken", "safetensors"),
)
# Tests, copies of other packages, and compiler internals: a fifth of the code, 6 % of the text.
SKIPPED = {"tests", "test", "testing", "_vendor", "_inductor", "_dynamo", "_functorch", "_export"}
RECORD = 96  # bytes; a record ends with the paragraph that reaches them
LETTERS = 24  # fewest letters of a record
VALIDATION = 13 / 256  # share of the modules
FILES = {"docstrings": ("text", "json.gz", 4), "doctests": ("messages", "jsonl.gz", 1)}


def build_corpus(packages: Sequence[str] = PACKAGES) -> Path:
    """Write the docstrings of installed packages as C4-shaped shards, once, and say where.

    `docstrings/*.json.gz` holds {"text", "timestamp", "url"} lines, `doctests/*.jsonl.gz`
    conversations ("messages"), `corpus.json` versions and counts; both folders also work as
    `--data FOLDER`. Processes that start together wait for the first of them, and the result
    appears by renaming: complete or not at all.

    Args:
        packages: Names by which packages are installed and imported. None is imported.

    Returns:
        The folder, in `AUTOLOCO_CACHE` or `~/.cache/autoloco`, named after versions and rules.

    Raises:
        ValueError: A package is missing, or the cache cannot be written.
    """
    from filelock import FileLock

    try:
        versions = {name: importlib.metadata.version(name) for name in packages}
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"--data docstrings reads the package {error.name}: pip install -r requirements.txt"
        ) from error
    # The Python version decides what a source file parses to.
    python = ".".join(platform.python_version_tuple()[:2])
    about = {"corpus_version": CORPUS_VERSION, "python": python, "packages": versions}
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("AUTOLOCO_CACHE") or "~/.cache/autoloco").expanduser()
    corpus = cache / f"corpus-{key}"
    try:
        if not corpus.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{corpus}.lock"), tempfile.TemporaryDirectory(dir=cache) as scratch:
                if not corpus.exists():  # the one that held the lock may have built it
                    _write_corpus(Path(scratch, "corpus"), about)
                    os.replace(Path(scratch, "corpus"), corpus)
    except OSError as error:
        raise ValueError(
            f"{cache}: cannot write the corpus ({error}); set AUTOLOCO_CACHE"
        ) from error
    return corpus


def _write_corpus(root: Path, about: dict[str, Any]) -> None:
    """Extract, split by module, cut, de-duplicate and write."""
    splits = ("train", "validation")
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {kind: ({}, {}) for kind in FILES}
    seen = set()
    for package, version in about["packages"].items():
        for module, name, docstring in _docstrings(package):
            # Split before the cut, so that neighbours land on one side; a module's hash does not
            # change when other modules come and go.
            split = hashlib.sha256(module.encode()).digest()[0] < VALIDATION * 256
            url = f"docstring://{package}/{version}/{module}#{name}"
            texts: list[tuple[str, str, Any]]
            texts = [("docstrings", record, record) for record in _records(docstring)]
            if messages := _conversation(docstring):
                text = "\n".join(message["content"] for message in messages)
                texts.append(("doctests", text, messages))
            for kind, text, content in texts:
                letters = kind + re.sub(r"[\W\d_]+", "", text).lower()
                if len(letters) >= len(kind) + LETTERS and letters not in seen:
                    seen.add(letters)
                    row = {FILES[kind][0]: content, "timestamp": "1970-01-01T00:00:00Z", "url": url}
                    found[kind][split][text] = row
    counts = {}
    for kind, (_, suffix, files) in FILES.items():
        (root / kind).mkdir(parents=True)
        for text in _near_copies(found[kind][1], found[kind][0]):
            del found[kind][1][text]
        for rows, split_name, shards in zip(found[kind], splits, (files, 1), strict=True):
            # Ordered by hash: a shuffle without a generator, so that the first n are a fair sample.
            texts_in_order = sorted(rows, key=lambda text: hashlib.sha256(text.encode()).digest())
            counts[f"{kind}_{split_name}"] = len(rows)
            for at in range(shards):
                file = root / kind / f"{kind}-{split_name}.{at:05d}-of-{shards:05d}.{suffix}"
                with open(file, "wb") as raw, gzip.GzipFile("", "wb", 1, raw, mtime=0) as out:
                    for text in texts_in_order[at::shards]:
                        out.write(json.dumps(rows[text], ensure_ascii=False).encode() + b"\n")
    (root / "corpus.json").write_text(json.dumps({**about, "corpus": counts}, indent=1) + "\n")


def _docstrings(package: str) -> Iterator[tuple[str, str, str]]:
    """(module, name, docstring) of a package's files, which are parsed and never imported."""
    from tqdm import tqdm

    spec = importlib.util.find_spec(package)
    assert spec and spec.submodule_search_locations, f"{package} is not a package"
    root = Path(spec.submodule_search_locations[0])
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
    collecting = gc.isenabled()
    gc.disable()  # a syntax tree is millions of objects and no garbage: half of the time
    try:
        for file in tqdm(files, f"docstrings of {package}", leave=False, mininterval=1):
            parts = file.relative_to(root).with_suffix("").parts
            source = b"" if SKIPPED & set(parts) else file.read_bytes()
            if b'"""' not in source:
                continue
            module = ".".join((package, *parts)).removesuffix(".__init__")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other people's escape sequences
                try:
                    tree = ast.parse(source)
                except SyntaxError:  # a template, or for another Python, which is part of the key
                    continue
            for name, node in [("", tree), *_definitions(tree, "")]:
                if text := ast.get_docstring(node):
                    # Control characters and lone surrogates become spaces.
                    text = re.sub(r"[^\n -~\xa1-\ud7ff\ue000-\U0010ffff]", " ", text)
                    yield module, name, text
    finally:
        if collecting:
            gc.enable()


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, node) of the classes and functions in a node, at any depth."""
    for block in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, block, []):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
                yield from _definitions(child, f"{prefix}{child.name}.")
            elif hasattr(child, "body"):
                yield from _definitions(child, prefix)


def _records(docstring: str) -> Iterator[str]:
    """Cut a docstring, at ends of paragraphs, into records of at least `RECORD` bytes and a rest.

    About a third of the records, mostly such rests, are then shorter than 128 byte tokens. Without
    them all intervals would hold the same number of tokens, and the mapper (A.3) would never move.
    """
    # Lines of punctuation alone underline titles and rule tables: nothing to learn from.
    text = re.sub(r"(?m)^(?:[^\w\n]|_){4,}\n|[ \t]+$", "", docstring)
    record = ""
    for paragraph in re.split(r"\n\n+", text.strip("\n")):
        record = f"{record}\n\n{paragraph}".strip("\n")
        if len(record.encode()) >= RECORD:
            yield record
            record = ""
    if record:
        yield record


def _conversation(docstring: str) -> list[dict[str, str]]:
    """The doctests of a docstring: code from the user, its output from the assistant."""
    if ">>>" not in docstring:
        return []
    from doctest import DocTestParser

    try:
        examples = DocTestParser().get_examples(docstring)
    except ValueError:  # not a doctest after all
        return []
    messages, code = [], ""
    for example in examples:
        code = (code + re.sub(r"\s*#\s*doctest:.*", "", example.source).rstrip() + "\n").lstrip()
        if output := example.want.strip():  # code without output joins the next that has one
            messages.append({"role": "user", "content": code.rstrip()})
            messages.append({"role": "assistant", "content": output})
            code = ""
    return messages


def _near_copies(validation: Iterable[str], training: Iterable[str]) -> list[str]:
    """Validation texts of which over half of the five-word runs occur in the training texts."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}

    own = {text: runs(text) for text in validation}
    every: set[tuple[str, ...]] = set().union(*own.values())
    shared: set[tuple[str, ...]] = set()
    for text in training:
        shared |= every & runs(text)
    return [text for text, mine in own.items() if 2 * len(mine & shared) > len(mine)]


# --------------------------------------------------------------------------------------- opening


def open_source(
    data: str,
    tokenizer: str,
    *,
    seq_len: int,
    batch_size: int,
    workers: int,
    seed: int,
    partition: str,
    val_documents: int,
    chat: bool,
    init_from: str,
    revision: str = "",
) -> Source:
    """Open the data of a run.

    Args:
        data: "docstrings", "doctests", "c4", "ultrachat", or a path (`local_shards`).
        tokenizer: "bytes", "gpt2" or "llama3".
        seq_len: T, tokens.
        batch_size: B, documents a worker and step.
        workers: K.
        seed: Of every order, >= 0.
        partition: "iid" deals documents at random, "module" by source.
        val_documents: Most validation documents.
        chat: Read conversations (`messages`); loss on the assistant's tokens.
        init_from: Folder of the initial weights, or "". A `tokenizer.model` in it or in its
            `original/` is preferred to one beside local data: the weights were trained with it.
        revision: Of a dataset on the hub, for a resume; "" for the latest.

    Returns:
        The source.

    Raises:
        ValueError: The user's mistake in one line: an unknown name, data that is not within reach,
            or a damaged file with its line.
    """
    if partition not in ("iid", "module"):
        raise ValueError(f"--partition {partition}: unknown; there are iid and module")
    kinds = ("plain texts", "conversations")
    if chat != NAMED.get(data, chat):
        raise ValueError(f"--data {data} holds {kinds[not chat]}; this recipe needs {kinds[chat]}")
    if chat and tokenizer == "gpt2":
        raise ValueError("--tokenizer gpt2 has no chat tokens; conversations need bytes or llama3")
    indexed = chat or data == "docstrings"
    if partition == "module" and not indexed:
        raise ValueError(f"--partition module: --data {data} is streamed, which cannot be sorted")
    path = Path(data)
    folders = [Path(init_from), Path(init_from, "original")] if init_from else []
    if data not in NAMED:
        folders.append(path if path.is_dir() else path.parent)
    encoding, tokenizer_file = load_tokenizer(tokenizer, folders)
    facts: dict[str, Any] = {"data": data, "partition": partition}
    parts = ("", "")
    hub = data in ("c4", "ultrachat")
    if hub:
        training, held = hub_shards(data, facts, revision)
    else:
        if data in NAMED:
            corpus = build_corpus()
            facts |= json.loads((corpus / "corpus.json").read_text())
            path = corpus / data
        training, held = local_shards(path)
        if not held:
            held, parts = training, ("training", "validation")
            facts["validation"] = f"every {HOLD_OUT}th line of the files, held out of training"
    settings: dict[str, Any] = {
        "tokenizer": encoding,
        "tokenizer_file": tokenizer_file,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "workers": workers,
        "seed": seed,
        "chat": chat,
        "val_documents": val_documents,
        "facts": facts,
    }
    digest = hashlib.sha256()
    if indexed:
        feed = None if hub else digest  # of lines, not of gzip's bytes; the hub has its revision
        documents = list(documents_of(training, chat, parts[0], feed))
        settings["held"] = list(documents_of(held, chat, parts[1], feed))
        source: Source = Indexed(documents=documents, partition=partition, **settings)
    else:
        settings["held"] = documents_of(held, chat, parts[1])
        source = Streamed(shards=training, part=parts[0], **settings)
        facts["shards"] = len(training)
    if not hub and isinstance(source, Streamed):
        source.check()
        for shard in training + held:  # their content may be hundreds of gigabytes
            digest.update(f"{shard.name} {os.path.getsize(shard.path)}\n".encode())
    if not hub:
        facts["sha256" if indexed else "sha256_of_names_and_sizes"] = digest.hexdigest()
    return source
