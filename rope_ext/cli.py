"""The `rope-ext` command: parses words, calls recipes, prints. Heavy imports wait until a command runs."""

import dataclasses
import json
import logging
import math
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

import rope_ext

if TYPE_CHECKING:
    from recipes.schema import CompareRecipe
    from rope_ext.geometry import RopeGeometry
    from rope_ext.plan import Method

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Stretch the context window of a LLaMA, and measure which method keeps it alive.",
)
_debug = False

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="tiny, smollm2, a directory, or a Hub id")]
MethodOption = Annotated[str, typer.Option("--method", "-m", help="NAME or NAME:key=value:key=value")]
ContextOption = Annotated[int | None, typer.Option("--context", "-c", help="the window to reach, in tokens")]
FactorOption = Annotated[
    float | None, typer.Option("--factor", "-f", help="the same as a multiple of the original window")
]
BaseOption = Annotated[
    str | None, typer.Option("--base", help="for a checkpoint that already carries scaling: original or checkpoint")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document instead of a table")]


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit status 2."""
    app()


def _version(value: bool) -> None:
    if value:
        typer.echo(f"rope-ext {rope_ext.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
    version: Annotated[  # noqa: ARG001  (its callback has printed it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Set what holds for all commands."""
    global _debug  # noqa: PLW0603  (one process, one command line)
    _debug = debug
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, stream=sys.stderr, format="%(message)s")


@contextmanager
def _one_line_errors() -> Generator[None]:
    from evals.errors import EvalError
    from rope_ext.errors import RopeExtError

    try:
        yield
    except (RopeExtError, EvalError) as error:
        if _debug:
            traceback.print_exc()
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    typer.echo("rope-ext: " + " ".join(message.split()), err=True)
    raise typer.Exit(2)


def _quiet_libraries() -> None:
    """Keep transformers' progress bars and advice off the screen; our own bar says how far a run is."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


@app.command()
def methods(as_json: JsonOption = False) -> None:
    """List the methods: what each changes, its hyper-parameters, and where it was published."""
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
        _print_json(rows)
        return
    view = Table(title="Methods (write NAME or NAME:key=value:key=value)")
    for column in ("name", "changes", "hyper-parameters", "fine-tuning", "source"):
        view.add_column(column, no_wrap=column in {"name", "hyper-parameters"})
    for row in rows:
        values = row["hyperparameters"]
        assert isinstance(values, dict)
        spelled = "\n".join(f"{k}={v}" for k, v in values.items())
        view.add_row(str(row["name"]), str(row["changes"]), spelled, str(row["fine_tuning"]), str(row["source"]))
    Console().print(view)


@app.command()
def inspect(
    model: ModelArgument,
    method: Annotated[str, typer.Option("--method", "-m", help="NAME or NAME:key=value:key=value")] = "unscaled",
    context: ContextOption = None,
    factor: FactorOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's rotary geometry and what a method would do to every pair."""
    with _one_line_errors():
        from rope_ext.hf import load_config, read_geometry, resolve_context
        from rope_ext.registry import parse_method

        _quiet_libraries()
        chosen = parse_method(method)
        config = load_config(model)
        geometry = read_geometry(config, base=_base(base))
        if context is None and factor is None:
            factor = 1.0
        target = resolve_context(geometry, context=context, factor=factor)
        plan = chosen.plan(geometry, context=target, seq_len=target)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or geometry.num_heads)
        cache = {
            f"{bytes_each * 8}-bit": 2 * config.num_hidden_layers * kv_heads * geometry.head_dim * bytes_each * target
            for bytes_each in (2, 4)
        }
        document: dict[str, object] = {
            "model": model,
            "method": method,
            "head_dim": geometry.head_dim,
            "theta": geometry.theta,
            "num_heads": geometry.num_heads,
            "num_key_value_heads": kv_heads,
            "original_context": geometry.original_context,
            "context": target,
            "factor": target / geometry.original_context,
            "attention_scale": plan.attention_scale,
            "kv_cache_bytes": cache["16-bit"],
            "kv_cache_bytes_fp32": cache["32-bit"],
            "inv_freq": geometry.inv_freq.tolist(),
            "new_inv_freq": plan.inv_freq.tolist(),
            "wavelengths": [w if math.isfinite(w) else None for w in geometry.wavelengths.tolist()],
            "rotations": geometry.rotations.tolist(),
        }
        if as_json:
            _print_json(document)
        else:
            _print_inspection(document, geometry, chosen, plan.inv_freq.double().tolist())


def _print_inspection(
    document: dict[str, object], geometry: "RopeGeometry", method: "Method", new: list[float]
) -> None:
    console = Console()
    console.print(
        f"[bold]{document['model']}[/]: head_dim {geometry.head_dim}, theta {geometry.theta:g}, "
        f"{geometry.num_heads} heads ({document['num_key_value_heads']} for keys and values), "
        f"window {geometry.original_context} tokens"
    )
    console.print(
        f"{method!r} to {document['context']} tokens (factor {document['factor']:g}); attention scale "
        f"{document['attention_scale']:.5g}; KV cache {_bytes(document['kv_cache_bytes'])} in 16 bits, "
        f"{_bytes(document['kv_cache_bytes_fp32'])} in fp32, per sequence"
    )
    view = Table(title="pair by pair, fastest first")
    for column in ("pair", "wavelength", "turns in window", "new wavelength", "frequency x", "what happens"):
        view.add_column(column, justify="left" if column == "what happens" else "right")
    factor = float(str(document["factor"]))
    for pair, (old, wavelength, turns) in enumerate(
        zip(
            geometry.inv_freq.double().tolist(), geometry.wavelengths.tolist(), geometry.rotations.tolist(), strict=True
        )
    ):
        ratio = new[pair] / old if old else 1.0
        new_wavelength = 2 * math.pi / new[pair] if new[pair] else math.inf
        view.add_row(
            str(pair),
            f"{wavelength:.4g}",
            f"{turns:.3g}",
            f"{new_wavelength:.4g}",
            f"{ratio:.4f}",
            _verdict(ratio, factor),
        )
    console.print(view)


def _verdict(ratio: float, factor: float) -> str:
    if abs(ratio - 1) < 1e-6:
        return "untouched"
    if abs(ratio * factor - 1) < 1e-6:
        return "divided"
    return "blended" if ratio > 1 / factor else "beyond the factor"


def _bytes(value: object) -> str:
    size = float(str(value))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _base(value: str | None) -> Literal["original", "checkpoint"] | None:
    from rope_ext.errors import ModelError

    if value in {None, "original", "checkpoint"}:
        return value  # pyright: ignore[reportReturnType]  (just checked)
    raise ModelError(f"base: {value!r} is neither original nor checkpoint; give one of the two")


