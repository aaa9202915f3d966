"""A fine-tune made ready: everything loaded and checked before the first step, and a folder that is the run's own."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from evals.corpora import bos_id
from recipes import data
from recipes.load import RecipeError, read_recipe
from recipes.lora import check_adapter
from recipes.packing import Plan, Shape, plan_rows, pools_of
from recipes.ranks import ALONE, Ranks, everywhere, once
from recipes.schema import CompareRecipe
from recipes.setting import MODELS, RECIPE, Setting, absolute, load_setting, open_folder
from recipes.sources import TRAIN, Tokenised, open_source, write_source
from recipes.train import Rows, accumulation, precision_of
from recipes.tuning import FinetuneRecipe
from recipes.tuning_load import make_finetune, row_tokens_of
from rope_ext.export import is_own_format, portability
from rope_ext.patch import extend
from rope_ext.plan import STATIC, Method

NEEDED = ("accelerate", "datasets")
PIP = "pip install 'rope-ext[train]'"
TELLING = 512
"""As many tokens tell documents apart, whatever licence they begin with."""
ADAPTER, MODEL = "adapter", "model"
"""The folders of what training has made, within the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneSetting:
    """Everything that is checked before the first step.

    Attributes:
        evaluation: the comparison that is run before and after; its model is the one to be trained.
        method: to be trained under.
        rows: of all steps, in order.
        sources: of the rows.
    """

    recipe: FinetuneRecipe
    out: Path
    evaluation: Setting
    method: Method
    rows: Rows
    sources: tuple[Tokenised, ...]
    ranks: Ranks = ALONE

    @property
    def plan(self) -> Plan:
        """What stands in which row."""
        return self.rows.plan

    @property
    def is_sharded(self) -> bool:
        """Whether the model that is trained lies in pieces on several processes."""
        parallel = self.recipe.train.parallel
        return parallel.fsdp > 1 or parallel.context > 1 or parallel.ulysses > 1


def prepare_finetune(
    recipe: FinetuneRecipe, out: Path | None, *, resume: bool = False, ranks: Ranks = ALONE
) -> FinetuneSetting:
    """Load and check everything, then make the run's folder and write the resolved recipe into it.

    Raises:
        RopeExtError, EvalError: any bad input; nothing was written then but the cache of tokens.
    """
    setting = load_finetune(recipe, ranks=ranks)
    name = f"finetune-{Path(recipe.model).name.lower()}-{setting.method.name}"
    return replace(setting, out=once(ranks, lambda: open_folder(out, name, setting.recipe, resume=resume)))


def load_finetune(recipe: FinetuneRecipe, *, ranks: Ranks = ALONE) -> FinetuneSetting:
    """Load and check everything, and write nothing but the cache of tokens; the folder of the result is none yet.

    Of several processes all load, then the first tokenises, then all read what it wrote.

    Raises:
        RopeExtError, EvalError: any bad input.
    """
    recipe, evaluation = everywhere(ranks, lambda: _loaded(recipe, ranks))
    shape = _shape(recipe, evaluation)
    text_tokens = shape.row_tokens - shape.bookends
    once(ranks, lambda: [write_source(s, evaluation.tokenizer, text_tokens=text_tokens) for s in recipe.data.sources])
    rows, sources = everywhere(ranks, lambda: _plan(recipe, evaluation, shape))
    return FinetuneSetting(
        recipe=recipe,
        out=Path(),
        evaluation=replace(evaluation, ranks=ranks),
        method=evaluation.methods[-1],
        rows=rows,
        sources=sources,
        ranks=ranks,
    )


def _loaded(recipe: FinetuneRecipe, ranks: Ranks) -> tuple[FinetuneRecipe, Setting]:
    """Return the resolved recipe and the comparison around the training, everything but the rows checked."""
    missing = [name for name in (*NEEDED, *(["peft"] if recipe.train.adapter else [])) if not _installed(name)]
    missing += ["liger_kernel"] if recipe.train.liger and not _installed("liger_kernel") else []
    # What wandb lacks is told as the run ends, which it never stops
    missing += [name for name in recipe.track.report_to if name != "wandb" and not _installed(name)]
    if missing:
        raise RecipeError(f"finetune: it needs {', '.join(missing)}; {PIP}, and what track or liger ask for")
    accumulation(recipe.train, ranks.world)
    asked = comparison_of(recipe)
    evaluation = load_setting(asked)
    _check_device(recipe, evaluation.model.device)
    if recipe.train.adapter is not None:
        check_adapter(evaluation.model, recipe.train.adapter)
    recipe = _resolved(recipe, evaluation)
    _check_method(recipe, evaluation, evaluation.methods[-1])
    return recipe, evaluation


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def comparison_of(recipe: FinetuneRecipe) -> CompareRecipe:
    """Return the comparison of a fine-tune: the model as it came, and under the method, on one set of tokens."""
    asked = recipe.eval
    return CompareRecipe(
        model=recipe.model,
        methods=("unscaled",) if recipe.method == "unscaled" else ("unscaled", recipe.method),
        context=recipe.context,
        lengths=asked.lengths,
        base=recipe.base,
        original_context=recipe.original_context,
        data=asked.data,
        perplexity=asked.perplexity,
        passkey=asked.passkey,
        benchmarks=asked.benchmarks,
        memory_budget=asked.memory_budget,
        seed=asked.seed,
    )


def _check_device(recipe: FinetuneRecipe, device: torch.device) -> None:
    on_cpu, parallel = device.type == "cpu", recipe.train.parallel
    if on_cpu and recipe.train.liger:
        raise RecipeError("train.liger: its kernels need a GPU, and there is none here; leave it out")
    checkpointing = recipe.train.activation_checkpointing
    if on_cpu and checkpointing is not None and checkpointing.offload:
        raise RecipeError(
            "train.activation_checkpointing.offload: on a CPU activations lie in its memory already; leave it out"
        )
    if on_cpu and (parallel.context > 1 or parallel.ulysses > 1):
        raise RecipeError(
            "train.parallel: context and ulysses cut rows over GPUs, and there is none here; leave them out"
        )


