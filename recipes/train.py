"""The brief fine-tune itself: transformers' Trainer over planned rows, with a loss that never holds the logits.

The optimizer step does not depend on how it is divided: rows come in planned order, a step's loss is the mean over the
scored tokens of all its rows, whatever is accumulated and however many processes share it.
"""

import hashlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from evals.rows import write_whole
from recipes.load import RecipeError
from recipes.loss import loss_without_logits
from recipes.packing import Plan, pose_positions
from recipes.ranks import Ranks, ToldElsewhereError
from recipes.recompute import recomputed_activations
from recipes.tuning import FinetuneRecipe, Pose, Train

CURVE, CHECKPOINTS = "train.jsonl", "checkpoints"
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine_with_min_lr"}
STATE, SCHEDULER, OPTIMIZER, SHARDS = "trainer_state.json", "scheduler.pt", "optimizer.pt", "optimizer_shards"


class TrainingError(RecipeError):
    """A training that cannot go on; the text says at which step and why."""


class Rows(Dataset[dict[str, Tensor]]):
    """A plan's rows as the model takes them, each a function of its number.

    Rows of whole documents come without an attention mask, so that transformers finds the borders in the positions;
    PoSE's come with a mask of ones, so that it does not take the skips for borders.
    """

    def __init__(self, plan: Plan, *, pose: Pose | None, context: int, seed: int) -> None:
        self.plan, self.pose, self.context, self.seed = plan, pose, context, seed

    def __len__(self) -> int:
        return len(self.plan.rows)

    def digest(self) -> str:
        """Return 16 hex digits of a SHA-256: equal where the same is trained on at the same positions, in one order."""
        if self.pose is None:
            return self.plan.digest()
        return hashlib.sha256(repr((self.plan.digest(), self.pose, self.context, self.seed)).encode()).hexdigest()[:16]

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self.plan.row(number)
        positions = row.positions
        mask: dict[str, Tensor] = {}
        if self.pose is not None:
            rng = np.random.default_rng([self.seed, number])
            positions = pose_positions(len(row.ids), chunks=self.pose.chunks, context=self.context, rng=rng)
            mask["attention_mask"] = torch.ones(len(row.ids), dtype=torch.long)
        values = {"input_ids": row.ids, "position_ids": positions, "labels": row.labels}
        return {name: torch.from_numpy(value) for name, value in values.items()} | mask


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows of one length as a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def precision_of(train: Train, device: torch.device) -> str:
    """Return what "auto" stands for on a device."""
    if train.precision != "auto":
        return train.precision
    return "bf16" if device.type == "cuda" else "fp32"


