"""A recipe made ready: everything loaded and checked before the first forward, and a folder that is the run's own."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals import corpora
from evals.corpora import Corpus
from evals.hub import PREFIX
from evals.nll import itemsize_of, rows_per_chunk
from evals.variants import VARIANTS
from recipes import data
from recipes.benchmarks import open_benchmarks
from recipes.load import RecipeError, make_recipe, read_recipe, write_recipe
from recipes.prompts import Prompts, make_prompts
from recipes.ranks import ALONE, Ranks, everywhere, once
from recipes.schema import CompareRecipe
from recipes.tuning import FinetuneRecipe
from rope_ext.geometry import RopeGeometry
from rope_ext.hf import check_written_as, load_model, read_geometry, resolve_context, size_of_head
from rope_ext.patch import extend
from rope_ext.plan import Method, spell
from rope_ext.registry import parse_method

RECIPE = "recipe.yaml"
MODELS = ("tiny", "smollm2")
NUM_HAYSTACKS = 64
"""The fewest documents of a stream that texts to hide needles in are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that is checked before the first forward: the model, the data, the methods and where results go.

    `benchmarks` are columns of evals.harness, whose library is optional. `stage` is "before" or "after" where training
    stands between two such settings.
    """

    recipe: CompareRecipe
    out: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: RopeGeometry
    methods: tuple[Method, ...]
    corpus: Corpus | None
    prompts: Prompts
    benchmarks: tuple[Any, ...] = ()
    ranks: Ranks = ALONE
    stage: str | None = None


def prepare(recipe: CompareRecipe, out: Path | None, *, resume: bool = False, ranks: Ranks = ALONE) -> Setting:
    """Load and check everything, then make the run's folder.

    Args:
        ranks: of several processes, the first makes the folder and all use it.

    Raises:
        RopeExtError, EvalError: any bad input; nothing was written then.
    """
    setting = everywhere(ranks, lambda: load_setting(recipe))
    made = once(ranks, lambda: _open_run(setting.recipe, out, resume=resume))
    return replace(setting, out=made, ranks=ranks)


def load_setting(recipe: CompareRecipe) -> Setting:
    """Load and check everything, and write nothing; the folder of the result is none yet.

    Raises:
        RopeExtError, EvalError: any bad input.
    """
    methods = tuple(parse_method(text) for text in recipe.methods)
    if not (recipe.perplexity.documents and recipe.perplexity.protocols) and not (
        _asks_passkeys(recipe) or recipe.benchmarks.tasks
    ):
        raise RecipeError(
            "recipe: nothing to measure; ask for perplexity.documents or passkey.trials above 0, or benchmarks.tasks"
        )
    check_written_as(recipe.model, [method.name for method in methods])
    model, tokenizer = load_model(recipe.model)
    geometry = read_geometry(model.config, base=recipe.base, original_context=recipe.original_context)
    factor = 4.0 if recipe.context is None else None
    context = resolve_context(geometry, context=recipe.context, factor=factor)
    lengths = recipe.lengths or default_lengths(geometry.original_context, context)
    recipe = _with_numbers(recipe, min(lengths), geometry.original_context)
    _check_protocols(recipe, min(lengths), geometry.original_context)
    rows_per_chunk(model.config, itemsize_of(model), recipe.memory_budget)
    for method in methods:
        _check_method(model, method, context, recipe)
    recipe = replace(
        recipe,
        context=context,
        lengths=tuple(sorted(set(lengths))),
        model=absolute(recipe.model, MODELS),
        data=absolute(recipe.data, data.NAMES),
    )

    on_text = any(VARIANTS[name].on_text for name in recipe.passkey.variants) and recipe.passkey.trials > 0
    corpus: Corpus | None = None
    haystacks: list[corpora.Document] = []
    if recipe.perplexity.documents or on_text:
        recipe = replace(recipe, data=data.pinned(recipe.data))
    if recipe.perplexity.documents:
        documents, in_order = data.open_data(recipe.data)
        corpus = corpora.tokenise(
            documents,
            tokenizer,
            name=recipe.data,
            num_tokens=max(recipe.lengths),
            num_documents=recipe.perplexity.documents,
            in_order=in_order,
        )
    if on_text:
        documents, in_order = data.open_data(recipe.data)
        haystacks = [*islice(documents, max(recipe.passkey.trials, NUM_HAYSTACKS) if in_order else None)]
    prompts = make_prompts(recipe.passkey, tokenizer, lengths=recipe.lengths, documents=haystacks, seed=recipe.seed)
    _check_vocabulary(model, corpus, prompts)
    columns = open_benchmarks(recipe.benchmarks, tokenizer, lengths=recipe.lengths, window=context, seed=recipe.seed)
    if recipe.benchmarks.include_path:
        place = str(Path(recipe.benchmarks.include_path).absolute())
        recipe = replace(recipe, benchmarks=replace(recipe.benchmarks, include_path=place))
    return Setting(
        recipe=recipe,
        out=Path(),
        model=model,
        tokenizer=tokenizer,
        geometry=geometry,
        methods=methods,
        corpus=corpus,
        prompts=prompts,
        benchmarks=columns,
    )


def _check_method(model: PreTrainedModel, method: Method, context: int, recipe: CompareRecipe) -> None:
    """Refuse now what would be refused in between, and a method that does nothing under its name."""
    with extend(model, method, context=context, base=recipe.base, original_context=recipe.original_context) as patch:
        geometry, plan = patch.geometry, patch.plan
        idle = plan.attention_scale == 1 and torch.equal(plan.inv_freq, geometry.inv_freq)
        if idle and method.name != "unscaled" and context > geometry.original_context:
            raise RecipeError(
                f"methods: {spell(method)} leaves every frequency as it was, so that its numbers would be those of "
                "unscaled; change its hyper-parameters, or leave it out"
            )


def _with_numbers(recipe: CompareRecipe, shortest: int, original: int) -> CompareRecipe:
    """Return the recipe with the stride and the last tokens that it leaves open."""
    asked = recipe.perplexity
    stride = asked.stride or max(1, min(256, shortest // 2))
    last = asked.last or max(1, min(256, shortest // 2, original // 2))
    return replace(recipe, perplexity=replace(asked, stride=stride, last=last))


def _check_protocols(recipe: CompareRecipe, shortest: int, original: int) -> None:
    """Refuse numbers of a protocol that leave nothing to score at the shortest length."""
    asked, room = recipe.perplexity, shortest - 1
    if not asked.documents:
        return
    if {"sliding", "yarn-legacy"} & set(asked.protocols) and asked.stride_tokens > room:
        raise RecipeError(
            f"perplexity.stride (--stride): {asked.stride_tokens} would skip tokens in windows of {shortest}; "
            f"give 1 to {room}"
        )
    if "last-k" in asked.protocols and asked.last_tokens > room:
        raise RecipeError(
            f"perplexity.last (--last): {asked.last_tokens} of {shortest} tokens cannot be scored; give 1 to {room}"
        )
    if "gain" in asked.protocols and asked.last_tokens >= original:
        raise RecipeError(
            f"perplexity.last (--last): {asked.last_tokens} tokens fill the original window of {original}; give 1 to "
            f"{original - 1}"
        )


def _asks_passkeys(recipe: CompareRecipe) -> bool:
    asked = recipe.passkey
    placeless = any(not VARIANTS[name].has_place for name in asked.variants)
    return bool(asked.trials and asked.variants and (asked.depths or asked.grid == "absolute" or placeless))


def _check_vocabulary(model: PreTrainedModel, corpus: Corpus | None, prompts: Prompts) -> None:
    rows = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    largest = max((max(d.ids) for d in corpus.documents), default=0) if corpus else 0
    largest = max([largest, *(max(p.ids) for group in prompts.values() for p in group)])
    if largest >= rows:
        raise RecipeError(
            f"model: its tokenizer gives id {largest}, but it has {rows} embeddings; tokenizer and weights do not fit"
        )


def default_lengths(original: int, context: int) -> tuple[int, ...]:
    """Return the original window, its doublings below the context, and the context."""
    lengths = [original]
    while lengths[-1] * 2 <= context:
        lengths.append(lengths[-1] * 2)
    return tuple(sorted({*lengths, context}))


def absolute(name: str, known: Iterable[str]) -> str:
    """Return a path that exists in absolute form, so that the run's own recipe means the same from any folder."""
    # os.path.exists is False where Path.exists raises: for a name too long to be one
    is_path = name and name not in known and not name.startswith(PREFIX) and os.path.exists(name)  # noqa: PTH110
    return str(Path(name).absolute()) if is_path else name


