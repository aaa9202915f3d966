"""Commands that measure: compare, contrast."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rope_ext.cli.start import MEASURE, app, examples, one_line_errors, print_json, quiet_libraries, state, together
from rope_ext.cli.words import (
    BaseOption,
    JsonOption,
    ModelArgument,
    OriginalOption,
    TrackOption,
    complete_from,
    complete_method,
    complete_model,
    numbers_of,
    size_in_bytes,
    spelled_methods,
    words_of,
)

if TYPE_CHECKING:
    from recipes.schema import CompareRecipe

PROTOCOLS = ("prefix", "last-k", "by-position", "sliding", "yarn-legacy", "gain")
VARIANTS = (
    "classic",
    "text",
    "distractors",
    "multi-key",
    "multi-query",
    "uuid",
    "needle",
    "no-needle",
    "needle-only",
)
TASKS = ("perplexity", "nll-by-position", "long-context-gain", "passkey")


@app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "rope-ext compare",
        "rope-ext compare --methods unscaled,ntk,yarn --context 1024 --documents 4 --trials 2 --out first",
        "rope-ext compare --recipe first/recipe.yaml --dry-run",
        "rope-ext compare --resume --out first",
    ),
)
def compare(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="tiny, tiny-alibi, smollm2, a directory, or a Hub id", autocompletion=complete_model
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", help="comma list of NAME or NAME:key=value", autocompletion=complete_method),
    ] = None,
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
        typer.Option(
            "--protocols",
            help="comma list of prefix, last-k, by-position, sliding, yarn-legacy, gain",
            autocompletion=complete_from(*PROTOCOLS),
        ),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            help="comma list of passkey tasks: classic, text, distractors, multi-key, multi-query, uuid, needle, and "
            "the controls no-needle, needle-only",
            autocompletion=complete_from(*VARIANTS),
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
        str | None,
        typer.Option(
            "--baseline",
            help="the method that the others are paired with (default: unscaled)",
            autocompletion=complete_method,
        ),
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
    """Measure methods side by side on one model; without arguments, the demo on the bundled model.

    What no option says comes from the model's shipped recipe, or from the one that --recipe names; --dry-run shows it.
    """
    with one_line_errors():
        quiet_libraries()
        from recipes.load import DEFAULTS, RecipeError, make_recipe, read_recipe

        asked: dict[str, object] = {
            "model": model,
            "methods": spelled_methods(methods),
            "context": context,
            "lengths": numbers_of(lengths, "lengths", int, "256,512,1024"),
            "data": data,
            "baseline": baseline,
            "memory_budget": size_in_bytes(memory_budget),
            "track": None if track is None else {"report_to": words_of(track)},
            "base": base,
            "original_context": original_context,
            "seed": seed,
        }
        asked = {key: value for key, value in asked.items() if value is not None}
        if depths is not None and positions is not None:
            raise RecipeError("compare: --depths is one grid and --positions another; give one of them")
        passkey = {
            "trials": trials,
            "variants": words_of(variants),
            "depths": numbers_of(depths, "depths", float, "0,0.5,1"),
            "positions": [] if depths else numbers_of(positions, "positions", int, "0,256,512"),
            "grid": "absolute" if positions else "relative" if depths else None,
            "generate": generate or None,
            "share": False if no_sharing else None,
        }
        perplexity = {"documents": documents, "protocols": words_of(protocols), "stride": stride, "last": last}
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


@app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "rope-ext bench tiny --methods unscaled,yarn --context 1024 --tasks rope_ext_passkey --limit 5 --out bench",
        "rope-ext bench tiny --methods yarn --context 2048 --tasks niah_single_1 --lengths 1024,2048 --dry-run",
        "rope-ext bench tiny --methods unscaled,yarn --context 1024 --tasks native-offline --limit 20 --dry-run",
    ),
)
def bench(
    model: ModelArgument,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="comma list of lm-eval's tasks or ours, or native, native-offline (see rope-ext lm-eval-tasks --list)",
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            "--method",
            "-m",
            help="comma list of NAME or NAME:key=value, compared on the same documents",
            autocompletion=complete_method,
        ),
    ] = "unscaled",
    context: Annotated[
        int | None, typer.Option("--context", "-c", help="the window in tokens (default: 4 times the model's)")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="comma list, of tasks that make their documents (default: to the window)"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="documents of each task and length (default: all)")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", help="examples before each prompt (default: the task's)")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="a folder with task YAMLs of your own")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            help="the method that the others are paired with (default: unscaled)",
            autocompletion=complete_method,
        ),
    ] = None,
    base: BaseOption = None,
    original_context: OriginalOption = None,
    seed: Annotated[int, typer.Option("--seed", help="of documents that are made, of shots and bootstrap", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="folder of the run (default: runs/<time>-compare-<model>)")
    ] = None,
    track: TrackOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be measured and what it costs, and write nothing")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run lm-eval's tasks on a model under methods, each on the same documents; nothing is cut, every value has its n.

    The run is one of compare: rope-ext compare --resume --out DIR goes on with it, and a recipe's section benchmarks
    has the same beside perplexity and passkeys.
    """
    with one_line_errors():
        quiet_libraries()
        from recipes.load import make_recipe

        section: dict[str, object] = {
            "tasks": words_of(tasks),
            "limit": limit,
            "lengths": numbers_of(lengths, "lengths", int, "4096,8192"),
            "num_fewshot": num_fewshot,
            "include_path": None if include_path is None else str(include_path),
        }
        asked: dict[str, object] = {
            "model": model,
            "methods": spelled_methods(methods),
            "context": context,
            "perplexity": {"documents": 0},
            "passkey": {"trials": 0},
            "benchmarks": {key: value for key, value in section.items() if value is not None},
            "baseline": None if baseline is None else (spelled_methods(baseline) or [""])[0],
            "base": base,
            "original_context": original_context,
            "seed": seed,
            "track": None if track is None else {"report_to": words_of(track)},
        }
        made = make_recipe({key: value for key, value in asked.items() if value is not None}, where="bench")
        if dry_run:
            if os.environ.get("RANK", "0") == "0":
                _forecast(made, as_json=as_json)
            return
        _compare(made, out, resume=False, as_json=as_json)


