"""Aggregates with intervals: token-weighted perplexity, Wilson, effective length."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
    if not nll or len(nll) != len(tokens):
        raise EvalError(f"perplexity: {len(nll)} losses for {len(tokens)} token counts; give one of each, at least one")
    values, weights = np.asarray(nll, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    if not np.isfinite(values).all() or (weights <= 0).any():
        raise EvalError("perplexity: a loss that is not finite, or a document without a scored token")
    mean = float((values * weights).sum() / weights.sum())
    if mean > MAX_NLL:
        raise EvalError(f"perplexity: {mean:.0f} nats per token has no perplexity that a float can hold")
    value = math.exp(mean)
    if len(values) == 1:
        return Estimate(value, None, None, 1)
    picks = np.random.default_rng(seed).integers(len(values), size=(num_resamples, len(values)))
    means = (values * weights)[picks].sum(axis=1) / weights[picks].sum(axis=1)
    low, high = np.exp(np.minimum(np.quantile(means, [0.025, 0.975]), MAX_NLL))
    return Estimate(value, float(low), float(high), len(values))


def wilson(successes: int, trials: int) -> Estimate:
    """Return successes/trials with the Wilson score interval at 95 %, which never leaves [0, 1].

    Source: Wilson (1927); Brown, Cai & DasGupta (2001), equation 4.

    Raises:
        EvalError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise EvalError(f"accuracy: {successes} of {trials} is no proportion; at least one trial is needed")
    p, z2 = successes / trials, Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Estimate(p, low, high, trials)


def effective_length(accuracy: Mapping[int, float], *, threshold: float = 0.85) -> int | None:
    """Return the largest tested length such that it and every shorter one reach the threshold; None if none does.

    Contiguous, so that one lucky long cell cannot claim a window; 0.85 is NoLiMa's threshold, close to RULER's 0.856.
    """
    reached: int | None = None
    for length in sorted(accuracy):
        if accuracy[length] < threshold:
            break
        reached = length
    return reached
