"""A comparison as a table on the screen, as pictures, and as a page of Markdown."""

import json
import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from evals import plots
from evals.metrics import HARNESS, kind_of
from evals.rows import Cell, Contrast
from recipes.compare import RUN, Comparison
from recipes.setting import RECIPE

REPORT = "report.md"


def table(comparison: Comparison) -> Table:
    """Return one row a method: perplexity and passkey at each length, and the passkey's effective length.

    Four lengths of both fit in 80 columns; a long spelling of a method is folded, numbers never are.
    """
    recipe = comparison.recipe
    view = Table(
        title=Text(f"{recipe.model}: window {comparison.original_context}, stretched to {recipe.context}"),
        caption=Text(_caption(comparison)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    view.add_column("method", overflow="fold", min_width=8)
    tasks, effective = _tasks(comparison), comparison.effective_lengths()
    lengths = {task: sorted({length for _, length in comparison.pooled(task)}) for task, _ in tasks}
    for task, short in tasks:
        for length in lengths[task]:
            view.add_column(f"{short}\n{length}", justify="right", no_wrap=True)
    passkeys = comparison.pooled("passkey")
    if passkeys:
        view.add_column("eff.\nlength", justify="right", no_wrap=True)
    for fingerprint, label in comparison.labels.items():
        row = [Text(label)]
        for task, _ in tasks:
            pooled = comparison.pooled(task)
            row += [Text(value_in_short(pooled.get((fingerprint, length)))) for length in lengths[task]]
        if passkeys:
            row.append(Text(_effective(comparison, fingerprint, effective)))
        view.add_row(*row)
    return view


def benchmark_table(comparison: Comparison) -> Table | None:
    """Return one row for each of lm-eval's tasks, metrics and lengths, a column a method; None if there are none."""
    columns = dict.fromkeys((c.task, c.protocol, c.length) for c in comparison.cells if c.task.startswith(HARNESS))
    if not columns:
        return None
    at = {(c.task, c.protocol, c.length, c.fingerprint): c for c in comparison.cells}
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    view.add_column("lm-eval task", overflow="fold")
    for head in ("tokens", "n", *comparison.labels.values()):
        view.add_column(Text(head), justify="right", overflow="fold")
    for task, protocol, length in columns:
        cells = [at.get((task, protocol, length, fingerprint)) for fingerprint in comparison.labels]
        n = {cell.n for cell in cells if cell is not None}
        values = [Text(value_in_short(cell)) for cell in cells]
        counts = ", ".join(str(each) for each in sorted(n))
        view.add_row(Text(f"{task.removeprefix(HARNESS)}: {protocol}"), str(length), counts, *values)
    return view


def _tasks(comparison: Comparison) -> list[tuple[str, str]]:
    measured = {cell.task for cell in comparison.cells}
    return [(task, short) for task, short in (("perplexity", "ppl"), ("passkey", "key")) if task in measured]


def _threshold(comparison: Comparison) -> str:
    asked = comparison.recipe.passkey
    if not asked.of_base:
        return f"{asked.threshold:g} or better"
    known = "0 or unknown" if comparison.threshold is None else f"{comparison.threshold:.3g}"
    return f"{asked.threshold:g} of the baseline's share at the shortest length ({known}) or better"


def _effective(comparison: Comparison, fingerprint: str, effective: dict[str, int | None]) -> str:
    if fingerprint not in effective:
        mine = [cell for (of, _), cell in comparison.pooled("passkey").items() if of == fingerprint]
        return "failed" if any(cell.value is None for cell in mine) else "unknown"
    reached = effective[fingerprint]
    return f"<{min(comparison.recipe.lengths)}" if reached is None else str(reached)


def value_in_short(cell: Cell | None) -> str:
    """Return a cell's value as a table on the screen shows it; nothing where nothing was measured."""
    if cell is None:
        return ""
    if cell.value is None:
        return "failed"
    if kind_of(cell.task, cell.protocol) == "share":
        return f"{cell.value:.2f}"
    if cell.value < 999.5:
        return f"{cell.value:.3g}"
    return f"{cell.value:.0f}" if cell.value < 99_999.5 else f"{cell.value:.0e}"


def _caption(comparison: Comparison) -> str:
    parts: list[str] = []
    for task, short in _tasks(comparison):
        counts = {cell.n for cell in comparison.pooled(task).values()}
        n = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        if task == "perplexity":
            words = protocol_in_words(next(iter(comparison.pooled(task).values())).protocol)
            parts.append(f"{short}: perplexity of {words}, {n} documents.")
        else:
            parts.append(
                f"{short}: passkeys found, {n} trials; effective length: {_threshold(comparison)} there and below."
            )
    others = {c.protocol for c in comparison.cells if c.task in {"perplexity", "passkey"}}
    others -= {c.protocol for task, _ in _tasks(comparison) for c in comparison.pooled(task).values()}
    also = f", and {', '.join(sorted(others))}" if others else ""
    return "\n".join([*parts, f"Intervals{also}: {comparison.out / REPORT}"])


def write_pictures(comparison: Comparison) -> list[Path]:
    """Write the charts into the run's folder and return their paths."""
    out, recipe = comparison.out, comparison.recipe
    original, context = comparison.original_context, recipe.context
    assert context is not None
    written: list[Path] = []

    def save(chart: plots.Chart, name: str) -> None:
        plots.save(chart, out / name)
        written.append(out / name)

    ok = [cell for cell in comparison.cells if cell.status == "ok"]
    curve = [cell for cell in comparison.pooled("perplexity").values() if cell.status == "ok"]
    if curve:
        words = protocol_in_words(curve[0].protocol)
        chart = plots.perplexity_chart(
            curve, comparison.labels, original_context=original, model=recipe.model, protocol=words
        )
        save(chart, "perplexity.png")
    by_place = [c for c in ok if c.task == "passkey" and (c.depth, c.position) != (None, None)]
    protocols = dict.fromkeys(c.protocol for c in by_place)
    for (fingerprint, label), protocol in product(comparison.labels.items(), protocols):
        mine = [c for c in by_place if (c.fingerprint, c.protocol) == (fingerprint, protocol)]
        if mine:
            words = protocol_in_words(protocol).removesuffix(", all depths")
            chart = plots.passkey_chart(mine, label, original_context=original, model=recipe.model, protocol=words)
            name = f"passkey_{file_name(label)}" + ("" if len(protocols) == 1 else f"_{protocol}")
            taken = sum(path.stem.rpartition("~")[0] == name or path.stem == name for path in written)
            save(chart, f"{name}~{taken + 1}.png" if taken else f"{name}.png")  # two spellings may give one name
    save(plots.frequencies_chart(comparison.ratios, context=context, model=recipe.model), "frequencies.png")
    return written


def file_name(label: str) -> str:
    """Return a method's spelling as part of a file name: yarn:beta_fast=16 -> yarn-beta_fast-16."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", label)


def write_report(comparison: Comparison, pictures: list[Path]) -> Path:
    """Write every value with its interval, the pictures, and how to make them again, as Markdown."""
    recipe = comparison.recipe
    run = json.loads((comparison.out / RUN).read_text(encoding="utf-8"))
    lines = [
        f"# {recipe.model}: {len(comparison.labels)} methods, window {comparison.original_context} to {recipe.context}",
        "",
        f"Command: `rope-ext compare --recipe {RECIPE}`; {comparison.seconds:.0f} s of computing.",
        "",
    ]
    for leg in run["legs"]:
        named = ", ".join(f"{name} {version}" for name, version in leg["versions"].items())
        lines.append(f"- {leg['started']}: commit {leg['commit'] or 'unknown'}, {leg['machine']}; {named}")
    lines.append("")
    lines += _native_markdown(comparison)
    columns = dict.fromkeys((cell.task, cell.protocol) for cell in comparison.cells)
    for task, protocol in columns:
        title = f"{TITLES.get(task, task)} ({protocol_in_words(protocol)})"
        lines += [f"## {title}", "", *_markdown(comparison, comparison.pooled(task, protocol)), ""]
        lines += _scored_markdown(comparison, task, protocol)
        lines += _contrasts_markdown(comparison, task, protocol)
    effective = comparison.effective_lengths()
    if effective:
        bounds = comparison.effective_lengths(by_bound=True)
        asked = f"{_threshold(comparison)} there and at every shorter length tested"
        lines += [f"## Effective length (passkey {asked})", ""]
        for fingerprint, label in comparison.labels.items():
            both = [_effective(comparison, fingerprint, reached) for reached in (effective, bounds)]
            lines.append(f"- {label}: {both[0]}; {both[1]} if the lower end of every interval has to reach it")
        lines.append("")
    lines += failed_markdown(comparison.cells)
    if run["corpus"]:
        corpus = run["corpus"]
        described = f"{corpus['name']}, data hash {corpus['data_hash']}; {corpus['num_too_short']} tried were too short"
        lines += [f"Documents ({described}):", ", ".join(corpus["documents"]), ""]
    lines += [f"![{path.stem}]({path.name})" for path in pictures]
    path = comparison.out / REPORT
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def failed_markdown(cells: Sequence[Cell]) -> list[str]:
    """Return which cells failed and why; nothing if none did."""
    failed = [c for c in cells if c.status != "ok"]
    if not failed:
        return []
    told = (f"- {c.method} {c.task} ({c.protocol}) at {c.length}: {c.reason}" for c in failed)
    return ["## Failed", "", *dict.fromkeys(told), ""]


def _native_markdown(comparison: Comparison) -> list[str]:
    """Return what each method costs at the longest length within the original window, or that nothing says so."""
    head = ["## At the native length", ""]
    names = {task: unit_of(task) for task in ("perplexity", "passkey")}
    firsts = [(c.task, c.protocol) for task in names for c in [*comparison.pooled(task).values()][:1]]
    native = [c for c in comparison.contrasts if c.native and (c.task, c.protocol) in firsts]
    if not native:
        within = f"at most {comparison.original_context} tokens"
        failed = sorted(
            {c.method for c in comparison.cells if c.value is None and c.length <= comparison.original_context}
        )
        if failed:
            return [*head, f"Not known: what was measured within {within} failed under {', '.join(failed)}.", ""]
        return [*head, f"Not measured against a baseline: it takes two methods, and a length of {within}.", ""]
    longest = max(contrast.length for contrast in native)
    at_longest = [contrast for contrast in native if contrast.length == longest]
    shown = [task for task in names if any(c.task == task for c in at_longest)]
    lines = [f"| {longest} tokens, against {native[0].against} | " + " | ".join(names[task] for task in shown) + " |"]
    lines.append("|---" + "|---:" * len(shown) + "|")
    at = {(c.fingerprint, c.task): c for c in at_longest}
    for fingerprint, label in comparison.labels.items():
        if fingerprint != native[0].against_fingerprint:
            found = [at.get((fingerprint, task)) for task in shown]
            row = ["failed" if contrast is None else difference_in_words(contrast) for contrast in found]
            lines.append(f"| {label} | " + " | ".join(row) + " |")
    return [*head, *lines, ""]


def _scored_markdown(comparison: Comparison, task: str, protocol: str) -> list[str]:
    """Return how much the numbers of a protocol stand for."""
    cells = [c for c in comparison.pooled(task, protocol).values() if c.tokens is not None and c.windows is not None]
    if not cells:
        return []
    of_one = sorted((c for c in cells if c.fingerprint == cells[0].fingerprint), key=lambda c: c.length)
    told = "; ".join(f"{c.tokens} tokens in {c.windows} windows at {c.length}" for c in of_one)
    return [f"Scored under each method, in {of_one[0].n} documents: {told}.", ""]


def _contrasts_markdown(comparison: Comparison, task: str, protocol: str) -> list[str]:
    """Return each method's paired difference from the baseline, with the native window marked."""
    mine = [c for c in comparison.contrasts if (c.task, c.protocol) == (task, protocol)]
    if not mine:
        return []
    lengths = sorted({contrast.length for contrast in mine})
    heads = [f"{n} (native)" if n <= comparison.original_context else str(n) for n in lengths]
    lines = [f"| paired with {mine[0].against}: {unit_of(task)} | " + " | ".join(heads) + " |"]
    lines.append("|---" + "|---:" * len(lengths) + "|")
    at = {(contrast.fingerprint, contrast.length): contrast for contrast in mine}
    for fingerprint, label in comparison.labels.items():
        if any(contrast.fingerprint == fingerprint for contrast in mine):
            row = [difference_in_words(at.get((fingerprint, length))) for length in lengths]
            lines.append(f"| {label} | " + " | ".join(row) + " |")
    return [*lines, ""]


def unit_of(task: str) -> str:
    """Return what a paired difference is counted in; its sign says whether it is more or less."""
    if task.startswith(HARNESS):
        return "the score, or percent of a perplexity"
    return {"perplexity": "percent of perplexity", "passkey": "share of passkeys"}.get(task, "nats")


def difference_in_words(contrast: Contrast | None) -> str:
    """Return a paired difference with its interval; of perplexities their ratio less 1, in percent."""
    if contrast is None:
        return ""
    ends = (contrast.value, contrast.ci_low, contrast.ci_high)
    if kind_of(contrast.task, contrast.protocol) == "perplexity":
        shown = [None if end is None else f"{100 * math.expm1(min(end, 50)):+.3g}" for end in ends]
    else:
        shown = [None if end is None else f"{end:+.3g}" for end in ends]
    value, low, high = shown
    return f"{value}" if low is None else f"{value} [{low}, {high}]"


TITLES = {
    "perplexity": "Perplexity",
    "nll-by-position": "Nats per token by position, up to L from the length before",
    "long-context-gain": "What the context beyond the original window gives, nats per token (below 0 is a gain)",
    "passkey": "Passkey accuracy",
}


VARIANT_WORDS = {
    "classic": "repetitive filler",
    "text": "real text",
    "distractors": "three lines of the same form besides",
    "multi-key": "four keys, one asked for",
    "multi-query": "four keys, two asked for",
    "uuid": "a key of 32 hexadecimal digits",
    "needle": "a sentence in real text, asked for in other words",
    "no-needle": "control without the key: what is found is a false positive",
    "needle-only": "control without filler: what is missed is not the context's fault",
}


def protocol_in_words(protocol: str) -> str:
    """Return what a protocol's name stands for, its own numbers included."""
    variant = protocol.removesuffix("-generate").removesuffix("-absolute")
    if variant in VARIANT_WORDS:
        place = "" if variant in {"no-needle", "needle-only"} else ", all depths"
        place = ", absolute positions" if "-absolute" in protocol else place
        return VARIANT_WORDS[variant] + place + (", decoded" if protocol.endswith("-generate") else "")
    name, _, number = protocol.partition("-over-")[0].rpartition("-")
    original = protocol.rpartition("-")[2]
    words = {
        "last": f"the last {number} of the first L tokens",
        "sliding": f"windows of L tokens moved by {number}, each token once",
        "yarn-legacy": f"windows of L tokens moved by {number}, unweighted mean of their means",
        "gain": f"the last {number} tokens at L, against the same with the last {original} alone",
    }
    whole = {"prefix": "the first L tokens", "by-position": "one forward"}
    return whole.get(protocol) or words.get(name) or protocol  # lm-eval's say it in full


def _markdown(comparison: Comparison, cells: dict[tuple[str, int], Cell]) -> list[str]:
    lengths = sorted({length for _, length in cells})
    lines = ["| method | " + " | ".join(str(length) for length in lengths) + " | n |"]
    lines.append("|---" + "|---:" * (len(lengths) + 1) + "|")
    for fingerprint, label in comparison.labels.items():
        row = [cells.get((fingerprint, length)) for length in lengths]
        n = sorted({cell.n for cell in row if cell})
        lines.append(
            f"| {label} | " + " | ".join(value_in_words(cell) for cell in row) + f" | {', '.join(map(str, n))} |"
        )
    return lines


def value_in_words(cell: Cell | None) -> str:
    """Return a cell's value with its interval."""
    if cell is None or cell.value is None or cell.ci_low is None or cell.ci_high is None:
        return value_in_short(cell)
    return f"{value_in_short(cell)} [{cell.ci_low:.3g}, {cell.ci_high:.3g}]"
