"""The families that share LLaMA's rotary site: identity, effect, undo, export, and what is refused with its reason."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rope_ext import Alibi, ExportError, ModelError, Unscaled, Yarn, extend, extend_from_record, load, save_extended
from rope_ext.hf import BUNDLED, config_of_base
from rope_ext.plan import label
from rope_ext.registry import parse_method
from rope_ext.stock import FAMILIES
from tests.conftest import LENGTH_DEPENDENT, STATIC, WINDOW, logits_of, random_llama

SETTINGS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model, config, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(config(**{**SETTINGS, **changes})).eval()


MODELS = {
    "llama": random_llama,
    "mistral": lambda **changes: build(MistralForCausalLM, MistralConfig, **{"sliding_window": None, **changes}),
    "qwen2": lambda **changes: build(Qwen2ForCausalLM, Qwen2Config, **changes),
    "qwen3": lambda **changes: build(Qwen3ForCausalLM, Qwen3Config, **changes),
    "gemma": lambda **changes: build(GemmaForCausalLM, GemmaConfig, **changes),
    "phi3": lambda **changes: build(
        Phi3ForCausalLM, Phi3Config, **{"sliding_window": None, "original_max_position_embeddings": WINDOW, **changes}
    ),
}
family = pytest.mark.parametrize("kind", MODELS)


def test_every_family_is_here():
    assert set(MODELS) == set(FAMILIES)


@family
def test_identity_is_bit_equal(kind, ids):
    model = MODELS[kind]()
    assert type(model.model.rotary_emb).__name__ == FAMILIES[kind].rpartition(".")[2]
    before = logits_of(model, ids)
    with extend(model, Yarn(), factor=1):
        assert torch.equal(logits_of(model, ids), before)
    with extend(model, Unscaled(), factor=4):
        assert torch.equal(logits_of(model, ids), before)
    assert torch.equal(logits_of(model, ids), before)


@family
@pytest.mark.parametrize("spelled", [*STATIC, LENGTH_DEPENDENT[2]], ids=lambda s: label(parse_method(s)))
def test_takes_effect_and_reloads_with_the_same_logits(kind, ids, tmp_path, spelled):
    model = MODELS[kind]()
    before = logits_of(model, ids)
    if spelled == "alibi":
        with extend(model, Alibi(), factor=4):
            ours = logits_of(model, ids)
            tokenizer = AutoTokenizer.from_pretrained(BUNDLED["tiny"])
            path = save_extended(model, tmp_path / "out", tokenizer=tokenizer, format="rope-ext")
        assert (ours - before).abs().max() > 0.01
        assert torch.equal(logits_of(model, ids), before)
        read = AutoModelForCausalLM.from_pretrained(path, config=config_of_base(str(path))).eval()
        assert torch.equal(logits_of(read, ids), before)
        with extend_from_record(read, path):
            assert torch.equal(logits_of(read, ids), ours)
        assert torch.equal(logits_of(load(str(path), device="cpu")[0], ids), ours)
        return
    if kind == "phi3" and spelled in {"nope", "p-rope"}:
        # Phi-3's configuration knows longrope alone, which divides and cannot stop a pair.
        with extend(model, parse_method(spelled), factor=4):
            assert not torch.equal(logits_of(model, ids), before)
            with pytest.raises(ExportError, match=f"{spelled} has no stock form for 'phi3'"):
                save_extended(model, tmp_path / "out")
        return
    with extend(model, parse_method(spelled), factor=4):
        ours = logits_of(model, ids)
        assert (spelled == "unscaled") == torch.equal(ours, before)
        path = save_extended(model, tmp_path / "out")
    assert torch.equal(logits_of(model, ids), before)
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    assert type(stock.model.rotary_emb).__name__ == FAMILIES[kind].rpartition(".")[2]
    assert stock.config.max_position_embeddings == 4 * WINDOW
    # logits of order 10; stock code rounds the same formula in other places
    torch.testing.assert_close(logits_of(stock, ids), ours, rtol=0, atol=1e-3)


@family
@pytest.mark.parametrize("spelled", LENGTH_DEPENDENT, ids=lambda s: label(parse_method(s)))
def test_generate_follows_the_length(kind, ids, spelled):
    model = MODELS[kind]()
    prompt = ids[:1, : WINDOW - 3]
    with extend(model, parse_method(spelled), factor=4), torch.no_grad():
        wanted = prompt
        for _ in range(6):
            wanted = torch.cat((wanted, model(input_ids=wanted, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
        mask = torch.ones_like(prompt)
        written = model.generate(
            input_ids=prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert torch.equal(written, wanted)


@pytest.mark.parametrize("kind", ["mistral", "phi3"])
def test_a_sliding_window_shorter_than_the_target(kind, ids):
    model = MODELS[kind](sliding_window=100)
    before = logits_of(model, ids)
    with pytest.raises(ModelError, match="attention slides over 100 tokens, so a window of 128 has no effect"):
        extend(model, Yarn(), factor=2)
    assert torch.equal(logits_of(model, ids), before)
    with extend(model, Yarn(), context=100):
        pass


def test_qwens_own_switch_for_its_sliding_window():
    for use, words in ((True, "slides over 100 tokens"), (False, None)):
        model = MODELS["qwen2"](use_sliding_window=use, sliding_window=100, max_window_layers=1)
        if words:
            with pytest.raises(ModelError, match=words):
                extend(model, Yarn(), factor=2)
        else:
            extend(model, Yarn(), factor=2).undo()


def test_partial_rotary():
    model = MODELS["phi3"](partial_rotary_factor=0.5)
    with pytest.raises(ModelError, match=r"only part of each head is rotated \(0.5\)"):
        extend(model, Yarn(), factor=2)


def test_phi3_with_its_own_longrope(ids):
    """As the long Phi-3 checkpoints come: the original window stands at the top of the configuration."""
    lists = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 4 + [3.0] * 4}
    model = MODELS["phi3"](
        max_position_embeddings=4 * WINDOW,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "partial_rotary_factor": 1.0,
            **lists,
        },
    )
    with pytest.raises(ModelError, match=r"already carries 'longrope' scaling, 64 to 256"):
        extend(model, Yarn(), context=512)
    before = logits_of(model, ids)
    again = ";".join(map(str, lists["long_factor"]))
    with extend(model, parse_method(f"longrope:long_factor={again}"), context=256, base="original") as patch:
        assert patch.geometry.original_context == WINDOW
        torch.testing.assert_close(logits_of(model, ids), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "config", "changes", "words"),
    [
        (Gemma2ForCausalLM, Gemma2Config, {}, "family 'gemma2' is not supported"),
        (Gemma3ForCausalLM, Gemma3TextConfig, {}, "'gemma3_text' has one rotary embedding per kind of layer"),
        (GPTNeoXForCausalLM, GPTNeoXConfig, {}, "family 'gpt_neox' is not supported"),
    ],
)
def test_other_families_are_refused(model, config, changes, words):
    with pytest.raises(ModelError, match=words):
        extend(build(model, config, **changes), Yarn(), factor=2)
