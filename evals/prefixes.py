"""The ends of many sequences, with every beginning that several of them share computed once.

Sequences are put into a prefix tree. An edge is computed over the key-value cache of its parent, a node hands its cache
to every child, and nodes of equal shape go as rows of one batch, whichever parents they have:

    filler ----+---- filler ----+---- filler ...
               |                +-- needle 3 | needle 4           two rows: the same shape
               +-- needle 1 | needle 2
                      +---- filler --+---- filler --+-- question  two rows again, and so at every fork
                                     +-- question

Attention is causal, so a cut changes no number beyond the order of fp32 sums, as long as the frequencies are the same
on either side of it.
"""

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from evals.nll import MEMORY_BUDGET, cache_bytes_per_token, grouped_heads, itemsize_of, tokens_per_chunk

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


class _Growth(NamedTuple):
    """Sequences whose nodes from `start` on belong to `siblings`; with `closing`, whose (end, children) are ready."""

    members: Sequence[int]
    start: int
    siblings: list[Node]
    closing: tuple[int, list[Node]] | None = None


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
        """Return the nodes from `start` on of sorted sequences that agree up to there.

        By a stack of its own: a grid of many positions has as many forks, one below another.
        """
        grown: list[Node] = []
        pending: list[_Growth] = [_Growth(members, start, grown)]
        while pending:
            members, start, siblings, closing = pending.pop()
            if closing is not None:
                siblings.append(self.branch(tuple(members), start, *closing))
                continue
            first, last = members[0], members[-1]
            if self.queries[first] == self.queries[last]:
                siblings.append(self.leaf(tuple(members), start))
                continue
            # Sorted, so what the outer two share, all share. The wanted positions stay on one side of a cut.
            room = [len(self.rows[i]) - self.queries[i].keep for i in members]
            cut = min(_common(self.rows[first], self.rows[last]), *room)
            if cut - start >= MIN_SHARED and self.may_cut(cut):
                children: list[Node] = []
                pending.append(_Growth(members, start, siblings, (cut, children)))
                pending += [_Growth(group, cut, children) for group in self.split(members, cut)]
            else:
                pending += [_Growth(group, start, siblings) for group in self.split(members, cut)]
        return grown

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


class Step(NamedTuple):
    """One forward: nodes of one shape, and for each the (step, row) whose cache it continues; none for roots."""

    nodes: tuple[Node, ...]
    sources: tuple[tuple[int, int], ...]


class Schedule(NamedTuple):
    """Steps in an order in which each finds its caches made, and the most tokens whose keys and values are held."""

    steps: list[Step]
    peak_tokens: int


