"""The rotary module that a patch puts into a model: positions in, cos and sin out, every angle in fp32."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rope_ext.errors import PatchError
from rope_ext.geometry import RopeGeometry
from rope_ext.plan import STATIC, FrequencyKey, Method, PositionPlan


class ExtendedRotaryEmbedding(nn.Module):
    """Stands where a Hugging Face rotary embedding stood: `(x, position_ids) -> (cos, sin)`.

    `model.to(torch.bfloat16)` moves it but does not round it: bf16 frequencies would be off by whole turns after a
    few thousand tokens, which is what becomes of a stock module.

    Frequencies that follow the current length are worked out anew for each row of each call, from that row's
    positions alone; nothing is kept from one call to the next.
    """

    inv_freq: Tensor

    def __init__(self, method: Method, geometry: RopeGeometry, context: int) -> None:
        super().__init__()
        self.method = method
        self.geometry = geometry
        self.context = context
        self.base: str | None = None  # how a scaled checkpoint was taken, see hf.read_geometry
        self.patch: Any = None  # the Patch that put this module in, so that an outer one can find what lies on top
        self.plan: PositionPlan = self.plan_at(context)
        lengths = (1, geometry.original_context, geometry.original_context + 1, context, context + 1)
        self.is_static: bool = {self.frequency_key(n) for n in lengths} == {STATIC}
        self.register_buffer("inv_freq", self.plan.inv_freq.clone(), persistent=False)

    def plan_at(self, seq_len: int) -> PositionPlan:
        """Return the plan for a sequence of `seq_len` tokens; `plan` is the one for the whole window."""
        return self.method.plan(self.geometry, context=self.context, seq_len=seq_len)

    def frequency_key(self, seq_len: int) -> FrequencyKey:
        """Return what the plan at `seq_len` tokens depends on."""
        return self.method.frequency_key(self.geometry, context=self.context, seq_len=seq_len)

    @torch.no_grad()
    def forward(
        self, x: Float[Tensor, "batch seq hidden"], position_ids: Int[Tensor, "rows seq"]
    ) -> tuple[Float[Tensor, "rows seq head_dim"], Float[Tensor, "rows seq head_dim"]]:
        """Return cos and sin in the dtype of `x`; position_ids has one row for all sequences, or one for each.

        The two halves repeat each other, [f0 f1 f2 | f0 f1 f2], as transformers' rotate_half expects.

        Raises:
            PatchError: the frequencies follow the current length, and a row goes on from cached keys that were
                rotated by other ones, or holds several documents.
        """
        positions = position_ids.to(x.device)
        inv_freq, scale = (self.inv_freq.to(x.device), self.plan.attention_scale)
        if not self.is_static:
            inv_freq, scale = self._by_row(positions)
        angles = positions[..., None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = (f * scale for f in (angles.cos(), angles.sin()))
        return cos.to(x.dtype), sin.to(x.dtype)

    def _by_row(
        self, positions: Int[Tensor, "rows seq"]
    ) -> tuple[Float[Tensor, "rows 1 pairs"], Float[Tensor, "rows 1 1"]]:
        """Return frequencies and scale of each row, whose length is its largest position plus one."""
        if positions.shape[1] > 1 and bool((positions.diff(dim=1) < 0).any()):
            raise PatchError(
                f"{self.method.name}: positions fall within a row, as in packed documents or padding not numbered 0; "
                "its frequencies follow the length of one sequence: give each its own row"
            )
        plans: list[PositionPlan] = []
        for start, last in zip(positions[:, 0].tolist(), positions[:, -1].tolist(), strict=True):
            if self.is_stale(start, last + 1):
                raise PatchError(self.stale_cache_words(start, last + 1))
            plans.append(self.plan_at(last + 1))
        inv_freq = torch.stack([plan.inv_freq for plan in plans])[:, None].to(positions.device)
        return inv_freq, torch.tensor([plan.attention_scale for plan in plans], device=positions.device)[:, None, None]

    def is_stale(self, num_cached: int, seq_len: int) -> bool:
        """Return whether keys made when there were `num_cached` tokens are of no use at `seq_len`."""
        return num_cached > 0 and self.frequency_key(num_cached) != self.frequency_key(seq_len)

    def stale_cache_words(self, num_cached: int, seq_len: int) -> str:
        """Return why tokens cannot follow a cache."""
        return (
            f"{self.method.name}: {seq_len} tokens have other frequencies than the {num_cached} before these were "
            "cached with; pass the whole sequence at once, without a cache, as generate() of the extended model does "
            "with input_ids"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExtendedRotaryEmbedding":
        super()._apply(fn, recurse)
        self.inv_freq = self.plan.inv_freq.to(self.inv_freq.device, copy=True)
        return self

    def extra_repr(self) -> str:
        """Name the method in `print(model)`."""
        return f"{self.method!r}, context={self.context}, original_context={self.geometry.original_context}"
