import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from evals import nll
from evals.corpora import TokenDocument
from evals.errors import EvalError
from evals.nll import batch_nll, token_nll
from evals.perplexity import (
    Window,
    by_position,
    group_lengths,
    last_k,
    long_context_gain,
    nll_by_length,
    prefix_nll,
    sliding_nll,
    windows,
)
from rope_ext import Yarn, extend
from rope_ext.registry import parse_method
from tests.conftest import LENGTH_DEPENDENT, WINDOW, logits_of, random_llama

IDS = tuple(torch.randint(0, 96, (3 * WINDOW,), generator=torch.Generator().manual_seed(2)).tolist())
DOCUMENT = TokenDocument(name="d", ids=IDS)


def dense_nll(model, ids):
    logits = logits_of(model, torch.tensor([ids]))[0, :-1].double()
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


def test_a_hand_computed_toy():
    """Uniform logits: every token costs ln(vocabulary)."""
    model = random_llama()
    with torch.no_grad():
        model.lm_head.weight[:] = 0
    values = token_nll(model, IDS)
    assert values.shape == (len(IDS) - 1,)
    assert values.dtype == torch.float64
    torch.testing.assert_close(values, torch.full_like(values, 96.0).log(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 64, 10_000])
def test_row_chunks_equal_dense(llama, monkeypatch, rows):
    monkeypatch.setattr(nll, "ROWS_PER_CHUNK", rows)
    # fp32 softmax against float64: the promise is 1e-5
    torch.testing.assert_close(token_nll(llama, IDS), dense_nll(llama, IDS), rtol=0, atol=1e-5)


def check(got, wanted):
    """Compare to 1e-5 in the mean, 5e-5 at a token: this model's weights are large, and its logits of order 10."""
    torch.testing.assert_close(got.mean(), wanted.mean(), rtol=0, atol=1e-5)
    torch.testing.assert_close(got, wanted, rtol=0, atol=5e-5)


def pieces(model):
    """Return the sizes of the pieces that the base model is given, filled as it is called."""
    seen = []
    model.base_model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("tokens", [1, 7, 64, 100, 191, 192])
def test_chunks_over_the_cache_equal_dense(llama, monkeypatch, tokens):
    seen = pieces(llama)
    monkeypatch.setattr(nll, "tokens_per_chunk", lambda *_args, **_more: tokens)
    got = token_nll(llama, IDS)
    assert max(seen) == tokens
    assert sum(seen) == len(IDS)
    check(got, dense_nll(llama, IDS))


@pytest.mark.parametrize("kind", ["yarn", "nope", "longrope"])
def test_chunks_equal_dense_under_every_kind_of_frequencies(llama, monkeypatch, kind):
    monkeypatch.setattr(nll, "tokens_per_chunk", lambda *_args, **_more: 20)
    spelled = LENGTH_DEPENDENT[2] if kind == "longrope" else kind
    with extend(llama, parse_method(spelled), factor=4) as patch:
        seen = pieces(llama)
        got = token_nll(llama, IDS, frequency_key=patch.frequency_key)
        check(got, dense_nll(llama, IDS))
        # longrope changes its frequencies on the way, so it goes in one piece
        assert max(seen[:-1] or seen) == (len(IDS) if kind == "longrope" else 20)


@pytest.mark.parametrize("last", [1, 5, 100, 191])
@pytest.mark.parametrize("tokens", [50, 192])
def test_only_the_last_tokens_are_scored(llama, monkeypatch, last, tokens):
    monkeypatch.setattr(nll, "tokens_per_chunk", lambda *_args, **_more: tokens)
    check(token_nll(llama, IDS, last=last), dense_nll(llama, IDS)[-last:])


