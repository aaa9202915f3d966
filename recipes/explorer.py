"""A page on which a model's positions can be moved by hand: every number on it was computed by the library."""

import math
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
from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.hf import ScaledBase, load_config, read_geometry
from rope_ext.inspection import inspect_config
from rope_ext.patch import build_table
from rope_ext.plan import Method, spell
from rope_ext.tables import ExtendedRotaryEmbedding

FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
STEPS = 48  # places of the key, and as many distances
DIALS = 12  # pairs that can be chosen, spread from the fastest to the slowest
DISTANCES = 72
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What the page is drawn from: rows of charts, and cos and sin of the arrows."""

    geometry: RopeGeometry
    shape: ModelShape
    names: list[str]
    factors: list[float]
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
        return math.ceil(self.factor * self.geometry.original_context)


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
    factors = sorted({*FACTORS, opening})
    tables: dict[tuple[str, float], ExtendedRotaryEmbedding] = {}
    refused: dict[str, str] = {}
    for method in methods:
        for each in factors:
            try:
                tables[spell(method), each] = build_table(config, geometry, method, context=None, factor=each)
            except MethodError as error:
                refused[spell(method)] = str(error)
    names = [spell(method) for method in methods]
    for name in names:
        if (name, opening) not in tables:
            raise RecipeError(f"explore: at factor {opening:g}: {refused[name]}")
    shape = shape_of(config)
    lengths = _lengths(geometry.original_context, factors)
    return Explored(
        geometry=geometry,
        shape=shape,
        names=names,
        factors=factors,
        factor=opening,
        pairs=_pair_rows(geometry, tables),
        scores=[row for (name, each), table in tables.items() for row in _score_rows(name, each, table)],
        arrows=_arrows(geometry, {name: tables[name, opening] for name in names}),
        cache=_cache_rows(shape, lengths),
        prefill=_prefill_rows(shape, lengths),
        refused=[f"not at every factor: {words}" for words in refused.values()],
    )


def write_explorer(model: str, methods: Sequence[Method], out: Path, **asked: Any) -> Path:
    """Write the page of a model and return its path; `asked` as `explore` takes it.

    Raises:
        RopeExtError: as `explore`; the file cannot be written.
    """
    check_out("explore", out)
    found = explore(load_config(model), methods, **asked)
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
        specs=in_script({key: plots.spec(chart) for key, chart in charts.items()}),
        data=in_script(
            {
                "factors": found.factors,
                "factor": found.factor,
                "window": found.geometry.original_context,
                "arrows": found.arrows,
                "cache": found.cache,
                "prefill": found.prefill,
                "tokens": tokens,
                "heads": shape.num_key_value_heads,
                "steps": STEPS,
            }
        ),
    )


def _lengths(original: int, factors: Sequence[float]) -> list[int]:
    return sorted({math.ceil(original * factor) for factor in (0.125, 0.25, 0.5, *factors, 128.0)})


def _pair_rows(
    geometry: RopeGeometry, tables: Mapping[tuple[str, float], ExtendedRotaryEmbedding]
) -> list[dict[str, Any]]:
    """Return wavelength and ratio of every pair that turns, by method and factor."""
    rows: list[dict[str, Any]] = []
    trained = geometry.rotations
    for (name, factor), table in tables.items():
        new = table.plan.inv_freq.double()
        unseen = (trained < 1) & (new * table.context / (2 * math.pi) > trained * (1 + 1e-6))
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
    positions = torch.tensor([[0, distance] for distance in distances])
    cos, sin = table(torch.zeros(1, 2, 1), positions)
    # Of ones, a pair's product is that of the turned vectors (c - s, s + c) at both ends.
    at = [(cos[:, k] - sin[:, k], sin[:, k] + cos[:, k]) for k in (0, 1)]
    scores = (at[0][0] * at[1][0] + at[0][1] * at[1][1]).double().mean(dim=-1) / 2
    return [
        {"method": name, "factor": factor, "distance": distance, "score": _short(score)}
        for distance, score in zip(distances, scores.tolist(), strict=True)
    ]


def _arrows(geometry: RopeGeometry, tables: Mapping[str, ExtendedRotaryEmbedding]) -> list[dict[str, Any]]:
    """Return, for some pairs, cos and sin under every method at places a fraction of the pair's turn apart.

    `trained` is the largest angle, in turns, that the pair met in training, and `seen` at how many steps of distance a
    method stays within it.
    """
    pairs = sorted({round(k * (geometry.num_pairs - 1) / (DIALS - 1)) for k in range(DIALS)})
    context = next(iter(tables.values())).context
    found: list[dict[str, Any]] = []
    for pair in pairs:
        wavelength, turns = float(geometry.wavelengths[pair]), float(geometry.rotations[pair])
        apart = max(1, min(context // (2 * STEPS), round(wavelength / 32) if math.isfinite(wavelength) else context))
        places = [k * apart for k in range(2 * STEPS + 1)]
        turned: dict[str, list[list[float]]] = {}
        for name, table in tables.items():
            # All places as of one sequence that ends at the last, whatever follows the length
            cos, sin = table(torch.zeros(1, len(places), 1), torch.tensor([places]))
            turned[name] = [
                [_short(c), _short(s)] for c, s in zip(cos[0, :, pair].tolist(), sin[0, :, pair].tolist(), strict=True)
            ]
        found.append(
            {
                "pair": pair,
                "wavelength": _short(wavelength) if math.isfinite(wavelength) else None,
                "trained": min(1.0, _short(turns)),
                "apart": apart,
                "seen": {n: _steps_seen(turns, float(t.plan.inv_freq[pair]), apart) for n, t in tables.items()},
                "turned": turned,
            }
        )
    return found


def _steps_seen(turns: float, inv_freq: float, apart: int) -> int:
    """Return at how many steps of distance the angle between query and key is one that training showed."""
    if turns >= 1 or inv_freq == 0:
        return STEPS
    return min(STEPS, math.floor(turns * 2 * math.pi / inv_freq * (1 + 1e-6) / apart))


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
