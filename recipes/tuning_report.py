"""A fine-tune as a table on the screen, as a picture of its curve, and as a page of Markdown."""

import json
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from evals import plots
from evals.rows import Cell, Contrast
from recipes.compare import RUN, Comparison
from recipes.finetune import Finetuned
from recipes.present import (
    REPORT,
    difference_in_words,
    failed_markdown,
    protocol_in_words,
    unit_of,
    value_in_short,
    value_in_words,
)
from recipes.setting import RECIPE
from recipes.tuning_setting import ADAPTER, MODEL
from rope_ext.export import STOCK_FORMAT
from rope_ext.plan import label

SHORT = {"perplexity": "ppl", "passkey": "key"}


def _stages(done: Finetuned) -> list[tuple[str, Comparison, str]]:
    """Return (what it is called, the comparison, the fingerprint in it) of every row of the table, in order."""
    found = [(f"{name}, before", done.before, fingerprint) for fingerprint, name in done.before.labels.items()]
    method = label(done.setting.method)
    for step, comparison in done.between.items():
        found += [(f"{method}, {step} steps", comparison, fingerprint) for fingerprint in comparison.labels]
    steps = done.setting.recipe.train.steps
    return [*found, *((f"{method}, {steps} steps", done.after, fingerprint) for fingerprint in done.after.labels)]


