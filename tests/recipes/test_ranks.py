"""Several processes on one run: the same table from any number of them, and nothing lost when they are killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from evals.rows import merge_shards, read_cells, read_samples, shard_name
from recipes.compare import run_compare
from recipes.load import make_recipe, write_recipe
from recipes.ranks import ALONE, Ranks, gather, join, once
from recipes.setting import prepare


def start(num, *words, **more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
    command += ["-m", "rope_ext", "compare", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def plain(cells):
    return [(c.method, c.task, c.protocol, c.length, c.depth, c.n, c.status) for c in cells], [
        # nats differ by what fp32 sums do in another order
        pytest.approx(c.value, rel=1e-5) for c in cells
    ]  # fmt: skip


@pytest.fixture
def asked(recipe, tmp_path):
    recipe |= {"passkey": {"trials": 3, "depths": [0, 1], "variants": ["classic", "text", "needle-only"]}}
    recipe |= {"perplexity": {"documents": 3, "protocols": ["prefix", "sliding"]}}
    write_recipe(make_recipe(recipe), tmp_path / "asked.yaml")
    return recipe


@pytest.mark.slow
def test_two_processes_give_the_table_of_one(asked, tmp_path):
    one = run_compare(prepare(make_recipe(asked), tmp_path / "one"))
    out = tmp_path / "two"
    process = start(2, "--recipe", tmp_path / "asked.yaml", "--out", out, "--json")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    told = json.loads(stdout)  # one of them speaks
    assert len(told["cells"]) == len(one.cells)
    cells = read_cells(out / "cells.jsonl")
    names, values = plain(one.cells)
    assert plain(cells)[0] == names
    assert [c.value for c in cells] == values
    assert {s.key() for s in read_samples(out / "samples.jsonl")} == {
        s.key() for s in read_samples(tmp_path / "one" / "samples.jsonl")
    }
    assert not list(out.glob("*.part*"))
    [leg] = json.loads((out / "run.json").read_text())["legs"]
    assert leg["processes"] == 2
    assert (out / "report.md").exists()


@pytest.mark.slow
def test_killed_processes_leave_shards_that_one_goes_on_with(asked, tmp_path):
    out = tmp_path / "run"
    process = start(2, "--recipe", tmp_path / "asked.yaml", "--out", out, start_new_session=True)
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if all((out / shard_name("samples.jsonl", rank)).exists() for rank in (0, 1)):
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    process.communicate()
    kept = {s.key() for s in read_samples(out / "samples.jsonl")}
    assert kept
    resumed = run_compare(prepare(make_recipe(asked), out, resume=True))
    one = run_compare(prepare(make_recipe(asked), tmp_path / "one"))
    assert plain(resumed.cells)[0] == plain(one.cells)[0]
    assert [c.value for c in resumed.cells] == plain(one.cells)[1]
    assert not list(out.glob("*.part*"))
    lines = (out / "samples.jsonl").read_text().splitlines()
    assert len([line for line in lines if line.endswith("}")]) == len(read_samples(out / "samples.jsonl"))


@pytest.mark.slow
def test_bad_input_is_one_line_from_several(tmp_path):
    process = start(2, "--model", "tinny", "--out", tmp_path / "run")
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode != 0
    assert stdout == ""
    assert stderr.count("rope-ext: ") == 1
    assert "did you mean 'tiny'?" in stderr
    assert not (tmp_path / "run").exists()


def test_shares_cover_everything_once():
    items = list(range(17))
    for world in (1, 2, 5, 20):
        shares = [Ranks(rank, world).mine(items) for rank in range(world)]
        assert sorted(item for share in shares for item in share) == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_without_a_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join() == ALONE
    assert gather(ALONE, 3) == [3]
    assert once(ALONE, lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        once(ALONE, lambda: 1 / 0)


def test_shards_are_merged_once_whatever_was_done_before(recipe, tmp_path):
    recipe |= {"methods": ["unscaled"], "passkey": {"trials": 0}}
    path = run_compare(prepare(make_recipe(recipe), tmp_path / "run")).out / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    whole = read_samples(path)
    path.write_text("".join(lines[:3]))
    for rank, part in enumerate((lines[2:4], lines[4:])):  # one line is in both
        (path.parent / shard_name(path.name, rank)).write_text("".join(part))
    (path.parent / shard_name(path.name, 2)).write_text(lines[0][:50])  # torn
    assert {s.key() for s in read_samples(path)} == {s.key() for s in whole}
    merge_shards(path)
    merge_shards(path)
    assert path.read_text() == "".join(lines)
    assert not list(path.parent.glob("*.part*"))
