"""What a context takes on a device before anything is run: memory, operations, time floors, what to change first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

from transformers import PretrainedConfig

from recipes import preflight
from recipes.devices import ALIASES, Device
from recipes.load import RecipeError
from recipes.tuning import ActivationCheckpointing, Adapter
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

Kept = Literal["nothing", "products"]
RECOMPUTED: dict[Kept, str] = {
    "nothing": "activations, all layers recomputed (a third more operations)",
    "products": "activations, products kept and the rest recomputed",
}
ROWS = 512
"""Rows of logits that a chunked loss holds at a time, as `train.loss_rows`."""
CHUNK = 2048
"""Tokens of a chunked prefill."""
MOST = 2**40
"""Tokens and sequences beyond which nothing is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is asked for, and what advice may change of it.

    Attributes:
        chunk: tokens of a sequence that a prefill takes at a time; None takes all.
        heads: key heads; None is the model's own number.
        keep: what recomputed layers keep in training; None recomputes nothing.
        devices: over which weights, gradients and moments are sharded in training.
        adapter: whether LoRA with its defaults is trained and not the whole model.
    """

    context: int
    batch: int
    dtype: str
    cache_dtype: str
    training: bool
    chunk: int | None = None
    heads: int | None = None
    keep: Kept | None = None
    devices: int = 1
    adapter: bool = False


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
        if self.training:
            found.append("a row is one document; rows of several need masks besides, see rope-ext finetune --dry-run")
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
        ModelError: the model is none whose costs are known, see `shape_of`.
    """
    if not (1 <= context <= MOST and 1 <= batch <= MOST):
        raise RecipeError(f"plan: context {context} and batch {batch}: give whole numbers of at least 1, at most 2^40")
    if training and cache_dtype is not None:
        raise RecipeError("plan: training keeps no cache; leave --cache-dtype out")
    dtype = ALIASES.get(dtype, dtype)
    cache_dtype = dtype if cache_dtype is None else ALIASES.get(cache_dtype, cache_dtype)
    for name, value in (("dtype", dtype), ("cache-dtype", cache_dtype)):
        if value not in BYTES:
            raise RecipeError(f"plan: {name} {value!r} is not known; give one of {', '.join([*BYTES, *ALIASES])}")
    if training and dtype == "fp8":
        raise RecipeError("plan: dtype 'fp8' is not planned for training; give bf16 or fp32")
    if device is not None and dtype not in device.peak:
        raise RecipeError(f"plan: {device.name} states no peak for {dtype}; it has {', '.join(device.peak)}")
    shape = shape_of(config)
    choice = Choice(context=context, batch=batch, dtype=dtype, cache_dtype=cache_dtype, training=training)
    memory = _memory(shape, config, choice)
    made = Plan(
        model=model,
        context=context,
        batch=batch,
        dtype=dtype,
        cache_dtype=cache_dtype,
        training=training,
        shape=shape,
        device=device,
        memory=dict(sorted(memory.items(), key=lambda item: -item[1])),
        instead=_instead(shape, config, choice),
        **_work(shape, choice),
        seconds={},
        advice=(),
    )
    made = replace(made, seconds=_floors(made, choice))
    return replace(made, advice=tuple(_advice(made, config, choice))) if made.fits is False else made


def _memory(shape: ModelShape, config: PretrainedConfig, choice: Choice) -> dict[str, float]:
    """Return the bytes that must be there at once, by what they are of."""
    if choice.training:
        return _training_memory(shape, config, choice)
    size, at_once = BYTES[choice.dtype], min(choice.chunk or choice.context, choice.context)
    fewer = shape.num_key_value_heads - (choice.heads or shape.num_key_value_heads)
    projections = 2 * shape.num_layers * shape.hidden_size * shape.head_dim * fewer
    # In 8 bits weights and products are kept, while the residual stream stays in 16
    activations = activation_bytes(shape, choice.batch * at_once, bytes_per_number=max(2, size))
    return {
        "weights": float((shape.parameters - projections) * size),
        f"keys and values of {choice.batch} x {choice.context:,} tokens in {choice.cache_dtype}": _cache(shape, choice),
        "activations of the prefill": float(activations),
        "logits of the last token": float(logits_bytes(shape, choice.batch)),
    }


