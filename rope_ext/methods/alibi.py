"""ALiBi: no rotation; every head discounts a key by its distance, times a slope of the head's own."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.errors import MethodError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import LIST_SEPARATOR, PositionPlan, RopeParameters, StaticMethod

GEOMETRIC = "geometric"


def geometric_slopes(num_heads: int) -> tuple[float, ...]:
    """Return 2^(-8k/n) for k = 1..n where n, the number of heads, is a power of two.

    Otherwise those of the next lower power, followed by every other one of twice that power, in the order that the
    authors' code has them: trained checkpoints depend on it.
    """
    lower = 2 ** int(math.log2(num_heads))
    powers = [2.0 ** (-8.0 * k / lower) for k in range(1, lower + 1)]
    between = [2.0 ** (-4.0 * k / lower) for k in range(1, 2 * lower + 1, 2)]
    return tuple([*powers, *between][:num_heads])


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi(StaticMethod):
    """Adds -slope * (i - j) to the attention logits of query i and key j, and stops every rotation.

    A model that was trained with rotations knows nothing of this: it needs training. The window that is asked for is
    a claim and changes nothing, as the bias has no end.

    Source: Press et al., Train Short, Test Long (arXiv 2108.12409), section 3; slopes for other head counts than
    powers of two from the authors' code.

    Attributes:
        slopes: "geometric", or one positive number a head (as alibi:slopes=0.5;0.25;0.125;0.0625).
    """

    name: ClassVar[str] = "alibi"
    summary: ClassVar[str] = "no rotation; a bias that grows with distance"
    source: ClassVar[str] = "Press et al. 2022, arXiv 2108.12409"
    needs_training: ClassVar[str] = "yes"
    composes: ClassVar[bool] = True
    slopes: str | tuple[float, ...] = GEOMETRIC

    def __post_init__(self) -> None:
        """Read a list that comes as text, and check it.

        Raises:
            MethodError: neither "geometric" nor positive finite numbers.
        """
        slopes: object = self.slopes
        if isinstance(slopes, str) and slopes != GEOMETRIC:
            slopes = slopes.split(LIST_SEPARATOR)
        if slopes != GEOMETRIC:
            try:
                numbers = tuple(float(slope) for slope in slopes)  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType, reportUnknownArgumentType]
            except (TypeError, ValueError, OverflowError):
                numbers = ()
            if not numbers or not all(slope > 0 and math.isfinite(slope) for slope in numbers):
                raise MethodError(
                    f"{self.name}: slopes is {self.slopes!r:.200}; it must be {GEOMETRIC!r} or a positive number for "
                    "each head, as 0.5;0.25"
                )
            object.__setattr__(self, "slopes", numbers)

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        """Return frequencies of zero, fp32, shape (head_dim/2,), and slopes, fp32, shape (num_heads,)."""
        self.factor(rope, context)
        slopes = geometric_slopes(rope.num_heads) if isinstance(self.slopes, str) else self.slopes
        if len(slopes) != rope.num_heads:
            raise MethodError(
                f"{self.name}: {len(slopes)} slopes for {rope.num_heads} attention heads; give one for each"
            )
        exact = torch.tensor(slopes, dtype=torch.float32)
        if not bool((torch.isfinite(exact) & (exact > 0)).all()):
            raise MethodError(f"{self.name}: slopes {slopes!r:.200} leave the range of fp32; give less extreme ones")
        return PositionPlan(inv_freq=torch.zeros_like(rope.inv_freq), alibi_slopes=exact)

    def rope_parameters(self, rope: RopeGeometry, *, context: int) -> RopeParameters:
        """Refuse: a bias is no rotation, and no configuration of a stock LLaMA asks for one.

        Raises:
            MethodError: always.
        """
        raise MethodError(f"{self.name}: it adds a bias to attention, which no configuration of a stock LLaMA asks for")
