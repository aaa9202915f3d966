"""Perplexity of the first L tokens of each document, for many L at once.

Protocol "prefix": exp of the mean NLL of tokens 1..L-1 given everything before them, BOS at index 0 counting as one
of the L. Attention is causal, so one forward over the longest length gives every shorter one, as long as the
frequencies are the same at both: that is what a frequency key says.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from transformers import PreTrainedModel

from evals.corpora import TokenDocument
from evals.errors import EvalError
from evals.nll import token_nll

PROTOCOL = "prefix"


def group_lengths(
    lengths: Sequence[int], frequency_key: Callable[[int], Hashable]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (longest, all its lengths) of each group of lengths that may share one forward, longest group first.

    Raises:
        EvalError: no lengths, or one below 2.
    """
    if not lengths or min(lengths) < 2:
        raise EvalError(f"perplexity: lengths {list(lengths)}; at least one is needed and each must be 2 or more")
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for length in sorted(set(lengths)):
        groups[frequency_key(length)].append(length)
    return sorted(((max(group), tuple(group)) for group in groups.values()), reverse=True)


def prefix_nll(
    model: PreTrainedModel,
    document: TokenDocument,
    lengths: Sequence[int],
    *,
    frequency_key: Callable[[int], Hashable],
) -> dict[int, float]:
    """Return the mean NLL (nats per token) of the document's first L tokens, for every L in `lengths`.

    Each mean is over L - 1 scored tokens, summed in float64.

    Raises:
        EvalError: the document is shorter than a length, or see `group_lengths` and `token_nll`.
    """
    means: dict[int, float] = {}
    for longest, group in group_lengths(lengths, frequency_key):
        if longest > len(document.ids):
            raise EvalError(f"perplexity: {document.name} has {len(document.ids)} tokens, {longest} asked")
        nll = token_nll(model, document.ids[:longest])
        means |= {length: float(nll[: length - 1].mean()) for length in group}
    return dict(sorted(means.items()))
