"""What a training step costs beside the plain Trainer's, on the same model, rows and optimizer.

python scripts/bench_training.py [--json] [--quick]

smollm2_2k, smollm2_4k   SmolLM2-135M (vocabulary 49,152) on one row of 2,048 or 4,096 tokens
vocabulary_128k          a random model of 2 layers with a vocabulary of 128,256 on 4,096 tokens
..._kept                 the same with activation_checkpointing: {keep: products}

Each measurement is a process of its own: the peak is what a step adds to the memory that weights and optimizer take.
The two take turns, and ratios are of medians. `memory` is the plain peak over ours, `time` the plain time over ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from recipes.environment import commit, machine  # noqa: E402  (after the path is set)
from recipes.loss import loss_without_logits  # noqa: E402
from recipes.recompute import recomputed_activations  # noqa: E402
from recipes.train import collate  # noqa: E402
from recipes.tuning import ActivationCheckpointing  # noqa: E402
from rope_ext import load_model  # noqa: E402

WIDE = 128_256
STEPS = 3
CASES = {"smollm2_2k": 2048, "smollm2_4k": 4096, "vocabulary_128k": 4096}


def make(case: str) -> PreTrainedModel:
    if case.startswith("smollm2"):
        return load_model("smollm2", device="cpu")[0]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WIDE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


class Meter(TrainerCallback):
    """Seconds and peak bytes of every step, beside what was there before it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peaks: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.before = status("VmRSS")
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.peaks.append(status("VmHWM") - self.before)


def status(key: str) -> int:
    """Return a size of this process from the kernel, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def measure(case: str, kind: str) -> dict[str, Any]:
    """Train a few steps in this process; the first makes the optimizer's state and does not count."""
    model = make(case)
    tokens = CASES[case]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, int(model.config.vocab_size), (STEPS, tokens), generator=generator)
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(tokens)} for row in ids]
    meter, losses = Meter(), []

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_kwargs: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            learning_rate=1e-5,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=cast("Any", rows),
            data_collator=collate,
            callbacks=[meter, Losses()],
        )
        with ExitStack() as stack:
            if kind != "plain":
                stack.enter_context(loss_without_logits(model))
            if kind == "kept":
                stack.enter_context(recomputed_activations(model, ActivationCheckpointing(keep="products")))
            trainer.train()
    return {"seconds": min(meter.seconds[1:]), "peak": max(meter.peaks[1:]), "losses": losses}


def in_process(case: str, kind: str) -> dict[str, Any]:
    """Return `measure` of a process that does nothing else."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", case, kind]
    environment = os.environ | {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)  # noqa: S603  (our own words)
    return json.loads(found.stdout.splitlines()[-1])


def compare(case: str, repetitions: int) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "kept": [], "plain": []}
    for _ in range(repetitions):
        for kind, found in runs.items():
            found.append(in_process(case, kind))
    rows: list[dict[str, Any]] = []
    plain = runs["plain"]
    for kind, suffix in (("ours", ""), ("kept", "_kept")):
        apart = max(abs(a - b) for a, b in zip(runs[kind][0]["losses"], plain[0]["losses"], strict=True))
        for name, key, unit in (("memory", "peak", "bytes"), ("time", "seconds", "s")):
            ours, baseline = (statistics.median(each[key] for each in found) for found in (runs[kind], plain))
            row = {"name": f"{case}{suffix}_{name}", "ratio": baseline / ours, "ours": ours, "baseline": baseline}
            rows.append(row | {"unit": unit, "max_abs_difference": apart})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="the toy alone, once: to see that it runs")
    parser.add_argument("--cases", default=",".join(CASES), help="comma list of them")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    at, cases = commit(), ["vocabulary_128k"] if args.quick else args.cases.split(",")
    rows = [row for case in cases for row in compare(case, 1 if args.quick else args.repetitions)]
    if args.json:
        print(json.dumps({"machine": machine(torch.device("cpu")), "commit": at, "results": rows}, indent=1))
        return
    for row in rows:
        scale, unit = (1e6, "MB") if row["unit"] == "bytes" else (1.0, "s")
        told = f"ours {row['ours'] / scale:.4g} {unit}, plain {row['baseline'] / scale:.4g} {unit}"
        print(f"{row['name']:24} {row['ratio']:6.2f}  {told}, losses apart by {row['max_abs_difference']:.1e}")


if __name__ == "__main__":
    main()
