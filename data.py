"""Documents, tokenizers and batches: a batch is a pure function of (seed, worker, step).

Reading order: `Batch`, `Source.batch`, the two ways in which documents are dealt to workers
(`Indexed`: any of them at any time; `Streamed`: shards are read in order), then tokenizers, files,
and the built-in corpus. Symbols (README has all): K workers, worker k, step s; B = batch_size,
documents a worker and step; T = seq_len, tokens. Documents are truncated or padded to T and never
packed (E.1); padding counts neither in the loss nor in `Batch.tokens`. Nothing here touches a
global random generator.
"""

import ast
import base64
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from model import IGNORE

HUB = {"c4": "allenai/c4", "ultrachat": "HuggingFaceH4/ultrachat_200k"}
BUILT_IN = {"docstrings": ("text", "json.gz", 4), "doctests": ("messages", "jsonl.gz", 1)}
NAMED = (*BUILT_IN, *HUB)
HOLD_OUT = 20  # without validation files, rows 1, 21, 41, ... of local files are validation
SAMPLE = 256  # documents from which the share of the text that is read is estimated

Facts = dict[str, Any]  # JSON-ready
Messages = tuple[tuple[str, str], ...]  # (role, content) of each turn


class Batch(NamedTuple):
    """B documents as the model reads them.

    `inputs` (B, T) int64: a document's first T tokens, padded on the right with the end token.
    `targets` (B, T) int64: the token after each input; `IGNORE` where there is nothing to predict
    (padding, a document's last token, in chat all that is not the assistant's). `tokens`:
    non-padding positions of `inputs` that have a successor, the user's included; their sum over
    workers is what the token mapper counts (A.3). `ids`: "FILE:LINE" of each document.
    """

    inputs: Tensor
    targets: Tensor
    tokens: int
    ids: tuple[str, ...]


class Document(NamedTuple):
    """A text, a conversation, or a text's piece as token ids; `url` orders `--partition module`."""

    id: str
    content: Any  # str, Messages, or ids (L,) int32; while a conversation is not read, its place
    url: str


class Shard(NamedTuple):
    """Rows in order, the first on line 1: JSON lines as bytes, or decoded objects.

    `held_out` says which are meant: every `HOLD_OUT`-th (True), the others (False), or all (None).
    """

    path: Path
    rows: Any  # an iterable; where documents are indexed, a sequence
    held_out: bool | None = None


# ---------------------------------------------------------------------- batches and their dealing

Files = tuple[list[Shard], list[Shard]]  # training and validation
Masked = tuple[np.ndarray, np.ndarray]  # ids, and whether each is to be predicted: (L,), (L,) bool


