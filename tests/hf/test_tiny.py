"""The bundled model is a subject worth measuring: able inside its window, lost beyond it, revived by a method."""

import hashlib
import json
import math

import numpy as np
import pytest

from evals import corpora, stats
from evals.grading import score_prompts
from evals.passkey import FILLER, PromptMaker, RepeatedFiller
from evals.perplexity import prefix_nll
from evals.variants import VARIANTS
from rope_ext import Alibi, Nope, Yarn, extend, load, load_model
from rope_ext.hf import BUNDLED

WINDOW = 256


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", device="cpu")


@pytest.fixture(scope="module")
def corpus(tiny):
    documents = corpora.python_sources("held-out")
    return corpora.tokenise(documents, tiny[1], name="python", num_tokens=4 * WINDOW, num_documents=12)


def perplexity_at(model, corpus, lengths):
    per_document = [prefix_nll(model, d, lengths, frequency_key=lambda _n: 0) for d in corpus.documents]
    return {n: stats.perplexity([d[n] for d in per_document], [n - 1] * len(per_document)).value for n in lengths}


def accuracy_at(model, tokenizer, length, num_trials):
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    filler = RepeatedFiller(corpora.encode(tokenizer, FILLER))
    maker = PromptMaker(tokenizer=tokenizer, variant=VARIANTS["classic"], filler=filler, seed=11)
    prompts = maker.relative(length=length, depths=depths, num_trials=num_trials)
    scores = [s for some in score_prompts(model, prompts, frequency_key=lambda _n: 0) for _, s in some]
    assert len(scores) == len(prompts)
    return sum(s.correct for s in scores) / len(scores)


def test_it_is_small_and_complete(tiny):
    model, tokenizer = tiny
    assert 0.85e6 < sum(p.numel() for p in model.parameters()) < 0.95e6
    assert sum(f.stat().st_size for f in BUNDLED["tiny"].iterdir()) < 4e6
    config = model.config
    shape = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert shape == (128, 4, 4, 2)
    assert (config.head_dim, config.rope_parameters["rope_theta"], config.max_position_embeddings) == (32, 1e4, WINDOW)
    assert len(tokenizer) == 1024
    assert len(corpora.encode(tokenizer, "90210")) == 5
    record = json.loads((BUNDLED["tiny"] / "training.json").read_text())
    card = (BUNDLED["tiny"] / "README.md").read_text()
    assert record["command"] in card
    assert record["weights_sha256"] in card


def test_it_finds_passkeys_inside_its_window_and_not_at_four_times(tiny):
    assert accuracy_at(*tiny, WINDOW, 40) >= 0.95  # 200 trials
    assert accuracy_at(*tiny, 4 * WINDOW, 6) < 0.3


def test_text_is_lost_beyond_the_window(tiny, corpus):
    at = perplexity_at(tiny[0], corpus, (WINDOW, 4 * WINDOW))
    assert at[4 * WINDOW] >= 1.5 * at[WINDOW]


def test_text_is_clearly_better_than_a_bigram(tiny, corpus):
    """A bigram of the training split, each row smoothed towards the unigrams with a weight tuned in its favour."""
    model, tokenizer = tiny
    size = len(tokenizer)
    pairs = np.zeros((size, size))
    for document in corpora.python_sources("train"):
        ids = np.array([corpora.bos_id(tokenizer), *corpora.encode(tokenizer, document.text)])
        np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + size)
    losses = []
    for weight in (1, 10, 100):
        bigram = (pairs + weight * unigram) / (pairs.sum(1, keepdims=True) + weight)
        held = [np.array(d.ids[:WINDOW]) for d in corpus.documents]
        losses.append(-np.mean([np.log(bigram[ids[:-1], ids[1:]]).mean() for ids in held]))
    assert perplexity_at(model, corpus, (WINDOW,))[WINDOW] < 0.5 * math.exp(min(losses))


def test_yarn_brings_both_back_at_four_times(tiny, corpus):
    model, tokenizer = tiny
    before = perplexity_at(model, corpus, (4 * WINDOW,))[4 * WINDOW]
    with extend(model, Yarn(), factor=4):
        assert perplexity_at(model, corpus, (4 * WINDOW,))[4 * WINDOW] < 0.7 * before
        assert accuracy_at(model, tokenizer, 4 * WINDOW, 6) > 0.6


@pytest.fixture(scope="module")
def biased():
    return load("tiny-alibi", device="cpu")


def test_the_model_trained_under_alibi_is_whole_and_its_card_says_where_it_is_from(biased):
    model, tokenizer = biased
    folder = BUNDLED["tiny-alibi"]
    assert sum(f.stat().st_size for f in folder.iterdir()) < 4e6
    assert model.model.rotary_emb.patch.method == Alibi()
    assert model.config.max_position_embeddings == WINDOW
    assert len(tokenizer) == 1024
    record, card = json.loads((folder / "training.json").read_text()), (folder / "README.md").read_text()
    assert record["command"] in card
    assert record["method"] == "alibi"
    assert record["weights_sha256"] in card
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == record["weights_sha256"]


def test_what_was_trained_under_alibi_reads_on_past_its_window_without_training(biased, corpus):
    """Its own property, and not that of the same weights without the bias."""
    model = biased[0]
    with extend(model, Alibi(), context=8 * WINDOW):
        at = perplexity_at(model, corpus, (WINDOW, 4 * WINDOW))
        assert at[4 * WINDOW] < 1.05 * at[WINDOW]
        assert accuracy_at(*biased, WINDOW, 8) >= 0.95
        assert accuracy_at(*biased, 2 * WINDOW, 8) >= 0.5
    with extend(model, Nope(), context=8 * WINDOW):
        assert perplexity_at(model, corpus, (WINDOW,))[WINDOW] > 2 * at[WINDOW]
