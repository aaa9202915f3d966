"""The `rope-ext` command: parses words, calls recipes, prints. Heavy imports wait until a command runs."""

import dataclasses
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.table import Table

import rope_ext

if TYPE_CHECKING:
    from recipes.ranks import Ranks
    from recipes.schema import CompareRecipe
    from recipes.tuning import FinetuneRecipe
    from rope_ext.hf import ScaledBase
    from rope_ext.layout import Layout

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Stretch the context window of a LLaMA, and measure which method keeps it alive.",
)
_debug = False
_joined = False

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="tiny, smollm2, a directory, a .gguf file, or a Hub id")
]
MethodOption = Annotated[str, typer.Option("--method", "-m", help="NAME or NAME:key=value:key=value")]
ContextOption = Annotated[int | None, typer.Option("--context", "-c", help="the window to reach, in tokens")]
FactorOption = Annotated[
    float | None, typer.Option("--factor", "-f", help="the same as a multiple of the original window")
]
TrackOption = Annotated[
    str | None, typer.Option("--track", help="where the run goes besides its own files: wandb (offline without a key)")
]
BaseOption = Annotated[
    str | None, typer.Option("--base", help="for a checkpoint that already carries scaling: original or checkpoint")
]
OriginalOption = Annotated[
    int | None,
    typer.Option("--original-context", help="the window that the base was trained with, if its configuration is wrong"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document instead of a table")]


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without a character shows another one, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = app(standalone_mode=False)
    except Exception as error:
        # An unknown option, a word where a number belongs. Newer typers carry a click of their own, so that the class
        # is known by what it can do.
        if type(error).__name__ == "Abort":  # Ctrl-C
            sys.exit(130)
        if not hasattr(error, "format_message"):
            raise
        status = _tell_usage(error)
    sys.exit(status)


def _tell_usage(error: Any) -> int:
    """Print what was wrong with the words of a command in one line, or the help if there were none."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    command = getattr(getattr(error, "ctx", None), "command_path", "rope-ext")
    line = " ".join(str(error.format_message()).split())
    typer.echo(f"rope-ext: {line} (see {command} --help)", err=True)
    return 2


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
    except UnicodeError as error:
        _refuse(f"a name that is not UTF-8 cannot be used: {ascii(getattr(error, 'object', error))[:200]}")
    except OSError as error:
        if _debug:
            traceback.print_exc()
        _refuse(f"{error.filename or 'output'}: {error.strerror or error}")


def _refuse(message: str) -> NoReturn:
    # Of several processes with one command line the first says what is wrong with it; what befalls a later one alone,
    # when they have met, that one says.
    rank = os.environ.get("RANK", "0")
    if rank == "0" or _joined:
        where = "" if rank == "0" else f"process {rank}: "
        typer.echo("rope-ext: " + where + " ".join(message.split()), err=True)
    raise typer.Exit(2)


def _quiet_libraries() -> None:
    """Keep transformers' progress bars and advice off the screen; our own bar says how far a run is."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # before anything imports it: transformers' GGUF reader asks it directly
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
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
    with _one_line_errors():
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
        _print_json(rows)
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


@app.command()
def inspect(
    model: ModelArgument,
    method: Annotated[str, typer.Option("--method", "-m", help="NAME or NAME:key=value:key=value")] = "unscaled",
    context: ContextOption = None,
    factor: FactorOption = None,
    base: BaseOption = None,
    original_context: OriginalOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's rotary geometry and what a method would do to every pair."""
    with _one_line_errors():
        from rope_ext.hf import check_written_as, load_config
        from rope_ext.inspection import inspect_config
        from rope_ext.registry import parse_method

        _quiet_libraries()
        if context is None and factor is None:
            factor = 1.0
        chosen = parse_method(method)
        check_written_as(model, [chosen.name])
        found = inspect_config(
            load_config(model),
            chosen,
            context=context,
            factor=factor,
            base=_base(base),
            original_context=original_context,
        )
        if as_json:
            _print_json({"model": model, "method": method, **found.as_dict()})
            return
        console = Console()
        console.print(f"{model}: {found.summary()}", markup=False, highlight=False, soft_wrap=True)
        console.print(found.table())


def _base(value: str | None) -> "ScaledBase | None":
    return cast("ScaledBase | None", value)  # read_geometry says what is allowed


@app.command()
def extend(
    model: ModelArgument,
    method: MethodOption,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="a new directory for the checkpoint")] = None,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="a new GGUF file for llama.cpp, besides or instead")
    ] = None,
    context: ContextOption = None,
    factor: FactorOption = None,
    base: BaseOption = None,
    original_context: OriginalOption = None,
    allow_approximate: Annotated[
        bool,
        typer.Option("--allow-approximate", help="write the nearest stock form of a method that has no exact one"),
    ] = False,
    own_format: Annotated[
        str, typer.Option("--format", help="stock; or rope-ext, any method as it is, for rope_ext.load alone")
    ] = "stock",
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint with a longer window that stock code loads with the same logits, and say which does.

    A GGUF made from a GGUF is a copy of it, weights and tokenizer as they stand.
    """
    with _one_line_errors():
        from recipes.extension import write_extended
        from rope_ext.registry import parse_method

        _quiet_libraries()
        written = write_extended(
            model,
            parse_method(method),
            out=out,
            gguf=gguf,
            context=context,
            factor=factor,
            base=_base(base),
            original_context=original_context,
            allow_approximate=allow_approximate,
            format=own_format,
        )
        if as_json:
            _print_json(written.document)
            return
        for line in written.lines:
            typer.echo(line)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="META_DIR", help="the folder with params.json and consolidated.00.pth")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="a new directory for the checkpoint")],
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            help="the window in tokens, which Meta's files do not state: 2048 for LLaMA 1, 4096 for Llama 2, 16384 for "
            "Code Llama; known for LLaMA 3 (8192) and 3.1 (131072)",
        ),
    ] = None,
    rope_factor: Annotated[
        float | None,
        typer.Option(
            "--rope-factor",
            help="the factor of use_scaled_rope where params.json leaves it open: 8 for LLaMA 3.1 and 3.3, 32 for 3.2",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", help="how the query and key rows are stored, over what the weights say: neighbours or halves"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a checkpoint of Meta's (params.json, consolidated.*.pth) into a Hugging Face one with the same logits."""
    with _one_line_errors():
        from rope_ext.convert import convert_meta

        _quiet_libraries()
        done = convert_meta(
            source, out, window=window, rope_factor=rope_factor, layout=cast("Layout | None", layout)
        )  # convert_meta says which layouts there are
        if as_json:
            _print_json({"source": str(source), **done.as_dict()})
            return
        typer.echo(
            f"{done.path}: {source} for transformers, window {done.window} tokens; load it with "
            f"AutoModelForCausalLM.from_pretrained({str(done.path)!r})"
        )
        typer.echo(f"layout: {done.layout_in_words()}")
        typer.echo(f"tokenizer: {done.tokenizer}")


