"""What a comparison has to score under one method, cut into pieces that are each on disk before the next begins."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from evals import corpora, passkey, rows
from evals.corpora import TokenDocument
from evals.passkey import PasskeyPrompt, answer_lengths, shared_tokens
from evals.perplexity import (
    Scored,
    by_position,
    group_lengths,
    last_k,
    long_context_gain,
    nll_by_length,
    sliding_nll,
    windows,
)
from evals.rows import SampleKey
from recipes.schema import CompareRecipe
from recipes.setting import Setting, forward_cost
from rope_ext.plan import Method

TOKENS_PER_FORWARD = 16_384
FROM_ONE_FORWARD = ("prefix", "last-k", "by-position")
PASSKEY = "classic"
FrequencyKey = Callable[[int], Hashable]


class Measure(NamedTuple):
    """One column of results: a task, the protocol with its numbers, and a length."""

    task: str
    protocol: str
    length: int


METRICS = {
    "perplexity": "perplexity",
    "nll-by-position": "nll",
    "long-context-gain": "nll-difference",
    "passkey": "accuracy",
}
"""The metric of each task's cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is scored in one go: a document, or a batch of passkey prompts of one length.

    `keys` are the samples that `score` returns, known before it runs; `cost` is the floating-point operations it takes.
    """

    measures: tuple[Measure, ...]
    keys: tuple[SampleKey, ...]
    cost: float
    score: Callable[[], list[rows.Sample]]


def measures(recipe: CompareRecipe, original: int) -> list[Measure]:
    """Return every column of a run, in the order in which tables show them: protocols as asked, lengths rising."""
    found: list[Measure] = []
    if recipe.perplexity.documents:
        for protocol in recipe.perplexity.protocols:
            found += [_measure(recipe, protocol, n) for n in recipe.lengths if protocol != "gain" or n > original]
    if recipe.passkey.trials:
        found += [Measure("passkey", PASSKEY, length) for length in recipe.lengths]
    return found


def _measure(recipe: CompareRecipe, protocol: str, length: int) -> Measure:
    """Return the column of a protocol; its own numbers are part of its name, since they make results incomparable."""
    asked = recipe.perplexity
    return {
        "prefix": Measure("perplexity", "prefix", length),
        "last-k": Measure("perplexity", f"last-{asked.last}", length),
        "sliding": Measure("perplexity", f"sliding-{asked.stride}", length),
        "yarn-legacy": Measure("perplexity", f"yarn-legacy-{asked.stride}", length),
        "by-position": Measure("nll-by-position", "by-position", length),
        "gain": Measure("long-context-gain", f"gain-{asked.last}", length),
    }[protocol]


def document_work(setting: Setting, key: FrequencyKey, digest: str, shared: dict[str, object]) -> Iterator[Work]:
    """Yield the work on documents under one method.

    Args:
        key: the method's frequency key.
        digest: of its fingerprint.
        shared: the fields that all its samples have in common.
    """
    recipe, asked = setting.recipe, setting.recipe.perplexity
    together = [p for p in asked.protocols if p in FROM_ONE_FORWARD]
    sliding = [p for p in asked.protocols if p in {"sliding", "yarn-legacy"}]
    for document in setting.corpus.documents if setting.corpus else ():
        wanted = [_measure(recipe, p, n) for p in together for n in recipe.lengths]
        if wanted:
            scored = partial(_score_together, setting, document, together, key)
            yield _work(document, wanted, scored, document_cost(setting.model, recipe.lengths, key), digest, shared)
        for length in recipe.lengths if sliding else ():
            wanted = [_measure(recipe, p, length) for p in sliding]
            scored = partial(_score_sliding, setting, document, sliding, length, key)
            yield _work(document, wanted, scored, sliding_cost(setting, document, length), digest, shared)
        for length in recipe.lengths if "gain" in asked.protocols else ():
            original = setting.geometry.original_context
            if length > original:
                scored = partial(_score_gain, setting, document, length, key)
                cost = forward_cost(setting.model, length) + forward_cost(setting.model, original)
                yield _work(document, [_measure(recipe, "gain", length)], scored, cost, digest, shared)


def _work(
    document: TokenDocument,
    wanted: Sequence[Measure],
    score: Callable[[], dict[Measure, Scored]],
    cost: float,
    digest: str,
    shared: dict[str, object],
) -> Work:
    hashes = {measure: _hash(document, measure) for measure in wanted}

    def samples() -> list[rows.Sample]:
        return [
            rows.Sample(
                **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                task=measure.task,
                protocol=measure.protocol,
                length=measure.length,
                depth=None,
                unit=document.name,
                metric="nll",
                value=found.nll,
                # The legacy mean counts windows, not tokens
                weight=found.windows if measure.protocol.startswith("yarn-legacy") else found.tokens,
                data_hash=hashes[measure],
                detail={"tokens": found.tokens, "windows": found.windows},
            )
            for measure, found in score().items()
        ]

    keys = tuple((digest, m.task, m.protocol, m.length, document.name, hashes[m]) for m in wanted)
    return Work(measures=tuple(wanted), keys=keys, cost=cost, score=samples)


def _hash(document: TokenDocument, measure: Measure) -> str:
    """Hash the ids that a measure looks at: the first L, or the whole document where windows move over it."""
    whole = measure.task == "nll-by-position" or measure.protocol.startswith(("sliding", "yarn-legacy"))
    return corpora.hash_ids([document.ids if whole else document.ids[: measure.length]])


def _score_together(
    setting: Setting, document: TokenDocument, protocols: Sequence[str], key: FrequencyKey
) -> dict[Measure, Scored]:
    recipe = setting.recipe
    nll = nll_by_length(setting.model, document, recipe.lengths, frequency_key=key, memory_budget=recipe.memory_budget)
    found: dict[Measure, Scored] = {}
    for protocol in protocols:
        if protocol == "by-position":
            buckets = by_position(nll[max(recipe.lengths)], (0, *recipe.lengths))
            found |= {_measure(recipe, protocol, end): scored for end, scored in buckets.items()}
            continue
        for length, values in nll.items():
            k = recipe.perplexity.last if protocol == "last-k" else len(values)
            found[_measure(recipe, protocol, length)] = last_k(values, k)
    return found


def _score_sliding(
    setting: Setting, document: TokenDocument, protocols: Sequence[str], length: int, key: FrequencyKey
) -> dict[Measure, Scored]:
    recipe, corpus = setting.recipe, setting.corpus
    assert corpus is not None
    weighted, legacy = sliding_nll(
        setting.model,
        document,
        length,
        stride=recipe.perplexity.stride,
        bos=corpus.bos,
        frequency_key=key,
        memory_budget=recipe.memory_budget,
    )
    both = {"sliding": weighted, "yarn-legacy": legacy}
    return {_measure(recipe, protocol, length): both[protocol] for protocol in protocols}


def _score_gain(setting: Setting, document: TokenDocument, length: int, key: FrequencyKey) -> dict[Measure, Scored]:
    recipe, corpus = setting.recipe, setting.corpus
    assert corpus is not None
    gain = long_context_gain(
        setting.model,
        document,
        length,
        original=setting.geometry.original_context,
        k=recipe.perplexity.last,
        bos=corpus.bos,
        frequency_key=key,
        memory_budget=recipe.memory_budget,
    )
    return {_measure(recipe, "gain", length): gain}


def passkey_work(setting: Setting, key: FrequencyKey, digest: str, shared: dict[str, object]) -> Iterator[Work]:
    """Yield the passkey prompts under one method, one depth of one length at a time, from the shortest.

    See `document_work` for the arguments.
    """
    model, tokenizer = setting.model, setting.tokenizer
    share = setting.recipe.passkey.share
    for length, prompts in sorted(setting.prompts.items()):
        for batch in _batches(prompts):

            def score_batch(batch: list[PasskeyPrompt] = batch) -> list[rows.Sample]:
                most = max(1, TOKENS_PER_FORWARD // batch[0].length)
                scores = passkey.score_prompts(model, batch, frequency_key=key, share=share, max_rows=most)
                return [
                    rows.Sample(
                        **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                        task="passkey",
                        protocol=PASSKEY,
                        length=prompt.length,
                        depth=prompt.depth,
                        unit=_unit(prompt),
                        metric="exact_match",
                        value=float(score.correct),
                        weight=prompt.num_answer,
                        data_hash=corpora.hash_ids([prompt.ids]),
                        detail={
                            "key": prompt.key,
                            "actual_depth": prompt.actual_depth,
                            "answer_nll": score.answer_nll,
                            "predicted": tokenizer.decode(list(score.predicted)),
                        },
                    )
                    for prompt, score in zip(batch, scores, strict=True)
                ]

            yield Work(
                measures=(Measure("passkey", PASSKEY, length),),
                keys=tuple((digest, "passkey", PASSKEY, length, _unit(p), corpora.hash_ids([p.ids])) for p in batch),
                cost=prompts_cost(setting, batch, key),
                score=score_batch,
            )


def _batches(prompts: Sequence[PasskeyPrompt]) -> Iterator[list[PasskeyPrompt]]:
    """Yield the prompts of one depth whose answers have equally many tokens: those that have most in common."""
    groups: dict[tuple[float, int], list[PasskeyPrompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.depth, prompt.num_answer), []).append(prompt)
    yield from groups.values()


def _unit(prompt: PasskeyPrompt) -> str:
    return f"{prompt.depth:g}/{prompt.trial}"


def total_cost(setting: Setting) -> float:
    """Return the work of the whole comparison in floating-point operations, for a progress bar's estimate."""
    total = 0.0
    for method in setting.methods:
        key = partial(_key, method, setting)
        total += sum(work.cost for work in document_work(setting, key, "", {}))
        total += sum(prompts_cost(setting, batch, key) for p in setting.prompts.values() for batch in _batches(p))
    return total


