"""Does a brief fine-tune bear out what is published of the methods? On the bundled model, 8 times its window.

python scripts/experiment_finetune.py             # train what is not trained (7 methods, 3 seeds: hours), sum up
python scripts/experiment_finetune.py --sum-up    # only sum up what is there

Every run is `rope-ext finetune tiny/METHOD --seed SEED`: of one seed all methods see the same rows in the same order,
and of all seeds all are measured on the same documents and prompts. The summary and the pictures go to
recipes/results/tiny-finetune/, and from there into the README (scripts/regen_readme.py).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from evals import plots, rows, stats  # noqa: E402  (after the path is set)

METHODS = ("unscaled", "linear", "abf", "ntk", "llama3", "yarn", "alibi")
SEEDS = (0, 1, 2)
KEPT = ROOT / "recipes" / "results" / "tiny-finetune"
THRESHOLD = 0.85
"""The share of passkeys that counts as recovered."""


class At(NamedTuple):
    """One place of the experiment."""

    method: str
    step: int
    task: str
    length: int


def train(runs: Path, method: str, seed: int) -> None:
    """Run one fine-tune through the command line, or go on with it."""
    out = runs / f"{method}-seed{seed}"
    if finished(out):
        return
    words = ["--resume"] if (out / "recipe.yaml").exists() else [f"tiny/{method}", "--seed", str(seed)]
    command = [sys.executable, "-m", "rope_ext", "finetune", *words, "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603  (our own words)


def finished(out: Path) -> bool:
    return (out / "run.json").exists() and json.loads((out / "run.json").read_text())["finished"] is True


def samples_of(out: Path, method: str) -> dict[int, list[rows.Sample]]:
    """Return a run's samples under its method by step: 0 is before training."""
    steps = json.loads((out / "train.jsonl").read_text().splitlines()[-1])["step"]
    found: dict[int, list[rows.Sample]] = {}
    for folder in sorted((out / "evals").iterdir()):
        ends = {"before": 0, "after": steps}
        step = ends[folder.name] if folder.name in ends else int(folder.name.removeprefix("step-"))
        found[step] = [s for s in rows.read_samples(folder / "samples.jsonl") if s.method == method]
    return found


