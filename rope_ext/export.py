"""Write a patched model as a checkpoint that stock loaders read with the same logits."""

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from rope_ext.errors import ExportError, ModelError
from rope_ext.hf import OWN_FORMAT, RECORD, WrittenAs, load_model, locate, read_record, written_as
from rope_ext.patch import Patch, active_patch_table, extend
from rope_ext.plan import RopeParameters, hyperparameters, spell
from rope_ext.readers import Verdict, judge
from rope_ext.registry import method
from rope_ext.stock import (
    NO_STOCK_TYPE,
    StockForm,
    disagreement,
    exported_form,
    frequencies_agree,
    own_form,
    telling_lengths,
)
from rope_ext.tables import ExtendedRotaryEmbedding

STOCK_FORMAT = "stock"


def save_extended(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    allow_approximate: bool = False,
    format: str = STOCK_FORMAT,  # noqa: A002  (as image and table writers call it)
) -> Path:
    """Write a patched model to a new directory and return it, after proving that stock code reads it alike.

    config.json states the scaling twice: `rope_parameters` for transformers 5 and vLLM, `rope_theta` and
    `rope_scaling` for transformers 4 and converters, which would otherwise fall back to base 10000 and no scaling.
    The tokenizer, if given, is saved with the new window. `rope_ext.json` records method, geometry and readers. Of a
    model with a LoRA adapter only the adapter is written, with the record that `extend_from_record` puts back.

    Stock code rounds the same formulas in other places. A plain base or a division is bit-equal; for the others the
    frequencies agree to 1e-6, relative, and logits of order 10 were seen to differ by up to 1e-4 over 200 tokens.

    Args:
        allow_approximate: write the nearest stock form of a method that stock code does not follow exactly, instead
            of refusing it; `rope_ext.json` then says so.
        format: "stock", or "rope-ext": any method as it is, which `rope_ext.load` opens and stock code refuses.

    Raises:
        ExportError: no such format, the model is not extended, the method has no stock form, the directory is not empty
            or cannot be written, or the checkpoint would not reload with the same frequencies (then nothing is left).
    """
    table = _active_table(model)
    target = check_target(directory)
    if any(p.is_meta for p in model.parameters()):
        raise ExportError("export: the weights are on the meta device; load them first")
    if not _is_adapter(model) and any(".base_layer." in name for name in model.state_dict()):
        raise ExportError(
            "export: the model holds an adapter's layers that stock code does not know; save the PeftModel itself, or "
            "merge_and_unload() first"
        )
    own = is_own_format(format, allow_approximate=allow_approximate)
    if _is_adapter(model):
        form = None  # the record beside it opens any method, whatever the format
    elif own:
        form = own_form(model.config, table)
    else:
        form = exported_form(model.config, table, allow_approximate=allow_approximate)
    with written_aside(target) as partial:
        _write(model, partial, tokenizer, table, form)
        if form is not None and form.parameters["rope_type"] != NO_STOCK_TYPE:
            _check_stock_reads_alike(partial, table, form)
    return target


def is_own_format(name: str, *, allow_approximate: bool = False) -> bool:
    """Return whether a format is our own, and not one for stock code.

    Raises:
        ExportError: it is neither, or an approximation is asked for, which our own never is.
    """
    if name not in {STOCK_FORMAT, OWN_FORMAT}:
        raise ExportError(f"export: format {name!r} is neither {STOCK_FORMAT} nor {OWN_FORMAT}; give one of the two")
    if name == OWN_FORMAT and allow_approximate:
        raise ExportError(f"export: the format {OWN_FORMAT} writes every method as it is; leave allow_approximate out")
    return name == OWN_FORMAT