def _check_method(recipe: FinetuneRecipe, evaluation: Setting, method: Method) -> None:
    """Refuse methods that could not be written at the end, or whose frequencies would be wrong in the rows asked for.

    Raises:
        RecipeError: they would be wrong.
        ExportError: stock code does not follow the method.
    """
    adapter, model = recipe.train.adapter, evaluation.model
    with extend(
        model, method, context=recipe.context, base=recipe.base, original_context=recipe.original_context
    ) as patch:
        is_static = all(patch.frequency_key(n) == STATIC for n in (1, recipe.context))
        slopes = patch.plan.alibi_slopes
        own = is_own_format(recipe.format, allow_approximate=recipe.allow_approximate)
        if not own and (adapter is None or adapter.merge):
            portability(model, allow_approximate=recipe.allow_approximate)
    parallel, row = recipe.train.parallel, row_tokens_of(recipe)
    if slopes is not None and (parallel.context > 1 or parallel.ulysses > 1):
        raise RecipeError(
            f"train.parallel: {method.name} biases attention by distance, which a row cut over GPUs loses; leave "
            "context and ulysses out"
        )
    if is_static:
        return
    if parallel.context > 1 or parallel.ulysses > 1:
        raise RecipeError(
            f"train.parallel: the frequencies of {method.name} follow the length of a row, and each process would see "
            "its own part's; leave context and ulysses out"
        )
    if recipe.data.pose is None and recipe.data.min_tokens < row:
        raise RecipeError(
            f"data.min_tokens: the frequencies of {method.name} follow the length of one sequence, so that a row may "
            f"hold one alone; keep whole rows with data.min_tokens: {row}"
        )


def _resolved(recipe: FinetuneRecipe, evaluation: Setting) -> FinetuneRecipe:
    """Return the recipe with everything said that it left open."""
    asked, data_ = evaluation.recipe, recipe.data
    sources = tuple(
        replace(s, name=s.name if s.name == TRAIN else data.pinned(absolute(s.name, data.NAMES))) for s in data_.sources
    )
    row_tokens = None if data_.pose else data_.row_tokens or recipe.context
    return replace(
        recipe,
        model=absolute(recipe.model, MODELS),
        data=replace(data_, sources=sources, row_tokens=row_tokens),
        eval=replace(recipe.eval, data=asked.data, lengths=asked.lengths, perplexity=asked.perplexity),
    )


def _shape(recipe: FinetuneRecipe, evaluation: Setting) -> Shape:
    """Return what rows look like with this tokenizer."""
    asked, tokenizer = recipe.data, evaluation.tokenizer
    eos = cast("int | None", tokenizer.eos_token_id) if asked.eos else None
    if asked.eos and eos is None:
        raise RecipeError("data.eos: the tokenizer has no EOS; leave it out")
    row_tokens = row_tokens_of(recipe)
    return Shape(
        row_tokens=row_tokens,
        bos=bos_id(tokenizer),
        eos=eos,
        every_piece=asked.bookends == "piece",
        min_tokens=asked.min_tokens,
        whole_rows=asked.pose is not None or asked.min_tokens >= row_tokens,
    )


def _plan(recipe: FinetuneRecipe, evaluation: Setting, shape: Shape) -> tuple[Rows, tuple[Tokenised, ...]]:
    asked, text_tokens = recipe.data, shape.row_tokens - shape.bookends
    sources = tuple(open_source(source, evaluation.tokenizer, text_tokens=text_tokens) for source in asked.sources)
    for source in sources:
        _check_apart(source, evaluation)
    pools = [
        pool
        for source, documents in zip(asked.sources, sources, strict=True)
        for pool in pools_of(documents, source.share, long_tokens=source.long_tokens, long_share=source.long_share)
    ]
    num_rows = recipe.train.steps * recipe.train.rows_per_step
    plan = plan_rows(pools, shape, num_rows=num_rows, seed=recipe.seed)
    return Rows(plan, pose=asked.pose, context=recipe.context, seed=recipe.seed), sources


def _check_apart(source: Tokenised, evaluation: Setting) -> None:
    """Refuse to train on what is measured on: a document that begins as one of the evaluation's does."""
    corpus = evaluation.corpus
    if corpus is None:
        return
    first = 0 if corpus.bos is None else 1
    measured = {document.ids[first:][:TELLING]: document.name for document in corpus.documents}
    sizes = {len(beginning) for beginning in measured}
    for number in np.flatnonzero(source.lengths >= min(sizes)).tolist():
        ids = source.ids(number)
        for size in sizes:
            name = measured.get(tuple(ids[:size].tolist()))
            if name is not None:
                raise RecipeError(
                    f"data.sources ({source.name}): its document {number} is {name!r}, which is measured on; what is "
                    "trained on and eval.data have to be apart"
                )


def resumed_finetune(out: Path) -> FinetuneRecipe:
    """Return the recipe of a fine-tune that is to go on.

    Raises:
        RecipeError: the folder holds no run.
    """
    if not (out / RECIPE).is_file():
        raise RecipeError(f"resume: {out} holds no {RECIPE}, so there is no run to go on with")
    return make_finetune(read_recipe(out / RECIPE), where=str(out / RECIPE))


def computed_in(setting: FinetuneSetting) -> str:
    """Return the precision that is trained in: fp32, bf16 or pure-bf16."""
    return precision_of(setting.recipe.train, setting.evaluation.model.device)
