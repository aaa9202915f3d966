"""Adjusted base frequency: a larger base slows every pair but the first."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry, base_inv_freq
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Abf(StaticMethod):
    """Replaces the base.

    Attributes:
        theta: the new base, whatever the factor; or "auto": the base under which the pair that turned just once in
            the original window turns just once in the new one, theta^(ln(context/2pi) / ln(original/2pi)).

    Source: Xiong et al., Effective Long-Context Scaling (arXiv 2309.16039), section 2.1, and Roziere et al., Code
    Llama (arXiv 2308.12950), section 2.4, which take 1e6 by hand; "auto" follows from the critical dimension of Liu
    et al., Scaling Laws of RoPE-based Extrapolation (arXiv 2310.05209), theorem 2, without its rounding to pairs.

    Raises:
        MethodError: theta is not a number above 1 that fp32 holds, or (on planning) below the checkpoint's own.
    """

    name: ClassVar[str] = "abf"
    summary: ClassVar[str] = "the base replaced by a larger one (theta)"
    source: ClassVar[str] = "Xiong et al. 2023, arXiv 2309.16039, sec. 2.1"
    needs_training: ClassVar[str] = "brief"

    theta: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        StaticMethod.__post_init__(self)
        if self.theta != "auto" and not 1 < self.theta < 3e38:
            raise MethodError(
                f'abf: theta {self.theta} is not a rotary base; give "auto" or a number above 1 that fp32 holds (3e38)'
            )

    def _theta(self, rope: RopeGeometry, context: int) -> float:
        self.factor(rope, context)
        if self.theta == "auto":
            turns_once = 2 * math.pi
            if rope.original_context <= turns_once:
                raise MethodError(f"abf: no pair turns once in {rope.original_context} tokens; state theta yourself")
            return rope.theta ** (math.log(context / turns_once) / math.log(rope.original_context / turns_once))
        if self.theta < rope.theta:
            raise MethodError(
                f"abf: theta {self.theta:g} is below the checkpoint's own {rope.theta:g}; give a larger one"
            )
        return float(self.theta)

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the frequencies of the new base, fp32, shape (head_dim/2,).

        Raises:
            MethodError: theta is below the checkpoint's, which would shorten the reach instead.
        """
        return PositionPlan(inv_freq=base_inv_freq(rope.head_dim, self._theta(rope, context)))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return the default type with the new base: every engine reads it."""
        return {"rope_type": "default", "rope_theta": self._theta(rope, context)}
