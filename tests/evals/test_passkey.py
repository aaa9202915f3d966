import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import passkey
from evals.corpora import Document, bos_id, encode, python_sources
from evals.errors import EvalError
from evals.passkey import PromptMaker, RepeatedFiller, TextFiller, clustered
from evals.variants import INSTRUCTION, QUESTION, VARIANTS, classic_with
from recipes.schema import VariantName
from tests.evals.conftest import byte_tokenizer

TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "no-bos": byte_tokenizer(bos=False),
    "bos-not-added": byte_tokenizer(adds_bos=False),
    "merged": byte_tokenizer(digits=False),
}
TEXTS = [Document(name=f"d{i}", text=f"Chapter {i} says little.\nIt goes on! " * 200) for i in range(3)]


def maker(tokenizer, variant="classic", *, seed=0, num_spare=0, documents=TEXTS, filler=None):
    kind = VARIANTS[variant] if isinstance(variant, str) else variant
    if filler is None:
        repeated = RepeatedFiller(encode(tokenizer, passkey.FILLER))
        filler = TextFiller(tokenizer, documents) if kind.on_text else repeated
    return PromptMaker(tokenizer=tokenizer, variant=kind, filler=filler, seed=seed, num_spare=num_spare)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(length=st.integers(300, 900), depth=st.floats(0, 1), seed=st.integers(0, 50))
def test_prompts_are_exact(name, length, depth, seed):
    tokenizer = TOKENIZERS[name]
    [prompt] = maker(tokenizer, seed=seed).relative(length=length, depths=(depth,), num_trials=1)
    assert len(prompt.ids) == prompt.length == length
    bos = bos_id(tokenizer)
    assert prompt.ids.count(bos) == (0 if bos is None else 1)
    assert bos is None or prompt.ids[0] == bos
    text = tokenizer.decode(list(prompt.ids))
    assert text.count(prompt.key) == 3  # twice in the needle, once as the answer
    assert text.endswith(f"The pass key is {prompt.key}")
    needle = tokenizer.decode(list(prompt.ids[prompt.needle_start : prompt.needle_end]))
    assert needle == f"\nThe pass key is {prompt.key}. Remember it. {prompt.key} is the pass key.\n"
    assert tokenizer.decode(list(prompt.ids[-prompt.num_answer :])) == f" {prompt.key}"
    bare = maker(tokenizer, classic_with(prompt.key)).shortest(1)
    # rounded to the nearest token; the last term is for halves, which floats do not hold exactly
    assert abs(prompt.actual_depth - depth) <= 0.5 / (length - bare) + 1e-12


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_variant_hides_what_it_asks_for(name, kind):
    tokenizer = TOKENIZERS[kind]
    made = maker(tokenizer, name, num_spare=3)
    lengths = (700, 901) if VARIANTS[name].has_filler else (made.shortest(4),)
    for length in lengths:
        prompts = made.relative(length=length, depths=(0, 0.3, 1), num_trials=4)
        assert len(prompts) == (12 if VARIANTS[name].has_place else 4)
        assert len({prompt.unit for prompt in prompts}) == len(prompts)
        for prompt in prompts:
            assert len(prompt.ids) + 3 == prompt.length == length
            whole = tokenizer.decode(list(prompt.ids), skip_special_tokens=True)
            asked, hidden = whole[: -len(prompt.key)], len(prompt.key)
            assert whole.endswith(" " + prompt.key)
            for value in prompt.key.split(" and "):
                # hidden once where the line says it once, twice where it repeats it, nowhere in the control
                times = 0 if name == "no-needle" else 1 if name == "needle" else 2
                assert len(re.findall(rf"\b{value}\b", asked)) == times, (name, value)
            needle = tokenizer.decode(list(prompt.ids[prompt.needle_start : prompt.needle_end]))
            assert (prompt.key.split(" and ")[0] in needle) == VARIANTS[name].has_needle
            assert hidden > 4


def test_the_recipe_knows_every_variant():
    assert set(get_args(VariantName)) == set(VARIANTS)


def test_the_lines_beside_the_needle(tokenizer):
    """Of one form, with numbers of their own, spread over the text, and never the answer."""
    for name, lines in (("distractors", 4), ("multi-key", 4), ("multi-query", 4), ("classic", 1), ("no-needle", 0)):
        for prompt in maker(tokenizer, name).relative(length=900, depths=(0, 0.5, 1), num_trials=3):
            text = tokenizer.decode(list(prompt.ids))
            found = re.findall(r"\nThe ([a-z A-Z]+) is (\d{5})\. Remember it\. (\d{5}) is the ([a-z A-Z]+)\.\n", text)
            assert len(found) == lines
            assert all(a == d and b == c for a, b, c, d in found)
            assert len({value for _, value, _, _ in found}) == lines
            if name == "multi-query":
                one, other = re.search(r"pass keys of (\w+) and (\w+)\?", text).groups()
                at = {subject: value for subject, value, _, _ in found}
                assert prompt.key == f"{at[f'pass key of {one}']} and {at[f'pass key of {other}']}"
            if name == "multi-key":
                asked = re.search(r"What is the (pass key of \w+)\?", text).group(1)
                assert {subject: value for subject, value, _, _ in found}[asked] == prompt.key


def test_depths_zero_and_one_touch_the_ends(tokenizer):
    first, last = maker(tokenizer).relative(length=400, depths=(0, 1), num_trials=1)
    assert first.actual_depth == 0
    assert last.actual_depth == 1
    text = tokenizer.decode(list(first.ids), skip_special_tokens=True)
    assert text.startswith(f"{INSTRUCTION}\nThe pass key is {first.key}")
    assert tokenizer.decode(list(last.ids)).endswith(f"{last.key} is the pass key.\n{QUESTION} {last.key}")


def test_prompts_are_a_function_of_their_coordinates(tokenizer):
    wide = maker(tokenizer, seed=1).relative(length=400, depths=(0.0, 0.5, 1.0), num_trials=4)
    narrow = maker(tokenizer, seed=1).relative(length=400, depths=(0.5,), num_trials=2)
    assert narrow == [p for p in wide if p.depth == 0.5][:2]
    assert len({p.key for p in wide}) == len({p.data_hash for p in wide}) == len(wide)
    assert all(len(p.key) == 5 and p.key[0] != "0" for p in wide)
    other = maker(tokenizer, seed=2).relative(length=400, depths=(0.5,), num_trials=2)
    assert {p.key for p in other}.isdisjoint(p.key for p in wide)


def test_absolute_positions(tokenizer):
    """The needle stands after so many tokens, whatever the length; where it does not fit there is no prompt."""
    made = maker(tokenizer)
    positions = (0, 300, 512, 600)
    short, long = (made.absolute(length=n, positions=positions, num_trials=2) for n in (512, 900))
    assert [(p.position, p.trial) for p in short] == [(n, t) for n in (0, 300) for t in (0, 1)]
    assert {p.position for p in long} == set(positions)
    head = len(encode(tokenizer, INSTRUCTION)) + 1
    assert {p.needle_start for p in long} == {head, 300, 512, 600}
    for one in short:  # one key for every length, and the same beginning
        [same] = [p for p in long if (p.position, p.trial) == (one.position, one.trial)]
        assert same.key == one.key
        assert same.ids[: one.needle_end + 20] == one.ids[: one.needle_end + 20]
        assert one.unit == same.unit == f"@{one.position}/{one.trial}"
    # the last position that fits touches the question
    tail = len(short[0].ids) - (len(made.absolute(length=512, positions=(0,), num_trials=1)[0].ids) - 0)
    assert tail == 0
    fixed = made.shortest(1)
    assert made.absolute(length=512, positions=(head + 512 - fixed,), num_trials=1)[0].actual_depth == 1
    assert made.absolute(length=512, positions=(head + 512 - fixed + 1,), num_trials=1) == []


def test_the_shortest_length_is_told(tokenizer):
    least = maker(tokenizer).shortest(1)
    assert len(maker(tokenizer).relative(length=least, depths=(0.5,), num_trials=1)[0].ids) == least
    with pytest.raises(
        EvalError, match=f"length {least - 1} is shorter than the template of 'classic'.*at least {least}"
    ):
        maker(tokenizer).relative(length=least - 1, depths=(0.5,), num_trials=1)


@pytest.mark.parametrize("depth", [-0.1, 1.1])
def test_depths_outside_are_refused(tokenizer, depth):
    with pytest.raises(EvalError, match=r"outside \[0, 1\]"):
        maker(tokenizer).relative(length=400, depths=(depth,), num_trials=1)


def test_own_filler_is_used_and_may_not_be_empty(tokenizer):
    [prompt] = maker(tokenizer, filler=RepeatedFiller([50, 51])).relative(length=400, depths=(0.5,), num_trials=1)
    assert set(prompt.ids) >= {50, 51}
    assert "river" not in tokenizer.decode(list(prompt.ids))
    with pytest.raises(EvalError, match="filler is empty"):
        maker(tokenizer, filler=RepeatedFiller([])).relative(length=400, depths=(0.5,), num_trials=1)


