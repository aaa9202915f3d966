"""What holds for every command: examples that run, --json, --quiet, completion, colours, exit codes as documented."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rope_ext import cli
from rope_ext.cli.start import in_front
from tests.recipes.test_cli import refused, rope_ext

SCRIPT = Path(sys.executable).parent / "rope-ext"
COMMANDS = {command.name or command.callback.__name__: command for command in cli.app.registered_commands}


def examples(command):
    title, *lines = COMMANDS[command].epilog.split("\n\n")
    assert title == "Examples:"
    return lines


def run(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "rope_ext", *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the runs that the examples speak of, made by the examples of compare themselves."""
    here = tmp_path_factory.mktemp("examples")
    (made,) = (line for line in examples("compare") if "--out first" in line and "--resume" not in line)
    with contextlib.chdir(here):
        assert rope_ext(*shlex.split(made)[1:]).exit_code == 0
    shutil.copytree(here / "first", here / "second")
    return here


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_examples_that_begin_with_it(command):
    lines = examples(command)
    assert lines
    assert all(line.startswith(f"rope-ext {command}") for line in lines)
    told = rope_ext(command, "--help").output
    assert all(line.split()[-1] in told for line in lines)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_examples_run(command, place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for line in examples(command):
        words = shlex.split(line)[1:]
        if "--out first" in line and "--resume" not in line:
            continue  # the fixture has run it
        if command == "convert":  # Meta's folders are not here; what is said is that, and nothing about words
            assert words[1] in refused(*words)
            continue
        if words == ["compare"] or (command == "finetune" and "--set" in words):
            words.append("--dry-run")  # the demo, and what the README runs in full
        if command == "finetune" and "--resume" in words:
            assert "tiny-2k" in refused(*words)  # nothing is there to go on with
            continue
        if command == "lm-eval" or "niah_single_1" in line:  # RULER's tasks look for data of nltk's over the network
            continue  # tests/recipes/test_bench.py runs it in a process of its own
        if command == "log":
            continue  # tests/recipes/test_tracking.py logs, without a network
        result = rope_ext(*words)
        assert result.exit_code == 0, f"{line}: {result.output}"


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"lm-eval"}))  # that is lm-eval's own
def test_every_command_can_print_json(command):
    assert "--json" in rope_ext(command, "--help").output


def test_options_of_the_command_itself_stand_anywhere():
    assert in_front(["compare", "--quiet", "--trials", "2"]) == ["--quiet", "compare", "--trials", "2"]
    assert in_front(["-q", "inspect", "tiny", "--debug"]) == ["--quiet", "--debug", "inspect", "tiny"]
    assert in_front(["inspect", "--", "--debug"]) == ["inspect", "--", "--debug"]


def test_quiet_shows_the_result_alone(checkpoint, data, tmp_path):
    words = ["compare", "--model", checkpoint, "--data", data, "--methods", "unscaled", "--context", "512"]
    words += ["--lengths", "512", "--documents", "2", "--trials", "0", "--json"]
    loud = run(*words, "--out", tmp_path / "loud")
    quiet = run(*words, "--out", tmp_path / "quiet", "--quiet")
    assert loud.returncode == quiet.returncode == 0
    assert "tokens" in loud.stderr
    assert quiet.stderr == ""
    assert len(json.loads(quiet.stdout)["cells"]) == len(json.loads(loud.stdout)["cells"])
    wrong = run("inspect", "nowhere", "-q")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1, "errors are told all the same"


def test_debug_behind_the_command_shows_where():
    result = run("inspect", "tiny", "--method", "yran", "--factor", "2", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("rope-ext: ")


@pytest.mark.skipif(not SCRIPT.exists(), reason="the command is not installed beside this Python")
@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["rope-ext", "inspect", "tiny", "--method", "ya"], ["yarn"]),
        (["rope-ext", "compare", "--methods", "yarn,ntk-"], ["yarn,ntk-by-parts"]),
        (["rope-ext", "inspect", "sm"], ["smollm2"]),
        (["rope-ext", "finetune", "smollm2"], ["smollm2-135m/gqa", "smollm2-135m/yarn-2x"]),
        (["rope-ext", "contr"], ["contrast"]),
    ],
)
def test_a_shell_completes(words, last):
    environment = {
        **os.environ,
        "_ROPE_EXT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    told = subprocess.run([SCRIPT], check=True, capture_output=True, text=True, env=environment).stdout
    assert told.split() == last


def test_nothing_is_coloured_in_a_pipe():
    for words in (["--help"], ["methods"], ["inspect", "tiny"], ["compare", "--dry-run"]):
        result = run(*words, TERM="xterm-256color")
        assert result.returncode == 0
        assert "\x1b" not in result.stdout + result.stderr
