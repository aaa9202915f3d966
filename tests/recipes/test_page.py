"""The page of one or several runs: what it says, what it keeps apart, and that a browser shows it without a network."""

import json
import math
import re
import shutil

import pytest

from evals import rows
from recipes.compare import run_compare
from recipes.finetune import run_finetune
from recipes.folders import grouped, read_folder
from recipes.load import RecipeError, make_recipe
from recipes.page import write_page
from recipes.setting import prepare
from recipes.tuning_load import make_finetune
from recipes.tuning_setting import prepare_finetune
from recipes.verdict import Threshold, threshold_of, verdict_of
from tests.recipes.browser import needs_browser, opened
from tests.recipes.test_cli import document, refused, rope_ext


@pytest.fixture(scope="module")
def run(checkpoint, data, tmp_path_factory):
    """A comparison with two protocols of perplexity and passkeys."""
    out = tmp_path_factory.mktemp("runs") / "one"
    recipe = {
        "model": str(checkpoint),
        "methods": ["unscaled", "yarn", "linear"],
        "context": 1024,
        "lengths": [512, 1024],
        "data": str(data),
        "perplexity": {"documents": 3, "protocols": ["prefix", "by-position"]},
        "passkey": {"depths": [0, 1], "trials": 2},
    }
    run_compare(prepare(make_recipe(recipe), out))
    return out


def copied(run, folder):
    shutil.copytree(run, folder)
    return folder


def specs_of(text):
    return json.loads(re.search(r"const specs = (.*);\n", text)[1])


def test_the_page_says_what_the_run_measured(run, tmp_path):
    text = write_page([run], tmp_path / "page.html").read_text()
    cells = rows.read_cells(run / "cells.jsonl")
    shown = re.sub(r"\s+", " ", text)
    for cell in cells:
        if cell.depth is None and cell.task == "perplexity":
            assert f">{cell.value:.4g}<small>{cell.ci_low:.3g} to {cell.ci_high:.3g}</small>" in shown
    record = json.loads((run / "run.json").read_text())
    for fact in (record["legs"][0]["machine"], record["corpus"]["data_hash"], *record["legs"][0]["fingerprints"]):
        assert fact in text
    assert f"rope-ext compare --recipe {run}/recipe.yaml" in text
    titles = [spec["title"]["text"] for spec in specs_of(text)]
    assert [title.partition(":")[0] for title in titles] == [
        "Perplexity over length",
        "Where in a document it reads",
        "Passkeys by length and place",
        "Passkeys, one method less another",
        "How far passkeys are found",
        "What each method does to the frequencies",
        "Wavelength of every pair",
    ]
    assert "http://" not in re.sub(r"http://(www\.w3\.org|json-schema)", "", text.partition("<script>")[0])


def test_the_verdict_is_of_the_method_that_goes_farthest(run):
    [group] = grouped([read_folder(run)])
    cells = {(s.name, c.length): c for s in group for c in s.cells if (c.task, c.depth) == ("passkey", None)}
    assert all(cell.value == 0 for cell in cells.values())  # a random model finds none
    words = verdict_of(group, 512, Threshold(0.85))
    assert words[0] == (
        "No method is known to find passkeys at the shortest length, 512 tokens (0.85 asked for at every length)."
    )
    lowest = min(group, key=lambda s: s.pooled("perplexity", "prefix")[1024].value)
    value = lowest.pooled("perplexity", "prefix")[1024].value
    assert words[1].startswith(f"{lowest.name} has a perplexity of {value:.3g}")
    # All reach it, and the one with the lowest perplexity is named first
    assert verdict_of(group, 512, Threshold(0.0))[0].startswith(f"{lowest.name}, ")


def test_a_tie_without_perplexities_names_none_of_them_before_the_others(checkpoint, data, tmp_path):
    asked = {"model": str(checkpoint), "methods": ["unscaled", "yarn"], "context": 1024, "data": str(data)}
    asked |= {"lengths": [512, 1024], "perplexity": {"documents": 0}, "passkey": {"depths": [0], "trials": 2}}
    run_compare(prepare(make_recipe(asked), tmp_path / "run"))
    [group] = grouped([read_folder(tmp_path / "run")])
    words = verdict_of(group, 512, Threshold(0.0))
    assert words[0].startswith("unscaled, yarn all find passkeys to 1,024 tokens")
    assert "perplexity" not in words[0]


