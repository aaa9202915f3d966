import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.errors import EvalError
from evals.stats import (
    Unit,
    clustered_share,
    effective_length,
    effective_lengths,
    mean_nll,
    paired_difference,
    perplexity,
    student,
    wilson,
)


def test_perplexity_weights_tokens_not_documents():
    """By hand: (1.0 * 3 + 3.0 * 1) / 4 = 1.5 nats; the mean of means would be 2.0."""
    assert perplexity([1.0, 3.0], [3, 1]).value == pytest.approx(math.exp(1.5), rel=1e-15)


def test_perplexity_interval_is_seeded_and_brackets_the_value():
    nll, tokens = [1.0, 1.2, 0.9, 1.5, 1.1], [100, 100, 50, 100, 10]
    estimate = perplexity(nll, tokens, seed=3)
    assert estimate == perplexity(nll, tokens, seed=3)
    assert estimate.low < estimate.value < estimate.high
    assert estimate.n == 5
    many = [1 + (i * 7919 % 100) / 100 for i in range(200)]
    assert perplexity(many, [1] * 200, seed=3) != perplexity(many, [1] * 200, seed=4)


def test_students_points():
    """Abramowitz & Stegun, table 26.10."""
    table = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 11: 2.201, 15: 2.131, 30: 2.042, 120: 1.980}
    assert {n: round(student(n), 3) for n in table} == table


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
def test_few_documents_give_intervals_that_hold(n):
    """Documents drawn from a normal: the interval covers the truth 19 times in 20, however few there are."""
    rng = np.random.default_rng(n)
    covered = clear = 0
    for _ in range(400):
        values = rng.normal(2.0, 0.5, size=n).tolist()
        found = mean_nll(values, [100] * n, num_resamples=200)
        covered += found.low <= 2.0 <= found.high
        units = {str(i): Unit(value - 2.0) for i, value in enumerate(values)}
        none = {str(i): Unit(0.0) for i in range(n)}
        difference = paired_difference(units, none, num_resamples=200)
        clear += difference.is_clear
        assert difference.p_value >= 2.0 ** (1 - n)
    # three standard errors of 400 draws
    assert covered / 400 >= 0.95 - 0.033
    assert clear / 400 <= 0.05 + 0.033


def test_shares_of_trials_on_one_text_count_for_less():
    loose = {str(i): (i % 2, 1) for i in range(40)}
    # but for n / (n - 1) in the variance
    assert clustered_share(loose) == pytest.approx(wilson(20, 40), rel=0.01)
    tight = {str(i): (5 * (i % 2), 5) for i in range(8)}  # 40 trials that agree in each of 8 texts
    found = clustered_share(tight)
    assert (found.value, found.n) == (0.5, 40)
    assert found.high - found.low > 1.9 * (wilson(20, 40).high - wilson(20, 40).low)
    assert clustered_share({"a": (5, 5), "b": (5, 5)})[:3] == wilson(2, 2)[:3]
    assert clustered_share({"a": (3, 5)}).high - clustered_share({"a": (3, 5)}).low > 0.8


def test_rounding_is_no_difference():
    first = {str(i): Unit(2.0 + i + 1e-7 * (1 + i % 2)) for i in range(20)}
    second = {str(i): Unit(2.0 + i) for i in range(20)}
    assert paired_difference(first, second).is_clear
    found = paired_difference(first, second, resolution=1e-5)
    assert not found.is_clear
    assert found.p_value == 1.0


def test_a_share_of_a_share_is_reached_where_it_is_equal():
    assert effective_length({256: 0.75, 512: 0.15}, threshold=0.2 * 0.75) == 512


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


# Paired differences


def units(values, weights=None):
    return {f"u{i}": Unit(v, w) for i, (v, w) in enumerate(zip(values, weights or [1.0] * len(values), strict=True))}


def test_a_paired_difference_by_hand():
    """(1.0 * 3 + -0.5 * 1) / 4 = 0.625, weighted by tokens."""
    found = paired_difference(units([2.0, 1.0], [3, 1]), units([1.0, 1.5], [3, 1]))
    assert found.value == pytest.approx(0.625, rel=1e-15)
    assert found.n == 2


