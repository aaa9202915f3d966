"""What the parts of the LLaMA block cost and keep, in figures and in seconds on a CPU.

python scripts/lab_block.py [--json]

norms        RMSNorm has d parameters where LayerNorm has 2d; on random input their results hardly differ
gqa          grouped queries with as many key heads as query heads are plain attention, to the last bit; the parameters
             of attention as key heads are left out (width 64, 8 heads of 8, a bias of 64 behind the output, as the
             small configuration of the block's textbook form has it)
swiglu       three matrices at 8/3 of the width hold what two at 4 times the width do; LLaMA rounds up to 256s
swish        x * sigmoid(x) at 2 and -2: unlike ReLU it lets a little of what is below 0 through
cache        bytes of keys and values of LLaMA-3-8B at 8,192 tokens in 16 bits, by key heads

No times are taken: on a CPU, and for single layers, they say nothing of the fused kernels that a GPU would run.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script is run by path; the packages lie beside it, installed or not

from rope_ext.costs import kv_cache_bytes  # noqa: E402  (after the path is set)
from rope_ext.geometry import base_inv_freq  # noqa: E402
from rope_ext.llama import Attention, LlamaShape, RMSNorm, rotate, turns  # noqa: E402

WIDTH, TOKENS = 512, 64
GIB = 2**30


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def norms() -> dict[str, float]:
    """Return the parameters of both norms, and how their results correlate on random input."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, WIDTH, generator=generator)
    root, layer = RMSNorm(WIDTH, 1e-5), nn.LayerNorm(WIDTH)
    both = torch.stack([root(x).flatten(), layer(x).flatten()]).detach().double()
    return {
        "rmsnorm_parameters": num_parameters(root),
        "layernorm_parameters": num_parameters(layer),
        "saved": num_parameters(layer) - num_parameters(root),
        "correlation": float(torch.corrcoef(both)[0, 1]),
    }


def shape_of(num_kv_heads: int) -> LlamaShape:
    return LlamaShape(
        width=64, num_layers=1, num_heads=8, num_kv_heads=num_kv_heads, head_dim=8, ffn_width=8, vocab_size=8
    )


def plain_attention(attention: Attention, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Return multi-head attention with the weights of one whose key heads are as many, head by head, written out."""
    heads = (*x.shape[:2], 8, 8)
    q, k, v = (layer(x).view(heads) for layer in (attention.wq, attention.wk, attention.wv))
    q, k = rotate(q, turn), rotate(k, turn)
    ahead = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    out = []
    for head in range(8):
        scores = (q[:, :, head] @ k[:, :, head].mT / 8**0.5).masked_fill(ahead, float("-inf"))
        out.append(scores.softmax(-1) @ v[:, :, head])
    return attention.wo(torch.cat(out, dim=-1))


def gqa() -> dict[str, Any]:
    """Return the largest difference of grouped attention without groups from plain, and parameters by key heads."""
    torch.manual_seed(0)
    attention, x = Attention(shape_of(8)), torch.randn(2, TOKENS, 64)
    turn = turns(torch.arange(TOKENS), base_inv_freq(8, 10_000.0))
    with torch.no_grad():
        grouped, _ = attention(x, turn, None)
        apart = float((grouped - plain_attention(attention, x, turn)).abs().max())
    bias = 64
    return {
        "largest_difference": apart,
        "parameters": {n: num_parameters(Attention(shape_of(n))) + bias for n in (8, 4, 2, 1)},
    }


def swiglu() -> dict[str, int]:
    """Return the width of LLaMA-7B's feed-forward layer by the 8/3 rule, and rounded, and both parameter counts."""
    width = 4096
    third = 8 * width // 3
    rounded = -(-third // 256) * 256
    return {
        "eight_thirds": third,
        "rounded": rounded,
        "two_matrices": 2 * width * 4 * width,
        "three_matrices": 3 * width * rounded,
    }


def swish() -> dict[str, float]:
    return {str(x): float(F.silu(torch.tensor(float(x), dtype=torch.float64))) for x in (2, -2)}


def cache() -> dict[int, float]:
    """Return GiB by key heads."""
    return {
        n: kv_cache_bytes(num_layers=32, num_key_value_heads=n, head_dim=128, tokens=8192) / GIB for n in (32, 8, 1)
    }


def figures() -> dict[str, Any]:
    return {"norms": norms(), "gqa": gqa(), "swiglu": swiglu(), "swish": swish(), "cache": cache()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    found = figures()
    if parser.parse_args().json:
        print(json.dumps(found, indent=2))
        return
    norm, grouped, gated = found["norms"], found["gqa"], found["swiglu"]
    print(
        f"norms   RMSNorm {norm['rmsnorm_parameters']} parameters, LayerNorm {norm['layernorm_parameters']}: "
        f"{norm['saved']} fewer; results correlate at {norm['correlation']:.4f}"
    )
    print(
        f"gqa     8 key heads of 8 against plain attention: largest difference {grouped['largest_difference']}; "
        "parameters " + ", ".join(f"{n} key heads {count:,}" for n, count in grouped["parameters"].items())
    )
    print(
        f"swiglu  8/3 x 4096 = {gated['eight_thirds']:,}, rounded {gated['rounded']:,}; "
        f"{gated['three_matrices'] / gated['two_matrices']:.3f} of two matrices' parameters"
    )
    print("swish   " + ", ".join(f"at {x}: {value:.4f}" for x, value in found["swish"].items()))
    print("cache   " + ", ".join(f"{n} key heads {size:.3g} GiB" for n, size in found["cache"].items()))


if __name__ == "__main__":
    main()
