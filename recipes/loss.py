"""The loss of a causal model without its logits: rows of the output head at a time, gradients included.

    hidden states [tokens, width] -> 512 rows -> logits [512, vocabulary] -> loss and gradients -> the next 512

A dense loss holds the logits of every token, their fp32 copy and their gradient: at 4,096 tokens and a vocabulary of
49,152 that is 2.4 GB, whatever the model.
"""

from collections.abc import Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from recipes.load import RecipeError
from recipes.packing import IGNORED


@contextmanager
def loss_without_logits(model: PreTrainedModel, *, rows: int = 512) -> Generator[None]:
    """Let a causal model's forward return a loss and no logits where it is given labels, until the block ends.

    The head's weight is used inside its own forward, where a sharded model has gathered it. The loss is the sum over
    scored tokens, divided by `num_items_in_batch` if that is given (as Trainer does, over all that a step
    accumulates), else by their number: the mean over tokens, equal to the dense loss to fp32's rounding.

    Args:
        rows: of logits at a time.

    Raises:
        RecipeError: the head is no plain linear layer.
    """
    head = _linear_in(cast("nn.Module", model.get_output_embeddings()))
    if not isinstance(head, nn.Linear) or getattr(model.config, "final_logit_softcapping", None):
        raise RecipeError(
            f"model: its output head is {type(head).__name__} or caps its logits; the loss without logits needs a "
            "plain linear layer"
        )
    own_forward, own_head = model.forward, head.forward
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)

    def head_forward(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return own_head(hidden)
        dtype = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
        bias = cast("Tensor | None", self.bias)
        weight = self.weight
        if dtype is not None:
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, reduction="sum", options=options)

    def forward(
        self: PreTrainedModel,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None and shift_labels is None:
            return own_forward(input_ids=input_ids, **kwargs)
        hidden = self.base_model(input_ids=input_ids, **kwargs).last_hidden_state
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # Only what is scored reaches the head
        scored = shift_labels.flatten() != IGNORED
        kept, targets = hidden.flatten(0, 1)[scored], shift_labels.flatten()[scored]
        loss = cast("nn.Module", self.get_output_embeddings())(kept, targets)
        number = num_items_in_batch if num_items_in_batch is not None else max(1, len(targets))
        return CausalLMOutput(loss=loss / number)

    head.forward = MethodType(head_forward, head)
    model.forward = MethodType(forward, model)
    try:
        yield
    finally:
        del model.forward
        del head.forward


def _linear_in(head: nn.Module) -> nn.Module:
    """Return the head itself, or its trained copy inside a wrapper of peft's."""
    copies = getattr(head, "modules_to_save", None)
    active = cast("list[str]", getattr(head, "active_adapters", []))
    return copies[active[0]] if isinstance(copies, nn.ModuleDict) and active else head
