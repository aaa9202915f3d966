"""Methods x lengths x evals on one model, every scored unit on disk before the next begins."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, takewhile
from pathlib import Path

from evals import rows, stats
from evals.corpora import bos_id
from evals.errors import EvalError
from evals.rows import SampleKey
from recipes.aggregate import baseline_of, cells_of, contrasts_of
from recipes.all_work import all_work
from recipes.environment import commit, machine, versions
from recipes.ranks import ALONE, gather, once
from recipes.schema import CompareRecipe
from recipes.setting import Setting
from recipes.work import Cost, Measure, Subject, Work
from rope_ext.patch import Fingerprint, extend
from rope_ext.plan import Method, hyperparameters, label

SAMPLES, CELLS, DIFFERENCES, RUN = "samples.jsonl", "cells.jsonl", "differences.jsonl", "run.json"
UNITS = "units.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Subject):
    """A method, and what exactly was measured under its name."""

    fingerprint: Fingerprint
    inv_freq: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome: cells in the order of methods, and how each fingerprint is called."""

    out: Path
    recipe: CompareRecipe
    cells: tuple[rows.Cell, ...]
    contrasts: tuple[rows.Contrast, ...]
    labels: dict[str, str]
    original_context: int
    ratios: dict[str, list[float]]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether any cell failed."""
        return any(cell.status != "ok" for cell in self.cells)

    def pooled(self, task: str, protocol: str | None = None) -> dict[tuple[str, int], rows.Cell]:
        """Return the cells of a task over all depths, by (fingerprint, length): of its first protocol, or of one."""
        mine = [c for c in self.cells if c.task == task and c.depth is None and c.position is None]
        protocol = protocol or next((c.protocol for c in mine), None)
        return {(c.fingerprint, c.length): c for c in mine if c.protocol == protocol}

    @property
    def threshold(self) -> float | None:
        """The accuracy that the effective length asks for; None where it is a share of 0 or of what is unknown."""
        asked = self.recipe.passkey
        if not asked.of_base:
            return asked.threshold
        pooled = self.pooled("passkey")
        fingerprint = list(self.labels)[self.recipe.methods.index(baseline_of(self.recipe))]
        base = pooled.get((fingerprint, min((n for _, n in pooled), default=0)))
        return asked.threshold * base.value if base is not None and base.value else None

    def effective_lengths(self, *, by_bound: bool = False) -> dict[str, int | None]:
        """Return each method's passkey effective length by fingerprint; None is a measured miss at every length.

        A method is absent if its passkeys were not measured, or if the deciding cell failed.

        Args:
            by_bound: decide on the lower ends of the intervals, which say what n supports, not on the values.
        """
        pooled, threshold = self.pooled("passkey"), self.threshold
        found: dict[str, int | None] = {}
        if threshold is None:
            return found
        for fingerprint in self.labels:
            cells = [pooled[fingerprint, n] for n in self.recipe.lengths if (fingerprint, n) in pooled]
            measured = takewhile(lambda cell: cell.value is not None, cells)
            known = {cell.length: cell.ci_low if by_bound else cell.value for cell in measured}
            reached = stats.effective_length(
                {n: value for n, value in known.items() if value is not None}, threshold=threshold
            )
            # Decided from the shortest length on: a failed cell after nothing but passes leaves the rest open.
            open_end = len(known) < len(cells) and reached == max(known, default=None)
            if cells and not open_end:
                found[fingerprint] = reached
        return found


Advance = Callable[[Cost, str], None]
Failures = dict[str, dict[Measure, str]]
"""By fingerprint and column, why there is no number."""


def run_compare(setting: Setting, *, advance: Advance = lambda _cost, _what: None) -> Comparison:
    """Measure what is not yet measured, write cells, and return the comparison.

    Args:
        setting: from `prepare`.
        advance: called with the cost of what has been done (see `total_cost`) and the method's name.

    Work that fails (out of memory, a loss that is not finite) is tried again in smaller pieces; what fails then makes
    its cells "failed" with the reason, and the rest goes on. Samples on disk count only if their tokens, weights and
    frequencies are the ones asked for now. Of several processes each writes a shard of its own, and the first puts
    them together: what comes out does not depend on how many there were.
    """
    started = time.monotonic()
    out, ranks = setting.out, setting.ranks
    earlier = _earlier_legs(out / RUN)
    subjects, ratios, failures = _measure(setting, started, earlier, advance)
    together: Failures = {}
    for some in gather(ranks, failures):
        for digest, reasons in some.items():
            together[digest] = together.get(digest, {}) | reasons
    once(ranks, lambda: rows.merge_shards(out / SAMPLES))
    done = {sample.key(): sample for sample in rows.read_samples(out / SAMPLES)}
    cells: list[rows.Cell] = []
    scored: dict[str, list[rows.Sample]] = {}
    for subject in subjects:
        wanted = chain.from_iterable(work.keys for work in all_work(setting, subject, ALONE))
        scored[subject.digest] = [done[key] for key in wanted if key in done]
        cells += cells_of(setting, subject.shared, scored[subject.digest], together.get(subject.digest, {}))
    once(ranks, lambda: _write_aggregates(out, cells, [*chain.from_iterable(scored.values())]))
    contrasts = tuple(contrasts_of(setting, scored))
    leg = _leg(setting, subjects, started)

    def finish() -> None:
        rows.write(out / DIFFERENCES, contrasts)
        _write_run(setting, earlier, leg, done=True)

    once(ranks, finish)
    return Comparison(
        out=out,
        recipe=setting.recipe,
        cells=tuple(cells),
        contrasts=contrasts,
        labels={s.digest: label(method) for method, s in zip(setting.methods, subjects, strict=True)},
        original_context=setting.geometry.original_context,
        ratios=ratios,
        seconds=math.fsum(float(str(each["seconds"])) for each in [*earlier, leg]),
    )


def _write_aggregates(out: Path, cells: Sequence[rows.Cell], samples: Sequence[rows.Sample]) -> None:
    """Write the cells, and the units and tokens that they are made of: a file of samples may hold earlier ones too."""
    rows.write(out / CELLS, cells)
    units: dict[str, dict[str, str]] = {}
    for sample in samples:
        units.setdefault(rows.column_name(sample), {})[sample.unit] = sample.data_hash
    rows.write_whole(out / UNITS, json.dumps(units, indent=1) + "\n")


def _measure(
    setting: Setting, started: float, earlier: Sequence[dict[str, object]], advance: Advance
) -> tuple[list[Measured], dict[str, list[float]], Failures]:
    """Score this process's share of the work, method by method, every sample on disk as soon as it is known."""
    recipe, ranks = setting.recipe, setting.ranks
    done = {sample.key(): sample for sample in rows.read_samples(setting.out / SAMPLES)}
    path = setting.out / (SAMPLES if ranks.world == 1 else rows.shard_name(SAMPLES, ranks.rank))
    subjects: list[Measured] = []
    ratios: dict[str, list[float]] = {}
    failures: Failures = {}
    for method in setting.methods:
        with extend(
            setting.model,
            method,
            context=recipe.context,
            base=recipe.base,
            original_context=recipe.original_context,
        ) as patch:
            fingerprint = patch.fingerprint
            subject = Measured(
                key=patch.frequency_key,
                digest=fingerprint.digest,
                shared=_coordinates(setting, method, fingerprint),
                fingerprint=fingerprint,
                inv_freq=tuple(patch.plan.inv_freq.tolist()),
            )
            subjects.append(subject)
            ratios[label(method)] = (patch.plan.inv_freq / setting.geometry.inv_freq).tolist()
            recorder = _Recorder(setting, label(method), path, done, advance)
            for work in all_work(setting, subject, ranks):
                recorder.do(work)
            failures[subject.digest] = recorder.failures
        if ranks.is_first:
            _write_run(setting, earlier, _leg(setting, subjects, started), done=False)
    return subjects, ratios, failures


