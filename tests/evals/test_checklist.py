"""What an evaluation of long context must hold to be believed, point by point; the numbers are those of the checklist.

Not here: 14 and 38, which are about lm-eval, and 35, about wandb. What a point says in a line is tested here in a few;
the files beside this one go into depth.
"""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from evals import passkey, plots, stats
from evals.corpora import Document, bos_id, encode, python_sources, tokenise
from evals.errors import EvalError
from evals.grading import Forest, begins_with, score_prompts, write_answers
from evals.nll import batch_nll, token_nll
from evals.perplexity import nll_by_length, sliding_nll, windows
from evals.rows import read_cells, read_samples
from evals.variants import INSTRUCTION, VARIANTS
from recipes import retrieval, work
from recipes.aggregate import difference_of
from recipes.compare import run_compare
from recipes.forecast import forecast
from recipes.load import RecipeError, make_recipe
from recipes.present import write_pictures, write_report
from recipes.setting import load_setting, prepare, resumed_recipe
from rope_ext import Yarn, extend, load_model
from rope_ext.registry import parse_method
from tests.conftest import logits_of, random_llama
from tests.evals.conftest import byte_tokenizer
from tests.evals.test_passkey import TEXTS, TOKENIZERS, maker
from tests.recipes.conftest import checkpoint, data, recipe  # noqa: F401  (fixtures)

DEPTHS = (0.0, 0.5, 1.0)


def same(_length):
    return "static"


