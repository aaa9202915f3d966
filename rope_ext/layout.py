"""Which rows of the query and key weights turn together: neighbours (Meta) or halves (Hugging Face).

    neighbours  [a0 b0 | a1 b1 | a2 b2]    pair i is rows 2i and 2i+1
    halves      [a0 a1 a2 | b0 b1 b2]      pair i is rows i and i + head_dim/2

Both hold the same model. Read under the other convention the weights still load, and every rotation is wrong.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rope_ext.errors import ModelError

Layout = Literal["neighbours", "halves"]

# Decided on the bundled model and on SmolLM2-135M, in both layouts, and on random weights; LOG.md has the figures.
MIN_COUPLING = 2.0
MIN_RATIO = 1.2


class LayoutGuess(NamedTuple):
    """What the weights say about their layout; `layout` is None where they do not say.

    `neighbours` and `halves` are the evidence: how much more than unrelated rows the query row of one partner has in
    common with the key row of the other, if those were the partners. 1 is chance.
    """

    layout: Layout | None
    neighbours: float
    halves: float

    def __str__(self) -> str:
        """Return the evidence in words."""
        return f"partners coupled {self.neighbours:.2f} x chance as neighbours, {self.halves:.2f} x as halves"


def to_halves(weight: Float[Tensor, "rows width"], head_dim: int) -> Float[Tensor, "rows width"]:
    """Return a query or key weight with the rows of each head in Hugging Face's order, from Meta's.

    [0 1 2 3 4 5] -> [0 2 4 | 1 3 5], head by head.

    Raises:
        ModelError: the rows are not whole heads.
    """
    _check_rows(weight, head_dim)
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_neighbours(weight: Float[Tensor, "rows width"], head_dim: int) -> Float[Tensor, "rows width"]:
    """Return a query or key weight with the rows of each head in Meta's order, from Hugging Face's.

    [0 1 2 | 3 4 5] -> [0 3 1 4 2 5], head by head; undoes `to_halves`.

    Raises:
        ModelError: the rows are not whole heads.
    """
    _check_rows(weight, head_dim)
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def guess_layout(layers: Iterable[tuple[Tensor, Tensor]], head_dim: int) -> LayoutGuess:
    """Return the layout of (query weight, key weight) pairs, one for each layer, and the evidence for it.

    The score of a pair with rows a and b, for a query d tokens after the key and a frequency w, is

        cos(w d) (qa.ka + qb.kb) + sin(w d) (qa.kb - qb.ka)

    so training ties row a of the queries to row b of the keys within a pair, and directly to no other row but its
    own. The evidence is the mean of cos^2 between a query row and its partner's key row, times the width of the
    model, which makes it 1 for random rows. The better layout is named if it has at least `MIN_COUPLING` and
    `MIN_RATIO` times the other: random weights have neither.

    Source: the score is equation 12 of RoFormer (arXiv 2104.09864), its real part written out; the statistic is our
    own. Norms of partners do not do: rows of neighbouring frequencies have similar norms in either layout.

    Raises:
        ModelError: no layers, or rows that are not whole heads.
    """
    row = torch.arange(head_dim)
    as_neighbours, as_halves = row ^ 1, (row + head_dim // 2) % head_dim
    found: list[tuple[float, float]] = []
    for q, k in layers:
        for weight in (q, k):
            _check_rows(weight, head_dim)
        q_HDM, k_KDM = (F.normalize(weight.float(), dim=1).unflatten(0, (-1, head_dim)) for weight in (q, k))
        q_KGDM = q_HDM.unflatten(0, (k_KDM.shape[0], -1))
        couplings = [
            (q_KGDM * k_KDM[:, None, partner]).sum(dim=-1).square().mean().item() * q.shape[1]
            for partner in (as_neighbours, as_halves)
        ]
        found.append((couplings[0], couplings[1]))
    if not found:
        raise ModelError("layout: no layers came; give the query and key weights of at least one")
    neighbours, halves = (sum(values) / len(found) for values in zip(*found, strict=True))
    clear = max(neighbours, halves) >= max(MIN_COUPLING, MIN_RATIO * min(neighbours, halves))
    if not clear:
        return LayoutGuess(None, neighbours, halves)
    return LayoutGuess("neighbours" if neighbours > halves else "halves", neighbours, halves)


def _check_rows(weight: Tensor, head_dim: int) -> None:
    if head_dim < 2 or head_dim % 2 or weight.dim() != 2 or weight.shape[0] % head_dim:
        raise ModelError(
            f"layout: a weight of shape {tuple(weight.shape)} is not made of heads of {head_dim} rows; "
            "head_dim must be even and divide the rows"
        )
