"""Attention with a bias that grows with distance (ALiBi), for models that have no such thing.

    softmax_j(scale * q_i . k_j - slope * (p_i - p_j)),   keys j that query i may see, p their positions

`-slope * p_i` is the same along a row and drops out of the softmax, so only slope * p_j is needed, and that is a dot
product: queries get one more dimension that holds the slope, keys one that holds the position. No L x L bias is made.

Ways to compute it ("paths"):

    folded   the above, by torch's scaled_dot_product_attention, a block of queries at a time; everywhere
    flash    flash-attn's own ALiBi (`alibi_slopes`); on CUDA in half precision, where nothing but causality is masked
    flex     FlexAttention's score_mod; forward only on a CPU
    dense    the whole bias, softmax written out: for tests

The environment variable ROPE_EXT_ALIBI names one; otherwise flash where it can be used, else folded.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rope_ext.errors import PatchError

NAME = "rope_ext_alibi"
"""Of the attention in transformers' registries; transformers looks for words such as sdpa and flash in names."""
PATH = "ROPE_EXT_ALIBI"
HOLDER = "rope_ext_bias"
"""The attribute of an attention module that holds its bias."""
BLOCK = 256
"""Queries that share one origin of positions, relative to which slope * distance is rounded: the fewer the better."""
KEPT_BLOCKS = 8
"""Blocks whose inputs, keys among them, are kept for the backward pass; where there are more, all are made again."""


@dataclass(eq=False)
class Bias:
    """What an attention module adds, and what the model used before.

    Attributes:
        slopes: fp32, shape (heads,).
        before: the attention implementation that `take_out` puts back.
    """

    slopes: Float[Tensor, " heads"]
    before: str
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Float[Tensor, " heads"]:
        """Return the slopes on a device, fp32 whatever the model's dtype."""
        if device not in self._moved:
            self._moved[device] = self.slopes.to(device)
        return self._moved[device]


class Rows(NamedTuple):
    """One call of attention: query (batch, heads, queries, head_dim), key and value (batch, key heads, keys, head_dim).

    `mask` is True where a query may see a key, shape (batch or 1, 1, queries, keys), or None for plain causality in
    which the last query sees the last key. `positions` of the keys have shape (batch or 1, keys).
    """

    query: Float[Tensor, "batch heads queries head_dim"]
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    value: Float[Tensor, "batch kv_heads keys head_dim"]
    mask: Bool[Tensor, "rows 1 queries keys"] | None
    positions: Int[Tensor, "rows keys"]
    slopes: Float[Tensor, " heads"]
    scale: float
    dropout: float

    @property
    def offset(self) -> int:
        """Keys before those of the first query."""
        return self.key.shape[2] - self.query.shape[2]


Path = Callable[[Rows], Tensor]
"""Rows in, (batch, heads, queries, head_dim) out."""


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
    **_more: Any,
) -> tuple[Float[Tensor, "batch queries heads head_dim"], None]:
    """Return what the attention of a patched model gives, in the form of transformers' attention functions.

    Raises:
        PatchError: the module carries no bias, attention is asked to look ahead, or positions leave out some after
            keys that are cached, whose own are not known.
    """
    bias = cast("Bias | None", getattr(module, HOLDER, None))
    if bias is None:
        raise PatchError(f"alibi: {type(module).__name__} carries no slopes; extend() the model with Alibi()")
    if is_causal is False:
        raise PatchError("alibi: the bias is that of a causal model; attention that looks ahead is not supported")
    query, key, value = _as_computed(query, key, value)
    mask = _as_bool(attention_mask, key.shape[2])
    positions = key_positions(query.shape[2], key.shape[2], mask, position_ids).to(query.device)
    _check_cached(positions, query.shape[2], mask, position_ids)
    rows = Rows(
        query,
        key,
        value,
        mask,
        positions,
        bias.on(query.device),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout,
    )
    return choose_path(rows, position_ids)(rows).transpose(1, 2).contiguous(), None


