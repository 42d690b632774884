"""The native row: a query with positives and negatives, each text, images or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.training.content import (
    EMPTY,
    as_list,
    read_image,
    read_instruction,
    read_text,
    refuse_lost,
    refuse_unknown,
)
from launcher.training.formats import Content, Parts
from launcher.training.jsonl import RowError, describe

ROW_KEYS = {"id", "instruction", "query", "positives", "positive", "negatives", "negative", "documents", "labels"}
CONTENT_KEYS = {"text", "image", "images", "min_pixels", "max_pixels"}


def native_parts(row: dict[str, Any], folder: Path) -> Parts:
    """Read one native row, or Qwen's {"query", "documents"} with labels; raises RowError."""
    refuse_lost(row, ROW_KEYS, 'images stand inside "query" and the documents: {"text": ..., "image": ...}')
    if row.get("query") is None:
        raise RowError("no query")
    query = _content(row["query"], folder, '"query"')
    if "documents" in row:
        positives, negatives = _labelled(row, folder)
    else:
        positives, negatives = (_documents(row, key, folder) for key in ("positive", "negative"))
    return Parts(read_instruction(row.get("instruction")), query, positives, negatives)


def _documents(row: dict[str, Any], key: str, folder: Path) -> list[Content]:
    plural = f"{key}s"
    if key in row and plural in row:
        raise RowError(f'both "{key}" and "{plural}": give one')
    name = key if key in row else plural
    return [_content(item, folder, f'"{name}"') for item in as_list(row.get(name))]


def _labelled(row: dict[str, Any], folder: Path) -> tuple[list[Content], list[Content]]:
    both = sorted(row.keys() & {"positives", "positive", "negatives", "negative"})
    if both:
        raise RowError(f'both "documents" and "{both[0]}": give one form')
    documents = [_content(item, folder, '"documents"') for item in as_list(row["documents"])]
    labels = row.get("labels")
    if not isinstance(labels, list) or len(labels) != len(documents):
        raise RowError(f'labels do not match: "labels" must list one 0 or 1 for each of {len(documents)} documents')
    wrong = [label for label in labels if label not in (0, 1)]
    if wrong:
        raise RowError(f'wrong label: "labels" must hold 0 or 1, not {describe(wrong[0])}')
    pairs = list(zip(documents, labels, strict=True))
    return [doc for doc, label in pairs if label], [doc for doc, label in pairs if not label]


def _content(value: Any, folder: Path, name: str) -> Content:
    """Images first, then texts; text is literal, also when it reads `<image>`."""
    if isinstance(value, str):
        return (value,) if value else EMPTY
    if not isinstance(value, dict):
        raise RowError(f"wrong type: {name} must be text or an object, not {describe(value)}")
    refuse_unknown(value, CONTENT_KEYS, name)
    limits = {key: value[key] for key in ("min_pixels", "max_pixels") if key in value}
    paths = as_list(value.get("image")) + as_list(value.get("images"))
    images = [read_image(item, folder, f"an image in {name}", limits) for item in paths]
    texts = [read_text(item, f"a text in {name}") for item in as_list(value.get("text"))]
    return (*images, *(text for text in texts if text)) or EMPTY
