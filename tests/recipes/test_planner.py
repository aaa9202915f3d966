"""Plans: the published sizes, what a real model keeps and computes, and advice that is no worse than it says."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from recipes.planner import DEVICES, plan, read_device
from rope_ext.costs import decode_operations, kv_cache_bytes, logits_bytes, prefill_operations, shape_of
from tests.conftest import random_llama
from tests.recipes.test_cli import document, refused, rope_ext

GIB = 2**30


def llama3_8b(**changes):
    return LlamaConfig(
        **(
            {
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
            }
            | changes
        )
    )


@pytest.mark.parametrize(("heads", "size"), [(32, 4 * GIB), (8, GIB), (1, GIB // 8)])
def test_the_cache_of_llama_3_8b_at_8192_tokens(heads, size):
    assert kv_cache_bytes(num_layers=32, num_key_value_heads=heads, head_dim=128, tokens=8192) == size


def test_the_cache_at_32768_tokens():
    assert kv_cache_bytes(num_layers=32, num_key_value_heads=8, head_dim=128, tokens=32_768) == 4 * GIB


def test_the_parameters_are_those_of_the_model():
    assert shape_of(llama3_8b()).parameters == 8_030_261_248


def test_a_plan_is_made_of_these():
    found = plan("llama", llama3_8b(), context=8192, batch=2, device=DEVICES["h100"])
    shape = shape_of(llama3_8b())
    assert found.memory["keys and values of 2 x 8,192 tokens in bf16"] == 2 * GIB
    assert found.memory["weights"] == 2 * shape.parameters
    assert found.instead["logits of every token"] == logits_bytes(shape, 2 * 8192) == 2 * 8192 * 128256 * 4
    assert found.instead["keys and values with 4 key heads"] == GIB
    assert found.operations["prefill"] == 2 * prefill_operations(shape, 8192).total
    assert found.seconds["prefill"] == found.operations["prefill"] / 989e12
    read = found.memory["weights"] + 2 * GIB
    assert found.seconds["one token behind it"] == read / 3.35e12, "a token waits for memory"
    assert found.fits is True
    assert found.advice == ()
    assert list(found.memory.values()) == sorted(found.memory.values(), reverse=True)


def test_operations_of_a_token_are_those_that_torch_counts():
    model, cached = random_llama().eval(), 20
    shape = shape_of(model.config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        cache = model(torch.zeros(1, cached, dtype=torch.long), use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 1, dtype=torch.long), cache=cache, use_cache=True)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    found = decode_operations(shape, cached)
    assert counts["aten.mm"] == found.products
    assert counts["aten.bmm"] == found.attention


def test_a_training_step_costs_three_forwards_over_all_logits():
    model, tokens = random_llama().train(), 24
    model.set_attn_implementation("eager")
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    found = plan("llama", model.config, context=tokens, dtype="fp32", training=True)
    # torch counts the whole square of attention, here the causal half of it stands
    share = found.attention_share["one step"]
    square = found.operations["one step"] * (1 - share + share * 2 * tokens / (tokens + 1))
    # transformers puts logits to the last token too, whose successor is not known
    shape = shape_of(model.config)
    assert sum(counted.values()) == pytest.approx(square, rel=0.02)
    assert found.memory["AdamW's moments in fp32"] == 8 * shape.parameters


def test_what_does_not_fit_gets_advice_the_largest_saving_first():
    found = plan("llama", llama3_8b(), context=131_072, batch=8, device=DEVICES["h100"])
    assert found.fits is False
    assert "serve one sequence at a time" in found.advice[0]
    assert any("prefill 2,048 tokens at a time" in line for line in found.advice)
    training = plan("llama", llama3_8b(), context=32_768, device=DEVICES["a100"], training=True)
    assert training.advice[0].startswith("recompute all layers")
    enough = plan("llama", llama3_8b(), context=131_072, batch=3, device=DEVICES["h100"])
    assert any(line.endswith(", enough") for line in enough.advice)


def test_advice_says_no_more_than_following_it_saves():
    """Half the cache's numbers is what the plan under --cache-dtype fp8 has less."""
    asked = {"context": 131_072, "batch": 8, "device": DEVICES["h100"]}
    first, then = plan("llama", llama3_8b(), **asked), plan("llama", llama3_8b(), cache_dtype="fp8", **asked)
    line = next(line for line in first.advice if "--cache-dtype fp8" in line)
    assert first.total - then.total == 64 * GIB
    assert "64 GiB less" in line


def test_the_command(tmp_path):
    told = document("plan", "tiny", "--context", "2048", "--gpu", "h200", "--json")
    assert told["memory"]["keys and values of 1 x 2,048 tokens in bf16"] == 2 * 4 * 2 * 32 * 2048 * 2
    assert told["fits"] is True
    shown = rope_ext("plan", "tiny", "--context", "2048", "--train").stdout
    assert "activations, none recomputed" in shown
    (tmp_path / "mine.json").write_text(
        json.dumps({"name": "mine", "memory_gb": 0.001, "bandwidth_gb_s": 10, "tflops": {"bf16": 1}})
    )
    told = document("plan", "tiny", "--context", "2048", "--gpu", tmp_path / "mine.json", "--json")
    assert told["fits"] is False
    assert told["advice"]
    assert read_device(str(tmp_path / "mine.json")).bandwidth == 1e10


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--context", "0"], "at least 1"),
        (["--dtype", "int3"], "give one of fp32, bf16, fp8"),
        (["--cache-dtype", "int3"], "cache-dtype 'int3' is not known"),
        (["--gpu", "b9000"], "neither one of a100, h100, h200 nor a file"),
        (["--gpu", "a100", "--dtype", "fp8"], "a100 states no peak for fp8"),
        (["--train", "--dtype", "fp8"], "not planned for training"),
    ],
)
def test_bad_input_is_one_line(words, told):
    context = [] if "--context" in words else ["--context", "2048"]
    assert told in refused("plan", "tiny", *context, *words)


def test_a_file_that_is_no_device(tmp_path):
    for text in (
        "{",
        "{}",
        '{"memory_gb": 0, "bandwidth_gb_s": 1, "tflops": {"bf16": 1}}',
        '{"memory_gb": 1, "tflops": 3}',
    ):
        (tmp_path / "bad.json").write_text(text)
        assert "is no device" in refused("plan", "tiny", "--context", "512", "--gpu", tmp_path / "bad.json")