class Source(ABC):
    """The documents of a run, dealt to K workers.

    `facts` says what was opened (JSON-ready, equal at a resume), `notes` what the user should read
    once at the start.
    """

    def __init__(self, config: Any, tokenizer: "Tokenizer", facts: Facts, files: Files) -> None:
        self.config, self.tokenizer, self.facts = config, tokenizer, facts
        self.vocab_size, self.chat = tokenizer.vocab_size, facts["chat"]
        self.seq_len, self.batch_size = config.seq_len, config.batch_size
        self.workers, self.digest = config.workers, hashlib.sha256()  # of the rows read so far
        self.notes: list[str] = []
        self.held: list[Document] = []  # validation documents
        self._deal(*files)

    @abstractmethod
    def _deal(self, training: Sequence[Shard], held: Sequence[Shard]) -> None:
        """Read what must be read at the start, and say what it is."""

    def batch(self, worker: int, step: int) -> Batch:
        """The documents of worker k in [0, K) at step s >= 0: the same whenever it is asked."""
        assert 0 <= worker < self.workers and step >= 0, f"no batch for {worker=}, {step=}"
        return self._collate(self._documents(worker, step))

    def validation(self) -> Iterator[Batch]:
        """The validation documents in batches of B, the last maybe smaller; always the same."""
        for first in range(0, len(self.held), self.batch_size):
            yield self._collate(self.held[first : first + self.batch_size])

    @abstractmethod
    def _documents(self, worker: int, step: int) -> list[Document]:
        """The B documents of (worker, step)."""

    def _hold(self, documents: Iterable[Document]) -> None:
        """Keep the first usable ones for validation."""
        # They are read now: a damaged file must not end a run of days in its last minute.
        usable = (document for document in documents if self._usable(document.content))
        self.held = list(islice(usable, self.config.val_documents))
        self.facts["validation_documents"] = len(self.held)

    def _read(self, shard: Shard) -> Iterator[tuple[int, Document]]:
        """(line, document) of a shard; of a text that is split, its pieces."""
        for line, row in rows_of(shard):
            row_bytes = row if isinstance(row, bytes) else json.dumps(row, default=str).encode()
            self.digest.update(row_bytes)
            document = document_of(shard, line, row, self.chat)
            if self.config.long_documents == "cut":
                yield line, document
                continue
            ids = self.tokenizer.encode(document.content).astype(np.int32)
            for first in range(0, max(1, len(ids)), self.seq_len):
                yield line, document._replace(content=ids[first : first + self.seq_len])

    def _encode(self, content: Any, limit: int) -> Masked:
        """A document's first `limit` tokens."""
        if isinstance(content, tuple):
            return encode_chat(self.tokenizer, content, limit)
        body = self.tokenizer.encode(content) if isinstance(content, str) else content
        begin, end = self.tokenizer.begin, self.tokenizer.end
        ids = np.concatenate(([begin], body[: limit - 1], [end]))[:limit]
        return ids, np.ones(len(ids), bool)

    def _usable(self, content: Any) -> bool:
        """Whether truncation leaves something to predict: of a conversation, an assistant token."""
        if not self.chat:
            return True
        # A text has no more tokens than bytes. This bound on the first assistant token's position
        # settles nearly every conversation without tokenising a gigabyte before the first step.
        bound = 14
        for role, text in content:
            if role == "assistant" and bound <= self.seq_len:
                return True
            bound += 5 + len((role + text).encode())
        return bool(self._encode(content, self.seq_len + 1)[1].any())

    def _collate(self, documents: Sequence[Document]) -> Batch:
        shape = (len(documents), self.seq_len)  # (B, T)
        inputs = np.full(shape, self.tokenizer.end, np.int64)
        targets = np.full(shape, IGNORE, np.int64)
        tokens = 0
        for row, document in enumerate(documents):
            ids, predicted = self._encode(document.content, self.seq_len + 1)
            inputs[row, : len(ids)] = ids[: self.seq_len]
            targets[row, : len(ids) - 1] = np.where(predicted[1:], ids[1:], IGNORE)
            tokens += len(ids) - 1
        names = tuple(document.id for document in documents)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), tokens, names)

    def _note_share(self, sample: Sequence[Document]) -> None:
        """Say which share of the text is read, by the tokens of a sample of the documents."""
        # Without the tokens that begin and end a document.
        lengths = [len(self._encode(d.content, sys.maxsize)[0]) - 2 for d in sample]
        share = sum(min(length, self.seq_len) for length in lengths) / max(1, sum(lengths))
        self.facts["text_read_share"] = round(share, 4)
        remedy = "" if share == 1 or self.chat else "; --long-documents split reads all of them"
        how = f"documents are {self.config.long_documents} at --seq-len {self.seq_len} tokens"
        self.notes.append(f"{share:.2%} of the text is read: {how}{remedy}")


