"""The plain LLaMA block: parts by their formulas, the whole against transformers, and the trap of the two layouts."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from rope_ext import GeometryError, ModelError, extend, load_model
from rope_ext.geometry import base_inv_freq
from rope_ext.layout import guess_layout, to_halves, to_neighbours
from rope_ext.llama import FeedForward, Llama, LlamaShape, RMSNorm, rotate, turns
from rope_ext.meta import ffn_width
from rope_ext.registry import parse_method
from tests.conftest import IN_STOCK, logits_of, random_llama
from tests.hf.meta_files import meta_weights, neighbours

# Both sides are fp32 and add in other orders; logits of order 10, the differences seen are below 7e-5.
TOLERANCE = 2e-4
HEADS = {"GQA": {}, "MHA": {"num_key_value_heads": 4}, "one KV head": {"num_key_value_heads": 1}}


def shape_of(model):
    config = model.config
    return LlamaShape(
        width=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn_width=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
    )


def plain(model, *, inv_freq=None, attention_scale=1.0, permute=True):
    """Return the plain block with a model's weights."""
    inv_freq = model.model.rotary_emb.inv_freq if inv_freq is None else inv_freq
    block = Llama(shape_of(model), inv_freq=inv_freq, attention_scale=attention_scale)
    block.load_state_dict(meta_weights(model, permute=permute))
    return block.eval().requires_grad_(requires_grad=False)


