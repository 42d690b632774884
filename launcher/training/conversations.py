"""Chats written as {"from", "value"}: Qwen's fine-tuning rows and ShareGPT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.training.content import read_images, read_text, read_videos, refuse_lost
from launcher.training.jsonl import RowError, describe
from launcher.training.parts import Talk
from launcher.training.swift import label_text, make_turns

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool"), "tool"),
}
MEDIA_KEYS = ("image", "images", "video", "videos")


def conversation_talk(row: dict[str, Any], folder: Path) -> Talk:
    """{"conversations": [{"from", "value", "loss"?}], "system"?, "image(s)"?, "video(s)"?} with <image> and <video>."""
    refuse_lost(row, {"conversations", "system", "label", *MEDIA_KEYS}, f"media are given by {', '.join(MEDIA_KEYS)}")
    messages = [{"role": "system", "content": read_text(row["system"], '"system"')}] if row.get("system") else []
    conversations = row.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        raise RowError('no conversations: a list of {"from", "value"} is expected')
    for said in conversations:
        if not isinstance(said, dict) or "from" not in said or "value" not in said:
            raise RowError(f'wrong type: a message in conversations must have "from" and "value", not {describe(said)}')
        if said["from"] not in SPEAKERS:
            raise RowError(f"unknown speaker: {said['from']} (known: {', '.join(SPEAKERS)})")
        loss = {"loss": said["loss"]} if said.get("loss") is not None else {}
        messages.append({"role": SPEAKERS[said["from"]], "content": said["value"], **loss})
    images = [image for key in ("image", "images") for image in read_images(row.get(key), folder, key)]
    videos = [video for key in ("video", "videos") for video in read_videos(row.get(key), folder, key)]
    return Talk(make_turns(messages, images, videos), label_text(row.get("label")))