class _Recorder:
    """Does work under one method: samples to disk as they come, reasons where none came."""

    def __init__(
        self, setting: Setting, name: str, path: Path, done: dict[SampleKey, rows.Sample], advance: Advance
    ) -> None:
        self.setting, self.name, self.path, self.done, self.advance = setting, name, path, done, advance
        self.failures: dict[Measure, str] = {}

    def do(self, work: Work) -> None:
        cost, told = work.cost(self.setting.model), 0.0
        for share in self._shares(work):
            self.advance(Cost().plus(cost, share), self.name)
            told += share
        self.advance(Cost().plus(cost, 1.0 - told), self.name)

    def _shares(self, work: Work) -> Iterator[float]:
        """Score what is missing of a piece of work, and yield how much of it each step was."""
        missing = {key for key in work.keys if key not in self.done}
        if not missing:
            return
        reason = ""
        try:
            for samples in work.score(missing):
                new = [sample for sample in samples if sample.key() in missing]
                rows.append(self.path, new)
                self.done |= {sample.key(): sample for sample in new}
                yield len(new) / len(work.keys)
        except (EvalError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
            reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        if not reason:
            return
        parts = work.parts()  # outside the handler, whose traceback would keep what filled the memory
        for part in parts:
            yield from (share * len(part.keys) / len(work.keys) for share in self._shares(part))
        if not parts:
            self.failures |= dict.fromkeys(work.measures, reason)


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


def _leg(setting: Setting, subjects: Sequence[Measured], started: float) -> dict[str, object]:
    """Return what is recorded of one go at a run."""
    seconds = time.monotonic() - started
    return {
        "started": (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(setting.model.device),
        "processes": setting.ranks.world,
        "fingerprints": {s.digest: s.fingerprint.as_dict() for s in subjects},
        "frequencies": {s.digest: s.inv_freq for s in subjects},
        "seconds": round(seconds, 1),
    }


def _write_run(setting: Setting, earlier: Sequence[dict[str, object]], leg: dict[str, object], done: bool) -> None:
    """Write what a reader needs to trust the rows: every leg of the run with its commit, versions and machine."""
    corpus = setting.corpus
    record = {
        "finished": done,
        "original_context": setting.geometry.original_context,
        "base_frequencies": setting.geometry.inv_freq.tolist(),
        "legs": [*earlier, leg],
        "bos": bos_id(setting.tokenizer),
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
    rows.write_whole(setting.out / RUN, json.dumps(record, indent=2) + "\n")


def check_earlier(out: Path) -> None:
    """Read what a run that goes on has left.

    Raises:
        EvalError: a file of it is damaged.
    """
    _earlier_legs(out / RUN)
    rows.read_samples(out / SAMPLES)


def _earlier_legs(path: Path) -> list[dict[str, object]]:
    """Return the legs of a run that goes on: what was measured before, by which commit, in how many seconds."""
    try:
        legs = json.loads(path.read_text(encoding="utf-8"))["legs"]
        # raises where a leg is none
        _ = math.fsum(leg["seconds"] for leg in legs), [(g["started"], g["commit"], g["machine"]) for g in legs]
        _ = [dict(leg["versions"]) for leg in legs]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EvalError(f"rows: {path} is not a run's record ({error}); remove it to go on without it") from error
    return legs