def _as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype that autocast computes in: it would round positions that are laid beside them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def _as_bool(mask: Tensor | None, num_keys: int) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[..., :num_keys]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def key_positions(
    num_queries: int, num_keys: int, mask: Tensor | None, position_ids: Tensor | None
) -> Int[Tensor, "rows keys"]:
    """Return the position of every key, shape (batch or 1, keys), up to a constant in each row.

    If all keys are new, these are `position_ids`. A cache remembers none, so that behind one they are numbered as the
    new tokens are: by column, padding and all, as transformers does of itself, or else by a count of what is seen:

        mask [0 0 1 1 | 1], the new token at 4 -> [0 1 2 3 | 4]        at 2 -> [. . 0 1 | 2]
        mask [1 1 0 0 | 1], the new token at 4 -> [0 1 2 3 | 4]        at 2 -> [0 1 . . | 2]
    """
    if position_ids is not None and position_ids.ndim == 2 and num_queries == num_keys == position_ids.shape[1]:
        return position_ids
    columns = torch.arange(num_keys, device=None if position_ids is None else position_ids.device)[None]
    counts = columns
    if mask is not None:
        # By any query: under a sliding window no single one sees all
        counts = (mask[:, 0].any(dim=1).long().cumsum(dim=-1) - 1).to(columns.device)
    if position_ids is None:
        return counts
    return torch.where(position_ids[:, :1] == num_keys - num_queries, columns, counts)


def _check_cached(positions: Tensor, num_queries: int, mask: Tensor | None, position_ids: Tensor | None) -> None:
    """Refuse new tokens that stand elsewhere than behind the cached ones; asked once for a forward."""
    num_keys = positions.shape[1]
    if position_ids is None or num_queries == num_keys or torch.compiler.is_compiling():
        return
    if getattr(position_ids, "rope_ext_follows", None) == num_keys:
        return
    first = num_keys - num_queries
    wrong = positions[:, first] != position_ids[:, 0].to(positions.device)
    if mask is not None:
        wrong = wrong & mask[:, 0, 0, first]  # what is padding, or lies ahead in a cache of fixed size, tells nothing
    if bool(wrong.any()):
        raise PatchError(
            f"alibi: a token at position {int(position_ids[:, 0].max())} follows {first} cached ones, of which no more "
            "than their number is known; pass the whole sequence without a cache where positions are left out"
        )
    position_ids.rope_ext_follows = num_keys  # pyright: ignore[reportAttributeAccessIssue]


def alibi_mask(**given: Any) -> Bool[Tensor, "rows 1 queries keys"] | None:
    """Return transformers' mask for `sdpa`, or None wherever it is plain causality, behind a cache too."""
    queries, keys, offset = given["q_length"], given["kv_length"], given.get("q_offset", 0)
    padding = given.get("attention_mask")
    plain = (
        given.get("allow_is_causal_skip", True)
        and given.get("mask_function", causal_mask_function) is causal_mask_function
        and given.get("local_size") is None
        and given.get("kv_offset", 0) == 0
        and isinstance(offset, int)
        and offset + queries == keys
        and (padding is None or bool(padding[:, :keys].all()))
    )
    return None if plain else sdpa_mask(**cast("dict[str, Any]", {**given, "allow_is_causal_skip": False}))


def choose_path(rows: Rows, position_ids: Tensor | None = None) -> Path:
    """Return how to compute this call.

    Raises:
        PatchError: ROPE_EXT_ALIBI names no path, or one that cannot be used here.
    """
    asked = os.environ.get(PATH)
    if asked is None:
        return flash if _flash_fits(rows, position_ids) else folded
    if asked not in PATHS:
        raise PatchError(f"alibi: {PATH} is {asked!r}; it names one of {', '.join(PATHS)}")
    if asked == "flash" and not _flash_fits(rows, position_ids):
        raise PatchError(
            f"alibi: {PATH}=flash needs the package flash-attn, a CUDA device, fp16 or bf16, positions in order, and "
            "no mask but causality; leave it unset to have it used where it fits"
        )
    return PATHS[asked]


