"""Read a checkpoint as Meta publishes it: params.json and consolidated.00.pth, .01.pth, ..., one file a shard.

A shard is what one GPU of a tensor-parallel group held. Nothing in the files says how they were cut; the shapes do.
Weights keep their names and their layout (neighbouring pairs); rope_ext.llama loads them as they come.
"""

import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext.errors import ModelError
from rope_ext.llama import LlamaShape
from rope_ext.meta import PARAMS, MetaParams, ffn_width, read_params

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
# The axis along which a tensor is cut; norms are not cut, and the embedding has been cut along either.
CUT = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


class MetaCheckpoint(NamedTuple):
    """A whole checkpoint: `weights` by Meta's names, merged; the output is there even where it was tied."""

    params: MetaParams
    shape: LlamaShape
    weights: dict[str, Tensor]
    num_shards: int


def read_meta(directory: str | os.PathLike[str]) -> MetaCheckpoint:
    """Return a folder's checkpoint with its shards merged; a single shard is mapped, not read.

    Files are opened as weights only: a pickle that would run code is refused, not run.

    Raises:
        ModelError: a file that is missing or is no such checkpoint, a tensor that is missing, of a wrong shape or
            unknown, or sizes that disagree with params.json.
    """
    params = read_params(directory)
    files = _shard_files(Path(directory))
    shards = [_read_shard(file) for file in files]
    names = ", ".join(file.name for file in files[:1] + files[1:][-1:])
    expected = _expected_names(params.n_layers)
    for file, shard in zip(files, shards, strict=True):
        missing = sorted(expected - shard.keys() - {OUTPUT})
        extra = sorted(shard.keys() - expected)
        if missing:
            raise ModelError(f"meta: {file}: {missing[0]} is missing ({len(missing)} of {len(expected)} are)")
        if extra:
            raise ModelError(f"meta: {file}: {extra[0]} is no tensor of a LLaMA with {params.n_layers} layers")
        if shard.keys() != shards[0].keys():
            raise ModelError(f"meta: {file}: {OUTPUT} is in some shards and not in others")
    kinds = {tensor.dtype for shard in shards for tensor in shard.values()}
    if len(kinds) > 1 or not kinds <= set(FLOATS):
        found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ModelError(f"meta: {names}: tensors of {found}; they must all be float32, bfloat16 or float16")
    shape = _shape(params, shards, names)
    one = "layers.0.attention.wq.weight"
    if len(shards) > 1 and torch.equal(shards[0][one], shards[1][one]):
        raise ModelError(f"meta: {names}: two shards hold the same {one}; one is a copy of the other, get it again")
    tied = OUTPUT not in shards[0]
    weights = {
        name: _merge(name, [shard[name] for shard in shards], full, params, names)
        for name, full in _full_shapes(shape).items()
        if not (tied and name == OUTPUT)
    }
    if tied:
        weights[OUTPUT] = weights[EMBEDDING]
    return MetaCheckpoint(params, shape, weights, len(shards))


def _shard_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("consolidated.*.pth"))
    wanted = [f"consolidated.{i:02d}.pth" for i in range(max(1, len(files)))]
    lost = [name for name in wanted if name not in {file.name for file in files}]
    if lost:
        others = f" beside {files[0].name}" if files else ""
        raise ModelError(f"meta: {directory}: {lost[0]} is missing{others}; shards count from consolidated.00.pth")
    return files


