"""What stock transformers makes of a configuration, and the configuration that makes it build a given table."""

import copy
import importlib
import math
from typing import NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig

from rope_ext.errors import ExportError, MethodError
from rope_ext.plan import RopeParameters, general_rope_parameters, spell
from rope_ext.tables import ExtendedRotaryEmbedding

# model_type -> the rotary module of its stock code; each family is proven by tests/hf/test_families.py
FAMILIES = {
    "gemma": "gemma.modeling_gemma.GemmaRotaryEmbedding",
    "llama": "llama.modeling_llama.LlamaRotaryEmbedding",
    "mistral": "mistral.modeling_mistral.MistralRotaryEmbedding",
    "phi3": "phi3.modeling_phi3.Phi3RotaryEmbedding",
    "qwen2": "qwen2.modeling_qwen2.Qwen2RotaryEmbedding",
    "qwen3": "qwen3.modeling_qwen3.Qwen3RotaryEmbedding",
}
NO_STOCK_TYPE = "rope-ext"
"""The rope_type of a live configuration that no stock code can build, so that a plain save of it fails to load."""


# The last is at the top of some families' configurations (Phi-3), where it wins over the one among the parameters.
IN_STEP = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
"""What a configuration says of positions, which a patch changes together."""


class StockFrequencies(NamedTuple):
    """What a stock rotary module turns by at one length."""

    inv_freq: Float[Tensor, " pairs"]
    attention_scale: float


class StockForm(NamedTuple):
    """How a table is written for stock readers.

    `window` is the one to store beside the parameters; stock code agrees with the table at `lengths`, and `exact` says
    whether that is everywhere.
    """

    parameters: RopeParameters
    window: int
    lengths: tuple[int, ...]
    exact: bool = True


def stock_frequencies(config: PretrainedConfig, seq_len: int) -> StockFrequencies:
    """Return inv_freq, fp32, rad/token, shape (head_dim/2,), and the scale on cos and sin, of a new stock module.

    The module is run over one sequence of `seq_len` tokens, which matters to the types that follow the length.
    """
    module, _, name = FAMILIES[config.model_type].rpartition(".")
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    rotary = cast("nn.Module", kind(copy.deepcopy(config)))
    rotary(torch.zeros(1, 1, 1), torch.tensor([[seq_len - 1]]))
    return StockFrequencies(cast("Tensor", rotary.inv_freq), float(cast("float", rotary.attention_scaling)))


def frequencies_agree(one: Tensor, other: Tensor) -> bool:
    """Return whether two frequency vectors are one formula rounded in different places: within 1e-6, relative."""
    return torch.allclose(one, other, rtol=1e-6, atol=0.0)


def disagreement(config: PretrainedConfig, table: ExtendedRotaryEmbedding, lengths: tuple[int, ...]) -> str | None:
    """Return in words where stock code would read something else from a configuration than the table holds, or None."""
    for length in lengths:
        stock, plan = stock_frequencies(config, length), table.plan_at(length)
        scales_agree = math.isclose(stock.attention_scale, plan.attention_scale, rel_tol=1e-6)
        if not (scales_agree and frequencies_agree(stock.inv_freq, plan.inv_freq)):
            worst = ((stock.inv_freq - plan.inv_freq).abs() / plan.inv_freq.abs().clamp_min(1e-30)).max().item()
            return (
                f"other frequencies (up to {worst:.1e} apart) or scale ({stock.attention_scale:g}, not "
                f"{plan.attention_scale:g}) at {length} tokens"
            )
    return None


def with_form(config: PretrainedConfig, form: StockForm) -> PretrainedConfig:
    """Return the configuration with other rope parameters and another window, read anew as a loader would.

    Raises:
        ValueError: the family's configuration refuses the parameters, as Phi-3's does every type but longrope.
    """
    values = copy.deepcopy(config.to_dict())
    values |= {"rope_parameters": dict(form.parameters), "max_position_embeddings": form.window}
    stated = form.parameters.get("original_max_position_embeddings")
    if "original_max_position_embeddings" in values and stated is not None:
        values["original_max_position_embeddings"] = stated  # at the top it wins over the one among the parameters
    return type(config).from_dict(values)


