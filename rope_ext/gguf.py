"""GGUF files of a stretched LLaMA for llama.cpp: one factor a pair in `rope_freqs.weight`, and the attention factor.

llama.cpp divides each pair's angle by its entry in `rope_freqs.weight`, the tensor that LLaMA-3.1 brought, whatever
the scaling type, and multiplies cos and sin by `llama.rope.scaling.attn_factor`. With the type "none" these two carry
any static method exactly, where its own YaRN ignores betas and scale. (llama-context.cpp, llama-graph.cpp and
ggml_rope_ext of llama.cpp.)
"""

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rope_ext.errors import ExportError, MethodError
from rope_ext.geometry import base_inv_freq
from rope_ext.hf import load_config, read_geometry, size_of_head
from rope_ext.layout import to_neighbours
from rope_ext.patch import active_patch_table, build_table
from rope_ext.plan import Method, spell
from rope_ext.stock import frequencies_agree
from rope_ext.tables import ExtendedRotaryEmbedding

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

ARCHITECTURE = "llama"
ROPE_FREQS = "rope_freqs.weight"
ATTENTION_FACTOR = f"{ARCHITECTURE}.rope.scaling.attn_factor"
CONTEXT = f"{ARCHITECTURE}.context_length"
FREQ_BASE = f"{ARCHITECTURE}.rope.freq_base"
STOPPED = 1e30
"""The divisor of a pair that does not turn: its angle stays below 1e-20 at any position, and a checker finds no inf."""

GPT2_SPLIT = {"type": "ByteLevel", "use_regex": True}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def extend_gguf(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    method: Method,
    *,
    context: int | None = None,
    factor: float | None = None,
    original_context: int | None = None,
) -> Path:
    """Write a copy of a GGUF with a longer window and the method's frequencies and scale, and return its path.

    Weights, quantised or not, and the tokenizer are copied as they stand; nothing is loaded as a model.

    Raises:
        RopeExtError: the source is no unscaled LLaMA, or what `extend` raises.
        ExportError: the method is not static, or the file cannot be written.
    """
    gguf = _package()
    config = load_config(str(source))
    table = build_table(
        config, read_geometry(config, original_context=original_context), method, context=context, factor=factor
    )
    target = _check(out, table)
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ExportError(f"export: {source} cannot be read as a GGUF: {error}") from error
    architecture = reader.fields.get("general.architecture")
    if architecture is None or architecture.contents() != ARCHITECTURE:
        found = architecture.contents() if architecture else None
        raise ExportError(f"export: {source} is of architecture {found!r}; only {ARCHITECTURE!r} can be stretched")

    parts = reader.fields.get("split.count")
    if parts is not None and int(parts.contents()) > 1:
        raise ExportError(
            f"export: {source} is one of {parts.contents()} parts; merge them first, with llama-gguf-split"
        )

    def fill(writer: "GGUFWriter") -> None:
        writer.data_alignment = reader.alignment
        for name, field in reader.fields.items():
            ours = name in {CONTEXT, FREQ_BASE} or ".rope.scaling." in name or name.startswith("rope_ext.")
            if name.startswith("GGUF.") or name == "general.architecture" or ours:
                continue
            if field.types[0] == gguf.GGUFValueType.ARRAY and not len(field.data):
                continue  # the writer has no form for an empty list, which says nothing
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
        _add_position_fields(writer, table)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)

    return _write(target, table, fill)


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise ExportError("export: writing a GGUF needs a package: pip install 'rope-ext[gguf]'") from None
    return gguf


def save_gguf(
    model: PreTrainedModel, out: str | os.PathLike[str], *, tokenizer: PreTrainedTokenizerBase | None = None
) -> Path:
    """Write a patched LLaMA as a GGUF in the dtype of its weights, and return its path.

    Args:
        tokenizer: a byte-level BPE that splits text as GPT-2, SmolLM or LLaMA-3 do; without one the file holds no
            vocabulary, and takes token ids alone.

    Raises:
        ExportError: the model is not extended or no LLaMA, the method is not static, the tokenizer has no form there,
            or the file cannot be written.
    """
    table = active_patch_table(model)
    if table is None:
        raise ExportError("export: the model is not extended; call extend() first")
    if model.config.model_type != ARCHITECTURE:
        raise ExportError(
            f"export: a GGUF is written of family {ARCHITECTURE!r} alone, and this is {model.config.model_type!r}"
        )
    target = _check(out, table)
    vocabulary = None if tokenizer is None else _vocabulary(tokenizer, int(model.config.vocab_size))

    def fill(writer: "GGUFWriter") -> None:
        _add_model_fields(writer, model)
        _add_position_fields(writer, table)
        if vocabulary is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            vocabulary(writer)
        _add_weights(writer, model)

    return _write(target, table, fill)


