"""Attention under a bias that grows with distance, computed in several ways ("paths").

    softmax_j(scale * q_i . k_j - slope * (p_i - p_j)),   keys j that query i may see, p their positions

`-slope * p_i` is the same along a row and drops out of the softmax, so only slope * p_j is needed, and that is a dot
product: queries get one more dimension that holds the slope, keys one that holds the position. No bias of all queries
and keys is made.

    folded   the above, by torch's scaled_dot_product_attention, a block of queries at a time; everywhere
    flash    flash-attn's own ALiBi (`alibi_slopes`); on CUDA in half precision, where nothing but causality is masked
    flex     FlexAttention's score_mod; forward only on a CPU
    dense    the whole bias, softmax written out: for tests

The environment variable ROPE_EXT_ALIBI names one; otherwise flash where it can be used, else folded.
"""

import functools
import inspect
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rope_ext.errors import PatchError

PATH = "ROPE_EXT_ALIBI"
BLOCK = 256
"""Queries that share one origin of positions, relative to which slope * distance is rounded: the fewer the better."""
FAR = 1024
"""Positions left out at one place, from which on a new block begins there."""
FEW = 16
"""Queries, as in decoding, up to which their own bias is smaller than keys with a dimension more."""
KEPT_BLOCKS = 8
"""Blocks whose inputs, keys among them, are kept for the backward pass; where there are more, all are made again."""
WHOLE = {torch.float32, torch.float64}
"""Dtypes that hold a distance as one number."""


class Rows(NamedTuple):
    """One call of attention: query (batch, heads, queries, head_dim), key and value (batch, key heads, keys, head_dim).

    `mask` is what scaled_dot_product_attention takes: True where a query may see a key, or numbers that are added,
    shape (batch or 1, heads or 1, queries, keys); None is plain causality in which the last query sees the last key.
    `positions` of the keys have shape (batch or 1, keys), and the first query is the key of column `first`. `is_even`
    says that positions rise by one all along.
    """

    query: Float[Tensor, "batch heads queries head_dim"]
    key: Float[Tensor, "batch kv_heads keys head_dim"]
    value: Float[Tensor, "batch kv_heads keys head_dim"]
    mask: Tensor | None
    positions: Int[Tensor, "rows keys"]
    slopes: Float[Tensor, " heads"]
    scale: float
    first: int
    dropout: float = 0.0
    is_even: bool = True


Path = Callable[[Rows], Tensor]
"""Rows in, (batch, heads, queries, head_dim) out."""


def choose_path(rows: Rows) -> Path:
    """Return how to compute this call.

    Raises:
        PatchError: ROPE_EXT_ALIBI names no path, or one that cannot be used here.
    """
    asked = os.environ.get(PATH)
    if asked is None:
        return flash if _flash_fits(rows) else folded
    if asked not in PATHS:
        raise PatchError(f"alibi: {PATH} is {asked!r}; it names one of {', '.join(PATHS)}")
    if asked == "flash" and not _flash_fits(rows):
        raise PatchError(
            f"alibi: {PATH}=flash needs the package flash-attn, a CUDA device, fp16 or bf16, positions in order, and "
            "no mask but causality; leave it unset to have it used where it fits"
        )
    return PATHS[asked]


def _flash_fits(rows: Rows) -> bool:
    fits = rows.query.is_cuda and rows.query.dtype in {torch.float16, torch.bfloat16} and rows.mask is None
    return fits and rows.is_even and rows.query.shape[-1] <= 256 and flash_function() is not None


@functools.cache
def flash_function() -> Callable[..., Tensor] | None:
    """Return flash-attn's function if it is installed and takes slopes: that of version 2 does."""
    try:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]  (an extra that needs a GPU)
    except ImportError:  # later versions leave a folder of this name without it
        return None
    return flash_attn_func if "alibi_slopes" in inspect.signature(flash_attn_func).parameters else None


def folded(rows: Rows) -> Tensor:
    """Compute `Rows` by queries and keys that carry slope and position in dimensions of their own.

    Raises:
        PatchError: a slope too steep for the dtype.
    """
    num_queries, size = rows.query.shape[2:]
    if num_queries <= FEW and rows.query.dtype in WHOLE:
        return _few(rows)
    queries = _query_terms(rows)
    value = F.pad(rows.value, (0, queries.shape[-1]))
    edges = _edges(rows)
    trained = torch.is_grad_enabled() and _needs_grad(rows)
    again = trained and len(edges) - 1 > KEPT_BLOCKS
    # One copy of the keys serves all blocks, but for those that a backward pass will want as they were
    keys_once = None if trained else F.pad(rows.key, (0, queries.shape[-1]))
    parts: list[Tensor] = []
    for start, stop in pairwise(edges):
        keys = rows.key.shape[2] if rows.mask is not None else rows.first + stop
        query = torch.cat((rows.query[:, :, start:stop], queries.expand(len(rows.query), -1, stop - start, -1)), dim=-1)
        terms = _key_terms(rows, start, stop, keys)[:, None]
        mask = None if rows.mask is None else rows.mask[:, :, start:stop]
        if keys_once is not None:
            keys_once[:, :, :keys, size:] = terms
            parts.append(_block(query, keys_once[:, :, :keys], value[:, :, :keys], mask, rows))
            continue
        given = (query, rows.key[:, :, :keys], terms, value[:, :, :keys], mask, rows)
        parts.append(checkpoint(_trained_block, *given, use_reentrant=False) if again else _trained_block(*given))
    assert edges[-1] == num_queries
    return torch.cat(parts, dim=2)[..., :size]


