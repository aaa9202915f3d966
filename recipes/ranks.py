"""Several processes on one comparison, as `torchrun` or `accelerate launch` start them: who does what, and agreement.

Results do not pass between processes but lie on disk, a shard a process; only names and errors are exchanged.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

T = TypeVar("T")
_LONGEST_WAIT = timedelta(days=30)
"""One process may be at work for long after another has finished."""


class Ranks(NamedTuple):
    """This process's number and how many there are."""

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prepares, merges and prints."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """Return this process's share of things numbered in one order everywhere: every world-th of them."""
        return list(items[self.rank :: self.world])


ALONE = Ranks()


def join() -> Ranks:
    """Return this process's place among those that were started together; alone without a launcher.

    Each takes the GPU of its local number. Names and errors pass over gloo, on the CPU; training on GPUs exchanges
    gradients over NCCL.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return ALONE
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, timeout=_LONGEST_WAIT)
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def leave(ranks: Ranks) -> None:
    """Part from the other processes at the end."""
    if ranks.world > 1 and distributed.is_initialized():
        distributed.destroy_process_group()


def gather(ranks: Ranks, value: T) -> list[T]:
    """Return what every process gave, by rank: also a point that all reach before any goes on."""
    if ranks.world == 1:
        return [value]
    found: list[Any] = [None] * ranks.world
    distributed.all_gather_object(found, value)
    return found


class ToldElsewhereError(Exception):
    """Something failed that the first process reports; this one has nothing to add."""


def once(ranks: Ranks, act: Callable[[], T]) -> T:
    """Return what the first process got from `act`, which no other runs.

    Raises:
        Exception: what it raised, in the first process; `ToldElsewhereError` in the others.
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    if ranks.is_first:
        try:
            outcome = (act(), None)
        except Exception as error:  # noqa: BLE001  (raised again below, by all)
            outcome = (None, error)
    value, error = gather(ranks, outcome)[0]
    _raise(ranks, error)
    return value  # pyright: ignore[reportReturnType]  (there is a value where there is no error)


def everywhere(ranks: Ranks, act: Callable[[], T]) -> T:
    """Return what `act` gives this process, once it has succeeded in all of them.

    Raises:
        Exception: what one of them raised, in the first process; `ToldElsewhereError` in the others.
    """
    value: T | None = None
    failed: Exception | None = None
    try:
        value = act()
    except Exception as error:  # noqa: BLE001  (raised again below, by all)
        failed = error
    _raise(ranks, next((error for error in gather(ranks, failed) if error is not None), None))
    return value  # pyright: ignore[reportReturnType]  (there is a value where there is no error)


def _raise(ranks: Ranks, error: Exception | None) -> None:
    if error is None:
        return
    if ranks.is_first:
        raise error
    raise ToldElsewhereError from error
