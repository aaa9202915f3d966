import gc
import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from evals import prefixes
from evals.nll import GROUPED
from evals.prefixes import MIN_SHARED, Query, last_hidden, prefix_tree, schedule
from rope_ext import Yarn, extend
from tests.conftest import random_llama


def seen_by(model):
    """Return the shapes that the base model is given, filled as it is called."""
    seen = []
    model.base_model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen


def hidden_by_query(model, queries, *, share=True, may_cut=lambda _n: True, **more):
    tree = prefix_tree(queries, share=share, may_cut=may_cut)
    found = {}
    for some in last_hidden(model, tree, may_cut=may_cut, **more):
        for numbers, hidden in zip(some.queries, some.hidden, strict=True):
            found |= dict.fromkeys(numbers, hidden)
    assert set(found) == set(range(len(queries)))
    return [found[i] for i in range(len(queries))]


def alone(model, query):
    with torch.inference_mode():
        return model.base_model(input_ids=torch.tensor([query.ids]), use_cache=False).last_hidden_state[
            0, -query.keep :
        ]


def check(model, queries, **more):
    for got, query in zip(hidden_by_query(model, queries, **more), queries, strict=True):
        # fp32 sums in another order; hidden states of order 1
        torch.testing.assert_close(got, alone(model, query), rtol=0, atol=2e-4)


def ids(seed, num):
    return tuple(random.Random(seed).randrange(96) for _ in range(num))


def grid(lengths, positions, trials):
    """Return the queries of a passkey grid on absolute positions: filler, a line of 10, filler, a line of 8."""
    filler = ids(0, 400)
    return [
        Query((*filler[:p], *ids(f"{p}/{t}", 10), *filler[p : n - 18], *ids("question", 8)), 3)
        for p in positions
        for n in lengths
        for t in range(trials)
        if p + 30 <= n
    ]


def test_a_passkey_grid_shares_what_it_can(llama):
    queries = grid((200, 300, 380), (40, 150, 260), 4)
    seen = seen_by(llama)
    hidden_by_query(llama, queries)
    computed = sum(rows * tokens for rows, tokens in seen)
    assert computed == prefix_tree(queries).num_tokens
    whole = sum(len(query.ids) for query in queries)
    assert prefix_tree(queries, share=False).num_tokens == whole
    # filler to 260 once; from there each trial at each position to its longest end, a question at each shorter one
    assert computed < 0.45 * whole
    # branches of unequal beginnings that have grown equally long go together
    assert max(rows for rows, _ in seen) > 4
    check(llama, queries)


def test_what_is_held_stays_within_the_budget(llama):
    """Where all branches do not fit side by side, one after another is computed, and its caches are let go."""
    queries = grid((200, 300, 380), (40, 150, 260), 4)
    tree = prefix_tree(queries)
    wide, deep = (schedule(tree, lambda _node: 4, deep=each) for each in (False, True))
    assert sorted(id(n) for s in wide.steps for n in s.nodes) == sorted(id(n) for s in deep.steps for n in s.nodes)
    assert deep.peak_tokens < wide.peak_tokens
    for plan in (wide, deep):  # a step continues what an earlier one has made
        for number, (nodes, sources) in enumerate(plan.steps):
            assert len({node.shape for node in nodes}) == 1
            assert all(step < number and plan.steps[step].nodes[row].end == nodes[0].start for step, row in sources)
    # 2 layers x keys and values x 2 heads x 16 numbers in fp32; half of the budget is for caches
    budget = 2 * wide.peak_tokens * 2 * 2 * 2 * 16 * 4
    alive = caches_alive(llama)
    hidden_by_query(llama, queries, memory_budget=budget, max_rows=4)
    most = max(alive)
    alive.clear()
    hidden_by_query(llama, queries, memory_budget=budget - 1, max_rows=4)
    assert max(alive) < most
    check(llama, queries, memory_budget=budget - 1, max_rows=4)


def caches_alive(model):
    """Return how many numbers the caches in memory hold, after each forward."""
    alive = []

    def count(*_args):
        held = {id(t): t.numel() for c in gc.get_objects() if type(c) is DynamicLayer for t in (c.keys, c.values)}
        alive.append(sum(held.values()))

    model.base_model.register_forward_hook(count)
    return alive


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_rows", [None, 1, 3])
@pytest.mark.parametrize("budget", [2**31, 2**21, 400_000])
def test_any_budget_and_any_number_of_rows_give_the_same(llama, share, max_rows, budget):
    check(llama, grid((200, 380), (40, 150), 3), share=share, max_rows=max_rows, memory_budget=budget)


