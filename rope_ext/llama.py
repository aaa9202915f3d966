"""The LLaMA block as the papers write it, under the names of Meta's checkpoints: an oracle for tests, a text to read.

Nothing here is fast. It shares no code with transformers, and it turns *neighbouring* rows as one complex number, as
Meta's weights want it; transformers turns row i with row i + head_dim/2, and its weights are reordered to match
(rope_ext/layout.py). Any frequencies and scale may be given, so it also stands for a stretched model.

Suffixes name the axes of a tensor, in order:
    B  sequences in the batch       H  query heads                      P  rotary pairs of a head, D/2
    T  tokens of this call          K  key and value heads              F  width of the feed-forward layer
    S  tokens so far, with these    G  query heads on one of them, H/K  V  vocabulary
    M  width of the model           D  dimensions of a head
"""

import math
from dataclasses import dataclass, fields
from typing import cast

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from rope_ext.errors import GeometryError

LayerCache = tuple[Tensor, Tensor]
"""Keys (rotated) and values of one layer, each BSKD."""

Cache = list[LayerCache]
"""What each layer remembers; an empty list before the first call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The numbers that fix every shape in a LLaMA.

    Attributes:
        norm_eps: added to the mean square in RMSNorm.

    Raises:
        GeometryError: a number below 1, an odd head_dim, or query heads that do not share key heads evenly.
    """

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = cast("float", getattr(self, field.name))
            if field.name != "norm_eps" and value < 1:
                raise GeometryError(f"{field.name}: {value} is no size; it must be at least 1")
        if self.head_dim % 2:
            raise GeometryError(f"head_dim: {self.head_dim} cannot be rotated in pairs; it must be even")
        if self.num_heads % self.num_kv_heads:
            raise GeometryError(
                f"num_kv_heads: {self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly; "
                "it must divide num_heads"
            )


def turns(
    position_T: Int[Tensor, " tokens"], inv_freq_P: Float[Tensor, " pairs"], attention_scale: float = 1.0
) -> Complex[Tensor, "tokens pairs"]:
    """Return scale * exp(i * position * inv_freq), complex64: what turns a pair by its angle.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.1, equation 12. The scale is YaRN's.
    """
    angle_TP = position_T[:, None].float() * inv_freq_P
    return torch.polar(torch.full_like(angle_TP, attention_scale), angle_TP)


def rotate(
    x_BTHD: Float[Tensor, "batch tokens heads head_dim"], turn_TP: Complex[Tensor, "tokens pairs"]
) -> Float[Tensor, "batch tokens heads head_dim"]:
    """Return the heads with each pair of neighbours turned: [x0 x1 | x2 x3] is x0 + i*x1, x2 + i*x3.

    Turned in fp32, returned in the dtype that came. A scale of 1 keeps every norm.
    """
    pair_BTHP = torch.view_as_complex(x_BTHD.float().unflatten(-1, (-1, 2)).contiguous())
    turned_BTHP = pair_BTHP * turn_TP[:, None]
    return torch.view_as_real(turned_BTHP).flatten(-2).to(x_BTHD.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight: no mean is taken off, and there is no bias.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467), equation 4.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTM: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return x at a root mean square of 1, then weighted; the division is in fp32."""
        x = x_BTM.float()
        normal_BTM = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return normal_BTM.to(x_BTM.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention in which G query heads share each key and value head.

    Source: Ainslie et al., GQA (arXiv 2305.13245), section 2.2; Vaswani et al. (arXiv 1706.03762), equation 1.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.wq = nn.Linear(shape.width, shape.num_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.width, shape.num_kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.num_heads * shape.head_dim, shape.width, bias=False)

    def forward(
        self,
        x_BTM: Float[Tensor, "batch tokens width"],
        turn_TP: Complex[Tensor, "tokens pairs"],
        past: LayerCache | None,
    ) -> tuple[Float[Tensor, "batch tokens width"], LayerCache]:
        """Return what the tokens gather from themselves and all before them, and the longer cache."""
        num_kv_heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        q_BTHD = rotate(self.wq(x_BTM).unflatten(-1, (-1, head_dim)), turn_TP)
        k_BSKD = rotate(self.wk(x_BTM).unflatten(-1, (-1, head_dim)), turn_TP)
        v_BSKD = self.wv(x_BTM).unflatten(-1, (-1, head_dim))
        if past is not None:
            # Keys are remembered as turned: a score depends on the offset alone, so an old key never turns again.
            k_BSKD, v_BSKD = (torch.cat(pair, dim=1) for pair in zip(past, (k_BSKD, v_BSKD), strict=True))
        q_BTKGD = q_BTHD.unflatten(2, (num_kv_heads, -1))
        score_BKGTS = torch.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD) / math.sqrt(head_dim)
        num_new, num_all = x_BTM.shape[1], k_BSKD.shape[1]
        later_TS = torch.ones(num_new, num_all, dtype=torch.bool, device=x_BTM.device).triu(num_all - num_new + 1)
        weight_BKGTS = score_BKGTS.float().masked_fill(later_TS, -math.inf).softmax(dim=-1).to(v_BSKD.dtype)
        mixed_BTKGD = torch.einsum("bkgts,bskd->btkgd", weight_BKGTS, v_BSKD)
        return self.wo(mixed_BTKGD.flatten(2)), (k_BSKD, v_BSKD)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x).

    Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202), equation 6.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.w2 = nn.Linear(shape.ffn_width, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.ffn_width, bias=False)

    def forward(self, x_BTM: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Return the gated features, brought back to the model's width."""
        gated_BTF = F.silu(self.w1(x_BTM)) * self.w3(x_BTM)
        return self.w2(gated_BTF)


