"""What Meta's params.json says of a LLaMA, and what it leaves open: the window, and the factor of the rescaling."""

import json
import math
import os
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import NamedTuple, cast

from torch import Tensor

from rope_ext.errors import ModelError
from rope_ext.geometry import RopeGeometry
from rope_ext.methods.llama3 import Llama3
from rope_ext.plan import RopeParameters

PARAMS = "params.json"
# Keys of Meta's code for a run, not for a model
MAX_LAYERS = 10_000  # far beyond any; a typing error should not name ten million tensors
RUN_TIME = {"max_seq_len", "max_batch_size", "use_kv_cache"}
LLAMA3_THETA, LLAMA3_WINDOW, LLAMA31_WINDOW = 500000.0, 8192, 131072


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaParams:
    """What params.json says, under its own names.

    Attributes:
        vocab_size: -1 where it was left to the tokenizer, as in LLaMA 1 and 2.
        multiple_of: what the width of the feed-forward layer is rounded up to, or None if it is not stated.
        use_scaled_rope: whether frequencies are rescaled as from LLaMA 3.1 on.
        rope_scaling_factor: by how much, or None; Meta's published files do not state it.

    Raises:
        ModelError: a number out of its range, or heads that do not fit the width.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int = -1
    multiple_of: int | None = None
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    use_scaled_rope: bool = False
    rope_scaling_factor: float | None = None
    rope_high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = cast("float | None", getattr(self, field.name))
            unknown_vocabulary = field.name == "vocab_size" and value == -1
            if value is None or isinstance(value, bool) or unknown_vocabulary:
                continue
            if not (math.isfinite(value) and value > 0):
                raise ModelError(f"meta: {PARAMS}: {field.name} is {value}; it must be above 0")
        if self.n_layers > MAX_LAYERS:
            raise ModelError(f"meta: {PARAMS}: n_layers is {self.n_layers}; no LLaMA has more than {MAX_LAYERS}")
        if self.dim % self.n_heads or self.dim // self.n_heads % 2 or self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"meta: {PARAMS}: dim {self.dim}, n_heads {self.n_heads}, n_kv_heads {self.n_kv_heads} do not fit; "
                "heads must be of one even size and be shared evenly"
            )

    @property
    def head_dim(self) -> int:
        """Dimensions of one head."""
        return self.dim // self.n_heads


class MetaRope(NamedTuple):
    """How a checkpoint turns: the frequencies (fp32, rad/token), how transformers spells them, and the window."""

    inv_freq: Tensor
    parameters: RopeParameters
    window: int


def ffn_width(dim: int, multiple_of: int, ffn_dim_multiplier: float | None = None) -> int:
    """Return the width of the feed-forward layer: 2/3 of 4 dim, times the multiplier, rounded up to `multiple_of`.

    Source: Touvron et al., LLaMA (arXiv 2302.13971), section 2.2, for the 2/3 of 4 dim; the rest is Meta's code.
    """
    width = 8 * dim // 3
    if ffn_dim_multiplier is not None:
        width = int(ffn_dim_multiplier * width)
    return -(-width // multiple_of) * multiple_of


def read_params(directory: str | os.PathLike[str]) -> MetaParams:
    """Return what a folder's params.json says.

    Raises:
        ModelError: no such file, no JSON, a key that is missing, of the wrong type, or not of a plain LLaMA.
    """
    path = Path(directory) / PARAMS
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"meta: {path} cannot be read: {error.strerror}; name the folder with {PARAMS} and consolidated.00.pth"
        ) from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ModelError(f"meta: {path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"meta: {path} holds no JSON object")
    given = {str(key): value for key, value in raw.items() if value is not None}
    known = {field.name: field for field in fields(MetaParams)}
    strange = sorted(key for key in given.keys() - known.keys() - RUN_TIME if given[key] is not False)
    if strange:
        raise ModelError(
            f"meta: {path}: {strange[0]!r} is no key of a plain LLaMA, so the model computes something else; known: "
            f"{', '.join(known)}"
        )
    given.setdefault("n_kv_heads", given.get("n_heads"))
    values: dict[str, object] = {}
    for name, field in known.items():
        if given.get(name) is None:
            if field.default is MISSING:
                raise ModelError(f"meta: {path}: {name} is missing")
            continue
        kind, value = cast("type", field.type), given[name]
        if isinstance(1.0, kind) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**1000 else math.inf
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = str(getattr(kind, "__name__", kind)).removesuffix(" | None")
            raise ModelError(f"meta: {path}: {name} is {value!r}; it must be of type {wanted}")
        values[name] = value
    return MetaParams(**values)  # pyright: ignore[reportArgumentType]  (checked one by one above)


def meta_rope(params: MetaParams, *, window: int | None = None, factor: float | None = None) -> MetaRope:
    """Return how a checkpoint turns, from what its parameters say and what they leave to the user.

    The window is stated by no published file. It is known for LLaMA 3 (base 500000: 8,192) and 3.1 (rescaled:
    131,072); the factor of the rescaling is 8 for LLaMA 3.1 and 3.3, and 32 for the small models of 3.2.

    Args:
        window: tokens; overrides the known one.
        factor: of the rescaling, for parameters that do not state it.

    Raises:
        ModelError: the window or the factor is needed and not given, or a factor is given that has no effect.
    """
    if window is not None and not 1 <= window < 2**31:
        raise ModelError(f"window: {window} tokens is no window; it must be 1 to {2**31 - 1}")
    theta = params.rope_theta
    if not params.use_scaled_rope:
        given = params.rope_scaling_factor if factor is None else factor
        if given is not None:
            raise ModelError(
                f"rope_factor: {PARAMS} does not set use_scaled_rope, so {given:g} has no effect; leave it out"
            )
        if window is None and theta != LLAMA3_THETA:
            raise ModelError(
                f"window: {PARAMS} does not state it (rope_theta {theta:g}); give it (--window N): 2048 for LLaMA 1, "
                "4096 for Llama 2, 16384 for Code Llama"
            )
        window = window or LLAMA3_WINDOW
        geometry = RopeGeometry(head_dim=params.head_dim, theta=theta, original_context=window)
        return MetaRope(geometry.inv_freq, {"rope_type": "default", "rope_theta": theta}, window)
    stated = params.rope_scaling_factor
    if factor is not None and stated is not None and factor != stated:
        raise ModelError(f"rope_factor: {factor:g} came, but {PARAMS} states {stated:g}; leave it out")
    factor = stated if factor is None else factor
    if factor is None:
        raise ModelError(
            f"rope_factor: {PARAMS} sets use_scaled_rope without its factor; give it (--rope-factor N): 8 for LLaMA "
            "3.1 and 3.3, 32 for LLaMA 3.2 1B and 3B"
        )
    if not (math.isfinite(factor) and factor >= 1):
        raise ModelError(f"rope_factor: {factor} is not a stretch; it must be at least 1")
    method = Llama3(high_freq_factor=params.rope_high_freq_factor or 4.0)
    geometry = RopeGeometry(head_dim=params.head_dim, theta=theta, original_context=LLAMA3_WINDOW)
    context = round(LLAMA3_WINDOW * factor)
    inv_freq = method.plan(geometry, context=context, seq_len=context).inv_freq
    return MetaRope(inv_freq, method.rope_parameters(geometry, context=context), window or LLAMA31_WINDOW)
