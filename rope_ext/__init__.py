"""Stretch the context window of a Hugging Face LLaMA, measure what it cost, and export it.

    from rope_ext import Yarn, extend, load_model, save_extended

    model, tokenizer = load_model("tiny")
    with extend(model, Yarn(), context=2048):
        save_extended(model, "tiny-2k", tokenizer=tokenizer)

Names are imported on first use, so that `rope-ext --help` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rope_ext.errors import (
        ContextError,
        ExportError,
        GeometryError,
        MethodError,
        ModelError,
        PatchError,
        RopeExtError,
    )
    from rope_ext.export import extend_from_record, load, save_extended
    from rope_ext.geometry import RopeGeometry
    from rope_ext.gguf import extend_gguf, save_gguf
    from rope_ext.hf import load_model
    from rope_ext.methods.abf import Abf
    from rope_ext.methods.alibi import Alibi
    from rope_ext.methods.dynamic_ntk import DynamicNtk
    from rope_ext.methods.dynamic_yarn import DynamicYarn
    from rope_ext.methods.linear import Linear
    from rope_ext.methods.llama3 import Llama3
    from rope_ext.methods.longrope import Longrope
    from rope_ext.methods.nope import Nope
    from rope_ext.methods.ntk import Ntk
    from rope_ext.methods.ntk_by_parts import NtkByParts
    from rope_ext.methods.p_rope import PRope
    from rope_ext.methods.resonance import Resonance
    from rope_ext.methods.unscaled import Unscaled
    from rope_ext.methods.yarn import Yarn
    from rope_ext.patch import Patch, extend
    from rope_ext.plan import Method, PositionPlan
    from rope_ext.registry import method

_HOME = {
    "Abf": "methods.abf",
    "Alibi": "methods.alibi",
    "ContextError": "errors",
    "DynamicNtk": "methods.dynamic_ntk",
    "DynamicYarn": "methods.dynamic_yarn",
    "ExportError": "errors",
    "GeometryError": "errors",
    "Linear": "methods.linear",
    "Llama3": "methods.llama3",
    "Longrope": "methods.longrope",
    "Method": "plan",
    "MethodError": "errors",
    "ModelError": "errors",
    "Nope": "methods.nope",
    "Ntk": "methods.ntk",
    "NtkByParts": "methods.ntk_by_parts",
    "PRope": "methods.p_rope",
    "Patch": "patch",
    "PatchError": "errors",
    "PositionPlan": "plan",
    "Resonance": "methods.resonance",
    "RopeExtError": "errors",
    "RopeGeometry": "geometry",
    "Unscaled": "methods.unscaled",
    "Yarn": "methods.yarn",
    "extend": "patch",
    "extend_from_record": "export",
    "extend_gguf": "gguf",
    "load": "export",
    "load_model": "hf",
    "method": "registry",
    "save_extended": "export",
    "save_gguf": "gguf",
}

__all__ = [
    "Abf",
    "Alibi",
    "ContextError",
    "DynamicNtk",
    "DynamicYarn",
    "ExportError",
    "GeometryError",
    "Linear",
    "Llama3",
    "Longrope",
    "Method",
    "MethodError",
    "ModelError",
    "Nope",
    "Ntk",
    "NtkByParts",
    "PRope",
    "Patch",
    "PatchError",
    "PositionPlan",
    "Resonance",
    "RopeExtError",
    "RopeGeometry",
    "Unscaled",
    "Yarn",
    "extend",
    "extend_from_record",
    "extend_gguf",
    "load",
    "load_model",
    "method",
    "save_extended",
    "save_gguf",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rope_ext' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rope_ext.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
