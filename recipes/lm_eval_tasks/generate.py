"""The documents of our tasks for lm-eval, made offline from a tokenizer and the Python sources of this machine.

lm-eval calls these with its metadata: `max_seq_lengths`, and the tokenizer as `tokenizer` or the model as `pretrained`.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import datasets  # pyright: ignore[reportMissingTypeStubs]
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from evals.corpora import bos_id, encode, python_sources
from evals.errors import EvalError
from evals.passkey import FILLER, PasskeyPrompt, PromptMaker, RepeatedFiller
from evals.variants import VARIANTS
from rope_ext.hf import locate

LENGTHS = (4096,)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LISTED = [2**k for k in range(8, 18)]
ANSWER = 16  # tokens that an answer may take, as the YAMLs say
CHOICES = 4
Splits = dict[str, datasets.Dataset]


def passkey(**asked: Any) -> Splits:
    """Return the prompts of the classic passkey, `trials` (10) at each depth and length."""
    return _retrieval("classic", **asked)


def multi_key(**asked: Any) -> Splits:
    """Return prompts with four keys, one of them asked for."""
    return _retrieval("multi-key", **asked)


def _retrieval(
    variant: str,
    *,
    max_seq_lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    trials: int = 10,
    seed: int = 0,
    **named: Any,
) -> Splits:
    tokenizer = _tokenizer(**named)
    filler = RepeatedFiller(encode(tokenizer, FILLER))
    maker = PromptMaker(tokenizer=tokenizer, variant=VARIANTS[variant], filler=filler, seed=seed, num_spare=ANSWER)
    rows: list[dict[str, Any]] = []
    for length in max_seq_lengths:
        prompts = _as_long_as_read(maker, tokenizer, int(length), [float(d) for d in depths], int(trials))
        # All depths of a trial before the next, so that a limit leaves none out
        rows += [_row(tokenizer, prompt, int(length)) for prompt in sorted(prompts, key=lambda each: each.trial)]
    return _test(rows)


def _as_long_as_read(
    maker: PromptMaker, tokenizer: PreTrainedTokenizerBase, length: int, depths: list[float], trials: int
) -> list[PasskeyPrompt]:
    """Return prompts whose texts, read as tokens again, leave room for an answer and little more.

    A text can be read as fewer tokens than it was made of, where two pieces meet.
    """
    asked, best = length, maker.relative(length=length, depths=depths, num_trials=trials)
    for _ in range(4):
        longest = max(len(tokenizer(_text(tokenizer, prompt), verbose=False)["input_ids"]) for prompt in best)
        if longest >= length - ANSWER:
            break
        asked += length - ANSWER - longest
        longer = maker.relative(length=asked, depths=depths, num_trials=trials)
        if max(len(tokenizer(_text(tokenizer, p), verbose=False)["input_ids"]) for p in longer) > length - ANSWER:
            break
        best = longer
    return best


def _text(tokenizer: PreTrainedTokenizerBase, prompt: PasskeyPrompt) -> str:
    ids = list(prompt.ids[: -prompt.num_answer])
    return cast("str", tokenizer.decode(ids[1:] if ids[:1] == [bos_id(tokenizer)] else ids))


def _row(tokenizer: PreTrainedTokenizerBase, prompt: PasskeyPrompt, length: int) -> dict[str, Any]:
    """Return a prompt as text, and the tokens that it is read as."""
    text = _text(tokenizer, prompt)
    tokens = len(tokenizer(text, verbose=False)["input_ids"])
    return {"input": text, "target": prompt.key, "length": length, "depth": prompt.depth, "tokens": tokens}


def found(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 if the answer begins with the key, over all, by length, and by length and depth."""
    value = float(results[0].strip().startswith(doc["target"].strip()))
    at = f"found@{doc['length']}"
    return {"found": value, at: value, f"{at}/{doc['depth']:g}": value}


def sources(*, max_seq_lengths: Sequence[int] = LENGTHS, documents: int = 50, **named: Any) -> Splits:
    """Return the beginnings of Python sources that have as many tokens as the length, `documents` of them at most."""
    tokenizer = _tokenizer(**named)
    rows: list[dict[str, Any]] = []
    for length in max_seq_lengths:
        some: list[dict[str, Any]] = []
        for document in python_sources("held-out"):
            ids = encode(tokenizer, document.text)
            if len(ids) >= int(length) and len(some) < documents:
                text = cast("str", tokenizer.decode(ids[: int(length)]))
                some.append({"text": text, "tokens": len(encode(tokenizer, text)), "length": int(length)})
        if not some:
            raise EvalError(f"rope_ext_perplexity: no Python source here has {length} tokens; ask for shorter lengths")
        rows += some
    return _test(rows)


def token_perplexity(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    """Return the log-likelihood and the tokens that it is of: over all, and by length where the YAML lists it."""
    pair, length = (results[0][0], doc["tokens"]), doc["length"]
    return {"token_perplexity": pair} | ({f"token_perplexity@{length}": pair} if length in LISTED else {})


def next_line(*, documents: int = 200, seed: int = 0, **_: Any) -> Splits:
    """Return the lines before one, that line, and three others of the same source and a similar length."""
    draw = random.Random(seed)  # noqa: S311  (not a secret)
    rows: list[dict[str, Any]] = []
    texts = [document.text.splitlines() for document in python_sources("held-out")]
    texts = [lines for lines in texts if len(lines) > 60]
    while len(rows) < documents:
        lines = draw.choice(texts)
        at = draw.randrange(12, len(lines))
        right = lines[at]
        alike = sorted({line for line in lines if 0.6 <= (len(line) + 1) / (len(right) + 1) <= 1.6} - {right})
        if len(right.strip()) < 12 or len(alike) < CHOICES - 1:
            continue
        choices = [right, *draw.sample(alike, CHOICES - 1)]
        draw.shuffle(choices)
        context = "\n".join(lines[at - 12 : at])[-240:] + "\n"
        rows.append({"context": context, "choices": choices, "gold": choices.index(right)})
    return _test(rows)


def _tokenizer(tokenizer: str | None = None, pretrained: str | None = None, **_: Any) -> PreTrainedTokenizerBase:
    name = tokenizer or pretrained
    if not name:
        raise EvalError('lm-eval: the documents are made by tokens; give --metadata \'{"tokenizer": "PATH or model"}\'')
    # a folder may hold a tokenizer alone
    source, gguf = (name, {}) if Path(name).is_dir() else locate(name)
    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(source, **gguf))


def _test(rows: list[dict[str, Any]]) -> Splits:
    return {"test": datasets.Dataset.from_list(rows)}
