"""Passkey retrieval: a number hidden in filler at a chosen depth, asked for at the end.

Structure after Mohtashami & Jaggi, "Landmark Attention" (2023), in our own words: instruction, filler, a line
with the key, filler, question. Unlike the common scripts the prompt is assembled as token ids, so that the
length asked for is the length measured, the key always has five digits, and the depth is exact to one token.

    [BOS instruction | filler x before | needle | filler x after | question] + [answer]
     <------------------------- length tokens in all ------------------------------->
"""

import copy
import hashlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from evals.corpora import bos_id, encode
from evals.errors import EvalError

INSTRUCTION = "A pass key is hidden in the text below. Find it and remember it.\n"
FILLER = "The river is wide. The hills are green. The wind is slow. A road goes north and turns back again. "
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"
KEY_DIGITS = 5
MIN_SHARED = 32
"""Tokens that prompts must have in common for their computation to be shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyPrompt:
    """One trial. `ids` is prompt and answer together, shape (length,); the last `num_answer` ids are the answer.

    `depth` is the fraction asked for, `actual_depth` the one that whole tokens allow: filler tokens before the
    needle over all filler tokens (the asked depth itself when there is no filler).
    """

    length: int
    depth: float
    actual_depth: float
    trial: int
    key: str
    ids: tuple[int, ...]
    num_answer: int
    needle_start: int
    needle_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyScore:
    """One trial's outcome: `correct` iff greedy decoding would give the answer; `answer_nll` in nats per token."""

    correct: bool
    answer_nll: float
    predicted: tuple[int, ...]


def trial_key(seed: int, length: int, depth: float, trial: int) -> str:
    """Return the five-digit key of a trial, first digit not zero: a function of its coordinates and nothing else."""
    digest = hashlib.sha256(f"passkey|{seed}|{length}|{depth:.6f}|{trial}".encode()).digest()
    low = 10 ** (KEY_DIGITS - 1)
    return str(low + int.from_bytes(digest[:8], "big") % (9 * low))


def build_prompt(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int | None,
    depth: float,
    trial: int,
    key: str,
    filler: Sequence[int] | None = None,
) -> PasskeyPrompt:
    """Return a prompt of exactly `length` ids (BOS, question and answer included) with the needle at `depth`.

    `filler` ids are repeated from their start as often as needed; by default they are a jingle without digits.
    The text after the needle goes on where the text before it stopped. `length=None` means no filler at all.

    Raises:
        EvalError: the length cannot hold the template, the depth is outside [0, 1], or the tokenizer merges the
            answer into the question, so that no token border stands between them.
    """
    if not 0.0 <= depth <= 1.0:
        raise EvalError(
            f"passkey: depth {depth} is outside [0, 1]; 0 is right after the instruction, 1 just before the question"
        )
    head = encode(tokenizer, INSTRUCTION)
    bos = bos_id(tokenizer)
    if bos is not None:
        head = [bos, *head]
    needle = encode(tokenizer, NEEDLE.format(key=key))
    question = encode(tokenizer, QUESTION)
    asked = encode(tokenizer, QUESTION + ANSWER.format(key=key))
    answer = asked[len(question) :]
    if asked[: len(question)] != question or not answer:
        raise EvalError(
            "passkey: this tokenizer merges the answer into the question; no token border lies between them"
        )
    num_fixed = len(head) + len(needle) + len(question) + len(answer)
    num_filler = 0 if length is None else length - num_fixed
    if num_filler < 0:
        raise EvalError(
            f"passkey: length {length} is shorter than the template; this tokenizer needs at least {num_fixed} tokens"
        )
    cycle = list(filler) if filler is not None else encode(tokenizer, FILLER)
    if num_filler and not cycle:
        raise EvalError("passkey: the filler is empty; give at least one token")
    text = [cycle[i % len(cycle)] for i in range(num_filler)]
    before = round(depth * num_filler)
    ids = [*head, *text[:before], *needle, *text[before:], *question, *answer]
    start = len(head) + before
    return PasskeyPrompt(
        length=len(ids),
        depth=depth,
        actual_depth=before / num_filler if num_filler else depth,
        trial=trial,
        key=key,
        ids=tuple(ids),
        num_answer=len(answer),
        needle_start=start,
        needle_end=start + len(needle),
    )


