"""ALiBi on a live model, against the whole bias written out and against an independent float64 one."""

import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)
from transformers.masking_utils import find_packed_sequence_indices

import rope_ext
from rope_ext import Alibi, Yarn, alibi_paths, attention, extend, save_extended
from rope_ext.alibi_paths import BLOCK, PATH, Rows
from rope_ext.attention import Bias, alibi_attention
from rope_ext.errors import ExportError, MethodError, ModelError, PatchError
from rope_ext.hf import BUNDLED
from rope_ext.methods.alibi import geometric_slopes
from rope_ext.registry import parse_method
from tests import reference
from tests.conftest import WINDOW, logits_of, random_llama

LONG = 3 * WINDOW
ROOT = Path(__file__).resolve().parents[2]
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED["tiny"])


@pytest.fixture
def alibi(llama):
    with extend(llama, Alibi(), context=LONG):
        yield llama


def drawn(heads, kv_heads, queries, keys, size=16, batch=1, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, queries, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, size))
    return [scale * torch.randn(shape, generator=generator) for shape in shapes]


def rows_of(q, k, v, slopes, *, mask=None, positions=None):
    even = positions is None
    positions = torch.arange(k.shape[2])[None] if positions is None else positions
    scale, first = q.shape[-1] ** -0.5, k.shape[2] - q.shape[2]
    return Rows(q, k, v, mask, positions, torch.tensor(slopes), scale, first, is_even=even)


