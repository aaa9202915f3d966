"""The fine-tune as a whole: what it writes, that it goes on after any death, and is the same however divided."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from evals import rows
from evals.errors import EvalError
from recipes.finetune import run_finetune
from recipes.load import RecipeError, read_recipe
from recipes.recompute import recomputed_activations
from recipes.train import TrainingError, last_checkpoint, read_curve
from recipes.tuning import ActivationCheckpointing
from recipes.tuning_load import make_finetune
from recipes.tuning_setting import load_finetune, prepare_finetune
from rope_ext import ExportError, extend_from_record, load_model
from rope_ext.patch import extend
from tests.conftest import random_llama
from tests.evals.conftest import byte_tokenizer

quiet_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model with a window of 64 bytes."""
    path = tmp_path_factory.mktemp("models") / "small"
    random_llama(vocab_size=258, max_position_embeddings=64, initializer_range=0.1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Documents of 40 to 500 bytes, and some to measure on."""
    path = tmp_path_factory.mktemp("texts")
    for name, number in (("train", 12), ("test", 3)):
        (path / name).mkdir()
        for i in range(number):
            words = f"{name} {i} counts {i * 7 % 11} and says so again; "
            (path / name / f"{i}.txt").write_text(words * (1 + i % 5 * 3 if name == "train" else 12))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ROPE_EXT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def recipe(small, texts):
    return {
        "model": str(small),
        "method": "yarn",
        "context": 256,
        "data": {"sources": [{"name": str(texts / "train")}], "min_tokens": 16},
        "train": {"steps": 4, "rows_per_step": 4, "rows_per_device": 2, "lr": 1e-3, "warmup_steps": 1, "save_every": 2},
        "eval": {
            "data": str(texts / "test"),
            "lengths": [64, 256],
            "perplexity": {"documents": 2},
            "passkey": {"trials": 0},
        },
    }


def changed(recipe, **sections):
    """Return the recipe with some keys of its sections replaced."""
    return recipe | {
        name: recipe[name] | values if isinstance(values, dict) and isinstance(recipe.get(name), dict) else values
        for name, values in sections.items()
    }


def run(recipe, out, **keywords):
    return run_finetune(prepare_finetune(make_finetune(recipe), out, **keywords))


def losses(out):
    return [line["loss"] for line in read_curve(out / "train.jsonl")]


def test_a_run_trains_writes_and_measures_on_the_same_tokens(recipe, tmp_path):
    done = run(changed(recipe, eval={"at": [2]}), tmp_path / "run")
    assert [line["step"] for line in done.curve] == [1, 2, 3, 4]
    assert done.curve[-1]["tokens"] == 4 * 4 * 256
    assert done.curve[-1]["loss"] < done.curve[0]["loss"]
    cells = [json.loads(line) for line in (done.out / "cells.jsonl").read_text().splitlines()]
    assert {(c["stage"], c["method"], c["length"]) for c in cells} == {
        ("before", "unscaled", 64),
        ("before", "unscaled", 256),
        ("before", "yarn", 64),
        ("before", "yarn", 256),
        ("after", "yarn", 64),
        ("after", "yarn", 256),
    }
    assert len({(c["length"], c["data_hash"]) for c in cells}) == 2  # the same tokens at every stage
    between = rows.read_samples(done.out / "evals" / "step-000002" / "samples.jsonl")
    assert {s.length for s in between} == {64, 256}
    assert {c.against for c in done.contrasts} == {"unscaled (before)", "yarn (before)"}
    assert {c.native for c in done.contrasts if c.length == 64} == {True}
    gained = next(c for c in done.contrasts if c.length == 256 and c.against == "yarn (before)")
    values = {(c["stage"], c["method"], c["length"]): c["value"] for c in cells}
    ratio = torch.tensor(values["after", "yarn", 256] / values["before", "yarn", 256]).log()
    assert gained.value == pytest.approx(float(ratio), abs=1e-5)
    assert gained.value < 0


def test_the_written_model_is_the_trained_one_to_stock_code(recipe, tmp_path):
    done = run(recipe, tmp_path / "run")
    stock = AutoModelForCausalLM.from_pretrained(done.out / "model").eval()
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    model = done.setting.evaluation.model  # trained, and unpatched again
    with extend(model, done.setting.method, context=256), torch.no_grad():
        wanted = model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.allclose(stock(input_ids=ids).logits, wanted, atol=5e-4)
    assert stock.config.max_position_embeddings == 256
    assert stock.config.use_cache is True
    assert model.forward.__func__ is type(model).forward


def test_the_resolved_recipe_runs_it_again(recipe, tmp_path):
    first = run(recipe, tmp_path / "first")
    again = run(read_recipe(first.out / "recipe.yaml"), tmp_path / "again")
    assert losses(first.out) == losses(again.out)
    assert (first.out / "cells.jsonl").read_text() == (again.out / "cells.jsonl").read_text()
    named = [json.loads((run_.out / "run.json").read_text())["data"]["hash"] for run_ in (first, again)]
    assert named[0] == named[1]


def test_the_same_steps_however_they_are_accumulated(recipe, tmp_path):
    whole = run(changed(recipe, train={"rows_per_device": 4}), tmp_path / "whole")
    parts = run(changed(recipe, train={"rows_per_device": 1}), tmp_path / "parts")
    assert losses(parts.out) == pytest.approx(losses(whole.out), abs=1e-6)


@pytest.mark.parametrize("asked", [{}, {"every_n_layers": 2}, {"keep": "products"}], ids=str)
def test_recomputed_activations_change_nothing(recipe, tmp_path, asked):
    plain = run(recipe, tmp_path / "plain")
    again = run(changed(recipe, train={"activation_checkpointing": asked}), tmp_path / "recomputed")
    assert losses(again.out) == pytest.approx(losses(plain.out), abs=1e-6)
    layers = again.setting.evaluation.model.model.layers
    assert not any(getattr(layer, "gradient_checkpointing", False) for layer in layers)


@pytest.mark.parametrize(("keep", "times"), [("nothing", 2), ("products", 1)])
def test_products_are_kept_or_made_again(keep, times):
    model = random_llama()
    counts = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[func] = counts.get(func, 0) + 1
            return func(*args, **(kwargs or {}))

    def attended(asked):
        counts.clear()
        with recomputed_activations(model, asked):
            model.train()
            loss = model(input_ids=torch.arange(20)[None], use_cache=False).logits.sum()
            with Counting():
                loss.backward()
        return counts.get(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, 0)

    assert attended(None) == 0
    assert attended(ActivationCheckpointing(keep=keep)) == (times - 1) * model.config.num_hidden_layers


def test_methods_and_seeds_see_the_data_that_they_should(recipe):
    settings = {
        name: load_finetune(make_finetune(changed(recipe, **change)))
        for name, change in {
            "yarn": {},
            "linear": {"method": "linear"},
            "seed": {"seed": 1},
            "short": {"train": {"steps": 2}},
        }.items()
    }
    digests = {name: setting.plan.digest() for name, setting in settings.items()}
    assert digests["yarn"] == digests["linear"]
    assert digests["seed"] != digests["yarn"]
    assert settings["short"].plan.rows == settings["yarn"].plan.rows[:8]  # fewer steps are the first of more


KILLED = """
import os, signal, sys, json
from pathlib import Path
from recipes import train
from recipes.finetune import run_finetune
from recipes.tuning import ActivationCheckpointing
from recipes.tuning_load import make_finetune
from recipes.tuning_setting import prepare_finetune

class Killed(train._Curve):
    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if state.global_step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

train._Curve = Killed
run_finetune(prepare_finetune(make_finetune(json.loads(sys.argv[1])), Path(sys.argv[2])))
"""


def test_a_run_killed_at_any_step_ends_with_the_same_curve_and_the_same_model(recipe, tmp_path):
    asked = changed(recipe, eval={"at": [1]})
    whole = run(asked, tmp_path / "whole")
    out = tmp_path / "killed"
    # The third step is done and logged, the last checkpoint is that of the second
    command = [sys.executable, "-c", KILLED, json.dumps(asked), str(out), "3"]
    killed = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert losses(out) == losses(whole.out)[:3]
    assert last_checkpoint(out / "checkpoints").name == "checkpoint-2"
    resumed = run(read_recipe(out / "recipe.yaml"), out, resume=True)
    assert losses(out) == losses(whole.out)
    one, other = (load_file(each.out / "model" / "model.safetensors") for each in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [c.value for c in resumed.after.cells] == [c.value for c in whole.after.cells]
    assert [c.value for c in resumed.contrasts] == [c.value for c in whole.contrasts]
    assert len(json.loads((out / "run.json").read_text())["legs"]) == 2
    assert {n: [c.value for c in each.cells] for n, each in resumed.between.items()} == {
        n: [c.value for c in each.cells] for n, each in whole.between.items()
    }


def test_a_run_does_not_go_on_with_other_data(recipe, texts, tmp_path):
    source = tmp_path / "texts"
    shutil.copytree(texts / "train", source)
    asked = changed(recipe, data={"sources": [{"name": str(source)}]}, train={"steps": 1, "warmup_steps": 0})
    done = run(asked, tmp_path / "run")
    (source / "0.txt").write_text("something else altogether; " * 30)
    with pytest.raises(TrainingError, match=r"began with another rows: what is there would be mixed"):
        run(read_recipe(done.out / "recipe.yaml"), done.out, resume=True)


def test_a_run_does_not_go_on_with_another_recipe_texts_or_model(recipe, small, texts, tmp_path):
    model, measured = tmp_path / "model", tmp_path / "measured"
    shutil.copytree(small, model)
    shutil.copytree(texts / "test", measured)
    once = {"steps": 1, "warmup_steps": 0}
    done = run(changed(recipe, model=str(model), train=once, eval={"data": str(measured)}), tmp_path / "run")
    kept = read_recipe(done.out / "recipe.yaml")
    with pytest.raises(TrainingError, match="another recipe"):
        run(kept | {"method": "ntk"}, done.out, resume=True)
    for file in measured.iterdir():
        file.write_text("other words to measure on, and some more of them; " * 12)
    with pytest.raises(TrainingError, match="another evaluation texts"):
        run(kept, done.out, resume=True)
    shutil.rmtree(measured)
    shutil.copytree(texts / "test", measured)
    random_llama(vocab_size=258, max_position_embeddings=64, initializer_range=0.2).save_pretrained(model)
    with pytest.raises(TrainingError, match="another model"):
        run(kept, done.out, resume=True)


def test_what_is_measured_on_is_not_trained_on(recipe, texts):
    with pytest.raises(RecipeError, match=r"its document \d is '.*.txt', which is measured on"):
        load_finetune(make_finetune(changed(recipe, data={"sources": [str(texts / "train"), str(texts / "test")]})))


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"])
def test_a_checkpoint_without_a_part_of_it_is_none(recipe, tmp_path, lost):
    done = run(changed(recipe, train={"keep": 2}), tmp_path / "run")
    last = done.out / "checkpoints" / "checkpoint-4"
    if lost in {"optimizer.pt", "model.safetensors"}:
        whole = (last / lost).read_bytes()
        (last / lost).write_bytes(whole[: len(whole) // 2])
        assert last_checkpoint(last.parent).name == "checkpoint-2"
    (last / lost).unlink()
    assert last_checkpoint(last.parent).name == "checkpoint-2"
    shutil.rmtree(done.out / "model")
    again = run(read_recipe(done.out / "recipe.yaml"), done.out, resume=True)
    assert losses(again.out) == [line["loss"] for line in done.curve]


def test_weights_that_are_not_finite_are_not_written(recipe, tmp_path):
    with pytest.raises(TrainingError, match=r"weights are not finite.*no model is written"):
        run(changed(recipe, train={"lr": 1e39, "warmup_steps": 0, "steps": 1}), tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


def test_bf16_weights_leave_the_frequencies_alone(recipe, tmp_path):
    exact = changed(recipe, method="dynamic-ntk", data={"min_tokens": 256}, allow_approximate=True)
    done = run(changed(exact, train={"precision": "pure-bf16", "steps": 1, "warmup_steps": 0}), tmp_path / "run")
    native = json.loads((done.out / "run.json").read_text())["native_loss"]
    assert native["promised"] is True


def test_a_finished_run_needs_its_checkpoints_no_more(recipe, tmp_path):
    done = run(recipe, tmp_path / "run")
    shutil.rmtree(done.out / "checkpoints")
    shutil.rmtree(done.out / "evals" / "after")
    again = run(read_recipe(done.out / "recipe.yaml"), done.out, resume=True)
    assert [c.value for c in again.after.cells] == [c.value for c in done.after.cells]
    assert [line["loss"] for line in again.curve] == [line["loss"] for line in done.curve]
    assert not (done.out / "checkpoints").exists()
    (done.out / "model" / "config.json").unlink()
    with pytest.raises(TrainingError, match=r"model is damaged; remove it"):
        run(read_recipe(done.out / "recipe.yaml"), done.out, resume=True)


@quiet_peft
def test_an_adapter_that_is_not_merged_is_measured_as_it_was_written(recipe, small, tmp_path):
    from peft import PeftModel

    from evals.nll import token_nll

    done = run(changed(recipe, train={"adapter": {"rank": 2, "merge": False}}), tmp_path / "run")
    assert not (done.out / "model").exists()
    base, _ = load_model(str(small))
    document = done.setting.evaluation.corpus.documents[0]
    with extend_from_record(base, done.out / "adapter"):
        wrapped = PeftModel.from_pretrained(base, str(done.out / "adapter")).eval()
        found = float(token_nll(wrapped.get_base_model(), document.ids).mean())
    [sample] = [
        s
        for s in rows.read_samples(done.out / "evals" / "after" / "samples.jsonl")
        if (s.unit, s.length) == (document.name, 256)
    ]
    assert found == pytest.approx(sample.value, abs=1e-6)


def test_a_torn_checkpoint_is_passed_over(recipe, tmp_path):
    done = run(changed(recipe, train={"keep": 2}), tmp_path / "run")
    folder = done.out / "checkpoints"
    state = folder / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:50])
    assert last_checkpoint(folder).name == "checkpoint-2"
    state.unlink()
    assert last_checkpoint(folder).name == "checkpoint-2"


def test_a_finished_run_is_not_trained_again(recipe, tmp_path):
    done = run(recipe, tmp_path / "run")
    before = (done.out / "model" / "model.safetensors").stat().st_mtime_ns
    again = run(read_recipe(done.out / "recipe.yaml"), done.out, resume=True)
    assert (done.out / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert losses(done.out) == [line["loss"] for line in again.curve]
    assert [c.value for c in again.after.cells] == [c.value for c in done.after.cells]


@quiet_peft
def test_an_adapter_carries_its_positions_and_is_the_merged_model(recipe, small, tmp_path):
    from peft import PeftModel

    done = run(changed(recipe, train={"adapter": {"rank": 2}}), tmp_path / "run")
    assert done.curve[-1]["loss"] < done.curve[0]["loss"]
    base, _ = load_model(str(small))
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    stock = AutoModelForCausalLM.from_pretrained(done.out / "model").eval()
    with extend_from_record(base, done.out / "adapter"), torch.no_grad():
        wrapped = PeftModel.from_pretrained(base, str(done.out / "adapter")).eval()
        assert torch.allclose(wrapped(input_ids=ids).logits, stock(input_ids=ids).logits, atol=5e-4)
    saved = load_file(done.out / "adapter" / "adapter_model.safetensors")
    assert {"embed_tokens", "norm", "input_layernorm"} <= {part for name in saved for part in name.split(".")}


@quiet_peft
def test_an_adapter_resumes(recipe, tmp_path):
    asked = changed(recipe, train={"adapter": {"rank": 2}})
    whole = run(asked, tmp_path / "whole")
    out = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, json.dumps(asked), str(out), "3"]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == -signal.SIGKILL
    run(read_recipe(out / "recipe.yaml"), out, resume=True)
    assert losses(out) == losses(whole.out)


def test_pose_trains_long_positions_in_short_rows(recipe, tmp_path):
    done = run(changed(recipe, data={"pose": {"window": 64}}), tmp_path / "run")
    assert done.curve[-1]["tokens"] == 4 * 4 * 64
    assert done.curve[-1]["loss"] < done.curve[0]["loss"]
    batch = done.setting.rows[0]
    assert batch["position_ids"].max() >= 64
    assert batch["position_ids"].max() < 256


def test_methods_that_follow_the_length_need_rows_of_their_own(recipe, tmp_path):
    with pytest.raises(ExportError, match=r"dynamic-ntk follows the current length.*allow_approximate"):
        load_finetune(make_finetune(changed(recipe, method="dynamic-ntk")))
    asked = changed(recipe, method="dynamic-ntk", allow_approximate=True)
    with pytest.raises(RecipeError, match=r"dynamic-ntk follow the length of one sequence.*data.min_tokens: 256"):
        load_finetune(make_finetune(asked))
    once = {"steps": 1, "warmup_steps": 0}
    done = run(changed(asked, data={"min_tokens": 256}, train=once), tmp_path / "run")
    native = json.loads((done.out / "run.json").read_text())["native_loss"]
    assert native["promised"] is True
    assert native["base"] == native["method"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"sources": [{"name": "nowhere-at-all"}]}}, "nowhere-at-all"),
        ({"train": {"rows_per_step": 3}}, "rows_per_step: 3"),
        ({"train": {"liger": True}}, "it needs liger_kernel"),
        ({"train": {"parallel": {"fsdp": 2}}}, "parallel.fsdp: 2 processes"),
        ({"train": {"parallel": {"context": 2}}, "data": {"min_tokens": 256}}, "rows cut over 2 processes"),
        (
            {"train": {"adapter": {"targets": ["q_prj"]}}},
            "'q_prj' is not a linear layer of the model; did you mean 'q_proj'",
        ),
        ({"train": {"adapter": {"targets": ["norm"]}}}, "'norm' is not a linear layer"),
        ({"train": {"adapter": {"also_train": ["nrom"]}}}, "'nrom' is not a module of the model; did you mean 'norm'"),
        ({"train": {"adapter": {"also_train": ["q_proj"]}}}, "'q_proj' is in targets and in also_train"),
        ({"track": {"report_to": ["trackio"]}}, "needs trackio"),
        ({"train": {"activation_checkpointing": {"offload": True}}}, "offload: on a CPU"),
        (
            {"data": {"sources": [{"name": "python-train", "long_tokens": 9, "long_share": 0.5}]}},
            "all of its .* documents have at least long_tokens: 9",
        ),
    ],
)
def test_bad_input_is_told_before_training(recipe, tmp_path, change, words):
    with pytest.raises((RecipeError, EvalError), match=words):
        run(changed(recipe, **change), tmp_path / "run")
    assert not (tmp_path / "run" / "train.jsonl").exists()


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(recipe, tmp_path):
    with pytest.raises(TrainingError, match=r"(loss|grad_norm) is (nan|inf) at step \d.*new run.*lower train.lr"):
        run(changed(recipe, train={"lr": 1e30, "warmup_steps": 0, "clip": 0}), tmp_path / "run")


def test_a_folder_with_a_run_is_not_overwritten(recipe, tmp_path):
    run(changed(recipe, train={"steps": 1, "warmup_steps": 0}), tmp_path / "run")
    with pytest.raises(RecipeError, match="not empty"):
        prepare_finetune(make_finetune(recipe), tmp_path / "run")


def test_no_steps_stretch_and_measure_alone(recipe, tmp_path):
    done = run(changed(recipe, train={"steps": 0, "warmup_steps": 0}), tmp_path / "run")
    assert done.curve == []
    assert {c.value for c in done.contrasts if c.against == "yarn (before)"} == {0.0}


DIVIDED = """
import json, sys
from pathlib import Path
from recipes.finetune import run_finetune
from recipes.ranks import join, leave
from recipes.tuning import ActivationCheckpointing
from recipes.tuning_load import make_finetune
from recipes.tuning_setting import prepare_finetune

ranks = join()
out, resume = Path(sys.argv[2]), len(sys.argv) > 3
run_finetune(prepare_finetune(make_finetune(json.loads(sys.argv[1])), out, ranks=ranks, resume=resume))
leave(ranks)
"""


def divided(recipe, out, tmp_path, *more):
    script = tmp_path / "divided.py"
    script.write_text(DIVIDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, json.dumps(recipe), str(out), *more],
        cwd=ROOT,
        env=env,
        check=False,
        capture_output=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr.decode()[-3000:]


@pytest.mark.parametrize(("fsdp", "at"), [(1, [2]), (2, [])], ids=["data-parallel", "fsdp2"])
def test_two_processes_take_the_steps_of_one(recipe, tmp_path, fsdp, at):
    one = run(changed(recipe, eval={"at": at}), tmp_path / "one")
    out = tmp_path / "two"
    asked = changed(recipe, train={"parallel": {"fsdp": fsdp}, "rows_per_device": 1}, eval={"at": at})
    divided(asked, out, tmp_path)
    curve = read_curve(out / "train.jsonl")
    assert [line["loss"] for line in curve] == pytest.approx([line["loss"] for line in one.curve], abs=1e-6)
    norms = [line["grad_norm"] for line in one.curve]
    assert [line["grad_norm"] for line in curve] == pytest.approx(norms, rel=2e-6)
    weights, others = (load_file(each / "model" / "model.safetensors") for each in (one.out, out))
    assert all(torch.allclose(weights[name], others[name], atol=1e-5) for name in weights)
    cells = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    after = [c["value"] for c in cells if c["stage"] == "after"]
    assert after == pytest.approx([c.value for c in one.after.cells], rel=1e-4)


def test_a_sharded_run_that_is_cut_off_goes_on(recipe, tmp_path):
    asked = changed(recipe, train={"parallel": {"fsdp": 2}, "rows_per_device": 1, "keep": 2})
    out = tmp_path / "run"
    divided(asked, out, tmp_path)
    wanted = losses(out)
    # As a run that was killed after its third step has left it
    shutil.rmtree(out / "checkpoints" / "checkpoint-4")
    shutil.rmtree(out / "model")
    lines = (out / "train.jsonl").read_text().splitlines(keepends=True)
    (out / "train.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    divided(read_recipe(out / "recipe.yaml"), out, tmp_path, "--resume")
    assert losses(out) == pytest.approx(wanted, abs=1e-6)
    assert (out / "model" / "rope_ext.json").is_file()
