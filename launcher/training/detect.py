"""Which format a row has, told by its keys, and the parser of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.training.columns import flagembedding_parts, labelled_talk, pair_parts, sentence_transformers_parts
from launcher.training.conversations import conversation_talk
from launcher.training.jsonl import RowError
from launcher.training.native import DOCUMENT_KEYS, native_parts
from launcher.training.pages import mmeb_parts, page_parts
from launcher.training.parts import Parts, Talk
from launcher.training.swift import swift_chat, swift_parts

PARSERS: dict[str, Callable[[dict[str, Any], Path], Parts | Talk]] = {
    "native": native_parts,
    "swift": swift_parts,
    "flagembedding": flagembedding_parts,
    "sentence_transformers": sentence_transformers_parts,
    "mteb": native_parts,
    "beir": native_parts,  # the folder's reader has joined its three tables
    "colpali": page_parts,
    "visrag": page_parts,
    "mmeb": mmeb_parts,
    "pairs": pair_parts,
    "swift_chat": swift_chat,
    "qwen_chat": conversation_talk,
    "sharegpt": conversation_talk,
    "labelled": labelled_talk,
}
EXAMPLES = {
    "rerank": '{"query": "...", "positives": ["..."], "negatives": ["..."]}',
    "sft": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "classify": '{"text": "...", "label": "..."}',
}
NUMBERED = re.compile(r"negative_\d+")


def parser_of(name: str) -> Callable[[dict[str, Any], Path], Parts | Talk]:
    """The parser of a format that `detect` or the user names."""
    return PARSERS[name]


def detect(row: dict[str, Any], task: str) -> str:
    """The name of a row's format; raises RowError with an example of a right row and this one's keys."""
    keys = row.keys()
    if "conversations" in keys:
        return "qwen_chat"
    if keys & {"positive_messages", "negative_messages"}:
        return "swift"
    if task == "classify" and "label" in keys and "response" not in keys and "document" not in keys:
        return "labelled"
    if "messages" in keys or (task == "sft" and _is_answered(row)):
        return "swift_chat"
    return _of_a_reranker(row) or _unknown(row, task)


def _is_answered(row: dict[str, Any]) -> bool:
    """Whether a row without messages is a question with its answer: of these forms, one with no mark of a judgement."""
    keys = row.keys()
    if {"query", "response"} <= keys:
        return not keys & {"rejected_response", "label", "score", "document"}
    return {"instruction", "output"} <= keys and "<Document>:" not in str(row.get("input"))


def _of_a_reranker(row: dict[str, Any]) -> str | None:
    keys, numbered = row.keys(), any(NUMBERED.fullmatch(key) for key in row)
    asks = "query" in keys
    signs = (
        ("mmeb", keys & {"qry", "qry_text", "qry_image_path"}),
        ("pairs", {"input", "output"} <= keys),
        ("sentence_transformers", "anchor" in keys or {"sentence1", "sentence2"} <= keys),
        ("native", not asks and keys & {"positives", "negatives"}),  # which says that it lacks a query
        ("flagembedding", asks and "pos" in keys),
        ("pairs", asks and keys & {"response", "document"}),
        ("colpali", asks and "image" in keys and not keys & DOCUMENT_KEYS),
        ("sentence_transformers", asks and (numbered or {"positive", "documents"} <= keys or _has_scored_list(row))),
        ("native", asks and keys & {*DOCUMENT_KEYS, "documents"}),
    )
    return next((name for name, found in signs if found), None)


def _has_scored_list(row: dict[str, Any]) -> bool:
    """(query, [docs], [labels]) under a name of its own for the documents."""
    others = [key for key in row if key not in ("id", "query", "instruction", "labels", "scores")]
    return len(others) == 1 and others[0] in ("docs", "passages", "texts") and bool(row.keys() & {"labels", "scores"})


def _unknown(row: dict[str, Any], task: str) -> str:
    keys = ", ".join(sorted(row)) or "none"
    raise RowError(
        f"unknown format: its keys are {keys}; a row looks like {EXAMPLES.get(task, EXAMPLES['rerank'])}, "
        "or dataset.format names its form, or dataset.columns its keys"
    )
