"""A comparison as a person runs it: a progress bar with an estimate, the table, the files, one JSON document."""

import dataclasses
import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from recipes.all_work import total_cost
from recipes.compare import Advance, Comparison, check_earlier, run_compare
from recipes.load import RecipeError
from recipes.present import benchmark_table, table, write_pictures, write_report
from recipes.ranks import ALONE, Ranks, once
from recipes.schema import CompareRecipe, Track
from recipes.setting import Setting, prepare
from recipes.tracking import log_aside
from recipes.work import Cost


class StoppedError(Exception):
    """A run was interrupted or terminated; the text says how to go on with it.

    Attributes:
        status: that the process exits with, 128 and the signal's number as shells have it.
    """

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


def compare_on_screen(
    recipe: CompareRecipe, out: Path | None, *, resume: bool, ranks: Ranks = ALONE, quiet: bool = False
) -> Comparison:
    """Run a comparison under a progress bar on stderr, unless `quiet`, and write its pictures and its report.

    Of several processes the first writes, and holds the lock.

    Raises:
        RopeExtError, EvalError: bad input, before anything was written.
        StoppedError: interrupted or terminated; what was measured is on disk.
    """
    setting = prepare(recipe, out, resume=resume, ranks=ranks)
    again = f"go on with: rope-ext compare --resume --out {setting.out}"
    with ExitStack() as stack:
        once(ranks, lambda: lock(setting.out, stack))
        once(ranks, lambda: check_earlier(setting.out))
        stack.enter_context(stoppable(again))
        for note in (note for column in setting.benchmarks for note in column.notes):
            Console(stderr=True, quiet=quiet or not ranks.is_first).print(f"lm-eval: {note}", markup=False)
        try:
            with watching(setting, quiet=quiet) as advance:
                comparison = run_compare(setting, advance=advance)
            once(ranks, lambda: write_report(comparison, write_pictures(comparison)))
            once(ranks, lambda: track(recipe.track, setting.out))
        except OSError as error:
            raise RecipeError(f"out: {setting.out} cannot be written: {error.strerror or error}; {again}") from error
    return comparison


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it; taken like Ctrl-C."""


def track(asked: Track, out: Path, *, curve: bool = True) -> None:
    """Log a finished run where its recipe asks for it; what fails there is one line on stderr."""
    if "wandb" in asked.report_to:
        say = Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print
        log_aside(out, project=asked.project, curve=curve, say=lambda line: say(f"rope-ext: {line}"))


@contextmanager
def stoppable(again: str) -> Generator[None]:
    """Let Ctrl-C and SIGTERM end the block with words on how to go on.

    Raises:
        StoppedError: one of them came.
    """

    def terminate(_signal: int, _frame: object) -> None:
        raise _TerminatedError

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _TerminatedError:
        raise StoppedError(f"terminated; {again}", 128 + signal.SIGTERM) from None
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; {again}", 128 + signal.SIGINT) from None
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def lock(folder: Path, stack: ExitStack) -> None:
    """Keep a second process out of the run's folder; the lock goes with the process, however that ends."""
    if sys.platform == "win32":
        return  # folders cannot be locked there; two runs in one folder then measure twice, and the cells stay right
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(f"out: another run is writing {folder}; wait for it, or name another folder") from None


def bar_columns() -> tuple[ProgressColumn, ...]:
    """Return what a bar shows: what is done and how much of it, in tokens too, the time it took, and what is left."""
    return (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )


@contextmanager
def watching(setting: Setting, prefix: str = "", *, quiet: bool = False) -> Generator[Advance]:
    """Show a bar while a comparison runs, and give what is called with its progress."""
    # One forward of a real model takes minutes; rich's default would have forgotten it before the next.
    total = total_cost(setting)
    # Of several processes the first shows its own share, which is like the others'
    console = Console(stderr=True, quiet=quiet or not setting.ranks.is_first)
    with Progress(*bar_columns(), console=console, speed_estimate_period=24 * 3600.0) as progress:
        bar = progress.add_task("compare", total=total.operations, tokens=tokens_in_words(0.0, total.tokens))
        done = Cost()

        def advance(cost: Cost, what: str) -> None:
            nonlocal done
            done = done.plus(cost)
            tokens = tokens_in_words(done.tokens, total.tokens)
            progress.update(bar, advance=cost.operations, description=prefix + what, tokens=tokens)

        yield advance


def tokens_in_words(done: float, total: float) -> str:
    """Return how many tokens have been computed of how many, in thousands or millions."""
    unit, name = (1e6, "M") if total >= 1e6 else (1e3, "k")
    return f"{done / unit:.1f}/{total / unit:.1f}{name} tokens"


def show(comparison: Comparison) -> None:
    """Print the table and where everything is."""
    console = Console()
    if comparison.pooled("perplexity") or comparison.pooled("passkey"):
        console.print(table(comparison))
    benchmarks = benchmark_table(comparison)
    if benchmarks is not None:
        console.print(benchmarks)
    page = page_command(comparison.out)
    where = f"{comparison.seconds:.0f} s; everything is in {comparison.out} (report.md; as one page: {page})"
    console.print(where, soft_wrap=True, markup=False, highlight=False)


def page_command(out: Path) -> str:
    """Return what makes the page of a run."""
    return f"rope-ext report {shlex.quote(str(out))}"


def as_document(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as one JSON document; a method without an effective length was not measured for it."""
    effective = comparison.effective_lengths()
    return {
        "out": str(comparison.out),
        "original_context": comparison.original_context,
        "effective_length": {comparison.labels[fingerprint]: reached for fingerprint, reached in effective.items()},
        "effective_length_by_bound": {
            comparison.labels[fingerprint]: reached
            for fingerprint, reached in comparison.effective_lengths(by_bound=True).items()
        },
        "cells": [dataclasses.asdict(cell) for cell in comparison.cells],
        "differences": [dataclasses.asdict(contrast) for contrast in comparison.contrasts],
    }


def failures(comparison: Comparison) -> list[str]:
    """Return one line for each failed cell, pooled over depths."""
    failed = [cell for cell in comparison.cells if cell.status != "ok"]
    return sorted({f"{cell.method} {cell.task} ({cell.protocol}) at {cell.length}: {cell.reason}" for cell in failed})
