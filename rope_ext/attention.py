"""The attention of a patched model with a bias (ALiBi): what transformers calls, and how it gets into a live model."""

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rope_ext.alibi_paths import Rows, choose_path
from rope_ext.errors import PatchError
from rope_ext.key_positions import SLOTS, Slots, key_positions, mark, slots_of

NAME = "rope_ext_alibi"
"""Of the attention in transformers' registries; transformers looks for words such as sdpa and flash in names."""
HOLDER = "rope_ext_bias"
"""The attribute of an attention module that holds its bias."""
EVEN = "rope_ext_even"
"""The attribute of position_ids that remembers whether they rise by one: layers are given the same tensor."""
BLOCKING = -1e3
"""What is added to a score that nobody is to see is less than this, in every form that masks of numbers come in."""


@dataclass(eq=False)
class Bias:
    """What an attention module adds, and what the model used before.

    Attributes:
        slopes: fp32, shape (heads,).
        before: the attention implementation that undoing puts back.
    """

    slopes: Float[Tensor, " heads"]
    before: str
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Float[Tensor, " heads"]:
        """Return the slopes on a device, fp32 whatever the model's dtype."""
        if device not in self._moved:
            self._moved[device] = self.slopes.to(device)
        return self._moved[device]

    @contextmanager
    def scaled(self, factor: float) -> Generator[None]:
        """Multiply the slopes for a while."""
        slopes, moved = self.slopes, self._moved
        self.slopes, self._moved = slopes * factor, {}
        try:
            yield
        finally:
            self.slopes, self._moved = slopes, moved


def alibi_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    **_more: Any,
) -> tuple[Float[Tensor, "batch queries heads head_dim"], None]:
    """Return what the attention of a patched model gives, in the form of transformers' attention functions.

    Raises:
        PatchError: the module carries no bias; attention is asked to look ahead, or for its weights; or positions are
            left out behind cached keys, whose own are not known.
    """
    bias = cast("Bias | None", getattr(module, HOLDER, None))
    if bias is None:
        raise PatchError(
            f"alibi: this {type(module).__name__} carries no slopes, but its configuration, which another model may "
            "share, asks for them; load every model with a configuration of its own, and extend() it with Alibi()"
        )
    if is_causal is False:
        raise PatchError("alibi: the bias is that of a causal model; attention that looks ahead is not supported")
    if output_attentions:
        raise PatchError("alibi: attention weights are never whole in memory here; ask without output_attentions")
    query, key, value = _as_computed(query, key, value)
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask, seen, slots = _seen(attention_mask, num_queries, num_keys)
    positions = key_positions(num_keys, slots, seen, position_ids, num_queries)
    rows = Rows(
        query,
        key,
        value,
        mask,
        positions.to(query.device),
        bias.on(query.device),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        slots.first,
        dropout,
        is_even=_is_even(position_ids),
    )
    return choose_path(rows)(rows).transpose(1, 2).contiguous(), None


def _as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype that autocast computes in: it would round positions that are laid beside them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def _seen(mask: Tensor | None, num_queries: int, num_keys: int) -> tuple[Tensor | None, Tensor | None, Slots]:
    """Return the mask of these keys, which of them any query sees, and which columns the queries are.

    Raises:
        PatchError: it is of a kind that is no mask, or lets a query see what comes after it.
    """
    slots = slots_of(mask, num_queries, num_keys)
    if mask is None:
        return None, None, slots
    given, mask = mask, mask[..., :num_keys]
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise PatchError(f"alibi: a mask of {mask.dtype} is neither of booleans nor of numbers to add; make it one")
    visible = mask if mask.dtype == torch.bool else mask > BLOCKING
    seen = visible.any(dim=1).any(dim=1)  # by any query: under a sliding window no single one sees all
    own = getattr(given, SLOTS, None) is not None  # made by `alibi_mask`, and so causal
    if own or torch.compiler.is_compiling():
        return mask, seen, slots
    if num_keys > num_queries:  # in a cache of fixed size the last columns may be empty
        end = int(torch.where(seen, torch.arange(1, num_keys + 1, device=seen.device), 0).max())
        slots = Slots(max(0, end - num_queries))
    if bool(visible.triu(slots.first + 1).any()):
        raise PatchError("alibi: the mask lets a query see keys that come after it; the bias is that of a causal model")
    return mask, seen, slots


