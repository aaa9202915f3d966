"""Runs on Weights & Biases, made from what lies on disk; nothing that befalls it there reaches the run itself.

A group is a run of ours. In it every method is a run of theirs: its configuration is the resolved recipe and the
fingerprint, its history a row a length. A fine-tune has `train/*` over the tokens it has seen. One more run holds the
table of all cells and the page of `rope-ext report`. Ids follow from the run: logging it again goes on with them.
"""

import hashlib
import importlib.util
import netrc
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.errors import EvalError
from evals.rows import Cell
from recipes.folders import Folder, Series, grouped, read_folder
from recipes.load import RecipeError
from recipes.page import write_page

PROJECT = "rope-ext"
HOST = "api.wandb.ai"
MARK = "wandb-id.txt"
"""In a run's folder: what its ids are made of, so that a copy or a moved one is the same run."""
FEW_SECONDS = 20.0
"""What a run waits for at most when it ends."""
MANY_SECONDS = 600.0
COLUMNS = (
    *("method", "stage", "task", "protocol", "length", "depth", "position"),
    *("value", "ci_low", "ci_high", "n", "status"),
)


def log_folder(path: Path, *, project: str = PROJECT, curve: bool = True) -> list[str]:
    """Log a run, finished or killed, and return the ids of what was made.

    Args:
        curve: log the steps of a training too, unless that was done as it ran.

    Raises:
        RecipeError: the package is missing, or the folder holds no run.
        EvalError: its rows are damaged.
    """
    wandb, folder = _package(), read_folder(path)
    try:
        return _logged(wandb, folder, project, curve=curve)
    except (RecipeError, EvalError):
        raise
    except Exception as error:  # whatever another's code raises
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RecipeError(
            f"track: wandb failed ({reason}); {path} is whole: log it again: rope-ext log {path}"
        ) from error


