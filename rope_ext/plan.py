"""What a method does to a geometry, and the protocol that every method follows."""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsFloat, cast, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from rope_ext.errors import ContextError, MethodError
from rope_ext.geometry import RopeGeometry, base_inv_freq

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FrequencyKey = str | int
"""What a plan depends on besides its geometry and context; equal keys mean equal plans."""

STATIC: FrequencyKey = "static"
"""The key of every method whose frequencies do not depend on the current length."""

WRAPPED = "over"
"""The hyper-parameter that holds another method, in every method that wraps one; its spelling goes to the end."""

LIST_SEPARATOR = ";"
"""Stands between the numbers of a list in a spelling."""

RopeParameters = dict[str, str | int | float | bool | list[float]]
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
class Stretch:
    """What every method here shares: the stretch that is asked for, and when it may be."""

    name: ClassVar[str]
    composes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Make hyper-parameters plain values of the kind of their defaults; a subclass with checks calls this first.

        Raises:
            MethodError: a value of another kind, as text where a number belongs.
        """
        for field in fields(self):
            value = _plain_value(self.name, field.name, getattr(self, field.name), field.default)
            object.__setattr__(self, field.name, value)

    def factor(self, rope: RopeGeometry, context: int) -> float:
        """Return context / original_context, the stretch, if this method may be asked for it.

        Raises:
            ContextError: the context is below the original window.
            MethodError: the geometry is already scaled and the method is not defined over that.
        """
        if context < rope.original_context:
            raise ContextError(
                f"context: {context} is below the original window of {rope.original_context} tokens; give at least that"
            )
        if rope.is_scaled and not self.composes:
            raise MethodError(
                f'{self.name}: not defined over frequencies that are already scaled; use base="original", or linear'
            )
        return context / rope.original_context


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMethod(Stretch):
    """Base of every method whose frequencies depend on the window alone, not on the current length."""

    def frequency_key(self, rope: RopeGeometry, *, context: int, seq_len: int) -> FrequencyKey:
        """Return the one key: every length shares one plan, so one forward serves them all."""
        return STATIC

    def rope_parameters(self: Method, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return the general stock form; a method with a type of its own in transformers overrides this."""
        return general_rope_parameters(rope, self.plan(rope, context=context, seq_len=context), context=context)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicMethod(Stretch):
    """Base of the methods that are unscaled up to the original window and follow every token beyond it.

    The current length is that of one sequence, as it stands: nothing is remembered of longer ones before, and a
    longer row beside it in the batch changes nothing.
    """

    def current_factor(self, rope: RopeGeometry, seq_len: int) -> float:
        """Return how far `seq_len` tokens reach beyond the original window: max(1, seq_len / original_context)."""
        return max(1.0, seq_len / rope.original_context)

    def frequency_key(self, rope: RopeGeometry, *, context: int, seq_len: int) -> FrequencyKey:
        """Return "original" up to the original window, and the length itself beyond."""
        return "original" if seq_len <= rope.original_context else seq_len

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Refuse: no type of stock transformers gives these frequencies.

        Raises:
            MethodError: always; a method with a type of its own overrides this.
        """
        raise MethodError(
            f"{self.name}: its frequencies follow the current length; stock transformers has no such type"
        )


def _plain_value(method: str, name: str, value: object, default: object) -> object:
    """Return a number as float, a list as a tuple of floats, a wrapped method and text as they are."""
    if name == WRAPPED:
        if value is not None and (isinstance(value, type) or not isinstance(value, Method)):
            raise MethodError(f"{method}: {name} is {value!r}; it must be a method, as Yarn(), or None")
        return value
    try:
        if isinstance(default, tuple):
            return tuple(float(part) for part in cast("Iterable[SupportsFloat]", value))
        if isinstance(default, bool):
            return bool(_kind(value, (bool, np.bool_)))
        if isinstance(default, str):  # a choice of words, or a number in place of "auto"
            return value if isinstance(value, str) else float(_kind(value, Real))
        return float(_kind(value, Real))
    except (TypeError, ValueError, OverflowError):
        raise MethodError(f"{method}: {name} is {value!r:.200}; it must be of the kind of {default!r}") from None


def _kind(value: object, kinds: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is Real):
        raise TypeError
    return value


def general_rope_parameters(rope: RopeGeometry, plan: PositionPlan, *, context: int) -> RopeParameters:
    """Return any static plan as transformers' "longrope" type, whose short and long factors are the same list.

    Exact in transformers. vLLM and SGLang set the attention scale of this type by a rule of their own unless they find
    the pair of mscales, which transformers warns about as unknown and ignores.
    """
    if plan.alibi_slopes is not None:
        raise MethodError("plan: a bias on attention has no stock form in transformers")
    if not bool((plan.inv_freq > 0).all()):
        raise MethodError("plan: pairs that do not turn have no stock form in transformers")
    # Divided in float64: stock code multiplies these with the periods in fp32
    factors = (base_inv_freq(rope.head_dim, rope.theta).double() / plan.inv_freq.double()).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": rope.theta,
        "factor": context / rope.original_context,
        "original_max_position_embeddings": rope.original_context,
        "short_factor": factors,
        "long_factor": factors,
        **longrope_scale_keys(plan.attention_scale),
    }


def longrope_scale_keys(scale: float) -> RopeParameters:
    """Return an attention scale in every way that readers of the "longrope" type look for one."""
    return {"attention_factor": float(scale), "short_mscale": float(scale), "long_mscale": float(scale)}


def hyperparameters(method: Method) -> Mapping[str, object]:
    """Return the method's own fields by name, in order, as plain values: a wrapped method by its spelling."""
    values = {field.name: getattr(method, field.name) for field in fields(cast("DataclassInstance", method))}
    return {name: spell(value) if isinstance(value, Method) else value for name, value in values.items()}


def spell(method: Method) -> str:
    """Return the method as it is written on the command line: its name and the hyper-parameters off their defaults.

    A wrapped method comes last, because all that follows its name belongs to it.
    """
    default = hyperparameters(type(method)())
    changed = [
        f"{name}={_spell_value(value)}"
        for name, value in sorted(hyperparameters(method).items(), key=lambda item: item[0] == WRAPPED)
        if value != default[name]
    ]
    return ":".join([method.name, *changed])


def label(method: Method) -> str:
    """Return the method's spelling as a reader wants it: of a list only a checksum, as #59d3481e."""
    return re.sub(r"=([^:=]*;[^:]*)", lambda found: f"=#{zlib.crc32(found[1].encode()):08x}", spell(method))


def _spell_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return LIST_SEPARATOR.join(_spell_value(part) for part in cast("tuple[object, ...]", value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
