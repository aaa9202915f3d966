import pytest
import torch
from torch.nn import functional as F

from evals import nll
from evals.corpora import TokenDocument
from evals.errors import EvalError
from evals.nll import token_nll
from evals.perplexity import group_lengths, prefix_nll
from rope_ext import Yarn, extend
from tests.conftest import WINDOW, logits_of, random_llama

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
def test_chunked_equals_dense(llama, monkeypatch, rows):
    monkeypatch.setattr(nll, "ROWS_PER_CHUNK", rows)
    # fp32 softmax against float64: the promise is 1e-5
    torch.testing.assert_close(token_nll(llama, IDS), dense_nll(llama, IDS), rtol=0, atol=1e-5)


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
        "evals.perplexity.token_nll", lambda _model, ids: seen.append(len(ids)) or torch.zeros(len(ids) - 1)
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
