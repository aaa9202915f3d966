"""LLaMA-3.1's rescaling: long wavelengths divided, short ones kept, a blend in turns between."""

import math
from dataclasses import dataclass
from typing import ClassVar

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod
from rope_ext.ramp import blend


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(StaticMethod):
    """Decides pair by pair by the number of turns inside the original window.

    More than `high_freq_factor` turns: kept. Fewer than `low_freq_factor`: divided by the factor. Between the two: a
    blend, linear in the number of turns.

    Source: Grattafiori et al., The Llama 3 Herd (arXiv 2407.21783), and Meta's reference code `apply_scaling`
    (llama-models, 2024); the paper states only the base, the code is the definition.

    Raises:
        MethodError: high_freq_factor is not above low_freq_factor, or one is not positive.
    """

    name: ClassVar[str] = "llama3"
    summary: ClassVar[str] = "long wavelengths divided, short ones kept, a blend between"
    source: ClassVar[str] = "Meta llama-models 2024, apply_scaling"
    needs_training: ClassVar[str] = "brief"

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        StaticMethod.__post_init__(self)
        if not (math.isfinite(self.high_freq_factor) and self.high_freq_factor > self.low_freq_factor > 0):
            raise MethodError(
                f"llama3: low_freq_factor {self.low_freq_factor:g} and high_freq_factor {self.high_freq_factor:g}: "
                "they must be finite with high_freq_factor > low_freq_factor > 0"
            )

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the rescaled frequencies, fp32, shape (head_dim/2,)."""
        factor = self.factor(rope, context)
        kept = (rope.rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        interpolation = 1.0 - kept.clamp(0.0, 1.0)
        return PositionPlan(inv_freq=blend(rope, interpolation, factor))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "llama3" type."""
        return {
            "rope_type": "llama3",
            "rope_theta": rope.theta,
            "factor": self.factor(rope, context),
            "original_max_position_embeddings": rope.original_context,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }
