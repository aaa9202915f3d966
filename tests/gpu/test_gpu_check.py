"""The check for a GPU, run on toys: it measures what it says, and notices what it is there to notice."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rope_ext.methods.unscaled import Unscaled
from rope_ext.patch import Patch
from rope_ext.registry import known_methods
from rope_ext.tables import ExtendedRotaryEmbedding

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def dry_check(script, out=None, *, minutes=5.0):
    check = script.Check(
        scale=script.DRY, device=torch.device("cpu"), out=out, deadline=time.monotonic() + 60 * minutes, head={}
    )
    check.peaks = script.Peaks(1e9, 1e9)
    return check


def test_the_dry_run_measures_every_stage(tmp_path, script):
    out = tmp_path / "check.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry", "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["ok"]
    assert found["dry"]
    assert {"machine", "commit", "versions", "command", "flash_attn"} <= found.keys()
    rows = found["results"]
    assert {row["stage"] for row in rows} == set(script.STAGES)
    assert {row["name"] for row in rows if row["stage"] == "agreement"} >= set(known_methods())
    names = {row["name"] for row in rows}
    assert {f"{n} tokens" for n in script.DRY.lengths} | {f"LoRA step, {script.DRY.row} tokens"} <= names
    timed = [row for row in rows if row["floor"] is not None]
    assert len(timed) == len(script.DRY.lengths) + 4
    assert all(row["share"] == pytest.approx(row["floor"] / row["seconds"]) for row in timed)
    # what is not measured is not there, and says so
    (flash,) = (row for row in rows if row["name"] == "flash")
    assert flash["seconds"] is None
    assert "not run" in flash["note"]


def test_angles_in_half_precision_do_not_pass(script, monkeypatch):
    own = ExtendedRotaryEmbedding.forward

    def rounded(self, x, position_ids):
        return own(self, x, position_ids.to(x.dtype).long())

    monkeypatch.setattr(ExtendedRotaryEmbedding, "forward", rounded)
    monkeypatch.setattr(Patch, "verify", lambda _self: None)  # which would refuse such a table at once
    check = dry_check(script)
    script.check_agreement(check)
    bad = {row.name for row in check.rows if not row.ok}
    # those that do not rotate have no angle to lose, nor p-rope over half of the pairs
    assert {"yarn", "ntk", "unscaled", "llama3", "abf", "ntk-by-parts", "linear"} <= bad
    assert not {"alibi", "nope"} & bad


def test_a_method_that_does_nothing_does_not_pass(script, monkeypatch):
    class Hollow(Unscaled):
        name = "hollow"

    monkeypatch.setattr(script, "methods", lambda *_: [Unscaled(), Hollow()])
    check = dry_check(script)
    script.check_agreement(check)
    assert [(row.name, row.ok) for row in check.rows[2:]] == [("unscaled", True), ("hollow", False)]


def test_a_stage_that_breaks_is_a_row_and_the_next_goes_on(script, monkeypatch, tmp_path):
    def broken(_check):
        raise RuntimeError("CUDA out of memory\nand more of it")

    def sound(check):
        check.add(script.Row(stage="train", name="step", apart=float("nan"), limit=1.0))

    monkeypatch.setattr(script, "STAGES", {"alibi": [broken], "train": [sound]})
    check = dry_check(script, tmp_path / "check.json")
    script.run(check, ["alibi", "train"])
    found = json.loads((tmp_path / "check.json").read_text())
    assert not found["ok"]
    first, second = found["results"]
    assert first["note"] == "RuntimeError: CUDA out of memory"
    assert not second["ok"], "a difference that is not a number is none that may be"


def test_a_length_that_does_not_fit_leaves_the_others(script, monkeypatch):
    own = script.prefix_nll

    def tight(model, document, lengths, **more):
        if max(lengths) == max(script.DRY.lengths):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(model, document, lengths, **more)

    monkeypatch.setattr(script, "prefix_nll", tight)
    check = dry_check(script)
    check.peaks = None
    script.check_perplexity(check)
    assert [row.ok for row in check.rows] == [True, True, False, False]
    assert check.rows[0].seconds is not None
    assert check.rows[0].floor is None, "without peaks there is no floor"


def test_an_adapter_that_is_not_trained_does_not_pass(script, monkeypatch):
    own = script.adapted

    def frozen(*given, **more):
        trained = own(*given, **more)
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.requires_grad = False
        return trained

    monkeypatch.setattr(script, "adapted", frozen)
    check = dry_check(script)
    script.check_training(check)
    (row,) = check.rows
    assert not row.ok
    assert "0 of 12 adapters moved" in row.note


def test_what_finds_no_time_is_listed_and_fails(script):
    check = dry_check(script, minutes=0.0)
    script.run(check, ["train"])
    assert [(row.ok, "out of time" in row.note) for row in check.rows] == [(False, True)] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--dry", "--only", "peeks"], "'peeks' is no stage; there are peaks, agreement"), ([], "no CUDA device; --dry")],
)
def test_what_cannot_be_asked_for_is_refused_in_a_line(words, said):
    if not words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
