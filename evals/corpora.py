"""Documents to measure on: text, JSONL and Parquet files, or the Python standard library's sources on this machine.

Every corpus is ordered by content-free rules (sorted paths, then a hash of the name; a stream in its own order) and
hashed as token ids, so two runs either saw the same tokens or their `data_hash` differs.
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from evals.errors import EvalError
from evals.parquet import read_parquet

# Not prose: byte tables, a generated help text, a frozen 2to3 grammar, build settings; and the test suites,
# which many distributions leave out.
_NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
_NOT_SOURCE_PREFIXES = ("lib2to3", "config-", "_sysconfigdata", "__phello__")
HELD_OUT_ONE_IN = 10
MAX_TRIED = 10_000
"""Documents of a stream that are tried: a length that none of so many reaches is better asked for elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text with the name that it is reported under."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDocument:
    """One document as token ids, shape (num_tokens,), cut to the length asked for; BOS first if there is one."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents of exactly `num_tokens` ids each, and how many were tried and found too short on the way.

    `bos` is the id at index 0 of every document, or None when the tokenizer puts none there. `data_hash` is the first
    16 hex digits of the SHA-256 of every id in order.
    """

    name: str
    documents: tuple[TokenDocument, ...]
    num_tokens: int
    num_too_short: int
    bos: int | None
    data_hash: str


