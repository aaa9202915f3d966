"""YAML in, recipes out; every error names the file, the key and the nearest known key."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from evals.rows import write_whole
from recipes.plain_yaml import parse_yaml
from recipes.schema import Benchmarks, CompareRecipe, PasskeyTask, PerplexityTask
from recipes.tuning import FinetuneRecipe
from rope_ext.errors import RopeExtError
from rope_ext.plan import spell
from rope_ext.registry import method, nearest, parse_method

CONFIGS = Path(__file__).parent / "configs"
DEFAULTS = {
    "tiny": CONFIGS / "tiny" / "compare.yaml",
    "tiny-alibi": CONFIGS / "tiny-alibi" / "compare.yaml",
    "smollm2": CONFIGS / "smollm2-135m" / "compare.yaml",
}


Recipe = TypeVar("Recipe", CompareRecipe, FinetuneRecipe)


class RecipeError(RopeExtError, ValueError):
    """A recipe that cannot be read or does not make sense."""


def read_recipe(path: Path) -> dict[str, object]:
    """Return the keys of a YAML recipe, not yet validated.

    Raises:
        RecipeError: the file is missing, not YAML, or not a mapping.
    """
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # besides bad syntax: a number or nesting too long
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise RecipeError(f"recipe: {path}{where} is not YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(loaded, dict):
        raise RecipeError(f"recipe: {path} is not a mapping; write key: value lines, as model: tiny")
    return loaded


def make_recipe(values: Mapping[str, object], where: str = "recipe") -> CompareRecipe:
    """Return the recipe that these keys describe, every method in it spelled in full.

    Raises:
        RecipeError: an unknown key, or a value out of range.
        MethodError: an unknown method or hyper-parameter.
    """
    values = dict(values)
    methods = values.get("methods")
    if isinstance(methods, list | tuple):
        values["methods"] = [spelled_method(entry, where) for entry in methods]
        if not methods:
            raise RecipeError(f"{where}: methods is empty; name at least one, as unscaled")
    recipe = validated(CompareRecipe, values, where)
    if recipe.baseline is not None:
        recipe = replace(recipe, baseline=spelled_method(recipe.baseline, where))
        if recipe.baseline not in recipe.methods:
            raise RecipeError(
                f"{where}: baseline {recipe.baseline!r} is not among the methods ({', '.join(recipe.methods)}); add it"
            )
    _check(recipe, where)
    return recipe


def _check(recipe: CompareRecipe, where: str) -> None:
    """Refuse what contradicts itself, or would have no effect."""
    refuse_repeated("methods", recipe.methods, where)
    if set(recipe.track.report_to) - {"wandb"}:
        raise RecipeError(
            f"{where}: track.report_to takes wandb alone in a comparison; the others take training curves"
        )
    check_tasks(recipe.perplexity, recipe.passkey, where)
    refuse_repeated("benchmarks.tasks", recipe.benchmarks.tasks, where)
    if not recipe.benchmarks.tasks and recipe.benchmarks != Benchmarks():
        raise RecipeError(f"{where}: benchmarks names no tasks, so that the rest of it says nothing; add tasks: [...]")


def check_tasks(perplexity: PerplexityTask, passkey: PasskeyTask, where: str) -> None:
    """Refuse evaluations that contradict themselves.

    Raises:
        RecipeError: names the key behind `where`.
    """
    for key, entries in (
        ("perplexity.protocols", perplexity.protocols),
        ("passkey.depths", passkey.depths),
        ("passkey.positions", passkey.positions),
        ("passkey.variants", passkey.variants),
    ):
        refuse_repeated(key, entries, where)
    if len({f"{depth:g}" for depth in passkey.depths}) < len(passkey.depths):
        raise RecipeError(f"{where}: passkey.depths holds two that agree to six digits; give them farther apart")
    if passkey.positions and passkey.grid == "relative":
        raise RecipeError(f"{where}: passkey.positions say nothing on the relative grid; add grid: absolute")
    if passkey.generate and not passkey.share:
        raise RecipeError(f"{where}: passkey.share says nothing where answers are decoded; leave one of them out")


def refuse_repeated(key: str, entries: tuple[object, ...], where: str) -> None:
    """Refuse a list that names something twice.

    Raises:
        RecipeError: names the key and what is there twice.
    """
    repeated = sorted({str(entry) for entry in entries if entries.count(entry) > 1})
    if repeated:
        raise RecipeError(f"{where}: {key} names {', '.join(repeated)} twice; each once")


def write_recipe(recipe: CompareRecipe | FinetuneRecipe, path: Path) -> None:
    """Write the resolved recipe; `rope-ext compare --recipe` or `rope-ext finetune` runs it again."""
    plain = _plain(asdict(recipe))
    # A torn one could be read as another recipe
    write_whole(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def spelled_method(entry: object, where: str, key: str = "methods") -> str:
    """Return a method in either of its YAML forms as NAME:key=value.

    Raises:
        RecipeError: it is in neither form.
        MethodError: an unknown method or hyper-parameter.
    """
    if isinstance(entry, str):
        return spell(parse_method(entry))
    if isinstance(entry, dict) and len(entry) == 1:
        [(name, values)] = entry.items()
        values = {} if values is None else values
        if isinstance(name, str) and isinstance(values, dict) and all(isinstance(key, str) for key in values):
            return spell(method(name, **values))
    raise RecipeError(
        f"{where}: {key}: {entry!r} is not a method; write yarn, yarn:beta_fast=16 or {{yarn: {{beta_fast: 16}}}}"
    )


def validated(kind: type[Recipe], values: Mapping[str, object], where: str) -> Recipe:
    """Return the recipe of these keys, each of the right type and range.

    Raises:
        RecipeError: names the path of the first key that is not, and the nearest known one.
    """
    try:
        # Strictly, so that true is no 1; as JSON, so that a list may stand for a tuple all the same
        return TypeAdapter(kind).validate_json(json.dumps(values, default=str), strict=True)
    except (ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise RecipeError(f"{where}: it nests without end; write every section once") from None
        raise RecipeError(f"{where}: {_explain(error, kind)}") from None


def _explain(error: ValidationError, kind: type) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        known = _keys_at(kind, first["loc"][:-1])
        return f"{path}: not a key of a recipe{nearest(str(first['loc'][-1]), known)} known: {', '.join(known)}"
    if first["type"] in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return f"{path}: a recipe has to say it"
    wanted = "write a list, as [a, b]" if first["type"] == "tuple_type" else first["msg"]
    return f"{path}: {first['input']!r} is refused: {wanted}"


def _keys_at(kind: type, location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the section at a place: `data.sources.0` are those of a source."""
    for part in location:
        if isinstance(part, str):
            kind = _section(get_type_hints(kind, include_extras=True)[part])
    return [f.name for f in fields(kind)]


def _section(hint: Any) -> type:
    """Return the section among a field's types: of Adapter | None, or of a tuple of sources."""
    if is_dataclass(hint):
        return hint  # pyright: ignore[reportReturnType]  (a class, not an instance)
    found = [section for arg in get_args(hint) if (section := _section(arg)) is not type(None)]
    return found[0] if found else type(None)
