import json

import pytest

from evals.errors import EvalError
from recipes.compare import run_compare
from recipes.contrast import contrast_runs, contrast_table, read_run
from recipes.load import RecipeError, make_recipe
from recipes.setting import prepare
from tests.recipes.test_cli import document, refused, rope_ext


def run(recipe, out):
    return run_compare(prepare(make_recipe(recipe), out))


@pytest.fixture
def two(recipe, tmp_path):
    """Return the folders of two runs on the same data: unscaled and yarn, then linear and yarn."""
    recipe |= {"passkey": {"trials": 2, "depths": [0, 1], "variants": ["classic", "text"]}}
    for name, methods in (("one", ["unscaled", "yarn"]), ("two", ["linear", "yarn"])):
        run(recipe | {"methods": methods}, tmp_path / name)
    return tmp_path / "one", tmp_path / "two"


def test_two_runs_give_the_differences_of_one(two, recipe, tmp_path):
    recipe |= {"passkey": {"trials": 2, "depths": [0, 1], "variants": ["classic", "text"]}}
    whole = run(recipe | {"methods": ["unscaled", "linear"]}, tmp_path / "whole")
    found = contrast_runs(*map(read_run, two), methods=("unscaled", "linear"))
    key = lambda c: (c.task, c.protocol, c.length)  # noqa: E731
    assert sorted(found, key=key) == sorted(whole.contrasts, key=key)
    assert {c.native for c in found if c.length == 512} == {True}


def test_a_method_that_is_in_both_is_paired_with_itself(two):
    found = contrast_runs(*map(read_run, two))
    assert {(c.method, c.against, c.value) for c in found} == {("yarn", "yarn", 0.0)}
    # perplexity and two passkey tasks, at two lengths
    assert len(found) == 6
    assert contrast_table(found, "two against one").row_count == 6


def test_other_tokens_are_refused(two, recipe, tmp_path):
    (tmp_path / "data").mkdir()
    for i in range(4):
        (tmp_path / "data" / f"{i}.txt").write_text(f"another text {i}, of the same names; " * 80)
    run(recipe | {"methods": ["yarn"], "data": str(tmp_path / "data"), "passkey": {"trials": 0}}, tmp_path / "other")
    with pytest.raises(EvalError, match=r"yarn and yarn saw different tokens .*measure both on the same data"):
        contrast_runs(read_run(two[0]), read_run(tmp_path / "other"))
    line = refused("contrast", two[0], tmp_path / "other")
    assert "saw different tokens" in line


def test_what_cannot_be_paired(two, recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"no recipe\.yaml, so it is no run; name a folder"):
        read_run(tmp_path)
    with pytest.raises(RecipeError, match="has no 'ntk'; it has: unscaled, yarn"):
        contrast_runs(*map(read_run, two), methods=("ntk", "yarn"))
    run(recipe | {"methods": ["ntk", "abf"], "passkey": {"trials": 0}}, tmp_path / "three")
    with pytest.raises(RecipeError, match=r"no method is in both runs .*--methods FIRST,SECOND"):
        contrast_runs(read_run(two[0]), read_run(tmp_path / "three"))
    run(recipe | {"methods": ["yarn"], "lengths": [600], "passkey": {"trials": 0}}, tmp_path / "four")
    with pytest.raises(RecipeError, match="no task, protocol and length in common"):
        contrast_runs(read_run(two[0]), read_run(tmp_path / "four"))
    assert "names 1; name two" in refused("contrast", *two, "--methods", "yarn")
    (tmp_path / "four" / "samples.jsonl").unlink()
    assert "holds no samples, as all it was to measure failed" in refused("contrast", two[0], tmp_path / "four")
    record = json.loads((two[1] / "run.json").read_text())
    (two[1] / "run.json").write_text(json.dumps(record | {"finished": False}))
    assert "go on with it: rope-ext compare --resume" in refused("contrast", *two)
    (two[1] / "run.json").write_text(json.dumps(record | {"original_context": 256}))
    assert "an original window of 512 tokens" in refused("contrast", *two)


def test_other_documents_are_refused_and_one_task_can_be_chosen(two, recipe, tmp_path):
    recipe |= {"passkey": {"trials": 2, "depths": [0, 1], "variants": ["classic", "text"]}}
    run(recipe | {"methods": ["yarn"], "perplexity": {"documents": 2}}, tmp_path / "fewer")
    line = refused("contrast", two[0], tmp_path / "fewer")
    assert "did not measure the same in perplexity (prefix) at 512" in line
    rows = document("contrast", two[0], tmp_path / "fewer", "--task", "passkey", "--json")
    assert {r["task"] for r in rows} == {"passkey"}
    assert "did you mean 'passkey'?" in refused("contrast", *two, "--task", "passkeys")


def test_samples_that_a_run_has_left_behind_do_not_count(two, recipe, tmp_path):
    """Resumed with another seed and back again: both are on disk, and the cells say which are meant."""
    recipe |= {"methods": ["yarn"], "passkey": {"trials": 2, "depths": [0, 1], "variants": ["classic", "text"]}}
    for seed in (0, 1, 0):
        resume = (tmp_path / "back").exists()
        run_compare(prepare(make_recipe(recipe | {"seed": seed}), tmp_path / "back", resume=resume))
    found = contrast_runs(read_run(two[0]), read_run(tmp_path / "back"), methods=("yarn", "yarn"))
    assert {c.value for c in found} == {0.0}


def test_on_the_command_line(two):
    shown = rope_ext("contrast", *two)
    assert shown.exit_code == 0, shown.output
    assert "(native)" in shown.stdout
    rows = document("contrast", *two, "--methods", "yarn,linear", "--json")
    assert {(r["method"], r["against"]) for r in rows} == {("linear", "yarn")}
    assert json.dumps(rows)
