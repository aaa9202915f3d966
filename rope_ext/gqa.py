"""Fewer key and value heads: those that are to be one are averaged, and a brief training mends what that breaks."""

import copy
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rope_ext.costs import kv_cache_bytes
from rope_ext.errors import ModelError
from rope_ext.hf import size_of_head

PROJECTIONS = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """What became of a model: the new one, key heads before and after, bytes of cache a token in 16 bits."""

    model: PreTrainedModel
    before: int
    after: int
    cache_before: int
    cache_after: int


def mean_of_heads(weight: Float[Tensor, "rows ..."], *, num_heads: int, num_groups: int) -> Float[Tensor, "fewer ..."]:
    """Return rows in which each run of num_heads / num_groups heads is one head, their mean, computed in fp32.

    [h0 h1 | h2 h3] -> [(h0 + h1) / 2 | (h2 + h3) / 2], since neighbouring query heads share a key head.

    Source: Ainslie et al., GQA (arXiv 2305.13245), section 2.1: mean pooling of the projections, the best of the three
    ways that they compare.
    """
    heads = weight.unflatten(0, (num_groups, num_heads // num_groups, -1))
    return heads.float().mean(dim=1).to(weight.dtype).flatten(0, 1)


def group_key_heads(model: PreTrainedModel, num_key_value_heads: int) -> Grouped:
    """Return the same model with fewer key and value heads; as many as it has give its own weights, bit by bit.

    Raises:
        ModelError: the number does not divide the model's, or its keys are projected together with queries.
    """
    config = model.config
    heads = int(config.num_attention_heads)
    before = int(getattr(config, "num_key_value_heads", None) or heads)
    if num_key_value_heads < 1 or before % num_key_value_heads:
        allowed = [n for n in range(1, before + 1) if before % n == 0]
        raise ModelError(
            f"gqa: {before} key heads cannot become {num_key_value_heads}; give one of {', '.join(map(str, allowed))}"
        )
    state = cast("nn.Module", model).state_dict()
    wanted = [name for name in state if name.split(".")[-2:-1] and name.split(".")[-2] in PROJECTIONS]
    if len({name.rsplit(".", 2)[0] for name in wanted}) != int(config.num_hidden_layers):
        raise ModelError(
            f"gqa: {config.model_type} has no k_proj and v_proj of its own in every layer, so that key heads cannot be "
            "told apart; models with separate projections can be converted"
        )
    changed = copy.deepcopy(config)
    changed.num_key_value_heads = num_key_value_heads
    # transformers' classes build on the default device and dtype
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(changed, dtype=model.dtype)
    cast("nn.Module", made).to_empty(device=model.device)
    new = {
        name: mean_of_heads(tensor, num_heads=before, num_groups=num_key_value_heads) if name in wanted else tensor
        for name, tensor in state.items()
    }
    cast("nn.Module", made).load_state_dict(new, assign=True)
    made.tie_weights()
    _buffers(cast("nn.Module", made), cast("nn.Module", model))
    made.generation_config = model.generation_config
    made.eval()
    sizes = [
        kv_cache_bytes(
            num_layers=int(config.num_hidden_layers), num_key_value_heads=n, head_dim=size_of_head(config), tokens=1
        )
        for n in (before, num_key_value_heads)
    ]
    return Grouped(model=made, before=before, after=num_key_value_heads, cache_before=sizes[0], cache_after=sizes[1])


def _buffers(made: nn.Module, model: nn.Module) -> None:
    """Copy what no state holds, as rotary frequencies: memory without values stands there."""
    own = dict(model.named_buffers())
    for name, buffer in made.named_buffers():
        if name in own and own[name].shape == buffer.shape:
            buffer.copy_(own[name])