def accumulation(train: Train, world: int) -> int:
    """Return how many forwards of every process make up one optimizer step.

    Raises:
        RecipeError: the rows of a step cannot be shared out evenly.
    """
    parallel = train.parallel
    alike = parallel.context * parallel.ulysses  # processes that see the same row
    if world % alike:
        raise RecipeError(
            f"train.parallel: rows cut over {alike} processes do not go into {world}; start a multiple of {alike}"
        )
    if parallel.fsdp > 1 and (world // alike) % parallel.fsdp:
        raise RecipeError(
            f"train.parallel.fsdp: {parallel.fsdp} processes to shard over do not go into {world}; start a multiple, "
            "or with one process leave it out: torchrun --nproc-per-node N -m rope_ext finetune ..."
        )
    together = train.rows_per_device * (world // alike)
    if train.rows_per_step % together:
        raise RecipeError(
            f"train.rows_per_step: {train.rows_per_step} rows cannot be shared evenly by {world // alike} processes of "
            f"rows_per_device: {train.rows_per_device}; give a multiple of {together}"
        )
    return train.rows_per_step // together


def arguments(
    recipe: FinetuneRecipe, out: Path, *, row_tokens: int, device: torch.device, ranks: Ranks
) -> TrainingArguments:
    """Return the Trainer's settings for a recipe."""
    train, on_cpu = recipe.train, device.type == "cpu"
    given: dict[str, Any] = {
        "output_dir": str(out / CHECKPOINTS),
        "max_steps": train.steps,
        "per_device_train_batch_size": train.rows_per_device,
        "gradient_accumulation_steps": accumulation(train, ranks.world),
        "learning_rate": train.lr,
        "lr_scheduler_type": SCHEDULES[train.schedule],
        "lr_scheduler_kwargs": {"min_lr_rate": train.min_lr_fraction} if train.schedule == "cosine" else {},
        "warmup_steps": train.warmup_steps,
        "adam_beta1": train.betas[0],
        "adam_beta2": train.betas[1],
        "adam_epsilon": train.eps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.clip,
        # A sharded model computes in bf16 by its own policy
        "bf16": precision_of(train, device) == "bf16" and train.parallel.fsdp == 1,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": train.save_every or train.steps,
        "save_total_limit": train.keep,
        # Trainer refuses to save the optimizer of a model that was sharded as it was loaded; BriefTrainer does it
        "save_only_model": train.parallel.fsdp > 1,
        "report_to": [name for name in recipe.track.report_to if name != "wandb"] or "none",
        "run_name": out.name,
        "seed": recipe.seed,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
        "ddp_find_unused_parameters": False,
    }
    if ranks.world > 1 and on_cpu:
        given["ddp_backend"] = "gloo"
    if train.parallel.context > 1 or train.parallel.ulysses > 1:
        given |= _cut_rows(train, row_tokens, ranks.world)
    made = TrainingArguments(**given)
    made._n_gpu = min(1, made.n_gpu)  # noqa: SLF001  (several GPUs in one process would be DataParallel, without a word)
    return made


def _cut_rows(train: Train, row_tokens: int, world: int) -> dict[str, Any]:
    """Return the Trainer's settings for processes that share rows. Not run on a GPU yet, and there is no CPU path."""
    from accelerate import ParallelismConfig  # pyright: ignore[reportMissingTypeStubs]
    from accelerate.utils import DeepSpeedSequenceParallelConfig  # pyright: ignore[reportMissingTypeStubs]

    parallel = train.parallel
    if parallel.ulysses > 1:
        return {
            "parallelism_config": ParallelismConfig(
                sp_size=parallel.ulysses,
                sp_backend="deepspeed",
                sp_handler=DeepSpeedSequenceParallelConfig(
                    sp_seq_length=row_tokens, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
                ),
            ),
            "deepspeed": {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            },
        }
    # accelerate takes context parallel together with its own FSDP2 alone
    return {
        "parallelism_config": ParallelismConfig(cp_size=parallel.context, dp_shard_size=world // parallel.context),
        "fsdp": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "state_dict_type": "FULL_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
    }


class BriefTrainer(Trainer):
    """Trainer over rows in planned order, which resumes a model that was sharded as it was loaded as well."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(cast("Rows", train_dataset if train_dataset is not None else self.train_dataset))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights, and of a sharded model what Trainer would leave out: its optimizer and schedule."""
        if self._is_sharded:
            self._reshard()
        super().save_model(output_dir, _internal_call)
        if self._is_sharded and _internal_call and output_dir is not None:
            from transformers.distributed.checkpoint import save_optimizer_distributed

            save_optimizer_distributed(self.model, self.optimizer, str(Path(output_dir) / SHARDS))
            if self.args.should_save:
                torch.save(cast("Any", self.lr_scheduler).state_dict(), Path(output_dir) / SCHEDULER)
            self._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._is_sharded or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        from transformers.distributed.checkpoint import load_optimizer_distributed

        load_optimizer_distributed(self.model, self.optimizer, str(Path(checkpoint) / SHARDS))
        cast("Any", self.lr_scheduler).load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._is_sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        self._reshard()
        state: Any = weights_in(Path(resume_from_checkpoint)) if self.args.process_index == 0 else {}
        set_model_state_dict(cast("nn.Module", self.model), state, options=options)

    def _reshard(self) -> None:
        """Let go of whole weights that a forward has left, which the optimizer does not know."""
        for module in cast("nn.Module", self.model).modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def _is_sharded(self) -> bool:
        return bool(getattr(self.model, "is_distributed_loading_by_transformers", False))


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's safetensors files."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


class _Curve(TrainerCallback):
    """Writes a line a step, and stops on a loss that is not finite."""

    def __init__(
        self, path: Path, tokens_per_step: int, writes: bool, advance: Callable[[dict[str, Any]], None]
    ) -> None:
        self.path, self.tokens_per_step, self.writes, self.advance = path, tokens_per_step, writes, advance

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        line = {
            "step": state.global_step,
            "tokens": state.global_step * self.tokens_per_step,
            **{key: float(logs[key]) for key in ("loss", "grad_norm", "learning_rate") if key in logs},
        }
        bad = [key for key in ("loss", "grad_norm") if not math.isfinite(line.get(key, 0.0))]
        if bad:
            if not self.writes:
                raise ToldElsewhereError
            raise TrainingError(
                f"train: {bad[0]} is {line[bad[0]]} at step {state.global_step}; begin a new run with a lower train.lr "
                "or a longer train.warmup_steps: a checkpoint may hold the step that broke it"
            )
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.advance(line)


class _Between(TrainerCallback):
    """Proves what is left to prove once the model is wrapped, and measures after some of the steps."""

    def __init__(self, steps: tuple[int, ...], begin: Callable[[], None], measure: Callable[[int], None]) -> None:
        self.steps, self.begin, self.measure = steps, begin, measure

    def on_train_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if state.global_step in self.steps:
            self.measure(state.global_step)


def train_rows(
    model: PreTrainedModel,
    rows: Rows,
    recipe: FinetuneRecipe,
    out: Path,
    *,
    trained: nn.Module | None = None,
    ranks: Ranks,
    begin: Callable[[], None],
    measure: Callable[[int], None],
    advance: Callable[[dict[str, Any]], None] = lambda _line: None,
) -> None:
    """Train a model on rows, from the last whole checkpoint in the run's folder if there is one.

    Args:
        trained: what wraps the model to be trained, if it has an adapter.
        begin: called when the model has been wrapped and nothing trained yet.
        measure: called with a step of `eval.at` when it is done.
        advance: called with every line of the curve.

    Raises:
        TrainingError: the loss or the gradient's norm is not finite, or torch has failed, as out of memory.
    """
    train = recipe.train
    device = model.device
    settings = arguments(recipe, out, row_tokens=rows.plan.shape.row_tokens, device=device, ranks=ranks)
    last = last_checkpoint(out / CHECKPOINTS)
    if ranks.is_first:
        _shorten(out / CURVE, step_of(last) if last else 0)
    own_cache = model.config.use_cache
    row_tokens = rows.plan.shape.row_tokens
    with ExitStack() as stack:
        stack.enter_context(loss_without_logits(model, rows=train.loss_rows))
        stack.enter_context(recomputed_activations(model, train.activation_checkpointing))
        curve = _Curve(out / CURVE, train.rows_per_step * row_tokens, writes=ranks.is_first, advance=advance)
        trainer = BriefTrainer(
            model=trained if trained is not None else model,
            args=settings,
            train_dataset=rows,
            data_collator=collate,
            callbacks=[_Between(recipe.eval.at, begin, measure), curve],
        )
        for noisy in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(noisy)
        try:
            trainer.train(resume_from_checkpoint=str(last) if last else None)
        except (RuntimeError, MemoryError, SafetensorError) as error:  # out of memory is a RuntimeError in torch
            reason = (str(error).strip() or type(error).__name__).split("\n")[0][:300]
            if any(word in reason for word in ("gloo", "NCCL", "Connection closed")):
                raise TrainingError(
                    f"train: another process has failed, and says why ({reason[:80]}); go on with --resume"
                ) from error
            raise TrainingError(
                f"train: {reason}; --resume goes on from the last checkpoint (if memory ran out: a recipe with less of "
                "train.rows_per_device, or with activation_checkpointing, takes the same steps)"
            ) from error
        finally:
            model.config.use_cache = own_cache
            trainer.accelerator.free_memory()
            cast("nn.Module", model).eval()


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last whole checkpoint in a folder: its state is what is written last. A torn one is passed over.

    One without weights, optimizer, schedule or random numbers is no checkpoint: training from it would be another.
    """
    whole: list[Path] = []
    for path in folder.glob("checkpoint-*"):
        try:
            done = json.loads((path / STATE).read_text(encoding="utf-8"))["global_step"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        optimizer = (path / OPTIMIZER).is_file() and zipfile.is_zipfile(path / OPTIMIZER)
        optimizer = optimizer or any(child.is_dir() for child in path.iterdir())  # shards of it
        rest = (path / SCHEDULER).is_file() and any(path.glob("rng_state*"))
        if path.name == f"checkpoint-{done}" and optimizer and rest and are_whole(path):
            whole.append(path)
    return max(whole, key=step_of, default=None)


def are_whole(folder: Path) -> bool:
    """Return whether a folder holds weights, and none of their files is cut short."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        for file in files:
            with safe_open(file, framework="pt"):
                pass
    except (OSError, SafetensorError):
        return False
    return bool(files)


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint was written after."""
    return int(checkpoint.name.rpartition("-")[2])


def read_curve(path: Path) -> list[dict[str, float]]:
    """Return the lines of a curve, as far as they are whole."""
    return [*_lines(path)]


def _lines(path: Path) -> Iterator[dict[str, float]]:
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"step", "loss"} <= line.keys():
                yield line


def _shorten(path: Path, step: int) -> None:
    """Leave of an earlier leg's curve what lies before the checkpoint that training goes on from."""
    if path.is_file():
        kept = [line for line in _lines(path) if line["step"] <= step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
