"""Rows of both formats: what is read, and what is refused with file, line, id and reason."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from launcher.errors import ConfigError
from launcher.planning.checks import FORMATS
from launcher.spec import DatasetConfig, LossConfig, RunConfig
from launcher.training.detect import PARSERS
from launcher.training.formats import BadRow, read_split
from launcher.training.rows import Group, Image
from tests.groups import read_groups

CASES = Path(__file__).parent / "cases" / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the pictures that the rows name."""
    Pillow.new("RGB", (64, 48), (200, 30, 30)).save(tmp_path / "rgb.png")
    Pillow.new("RGBA", (64, 48)).save(tmp_path / "rgba.png")
    return tmp_path


def read(path: Path, **options: Any) -> tuple[list[Group], list[BadRow]]:
    need_negatives = options.pop("need_negatives", False)
    dataset = DatasetConfig(name="jsonl", train=str(path), **options)
    return read_groups(dataset, "train", seed=1, need_negatives=need_negatives)


def read_rows(folder: Path, *rows: dict[str, Any], **options: Any) -> tuple[list[Group], list[BadRow]]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return read(path, **options)


def case_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text().splitlines()]


def test_native_row(folder: Path) -> None:
    row = {
        "id": 7,
        "instruction": "Find it.",
        "query": {"text": ["a", "b"], "image": "rgb.png", "min_pixels": 1024},
        "positives": [{"images": ["rgb.png", "rgba.png"]}],
        "negatives": ["<image> <|image_pad|>", {"text": ""}, {"text": "x", "images": [{"path": "rgb.png"}]}],
        "source": "kept out, it is neither a score nor a picture",
    }
    groups, bad = read_rows(folder, row)
    rgb, rgba = str(folder / "rgb.png"), str(folder / "rgba.png")
    assert bad == []
    assert groups == [
        Group(
            id="7",
            where=f"{folder}/rows.jsonl:1",
            instruction="Find it.",
            query=(Image(rgb, min_pixels=1024), "a", "b"),
            documents=((Image(rgb), Image(rgba)), ("<image> <|image_pad|>",), (), (Image(rgb), "x")),
            labels=(1.0, 0.0, 0.0, 0.0),
        )
    ]


def test_published_object_with_labels(folder: Path) -> None:
    row = {"query": {"text": "q"}, "documents": [{"text": "n"}, {"text": "p"}, "m"], "labels": [0, True, 0.0]}
    groups, bad = read_rows(folder, row)
    assert (groups[0].documents, groups[0].labels) == ((("p",), ("n",), ("m",)), (1.0, 0.0, 0.0))
    assert bad == []


@pytest.mark.parametrize("label", [-1, None, "maybe", [1], ""])
def test_labels_that_are_no_relevance_are_refused(folder: Path, label: Any) -> None:
    """R17."""
    _, bad = read_rows(folder, {"query": "q", "documents": ["p", "n"], "labels": [1, label]})
    assert [row.kind for row in bad] == ["wrong label"]


@pytest.mark.parametrize(
    ("label", "value"), [(0.7, 0.7), ("no", 0.0), (False, 0.0), ("Yes", 1.0), ("2", 2.0), (3, 3.0)]
)
def test_labels_are_truth_values_words_and_grades(folder: Path, label: Any, value: float) -> None:
    groups, bad = read_rows(folder, {"query": "q", "documents": ["a", "b"], "labels": [1, label]})
    assert (groups[0].labels, bad) == ((1.0, value), [])


