"""Passkey prompts in, scores out: by teacher forcing, which needs one forward, or by decoding for real.

    teacher-forced   right iff every id of the answer is the argmax where greedy decoding would write it
    decoded          right iff the text that was written begins with the answer and goes on with no letter or digit

The first is what greedy decoding would begin with; the second also sees how it goes on (12345 is not 123456).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from evals.errors import EvalError
from evals.nll import MEMORY_BUDGET, itemsize_of, rows_per_chunk
from evals.passkey import PasskeyPrompt
from evals.prefixes import PrefixTree, Query, last_hidden, prefix_tree

FrequencyKey = Callable[[int], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyScore:
    """One trial's outcome.

    Attributes:
        correct: whether greedy decoding would write the answer.
        answer_nll: nats per token of the answer.
        margin: the answer's logit less the best other one, at the position where that is least: above 0 iff correct,
            but for ties.
        predicted: the argmax at each position of the answer.
    """

    correct: bool
    answer_nll: float
    margin: float
    predicted: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenScore:
    """What was decoded, and what each way of reading it makes of it.

    Attributes:
        exact: it begins with the answer, and no letter or digit follows: 12345 is neither 123 nor 123456.
        substring: it holds every value of the answer anywhere, in any order, as RULER's string_match_all asks.
        token_match: its first ids are the answer's.
        ran_out: decoding stopped because the room was used up, not at an end-of-sequence token.
        output: the text itself.
    """

    exact: bool
    substring: bool
    token_match: bool
    ran_out: bool
    output: str


class Forest:
    """The forwards that a set of prompts takes: a prefix tree for each group of lengths with the same frequencies.

    Greedy decoding passes through one length for each token of the answer; lengths with frequencies of their own are
    sequences of their own.
    """

    def __init__(self, prompts: Sequence[PasskeyPrompt], *, frequency_key: FrequencyKey, share: bool = True) -> None:
        self.prompts, self.frequency_key = prompts, frequency_key
        queries: dict[Hashable, list[tuple[int, Query]]] = defaultdict(list)
        self.num_parts = [0] * len(prompts)
        for number in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids)):
            prompt = prompts[number]
            for key, group in groupby(answer_lengths(prompt), key=frequency_key):
                lengths = list(group)
                queries[key].append((number, Query(prompt.ids[: lengths[-1]], len(lengths))))
                self.num_parts[number] += 1
        self.trees: list[tuple[Hashable, list[int], PrefixTree]] = []
        for key, some in queries.items():
            tree = prefix_tree([query for _, query in some], share=share, may_cut=self.may_cut(key))
            self.trees.append((key, [number for number, _ in some], tree))

    def may_cut(self, key: Hashable) -> Callable[[int], bool]:
        """Return whether a cache may end at a length, in the tree of a key."""
        return lambda length: self.frequency_key(length) == key

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of every stretch of tokens that is computed."""
        for _, _, tree in self.trees:
            yield from tree.edges()


def answer_lengths(prompt: PasskeyPrompt) -> range:
    """Return how many tokens the model has before it when it writes each id of the answer."""
    return range(len(prompt.ids) - prompt.num_answer, len(prompt.ids))


def score_prompts(
    model: PreTrainedModel,
    prompts: Sequence[PasskeyPrompt],
    *,
    frequency_key: FrequencyKey,
    share: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    max_rows: int | None = None,
) -> Iterator[list[tuple[int, PasskeyScore]]]:
    """Yield (number of the prompt, its score) as they become known, those of one forward together.

    Args:
        prompts: of any lengths; no padding exists.
        frequency_key: what the frequencies depend on at a length in tokens; a constant for an ordinary model.
        share: compute what several prompts begin with once; without it every prompt is run whole.
        memory_budget: bytes for activations and logits, and half of it for keys and values; see `last_hidden`.
        max_rows: prompts in one forward; as many as fit by default.

    Raises:
        EvalError: logits that are not finite, once all other prompts are scored; or a budget below one row of logits.
    """
    forest = Forest(prompts, frequency_key=frequency_key, share=share)
    head = cast("nn.Module", model.get_output_embeddings())
    rows = rows_per_chunk(model.config, itemsize_of(model), memory_budget)
    parts: dict[int, dict[int, _Part | None]] = defaultdict(dict)
    lost: list[PasskeyPrompt] = []
    for key, numbers, tree in forest.trees:
        found = last_hidden(model, tree, may_cut=forest.may_cut(key), memory_budget=memory_budget, max_rows=max_rows)
        for queries, hidden in found:
            done: list[tuple[int, PasskeyScore]] = []
            for same, row in zip(queries, hidden, strict=True):
                for query in same:
                    number = numbers[query]
                    prompt, end = prompts[number], len(tree.queries[query].ids)
                    wanted = torch.tensor(prompt.ids[end + 1 - len(row) : end + 1], device=row.device)
                    parts[number][end] = _read(head, row, wanted, rows)
                    if len(parts[number]) == forest.num_parts[number]:
                        whole = parts.pop(number)
                        sound = {end: part for end, part in whole.items() if part is not None}
                        if len(sound) == len(whole):
                            done.append((number, _score(prompt, sound)))
                        else:
                            lost.append(prompt)
            if done:
                yield done
    if lost:
        raise EvalError(
            f"passkey: the model returned logits that are not finite for {len(lost)} of {len(prompts)} prompts "
            f"(first: {lost[0].unit} at {lost[0].length} tokens)"
        )


