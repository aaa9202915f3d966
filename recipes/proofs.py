"""What a training proves about itself before its first step, and stops for with a reason."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evals.corpora import encode
from evals.nll import token_nll
from recipes.packing import IGNORED
from recipes.ranks import Ranks, gather
from recipes.train import Rows, TrainingError
from recipes.tuning_setting import FinetuneSetting
from rope_ext.patch import extend
from rope_ext.tables import ExtendedRotaryEmbedding


class NativeLoss(NamedTuple):
    """Nats per token on the first tokens of an evaluation text that fit into the original window.

    `promised` says whether the method leaves frequencies within the window as they were, so that the two are equal.
    """

    base: float
    method: float
    promised: bool


def native_loss(setting: FinetuneSetting) -> NativeLoss:
    """Return the loss within the original window, before any step, without the method and under it.

    Raises:
        TrainingError: the method promises that nothing changes there, and it does.
    """
    model, recipe = setting.evaluation.model, setting.recipe
    original = setting.evaluation.geometry.original_context
    ids = _some_text(setting)[:original]
    base = float(token_nll(model, ids).mean())
    with extend(
        model, setting.method, context=recipe.context, base=recipe.base, original_context=recipe.original_context
    ) as patch:
        # A method that follows the length is asked at the length
        plan = setting.method.plan(patch.geometry, context=recipe.context, seq_len=len(ids))
        promised = plan.attention_scale == 1 and torch.equal(plan.inv_freq, patch.geometry.inv_freq)
        found = float(token_nll(model, ids, frequency_key=patch.frequency_key).mean())
    if promised and found != base:
        raise TrainingError(
            f"train: {setting.method.name} leaves the first {len(ids)} tokens as they are, yet their loss went from "
            f"{base:.6f} to {found:.6f}; the model is not computed as its plan says"
        )
    return NativeLoss(base, found, promised)


def _some_text(setting: FinetuneSetting) -> list[int]:
    """Return ids that are measured on anyway: of a document, of a passkey prompt, or of what lm-eval asks."""
    corpus, prompts = setting.evaluation.corpus, setting.evaluation.prompts
    if corpus is not None:
        return list(corpus.documents[0].ids)
    if not any(prompts.values()):
        request = setting.evaluation.benchmarks[0].documents[0].requests[0]
        return encode(setting.evaluation.tokenizer, " ".join(str(each) for each in request.args))
    return list(max((prompt for some in prompts.values() for prompt in some), key=lambda prompt: prompt.length).ids)


def prove_alike(table: ExtendedRotaryEmbedding, ranks: Ranks) -> None:
    """Refuse processes that rotate by different angles: a sharded loader may leave a rank's frequencies unset.

    Raises:
        TrainingError: names the first process that differs.
    """
    values = table.inv_freq.detach().float().cpu().numpy().tobytes()
    mine = (hashlib.sha256(values).hexdigest()[:16], table.plan.attention_scale, table.context)
    everywhere = gather(ranks, mine)
    for rank, theirs in enumerate(everywhere):
        if theirs != everywhere[0]:
            raise TrainingError(
                f"train: process {rank} has other frequencies than process 0 ({theirs} and {everywhere[0]}); they must "
                "be equal: load the same checkpoint everywhere"
            )
    if not torch.equal(table.inv_freq.cpu(), table.plan.inv_freq):
        raise TrainingError("train: the frequencies in the model are not those of its plan; something rounded them")


@torch.no_grad()
def prove_borders(model: PreTrainedModel, rows: Rows, *, is_static: bool, rows_at_once: int = 1) -> None:
    """Prove on a few tokens that documents of a row do not see each other, or that PoSE's chunks do.

    Args:
        rows_at_once: of one forward in training: some kernels find borders in a single row alone.

    Raises:
        TrainingError: the attention in use reads positions or the mask otherwise.
    """
    half, device = 8, model.device
    words = max(3, int(model.config.vocab_size) - 1)
    first, second = torch.arange(2 * half, device=device).remainder(words - 2).add(1).split(half)
    other = first.roll(3) + 1
    one_run = torch.arange(half, device=device)

    def behind(before: Tensor, positions: Tensor, **mask: Tensor) -> Tensor:
        ids, places = (row.expand(rows_at_once, -1) for row in (torch.cat((before, second)), positions))
        # Through the whole model: what is sharded counts on its parts being called in turn
        return model(input_ids=ids, position_ids=places, use_cache=False, **mask).logits[:, half:]

    if rows.pose is not None:
        skipped = torch.cat((one_run, one_run + max(half, rows.context - half)))
        ones = {"attention_mask": torch.ones(rows_at_once, 2 * half, dtype=torch.long, device=device)}
        if torch.equal(behind(first, skipped, **ones), behind(other, skipped, **ones)):
            raise TrainingError(
                f"train: under {model.config._attn_implementation!r} attention the chunks of a row with skipped "  # noqa: SLF001
                "positions do not see each other; load the model with attn_implementation='sdpa'"
            )
        return
    if rows.plan.shape.whole_rows or not is_static:
        return
    packed = torch.cat((one_run, one_run))
    if not torch.equal(behind(first, packed), behind(other, packed)):
        raise TrainingError(
            f"train: under {model.config._attn_implementation!r} attention the documents of a row see each other; load "  # noqa: SLF001
            "the model with attn_implementation='sdpa'"
        )


def prove_scored(rows: Rows, rows_per_forward: int) -> None:
    """Refuse a plan with a forward that scores nothing.

    Raises:
        TrainingError: names the row.
    """
    for start in range(0, len(rows), rows_per_forward):
        some = range(start, min(len(rows), start + rows_per_forward))
        if all(sum(piece.size - 1 for piece in rows.plan.rows[number]) == 0 for number in some):
            raise TrainingError(
                f"train: the forward that begins with row {start} has no token to score (label {IGNORED} everywhere); "
                "raise data.min_tokens"
            )
