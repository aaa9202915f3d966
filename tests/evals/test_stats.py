import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.errors import EvalError
from evals.stats import effective_length, perplexity, wilson


def test_perplexity_weights_tokens_not_documents():
    """By hand: (1.0 * 3 + 3.0 * 1) / 4 = 1.5 nats; the mean of means would be 2.0."""
    assert perplexity([1.0, 3.0], [3, 1]).value == pytest.approx(math.exp(1.5), rel=1e-15)


def test_perplexity_interval_is_seeded_and_brackets_the_value():
    nll, tokens = [1.0, 1.2, 0.9, 1.5, 1.1], [100, 100, 50, 100, 10]
    estimate = perplexity(nll, tokens, seed=3)
    assert estimate == perplexity(nll, tokens, seed=3)
    assert estimate != perplexity(nll, tokens, seed=4)
    assert estimate.low < estimate.value < estimate.high
    assert math.exp(min(nll)) <= estimate.low
    assert estimate.high <= math.exp(max(nll))
    assert estimate.n == 5


def test_one_document_has_no_interval():
    assert perplexity([1.0], [10]) == (pytest.approx(math.e), None, None, 1)


@pytest.mark.parametrize(
    ("nll", "tokens"), [([], []), ([1.0], [1, 2]), ([math.nan], [1]), ([math.inf], [1]), ([1.0], [0]), ([800.0], [1])]
)
def test_nothing_measured_is_an_error(nll, tokens):
    with pytest.raises(EvalError):
        perplexity(nll, tokens)


# From the closed form, to the digits that published tables give: 10/10 -> [0.72, 1], 20/20 -> [0.84, 1].
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (10, 10, 0.7225, 1.0),
        (5, 5, 0.5655, 1.0),
        (1, 1, 0.2065, 1.0),
        (20, 20, 0.8389, 1.0),
        (100, 100, 0.9630, 1.0),
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_wilson_against_published_values(successes, trials, low, high):
    estimate = wilson(successes, trials)
    assert estimate.value == successes / trials
    assert estimate.low == pytest.approx(low, abs=5e-5)
    assert estimate.high == pytest.approx(high, abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_stays_inside_and_is_symmetric(case):
    k, n = case
    one, other = wilson(k, n), wilson(n - k, n)
    assert 0 <= one.low <= one.value <= one.high <= 1
    assert one.low == pytest.approx(1 - other.high, abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (2, 1), (-1, 3)])
def test_wilson_refuses_what_is_no_proportion(k, n):
    with pytest.raises(EvalError):
        wilson(k, n)


@pytest.mark.parametrize(
    ("accuracy", "reached"),
    [
        ({256: 1.0, 512: 0.9, 1024: 0.85, 2048: 0.2}, 1024),
        ({256: 1.0, 512: 0.5, 1024: 1.0}, 256),
        ({1024: 1.0, 256: 0.2}, None),
        ({256: 0.9, 512: 0.9}, 512),
        ({}, None),
    ],
)
def test_effective_length_is_contiguous(accuracy, reached):
    assert effective_length(accuracy) == reached
