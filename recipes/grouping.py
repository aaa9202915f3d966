"""A checkpoint with fewer key heads, written where there is nothing yet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.load import RecipeError
from rope_ext.export import check_target, written_aside
from rope_ext.gqa import group_key_heads
from rope_ext.hf import load_model, locate, written_as
from rope_ext.inspection import in_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written, as a document and in lines."""

    document: dict[str, Any]
    lines: list[str]


def write_grouped(model: str, num_key_value_heads: int, out: Path) -> Written:
    """Write a model with fewer key heads as a checkpoint that stock transformers loads.

    Raises:
        RopeExtError: as `rope_ext.gqa.group_key_heads`; the place is taken.
    """
    source, gguf = locate(model)
    if not gguf and written_as(source) is not None:
        raise RecipeError(f"gqa: {model} is in the format of rope-ext; group the model that it was extended from")
    target = check_target(out)
    loaded, tokenizer = load_model(model, device="cpu", dtype="auto")
    found = group_key_heads(loaded, num_key_value_heads, share=True)
    with written_aside(target) as partial:
        found.model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    parameters = found.model.num_parameters()
    document = {
        "out": str(target),
        "model": model,
        "num_key_value_heads": {"before": found.before, "after": found.after},
        "cache_bytes_per_token": {"before": found.cache_before, "after": found.cache_after},
        "parameters": {"before": loaded.num_parameters(), "after": parameters},
    }
    size = f"a token of cache takes {in_bytes(found.cache_after)} in 16 bits"
    lines = [f"{target}: {found.after} key heads as before, the same weights; {size}"]
    if found.after < found.before:
        lines = [
            f"{target}: {found.before} key heads are {found.after}; {size}, not {in_bytes(found.cache_before)}",
            f"it needs a brief training to be of use again: rope-ext finetune RECIPE --set model={target}",
        ]
    return Written(document=document, lines=lines)
