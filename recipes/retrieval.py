"""Passkey prompts as work: scored through their prefix trees, or decoded, and written as samples."""

from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from evals import grading, rows
from evals.grading import Forest, FrequencyKey, PasskeyScore, WrittenScore
from evals.nll import cache_bytes_per_token, itemsize_of, tokens_per_chunk
from evals.passkey import PasskeyPrompt
from evals.prefixes import TOKENS_PER_FORWARD
from evals.rows import SampleKey
from recipes.ranks import Ranks
from recipes.setting import Setting
from recipes.work import Measure, Stretch, Subject, Work


def passkey_work(setting: Setting, subject: Subject, ranks: Ranks) -> Iterator[Work]:
    """Yield this process's share of the passkey prompts under one method, one variant at a time.

    Processes share the trials out, so that prompts which begin alike stay together.
    """
    for protocol, prompts in setting.prompts.items():
        mine = [prompt for prompt in prompts if prompt.trial % ranks.world == ranks.rank]
        if mine:
            yield _work(setting, protocol, mine, subject)


def _work(
    setting: Setting, protocol: str, prompts: Sequence[PasskeyPrompt], subject: Subject, *, careful: bool = False
) -> Work:
    """Return the scoring of prompts; `careful` takes one at a time and holds nothing that another could use."""
    keys = tuple(_key(prompt, protocol, subject.digest) for prompt in prompts)
    lengths = sorted({prompt.length for prompt in prompts}, reverse=True)

    def score(missing: set[SampleKey]) -> Iterator[list[rows.Sample]]:
        wanted = [prompt for prompt, each in zip(prompts, keys, strict=True) if each in missing]
        for scored in _scores(setting, wanted, subject.key, careful=careful):
            yield [
                rows.Sample(
                    **subject.shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                    task="passkey",
                    protocol=protocol,
                    length=wanted[number].length,
                    depth=wanted[number].depth,
                    position=wanted[number].position,
                    unit=wanted[number].unit,
                    metric="exact_match",
                    value=value,
                    weight=wanted[number].num_answer,
                    data_hash=wanted[number].data_hash,
                    detail=_about(wanted[number]) | detail,
                )
                for number, value, detail in scored
            ]

    def parts() -> list[Work]:
        if len(lengths) == 1:
            return [] if careful else [_work(setting, protocol, prompts, subject, careful=True)]
        by_length = ([p for p in prompts if p.length == length] for length in lengths)
        return [_work(setting, protocol, some, subject) for some in by_length]

    return Work(
        measures=tuple(Measure("passkey", protocol, length) for length in lengths),
        keys=keys,
        stretches=partial(_stretches, setting, prompts, subject.key),
        score=score,
        parts=parts,
    )


def _key(prompt: PasskeyPrompt, protocol: str, digest: str) -> SampleKey:
    return (digest, "passkey", protocol, prompt.length, prompt.unit, prompt.data_hash)


def _about(prompt: PasskeyPrompt) -> dict[str, object]:
    return {
        "key": prompt.key,
        "actual_depth": prompt.actual_depth,
        "needle_start": prompt.needle_start,
        "needle_end": prompt.needle_end,
        "haystack": prompt.haystack,
    }


def _scores(
    setting: Setting, prompts: Sequence[PasskeyPrompt], key: FrequencyKey, *, careful: bool
) -> Iterator[list[tuple[int, float, dict[str, object]]]]:
    """Yield (number, 1 or 0, what else is worth keeping) of prompts as they are scored."""
    task, budget = setting.recipe.passkey, setting.recipe.memory_budget
    model, tokenizer = setting.model, setting.tokenizer
    if task.generate:
        token = cache_bytes_per_token(model.config, itemsize_of(model))

        def max_rows(length: int) -> int:
            # Half of the budget for what a forward computes, half for the keys and values that it leaves
            config, itemsize = model.config, itemsize_of(model)
            tokens = tokens_per_chunk(config, itemsize, length, budget, most=TOKENS_PER_FORWARD)
            return 1 if careful else max(1, min(tokens, budget // 2 // token) // length)

        written = grading.write_answers(model, tokenizer, prompts, max_rows=max_rows)
        for some in written:
            yield [(number, float(score.exact), _written(score)) for number, score in some]
        return
    scored = grading.score_prompts(
        model,
        prompts,
        frequency_key=key,
        share=task.share and not careful,
        memory_budget=budget,
        max_rows=1 if careful else None,
    )
    for some in scored:
        yield [(number, float(score.correct), _forced(score, tokenizer)) for number, score in some]


def _forced(score: PasskeyScore, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    predicted = str(tokenizer.decode(list(score.predicted)))
    return {"answer_nll": score.answer_nll, "margin": score.margin, "predicted": predicted}


def _written(score: WrittenScore) -> dict[str, object]:
    return {
        "output": score.output,
        "substring": score.substring,
        "token_match": score.token_match,
        "ran_out": score.ran_out,
    }


def _stretches(setting: Setting, prompts: Sequence[PasskeyPrompt], key: FrequencyKey) -> Iterator[Stretch]:
    """Yield (start, end) of every stretch of tokens that scoring the prompts computes."""
    task = setting.recipe.passkey
    if not task.generate:
        yield from Forest(prompts, frequency_key=key, share=task.share).edges()
        return
    for prompt in prompts:
        first, last = len(prompt.ids) - prompt.num_answer, len(prompt.ids) + prompt.num_spare - 1
        yield 0, first
        for length in range(first + 1, last + 1):
            # Where the frequencies change with a token, the whole sequence is passed again
            yield (length - 1 if key(length) == key(length - 1) else 0), length