def test_swift_row(folder: Path) -> None:
    row = {
        "messages": [
            {"role": "system", "content": "Find it."},
            {"role": "user", "content": "look<image>here<image>"},
        ],
        "images": ["rgb.png", "rgba.png"],
        "positive_messages": [[{"role": "assistant", "content": "<image>"}]],
        "positive_images": [["rgb.png"]],
        "negative_messages": [[{"role": "user", "content": "no picture"}], [{"role": "user", "content": "<image>b"}]],
        "negative_images": [[], ["rgba.png"]],
    }
    rgb, rgba = Image(str(folder / "rgb.png")), Image(str(folder / "rgba.png"))
    groups, bad = read_rows(folder, row)
    assert bad == []
    assert groups[0].instruction == "Find it."
    assert groups[0].query == ("look", rgb, "here", rgba)
    assert groups[0].documents == ((rgb,), ("no picture",), (rgba, "b"))
    assert groups[0].labels == (1.0, 0.0, 0.0)


def test_swift_system_nearest_to_the_document_wins(folder: Path) -> None:
    def row(*systems: str | None) -> dict[str, Any]:
        documents = [
            [*([{"role": "system", "content": s}] if s else []), {"role": "assistant", "content": f"d{i}"}]
            for i, s in enumerate(systems)
        ]
        messages = [{"role": "system", "content": "outer"}, {"role": "user", "content": "q"}]
        return {"messages": messages, "positive_messages": documents[:1], "negative_messages": documents[1:]}

    groups, bad = read_rows(folder, row("inner", "inner"), row(None, None), row("inner", None))
    assert [group.instruction for group in groups] == ["inner", "outer"]
    assert [(r.where[-2:], r.kind) for r in bad] == [(":3", "different system messages")]


def test_swift_tags_must_match_images(folder: Path) -> None:
    """I16."""
    rows = [
        {**row, "positive_messages": [[{"role": "assistant", "content": "p"}]]}
        for row in case_rows("placeholder_counts.jsonl")
    ]
    groups, bad = read_rows(folder, *rows)
    assert [group.id for group in groups] == ["ok", "special_token_text", "special_token_text_with_image"]
    assert groups[1].query == ("the marker <|image_pad|> and <|vision_start|> in a manual",)
    kinds = {row.id: row.kind for row in bad}
    for name in ("two_images_one_tag", "one_image_two_tags", "tag_no_image"):
        assert kinds.pop(name) == "<image> tags do not match images"
    assert kinds == {"html_text": "wrong messages", "tag_in_answer": "wrong messages"}  # a query is one message


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("latin1", 1, "not UTF-8: byte 0xe9 at position 15"),
        ("utf16", 1, "UTF-16: "),
        ("lone_surrogate", 1, "half a surrogate pair: "),
        ("comment_line", 1, "not JSON: Expecting value at column 1; JSON has no comments"),
        ("duplicate_key", 1, 'duplicate key: "query"'),
        ("nan_score", 1, "not a number: NaN"),
    ],
)
def test_a_line_that_is_not_strict_json_is_named(name: str, line: int, reason: str) -> None:
    """K06."""
    path = CASES / f"{name}.jsonl"
    groups, bad = read(path)
    assert groups == []
    assert (bad[0].where, bad[0].id) == (f"{path}:{line}", str(line))
    assert bad[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (gzip.compress(b"{}"), "compressed: the file is gzip"),
        (b"PK\x03\x04\x14\x00", "compressed: the file is a zip"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "not downloaded: the file is a pointer of Git LFS",
        ),
        (b" <!DOCTYPE html>\n<html>\n", "an HTML page"),
        (b"<html><body>404</body></html>", "an HTML page"),
        ('{"query": "a"}'.encode("utf-16-le"), "UTF-16"),
        (b'{"query": "\xc4\xe3"}', "not UTF-8: byte 0xc4"),
    ],
)
def test_a_file_of_another_kind_is_named(folder: Path, data: bytes, reason: str) -> None:
    """K06."""
    for name in ("rows.jsonl", "rows.json", "rows.csv"):
        (folder / name).write_bytes(data)
        groups, bad = read(folder / name)
        assert groups == [] and bad[0].where.startswith(f"{folder / name}:")
        assert bad[0].reason.startswith(reason)


