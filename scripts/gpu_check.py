"""Does everything do on a GPU what the tests show on a CPU, and how far is it from the floor? Minutes, one GPU.

python scripts/gpu_check.py [--out FILE] [--minutes 8] [--only STAGE,STAGE]
python scripts/gpu_check.py --dry       # toy shapes on a CPU, in seconds: that it runs, no speed

It needs what `pip install -e '.[train]'` installs, with a CUDA build of torch; flash-attn 2 is used if it is there.

peaks        matrix products and causal attention in bf16, from which the floors below are taken
agreement    every method on a 1B-shaped model, at the window's last positions: logits in bf16 against those in fp32, as
             far apart as those of the bare model; and that the method changes them
perplexity   8B-shaped, bf16: the mean NLL of 8k, 32k and 128k tokens from one forward, in a bounded budget
passkey      1B-shaped: prompts with shared beginnings against every prompt whole
alibi        each path against the whole bias in fp32, then its time beside plain attention; a prefill of the 8B shape
train        8B-shaped: loss and gradients without logits against dense ones, then LoRA steps on a row of 32k tokens

Models have random weights in the shapes of LLaMA-3-8B and LLaMA-3.2-1B: time, memory and agreement do not need trained
ones, perplexity's value does. A row fails (and the script exits 1) if what was to agree does not; what found no time is
listed as not run. The file is written after every row, so that a killed run loses nothing.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from evals.corpora import TokenDocument, encode  # noqa: E402  (after the path is set)
from evals.grading import score_prompts  # noqa: E402
from evals.nll import token_nll  # noqa: E402
from evals.passkey import FILLER, PromptMaker, RepeatedFiller  # noqa: E402
from evals.perplexity import prefix_nll  # noqa: E402
from evals.rows import write_whole  # noqa: E402
from evals.variants import VARIANTS  # noqa: E402
from recipes.environment import commit, machine, versions  # noqa: E402
from recipes.lora import adapted  # noqa: E402
from recipes.loss import loss_without_logits  # noqa: E402
from recipes.ranks import ALONE  # noqa: E402
from recipes.recompute import recomputed_activations  # noqa: E402
from recipes.train import BriefTrainer, arguments, collate  # noqa: E402
from recipes.tuning import ActivationCheckpointing, Adapter, FinetuneRecipe, Train  # noqa: E402
from rope_ext import extend, load_model  # noqa: E402
from rope_ext.alibi_paths import PATHS, Rows, flash_function  # noqa: E402
from rope_ext.costs import ModelShape, prefill_operations, shape_of  # noqa: E402
from rope_ext.hf import size_of_head  # noqa: E402
from rope_ext.methods.alibi import geometric_slopes  # noqa: E402
from rope_ext.plan import Method  # noqa: E402
from rope_ext.registry import known_methods, method  # noqa: E402

GIB = 2**30
LOOSER = 2.5
UNCHANGED = 1e-5
"""Spreads of the logits that two kernels for the same may be apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is.

    Attributes:
        small, large: shapes of the two models, `window` tokens before they are stretched by `factor`.
        short: tokens whose logits are compared.
        lengths: of perplexity. passkey: lengths of prompts. alibi: lengths of attention alone. row: of training.
        budget: bytes for activations and logits of a forward.
        square, head_dim, attention: of the products and the attention that give the peaks.
    """

    small: dict[str, Any]
    large: dict[str, Any]
    window: int
    factor: int
    short: int
    lengths: tuple[int, ...]
    passkey: tuple[int, ...]
    trials: int
    alibi: tuple[int, ...]
    row: int
    budget: int
    square: int
    attention: int


REAL = Scale(
    # LLaMA-3.2-1B and LLaMA-3-8B
    small={
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    large={
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    window=8192,
    factor=16,
    short=512,
    lengths=(8192, 32_768, 131_072),
    passkey=(4096, 8192, 16_384),
    trials=4,
    alibi=(8192, 32_768),
    row=32_768,
    budget=48 * GIB,  # half of it holds 128k tokens of the 8B shape in one piece, which then needs no mask
    square=8192,
    attention=16_384,
)
TOY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
DRY = Scale(
    small={**TOY, "tie_word_embeddings": True},
    large={**TOY, "num_hidden_layers": 3},
    window=64,
    factor=8,
    short=48,
    lengths=(64, 128, 512),
    passkey=(128, 256),
    trials=2,
    alibi=(512,),
    row=256,
    budget=4 * 2**20,
    square=256,
    attention=256,
)


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the outcome. What was not measured is None.

    Attributes:
        floor: seconds that the operations take at the peaks measured here; `share` is that of the time.
        peak_bytes: the most memory that was allocated, of the GPU's.
        apart, limit: how far two ways to the same numbers are from each other, and how far they may be.
        ok: False if they are farther, or something else that was to hold did not.
        note: what stands beside it, in words.
    """

    stage: str
    name: str
    seconds: float | None = None
    tokens_per_second: float | None = None
    floor: float | None = None
    share: float | None = None
    peak_bytes: int | None = None
    apart: float | None = None
    limit: float | None = None
    ok: bool = True
    note: str = ""


