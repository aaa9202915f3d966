"""Rows: the scored units and the aggregates made of them, one JSON object a line, appended and never rewritten.

Absent means no row. A value that was not measured is never -1, 0 or NaN.
"""

import errno
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evals.errors import EvalError

SampleKey = tuple[str, str, str, int, str, str]
"""Fingerprint, task, protocol, length, unit, data hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a sample and a cell have in common: which method, on which model, at which task.

    Attributes:
        method_args: the method's hyper-parameters by name.
        factor, context: the stretch, and the window in tokens that it leads to.
        protocol: how the task was run; equal tasks under unequal protocols are not comparable.
        depth: of a passkey, as a fraction; None where there is none, or pooled over depths.
        position: of a passkey on a grid of absolute positions, in tokens from the start; None elsewhere, or pooled.
    """

    method: str
    method_args: dict[str, object]
    factor: float
    context: int
    model: str
    task: str
    protocol: str
    length: int
    depth: float | None
    position: int | None = None
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Row):
    """One scored unit: a document at a length, or a passkey trial.

    Attributes:
        unit: what was scored, unique within (fingerprint, task, protocol, length): a document's name, "depth/trial" or
            "@position/trial".
        value: nats per token for documents, 1 or 0 for passkey.
        weight: the tokens scored in it; the windows, where the protocol counts those.
        data_hash: of the ids shown to the model, equal for every method.
        detail: task-specific facts (actual depth, key, predicted ids, answer NLL), kept for reading, not aggregated.
    """

    unit: str
    value: float
    weight: int
    seed: int
    fingerprint: str
    data_hash: str
    detail: dict[str, object] = field(default_factory=dict[str, object])

    def key(self) -> SampleKey:
        """Return what makes a sample unique: how it was measured, and on which tokens. A second one is a repetition."""
        return (self.fingerprint, self.task, self.protocol, self.length, self.unit, self.data_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Row):
    """One aggregate that can be recomputed from samples: a value, its interval and n.

    Attributes:
        n: documents for perplexity, trials for passkey.
        tokens, windows: scored in all documents, and the windows that they were seen through; None for passkey.
        ci_low, ci_high: 95 % interval: bootstrap over documents for perplexity, Wilson for passkey; None if n is 1.
        stage: "before" or "after" a fine-tune, else None.
        status: "ok", or "failed" with `reason`; a failed cell has no value.
    """

    value: float | None
    ci_low: float | None
    ci_high: float | None
    n: int
    stage: str | None
    seed: int
    fingerprint: str
    data_hash: str | None
    status: str
    reason: str | None
    versions: dict[str, str]
    commit: str | None
    tokens: int | None = None
    windows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """How a method differs from the baseline on the same units, recomputable from samples.

    Attributes:
        method, against: their spellings; `fingerprint` and `against_fingerprint` say exactly what they were.
        value: mean of the paired differences: nats per token for documents (exp of it is the ratio of perplexities),
            share of trials for passkey. Above 0 the method's is higher.
        ci_low, ci_high: 95 % bootstrap interval over documents or trials; None if n is 1.
        p_value: two-sided, from the same resamples.
        native: whether the length lies within the original window: a regression there is the price of the stretch.
    """

    method: str
    against: str
    fingerprint: str
    against_fingerprint: str
    task: str
    protocol: str
    length: int
    metric: str
    value: float
    ci_low: float | None
    ci_high: float | None
    p_value: float | None
    n: int
    native: bool
    seed: int
    data_hash: str


def column_name(row: Sample) -> str:
    """Return task, protocol and length as one word."""
    return f"{row.task}|{row.protocol}|{row.length}"


def to_json(row: Sample | Cell | Contrast) -> str:
    """Return the row as one line of strict JSON.

    Raises:
        EvalError: a number in it is not finite, which JSON cannot hold and no reader should meet.
    """
    try:
        return json.dumps(asdict(row), allow_nan=False)
    except ValueError as error:
        raise EvalError(f"rows: a number that is not finite in {row}") from error


