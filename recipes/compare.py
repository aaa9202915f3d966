"""Methods x lengths x evals on one model, every scored unit on disk before the next begins."""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals import corpora, passkey, rows, stats
from evals.corpora import Corpus
from evals.errors import EvalError
from evals.passkey import PasskeyPrompt
from evals.perplexity import PROTOCOL, prefix_nll
from recipes.environment import commit, machine, versions
from recipes.load import RecipeError, make_recipe, read_recipe, write_recipe
from recipes.schema import CompareRecipe
from rope_ext.geometry import RopeGeometry
from rope_ext.hf import load_model, read_geometry, resolve_context
from rope_ext.patch import Fingerprint, Patch, extend
from rope_ext.plan import Method, hyperparameters
from rope_ext.registry import parse_method

TOKENS_PER_FORWARD = 16_384
SAMPLES, CELLS, RECIPE, RUN = "samples.jsonl", "cells.jsonl", "recipe.yaml", "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that is checked before the first forward: the model, the data, the methods and where results go."""

    recipe: CompareRecipe
    out: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: RopeGeometry
    methods: tuple[Method, ...]
    corpus: Corpus | None
    prompts: dict[int, list[PasskeyPrompt]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome: cells in the order of methods, and how each fingerprint is called."""

    out: Path
    recipe: CompareRecipe
    cells: tuple[rows.Cell, ...]
    labels: dict[str, str]
    original_context: int
    ratios: dict[str, list[float]]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether any cell failed."""
        return any(cell.status != "ok" for cell in self.cells)

    def pooled(self, task: str) -> dict[tuple[str, int], rows.Cell]:
        """Return the cells of a task over all depths, by (fingerprint, length)."""
        return {(c.fingerprint, c.length): c for c in self.cells if c.task == task and c.depth is None}

    def effective_lengths(self) -> dict[str, int | None]:
        """Return each method's passkey effective length by fingerprint; a method without passkey cells is absent."""
        lengths: dict[str, dict[int, float]] = {}
        for (fingerprint, length), cell in self.pooled("passkey").items():
            lengths.setdefault(fingerprint, {})[length] = cell.value if cell.value is not None else 0.0
        return {fingerprint: stats.effective_length(values) for fingerprint, values in lengths.items()}


def prepare(recipe: CompareRecipe, out: Path | None, *, resume: bool = False) -> Setting:
    """Load and check everything, then make the run's folder.

    Raises:
        RopeExtError, EvalError: any bad input; nothing was written then.
    """
    methods = tuple(parse_method(text) for text in recipe.methods)
    if not recipe.perplexity.documents and not (recipe.passkey.trials and recipe.passkey.depths):
        raise RecipeError("recipe: nothing to measure; ask for perplexity.documents or passkey.trials above 0")
    model, tokenizer = load_model(recipe.model)
    geometry = read_geometry(model.config, base=recipe.base)
    factor = 4.0 if recipe.context is None else None
    context = resolve_context(geometry, context=recipe.context, factor=factor)
    lengths = recipe.lengths or default_lengths(geometry.original_context, context)
    for method in methods:
        method.plan(geometry, context=context, seq_len=context)  # refuses here what it would refuse on the model
    recipe = replace(recipe, context=context, lengths=tuple(sorted(set(lengths))))

    corpus = None
    if recipe.perplexity.documents:
        documents = _documents(recipe.data)
        corpus = corpora.tokenise(
            documents,
            tokenizer,
            name=recipe.data,
            num_tokens=max(recipe.lengths),
            max_documents=recipe.perplexity.documents,
        )
    prompts: dict[int, list[PasskeyPrompt]] = {}
    if recipe.passkey.trials:
        for length in recipe.lengths:
            prompts[length] = passkey.build_trials(
                tokenizer,
                length=length,
                depths=recipe.passkey.depths,
                num_trials=recipe.passkey.trials,
                seed=recipe.seed,
            )
    return Setting(
        recipe=recipe,
        out=_open_run(recipe, out, resume=resume),
        model=model,
        tokenizer=tokenizer,
        geometry=geometry,
        methods=methods,
        corpus=corpus,
        prompts=prompts,
    )


def default_lengths(original: int, context: int) -> tuple[int, ...]:
    """Return the original window, its doublings below the context, and the context."""
    lengths = [original]
    while lengths[-1] * 2 <= context:
        lengths.append(lengths[-1] * 2)
    return tuple(sorted({*lengths, context}))


def _documents(data: str) -> list[corpora.Document]:
    if data == "python":
        return corpora.python_sources("held-out")
    return corpora.python_sources("all") if data == "python-all" else corpora.read_documents(Path(data).expanduser())


def _open_run(recipe: CompareRecipe, out: Path | None, *, resume: bool) -> Path:
    if out is None:
        slug = Path(recipe.model).name.lower()
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{stamp}-compare-{slug}"
    try:
        if resume:
            return out
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise RecipeError(f"out: {out} is not empty and no run is overwritten; name a new folder, or add --resume")
        write_recipe(recipe, out / RECIPE)
    except OSError as error:
        raise RecipeError(f"out: {out} cannot be written: {error.strerror}") from error
    return out


def resumed_recipe(out: Path) -> CompareRecipe:
    """Return the recipe of a run that is to go on.

    Raises:
        RecipeError: the folder holds no run.
    """
    if not (out / RECIPE).is_file():
        raise RecipeError(f"resume: {out} holds no {RECIPE}, so there is no run to go on with")
    return make_recipe(read_recipe(out / RECIPE), where=str(out / RECIPE))


def total_cost(setting: Setting) -> float:
    """Return the work of the whole comparison in floating-point operations, for a progress bar's estimate."""
    documents = len(setting.corpus.documents) if setting.corpus else 0
    one = documents * forward_cost(setting.model, max(setting.recipe.lengths))
    one += sum(len(prompts) * forward_cost(setting.model, length) for length, prompts in setting.prompts.items())
    return one * len(setting.methods)


def forward_cost(model: PreTrainedModel, length: int) -> float:
    """Return the operations of one forward over `length` tokens: 2 per weight and token, and causal attention."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    weights = sum(p.numel() for p in model.base_model.parameters())
    return 2.0 * weights * length + 2.0 * config.num_hidden_layers * width * length * (length + 1)


def run_compare(setting: Setting, *, advance: Callable[[float, str], None] = lambda _cost, _what: None) -> Comparison:
    """Measure what is not yet measured, write cells, and return the comparison.

    Args:
        setting: from `prepare`.
        advance: called after each unit with its cost (see `total_cost`) and what comes next.

    A unit that fails (out of memory, a loss that is not finite) makes its cell "failed" with the reason; the others
    go on.
    """
    started = time.monotonic()
    recipe, out = setting.recipe, setting.out
    done = {sample.key(): sample for sample in rows.read_samples(out / SAMPLES)}
    failures: dict[tuple[str, str, int], str] = {}
    fingerprints: list[tuple[Method, Fingerprint]] = []
    ratios: dict[str, list[float]] = {}
    for name, method in zip(recipe.methods, setting.methods, strict=True):
        with extend(setting.model, method, context=recipe.context, base=recipe.base) as patch:
            fingerprint = patch.fingerprint
            fingerprints.append((method, fingerprint))
            ratios[name] = (patch.plan.inv_freq / setting.geometry.inv_freq).tolist()
            for cost, new in _measure(setting, patch, fingerprint, done, failures):
                if new:
                    rows.append(out / SAMPLES, new)
                    done |= {sample.key(): sample for sample in new}
                advance(cost, name)
    cells = [cell for method, fp in fingerprints for cell in _cells(setting, method, fp, list(done.values()), failures)]
    rows.write(out / CELLS, cells)
    comparison = Comparison(
        out=out,
        recipe=recipe,
        cells=tuple(cells),
        labels={fp.digest: name for name, (_, fp) in zip(recipe.methods, fingerprints, strict=True)},
        original_context=setting.geometry.original_context,
        ratios=ratios,
        seconds=time.monotonic() - started,
    )
    _write_run(setting, comparison, [fp for _, fp in fingerprints])
    return comparison


def _measure(
    setting: Setting,
    patch: Patch,
    fingerprint: Fingerprint,
    done: dict[tuple[str, str, int, str], rows.Sample],
    failures: dict[tuple[str, str, int], str],
) -> Iterator[tuple[float, list[rows.Sample]]]:
    """Yield (cost, new samples) after each unit: one document at all lengths, or one batch of passkey prompts."""
    recipe, model = setting.recipe, setting.model
    longest = max(recipe.lengths)
    for document in setting.corpus.documents if setting.corpus else ():
        new: list[rows.Sample] = []
        if any((fingerprint.digest, "perplexity", n, document.name) not in done for n in recipe.lengths):
            with _recorded(failures, [(fingerprint.digest, "perplexity", n) for n in recipe.lengths]):
                means = prefix_nll(model, document, recipe.lengths, frequency_key=patch.frequency_key)
                new = [_perplexity_sample(setting, patch, fingerprint, document, n, nll) for n, nll in means.items()]
        yield forward_cost(model, longest), new
    for length, prompts in sorted(setting.prompts.items()):
        for batch in _batches(prompts, max(1, TOKENS_PER_FORWARD // length)):
            new = []
            if any((fingerprint.digest, "passkey", length, _unit(p)) not in done for p in batch):
                with _recorded(failures, [(fingerprint.digest, "passkey", length)]):
                    scores = passkey.score_prompts(model, batch)
                    new = [
                        _passkey_sample(setting, patch, fingerprint, p, s) for p, s in zip(batch, scores, strict=True)
                    ]
            yield len(batch) * forward_cost(model, length), new


@contextmanager
def _recorded(failures: dict[tuple[str, str, int], str], cells: Sequence[tuple[str, str, int]]) -> Generator[None]:
    """Turn a failing unit into a reason on its cells. Out of memory is a RuntimeError in torch."""
    try:
        yield
    except (EvalError, RuntimeError, MemoryError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        failures |= dict.fromkeys(cells, reason)


def _batches(prompts: Sequence[PasskeyPrompt], size: int) -> Iterator[list[PasskeyPrompt]]:
    """Yield runs of prompts whose answers have equally many tokens, at most `size` together."""
    by_answer: dict[int, list[PasskeyPrompt]] = {}
    for prompt in prompts:
        by_answer.setdefault(prompt.num_answer, []).append(prompt)
    for group in by_answer.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _unit(prompt: PasskeyPrompt) -> str:
    return f"{prompt.depth:g}/{prompt.trial}"


def _coordinates(setting: Setting, method: Method, fingerprint: Fingerprint) -> dict[str, object]:
    return {
        "method": method.name,
        "method_args": dict(hyperparameters(method)),
        "factor": fingerprint.context / fingerprint.original_context,
        "context": fingerprint.context,
        "model": setting.recipe.model,
        "seed": setting.recipe.seed,
        "fingerprint": fingerprint.digest,
    }


def _perplexity_sample(
    setting: Setting,
    patch: Patch,
    fingerprint: Fingerprint,
    document: corpora.TokenDocument,
    length: int,
    nll: float,
) -> rows.Sample:
    return rows.Sample(
        **_coordinates(setting, patch.method, fingerprint),  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
        task="perplexity",
        protocol=PROTOCOL,
        length=length,
        depth=None,
        unit=document.name,
        metric="nll",
        value=nll,
        weight=length - 1,
        data_hash=corpora.hash_ids([document.ids[:length]]),
    )


def _passkey_sample(
    setting: Setting, patch: Patch, fingerprint: Fingerprint, prompt: PasskeyPrompt, score: passkey.PasskeyScore
) -> rows.Sample:
    return rows.Sample(
        **_coordinates(setting, patch.method, fingerprint),  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
        task="passkey",
        protocol="classic",
        length=prompt.length,
        depth=prompt.depth,
        unit=_unit(prompt),
        metric="exact_match",
        value=float(score.correct),
        weight=prompt.num_answer,
        data_hash=corpora.hash_ids([prompt.ids]),
        detail={
            "key": prompt.key,
            "actual_depth": prompt.actual_depth,
            "answer_nll": score.answer_nll,
            "predicted": setting.tokenizer.decode(list(score.predicted)),
        },
    )


def _cells(
    setting: Setting,
    method: Method,
    fingerprint: Fingerprint,
    samples: Sequence[rows.Sample],
    failures: dict[tuple[str, str, int], str],
) -> Iterator[rows.Cell]:
    """Yield the cells of one method: perplexity by length, passkey by length pooled and by depth."""
    mine = [s for s in samples if s.fingerprint == fingerprint.digest]
    shared = _coordinates(setting, method, fingerprint) | {"stage": None, "versions": versions(), "commit": commit()}
    for task, protocol, metric in (("perplexity", PROTOCOL, "perplexity"), ("passkey", "classic", "accuracy")):
        for length in setting.recipe.lengths:
            at_length = [s for s in mine if s.task == task and s.length == length]
            reason = failures.get((fingerprint.digest, task, length))
            depths = sorted({s.depth for s in at_length if s.depth is not None})
            for depth in (None, *depths):
                chosen = [s for s in at_length if depth is None or s.depth == depth]
                if not chosen and not reason:
                    continue
                estimate = None
                if reason is None and task == "perplexity":
                    estimate = stats.perplexity(
                        [s.value for s in chosen], [s.weight for s in chosen], seed=setting.recipe.seed
                    )
                elif reason is None:
                    estimate = stats.wilson(sum(s.value == 1.0 for s in chosen), len(chosen))
                yield rows.Cell(
                    **shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                    task=task,
                    protocol=protocol,
                    length=length,
                    depth=depth,
                    metric=metric,
                    value=estimate.value if estimate else None,
                    ci_low=estimate.low if estimate else None,
                    ci_high=estimate.high if estimate else None,
                    n=len(chosen),
                    data_hash=_hash_of([s.data_hash for s in sorted(chosen, key=lambda s: s.unit)]),
                    status="failed" if reason else "ok",
                    reason=reason,
                )


def _hash_of(hashes: Sequence[str]) -> str | None:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] if hashes else None


def _write_run(setting: Setting, comparison: Comparison, fingerprints: Sequence[Fingerprint]) -> None:
    corpus = setting.corpus
    record = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(comparison.seconds, 1),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(setting.model.device),
        "original_context": comparison.original_context,
        "fingerprints": {fp.digest: fp.as_dict() for fp in fingerprints},
        "corpus": None
        if corpus is None
        else {
            "name": corpus.name,
            "documents": [d.name for d in corpus.documents],
            "num_tokens": corpus.num_tokens,
            "num_too_short": corpus.num_too_short,
            "bos": corpus.bos,
            "data_hash": corpus.data_hash,
        },
    }
    (setting.out / RUN).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
