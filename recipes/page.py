"""Runs as one page of HTML that opens without a network: verdict, numbers, charts, and how to make it again."""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from evals import plots
from evals.metrics import HARNESS, kind_of
from evals.rows import Cell, Contrast
from recipes.compare import SAMPLES
from recipes.folders import Folder, Series, grouped, read_folder
from recipes.frame import check_out, in_script, write_html
from recipes.present import TITLES, difference_in_words, protocol_in_words, unit_of
from recipes.verdict import first_protocol, is_plain, paired, reaches_of, threshold_of, verdict_of


class Entry(NamedTuple):
    """A cell of a table: what it is sorted by, what is shown, and the interval in small print."""

    order: float
    text: str
    interval: str = ""


class Lines(NamedTuple):
    """A table: its heads, and rows that begin with a name."""

    title: str
    heads: list[str]
    rows: list[tuple[str, list[Entry]]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What runs on the same data say together."""

    title: str
    verdict: list[str]
    tables: list[Lines]
    charts: list[plots.Spec]
    failures: list[str]
    protocols: list[str]
    missing: list[str] = field(default_factory=list[str])


def write_page(paths: Sequence[Path], out: Path) -> Path:
    """Write the page of one or several runs and return its path.

    Runs that saw the same tokens stand in one table; others apart. A run that was killed shows what it had measured.

    Raises:
        RecipeError: a folder holds no run, or nothing measured.
        EvalError: its rows are damaged.
    """
    folders = [read_folder(path) for path in paths]
    check_out("report", out)
    every = [_section(group, folders) for group in grouped(folders)]
    sections = [section for section in every if section is not None]
    charts = [chart for section in sections for chart in section.charts]
    return write_html(
        "report",
        "page.html",
        out,
        sections=sections,
        folders=[_about(folder, out.parent) for folder in folders],
        title=_title(folders),
        specs=in_script(charts),
    )


def _title(folders: Sequence[Folder]) -> str:
    models = dict.fromkeys(Path(part.model).name or part.model for folder in folders for part in folder.parts)
    return f"{', '.join(models)}: {len(folders)} run{'s' * (len(folders) > 1)}"


def _section(group: list[Series], folders: Sequence[Folder]) -> Section | None:
    """Return what a group says; None of stages between the ends of a training alone, which stand beside nothing."""
    names, original = _models(group), group[0].part.original_context
    context = max(cell.context for series in group for cell in series.cells)
    everything, group = group, [series for series in group if not series.part.is_between]
    if not group:
        return None
    cells = [cell for series in group for cell in series.cells]
    columns = list(dict.fromkeys((c.task, c.protocol) for c in cells))
    failed = [
        f"{s.name}: {c.task} ({c.protocol}) at {c.length}: {c.reason}"
        for s in group
        for c in s.cells
        if c.status != "ok"
    ]
    return Section(
        title=f"{names}: trained window {original}, stretched to {context} tokens",
        verdict=verdict_of(group, original, threshold_of(folders, group)),
        tables=[*_overview(group, columns, original), *_differences(group, columns, original)],
        charts=[
            *_charts(group, columns, folders, original, context),
            *_recovery(everything, columns, model=names),
        ],
        failures=[*dict.fromkeys(failed)],
        protocols=[
            f"{TITLES.get(task, task)}: {protocol_in_words(protocol)} ({protocol})" for task, protocol in columns
        ],
        missing=_missing(folders, group),
    )


def _models(group: Sequence[Series]) -> str:
    return ", ".join(dict.fromkeys(Path(s.part.model).name or s.part.model for s in group))


def _recovery(group: Sequence[Series], columns: Sequence[tuple[str, str]], *, model: str) -> list[plots.Spec]:
    """Return what training makes of perplexity and passkeys at the longest length, step by step."""
    if not any(series.part.is_between for series in group):
        return []
    charts: list[plots.Spec] = []
    for task, value in (("perplexity", "perplexity"), ("passkey", "share of passkeys")):
        protocol = first_protocol(columns, task)
        pooled = [(series, series.pooled(task, protocol or "")) for series in group if series.part.stage]
        longest = max((n for _, found in pooled for n in found), default=None)
        if longest is None:
            continue
        rows = [
            {"method": _line(series), "step": series.part.step, "value": found[longest].value, **_ends(found[longest])}
            for series, found in pooled
            if longest in found and found[longest].value is not None and _is_trained(series, group)
        ]
        if rows:
            rows.sort(key=lambda row: (str(row["method"]), int(str(row["step"]))))
            title, about = f"{value.capitalize()} over steps of training: {model}", [f"at {longest:,} tokens"]
            chart = plots.recovery_chart(
                rows, title=title, subtitle=about, value=value, logarithmic=task == "perplexity"
            )
            charts.append(plots.spec(chart))
    return charts


def _line(series: Series) -> str:
    run = series.part.folder.parent.parent.name  # RUN/evals/STAGE
    return f"{series.part.labels[series.fingerprint]} [{run}]"


def _is_trained(series: Series, group: Sequence[Series]) -> bool:
    """Whether a series is a stage of a method that was trained: the model as it came is measured beside it once."""
    run = series.part.folder.parent
    method = series.part.labels[series.fingerprint]
    return any(
        s.part.step > 0 and s.part.folder.parent == run and s.part.labels[s.fingerprint] == method for s in group
    )


def _missing(folders: Sequence[Folder], group: list[Series]) -> list[str]:
    mine = {part.folder for series in group for part in series.parts}
    return [
        f"{folder.path.name} was stopped before its end: what it had measured is here, with the n that it had. "
        f"Go on with it: rope-ext {folder.kind} --resume --out {shlex.quote(str(folder.path))}"
        for folder in folders
        if not folder.finished and any(part.folder in mine for part in folder.parts)
    ]


def _overview(group: Sequence[Series], columns: Sequence[tuple[str, str]], original: int) -> list[Lines]:
    """Return a table a column of the protocol: one row a method, a value with its interval at each length."""
    tables: list[Lines] = []
    for task, protocol in columns:
        pooled = {series.name: found for series in group if (found := series.pooled(task, protocol))}
        lengths = sorted({n for found in pooled.values() for n in found})
        heads = [f"{n:,}{' (native)' if n <= original else ''}" for n in lengths]
        most = {n: max(found[n].n for found in pooled.values() if n in found) for n in lengths}
        rows = [(name, [_entry(found.get(n), most[n]) for n in lengths]) for name, found in pooled.items()]
        counts = {cell.n for found in pooled.values() for cell in found.values()}
        n = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        unit = "trials" if task == "passkey" else "documents"
        title = f"{TITLES.get(task, task)}: {protocol_in_words(protocol)}"
        tables.append(Lines(title, heads, rows, f"n = {n} {unit}; 95 % intervals in small print"))
    return tables


def _entry(cell: Cell | None, most: int) -> Entry:
    if cell is None:
        return Entry(math.inf, "")
    if cell.value is None:
        return Entry(math.inf, "failed")
    shown = f"{cell.value:.2f}" if kind_of(cell.task, cell.protocol) == "share" else f"{cell.value:.4g}"
    interval = "" if cell.ci_low is None or cell.ci_high is None else f"{cell.ci_low:.3g} to {cell.ci_high:.3g}"
    if cell.n < most:
        interval = f"{interval}, n = {cell.n} alone".removeprefix(", ")
    return Entry(cell.value, shown, interval)


def _differences(group: Sequence[Series], columns: Sequence[tuple[str, str]], original: int) -> list[Lines]:
    """Return every method's paired difference from the model as it came, or from the first."""
    base = next((series for series in group if is_plain(series)), group[0])
    tables: list[Lines] = []
    for task, protocol in columns:
        lengths = sorted({n for series in group for n in series.pooled(task, protocol)})
        rows: list[tuple[str, list[Entry]]] = []
        for series in group:
            if series == base:
                continue
            found = [paired(series, base, task, protocol, n, native=n <= original) for n in lengths]
            if any(found):
                rows.append((series.name, [_difference_entry(each) for each in found]))
        if rows:
            heads = [f"{n:,}{' (native)' if n <= original else ''}" for n in lengths]
            what = f"{task}, " if task.startswith(HARNESS) else ""
            title = f"Against {base.name}, paired: {what}{protocol_in_words(protocol)}"
            note = f"{unit_of(task)}; 95 % intervals over the same units, documents and texts resampled whole"
            tables.append(Lines(title, heads, rows, note))
    return tables


def _difference_entry(found: Contrast | None) -> Entry:
    if found is None:
        return Entry(math.inf, "")
    value, _, interval = difference_in_words(found).partition(" ")
    return Entry(found.value, value, interval.strip("[]").replace(", ", " to "))


def _charts(
    group: Sequence[Series],
    columns: Sequence[tuple[str, str]],
    folders: Sequence[Folder],
    original: int,
    context: int,
) -> list[plots.Spec]:
    model = _models(group)
    labels = {series.fingerprint: series.name for series in group}
    charts: list[plots.Chart] = []
    for task, protocol in columns:
        pooled = [cell for series in group for cell in series.pooled(task, protocol).values() if cell.value is not None]
        if task == "perplexity" and pooled:
            words = protocol_in_words(protocol)
            charts.append(
                plots.perplexity_chart(pooled, labels, original_context=original, model=model, protocol=words)
            )
        elif task == "nll-by-position" and pooled:
            rows = [{"method": labels[c.fingerprint], "length": c.length, "value": c.value, **_ends(c)} for c in pooled]
            charts.append(plots.position_chart(rows, [*labels.values()], original_context=original, model=model))
    charts += _passkey_charts(group, columns, original, threshold_of(folders, group).share)
    charts += _training_charts(group, folders, model)
    charts += _frequency_charts(group, original, context, model)
    return [plots.spec(chart) for chart in charts]


def _ends(cell: Cell) -> dict[str, float | None]:
    return {
        "low": cell.value if cell.ci_low is None else cell.ci_low,
        "high": cell.value if cell.ci_high is None else cell.ci_high,
    }


def _passkey_charts(
    group: Sequence[Series], columns: Sequence[tuple[str, str]], original: int, threshold: float
) -> list[plots.Chart]:
    charts: list[plots.Chart] = []
    for task, protocol in columns:
        if task != "passkey":
            continue
        placed = [
            (series, c)
            for series in group
            for c in series.cells
            if (c.task, c.protocol) == (task, protocol)
            and (c.depth, c.position) != (None, None)
            and c.value is not None
        ]
        if not placed:
            continue
        rows = [
            {
                "method": series.name,
                "length": c.length,
                "place": f"{100 * c.depth:g}%" if c.depth is not None else f"{c.position}",
                "order": c.depth if c.depth is not None else c.position,
                "value": c.value,
                "n": c.n,
                **_ends(c),
            }
            for series, c in placed
        ]
        native = max((c.length for _, c in placed if c.length <= original), default=None)
        absolute = any(c.position is not None for _, c in placed)
        words = protocol_in_words(protocol).removesuffix(", all depths")
        charts.append(
            plots.passkey_maps(rows, native=native, absolute=absolute, title=f"Passkeys by length and place: {words}")
        )
        if len({series.name for series, _ in placed}) > 1:
            charts.append(
                plots.passkey_difference(
                    rows, native=native, absolute=absolute, title=f"Passkeys, one method less another: {words}"
                )
            )
    reaches = [reach for reach in reaches_of(group, threshold) if reach.passkeys]
    if reaches:
        lengths = sorted({n for reach in reaches for n in reach.passkeys})
        bars = [{"method": r.series.name, "reached": r.reached, "bound": r.bound} for r in reaches]
        charts.append(plots.effective_chart(bars, lengths=lengths, original_context=original))
    return charts


def _training_charts(group: Sequence[Series], folders: Sequence[Folder], model: str) -> list[plots.Chart]:
    mine = {part.folder for series in group for part in series.parts}
    return [
        plots.loss_chart(
            folder.curve,
            model=model,
            method=f"{folder.recipe.get('method', '?')} ({folder.path.name})",
            context=int(folder.recipe.get("context", 0)),
        )
        for folder in folders
        if folder.curve and any(part.folder in mine for part in folder.parts)
    ]


def _frequency_charts(group: Sequence[Series], original: int, context: int, model: str) -> list[plots.Chart]:
    """Return what each method does to the pairs; runs of earlier versions did not write it down."""
    ratios: dict[str, list[float]] = {}
    wavelengths: dict[str, list[float]] = {}
    for series in group:
        record = series.part.record
        legs = record.get("legs") or []
        found = next(
            (
                leg["frequencies"][series.fingerprint]
                for leg in legs
                if series.fingerprint in leg.get("frequencies", {})
            ),
            None,
        )
        base, name = record.get("base_frequencies"), series.part.labels[series.fingerprint]
        if found is None or base is None or len(found) != len(base):
            continue
        ratio = [new / old if old else 0.0 for new, old in zip(found, base, strict=True)]
        if ratios.get(name, ratio) != ratio:
            name = series.name  # to another window, or on another base
        ratios[name] = ratio
        wavelengths[name] = [2 * math.pi / f if f else math.inf for f in found]
    if not any(ratio > 0 for values in ratios.values() for ratio in values):
        return []
    return [
        plots.frequencies_chart(ratios, context=context, model=model),
        plots.wavelength_chart(wavelengths, original_context=original, context=context, model=model),
    ]


def _about(folder: Folder, home: Path) -> dict[str, Any]:
    """Return what has to be known to make a run again."""
    recipe = shlex.quote(str(folder.path / "recipe.yaml"))
    command = f"rope-ext {folder.kind} {'' if folder.kind == 'finetune' else '--recipe '}{recipe}"
    corpora = [part.record["corpus"] for part in folder.parts if part.record.get("corpus")]
    return {
        "name": str(folder.path),
        "kind": folder.kind,
        "finished": folder.finished,
        "command": command,
        "recipe": folder.text,
        "legs": folder.record.get("legs", []),
        "data": folder.record.get("data"),
        "corpus": corpora[0] if corpora else None,
        "fingerprints": [
            (
                part.stage,
                part.labels[digest],
                digest,
                yaml.safe_dump(_fingerprint(part.record, digest), sort_keys=False),
            )
            for part in folder.parts
            for digest in part.labels
        ],
        "rows": [
            (part.stage or "samples", quote(os.path.relpath(part.folder / SAMPLES, home)))
            for part in folder.parts
            if (part.folder / SAMPLES).is_file()
        ],
    }


def _fingerprint(record: dict[str, Any], digest: str) -> dict[str, Any]:
    for leg in record.get("legs", []):
        if digest in leg.get("fingerprints", {}):
            return leg["fingerprints"][digest]
    return {"digest": digest}
