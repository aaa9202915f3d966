"""How much the evaluations' shortcuts save, measured side by side in one run, with the same numbers out.

python scripts/bench_evals.py [--json] [--quick]

prefix_64_lengths   perplexity of the first L tokens at 64 lengths up to 4,096: one forward against one a length
prefix_vs_sliding   the same against windows of 1,024 tokens moved by 256, another protocol: time alone is compared
passkey_relative    1,024 and 2,048 tokens x 5 depths x 10 trials: shared beginnings against every prompt whole
passkey_absolute    16 lengths x 8 positions x 4 trials up to 1,088 tokens: shared beginnings against one greedy
                    generate() a prompt, as common scripts do it
tiny_relative, tiny_absolute   both on the bundled model, of which attention is more than half of the work
forward_overhead    a forward of the patched model against the bare one (below 1: slower)
peak_memory         bytes beyond weights, vocabulary of 128,256 and 4,096 tokens: bounded against dense logits

Ratios are medians of interleaved repetitions; they compare on any machine, times do not.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from evals.corpora import TokenDocument, encode
from evals.grading import score_prompts, write_answers
from evals.nll import token_nll
from evals.passkey import FILLER, PasskeyPrompt, PromptMaker, RepeatedFiller
from evals.perplexity import prefix_nll, sliding_nll
from evals.variants import VARIANTS
from recipes.environment import commit, machine
from rope_ext import extend, load_model
from rope_ext.methods.yarn import Yarn

LONGEST, NUM_LENGTHS = 4096, 64
VOCABULARY, MEMORY_TOKENS, BUDGET = 128_256, 4096, 256 * 2**20


def static(_length: int) -> str:
    return "static"


class Timed(NamedTuple):
    """Median seconds of both, and what each returned."""

    ours: float
    baseline: float
    results: tuple[Any, Any]


def timed(ours: Callable[[], Any], baseline: Callable[[], Any], repetitions: int) -> Timed:
    """Run both in turn; the first round warms up and does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    results: list[Any] = [None, None]
    for _ in range(repetitions + 1):
        for i, run in enumerate((ours, baseline)):
            started = time.perf_counter()
            results[i] = run()
            seconds[i].append(time.perf_counter() - started)
    ours_s, baseline_s = (statistics.median(each[1:]) for each in seconds)
    return Timed(ours_s, baseline_s, (results[0], results[1]))


def row(name: str, ours: float, baseline: float, unit: str, difference: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "ratio": baseline / ours,
        "ours": ours,
        "baseline": baseline,
        "unit": unit,
        "max_abs_difference": difference,
    }


