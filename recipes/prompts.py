"""The passkey prompts of a recipe: variants x lengths x places x trials, the same for every method."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from evals.corpora import Document, encode
from evals.passkey import FILLER, PasskeyPrompt, PromptMaker, RepeatedFiller, TextFiller, clustered
from evals.variants import VARIANTS, Variant
from recipes.load import RecipeError
from recipes.schema import PasskeyTask

SPARE = 8
"""Tokens that a decoded answer may be longer than the key."""
NUM_POSITIONS = 8

Prompts = dict[str, list[PasskeyPrompt]]
"""By protocol."""


def passkey_protocol(task: PasskeyTask, variant: Variant) -> str:
    """Return how a variant's results are called: what makes them incomparable with others is in the name."""
    absolute = "-absolute" if task.grid == "absolute" and variant.has_place else ""
    return variant.name + absolute + ("-generate" if task.generate else "")


def make_prompts(
    task: PasskeyTask,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    documents: Sequence[Document],
    seed: int,
) -> Prompts:
    """Return the prompts of every variant, lengths rising.

    Args:
        documents: the haystacks of variants on real text.

    Raises:
        EvalError: see `PromptMaker.relative`.
        RecipeError: no position fits into a length.
    """
    found: Prompts = {}
    # Controls last: the first is what tables are of
    ordered = sorted((VARIANTS[name] for name in task.variants), key=lambda variant: not variant.has_place)
    for variant in ordered if task.trials else ():
        filler = TextFiller(tokenizer, documents) if variant.on_text else RepeatedFiller(encode(tokenizer, FILLER))
        spare = SPARE if task.generate else 0
        maker = PromptMaker(tokenizer=tokenizer, variant=variant, filler=filler, seed=seed, num_spare=spare)
        prompts: list[PasskeyPrompt] = []
        for length in lengths if variant.has_filler else (maker.shortest(task.trials),):
            if task.grid == "absolute" and variant.has_place:
                some = maker.absolute(length=length, positions=positions(task, lengths), num_trials=task.trials)
                if not some:
                    raise RecipeError(
                        f"passkey.positions: none of them leaves room for needle and question within {length} tokens; "
                        "add a smaller one, or leave that length out"
                    )
            else:
                some = maker.relative(length=length, depths=task.depths, num_trials=task.trials)
            prompts += clustered(some)
        found[passkey_protocol(task, variant)] = prompts
    return found


def positions(task: PasskeyTask, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the absolute positions: the recipe's own, or evenly spaced ones up to the longest length."""
    return task.positions or tuple(max(lengths) * i // NUM_POSITIONS for i in range(NUM_POSITIONS))
