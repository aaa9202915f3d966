"""lm-eval's tasks on a model that is here: prompts made once and alike for all, nothing cut, a sample a document.

The only importer of lm_eval. Run as a module it makes the documents of a task that generates its own, in a process that
can be stopped: some of upstream's generators do not end at some lengths.
"""

import contextlib
import copy
import difflib
import hashlib
import inspect
import io
import json
import math
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import jinja2
import numpy as np
import torch
from lm_eval.api import registry  # pyright: ignore[reportMissingTypeStubs]
from lm_eval.models import huggingface  # pyright: ignore[reportMissingTypeStubs]
from lm_eval.models import utils as models_utils  # pyright: ignore[reportMissingTypeStubs]
from lm_eval.tasks import TaskManager, _yaml_loader  # pyright: ignore[reportMissingTypeStubs]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from evals.errors import EvalError
from evals.metrics import STRING_MATCH, kind_of_metric
from evals.rows import write_whole

WEIGHTED = {"word_perplexity", "byte_perplexity", "token_perplexity", "bits_per_byte"}
OF_DOCUMENTS = {"mean", "perplexity", "weighted_perplexity", "bits_per_byte"}
ENDLESS = {"ruler_vt": 4096, "ruler_cwe": 4096}
"""Lengths under which upstream's generators try again without end."""
PATIENCE = 900.0
"""Seconds that a task's generator may take for one length."""
LARGEST = 10_000_000
"""Bytes of a file beside a task that is looked at."""
FINGERPRINT = "rope-ext fingerprint"
HFLM: Any = huggingface.HFLM  # its decorator hides what it is from type checkers
Task = Any
Instance = Any
Request = tuple[Any, list[int], list[int]]


class StrictLM(HFLM):
    """lm-eval's model for a PreTrainedModel, which refuses what HFLM would cut from the left with a warning at most.

    Args:
        model: in evaluation mode, patched or not; it stays as it is.
        window: the longest input, tokens.
        fingerprint: of the model under its method, or nothing; a cache that another one has filled is refused.
        follows_length: whether frequencies follow the sequence. Rows of a batch are padded on the right without a word
            to the model, which would make them longer: one row at a time then.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        window: int,
        batch_size: int = 1,
        fingerprint: str = "",
        follows_length: bool = False,
    ) -> None:
        if follows_length and batch_size != 1:
            raise EvalError(
                f"lm-eval: batch_size {batch_size} pads rows without telling the model, whose frequencies follow the "
                "length; use batch_size 1"
            )
        if tokenizer.eos_token_id is not None and tokenizer("x")["input_ids"][-1:] == [tokenizer.eos_token_id]:
            raise EvalError(
                "lm-eval: the tokenizer ends every text with its EOS, behind which nothing can be asked; switch that "
                "off (add_eos_token: false in tokenizer_config.json)"
            )
        self.fingerprint = fingerprint
        # a copy: HFLM gives it a padding token
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),
            max_length=window,
            batch_size=batch_size,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            self.check_fits(len(context) + len(continuation) - 1)
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask, padded; a prompt with no room left for its answer is an error."""
        ids, mask = super().tok_batch_encode(list(strings), padding_side, None, truncation)
        if left_truncate_len is not None and ids.shape[1] > left_truncate_len:
            raise EvalError(too_long(ids.shape[1], self.max_length, self.max_length - left_truncate_len))
        return ids, mask

    def check_fits(self, tokens: int) -> None:
        """Refuse an input that is longer than the window."""
        if tokens > self.max_length:
            raise EvalError(too_long(tokens, self.max_length, 0))

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's cache of answers, which knows them by their prompts alone, if it is of this very model."""
        super().set_cache_hook(cache_hook)
        answers = getattr(cache_hook, "dbdict", None)
        if answers is None:
            return
        known = answers.get(FINGERPRINT)
        if known is None and len(answers):
            raise EvalError(
                "lm-eval: --use_cache names a cache that does not say which model filled it; name another file"
            )
        if known not in {None, self.fingerprint}:
            raise EvalError(
                f"lm-eval: --use_cache names a cache that another model or method filled ({known}, this is "
                f"{self.fingerprint}); give each its own file"
            )
        answers[FINGERPRINT] = self.fingerprint


def too_long(tokens: int, window: int, answer: int) -> str:
    """Return what is said of a prompt that does not fit."""
    room = f" and {answer} for the answer" if answer else ""
    return (
        f"lm-eval: a prompt of {tokens} tokens{room} does not fit into the window of {window}; nothing is cut: give a "
        f"context of at least {tokens + answer}, fewer shots or shorter lengths"
    )