def scored(run, folder, change):
    """Copy a run with every sample passed through `change`, as if it had been killed: cells follow from samples."""
    copied(run, folder)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    kept = [found for line in lines if (found := change(line)) is not None]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"finished": False}))
    return folder


def said(folder, **keywords):
    [group] = grouped([read_folder(folder)])
    return " ".join(verdict_of(group, 512, threshold_of([read_folder(folder)], group), **keywords))


def test_a_winner_is_declared_only_where_there_is_one(run, tmp_path):
    def both(line):
        return line | {"value": 1.0} if line["task"] == "passkey" and line["method"] != "linear" else line

    words = said(scored(run, tmp_path / "tie", both))
    assert re.search(r"(unscaled, yarn|yarn, unscaled) all find passkeys to 1,024 tokens, 2 times the trained", words)
    assert "the longest length measured; of these" in words

    def one(line):
        return line | {"value": 1.0} if line["task"] == "passkey" and line["method"] == "linear" else line

    assert "linear goes farthest: it finds passkeys to 1,024 tokens" in said(scored(run, tmp_path / "one", one))


def test_columns_that_are_partly_done_or_failed_are_not_ranked(run, tmp_path):
    def cut(line):
        if line["task"] == "passkey":
            line |= {"value": 1.0}
            late = line["method"] == "yarn" and line["length"] == 1024 and line["unit"].partition("/")[2] != "0"
            return None if late or line["method"] == "linear" else line
        # of yarn's perplexity at 1,024 tokens one document alone, and a very good one
        if line["method"] == "yarn" and line["task"] == "perplexity" and line["length"] == 1024:
            return line | {"value": 0.1} if line["unit"] == "1.txt" else None
        return line

    words = said(scored(run, tmp_path / "cut", cut))
    assert "unscaled goes farthest: it finds passkeys to 1,024 tokens" in words
    assert "nothing beyond is known: yarn at 1,024, linear at 512." in words
    assert "yarn has a perplexity" not in words
    assert "at 512 tokens (n = 3)" in words or "at 512 tokens, n = 3" in words  # the longest that all have whole
    text = write_page([tmp_path / "cut"], tmp_path / "page.html").read_text()
    assert "n = 1 alone" in text


def test_a_threshold_can_be_a_share_of_what_the_model_as_it_came_scores(run, tmp_path):
    folder = copied(run, tmp_path / "of_base")
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("of_base: false", "of_base: true"))

    def most(line):
        half = line["task"] == "passkey" and line["unit"].endswith("/0")
        return line | {"value": 1.0 if half else 0.0} if line["task"] == "passkey" else line

    words = said(scored(folder, tmp_path / "scored", most))
    assert "all find passkeys to 1,024 tokens" in words
    assert "0.425 asked for at every length; 0.85 of the 0.5 that unscaled scores at the shortest length" in words


def test_runs_of_one_method_at_other_lengths_show_all_of_them(checkpoint, data, tmp_path):
    for name, lengths in (("short", [512]), ("long", [512, 1024])):
        asked = {"model": str(checkpoint), "methods": ["yarn"], "context": 1024, "lengths": lengths, "data": str(data)}
        asked |= {"perplexity": {"documents": 3}, "passkey": {"trials": 0}}
        run_compare(prepare(make_recipe(asked), tmp_path / name))
    # The corpus is of documents that are long enough for the longest length: the same three here
    groups = grouped([read_folder(tmp_path / name) for name in ("short", "long")])
    lengths = [[sorted(series.pooled("perplexity", "prefix")) for series in group] for group in groups]
    assert lengths == [[[512, 1024]]]
    text = write_page([tmp_path / "short", tmp_path / "long"], tmp_path / "page.html").read_text()
    assert ">1,024</button>" in text


def test_runs_whose_folders_have_one_name_are_told_apart(checkpoint, data, tmp_path):
    asked = {"model": str(checkpoint), "methods": ["yarn"], "lengths": [512], "data": str(data)}
    asked |= {"perplexity": {"documents": 3}, "passkey": {"trials": 0}}
    for place, context in (("x", 1024), ("y", 2048)):
        run_compare(prepare(make_recipe(asked | {"context": context}), tmp_path / place / "run"))
    [group] = grouped([read_folder(tmp_path / place / "run") for place in ("x", "y")])
    assert len({series.name for series in group}) == 2


