import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rope_ext import GeometryError, RopeGeometry


@pytest.mark.parametrize(("head_dim", "theta"), [(16, 1e4), (64, 5e5), (128, 1e4), (96, 123456.7)])
def test_default_frequencies_are_bit_equal_to_transformers(head_dim, theta):
    config = LlamaConfig(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    rope = RopeGeometry(head_dim=head_dim, theta=theta, original_context=64)
    assert torch.equal(rope.inv_freq, LlamaRotaryEmbedding(config).inv_freq)


def test_wavelengths_and_rotations():
    rope = RopeGeometry(head_dim=4, theta=1e4, original_context=628)
    torch.testing.assert_close(rope.wavelengths, torch.tensor([2 * math.pi, 200 * math.pi]).double())
    torch.testing.assert_close(rope.rotations, 628 / rope.wavelengths)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 15}, "head_dim: 15"),
        ({"head_dim": 0}, "head_dim: 0"),
        ({"theta": 1.0}, "theta: 1.0"),
        ({"theta": math.nan}, "theta: nan"),
        ({"original_context": 0}, "original_context: 0"),
        ({"num_heads": 0}, "num_heads: 0"),
        ({"inv_freq": torch.ones(3)}, r"shape \(3,\) does not fit head_dim 16"),
    ],
)
def test_impossible_geometries_are_refused(changes, words):
    with pytest.raises(GeometryError, match=words):
        RopeGeometry(**({"head_dim": 16, "theta": 1e4, "original_context": 64} | changes))


def test_errors_are_the_right_builtin_too():
    with pytest.raises(ValueError, match="head_dim"):
        RopeGeometry(head_dim=3, theta=1e4, original_context=64)
