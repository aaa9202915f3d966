"""No change: the control that every claim is measured against."""

from dataclasses import dataclass
from typing import ClassVar

from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled(StaticMethod):
    """Leaves every frequency as trained; positions past the window are simply extrapolated.

    Source: Su et al., RoFormer (arXiv 2104.09864), equation 15.
    """

    name: ClassVar[str] = "unscaled"
    summary: ClassVar[str] = "nothing: the control"
    source: ClassVar[str] = "Su et al. 2021, arXiv 2104.09864"
    needs_training: ClassVar[str] = "no"
    composes: ClassVar[bool] = True

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the geometry's own frequencies, the same object, at any context."""
        self.factor(rope, context)
        return PositionPlan(inv_freq=rope.inv_freq)

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' default rotary type."""
        return {"rope_type": "default", "rope_theta": rope.theta}