def register(name: str, model: type[StrictLM]) -> None:
    """Let `lm_eval --model NAME` find a model class."""
    if name not in registry.model_registry:
        registry.model_registry.register(name, target=model)


def run_cli() -> int:
    """Run lm-eval's own command line on sys.argv and return its exit status."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingTypeStubs]

    try:
        cli_evaluate()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


class Metric(NamedTuple):
    """One of lm-eval's numbers: its name, and the filter that answers go through before it."""

    name: str
    filter: str

    @property
    def label(self) -> str:
        """As lm-eval's tables have it, the plain filter left out, and RULER's lengths by what they measure."""
        name = STRING_MATCH if self.name.isdecimal() else self.name
        return name if self.filter == "none" else f"{name}, {self.filter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a task, its requests built.

    Attributes:
        unit: its number in the task.
        stretches: tokens of each request, answers included.
        data_hash: of all that the model is shown and asked.
    """

    unit: str
    doc: Mapping[str, Any]
    requests: tuple[Instance, ...]
    stretches: tuple[int, ...]
    data_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A task at a length, ready to be put to any model with this tokenizer.

    Attributes:
        length: asked of a task that makes its own documents; of others the longest input.
        shots: examples in front of each prompt.
        notes: metrics that are left out, and why.
    """

    name: str
    length: int
    shots: int
    task: Task
    metrics: tuple[Metric, ...]
    documents: tuple[Document, ...]
    notes: tuple[str, ...]


class Scored(NamedTuple):
    """A document's value under a metric, the weight that it counts with, and the sample as lm-eval would log it."""

    unit: str
    metric: Metric
    value: float
    weight: int
    logged: dict[str, Any]


def open_tasks(
    names: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    lengths: Sequence[int],
    limit: int | None,
    shots: int | None,
    seed: int,
    include_path: Sequence[Path] = (),
    cache: Path,
) -> list[Column]:
    """Return the tasks, groups and tags of these names with their requests built, the first `limit` documents of each.

    A task that makes its own documents is opened once for each length, in a process of its own, under this seed; what
    it made is kept in `cache`. The others are as long as they are.

    Raises:
        EvalError: no task of that name, a data set that is not here, a generator that fails or does not end, a prompt
            that does not fit, or a task without a metric of documents.
    """
    manager = _manager(names, include_path)
    lm = _Measuring(tokenizer, window)
    columns: list[Column] = []
    for name in _leaves(manager, names):
        config = _config(manager, name, resolve=False)
        fixed = "custom_dataset" not in config or bool((config.get("metadata") or {}).get("fixed_length"))
        for length in [None] if fixed else lengths:
            made = None
            if "custom_dataset" in config:
                path = Path(cast("Any", manager).task_index[name].yaml_path)
                made = _generated(name, path, length, tokenizer, seed=seed, cache=cache)
            columns.append(_column(_load(manager, name, length, made), name, length, lm, limit, shots, seed))
    return columns


def _manager(names: Sequence[str], include_path: Sequence[Path]) -> TaskManager:
    """Return what knows these names: our folders if they do, since reading lm-eval's own takes seconds."""
    folders: list[str | Path] = [*include_path]
    with _quiet():
        if folders:
            ours = TaskManager(include_path=folders, include_defaults=False)
            if all(name in cast("Any", ours).task_index for name in names):
                return ours
        return TaskManager(include_path=folders or None)


def _config(manager: TaskManager, name: str, *, resolve: bool) -> dict[str, Any]:
    """Return what a task's or a group's YAML says; without resolving, nothing of it is imported."""
    path = cast("Any", manager).task_index[name].yaml_path
    with _quiet():  # resolving imports what the task is made with
        return _yaml_loader.load_yaml(path, resolve_func=resolve) if path else {}