def worst(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_equals_transformers(ids, heads):
    model = random_llama(**HEADS[heads])
    expected = logits_of(model, ids)
    assert expected.abs().max() > 5
    assert worst(plain(model)(ids), expected) <= TOLERANCE


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("chunks", [(1,) * 24, (10, 1, 13), (24,)])
def test_cached_decoding_equals_transformers(ids, heads, chunks):
    model = random_llama(**HEADS[heads])
    ids = ids[:, :24]
    block, cache = plain(model), []
    parts = [block(part, cache) for part in ids.split(list(chunks), dim=1)]
    assert worst(torch.cat(parts, dim=1), logits_of(model, ids)) <= TOLERANCE
    assert [tuple(tensor.shape) for tensor in cache[0]] == [(2, 24, model.config.num_key_value_heads, 16)] * 2
    assert len(cache) == 2


def test_without_the_permutation_the_model_is_ruined(llama, ids):
    """The trap is real: the same weights load, and the logits are those of another model."""
    expected, ruined = logits_of(llama, ids), plain(llama, permute=False)(ids)
    assert worst(ruined, expected) > 1
    assert (ruined.argmax(-1) != expected.argmax(-1)).float().mean() > 0.3
    assert worst(ruined[:, 0], expected[:, 0]) <= TOLERANCE, "the first token is turned by nothing"


@pytest.mark.parametrize("spelled", [*IN_STOCK, "yarn:attention_scale=1.2"])
def test_a_stretched_model_equals_the_block_with_its_frequencies(llama, ids, spelled):
    with extend(llama, parse_method(spelled), factor=4) as patch:
        expected = logits_of(llama, ids)
    plan = patch.plan
    block = plain(llama, inv_freq=plan.inv_freq, attention_scale=plan.attention_scale)
    assert worst(block(ids), expected) <= TOLERANCE


def test_the_bundled_model_equals_the_block():
    model, _ = load_model("tiny", device="cpu")
    ids = torch.randint(0, 1024, (1, 200), generator=torch.Generator().manual_seed(3))
    assert worst(plain(model)(ids), logits_of(model, ids)) <= TOLERANCE


def test_a_cast_leaves_the_frequencies_alone(llama):
    block = plain(llama)
    before = block.inv_freq.clone()
    block.to(torch.bfloat16)
    assert block.inv_freq.dtype == torch.float32
    assert torch.equal(block.inv_freq, before)
    assert block(torch.tensor([[1, 2, 3]])).dtype == torch.bfloat16


def test_rmsnorm_is_its_formula():
    norm = RMSNorm(5, 0.5)
    norm.weight.data = torch.tensor([1.0, 2.0, -1.0, 0.0, 3.0])
    x = torch.tensor([[3.0, -1.0, 0.5, 2.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for row, out in zip(x.tolist(), norm(x).tolist(), strict=True):
        root = math.sqrt(sum(v * v for v in row) / 5 + 0.5)
        assert out == pytest.approx([v / root * w for v, w in zip(row, norm.weight.tolist(), strict=True)], rel=1e-6)


def test_swiglu_is_its_formula():
    shape = LlamaShape(width=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, ffn_width=1, vocab_size=1)
    layer = FeedForward(shape)
    for linear, value in ((layer.w1, 2.0), (layer.w2, 5.0), (layer.w3, -3.0)):
        linear.weight.data.fill_(value)
    gate, x = 2.0 * 0.7, 0.7
    assert layer(torch.tensor([[[x]]])).item() == pytest.approx(5 * gate / (1 + math.exp(-gate)) * -3 * x, rel=1e-6)


@hypothesis.given(seed=st.integers(0, 2**31), position=st.integers(0, 100_000), scale=st.floats(0.5, 2))
def test_rotation_scales_every_pair_and_turns_it_by_its_angle(seed, position, scale):
    x = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(seed))
    inv_freq = base_inv_freq(8, 1e4)
    turned = rotate(x, turns(torch.tensor([position]), inv_freq, scale))
    pairs, before = turned.unflatten(-1, (4, 2)), x.unflatten(-1, (4, 2))
    torch.testing.assert_close(pairs.norm(dim=-1), scale * before.norm(dim=-1), rtol=1e-5, atol=1e-6)
    angles = (torch.tensor(float(position)) * inv_freq).tolist()  # the fp32 angle, as every implementation takes it
    for i, angle in enumerate(angles):
        a, b = before[0, 0, :, i].double().unbind(-1)
        expected = torch.stack((a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)))
        torch.testing.assert_close(pairs[0, 0, :, i].T.double(), scale * expected, rtol=0, atol=1e-5)


@hypothesis.given(seed=st.integers(0, 2**31), offset=st.integers(0, 60), start=st.integers(0, 1000))
def test_only_the_offset_matters(seed, offset, start):
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(seed)).unbind(0)
    inv_freq = base_inv_freq(8, 1e4)

    def score(m, n):
        at = [rotate(x, turns(torch.tensor([p]), inv_freq)) for x, p in ((q, m), (k, n))]
        return (at[0] * at[1]).sum().item()

    # angles near 1000 rad are known to 6e-5 in fp32, and the scores are sums of 8 products of order 1
    assert score(start + offset, start) == pytest.approx(score(offset, 0), abs=2e-3)


def test_a_later_token_changes_nothing_before_it(llama, ids):
    block = plain(llama)
    changed = ids.clone()
    changed[:, 50] = (changed[:, 50] + 1) % 96
    one, other = block(ids), block(changed)
    assert torch.equal(one[:, :50], other[:, :50])
    assert worst(one[:, 50:], other[:, 50:]) > 0.1


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "width"),
    [
        (4096, 256, None, 11008),  # LLaMA and Llama 2, 7B
        (5120, 256, None, 13824),  # 13B
        (8192, 256, None, 22016),  # LLaMA 65B
        (8192, 4096, 1.3, 28672),  # Llama 2 and 3, 70B
        (4096, 1024, 1.3, 14336),  # Llama 3, 8B
        (2048, 256, 1.5, 8192),  # Llama 3.2, 1B
        (16384, 4096, 1.2, 53248),  # Llama 3.1, 405B
    ],
)
def test_feed_forward_widths_of_published_models(dim, multiple_of, multiplier, width):
    assert ffn_width(dim, multiple_of, multiplier) == width


def test_permutations_are_the_drawn_ones_and_undo_each_other():
    rows = torch.arange(12.0)[:, None]
    assert to_halves(rows, 6).flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert to_neighbours(rows, 6).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    weight = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(to_neighbours(to_halves(weight, 8), 8), weight)
    assert torch.equal(to_neighbours(weight, 8), neighbours(weight, 8))


def projections(model, move=lambda weight, _head_dim: weight):
    dim = model.config.head_dim
    return [
        (move(layer.self_attn.q_proj.weight.detach(), dim), move(layer.self_attn.k_proj.weight.detach(), dim))
        for layer in model.model.layers
    ]


