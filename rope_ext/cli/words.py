"""Options that several commands share, and how their words are read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from rope_ext.hf import ScaledBase

MODELS = ("tiny", "tiny-alibi", "smollm2")


def complete_model(incomplete: str) -> list[str]:
    """Return the models that have a name; a shell completes paths by itself."""
    return [name for name in MODELS if name.startswith(incomplete)]


def complete_method(incomplete: str) -> list[str]:
    """Return the methods that a word, or the last of a comma list, could become; files are named after them."""
    import pkgutil

    import rope_ext.methods

    before, comma, last = incomplete.rpartition(",")
    names = (found.name.replace("_", "-") for found in pkgutil.iter_modules(rope_ext.methods.__path__))
    return [before + comma + name for name in names if name.startswith(last)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shipped fine-tuning recipes."""
    import recipes

    configs = Path(recipes.__path__[0]) / "configs"
    names = (path.relative_to(configs).with_suffix("").as_posix() for path in configs.rglob("*.yaml"))
    return sorted(name for name in names if name.startswith(incomplete) and not name.endswith("/compare"))


def complete_from(*words: str) -> Callable[[str], list[str]]:
    """Return what completes a word, or the last of a comma list, from a few."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + word for word in words if word.startswith(last)]

    return complete


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="tiny, tiny-alibi, smollm2, a directory, a .gguf file, or a Hub id",
        autocompletion=complete_model,
    ),
]
MethodOption = Annotated[
    str, typer.Option("--method", "-m", help="NAME or NAME:key=value:key=value", autocompletion=complete_method)
]
ContextOption = Annotated[int | None, typer.Option("--context", "-c", help="the window to reach, in tokens")]
FactorOption = Annotated[
    float | None, typer.Option("--factor", "-f", help="the same as a multiple of the original window")
]
TrackOption = Annotated[
    str | None,
    typer.Option(
        "--track",
        help="where the run goes besides its own files: wandb (offline without a key)",
        autocompletion=complete_from("wandb"),
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base",
        help="for a checkpoint that already carries scaling: original or checkpoint",
        autocompletion=complete_from("original", "checkpoint"),
    ),
]
OriginalOption = Annotated[
    int | None,
    typer.Option("--original-context", help="the window that the base was trained with, if its configuration is wrong"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document instead of a table")]


def spelled_methods(text: str | None) -> list[str] | None:
    """Return the methods of a comma list, each spelled in full."""
    if text is None:
        return None
    from rope_ext.plan import spell
    from rope_ext.registry import parse_methods

    return [spell(method) for method in parse_methods(text)]


def size_in_bytes(text: str | None) -> int | None:
    """Return bytes: a whole number, or one with KB, MB, GB (powers of 1000), KiB, MiB, GiB (of 1024)."""
    if text is None:
        return None
    from recipes.load import RecipeError

    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) *([KMG]?)(i?)B?", text.strip())
    if found is None:
        raise RecipeError(f"memory-budget: {text!r} is no size; write bytes, or a number with MiB, GiB, MB or GB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMG".index(prefix or " "))


def words_of(text: str | None) -> list[str] | None:
    """Return the words of a comma list."""
    return None if text is None else [part.strip() for part in text.split(",")]


def numbers_of(text: str | None, name: str, kind: type[int] | type[float], example: str) -> list[int | float] | None:
    """Return the numbers of a comma list.

    Raises:
        RecipeError: a part is none of that kind.
    """
    if text is None:
        return None
    from recipes.load import RecipeError

    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise RecipeError(f"{name}: {text!r} is not a comma list of {what}; write {example}") from None


def base_of(value: str | None) -> "ScaledBase | None":
    """Return what --base says; what reads a geometry says what is allowed."""
    return cast("ScaledBase | None", value)
