"""Position interpolation: every position, and so every frequency, divided by the factor."""

from dataclasses import dataclass
from typing import ClassVar

from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(StaticMethod):
    """Divides all frequencies by factor = context / original_context.

    Source: Chen et al., Position Interpolation (arXiv 2306.15595), equation 4; also kaiokendev (2023).
    """

    name: ClassVar[str] = "linear"
    summary: ClassVar[str] = "all frequencies divided by the factor"
    source: ClassVar[str] = "Chen et al. 2023, arXiv 2306.15595, eq. 4"
    needs_training: ClassVar[str] = "yes"
    composes: ClassVar[bool] = True

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return inv_freq / factor, fp32, shape (head_dim/2,)."""
        return PositionPlan(inv_freq=rope.inv_freq / self.factor(rope, context))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "linear" type.

        vLLM takes the stored window times the factor for its own limit: cap it there with --max-model-len.
        """
        return {"rope_type": "linear", "rope_theta": rope.theta, "factor": self.factor(rope, context)}
