"""The recipe of a fine-tune, what is refused in it, the proofs before the first step, and the estimate."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from recipes import proofs
from recipes.load import CONFIGS, RecipeError, read_recipe, write_recipe
from recipes.loss import loss_without_logits
from recipes.packing import Pool, Shape, plan_rows
from recipes.preflight import activation_bytes, logits_bytes, mask_bytes, preflight
from recipes.ranks import ALONE
from recipes.recompute import recomputed_activations
from recipes.train import Rows, TrainingError, accumulation, arguments
from recipes.tuning import ActivationCheckpointing, Parallel, Pose, Train
from recipes.tuning_load import find_recipe, make_finetune, override, shipped
from recipes.tuning_screen import as_document, finetune_on_screen
from recipes.tuning_setting import comparison_of, load_finetune
from rope_ext import Yarn, extend
from rope_ext.patch import active_patch_table
from tests.conftest import random_llama

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("tiny/pose-yarn", "tiny/gqa")
TINY = [name for name in shipped() if name.startswith("tiny/")]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ROPE_EXT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_the_shipped_recipes_are_those_that_were_promised():
    assert set(shipped()) == {
        *(f"tiny/{name}" for name in ("unscaled", "linear", "ntk", "yarn", "abf", "llama3", "pose-yarn", "alibi")),
        "tiny/gqa",
        "smollm2-135m/gqa",
        "smollm2-135m/yarn-2x",
        "llama2-7b/pi-32k",
        "llama2-7b/yarn-32k",
        "llama3-8b/abf-128k",
        "llama3-8b/yarn-128k",
        "mistral-7b/yarn-64k",
    }


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_recipe_reads_back_and_says_where_it_is_from(name, tmp_path):
    path = find_recipe(name)
    assert path.read_text().startswith("# ")
    recipe = make_finetune(read_recipe(path))
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert make_finetune(read_recipe(tmp_path / "recipe.yaml")) == recipe
    if not name.startswith(("tiny/", "smollm2")):
        assert "arXiv" in path.read_text() or "ublished" in path.read_text()
        assert "Not run on a GPU" in path.read_text()


FEW = {
    "context": 512,
    "train.steps": 2,
    "train.rows_per_step": 2,
    "train.rows_per_device": 2,
    "train.warmup_steps": 1,
    "eval.lengths": [256, 512],
    "eval.perplexity": {"documents": 1},
    "eval.passkey": {"trials": 1, "depths": [0.5]},
    "eval.at": [1],
}


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_recipes_run(name, tmp_path):
    values = read_recipe(find_recipe(name))
    for key, value in FEW.items():
        override(values, f"{key}={json.dumps(value)}")
    done = finetune_on_screen(make_finetune(values), tmp_path / "run", resume=False)
    assert [line["step"] for line in done.curve] == [1, 2]
    assert (done.out / "model" / "config.json").is_file()
    report = (done.out / "report.md").read_text()
    assert "## Trained on" in report
    assert f"{done.setting.method.name}, 1 steps" in report
    assert (done.out / "loss.png").stat().st_size > 1000
    document = json.loads(json.dumps(as_document(done), allow_nan=False))
    assert {cell["stage"] for cell in document["cells"]} == {"before", "after"}
    assert document["model"] == str(done.out / "model")


def test_the_command_runs_a_shipped_recipe_and_prints_its_table(tmp_path):
    out = tmp_path / "run"
    changes = [word for key, value in FEW.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    found = cli("tiny/yarn", "--out", str(out), "--seed", "3", *changes)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "yarn, 2 steps" in found.stdout
    assert f"model, for stock transformers: {out / 'model'}" in found.stdout
    assert make_finetune(read_recipe(out / "recipe.yaml")).seed == 3
    again = cli("tiny/yarn", "--out", str(out))
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_the_tiny_recipes_differ_in_their_method_alone():
    plain = [make_finetune(read_recipe(find_recipe(name))) for name in TINY if name not in OTHERS]
    assert len({(r.data, r.train, r.eval, r.context, r.model, r.seed) for r in plain}) == 1
    assert len({r.method for r in plain}) == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {stepz: 3}", r"train.stepz: not a key of a recipe; did you mean 'steps'\?.*rows_per_step"),
        ("train: {adapter: {ranks: 3}}", r"train.adapter.ranks: not a key.*did you mean 'rank'"),
        ("data: {sources: [{nam: x}]}", r"data.sources.0"),
        ("data: {pose: {windw: 64}}", r"data.pose"),
        ("data: {sources: []}", r"data.sources: \[\] is refused"),
        ("data: {sources: [a, a]}", r"data.sources names a twice"),
        ("data: {sources: [{name: a, long_tokens: 3}]}", r"data.sources \(a\): long_tokens and long_share go together"),
        ("data: {row_tokens: 4096}", r"a row of 4096 tokens is longer than the context of 2048"),
        ("data: {min_tokens: 4096}", r"data.min_tokens: 4096 are more than a row of 2048"),
        ("data: {row_tokens: 64, pose: {window: 64}}", r"data.row_tokens: it says nothing beside pose"),
        ("data: {pose: {window: 64, chunks: 65}}", r"data.pose.chunks: 65 do not fit into a window of 64"),
        ("train: {lr: 0}", r"train.lr: 0 is refused"),
        ("train: {lr: .nan}", r"train.lr: nan is refused"),
        ("train: {rows_per_step: 3, rows_per_device: 2}", r"train.rows_per_step: 3 rows are not whole forwards"),
        ("train: {steps: 5, warmup_steps: 5}", r"train.warmup_steps: 5 leave nothing of train.steps: 5"),
        ("train: {steps: 2000000}", r"train.steps: 2000000 of 4 rows are more than the 5,000,000 rows"),
        ("train: {weight_decay: .inf}", r"train.weight_decay: inf is refused"),
        ("{train: {parallel: {context: 2}, adapter: {}}, data: {min_tokens: 2048}}", r"context or ulysses it is not"),
        ("data: {pose: {window: 2048}}", r"data.pose.window: 2048 is the context"),
        ("eval: {lengths: [64, 64]}", r"eval.lengths names 64 twice"),
        ("train: {min_lr_fraction: 0.1}", r"train.min_lr_fraction: it says nothing without schedule: cosine"),
        ("train: {precision: fp16}", r"train.precision: 'fp16' is refused"),
        ("train: {parallel: {cpu_offload: true}}", r"cpu_offload: it says nothing without fsdp"),
        ("train: {parallel: {fsdp: 2, context: 2}}", r"fsdp, context and ulysses exclude each other"),
        ("train: {parallel: {context: 2}}", r"loses the borders between its documents.*data.min_tokens: 2048"),
        ("train: {parallel: {ulysses: 2}}", r"loses the borders between its documents"),
        ("{train: {parallel: {context: 2}}, data: {pose: {window: 64}}}", r"PoSE's rows are short"),
        (
            "train: {parallel: {fsdp: 2}, adapter: {}}",
            r"train.adapter: with parallel.fsdp, context or ulysses it is not supported",
        ),
        ("{train: {parallel: {fsdp: 2}}, eval: {at: [3]}}", r"eval.at: a model in pieces"),
        ("{train: {steps: 30}, eval: {at: [30]}}", r"eval.at: 30 is not below train.steps: 30"),
        ("eval: {at: [3, 3]}", r"eval.at names 3 twice"),
        ("eval: {passkey: {positions: [5]}}", r"eval: passkey.positions say nothing on the relative grid"),
        ("track: {report_to: [paper]}", r"track.report_to.0: 'paper' is refused"),
        ("seed: -1", r"seed: -1 is refused"),
    ],
)
def test_contradictions_are_told_by_path(text, words):
    with pytest.raises(RecipeError, match=words):
        make_finetune({"context": 2048} | yaml.safe_load(text))


def test_a_window_has_to_be_said():
    with pytest.raises(RecipeError, match="context: a recipe has to say it"):
        make_finetune({})


def test_settings_override_by_path():
    values = {"train": {"steps": 5}, "data": {"sources": [{"name": "a"}, {"name": "b"}]}}
    own = json.loads(json.dumps(values))
    for words in (
        "train.steps=7",
        "eval.passkey.trials=3",
        "data.sources.1.share=0.5",
        "method={yarn: {beta_fast: 9}}",
    ):
        override(values, words)
    assert values["train"]["steps"] == 7
    assert values["eval"] == {"passkey": {"trials": 3}}
    assert values["data"]["sources"] == [{"name": "a"}, {"name": "b", "share": 0.5}]
    assert values["method"] == {"yarn": {"beta_fast": 9}}
    assert own["data"]["sources"][1] == {"name": "b"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train.steps", "no setting"),
        ("=3", "no setting"),
        ("train.steps=[", "not YAML"),
        (".train=5", "no setting"),
        ("data.sources.2.share=1", "'2' is not a place in a list of 1"),
        ("data.sources.name=1", "'name' is not a place in a list of 1"),
    ],
)
def test_bad_settings_are_told(words, told):
    with pytest.raises(RecipeError, match=told):
        override({"data": {"sources": [{"name": "a"}]}}, words)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match=r"'tiny/yarm' is no file; did you mean 'tiny/yarn'"):
        find_recipe("tiny/yarm")


def test_every_config_folder_is_shipped():
    assert {path.parent.name for path in CONFIGS.rglob("*.yaml")} >= {"tiny", "llama2-7b", "llama3-8b", "mistral-7b"}


def test_the_comparison_around_a_training_has_both_and_its_own_seed():
    recipe = make_finetune({"context": 2048, "method": "yarn", "seed": 7, "eval": {"seed": 3}})
    assert comparison_of(recipe).methods == ("unscaled", "yarn")
    assert comparison_of(recipe).seed == 3
    assert comparison_of(make_finetune({"context": 2048, "method": "unscaled"})).methods == ("unscaled",)


@pytest.mark.parametrize(
    ("train", "world", "steps"),
    [
        (Train(rows_per_step=8, rows_per_device=2), 1, 4),
        (Train(rows_per_step=8, rows_per_device=2), 2, 2),
        (Train(rows_per_step=8, rows_per_device=2), 4, 1),
        (Train(rows_per_step=8, rows_per_device=2, parallel=Parallel(fsdp=2)), 4, 1),
        (Train(rows_per_step=8, rows_per_device=1, parallel=Parallel(context=4)), 8, 4),
    ],
)
def test_a_step_is_divided_over_processes_and_forwards(train, world, steps):
    assert accumulation(train, world) == steps


@pytest.mark.parametrize(
    ("train", "world", "words"),
    [
        (Train(rows_per_step=8, rows_per_device=2), 3, "cannot be shared evenly by 3 processes"),
        (Train(rows_per_step=8, parallel=Parallel(fsdp=4)), 2, "4 processes to shard over do not go into 2"),
        (Train(rows_per_step=8, parallel=Parallel(context=4)), 2, "rows cut over 4 processes do not go into 2"),
    ],
)
def test_steps_that_cannot_be_divided_are_refused(train, world, words):
    with pytest.raises(RecipeError, match=words):
        accumulation(train, world)


def test_the_trainer_gets_what_the_recipe_says(tmp_path):
    recipe = make_finetune(
        {
            "context": 2048,
            "train": {
                "steps": 50,
                "lr": 3e-4,
                "schedule": "cosine",
                "min_lr_fraction": 0.1,
                "warmup_steps": 5,
                "betas": [0.9, 0.95],
                "weight_decay": 0.1,
                "clip": 0.5,
            },
        }
    )
    made = arguments(recipe, tmp_path, row_tokens=2048, device=torch.device("cpu"), ranks=ALONE)
    assert (made.max_steps, made.learning_rate, made.warmup_steps) == (50, 3e-4, 5)
    assert (made.adam_beta1, made.adam_beta2, made.weight_decay, made.max_grad_norm) == (0.9, 0.95, 0.1, 0.5)
    assert made.lr_scheduler_type == "cosine_with_min_lr"
    assert made.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert made.bf16 is False
    assert made.average_tokens_across_devices is True
    assert made.logging_nan_inf_filter is False


def test_a_rank_with_other_frequencies_stops_the_run(monkeypatch):
    model = random_llama()
    with extend(model, Yarn(), factor=4.0):
        table = active_patch_table(model)
        proofs.prove_alike(table, ALONE)
        monkeypatch.setattr(proofs, "gather", lambda _ranks, mine: [mine, ("0" * 16, *mine[1:])])
        with pytest.raises(TrainingError, match="process 1 has other frequencies than process 0"):
            proofs.prove_alike(table, ALONE)
        monkeypatch.undo()
        table.inv_freq = table.inv_freq.bfloat16().float()
        with pytest.raises(TrainingError, match="something rounded them"):
            proofs.prove_alike(table, ALONE)


class Given:
    """Documents of given lengths."""

    name, data_hash = "given", "0"

    def __init__(self, *lengths):
        import numpy as np

        self.lengths = np.asarray(lengths)

    def ids(self, number):
        import numpy as np

        return np.arange(self.lengths[number]) % 90


def rows_of(*lengths, pose=None, **shape):
    documents = Given(*lengths)
    pool = Pool(documents=documents, share=1.0, numbers=range(len(lengths)))
    plan = plan_rows([pool], Shape(**shape), num_rows=2, seed=0)
    return Rows(plan, pose=pose, context=256, seed=0)


class Leaky(torch.nn.Module):
    """An attention mask forgotten: every row is one document to the model."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.device = model, model.config, model.device

    def forward(self, **given):
        given.pop("attention_mask", None)
        mask = torch.ones(1, given["input_ids"].shape[1], dtype=torch.long)
        return self.model(**given, attention_mask=mask)


