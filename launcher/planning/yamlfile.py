"""YAML files read and written without Hydra: plain values, or nodes that know their line and their text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml  # type: ignore[import-untyped]


def load(file: Path) -> Any:
    """The values of a file."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def dump(data: Any) -> str:
    """`data` as YAML in its own order."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
    return text


@lru_cache(maxsize=256)  # jobs of a sweep are made of the same files
def leaves(text: str) -> MappingProxyType[tuple[str, ...], tuple[int, str, bool]]:
    """Path of keys -> (line from 1, text as written, whether it is without quotes) of each value that is no mapping.

    Those inside a list have their number, from 0, as the last name of the path.
    """
    found: dict[tuple[str, ...], tuple[int, str, bool]] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                walk(value, (*path, str(key.value)))
        elif isinstance(node, yaml.ScalarNode):
            found[path] = (node.start_mark.line + 1, node.value, node.style is None)
        elif node is not None:
            found[path] = (node.start_mark.line + 1, "", False)
            for number, item in enumerate(node.value):
                walk(item, (*path, str(number)))

    walk(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return MappingProxyType(found)
