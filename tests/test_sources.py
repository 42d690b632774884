"""Where rows come from: files of every kind, folders, hub data sets in the cache, mixtures, and their division."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from launcher import datafiles
from launcher.errors import ConfigError
from launcher.planning.consistency import contradictions, oddities
from launcher.planning.facts import Facts
from launcher.running.facts import gather_facts
from launcher.spec import DatasetConfig, LossConfig, RunConfig, TaskConfig
from launcher.training.formats import BadRow, raw_rows, read_split
from launcher.training.rows import Group, Image
from tests.planning_support import compose

CASES = Path(__file__).parent / "cases" / "data"
COMMIT = "c" * 40


def config(train: Any, eval: Any = None, **more: Any) -> RunConfig:
    more = {key: str(value) if isinstance(value, Path) else value for key, value in more.items()}
    train = [str(one) for one in train] if isinstance(train, list) else str(train)
    data = DatasetConfig(name="jsonl", train=train, eval=eval if eval is None else str(eval), **more)
    return RunConfig(dataset=data, task=TaskConfig(name="rerank"), loss=LossConfig(name="pointwise"))


def read(train: Any, split: str = "train", **more: Any) -> tuple[list[Any], list[BadRow]]:
    return read_split(config(train, **more), split)


def queries(rows: Iterable[Any]) -> list[str]:
    return [row.query[0] for row in rows]


def lines(path: Path, *names: str, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"query": name, "positives": "p", "negatives": "n", **more}) + "\n" for name in names]
    path.write_text("".join(rows))
    return path


ROWS = [{"query": "q1", "positives": ["a"], "negatives": ["b", "c"]}, {"query": "q2", "positives": ["d"]}]


def test_json_in_its_forms(tmp_path: Path) -> None:
    forms = {
        "array.json": json.dumps(ROWS, indent=1),
        "object.json": json.dumps({"version": 2, "data": ROWS}),
        "lines.json": "".join(json.dumps(row) + "\n" for row in ROWS),
        "array.jsonl": json.dumps(ROWS),
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        groups, bad = read(tmp_path / name)
        assert (queries(groups), bad) == (["q1", "q2"], []), name
        assert groups[1].where == f"{tmp_path / name}:2"
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0]))
    assert queries(read(tmp_path / "one.json")[0]) == ["q1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'[{"query": NaN}]', "not a number: NaN"),
        (b'[{"query": "a"},\n {"query": ]', "not JSON: Expecting value at column 12 of line 2"),
        (b'{"a": [], "b": []}', "no rows: one list of rows is expected; the file's keys are a, b"),
        (b"[1]", "not an object: entry 1 of the array is the number 1"),
        (b"3", "no rows: the file holds the number 3"),
        ('[{"query": "a"}]'.encode("utf-16"), "UTF-16"),
        (b'[{"query": "\xe9"}]', "not UTF-8: byte 0xe9"),
    ],
)
def test_json_that_is_wrong_is_named(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "rows.json").write_bytes(text)
    groups, bad = read(tmp_path / "rows.json")
    assert (groups, len(bad), bad[0].where) == ([], 1, f"{tmp_path}/rows.json:1")
    assert bad[0].reason.startswith(reason)


def test_an_array_among_the_cases(tmp_path: Path) -> None:
    raws = list(raw_rows(config(CASES / "array_not_lines.jsonl"), "train"))
    assert [raw.data for raw in raws] == [{"query": "a"}, {"query": "b"}]


def test_tables_of_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(
        b"\xef\xbb\xbfid,query,document,label\r\n"
        b'007,"2024-01-02, ""a""\nb",1e3,1\r\n'
        b"008,q,12345678901234567890123,true\r\n"
        b"009,q\r\n"
        b"010,r,d,no\r\n"
        b"011,q,d,\r\n"
    )
    groups, bad = read(tmp_path / "rows.csv")
    assert [(g.id, g.query, g.documents, g.labels) for g in groups] == [
        ("007", ('2024-01-02, "a"\nb',), (("1e3",),), (1.0,)),
        ("008", ("q",), (("12345678901234567890123",),), (1.0,)),
        ("010", ("r",), (("d",),), (0.0,)),
    ]
    assert [b.reason for b in bad] == [
        "wrong number of cells: 2, and the heading has 4",
        'no label: a "document" is judged by "label" or "score"',  # an empty cell is none
    ]
    (tmp_path / "rows.tsv").write_text("query\tpositive\tnegative_1\nq\ta\tb, c\n")
    groups, bad = read(tmp_path / "rows.tsv")
    assert (groups[0].documents, bad) == ((("a",), ("b, c",)), [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"query,positive\nq,a\ncaf\xe9,b\n", "not UTF-8: byte 0xe9 in line 3"),
        (b"query,query\nq,a\n", "duplicate key"),
        (b'query,positive\n"q,a\n', "not CSV: unexpected end of data"),
    ],
)
def test_a_table_that_is_wrong_is_named(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "rows.csv").write_bytes(text)
    assert read(tmp_path / "rows.csv")[1][0].reason.startswith(reason)


def test_parquet_with_pictures_in_it(tmp_path: Path) -> None:
    Pillow.new("RGB", (8, 8)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    cells = [{"bytes": data, "path": "gone.png"}, {"bytes": None, "path": "a.png"}]
    rows = [{"query": f"q{i}", "image": cells[i % 2], "negative_0": None, "n": 2**62} for i in range(130)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=50)
    groups, bad = read(tmp_path / "rows.parquet", format="colpali")
    assert (len(groups), bad) == (130, [])
    assert groups[0].documents == ((Image(None, data),),)
    assert groups[129].documents == ((Image(str(tmp_path / "a.png")),),)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    assert [b.kind for b in read(tmp_path / "cut.parquet")[1]] == ["not Parquet"]


def test_dates_and_floats_of_a_table_are_no_text(tmp_path: Path) -> None:
    table = pa.table({"query": pa.array([0], pa.timestamp("s")), "positive": ["p"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    reason = read(tmp_path / "rows.parquet")[1][0].reason
    assert reason == 'wrong type: "query" must be text or an object, not a datetime "1970-01-01 00:00:00"'


def test_what_datasets_saves(tmp_path: Path) -> None:
    features = datasets.Features({"query": datasets.Value("string"), "image": datasets.Image()})
    picture = Pillow.new("RGB", (4, 4))
    rows = datasets.Dataset.from_dict({"query": ["a", "b"], "image": [picture, picture]}, features=features)
    rows.save_to_disk(str(tmp_path / "one"))
    groups, bad = read(tmp_path / "one")
    assert (queries(groups), bad) == (["a", "b"], [])
    assert groups[0].documents[0][0].data[:4] == b"\x89PNG"
    both = datasets.DatasetDict({"train": rows.select([0]), "test": rows.select([1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert queries(read_named(tmp_path / "both", "test")) == ["b"]
    with pytest.raises(ConfigError, match="has the splits train, test; dataset.split=null"):
        read(tmp_path / "both")
    file = next((tmp_path / "one").glob("*.arrow"))
    assert queries(read(file)[0]) == ["a", "b"]
    (tmp_path / "one" / "cache-1.arrow").write_bytes(file.read_bytes())  # as `map` leaves it
    (tmp_path / "many").mkdir()
    (tmp_path / "one").rename(tmp_path / "many" / "one")
    assert queries(read(tmp_path / "many")[0]) == ["a", "b"]
    (tmp_path / "many" / "one" / file.name).write_bytes(b"cut")
    assert [row.kind for row in read(tmp_path / "many")[1]] == ["not what datasets saves"]


def read_named(folder: Path, name: str | None) -> list[Any]:
    data = DatasetConfig(name="jsonl", train=str(folder), split=name)
    return read_split(RunConfig(dataset=data, task=TaskConfig(name="rerank")), "train")[0]


def test_a_folder_is_all_its_data_files(tmp_path: Path) -> None:
    lines(tmp_path / "b" / "2.jsonl", "second")
    lines(tmp_path / "a.jsonl", "first")
    lines(tmp_path / ".hidden" / "x.jsonl", "hidden")
    (tmp_path / "notes.txt").write_text("not rows")
    (tmp_path / "folder.json").mkdir()
    groups, bad = read(tmp_path)
    assert (queries(groups), bad) == (["first", "second"], [])
    assert groups[1].where == f"{tmp_path}/b/2.jsonl:1"
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    linked = lines(tmp_path.with_name("elsewhere") / "linked.jsonl", "linked").parent
    (tmp_path / "d").symlink_to(linked)
    (linked / "back").symlink_to(tmp_path)
    assert queries(read(tmp_path)[0]) == ["first", "second", "first", "linked"]
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"x" * 10_000)[:-9])
    assert [row.kind for row in read(tmp_path / "c.jsonl.gz")[1]][-1] == "not gzip, or cut short"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="holds no data file"):
        read(empty)


def test_splits_of_a_folder_are_told_by_names(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "dev", "original-00000-of-00001"):
        lines(tmp_path / "data" / f"{name}.jsonl", name)
    assert queries(read_named(tmp_path, "train")) == ["train-00000-of-00002", "train-00001-of-00002"]
    assert queries(read_named(tmp_path, "validation")) == ["dev"]
    assert queries(read_named(tmp_path, "original")) == ["original-00000-of-00001"]
    with pytest.raises(ConfigError, match=r"splits validation, original, train; dataset.split=null") as caught:
        read(tmp_path)
    assert "dataset.split=train" in caught.value.problems[0].tries
    held_out = config(tmp_path, split="train", eval_split="validation")
    assert queries(read_split(held_out, "eval")[0]) == ["dev"]
    assert len(read_split(held_out, "train")[0]) == 2


CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/part-*
  - split: test
    path: [en/held.jsonl]
- config_name: fr
  data_files: fr/*.jsonl
---
# A card
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the cache, as a fetch leaves it; the snapshot's folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf" / "hub" / "datasets--org--rows"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    lines(snapshot / "en" / "part-1.jsonl", "one", "two")
    lines(snapshot / "en" / "held.jsonl", "held")
    lines(snapshot / "fr" / "rows.jsonl", "un")
    (snapshot / "README.md").write_text(CARD)
    return snapshot


def test_the_card_of_a_hub_data_set_says_which_files(hub: Path) -> None:
    assert queries(read("org/rows", subset="en")[0]) == ["one", "two"]
    assert queries(read("org/rows", subset="fr")[0]) == ["un"]
    assert queries(read_split(config("org/rows", subset="en", eval_split="test"), "eval")[0]) == ["held"]
    assert queries(read_split(config("org/rows", "org/rows", subset="en", eval_split="test"), "eval")[0]) == ["held"]
    with pytest.raises(ConfigError, match="has the subsets en, fr, and dataset.subset=null"):
        read("org/rows")
    with pytest.raises(ConfigError, match="has the splits train, test; dataset.split=dev"):
        read_named_hub("dev")
    (hub / "README.md").unlink()  # without a card names tell
    assert queries(read("org/rows", subset="fr")[0]) == ["un"]
    with pytest.raises(ConfigError, match="has the subsets en, fr"):
        read("org/rows", subset="de")


def read_named_hub(name: str) -> Any:
    data = DatasetConfig(name="jsonl", train="org/rows", subset="en", split=name)
    return read_split(RunConfig(dataset=data, task=TaskConfig(name="rerank")), "train")


def test_a_name_that_is_not_here_says_what_to_type(hub: Path) -> None:
    with pytest.raises(ConfigError, match="org/other: no file or folder is called so") as caught:
        read("org/other")
    assert caught.value.problems[0].tries[0] == "python -m launcher fetch dataset.train=org/other ..."
    with pytest.raises(ConfigError, match="rowz does not exist; a file, a folder, or OWNER/NAME"):
        read("rowz")
    lines(Path("org") / "rows" / "own.jsonl", "own")  # a folder here goes before a hub's name
    assert queries(read("org/rows")[0]) == ["own"]


def test_a_plan_takes_names_and_lists_of_them(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(Path("a.jsonl"), "a", "b", "c")
    facts: Facts = gather_facts(compose("model=tiny", "dataset.train=[a.jsonl,org/rows]", "dataset.subset=en"))
    assert (facts.problems, facts.train_rows) == ((), 5)
    made = compose("model=tiny", "dataset.train=[a.jsonl,org/unknown]", "dataset.eval=org/rows").dataset
    assert made.train == [str(Path.cwd() / "a.jsonl"), "org/unknown"]
    assert made.eval == "org/rows"
    facts = gather_facts(compose("model=tiny", "dataset.train=org/unknown", "dataset.eval=data/gone.jsonl"))
    assert facts.train_rows is None, "it is fetched before ranks start"
    assert [problem.text.split(":")[0] for problem in facts.problems] == [f"dataset.eval={Path.cwd()}/data/gone.jsonl"]


BEIR = {
    "queries": [{"_id": "1", "text": "q1"}, {"_id": "2", "text": "q2"}, {"_id": "3", "text": "unused"}],
    "corpus": [{"_id": "d1", "title": "T", "text": "one"}, {"_id": "d2", "title": "", "text": "two"}],
}
QRELS = [("1", "d1", 2), ("1", "d2", -1), ("2", "d2", 1), ("2", "gone", 0)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_beir_folders(tmp_path: Path, form: str) -> None:
    if form == "jsonl":
        for table, rows in BEIR.items():
            (tmp_path / f"{table}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "qrels").mkdir()
        text = "".join(f"{query}\t{document}\t{score}\n" for query, document, score in QRELS)
        (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + text)
        (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\t1\n")
    else:
        qrels = [{"query-id": query, "corpus-id": document, "score": score} for query, document, score in QRELS]
        for table, rows in {**BEIR, "qrels": qrels}.items():
            (tmp_path / table).mkdir()
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / table / "test-00000-of-00001.parquet")
    made = config(tmp_path, tmp_path, split="train" if form == "jsonl" else None, eval_split="test")
    groups, bad = read_split(made, "eval")
    assert [(g.id, g.query, g.documents, g.labels) for g in groups] == [
        ("1", ("q1",), (("T one",), ("two",)), (2.0, 0.0)),
    ]
    assert [(b.id, b.reason) for b in bad] == [("2", "judged but not there: document gone")]
    for wanted in (None, "dev") if form == "jsonl" else ("dev",):
        with pytest.raises(ConfigError, match="has judgements for"):
            read_named(tmp_path, wanted)
    trained = read_split(made, "train")[0]
    assert [g.labels for g in trained] == [(1.0,)] if form == "jsonl" else [(2.0, 0.0)]


def test_rows_know_their_source_and_stand_source_by_source(tmp_path: Path) -> None:
    files = [lines(tmp_path / f"{name}.jsonl", *(f"{name}{i}" for i in range(3))) for name in "ab"]
    groups, _ = read(files)
    assert queries(groups) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert [g.source for g in groups] == [0, 0, 0, 1, 1, 1]
    assert len(read(files, max_rows=4)[0]) == 4


def test_a_part_is_held_out_by_its_queries(tmp_path: Path) -> None:
    names = [f"q{i % 400}" for i in range(600)]  # 200 of the queries stand twice
    file = lines(tmp_path / "rows.jsonl", *names)
    train, held = (read(file, split, eval_fraction=0.25)[0] for split in ("train", "eval"))
    assert len(train) + len(held) == 600
    assert not set(queries(train)) & set(queries(held))
    assert 70 <= len(set(queries(held))) <= 130
    moved = lines(tmp_path / "elsewhere" / "moved.jsonl", *reversed(names))
    assert set(queries(read(moved, "eval", eval_fraction=0.25)[0])) == set(queries(held)), (
        "whatever the order and place"
    )
    assert read(file, "eval")[0] == []
    rows = []
    for size in range(1, 41):  # pictures of one name, each in a folder of its own
        (tmp_path / str(size)).mkdir()
        (tmp_path / str(size) / "image.png").write_bytes(b"x" * size)
        rows.append({"query": {"image": f"{size}/image.png"}, "positives": "p", "negatives": "n"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert 10 <= len(read(file, "eval", eval_fraction=0.5)[0]) <= 30


def test_rows_on_both_sides_are_said(tmp_path: Path) -> None:
    file = lines(tmp_path / "rows.jsonl", "a")
    few = config(file, eval_fraction=0.1)
    assert [o for o in oddities(config(file, file), Facts(cwd="/"), 1) if "trained on and evaluated" in o]
    assert not [o for o in oddities(few, Facts(cwd="/"), 1) if "trained on and evaluated" in o]


def test_pictures_lie_where_image_root_says(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    Pillow.new("RGB", (8, 8)).save(tmp_path / "pictures" / "a.png")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"query": "q", "image": "a.png"}\n')
    assert [b.kind for b in read(file)[1]] == ["image file missing"]
    groups, bad = read(file, image_root=tmp_path / "pictures")
    assert (groups[0].documents[0][0].path, bad) == (str(tmp_path / "pictures" / "a.png"), [])


def test_names_of_hubs_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "Org-1/name_2.v3"):
        assert datafiles.is_hub_name(name)
        assert datafiles.absolute_source(name) == name
    for name in ("name", "./org/name", "data/rows.jsonl", "a/b/c", "/org/name", "~/name", "org/na me"):
        assert not datafiles.is_hub_name(name)
    assert datafiles.absolute_source("data/x.parquet") == str(tmp_path / "data" / "x.parquet")


def test_rows_are_counted_without_reading_them(tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["a"] * 7}), tmp_path / "a.parquet")
    file = lines(tmp_path / "b.jsonl", "x", "y")
    assert datafiles.count_rows([tmp_path / "a.parquet", file]) == 9
    (tmp_path / "c.csv").write_text("query\na\n")
    assert datafiles.count_rows([file, tmp_path / "c.csv"]) is None
    assert datafiles.count_rows([CASES / "array_not_lines.jsonl"]) is None
    assert isinstance(read(file)[0][0], Group)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dataset.train=[a.jsonl,b.jsonl] dataset.weights=[1]", "has 1 numbers, and dataset.train names 2 sources"),
        ("dataset.train=a.jsonl dataset.weights=[1]", "dataset.weights=[1] has no effect with one source"),
        ("dataset.train=a.jsonl dataset.split=train", "dataset.split=train has no effect with single files"),
        ("dataset.train=a.jsonl dataset.source=modelscope", "no effect with data that is on this machine"),
        ("dataset.train=a.jsonl dataset.eval=b.jsonl dataset.eval_fraction=0.1", "no effect with dataset.eval=b.jsonl"),
        ("dataset.train=[]", "must be a file, a folder or the name of a hub data set, or a list of them"),
        ("dataset.train=[a.jsonl,3]", "must be a file, a folder or the name of a hub data set, or a list of them"),
        ("dataset.train=a.jsonl dataset.format=swft", "must be one of auto, native, swift"),
        ("dataset.train=a.jsonl,b.jsonl", "try  'dataset.train=[a.jsonl,b.jsonl]'"),
    ],
)
def test_keys_of_data_that_say_nothing_here_are_refused(words: str, said: str) -> None:
    try:
        problems = list(contradictions(compose("model=tiny", *words.split()), Facts(cwd="/")))
    except ConfigError as error:
        problems = list(error.problems)
    assert said in ConfigError(*problems).render()


def test_a_name_that_is_not_here_is_a_warning_in_the_plan() -> None:
    made = compose("model=tiny", "dataset.train=data/typo")
    said = list(oddities(made, Facts(cwd="/", data_elsewhere=("data/typo",)), 1))
    assert any(text.startswith("data/typo is no file or folder here") for text in said)
