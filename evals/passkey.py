"""Passkey retrieval: a value hidden in filler at a chosen place, asked for at the end.

Structure after Mohtashami & Jaggi, "Landmark Attention" (2023), in our own words: instruction, filler, a line
with the key, filler, question. Unlike the common scripts the prompt is assembled as token ids, so that the
length asked for is the length measured, the key always has five digits, and its place is exact to one token.

    [BOS instruction | filler x before | needle | filler x after | question] + [answer] + room for what may follow it
     <--------------------------------- length tokens in all ------------------------------------------------------>
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from evals.corpora import Document, bos_id, encode, hash_ids, starts_of
from evals.errors import EvalError
from evals.variants import Texts, Variant, drawn

FILLER = "The river is wide. The hills are green. The wind is slow. A road goes north and turns back again. "
_ENDS, _ENDS_FULL = (".", "!", "?"), ("\u3002", "\uff01", "\uff1f")
"""What ends a sentence before white space, and what ends one by itself."""
GOLDEN_SECTION = (5**0.5 - 1) / 2
DRAWS = 1000
"""How many values are tried before a text is said to hold them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyPrompt:
    """One trial. `ids` is prompt and answer together; the last `num_answer` ids are the answer.

    Attributes:
        variant: its name in `VARIANTS`.
        length: what was asked for: ids, and `num_spare` tokens that an answer may be longer by.
        depth: the fraction of the filler before the needle that was asked for; None where it was not.
        position: the same as a number of tokens from the start of the prompt.
        actual_depth: what whole tokens (in a text, whole sentences) allow: filler tokens before the needle over all
            filler tokens; None where there is no filler.
        key: the answer's text.
        haystack: which text the filler is, for resampling; None if it is the same for every trial. See `clustered`.
        documents: that the filler is taken from, if any.
        needle_start, needle_end: the ids that hold the needle; equal if there is none.
        data_hash: of the ids.
    """

    variant: str
    length: int
    depth: float | None
    position: int | None
    actual_depth: float | None
    trial: int
    key: str
    ids: tuple[int, ...]
    num_answer: int
    num_spare: int
    haystack: str | None
    documents: tuple[str, ...]
    needle_start: int
    needle_end: int
    data_hash: str

    @property
    def unit(self) -> str:
        """What tells the trials of one length apart."""
        place = f"@{self.position}" if self.position is not None else "-" if self.depth is None else f"{self.depth:g}"
        return f"{place}/{self.trial}"


class Strand(NamedTuple):
    """A piece of filler: its ids, the number of ids after which a line may stand, and the documents that it is of."""

    ids: list[int]
    breaks: Sequence[int]
    documents: tuple[str, ...] = ()


@runtime_checkable
class Filler(Protocol):
    """What a needle is hidden in."""

    def strand(self, trial: int, num_tokens: int) -> Strand:
        """Return exactly `num_tokens` ids for a trial, a longer one beginning with every shorter one."""
        ...


class RepeatedFiller:
    """Ids over and over; a needle may stand anywhere."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def strand(self, trial: int, num_tokens: int) -> Strand:
        """Return the ids from their start as often as needed."""
        if num_tokens and not self.ids:
            raise EvalError("passkey: the filler is empty; give at least one token")
        times = -(-num_tokens // len(self.ids)) if self.ids else 0
        return Strand((self.ids * times)[:num_tokens], range(num_tokens + 1))


def _spread(num: int) -> list[int]:
    """Return 0..num-1 such that the first few, however many, lie far apart on a circle: steps of the golden section.

    A place that is taken already gives way to the next free one.
    """
    free = list(range(num))
    wanted = (int(num * (i * GOLDEN_SECTION % 1.0)) for i in range(num))
    return [free.pop(bisect_left(free, place) % len(free)) for place in wanted] or [0]


class _Text(NamedTuple):
    """Documents joined: their ids, where lines may stand, their names, and where each ends."""

    ids: list[int]
    breaks: list[int]
    documents: tuple[str, ...]
    ends: list[int]


class TextFiller:
    """Documents one after another, never twice in one prompt; trials begin far apart."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> None:
        self.tokenizer = tokenizer
        self.documents = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
        self.beginnings = _spread(len(self.documents))
        self._encoded: dict[int, tuple[list[int], list[int]]] = {}
        self._strands: dict[int, _Text] = {}

    def strand(self, trial: int, num_tokens: int) -> Strand:
        """Return the trial's text up to `num_tokens` ids; lines may stand where a sentence or a line has ended.

        Raises:
            EvalError: all documents together are shorter.
        """
        first = self.beginnings[trial % len(self.beginnings)]
        known = self._strands.get(first)
        if known is None or len(known.ids) < num_tokens:
            known = self._strands[first] = self._joined(first, num_tokens)
        breaks = [at for at in known.breaks if at <= num_tokens]
        used = known.documents[: 1 + bisect_left(known.ends, num_tokens)]
        return Strand(known.ids[:num_tokens], sorted({*breaks, num_tokens}), used)

    def _joined(self, first: int, num_tokens: int) -> "_Text":
        ids: list[int] = []
        ends: list[int] = []
        breaks: list[int] = []
        for step in range(len(self.documents)):
            more, places = self._document((first + step) % len(self.documents))
            breaks += [len(ids) + place for place in places]
            ids += more
            ends.append(len(ids))
            if len(ids) >= num_tokens:
                names = tuple(self.documents[(first + i) % len(self.documents)].name for i in range(step + 1))
                return _Text(ids, breaks, names, ends)
        raise EvalError(
            f"passkey: {len(self.documents)} documents have {len(ids)} tokens together, {num_tokens} asked; give "
            "longer ones, or the variant on repetitive filler"
        )

    def _document(self, number: int) -> tuple[list[int], list[int]]:
        if number not in self._encoded:
            text = self.documents[number].text.strip() + "\n\n"
            ids = encode(self.tokenizer, text)
            self._encoded[number] = ids, [*_breaks(text, starts_of(self.tokenizer, text, ids)), len(ids)]
        return self._encoded[number]


