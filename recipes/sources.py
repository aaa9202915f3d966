"""Training documents as token ids: read once, cached under the hash of everything that they depend on."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Int64
from numpy import ndarray
from transformers import PreTrainedTokenizerBase

from evals import corpora, hub
from evals.corpora import Document
from recipes import data
from recipes.load import RecipeError
from recipes.tuning import Source

TRAIN = "python-train"
"""The standard library's sources but those that evaluations take: what the bundled model was trained on."""
CACHE = "ROPE_EXT_CACHE"
"""The environment variable that names the folder of the cache; by default ~/.cache/rope-ext."""
LAYOUT = 1
"""Counted up when the same texts would give other ids than before."""
_NAMES = (
    "alpha beta gamma delta size width height count total limit first last left right red green blue north south index "
    "value offset start stop step code port lock door room box bag cup hat sun moon star tree"
)
NAMES = tuple(_NAMES.split())
LINE, ASKED = "\n{name} = {number}\n", "\n{name} ="
TOKENS_PER_NUMBER = 128
"""One number is hidden for so many tokens of a text, while there are names."""


class Tokenised(NamedTuple):
    """The documents of one source. `data_hash` is of every id, `ids` gives those of one document."""

    name: str
    lengths: Int64[ndarray, " documents"]
    data_hash: str
    table: Any

    def ids(self, number: int) -> Int64[ndarray, " tokens"]:
        """Return the ids of one document, without BOS and EOS."""
        return np.asarray(self.table[number]["ids"], dtype=np.int64)


def open_source(source: Source, tokenizer: PreTrainedTokenizerBase, *, text_tokens: int) -> Tokenised:
    """Return a source's documents as ids, tokenised now if they were not before.

    Args:
        text_tokens: what fills a training row, BOS and EOS aside: as long is a text with hidden numbers.

    Raises:
        RecipeError: the source is unknown, or a stream without an end.
        EvalError: it cannot be read.
    """
    path = write_source(source, tokenizer, text_tokens=text_tokens)
    from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]

    table = Dataset.from_file(str(path)).with_format("numpy")
    meta = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    lengths = np.asarray(meta["lengths"], dtype=np.int64)
    name = source.name + (" with numbers to recall" if source.recall else "")
    return Tokenised(name, lengths, meta["data_hash"], table)


def write_source(source: Source, tokenizer: PreTrainedTokenizerBase, *, text_tokens: int) -> Path:
    """Return the file of a source's ids, made now if it is not there: see `open_source`."""
    documents, told = _documents(source)
    recall = {"tokens": text_tokens, "line": LINE, "names": NAMES, "each": TOKENS_PER_NUMBER} if source.recall else None
    everything = {"layout": LAYOUT, "texts": told, "tokenizer": _fingerprint(tokenizer), "recall": recall}
    key = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "rope-ext") / "tokens"
    path = folder / f"{key}.arrow"
    if path.with_suffix(".json").is_file() and path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, _encoded(documents, tokenizer, text_tokens if source.recall else None), source)
    except OSError as error:
        raise RecipeError(
            f"data: the cache {folder} cannot be written: {error.strerror or error}; name another folder with {CACHE}"
        ) from error
    return path


def _documents(source: Source) -> tuple[Iterable[Document], str]:
    """Return a source's documents, and a hash of what they are: of their texts, or of a stream's name and end."""
    if source.name == TRAIN:
        return _hashed(corpora.python_sources("train")[: source.max_documents])
    is_stream = hub.PRESETS.get(source.name, source.name).startswith(hub.PREFIX)
    if is_stream and source.max_documents is None:
        raise RecipeError(
            f"data.sources ({source.name}): a stream of the Hub has no end to wait for; say max_documents"
        )
    name = data.pinned(source.name)
    documents, in_order = data.open_data(name, also=[TRAIN])
    if in_order:
        return islice(documents, source.max_documents), f"{name} {source.max_documents}"
    return _hashed([*islice(documents, source.max_documents)])


