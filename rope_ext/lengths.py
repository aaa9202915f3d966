"""What a model needs around its rotary module when frequencies follow the current length: rows, and generate()."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_ext.errors import PatchError
from rope_ext.tables import ExtendedRotaryEmbedding

PREPARE = "prepare_inputs_for_generation"


def row_positions(
    mask: Bool[Tensor, "rows keys"], position_ids: Int[Tensor, "_ queries"] | None, num_queries: int
) -> Int[Tensor, "rows queries"]:
    """Return positions of the last `num_queries` tokens of each row, such that the largest is that of a real token.

    Padding on the left counts nothing, padding on the right repeats the last token's position: the largest position
    plus one is then the row's own length, whatever stands beside it in the batch.

        mask [0 0 1 1 1] -> [0 0 0 1 2]        mask [1 1 1 0 0] -> [0 1 2 2 2]
    """
    if position_ids is None:
        return (mask.long().cumsum(dim=-1) - 1).clamp_min(0)[:, -num_queries:]
    real = mask[:, -num_queries:]
    positions = position_ids.expand(len(mask), -1)
    first = positions.masked_fill(~real, torch.iinfo(positions.dtype).max).amin(dim=-1, keepdim=True)
    first = torch.where(real.any(dim=-1, keepdim=True), first, 0)
    return torch.where(real, positions, torch.where(real, positions, first).cummax(dim=-1).values)


def positions_from_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the arguments of the model's forward with positions as `row_positions` has them: a forward pre-hook.

    Stock code numbers the columns, padding and all, so that a short row would get a longer one's frequencies.
    """
    if all(table.is_static for table in module.children() if isinstance(table, ExtendedRotaryEmbedding)):
        return args, kwargs
    given: dict[str, Any] = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
    mask, tokens = given.get("attention_mask"), given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if isinstance(mask, Tensor) and mask.ndim == 2 and tokens is not None and mask.shape[1] >= tokens.shape[1]:
        given["position_ids"] = row_positions(mask.bool(), given.get("position_ids"), tokens.shape[1])
    return (), given


class PrepareInputs:
    """`model.prepare_inputs_for_generation`, passing the whole sequence wherever its cache is stale.

    Cached keys alone could be rotated anew, but not what deeper layers computed from them: only the whole sequence
    gives what a forward without a cache gives.
    """

    def __init__(self, model: PreTrainedModel, table: ExtendedRotaryEmbedding) -> None:
        self.own: Callable[..., dict[str, Any]] = getattr(model, PREPARE)
        self.table = table
        self.cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.__signature__ = inspect.signature(self.own)

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the keywords of the model's forward.

        Raises:
            PatchError: several tokens at once would follow a stale cache, as in assisted decoding.
        """
        inputs = self.own(input_ids, *args, **kwargs)
        positions, cache = inputs.get("position_ids"), inputs.get(self.cache)
        if positions is None or cache is None or cache.get_seq_length() == 0:
            return inputs
        ends = zip(positions[:, 0].tolist(), (positions[:, -1] + 1).tolist(), strict=True)
        whole = input_ids.shape[1] == cache.get_seq_length() + positions.shape[1]
        if not whole or not any(self.table.is_stale(*pair) for pair in ends):
            return inputs  # of a sequence that is not whole the module itself refuses a stale cache
        if positions.shape[1] > 1:
            raise PatchError(
                f"{self.table.method.name}: several tokens at once follow a cache, as in assisted decoding, but each "
                "has frequencies of its own; decode one token at a time"
            )
        return self.own(input_ids, *args, **{**kwargs, self.cache: None, "next_sequence_length": None})


class LengthFollowing:
    """What makes rows and `generate` right for a table whose frequencies follow the current length, until `undo`.

    Attributes:
        generator: the transformers model that generates, inside a wrapper or not; None of a model without a head.
    """

    def __init__(self, model: nn.Module, parent: nn.Module, table: ExtendedRotaryEmbedding) -> None:
        models = (m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, PREPARE))
        self.generator: PreTrainedModel | None = next(models, None)
        self._hook = parent.register_forward_pre_hook(positions_from_mask, with_kwargs=True)
        if self.generator is not None:
            self._before: PrepareInputs | None = self.generator.__dict__.get(PREPARE)
            setattr(self.generator, PREPARE, PrepareInputs(self.generator, table))

    def undo(self) -> None:
        """Leave the model as it was found."""
        self._hook.remove()
        if self.generator is not None:
            self.generator.__dict__.pop(PREPARE, None)
            if self._before is not None:
                setattr(self.generator, PREPARE, self._before)
