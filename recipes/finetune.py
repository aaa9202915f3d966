"""A fine-tune from end to end: measure, stretch, train, write the model, measure again on the same tokens."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from evals import rows
from evals.rows import Contrast, Sample
from recipes.aggregate import contrast_of
from recipes.compare import CELLS, DIFFERENCES, RUN, SAMPLES, Advance, Comparison, check_earlier, run_compare
from recipes.environment import commit, machine, versions
from recipes.lora import adapted, merged
from recipes.proofs import NativeLoss, native_loss, prove_alike, prove_borders, prove_scored
from recipes.ranks import once
from recipes.setting import Setting
from recipes.train import (
    CHECKPOINTS,
    CURVE,
    TrainingError,
    last_checkpoint,
    read_curve,
    step_of,
    train_rows,
)
from recipes.tuning_setting import ADAPTER, MODEL, FinetuneSetting, computed_in
from recipes.weights import (
    is_written,
    load_weights,
    numerics,
    prepared,
    round_to,
    save_once,
    sharded_model,
    stored_dtype,
    table_of,
)
from rope_ext.hf import load_model
from rope_ext.patch import Patch, extend
from rope_ext.plan import label, spell

EVALS, BEFORE, AFTER = "evals", "before", "after"
STEP = "step-{:06d}"


class Watch:
    """What is told of a run as it goes; this one tells nothing."""

    def measuring(self, setting: Setting) -> AbstractContextManager[Advance]:
        """Open a measurement and return what is called with its progress."""
        return nullcontext(lambda _cost, _what: None)

    def training(self, setting: FinetuneSetting, done: int) -> AbstractContextManager[Callable[[dict[str, Any]], None]]:
        """Open the training, `done` steps of which are behind, and return what is called with every step's line."""
        return nullcontext(lambda _line: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuned:
    """The outcome of a run.

    Attributes:
        before, after: the comparison of the untrained model with and without the method, and of the trained one.
        between: after the steps of `eval.at`.
        contrasts: of the trained model with the untrained, and with the model as it came.
        curve: a line a step.
    """

    out: Path
    setting: FinetuneSetting
    before: Comparison
    after: Comparison
    between: dict[int, Comparison] = field(default_factory=dict[int, Comparison])
    contrasts: tuple[Contrast, ...]
    curve: list[dict[str, float]]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether any cell failed."""
        return self.before.failed or self.after.failed or any(each.failed for each in self.between.values())


class Run:
    """One fine-tune in its folder. What is done already, by files that are whole, is not done again."""

    def __init__(self, setting: FinetuneSetting, watch: Watch) -> None:
        self.setting, self.watch, self.recipe, self.out = setting, watch, setting.recipe, setting.out
        self.model = setting.evaluation.model
        self.precision, self.device = computed_in(setting), setting.evaluation.model.device
        self.between: dict[int, Comparison] = {}
        self.started = time.monotonic()
        self.began_with = beginnings(setting)
        self.earlier = earlier_legs(self.out / RUN, self.began_with)
        self.native: NativeLoss | None = None

    def go(self) -> Finetuned:
        """Do what is left to do."""
        setting, recipe, ranks = self.setting, self.recipe, self.setting.ranks
        prove_scored(setting.rows, recipe.train.rows_per_device)
        self.model = prepared(self.model, self.precision, liger=recipe.train.liger)
        self.native = native_loss(setting)
        once(ranks, lambda: self._write_run(done=False))
        before = self.measure(self.model, BEFORE)
        if is_written(self.out / MODEL):
            # An earlier leg has written it: what is measured is that, whatever has become of the checkpoints
            load_weights(self.model, self.out / MODEL)
            self._read_back()
        elif recipe.train.steps:
            self._train()
        once(ranks, lambda: self._write_run(done=False))
        after = self.measure(self.model, AFTER, methods=[spell(setting.method)])
        contrasts = self._contrasts(before, after)
        once(ranks, lambda: self._finish(before, after, contrasts))
        seconds = sum(float(str(leg["seconds"])) for leg in [*self.earlier, self._leg()])
        return Finetuned(
            out=self.out,
            setting=setting,
            before=before,
            after=after,
            between=dict(sorted(self.between.items())),
            contrasts=tuple(contrasts),
            curve=read_curve(self.out / CURVE),
            seconds=seconds,
        )

    def measure(self, model: PreTrainedModel, name: str, methods: Sequence[str] | None = None) -> Comparison:
        """Return a comparison of the model as it is, in a folder of its own within the run's."""
        evaluation, ranks = self.setting.evaluation, self.setting.ranks
        asked = evaluation.recipe
        if methods is not None:
            asked = replace(asked, methods=tuple(methods))
            chosen = tuple(m for m in evaluation.methods if spell(m) in methods)
        else:
            chosen = evaluation.methods
        stage = name if name in {BEFORE, AFTER} else name.replace("step-", "step ")
        folder = self.out / EVALS / name
        setting = replace(evaluation, recipe=asked, methods=chosen, model=model, out=folder, stage=stage)
        once(ranks, lambda: folder.mkdir(parents=True, exist_ok=True))
        once(ranks, lambda: check_earlier(folder))
        with self.watch.measuring(setting) as advance, numerics(self.precision, model.device):
            return run_compare(setting, advance=advance)

    def _measured(self, name: str) -> Comparison:
        """Return what has been measured in an earlier leg."""
        folder, evaluation, method = self.out / EVALS / name, self.setting.evaluation, self.setting.method
        cells = tuple(rows.read_cells(folder / CELLS))
        return Comparison(
            out=folder,
            recipe=replace(evaluation.recipe, methods=(spell(method),)),
            cells=cells,
            contrasts=(),
            labels={cell.fingerprint: label(method) for cell in cells},
            original_context=evaluation.geometry.original_context,
            ratios={},
            seconds=0.0,
        )

    def _extend(self, model: PreTrainedModel) -> Patch:
        recipe = self.recipe
        return extend(
            model,
            self.setting.method,
            context=recipe.context,
            base=recipe.base,
            original_context=recipe.original_context,
            sharded=self.setting.is_sharded and recipe.train.parallel.fsdp > 1,
        )

    def _train(self) -> None:
        """Train what is left of the steps and write the model; `self.model` is the trained one then, unpatched."""
        setting, recipe, ranks = self.setting, self.recipe, self.setting.ranks
        last = last_checkpoint(self.out / CHECKPOINTS)
        finished = last is not None and step_of(last) == recipe.train.steps
        whole = self.model
        trained: nn.Module | None = None
        if recipe.train.parallel.fsdp > 1 and not finished:
            # The whole model has been measured, and makes room for its shards; `_gathered` loads it anew
            cast("nn.Module", self.model).to("meta")
            whole = sharded_model(setting, self.precision)
        patch = self._extend(whole)
        prove_alike(table_of(whole), ranks)
        rows_at_once = recipe.train.rows_per_device
        prove_borders(whole, setting.rows, is_static=table_of(whole).is_static, rows_at_once=rows_at_once)
        if recipe.train.adapter is not None:
            trained = adapted(whole, recipe.train.adapter, seed=recipe.seed)
        if not (finished and setting.is_sharded):
            with self.watch.training(setting, step_of(last) if last else 0) as advance:
                train_rows(
                    whole,
                    setting.rows,
                    recipe,
                    self.out,
                    trained=trained,
                    ranks=ranks,
                    begin=lambda: prove_alike(table_of(whole), ranks),
                    measure=lambda step: self._between(whole, step),
                    advance=advance,
                )
        if setting.is_sharded:
            whole, patch = self._gathered()
        self._write_model(whole, trained)
        patch.undo()
        self.model = whole
        self._read_back()

    def _read_back(self) -> None:
        """Read what an earlier leg has measured in the midst of training."""
        for step in self.recipe.eval.at:
            name = STEP.format(step)
            if step not in self.between and (self.out / EVALS / name / CELLS).is_file():
                self.between[step] = self._measured(name)

    def _between(self, model: PreTrainedModel, step: int) -> None:
        """Measure in the midst of training, and leave model and random numbers as they were."""
        was_training = model.training
        cast("nn.Module", model).eval()
        table_of(model).patch.undo()
        try:
            with torch.random.fork_rng():
                self.between[step] = self.measure(model, STEP.format(step), methods=[spell(self.setting.method)])
        finally:
            self._extend(model)
            cast("nn.Module", model).train(was_training)

    def _gathered(self) -> tuple[PreTrainedModel, Patch]:
        """Return a whole model loaded anew, extended, with the weights of the last checkpoint."""
        last = last_checkpoint(self.out / CHECKPOINTS)
        if last is None or step_of(last) != self.recipe.train.steps:
            raise TrainingError(f"train: {self.out / CHECKPOINTS} lacks the checkpoint of the last step; --resume")
        loaded, _ = load_model(self.recipe.model, device=str(self.device))
        model = prepared(loaded, self.precision, liger=self.recipe.train.liger)
        load_weights(model, last)
        return model, self._extend(model)

    def _write_model(self, model: PreTrainedModel, trained: nn.Module | None) -> None:
        """Write what was trained, rounded as it is stored, once."""
        ranks, recipe, tokenizer = self.setting.ranks, self.recipe, self.setting.evaluation.tokenizer
        adapter = recipe.train.adapter
        if trained is not None:
            once(ranks, lambda: save_once(cast("PreTrainedModel", trained), self.out / ADAPTER))
            if adapter is not None and not adapter.merge:
                return  # what is measured is the adapter on its base, as it was written
            merged(trained)
        stored = stored_dtype(recipe.model)
        round_to(model, stored)
        broken = [name for name, p in cast("nn.Module", model).named_parameters() if not bool(torch.isfinite(p).all())]
        if broken:
            raise TrainingError(
                f"train: after the last step {len(broken)} weights are not finite in {stored} ({broken[0]}, ...), so "
                "that no model is written; begin a new run with a lower train.lr"
            )
        form = {
            "tokenizer": tokenizer,
            "allow_approximate": recipe.allow_approximate,
            "format": recipe.format,
        }
        once(ranks, lambda: save_once(model, self.out / MODEL, dtype=stored, **form))

    def _contrasts(self, before: Comparison, after: Comparison) -> list[Contrast]:
        """Return how the trained model differs from the untrained one, and from the model as it came."""
        scored = {c.out: rows.read_samples(c.out / SAMPLES) for c in (before, after)}
        [trained] = after.labels
        method = spell(self.setting.method)
        original, seed = self.setting.evaluation.geometry.original_context, self.recipe.eval.seed
        mine = _by_measure(scored[after.out], trained)
        found: list[Contrast] = []
        for fingerprint, name in zip(before.labels, before.recipe.methods, strict=True):
            theirs = _by_measure(scored[before.out], fingerprint)
            for measure in mine.keys() & theirs.keys():
                names = (f"{method} (after)", f"{name} (before)")
                seen = max(before.recipe.lengths) if measure[0] == "nll-by-position" else measure[2]
                each = contrast_of(mine[measure], theirs[measure], names=names, native=seen <= original, seed=seed)
                if each is not None:
                    found.append(each)
        return sorted(found, key=lambda c: (c.against, c.task, c.protocol, c.length))

    def _finish(self, before: Comparison, after: Comparison, contrasts: Sequence[Contrast]) -> None:
        rows.write(self.out / CELLS, [*before.cells, *after.cells])
        rows.write(self.out / DIFFERENCES, contrasts)
        self._write_run(done=True)

    def _leg(self) -> dict[str, object]:
        seconds = time.monotonic() - self.started
        return {
            "started": (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds"),
            "commit": commit(),
            "versions": versions(),
            "machine": machine(self.device),
            "processes": self.setting.ranks.world,
            "seconds": round(seconds, 1),
        }

    def _write_run(self, *, done: bool) -> None:
        """Write what a reader needs to trust the run: what was trained on, what was proven, and every leg."""
        setting, plan = self.setting, self.setting.plan
        record = {
            "finished": done,
            "original_context": setting.evaluation.geometry.original_context,
            "precision": self.precision,
            "began_with": self.began_with,
            "data": {
                "rows": len(plan.rows),
                "row_tokens": plan.shape.row_tokens,
                "hash": setting.rows.digest(),
                "padding": round(plan.padding(), 4),
                "tokens_by_length": plan.lengths(),
                "sources": [
                    {"name": s.name, "documents": len(s.lengths), "tokens": int(s.lengths.sum()), "hash": s.data_hash}
                    for s in setting.sources
                ],
                "epochs": [round(each, 4) for each in plan.epochs],
            },
            "native_loss": self.native._asdict() if self.native else None,
            "legs": [*self.earlier, self._leg()],
        }
        rows.write_whole(self.out / RUN, json.dumps(record, indent=2) + "\n")


def run_finetune(setting: FinetuneSetting, *, watch: Watch | None = None) -> Finetuned:
    """Train what is not yet trained, measure what is not yet measured, and return the outcome.

    Raises:
        TrainingError: a proof failed, or the loss is not finite.
        RopeExtError, EvalError: what patching, writing and measuring raise.
    """
    return Run(setting, watch or Watch()).go()


def beginnings(setting: FinetuneSetting) -> dict[str, str]:
    """Return hashes of all that a run depends on, under the words that say what it is."""
    recipe, evaluation = setting.recipe, setting.evaluation
    prompts = sorted(prompt.data_hash for some in evaluation.prompts.values() for prompt in some)
    measured = (evaluation.corpus.data_hash if evaluation.corpus else "", prompts)
    with extend(
        evaluation.model,
        setting.method,
        context=recipe.context,
        base=recipe.base,
        original_context=recipe.original_context,
    ) as patch:
        weights = patch.fingerprint.weights
    found = {
        "rows": setting.rows.digest(),
        "recipe": repr(recipe),
        "evaluation texts": repr(measured),
        "model": weights,
    }
    return {what: hashlib.sha256(value.encode()).hexdigest()[:16] for what, value in found.items()}


def earlier_legs(path: Path, began_with: dict[str, str]) -> list[dict[str, object]]:
    """Return the legs of a run that goes on; none if it has not begun.

    Raises:
        TrainingError: the record is damaged, or something is not what the run began with.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        legs, then = record["legs"], dict(record["began_with"])
        _ = [float(leg["seconds"]) for leg in legs]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrainingError(f"resume: {path} is not a run's record ({error}); remove it to go on without it") from error
    other = [what for what, value in began_with.items() if then.get(what) != value]
    if other:
        raise TrainingError(
            f"resume: {path.parent} began with another {', another '.join(other)}: what is there would be mixed with "
            "something else; put it back as it was, or begin a new run"
        )
    return legs


def _by_measure(samples: Sequence[Sample], fingerprint: str) -> dict[tuple[str, str, int], list[Sample]]:
    found: dict[tuple[str, str, int], list[Sample]] = {}
    for sample in samples:
        if sample.fingerprint == fingerprint:
            found.setdefault((sample.task, sample.protocol, sample.length), []).append(sample)
    return found
