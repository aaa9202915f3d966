"""GGUF: what llama.cpp computes from the file equals the plan, weights are in its order, a copy changes nothing else.

llama.cpp's reading is written again here from its sources: angle = position * base^(-2i/d) / rope_freqs[i], cos and sin
times attn_factor. scripts/check_llama_cpp.py compares logits with the real thing.
"""

import gguf
import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rope_ext import ContextError, ExportError, Linear, MethodError, Ntk, Yarn, extend, load_model
from rope_ext.gguf import extend_gguf, save_gguf
from rope_ext.plan import label
from rope_ext.registry import parse_method
from tests.conftest import IN_STOCK, LENGTH_DEPENDENT, WINDOW, random_llama

SPELLED = [*IN_STOCK, "yarn:beta_fast=16:attention_scale=1.3", "yarn:ramp=rotations", "resonance:over=p-rope"]


def read(path):
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def turned(path, head_dim=16):
    """Return inv_freq and scale as llama.cpp computes them."""
    fields, tensors = read(path)
    pair = np.arange(head_dim // 2)
    plain = fields["llama.rope.freq_base"] ** (-2.0 * pair / head_dim)
    factors = np.array(tensors["rope_freqs.weight"].data) if "rope_freqs.weight" in tensors else 1.0
    assert fields["llama.rope.scaling.type"] == "none"
    assert "llama.rope.scaling.factor" not in fields
    return torch.from_numpy(plain / factors), fields.get("llama.rope.scaling.attn_factor", 1.0)


@pytest.fixture
def source(tmp_path):
    """An unstretched GGUF, as a converter leaves one."""
    model = random_llama()
    with extend(model, parse_method("unscaled"), factor=1):
        return save_gguf(model, tmp_path / "source.gguf")


def check(path, patch_plan, context):
    inv_freq, scale = turned(path)
    wanted = patch_plan.inv_freq.double()
    # fp32 factors; stopped pairs are divided by 1e30
    torch.testing.assert_close(inv_freq[wanted > 0], wanted[wanted > 0], rtol=1e-6, atol=0)
    assert bool((inv_freq[wanted == 0] < 1e-20).all())
    assert scale == pytest.approx(patch_plan.attention_scale, rel=1e-6)
    assert read(path)[0]["llama.context_length"] == context


@pytest.mark.parametrize("spelled", SPELLED)
def test_both_ways_give_the_plan(llama, source, tmp_path, spelled):
    chosen = parse_method(spelled)
    with extend(llama, chosen, factor=4) as patch:
        check(save_gguf(llama, tmp_path / "live.gguf"), patch.plan, 4 * WINDOW)
        check(extend_gguf(source, tmp_path / "copy.gguf", chosen, factor=4), patch.plan, 4 * WINDOW)
    assert read(tmp_path / "copy.gguf")[0]["rope_ext.method"] == spelled


def test_a_plain_base_is_written_as_one(llama, tmp_path):
    """So that readers which know no factors get it too."""
    with extend(llama, Ntk(), factor=4):
        fields, tensors = read(save_gguf(llama, tmp_path / "out.gguf"))
    assert fields["llama.rope.freq_base"] == pytest.approx(1e4 * 4 ** (16 / 14), rel=1e-6)
    assert "rope_freqs.weight" not in tensors


def test_a_copy_keeps_every_other_byte(source, tmp_path):
    extend_gguf(source, tmp_path / "out.gguf", Yarn(), factor=4)
    before, tensors_before = read(source)
    after, tensors_after = read(tmp_path / "out.gguf")
    ours = {"llama.context_length", "rope_ext.method", "llama.rope.scaling.attn_factor", "rope_ext.original_context"}
    for name in set(before) - ours - {"GGUF.tensor_count", "GGUF.kv_count"}:
        assert after[name] == before[name], name
    assert set(after) - set(before) <= ours
    for name, tensor in tensors_before.items():
        assert tensors_after[name].tensor_type == tensor.tensor_type
        assert np.array_equal(tensors_after[name].data, tensor.data)
    assert set(tensors_after) - set(tensors_before) == {"rope_freqs.weight"}


def test_a_real_quantised_file(tmp_path):
    """SmolLM2's GGUF, 4-bit weights and all."""
    from rope_ext.hf import locate

    folder, inside = locate("smollm2")
    path = extend_gguf(f"{folder}/{inside['gguf_file']}", tmp_path / "out.gguf", Yarn(), context=16_384)
    fields, tensors = read(path)
    assert fields["llama.context_length"] == 16_384
    assert fields["tokenizer.ggml.pre"] == "smollm"
    assert len(fields["tokenizer.ggml.tokens"]) == 49_152
    original = {t.name: t for t in gguf.GGUFReader(f"{folder}/{inside['gguf_file']}").tensors}
    assert {t.tensor_type.name for t in original.values()} > {"F32", "Q4_1"}
    for name, tensor in original.items():
        assert np.array_equal(tensors[name].data, tensor.data)
    with pytest.raises(ValueError, match="carries RoPE scaling"):  # it is a scaled file now
        extend_gguf(path, tmp_path / "again.gguf", Yarn(), factor=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_in_llama_cpps_order(tmp_path, dtype):
    llama = random_llama(tie_word_embeddings=False).to(dtype)
    with extend(llama, Yarn(), factor=4):
        _, tensors = read(save_gguf(llama, tmp_path / "out.gguf"))
    state = llama.state_dict()

    def stored(name):
        tensor = tensors[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    def wanted(name):
        return state[name].float()

    query, key = wanted("model.layers.0.self_attn.q_proj.weight"), wanted("model.layers.1.self_attn.k_proj.weight")
    for stored_rows, rows, heads in (
        (stored("blk.0.attn_q.weight"), query, 4),
        (stored("blk.1.attn_k.weight"), key, 2),
    ):
        for head in range(heads):
            for pair in range(8):
                assert torch.equal(stored_rows[head * 16 + 2 * pair], rows[head * 16 + pair])
                assert torch.equal(stored_rows[head * 16 + 2 * pair + 1], rows[head * 16 + 8 + pair])
    for name, place in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.1.mlp.gate_proj.weight", "blk.1.ffn_gate.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
    ):
        assert torch.equal(stored(place), wanted(name)), name
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    assert len(tensors) == len(state) + 1  # and rope_freqs


def test_tied_embeddings_are_written_once(tmp_path):
    llama = random_llama(tie_word_embeddings=True)
    with extend(llama, Linear(), factor=4):
        _, tensors = read(save_gguf(llama, tmp_path / "out.gguf"))
    assert "output.weight" not in tensors


def test_biases_turn_with_their_rows(tmp_path):
    llama = random_llama(attention_bias=True)
    with torch.no_grad():
        bias = llama.model.layers[0].self_attn.q_proj.bias.copy_(torch.arange(64.0))
    with extend(llama, Yarn(), factor=4):
        _, tensors = read(save_gguf(llama, tmp_path / "out.gguf"))
    stored = np.array(tensors["blk.0.attn_q.bias"].data)
    assert stored[:6].tolist() == bias[[0, 8, 1, 9, 2, 10]].tolist()
    assert tensors["blk.1.attn_v.bias"].tensor_type.name == "F32"


def test_the_bundled_tokenizer(tmp_path):
    model, tokenizer = load_model("tiny", device="cpu")
    with extend(model, Yarn(), factor=8):
        fields, _ = read(save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer))
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    assert fields["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(1024))
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert fields["tokenizer.ggml.bos_token_id"] == 0
    assert fields["tokenizer.ggml.add_bos_token"] is True


def test_tokenizers_that_have_no_name_there(llama, tmp_path):
    from tests.evals.conftest import byte_tokenizer

    with extend(llama, Yarn(), factor=4), pytest.raises(ExportError, match=r"no known name.*llama.cpp's own converter"):
        save_gguf(llama, tmp_path / "out.gguf", tokenizer=byte_tokenizer())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spelled", LENGTH_DEPENDENT, ids=lambda s: label(parse_method(s)))
def test_methods_that_follow_the_length_are_refused(llama, source, tmp_path, spelled):
    with extend(llama, parse_method(spelled), factor=4), pytest.raises(ExportError, match="take a static method"):
        save_gguf(llama, tmp_path / "out.gguf")
    with pytest.raises(ExportError, match="take a static method"):
        extend_gguf(source, tmp_path / "out.gguf", parse_method(spelled), factor=4)


def test_what_is_stretched_already_is_not_a_base(source, tmp_path):
    """Ours of a plain base has no scaling that a reader could see, and one of factor 1 only an attention factor."""
    for name, spelled, factor in (("ntk", "ntk", 4), ("scale", "yarn:attention_scale=1.3", 1)):
        path = extend_gguf(source, tmp_path / f"{name}.gguf", parse_method(spelled), factor=factor)
        with pytest.raises(ValueError, match="carries RoPE scaling"):
            extend_gguf(path, tmp_path / "again.gguf", Yarn(), factor=2)
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    writer.add_float32("llama.rope.scale_linear", 4.0)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(ValueError, match="carries RoPE scaling"):
        extend_gguf(tmp_path / "old.gguf", tmp_path / "again.gguf", Yarn(), factor=2)


@pytest.mark.parametrize("alignment", [16, 64, 256])
def test_other_alignments_and_empty_lists_are_copied(source, tmp_path, alignment):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    fields, tensors = read(extend_gguf(tmp_path / "other.gguf", tmp_path / "out.gguf", Yarn(), factor=4))
    assert fields["general.alignment"] == alignment
    for tensor in reader.tensors:
        assert np.array_equal(tensors[tensor.name].data, tensor.data)


def test_a_part_of_a_split_file_is_refused(source, tmp_path):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(ExportError, match="one of 3 parts; merge them first"):
        extend_gguf(tmp_path / "part.gguf", tmp_path / "out.gguf", Yarn(), factor=4)


def test_another_activation_is_refused(tmp_path):
    llama = random_llama(hidden_act="gelu")
    with extend(llama, Yarn(), factor=4), pytest.raises(ExportError, match="activation silu, and this model 'gelu'"):
        save_gguf(llama, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_what_else_is_refused(llama, source, tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(ExportError, match="not extended"):
        save_gguf(llama, out)
    with extend(llama, Yarn(), factor=4):
        with pytest.raises(ExportError, match="exists; name a new file"):
            save_gguf(llama, source)
        with pytest.raises(ExportError, match="not a writable directory"):
            save_gguf(llama, tmp_path / "no" / "out.gguf")
        with pytest.raises(ExportError, match="float64 have no form"):
            save_gguf(llama.double(), out)
    with pytest.raises(ContextError, match="below the original window"):
        extend_gguf(source, out, Yarn(), context=32)
    with pytest.raises(MethodError, match="no factors"):
        extend_gguf(source, out, parse_method("longrope"), factor=2)
    (tmp_path / "junk.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ValueError, match="truncated, or no GGUF"):
        extend_gguf(tmp_path / "junk.gguf", out, Yarn(), factor=2)
    mistral = MistralForCausalLM(
        MistralConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=None,
        )
    )
    with extend(mistral, Yarn(), factor=2), pytest.raises(ExportError, match="'llama' alone, and this is 'mistral'"):
        save_gguf(mistral, out)
    assert not out.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["junk.gguf", "source.gguf"]


def test_a_file_that_reads_otherwise_is_not_kept(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("rope_ext.gguf._factors", lambda _table: np.full(8, 2.0, dtype=np.float32))
    with extend(llama, Yarn(), factor=4), pytest.raises(ExportError, match="other frequencies"):
        save_gguf(llama, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_bias_is_not_written_as_if_there_were_none(source, tmp_path):
    model = random_llama()
    with extend(model, parse_method("alibi"), factor=4), pytest.raises(ExportError, match="adds a bias to attention"):
        save_gguf(model, tmp_path / "out.gguf")
    with pytest.raises(ExportError, match="adds a bias to attention"):
        extend_gguf(source, tmp_path / "out.gguf", parse_method("alibi"), factor=4)
    assert not (tmp_path / "out.gguf").exists()
