import dataclasses
import io
import json
import math
import shutil

import pytest
import torch
from rich.console import Console

from evals import rows
from evals.errors import EvalError
from evals.rows import read_cells, read_samples
from recipes import retrieval, work
from recipes.all_work import total_cost
from recipes.compare import run_compare
from recipes.load import RecipeError, make_recipe
from recipes.present import table, write_pictures, write_report
from recipes.setting import default_lengths, prepare, resumed_recipe
from rope_ext import ContextError, MethodError, ModelError, RopeExtError
from tests.conftest import random_llama


def run(recipe, out, *, resume=False):
    return run_compare(prepare(make_recipe(recipe), out, resume=resume))


def strip(cells):
    return [dataclasses.replace(c, commit=None) for c in cells]


def test_a_whole_run(recipe, tmp_path):
    steps = []
    setting = prepare(make_recipe(recipe), tmp_path / "run")
    result = run_compare(setting, advance=lambda cost, what: steps.append((cost, what)))
    assert sum(cost.operations for cost, _ in steps) == pytest.approx(total_cost(setting).operations)
    assert sum(cost.tokens for cost, _ in steps) == pytest.approx(total_cost(setting).tokens)
    assert not result.failed

    cells = read_cells(tmp_path / "run" / "cells.jsonl")
    assert cells == list(result.cells)
    # 3 methods x 2 lengths x (1 perplexity + 1 pooled passkey + 2 depths)
    assert len(cells) == 3 * 2 * 4
    assert {c.status for c in cells} == {"ok"}
    assert {c.n for c in cells if c.task == "perplexity"} == {3}
    assert {c.n for c in cells if c.task == "passkey" and c.depth is None} == {4}

    samples = read_samples(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 3 * 2 * (3 + 4)
    for length in (512, 1024):
        shown = {}
        for s in samples:
            if s.length == length:
                shown.setdefault(s.method, set()).add((s.task, s.unit, s.data_hash))
        assert shown["unscaled"] == shown["yarn"] == shown["linear"], "methods must see the same tokens"

    for cell in cells:  # every aggregate can be recomputed from the samples
        if cell.task == "perplexity":
            mine = [
                s for s in samples if (s.fingerprint, s.task, s.length) == (cell.fingerprint, "perplexity", cell.length)
            ]
            mean = math.fsum(s.value * s.weight for s in mine) / sum(s.weight for s in mine)
            assert cell.value == pytest.approx(math.exp(mean), rel=1e-12)

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (leg,) = record["legs"]
    assert set(leg["fingerprints"]) == {c.fingerprint for c in cells}
    assert leg["seconds"] > 0
    assert record["finished"] is True
    assert record["corpus"]["num_too_short"] <= 1
    assert record["original_context"] == 512
    assert setting.model.config.max_position_embeddings == 512, "every patch is undone"


def test_unscaled_rows_do_not_depend_on_the_context(recipe, tmp_path):
    """The patched control is the untouched model: same numbers whatever window is claimed."""
    recipe |= {"methods": ["unscaled"], "passkey": {"trials": 0}}
    one = run(recipe, tmp_path / "a")
    two = run(recipe | {"context": 2048}, tmp_path / "b")
    assert [c.value for c in one.cells] == [c.value for c in two.cells]


def test_pictures_table_and_report(recipe, tmp_path):
    result = run(recipe | {"methods": ["unscaled", "yarn:beta_fast=16"]}, tmp_path / "run")
    pictures = write_pictures(result)
    assert [p.name for p in pictures] == [
        "perplexity.png",
        "passkey_unscaled.png",
        "passkey_yarn-beta_fast-16.png",
        "frequencies.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000 for p in pictures)
    view = table(result)
    assert [c.header for c in view.columns] == [
        "method",
        "ppl\n512",
        "ppl\n1024",
        "key\n512",
        "key\n1024",
        "eff.\nlength",
    ]
    assert view.row_count == 2
    report = write_report(result, pictures).read_text()
    assert "| yarn:beta_fast=16 |" in report
    assert "rope-ext compare --recipe" in report


def test_spellings_that_give_one_file_name_get_two(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.setting._check_method", lambda *_args: None)  # the second does nothing, and is refused
    recipe |= {"methods": ["dynamic-ntk:alpha=1e+16", "dynamic-ntk:alpha=1e-16"], "perplexity": {"documents": 0}}
    pictures = write_pictures(run(recipe, tmp_path / "run"))
    names = [p.name for p in pictures if p.name.startswith("passkey")]
    assert names == ["passkey_dynamic-ntk-alpha-1e-16.png", "passkey_dynamic-ntk-alpha-1e-16~2.png"]


PROTOCOLS = ["prefix", "last-k", "by-position", "sliding", "yarn-legacy", "gain"]
EVERY = {"documents": 3, "protocols": PROTOCOLS, "stride": 200, "last": 100}


def test_every_protocol_in_one_run(recipe, tmp_path):
    recipe |= {"perplexity": EVERY, "passkey": {"trials": 0}}
    steps = []
    setting = prepare(make_recipe(recipe), tmp_path / "run")
    result = run_compare(setting, advance=lambda cost, _what: steps.append(cost.operations))
    assert sum(steps) == pytest.approx(total_cost(setting).operations)
    assert not result.failed
    curves = ("prefix", "last-100", "sliding-200", "yarn-legacy-200")
    columns = {(c.task, c.protocol, c.length, c.metric) for c in result.cells}
    assert columns == {
        *(("perplexity", p, n, "perplexity") for p in curves for n in (512, 1024)),
        *(("nll-by-position", "by-position", n, "nll") for n in (512, 1024)),
        ("long-context-gain", "gain-100-over-512", 1024, "nll-difference"),
    }
    at = {(c.method, c.protocol, c.length): c for c in result.cells}
    for name in ("unscaled", "yarn", "linear"):
        # the two buckets are the two halves of the prefix
        halves = [at[name, "by-position", n].value for n in (512, 1024)]
        assert math.log(at[name, "prefix", 512].value) == pytest.approx(halves[0], abs=1e-9)
        whole = (halves[0] * 511 + halves[1] * 512) / 1023
        assert math.log(at[name, "prefix", 1024].value) == pytest.approx(whole, abs=1e-9)
        # at the document's whole length one window is all there is
        same = {at[name, p, 1024].value for p in ("prefix", "sliding-200", "yarn-legacy-200")}
        assert max(same) - min(same) < 1e-4
        assert abs(at[name, "sliding-200", 512].value - at[name, "yarn-legacy-200", 512].value) > 1e-6
    legacy = [s for s in read_samples(tmp_path / "run" / "samples.jsonl") if s.protocol == "yarn-legacy-200"]
    # 1,023 ids besides BOS, 511 a window: starts at 0, 200, 400, and what is left from 600 on
    assert {s.detail["windows"] for s in legacy if s.length == 512} == {4}
    assert {s.weight for s in legacy if s.length == 512} == {4}
    report = write_report(result, write_pictures(result)).read_text()
    for words in (
        "## Perplexity (the first L tokens)",
        "## Perplexity (windows of L tokens moved by 200, each token once)",
        "## Nats per token by position",
        "the last 100 tokens at L, against the same with the last 512 alone",
        "| paired with unscaled: percent of perplexity | 512 (native) | 1024 |",
    ):
        assert words in report, words
    assert run(recipe, tmp_path / "run", resume=True).cells == result.cells


def test_effective_length_on_values_and_on_bounds(recipe, tmp_path):
    """Two trials a depth, four in all: all found is 1.00, and supports no more than 0.51."""
    result = run(recipe | {"methods": ["unscaled"]}, tmp_path / "run")
    found = {512: (1.0, 0.51), 1024: (0.75, 0.3)}
    cells = tuple(
        dataclasses.replace(c, value=found[c.length][0], ci_low=found[c.length][1]) if c.task == "passkey" else c
        for c in result.cells
    )
    for threshold, by_value, by_bound in ((0.85, 512, None), (0.5, 1024, 512), (0.2, 1024, 1024)):
        task = dataclasses.replace(result.recipe.passkey, threshold=threshold)
        told = dataclasses.replace(result, cells=cells, recipe=dataclasses.replace(result.recipe, passkey=task))
        assert list(told.effective_lengths().values()) == [by_value]
        assert list(told.effective_lengths(by_bound=True).values()) == [by_bound]
        shown = "<512" if by_bound is None else by_bound
        report = write_report(told, []).read_text()
        assert f"- unscaled: {by_value}; {shown} if the lower end of every interval has to reach it" in report
        assert f"(passkey {threshold:g} or better there" in report


def test_effective_length_as_a_share_of_the_baseline(recipe, tmp_path):
    """0.85 of what the baseline scores at the shortest length: 0.8 there asks for 0.68."""
    passkey = {"trials": 2, "depths": [0, 1], "threshold": 0.85, "of_base": True}
    result = run(recipe | {"methods": ["yarn", "unscaled"], "passkey": passkey}, tmp_path / "run")
    found = {"unscaled": {512: 0.8, 1024: 0.1}, "yarn": {512: 0.7, 1024: 0.69}}
    cells = tuple(
        dataclasses.replace(c, value=found[c.method][c.length]) if c.task == "passkey" else c for c in result.cells
    )
    told = dataclasses.replace(result, cells=cells)
    assert told.threshold == pytest.approx(0.68)
    assert {told.labels[fp]: reached for fp, reached in told.effective_lengths().items()} == {
        "unscaled": 512,
        "yarn": 1024,
    }
    assert "0.85 of the baseline's share at the shortest length (0.68) or better" in write_report(told, []).read_text()
    lost = tuple(dataclasses.replace(c, value=None) if c.task == "passkey" else c for c in cells)
    told = dataclasses.replace(result, cells=lost)
    assert told.threshold is None
    assert told.effective_lengths() == {}
    assert table(told).row_count == 2


def test_a_share_of_nothing_is_no_threshold(recipe, tmp_path):
    """Random weights find no passkey; a share of the baseline's 0 would be reached by all."""
    passkey = {"trials": 2, "depths": [0, 1], "of_base": True}
    result = run(recipe | {"methods": ["unscaled"], "passkey": passkey}, tmp_path / "run")
    assert {c.value for c in result.cells if c.task == "passkey"} == {0.0}
    assert result.effective_lengths() == {}
    assert "(not measured)" not in write_report(result, []).read_text()


def test_buckets_of_other_edges_are_measured_anew(recipe, tmp_path):
    """The bucket that ends at 1,024 begins where the length before ends: 128 first, 512 then."""
    recipe |= {"perplexity": {"documents": 3, "protocols": PROTOCOLS, "last": 50}, "passkey": {"trials": 0}}
    run(recipe | {"lengths": [128, 1024]}, tmp_path / "run")
    again = run(
        recipe | {"methods": ["unscaled", "yarn", "ntk"], "lengths": [512, 1024]}, tmp_path / "run", resume=True
    )
    fresh = run(recipe | {"methods": ["unscaled", "yarn", "ntk"], "lengths": [512, 1024]}, tmp_path / "fresh")
    assert strip(again.cells) == strip(fresh.cells)
    assert again.contrasts == fresh.contrasts


def test_rows_that_do_not_fit_are_scored_one_by_one(recipe, tmp_path, monkeypatch):
    whole = run(recipe, tmp_path / "whole")
    real = retrieval.grading.score_prompts

    def no_room(model, prompts, *, share, max_rows, **more):
        if share or max_rows != 1:
            raise torch.OutOfMemoryError("no room for two")
        return real(model, prompts, share=share, max_rows=max_rows, **more)

    monkeypatch.setattr(retrieval.grading, "score_prompts", no_room)
    again = run(recipe, tmp_path / "again")
    assert strip(again.cells) == strip(whole.cells)


def test_one_broken_trial_fails_its_own_cells(recipe, tmp_path, monkeypatch):
    real = retrieval.grading.score_prompts

    def broken(model, prompts, **more):
        sound = [i for i, p in enumerate(prompts) if (p.depth, p.trial, p.length) != (1, 1, 512)]
        for some in real(model, [prompts[i] for i in sound], **more):
            yield [(sound[number], score) for number, score in some]
        if len(sound) < len(prompts):
            raise EvalError("not finite")

    monkeypatch.setattr(retrieval.grading, "score_prompts", broken)
    result = run(recipe | {"methods": ["yarn"]}, tmp_path / "run")
    at = {(c.length, c.depth): (c.status, c.n) for c in result.cells if c.task == "passkey"}
    assert at == {
        (512, None): ("failed", 3),
        (512, 0.0): ("ok", 2),
        (512, 1.0): ("failed", 1),
        (1024, None): ("ok", 4),
        (1024, 0.0): ("ok", 2),
        (1024, 1.0): ("ok", 2),
    }


def test_a_native_cell_that_failed_is_told(recipe, tmp_path, monkeypatch):
    real = work.nll_by_length

    def broken(model, document, lengths, **more):
        if 512 in lengths:
            raise RuntimeError("broken")
        return real(model, document, lengths, **more)

    monkeypatch.setattr(work, "nll_by_length", broken)
    result = run(recipe | {"passkey": {"trials": 0}}, tmp_path / "run")
    report = write_report(result, []).read_text()
    assert "Not known: what was measured within at most 512 tokens failed under linear, unscaled, yarn." in report


def test_a_control_alone_has_its_own_length_and_no_effective_one(recipe, tmp_path):
    asked = {"perplexity": {"documents": 0}, "passkey": {"trials": 2, "variants": ["needle-only"]}}
    result = run(recipe | asked, tmp_path / "run")
    [length] = {c.length for c in result.cells}
    view = table(result)
    assert [c.header for c in view.columns] == ["method", f"key\n{length}", "eff.\nlength"]
    assert next(iter(view.columns[-1].cells)).plain == "unknown"


def test_differences_are_paired_and_recomputable(recipe, tmp_path):
    result = run(recipe | {"baseline": "linear"}, tmp_path / "run")
    samples = read_samples(tmp_path / "run" / "samples.jsonl")
    # two methods against the third, each at 2 lengths of perplexity and of passkey
    assert len(result.contrasts) == 2 * 2 * 2
    assert {c.against for c in result.contrasts} == {"linear"}
    assert {(c.length, c.native) for c in result.contrasts} == {(512, True), (1024, False)}
    for contrast in result.contrasts:
        ours, theirs = (
            {s.unit: s for s in samples if (s.fingerprint, s.task, s.length) == (fp, contrast.task, contrast.length)}
            for fp in (contrast.fingerprint, contrast.against_fingerprint)
        )
        assert ours.keys() == theirs.keys()
        assert {u: s.data_hash for u, s in ours.items()} == {u: s.data_hash for u, s in theirs.items()}
        weight = {u: 1 if contrast.task == "passkey" else s.weight for u, s in ours.items()}
        mean = sum((ours[u].value - theirs[u].value) * weight[u] for u in ours) / sum(weight.values())
        assert contrast.value == pytest.approx(mean, abs=1e-12)
        assert contrast.n == len(ours)
        assert contrast.ci_low <= contrast.value <= contrast.ci_high
    lines = (tmp_path / "run" / "differences.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [dataclasses.asdict(c) for c in result.contrasts]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"baseline": "ntk"}, "baseline 'ntk' is not among the methods"),
        ({"baseline": "yran"}, "did you mean 'yarn'"),
        (
            {"perplexity": {"protocols": ["sliding"], "stride": 512}},
            "512 would skip tokens in windows of 512",
        ),
        (
            {"perplexity": {"protocols": ["last-k"], "last": 512}},
            "512 of 512 tokens cannot be scored",
        ),
        ({"perplexity": {"protocols": ["gain"], "last": 512}}, "512 tokens fill the original window of 512"),
        ({"perplexity": {"protocols": ["prefx"]}}, "perplexity.protocols.0: 'prefx' is refused"),
        ({"perplexity": {"protocols": ["prefix", "prefix"]}}, "names prefix twice"),
        ({"memory_budget": 0}, "memory_budget: 0 is refused"),
    ],
)
def test_protocols_that_cannot_be(recipe, tmp_path, change, words):
    with pytest.raises(RopeExtError, match=words):
        run(recipe | change, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_killed_run_goes_on_to_the_same_table(recipe, tmp_path, monkeypatch):
    whole = run(recipe, tmp_path / "whole")

    class Killed(BaseException):
        pass

    written = 0

    def append_and_die(path, new):
        nonlocal written
        written += 1
        if written == 5:
            raise Killed
        real(path, new)

    real = rows.append
    monkeypatch.setattr(rows, "append", append_and_die)
    with pytest.raises(Killed):
        run(recipe, tmp_path / "torn")
    monkeypatch.setattr(rows, "append", real)
    path = tmp_path / "torn" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-17])  # and the last line torn
    kept = len(read_samples(path))
    assert 0 < kept < 42

    resumed = run_compare(prepare(resumed_recipe(tmp_path / "torn"), tmp_path / "torn", resume=True))
    assert strip(resumed.cells) == strip(whole.cells)
    assert len(read_samples(path)) == 42
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert len(lines) == len(set(lines)) == 42, "nothing twice, not even on disk"


def test_resuming_a_finished_run_measures_nothing(recipe, tmp_path, monkeypatch):
    first = run(recipe, tmp_path / "run")
    monkeypatch.setattr(work, "nll_by_length", lambda *_args, **_kwargs: pytest.fail("measured again"))
    monkeypatch.setattr(retrieval.grading, "score_prompts", lambda *_args, **_more: pytest.fail("measured again"))
    again = run(dataclasses.asdict(resumed_recipe(tmp_path / "run")), tmp_path / "run", resume=True)
    assert strip(again.cells) == strip(first.cells)


def test_samples_of_other_tokens_or_weights_do_not_count(recipe, data, tmp_path):
    """The folder is the same, but what is asked for now is something else: nothing old may slip into a cell."""
    recipe |= {"methods": ["unscaled"], "passkey": {"trials": 0}, "data": str(tmp_path / "data")}
    shutil.copytree(data, tmp_path / "data")
    first = run(recipe, tmp_path / "run")
    for path in (tmp_path / "data").glob("?.txt"):
        path.write_text("quite another text of some length. " * 60)
    changed = run(recipe, tmp_path / "run", resume=True)
    fresh = run(recipe, tmp_path / "fresh")
    assert strip(changed.cells) == strip(fresh.cells)
    assert [c.value for c in changed.cells] != [c.value for c in first.cells]


def test_a_batch_torn_in_the_middle_is_completed_without_repetitions(recipe, tmp_path):
    whole = run(recipe, tmp_path / "run")
    path = tmp_path / "run" / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))  # the last batch wrote four
    assert strip(run(recipe, tmp_path / "run", resume=True).cells) == strip(whole.cells)
    # in other batches than before, so that nats differ by what fp32 sums do in another order
    again = path.read_text().splitlines(keepends=True)
    assert len(again) == len(lines)
    assert {rows.Sample(**json.loads(line)).key() for line in again} == {
        rows.Sample(**json.loads(line)).key() for line in lines
    }


