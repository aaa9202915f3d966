"""LoRA through peft, with norms and embeddings trained whole: the only importer of peft."""

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from recipes.load import RecipeError
from recipes.tuning import Adapter
from rope_ext.registry import nearest


def adapted(model: PreTrainedModel, adapter: Adapter, *, seed: int) -> nn.Module:
    """Return the model wrapped with a new adapter, whose first weights follow the seed.

    Raises:
        RecipeError: a target or a module to train does not occur in the model.
    """
    from peft import LoraConfig, get_peft_model

    known = sorted({name.rpartition(".")[2] for name, _ in cast("nn.Module", model).named_modules() if name})
    for key, names in (("targets", adapter.targets), ("also_train", adapter.also_train)):
        for name in names:
            if name not in known:
                raise RecipeError(
                    f"train.adapter.{key}: the model has no module {name!r}{nearest(name, known)} its modules: "
                    f"{', '.join(n for n in known if not n.isdecimal())}"
                )
    tied = bool(getattr(model.config, "tie_word_embeddings", False)) and "embed_tokens" in adapter.also_train
    tying: dict[str, Any] = {"ensure_weight_tying": True} if tied else {}
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=cast("int", adapter.alpha),
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.targets),
        modules_to_save=list(adapter.also_train) or None,
        task_type="CAUSAL_LM",
        **tying,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cast("nn.Module", get_peft_model(model, config))


def merged(trained: nn.Module) -> None:
    """Put the adapter into the weights of the model that it wraps, which is a plain one again."""
    cast("Any", trained).merge_and_unload()
