"""A model's weights around a training: in which dtype and how loaded, rounded, read back, and written once."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from recipes.train import TrainingError, are_whole, weights_in
from recipes.tuning_setting import ADAPTER, FinetuneSetting
from rope_ext.export import save_extended
from rope_ext.hf import RECORD, load_config, load_model
from rope_ext.patch import active_patch_table
from rope_ext.tables import ExtendedRotaryEmbedding


def table_of(model: PreTrainedModel) -> ExtendedRotaryEmbedding:
    """Return the rotary module of the patch in effect."""
    table = active_patch_table(model)
    assert table is not None
    return table


def prepared(model: PreTrainedModel, precision: str, *, liger: bool = False) -> PreTrainedModel:
    """Return the model as it is trained: weights in fp32 but for pure-bf16, with Liger's kernels if they are asked for.

    Weights alone: frequencies are buffers, and stay as they are.
    """
    dtype = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    for parameter in cast("nn.Module", model).parameters():
        parameter.data = parameter.data.to(dtype)
    if liger:
        use_liger(model)
    return model


@contextmanager
def numerics(precision: str, device: torch.device) -> Generator[None]:
    """Compute as training does: in bf16 on fp32 weights, or as the weights are."""
    if precision != "bf16":
        yield
        return
    with torch.autocast(device.type, dtype=torch.bfloat16):
        yield


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype that a model's checkpoint is in, which what is written keeps."""
    found = getattr(load_config(name), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        TrainingError: they are not those of this model.
    """
    missing, unexpected = cast("nn.Module", model).load_state_dict(weights_in(folder), strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    if set(missing) - tied or unexpected:
        raise TrainingError(f"train: {folder} does not hold the model's weights ({[*missing, *unexpected][:3]})")


@torch.no_grad()
def round_to(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights to what will be stored, so that what is measured afterwards is what was written."""
    for parameter in cast("nn.Module", model).parameters():
        if parameter.dtype != dtype and parameter.is_floating_point():
            parameter.copy_(parameter.to(dtype))


def save_once(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype | None = None, **form: Any) -> None:
    """Write an export if it is not there yet, in the dtype that it is stored in."""
    if is_written(folder):
        return
    own = model.dtype
    if dtype is not None:
        cast("nn.Module", model).to(dtype)
    try:
        save_extended(model, folder, **form)
    finally:
        cast("nn.Module", model).to(own)


def use_liger(model: PreTrainedModel) -> None:
    """Put Liger's norms and feed-forward kernels into this model alone. Not run here: they need a GPU.

    Its rotary kernel would be put into transformers for every model, and its loss is not needed beside ours.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]  (optional)

    _apply_liger_kernel_to_instance(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)


def sharded_model(setting: FinetuneSetting, precision: str) -> PreTrainedModel:
    """Return the model loaded anew, sharded over processes by transformers."""
    from transformers.distributed.configuration_utils import DistributedConfig

    recipe, parallel = setting.recipe, setting.recipe.train.parallel
    config = DistributedConfig(
        fsdp_size=parallel.fsdp,
        dp_replicate_size=setting.ranks.world // parallel.fsdp,
        fsdp_cpu_offload=parallel.cpu_offload,
        fsdp_mixed_precision=precision == "bf16",
    )
    dtype = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    model, _ = load_model(recipe.model, dtype=dtype, distributed=config)
    return model


def is_written(folder: Path) -> bool:
    """Return whether an export is there.

    Raises:
        TrainingError: parts of it are missing or torn.
    """
    if not folder.exists():
        return False
    needed = ("adapter_config.json" if folder.name == ADAPTER else "config.json", RECORD)
    if not all((folder / name).is_file() for name in needed) or not are_whole(folder):
        raise TrainingError(f"resume: {folder} is damaged; remove it, and --resume writes it again")
    return True
