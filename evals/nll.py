"""The one engine under every perplexity: ids in, nats per token out, in bounded memory.

    hidden states    C tokens at a time over the key-value cache, attention causal from the bottom right
    output head      R rows at a time, in fp32
    sums             float64

What remains is the cache itself, 2 x layers x key heads x head_dim x tokens numbers: no chunking avoids it.
"""

import inspect
import os
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from evals.errors import EvalError

MEMORY_BUDGET = 2 * 2**30
"""Bytes for the activations and logits of one forward, besides weights and cache."""
GROUPED = "TRANSFORMERS_SDPA_FORCE_GQA"
ROWS_PER_CHUNK = 512
"""The most rows of logits at a time; more are no faster."""


def always_the_same(_length: int) -> Hashable:
    """Return the frequency key of an ordinary model, whose frequencies do not depend on the length."""
    return None


@torch.inference_mode()
def token_nll(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    last: int | None = None,
    frequency_key: Callable[[int], Hashable] = always_the_same,
    memory_budget: int = MEMORY_BUDGET,
) -> Tensor:
    """Return the NLL of the last ids given all before them: float64 on the CPU, nats, shape (last,).

    Args:
        ids: of one sequence, BOS included if there is to be one.
        last: how many ids to score; all but the first by default. Only their rows reach the output head.
        frequency_key: what the frequencies depend on at a length. The sequence is computed in chunks only where all of
            them share one key, and in one piece otherwise, whatever the budget.
        memory_budget: bytes for activations and logits; what does not fit is done in chunks.

    Raises:
        EvalError: fewer than two ids, `last` out of range, a budget below one row of logits, or a loss that is not
            finite.
    """
    if len(ids) < 2:
        raise EvalError(f"nll: {len(ids)} ids leave nothing to predict; give at least 2")
    last = len(ids) - 1 if last is None else last
    if not 1 <= last <= len(ids) - 1:
        raise EvalError(f"nll: {last} of {len(ids)} ids cannot be scored; the first has nothing before it")
    chunk = tokens_per_chunk(
        model.config, itemsize_of(model), len(ids), memory_budget, whole=computes_whole_rows(model)
    )
    ends = [*range(chunk, len(ids), chunk), len(ids)]
    if len({frequency_key(end) for end in ends}) > 1:
        ends = [len(ids)]
    tokens = torch.tensor([ids], device=model.device)
    head = cast("nn.Module", model.get_output_embeddings())
    rows = rows_per_chunk(model.config, itemsize_of(model), memory_budget)
    first_scored = len(ids) - last
    parts: list[Tensor] = []
    for start, end, hidden in _hidden(model, tokens, ends):
        # Row i predicts token i + 1
        low, high = max(start, first_scored - 1), min(end, len(ids) - 1)
        if low < high:
            wanted = hidden[0, low - start : high - start]
            parts += _cross_entropy(head, wanted, tokens[0, low + 1 : high + 1], rows)
    nll = torch.cat(parts)
    if not torch.isfinite(nll).all():
        position = first_scored + int((~torch.isfinite(nll)).nonzero()[0])
        raise EvalError(f"nll: the loss of the token at position {position} is not finite")
    return nll