class Peaks(NamedTuple):
    """Operations a second."""

    products: float
    attention: float


@dataclass(slots=True)
class Check:
    """A run in progress: where it stands and what has been found."""

    scale: Scale
    device: torch.device
    out: Path | None
    deadline: float
    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list[Row])
    peaks: Peaks | None = None

    @property
    def half(self) -> torch.dtype:
        """bf16 on a GPU; a CPU without it is some fifty times slower in it, and toys do not mind."""
        return torch.bfloat16

    def add(self, row: Row) -> None:
        """Keep a row, on the disk too, and say it."""
        if row.apart is not None and row.limit is not None and not row.apart <= row.limit:
            row.ok = False
        if row.floor is not None and row.seconds:
            row.share = row.floor / row.seconds
        self.rows.append(row)
        print(line(row), flush=True)
        if self.out is not None:
            write_whole(self.out, json.dumps(self.document(), indent=1) + "\n")

    def document(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {**self.head, "ok": all(row.ok for row in self.rows), "results": [asdict(row) for row in self.rows]}

    def floor(self, operations: float, attention: float) -> float | None:
        """Return the seconds of so many operations of products and of attention at the peaks, if those are known."""
        if self.peaks is None:
            return None
        return operations / self.peaks.products + attention / self.peaks.attention

    def guarded(self, stage: str, name: str, run: Callable[[], Any]) -> None:
        """Run a part; a failure is a row, and what comes behind it goes on."""
        try:
            run()
        except Exception as error:  # noqa: BLE001  (whatever it is, the rest is still worth its time)
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            self.add(Row(stage=stage, name=name, ok=False, note=said))
        self.free()

    def sync(self) -> None:
        """Wait until the GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, run: Callable[[], Any]) -> tuple[float, int | None, Any]:
        """Return seconds, peak bytes and the result of one call."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.sync()
        started = time.perf_counter()
        result = run()
        self.sync()
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return seconds, peak, result

    @contextmanager
    def model(self, shape: dict[str, Any], dtype: torch.dtype) -> Generator[LlamaForCausalLM]:
        """Make a random model whose queries and keys are of unit size, so that positions matter; free it afterwards."""
        config = LlamaConfig(
            **shape,
            max_position_embeddings=self.scale.window,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            initializer_range=shape["hidden_size"] ** -0.5,
        )
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with self.device:
                made = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        # Frequencies that a GPU works out differ in the last bit from those of a checkpoint's loader and of a patch
        made.model.rotary_emb = LlamaRotaryEmbedding(config).to(self.device)
        try:
            yield made
        finally:
            del made
            self.free()

    def free(self) -> None:
        """Give memory back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def line(row: Row) -> str:
    """Return a row in words."""
    parts = [f"{'ok' if row.ok else 'FAILED':6} {row.stage:10} {row.name:24}"]
    if row.seconds is not None:
        parts.append(f"{row.seconds:9.4f} s")
    if row.tokens_per_second is not None:
        parts.append(f"{row.tokens_per_second:12,.0f} tokens/s")
    if row.share is not None:
        parts.append(f"floor/time {row.share:.2f}")
    if row.peak_bytes is not None:
        parts.append(f"peak {row.peak_bytes / GIB:.2f} GiB")
    if row.apart is not None:
        allowed = "" if row.limit is None else f" (at most {row.limit:.1e})"
        parts.append(f"apart {row.apart:.1e}{allowed}")
    if row.note:
        parts.append(row.note)
    return "  ".join(parts)


def ids_of(scale: Scale, tokens: int) -> Tensor:
    """Return random ids, the same wherever they are asked for."""
    vocabulary = min(scale.small["vocab_size"], scale.large["vocab_size"])
    return torch.randint(5, vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens))


def methods(head_dim: int, factor: float) -> list[Method]:
    """Return every method with its defaults; longrope, which has none, with lists that fit the model."""
    pairs = head_dim // 2
    lists = {
        "short_factor": [1.0] * pairs,
        "long_factor": [1 + (factor - 1) * pair / (pairs - 1) for pair in range(pairs)],
    }
    return [method(name, **(lists if name == "longrope" else {})) for name in known_methods()]


def measure_peaks(check: Check) -> None:
    """The fastest matrix product and causal attention that torch gives here."""
    scale, device, dtype = check.scale, check.device, check.half
    if device.type == "cpu":
        dtype = torch.float32
    a = torch.randn(scale.square, scale.square, device=device, dtype=dtype)
    q, k, v = (torch.randn(1, 32, scale.attention, 128, device=device, dtype=dtype) for _ in range(3))

    def product() -> Tensor:
        return a @ a

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def best(run: Callable[[], Tensor]) -> float:
        check.timed(run)
        return min(check.timed(run)[0] for _ in range(5))

    seconds = best(product), best(attention)
    operations = 2.0 * scale.square**3, 4.0 * 32 * 128 * scale.attention * (scale.attention + 1) / 2
    peaks = Peaks(operations[0] / seconds[0], operations[1] / seconds[1])
    check.peaks = peaks
    for name, took, peak in zip(("products", "attention"), seconds, peaks, strict=True):
        check.add(Row(stage="peaks", name=name, seconds=took, note=f"{peak / 1e12:.4g} TFLOP/s in {dtype}"))


@torch.inference_mode()
def check_agreement(check: Check) -> None:
    """Logits of every method in bf16 and in fp32, where its window ends: the far angles are what half precision hurts.

    Two models of unequal precision differ, method or not. A method may make that `LOOSER` times as large as it is for
    the bare model (a sharper softmax, as YaRN's, does so by half), which no angle computed in half precision would keep
    to, and must itself change the logits. One that follows the length is given a whole sequence, longer than the
    original window.
    """
    scale = check.scale
    context = scale.window * scale.factor
    tokens = ids_of(scale, scale.window + scale.short).to(check.device)[None]
    far = torch.arange(context - scale.short, context, device=check.device)[None]
    inputs = {
        "far": {"input_ids": tokens[:, -scale.short :], "position_ids": far},
        "whole": {"input_ids": tokens, "logits_to_keep": scale.short},
    }

    def logits(model: LlamaForCausalLM, which: str) -> Tensor:
        return cast("Tensor", model(**inputs[which], use_cache=False).logits)[0].float()

    with check.model(scale.small, torch.float32) as exact, check.model(scale.small, check.half) as half:
        half.load_state_dict(exact.state_dict())  # made so, its own frequencies stay in fp32, as in a loaded model
        bare, usual = ({}, {})
        for which in inputs:
            bare[which] = logits(exact, which)
            usual[which] = float((logits(half, which) - bare[which]).std() / bare[which].std())
            said = "bf16 from fp32, in spreads of the logits"
            check.add(Row(stage="agreement", name=f"bare, {which}", apart=usual[which], note=said))
        for chosen in methods(size_of_head(exact.config), scale.factor):
            with extend(exact, chosen, context=context) as patch, extend(half, chosen, context=context):
                follows = patch.frequency_key(1) != patch.frequency_key(context)
                which = "whole" if follows else "far"
                expected = logits(exact, which)
                seconds, _, found = check.timed(lambda which=which: logits(half, which))
            change = float((expected - bare[which]).std() / bare[which].std())
            same = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
            check.add(
                Row(
                    stage="agreement",
                    name=type(chosen).name,
                    seconds=seconds,
                    apart=float((found - expected).std() / expected.std()),
                    limit=LOOSER * usual[which],
                    ok=(change < UNCHANGED) == (type(chosen).name == "unscaled"),
                    note=f"same next token {same:.3f}, changes logits by {change:.2g}",
                )
            )


def prefill_floor(check: Check, shape: ModelShape, tokens: int) -> float | None:
    """Return the seconds at the peaks of one forward whose every token but the last is scored."""
    operations = prefill_operations(shape, tokens)
    return check.floor(operations.products + 2.0 * shape.head * (tokens - 2), operations.attention)


def check_perplexity(check: Check) -> None:
    """One forward gives every prefix: the NLL of the first 8k tokens is that of 8k tokens alone."""
    scale = check.scale
    longest = max(scale.lengths)
    document = TokenDocument(name="random", ids=tuple(ids_of(scale, longest).tolist()))
    with check.model(scale.large, check.half) as model, extend(model, method("yarn"), context=longest) as patch:
        shape = shape_of(model.config)
        alone: dict[int, float] = {}

        def nll(lengths: tuple[int, ...]) -> dict[int, float]:
            key = patch.frequency_key
            return prefix_nll(model, document, lengths, frequency_key=key, memory_budget=scale.budget)

        def one(n: int) -> None:
            seconds, peak, found = check.timed(lambda: nll((n,)))
            alone[n] = found[n]
            check.add(
                Row(
                    stage="perplexity",
                    name=f"{n} tokens",
                    seconds=seconds,
                    tokens_per_second=n / seconds,
                    floor=prefill_floor(check, shape, n),
                    peak_bytes=peak,
                    note=f"nats per token {found[n]:.4f}",
                )
            )

        def together() -> None:
            seconds, peak, found = check.timed(lambda: nll(scale.lengths))
            check.add(
                Row(
                    stage="perplexity",
                    name="all from one forward",
                    seconds=seconds,
                    tokens_per_second=longest / seconds,
                    floor=prefill_floor(check, shape, longest),
                    peak_bytes=peak,
                    apart=max(abs(alone[n] - found[n]) for n in alone),
                    limit=0.01,  # nats per token, means over thousands of tokens rounded to bf16 in another order
                    note=f"of {len(alone)} lengths",
                )
            )

        nll(scale.lengths[:1])  # warms up
        for n in scale.lengths:
            check.guarded("perplexity", f"{n} tokens", lambda n=n: one(n))
        check.guarded("perplexity", "all from one forward", together)


def check_passkey(check: Check) -> None:
    """Prompts with shared beginnings score as whole ones do, for less."""
    scale = check.scale
    _, tokenizer = load_model("tiny", device="cpu")
    maker = PromptMaker(
        tokenizer=tokenizer, variant=VARIANTS["classic"], filler=RepeatedFiller(encode(tokenizer, FILLER))
    )
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    prompts = [p for n in scale.passkey for p in maker.relative(length=n, depths=depths, num_trials=scale.trials)]
    tokens = sum(len(p.ids) for p in prompts)
    with (
        check.model(scale.small, check.half) as model,
        extend(model, method("yarn"), context=max(scale.passkey)) as patch,
    ):
        runs: dict[bool, tuple[float, list[float]]] = {}

        def forced(*, share: bool) -> list[float]:
            groups = score_prompts(
                model, prompts, frequency_key=patch.frequency_key, share=share, memory_budget=scale.budget
            )
            found = dict(pair for some in groups for pair in some)
            return [found[i].answer_nll for i in range(len(prompts))]

        forced(share=True)
        for share in (False, True):
            seconds, peak, found = check.timed(lambda share=share: forced(share=share))
            runs[share] = seconds, found
            row = Row(
                stage="passkey",
                name="shared beginnings" if share else "every prompt whole",
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                peak_bytes=peak,
            )
            if share:
                whole, expected = runs[False]
                row.apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
                row.limit = 0.1  # nats of one answer in bf16, not a mean over many
                row.note = f"{whole / seconds:.2f} times as fast; {len(prompts)} prompts"
            check.add(row)


def alibi_rows(check: Check, tokens: int, dtype: torch.dtype, *, backward: bool = False) -> Rows:
    """Return attention of 32 heads, 8 of keys, head size 128."""
    generator = torch.Generator(device=check.device).manual_seed(0)
    heads, kv_heads, size = (32, 8, 128) if check.device.type == "cuda" else (4, 2, 16)
    q, k, v = (
        torch.randn(1, n, tokens, size, device=check.device, generator=generator).to(dtype).requires_grad_(backward)
        for n in (heads, kv_heads, kv_heads)
    )
    slopes = torch.tensor(geometric_slopes(heads), device=check.device)
    positions = torch.arange(tokens, device=check.device)[None]
    return Rows(q, k, v, None, positions, slopes, size**-0.5, 0)


def check_alibi(check: Check) -> None:
    """The ways to compute a bias by distance agree with the whole bias in fp32, forward and backward; their cost."""
    tokens = min(2048, check.scale.alibi[0])
    names = ["folded", *(["flex"] if check.device.type == "cuda" else [])]
    if check.device.type == "cuda" and flash_function() is not None:
        names.append("flash")
    else:
        check.add(Row(stage="alibi", name="flash", note="not run: needs a GPU and the package flash-attn 2"))
    for name in names:
        check.guarded("alibi", f"{name} from dense", lambda name=name: alibi_agreement(check, name, tokens))
    for length in check.scale.alibi:
        rows = alibi_rows(check, length, check.half)
        beside = alibi_time(check, lambda rows=rows: plain_attention(rows))[0]
        for name in names:
            words = f"{name}, {length} tokens"
            check.guarded("alibi", words, lambda n=name, r=rows, b=beside, w=words: alibi_cost(check, n, r, b, w))
        del rows
        check.free()


def alibi_agreement(check: Check, name: str, tokens: int) -> None:
    """Compare one path's result and gradients with the whole bias in fp32."""
    given = alibi_rows(check, tokens, check.half, backward=True)
    leaves = (given.query, given.key, given.value)
    exact = [each.detach().float().requires_grad_() for each in leaves]
    out, expected = PATHS[name](given), PATHS["dense"](given._replace(query=exact[0], key=exact[1], value=exact[2]))
    seed = torch.randn(expected.shape, device=check.device, generator=torch.Generator(check.device).manual_seed(1))
    pairs = [(out, expected)]
    pairs += zip(
        torch.autograd.grad(out, leaves, seed.to(out.dtype)),
        torch.autograd.grad(expected, exact, seed),
        strict=True,
    )
    check.add(
        Row(
            stage="alibi",
            name=f"{name} from dense",
            apart=max(float((a.detach().float() - b.detach()).std() / b.detach().std()) for a, b in pairs),
            limit=0.02,  # bf16 keeps 8 bits: .004 a rounding, several of them one behind another
            note=f"{tokens} tokens, forward and three gradients, in their spreads",
        )
    )


def plain_attention(rows: Rows) -> Tensor:
    """Return causal attention without a bias."""
    return F.scaled_dot_product_attention(rows.query, rows.key, rows.value, is_causal=True, enable_gqa=True)


def alibi_time(check: Check, run: Callable[[], Tensor]) -> tuple[float, int | None]:
    """Return seconds and peak bytes of the fastest of three calls behind one that warms up."""
    with torch.inference_mode():
        check.timed(run)
        seconds, peak, _ = min((check.timed(run) for _ in range(3)), key=lambda found: found[0])
    return seconds, peak


def alibi_cost(check: Check, name: str, rows: Rows, beside: float, words: str) -> None:
    """Time one path beside plain attention."""
    seconds, peak = alibi_time(check, lambda: PATHS[name](rows))
    tokens = rows.query.shape[2]
    pairs = " (computes the scores of all pairs, later keys too)" if name == "flex" else ""
    check.add(
        Row(
            stage="alibi",
            name=words,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            peak_bytes=peak,
            note=f"{seconds / beside:.2f} times plain attention{pairs}",
        )
    )


def check_alibi_model(check: Check) -> None:
    """A prefill under ALiBi beside one that rotates."""
    scale = check.scale
    ids = ids_of(scale, scale.alibi[-1]).tolist()
    with check.model(scale.large, check.half) as model:
        shape = shape_of(model.config)
        for name in ("yarn", "alibi"):
            with extend(model, method(name), context=scale.window * scale.factor):
                token_nll(model, ids, memory_budget=scale.budget)
                seconds, peak, _ = check.timed(lambda: token_nll(model, ids, memory_budget=scale.budget))
            check.add(
                Row(
                    stage="alibi",
                    name=f"prefill, {name}",
                    seconds=seconds,
                    tokens_per_second=len(ids) / seconds,
                    floor=prefill_floor(check, shape, len(ids)),
                    peak_bytes=peak,
                    note=f"{len(ids)} tokens",
                )
            )


def check_loss(check: Check) -> None:
    """The loss without logits and recomputed activations give the dense loss and its gradients."""
    scale = check.scale
    ids = ids_of(scale, min(2048, scale.row)).to(check.device)[None]
    with check.model(scale.small, torch.float32) as model, extend(model, method("yarn"), factor=scale.factor):
        weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")

        def gradient(loss: Tensor) -> tuple[float, Tensor]:
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            assert weight.grad is not None
            return float(loss.detach()), weight.grad.clone()

        model.train()
        with torch.autocast(check.device.type, dtype=check.half, enabled=check.device.type == "cuda"):
            dense = gradient(model(input_ids=ids, labels=ids).loss)
            with loss_without_logits(model), recomputed_activations(model, ActivationCheckpointing()):
                ours = gradient(model(input_ids=ids, labels=ids).loss)
        apart = abs(ours[0] - dense[0])
        turned = float((ours[1] - dense[1]).norm() / dense[1].norm())
        check.add(
            Row(stage="train", name="loss", apart=apart, limit=5e-3, note=f"dense {dense[0]:.5f}, ours {ours[0]:.5f}")
        )
        check.add(Row(stage="train", name="gradient", apart=turned, limit=0.05, note="of its own norm, first q_proj"))


class Meter(TrainerCallback):
    """Seconds of every step, and its loss."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        self.check.sync()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        self.check.sync()
        self.seconds.append(time.perf_counter() - self.started)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_kwargs: Any) -> None:
        self.losses.extend([logs["loss"]] if "loss" in logs else [])


def check_training(check: Check) -> None:
    """LoRA with norms and embeddings on one long row, as a recipe with `adapter: {}` trains it."""
    scale = check.scale
    recipe = FinetuneRecipe(
        context=scale.window * scale.factor,
        train=Train(
            steps=4,
            rows_per_step=1,
            warmup_steps=1,
            lr=1e-4,
            adapter=Adapter(),
            activation_checkpointing=ActivationCheckpointing(),
        ),
    )
    ids = ids_of(scale, scale.row)
    rows = [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(scale.row)}] * recipe.train.steps
    meter = Meter(check)
    with (
        check.model(scale.large, torch.float32) as model,
        extend(model, method("yarn"), context=recipe.context),
        tempfile.TemporaryDirectory() as folder,
    ):
        shape = shape_of(model.config)
        assert recipe.train.adapter is not None
        trained = adapted(model, recipe.train.adapter, seed=0)
        settings = arguments(recipe, Path(folder), row_tokens=scale.row, device=check.device, ranks=ALONE)
        settings.save_strategy = cast("Any", "no")
        with (
            loss_without_logits(model, rows=recipe.train.loss_rows),
            recomputed_activations(model, recipe.train.activation_checkpointing),
        ):
            trainer = BriefTrainer(
                model=trained,
                args=settings,
                train_dataset=cast("Any", rows),
                data_collator=collate,
                callbacks=[meter],
            )
            _, peak, _ = check.timed(trainer.train)
        moved = sum(bool(p.detach().any()) for name, p in trained.named_parameters() if "lora_B" in name)
        wanted = len(recipe.train.adapter.targets) * shape.num_layers  # they begin as zeros
        del trainer, trained
    seconds = min(meter.seconds[1:])
    operations = prefill_operations(shape, scale.row)
    # Forward, forward again, and the gradient of what came in; frozen weights get none, and the head is not made again
    layers = operations.products - 2.0 * shape.head
    floor = check.floor(3 * layers + 2 * 2.0 * shape.head * (scale.row - 1), 4 * operations.attention)
    check.add(
        Row(
            stage="train",
            name=f"LoRA step, {scale.row} tokens",
            seconds=seconds,
            tokens_per_second=scale.row / seconds,
            floor=floor,
            peak_bytes=peak,
            ok=meter.losses[-1] < meter.losses[0] and moved == wanted,
            note=f"losses {', '.join(f'{loss:.4f}' for loss in meter.losses)}; {moved} of {wanted} adapters moved",
        )
    )


STAGES: dict[str, list[Callable[[Check], None]]] = {
    "peaks": [measure_peaks],
    "agreement": [check_agreement],
    "perplexity": [check_perplexity],
    "passkey": [check_passkey],
    "alibi": [check_alibi, check_alibi_model],
    "train": [check_loss, check_training],
}


def run(check: Check, wanted: list[str]) -> None:
    """Run the stages; a failure of one is a row, and the next goes on."""
    for name in wanted:
        for part in STAGES[name]:
            if time.monotonic() > check.deadline:
                check.add(Row(stage=name, name=part.__name__, ok=False, note="not run: out of time (--minutes)"))
                continue
            check.guarded(name, part.__name__, lambda part=part: part(check))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="toy shapes on a CPU: to see that it runs")
    parser.add_argument("--out", type=Path, help="write the JSON document here, anew after every row")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no stage after so long")
    parser.add_argument("--only", default=",".join(STAGES), help="comma list of stages; peaks always run")
    args = parser.parse_args()
    wanted = ["peaks", *(name for name in args.only.split(",") if name != "peaks")]
    unknown = [name for name in wanted if name not in STAGES]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is no stage; there are {', '.join(STAGES)}")
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry runs toy shapes on a CPU")
    device = torch.device("cpu" if args.dry else "cuda")
    head = {
        "command": "python scripts/gpu_check.py" + (" --dry" if args.dry else ""),
        "dry": args.dry,  # toys on a CPU: no time of theirs says anything
        "machine": machine(device),
        "commit": commit(),
        "versions": versions() | {"cuda": torch.version.cuda},
        "flash_attn": flash_function() is not None,
    }
    deadline = time.monotonic() + 60 * args.minutes
    check = Check(scale=DRY if args.dry else REAL, device=device, out=args.out, deadline=deadline, head=head)
    print(f"{head['machine']}, commit {head['commit']}, torch {torch.__version__}", flush=True)
    run(check, wanted)
    failed = [row for row in check.rows if not row.ok]
    print(f"{len(check.rows)} rows, {len(failed)} failed or not run" + ("" if args.out is None else f"; {args.out}"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
