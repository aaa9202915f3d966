"""Methods x lengths x evals on one model, every scored unit on disk before the next begins."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, takewhile
from pathlib import Path

from evals import rows, stats
from evals.errors import EvalError
from evals.rows import SampleKey
from recipes.environment import commit, machine, versions
from recipes.schema import CompareRecipe
from recipes.setting import Setting
from recipes.work import METRICS, Measure, Work, document_work, measures, passkey_work
from rope_ext.patch import Fingerprint, extend
from rope_ext.plan import Method, hyperparameters, label

SAMPLES, CELLS, DIFFERENCES, RUN = "samples.jsonl", "cells.jsonl", "differences.jsonl", "run.json"


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
        mine = [c for c in self.cells if c.task == task and c.depth is None]
        protocol = protocol or next((c.protocol for c in mine), None)
        return {(c.fingerprint, c.length): c for c in mine if c.protocol == protocol}

    def effective_lengths(self, *, by_bound: bool = False) -> dict[str, int | None]:
        """Return each method's passkey effective length by fingerprint; None is a measured miss at every length.

        A method is absent if its passkeys were not measured, or if the deciding cell failed.

        Args:
            by_bound: decide on the lower ends of the intervals, which say what n supports, not on the values.
        """
        pooled = self.pooled("passkey")
        found: dict[str, int | None] = {}
        for fingerprint in self.labels:
            cells = [pooled[fingerprint, n] for n in self.recipe.lengths if (fingerprint, n) in pooled]
            measured = takewhile(lambda cell: cell.value is not None, cells)
            known = {cell.length: cell.ci_low if by_bound else cell.value for cell in measured}
            reached = stats.effective_length(
                {n: value for n, value in known.items() if value is not None}, threshold=self.recipe.passkey.threshold
            )
            # Decided from the shortest length on: a failed cell after nothing but passes leaves the rest open.
            open_end = len(known) < len(cells) and reached == max(known, default=None)
            if cells and not open_end:
                found[fingerprint] = reached
        return found


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
    scored: dict[str, list[rows.Sample]] = {}
    for method in setting.methods:
        with extend(
            setting.model,
            method,
            context=recipe.context,
            base=recipe.base,
            original_context=recipe.original_context,
        ) as patch:
            fingerprint = patch.fingerprint
            fingerprints.append(fingerprint)
            leg["fingerprints"] = {fp.digest: fp.as_dict() for fp in fingerprints}
            ratios[label(method)] = (patch.plan.inv_freq / setting.geometry.inv_freq).tolist()
            wanted: list[SampleKey] = []
            failures: dict[Measure, str] = {}
            shared = _coordinates(setting, method, fingerprint)
            pieces = (patch.frequency_key, fingerprint.digest, shared)
            for work in chain(document_work(setting, *pieces), passkey_work(setting, *pieces)):
                wanted += work.keys
                _do(work, done, failures, out / SAMPLES)
                advance(work.cost, label(method))
            samples = [done[key] for key in wanted if key in done]
            cells += _cells(setting, shared, samples, failures)
            scored[fingerprint.digest] = samples
        leg["seconds"] = round(time.monotonic() - started, 1)
        _write_run(setting, earlier, leg, done=False)
    rows.write(out / CELLS, cells)
    contrasts = tuple(_contrasts(setting, scored))
    rows.write(out / DIFFERENCES, contrasts)
    _write_run(setting, earlier, leg, done=True)
    return Comparison(
        out=out,
        recipe=recipe,
        cells=tuple(cells),
        contrasts=contrasts,
        labels={fp.digest: label(method) for method, fp in zip(setting.methods, fingerprints, strict=True)},
        original_context=setting.geometry.original_context,
        ratios=ratios,
        seconds=math.fsum(float(str(each["seconds"])) for each in [*earlier, leg]),
    )


def _do(work: Work, done: dict[SampleKey, rows.Sample], failures: dict[Measure, str], path: Path) -> None:
    """Score what is missing of a piece of work and put it on disk, or note why that failed."""
    missing = {key for key in work.keys if key not in done}
    if not missing:
        return
    try:
        new = {sample.key(): sample for sample in work.score()}
    except (EvalError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        failures |= dict.fromkeys(work.measures, reason)
        return
    rows.append(path, [new[key] for key in work.keys if key in missing])
    done |= new


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
    """Yield the cells of one method, measure by measure; passkey pooled over depths, and by depth."""
    shared = shared | {"stage": None, "versions": versions(), "commit": commit()}
    for measure in measures(setting.recipe, setting.geometry.original_context):
        mine = [s for s in samples if (s.task, s.protocol, s.length) == measure]
        reason = failures.get(measure)
        depths = sorted({s.depth for s in mine if s.depth is not None})
        for depth in (None, *depths):
            chosen = [s for s in mine if depth is None or s.depth == depth]
            if not chosen and not reason:
                continue
            estimate, cell_reason = _estimate(measure.task, chosen, setting.recipe.seed, reason)
            yield rows.Cell(
                **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                task=measure.task,
                protocol=measure.protocol,
                length=measure.length,
                depth=depth,
                metric=METRICS[measure.task],
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
        if task == "passkey":
            return stats.wilson(sum(s.value == 1.0 for s in samples), len(samples)), None
        mean = stats.perplexity if task == "perplexity" else stats.mean_nll
        return mean([s.value for s in samples], [s.weight for s in samples], seed=seed), None
    except EvalError as error:
        return None, str(error)


def _contrasts(setting: Setting, scored: dict[str, list[rows.Sample]]) -> Iterator[rows.Contrast]:
    """Yield every method's difference from the baseline, measure by measure, where both have scored the same units."""
    recipe, digests = setting.recipe, list(scored)
    first = recipe.baseline or ("unscaled" if "unscaled" in recipe.methods else recipe.methods[0])
    against = digests[recipe.methods.index(first)]
    for name, digest in zip(recipe.methods, digests, strict=True):
        for measure in measures(recipe, setting.geometry.original_context) if digest != against else ():
            ours, theirs = (
                {s.unit: s for s in scored[d] if (s.task, s.protocol, s.length) == measure} for d in (digest, against)
            )
            if not ours or ours.keys() != theirs.keys():
                continue  # a failed cell on either side; the cells say why
            # A passkey counts once, however many tokens its answer has
            passkey = measure.task == "passkey"
            units = [
                {unit: stats.Unit(s.value, 1.0 if passkey else s.weight) for unit, s in side.items()}
                for side in (ours, theirs)
            ]
            found = stats.paired_difference(units[0], units[1], seed=recipe.seed)
            yield rows.Contrast(
                method=name,
                against=first,
                fingerprint=digest,
                against_fingerprint=against,
                task=measure.task,
                protocol=measure.protocol,
                length=measure.length,
                metric="accuracy" if passkey else "nll",
                value=found.value,
                ci_low=found.low,
                ci_high=found.high,
                p_value=found.p_value,
                n=found.n,
                native=measure.length <= setting.geometry.original_context,
                seed=recipe.seed,
                data_hash=_hash_of([ours[unit].data_hash for unit in sorted(ours)]) or "",
            )


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
