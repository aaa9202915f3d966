"""The loss without logits is the dense loss: value, gradients and what it takes of memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from recipes import loss
from recipes.load import RecipeError
from recipes.loss import loss_without_logits
from recipes.packing import IGNORED
from tests.conftest import random_llama


def batch_of(*, num_rows=2, num_tokens=60, ignored=0.2, packed=False, vocabulary=96):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (num_rows, num_tokens), generator=generator)
    labels = ids.where(torch.rand(ids.shape, generator=generator) >= ignored, IGNORED)
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        # A border in the first row, two in the second, and padding
        borders = ((0, 23, num_tokens - 7), (0, 5, 31))
        positions = torch.stack(
            [
                torch.cat([torch.arange(b - a) for a, b in zip(row, (*row[1:], num_tokens), strict=True)])
                for row in borders
            ]
        )
        labels[positions == 0] = IGNORED
        labels[0, num_tokens - 7 :] = IGNORED
        batch["position_ids"] = positions
    return batch


def step(model, batch, **more):
    """Return (loss, gradients), as fp32, of one forward and backward."""
    model.zero_grad(set_to_none=True)
    out = model(**batch, use_cache=False, **more)
    out.loss.backward()
    return out.loss.detach().float(), {name: p.grad.detach().float() for name, p in model.named_parameters()}


def sparse(model, batch, *, rows=512, **more):
    with loss_without_logits(model, rows=rows):
        return step(model, batch, **more)


def assert_alike(found, expected, tolerance):
    loss, gradients = found
    expected_loss, expected_gradients = expected
    assert torch.isfinite(expected_loss)
    assert abs(loss - expected_loss) <= tolerance * max(1, abs(expected_loss))
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 0, name
        off = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert off <= tolerance, (name, off)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request):
    # Small weights: gradients of a loss of many nats are mostly rounding
    return random_llama(initializer_range=0.1, tie_word_embeddings=request.param)


FP32 = 1e-5


@pytest.mark.parametrize("rows", [1, 7, 512])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("number", [None, 37, torch.tensor(200)], ids=["mean", "int", "tensor"])
def test_it_is_the_dense_loss(model, rows, packed, number):
    batch = batch_of(packed=packed)
    more = {} if number is None else {"num_items_in_batch": number}
    dense = step(model, batch, **more)
    assert_alike(sparse(model, batch, rows=rows, **more), dense, FP32)


def test_a_batch_that_scores_all_and_one_that_scores_one_token(model):
    for ignored in (0, 1):
        batch = batch_of(ignored=ignored)
        batch["labels"][1, 30] = 5
        assert_alike(sparse(model, batch, rows=7), step(model, batch), FP32)


def test_a_batch_that_scores_nothing_has_a_loss_of_0(model):
    """The dense loss is 0/0 there."""
    loss, gradients = sparse(model, batch_of(ignored=1))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


def test_shifted_labels(model):
    """Where rows are cut over GPUs, labels come shifted already."""
    batch = batch_of()
    expected = step(model, batch)
    labels = batch.pop("labels")
    batch["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    assert_alike(sparse(model, batch, rows=7), expected, FP32)


def test_a_head_with_a_bias():
    model = random_llama(initializer_range=0.1)
    model.lm_head.bias = nn.Parameter(torch.randn(96, generator=torch.Generator().manual_seed(3)))
    batch = batch_of()
    assert_alike(sparse(model, batch, rows=7), step(model, batch), FP32)


def test_a_frozen_head_gets_no_gradient():
    model = random_llama(initializer_range=0.1)
    batch = batch_of()
    _, expected = step(model, batch)
    model.lm_head.weight.requires_grad_(requires_grad=False)
    model.zero_grad(set_to_none=True)
    with loss_without_logits(model, rows=7):
        model(**batch, use_cache=False).loss.backward()
    assert model.lm_head.weight.grad is None
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, expected["model.embed_tokens.weight"])


@torch.no_grad()
def test_without_gradients(model):
    batch = batch_of()
    dense = model(**batch).loss
    with loss_without_logits(model, rows=7):
        torch.testing.assert_close(model(**batch).loss, dense, rtol=FP32, atol=0)


def test_there_are_no_logits(model):
    with loss_without_logits(model):
        out = model(**batch_of())
    assert out.loss is not None
    assert out.get("logits") is None


def test_without_labels_the_logits_are_the_ordinary_ones(model):
    ids = batch_of()["input_ids"]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with loss_without_logits(model):
            inside = model(input_ids=ids)
            again = model(ids).logits
            some = model(input_ids=ids, logits_to_keep=3).logits
    assert inside.get("loss") is None
    assert torch.equal(inside.logits, before)
    assert torch.equal(again, before)
    assert some.shape[1] == 3


def is_its_own(module):
    return "forward" not in vars(module) and module.forward.__func__ is type(module).forward


def test_afterwards_the_model_is_its_own_again(model):
    batch = batch_of()
    dense = model(**batch)
    with loss_without_logits(model):
        assert not is_its_own(model)
        model(**batch)
    assert is_its_own(model)
    assert is_its_own(model.lm_head)
    after = model(**batch)
    assert torch.equal(after.loss, dense.loss)
    assert torch.equal(after.logits, dense.logits)


def test_after_an_exception_as_well(model):
    with pytest.raises(KeyboardInterrupt), loss_without_logits(model):  # noqa: PT012
        model(**batch_of())
        raise KeyboardInterrupt
    assert is_its_own(model)
    assert is_its_own(model.lm_head)
    with pytest.raises(IndexError), loss_without_logits(model):
        model(input_ids=torch.tensor([[1000]]), labels=torch.tensor([[1]]))
    assert is_its_own(model)
    assert is_its_own(model.lm_head)


@pytest.mark.parametrize("rows", [7, 512])
def test_two_halves_make_up_one_step(model, rows):
    """Of unlike numbers of scored tokens, as a mean of means would not."""
    batch = batch_of(num_rows=4, ignored=0)
    batch["labels"][:2, 20:] = IGNORED
    number = (batch["labels"][:, 1:] != IGNORED).sum()
    whole = step(model, batch)
    model.zero_grad(set_to_none=True)
    losses = []
    with loss_without_logits(model, rows=rows):
        for half in (slice(0, 2), slice(2, 4)):
            part = {name: value[half] for name, value in batch.items()}
            loss = model(**part, use_cache=False, num_items_in_batch=number).loss
            loss.backward()
            losses.append(loss.detach())
    gradients = {name: p.grad.detach() for name, p in model.named_parameters()}
    assert_alike((sum(losses), gradients), whole, FP32)


@pytest.mark.parametrize("head", [nn.Sequential(nn.Linear(64, 96, bias=False)), nn.Bilinear(64, 64, 96), nn.Identity()])
def test_a_head_that_is_not_linear_is_refused(head):
    model = random_llama()
    model.lm_head = head
    words = rf"model: its output head is {type(head).__name__} or caps its logits; .* needs a plain linear layer"
    with pytest.raises(RecipeError, match=words), loss_without_logits(model):
        pytest.fail("the block is not entered")
    assert is_its_own(model)
    assert "forward" not in vars(head)


def test_capped_logits_are_refused():
    model = random_llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(RecipeError, match="caps its logits"), loss_without_logits(model):
        pytest.fail("the block is not entered")
    assert is_its_own(model)
    model.config.final_logit_softcapping = None
    with loss_without_logits(model):
        model(**batch_of())


BF16 = 2**-8
"""One rounding to bf16, whose significand has 8 bits; the dense loss sums in fp32 what is rounded so."""


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_under_autocast_it_is_the_dense_loss_to_bf16_rounding(model, rows):
    """However many pieces the sum is made of: at long context they are hundreds."""
    batch = batch_of(num_rows=4, num_tokens=200)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = model(**batch, use_cache=False).loss
        with loss_without_logits(model, rows=rows):
            loss = model(**batch, use_cache=False).loss
    assert abs(loss - dense) <= BF16 * dense


@pytest.mark.parametrize("rows", [7, 512])
def test_under_autocast_gradients_are_those_of_the_dense_loss(model, rows):
    batch = batch_of(num_rows=4, num_tokens=200)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, dense = step(model, batch)
        _, gradients = sparse(model, batch, rows=rows)
    for name, gradient in dense.items():
        # The head's is summed in bf16 over up to 92 pieces, each sum off by half a place: some 3 places in all
        assert (gradients[name] - gradient).norm() <= 4 * BF16 * gradient.norm(), name


def test_parameters_keep_gradients_of_their_own_type_under_autocast(model):
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), loss_without_logits(model):
        model(**batch_of(), use_cache=False).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_with_activation_checkpointing(model):
    batch = batch_of(packed=True)
    model.train()
    plain, dense = sparse(model, batch, rows=7), step(model, batch)
    num_calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: num_calls.append(1))
    # the older name warns since there is the newer
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    found = sparse(model, batch, rows=7)
    assert len(num_calls) == 2, "the layer is computed again"
    assert_alike(found, plain, 1e-6)
    assert_alike(found, dense, FP32)


# ---- memory

VOCABULARY, WIDTH, TOKENS = 20_000, 32, 2_048
LOGITS = 4 * VOCABULARY * TOKENS
"""Bytes of the logits of all tokens, in fp32."""


@pytest.fixture(scope="module")
def wide():
    return random_llama(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
    )


def peak(model, batch):
    """Return (the most bytes that a step held at a time, the most that it asked for at once), gradients included."""
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(**batch, use_cache=False).loss.backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, max(event.nbytes() for event in events)


@pytest.mark.parametrize("rows", [64, 256])
def test_memory_is_bounded_by_rows(wide, rows):
    batch = batch_of(num_rows=1, num_tokens=TOKENS, ignored=0, vocabulary=VOCABULARY)
    with loss_without_logits(wide, rows=rows):
        most, at_once = peak(wide, batch)
    weight = 4 * VOCABULARY * WIDTH
    logits = 4 * VOCABULARY * rows
    assert at_once == max(logits, weight), "the logits of so many rows, and no more"
    # logits and their logarithms, gradients of head and embeddings, one more of the head in the making, and what the
    # one layer keeps
    assert most <= 2 * logits + 3 * weight + LOGITS // 25


def test_the_dense_loss_holds_the_logits_thrice(wide):
    """What the meter shows where there is something to save."""
    batch = batch_of(num_rows=1, num_tokens=TOKENS, ignored=0, vocabulary=VOCABULARY)
    most, at_once = peak(wide, batch)
    assert at_once == LOGITS
    assert most > 2 * LOGITS


def test_what_is_not_scored_does_not_reach_the_head(wide):
    """A row of which little is scored costs as little."""
    batch = batch_of(num_rows=1, num_tokens=TOKENS, ignored=0, vocabulary=VOCABULARY)
    batch["labels"][:, 40:] = IGNORED
    with loss_without_logits(wide, rows=TOKENS):
        _, at_once = peak(wide, batch)
    assert at_once == max(4 * VOCABULARY * 39, 4 * VOCABULARY * WIDTH)


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_the_head_computes_no_more_rows_at_a_time(model, rows, monkeypatch):
    seen = []
    own = F.linear

    def watched(hidden, weight, bias=None):
        seen.append(len(hidden))
        return own(hidden, weight, bias)

    batch = batch_of()
    num_scored = int((batch["labels"][:, 1:] != IGNORED).sum())
    monkeypatch.setattr(loss, "F", SimpleNamespace(linear=watched, pad=F.pad))
    with loss_without_logits(model, rows=rows):
        model(**batch)
    assert sum(seen) == num_scored
    assert max(seen) == min(rows, num_scored)