@functools.cache
def flash_function() -> Callable[..., Tensor] | None:
    """Return flash-attn's function if it is installed and takes slopes: that of version 2 does."""
    try:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]  (an extra that needs a GPU)
    except ImportError:  # later versions leave a folder of this name without it
        return None
    return flash_attn_func if "alibi_slopes" in inspect.signature(flash_attn_func).parameters else None


def _flash_fits(rows: Rows, position_ids: Tensor | None) -> bool:
    fits = rows.query.is_cuda and rows.query.dtype in {torch.float16, torch.bfloat16} and rows.mask is None
    return fits and rows.query.shape[-1] <= 256 and flash_function() is not None and _in_order(position_ids)


def _in_order(position_ids: Tensor | None) -> bool:
    """Whether positions rise by one; asked once for a forward, as its layers are given the same tensor."""
    if position_ids is None:
        return True
    known = cast("bool | None", getattr(position_ids, "rope_ext_in_order", None))
    if known is None:
        known = bool((position_ids.diff(dim=-1) == 1).all())
        position_ids.rope_ext_in_order = known  # pyright: ignore[reportAttributeAccessIssue]
    return known


def folded(rows: Rows) -> Tensor:
    """Compute `Rows` by queries and keys that carry slope and position in dimensions of their own."""
    num_queries, size = rows.query.shape[2:]
    queries = _query_terms(rows)
    width = queries.shape[-1]
    value = F.pad(rows.value, (0, width))
    starts = range(0, num_queries, BLOCK)
    again = torch.is_grad_enabled() and len(starts) > KEPT_BLOCKS and _needs_grad(rows)
    parts: list[Tensor] = []
    for start in starts:
        stop = min(start + BLOCK, num_queries)
        keys = rows.key.shape[2] if rows.mask is not None else rows.offset + stop
        query = torch.cat((rows.query[:, :, start:stop], queries.expand(len(rows.query), -1, stop - start, -1)), dim=-1)
        given = (query, rows.key[:, :, :keys], value[:, :, :keys], _key_terms(rows, start, stop, keys))
        mask = None if rows.mask is None else rows.mask[:, :, start:stop]
        parts.append(
            checkpoint(_block, *given, mask, rows, use_reentrant=False) if again else _block(*given, mask, rows)
        )
    return torch.cat(parts, dim=2)[..., :size]


def _needs_grad(rows: Rows) -> bool:
    return any(tensor.requires_grad for tensor in (rows.query, rows.key, rows.value))


def _block(query: Tensor, key: Tensor, value: Tensor, terms: Tensor, mask: Tensor | None, rows: Rows) -> Tensor:
    key = torch.cat((key, terms[:, None].expand(len(key), key.shape[1], -1, -1)), dim=-1)
    num_queries, num_keys = query.shape[2], key.shape[2]
    causal = mask is None and num_queries == num_keys
    if mask is None and not causal and num_queries > 1:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        mask = mask[None, None]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=rows.dropout,
        is_causal=causal,
        scale=rows.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _query_terms(rows: Rows) -> Float[Tensor, "1 heads 1 terms"]:
    """Return what every query carries: its head's slope, less the scale that the product is multiplied by."""
    slopes = rows.slopes / rows.scale
    dtype = rows.query.dtype
    if dtype in {torch.float32, torch.float64}:
        return slopes.to(dtype)[None, :, None, None]
    high = slopes.to(dtype)
    low = (slopes - high.float()).to(dtype)
    terms = torch.stack((256 * high, high, 256 * low, low), dim=-1)
    return F.pad(terms, (0, 4))[None, :, None]  # kernels want head sizes that are multiples of 8


