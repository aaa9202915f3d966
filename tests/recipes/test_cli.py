"""The command as a user types it: exit codes, one line for bad input, JSON on stdout alone."""

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from rope_ext import cli
from rope_ext.registry import known_methods
from tests.conftest import random_llama


def rope_ext(*words):
    return CliRunner().invoke(cli.app, [str(w) for w in words])


def document(*words):
    result = rope_ext(*words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words):
    """Return the one line on stderr of a command that must exit 2 and print nothing else."""
    result = rope_ext(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom rope_ext.cli import app\n"
        "r = CliRunner().invoke(app, ['--help'])\nassert r.exit_code == 0 and 'compare' in r.output\n"
        "heavy = {'torch', 'transformers', 'numpy', 'altair', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version():
    result = rope_ext("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("rope-ext 0.")


def test_methods_lists_the_registry():
    rows = document("methods", "--json")
    assert [r["name"] for r in rows] == list(known_methods())
    assert next(r for r in rows if r["name"] == "yarn")["hyperparameters"]["beta_fast"] == 32
    shown = rope_ext("methods").stdout
    assert all(name in shown for name in known_methods())
    assert "\u2026" not in shown, "nothing is cropped at 80 columns"


def test_inspect_json(checkpoint):
    got = document("inspect", checkpoint, "--method", "linear", "--factor", "4", "--json")
    assert got["original_context"] == 512
    assert got["context"] == 2048
    assert got["new_inv_freq"] == pytest.approx([f / 4 for f in got["inv_freq"]])
    assert got["wavelengths"] == pytest.approx([2 * math.pi / f for f in got["inv_freq"]])
    # window 512, theta 1e4, head_dim 16: the last four pairs turn less than once, and linear brings nothing new
    assert got["longer_than_window"] == [w > 512 for w in got["wavelengths"]]
    assert got["unseen_angles"] == [False] * 8
    unscaled = document("inspect", checkpoint, "--factor", "4", "--json")
    assert unscaled["unseen_angles"] == got["longer_than_window"]
    assert sum(unscaled["unseen_angles"]) == 4
    # keys and values, 2 layers, 2 KV heads, 16 dimensions, 2 bytes, 2048 tokens
    assert got["kv_cache_bytes"] == 2 * 2 * 2 * 16 * 2 * 2048
    assert got["attention_scale"] == 1


def test_inspect_says_when_frequencies_follow_the_length(checkpoint):
    words = ("inspect", checkpoint, "--context", "4096", "--method")
    assert document(*words, "dynamic-ntk", "--json")["static"] is False
    assert document(*words, "resonance:over=yarn", "--json")["static"] is True
    shown = rope_ext(*words, "dynamic-ntk").stdout
    assert "follow the current length; shown is 4096 tokens" in shown
    assert "slowed more" in shown  # at alpha = factor the base outgrows what the factor alone asks for


def test_extend_says_who_reads_it(tmp_path):
    words = ("extend", "tiny", "--method", "yarn:attention_scale=1.1", "--factor", "4", "--out")
    shown = rope_ext(*words, tmp_path / "out").stdout
    assert "  transformers 5: exact\n" in shown
    assert "  llama.cpp: approximate (attention scale 1.139, not 1.1)" in shown
    got = document(*words, tmp_path / "json", "--gguf", tmp_path / "out.gguf", "--json")
    assert got["readers"]["SGLang 0.5"] == "exact"
    assert (tmp_path / "out.gguf").exists()
    assert got["gguf"] == str(tmp_path / "out.gguf")


def test_a_gguf_is_copied_without_loading_it(tmp_path, monkeypatch):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    rope_ext("extend", "tiny", "--method", "unscaled", "--factor", "1", "--gguf", first)
    monkeypatch.setattr("rope_ext.hf.load_model", lambda *_args, **_more: pytest.fail("loaded"))
    result = rope_ext("extend", first, "--method", "yarn", "--factor", "4", "--gguf", second)
    assert result.exit_code == 0, result.output
    assert second.stat().st_size > first.stat().st_size


def test_extend_refuses_before_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_ext.hf.load_model", lambda *_args, **_more: pytest.fail("loaded"))
    (tmp_path / "taken.gguf").write_text("x")
    words = ("extend", "tiny", "--method", "yarn", "--factor", "4")
    for more, message in (
        ((), "nothing to write; give --out DIR, --gguf FILE, or both"),
        (("--gguf", tmp_path / "taken.gguf"), "exists; name a new file"),
    ):
        result = rope_ext(*words, *more)
        assert result.exit_code == 2
        assert message in result.stderr


def test_what_one_target_refuses_leaves_the_other_unwritten(tmp_path):
    """A stopped pair between others has no stock form, though a GGUF could hold it; and the other way round."""
    for method, more in (("resonance:over=p-rope", ()), ("dynamic-ntk", ("--allow-approximate",))):
        words = ("extend", "tiny", "--method", method, "--factor", "4", *more)
        result = rope_ext(*words, "--out", tmp_path / "out", "--gguf", tmp_path / "out.gguf")
        assert result.exit_code == 2
        assert list(tmp_path.iterdir()) == []


def test_an_approximation_says_which_window_it_keeps(tmp_path):
    words = ("extend", "tiny", "--method", "dynamic-ntk", "--factor", "4", "--allow-approximate", "--out")
    shown = rope_ext(*words, tmp_path / "out").stdout
    assert "window 256 -> 256 tokens" in shown
    assert "the stored window is 256" in shown


@pytest.mark.parametrize("gguf", ["same", "same/inside.gguf"])
def test_targets_inside_one_another(tmp_path, gguf):
    words = (
        "extend",
        "tiny",
        "--method",
        "yarn",
        "--factor",
        "4",
        "--out",
        tmp_path / "same",
        "--gguf",
        tmp_path / gguf,
    )
    (tmp_path / "same").mkdir(exist_ok="/" in gguf) if "/" in gguf else None
    result = rope_ext(*words)
    assert result.exit_code == 2
    assert "lie inside one another" in result.stderr
    assert list(tmp_path.rglob("*.*")) == []


def test_a_failed_export_leaves_no_new_parents(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_ext.export._check_stock_reads_alike", lambda *_args: 1 / 0)
    words = ("extend", "tiny", "--method", "yarn", "--factor", "4", "--out", tmp_path / "a" / "b" / "c")
    assert rope_ext(*words).exit_code != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "tiny", "--context", "nan"], "Invalid value for '--context'"),
        (["extend", "tiny"], "Missing option '--method'"),
        (["compare", "--trails", "3"], "No such option: --trails"),
        (["comapre"], "No such command 'comapre'"),
    ],
)
def test_words_that_do_not_parse_give_one_line(words, message):
    done = subprocess.run([sys.executable, "-m", "rope_ext", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("rope-ext: ")
    assert message in line
    assert "--help" in line


def test_no_words_give_help():
    done = subprocess.run([sys.executable, "-m", "rope_ext"], capture_output=True, text=True, check=False)
    assert "Usage:" in done.stdout + done.stderr
    assert subprocess.run([sys.executable, "-m", "rope_ext", "--version"], check=True).returncode == 0


def test_inspect_refuses_what_extend_refuses():
    longrope = "longrope:long_factor=" + ";".join(["1e-60"] * 16)
    for method, words in ((longrope, "negative or not finite"), ("dynamic-ntk:alpha=1e300", "gives no base")):
        result = rope_ext("inspect", "tiny", "--method", method, "--factor", "4")
        assert result.exit_code == 2
        assert words in result.stderr


def test_inspect_table(checkpoint):
    shown = rope_ext("inspect", checkpoint, "--method", "yarn", "--context", "4096").stdout
    assert "untouched" in shown
    assert "divided" in shown
    assert "blended" in shown
    assert "1 MiB" in shown
    assert "all seen" in shown
    assert "\u2026" not in shown, "nothing is cropped at 80 columns"
    assert "unseen ones" in rope_ext("inspect", checkpoint, "--context", "4096").stdout
    plain = rope_ext("inspect", checkpoint).stdout
    assert "factor 1" in plain


def test_extend_writes_a_checkpoint(checkpoint, tmp_path):
    got = document("extend", checkpoint, "--method", "yarn", "--context", "1024", "--out", tmp_path / "x", "--json")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert got["fingerprint"]["context"] == 1024
    assert json.loads((tmp_path / "x" / "tokenizer_config.json").read_text())["model_max_length"] == 1024
    assert "already carries 'yarn' scaling" in refused(
        "extend", tmp_path / "x", "-m", "ntk", "-f", "2", "-o", tmp_path / "y"
    )
    assert (
        rope_ext(
            "extend", tmp_path / "x", "-m", "ntk", "-c", "2048", "-o", tmp_path / "y", "--base", "original"
        ).exit_code
        == 0
    )


def test_extend_keeps_the_dtype_of_the_checkpoint(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "bf16")
    random_llama(vocab_size=258, max_position_embeddings=512).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    assert rope_ext("extend", tmp_path / "bf16", "-m", "yarn", "-f", "2", "-o", tmp_path / "out").exit_code == 0
    sizes = {(tmp_path / name / "model.safetensors").stat().st_size for name in ("bf16", "out")}
    assert max(sizes) - min(sizes) < 100
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_brackets_in_paths_are_shown_as_they_are(checkpoint, data, tmp_path):
    result = rope_ext(*compare_words(checkpoint, data), "--out", tmp_path / "run[v2]")
    assert result.exit_code == 0, result.output
    assert "run[v2]" in result.stdout.replace("\n", "")


def compare_words(checkpoint, data):
    return [
        "compare",
        "--model",
        checkpoint,
        "--methods",
        "unscaled,yarn:truncate=false",
        "--context",
        "1024",
        "--lengths",
        "512,1024",
        "--data",
        data,
        "--documents",
        "2",
        "--trials",
        "1",
    ]


def test_compare_end_to_end(checkpoint, data, tmp_path):
    out = tmp_path / "run"
    result = rope_ext(*compare_words(checkpoint, data), "--out", out)
    assert result.exit_code == 0, result.output
    assert "yarn:truncate=false" in result.stdout
    assert sorted(p.name for p in out.iterdir()) == [
        "cells.jsonl",
        "differences.jsonl",
        "frequencies.png",
        "passkey_unscaled.png",
        "passkey_yarn-truncate-false.png",
        "perplexity.png",
        "recipe.yaml",
        "report.md",
        "run.json",
        "samples.jsonl",
        "units.json",
    ]
    again = document("compare", "--recipe", out / "recipe.yaml", "--out", tmp_path / "again", "--json")
    first = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    assert [c["value"] for c in again["cells"]] == [c["value"] for c in first]
    assert set(again["effective_length"]) == {"unscaled", "yarn:truncate=false"}
    assert again["original_context"] == 512


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "terminated"])
def test_a_run_that_is_killed_loses_nothing_that_was_computed(checkpoint, data, tmp_path, how):
    out = tmp_path / "run"
    words = [sys.executable, "-m", "rope_ext", *map(str, compare_words(checkpoint, data)), "--out", str(out)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (out / "samples.jsonl").exists():
            os.kill(process.pid, how)
            break
        time.sleep(0.01)
    _, told = process.communicate()
    if how == signal.SIGTERM:
        assert process.returncode == 143
        assert told.rstrip().endswith(f"rope-ext: terminated; go on with: rope-ext compare --resume --out {out}")
    kept = (out / "samples.jsonl").read_text().count("\n")
    assert kept >= 1
    result = rope_ext("compare", "--out", out, "--resume")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    keys = [(r["fingerprint"], r["task"], r["length"], r["unit"]) for r in lines]
    assert len(keys) == len(set(keys)) == 2 * 2 * (2 + 5)


def test_failed_cells_exit_three(checkpoint, data, tmp_path, monkeypatch):
    def fail(*_args, **_more):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("recipes.retrieval.grading.score_prompts", fail)
    result = rope_ext(*compare_words(checkpoint, data), "--out", tmp_path / "run")
    assert result.exit_code == 3
    assert "out of memory" in result.stderr
    assert "failed" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--methods", "yran"], "'yran' is not a method; did you mean 'yarn'?"),
        (["compare", "--methods", "yarn:beta_fats=1"], "did you mean 'beta_fast'?"),
        (["compare", "--methods", ","], "names none"),
        (["compare", "--lengths", "256,many"], "lengths: '256,many' is not a comma list"),
        (["compare", "--lengths", "1"], "lengths.0: 1 is refused"),
        (["compare", "--recipe", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["compare", "--resume"], "resume: give --out DIR and nothing else"),
        (["compare", "--model", "tinny"], "'tinny' does not exist; did you mean 'tiny'?"),
        (["compare", "--model", "./no/such/dir"], "'./no/such/dir' does not exist"),
        (["compare", "--data", "pg-19"], "'pg-19' does not exist; did you mean 'pg19'?"),
        (["compare", "--data", "hub:a/b:splt=test"], "'splt' is not an option; known: split, config, column, file"),
        (["compare", "--data", "pg19"], "the Hub was asked for emozilla/pg19-test at c5e39bf3"),
        (["compare", "--base", "middle"], "base: 'middle' is refused"),
        (["compare", "--context", "0"], "compare: context: 0 is refused"),
        (["inspect", "tinny"], "did you mean 'tiny'?"),
        (["inspect", "tiny", "--method", "yarn", "--factor", "0.5"], "factor: 0.5 would not stretch 256 tokens"),
        (["inspect", "tiny", "--context", "100"], "context: 100 is below the original window of 256"),
        (["inspect", "tiny", "--context", "512", "--factor", "2"], "both context=512 and factor=2.0"),
        (["inspect", "tiny", "--base", "middle"], "base: 'middle' is neither original nor checkpoint"),
        (["extend", "tiny", "--method", "yarn", "--out", "x"], "neither came"),
    ],
)
def test_bad_input_is_one_line_and_exit_two(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*words)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path, checkpoint, data):
    (tmp_path / "f").write_text("x")
    assert "cannot be written" in refused("extend", "tiny", "-m", "yarn", "-f", "2", "-o", tmp_path / "f" / "x")
    assert "not an empty directory" in refused("extend", "tiny", "-m", "yarn", "-f", "2", "-o", tmp_path / "f")
    assert "cannot be written" in refused(*compare_words(checkpoint, data), "--out", tmp_path / "f" / "x")
    assert "name the folder of a transformers checkpoint" in refused("inspect", tmp_path / "f")
    (tmp_path / "d").mkdir()
    assert "holds no config.json" in refused("inspect", tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text("{")
    assert "cannot be loaded" in refused("inspect", tmp_path / "d")


def test_a_second_run_in_the_same_folder_is_refused(checkpoint, data, tmp_path):
    words = compare_words(checkpoint, data)
    assert rope_ext(*words, "--out", tmp_path / "run").exit_code == 0
    handle = os.open(tmp_path / "run", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "another run is writing" in refused("compare", "--resume", "--out", tmp_path / "run")
    finally:
        os.close(handle)
    assert rope_ext("compare", "--resume", "--out", tmp_path / "run").exit_code == 0


def test_a_full_disk_is_one_line_that_says_how_to_go_on(checkpoint, data, tmp_path, monkeypatch):
    def full(_path, _rows):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("recipes.compare.rows.append", full)
    result = rope_ext(*compare_words(checkpoint, data), "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "No space left on device; go on with: rope-ext compare --resume" in result.stderr


def test_a_folder_in_place_of_a_file(checkpoint, data, tmp_path):
    assert rope_ext(*compare_words(checkpoint, data), "--out", tmp_path / "run").exit_code == 0
    (tmp_path / "run" / "report.md").unlink()
    (tmp_path / "run" / "report.md").mkdir()
    result = rope_ext("compare", "--resume", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "Is a directory" in result.stderr


def test_any_terminal_encoding_will_do():
    for words in (["methods"], ["inspect", "tiny"]):
        command = [sys.executable, "-m", "rope_ext", *words]
        subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)


def test_debug_shows_the_traceback():
    result = rope_ext("--debug", "inspect", "tinny")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    rope_ext("methods")  # resets the switch for the tests that follow


def test_protocols_and_budget_on_the_command_line(checkpoint, data, tmp_path):
    words = [*compare_words(checkpoint, data), "--protocols", "sliding, gain", "--memory-budget", "1.5MiB"]
    words += ["--stride", "300", "--last", "50"]
    result = rope_ext(*words, "--baseline", "yarn:truncate=false", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "memory_budget: 1572864" in recipe
    assert "baseline: yarn:truncate=false" in recipe
    report = (tmp_path / "run" / "report.md").read_text()
    assert "windows of L tokens moved by 300" in report
    assert "the last 50 tokens at L" in report


@pytest.mark.parametrize("size", ["lots", "", "1.2.3GiB", "-1", "3 XB"])
def test_sizes_that_are_none(size):
    result = rope_ext("compare", "--memory-budget", size)
    assert result.exit_code == 2
    assert f"memory-budget: {size!r} is no size" in result.stderr


def test_a_dry_run_says_what_it_would_cost_and_writes_nothing(checkpoint, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*compare_words(checkpoint, data), "--protocols", "prefix,last-k,sliding,gain", "--last", "50", "--dry-run"]
    shown = rope_ext(*words)
    assert shown.exit_code == 0, shown.output
    assert "without sharing" in " ".join(shown.stdout.split())
    got = document(*words, "--json")
    assert list(tmp_path.iterdir()) == []
    columns = {(c["task"], c["protocol"], c["length"]): c["units"] for c in got["cells"]}
    assert columns == {
        **{("perplexity", p, n): 2 for p in ("prefix", "last-50", "sliding-256") for n in (512, 1024)},
        ("long-context-gain", "gain-50-over-512", 1024): 2,
        ("passkey", "classic", 512): 5,
        ("passkey", "classic", 1024): 5,
    }
    assert got["methods"] == 2
    # 2 layers x keys and values x 2 heads x 16 numbers in fp32
    assert got["cache_bytes"] == 1024 * 2 * 2 * 2 * 16 * 4
    assert 1 < got["unshared_operations"] / got["operations"] < 4