def bench_lengths(repetitions: int) -> list[dict[str, Any]]:
    model, _ = load_model("tiny", device="cpu")
    ids = torch.randint(5, 1000, (LONGEST,), generator=torch.Generator().manual_seed(0))
    document = TokenDocument(name="random", ids=tuple(ids.tolist()))
    lengths = [LONGEST * i // NUM_LENGTHS for i in range(1, NUM_LENGTHS + 1)]

    @torch.inference_mode()
    def by_length() -> dict[int, float]:
        found: dict[int, float] = {}
        for length in lengths:
            logits = model(input_ids=ids[None, :length], use_cache=False).logits[0, :-1].float()
            found[length] = float(F.cross_entropy(logits, ids[1:length]))
        return found

    def together() -> dict[int, float]:
        return prefix_nll(model, document, lengths, frequency_key=static)

    def sliding() -> object:
        return sliding_nll(model, document, 1024, stride=256, bos=None, frequency_key=static)

    with extend(model, Yarn(), context=LONGEST):
        found = timed(together, by_length, repetitions)
        difference = max(abs(found.results[0][n] - found.results[1][n]) for n in lengths)
        rows = [row("prefix_64_lengths", *found[:2], "s", difference)]
        rows.append(row("prefix_vs_sliding", *timed(together, sliding, repetitions)[:2], "s", None))
    return rows


def llama_shaped() -> LlamaForCausalLM:
    """Return a random model of a large one's proportions at 8k tokens: attention is a seventh of the work."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def bench_passkeys(repetitions: int) -> list[dict[str, Any]]:
    tiny, tokenizer = load_model("tiny", device="cpu")
    maker = PromptMaker(
        tokenizer=tokenizer, variant=VARIANTS["classic"], filler=RepeatedFiller(encode(tokenizer, FILLER))
    )
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    relative = [p for n in (1024, 2048) for p in maker.relative(length=n, depths=depths, num_trials=10)]
    positions = range(0, 1024, 128)
    absolute = [p for i in range(1, 17) for p in maker.absolute(length=64 * i + 64, positions=positions, num_trials=4)]
    rows: list[dict[str, Any]] = []
    for prefix, model in (("passkey", llama_shaped()), ("tiny", tiny)):
        with extend(model, Yarn(), context=2048):
            ours, whole = (partial(forced, model, relative, share=share) for share in (True, False))
            found = timed(ours, whole, repetitions)
            pairs = list(zip(*found.results, strict=True))
            assert all(one[0] == other[0] for one, other in pairs)
            apart = max(abs(one[1] - other[1]) for one, other in pairs)
            rows.append(row(f"{prefix}_relative", *found[:2], "s", apart))
            ours, written = partial(forced, model, absolute, share=True), partial(decoded, model, tokenizer, absolute)
            found = timed(ours, written, 1)
            assert [correct for correct, _ in found.results[0]] == found.results[1]
            rows.append(row(f"{prefix}_absolute", *found[:2], "s", None))  # right or wrong, which are the same
    return rows


def forced(model: Any, prompts: list[PasskeyPrompt], *, share: bool) -> list[tuple[bool, float]]:
    found = dict(pair for some in score_prompts(model, prompts, frequency_key=static, share=share) for pair in some)
    return [(found[i].correct, found[i].answer_nll) for i in range(len(prompts))]


def decoded(model: Any, tokenizer: Any, prompts: list[PasskeyPrompt]) -> list[bool]:
    found = dict(pair for some in write_answers(model, tokenizer, prompts) for pair in some)
    return [found[i].token_match for i in range(len(prompts))]


def bench_overhead(repetitions: int) -> dict[str, Any]:
    bare, _ = load_model("tiny", device="cpu")
    patched, _ = load_model("tiny", device="cpu")
    ids = torch.randint(5, 1000, (1, 2048), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def forward(model: Any) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    with extend(patched, Yarn(), factor=1):
        difference = float((forward(bare) - forward(patched)).abs().max())
        seconds = timed(lambda: forward(patched), lambda: forward(bare), 4 * repetitions)[:2]
    return row("forward_overhead", *seconds, "s", difference)


def peak_memory_of(how: str) -> dict[str, float]:
    """Run in a process of its own: peak resident bytes beyond those before the forward, and the mean NLL."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MEMORY_TOKENS,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, VOCABULARY, (MEMORY_TOKENS,), generator=torch.Generator().manual_seed(0))
    token_nll(model, ids[:64].tolist())  # libraries load their own buffers on first use
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from what is held now
    before = _kilobytes("VmRSS")
    with torch.inference_mode():
        if how == "bounded":
            nll = float(token_nll(model, ids.tolist(), memory_budget=BUDGET).mean())
        else:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            nll = float(F.cross_entropy(logits.float(), ids[1:], reduction="none").double().mean())
    return {"bytes": 1024.0 * (_kilobytes("VmHWM") - before), "nll": nll}


def _kilobytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def bench_memory() -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {}
    for how in ("bounded", "dense"):
        command = [sys.executable, __file__, "--peak", how]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)  # noqa: S603  (ourselves)
        found[how] = json.loads(done.stdout.splitlines()[-1])
    difference = abs(found["bounded"]["nll"] - found["dense"]["nll"])
    return row("peak_memory", found["bounded"]["bytes"], found["dense"]["bytes"], "bytes", difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--peak", choices=["bounded", "dense"], help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.peak:
        print(json.dumps(peak_memory_of(words.peak)))
        return
    repetitions = 1 if words.quick else 3
    head = {"machine": machine(torch.device("cpu")), "commit": commit()}
    rows = [
        *bench_lengths(repetitions),
        *bench_passkeys(min(repetitions, 2)),
        bench_overhead(repetitions),
        bench_memory(),
    ]
    document: dict[str, Any] = {**head, "results": rows}
    if words.json:
        print(json.dumps(document, indent=2))
        return
    print(f"{document['machine']}, commit {document['commit']}")
    for each in rows:
        apart = "" if each["max_abs_difference"] is None else f", numbers apart by {each['max_abs_difference']:.1e}"
        sizes = f"{each['ours']:.4g} against {each['baseline']:.4g} {each['unit']}"
        print(f"{each['name']:20} {each['ratio']:8.2f}x  ({sizes}{apart})")


if __name__ == "__main__":
    main()
