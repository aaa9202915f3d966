"""Compare logits of our GGUF files with llama.cpp's, on the bundled model; needs `pip install llama-cpp-python`.

python scripts/check_llama_cpp.py [--json]

Every static method is written at factor 8 and run over 700 tokens, beyond the window of 256, by transformers (the
patched model) and by llama.cpp with a key-value cache in fp32 (its default, fp16, alone costs about 1e-3). The last
row is llama.cpp's own YaRN: it shows what rope_ext/readers.py predicts for an export that goes through the converter.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rope_ext import extend, load_model, method
from rope_ext.geometry import RopeGeometry
from rope_ext.gguf import save_gguf
from rope_ext.plan import PositionPlan, StaticMethod, spell
from rope_ext.readers import Stated, llama_cpp
from rope_ext.registry import known_methods, parse_method

FACTOR, NUM_TOKENS, WINDOW = 8, 700, 256
FP32, YARN = 0, 2  # ggml's and llama.cpp's numbers
FOLLOWING = {"dynamic-ntk", "dynamic-yarn", "longrope"}
VARIANTS = (
    "yarn:beta_fast=16:attention_scale=1.3",
    "yarn:ramp=rotations",
    "yarn:truncate=false",
    "resonance:over=yarn",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedYarn(StaticMethod):
    """What rope_ext/readers.py says that llama.cpp makes of a YaRN checkpoint."""

    name: ClassVar[str] = "llama.cpp's own yarn, as predicted"
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs_training: ClassVar[str] = ""

    def plan(self, rope: RopeGeometry, *, context: int, seq_len: int) -> PositionPlan:
        stated = method("yarn").rope_parameters(rope, context=context)
        reading = llama_cpp(Stated(stated, context, rope.head_dim), seq_len)
        return PositionPlan(inv_freq=reading.inv_freq.float(), attention_scale=reading.attention_scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    import llama_cpp as engine  # pyright: ignore[reportMissingImports]  (not among our dependencies)

    model, tokenizer = load_model("tiny", device="cpu")
    ids = torch.randint(5, 1000, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    text = "def f(x):\n    return x + 12345  # na\u00efve \u00fcn\u00efcode\n\n\n  y = 's'"

    def run(path: Path, **scaling: float) -> NDArray[np.float32]:
        llama = engine.Llama(
            str(path), n_ctx=FACTOR * WINDOW, n_batch=1024, n_ubatch=1024, type_k=FP32, type_v=FP32, logits_all=True,
            verbose=False, **scaling,
        )  # fmt: skip
        assert llama.tokenize(text.encode(), add_bos=True) == tokenizer(text)["input_ids"]
        llama.eval(ids[0].tolist())
        return np.array(llama.scores[:NUM_TOKENS])

    def compare(name: str, ours: torch.Tensor, theirs: NDArray[np.float32]) -> dict[str, object]:
        same = float((ours.argmax(-1).numpy() == theirs.argmax(-1)).mean())
        return {"file": name, "max_abs_difference": float(np.abs(ours.numpy() - theirs).max()), "same_argmax": same}

    rows: list[dict[str, object]] = []
    static = [method(name) for name in known_methods() if name not in FOLLOWING]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        paths: dict[str, Path] = {}
        for chosen in [*static, *map(parse_method, VARIANTS)]:
            name = spell(chosen)
            with extend(model, chosen, factor=FACTOR):
                paths[name] = save_gguf(model, Path(folder) / f"{len(rows)}.gguf", tokenizer=tokenizer)
                rows.append(compare(name, model(ids).logits[0], run(paths[name])))
        with extend(model, PredictedYarn(), factor=FACTOR):
            scaling = {"rope_scaling_type": YARN, "rope_freq_scale": 1 / FACTOR, "yarn_orig_ctx": WINDOW}
            theirs = run(paths["unscaled"], **scaling)
            rows.append(compare(PredictedYarn.name, model(ids).logits[0], theirs))
    if as_json:
        print(json.dumps({"llama_cpp_python": engine.__version__, "results": rows}, indent=2))
        return
    for row in rows:
        print(f"{row['file']:45} {row['max_abs_difference']:.1e}  same argmax {row['same_argmax']:.4f}")


if __name__ == "__main__":
    main()
