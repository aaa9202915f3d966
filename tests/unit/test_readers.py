"""What other engines make of an export: their formulas against the references, and verdicts that hand counts give."""

import math

import pytest
import torch

from rope_ext import RopeGeometry
from rope_ext.plan import PositionPlan
from rope_ext.readers import READERS, Stated, judge
from rope_ext.registry import parse_method
from tests import reference

D, B, L, S = 128, 10_000.0, 4096, 8.0
ROPE = RopeGeometry(head_dim=D, theta=B, original_context=L)
WINDOW = round(S * L)
ALL = set(READERS)
TRANSFORMERS = {"transformers 5", "transformers 4.57"}


def verdicts(spelled, window=WINDOW, family="llama"):
    chosen = parse_method(spelled)
    keys = {n: chosen.frequency_key(ROPE, context=WINDOW, seq_len=n) for n in (L, L + 1, WINDOW)}
    lengths = keys if len(set(keys.values())) > 1 else (WINDOW,)
    plans = {n: chosen.plan(ROPE, context=WINDOW, seq_len=n) for n in lengths}
    parameters = chosen.rope_parameters(ROPE, context=WINDOW)
    return {v.reader: v for v in judge(parameters, window=window, geometry=ROPE, plans=plans, family=family)}


def of_kind(found, kind):
    return {reader for reader, verdict in found.items() if verdict.kind == kind}


@pytest.mark.parametrize(
    ("spelled", "exact", "cannot"),
    [
        ("unscaled", ALL, set()),
        ("abf", ALL, set()),
        ("ntk", ALL, set()),
        ("linear", ALL, set()),
        ("llama3", ALL, set()),
        ("yarn", ALL - {"ollama"}, {"ollama"}),
        ("yarn:truncate=false", ALL - {"ollama", "llama.cpp"}, {"ollama"}),
        ("yarn:beta_fast=16", ALL - {"ollama", "llama.cpp"}, {"ollama"}),
        ("yarn:attention_scale=1.1", ALL - {"ollama", "llama.cpp"}, {"ollama"}),
        ("ntk-by-parts", ALL - {"ollama", "llama.cpp"}, {"ollama"}),
        ("yarn:ramp=rotations", ALL - {"ollama", "llama.cpp"}, {"ollama", "llama.cpp"}),
        ("resonance", ALL - {"ollama", "llama.cpp"}, {"ollama", "llama.cpp"}),
        ("p-rope", {"transformers 5", "vLLM 0.33"}, ALL - {"transformers 5", "vLLM 0.33"}),
        ("nope", {"transformers 5"}, ALL - {"transformers 5"}),
        (reference.spell_factors(D, S), TRANSFORMERS, {"ollama", "llama.cpp"}),
    ],
)
def test_who_takes_what(spelled, exact, cannot):
    found = verdicts(spelled)
    assert of_kind(found, "exact") == exact
    assert of_kind(found, "cannot") == cannot


def test_how_much_is_said():
    assert verdicts("ntk-by-parts")["llama.cpp"].words == "attention scale 1.208, not 1"
    assert verdicts("yarn:attention_scale=1.1")["llama.cpp"].words == "attention scale 1.208, not 1.1"
    plain, rounded = (torch.tensor(reference.yarn(D, B, L, S, truncate=t)) for t in (False, True))
    percent = 100 * ((torch.maximum(plain, rounded) / torch.minimum(plain, rounded)).max() - 1)
    assert verdicts("yarn:truncate=false")["llama.cpp"].words == f"frequencies off by up to {percent:.2g} %"
    vllm = verdicts(reference.spell_factors(D, S))["vLLM 0.33"]  # the short list is never used
    short, long = reference.example_factors(D, S)
    ratio = max(b / a for a, b in zip(short, long, strict=True))
    assert vllm.kind == "approximate"
    assert vllm.words.startswith(f"frequencies off by up to {ratio:.2g} times")
    assert f"--max-model-len {WINDOW}" in vllm.words


def test_sglang_switches_one_token_late():
    """It asks whether a position exceeds the original window, and positions count from 0."""
    long = torch.tensor(reference.longrope(D, B, reference.example_factors(D, S)[1])).double()
    short = torch.tensor(reference.longrope(D, B, reference.example_factors(D, S)[0])).double()
    stated = Stated(parse_method(reference.spell_factors(D, S)).rope_parameters(ROPE, context=WINDOW), WINDOW, D)
    for tokens, wanted in ((L, short), (L + 1, short), (L + 2, long)):
        got = READERS["SGLang 0.5"](stated, tokens).inv_freq
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


