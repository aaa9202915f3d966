"""Methods by name, for the command line and YAML; Python users pass an instance and need none of this."""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import cast

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

import rope_ext.methods
from rope_ext.errors import MethodError
from rope_ext.plan import WRAPPED, Method, hyperparameters

MAX_WRAPPED = 8
"""How deep a spelling may nest; no two useful wrappers have been seen on one another yet."""


def known_methods() -> dict[str, type[Method]]:
    """Return every method class by its name, found by walking `rope_ext.methods`, in alphabetical order."""
    classes: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(rope_ext.methods.__path__):
        module = importlib.import_module(f"rope_ext.methods.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and "name" in vars(value):
                classes[value.name] = cast("type[Method]", value)
    return dict(sorted(classes.items()))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for a near miss, and ";" otherwise: the joint of a message that goes on."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ";"


def method(name: str, /, **values: object) -> Method:
    """Return an instance of the method called `name` with the given hyper-parameters.

    Numbers, booleans, lists and wrapped methods may come as text, as they do from a command line.

    Raises:
        MethodError: no such method, no such hyper-parameter, or a value out of its range.
    """
    known = known_methods()
    if not isinstance(name, str):
        raise MethodError(f"method: {name!r} is not a name; known: {', '.join(known)}")
    if name not in known:
        raise MethodError(f"method: {name!r} is not a method{nearest(name, known)} known: {', '.join(known)}")
    cls = known[name]
    fields = list(hyperparameters(cls()))
    for key in values:
        if key not in fields:
            allowed = f"it has: {', '.join(fields)}" if fields else "it has none"
            raise MethodError(f"{name}: {key!r} is not a hyper-parameter{nearest(key, fields)} {allowed}")
    if isinstance(values.get(WRAPPED), str):
        values[WRAPPED] = parse_method(str(values[WRAPPED]))
    try:
        return _validate(cls, values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, MethodError):
            raise cause from None
        key = first["loc"][0] if first["loc"] else "?"
        raise MethodError(f"{name}: {key} = {first['input']!r} is refused: {first['msg']}") from None


def _validate(cls: type[Method], values: Mapping[str, object]) -> Method:
    # A wrapped method is a protocol to pydantic: it asks isinstance, as it does of any class that is not its own.
    adapter: TypeAdapter[Method] = TypeAdapter(with_config(ConfigDict(arbitrary_types_allowed=True))(cls))
    return adapter.validate_python(dict(values))


def parse_method(text: str) -> Method:
    """Return the method written as NAME:key=value:key=value.

    What follows `over=`, the hyper-parameter that holds a wrapped method, belongs to that method, as in
    resonance:over=yarn:beta_fast=16.

    Raises:
        MethodError: a part is not key=value, a key comes twice, or what `method` raises.
    """
    name, *parts = text.strip().split(":")
    if text.count(f":{WRAPPED}=") > MAX_WRAPPED:
        raise MethodError(f"{name}: it wraps more than {MAX_WRAPPED} methods, one over another; wrap fewer")
    values: dict[str, object] = {}
    for i, part in enumerate(parts):
        key, separator, value = part.partition("=")
        if key == WRAPPED and value:
            value = ":".join([value, *parts[i + 1 :]])
        if not separator or not key or not value:
            raise MethodError(
                f"{name}: {part!r} is not key=value; write NAME:key=value:key=value, as yarn:beta_fast=16"
            )
        if key in values:
            raise MethodError(f"{name}: {key!r} is given twice; give it once")
        values[key] = value
        if key == WRAPPED:
            break
    return method(name, **values)


def parse_methods(text: str) -> list[Method]:
    """Return the methods of a comma list.

    Raises:
        MethodError: an empty list, or what `parse_method` raises.
    """
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise MethodError(f"methods: {text!r} names none; known: {', '.join(known_methods())}")
    return [parse_method(part) for part in parts]
