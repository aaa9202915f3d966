"""A page on which a model's positions can be moved by hand: every number on it was computed by the library."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from evals import plots
from recipes.frame import check_out, in_script, write_html
from recipes.load import RecipeError
from rope_ext.costs import BYTES, ModelShape, kv_cache_bytes, prefill_operations, shape_of
from rope_ext.errors import ContextError, MethodError, ModelError
from rope_ext.geometry import RopeGeometry
from rope_ext.hf import ScaledBase, check_written_as, load_config, read_geometry
from rope_ext.inspection import inspect_config, unseen_angles
from rope_ext.patch import build_table
from rope_ext.plan import Method, label, spell
from rope_ext.tables import ExtendedRotaryEmbedding

FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
STEPS = 96  # places along the window, of a slow pair
DIALS = 8  # pairs that can be chosen, spread from the fastest to the slowest
DISTANCES = 72
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What the page is drawn from: rows of charts, and cos and sin of the arrows."""

    geometry: RopeGeometry
    shape: ModelShape
    names: list[str]
    contexts: dict[float, int]
    factor: float
    pairs: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    arrows: list[dict[str, Any]]
    cache: list[dict[str, Any]]
    prefill: list[dict[str, Any]]
    refused: list[str]

    @property
    def context(self) -> int:
        """The window that the page opens at."""
        return self.contexts[self.factor]


def explore(
    config: PretrainedConfig,
    methods: Sequence[Method],
    *,
    context: int | None = None,
    factor: float | None = None,
    base: ScaledBase | None = None,
    original_context: int | None = None,
) -> Explored:
    """Return the values of the page of a model; it opens at `context` or `factor`, 8 unless said.

    Raises:
        RopeExtError: no rotary geometry, or a method that fits the model at no factor.
    """
    geometry = read_geometry(config, base=base, original_context=original_context)
    if context is None and factor is None:
        factor = 8.0
    opening = inspect_config(
        config, methods[0], context=context, factor=factor, base=base, original_context=original_context
    ).factor
    names = _names(methods)
    tables: dict[tuple[str, float], ExtendedRotaryEmbedding] = {}
    refused: dict[str, str] = {}
    contexts: dict[float, int] = {}
    for each in sorted({*FACTORS, opening}):
        for name, method in names.items():
            try:
                tables[name, each] = build_table(config, geometry, method, context=None, factor=each)
                contexts[each] = tables[name, each].context
            except MethodError as error:
                refused[name] = str(error)
                if each == opening:
                    raise
            except (ContextError, ModelError):
                if each == opening:
                    raise
                break  # a window that this model cannot have under any method
    biased = [name for (name, _), table in tables.items() if table.plan.alibi_slopes is not None]
    if biased:
        raise RecipeError(
            f"explore: {biased[0]} turns no pair and takes its bias from scores, which this page does not show; leave "
            "it out"
        )
    shape = shape_of(config)
    lengths = _lengths(geometry.original_context, contexts)
    return Explored(
        geometry=geometry,
        shape=shape,
        names=[*names],
        contexts=contexts,
        factor=opening,
        pairs=_pair_rows(geometry, tables),
        scores=[row for (name, each), table in tables.items() for row in _score_rows(name, each, table)],
        arrows=_arrows(geometry, tables, contexts),
        cache=_cache_rows(shape, lengths),
        prefill=_prefill_rows(shape, lengths),
        refused=[f"not at every factor: {words}" for words in refused.values()],
    )


