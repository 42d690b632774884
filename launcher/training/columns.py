"""Rows of text columns: FlagEmbedding, sentence-transformers, judged pairs, and labelled texts for task=classify."""

from __future__ import annotations

import json
import re
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
)
from launcher.training.jsonl import RowError
from launcher.training.native import labels_of, native_parts, read_content, read_scores
from launcher.training.parts import Document, Parts, Talk
from launcher.training.rows import Content, Turn
from launcher.training.swift import label_text, swift_chat

TARGETS = ("label", "labels", "score", "scores")
NOTES = ("id", "idx", "index", "qid", "query_id", "source", "type", "dataset", "language")  # columns that say no text
INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")  # what pandas calls a table's row numbers
ASKS, ANSWERS = ("anchor", "query", "question"), ("positive",)
NEGATIVE = re.compile(r"(?:hard_)?negative(?:_\d+)?")
FLAG_KEYS = {"query", "pos", "neg", "pos_scores", "neg_scores", "prompt", "query_prompt", "type", "id"}
PAIR_KEYS = {"query", "response", "rejected_response", "document", "label", "score", "instruction", "system", "id"}
TEXT_KEYS = ("text", "query", "sentence", "content")
MEDIA_KEYS = ("image", "images", "video", "videos")


def flagembedding_parts(row: dict[str, Any], folder: Path) -> Parts:
    """{"query", "pos": [...], "neg": [...], "pos_scores"?, "neg_scores"?, "prompt"?}; scores are a teacher's."""
    refuse_lost(row, FLAG_KEYS, f"known keys: {', '.join(sorted(FLAG_KEYS))}")
    documents: list[Document] = []
    for key, label in (("pos", 1.0), ("neg", 0.0)):
        texts = as_documents(row.get(key), f'"{key}"')
        scores: list[Any] = [None] * len(texts)
        if row.get(f"{key}_scores"):
            scores = list(as_list(row[f"{key}_scores"]))
            if len(scores) != len(texts):
                raise RowError(f'scores do not match: "{key}_scores" has {len(scores)} for {len(texts)} documents')
        for text, score in zip(texts, scores, strict=True):
            content = read_content(text, folder, f'"{key}"')
            documents.append(Document(content, label, None if score is None else read_score(score, f'"{key}_scores"')))
    instruction = read_instruction(row.get("prompt", row.get("query_prompt")))
    return Parts(instruction, _query(row, folder), tuple(documents))


def sentence_transformers_parts(row: dict[str, Any], folder: Path) -> Parts:
    """Columns by their order: a query, then documents; label, labels, score or scores is what was judged.

    (query, document, label): one judged document. (query, [documents], [labels or scores]). Without a target
    (query, positive, negative, ...); with a score, or a list, it is the teacher's margin of the positive over each
    negative. {"query", "positive", "negative" or "documents"} are its reranking evaluators' samples.
    """
    if "documents" in row and "positive" in row:
        return _sample(row, folder)
    targets = [key for key in row if key in TARGETS]
    columns = _columns({key: row[key] for key in row if key not in (*TARGETS, *NOTES) and not INDEX.fullmatch(key)})
    if len(columns) < 2 or len(targets) > 1:
        raise RowError(f"unknown format: two or more columns and at most one of {', '.join(TARGETS)} are expected")
    target = row[targets[0]] if targets else None
    query, texts = read_content(row[columns[0]], folder, f'"{columns[0]}"'), [row[key] for key in columns[1:]]
    named = zip(texts, columns[1:], strict=True)
    if len(texts) == 1 and isinstance(texts[0], list):
        listed = [read_content(text, folder, f'"{columns[1]}"') for text in texts[0]]
        kind = "labels" if targets and targets[0].startswith("label") else "scores"
        labels = labels_of({kind: target}, len(listed))
        scores = read_scores(target, len(listed)) if kind == "scores" else [None] * len(listed)
        return Parts(None, query, tuple(map(Document, listed, labels, scores)))
    contents = [read_content(text, folder, f'"{key}"') for text, key in named]
    if len(contents) == 1 and targets:
        return Parts(None, query, (Document(contents[0], read_label(target, f'"{targets[0]}"')),), judged=True)
    labels = [1.0] + [0.0] * (len(contents) - 1)
    scores = _from_margins(target, len(contents)) if targets else [None] * len(contents)
    return Parts(None, query, tuple(map(Document, contents, labels, scores)))


