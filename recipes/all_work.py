"""All that a comparison has to score under one method, and what it takes."""

from collections.abc import Hashable, Iterator
from functools import partial
from itertools import chain

from recipes.benchmark_work import benchmark_work
from recipes.ranks import Ranks
from recipes.retrieval import passkey_work
from recipes.setting import Setting
from recipes.work import Cost, Subject, Work, document_work
from rope_ext.plan import Method


def all_work(setting: Setting, subject: Subject, ranks: Ranks) -> Iterator[Work]:
    """Yield one process's share of the work under one method."""
    return chain(
        document_work(setting, subject, ranks),
        passkey_work(setting, subject, ranks),
        benchmark_work(setting, subject, ranks),
    )


def total_cost(setting: Setting) -> Cost:
    """Return what this process's share of the whole comparison takes, for a progress bar's estimate.

    Methods whose frequencies depend on the length alike take alike.
    """
    total = Cost()
    known: dict[tuple[Hashable, ...], Cost] = {}
    for method in setting.methods:
        key = partial(_key, method, setting)
        longest = longest_input(setting)
        keys = tuple(key(length) for length in range(1, longest + 1))
        if keys not in known:
            works = all_work(setting, Subject(key=key, digest="", shared={}), setting.ranks)
            known[keys] = sum_of(work.cost(setting.model) for work in works)
        total = total.plus(known[keys])
    return total


def longest_input(setting: Setting) -> int:
    """Return the tokens of the longest sequence that is computed."""
    prompts = (p.length for some in setting.prompts.values() for p in some)
    documents = (document for column in setting.benchmarks for document in column.documents)
    return max([*setting.recipe.lengths, *prompts, *(n for each in documents for n in each.stretches)])


def sum_of(costs: Iterator[Cost]) -> Cost:
    """Return all of them together."""
    total = Cost()
    for cost in costs:
        total = total.plus(cost)
    return total


def _key(method: Method, setting: Setting, seq_len: int) -> Hashable:
    return method.frequency_key(setting.geometry, context=int(setting.recipe.context or 0), seq_len=seq_len)
