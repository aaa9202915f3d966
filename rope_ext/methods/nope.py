"""No positions: nothing turns; order is known from the causal mask alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Nope(StaticMethod):
    """Stops every pair, whatever the factor.

    Source: Kazemnejad et al., The Impact of Positional Encoding on Length Generalization (arXiv 2305.19466), section
    2, where models are trained so; dropped from a trained model it needs recalibration.
    """

    name: ClassVar[str] = "nope"
    summary: ClassVar[str] = "no rotation at all"
    source: ClassVar[str] = "Kazemnejad et al. 2023, arXiv 2305.19466"
    needs_training: ClassVar[str] = "yes"
    composes: ClassVar[bool] = True

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return zeros, fp32, shape (head_dim/2,)."""
        self.factor(rope, context)
        return PositionPlan(inv_freq=torch.zeros_like(rope.inv_freq))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "proportional" type with no proportion (transformers 5 only)."""
        return {"rope_type": "proportional", "rope_theta": rope.theta, "partial_rotary_factor": 0.0}