def _leaves(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Return the tasks that names stand for, each once."""
    found: dict[str, None] = {}
    for name in names:
        entry = cast("Any", manager).task_index.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise EvalError(f"lm-eval: {name!r} is no task of lm-eval {version('lm_eval')}{hint}")
        if entry.kind.name in {"TASK", "PY_TASK"}:
            found[name] = None
        elif entry.kind.name == "TAG":
            found |= dict.fromkeys(t for t in manager.all_subtasks if name in cast("Any", manager).task_index[t].tags)
        else:
            found |= dict.fromkeys(_leaves(manager, _members(name, _config(manager, name, resolve=False))))
    return list(found)


GROUP_KEYS = {"group", "group_alias", "task", "tag", "aggregate_metric_list", "metadata"}


def _members(name: str, group: dict[str, Any]) -> list[str]:
    """Return the tasks that a group names; settings that it gives them would be lost, and are refused.

    Raises:
        EvalError: there are some.
    """
    found: list[str] = []
    for member in group.get("task", []):
        if isinstance(member, str):
            found.append(member)
        elif isinstance(member.get("task"), list):
            found += _members(name, member)
        else:
            found.append(str(member.get("task") or member.get("group")))
        extra = set() if isinstance(member, str) else set(member) - GROUP_KEYS - {"task_alias"}
        if extra or set(group) - GROUP_KEYS:
            told = ", ".join(sorted(extra | (set(group) - GROUP_KEYS)))
            raise EvalError(f"lm-eval: the group {name} sets {told} for its tasks; name the tasks themselves")
    return found


def _load(manager: TaskManager, name: str, length: int | None, rows: dict[str, list[dict[str, Any]]] | None) -> Task:
    """Return a task with its data: read from the Hub, or the rows that it has made."""
    source = _config(manager, name, resolve=False).get("dataset_path")
    try:
        config = _config(manager, name, resolve=True)
        if rows is not None:
            config |= _made(config, rows, length)
        with _quiet():
            return next(iter(manager.load([config])["tasks"].values()))
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if source and source not in {"json", "csv", "text", "parquet"} and not isinstance(error, jinja2.TemplateError):
            raise EvalError(
                f"lm-eval: {name} reads the data set {source} from the Hub, which failed ({reason}); it needs a "
                "network once, or a task that makes its own documents (rope-ext lm-eval-tasks --list)"
            ) from error
        raise EvalError(f"lm-eval: {name} cannot be loaded: {reason}") from error


def _made(config: dict[str, Any], rows: dict[str, list[dict[str, Any]]], length: int | None) -> dict[str, Any]:
    """Return what stands in for a task making its documents; of RULER's metrics, one a length, that of this one."""
    import datasets  # pyright: ignore[reportMissingTypeStubs]

    splits = {split: datasets.Dataset.from_list(each) for split, each in rows.items()}
    found: dict[str, Any] = {"custom_dataset": lambda **_: splits}
    if any(str(each["metric"]).isdecimal() for each in config.get("metric_list", [])):
        found["metric_list"] = [{"metric": str(length), "aggregation": "mean", "higher_is_better": True}]
    return found


class _Measuring:
    """Counts the tokens of requests as HFLM will, without a model's weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, window: int) -> None:
        config = LlamaConfig(
            vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
        )
        self.lm = StrictLM(LlamaForCausalLM(config).eval(), tokenizer, window=window)
        self.window = window

    def tokens(self, request: Instance, name: str, unit: str) -> int:
        """Return how many tokens a request feeds and asks for; one that does not fit is an error."""
        answer = 0
        if request.request_type == "generate_until":
            context, options = request.args
            tokens = len(self.lm.tok_encode(context))
            if "max_length" in options:
                raise EvalError(
                    f"lm-eval: {name}: generation_kwargs.max_length leaves no room known; give max_gen_toks"
                )
            answer = int(models_utils.normalize_gen_kwargs(dict(options), self.lm.max_gen_toks).get("max_gen_toks", 0))
        elif request.request_type == "loglikelihood_rolling":
            return min(len(self.lm.tok_encode(request.args[0])), self.window)
        else:
            context, continuation = request.args
            split = ([0], self.lm.tok_encode(continuation, add_special_tokens=False))
            if context:  # as HFLM itself splits them
                split = self.lm._encode_pair(context, continuation)  # noqa: SLF001
            tokens = len(split[0]) + len(split[1]) - 1
        if tokens + answer > self.window:
            told = too_long(tokens, self.window, answer).removeprefix("lm-eval: a prompt")
            raise EvalError(f"lm-eval: {name}, document {unit}: a prompt{told}")
        return tokens + answer


def _column(
    task: Task, name: str, length: int | None, lm: _Measuring, limit: int | None, shots: int | None, seed: int
) -> Column:
    """Return a task with its first documents' requests built and measured."""
    config = task.config
    if shots and config.num_fewshot == 0:
        raise EvalError(f"lm-eval: {name} takes no shots (its num_fewshot is 0); leave --num-fewshot out")
    if shots is not None and config.num_fewshot != 0:
        task.set_config(key="num_fewshot", value=shots)
    elif config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)
    try:
        with _quiet():
            task.build_all_requests(limit=limit)
    except Exception as error:
        raise EvalError(f"lm-eval: {name} has no requests: {' '.join(str(error).split())[:200]}") from error
    by_document: dict[int, list[Instance]] = {}
    for request in task.instances:
        by_document.setdefault(int(request.doc_id), []).append(request)
    documents: list[Document] = []
    grading = _grading(task)
    for number, requests in by_document.items():
        requests.sort(key=lambda each: each.idx)
        asked = [[each.request_type, *each.args] for each in requests]
        shown = json.dumps([*asked, requests[0].doc, grading], default=str)
        documents.append(
            Document(
                unit=str(number),
                doc=requests[0].doc,
                requests=tuple(requests),
                stretches=tuple(lm.tokens(each, name, str(number)) for each in requests),
                data_hash=hashlib.sha256(shown.encode()).hexdigest()[:16],
            )
        )
    filters = [str(each.name) for each in getattr(task, "_filters", [])] or ["none"]
    every = {str(each): how for each, how in task.aggregation().items()}
    # "x@y" beside "x" is one length of several, of which this is one
    names = [each for each in every if "@" not in each or each.partition("@")[0] not in every]
    whole = [each for each in names if not _is_of_documents(every[each])]
    metrics = tuple(Metric(each, key) for each in names if each not in whole for key in filters)
    if not metrics:
        raise EvalError(
            f"lm-eval: {name} has no metric of single documents ({', '.join(names)}), so no interval; use lm_eval"
        )
    return Column(
        name=name,
        length=length or max(max(document.stretches) for document in documents),
        shots=int(config.num_fewshot or 0),
        task=task,
        metrics=metrics,
        documents=tuple(documents),
        notes=tuple(f"{name}: {each} is of all documents together, and left out" for each in whole),
    )