@app.command()
def compare(
    model: Annotated[str | None, typer.Option("--model", help="tiny, smollm2, a directory, or a Hub id")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="comma list of NAME or NAME:key=value")] = None,
    context: Annotated[int | None, typer.Option("--context", "-c", help="the window every method is asked for")] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="comma list of lengths to measure at, tokens")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="python, python-all, pg19, proof-pile, a text, JSONL or Parquet file, a folder of them, or a Hub data "
            "set: hub:OWNER/NAME or hub:OWNER/NAME@REVISION:split=test:config=X:column=text",
        ),
    ] = None,
    documents: Annotated[int | None, typer.Option("--documents", help="documents for perplexity; 0 for none")] = None,
    trials: Annotated[int | None, typer.Option("--trials", help="passkey trials a cell; 0 for none")] = None,
    protocols: Annotated[
        str | None,
        typer.Option("--protocols", help="comma list of prefix, last-k, by-position, sliding, yarn-legacy, gain"),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            help="comma list of passkey tasks: classic, text, distractors, multi-key, multi-query, uuid, needle, and "
            "the controls no-needle, needle-only",
        ),
    ] = None,
    depths: Annotated[
        str | None, typer.Option("--depths", help="comma list of fractions of the length that the passkey is hidden at")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            "--positions", help="comma list of tokens that it is hidden after instead: a grid of absolute positions"
        ),
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="decode passkeys for real instead of scoring the known answer")
    ] = False,
    no_sharing: Annotated[
        bool, typer.Option("--no-sharing", help="run every passkey prompt whole, to check that sharing changes nothing")
    ] = False,
    stride: Annotated[int | None, typer.Option("--stride", help="of sliding windows, in tokens")] = None,
    last: Annotated[int | None, typer.Option("--last", help="k of last-k and gain, in tokens")] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="the method that the others are paired with (default: unscaled)")
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option("--memory-budget", help="for one forward besides weights and cache, as 2GiB or 500MB"),
    ] = None,
    base: BaseOption = None,
    original_context: OriginalOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="of passkeys and bootstrap")] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="a YAML recipe; the other options override it")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="folder of the run (default: runs/<time>-compare-<model>)")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    track: TrackOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be measured and what it costs, and write nothing")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure methods side by side on one model; without arguments, the demo on the bundled model."""
    with _one_line_errors():
        _quiet_libraries()
        from recipes.load import DEFAULTS, RecipeError, make_recipe, read_recipe

        asked: dict[str, object] = {
            "model": model,
            "methods": _methods(methods),
            "context": context,
            "lengths": _numbers(lengths, "lengths", int, "256,512,1024"),
            "data": data,
            "baseline": baseline,
            "memory_budget": _size(memory_budget),
            "track": None if track is None else {"report_to": _words(track)},
            "base": base,
            "original_context": original_context,
            "seed": seed,
        }
        asked = {key: value for key, value in asked.items() if value is not None}
        if depths is not None and positions is not None:
            raise RecipeError("compare: --depths is one grid and --positions another; give one of them")
        passkey = {
            "trials": trials,
            "variants": _words(variants),
            "depths": _numbers(depths, "depths", float, "0,0.5,1"),
            "positions": [] if depths else _numbers(positions, "positions", int, "0,256,512"),
            "grid": "absolute" if positions else "relative" if depths else None,
            "generate": generate or None,
            "share": False if no_sharing else None,
        }
        perplexity = {"documents": documents, "protocols": _words(protocols), "stride": stride, "last": last}
        sections = {
            name: {key: value for key, value in section.items() if value is not None}
            for name, section in (("perplexity", perplexity), ("passkey", passkey))
        }
        if resume:
            if out is None or asked or any(sections.values()) or dry_run or recipe is not None:
                raise RecipeError("resume: give --out DIR and nothing else; the run's own recipe.yaml says the rest")
            from recipes.setting import resumed_recipe

            _compare(resumed_recipe(out), out, resume=True, as_json=as_json)
            return
        source = recipe or DEFAULTS.get(model or "tiny")
        # Other models than the bundled one were not kept from any of the sources, and need all that are long enough.
        values = read_recipe(source) if source else {"data": "python-all"}
        if "context" in asked and "lengths" not in asked and asked["context"] != values.get("context"):
            values.pop("lengths", None)  # a recipe's lengths belong to its own context
        for name, section in sections.items():
            given = values.get(name)
            if section and isinstance(given, dict | None):
                asked[name] = {**(given or {}), **section}
        made = make_recipe(values | asked, where=str(recipe or "compare"))
        if dry_run:
            if os.environ.get("RANK", "0") == "0":
                _forecast(made, as_json=as_json)
            return
        _compare(made, out, resume=False, as_json=as_json)


