"""What a method does to a geometry, and the protocol that every method follows."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol, cast, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from rope_ext.geometry import RopeGeometry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FrequencyKey = str | int
"""What a plan depends on besides its geometry and context; equal keys mean equal plans."""

STATIC: FrequencyKey = "static"
"""The key of every method whose frequencies do not depend on the current length."""

RopeParameters = dict[str, str | int | float | bool]
"""The dictionary `config.rope_parameters` of transformers 5."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PositionPlan:
    """The whole effect of a method on a model.

    Attributes:
        inv_freq: angular frequencies, fp32, rad/token, shape (head_dim/2,); zero means that the pair is not rotated.
        attention_scale: multiplies cos AND sin, so attention logits scale by its square.
        alibi_slopes: shape (num_heads,), added as -slope * (i - j) before the softmax, or None for no bias.
    """

    inv_freq: Float[Tensor, " pairs"]
    attention_scale: float = 1.0
    alibi_slopes: Float[Tensor, " heads"] | None = None


@runtime_checkable
class Method(Protocol):
    """A way to stretch positions: a frozen dataclass of its own hyper-parameters, pure and without a model.

    The stretch itself is never a field: `factor = context / original_context`.
    """

    name: ClassVar[str]
    """Name in the registry, as papers and users say it."""
    summary: ClassVar[str]
    """What it changes, in one phrase; a row of the methods table."""
    source: ClassVar[str]
    """Where it was published."""
    needs_training: ClassVar[str]
    """Whether it is of use without fine-tuning: "no", "brief" or "yes"."""
    composes: ClassVar[bool]
    """Whether it is defined on a checkpoint whose frequencies are already scaled."""

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the plan for a window of `context` tokens when the current sequence has `seq_len` tokens."""
        ...

    def frequency_key(self, rope: RopeGeometry, *, context: int, seq_len: int) -> FrequencyKey:
        """Return what `plan` depends on at this length; evaluations share work between equal keys only."""
        ...

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return the stock configuration that gives the same frequencies and scale."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMethod:
    """Base of every method whose frequencies depend on the window alone, not on the current length."""

    composes: ClassVar[bool] = False

    def frequency_key(self, rope: RopeGeometry, *, context: int, seq_len: int) -> FrequencyKey:
        """Return the one key: every length shares one plan, so one forward serves them all."""
        return STATIC


def hyperparameters(method: Method) -> Mapping[str, object]:
    """Return the method's own fields by name, in order."""
    return {field.name: getattr(method, field.name) for field in fields(cast("DataclassInstance", method))}


def spell(method: Method) -> str:
    """Return the method as it is written on the command line: its name and the hyper-parameters off their defaults."""
    default = type(method)()
    changed = [
        f"{name}={_spell_value(value)}"
        for name, value in hyperparameters(method).items()
        if value != getattr(default, name)
    ]
    return ":".join([method.name, *changed])


def _spell_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
