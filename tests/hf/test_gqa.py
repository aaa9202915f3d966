"""Key heads in groups: their means, nothing where nothing is grouped, everything where they were alike."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rope_ext import extend, load_model
from rope_ext.errors import ModelError
from rope_ext.gqa import group_key_heads, mean_of_heads
from rope_ext.hf import size_of_head
from rope_ext.registry import parse_method
from tests.conftest import random_llama
from tests.recipes.test_cli import document, refused, rope_ext

IDS = torch.arange(2, 50)[None]


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def llama(**changes):
    return random_llama(num_attention_heads=8, **({"num_key_value_heads": 4} | changes)).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_as_many_heads_as_there_are_is_the_same_model_to_the_last_bit(tied):
    model = llama(tie_word_embeddings=tied)
    before = logits(model)
    found = group_key_heads(model, 4)
    assert torch.equal(logits(found.model), before)
    assert found.cache_before == found.cache_after
    assert torch.equal(logits(model), before), "the model that came in stays as it was"


def test_heads_are_averaged_in_runs():
    model = llama()
    found = group_key_heads(model, 2)
    size = model.config.head_dim
    for old, new in zip(model.model.layers, found.model.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            heads = getattr(old.self_attn, name).weight.view(4, size, -1)
            want = torch.cat([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2])
            assert torch.allclose(getattr(new.self_attn, name).weight, want, atol=1e-7)
        assert torch.equal(old.self_attn.q_proj.weight, new.self_attn.q_proj.weight)
    assert found.model.config.num_key_value_heads == 2
    assert found.cache_after * 2 == found.cache_before


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_heads_that_were_alike_lose_nothing(family):
    """A model whose neighbouring key heads are copies says the same with one of each."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "initializer_range": 0.2}
    torch.manual_seed(0)
    made = {
        "llama": lambda: llama(num_key_value_heads=8),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)).eval(),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8)).eval(),
    }
    model = made[family]()
    size = size_of_head(model.config)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("k_proj", "v_proj"):
                projection = getattr(layer.self_attn, name)
                for tensor in (projection.weight, projection.bias):
                    if tensor is not None:
                        heads = tensor.uniform_(-0.3, 0.3).view(4, 2, size, *tensor.shape[1:])
                        heads[:, 1] = heads[:, 0]
    found = group_key_heads(model, 4).model
    assert torch.allclose(logits(found), logits(model), atol=2e-5)


def test_halves_are_averaged_in_fp32():
    weight = torch.tensor([[1.0], [1.0078125], [3.0], [3.015625]], dtype=torch.bfloat16)
    got = mean_of_heads(weight, num_heads=4, num_groups=2)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.float(), torch.tensor([[1.00390625], [3.0078125]]).bfloat16().float())


def test_a_grouped_model_stretches_and_its_checkpoint_is_stock(tmp_path):
    told = document("gqa", "tiny", "--kv-heads", "1", "--out", tmp_path / "mqa", "--json")
    assert told["num_key_value_heads"] == {"before": 2, "after": 1}
    assert told["cache_bytes_per_token"]["before"] == 2 * told["cache_bytes_per_token"]["after"]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "mqa").eval()
    ours, tokenizer = load_model(str(tmp_path / "mqa"))
    assert torch.equal(logits(stock), logits(ours))
    want = group_key_heads(load_model("tiny")[0], 1).model
    assert torch.allclose(logits(ours), logits(want), atol=2e-4)
    with extend(ours, parse_method("yarn"), context=1024), torch.no_grad():
        ours(tokenizer("def f(x):\n", return_tensors="pt").input_ids)
    assert stock.num_parameters() == told["parameters"]["after"]


def test_as_many_heads_as_before_are_told_as_that(tmp_path):
    said = rope_ext("gqa", "tiny", "--kv-heads", "2", "--out", tmp_path / "same").stdout
    assert "2 key heads as before, the same weights; a token of cache takes 1 KiB" in said
    assert "training" not in said


def test_what_cannot_be_grouped(tmp_path):
    with pytest.raises(ModelError, match="4 key heads cannot become 3; give one of 1, 2, 4"):
        group_key_heads(llama(), 3)
    assert "give one of 1, 2" in refused("gqa", "tiny", "--kv-heads", "0", "--out", tmp_path / "out")
    assert "not an empty directory" in refused("gqa", "tiny", "--kv-heads", "1", "--out", tmp_path.parent)
    assert not (tmp_path / "out").exists()
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    fused = Phi3ForCausalLM(Phi3Config(**sizes, vocab_size=96, pad_token_id=0))
    with pytest.raises(ModelError, match="no k_proj and v_proj of its own"):
        group_key_heads(fused, 2)


@pytest.mark.parametrize("name", ["yarn", "alibi", "dynamic-ntk"])
def test_a_patched_model_is_refused(name):
    with (
        extend(llama(), parse_method(name), factor=4) as patch,
        pytest.raises(ModelError, match="the model is patched; undo the patch"),
    ):
        group_key_heads(patch.model, 2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by its older name
def test_families_and_wrappers_that_were_not_examined_are_refused():
    from transformers import Olmo2Config, Olmo2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ModelError, match="family 'olmo2' is not supported"):
        group_key_heads(Olmo2ForCausalLM(Olmo2Config(**sizes, vocab_size=96)), 1)
    wrapped = get_peft_model(llama(), LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(ModelError, match="merge it first"):
        group_key_heads(wrapped.base_model.model, 2)


@pytest.mark.parametrize("heads", [4, 2])
def test_the_new_model_has_weights_of_its_own(heads):
    model = llama(tie_word_embeddings=True)
    before = logits(model)
    found = group_key_heads(model, heads).model
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert found.generation_config is not model.generation_config
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1)
    assert torch.equal(logits(model), before)


def test_frequencies_that_follow_the_length_are_not_stuck():
    """transformers' dynamic rotation grows with what it has seen, and goes back by what it remembers."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = llama(rope_parameters=rope, max_position_embeddings=32)
    logits_of_20 = model(IDS[:, :20]).logits
    model(torch.arange(2, 90)[None].repeat(1, 2)[:, :100])
    found = group_key_heads(model, 4).model
    assert torch.equal(found(IDS[:, :20]).logits, logits_of_20)
    assert torch.equal(model(IDS[:, :20]).logits, logits_of_20)
    assert torch.equal(found(IDS).logits, model(IDS).logits)
