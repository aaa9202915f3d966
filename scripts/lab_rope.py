"""What each way to say where a token is knows about distance, in figures and in seconds on a CPU.

python scripts/lab_rope.py [--json]

A query and a key are fixed; the pair slides along the sequence, its offset held. How far does their score move?

rope_pair      one rotated pair: not at all, but for rounding
rope_head      a head of 32 dimensions, at offsets 0, 1, 7, 63 and 200
table          the table of learned positions that RoPE replaced (a vector is added to the token's): by orders of
               magnitude more, and it has no entry past its length
exactness      ALiBi on 16,384 keys in fp32 against float64: the attention that a patched model uses, and the whole bias
alibi          the bias alone, through the attention that a patched model uses: it depends on distance and nothing else
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from rope_ext.alibi_paths import Rows, dense, folded  # noqa: E402  (after the path is set)
from rope_ext.geometry import base_inv_freq  # noqa: E402
from rope_ext.llama import rotate, turns  # noqa: E402
from rope_ext.methods.alibi import geometric_slopes  # noqa: E402

THETA, HEAD_DIM, LENGTH = 10_000.0, 32, 512
OFFSETS = (0, 1, 7, 63, 200)


def slides(offset: int, first: int, length: int) -> Tensor:
    """Return the positions of keys whose query, `offset` later, still lies within the length."""
    return torch.arange(first, length - offset)


def rope_scores(query: Tensor, key: Tensor, offset: int) -> Tensor:
    """Return the score of one query and one key, `offset` before it, wherever the pair stands; shape (places,)."""
    inv_freq = base_inv_freq(len(query), THETA)
    keys = slides(offset, 0, LENGTH)

    def turned(vector: Tensor, positions: Tensor) -> Tensor:
        rows = vector.expand(1, len(positions), 1, -1)
        return rotate(rows, turns(positions, inv_freq))[0, :, 0]

    return (turned(query, keys + offset) * turned(key, keys)).sum(dim=-1)


def table_scores(query: Tensor, key: Tensor, offset: int, table: nn.Embedding) -> Tensor:
    """Return the same where a position's vector is added to the token's; shape (places,)."""
    keys = slides(offset, 0, table.num_embeddings)
    return ((query + table(keys + offset)) * (key + table(keys))).sum(dim=-1)


def alibi_bias(slope: float, offset: int, query_position: int, num_keys: int) -> float:
    """Return what the attention that a patched model uses adds for one distance, read off its weights on two keys.

    Queries and keys are zero, so that weights are the softmax of the bias: the logarithm of a ratio of two of them is
    a difference of biases, here between the key at `offset` and the query's own.
    """
    zeros = torch.zeros(1, 1, num_keys, 8)
    values = torch.zeros(1, 1, num_keys, 8)
    values[0, 0, query_position - offset, 0] = 1.0
    values[0, 0, query_position, 1] = 1.0
    positions = torch.arange(num_keys)[None]
    out = folded(Rows(zeros, zeros, values, None, positions, torch.tensor([slope]), 8**-0.5, 0))
    there, here = out[0, 0, query_position, :2]
    return float((there / here).log())


def exactness(num_keys: int = 16_384, num_queries: int = 24) -> dict[str, float]:
    """Return how far fp32 is off float64 at most: positions beside keys ("folded"), and the whole bias ("dense")."""
    generator = torch.Generator().manual_seed(0)
    sizes = (num_queries, num_keys, num_keys)
    q, k, v = (torch.randn(1, 8, size, HEAD_DIM, generator=generator) for size in sizes)
    slopes = torch.tensor(geometric_slopes(8))
    rows = Rows(q, k, v, None, torch.arange(num_keys)[None], slopes, HEAD_DIM**-0.5, num_keys - num_queries)
    wide = rows._replace(query=q.double(), key=k.double(), value=v.double(), slopes=slopes.double())
    exact = dense(wide)
    return {path.__name__: float((path(rows) - exact).abs().max()) for path in (folded, dense)}


def spread(scores: Tensor) -> float:
    """Return how far the scores lie apart."""
    return float(scores.max() - scores.min())


def measure() -> dict[str, Any]:
    """Return every figure of the lab."""
    generator = torch.Generator().manual_seed(0)
    pair_query, pair_key = (torch.randn(2, generator=generator) for _ in range(2))
    query, key = (torch.randn(HEAD_DIM, generator=generator) for _ in range(2))
    table = nn.Embedding(LENGTH, HEAD_DIM)
    nn.init.normal_(table.weight, std=1.0, generator=generator)
    with torch.no_grad():
        try:
            table(torch.tensor([LENGTH]))
            past = "an entry past its length"
        except IndexError:
            past = "no entry past its length"
        slope = geometric_slopes(8)[3]
        biases = {
            offset: [alibi_bias(slope, offset, at, 600) for at in (offset, 300, 599) if at >= offset]
            for offset in OFFSETS
        }
        return {
            "rope_pair": {o: spread(rope_scores(pair_query, pair_key, o)) for o in OFFSETS},
            "rope_head": {o: spread(rope_scores(query, key, o)) for o in OFFSETS},
            "table": {o: spread(table_scores(query, key, o, table)) for o in OFFSETS},
            "table_past_its_length": past,
            "exactness": exactness(),
            "alibi_slope": slope,
            "alibi": {o: max(found) - min(found) for o, found in biases.items()},
            "alibi_off_the_formula": max(abs(b + slope * o) for o, found in biases.items() for b in found),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    found = measure()
    if args.json:
        print(json.dumps(found))
        return
    print(f"how far a score moves as its pair slides over {LENGTH} positions, at offsets {OFFSETS}")
    for name in ("rope_pair", "rope_head", "table", "alibi"):
        print(f"{name:12}" + "".join(f"{moved:10.1e}" for moved in found[name].values()))
    print(f"the table has {found['table_past_its_length']}")
    off = ", ".join(f"{name} {error:.1e}" for name, error in found["exactness"].items())
    print(f"alibi on 16,384 keys in fp32, off float64 by at most: {off}")
    print(f"alibi: off -slope x distance by at most {found['alibi_off_the_formula']:.1e}")


if __name__ == "__main__":
    main()