def table(done: Finetuned) -> Table:
    """Return one row a stage: perplexity and passkey at each length."""
    recipe, original = done.setting.recipe, done.before.original_context
    view = Table(
        title=Text(f"{recipe.model}: window {original}, trained for {recipe.context}"),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    view.add_column("stage", overflow="fold", min_width=8)
    columns = [
        (task, length) for task in SHORT for length in sorted({length for _, length in done.before.pooled(task)})
    ]
    for task, length in columns:
        view.add_column(f"{SHORT[task]}\n{length}", justify="right", no_wrap=True)
    for name, comparison, fingerprint in _stages(done):
        cells = [comparison.pooled(task).get((fingerprint, length)) for task, length in columns]
        view.add_row(Text(name), *(Text(value_in_short(cell)) for cell in cells))
    return view


def report_lines(done: Finetuned) -> list[str]:
    """Return what the training was worth and where everything is."""
    lines: list[str] = []
    for contrast in _headlines(done):
        where = "within the original window" if contrast.native else "beyond it"
        lines.append(
            f"at {contrast.length} tokens, {where}: {difference_in_words(contrast)} {unit_of(contrast.task)} "
            f"against {contrast.against}, n = {contrast.n}"
        )
    if done.setting.recipe.allow_approximate:
        lines.append("written in the nearest form that stock code has: its numbers there are others than these")
    reader = "stock transformers" if done.setting.recipe.format == STOCK_FORMAT else "rope_ext.load"
    for folder, words in ((MODEL, f"model, for {reader}"), (ADAPTER, "adapter, with its record of positions")):
        if (done.out / folder).is_dir():
            lines.append(f"{words}: {done.out / folder}")
    lines.append(f"{done.seconds:.0f} s; everything is in {done.out} (start with {REPORT})")
    return lines


def _headlines(done: Finetuned) -> list[Contrast]:
    """Return what the trained model has gained at the longest length, and what it lost at the native one."""
    found: list[Contrast] = []
    for task in SHORT:
        first = next(iter(done.before.pooled(task).values()), None)
        mine = [c for c in done.contrasts if first is not None and (c.task, c.protocol) == (task, first.protocol)]
        native = [c for c in mine if c.native and c.against.startswith("unscaled")]
        beyond = [c for c in mine if not c.native and not c.against.startswith("unscaled")]
        found += [max(group, key=lambda c: c.length) for group in (native, beyond) if group]
    return found


def write_curve(done: Finetuned) -> Path | None:
    """Write the loss by step as a picture and return its path; None if nothing was trained."""
    if not done.curve:
        return None
    recipe = done.setting.recipe
    path = done.out / "loss.png"
    chart = plots.loss_chart(done.curve, model=recipe.model, method=label(done.setting.method), context=recipe.context)
    plots.save(chart, path)
    return path


def write_report(done: Finetuned, picture: Path | None) -> Path:
    """Write every value with its interval, what was trained on what, and how to make it again, as Markdown."""
    recipe = done.setting.recipe
    run = json.loads((done.out / RUN).read_text(encoding="utf-8"))
    data, train = run["data"], recipe.train
    stretch = f"window {run['original_context']} to {recipe.context}"
    lines = [
        f"# {recipe.model} under {label(done.setting.method)}: {stretch}, {train.steps} steps",
        "",
        f"Command: `rope-ext finetune {RECIPE}`; {done.seconds:.0f} s of computing.",
        "",
    ]
    for leg in run["legs"]:
        named = ", ".join(f"{name} {version}" for name, version in leg["versions"].items())
        processes = f", {leg['processes']} processes" if leg["processes"] > 1 else ""
        told = f"- {leg['started']}: commit {leg['commit'] or 'unknown'}, {leg['machine']}{processes}; {named}"
        lines.append(told)
    lines += ["", *report_lines(done)[:-1], ""]
    rows = f"{data['rows']} rows of {data['row_tokens']} tokens, {train.rows_per_step} a step"
    lines += [
        "## Trained on",
        "",
        f"{rows}, data hash {data['hash']}, {100 * data['padding']:.2g} % padding, computed in {run['precision']}.",
        "",
        "| tokens in pieces of up to | " + " | ".join(f"{int(n):,}" for n in data["tokens_by_length"]) + " |",
        "|---" + "|---:" * len(data["tokens_by_length"]) + "|",
        "| | " + " | ".join(f"{n:,}" for n in data["tokens_by_length"].values()) + " |",
        "",
    ]
    for source, asked in zip(data["sources"], recipe.data.sources, strict=True):
        lines.append(
            f"- {source['name']}: {source['documents']:,} documents, {source['tokens']:,} tokens, share "
            f"{asked.share:g}, hash {source['hash']}"
        )
    native = run["native_loss"]
    promise = "equal, as the method promises" if native["promised"] else "the method promises nothing there"
    losses = f"{native['base']:.4f} nats per token without the method, {native['method']:.4f} under it"
    lines += ["", f"Within the original window, before the first step: {losses} ({promise}).", ""]
    for task, protocol in dict.fromkeys((c.task, c.protocol) for c in done.before.cells):
        lines += [f"## {task} ({protocol_in_words(protocol)})", "", *_values(done, task, protocol), ""]
        lines += _differences(done, task, protocol)
    lines += failed_markdown([c for _, comparison, _ in _stages(done) for c in comparison.cells])
    if picture is not None:
        lines.append(f"![{picture.stem}]({picture.name})")
    path = done.out / REPORT
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _values(done: Finetuned, task: str, protocol: str) -> list[str]:
    lengths = sorted({length for _, length in done.before.pooled(task, protocol)})
    lines = ["| stage | " + " | ".join(str(n) for n in lengths) + " | n |", "|---" + "|---:" * (len(lengths) + 1) + "|"]
    for name, comparison, fingerprint in _stages(done):
        cells: list[Cell | None] = [comparison.pooled(task, protocol).get((fingerprint, n)) for n in lengths]
        number = max((cell.n for cell in cells if cell is not None), default=0)
        lines.append(f"| {name} | " + " | ".join(value_in_words(cell) for cell in cells) + f" | {number} |")
    return lines


def _differences(done: Finetuned, task: str, protocol: str) -> list[str]:
    mine = [c for c in done.contrasts if (c.task, c.protocol) == (task, protocol)]
    if not mine:
        return []
    lengths = sorted({contrast.length for contrast in mine})
    original = done.before.original_context
    heads = [f"{n} (native)" if n <= original else str(n) for n in lengths]
    lines = [
        f"| after training, paired: {unit_of(task)} | " + " | ".join(heads) + " |",
        "|---" + "|---:" * len(lengths) + "|",
    ]
    for against in dict.fromkeys(c.against for c in mine):
        row = {c.length: c for c in mine if c.against == against}
        lines.append(f"| against {against} | " + " | ".join(difference_in_words(row.get(n)) for n in lengths) + " |")
    return [*lines, ""]
