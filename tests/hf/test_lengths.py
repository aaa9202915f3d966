"""Methods that follow the current length: no state, rows of their own, and caches that are right or refused."""

import copy
import inspect
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from rope_ext import ExportError, ModelError, PatchError, Unscaled, Yarn, extend, load_model, save_extended
from rope_ext.hf import load_config, read_geometry
from rope_ext.plan import label
from rope_ext.registry import parse_method
from tests import reference
from tests.conftest import WINDOW, logits_of, random_llama
from tests.evals.conftest import byte_tokenizer

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
LONGROPE = reference.spell_factors(16, 4.0)
METHODS = [parse_method(text) for text in ("dynamic-ntk", "dynamic-ntk:alpha=1", "dynamic-yarn", LONGROPE)]
EDGES = (WINDOW - 1, WINDOW, WINDOW + 1)
following = pytest.mark.parametrize("chosen", METHODS, ids=label)


@pytest.fixture
def row():
    return torch.randint(1, 96, (1, 4 * WINDOW), generator=torch.Generator().manual_seed(3))


def expected_logits(chosen, ids):
    """The same weights under a static table of the plan at this very length: what no state and no batch can disturb."""
    model = random_llama()
    with extend(model, chosen, factor=4) as patch:
        table = model.model.rotary_emb
        plan = table.plan_at(ids.shape[1])
        patch.undo()
    with extend(model, Unscaled(), factor=4):
        static = model.model.rotary_emb
        static.plan = plan
        static.inv_freq.copy_(plan.inv_freq)
        return logits_of(model, ids)


@following
@pytest.mark.parametrize("length", [*EDGES, 100, 4 * WINDOW])
def test_the_frequencies_are_those_of_the_current_length(llama, row, chosen, length):
    with extend(llama, chosen, factor=4):
        assert torch.equal(logits_of(llama, row[:, :length]), expected_logits(chosen, row[:, :length]))


