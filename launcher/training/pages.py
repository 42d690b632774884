"""Rows whose documents are pictures: ViDoRe/ColPali, VisRAG and vdr pages, and MMEB's pairs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launcher.training.content import as_list, read_image, read_instruction, read_text, refuse_lost
from launcher.training.jsonl import RowError
from launcher.training.parts import Document, Parts
from launcher.training.rows import Content

NEGATIVE = re.compile(r"negative_\d+")
# ColPali's rows say more about a page than a reranker needs.
PAGE_KEYS = {"query", "image", "image_filename", "source", "answer", "options", "page", "model", "prompt"}
PAGE_KEYS |= {"answer_type", "instruction", "id"}
MMEB_KEYS = {"qry", "qry_text", "qry_image_path", "pos_text", "pos_image_path", "neg_text", "neg_image_path"}
MMEB_KEYS |= {"qry_instruction", "pos_instruction", "id"}
IMAGE_TOKEN = re.compile(r"<\|image_\d+\|>")


def page_parts(row: dict[str, Any], folder: Path) -> Parts:
    """{"query", "image", "negative_0"?, ...}: the page that answers, and pages that do not."""
    negatives = sorted((key for key in row if NEGATIVE.fullmatch(key)), key=lambda key: int(key.rpartition("_")[2]))
    refuse_lost(row, PAGE_KEYS | set(negatives), f"known keys: {', '.join(sorted(PAGE_KEYS))}, negative_0, ...")
    if "query" not in row:
        raise RowError("no query")
    if "image" not in row:
        raise RowError("no positives")
    query = read_text(row["query"], '"query"')
    pages = [Document((read_image(row["image"], folder, '"image"'),), 1.0)]
    pages += [Document((read_image(row[key], folder, f'"{key}"'),), 0.0) for key in negatives]
    return Parts(read_instruction(row.get("instruction")), (query,) if query else (), tuple(pages))


def mmeb_parts(row: dict[str, Any], folder: Path) -> Parts:
    """{"qry", "qry_image_path", "pos_text", "pos_image_path", "neg_text"?, "neg_image_path"?}, each one or a list.

    The picture stands where `<|image_1|>` is, else before the text; an empty text or path means none.
    """
    refuse_lost(row, MMEB_KEYS, f"known keys: {', '.join(sorted(MMEB_KEYS))}")
    query = _sides(row, "qry", folder)
    if len(query) != 1:
        raise RowError("no query" if not query else f"wrong type: one query is expected, not {len(query)}")
    documents = [Document(content, label) for side, label in (("pos", 1.0), ("neg", 0.0))
                 for content in _sides(row, side, folder)]  # fmt: skip
    return Parts(None, query[0], tuple(documents))


def _sides(row: dict[str, Any], side: str, folder: Path) -> list[Content]:
    """The contents of a side; texts and paths go in pairs."""
    texts = as_list(row.get("qry" if side == "qry" and "qry" in row else f"{side}_text"))
    paths = as_list(row.get(f"{side}_image_path"))
    texts, paths = texts or [""] * len(paths), paths or [""] * len(texts)
    if len(texts) != len(paths):
        raise RowError(f"images do not match: {len(paths)} {side}_image_path for {len(texts)} texts")
    found = (_content(text, path, folder, side) for text, path in zip(texts, paths, strict=True))
    return [content for content in found if content]


def _content(text: Any, path: Any, folder: Path, side: str) -> Content:
    parts = IMAGE_TOKEN.split(read_text(text, f'"{side}_text"'))
    if not path:
        if len(parts) > 1:
            raise RowError(f"<|image_1|> does not match images: {side} names no image")
        return (parts[0],) if parts[0] else ()
    if len(parts) > 2:
        raise RowError(f"<|image_1|> does not match images: {side} has {len(parts) - 1} of them and one image")
    image = read_image(path, folder, f'"{side}_image_path"')
    before, after = parts if len(parts) == 2 else ("", parts[0])
    return (*((before,) if before else ()), image, *((after,) if after else ()))