def _breaks(text: str, starts: Sequence[int | None]) -> Iterator[int]:
    """Yield the tokens before which a line or a sentence has ended; all of them where nobody knows where they start."""
    for number, start in enumerate(starts):
        if start is None or number == 0:
            yield number
            continue
        if start == starts[number - 1]:  # another byte of the same character
            continue
        near, after = text[max(0, start - 80) : start], text[start]
        before = near.rstrip(" \t")
        apart = after.isspace() or len(before) < len(near)
        if before.endswith(("\n", *_ENDS_FULL)) or after == "\n" or (apart and before.endswith(_ENDS)):
            yield number


def clustered(prompts: Sequence[PasskeyPrompt]) -> list[PasskeyPrompt]:
    """Return the prompts with one haystack for all whose texts have a document in common, directly or through others.

    Such trials are not independent: a cluster, not a trial, is what may be resampled.
    """
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    for prompt in prompts:
        for name in prompt.documents[1:]:
            leader[find(name)] = find(prompt.documents[0])
    return [replace(p, haystack=find(p.documents[0])) if p.documents else p for p in prompts]


class _Parts(NamedTuple):
    """The fixed ids of a prompt, and the texts that they spell."""

    head: list[int]
    needle: list[int]
    others: list[list[int]]
    question: list[int]
    answer: list[int]
    texts: Texts

    @property
    def num_tokens(self) -> int:
        return sum(len(part) for part in (self.head, self.needle, *self.others, self.question, self.answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMaker:
    """Prompts of one variant: a function of seed, variant, place, trial, tokenizer and filler, and of nothing else.

    Attributes:
        num_spare: tokens left free after the answer, for decoding that goes on.
    """

    tokenizer: PreTrainedTokenizerBase
    variant: Variant
    filler: Filler
    seed: int = 0
    num_spare: int = 0

    def relative(self, *, length: int, depths: Sequence[float], num_trials: int) -> list[PasskeyPrompt]:
        """Return `num_trials` prompts of exactly `length` tokens at each depth, a fraction of the filler.

        A control has no depth, and one set of trials.

        Raises:
            EvalError: the length cannot hold the template, a depth is outside [0, 1], the text is too short or holds
                every value that was tried, or the tokenizer merges the answer into the question, so that no token
                border stands between them.
        """
        if not self.variant.has_place:
            return [self._build(length, None, None, trial) for trial in range(num_trials)]
        return [self._build(length, depth, None, trial) for depth in depths for trial in range(num_trials)]

    def absolute(self, *, length: int, positions: Sequence[int], num_trials: int) -> list[PasskeyPrompt]:
        """Return prompts of exactly `length` tokens with the needle after so many others, where it fits.

        The key does not depend on the length, so that prompts of one position begin alike whatever their length. See
        `relative` for the errors.
        """
        found = (self._try(length, None, position, trial) for position in positions for trial in range(num_trials))
        return [prompt for prompt in found if prompt is not None]

    def shortest(self, num_trials: int) -> int:
        """Return the least length that holds the prompts of all trials of a control without filler."""
        return self.num_spare + max(self._parts(f"-|{trial}").num_tokens for trial in range(num_trials))

    def _build(self, length: int, depth: float | None, position: int | None, trial: int) -> PasskeyPrompt:
        prompt = self._try(length, depth, position, trial)
        assert prompt is not None
        return prompt

    def _try(self, length: int, depth: float | None, position: int | None, trial: int) -> PasskeyPrompt | None:
        """Return one prompt; None if the needle does not fit behind `position` tokens."""
        if depth is not None and not 0.0 <= depth <= 1.0:
            raise EvalError(
                f"passkey: depth {depth} is outside [0, 1]; 0 is right after the instruction, 1 before the question"
            )
        place = f"@{position}" if position is not None else "-" if depth is None else f"{length}|{depth:.6f}"
        for attempt in range(DRAWS):
            parts = self._parts(f"{place}|{trial}" + (f"|{attempt}" if attempt else ""))
            num_filler = length - self.num_spare - parts.num_tokens
            if num_filler < max(0, (position or 0) - len(parts.head)):
                if position is not None:
                    return None
                raise EvalError(
                    f"passkey: length {length} is shorter than the template of {self.variant.name!r}; this tokenizer "
                    f"needs at least {parts.num_tokens + self.num_spare} tokens"
                )
            strand = self.filler.strand(trial, num_filler)
            # The filler of the other variants is ours, and holds no value
            if not strand.documents or not self._occurs(parts.texts.values, strand.ids):
                return self._assemble(parts, strand, length, depth, position, trial)
        raise EvalError(f"passkey: the text holds each of {DRAWS} values of {self.variant.name!r}; give another text")

    def _parts(self, place: str) -> _Parts:
        def draw(what: str, below: int) -> int:
            return drawn(self.seed, self.variant.name, place, what, below)

        texts = self.variant.make(draw)
        if len(set(texts.values)) < len(texts.values):  # two keys of one prompt are equal, once in 10,000 prompts
            return self._parts(f"{place}|again")
        head = encode(self.tokenizer, self.variant.instruction)
        bos = bos_id(self.tokenizer)
        question = encode(self.tokenizer, texts.question)
        asked = encode(self.tokenizer, texts.question + texts.answer)
        if asked[: len(question)] != question or len(asked) == len(question):
            raise EvalError(
                "passkey: this tokenizer merges the answer into the question; no token border lies between them"
            )
        return _Parts(
            head=head if bos is None else [bos, *head],
            needle=encode(self.tokenizer, texts.needle),
            others=[encode(self.tokenizer, other) for other in texts.others],
            question=question,
            answer=asked[len(question) :],
            texts=texts,
        )

    def _occurs(self, values: Sequence[str], ids: list[int]) -> bool:
        text = str(self.tokenizer.decode(ids))
        return any(value in text for value in values)

    def _assemble(
        self, parts: _Parts, strand: Strand, length: int, depth: float | None, position: int | None, trial: int
    ) -> PasskeyPrompt:
        num_filler = len(strand.ids)
        wanted = depth * num_filler if depth is not None else (position or 0) - len(parts.head)
        before = _nearest(strand.breaks, wanted)
        lines = [(before, parts.needle)] if parts.needle else []
        for number, line in enumerate(parts.others, start=1):
            # Between the usual depths, so that at none of them two lines stand side by side
            lines.append((_nearest(strand.breaks, num_filler * (2 * number - 1) / (2 * len(parts.others) + 2)), line))
        ids, at, start = list(parts.head), 0, len(parts.head)
        for where, line in sorted(lines, key=lambda each: each[0]):  # of lines at one place the needle comes first
            ids += strand.ids[at:where]
            if line is parts.needle:
                start = len(ids)
            ids += line
            at = where
        ids += [*strand.ids[at:], *parts.question, *parts.answer]
        return PasskeyPrompt(
            variant=self.variant.name,
            length=length,
            depth=depth,
            position=position,
            actual_depth=before / num_filler if num_filler and parts.needle else None,
            trial=trial,
            key=parts.texts.answer.strip(),
            ids=tuple(ids),
            num_answer=len(parts.answer),
            num_spare=self.num_spare,
            haystack=" + ".join(strand.documents) or None,
            documents=strand.documents,
            needle_start=start,
            needle_end=start + len(parts.needle),
            data_hash=hash_ids([ids]),
        )


def _nearest(places: Sequence[int], wanted: float) -> int:
    """Return the place nearest to the wanted one; of two as near the earlier, of a half token the even one."""
    if isinstance(places, range):
        return min(max(round(wanted), places[0]), places[-1])
    right = bisect_left(places, wanted)
    around = places[max(0, right - 1) : right + 1]
    return min(around, key=lambda place: abs(place - wanted))