def test_the_budget_bounds_tokens_and_rows(llama):
    seen = seen_by(llama)
    hidden_by_query(llama, grid((200, 380), (40, 150), 6), memory_budget=2**21)
    wide = max(rows * tokens for rows, tokens in seen)
    seen.clear()
    hidden_by_query(llama, grid((200, 380), (40, 150), 6), memory_budget=2**19)
    narrow = max(rows * tokens for rows, tokens in seen)
    assert narrow < wide / 2


tails = st.lists(st.integers(0, 95), min_size=4, max_size=60).map(tuple)


@given(
    shape=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 120), tails, st.integers(1, 4)), min_size=1, max_size=9),
    share=st.booleans(),
    blocked=st.sampled_from([0, 60, 100]),
)
def test_whatever_is_asked_for_is_what_each_gives_alone(shape, share, blocked):
    """Beginnings in common or not, one a part of another, repeated, of any length, with places that may not be cut."""
    model = random_llama()
    trunks = [ids(f"trunk {i}", 120) for i in range(4)]
    queries = [Query((*trunks[which][:cut], *tail), keep) for which, cut, tail, keep in shape]
    check(model, [*queries, queries[0]], share=share, may_cut=lambda n: n > blocked)


def test_equal_queries_are_computed_once(llama):
    queries = [Query(ids(1, 90), 2)] * 5
    seen = seen_by(llama)
    check(llama, queries)
    assert seen[0] == (1, 90)
    assert prefix_tree(queries).num_tokens == 90


def test_short_beginnings_are_not_worth_a_forward():
    def tree(common):
        return prefix_tree([Query((*ids(0, common), i, *ids(i, 50)), 1) for i in range(3)])

    assert len(tree(MIN_SHARED - 1).roots) == 3
    assert len(tree(MIN_SHARED).roots) == 1


def test_wanted_positions_are_never_shared():
    """Two prompts that agree up to their answers' last id: the cut leaves room for all that is wanted of both."""
    common = ids(0, 100)
    tree = prefix_tree([Query((*common, 1), 6), Query((*common, 2), 6)])
    [root] = tree.roots
    assert root.end == 95
    assert {child.end for child in root.children} == {101}


def test_no_cut_where_the_frequencies_differ():
    queries = [Query((*ids(0, 100), i, *ids(i, 50)), 1) for i in range(3)]
    assert [node.start for node in prefix_tree(queries, may_cut=lambda n: n > 100).roots] == [0, 0, 0]
    assert prefix_tree(queries, may_cut=lambda n: n >= 100).roots[0].end == 100


def test_caches_of_a_model_with_a_sliding_window():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, sliding_window=4096,
    )  # fmt: skip
    check(MistralForCausalLM(config).eval(), grid((200, 380), (40, 150), 3))


def test_under_a_patch(llama):
    with extend(llama, Yarn(), factor=8):
        check(llama, grid((200, 380), (40, 150), 3))


def test_the_switch_of_transformers_is_left_as_it_was(llama, monkeypatch):
    for before in (None, "0"):
        monkeypatch.delenv(GROUPED, raising=False)
        if before is not None:
            monkeypatch.setenv(GROUPED, before)
        seen = []
        handle = llama.base_model.register_forward_hook(lambda *_args, seen=seen: seen.append(os.environ.get(GROUPED)))
        check(llama, grid((200, 380), (40, 150), 3))
        handle.remove()
        assert os.environ.get(GROUPED) == before
        assert "1" in seen or before == "0"


def test_a_thousand_forks_below_one_another():
    filler = ids(0, 40_000)
    queries = [Query((*filler[:at], 95, 94, *filler[at : at + 40]), 1) for at in range(40, 40_000, 40)]
    tree = prefix_tree(queries)
    assert tree.num_tokens < 3 * 40_000
    assert len(schedule(tree, lambda _node: 8, deep=True).steps) > 1000


def test_nothing_asked_nothing_done(llama):
    assert list(last_hidden(llama, prefix_tree([]))) == []
    assert prefixes.prefix_tree([]).num_tokens == 0
