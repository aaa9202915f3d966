"""The rotary module that a patch puts into a model: positions in, cos and sin out, every angle in fp32."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rope_ext.geometry import RopeGeometry
from rope_ext.plan import Method, PositionPlan


class ExtendedRotaryEmbedding(nn.Module):
    """Stands where a Hugging Face rotary embedding stood: `(x, position_ids) -> (cos, sin)`.

    `model.to(torch.bfloat16)` moves it but does not round it: bf16 frequencies would be off by whole turns after a
    few thousand tokens, which is what becomes of a stock module.
    """

    inv_freq: Tensor

    def __init__(self, method: Method, geometry: RopeGeometry, context: int) -> None:
        super().__init__()
        self.method = method
        self.geometry = geometry
        self.context = context
        self.patch: Any = None  # the Patch that put this module in, so that an outer one can find what lies on top
        self.plan: PositionPlan = method.plan(geometry, context=context, seq_len=context)
        self.register_buffer("inv_freq", self.plan.inv_freq.clone(), persistent=False)

    @torch.no_grad()
    def forward(
        self, x: Float[Tensor, "batch seq hidden"], position_ids: Int[Tensor, "rows seq"]
    ) -> tuple[Float[Tensor, "rows seq head_dim"], Float[Tensor, "rows seq head_dim"]]:
        """Return cos and sin in the dtype of `x`; position_ids has one row for all sequences, or one for each.

        The two halves repeat each other, [f0 f1 f2 | f0 f1 f2], as transformers' rotate_half expects.
        """
        angles = position_ids[..., None].to(device=x.device, dtype=torch.float) * self.inv_freq.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = (f * self.plan.attention_scale for f in (angles.cos(), angles.sin()))
        return cos.to(x.dtype), sin.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExtendedRotaryEmbedding":
        super()._apply(fn, recurse)
        self.inv_freq = self.plan.inv_freq.to(self.inv_freq.device, copy=True)
        return self

    def extra_repr(self) -> str:
        """Name the method in `print(model)`."""
        return f"{self.method!r}, context={self.context}, original_context={self.geometry.original_context}"
