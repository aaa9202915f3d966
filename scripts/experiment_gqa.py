"""What do fewer key heads cost, and how much of it does a brief training mend? The bundled model and SmolLM2-135M.

python scripts/experiment_gqa.py             # train what is not trained (about two hours on two cores), sum up
python scripts/experiment_gqa.py --sum-up    # only sum up what is there

Each model is trained twice by `rope-ext finetune MODEL/gqa`: as it is (the control, which tells mending from training
on these texts), and with its key heads averaged into one by `rope-ext gqa`. All see the same rows in the same order,
and are measured on the same documents and prompts. The summary goes to recipes/results/gqa/summary.json, and from there
into docs/cache.md (scripts/regen_readme.py).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from evals import rows  # noqa: E402  (after the path is set)
from recipes.aggregate import difference_of  # noqa: E402
from rope_ext.costs import kv_cache_bytes, shape_of  # noqa: E402
from rope_ext.hf import load_config  # noqa: E402

KEPT = ROOT / "recipes" / "results" / "gqa"


class Case(NamedTuple):
    """A model, the recipe that trains it, and how many key heads are left."""

    model: str
    recipe: str
    heads: int


CASES = (Case("tiny", "tiny/gqa", 1), Case("smollm2", "smollm2-135m/gqa", 1))


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "rope_ext", *words], check=True, cwd=ROOT)  # noqa: S603  (our own words)


def train(runs: Path, case: Case) -> None:
    """Make the grouped model and run both fine-tunes through the command line, or go on with them."""
    grouped = runs / f"{case.model}-grouped"
    if grouped.exists():
        made = load_config(str(grouped)).num_key_value_heads
        if made != case.heads:
            raise SystemExit(f"{grouped} has {made} key heads, not {case.heads}; remove it")
    else:
        command("gqa", case.model, "--kv-heads", str(case.heads), "--out", str(grouped))
    for arm, model in (("grouped", str(grouped)), ("control", case.model)):
        out = runs / f"{case.model}-{arm}-run"
        if finished(out):
            continue
        fresh = [case.recipe, "--set", f"model={model}"]
        command("finetune", *(["--resume"] if (out / "recipe.yaml").exists() else fresh), "--out", str(out))


def finished(out: Path) -> bool:
    return (out / "run.json").exists() and json.loads((out / "run.json").read_text())["finished"] is True


def samples_of(out: Path, stage: str, method: str) -> dict[tuple[str, int], list[rows.Sample]]:
    """Return a stage's samples under the recipe's method, by task and length."""
    found: dict[tuple[str, int], list[rows.Sample]] = {}
    for sample in rows.read_samples(out / "evals" / stage / "samples.jsonl"):
        if sample.method == method:
            found.setdefault((sample.task, sample.length), []).append(sample)
    return found


def sum_up(runs: Path, case: Case) -> dict[str, Any]:
    """Return every value with its interval, and differences paired by unit.

    From the model as it came, and of the mended one from the control, which was trained alike.
    """
    outs = {arm: runs / f"{case.model}-{arm}-run" for arm in ("control", "grouped")}
    for out in outs.values():
        if not finished(out):
            raise SystemExit(f"{out} is not finished; run without --sum-up")
    records = {arm: json.loads((out / "run.json").read_text()) for arm, out in outs.items()}
    if len({record["data"]["hash"] for record in records.values()}) != 1:
        raise SystemExit(f"{case.model}: the two runs were trained on other rows; remove them and train both again")
    cells = {arm: rows.read_cells(out / "cells.jsonl") for arm, out in outs.items()}
    method = next(cell.method for cell in cells["control"] if cell.stage == "after")
    came, control = (samples_of(outs["control"], stage, method) for stage in ("before", "after"))
    shape = shape_of(load_config(case.model))
    places: list[dict[str, Any]] = []
    for arm, found in cells.items():
        heads = case.heads if arm == "grouped" else shape.num_key_value_heads
        cache = kv_cache_bytes(
            num_layers=shape.num_layers, num_key_value_heads=heads, head_dim=shape.head_dim, tokens=1024
        )
        for cell in found:
            if cell.method != method or cell.depth is not None or cell.value is None:
                continue
            mine = samples_of(outs[arm], str(cell.stage), method)[cell.task, cell.length]
            difference, from_control = None, None
            if (arm, cell.stage) != ("control", "before"):
                difference = difference_of(mine, came[cell.task, cell.length], seed=0)._asdict()
            if (arm, cell.stage) == ("grouped", "after"):
                from_control = difference_of(mine, control[cell.task, cell.length], seed=0)._asdict()
            places.append(
                {
                    "arm": arm,
                    "stage": cell.stage,
                    "key_heads": heads,
                    "cache_bytes_1024_tokens": cache,
                    "task": cell.task,
                    "length": cell.length,
                    "value": cell.value,
                    "ci_low": cell.ci_low,
                    "ci_high": cell.ci_high,
                    "n": cell.n,
                    "difference": difference,
                    "from_control": from_control,
                }
            )
    legs = [leg for record in records.values() for leg in record["legs"]]
    tokens = json.loads((outs["grouped"] / "train.jsonl").read_text().splitlines()[-1])["tokens"]
    return {
        "model": case.model,
        "recipe": case.recipe,
        "method": method,
        "context": next(cell.context for cell in cells["control"] if cell.stage == "after"),
        "tokens": tokens,
        "commits": sorted({str(leg["commit"]) for leg in legs}),
        "machine": sorted({leg["machine"] for leg in legs}),
        "versions": legs[0]["versions"],
        "minutes": round(sum(leg["seconds"] for leg in legs) / 60),
        "places": places,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "experiment-gqa", help="folder of the runs")
    parser.add_argument("--sum-up", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not args.sum_up:
        args.runs.mkdir(parents=True, exist_ok=True)
        for case in CASES:
            train(args.runs.resolve(), case)
    summary = {
        "command": "python scripts/experiment_gqa.py",
        "models": [sum_up(args.runs.resolve(), case) for case in CASES],
    }
    KEPT.mkdir(parents=True, exist_ok=True)
    rows.write_whole(KEPT / "summary.json", json.dumps(summary, indent=1) + "\n")
    print(KEPT / "summary.json")


if __name__ == "__main__":
    main()
