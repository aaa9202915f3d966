"""A comparison as a person runs it: a progress bar with an estimate, the table, the files, one JSON document."""

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recipes.compare import Comparison, run_compare
from recipes.present import table, write_pictures, write_report
from recipes.schema import CompareRecipe
from recipes.setting import prepare, total_cost


class StoppedError(Exception):
    """The user stopped a run; the text says how to go on with it."""


def compare_on_screen(recipe: CompareRecipe, out: Path | None, *, resume: bool) -> Comparison:
    """Run a comparison under a progress bar on stderr, and write its pictures and its report.

    Raises:
        RopeExtError, EvalError: bad input, before anything was written.
        StoppedError: interrupted from the keyboard; what was measured is on disk.
    """
    setting = prepare(recipe, out, resume=resume)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    try:
        # One forward of a real model takes minutes; rich's default would have forgotten it before the next.
        with Progress(*columns, console=Console(stderr=True), speed_estimate_period=24 * 3600.0) as progress:
            bar = progress.add_task("compare", total=total_cost(setting))

            def advance(cost: float, what: str) -> None:
                progress.update(bar, advance=cost, description=what)

            comparison = run_compare(setting, advance=advance)
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; go on with: rope-ext compare --resume --out {setting.out}") from None
    write_report(comparison, write_pictures(comparison))
    return comparison


def show(comparison: Comparison) -> None:
    """Print the table and where everything is."""
    console = Console()
    console.print(table(comparison))
    where = f"{comparison.seconds:.0f} s; everything is in {comparison.out} (start with report.md)"
    console.print(where, soft_wrap=True, markup=False, highlight=False)


def as_document(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as one JSON document; a method without an effective length was not measured for it."""
    effective = comparison.effective_lengths()
    return {
        "out": str(comparison.out),
        "original_context": comparison.original_context,
        "effective_length": {comparison.labels[fingerprint]: reached for fingerprint, reached in effective.items()},
        "cells": [dataclasses.asdict(cell) for cell in comparison.cells],
    }


def failures(comparison: Comparison) -> list[str]:
    """Return one line for each failed cell, pooled over depths."""
    failed = [cell for cell in comparison.cells if cell.status != "ok"]
    return sorted({f"{cell.method} {cell.task} at {cell.length}: {cell.reason}" for cell in failed})
