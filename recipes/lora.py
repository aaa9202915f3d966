"""LoRA through peft, with norms and embeddings trained whole: the only importer of peft."""

import warnings
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from recipes.load import RecipeError
from recipes.tuning import Adapter
from rope_ext.registry import nearest


def check_adapter(model: PreTrainedModel, adapter: Adapter) -> None:
    """Refuse an adapter that does not fit a model.

    Raises:
        RecipeError: a target is no linear layer of it, a module to train does not occur, or one is named as both.
    """
    modules = {name.rpartition(".")[2]: module for name, module in cast("nn.Module", model).named_modules() if name}
    known = sorted(name for name in modules if not name.isdecimal())
    linear = [name for name in known if isinstance(modules[name], nn.Linear) and name != "lm_head"]
    for key, names, allowed in (("targets", adapter.targets, linear), ("also_train", adapter.also_train, known)):
        for name in names:
            if name not in allowed:
                raise RecipeError(
                    f"train.adapter.{key}: {name!r} is not a {'linear layer' if key == 'targets' else 'module'} of the "
                    f"model{nearest(name, allowed)} it has: {', '.join(allowed)}"
                )
    both = sorted(set(adapter.targets) & set(adapter.also_train))
    if both:
        raise RecipeError(f"train.adapter: {both[0]!r} is in targets and in also_train; leave it out of one")


def named(model: PreTrainedModel, also_train: tuple[str, ...]) -> list[str]:
    """Return the full names of the modules whose last part is one of these: peft alone takes every ending."""
    names = (name for name, _ in cast("nn.Module", model).named_modules())
    return [name for name in names if name.rpartition(".")[2] in also_train]


def adapted(model: PreTrainedModel, adapter: Adapter, *, seed: int) -> nn.Module:
    """Return the model wrapped with a new adapter, whose first weights follow the seed.

    Raises:
        RecipeError: see `check_adapter`.
    """
    from peft import LoraConfig, get_peft_model

    check_adapter(model, adapter)
    tied = bool(getattr(model.config, "tie_word_embeddings", False)) and "embed_tokens" in adapter.also_train
    tying: dict[str, Any] = {"ensure_weight_tying": True} if tied else {}
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=cast("int", adapter.alpha),
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.targets),
        modules_to_save=named(model, adapter.also_train) or None,
        task_type="CAUSAL_LM",
        **tying,
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers for something by its older name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        torch.manual_seed(seed)
        return cast("nn.Module", get_peft_model(model, config))


def merged(trained: nn.Module) -> None:
    """Put the adapter into the weights of the model that it wraps, which is a plain one again."""
    cast("Any", trained).merge_and_unload()
