"""The loss of a causal model without its logits: rows of the output head at a time, gradients included.

    hidden states [tokens, width] -> 512 rows -> logits [512, vocabulary] -> loss and gradients -> the next 512

A dense loss holds the logits of every token, their fp32 copy and their gradient: at 4,096 tokens and a vocabulary of
49,152 that is 2.4 GB, whatever the model. torch's own `linear_cross_entropy` does the same in fp32, but sums in the
dtype of its input: in bf16 it was a third too low at 131,072 tokens.
"""

from collections.abc import Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from recipes.load import RecipeError
from recipes.packing import IGNORED


class _SummedCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy of a linear head in nats; gradients are made with the loss, while logits are there.

    Loss and the weight's gradient are summed in fp32 at least, whatever the dtype of the products.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int) -> Tensor:
        wants = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants[2] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                part, wanted = hidden[start : start + rows], targets[start : start + rows, None]
                logs = torch.log_softmax(F.linear(part, weight, bias), dim=-1, dtype=torch.float32)
                total -= logs.gather(1, wanted).sum().double()
                # What a token's logits should change by: its probabilities, less 1 at the right one
                change = logs.exp_()
                change.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
                if of_bias is not None:
                    of_bias += change.sum(0)
                change = change.to(hidden.dtype)
                if of_hidden is not None:
                    torch.mm(change, weight, out=of_hidden[start : start + rows])
                if of_weight is not None and weight.dtype == torch.float32:
                    of_weight.addmm_(change.T, part)
                elif of_weight is not None:
                    of_weight += change.T @ part
                del logs, change  # or they would lie beside the next rows'
        ctx.gradients = (of_hidden, of_weight, of_bias)
        ctx.dtype = weight.dtype
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (as documented)
        of_hidden, of_weight, of_bias = (None if g is None else g.mul_(outer[0]) for g in ctx.gradients)
        ctx.gradients = ()
        weight, bias = (None if g is None else g.to(ctx.dtype) for g in (of_weight, of_bias))
        return of_hidden, weight, bias, None, None


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, rows: int = 512
) -> Tensor:
    """Return the sum over tokens of the cross-entropy of `hidden @ weight.T + bias`, in nats, as an fp32 scalar.

    No more than `rows` rows of logits exist at a time. Backward may run once.

    Args:
        hidden: (tokens, width).
        weight: (vocabulary, width), in the same dtype.
        targets: (tokens,), each a row of the weight.
    """
    return cast("Tensor", _SummedCrossEntropy.apply(hidden, weight, bias, targets, rows))


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

    def head_forward(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return own_head(hidden)
        dtype = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
        bias = cast("Tensor | None", self.bias)
        weight = self.weight
        if dtype is not None:
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return summed_cross_entropy(hidden, weight, targets, bias=bias, rows=rows)

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
        # With a cache transformers does not look for borders between documents
        kwargs["use_cache"] = False
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
