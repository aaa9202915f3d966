"""Write a patched model as a checkpoint that stock loaders read with the same logits."""

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from rope_ext.errors import ExportError
from rope_ext.hf import stock_frequencies
from rope_ext.patch import active_patch_table
from rope_ext.plan import hyperparameters

RECORD = "rope_ext.json"
# Stock code repeats the same formula in fp32, ours rounds once from float64: a few units in the last place.
INV_FREQ_RTOL = 1e-6


def save_extended(
    model: PreTrainedModel, directory: str | os.PathLike[str], *, tokenizer: PreTrainedTokenizerBase | None = None
) -> Path:
    """Write a patched model to a new directory and return it, after proving that stock code reads it alike.

    config.json states the scaling twice: `rope_parameters` for transformers 5 and vLLM, `rope_theta` and
    `rope_scaling` for transformers 4 and converters, which would otherwise fall back to base 10000 and no scaling.
    The tokenizer, if given, is saved with the new window. `rope_ext.json` records method and geometry.

    Raises:
        ExportError: the model is not extended, the directory is not empty or cannot be written, or the checkpoint
            would not reload with the same frequencies (nothing is left behind then).
    """
    table = active_patch_table(model)
    if table is None:
        raise ExportError(
            "export: the model is not extended; call extend() first, or save_pretrained() for a plain copy"
        )
    target = check_target(directory)
    partial = target.with_name(target.name + ".partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)  # what an interrupted export left; a finished one has been renamed
        partial.mkdir(parents=True)
    except OSError as error:
        raise ExportError(f"export: {target} cannot be written: {error.strerror}") from error
    try:
        model.save_pretrained(partial)
        _write_legacy_keys(partial / "config.json")
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial, table.context)
        record = {
            "method": table.method.name,
            "hyperparameters": dict(hyperparameters(table.method)),
            "context": table.context,
            "original_context": table.geometry.original_context,
            "attention_scale": table.plan.attention_scale,
            "inv_freq": table.plan.inv_freq.tolist(),
        }
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        _check_stock_reads_alike(partial, table.plan.inv_freq, table.plan.attention_scale, table.context)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise ExportError(f"export: {target} cannot be written: {error.strerror or error}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
    return target


def check_target(directory: str | os.PathLike[str]) -> Path:
    """Return the directory as a path if an export may be written there: it is new or empty, and can be made.

    Raises:
        ExportError: it exists and is not an empty directory, or its place cannot be written.
    """
    target = Path(directory).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"export: {target} exists and is not an empty directory; name a new one")
    parent = next(p for p in target.parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ExportError(
            f"export: {target} cannot be written: {parent} is not a writable directory; name another place"
        )
    return target


def _write_legacy_keys(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    parameters = config["rope_parameters"]
    config["rope_theta"] = parameters["rope_theta"]
    if parameters["rope_type"] != "default":
        config["rope_scaling"] = {**parameters, "type": parameters["rope_type"]}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path, context: int) -> None:
    before = tokenizer.model_max_length
    tokenizer.model_max_length = context
    try:
        tokenizer.save_pretrained(directory)
    finally:
        tokenizer.model_max_length = before


def _check_stock_reads_alike(directory: Path, inv_freq: torch.Tensor, scale: float, context: int) -> None:
    config = AutoConfig.from_pretrained(directory)
    stock, stock_scale = stock_frequencies(config)
    if config.max_position_embeddings != context:
        raise ExportError(
            f"export: stock transformers reads a window of {config.max_position_embeddings}, not {context}"
        )
    if abs(stock_scale - scale) > INV_FREQ_RTOL or not torch.allclose(stock, inv_freq, rtol=INV_FREQ_RTOL, atol=0.0):
        worst = ((stock - inv_freq).abs() / inv_freq.abs().clamp_min(1e-30)).max().item()
        raise ExportError(
            f"export: stock transformers would read other frequencies (up to {worst:.1e} apart) or scale "
            f"({stock_scale:g}, not {scale:g}); this method has no stock form for this model"
        )
