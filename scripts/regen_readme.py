"""Fill the tables of README.md: methods from the registry, results from the runs kept in recipes/results/.

python scripts/regen_readme.py            # write
python scripts/regen_readme.py --check    # say whether README.md is current
"""

import argparse
import json
import re
from pathlib import Path

from evals.rows import Cell, read_cells
from evals.stats import effective_length
from rope_ext.plan import spell
from rope_ext.registry import known_methods, method

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "recipes" / "results"


def methods_table() -> str:
    lines = ["| name | what changes | hyper-parameters | fine-tuning | source |", "|---|---|---|---|---|"]
    for name, cls in known_methods().items():
        values = ", ".join(f"`{key}={value}`" for key, value in _defaults(cls()).items())
        lines.append(f"| `{name}` | {cls.summary} | {values} | {cls.needs_training} | {cls.source} |")
    return "\n".join(lines)


def _defaults(instance: object) -> dict[str, object]:
    from rope_ext.plan import Method, hyperparameters

    assert isinstance(instance, Method)
    return dict(hyperparameters(instance))


def results_table(name: str) -> str:
    """Return perplexity with intervals, passkey if it was measured, and how to make them again."""
    cells = read_cells(RESULTS / name / "cells.jsonl")
    run = json.loads((RESULTS / name / "run.json").read_text(encoding="utf-8"))
    pooled = [c for c in cells if c.depth is None]
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
        f"95 % intervals in brackets (documents resampled; Wilson for passkey). Commit `{leg['commit']}`, "
        f"{leg['machine']}, "
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


def filled(text: str) -> str:
    """Return the README's text with every marked table made anew."""
    tables = {
        "methods": methods_table,
        "tiny": lambda: results_table("tiny"),
        "smollm2": lambda: results_table("smollm2-135m"),
    }
    for name, make in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", flags=re.DOTALL)
        assert pattern.search(text), f"README.md has no marks for {name}"
        table = make()
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    new = filled(text)
    if check:
        raise SystemExit("README.md is not current; run scripts/regen_readme.py" if new != text else 0)
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
