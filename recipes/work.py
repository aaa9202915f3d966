"""What a comparison has to score under one method, cut into pieces that are each on disk before the next begins."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from evals import corpora, rows
from evals.corpora import TokenDocument
from evals.metrics import HARNESS
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
from recipes.ranks import Ranks
from recipes.setting import Setting, forward_cost

FROM_ONE_FORWARD = ("prefix", "last-k", "by-position")
FrequencyKey = Callable[[int], Hashable]


class Measure(NamedTuple):
    """One column of results: a task, the protocol with its numbers, and a length."""

    task: str
    protocol: str
    length: int


Stretch = tuple[int, int]
"""Tokens from start to end of a sequence, computed over the keys and values of what is before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is scored in one go: a document, or the passkey prompts of one variant.

    Attributes:
        keys: of the samples that `score` returns, known before it runs.
        stretches: the tokens that it computes, worked out when asked.
        score: from the keys that are still missing to samples, handed over as they become known.
        parts: the same work in smaller pieces, each with fewer measures, for when the whole has failed; or nothing.
    """

    measures: tuple[Measure, ...]
    keys: tuple[SampleKey, ...]
    stretches: Callable[[], Iterable[Stretch]]
    score: Callable[[set[SampleKey]], Iterator[list[rows.Sample]]]
    parts: Callable[[], list["Work"]]

    def cost(self, model: PreTrainedModel) -> "Cost":
        """Return the tokens that are computed, and the floating-point operations."""
        stretches = list(self.stretches())
        operations = sum(forward_cost(model, end) - forward_cost(model, start) for start, end in stretches)
        return Cost(sum(end - start for start, end in stretches), operations)


class Cost(NamedTuple):
    """What work takes."""

    tokens: float = 0.0
    operations: float = 0.0

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        """Return both together, the other one so many times."""
        return Cost(self.tokens + times * other.tokens, self.operations + times * other.operations)


def measures(setting: Setting) -> list[Measure]:
    """Return every column of a run, in the order in which tables show them: protocols as asked, lengths rising."""
    recipe, original = setting.recipe, setting.geometry.original_context
    found: list[Measure] = []
    if recipe.perplexity.documents:
        for protocol in recipe.perplexity.protocols:
            found += [_measure(setting, protocol, n) for n in recipe.lengths if protocol != "gain" or n > original]
    for protocol, prompts in setting.prompts.items():
        found += [Measure("passkey", protocol, length) for length in sorted({prompt.length for prompt in prompts})]
    found += [
        Measure(HARNESS + column.name, protocol, column.length)
        for column in setting.benchmarks
        for protocol in protocols_of(column)
    ]
    return found


def protocols_of(column: Any) -> dict[str, Any]:
    """Return the metrics of one of lm-eval's tasks by how a column of results calls them."""
    return {f"{metric.label}, {column.shots}-shot": metric for metric in column.metrics}


def _measure(setting: Setting, protocol: str, length: int) -> Measure:
    """Return the column of a protocol; its own numbers are part of its name, since they make results incomparable."""
    asked, original = setting.recipe.perplexity, setting.geometry.original_context
    return {
        "prefix": Measure("perplexity", "prefix", length),
        "last-k": Measure("perplexity", f"last-{asked.last_tokens}", length),
        "sliding": Measure("perplexity", f"sliding-{asked.stride_tokens}", length),
        "yarn-legacy": Measure("perplexity", f"yarn-legacy-{asked.stride_tokens}", length),
        "by-position": Measure("nll-by-position", "by-position", length),
        "gain": Measure("long-context-gain", f"gain-{asked.last_tokens}-over-{original}", length),
    }[protocol]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The method that work is done under.

    Attributes:
        key: its frequency key.
        digest: of its fingerprint.
        shared: the fields that all its samples have in common.
    """

    key: FrequencyKey
    digest: str
    shared: dict[str, object]


def document_work(setting: Setting, subject: Subject, ranks: Ranks) -> Iterator[Work]:
    """Yield this process's share of the work on documents under one method, the longest windows of each first."""
    recipe, asked = setting.recipe, setting.recipe.perplexity
    together = [p for p in asked.protocols if p in FROM_ONE_FORWARD]
    sliding = [p for p in asked.protocols if p in {"sliding", "yarn-legacy"}]
    original = setting.geometry.original_context
    for document in ranks.mine(setting.corpus.documents) if setting.corpus else ():
        if together:
            yield _together(setting, document, together, recipe.lengths, subject)
        for length in sorted(recipe.lengths, reverse=True):
            if sliding and setting.corpus:
                scored = partial(_score_sliding, setting, document, sliding, length, subject.key)
                wanted = [_measure(setting, p, length) for p in sliding]
                moved = windows(
                    document, length, stride=asked.stride_tokens, bos=setting.corpus.bos if setting.corpus else None
                )
                yield _work(document, wanted, scored, [(0, len(window.ids)) for window in moved], subject)
            if "gain" in asked.protocols and length > original:
                scored = partial(_score_gain, setting, document, length, subject.key)
                yield _work(
                    document, [_measure(setting, "gain", length)], scored, [(0, length), (0, original)], subject
                )


