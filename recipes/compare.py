"""Methods x lengths x evals on one model, every scored unit on disk before the next begins."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from evals import corpora, passkey, rows, stats
from evals.errors import EvalError
from evals.passkey import PasskeyPrompt
from evals.perplexity import PROTOCOL, prefix_nll
from evals.rows import SampleKey
from recipes.environment import commit, machine, versions
from recipes.schema import CompareRecipe
from recipes.setting import Setting, document_cost, prompt_cost
from rope_ext.patch import Fingerprint, Patch, extend
from rope_ext.plan import Method, hyperparameters, label

TOKENS_PER_FORWARD = 16_384
SAMPLES, CELLS, RUN = "samples.jsonl", "cells.jsonl", "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome: cells in the order of methods, and how each fingerprint is called."""

    out: Path
    recipe: CompareRecipe
    cells: tuple[rows.Cell, ...]
    labels: dict[str, str]
    original_context: int
    ratios: dict[str, list[float]]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether any cell failed."""
        return any(cell.status != "ok" for cell in self.cells)

    def pooled(self, task: str) -> dict[tuple[str, int], rows.Cell]:
        """Return the cells of a task over all depths, by (fingerprint, length)."""
        return {(c.fingerprint, c.length): c for c in self.cells if c.task == task and c.depth is None}

    def effective_lengths(self) -> dict[str, int | None]:
        """Return each method's passkey effective length by fingerprint; None is a measured miss at every length.

        A method is absent if its passkeys were not measured, or if the deciding cell failed.
        """
        pooled = self.pooled("passkey")
        found: dict[str, int | None] = {}
        for fingerprint in self.labels:
            cells = [pooled[fingerprint, n] for n in self.recipe.lengths if (fingerprint, n) in pooled]
            known = {cell.length: cell.value for cell in takewhile(lambda cell: cell.value is not None, cells)}
            reached = stats.effective_length({n: value for n, value in known.items() if value is not None})
            # Decided from the shortest length on: a failed cell after nothing but passes leaves the rest open.
            open_end = len(known) < len(cells) and reached == max(known, default=None)
            if cells and not open_end:
                found[fingerprint] = reached
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one forward scores: one document at all lengths, or a batch of passkey prompts of one length.

    `keys` are the samples that `score` returns, known before it runs; `cost` is the floating-point operations it takes.
    """

    task: str
    lengths: tuple[int, ...]
    keys: tuple[SampleKey, ...]
    cost: float
    score: Callable[[], list[rows.Sample]]


def run_compare(setting: Setting, *, advance: Callable[[float, str], None] = lambda _cost, _what: None) -> Comparison:
    """Measure what is not yet measured, write cells, and return the comparison.

    Args:
        setting: from `prepare`.
        advance: called after each piece of work with its cost (see `total_cost`) and the method's name.

    Work that fails (out of memory, a loss that is not finite) makes its cells "failed" with the reason; the rest
    goes on. Samples on disk count only if their tokens, weights and frequencies are the ones asked for now.
    """
    started = time.monotonic()
    recipe, out = setting.recipe, setting.out
    earlier = _earlier_legs(out / RUN)
    leg: dict[str, object] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(setting.model.device),
        "fingerprints": {},
    }
    done = {sample.key(): sample for sample in rows.read_samples(out / SAMPLES)}
    fingerprints: list[Fingerprint] = []
    ratios: dict[str, list[float]] = {}
    cells: list[rows.Cell] = []
    for method in setting.methods:
        with extend(setting.model, method, context=recipe.context, base=recipe.base) as patch:
            fingerprint = patch.fingerprint
            fingerprints.append(fingerprint)
            leg["fingerprints"] = {fp.digest: fp.as_dict() for fp in fingerprints}
            ratios[label(method)] = (patch.plan.inv_freq / setting.geometry.inv_freq).tolist()
            wanted: list[SampleKey] = []
            failures: dict[tuple[str, int], str] = {}
            for work in _work(setting, patch, fingerprint):
                wanted += work.keys
                _do(work, done, failures, out / SAMPLES)
                advance(work.cost, label(method))
            samples = [done[key] for key in wanted if key in done]
            cells += _cells(setting, method, fingerprint, samples, failures)
        leg["seconds"] = round(time.monotonic() - started, 1)
        _write_run(setting, earlier, leg, done=False)
    rows.write(out / CELLS, cells)
    _write_run(setting, earlier, leg, done=True)
    return Comparison(
        out=out,
        recipe=recipe,
        cells=tuple(cells),
        labels={fp.digest: label(method) for method, fp in zip(setting.methods, fingerprints, strict=True)},
        original_context=setting.geometry.original_context,
        ratios=ratios,
        seconds=math.fsum(float(str(each["seconds"])) for each in [*earlier, leg]),
    )