def _grading(task: Task) -> str:
    """Return a hash of what makes values of answers: a value under other code is another one.

    Of a function that is the file it stands in, whose helpers it may call.
    """

    def told(each: Any) -> str:
        try:
            return Path(inspect.getfile(each)).read_text(encoding="utf-8") + each.__qualname__
        except (TypeError, OSError, AttributeError):
            return type(each).__qualname__

    config = task.config
    parts = [config.process_results, config.doc_to_target, config.metric_list, config.filter_list]
    return hashlib.sha256(json.dumps(parts, default=told).encode()).hexdigest()[:16]


def _is_of_documents(how: Any) -> bool:
    """Whether an aggregation is lm-eval's own mean, or perplexity, of documents: others are of all of them together."""
    return how.__module__ == "lm_eval.api.metrics" and how.__name__ in OF_DOCUMENTS


def score(column: Column, lm: StrictLM, units: Sequence[str]) -> Iterator[list[Scored]]:
    """Yield the documents of these units as they are scored, some at a time.

    Raises:
        EvalError: a prompt that does not fit, or a document without a value for a metric.
    """
    wanted = [document for document in column.documents if document.unit in set(units)]
    for at in range(0, len(wanted), CHUNK):
        chosen = wanted[at : at + CHUNK]
        requests = [request for document in chosen for request in document.requests]
        for request in requests:
            request.resps, request.filtered_resps = [], {}
        by_type: dict[str, list[Instance]] = {}
        for request in requests:
            by_type.setdefault(request.request_type, []).extend([request] * int(request.repeats or 1))
        with _quiet():
            for kind, some in by_type.items():
                for request, answer in zip(some, getattr(lm, kind)(some), strict=True):
                    request.resps.append(answer)
            column.task._instances = requests  # noqa: SLF001  (what its filters are applied to)
            column.task.apply_filters()
        yield [found for document in chosen for found in _graded(column, document)]


CHUNK = 8
"""Documents that are scored before they are written."""


def _graded(column: Column, document: Document) -> Iterator[Scored]:
    for key in dict.fromkeys(metric.filter for metric in column.metrics):
        answers = [request.filtered_resps[key] for request in document.requests]
        found = column.task.process_results(document.doc, answers)
        logged = {
            "doc_id": int(document.unit),
            "doc": dict(document.doc),
            "target": column.task.doc_to_target(document.doc),
            "arguments": [request.args for request in document.requests],
            "resps": [request.resps for request in document.requests],
            "filtered_resps": answers,
            "filter": key,
            "metrics": list(found),
            **found,
        }
        for metric in column.metrics:
            if metric.filter != key:
                continue
            # A document without a value counts for less n, as in lm-eval
            with contextlib.suppress(EvalError, KeyError):
                yield Scored(document.unit, metric, *value_of(metric.name, found[metric.name]), logged)