def _together(
    setting: Setting, document: TokenDocument, protocols: Sequence[str], lengths: Sequence[int], subject: Subject
) -> Work:
    """Return the protocols that one forward over the longest length gives; its parts have one for each length."""
    needed = lengths if "by-position" not in protocols else setting.recipe.lengths
    stretches = [(0, longest) for longest, _ in group_lengths(needed, subject.key)]
    wanted = [_measure(setting, p, n) for p in protocols for n in lengths]
    scored = partial(_score_together, setting, document, protocols, lengths, subject.key)

    def parts() -> list[Work]:
        if len(lengths) == 1 or len(protocols) + len(lengths) == 2:
            return []
        own = [p for p in protocols if p != "by-position"]
        smaller = [_together(setting, document, own, (n,), subject) for n in sorted(lengths, reverse=True) if own]
        if own and len(own) < len(protocols):
            smaller.append(_together(setting, document, ["by-position"], lengths, subject))
        return smaller

    return _work(document, wanted, scored, stretches, subject, parts, setting.recipe.lengths)


def _work(
    document: TokenDocument,
    wanted: Sequence[Measure],
    score: Callable[[], dict[Measure, Scored]],
    stretches: Sequence[Stretch],
    subject: Subject,
    parts: Callable[[], list[Work]] = list,
    edges: Sequence[int] = (),
) -> Work:
    hashes = {measure: _hash(document, measure, edges) for measure in wanted}

    def samples(_missing: set[SampleKey]) -> Iterator[list[rows.Sample]]:
        yield [
            rows.Sample(
                **subject.shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
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

    keys = tuple((subject.digest, m.task, m.protocol, m.length, document.name, hashes[m]) for m in wanted)
    return Work(measures=tuple(wanted), keys=keys, stretches=lambda: stretches, score=samples, parts=parts)


def _hash(document: TokenDocument, measure: Measure, edges: Sequence[int]) -> str:
    """Hash the ids that a measure looks at: the first L, or the whole document where windows move over it.

    A bucket of positions also begins somewhere, at the edge before its length.
    """
    if measure.task == "nll-by-position":
        before = [edge for edge in sorted(edges) if edge < measure.length]
        return corpora.hash_ids([document.ids, before[-1:]])
    whole = measure.protocol.startswith(("sliding", "yarn-legacy"))
    return corpora.hash_ids([document.ids if whole else document.ids[: measure.length]])


def _score_together(
    setting: Setting, document: TokenDocument, protocols: Sequence[str], lengths: Sequence[int], key: FrequencyKey
) -> dict[Measure, Scored]:
    recipe = setting.recipe
    needed = lengths if "by-position" not in protocols else recipe.lengths
    nll = nll_by_length(setting.model, document, needed, frequency_key=key, memory_budget=recipe.memory_budget)
    found: dict[Measure, Scored] = {}
    for protocol in protocols:
        if protocol == "by-position":
            buckets = by_position(nll[max(needed)], (0, *needed))
            found |= {_measure(setting, protocol, end): scored for end, scored in buckets.items() if end in lengths}
            continue
        for length in lengths:
            k = recipe.perplexity.last_tokens if protocol == "last-k" else len(nll[length])
            found[_measure(setting, protocol, length)] = last_k(nll[length], k)
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
        stride=recipe.perplexity.stride_tokens,
        bos=corpus.bos,
        frequency_key=key,
        memory_budget=recipe.memory_budget,
    )
    both = {"sliding": weighted, "yarn-legacy": legacy}
    return {_measure(setting, protocol, length): both[protocol] for protocol in protocols}


def _score_gain(setting: Setting, document: TokenDocument, length: int, key: FrequencyKey) -> dict[Measure, Scored]:
    recipe, corpus = setting.recipe, setting.corpus
    assert corpus is not None
    gain = long_context_gain(
        setting.model,
        document,
        length,
        original=setting.geometry.original_context,
        k=recipe.perplexity.last_tokens,
        bos=corpus.bos,
        frequency_key=key,
        memory_budget=recipe.memory_budget,
    )
    return {_measure(setting, "gain", length): gain}