def test_lines_cut_short_and_lines_after_them(folder: Path) -> None:
    """K06."""
    good = b'{"query": "q", "positives": "p"}\n'
    path = folder / "rows.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + good + b"\n[1]\n" + b'{"query": ' + b"[" * 100_000 + b"\n" + good + b'{"query": "a'
    )
    groups, bad = read(path)
    assert [group.where[-2:] for group in groups] == [":1", ":5"]
    assert [(row.where[-2:], row.kind) for row in bad] == [
        (":3", "not an object"),
        (":4", "not JSON"),
        (":6", "not JSON"),
    ]
    assert bad[-1].reason == "not JSON: Unterminated string starting at column 11"


def test_text_stays_as_written() -> None:
    """K03, K04."""
    groups, bad = read(CASES / "dates_only.jsonl")
    assert [group.query for group in groups] == [("2024-01-02 10:00:00",), ("2024-01-03 11:00:00",)]
    assert bad == []
    _, bad = read(CASES / "big_ids.jsonl")  # rows of no known format, told apart by ids above 2**63
    assert [row.id for row in bad] == ["12345678901234567890123", "12345678901234567890124"]
    assert all(row.kind == "unknown format" and '"positives"' in row.reason for row in bad)


def test_a_whole_number_is_its_digits_and_another_is_no_text(folder: Path) -> None:
    """K05."""
    rows = [{"query": query, "positives": "p"} for query in ("what is pi", 314159, 3.1, True)]
    groups, bad = read_rows(folder, *rows)
    assert [group.query for group in groups] == [("what is pi",), ("314159",)]
    assert bad[0] == BadRow(
        f"{folder}/rows.jsonl:3", "3", 'wrong type: "query" must be text or an object, not the number 3.1'
    )
    assert len(bad) == 2


def test_one_or_many_or_none() -> None:
    """K01."""
    groups, bad = read(CASES / "neg_str_or_list.jsonl")
    assert [group.documents for group in groups] == [(("p",), ("n",)), (("p",), ("n1",), ("n2",))]
    assert bad == []
    groups, _ = read(CASES / "seven_rows.jsonl", max_rows=5)
    assert [group.id for group in groups] == list("01234")


def test_images_of_a_query_as_text_list_or_null(folder: Path) -> None:
    """K01."""
    rows = [
        {"query": {"text": row["query"], "images": row.get("images")}, "positives": "p"}
        for row in case_rows("images_str_or_list.jsonl")
    ]
    groups, bad = read_rows(folder, *rows)
    assert [len(group.query) - 1 for group in groups] == [1, 2, 0, 0, 0]
    assert bad == []


def test_missing_images_are_named_before_anything_runs(folder: Path) -> None:
    """I11."""
    rows = [
        {"id": row["query"], "query": {"images": row["images"]}, "positives": "p"}
        for row in case_rows("missing_images.jsonl")
    ]
    groups, bad = read_rows(folder, *rows)
    reasons = {row.id: row.reason for row in bad}
    assert {group.id for group in groups} - {"d"} == {"a", "c"}  # d, RGB.PNG, is up to the file system
    assert reasons["b"] == "image file missing: does_not_exist.png"
    assert reasons["e"].startswith("image is an address: https://images.example/x.png")
    assert reasons["f"] == "image file missing: 'rgb.png '"
    assert reasons["g"] == "image file missing: the path is empty"


