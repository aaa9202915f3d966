"""Devices by their data sheets, and from files of one's own."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.load import RecipeError
from rope_ext.costs import BYTES

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device by its data sheet.

    Attributes:
        memory: bytes.
        bandwidth: of its memory, bytes a second.
        peak: operations a second by dtype, dense.
    """

    name: str
    memory: float
    bandwidth: float
    peak: Mapping[str, float]


DEVICES = {
    # NVIDIA's data sheets, SXM, dense: tensor cores, fp32 as TF32 is not taken for fp32; memory as nvidia-smi states it
    "a100": Device(name="a100", memory=81_920 * MIB, bandwidth=2.039e12, peak={"fp32": 19.5e12, "bf16": 312e12}),
    "h100": Device(
        name="h100", memory=81_559 * MIB, bandwidth=3.35e12, peak={"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}
    ),
    "h200": Device(
        name="h200", memory=143_771 * MIB, bandwidth=4.8e12, peak={"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}
    ),
}


ALIASES = {"fp16": "bf16", "int8": "fp8"}
"""Names of dtypes with the same size and peak as those that are planned in."""


def read_device(name: str) -> Device:
    """Return a device by its name, or from a JSON file of one's own.

    Raises:
        RecipeError: neither.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if not path.is_file():
        raise RecipeError(
            f"gpu: {name!r} is neither one of {', '.join(DEVICES)} nor a file; write one, as "
            '{"name": "mine", "memory_gb": 24, "bandwidth_gb_s": 1000, "tflops": {"bf16": 80}}'
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        stated = {ALIASES.get(str(key), str(key)): value for key, value in told["tflops"].items()}
        numbers = (told["memory_gb"], told["bandwidth_gb_s"])
        if not stated or not all(_is_size(each) for each in (*stated.values(), *numbers)):
            raise ValueError("sizes must be numbers above 0")  # noqa: TRY301  (one message for all)
        if not stated.keys() & BYTES.keys():
            raise ValueError(f"tflops names none of {', '.join([*BYTES, *ALIASES])}")  # noqa: TRY301
        return Device(
            name=str(told.get("name", path.stem)),
            memory=numbers[0] * 1e9,
            bandwidth=numbers[1] * 1e9,
            peak={key: value * 1e12 for key, value in stated.items()},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"gpu: {path} is no device ({error}); it needs memory_gb, bandwidth_gb_s and tflops by dtype"
        ) from error


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
