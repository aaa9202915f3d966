"""What ALiBi costs beside the whole bias as a mask, and beside no bias at all, measured side by side in one run.

python scripts/bench_alibi.py [--json] [--quick]

forward_8k, forward_16k   attention of 8 heads over 8,192 or 16,384 tokens against scaled_dot_product_attention with a
                          mask of heads x tokens x tokens, as transformers' `position_bias` makes it (16k: a fourth of
                          the heads, or the mask does not fit)
training_2k, training_4k  forward and backward at 2,048 and 4,096 tokens against the same; from 2,305 on blocks are made
                          again for the backward pass
decode_8k                 one query behind 8,192 cached keys against the same
beside_rotation_8k        against plain causal attention without any bias (below 1: slower)
..._memory                peak bytes of the same calls, beyond their inputs

Each measurement is a process of its own; they take turns, and ratios are of medians: the baseline over ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from recipes.environment import commit, machine  # noqa: E402  (after the path is set)
from rope_ext.alibi_paths import Rows, folded  # noqa: E402
from rope_ext.methods.alibi import geometric_slopes  # noqa: E402

HEAD_DIM = 64


class Case(NamedTuple):
    """Shapes of one measurement, and how often it is made."""

    heads: int
    queries: int
    keys: int
    baseline: str = "mask"
    backward: bool = False


CASES = {
    "forward_8k": Case(8, 8192, 8192),
    "forward_16k": Case(2, 16_384, 16_384),
    "training_2k": Case(8, 2048, 2048, backward=True),
    "training_4k": Case(8, 4096, 4096, backward=True),
    "decode_8k": Case(8, 1, 8192),
    "beside_rotation_8k": Case(8, 8192, 8192, "plain"),
}


def with_mask(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Return attention under the whole bias, made anew as a model makes it in each layer."""
    queries, keys = q.shape[2], k.shape[2]
    distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    bias = slopes[None, :, None, None] * distance
    if queries > 1:
        bias = torch.where(distance <= 0, bias, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def plain(q: Tensor, k: Tensor, v: Tensor, _slopes: Tensor) -> Tensor:
    """Return causal attention without a bias."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Return what a patched model computes."""
    return folded(
        Rows(q, k, v, None, torch.arange(k.shape[2])[None], slopes, q.shape[-1] ** -0.5, k.shape[2] - q.shape[2])
    )


def measure(case: Case, kind: str) -> dict[str, Any]:
    """Run one kind three times in this process; the first warms up."""
    function: Callable[..., Tensor] = {"ours": ours, "mask": with_mask, "plain": plain}[kind]
    generator = torch.Generator().manual_seed(0)
    sizes = (case.queries, case.keys, case.keys)
    q, k, v = (torch.randn(1, case.heads, size, HEAD_DIM, generator=generator) for size in sizes)
    slopes = torch.tensor(geometric_slopes(case.heads))
    seconds: list[float] = []
    peaks: list[int] = []
    out = q
    times = 20 if case.queries == 1 else 1
    for _ in range(3):
        out = q  # the last one's memory is given back
        inputs = [each.clone().requires_grad_(case.backward) for each in (q, k, v)]
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, started = status("VmRSS"), time.perf_counter()
        for _ in range(times):
            out = function(*inputs, slopes)
            if case.backward:
                out.sum().backward()
        seconds.append((time.perf_counter() - started) / times)
        peaks.append(status("VmHWM") - before)
    return {"seconds": min(seconds[1:]), "peak": max(peaks), "some": out.detach()[0, :, -1].flatten()[:512].tolist()}


def status(key: str) -> int:
    """Return a size of this process from the kernel, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def in_process(name: str, kind: str) -> dict[str, Any]:
    """Return `measure` of a process that does nothing else."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, kind]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))  # noqa: S603  (our own words)
    return json.loads(found.stdout.splitlines()[-1])


def compare(name: str, repetitions: int) -> list[dict[str, Any]]:
    """Return the rows of one case: time, and memory where there is a mask to save."""
    baseline = CASES[name].baseline
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], baseline: []}
    for _ in range(repetitions):
        for kind, found in runs.items():
            found.append(in_process(name, kind))
    apart = None
    if baseline == "mask":
        pairs = zip(runs["ours"][0]["some"], runs["mask"][0]["some"], strict=True)
        apart = max(abs(a - b) for a, b in pairs)
    rows: list[dict[str, Any]] = []
    for suffix, key, unit in (("", "seconds", "s"), ("_memory", "peak", "bytes")):
        mine, theirs = (statistics.median(each[key] for each in found) for found in runs.values())
        row = {"name": name + suffix, "ratio": theirs / max(mine, 1), "ours": mine, "baseline": theirs}
        if unit == "s":
            row["ratio"] = theirs / mine
        rows.append(row | {"unit": unit, "max_abs_difference": apart})
    return rows[:1] if CASES[name].queries == 1 else rows  # one query's mask is small


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="the smallest cases, once: to see that it runs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(CASES[args.one[0]], args.one[1])))
        return
    at, names = commit(), ["training_2k", "decode_8k"] if args.quick else list(CASES)
    rows = [row for name in names for row in compare(name, 1 if args.quick else args.repetitions)]
    if args.json:
        print(json.dumps({"machine": machine(torch.device("cpu")), "commit": at, "results": rows}, indent=1))
        return
    for row in rows:
        scale, unit = (1e6, "MB") if row["unit"] == "bytes" else (1.0, "s")
        told = f"ours {row['ours'] / scale:.4g} {unit}, baseline {row['baseline'] / scale:.4g} {unit}"
        apart = "" if row["max_abs_difference"] is None else f", apart by {row['max_abs_difference']:.1e}"
        print(f"{row['name']:26} {row['ratio']:6.2f}  {told}{apart}")


if __name__ == "__main__":
    main()
