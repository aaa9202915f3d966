"""`--model rope_ext` for lm-eval: any model under any method, and nothing that is longer than its window is cut.

Importing this module registers it, since lm-eval looks for no plugins: `rope-ext lm-eval ...` is `lm_eval ...` with it,
and in Python `import recipes.lm_eval_model` before `lm_eval.simple_evaluate(model="rope_ext", ...)`.
"""

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from evals import harness
from evals.errors import EvalError
from recipes.benchmarks import TASKS
from rope_ext.hf import check_written_as, load_model
from rope_ext.inspection import inspect_config
from rope_ext.patch import extend
from rope_ext.registry import parse_method

NAME = "rope_ext"


class RopeExtLM(harness.StrictLM):
    """A model under a method, for lm-eval.

    Args:
        pretrained: tiny, smollm2, a directory, or a Hub id.
        method: as the command line spells it, NAME:key=value.
        context, factor: the window, one of the two; neither leaves the model at its own.
        base, original_context: for a checkpoint that already carries scaling.
        dtype: of the weights, as torch calls it.
        batch_size: of static methods; those that follow the length take 1.

    Raises:
        RopeExtError, EvalError: bad input.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        method: str = "unscaled",
        context: int | None = None,
        factor: float | None = None,
        base: Any = None,
        original_context: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise EvalError(
                f"lm-eval: model_args {', '.join(sorted(unknown))}: not known; rope_ext takes pretrained, method, "
                "context, factor, base, original_context, dtype, device"
            )
        if not str(batch_size).isdecimal():
            raise EvalError(f"lm-eval: batch_size {batch_size!r}: rope_ext takes a whole number")
        chosen = parse_method(method)
        check_written_as(pretrained, [chosen.name])
        more: dict[str, Any] = {} if dtype is None else {"dtype": _dtype(dtype)}
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # what lm-eval's command line says unless told otherwise
        model, tokenizer = load_model(pretrained, device=device, **more)
        if context is None and factor is None:
            factor = 1.0
        found = inspect_config(
            model.config, chosen, context=context, factor=factor, base=base, original_context=original_context
        )
        # for as long as this model lives
        patch = extend(model, chosen, context=found.context, base=base, original_context=original_context)
        self.patch = contextlib.ExitStack()
        fingerprint = self.patch.enter_context(patch).fingerprint
        self.about = fingerprint.as_dict()
        super().__init__(
            model,
            tokenizer,
            window=found.context,
            batch_size=int(batch_size),
            fingerprint=f"{fingerprint.digest}-{_hash_of(tokenizer)}",
            follows_length=not found.is_static,
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes into its results, and exactly what was measured."""
        return super().get_model_info() | {"rope_ext": self.about}


def _hash_of(tokenizer: Any) -> str:
    """Return a hash of how texts become tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def _dtype(name: str) -> Any:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise EvalError(f"lm-eval: dtype {name!r} is none of torch's; write float32 or bfloat16")
    return found


harness.register(NAME, RopeExtLM)


def run_cli(words: list[str]) -> int:
    """Run lm-eval's own command line with our model and, unless --include_path says others, our tasks."""
    if not words or words[0].startswith("-"):
        words = ["run", *words]
    if words[0] == "run" and "--include_path" not in words and not any(w.startswith("--include_path=") for w in words):
        words = [*words, "--include_path", str(Path(TASKS))]
    if any(word.startswith("--cache_requests") for word in words):
        raise EvalError(
            "lm-eval: --cache_requests knows no lengths, and would give one's prompts to another; leave it out"
        )
    before = sys.argv
    sys.argv = ["lm_eval", *words]
    try:
        return harness.run_cli()
    finally:
        sys.argv = before
