"""lm-eval's documents as work: scored some at a time, on disk before the next, and kept as lm-eval would log them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from evals import rows
from evals.metrics import HARNESS, metric_of
from evals.rows import SampleKey
from recipes.benchmarks import import_harness
from recipes.ranks import Ranks
from recipes.setting import Setting
from recipes.work import Measure, Stretch, Subject, Work, protocols_of
from rope_ext.plan import STATIC

RAW = "lm-eval"
"""The folder of a run with the samples as lm-eval logs them."""


def benchmark_work(setting: Setting, subject: Subject, ranks: Ranks) -> Iterator[Work]:
    """Yield this process's share of lm-eval's tasks under one method, one task and length at a time."""
    for column in setting.benchmarks:
        documents = [*ranks.mine(column.documents)]
        if documents:
            yield _work(setting, column, documents, subject)


def _work(setting: Setting, column: Any, documents: list[Any], subject: Subject) -> Work:
    by_protocol = protocols_of(column)
    protocols = {metric: protocol for protocol, metric in by_protocol.items()}
    of = {document.unit: document for document in documents}
    task = HARNESS + column.name

    def key(unit: str, protocol: str) -> SampleKey:
        return (subject.digest, task, protocol, column.length, unit, of[unit].data_hash)

    def score(missing: set[SampleKey]) -> Iterator[list[rows.Sample]]:
        wanted = [unit for unit in of if any(key(unit, protocol) in missing for protocol in by_protocol)]
        raw = _Raw(setting, column, subject)
        for scored in import_harness().score(column, _model(setting, subject), wanted):
            raw.keep(scored)
            yield [
                rows.Sample(
                    **subject.shared,  # pyright: ignore[reportArgumentType]  (a dict of mixed values)
                    task=task,
                    protocol=protocols[each.metric],
                    length=column.length,
                    depth=None,
                    unit=each.unit,
                    metric=metric_of(task, protocols[each.metric]),
                    value=each.value,
                    weight=each.weight,
                    data_hash=of[each.unit].data_hash,
                    detail={
                        "tokens_in": max(of[each.unit].stretches),
                        "answer": str(each.logged["filtered_resps"])[:200],
                    },
                )
                for each in scored
            ]

    return Work(
        measures=tuple(Measure(task, protocol, column.length) for protocol in by_protocol),
        keys=tuple(key(unit, protocol) for unit in of for protocol in by_protocol),
        stretches=partial(_stretches, documents),
        score=score,
        parts=list,
    )


def _stretches(documents: list[Any]) -> list[Stretch]:
    return [(0, tokens) for document in documents for tokens in document.stretches]


def _model(setting: Setting, subject: Subject) -> Any:
    """Return the model as it stands, patched by whoever calls, for lm-eval."""
    context = int(setting.recipe.context or 0)
    lengths = (1, setting.geometry.original_context, setting.geometry.original_context + 1, context)
    return import_harness().StrictLM(
        setting.model,
        setting.tokenizer,
        window=context,
        fingerprint=subject.digest,
        follows_length={subject.key(n) for n in lengths} != {STATIC},
    )


class _Raw:
    """Samples as lm-eval logs them, a line for each document and filter, once whatever was killed in between."""

    def __init__(self, setting: Setting, column: Any, subject: Subject) -> None:
        folder = setting.out / RAW
        folder.mkdir(exist_ok=True)
        part = "" if setting.ranks.world == 1 else f".part{setting.ranks.rank}"
        self.path = folder / f"{column.name.replace('/', '-')}-{column.length}-{subject.digest}{part}.jsonl"
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        self.torn = bool(text) and not text.endswith("\n")  # what a killed run left
        self.there: set[str] = set()
        for line in text.splitlines():
            with suppress(ValueError, LookupError, TypeError):
                self.there.add(_asked_in(json.loads(line)))

    def keep(self, scored: list[Any]) -> None:
        """Append what is not there yet."""
        lines = {(each.unit, each.metric.filter): json.dumps(each.logged, default=str) for each in scored}
        logged = {_asked_in(json.loads(line)): line for line in lines.values()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self.torn)
            for key, line in logged.items():
                if key not in self.there:
                    file.write(line + "\n")
        self.torn = False
        self.there |= logged.keys()


def _asked_in(logged: dict[str, Any]) -> str:
    """Return what a line is of: the document, what was asked, and how the answer was filtered."""
    return json.dumps([logged[key] for key in ("doc_id", "filter", "doc", "arguments")])
