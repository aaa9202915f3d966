"""YAML as a recipe's author means it: no key twice, and only what looks like a number is one."""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers in PyYAML's safe loader.

    YAML 1.1, which PyYAML reads, takes 2:10 for 130 and 010 for 8, makes a date of 2026-11-30, and leaves 1e-5 a word.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value!r} stands twice in one place", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_replaced = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _replaced]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.inf)\Z|\.nan\Z"
    ),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """Return what a YAML text says.

    Raises:
        yaml.YAMLError: it is not YAML, or names a key twice.
        ValueError, RecursionError: a number too long, or nesting too deep.
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506  (a child of the safe loader)
