"""Samples to cells and paired differences: every number of a run, recomputable from what is on disk."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

from evals import rows, stats
from evals.errors import EvalError
from evals.metrics import HARNESS, kind_of, metric_of
from recipes.environment import commit, versions
from recipes.schema import CompareRecipe
from recipes.setting import Setting
from recipes.work import Measure, measures

RESOLUTION = 1e-5
"""Nats that fp32 sums in another order differ by: less is no difference."""
POOLED = (None, None)
"""The depth and position of a cell over all places."""


def cells_of(
    setting: Setting, shared: dict[str, object], samples: Sequence[rows.Sample], failures: dict[Measure, str]
) -> Iterator[rows.Cell]:
    """Yield the cells of one method, measure by measure; passkeys pooled over places, and by depth or position."""
    shared = shared | {"stage": setting.stage, "versions": versions(), "commit": commit()}
    for measure in measures(setting):
        mine = [s for s in samples if (s.task, s.protocol, s.length) == measure]
        reason = failures.get(measure)
        for (depth, position), wanted in _places(setting, measure).items():
            chosen = [s for s in mine if (depth, position) in {POOLED, (s.depth, s.position)}]
            missing = reason if len(chosen) < wanted else None
            if not chosen and not missing:
                continue
            estimate, cell_reason = _estimate(chosen, setting.recipe.seed, missing)
            yield rows.Cell(
                **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                task=measure.task,
                protocol=measure.protocol,
                length=measure.length,
                depth=depth,
                position=position,
                metric=metric_of(measure.task, measure.protocol),
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


def cells_from(samples: Sequence[rows.Sample], *, seed: int) -> Iterator[rows.Cell]:
    """Yield the cells of what a run had measured when it was killed, as far as its samples go.

    A column that was not done has a smaller n than it was to have; nothing on disk says which one.
    """
    groups: dict[tuple[object, ...], list[rows.Sample]] = {}
    for s in samples:
        for place in {POOLED, (s.depth, s.position)}:
            groups.setdefault((s.fingerprint, s.task, s.protocol, s.length, *place), []).append(s)
    for (*_, depth, position), chosen in groups.items():
        first = chosen[0]
        estimate, reason = _estimate(chosen, seed, None)
        yield rows.Cell(
            method=first.method,
            method_args=first.method_args,
            factor=first.factor,
            context=first.context,
            model=first.model,
            task=first.task,
            protocol=first.protocol,
            length=first.length,
            depth=cast("float | None", depth),
            position=cast("int | None", position),
            metric=metric_of(first.task, first.protocol),
            value=estimate.value if estimate else None,
            ci_low=estimate.low if estimate else None,
            ci_high=estimate.high if estimate else None,
            n=len(chosen),
            stage=None,
            seed=seed,
            fingerprint=first.fingerprint,
            data_hash=_hash_of([s.data_hash for s in sorted(chosen, key=lambda s: s.unit)]),
            status="failed" if reason else "ok",
            reason=reason,
            versions={},
            commit=None,
            tokens=_total(chosen, "tokens"),
            windows=_total(chosen, "windows"),
        )


def _places(setting: Setting, measure: Measure) -> dict[tuple[float | None, int | None], int]:
    """Return how many samples each cell of a column is to have: all of them pooled, then by depth or position."""
    if measure.task.startswith(HARNESS):
        columns = {(HARNESS + column.name, column.length): column for column in setting.benchmarks}
        return {POOLED: len(columns[measure.task, measure.length].documents)}
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
    samples: Sequence[rows.Sample], seed: int, reason: str | None
) -> tuple[stats.Estimate | None, str | None]:
    """Return the aggregate of a cell's samples, or the reason why there is none."""
    if reason is not None:
        return None, reason
    kind = kind_of(samples[0].task, samples[0].protocol) if samples else "mean"
    values, weights = [s.value for s in samples], [s.weight for s in samples]
    try:
        if kind == "share" and all(value in {0.0, 1.0} for value in values):
            clusters: dict[str, list[int]] = {}
            for sample in samples:
                # Trials on one text share its luck; on repetitive filler each has its own
                cluster = clusters.setdefault(str(sample.detail.get("haystack") or sample.unit), [0, 0])
                cluster[0] += sample.value == 1.0
                cluster[1] += 1
            if all(trials == 1 for _, trials in clusters.values()):
                return stats.wilson(sum(right for right, _ in clusters.values()), len(samples)), None
            return stats.clustered_share({name: (right, n) for name, (right, n) in clusters.items()}), None
        if kind == "share" and all(
            0 <= value <= 1 for value in values
        ):  # parts of an answer count; a trial counts once
            return stats.mean_share(values, seed=seed), None
        mean = stats.perplexity if kind == "perplexity" else stats.mean_nll
        return mean(values, weights, seed=seed), None
    except EvalError as error:
        return None, str(error)


def contrasts_of(setting: Setting, scored: dict[str, list[rows.Sample]]) -> Iterator[rows.Contrast]:
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
        metric=_paired_metric(ours[0]),
        value=found.value,
        ci_low=found.low,
        ci_high=found.high,
        p_value=found.p_value,
        n=found.n,
        native=native,
        seed=seed,
        data_hash=_hash_of([s.data_hash for s in sorted(ours, key=lambda s: s.unit)]) or "",
    )


def _paired_metric(sample: rows.Sample) -> str:
    """Return what a difference is of: of perplexities it is that of their nats."""
    if sample.task.startswith(HARNESS):
        kind = kind_of(sample.task, sample.protocol)
        return "nll" if kind == "perplexity" else metric_of(sample.task, sample.protocol)
    return "accuracy" if sample.task == "passkey" else "nll"


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
    kind = kind_of(ours[0].task, ours[0].protocol)
    # A passkey counts once, however many tokens its answer has
    units = [{u: stats.Unit(s.value, 1.0 if kind == "share" else s.weight) for u, s in side.items()} for side in of]
    haystacks = {unit: str(s.detail["haystack"]) for unit, s in of[0].items() if s.detail.get("haystack")}
    span = 1.0 if kind == "share" and all(0 <= s.value <= 1 for s in (*ours, *theirs)) else None
    resolution = 0.0 if span else RESOLUTION
    return stats.paired_difference(
        units[0], units[1], clusters=haystacks or None, span=span, resolution=resolution, seed=seed
    )


def _hash_of(hashes: Sequence[str]) -> str | None:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] if hashes else None
