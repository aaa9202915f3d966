"""The recipe of a fine-tune from YAML: keys set on the command line, and what contradicts itself refused."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from recipes.load import CONFIGS, RecipeError, check_tasks, refuse_repeated, spelled_method, validated
from recipes.plain_yaml import parse_yaml
from recipes.tuning import FinetuneRecipe, Parallel, Source
from rope_ext.registry import nearest


def make_finetune(values: Mapping[str, object], where: str = "recipe") -> FinetuneRecipe:
    """Return the fine-tune that these keys describe, its method spelled in full.

    Raises:
        RecipeError: an unknown key, a value out of range, or keys that contradict each other.
        MethodError: an unknown method or hyper-parameter.
    """
    values = dict(values)
    if "method" in values:
        values["method"] = spelled_method(values["method"], where, key="method")
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("sources"), list):
        named = [{"name": source} if isinstance(source, str) else source for source in data["sources"]]
        values["data"] = data | {"sources": named}
    recipe = validated(FinetuneRecipe, values, where)
    _check(recipe, where)
    return recipe


def _check(recipe: FinetuneRecipe, where: str) -> None:
    """Refuse what contradicts itself, has no effect, or would be wrong without a word."""
    for words in (*_of_training(recipe), *_of_data(recipe), *_of_processes(recipe)):
        raise RecipeError(f"{where}: {words}")
    refuse_repeated("eval.at", recipe.eval.at, where)
    refuse_repeated("eval.lengths", recipe.eval.lengths, where)
    refuse_repeated("track.report_to", recipe.track.report_to, where)
    refuse_repeated("data.sources", tuple(spelled_source(source) for source in recipe.data.sources), where)
    check_tasks(recipe.eval.perplexity, recipe.eval.passkey, f"{where}: eval")


def row_tokens_of(recipe: FinetuneRecipe) -> int:
    """Return the tokens of a training row."""
    data = recipe.data
    return data.pose.window if data.pose else data.row_tokens or recipe.context


def spelled_source(source: Source) -> str:
    """Return how a source is called in messages."""
    return source.name + (" with recall" if source.recall else "")


MOST_ROWS = 5_000_000
"""Rows of one run; ten thousand steps of 512 are as many."""


def _of_training(recipe: FinetuneRecipe) -> Iterator[str]:
    train = recipe.train
    if train.rows_per_step % train.rows_per_device:
        yield (
            f"train.rows_per_step: {train.rows_per_step} rows are not whole forwards of train.rows_per_device: "
            f"{train.rows_per_device}; give a multiple"
        )
    if 0 < train.steps <= train.warmup_steps:
        yield (
            f"train.warmup_steps: {train.warmup_steps} leave nothing of train.steps: {train.steps}, so that the rate "
            "never reaches its peak; give fewer"
        )
    if train.steps * train.rows_per_step > MOST_ROWS:
        yield (
            f"train.steps: {train.steps} of {train.rows_per_step} rows are more than the {MOST_ROWS:,} rows that are "
            "planned at once; give fewer"
        )
    if train.min_lr_fraction and train.schedule != "cosine":
        yield "train.min_lr_fraction: it says nothing without schedule: cosine; leave it out"
    late = [step for step in recipe.eval.at if step >= train.steps]
    if late:
        yield (
            f"eval.at: {late[0]} is not below train.steps: {train.steps}; after the last step is measured anyway: "
            "leave it out"
        )


def _of_data(recipe: FinetuneRecipe) -> Iterator[str]:
    data, row = recipe.data, row_tokens_of(recipe)
    if data.pose and data.row_tokens:
        yield "data.row_tokens: it says nothing beside pose, whose window is a row; leave one of them out"
    if row > recipe.context:
        yield (
            f"data: a row of {row} tokens is longer than the context of {recipe.context}, so that positions would be "
            "trained that are not asked for; give at most that"
        )
    if data.pose and row == recipe.context:
        yield f"data.pose.window: {row} is the context, so that no position is skipped; give less, or leave pose out"
    if data.pose and data.pose.chunks > row:
        yield f"data.pose.chunks: {data.pose.chunks} do not fit into a window of {row}; give fewer"
    if data.min_tokens > row:
        yield f"data.min_tokens: {data.min_tokens} are more than a row of {row}, so that nothing is left; give fewer"
    for source in data.sources:
        if (source.long_tokens is None) != (source.long_share is None):
            yield f"data.sources ({source.name}): long_tokens and long_share go together; give both or neither"


def _of_processes(recipe: FinetuneRecipe) -> Iterator[str]:
    parallel, row = recipe.train.parallel, row_tokens_of(recipe)
    if recipe.train.adapter is not None and _is_sharded(parallel):
        yield "train.adapter: with parallel.fsdp, context or ulysses it is not supported; leave one of them out"
    if recipe.eval.at and _is_sharded(parallel):
        yield (
            "eval.at: a model in pieces on several processes (train.parallel) is measured before and after training "
            "alone; leave it out"
        )
    if parallel.cpu_offload and parallel.fsdp == 1:
        yield "train.parallel.cpu_offload: it says nothing without fsdp; leave it out"
    if sum(size > 1 for size in (parallel.fsdp, parallel.context, parallel.ulysses)) > 1:
        yield "train.parallel: fsdp, context and ulysses exclude each other here; give one of them"
    if parallel.context == parallel.ulysses == 1:
        return
    if recipe.data.pose is not None:
        yield (
            "train.parallel: PoSE's rows are short, and their positions do not survive being cut over GPUs; leave "
            "context and ulysses out"
        )
    elif recipe.data.min_tokens < row:
        yield (
            "train.parallel: a row that is cut over GPUs loses the borders between its documents, which would see each "
            f"other; keep whole rows alone with data.min_tokens: {row}"
        )


def _is_sharded(parallel: Parallel) -> bool:
    return max(parallel.fsdp, parallel.context, parallel.ulysses) > 1


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped one.

    Raises:
        RecipeError: there is neither; names those that are shipped.
    """
    path = Path(name)
    # os.path.exists is False where Path.exists raises: for a name too long to be one
    if os.path.exists(name) and not path.is_dir():  # noqa: PTH110
        return path
    known = shipped()
    if name.removesuffix(".yaml") in known:
        return CONFIGS / f"{name.removesuffix('.yaml')}.yaml"
    raise RecipeError(
        f"finetune: {name!r} is no file{nearest(name, known)} give a YAML file, or one of {', '.join(known)}"
    )


