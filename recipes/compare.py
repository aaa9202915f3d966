"""Methods x lengths x evals on one model, every scored unit on disk before the next begins."""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, takewhile
from pathlib import Path

from evals import rows, stats
from evals.corpora import bos_id
from evals.errors import EvalError
from evals.rows import SampleKey
from recipes.all_work import all_work
from recipes.environment import commit, machine, versions
from recipes.ranks import ALONE, gather, once
from recipes.schema import CompareRecipe
from recipes.setting import Setting
from recipes.work import METRICS, Cost, Measure, Subject, Work, measures
from rope_ext.patch import Fingerprint, extend
from rope_ext.plan import Method, hyperparameters, label

SAMPLES, CELLS, DIFFERENCES, RUN = "samples.jsonl", "cells.jsonl", "differences.jsonl", "run.json"
UNITS = "units.json"
RESOLUTION = 1e-5
"""Nats that fp32 sums in another order differ by: less is no difference."""
POOLED = (None, None)
"""The depth and position of a cell over all places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Subject):
    """A method, and what exactly was measured under its name."""

    fingerprint: Fingerprint


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
        cells += _cells(setting, subject.shared, scored[subject.digest], together.get(subject.digest, {}))
    once(ranks, lambda: _write_aggregates(out, cells, [*chain.from_iterable(scored.values())]))
    contrasts = tuple(_contrasts(setting, scored))
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
    partial = out / f"{UNITS}.partial"
    partial.write_text(json.dumps(units, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / UNITS)


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


def _cells(
    setting: Setting, shared: dict[str, object], samples: Sequence[rows.Sample], failures: dict[Measure, str]
) -> Iterator[rows.Cell]:
    """Yield the cells of one method, measure by measure; passkeys pooled over places, and by depth or position."""
    shared = shared | {"stage": None, "versions": versions(), "commit": commit()}
    for measure in measures(setting):
        mine = [s for s in samples if (s.task, s.protocol, s.length) == measure]
        reason = failures.get(measure)
        for (depth, position), wanted in _places(setting, measure).items():
            chosen = [s for s in mine if (depth, position) in {POOLED, (s.depth, s.position)}]
            missing = reason if len(chosen) < wanted else None
            if not chosen and not missing:
                continue
            estimate, cell_reason = _estimate(measure.task, chosen, setting.recipe.seed, missing)
            yield rows.Cell(
                **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                task=measure.task,
                protocol=measure.protocol,
                length=measure.length,
                depth=depth,
                position=position,
                metric=METRICS[measure.task],
                value=estimate.value if estimate else None,
                ci_low=estimate.low if estimate else None,
                ci_high=estimate.high if estimate else None,
                n=len(chosen),
                data_hash=_hash_of([s.data_hash for s in sorted(chosen, key=lambda s: s.unit)]),
                status="failed" if cell_reason else "ok",
                reason=cell_reason,
                tokens=_total(chosen, "tokens"),
                windows=_total(chosen, "windows"),
            )


def _places(setting: Setting, measure: Measure) -> dict[tuple[float | None, int | None], int]:
    """Return how many samples each cell of a column is to have: all of them pooled, then by depth or position."""
    if measure.task != "passkey":
        return {POOLED: len(setting.corpus.documents) if setting.corpus else 0}
    prompts = [p for p in setting.prompts[measure.protocol] if p.length == measure.length]
    by_place = Counter((p.depth, p.position) for p in prompts)
    places = sorted(by_place.keys() - {POOLED}, key=lambda place: (place[0] or 0, place[1] or 0))
    return {POOLED: len(prompts), **{place: by_place[place] for place in places}}


def _total(samples: Sequence[rows.Sample], name: str) -> int | None:
    counts = [sample.detail.get(name) for sample in samples]
    return sum(count for count in counts if isinstance(count, int)) if None not in counts and counts else None


def _estimate(
    task: str, samples: Sequence[rows.Sample], seed: int, reason: str | None
) -> tuple[stats.Estimate | None, str | None]:
    """Return the aggregate of a cell's samples, or the reason why there is none."""
    if reason is not None:
        return None, reason
    try:
        if task == "passkey":
            clusters: dict[str, list[int]] = {}
            for sample in samples:
                # Trials on one text share its luck; on repetitive filler each has its own
                cluster = clusters.setdefault(str(sample.detail.get("haystack") or sample.unit), [0, 0])
                cluster[0] += sample.value == 1.0
                cluster[1] += 1
            if all(trials == 1 for _, trials in clusters.values()):
                return stats.wilson(sum(right for right, _ in clusters.values()), len(samples)), None
            return stats.clustered_share({name: (right, n) for name, (right, n) in clusters.items()}), None
        mean = stats.perplexity if task == "perplexity" else stats.mean_nll
        return mean([s.value for s in samples], [s.weight for s in samples], seed=seed), None
    except EvalError as error:
        return None, str(error)


