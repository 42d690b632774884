"""ms-swift's reranker row: messages, positive_messages, negative_messages and their images.

Source: the custom data set page of ms-swift 4 (reranker section).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.training.content import EMPTY, as_list, read_image, read_text, refuse_lost
from launcher.training.formats import Content, Image, Parts
from launcher.training.jsonl import RowError, describe

TAG = "<image>"
IMAGE_KEYS = {"images", "image", "positive_images", "negative_images"}
ROW_KEYS = IMAGE_KEYS | {"messages", "positive_messages", "negative_messages"}


def swift_parts(row: dict[str, Any], folder: Path) -> Parts:
    """Read one ms-swift reranker row; raises RowError.

    The system message nearest to a document wins; all documents of a row must end up with the same one,
    since a group has one instruction.
    """
    refuse_lost(row, ROW_KEYS, f"media are given by {', '.join(sorted(IMAGE_KEYS))}")
    system, query = _turn(row.get("messages"), _images(row, folder), "messages")
    positives = _documents(row, "positive", folder)
    negatives = _documents(row, "negative", folder)
    systems = {own if own is not None else system for own, _ in positives + negatives} or {system}
    if len(systems) > 1:
        raise RowError("different system messages: a row's documents must share one instruction")
    return Parts(systems.pop() or None, query, [doc for _, doc in positives], [doc for _, doc in negatives])


def _documents(row: dict[str, Any], side: str, folder: Path) -> list[tuple[str | None, Content]]:
    name = f"{side}_messages"
    turns = as_list(row.get(name))
    if turns and isinstance(turns[0], dict):
        raise RowError(f"wrong type: {name} must be a list of message lists: [[{{...}}], [{{...}}]]")
    images = as_list(row.get(f"{side}_images")) or [[]] * len(turns)
    if len(images) != len(turns):
        raise RowError(
            f"images do not match: {side}_images lists images for {len(images)} documents and {name} has {len(turns)}"
        )
    result = []
    for messages, paths in zip(turns, images, strict=True):
        found = [read_image(item, folder, f"{side}_images") for item in as_list(paths)]
        result.append(_turn(messages, found, name))
    return result


def _images(row: dict[str, Any], folder: Path) -> list[Image]:
    paths = as_list(row.get("images")) + as_list(row.get("image"))
    return [read_image(item, folder, "images") for item in paths]


def _turn(messages: Any, images: list[Image], name: str) -> tuple[str | None, Content]:
    """The system message, if any, and the one other message with its images in place."""
    if not isinstance(messages, list) or not messages:
        raise RowError(f"no {name}" if not messages else f"wrong type: {name} must be lists of messages")
    system: str | None = None
    turns: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f'wrong type: a message in {name} must have "role" and "content", not {describe(message)}')
        text = read_text(message.get("content"), f'"content" in {name}')
        if message["role"] == "system":
            system = text
        else:
            turns.append(text)
    if len(turns) != 1:
        raise RowError(f"wrong messages: {name} must hold one message beside the system's, not {len(turns)}")
    return system, tuple(_place(turns[0], images, name)) or EMPTY


def _place(text: str, images: list[Image], name: str) -> Iterator[str | Image]:
    texts = text.split(TAG)
    if len(texts) - 1 != len(images):
        raise RowError(f"{TAG} tags do not match images: {name} has {len(texts) - 1} tags and {len(images)} images")
    yield from (part for part in (texts[0],) if part)
    for image, part in zip(images, texts[1:], strict=True):
        yield image
        if part:
            yield part
