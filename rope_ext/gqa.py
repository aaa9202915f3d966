"""Fewer key and value heads: those that are to be one are averaged, and a brief training mends what that breaks."""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rope_ext.costs import kv_cache_bytes
from rope_ext.errors import ModelError
from rope_ext.hf import size_of_head
from rope_ext.stock import FAMILIES
from rope_ext.tables import ExtendedRotaryEmbedding

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


def group_key_heads(model: PreTrainedModel, num_key_value_heads: int, *, share: bool = False) -> Grouped:
    """Return the same model with fewer key and value heads; as many as it has give its own weights, bit by bit.

    Args:
        share: let the new model hold the very tensors of the given one where they are alike, for callers that are done
            with that; otherwise it has its own.

    Raises:
        ModelError: the number does not divide the model's, its keys are projected together with queries, it is of a
            family that has not been examined, or it is patched or wrapped by an adapter.
    """
    config = model.config
    _check(model, num_key_value_heads)
    heads = int(config.num_attention_heads)
    before = int(getattr(config, "num_key_value_heads", None) or heads)
    state = cast("nn.Module", model).state_dict()
    changed = copy.deepcopy(config)
    changed.num_key_value_heads = num_key_value_heads
    with torch.device("meta"):  # no memory for weights that are to be replaced
        made = AutoModelForCausalLM.from_config(changed, dtype=model.dtype)
    new: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.split(".")[-2] in PROJECTIONS and before != num_key_value_heads:
            new[name] = mean_of_heads(tensor, num_heads=before, num_groups=num_key_value_heads)
        else:
            new[name] = tensor if share else tensor.detach().clone()
    cast("nn.Module", made).load_state_dict(new, assign=True)
    made.tie_weights()
    _copy_rotation(cast("nn.Module", made), cast("nn.Module", model))
    made.generation_config = copy.deepcopy(model.generation_config)
    made.eval()
    sizes = [
        kv_cache_bytes(
            num_layers=int(config.num_hidden_layers), num_key_value_heads=n, head_dim=size_of_head(config), tokens=1
        )
        for n in (before, num_key_value_heads)
    ]
    return Grouped(model=made, before=before, after=num_key_value_heads, cache_before=sizes[0], cache_after=sizes[1])


def _check(model: PreTrainedModel, num_key_value_heads: int) -> None:
    """Refuse what cannot be grouped.

    Raises:
        ModelError: see `group_key_heads`.
    """
    config, module = model.config, cast("nn.Module", model)
    if any(isinstance(each, ExtendedRotaryEmbedding) for each in module.modules()):
        raise ModelError("gqa: the model is patched; undo the patch, group its heads, and extend it again")
    if any(".base_layer." in name or ".lora_" in name for name, _ in module.named_parameters()):
        raise ModelError("gqa: the model carries an adapter; merge it first (merge_and_unload of peft)")
    if config.model_type not in FAMILIES:
        raise ModelError(f"gqa: family {config.model_type!r} is not supported; known to work: {', '.join(FAMILIES)}")
    before = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if num_key_value_heads < 1 or before % num_key_value_heads:
        allowed = [n for n in range(1, before + 1) if before % n == 0]
        raise ModelError(
            f"gqa: {before} key heads cannot become {num_key_value_heads}; give one of {', '.join(map(str, allowed))}"
        )
    layers = {name.rpartition(".")[0] for name, _ in module.named_modules() if name.split(".")[-1] in PROJECTIONS}
    if len(layers) != int(config.num_hidden_layers):
        raise ModelError(
            f"gqa: {config.model_type} has no k_proj and v_proj of its own in every layer, so that key heads cannot be "
            "told apart; models with separate projections can be converted"
        )


def _copy_rotation(made: nn.Module, model: nn.Module) -> None:
    """Put a copy of each module with buffers that no state holds, as rotary frequencies, in the place of its like.

    Whole modules, as some remember besides for which length they worked their frequencies out.
    """
    for name, module in model.named_modules():
        if module._non_persistent_buffers_set:  # noqa: SLF001  (torch has no public name for them)
            own = copy.deepcopy(module)
            if hasattr(own, "config"):
                own.config = cast("Any", made).config
            made.set_submodule(name, own)
    left = [name for name, tensor in (*made.named_parameters(), *made.named_buffers()) if tensor.is_meta]
    assert not left, left
