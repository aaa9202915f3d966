"""What a method would do to a model, pair by pair, from its configuration alone."""

import math
from dataclasses import dataclass

from jaxtyping import Bool
from rich import box
from rich.table import Table
from torch import Tensor
from transformers import PretrainedConfig

from rope_ext.costs import kv_cache_bytes, windows_of
from rope_ext.geometry import RopeGeometry
from rope_ext.hf import ScaledBase, read_geometry
from rope_ext.patch import build_table
from rope_ext.plan import STATIC, Method, PositionPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inspection:
    """A geometry, a method's plan for it at `context` tokens, and what the KV cache costs there.

    `kv_cache_bytes` is for one sequence of `context` tokens with 2 bytes a number (bf16 or fp16).
    """

    geometry: RopeGeometry
    method: Method
    context: int
    plan: PositionPlan
    num_key_value_heads: int
    kv_cache_bytes: int

    @property
    def factor(self) -> float:
        """The stretch, context / original_context."""
        return self.context / self.geometry.original_context

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON values; a wavelength that is infinite (a pair that does not turn) is null."""
        geometry = self.geometry
        return {
            "head_dim": geometry.head_dim,
            "theta": geometry.theta,
            "num_heads": geometry.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "original_context": geometry.original_context,
            "context": self.context,
            "factor": self.factor,
            "static": self.is_static,
            "attention_scale": self.plan.attention_scale,
            "kv_cache_bytes": self.kv_cache_bytes,
            "inv_freq": geometry.inv_freq.tolist(),
            "new_inv_freq": self.plan.inv_freq.tolist(),
            "wavelengths": [w if math.isfinite(w) else None for w in geometry.wavelengths.tolist()],
            "rotations": geometry.rotations.tolist(),
            "longer_than_window": (geometry.rotations < 1).tolist(),
            "unseen_angles": self.unseen_angles.tolist(),
        }

    @property
    def unseen_angles(self) -> Bool[Tensor, " pairs"]:
        """Which pairs meet angles at `context` tokens that training never showed, shape (head_dim/2,).

        A pair that turned fully inside the original window has seen every angle. A slower one has seen the part of a
        turn up to the end of that window, and meets new ones as soon as it goes further.
        """
        return unseen_angles(self.geometry, self.plan, self.context)

    def summary(self) -> str:
        """Return the geometry, the stretch with its costs, and whether what is shown holds at one length only."""
        geometry = self.geometry
        return (
            f"head_dim {geometry.head_dim}, theta {geometry.theta:g}, {geometry.num_heads} heads "
            f"({self.num_key_value_heads} for keys and values), window {geometry.original_context} tokens\n"
            f"{self.method!r} to {self.context} tokens: factor {self.factor:g}, attention scale "
            f"{self.plan.attention_scale:.5g}, KV cache {in_bytes(self.kv_cache_bytes)} a sequence in 16 bits"
            + ("" if self.is_static else f"\nfrequencies follow the current length; shown is {self.context} tokens")
        )

    @property
    def is_static(self) -> bool:
        """Whether the frequencies are the same at every length."""
        lengths = (1, self.geometry.original_context, self.geometry.original_context + 1, self.context)
        keys = {self.method.frequency_key(self.geometry, context=self.context, seq_len=n) for n in lengths}
        return keys == {STATIC}

    def table(self) -> Table:
        """Return one row a pair: wavelengths and turns before, wavelength after, what was done, what is new to it."""
        view = Table(title="pair by pair, fastest first", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("pair", "wavelength", "turns in\nwindow", "new wave-\nlength", "frequency\ntimes"):
            view.add_column(column, justify="right")
        view.add_column("what\nhappens", no_wrap=True)
        view.add_column(f"angles at\n{self.context}", no_wrap=True)
        unseen = self.unseen_angles.tolist()
        old, new = self.geometry.inv_freq.double(), self.plan.inv_freq.double()
        ratios = (new / old).nan_to_num(1.0).tolist()
        columns = (self.geometry.wavelengths, self.geometry.rotations, 2 * math.pi / new)
        for pair, (wavelength, turns, after) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            ratio = ratios[pair]
            numbers = (f"{wavelength:.4g}", f"{turns:.3g}", f"{after:.4g}", f"{ratio:.4f}")
            seen = "unseen ones" if unseen[pair] else "all seen"
            view.add_row(str(pair), *numbers, _verdict(ratio, self.factor), seen)
        return view


def unseen_angles(geometry: RopeGeometry, plan: PositionPlan, context: int) -> Bool[Tensor, " pairs"]:
    """Return which pairs meet new angles at `context` tokens, see `Inspection.unseen_angles`."""
    trained = geometry.rotations
    reached = plan.inv_freq.double() * context / (2 * math.pi)
    return (trained < 1) & (reached > trained * (1 + 1e-6))


def inspect_config(
    config: PretrainedConfig,
    method: Method,
    *,
    context: int | None = None,
    factor: float | None = None,
    base: ScaledBase | None = None,
    original_context: int | None = None,
) -> Inspection:
    """Return what `method` would do to a model of this configuration, at exactly one of `context` and `factor`.

    Raises:
        ModelError, ContextError, MethodError: as `extend` would.
    """
    geometry = read_geometry(config, base=base, original_context=original_context)
    table = build_table(config, geometry, method, context=context, factor=factor)
    target = table.context
    kv_heads = int(getattr(config, "num_key_value_heads", None) or geometry.num_heads)
    return Inspection(
        geometry=geometry,
        method=method,
        context=target,
        plan=table.plan,
        num_key_value_heads=kv_heads,
        kv_cache_bytes=kv_cache_bytes(
            num_layers=int(config.num_hidden_layers),
            num_key_value_heads=kv_heads,
            head_dim=geometry.head_dim,
            tokens=target,
            windows=windows_of(config),
        ),
    )


def _verdict(ratio: float, factor: float) -> str:
    if ratio == 0:
        return "stopped"
    if abs(ratio - 1) < 1e-6:
        return "untouched"
    if abs(ratio * factor - 1) < 1e-6:
        return "divided"
    return "blended" if ratio > 1 / factor else "slowed more"


def in_bytes(size: float) -> str:
    """Return a size in bytes with a binary unit, four digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
