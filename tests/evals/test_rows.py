import dataclasses
import json

import pytest

from evals.errors import EvalError
from evals.rows import Cell, Sample, append, read_cells, read_samples, write

SAMPLE = Sample(
    method="yarn",
    method_args={"beta_fast": 32.0},
    factor=2.0,
    context=512,
    model="tiny",
    task="passkey",
    protocol="classic",
    length=256,
    depth=0.5,
    unit="0.5/0",
    metric="exact_match",
    value=1.0,
    weight=5,
    seed=0,
    fingerprint="f" * 16,
    data_hash="d" * 16,
)
CELL = Cell(
    method="yarn",
    method_args={},
    factor=2.0,
    context=512,
    model="tiny",
    task="passkey",
    protocol="classic",
    length=256,
    depth=None,
    metric="accuracy",
    value=1.0,
    ci_low=0.5,
    ci_high=1.0,
    n=3,
    stage=None,
    seed=0,
    fingerprint="f" * 16,
    data_hash="d" * 16,
    status="ok",
    reason=None,
    versions={},
    commit=None,
)


def numbered(unit):
    return dataclasses.replace(SAMPLE, unit=str(unit))


def test_round_trip(tmp_path):
    append(tmp_path / "s", [numbered(0)])
    append(tmp_path / "s", [numbered(1), numbered(2)])
    assert read_samples(tmp_path / "s") == [numbered(i) for i in range(3)]
    write(tmp_path / "c", [CELL])
    assert read_cells(tmp_path / "c") == [CELL]
    assert list(json.loads((tmp_path / "c").read_text())) == [f.name for f in dataclasses.fields(Cell)]


def test_a_torn_last_line_is_skipped_and_closed(tmp_path):
    """What kill -9 in the middle of a write leaves."""
    path = tmp_path / "s"
    append(path, [numbered(0), numbered(1)])
    path.write_bytes(path.read_bytes()[:-40])
    assert read_samples(path) == [numbered(0)]
    append(path, [numbered(1)])
    assert read_samples(path) == [numbered(0), numbered(1)]


def test_repetitions_count_once(tmp_path):
    append(tmp_path / "s", [numbered(0), numbered(0)])
    assert read_samples(tmp_path / "s") == [numbered(0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_never_reaches_the_disk(tmp_path, value):
    with pytest.raises(EvalError, match="not finite"):
        append(tmp_path / "s", [dataclasses.replace(SAMPLE, value=value)])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "change", [{"value": "x"}, {"unit": [1]}, {"value": float("nan")}, {"value": None}, {"weight": 0}]
)
def test_damaged_values_are_named_not_counted(tmp_path, change):
    row = dataclasses.asdict(SAMPLE) | change
    (tmp_path / "s").write_text(json.dumps(dataclasses.asdict(SAMPLE)) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(EvalError, match="line 2 holds values that no sample can have; remove the line"):
        read_samples(tmp_path / "s")


def test_another_file_is_not_taken_for_rows(tmp_path):
    (tmp_path / "s").write_text('{"a": 1}\n')
    with pytest.raises(EvalError, match="line 1 is not a sample"):
        read_samples(tmp_path / "s")
    with pytest.raises(EvalError, match="not a cell"):
        read_cells(tmp_path / "s")
    with pytest.raises(EvalError, match="does not exist"):
        read_cells(tmp_path / "missing")
    assert read_samples(tmp_path / "missing") == []
