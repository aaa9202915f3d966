"""Perplexity by protocol. A number without its protocol means little: published ones differ by more than methods do.

    prefix        mean NLL of the first L tokens, everything before each as its context
    sliding       windows of L tokens moved by a stride; each token scored once, with at least L - stride before it
    yarn-legacy   the sliding windows again, averaged unweighted: mean of the windows' means
    last-k        mean NLL of the last k of the first L tokens
    by-position   mean NLL of the tokens between two positions, from one forward over the longest length
    gain          last-k at L minus the NLL of the same k tokens with only the original window before them

BOS stands at index 0 of every window if the document has one, and counts as one of the L; nothing is scored twice.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evals.corpora import TokenDocument
from evals.errors import EvalError
from evals.nll import MEMORY_BUDGET, token_nll

PROTOCOL = "prefix"
FrequencyKey = Callable[[int], Hashable]


class Scored(NamedTuple):
    """The mean NLL (nats per token) of `tokens` scored tokens, seen through `windows` windows."""

    nll: float
    tokens: int
    windows: int = 1


def group_lengths(lengths: Sequence[int], frequency_key: FrequencyKey) -> list[tuple[int, tuple[int, ...]]]:
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


def nll_by_length(
    model: PreTrainedModel,
    document: TokenDocument,
    lengths: Sequence[int],
    *,
    frequency_key: FrequencyKey,
    memory_budget: int = MEMORY_BUDGET,
) -> dict[int, Tensor]:
    """Return the NLL of tokens 1..L-1 of the document for every L: float64, nats, shape (L - 1,).

    Attention is causal, so one forward over the longest length gives every shorter one, as long as the frequencies
    are the same at both: that is what a frequency key says.

    Raises:
        EvalError: the document is shorter than a length, or see `group_lengths` and `token_nll`.
    """
    found: dict[int, Tensor] = {}
    for longest, group in group_lengths(lengths, frequency_key):
        _check_length(document, longest)
        nll = token_nll(model, document.ids[:longest], frequency_key=frequency_key, memory_budget=memory_budget)
        found |= {length: nll[: length - 1] for length in group}
    return dict(sorted(found.items()))


def prefix_nll(
    model: PreTrainedModel,
    document: TokenDocument,
    lengths: Sequence[int],
    *,
    frequency_key: FrequencyKey,
    memory_budget: int = MEMORY_BUDGET,
) -> dict[int, float]:
    """Return the mean NLL (nats per token) of the document's first L tokens, for every L: exp of it is perplexity.

    Raises:
        EvalError: as `nll_by_length`.
    """
    found = nll_by_length(model, document, lengths, frequency_key=frequency_key, memory_budget=memory_budget)
    return {length: float(nll.mean()) for length, nll in found.items()}


def last_k(nll: Tensor, k: int) -> Scored:
    """Return the mean NLL of the last k tokens of a sequence's NLL, shape (L - 1,): what far context does for them.

    Raises:
        EvalError: there are fewer than k, or k is below 1.
    """
    if not 1 <= k <= len(nll):
        raise EvalError(f"last-k: {k} of {len(nll)} scored tokens; give 1 to {len(nll)}")
    return Scored(float(nll[-k:].mean()), k)


def by_position(nll: Tensor, edges: Sequence[int]) -> dict[int, Scored]:
    """Return the mean NLL of tokens at positions low..high-1 for each neighbouring pair of edges, by its high end.

    Position i is that of the token predicted, so position 0 (nothing before it) is in no bucket.

    Raises:
        EvalError: edges that do not rise, or reach beyond the sequence.
    """
    edges = [max(1, edge) for edge in edges]
    if len(edges) < 2 or any(low >= high for low, high in pairwise(edges)):
        raise EvalError(f"by-position: edges {edges} do not rise; give at least two")
    if edges[-1] > len(nll) + 1:
        raise EvalError(f"by-position: edge {edges[-1]} lies beyond the {len(nll) + 1} tokens measured")
    return {high: Scored(float(nll[low - 1 : high - 1].mean()), high - low) for low, high in pairwise(edges)}


class Window(NamedTuple):
    """Ids to show, and how many of the last ones to score."""

    ids: tuple[int, ...]
    last: int


def windows(document: TokenDocument, length: int, *, stride: int, bos: int | None) -> Iterator[Window]:
    """Yield the windows of the sliding protocol over a whole document: at most `length` ids each, BOS first if any.

        text     t0 t1 t2 t3 t4 t5 t6          length 4 without BOS, stride 2
        window   [t0 t1 t2 t3]                 scores t1 t2 t3
                       [t2 t3 t4 t5]           scores t4 t5
                             [t4 t5 t6]        scores t6: the last one is shorter, and kept

    Source: Press et al., Shortformer (arXiv 2012.15832), section 2.

    Raises:
        EvalError: a length below 2, or a stride that is not between 1 and what a window holds besides BOS.
    """
    room = length - (bos is not None)
    if room < 2 or not 1 <= stride <= room:
        raise EvalError(
            f"sliding: length {length} and stride {stride}; a stride of 1 to {max(1, room)} moves the window"
        )
    head = () if bos is None else (bos,)
    text = document.ids[len(head) :]
    if document.ids[: len(head)] != head:
        raise EvalError(f"sliding: {document.name} does not begin with BOS {bos}")
    scored = 1 - len(head)  # without BOS nothing stands before the first token
    for start in range(0, len(text), stride):
        end = min(start + room, len(text))
        if end > scored:
            yield Window((*head, *text[start:end]), end - scored)
        scored = end
        if end == len(text):
            return


def sliding_nll(
    model: PreTrainedModel,
    document: TokenDocument,
    length: int,
    *,
    stride: int,
    bos: int | None,
    frequency_key: FrequencyKey,
    memory_budget: int = MEMORY_BUDGET,
) -> tuple[Scored, Scored]:
    """Return the token-weighted mean NLL of a document under the sliding protocol, and the yarn-legacy mean.

    The two differ only in the weight of windows: the first window scores `length` tokens, each later one `stride`,
    and the legacy mean counts them alike, as the YaRN authors' script does before it takes exp.

    Raises:
        EvalError: as `windows` and `token_nll`.
    """
    sums: list[float] = []
    counts: list[int] = []
    for window in windows(document, length, stride=stride, bos=bos):
        nll = token_nll(model, window.ids, last=window.last, frequency_key=frequency_key, memory_budget=memory_budget)
        sums.append(float(nll.sum()))
        counts.append(window.last)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    tokens = sum(counts)
    return Scored(sum(sums) / tokens, tokens, len(counts)), Scored(sum(means) / len(means), tokens, len(counts))


def long_context_gain(
    model: PreTrainedModel,
    document: TokenDocument,
    length: int,
    *,
    original: int,
    k: int,
    bos: int | None,
    frequency_key: FrequencyKey,
    memory_budget: int = MEMORY_BUDGET,
) -> Scored:
    """Return NLL of tokens L-k..L-1 with L tokens of context minus with the `original` last ones: below 0 is a gain.

    Both windows end at the same token and score the same k; only how far back they reach differs.

    Raises:
        EvalError: the original window is not longer than k and at most L, or see `token_nll`.
    """
    if not k < original <= length:
        raise EvalError(f"gain: k {k}, original window {original} and length {length} must rise")
    _check_length(document, length)
    head = () if bos is None else (bos,)
    near = (*head, *document.ids[length - original + len(head) : length])
    far = document.ids[:length]
    both = torch.stack(
        [token_nll(model, ids, last=k, frequency_key=frequency_key, memory_budget=memory_budget) for ids in (far, near)]
    )
    return Scored(float((both[0] - both[1]).mean()), k, 2)


def _check_length(document: TokenDocument, length: int) -> None:
    if length > len(document.ids):
        raise EvalError(f"perplexity: {document.name} has {len(document.ids)} tokens, {length} asked")