@pytest.fixture(scope="module")
def bundled():
    return load_model("tiny", device="cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on the bundled model: two methods and the control, documents, passkeys and their controls."""
    values = {
        "methods": ["unscaled", "yarn", "dynamic-yarn"],
        "context": 1024,
        "lengths": [256, 512],
        "perplexity": {"documents": 3, "protocols": ["prefix", "last-k", "by-position", "gain"], "last": 64},
        "passkey": {"trials": 4, "depths": [0, 0.5, 1], "variants": ["classic", "text", "no-needle", "needle-only"]},
    }
    return run_compare(prepare(make_recipe(values), tmp_path_factory.mktemp("checklist") / "run"))


def values_of(result, **wanted):
    """Return (method, length) -> pooled cell of the wanted task and protocol."""
    cells = [c for c in result.cells if c.depth is None and c.position is None]
    return {(c.method, c.length): c for c in cells if all(getattr(c, k) == v for k, v in wanted.items())}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_01_prompts_have_exactly_the_length_asked_for_answer_and_room_included(name):
    for variant in VARIANTS:
        made = maker(TOKENIZERS[name], variant, num_spare=5)
        length = 777 if VARIANTS[variant].has_filler else made.shortest(2)
        for prompt in made.relative(length=length, depths=DEPTHS, num_trials=2):
            assert len(prompt.ids) + prompt.num_spare == prompt.length == length


@pytest.mark.parametrize("name", TOKENIZERS)
def test_02_one_bos_at_index_0_of_prompts_and_windows_and_the_policy_on_record(name, finished):
    tokenizer = TOKENIZERS[name]
    bos = bos_id(tokenizer)
    corpus = tokenise(TEXTS, tokenizer, name="toy", num_tokens=900, num_documents=3)
    shown = [p.ids for p in maker(tokenizer).relative(length=600, depths=DEPTHS, num_trials=2)]
    shown += [window.ids for d in corpus.documents for window in windows(d, 100, stride=40, bos=bos)]
    for ids in shown:
        assert [i for i, token in enumerate(ids) if token == bos] == ([] if bos is None else [0])
    assert json.loads((finished.out / "run.json").read_text())["bos"] == 0


def test_03_the_needle_is_one_span_that_decodes_and_is_on_record(tokenizer, finished):
    for prompt in maker(tokenizer, "text").relative(length=900, depths=DEPTHS, num_trials=3):
        text = tokenizer.decode(list(prompt.ids[prompt.needle_start : prompt.needle_end]))
        assert text == f"\nThe pass key is {prompt.key}. Remember it. {prompt.key} is the pass key.\n"
    samples = [s for s in read_samples(finished.out / "samples.jsonl") if s.task == "passkey"]
    assert samples
    assert all(s.detail["needle_start"] <= s.detail["needle_end"] <= s.length for s in samples)


def test_04_depths_0_and_1_are_exact_and_actual_depths_rise_with_the_asked(tokenizer):
    asked = [i / 20 for i in range(21)]
    for variant, tolerance in (("classic", 1), ("text", 26)):  # tokens; the longest sentence of the text has 26
        prompts = maker(tokenizer, variant).relative(length=1500, depths=asked, num_trials=1)
        actual = [p.actual_depth for p in prompts]
        assert (actual[0], actual[-1]) == (0, 1)
        assert actual == sorted(actual)
        assert all(abs(a - b) * 1500 <= tolerance for a, b in zip(actual, asked, strict=True))


def test_05_keys_are_unique_of_five_digits_and_nowhere_else(tokenizer):
    for variant in ("classic", "text"):
        prompts = maker(tokenizer, variant).relative(length=900, depths=[i / 10 for i in range(11)], num_trials=20)
        assert len({p.key for p in prompts}) == len(prompts)
        for prompt in prompts:
            assert re.fullmatch(r"[1-9]\d{4}", prompt.key)
            assert tokenizer.decode(list(prompt.ids)).count(prompt.key) == 3  # twice in the needle, once as the answer


def test_06_content_depends_on_its_coordinates_alone(tokenizer):
    one = maker(tokenizer, "text").relative(length=900, depths=DEPTHS, num_trials=4)
    two = maker(tokenizer, "text").relative(length=900, depths=DEPTHS[::-1], num_trials=9)
    assert {p.data_hash for p in one} < {p.data_hash for p in two}
    moved = [
        maker(tokenizer, "text", seed=1).relative(length=900, depths=DEPTHS, num_trials=4),
        maker(tokenizer, "classic").relative(length=900, depths=DEPTHS, num_trials=4),
        maker(tokenizer, "text").relative(length=901, depths=DEPTHS, num_trials=4),
        maker(TOKENIZERS["no-bos"], "text").relative(length=900, depths=DEPTHS, num_trials=4),
    ]
    assert all({p.data_hash for p in other}.isdisjoint(p.data_hash for p in one) for other in moved)


def test_07_every_method_sees_the_same_ids_and_other_ids_are_not_compared(finished):
    samples = read_samples(finished.out / "samples.jsonl")
    shown = {m: {(s.task, s.protocol, s.length, s.unit, s.data_hash) for s in samples if s.method == m} for m in
             ("unscaled", "yarn", "dynamic-yarn")}  # fmt: skip
    assert shown["unscaled"] == shown["yarn"] == shown["dynamic-yarn"]
    ours, theirs = (
        [s for s in samples if (s.method, s.protocol, s.length) == (m, "prefix", 512)] for m in ("yarn", "unscaled")
    )
    assert difference_of(ours, theirs, seed=0).n == 3
    theirs[1] = dataclasses.replace(theirs[1], data_hash="0" * 16)
    with pytest.raises(EvalError, match=r"yarn and unscaled saw different tokens .*measure both on the same data"):
        difference_of(ours, theirs, seed=0)


def test_08_a_length_too_short_is_an_error_at_once(tokenizer):
    started = time.monotonic()
    for variant in VARIANTS:
        if VARIANTS[variant].has_filler:
            with pytest.raises(EvalError, match=f"length 40 is shorter than the template of '{variant}'"):
                maker(tokenizer, variant).relative(length=40, depths=DEPTHS, num_trials=1)
    assert time.monotonic() - started < 1


def test_09_haystacks_come_in_one_order_offline_without_repetition_in_any_script(tokenizer):
    sources = python_sources("held-out")
    one, two = (maker(tokenizer, "text", documents=d).relative(length=4000, depths=(0.5,), num_trials=3) for d in
                (sources, sources[::-1]))  # fmt: skip
    assert one == two
    lines = Counter(encode_lines(tokenizer, one[0]))
    assert max(lines.values()) == 1
    chinese = Document(name="d", text="".join(f"\u7b2c{i}\u5929\u5929\u6c14\u5f88\u597d\u3002" for i in range(300)))
    [prompt] = maker(tokenizer, "text", documents=[chinese]).relative(length=900, depths=(0.5,), num_trials=1)
    assert len(prompt.ids) == 900


def encode_lines(tokenizer, prompt):
    """Return the long lines of a prompt's text; a text that came twice would have some of them twice."""
    text = tokenizer.decode(list(prompt.ids[: prompt.needle_start]))
    return [line for line in text.split("\n") if len(line) > 60]


def test_10_controls_no_needle_is_0_the_needle_alone_is_1_and_unscaled_stands_beside(finished):
    for method in ("unscaled", "yarn", "dynamic-yarn"):
        at = {c.protocol: c for c in finished.cells if c.method == method and c.depth is None and c.task == "passkey"}
        assert at["no-needle"].value == 0
        assert at["needle-only"].value == 1
        assert at["needle-only"].length < 256
    assert {("unscaled", 256), ("unscaled", 512)} <= set(values_of(finished, task="passkey", protocol="classic"))


def test_11_variants_beyond_the_plain_passkey():
    assert {"text", "distractors", "multi-key", "multi-query", "uuid", "needle"} <= set(VARIANTS)
    words = {w.lower() for w in re.findall(r"[A-Za-z]+", VARIANTS["needle"].make(lambda _w, n: n - 1).question)}
    hidden = {w.lower() for w in re.findall(r"[A-Za-z]+", VARIANTS["needle"].make(lambda _w, n: n - 1).needle)}
    assert len(words & hidden) <= 2, "question and needle share few words"


def test_12_the_frequencies_are_on_record_and_a_method_that_does_nothing_is_refused(finished):
    [leg] = json.loads((finished.out / "run.json").read_text())["legs"]
    wanted = {"method", "hyperparameters", "context", "inv_freq", "attention_scale", "attention", "dtype", "revision"}
    assert all(wanted <= set(found) for found in leg["fingerprints"].values())
    assert len({found["inv_freq"] for found in leg["fingerprints"].values()}) == 2  # dynamic-yarn ends as yarn
    with pytest.raises(RecipeError, match=r"p-rope:fraction=1 leaves every frequency as it was"):
        load_setting(make_recipe({"methods": ["unscaled", "p-rope:fraction=1"]}))


@pytest.mark.parametrize("spelled", ["dynamic-yarn", "dynamic-ntk"])
def test_13_a_longer_text_before_changes_nothing(bundled, spelled):
    model, _ = bundled
    short, long = torch.arange(5, 205).tolist(), torch.arange(5, 705).tolist()
    with extend(model, parse_method(spelled), factor=4) as patch:
        before = token_nll(model, short, frequency_key=patch.frequency_key)
        token_nll(model, long, frequency_key=patch.frequency_key)
        assert torch.equal(token_nll(model, short, frequency_key=patch.frequency_key), before)


def test_15_batched_equals_single_and_what_is_not_finite_is_no_number(tokenizer, recipe, tmp_path, monkeypatch):  # noqa: F811
    model = random_llama(vocab_size=258)
    rows = [encode(tokenizer, text) for text in ("one line", "a much longer line of text than that one", "two")]
    for got, row in zip(batch_nll(model, rows), rows, strict=True):
        # fp32 sums in another order
        torch.testing.assert_close(got, token_nll(model, row), rtol=0, atol=5e-5)
    monkeypatch.setattr(work, "nll_by_length", lambda *_a, **_k: {512: torch.tensor([math.nan]), 1024: torch.ones(9)})
    result = run_compare(prepare(make_recipe(recipe | {"methods": ["unscaled"]}), tmp_path / "run"))
    at = values_of(result, task="perplexity")
    assert {length: (c.status, c.value) for (_, length), c in at.items()}[512] == ("failed", None)


@pytest.mark.parametrize("spelled", ["unscaled", "yarn", "dynamic-yarn", "dynamic-ntk"])
def test_16_shared_beginnings_give_the_scores_of_whole_prompts(bundled, spelled):
    model, tokenizer = bundled
    made = maker(tokenizer)
    prompts = [p for n in (200, 256, 600) for p in made.absolute(length=n, positions=(0, 100, 400), num_trials=2)]
    with extend(model, parse_method(spelled), factor=4) as patch:
        both = []
        for share in (True, False):
            found = score_prompts(model, prompts, frequency_key=patch.frequency_key, share=share)
            both.append(dict(pair for some in found for pair in some))
        assert [both[0][i].correct for i in range(len(prompts))] == [both[1][i].correct for i in range(len(prompts))]
        assert max(abs(both[0][i].answer_nll - both[1][i].answer_nll) for i in range(len(prompts))) < 1e-4
        tokens = [
            sum(b - a for a, b in Forest(prompts, frequency_key=patch.frequency_key, share=share).edges())
            for share in (True, False)
        ]
    # within the original window the dynamic ones share as well, beyond it nothing
    assert tokens[0] < tokens[1] * (0.6 if spelled in {"unscaled", "yarn"} else 1)


@pytest.mark.parametrize(("spelled", "forwards"), [("yarn", 1), ("dynamic-yarn", 3)])
def test_17_one_forward_serves_every_length_where_frequencies_allow(bundled, spelled, forwards):
    model, tokenizer = bundled
    [document] = tokenise(
        python_sources("held-out"), tokenizer, name="python", num_tokens=600, num_documents=1
    ).documents
    seen = []
    with extend(model, parse_method(spelled), factor=4) as patch:
        handle = model.base_model.register_forward_pre_hook(
            lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        found = nll_by_length(model, document, (100, 256, 400, 600), frequency_key=patch.frequency_key)
        handle.remove()
        assert len(seen) == forwards
        for length, values in found.items():
            alone = token_nll(model, document.ids[:length], frequency_key=patch.frequency_key)
            torch.testing.assert_close(values, alone, rtol=0, atol=2e-5)  # fp32 sums in another order


def test_18_chunks_equal_dense_and_no_logits_outgrow_the_budget():
    model = random_llama(vocab_size=5000)
    ids = torch.randint(0, 5000, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    dense = F.cross_entropy(logits_of(model, torch.tensor([ids]))[0, :-1].double(), torch.tensor(ids[1:]))
    largest = []
    model.lm_head.register_forward_hook(lambda _m, _a, out: largest.append(out.numel() * 4))
    budget = 2**20
    assert float(token_nll(model, ids, memory_budget=budget).mean()) == pytest.approx(float(dense), abs=1e-5)
    assert max(largest) <= budget / 2
    assert 10 * budget < 600 * 5000 * 4


def test_19_what_was_written_is_cut_off_by_ids(bundled):
    """The prompt holds the key; an output read with the prompt in it would always be right."""
    model, tokenizer = bundled
    prompts = maker(tokenizer, num_spare=4).relative(length=700, depths=(0.5,), num_trials=2)
    for some in write_answers(model, tokenizer, prompts):
        for number, score in some:
            assert prompts[number].key in tokenizer.decode(list(prompts[number].ids))
            assert INSTRUCTION.strip() not in score.output
            assert not score.substring


def test_20_12345_is_not_123_and_both_readings_are_kept_with_the_output(recipe, tmp_path):  # noqa: F811
    assert not begins_with(" 12345", "123")
    assert not begins_with(" 123", "12345")
    asked = recipe | {"methods": ["unscaled"], "passkey": {"trials": 1, "depths": [0], "generate": True}}
    result = run_compare(prepare(make_recipe(asked | {"perplexity": {"documents": 0}}), tmp_path / "run"))
    for sample in read_samples(result.out / "samples.jsonl"):
        assert sample.protocol == "classic-generate"
        assert {"output", "substring", "token_match", "ran_out"} <= set(sample.detail)


def test_21_there_is_room_beyond_the_answer_and_running_out_of_it_is_on_record(bundled):
    model, tokenizer = bundled
    prompts = maker(tokenizer, num_spare=8).relative(length=256, depths=(0.5,), num_trials=1)
    [[(_, score)]] = write_answers(model, tokenizer, prompts)
    assert len(encode(tokenizer, score.output)) <= prompts[0].num_answer + 8
    assert score.exact
    assert score.ran_out  # a base model goes on: that is no miss


def test_22_teacher_forced_loss_and_match_are_on_record_and_agree_with_decoding(bundled, finished):
    for sample in read_samples(finished.out / "samples.jsonl"):
        if sample.task == "passkey":
            assert sample.detail["answer_nll"] >= 0
            assert (sample.detail["margin"] > 0) == (sample.value == 1)
    model, tokenizer = bundled
    prompts = maker(tokenizer, num_spare=2).relative(length=300, depths=DEPTHS, num_trials=4)
    forced = dict(pair for some in score_prompts(model, prompts, frequency_key=same) for pair in some)
    written = dict(pair for some in write_answers(model, tokenizer, prompts) for pair in some)
    assert [forced[i].correct for i in range(12)] == [written[i].token_match for i in range(12)]


def test_23_protocols_are_named_in_the_output_with_what_they_scored(finished):
    """Each is computed by hand in test_perplexity."""
    assert {c.protocol for c in finished.cells if c.task != "passkey"} == {
        "prefix",
        "last-64",
        "by-position",
        "gain-64-over-256",
    }
    at = values_of(finished, protocol="prefix")["yarn", 512]
    assert (at.n, at.tokens, at.windows) == (3, 3 * 511, 3)
    report = write_report(finished, []).read_text()
    assert (
        "Scored under each method, in 3 documents: 765 tokens in 3 windows at 256; 1533 tokens in 3 windows" in report
    )


def test_24_documents_are_long_enough_in_this_tokenizer_the_same_at_all_lengths_or_it_is_an_error(finished):
    samples = [s for s in read_samples(finished.out / "samples.jsonl") if s.protocol == "prefix"]
    assert len({frozenset(s.unit for s in samples if s.length == n) for n in (256, 512)}) == 1
    corpus = json.loads((finished.out / "run.json").read_text())["corpus"]
    assert corpus["num_tokens"] == 512
    assert len(corpus["documents"]) == 3
    with pytest.raises(EvalError, match="3 documents of at least 7000 tokens, 4 asked"):
        tokenise(TEXTS, byte_tokenizer(), name="toy", num_tokens=7000, num_documents=4)


def test_25_windows_never_cross_documents(tokenizer):
    corpus = tokenise(TEXTS, tokenizer, name="toy", num_tokens=950, num_documents=3)
    for document in corpus.documents:
        for window in windows(document, 128, stride=50, bos=corpus.bos):
            text = ",".join(map(str, window.ids[1:]))
            assert text in ",".join(map(str, document.ids))


def test_26_every_share_has_its_wilson_interval_and_n_and_an_empty_cell_is_none(finished):
    for cell in finished.cells:
        if cell.task == "passkey" and cell.protocol != "text":
            assert (cell.value, cell.ci_low, cell.ci_high, cell.n) == stats.wilson(round(cell.value * cell.n), cell.n)
        if cell.task == "passkey" and cell.protocol == "text" and cell.depth is None and cell.value in {0, 1}:
            # three depths in each of four texts say no more than four trials where all agree
            whole = stats.wilson(4 * round(cell.value), 4)
            assert (cell.ci_low, cell.ci_high, cell.n) == (whole.low, whole.high, 12)
    assert stats.wilson(10, 10).low == pytest.approx(0.722, abs=1e-3)
    with pytest.raises(EvalError):
        stats.wilson(0, 0)


def test_27_differences_are_paired_clustered_and_seeded(finished):
    samples = [s for s in read_samples(finished.out / "samples.jsonl") if (s.protocol, s.length) == ("text", 512)]
    ours, theirs = ([s for s in samples if s.method == m] for m in ("yarn", "unscaled"))
    found = difference_of(ours, theirs, seed=0)
    assert found == difference_of(ours, theirs, seed=0)
    assert found.n == 12
    haystacks = {s.unit: s.detail["haystack"] for s in ours}
    assert len(set(haystacks.values())) == 4
    units = [{s.unit: stats.Unit(s.value) for s in side} for side in (ours, theirs)]
    assert found == stats.paired_difference(*units, clusters=haystacks, span=1, seed=0)
    assert {(c.method, c.against) for c in finished.contrasts} == {("yarn", "unscaled"), ("dynamic-yarn", "unscaled")}


@pytest.mark.parametrize("threshold", [0.2, 0.85, 0.856])
def test_28_the_effective_length_is_contiguous_and_decided_on_means_and_on_bounds(threshold):
    shares = {
        256: stats.wilson(80, 80),
        512: stats.wilson(70, 80),
        1024: stats.wilson(12, 80),
        2048: stats.wilson(80, 80),
    }
    found = stats.effective_lengths(shares, threshold=threshold)
    assert found == {0.2: (512, 512), 0.85: (512, 256), 0.856: (512, 256)}[threshold]


def test_29_failures_are_counted_apart(recipe, tmp_path, monkeypatch):  # noqa: F811
    real = retrieval.grading.score_prompts

    def fails_at_depth_1(model, prompts, **more):
        if any(prompt.depth == 1 for prompt in prompts):
            raise RuntimeError("out of memory")
        return real(model, prompts, **more)

    monkeypatch.setattr(retrieval.grading, "score_prompts", fails_at_depth_1)
    result = run_compare(prepare(make_recipe(recipe | {"methods": ["unscaled"]}), tmp_path / "run"))
    cells = [c for c in result.cells if c.task == "passkey"]
    assert {(c.status, c.reason, c.value) for c in cells if c.depth is None} == {("failed", "out of memory", None)}
    assert "out of memory" in write_report(result, []).read_text()


def test_30_the_price_at_the_native_length_stands_in_every_report(finished, tmp_path):
    native = {(c.method, c.task) for c in finished.contrasts if c.native}
    assert {(m, t) for m in ("yarn", "dynamic-yarn") for t in ("perplexity", "passkey")} <= native
    report = write_report(finished, []).read_text()
    assert (
        "## At the native length\n\n| 256 tokens, against unscaled | percent of perplexity | share of passkeys |"
        in report
    )
    assert re.search(r"\| dynamic-yarn \| [+-]?\S+ \[\S+, \S+\] \| [+-]0 \[\S+, \S+\] \|", report)
    asked = {
        "methods": ["unscaled", "yarn"],
        "lengths": [512],
        "perplexity": {"documents": 2},
        "passkey": {"trials": 0},
    }
    beyond = run_compare(prepare(make_recipe(asked), tmp_path / "run"))
    assert "Not measured against a baseline: it takes two methods, and a length of at most 256 tokens" in (
        write_report(beyond, []).read_text()
    )


def plain(cells):
    """Return what a table shows of cells, without what a second run has of its own."""
    return [(c.method, c.task, c.protocol, c.length, c.depth, c.n, c.value, c.ci_low, c.ci_high) for c in cells]


def test_31_cut_off_anywhere_and_gone_on_with_the_table_is_the_same(recipe, tmp_path):  # noqa: F811
    """The file of samples ends after any number of bytes, in the middle of a line or a character."""
    whole = run_compare(prepare(make_recipe(recipe), tmp_path / "run"))
    path = whole.out / "samples.jsonl"
    content = path.read_bytes()
    for part in range(12):
        path.write_bytes(content[: len(content) * part // 12 + 7 * part])
        (whole.out / "cells.jsonl").unlink()
        again = run_compare(prepare(resumed_recipe(whole.out), whole.out, resume=True))
        assert plain(again.cells) == plain(whole.cells)
        keys = [s.key() for s in read_samples(path)]
        complete = [line for line in path.read_text(errors="replace").splitlines() if is_row(line)]
        assert len(keys) == len(set(keys)) == len(complete) == content.count(b"\n")


def is_row(line):
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


@pytest.mark.slow
def test_31_killed_again_and_again_nothing_is_lost_or_measured_twice(recipe, tmp_path):  # noqa: F811
    whole = run_compare(prepare(make_recipe(recipe), tmp_path / "whole"))
    out = tmp_path / "run"
    prepare(make_recipe(recipe), out)
    words = [sys.executable, "-m", "rope_ext", "compare", "--resume", "--out", str(out)]
    kills = 0
    for attempt in range(8):
        before = count(out / "samples.jsonl")
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and count(out / "samples.jsonl") <= before + attempt % 3:
            time.sleep(0.003)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 4
    subprocess.run(words, check=True, capture_output=True)
    assert plain(read_cells(out / "cells.jsonl")) == plain(whole.cells)
    keys = [s.key() for s in read_samples(out / "samples.jsonl")]
    assert len(keys) == len(set(keys)) == 3 * 2 * (3 + 4)


def count(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


EVERY = {"documents": 2, "protocols": ["prefix", "last-k", "by-position", "sliding", "yarn-legacy", "gain"]}


@pytest.mark.parametrize(
    "change",
    [
        {"methods": ["yarn:beta_fast=16"]},
        {"context": 2048},
        {"seed": 1},
        {"lengths": [513, 1024]},
        {"passkey": {"trials": 2, "depths": [0, 1], "generate": True}},
        {"passkey": {"trials": 2, "depths": [0, 1], "variants": ["uuid"]}},
        {"lengths": [600, 1024], "perplexity": EVERY | {"stride": 100}},
        {"lengths": [512, 1000], "perplexity": EVERY | {"last": 20}},
    ],
)
def test_32_whatever_is_changed_is_measured_anew(recipe, tmp_path, change):  # noqa: F811
    asked = recipe | {"methods": ["yarn"], "perplexity": EVERY if "perplexity" in change else {"documents": 0}}
    first = run_compare(prepare(make_recipe(asked), tmp_path / "run"))
    again = run_compare(prepare(make_recipe(asked | change), first.out, resume=True))
    fresh = run_compare(prepare(make_recipe(asked | change), tmp_path / "fresh"))
    assert plain(again.cells) == plain(fresh.cells)
    keys = {s.key() for s in read_samples(fresh.out / "samples.jsonl")}
    old = {s.key() for s in read_samples(first.out / "samples.jsonl")} - keys
    assert len(old) >= 4, "nothing was taken over under another name"


def test_33_what_does_not_fit_fails_alone_and_the_longest_comes_first(recipe, tmp_path, monkeypatch):  # noqa: F811
    """The forward over the longest document fails; shorter lengths, which it would have served, get their own."""
    real, asked = work.nll_by_length, []

    def no_room(model, document, lengths, **more):
        asked.append(max(lengths))
        if max(lengths) == 1024:
            raise torch.OutOfMemoryError("no room for 1024")
        return real(model, document, lengths, **more)

    monkeypatch.setattr(work, "nll_by_length", no_room)
    result = run_compare(prepare(make_recipe(recipe), tmp_path / "run"))
    at = values_of(result, task="perplexity")
    assert {key: cell.status for key, cell in at.items() if key[1] == 512} == {
        (m, 512): "ok" for m in ("unscaled", "yarn", "linear")
    }
    assert {cell.reason for key, cell in at.items() if key[1] == 1024} == {"no room for 1024"}
    assert {c.status for c in result.cells if c.task == "passkey"} == {"ok"}
    assert asked[:3] == [1024, 1024, 512]


def test_34_no_run_writes_over_another(recipe, tmp_path):  # noqa: F811
    first = run_compare(prepare(make_recipe(recipe | {"passkey": {"trials": 0}}), tmp_path / "run"))
    content = {path.name: path.read_bytes() for path in first.out.iterdir()}
    with pytest.raises(RecipeError, match="is not empty and no run is overwritten"):
        prepare(make_recipe(recipe), tmp_path / "run")
    assert {path.name: path.read_bytes() for path in first.out.iterdir()} == content


def test_36_the_heat_map_has_a_fixed_scale_n_and_the_window_and_leaves_blank_what_was_not_measured(finished):
    cells = [c for c in finished.cells if (c.method, c.protocol) == ("yarn", "classic") and c.depth is not None]
    chart = plots.passkey_chart(cells[1:], "yarn", original_context=256, model="tiny").to_dict()
    [fill] = [layer["encoding"]["color"] for layer in chart["layer"] if layer["mark"]["type"] == "rect"]
    assert fill["scale"]["domain"] == [0, 1]
    assert "trained window 256 tokens; 4 trials a cell" in chart["title"]["subtitle"][0]
    # data may stand with the chart or with its layers
    held = [layer.get("data", chart.get("data"))["values"] for layer in chart["layer"]]
    assert {len(values) for values in held} == {len(cells) - 1}
    assert next(p.name for p in write_pictures(finished)) == "perplexity.png"


def test_37_a_dry_run_says_cells_tokens_and_memory(recipe):  # noqa: F811
    setting = load_setting(make_recipe(recipe))
    told = forecast(setting).as_dict()
    assert {(c["task"], c["length"], c["units"]) for c in told["cells"]} == {
        ("perplexity", 512, 3), ("perplexity", 1024, 3), ("passkey", 512, 4), ("passkey", 1024, 4),
    }  # fmt: skip
    assert told["tokens"] < told["unshared_tokens"] == 3 * (3 * (512 + 1024) + 4 * (512 + 1024))
    assert {"operations", "unshared_operations", "cache_bytes", "memory_budget"} <= set(told)


def test_39_results_do_not_depend_on_batches(bundled):
    model, tokenizer = bundled
    prompts = maker(tokenizer).relative(length=700, depths=DEPTHS, num_trials=3)
    with extend(model, Yarn(), factor=4):
        found = [
            dict(pair for some in score_prompts(model, prompts, frequency_key=same, max_rows=rows) for pair in some)
            for rows in (1, 2, None)
        ]
    for other in found[1:]:
        assert [other[i].correct for i in range(9)] == [found[0][i].correct for i in range(9)]
        assert max(abs(other[i].answer_nll - found[0][i].answer_nll) for i in range(9)) < 1e-5


def test_40_golden_numbers_of_the_bundled_model(bundled):
    """Made with the model's own dense logits and float64 sums, no line of the engine in between."""
    model, tokenizer = bundled
    text = "def area(width, height):\n    return width * height\n\n\nclass Shape:\n    pass\n" * 12
    ids = [0, *encode(tokenizer, text)][:300]
    logits = logits_of(model, torch.tensor([ids]))[0, :-1].double()
    dense = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    ours = token_nll(model, ids)
    assert float(ours.mean()) == pytest.approx(float(dense.mean()), abs=1e-6)
    assert float(ours[:255].mean()) == pytest.approx(GOLDEN["first 256"], abs=1e-4)
    assert float(ours.mean()) == pytest.approx(GOLDEN["first 300"], abs=1e-4)
    document = passkey.Document(name="d", text=text)
    [cut] = tokenise([document], tokenizer, name="d", num_tokens=300, num_documents=1).documents
    weighted, legacy = sliding_nll(model, cut, 256, stride=64, bos=0, frequency_key=same)
    assert weighted.nll == pytest.approx(GOLDEN["sliding"], abs=1e-4)
    assert legacy.nll == pytest.approx(GOLDEN["yarn-legacy"], abs=1e-4)


GOLDEN = {"first 256": 1.263722, "first 300": 1.206600, "sliding": 1.208460, "yarn-legacy": 1.075956}