class Cut(Leaky):
    """An attention that takes skipped positions for borders."""

    def forward(self, **given):
        given.pop("attention_mask", None)
        return self.model(**given)


def test_documents_that_see_each_other_stop_the_run():
    rows = rows_of(20, 20, 20, row_tokens=64, min_tokens=4)
    model = random_llama()
    proofs.prove_borders(model, rows, is_static=True)
    with pytest.raises(TrainingError, match="the documents of a row see each other"):
        proofs.prove_borders(Leaky(model), rows, is_static=True)


def test_chunks_that_do_not_see_each_other_stop_the_run():
    rows = rows_of(64, 64, row_tokens=64, whole_rows=True, pose=Pose(window=64))
    model = random_llama(max_position_embeddings=256)
    proofs.prove_borders(model, rows, is_static=True)
    with pytest.raises(TrainingError, match="positions do not see each other"):
        proofs.prove_borders(Cut(model), rows, is_static=True)


def test_a_forward_that_scores_nothing_stops_the_run():
    rows = rows_of(64, row_tokens=64, whole_rows=True)
    proofs.prove_scored(rows, 1)
    empty = rows.plan.rows[0][0]._replace(stop=1)
    object.__setattr__(rows.plan, "rows", (rows.plan.rows[0], (empty,)))
    with pytest.raises(TrainingError, match="begins with row 1 has no token to score"):
        proofs.prove_scored(rows, 1)


def test_a_broken_promise_at_the_native_length_stops_the_run(monkeypatch):
    values = {"context": 512, "method": "dynamic-ntk", "allow_approximate": True, "data": {"min_tokens": 512}}
    small = {"steps": 1, "warmup_steps": 0, "rows_per_step": 1}
    quick = {"perplexity": {"documents": 1}, "passkey": {"trials": 0}, "lengths": [256]}
    setting = load_finetune(make_finetune(values | {"train": small, "eval": quick}))
    kept = proofs.native_loss(setting)
    assert kept.promised
    assert kept.base == kept.method
    real = proofs.token_nll
    monkeypatch.setattr(proofs, "token_nll", lambda *a, **k: real(*a, **k) + (0.01 if "frequency_key" in k else 0.0))
    with pytest.raises(TrainingError, match="dynamic-ntk leaves the first 256 tokens as they are, yet their loss went"):
        proofs.native_loss(setting)


def test_the_estimate_counts_what_a_step_holds():
    values = read_recipe(find_recipe("tiny/yarn"))
    for words in ("train.steps=3", "train.warmup_steps=1", "eval.at=[]"):
        override(values, words)
    found = preflight(load_finetune(make_finetune(values)))
    assert found.weights == found.gradients == 4 * found.parameters
    assert found.optimizer == 8 * found.parameters
    assert found.masks > 0  # some of its rows hold several documents
    assert found.tokens == 3 * 4 * 2048
    assert found.fits
    assert sum(found.tokens_by_length.values()) <= found.tokens
    # 6 operations a weight and token, and attention: 4 rows of 2,048
    assert 6 * 0.9e6 * 8192 < found.step_operations < 20 * 0.9e6 * 8192
    override(values, "train.adapter.rank=4")
    lora = preflight(load_finetune(make_finetune(values)))
    assert lora.trained < found.trained
    assert json.loads(json.dumps(lora.as_dict()))["fits"] is True


