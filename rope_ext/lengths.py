"""What a model needs around its rotary module when frequencies follow the current length: rows, caches, generate()."""

import inspect
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from rope_ext.errors import PatchError
from rope_ext.tables import ExtendedRotaryEmbedding

PREPARE, GENERATE = "prepare_inputs_for_generation", "generate"
CACHES = ("cache", "past_key_values")
"""What transformers calls the cache, in this version and before."""
MADE_WITH = "_rope_ext_made_with"
"""The attribute of a cache that holds the frequency key of each row that its keys were rotated under."""


def row_positions(
    mask: Bool[Tensor, "rows keys"], position_ids: Int[Tensor, "_ queries"] | None, num_queries: int
) -> Int[Tensor, "rows queries"]:
    """Return positions of the last `num_queries` tokens of each row, such that the largest is that of a real token.

    Padding on the left counts nothing, padding on the right repeats the last token's position: the largest position
    plus one is then the row's own length, whatever stands beside it in the batch. Masked tokens between real ones
    keep their places, as in stock code.

        mask [0 0 1 1 1] -> [0 0 0 1 2]        mask [1 1 1 0 0] -> [0 1 2 2 2]        mask [1 0 1] -> [0 1 2]
    """
    column = torch.arange(mask.shape[1], device=mask.device)
    if position_ids is None:
        first = torch.where(mask, column, mask.shape[1]).amin(dim=-1, keepdim=True)
        last = torch.where(mask, column, -1).amax(dim=-1, keepdim=True)
        return (torch.minimum(column, last) - first).clamp_min(0)[:, -num_queries:]
    real = mask[:, -num_queries:]
    positions = position_ids.expand(len(mask), -1)
    first = positions.masked_fill(~real, torch.iinfo(positions.dtype).max).amin(dim=-1, keepdim=True)
    first = torch.where(real.any(dim=-1, keepdim=True), first, positions.amin(dim=-1, keepdim=True))
    return torch.where(real, positions, torch.where(real, positions, first).cummax(dim=-1).values)


def _table_in(module: nn.Module) -> ExtendedRotaryEmbedding | None:
    """Return the rotary module in effect if its frequencies follow the length."""
    tables = [child for child in module.children() if isinstance(child, ExtendedRotaryEmbedding)]
    return next((table for table in tables if not table.is_static), None)


def _cache_of(given: dict[str, Any]) -> Any:
    """Return the cache among the arguments if it holds anything."""
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    return cache if cache is not None and cache.get_seq_length() > 0 else None


def positions_from_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the arguments of the model's forward with positions as `row_positions` has them: a forward pre-hook.

    Stock code numbers the columns, padding and all, so that a short row would get a longer one's frequencies.

    Raises:
        PatchError: rows may be of unequal length and nothing says how long each is, or the cache that is given was
            made with other frequencies.
    """
    table = _table_in(module)
    if table is None:
        return args, kwargs
    given: dict[str, Any] = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
    mask, tokens, positions = given.get("attention_mask"), given.get("input_ids"), given.get("position_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return args, kwargs
    if positions is not None and (positions.ndim != 2 or positions.is_floating_point()):
        raise PatchError(
            f"{table.method.name}: position_ids of shape {tuple(positions.shape)} in {positions.dtype}; they must be "
            "whole numbers of shape (rows, tokens)"
        )
    cache, num_new = _cache_of(given), tokens.shape[1]
    end = num_new + (cache.get_seq_length() if cache is not None else 0)
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= end:
        given["position_ids"] = row_positions(mask[:, :end].bool(), positions, num_new)
    elif mask is not None and positions is None and len(tokens) > 1 and end > table.geometry.original_context:
        raise PatchError(
            f"{table.method.name}: the length of each row follows from a 2-D attention mask or from position_ids; this "
            "batch comes with neither: give position_ids"
        )
    if cache is not None:
        positions = given.get("position_ids")
        positions = torch.arange(end - num_new, end)[None] if positions is None else positions
        if is_foreign(table, cache, positions):
            raise PatchError(table.stale_cache_words(int(positions[:, 0].max()), int(positions[:, -1].max()) + 1))
    return (), given


def keys_of(table: ExtendedRotaryEmbedding, positions: Int[Tensor, "rows queries"]) -> tuple[Hashable, ...]:
    """Return the frequency key of each row, whose length is its last position plus one."""
    return tuple(table.frequency_key(last + 1) for last in positions[:, -1].tolist())


def is_foreign(table: ExtendedRotaryEmbedding, cache: Any, positions: Int[Tensor, "rows queries"]) -> bool:
    """Return whether any row's cached keys were rotated under another frequency key than the row has now.

    A cache remembers what it was made with, so that cropping it hides nothing; of one that came from elsewhere only
    the number of its tokens can be asked.
    """
    now = keys_of(table, positions)
    made_with = cast("tuple[Hashable, ...] | None", getattr(cache, MADE_WITH, None))
    if made_with is None:
        return any(table.is_stale(int(start), int(last) + 1) for start, last in positions[:, [0, -1]].tolist())
    if len(made_with) == len(now):
        return made_with != now
    return set(made_with) != set(now) or len(set(now)) > 1  # rows were repeated, as for beams


def remember_keys(module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Write into the cache that a forward filled under which frequencies: a forward hook, after the one above."""
    table = _table_in(module)
    # Asked as a dictionary, which holds what is there: as an attribute the older name would be warned about
    cache = next((output[name] for name in CACHES if isinstance(output, dict) and name in output), None)
    positions = kwargs.get("position_ids")
    if table is None or cache is None:
        return
    if positions is None:  # stock code numbered them from what the cache held
        positions = torch.tensor([[0, cache.get_seq_length() - 1]])
    setattr(cache, MADE_WITH, keys_of(table, positions))