def _few(rows: Rows) -> Tensor:
    """Compute a few queries under their bias as a mask of numbers: heads x queries x keys of them."""
    num_queries, num_keys = rows.query.shape[2], rows.key.shape[2]
    own = rows.positions[:, rows.first : rows.first + num_queries]
    distance = own[:, None, :, None] - rows.positions[:, None, None, :]
    bias = -rows.slopes.to(rows.query.dtype)[:, None, None] * distance
    if rows.mask is not None:
        bias = bias + _added(rows.mask)
    elif num_queries > 1:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=bias.device).tril(rows.first)
        bias = bias.masked_fill(~seen, -torch.inf)
    return F.scaled_dot_product_attention(
        rows.query,
        rows.key,
        rows.value,
        attn_mask=bias,
        dropout_p=rows.dropout,
        scale=rows.scale,
        enable_gqa=rows.query.shape[1] != rows.key.shape[1],
    )


def _trained_block(query: Tensor, key: Tensor, terms: Tensor, value: Tensor, mask: Tensor | None, rows: Rows) -> Tensor:
    key = torch.cat((key, terms.expand(len(key), key.shape[1], -1, -1)), dim=-1)
    return _block(query, key, value, mask, rows)


def _edges(rows: Rows) -> list[int]:
    """Return where blocks of queries begin, and the end: also where positions jump, so that an origin is near."""
    num_queries = rows.query.shape[2]
    edges = {*range(0, num_queries, BLOCK), num_queries}
    if not rows.is_even and not torch.compiler.is_compiling():
        own = rows.positions[:, rows.first : rows.first + num_queries]
        jumps = (own.diff(dim=-1).abs() > FAR).any(dim=0).nonzero()[:, 0] + 1
        edges |= {int(jump) for jump in jumps.tolist()}
    return sorted(edges)


def _needs_grad(rows: Rows) -> bool:
    return any(tensor.requires_grad for tensor in (rows.query, rows.key, rows.value))


def _block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows: Rows) -> Tensor:
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
    """Return what every query carries: its head's slope, less the scale that the product is multiplied by.

    In half precision a slope is the sum of two numbers, and meets the three digits of a distance.
    """
    slopes = rows.slopes / rows.scale
    dtype = rows.query.dtype
    if dtype in WHOLE:
        return slopes.to(dtype)[None, :, None, None]
    high = slopes.to(dtype)
    low = (slopes - high.float()).to(dtype)
    terms = torch.stack((256 * high, high, high, 256 * low, low, low), dim=-1)
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(terms).all()):
        raise PatchError(f"alibi: a slope of {float(rows.slopes.max()):g} is too steep for {dtype}; use bf16 or fp32")
    return F.pad(terms, (0, 2))[None, :, None]  # kernels want head sizes that are multiples of 8


def _key_terms(rows: Rows, start: int, stop: int, keys: int) -> Float[Tensor, "rows keys terms"]:
    """Return what keys carry: their position from the middle of a block of queries.

    In half precision, which counts no farther than 256 exactly, as digits of base 256, for each of the two parts of a
    slope. The highest one meets 256 times the slope, so that none is beyond fp16.
    """
    middle = rows.positions[:, min(rows.first + (start + stop) // 2, rows.positions.shape[1] - 1), None]
    distance = rows.positions[:, :keys] - middle
    dtype = rows.key.dtype
    if dtype in WHOLE:
        return distance.to(dtype)[..., None]
    rest = distance.remainder(65_536)
    ones = rest.remainder(256)
    digits = torch.stack(((distance - rest).div(256), rest - ones, ones), dim=-1).to(dtype)
    return F.pad(torch.cat((digits, digits), dim=-1), (0, 2))


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
    batch, heads = rows.query.shape[:2]
    slopes, positions, first = rows.slopes, rows.positions.expand(batch, -1), rows.first
    added = None if rows.mask is None else _added(rows.mask).expand(batch, heads, -1, -1)

    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # The query's own position matters little: any one near it keeps the numbers small
        biased = value - slopes[head] * (positions[batch, first + query] - positions[batch, key])
        if added is None:
            return torch.where(key <= first + query, biased, -torch.inf)
        return biased + added[batch, head, query, key]

    out = _flex_attention()(
        rows.query,
        rows.key,
        rows.value,
        score_mod=score,
        scale=rows.scale,
        enable_gqa=heads != rows.key.shape[1],
    )
    return cast("Tensor", out)


def _added(mask: Tensor) -> Tensor:
    """Return a mask of either kind as numbers that are added to scores."""
    return mask if mask.dtype != torch.bool else torch.where(mask, 0.0, -torch.inf)


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
    own = rows.positions[:, rows.first : rows.first + num_queries]
    distance = own[:, None, :, None] - rows.positions[:, None, None, :]
    scores = rows.query.to(wide) @ key.mT * rows.scale - rows.slopes.to(wide)[:, None, None] * distance
    if rows.mask is None:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).tril(rows.first)
        scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    else:
        scores = (scores + _added(rows.mask)).clamp_min(torch.finfo(wide).min)
    return (F.dropout(scores.softmax(dim=-1), rows.dropout) @ value).to(rows.query.dtype)


PATHS: dict[str, Path] = {"folded": folded, "flash": flash, "flex": flex, "dense": dense}
