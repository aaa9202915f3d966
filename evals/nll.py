"""The one engine under every perplexity: ids in, nats per token out."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from evals.errors import EvalError

ROWS_PER_CHUNK = 512


@torch.inference_mode()
def token_nll(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return the NLL of ids 1.. given all before them: float64 on the CPU, nats, shape (len(ids) - 1,).

    One causal forward; the output head and the softmax run over blocks of rows in fp32, so that no
    (length, vocabulary) matrix ever exists.

    Raises:
        EvalError: fewer than two ids, or a loss that is not finite.
    """
    if len(ids) < 2:
        raise EvalError(f"nll: {len(ids)} ids leave nothing to predict; give at least 2")
    tokens = torch.tensor([ids], device=model.device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
    head = cast("nn.Module", model.get_output_embeddings())
    targets = tokens[0, 1:]
    parts = [
        F.cross_entropy(head(rows).float(), wanted, reduction="none").double().cpu()
        for rows, wanted in zip(hidden.split(ROWS_PER_CHUNK), targets.split(ROWS_PER_CHUNK), strict=True)
    ]
    nll = torch.cat(parts)
    if not torch.isfinite(nll).all():
        position = int((~torch.isfinite(nll)).nonzero()[0]) + 1
        raise EvalError(f"nll: the loss of the token at position {position} is not finite")
    return nll