def _key(method: Method, setting: Setting, seq_len: int) -> Hashable:
    return method.frequency_key(setting.geometry, context=int(setting.recipe.context or 0), seq_len=seq_len)


def document_cost(model: PreTrainedModel, lengths: Sequence[int], frequency_key: FrequencyKey) -> float:
    """Return the operations of one document at all lengths: a forward for each that needs one of its own."""
    return sum(forward_cost(model, longest) for longest, _ in group_lengths(lengths, frequency_key))


def sliding_cost(setting: Setting, document: TokenDocument, length: int) -> float:
    """Return the operations of all windows over one document."""
    bos = setting.corpus.bos if setting.corpus else None
    moved = windows(document, length, stride=setting.recipe.perplexity.stride, bos=bos)
    return sum(forward_cost(setting.model, len(window.ids)) for window in moved)


def prompts_cost(setting: Setting, prompts: Sequence[PasskeyPrompt], frequency_key: FrequencyKey) -> float:
    """Return the operations of passkey prompts that are scored together, what they share counted once."""
    model, total = setting.model, 0.0
    for key, group in groupby(answer_lengths(prompts[0]), key=frequency_key):
        lengths = list(group)
        common = 0
        if setting.recipe.passkey.share:
            common = shared_tokens(torch.tensor([prompt.ids[: lengths[0]] for prompt in prompts]))
            common = common if frequency_key(common) == key else 0
        each, once = forward_cost(model, lengths[-1]), forward_cost(model, common)
        total += once + len(prompts) * (each - once)
    return total
