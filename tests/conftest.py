"""What several folders of tests share: a tiny random LLaMA whose positions matter."""

import hypothesis
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rope_ext.registry import known_methods
from tests import reference

# The same examples on every machine, and no deadline: two loaded cores are slow, not wrong.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

WINDOW = 64

# Every method with its defaults, but longrope with lists that fit random_llama at factor 4. The first group follows
# the current length; tests/hf/test_lengths.py is about it.
LENGTH_DEPENDENT = ("dynamic-ntk", "dynamic-yarn", reference.spell_factors(16, 4.0))
STATIC = tuple(sorted(set(known_methods()) - {spelled.split(":")[0] for spelled in LENGTH_DEPENDENT}))
# Those that a configuration of stock code, or a GGUF, can ask for
IN_STOCK = tuple(name for name in STATIC if name != "alibi")


def random_llama(**changes):
    """Return a seeded GQA LLaMA of two layers; weights are large, so that a wrong position changes the logits."""
    settings = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.3,
        **changes,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture
def llama():
    return random_llama()


@pytest.fixture
def ids():
    return torch.randint(0, 96, (2, 3 * WINDOW), generator=torch.Generator().manual_seed(1))