def held(model, batch, train):
    """Return the most bytes that a step holds at a time, gradients included."""
    with ExitStack() as stack:
        stack.enter_context(loss_without_logits(model, rows=train.loss_rows))
        stack.enter_context(recomputed_activations(model, train.activation_checkpointing))
        model.train()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    found = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            found += event.nbytes()
            most = max(most, found)
    return most


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(
    "asked",
    [
        None,
        ActivationCheckpointing(),
        ActivationCheckpointing(keep="products"),
        ActivationCheckpointing(every_n_layers=2),
    ],
    ids=["kept", "recomputed", "products", "every second"],
)
def test_the_estimate_of_memory_is_near_what_a_step_holds(asked, packed):
    tokens = 1024
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "head_dim": 32, "vocab_size": 500}
    model = random_llama(**sizes)
    train = Train(activation_checkpointing=asked, loss_rows=128)
    positions = torch.arange(tokens)[None].clone()
    if packed:
        positions[:, 300:] -= 300
    ids = torch.arange(tokens)[None] % 500
    most = held(model, {"input_ids": ids, "labels": ids, "position_ids": positions}, train)
    gradients = 4 * sum(p.numel() for p in model.parameters())
    estimate = (
        activation_bytes(model.config, train.activation_checkpointing, tokens, "fp32")
        + logits_bytes(model.config, train.loss_rows, tokens)
        + gradients
    )
    estimate += mask_bytes(model, train, tokens, "fp32") if packed else 0
    assert 0.6 < estimate / most < 1.6, (estimate, most)


