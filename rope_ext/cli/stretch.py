"""Commands that make a model with a longer window: extend, convert, finetune."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rope_ext.cli.start import STRETCH, app, examples, one_line_errors, print_json, quiet_libraries, state, together
from rope_ext.cli.words import (
    BaseOption,
    ContextOption,
    FactorOption,
    JsonOption,
    MethodOption,
    ModelArgument,
    OriginalOption,
    TrackOption,
    base_of,
    complete_from,
    complete_recipe,
    words_of,
)

if TYPE_CHECKING:
    from recipes.tuning import FinetuneRecipe
    from rope_ext.layout import Layout


@app.command(
    rich_help_panel=STRETCH,
    epilog=examples(
        "rope-ext extend tiny --method yarn --context 2048 --out tiny-yarn-2k",
        "rope-ext extend tiny --method ntk --factor 4 --gguf tiny-ntk-1k.gguf",
        "rope-ext extend tiny --method alibi --context 2048 --out tiny-alibi-2k --format rope-ext",
    ),
)
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
        str,
        typer.Option(
            "--format",
            help="stock; or rope-ext, any method as it is, for rope_ext.load alone",
            autocompletion=complete_from("stock", "rope-ext"),
        ),
    ] = "stock",
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint with a longer window that stock code loads with the same logits, and say which does.

    A GGUF made from a GGUF is a copy of it, weights and tokenizer as they stand.
    """
    with one_line_errors():
        from recipes.extension import write_extended
        from rope_ext.registry import parse_method

        quiet_libraries()
        written = write_extended(
            model,
            parse_method(method),
            out=out,
            gguf=gguf,
            context=context,
            factor=factor,
            base=base_of(base),
            original_context=original_context,
            allow_approximate=allow_approximate,
            format=own_format,
        )
        if as_json:
            print_json(written.document)
            return
        for line in written.lines:
            typer.echo(line)


@app.command(
    rich_help_panel=STRETCH,
    epilog=examples(
        "rope-ext convert llama-2-7b --window 4096 --out llama-2-7b-hf",
        "rope-ext convert Llama3.2-1B --rope-factor 32 --out llama-3.2-1b-hf",
    ),
)
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
    with one_line_errors():
        from rope_ext.convert import convert_meta

        quiet_libraries()
        done = convert_meta(
            source, out, window=window, rope_factor=rope_factor, layout=cast("Layout | None", layout)
        )  # convert_meta says which layouts there are
        if as_json:
            print_json({"source": str(source), **done.as_dict()})
            return
        typer.echo(
            f"{done.path}: {source} for transformers, window {done.window} tokens; load it with "
            f"AutoModelForCausalLM.from_pretrained({str(done.path)!r})"
        )
        typer.echo(f"layout: {done.layout_in_words()}")
        typer.echo(f"tokenizer: {done.tokenizer}")


@app.command(
    rich_help_panel=STRETCH,
    epilog=examples(
        "rope-ext gqa tiny --kv-heads 1 --out tiny-mqa",
    ),
)
def gqa(
    model: ModelArgument,
    kv_heads: Annotated[int, typer.Option("--kv-heads", "-k", help="key and value heads; must divide the model's")],
    out: Annotated[Path, typer.Option("--out", "-o", help="a new directory for the checkpoint")],
    as_json: JsonOption = False,
) -> None:
    """Average key and value heads in groups, for a smaller cache; a brief training makes them of use again."""
    with one_line_errors():
        quiet_libraries()
        from recipes.grouping import write_grouped

        written = write_grouped(model, kv_heads, out)
        if as_json:
            print_json(written.document)
            return
        for line in written.lines:
            typer.echo(line)


@app.command(
    rich_help_panel=STRETCH,
    epilog=examples(
        "rope-ext finetune tiny/yarn --dry-run",
        "rope-ext finetune tiny/pose-yarn --out tiny-2k --set train.steps=12 --set 'eval.at=[5]'",
        "rope-ext finetune --resume --out tiny-2k",
    ),
)
def finetune(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="a YAML file, or the name of a shipped one, as tiny/yarn",
            autocompletion=complete_recipe,
        ),
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
    with one_line_errors():
        quiet_libraries()
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
            values["track"] = {"report_to": words_of(track)}
        made = make_finetune(values if seed is None else values | {"seed": seed}, where=str(path))
        if dry_run:
            _preflight(made, as_json=as_json)
            return
        _finetune(made, out, resume=False, as_json=as_json)


def _preflight(recipe: "FinetuneRecipe", *, as_json: bool) -> None:
    from recipes.preflight import preflight
    from recipes.tuning_setting import load_finetune

    with together() as ranks:
        found = preflight(load_finetune(recipe, ranks=ranks))
    if not ranks.is_first:
        return
    if as_json:
        print_json(found.as_dict())
        return
    for line in found.lines():
        typer.echo(line)


def _finetune(recipe: "FinetuneRecipe", out: Path | None, *, resume: bool, as_json: bool) -> None:
    from recipes.tuning_screen import as_document, failures, finetune_on_screen, show

    with together() as ranks:
        done = finetune_on_screen(recipe, out, resume=resume, ranks=ranks, quiet=state.quiet)
    if ranks.is_first:
        if as_json:
            print_json(as_document(done))
        else:
            show(done)
        if done.failed:
            typer.echo("rope-ext: finished with failed cells: " + "; ".join(failures(done)), err=True)
    if done.failed:
        raise typer.Exit(3)