@given(length=st.integers(400, 3000), depth=st.floats(0, 1), seed=st.integers(0, 20))
def test_real_text_is_cut_where_a_line_or_a_sentence_ends(length, depth, seed):
    tokenizer = TOKENIZERS["bytes"]
    [prompt] = maker(tokenizer, "text", seed=seed).relative(length=length, depths=(depth,), num_trials=1)
    before = tokenizer.decode(list(prompt.ids[: prompt.needle_start]), skip_special_tokens=True)
    if prompt.actual_depth < 1:
        assert re.search(r"([.!]\s*|\n)$", before), before[-20:]
    # a sentence of this text has at most 26 characters
    assert abs(prompt.actual_depth - depth) * length <= 26


def test_texts_differ_by_trial_and_never_repeat(tokenizer):
    prompts = maker(tokenizer, "text").relative(length=2000, depths=(0.5, 1), num_trials=4)
    assert [p.haystack for p in prompts[:4]] == [p.haystack for p in prompts[4:]]
    assert len({p.haystack for p in prompts}) == 3  # as many as there are documents
    assert prompts[0].haystack == prompts[3].haystack
    assert {p.haystack for p in clustered(prompts)} == {p.haystack for p in prompts}
    with pytest.raises(EvalError, match=r"3 documents have 21\d+ tokens together, 29\d+ asked"):
        maker(tokenizer, "text").relative(length=30_000, depths=(0.5,), num_trials=1)
    with pytest.raises(EvalError, match="0 documents have 0 tokens"):
        maker(tokenizer, "text", documents=[]).relative(length=600, depths=(0.5,), num_trials=1)


def test_texts_that_overlap_are_one_cluster(tokenizer):
    """Six documents of 900 tokens: six trials of 1,300 go round and are all connected."""
    documents = [Document(name=f"d{i}", text=f"The {i}. story goes on.\n" * 40) for i in range(6)]
    for num_trials, clusters in ((2, 2), (4, 2), (6, 1)):
        made = maker(tokenizer, "text", documents=documents)
        prompts = made.relative(length=1300, depths=(0, 1), num_trials=num_trials)
        assert {len(p.documents) for p in prompts} == {2}
        assert len({p.haystack for p in prompts}) == num_trials
        assert len({p.haystack for p in clustered(prompts)}) == clusters
    plain = maker(tokenizer).relative(length=600, depths=(0,), num_trials=3)
    assert clustered(plain) == plain


def test_a_value_that_the_text_holds_is_not_hidden_in_it(tokenizer):
    made = maker(tokenizer, "text")
    [first] = made.relative(length=600, depths=(0.5,), num_trials=1)
    spoiled = [Document(name=d.name, text=f"{first.key} is a number. " + d.text) for d in TEXTS]
    [second] = maker(tokenizer, "text", documents=spoiled).relative(length=600, depths=(0.5,), num_trials=1)
    assert second.key != first.key
    everything = Document(name="all", text=" ".join(str(n) for n in range(10_000, 30_000)))
    with pytest.raises(EvalError, match="holds each of 3 values of 'text'"):
        _exhausted(tokenizer, everything)


def _exhausted(tokenizer, document):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passkey, "DRAWS", 3)
        patch.setattr(PromptMaker, "_occurs", lambda *_args: True)
        maker(tokenizer, "text", documents=[document]).relative(length=600, depths=(0.5,), num_trials=1)


@pytest.mark.parametrize(
    "text",
    [
        "\u4f60\u597d\u3002\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002" * 60,
        "na\u00efve caf\u00e9. \u00c5ngstr\u00f6m! " * 80,
    ],
)
def test_other_scripts(tokenizer, text):
    [prompt] = maker(tokenizer, "text", documents=[Document(name="d", text=text)]).relative(
        length=900, depths=(0.5,), num_trials=1
    )
    before = tokenizer.decode(list(prompt.ids[: prompt.needle_start]))
    assert before.rstrip().endswith(("\u3002", ".", "!"))
    assert "\ufffd" not in before


def test_a_tokenizer_that_cannot_say_where_tokens_start(tokenizer, monkeypatch):
    monkeypatch.setattr(passkey, "starts_of", lambda _tokenizer, _text, ids: [None] * len(ids))
    [prompt] = maker(tokenizer, "text").relative(length=600, depths=(0.5,), num_trials=1)
    assert len(prompt.ids) == 600
    assert abs(prompt.actual_depth - 0.5) < 0.01


def test_python_sources_as_haystacks(tokenizer):
    made = maker(tokenizer, "needle", documents=python_sources("held-out"))
    for prompt in made.relative(length=3000, depths=(0, 0.5, 1), num_trials=3):
        text = tokenizer.decode(list(prompt.ids))
        assert text.count(prompt.key) == 2
