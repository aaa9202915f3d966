"""`rope-ext convert`: Meta's files in, a stock checkpoint out with the same logits, or one line that says why not."""

import json
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

from rope_ext import ExportError, ModelError, cli, convert, load_model
from rope_ext.convert import convert_meta
from rope_ext.hf import read_geometry
from rope_ext.llama import Llama
from rope_ext.meta import MetaParams, meta_rope, read_params
from rope_ext.shards import read_meta
from tests.conftest import logits_of, random_llama
from tests.hf.meta_files import cut, meta_weights, params_of, write

TOLERANCE = 2e-4  # as in test_llama.py: two orders of adding in fp32
IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def meta_of(model, directory, *, num_shards=1, embedding_axis=1, weights=None, **params):
    weights = meta_weights(model) if weights is None else weights
    shards = cut(weights, num_shards, embedding_axis=embedding_axis)
    return write(directory, params_of(model, **params), shards)


def plain_logits(source, **rope):
    """Return the plain block's logits in fp32 on a folder of Meta's files."""
    read = read_meta(source)
    block = Llama(read.shape, inv_freq=meta_rope(read.params, **rope).inv_freq)
    block.load_state_dict(read.weights)
    with torch.no_grad():
        return block.float()(IDS)


def stock(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def same_weights(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def source(llama, tmp_path):
    return meta_of(llama, tmp_path / "meta")


@pytest.mark.parametrize(
    ("num_shards", "embedding_axis", "dtype", "vocab_size"),
    [
        (1, 1, torch.float32, 96),
        (1, 1, torch.bfloat16, -1),
        (1, 1, torch.float16, -1),
        (2, 1, torch.bfloat16, -1),
        (2, 0, torch.bfloat16, 96),
        (2, 0, torch.float32, -1),
        (4, 1, torch.bfloat16, 96),
    ],
)
def test_same_logits_and_bit_equal_weights(tmp_path, num_shards, embedding_axis, dtype, vocab_size):
    model = random_llama(rms_norm_eps=0.01).to(dtype)
    weights = meta_weights(model)
    shards = replicated(weights, 4) if num_shards == 4 else cut(weights, num_shards, embedding_axis=embedding_axis)
    source = write(tmp_path / "meta", params_of(model, vocab_size=vocab_size), shards)
    done = convert_meta(source, tmp_path / "out", window=64)
    assert done.num_shards == num_shards
    expected = plain_logits(source, window=64)
    assert expected.abs().max() > 5
    assert (logits_of(stock(done.path), IDS) - expected).abs().max() <= TOLERANCE
    same_weights(stock(done.path, "auto"), model)
    config = json.loads((done.path / "config.json").read_text())
    assert config["dtype"] == str(done.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    assert {tensor.dtype for tensor in load_file(done.path / "model.safetensors").values()} == {dtype}


def replicated(weights, num_shards):
    """Return shards of more GPUs than there are key heads (2 of 16 rows): two neighbours hold the same one."""
    shards = cut(weights, num_shards)
    for i, shard in enumerate(shards):
        for name, tensor in weights.items():
            if name.endswith(("wk.weight", "wv.weight")):
                shard[name] = tensor[16 * (i // 2) :][:16].clone()
    return shards


def test_what_is_written(tmp_path):
    source = meta_of(random_llama(rms_norm_eps=0.01), tmp_path / "meta")
    done = convert_meta(source, tmp_path / "out", window=64)
    config = json.loads((done.path / "config.json").read_text())
    assert sorted(p.name for p in done.path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["rope_theta"] == 10000.0, "the dialect of transformers 4"
    assert config["max_position_embeddings"] == 64
    assert config["tie_word_embeddings"] is False
    assert config["rms_norm_eps"] == 0.01
    geometry = read_geometry(stock(done.path).config)
    assert (geometry.original_context, geometry.num_heads, geometry.is_scaled) == (64, 4, False)


@pytest.mark.parametrize("heads", [1, 4])
def test_other_numbers_of_key_heads(tmp_path, heads):
    model = random_llama(num_key_value_heads=heads)
    source = meta_of(model, tmp_path / "meta", **({"n_kv_heads": "absent"} if heads == 4 else {}))
    same_weights(stock(convert_meta(source, tmp_path / "out", window=64).path), model)


@pytest.mark.parametrize("stored", ["equal", "absent"])
def test_a_tied_output(tmp_path, stored):
    model = random_llama(tie_word_embeddings=True)
    weights = meta_weights(model)
    if stored == "absent":
        del weights["output.weight"]
    for axis, vocab_size in ((0, -1), (1, -1), (1, 96)):
        folder = tmp_path / f"{axis}{vocab_size}"
        source = meta_of(
            model, folder / "meta", weights=weights, num_shards=2, embedding_axis=axis, vocab_size=vocab_size
        )
        done = convert_meta(source, folder / "out", window=64)
        assert done.tied
        assert "lm_head.weight" not in load_file(done.path / "model.safetensors")
        assert (logits_of(stock(done.path), IDS) - plain_logits(source, window=64)).abs().max() <= TOLERANCE


def test_llama31_is_rescaled_as_transformers_does(tmp_path):
    """The frequencies of LLaMA 3.1 and 3.2, against stock code fed with the published configurations."""
    model = random_llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    source = meta_of(model, tmp_path / "meta", use_scaled_rope=True)
    for factor in (8.0, 32.0):
        out = tmp_path / f"out{factor:g}"
        done = convert_meta(source, out, rope_factor=factor)
        assert done.window == 131072
        config = json.loads((out / "config.json").read_text())
        published = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert config["rope_parameters"] == published
        assert config["rope_scaling"] == {**published, "type": "llama3"}
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(head_dim=16, max_position_embeddings=131072, rope_parameters=published)
        )
        mine = meta_rope(read_params(source), factor=factor).inv_freq
        torch.testing.assert_close(mine, rotary.inv_freq, rtol=1e-6, atol=0)
        assert mine[-1] == pytest.approx(500000.0 ** (-14 / 16) / factor, rel=1e-6)
        expected = plain_logits(source, factor=factor)
        assert (logits_of(stock(out), IDS) - expected).abs().max() <= TOLERANCE


def test_bos_and_eos_follow_the_vocabulary(tmp_path):
    for vocab, ends in ((32000, (1, 2)), (128256, (128000, 128001)), (96, (None, None))):
        model = random_llama(vocab_size=vocab, hidden_size=8, num_attention_heads=2, head_dim=4, num_hidden_layers=1)
        source = meta_of(model, tmp_path / f"meta{vocab}")
        config = stock(convert_meta(source, tmp_path / f"out{vocab}", window=64).path).config
        assert (config.bos_token_id, config.eos_token_id) == ends


@pytest.mark.parametrize(
    ("params", "asked", "expected"),
    [
        ({"rope_theta": 10000.0}, {"window": 4096}, (4096, "default")),
        ({"rope_theta": 500000.0}, {}, (8192, "default")),
        ({"rope_theta": 500000.0}, {"window": 100}, (100, "default")),
        ({"use_scaled_rope": True}, {"factor": 8}, (131072, "llama3")),
        ({"use_scaled_rope": True, "rope_scaling_factor": 32.0}, {}, (131072, "llama3")),
        ({"use_scaled_rope": True, "rope_scaling_factor": 32.0}, {"window": 16384, "factor": 32}, (16384, "llama3")),
        ({"use_scaled_rope": True}, {}, "--rope-factor N.: 8 for LLaMA 3.1 and 3.3, 32 for LLaMA 3.2"),
        ({"use_scaled_rope": True, "rope_scaling_factor": 32.0}, {"factor": 8}, "8 came, but params.json states 32"),
        ({"use_scaled_rope": True}, {"factor": 0.5}, "0.5 is not a stretch"),
        ({}, {"window": 4096, "factor": 8}, "8 has no effect; leave it out"),
        ({}, {}, "--window N.: 2048 for LLaMA 1, 4096 for Llama 2"),
        ({"rope_theta": 1e6}, {}, "rope_theta 1e.06.; give it"),
        ({}, {"window": 0}, "window: 0 tokens is no window"),
    ],
)
def test_window_and_factor_are_asked_for_or_known(params, asked, expected):
    read = MetaParams(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, **params)
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            meta_rope(read, **asked)
        return
    rope = meta_rope(read, **asked)
    assert (rope.window, rope.parameters["rope_type"]) == expected


def test_a_high_freq_factor_is_heard():
    plain, other = (
        MetaParams(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, use_scaled_rope=True, rope_scaling_factor=8.0, **more)
        for more in ({}, {"rope_high_freq_factor": 64.0})
    )
    assert meta_rope(other).parameters["high_freq_factor"] == 64
    assert not torch.equal(meta_rope(other).inv_freq, meta_rope(plain).inv_freq)


def test_the_bundled_model_in_either_layout(tmp_path):
    model, _ = load_model("tiny", device="cpu")
    good = meta_of(model, tmp_path / "meta")
    done = convert_meta(good, tmp_path / "out", window=256)
    assert (done.layout, done.guess.layout) == ("neighbours", "neighbours")
    same_weights(stock(done.path), model)

    halves = meta_of(model, tmp_path / "halves", weights=meta_weights(model, permute=False))
    with pytest.raises(ModelError, match=r"look like halves already .* --layout halves keeps them in place"):
        convert_meta(halves, tmp_path / "no", window=256)
    assert not (tmp_path / "no").exists()
    kept = convert_meta(halves, tmp_path / "kept", window=256, layout="halves")
    same_weights(stock(kept.path), model)
    moved = convert_meta(halves, tmp_path / "moved", window=256, layout="neighbours")
    assert "neighbours, though the weights look like halves" in moved.layout_in_words()
    assert not torch.equal(
        stock(moved.path).model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight
    )


def test_feed_forward_widths_must_agree(tmp_path):
    model = random_llama()  # 96 wide; 8 * 64 // 3 = 170
    said = meta_of(model, tmp_path / "meta", multiple_of=32, ffn_dim_multiplier=0.5)
    assert read_meta(said).shape.ffn_width == 96
    with pytest.raises(ModelError, match=r"the feed-forward layer is 96 wide; .* make it 192"):
        read_meta(meta_of(model, tmp_path / "other", multiple_of=32))


def test_stored_frequencies_and_settings_of_a_run_are_passed_over(llama, tmp_path):
    weights = {**meta_weights(llama), "rope.freqs": torch.ones(8)}
    weights["layers.0.attention.inner_attention.rope.freqs"] = torch.ones(8)
    source = meta_of(
        llama, tmp_path / "meta", weights=weights, max_seq_len=2048, max_batch_size=1, vision_chunk_size=None
    )
    same_weights(stock(convert_meta(source, tmp_path / "out", window=64).path), llama)


def test_files_from_before_the_zip_format(llama, tmp_path):
    source = meta_of(llama, tmp_path / "meta")
    torch.save(meta_weights(llama), source / "consolidated.00.pth", _use_new_zipfile_serialization=False)
    same_weights(stock(convert_meta(source, tmp_path / "out", window=64).path), llama)


class Malice:
    """What runs a line of code when a pickle of it is opened without care."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle"])
def test_a_file_with_code_in_it_is_refused_and_not_run(source, llama, tmp_path, form):
    mark, file = tmp_path / "mark", source / "consolidated.00.pth"
    content = {**meta_weights(llama), "norm.weight": Malice(mark)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(ModelError, match="holds code or other things than tensors, and was not opened"):
        convert_meta(source, tmp_path / "out", window=64)
    assert not mark.exists()
    torch.load(file, weights_only=False) if form != "pickle" else pickle.loads(file.read_bytes())
    assert mark.exists(), "the trap works: only care keeps it shut"


def change(source, name=None, tensor=None, *, shard=0):
    """Put a tensor into a shard, or take it out."""
    file = source / f"consolidated.{shard:02d}.pth"
    weights = torch.load(file, weights_only=True)
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    torch.save(weights, file)


BROKEN = {
    "no params": (lambda s: (s / "params.json").unlink(), "params.json cannot be read: No such file"),
    "no shard": (lambda s: (s / "consolidated.00.pth").unlink(), "consolidated.00.pth is missing beside"),
    "no shards": (lambda s: [f.unlink() for f in s.glob("*.pth")], "consolidated.00.pth is missing; shards count"),
    "a lost tensor": (lambda s: change(s, "layers.1.ffn_norm.weight"), "layers.1.ffn_norm.weight is missing .1 of 21"),
    "a strange tensor": (
        lambda s: change(s, "layers.2.x.weight", torch.ones(1)),
        "layers.2.x.weight is no tensor of a",
    ),
    "a long tensor": (
        lambda s: change(s, "layers.0.attention.wq.weight", torch.ones(33, 64), shard=1),
        r"wq.weight has shape \(33, 64\); params.json asks for \(32, 64\), shards: 2",
    ),
    "a flat tensor": (lambda s: change(s, "layers.0.feed_forward.w1.weight", torch.ones(())), "width of 0"),
    "an output in one shard": (lambda s: change(s, "output.weight"), "output.weight is in some shards and not"),
    "norms that differ": (
        lambda s: change(s, "norm.weight", torch.zeros(64), shard=1),
        "norm.weight differs between shards that should hold copies",
    ),
    "several dtypes": (lambda s: change(s, "norm.weight", torch.ones(64).half()), "tensors of float16, float32; they"),
    "integers": (lambda s: torch.save({}, s / "consolidated.01.pth"), "consolidated.01.pth: .* is missing"),
    "no dictionary": (lambda s: torch.save([torch.ones(1)], s / "consolidated.00.pth"), "is no dictionary of tensors"),
    "no tensors": (lambda s: torch.save({"a": 1}, s / "consolidated.00.pth"), "is no dictionary of tensors"),
    "half a file": (
        lambda s: (s / "consolidated.00.pth").write_bytes((s / "consolidated.00.pth").read_bytes()[:3000]),
        "consolidated.00.pth (cannot be read|holds code or other things than tensors)",
    ),
    "an empty file": (lambda s: (s / "consolidated.00.pth").write_bytes(b""), "consolidated.00.pth cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_one_line_and_leave_nothing(llama, tmp_path, case):
    damage, message = BROKEN[case]
    source = meta_of(llama, tmp_path / "meta", num_shards=2)
    damage(source)
    with pytest.raises(ModelError, match=message) as caught:
        convert_meta(source, tmp_path / "out", window=64)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": "absent"}, "dim is missing"),
        ({"dim": "64"}, "dim is '64'; it must be of type int"),
        ({"dim": 64.0}, "dim is 64.0; it must be of type int"),
        ({"n_layers": True}, "n_layers is True; it must be of type int"),
        ({"norm_eps": "small"}, "norm_eps is 'small'; it must be of type float"),
        ({"use_scaled_rope": 1}, "use_scaled_rope is 1; it must be of type bool"),
        ({"n_heads": 0}, "n_heads is 0; it must be above 0"),
        ({"vocab_size": -2}, "vocab_size is -2; it must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be above 0"),
        ({"n_heads": 5}, "n_heads 5, n_kv_heads 2 do not fit"),
        ({"n_kv_heads": 3}, "n_kv_heads 3 do not fit"),
        ({"moe_args": {}}, "'moe_args' is no key of a plain LLaMA"),
        ({"vocab_size": 97}, r"weight has shape \(96, 64\); params.json asks for \(97, 64\)"),
        ({"n_layers": 1}, "layers.1.attention.wk.weight is no tensor of a LLaMA with 1 layers"),
        ({"n_layers": 3}, "layers.2.attention.wk.weight is missing .9 of 30 are"),
    ],
)
def test_bad_parameters(llama, tmp_path, params, message):
    with pytest.raises(ModelError, match=message):
        read_meta(meta_of(llama, tmp_path, **params))


@pytest.mark.parametrize("text", ["{", "[1]", b"\xff"])
def test_parameters_that_are_no_object(tmp_path, text):
    (tmp_path / "params.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=r"params.json (is not JSON|holds no JSON object)"):
        read_params(tmp_path)


def test_key_heads_that_should_be_copies_and_are_not(llama, tmp_path):
    shards = replicated(meta_weights(llama), 4)
    shards[1]["layers.0.attention.wk.weight"] += 1
    source = write(tmp_path / "meta", params_of(llama), shards)
    with pytest.raises(ModelError, match=r"layers.0.attention.wk.weight differs between shards"):
        read_meta(source)


def test_nothing_is_overwritten_and_a_failed_write_leaves_nothing(source, tmp_path, monkeypatch):
    with pytest.raises(ExportError, match="not an empty directory"):
        convert_meta(source, source, window=64)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    monkeypatch.setattr(convert, "frequencies_agree", lambda *_: False)
    with pytest.raises(ExportError, match="would read other frequencies"):
        convert_meta(source, tmp_path / "out", window=64)

    def full(*_args, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(ExportError, match="No space left on device"):
        convert_meta(source, tmp_path / "out", window=64)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


# The tokenizer. sentencepiece is no dependency, so a stand-in plays it here; LOG.md has the run with the real one.

PIECES = ["<unk>", "<s>", "</s>", *"\u2581abcdefghijklmnopqrstuvwxyzHW=.0123456789():\n\t"]


class FakePieces:
    """SentencePiece over single characters: a space before the text, and every space a U+2581."""

    def __init__(self, model_file):
        self.pieces = json.loads(Path(model_file).read_text())

    def get_piece_size(self):
        return len(self.pieces)

    def id_to_piece(self, i):
        return self.pieces[i]

    unk_id, bos_id, eos_id = (staticmethod(lambda i=i: i) for i in range(3))

    def encode(self, text):
        marked = ("\u2581" + text).replace(" ", "\u2581") if text else ""
        return [self.pieces.index(c) if c in self.pieces else 0 for c in marked]


@pytest.fixture
def sentencepiece(monkeypatch):
    """Have the packages importable, and transformers read a file of theirs."""
    for name, module in (("sentencepiece", FakePieces), ("google.protobuf", None), ("google", None)):
        fake = types.ModuleType(name)
        fake.SentencePieceProcessor = module
        monkeypatch.setitem(sys.modules, name, fake)

    def read(directory):
        pieces = json.loads((Path(directory) / "tokenizer.model").read_text())
        backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # as transformers sets it
        return types.SimpleNamespace(backend_tokenizer=backend)

    monkeypatch.setattr(convert.LlamaTokenizer, "from_pretrained", read)


@pytest.mark.usefixtures("sentencepiece")
def test_a_tokenizer_is_converted_and_follows_the_window(source, tmp_path):
    (source / "tokenizer.model").write_text(json.dumps(PIECES))
    done = convert_meta(source, tmp_path / "out", window=64)
    assert "was converted, and splits 6 probes as sentencepiece does" in done.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(done.path)
    assert tokenizer.encode(" a") == [1, 3, 3, 4], "BOS, the space of SentencePiece, the space of the text"
    assert (tokenizer.model_max_length, tokenizer.eos_token_id) == (64, 2)


@pytest.mark.usefixtures("sentencepiece")
def test_a_tokenizer_that_splits_otherwise_is_not_kept(source, tmp_path, monkeypatch):
    (source / "tokenizer.model").write_text(json.dumps(PIECES))
    monkeypatch.setattr(FakePieces, "encode", lambda _self, text: [0] * len(text))
    done = convert_meta(source, tmp_path / "out", window=64)
    assert "was not converted: transformers would split 'Hello world' otherwise" in done.tokenizer
    assert not list(done.path.glob("token*"))


@pytest.mark.usefixtures("sentencepiece")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no tokenizer.model beside the weights; copy"),
        (b"IQ== 0\nIg== 1\n", "a file for tiktoken does not list its special tokens; copy"),
        (json.dumps(PIECES * 3).encode(), "it has 147 tokens, the weights 96; copy"),
        (b"\x0a\x0e\x0a\x05", "was not converted: "),
    ],
)
def test_what_cannot_be_converted_is_said(source, tmp_path, content, words):
    if content is not None:
        (source / "tokenizer.model").write_bytes(content)
    done = convert_meta(source, tmp_path / "out", window=64)
    assert words in done.tokenizer
    assert done.tokenizer.endswith("copy a Hugging Face tokenizer beside the weights")
    assert not list(done.path.glob("token*"))


def test_without_sentencepiece_the_line_says_so(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (source / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05")
    done = convert_meta(source, tmp_path / "out", window=64)
    assert "needs the packages sentencepiece and protobuf" in done.tokenizer


def run(*words):
    return CliRunner().invoke(cli.app, ["convert", *map(str, words)])


def test_the_command(source, tmp_path):
    shown = run(source, "--out", tmp_path / "out", "--window", 64)
    assert shown.exit_code == 0, shown.output
    first, layout, tokenizer = shown.stdout.splitlines()
    assert f"window 64 tokens; load it with AutoModelForCausalLM.from_pretrained('{tmp_path / 'out'}')" in first
    assert layout.startswith("layout: cannot be told from the weights (partners coupled ")
    assert layout.endswith("; taken as neighbours")
    assert tokenizer.startswith("tokenizer: no tokenizer.model")
    got = run(source, "--out", tmp_path / "again", "--window", 64, "--layout", "halves", "--json")
    document = json.loads(got.stdout)
    guess = document.pop("layout_guess")
    assert guess["layout"] is None
    assert guess["halves"] == pytest.approx(1, abs=0.6)
    assert document == {
        "source": str(source),
        "out": str(tmp_path / "again"),
        "window": 64,
        "layout": "halves",
        "dtype": "float32",
        "num_shards": 1,
        "tied": False,
        "tokenizer": "no tokenizer.model beside the weights; copy a Hugging Face tokenizer beside the weights",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "window: params.json does not state it"),
        (["--window", "64", "--layout", "both"], "layout: 'both' is neither neighbours nor halves"),
        (["--window", "64", "--rope-factor", "8"], "8 has no effect"),
    ],
)
def test_bad_input_is_one_line_and_exit_two(source, tmp_path, words, message):
    result = run(source, "--out", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there(tmp_path):
    result = run(tmp_path / "nowhere", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "name the folder with params.json and consolidated.00.pth" in result.stderr


def test_weights_that_are_not_finite(llama, tmp_path):
    weights = meta_weights(llama)
    weights["layers.0.attention.wq.weight"][0, 0] = float("nan")
    write(tmp_path / "meta", params_of(llama), [weights])
    with pytest.raises(ModelError, match=r"query or key weights of .* are not finite"):
        convert_meta(tmp_path / "meta", tmp_path / "out", window=64)
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_a_copy_of_another(llama, tmp_path):
    first, _ = cut(meta_weights(llama), 2)
    write(tmp_path / "meta", params_of(llama), [first, first])
    with pytest.raises(ModelError, match=r"two shards hold the same layers\.0\.attention\.wq\.weight"):
        convert_meta(tmp_path / "meta", tmp_path / "out", window=64)


@pytest.mark.parametrize("window", [0, -1, 2**31, 10**30])
def test_windows_that_are_none(source, tmp_path, window):
    with pytest.raises(ModelError, match="it must be 1 to 2147483647"):
        convert_meta(source, tmp_path / "a" / "b", window=window)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_plain_data(llama, tmp_path, kind):
    weights, name = meta_weights(llama), "layers.0.feed_forward.w1.weight"
    weights[name] = weights[name].to_sparse() if kind == "sparse" else weights[name].to("meta")
    write(tmp_path / "meta", params_of(llama), [weights])
    with pytest.raises(ModelError, match=f"{name} is sparse or holds no data"):
        convert_meta(tmp_path / "meta", tmp_path / "out", window=64)


def test_more_layers_than_any_llama_has(llama, tmp_path):
    write(tmp_path / "meta", params_of(llama, n_layers=10**7), [meta_weights(llama)])
    with pytest.raises(ModelError, match="n_layers is 10000000; no LLaMA has more than 10000"):
        convert_meta(tmp_path / "meta", tmp_path / "out", window=64)
