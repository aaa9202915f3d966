"""p-RoPE: only the fastest pairs turn; the slow ones carry content without position."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class PRope(StaticMethod):
    """Keeps the fastest `fraction` of the pairs and stops the rest, whatever the factor.

    Attributes:
        fraction: of the pairs that keep turning, rounded down to whole pairs.

    Source: Barbero et al., Round and Round We Go (arXiv 2410.06205), section 6, where models are trained so; as a
    retrofit it is an ablation.

    Raises:
        MethodError: the fraction is outside (0, 1], or (on planning) leaves no pair turning.
    """

    name: ClassVar[str] = "p-rope"
    summary: ClassVar[str] = "the slowest pairs stopped, the fastest fraction kept"
    source: ClassVar[str] = "Barbero et al. 2024, arXiv 2410.06205, sec. 6"
    needs_training: ClassVar[str] = "yes"
    composes: ClassVar[bool] = True

    fraction: float = 0.75

    def __post_init__(self) -> None:
        StaticMethod.__post_init__(self)
        if not 0 < self.fraction <= 1:
            raise MethodError(f"p-rope: fraction {self.fraction} is outside (0, 1]; use nope to stop all pairs")

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the frequencies with zeros for the stopped pairs, fp32, shape (head_dim/2,).

        Raises:
            MethodError: the fraction rounds down to no pair.
        """
        self.factor(rope, context)
        kept = int(self.fraction * rope.head_dim // 2)
        if kept == 0:
            raise MethodError(f"p-rope: fraction {self.fraction} of {rope.num_pairs} pairs is less than one; raise it")
        turning = torch.arange(rope.num_pairs) < kept
        return PositionPlan(inv_freq=torch.where(turning, rope.inv_freq, 0.0))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "proportional" type (transformers 5 only)."""
        return {
            "rope_type": "proportional",
            "rope_theta": rope.theta,
            "partial_rotary_factor": self.fraction,
        }
