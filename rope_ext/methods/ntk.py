"""NTK-aware scaling: the base raised so that the slowest pair is interpolated and the fastest left alone."""

from dataclasses import dataclass
from typing import ClassVar

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry, base_inv_freq
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Ntk(StaticMethod):
    """Replaces the base by theta * factor^(d/(d-2)): pair 0 keeps its frequency, the last is divided by the factor.

    Source: bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et al., YaRN (arXiv 2309.00071), section 3.1, equation 16.
    """

    name: ClassVar[str] = "ntk"
    summary: ClassVar[str] = "the base raised with the factor"
    source: ClassVar[str] = "bloc97 2023; arXiv 2309.00071, sec. 3.1"
    needs_training: ClassVar[str] = "no"

    def _theta(self, rope: RopeGeometry, context: int) -> float:
        if rope.head_dim == 2:
            raise MethodError("ntk: head_dim 2 has one pair, first and last at once; use linear")
        return rope.theta * self.factor(rope, context) ** (rope.head_dim / (rope.head_dim - 2))

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the frequencies of the raised base, fp32, shape (head_dim/2,).

        Raises:
            MethodError: head_dim is 2, where the exponent is undefined.
        """
        return PositionPlan(inv_freq=base_inv_freq(rope.head_dim, self._theta(rope, context)))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return the default type with the raised base: the one form that every engine reads alike."""
        return {"rope_type": "default", "rope_theta": self._theta(rope, context)}
