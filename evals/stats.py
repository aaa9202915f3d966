"""Aggregates with intervals: token-weighted perplexity, Wilson, paired differences, effective length."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evals.errors import EvalError

MAX_NLL = 700.0  # nats; exp overflows at 709.8
Z95 = 1.959963984540054  # the 97.5 % point of the normal distribution


class Estimate(NamedTuple):
    """A value with its 95 % interval; the ends are None where n does not allow one."""

    value: float
    low: float | None
    high: float | None
    n: int


def perplexity(nll: Sequence[float], tokens: Sequence[int], *, seed: int = 0, num_resamples: int = 2000) -> Estimate:
    """Return exp(sum of nll_d * tokens_d / sum of tokens_d) over documents d, with a percentile bootstrap interval.

    Args:
        nll: mean nats per scored token of each document.
        tokens: scored tokens of each document.
        seed: of the resampling, which draws whole documents: tokens within one are not independent.

    Token-weighted, as Press et al.'s and the Hugging Face guide's; the YaRN authors' script averages windows
    unweighted, which differs when documents differ in length.

    Raises:
        EvalError: nothing was measured, the lengths differ, or a value is not finite.
    """
    mean = mean_nll(nll, tokens, seed=seed, num_resamples=num_resamples)
    if mean.value > MAX_NLL:
        raise EvalError(f"perplexity: {mean.value:.0f} nats per token has no perplexity that a float can hold")
    ends = [None if end is None else math.exp(min(end, MAX_NLL)) for end in (mean.low, mean.high)]
    return Estimate(math.exp(mean.value), ends[0], ends[1], mean.n)


def mean_nll(nll: Sequence[float], tokens: Sequence[float], *, seed: int = 0, num_resamples: int = 2000) -> Estimate:
    """Return the token-weighted mean of documents' means, in nats, with a percentile bootstrap over documents.

    Raises:
        EvalError: nothing was measured, the lengths differ, or a value is not finite.
    """
    if not nll or len(nll) != len(tokens):
        raise EvalError(f"perplexity: {len(nll)} losses for {len(tokens)} token counts; give one of each, at least one")
    values, weights = np.asarray(nll, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    if not np.isfinite(values).all() or (weights <= 0).any():
        raise EvalError("perplexity: a loss that is not finite, or a document without a scored token")
    mean = float((values * weights).sum() / weights.sum())
    if len(values) == 1:
        return Estimate(mean, None, None, 1)
    weighted = values * weights
    low, high = _wider(_resampled(weighted, weights, seed, num_resamples), weighted, weights)
    return Estimate(mean, low, high, len(values))


def wilson(successes: int, trials: int) -> Estimate:
    """Return successes/trials with the Wilson score interval at 95 %, which never leaves [0, 1].

    Source: Wilson (1927); Brown, Cai & DasGupta (2001), equation 4.

    Raises:
        EvalError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise EvalError(f"accuracy: {successes} of {trials} is no proportion; at least one trial is needed")
    low, high = _wilson(successes / trials, float(trials))
    return Estimate(successes / trials, low, high, trials)


def _wilson(p: float, trials: float) -> tuple[float, float]:
    z2 = Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    return 0.0 if p == 0 else max(0.0, centre - half), 1.0 if p == 1 else min(1.0, centre + half)


def mean_share(values: Sequence[float], *, seed: int = 0, num_resamples: int = 2000) -> Estimate:
    """Return the mean of shares between 0 and 1, units resampled; the interval stays between 0 and 1.

    Where all agree, resampling shows no spread; the interval then leaves room for what n units cannot show (Wilson).

    Raises:
        EvalError: nothing came, or a value that is no share.
    """
    if not all(0 <= value <= 1 for value in values):
        raise EvalError("accuracy: a value outside 0 to 1 is no share")
    found = mean_nll(values, [1.0] * len(values), seed=seed, num_resamples=num_resamples)
    if found.low is None or found.high is None:
        return found
    room = (wilson(0, len(values)).high or 0.0) if len(set(values)) == 1 else 0.0
    return Estimate(found.value, max(0.0, found.low - room), min(1.0, found.high + room), found.n)


