"""Two finished runs against each other: the same units in both, paired; other tokens are refused."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from evals import rows
from evals.metrics import HARNESS, METRICS
from evals.rows import Contrast, Sample
from recipes.aggregate import contrast_of
from recipes.compare import RUN, SAMPLES, UNITS
from recipes.load import RecipeError
from recipes.present import difference_in_words
from recipes.setting import RECIPE
from rope_ext.errors import RopeExtError
from rope_ext.plan import spell
from rope_ext.registry import method, nearest, parse_method


class Run(NamedTuple):
    """A finished run: the samples that its cells are made of by method, and the window of its model."""

    folder: Path
    samples: dict[str, list[Sample]]
    original_context: int


def read_run(folder: Path) -> Run:
    """Return the samples of a run under the methods of its last leg, spelled in full.

    Raises:
        RecipeError: the folder holds no run, or nothing was measured in it.
        EvalError: its samples are damaged.
    """
    try:
        record = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if record["finished"] is not True:
            raise ValueError  # noqa: TRY301  (one message for all that makes a run unusable)
        fingerprints, original = set(record["legs"][-1]["fingerprints"]), int(record["original_context"])
        units = json.loads((folder / UNITS).read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        if (folder / "evals" / "before").is_dir():
            raise RecipeError(
                f"contrast: {folder} holds a fine-tune; name its comparisons, {folder}/evals/before and .../evals/after"
            ) from error
        if not (folder / RECIPE).is_file():
            raise RecipeError(
                f"contrast: {folder} holds no recipe.yaml, so it is no run; name a folder that compare has written"
            ) from error
        raise RecipeError(
            f"contrast: {folder} holds no finished run; go on with it: rope-ext compare --resume --out {folder}"
        ) from error
    samples: dict[str, list[Sample]] = {}
    for sample in rows.read_samples(folder / SAMPLES):
        wanted = units.get(rows.column_name(sample), {}).get(sample.unit)
        if sample.fingerprint in fingerprints and sample.data_hash == wanted:
            samples.setdefault(_spelled(sample), []).append(sample)
    if not samples:
        raise RecipeError(f"contrast: {folder} holds no samples, as all it was to measure failed; see its report.md")
    return Run(folder, samples, original)


def _spelled(sample: Sample) -> str:
    try:
        return spell(method(sample.method, **sample.method_args))
    except RopeExtError:  # a method that was removed since
        return sample.method


def contrast_runs(
    first: Run, second: Run, *, methods: tuple[str, str] | None = None, task: str | None = None, seed: int = 0
) -> list[Contrast]:
    """Return how the second run differs from the first, measure by measure, on the units of both.

    Args:
        methods: one of the first run and one of the second; by default those that both have, each with itself, or the
            only ones that they have.
        task: the only one to look at; by default all.
        seed: of the bootstrap.

    Raises:
        RecipeError: a method or a task that a run does not have, other windows, or nothing that both measured.
        EvalError: the runs saw different tokens.
    """
    if task is not None and task not in METRICS and not task.startswith(HARNESS):
        raise RecipeError(f"contrast: {task!r} is not a task{nearest(task, list(METRICS))} known: {', '.join(METRICS)}")
    if first.original_context != second.original_context:
        raise RecipeError(
            f"contrast: {first.folder} has an original window of {first.original_context} tokens and {second.folder} "
            f"of {second.original_context}; what a stretch costs is then not the same question"
        )
    found: list[Contrast] = []
    for ours, theirs in [_chosen(first, second, methods)] if methods else _pairs(first, second):
        before, after = (_by_measure(run.samples[name]) for run, name in ((first, ours), (second, theirs)))
        for measure in sorted(before.keys() & after.keys()):
            if task not in {None, measure[0]}:
                continue
            _check_units(before[measure], after[measure], first, second)
            contrast = contrast_of(
                after[measure],
                before[measure],
                names=(theirs, ours),
                native=measure[2] <= first.original_context,
                seed=seed,
            )
            if contrast is not None:
                found.append(contrast)
    if not found:
        raise RecipeError(
            f"contrast: {first.folder} and {second.folder} have no task, protocol and length in common, with the same "
            "units; measure the same in both"
        )
    order = {task: i for i, task in enumerate(("perplexity", "nll-by-position", "long-context-gain", "passkey"))}
    return sorted(found, key=lambda c: (c.method, c.against, order.get(c.task, 9), c.protocol, c.length))


def _check_units(before: Sequence[Sample], after: Sequence[Sample], first: Run, second: Run) -> None:
    """Refuse other documents or trials under one task, protocol and length; `difference_of` refuses other tokens."""
    alone = sorted({s.unit for s in before} ^ {s.unit for s in after})
    if alone:
        one = before[0]
        raise RecipeError(
            f"contrast: {first.folder} and {second.folder} did not measure the same in {one.task} ({one.protocol}) at "
            f"{one.length}: {alone[0]!r} and {len(alone) - 1} more are in one only; measure both on the same data, or "
            "name another --task"
        )


def _pairs(first: Run, second: Run) -> list[tuple[str, str]]:
    both = [(name, name) for name in first.samples if name in second.samples]
    if both:
        return both
    if len(first.samples) == len(second.samples) == 1:
        return list(product(first.samples, second.samples))
    raise RecipeError(
        f"contrast: no method is in both runs ({', '.join(first.samples)}; {', '.join(second.samples)}); name one of "
        "each: --methods FIRST,SECOND"
    )


def _chosen(first: Run, second: Run, methods: tuple[str, str]) -> tuple[str, str]:
    for run, name in zip((first, second), methods, strict=True):
        if spell(parse_method(name)) not in run.samples:
            known = list(run.samples)
            raise RecipeError(
                f"contrast: {run.folder} has no {name!r}{nearest(name, known)} it has: {', '.join(known)}"
            )
    return spell(parse_method(methods[0])), spell(parse_method(methods[1]))


def _by_measure(samples: Sequence[Sample]) -> dict[tuple[str, str, int], list[Sample]]:
    """Return the samples by task, protocol and length."""
    found: dict[tuple[str, str, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.task, sample.protocol, sample.length), []).append(sample)
    return found


def contrast_table(contrasts: Sequence[Contrast], title: str) -> Table:
    """Return one row a measure."""
    view = Table(title=Text(title), box=box.SIMPLE_HEAD, pad_edge=False, caption=Text(CAPTION), caption_justify="left")
    for head in ("second against first", "task", "protocol", "length", "difference", "n"):
        view.add_column(head, overflow="fold", justify="right" if head in {"length", "n"} else "left")
    for c in contrasts:
        pair = c.method if c.method == c.against else f"{c.method} against {c.against}"
        native = f"{c.length} (native)" if c.native else str(c.length)
        view.add_row(*map(Text, (pair, c.task, c.protocol, native, difference_in_words(c), str(c.n))))
    return view


CAPTION = (
    "difference: percent of perplexity, share of passkeys, or nats; 95 % interval over the same units, documents and "
    "haystacks resampled whole"
)
