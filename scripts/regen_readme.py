"""Fill the tables of README.md and of docs/: methods from the registry, results from the runs in recipes/results/.

python scripts/regen_readme.py            # write
python scripts/regen_readme.py --check    # say whether they are current
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

from evals.rows import Cell, read_cells
from evals.stats import effective_length
from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import STATIC, Method, hyperparameters, spell
from rope_ext.readers import judge
from rope_ext.registry import known_methods, method

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "recipes" / "results"


def methods_table() -> str:
    head = ("name", "what changes", "hyper-parameters", "fine-tuning", "length", "exported exactly for", "source")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, cls in known_methods().items():
        values = ", ".join(f"`{key}={value}`" if value else f"`{key}`" for key, value in _defaults(cls()).items())
        static, readers = exports(LISTS if name == "longrope" else cls())
        follows = "static" if static else "follows"
        row = (f"`{name}`", cls.summary, values, cls.needs_training, follows, readers, cls.source)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


# Who takes a method is a matter of its formula, not of the checkpoint: LLaMA-2's head, base and window, stretched by 4.
EXAMPLE = RopeGeometry(head_dim=128, theta=10_000.0, original_context=4096)
LISTS = method("longrope", short_factor=[1.0] * 64, long_factor=[1 + i / 21 for i in range(64)])


def exports(chosen: Method) -> tuple[bool, str]:
    """Return whether a method is static, and which readers take its export exactly."""
    window, original = 4 * EXAMPLE.original_context, EXAMPLE.original_context
    plans = {n: chosen.plan(EXAMPLE, context=window, seq_len=n) for n in (original, original + 1, window)}
    static = {chosen.frequency_key(EXAMPLE, context=window, seq_len=n) for n in plans} == {STATIC}
    try:
        parameters = chosen.rope_parameters(EXAMPLE, context=window)
    except MethodError:
        return static, "none"
    stored = original if parameters["rope_type"] == "dynamic" else window
    verdicts = judge(parameters, window=stored, geometry=EXAMPLE, plans=plans)
    exact = [verdict.reader for verdict in verdicts if verdict.kind == "exact"]
    if len(exact) == len(verdicts):
        return static, "all, GGUF"
    return static, ", ".join([*exact, *(["GGUF"] if static else [])]) or "none"


def _defaults(instance: Method) -> dict[str, object]:
    return dict(hyperparameters(instance))


def results_table(name: str) -> str:
    """Return perplexity with intervals, passkey if it was measured, and how to make them again."""
    cells = read_cells(RESULTS / name / "cells.jsonl")
    run = json.loads((RESULTS / name / "run.json").read_text(encoding="utf-8"))
    first = {c.task: c.protocol for c in reversed(cells)}
    pooled = [c for c in cells if c.depth is None and c.position is None and c.protocol == first[c.task]]
    lengths = sorted({c.length for c in pooled})
    labels: dict[str, str] = {c.fingerprint: spell(method(c.method, **c.method_args)) for c in pooled}
    parts: list[str] = []
    for task, what in (("perplexity", "perplexity of the first L tokens"), ("passkey", "passkey, share found")):
        at = {(c.fingerprint, c.length): c for c in pooled if c.task == task}
        if not at:
            continue
        n = next(iter(at.values())).n
        unit = "documents" if task == "perplexity" else "trials a length"
        head = [f"{what} ({n} {unit})", *(f"L = {length:,}" for length in lengths)]
        if task == "passkey":
            head.append("effective length")
        parts += ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for fingerprint, label in labels.items():
            row = [_shown(at.get((fingerprint, length))) for length in lengths]
            if task == "passkey":
                values = {n: at[fingerprint, n].value for n in lengths}
                assert None not in values.values(), "a run with failed cells is not published"
                reached = effective_length({n: value for n, value in values.items() if value is not None})
                row.append(str(reached or f"below {lengths[0]}"))
            parts.append(f"| {label} | " + " | ".join(row) + " |")
        parts.append("")
    leg, seconds = run["legs"][-1], sum(each["seconds"] for each in run["legs"])
    took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    parts.append(
        f"95 % intervals in brackets (documents resampled, Student's where wider; Wilson for passkey). "
        f"Commit `{leg['commit']}`, {leg['machine']}, "
        f"torch {leg['versions']['torch']}, transformers {leg['versions']['transformers']}, {took} of computing."
    )
    return "\n".join(parts)


def _shown(cell: Cell | None) -> str:
    if cell is None or cell.value is None:
        return ""
    digits = ".2f" if cell.value < 100 else ".0f"
    if cell.ci_low is None or cell.ci_high is None:
        return f"{cell.value:{digits}}"
    return f"{cell.value:{digits}} [{cell.ci_low:.3g}, {cell.ci_high:.3g}]"


def bench_table(name: str) -> str:
    """Return the ratios of a benchmark run that is kept."""
    run = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    lines = ["| | times faster, or smaller | ours | baseline | numbers apart by |", "|---|---:|---:|---:|---:|"]
    for row in run["results"]:
        ours, baseline = (_measured(row[side], row["unit"]) for side in ("ours", "baseline"))
        apart = "" if row["max_abs_difference"] is None else f"{row['max_abs_difference']:.0e}"
        lines.append(f"| `{row['name']}` | {row['ratio']:.2f} | {ours} | {baseline} | {apart} |")
    return "\n".join([*lines, "", f"Medians of runs in turn. Commit `{run['commit']}`, {run['machine']}."])


def _measured(value: float, unit: str) -> str:
    if unit == "bytes":
        value, unit = (value / 1e9, "GB") if value >= 1e9 else (value / 1e6, "MB")
    return f"{value:.3g} {unit}"


def finetune_table() -> str:
    """Return what training makes of every method at the longest length and the native one, and how soon."""
    summary = json.loads((RESULTS / "tiny-finetune" / "summary.json").read_text(encoding="utf-8"))
    places, original = summary["places"], summary["original_context"]
    longest, last = max(p["length"] for p in places), max(p["step"] for p in places)
    at = {(p["method"], p["task"], p["length"], p["step"]): p for p in places}
    order = [each["method"] for each in summary["recovered"]]
    parts: list[str] = []
    for task, what in (("perplexity", "perplexity"), ("passkey", "passkeys found")):
        lengths = (original, longest)
        head = [f"{what}, L = {n:,}, {step or 'no'} steps" for n in lengths for step in (0, last)]
        parts += ["| | " + " | ".join(head) + " | steps until recovered |", "|---" + "|---:" * (len(head) + 1) + "|"]
        for name, soon in zip(order, summary["recovered"], strict=True):
            cells = [_placed(at[name, task, n, step]) for n in lengths for step in (0, last)]
            each = ["never" if n is None else str(n) for n in soon[task]]
            parts.append(f"| {name} | " + " | ".join(cells) + " | " + ", ".join(each) + " |")
        parts.append("")
    n = {task: next(p["n"] for p in places if p["task"] == task) for task in ("perplexity", "passkey")}
    apart = max(p["seeds_high"] / p["seeds_low"] - 1 for p in places if p["task"] == "perplexity" and p["step"] == last)
    parts.append(
        f"Means of {len(summary['seeds'])} seeds; 95 % intervals in brackets, over {n['perplexity']} documents or "
        f"{n['passkey']} prompts given these seeds, whose perplexities end up to {100 * apart:.1f} % apart. "
        f"Recovered, at {longest:,} tokens, by seed: the first measured step with a perplexity of at most "
        f"{summary['native_perplexity']:.2f}, the untrained model's at {original}; with at least 0.85 of the passkeys. "
        f"Commit `{'`, `'.join(summary['commits'])}`, {', '.join(summary['machine'])}, torch "
        f"{summary['versions']['torch']}, {summary['minutes']} minutes of computing."
    )
    return "\n".join(parts)


def floors_table() -> str:
    """Return how much of the time of each main operation is the floor's, and where it goes."""
    run = json.loads((RESULTS / "bench_floors.json").read_text(encoding="utf-8"))
    kinds = ("products", "attention", "elementwise", "copies", "loss", "python")
    lines = ["| | time | floor | floor / time | " + " | ".join(kinds) + " |", "|---" + "|---:" * (3 + len(kinds)) + "|"]
    for row in run["results"]:
        parts = [f"{row['parts'].get(kind, 0.0) / row['seconds']:.2f}" for kind in kinds]
        lines.append(
            f"| `{row['name']}` | {row['seconds']:.3g} s | {row['floor']:.3g} s | {row['share']:.2f} | "
            + " | ".join(parts)
            + " |"
        )
    rates = f"Products at {run['products'] / 1e9:.0f} GFLOP/s, attention at {run['attention'] / 1e9:.0f}"
    where = f"both measured in the same run. Commit `{run['commit']}`, {run['machine']}."
    return "\n".join([*lines, "", f"{rates}, {where}"])


