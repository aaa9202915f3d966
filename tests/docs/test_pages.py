"""The pages of docs/: complete, current, and their commands and code run."""

import dataclasses
import re
import shlex

import pytest
import torch
import yaml
from typer.testing import CliRunner

from rope_ext import cli
from rope_ext.registry import known_methods
from tests.docs.test_docs import ROOT, script

DOCS = ROOT / "docs"
METHODS = DOCS / "methods"
HEADINGS = [
    "Equation",
    "Hyper-parameters",
    "Picture",
    "When to use it",
    "Command",
    "Python",
    "Exports",
    "Differences between implementations",
    "Source",
]
PAGES = sorted(DOCS.rglob("*.md"))
RUNNING = [page for page in PAGES if re.search(r"^```(python|sh)$", page.read_text(), flags=re.MULTILINE)]
regen = script("regen_docs")


@pytest.fixture
def one_thread():
    """Small forwards on two threads wait for each other, for many times their own length where a core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


def section(name, heading):
    text = (METHODS / f"{name}.md").read_text()
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("name", known_methods())
def test_every_method_has_a_page_of_one_form(name):
    text = (METHODS / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n\n")
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS
    assert "```math" in section(name, "Equation")
    assert re.search(rf"!\[[^\]]{{30,}}\]\({name}\.svg\)", section(name, "Picture"))
    assert len(blocks(METHODS / f"{name}.md", "python")) == 1


def written(default):
    """Return a default as the pages write it."""
    if default is None or default == ():
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default).removesuffix(".0")


@pytest.mark.parametrize("name", known_methods())
def test_every_hyper_parameter_is_told_with_its_default(name):
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section(name, "Hyper-parameters"), flags=re.MULTILINE)
    assert rows == [(field.name, written(field.default)) for field in dataclasses.fields(known_methods()[name])]


@pytest.mark.usefixtures("one_thread")
# peft asks transformers for a name that transformers 5.24 has deprecated
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_the_code_and_the_commands_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks(page, "python"):
        exec(code, {})
    lines = [line for code in blocks(page, "sh") for line in code.replace("\\\n", "").splitlines()]
    if page.parent == METHODS:
        assert lines
    for line in lines:
        if line.startswith(("torchrun ", "accelerate launch ")):
            continue  # tests/recipes/test_ranks.py runs several processes
        assert line.startswith("rope-ext "), line
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"


def test_tables_and_pictures_are_current():
    assert regen.stale() == []


def test_a_changed_number_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(regen, "CONTEXT", 4 * regen.GEOMETRY.original_context)
    assert regen.drawn_from(METHODS / "yarn.svg") != regen.PICTURES["yarn"]().checksum
    assert regen.drawn_from(tmp_path / "missing.svg") is None


@pytest.mark.parametrize("name", known_methods())
def test_a_picture_is_drawn_alike_twice_and_is_small(name):
    picture = regen.PICTURES[name]()
    first = picture.svg()
    assert first == picture.svg()
    assert len(first) < 60_000
    assert len((METHODS / f"{name}.svg").read_bytes()) < 60_000


def anchors(page):
    """Return what a page's headings are called in links."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_link_resolves():
    pages = [*PAGES, ROOT / "README.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    relative = [(page, *link.partition("#")[::2]) for page, link in links if "://" not in link]
    assert len(relative) > 60
    broken = [
        f"{page.name}: {link}#{anchor}"
        for page, link, anchor in relative
        if not (target := page.parent / link if link else page).exists() or (anchor and anchor not in anchors(target))
    ]
    assert broken == []


def test_the_indexes_link_every_page():
    index = (METHODS / "README.md").read_text()
    pages = [path.name for path in METHODS.glob("*.md") if path.name != "README.md"]
    assert sorted(pages) == sorted(f"{name}.md" for name in known_methods())
    assert [page for page in [*pages, "../export.md"] if f"]({page})" not in index] == []
    index = (DOCS / "README.md").read_text()
    assert [
        page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"]({page.name})" not in index
    ] == []


def test_the_recipes_of_the_pages_are_some():
    from recipes.load import make_recipe
    from recipes.tuning_load import make_finetune

    (training,) = blocks(DOCS / "training.md", "yaml")
    recipe = make_finetune(yaml.safe_load(training))
    assert recipe.eval.at == (20, 50)
    assert recipe.data.sources[1].recall
    (benched,) = blocks(DOCS / "lm-eval.md", "yaml")
    assert make_recipe(yaml.safe_load(benched)).benchmarks.limit == 50
    (comparing,) = blocks(DOCS / "recipes.md", "yaml")
    recipe = make_recipe(yaml.safe_load(comparing))
    assert recipe.passkey.positions == (0, 128, 512)
    assert recipe.methods[2] == "yarn:beta_fast=16"


def test_named_files_exist():
    """What a page names in code as a file of this repository is there."""
    pattern = r"`((?:recipes|scripts|tests|rope_ext|evals)/[\w./-]+)`"
    named = {name for page in PAGES for name in re.findall(pattern, page.read_text())}
    named -= {"evals/before", "evals/step-N", "evals/after"}  # of a run
    assert {"recipes/results/tiny/", "scripts/experiment_finetune.py"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []
