"""extend(): the identity, effect, undo, nesting, dtype, and everything that must be refused."""

import inspect
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from rope_ext import (
    ContextError,
    ExportError,
    Linear,
    Llama3,
    MethodError,
    ModelError,
    Ntk,
    Patch,
    PatchError,
    PositionPlan,
    Unscaled,
    Yarn,
    extend,
    save_extended,
)
from rope_ext.hf import read_geometry
from rope_ext.plan import StaticMethod, label
from rope_ext.registry import parse_method
from rope_ext.tables import ExtendedRotaryEmbedding
from tests.conftest import IN_STOCK, LENGTH_DEPENDENT, STATIC, WINDOW, logits_of, random_llama

# transformers 5.24 renamed the keyword and warns about the old one
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
ALL = [parse_method(spelled) for spelled in (*STATIC, *LENGTH_DEPENDENT)]
STATIC_VARIANTS = [
    parse_method(spelled)
    for spelled in (*STATIC, "yarn:ramp=rotations", "resonance:over=yarn", "resonance:over=linear")
]
# They change a model even where nothing is stretched: pairs stopped, wavelengths rounded, lists that are not all 1.
NO_IDENTITY = {"alibi", "nope", "p-rope", "resonance", "longrope"}


@pytest.mark.parametrize("chosen", [m for m in ALL if m.name not in NO_IDENTITY], ids=label)
def test_factor_one_is_bit_equal_to_the_untouched_model(llama, ids, chosen):
    if not isinstance(chosen, StaticMethod):
        ids = ids[:, :WINDOW]  # the others go on growing beyond the window
    before = logits_of(llama, ids)
    with extend(llama, chosen, factor=1):
        assert torch.equal(logits_of(llama, ids), before)


def test_unscaled_is_bit_equal_at_any_context(llama, ids):
    before = logits_of(llama, ids)
    with extend(llama, Unscaled(), context=4 * WINDOW):
        assert torch.equal(logits_of(llama, ids), before)
        assert llama.config.max_position_embeddings == 4 * WINDOW


@pytest.mark.parametrize("chosen", [m for m in ALL if m.name != "unscaled"], ids=label)
def test_a_patch_takes_effect_and_undo_restores_every_bit(llama, ids, chosen):
    before, config = logits_of(llama, ids), llama.config.to_dict()
    patch = extend(llama, chosen, factor=4)
    # logits of this model are of order 10; a method that moved nothing would leave them equal
    assert (logits_of(llama, ids) - before).abs().max() > 1
    assert llama.config.max_position_embeddings == 4 * WINDOW
    assert llama.config.to_dict() != config
    patch.undo()
    patch.undo()
    assert torch.equal(logits_of(llama, ids), before)
    assert llama.config.to_dict() == config


@pytest.mark.parametrize("chosen", [m for m in STATIC_VARIANTS if m.name in IN_STOCK], ids=label)
def test_logits_equal_the_same_weights_under_stock_code(ids, chosen):
    """Second oracle: transformers' own formulas, told by configuration, on the same weights."""
    live = random_llama()
    with extend(live, chosen, factor=4) as patch:
        ours = logits_of(live, ids)
        parameters = dict(live.config.rope_parameters)
    stock = random_llama(rope_parameters=parameters, max_position_embeddings=4 * WINDOW)
    stock.load_state_dict(live.state_dict())
    assert type(stock.model.rotary_emb).__name__ == "LlamaRotaryEmbedding"
    assert stock.model.rotary_emb.attention_scaling == pytest.approx(patch.plan.attention_scale, rel=1e-12)
    # frequencies agree to 1e-6 relative; over 192 positions and logits of order 10 that is below 1e-3
    torch.testing.assert_close(ours, logits_of(stock, ids), rtol=0, atol=1e-3)


def test_undo_after_an_exception(llama, ids):
    before = logits_of(llama, ids)

    def fail():
        raise KeyError("boom")

    with pytest.raises(KeyError), extend(llama, Yarn(), factor=2):
        fail()
    assert torch.equal(logits_of(llama, ids), before)


def test_nesting_starts_from_the_checkpoint_and_undoes_in_order(llama, ids):
    before = logits_of(llama, ids)
    with extend(llama, Linear(), factor=2):
        alone = logits_of(llama, ids)
    with extend(llama, Yarn(), factor=8) as outer:
        middle = logits_of(llama, ids)
        with extend(llama, Linear(), factor=2) as inner:
            assert inner.geometry.original_context == WINDOW
            assert torch.equal(logits_of(llama, ids), alone)
            with pytest.raises(PatchError, match="undo that one first"):
                outer.undo()
            with pytest.raises(PatchError, match="lies under a later patch"):
                outer.verify()
        assert torch.equal(logits_of(llama, ids), middle)
        outer.verify()
    assert torch.equal(logits_of(llama, ids), before)
    with pytest.raises(PatchError, match="undone"):
        outer.verify()


def test_bf16_keeps_frequencies_in_fp32(llama):
    """A stock module cast with the model would turn whole turns off; ours must not, before or after the cast."""
    with extend(llama, Yarn(), factor=4) as patch:
        llama.to(torch.bfloat16)
        table = llama.model.rotary_emb
        assert table.inv_freq.dtype == torch.float32
        assert torch.equal(table.inv_freq, patch.plan.inv_freq)
        patch.verify()
        positions = torch.tensor([[0, 4 * WINDOW - 1]])
        cos, sin = table(torch.zeros(1, 2, 64, dtype=torch.bfloat16), positions)
        assert cos.dtype == sin.dtype == torch.bfloat16
        angle = patch.plan.inv_freq.double() * (4 * WINDOW - 1)
        # the finished value is rounded to 8 bits, never the angle
        torch.testing.assert_close(
            cos[0, 1, :8].double(), angle.cos() * patch.plan.attention_scale, rtol=2**-8, atol=2**-8
        )
        llama.half()
        assert table.inv_freq.dtype == torch.float32


def test_extending_a_model_already_in_bf16():
    model = random_llama(initializer_range=0.02).to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16  # what stock code does to itself
    with extend(model, Ntk(), factor=4) as patch:
        assert torch.equal(model.model.rotary_emb.inv_freq, patch.plan.inv_freq)


def test_gradients_flow_and_training_mode_is_left_alone(llama, ids):
    llama.train()
    with extend(llama, Yarn(), factor=4):
        assert llama.training
        llama(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in llama.parameters())


def test_cached_decoding_equals_a_full_forward(llama, ids):
    with extend(llama, Yarn(), factor=4), torch.no_grad():
        full = llama(input_ids=ids).logits
        cache = DynamicCache(config=llama.config)
        llama(input_ids=ids[:, :100], **{CACHE: cache})
        rest = llama(input_ids=ids[:, 100:], **{CACHE: cache}).logits
    # fp32 sums in another order, logits of order 10
    torch.testing.assert_close(rest, full[:, 100:], rtol=0, atol=1e-4)


def test_left_padding_gives_the_same_logits(llama, ids):
    row = ids[:1, :50]
    padded = torch.cat((torch.zeros(1, 7, dtype=torch.long), row), dim=1)
    mask = (torch.arange(57) >= 7).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with extend(llama, Llama3(), factor=4), torch.no_grad():
        plain = llama(input_ids=row).logits
        shifted = llama(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 7:]
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-4)


def test_state_dict_is_unchanged(llama):
    keys = set(llama.state_dict())
    with extend(llama, Yarn(), factor=4):
        assert set(llama.state_dict()) == keys


def test_fingerprint_tells_what_can_change_a_result(llama):
    digests = set()
    for chosen, factor in ((Yarn(), 4), (Yarn(), 8), (Yarn(truncate=False), 4), (Linear(), 4), (Unscaled(), 4)):
        with extend(llama, chosen, factor=factor) as patch:
            again = patch.fingerprint
            assert again.digest == patch.fingerprint.digest
            digests.add(again.digest)
    assert len(digests) == 5
    with extend(llama, Yarn(), factor=4) as patch:
        known = patch.fingerprint
        assert known.method == "yarn"
        assert known.context == 4 * WINDOW
        with torch.no_grad():
            llama.lm_head.weight[0, 0] += 1
        assert patch.fingerprint.weights != known.weights
    with extend(llama.to(torch.bfloat16), Yarn(), factor=4) as patch:
        assert patch.fingerprint.dtype == "bfloat16"


def test_frequency_key_of_a_static_method_is_one_constant(llama):
    with extend(llama, Yarn(), factor=4) as patch:
        assert {patch.frequency_key(n) for n in (1, WINDOW, 10**6)} == {"static"}


# Everything below must be refused, in one clear line, and leave the model alone.


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, "neither came"),
        ({"context": 128, "factor": 2}, "both context=128 and factor=2"),
        ({"factor": 0.5}, "factor: 0.5 would not stretch 64 tokens"),
        ({"factor": float("nan")}, "factor: nan"),
        ({"factor": float("inf")}, "factor: inf"),
        ({"factor": 1e308}, "context: more than 2147483647 tokens"),
        ({"factor": "2"}, "factor: '2' would not stretch"),
        ({"context": 10**400}, "context: more than 2147483647 tokens"),
        ({"context": WINDOW - 1}, "context: 63 is below the original window of 64"),
    ],
)
def test_contexts_that_cannot_be_reached(llama, ids, request_, words):
    before = logits_of(llama, ids)
    with pytest.raises(ContextError, match=words):
        extend(llama, Yarn(), **request_)
    assert torch.equal(logits_of(llama, ids), before)


def test_models_without_one_rotary_site():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=32))
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no rotary embedding"):
        extend(gpt2, Yarn(), factor=2)
    double = random_llama()
    double.model.layers[0].rotary_emb = double.model.rotary_emb.__class__(double.config)
    with pytest.raises(ModelError, match="has 2 rotary embeddings"):
        extend(double, Yarn(), factor=2)


def test_odd_head_dim():
    model = random_llama()
    model.config.head_dim = 15  # transformers refuses it at construction; a configuration can still be edited
    with pytest.raises(ValueError, match="head_dim: 15 cannot be rotated in pairs"):
        extend(model, Yarn(), factor=2)


SCALED = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_checkpoints_name_the_two_choices(kind):
    model = random_llama(rope_parameters=dict(SCALED[kind]))
    offers = r'base="original" .*start from 32'
    if kind != "yarn":  # whose attention scale no further method can keep
        offers += r'.* or base="checkpoint" .*full window of 64'
    with pytest.raises(ModelError, match=rf"already carries '{kind}' scaling, 32 to 64; choose {offers}.*\)$"):
        extend(model, Linear(), context=128)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_checkpoints_from_their_original_window(kind, ids):
    model = random_llama(rope_parameters=dict(SCALED[kind]))
    before = logits_of(model, ids)
    fresh = random_llama(max_position_embeddings=32)
    with extend(model, Ntk(), context=128, base="original") as patch, extend(fresh, Ntk(), context=128):
        assert patch.geometry.original_context == 32
        assert patch.factor == 4
        assert torch.equal(logits_of(model, ids), logits_of(fresh, ids))
    assert torch.equal(logits_of(model, ids), before)


def test_scaled_checkpoints_as_the_base(ids, tmp_path):
    model = random_llama(rope_parameters=dict(SCALED["llama3"]))
    before = logits_of(model, ids)
    with extend(model, Unscaled(), factor=1, base="checkpoint"):
        assert torch.equal(logits_of(model, ids), before)
    with extend(model, Linear(), factor=2, base="checkpoint") as patch:
        assert torch.equal(patch.plan.inv_freq, model.model.rotary_emb.geometry.inv_freq / 2)
        with pytest.raises(MethodError, match="already scaled"):
            extend(model, Yarn(), factor=2)  # nested: the scaled geometry is still the base
        with pytest.raises(ModelError, match="leave base='original' out"):
            extend(model, Linear(), factor=2, base="original")
        # no type of stock transformers is linear over llama3, so the configuration says it pair by pair
        ours = logits_of(model, ids)
        model.save_pretrained(tmp_path)
    stock = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(stock, ids), ours, rtol=0, atol=1e-3)
    with pytest.raises(MethodError, match="already scaled"):
        extend(model, Yarn(), factor=2, base="checkpoint")
    yarned = random_llama(rope_parameters=dict(SCALED["yarn"]))
    with pytest.raises(ModelError, match=r"scales attention by 1\.06"):
        extend(yarned, Linear(), factor=2, base="checkpoint")


