"""Runs as they lie on disk, finished or killed: what a report, a log or a reader of another machine has to go by."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals import rows
from evals.rows import Cell, Contrast, Sample
from recipes.aggregate import cells_from
from recipes.compare import CELLS, DIFFERENCES, RUN, SAMPLES
from recipes.finetune import AFTER, BEFORE, EVALS
from recipes.load import RecipeError, read_recipe
from recipes.setting import RECIPE
from recipes.train import CURVE, read_curve
from rope_ext.errors import RopeExtError
from rope_ext.plan import label
from rope_ext.registry import method

UNTRAINED = "untrained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One measurement of a model under some methods: a run of compare, or a stage of a fine-tune.

    Attributes:
        stage: of a fine-tune, in words; empty otherwise. `step` is its number, and `is_between` says that it is neither
            before the training nor after it.
        labels: fingerprint -> how the method is called, without the stage.
        original_context: tokens.
        record: what run.json says; empty if the run was killed before the first method was done.
    """

    folder: Path
    stage: str
    step: int
    is_between: bool
    finished: bool
    original_context: int
    model: str
    labels: dict[str, str]
    cells: tuple[Cell, ...]
    samples: tuple[Sample, ...]
    contrasts: tuple[Contrast, ...]
    record: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A run: its recipe, its measurements, and of a fine-tune the curve.

    Attributes:
        kind: "compare" or "finetune".
        recipe: the keys of its recipe.yaml; `text` is the file.
        record: what run.json says; empty of a run that was killed early.
    """

    path: Path
    kind: str
    recipe: dict[str, Any]
    text: str
    record: dict[str, Any]
    parts: tuple[Part, ...]
    finished: bool
    curve: list[dict[str, float]] = field(default_factory=list[dict[str, float]])


def read_folder(path: Path) -> Folder:
    """Return a run, whatever state it was left in.

    Raises:
        RecipeError: the folder holds no run, or a run that has not measured anything yet.
        EvalError: its rows are damaged.
    """
    if not (path / RECIPE).is_file():
        raise RecipeError(
            f"run: {path} holds no {RECIPE}, so it is no run; name the folder of a run of compare or finetune"
        )
    recipe, record = read_recipe(path / RECIPE), _record(path)
    kind = "finetune" if "train" in recipe else "compare"
    if kind == "compare":
        parts = [_part(path, recipe)]
    else:
        curve = len(read_curve(path / CURVE)) if (path / CURVE).is_file() else 0
        names = (BEFORE, AFTER, "step-" + "[0-9]" * 6)
        found = [each for name in names for each in (path / EVALS).glob(name) if each.is_dir()]
        stages = sorted(found, key=lambda each: _order(each.name))
        parts = [_part(each, recipe, steps=curve) for each in stages]
    parts = [part for part in parts if part is not None]
    if not parts:
        raise RecipeError(f"run: {path} has measured nothing yet; go on with it: rope-ext {kind} --resume --out {path}")
    return Folder(
        path=path,
        kind=kind,
        recipe=recipe,
        text=(path / RECIPE).read_text(encoding="utf-8"),
        record=record,
        parts=tuple(parts),
        finished=record.get("finished") is True,
        curve=read_curve(path / CURVE) if (path / CURVE).is_file() else [],
    )


def _record(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = found if isinstance(found, dict) else {}
    legs = found.get("legs")
    sound = [leg for leg in legs if isinstance(leg, dict)] if isinstance(legs, list) else []
    return found | {"legs": [{**NOTHING, **leg} for leg in sound]}


NOTHING = {"started": "?", "commit": None, "machine": "?", "seconds": "?", "versions": {}, "fingerprints": {}}
"""What a leg of a run that an earlier version wrote may lack."""


def _order(name: str) -> tuple[int, str]:
    return ({BEFORE: 0, AFTER: 2}.get(name, 1), name)


def _part(folder: Path, recipe: dict[str, Any], *, steps: int | None = None) -> Part | None:
    """Return a measurement, of a fine-tune of so many steps if any are given; None if nothing of it is there."""
    if steps is None:
        stage, step = "", 0
    elif folder.name == BEFORE:
        stage, step = UNTRAINED, 0
    elif folder.name == AFTER:
        stage, step = f"trained, {steps} steps", steps
    else:
        step = int(folder.name.rpartition("-")[2])
        stage = f"after {step} steps"
    record, samples = _record(folder), rows.read_samples(folder / SAMPLES)
    finished = record.get("finished") is True and (folder / CELLS).is_file()
    cells = rows.read_cells(folder / CELLS) if finished else [*cells_from(samples, seed=_seed(recipe))]
    if not cells:
        return None
    first = cells[0]
    return Part(
        folder=folder,
        stage=stage,
        step=step,
        is_between=steps is not None and folder.name not in {BEFORE, AFTER},
        finished=finished,
        original_context=int(record.get("original_context") or round(first.context / first.factor)),
        model=first.model,
        labels={c.fingerprint: _called(c) for c in cells},
        cells=tuple(cells),
        samples=tuple(samples),
        contrasts=tuple(rows.read_contrasts(folder / DIFFERENCES)) if finished else (),
        record=record,
    )


def _seed(recipe: dict[str, Any]) -> int:
    asked = recipe.get("eval", recipe)
    seed = asked.get("seed", 0) if isinstance(asked, dict) else 0
    return seed if isinstance(seed, int) else 0


def _called(cell: Cell) -> str:
    try:
        return label(method(cell.method, **cell.method_args))
    except RopeExtError:  # a method that was removed since
        return cell.method


Column = tuple[str, str, int, float | None, int | None]
"""Task, protocol, length, depth and position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What is drawn as one line: a method on a model at a stage, under a name that nothing else in its group has.

    Attributes:
        part: where it was measured first; `parts` are all, as runs may share a method and have other lengths.
    """

    name: str
    fingerprint: str
    parts: tuple[Part, ...]

    @property
    def part(self) -> Part:
        """Where it was measured first."""
        return self.parts[0]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Its cells, of a column that was measured twice the fuller one."""
        found: dict[Column, Cell] = {}
        for part in self.parts:
            for cell in part.cells:
                at = _column(cell)
                if cell.fingerprint == self.fingerprint and (at not in found or _fuller(cell, found[at])):
                    found[at] = cell
        return tuple(found.values())

    def pooled(self, task: str, protocol: str) -> dict[int, Cell]:
        """Return the cells over all places by length."""
        mine = (c for c in self.cells if (c.task, c.protocol, c.depth, c.position) == (task, protocol, None, None))
        return {c.length: c for c in mine}

    def samples(self, task: str, protocol: str, length: int) -> list[Sample]:
        """Return the samples behind a pooled cell."""
        wanted = (self.fingerprint, task, protocol, length)
        every = (
            [s for s in part.samples if (s.fingerprint, s.task, s.protocol, s.length) == wanted] for part in self.parts
        )
        return max(every, key=len)


