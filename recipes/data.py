"""What `data` of a recipe may say, and the documents that it means."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from evals import corpora, hub
from evals.corpora import Document
from recipes.load import RecipeError
from rope_ext.registry import nearest

SOURCES = ("python", "python-all")
NAMES = (*SOURCES, *hub.PRESETS)


class Data(NamedTuple):
    """Documents, and whether they are a stream that is taken in its own order (`corpora.tokenise`)."""

    documents: Iterable[Document]
    in_order: bool


def pinned(name: str) -> str:
    """Return the name under which the same documents are found again: a Hub data set at a commit, others as they are.

    Raises:
        EvalError: the Hub knows no such data set, or was not reached.
    """
    name = hub.PRESETS.get(name, name)
    return hub.pin(hub.parse_hub(name)).spell() if name.startswith(hub.PREFIX) else name


def open_data(name: str, *, also: Sequence[str] = ()) -> Data:
    """Return the documents that a pinned name means; those of a stream are read, and refused, as they are asked for.

    Args:
        also: names that the caller knows besides, for the hint at a misspelled one.

    Raises:
        RecipeError: the name is empty, or a known one misspelled.
        EvalError: what it names cannot be read.
    """
    if not name:
        raise RecipeError(
            f"data: the name is empty; give {', '.join(NAMES)}, hub:OWNER/NAME, a text, JSONL or Parquet file, or a "
            "folder of them"
        )
    if name.startswith(hub.PREFIX):
        return Data(hub.stream(hub.parse_hub(name)), in_order=True)
    if name in SOURCES:
        return Data(corpora.python_sources("held-out" if name == "python" else "all"), in_order=False)
    hint = nearest(name, [*NAMES, *also])
    # os.path.exists is False where Path.exists raises: for a name too long to be one
    if hint != ";" and len(Path(name).parts) == 1 and not Path(name).suffix and not os.path.exists(name):  # noqa: PTH110
        raise RecipeError(f"data: {name!r} does not exist{hint} names: {', '.join([*NAMES, *also])}")
    return Data(corpora.read_documents(Path(name)), in_order=False)
