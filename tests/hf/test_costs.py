"""Costs of a context, against what torch counts and what transformers keeps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rope_ext.costs import kv_cache_bytes, prefill_operations, shape_of
from tests.conftest import random_llama

TOKENS = 24


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied):
    model = random_llama(tie_word_embeddings=tied).eval()
    shape = shape_of(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, TOKENS, dtype=torch.long), logits_to_keep=1)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    found = prefill_operations(shape, TOKENS)
    assert counts["aten.mm"] == found.products
    # The whole square of queries and keys, of which ours is the causal half: n (n + 1) / 2 of n^2 pairs
    assert counts["aten.bmm"] == found.attention * 2 * TOKENS / (TOKENS + 1)


def test_the_cache_is_as_large_as_transformers_keeps_it():
    model = random_llama().eval()
    shape = shape_of(model.config)
    with torch.no_grad():
        kept = model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=True).past_key_values.layers
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept)
    sizes = {"num_layers": shape.num_layers, "head_dim": shape.head_dim, "tokens": TOKENS, "bytes_per_number": 4}
    assert kv_cache_bytes(num_key_value_heads=shape.num_key_value_heads, **sizes) == size


def test_key_heads_divide_the_query_heads():
    config = random_llama(num_attention_heads=8, num_key_value_heads=2).config
    assert shape_of(config).key_value_heads() == [8, 4, 2, 1]


def test_a_live_model_keeps_its_attention():
    """transformers writes the attention that is asked for into the configuration that it is given."""
    model = random_llama()
    before = model.config.to_dict(), model.config._attn_implementation
    shape_of(model.config)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert before[1] == "sdpa"