def test_pairing_sees_what_two_intervals_hide():
    """Documents differ by whole nats, methods by a tenth on each: overlapping intervals, a clear difference."""
    hard = [1.0, 3.0, 2.0, 5.0, 4.0, 2.5]
    first, second = units([h + 0.1 for h in hard]), units([h + 0.01 * i for i, h in enumerate(hard)])
    apart = [perplexity([u.value for u in m.values()], [1] * 6) for m in (first, second)]
    assert apart[0].low < apart[1].high
    found = paired_difference(first, second)
    assert found.is_clear
    assert 0.04 < found.low < found.value < found.high < 0.11
    assert found.p_value == 2**-5  # of six documents no smaller one can be had


def test_no_difference_is_no_claim():
    same = units([1.0, 2.0, 3.0])
    assert paired_difference(same, same) == (0.0, 0.0, 0.0, 3, 1.0)
    mixed = paired_difference(units([1.0, 2.0, 3.0, 4.0]), units([2.0, 1.0, 4.0, 3.0]))
    assert not mixed.is_clear
    assert mixed.p_value > 0.5


def test_it_is_seeded_and_turns_its_sign_with_the_order():
    first, second = units([1.0, 2.5, 3.0, 2.0]), units([1.2, 2.0, 3.3, 2.0])
    found = paired_difference(first, second, seed=1)
    assert found == paired_difference(first, second, seed=1)
    assert found != paired_difference(first, second, seed=2)
    turned = paired_difference(second, first, seed=1)
    assert turned.value == -found.value
    assert turned.low == pytest.approx(-found.high)


def test_clusters_are_resampled_whole():
    """Ten trials in each of three haystacks that agree within: n is three, however many trials there are."""
    names = [f"{hay}/{trial}" for hay in "abc" for trial in range(10)]
    first = {name: Unit({"a": 1.0, "b": 0.0, "c": 1.0}[name[0]]) for name in names}
    second = {name: Unit({"a": 0.0, "b": 1.0, "c": 0.0}[name[0]]) for name in names}
    loose = paired_difference(first, second)
    tight = paired_difference(first, second, clusters={name: name[0] for name in names})
    assert loose.value == tight.value == pytest.approx(1 / 3)
    bounded = paired_difference(first, second, clusters={name: name[0] for name in names}, span=1)
    assert (bounded.low, bounded.high) == (-1.0, 1.0)
    assert tight.low < -1.0
    assert tight.high > 1.0
    assert loose.high - loose.low < 0.75
    one = paired_difference(first, second, clusters=dict.fromkeys(names, "all"))
    assert (one.low, one.high, one.p_value) == (None, None, None)
    assert not one.is_clear


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """300 experiments of 40 paired units whose true difference is 0.3: about 95 % of the intervals hold it."""
    generator = np.random.default_rng(0)
    covered = 0
    for experiment in range(300):
        hard, noise = generator.normal(size=(2, 40))
        found = paired_difference(units(hard + 0.3 + noise), units(hard), seed=experiment, num_resamples=1000)
        covered += found.low <= 0.3 <= found.high
    # 95 % less the bootstrap's known shortfall at n = 40, and three standard errors of 300 experiments
    assert 0.89 <= covered / 300 <= 0.98


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {}, "nothing came"),
        ({"a": Unit(1.0)}, {"b": Unit(1.0)}, "'a' is in one only"),
        ({"a": Unit(1.0, 2)}, {"a": Unit(1.0, 3)}, "different tokens"),
        ({"a": Unit(math.nan)}, {"a": Unit(1.0)}, "not finite"),
        ({"a": Unit(1.0, 0)}, {"a": Unit(1.0, 0)}, "without weight"),
    ],
)
def test_units_that_do_not_pair(first, second, words):
    with pytest.raises(EvalError, match=words):
        paired_difference(first, second)


def test_effective_length_by_mean_and_by_bound():
    """10 of 10 supports 0.72, not 0.85; 100 of 100 does."""
    few = {256: wilson(10, 10), 512: wilson(10, 10), 1024: wilson(4, 10)}
    assert effective_lengths(few) == (512, None)
    assert effective_lengths(few, threshold=0.2) == (1024, 512)
    many = {256: wilson(100, 100), 512: wilson(88, 100), 1024: wilson(100, 100)}
    assert effective_lengths(many) == (1024, 256)
    assert effective_lengths({256: wilson(0, 5)}) == (None, None)
