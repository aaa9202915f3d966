"""Dynamic NTK: the base follows the current length, and nothing changes up to the original window."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry, base_inv_freq
from rope_ext.plan import DynamicMethod, PositionPlan, RopeParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNtk(DynamicMethod):
    """At l tokens, l above the original window L, the base is theta * (alpha l/L - (alpha - 1))^(d/(d-2)).

    Attributes:
        alpha: how fast the base grows; "auto" is the factor, as in transformers' "dynamic" type. With 1 the base is
            that of NTK-aware scaling by l/L, the form of the YaRN paper.

    Source: emozilla, "Dynamically Scaled RoPE" (2023); Peng et al., YaRN (arXiv 2309.00071), section 3.3. Unlike
    transformers' module this one keeps no state: the frequencies are a function of the sequence at hand.

    Raises:
        MethodError: alpha is not positive, or (on planning) head_dim is 2, where the exponent is undefined.
    """

    name: ClassVar[str] = "dynamic-ntk"
    summary: ClassVar[str] = "the base raised with the current length, from the original window on"
    source: ClassVar[str] = "emozilla 2023; arXiv 2309.00071, sec. 3.3"
    needs_training: ClassVar[str] = "no"

    alpha: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        DynamicMethod.__post_init__(self)
        if self.alpha != "auto" and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise MethodError(f'dynamic-ntk: alpha {self.alpha} must be "auto" or a positive number')

    def _alpha(self, rope: RopeGeometry, context: int) -> float:
        factor = self.factor(rope, context)
        return factor if self.alpha == "auto" else self.alpha

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the frequencies of the base at `seq_len` tokens, fp32, shape (head_dim/2,)."""
        alpha = self._alpha(rope, context)
        if rope.head_dim == 2:
            raise MethodError("dynamic-ntk: head_dim 2 has one pair, first and last at once; use linear")
        growth = alpha * self.current_factor(rope, seq_len) - (alpha - 1) if seq_len > rope.original_context else 1.0
        try:
            theta = rope.theta * growth ** (rope.head_dim / (rope.head_dim - 2))
        except OverflowError:
            raise MethodError(f"dynamic-ntk: alpha {alpha:g} gives no base that a float can hold; lower it") from None
        return PositionPlan(inv_freq=base_inv_freq(rope.head_dim, theta))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "dynamic" type, which takes the stored window as the original one."""
        return {"rope_type": "dynamic", "rope_theta": rope.theta, "factor": self._alpha(rope, context)}