@dataclass(frozen=True, slots=True)
class _Part:
    nll: Tensor
    margin: float
    predicted: list[int]


@torch.inference_mode()
def _read(head: nn.Module, hidden: Tensor, wanted: Tensor, rows: int) -> _Part | None:
    """Return what some positions of an answer say, their logits a few rows at a time; None if any is not finite."""
    losses: list[Tensor] = []
    margins: list[float] = []
    predicted: list[int] = []
    for part, ids in zip(hidden.split(rows), wanted.split(rows), strict=True):
        logits = head(part).float()
        if not torch.isfinite(logits).all():
            return None
        losses.append(F.cross_entropy(logits, ids, reduction="none").double().cpu())
        predicted += logits.argmax(dim=-1).tolist()
        own = logits.gather(1, ids[:, None])[:, 0]
        best_other = logits.scatter(1, ids[:, None], -torch.inf).amax(dim=-1)
        margins += (own - best_other).tolist()
    return _Part(torch.cat(losses), min(margins), predicted)


def _score(prompt: PasskeyPrompt, parts: dict[int, _Part]) -> PasskeyScore:
    ordered = [parts[end] for end in sorted(parts)]
    predicted = tuple(token for part in ordered for token in part.predicted)
    return PasskeyScore(
        correct=predicted == prompt.ids[-prompt.num_answer :],
        answer_nll=float(torch.cat([part.nll for part in ordered]).mean()),
        margin=min(part.margin for part in ordered),
        predicted=predicted,
    )


def write_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PasskeyPrompt],
    *,
    max_rows: Callable[[int], int] = lambda _length: 1,
) -> Iterator[list[tuple[int, WrittenScore]]]:
    """Yield (number of the prompt, its score) from the model's own greedy `generate`, prompts of one length together.

    An answer may take as many tokens as the key, and the spare ones of its prompt.

    Args:
        max_rows: how many prompts of a length go into one call.
    """
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        groups[len(prompt.ids) - prompt.num_answer, prompt.num_answer + prompt.num_spare].append(number)
    end = cast("int | list[int] | None", getattr(model.generation_config, "eos_token_id", None))
    ends: set[int | None] = {*end} if isinstance(end, list) else {end}
    for (length, room), numbers in sorted(groups.items(), reverse=True):
        size = max(1, max_rows(length + room))
        for at in range(0, len(numbers), size):
            some = numbers[at : at + size]
            ids = torch.tensor([prompts[number].ids[:length] for number in some], device=model.device)
            written = _greedy(model, ids, room=room, ends=end)
            rows = written[:, length:].tolist()
            yield [(n, grade_written(tokenizer, prompts[n], row, ends)) for n, row in zip(some, rows, strict=True)]


def _greedy(model: PreTrainedModel, ids: Tensor, *, room: int, ends: int | list[int] | None) -> Tensor:
    """Return what the model's own generate() writes, greedily.

    Whatever a checkpoint ships beside its weights is set aside for the call: it may forbid repetition, and an answer is
    nothing else. What is not said in a call's own configuration would be taken from there.
    """
    pad = ends[0] if isinstance(ends, list) else ends
    plain = GenerationConfig(
        max_new_tokens=room, do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=0 if pad is None else pad
    )
    shipped = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        return cast(
            "Tensor",
            model.generate(  # pyright: ignore[reportCallIssue]  (from a mixin)
                ids, attention_mask=torch.ones_like(ids), generation_config=plain
            ),
        )
    finally:
        model.generation_config = shipped


def grade_written(
    tokenizer: PreTrainedTokenizerBase, prompt: PasskeyPrompt, ids: Sequence[int], ends: set[int | None]
) -> WrittenScore:
    """Return the scores of the ids that were written, up to the first that ends a sequence."""
    stop = next((i for i, token in enumerate(ids) if token in ends), None)
    kept = list(ids[:stop])
    output = str(tokenizer.decode(kept))
    return WrittenScore(
        exact=begins_with(output, prompt.key),
        substring=all(value in output for value in prompt.key.split(" and ")),
        token_match=tuple(kept[: prompt.num_answer]) == prompt.ids[-prompt.num_answer :],
        ran_out=stop is None,
        output=output,
    )


def begins_with(text: str, answer: str) -> bool:
    """Return whether a text begins with an answer, white space aside, and goes on with no letter or digit."""
    return re.match(rf"\s*{re.escape(answer)}(?![^\W_])", text) is not None
