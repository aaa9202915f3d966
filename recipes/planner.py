"""What a context takes on a device before anything is run: memory, operations, time floors, what to change first."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig

from recipes import preflight
from recipes.load import RecipeError
from recipes.tuning import ActivationCheckpointing
from rope_ext.costs import (
    BYTES,
    ModelShape,
    activation_bytes,
    decode_operations,
    kv_cache_bytes,
    logits_bytes,
    prefill_operations,
    shape_of,
)
from rope_ext.inspection import in_bytes

RECOMPUTED: dict[Literal["nothing", "products"], str] = {
    "nothing": "activations, all layers recomputed (a third more operations)",
    "products": "activations, products kept and the rest recomputed",
}
ROWS = 512
"""Rows of logits that a chunked loss holds at a time, as `train.loss_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device by its data sheet.

    Attributes:
        memory: bytes.
        bandwidth: of its memory, bytes a second.
        peak: operations a second by dtype, dense.
    """

    name: str
    memory: float
    bandwidth: float
    peak: Mapping[str, float]


DEVICES = {
    # NVIDIA's data sheets, SXM, dense: tensor cores, fp32 as TF32 is not taken for fp32
    "a100": Device(name="a100", memory=80e9, bandwidth=2.039e12, peak={"fp32": 19.5e12, "bf16": 312e12}),
    "h100": Device(name="h100", memory=80e9, bandwidth=3.35e12, peak={"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}),
    "h200": Device(name="h200", memory=141e9, bandwidth=4.8e12, peak={"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Costs of a context; bytes and operations are of the whole batch, `decode` of one token for each sequence.

    Attributes:
        memory: bytes by what they are of, largest first; what must be there at once.
        instead: bytes that other choices would take, by the choice.
        seconds: floors by part, from the device's peak and its memory's bandwidth; nothing is that fast.
        advice: what to change first where it does not fit, each with what it saves.
    """

    model: str
    context: int
    batch: int
    dtype: str
    cache_dtype: str
    training: bool
    shape: ModelShape
    device: Device | None
    memory: dict[str, float]
    instead: dict[str, float]
    operations: dict[str, float]
    attention_share: dict[str, float]
    seconds: dict[str, float]
    advice: tuple[str, ...]

    @property
    def total(self) -> float:
        """Bytes that must be there at once."""
        return math.fsum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """Whether the device has them; None without a device."""
        return None if self.device is None else self.total <= self.device.memory

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.model,
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "cache_dtype": self.cache_dtype,
            "training": self.training,
            "parameters": self.shape.parameters,
            "num_key_value_heads": self.shape.num_key_value_heads,
            "device": None if self.device is None else self.device.name,
            "device_memory": None if self.device is None else self.device.memory,
            "memory": self.memory,
            "total": self.total,
            "fits": self.fits,
            "instead": self.instead,
            "operations": self.operations,
            "attention_share": self.attention_share,
            "seconds_at_least": self.seconds,
            "advice": list(self.advice),
        }

    def lines(self) -> list[str]:
        """Return the plan to read."""
        shape = self.shape
        what = "training on rows of" if self.training else "reading and writing"
        head = (
            f"{self.model}: {what} {self.context:,} tokens, batch {self.batch}, {self.dtype}; "
            f"{shape.parameters / 1e9:.3g} B parameters, {shape.num_layers} layers, {shape.num_heads} heads, "
            f"{shape.num_key_value_heads} for keys and values"
        )
        found = [
            head,
            "memory:",
            *(f"  {in_bytes(size):>10}  {name}" for name, size in self.memory.items()),
            f"  {in_bytes(self.total):>10}  in all" + self._against(),
        ]
        if self.instead:
            found += ["instead:", *(f"  {in_bytes(size):>10}  {name}" for name, size in self.instead.items())]
        found.append("operations:")
        for name, operations in self.operations.items():
            share = 100 * self.attention_share[name]
            floor = f", at least {_seconds(self.seconds[name])}" if name in self.seconds else ""
            found.append(f"  {operations:10.3g}  {name}, {share:.0f} % of it attention{floor}")
        if self.device is not None:
            found.append(
                f"floors at {self.device.name}'s data sheet ({self.device.peak[self.dtype] / 1e12:.0f} TFLOP/s, "
                f"{self.device.bandwidth / 1e12:.3g} TB/s); nothing reaches them"
            )
        return [*found, *(["change first:"] if self.advice else []), *(f"  {line}" for line in self.advice)]

    def _against(self) -> str:
        if self.device is None:
            return ""
        size = in_bytes(self.device.memory)
        return f" of {size}: {'fits' if self.fits else 'does not fit'}"


def plan(
    model: str,
    config: PretrainedConfig,
    *,
    context: int,
    batch: int = 1,
    dtype: str = "bf16",
    cache_dtype: str | None = None,
    device: Device | None = None,
    training: bool = False,
) -> Plan:
    """Return what a context takes.

    Raises:
        RecipeError: a size that is none, or a dtype that the device does not compute in.
    """
    if context < 1 or batch < 1:
        raise RecipeError(f"plan: context {context} and batch {batch}: give whole numbers of at least 1")
    cache_dtype = cache_dtype or dtype
    for name, value in (("dtype", dtype), ("cache-dtype", cache_dtype)):
        if value not in BYTES:
            raise RecipeError(f"plan: {name} {value!r} is not known; give one of {', '.join(BYTES)}")
    if training and dtype == "fp8":
        raise RecipeError("plan: dtype 'fp8' is not planned for training; give bf16 or fp32")
    if device is not None and dtype not in device.peak:
        raise RecipeError(f"plan: {device.name} states no peak for {dtype}; it has {', '.join(device.peak)}")
    shape = shape_of(config)
    known: dict[str, Any] = {
        "model": model,
        "context": context,
        "batch": batch,
        "dtype": dtype,
        "cache_dtype": cache_dtype,
    }
    found = _training(shape, config, known) if training else _inference(shape, known)
    memory = dict(sorted(found["memory"].items(), key=lambda item: -item[1]))
    made = Plan(
        model=model,
        context=context,
        batch=batch,
        dtype=dtype,
        cache_dtype=cache_dtype,
        training=training,
        shape=shape,
        device=device,
        memory=memory,
        instead=found["instead"],
        operations=found["operations"],
        attention_share=found["attention_share"],
        seconds={},
        advice=(),
    )
    made = replace(made, seconds=_floors(made))
    return replace(made, advice=tuple(_advice(made))) if made.fits is False else made


def _inference(shape: ModelShape, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory and operations of a prefill of the whole context, and of the token behind it."""
    context, batch, size = known["context"], known["batch"], BYTES[known["dtype"]]
    prefill, decode = prefill_operations(shape, context), decode_operations(shape, context)
    cache = _cache(shape, known)
    return {
        "memory": {
            "weights": float(shape.parameters * size),
            f"keys and values of {batch} x {context:,} tokens in {known['cache_dtype']}": float(cache),
            "activations of the prefill": float(activation_bytes(shape, batch * context, bytes_per_number=size)),
            "logits of the last token": float(logits_bytes(shape, batch)),
        },
        "instead": {
            "logits of every token": float(logits_bytes(shape, batch * context)),
            f"activations of a prefill {CHUNK:,} tokens at a time": float(
                activation_bytes(shape, batch * min(CHUNK, context), bytes_per_number=size)
            ),
            **_other_heads(shape, known),
        },
        "operations": {"prefill": batch * prefill.total, "one token behind it": batch * decode.total},
        "attention_share": {
            "prefill": prefill.attention / prefill.total,
            "one token behind it": decode.attention / decode.total,
        },
    }


CHUNK = 2048
"""Tokens of a chunked prefill."""


def _cache(shape: ModelShape, known: Mapping[str, Any], heads: int | None = None) -> int:
    return known["batch"] * kv_cache_bytes(
        num_layers=shape.num_layers,
        num_key_value_heads=heads or shape.num_key_value_heads,
        head_dim=shape.head_dim,
        tokens=known["context"],
        bytes_per_number=BYTES[known["cache_dtype"]],
    )


def _other_heads(shape: ModelShape, known: Mapping[str, Any]) -> dict[str, float]:
    fewer = [n for n in shape.key_value_heads() if n < shape.num_key_value_heads]
    return {f"keys and values with {n} key head{'s' * (n > 1)}": float(_cache(shape, known, n)) for n in fewer[:2]}


def _training(shape: ModelShape, config: PretrainedConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory and operations of a step on one row a sequence, weights in fp32 with AdamW.

    In bf16 the products run over copies of the weights, as autocast makes them.
    """
    tokens, parameters, narrow = known["batch"] * known["context"], shape.parameters, known["dtype"] == "bf16"
    precision = "bf16" if narrow else "fp32"
    forward = prefill_operations(shape, known["context"])
    # every token is predicted
    products = forward.products + 2.0 * shape.head * (known["context"] - 1)
    total, plain = products + forward.attention, preflight.activation_bytes(config, None, tokens, precision)
    recomputed = {
        words: float(preflight.activation_bytes(config, ActivationCheckpointing(keep=keep), tokens, precision))
        for keep, words in RECOMPUTED.items()
    }
    memory = {
        "weights in fp32" + (", and copies in bf16" if narrow else ""): float(parameters * (6 if narrow else 4)),
        "gradients in fp32": float(4 * parameters),
        "AdamW's moments in fp32": float(8 * parameters),
        "activations, none recomputed": float(plain),
        f"the loss, {ROWS} rows of logits at a time": float(preflight.logits_bytes(config, ROWS, tokens)),
    }
    return {
        "memory": memory,
        "instead": recomputed | {"the loss over all logits at once": float(3 * logits_bytes(shape, tokens))},
        "operations": {"one step": 3 * known["batch"] * total},
        "attention_share": {"one step": forward.attention / total},
    }


def _floors(made: Plan) -> dict[str, float]:
    """Return the seconds below which no kernel comes: operations at the peak, or what is read at the bandwidth."""
    device = made.device
    if device is None:
        return {}
    found = {name: operations / device.peak[made.dtype] for name, operations in made.operations.items()}
    if not made.training:
        read = made.memory["weights"] + next(size for name, size in made.memory.items() if name.startswith("keys"))
        found["one token behind it"] = max(found["one token behind it"], read / device.bandwidth)
    return found


def _advice(made: Plan) -> list[str]:
    """Return what would bring the total down, the largest saving first."""
    assert made.device is not None
    savings: list[tuple[float, str]] = []

    def consider(name: str, instead: str, words: str) -> None:
        now = next((size for key, size in made.memory.items() if key.startswith(name)), 0.0)
        then = next((size for key, size in made.instead.items() if key.startswith(instead)), now)
        if then < now:
            savings.append((now - then, words))

    if made.training:
        consider("activations", "activations, all layers", "recompute all layers (activation_checkpointing: {})")
        consider(
            "activations", "activations, products", "keep products alone (activation_checkpointing: {keep: products})"
        )
        states = math.fsum(size for key, size in made.memory.items() if not key.startswith(("activations", "the loss")))
        savings.append((states * 7 / 8, "shard weights, gradients and moments over 8 devices (parallel: {fsdp: 8})"))
        savings.append((12.0 * made.shape.parameters, "train an adapter (adapter: {}), whose moments are small"))
    else:
        consider("activations", "activations", f"prefill {CHUNK:,} tokens at a time")
        cache = next(size for key, size in made.memory.items() if key.startswith("keys"))
        if BYTES[made.cache_dtype] > 1:
            narrower = {"fp32": "bf16", "bf16": "fp8"}[made.cache_dtype]
            savings.append((cache / 2, f"halve the cache's numbers (--cache-dtype {narrower})"))
        if made.shape.num_key_value_heads > 1:
            fewer = next(n for n in made.shape.key_value_heads() if n < made.shape.num_key_value_heads)
            left = 1 - fewer / made.shape.num_key_value_heads
            savings.append(
                (cache * left, f"group key heads, {made.shape.num_key_value_heads} to {fewer}, and train briefly")
            )
        if made.batch > 1:
            savings.append((cache * (1 - 1 / made.batch), f"serve one sequence at a time, not {made.batch}"))
    over = made.total - made.device.memory
    ordered = sorted(savings, key=lambda each: -each[0])
    return [f"{words}: {in_bytes(saved)} less{', enough' if saved >= over else ''}" for saved, words in ordered]


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def read_device(name: str) -> Device:
    """Return a device by its name, or from a JSON file of one's own.

    Raises:
        RecipeError: neither.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if not path.is_file():
        raise RecipeError(
            f"gpu: {name!r} is neither one of {', '.join(DEVICES)} nor a file; write one, as "
            '{"name": "mine", "memory_gb": 24, "bandwidth_gb_s": 1000, "tflops": {"bf16": 80}}'
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        peak = {str(key): float(value) * 1e12 for key, value in told["tflops"].items()}
        numbers = (float(told["memory_gb"]) * 1e9, float(told["bandwidth_gb_s"]) * 1e9)
        if not peak or not all(math.isfinite(each) and each > 0 for each in (*peak.values(), *numbers)):
            raise ValueError("sizes must be numbers above 0")  # noqa: TRY301  (one message for all)
        return Device(name=str(told.get("name", path.stem)), memory=numbers[0], bandwidth=numbers[1], peak=peak)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"gpu: {path} is no device ({error}); it needs memory_gb, bandwidth_gb_s and tflops by dtype"
        ) from error