def _is_even(position_ids: Tensor | None) -> bool:
    if position_ids is None or torch.compiler.is_compiling():
        return True
    known = cast("tuple[int, bool] | None", getattr(position_ids, EVEN, None))
    version = 0 if position_ids.is_inference() else position_ids._version  # noqa: SLF001  (it counts changes in place)
    if known is None or known[0] != version:
        known = version, bool((position_ids.diff(dim=-1) == 1).all())
        if not position_ids.is_inference():
            setattr(position_ids, EVEN, known)
    return known[1]


def alibi_mask(**given: Any) -> Bool[Tensor, "rows 1 queries keys"] | None:
    """Return transformers' mask for `sdpa`, or None wherever it is plain causality, behind a cache too."""
    queries, keys, offset = given["q_length"], given["kv_length"], given.get("q_offset", 0)
    padding = given.get("attention_mask")
    plain = (
        given.get("allow_is_causal_skip", True)
        and given.get("mask_function", causal_mask_function) is causal_mask_function
        and isinstance(offset, int)
        and offset + queries == keys
        and (padding is None or bool(padding[:, :keys].all()))
    )
    if plain:
        return None
    mask = sdpa_mask(**cast("dict[str, Any]", {**given, "allow_is_causal_skip": False}))
    return mark(mask, offset, int(given.get("kv_offset", 0)))


class _Attention(Protocol):
    config: Any


def attention_modules(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield the attention modules below the module that owns the rotary one."""
    for module in parent.modules():
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            yield module


def bias_in(parent: nn.Module) -> Bias | None:
    """Return the bias in effect below a module, or None."""
    return next((getattr(module, HOLDER) for module in attention_modules(parent) if hasattr(module, HOLDER)), None)


def is_in_use(parent: nn.Module, bias: Bias) -> bool:
    """Whether all attention below a module holds this very bias, and its configuration asks for it."""
    modules = list(attention_modules(parent))
    asked = {str(cast("_Attention", module).config._attn_implementation) for module in modules}  # noqa: SLF001
    return asked == {NAME} and all(getattr(module, HOLDER, None) is bias for module in modules)


def put_bias(parent: nn.Module, slopes: Tensor | None) -> Callable[[], None]:
    """Let the attention below a module add a bias of these slopes, or none, and return what undoes that.

    Raises:
        PatchError: nothing below it is attention that transformers can be given a function for.
    """
    modules, present = list(attention_modules(parent)), bias_in(parent)
    if not modules:
        raise PatchError(f"alibi: no attention found in {type(parent).__name__}; a LLaMA-like model has one a layer")
    before = present.before if present else str(cast("_Attention", modules[0]).config._attn_implementation)  # noqa: SLF001
    set_bias(parent, None if slopes is None else Bias(slopes, before), before)
    return functools.partial(set_bias, parent, present, before)  # no closure, which a copy of the model would share


def set_bias(parent: nn.Module, bias: Bias | None, before: str) -> None:
    """Put this very bias into attention, or none and the implementation `before`."""
    configs: dict[int, Any] = {}
    for module in attention_modules(parent):
        if bias is None:
            module.__dict__.pop(HOLDER, None)
        else:
            module.__dict__[HOLDER] = bias
        configs[id(module.config)] = module.config
    for config in (*configs.values(), cast("_Attention", parent).config):
        config._attn_implementation = before if bias is None else NAME  # noqa: SLF001  (as set_attn_implementation does)


# As this is imported, and not as a model is patched: a pickled model in another process knows its attention by name
AttentionInterface.register(NAME, alibi_attention)
AttentionMaskInterface.register(NAME, cast("Any", alibi_mask))