def pair_parts(row: dict[str, Any], folder: Path) -> Parts:
    """Old ms-swift rows and judged pairs: one document a row, or a response with its rejected ones.

    {"query", "response", "rejected_response": [...]}, {"query", "response" or "document", "label" or "score"}, and
    the chat form of Qwen3's reranker, {"system"?, "input", "output": "... yes"}, whose input holds
    <Instruct>, <Query> and <Document>.
    """
    if "output" in row:
        return _judged_text(row)
    refuse_lost(row, PAIR_KEYS, f"known keys: {', '.join(sorted(PAIR_KEYS))}")
    key = "response" if "response" in row else "document"
    if key not in row:
        raise RowError('no document: "response" or "document" is expected')
    instruction = read_instruction(row.get("instruction", row.get("system")))
    query, document = _query(row, folder), read_content(row[key], folder, f'"{key}"')
    if "label" in row or "score" in row:
        label = read_label(row.get("label", row.get("score")))
        return Parts(instruction, query, (Document(document, label),), judged=True)
    if key == "document":
        raise RowError('no label: a "document" is judged by "label" or "score"')
    rejected = [read_content(text, folder, '"rejected_response"') for text in as_list(row.get("rejected_response"))]
    return Parts(instruction, query, (Document(document, 1.0), *(Document(text, 0.0) for text in rejected)))


def labelled_talk(row: dict[str, Any], folder: Path) -> Talk:
    """{"text" (or query, sentence, content) and/or images and videos, or "messages", "label"}: what a class is told of.

    Images come first, then videos, then the text, which is literal.
    """
    if "messages" in row:
        return swift_chat(row, folder)
    known = {*TEXT_KEYS, *MEDIA_KEYS, "system", "label", "id"}
    refuse_lost(row, known, f"known keys: {', '.join(sorted(known))}")
    texts = [row[key] for key in TEXT_KEYS if key in row]
    if len(texts) > 1:
        raise RowError(f"two texts: give one of {', '.join(TEXT_KEYS)}")
    content: list[Any] = [video for key in ("video", "videos") for video in read_videos(row.get(key), folder, key)]
    content += [image for key in ("image", "images") for image in read_images(row.get(key), folder, key)]
    if texts:
        content += read_content(texts[0], folder, "the text")
    if not content:
        raise RowError(f"no text and no image: one of {', '.join((*TEXT_KEYS, *MEDIA_KEYS))} is expected")
    system = (Turn("system", (read_text(row["system"], '"system"'),)),) if row.get("system") else ()
    return Talk((*system, Turn("user", tuple(content))), label_text(row.get("label")))


def _columns(cells: dict[str, Any]) -> list[str]:
    """Columns of texts, the query first; where names say which is the positive, their order does not count.

    An empty cell is a column that the row has not, so that by order alone a negative could become the positive.
    """
    keys = list(cells)
    negatives = [key for key in keys if NEGATIVE.fullmatch(key)]
    if not negatives and "positive" not in keys:
        return keys
    asks, answers = ([key for key in keys if key in names] for names in (ASKS, ANSWERS))
    if not answers:
        raise RowError("no positives")
    if not asks and keys[0] in (*answers, *negatives):
        raise RowError("no query")
    asks = asks or keys[:1]
    others = (key for key in keys if key not in (*asks, *answers, *negatives) and not key.endswith(("_id", "_ids")))
    unknown = [key for key in others if isinstance(cells[key], str | dict | list)]
    if len(asks) > 1 or unknown:
        named = ", ".join(unknown or asks[1:])
        raise RowError(f"unknown key: {named}; beside a query, positive and negatives no other text is expected")
    return [*asks, *answers, *negatives]


def _query(row: dict[str, Any], folder: Path) -> Content:
    if "query" not in row:
        raise RowError("no query")
    return read_content(row["query"], folder, '"query"')


def _sample(row: dict[str, Any], folder: Path) -> Parts:
    """{"query", "positive": [...], "documents": [ranked]}: what is not positive among the documents is negative."""
    positives = as_list(row["positive"])
    texts = [json.dumps(text, sort_keys=True) for text in positives]
    negatives = [text for text in as_list(row["documents"]) if json.dumps(text, sort_keys=True) not in texts]
    kept = {key: value for key, value in row.items() if key not in ("positive", "documents")}
    return native_parts({**kept, "positives": positives, "negatives": negatives}, folder)


def _from_margins(target: Any, count: int) -> list[float]:
    """Scores whose differences are the margins: 0 for the positive, minus the margin for each negative."""
    margins = [read_score(margin, "the score") for margin in as_list(target)]
    if len(margins) != count - 1:
        raise RowError(f"scores do not match: {len(margins)} margins for {count - 1} negatives")
    return [0.0, *(-margin for margin in margins)]


def _judged_text(row: dict[str, Any]) -> Parts:
    asked, answer = read_text(row.get("input"), '"input"'), read_text(row["output"], '"output"')
    words = answer.split()
    said = re.fullmatch(r"\s*<Instruct>:(.*?)<Query>:(.*?)<Document>:(.*)", asked, re.DOTALL)
    if not words or words[-1].lower() not in ("yes", "no"):
        raise RowError('wrong label: "output" must end in yes or no')
    if said is None:
        raise RowError('unknown format: "input" must read <Instruct>: ... <Query>: ... <Document>: ...')
    instruction, query, document = (text.strip() for text in said.groups())
    label = read_label(words[-1])
    return Parts(instruction or None, (query,) if query else (), (Document((document,), label),), judged=True)
