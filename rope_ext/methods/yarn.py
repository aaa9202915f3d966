"""YaRN: fast pairs kept, slow pairs interpolated, a ramp between them, and a temperature on attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import PositionPlan, RopeParameters, StaticMethod, general_rope_parameters
from rope_ext.ramp import (
    attention_temperature,
    blend,
    check_attention_scale,
    check_betas,
    ramp_over_pairs,
    ramp_over_rotations,
    yarn_scale_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn(StaticMethod):
    """Blends as the authors' code and transformers do, unless `ramp` asks for the paper's form.

    Attributes:
        beta_fast: pairs with more turns than this inside the original window keep their frequency.
        beta_slow: pairs with fewer turns than this are divided by the factor.
        ramp: "pair", linear in the pair index, is the published code's; "rotations", linear in the number of turns,
            the paper's. They differ on the ramp, by up to 3x at LLaMA-2's geometry and factor 16.
        truncate: round the ends of the "pair" ramp outwards to whole pairs; without effect on "rotations".
        attention_scale: multiplies cos and sin; "auto" is 0.1 ln(factor) + 1, the paper's fit.

    Source: Peng et al., YaRN (arXiv 2309.00071), sections 3.2 and 3.4, equation 22, and the authors' code.

    Raises:
        MethodError: beta_fast is not above beta_slow, a beta or the scale is not positive, or truncate=False is asked
            of the "rotations" ramp, which has nothing to round.
    """

    name: ClassVar[str] = "yarn"
    summary: ClassVar[str] = "fast pairs kept, slow ones divided, a ramp between; attention temperature"
    source: ClassVar[str] = "Peng et al. 2023, arXiv 2309.00071, sec. 3"
    needs_training: ClassVar[str] = "brief"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: Literal["pair", "rotations"] = "pair"
    truncate: bool = True
    attention_scale: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        StaticMethod.__post_init__(self)
        check_betas(self.name, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        if self.ramp == "rotations" and not self.truncate:
            raise MethodError("yarn: truncate=false has no effect on ramp=rotations, which rounds nothing; drop it")
        check_attention_scale(self.name, self.attention_scale)

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the blended frequencies, fp32, shape (head_dim/2,), and the attention scale.

        Raises:
            MethodError: the whole ramp lies outside the pairs.
        """
        factor = self.factor(rope, context)
        if self.ramp == "pair":
            interpolation = ramp_over_pairs(
                self.name, rope, beta_fast=self.beta_fast, beta_slow=self.beta_slow, truncate=self.truncate
            )
        else:
            interpolation = ramp_over_rotations(rope, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        scale = attention_temperature(factor) if self.attention_scale == "auto" else float(self.attention_scale)
        return PositionPlan(inv_freq=blend(rope, interpolation, factor), attention_scale=scale)

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Return transformers' "yarn" type; the scale is written only when it is not the default.

        llama.cpp reads neither betas nor the scale of a LLaMA, so only the defaults are portable there. The
        "rotations" ramp has no type of its own and is written pair by pair.
        """
        if self.ramp == "rotations":
            plan = self.plan(rope, context=context, seq_len=context)
            return general_rope_parameters(rope, plan, context=context)
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
            parameters |= yarn_scale_keys(self.factor(rope, context), float(self.attention_scale))
        return parameters
