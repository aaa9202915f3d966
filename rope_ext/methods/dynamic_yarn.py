"""Dynamic YaRN: YaRN whose factor follows the current length; nothing changes up to the original window."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rope_ext.geometry import RopeGeometry
from rope_ext.plan import DynamicMethod, PositionPlan
from rope_ext.ramp import attention_temperature, blend, check_attention_scale, check_betas, ramp_over_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicYarn(DynamicMethod):
    """YaRN with the factor max(1, l/L) at l tokens, L the original window; the window asked for sets no bound.

    Attributes:
        beta_fast, beta_slow, truncate: the ramp in the pair index, as in yarn.
        attention_scale: multiplies cos and sin; "auto" is 0.1 ln(l/L) + 1 beyond the original window.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.3, and the authors' code, which divides l by the stored
    window instead where the configuration has been extended.

    Raises:
        MethodError: beta_fast is not above beta_slow, or a beta or the scale is not positive.
    """

    name: ClassVar[str] = "dynamic-yarn"
    summary: ClassVar[str] = "yarn by the current length, from the original window on"
    source: ClassVar[str] = "Peng et al. 2023, arXiv 2309.00071, sec. 3.3"
    needs_training: ClassVar[str] = "no"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        DynamicMethod.__post_init__(self)
        check_betas(self.name, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        check_attention_scale(self.name, self.attention_scale)

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return the blended frequencies at `seq_len` tokens, fp32, shape (head_dim/2,), and the scale there.

        Raises:
            MethodError: the whole ramp lies outside the pairs.
        """
        self.factor(rope, context)
        factor = self.current_factor(rope, seq_len)
        interpolation = ramp_over_pairs(
            self.name, rope, beta_fast=self.beta_fast, beta_slow=self.beta_slow, truncate=self.truncate
        )
        scale = attention_temperature(factor) if self.attention_scale == "auto" else float(self.attention_scale)
        if factor == 1.0:
            scale = 1.0
        return PositionPlan(inv_freq=blend(rope, interpolation, factor), attention_scale=scale)
