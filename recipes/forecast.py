"""What a comparison would measure and cost, without measuring it: `rope-ext compare --dry-run`."""

from typing import NamedTuple

from rich import box
from rich.table import Table

from evals.metrics import HARNESS
from evals.nll import cache_bytes_per_token, itemsize_of
from evals.perplexity import windows
from recipes.all_work import longest_input, total_cost
from recipes.setting import Setting, forward_cost
from recipes.work import Cost, Measure, measures
from rope_ext.inspection import in_bytes


class Forecast(NamedTuple):
    """A comparison before it is run.

    Attributes:
        units: by column, the scored units of one method: documents, or passkey trials.
        num_methods: over which they are measured.
        cost, unshared: of the whole run as it will be done, and if every length had a forward of its own and every
            passkey prompt were run whole.
        cache_bytes: of the keys and values of the longest sequence, which chunking does not shorten.
        memory_budget: for activations and logits besides.
    """

    units: dict[Measure, int]
    num_methods: int
    cost: Cost
    unshared: Cost
    cache_bytes: int
    memory_budget: int

    def as_dict(self) -> dict[str, object]:
        """Return the same for JSON."""
        return {
            "cells": [{**measure._asdict(), "units": units} for measure, units in self.units.items()],
            "methods": self.num_methods,
            "tokens": self.cost.tokens,
            "unshared_tokens": self.unshared.tokens,
            "operations": self.cost.operations,
            "unshared_operations": self.unshared.operations,
            "cache_bytes": self.cache_bytes,
            "memory_budget": self.memory_budget,
        }

    def summary(self) -> str:
        """Return the totals in one line."""
        tokens, operations = self.unshared.tokens / self.cost.tokens, self.unshared.operations / self.cost.operations
        work = (
            f"{self.cost.tokens:,.0f} tokens (without sharing {self.unshared.tokens:,.0f}, {tokens:.1f} times), "
            f"{self.cost.operations:.3g} floating-point operations ({operations:.1f} times)"
        )
        cache = f"{in_bytes(self.cache_bytes)} of keys and values for the longest sequence"
        memory = f"{cache}, {in_bytes(self.memory_budget)} for activations and logits"
        return f"{self.num_methods} methods: {work}; memory besides the weights: {memory}"

    def table(self) -> Table:
        """Return one row a column of results."""
        view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("task", "protocol", "length", "units a method"):
            view.add_column(head, justify="left" if head in {"task", "protocol"} else "right")
        for measure, units in self.units.items():
            view.add_row(measure.task, measure.protocol, str(measure.length), str(units))
        return view


def forecast(setting: Setting) -> Forecast:
    """Return what a comparison would measure and cost."""
    recipe, model = setting.recipe, setting.model
    documents = len(setting.corpus.documents) if setting.corpus else 0
    units: dict[Measure, int] = {}
    for measure in measures(setting):
        prompts = setting.prompts.get(measure.protocol, []) if measure.task == "passkey" else []
        units[measure] = sum(p.length == measure.length for p in prompts) if prompts else documents
        for column in setting.benchmarks:
            if (HARNESS + column.name, column.length) == (measure.task, measure.length):
                units[measure] = len(column.documents)
    longest = longest_input(setting)
    return Forecast(
        units=units,
        num_methods=len(setting.methods),
        cost=total_cost(setting),
        unshared=Cost().plus(_unshared_cost(setting, list(units)), len(setting.methods)),
        cache_bytes=cache_bytes_per_token(model.config, itemsize_of(model)) * longest,
        memory_budget=recipe.memory_budget,
    )


def _unshared_cost(setting: Setting, columns: list[Measure]) -> Cost:
    """Return the work of one method with a forward for every number that is asked for."""
    lengths: list[int] = []
    for document in setting.corpus.documents if setting.corpus else ():
        for measure in columns:
            if measure.protocol.startswith(("sliding", "yarn-legacy")):
                bos = setting.corpus.bos if setting.corpus else None
                moved = windows(document, measure.length, stride=setting.recipe.perplexity.stride_tokens, bos=bos)
                lengths += [len(window.ids) for window in moved]
            elif measure.task == "long-context-gain":
                lengths += [measure.length, setting.geometry.original_context]
            elif measure.task != "passkey" and not measure.task.startswith(HARNESS):
                lengths.append(measure.length)
    lengths += [n for column in setting.benchmarks for each in column.documents for n in each.stretches]
    lengths += [len(prompt.ids) for some in setting.prompts.values() for prompt in some]
    return Cost(sum(lengths), sum(forward_cost(setting.model, length) for length in lengths))
