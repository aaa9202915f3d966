"""What runs say in a few words: which method goes farthest, how sure that is, and what it costs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from evals import stats
from evals.rows import Cell, Contrast
from recipes.aggregate import contrast_of
from recipes.folders import UNTRAINED, Folder, Series
from recipes.present import difference_in_words

THRESHOLD = 0.85


def threshold_of(folders: Sequence[Folder]) -> float:
    """Return the accuracy that an effective length asks for, where all runs ask for the same plain one."""
    asked: set[float] = set()
    for folder in folders:
        section = folder.recipe.get("eval", folder.recipe)
        passkey = section.get("passkey", {}) if isinstance(section, dict) else {}
        asked.add(float(passkey.get("threshold", THRESHOLD)) if isinstance(passkey, dict) else THRESHOLD)
    return asked.pop() if len(asked) == 1 else THRESHOLD


def first_protocol(columns: Sequence[tuple[str, str]], task: str) -> str | None:
    """Return the protocol of a task that stands first, which tables and verdicts are of."""
    return next((protocol for name, protocol in columns if name == task), None)


class Reach(NamedTuple):
    """How far a series goes: by passkeys (None of all lengths measured, or not measured), and its perplexities."""

    series: Series
    passkeys: dict[int, Cell]
    reached: int | None
    bound: int | None
    perplexity: dict[int, Cell]


def reaches_of(group: Sequence[Series], threshold: float) -> list[Reach]:
    """Return how far each series goes, by the first protocol of each task."""
    columns = [(c.task, c.protocol) for series in group for c in series.cells]
    found: list[Reach] = []
    for series in group:
        passkeys, perplexity = (
            {n: c for n, c in series.pooled(task, first_protocol(columns, task) or "").items() if c.value is not None}
            for task in ("passkey", "perplexity")
        )
        values = {n: c.value for n, c in passkeys.items() if c.value is not None}
        lows = {n: c.ci_low if c.ci_low is not None else -1.0 for n, c in passkeys.items()}
        reached, bound = (stats.effective_length(each, threshold=threshold) for each in (values, lows))
        found.append(Reach(series, passkeys, reached, bound, perplexity))
    return found


def verdict_of(group: Sequence[Series], original: int, threshold: float) -> list[str]:
    """Return in words which method goes farthest, how sure that is, and what it costs within the trained window."""
    reaches = reaches_of(group, threshold)
    lengths = sorted({n for reach in reaches for n in reach.perplexity})
    longest = lengths[-1] if lengths else None

    def rank(reach: Reach) -> tuple[int, float]:
        cell = reach.perplexity.get(longest) if longest is not None else None
        return (-(reach.reached or 0), cell.value if cell is not None and cell.value is not None else math.inf)

    ordered = sorted((reach for reach in reaches if reach.passkeys or reach.perplexity), key=rank)
    if not ordered:
        return ["Nothing was measured to the end, so that there is nothing to say."]
    best = ordered[0]
    said: list[str] = []
    if best.passkeys:
        said.append(_passkey_words(best, original, threshold))
    if longest is not None and longest in best.perplexity:
        said.append(_perplexity_words(best, ordered, longest))
    said.append(_native_words(best, reaches, original))
    return said


def _passkey_words(best: Reach, original: int, threshold: float) -> str:
    name = best.series.name
    if best.reached is None:
        return f"No method finds {threshold:g} of the passkeys at the shortest length, {min(best.passkeys)} tokens."
    cell = best.passkeys[best.reached]
    assert cell.value is not None
    times = best.reached / original
    far = f", {times:g} times the trained window" if times > 1 else ", within the trained window"
    words = (
        f"{name} goes farthest: it finds passkeys to {best.reached:,} tokens{far} "
        f"({cell.value:.2f}{_between(cell)} of {cell.n} there; {threshold:g} asked for at every length)."
    )
    if best.bound != best.reached:
        sure = f"{best.bound:,}" if best.bound else f"fewer than {min(best.passkeys):,}"
        words += f" With the lower ends of the intervals it is {sure}."
    return words


def _between(cell: Cell) -> str:
    return "" if cell.ci_low is None or cell.ci_high is None else f" [{cell.ci_low:.3g}, {cell.ci_high:.3g}]"


def _perplexity_words(best: Reach, ordered: Sequence[Reach], longest: int) -> str:
    mine = best.perplexity[longest]
    assert mine.value is not None
    words = (
        f"{best.series.name} has a perplexity of {mine.value:.3g}{_between(mine)} at {longest:,} tokens, n = {mine.n}"
    )
    others = sorted(
        (r for r in ordered[1:] if longest in r.perplexity), key=lambda r: r.perplexity[longest].value or math.inf
    )
    if not others:
        return words + "."
    other = others[0]
    found = paired(best.series, other.series, "perplexity", mine.protocol, longest, native=False)
    if found is None:
        theirs = other.perplexity[longest].value
        return f"{words}; {other.series.name}, the lowest of the others, {theirs:.3g} (not on the same units)."
    against = f"{difference_in_words(found)} percent off that of {other.series.name}, the lowest of the others, paired"
    return f"{words}: {against}{_unless_clear(found)}."


def _unless_clear(found: Contrast) -> str:
    unclear = found.ci_low is None or found.ci_high is None or found.ci_low <= 0 <= found.ci_high
    return "; the data do not tell them apart" if unclear else ""


def _native_words(best: Reach, reaches: Sequence[Reach], original: int) -> str:
    """Return what the best costs at the longest measured length within the window, against the model as it came."""
    plain = next((r for r in reaches if is_plain(r.series)), None)
    if plain is not None and plain.series == best.series:
        return "It is the model as it came, so that there is no price within the trained window."
    within = sorted(n for n in best.perplexity if n <= original)
    if plain is None or not within or within[-1] not in plain.perplexity:
        return "What it costs within the trained window was not measured against the model as it came."
    length = within[-1]
    protocol = best.perplexity[length].protocol
    found = paired(best.series, plain.series, "perplexity", protocol, length, native=True)
    if found is None:
        return "What it costs within the trained window was not measured on the same units."
    return (
        f"Within the trained window, at {length:,} tokens, its perplexity is {difference_in_words(found)} percent off "
        f"that of {plain.series.name}, paired, n = {found.n}{_unless_clear(found)}."
    )


def is_plain(series: Series) -> bool:
    """Whether it is the model as it came: unscaled and untrained."""
    return series.part.labels[series.fingerprint] == "unscaled" and series.part.stage in {"", UNTRAINED}


def paired(one: Series, other: Series, task: str, protocol: str, length: int, *, native: bool) -> Contrast | None:
    """Return how one series differs from another on the same units; None if they did not see the same."""
    ours, theirs = (series.samples(task, protocol, length) for series in (one, other))
    if {(s.unit, s.data_hash) for s in ours} != {(s.unit, s.data_hash) for s in theirs}:
        return None
    return contrast_of(ours, theirs, names=(one.name, other.name), native=native, seed=0)
