"""Resonance: every wavelength rounded to whole tokens, on top of another method's frequencies."""

import math
from dataclasses import dataclass
from typing import ClassVar

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import STATIC, Method, PositionPlan, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Resonance(StaticMethod):
    """Rounds the wavelengths that the wrapped method gives, so that a pair returns to the very angles it has seen.

    Attributes:
        over: the static method to round, as Yarn(), or "yarn:beta_fast=16" on the command line; None rounds the
            checkpoint's own frequencies. Pairs that it stops stay stopped, and its attention scale is kept.

    Source: Wang et al., Resonance RoPE (arXiv 2403.00071), section 3.2, where models are trained so. It rounds to the
    nearest integer, halves to even.

    Raises:
        MethodError: the wrapped method is a resonance itself, or (on planning) follows the current length.
    """

    name: ClassVar[str] = "resonance"
    summary: ClassVar[str] = "wavelengths rounded to whole tokens, over another static method"
    source: ClassVar[str] = "Wang et al. 2024, arXiv 2403.00071, sec. 3.2"
    needs_training: ClassVar[str] = "brief"
    composes: ClassVar[bool] = True

    over: Method | None = None

    def __post_init__(self) -> None:
        StaticMethod.__post_init__(self)
        if self.over is not None and self.over.name == self.name:
            raise MethodError("resonance: it is over another resonance, which rounds once already; drop one")

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return 2 pi / round(wavelength), fp32, shape (head_dim/2,), and the wrapped method's attention scale.

        Raises:
            MethodError: the wrapped method follows the current length, carries a bias, or refuses the geometry.
        """
        self.factor(rope, context)
        inner = PositionPlan(inv_freq=rope.inv_freq)
        if self.over is not None:
            lengths = (1, rope.original_context + 1, context)
            if {self.over.frequency_key(rope, context=context, seq_len=n) for n in lengths} != {STATIC}:
                raise MethodError(f"resonance: {self.over.name} follows the current length; wrap a static method")
            inner = self.over.plan(rope, context=context, seq_len=seq_len)
        if inner.alibi_slopes is not None:
            raise MethodError("resonance: the wrapped method turns nothing, so there is no wavelength to round")
        wavelengths = (2 * math.pi / inner.inv_freq.double()).round()  # inf, for a stopped pair, gives 0 again
        return PositionPlan(inv_freq=(2 * math.pi / wavelengths).float(), attention_scale=inner.attention_scale)