def _write(
    model: PreTrainedModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    table: ExtendedRotaryEmbedding,
    form: StockForm | None,
) -> None:
    own = form is not None and form.parameters["rope_type"] == NO_STOCK_TYPE
    base = cast("Patch", table.patch).config_of_base
    with _stating(model, base if own else {}):  # families check types that they do not know as they are saved
        model.save_pretrained(directory)
    readers: dict[str, str] = {}
    if form is not None:
        write_config(directory / "config.json", form.parameters, form.window)
        verdicts = [] if own else portability(model, allow_approximate=not form.exact)
        readers = {verdict.reader: str(verdict).partition(": ")[2] for verdict in verdicts}
    if tokenizer is not None:
        _save_tokenizer(tokenizer, directory, table.context if form is None else form.window)
    slopes = table.plan.alibi_slopes
    record = {
        "format": OWN_FORMAT if own else STOCK_FORMAT,
        "method": table.method.name,
        "hyperparameters": dict(hyperparameters(table.method)),
        "context": table.context,
        "original_context": table.geometry.original_context,
        "base": table.base,
        "exact": form is None or form.exact,
        "readers": readers,
        "attention_scale": table.plan.attention_scale,
        "inv_freq": table.plan.inv_freq.tolist(),
        "alibi_slopes": None if slopes is None else slopes.tolist(),
        "config_of_base": base,
    }
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _stating(model: PreTrainedModel, values: dict[str, object]) -> Generator[None]:
    """Let the model's configuration say other values for a while."""
    before = {key: getattr(model.config, key) for key in values}
    try:
        for key, value in values.items():
            setattr(model.config, key, value)
        yield
    finally:
        for key, value in before.items():
            setattr(model.config, key, value)


def _is_adapter(model: PreTrainedModel) -> bool:
    """Return whether `save_pretrained` would write an adapter alone: peft and transformers mark it so."""
    wrapped = type(model).__module__.partition(".")[0] == "peft"  # its base has peft_config too, and is no adapter
    return wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def portability(model: PreTrainedModel, *, allow_approximate: bool = False) -> list[Verdict]:
    """Return how transformers, vLLM, SGLang, llama.cpp and ollama take the export of a patched model.

    Raises:
        ExportError: the model is not extended, or has no stock form.
    """
    table = _active_table(model)
    form = exported_form(model.config, table, allow_approximate=allow_approximate)
    return judge(
        form.parameters,
        window=form.window,
        geometry=table.geometry,
        plans={length: table.plan_at(length) for length in telling_lengths(table)},
        family=str(model.config.model_type),
    )


def _active_table(model: PreTrainedModel) -> ExtendedRotaryEmbedding:
    table = active_patch_table(model)
    if table is None:
        raise ExportError(
            "export: the model is not extended; call extend() first, or save_pretrained() for a plain copy"
        )
    return table


def check_target(directory: str | os.PathLike[str]) -> Path:
    """Return the directory as a path if an export may be written there: it is new or empty, and can be made.

    Raises:
        ExportError: it exists and is not an empty directory, or its place cannot be written.
    """
    target = Path(os.path.abspath(directory))  # noqa: PTH100  (resolve() would follow a link that is to be refused)
    try:
        taken = target.is_symlink() and not target.exists()  # it points nowhere
        taken = taken or (target.exists() and (not target.is_dir() or any(target.iterdir())))
    except OSError as error:  # a name too long, a folder that may not be read
        raise ExportError(f"export: {str(target)[:200]} cannot be written: {error.strerror}") from error
    if taken:
        raise ExportError(f"export: {target} exists and is not an empty directory; name a new one")
    parent = next(p for p in target.parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ExportError(
            f"export: {target} cannot be written: {parent} is not a writable directory; name another place"
        )
    return target


@contextmanager
def written_aside(target: Path) -> Generator[Path]:
    """Return a new directory to write a checkpoint into, which is put at `target` when the block has ended well.

    A killed export leaves no half checkpoint at `target`, a failed one leaves nothing. A `target` that is there (empty,
    as `check_target` found it) is filled from within: it may be a mount point, or somebody's working directory.

    Raises:
        ExportError: the place cannot be written, or the writer in the block failed as writers do.
    """
    created = [parent for parent in target.parents if not parent.exists()]  # the innermost first
    try:
        inside = target.is_dir()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target if inside else target.parent))
        partial.chmod(0o755)
    except OSError as error:
        _remove_empty(created)
        raise ExportError(f"export: {target} cannot be written: {error.strerror}") from error
    try:
        yield partial
        for path in partial.rglob("*.safetensors"):
            path.chmod(0o644)  # safetensors writes for its owner alone, and a server is often another user
        if inside:
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):  # that one last
                path.rename(target / path.name)
        else:
            partial.rename(target)
    except (OSError, SafetensorError, ValueError) as error:  # a full disk; a generation config that does not validate
        reason = " ".join(str(error).split())
        raise ExportError(f"export: {target} cannot be written: {reason[:300]}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
            _remove_empty(created)


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):  # one that was never made, or that somebody else has filled
        for folder in folders:
            folder.rmdir()


