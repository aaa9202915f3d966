"""YaRN: fast pairs kept, slow pairs interpolated, a ramp between them, and a temperature on attention."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn(StaticMethod):
    """Blends by pair index, as the authors' code and transformers do.

    Attributes:
        beta_fast: pairs with more turns than this inside the original window keep their frequency.
        beta_slow: pairs with fewer turns than this are divided by the factor.
        truncate: round the ends of the ramp outwards to whole pairs.
        attention_scale: multiplies cos and sin; "auto" is 0.1 ln(factor) + 1, the paper's fit.

    Source: Peng et al., YaRN (arXiv 2309.00071), sections 3.2 and 3.4, equation 22. The paper's ramp is linear in
    the number of turns, the published code's in the pair index; they differ by up to 3x on the ramp, and this is
    the code's. The upper end is clamped to head_dim - 1 as there, not to the last pair.

    Raises:
        MethodError: beta_fast is not above beta_slow, a beta is not positive, or the scale is not positive.
    """

    name: ClassVar[str] = "yarn"
    summary: ClassVar[str] = "fast pairs kept, slow ones divided, a ramp between; attention temperature"
    source: ClassVar[str] = "Peng et al. 2023, arXiv 2309.00071, sec. 3"
    needs_training: ClassVar[str] = "brief"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta_fast) and self.beta_fast > self.beta_slow > 0):
            raise MethodError(
                f"yarn: beta_fast {self.beta_fast:g} and beta_slow {self.beta_slow:g}: they must be finite with "
                "beta_fast > beta_slow > 0"
            )
        if self.attention_scale != "auto" and not (math.isfinite(self.attention_scale) and self.attention_scale > 0):
            raise MethodError(f'yarn: attention_scale {self.attention_scale} must be "auto" or a positive number')

    def interpolation(self, rope: RopeGeometry) -> Float[Tensor, " pairs"]:
        """Return the blend weight of each pair, float64, shape (head_dim/2,): 0 keeps it, 1 divides it by the factor.

        Raises:
            MethodError: the whole ramp lies outside the pairs, where the published code would blend the wrong way.
        """
        low, high = (self._pair_turning(rope, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.head_dim - 1)
        if low > high:
            raise MethodError(
                f"yarn: no pair turns between beta_slow {self.beta_slow:g} and beta_fast {self.beta_fast:g} times in "
                f"{rope.original_context} tokens at theta {rope.theta:g}; change the betas"
            )
        if low == high:
            high += 0.001  # the published code's guard; a step, not a ramp
        pair = torch.arange(rope.num_pairs, dtype=torch.float64)
        return ((pair - low) / (high - low)).clamp(0.0, 1.0)

    @staticmethod
    def _pair_turning(rope: RopeGeometry, turns: float) -> float:
        """Return the (fractional) pair that makes `turns` turns inside the original window."""
        return rope.head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the blended frequencies, fp32, shape (head_dim/2,), and the attention scale."""
        factor = self.factor(rope, context)
        # f * (1 - w + w/s), arranged so that a factor of 1 multiplies by exactly 1
        shrink = 1.0 - self.interpolation(rope) * (1.0 - 1.0 / factor)
        scale = 0.1 * math.log(factor) + 1.0 if self.attention_scale == "auto" else float(self.attention_scale)
        return PositionPlan(inv_freq=(rope.inv_freq.double() * shrink).float(), attention_scale=scale)

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "yarn" type; the scale is written only when it is not the default.

        llama.cpp reads neither betas nor the scale of a LLaMA, so only the defaults are portable there.
        """
        parameters: RopeParameters = {
            "rope_type": "yarn",
            "rope_theta": rope.theta,
            "factor": self.factor(rope, context),
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        }
        if self.attention_scale != "auto":
            parameters["attention_factor"] = float(self.attention_scale)
        return parameters
