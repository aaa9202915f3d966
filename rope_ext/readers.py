"""What other engines make of an exported configuration: each reader's formulas written again, and a verdict by number.

The formulas were read in the sources of the versions named in `READERS`; none of the engines is run here. What
transformers reads is proven by loading (tests/hf), this module only predicts it. Kernels, rounding and quantisation
are outside: a verdict is about frequencies and the attention scale.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from rope_ext.geometry import RopeGeometry, base_inv_freq
from rope_ext.plan import PositionPlan, RopeParameters
from rope_ext.ramp import attention_temperature

EXACT = 1e-5
"""Relative difference up to which two frequencies are one formula rounded in different places."""


class UnreadableError(ValueError):
    """A reader does not load the configuration, or drops its scaling without a word; the message says which."""


class Stated(NamedTuple):
    """What config.json states: the rope parameters, the stored window, and the size of a head."""

    parameters: Mapping[str, object]
    window: int
    head_dim: int

    def number(self, key: str, default: float | None = None) -> float:
        """Return a numeric parameter; without a default it must be there."""
        value = self.parameters.get(key, default)
        if value is None:
            raise UnreadableError(f"needs {key}")
        return float(cast("float", value))

    @property
    def theta(self) -> float:
        """The stated base."""
        return self.number("rope_theta")

    @property
    def original(self) -> int:
        """The stated window before scaling; the stored one if none is."""
        return int(self.number("original_max_position_embeddings", self.window))


class Reading(NamedTuple):
    """What a reader turns by at one length."""

    inv_freq: Float[Tensor, " pairs"]
    attention_scale: float = 1.0


Reader = Callable[[Stated, int], Reading]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a reader takes an export: `words` says by how much it is off, or why it cannot."""

    reader: str
    kind: Literal["exact", "approximate", "cannot"]
    words: str

    def __str__(self) -> str:
        """Return the verdict as one line."""
        return f"{self.reader}: {self.kind}" + (f" ({self.words})" if self.words else "")


def _plain(stated: Stated, theta: float | None = None) -> Float[Tensor, " pairs"]:
    return base_inv_freq(stated.head_dim, stated.theta if theta is None else theta).double()


def _linear(stated: Stated) -> Reading:
    return Reading(_plain(stated) / stated.number("factor"))


def _llama3(stated: Stated) -> Reading:
    """Meta's apply_scaling."""
    plain, factor = _plain(stated), stated.number("factor")
    low, high = stated.number("low_freq_factor"), stated.number("high_freq_factor")
    turns = stated.original * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Reading(plain * (kept + (1 - kept) / factor))


