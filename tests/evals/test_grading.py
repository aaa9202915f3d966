import dataclasses

import pytest
import torch

from evals.corpora import encode
from evals.errors import EvalError
from evals.grading import Forest, begins_with, grade_written, score_prompts, write_answers
from evals.passkey import FILLER, PromptMaker, RepeatedFiller
from evals.variants import VARIANTS
from rope_ext import extend, load_model
from rope_ext.plan import label
from rope_ext.registry import parse_method
from tests.conftest import LENGTH_DEPENDENT, STATIC, logits_of, random_llama
from tests.evals.test_passkey import maker


def same(_length):
    return "static"


def scores(model, prompts, key=same, **more):
    found = dict(pair for some in score_prompts(model, prompts, frequency_key=key, **more) for pair in some)
    assert set(found) == set(range(len(prompts)))
    return [found[i] for i in range(len(prompts))]


def test_scores_are_what_dense_logits_say(tokenizer):
    model = random_llama(vocab_size=258)
    prompts = maker(tokenizer).relative(length=300, depths=(0.0, 1.0), num_trials=3)
    for prompt, score in zip(prompts, scores(model, prompts), strict=True):
        n = prompt.num_answer
        logits = logits_of(model, torch.tensor([prompt.ids]))[0, -n - 1 : -1].double()
        answer = torch.tensor(prompt.ids[-n:])
        own = logits[range(n), answer]
        others = logits.clone()
        others[range(n), answer] = -torch.inf
        # fp32 sums in another order
        assert score.answer_nll == pytest.approx(float((logits.logsumexp(-1) - own).mean()), abs=1e-4)
        assert score.margin == pytest.approx(float((own - others.amax(-1)).min()), abs=1e-4)
        assert score.predicted == tuple(logits.argmax(-1).tolist())
        assert score.correct == (score.predicted == tuple(answer.tolist())) == (score.margin > 0)


@pytest.mark.parametrize("spelled", ["unscaled", "dynamic-ntk:alpha=1", "dynamic-yarn"])
def test_teacher_forcing_agrees_with_decoding(spelled):
    """On the bundled model: right at once iff generate() writes the key, inside the window and past it."""
    model, tokenizer = load_model("tiny", device="cpu")
    made = PromptMaker(
        tokenizer=tokenizer,
        variant=VARIANTS["classic"],
        filler=RepeatedFiller(encode(tokenizer, FILLER)),
        seed=5,
        num_spare=4,
    )
    outcomes = set()
    with extend(model, parse_method(spelled), factor=4) as patch:
        for length in (128, 257, 700):
            prompts = made.relative(length=length, depths=(0.1, 0.9), num_trials=3)
            written = dict(
                pair for some in write_answers(model, tokenizer, prompts, max_rows=lambda _n: 4) for pair in some
            )
            for number, score in enumerate(scores(model, prompts, patch.frequency_key)):
                assert score.correct == written[number].token_match
                assert score.correct == (score.margin > 0)
                assert written[number].exact <= written[number].substring
                # the bundled model goes on with a line break, so that both ways of reading agree as well
                assert written[number].exact == score.correct
                outcomes.add(score.correct)
    # the bundled model loses keys past its window, if nothing is done
    assert outcomes == {True, False} or spelled != "unscaled"
    assert True in outcomes


@pytest.mark.parametrize(
    ("output", "exact", "substring"),
    [
        (" 12345", True, True),
        ("12345.", True, True),
        ("\n12345\nWhat", True, True),
        (" 123456", False, True),
        (" 12345a", False, True),
        (" 1234", False, False),
        (" The key is 12345", False, True),
        (" 1 2345", False, False),
        ("", False, False),
    ],
)
def test_both_readings_of_what_was_written(tokenizer, output, exact, substring):
    prompt = dataclasses.replace(maker(tokenizer).relative(length=300, depths=(0,), num_trials=1)[0], key="12345")
    score = grade_written(tokenizer, prompt, encode(tokenizer, output), {1})
    assert (score.exact, score.substring, score.output, score.ran_out) == (exact, substring, output, True)
    ended = grade_written(tokenizer, prompt, [*encode(tokenizer, output), 1, *encode(tokenizer, " 12345")], {1})
    assert (ended.exact, ended.substring, ended.ran_out) == (exact, substring, False)


def test_an_answer_of_words_ends_where_a_word_ends():
    assert begins_with(" blue carpet, and", "blue carpet")
    assert not begins_with(" blue carpets", "blue carpet")
    assert begins_with("12345 and 67890\n", "12345 and 67890")


def test_room_for_the_answer_is_counted_in_the_length(tokenizer, monkeypatch):
    model = random_llama(vocab_size=258)
    prompts = maker(tokenizer, num_spare=7).relative(length=300, depths=(0.5,), num_trials=2)
    asked = []
    monkeypatch.setattr(type(model), "generate", lambda _self, ids, **more: asked.append((ids.shape[1], more)) or ids)
    list(write_answers(model, tokenizer, prompts))
    for shown, more in asked:
        room = more["generation_config"].max_new_tokens
        assert shown + room == 300
        assert room == prompts[0].num_answer + 7