def _logged(wandb: Any, folder: Folder, project: str, *, curve: bool) -> list[str]:
    path = folder.path
    page = write_page([path], path / "report.html")
    ids: list[str] = []
    series = [each for group in grouped([folder]) for each in group]
    quiet = wandb.Settings(silent=True, console="off")
    common = {"project": project, "group": group_of(path), "mode": mode(), "resume": "allow", "settings": quiet}
    if folder.kind == "finetune":
        with wandb.init(**common, **training_run(folder.path, folder.recipe)) as run:
            _define(run)
            for line in folder.curve if curve else []:
                run.log(curve_values(line))
            for each in series if run.step <= len(folder.curve) else []:  # not where an earlier call did it
                run.log({"train/tokens": _tokens_at(folder, each), **_values(each.cells, "eval/")})
            ids.append(run.id)
    else:
        for each in series:
            with wandb.init(**common, **_method_run(folder, each)) as run:
                if run.step == 0:  # what an earlier call logged is there
                    _log_method(run, each)
                ids.append(run.id)
    with wandb.init(**common, id=_id(folder.path, "report"), name="report", job_type="report") as run:
        run.log({"cells": wandb.Table(columns=list(COLUMNS), data=_table(series))})
        run.log({"report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
        artifact = wandb.Artifact(f"{_id(folder.path, 'artifact')}-report", type="report")
        artifact.add_file(str(page))
        run.log_artifact(artifact)
        ids.append(run.id)
    return ids


def _package() -> Any:
    if importlib.util.find_spec("wandb") is None:
        raise RecipeError("track: wandb is not installed: pip install wandb; then log this run: rope-ext log RUN")
    import wandb

    return wandb


def mode() -> str | None:
    """Return "offline" where there is no key, so that nothing is asked for; WANDB_MODE decides if it is set."""
    if "WANDB_MODE" in os.environ or os.environ.get("WANDB_API_KEY"):
        return None
    try:
        known = netrc.netrc().authenticators(os.environ.get("WANDB_BASE_URL", HOST).removeprefix("https://"))
    except (OSError, netrc.NetrcParseError):
        known = None
    return None if known else "offline"


def group_of(path: Path) -> str:
    """Return the name of a run's group."""
    return f"{path.resolve().name}-{_id(path, '')[:6]}"


def _id(path: Path, what: str) -> str:
    """Return an id that stays with a run and one of its methods, and with nothing else, wherever the folder goes."""
    mark = path / MARK
    if not mark.is_file():
        mark.write_text(secrets.token_hex(16) + "\n", encoding="utf-8")
    own = mark.read_text(encoding="utf-8").strip()
    return hashlib.sha256(f"{own}\0{what}".encode()).hexdigest()[:16]


def training_run(path: Path, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a fine-tune's own run is begun with."""
    name = f"{Path(str(recipe.get('model'))).name}, {recipe.get('method')}"
    return {"id": _id(path, "train"), "name": name, "job_type": "finetune", "config": {"recipe": dict(recipe)}}


def _method_run(folder: Folder, series: Series) -> dict[str, Any]:
    legs = series.part.record.get("legs", [])
    of_legs = [leg.get("fingerprints", {}) for leg in legs]
    known = next((found[series.fingerprint] for found in of_legs if series.fingerprint in found), {})
    config = {"recipe": folder.recipe, "fingerprint": known, "digest": series.fingerprint}
    return {
        "id": _id(folder.path, series.fingerprint),
        "name": series.name,
        "job_type": "compare",
        "config": config | {"versions": legs[-1]["versions"] if legs else {}},
    }


def _define(run: Any) -> None:
    run.define_metric("train/tokens")
    for prefix in ("train/*", "eval/*"):
        run.define_metric(prefix, step_metric="train/tokens")


def curve_values(line: Mapping[str, float]) -> dict[str, float]:
    """Return a step of training under the names that it is drawn by."""
    return {f"train/{name}": value for name, value in line.items()}


def _tokens_at(folder: Folder, series: Series) -> float:
    done = [line["tokens"] for line in folder.curve if line["step"] <= series.part.step and "tokens" in line]
    return done[-1] if done else 0.0


def _values(cells: Sequence[Cell], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}{cell.task}/{cell.protocol}/{cell.length}": cell.value
        for cell in cells
        if cell.value is not None and (cell.depth, cell.position) == (None, None)
    }


def _log_method(run: Any, series: Series) -> None:
    """Log a row a length, so that lines over length come of themselves, and the values as the run's summary."""
    run.define_metric("*", step_metric="length")
    pooled = [c for c in series.cells if c.value is not None and (c.depth, c.position) == (None, None)]
    for length in sorted({cell.length for cell in pooled}):
        here = [cell for cell in pooled if cell.length == length]
        row: dict[str, float | None] = {"length": length}
        for cell in here:
            name = f"{cell.task}/{cell.protocol}"
            row |= {name: cell.value, f"{name}/low": cell.ci_low, f"{name}/high": cell.ci_high, f"{name}/n": cell.n}
        run.log({name: value for name, value in row.items() if value is not None})
    run.summary.update(_values(series.cells, ""))


def _table(series: Sequence[Series]) -> list[list[Any]]:
    return [
        [each.name, each.part.stage, *(getattr(cell, name) for name in COLUMNS[2:])]
        for each in series
        for cell in each.cells
    ]


class Live:
    """The curve of a training as it runs, told from a thread: whatever happens there costs the training nothing.

    Attributes:
        failure: why it stopped, or None.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], *, project: str = PROJECT) -> None:
        self.failure: str | None = None
        self._lines: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        begin = {
            "project": project,
            "group": group_of(path),
            "mode": mode(),
            "resume": "allow",
            **training_run(path, recipe),
        }
        self._thread = threading.Thread(target=self._tell, args=(begin,), daemon=True)
        self._thread.start()

    def push(self, line: Mapping[str, float]) -> None:
        """Take a step's line; returns at once."""
        self._lines.put(curve_values(line))

    def close(self, seconds: float = FEW_SECONDS) -> bool:
        """Let what was pushed be told, for so long, and return whether it was."""
        self._lines.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.failure = self.failure or f"it did not answer within {seconds:g} s"
        return self.failure is None

    def _tell(self, begin: dict[str, Any]) -> None:
        try:
            with _package().init(**begin) as run:
                _define(run)
                while (line := self._lines.get()) is not None:
                    run.log(line)
        except BaseException as error:  # noqa: BLE001  (of another's code, in a thread of its own)
            self.failure = " ".join(str(error).split())[:200] or type(error).__name__


def log_aside(
    path: Path, *, project: str = PROJECT, curve: bool, say: Callable[[str], None], seconds: float | None = None
) -> None:
    """Log a run in a process of its own, for so long at most, and say in one line if that failed."""
    seconds = MANY_SECONDS if seconds is None else seconds
    words = [sys.executable, "-m", "rope_ext", "log", str(path), "--project", project]
    words += [] if curve else ["--without-curve"]
    environment = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    again = f"the run is whole; log it later: rope-ext log {path}"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False, env=environment)  # noqa: S603  (our own words)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"track: wandb failed ({type(error).__name__}); {again}")
        return
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("rope-ext: ")
        say(f"track: wandb failed ({reason[:300]}); {again}")
