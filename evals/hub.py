"""Documents of a data set on the Hub, pinned to a commit and read as a stream; the owner of `datasets`.

A data set is written as one word, in the shape that methods have: hub:OWNER/NAME@REVISION:split=test:column=text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from evals.corpora import Document, text_of_json
from evals.errors import EvalError
from evals.parquet import INSTALL

PREFIX = "hub:"

PRESETS: Mapping[str, str] = {
    # The 100 test books of PG-19 in one Parquet file, columns short_book_title, publication_date, url and text; the
    # YaRN authors (jquesnelle/yarn, eval.sh) measure on the same split. The commit is the one that published evaluation
    # scripts pin.
    "pg19": "hub:emozilla/pg19-test@c5e39bf32e33f9111323aa68d7d9000d22722035:split=test",
    # The test split that the same eval.sh names. The repository has a loading script, which `datasets` has not run
    # since version 4, so the file is named that the script's test split consists of. Its metadata differ from line to
    # line, hence lines. The commit is the last one that its README shows, and the one that published scripts pin.
    "proof-pile": (
        "hub:hoskinson-center/proof-pile@490b980249446f2f3bd2df3a8cf085d0f2de240a:file=test/proofpile_test.jsonl.gz"
    ),
}

_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_JSONL = re.compile(r"\.(jsonl|ndjson)(\.(gz|bz2|xz|zst))?$")
_EXAMPLE = "write hub:OWNER/NAME, or with options, as hub:emozilla/pg19-test@main:split=test:column=text"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubData:
    """A data set on the Hub.

    Attributes:
        repository: OWNER/NAME.
        revision: a branch, a tag, a commit, or a reference such as refs/convert/parquet.
        split: of the data set.
        config: of a data set that has several; "" is its only one, or its default.
        column: that holds the texts.
        file: one JSONL or Parquet file of the repository, in place of split and config; "" is the whole data set.
    """

    repository: str
    revision: str = "main"
    split: str = "test"
    config: str = ""
    column: str = "text"
    file: str = ""

    def spell(self) -> str:
        """Return the word that means this data set, its revision and its split or file always in it."""
        keys = ("config", "column", "file") if self.file else ("split", "config", "column")
        default = HubData(repository=self.repository)
        said = [key for key in keys if key in {"split", "file"} or getattr(self, key) != getattr(default, key)]
        return ":".join([f"{PREFIX}{self.repository}@{self.revision}", *(f"{k}={getattr(self, k)}" for k in said)])


def parse_hub(text: str) -> HubData:
    """Return the data set that hub:OWNER/NAME@REVISION:key=value:key=value names.

    Raises:
        EvalError: the word has another shape, or an option is unknown, repeated or without effect.
    """
    head, *parts = text.strip().removeprefix(PREFIX).split(":")
    repository, at, revision = head.partition("@")
    if not _REPOSITORY.fullmatch(repository):
        raise EvalError(f"data: {text!r} names no data set of the Hub; {_EXAMPLE}")
    if at and not revision:
        raise EvalError(f"data: {text!r} has no revision after the @; {_EXAMPLE}")
    known = [field.name for field in fields(HubData) if field.name not in {"repository", "revision"}]
    values: dict[str, str] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if not value:
            raise EvalError(f"data: {text!r}: {part!r} is not key=value; {_EXAMPLE}")
        if key not in known:
            raise EvalError(f"data: {text!r}: {key!r} is not an option; known: {', '.join(known)}")
        if key in values:
            raise EvalError(f"data: {text!r}: {key!r} is given twice; give it once")
        values[key] = value
    if "file" in values:
        if useless := {"split", "config"} & set(values):
            raise EvalError(f"data: {text!r}: {min(useless)!r} says nothing about one file; leave one of them out")
        if not values["file"].endswith(".parquet") and not _JSONL.search(values["file"]):
            raise EvalError(
                f"data: {text!r}: file={values['file']} is neither .parquet nor .jsonl (.gz, .bz2, .xz, .zst); "
                "name such a file"
            )
    return HubData(repository=repository, revision=revision or "main", **values)


def pin(data: HubData) -> HubData:
    """Return the same data set at the commit that its revision is now, as the Hub says.

    The Hub is asked even for a commit: `datasets` would otherwise fall back on whatever copy it has of another one.

    Raises:
        EvalError: there is no such data set or revision, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        commit = HfApi().dataset_info(data.repository, revision=data.revision, timeout=30).sha
    except RevisionNotFoundError as error:
        raise EvalError(
            f"data: {data.repository} has no revision {data.revision!r}; give a branch, a tag or a commit"
        ) from error
    except RepositoryNotFoundError as error:
        raise EvalError(
            f"data: {data.repository} is no data set of the Hub, or a private one; check the name, or log in with "
            "hf auth login"
        ) from error
    except Exception as error:  # which HTTP library fails here is the Hub client's own affair
        raise EvalError(
            f"data: the Hub was asked for {data.repository} at {data.revision} and did not answer ({_line(error)}); "
            "it needs the network: try again, or give a file"
        ) from error
    return replace(data, revision=commit or data.revision)


