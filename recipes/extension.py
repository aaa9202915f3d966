"""Stretch one model and write it: a checkpoint, a GGUF, or both, with what to tell the user of it."""

from pathlib import Path
from typing import NamedTuple

from rope_ext.errors import ExportError
from rope_ext.export import STOCK_FORMAT, check_target, is_own_format, portability, save_extended, stored_window
from rope_ext.gguf import check_gguf_target, extend_gguf, save_gguf
from rope_ext.hf import ScaledBase, check_written_as, load_config, load_model, locate, read_geometry
from rope_ext.patch import build_table, extend
from rope_ext.plan import Method, label


class Written(NamedTuple):
    """What was written: lines for a person, and the same for JSON."""

    lines: list[str]
    document: dict[str, object]


def write_extended(
    model: str,
    method: Method,
    *,
    out: Path | None,
    gguf: Path | None,
    context: int | None = None,
    factor: float | None = None,
    base: ScaledBase | None = None,
    original_context: int | None = None,
    allow_approximate: bool = False,
    format: str = STOCK_FORMAT,  # noqa: A002  (as save_extended has it)
) -> Written:
    """Write a model with a longer window and return what was written; what can be refused is refused before.

    Args:
        model: as `load_model`; a GGUF is copied into a GGUF without being loaded.
        out: a new directory for a checkpoint, or None.
        gguf: a new file for llama.cpp, or None.

    Raises:
        RopeExtError: nothing to write, a target that is taken, or what loading, extending and exporting raise.
    """
    _check_targets(out, gguf)
    own = is_own_format(format, allow_approximate=allow_approximate)
    if own and out is None:
        raise ExportError("export: a GGUF has a format of its own; give --out DIR, or leave --format out")
    folder, inside = locate(model)
    check_written_as(model, [method.name])
    # Everything that the configuration alone can refuse, before the weights are loaded
    config = load_config(model)
    geometry = read_geometry(config, base=base, original_context=original_context)
    build_table(config, geometry, method, context=context, factor=factor)
    source = Path(folder) / inside["gguf_file"] if "gguf_file" in inside and base is None else None
    written = Written([], {})
    if out is None and gguf is not None and source is not None:
        extend_gguf(source, gguf, method, context=context, factor=factor, original_context=original_context)
        _tell_gguf(written, gguf, model, method)
        return written
    loaded, tokenizer = load_model(model, device="cpu", dtype="auto")
    with extend(loaded, method, context=context, factor=factor, base=base, original_context=original_context) as patch:
        # What one of the two refuses is found before the other is written
        verdicts = portability(loaded, allow_approximate=allow_approximate) if out is not None and not own else []
        if gguf is not None and source is not None:
            extend_gguf(source, gguf, method, context=context, factor=factor, original_context=original_context)
        elif gguf is not None:
            save_gguf(loaded, gguf, tokenizer=tokenizer)
        if gguf is not None:
            _tell_gguf(written, gguf, model, method)
        if out is not None:
            path = save_extended(loaded, out, tokenizer=tokenizer, allow_approximate=allow_approximate, format=format)
            window = f"window {patch.geometry.original_context} -> {stored_window(path)} tokens"
            loader = "rope_ext.load" if own else "AutoModelForCausalLM.from_pretrained"
            loading = f"load it with {loader}({str(path)!r})" + (", which stock code cannot" if own else "")
            written.lines.append(f"{path}: {model} with {label(method)}, {window}; {loading}")
            written.lines.extend(f"  {verdict}" for verdict in verdicts)
            readers = {verdict.reader: str(verdict).partition(": ")[2] for verdict in verdicts}
            written.document.update(out=str(path), readers=readers)
        written.document["fingerprint"] = patch.fingerprint.as_dict()
    return written


def _check_targets(out: Path | None, gguf: Path | None) -> None:
    if out is None and gguf is None:
        raise ExportError("export: nothing to write; give --out DIR, --gguf FILE, or both")
    if out is not None:
        check_target(out)
    if gguf is not None:
        check_gguf_target(gguf)
    if out is not None and gguf is not None:
        one, other = out.resolve(), gguf.resolve()
        if one == other or one in other.parents or other in one.parents:
            raise ExportError(f"export: {out} and {gguf} lie inside one another; name two places")


def _tell_gguf(written: Written, gguf: Path, model: str, method: Method) -> None:
    written.lines.append(f"{gguf}: {model} with {label(method)}; load it with llama.cpp")
    written.document["gguf"] = str(gguf.absolute())
