"""The check before ranks start: every bad row and picture named, the policy kept, no torch imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from launcher.spec import BatchConfig, DatasetConfig, LossConfig, RunConfig, TaskConfig, TuneConfig
from launcher.training.check import main
from launcher.training.prepare import problems_of, read_rows
from tests.tiny import tiny_plan


class Plan:
    """The fields of a plan that the check reads."""

    run_id = "test"

    def __init__(self, run_dir: Path, *, trains: Sequence[str] = ("language",), **dataset: Any) -> None:
        self.run_dir, self.trainable = str(run_dir), dict.fromkeys(trains, 1)
        options = {"name": "jsonl"} | dataset
        loss = LossConfig(name="listwise")
        self.config = RunConfig(
            dataset=DatasetConfig(**options),
            task=TaskConfig(name="rerank"),
            loss=loss,
            batch=BatchConfig(global_size=2),
            tune=TuneConfig(name="full"),
        )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Four good rows, one with a truncated picture, one with a strip, one cut line, one without negatives."""
    Pillow.effect_noise((256, 256), 50).save(tmp_path / "whole.jpg")
    data = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    Pillow.new("RGB", (201, 1)).save(tmp_path / "strip.png")
    good = {"query": "q", "positives": [{"image": "whole.jpg"}], "negatives": ["n", "n"]}
    lines = [json.dumps({**good, "id": f"good{i}"}) for i in range(4)]
    lines.append(json.dumps({**good, "id": "cut", "negatives": [{"image": "cut.jpg"}]}))
    lines.append(json.dumps({**good, "id": "strip", "query": {"image": "strip.png"}}))
    lines.append(json.dumps({**good, "id": "alone", "negatives": []}))
    lines.append('{"query": "q"')
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_bad_rows_stop_the_run(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I01, K08: each with its reason."""
    plan: Any = Plan(tmp_path, train=str(rows))
    assert main(plan) == 2
    _, err = capsys.readouterr()
    assert "4 of 8 rows of dataset.train=" in err
    assert "2 unreadable image" in err
    assert f"{rows}:5  id cut  unreadable image: {tmp_path}/cut.jpg: image file is truncated" in err
    assert f"{rows}:6  id strip  unreadable image: {tmp_path}/strip.png: 201 x 1 px" in err
    assert f"{rows}:7  id alone  no negatives" in err
    assert f"{rows}:8  id 8  not JSON: " in err
    assert "     try  dataset.on_bad=skip" in err
    store = read_rows(plan, "train")
    assert store is not None and problems_of(plan.config, "train", store)


def test_bad_rows_are_skipped_and_counted(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan: Any = Plan(tmp_path, train=str(rows), eval=str(rows), on_bad="skip", max_bad_fraction=0.5)
    assert main(plan) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[:5] == [
        "train   4 rows, 8 documents, 3 distinct images, 4 repeated documents dropped, 4 bad rows",
        "        bad rows                    first in",
        f"               2  unreadable image  {rows}:5",
        f"               1  no negatives      {rows}:7",
        f"               1  not JSON          {rows}:8",
    ]
    assert [row.id for row in read_rows(plan, "train") or ()] == [f"good{i}" for i in range(4)]
    listed = json.loads((tmp_path / "bad_rows.json").read_text())
    assert [(row["split"], row["id"]) for row in listed if row["split"] == "eval"] == [
        ("eval", name) for name in ("alone", "8", "cut", "strip")
    ]


def test_too_many_bad_rows_stop_a_run_that_skips_them(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K08."""
    plan: Any = Plan(tmp_path, train=str(rows), on_bad="skip", max_bad_fraction=0.4)
    assert main(plan) == 2
    err = capsys.readouterr().err
    assert "4 of 8 rows of dataset.train are left out (50.0 %), and dataset.max_bad_fraction=0.4:" in err
    assert "\n           2  unreadable image\n" in err
    assert "     try  dataset.max_bad_fraction=0.5" in err


def test_lengths_leave_out_what_the_data_check_left_out(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a run folder no list of bad rows is written; a strip or a cut picture must not stop the count."""
    data = {"train": str(rows), "max_length": 100, "on_bad": "skip", "max_bad_fraction": 0.5}
    long = json.dumps({"id": "long", "query": "word " * 200, "positives": ["p"], "negatives": ["n"]})
    cut = json.dumps({"id": "cut", "query": "q", "positives": ["word " * 200], "negatives": ["n"]})
    rows.write_text(f"{rows.read_text()}\n{long}\n{cut}\n")
    assert main(tiny_plan(tmp_path / "absent", dataset=data), lengths=True) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].endswith("4 bad rows")
    shown = out.splitlines()[out.splitlines().index("        1 document cut to fit dataset.max_length=100") + 1 :]
    assert shown == [
        "        1 row too long: long",
        "                   text  image  video  mixed",
        "        queries       6      0      0      0",
        "        documents     8      4      0      0",
        "        tokens  rows",
        "         64-95     4  ########################################",
        "        96-127     1  ##########",
    ]


@pytest.mark.parametrize(
    ("row", "last", "tried"),
    [
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "", "task=sft"),
        ('{"query": {"image": "gone.png"}, "positives": ["p"], "negatives": ["n"]}', "[]", "dataset.image_root=FOLDER"),
    ],
)
def test_rows_that_are_wrong_alike_hide_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, last: str, tried: str
) -> None:
    """Nor that something else may be wrong than the rows."""
    (tmp_path / "rows.jsonl").write_text("\n".join([*[row] * 30, last]))
    plan: Any = Plan(tmp_path, train=str(tmp_path / "rows.jsonl"))
    assert main(plan) == 2
    err = capsys.readouterr().err
    named = re.findall(r"rows.jsonl:(\d+)  id", err)
    assert named == ["1", "2", "3", *(["31"] if last else [])]
    assert "    and 27 more\n" in err
    assert f"     try  {tried}   (" in err


@pytest.mark.parametrize(("text", "message"), [("", "has no rows"), ('{"query": "q"}\n', "1 of 1 rows")])
def test_nothing_usable_is_an_error_even_when_skipping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """K07."""
    (tmp_path / "rows.jsonl").write_text(text)
    plan: Any = Plan(tmp_path, train=str(tmp_path / "rows.jsonl"), on_bad="skip")
    assert main(plan) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "on_bad=skip" not in err


def test_a_part_without_a_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"query": "q", "positives": "p", "negatives": "n"}\n')
    plan: Any = Plan(tmp_path, train=str(tmp_path / "rows.jsonl"), eval_fraction=1e-6)
    assert main(plan) == 2
    assert f"dataset.eval_fraction=1e-06 leaves no eval row of {tmp_path}/rows.jsonl" in capsys.readouterr().err


def test_parts_that_no_row_reaches_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of the held-out rows alone teach nothing."""
    Pillow.new("RGB", (64, 64)).save(tmp_path / "red.png")
    row = {"query": "q", "positives": ["p"], "negatives": ["n"]}
    for name, query in (("words", "q"), ("seen", {"image": "red.png"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | {"query": query}) + "\n")
    files = {"train": str(tmp_path / "words.jsonl"), "eval": str(tmp_path / "seen.jsonl")}
    blind: Any = Plan(tmp_path, trains=("vision", "projector"), **files)
    assert main(blind) == 2
    err = capsys.readouterr().err
    assert "no row of dataset.train shows an image or a video, and nothing but vision and projector trains" in err
    assert "try  tune.language=full\n" in err
    partly: Any = Plan(tmp_path, trains=("language", "projector"), **files)
    seeing: Any = Plan(tmp_path, trains=("projector",), train=files["eval"])
    assert main(partly) == main(seeing) == 0
    assert capsys.readouterr().out.count("no image or video: nothing reaches projector, to be trained") == 1


def test_many_bad_rows_are_counted_and_twenty_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"positives": ["p"], "negatives": ["n"]}
    rows = (json.dumps({**row, "query": {"image": f"{n}.png"}}) for n in range(500))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    plan: Any = Plan(tmp_path / "absent", train=str(tmp_path / "rows.jsonl"))
    assert main(plan) == 2
    err = capsys.readouterr().err
    assert err.count("image file missing: ") == 20
    assert "and 480 more" in err


def test_the_check_needs_no_torch() -> None:
    code = (
        "import sys; from launcher.spec import DatasetConfig, RunConfig; "
        "from launcher.training.check import check_data; "
        "config = RunConfig(dataset=DatasetConfig(name='digits', format='digits', max_rows=5)); "
        "assert check_data(type('Plan', (), {'run_id': 'x', 'run_dir': '/none', 'config': config})); "
        "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_digits_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan: Any = Plan(tmp_path, name="digits", format="digits")
    assert main(plan) == 0
    assert capsys.readouterr().out.splitlines() == [
        "train   6,400 rows, 51,200 documents, 1,352 distinct images",
        "eval    256 rows, 2,048 documents, 444 distinct images",
    ]
