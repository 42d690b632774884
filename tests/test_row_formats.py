"""Each form of row that people have: told by its keys, read the same when it is named, and refused with a reason."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from launcher.spec import DatasetConfig, LossConfig, RunConfig, TaskConfig
from launcher.training.formats import BadRow, read_split
from launcher.training.rows import Chat, Content, Group, Image, Turn, Video

CASES = Path(__file__).parent / "cases" / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pictures and films that rows name."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("a.png", "b.png"):
        Pillow.new("RGB", (8, 8)).save(folder / name)
    (folder / "film.mp4").write_bytes(b"looked up, not opened")
    return folder


def image(folder: Path, name: str = "a.png") -> Image:
    return Image(str(folder / name))


def read(
    folder: Path,
    *rows: dict[str, Any],
    task: str = "rerank",
    loss: str = "pointwise",
    split: str = "train",
    metric: str = "auto",
    **more: Any,
) -> tuple[list[Any], list[BadRow]]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DatasetConfig(name="jsonl", train=str(path), eval=str(path), **more)
    config = RunConfig(dataset=data, task=TaskConfig(name=task), loss=LossConfig(name=loss))
    return read_split(replace(config, eval=replace(config.eval, metric=metric)), split)


def group_of(folder: Path, row: dict[str, Any], name: str) -> Group:
    """The one group of a row, the same whether its form is told or named."""
    found, bad = read(folder, row)
    assert bad == []
    assert read(folder, row, format=name)[0] == found
    assert isinstance(found[0], Group)
    return found[0]


def texts(*documents: str) -> tuple[Content, ...]:
    return tuple((document,) for document in documents)


TEXT_ROWS: list[
    tuple[str, dict[str, Any], str | None, tuple[str, ...], tuple[float, ...], tuple[float, ...] | None]
] = [
    (
        "native",
        {"query": "q", "positives": "a", "negatives": ["b"], "scores": [9, 1.5]},
        None,
        ("a", "b"),
        (1, 0),
        (9, 1.5),
    ),
    ("native", {"query": "q", "documents": ["a", "b"], "labels": [0, 3]}, None, ("b", "a"), (3, 0), None),
    ("native", {"query": "q", "documents": ["a", "b"], "scores": [0.1, 0.9]}, None, ("b", "a"), (1, 0), (0.9, 0.1)),
    ("mteb", {"query": "q", "positive": "a", "negative": ["b", "c"]}, None, ("a", "b", "c"), (1, 0, 0), None),
    (
        "flagembedding",
        {
            "query": "q",
            "pos": ["a"],
            "neg": ["b"],
            "pos_scores": [2.5],
            "neg_scores": [-1],
            "prompt": "Find.",
            "type": "x",
        },
        "Find.",
        ("a", "b"),
        (1, 0),
        (2.5, -1),
    ),
    ("sentence_transformers", {"anchor": "q", "positive": "a", "negative": "b"}, None, ("a", "b"), (1, 0), None),
    (
        "sentence_transformers",
        {"query": "q", "positive": "a", "negative_1": "b", "negative_2": "c"},
        None,
        ("a", "b", "c"),
        (1, 0, 0),
        None,
    ),
    ("sentence_transformers", {"query": "q", "docs": ["a", "b"], "labels": [0, 1]}, None, ("b", "a"), (1, 0), None),
    ("sentence_transformers", {"query": "q", "docs": ["a", "b"], "scores": [7, 8]}, None, ("b", "a"), (1, 0), (8, 7)),
    (
        "sentence_transformers",
        {"anchor": "q", "positive": "a", "negative": "b", "score": 4.5},
        None,
        ("a", "b"),
        (1, 0),
        (0, -4.5),
    ),
    (
        "sentence_transformers",
        {"query": "q", "positive": ["a"], "documents": ["b", "a", "c"]},
        None,
        ("a", "b", "c"),
        (1, 0, 0),
        None,
    ),
    ("pairs", {"query": "q", "response": "a", "rejected_response": ["b"]}, None, ("a", "b"), (1, 0), None),
    ("pairs", {"query": "q", "response": "a", "label": 0.8}, None, ("a",), (0.8,), None),
    ("pairs", {"query": "q", "document": "a", "label": "no", "instruction": "I"}, "I", ("a",), (0,), None),
    (
        "pairs",
        {
            "system": "Judge.",
            "input": "<Instruct>: Find.\n<Query>: q\n<Document>: a\nb",
            "output": "<think>\n\n</think>\n\nyes",
        },
        "Find.",
        ("a\nb",),
        (1,),
        None,
    ),
]


@pytest.mark.parametrize(("name", "row", "instruction", "documents", "labels", "scores"), TEXT_ROWS)
def test_rows_of_text(
    folder: Path, name: str, row: Any, instruction: Any, documents: Any, labels: Any, scores: Any
) -> None:
    group = group_of(folder, row, name)
    assert (group.instruction, group.query, group.documents) == (instruction, ("q",), texts(*documents))
    assert (group.labels, group.scores) == (labels, scores)


def test_pages(folder: Path) -> None:
    data = (folder / "a.png").read_bytes()
    cell = {"bytes": base64.b64encode(data).decode(), "path": "gone.png"}
    notes = {"image_filename": "x", "answer": "y", "page": 3, "source": "pdf"}
    group = group_of(folder, {"query": "q", "image": cell, **notes}, "colpali")
    assert (group.query, group.documents) == (("q",), ((Image(None, data),),))
    row = {"query": "q", "image": "a.png", "negative_10": "b.png", "negative_2": cell}
    group = group_of(folder, row, "visrag")
    assert group.documents == ((image(folder),), (Image(None, data),), (image(folder, "b.png"),)), "by their numbers"


def test_mmeb(folder: Path) -> None:
    row = {
        "qry": "<|image_1|>\nWhat is it?",
        "qry_image_path": "a.png",
        "pos_text": "a dog",
        "pos_image_path": "",
        "neg_text": ["", "<|image_1|> of a cat"],
        "neg_image_path": ["", "b.png"],
    }
    group = group_of(folder, row, "mmeb")
    assert group.query == (image(folder), "\nWhat is it?")
    assert group.documents == (("a dog",), (image(folder, "b.png"), " of a cat"))
    _, bad = read(folder, {**row, "qry_image_path": ""}, {**row, "qry": "<|image_1|><|image_1|>"})
    assert {b.kind for b in bad} == {"<|image_1|> does not match images"}


def test_media_of_ms_swift(folder: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "<video>q"}],
        "videos": ["film.mp4"],
        "positive_messages": [[{"role": "user", "content": "<image><video>"}]],
        "positive_images": ["a.png"],
        "positive_videos": [[["a.png", "b.png"]]],
        "negative_messages": [[{"role": "user", "content": "n"}]],
    }
    group = group_of(folder, row, "swift")
    frames = (str(folder / "a.png"), str(folder / "b.png"))
    assert group.query == (Video(str(folder / "film.mp4")), "q")
    assert group.documents == ((image(folder), Video(None, frames)), ("n",))
    _, bad = read(folder, {**row, "videos": []}, {**row, "videos": ["gone.mp4"]})
    assert [b.reason for b in bad] == [
        "<video> tags do not match videos: messages has 1 tags and 0 videos",
        "video file missing: gone.mp4",
    ]


def test_films_of_native_rows(folder: Path) -> None:
    film, frames = str(folder / "film.mp4"), (str(folder / "a.png"), str(folder / "b.png"))
    row = {
        "query": {"text": "q", "video": "film.mp4", "fps": 2, "max_pixels": 5000},
        "fps": 0.5,
        "max_frames": 8,
        "positives": [{"video": ["a.png", "b.png"]}, {"videos": [{"path": "film.mp4", "start_s": 1, "end_s": 2.5}]}],
    }
    group = group_of(folder, row, "native")
    assert group.query == (Video(film, fps=2.0, max_frames=8, max_pixels=5000), "q")
    assert group.documents[0] == (Video(None, frames, fps=0.5, max_frames=8),)
    assert group.documents[1] == (Video(film, fps=0.5, max_frames=8, start_s=1.0, end_s=2.5),)
    _, bad = read(folder, {**row, "fps": 0}, {"query": {"video": {"path": "film.mp4", "start_s": 3}}, "positives": "p"})
    assert [b.kind for b in bad] == ["wrong type", "wrong segment"]


def test_judged_pairs_of_a_query_become_one_group(folder: Path) -> None:
    rows = [
        {"query": query, "response": document, "label": label}
        for query, document, label in [("q", "a", 0), ("r", "a", 1), ("q", "b", 1), ("q", "a", 0), ("s", "x", 0)]
    ]
    groups, bad = read(folder, *rows)
    found = [(g.query[0], g.documents, g.labels) for g in groups]
    assert found == [
        ("q", texts("b", "a"), (1.0, 0.0)),
        ("r", texts("a"), (1.0,)),
        ("s", texts("x"), (0.0,)),
    ]
    assert (bad, groups[0].repeats) == ([], 1)
    groups, bad = read(folder, *rows, split="eval")
    assert [g.query for g in groups] == [("q",)]
    assert [(b.where[-2:], b.reason) for b in bad] == [(":2", "no negatives"), (":5", "no positives")]


CHATS: list[tuple[str, dict[str, Any]]] = [
    (
        "swift_chat",
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "<image>look"},
                {"role": "assistant", "content": "first", "loss": False},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": "<image> is a tag"},
            ],
            "images": ["a.png"],
        },
    ),
    (
        "qwen_chat",
        {
            "image": "a.png",
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "<image>look"},
                {"from": "gpt", "value": "first", "loss": False},
                {"from": "human", "value": "and?"},
                {"from": "gpt", "value": "<image> is a tag"},
            ],
        },
    ),
    (
        "sharegpt",
        {
            "system": "S",
            "images": ["a.png"],
            "conversations": [
                {"from": "user", "value": "<image>look"},
                {"from": "chatgpt", "value": "first", "loss": False},
                {"from": "user", "value": "and?"},
                {"from": "assistant", "value": "<image> is a tag"},
            ],
        },
    ),
]


@pytest.mark.parametrize(("name", "row"), CHATS)
def test_chats(folder: Path, name: str, row: dict[str, Any]) -> None:
    expected = (
        Turn("system", ("S",)),
        Turn("user", (image(folder), "look")),
        Turn("assistant", ("first",)),
        Turn("user", ("and?",)),
        Turn("assistant", ("<image> is a tag",), train=True),
    )
    for options in ({}, {"format": name}):
        chats, bad = read(folder, row, task="sft", **options)
        assert ([chat.turns for chat in chats], bad) == ([expected], [])


def test_tags_of_chats_must_match_their_media(folder: Path) -> None:
    """I16. The same rows as rerankers are in test_formats; here each has an answer."""
    for name in ("rgb.png", "rgba.png"):
        Pillow.new("RGB", (8, 8)).save(folder / name)
    rows = [json.loads(line) for line in (CASES / "placeholder_counts.jsonl").read_text().splitlines()]
    for row in rows:
        row["messages"] += [{"role": "assistant", "content": "."}] if len(row["messages"]) == 1 else []
    chats, bad = read(folder, *rows, task="sft")
    assert {chat.id for chat in chats} == {"ok", "html_text", "special_token_text", "special_token_text_with_image"}
    assert {b.id: b.kind for b in bad} == dict.fromkeys(
        ("two_images_one_tag", "one_image_two_tags", "tag_no_image", "tag_in_answer"),
        "<image> tags do not match images",
    )


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"imgs": ["a.png"]}, "imgs"),
        ({"objects": {"ref": [], "bbox": [[1, 2, 3, 4]]}}, "objects"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"picture": "a.png"}, "picture"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [1]}]},
            "tool_calls",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "because"}]}, "reasoning_content"),
    ],
)
def test_a_chat_loses_nothing_that_it_brings(folder: Path, more: dict[str, Any], key: str) -> None:
    """I19: what would be dropped in silence is refused by its name."""
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], **more}
    chats, bad = read(folder, row, task="sft")
    assert chats == [] and bad[0].reason.startswith(f"unknown key: {key}")
    assert len(read(folder, {**row, "messages": [{"role": "assistant", "content": "a"}], key: []}, task="sft")[0]) == 1


def test_labelled_rows(folder: Path) -> None:
    messages = [{"role": "user", "content": "<image>x"}]
    rows: list[dict[str, Any]] = [
        {"text": "<image> t", "label": "good"},
        {"text": "t", "image": "a.png", "label": 3},
        {"images": ["a.png", "b.png"], "label": 2.0},
        {"messages": messages, "images": "a.png", "label": "bad"},
        {"query": {"text": "q", "image": "b.png"}, "label": False, "system": "S"},
        {"text": "t"},
        {"text": "t", "label": [1]},
        {"text": "t", "query": "q", "label": 1},
    ]
    chats, bad = read(folder, *rows, task="classify")
    a, b = image(folder), image(folder, "b.png")
    assert [(chat.turns[-1].content, chat.label) for chat in chats] == [
        (("<image> t",), "good"),
        ((a, "t"), "3"),
        ((a, b), "2"),
        ((a, "x"), "bad"),
        ((b, "q"), "false"),
    ]
    assert chats[-1].turns[0] == Turn("system", ("S",))
    assert [row.kind for row in bad] == ["unknown format", "wrong label", "two texts"]


def test_a_row_for_another_task_names_it(folder: Path) -> None:
    chat, group = CHATS[0][1], {"query": "q", "positives": "p"}
    assert "task=sft trains on chats" in read(folder, chat)[1][0].reason
    assert "task=rerank trains on these" in read(folder, group, task="classify")[1][0].reason
    assert isinstance(read(folder, group, task="sft")[0][0], Group), "a reranker's yes and no may be learned as chats"
    silent = {"messages": [{"role": "user", "content": "x"}]}
    assert read(folder, silent, task="sft")[1][0].kind == "no answer"
    assert isinstance(read(folder, chat, task="sft")[0][0], Chat)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "q", "pos": ["a"], "neg": ["b"], "pos_scores": [1, 2]}, 'scores do not match: "pos_scores" has 2'),
        ({"query": "q", "pos": ["a", "b"], "pos_scores": [1, "x"]}, "wrong score"),
        ({"query": "q", "pos": ["a"], "neg": ["b"], "pos_scores": [1]}, "scores do not match: 1 scores for 2"),
        ({"query": "q", "positives": ["a"], "scores": [1, 2]}, "scores do not match"),
        ({"query": "q", "response": "a", "label": -1}, "wrong label"),
        ({"input": "<Query>: q", "output": "yes"}, 'unknown format: "input" must read'),
        ({"input": "<Instruct>: i <Query>: q <Document>: d", "output": "maybe"}, 'wrong label: "output" must end'),
        ({"anchor": "q", "positive": "a", "negative": "b", "score": [1, 2]}, "scores do not match: 2 margins"),
        ({"query": "q", "image": "gone.png"}, "image file missing"),
        ({"query": "q", "image": "a.png", "images": ["b.png"]}, "unknown key: images"),
        ({"qry": "", "qry_image_path": "", "pos_text": "p"}, "no query"),
        ({"query": "q", "image": {"bytes": "not base64!"}}, "bad bytes"),
        ({"query": "q", "positives": [{"image": {"bytes": 5}}]}, "wrong type: the bytes of"),
    ],
)
def test_rows_that_say_something_else_than_they_seem_are_refused(folder: Path, row: Any, reason: str) -> None:
    found, bad = read(folder, row)
    assert found == []
    assert bad[0].reason.startswith(reason)


def test_columns_are_told_by_name_where_they_have_names_that_say_it(folder: Path) -> None:
    """Not by their order: an empty cell, a row number or an id would move a negative to where the positive stands."""
    notes = {"qid": "7", "positive_id": "d1", "similarity": 0.3, "__index_level_0__": 17}
    group = group_of(folder, {**notes, "anchor": "q", "negative": "n", "positive": "p"}, "sentence_transformers")
    assert (group.query, group.documents, group.labels) == (("q",), texts("p", "n"), (1, 0))
    row = {"anchor": None, "positive": "p", "negative": "n"}
    assert read(folder, row, format="sentence_transformers")[1][0].reason == "no query"


def test_questions_with_answers_in_columns_are_chats(folder: Path) -> None:
    """For task=sft: as a reranker's row, each answer would be learned as `yes`."""
    rows: list[dict[str, Any]] = [
        {"system": "S", "query": "<image>q", "response": "a", "history": [["h", "i"]], "image": "a.png"},
        {"instruction": "Do", "input": "this", "output": "done"},
    ]
    chats, bad = read(folder, *rows, task="sft")
    assert bad == []
    assert [[(turn.role, turn.content, turn.train) for turn in chat.turns] for chat in chats] == [
        [
            ("system", ("S",), False),
            *(("user", ("h",), False), ("assistant", ("i",), True)),
            *(("user", (image(folder), "q"), False), ("assistant", ("a",), True)),
        ],
        [("user", ("Do\nthis",), False), ("assistant", ("done",), True)],
    ]
    judged = {"query": "q", "response": "a", "rejected_response": ["b"]}
    assert isinstance(read(folder, judged, task="sft")[0][0], Group)
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "loss": None}]
    assert read(folder, {"messages": said}, task="sft")[0][0].turns[1].train, "null is how a table lacks a key"
    assert read(folder, {"messages": said, "rejected_response": "z"}, task="sft")[1][0].kind == "unknown key"


def test_pictures_in_base64(folder: Path) -> None:
    data = (folder / "a.png").read_bytes()
    text = base64.b64encode(data).decode()
    group = read(folder, {"query": "q", "positives": {"image": text}, "negatives": "n"})[0][0]
    assert group.documents[0] == (Image(None, data=data),)


def test_distillation_needs_scores(folder: Path) -> None:
    rows = [{"query": "q", "pos": ["a"], "neg": ["b"]}, {"query": "q", "pos": ["a"], "pos_scores": [1]}]
    groups, bad = read(folder, *rows, loss="distill")
    assert ([g.id for g in groups], [b.kind for b in bad]) == (["2"], ["no scores"])
    # Held-out rows need them too when their loss picks the best.
    for metric, kept in (("auto", 1), ("loss", 0)):
        assert len(read(folder, rows[0], loss="distill", split="eval", metric=metric)[0]) == kept