def test_runs_on_the_same_tokens_share_a_table_and_others_stand_apart(run, checkpoint, data, tmp_path):
    again = copied(run, tmp_path / "again")
    [group] = grouped([read_folder(run), read_folder(again)])
    assert [series.name for series in group] == ["unscaled", "yarn", "linear"]  # measured twice, shown once
    recipe = {"model": str(checkpoint), "context": 1024, "lengths": [512, 1024], "passkey": {"trials": 0}}
    more = run_compare(
        prepare(
            make_recipe(recipe | {"methods": ["ntk"], "data": str(data), "perplexity": {"documents": 3}}),
            tmp_path / "more",
        )
    )
    [group] = grouped([read_folder(run), read_folder(more.out)])
    assert [series.name for series in group] == ["unscaled", "yarn", "linear", "ntk"]
    (tmp_path / "other").mkdir()
    for i in range(3):
        (tmp_path / "other" / f"{i}.txt").write_text(f"another text {i}; " * 100)
    asked = recipe | {"methods": ["yarn"], "data": str(tmp_path / "other"), "perplexity": {"documents": 3}}
    other = run_compare(prepare(make_recipe(asked), tmp_path / "apart"))
    groups = grouped([read_folder(run), read_folder(other.out)])
    assert [[series.name for series in group] for group in groups] == [["unscaled", "yarn", "linear"], ["yarn"]]
    text = write_page([run, other.out], tmp_path / "page.html").read_text()
    assert text.count('class="verdict"') == 2


def test_a_run_that_was_killed_shows_what_it_had_measured(run, tmp_path):
    killed = copied(run, tmp_path / "killed")
    for name in ("cells.jsonl", "differences.jsonl", "units.json"):
        (killed / name).unlink()
    record = json.loads((killed / "run.json").read_text())
    (killed / "run.json").write_text(json.dumps(record | {"finished": False}))
    whole = {(c.fingerprint, c.task, c.protocol, c.length, c.depth): c for c in rows.read_cells(run / "cells.jsonl")}
    found = {(c.fingerprint, c.task, c.protocol, c.length, c.depth): c for c in read_folder(killed).parts[0].cells}
    assert found.keys() == whole.keys()
    assert all((found[k].value, found[k].ci_low, found[k].n) == (c.value, c.ci_low, c.n) for k, c in whole.items())
    text = write_page([killed], tmp_path / "page.html").read_text()
    assert "killed was stopped before its end" in text
    (killed / "run.json").unlink()  # before the first method was done
    lines = (killed / "samples.jsonl").read_text().splitlines()
    (killed / "samples.jsonl").write_text("\n".join(lines[:2]) + '\n{"torn')
    text = write_page([killed], tmp_path / "page.html").read_text()
    documents = {json.loads(line)["unit"] for line in lines[:2]}
    assert f"n = {len(documents)} documents" in text
    assert "trained window 512" in text


def test_failed_cells_are_told(run, tmp_path):
    broken = copied(run, tmp_path / "broken")
    cells = [json.loads(line) for line in (broken / "cells.jsonl").read_text().splitlines()]
    cells[0] |= {"status": "failed", "reason": "out of <b>memory</b>", "value": None, "ci_low": None, "ci_high": None}
    (broken / "cells.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    text = write_page([broken], tmp_path / "page.html").read_text()
    assert "out of &lt;b&gt;memory&lt;/b&gt;" in text
    assert "1 failed" in text


def test_words_of_others_are_escaped_everywhere(run, tmp_path):
    evil = '</script><script>alert("x")</script>'
    folder = copied(run, tmp_path / "evil")
    for name in ("cells.jsonl", "samples.jsonl"):
        lines = [json.loads(line) | {"model": evil} for line in (folder / name).read_text().splitlines()]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads((folder / "run.json").read_text())
    record["corpus"]["documents"][0] = evil
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text() + f"# {evil}\n")
    text = write_page([folder], tmp_path / "page.html").read_text()
    assert evil not in text
    assert "alert(&#34;x&#34;)" in text


