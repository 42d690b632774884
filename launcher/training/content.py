"""What both row formats share: texts, pictures and where picture files are looked for."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
from pathlib import Path
from typing import Any

from launcher.training.formats import Image
from launcher.training.jsonl import RowError, describe

EMPTY = ("NULL",)  # what empty content reads as in Qwen's published code
IMAGE_KEYS = {"path", "image", "min_pixels", "max_pixels"}
DOCUMENTS = ("negative", "negatives", "positive", "positives")
MEANINGFUL = ("image", "video", "audio", "score", "label")  # a row's key named so is never ignored


def as_list(value: Any) -> list[Any]:
    """A list as it is, nothing as an empty list, one thing as a list of it."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def read_text(value: Any, name: str) -> str:
    """A text as it was written; numbers and dates are never converted."""
    if not isinstance(value, str):
        raise RowError(f"wrong type: {name} must be text, not {describe(value)}")
    return value


def read_instruction(value: Any) -> str | None:
    """The row's instruction; empty or absent means the run's."""
    return None if value is None else read_text(value, '"instruction"') or None


def read_image(value: Any, folder: Path, name: str, limits: dict[str, Any] | None = None) -> Image:
    """A picture from a path, a data URI, or {"path", "min_pixels", "max_pixels"}.

    A relative path is looked for in the data file's folder, then in the working folder.
    """
    limits = dict(limits or {})
    if isinstance(value, dict):
        refuse_unknown(value, IMAGE_KEYS, name)
        limits |= {key: value[key] for key in ("min_pixels", "max_pixels") if key in value}
        value = value.get("path", value.get("image"))
    if not isinstance(value, str):
        raise RowError(f"wrong type: {name} must be the path of an image, not {describe(value)}")
    embedded = value.startswith("data:")
    return Image(
        path=None if embedded else _find(value, folder),
        data=_decode_data_uri(value) if embedded else None,
        min_pixels=_pixels(limits.get("min_pixels"), "min_pixels"),
        max_pixels=_pixels(limits.get("max_pixels"), "max_pixels"),
    )


def refuse_unknown(value: dict[str, Any], known: set[str], name: str) -> None:
    """Raise RowError for a key that reading would ignore."""
    unknown = sorted(set(value) - known)
    if unknown:
        raise RowError(f"unknown key: {', '.join(unknown)} in {name} (known: {', '.join(sorted(known))})")


def refuse_lost(row: dict[str, Any], known: set[str], hint: str) -> None:
    """Raise RowError for a row's key that holds media, targets or documents which reading would silently drop."""
    unknown = sorted(key for key in row.keys() - known if row[key])
    lost = [key for key in unknown if any(word in key.lower() for word in MEANINGFUL)]
    if lost:
        raise RowError(f"unknown key: {', '.join(lost)}; {hint}")
    for key in unknown:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.9)
        if not near and isinstance(row[key], list):  # such as hard_negatives
            near = [name for name in sorted(known) if key.lower().endswith(name) and name in DOCUMENTS]
        if near:
            raise RowError(f"unknown key: {key}; did you mean {near[0]}?")


def _pixels(value: Any, key: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise RowError(f"wrong type: {key} must be a positive whole number, not {describe(value)}")
    return value


def _decode_data_uri(value: str) -> bytes:
    head, comma, body = value.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError("bad data URI: an embedded image must read data:image/...;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise RowError(f"bad data URI: {error}") from None


def _find(value: str, folder: Path) -> str:
    if not value.strip():
        raise RowError("image file missing: the path is empty")
    if "://" in value and not value.startswith("file://"):
        raise RowError(f"image is an address: {value}; download it and give the file's path")
    path = value.removeprefix("file://")
    for base in (str(folder), os.curdir):
        # normpath: `sub/../a.png` is found although there is no folder `sub`
        candidate = os.path.normpath(os.path.join(base, path))
        if os.path.isfile(candidate):
            return candidate
    raise RowError(f"image file missing: {value if value == value.strip() else repr(value)}")