def _do(work: Work, done: dict[SampleKey, rows.Sample], failures: dict[tuple[str, int], str], path: Path) -> None:
    """Score what is missing of a piece of work and put it on disk, or note why that failed."""
    missing = {key for key in work.keys if key not in done}
    if not missing:
        return
    try:
        new = {sample.key(): sample for sample in work.score()}
    except (EvalError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        failures |= {(work.task, length): reason for length in work.lengths}
        return
    rows.append(path, [new[key] for key in work.keys if key in missing])
    done |= new


def _work(setting: Setting, patch: Patch, fingerprint: Fingerprint) -> Iterator[Work]:
    """Yield everything to score under one method, perplexity first, then passkey from the shortest length."""
    model, tokenizer, lengths = setting.model, setting.tokenizer, setting.recipe.lengths
    shared = _coordinates(setting, patch.method, fingerprint)
    for document in setting.corpus.documents if setting.corpus else ():
        hashes = {length: corpora.hash_ids([document.ids[:length]]) for length in lengths}

        def score_document(
            document: corpora.TokenDocument = document, hashes: dict[int, str] = hashes
        ) -> list[rows.Sample]:
            means = prefix_nll(model, document, lengths, frequency_key=patch.frequency_key)
            return [
                rows.Sample(
                    **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                    task="perplexity",
                    protocol=PROTOCOL,
                    length=length,
                    depth=None,
                    unit=document.name,
                    metric="nll",
                    value=nll,
                    weight=length - 1,
                    data_hash=hashes[length],
                )
                for length, nll in means.items()
            ]

        yield Work(
            task="perplexity",
            lengths=lengths,
            keys=tuple((fingerprint.digest, "perplexity", n, document.name, hashes[n]) for n in lengths),
            cost=document_cost(model, lengths, patch.frequency_key),
            score=score_document,
        )
    for length, prompts in sorted(setting.prompts.items()):
        for batch in _batches(prompts, max(1, TOKENS_PER_FORWARD // length)):

            def score_batch(batch: list[PasskeyPrompt] = batch) -> list[rows.Sample]:
                scores = passkey.score_prompts(model, batch, frequency_key=patch.frequency_key)
                return [
                    rows.Sample(
                        **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                        task="passkey",
                        protocol="classic",
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
                task="passkey",
                lengths=(length,),
                keys=tuple((fingerprint.digest, "passkey", length, _unit(p), corpora.hash_ids([p.ids])) for p in batch),
                cost=sum(prompt_cost(model, prompt, patch.frequency_key) for prompt in batch),
                score=score_batch,
            )


def _batches(prompts: Sequence[PasskeyPrompt], size: int) -> Iterator[list[PasskeyPrompt]]:
    """Yield runs of prompts whose answers have equally many tokens, at most `size` together."""
    by_answer: dict[int, list[PasskeyPrompt]] = {}
    for prompt in prompts:
        by_answer.setdefault(prompt.num_answer, []).append(prompt)
    for group in by_answer.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _unit(prompt: PasskeyPrompt) -> str:
    return f"{prompt.depth:g}/{prompt.trial}"


def _coordinates(setting: Setting, method: Method, fingerprint: Fingerprint) -> dict[str, object]:
    return {
        "method": method.name,
        "method_args": dict(hyperparameters(method)),
        "factor": fingerprint.context / fingerprint.original_context,
        "context": fingerprint.context,
        "model": setting.recipe.model,
        "seed": setting.recipe.seed,
        "fingerprint": fingerprint.digest,
    }


def _cells(
    setting: Setting,
    method: Method,
    fingerprint: Fingerprint,
    samples: Sequence[rows.Sample],
    failures: dict[tuple[str, int], str],
) -> Iterator[rows.Cell]:
    """Yield the cells of one method: perplexity by length, passkey by length pooled and by depth."""
    shared = _coordinates(setting, method, fingerprint) | {"stage": None, "versions": versions(), "commit": commit()}
    for task, protocol, metric in (("perplexity", PROTOCOL, "perplexity"), ("passkey", "classic", "accuracy")):
        for length in setting.recipe.lengths:
            at_length = [s for s in samples if s.task == task and s.length == length]
            reason = failures.get((task, length))
            depths = sorted({s.depth for s in at_length if s.depth is not None})
            for depth in (None, *depths):
                chosen = [s for s in at_length if depth is None or s.depth == depth]
                if not chosen and not reason:
                    continue
                estimate, cell_reason = _estimate(task, chosen, setting.recipe.seed, reason)
                yield rows.Cell(
                    **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                    task=task,
                    protocol=protocol,
                    length=length,
                    depth=depth,
                    metric=metric,
                    value=estimate.value if estimate else None,
                    ci_low=estimate.low if estimate else None,
                    ci_high=estimate.high if estimate else None,
                    n=len(chosen),
                    data_hash=_hash_of([s.data_hash for s in sorted(chosen, key=lambda s: s.unit)]),
                    status="failed" if cell_reason else "ok",
                    reason=cell_reason,
                )


def _estimate(
    task: str, samples: Sequence[rows.Sample], seed: int, reason: str | None
) -> tuple[stats.Estimate | None, str | None]:
    """Return the aggregate of a cell's samples, or the reason why there is none."""
    if reason is not None:
        return None, reason
    try:
        if task == "perplexity":
            return stats.perplexity([s.value for s in samples], [s.weight for s in samples], seed=seed), None
        return stats.wilson(sum(s.value == 1.0 for s in samples), len(samples)), None
    except EvalError as error:
        return None, str(error)


def _hash_of(hashes: Sequence[str]) -> str | None:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] if hashes else None


def _write_run(setting: Setting, earlier: Sequence[dict[str, object]], leg: dict[str, object], done: bool) -> None:
    """Write what a reader needs to trust the rows: every leg of the run with its commit, versions and machine."""
    corpus = setting.corpus
    record = {
        "finished": done,
        "original_context": setting.geometry.original_context,
        "legs": [*earlier, leg],
        "corpus": None
        if corpus is None
        else {
            "name": corpus.name,
            "documents": [d.name for d in corpus.documents],
            "num_tokens": corpus.num_tokens,
            "num_too_short": corpus.num_too_short,
            "bos": corpus.bos,
            "data_hash": corpus.data_hash,
        },
    }
    partial = setting.out / f"{RUN}.partial"
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(setting.out / RUN)


def _earlier_legs(path: Path) -> list[dict[str, object]]:
    """Return the legs of a run that goes on: what was measured before, by which commit, in how many seconds."""
    try:
        legs = json.loads(path.read_text(encoding="utf-8"))["legs"]
        _ = math.fsum(leg["seconds"] for leg in legs)  # raises where a leg is none
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EvalError(f"rows: {path} is not a run's record ({error}); remove it to go on without it") from error
    return legs