def test_batched_padded_and_single_agree(llama):
    rows = [IDS[:50], IDS[10:150], IDS[5:7], IDS]
    single = [token_nll(llama, row) for row in rows]
    for got, wanted in zip(batch_nll(llama, rows), single, strict=True):
        check(got, wanted)
    for got, wanted in zip(batch_nll(llama, rows[:1] * 3), single[:1] * 3, strict=True):
        check(got, wanted)
    for bad in ([], [[1]], [IDS, [1]]):
        with pytest.raises(EvalError, match="at least"):
            batch_nll(llama, bad)


def test_the_budget_bounds_rows_and_pieces():
    config = random_llama().config
    assert nll.rows_per_chunk(config, 4, 2**40) == nll.ROWS_PER_CHUNK
    assert nll.rows_per_chunk(config, 4, 2 * 96 * 12) == 1
    with pytest.raises(EvalError, match="hold no row of 96 logits; 2304 do"):
        nll.rows_per_chunk(config, 4, 2 * 96 * 12 - 1)
    assert nll.tokens_per_chunk(config, 4, 1000, 2**40) == 1000
    sizes = [nll.tokens_per_chunk(config, 4, 100_000, budget) for budget in (2**30, 2**29, 2**20)]
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=2)
    assert 1 <= sizes[2] < sizes[1] < 100_000
    config._attn_implementation = "eager"
    assert nll.tokens_per_chunk(config, 4, 100_000, 2**30) < sizes[0] / 4, "scores of every head are made besides"


