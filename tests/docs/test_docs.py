"""Documents that cannot rot: the README's code runs, its tables are current, everything is mentioned."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes.load import CONFIGS
from rope_ext import cli
from rope_ext.registry import known_methods

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [c.name or c.callback.__name__ for c in cli.app.registered_commands]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_current():
    regen = script("regen_readme")
    for page in regen.PAGES:
        text = (ROOT / page).read_text()
        assert regen.filled(page, text) == text


def test_the_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    python = [code for language, code in BLOCKS if language == "python"]
    usage, reload, _ = python
    exec(usage, {})
    exec(reload, {})


def test_the_method_of_the_readme_works(tmp_path, monkeypatch, llama):
    """Written as one file beside the others it is found, patches and exports, as the text says."""
    import rope_ext.methods
    from rope_ext import extend, save_extended
    from rope_ext.registry import parse_method

    (code,) = (code for language, code in BLOCKS if language == "python" and "class Half" in code)
    (tmp_path / "half.py").write_text(code)
    monkeypatch.setattr(rope_ext.methods, "__path__", [*rope_ext.methods.__path__, str(tmp_path)])
    assert "half" in known_methods()
    with extend(llama, parse_method("half:kept=0.25"), factor=4) as patch:
        ratio = patch.plan.inv_freq / patch.geometry.inv_freq
        assert ratio.tolist() == [1, 1, *[0.25] * 6]
        save_extended(llama, tmp_path / "out")
    sys.modules.pop("rope_ext.methods.half")


def test_the_shell_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("rope-ext ")]
    assert len(ours) >= 4
    for words in ours:
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, f"{words}: {result.output}"
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake (\w+)", "\n".join(lines))
    assert targets == ["demo", "test", "finetune"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented_and_has_help(command):
    assert f"rope-ext {command}" in README
    assert f"rope-ext {command}" in (ROOT / "docs" / "command-line.md").read_text()
    assert CliRunner().invoke(cli.app, [command, "--help"]).exit_code == 0


def test_every_method_is_documented():
    assert all(f"| `{name}` |" in README for name in known_methods())


def test_every_recipe_and_script_is_mentioned():
    docs = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    recipes = [path.relative_to(ROOT).as_posix() for path in CONFIGS.rglob("*.yaml")]
    assert [path for path in recipes if path not in docs] == []
    assert [path.name for path in (ROOT / "scripts").glob("*.py") if path.name not in docs] == []


def test_the_changelog_knows_the_version():
    import rope_ext

    assert f"## {rope_ext.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_the_wheel_ships_the_code_and_its_data(tmp_path):
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".venv", ".git", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignore)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "rope_ext/py.typed",
        "rope_ext/assets/tiny/model.safetensors",
        "rope_ext/assets/tiny/tokenizer.json",
        "rope_ext/methods/yarn.py",
        "evals/passkey.py",
        "recipes/configs/tiny/compare.yaml",
        "recipes/configs/smollm2-135m/compare.yaml",
        "recipes/configs/llama2-7b/yarn-32k.yaml",
    }
    assert expected - names == set()
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "runs/"))]