@app.command()
def extend(
    model: ModelArgument,
    method: MethodOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="a new directory for the checkpoint")],
    context: ContextOption = None,
    factor: FactorOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint with a longer window that stock transformers loads with the same logits."""
    with _one_line_errors():
        from rope_ext.export import check_target, save_extended
        from rope_ext.hf import load_model
        from rope_ext.patch import extend as extend_model
        from rope_ext.registry import parse_method

        _quiet_libraries()
        chosen = parse_method(method)
        check_target(out)
        loaded, tokenizer = load_model(model, device="cpu")
        with extend_model(loaded, chosen, context=context, factor=factor, base=_base(base)) as patch:
            path = save_extended(loaded, out, tokenizer=tokenizer)
            if as_json:
                _print_json({"out": str(path), "fingerprint": patch.fingerprint.as_dict()})
                return
            Console(soft_wrap=True).print(
                f"{path}: {model} with {method}, window {patch.geometry.original_context} -> {patch.context} tokens; "
                f"load it with AutoModelForCausalLM.from_pretrained({str(path)!r})"
            )


@app.command()
def compare(
    model: Annotated[str | None, typer.Option("--model", help="tiny, smollm2, a directory, or a Hub id")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="comma list of NAME or NAME:key=value")] = None,
    context: Annotated[int | None, typer.Option("--context", "-c", help="the window every method is asked for")] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="comma list of lengths to measure at, tokens")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="python, python-all, a text file, JSONL, or a folder")
    ] = None,
    documents: Annotated[int | None, typer.Option("--documents", help="documents for perplexity; 0 for none")] = None,
    trials: Annotated[int | None, typer.Option("--trials", help="passkey trials a cell; 0 for none")] = None,
    base: BaseOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="of passkeys and bootstrap")] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="a YAML recipe; the other options override it")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="folder of the run [runs/<time>-compare-<model>]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure methods side by side on one model; without arguments, the demo on the bundled model."""
    with _one_line_errors():
        from recipes.load import DEFAULTS, RecipeError, make_recipe, read_recipe

        _quiet_libraries()
        asked: dict[str, object] = {
            "model": model,
            "methods": _methods(methods),
            "context": context,
            "lengths": _lengths(lengths),
            "data": data,
            "perplexity": documents,
            "passkey": trials,
            "base": base,
            "seed": seed,
        }
        asked = {key: value for key, value in asked.items() if value is not None}
        if resume:
            if out is None or asked or recipe is not None:
                raise RecipeError("resume: give --out DIR and nothing else; the run's own recipe.yaml says the rest")
            from recipes.setting import resumed_recipe

            _run(resumed_recipe(out), out, resume=True, as_json=as_json)
            return
        source = recipe or DEFAULTS.get(model or "tiny")
        values = read_recipe(source) if source else {}
        if "context" in asked and "lengths" not in asked and asked["context"] != values.get("context"):
            values.pop("lengths", None)  # a recipe's lengths belong to its own context
        for key, field in (("perplexity", "documents"), ("passkey", "trials")):
            if key in asked:
                section = values.get(key)
                asked[key] = {**(section if isinstance(section, dict) else {}), field: asked[key]}
        _run(make_recipe(values | asked, where=str(source or "compare")), out, resume=False, as_json=as_json)


def _methods(text: str | None) -> list[str] | None:
    if text is None:
        return None
    from rope_ext.plan import spell
    from rope_ext.registry import parse_methods

    return [spell(method) for method in parse_methods(text)]


def _lengths(text: str | None) -> list[int] | None:
    if text is None:
        return None
    from recipes.load import RecipeError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"lengths: {text!r} is not a comma list of whole numbers; write 256,512,1024") from None


def _run(recipe: "CompareRecipe", out: Path | None, *, resume: bool, as_json: bool) -> None:
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from recipes.compare import run_compare
    from recipes.present import table, write_pictures, write_report
    from recipes.setting import prepare, total_cost

    setting = prepare(recipe, out, resume=resume)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("compare", total=total_cost(setting))
            comparison = run_compare(
                setting, advance=lambda cost, what: progress.update(bar, advance=cost, description=what)
            )
    except KeyboardInterrupt:
        typer.echo(f"rope-ext: stopped; go on with: rope-ext compare --resume --out {setting.out}", err=True)
        raise typer.Exit(130) from None
    report = write_report(comparison, write_pictures(comparison))
    if as_json:
        effective = comparison.effective_lengths()
        _print_json(
            {
                "out": str(comparison.out),
                "original_context": comparison.original_context,
                "effective_length": {label: effective.get(fp) for fp, label in comparison.labels.items()},
                "cells": [dataclasses.asdict(cell) for cell in comparison.cells],
            }
        )
    else:
        console = Console()
        console.print(table(comparison))
        console.print(
            f"{comparison.seconds:.0f} s; everything is in {comparison.out} (start with {report.name})", soft_wrap=True
        )
    if comparison.failed:
        failed = sorted(
            {f"{c.method} {c.task} at {c.length}: {c.reason}" for c in comparison.cells if c.status != "ok"}
        )
        typer.echo("rope-ext: finished with failed cells: " + "; ".join(failed), err=True)
        raise typer.Exit(3)


if __name__ == "__main__":
    main()