def _hashed(documents: list[Document]) -> tuple[list[Document], str]:
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            digest.update(len(part).to_bytes(8, "little") + part.encode())
    return documents, digest.hexdigest()


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of what a tokenizer does to a text."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        whole = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()])
    else:  # transformers sets both anew at the first call
        kept = {key: value for key, value in json.loads(fast.to_str()).items() if key not in {"truncation", "padding"}}
        whole = json.dumps(kept, sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def _encoded(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, recall_tokens: int | None
) -> Iterator[tuple[str, list[int]]]:
    """Yield (name, ids) of every document, or of the texts with hidden numbers that can be made of it."""
    source = iter(documents)
    while some := list(islice(source, 64)):
        texts = [document.text for document in some]
        found = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for document, ids in zip(some, cast("list[list[int]]", found), strict=True):
            if recall_tokens is None:
                yield document.name, ids
            else:
                yield from recall_texts(document.name, ids, tokenizer, num_tokens=recall_tokens)


def recall_texts(
    name: str, ids: list[int], tokenizer: PreTrainedTokenizerBase, *, num_tokens: int
) -> Iterator[tuple[str, list[int]]]:
    """Yield (name, ids) of texts of exactly `num_tokens`: lines like "alpha = 48213" hidden in a document, then asked.

    Every number is asked for once at the end, in another order. The form is not that of any passkey evaluation. A
    document is cut into as many texts as it fills; a shorter one gives none.
    """
    asked = max(1, min(len(NAMES), num_tokens // TOKENS_PER_NUMBER))
    number = start = 0
    while True:
        seed = int.from_bytes(hashlib.sha256(f"{name}|{number}".encode()).digest()[:8], "big")
        rng = np.random.default_rng(seed)
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[:asked]]
        numbers = [str(n) for n in rng.integers(10_000, 100_000, asked)]
        lines = [LINE.format(name=n, number=k) for n, k in zip(names, numbers, strict=True)]
        questions = [f"{ASKED.format(name=names[i])} {numbers[i]}" for i in rng.permutation(asked)]
        hidden = [corpora.encode(tokenizer, line) for line in lines]
        tail = corpora.encode(tokenizer, "".join(questions) + "\n")
        room = num_tokens - len(tail) - sum(map(len, hidden))
        if room < asked or start + room > len(ids):
            return
        text, places = ids[start : start + room], np.sort(rng.integers(0, room + 1, asked))
        whole, at = [], 0
        for place, line in zip(places.tolist(), hidden, strict=True):
            whole += [*text[at:place], *line]
            at = place
        yield f"{name}#{number}", [*whole, *text[at:], *tail]
        number, start = number + 1, start + room


def _write(path: Path, documents: Iterator[tuple[str, list[int]]], source: Source) -> None:
    """Write names and ids, then what they are; a reader takes the first only where there is the second."""
    from datasets import Features, List, Value  # pyright: ignore[reportMissingTypeStubs]
    from datasets.arrow_writer import ArrowWriter  # pyright: ignore[reportMissingTypeStubs]

    lengths: list[int] = []
    digest = hashlib.sha256()
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    os.close(handle)
    try:
        with ArrowWriter(
            path=partial, features=Features({"name": Value("string"), "ids": List(Value("int32"))})
        ) as writer:
            for name, ids in documents:
                if ids:
                    writer.write({"name": name, "ids": ids})
                    lengths.append(len(ids))
                    digest.update(len(ids).to_bytes(8, "little") + np.asarray(ids, dtype="<i8").tobytes())
            if lengths:
                writer.finalize()
        if not lengths:
            what = "none of its documents fills a row with numbers to recall" if source.recall else "it is empty"
            raise RecipeError(f"data.sources ({source.name}): {what}; give longer texts")
        Path(partial).replace(path)
    finally:
        with suppress(OSError):
            Path(partial).unlink()
    meta = {"lengths": lengths, "data_hash": digest.hexdigest()[:16]}
    second = path.with_suffix(f".{os.getpid()}.part")
    second.write_text(json.dumps(meta), encoding="utf-8")
    second.replace(path.with_suffix(".json"))