@app.command(
    "lm-eval-tasks",
    rich_help_panel=MEASURE,
    epilog=examples("rope-ext lm-eval-tasks", "rope-ext lm-eval-tasks --list"),
)
def lm_eval_tasks(
    listed: Annotated[bool, typer.Option("--list", help="list tasks with what they need")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the folder of our tasks for lm-eval's --include_path, or list what there is and what each fetches."""
    with one_line_errors():
        quiet_libraries()
        from recipes.benchmarks import FROM_HUB, MADE_HERE, OURS, PRESETS, TASKS

        if as_json:
            print_json(
                {
                    "include_path": str(TASKS),
                    "ours": OURS,
                    "made_here": MADE_HERE,
                    "from_hub": FROM_HUB,
                    "presets": {name: list(some) for name, some in PRESETS.items()},
                }
            )
            return
        if not listed:
            typer.echo(str(TASKS))
            return
        view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("task", "what", "needs"):
            view.add_column(head, overflow="fold")
        for name, what in OURS.items():
            view.add_row(name, what, "nothing")
        for name, what in MADE_HERE.items():
            view.add_row(name, what, "nothing; lm-eval[ruler]")
        for names, source in FROM_HUB.items():
            view.add_row(names, "", f"fetches {source}")
        for name, some in PRESETS.items():
            view.add_row(name, f"preset: {', '.join(some)}", "as these")
        Console().print(view)


@app.command(
    "lm-eval",
    rich_help_panel=MEASURE,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples(
        "rope-ext lm-eval --model rope_ext --model_args pretrained=tiny,method=yarn,factor=4 "
        "--tasks rope_ext_next_line --limit 5",
    ),
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-eval's own command line with our model (--model rope_ext) and our tasks known to it.

    What it takes is told by: lm_eval run --help. --model_args takes pretrained, method, context or factor, base,
    original_context, dtype. A cache (--use_cache) belongs to one method, and is refused to another.
    """
    with one_line_errors():
        quiet_libraries()
        from recipes.benchmarks import import_harness

        import_harness()
        from recipes.lm_eval_model import run_cli

        status = run_cli(context.args)
    if status:
        raise typer.Exit(status)


@app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "rope-ext contrast first second",
        "rope-ext contrast first second --methods ntk,yarn --task perplexity",
    ),
)
def contrast(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="the folder of a run")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="the folder of another, on the same data")],
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="one of each run (default: those that are in both)", autocompletion=complete_method
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="perplexity, nll-by-position, long-context-gain or passkey alone",
            autocompletion=complete_from(*TASKS),
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="of the bootstrap", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Pair two runs of compare unit by unit: a method against another, or a model before and after a change.

    Runs that saw different tokens are refused.
    """
    with one_line_errors():
        from recipes.contrast import contrast_runs, contrast_table, read_run
        from recipes.load import RecipeError

        pair = spelled_methods(methods)
        if pair is not None and len(pair) != 2:
            raise RecipeError(f"contrast: --methods {methods!r} names {len(pair)}; name two, as --methods yarn,ntk")
        found = contrast_runs(
            read_run(first), read_run(second), methods=(pair[0], pair[1]) if pair else None, task=task, seed=seed
        )
        if as_json:
            print_json([dataclasses.asdict(each) for each in found])
            return
        Console().print(contrast_table(found, f"{second} against {first}"))


def _forecast(recipe: "CompareRecipe", *, as_json: bool) -> None:
    from recipes.forecast import forecast
    from recipes.setting import load_setting

    found = forecast(load_setting(recipe))
    if as_json:
        print_json(found.as_dict())
    else:
        console = Console()
        console.print(found.table())
        console.print(found.summary(), soft_wrap=True, markup=False, highlight=False)


def _compare(recipe: "CompareRecipe", out: Path | None, *, resume: bool, as_json: bool) -> None:
    from recipes.screen import as_document, compare_on_screen, failures, show

    with together() as ranks:
        comparison = compare_on_screen(recipe, out, resume=resume, ranks=ranks, quiet=state.quiet)
    status = 3 if comparison.failed else 0
    if ranks.is_first:
        if as_json:
            print_json(as_document(comparison))
        else:
            show(comparison)
        if comparison.failed:
            typer.echo("rope-ext: finished with failed cells: " + "; ".join(failures(comparison)), err=True)
    if status:
        raise typer.Exit(status)
