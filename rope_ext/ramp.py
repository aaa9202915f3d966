"""The ramp between kept and interpolated pairs that YaRN and NTK-by-parts share."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry


def check_betas(name: str, *, beta_fast: float, beta_slow: float) -> None:
    """Refuse betas that span no ramp.

    Raises:
        MethodError: they are not finite with beta_fast > beta_slow > 0.
    """
    if not (math.isfinite(beta_fast) and beta_fast > beta_slow > 0):
        raise MethodError(
            f"{name}: beta_fast {beta_fast:g} and beta_slow {beta_slow:g}: they must be finite with "
            "beta_fast > beta_slow > 0"
        )


def ramp_over_pairs(
    name: str, rope: RopeGeometry, *, beta_fast: float, beta_slow: float, truncate: bool
) -> Float[Tensor, " pairs"]:
    """Return the blend weight of each pair, float64, shape (head_dim/2,): 0 keeps it, 1 divides it by the factor.

    Linear in the pair index, from the pair that turns `beta_fast` times inside the original window to the one that
    turns `beta_slow` times; `truncate` rounds both ends outwards to whole pairs.

    Source: the YaRN authors' code, find_correction_range and linear_ramp_mask, the form that transformers has. The
    upper end is clamped to head_dim - 1 as there, not to the last pair.

    Raises:
        MethodError: the whole ramp lies outside the pairs, where the published code would blend the wrong way.
    """
    low, high = (_pair_turning(rope, turns) for turns in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low > high:
        raise MethodError(
            f"{name}: no pair turns between beta_slow {beta_slow:g} and beta_fast {beta_fast:g} times in "
            f"{rope.original_context} tokens at theta {rope.theta:g}; change the betas"
        )
    if low == high:
        high += 0.001  # the published code's guard; a step, not a ramp
    pair = torch.arange(rope.num_pairs, dtype=torch.float64)
    return ((pair - low) / (high - low)).clamp(0.0, 1.0)


def ramp_over_rotations(rope: RopeGeometry, *, beta_fast: float, beta_slow: float) -> Float[Tensor, " pairs"]:
    """Return the blend weight of each pair, float64, shape (head_dim/2,): 0 keeps it, 1 divides it by the factor.

    Linear in the number of turns inside the original window: the paper's own form, 1 - gamma in its letters.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2, equations 17 and 18.
    """
    return 1.0 - ((rope.rotations - beta_slow) / (beta_fast - beta_slow)).clamp(0.0, 1.0)


def _pair_turning(rope: RopeGeometry, turns: float) -> float:
    """Return the (fractional) pair that makes `turns` turns inside the original window."""
    return rope.head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def blend(rope: RopeGeometry, interpolation: Float[Tensor, " pairs"], factor: float) -> Float[Tensor, " pairs"]:
    """Return (1 - w) f + w f / factor in fp32, arranged so that a factor of 1 multiplies by exactly 1."""
    shrink = 1.0 - interpolation.double() * (1.0 - 1.0 / factor)
    return (rope.inv_freq.double() * shrink).float()


def attention_temperature(factor: float) -> float:
    """Return YaRN's scale on cos and sin, 0.1 ln(factor) + 1: the square root of the paper's 1/t.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.4, equation 22.
    """
    return 0.1 * math.log(factor) + 1.0


def yarn_scale_keys(factor: float, scale: float) -> dict[str, float]:
    """Return an attention scale in both ways that readers of the "yarn" type look for one.

    transformers and vLLM read `attention_factor`; SGLang only the ratio (1 + 0.1 mscale ln s) / (1 + 0.1
    mscale_all_dim ln s), s being the factor. Where no pair gives the scale, it is left out.
    """
    span = attention_temperature(factor) - 1
    mscale = (scale * (1 + span) - 1) / span if span else 0.0
    pair = {"mscale": mscale, "mscale_all_dim": 1.0} if mscale > 0 else {}
    return {"attention_factor": scale, **pair}


def check_attention_scale(name: str, attention_scale: float | str) -> None:
    """Refuse a scale that is neither "auto" nor a positive number.

    Raises:
        MethodError: it is neither.
    """
    if isinstance(attention_scale, str) or not (math.isfinite(attention_scale) and attention_scale > 0):
        if attention_scale == "auto":
            return
        raise MethodError(f'{name}: attention_scale {attention_scale} must be "auto" or a positive number')