def shipped() -> list[str]:
    """Return the names of the fine-tunes that come with the package."""
    found = (path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
    return sorted(name for name in found if not name.endswith("/compare"))


def override(values: dict[str, object], words: str) -> None:
    """Put `path.to.key=value` into the keys of a recipe; the value is read as YAML, a number in a path is a place.

    Raises:
        RecipeError: no such path, or no value.
    """
    path, equals, text = words.partition("=")
    if not equals or not all(path.split(".")):
        raise RecipeError(f"set: {words!r} is no setting; write path.to.key=value, as train.steps=200")
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a number or nesting too long
        raise RecipeError(f"set: {words[:80]!r}: the value is not YAML ({getattr(error, 'problem', error)})") from error
    *parents, last = path.split(".")
    node: Any = values
    for part in parents:
        if isinstance(node, dict):
            found = node.get(part)
            # a copy: what was read stays as it is, and a section that is not there begins empty
            node[part] = list(found) if isinstance(found, list) else dict(found) if isinstance(found, dict) else {}
            node = node[part]
            continue
        node = _place(node, part, words)
    if isinstance(node, list):
        _place(node, last, words)
        node[int(last)] = value
    else:
        node[last] = value


def _place(node: list[Any], part: str, words: str) -> Any:
    if not part.isdecimal() or int(part) >= len(node):
        raise RecipeError(f"set: {words!r}: {part!r} is not a place in a list of {len(node)}; count from 0")
    return node[int(part)]
