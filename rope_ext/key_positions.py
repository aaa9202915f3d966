"""Where the keys of an attention call stand: what position_ids say of the new ones, and what follows of cached ones."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rope_ext.errors import PatchError

SLOTS = "rope_ext_slots"
"""The attribute of a mask that says which columns its queries are."""


class Slots(NamedTuple):
    """Which columns of keys the queries of a call are.

    Attributes:
        first: the column of the first query; in a cache of fixed size columns lie empty behind the last one.
        dropped: keys before the first column that a sliding window has given up.
    """

    first: int
    dropped: int = 0


def slots_of(mask: Tensor | None, num_queries: int, num_keys: int) -> Slots:
    """Return the columns of the queries: as the mask was made with, or the last ones."""
    found = cast("Slots | None", getattr(mask, SLOTS, None))
    return found or Slots(num_keys - num_queries)


def mark(mask: Tensor | None, offset: Any, dropped: int) -> Tensor | None:
    """Write into a mask which columns its queries are; what is being compiled cannot carry that."""
    if mask is not None and not torch.compiler.is_compiling():
        setattr(mask, SLOTS, Slots(int(offset) - dropped, dropped))
    return mask


def key_positions(
    num_keys: int, slots: Slots, seen: Tensor | None, position_ids: Tensor | None, num_queries: int
) -> Tensor:
    """Return the position of every key, int64, shape (batch or 1, keys), up to a constant in each row.

    New keys stand where position_ids say. A cache remembers no positions, so that cached keys are numbered as the new
    tokens are: by column, padding and all, as transformers does of itself, or by a count of what is seen:

        seen [0 0 1 1 | 1], the new token at 4 -> [0 1 2 3 | 4]        at 2 -> [. . 0 1 | 2]
        seen [1 1 0 0 | 1], the new token at 4 -> [0 1 2 3 | 4]        at 2 -> [0 1 . . | 2]

    Args:
        seen: which keys any query sees, bool, shape (batch or 1, keys), or None for all.
        position_ids: of the queries, shape (batch or 1, queries), or None for counts.

    Raises:
        PatchError: new tokens stand elsewhere than behind the cached ones, whose positions nobody knows then.
    """
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != num_queries:
        position_ids = None
    new = slice(slots.first, slots.first + num_queries)
    if position_ids is not None and new == slice(0, num_keys):
        return position_ids
    device = None if position_ids is None else position_ids.device
    columns = slots.dropped + torch.arange(num_keys, device=device)[None]
    counts = columns if seen is None else (seen.long().cumsum(dim=-1) - 1).to(columns.device)
    if position_ids is None:
        return counts
    rows = max(len(counts), len(position_ids))
    counts, position_ids = counts.expand(rows, -1), position_ids.expand(rows, -1)
    real = torch.ones_like(position_ids, dtype=torch.bool)
    if seen is not None:
        real = seen[:, new].to(real.device).expand(rows, -1)
    base = columns.expand(rows, -1)
    if slots.first > 0:  # the cache is not empty
        base = _numbered(columns, counts, real, position_ids, slots)
    found = base.clone()
    found[:, new] = torch.where(real, position_ids, base[:, new])
    return found


def _numbered(columns: Tensor, counts: Tensor, real: Tensor, position_ids: Tensor, slots: Slots) -> Tensor:
    """Return columns or counts for each row, whichever its first real new token agrees with."""
    first = real.long().argmax(dim=-1, keepdim=True)
    stated = position_ids.gather(1, first)
    by_column = columns.expand(len(counts), -1).gather(1, first + slots.first)
    by_count = counts.gather(1, first + slots.first)
    wrong = (stated != by_column) & (stated != by_count) & real.any(dim=-1, keepdim=True)
    if not torch.compiler.is_compiling() and bool(wrong.any()):
        raise PatchError(
            f"alibi: a token at position {int(stated[wrong][0])} follows {slots.first + slots.dropped} cached ones, of "
            "which no more than their number is known; where positions are left out, pass the whole sequence without a "
            "cache"
        )
    return torch.where(stated == by_column, columns, counts)
