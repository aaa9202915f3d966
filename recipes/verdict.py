"""What runs say in a few words: which method goes farthest, how sure that is, and what it costs."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from evals import stats
from evals.metrics import HARNESS
from evals.rows import Cell, Contrast
from recipes.aggregate import contrast_of
from recipes.folders import UNTRAINED, Folder, Series
from recipes.load import RecipeError
from recipes.present import difference_in_words

THRESHOLD = 0.85
UNPAIRED = "not paired: their samples are not here, or not of the same units"


class Threshold(NamedTuple):
    """The share of passkeys that an effective length asks for, and what there is to say of it."""

    share: float
    note: str = ""


def threshold_of(folders: Sequence[Folder], group: Sequence[Series]) -> Threshold:
    """Return what the runs of a group ask for: a share, or a share of what the model as it came scores when shortest.

    Raises:
        RecipeError: a recipe's threshold is no number.
    """
    mine = {part.folder for series in group for part in series.parts}
    asked: set[tuple[float, bool]] = set()
    for folder in folders:
        if any(part.folder in mine for part in folder.parts):
            section = folder.recipe.get("eval") or folder.recipe
            passkey = section.get("passkey") if isinstance(section, dict) else None
            found = (passkey if isinstance(passkey, dict) else {}).get("threshold", THRESHOLD)
            if isinstance(found, bool) or not isinstance(found, int | float):
                raise RecipeError(f"report: {folder.path}: passkey.threshold is {found!r}, which is no share")
            asked.add((float(found), bool((passkey or {}).get("of_base", False))))
    if len(asked) != 1:
        return Threshold(THRESHOLD, f"the runs ask for different thresholds, so that {THRESHOLD:g} is taken")
    share, of_base = asked.pop()
    if not of_base:
        return Threshold(share)
    base = next((series for series in group if is_plain(series)), group[0])
    columns = [(c.task, c.protocol) for c in base.cells]
    pooled = base.pooled("passkey", first_protocol(columns, "passkey") or "")
    first = pooled[min(pooled)].value if pooled else None
    if not first:
        return Threshold(share, f"{share:g} is asked for of what {base.name} scores, which is 0 or unknown")
    return Threshold(share * first, f"{share:g} of the {first:.3g} that {base.name} scores at the shortest length")


def first_protocol(columns: Sequence[tuple[str, str]], task: str) -> str | None:
    """Return the protocol of a task that stands first, which tables and verdicts are of."""
    return next((protocol for name, protocol in columns if name == task), None)


class Reach(NamedTuple):
    """How far a series goes, by the columns that are whole.

    `reached` is None where the shortest length is missed or not known; `stopped` is the length at which its passkeys
    failed, are missing or only partly done, so that nothing beyond is known.
    """

    series: Series
    passkeys: dict[int, Cell]
    reached: int | None
    bound: int | None
    stopped: int | None
    perplexity: dict[int, Cell]


def reaches_of(group: Sequence[Series], threshold: float) -> list[Reach]:
    """Return how far each series goes, by the first protocol of each task.

    A column that a killed run has a part of says nothing beside those that are whole.
    """
    columns = [(c.task, c.protocol) for series in group for c in series.cells]
    whole = {task: _whole(group, task, first_protocol(columns, task) or "") for task in ("passkey", "perplexity")}
    lengths = sorted({n for found in whole["passkey"].values() for n in found})
    reaches: list[Reach] = []
    for series in group:
        passkeys = whole["passkey"][series.name]
        known = list(takewhile(lambda n, passkeys=passkeys: n in passkeys, lengths))
        values = {n: passkeys[n].value or 0.0 for n in known}
        lows = {n: -1.0 if passkeys[n].ci_low is None else passkeys[n].ci_low or 0.0 for n in known}
        reached, bound = (stats.effective_length(each, threshold=threshold) for each in (values, lows))
        open_end = len(known) < len(lengths) and reached == (known[-1] if known else None)
        stopped = lengths[len(known)] if open_end else None
        reaches.append(Reach(series, passkeys, reached, bound, stopped, whole["perplexity"][series.name]))
    return reaches


def _whole(group: Sequence[Series], task: str, protocol: str) -> dict[str, dict[int, Cell]]:
    """Return by series and length the cells that have a value, of as many units as any other's there."""
    pooled = {series.name: series.pooled(task, protocol) for series in group}
    most: dict[int, int] = {}
    for found in pooled.values():
        for length, cell in found.items():
            most[length] = max(most.get(length, 0), cell.n)
    return {
        name: {n: cell for n, cell in found.items() if cell.value is not None and cell.n == most[n]}
        for name, found in pooled.items()
    }