def test_a_fine_tune_has_its_curve_and_its_stages(checkpoint, data, tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_EXT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train").mkdir()
    for i in range(4):
        (tmp_path / "train" / f"{i}.txt").write_text(f"train {i} counts {i * 7} again; " * 60)
    recipe = {
        "model": str(checkpoint),
        "method": "yarn",
        "context": 1024,
        "data": {"sources": [{"name": str(tmp_path / "train")}], "min_tokens": 16},
        "train": {"steps": 3, "rows_per_step": 1, "lr": 1e-3, "warmup_steps": 1},
        "eval": {
            "data": str(data),
            "lengths": [512, 1024],
            "perplexity": {"documents": 2},
            "passkey": {"trials": 0},
            "at": [2],
        },
    }
    run_finetune(prepare_finetune(make_finetune(recipe), tmp_path / "run"))
    # Killed inside the measurement between: a stage that is partly done stands in no section of its own
    killed = copied(tmp_path / "run", tmp_path / "killed")
    shutil.rmtree(killed / "evals" / "after")
    (killed / "evals" / ".ipynb_checkpoints").mkdir()
    for name in ("cells.jsonl", "run.json"):
        (killed / "evals" / "step-000002" / name).unlink()
    lines = (killed / "evals" / "step-000002" / "samples.jsonl").read_text().splitlines()
    (killed / "evals" / "step-000002" / "samples.jsonl").write_text(lines[0] + "\n")
    text = write_page([killed], tmp_path / "killed.html").read_text()
    assert text.count('class="verdict"') == 1
    [group] = grouped([read_folder(tmp_path / "run")])
    assert [series.name for series in group] == [
        "unscaled (untrained)",
        "yarn (untrained)",
        "yarn (after 2 steps)",
        "yarn (trained, 3 steps)",
    ]
    text = write_page([tmp_path / "run"], tmp_path / "page.html").read_text()
    specs = {spec["title"]["text"].partition(":")[0]: spec for spec in specs_of(text)}
    assert {"Perplexity over length", "Training loss", "Perplexity over steps of training"} <= specs.keys()
    assert [row["step"] for row in specs["Perplexity over steps of training"]["data"]["values"]] == [0, 2, 3]
    assert "yarn (after 2 steps)</td>" not in text  # tables have the ends alone


def test_the_command_and_what_it_refuses(run, tmp_path):
    found = document("report", run, "--out", tmp_path / "new" / "page.html", "--json")
    assert found["out"] == str(tmp_path / "new" / "page.html")
    assert found["bytes"] == (tmp_path / "new" / "page.html").stat().st_size < 2e6
    assert "holds no recipe.yaml, so it is no run" in refused("report", tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: tiny\n")
    assert "has measured nothing yet; go on with it: rope-ext compare --resume" in refused("report", tmp_path)
    (tmp_path / "recipe.yaml").write_text("a: [")
    with pytest.raises(RecipeError, match="is not YAML"):
        read_folder(tmp_path)
    assert "is a folder; name a file" in refused("report", run, "--out", tmp_path)
    broken = copied(run, tmp_path / "nan")
    (broken / "cells.jsonl").write_text(
        (broken / "cells.jsonl").read_text().replace('"factor": 2.0', '"factor": NaN', 1)
    )
    assert "with a value that none can have" in refused("report", broken)
    document("report", copied(run, tmp_path / "default"), "--json")
    assert (tmp_path / "default" / "report.html").exists()


@needs_browser
def test_a_browser_draws_it_sorts_it_and_asks_no_network(run, tmp_path):
    page_file = write_page([run], tmp_path / "page.html")
    with opened(page_file) as page:
        assert page.locator("[data-drawn] svg.marks").count() == len(specs_of(page_file.read_text()))
        # the second column of the first table, up and down
        head = page.locator("table").first.locator("th button").nth(1)
        for direction in ("ascending", "descending"):
            head.click()
            cells = page.locator("table").first.locator("tbody tr td:nth-child(2)")
            order = [float(cells.nth(i).get_attribute("data-order")) for i in range(cells.count())]
            assert order == sorted(order, reverse=direction == "descending")
            assert math.isfinite(order[0])


def test_the_doctor_says_what_is_here_and_how_to_get_what_is_not(monkeypatch):
    found = document("doctor", "--json")
    assert found["devices"][-1] == "cpu"
    assert found["attention"]["sdpa"] == "usable"
    assert found["alibi"]["folded"].endswith("what is used here")
    assert {extra["name"] for extra in found["extras"]} >= {"accelerate", "peft", "gguf", "wandb", "flash-attn"}
    monkeypatch.setattr("recipes.doctor._version", lambda name: None if name == "peft" else "1.0")
    monkeypatch.setenv("ROPE_EXT_ALIBI", "dense")
    told = rope_ext("doctor").stdout
    assert "peft is missing, for LoRA adapters: pip install 'rope-ext[train]'" in told
    assert "alibi by dense: usable, for tests, chosen by ROPE_EXT_ALIBI" in told
