"""A fine-tune as a person runs it: a bar for each part with an estimate, the table, the files, one JSON document."""

import dataclasses
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from recipes import screen
from recipes.compare import Advance
from recipes.finetune import Finetuned, Watch, run_finetune
from recipes.load import RecipeError, read_recipe
from recipes.preflight import preflight
from recipes.ranks import ALONE, Ranks, once
from recipes.screen import bar_columns, lock, stoppable, tokens_in_words, track, watching
from recipes.setting import RECIPE, Setting
from recipes.tracking import Live
from recipes.tuning import FinetuneRecipe
from recipes.tuning_report import report_lines, table, write_curve, write_report
from recipes.tuning_setting import ADAPTER, MODEL, FinetuneSetting, prepare_finetune


class Bars(Watch):
    """A bar on stderr for each measurement and for the training; only the first process shows them."""

    def __init__(self, ranks: Ranks, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, quiet=quiet or not ranks.is_first)
        self.is_first = ranks.is_first
        self.live: Live | None = None

    @contextmanager
    def measuring(self, setting: Setting) -> Generator[Advance]:
        """Show how far a measurement is."""
        with watching(setting, f"{setting.stage}: ", quiet=self.quiet) as advance:
            yield advance

    @contextmanager
    def training(self, setting: FinetuneSetting, done: int) -> Generator[Callable[[dict[str, Any]], None]]:
        """Show the step, its loss, and the time that is left."""
        train, asked = setting.recipe.train, setting.recipe.track
        if self.is_first and "wandb" in asked.report_to:
            self.live = Live(setting.out, read_recipe(setting.out / RECIPE), project=asked.project)
        each = train.rows_per_step * setting.plan.shape.row_tokens
        with Progress(*bar_columns(), console=self.console, speed_estimate_period=24 * 3600.0) as progress:
            bar = progress.add_task("train", total=train.steps, completed=done, tokens="")

            def advance(line: dict[str, Any]) -> None:
                tokens = tokens_in_words(line["step"] * each, train.steps * each)
                words = f"train: loss {line['loss']:.3f}"
                progress.update(bar, completed=line["step"], description=words, tokens=tokens)
                if self.live is not None:
                    self.live.push(line)

            yield advance


def finetune_on_screen(
    recipe: FinetuneRecipe, out: Path | None, *, resume: bool, ranks: Ranks = ALONE, quiet: bool = False
) -> Finetuned:
    """Run a fine-tune under bars on stderr, unless `quiet`, and write its picture and its report.

    Raises:
        RopeExtError, EvalError: bad input, before anything was written, or a training that cannot go on.
        StoppedError: interrupted or terminated; what is on disk is gone on with.
    """
    setting = prepare_finetune(recipe, out, resume=resume, ranks=ranks)
    again = f"go on with: rope-ext finetune --resume --out {setting.out}"
    with ExitStack() as stack:
        once(ranks, lambda: lock(setting.out, stack))
        once(ranks, lambda: _warn_of_memory(setting))
        stack.enter_context(stoppable(again))
        try:
            bars = Bars(ranks, quiet=quiet)
            done = run_finetune(setting, watch=bars)
            once(ranks, lambda: write_report(done, write_curve(done)))
            told = bars.live is not None and bars.live.close()
            once(ranks, lambda: track(recipe.track, setting.out, curve=not told))
        except OSError as error:
            raise RecipeError(f"out: {setting.out} cannot be written: {error.strerror or error}; {again}") from error
    return done


def _warn_of_memory(setting: FinetuneSetting) -> None:
    found = preflight(setting)
    if not found.fits:
        line = next(line for line in found.lines() if line.startswith("memory"))
        Console(stderr=True).print(f"rope-ext: {line}", soft_wrap=True, markup=False, highlight=False)


def show(done: Finetuned) -> None:
    """Print the table and where everything is."""
    console = Console()
    console.print(table(done))
    for line in report_lines(done):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def as_document(done: Finetuned) -> dict[str, object]:
    """Return a fine-tune as one JSON document."""
    adapter, model = done.out / ADAPTER, done.out / MODEL
    return {
        "out": str(done.out),
        "model": str(model) if model.is_dir() else None,
        "adapter": str(adapter) if adapter.is_dir() else None,
        "steps": len(done.curve),
        "curve": done.curve,
        "cells": [dataclasses.asdict(cell) for cell in (*done.before.cells, *done.after.cells)],
        "between": {str(s): [dataclasses.asdict(cell) for cell in each.cells] for s, each in done.between.items()},
        "differences": [dataclasses.asdict(contrast) for contrast in done.contrasts],
        "seconds": done.seconds,
    }


def failures(done: Finetuned) -> list[str]:
    """Return one line for each failed cell, pooled over depths."""
    measured = (done.before, *done.between.values(), done.after)
    return sorted({line for each in measured for line in screen.failures(each)})