def _training_memory(shape: ModelShape, config: PretrainedConfig, choice: Choice) -> dict[str, float]:
    """Return the bytes of a step on one row a sequence, weights in fp32 with AdamW.

    In bf16 the products run over copies of the weights, as autocast makes them. An adapter trains norms and embeddings
    whole, of which peft makes copies.
    """
    tokens, narrow = choice.batch * choice.context, choice.dtype == "bf16"
    precision = "bf16" if narrow else "fp32"
    trained, weights = shape.parameters, shape.parameters
    if choice.adapter:
        trained, copied = _adapter_parameters(shape)
        weights += copied
    asked = None if choice.keep is None else ActivationCheckpointing(keep=choice.keep)
    words = "activations, none recomputed" if choice.keep is None else RECOMPUTED[choice.keep]
    shards = choice.devices
    return {
        "weights in fp32" + (", and copies in bf16" if narrow else ""): weights * (6 if narrow else 4) / shards,
        "gradients in fp32": 4.0 * trained / shards,
        "AdamW's moments in fp32": 8.0 * trained / shards,
        words: float(preflight.activation_bytes(config, asked, tokens, precision)),
        f"the loss, {ROWS} rows of logits at a time": float(preflight.logits_bytes(config, ROWS, tokens)),
    }


def _adapter_parameters(shape: ModelShape) -> tuple[int, int]:
    """Return how many numbers LoRA's defaults train, and how many of them are copies of the model's own."""
    width, rank = shape.hidden_size, Adapter().rank
    queries, keys = shape.num_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    low_rank = rank * shape.num_layers * (2 * (width + queries) + 2 * (width + keys))
    copied = shape.vocab_size * width + (2 * shape.num_layers + 1) * width
    return low_rank + copied, low_rank + copied


def _instead(shape: ModelShape, config: PretrainedConfig, choice: Choice) -> dict[str, float]:
    """Return the bytes that other ways to do the same would take."""
    tokens = choice.batch * choice.context
    if choice.training:
        found: dict[str, float] = {}
        for keep, words in RECOMPUTED.items():
            found[words] = _training_memory(shape, config, replace(choice, keep=keep))[words]
        return found | {"the loss over all logits at once": float(3 * logits_bytes(shape, tokens))}
    chunked = _memory(shape, config, replace(choice, chunk=CHUNK))["activations of the prefill"]
    return {
        "logits of every token": float(logits_bytes(shape, tokens)),
        f"activations of a prefill {CHUNK:,} tokens at a time": chunked,
        **{
            f"keys and values with {n} key head{'s' * (n > 1)}": _cache(shape, replace(choice, heads=n))
            for n in shape.fewer_heads()[:2]
        },
    }


def _cache(shape: ModelShape, choice: Choice) -> float:
    return float(choice.batch) * kv_cache_bytes(
        num_layers=shape.num_layers,
        num_key_value_heads=choice.heads or shape.num_key_value_heads,
        head_dim=shape.head_dim,
        tokens=choice.context,
        bytes_per_number=BYTES[choice.cache_dtype],
        windows=shape.windows,
    )


def _work(shape: ModelShape, choice: Choice) -> dict[str, dict[str, float]]:
    """Return operations, and attention's share of them: of a step; or of a prefill, and of the token behind it."""
    forward = prefill_operations(shape, choice.context)
    if choice.training:
        # Every token is predicted; the backward pass makes two products for each
        total = forward.total + 2.0 * shape.head * (choice.context - 1)
        step = {"one step": (3 * choice.batch * total, forward.attention / total)}
    else:
        decode = decode_operations(shape, choice.context)
        step = {
            name: (choice.batch * each.total, each.attention / each.total)
            for name, each in (("prefill", forward), ("one token behind it", decode))
        }
    return {
        "operations": {name: operations for name, (operations, _) in step.items()},
        "attention_share": {name: share for name, (_, share) in step.items()},
    }