def write_explorer(
    model: str,
    methods: Sequence[Method],
    out: Path,
    *,
    context: int | None = None,
    factor: float | None = None,
    base: ScaledBase | None = None,
    original_context: int | None = None,
) -> Path:
    """Write the page of a model and return its path; the rest is as `explore` takes it.

    Raises:
        RopeExtError: as `explore`; the file cannot be written.
    """
    check_out("explore", out)
    check_written_as(model, [method.name for method in methods])
    asked = {"context": context, "factor": factor, "base": base, "original-context": original_context}
    found = explore(
        load_config(model), methods, context=context, factor=factor, base=base, original_context=original_context
    )
    words = ["rope-ext", "explore", model, "--methods", ",".join(spell(method) for method in methods)]
    for key, value in asked.items():
        words += [] if value is None else [f"--{key}", f"{value}"]
    name = Path(model).name or model
    shape, opened = found.shape, found.context
    weights = [(f"weights in {kind}", shape.parameters * size / GIGABYTE) for kind, size in BYTES.items() if size <= 2]
    tokens = min({int(row["tokens"]) for row in found.cache}, key=lambda n: abs(math.log(n / opened)))
    charts = {
        "wavelengths": plots.live_wavelengths(
            found.pairs,
            found.names,
            original_context=found.geometry.original_context,
            factor=found.factor,
            model=name,
        ),
        "ratios": plots.live_ratios(found.pairs, found.names, factor=found.factor, model=name),
        "scores": plots.live_scores(
            found.scores,
            found.names,
            original_context=found.geometry.original_context,
            factor=found.factor,
            model=name,
        ),
        "cache": plots.live_cache(
            found.cache, heads=shape.num_key_value_heads, tokens=tokens, dtype="bf16", weights=weights
        ),
        "prefill": plots.live_prefill(found.prefill, tokens=tokens),
    }
    return write_html(
        "explore",
        "explore.html",
        out,
        title=f"{name}: positions, by hand",
        model=model,
        geometry=found.geometry,
        shape=shape,
        found=found,
        dtypes=list(BYTES),
        made_by=shlex.join(words),
        specs=in_script({key: plots.spec(chart) for key, chart in charts.items()}),
        data=in_script(
            {
                "factors": [*found.contexts],
                "contexts": [*found.contexts.values()],
                "factor": found.factor,
                "arrows": found.arrows,
                "cache": found.cache,
                "prefill": found.prefill,
                "tokens": tokens,
                "heads": shape.num_key_value_heads,
            }
        ),
    )


def _names(methods: Sequence[Method]) -> dict[str, Method]:
    """Return each method by its short name, in full where two are alike."""
    short = [label(method) for method in methods]
    return {
        name if short.count(name) == 1 else spell(method): method for name, method in zip(short, methods, strict=True)
    }