def gqa_table() -> str:
    """Return what fewer key heads cost, before and after a brief training, beside the model as it came."""
    summary = json.loads((RESULTS / "gqa" / "summary.json").read_text(encoding="utf-8"))
    parts: list[str] = []
    for model in summary["models"]:
        places = model["places"]
        at = {(p["arm"], p["stage"], p["task"], p["length"]): p for p in places}
        columns = sorted({(p["task"], p["length"]) for p in places}, key=lambda each: (each[0] == "passkey", each[1]))
        words = {"perplexity": "perplexity", "passkey": "passkeys found"}
        for differences in (False, True):
            what = "difference from it as it came" if differences else f"`{model['recipe']}`"
            head = [what, *(f"{words[task]}, L = {n:,}" for task, n in columns)]
            parts += ["| " + " | ".join(head) + " |", "|---" + "|---:" * len(columns) + "|"]
            for arm, stage in product(("control", "grouped"), ("before", "after")):
                if differences and (arm, stage) == ("control", "before"):
                    continue
                mine = [at[arm, stage, task, n] for task, n in columns]
                heads, size = mine[0]["key_heads"], f"{mine[0]['cache_bytes_1024_tokens'] / 2**20:.3g} MiB"
                state = ("as it came" if arm == "control" else "averaged") + (", trained" if stage == "after" else "")
                cells = [_apart(p["task"], p["difference"]) if differences else _placed(p) for p in mine]
                name = f"{heads} key head{'s' if heads > 1 else ''} ({size}), {state}"
                parts.append(f"| {name} | " + " | ".join(cells) + " |")
            if differences:
                mended = [at["grouped", "after", task, n] for task, n in columns]
                cells = [_apart(p["task"], p["from_control"]) for p in mended]
                parts.append("| averaged from as it came, both trained | " + " | ".join(cells) + " |")
            parts.append("")
        n = {task: next(p["n"] for p in places if p["task"] == task) for task, _ in columns}
        trained = f"{model['tokens']:,} tokens of training under {model['method']} for a window of {model['context']:,}"
        counted = f"n is {n['perplexity']} documents and {n['passkey']} prompts a length"
        where = f"Commit `{'`, `'.join(model['commits'])}`, {', '.join(model['machine'])}"
        took = f"torch {model['versions']['torch']}, {model['minutes']} minutes of computing"
        parts += [f"{trained}; {counted}. {where}, {took}.", ""]
    parts.append(
        f"By `{summary['command']}`. Beside the heads: the cache of 1,024 tokens in 16 bits. Differences are paired "
        "by document (perplexity: per cent) or by prompt (passkeys: of the share found), with 95 % intervals."
    )
    return "\n".join(parts)