def _floors(made: Plan, choice: Choice) -> dict[str, float]:
    """Return the seconds below which no kernel comes: operations at the peak, or what is read at the bandwidth."""
    device = made.device
    if device is None:
        return {}
    found = {name: operations / device.peak[made.dtype] for name, operations in made.operations.items()}
    if not made.training:
        weights = float(made.shape.parameters - made.shape.looked_up) * BYTES[made.dtype]
        read = weights + _cache(made.shape, choice)
        found["one token behind it"] = max(found["one token behind it"], read / device.bandwidth)
    return found


class Change(NamedTuple):
    """Something to change, in words and as fields of a choice; two that set one field do not go together."""

    words: str
    fields: dict[str, Any]


def _changes(made: Plan) -> list[Change]:
    """Return what could be changed, the mildest first."""
    shape, device = made.shape, made.device
    assert device is not None
    if made.training:
        found = [
            Change("keep products alone (train: {activation_checkpointing: {keep: products}})", {"keep": "products"}),
            Change("recompute all layers (train: {activation_checkpointing: {}})", {"keep": "nothing"}),
        ]
        if made.batch > 1:
            rows = "one row at a time, the others accumulated (train: {rows_per_device: 1})"
            found.append(Change(rows, {"batch": 1}))
        sharded = "shard weights, gradients and moments over 8 devices (train: {parallel: {fsdp: 8}})"
        adapter = "train an adapter, norms and embeddings (train: {adapter: {}})"
        return [*found, Change(sharded, {"devices": 8}), Change(adapter, {"adapter": True, "devices": 1})]
    found = [Change(f"prefill {CHUNK:,} tokens at a time", {"chunk": CHUNK})]
    narrower = {"fp32": "bf16", "bf16": "fp8"}
    if made.cache_dtype in narrower:
        cache = narrower[made.cache_dtype]
        found.append(Change(f"halve the cache's numbers (--cache-dtype {cache})", {"cache_dtype": cache}))
    if made.dtype in narrower and narrower[made.dtype] in device.peak:
        dtype = narrower[made.dtype]
        found.append(Change(f"weights in {dtype} (--dtype {dtype})", {"dtype": dtype}))
    if shape.fewer_heads():
        heads = shape.fewer_heads()[0]
        words = f"group key heads, {shape.num_key_value_heads} to {heads}, and train briefly (rope-ext gqa)"
        found.append(Change(words, {"heads": heads}))
    if made.batch > 1:
        found.append(Change(f"one sequence at a time, not {made.batch} (--batch 1)", {"batch": 1}))
    return found


def _advice(made: Plan, config: PretrainedConfig, choice: Choice) -> list[str]:
    """Return what would bring the total down, the largest saving first, each by a plan of its own.

    Where none is enough by itself, the fewest that are enough together, the mildest of those; or that nothing is.
    """
    assert made.device is not None
    has = made.device.memory

    def total(*changes: Change) -> float:
        fields = {key: value for change in changes for key, value in change.fields.items()}
        return math.fsum(_memory(made.shape, config, replace(choice, **fields)).values())

    mildest = [change for change in _changes(made) if total(change) < made.total]
    alone = sorted((total(change), change.words) for change in mildest)
    lines = [f"{words}: {in_bytes(made.total - size)} less{', enough' if size <= has else ''}" for size, words in alone]
    if alone and alone[0][0] <= has:
        return lines
    sets = [some for n in range(2, len(mildest) + 1) for some in combinations(mildest, n) if _go_together(some)]
    for some in sets:
        left = total(*some)
        if left <= has:
            return [*lines, f"enough together, {in_bytes(left)}: {'; '.join(change.words for change in some)}"]
    least = min((total(*some) for some in sets), default=alone[0][0] if alone else made.total)
    return [*lines, f"nothing here is enough ({in_bytes(least)} at least): it takes a smaller model or more devices"]


def _go_together(changes: Sequence[Change]) -> bool:
    fields = [field for change in changes for field in change.fields]
    return len(fields) == len(set(fields))


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