def test_a_window_that_the_configuration_misstates(ids, tmp_path):
    """Vicuna's way: linear by 2, and the window before scaling stored as the full one."""
    model = random_llama(rope_parameters=dict(SCALED["linear"]))
    with pytest.raises(ModelError, match="scaling, 32 to 64"):
        extend(model, Linear(), factor=2)
    with extend(model, Ntk(), context=256, base="original", original_context=64) as patch:
        assert patch.factor == 4
        with extend(random_llama(), Ntk(), context=256) as fresh:
            assert torch.equal(patch.plan.inv_freq, fresh.plan.inv_freq)
        with pytest.raises(ModelError, match="leave original_context=32 out"):
            extend(model, Ntk(), context=256, original_context=32)
    with extend(model, Linear(), factor=2, base="checkpoint", original_context=128) as patch:
        assert patch.context == 256
        ours = logits_of(model, ids)
        path = save_extended(model, tmp_path / "out")
    torch.testing.assert_close(logits_of(LlamaForCausalLM.from_pretrained(path).eval(), ids), ours, rtol=0, atol=1e-3)
    for wrong, words in (
        (0, "0 tokens is no window"),
        (1.5, "original_context: 1.5 is not a whole number"),
        (512, "256 is below the original window"),
    ):
        with pytest.raises(ValueError, match=words):
            extend(random_llama(), Ntk(), context=256, original_context=wrong)


@pytest.mark.parametrize("window", [1000, 4097, 33])
@pytest.mark.parametrize("context", [2994, 12345, 66_001])
def test_the_original_window_of_a_linear_export_is_found_again(window, context):
    """It is a quotient of whole numbers; rounding must not cost a token."""
    context = max(context, window)
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": context / window}
    config = random_llama().config
    config.rope_parameters, config.max_position_embeddings = parameters, context
    assert read_geometry(config, base="original").original_context == window


def test_lists_that_are_equal_are_static_and_can_be_a_base(ids, tmp_path):
    """What a resonance export says: longrope, twice the same list."""
    model = random_llama()
    with extend(model, parse_method("resonance:over=linear"), factor=2):
        path = save_extended(model, tmp_path / "out")
    again = LlamaForCausalLM.from_pretrained(path).eval()
    before = logits_of(again, ids)
    with extend(again, Unscaled(), factor=1, base="checkpoint") as patch:
        assert patch.geometry.original_context == 2 * WINDOW
        torch.testing.assert_close(logits_of(again, ids), before, rtol=0, atol=1e-4)


def test_stopped_pairs_as_a_base(tmp_path):
    """What nope and p-rope export: the type says how many pairs turn, and not from which window it started."""
    model = random_llama()
    with extend(model, parse_method("p-rope"), factor=2):
        path = save_extended(model, tmp_path / "out")
    again = LlamaForCausalLM.from_pretrained(path).eval()
    with pytest.raises(ModelError, match="does not say the window before; give original_context"):
        extend(again, Ntk(), context=256, base="original")
    with extend(again, Ntk(), context=256, base="original", original_context=64) as patch:
        assert patch.factor == 4
        assert bool((patch.plan.inv_freq > 0).all())
    with extend(again, Linear(), factor=2, base="checkpoint") as patch:
        assert patch.plan.inv_freq[-2:].tolist() == [0, 0]
        assert patch.context == 256


def test_bases_that_cannot_be():
    with pytest.raises(ModelError, match="base='original' has no effect"):
        extend(random_llama(), Linear(), factor=2, base="original")
    with pytest.raises(ModelError, match="'chekpoint' is neither original nor checkpoint"):
        extend(random_llama(rope_parameters=dict(SCALED["yarn"])), Linear(), factor=2, base="chekpoint")
    dynamic = random_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(ModelError, match="'dynamic' scaling follow the current length"):
        extend(dynamic, Unscaled(), factor=1, base="checkpoint")
    with extend(dynamic, Linear(), factor=2, base="original") as patch:
        assert patch.geometry.original_context == WINDOW


