"""The suite of benchmarks: what it keeps, what it refuses, and that its floors count what is computed."""

import json
import subprocess
import sys

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.docs.test_docs import ROOT, script

FOUND = {"machine": "m", "commit": "c0ffee", "results": [{"name": "one", "ratio": 2.0}]}


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Return the suite over benchmarks of our own."""
    module = script("bench")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    return module


def write(suite, code):
    (suite.ROOT / "scripts" / "bench_evals.py").write_text(code)


def test_results_are_kept_as_they_come(suite, capsys):
    write(suite, f"print('a line of a library'); print({json.dumps(json.dumps(FOUND))})")
    suite.measure("evals", quick=False)
    assert json.loads((suite.KEPT / "bench_evals.json").read_text()) == FOUND
    assert "2.00 times" in capsys.readouterr().out
    write(suite, "import sys; print('quick', sys.argv[1:])")
    suite.measure("evals", quick=True)
    assert "quick ['--quick']" in capsys.readouterr().out
    assert json.loads((suite.KEPT / "bench_evals.json").read_text()) == FOUND


def test_a_benchmark_that_fails_leaves_what_was_kept(suite):
    (suite.KEPT / "bench_evals.json").write_text("{}")
    write(suite, "print('{'); raise SystemExit(7)")
    with pytest.raises(SystemExit, match="evals: the benchmark failed with exit status 7"):
        suite.measure("evals", quick=False)
    assert (suite.KEPT / "bench_evals.json").read_text() == "{}"


def test_what_is_measured_with_changes_says_so(suite, capsys):
    write(suite, f"print({json.dumps(json.dumps(FOUND | {'commit': 'c0ffee-dirty'}))})")
    suite.measure("evals", quick=False)
    assert "changes that are not committed" in capsys.readouterr().out


def test_results_that_the_suite_has_kept_are_no_changes(suite):
    """The first one's results lie in the checkout when the second one asks for its commit."""

    def git(*words):
        subprocess.run(["git", "-C", suite.ROOT, *words], check=True, capture_output=True)

    results = suite.ROOT / "recipes" / "results"
    results.mkdir(parents=True)
    (results / "bench_alibi.json").write_text("{}")
    write(suite, f"print({json.dumps(json.dumps(FOUND | {'commit': 'c0ffee-dirty'}))})")
    git("init")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-m", "m")
    (results / "bench_alibi.json").write_text('{"new": 1}')
    suite.measure("evals", quick=False)
    assert json.loads((suite.KEPT / "bench_evals.json").read_text())["commit"] == "c0ffee"
    (suite.ROOT / "scripts" / "bench_evals.py").write_text(
        (suite.ROOT / "scripts" / "bench_evals.py").read_text() + "#"
    )
    suite.measure("evals", quick=False)
    assert json.loads((suite.KEPT / "bench_evals.json").read_text())["commit"] == "c0ffee-dirty"


def test_another_benchmark_is_refused():
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "--only", "evals,speed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'speed' is no benchmark; there are evals, training, alibi, floors" in done.stderr


def test_floors_count_the_products_that_are_made(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    floors = script("bench_floors")
    for name, case in floors.cases(quick=True).items():
        with FlopCounterMode(display=False) as counter:
            case.run()
        counted = counter.get_flop_counts().get("Global", {})
        products = sum(count for op, count in counted.items() if "mm" in str(op))
        assert case.products == products, name


def test_the_profile_s_parts_make_up_the_time():
    floors = script("bench_floors")
    seconds, parts = floors.measure(floors.cases(quick=True)["nll_tiny"], 1)
    assert sum(parts.values()) == pytest.approx(seconds, rel=0.05)
    assert {"products", "attention", "elementwise", "loss"} <= parts.keys()
    assert floors.kind_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"
    assert [floors.kind_of(f"aten::{name}") for name in ("mm", "expand", "exp_", "copy_")] == [
        "products",
        "elementwise",
        "loss",
        "copies",
    ]
