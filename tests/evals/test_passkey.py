import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evals import passkey
from evals.corpora import bos_id
from evals.errors import EvalError
from rope_ext import extend, load_model
from rope_ext.plan import label
from rope_ext.registry import parse_method
from tests.conftest import LENGTH_DEPENDENT, STATIC, random_llama
from tests.evals.conftest import byte_tokenizer

TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "no-bos": byte_tokenizer(bos=False),
    "bos-not-added": byte_tokenizer(adds_bos=False),
    "merged": byte_tokenizer(digits=False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(length=st.integers(300, 900), depth=st.floats(0, 1), trial=st.integers(0, 50))
def test_prompts_are_exact(name, length, depth, trial):
    tokenizer = TOKENIZERS[name]
    key = passkey.trial_key(0, length, depth, trial)
    prompt = passkey.build_prompt(tokenizer, length=length, depth=depth, trial=trial, key=key)
    assert len(prompt.ids) == prompt.length == length
    bos = bos_id(tokenizer)
    assert prompt.ids.count(bos) == (0 if bos is None else 1)
    assert bos is None or prompt.ids[0] == bos
    text = tokenizer.decode(list(prompt.ids))
    assert text.count(key) == 3  # twice in the needle, once as the answer
    assert text.endswith(f"The pass key is {key}")
    needle = tokenizer.decode(list(prompt.ids[prompt.needle_start : prompt.needle_end]))
    assert needle == passkey.NEEDLE.format(key=key)
    assert tokenizer.decode(list(prompt.ids[-prompt.num_answer :])) == f" {key}"
    bare = passkey.build_prompt(tokenizer, length=None, depth=depth, trial=trial, key=key)
    # rounded to the nearest token; the last term is for halves, which floats do not hold exactly
    assert abs(prompt.actual_depth - depth) <= 0.5 / (length - bare.length) + 1e-12


def test_depths_zero_and_one_touch_the_ends(tokenizer):
    first, last = (passkey.build_prompt(tokenizer, length=400, depth=d, trial=0, key="12345") for d in (0.0, 1.0))
    assert first.actual_depth == 0
    assert last.actual_depth == 1
    text = tokenizer.decode(list(first.ids), skip_special_tokens=True)
    assert text.startswith(passkey.INSTRUCTION + passkey.NEEDLE.format(key="12345"))
    assert tokenizer.decode(list(last.ids)).endswith(passkey.NEEDLE.format(key="12345") + passkey.QUESTION + " 12345")


def test_trials_are_a_function_of_their_coordinates(tokenizer):
    wide = passkey.build_trials(tokenizer, length=400, depths=(0.0, 0.5, 1.0), num_trials=4, seed=1)
    narrow = passkey.build_trials(tokenizer, length=400, depths=(0.5,), num_trials=2, seed=1)
    assert narrow == [p for p in wide if p.depth == 0.5][:2]
    assert len({p.key for p in wide}) == len(wide)
    assert all(len(p.key) == 5 and p.key[0] != "0" for p in wide)
    other = passkey.build_trials(tokenizer, length=400, depths=(0.5,), num_trials=2, seed=2)
    assert {p.key for p in other}.isdisjoint(p.key for p in wide)


def test_the_shortest_length_is_told(tokenizer):
    least = passkey.build_prompt(tokenizer, length=None, depth=0.5, trial=0, key="12345").length
    assert len(passkey.build_prompt(tokenizer, length=least, depth=0.5, trial=0, key="12345").ids) == least
    with pytest.raises(EvalError, match=f"length {least - 1} is shorter than the template.*at least {least} tokens"):
        passkey.build_prompt(tokenizer, length=least - 1, depth=0.5, trial=0, key="12345")


@pytest.mark.parametrize("depth", [-0.1, 1.1])
def test_depths_outside_are_refused(tokenizer, depth):
    with pytest.raises(EvalError, match=r"outside \[0, 1\]"):
        passkey.build_prompt(tokenizer, length=400, depth=depth, trial=0, key="12345")


def test_own_filler_is_used_and_may_not_be_empty(tokenizer):
    prompt = passkey.build_prompt(tokenizer, length=400, depth=0.5, trial=0, key="12345", filler=[50, 51])
    assert set(prompt.ids) >= {50, 51}
    assert "river" not in tokenizer.decode(list(prompt.ids))
    with pytest.raises(EvalError, match="filler is empty"):
        passkey.build_prompt(tokenizer, length=400, depth=0.5, trial=0, key="12345", filler=[])


def same(_length):
    return "static"


@pytest.mark.parametrize("spelled", ["unscaled", "dynamic-ntk:alpha=1", "dynamic-yarn"])
def test_teacher_forcing_agrees_with_greedy_decoding(spelled):
    """On the bundled model: right at once iff generate() writes the key, inside the window and past it."""
    model, tokenizer = load_model("tiny", device="cpu")
    with extend(model, parse_method(spelled), factor=4) as patch:
        outcomes = outcomes_agree(model, tokenizer, patch.frequency_key)
    # the bundled model loses keys past its window, if nothing is done
    assert outcomes == {True, False} or spelled != "unscaled"
    assert True in outcomes


def outcomes_agree(model, tokenizer, key):
    outcomes = set()
    for length in (128, 257, 700):
        prompts = passkey.build_trials(tokenizer, length=length, depths=(0.1, 0.9), num_trials=3, seed=5)
        for prompt, score in zip(prompts, passkey.score_prompts(model, prompts, frequency_key=key), strict=True):
            start = torch.tensor([prompt.ids[: -prompt.num_answer]])
            written = model.generate(
                start,
                attention_mask=torch.ones_like(start),
                max_new_tokens=prompt.num_answer,
                do_sample=False,
                pad_token_id=1,
                eos_token_id=None,
            )
            greedy = tuple(written[0, start.shape[1] :].tolist())
            assert score.correct == (greedy == prompt.ids[-prompt.num_answer :])
            assert score.predicted[0] == greedy[0]
            outcomes.add(score.correct)
    return outcomes


def test_batched_equals_single(tokenizer):
    model = random_llama(vocab_size=258)
    prompts = passkey.build_trials(tokenizer, length=300, depths=(0.0, 1.0), num_trials=3, seed=0)
    together = passkey.score_prompts(model, prompts, frequency_key=same)
    alone = [passkey.score_prompts(model, [p], frequency_key=same)[0] for p in prompts]
    assert [s.predicted for s in together] == [s.predicted for s in alone]
    # fp32 sums in another order
    assert [s.answer_nll for s in together] == pytest.approx([s.answer_nll for s in alone], abs=1e-4)


def test_unequal_prompts_and_broken_models_are_refused(tokenizer):
    model = random_llama(vocab_size=258)
    unequal = [passkey.build_prompt(tokenizer, length=n, depth=0.5, trial=0, key="12345") for n in (300, 301)]
    with pytest.raises(EvalError, match="one length"):
        passkey.score_prompts(model, unequal, frequency_key=same)
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(EvalError, match="not finite"):
        passkey.score_prompts(model, unequal[:1], frequency_key=same)


@pytest.mark.parametrize("spelled", [*STATIC, *LENGTH_DEPENDENT], ids=lambda s: label(parse_method(s)))
def test_sharing_changes_no_score(tokenizer, spelled):
    """On either side of the window, whatever the frequencies depend on."""
    model = random_llama(vocab_size=258, max_position_embeddings=350)
    with extend(model, parse_method(spelled), factor=4) as patch:
        for length in (300, 348, 360, 700):
            for depth in (0.0, 0.6, 1.0):
                prompts = passkey.build_trials(tokenizer, length=length, depths=(depth,), num_trials=4, seed=0)
                both = [
                    passkey.score_prompts(model, prompts, frequency_key=patch.frequency_key, share=share, max_rows=3)
                    for share in (True, False)
                ]
                shared, alone = ([s.answer_nll for s in scores] for scores in both)
                # fp32 sums in another order
                assert shared == pytest.approx(alone, abs=1e-3)
                assert [s.predicted for s in both[0]] == [s.predicted for s in both[1]]


def test_what_is_shared(tokenizer):
    prompts = passkey.build_trials(tokenizer, length=600, depths=(0.5,), num_trials=3, seed=0)
    ids = torch.tensor([p.ids for p in prompts])
    common = passkey.shared_tokens(ids)
    assert common >= prompts[0].needle_start
    assert bool((ids[:, :common] == ids[:1, :common]).all())
    assert not bool((ids[:, common] == ids[0, common]).all())
    assert passkey.shared_tokens(ids[:1]) == 0
    assert passkey.shared_tokens(ids[:, : passkey.MIN_SHARED]) == 0
    assert passkey.shared_tokens(ids[:, : passkey.MIN_SHARED + 1]) == passkey.MIN_SHARED


def test_the_beginning_is_computed_once(tokenizer):
    model = random_llama(vocab_size=258)
    prompts = passkey.build_trials(tokenizer, length=600, depths=(1.0,), num_trials=4, seed=0)
    seen = []
    model.base_model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    passkey.score_prompts(model, prompts, frequency_key=same, max_rows=3)
    common = seen[0][1]
    assert seen == [(1, common), (3, 599 - common), (1, 599 - common)]
    assert common > 450