def _hidden(model: PreTrainedModel, tokens: Tensor, ends: list[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, end, hidden states of tokens start..end), over a cache if there is more than one piece."""
    base = model.base_model
    if len(ends) == 1:
        yield 0, ends[0], base(input_ids=tokens, use_cache=False).last_hidden_state
        return
    name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    for start, end in pairwise([0, *ends]):
        with grouped_heads(tokens.device):
            out = base(input_ids=tokens[:, start:end], use_cache=True, **{name: cache})
        yield start, end, out.last_hidden_state


@contextmanager
def grouped_heads(device: torch.device) -> Generator[None]:
    """Let attention read each key head once for all its query heads, during a forward over a cache on a CPU.

    Under a mask transformers copies the keys for every query head unless its switch says otherwise. The result is the
    same bit for bit; on a GPU the copies are what the fast kernels need.
    """
    if device.type != "cpu" or GROUPED in os.environ:
        yield
        return
    os.environ[GROUPED] = "1"
    try:
        yield
    finally:
        os.environ.pop(GROUPED, None)


def _cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor, rows: int) -> list[Tensor]:
    return [
        F.cross_entropy(head(part).float(), wanted, reduction="none").double().cpu()
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]


@torch.inference_mode()
def batch_nll(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, memory_budget: int = MEMORY_BUDGET
) -> list[Tensor]:
    """Return the NLL of ids 1.. of each row, as `token_nll` does one by one, from one forward over all of them.

    Rows of unequal length are padded on the right and masked; padding is never scored.

    Raises:
        EvalError: no rows, a row of fewer than two ids, or a loss that is not finite.
    """
    if not rows or min(len(row) for row in rows) < 2:
        raise EvalError("nll: a batch needs at least one row, and each row at least 2 ids")
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
    sizes = torch.tensor([len(row) for row in rows], device=model.device)
    mask = (torch.arange(longest, device=model.device) < sizes[:, None]).long()
    ragged = {} if bool(mask.all()) else {"attention_mask": mask}
    hidden = model.base_model(input_ids=ids, use_cache=False, **ragged).last_hidden_state
    head = cast("nn.Module", model.get_output_embeddings())
    chunk = rows_per_chunk(model.config, itemsize_of(model), memory_budget)
    out: list[Tensor] = []
    for number, row in enumerate(rows):
        parts = _cross_entropy(head, hidden[number, : len(row) - 1], ids[number, 1 : len(row)], chunk)
        nll = torch.cat(parts)
        if not torch.isfinite(nll).all():
            raise EvalError(f"nll: a loss in row {number} of the batch is not finite")
        out.append(nll)
    return out


def rows_per_chunk(config: PretrainedConfig, itemsize: int, memory_budget: int) -> int:
    """Return how many rows of logits fit into half of the budget, at most `ROWS_PER_CHUNK`.

    A row is held in the model's dtype, in fp32, and once more as the softmax's own copy.

    Raises:
        EvalError: not one row fits.
    """
    row = int(config.vocab_size) * (itemsize + 4 + 4)
    rows = memory_budget // 2 // row
    if rows < 1:
        raise EvalError(f"memory budget: {memory_budget} bytes hold no row of {config.vocab_size} logits; {2 * row} do")
    return min(ROWS_PER_CHUNK, rows)


def tokens_per_chunk(
    config: PretrainedConfig,
    itemsize: int,
    num_tokens: int,
    memory_budget: int,
    *,
    most: int | None = None,
    whole: bool = False,
) -> int:
    """Return how many tokens one forward may take for its activations to fit into half of the budget, at least 1.

    Args:
        num_tokens: of the longest sequence.
        most: the largest answer; by default `num_tokens`, more makes room for several rows.
        whole: whether a sequence in one piece needs neither mask nor scores, see `computes_whole_rows`.

    Counted for each token: the residual stream and its copies (6 x width), the three feed-forward vectors, queries,
    keys, values and what comes out of attention; a row of the attention mask with its fp32 form; and where attention
    is written out (eager), a row of scores of every head with its fp32 form.
    """
    heads, width, head_dim = int(config.num_attention_heads), int(config.hidden_size), _head_dim(config)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    numbers = 6 * width + 3 * int(config.intermediate_size) + (3 * heads + 2 * kv_heads) * head_dim
    if whole and itemsize * numbers * num_tokens <= memory_budget // 2:
        return num_tokens
    token = itemsize * numbers + 5 * num_tokens
    if getattr(config, "_attn_implementation", None) == "eager":
        token += heads * (itemsize + 4) * num_tokens
    return max(1, min(most or num_tokens, memory_budget // 2 // token))


def computes_whole_rows(model: PreTrainedModel) -> bool:
    """Return whether attention over a whole sequence makes no number for each pair of tokens: no mask, no scores.

    Not so where it is written out (eager) or looks back a window only. On a GPU, torch's kernel for fp32, and any that
    it has before Ampere, takes no grouped heads: transformers asks for them where there is no mask, and all scores are
    made.
    """
    config, device = model.config, model.device
    if config._attn_implementation == "eager" or getattr(config, "sliding_window", None) is not None:  # noqa: SLF001
        return False
    grouped = int(getattr(config, "num_key_value_heads", None) or 0) not in {0, int(config.num_attention_heads)}
    if device.type != "cuda" or config._attn_implementation != "sdpa" or not grouped:  # noqa: SLF001
        return True
    return itemsize_of(model) == 2 and torch.cuda.get_device_capability(device) >= (8, 0)


def cache_bytes_per_token(config: PretrainedConfig, itemsize: int) -> int:
    """Return the bytes of the keys and values of one token: 2 x layers x key heads x head_dim numbers."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return 2 * int(config.num_hidden_layers) * kv_heads * _head_dim(config) * itemsize


def itemsize_of(model: PreTrainedModel) -> int:
    """Return the bytes of one number of the model's dtype."""
    return torch.empty(0, dtype=model.dtype).element_size()


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or int(config.hidden_size) // int(config.num_attention_heads))