@app.command()
def finetune(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="a YAML file, or the name of a shipped one, as tiny/yarn"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="path.to.key=value over the recipe's, as train.steps=200; again for more"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="folder of the run (default: runs/<time>-finetune-...)"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in --out, from its last whole checkpoint")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="say what it trains on and what that takes, and train nothing"),
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="of the data's order and an adapter's weights")] = None,
    track: TrackOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stretch a model, train it briefly, write it, and measure before and after on the same tokens."""
    with _one_line_errors():
        _quiet_libraries()
        from recipes.load import RecipeError, read_recipe
        from recipes.tuning_load import find_recipe, make_finetune, override

        if resume:
            if out is None or recipe is not None or settings or dry_run or seed is not None or track is not None:
                raise RecipeError("resume: give --out DIR and nothing else; the run's own recipe.yaml says the rest")
            from recipes.tuning_setting import resumed_finetune

            _finetune(resumed_finetune(out), out, resume=True, as_json=as_json)
            return
        if recipe is None:
            raise RecipeError("finetune: give a recipe, a YAML file or one of those that are shipped, as tiny/yarn")
        path = find_recipe(recipe)
        values = read_recipe(path)
        for words in settings or []:
            override(values, words)
        if track is not None:
            values["track"] = {"report_to": _words(track)}
        made = make_finetune(values if seed is None else values | {"seed": seed}, where=str(path))
        if dry_run:
            _preflight(made, as_json=as_json)
            return
        _finetune(made, out, resume=False, as_json=as_json)


@app.command("log")
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

        rope-ext log runs/20261130-120000-compare-tiny
    """
    with _one_line_errors():
        from recipes.folders import read_folder
        from recipes.tracking import log_folder, mode

        for run in runs:
            read_folder(run)  # what is wrong with any of them is told before the first is logged
        ids = [each for run in runs for each in log_folder(run, project=project, curve=not without_curve)]
        how = mode() or os.environ.get("WANDB_MODE", "online")
        if as_json:
            _print_json({"project": project, "mode": how, "ids": ids})
            return
        typer.echo(f"{len(ids)} runs in project {project}, {how}: {', '.join(ids)}")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine can do: versions, devices, ways to compute attention, and how to get what is missing."""
    with _one_line_errors():
        from recipes.doctor import examine

        found = examine()
        if as_json:
            _print_json(found.as_dict())
            return
        for line in found.lines():
            typer.echo(line)


@app.command()
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

        rope-ext report runs/20261130-120000-compare-tiny

        rope-ext report first second --out both.html
    """
    with _one_line_errors():
        from recipes.page import write_page

        target = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
        page = write_page(runs, target)
        if as_json:
            _print_json({"out": str(page), "bytes": page.stat().st_size})
            return
        typer.echo(f"{page}: {page.stat().st_size / 1e6:.1f} MB, opens without a network")


