"""YAML in, recipes out; every error names the file, the key and the nearest known key."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from evals.rows import write_whole
from recipes.schema import CompareRecipe
from rope_ext.errors import RopeExtError
from rope_ext.plan import spell
from rope_ext.registry import method, nearest, parse_method

CONFIGS = Path(__file__).parent / "configs"
DEFAULTS = {"tiny": CONFIGS / "tiny" / "compare.yaml", "smollm2": CONFIGS / "smollm2-135m" / "compare.yaml"}


class RecipeError(RopeExtError, ValueError):
    """A recipe that cannot be read or does not make sense."""


def read_recipe(path: Path) -> dict[str, object]:
    """Return the keys of a YAML recipe, not yet validated.

    Raises:
        RecipeError: the file is missing, not YAML, or not a mapping.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # besides bad syntax: an impossible date or nesting
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
        values["methods"] = [_spelled(entry, where) for entry in methods]
        if not methods:
            raise RecipeError(f"{where}: methods is empty; name at least one, as unscaled")
    try:
        recipe = TypeAdapter(CompareRecipe).validate_python(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: {_explain(error)}") from None
    if recipe.baseline is not None:
        recipe = replace(recipe, baseline=_spelled(recipe.baseline, where))
        if recipe.baseline not in recipe.methods:
            raise RecipeError(
                f"{where}: baseline {recipe.baseline!r} is not among the methods ({', '.join(recipe.methods)}); add it"
            )
    _check(recipe, where)
    return recipe


def _check(recipe: CompareRecipe, where: str) -> None:
    """Refuse what contradicts itself, or would have no effect."""
    for key, entries in (
        ("perplexity.protocols", recipe.perplexity.protocols),
        ("methods", recipe.methods),
        ("passkey.depths", recipe.passkey.depths),
        ("passkey.positions", recipe.passkey.positions),
        ("passkey.variants", recipe.passkey.variants),
    ):
        repeated = sorted({str(v) for v in entries if entries.count(v) > 1})
        if repeated:
            raise RecipeError(f"{where}: {key} names {', '.join(repeated)} twice; each once")
    if len({f"{depth:g}" for depth in recipe.passkey.depths}) < len(recipe.passkey.depths):
        raise RecipeError(f"{where}: passkey.depths holds two that agree to six digits; give them farther apart")
    if recipe.passkey.positions and recipe.passkey.grid == "relative":
        raise RecipeError(f"{where}: passkey.positions say nothing on the relative grid; add grid: absolute")
    if recipe.passkey.generate and not recipe.passkey.share:
        raise RecipeError(f"{where}: passkey.share says nothing where answers are decoded; leave one of them out")


def write_recipe(recipe: CompareRecipe, path: Path) -> None:
    """Write the resolved recipe; `rope-ext compare --recipe` runs it again."""
    plain = _plain(asdict(recipe))
    # A torn one could be read as another recipe
    write_whole(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _spelled(entry: object, where: str) -> str:
    if isinstance(entry, str):
        return spell(parse_method(entry))
    if isinstance(entry, dict) and len(entry) == 1:
        [(name, values)] = entry.items()
        values = {} if values is None else values
        if isinstance(name, str) and isinstance(values, dict) and all(isinstance(key, str) for key in values):
            return spell(method(name, **values))
    raise RecipeError(
        f"{where}: methods: {entry!r} is not a method; write yarn, yarn:beta_fast=16 or {{yarn: {{beta_fast: 16}}}}"
    )


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        known = _keys_at(first["loc"][:-1])
        return f"{path}: not a key of a recipe{nearest(str(first['loc'][-1]), known)} known: {', '.join(known)}"
    return f"{path}: {first['input']!r} is refused: {first['msg']}"


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    node: object = CompareRecipe()
    for part in location:
        node = getattr(node, str(part), node)
    return [f.name for f in fields(node)] if is_dataclass(node) else []