def sum_up(runs: Path) -> dict[str, Any]:
    """Return every value with its interval over documents or prompts, given these seeds, and the seeds' range."""
    values: dict[At, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # unit -> a value a seed
    by_seed: dict[At, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    weights: dict[tuple[int, str], int] = {}
    hashes: dict[tuple[str, int, str], set[str]] = defaultdict(set)
    rows_of: dict[int, set[str]] = defaultdict(set)
    records: list[dict[str, Any]] = []
    base: list[rows.Sample] = []
    for method in METHODS:
        for seed in SEEDS:
            out = runs / f"{method}-seed{seed}"
            if not finished(out):
                raise SystemExit(f"{out} is not finished; run without --sum-up")
            record = json.loads((out / "run.json").read_text())
            records.append(record)
            rows_of[seed].add(record["data"]["hash"])
            for step, samples in samples_of(out, method).items():
                for s in samples:
                    at = At(method, step, s.task, s.length)
                    values[at][s.unit].append(s.value)
                    by_seed[at][seed].append(s.value)
                    weights[s.length, s.unit] = s.weight
                    hashes[s.task, s.length, s.unit].add(s.data_hash)
            if method == "unscaled" and seed == SEEDS[0]:
                base = samples_of(out, method)[0]
    assert all(len(each) == 1 for each in hashes.values()), "the runs were not measured on the same tokens"
    assert all(len(each) == 1 for each in rows_of.values()), "methods of one seed were not trained on the same rows"
    assert all(len(v) == len(SEEDS) for units in values.values() for v in units.values()), "a run lacks a value"
    places = [place(at, units, by_seed[at], weights) for at, units in values.items()]
    original = int(records[0]["original_context"])
    native = math.exp(statistics.fmean(s.value for s in base if (s.task, s.length) == ("perplexity", original)))
    longest = max(at.length for at in values)
    return {
        "command": "python scripts/experiment_finetune.py",
        "commits": sorted({str(leg["commit"]) for record in records for leg in record["legs"]}),
        "machine": sorted({leg["machine"] for record in records for leg in record["legs"]}),
        "versions": records[0]["legs"][0]["versions"],
        "minutes": round(sum(leg["seconds"] for record in records for leg in record["legs"]) / 60),
        "seeds": list(SEEDS),
        "rows": {str(seed): next(iter(each)) for seed, each in rows_of.items()},
        "original_context": original,
        "native_perplexity": native,
        "places": places,
        "recovered": [recovered(m, values, by_seed, native, longest) for m in METHODS],
        "against_yarn": against(values, weights, "yarn", longest),
    }


def place(
    at: At, units: dict[str, list[float]], seeds: dict[int, list[float]], weights: dict[tuple[int, str], int]
) -> dict[str, Any]:
    """Return one value of a table."""
    means = {unit: statistics.fmean(found) for unit, found in units.items()}
    if at.task == "perplexity":
        estimate = stats.perplexity([*means.values()], [weights[at.length, unit] for unit in means])
        each = [math.exp(statistics.fmean(found)) for found in seeds.values()]
    else:
        share = statistics.fmean(means.values())
        # Seeds are asked the same prompts: they add no prompts to the count
        estimate = stats.wilson(round(share * len(means)), len(means))._replace(value=share)
        each = [statistics.fmean(found) for found in seeds.values()]
    return {
        **at._asdict(),
        "value": estimate.value,
        "ci_low": estimate.low,
        "ci_high": estimate.high,
        "n": estimate.n,
        "seeds_low": min(each),
        "seeds_high": max(each),
    }


def recovered(
    method: str,
    values: dict[At, dict[str, list[float]]],
    by_seed: dict[At, dict[int, list[float]]],
    native: float,
    longest: int,
) -> dict[str, Any]:
    """Return the first measured step, for each seed, at which a method is as good at the longest length as it should.

    Perplexity: no higher than the untrained model's within its window. Passkey: THRESHOLD.
    """
    steps = sorted({at.step for at in values if at.method == method})

    def first(task: str, is_good: Any) -> list[int | None]:
        found: list[int | None] = []
        for seed in SEEDS:
            good = [n for n in steps if is_good(statistics.fmean(by_seed[At(method, n, task, longest)][seed]))]
            found.append(min(good, default=None))
        return found

    return {
        "method": method,
        "perplexity": first("perplexity", lambda nll: math.exp(nll) <= native),
        "passkey": first("passkey", lambda share: share >= THRESHOLD),
    }


def against(
    values: dict[At, dict[str, list[float]]], weights: dict[tuple[int, str], int], other: str, longest: int
) -> list[dict[str, Any]]:
    """Return how much more perplexity every method has than another, paired by document, untrained and trained."""
    last = max(at.step for at in values)
    found: list[dict[str, Any]] = []
    for method in (m for m in METHODS if m != other):
        for step in (0, last):
            sides = [
                {unit: stats.Unit(statistics.fmean(each), weights[longest, unit]) for unit, each in units.items()}
                for units in (values[At(m, step, "perplexity", longest)] for m in (method, other))
            ]
            difference = stats.paired_difference(sides[0], sides[1])
            found.append({"method": method, "step": step, "length": longest, **difference._asdict()})
    return found


def draw(summary: dict[str, Any]) -> None:
    """Write both pictures: perplexity and passkeys at the longest length over steps."""
    longest = max(p["length"] for p in summary["places"])
    for task, name, logarithmic in (("perplexity", "perplexity", True), ("passkey", "share of passkeys found", False)):
        mine = [p for p in summary["places"] if (p["task"], p["length"]) == (task, longest)]
        mine.sort(key=lambda p: (METHODS.index(p["method"]), p["step"]))
        shown = [{**p, "low": p["ci_low"], "high": p["ci_high"]} for p in mine]
        n = f"{mine[0]['n']} {'documents' if task == 'perplexity' else 'prompts'}, mean of {len(SEEDS)} seeds"
        chart = plots.recovery_chart(
            shown,
            title=f"A window of {longest} tokens in training: tiny, trained on {summary['original_context']} before",
            subtitle=[f"{name} at {longest} tokens; {n}; bars: 95 %"],
            value=name,
            logarithmic=logarithmic,
        )
        plots.save(chart, KEPT / f"{task}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "experiment-finetune", help="folder of the runs")
    parser.add_argument("--sum-up", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not args.sum_up:
        for seed in SEEDS:
            for method in METHODS:
                train(args.runs, method, seed)
    summary = sum_up(args.runs)
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(summary)
    print(f"{KEPT}: summary.json, perplexity.png, passkey.png")


if __name__ == "__main__":
    main()
