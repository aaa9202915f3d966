"""Texts of a Parquet file; the owner of pyarrow, which only the extra `data` installs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evals.errors import EvalError

INSTALL = "pip install 'rope-ext[data]'"
COLUMN = "text"


def read_parquet(file: Path) -> Iterator[tuple[int, str]]:
    """Return the texts of the column "text" with their rows, counted from 0; a row without one gives "".

    Raises:
        EvalError: pyarrow is missing, the file is damaged, or the column is missing or holds something else.
    """
    row = 0
    for values in _batches(file):
        for value in values:
            if not isinstance(value, str | None):
                raise EvalError(f'corpus: {file} row {row}: "{COLUMN}" is no text but {type(value).__name__}')
            yield row, value or ""
            row += 1


def _batches(file: Path) -> Iterator[list[Any]]:
    try:
        import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
        from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise EvalError(f"corpus: {file} is Parquet, which needs a package ({error}): {INSTALL}") from None
    kinds = (pa.ArrowException, OSError, ValueError)  # a ValueError: text that is no UTF-8
    try:
        opened = parquet.ParquetFile(file)
    except kinds as error:
        raise _damaged(file, error) from error
    with opened:
        names = opened.schema_arrow.names
        if COLUMN not in names:
            raise EvalError(f'corpus: {file} has no column "{COLUMN}"; it has: {", ".join(names) or "none"}')
        try:
            # few rows at a time: a document may be a book
            for batch in opened.iter_batches(batch_size=16, columns=[COLUMN]):
                yield batch.column(0).to_pylist()
        except kinds as error:
            raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> EvalError:
    return EvalError(f"corpus: {file} cannot be read as Parquet: {' '.join(str(error).split())[:200]}")