def test_on_a_gpu_fp32_with_grouped_heads_makes_scores(monkeypatch):
    """torch's only kernel for fp32 there takes no grouped heads, and transformers asks for them without a mask."""
    monkeypatch.setattr(LlamaForCausalLM, "device", property(lambda _self: torch.device("cuda")))

    def whole(dtype, capability, **changes):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        return nll.computes_whole_rows(random_llama(**changes).to(dtype))

    assert whole(torch.bfloat16, (9, 0))
    assert not whole(torch.float32, (9, 0))
    assert not whole(torch.bfloat16, (7, 5))
    assert whole(torch.float32, (9, 0), num_key_value_heads=4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_piece_needs_room_for_a_mask_only_where_one_is_made(llama, implementation):
    """Plain causality is a word to the kernels, and 5 bytes an entry where scores are written out."""
    llama.set_attn_implementation(implementation)
    masks = []
    llama.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _m, _a, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    expected = dense_nll(llama, IDS)
    masks.clear()
    seen = pieces(llama)
    numbers = 4 * (6 * 64 + 3 * 96 + (3 * 4 + 2 * 2) * 16) * len(IDS)
    check(token_nll(llama, IDS, memory_budget=2 * numbers), expected)
    if implementation == "sdpa":
        assert seen == [len(IDS)]
        assert masks[0] is None
    else:
        assert len(seen) > 1
        assert masks[0] is not None


def test_a_small_budget_gives_the_same_numbers(llama):
    seen = pieces(llama)
    got = token_nll(llama, IDS, memory_budget=300_000)
    assert 1 < len(seen) < len(IDS)
    check(got, dense_nll(llama, IDS))


def test_one_forward_serves_every_shorter_length(llama):
    lengths = (2, 50, WINDOW, 2 * WINDOW, 3 * WINDOW)
    with extend(llama, Yarn(), factor=4) as patch:
        together = prefix_nll(llama, DOCUMENT, lengths, frequency_key=patch.frequency_key)
        alone = {n: float(dense_nll(llama, IDS[:n]).mean()) for n in lengths}
    assert list(together) == list(lengths)
    assert together == pytest.approx(alone, abs=1e-5)


def test_lengths_with_unequal_keys_get_their_own_forwards(llama, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "evals.perplexity.token_nll",
        lambda _model, ids, **_more: seen.append(len(ids)) or torch.zeros(len(ids) - 1),
    )
    prefix_nll(llama, DOCUMENT, (64, 128, 192), frequency_key=lambda n: "short" if n <= 64 else "long")
    assert seen == [192, 64]
    seen.clear()
    prefix_nll(llama, DOCUMENT, (64, 128, 192), frequency_key=lambda n: n)
    assert seen == [192, 128, 64]
    seen.clear()
    prefix_nll(llama, DOCUMENT, (64, 128, 192), frequency_key=lambda n: "static")
    assert seen == [192]


def test_groups():
    assert group_lengths((3, 9, 3, 5), lambda n: n > 4) == [(9, (5, 9)), (3, (3,))]
    for bad in ((), (1,), (5, 0)):
        with pytest.raises(EvalError, match="lengths"):
            group_lengths(bad, lambda n: n)


def test_what_cannot_be_measured_is_refused(llama):
    with pytest.raises(EvalError, match="d has 192 tokens, 193 asked"):
        prefix_nll(llama, DOCUMENT, (193,), frequency_key=lambda n: 0)
    with pytest.raises(EvalError, match="at least 2"):
        token_nll(llama, IDS[:1])
    with torch.no_grad():
        llama.lm_head.weight[:] = torch.nan
    with pytest.raises(EvalError, match="position 1 is not finite"):
        token_nll(llama, IDS)
    for last in (0, len(IDS)):
        with pytest.raises(EvalError, match=f"{last} of 192 ids cannot be scored"):
            token_nll(llama, IDS, last=last)


# The protocols, by hand: a token with c tokens before it costs 1/c nats.


@pytest.fixture
def toy(monkeypatch):
    calls = []

    def by_context(_model, ids, *, last=None, **_more):
        last = len(ids) - 1 if last is None else last
        calls.append((tuple(ids), last))
        return torch.tensor([1.0 / c for c in range(len(ids) - last, len(ids))], dtype=torch.float64)

    monkeypatch.setattr("evals.perplexity.token_nll", by_context)
    return calls


def static(_length):
    return "static"


SEVEN = TokenDocument(name="d", ids=(9, 1, 2, 3, 4, 5, 6))  # 9 is BOS where there is one


def test_prefix_by_hand(toy, llama):
    """Tokens 1..L-1 cost 1, 1/2, 1/3, ...: at L = 4 the mean is (1 + 1/2 + 1/3) / 3."""
    got = prefix_nll(llama, SEVEN, (2, 4), frequency_key=static)
    assert got == pytest.approx({2: 1.0, 4: 11 / 18})
    assert toy == [((9, 1, 2, 3), 3)]


def test_windows_as_drawn():
    plain = TokenDocument(name="d", ids=(0, 1, 2, 3, 4, 5, 6))
    assert list(windows(plain, 4, stride=2, bos=None)) == [
        Window((0, 1, 2, 3), 3),
        Window((2, 3, 4, 5), 2),
        Window((4, 5, 6), 1),
    ]
    assert list(windows(SEVEN, 4, stride=2, bos=9)) == [
        Window((9, 1, 2, 3), 3),
        Window((9, 3, 4, 5), 2),
        Window((9, 5, 6), 1),
    ]
    assert list(windows(SEVEN, 7, stride=6, bos=9)) == [Window((9, 1, 2, 3, 4, 5, 6), 6)]
    assert list(windows(SEVEN, 100, stride=1, bos=9)) == [Window((9, 1, 2, 3, 4, 5, 6), 6)]


@given(
    num_tokens=st.integers(3, 60), length=st.integers(3, 30), stride=st.integers(1, 29), bos=st.sampled_from([None, 9])
)
def test_every_token_is_scored_once_with_enough_before_it(num_tokens, length, stride, bos):
    stride = min(stride, length - (bos is not None))
    text = tuple(range(100, 100 + num_tokens))
    document = TokenDocument(name="d", ids=text if bos is None else (bos, *text))
    scored = []
    for number, window in enumerate(windows(document, length, stride=stride, bos=bos)):
        assert len(window.ids) <= length
        assert (window.ids[0] == bos) == (bos is not None)
        assert window.ids.count(bos) == (bos is not None)
        scored += window.ids[-window.last :]
        if number:
            assert len(window.ids) - window.last >= length - stride
    assert scored == list(text if bos is not None else text[1:])


@pytest.mark.usefixtures("toy")
def test_sliding_and_its_legacy_mean_by_hand(llama):
    """Windows [9 1 2 3], [9 3 4 5], [9 5 6] cost 1+1/2+1/3, 1/2+1/3 and 1/2: sums over 6 tokens against 3 means."""
    weighted, legacy = sliding_nll(llama, SEVEN, 4, stride=2, bos=9, frequency_key=static)
    assert weighted == (pytest.approx((11 / 6 + 5 / 6 + 1 / 2) / 6), 6, 3)
    assert legacy == (pytest.approx((11 / 18 + 5 / 12 + 1 / 2) / 3), 6, 3)


def test_last_k_by_hand():
    nll_of = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert last_k(nll_of, 2) == (1.5, 2, 1)
    assert last_k(nll_of, 4) == (2.5, 4, 1)
    for bad in (0, 5):
        with pytest.raises(EvalError, match=f"{bad} of 4 scored"):
            last_k(nll_of, bad)


def test_by_position_by_hand():
    """Token 0 is in no bucket; positions 1..2, then 3..4."""
    nll_of = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert by_position(nll_of, [0, 3, 5]) == {3: (3.5, 2, 1), 5: (1.5, 2, 1)}
    for edges, words in (([0, 6], "beyond the 5 tokens"), ([3, 3], "do not rise"), ([2], "do not rise")):
        with pytest.raises(EvalError, match=words):
            by_position(nll_of, edges)


def test_gain_by_hand(toy, llama):
    """The last two of seven cost 1/5 and 1/6 with all before them, 1/2 and 1/3 in a window of four."""
    got = long_context_gain(llama, SEVEN, 7, original=4, k=2, bos=9, frequency_key=static)
    assert got == (pytest.approx((1 / 5 + 1 / 6 - 1 / 2 - 1 / 3) / 2), 2, 2)
    assert toy == [((9, 1, 2, 3, 4, 5, 6), 2), ((9, 4, 5, 6), 2)]
    with pytest.raises(EvalError, match="must rise"):
        long_context_gain(llama, SEVEN, 3, original=4, k=2, bos=9, frequency_key=static)


def test_protocols_on_a_model_equal_brute_force(llama):
    """Every window by itself through the dense logits, no sharing at all."""
    document = TokenDocument(name="d", ids=(1, *IDS[1:]))
    total, tokens = 0.0, 0
    for window in windows(document, 80, stride=30, bos=1):
        total += float(dense_nll(llama, window.ids)[-window.last :].sum())
        tokens += window.last
    got, _ = sliding_nll(llama, document, 80, stride=30, bos=1, frequency_key=static)
    assert got.nll == pytest.approx(total / tokens, abs=1e-5)
    assert got.tokens == tokens == len(IDS) - 1
    gain = long_context_gain(llama, document, 192, original=64, k=20, bos=1, frequency_key=static)
    far, near = (dense_nll(llama, ids)[-20:].mean() for ids in (document.ids, (1, *document.ids[-63:])))
    assert gain.nll == pytest.approx(float(far - near), abs=1e-5)
    whole = nll_by_length(llama, document, (192,), frequency_key=static)[192]
    assert last_k(whole, 30).nll == pytest.approx(float(dense_nll(llama, document.ids)[-30:].mean()), abs=1e-5)


@pytest.mark.parametrize(("length", "stride", "bos"), [(1, 1, None), (4, 0, None), (4, 5, None), (4, 4, 9), (2, 1, 9)])
def test_windows_that_do_not_move(length, stride, bos):
    with pytest.raises(EvalError, match=f"length {length} and stride {stride}"):
        list(windows(SEVEN, length, stride=stride, bos=bos))
    with pytest.raises(EvalError, match="does not begin with BOS 8"):
        list(windows(SEVEN, 4, stride=1, bos=8))