class PrepareInputs:
    """`model.prepare_inputs_for_generation`, passing the whole sequence wherever its cache is of no use.

    Cached keys alone could be rotated anew, but not what deeper layers computed from them: only the whole sequence
    gives what a forward without a cache gives.
    """

    def __init__(self, model: PreTrainedModel, parent: nn.Module, table: ExtendedRotaryEmbedding) -> None:
        self.own: Callable[..., dict[str, Any]] = getattr(model, PREPARE)
        self.parent, self.table = parent, table

    @property
    def __signature__(self) -> inspect.Signature:
        """What transformers checks a caller's keywords against; no attribute, as some defaults cannot be pickled."""
        return inspect.signature(self.own)

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the keywords of the model's forward.

        Raises:
            PatchError: the sequence cannot be passed again, because it began as embeddings.
        """
        inputs = self.own(input_ids, *args, **kwargs)
        positions, cache = inputs.get("position_ids"), _cache_of(inputs)
        if _table_in(self.parent) is not self.table or positions is None or cache is None:
            return inputs
        if not is_foreign(self.table, cache, positions):
            return inputs
        if kwargs.get("inputs_embeds") is not None:
            raise PatchError(
                f"{self.table.method.name}: the sequence outgrows the frequencies of its cache, and began as "
                "embeddings, which generate() does not keep to pass again; give input_ids alone"
            )
        if input_ids.shape[1] != cache.get_seq_length() + positions.shape[1]:
            return inputs  # not the whole sequence, as in chunked prefill: the module itself refuses
        name = next(name for name in CACHES if name in inputs)
        return self.own(input_ids, *args, **{**kwargs, name: None, "next_sequence_length": None})


class Generate:
    """`model.generate`, without the modes that look at several tokens in one forward."""

    def __init__(self, model: PreTrainedModel, parent: nn.Module, table: ExtendedRotaryEmbedding) -> None:
        self.own: Callable[..., Any] = getattr(model, GENERATE)
        self.model, self.parent, self.table = model, parent, table

    @property
    def __signature__(self) -> inspect.Signature:
        """What transformers checks a caller's keywords against; no attribute, as some defaults cannot be pickled."""
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own generate returns.

        Raises:
            PatchError: assisted decoding is asked for, whose tokens each have frequencies of their own.
        """
        asked = cast("GenerationConfig", kwargs.get("generation_config") or self.model.generation_config)
        names = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
        found = [n for n in names if kwargs.get(n) is not None or getattr(asked, n, None) is not None]
        if found and _table_in(self.parent) is self.table:
            raise PatchError(
                f"{self.table.method.name}: {found[0]} scores several tokens in one forward, but each has frequencies "
                "of its own; decode without an assistant"
            )
        return self.own(*args, **kwargs)


class LengthFollowing:
    """What makes rows, caches and `generate` right for a table whose frequencies follow the length, until `undo`.

    Attributes:
        generator: the transformers model that generates, inside a wrapper or not; None of a model without a head.
    """

    def __init__(self, model: nn.Module, parent: nn.Module, table: ExtendedRotaryEmbedding) -> None:
        models = (m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, PREPARE))
        self.generator: PreTrainedModel | None = next(models, None)
        self._hooks = (
            parent.register_forward_pre_hook(positions_from_mask, with_kwargs=True),
            parent.register_forward_hook(remember_keys, with_kwargs=True),
        )
        self._before: dict[str, Any] = {}
        if self.generator is not None:
            own = {PREPARE: PrepareInputs, GENERATE: Generate}
            self._before = {name: self.generator.__dict__.get(name) for name in own}
            for name, wrapper in own.items():
                setattr(self.generator, name, wrapper(self.generator, parent, table))

    def undo(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()
        for name, before in self._before.items():
            self.generator.__dict__.pop(name, None)
            if before is not None:
                setattr(self.generator, name, before)
