"""What a context costs: bytes of key-value cache, operations of a prefill, from a configuration alone."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from rope_ext.errors import ModelError
from rope_ext.hf import size_of_head
from rope_ext.stock import FAMILIES

BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
"""Bytes a number; fp16 is as bf16, int8 as fp8 (less the scales that go with it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that its costs follow from.

    Attributes:
        parameters: all of them, shared ones once.
        multiplied: those of the matrices in the layers, by which every token is multiplied.
        head: those of the output head, by which a token is multiplied whose successor is asked for.
        looked_up: those of an input embedding of its own, of which a token reads one row.
        windows: of every layer, the tokens that a query sees, its own included; None is all before it.
        has_own_keys: whether keys and values have projections of their own, so that `rope_ext.gqa` can group them.
    """

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    parameters: int
    multiplied: int
    head: int
    looked_up: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    windows: tuple[int | None, ...]
    has_own_keys: bool

    def key_value_heads(self) -> list[int]:
        """Return every number of key heads that the query heads could share, largest first: MHA, GQA, MQA."""
        return [n for n in range(self.num_heads, 0, -1) if self.num_heads % n == 0]

    def fewer_heads(self) -> list[int]:
        """Return the numbers of key heads that `rope_ext.gqa` makes of this model, largest first."""
        now = self.num_key_value_heads
        return [n for n in range(now - 1, 0, -1) if now % n == 0] if self.has_own_keys else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Floating-point operations, two for every multiplication with its addition.

    Attributes:
        products: of the tokens with the weights.
        attention: of queries with keys, and of what they weigh with values.
    """

    products: float
    attention: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.products + self.attention


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Return the sizes of the model that a configuration describes; it is built without memory for its weights.

    Raises:
        ModelError: it is of a family whose costs are not known here, as one with experts, or its sizes contradict.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"costs: {config.model_type!r} is of no family that is counted here; known are {', '.join(FAMILIES)}"
        )
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise ModelError(
            f"costs: {heads} heads cannot share {kv_heads} key heads; the configuration contradicts itself"
        )
    own = copy.deepcopy(config)  # which from_config writes to: a live model would change its attention
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(own, attn_implementation="eager")
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    return ModelShape(
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size_of_head(config),
        parameters=sum(p.numel() for p in model.parameters()),
        multiplied=sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name),
        head=head.numel(),
        looked_up=0 if embedding is head else embedding.numel(),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        vocab_size=head.shape[0],
        windows=windows_of(config),
        has_own_keys=any(name.endswith(".k_proj.weight") for name, _ in model.named_parameters()),
    )


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return of every layer the tokens that a query sees, its own included; None is all before it."""
    layers, window = int(config.num_hidden_layers), getattr(config, "sliding_window", None)
    if window is None:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def kv_cache_bytes(
    *,
    num_layers: int,
    num_key_value_heads: int,
    head_dim: int,
    tokens: int,
    bytes_per_number: int = 2,
    windows: Sequence[int | None] = (),
) -> int:
    """Return the bytes of keys and values of one sequence: 2 x layers x key heads x head_dim x tokens x bytes.

    A layer whose queries see a window alone keeps no more than that many tokens.
    """
    kept = sum(min(tokens, window or tokens) for window in windows or (None,) * num_layers)
    return 2 * num_key_value_heads * head_dim * kept * bytes_per_number


def prefill_operations(shape: ModelShape, tokens: int) -> Operations:
    """Return what it takes to read a prompt of `tokens` tokens and to predict the next one.

    Attention is causal: a query meets its own key and those before it within its layer's window, and nothing is spent
    on others, as flash-attention's kernels do it. Norms, activations, the softmax and the rotation are left out.

    Source: Kaplan et al. (arXiv 2001.08361), section 2.1, with causal attention and the head for the last token alone.
    """
    return Operations(
        products=2.0 * (shape.multiplied * tokens + shape.head),
        attention=4.0 * shape.num_heads * shape.head_dim * sum(_pairs(tokens, window) for window in shape.windows),
    )


def _pairs(tokens: int, window: int | None) -> float:
    """Return how many pairs of a query and a key it sees there are."""
    near = min(tokens, window or tokens)
    return near * (near + 1) / 2 + float(tokens - near) * near


def decode_operations(shape: ModelShape, tokens: int) -> Operations:
    """Return what it takes to make one token behind `tokens` cached ones: every weight once, and every key once.

    Source: as `prefill_operations`; the new token meets the cached keys and its own.
    """
    seen = sum(min(tokens + 1, window or tokens + 1) for window in shape.windows)
    return Operations(
        products=2.0 * (shape.multiplied + shape.head),
        attention=4.0 * shape.num_heads * shape.head_dim * seen,
    )


def logits_bytes(shape: ModelShape, tokens: int, *, bytes_per_number: int = 4) -> int:
    """Return the bytes of the logits of so many tokens: tokens x vocabulary x bytes."""
    return tokens * shape.vocab_size * bytes_per_number


def activation_bytes(shape: ModelShape, tokens: int, *, bytes_per_number: int = 2) -> int:
    """Return the bytes that a forward without gradients holds at its widest point, for so many tokens at once.

    The residual stream and its norm, and what is wider of attention (queries, keys, values, the result) and the
    feed-forward layer (gate, up, their product); attention itself is taken as one that makes no matrix of scores.
    """
    attention = (2 * shape.num_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    return tokens * bytes_per_number * (2 * shape.hidden_size + max(attention, 3 * shape.intermediate_size))