def in_float64(q, k, v, slopes, positions=None):
    """Return the paper's attention, every head and row by itself."""
    batch, heads, queries, _ = q.shape
    groups, keys = heads // k.shape[1], k.shape[2]
    out = np.zeros(q.shape)
    for b in range(batch):
        own = list(range(keys)) if positions is None else positions[b]
        for h in range(heads):
            out[b, h] = reference.alibi_attention(
                q[b, h], k[b, h // groups], v[b, h // groups], slopes[h], own, keys - queries
            )
    return torch.from_numpy(out)


# --- slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 64, 71])
def test_slopes_are_those_of_the_authors_code_for_every_head_count(heads):
    assert geometric_slopes(heads) == pytest.approx(reference.alibi_slopes(heads), rel=1e-12)


def test_slopes_of_12_heads_in_figures():
    first = [2.0**-k for k in range(1, 9)]
    between = [0.7071067811865476, 0.3535533905932738, 0.1767766952966369, 0.08838834764831845]
    assert geometric_slopes(12) == pytest.approx([*first, *between], rel=1e-12)


@pytest.mark.parametrize("slopes", ["0.5;0.25;0.1;0.3", (0.5, 0.25, 0.1, 0.3), [0.5, 0.25, 0.1, 0.3]])
def test_slopes_can_be_given_as_text_or_numbers(llama, slopes):
    method = rope_ext.method("alibi", slopes=slopes)
    assert method == Alibi(slopes=(0.5, 0.25, 0.1, 0.3))
    with extend(llama, method, context=LONG) as patch:
        assert patch.plan.alibi_slopes.tolist() == torch.tensor([0.5, 0.25, 0.1, 0.3]).tolist()


@pytest.mark.parametrize("slopes", ["steep", "0.5;x", "", (), (0.5, -1.0), (0.5, float("inf")), (0.0,)])
def test_slopes_that_are_none_are_refused_by_name(slopes):
    with pytest.raises(MethodError, match="slopes"):
        Alibi(slopes=slopes)


def test_slopes_for_another_number_of_heads_are_refused(llama):
    with pytest.raises(MethodError, match="3 slopes for 4 attention heads"):
        extend(llama, Alibi(slopes=(0.5, 0.25, 0.1)), context=LONG)


# --- the function


@pytest.fixture
def plain_flex(monkeypatch):
    """Compiling it takes a minute here; the plain form reads the same score_mod."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(alibi_paths, "_flex_attention", lambda: flex_attention)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 8), (8, 1), (12, 4), (40, 8)], ids=str)
@pytest.mark.parametrize("path", ["folded", "dense", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("plain_flex")
def test_every_path_gives_the_papers_attention(path, heads, kv_heads):
    queries = BLOCK + 60 if (heads, kv_heads) == (6, 2) else 70
    q, k, v = drawn(heads, kv_heads, queries, queries)
    slopes = geometric_slopes(heads)
    got = alibi_paths.PATHS[path](rows_of(q, k, v, slopes))
    assert (got.double() - in_float64(q, k, v, slopes)).abs().max() < 3e-6


@pytest.mark.parametrize("path", ["folded", "dense", "flex"])
@pytest.mark.parametrize("queries", [1, 7, 33])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("plain_flex")
def test_the_last_query_sees_the_last_key_behind_a_cache(path, queries):
    q, k, v = drawn(6, 3, queries, 90)
    slopes = geometric_slopes(6)
    got = alibi_paths.PATHS[path](rows_of(q, k, v, slopes))
    assert (got.double() - in_float64(q, k, v, slopes)).abs().max() < 2e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own compiler
def test_flex_compiles_on_a_cpu():
    q, k, v = drawn(4, 2, 40, 90)
    slopes = geometric_slopes(4)
    assert (alibi_paths.flex(rows_of(q, k, v, slopes)).double() - in_float64(q, k, v, slopes)).abs().max() < 3e-6


def test_16k_keys_are_as_exact_in_fp32_as_a_few():
    keys, queries = 16_384, 24
    q, k, v = drawn(8, 8, queries, keys, size=32)
    slopes = geometric_slopes(8)
    wanted = in_float64(q, k, v, slopes)
    folded = (alibi_paths.folded(rows_of(q, k, v, slopes)).double() - wanted).abs().max()
    assert folded < 3e-6
    # What the positions' common origin is for: counted from 0 the same is off by more than ten times that
    far = Rows(q, k, v, None, torch.arange(keys)[None], torch.tensor(slopes), 32**-0.5, keys - queries)
    terms = torch.arange(keys).float()[None, :, None]
    query = torch.cat((q, alibi_paths._query_terms(far).expand(1, -1, queries, -1)), dim=-1)
    naive = alibi_paths._trained_block(query, k, terms[:, None], F.pad(v, (0, 1)), None, far)[..., :32]
    assert (naive.double() - wanted).abs().max() > 10 * folded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("keys", [300, 16_384])
def test_half_precision_rounds_values_and_not_positions(dtype, heads, keys):
    q, k, v = (each.to(dtype) for each in drawn(heads, heads // 4, 8, keys, size=32))
    slopes = geometric_slopes(heads)
    wanted = in_float64(*(each.double() for each in (q, k, v)), slopes)
    error = (alibi_paths.folded(rows_of(q, k, v, slopes)).double() - wanted).abs().max()
    plain = F.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True).double()
    exact = F.scaled_dot_product_attention(*(each.double() for each in (q[:, :, -1:], k, v)), enable_gqa=True)
    ordinary = max(float((plain - exact).abs().max()), 2.0 * float(torch.finfo(dtype).eps))
    assert error < 6 * ordinary  # positions in this dtype would be off by whole units


def test_both_parts_of_a_slope_and_all_digits_of_a_distance_count_in_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (each.to(dtype) for each in drawn(12, 12, 4, 6, size=32))
        positions = torch.tensor([[0, 300, 70_000, 131_071, 131_100, 131_200]])
        rows = rows_of(q, k, v, geometric_slopes(12), positions=positions)
        queries = alibi_paths._query_terms(rows)[0, :, 0].double()
        keys = alibi_paths._key_terms(rows, 0, 4, 6)[0].double()
        distance = positions[0] - positions[0, 4]
        wanted = rows.slopes.double()[:, None] / rows.scale * distance
        assert ((queries @ keys.T - wanted).abs() <= wanted.abs() * 2**-15 + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("jump", [100_000, 130_000])
def test_positions_that_jump_inside_a_block_are_as_exact_as_others(dtype, jump):
    """Both ways: positions left out, as PoSE does, and a new document after a long one."""
    for second in (torch.arange(60) + jump, torch.arange(60)):
        first = torch.arange(70) + (jump if int(second[0]) == 0 else 0)
        positions = torch.cat((first, second))
        mask = torch.ones(130, 130, dtype=torch.bool).tril()
        if int(second[0]) == 0:
            mask[70:, :70] = False
        q, k, v = (each.to(dtype) for each in drawn(8, 8, 130, 130, size=32))
        rows = rows_of(q, k, v, geometric_slopes(8), mask=mask[None, None], positions=positions[None])
        exact = rows._replace(query=q.double(), key=k.double(), value=v.double(), slopes=rows.slopes.double())
        error = (alibi_paths.folded(rows).double() - alibi_paths.dense(exact)).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 0.05)


def test_a_slope_that_leaves_the_dtype_or_fp32_is_refused():
    q, k, v = (each.half() for each in drawn(2, 2, 4, 4, size=64))
    with pytest.raises(PatchError, match=r"a slope of 40 is too steep for torch.float16"):
        alibi_paths.folded(rows_of(q, k, v, (40.0, 1.0)))
    with pytest.raises(MethodError, match="leave the range of fp32"):
        extend(random_llama(), Alibi(slopes=(1e-50, 1.0, 1.0, 1.0)), context=LONG)


def test_scale_and_dropout_are_those_that_attention_is_called_with():
    module = torch.nn.Module()
    slopes = geometric_slopes(4)
    setattr(module, attention.HOLDER, Bias(torch.tensor(slopes), "sdpa"))
    q, k, v = drawn(4, 2, 20, 20)
    out, _ = alibi_attention(module, q, k, v, None, scaling=0.7)
    wanted = in_float64(q * 0.7 * q.shape[-1] ** 0.5, k, v, slopes)
    assert (out.transpose(1, 2).double() - wanted).abs().max() < 2e-6
    torch.manual_seed(0)
    dropped, _ = alibi_attention(module, q, k, v, None, scaling=0.7, dropout=0.5)
    assert (dropped - out).abs().max() > 0.1


class Sizes(TorchDispatchMode):
    """The largest tensor that is made inside it."""

    largest = 0

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return out


def test_autocast_does_not_round_positions():
    """Under autocast queries come in fp32, and attention itself would round them, positions and all."""
    module = torch.nn.Module()
    slopes = geometric_slopes(4)
    setattr(module, attention.HOLDER, Bias(torch.tensor(slopes), "sdpa"))
    q, k, v = drawn(4, 2, 8, 1500, size=32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = alibi_attention(module, q, k, v.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    assert (out.transpose(1, 2).double() - in_float64(q, k, v, slopes)).abs().max() < 0.03


def test_gradients_are_those_of_the_dense_form_however_many_blocks():
    for blocks in (1, alibi_paths.KEPT_BLOCKS + 1):
        q, k, v = (each.requires_grad_() for each in drawn(6, 2, BLOCK * blocks - 40, BLOCK * blocks - 40, size=8))
        slopes = geometric_slopes(6)
        weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
        (alibi_paths.folded(rows_of(q, k, v, slopes)) * weight).sum().backward()
        found = [each.grad for each in (q, k, v)]
        double = [each.detach().double().requires_grad_() for each in (q, k, v)]
        (alibi_paths.dense(rows_of(*double, slopes)) * weight).sum().backward()
        for mine, exact in zip(found, double, strict=True):
            assert (mine - exact.grad).abs().max() < 2e-5 * max(1.0, float(exact.grad.abs().max()))


def test_no_bias_of_all_queries_and_keys_is_ever_made():
    length, heads = 3 * BLOCK, 8
    rows = rows_of(*drawn(heads, 2, length, length, size=8), geometric_slopes(heads))
    with Sizes() as sizes:
        alibi_paths.folded(rows)
    assert sizes.largest <= max(BLOCK * length, heads * length * 9)  # rows of one block, or the inputs
    with Sizes() as sizes:
        alibi_paths.dense(rows)
    assert sizes.largest == heads * length * length


# --- on a model


def test_the_whole_model_agrees_with_the_dense_form(alibi, ids, monkeypatch):
    folded = logits_of(alibi, ids)
    monkeypatch.setenv(PATH, "dense")
    assert (folded - logits_of(alibi, ids)).abs().max() < 2e-4
    monkeypatch.delenv(PATH)
    alibi.set_attn_implementation("sdpa")  # and the bias matters
    assert (folded - logits_of(alibi, ids)).abs().max() > 0.1
    alibi.set_attn_implementation(attention.NAME)


def test_padding_on_either_side_and_rows_of_unequal_length_change_nothing(alibi, ids):
    row = ids[:1, :100]
    alone = logits_of(alibi, row)
    for left in (True, False):
        padded = torch.zeros(2, 150, dtype=torch.long)
        mask = torch.zeros(2, 150, dtype=torch.long)
        where = slice(50, 150) if left else slice(0, 100)
        padded[0, where], mask[0, where] = row[0], 1
        padded[1], mask[1] = ids[1, :150], 1
        with torch.no_grad():
            out = alibi(input_ids=padded, attention_mask=mask).logits
        assert (out[0, where] - alone[0]).abs().max() < 2e-4
        assert (out[1] - logits_of(alibi, ids[1:2, :150])[0]).abs().max() < 2e-4


@torch.no_grad()
def test_cached_decoding_gives_the_logits_of_the_whole_at_every_step(alibi, ids):
    whole = logits_of(alibi, ids[:, :80])
    cache = DynamicCache(config=alibi.config)
    out = alibi(input_ids=ids[:, :50], use_cache=True, **{CACHE: cache})
    assert (out.logits - whole[:, :50]).abs().max() < 2e-4
    for step in range(50, 80):
        out = alibi(input_ids=ids[:, step : step + 1], use_cache=True, **{CACHE: cache})
        assert (out.logits[:, 0] - whole[:, step]).abs().max() < 2e-4


@torch.no_grad()
@pytest.mark.parametrize("left", [True, False])
def test_rows_of_unequal_length_decode_from_a_cache_as_alone(alibi, ids, left):
    """Padding on the right leaves a gap in the cache, which counts as no distance."""
    short, long = ids[0, :30], ids[1, :50]
    tokens, mask = torch.zeros(2, 50, dtype=torch.long), torch.zeros(2, 50, dtype=torch.long)
    where = slice(20, 50) if left else slice(0, 30)
    tokens[0, where], mask[0, where], tokens[1], mask[1] = short, 1, long, 1
    cache = DynamicCache(config=alibi.config)
    alibi(input_ids=tokens, attention_mask=mask, use_cache=True, **{CACHE: cache})
    for step in range(10):
        new = torch.stack((ids[0, 30 + step], ids[1, 50 + step]))[:, None]
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)
        position = torch.tensor([[30 + step], [50 + step]])
        out = alibi(input_ids=new, attention_mask=mask, position_ids=position, use_cache=True, **{CACHE: cache}).logits
        for row, end in ((0, 31 + step), (1, 51 + step)):
            assert (out[row, 0] - logits_of(alibi, ids[row : row + 1, :end])[0, -1]).abs().max() < 2e-4


@torch.no_grad()
def test_a_cache_is_numbered_as_the_new_tokens_are(alibi, ids):
    """Without position_ids transformers numbers columns, padding and all; a cache has to end at the same logits."""
    tokens = ids[:1, :60]
    mask = torch.ones_like(tokens)
    mask[:, 20:30] = 0
    whole = alibi(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    cache = DynamicCache(config=alibi.config)
    alibi(input_ids=tokens[:, :40], attention_mask=mask[:, :40], use_cache=True, **{CACHE: cache})
    for end in (41, 60):
        start = cache.get_seq_length()
        more = {CACHE: cache, "use_cache": True}
        out = alibi(input_ids=tokens[:, start:end], attention_mask=mask[:, :end], **more).logits
        assert (out - whole[:, start:end]).abs().max() < 2e-4


def new_cache(model, kind):
    return (
        DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=100)
    )


caches = pytest.mark.parametrize("kind", ["dynamic", "static"])


@torch.no_grad()
@caches
def test_positions_left_out_behind_a_cache_are_refused(alibi, ids, kind):
    cache = new_cache(alibi, kind)
    alibi(input_ids=ids[:1, :20], use_cache=True, **{CACHE: cache})
    positions = torch.tensor([[50]])
    for _ in range(2):
        with pytest.raises(PatchError, match="a token at position 50 follows 20 cached ones"):
            alibi(
                input_ids=ids[:1, 20:21],
                position_ids=positions,
                use_cache=True,
                **{CACHE: new_cached(alibi, ids, kind)},
            )
        positions.fill_(20)  # the same tensor says something else
        alibi(input_ids=ids[:1, 20:21], position_ids=positions, use_cache=True, **{CACHE: new_cached(alibi, ids, kind)})
        positions.fill_(50)


def new_cached(alibi, ids, kind):
    cache = new_cache(alibi, kind)
    alibi(input_ids=ids[:1, :20], use_cache=True, **{CACHE: cache})
    return cache


@torch.no_grad()
@caches
def test_new_tokens_stand_where_position_ids_say_behind_a_cache_too(alibi, ids, kind):
    row = ids[:1, :40]
    positions = torch.cat((torch.arange(20), torch.arange(20) + 60))[None]
    mask = torch.ones_like(row)
    whole = alibi(input_ids=row, position_ids=positions, attention_mask=mask, use_cache=False).logits
    for start in (0, 10):  # all of it into an empty cache, and the jump inside the second piece
        cache = new_cache(alibi, kind)
        if start:
            alibi(input_ids=row[:, :start], use_cache=True, **{CACHE: cache})
        more = {"position_ids": positions[:, start:], "attention_mask": mask, CACHE: cache}
        out = alibi(input_ids=row[:, start:], use_cache=True, **more).logits
        assert (out - whole[:, start:]).abs().max() < 2e-4


@torch.no_grad()
@caches
def test_two_tokens_at_one_position_decode_as_each_alone(alibi, ids, kind):
    """A tree of candidates, each seeing the cache and its own parent, as speculative decoding asks."""
    cached, tree = ids[:1, :20], ids[:1, 20:24]
    positions = torch.tensor([[20, 20, 21, 21]])
    keys = 24 if kind == "dynamic" else 100
    mask = torch.zeros(1, 1, 4, keys, dtype=torch.bool)
    mask[..., :20] = True
    for row, seen in enumerate(((0,), (1,), (0, 2), (1, 3))):
        mask[0, 0, row, [20 + s for s in seen]] = True
    out = alibi(
        input_ids=tree,
        position_ids=positions,
        attention_mask=mask,
        use_cache=True,
        **{CACHE: new_cached(alibi, ids, kind)},
    ).logits
    for row, branch in enumerate(((0,), (1,), (0, 2), (1, 3))):
        alone = logits_of(alibi, torch.cat((cached, tree[:, list(branch)]), dim=1))[0, -1]
        assert (out[0, row] - alone).abs().max() < 2e-4


@torch.no_grad()
@caches
def test_gaps_count_as_the_new_tokens_are_numbered_in_every_cache(alibi, ids, kind):
    tokens = ids[:1, :40]
    mask = torch.ones_like(tokens)
    mask[:, 10:20] = 0
    whole = alibi(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    cache = new_cache(alibi, kind)
    for start, end in ((0, 30), (30, 35), (35, 40)):
        more = {"attention_mask": mask[:, :end], CACHE: cache}
        out = alibi(input_ids=tokens[:, start:end], use_cache=True, **more).logits
        keep = mask[0, start:end].bool()
        assert (out[0, keep] - whole[0, start:end][keep]).abs().max() < 2e-4


@torch.no_grad()
@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4, -65504.0])
def test_masks_of_numbers_block_whatever_they_are_filled_with_and_may_add_others(alibi, ids, fill, monkeypatch):
    row = ids[:1, :40]
    mask = torch.full((40, 40), fill).triu(1)[None, None]
    plain = logits_of(alibi, row)
    assert (alibi(input_ids=row, attention_mask=mask, use_cache=False).logits - plain).abs().max() < 2e-4
    soft = mask.clone()
    soft[..., 5:] += torch.where(soft[..., 5:] == 0, -3.0, 0.0)
    folded = alibi(input_ids=row, attention_mask=soft, use_cache=False).logits
    assert (folded - plain).abs().max() > 0.1
    monkeypatch.setenv(PATH, "dense")
    assert (folded - alibi(input_ids=row, attention_mask=soft, use_cache=False).logits).abs().max() < 2e-4


@torch.no_grad()
def test_masks_that_are_none_or_look_ahead_are_refused(alibi, ids):
    row = ids[:1, :20]
    with pytest.raises(PatchError, match=r"a mask of torch.int64 is neither"):
        alibi(input_ids=row, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.long), use_cache=False)
    with pytest.raises(PatchError, match="lets a query see keys that come after it"):
        alibi(input_ids=row, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool), use_cache=False)
    module = alibi.model.layers[0].self_attn
    with pytest.raises(PatchError, match="never whole in memory"):
        alibi_attention(module, *drawn(4, 2, 4, 4), None, output_attentions=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("plain_flex")
@torch.no_grad()
def test_masks_that_differ_by_head_reach_every_path(alibi, ids, monkeypatch):
    mask = torch.ones(1, 4, 40, 40, dtype=torch.bool).tril()
    mask[0, 1, :, 3:9] = torch.eye(40, dtype=torch.bool)[:, 3:9]
    found = []
    for path in ("folded", "dense", "flex"):
        monkeypatch.setenv(PATH, path)
        found.append(alibi(input_ids=ids[:1, :40], attention_mask=mask, use_cache=False).logits)
    assert (found[0] - found[1]).abs().max() < 2e-4
    assert (found[0] - found[2]).abs().max() < 2e-4


@torch.no_grad()
def test_a_sliding_window_of_the_length_of_the_context_generates_past_it():
    config = MistralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=48,
        sliding_window=96,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    prompt = torch.randint(0, 96, (1, 90), generator=torch.Generator().manual_seed(0))
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    with extend(model, Alibi(), context=96):
        cached, whole = (model.generate(prompt, use_cache=use, **asked) for use in (True, False))
    assert torch.equal(cached, whole)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_chunked_prefill_is_the_whole(alibi, ids, padded):
    whole = logits_of(alibi, ids)
    pad = 13 if padded else 0
    tokens = F.pad(ids, (pad, 0))
    mask = F.pad(torch.ones_like(ids), (pad, 0))
    cache = DynamicCache(config=alibi.config)
    parts = []
    for start in range(0, tokens.shape[1], 60):
        end = min(start + 60, tokens.shape[1])
        more = {"attention_mask": mask[:, :end]} if padded else {}
        parts.append(alibi(input_ids=tokens[:, start:end], use_cache=True, **{CACHE: cache}, **more).logits)
    assert (torch.cat(parts, dim=1)[:, pad:] - whole).abs().max() < 2e-4


@torch.no_grad()
def test_a_static_cache_with_room_to_spare_decodes_the_same(alibi, ids):
    whole = logits_of(alibi, ids[:, :40])
    cache = StaticCache(config=alibi.config, max_cache_len=100)
    out = alibi(input_ids=ids[:, :30], use_cache=True, **{CACHE: cache}).logits
    assert (out - whole[:, :30]).abs().max() < 2e-4
    for step in range(30, 40):
        out = alibi(input_ids=ids[:, step : step + 1], use_cache=True, **{CACHE: cache}).logits
        assert (out[:, 0] - whole[:, step]).abs().max() < 2e-4


def test_generate_is_the_argmax_of_whole_forwards_also_by_beams(alibi, ids):
    prompt = ids[:, :40]
    plain = alibi.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    told = prompt
    for _ in range(8):
        told = torch.cat((told, logits_of(alibi, told)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(plain, told)
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    cached, whole = (alibi.generate(prompt, use_cache=use, **asked) for use in (True, False))
    assert torch.equal(cached, whole)


@torch.no_grad()
def test_skipped_positions_count_as_distance_and_packed_documents_do_not_see_each_other(alibi, ids):
    row = ids[:1, :60]
    skipped = torch.cat((torch.arange(30), torch.arange(30) + 100))[None]
    mask = torch.ones_like(row)
    far = alibi(input_ids=row, position_ids=skipped, attention_mask=mask, use_cache=False).logits
    near = alibi(input_ids=row, attention_mask=mask, use_cache=False).logits
    assert (far[:, :30] - near[:, :30]).abs().max() < 1e-5
    assert (far[:, 30:] - near[:, 30:]).abs().max() > 0.05
    packed = torch.cat((torch.arange(25), torch.arange(35)))[None]
    assert find_packed_sequence_indices(packed) is not None
    together = alibi(input_ids=row, position_ids=packed, use_cache=False).logits
    assert (together[:, 25:] - logits_of(alibi, row[:, 25:])).abs().max() < 2e-4
    other = row.clone()
    other[:, :25] = (other[:, :25] + 1) % 96
    changed = alibi(input_ids=other, position_ids=packed, use_cache=False).logits
    assert torch.equal(changed[:, 25:], together[:, 25:])


def test_training_moves_the_weights_as_the_dense_form_does(ids, monkeypatch):
    found = []
    for path in ("folded", "dense"):
        monkeypatch.setenv(PATH, path)
        model = random_llama().train()
        extend(model, Alibi(), context=LONG)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-4 * max(1.0, float(other.abs().max()))


def test_undo_restores_the_model_bit_by_bit_however_patches_lie(llama, ids):
    before, implementation = logits_of(llama, ids), llama.config._attn_implementation
    outer = extend(llama, Alibi(), context=LONG)
    with_bias = logits_of(llama, ids)
    inner = extend(llama, Yarn(), context=LONG)  # lies over the bias and knows none
    assert llama.config._attn_implementation == implementation
    over = logits_of(llama, ids)
    inner.undo()
    assert torch.equal(logits_of(llama, ids), with_bias)
    outer.undo()
    assert torch.equal(logits_of(llama, ids), before)
    with extend(llama, Yarn(), context=LONG):
        assert torch.equal(logits_of(llama, ids), over)
        with pytest.raises(RuntimeError, match="on purpose"), extend(llama, Alibi(), context=LONG):
            raise RuntimeError("on purpose")
        assert torch.equal(logits_of(llama, ids), over)
    assert torch.equal(logits_of(llama, ids), before)
    assert llama.config._attn_implementation == implementation
    assert not any(attention.HOLDER in vars(module) for module in llama.modules())


def test_a_copy_of_the_model_is_undone_by_itself(llama, ids):
    import copy

    before = logits_of(llama, ids)
    patch = extend(llama, Alibi(), context=LONG)
    with_bias = logits_of(llama, ids)
    twin = copy.deepcopy(llama)
    twin.model.rotary_emb.patch.undo()
    assert torch.equal(logits_of(twin, ids), before)
    assert torch.equal(logits_of(llama, ids), with_bias)
    patch.undo()


def test_slopes_stay_exact_when_the_model_is_rounded(llama):
    with extend(llama, Alibi(slopes=(0.3, 0.1, 0.07, 0.01)), context=LONG):
        llama.to(torch.bfloat16)
        bias = attention.bias_in(llama.model)
        assert bias.on(torch.device("cpu")).dtype == torch.float32
        assert bias.slopes.tolist() == torch.tensor([0.3, 0.1, 0.07, 0.01]).tolist()


def test_attention_that_takes_no_bias_is_found_out(llama, monkeypatch):
    def unbiased(rows):
        return alibi_paths.folded(rows._replace(slopes=torch.zeros_like(rows.slopes)))

    monkeypatch.setattr(attention, "choose_path", lambda _rows: unbiased)
    with pytest.raises(PatchError, match="takes no bias"):
        extend(llama, Alibi(), context=LONG)
    assert not any(attention.HOLDER in vars(module) for module in llama.modules())


def test_an_attention_that_was_changed_afterwards_is_found_out_and_left_alone(llama):
    with extend(llama, Alibi(), context=LONG) as patch:
        llama.set_attn_implementation("sdpa")
        with pytest.raises(PatchError, match=r"attention was changed after alibi was put in \('sdpa'\)"):
            patch.verify()
        assert llama.config._attn_implementation == "sdpa"


def test_a_pickled_model_opens_in_another_process(alibi, ids, tmp_path):
    wanted = logits_of(alibi, ids)
    torch.save({"model": alibi, "ids": ids, "wanted": wanted}, tmp_path / "all.pt")
    code = (
        "import sys, torch\n"
        "found = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(found['model'](input_ids=found['ids']).logits, found['wanted'])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "all.pt")], check=True, cwd=ROOT)


def test_two_models_on_one_configuration_are_told_apart(llama, ids):
    other = LlamaForCausalLM(llama.config).eval()
    with extend(llama, Alibi(), context=LONG), pytest.raises(PatchError, match="which another model may share"):
        other(input_ids=ids)
    other(input_ids=ids)


# --- which path


def test_paths_are_chosen_by_device_and_packages(monkeypatch):
    q, k, v = drawn(2, 2, 4, 4)
    rows = rows_of(q, k, v, geometric_slopes(2))
    monkeypatch.delenv(PATH, raising=False)
    assert alibi_paths.choose_path(rows) is alibi_paths.folded
    monkeypatch.setenv(PATH, "dense")
    assert alibi_paths.choose_path(rows) is alibi_paths.dense
    monkeypatch.setenv(PATH, "fast")
    with pytest.raises(PatchError, match=r"is 'fast'; it names one of folded, flash, flex, dense"):
        alibi_paths.choose_path(rows)
    monkeypatch.setenv(PATH, "flash")
    with pytest.raises(PatchError, match="needs the package flash-attn, a CUDA device"):
        alibi_paths.choose_path(rows)


class OnGpu:
    """A stand-in for a tensor on a GPU, of which this machine has none: what `choose_path` asks of it."""

    is_cuda = True

    def __init__(self, dtype, size=16):
        self.dtype, self.shape = dtype, (1, 2, 4, size)


def test_flash_is_taken_on_a_gpu_in_half_precision_and_without_masks(monkeypatch):
    monkeypatch.delenv(PATH, raising=False)
    monkeypatch.setattr(alibi_paths, "flash_function", lambda: len)
    rows = rows_of(*drawn(2, 2, 4, 4), geometric_slopes(2))
    half = rows._replace(query=OnGpu(torch.bfloat16))
    assert alibi_paths.choose_path(half) is alibi_paths.flash
    assert alibi_paths.choose_path(half._replace(is_even=False)) is alibi_paths.folded
    assert alibi_paths.choose_path(half._replace(mask=torch.ones(1, 1, 4, 4).bool())) is alibi_paths.folded
    assert alibi_paths.choose_path(rows._replace(query=OnGpu(torch.float32))) is alibi_paths.folded
    assert alibi_paths.choose_path(rows._replace(query=OnGpu(torch.bfloat16, 512))) is alibi_paths.folded
    monkeypatch.setattr(alibi_paths, "flash_function", lambda: None)
    assert alibi_paths.choose_path(half) is alibi_paths.folded


@pytest.mark.parametrize(
    "package", [{}, {"flash_attn_func": lambda q, k, v, causal: None}], ids=["an empty folder", "without slopes"]
)
def test_packages_called_flash_attn_that_know_no_slopes_are_not_used(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(**package))
    assert alibi_paths.flash_function.__wrapped__() is None


def test_flash_is_given_slopes_scale_and_layout_as_its_documentation_has_them(monkeypatch):
    """Not run on a GPU: the package is stood in for by its documented formula."""

    def flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, alibi_slopes):
        assert causal
        assert dropout_p == 0.0
        assert alibi_slopes.dtype == torch.float32
        queries, keys = q.shape[1], k.shape[1]
        i, j = torch.arange(queries)[:, None], torch.arange(keys)
        bias = -alibi_slopes[:, None, None] * (i + keys - queries - j).abs()
        bias = bias.masked_fill(j > i + keys - queries, -torch.inf)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    assert alibi_paths.flash_function.__wrapped__() is flash_attn_func
    monkeypatch.setattr(alibi_paths, "flash_function", lambda: flash_attn_func)
    slopes = geometric_slopes(6)
    for queries in (20, 5):
        q, k, v = drawn(6, 2, queries, 20)
        rows = rows_of(q, k, v, slopes)
        assert (alibi_paths.flash(rows).double() - in_float64(q, k, v, slopes)).abs().max() < 2e-6


def test_what_no_path_can_do_is_refused():
    module = torch.nn.Module()
    q, k, v = drawn(2, 2, 4, 4)
    with pytest.raises(PatchError, match="carries no slopes, but its configuration"):
        alibi_attention(module, q, k, v, None)
    setattr(module, attention.HOLDER, Bias(torch.tensor(geometric_slopes(2)), "sdpa"))
    with pytest.raises(PatchError, match="looks ahead"):
        alibi_attention(module, q, k, v, None, is_causal=False)
    with pytest.raises(PatchError, match="no dropout"):
        alibi_paths.flex(rows_of(q, k, v, geometric_slopes(2))._replace(dropout=0.1))
    with pytest.raises(PatchError, match="forward only"):
        alibi_paths.flex(rows_of(q.requires_grad_(), k, v, geometric_slopes(2)))


# --- written and read


def test_an_export_for_stock_code_is_refused_with_the_reason_and_the_way_out(alibi, tmp_path):
    with pytest.raises(ExportError, match=r"the bias that it adds to attention; format=\"rope-ext\""):
        save_extended(alibi, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_our_own_format_reads_back_the_same_logits_and_stock_code_refuses_it(alibi, ids, tmp_path, tokenizer):
    wanted = logits_of(alibi, ids)
    path = save_extended(alibi, tmp_path / "out", tokenizer=tokenizer, format="rope-ext")
    with pytest.raises(KeyError, match="rope-ext"):
        AutoModelForCausalLM.from_pretrained(path)
    model, read = rope_ext.load(str(path), device="cpu")
    assert torch.equal(logits_of(model, ids), wanted)
    assert read.model_max_length == LONG
    assert model.config.max_position_embeddings == LONG
    record = json.loads((path / "rope_ext.json").read_text())
    assert (record["format"], record["method"], record["context"]) == ("rope-ext", "alibi", LONG)
    assert record["alibi_slopes"] == list(geometric_slopes(4))
    plain, _ = rope_ext.load_model(str(path), device="cpu")  # what it was extended from
    assert plain.config.max_position_embeddings == WINDOW
    assert plain.config.rope_parameters["rope_type"] == "default"
    with extend(plain, Alibi(), context=LONG):
        assert torch.equal(logits_of(plain, ids), wanted)
    model.model.rotary_emb.patch.undo()
    again = save_extended_again(model, tmp_path / "again")
    assert torch.equal(logits_of(rope_ext.load(str(again), device="cpu")[0], ids), wanted)


def save_extended_again(model, folder):
    with extend(model, Alibi(), context=LONG):
        save_extended(model, folder, format="rope-ext")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((folder.parent / "out" / name).read_bytes())
    return folder


@pytest.mark.parametrize("spelled", ["dynamic-yarn", "yarn", "resonance:over=p-rope", "alibi:slopes=0.5;0.1;0.05;0.01"])
def test_our_own_format_holds_any_method_also_over_a_scaled_base(spelled, ids, tmp_path, tokenizer):
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = random_llama(rope_parameters=scaled, max_position_embeddings=2 * WINDOW)
    method = parse_method(spelled)
    base = "checkpoint" if method.composes and spelled != "resonance:over=p-rope" else "original"
    with extend(model, method, context=4 * WINDOW, base=base):
        wanted = logits_of(model, ids)
        path = save_extended(model, tmp_path / "out", tokenizer=tokenizer, format="rope-ext")
    read, _ = rope_ext.load(str(path), device="cpu")
    assert torch.equal(logits_of(read, ids), wanted)
    assert read.model.rotary_emb.patch.config_of_base["rope_parameters"]["rope_type"] == "linear"


def test_a_checkpoint_for_stock_code_is_loaded_as_it_says(llama, ids, tmp_path, tokenizer):
    with extend(llama, Yarn(), context=LONG):
        wanted = logits_of(llama, ids)
        path = save_extended(llama, tmp_path / "out", tokenizer=tokenizer)
    model, _ = rope_ext.load(str(path), device="cpu")
    assert (logits_of(model, ids) - wanted).abs().max() < 1e-3
    assert type(model.model.rotary_emb).__name__ == "LlamaRotaryEmbedding"


def test_records_that_do_not_fit_are_refused(alibi, tmp_path, tokenizer):
    path = save_extended(alibi, tmp_path / "out", tokenizer=tokenizer, format="rope-ext")
    record = json.loads((path / "rope_ext.json").read_text())
    for change, words in (
        ({"alibi_slopes": [1.0, 1.0, 1.0, 1.0]}, "other slopes"),
        ({"method": "os.system"}, "no record of an extended model"),
        ({"method": "nope", "hyperparameters": {}, "alibi_slopes": None}, "says nope at 192 tokens, and config.json"),
        ({"context": 256}, "says alibi at 256 tokens, and config.json beside it alibi at 192"),
        ({"hyperparameters": {"slopes": "steep"}}, "no record of an extended model"),
        ({"context": None}, "no record of an extended model"),
    ):
        (path / "rope_ext.json").write_text(json.dumps(record | change))
        with pytest.raises(ExportError, match=words):
            rope_ext.load(str(path), device="cpu")
    (path / "rope_ext.json").write_text(json.dumps(record | {"format": "stock"}))  # the configuration decides
    assert rope_ext.load(str(path), device="cpu")[0].model.rotary_emb.patch.method == Alibi()
    changed = record["config_of_base"] | {"rms_norm_eps": 0.5}
    (path / "rope_ext.json").write_text(json.dumps(record | {"config_of_base": changed}))
    assert rope_ext.load(str(path), device="cpu")[0].config.rms_norm_eps != 0.5
    (path / "rope_ext.json").write_text("[]")
    with pytest.raises(ModelError, match="no record"):
        rope_ext.load(str(path), device="cpu")
    (path / "rope_ext.json").unlink()
    with pytest.raises(ModelError, match="save_pretrained while extended"):
        rope_ext.load(str(path), device="cpu")


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"format": "gguf"}, "neither stock nor rope-ext"), ({"format": "rope-ext", "allow_approximate": True}, "leave")],
)
def test_formats_that_make_no_sense_are_refused(alibi, tmp_path, asked, words):
    with pytest.raises(ExportError, match=words):
        save_extended(alibi, tmp_path / "out", **asked)
