"""NTK-by-parts: YaRN's frequencies without its attention temperature."""

from dataclasses import dataclass
from typing import ClassVar

from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod
from rope_ext.ramp import blend, check_betas, ramp_over_pairs, yarn_scale_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class NtkByParts(StaticMethod):
    """Keeps fast pairs, divides slow ones, blends linearly in the pair index between.

    Attributes:
        beta_fast: pairs with more turns than this inside the original window keep their frequency.
        beta_slow: pairs with fewer turns than this are divided by the factor.
        truncate: round the ends of the ramp outwards to whole pairs.

    Source: bloc97 (2023); Peng et al., YaRN (arXiv 2309.00071), section 3.2. The ramp is that of the authors' YaRN
    code; their older function of this name blends twice, with other constants, and is another method.

    Raises:
        MethodError: beta_fast is not above beta_slow, or a beta is not positive.
    """

    name: ClassVar[str] = "ntk-by-parts"
    summary: ClassVar[str] = "fast pairs kept, slow ones divided, a ramp between"
    source: ClassVar[str] = "Peng et al. 2023, arXiv 2309.00071, sec. 3.2"
    needs_training: ClassVar[str] = "brief"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        StaticMethod.__post_init__(self)
        check_betas(self.name, beta_fast=self.beta_fast, beta_slow=self.beta_slow)

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the blended frequencies, fp32, shape (head_dim/2,).

        Raises:
            MethodError: the whole ramp lies outside the pairs.
        """
        factor = self.factor(rope, context)
        interpolation = ramp_over_pairs(
            self.name, rope, beta_fast=self.beta_fast, beta_slow=self.beta_slow, truncate=self.truncate
        )
        return PositionPlan(inv_freq=blend(rope, interpolation, factor))

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "yarn" type with a scale of 1."""
        return {
            "rope_type": "yarn",
            "rope_theta": rope.theta,
            "factor": self.factor(rope, context),
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            **yarn_scale_keys(self.factor(rope, context), 1.0),
        }