def _check(out: str | os.PathLike[str], table: ExtendedRotaryEmbedding) -> Path:
    if table.plan.alibi_slopes is not None:
        raise ExportError(
            f"export: {table.method.name} adds a bias to attention, which llama.cpp has for other architectures alone"
        )
    if not table.is_static:
        raise ExportError(
            f"export: {table.method.name} follows the current length, and a GGUF holds one vector of frequencies for "
            "all; take a static method"
        )
    return check_gguf_target(out)


def check_gguf_target(out: str | os.PathLike[str]) -> Path:
    """Return the path of a GGUF to write, if it can be: nothing is there, and its folder can be written.

    Raises:
        ExportError: it cannot.
    """
    target = Path(out).absolute()
    try:
        taken = target.exists() or target.is_symlink()
    except (OSError, ValueError) as error:  # a name too long, or one with a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise ExportError(f"export: {str(target)[:200]!r} cannot be written: {reason}") from error
    if taken:
        raise ExportError(f"export: {target} exists; name a new file")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise ExportError(f"export: {target} cannot be written: {target.parent} is not a writable directory")
    return target


def _write(target: Path, table: ExtendedRotaryEmbedding, fill: "Callable[[GGUFWriter], None]") -> Path:
    """Write aside, read back, and move when right."""
    gguf = _package()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise ExportError(f"export: {target} cannot be written: {error.strerror}") from error
    os.close(handle)
    partial = Path(name)
    partial.chmod(0o644)
    try:
        writer = gguf.GGUFWriter(partial, ARCHITECTURE)
        fill(writer)
        factors = _factors(table)
        if not bool((factors == 1).all()):
            writer.add_tensor(ROPE_FREQS, factors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        _check_reads_alike(gguf.GGUFReader(partial), table)
        partial.rename(target)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ExportError(f"export: {target} cannot be written: {reason[:300]}") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def _base(table: ExtendedRotaryEmbedding) -> float:
    """Return the base to write: the method's own where it is nothing but a base, which every reader understands."""
    try:
        parameters = table.method.rope_parameters(table.geometry, context=table.context)
    except MethodError:
        return table.geometry.theta
    plain = parameters["rope_type"] == "default" and not table.geometry.is_scaled
    return float(cast("float", parameters["rope_theta"])) if plain else table.geometry.theta


def _factors(table: ExtendedRotaryEmbedding) -> NDArray[np.float32]:
    """Return what llama.cpp divides the angle of each pair by, fp32, shape (head_dim/2,)."""
    plain = base_inv_freq(table.geometry.head_dim, _base(table)).double()
    wanted = table.plan.inv_freq.double().cpu()
    return torch.where(wanted > 0, plain / wanted, STOPPED).float().numpy()


def _add_position_fields(writer: "GGUFWriter", table: ExtendedRotaryEmbedding) -> None:
    gguf = _package()
    writer.add_context_length(table.context)
    writer.add_rope_freq_base(_base(table))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if table.plan.attention_scale != 1.0:
        writer.add_rope_scaling_attn_factors(table.plan.attention_scale)
    writer.add_string("rope_ext.method", spell(table.method))
    writer.add_uint32("rope_ext.original_context", table.geometry.original_context)


def _check_reads_alike(reader: "GGUFReader", table: ExtendedRotaryEmbedding) -> None:
    """Compute from the file what llama.cpp will, and compare."""

    def read(key: str, default: float) -> float:
        field = reader.fields.get(key)
        return default if field is None else float(cast("float", field.contents()))

    stored = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS), 1.0)
    theta = read(FREQ_BASE, 10_000.0)
    plain = base_inv_freq(table.geometry.head_dim, theta).double()
    turned = plain / torch.from_numpy(np.array(stored)).double()
    wanted = table.plan.inv_freq.double().cpu()
    agree = frequencies_agree(torch.where(wanted > 0, turned, 0.0), wanted)
    scale = read(ATTENTION_FACTOR, 1.0)
    same_window = read(CONTEXT, 0) == table.context
    if not (agree and math.isclose(scale, table.plan.attention_scale, rel_tol=1e-6) and same_window):
        raise ExportError(
            "export: the GGUF would be read with other frequencies, scale or window than the model has; its base is "
            f"{theta:g}, the model's {table.geometry.theta:g}"
        )