def parameters_in_step(config: PretrainedConfig, table: ExtendedRotaryEmbedding) -> RopeParameters:
    """Return stock parameters that say what the table does: the method's own, or the general form if those do not.

    The method's own may not fit, for instance over a base that is itself scaled. A configuration that says something
    else than the module would make `save_pretrained` write another model than the one that was measured. Where stock
    code cannot follow, the configuration names the method under a type that stock code refuses to load.

    """
    geometry, context = table.geometry, table.context
    if table.plan.alibi_slopes is not None:
        return own_form(config, table).parameters
    own = _own_parameters(config, table)
    if own and own["rope_type"] == "dynamic":
        own = None  # it may agree in a new module, and keeps state in every one
    if own and _agrees(config, table, StockForm(own, context, telling_lengths(table))):
        return own
    if table.is_static and bool((table.plan.inv_freq > 0).all()):
        general = _whole(config, general_rope_parameters(geometry, table.plan, context=context))
        if _agrees(config, table, StockForm(general, context, telling_lengths(table))):
            return general
    return own_form(config, table).parameters


def own_form(config: PretrainedConfig, table: ExtendedRotaryEmbedding) -> StockForm:
    """Return a form under a type that stock code refuses to load; `rope_ext.load` reads the method beside it."""
    parameters: RopeParameters = {
        "rope_type": NO_STOCK_TYPE,
        "rope_theta": table.geometry.theta,
        "original_max_position_embeddings": table.geometry.original_context,
        "method": spell(table.method),
    }
    return StockForm(_whole(config, parameters), table.context, ())


def telling_lengths(table: ExtendedRotaryEmbedding) -> tuple[int, ...]:
    """Return the whole window, and for a table that follows the length both sides of the original one too."""
    original, context = table.geometry.original_context, table.context
    return (context,) if table.is_static else (original, original + 1, context)


def _agrees(config: PretrainedConfig, table: ExtendedRotaryEmbedding, form: StockForm) -> bool:
    try:
        stock = with_form(config, form)
    except (StrictDataclassError, ValueError, KeyError):  # what configurations refuse values with
        return False
    return disagreement(stock, table, form.lengths) is None


def _own_parameters(config: PretrainedConfig, table: ExtendedRotaryEmbedding) -> RopeParameters | None:
    try:
        return _whole(config, table.method.rope_parameters(table.geometry, context=table.context))
    except MethodError:
        return None


def _whole(config: PretrainedConfig, parameters: RopeParameters) -> RopeParameters:
    """Add the one key that some families want beside every type: that all of each head is rotated."""
    here = cast("dict[str, object]", config.rope_parameters)
    return {"partial_rotary_factor": 1.0, **parameters} if "partial_rotary_factor" in here else parameters


def exported_form(config: PretrainedConfig, table: ExtendedRotaryEmbedding, *, allow_approximate: bool) -> StockForm:
    """Return what a checkpoint of the table says: what the live configuration says, or the nearest stock form.

    Raises:
        ExportError: there is only a nearest form, and it is not allowed.
    """
    live = cast("RopeParameters", config.rope_parameters)
    context, original = table.context, table.geometry.original_context
    if live["rope_type"] != NO_STOCK_TYPE:
        return StockForm(dict(live), context, telling_lengths(table))
    if table.is_static:
        what = "its frequencies" if table.plan.alibi_slopes is None else "the bias that it adds to attention"
        raise ExportError(
            f"export: {table.method.name} has no stock form for {config.model_type!r}: no configuration of stock "
            f'transformers gives {what}; format="rope-ext" (--format rope-ext) writes one that rope_ext.load opens'
        )
    frozen = general_rope_parameters(table.geometry, table.plan, context=context)
    nearest = StockForm(_whole(config, frozen), context, (context,), exact=False)
    how = f"its frequencies at {context} tokens, frozen for every length"
    own = _own_parameters(config, table)
    if own:
        # Stock code takes the stored window of its dynamic type as the original one.
        unextended = StockForm(own, original, telling_lengths(table), exact=False)
        if _agrees(config, table, unextended):
            nearest = unextended
            how = (
                f"type {own['rope_type']!r} with the stored window left at {original}: equal for one sequence in a new "
                "module, which then remembers the longest it has seen, and mixes bases in its cache"
            )
    if not allow_approximate:
        raise ExportError(
            f"export: {table.method.name} follows the current length, which stock readers do not do alike; "
            f"allow_approximate=True (--allow-approximate of extend, allow_approximate: true of a recipe) writes {how}"
        )
    return nearest