def _apart(task: str, difference: dict[str, float]) -> str:
    value, low, high = (difference[key] for key in ("value", "low", "high"))
    if task == "perplexity" and value > math.log(10):
        told = [f"{math.exp(each):,.0f}" for each in (value, low, high)]
        return f"{told[0]} times [{told[1]}, {told[2]}]"
    if task == "perplexity":
        value, low, high = (100 * math.expm1(each) for each in (value, low, high))
        return f"{value:+.3g} % [{low:+.3g}, {high:+.3g}]"
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def _placed(place: dict[str, float]) -> str:
    digits = ".2f" if place["value"] < 100 else ".0f"
    return f"{place['value']:{digits}} [{place['ci_low']:.3g}, {place['ci_high']:.3g}]"


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods_table,
    "tiny": lambda: results_table("tiny"),
    "bench-alibi": lambda: bench_table("bench_alibi"),
    "smollm2": lambda: results_table("smollm2-135m"),
    "bench": lambda: bench_table("bench_evals"),
    "finetune": finetune_table,
    "bench-training": lambda: bench_table("bench_training"),
    "bench-floors": floors_table,
    "gqa": gqa_table,
}
PAGES = {
    "README.md": ("methods", "tiny", "smollm2", "finetune"),
    "docs/benchmarks.md": ("bench", "bench-training", "bench-alibi", "bench-floors"),
    "docs/training.md": ("finetune",),
    "docs/cache.md": ("gqa",),
}


def filled(page: str, text: str) -> str:
    """Return a page's text with every marked table made anew."""
    for name in PAGES[page]:
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", flags=re.DOTALL)
        assert pattern.search(text), f"{page} has no marks for {name}"
        table = TABLES[name]()
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        new = filled(page, text)
        if check and new != text:
            raise SystemExit(f"{page} is not current; run scripts/regen_readme.py")
        (ROOT / page).write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