def _open_run(recipe: CompareRecipe, out: Path | None, *, resume: bool) -> Path:
    return open_folder(out, f"compare-{Path(recipe.model).name.lower()}", recipe, resume=resume)


def open_folder(out: Path | None, slug: str, recipe: CompareRecipe | FinetuneRecipe, *, resume: bool) -> Path:
    """Return a run's folder with its resolved recipe in it; a new one that is empty, unless the run goes on.

    Raises:
        RecipeError: it is not empty, or cannot be written.
    """
    if out is None:
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{stamp}-{slug}"
    try:
        if resume:
            return out
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise RecipeError(
                f"out: {out} is not empty and no run is overwritten; name a new folder, or go on with this one: "
                f"--resume --out {out}"
            )
        write_recipe(recipe, out / RECIPE)
    except OSError as error:
        raise RecipeError(f"out: {out} cannot be written: {error.strerror}") from error
    return out


def resumed_recipe(out: Path) -> CompareRecipe:
    """Return the recipe of a run that is to go on.

    Raises:
        RecipeError: the folder holds no run.
    """
    if not (out / RECIPE).is_file():
        raise RecipeError(f"resume: {out} holds no {RECIPE}, so there is no run to go on with")
    return make_recipe(read_recipe(out / RECIPE), where=str(out / RECIPE))


def forward_cost(model: PreTrainedModel, length: int) -> float:
    """Return the operations of one forward over `length` tokens: 2 per weight and token, and causal attention."""
    config = model.config
    width = config.num_attention_heads * size_of_head(config)
    weights = sum(p.numel() for p in model.base_model.parameters())
    return 2.0 * weights * length + 2.0 * config.num_hidden_layers * width * length * (length + 1)