def verdict_of(group: Sequence[Series], original: int, threshold: Threshold) -> list[str]:
    """Return in words which method goes farthest, how sure that is, and what it costs within the trained window."""
    reaches = [reach for reach in reaches_of(group, threshold.share) if reach.passkeys or reach.perplexity]
    if not reaches and any(c.task.startswith(HARNESS) and c.value is not None for s in group for c in s.cells):
        return [
            "Neither perplexity nor passkeys were measured, so that no reach is told; the tables have lm-eval's tasks."
        ]
    if not reaches:
        return ["Nothing was measured to the end, so that there is nothing to say."]
    # At the longest length that all have which have any
    had = [set(reach.perplexity) for reach in reaches if reach.perplexity]
    common = set.intersection(*had) if had else set()
    longest = max(common, default=None)

    def rank(reach: Reach) -> tuple[int, float]:
        cell = reach.perplexity.get(longest) if longest is not None else None
        return (-(reach.reached or 0), cell.value if cell is not None and cell.value is not None else math.inf)

    ordered = sorted(reaches, key=rank)
    best = ordered[0]
    said: list[str] = []
    if any(reach.passkeys for reach in reaches):
        said.append(_passkey_words(ordered, original, threshold, by_perplexity=longest in best.perplexity))
    if longest is not None and longest in best.perplexity:
        said.append(_perplexity_words(best, ordered, longest))
    elif had and not common:
        said.append("No length has whole perplexities of all methods, so that they are not ranked by them.")
    stopped = [f"{reach.series.name} at {reach.stopped:,}" for reach in reaches if reach.stopped is not None]
    if stopped:
        said.append(f"Passkeys failed or are not whole, so that nothing beyond is known: {', '.join(stopped)}.")
    said.append(_native_words(best, reaches, original))
    return said


def _passkey_words(ordered: Sequence[Reach], original: int, threshold: Threshold, *, by_perplexity: bool) -> str:
    best, asked = ordered[0], f"{threshold.share:.3g} asked for at every length"
    asked += f"; {threshold.note}" if threshold.note else ""
    lengths = sorted({n for reach in ordered for n in reach.passkeys})
    if best.reached is None:
        return f"No method is known to find passkeys at the shortest length, {lengths[0]:,} tokens ({asked})."
    ties = [reach.series.name for reach in ordered if reach.reached == best.reached]
    times = best.reached / original
    far = f"{times:g} times the trained window" if times > 1 else "within the trained window"
    far += ", the longest length measured" if best.reached == lengths[-1] else ""
    cell = best.passkeys[best.reached]
    assert cell.value is not None
    share = f"{cell.value:.2f}{_between(cell)} of {cell.n} there; {asked}"
    if len(ties) == 1:
        words = f"{ties[0]} goes farthest: it finds passkeys to {best.reached:,} tokens, {far} ({share})."
    else:
        first = f"; of these {ties[0]} has the lowest perplexity" if by_perplexity else ""
        words = f"{', '.join(ties)} all find passkeys to {best.reached:,} tokens, {far}{first} ({share})."
    if best.bound != best.reached:
        sure = f"{best.bound:,}" if best.bound else f"fewer than {lengths[0]:,}"
        words += f" With the lower ends of the intervals {best.series.name} reaches {sure}."
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
        return f"{words}; {other.series.name}, the lowest of the others, {theirs:.3g} ({UNPAIRED})."
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
        return f"What it costs within the trained window is not known ({UNPAIRED})."
    return (
        f"Within the trained window, at {length:,} tokens, its perplexity is {difference_in_words(found)} percent off "
        f"that of {plain.series.name}, paired, n = {found.n}{_unless_clear(found)}."
    )


def is_plain(series: Series) -> bool:
    """Whether it is the model as it came: unscaled and untrained."""
    return series.part.labels[series.fingerprint] == "unscaled" and series.part.stage in {"", UNTRAINED}


def paired(one: Series, other: Series, task: str, protocol: str, length: int, *, native: bool) -> Contrast | None:
    """Return how one series differs from another on the same units; None if they did not see the same.

    Where the samples are not there, what the run itself wrote of these two is taken.
    """
    ours, theirs = (series.samples(task, protocol, length) for series in (one, other))
    if ours and {(s.unit, s.data_hash) for s in ours} == {(s.unit, s.data_hash) for s in theirs}:
        return contrast_of(ours, theirs, names=(one.name, other.name), native=native, seed=ours[0].seed)
    wanted = (one.fingerprint, other.fingerprint, task, protocol, length)
    written = (c for part in one.parts for c in part.contrasts)
    return next(
        (c for c in written if (c.fingerprint, c.against_fingerprint, c.task, c.protocol, c.length) == wanted), None
    )