@pytest.mark.parametrize("text", ["[]", '{"legs": 5}', '{"legs": [{}]}', "\udcff"])
def test_a_damaged_record_is_named_before_anything_is_measured(recipe, tmp_path, text, monkeypatch):
    run(recipe, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(work, "nll_by_length", lambda *_args, **_kwargs: pytest.fail("measured"))
    with pytest.raises(EvalError, match="is not a run's record"):
        run(recipe, tmp_path / "run", resume=True)


def test_a_failing_cell_is_recorded_and_the_rest_goes_on(recipe, tmp_path, monkeypatch):
    real = retrieval.grading.score_prompts

    def out_of_memory(model, prompts, **more):
        if any(prompt.length == 1024 for prompt in prompts):
            raise RuntimeError("CUDA out of memory. Tried to allocate 7 GiB\nmore lines")
        return real(model, prompts, **more)

    monkeypatch.setattr(retrieval.grading, "score_prompts", out_of_memory)
    result = run(recipe, tmp_path / "run")
    assert result.failed
    failed = [c for c in result.cells if c.status == "failed"]
    assert {(c.task, c.length, c.value) for c in failed} == {("passkey", 1024, None)}
    assert {c.reason for c in failed} == {"CUDA out of memory. Tried to allocate 7 GiB"}
    assert {c.length for c in result.cells if c.task == "passkey" and c.status == "ok"} == {512}
    assert "failed" in write_report(result, []).read_text()
    # random weights miss every passkey at 512, so the failed cell decides nothing
    assert set(result.effective_lengths().values()) == {None}
    monkeypatch.setattr(retrieval.grading, "score_prompts", real)
    assert not run(recipe, tmp_path / "run", resume=True).failed, "a failed cell is tried again"


def test_a_failed_cell_is_not_a_miss(recipe, tmp_path, monkeypatch):
    """Out of memory at the shortest length: the effective length is unknown, not below it."""

    def out_of_memory(*_args, **_more):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(retrieval.grading, "score_prompts", out_of_memory)
    result = run(recipe, tmp_path / "run")
    assert result.effective_lengths() == {}
    assert next(iter(table(result).columns[-1].cells)).plain == "failed"


def test_the_demo_table_fits_eighty_columns(recipe, tmp_path):
    """Nothing may be cropped where a terminal, or a pipe, is narrow."""
    lengths = (256, 512, 1024, 2048)
    result = run(recipe | {"passkey": {"depths": [0.5], "trials": 1}}, tmp_path / "run")
    wide = [
        dataclasses.replace(c, length=n, value=12345.6 if c.task == "perplexity" else 0.25)
        for c in result.cells
        if c.depth is None and c.length == 512
        for n in lengths
    ]
    result = dataclasses.replace(result, cells=tuple(wide), recipe=dataclasses.replace(result.recipe, lengths=lengths))
    console = Console(width=80, file=io.StringIO())
    console.print(table(result))
    shown = console.file.getvalue()
    assert "\u2026" not in shown
    assert shown.count("12346") == 3 * 4
    assert shown.count("0.25") == 3 * 4


def test_a_tokenizer_that_does_not_fit_the_weights(recipe, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    random_llama(vocab_size=64, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    with pytest.raises(RecipeError, match="has 64 embeddings; tokenizer and weights do not fit"):
        prepare(make_recipe(recipe | {"model": str(tmp_path / "model")}), tmp_path / "run")


def test_the_resolved_recipe_means_the_same_from_anywhere(recipe, data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.parent)
    setting = prepare(make_recipe(recipe | {"data": data.name}), tmp_path / "run")
    assert setting.recipe.data == str(data)
    assert resumed_recipe(tmp_path / "run").data == str(data)


def test_default_lengths():
    assert default_lengths(256, 2048) == (256, 512, 1024, 2048)
    assert default_lengths(256, 700) == (256, 512, 700)
    assert default_lengths(256, 256) == (256,)


def test_context_defaults_to_four_times_the_original(recipe, tmp_path):
    del recipe["context"], recipe["lengths"]
    setting = prepare(make_recipe(recipe | {"perplexity": {"documents": 0}}), tmp_path / "run")
    assert setting.recipe.context == 2048
    assert setting.recipe.lengths == (512, 1024, 2048)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"context": 256}, ContextError, "below the original window of 512"),
        ({"methods": ["abf:theta=100"]}, MethodError, "below the checkpoint's own"),
        ({"lengths": [50, 1024]}, EvalError, "length 50 is shorter than the template"),
        ({"lengths": [5000]}, EvalError, r"0 documents of at least 5000 tokens, 3 asked"),
        ({"data": "/nowhere/at/all"}, EvalError, "does not exist"),
        ({"model": "/nowhere/at/all"}, ModelError, "does not exist"),
        ({"perplexity": {"documents": 50}}, EvalError, "4 documents of at least 1024 tokens, 50 asked"),
        ({"context": 10**20}, ContextError, "more than 2147483647 tokens"),
        ({"data": ""}, RecipeError, "the name is empty"),
        ({"model": ""}, ModelError, "the name is empty"),
        ({"data": "~nobody/x"}, EvalError, "does not exist"),
        ({"data": "x" * 300}, EvalError, "no usable name"),
        ({"base": "checkpoint"}, ModelError, "has no effect"),
        ({"perplexity": {"documents": 0}, "passkey": {"trials": 0}}, RecipeError, "nothing to measure"),
    ],
)
def test_bad_input_is_found_before_anything_is_written(recipe, tmp_path, changes, error, words):
    with pytest.raises(error, match=words):
        prepare(make_recipe(recipe | changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_run_is_overwritten(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cells.jsonl").write_text("precious")
    with pytest.raises(RecipeError, match="no run is overwritten"):
        prepare(make_recipe(recipe), tmp_path / "run")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecipeError, match="cannot be written"):
        prepare(make_recipe(recipe), tmp_path / "file" / "run")
    with pytest.raises(RecipeError, match="no run to go on with"):
        resumed_recipe(tmp_path)


def test_a_window_that_the_configuration_misstates(recipe, tmp_path):
    """The checkpoint says 512; a recipe that knows better says 256, and factor, native mark and gain follow."""
    recipe |= {"original_context": 256, "lengths": [256, 512], "passkey": {"trials": 0}}
    result = run(recipe | {"perplexity": {"documents": 2, "protocols": ["gain"], "last": 100}}, tmp_path / "run")
    assert result.original_context == 256
    assert {c.factor for c in result.cells} == {4.0}
    assert {c.length for c in result.cells} == {512}
    assert {c.native for c in result.contrasts} == {False}