def test_images_in_the_working_folder_and_in_the_row(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    data = (folder / "rgb.png").read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    rows = [{"query": {"image": value}, "positives": "p"} for value in ("rgb.png", uri, "data:image/png,abc")]
    groups, bad = read_rows(tmp_path_factory.mktemp("elsewhere"), *rows)
    assert [group.query for group in groups] == [(Image("rgb.png"),), (Image(None, data),)]
    assert [row.kind for row in bad] == ["bad data URI"]


def test_reranker_rows(folder: Path) -> None:
    """R10, R15, R17."""
    path = folder / "pairs.jsonl"
    path.write_bytes((CASES / "reranker_pairs.jsonl").read_bytes())
    groups, bad = read(path, need_negatives=True)
    by_id = {group.id: group for group in groups}
    kinds = {row.id: row.kind for row in bad}
    assert kinds == {
        "no_positive": "no positives",
        "positive_missing": "no positives",
        "no_negative": "no negatives",
        "same_doc_both_sides": "document both positive and negative",
        "label_minus1": "wrong label",
    }
    # Rows of one judged document each are one group: a soft label, and words for a label.
    assert (by_id["label_float"].documents, by_id["label_float"].labels) == (
        (("a red square",), ("a cat",)),
        (0.7, 0.0),
    )
    assert by_id["label_float"].repeats == 1 and not {"label_bool", "label_text"} & by_id.keys()
    assert by_id["empty_query"].query == by_id["empty_doc"].documents[0] == ()
    assert by_id["space_doc"].documents[0] == ("   \n",)
    assert (len(by_id["duplicate_negatives"].documents), by_id["duplicate_negatives"].repeats) == (2, 2)
    assert by_id["three_positives"].labels == (1.0, 1.0, 1.0, 0.0)
    assert by_id["image_query"].query == (Image(str(folder / "rgb.png")), "same colour")
    assert "no_negative" in {group.id for group in read(path)[0]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "q", "positives": "p", "images": ["rgb.png"]}, "unknown key: images"),
        ({"query": "q", "positives": "p", "pos_scores": [1.0]}, "unknown key: pos_scores"),
        ({"query": {"txt": "q"}, "positives": "p"}, "unknown key: txt"),
        ({"query": {"text": 1.5}, "positives": "p"}, 'wrong type: a text in "query"'),
        ({"query": "q", "positives": [None]}, 'wrong type: "positives"'),
        ({"query": None, "positives": "p"}, "no query"),
        ({"query": {"image": 3}, "positives": "p"}, 'wrong type: an image in "query"'),
        ({"query": {"image": "rgb.png", "max_pixels": "9"}, "positives": "p"}, "wrong type: max_pixels"),
        ({"query": "q", "positives": "p", "positive": "p"}, 'both "positive" and "positives"'),
        ({"messages": "q", "positive_messages": []}, "wrong type: messages"),
        ({"messages": [{"role": "user", "content": ["q"]}]}, 'wrong type: "content" in messages'),
        ({"positive_messages": [[{"role": "user", "content": "p"}]]}, "no messages"),
        ({"messages": [{"role": "user", "content": "q"}], "audios": ["v.mp3"]}, "unknown key: audios"),
        ({"query": "q", "positives": "p", "negatves": ["n"]}, "unknown key: negatves; did you mean negatives?"),
        ({"query": "q", "positives": "p", "hard_negatives": ["n"]}, "unknown key: hard_negatives; did you mean neg"),
        ({"query": "q", "positives": "p", "neg": ["n"]}, "unknown key: neg;"),
        ({"query": "q", "positives": "p", "negatives": "['a', 'b']"}, 'wrong type: "negatives" is one text that looks'),
        ({"query": "q", "pos": "p", "negatives": ["n"]}, "unknown key: negatives;"),
        ({"anchor": "q", "positive": None, "negative": "n"}, "no positives"),
        ({"query": "q", "negative_1": "n", "negative_2": "m"}, "no positives"),
        ({"anchor": "q", "positive": "p", "negative": "n", "domain": "law"}, "unknown key: domain;"),
    ],
)
def test_rows_that_would_lose_something_are_refused(folder: Path, row: dict[str, Any], reason: str) -> None:
    groups, bad = read_rows(folder, row)
    assert groups == []
    assert bad[0].reason.startswith(reason)


def test_lists_in_a_cell_of_text(folder: Path) -> None:
    row = {"query": "q", "positives": '["a", "b"]', "negatives": "[1]"}
    assert read_rows(folder, row)[0][0].documents == (("a",), ("b",), ("[1]",))
    assert read_rows(folder, {"query": "q", "positive": '["a"]', "negative": "n"})[0][0].documents[0] == ('["a"]',)


