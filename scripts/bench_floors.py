"""How far from the machine's floor the main operations are, and where the rest of their time goes.

python scripts/bench_floors.py [--json] [--quick]

forward          SmolLM2-135M, 2,048 tokens, the last one's logits
nll              the same, every token scored (perplexity)
nll_tiny         the bundled model, 4,096 tokens, every token scored, under yarn
passkeys         shared beginnings on a random model of a large one's proportions, 1,024 tokens x 5 depths x 10 trials
alibi            attention of 8 heads over 8,192 tokens with ALiBi
training         SmolLM2-135M, forward and backward of one row of 1,024 tokens without logits

The floor of an operation is what its matrix products and its attention take at the rates of a large square product and
of long causal scaled_dot_product_attention, both measured in this run, before and after, the faster counted. Norms,
activations, rotation and softmax have no share in it. The rest is told by torch's profiler: the seconds of each kind of
operator, scaled to the time without it; what is in none of them is Python's and the profiler's.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # the script is run by path; the packages lie beside it

from bench_evals import forced, llama_shaped, static  # noqa: E402  (after the path is set)

from evals.corpora import encode  # noqa: E402
from evals.grading import Forest  # noqa: E402
from evals.nll import token_nll  # noqa: E402
from evals.passkey import FILLER, PromptMaker, RepeatedFiller  # noqa: E402
from evals.variants import VARIANTS  # noqa: E402
from recipes.environment import commit, machine  # noqa: E402
from recipes.loss import loss_without_logits  # noqa: E402
from rope_ext import extend, load_model  # noqa: E402
from rope_ext.alibi_paths import Rows, folded  # noqa: E402
from rope_ext.costs import prefill_operations, shape_of  # noqa: E402
from rope_ext.methods.alibi import geometric_slopes  # noqa: E402
from rope_ext.methods.yarn import Yarn  # noqa: E402

KINDS = {
    "products": "mm addmm bmm baddbmm addmv mv",
    "attention": "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    "copies": "copy_ cat fill_ zero_ index index_select gather scatter scatter_add_ constant_pad_nd",
    "loss": "_log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward exp_ _softmax",
}
"""Operators of aten by kind; all others go number by number."""
LONGEST = 8192
"""Tokens at which attention's rate is measured, as long as any case's: a longer one is faster."""


class Case(NamedTuple):
    """What is timed, and the operations that its floor is made of."""

    run: Callable[[], Any]
    products: float
    attention: float


def rates(quick: bool) -> tuple[float, float]:
    """Return the operations a second of a square product and of causal attention, each the best of several."""
    size, tokens = (512, 1024) if quick else (2048, LONGEST)
    a = torch.randn(size, size)
    q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
    best = [0.0, 0.0]
    for _ in range(3 if quick else 6):
        for i, (run, operations) in enumerate(
            (
                (lambda: a @ a, 2.0 * size**3),
                (
                    lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                    4.0 * 8 * 64 * tokens * (tokens + 1) / 2,
                ),
            )
        ):
            started = time.perf_counter()
            run()
            best[i] = max(best[i], operations / (time.perf_counter() - started))
    return best[0], best[1]


def cases(quick: bool) -> dict[str, Case]:
    """Return what is measured; `quick` leaves out the real model and shortens the rest."""
    found: dict[str, Case] = {}
    if not quick:
        found |= real_model()
    tiny, tokenizer = load_model("tiny", device="cpu")
    shape = shape_of(tiny.config)
    tokens = 512 if quick else 4096
    ids = torch.randint(5, 1000, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    extend(tiny, Yarn(), context=4096)
    operations = prefill_operations(shape, tokens)
    scored = operations.products + 2.0 * shape.head * (tokens - 2)
    found["nll_tiny"] = Case(lambda: token_nll(tiny, ids), scored, operations.attention)
    found["passkeys"] = passkeys(tokenizer, 128 if quick else 1024)
    found["alibi"] = alibi(1024 if quick else 8192)
    return found


def real_model() -> dict[str, Case]:
    model, _ = load_model("smollm2", device="cpu")
    shape = shape_of(model.config)
    ids = torch.randint(5, 49_000, (2048,), generator=torch.Generator().manual_seed(0))
    whole = prefill_operations(shape, 2048)
    row = ids[None, :1024]
    short = prefill_operations(shape, 1024)

    @torch.inference_mode()
    def forward() -> Any:
        return model(input_ids=ids[None], use_cache=False, logits_to_keep=1).logits

    def train() -> None:
        with loss_without_logits(model):
            torch.autograd.backward(model(input_ids=row, labels=row).loss)
        model.zero_grad(set_to_none=True)

    head = 2.0 * shape.head
    return {
        "forward": Case(forward, whole.products, whole.attention),
        "nll": Case(lambda: token_nll(model, ids.tolist()), whole.products + head * 2046, whole.attention),
        # Forward, gradients of what came in and of weights; attention's backward makes four products where two were
        "training": Case(train, 3 * (short.products + head * 1022), 3 * short.attention),
    }


def passkeys(tokenizer: Any, length: int) -> Case:
    """Return prompts whose shared beginnings are computed once, and the operations of those pieces alone."""
    maker = PromptMaker(
        tokenizer=tokenizer, variant=VARIANTS["classic"], filler=RepeatedFiller(encode(tokenizer, FILLER))
    )
    prompts = list(maker.relative(length=length, depths=(0.0, 0.25, 0.5, 0.75, 1.0), num_trials=10))
    model = llama_shaped()
    shape = shape_of(model.config)
    extend(model, Yarn(), context=2048)
    edges = list(Forest(prompts, frequency_key=static, share=True).edges())
    tokens = sum(end - start for start, end in edges)
    pairs = sum((end - start) * (start + end + 1) / 2 for start, end in edges)
    scored = sum(prompt.num_answer for prompt in prompts)
    return Case(
        lambda: forced(model, prompts, share=True),
        2.0 * (shape.multiplied * tokens + shape.head * scored),
        4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs,
    )


def alibi(tokens: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, tokens, 64, generator=generator) for _ in range(3))
    rows = Rows(q, k, v, None, torch.arange(tokens)[None], torch.tensor(geometric_slopes(8)), 0.125, 0)
    return Case(lambda: folded(rows), 0.0, 4.0 * 8 * 64 * tokens * (tokens + 1) / 2)


def measure(case: Case, repetitions: int) -> tuple[float, dict[str, float]]:
    """Return the median seconds, and of them those of each kind of operator."""
    case.run()
    seconds: list[float] = []
    for _ in range(repetitions):
        started = time.perf_counter()
        case.run()
        seconds.append(time.perf_counter() - started)
    took = statistics.median(seconds)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        started = time.perf_counter()
        case.run()
        profiled = time.perf_counter() - started  # without the profiler's own start and stop
    parts: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        if event.key.startswith("aten::"):
            parts[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    parts["python"] = max(0.0, profiled - sum(parts.values()))
    return took, {kind: took * part / profiled for kind, part in parts.items()}


def kind_of(operator: str) -> str:
    """Return the kind that an operator is counted under; what is none of `KINDS` goes number by number."""
    name = operator.removeprefix("aten::")
    return next((kind for kind, names in KINDS.items() if name in names.split()), "elementwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="short and without the real model: to see that it runs")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    at, before = commit(), rates(args.quick)
    found = {
        name: (case, *measure(case, 1 if args.quick else args.repetitions)) for name, case in cases(args.quick).items()
    }
    products, attention = (max(pair) for pair in zip(before, rates(args.quick), strict=True))
    results: list[dict[str, Any]] = []
    for name, (case, seconds, parts) in found.items():
        floor = case.products / products + case.attention / attention
        results.append({"name": name, "seconds": seconds, "floor": floor, "share": floor / seconds, "parts": parts})
    head = {"machine": machine(torch.device("cpu")), "commit": at, "products": products, "attention": attention}
    if args.json:
        print(json.dumps({**head, "results": results}, indent=1))
        return
    print(f"products {products / 1e9:.0f} GFLOP/s, attention {attention / 1e9:.0f} GFLOP/s")
    for row in results:
        parts = ", ".join(f"{kind} {part / row['seconds']:.2f}" for kind, part in sorted(row["parts"].items()))
        print(f"{row['name']:10} {row['seconds']:8.3f} s, floor {row['floor']:.3f} s ({row['share']:.2f}); {parts}")


if __name__ == "__main__":
    main()