def cli(*words, **keywords):
    command = [sys.executable, "-m", "rope_ext", "finetune", *words]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, **keywords)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give a recipe"),
        (["tiny/yran"], "did you mean 'tiny/yarn'"),
        (["tiny/yarn", "--set", "train.stps=3"], "train.stps: not a key of a recipe; did you mean 'steps'"),
        (["tiny/yarn", "--resume"], "give --out DIR and nothing else"),
        (["--resume", "--out", "nowhere"], "nowhere holds no recipe.yaml"),
        (["tiny/compare"], "'tiny/compare' is no file"),
        (["tiny/yarn", "--set", "method=yran"], "did you mean 'yarn'"),
    ],
)
def test_the_command_line_tells_bad_input_in_one_line(words, told):
    found = cli(*words)
    assert found.returncode == 2
    assert told in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_dry_run_writes_nothing(tmp_path):
    found = cli("tiny/yarn", "--dry-run", "--json", "--out", str(tmp_path / "run"))
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["rows"] == 400
    assert document["seconds"] > 0
    assert not (tmp_path / "run").exists()
    lines = preflight(load_finetune(make_finetune(read_recipe(find_recipe("tiny/yarn"))))).lines()
    assert lines[0].startswith("400 rows of 2,048 tokens, 819,200 in all; 2 forwards a step on each of 1 processes")
    assert "it fits into" in lines[4]