def write_config(path: Path, parameters: RopeParameters, window: int) -> None:
    """State the rotary parameters and the window in a config.json, in the dialects of transformers 5 and 4."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_parameters"] = parameters
    config["max_position_embeddings"] = window
    config["rope_theta"] = parameters["rope_theta"]
    if parameters["rope_type"] != "default":
        config["rope_scaling"] = {**parameters, "type": parameters["rope_type"]}
    if parameters["rope_type"] == "longrope" or (
        "original_max_position_embeddings" in config and "original_max_position_embeddings" in parameters
    ):  # where transformers 4 looks for it; otherwise it takes the whole window
        config["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path, context: int) -> None:
    before = tokenizer.model_max_length
    tokenizer.model_max_length = context
    try:
        tokenizer.save_pretrained(directory)
    finally:
        tokenizer.model_max_length = before


def _check_stock_reads_alike(directory: Path, table: ExtendedRotaryEmbedding, form: StockForm) -> None:
    config = AutoConfig.from_pretrained(directory)
    if config.max_position_embeddings != form.window:
        raise ExportError(
            f"export: stock transformers reads a window of {config.max_position_embeddings}, not {form.window}"
        )
    found = disagreement(config, table, form.lengths)
    if found:
        raise ExportError(
            f"export: stock transformers would read {found}; this method has no stock form for this model"
        )


def extend_from_record(model: PreTrainedModel, directory: str | os.PathLike[str]) -> Patch:
    """Extend a model as `rope_ext.json` in a directory says, and return the patch: for an adapter and its base.

    An adapter holds no positions. `save_extended` puts the record beside it, and here the base gets them back:

        with extend_from_record(base, "adapter"):
            model = PeftModel.from_pretrained(base, "adapter")

    Raises:
        ExportError: there is no record, or the model does not get the recorded frequencies from it.
        RopeExtError: what `extend` raises.
    """
    path = Path(directory) / RECORD
    try:
        record = read_record(str(directory)) if path.is_file() else None
    except ModelError as error:
        raise ExportError(f"export: {error}") from error
    if record is None:
        raise ExportError(f"export: {path} is no record of an extended model: there is no such file")
    return extend_by(record, model, str(path))


def extend_by(record: dict[str, Any], model: PreTrainedModel, where: str) -> Patch:
    """Extend a model as a record says, and return the patch.

    Raises:
        ExportError: the record is not one, or the model gets other frequencies or slopes from it; named `where`.
        RopeExtError: what `extend` raises.
    """
    if active_patch_table(model) is not None:
        raise ExportError("export: the model is already extended; undo that first, and then extend it from the record")
    try:
        chosen = method(record["method"], **record["hyperparameters"])
        context, original, base = int(record["context"]), int(record["original_context"]), record["base"]
        wanted, slopes = torch.tensor(record["inv_freq"]), record.get("alibi_slopes")
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise ExportError(f"export: {where} is no record of an extended model: {error}") from error
    patch = extend(model, chosen, context=context, base=base, original_context=original)
    if patch.plan.inv_freq.shape != wanted.shape or not frequencies_agree(patch.plan.inv_freq, wanted):
        patch.undo()
        raise ExportError(f"export: {where} was made on another base: this one gets other frequencies from its method")
    found = patch.plan.alibi_slopes
    if (None if found is None else found.tolist()) != slopes:
        patch.undo()
        raise ExportError(f"export: {where} was made with other slopes ({slopes!r:.100}) than its method gives")
    return patch


def load(
    name: str, *, device: str | None = None, dtype: torch.dtype | Literal["auto"] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model as `save_extended` wrote it, in either format, and its tokenizer.

    Nothing that lies in the checkpoint is executed: the method is one of this package, found by its name. Of a model
    that is not in our own format this is `load_model`.

    Args:
        name, device, dtype: as `load_model`.

    Raises:
        RopeExtError: what `load_model` and `extend_from_record` raise.
    """
    model, tokenizer = load_model(name, device=device, dtype=dtype)
    source, gguf = locate(name)
    stated = None if gguf else written_as(source)
    if stated is not None:
        where = f"{name}/{RECORD}"
        patch = extend_by(read_record(source) or {}, model, where)
        if stated != WrittenAs(spell(patch.method), patch.context, patch.geometry.original_context):
            patch.undo()
            raise ExportError(
                f"export: {where} says {spell(patch.method)} at {patch.context} tokens, and config.json beside it "
                f"{stated.method} at {stated.context}; one of them is from another model: write it again"
            )
    return model, tokenizer


def stored_window(directory: Path) -> int:
    """Return the window that an exported checkpoint states, tokens; an approximation may keep the original one."""
    return int(json.loads((directory / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"])
