"""lm-eval's tasks as a recipe asks for them: presets, our own tasks, and where documents that were made are kept."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from recipes.load import RecipeError
from recipes.schema import Benchmarks

PRESETS = {"native": ("arc_easy", "hellaswag", "piqa", "winogrande"), "native-offline": ("rope_ext_next_line",)}
"""Short-context sanity: what a stretch must not cost. The first needs the Hub, the second nothing."""
TASKS = Path(__file__).parent / "lm_eval_tasks"
OURS = {
    "rope_ext_passkey": "a passkey by length and depth",
    "rope_ext_multi_key": "four keys with owners, one of them asked for",
    "rope_ext_perplexity": "perplexity of the first L tokens of Python sources",
    "rope_ext_next_line": "which of four lines comes next in a Python source",
}
MADE_HERE = {
    "niah_single_1": "RULER: one needle in repeated filler",
    "niah_multikey_2": "RULER: one needle among needles",
    "niah_multikey_3": "RULER: the same with UUIDs",
    "ruler_fwe": "RULER: the most frequent words",
    "ruler_cwe": "RULER: the most common words; its generator may not end",
    "ruler_vt": "RULER: variables traced; its generator may not end",
}
FROM_HUB = {
    "niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue, niah_multiquery": "baber/paul_graham_essays",
    "ruler_qa_squad, ruler_qa_hotpot": "SQuAD, HotpotQA",
    "arc_easy": "allenai/ai2_arc",
    "hellaswag": "Rowan/hellaswag",
    "piqa": "baber/piqa",
    "winogrande": "winogrande",
}
CACHE = "ROPE_EXT_CACHE"


def open_benchmarks(
    asked: Benchmarks, tokenizer: PreTrainedTokenizerBase, *, lengths: Sequence[int], window: int, seed: int
) -> tuple[Any, ...]:
    """Return the columns that a recipe asks for, their requests built and measured; none if it names no tasks.

    Raises:
        RecipeError: lm-eval is not installed, or a length is longer than the window.
        EvalError: as `evals.harness.open_tasks`.
    """
    if not asked.tasks:
        return ()
    harness = import_harness()
    wanted = asked.lengths or tuple(lengths)
    if max(wanted) > window:
        raise RecipeError(
            f"benchmarks.lengths (--lengths): {max(wanted)} tokens do not fit into the window of {window}; ask for a "
            "longer context or shorter lengths"
        )
    if asked.include_path is not None and not Path(asked.include_path).is_dir():
        raise RecipeError(f"benchmarks.include_path (--include-path): {asked.include_path} is no folder of task YAMLs")
    names = [name for task in asked.tasks for name in PRESETS.get(task, (task,))]
    return tuple(
        harness.open_tasks(
            list(dict.fromkeys(names)),
            tokenizer=tokenizer,
            window=window,
            lengths=sorted(set(wanted)),
            limit=asked.limit,
            shots=asked.num_fewshot,
            seed=seed,
            include_path=[TASKS, *([Path(asked.include_path)] if asked.include_path else [])],
            cache=Path(os.environ.get(CACHE, Path.home() / ".cache" / "rope-ext")) / "lm-eval",
        )
    )


def import_harness() -> Any:
    """Return evals.harness, whose library is optional.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        return importlib.import_module("evals.harness")
    except ImportError as error:
        raise RecipeError(
            f"benchmarks: {error.name or error} is missing; install lm-eval: pip install 'rope-ext[bench]'"
        ) from error