def _add_model_fields(writer: "GGUFWriter", model: PreTrainedModel) -> None:
    gguf = _package()
    config = model.config
    if config.hidden_act not in {"silu", "swish"}:
        raise ExportError(f"export: llama.cpp's LLaMA has the activation silu, and this model {config.hidden_act!r}")
    head_dim = size_of_head(config)
    kinds = {
        torch.float32: gguf.LlamaFileType.ALL_F32,
        torch.float16: gguf.LlamaFileType.MOSTLY_F16,
        torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
    }
    if model.dtype not in kinds:
        raise ExportError(
            f"export: weights in {model.dtype} have no form in a GGUF; cast to float32, float16 or bfloat16"
        )
    writer.add_name(Path(str(config.name_or_path)).name or "model")
    writer.add_file_type(kinds[model.dtype])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_weights(writer: "GGUFWriter", model: PreTrainedModel) -> None:
    gguf = _package()
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    head_dim = size_of_head(config)
    kinds = {torch.float16: gguf.GGMLQuantizationType.F16, torch.bfloat16: gguf.GGMLQuantizationType.BF16}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ExportError(f"export: {name} has no place in a GGUF of a LLaMA")
        layer = name.rsplit(".", 2)[-2]
        turned = layer in {"q_proj", "k_proj"}  # biases turn with their rows
        columns = weight if weight.ndim > 1 else weight[:, None]
        rows = to_neighbours(columns, head_dim).reshape(weight.shape) if turned else weight
        values = rows.detach().float().cpu().numpy()
        kind = kinds.get(weight.dtype) if weight.ndim > 1 else None  # norms and biases stay in fp32, as llama.cpp wants
        if kind is None:
            writer.add_tensor(known, values)
        else:
            writer.add_tensor(known, gguf.quantize(values, kind), raw_dtype=kind)


def _vocabulary(tokenizer: PreTrainedTokenizerBase, num_ids: int) -> "Callable[[GGUFWriter], None]":
    """Return what writes the tokenizer, having found that it can be written."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ExportError(f"export: {type(tokenizer).__name__} has no form in a GGUF; {OTHER_WAY}")
    backend = cast("dict[str, Any]", json.loads(tokenizer.backend_tokenizer.to_str()))
    split = _split_name(backend.get("pre_tokenizer"))
    model = backend["model"]
    if model["type"] != "BPE" or split is None or backend.get("normalizer") or model.get("byte_fallback"):
        raise ExportError(
            f"export: this {model['type']} tokenizer splits text in a way that has no known name in a GGUF; {OTHER_WAY}"
        )

    def fill(writer: "GGUFWriter") -> None:
        gguf = _package()
        tokens = {index: token for token, index in model["vocab"].items()}
        kinds: dict[int, int] = {index: int(gguf.TokenType.NORMAL) for index in tokens}
        for added in backend["added_tokens"]:
            tokens[added["id"]] = added["content"]
            kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(num_ids)])
        writer.add_token_types([kinds.get(i, int(gguf.TokenType.UNUSED)) for i in range(num_ids)])
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        writer.add_token_merges(merges)
        for which in ("bos", "eos", "unk", "pad"):
            index = getattr(tokenizer, f"{which}_token_id")
            if index is not None:
                getattr(writer, f"add_{which}_token_id")(index)
        first = tokenizer("x")["input_ids"]
        writer.add_add_bos_token(tokenizer.bos_token_id is not None and first[:1] == [tokenizer.bos_token_id])
        if isinstance(tokenizer.chat_template, str):  # of several named ones a GGUF would need the names too
            writer.add_chat_template(tokenizer.chat_template)

    return fill


OTHER_WAY = "convert the checkpoint with llama.cpp's own converter, and give that GGUF as the model"


def _split_name(splitter: dict[str, Any] | None) -> str | None:
    """Return llama.cpp's name for a way to split text before BPE, or None."""
    steps = [] if splitter is None else splitter.get("pretokenizers", [splitter])
    plain = [
        {k: v for k, v in step.items() if k in {"type", "use_regex", "individual_digits", "pattern"}} for step in steps
    ]
    if any(step.get("add_prefix_space") for step in steps):
        return None
    known = {
        "gpt-2": [GPT2_SPLIT],
        "smollm": [{"type": "Digits", "individual_digits": True}, GPT2_SPLIT],
        "llama-bpe": [
            {"type": "Split", "pattern": {"Regex": LLAMA3_SPLIT}},
            {"type": "ByteLevel", "use_regex": False},
        ],
    }
    return next((name for name, split in known.items() if split == plain), None)
