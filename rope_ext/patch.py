"""Put a method into a live model, prove that it is in use, and take it out again."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from rope_ext.attention import bias_in, is_in_use, put_bias
from rope_ext.errors import MethodError, ModelError, PatchError
from rope_ext.geometry import RopeGeometry
from rope_ext.hf import (
    RotarySite,
    ScaledBase,
    check_attention_reach,
    find_rotary_site,
    read_geometry,
    resolve_context,
)
from rope_ext.lengths import LengthFollowing
from rope_ext.plan import (
    FrequencyKey,
    Method,
    PositionPlan,
    RopeParameters,
    hyperparameters,
)
from rope_ext.stock import IN_STEP, parameters_in_step
from rope_ext.tables import ExtendedRotaryEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What is in effect on a patched model; every row carries its `digest`.

    `weights` is a sample: 64 values spread over every parameter, enough to tell checkpoints apart.
    """

    method: str
    hyperparameters: dict[str, object]
    context: int
    original_context: int
    inv_freq: str
    attention_scale: float
    alibi_slopes: str | None
    dtype: str
    attention: str
    model: str
    revision: str | None
    weights: str

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain JSON values."""
        return asdict(self)


class Patch:
    """A method in effect on a model; also a context manager that undoes it.

    Attributes:
        model: the patched model.
        method: the method in effect.
        geometry: what the checkpoint was trained with.
        context: the window now claimed, tokens.
        plan: the frequencies and the scale in use; for a method that follows the current length, at `context` tokens.
    """

    def __init__(
        self, model: PreTrainedModel, method: Method, site: RotarySite, table: ExtendedRotaryEmbedding
    ) -> None:
        self.model = model
        self.method = method
        self.geometry: RopeGeometry = table.geometry
        self.context: int = table.context
        self.plan: PositionPlan = table.plan
        self._site = site
        self._table = table
        self._before = getattr(site.parent, site.attribute)
        self._config_before = {name: getattr(model.config, name) for name in IN_STEP if hasattr(model.config, name)}
        self._active = False
        self._following: LengthFollowing | None = None
        self._remove_bias: Callable[[], None] | None = None
        table.patch = self

    @property
    def factor(self) -> float:
        """The stretch, context / original_context."""
        return self.context / self.geometry.original_context

    @property
    def config_of_base(self) -> dict[str, object]:
        """What the configuration said of positions before this patch, and those below it, were laid on."""
        below = self._before.patch if isinstance(self._before, ExtendedRotaryEmbedding) else None
        return dict(self._config_before) if below is None else cast("Patch", below).config_of_base

    def frequency_key(self, seq_len: int) -> FrequencyKey:
        """Return what the frequencies at `seq_len` depend on; equal keys may share one forward."""
        return self._table.frequency_key(seq_len)

    @property
    def fingerprint(self) -> Fingerprint:
        """What is in effect, hashed: method, frequencies, dtype, attention implementation, weights."""
        if any(p.is_meta for p in self.model.parameters()):
            raise PatchError("fingerprint: the weights are on the meta device, so there is nothing to tell them by")
        config = self.model.config
        slopes = self.plan.alibi_slopes
        return Fingerprint(
            method=self.method.name,
            hyperparameters=dict(hyperparameters(self.method)),
            context=self.context,
            original_context=self.geometry.original_context,
            inv_freq=_hash(self.plan.inv_freq),
            attention_scale=self.plan.attention_scale,
            alibi_slopes=None if slopes is None else _hash(slopes),
            dtype=str(self.model.dtype).removeprefix("torch."),
            attention=str(config._attn_implementation),  # noqa: SLF001  (transformers has no public name for it)
            model=str(config.name_or_path),
            revision=cast("str | None", getattr(config, "_commit_hash", None)),
            weights=_hash(*(p.detach().flatten()[:: max(1, p.numel() // 64)] for p in self.model.parameters())),
        )

    def _apply(self, parameters: RopeParameters) -> None:
        self._active = True
        setattr(self._site.parent, self._site.attribute, self._table)
        config = self.model.config
        config.rope_parameters = parameters
        config.max_position_embeddings = self.context
        stated = parameters.get("original_max_position_embeddings")
        if "original_max_position_embeddings" in self._config_before and stated is not None:
            config.original_max_position_embeddings = stated
        if not self._table.is_static:
            self._following = LengthFollowing(self.model, self._site.parent, self._table)
        if self.plan.alibi_slopes is not None or bias_in(self._site.parent) is not None:
            self._remove_bias = put_bias(self._site.parent, self.plan.alibi_slopes)

    def undo(self) -> None:
        """Put the model's own rotary module and configuration back; a second call does nothing.

        Raises:
            PatchError: another patch was laid over this one and is still in effect.
        """
        if not self._active:
            return
        if getattr(self._site.parent, self._site.attribute) is not self._table:
            raise PatchError(f"undo: {self.method.name} lies under a later patch; undo that one first")
        # The module may have been moved meanwhile, and its replacement sat aside: follow the model's device.
        setattr(self._site.parent, self._site.attribute, self._before.to(self._table.inv_freq.device))
        for name, value in self._config_before.items():
            setattr(self.model.config, name, value)
        if self._following is not None:
            self._following.undo()
        if self._remove_bias is not None:
            self._remove_bias()
        self._active = False

    def verify(self) -> None:
        """Prove by running two tokens, one at position 0 and one at the end of the window, that the patch is in use.

        Raises:
            PatchError: the module was not called, returned other angles than the plan's, or the logits do not feel it.
        """
        if getattr(self._site.parent, self._site.attribute) is not self._table:
            raise PatchError(
                f"verify: {self.method.name} is not in the model; it was undone or lies under a later patch"
            )
        seen: list[tuple[Tensor, Tensor]] = []

        def see(_module: nn.Module, _args: object, output: object) -> None:
            seen.append(cast("tuple[Tensor, Tensor]", output))

        handle = self._table.register_forward_hook(see)
        try:
            self._two_tokens()
        finally:
            handle.remove()
        if len(seen) != 1:
            raise PatchError(
                f"verify: one forward called the rotary module {len(seen)} times; it must be used exactly once"
            )
        angles = self.plan.inv_freq.double() * (self.context - 1)
        # fp32 holds an angle of a radians to a * 2^-24; the rest is the finished cos rounded to the model's dtype
        tolerance = 4 * (self.context * 2**-24 + torch.finfo(seen[0][0].dtype).eps) * self.plan.attention_scale
        for got, wanted in zip(seen[0], (angles.cos(), angles.sin()), strict=True):
            difference = got[0, -1].double().cpu() - self.plan.attention_scale * torch.cat((wanted, wanted))
            if not bool((difference.abs() <= tolerance).all()):
                raise PatchError(f"verify: cos and sin are off the plan by {difference.abs().max():.3g}")
        # Does attention use them? No rotation at all averages the two tokens, a huge one picks one of them: a
        # difference that survives rounding to bf16, as a mere change of angles might not.
        if torch.equal(self._two_tokens(scaled_by=0.0), self._two_tokens(scaled_by=1e3)):
            raise PatchError(f"verify: the model ignores its rotary module, so {self.method.name} has no effect on it")
        if self.plan.alibi_slopes is not None:
            self._verify_bias()

    def _verify_bias(self) -> None:
        bias = bias_in(self._site.parent)
        if bias is None or not is_in_use(self._site.parent, bias):
            raise PatchError(
                f"verify: the model's attention was changed after {self.method.name} was put in "
                f"({self.model.config._attn_implementation!r}); undo the patch first"  # noqa: SLF001
            )
        found: list[Tensor] = []
        for factor in (0.0, 1e3):
            with bias.scaled(factor):
                found.append(self._two_tokens())
        if torch.equal(*found):
            raise PatchError(f"verify: the model's attention takes no bias, so {self.method.name} has no effect on it")

    @torch.no_grad()
    def _two_tokens(self, scaled_by: float = 1.0) -> Tensor:
        """Return the logits of tokens 0 and 1 at the first and last position, cos and sin times `scaled_by`."""
        device = self._table.inv_freq.device
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        handle = self._table.register_forward_hook(lambda _module, _args, output: tuple(f * scaled_by for f in output))
        try:
            # An explicit mask: without one, a step in position_ids other than 1 is read as a border between documents.
            return self.model(
                input_ids=torch.tensor([[0, 1]], device=device),
                position_ids=torch.tensor([[0, self.context - 1]], device=device),
                attention_mask=torch.ones(1, 2, dtype=torch.long, device=device),
                use_cache=False,
            )[0]  # logits, or the hidden states of a model without a head
        finally:
            handle.remove()
            for module, training in modes.items():
                module.training = training

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Leaving the block restores the model whatever was laid on top meanwhile; an error in flight is not replaced.
        while self._active:
            top = getattr(self._site.parent, self._site.attribute)
            (top.patch if isinstance(top, ExtendedRotaryEmbedding) and top.patch else self).undo()


def extend(
    model: PreTrainedModel,
    method: Method,
    *,
    context: int | None = None,
    factor: float | None = None,
    base: ScaledBase | None = None,
    original_context: int | None = None,
    sharded: bool = False,
) -> Patch:
    """Put `method` into a live model and return the handle that takes it out again.

    Changes exactly the model's rotary module and, in step with it, `config.rope_parameters` and
    `config.max_position_embeddings`; for a bias (ALiBi) the attention function as well. On a model that is already
    extended the new method starts from the same checkpoint geometry, never from the scaled one; undo in reverse order.

        with extend(model, Yarn(), context=32_768):
            ...

    Args:
        context: the window to reach, tokens; or
        factor: the same as a multiple of the original window. Exactly one of the two.
        base: for a checkpoint that already carries scaling: "original" or "checkpoint", see `hf.read_geometry`.
        original_context: the window of the base in tokens, where the configuration does not say it.
        sharded: take a model that FSDP2 has sharded, whose two-token proof runs on all processes together: every one
            of them has to make this call.

    Raises:
        ModelError: the model is not LLaMA-like, compiled, sharded, on the meta device, or carries scaling.
        ContextError: both or neither of context and factor, or a smaller window than the original.
        MethodError: the method cannot be laid over this checkpoint.
        PatchError: the patch did not take effect; the model is left as it was.
    """
    if isinstance(method, type) or not isinstance(method, Method):
        raise MethodError(f"method: {method!r} is not a method; pass an instance, as Yarn() or method('yarn')")
    _refuse_unpatchable(model, sharded=sharded)
    site = find_rotary_site(model)
    current = getattr(site.parent, site.attribute)
    nested = isinstance(current, ExtendedRotaryEmbedding)
    if nested and (base is not None or original_context is not None):
        given = f"base={base!r}" if base is not None else f"original_context={original_context}"
        raise ModelError(f"base: the model is already extended and keeps its geometry; leave {given} out")
    geometry = current.geometry if nested else read_geometry(model.config, base=base, original_context=original_context)
    table = build_table(model.config, geometry, method, context=context, factor=factor)
    table.base = current.base if nested else base
    parameters = parameters_in_step(model.config, table)
    table.to(current.inv_freq.device)
    patch = Patch(model, method, site, table)
    try:
        patch._apply(parameters)  # noqa: SLF001  (the one place that puts a patch on)
        patch.verify()
    except BaseException:
        patch.undo()
        raise
    return patch


def build_table(
    config: PretrainedConfig, geometry: RopeGeometry, method: Method, *, context: int | None, factor: float | None
) -> ExtendedRotaryEmbedding:
    """Return the rotary module of a method at exactly one of `context` and `factor`, its plans checked.

    Raises:
        ContextError, ModelError, MethodError: as `extend`.
    """
    target = resolve_context(geometry, context=context, factor=factor)
    check_attention_reach(config, target)
    table = ExtendedRotaryEmbedding(method, geometry, target)
    for length in sorted({1, geometry.original_context, geometry.original_context + 1, target, target + 1}):
        _check_plan(method, geometry, table.plan_at(length))
    return table


def _check_plan(method: Method, geometry: RopeGeometry, plan: PositionPlan) -> None:
    """Refuse a plan that no rotary module can carry, or of which a part would have no effect."""
    inv_freq, scale = plan.inv_freq, plan.attention_scale
    if inv_freq.shape != (geometry.num_pairs,) or inv_freq.dtype != torch.float32:
        raise MethodError(
            f"{method.name}: its plan has inv_freq {tuple(inv_freq.shape)} in {inv_freq.dtype}; "
            f"it must be ({geometry.num_pairs},) in torch.float32"
        )
    if not bool((torch.isfinite(inv_freq) & (inv_freq >= 0)).all()) or not (math.isfinite(scale) and scale > 0):
        raise MethodError(f"{method.name}: its plan holds a frequency or a scale that is negative or not finite")
    slopes = plan.alibi_slopes
    if slopes is not None and (slopes.shape != (geometry.num_heads,) or slopes.dtype != torch.float32):
        raise MethodError(
            f"{method.name}: its plan has slopes {tuple(slopes.shape)} in {slopes.dtype}; it must be "
            f"({geometry.num_heads},) in torch.float32"
        )
    if slopes is not None and not bool((torch.isfinite(slopes) & (slopes >= 0)).all()):
        raise MethodError(f"{method.name}: its plan holds a slope that is negative or not finite")


def active_patch_table(model: PreTrainedModel) -> ExtendedRotaryEmbedding | None:
    """Return the rotary module of the patch in effect on the model, or None."""
    site = find_rotary_site(model)
    current = getattr(site.parent, site.attribute)
    return current if isinstance(current, ExtendedRotaryEmbedding) else None


def _refuse_unpatchable(model: PreTrainedModel, *, sharded: bool) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ModelError(f"model: {type(model).__name__} is not a Hugging Face model; load one, as with load_model()")
    # torch has no public test for either form of compilation
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):  # noqa: SLF001
        raise ModelError(
            "model: it is compiled, and the compiled code would keep the old frequencies; extend, then compile"
        )
    in_pieces = any(isinstance(p, DTensor) for p in model.parameters())
    if (in_pieces and not sharded) or any("FullySharded" in type(m).__name__ for m in model.modules()):
        raise ModelError("model: it is sharded over devices; extend it first, then shard")
    if any(p.is_meta for p in model.parameters()):
        raise ModelError("model: its weights are on the meta device; load them first, then extend")


def _hash(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
