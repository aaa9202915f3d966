"""Commands that show what was measured: report, explore, log."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rope_ext.cli.start import SHOW, app, examples, one_line_errors, print_json, quiet_libraries
from rope_ext.cli.words import (
    BaseOption,
    ContextOption,
    FactorOption,
    JsonOption,
    ModelArgument,
    OriginalOption,
    base_of,
    complete_method,
)


@app.command(
    rich_help_panel=SHOW,
    epilog=examples(
        "rope-ext report first",
        "rope-ext report first second --out both.html",
    ),
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs of compare or finetune")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="the file (default: report.html in RUN, or here if there are several)"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write runs as one page of HTML that opens offline: the verdict, tables, charts, and how to make it again.

    Runs that saw the same tokens stand in one table, others apart. A run that was killed shows what it had measured.
    """
    with one_line_errors():
        from recipes.page import write_page

        target = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
        page = write_page(runs, target)
        _tell_page(page, as_json=as_json)


@app.command(
    rich_help_panel=SHOW,
    epilog=examples(
        "rope-ext explore tiny",
        "rope-ext explore tiny --methods unscaled,yarn,yarn:beta_fast=16 --factor 4 --out pairs.html",
    ),
)
def explore(
    model: ModelArgument,
    methods: Annotated[
        str, typer.Option("--methods", help="comma list of NAME or NAME:key=value", autocompletion=complete_method)
    ] = "unscaled,linear,abf,ntk,llama3,yarn",
    out: Annotated[Path, typer.Option("--out", "-o", help="the file")] = Path("explore.html"),
    context: ContextOption = None,
    factor: FactorOption = None,
    base: BaseOption = None,
    original_context: OriginalOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page on which a model's rotation, cache and prefill can be moved by hand, for any methods.

    It opens at the window asked for, 8 times the model's own unless said, and needs no network.
    """
    with one_line_errors():
        quiet_libraries()
        from recipes.explorer import write_explorer
        from rope_ext.registry import parse_methods

        page = write_explorer(
            model,
            parse_methods(methods),
            out,
            context=context,
            factor=factor,
            base=base_of(base),
            original_context=original_context,
        )
        _tell_page(page, as_json=as_json)


@app.command(
    "log",
    rich_help_panel=SHOW,
    epilog=examples(
        "rope-ext log first",
        "rope-ext log first second --project stretching",
    ),
)
def log_(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs of compare or finetune")],
    project: Annotated[str, typer.Option("--project", help="of wandb")] = "rope-ext",
    without_curve: Annotated[
        bool, typer.Option("--without-curve", help="leave out the steps of a training, which were told as it ran")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Log runs to Weights & Biases from their rows, however long ago they ended; again goes on with the same ones.

    Without a key it is done offline, for `wandb sync`.
    """
    with one_line_errors():
        from recipes.folders import read_folder
        from recipes.tracking import log_folder, mode

        for run in runs:
            read_folder(run)  # what is wrong with any of them is told before the first is logged
        ids = [each for run in runs for each in log_folder(run, project=project, curve=not without_curve)]
        how = mode() or os.environ.get("WANDB_MODE", "online")
        if as_json:
            print_json({"project": project, "mode": how, "ids": ids})
            return
        typer.echo(f"{len(ids)} runs in project {project}, {how}: {', '.join(ids)}")


def _tell_page(page: Path, *, as_json: bool) -> None:
    size = page.stat().st_size
    if as_json:
        print_json({"out": str(page), "bytes": size})
    else:
        typer.echo(f"{page}: {size / 1e6:.1f} MB, opens without a network")