def test_what_a_row_says_of_itself_does_no_harm(folder: Path) -> None:
    notes = {"query_id": "5", "source": "web", "num_negatives": 1, "positive_ids": ["d1"], "negative_ids": ["d2"]}
    groups, bad = read_rows(folder, {"query": "q", "positives": "p", "negatives": "n", **notes})
    assert (len(groups), bad) == (1, [])


def test_a_named_format_is_not_guessed(folder: Path) -> None:
    row = {"query": "q", "positives": "p"}
    assert len(read_rows(folder, row, format="native")[0]) == 1
    assert [bad.kind for bad in read_rows(folder, row, format="swift")[1]] == ["unknown key"]


def test_shuffled_labels_are_dealt_by_seed_and_row(folder: Path) -> None:
    row = {"query": "q", "positives": "p", "negatives": [f"n{i}" for i in range(7)]}
    groups, _ = read_rows(folder, *[row] * 200, shuffle_labels=True)
    assert groups == read_rows(folder, *[row] * 200, shuffle_labels=True)[0]
    assert {group.labels for group in groups} == {(1.0, *(0.0,) * 7)}
    assert all(set(group.documents) == {("p",), *((f"n{i}",) for i in range(7))} for group in groups)
    kept = sum(group.documents[0] == ("p",) for group in groups)
    assert 10 <= kept <= 45  # an eighth of 200 by chance


def test_evaluation_keeps_its_labels_and_needs_negatives(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text('{"query": "q", "positives": "p"}\n{"query": "q", "positives": "p", "negatives": "n"}\n' * 20)
    dataset = DatasetConfig(name="jsonl", train=str(path), eval=str(path), shuffle_labels=True, max_rows=30)
    config = RunConfig(dataset=dataset, loss=LossConfig(name="pointwise"))
    groups, bad = read_split(config, "eval")
    assert [group.documents for group in groups] == [(("p",), ("n",))] * 20
    assert {row.reason for row in bad} == {"no negatives"}
    assert len(read_split(config, "train")[0]) == 30
    assert read_split(RunConfig(dataset=DatasetConfig(name="jsonl", train=str(path))), "eval") == ([], [])


@pytest.mark.parametrize("value", [None, "", "missing.jsonl", ".", "rgb.png", "missing/folder/x"])
def test_a_source_that_is_not_there_is_a_config_error(folder: Path, monkeypatch: Any, value: Any) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"dataset\.train|no data file") as caught:
        read_groups(DatasetConfig(name="jsonl", train=value), "train", seed=1)
    assert caught.value.problems[0].tries[0].startswith("dataset.train=FILE")


def test_the_same_document_on_both_sides_is_dropped_with_a_count(folder: Path) -> None:
    """R15."""
    row = {"query": "q", "positives": ["a", "b"], "negatives": ["a", "c", "c"]}
    groups, bad = read_rows(folder, row, {**row, "positives": "a"}, on_bad="skip")
    assert [(g.documents, g.labels) for g in groups] == [((("b",), ("c",)), (1.0, 0.0))]
    assert (groups[0].repeats, groups[0].contradictory) == (1, 2)
    assert [b.kind for b in bad] == ["document both positive and negative"], "a row without a positive is left"
    assert len(read_rows(folder, row)[1]) == 1, "with on_bad=error it stops the run"


def test_a_document_judged_both_ways_by_rows_of_its_own(folder: Path) -> None:
    """R15."""
    rows = [{"query": "q", "document": d, "label": label} for d, label in (("a", 1), ("b", 1), ("a", 0), ("c", 0))]
    groups, bad = read_rows(folder, *rows)
    assert groups == [] and [row.id for row in bad] == ["1"]
    assert bad[0].reason == f'document both positive and negative: the text "a", by {folder}/rows.jsonl:3 too'
    groups, bad = read_rows(folder, *rows, on_bad="skip")
    assert [(g.documents, g.labels, g.repeats, g.contradictory) for g in groups] == [
        ((("b",), ("c",)), (1.0, 0.0), 0, 2)
    ]
    assert bad == []
    groups, bad = read_rows(folder, rows[0], rows[2], on_bad="skip")
    assert (groups, [row.kind for row in bad]) == ([], ["document both positive and negative"])