def test_a_gguf_is_offered_where_it_can_be_written():
    assert verdicts("yarn:ramp=rotations")["llama.cpp"].words.endswith("; use --gguf")
    assert "--gguf" not in verdicts(reference.spell_factors(D, S))["llama.cpp"].words


def test_limits_that_serve_too_much_are_named():
    found = verdicts("linear")
    assert found["vLLM 0.33"].kind == "exact"
    assert f"pass --max-model-len {WINDOW}" in found["vLLM 0.33"].words
    assert found["transformers 5"].words == ""


def test_dynamic_types_are_nowhere_exact():
    found = verdicts("dynamic-ntk", window=L)
    assert of_kind(found, "exact") == set()
    assert of_kind(found, "approximate") == {*TRANSFORMERS, "vLLM 0.33", "SGLang 0.5"}
    assert "longest it has seen" in found["transformers 5"].words
    unscaled = torch.tensor(reference.base(D, B))
    at_window = torch.tensor(reference.dynamic_ntk(D, B, L, WINDOW, S))
    assert f"{float((unscaled / at_window).max()):.2g} times" in found["vLLM 0.33"].words


def test_other_families_are_left_to_those_who_were_read():
    found = verdicts("ntk", family="qwen2")
    assert of_kind(found, "cannot") == {"llama.cpp", "ollama"}
    assert "not examined for 'qwen2'" in found["ollama"].words


@pytest.mark.parametrize("reader", ["transformers 5", "transformers 4.57", "vLLM 0.33", "SGLang 0.5", "llama.cpp"])
def test_formulas_against_the_references(reader):
    """YaRN's authors' code and Meta's rule, in every engine that has them."""
    stated = {"rope_type": "yarn", "rope_theta": B, "factor": S, "original_max_position_embeddings": L}
    reading = READERS[reader](Stated(stated, WINDOW, D), WINDOW)
    torch.testing.assert_close(reading.inv_freq, torch.tensor(reference.yarn(D, B, L, S)).double(), rtol=1e-6, atol=0)
    assert math.isclose(reading.attention_scale, reference.yarn_scale(S))
    stated |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    reading = READERS[reader](Stated(stated, WINDOW, D), WINDOW)
    torch.testing.assert_close(reading.inv_freq, torch.tensor(reference.llama3(D, B, L, S)).double(), rtol=1e-6, atol=0)


def test_attention_scales_engine_by_engine():
    """attention_factor for transformers and vLLM, the pair of mscales for SGLang, neither for llama.cpp."""
    stated = {"rope_type": "yarn", "rope_theta": B, "factor": S, "original_max_position_embeddings": L}
    default = reference.yarn_scale(S)
    for extra, wanted in (
        ({"attention_factor": 1.5}, (1.5, 1.5, default, default)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, (1.0, 1.0, 1.0, default)),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (*[(1 + 0.2 * math.log(S)) / default] * 3, default)),
        ({"mscale": 2.0}, (default,) * 4),
    ):
        for reader, scale in zip(("transformers 5", "vLLM 0.33", "SGLang 0.5", "llama.cpp"), wanted, strict=True):
            got = READERS[reader](Stated(stated | extra, WINDOW, D), WINDOW).attention_scale
            assert math.isclose(got, scale, rel_tol=1e-12), (reader, extra)


@pytest.mark.parametrize("scale", [0.9, 1.0, 1.1, 1.3, 2.0])
def test_one_scale_is_said_so_that_all_who_look_find_it(scale):
    found = verdicts(f"yarn:attention_scale={scale}")
    assert of_kind(found, "exact") == {*TRANSFORMERS, "vLLM 0.33", "SGLang 0.5"}


def test_a_missing_key_is_a_refusal():
    plan = PositionPlan(inv_freq=ROPE.inv_freq)
    found = judge({"rope_type": "linear", "rope_theta": B}, window=WINDOW, geometry=ROPE, plans={WINDOW: plan})
    assert {v.kind for v in found} == {"cannot"}
    assert {v.words.removesuffix("; use --gguf") for v in found} == {"needs factor"}
