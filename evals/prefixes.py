"""The ends of many sequences, with every beginning that several of them share computed once.

Sequences are put into a prefix tree. An edge is computed over the key-value cache of its parent, a node hands its cache
to every child, and children of equal shape go as rows of one batch:

    filler ----+---- filler ----+---- filler ...
               |                +-- needle 3 | needle 4           two rows: the same shape
               +-- needle 1 | needle 2
                      +---- filler --+---- filler --+-- question  two rows again, and so at every fork
                                     +-- question

Attention is causal, so a cut changes no number beyond the order of fp32 sums, as long as the frequencies are the same
on either side of it.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from evals.nll import MEMORY_BUDGET, cache_bytes_per_token, itemsize_of, tokens_per_chunk

MIN_SHARED = 32
"""The fewest tokens that are worth a forward of their own."""
TOKENS_PER_FORWARD = 16_384
"""The most tokens in one forward, rows times their length; more are no faster."""
PIECE = 512
"""Tokens of a row in one forward over a cache: attention under a mask computes what it masks, half of a piece's own
square."""


class Query(NamedTuple):
    """Ids of one sequence, of which the last `keep` positions are wanted."""

    ids: tuple[int, ...]
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """Tokens start..end of the sequences `queries`, and what follows; a leaf is the end of those sequences.

    Nodes with one `shape` need the same forwards: equally many tokens, from the same start, and so at every node below.
    """

    start: int
    end: int
    queries: tuple[int, ...]
    children: tuple["Node", ...]
    shape: int
    longest: int

    @property
    def is_leaf(self) -> bool:
        """Whether sequences end here."""
        return not self.children


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """Sequences and how they are to be computed."""

    queries: tuple[Query, ...]
    roots: tuple[Node, ...]

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of every stretch of tokens that is computed."""
        pending = list(self.roots)
        while pending:
            node = pending.pop()
            yield node.start, node.end
            pending += node.children

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return sum(end - start for start, end in self.edges())


def prefix_tree(
    queries: Sequence[Query], *, share: bool = True, may_cut: Callable[[int], bool] = lambda _length: True
) -> PrefixTree:
    """Return the tree of the sequences.

    Args:
        queries: none of them need be distinct.
        share: without it every sequence is a tree of its own, computed whole.
        may_cut: whether a cache may end at a length, which is where the frequencies there are those at the end.
    """
    return PrefixTree(queries=tuple(queries), roots=tuple(_Planter(queries, share=share, may_cut=may_cut).roots()))


class _Planter:
    def __init__(self, queries: Sequence[Query], *, share: bool, may_cut: Callable[[int], bool]) -> None:
        self.queries, self.share, self.may_cut = queries, share, may_cut
        self.rows = [np.asarray(query.ids, dtype=np.int64) for query in queries]
        self.shapes: dict[object, int] = {}

    def roots(self) -> list[Node]:
        order = sorted(range(len(self.queries)), key=lambda i: self.queries[i])
        if not order:
            return []
        if not self.share:
            return [self.leaf((i,), 0) for i in order]
        return self.grow(order, 0)

    def grow(self, members: Sequence[int], start: int) -> list[Node]:
        """Return the nodes from `start` on of sorted sequences that agree up to there."""
        first, last = members[0], members[-1]
        if self.queries[first] == self.queries[last]:
            return [self.leaf(tuple(members), start)]
        # Sorted, so what the outer two share, all share. The wanted positions stay on one side of a cut.
        room = [len(self.rows[i]) - self.queries[i].keep for i in members]
        cut = min(_common(self.rows[first], self.rows[last]), *room)
        if cut - start >= MIN_SHARED and self.may_cut(cut):
            children = [node for group in self.split(members, cut) for node in self.grow(group, cut)]
            return [self.branch(tuple(members), start, cut, children)]
        return [node for group in self.split(members, cut) for node in self.grow(group, start)]

    def split(self, members: Sequence[int], cut: int) -> Iterator[list[int]]:
        """Yield the sequences by their token at a cut; those that cannot be cut later, each query by itself."""
        groups: dict[object, list[int]] = defaultdict(list)
        for i in members:
            at_its_end = len(self.rows[i]) - self.queries[i].keep == cut
            groups[self.queries[i] if at_its_end else int(self.rows[i][cut])].append(i)
        yield from groups.values()

    def leaf(self, members: tuple[int, ...], start: int) -> Node:
        query = self.queries[members[0]]
        end = len(query.ids)
        shape = self.number((start, end, query.keep))
        return Node(start=start, end=end, queries=members, children=(), shape=shape, longest=end)

    def branch(self, members: tuple[int, ...], start: int, end: int, children: list[Node]) -> Node:
        # The longest first: what does not fit into memory shows early, and what is shorter is cut back from it
        children.sort(key=lambda node: (-node.longest, node.shape))
        shape = self.number((start, end, tuple(child.shape for child in children)))
        longest = max(child.longest for child in children)
        return Node(start=start, end=end, queries=members, children=tuple(children), shape=shape, longest=longest)

    def number(self, shape: object) -> int:
        return self.shapes.setdefault(shape, len(self.shapes))


def _common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    unequal = np.flatnonzero(first[:length] != second[:length])
    return int(unequal[0]) if len(unequal) else length


class Found(NamedTuple):
    """The hidden states at the ends of sequences, shape (rows, keep, width); `queries` has the numbers of each row."""

    queries: list[tuple[int, ...]]
    hidden: Tensor


