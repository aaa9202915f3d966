"""Tracking on Weights & Biases, offline: read back from its own file, and whatever befalls it kept from the run."""

import json
import shutil
import struct
import subprocess
import sys
import time

import pytest

from evals import rows
from recipes import tracking
from recipes.compare import run_compare
from recipes.load import RecipeError, make_recipe
from recipes.screen import compare_on_screen
from recipes.setting import prepare
from recipes.tracking import Live, log_aside, log_folder
from tests.recipes.test_cli import document, refused

wandb = pytest.importorskip("wandb")
pytestmark = [pytest.mark.enable_socket, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no key in a netrc
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()  # it remembers its folder


@pytest.fixture
def recipe(checkpoint, data):
    return {
        "model": str(checkpoint),
        "methods": ["unscaled", "yarn"],
        "context": 1024,
        "lengths": [512, 1024],
        "data": str(data),
        "perplexity": {"documents": 2},
        "passkey": {"trials": 0},
    }


def records(folder):
    """Yield the records of every offline run below a folder: LevelDB's log format, in blocks of 32,768 bytes."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.rglob("*.wandb")):
        data = path.read_bytes()
        assert data[:4] == b":W&B"
        place, parts = 7, []
        while place + 7 <= len(data):
            if 32_768 - place % 32_768 < 7:
                place += 32_768 - place % 32_768
                continue
            _, size, kind = struct.unpack("<IHB", data[place : place + 7])
            parts.append(data[place + 7 : place + 7 + size])
            place += 7 + size
            if kind in {1, 4}:  # whole, or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(b"".join(parts))
                parts = []
                yield path.stem, record


def read_back(folder):
    """Return configuration, history and files by run id."""
    found = {}
    for name, record in records(folder):
        run = found.setdefault(name.removeprefix("run-"), {"config": {}, "history": [], "summary": {}, "group": None})
        if record.HasField("run"):
            run["group"] = record.run.run_group or run["group"]
            run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            keys = (item.key or "/".join(item.nested_key) for item in record.history.item)
            run["history"].append(dict(zip(keys, (json.loads(i.value_json) for i in record.history.item), strict=True)))
        if record.HasField("summary"):
            for item in record.summary.update:
                run["summary"][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def test_a_comparison_is_a_group_of_a_run_a_method_and_reads_back(recipe, tmp_path):
    out = tmp_path / "run"
    run_compare(prepare(make_recipe(recipe), out))
    ids = log_folder(out)
    assert len(set(ids)) == 3
    found = read_back(tmp_path / "wandb")
    assert set(found) == set(ids)
    assert len({run["group"] for run in found.values()}) == 1
    cells = rows.read_cells(out / "cells.jsonl")
    for number, method in enumerate(("unscaled", "yarn")):
        run = found[ids[number]]
        assert run["config"]["recipe"]["methods"] == ["unscaled", "yarn"]
        assert run["config"]["fingerprint"]["method"] == method
        told = {row["length"]: row["perplexity/prefix"] for row in run["history"] if "perplexity/prefix" in row}
        assert told == {c.length: c.value for c in cells if c.method == method}
    [table] = [row for row in found[ids[2]]["history"] if "cells/path" in row]
    assert (table["cells/nrows"], table["cells/ncols"]) == (len(cells), len(tracking.COLUMNS))
    [stored] = (tmp_path / "wandb").rglob(table["cells/path"].rpartition("/")[2])
    values = {(row[0], row[4]): row[7] for row in json.loads(stored.read_text())["data"]}
    assert values == {(c.method, c.length): c.value for c in cells}
    assert any(row.get("report/_type") == "html-file" for row in found[ids[2]]["history"])
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(out, moved)
    assert log_folder(moved) == ids  # goes on with the same ones, wherever the folder is


def test_asked_for_on_the_command_line_and_logged_again(recipe, tmp_path):
    compare_on_screen(make_recipe(recipe | {"track": {"report_to": ["wandb"]}}), tmp_path / "run", resume=False)
    first = set(read_back(tmp_path / "wandb"))
    assert len(first) == 3
    found = document("log", tmp_path / "run", "--json")
    assert set(found["ids"]) == first
    assert found["mode"] == "offline"


@pytest.mark.parametrize("broken", ["missing", "outage", "full"])
def test_whatever_befalls_it_the_run_ends_with_one_line(recipe, tmp_path, monkeypatch, capsys, broken):
    if broken == "outage":
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setattr(tracking, "MANY_SECONDS", 8.0)
    else:
        code = {
            "missing": "raise ImportError('wandb is broken here')",
            "full": "def init(**_more):\n    raise OSError(28, 'No space left on device')",
        }[broken]
        (tmp_path / "site" / "wandb").mkdir(parents=True)
        (tmp_path / "site" / "wandb" / "__init__.py").write_text(code + "\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    done = compare_on_screen(make_recipe(recipe | {"track": {"report_to": ["wandb"]}}), tmp_path / "run", resume=False)
    assert not done.failed
    assert (tmp_path / "run" / "report.md").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if "track:" in line]
    assert len(lines) == 1
    assert f"rope-ext log {tmp_path / 'run'}" in lines[0]


def test_the_curve_of_a_training_is_told_as_it_runs_and_never_waited_for(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text("model: tiny\nmethod: yarn\n")
    live = Live(tmp_path, {"model": "tiny", "method": "yarn"})
    for step in range(1, 4):
        live.push({"step": step, "loss": 3.0 - step, "tokens": 100 * step})
    assert live.close(seconds=60)
    [run] = read_back(tmp_path / "wandb").values()
    assert [(row["train/tokens"], row["train/loss"]) for row in run["history"]] == [(100, 2.0), (200, 1.0), (300, 0.0)]
    assert run["config"]["recipe"] == {"model": "tiny", "method": "yarn"}

    class Hanging:
        @staticmethod
        def init(**_more):
            time.sleep(30)

    monkeypatch.setattr(tracking, "_package", lambda: Hanging)
    started = time.monotonic()
    live = Live(tmp_path, {})
    live.push({"step": 1})
    assert not live.close(seconds=0.2)
    assert time.monotonic() - started < 2
    assert "did not answer within 0.2 s" in live.failure


def test_without_a_key_nothing_is_asked_for(tmp_path, monkeypatch):
    assert tracking.mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert tracking.mode() is None
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert tracking.mode() is None
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.mode() is None


def test_a_missing_package_is_told_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(RecipeError, match="wandb is not installed: pip install wandb"):
        log_folder(tmp_path)


def test_what_wandb_itself_refuses_is_one_line(recipe, tmp_path, monkeypatch):
    run_compare(prepare(make_recipe(recipe), tmp_path / "run"))
    monkeypatch.setenv("WANDB_MODE", "garbage")
    wandb.teardown()
    line = refused("log", tmp_path / "run")
    assert "track: wandb failed (" in line
    assert "is whole: log it again" in line


def test_only_this_file_imports_it():
    code = "import sys, recipes.tracking, recipes.screen, recipes.tuning_screen; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_that_does_not_end_is_not_waited_for(tmp_path):
    said = []
    log_aside(tmp_path, curve=True, say=said.append, seconds=0.01)
    assert said
    assert said[0].startswith("track: wandb failed (TimeoutExpired)")