def _read_shard(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's advice to report a foreign pickle to its authors
            # Files older than torch 1.6 are no zip, and cannot be mapped.
            raw = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"meta: {file} holds code or other things than tensors, and was not opened; take the file from its source"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, AssertionError, AttributeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        raise ModelError(f"meta: {file} cannot be read: {reason[:200]}") from error
    if not isinstance(raw, dict) or not all(isinstance(tensor, Tensor) for tensor in raw.values()):
        raise ModelError(f"meta: {file} is no dictionary of tensors; name a folder of Meta's own files")
    odd = [name for name, tensor in raw.items() if tensor.layout != torch.strided or tensor.is_meta]
    if odd:
        raise ModelError(f"meta: {file}: {odd[0]} is sparse or holds no data; take the file from its source")
    # Frequencies were stored with some models; they follow from params.json.
    return {str(name): tensor for name, tensor in raw.items() if not str(name).endswith("rope.freqs")}


def _expected_names(num_layers: int) -> set[str]:
    one = LlamaShape(width=2, num_layers=num_layers, num_heads=1, num_kv_heads=1, head_dim=2, ffn_width=1, vocab_size=1)
    return set(_full_shapes(one))


def _full_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor when whole, by Meta's names."""
    width, ffn = shape.width, shape.ffn_width
    rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "attention.wq.weight": (rows, width),
        "attention.wk.weight": (kv_rows, width),
        "attention.wv.weight": (kv_rows, width),
        "attention.wo.weight": (width, rows),
        "feed_forward.w1.weight": (ffn, width),
        "feed_forward.w2.weight": (width, ffn),
        "feed_forward.w3.weight": (ffn, width),
        "attention_norm.weight": (width,),
        "ffn_norm.weight": (width,),
    }
    layers = {f"layers.{i}.{name}": full for i in range(shape.num_layers) for name, full in layer.items()}
    ends = {EMBEDDING: (shape.vocab_size, width), "norm.weight": (width,), OUTPUT: (shape.vocab_size, width)}
    return {**ends, **layers}


def _shape(params: MetaParams, shards: list[dict[str, Tensor]], names: str) -> LlamaShape:
    """Return the sizes, of which the vocabulary and the feed-forward width may only be in the weights."""
    first, num_shards = shards[0], len(shards)
    w1 = first["layers.0.feed_forward.w1.weight"]
    ffn = (w1.shape[0] if w1.dim() else 0) * num_shards
    if params.multiple_of is not None:
        stated = ffn_width(params.dim, params.multiple_of, params.ffn_dim_multiplier)
        if stated != ffn:
            raise ModelError(
                f"meta: {names}: the feed-forward layer is {ffn} wide; dim, multiple_of and ffn_dim_multiplier of "
                f"{PARAMS} make it {stated}"
            )
    vocab = params.vocab_size
    if vocab == -1:
        ends = first.get(OUTPUT, first[EMBEDDING])
        cut_by_rows = OUTPUT in first or (ends.dim() == 2 and ends.shape[1] == params.dim)
        vocab = (ends.shape[0] if ends.dim() else 0) * (num_shards if cut_by_rows else 1)
    if ffn < 1 or vocab < 1:
        raise ModelError(f"meta: {names}: a feed-forward width of {ffn} or a vocabulary of {vocab} is no size")
    return LlamaShape(
        width=params.dim,
        num_layers=params.n_layers,
        num_heads=params.n_heads,
        num_kv_heads=params.n_kv_heads,
        head_dim=params.head_dim,
        ffn_width=ffn,
        vocab_size=vocab,
        norm_eps=params.norm_eps,
    )


def _merge(name: str, parts: list[Tensor], full: tuple[int, ...], params: MetaParams, names: str) -> Tensor:
    """Return the whole tensor.

    Raises:
        ModelError: the parts do not make up the shape, or should be copies and differ.
    """
    kind = name.split(".")[-2]
    axis = CUT.get(kind)
    if name == EMBEDDING:  # by rows since LLaMA 3, by columns before
        axis = 1 if parts[0].shape == (full[0], full[1] // len(parts)) else 0
    if kind in {"wk", "wv"} and len(parts) > params.n_kv_heads:
        # More GPUs than key heads: neighbouring GPUs held the same one.
        copies = len(parts) // params.n_kv_heads
        _check_copies(name, [parts[i : i + copies] for i in range(0, len(parts), copies)], names)
        parts = parts[::copies]
    if axis is None:
        _check_copies(name, [parts], names)
        parts, axis = parts[:1], 0
    wanted = tuple(size // len(parts) if i == axis else size for i, size in enumerate(full))
    for part in parts:
        if part.shape != wanted or full[axis] % len(parts):
            raise ModelError(
                f"meta: {names}: {name} has shape {tuple(part.shape)}; {PARAMS} asks for {wanted}, shards: {len(parts)}"
            )
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=axis)


def _check_copies(name: str, groups: list[list[Tensor]], names: str) -> None:
    for first, *others in groups:
        if not all(torch.equal(first, other) for other in others):
            raise ModelError(f"meta: {names}: {name} differs between shards that should hold copies of it")
