"""What a comparison would measure and cost, without measuring it: `rope-ext compare --dry-run`."""

from typing import NamedTuple

import torch
from rich import box
from rich.table import Table

from evals.perplexity import windows
from recipes.setting import Setting, forward_cost
from recipes.work import Measure, measures, total_cost
from rope_ext.hf import size_of_head
from rope_ext.inspection import in_bytes


class Forecast(NamedTuple):
    """A comparison before it is run.

    Attributes:
        units: by column, the scored units of one method: documents, or passkey trials.
        num_methods: over which they are measured.
        operations, unshared_operations: floating-point operations of the whole run as it will be done, and if every
            length had a forward of its own and every passkey prompt were run whole.
        cache_bytes: of the keys and values of the longest sequence, which chunking does not shorten.
        memory_budget: for activations and logits besides.
    """

    units: dict[Measure, int]
    num_methods: int
    operations: float
    unshared_operations: float
    cache_bytes: int
    memory_budget: int

    def as_dict(self) -> dict[str, object]:
        """Return the same for JSON."""
        return {
            "cells": [{**measure._asdict(), "units": units} for measure, units in self.units.items()],
            "methods": self.num_methods,
            "operations": self.operations,
            "unshared_operations": self.unshared_operations,
            "cache_bytes": self.cache_bytes,
            "memory_budget": self.memory_budget,
        }

    def summary(self) -> str:
        """Return the totals in one line."""
        saved = self.unshared_operations / self.operations
        work = f"{self.operations:.3g} floating-point operations, {saved:.1f} times fewer than without sharing"
        cache = f"{in_bytes(self.cache_bytes)} of keys and values for the longest sequence"
        memory = f"{cache}, {in_bytes(self.memory_budget)} for activations and logits"
        return f"{self.num_methods} methods, {work}; memory besides the weights: {memory}"

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
    recipe, config = setting.recipe, setting.model.config
    documents = len(setting.corpus.documents) if setting.corpus else 0
    columns = measures(recipe, setting.geometry.original_context)
    units = {m: len(setting.prompts[m.length]) if m.task == "passkey" else documents for m in columns}
    kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    itemsize = torch.empty(0, dtype=setting.model.dtype).element_size()
    numbers = 2 * int(config.num_hidden_layers) * kv_heads * size_of_head(config)
    return Forecast(
        units=units,
        num_methods=len(setting.methods),
        operations=total_cost(setting),
        unshared_operations=len(setting.methods) * _unshared_cost(setting, columns),
        cache_bytes=numbers * itemsize * max(recipe.lengths),
        memory_budget=recipe.memory_budget,
    )


def _unshared_cost(setting: Setting, columns: list[Measure]) -> float:
    """Return the operations of one method with a forward for every number that is asked for."""
    model, total = setting.model, 0.0
    for document in setting.corpus.documents if setting.corpus else ():
        for measure in columns:
            if measure.protocol.startswith(("sliding", "yarn-legacy")):
                bos = setting.corpus.bos if setting.corpus else None
                moved = windows(document, measure.length, stride=setting.recipe.perplexity.stride, bos=bos)
                total += sum(forward_cost(model, len(window.ids)) for window in moved)
            elif measure.task == "long-context-gain":
                total += forward_cost(model, measure.length) + forward_cost(model, setting.geometry.original_context)
            elif measure.task != "passkey":
                total += forward_cost(model, measure.length)
    prompts = (prompt for group in setting.prompts.values() for prompt in group)
    return total + sum(forward_cost(model, prompt.length) for prompt in prompts)