@pytest.mark.parametrize(
    "shipped",
    [
        {"no_repeat_ngram_size": 3},
        {"repetition_penalty": 1.5},
        {"do_sample": True, "temperature": 3.0},
        {"suppress_tokens": list(range(10, 500))},
        {"return_dict_in_generate": True},
    ],
)
def test_a_checkpoint_that_forbids_repetition_is_decoded_greedily_all_the_same(shipped):
    model, tokenizer = load_model("tiny", device="cpu")
    model.generation_config.update(**shipped)
    prompts = maker(tokenizer, num_spare=4).relative(length=200, depths=(0.5,), num_trials=4)
    found = [score for some in write_answers(model, tokenizer, prompts) for _, score in some]
    assert all(score.token_match and score.exact for score in found)


def test_batched_equals_single(tokenizer):
    model = random_llama(vocab_size=258)
    prompts = maker(tokenizer).relative(length=300, depths=(0.0, 1.0), num_trials=3)
    together = scores(model, prompts)
    alone = [scores(model, [p])[0] for p in prompts]
    assert [s.predicted for s in together] == [s.predicted for s in alone]
    # fp32 sums in another order
    assert [s.answer_nll for s in together] == pytest.approx([s.answer_nll for s in alone], abs=1e-4)


def test_broken_models_are_refused(tokenizer):
    model = random_llama(vocab_size=258)
    prompts = maker(tokenizer).relative(length=300, depths=(0.5,), num_trials=1)
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(EvalError, match="not finite"):
        scores(model, prompts)


def test_one_broken_prompt_costs_no_other_its_score(tokenizer):
    model = random_llama(vocab_size=258)
    prompts = maker(tokenizer).relative(length=300, depths=(0.0, 0.5, 1.0), num_trials=2)
    broken = torch.tensor(prompts[3].ids[:-1])

    def spoil(_module, _args, kwargs, output):
        ids = kwargs["input_ids"]
        for row in range(len(ids)):
            if ids.shape[1] == len(broken) and bool((ids[row] == broken).all()):
                output.last_hidden_state[row] = torch.nan

    model.base_model.register_forward_hook(spoil, with_kwargs=True)
    found = {}

    def collect():
        for some in score_prompts(model, prompts, frequency_key=same, share=False):
            found.update(some)

    with pytest.raises(EvalError, match=r"not finite for 1 of 6 prompts \(first: 0.5/1 at 300 tokens\)"):
        collect()
    assert set(found) == {0, 1, 2, 4, 5}


def grid(tokenizer, variant):
    made = maker(tokenizer, variant)
    lengths = (300, 348, 360, 700)
    if variant == "classic":
        yield [p for n in lengths for p in made.relative(length=n, depths=(0.0, 0.6, 1.0), num_trials=3)]
        yield [p for n in lengths for p in made.absolute(length=n, positions=(0, 100, 320), num_trials=3)]
    else:
        yield [p for n in (420, 700) for p in made.relative(length=n, depths=(0.0, 0.6), num_trials=2)]


@pytest.mark.parametrize("spelled", [*STATIC, *LENGTH_DEPENDENT], ids=lambda s: label(parse_method(s)))
@pytest.mark.parametrize("variant", ["classic", "text"])
def test_sharing_changes_no_score(tokenizer, spelled, variant):
    """On either side of the window, whatever the frequencies depend on, on both grids."""
    model = random_llama(vocab_size=258, max_position_embeddings=350)
    with extend(model, parse_method(spelled), factor=4) as patch:
        for prompts in grid(tokenizer, variant):
            both = [scores(model, prompts, patch.frequency_key, share=share) for share in (True, False)]
            shared, alone = ([s.answer_nll for s in found] for found in both)
            # fp32 sums in another order
            assert shared == pytest.approx(alone, abs=1e-3)
            assert [s.predicted for s in both[0]] == [s.predicted for s in both[1]]
            shared, alone = (
                sum(
                    end - start
                    for start, end in Forest(prompts, frequency_key=patch.frequency_key, share=share).edges()
                )
                for share in (True, False)
            )
            assert shared < alone or spelled in LENGTH_DEPENDENT


def test_frequencies_of_their_own_are_never_shared(tokenizer):
    """A key that changes with every length: each token of an answer is a forward of its own, and nothing is cut."""
    prompts = maker(tokenizer).relative(length=300, depths=(0.0, 1.0), num_trials=2)
    edges = list(Forest(prompts, frequency_key=lambda n: n).edges())
    assert {start for start, _ in edges} == {0}
    assert sorted(end for _, end in edges) == sorted(n for p in prompts for n in range(300 - p.num_answer, 300))


def test_the_beginning_is_computed_once(tokenizer):
    model = random_llama(vocab_size=258)
    prompts = maker(tokenizer).relative(length=600, depths=(1.0,), num_trials=4)
    seen = []
    model.base_model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    scores(model, prompts, max_rows=3)
    common = seen[0][1]
    assert seen == [(1, common), (3, 599 - common), (1, 599 - common)]
    assert common > 450
