"""Plans: the published sizes, what a real model keeps and computes, and advice that is no worse than it says."""

import json
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
)

from recipes import planner, preflight
from recipes.devices import DEVICES, Device, read_device
from recipes.planner import plan
from recipes.tuning import Adapter, Train
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
    read = found.memory["weights"] - 2 * 128_256 * 4096 + 2 * GIB  # of the embedding a token reads one row
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
    assert found.advice[0].startswith("one sequence at a time, not 8")
    assert any("prefill 2,048 tokens at a time" in line for line in found.advice)
    training = plan("llama", llama3_8b(), context=32_768, device=DEVICES["a100"], training=True)
    assert training.advice[0].startswith("recompute all layers")
    enough = plan("llama", llama3_8b(), context=131_072, batch=3, device=DEVICES["h100"])
    assert any(line.endswith(", enough") for line in enough.advice)


def gib_in(line):
    return float(re.search(r"([\d.]+) GiB", line)[1])


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("halve the cache's numbers", {"cache_dtype": "fp8"}),
        ("one sequence at a time", {"batch": 1}),
        ("weights in fp8", {"dtype": "fp8", "cache_dtype": "bf16"}),
    ],
)
@pytest.mark.parametrize("context", [16_384, 65_536, 131_072])
def test_advice_says_what_a_plan_that_follows_it_says(words, changed, context):
    asked = {"context": context, "batch": 8, "device": DEVICES["h100"]}
    first, then = plan("llama", llama3_8b(), **asked), plan("llama", llama3_8b(), **(asked | changed))
    lines = [line for line in first.advice if line.startswith(words)]
    if first.fits:
        assert not lines
        return
    assert gib_in(lines[0]) == pytest.approx((first.total - then.total) / GIB, rel=1e-3)
    assert lines[0].endswith("enough") == then.fits


def test_key_heads_are_grouped_to_what_gqa_makes():
    """A number of key heads that divides the query heads and not the key heads cannot be averaged to."""
    config = llama3_8b(hidden_size=3072, num_attention_heads=24)
    found = plan("llama", config, context=131_072, batch=16, device=DEVICES["h100"])
    (line,) = (line for line in found.advice if "group key heads" in line)
    assert "8 to 4" in line
    assert "keys and values with 4 key heads" in found.instead
    half = plan("llama", llama3_8b(**config.to_dict() | {"num_key_value_heads": 4}), context=131_072, batch=16)
    assert gib_in(line) == pytest.approx((found.total - half.total) / GIB, rel=1e-3)
    fused = Phi3Config(num_hidden_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1024, pad_token_id=0)
    tight = Device(name="tight", memory=1e6, bandwidth=1e9, peak={"bf16": 1e12})
    assert not [line for line in plan("phi", fused, context=4096, device=tight).advice if "group" in line]


def test_an_adapter_trains_what_the_recipe_would():
    config = llama3_8b(num_hidden_layers=2, hidden_size=256, intermediate_size=512, head_dim=32, vocab_size=5000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    wanted = preflight._num_trained(model, Train(adapter=Adapter()), 0)
    assert planner._adapter_parameters(shape_of(config))[0] == wanted
    tied = llama3_8b(tie_word_embeddings=True, vocab_size=256_000, hidden_size=2048, num_hidden_layers=18, head_dim=64)
    small = Device(name="small", memory=24e9, bandwidth=1e12, peak={"bf16": 1e14})
    found = plan("gemma-like", tied, context=2048, device=small, training=True)
    (line,) = (line for line in found.advice if line.startswith("train an adapter"))
    states = sum(size for name, size in found.memory.items() if "fp32" in name)
    assert gib_in(line) * GIB < states * 0.75, "the embedding is trained whole"


def test_the_fewest_changes_that_are_enough_together_or_a_plain_no():
    def on(gigabytes, **more):
        device = Device(name="own", memory=gigabytes * GIB, bandwidth=1e12, peak={"bf16": 1e14, "fp8": 1e14})
        asked = {"context": 131_072, "device": device} | more
        return plan("llama", llama3_8b(), **asked)

    found = on(25)
    assert not any(line.endswith("enough") for line in found.advice)
    *_, last = found.advice
    assert last.startswith("enough together, 23.15 GiB")
    assert last.count(";") == 1, "two of them"
    assert "fp8" in last, "fewer bits need no training, fewer heads do"
    assert on(1).advice[-1].startswith("nothing here is enough (11.55 GiB")
    training = on(80, training=True, context=32_768).advice[-1]
    assert training.startswith("enough together")
    assert "recompute all layers" in training
    assert "shard weights" in training
    assert "adapter" not in training, "an adapter is not sharded"
    device = Device(name="none", memory=1e6, bandwidth=1e12, peak={"fp8": 1e14})
    tiny = llama3_8b(num_key_value_heads=1, num_attention_heads=1, head_dim=64)
    (line,) = plan("llama", tiny, context=1000, dtype="fp8", device=device).advice
    assert line.startswith("nothing here is enough")


def test_a_window_bounds_the_cache_and_the_pairs():
    config = MistralConfig(**random_llama().config.to_dict() | {"sliding_window": 16, "model_type": "mistral"})
    model, tokens = MistralForCausalLM(config).eval(), 40
    model.set_attn_implementation("eager")
    with torch.no_grad():
        kept = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True).past_key_values.layers
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept)
    found = plan("mistral", config, context=tokens, dtype="fp32")
    # transformers leaves out the oldest token, which only the last query saw
    assert found.memory["keys and values of 1 x 40 tokens in fp32"] * 15 / 16 == size
    seen = torch.ones(tokens, tokens).tril().triu(-15).sum()
    assert prefill_operations(shape_of(config), tokens).attention == 4 * 2 * 4 * 16 * float(seen)
    assert decode_operations(shape_of(config), tokens).attention == 4 * 2 * 4 * 16 * 16


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
        (["--train", "--cache-dtype", "bf16"], "training keeps no cache"),
        (["--context", "1" + 60 * "0"], "at most 2^40"),
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
        '{"memory_gb": 1, "bandwidth_gb_s": 1, "tflops": {"bf16": true}}',
        '{"memory_gb": 1, "bandwidth_gb_s": 1, "tflops": {"tf32": 1}}',
    ):
        (tmp_path / "bad.json").write_text(text)
        assert "is no device" in refused("plan", "tiny", "--context", "512", "--gpu", tmp_path / "bad.json")


@pytest.mark.parametrize("kind", ["mixtral", "bert", "t5", "gpt2", "mamba", "falcon", "gemma3"])
def test_families_whose_costs_are_others_are_refused(kind, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    assert f"{kind!r} is of no family that is counted here" in refused("plan", tmp_path, "--context", "512")


def test_heads_that_contradict_each_other_are_refused(tmp_path):
    llama3_8b(num_key_value_heads=5).save_pretrained(tmp_path)
    assert "32 heads cannot share 5 key heads" in refused("plan", tmp_path, "--context", "512")


def test_half_precision_under_its_other_name(tmp_path):
    (tmp_path / "v100.json").write_text('{"memory_gb": 32, "bandwidth_gb_s": 900, "tflops": {"fp16": 125}}')
    told = document("plan", "tiny", "--context", "512", "--dtype", "fp16", "--gpu", tmp_path / "v100.json", "--json")
    assert told["fits"]
    assert told["dtype"] == "bf16"
