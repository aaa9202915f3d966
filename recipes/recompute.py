"""Activations recomputed in the backward pass instead of kept: all of a layer's, or what costs next to nothing.

what a layer keeps for the backward pass, in widths of the model:
nothing recomputed       norms, projections, rotated heads, gates, their product ...   about 20
keep: products           what matrix products and attention put out                    about 10
keep: nothing            the layer's input                                             1, and a third more work
"""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from recipes.load import RecipeError
from recipes.tuning import ActivationCheckpointing

_ATEN = torch.ops.aten
PRODUCTS = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,  # noqa: SLF001  (torch has no public names for its kernels)
    _ATEN._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    _ATEN._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
]
"""The operations whose results `keep: products` does not make again."""


@contextmanager
def recomputed_activations(model: PreTrainedModel, asked: ActivationCheckpointing | None) -> Generator[None]:
    """Let a model recompute activations as a recipe asks, until the block ends.

    Raises:
        RecipeError: this transformers recomputes all layers or none.
    """
    if asked is None:
        yield
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if asked.keep == "products":
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(kwargs, every_n_layers=asked.every_n_layers, offload=asked.offload)
    elif asked.every_n_layers == 1 and not asked.offload:
        model.gradient_checkpointing_enable(kwargs)
    else:
        raise RecipeError(
            "train.activation_checkpointing: every_n_layers and offload need a newer transformers (5.24 has them); "
            "leave them out, or upgrade"
        )
    try:
        yield
    finally:
        disable = getattr(model, "activation_checkpointing_disable", None)
        (disable or model.gradient_checkpointing_disable)()