def test_compiled_and_meta_models(llama):
    with pytest.raises(ModelError, match="extend, then compile"):
        extend(torch.compile(llama, backend="eager"), Yarn(), factor=2)
    with torch.device("meta"):
        empty = LlamaForCausalLM(llama.config)
    with pytest.raises(ModelError, match="meta device"):
        extend(empty, Yarn(), factor=2)
    llama.compile(backend="eager")
    with pytest.raises(ModelError, match="extend, then compile"):
        extend(llama, Yarn(), factor=2)


def test_a_model_that_ignores_its_rotary_module_is_found_out(llama, ids):
    """The patch would be in place and without effect; only running it can tell."""

    class Deaf(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, hidden_states, position_embeddings=None, **rest):
            cos, sin = (torch.ones_like(f) for f in position_embeddings)
            return self.attention(hidden_states, position_embeddings=(cos, 0 * sin), **rest)

    for layer in llama.model.layers:
        layer.self_attn = Deaf(layer.self_attn)
    before, config = logits_of(llama, ids), llama.config.to_dict()
    with pytest.raises(PatchError, match="ignores its rotary module"):
        extend(llama, Yarn(), factor=2)
    assert torch.equal(logits_of(llama, ids), before)
    assert llama.config.to_dict() == config


def test_verify_finds_frequencies_that_were_tampered_with(llama):
    with extend(llama, Yarn(), factor=2) as patch:
        llama.model.rotary_emb.inv_freq *= 1.01
        with pytest.raises(PatchError, match="off the plan"):
            patch.verify()


class Custom(StaticMethod):
    """A method as a user might get it wrong; `broken` says how."""

    name = "custom"
    summary = source = needs_training = ""

    def __init__(self, broken=None):
        object.__setattr__(self, "broken", broken)

    __dataclass_fields__: ClassVar = {}

    def plan(self, rope, *, context, seq_len):
        inv_freq = rope.inv_freq * torch.linspace(1, 0.5, rope.num_pairs)
        return {
            "shape": PositionPlan(inv_freq=inv_freq[1:]),
            "dtype": PositionPlan(inv_freq=inv_freq.double()),
            "nan": PositionPlan(inv_freq=inv_freq * torch.nan),
            "negative": PositionPlan(inv_freq=-inv_freq),
            "scale": PositionPlan(inv_freq=inv_freq, attention_scale=0.0),
            "few slopes": PositionPlan(inv_freq=inv_freq, alibi_slopes=torch.ones(3)),
            "negative slopes": PositionPlan(inv_freq=inv_freq, alibi_slopes=-torch.ones(4)),
            "both": PositionPlan(inv_freq=inv_freq, alibi_slopes=torch.full((4,), 0.02)),
            "stopped": PositionPlan(inv_freq=torch.cat((inv_freq[:1], 0 * inv_freq[1:2], inv_freq[2:]))),
        }.get(self.broken, PositionPlan(inv_freq=inv_freq, attention_scale=1.2))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("shape", r"inv_freq \(7,\) in torch.float32; it must be \(8,\)"),
        ("dtype", "torch.float64"),
        ("nan", "negative or not finite"),
        ("negative", "negative or not finite"),
        ("scale", "negative or not finite"),
        ("few slopes", r"slopes \(3,\) in torch.float32; it must be \(4,\)"),
        ("negative slopes", "a slope that is negative or not finite"),
    ],
)
def test_methods_that_cannot_be_carried_out(llama, ids, broken, words):
    before, config = logits_of(llama, ids), llama.config.to_dict()
    with pytest.raises(MethodError, match=words):
        extend(llama, Custom(broken), factor=2)
    assert torch.equal(logits_of(llama, ids), before)
    assert llama.config.to_dict() == config


