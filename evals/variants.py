"""The retrieval tasks by name: what is hidden, in what, and how it is asked for. Every text is our own.

    classic       one five-digit key in repetitive filler: the only digits there are, the easy form
    text          the same in real text
    distractors   three more lines of the same form, about other numbers
    multi-key     four keys with names, one asked for
    multi-query   four keys with names, two asked for, both needed
    uuid          a key of 32 hexadecimal digits in groups
    needle        a sentence in real text, asked for in other words
    no-needle     control: classic without the line; what is found is a false positive
    needle-only   control: classic without filler; what is missed is not the context's fault

Close relatives elsewhere: classic is Landmark Attention's and Position Interpolation's; multi-key and multi-query are
RULER's niah_multikey_1 and niah_multiquery (arXiv 2404.06654, table 2) with other words, five digits in place of seven
and four keys in one prompt; needle follows NoLiMa's idea (arXiv 2502.05167) that question and needle share few words.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

INSTRUCTION = "A pass key is hidden in the text below. Find it and remember it.\n"
_SEVERAL = "Pass keys are hidden in the text below. Find them and remember them.\n"
NEEDLE = "\nThe {subject} is {value}. Remember it. {value} is the {subject}.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
KEY_DIGITS = 5
_NAMES = ("Ada", "Boris", "Clara", "David", "Emil", "Frida", "Gustav", "Hanna", "Igor", "Julia", "Karl", "Lena")
_COLOURS = ("blue", "green", "red", "yellow", "grey", "white", "brown", "purple")
_THINGS = (
    "carpet", "bucket", "ladder", "barrel", "bench", "basket", "blanket", "boat", "crate", "stove", "statue", "cart",
    "piano", "plough", "anchor", "mattress", "cupboard", "beehive", "wheel", "trunk", "kettle", "saddle", "drum",
)  # fmt: skip

Draw = Callable[[str, int], int]
"""(what for, n) -> a whole number below n, the same for the same trial."""


class Texts(NamedTuple):
    """The texts of one prompt; `values` must not stand anywhere else in it. `needle` is "" if there is none."""

    needle: str
    others: tuple[str, ...]
    question: str
    answer: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One retrieval task.

    Attributes:
        on_text: whether the filler is real text, else a jingle over and over.
        has_needle, has_filler: a control lacks one of them.
        make: the texts of a trial.
    """

    name: str
    make: Callable[[Draw], Texts]
    instruction: str = INSTRUCTION
    on_text: bool = False
    has_needle: bool = True
    has_filler: bool = True

    @property
    def has_place(self) -> bool:
        """Whether there is a depth or a position to vary."""
        return self.has_needle and self.has_filler


def drawn(seed: int, variant: str, place: str, what: str, below: int) -> int:
    """Return a whole number below `below`: a function of a trial's coordinates and nothing else."""
    digest = hashlib.sha256(f"{variant}|{seed}|{place}|{what}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % below


def _digits(draw: Draw, what: str) -> str:
    """Return five digits, the first of them not zero."""
    low = 10 ** (KEY_DIGITS - 1)
    return str(low + draw(what, 9 * low))


def _line(subject: str, value: str) -> str:
    return NEEDLE.format(subject=subject, value=value)


def _single(key: str) -> Texts:
    return Texts(_line("pass key", key), (), QUESTION, f" {key}", (key,))


def _classic(draw: Draw) -> Texts:
    return _single(_digits(draw, "key"))


def _distractors(draw: Draw) -> Texts:
    key = _digits(draw, "key")
    subjects = ("door code", "house number", "account number")
    numbers = tuple(_digits(draw, subject) for subject in subjects)
    others = tuple(_line(subject, number) for subject, number in zip(subjects, numbers, strict=True))
    return Texts(_line("pass key", key), others, QUESTION, f" {key}", (key, *numbers))


def _named(draw: Draw) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return four names, their keys, and the lines that say so."""
    first = draw("names", len(_NAMES))
    names = tuple(_NAMES[(first + i) % len(_NAMES)] for i in range(4))
    keys = tuple(_digits(draw, f"key {i}") for i in range(4))
    return names, keys, tuple(_line(f"pass key of {name}", key) for name, key in zip(names, keys, strict=True))


def _multi_key(draw: Draw) -> Texts:
    names, keys, lines = _named(draw)
    asked = f"pass key of {names[0]}"
    question = f"\nWhat is the {asked}? The {asked} is"
    return Texts(lines[0], lines[1:], question, f" {keys[0]}", keys)


def _multi_query(draw: Draw) -> Texts:
    names, keys, lines = _named(draw)
    asked = f"pass keys of {names[0]} and {names[1]}"
    question = f"\nWhat are the {asked}? The {asked} are"
    return Texts(lines[0], lines[1:], question, f" {keys[0]} and {keys[1]}", keys)


def _uuid(draw: Draw) -> Texts:
    digits = "".join(f"{draw(f'digit {i}', 16):x}" for i in range(32))
    key = "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
    return _single(key)


def _needle(draw: Draw) -> Texts:
    place = f"{_COLOURS[draw('colour', len(_COLOURS))]} {_THINGS[draw('thing', len(_THINGS))]}"
    needle = f"\nBefore she went away, Mila hid her spare key under the {place}.\n"
    question = "\nHow could somebody open Mila's house now? With what lies beneath the"
    return Texts(needle, (), question, f" {place}", (place,))


def _no_needle(draw: Draw) -> Texts:
    return _classic(draw)._replace(needle="")


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(name="classic", make=_classic),
        Variant(name="text", make=_classic, on_text=True),
        Variant(name="distractors", make=_distractors),
        Variant(name="multi-key", make=_multi_key, instruction=_SEVERAL),
        Variant(
            name="multi-query", make=_multi_query, instruction="Pass keys are hidden in the text below. Find them.\n"
        ),
        Variant(name="uuid", make=_uuid),
        Variant(name="needle", make=_needle, instruction="Read the text below; a question follows it.\n", on_text=True),
        Variant(name="no-needle", make=_no_needle, has_needle=False),
        Variant(name="needle-only", make=_classic, has_filler=False),
    )
}


def classic_with(key: str) -> Variant:
    """Return the classic variant with a key that is not drawn."""
    return Variant(name="classic", make=lambda _draw: _single(key))