def _fuller(one: Cell, other: Cell) -> bool:
    return (one.value is not None, one.n) > (other.value is not None, other.n)


def grouped(folders: Sequence[Folder]) -> list[list[Series]]:
    """Return the series of all runs, those together that saw the same tokens; what several runs share once.

    Two measurements belong together if every column that both have (task, protocol, length, place) is of the same
    data, at least one is, and their models came with the same window. What was killed may have a part of the data.
    """
    groups: list[list[tuple[Folder, Part]]] = []
    for folder in folders:
        for part in folder.parts:
            home = next((g for g in groups if all(_alike(part, other) for _, other in g)), None)
            if home is None:
                groups.append([(folder, part)])
            else:
                home.append((folder, part))
    return [[*_named(group)] for group in groups]


def _alike(one: Part, other: Part) -> bool:
    if one.original_context != other.original_context:
        return False
    hashes = [{_column(c): c.data_hash for c in part.cells if c.data_hash} for part in (one, other)]
    shared = hashes[0].keys() & hashes[1].keys()
    different = [column for column in shared if hashes[0][column] != hashes[1][column]]
    if not different:
        return bool(shared)
    if one.finished and other.finished:
        return False
    # One was killed: what it had done has to be among what the other did
    units = [{(s.task, s.protocol, s.length, s.unit): s.data_hash for s in part.samples} for part in (one, other)]
    both = units[0].keys() & units[1].keys()
    less = min(units, key=len)
    return bool(both) and all(units[0][unit] == units[1][unit] for unit in both) and len(both) == len(less)


def _column(cell: Cell) -> Column:
    return (cell.task, cell.protocol, cell.length, cell.depth, cell.position)


def _named(group: Sequence[tuple[Folder, Part]]) -> Iterator[Series]:
    several_models = len({part.model for _, part in group}) > 1
    found: dict[str, tuple[str, Folder, list[Part]]] = {}
    for folder, part in group:
        for fingerprint, called in part.labels.items():
            if fingerprint in found:  # the same weights under the same method on the same tokens: measured twice
                found[fingerprint][2].append(part)
                continue
            about = [*([Path(part.model).name] if several_models else []), *([part.stage] if part.stage else [])]
            found[fingerprint] = (called + (f" ({', '.join(about)})" if about else ""), folder, [part])
    taken: set[str] = set()
    for fingerprint, (name, folder, parts) in found.items():
        choices = [name] if sum(other == name for other, *_ in found.values()) == 1 else []
        choices += [f"{name} [{where}]" for where in (folder.path.name, folder.path, f"{folder.path}, {fingerprint}")]
        chosen = next(choice for choice in choices if choice not in taken and _tells(choice, name, folder, found))
        taken.add(chosen)
        yield Series(name=chosen, fingerprint=fingerprint, parts=tuple(parts))


def _tells(choice: str, name: str, folder: Folder, found: dict[str, tuple[str, Folder, list[Part]]]) -> bool:
    """Whether a choice that names a run by its last word names one alone."""
    alike = {
        other.path for called, other, _ in found.values() if called == name and other.path.name == folder.path.name
    }
    return choice != f"{name} [{folder.path.name}]" or len(alike) == 1