def _yarn_frequencies(stated: Stated, *, beta_fast: float, beta_slow: float, truncate: bool) -> Float[Tensor, " pairs"]:
    """The ramp over pairs of the YaRN authors' code, which all of these engines carry."""
    per_turn = stated.head_dim / (2 * math.log(stated.theta))
    low, high = (per_turn * math.log(stated.original / (2 * math.pi * beta)) for beta in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, stated.head_dim - 1)
    high += 0.001 if low == high else 0
    pair = torch.arange(stated.head_dim // 2, dtype=torch.float64)
    divided = ((pair - low) / (high - low)).clamp(0, 1)
    return _plain(stated) * (1 - divided + divided / stated.number("factor"))


def _stated_yarn(stated: Stated) -> Float[Tensor, " pairs"]:
    return _yarn_frequencies(
        stated,
        beta_fast=stated.number("beta_fast", 32),
        beta_slow=stated.number("beta_slow", 1),
        truncate=bool(stated.parameters.get("truncate", True)),
    )


def _yarn_scale(stated: Stated, *, reads_attention_factor: bool) -> float:
    factor = stated.number("factor")
    if reads_attention_factor and "attention_factor" in stated.parameters:
        return stated.number("attention_factor")
    if stated.parameters.get("mscale") and stated.parameters.get("mscale_all_dim"):
        scales = (1 + (attention_temperature(factor) - 1) * stated.number(key) for key in ("mscale", "mscale_all_dim"))
        return next(scales) / next(scales)
    return attention_temperature(max(1.0, factor))


def _longrope_scale(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def _listed(stated: Stated, key: str) -> Float[Tensor, " pairs"]:
    return _plain(stated) / torch.tensor(cast("list[float]", stated.parameters[key]), dtype=torch.float64)


def _growing(stated: Stated, window: float, seq_len: float) -> Reading:
    factor, d = stated.number("factor"), stated.head_dim
    growth = factor * max(1.0, seq_len / window) - (factor - 1)
    return Reading(_plain(stated, stated.theta * growth ** (d / (d - 2))))


def _proportional(stated: Stated) -> Reading:
    kept = int(stated.number("partial_rotary_factor", 1.0) * stated.head_dim // 2)
    return Reading(torch.where(torch.arange(stated.head_dim // 2) < kept, _plain(stated), 0.0))


def _kind(stated: Stated) -> str:
    return str(stated.parameters.get("rope_type", "default"))


def _common(stated: Stated) -> Reading:
    """Return what every reader makes of the three plainest types."""
    kinds: dict[str, Callable[[Stated], Reading]] = {
        "default": lambda s: Reading(_plain(s)),
        "linear": _linear,
        "llama3": _llama3,
    }
    kind = _kind(stated)
    if kind not in kinds:
        raise UnreadableError(f"knows no rope_type {kind!r}")
    return kinds[kind](stated)


def transformers_5(stated: Stated, seq_len: int) -> Reading:
    """modeling_rope_utils of transformers 5.24.0, one sequence in a new module."""
    if _kind(stated) == "proportional":
        return _proportional(stated)
    return transformers_4(stated, seq_len)


def transformers_4(stated: Stated, seq_len: int) -> Reading:
    """modeling_rope_utils of transformers 4.57.6, one sequence in a new module."""
    kind = _kind(stated)
    if kind == "yarn":
        return Reading(_stated_yarn(stated), _yarn_scale(stated, reads_attention_factor=True))
    if kind == "longrope":
        scale = stated.parameters.get("attention_factor")
        scale = _longrope_scale(stated.number("factor"), stated.original) if scale is None else cast("float", scale)
        return Reading(_listed(stated, "long_factor" if seq_len > stated.original else "short_factor"), float(scale))
    if kind == "dynamic":
        return _growing(stated, stated.window, seq_len)
    return _common(stated)


def vllm(stated: Stated, _seq_len: int) -> Reading:
    """model_executor/layers/rotary_embedding of vLLM 0.33.0, served at the stored window."""
    kind = _kind(stated)
    if kind == "yarn":
        return Reading(_stated_yarn(stated), _yarn_scale(stated, reads_attention_factor=True))
    if kind == "longrope":  # one list for every length, chosen when the server starts
        which = "long" if stated.window > stated.original else "short"
        scale = stated.number(f"{which}_mscale", _longrope_scale(stated.window / stated.original, stated.original))
        return Reading(_listed(stated, f"{which}_factor"), scale)
    if kind == "dynamic":  # one base for every length, and the multiplier at the stored window is 1
        return Reading(_plain(stated))
    if kind == "proportional":
        if stated.number("partial_rotary_factor", 1.0) <= 0:
            raise UnreadableError("refuses a partial_rotary_factor of 0")
        return _proportional(stated)
    return _common(stated)


def sglang(stated: Stated, seq_len: int) -> Reading:
    """srt/layers/rotary_embedding of SGLang 0.5.23."""
    kind = _kind(stated)
    if kind == "yarn":
        return Reading(_stated_yarn(stated), _yarn_scale(stated, reads_attention_factor=False))
    if kind == "longrope":  # its largest position must exceed the original window, which takes two tokens more
        which = "long" if seq_len > stated.original + 1 else "short"
        scale = stated.number(f"{which}_mscale", _longrope_scale(stated.window / stated.original, stated.original))
        return Reading(_listed(stated, f"{which}_factor"), scale)
    if kind == "dynamic":  # one base for every length: that of the stored window times the factor
        return _growing(stated, stated.window, stated.window * stated.number("factor"))
    if kind == "proportional":
        raise UnreadableError("has the type, but its LLaMA was not examined for it")
    return _common(stated)


def llama_cpp(stated: Stated, _seq_len: int) -> Reading:
    """The converter and llama-context.cpp of llama.cpp, for the llama architecture.

    Of YaRN it reads factor and original window only: the betas are written and not read back, the ends of the ramp are
    always rounded, and the scale is always 0.1 ln(factor) + 1.
    """
    kind = _kind(stated)
    if kind == "yarn":
        frequencies = _yarn_frequencies(stated, beta_fast=32, beta_slow=1, truncate=True)
        return Reading(frequencies, attention_temperature(max(1.0, stated.number("factor"))))
    if kind in {"dynamic", "longrope", "proportional"}:
        raise UnreadableError(f"its converter drops {kind!r} and the model runs unscaled")
    return _common(stated)


def ollama(stated: Stated, _seq_len: int) -> Reading:
    """convert_llama.go of ollama, which reads the top-level rope_theta and rope_scaling."""
    kind = _kind(stated)
    if kind not in {"default", "linear", "llama3"}:
        raise UnreadableError(f"its converter drops {kind!r} and the model runs unscaled")
    return _common(stated)


READERS: dict[str, Reader] = {
    "transformers 5": transformers_5,
    "transformers 4.57": transformers_4,
    "vLLM 0.33": vllm,
    "SGLang 0.5": sglang,
    "llama.cpp": llama_cpp,
    "ollama": ollama,
}
REMARKS: dict[tuple[str, str], str] = {
    (
        "transformers 5",
        "longrope",
    ): "one list for the whole batch, and a cache that crosses the original window holds both",
    (
        "transformers 4.57",
        "longrope",
    ): "one list for the whole batch, and a cache that crosses the original window holds both",
    ("SGLang 0.5", "longrope"): "one list for a whole batch; a cache that crosses the original window holds both",
    ("transformers 5", "dynamic"): "one sequence in a new module; it remembers the longest it has seen",
    ("transformers 4.57", "dynamic"): "one sequence in a new module; it remembers the longest it has seen",
    ("vLLM 0.33", "linear"): "takes the window times the factor as its limit: pass --max-model-len {window}",
    ("SGLang 0.5", "linear"): "takes the window times the factor as its limit: pass --context-length {window}",
    ("vLLM 0.33", "longrope"): "takes the original window as its limit: pass --max-model-len {window}",
}
"""What a user of a reader must know although the numbers are right; `{window}` is the stored one."""


def judge(
    parameters: RopeParameters,
    *,
    window: int,
    geometry: RopeGeometry,
    plans: Mapping[int, PositionPlan],
    family: str = "llama",
) -> list[Verdict]:
    """Return how each reader takes an export.

    Args:
        parameters, window: what config.json states.
        geometry: of the checkpoint.
        plans: what the model turns by, by length in tokens; one length is enough for a static method.
        family: the configuration's model_type; llama.cpp and ollama were read for "llama" alone.
    """
    stated = Stated(parameters, window, geometry.head_dim)
    found: list[Verdict] = []
    for reader, read in READERS.items():
        if family != "llama" and reader in {"llama.cpp", "ollama"}:
            found.append(Verdict(reader=reader, kind="cannot", words=f"not examined for {family!r}"))
            continue
        try:
            words = _difference(stated, read, plans)
        except UnreadableError as error:
            other_way = "; use --gguf" if reader in {"llama.cpp", "ollama"} and len(plans) == 1 else ""
            found.append(Verdict(reader=reader, kind="cannot", words=f"{error}{other_way}"))
            continue
        two_lists = parameters.get("short_factor") != parameters.get("long_factor")
        remark = REMARKS.get((reader, _kind(stated)), "").format(window=window)
        if _kind(stated) == "longrope" and not two_lists and reader != "vLLM 0.33":
            remark = ""  # equal lists have nothing to switch between
        parts = [part for part in (words, remark) if part]
        if _kind(stated) == "dynamic":
            parts.append(f"and the stored window is {window}, where readers stop or warn")
        off = words or (remark and _kind(stated) == "dynamic")
        found.append(Verdict(reader=reader, kind="approximate" if off else "exact", words="; ".join(parts)))
    return found


def _difference(stated: Stated, read: Reader, plans: Mapping[int, PositionPlan]) -> str:
    """Return in words by how much a reading is off at worst, or nothing."""
    ratio, scale, scales = 1.0, 0.0, (1.0, 1.0)
    for seq_len, plan in plans.items():
        reading = read(stated, seq_len)
        pair = torch.stack((reading.inv_freq, plan.inv_freq.double())).clamp_min(1e-30)  # stopped pairs agree
        ratio = max(ratio, float((pair.amax(dim=0) / pair.amin(dim=0)).max()))
        apart = abs(reading.attention_scale / plan.attention_scale - 1)
        if apart > scale:
            scale, scales = apart, (reading.attention_scale, plan.attention_scale)
    words: list[str] = []
    if ratio > 1 + EXACT:
        words.append(f"frequencies off by up to {f'{100 * (ratio - 1):.2g} %' if ratio < 2 else f'{ratio:.2g} times'}")
    if scale > EXACT:
        words.append(f"attention scale {scales[0]:.4g}, not {scales[1]:.4g}")
    return ", ".join(words)