def append(path: Path, rows: Iterable[Sample | Cell]) -> None:
    """Append rows to a JSONL file and force them to disk; a torn last line of a killed run is closed first."""
    text = "".join(to_json(row) + "\n" for row in rows)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, rows: Iterable[Cell | Contrast]) -> None:
    """Replace a file of aggregates as a whole: readers see the old one or the new one, never a half."""
    write_whole(path, "".join(to_json(row) + "\n" for row in rows))


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that a killed run leaves the old one or the new one; a link is followed.

    Raises:
        OSError: it cannot be written, or what is there is no file: a device, a pipe.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there and no regular file", str(path))
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:200]}.", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Return what files are made without; it can only be asked by setting it."""
    found = os.umask(0o022)
    os.umask(found)
    return found


def shard_name(name: str, rank: int) -> str:
    """Return what one of several processes calls its part of a file of samples."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}.part{rank}.{ending}"


def _shards(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.part*{path.suffix}"))


def merge_shards(path: Path) -> None:
    """Append to a file what its shards hold and it does not, then remove the shards.

    Stopped at any point, the next call finishes it: nothing is removed before it is on disk, and repetitions are not
    appended.
    """
    shards = _shards(path)
    if not shards:
        return
    whole = {sample.key() for sample in _samples([path])}
    append(path, [sample for sample in _samples(shards) if sample.key() not in whole])
    for shard in shards:
        shard.unlink()


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file and of its shards in order, without repetitions; none if it does not exist.

    A torn line, which a killed run can leave, is skipped: its sample was not yet counted as done.

    Raises:
        EvalError: a whole line that is not a sample, so the file is something else.
    """
    return _samples([path, *_shards(path)])


def _samples(paths: Sequence[Path]) -> list[Sample]:
    samples: dict[SampleKey, Sample] = {}
    found = ((path, *each) for path in paths if path.exists() for each in _objects(path))
    for source, number, row in found:
        if row.keys() >= _CHECKED and not _is_sound(row):
            raise EvalError(
                f"rows: {source} line {number} holds values that no sample can have; remove the line to measure again"
            )
        try:
            sample = Sample(**row)
        except TypeError as error:
            raise EvalError(f"rows: {source} line {number} is not a sample: {error}") from error
        samples.setdefault(sample.key(), sample)
    return list(samples.values())


_CHECKED = {"fingerprint", "task", "protocol", "unit", "data_hash", "length", "value", "weight"}


def _is_sound(row: dict[str, Any]) -> bool:
    """Whether what a sample is told by, and counted with, is text and finite numbers."""
    texts = all(isinstance(row[name], str) for name in ("fingerprint", "task", "protocol", "unit", "data_hash"))
    numbers = all(_is_number(row[name]) for name in ("length", "value", "weight"))
    places = all(row.get(name) is None or _is_number(row[name]) for name in ("depth", "position"))
    mappings = all(isinstance(row.get(name, {}), dict) for name in ("detail", "method_args"))
    return texts and numbers and places and mappings and row["weight"] > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of a file.

    Raises:
        EvalError: the file is missing, or a line is not a cell.
    """
    if not path.exists():
        raise EvalError(f"rows: {path} does not exist")
    try:
        cells = [Cell(**row) for _, row in _objects(path)]
    except TypeError as error:
        raise EvalError(f"rows: {path} holds a line that is not a cell: {error}") from error
    for cell in cells:
        numbers = (cell.value, cell.ci_low, cell.ci_high, cell.depth, cell.position)
        whole = all(_is_number(number) for number in (cell.length, cell.n, cell.context, cell.factor))
        if not whole or not all(number is None or _is_number(number) for number in numbers):
            raise EvalError(f"rows: {path} holds a cell of {cell.method} with a value that none can have")
    return cells


def read_contrasts(path: Path) -> list[Contrast]:
    """Return the paired differences of a file; none if it does not exist.

    Raises:
        EvalError: a line is not one.
    """
    if not path.exists():
        return []
    try:
        return [Contrast(**row) for _, row in _objects(path)]
    except TypeError as error:
        raise EvalError(f"rows: {path} holds a line that is not a difference: {error}") from error


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(row, dict):
            yield number, row