class Unit(NamedTuple):
    """One scored unit under one method: its mean, and the tokens (or trials) that it stands for."""

    value: float
    weight: float = 1.0


class Difference(NamedTuple):
    """How much higher the first of two methods scored on the same units, with its 95 % interval, over n units.

    `p_value` is two-sided: twice the share of resamples on the other side of 0, the sample itself counted as one more
    (Davison & Hinkley 1997, section 4.2.3), so that it is never 0.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    p_value: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired_difference(
    first: Mapping[str, Unit],
    second: Mapping[str, Unit],
    *,
    clusters: Mapping[str, str] | None = None,
    span: float | None = None,
    resolution: float = 0.0,
    seed: int = 0,
    num_resamples: int = 10_000,
) -> Difference:
    """Return the weighted mean of first minus second over units that both scored, with a bootstrap interval.

    Methods saw the same tokens, so most of what makes one unit harder than another cancels; the interval of the
    difference is narrower than the two intervals suggest.

    Args:
        first, second: by unit (a document's name, a trial); weights must agree.
        clusters: unit -> what it shares with others (a document, a haystack); whole clusters are resampled. By
            default every unit is its own.
        span: the largest that a difference can be, where there is a largest (1 for right or wrong). If all clusters
            agree, resampling shows no spread however few they are; the interval then leaves room for what is seen in
            none of n clusters (Wilson), times the span.
        resolution: what values differ by for no reason, as rounding; the interval reaches so far to either side.
        seed: of the resampling; a second call gives the same interval.

    Source: Miller, Adding Error Bars to Evals (arXiv 2411.00640), sections 2.2 and 4.2, with the bootstrap in place of
    its normal approximation.

    Raises:
        EvalError: the units differ, none came, a weight differs, or a value is not finite.
    """
    if first.keys() != second.keys() or not first:
        alone = sorted(first.keys() ^ second.keys())
        found = f"{alone[0]!r} is in one only" if alone else "nothing came"
        raise EvalError(f"paired difference: both must have scored the same units; {found}")
    names = sorted(first)
    if any(first[name].weight != second[name].weight for name in names):
        raise EvalError("paired difference: a unit has unequal weights, so the methods saw different tokens")
    values = np.array([first[name].value - second[name].value for name in names], dtype=np.float64)
    weights = np.array([first[name].weight for name in names], dtype=np.float64)
    if not np.isfinite(values).all() or (weights <= 0).any():
        raise EvalError("paired difference: a value that is not finite, or a unit without weight")
    _, cluster = np.unique([(clusters or {}).get(name, name) for name in names], return_inverse=True)
    sums, sizes = (np.bincount(cluster, weights=each).astype(np.float64) for each in (values * weights, weights))
    value = float(sums.sum() / sizes.sum())
    if len(sums) == 1:
        return Difference(value, None, None, len(names), None)
    means = _resampled(sums, sizes, seed, num_resamples)
    low, high = _wider(means, sums, sizes)
    low, high = min(low, value - resolution), max(high, value + resolution)
    if span is not None:
        low, high = max(-span, low), min(span, high)
    if span is not None and np.allclose(sums, value * sizes, rtol=0, atol=1e-9):
        unseen = span * (wilson(0, len(sums)).high or 0.0)
        low, high = max(-span, value - unseen), min(span, value + unseen)
    beyond = min(int((means <= 0).sum()), int((means >= 0).sum()))
    # Turning signs of n clusters at will, as few as 2 of 2 ** n ways are as extreme as what was seen
    p_value = max(min(1.0, 2 * (beyond + 1) / (num_resamples + 1)), 2.0 ** (1 - len(sums)))
    return Difference(value, low, high, len(names), 1.0 if abs(value) <= resolution else p_value)


def _resampled(
    sums: NDArray[np.float64], sizes: NDArray[np.float64], seed: int, num_resamples: int
) -> NDArray[np.float64]:
    """Return the weighted mean of each resample of whole clusters, a block at a time so that many clusters fit."""
    rng, block = np.random.default_rng(seed), max(1, 2_000_000 // len(sums))
    means: list[NDArray[np.float64]] = []
    for at in range(0, num_resamples, block):
        picks = rng.integers(len(sums), size=(min(block, num_resamples - at), len(sums)))
        means.append(sums[picks].sum(axis=1) / sizes[picks].sum(axis=1))
    return np.concatenate(means)


def _wider(means: NDArray[np.float64], sums: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float]:
    """Return the percentile interval, or Student's where that reaches farther: few clusters resampled vary too little.

    Source: Cameron, Gelbach & Miller, Bootstrap-Based Improvements for Inference with Clustered Errors (2008), on how
    few clusters mislead; t with one degree less than clusters is their remedy without a bootstrap.
    """
    low, high = (float(q) for q in np.quantile(means, [0.025, 0.975]))
    n, value = len(sums), float(sums.sum() / sizes.sum())
    error = math.sqrt(n / (n - 1) * float(((sums - value * sizes) ** 2).sum())) / float(sizes.sum())
    half = student(n - 1) * error
    return min(low, value - half), max(high, value + half)


def student(freedom: int) -> float:
    """Return the 97.5 % point of Student's distribution.

    Source: Abramowitz & Stegun, table 26.10 up to 10 degrees, and expansion 26.7.5 from there on (to 1e-4).
    """
    few = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(few):
        return few[freedom - 1]
    z, v = Z95, float(freedom)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def clustered_share(found: Mapping[str, tuple[int, int]]) -> Estimate:
    """Return the share of successes with a Wilson interval that counts trials for less where a cluster's agree.

    Args:
        found: (successes, trials) of each cluster, as of the trials on one text.

    The trials are divided by the design effect, the variance between clusters over the binomial one (Kish 1965), never
    below 1; where all or none succeed, nothing tells the effect, and a cluster counts as one trial.

    Raises:
        EvalError: no trials.
    """
    successes, trials = (sum(each[i] for each in found.values()) for i in (0, 1))
    whole = wilson(successes, trials)
    p, n = whole.value, len(found)
    if p in {0.0, 1.0}:
        effective = float(n)
    elif n == 1:
        effective = 1.0
    else:
        between = n / (n - 1) * sum((s - p * t) ** 2 for s, t in found.values()) / trials**2
        effective = trials / max(1.0, between / (p * (1 - p) / trials))
    low, high = _wilson(p, effective)
    return Estimate(p, low, high, trials)


class EffectiveLength(NamedTuple):
    """The largest tested length such that it and every shorter one reach the threshold; None if none does.

    `by_mean` looks at the values, `by_bound` at the lower ends of their intervals: a claim that n supports.
    """

    by_mean: int | None
    by_bound: int | None


def effective_lengths(accuracy: Mapping[int, Estimate], *, threshold: float = 0.85) -> EffectiveLength:
    """Return how far a method reaches, decided on the means and on the intervals' lower ends.

    Args:
        accuracy: by length in tokens.
        threshold: 0.2 is Position Interpolation's (arXiv 2306.15595, section 3.3), 0.856 RULER's; NoLiMa's is 0.85
            times the accuracy at the shortest length.
    """
    lows = {length: -1.0 if estimate.low is None else estimate.low for length, estimate in accuracy.items()}
    means = {length: estimate.value for length, estimate in accuracy.items()}
    return EffectiveLength(effective_length(means, threshold=threshold), effective_length(lows, threshold=threshold))


def effective_length(accuracy: Mapping[int, float], *, threshold: float = 0.85) -> int | None:
    """Return the largest tested length such that it and every shorter one reach the threshold; None if none does.

    Contiguous, so that one lucky long cell cannot claim a window; 0.85 is close to RULER's 0.856.
    """
    reached: int | None = None
    for length in sorted(accuracy):
        if accuracy[length] < threshold - 1e-9:  # a share of a share is not exact in floats
            break
        reached = length
    return reached
