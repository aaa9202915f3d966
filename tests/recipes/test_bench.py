"""`rope-ext bench`: lm-eval's tasks as columns of a run, paired, resumed, reported; and lm-eval's own command line."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval")

from evals import rows
from recipes.benchmarks import FROM_HUB, MADE_HERE, OURS, TASKS
from recipes.folders import grouped, read_folder
from recipes.page import write_page
from tests.recipes.test_cli import document, refused, rope_ext

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own, and its tasks'
NEXT_LINE = "lm-eval/rope_ext_next_line"
ASKED = ("--tasks", "rope_ext_passkey,native-offline", "--context", "1024", "--lengths", "300,800", "--limit", "10")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "bench"
    return out, document("bench", "tiny", "--methods", "unscaled,yarn", *ASKED, "--out", out, "--json")


def test_one_row_a_length_with_n_and_interval(run):
    out, told = run
    cells = rows.read_cells(out / "cells.jsonl")
    assert len(told["cells"]) == len(cells) == 8
    at = {(c.method, c.task, c.protocol, c.length): c for c in cells}
    for length in (300, 800):
        found = at["yarn", "lm-eval/rope_ext_passkey", "found, 0-shot", length]
        assert (found.n, found.metric, found.status) == (10, "found", "ok")
        assert found.ci_low < found.value <= 1 <= found.ci_high + 1e-9
        assert at["unscaled", "lm-eval/rope_ext_passkey", "found, 0-shot", length].data_hash == found.data_hash
    assert at["unscaled", "lm-eval/rope_ext_passkey", "found, 0-shot", 800].value == 0
    assert at["yarn", "lm-eval/rope_ext_passkey", "found, 0-shot", 800].value > 0.6
    longest = next(c.length for c in cells if c.task == "lm-eval/rope_ext_next_line")
    assert longest <= 256, "short-context sanity stays within the native window of tiny"
    assert {c.protocol for c in cells if c.length == longest} == {"acc, 0-shot", "acc_norm, 0-shot"}


def test_differences_are_paired_and_native_ones_marked(run):
    out, _ = run
    found = {(c.task, c.protocol, c.length): c for c in rows.read_contrasts(out / "differences.jsonl")}
    assert len(found) == 4
    passkey = found["lm-eval/rope_ext_passkey", "found, 0-shot", 800]
    assert (passkey.method, passkey.against, passkey.metric, passkey.native) == ("yarn", "unscaled", "found", False)
    assert passkey.ci_low > 0
    assert all(c.native for (task, *_), c in found.items() if task == "lm-eval/rope_ext_next_line")


def test_raw_samples_are_as_lm_eval_logs_them(run):
    out, _ = run
    files = [*(out / "lm-eval").glob("rope_ext_passkey-800-*.jsonl")]
    assert len(files) == 2, "one a method"
    for file in files:
        logged = [json.loads(line) for line in file.read_text().splitlines()]
        assert [each["doc_id"] for each in logged] == list(range(10))
        assert logged[0].keys() >= {
            "doc",
            "target",
            "arguments",
            "resps",
            "filtered_resps",
            "filter",
            "metrics",
            "found",
        }


def test_a_run_that_was_killed_goes_on_and_ends_alike(run, tmp_path):
    out, told = run
    other = tmp_path / "killed"
    other.mkdir()
    (other / "recipe.yaml").write_text((out / "recipe.yaml").read_text())
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (other / "samples.jsonl").write_text("".join(lines[:13]) + lines[13][:40])
    (other / "lm-eval").mkdir()
    for file in (out / "lm-eval").glob("rope_ext_passkey-800-*.jsonl"):
        # The last document was logged and its sample was not, and another was torn as it was written
        (other / "lm-eval" / file.name).write_text(
            file.read_text().splitlines(keepends=True)[-1] + '{"doc_id": 0, "fil'
        )
    again = document("compare", "--resume", "--out", other, "--json")
    keep = ("method", "task", "protocol", "length", "value", "ci_low", "ci_high", "n", "data_hash")
    assert [[c[k] for k in keep] for c in again["cells"]] == [[c[k] for k in keep] for c in told["cells"]]
    for file in (other / "lm-eval").glob("rope_ext_passkey-800-*.jsonl"):
        first, torn, *rest = file.read_text().splitlines()
        assert torn == '{"doc_id": 0, "fil'
        numbers = [json.loads(line)["doc_id"] for line in (first, *rest)]
        assert len(numbers) == len(set(numbers)), "a document was logged again"
    assert (other / "samples.jsonl").read_text().splitlines()[:13] == [line.strip() for line in lines[:13]]


def test_the_table_the_report_and_the_page_have_them(run, tmp_path):
    out, _ = run
    report = (out / "report.md").read_text()
    assert "## lm-eval/rope_ext_passkey (found, 0-shot)" in report
    assert "paired with unscaled: the score" in report
    page = write_page([out], tmp_path / "page.html").read_text()
    assert "lm-eval/rope_ext_next_line: acc_norm, 0-shot" in page
    assert "Neither perplexity nor passkeys were measured" in page
    assert "Against unscaled, paired: lm-eval/rope_ext_passkey, found, 0-shot" in page
    (group,) = grouped([read_folder(out)])
    assert [series.name for series in group] == ["unscaled", "yarn"]


def test_a_recipe_has_them_beside_the_rest(checkpoint, data, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {checkpoint}\nmethods: [linear]\ncontext: 1024\nlengths: [512]\ndata: {data}\n"
        "perplexity: {documents: 2}\npasskey: {trials: 0}\nbenchmarks: {tasks: [rope_ext_next_line], limit: 3}\n"
    )
    told = document("compare", "--recipe", recipe, "--out", tmp_path / "run", "--json")
    assert [c["task"] for c in told["cells"]] == [
        "perplexity",
        "lm-eval/rope_ext_next_line",
        "lm-eval/rope_ext_next_line",
    ]
    forecast = document("compare", "--recipe", recipe, "--dry-run", "--json")
    assert [cell["units"] for cell in forecast["cells"]] == [2, 3, 3]


def test_several_processes_end_at_the_same_numbers(run, tmp_path):
    _, told = run
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "rope_ext",
        "bench",
        "tiny",
    ]
    command += ["--methods", "unscaled,yarn", *ASKED, "--out", str(tmp_path / "two"), "--json"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert [(c["method"], c["task"], c["value"]) for c in found["cells"]] == [
        (c["method"], c["task"], c["value"]) for c in told["cells"]
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tasks", "hellaswagg"], "did you mean hellaswag"),
        (["--tasks", "rope_ext_passkey", "--lengths", "4096"], "do not fit into the window of 1024"),
        (["--tasks", "rope_ext_passkey", "--lengths", "40"], "shorter than the template"),
        (["--tasks", "rope_ext_passkey,rope_ext_passkey"], "twice"),
        (["--tasks", "rope_ext_next_line", "--limit", "0"], "benchmarks.limit"),
        (["--tasks", "rope_ext_next_line", "--include-path", "nowhere"], "no folder of task YAMLs"),
        (["--tasks", "rope_ext_next_line", "--methods", "yran"], "did you mean 'yarn'"),
    ],
)
def test_bad_input_is_one_line(words, told):
    assert told in refused("bench", "tiny", "--context", "1024", *words)


def test_without_lm_eval_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "evals.harness", None)
    line = refused("bench", "tiny", "--tasks", "rope_ext_next_line")
    assert "pip install 'rope-ext[bench]'" in line
    assert "pip install 'rope-ext[bench]'" in refused("lm-eval", "--model", "rope_ext")


def test_the_folder_and_the_list_of_tasks():
    assert rope_ext("lm-eval-tasks").stdout.strip() == str(TASKS)
    listed = document("lm-eval-tasks", "--list", "--json")
    assert set(listed["ours"]) == {path.stem for path in TASKS.glob("*.yaml")} == set(OURS)
    shown = rope_ext("lm-eval-tasks", "--list").stdout
    assert all(name in shown for name in (*OURS, *MADE_HERE))
    assert "fetches" in shown


def test_every_listed_task_is_one_of_lm_evals():
    from lm_eval.tasks import TaskManager

    index = TaskManager().task_index
    names = [name for names in (*MADE_HERE, *FROM_HUB) for name in names.split(", ")]
    assert [name for name in names if name not in index] == []


def lm_eval(*words, **environment):
    command = [sys.executable, "-m", "rope_ext", "lm-eval", "--model", "rope_ext", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **environment})


def test_lm_evals_own_command_line_agrees_with_bench(run, tmp_path):
    """Third-party use: the registered class and our tasks, the same documents and numbers, samples logged to wandb."""
    _, told = run
    pytest.importorskip("wandb")
    words = ["--model_args", "pretrained=tiny,method=yarn,factor=4", "--tasks", "rope_ext_passkey,rope_ext_next_line"]
    words += ["--metadata", json.dumps({"max_seq_lengths": [800], "seed": 0}), "--limit", "10", "--log_samples"]
    words += ["--output_path", str(tmp_path / "results"), "--wandb_args", f"project=x,dir={tmp_path}"]
    words += ["--use_cache", str(tmp_path / "cache")]
    done = lm_eval(*words, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(file.read_text())
    want = {(c["task"], c["protocol"], c["length"]): c["value"] for c in told["cells"] if c["method"] == "yarn"}
    found = results["results"]["rope_ext_passkey"]
    assert found["found@800,none"] == want["lm-eval/rope_ext_passkey", "found, 0-shot", 800]
    line = next(
        value for (task, protocol, _), value in want.items() if task.endswith("next_line") and "acc," in protocol
    )
    assert results["results"]["rope_ext_next_line"]["acc,none"] == line
    assert results["config"]["rope_ext"]["method"] == "yarn"
    assert len([*(tmp_path / "results").rglob("samples_*.jsonl")]) == 2
    logs = [*tmp_path.rglob("*.wandb")]
    assert len(logs) == 1, done.stderr[-2000:]
    assert b"rope_ext_passkey" in logs[0].read_bytes()
    assert "Logging to W&B failed" not in done.stderr
    # and its cache is of this method alone
    other = lm_eval(
        *[w.replace("method=yarn", "method=linear") for w in words if "wandb" not in w and "project=" not in w]
    )
    assert other.returncode == 2
    assert "another model or method filled" in other.stderr


def test_a_fine_tune_measures_them_before_and_after(tmp_path):
    """What a stretch and its training cost on short contexts, on the same documents."""
    words = ["--set", "train.steps=2", "--set", "train.warmup_steps=1", "--set", "eval.at=[]"]
    words += ["--set", "eval.perplexity.documents=0", "--set", "eval.passkey.trials=0"]
    words += ["--set", "eval.benchmarks={tasks: [native-offline], limit: 4}", "--out", tmp_path / "run"]
    told = document("finetune", "tiny/pose-yarn", *words, "--json")
    stages = {(c["stage"], c["method"]): c for c in told["cells"] if c["protocol"] == "acc, 0-shot"}
    assert {("before", "unscaled"), ("before", "yarn"), ("after", "yarn")} <= set(stages)
    assert {c["data_hash"] for c in stages.values()} == {stages["after", "yarn"]["data_hash"]}
    page = write_page([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "lm-eval/rope_ext_next_line" in page
