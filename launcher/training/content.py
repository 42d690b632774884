"""What the row formats share: texts, labels, pictures and films, and where their files are looked for."""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from launcher.training.jsonl import RowError, describe
from launcher.training.rows import Content, Image, Video

IMAGE_KEYS = {"path", "image", "bytes", "min_pixels", "max_pixels"}
VIDEO_LIMITS = ("fps", "max_frames", "min_pixels", "max_pixels", "start_s", "end_s")
FRAMES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")  # what a list of nothing else is the frames of a film
TAGS = re.compile(r"(<image>|<video>)")
WORDS = {"yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}  # labels written out
DOCUMENTS = ("negative", "negatives", "positive", "positives")
# A row's key named so is never ignored.
MEANINGFUL = ("image", "img", "picture", "video", "audio", "score", "label", "bbox", "objects", "tools")
# Nor are documents by another format's name, or an answer to avoid.
LOST = re.compile(
    r"(?:hard_)?(?:pos|neg|positive|negative)s?(?:_(?:docs?|documents?|passages?|ctxs?|\d+))?|"
    r"rejected(?:_response|_messages|_conversations)?"
)
BASE64 = re.compile(r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk)[A-Za-z0-9+/]{50,}={0,2}")  # JPEG, PNG, GIF, WebP, BMP


def as_list(value: Any) -> list[Any]:
    """A list as it is, nothing as an empty list, one thing as a list of it."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def as_documents(value: Any, name: str) -> list[Any]:
    """`as_list`, and the list that a table's cell of text holds as JSON; raises RowError for Python's form."""
    text = value.strip() if isinstance(value, str) else ""
    if not (text.startswith("[") and text.endswith("]")):
        return as_list(value)
    try:
        found = json.loads(text)
    except ValueError:
        if text[1] in "'\"":
            raise RowError(f"wrong type: {name} is one text that looks like a list; write it as JSON") from None
        return as_list(value)
    documents = isinstance(found, list) and all(isinstance(item, str | dict) for item in found)
    return found if documents else as_list(value)  # a text may well be [1]


def read_text(value: Any, name: str) -> str:
    """A text as it was written; a whole number is its digits, other numbers would lose how they were written."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"wrong type: {name} must be text, not {describe(value)}")
    return value


def read_label(value: Any, name: str = '"label"') -> float:
    """A relevance: 0 for a negative, above it for a positive; truth values, yes and no, digits as text count too."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in WORDS:
            return WORDS[text]
        try:
            value = float(text)
        except ValueError:
            value = None if not text else value
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise RowError(f"wrong label: {name} must be 0 or above (true, false, yes, no), not {describe(value)}")
    return float(value)


def read_score(value: Any, name: str) -> float:
    """A teacher's score: any finite number."""
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise RowError(f"wrong score: {name} must hold numbers, not {describe(value)}")
    return score


def read_instruction(value: Any) -> str | None:
    """The row's instruction; empty or absent means the run's."""
    return None if value is None else read_text(value, '"instruction"') or None


def read_image(value: Any, folder: Path, name: str, limits: dict[str, Any] | None = None) -> Image:
    """A picture from a path, a data URI, base64, {"path", "min_pixels", "max_pixels"}, or {"bytes", "path"} of a table.

    A relative path is looked for in the data file's folder, then in the working folder.
    """
    limits = dict(limits or {})
    data: bytes | None = None
    if isinstance(value, dict):
        refuse_unknown(value, IMAGE_KEYS, name)
        limits |= {key: value[key] for key in ("min_pixels", "max_pixels") if key in value}
        if value.get("bytes") is not None:
            data = _bytes(value["bytes"], name)
        value = value.get("path", value.get("image"))
    elif isinstance(value, bytes):
        data = value
    if data is None and not isinstance(value, str):
        raise RowError(f"wrong type: {name} must be the path of an image, not {describe(value)}")
    if data is None and value.startswith("data:"):
        data = _decode_data_uri(value)
    elif data is None and BASE64.fullmatch(value):
        data = _bytes(value, name)
    return Image(
        path=find_file(value, folder) if data is None else None,
        data=data,
        min_pixels=_pixels(limits.get("min_pixels"), "min_pixels"),
        max_pixels=_pixels(limits.get("max_pixels"), "max_pixels"),
    )


def read_images(value: Any, folder: Path, name: str, limits: dict[str, Any] | None = None) -> list[Image]:
    """None, one or several pictures."""
    return [read_image(item, folder, name, limits) for item in as_list(value)]


def read_videos(value: Any, folder: Path, name: str, limits: dict[str, Any] | None = None) -> list[Video]:
    """None, one or several films; a list of nothing but picture files is the frames of one film."""
    items = as_list(value)
    if items and all(isinstance(item, str) and item.lower().endswith(FRAMES) for item in items):
        items = [items]
    return [_read_video(item, folder, name, dict(limits or {})) for item in items]


def _read_video(value: Any, folder: Path, name: str, limits: dict[str, Any]) -> Video:
    """A film from a path, a list of its frames, or {"path" or "video", and any of VIDEO_LIMITS}."""
    if isinstance(value, dict):
        refuse_unknown(value, {"path", "video", *VIDEO_LIMITS}, name)
        limits |= {key: value[key] for key in VIDEO_LIMITS if key in value}
        value = value.get("path", value.get("video"))
    if not isinstance(value, str | list) or not value or not all(isinstance(item, str) for item in as_list(value)):
        raise RowError(f"wrong type: {name} must be the path of a video or the paths of its frames")
    start, end = (_number(limits.get(key), key) for key in ("start_s", "end_s"))
    if (start is None) != (end is None) or (start is not None and end is not None and start >= end):
        raise RowError("wrong segment: start_s and end_s belong together, the first below the second")
    return Video(
        path=find_file(value, folder, "video") if isinstance(value, str) else None,
        frames=() if isinstance(value, str) else tuple(find_file(item, folder) for item in value),
        fps=_number(limits.get("fps"), "fps", positive=True),
        **{key: _pixels(limits.get(key), key) for key in ("max_frames", "min_pixels", "max_pixels")},
        start_s=start,
        end_s=end,
    )


def place(text: str, images: list[Image], videos: list[Video], name: str) -> Content:
    """A text with its media where the tags are; their numbers must match."""
    waiting: dict[str, list[Any]] = {"<image>": list(images), "<video>": list(videos)}
    parts = TAGS.split(text)
    for tag, media in waiting.items():
        if parts.count(tag) != len(media):
            kind, tags = tag.strip("<>") + "s", parts.count(tag)
            raise RowError(f"{tag} tags do not match {kind}: {name} has {tags} tags and {len(media)} {kind}")
    return tuple(waiting[part].pop(0) if part in waiting else part for part in parts if part)


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
        if LOST.fullmatch(key.lower()):
            raise RowError(f"unknown key: {key}; {hint}")


def _pixels(value: Any, key: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise RowError(f"wrong type: {key} must be a positive whole number, not {describe(value)}")
    return value


def _number(value: Any, key: str, *, positive: bool = False) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0 or (positive and value == 0):
        raise RowError(f"wrong type: {key} must be a number {'above 0' if positive else '0 or above'}")
    return float(value)


def _bytes(value: Any, name: str) -> bytes:
    """Bytes of a table's cell; JSON can only hold them in base64."""
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise RowError(f"bad bytes: {name} must hold base64: {error}") from None
    if not isinstance(value, bytes):
        raise RowError(f"wrong type: the bytes of {name} are {describe(value)}")
    return value


def _decode_data_uri(value: str) -> bytes:
    head, comma, body = value.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError("bad data URI: an embedded image must read data:image/...;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise RowError(f"bad data URI: {error}") from None


def find_file(value: str, folder: Path, kind: str = "image") -> str:
    """Where a file lies that a row names; raises RowError for an address, and for what is not there."""
    if not value.strip():
        raise RowError(f"{kind} file missing: the path is empty")
    if "://" in value and not value.startswith("file://"):
        raise RowError(f"{kind} is an address: {value}; download it and give the file's path")
    path = value.removeprefix("file://")
    for base in (str(folder), os.curdir):
        # normpath: `sub/../a.png` is found although there is no folder `sub`
        candidate = os.path.normpath(os.path.join(base, path))
        if os.path.isfile(candidate):
            return candidate
    shown = value if value == value.strip() and value.isprintable() else repr(value)
    shown = shown if len(shown) <= 300 else f"{shown[:300]}..."
    raise RowError(f"{kind} file missing: {shown}")