class Block(nn.Module):
    """One layer: what attention and the feed-forward make of the normed stream is added to the stream itself.

    Source: Touvron et al., LLaMA (arXiv 2302.13971), section 2.2 (pre-normalization).
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.width, shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(
        self,
        x_BTM: Float[Tensor, "batch tokens width"],
        turn_TP: Complex[Tensor, "tokens pairs"],
        past: LayerCache | None,
    ) -> tuple[Float[Tensor, "batch tokens width"], LayerCache]:
        """Return the stream after this layer, and what the layer remembers."""
        gathered_BTM, present = self.attention(self.attention_norm(x_BTM), turn_TP, past)
        x_BTM = x_BTM + gathered_BTM
        return x_BTM + self.feed_forward(self.ffn_norm(x_BTM)), present


class Llama(nn.Module):
    """The whole model; `load_state_dict` takes the weights of rope_ext.shards as they are.

    `inv_freq` (fp32, rad/token) is no buffer: a cast of the model to bf16 leaves it alone.

    Raises:
        GeometryError: inv_freq is not one frequency for each pair of a head.
    """

    def __init__(self, shape: LlamaShape, *, inv_freq: Float[Tensor, " pairs"], attention_scale: float = 1.0) -> None:
        super().__init__()
        if inv_freq.numel() != shape.head_dim // 2:
            raise GeometryError(
                f"inv_freq: {inv_freq.numel()} frequencies do not fit head_dim {shape.head_dim}; "
                f"it must have {shape.head_dim // 2}"
            )
        self.inv_freq = inv_freq.float().clone()  # a copy, as another module's buffer would be a buffer here too
        self.attention_scale = attention_scale
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.output = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(
        self, ids_BT: Int[Tensor, "batch tokens"], cache: Cache | None = None
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Return the logits of the token that follows each one.

        Args:
            cache: a list, empty before the first call, in which the layers remember; the tokens follow those in it,
                and are added to it in place. None: the tokens are the whole sequence.
        """
        num_past = cache[0][0].shape[1] if cache else 0
        position_T = torch.arange(num_past, num_past + ids_BT.shape[1], device=ids_BT.device)
        turn_TP = turns(position_T, self.inv_freq.to(ids_BT.device), self.attention_scale)
        x_BTM = self.tok_embeddings(ids_BT)
        presents: Cache = []
        for i, layer in enumerate(self.layers):
            x_BTM, present = layer(x_BTM, turn_TP, cache[i] if cache else None)
            presents.append(present)
        if cache is not None:
            cache[:] = presents
        return self.output(self.norm(x_BTM))