def test_the_layout_of_a_trained_model_is_told_either_way():
    model, _ = load_model("tiny", device="cpu")
    stored, moved = guess_layout(projections(model), 32), guess_layout(projections(model, to_neighbours), 32)
    assert stored.layout == "halves"
    assert moved.layout == "neighbours"
    assert moved.neighbours == pytest.approx(stored.halves), "the same rows are partners"
    assert min(stored.halves, moved.neighbours) > 4
    assert stored.halves > 1.3 * stored.neighbours
    assert moved.neighbours > 1.3 * moved.halves


@pytest.mark.parametrize("seed", range(20))
def test_random_weights_do_not_tell(seed):
    generator = torch.Generator().manual_seed(seed)
    layers = [(torch.randn(64, 64, generator=generator), torch.randn(32, 64, generator=generator)) for _ in range(2)]
    guess = guess_layout(layers, 16)
    assert guess.layout is None
    assert guess.halves == pytest.approx(1, abs=0.6)  # the mean of 128 squared normals: five of its deviations
    assert guess.neighbours == pytest.approx(1, abs=0.6)


def test_broken_weights_do_not_tell():
    assert guess_layout([(torch.zeros(8, 4), torch.zeros(8, 4))], 8).layout is None
    assert guess_layout([(torch.full((8, 4), math.nan), torch.zeros(8, 4))], 8).layout is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_halves(torch.zeros(10, 4), 8), "shape .10, 4. is not made of heads of 8 rows"),
        (lambda: to_neighbours(torch.zeros(9, 4), 3), "head_dim must be even"),
        (lambda: guess_layout([], 8), "no layers came"),
    ],
)
def test_weights_that_are_no_heads(call, message):
    with pytest.raises(ModelError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: 0 is no size"),
        ({"head_dim": 3}, "head_dim: 3 cannot be rotated in pairs"),
        ({"num_kv_heads": 3}, "4 query heads cannot share 3 key heads"),
    ],
)
def test_impossible_shapes(change, message):
    good = {"width": 8, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "ffn_width": 8}
    with pytest.raises(GeometryError, match=message):
        LlamaShape(**{**good, "vocab_size": 5, **change})


def test_frequencies_that_do_not_fit(llama):
    with pytest.raises(GeometryError, match="5 frequencies do not fit head_dim 16; it must have 8"):
        Llama(shape_of(llama), inv_freq=torch.ones(5))


def test_the_lab_of_positions_shows_what_it_says():
    """What a rotation, a learned table and ALiBi know of distance; the figures that scripts/lab_rope.py prints."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "lab_rope.py"
    done = subprocess.run([sys.executable, str(path), "--json"], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    offsets = {"0", "1", "7", "63", "200"}
    for name in ("rope_pair", "rope_head", "table", "alibi"):
        assert set(found[name]) == offsets
    assert max(found["rope_pair"].values()) < 3e-6  # 512 fp32 angles of one pair
    assert max(found["rope_head"].values()) < 5e-5  # 16 pairs of them
    assert min(found["table"].values()) > 1e5 * max(found["rope_head"].values())
    assert found["table_past_its_length"] == "no entry past its length"
    assert max(found["alibi"].values()) < 2e-5
    assert found["alibi_off_the_formula"] < 2e-5
    assert max(found["exactness"].values()) < 2e-6


def test_the_figures_of_the_lab_on_the_block():
    """What scripts/lab_block.py prints: sizes that are known, and differences that are none."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "lab_block.py"
    found = runpy.run_path(str(path))["figures"]()
    assert found["norms"]["saved"] == 512
    assert 0.9985 < found["norms"]["correlation"] < 0.9999
    assert found["gqa"]["largest_difference"] == 0.0
    assert found["gqa"]["parameters"] == {8: 16_448, 4: 12_352, 2: 10_304, 1: 9_280}
    assert (found["swiglu"]["eight_thirds"], found["swiglu"]["rounded"]) == (10_922, 11_008)
    assert 1 < found["swiglu"]["three_matrices"] / found["swiglu"]["two_matrices"] < 1.01
    assert found["swish"]["2"] == pytest.approx(1.7616, abs=5e-5)
    assert found["swish"]["-2"] == pytest.approx(-0.2384, abs=5e-5)
    assert found["cache"] == {32: 4.0, 8: 1.0, 1: 0.125}
