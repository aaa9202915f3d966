"""What a fine-tune would take, without a step of it: `rope-ext finetune --dry-run`."""

import os
import time
from dataclasses import asdict, dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from recipes.all_work import total_cost
from recipes.packing import Plan
from recipes.setting import forward_cost
from recipes.train import accumulation
from recipes.tuning import ActivationCheckpointing, Train
from recipes.tuning_setting import FinetuneSetting, computed_in
from rope_ext.hf import size_of_head
from rope_ext.inspection import in_bytes

HELD = ("weights", "gradients", "optimizer", "activations", "masks", "logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A fine-tune before it is run; bytes are of one process.

    Attributes:
        trained, parameters: numbers that are trained, of all.
        weights, gradients, optimizer, activations, masks, logits: bytes that a step holds at once; masks are those of
            rows with several documents.
        evaluation: bytes that measuring holds: the whole model, and its memory budget.
        memory: that the device has.
        step_operations, operations: of a step, and of all steps and evaluations, over all processes.
        peak: operations a second that a matrix product reached here, now.
        seconds: for all operations at that peak on every process: less than it will take.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    masks: int
    logits: int
    evaluation: int
    memory: int
    rows: int
    row_tokens: int
    tokens: int
    accumulation: int
    processes: int
    step_operations: float
    operations: float
    peak: float
    seconds: float
    tokens_by_length: dict[int, int]
    epochs: dict[str, float]

    @property
    def total_bytes(self) -> int:
        """What a step holds at once."""
        return sum(getattr(self, name) for name in HELD)

    @property
    def fits(self) -> bool:
        """Whether that, and what measuring holds, is less than the device has."""
        return max(self.total_bytes, self.evaluation) < self.memory

    def as_dict(self) -> dict[str, object]:
        """Return the same for JSON."""
        return {**asdict(self), "total_bytes": self.total_bytes, "fits": self.fits}

    def lines(self) -> list[str]:
        """Return the same for a person."""
        parts = {name: getattr(self, name) for name in HELD if getattr(self, name)}
        said = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())
        held = f"{in_bytes(self.total_bytes)} ({said}), of measuring {in_bytes(self.evaluation)}"
        verdict = "fits into" if self.fits else "DOES NOT FIT into"
        share = self.trained / self.parameters
        lengths = ", ".join(f"{tokens:,} in pieces of up to {n:,}" for n, tokens in self.tokens_by_length.items())
        passes = ", ".join(f"{name} {times:.2f}" for name, times in self.epochs.items())
        rows = f"{self.rows:,} rows of {self.row_tokens:,} tokens, {self.tokens:,} in all"
        work = f"{self.step_operations:.3g} floating-point operations a step, {self.operations:.3g} with evaluations"
        speed = f"{in_words(self.seconds)} at the {self.peak / 1e9:.0f} GFLOP/s that a matrix product reaches here"
        return [
            f"{rows}; {self.accumulation} forwards a step on each of {self.processes} processes",
            f"tokens: {lengths}",
            f"times that a source is passed: {passes}",
            f"trained: {self.trained:,} of {self.parameters:,} numbers ({100 * share:.3g} %)",
            f"memory of a step: about {held}; it {verdict} {in_bytes(self.memory)}",
            f"{work}; at least {speed}",
        ]


def preflight(setting: FinetuneSetting) -> Preflight:
    """Return what a fine-tune would take."""
    recipe, model, train = setting.recipe, setting.evaluation.model, setting.recipe.train
    parallel, world = train.parallel, setting.ranks.world
    row_tokens = setting.plan.shape.row_tokens
    parameters = sum(p.numel() for p in model.parameters())
    trained = _num_trained(model, train, parameters)
    precision = computed_in(setting)
    itemsize = 2 if precision == "pure-bf16" else 4
    tokens = train.rows_per_device * row_tokens // max(parallel.context, parallel.ulysses)
    # Forward, gradients of activations, gradients of what is trained
    per_step = (2 + trained / parameters + _recompute(train)) * train.rows_per_step * _row_cost(model, row_tokens)
    evaluated = total_cost(setting.evaluation).operations / len(setting.evaluation.methods)
    operations = per_step * train.steps + evaluated * (len(setting.evaluation.methods) + 1 + len(recipe.eval.at))
    peak = matmul_peak(model.device, torch.float32 if precision == "fp32" else torch.bfloat16)
    # On the device: what is offloaded is not
    shards = parallel.fsdp if parallel.context == parallel.ulysses == 1 else world
    here = 0.0 if parallel.cpu_offload else 1.0 / shards
    copies = 2 * parameters if precision == "bf16" else 0
    return Preflight(
        parameters=parameters,
        trained=trained,
        weights=int(parameters * itemsize * here + copies / shards),
        gradients=int(trained * itemsize * here),
        optimizer=int(2 * trained * itemsize * here),
        activations=activation_bytes(model.config, train.activation_checkpointing, tokens, precision),
        masks=mask_bytes(model, train, row_tokens, precision) if is_packed(setting.plan) else 0,
        logits=logits_bytes(model.config, train.loss_rows, tokens),
        evaluation=parameters * itemsize + setting.evaluation.recipe.memory_budget,
        memory=memory_of(model.device),
        rows=len(setting.plan.rows),
        row_tokens=row_tokens,
        tokens=len(setting.plan.rows) * row_tokens,
        accumulation=accumulation(train, setting.ranks.world),
        processes=setting.ranks.world,
        step_operations=per_step,
        operations=operations,
        peak=peak,
        seconds=operations / peak / setting.ranks.world,
        tokens_by_length=setting.plan.lengths(),
        epochs={
            f"{pool.documents.name} ({len(pool.numbers)} documents)": times
            for pool, times in zip(setting.plan.pools, setting.plan.epochs, strict=True)
        },
    )