def test_a_method_that_turns_and_biases_does_both_and_is_not_written_as_one_that_turns(llama, ids, tmp_path):
    with extend(llama, Custom("both"), factor=2):
        both = logits_of(llama, ids)
        assert llama.config.rope_parameters["rope_type"] == "rope-ext"
        with pytest.raises(ExportError, match="the bias that it adds to attention"):
            save_extended(llama, tmp_path / "out")
    with extend(llama, Custom(), factor=2):
        assert (logits_of(llama, ids) - both).abs().max() > 0.1


def test_a_method_without_any_stock_form_patches_and_does_not_export(llama, ids, tmp_path):
    """A pair stopped between others that turn: no configuration says that, so none is written."""
    before = logits_of(llama, ids)
    with extend(llama, Custom("stopped"), factor=2):
        assert (logits_of(llama, ids) - before).abs().max() > 1
        with pytest.raises(ExportError, match="custom has no stock form for 'llama'"):
            save_extended(llama, tmp_path / "out", allow_approximate=True)
        llama.save_pretrained(tmp_path / "plain")
    with pytest.raises(KeyError, match="rope-ext"):  # not silently another model
        LlamaForCausalLM.from_pretrained(tmp_path / "plain")


def test_a_method_without_a_stock_type_is_exported_pair_by_pair(llama, ids, tmp_path):
    with extend(llama, Custom(), factor=4):
        ours = logits_of(llama, ids)
        path = save_extended(llama, tmp_path / "out")
    stock = LlamaForCausalLM.from_pretrained(path).eval()
    assert stock.config.rope_parameters["rope_type"] == "longrope"
    for part in (slice(0, 20), slice(0, None)):  # on either side of the switch between the two lists
        torch.testing.assert_close(logits_of(stock, ids[:, part]), ours[:, part], rtol=0, atol=1e-3)


@pytest.mark.parametrize("request_", [{"context": 128.0}, {"context": "128"}])
def test_contexts_that_are_no_whole_numbers(llama, request_):
    with pytest.raises(ContextError, match="is not a whole number"):
        extend(llama, Yarn(), **request_)
    assert not isinstance(llama.model.rotary_emb, ExtendedRotaryEmbedding)


def test_numpy_integers_are_whole_numbers(llama):
    with extend(llama, Yarn(), context=np.int64(128)) as patch:
        assert patch.context == 128
        assert type(llama.config.max_position_embeddings) is int


@pytest.mark.parametrize("what", ["yarn", Yarn, None])
def test_names_and_classes_are_not_methods(llama, what):
    with pytest.raises(MethodError, match=r"pass an instance, as Yarn\(\)"):
        extend(llama, what, factor=2)


def test_what_is_no_model():
    with pytest.raises(ModelError, match="NoneType is not a Hugging Face model"):
        extend(None, Yarn(), factor=2)


def test_a_model_without_a_head(llama, ids):
    with extend(llama, Yarn(), factor=4):
        whole = llama.model(input_ids=ids).last_hidden_state
    with extend(llama.model, Yarn(), factor=4):
        assert torch.equal(llama.model(input_ids=ids).last_hidden_state, whole)


def test_a_patched_model_moved_to_meta(llama):
    with extend(llama, Yarn(), factor=4) as patch:
        llama.to("meta")
        with pytest.raises(PatchError, match="meta device"):
            _ = patch.fingerprint
        with pytest.raises(ExportError, match="meta device"):
            save_extended(llama, "nowhere")


def test_a_failure_while_patching_leaves_nothing_behind(llama, ids, monkeypatch):
    before, config = logits_of(llama, ids), llama.config.to_dict()
    monkeypatch.setattr(Patch, "verify", lambda _self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extend(llama, Yarn(), factor=2)
    assert torch.equal(logits_of(llama, ids), before)
    assert llama.config.to_dict() == config


def test_leaving_the_block_takes_later_patches_along(llama, ids):
    before = logits_of(llama, ids)

    def fail():
        with extend(llama, Yarn(), factor=4):
            extend(llama, Linear(), factor=2)
            raise KeyError("the first error is the one that is told")

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(logits_of(llama, ids), before)


def test_modes_of_single_modules_survive(llama):
    llama.train()
    llama.model.layers[0].eval()
    with extend(llama, Yarn(), factor=2):
        assert llama.training
        assert not llama.model.layers[0].training