@app.command()
def contrast(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="the folder of a run")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="the folder of another, on the same data")],
    methods: Annotated[
        str | None,
        typer.Option("--methods", help="one of each run (default: those that are in both)"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="perplexity, nll-by-position, long-context-gain or passkey alone"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="of the bootstrap", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Pair two runs of compare unit by unit: a method against another, or a model before and after a change.

    Runs that saw different tokens are refused.
    """
    with _one_line_errors():
        from recipes.contrast import contrast_runs, contrast_table, read_run
        from recipes.load import RecipeError

        pair = _methods(methods)
        if pair is not None and len(pair) != 2:
            raise RecipeError(f"contrast: --methods {methods!r} names {len(pair)}; name two, as --methods yarn,ntk")
        found = contrast_runs(
            read_run(first), read_run(second), methods=(pair[0], pair[1]) if pair else None, task=task, seed=seed
        )
        if as_json:
            _print_json([dataclasses.asdict(each) for each in found])
            return
        Console().print(contrast_table(found, f"{second} against {first}"))


def _methods(text: str | None) -> list[str] | None:
    if text is None:
        return None
    from rope_ext.plan import spell
    from rope_ext.registry import parse_methods

    return [spell(method) for method in parse_methods(text)]


def _size(text: str | None) -> int | None:
    """Return bytes: a whole number, or one with KB, MB, GB (powers of 1000), KiB, MiB, GiB (of 1024)."""
    if text is None:
        return None
    from recipes.load import RecipeError

    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) *([KMG]?)(i?)B?", text.strip())
    if found is None:
        raise RecipeError(f"memory-budget: {text!r} is no size; write bytes, or a number with MiB, GiB, MB or GB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMG".index(prefix or " "))


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _numbers(text: str | None, name: str, kind: type[int] | type[float], example: str) -> list[int | float] | None:
    if text is None:
        return None
    from recipes.load import RecipeError

    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise RecipeError(f"{name}: {text!r} is not a comma list of {what}; write {example}") from None


def _forecast(recipe: "CompareRecipe", *, as_json: bool) -> None:
    from recipes.forecast import forecast
    from recipes.setting import load_setting

    found = forecast(load_setting(recipe))
    if as_json:
        _print_json(found.as_dict())
    else:
        console = Console()
        console.print(found.table())
        console.print(found.summary(), soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _together() -> Generator["Ranks"]:
    """Meet the other processes of a launcher, if there are any, and part from them however the block ends."""
    from recipes.ranks import ToldElsewhereError, join, leave
    from recipes.screen import StoppedError

    global _joined  # noqa: PLW0603  (one process, one command line)
    ranks = join()
    _joined = ranks.world > 1
    try:
        yield ranks
    except ToldElsewhereError:
        raise typer.Exit(2) from None
    except StoppedError as error:
        if ranks.is_first:
            typer.echo(f"rope-ext: {error}", err=True)
        raise typer.Exit(error.status) from None
    finally:
        leave(ranks)


def _preflight(recipe: "FinetuneRecipe", *, as_json: bool) -> None:
    from recipes.preflight import preflight
    from recipes.tuning_setting import load_finetune

    with _together() as ranks:
        found = preflight(load_finetune(recipe, ranks=ranks))
    if not ranks.is_first:
        return
    if as_json:
        _print_json(found.as_dict())
        return
    for line in found.lines():
        typer.echo(line)


def _finetune(recipe: "FinetuneRecipe", out: Path | None, *, resume: bool, as_json: bool) -> None:
    from recipes.tuning_screen import as_document, failures, finetune_on_screen, show

    with _together() as ranks:
        done = finetune_on_screen(recipe, out, resume=resume, ranks=ranks)
    if ranks.is_first:
        if as_json:
            _print_json(as_document(done))
        else:
            show(done)
        if done.failed:
            typer.echo("rope-ext: finished with failed cells: " + "; ".join(failures(done)), err=True)
    if done.failed:
        raise typer.Exit(3)


def _compare(recipe: "CompareRecipe", out: Path | None, *, resume: bool, as_json: bool) -> None:
    from recipes.screen import as_document, compare_on_screen, failures, show

    with _together() as ranks:
        comparison = compare_on_screen(recipe, out, resume=resume, ranks=ranks)
    status = 3 if comparison.failed else 0
    if ranks.is_first:
        if as_json:
            _print_json(as_document(comparison))
        else:
            show(comparison)
        if comparison.failed:
            typer.echo("rope-ext: finished with failed cells: " + "; ".join(failures(comparison)), err=True)
    if status:
        raise typer.Exit(status)


if __name__ == "__main__":
    main()