def _num_trained(model: PreTrainedModel, train: Train, parameters: int) -> int:
    adapter = train.adapter
    if adapter is None:
        return parameters
    found = 0
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and last in adapter.targets:
            found += adapter.rank * sum(weight.shape)
        elif isinstance(weight, torch.Tensor) and last in adapter.also_train:
            found += weight.numel()
    return found


def _row_cost(model: PreTrainedModel, row_tokens: int) -> float:
    """Return the operations of a forward over one row, the output head included."""
    config = model.config
    head = 2.0 * config.vocab_size * config.hidden_size * row_tokens
    embeddings = 2.0 * config.vocab_size * config.hidden_size * row_tokens  # counted among the weights, but only read
    return forward_cost(model, row_tokens) + head - embeddings


def _recompute(train: Train) -> float:
    """Return how much of a forward is computed again in the backward pass."""
    checkpointing = train.activation_checkpointing
    return 0.0 if checkpointing is None or checkpointing.keep == "products" else 1 / checkpointing.every_n_layers


def activation_bytes(
    config: PretrainedConfig, checkpointing: ActivationCheckpointing | None, tokens: int, precision: str
) -> int:
    """Return the bytes of activations that are held for the backward pass, for so many tokens at once.

    A layer keeps, in widths: the residual stream, what a norm makes and its product with the weight (twice); queries,
    keys, values, attention's output and its copy; gate, its activation, the other half, their product. Where they are
    recomputed: the layer's input, the results of its products if those are kept, and of one layer at a time the rest.
    """
    width, layers, wide = int(config.hidden_size), int(config.num_hidden_layers), int(config.intermediate_size)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    q_width, kv_width = heads * size_of_head(config), kv_heads * size_of_head(config)
    narrow, stream = (4, 4) if precision == "fp32" else (2, 2) if precision == "pure-bf16" else (2, 4)
    inner = stream * 6 * width + narrow * (4 * q_width + 3 * kv_width + 4 * wide)
    products = narrow * (2 * width + 2 * q_width + 2 * kv_width + 2 * wide)
    if checkpointing is None:
        return tokens * (layers * inner + inner)
    recomputed = layers // checkpointing.every_n_layers
    each = (0 if checkpointing.offload else stream * width) + (products if checkpointing.keep == "products" else 0)
    return tokens * ((layers - recomputed) * inner + recomputed * each + inner)


def is_packed(plan: Plan) -> bool:
    """Return whether any row holds several documents, or padding: transformers then makes a mask of row by row."""
    return any(len(row) > 1 or sum(p.size for p in row) < plan.shape.row_tokens for row in plan.rows)


def mask_bytes(model: PreTrainedModel, train: Train, row_tokens: int, precision: str) -> int:
    """Return the bytes of the attention masks of one forward over packed rows: one of booleans, and a bias a layer.

    The bias is kept in every layer that is not recomputed; making the mask takes three bytes an entry for a moment.
    """
    checkpointing, layers = train.activation_checkpointing, int(model.config.num_hidden_layers)
    kept = layers
    if checkpointing is not None and checkpointing.keep == "nothing":
        kept = layers - layers // checkpointing.every_n_layers + 1
    entries = train.rows_per_device * row_tokens**2
    return entries * max(3, 1 + kept * (4 if precision == "fp32" else 2))


def logits_bytes(config: PretrainedConfig, loss_rows: int, tokens: int) -> int:
    """Return the bytes of the loss: logits and their logarithms for some rows, and the head's gradient in fp32."""
    vocabulary, width = int(config.vocab_size), int(config.hidden_size)
    return 4 * (2 * min(loss_rows, tokens) * vocabulary + vocabulary * width + tokens * width)


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a device, in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second that a square matrix product reaches here, the best of three."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device, dtype=dtype if device.type == "cuda" else torch.float32)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        _ = a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - started))
    return best


def in_words(seconds: float) -> str:
    """Return a time in the unit that fits it."""
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