def last_hidden(
    model: PreTrainedModel,
    tree: PrefixTree,
    *,
    may_cut: Callable[[int], bool] = lambda _length: True,
    memory_budget: int = MEMORY_BUDGET,
    max_rows: int | None = None,
) -> Iterator[Found]:
    """Yield the hidden states before the output head at the last positions of every sequence of a tree.

    Args:
        may_cut: as for `prefix_tree`; long edges are cut into pieces where it allows.
        memory_budget: bytes; half bounds the activations of a forward, half the keys and values of its rows (a single
            row is computed whatever it takes).
        max_rows: sequences in one forward; as many as fit by default.
    """
    runner = _Runner(model, tree, may_cut, memory_budget, max_rows)
    pending: dict[int, list[Node]] = defaultdict(list)
    for node in tree.roots:
        pending[node.shape].append(node)
    for nodes in sorted(pending.values(), key=lambda same: -same[0].longest):
        size = runner.rows_of(nodes[0])
        for at in range(0, len(nodes), size):
            yield from runner.run(nodes[at : at + size], None)


class _Runner:
    def __init__(
        self,
        model: PreTrainedModel,
        tree: PrefixTree,
        may_cut: Callable[[int], bool],
        memory_budget: int,
        max_rows: int | None,
    ) -> None:
        self.model, self.base = model, model.base_model
        self.queries, self.may_cut, self.max_rows = tree.queries, may_cut, max_rows
        self.cache_name = "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"
        windowed = getattr(model.config, "sliding_window", None) is not None
        self.takes_mask = model.config._attn_implementation == "sdpa" and not windowed  # noqa: SLF001
        self.cache_bytes = cache_bytes_per_token(model.config, itemsize_of(model))
        self.budget = memory_budget

    def rows_of(self, node: Node) -> int:
        """Return how many nodes of one shape go as rows of one forward."""
        pending, longest_edge = [node], 0
        while pending:
            each = pending.pop()
            longest_edge = max(longest_edge, each.end - each.start)
            pending += each.children
        fit = self.budget // 2 // (self.cache_bytes * node.longest)
        return max(1, min(fit, self.tokens(node.longest) // longest_edge, self.max_rows or fit))

    def tokens(self, longest: int) -> int:
        """Return how many tokens, over all rows, one forward takes."""
        fit = tokens_per_chunk(
            self.model.config, itemsize_of(self.model), longest, self.budget, most=TOKENS_PER_FORWARD
        )
        return max(1, fit)

    def run(self, nodes: Sequence[Node], cache: DynamicCache | None) -> Iterator[Found]:
        """Yield what is wanted below nodes of one shape, one a row of the cache, which is left as it came."""
        first = nodes[0]
        ids = [self.queries[node.queries[0]].ids[first.start : first.end] for node in nodes]
        tokens = torch.tensor(ids, device=self.model.device)
        keep = self.queries[first.queries[0]].keep if first.is_leaf else 0
        size = max(1, self.tokens(first.longest) // len(nodes))
        ends = self.ends(first.start, first.end - keep, first.end, size if cache is None else min(size, PIECE))
        if cache is None and (len(ends) > 1 or not first.is_leaf):
            cache = DynamicCache()
        hidden = None
        for start, end in pairwise([first.start, *ends]):
            hidden = self.forward(tokens[:, start - first.start : end - first.start], cache)
        if first.is_leaf:
            assert hidden is not None
            yield Found([node.queries for node in nodes], hidden[:, -keep:].clone())
        else:
            assert cache is not None
            del hidden, tokens  # what is below may go deep, and need the room
            yield from self.below(nodes, cache)
        if cache is not None and first.start:
            cache.crop(first.start - first.end)

    def ends(self, start: int, latest: int, end: int, size: int) -> list[int]:
        """Return where the pieces of an edge end: in one piece if it fits, or if frequencies change on the way."""
        cuts = [*range(start + size, latest, size)]
        return [*cuts, end] if all(map(self.may_cut, cuts)) else [end]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: DynamicCache | None) -> Tensor:
        if cache is None:
            return self.base(input_ids=tokens, use_cache=False).last_hidden_state
        num_cached, num_new = cache.get_seq_length(), tokens.shape[1]
        more: dict[str, Any] = {self.cache_name: cache}
        if num_cached and num_new > 1 and self.takes_mask:
            # What stock code would make too, but once for every row
            mask = torch.full((num_new, num_cached + num_new), -torch.inf, dtype=self.model.dtype, device=tokens.device)
            positions = torch.arange(num_cached, num_cached + num_new, device=tokens.device)
            more |= {"attention_mask": mask.triu(num_cached + 1)[None, None], "position_ids": positions[None]}
        return self.base(input_ids=tokens, use_cache=True, **more).last_hidden_state

    def below(self, nodes: Sequence[Node], cache: DynamicCache) -> Iterator[Found]:
        """Run the children, all of one shape together: in place where each row has one, else on copies of rows."""
        slots: dict[int, list[int]] = defaultdict(list)
        for slot, child in enumerate(nodes[0].children):  # nodes of one shape have their children in one order
            slots[child.shape].append(slot)
        for same in slots.values():
            children = [(row, node.children[slot]) for row, node in enumerate(nodes) for slot in same]
            size = self.rows_of(children[0][1])
            if len(children) == len(nodes) <= size:
                yield from self.run([child for _, child in children], cache)
                continue
            for at in range(0, len(children), size):
                some = children[at : at + size]
                yield from self.run([child for _, child in some], _rows(cache, [row for row, _ in some]))


@torch.inference_mode()
def _rows(cache: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """Return a cache that holds copies of these rows, and leave the given one alone."""
    chosen = DynamicCache()
    for number, layer in enumerate(cache.layers):
        keys, values = (cast("Tensor", getattr(layer, name))[list(rows)] for name in ("keys", "values"))
        chosen.update(keys, values, number)
    return chosen
