"""ms-swift's rows: the reranker's (messages, positive_messages, negative_messages and their media), and chats.

`<image>` and `<video>` tags in messages of the system, a user or a tool mark where media go; an answer's text is
literal. Source: the custom data set page of ms-swift 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.training.content import as_list, place, read_images, read_text, read_videos, refuse_lost
from launcher.training.jsonl import RowError, describe
from launcher.training.parts import Document, Parts, Talk
from launcher.training.rows import Content, Image, Turn, Video

SIDES = ("positive", "negative")
MEDIA_KEYS = {"images", "image", "videos", "video"}
ROW_KEYS = MEDIA_KEYS | {"messages"} | {f"{side}_{name}" for side in SIDES for name in ("messages", "images", "videos")}
ROLES = ("system", "user", "assistant", "tool")
CHAT_KEYS = ("query", "response", "instruction", "input", "output", "system", "history")
UNTOLD = ("tool_calls", "function_call", "reasoning_content")  # of a message; an answer without them would be another


def swift_parts(row: dict[str, Any], folder: Path) -> Parts:
    """Read one ms-swift reranker row; raises RowError.

    The system message nearest to a document wins; all documents of a row must end up with the same one,
    since a group has one instruction.
    """
    refuse_lost(row, ROW_KEYS, f"media are given by {', '.join(sorted(ROW_KEYS - {'messages'}))}")
    system, query = _turn(row.get("messages"), *_media(row, folder), "messages")
    found = [(own, content, label) for label, side in ((1.0, "positive"), (0.0, "negative"))
             for own, content in _documents(row, side, folder)]  # fmt: skip
    systems = {own if own is not None else system for own, _, _ in found} or {system}
    if len(systems) > 1:
        raise RowError("different system messages: a row's documents must share one instruction")
    return Parts(systems.pop() or None, query, tuple(Document(content, label) for _, content, label in found))


def swift_chat(row: dict[str, Any], folder: Path) -> Talk:
    """Read one ms-swift chat; the loss is on what the assistant says, unless a message says `"loss": false`.

    Its older form, {"query", "response", "system"?, "history"?}, and Alpaca's {"instruction", "input"?, "output",
    "system"?, "history"?} are read too.
    """
    said = _messages_of(row)
    known = MEDIA_KEYS | {"label", *(("messages",) if said is None else CHAT_KEYS)}
    refuse_lost(row, known, f"media are given by {', '.join(sorted(MEDIA_KEYS))}")
    messages = _checked(row.get("messages") if said is None else said, "messages")
    return Talk(make_turns(messages, *_media(row, folder)), label_text(row.get("label")))


def _messages_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of a row that has a question and an answer in columns of their own; None for another row."""
    if "messages" in row or not ({"query", "response"} <= row.keys() or {"instruction", "output"} <= row.keys()):
        return None
    history = as_list(row.get("history"))
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError('wrong type: "history" must be a list of [question, answer]')
    if "response" in row:
        asked, answer = row["query"], row["response"]
    else:  # the task, then what it is done on
        texts = [read_text(row.get(key) or "", f'"{key}"') for key in ("instruction", "input")]
        asked, answer = "\n".join(text for text in texts if text), row["output"]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    pairs = [*history, [asked, answer]]
    roles = ("user", "assistant")
    return system + [{"role": r, "content": text} for pair in pairs for r, text in zip(roles, pair, strict=True)]


def make_turns(messages: list[dict[str, Any]], images: list[Image], videos: list[Video]) -> tuple[Turn, ...]:
    """Messages {"role", "content", "loss"?} as turns, the media dealt out over their tags; raises RowError."""
    texts = []
    for message in messages:
        if message["role"] not in ROLES:
            raise RowError(f"unknown role: {message['role']} (known: {', '.join(ROLES)})")
        if lost := [key for key in UNTOLD if message.get(key)]:
            raise RowError(f'unknown key: {lost[0]} in a message; write it into "content" as the model says it')
        texts.append(read_text(message.get("content"), '"content" in messages'))
    asked = [text for text, message in zip(texts, messages, strict=True) if message["role"] != "assistant"]
    for tag, media, kind in (("<image>", images, "images"), ("<video>", videos, "videos")):
        tags = sum(text.count(tag) for text in asked)
        if tags != len(media):
            raise RowError(f"{tag} tags do not match {kind}: messages have {tags} tags and the row {len(media)} {kind}")
    left: dict[str, list[Any]] = {"<image>": list(images), "<video>": list(videos)}
    turns = []
    for text, message in zip(texts, messages, strict=True):
        if message["role"] == "assistant":
            content: Content = (text,) if text else ()
        else:
            own = {tag: [left[tag].pop(0) for _ in range(text.count(tag))] for tag in left}
            content = place(text, own["<image>"], own["<video>"], "messages")
        loss = True if message.get("loss") is None else message["loss"]  # tables have null where a key is missing
        if loss not in (True, False):
            raise RowError(f'wrong type: "loss" of a message must be true or false, not {describe(loss)}')
        turns.append(Turn(message["role"], content, train=message["role"] == "assistant" and bool(loss)))
    return tuple(turns)


def label_text(value: Any) -> str | None:
    """A class as text: its name, or its number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (not isinstance(value, str | int) or value == ""):
        raise RowError(f"wrong label: a class is a text or a whole number, not {describe(value)}")
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _media(row: dict[str, Any], folder: Path) -> tuple[list[Image], list[Video]]:
    images = [image for key in ("images", "image") for image in read_images(row.get(key), folder, key)]
    videos = [video for key in ("videos", "video") for video in read_videos(row.get(key), folder, key)]
    return images, videos


def _documents(row: dict[str, Any], side: str, folder: Path) -> list[tuple[str | None, Content]]:
    name = f"{side}_messages"
    turns = as_list(row.get(name))
    if turns and isinstance(turns[0], dict):
        raise RowError(f"wrong type: {name} must be a list of message lists: [[{{...}}], [{{...}}]]")
    media = {}
    for kind in ("images", "videos"):
        media[kind] = as_list(row.get(f"{side}_{kind}")) or [[]] * len(turns)
        if len(media[kind]) != len(turns):
            given = f"{side}_{kind} lists {kind} for {len(media[kind])} documents and {name} has {len(turns)}"
            raise RowError(f"{kind} do not match: {given}")
    result = []
    for messages, images, videos in zip(turns, media["images"], media["videos"], strict=True):
        found = read_images(images, folder, f"{side}_images"), read_videos(videos, folder, f"{side}_videos")
        result.append(_turn(messages, *found, name))
    return result


def _checked(messages: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RowError(f"no {name}" if not messages else f"wrong type: {name} must be lists of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f'wrong type: a message in {name} must have "role" and "content", not {describe(message)}')
    return messages


def _turn(messages: Any, images: list[Image], videos: list[Video], name: str) -> tuple[str | None, Content]:
    """The system message, if any, and the one other message with its media in place."""
    system: str | None = None
    turns: list[str] = []
    for message in _checked(messages, name):
        text = read_text(message.get("content"), f'"content" in {name}')
        if message["role"] == "system":
            system = text
        else:
            turns.append(text)
    if len(turns) != 1:
        raise RowError(f"wrong messages: {name} must hold one message beside the system's, not {len(turns)}")
    return system, place(turns[0], images, videos, name)
