"""save_extended(): the third oracle, our export read by stock transformers."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rope_ext import ExportError, Linear, Yarn, extend, load_model, save_extended
from rope_ext.export import extend_from_record
from rope_ext.plan import label
from rope_ext.registry import parse_method
from tests.conftest import IN_STOCK, LENGTH_DEPENDENT, WINDOW, logits_of, random_llama

SPELLED = [
    *IN_STOCK,
    LENGTH_DEPENDENT[2],
    "abf:theta=160000",
    "yarn:beta_fast=16:truncate=false",
    "yarn:attention_scale=1.1",
    "yarn:ramp=rotations",
    "resonance:over=yarn",
]
# Largest difference of logits of order 10 over 192 tokens: stock code rounds the same formula in other places.
# Methods that are a plain base, a division, or zeros, are bit-equal.
EXACT = {"unscaled", "linear", "abf", "ntk", "nope", "p-rope"}


@pytest.mark.parametrize("spelled", SPELLED)
def test_stock_transformers_reloads_with_the_same_logits(llama, ids, tmp_path, spelled):
    chosen = parse_method(spelled)
    with extend(llama, chosen, factor=4) as patch:
        ours = logits_of(llama, ids)
        path = save_extended(llama, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    assert type(stock.model.rotary_emb).__name__ == "LlamaRotaryEmbedding"
    assert stock.config.max_position_embeddings == 4 * WINDOW
    assert (logits_of(stock, ids) - ours).abs().max() <= (0.0 if chosen.name in EXACT else 5e-4)
    torch.testing.assert_close(stock.model.rotary_emb.inv_freq, patch.plan.inv_freq, rtol=1e-6, atol=0)
    assert stock.model.rotary_emb.attention_scaling == pytest.approx(patch.plan.attention_scale, rel=1e-12)


@pytest.mark.parametrize("spelled", SPELLED)
def test_both_dialects_of_the_configuration_say_the_same(llama, tmp_path, spelled):
    """transformers 4 and converters read rope_theta and rope_scaling; without them they fall back to base 10000."""
    with extend(llama, parse_method(spelled), factor=4):
        path = save_extended(llama, tmp_path / "out")
    config = json.loads((path / "config.json").read_text())
    new = config["rope_parameters"]
    assert config["rope_theta"] == new["rope_theta"]
    if new["rope_type"] == "default":
        assert not config.get("rope_scaling")
    else:
        assert config["rope_scaling"] == {**new, "type": new["rope_type"]}
    del config["rope_parameters"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    old = AutoConfig.from_pretrained(tmp_path / "old")
    assert {k: v for k, v in old.rope_parameters.items() if k != "type"} == new


def test_the_record_says_what_was_done(llama, tmp_path):
    with extend(llama, Yarn(beta_fast=16.0), factor=4) as patch:
        path = save_extended(llama, tmp_path / "out")
    record = json.loads((path / "rope_ext.json").read_text())
    assert record["method"] == "yarn"
    assert record["hyperparameters"]["beta_fast"] == 16
    assert (record["context"], record["original_context"]) == (4 * WINDOW, WINDOW)
    assert torch.equal(torch.tensor(record["inv_freq"]), patch.plan.inv_freq)


def test_a_plain_save_of_a_patched_model_reloads_alike_too(llama, ids, tmp_path):
    """The configuration is in step with the module, so even save_pretrained loses nothing."""
    with extend(llama, Linear(), factor=4):
        ours = logits_of(llama, ids)
        llama.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids), ours)


def test_an_export_can_be_extended_again_only_by_choice(llama, tmp_path):
    with extend(llama, Yarn(), factor=4):
        path = save_extended(llama, tmp_path / "out")
    again, _ = AutoModelForCausalLM.from_pretrained(path).eval(), None
    with pytest.raises(ValueError, match="already carries 'yarn' scaling, 64 to 256"):
        extend(again, Yarn(), context=512)
    with extend(again, Yarn(), context=512, base="original") as patch:
        assert patch.factor == 8


def test_others_may_read_what_is_exported(tmp_path, llama):
    """A server often runs as another user than who made the checkpoint; safetensors writes for its owner alone."""
    with extend(llama, Yarn(), factor=4):
        path = save_extended(llama, tmp_path / "out")
    assert path.stat().st_mode & 0o005 == 0o005
    files = list(path.iterdir())
    assert "model.safetensors" in {file.name for file in files}
    assert all(file.stat().st_mode & 0o004 for file in files)


def test_the_tokenizer_follows_the_window(tmp_path):
    model, tokenizer = load_model("tiny", device="cpu")
    before = tokenizer.model_max_length
    with extend(model, Yarn(), context=1024):
        path = save_extended(model, tmp_path / "out", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(path).model_max_length == 1024
    assert tokenizer.model_max_length == before


def test_an_unpatched_model_is_refused(llama, tmp_path):
    with pytest.raises(ExportError, match="not extended"):
        save_extended(llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    with extend(llama, Yarn(), factor=4):
        for name in ("out", "file"):
            with pytest.raises(ExportError, match="not an empty directory"):
                save_extended(llama, tmp_path / name)
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_an_empty_directory_is_fine_and_neighbours_are_left_alone(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with extend(llama, Yarn(), factor=4):
        path = save_extended(llama, tmp_path / "out")
    assert (path / "model.safetensors").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"


def test_an_existing_directory_is_filled_in_place(llama, tmp_path):
    """It may be a mount point or somebody's working directory: it must stay the directory it was."""
    (tmp_path / "out").mkdir()
    before = (tmp_path / "out").stat().st_ino
    with extend(llama, Yarn(), factor=4):
        path = save_extended(llama, tmp_path / "out")
    assert (tmp_path / "out").stat().st_ino == before
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "rope_ext.json",
    ]