def schedule(tree: PrefixTree, rows_of: Callable[[Node], int], *, deep: bool) -> Schedule:
    """Return how to compute a tree.

    Args:
        rows_of: how many nodes go into one forward, as rows.
        deep: go down one branch after another, which holds few caches; otherwise from the shortest beginnings on, which
            lets branches that have grown equally long go together.
    """
    pool: dict[int, list[tuple[Node, tuple[int, int] | None]]] = defaultdict(list)
    for node in tree.roots:
        pool[node.shape].append((node, None))
    steps: list[Step] = []
    waiting: list[int] = []  # children of each step that are still to come
    held = peak = 0
    while pool:
        choose = max if deep else min
        shape = choose(pool, key=lambda each: (pool[each][0][0].start, pool[each][0][0].longest))
        entries = pool.pop(shape)
        some, rest = entries[: rows_of(entries[0][0])], entries[rows_of(entries[0][0]) :]
        if rest:
            pool[shape] = rest
        nodes, sources = tuple(node for node, _ in some), tuple(source for _, source in some if source is not None)
        own = len(nodes) * nodes[0].end
        peak = max(peak, held + own)
        for row, node in enumerate(nodes):
            for child in node.children:
                pool[child.shape].append((child, (len(steps), row)))
        waiting.append(sum(len(node.children) for node in nodes))
        steps.append(Step(nodes, sources))
        held += own if waiting[-1] else 0
        for step, _ in sources:
            waiting[step] -= 1
            if not waiting[step]:
                held -= len(steps[step].nodes) * steps[step].nodes[0].end
    return Schedule(steps, peak)


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
        memory_budget: bytes; half bounds the activations of a forward, half the keys and values that are held (a single
            row is computed whatever it takes).
        max_rows: sequences in one forward; as many as fit by default.
    """
    runner = _Runner(model, may_cut, memory_budget, max_rows)
    plan = schedule(tree, runner.rows_of, deep=False)
    if plan.peak_tokens * runner.cache_bytes > memory_budget // 2:
        plan = schedule(tree, runner.rows_of, deep=True)
    waiting = Counter(step for each in plan.steps for step, _ in each.sources)
    caches: dict[int, DynamicCache] = {}
    for number, (nodes, sources) in enumerate(plan.steps):
        cache = _continued(caches, sources) if sources else None
        hidden, cache = runner.run([tree.queries[node.queries[0]] for node in nodes], nodes[0], cache)
        if nodes[0].is_leaf:
            yield Found([node.queries for node in nodes], hidden)
        else:
            assert cache is not None
            caches[number] = cache
        for step, _ in sources:
            waiting[step] -= 1
            if not waiting[step]:
                del caches[step]


class _Runner:
    def __init__(
        self, model: PreTrainedModel, may_cut: Callable[[int], bool], memory_budget: int, max_rows: int | None
    ) -> None:
        self.model, self.base = model, model.base_model
        self.may_cut, self.max_rows, self.budget = may_cut, max_rows, memory_budget
        self.cache_name = "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"
        windowed = getattr(model.config, "sliding_window", None) is not None
        self.takes_mask = model.config._attn_implementation == "sdpa" and not windowed  # noqa: SLF001
        self.cache_bytes = cache_bytes_per_token(model.config, itemsize_of(model))

    def rows_of(self, node: Node) -> int:
        """Return how many nodes of one shape go as rows of one forward."""
        fit = self.budget // 2 // (self.cache_bytes * node.end)
        return max(1, min(fit, self.tokens(node.end) // min(node.end - node.start, PIECE), self.max_rows or fit))

    def tokens(self, longest: int) -> int:
        """Return how many tokens, over all rows, one forward takes."""
        config, itemsize = self.model.config, itemsize_of(self.model)
        return tokens_per_chunk(config, itemsize, longest, self.budget, most=TOKENS_PER_FORWARD)

    def run(
        self, queries: Sequence[Query], node: Node, cache: DynamicCache | None
    ) -> tuple[Tensor, DynamicCache | None]:
        """Return the last hidden states of an edge, one row a query, and the cache, which the edge has made longer."""
        tokens = torch.tensor([query.ids[node.start : node.end] for query in queries], device=self.model.device)
        keep = queries[0].keep if node.is_leaf else 1
        size = max(1, self.tokens(node.end) // len(queries))
        ends = self.ends(node.start, node.end - keep, node.end, size if cache is None else min(size, PIECE))
        if cache is None and (len(ends) > 1 or not node.is_leaf):
            cache = DynamicCache()
        hidden = None
        for start, end in pairwise([node.start, *ends]):
            hidden = self.forward(tokens[:, start - node.start : end - node.start], cache)
        assert hidden is not None
        return hidden[:, -keep:].clone(), cache

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
        with grouped_heads(tokens.device):
            return self.base(input_ids=tokens, use_cache=True, **more).last_hidden_state


@torch.inference_mode()
def _continued(caches: dict[int, DynamicCache], sources: Sequence[tuple[int, int]]) -> DynamicCache:
    """Return a cache of the rows that are named, in that order, and leave the caches that they come from alone."""
    runs: list[tuple[DynamicCache, list[int]]] = []
    for step, row in sources:
        if not runs or runs[-1][0] is not caches[step]:
            runs.append((caches[step], []))
        runs[-1][1].append(row)
    first, rows = runs[0]
    # The same rows of one cache: its tensors can be shared, as a cache that grows makes new ones
    same = len(runs) == 1 and rows == list(range(_num_rows(first)))
    continued = copy.copy(first)
    continued.layers = [copy.copy(layer) for layer in first.layers]
    for number, layer in enumerate(continued.layers if not same else ()):
        for name in ("keys", "values"):
            parts = [cast("Tensor", getattr(cache.layers[number], name))[chosen] for cache, chosen in runs]
            setattr(layer, name, torch.cat(parts) if len(parts) > 1 else parts[0])
    return continued


def _num_rows(cache: DynamicCache) -> int:
    return len(cast("Tensor", cache.layers[0].keys))  # pyright: ignore[reportAttributeAccessIssue]  (a dynamic layer)