@pytest.mark.parametrize("length", [WINDOW + 1, 100, 4 * WINDOW])
def test_dynamic_yarn_is_stock_yarn_by_the_current_length(llama, row, length):
    """Second oracle: transformers' static YaRN on the same weights, told the factor of this very length."""
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": length / WINDOW}
    parameters |= {"original_max_position_embeddings": WINDOW}
    stock = random_llama(rope_parameters=parameters, max_position_embeddings=length)
    with extend(llama, METHODS[2], factor=4):
        ours = logits_of(llama, row[:, :length])
    torch.testing.assert_close(ours, logits_of(stock, row[:, :length]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("chosen", METHODS[:3], ids=label)
@pytest.mark.parametrize("length", EDGES[:2])
def test_up_to_the_original_window_nothing_changes(llama, row, chosen, length):
    before = logits_of(llama, row[:, :length])
    with extend(llama, chosen, factor=4):
        assert torch.equal(logits_of(llama, row[:, :length]), before)


@following
@pytest.mark.parametrize("length", EDGES)
def test_a_longer_call_before_changes_nothing(llama, row, chosen, length):
    with extend(llama, chosen, factor=4):
        before = logits_of(llama, row[:, :length])
        logits_of(llama, row)
        assert torch.equal(logits_of(llama, row[:, :length]), before)


@following
@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_longer_row_in_the_batch_changes_nothing(llama, row, chosen, length, side, numbered):
    """`numbered`: with position_ids as generate() makes them; without, they come from the mask."""
    longer = 3 * WINDOW
    pad = torch.zeros(1, longer - length, dtype=torch.long)
    parts = (pad, row[:, :length]) if side == "left" else (row[:, :length], pad)
    batch = torch.cat((torch.cat(parts, dim=1), row[:, :longer]))
    mask = torch.ones_like(batch)
    mask[0] = torch.cat((0 * pad[0], mask[0, :length]) if side == "left" else (mask[0, :length], 0 * pad[0]))
    extra = {"position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)} if numbered else {}
    with extend(llama, chosen, factor=4), torch.no_grad():
        alone = logits_of(llama, row[:, :length])
        long_alone = logits_of(llama, row[:, :longer])
        both = llama(input_ids=batch, attention_mask=mask, **extra).logits
    # logits of order 10; sums over padded rows run in another order
    torch.testing.assert_close(both[:1][mask[:1] == 1], alone[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(both[1:], long_alone, rtol=0, atol=2e-4)


def greedy(model, ids, steps):
    for _ in range(steps):
        with torch.no_grad():
            ids = torch.cat((ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


def generate(model, ids, steps, **kwargs):
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(input_ids=ids, max_new_tokens=steps, eos_token_id=None, **kwargs)


@following
@pytest.mark.parametrize("start", [10, WINDOW - 4, WINDOW, WINDOW + 1, 100])
def test_generate_is_what_recomputing_every_step_gives(llama, row, chosen, start):
    with extend(llama, chosen, factor=4):
        wanted = greedy(llama, row[:, :start], 8)
        assert torch.equal(generate(llama, row[:, :start], 8), wanted)
        assert torch.equal(generate(llama, row[:, :start], 8, use_cache=False), wanted)


@following
def test_generate_with_a_padded_batch_beams_and_a_static_cache(llama, row, chosen):
    short, long = row[:, : WINDOW - 3], row[:, 100 : 100 + WINDOW + 2]
    pad = torch.zeros(1, long.shape[1] - short.shape[1], dtype=torch.long)
    batch = torch.cat((torch.cat((pad, short), dim=1), long))
    mask = torch.ones_like(batch)
    mask[0, : pad.shape[1]] = 0
    with extend(llama, chosen, factor=4):
        together = generate(llama, batch, 6, attention_mask=mask)
        assert torch.equal(together[:1, pad.shape[1] :], greedy(llama, short, 6))
        assert torch.equal(together[1:], greedy(llama, long, 6))
        beams = generate(llama, short, 6, num_beams=3)
        assert torch.equal(beams, generate(llama, short, 6, num_beams=3, use_cache=False))
        cached = generate(llama, short, 6, cache_implementation="static")
        assert torch.equal(cached, greedy(llama, short, 6))


@following
def test_a_cache_is_used_where_it_is_good(llama, row, chosen):
    """Within the original window decoding passes one token a step, as stock code does."""
    seen = []
    with extend(llama, chosen, factor=4):
        llama.model.register_forward_pre_hook(
            lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        generate(llama, row[:, : WINDOW - 4], 8)
    static = chosen.name == "longrope"  # its frequencies change once; the others with every token
    assert seen == [WINDOW - 4, 1, 1, 1, 1, WINDOW + 1, *([1, 1] if static else [WINDOW + 2, WINDOW + 3])]


@following
@pytest.mark.parametrize("split", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_cache_that_would_be_wrong_is_refused(llama, row, chosen, split):
    with extend(llama, chosen, factor=4) as patch, torch.no_grad():
        cache = DynamicCache(config=llama.config)
        llama(input_ids=row[:, :split], **{CACHE: cache})
        good = patch.frequency_key(split) == patch.frequency_key(split + 2)
        if good:
            rest = llama(input_ids=row[:, split : split + 2], **{CACHE: cache}).logits
            full = llama(input_ids=row[:, : split + 2]).logits
            torch.testing.assert_close(rest, full[:, split:], rtol=0, atol=1e-4)
        else:
            with pytest.raises(PatchError, match=rf"{split + 2} tokens have other frequencies than the {split} before"):
                llama(input_ids=row[:, split : split + 2], **{CACHE: cache})


def test_chunked_prefill_across_the_original_window_is_refused(llama, row):
    with extend(llama, METHODS[0], factor=4):
        generate(llama, row[:, :WINDOW], 1, prefill_chunk_size=32)
        with pytest.raises(PatchError, match="other frequencies than the"):
            generate(llama, row[:, : WINDOW + 20], 1, prefill_chunk_size=32)


@following
def test_assisted_decoding_is_refused_since_each_token_has_its_own_frequencies(llama, row, chosen):
    """62 tokens and three guesses are 65: one forward over them gives the first guess a longer one's frequencies."""
    repeating = row[:, :6].repeat(1, 20)[:, :62]
    with extend(llama, chosen, factor=4):
        for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": llama}):
            with pytest.raises(PatchError, match=f"{next(iter(how))} scores several tokens in one forward"):
                generate(llama, repeating, 4, **how)
        llama.generation_config.prompt_lookup_num_tokens = 3
        with pytest.raises(PatchError, match="decode without an assistant"):
            generate(llama, repeating, 4)
        llama.generation_config.prompt_lookup_num_tokens = None
        with extend(llama, Yarn(), factor=4):  # a static one over it has nothing against it
            generate(llama, repeating, 4, prompt_lookup_num_tokens=3)


@following
def test_a_cropped_cache_is_still_a_foreign_one(llama, row, chosen):
    """100 tokens cached, cut to 50: the keys were rotated for 100, whatever their number is now."""
    with extend(llama, chosen, factor=4), torch.no_grad():
        cache = DynamicCache(config=llama.config)
        llama(input_ids=row[:, :100], **{CACHE: cache})
        cache.crop(-50)
        with pytest.raises(PatchError, match="55 tokens have other frequencies than the 50 before"):
            llama(input_ids=row[:, 50:55], **{CACHE: cache})


@following
def test_a_conversation_goes_on_from_its_cache(llama, row, chosen):
    """Two turns, the second across the original window: what was cached is passed again."""
    with extend(llama, chosen, factor=4):
        first = generate(llama, row[:, :40], 4, return_dict_in_generate=True)
        told = torch.cat((first.sequences, row[:, 100:130]), dim=1)
        cache = getattr(first, CACHE)
        assert torch.equal(generate(llama, told, 6, **{CACHE: cache}), greedy(llama, told, 6))


@following
def test_embeddings_that_cannot_be_passed_again(llama, row, chosen):
    embeds = llama.model.embed_tokens(row[:, :61])
    with extend(llama, chosen, factor=4):
        for extra in ({}, {"input_ids": row[:, :61]}):
            settings = {
                "attention_mask": torch.ones(1, 61),
                "do_sample": False,
                "eos_token_id": None,
                "pad_token_id": 0,
            }
            with pytest.raises(PatchError, match="began as embeddings"):
                llama.generate(inputs_embeds=embeds, max_new_tokens=8, **settings, **extra)


@following
@pytest.mark.parametrize("numbered", [False, True])
def test_a_mask_as_long_as_a_static_cache(llama, row, chosen, numbered):
    with extend(llama, chosen, factor=4), torch.no_grad():
        cache, mask = StaticCache(config=llama.config, max_cache_len=128), torch.zeros(1, 128, dtype=torch.long)
        mask[:, :30] = 1
        extra = {"position_ids": torch.arange(30)[None]} if numbered else {}
        got = llama(input_ids=row[:, :30], attention_mask=mask, **{CACHE: cache}, **extra).logits
        torch.testing.assert_close(got, logits_of(llama, row[:, :30]), rtol=0, atol=1e-4)
        mask[:, :50] = 1
        extra = {"position_ids": torch.arange(30, 50)[None]} if numbered else {}
        got = llama(input_ids=row[:, 30:50], attention_mask=mask, **{CACHE: cache}, **extra).logits
        torch.testing.assert_close(got, logits_of(llama, row[:, :50])[:, 30:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("chosen", METHODS[:3], ids=label)
def test_masked_tokens_between_real_ones_keep_their_places(llama, row, chosen):
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, 10:15] = 0
    with torch.no_grad():
        stock = llama(input_ids=row[:, :40], attention_mask=mask).logits
        with extend(llama, chosen, factor=4):
            ours = llama(input_ids=row[:, :40], attention_mask=mask).logits
    assert torch.equal(ours[mask == 1], stock[mask == 1])


@following
def test_masks_that_do_not_tell_the_length_of_rows(llama, row, chosen):
    batch = row[:, :100].repeat(2, 1)
    four = torch.zeros(2, 1, 100, 100).masked_fill(torch.ones(100, 100, dtype=torch.bool).triu(1), -1e9)
    with extend(llama, chosen, factor=4), torch.no_grad():
        with pytest.raises(PatchError, match="give position_ids"):
            llama(input_ids=batch, attention_mask=four, use_cache=False)
        positions = torch.arange(100).repeat(2, 1)
        got = llama(input_ids=batch, attention_mask=four, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(got[:1], logits_of(llama, row[:, :100]), rtol=0, atol=2e-4)


@pytest.mark.parametrize("positions", [torch.arange(40), torch.arange(40.0)[None]], ids=["1-D", "float"])
def test_positions_that_are_none(llama, row, positions):
    with (
        extend(llama, METHODS[0], factor=4),
        pytest.raises(PatchError, match=r"whole numbers of shape \(rows, tokens\)"),
    ):
        llama(input_ids=row[:, :40], position_ids=positions)


def test_a_static_patch_on_top_decodes_one_token_a_step(llama, row):
    seen = []
    with extend(llama, METHODS[0], factor=4), extend(llama, Yarn(), factor=4):
        handle = llama.model.register_forward_pre_hook(
            lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        generate(llama, row[:, :62], 5)
        handle.remove()
    assert seen == [62, 1, 1, 1, 1]


@following
def test_packed_documents_are_refused(llama, row, chosen):
    positions = torch.cat((torch.arange(40), torch.arange(24)))[None]
    with extend(llama, chosen, factor=4), pytest.raises(PatchError, match="packed documents"):
        llama(input_ids=row[:, :64], position_ids=positions, use_cache=False)


@following
def test_static_caches_and_gradients(llama, row, chosen):
    with extend(llama, chosen, factor=4):
        cache = StaticCache(config=llama.config, max_cache_len=4 * WINDOW)
        with torch.no_grad():
            llama(input_ids=row[:, :30], **{CACHE: cache})
            rest = llama(input_ids=row[:, 30:60], **{CACHE: cache}).logits
            torch.testing.assert_close(rest, logits_of(llama, row[:, :60])[:, 30:], rtol=0, atol=1e-4)
        llama.train()
        llama(input_ids=row, labels=row).loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in llama.parameters())


@following
def test_undo_takes_everything_back(llama, row, chosen):
    before = generate(llama, row[:, :100], 5)
    hooks = dict(llama.model._forward_pre_hooks)
    with extend(llama, chosen, factor=4):
        assert "prepare_inputs_for_generation" in vars(llama)
        with extend(llama, METHODS[0], factor=2):
            pass
        assert torch.equal(generate(llama, row[:, :60], 8), greedy(llama, row[:, :60], 8))
        with extend(llama, Yarn(), factor=4) as inner:
            static = generate(llama, row[:, :60], 8)
            inner.undo()
    assert {"prepare_inputs_for_generation", "generate"} & set(vars(llama)) == set()
    assert llama.model._forward_pre_hooks == hooks
    assert torch.equal(generate(llama, row[:, :100], 5), before)
    with extend(llama, Yarn(), factor=4):
        assert torch.equal(generate(llama, row[:, :60], 8), static)


@following
def test_a_copy_goes_its_own_way(llama, row, chosen):
    with extend(llama, chosen, factor=4):
        other = copy.deepcopy(llama)
        wanted = greedy(llama, row[:, :60], 8)
        stream = io.BytesIO()
        torch.save(llama, stream)
    stream.seek(0)
    for model in (other, torch.load(stream, weights_only=False)):
        assert model.prepare_inputs_for_generation.table is model.model.rotary_emb
        assert torch.equal(generate(model, row[:, :60], 8), wanted)


def test_a_base_model_and_positional_arguments(llama, row):
    with extend(llama.model, METHODS[0], factor=4), torch.no_grad():
        mask = torch.ones_like(row)
        positional = llama.model(row, mask).last_hidden_state
        assert torch.equal(positional, llama.model(input_ids=row).last_hidden_state)
        embeds = llama.model.embed_tokens(row)
        assert torch.equal(llama.model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state, positional)


@pytest.mark.slow
def test_compiled_after_extending():
    """In a process of its own: the run-time checks of annotations, on under pytest, do not survive compilation."""
    code = """
import torch
from rope_ext import extend, method
from tests.conftest import logits_of, random_llama
row = torch.randint(1, 96, (1, 256), generator=torch.Generator().manual_seed(3))
model = random_llama()
with extend(model, method("dynamic-ntk"), factor=4), torch.no_grad():
    compiled = torch.compile(model, backend="eager")
    for length in (40, 100, 64, 65):
        wanted = logits_of(model, row[:, :length])
        torch.testing.assert_close(compiled(input_ids=row[:, :length]).logits, wanted, rtol=0, atol=1e-4)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent.parent)


@following
def test_bf16(llama, chosen):
    llama.to(torch.bfloat16)
    with extend(llama, chosen, factor=4) as patch:
        patch.verify()
        cos, _ = llama.model.rotary_emb(torch.zeros(1, 101, 64, dtype=torch.bfloat16), torch.arange(101)[None])
        plan = llama.model.rotary_emb.plan_at(101)
        wanted = (100 * plan.inv_freq.double()).cos() * plan.attention_scale
        torch.testing.assert_close(cos[0, 100, :8].double(), wanted, rtol=2**-8, atol=2**-8)


# Exports


def test_longrope_reloads_with_the_same_logits_on_both_sides_of_the_switch(llama, row, tmp_path):
    with extend(llama, METHODS[3], factor=4):
        ours = [logits_of(llama, row[:, :n]) for n in (*EDGES, 4 * WINDOW)]
        path = save_extended(llama, tmp_path / "out")
    stock = LlamaForCausalLM.from_pretrained(path).eval()
    assert stock.config.rope_parameters["rope_type"] == "longrope"
    for logits in ours:
        torch.testing.assert_close(logits_of(stock, row[:, : logits.shape[1]]), logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("chosen", METHODS[:2], ids=label)
def test_dynamic_ntk_exports_only_as_an_approximation(llama, row, tmp_path, chosen):
    with extend(llama, chosen, factor=4):
        with pytest.raises(ExportError, match=r"follows the current length.*--allow-approximate.*'dynamic'"):
            save_extended(llama, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
        ours = [logits_of(llama, row[:, :n]) for n in (*EDGES, 4 * WINDOW)]
        path = save_extended(llama, tmp_path / "out", allow_approximate=True)
    assert '"exact": false' in (path / "rope_ext.json").read_text()
    for logits in ours:  # equal in a new module, one sequence at a time
        stock = LlamaForCausalLM.from_pretrained(path).eval()
        assert stock.config.max_position_embeddings == WINDOW
        torch.testing.assert_close(logits_of(stock, row[:, : logits.shape[1]]), logits, rtol=0, atol=1e-3)
    # the reason why it is refused: stock code remembers
    assert (logits_of(stock, row[:, :WINDOW]) - ours[1]).abs().max() > 0.1


def test_dynamic_yarn_exports_frozen_at_the_window(llama, row, tmp_path):
    with extend(llama, METHODS[2], factor=4):
        with pytest.raises(ExportError, match="frequencies at 256 tokens, frozen for every length"):
            save_extended(llama, tmp_path / "out")
        ours = logits_of(llama, row)
        path = save_extended(llama, tmp_path / "out", allow_approximate=True)
    stock = LlamaForCausalLM.from_pretrained(path).eval()
    torch.testing.assert_close(logits_of(stock, row), ours, rtol=0, atol=1e-3)


def test_at_factor_one_it_is_no_more_exact(llama, tmp_path):
    """Window and original window coincide there, so that stock code agrees in a new module; it still keeps state."""
    with extend(llama, METHODS[0], factor=1), pytest.raises(ExportError, match="allow_approximate"):
        save_extended(llama, tmp_path / "out")


@pytest.mark.parametrize("top", [64, 128])
def test_an_original_window_at_the_top_of_the_configuration(row, tmp_path, top):
    """There it wins over the one among the parameters, so that it has to follow."""
    model = random_llama(original_max_position_embeddings=top)
    with extend(model, METHODS[3], context=256, original_context=32):
        ours = [logits_of(model, row[:, :n]) for n in (32, 33, 256)]
        path = save_extended(model, tmp_path / "out")
        model.save_pretrained(tmp_path / "plain")
    assert model.config.original_max_position_embeddings == top
    for place in (path, tmp_path / "plain"):
        stock = LlamaForCausalLM.from_pretrained(place).eval()
        for logits in ours:
            torch.testing.assert_close(logits_of(stock, row[:, : logits.shape[1]]), logits, rtol=0, atol=1e-3)


def test_a_plain_save_does_not_load_as_something_else(llama, tmp_path):
    with extend(llama, METHODS[0], factor=4):
        llama.save_pretrained(tmp_path)
    with pytest.raises(KeyError, match="rope-ext"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for act in (lambda: load_model(str(tmp_path)), lambda: read_geometry(load_config(str(tmp_path)))):
        with pytest.raises(ModelError, match=r"saved with save_pretrained while extended.*save_extended"):
            act()
