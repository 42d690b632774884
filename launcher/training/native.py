"""The native row: a query with positives and negatives, each text, images, videos or several of them.

    {"id"?, "instruction"?, "query": C, "positives": [C, ...], "negatives": [C, ...], "scores"?: [number, ...]}
    {"instruction"?, "query": C, "documents": [C, ...], "labels": [1, 0, ...], "scores"?}   Qwen's object
    C is a text, or {"text", "image"|"images", "video"|"videos", "min_pixels"?, "max_pixels"?, "fps"?, "max_frames"?},
    each one or a list; videos come first, then images, then texts, as in Qwen's script.

"scores" are a teacher's, one a document (positives, then negatives); "fps" and "max_frames" may stand in the row too.
"positive" and "negative" are read alike: MTEB's reranking rows are this form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.training.content import (
    as_documents,
    as_list,
    read_images,
    read_instruction,
    read_label,
    read_score,
    read_text,
    read_videos,
    refuse_lost,
    refuse_unknown,
)
from launcher.training.jsonl import RowError, describe
from launcher.training.parts import Document, Parts
from launcher.training.rows import Content

DOCUMENT_KEYS = {"positives", "positive", "negatives", "negative"}
FILM_KEYS = ("fps", "max_frames")
ROW_KEYS = {"id", "instruction", "query", "documents", "labels", "scores", *FILM_KEYS, *DOCUMENT_KEYS}
LIMITS = ("min_pixels", "max_pixels", *FILM_KEYS)
CONTENT_KEYS = {"text", "image", "images", "video", "videos", *LIMITS}


def native_parts(row: dict[str, Any], folder: Path) -> Parts:
    """Read one native row; raises RowError."""
    refuse_lost(row, ROW_KEYS, 'images stand inside "query" and the documents: {"text": ..., "image": ...}')
    if row.get("query") is None:
        raise RowError(f"no query: its keys are {', '.join(sorted(row))}")
    film = {key: row[key] for key in FILM_KEYS if key in row}
    query = read_content(row["query"], folder, '"query"', film)
    if "documents" in row:
        contents, labels = _labelled(row, folder, film)
    else:
        sides = [_documents(row, side, folder, film) for side in ("positive", "negative")]
        contents = [content for side in sides for content in side]
        labels = [1.0] * len(sides[0]) + [0.0] * len(sides[1])
    scores: list[Any] = [*read_scores(row.get("scores"), len(contents))] or [None] * len(contents)
    documents = map(Document, contents, labels, scores)
    return Parts(read_instruction(row.get("instruction")), query, tuple(documents))


def read_scores(value: Any, count: int) -> list[float]:
    """A teacher's scores, one for each of `count` documents, or none."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) != count:
        raise RowError(f'scores do not match: "scores" must list one number for each of {count} documents')
    return [read_score(score, '"scores"') for score in value]


def labels_of(row: dict[str, Any], count: int) -> list[float]:
    """The row's "labels", one for each of `count` documents; without them the document scored best is the positive."""
    labels = row.get("labels")
    if labels is None and "scores" in row and count:
        scores = read_scores(row["scores"], count)
        return [float(score == max(scores)) for score in scores]
    if not isinstance(labels, list) or len(labels) != count:
        raise RowError(f'labels do not match: "labels" must list one 0 or 1 (or a grade) for each of {count} documents')
    return [read_label(label, '"labels"') for label in labels]


def read_content(value: Any, folder: Path, name: str, film: dict[str, Any] | None = None) -> Content:
    """Videos first, then images, then texts; text is literal, also when it reads `<image>`."""
    if not isinstance(value, dict):
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise RowError(f"wrong type: {name} must be text or an object, not {describe(value)}")
        return (read_text(value, name),) if value != "" else ()
    refuse_unknown(value, CONTENT_KEYS, name)
    limits = {key: value[key] for key in LIMITS if value.get(key) is not None}
    still: dict[str, Any] = {key: value for key, value in limits.items() if key not in FILM_KEYS}
    images = [*as_list(value.get("image")), *as_list(value.get("images"))]
    parts: list[Any] = []
    for key in ("video", "videos"):
        parts += read_videos(value.get(key), folder, f"a video in {name}", (film or {}) | limits)
    parts += read_images(images, folder, f"an image in {name}", still)
    texts = [read_text(item, f"a text in {name}") for item in as_list(value.get("text"))]
    return (*parts, *(text for text in texts if text))


def _documents(row: dict[str, Any], key: str, folder: Path, film: dict[str, Any]) -> list[Content]:
    plural = f"{key}s"
    if key in row and plural in row:
        raise RowError(f'both "{key}" and "{plural}": give one')
    name = key if key in row else plural
    return [read_content(item, folder, f'"{name}"', film) for item in _several(row, name)]


def _several(row: dict[str, Any], name: str) -> list[Any]:
    """The documents of a key; a singular one may hold a text that reads like a list."""
    return as_documents(row.get(name), f'"{name}"') if name.endswith("s") else as_list(row.get(name))


def _labelled(row: dict[str, Any], folder: Path, film: dict[str, Any]) -> tuple[list[Content], list[float]]:
    both = sorted(row.keys() & DOCUMENT_KEYS)
    if both:
        raise RowError(f'both "documents" and "{both[0]}": give one form')
    documents = [read_content(item, folder, '"documents"', film) for item in _several(row, "documents")]
    return documents, labels_of(row, len(documents))