def _lengths(original: int, contexts: Mapping[float, int]) -> list[int]:
    return sorted({max(1, original // part) for part in (8, 4, 2)} | {*contexts.values()})


def _pair_rows(
    geometry: RopeGeometry, tables: Mapping[tuple[str, float], ExtendedRotaryEmbedding]
) -> list[dict[str, Any]]:
    """Return wavelength and ratio of every pair that turns, by method and factor."""
    rows: list[dict[str, Any]] = []
    for (name, factor), table in tables.items():
        new = table.plan.inv_freq.double()
        unseen = unseen_angles(geometry, table.plan, table.context)
        ratios = (new / geometry.inv_freq.double()).tolist()
        rows += [
            {
                "method": name,
                "factor": factor,
                "pair": pair,
                "wavelength": _short(2 * math.pi / frequency),
                "ratio": _short(ratios[pair]),
                "unseen": bool(unseen[pair]),
            }
            for pair, frequency in enumerate(new.tolist())
            if frequency > 0
        ]
    return rows


def _score_rows(name: str, factor: float, table: ExtendedRotaryEmbedding) -> list[dict[str, Any]]:
    """Return the score of a query and a key, both of ones, over their distance, as a share of their plain product."""
    reach = table.context - 1
    distances = sorted({max(1, round(reach ** (k / (DISTANCES - 1)))) for k in range(DISTANCES)}) if reach else [0]
    # In a sequence of the whole window, for methods that follow the length
    positions = torch.tensor([[0, distance, reach] for distance in distances])
    cos, sin = table(torch.zeros(1, 3, 1), positions)
    # Of ones, a pair's product is that of the turned vectors (c - s, s + c) at both ends.
    at = [(cos[:, k] - sin[:, k], sin[:, k] + cos[:, k]) for k in (0, 1)]
    scores = (at[0][0] * at[1][0] + at[0][1] * at[1][1]).double().mean(dim=-1) / 2
    return [
        {"method": name, "factor": factor, "distance": distance, "score": _short(score)}
        for distance, score in zip(distances, scores.tolist(), strict=True)
    ]


def _arrows(
    geometry: RopeGeometry, tables: Mapping[tuple[str, float], ExtendedRotaryEmbedding], contexts: Mapping[float, int]
) -> list[dict[str, Any]]:
    """Return, for some pairs and every factor, cos and sin under every method at places some tokens `apart`.

    The places of a slow pair span the window, those of a fast one are a fraction of its turn apart. `trained` is the
    largest angle in turns that the pair met in training; `unseen` are the distances, in steps, whose angle is another.
    """
    pairs = sorted({round(k * (geometry.num_pairs - 1) / (DIALS - 1)) for k in range(DIALS)})
    found: list[dict[str, Any]] = []
    for pair in pairs:
        wavelength, turns = float(geometry.wavelengths[pair]), float(geometry.rotations[pair])
        views: list[dict[str, Any]] = []
        for factor, context in contexts.items():
            widest = max(1, (context - 1) // STEPS)
            apart = max(1, min(widest, round(wavelength / 32))) if math.isfinite(wavelength) else widest
            places = [k * apart for k in range(STEPS + 1) if k * apart < context]
            mine = {name: table for (name, each), table in tables.items() if each == factor}
            views.append(
                {
                    "apart": apart,
                    "turned": {name: _turned(table, pair, places) for name, table in mine.items()},
                    "unseen": {
                        name: _unseen(turns, float(table.plan.inv_freq[pair]), places) for name, table in mine.items()
                    },
                }
            )
        found.append(
            {
                "pair": pair,
                "wavelength": _short(wavelength) if math.isfinite(wavelength) else None,
                "trained": min(1.0, _short(turns)),
                "views": views,
            }
        )
    return found


def _turned(table: ExtendedRotaryEmbedding, pair: int, places: Sequence[int]) -> list[list[float]]:
    """Return cos and sin of a pair at places in a sequence of the whole window."""
    whole = torch.tensor([[*places, table.context - 1]])
    cos, sin = table(torch.zeros(1, whole.shape[1], 1), whole)
    both = zip(cos[0, :-1, pair].tolist(), sin[0, :-1, pair].tolist(), strict=True)
    return [[round(c, 4), round(s, 4)] for c, s in both]


def _unseen(turns: float, inv_freq: float, places: Sequence[int]) -> list[int]:
    """Return which distances turn a pair by an angle that training, `turns` of a turn, never showed."""
    if turns >= 1:
        return []
    angles = [place * inv_freq / (2 * math.pi) % 1 for place in places]
    return [step for step, angle in enumerate(angles) if angle > turns * (1 + 1e-6)]


def _cache_rows(shape: ModelShape, lengths: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "heads": heads,
            "tokens": tokens,
            "dtype": dtype,
            "gigabytes": _short(
                kv_cache_bytes(
                    num_layers=shape.num_layers,
                    num_key_value_heads=heads,
                    head_dim=shape.head_dim,
                    tokens=tokens,
                    bytes_per_number=size,
                    windows=shape.windows,
                )
                / GIGABYTE
            ),
        }
        for heads in sorted({*shape.key_value_heads(), shape.num_key_value_heads})
        for dtype, size in BYTES.items()
        for tokens in lengths
    ]


def _prefill_rows(shape: ModelShape, lengths: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        cost = prefill_operations(shape, tokens)
        rows += [
            {"tokens": tokens, "part": "products with weights", "operations": _short(cost.products)},
            {"tokens": tokens, "part": "attention", "operations": _short(cost.attention)},
        ]
    return rows


def _short(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")