def build_trials(
    tokenizer: PreTrainedTokenizerBase, *, length: int, depths: Sequence[float], num_trials: int, seed: int
) -> list[PasskeyPrompt]:
    """Return `num_trials` prompts at each depth, all of exactly `length` tokens, the same for every method and order.

    Raises:
        EvalError: see `build_prompt`.
    """
    return [
        build_prompt(tokenizer, length=length, depth=depth, trial=trial, key=trial_key(seed, length, depth, trial))
        for depth in depths
        for trial in range(num_trials)
    ]


def answer_lengths(prompt: PasskeyPrompt) -> range:
    """Return how many tokens the model has before it when it writes each id of the answer."""
    return range(prompt.length - prompt.num_answer, prompt.length)


@torch.inference_mode()
def score_prompts(
    model: PreTrainedModel,
    prompts: Sequence[PasskeyPrompt],
    *,
    frequency_key: Callable[[int], Hashable],
    share: bool = True,
    max_rows: int | None = None,
) -> list[PasskeyScore]:
    """Return one score per prompt, from forwards over all of them: greedy match iff every answer id is the argmax.

    Prompts must agree in length, so no padding exists, and in answer length. The last prompt token and the answer
    less its last id predict the answer; only those positions reach the output head. What all prompts begin with (of one
    depth: all filler before the needle) is computed once. Lengths that greedy decoding would pass through with
    frequencies of their own are run one by one.

    Args:
        frequency_key: what the frequencies depend on at a length in tokens; a constant for an ordinary model.
        share: compute a common beginning once; without it every prompt is run whole.
        max_rows: prompts in one forward; all of them by default.

    Raises:
        EvalError: prompts of unequal lengths, or logits that are not finite.
    """
    if len({(prompt.length, prompt.num_answer) for prompt in prompts}) != 1:
        raise EvalError("passkey: one call scores prompts of one length and one answer length; group them first")
    num_answer = prompts[0].num_answer
    ids = torch.tensor([prompt.ids for prompt in prompts], device=model.device)
    rows = max_rows or len(prompts)
    parts: list[torch.Tensor] = []
    for key, group in groupby(answer_lengths(prompts[0]), key=frequency_key):
        lengths = list(group)
        common = shared_tokens(ids[:, : lengths[0]]) if share else 0
        if common and frequency_key(common) != key:
            common = 0
        parts.append(_last_logits(model, ids[:, : lengths[-1]], len(lengths), common, rows))
    logits = torch.cat(parts, dim=1)
    if not torch.isfinite(logits).all():
        raise EvalError("passkey: the model returned logits that are not finite")
    answers = ids[:, -num_answer:]
    predicted = logits.argmax(dim=-1)
    nll = F.cross_entropy(logits.transpose(1, 2), answers, reduction="none").mean(dim=1)
    return [
        PasskeyScore(correct=guess == list(prompt.ids[-num_answer:]), answer_nll=loss, predicted=tuple(guess))
        for prompt, guess, loss in zip(prompts, predicted.tolist(), nll.tolist(), strict=True)
    ]


def shared_tokens(ids: torch.Tensor) -> int:
    """Return how many first tokens all rows share, at most all but one; 0 if they are too few to be worth it."""
    if len(ids) < 2:
        return 0
    same = (ids == ids[:1]).all(dim=0)
    count = int(same.long().cumprod(dim=0).sum())
    count = min(count, ids.shape[1] - 1)
    return count if count >= MIN_SHARED else 0


def _last_logits(model: PreTrainedModel, ids: torch.Tensor, keep: int, common: int, max_rows: int) -> torch.Tensor:
    """Return the logits of the last `keep` positions of every row, fp32, the first `common` tokens computed once."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = None
    if common:
        cache = DynamicCache(config=model.config)
        model.base_model(input_ids=ids[:1, :common], use_cache=True, **{name: cache})
    parts: list[torch.Tensor] = []
    for rows in ids.split(max_rows):
        if cache is None:
            out = model(input_ids=rows, logits_to_keep=keep, use_cache=False)
        else:
            own = copy.deepcopy(cache)
            own.batch_repeat_interleave(len(rows))
            out = model(input_ids=rows[:, common:], logits_to_keep=keep, use_cache=True, **{name: own})
        # A copy: slicing alone would keep the logits of every position alive on models that ignore logits_to_keep.
        parts.append(out.logits[:, -keep:].float())
    return torch.cat(parts)