def _key_terms(rows: Rows, start: int, stop: int, keys: int) -> Float[Tensor, "rows keys terms"]:
    """Return what keys carry: their position from the middle of a block of queries.

    In half precision, which counts no farther than 256 exactly, as two digits of base 256, for each of the two parts
    of a slope.
    """
    middle = rows.positions[:, min(rows.offset + (start + stop) // 2, rows.positions.shape[1] - 1), None]
    distance = rows.positions[:, :keys] - middle
    dtype = rows.key.dtype
    if dtype in {torch.float32, torch.float64}:
        return distance.to(dtype)[..., None]
    high = distance.div(256, rounding_mode="floor")
    digits = torch.stack((high, distance - 256 * high), dim=-1).to(dtype)
    return F.pad(torch.cat((digits, digits), dim=-1), (0, 4))


def flash(rows: Rows) -> Tensor:
    """Compute `Rows` by flash-attn, which knows ALiBi and aligns the last query with the last key."""
    function = flash_function()
    assert function is not None
    out = function(
        rows.query.transpose(1, 2),
        rows.key.transpose(1, 2),
        rows.value.transpose(1, 2),
        dropout_p=rows.dropout,
        softmax_scale=rows.scale,
        causal=True,
        alibi_slopes=rows.slopes.float(),
    )
    return out.transpose(1, 2)


def flex(rows: Rows) -> Tensor:
    """Compute `Rows` by FlexAttention, bias and mask both added to the score.

    Raises:
        PatchError: dropout, which it lacks, or a backward pass on a CPU.
    """
    if not rows.query.is_cuda and torch.is_grad_enabled() and _needs_grad(rows):
        raise PatchError("alibi: FlexAttention is forward only on a CPU; train by another path")
    if rows.dropout:
        raise PatchError("alibi: FlexAttention has no dropout; train with attention_dropout 0, or by another path")
    slopes, positions, mask, offset = rows.slopes, rows.positions.expand(len(rows.query), -1), rows.mask, rows.offset
    seen = None if mask is None else mask.expand(len(rows.query), -1, -1, -1)

    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # The query's own position matters little: any one near it keeps the numbers small
        distance = positions[batch, offset + query] - positions[batch, key]
        visible = key <= offset + query if seen is None else seen[batch, 0, query, key]
        return torch.where(visible, value - slopes[head] * distance, -torch.inf)

    out = _flex_attention()(
        rows.query,
        rows.key,
        rows.value,
        score_mod=score,
        scale=rows.scale,
        enable_gqa=rows.query.shape[1] != rows.key.shape[1],
    )
    return cast("Tensor", out)


@functools.cache
def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def dense(rows: Rows) -> Tensor:
    """Compute `Rows` plainly: scores, bias and softmax in fp32 or better, the whole of each in memory."""
    groups = rows.query.shape[1] // rows.key.shape[1]
    wide = torch.promote_types(rows.query.dtype, torch.float32)
    key, value = (each.to(wide).repeat_interleave(groups, dim=1) for each in (rows.key, rows.value))
    num_queries, num_keys = rows.query.shape[2], rows.key.shape[2]
    own = rows.positions[:, (rows.offset + torch.arange(num_queries, device=rows.positions.device)).clamp_min(0)]
    distance = own[:, None, :, None] - rows.positions[:, None, None, :]
    scores = rows.query.to(wide) @ key.mT * rows.scale - rows.slopes.to(wide)[:, None, None] * distance
    seen = rows.mask
    if seen is None:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).tril(rows.offset)
    weights = scores.masked_fill(~seen, torch.finfo(wide).min).softmax(dim=-1)
    return (F.dropout(weights, rows.dropout) @ value).to(rows.query.dtype)


PATHS: dict[str, Path] = {"folded": folded, "flash": flash, "flex": flex, "dense": dense}


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


def put_bias(parent: nn.Module, slopes: Tensor | None) -> Callable[[], None]:
    """Let the attention below a module add a bias of these slopes, or none, and return what undoes that.

    Raises:
        PatchError: nothing below it is attention that transformers can be given a function for.
    """
    AttentionInterface.register(NAME, alibi_attention)
    AttentionMaskInterface.register(NAME, cast("Any", alibi_mask))
    modules, present = list(attention_modules(parent)), bias_in(parent)
    if not modules:
        raise PatchError(
            f"alibi: no attention found in {type(parent).__name__}; a LLaMA-like model has one in each layer"
        )
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
