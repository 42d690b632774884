"""Dataclass values <-> JSON-ready data. Standard library only."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any


def to_data(value: Any) -> Any:
    """A dataclass value as JSON-ready lists, dictionaries and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    return value


def from_data(kind: Any, data: Any) -> Any:
    """The inverse of `to_data` for a field type or dataclass `kind`; an unknown key is a TypeError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        unknown = sorted(set(data) - set(hints))
        if unknown:
            raise TypeError(f"{kind.__name__} has no field {', '.join(unknown)}")
        return kind(**{key: from_data(hints[key], item) for key, item in data.items()})
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return from_data(next(a for a in args if a is not type(None)), data)
    if origin is tuple:
        return tuple(from_data(args[0], item) for item in data)
    if origin is dict:
        return {key: from_data(args[1], item) for key, item in data.items()}
    if origin is list:
        return [from_data(args[0], item) for item in data]
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    return data