class Indexed(Source):
    """Documents that can be read in any order: all but C4 and local texts in JSON lines.

    Step s, worker k, row i of the batch hold document number n of the run:

        n = (s K + k) B + i                                                           E.1
        document = permutation of epoch n // N [n % N]         N documents

    so global batches are shared, shuffled and split over the workers, and nothing repeats within
    an epoch, whatever N, K and B are. `--partition module` sorts documents by source (url), cuts
    them into K equal ranges, and deals n = s B + i of range k to worker k. Conversations without a
    target are dropped and counted.
    """

    def _deal(self, training: Sequence[Shard], held: Sequence[Shard]) -> None:
        found, count, module = [], 0, self.config.partition == "module"
        for shard in training:
            for line, document in self._read(shard):
                count += 1
                if self._usable(document.content):
                    # Conversations may be larger than the memory, so only their place is kept.
                    place = document._replace(content=(shard, line))
                    found.append(place if self.chat else document)
        self._hold([document for shard in held for _, document in self._read(shard)])
        kept, ranges = len(found), self.workers if module else 1
        self.facts |= {"documents": kept, "dropped": count - kept}
        self.facts["sha256"] = self.digest.hexdigest()  # of rows, not of gzip's bytes
        if kept < ranges or not self.held:
            few = f"{kept} for training (needed: {ranges}), {len(self.held)} for validation"
            few = f"too few documents fit: {few}, {count - kept} dropped"
            raise ValueError(f"--data {self.config.data}: {few}")
        if module and not all(document.url for document in found):
            raise ValueError("--partition module: the documents need a 'url' to sort them by")
        if module:
            found.sort(key=lambda document: document.url.split("://")[-1])
        cuts = [at * kept // ranges for at in range(ranges + 1)]
        self._ranges = [found[low:high] for low, high in pairwise(cuts)]

        @lru_cache(ranges)  # of each range, the epoch that it is in
        def order(own: int, epoch: int) -> np.ndarray:
            generator = np.random.default_rng([self.config.seed, epoch, own])
            return generator.permutation(len(self._ranges[own]))

        self._order = order
        self._note_share([self._whole(document) for document in found[:: -(-kept // SAMPLE)]])

    def _whole(self, document: Document) -> Document:
        """A document, read now if it is a conversation."""
        if not self.chat:
            return document
        shard, line = document.content
        return document_of(shard, line, shard.rows[line - 1], self.chat)

    def _documents(self, worker: int, step: int) -> list[Document]:
        shared = self.config.partition == "iid"
        own, turn = (0, step * self.workers + worker) if shared else (worker, step)
        found, first = self._ranges[own], turn * self.batch_size
        numbers = [divmod(n, len(found)) for n in range(first, first + self.batch_size)]
        return [self._whole(found[self._order(own, epoch)[at]]) for epoch, at in numbers]


class Streamed(Source):
    """Shards read in order: C4, and local files of its layout.

    The seed shuffles the shards, which go to workers whole: worker k reads every K-th, from the
    k-th on. Where there are fewer shards than workers, the n workers of a shard share its rows: row
    i goes to number i mod n of them. Either way no two workers hold the same document, and each
    starts again when it has seen all of its own. Step s, row i of the batch hold document number
    s B + i of the worker. There is no shuffle buffer over rows: a resume would lose its content.
    """

    def _deal(self, training: Sequence[Shard], held: Sequence[Shard]) -> None:
        self._hold(document for shard in held for _, document in self._read(shard))
        self.facts["shards"] = len(training)
        order = np.random.default_rng(self.config.seed).permutation(len(training))
        shards = [training[at] for at in order]
        self._open: dict[int, tuple[int, Iterator[Document]]] = {}  # worker: (next number, rows)
        self._dealt: list[tuple[list[Shard], int, int]] = []  # worker: (shards, sharers, own slot)
        for worker in range(self.workers):
            # One expression covers both cases: with enough shards, sharers is 1 and slot is 0.
            first, slot = worker % len(shards), worker // len(shards)
            sharers = len(range(first, self.workers, len(shards)))
            self._dealt.append((shards[first :: self.workers], sharers, slot))
        sample = self.held[:SAMPLE]
        if self.config.data not in HUB:
            for worker in range(self.workers):  # a wrong file is found before training starts
                next(self._stream(worker, 0))
            sample = list(islice(self._stream(0, 0), SAMPLE))
            self._weigh([*training, *held])
        self._note_share(sample)

    def _weigh(self, shards: Sequence[Shard]) -> None:
        """Record names and sizes (contents may be hundreds of gigabytes); note uneven shares."""
        sizes = {shard.path: shard.path.stat().st_size for shard in shards}
        listed = "".join(f"{shard.path.name} {sizes[shard.path]}\n" for shard in shards)
        self.facts["sha256_of_names_and_sizes"] = hashlib.sha256(listed.encode()).hexdigest()
        own = [sum(sizes[s.path] for s in dealt) / sharers for dealt, sharers, _ in self._dealt]
        if 10 * min(own) * self.workers < sum(own):
            least = f"worker {own.index(min(own))} repeats {min(own) / sum(own):.2%} of the text"
            remedy = "put all rows into one file, which the workers share"
            self.notes.append(f"uneven files: {least}; {remedy}")

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
        shards, sharers, slot = self._dealt[worker]
        while True:
            own = 0
            for shard in shards:
                for line, row in islice(rows_of(shard), slot, None, sharers):
                    own += 1
                    if own > skip:
                        yield document_of(shard, line, row, self.chat)
            if not own:  # or this loop would spin for ever
                raise ValueError(f"{shards[0].path}: no training document for worker {worker}")
            skip = max(0, skip - own) % own


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
KINDS = {
    "bytes": (r"[\s\S]", BYTE_SPECIALS),
    "gpt2": (GPT2_PATTERN, GPT2_SPECIALS),  # A19
    "llama3": (LLAMA_PATTERN, LLAMA_SPECIALS),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
# The text that `encode_chat` tokenises, as transformers has it.
CHAT_TEMPLATE = (
    r"{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    r"'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if "
    r"add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


class Tokenizer:
    """Text to token ids and back, by tiktoken.

    `begin` starts a document; `end` ends a text, and pads; `turn_end` ends a message, where there
    are the tokens of Llama 3's `chat` format. `encoding` is the library's own object; `token_bytes`
    (vocab_size,) int64 are the UTF-8 bytes that each token stands for, 0 for specials.
    """

    def __init__(
        self, name: str, encoding: Any, ids: dict[str, Any], ends: Sequence[str], sizes: list[int]
    ) -> None:
        self.name, self.encoding = name, encoding
        self.token_bytes, self.vocab_size = torch.tensor(sizes), len(sizes)
        self.begin, self.end = (ids[token] for token in ends)
        *self.header, self.turn_end = map(ids.get, BYTE_SPECIALS[2:])
        self.chat = None not in (*self.header, self.turn_end)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, (L,) integers; the name of a special token is text."""
        if self.name == "bytes":  # no need to pass each byte through a regex
            return np.frombuffer(text.encode(), np.uint8)
        return np.array(self.encoding.encode_ordinary(text), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by name."""
        return self.encoding.decode([int(token) for token in ids])


class JsonTokenizer(Tokenizer):
    """The same by Hugging Face's `tokenizers`."""

    def encode(self, text: str) -> np.ndarray:
        """See Tokenizer."""
        return np.array(self.encoding.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """See Tokenizer."""
        return self.encoding.decode([int(token) for token in ids], skip_special_tokens=False)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder of weights holds a file that `open_tokenizer` looks for."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def tokenizer_folders(config: Any) -> list[Path]:
    """Where a run's "gpt2" or "llama3" is looked for: beside its weights, then beside its data."""
    path = Path(config.data)
    folders = [] if config.data in NAMED else [path if path.is_dir() else path.parent]
    return [Path(config.init_from), *folders] if config.init_from else folders


def open_tokenizer(name: str, near: Sequence[Path] = ()) -> Tokenizer:
    """The tokenizer of a name ("bytes", "gpt2", "llama3") or of a path.

    "gpt2" and "llama3" are read from the first `tokenizer.model` (tiktoken's format) in the folders
    `near`. A path is a folder or file: a `tokenizer.json`, or such a `tokenizer.model` of Llama 3.
    ValueError: none of these, or a damaged file.
    """
    if name == "bytes":
        return _byte_pairs(name, name, {bytes([value]): value for value in range(256)})
    folders, names = [Path(name)], ["", *TOKENIZER_FILES]
    if name in KINDS:
        folders, names = [*near], [*TOKENIZER_FILES[1:]]
    files = [folder / each for folder in folders for each in names if (folder / each).is_file()]
    if files and files[0].suffix == ".json":
        return _from_json(name, files[0])
    if files:
        kind = name if name in KINDS else "llama3"
        return _byte_pairs(f"{name} from {files[0]}", kind, _read_vocabulary(files[0]))
    if name == "gpt2":
        return _byte_pairs(name, name, _published_gpt2())
    places = f"{', '.join(KINDS)}, nor a path with {' or '.join(TOKENIZER_FILES)}"
    beside = "for llama3 a tokenizer.model is looked for beside --data and in --init-from"
    raise ValueError(f"--tokenizer {name}: not one of {places}; {beside}")


def check_vocabulary(source: Source, model_vocab: int) -> None:
    """Refuse a tokenizer whose ids exceed the model's embedding; note one that hardly uses it."""
    size, flag = source.vocab_size, f"--tokenizer {source.tokenizer.name}"
    remedy = f"with --init-from take the weights' own --tokenizer, else --vocab-size {size}"
    if size > model_vocab:
        where = f"{flag}: ids reach {size - 1}, the model's vocabulary ends at {model_vocab - 1}"
        raise ValueError(f"{where}: {remedy}")
    if 4 * size < model_vocab:
        source.notes.append(f"{flag} uses {size} of the model's {model_vocab} tokens: {remedy}")


def encode_chat(tokenizer: Tokenizer, messages: Messages, limit: int) -> Masked:
    r"""Ids of a conversation in Llama 3.1's format, and which of them the assistant writes.

        <|begin_of_text|> and per message <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>

    TEXT is stripped as in Llama's template, whose default system message (dates) is left out. The
    loss is taken on the assistant's TEXT and its <|eot_id|> (E.1). At most `limit` tokens.
    """
    start, end = tokenizer.header
    ids, predicted = [tokenizer.begin], [False]
    for role, content in messages:
        # Llama's pattern ends a piece at a line break before text, so "\n\n" and TEXT encoded apart
        # give the tokens that they give together, and the mask starts exactly at TEXT.
        header = [start, *tokenizer.encode(role), end, *tokenizer.encode("\n\n")]
        body = [*tokenizer.encode(content.strip()), tokenizer.turn_end]
        ids += header + body
        predicted += [False] * len(header) + [role == "assistant"] * len(body)
        if len(ids) >= limit:
            break
    return np.array(ids[:limit], np.int64), np.array(predicted[:limit], bool)


def _byte_pairs(name: str, kind: str, numbers: dict[bytes, int]) -> Tokenizer:
    """A tokenizer whose specials follow its ordinary tokens, which come in order."""
    pattern, specials = KINDS[kind]
    ids = {special: len(numbers) + at for at, special in enumerate(specials)}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=numbers, special_tokens=ids)
    ends, sizes = (specials[0], specials[1 % len(specials)]), [*map(len, numbers), *[0] * len(ids)]
    return Tokenizer(name, encoding, ids, ends, sizes)


def _from_json(name: str, file: Path) -> Tokenizer:
    """A Hugging Face `tokenizer.json`; which tokens begin and end a text stands beside it."""
    try:
        from tokenizers import Tokenizer as Reader

        encoding = Reader.from_file(str(file))
        config = json.loads(file.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
        found = [config.get(key) or "" for key in ("bos_token", "eos_token")]
        begin, end = (each["content"] if isinstance(each, dict) else each for each in found)
        encoding.no_truncation()
        encoding.encode_special_tokens = True  # their names are text
        byte_level = "ByteLevel" in str(encoding.decoder)  # a token's characters are bytes
        ids = encoding.get_vocab()
        sizes = [0] * (max(ids.values()) + 1)
        for token, at in ids.items():
            sizes[at] = len(token if byte_level else re.sub("<0x..>|\u2581", ".", token).encode())
        for at, added in encoding.get_added_tokens_decoder().items():
            sizes[at] = 0 if added.special else len(added.content.encode())
        ends = (begin or end, end or begin)
        return JsonTokenizer(f"{name} from {file}", encoding, ids, ends, sizes)
    except Exception as error:  # the library raises nothing more exact
        need = "the package tokenizers, and tokenizer_config.json with its bos_token or eos_token"
        raise ValueError(f"{file}: cannot be read; it needs {need} ({error!r})") from error


def _published_gpt2() -> dict[bytes, int]:
    """GPT-2's tokens from tiktoken's cache, or else from the network."""
    from tiktoken_ext import openai_public

    try:
        return openai_public.gpt2()["mergeable_ranks"]
    except (OSError, ValueError) as error:  # requests' errors, and a broken download
        raise ValueError(f"--tokenizer gpt2: it could not be fetched ({error})") from error


def _read_vocabulary(file: Path) -> dict[bytes, int]:
    """Tokens of a file in tiktoken's format, a line "BASE64 NUMBER", numbered in order."""
    # tiktoken's own reader caches by path: it would read a changed file stale.
    numbers: dict[bytes, int] = {}
    for line, row in enumerate(Lines(file), 1):
        try:
            encoded, number = row.split()
            token = base64.b64decode(encoded, validate=True)
            if numbers.setdefault(token, int(number)) != line - 1:
                raise ValueError("out of order, or there twice")
        except ValueError as error:  # binascii.Error is one
            raise ValueError(f"{file}:{line}: not 'BASE64 NUMBER' of the next token") from error
    if not {bytes([value]) for value in range(256)} <= numbers.keys():  # tiktoken would panic later
        raise ValueError(f"{file}: no token for some of the 256 bytes: it was cut off")
    return numbers


# --------------------------------------------------------------------------------- files and rows

LINES = (".jsonl", ".jsonl.gz", ".json.gz")
TEXTS = {".md": "document", ".txt": "paragraph"}  # what is a document of a file
READERS = {".json": "json", ".parquet": "parquet", **dict.fromkeys(TEXTS, "text")}


class Lines:
    """Lines of a file, gzipped if it ends in `.gz`, in order or by number; errors name the line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[bytes]:
        line = 0
        try:
            with (gzip.open if self.path.suffix == ".gz" else open)(self.path, "rb") as file:
                for row in file:
                    line += 1
                    yield row
            if line == 0:
                raise EOFError("the file is empty")
        except Exception as error:  # broken gzip is of several kinds
            raise ValueError(f"{self.path}:{line + 1}: cannot be read ({error})") from error

    def __getitem__(self, at: int) -> bytes:
        content, starts = self._content
        return content[starts[at] : starts[at + 1]].tobytes()

    @cached_property
    def _content(self) -> tuple[np.ndarray, np.ndarray]:
        """All bytes, and where each line starts; a plain file is mapped: processes share it."""
        starts = np.cumsum([0, *map(len, self)])
        if self.path.suffix == ".gz":
            return np.frombuffer(b"".join(self), np.uint8), starts
        return np.memmap(self.path, mode="r"), starts


def rows_of(shard: Shard) -> Iterator[tuple[int, Any]]:
    """(line, row) of those rows that are meant; blank lines are skipped but count in `line`."""
    number = 0
    for line, row in enumerate(shard.rows, 1):
        if isinstance(row, bytes) and row.isspace():
            continue
        if shard.held_out in (None, number % HOLD_OUT == 0):
            yield line, row
        number += 1


def document_of(shard: Shard, line: int, row: Any, chat: bool) -> Document:
    """The document in a row's field `messages` (chat) or `text`; a ValueError names the line."""
    field = "messages" if chat else "text"
    try:
        fields = json.loads(row) if isinstance(row, bytes) else row  # also with a byte order mark
        content, url = fields[field], str(fields.get("url") or "")
        if chat:
            content = tuple((message["role"], message["content"]) for message in content)
            if not {role for role, _ in content} <= {"system", "user", "assistant"}:
                raise ValueError("unknown role")
        (content if not chat else "".join(text for _, text in content)).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        shape = "[{'role': 'system'|'user'|'assistant', 'content': TEXT}, ...]" if chat else "TEXT"
        what = f"no field {field!r} with {shape} in valid Unicode"
        raise ValueError(f"{shard.path}:{line}: {what} ({error})") from error
    return Document(f"{shard.path.name}:{line}", content, url)


def local_shards(path: Path) -> Files:
    """Training and validation shards of `--data PATH`: a file or a folder.

    Of a folder (and C4's `en` or the hub's `data` in it) JSON lines are taken or else .parquet, in
    the order of names; those with the word "validation", "valid", "val" or "test", or such splits,
    are for validation. Else all text in and below it is taken: a .md file is a document, and those
    of a .txt file end at empty lines.
    """
    groups = {path: [path]}  # the files of each shard
    found: list[Shard] = []
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = _table(path, "load_from_disk", path)
        splits = saved if isinstance(saved, dict) else {path.name: saved}
        groups, found = {}, [Shard(path / name, rows) for name, rows in splits.items()]
    elif path.is_dir():
        files = [f for at in (path, path / "en", path / "data") for f in sorted(at.glob("*"))]
        groups = {f: [f] for f in files if f.name.endswith(LINES)}
        groups = groups or {f: [f] for f in files if f.suffix == ".parquet"}
        groups = groups or {path / f"*{kind}": sorted(path.rglob(f"*{kind}")) for kind in TEXTS}
    for place, files in groups.items():
        kind = place.suffix
        if place.name.endswith(LINES):
            found.append(Shard(place, Lines(place)))
        elif kind in READERS and files:
            options: dict[str, Any] = {"data_files": [*map(str, files)], "split": "train"}
            options |= {"sample_by": TEXTS[kind]} if kind in TEXTS else {}
            found.append(Shard(place, _table(place, "load_dataset", READERS[kind], **options)))
    shards: Files = ([], [])
    for shard in found:
        name = shard.path.name
        word = re.search(r"(?<![a-z])(validation|valid|val|test)(?![a-z])", name.lower())
        shards[word is not None and name != path.name].append(shard)
    if not shards[0]:
        kinds = ", ".join((*NAMED, *LINES, *READERS, "a folder of one of these"))
        raise ValueError(f"--data {path}: no training file; what can be read: {kinds}")
    return shards


def _table(path: Path, reader: str, what: Any, **options: Any) -> Any:
    """What a reader of `datasets` makes of files: a table on disk, mapped into memory."""
    import datasets  # takes 1 to 6 s, so not before it is needed

    try:
        return getattr(datasets, reader)(what, **options)
    except Exception as error:  # of any kind, as the libraries below it raise
        raise ValueError(f"{path}: cannot be read ({error.__cause__ or error})") from error


def hub_shards(data: str, facts: Facts, revision: str = "") -> Files:
    """Training and validation shards of C4 (en, streams) or UltraChat-200k (tables) on the hub.

    `facts` gets the revision: the given one, or the latest. Who names C4 gets C4, or one line.
    """
    from huggingface_hub import HfApi, constants

    streamed, repo = data == "c4", HUB[data]
    shards: Files = ([], [])
    try:
        if not constants.HF_HUB_OFFLINE:  # offline, a table may still be in the hub's own cache
            # Asked once and briefly: datasets retries for 24 s.
            info = HfApi().dataset_info(repo, revision=revision or None, expand=["sha"], timeout=10)
            facts["revision"] = revision = info.sha or ""
        import datasets  # takes 1 to 6 s, so after the check

        options = {"streaming": streamed, "revision": revision or None}
        splits = ("train", "validation") if streamed else ("train_sft", "test_sft")
        for part, split in zip(shards, splits, strict=True):
            rows = datasets.load_dataset(repo, "en" if streamed else None, split=split, **options)
            rows = rows.select_columns(["text" if streamed else "messages"])  # no parsing of dates
            count = rows.num_shards if streamed else 1
            for at in range(count):
                name = f"c4-{split}.{at:05d}-of-{count:05d}.json.gz" if streamed else split
                part.append(Shard(Path(repo, name), rows.shard(count, at)))
    except Exception as error:  # of any kind, as the libraries raise
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else str(error).split("\n")[0]
        remedy = "--data PATH reads local files of the same layout"
        what = f"{repo} could not be reached ({reason})"
        raise ValueError(f"--data {data}: {what}; {remedy}") from error
    return shards


def open_source(config: Any, revision: str = "") -> Source:
    """Open the data of a run, from the hub as of `revision` ("" for the latest).

    Of `config` (train.Config) it reads data, tokenizer, init_from, seq_len, batch_size, workers,
    seed, partition, val_documents and long_documents. Data hold conversations where the first row
    has `messages`.
    """
    data = config.data
    tokenizer = open_tokenizer(config.tokenizer, tokenizer_folders(config))
    facts: Facts = {"data": data, "partition": config.partition}
    facts |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    folder = Path(data)
    if data in BUILT_IN:
        folder = build_corpus() / data
        facts |= json.loads((folder.parent / "corpus.json").read_text())
    training, held = hub_shards(data, facts, revision) if data in HUB else local_shards(folder)
    _, row = next(rows_of([*held, *training][0]), (1, b""))
    with suppress(ValueError, RecursionError):  # a damaged row is named where it is read
        row = json.loads(row) if isinstance(row, bytes) else row
    chat = facts["chat"] = isinstance(row, dict) and "messages" in row
    if not held:
        held = [shard._replace(held_out=True) for shard in training]
        training = [shard._replace(held_out=False) for shard in training]
        facts["validation"] = f"every {HOLD_OUT}th line of the files, held out of training"
    split, module = config.long_documents == "split", config.partition == "module"
    if chat and not tokenizer.chat:
        raise ValueError(f"--tokenizer {tokenizer.name}: conversations need Llama 3's chat tokens")
    # JSON lines of texts are read as C4 is: they may be larger than a disk.
    lines = all(isinstance(shard.rows, Lines) for shard in training)
    stream = data == "c4" or (lines and not (chat or split or data in BUILT_IN))
    if (split and (chat or stream)) or (module and stream):
        flag = "--long-documents split" if split else "--partition module"
        what = "holds conversations" if chat else "is streamed, which cannot be sorted or split"
        raise ValueError(f"{flag}: --data {data} {what}")
    source = (Streamed if stream else Indexed)(config, tokenizer, facts, (training, held))
    if recorded := RECORDED_SHA256.get(data):
        own = facts["corpus_sha256"] = facts["corpus"][f"{data}_sha256"]
        other = f"differs from that of the recorded results ({recorded[:8]}): losses will differ"
        verdict = "as the recorded results" if own == recorded else other
        source.notes.append(f"corpus {own[:8]}, {verdict}")
    return source


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
VALIDATION = 13  # of 256 modules
RECORDED_SHA256 = {  # of the texts that the recorded results were trained on
    "docstrings": "ecf5024a5b4aaf1aa08854cc65d2024fb3cc77a08fe54ef1ec262c17fa1df393",
    "doctests": "b0c1d161b699e63d5990f9da75507d526208679b0cdea280a2281a316e7c340e",
}
SPLITS = ("train", "validation")


def build_corpus(packages: Sequence[str] = PACKAGES) -> Path:
    """Write the docstrings of installed packages as C4-shaped shards, once, and say where.

    `docstrings/*.json.gz` holds {"text", "timestamp", "url"} lines, `doctests/*.jsonl.gz`
    conversations ("messages"), `corpus.json` versions and counts; both folders also work as
    `--data FOLDER`. No package is imported.
    """
    from filelock import FileLock

    try:
        versions = {name: importlib.metadata.version(name) for name in packages}
    except ImportError as error:
        raise ValueError(f"--data docstrings: {error}: pip install -r requirements.txt") from error
    python = "{}.{}".format(*sys.version_info)  # decides what a source file parses to
    about = {"corpus_version": CORPUS_VERSION, "python": python, "packages": versions}
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("AUTOLOCO_CACHE") or "~/.cache/autoloco").expanduser()
    target = cache / f"texts-{key}"
    try:
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock"), tempfile.TemporaryDirectory(dir=cache) as scratch:
                if not target.exists():  # the process that held the lock may have written it
                    _write_corpus(Path(scratch, "new"), about)
                    os.replace(Path(scratch, "new"), target)
    except OSError as error:
        raise ValueError(f"{cache}: cannot be written ({error}); set AUTOLOCO_CACHE") from error
    return target


def _write_corpus(root: Path, about: dict[str, Any]) -> None:
    """Extract, split by module, cut, de-duplicate and write."""
    packages = ", ".join(about["packages"])
    print(f"building the text of the tiny recipes, once: docstrings of {packages}", file=sys.stderr)
    found: dict[tuple[str, str], dict[str, str]] = {(k, s): {} for k in BUILT_IN for s in SPLITS}
    seen = set()
    for package, version in about["packages"].items():
        for module, name, docstring in _docstrings(package):
            # Split before the cut, so that neighbours land on one side; a module's hash does not
            # change when other modules come and go.
            split = SPLITS[hashlib.sha256(module.encode()).digest()[0] < VALIDATION]
            row = {"timestamp": "1970-01-01T00:00:00Z"}
            row["url"] = f"docstring://{package}/{version}/{module}#{name}"
            contents: list[Any] = [*_records(docstring), _conversation(docstring)]
            for content in contents:
                kind, text = "docstrings", content
                if isinstance(content, list):
                    kind, text = "doctests", "\n".join(turn["content"] for turn in content)
                letters = re.sub(r"[\W\d_]+", "", text).lower()
                if len(letters) >= LETTERS and (kind, letters) not in seen:
                    seen.add((kind, letters))
                    fields = {BUILT_IN[kind][0]: content, **row}
                    found[kind, split][text] = json.dumps(fields, ensure_ascii=False) + "\n"
    counts: dict[str, Any] = {}
    for kind, (_, suffix, files) in BUILT_IN.items():
        (root / kind).mkdir(parents=True)
        digest = hashlib.sha256()  # of the texts alone: a url has the exact version
        training, held = (found[kind, split] for split in SPLITS)
        for text in _near_copies(held, training):
            del held[text]
        for split, lines, shards in (("train", training, files), ("validation", held, 1)):
            # Ordered by hash: a shuffle without a generator, so that the first n are a fair sample.
            texts = sorted(lines, key=lambda text: hashlib.sha256(text.encode()).digest())
            counts[f"{kind}_{split}"] = len(texts)
            digest.update("\0".join(texts).encode())
            for at in range(shards):
                file = root / kind / f"{kind}-{split}.{at:05d}-of-{shards:05d}.{suffix}"
                content = "".join(lines[text] for text in texts[at::shards]).encode()
                file.write_bytes(gzip.compress(content, 1, mtime=0))
        counts[f"{kind}_sha256"] = digest.hexdigest()
    (root / "corpus.json").write_text(json.dumps({**about, "corpus": counts}, indent=1) + "\n")


def _docstrings(package: str) -> Iterator[tuple[str, str, str]]:
    """(module, name, docstring) of a package's files, which are parsed and never imported."""
    from tqdm import tqdm

    spec: Any = importlib.util.find_spec(package)
    root = Path(spec.submodule_search_locations[0])
    files = sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
    for file in tqdm(files, f"docstrings of {package}", leave=False, mininterval=1):
        parts = file.relative_to(root).with_suffix("").parts
        source = b"" if SKIPPED & set(parts) else file.read_bytes()
        if b'"""' not in source:
            continue
        module = ".".join((package, *parts)).removesuffix(".__init__")
        # Other people's escape sequences; templates, or files for another Python.
        with warnings.catch_warnings(action="ignore"), suppress(SyntaxError):
            for name, text in _documented(ast.parse(source), ""):
                # Control characters and lone surrogates become spaces.
                text = re.sub(r"[^\n -~\xa1-\ud7ff\ue000-\U0010ffff]", " ", text)
                yield module, name, text


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of a module, or of a class or function and all that it holds."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        name = f"{name}.{getattr(node, 'name', '')}".strip(".")
        if text := ast.get_docstring(node):
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler):
            yield from _documented(child, name)


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
    yield record


def _conversation(docstring: str) -> list[dict[str, str]]:
    """The doctests of a docstring: code from the user, its output from the assistant."""
    from doctest import DocTestParser

    messages, code = [], ""
    with suppress(ValueError):  # not a doctest after all
        for example in DocTestParser().get_examples(docstring):
            source = re.sub(r"\s*#\s*doctest:.*", "", example.source)
            code = f"{code}{source.rstrip()}\n".lstrip()
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
    shared = {run for text in training for run in every & runs(text)}
    return [text for text, mine in own.items() if 2 * len(mine & shared) > len(mine)]
