"""What --data and a recipe's `data` may say, up to the record of a run that they were measured in."""

import json
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
from pyarrow import parquet

from evals import hub
from evals.errors import EvalError
from recipes.compare import run_compare
from recipes.data import NAMES, open_data, pinned
from recipes.load import RecipeError, make_recipe
from recipes.setting import prepare, resumed_recipe

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def books(tmp_path):
    """Four documents in one Parquet file, the second of them too short for 1,024 tokens."""
    texts = [f"book {i} says its own number again: {i}; 长 " * 60 for i in range(4)]
    (tmp_path / "books").mkdir()
    path = tmp_path / "books" / "test.parquet"
    parquet.write_table(pa.table({"text": [texts[0], "short", *texts[2:], None]}), path)
    return path


def measured(recipe, folder, **changes):
    setting = prepare(make_recipe(recipe | {"methods": ["unscaled"], "passkey": {"trials": 0}} | changes), folder)
    result = run_compare(setting)
    assert not result.failed
    return result, json.loads((folder / "run.json").read_text())["corpus"]


def test_a_run_on_parquet(recipe, books, tmp_path):
    result, corpus = measured(recipe, tmp_path / "run", data=str(books))
    assert corpus["name"] == str(books)
    assert sorted(corpus["documents"]) == ["test.parquet:0", "test.parquet:2", "test.parquet:3"]
    assert {c.n for c in result.cells} == {3}


def test_a_run_on_a_hub_data_set_records_its_commit_and_can_be_made_again(recipe, books, tmp_path, monkeypatch):
    asked = []

    def dataset_info(_, repository, *, revision, timeout):
        asked.append((repository, revision, timeout))
        return SimpleNamespace(sha=SHA)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(hub, "stream", lambda data: hub._read(str(books.parent), data))
    first, corpus = measured(recipe, tmp_path / "run", data="hub:a/b", perplexity={"documents": 2})
    assert corpus["name"] == f"hub:a/b@{SHA}:split=test"
    assert corpus["documents"] == ["test:0", "test:2"], "a stream keeps its order"
    assert corpus["num_too_short"] == 1
    again = resumed_recipe(tmp_path / "run")
    assert again.data == corpus["name"]
    second, same = measured(recipe, tmp_path / "again", data=again.data, perplexity={"documents": 2})
    assert same == corpus
    assert [c.value for c in second.cells] == [c.value for c in first.cells]
    assert [revision for _, revision, _ in asked] == ["main", SHA]


def test_presets_are_recorded_as_what_they_mean(monkeypatch):
    monkeypatch.setattr(hub, "pin", lambda data: data)
    for name, spelled in hub.PRESETS.items():
        assert pinned(name) == spelled
    assert pinned("python") == "python"
    assert pinned("./pg19") == "./pg19"


def test_a_run_without_documents_asks_no_hub(recipe, tmp_path):
    setting = prepare(make_recipe(recipe | {"data": "pg19", "perplexity": {"documents": 0}}), tmp_path / "run")
    assert setting.recipe.data == "pg19"


def test_a_folder_of_the_name_of_a_preset_is_a_path_only_when_written_as_one(recipe, books, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    books.parent.rename(tmp_path / "pg19")
    setting = prepare(make_recipe(recipe | {"data": "./pg19"}), tmp_path / "run")
    assert setting.recipe.data == str(tmp_path / "pg19")
    with pytest.raises(EvalError, match="needs the network"):
        prepare(make_recipe(recipe | {"data": "pg19"}), tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pg-19", "'pg-19' does not exist; did you mean 'pg19'[?]"),
        ("proofpile", "did you mean 'proof-pile'[?]"),
        ("pythn", "did you mean 'python'[?]"),
        ("", "the name is empty; give python, python-all, pg19, proof-pile, hub:OWNER/NAME"),
    ],
)
def test_misspelled_names(name, words):
    with pytest.raises(RecipeError, match=words):
        open_data(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("emozilla/pg19-test", "does not exist; .* a data set of the Hub is hub:OWNER/NAME"),
        ("pythn.txt", "does not exist; name a text"),
        ("hub:pg19", "names no data set of the Hub"),
    ],
)
def test_other_names_that_mean_nothing(name, words):
    with pytest.raises(EvalError, match=words):
        open_data(name)


def test_every_name_is_on_the_help_and_in_the_documentation(request):
    from typer.testing import CliRunner

    from rope_ext import cli

    shown = CliRunner().invoke(cli.app, ["compare", "--help"], env={"COLUMNS": "400"}).output
    page = (request.config.rootpath / "docs" / "recipes.md").read_text()
    for name in (*NAMES, "hub:OWNER/NAME"):
        assert name in shown
        assert f"`{name}" in page
