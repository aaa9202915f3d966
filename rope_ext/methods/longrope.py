"""LongRoPE: every pair divided by a factor of its own, from one searched list for short and one for long inputs."""

import csv
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import BeforeValidator

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import LIST_SEPARATOR, FrequencyKey, PositionPlan, RopeParameters, Stretch, longrope_scale_keys
from rope_ext.ramp import check_attention_scale


def read_factors(path: Path, column: str) -> tuple[float, ...]:
    """Return the numbers of a JSON or CSV file.

    JSON is a list, or an object (a model's config.json too) with a list under `column`. CSV has a column of that
    name, or no header and nothing but numbers in one row or one column.

    Raises:
        MethodError: the file cannot be read, has no such list, or holds something that is no number.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")  # spreadsheets put a mark first
    except UnicodeDecodeError:
        raise MethodError(f"longrope: {column}: {path} cannot be read: it is not UTF-8 text") from None
    except (OSError, ValueError, RuntimeError) as error:  # also: a NUL in the name, nobody's home
        reason = getattr(error, "strerror", None) or str(error)
        raise MethodError(f"longrope: {column}: {str(path)!r:.200} cannot be read: {reason}") from error
    found = _from_json(text, path, column) if path.suffix.lower() == ".json" else _from_csv(text, path, column)
    if not found:
        raise MethodError(f"longrope: {column}: {path} holds no numbers")
    try:
        return tuple(float(cast("str", None if isinstance(value, bool) else value)) for value in found)
    except (TypeError, ValueError, OverflowError):
        raise MethodError(f"longrope: {column}: {path} holds something that is not a number: {found!r:.200}") from None


def _from_json(text: str, path: Path, column: str) -> list[object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MethodError(f"longrope: {column}: {path} is not JSON: {error}") from None
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    if isinstance(value, dict):
        if column not in value:
            raise MethodError(
                f"longrope: {column}: {path} has no such key; it has: {' '.join(', '.join(value).split())[:200]}"
            )
        value = value[column]
    if not isinstance(value, list):
        raise MethodError(f"longrope: {column}: {path} holds no list there")
    return value


def _from_csv(text: str, path: Path, column: str) -> list[object]:
    try:
        read = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    except csv.Error as error:
        raise MethodError(f"longrope: {column}: {path} is not CSV: {error}") from None
    rows = [row for row in read if any(row)]
    if not rows:
        return []
    if column in rows[0]:
        place = rows[0].index(column)
        if any(len(row) <= place for row in rows):
            raise MethodError(f"longrope: {column}: {path} has rows that are too short for its column {place + 1}")
        return [row[place] for row in rows[1:]]
    if len(rows) > 1 and max(len(row) for row in rows) > 1:
        raise MethodError(
            f"longrope: {column}: {path} has no column of that name; it starts with: {','.join(rows[0])[:200]}"
        )
    return [cell for row in rows for cell in row]


def _factors(value: object, column: str) -> object:
    """Return a list of numbers for text from the command line or YAML: the numbers themselves, or a file's name."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) for part in value.split(LIST_SEPARATOR))
    except ValueError:
        return read_factors(Path(value), column)


ShortFactors = Annotated[tuple[float, ...], BeforeValidator(functools.partial(_factors, column="short_factor"))]
LongFactors = Annotated[tuple[float, ...], BeforeValidator(functools.partial(_factors, column="long_factor"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Longrope(Stretch):
    """Divides pair i by short_factor[i] up to the original window, and by long_factor[i] beyond it.

    Attributes:
        short_factor: one number a pair; none keeps all frequencies up to the original window.
        long_factor: one number a pair; needed. Lists are found by a search for one model and one window. As text,
            either is a JSON or CSV file (one whose name is a number needs "./" before it), or numbers with ";" between.
        attention_scale: multiplies cos and sin at every length; "auto" is sqrt(1 + ln(factor) / ln(original_context)).

    Source: Ding et al., LongRoPE (arXiv 2402.13753), section 3; the scale is of the Phi-3 models (their
    configuration and modelling code), not of the paper. A sequence of exactly the original window is short, as in
    transformers.

    Raises:
        MethodError: a factor or the scale is not positive, or (on planning) a list does not fit the pairs.
    """

    name: ClassVar[str] = "longrope"
    summary: ClassVar[str] = "each pair divided by its own searched factor, other ones within the original window"
    source: ClassVar[str] = "Ding et al. 2024, arXiv 2402.13753, sec. 3"
    needs_training: ClassVar[str] = "brief"

    short_factor: ShortFactors = ()
    long_factor: LongFactors = ()
    attention_scale: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        Stretch.__post_init__(self)
        check_attention_scale(self.name, self.attention_scale)
        for name in ("short_factor", "long_factor"):
            for pair, value in enumerate(getattr(self, name)):
                if not (math.isfinite(value) and value > 0):
                    raise MethodError(f"longrope: {name} of pair {pair} is {value}; it must be a positive number")

    def _lists(self, rope: RopeGeometry) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if not self.long_factor:
            raise MethodError(
                "longrope: no factors; give long_factor=FILE (JSON or CSV), found by a search for the model"
            )
        short = self.short_factor or (1.0,) * rope.num_pairs
        for name, factors in (("short_factor", short), ("long_factor", self.long_factor)):
            if len(factors) != rope.num_pairs:
                raise MethodError(
                    f"longrope: {name} has {len(factors)} numbers; head_dim {rope.head_dim} needs {rope.num_pairs}"
                )
        return short, self.long_factor

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the divided frequencies at `seq_len` tokens, fp32, shape (head_dim/2,), and the attention scale.

        Raises:
            MethodError: no factors, or a list of another length than head_dim/2.
        """
        factor = self.factor(rope, context)
        short, long = self._lists(rope)
        factors = torch.tensor(short if seq_len <= rope.original_context else long, dtype=torch.float)
        scale = 1.0 if self.attention_scale == "auto" else float(self.attention_scale)
        if self.attention_scale == "auto" and factor > 1 and rope.original_context > 1:
            scale = math.sqrt(1 + math.log(factor) / math.log(rope.original_context))
        # transformers' expression in its order and precision, so that an export is equal to the last bit
        exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float) / rope.head_dim
        return PositionPlan(inv_freq=1.0 / (factors * rope.theta**exponents), attention_scale=scale)

    def frequency_key(self, rope: RopeGeometry, *, context: int, seq_len: int) -> FrequencyKey:
        """Return "short" up to the original window, itself included, and "long" beyond."""
        return "short" if seq_len <= rope.original_context else "long"

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "longrope" type; the scale is written only when it is not the default."""
        short, long = self._lists(rope)
        parameters: RopeParameters = {
            "rope_type": "longrope",
            "rope_theta": rope.theta,
            "factor": self.factor(rope, context),
            "original_max_position_embeddings": rope.original_context,
            "short_factor": list(short),
            "long_factor": list(long),
        }
        if self.attention_scale != "auto" or rope.original_context == 1:  # of 1 token the default is undefined
            scale = 1.0 if self.attention_scale == "auto" else float(self.attention_scale)
            parameters |= longrope_scale_keys(scale)
        return parameters