def test_twelve_thousand_rows_without_images_and_then_one_with(folder: Path) -> None:
    """K01."""
    rows = [{"query": "q", "positives": "p", "images": None}] * 12000
    groups, bad = read_rows(folder, *rows, {"query": {"text": "q", "images": ["rgb.png"]}, "positives": "p"})
    assert (len(groups), bad) == (12001, [])
    assert groups[-1].query[0] == Image(str(folder / "rgb.png"))


def test_a_row_of_no_known_form_is_told_its_keys_and_a_right_row(folder: Path) -> None:
    """K07."""
    _, bad = read_rows(folder, {"question": "q", "answer": "a"})
    assert bad[0].reason == (
        'unknown format: its keys are answer, question; a row looks like {"query": "...", "positives": ["..."], '
        '"negatives": ["..."]}, or dataset.format names its form, or dataset.columns its keys'
    )


def test_columns_are_renamed(folder: Path) -> None:
    row = {"question": "q", "answer": "a", "wrong": ["b"]}
    columns = {"query": "question", "positives": "answer", "negatives": "wrong"}
    groups, bad = read_rows(
        folder,
        row,
        {"query": "q", "positives": "a", "wrong": "b"},
        {"question": "q"},
        {**row, "wrong": None},
        columns=columns,
    )
    assert [group.documents for group in groups] == [(("a",), ("b",))] * 2 + [(("a",),)], (
        "null is a column all the same"
    )
    assert bad[0].reason == "no column answer for dataset.columns.positives; its keys are question"


def test_pixel_limits_of_the_data_set_are_for_images_without_their_own(folder: Path) -> None:
    row = {"query": {"image": "rgb.png", "max_pixels": 99}, "positives": [{"image": "rgb.png"}]}
    groups, _ = read_rows(folder, row, min_pixels=10, max_pixels=1000)
    path = str(folder / "rgb.png")
    assert groups[0].query == (Image(path, min_pixels=10, max_pixels=99),)
    assert groups[0].documents == ((Image(path, min_pixels=10, max_pixels=1000),),)


def test_random_negatives_may_come_for_rows_that_bring_none(folder: Path) -> None:
    row = {"query": "q", "positives": "p"}
    assert [bad.reason for bad in read_rows(folder, row, need_negatives=True)[1]] == ["no negatives"]
    assert read_rows(folder, row, need_negatives=True, random_negatives=4)[1] == []


def test_an_own_function_turns_rows_into_a_known_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own_rows.py").write_text(
        "def turn(row):\n"
        "    if row['n'] == 1: return None\n"
        "    if row['n'] == 2: return [1]\n"
        "    return {'id': row['n'], 'query': row['a'], 'pos': [row['b']], 'neg': ['c'][: 1 // row['n']]}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    rows = [{"n": n, "a": "q", "b": "p"} for n in (3, 1, 2, 0)]
    groups, bad = read_rows(folder, *rows, format="own_rows:turn")
    assert [(g.id, g.query, g.documents) for g in groups] == [("3", ("q",), (("p",),))]
    assert [b.reason for b in bad] == [
        "wrong type: own_rows:turn must return a dictionary or None, not a list [1]",
        "own_rows:turn raised ZeroDivisionError: integer division or modulo by zero",
    ]
    with pytest.raises(ConfigError, match="own_rows:nothing"):
        read_rows(folder, *rows, format="own_rows:nothing")


def test_names_of_formats_are_those_that_a_configuration_may_have() -> None:
    assert {*PARSERS, "auto", "digits"} == set(FORMATS)
