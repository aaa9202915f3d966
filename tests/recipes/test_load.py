from pathlib import Path

import pytest
import yaml

from recipes.load import CONFIGS, DEFAULTS, RecipeError, make_recipe, read_recipe, write_recipe
from recipes.plain_yaml import parse_yaml
from recipes.schema import CompareRecipe
from recipes.tuning import FinetuneRecipe
from recipes.tuning_load import make_finetune
from rope_ext import MethodError


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.relative_to(CONFIGS).as_posix())
def test_every_shipped_recipe_loads(path):
    made = make_recipe(read_recipe(path)) if path.stem == "compare" else make_finetune(read_recipe(path))
    assert isinstance(made, CompareRecipe | FinetuneRecipe)


def test_defaults_exist():
    assert all(path.is_file() for path in DEFAULTS.values())


def test_methods_in_either_spelling():
    recipe = make_recipe(yaml.safe_load("methods: [linear, 'yarn:truncate=false', {abf: {theta: 160000}}, {ntk: }]"))
    assert recipe.methods == ("linear", "yarn:truncate=false", "abf:theta=160000", "ntk")


def test_the_resolved_recipe_reads_back(tmp_path):
    recipe = make_recipe(read_recipe(DEFAULTS["tiny"]))
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert make_recipe(read_recipe(tmp_path / "recipe.yaml")) == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: tiny", "modle: not a key of a recipe; did you mean 'model'?.*known: model, methods"),
        (
            "passkey: {trails: 3}",
            "passkey.trails: not a key of a recipe; did you mean 'trials'?.*depths, positions",
        ),
        ("context: lots", "context: 'lots' is refused"),
        ("lengths: [256, 1]", r"lengths.1: 1 is refused"),
        ("passkey: {depths: [0.5, 1.5]}", "passkey.depths.1: 1.5 is refused"),
        ("perplexity: {documents: -1}", "perplexity.documents: -1 is refused"),
        ("methods: []", "methods is empty"),
        ("methods: [{yarn: {beta_fast: 16}, ntk: {}}]", "is not a method; write yarn"),
        ("methods: [3]", "3 is not a method"),
        ("methods: [{yarn: {1: 2}}]", "is not a method"),
        ("seed: -1", "seed: -1 is refused"),
        ("methods: [yarn, 'yarn:beta_fast=32']", "yarn twice"),
        ("passkey: {depths: [0.5, 0, 0.5]}", "passkey.depths names 0.5 twice"),
        ("passkey: {variants: [text, uuid, text]}", "passkey.variants names text twice"),
        ("passkey: {variants: [texts]}", "passkey.variants.0: 'texts' is refused"),
        ("passkey: {grid: absolute, positions: [0, 5, 5]}", "passkey.positions names 5 twice"),
        ("passkey: {grid: absolute, positions: [-1]}", "passkey.positions.0: -1 is refused"),
        ("passkey: {positions: [5]}", "passkey.positions say nothing on the relative grid"),
        ("passkey: {generate: true, share: false}", "passkey.share says nothing where answers are decoded"),
        ("base: somewhere", "base: 'somewhere' is refused"),
        ("context: 2:10", "context: '2:10' is refused"),
        ("context: 010", "context: '010' is refused"),
        ("context: true", "context: True is refused"),
        ("context: 2020-01-01", "context: '2020-01-01' is refused"),
        ("passkey: {threshold: true}", "passkey.threshold: True is refused"),
        ("lengths: 256", r"lengths: 256 is refused: write a list, as \[a, b\]"),
        ("data: &a [*a]", "it nests without end"),
    ],
)
def test_bad_recipes_are_told_by_path(text, words):
    with pytest.raises(RecipeError, match=words):
        make_recipe(parse_yaml(text))


def test_unknown_methods_keep_their_own_message():
    with pytest.raises(MethodError, match="did you mean 'yarn'"):
        make_recipe({"methods": ["yran"]})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("a: [", "line 1 is not YAML"),
        ("- a\n", "not a mapping"),
        ("", "not a mapping"),
        ("model: tiny\nseed: 1\nmodel: smollm2", "line 3 is not YAML: 'model' stands twice in one place"),
        ("passkey: {trials: 2, trials: 3}", "line 1 is not YAML: 'trials' stands twice"),
        ("[" * 3000, "is not YAML"),
    ],
)
def test_bad_files_are_named(tmp_path, content, words):
    path = Path(tmp_path) / "r.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=words):
        read_recipe(path)