def is_held_out(relative_path: str) -> bool:
    """Return True for the one source file in ten that the bundled model never saw, by a hash of its posix path."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def python_sources(split: Literal["train", "held-out", "all"]) -> list[Document]:
    """Return this interpreter's standard-library sources, sorted by path: all, or one side of the held-out split.

    Raises:
        EvalError: this Python ships no sources (some minimal builds), so there is nothing to measure on.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _NOT_SOURCES.intersection(relative.parts) or relative.parts[0].startswith(_NOT_SOURCE_PREFIXES):
            continue
        if split != "all" and is_held_out(relative.as_posix()) != (split == "held-out"):
            continue
        try:
            documents.append(Document(name=relative.as_posix(), text=path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # a file in another encoding is no more this corpus's business than a binary one
    if not documents:
        raise EvalError(
            f"corpus: no Python sources under {root}; this Python ships none: name text files or JSONL with --data"
        )
    return documents


def read_documents(path: Path) -> list[Document]:
    """Return the documents of a text file (one), a JSONL or Parquet file (one a row, key "text"), or a folder of them.

    A row is named by its file and its place there: JSONL lines from 1, as editors count, Parquet rows from 0.

    Raises:
        EvalError: the path is missing, empty, not UTF-8, damaged, or a row has no "text".
    """
    try:
        exists = path.exists()
    except OSError as error:  # a name too long for a file
        raise EvalError(f"corpus: {str(path)[:60]}... is no usable name: {error.strerror}") from error
    if not exists:
        raise EvalError(
            f"corpus: {path} does not exist; name a text, .jsonl or .parquet file, or a folder "
            "of them; a data set of the Hub is hub:OWNER/NAME"
        )
    files = _files(path) if path.is_dir() else [path]
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    documents = [document for file in files for document in _read_file(file, path)]
    if not documents:
        raise EvalError(
            f"corpus: {path} holds no documents; it needs at least one text, JSONL or Parquet file that is not empty"
        )
    return documents


def _files(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise EvalError(f"corpus: {error.filename} cannot be read: {error.strerror}") from error

    return sorted(Path(top) / name for top, _, names in os.walk(folder, onerror=refuse) for name in names)


def _read_file(file: Path, root: Path) -> Iterator[Document]:
    name = file.relative_to(root).as_posix() if file != root else file.name
    if _has_surrogates(str(file)):
        raise EvalError(f"corpus: {str(file)!a} has a name that is not UTF-8; rename it")
    if file.suffix == ".parquet":
        yield from (Document(name=f"{name}:{row}", text=text) for row, text in read_parquet(file) if text.strip())
        return
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EvalError(f"corpus: {file} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise EvalError(f"corpus: {file} cannot be read: {error.strerror}") from error
    if file.suffix not in {".jsonl", ".ndjson"}:
        if text.strip():
            yield Document(name=name, text=text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            text = text_of_json(line, f"{file} line {number}")
            if text.strip():
                yield Document(name=f"{name}:{number}", text=text)


def text_of_json(line: str, where: str, key: str = "text") -> str:
    """Return the text under `key` of one line of JSONL.

    Raises:
        EvalError: the line is no JSON object, or has no such text.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # besides bad syntax: a number or a nesting beyond all bounds
        raise EvalError(f"corpus: {where} is not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        raise EvalError(f'corpus: {where} has no "{key}"; each line is an object like {{"{key}": "..."}}')
    if _has_surrogates(row[key]):
        raise EvalError(f"corpus: {where} holds half a surrogate pair, which is no character; mend it")
    return row[key]


def _has_surrogates(text: str) -> bool:
    """Whether a string holds what UTF-8 cannot write: a lone surrogate, or a byte smuggled through a file name."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def tokenise(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    num_tokens: int,
    num_documents: int,
    in_order: bool = False,
) -> Corpus:
    """Return the first `num_documents` documents that reach `num_tokens` ids, each cut to exactly that many.

    Documents are tried in the order of a hash of their names, so that a small sample is not the head of an
    alphabet; shorter ones are left out and counted. BOS stands at index 0 if the tokenizer puts one there.

    `in_order` is for a stream, which cannot be sorted: documents are tried as they come, none is read beyond those
    needed, and at most MAX_TRIED are.

    Raises:
        EvalError: fewer than `num_documents` are long enough.
    """
    if not in_order:
        documents = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    limit = MAX_TRIED if in_order else sys.maxsize
    source = iter(documents)
    bos = bos_id(tokenizer)
    kept: list[TokenDocument] = []
    tried = longest = 0
    while len(kept) < num_documents and tried < limit and (document := next(source, None)) is not None:
        ids = encode(tokenizer, document.text)
        if bos is not None:
            ids = [bos, *ids]
        tried += 1
        longest = max(longest, len(ids))
        if len(ids) >= num_tokens:
            kept.append(TokenDocument(name=document.name, ids=tuple(ids[:num_tokens])))
    if len(kept) < num_documents:
        among = f" among its first {tried}, and no more are tried" if tried == limit else ""
        raise EvalError(
            f"corpus: {name} has {len(kept)} documents of at least {num_tokens} tokens{among}, {num_documents} asked "
            f"(longest of {tried}: {longest}); ask for fewer documents, shorter lengths, or give longer texts"
        )
    return Corpus(
        name=name,
        documents=tuple(kept),
        num_tokens=num_tokens,
        num_too_short=tried - len(kept),
        bos=bos,
        data_hash=hash_ids(document.ids for document in kept),
    )


def bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the BOS that opens every document and prompt: the tokenizer's own, if it puts one there itself, or None.

    A tokenizer that names a BOS but does not add it (SmolLM2's) belongs to a model that was not trained with one.
    """
    bos = cast("int | None", tokenizer.bos_token_id)
    return bos if bos is not None and tokenizer("x")["input_ids"][:1] == [bos] else None


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text` alone: no BOS, no EOS, and no special token even where the text spells one."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def starts_of(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[int | None]:
    """Return the character that each id of `encode(tokenizer, text)` starts at; None where a tokenizer cannot say."""
    if not tokenizer.is_fast:
        return [None] * len(ids)
    found = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    return [start for start, _ in found["offset_mapping"]]


def hash_ids(rows: Iterable[Sequence[int]]) -> str:
    """Return 16 hex digits of the SHA-256 of rows of ids; rows are length-prefixed, so moving a border changes it."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(np.asarray(row, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]