def value_of(metric: str, found: Any) -> tuple[float, int]:
    """Return a document's value and weight: a share or a score as it is, a log-likelihood as nats a unit of its weight.

    Raises:
        EvalError: it is no number.
    """
    if metric in WEIGHTED:
        total, weight = float(found[0]), int(found[1])
        return (-total / weight) / (math.log(2) if metric == "bits_per_byte" else 1.0), weight
    if isinstance(found, tuple | list):
        raise EvalError(f"lm-eval: {metric} of a document is {str(found)[:80]}, no number of its own")
    value = float(found)
    if not math.isfinite(value):
        raise EvalError(f"lm-eval: {metric} of a document is {value}")
    return (-value if kind_of_metric(metric) == "perplexity" else value), 1


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep what lm-eval and its tasks print from what a command prints."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _generated(
    name: str,
    path: Path,
    length: int | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    cache: Path,
) -> dict[str, list[dict[str, Any]]]:
    """Return the documents that a task makes for a length, from the cache or from a process of its own.

    Raises:
        EvalError: it failed, or took longer than `PATIENCE`.
    """
    if length is not None and length < ENDLESS.get(name, 0):
        raise EvalError(
            f"lm-eval: {name} at {length} tokens: upstream's generator does not end under {ENDLESS[name]} with most "
            "tokenizers; ask for longer ones, or leave it out (rope_ext_multi_key is ours at any length)"
        )
    home = _tokenizer_folder(tokenizer, cache)
    places = [path.parent, Path(__file__).parent, Path(__file__).parent.parent / "rope_ext"]
    about = [name, length, home.name, seed, version("lm_eval"), sys.version, sysconfig.get_paths()["stdlib"]]
    about += [_contents(place) for place in places]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    kept = cache / f"{name}-{length}-{digest}.json"
    if kept.is_file():
        with contextlib.suppress(ValueError):
            return json.loads(kept.read_text(encoding="utf-8"))
    asked = {
        "task": name,
        "length": length,
        "tokenizer": str(home),
        "seed": seed,
        "path": str(path.absolute()),
    }
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-P", "-m", "evals.harness", json.dumps(asked | {"out": str(out)})]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            done = subprocess.run(  # noqa: S603  (our own words)
                command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise EvalError(
                f"lm-eval: {name} had not made its documents{_of(length)} after {PATIENCE:.0f} s; its generator "
                "does not end at every length and tokenizer: leave the length out, or use rope_ext_passkey"
            ) from error
        if done.returncode != 0 or not out.is_file():
            lines = done.stderr.strip().splitlines() or ["it was killed"]
            raise EvalError(f"lm-eval: {name} cannot make documents{_of(length)}: {lines[-1][:300]}")
        text = out.read_text(encoding="utf-8")
        write_whole(kept, text)
    return json.loads(text)


def _of(length: int | None) -> str:
    return "" if length is None else f" of {length} tokens"


def _contents(folder: Path) -> str:
    """Return a hash of the files in a folder: what makes documents may read any of them."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.stat().st_size < LARGEST:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _tokenizer_folder(tokenizer: PreTrainedTokenizerBase, cache: Path) -> Path:
    """Return a folder with the tokenizer, which generators load by its path."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        tokenizer.save_pretrained(folder)
        settings = Path(folder) / "tokenizer_config.json"
        if settings.is_file():  # upstream's generators would run the code that it names
            told = json.loads(settings.read_text(encoding="utf-8"))
            settings.write_text(json.dumps({k: v for k, v in told.items() if k != "auto_map"}), encoding="utf-8")
        digest = hashlib.sha256()
        for path in sorted(Path(folder).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        home = cache / f"tokenizer-{digest.hexdigest()[:16]}"
        if not home.is_dir():
            with contextlib.suppress(OSError):  # another process was first
                Path(folder).rename(home)
                Path(folder).mkdir()
    return home


def _generate(asked: dict[str, Any]) -> None:
    """Write the documents that a task makes for one length, seeded as lm-eval's own command line would be."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    random.seed(asked["seed"])
    np.random.seed(asked["seed"])  # noqa: NPY002  (the generator that upstream's tasks use)
    metadata = {"tokenizer": asked["tokenizer"], "seed": asked["seed"]}
    if asked["length"] is not None:
        metadata["max_seq_lengths"] = [asked["length"]]
    manager = TaskManager(include_defaults=False, metadata=cast("Any", metadata))
    config = _yaml_loader.load_yaml(asked["path"], resolve_func=True)
    task = next(iter(manager.load([config])["tasks"].values()))
    splits = {name: [dict(row) for row in rows] for name, rows in cast("Any", task).dataset.items()}
    Path(asked["out"]).write_text(json.dumps(splits), encoding="utf-8")


def _end_with(parent: int) -> None:
    """End this process when the one that started it has gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    _generate(json.loads(sys.argv[1]))
