"""The rotary geometry that a checkpoint was trained with."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from rope_ext.errors import GeometryError


def base_inv_freq(head_dim: int, theta: float) -> Float[Tensor, " pairs"]:
    """Return theta^(-2i/head_dim) in fp32, rad/token, shape (head_dim/2,).

    The expression is the one of transformers' `LlamaRotaryEmbedding`, in its order and precision, so that an
    unchanged geometry reproduces an untouched model to the last bit.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.
    """
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RopeGeometry:
    """What a checkpoint knows about positions.

    Attributes:
        head_dim: rotary dimensions of one head; even.
        theta: scalar base of the frequencies.
        original_context: positions seen in training, tokens.
        num_heads: attention (query) heads; only biases by head need it.
        inv_freq: the checkpoint's effective angular frequencies, fp32, rad/token, shape (head_dim/2,). An empty
            vector, the default, stands for the one that follows from theta.

    Raises:
        GeometryError: odd head_dim, theta not above 1, no window, or an inv_freq of the wrong length.
    """

    head_dim: int
    theta: float
    original_context: int
    num_heads: int = 1
    inv_freq: Float[Tensor, " pairs"] = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise GeometryError(f"head_dim: {self.head_dim} cannot be rotated in pairs; it must be even and at least 2")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise GeometryError(f"theta: {self.theta} is not a rotary base; it must be a finite number above 1")
        if self.original_context < 1:
            raise GeometryError(f"original_context: {self.original_context} tokens is no window; it must be at least 1")
        if self.num_heads < 1:
            raise GeometryError(f"num_heads: {self.num_heads} is not a number of heads; it must be at least 1")
        if self.inv_freq.numel() == 0:
            object.__setattr__(self, "inv_freq", base_inv_freq(self.head_dim, self.theta))
        if self.inv_freq.shape != (self.num_pairs,):
            raise GeometryError(
                f"inv_freq: shape {tuple(self.inv_freq.shape)} does not fit head_dim {self.head_dim}; "
                f"it must be ({self.num_pairs},)"
            )

    @property
    def num_pairs(self) -> int:
        """Number of rotated pairs, head_dim/2."""
        return self.head_dim // 2

    @property
    def is_scaled(self) -> bool:
        """Whether the frequencies are other than those that follow from theta: a checkpoint that carries scaling."""
        return not torch.equal(self.inv_freq, base_inv_freq(self.head_dim, self.theta))

    @property
    def wavelengths(self) -> Float[Tensor, " pairs"]:
        """Tokens per full turn of each pair, 2*pi/inv_freq, float64, shape (head_dim/2,); inf where nothing turns."""
        return 2 * math.pi / self.inv_freq.double()

    @property
    def rotations(self) -> Float[Tensor, " pairs"]:
        """Full turns of each pair inside the original window, float64, shape (head_dim/2,)."""
        return self.original_context / self.wavelengths
