"""Commands that look: methods, a model's geometry, this machine."""

import dataclasses
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rope_ext.cli.start import LOOK, app, examples, one_line_errors, print_json, quiet_libraries
from rope_ext.cli.words import (
    BaseOption,
    ContextOption,
    FactorOption,
    JsonOption,
    MethodOption,
    ModelArgument,
    OriginalOption,
    base_of,
    complete_from,
)


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "rope-ext methods",
        "rope-ext methods --json",
    ),
)
def methods(as_json: JsonOption = False) -> None:
    """List the methods: what each changes, its hyper-parameters, and where it was published."""
    with one_line_errors():
        _list_methods(as_json=as_json)


def _list_methods(*, as_json: bool) -> None:
    from rope_ext.registry import known_methods

    rows = [
        {
            "name": name,
            "changes": cls.summary,
            "hyperparameters": {f.name: f.default for f in dataclasses.fields(cls)},  # pyright: ignore[reportArgumentType]  (methods are dataclasses)
            "fine_tuning": cls.needs_training,
            "source": cls.source,
        }
        for name, cls in known_methods().items()
    ]
    if as_json:
        print_json(rows)
        return
    view = Table(title="Methods (write NAME or NAME:key=value:key=value)")
    for column in ("name", "changes", "hyper-parameters", "fine-tuning", "source"):
        view.add_column(column, no_wrap=column in {"name", "hyper-parameters"}, overflow="fold")
    for row in rows:
        values = row["hyperparameters"]
        assert isinstance(values, dict)
        spelled = "\n".join(f"{k}={v}" for k, v in values.items())
        view.add_row(str(row["name"]), str(row["changes"]), spelled, str(row["fine_tuning"]), str(row["source"]))
    Console().print(view)


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "rope-ext inspect tiny",
        "rope-ext inspect tiny --method yarn --context 2048",
        "rope-ext inspect tiny --method yarn:beta_fast=16 --factor 4 --json",
    ),
)
def inspect(
    model: ModelArgument,
    method: MethodOption = "unscaled",
    context: ContextOption = None,
    factor: FactorOption = None,
    base: BaseOption = None,
    original_context: OriginalOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's rotary geometry and what a method would do to every pair."""
    with one_line_errors():
        from rope_ext.hf import check_written_as, load_config
        from rope_ext.inspection import inspect_config
        from rope_ext.registry import parse_method

        quiet_libraries()
        if context is None and factor is None:
            factor = 1.0
        chosen = parse_method(method)
        check_written_as(model, [chosen.name])
        found = inspect_config(
            load_config(model),
            chosen,
            context=context,
            factor=factor,
            base=base_of(base),
            original_context=original_context,
        )
        if as_json:
            print_json({"model": model, "method": method, **found.as_dict()})
            return
        console = Console()
        console.print(f"{model}: {found.summary()}", markup=False, highlight=False, soft_wrap=True)
        console.print(found.table())


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "rope-ext plan tiny --context 2048",
        "rope-ext plan tiny --context 2048 --batch 4 --gpu h100 --cache-dtype fp8",
        "rope-ext plan tiny --context 2048 --train --gpu a100 --json",
    ),
)
def plan(
    model: ModelArgument,
    context: Annotated[int, typer.Option("--context", "-c", help="the window, in tokens")],
    batch: Annotated[int, typer.Option("--batch", "-b", help="sequences, or rows of a step", min=1)] = 1,
    dtype: Annotated[
        str, typer.Option("--dtype", help="fp32, bf16 or fp8", autocompletion=complete_from("fp32", "bf16", "fp8"))
    ] = "bf16",
    cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--cache-dtype",
            help="of keys and values (default: as --dtype)",
            autocompletion=complete_from("fp32", "bf16", "fp8"),
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", help="a100, h100, h200, or a JSON file", autocompletion=complete_from("a100", "h100", "h200")
        ),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="a step of training in place of reading and writing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a window takes before anything is run: memory, operations, time floors, and what to change first.

    From the configuration alone; no weights are read. Floors are by the device's data sheet, and nothing reaches them.
    """
    with one_line_errors():
        quiet_libraries()
        from recipes.devices import read_device
        from recipes.planner import plan as plan_of
        from rope_ext.hf import load_config

        found = plan_of(
            model,
            load_config(model),
            context=context,
            batch=batch,
            dtype=dtype,
            cache_dtype=cache_dtype,
            device=None if gpu is None else read_device(gpu),
            training=train,
        )
        if as_json:
            print_json(found.as_dict())
            return
        for line in found.lines():
            typer.echo(line)


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "rope-ext doctor",
    ),
)
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine can do: versions, devices, ways to compute attention, and how to get what is missing."""
    with one_line_errors():
        from recipes.doctor import examine

        found = examine()
        if as_json:
            print_json(found.as_dict())
            return
        for line in found.lines():
            typer.echo(line)