def test_links_to_nowhere_and_settings_that_do_not_validate(llama, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with extend(llama, Yarn(), factor=4):
        with pytest.raises(ExportError, match="not an empty directory"):
            save_extended(llama, tmp_path / "link")
        llama.generation_config.temperature = 0.5
        llama.generation_config.do_sample = False
        with pytest.raises(ExportError, match="cannot be written"):
            save_extended(llama, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_an_unwritable_place(llama, tmp_path):
    (tmp_path / "file").write_text("x")
    with extend(llama, Yarn(), factor=4), pytest.raises(ExportError, match="cannot be written"):
        save_extended(llama, tmp_path / "file" / "out")


def test_what_stock_code_would_read_differently_is_refused_and_leaves_nothing(llama, tmp_path):
    with extend(llama, Linear(), factor=2):
        llama.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}  # a hand that slipped
        with pytest.raises(ExportError, match="other frequencies"):
            save_extended(llama, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reloads_with_the_same_logits(ids, tmp_path, dtype):
    """Frequencies stay in fp32 on both sides, so half-precision models agree as exactly as fp32 ones."""
    model = random_llama(initializer_range=0.05).to(dtype)
    with extend(model, Yarn(), factor=4):
        ours = logits_of(model, ids)
        path = save_extended(model, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    assert stock.dtype == dtype
    # cos and sin may round to neighbouring values of 8 or 11 bits
    torch.testing.assert_close(logits_of(stock, ids), ours, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_shards(llama, ids, tmp_path, monkeypatch):
    """Weights too large for one file are split by save_pretrained; the configuration stays one."""
    real = type(llama).save_pretrained
    monkeypatch.setattr(type(llama), "save_pretrained", lambda self, path: real(self, path, max_shard_size="60KB"))
    with extend(llama, Yarn(), factor=4):
        ours = logits_of(llama, ids)
        path = save_extended(llama, tmp_path / "out")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    torch.testing.assert_close(logits_of(stock, ids), ours, rtol=0, atol=1e-3)


def test_no_file_holds_frequencies_as_weights(llama, tmp_path):
    with extend(llama, Yarn(), factor=4):
        path = save_extended(llama, tmp_path / "out")
    with safe_open(path / "model.safetensors", "pt") as weights:
        assert [name for name in weights.keys() if "inv_freq" in name or "rotary" in name] == []  # noqa: SIM118


def test_the_record_says_who_reads_it(llama, tmp_path):
    with extend(llama, Yarn(), factor=4):
        path = save_extended(llama, tmp_path / "out")
    readers = json.loads((path / "rope_ext.json").read_text())["readers"]
    assert readers["transformers 5"] == "exact"
    assert readers["ollama"].startswith("cannot (")


# peft asks transformers for a name that transformers 5.24 has deprecated
quiet_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
ADAPTED = ["yarn:beta_fast=16", "dynamic-ntk", LENGTH_DEPENDENT[2], "resonance:over=linear"]


@quiet_peft
@pytest.mark.parametrize("spelled", ADAPTED, ids=lambda s: label(parse_method(s)))
@pytest.mark.parametrize("order", ["extended first", "wrapped first"])
def test_an_adapter_carries_the_record_of_its_positions(llama, ids, tmp_path, spelled, order):
    chosen = parse_method(spelled)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    if order == "extended first":
        extend(llama, chosen, factor=4)
        model = get_peft_model(llama, settings).eval()
    else:
        model = get_peft_model(llama, settings).eval()
        extend(model, chosen, factor=4)
    ours = logits_of(model, ids)
    prompt = ids[:1, : WINDOW - 2]
    wanted = prompt
    for _ in range(5):
        wanted = torch.cat((wanted, logits_of(model, wanted)[:, -1:].argmax(-1)), dim=1)
    mask, settings = torch.ones_like(prompt), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=5, **settings)
    assert torch.equal(written, wanted)
    path = save_extended(model, tmp_path / "adapter")
    assert not (path / "config.json").exists()
    assert not (path / "model.safetensors").exists()

    base = random_llama()
    with extend_from_record(base, path) as patch:
        assert patch.method == chosen
        assert patch.context == 4 * WINDOW
        loaded = PeftModel.from_pretrained(base, path).eval()
        assert torch.equal(logits_of(loaded, ids), ours)


@quiet_peft
def test_a_base_with_an_adapter_inside_is_refused(llama, tmp_path):
    """Its weights have names that stock code does not know; read back it would be another model."""
    settings = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    with extend(llama, Yarn(), factor=4):
        get_peft_model(llama, settings)
        with pytest.raises(ExportError, match="save the PeftModel itself, or merge_and_unload"):
            save_extended(llama, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@quiet_peft
def test_a_merged_adapter_exports_as_a_whole_model(llama, ids, tmp_path):
    settings = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    with extend(llama, Yarn(), factor=4):
        merged = get_peft_model(llama, settings).merge_and_unload()
        ours = logits_of(merged, ids)
        path = save_extended(merged, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    torch.testing.assert_close(logits_of(stock, ids), ours, rtol=0, atol=1e-3)


def test_records_that_do_not_fit(llama, tmp_path):
    with pytest.raises(ExportError, match="is no record of an extended model"):
        extend_from_record(llama, tmp_path)
    (tmp_path / "rope_ext.json").write_text('{"method": "yran"}')
    with pytest.raises(ExportError, match="is no record of an extended model: 'hyperparameters'"):
        extend_from_record(llama, tmp_path)
    for broken in ('{"inv_freq": [null]', '{"context": 1e999'):
        record = f'{broken}, "method": "yarn", "hyperparameters": {{}}, "base": null, "original_context": 64}}'
        (tmp_path / "rope_ext.json").write_text(record)
        with pytest.raises(ExportError, match="is no record"):
            extend_from_record(llama, tmp_path)
    with extend(llama, Yarn(), factor=4):
        path = save_extended(llama, tmp_path / "out")
        with pytest.raises(ExportError, match="already extended; undo that first"):
            extend_from_record(llama, path)
    other = random_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(ExportError, match="made on another base"):
        extend_from_record(other, path)
    assert type(other.model.rotary_emb).__name__ == "LlamaRotaryEmbedding"


def test_the_record_of_a_scaled_base(ids, tmp_path):
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model = random_llama(rope_parameters=dict(scaled))
    with extend(model, Linear(), factor=2, base="checkpoint"):
        ours = logits_of(model, ids)
        path = save_extended(model, tmp_path / "out")
    with extend_from_record(random_llama(rope_parameters=dict(scaled)), path) as patch:
        assert torch.equal(logits_of(patch.model, ids), ours)