def stream(data: HubData) -> Iterator[Document]:
    """Return the documents in the data set's own order, read only as they are asked for.

    A document is named by its split or file and its row, counted from 0. Rows without text are passed over.

    Raises:
        EvalError: `datasets` is missing, or the split, the config, the file or the column is, or reading fails.
    """
    return _read(f"hf://datasets/{data.repository}", data)


def _read(repository: str, data: HubData) -> Iterator[Document]:
    label = data.file.rpartition("/")[2] or data.split
    as_json = bool(_JSONL.search(data.file))
    rows = iter(_open(repository, data))
    row = -1
    while True:
        row += 1
        where = f"{data.repository} {label} row {row}"
        try:
            found = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the network, the file and the reader each have their own kinds
            raise EvalError(f"data: {where} cannot be read: {_line(error)}") from error
        if as_json:
            line = found["text"]
            text = text_of_json(line, where, data.column) if line.strip() else ""
        else:
            text = _text_of(found, data, where)
        if text.strip():
            yield Document(name=f"{label}:{row}", text=text)


def _text_of(row: Mapping[str, object], data: HubData, where: str) -> str:
    if data.column not in row:
        raise EvalError(f"data: {where} has no column {data.column!r}; name one with column=: {', '.join(row)}")
    value = row[data.column]
    if not isinstance(value, str | None):
        raise EvalError(f"data: {where}: {data.column!r} is no text but {type(value).__name__}; name one with column=")
    return value or ""


def _open(repository: str, data: HubData) -> Iterable[dict[str, Any]]:
    """Return the rows of a repository, or of its one file; JSONL comes as lines, each under "text"."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise EvalError(f"data: {data.spell()} needs a package ({error}): {INSTALL}") from None
    try:
        if data.file:
            # not its "json" reader: that one fails where a later line has other keys than the first ones
            reader = "parquet" if data.file.endswith(".parquet") else "text"
            url = f"{repository}@{data.revision}/{data.file}"
            return load_dataset(reader, data_files=url, split="train", streaming=True)
        splits = cast(
            "Mapping[str, Any]",
            load_dataset(repository, data.config or None, revision=data.revision, streaming=True),
        )
    except Exception as error:  # of many kinds, some of them the HTTP library's
        hint = "; name one of its files with file=PATH" if "scripts are no longer" in str(error) else ""
        raise EvalError(f"data: {data.spell()} cannot be opened: {_line(error)}{hint}") from error
    if data.split not in splits:
        raise EvalError(f"data: {data.repository} has no split {data.split!r}; it has: {', '.join(splits)}")
    return splits[data.split]


def _line(error: Exception) -> str:
    """Return what went wrong as one line, the kind of error first."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