def _contrasts(setting: Setting, scored: dict[str, list[rows.Sample]]) -> Iterator[rows.Contrast]:
    """Yield every method's difference from the baseline, measure by measure, where both have scored the same units."""
    recipe, digests = setting.recipe, list(scored)
    first = baseline_of(recipe)
    against = digests[recipe.methods.index(first)]
    for name, digest in zip(recipe.methods, digests, strict=True):
        for measure in measures(setting) if digest != against else ():
            ours, theirs = (
                [s for s in scored[each] if (s.task, s.protocol, s.length) == measure] for each in (digest, against)
            )
            # A bucket of positions comes from a forward over the longest length, whatever its own
            seen = max(recipe.lengths) if measure.task == "nll-by-position" else measure.length
            native = seen <= setting.geometry.original_context
            found = contrast_of(ours, theirs, names=(name, first), native=native, seed=recipe.seed)
            if found is not None:
                yield found


def baseline_of(recipe: CompareRecipe) -> str:
    """Return the method that the others are paired with."""
    return recipe.baseline or ("unscaled" if "unscaled" in recipe.methods else recipe.methods[0])


def contrast_of(
    ours: Sequence[rows.Sample], theirs: Sequence[rows.Sample], *, names: tuple[str, str], native: bool, seed: int
) -> rows.Contrast | None:
    """Return how ours differ from theirs, samples of one task, protocol and length; None if the units are not the same.

    A failed cell on either side leaves units without a partner; the cells say why.

    Raises:
        EvalError: see `difference_of`.
    """
    if not ours or {s.unit for s in ours} != {s.unit for s in theirs}:
        return None
    found = difference_of(ours, theirs, seed=seed)
    return rows.Contrast(
        method=names[0],
        against=names[1],
        fingerprint=ours[0].fingerprint,
        against_fingerprint=theirs[0].fingerprint,
        task=ours[0].task,
        protocol=ours[0].protocol,
        length=ours[0].length,
        metric="accuracy" if ours[0].task == "passkey" else "nll",
        value=found.value,
        ci_low=found.low,
        ci_high=found.high,
        p_value=found.p_value,
        n=found.n,
        native=native,
        seed=seed,
        data_hash=_hash_of([s.data_hash for s in sorted(ours, key=lambda s: s.unit)]) or "",
    )


def difference_of(ours: Sequence[rows.Sample], theirs: Sequence[rows.Sample], *, seed: int) -> stats.Difference:
    """Return how two sets of samples of one task, protocol and length differ, paired by unit.

    Documents are resampled whole, and so are passkey trials that share a text; trials on repetitive filler differ in
    their key alone, and each is resampled by itself.

    Raises:
        EvalError: they are not of the same units, or were shown other tokens: nothing can be said then.
    """
    of = [{s.unit: s for s in side} for side in (ours, theirs)]
    unlike = sorted(unit for unit in of[0].keys() & of[1].keys() if of[0][unit].data_hash != of[1][unit].data_hash)
    if unlike:
        raise EvalError(
            f"paired difference: {ours[0].method} and {theirs[0].method} saw different tokens ({unlike[0]!r} and "
            f"{len(unlike) - 1} more); only numbers on the same tokens can be compared: measure both on the same data"
        )
    # A passkey counts once, however many tokens its answer has
    units = [{u: stats.Unit(s.value, 1.0 if s.task == "passkey" else s.weight) for u, s in side.items()} for side in of]
    haystacks = {unit: str(s.detail["haystack"]) for unit, s in of[0].items() if s.detail.get("haystack")}
    span = 1.0 if ours[0].task == "passkey" else None
    resolution = 0.0 if span else RESOLUTION
    return stats.paired_difference(
        units[0], units[1], clusters=haystacks or None, span=span, resolution=resolution, seed=seed
    )


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
        "seconds": round(seconds, 1),
    }


def _hash_of(hashes: Sequence[str]) -> str | None:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] if hashes else None


def _write_run(setting: Setting, earlier: Sequence[dict[str, object]], leg: dict[str, object], done: bool) -> None:
    """Write what a reader needs to trust the rows: every leg of the run with its commit, versions and machine."""
    corpus = setting.corpus
    record = {
        "finished": done,
        "original_context": setting.geometry.original_context,
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
    partial = setting.out / f"{RUN}.partial"
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(setting.out / RUN)


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
