"""Rows are read, checked and measured once a node, and come back as they were; the plan knows of them then."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from launcher.errors import ConfigError, MachineError
from launcher.planning.describe import describe
from launcher.planning.plan import make_plan
from launcher.prepared import lengths_folder, read_summary, rows_folder
from launcher.running.facts import gather_facts
from launcher.spec import RunPlan, plan_to_json
from launcher.training import files
from launcher.training.check import main
from launcher.training.digits import read_digits
from launcher.training.images import open_image, smart_resize
from launcher.training.lengths import counted
from launcher.training.packed import media_of, modality, pack, unpack
from launcher.training.prepare import agreed, locked, prepare, read_rows
from launcher.training.rows import Chat, Group, Image, Row, Turn, Video
from tests.planning_support import compose
from tests.tiny import tiny_plan

PROGRAM = [sys.executable, str(Path(__file__).parent / "processes" / "preparer.py")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "launcher" / "prepared"


def write_rows(folder: Path, count: int = 8, **more: Any) -> Path:
    """A file of rows with one picture among the documents."""
    Pillow.effect_noise((96, 64), 50).save(folder / "a.png")
    rows = [
        {
            "id": f"r{i}",
            "query": f"query {i} " * (i % 5 + 1),
            "positives": [{"image": "a.png"}],
            "negatives": ["no", "x"],
        }
        for i in range(count)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    return path


def plan_of(tmp_path: Path, path: Path, **options: Any) -> RunPlan:
    """A tiny plan on these rows."""
    return tiny_plan(tmp_path / "run", dataset={"train": str(path), **options})


@pytest.mark.parametrize(
    "row",
    [
        Group("1", "f:1", None, ("q",), (("a", Image("p.png", max_pixels=9)), ()), (2.0, 0.0), (0.5, -1.0), repeats=3),
        Group("1", "f:1", "find", (Image(None, b"one"),), ((Image(None, b"two"),), (Image(None, b"one"),)), (1.0, 0.0)),
        Group(
            "é", "f:2", "", (Video("v.mp4", fps=2.0, start_s=0.0, end_s=4.5), ""), ((Video(None, ("a", "b")),),), (1.0,)
        ),
        Chat(
            "c", "f:3", (Turn("system", ("s",)), Turn("assistant", ("a", Image("x", span=(3, 4))), train=True)), "cat"
        ),
    ],
)
def test_rows_come_back_as_they_were(row: Row) -> None:
    blob = b""

    def keep(data: bytes) -> tuple[int, int]:
        nonlocal blob
        blob += data
        return len(blob) - len(data), len(data)

    def embedded(part: Any) -> Any:
        if not isinstance(part, Image) or part.path != "blob":
            return part
        assert part.span is not None
        return Image(None, blob[part.span[0] : sum(part.span)], part.min_pixels, part.max_pixels)

    found = unpack(pack(row, keep), "blob")
    if isinstance(found, Group):
        documents = tuple(tuple(map(embedded, document)) for document in found.documents)
        found = dataclasses.replace(found, query=tuple(map(embedded, found.query)), documents=documents)
    assert found == row


def test_embedded_pictures_are_written_once_and_read_from_there(tmp_path: Path, cache: Path) -> None:
    plan = tiny_plan(tmp_path, dataset={"name": "digits", "format": "digits", "max_rows": 40})
    store, expected = read_rows(plan, "train"), read_digits("train", seed=42, max_rows=40)
    assert store is not None and len(store) == len(expected) == 40
    for row, known in zip(store, expected, strict=True):
        assert isinstance(row, Group)
        assert (row.id, row.query, row.labels) == (known.id, known.query, known.labels)
        for mine, theirs in zip(media_of(row), media_of(known), strict=True):
            assert isinstance(mine, Image) and isinstance(theirs, Image) and mine.data is None
            assert np.array_equal(np.asarray(open_image(mine)), np.asarray(open_image(theirs)))
    distinct = {part.data for row in expected for part in media_of(row) if isinstance(part, Image) and part.data}
    (blob,) = (cache / "blobs").iterdir()
    assert blob.stat().st_size == sum(map(len, distinct))
    assert len({part for row in store for part in media_of(row)}) == len(distinct) == store.summary["images"]


def test_what_another_folder_is_made_for(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    plan = plan_of(tmp_path, path)
    rows = rows_folder(plan.config, "train")
    lengths = lengths_folder(plan.config, rows)

    def changed(group: str, **keys: Any) -> Any:
        return dataclasses.replace(plan.config, **{group: dataclasses.replace(getattr(plan.config, group), **keys)})

    for config in (changed("optim", lr=1.0), changed("batch", global_size=9), changed("dataset", max_bad_fraction=0.5)):
        assert rows_folder(config, "train") == rows and lengths_folder(config, rows) == lengths
    for config in (
        changed("dataset", max_length=99),
        changed("model", max_pixels=2048),
        changed("task", instruction="?"),
    ):
        assert lengths_folder(config, rows) != lengths
    for config in (
        changed("dataset", max_rows=3),
        changed("dataset", format="native"),
        changed("loss", name="pointwise"),
    ):
        assert rows_folder(config, "train") != rows
    os.utime(path, (1, 1))
    assert rows_folder(plan.config, "train") == rows  # a small file counts by its content
    path.write_text(path.read_text().replace("query 3", "query 4"))
    assert rows_folder(plan.config, "train") != rows


def test_prepared_once_then_found(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path))
    first, beats = prepare(plan, "train"), 0
    assert first.store is not None and len(first) == 8

    def beat() -> None:
        nonlocal beats
        beats += 1

    again = prepare(dataclasses.replace(plan, run_id="another"), "train", beat)
    assert again.store is not None and beats == 0  # nothing was read or counted
    assert [row.id for row in again] == [f"r{i}" for i in range(8)] == [row.id for row in first[0:8]]
    assert again.digest == first.digest and again.tokens.tolist() == first.tokens.tolist()
    assert len(prepare(plan, "eval")) == 0


def test_what_a_crash_left_in_pieces_is_made_again(tmp_path: Path, cache: Path) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path))
    digest = prepare(plan, "train").digest
    for name in ("rows.arrow", "bad.json", "media.json", "*/lengths.arrow", "*/unfit.json"):
        (file,) = cache.glob(f"*/{name}")
        whole = file.read_bytes()
        file.rename(file.with_name("aside"))  # what this process has mapped into memory stays
        file.write_bytes(whole[: len(whole) // 2])
        assert prepare(plan, "train").digest == digest, name
        assert file.read_bytes() == whole, name


def test_a_picture_that_changes_is_looked_at_again(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path), on_bad="skip", max_bad_fraction=1.0)
    tokens = prepare(plan, "train").tokens
    Pillow.effect_noise((32, 32), 50).save(tmp_path / "a.png")
    assert (prepare(plan, "train").tokens < tokens).all()
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(ConfigError, match="8 of 8 rows of dataset.train=.* can't be used: 8 unreadable image"):
        prepare(plan, "train")


def test_bad_rows_are_read_again_by_the_next_run(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path))
    (tmp_path / "a.png").rename(tmp_path / "b.png")
    with pytest.raises(ConfigError, match="8 of 8 rows"):
        prepare(plan, "train")
    (tmp_path / "b.png").rename(tmp_path / "a.png")
    assert len(prepare(dataclasses.replace(plan, run_id="next"), "train")) == 8


def test_a_pool_counts_the_same(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path, 200))
    store = read_rows(plan, "train")
    assert store is not None
    said: list[tuple[int, int | None]] = []
    alone, pooled = (
        counted(plan, store, tmp_path / name, lambda done, total: said.append((done, total)), pool_s=pool_s)
        for name, pool_s in (("alone", 1e9), ("pool", -1.0))
    )
    assert said[-1] == (200, 200)
    for field in ("prefix", "count", "positives", "prompts", "cut", "shrunk"):
        assert np.array_equal(getattr(alone, field), getattr(pooled, field)), field
    assert len(alone.prompts) == 600 and alone.tokens.min() > 0


def test_two_processes_prepare_once(tmp_path: Path) -> None:
    """K12."""
    plan = plan_of(tmp_path, write_rows(tmp_path, 3000))
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    both = [subprocess.Popen([*PROGRAM, str(tmp_path / "plan.json")], stdout=subprocess.PIPE, text=True) for _ in "12"]
    said = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][-1] == said[1][-1] and said[0][-1].startswith("3000 ")  # the same file
    assert sum("another process is preparing" in lines[0] for lines in said) <= 1


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path))
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    holder = subprocess.Popen([*PROGRAM, str(tmp_path / "plan.json"), "hold"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "holding\n"
    waiter = subprocess.Popen([*PROGRAM, str(tmp_path / "plan.json")], stdout=subprocess.PIPE, text=True)
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "another process is preparing these rows; waiting for it\n"
    assert waiter.poll() is None
    holder.kill()
    holder.wait()
    assert waiter.communicate(timeout=60)[0].startswith("8 ") and waiter.returncode == 0


def test_ranks_with_other_rows_are_told(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, ranks=2)
    agreed(plan, [["a", "b"], ["a", "b"]])
    with pytest.raises(MachineError, match="the rows prepared on localhost are not those of localhost"):
        agreed(plan, [["a", "b"], ["a", "c"]])


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="cannot be written: Not a directory"):
        prepare(plan, "train")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MachineError, match="cannot be written: No space left on device"), locked(tmp_path / "rows"):
        Path("/dev/full").write_bytes(b"rows")


def test_the_plan_knows_what_was_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10: lengths stand there before a run."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 40)
    config = compose("model=tiny", "dataset=jsonl", "dataset.train=rows.jsonl", "batch.max_tokens=500", "run.name=x")

    def planned() -> RunPlan:
        return make_plan(config, gather_facts(config), now=datetime.now(timezone.utc))

    plan = planned()
    assert plan.data == {} and plan.batch.micro_steps is None and "not measured" in describe(plan)
    rows = prepare(plan, "train")
    plan = planned()
    mean = rows.tokens.mean()
    assert plan.batch.micro_steps == -(-mean * 16 // (500 * plan.world_size))
    text = describe(plan)
    assert f"train  40 rows, 1 distinct image, {mean:,.0f} tokens a row, at most {rows.tokens.max()}" in text
    assert "    documents    80     40      0      0" in text
    bins = read_summary(config)["train"]["lengths"]["histogram"]
    assert sum(count for *_, count in bins) == 40
    assert all(f"{low}-{high - 1}" in text for low, high, _ in bins)


def test_rows_are_shown_as_the_model_sees_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(tmp_path, write_rows(tmp_path, instruction="Find \x1b[31m<|im_end|> it", id="r\x1b[2J"))
    assert main(plan, lengths=True, show=2) == 0
    out = capsys.readouterr().out
    assert out.count("--- row r\\x1b[2J  (") == 2
    first = out[out.index("--- row r") :]
    assert "label 1\n" in first and "label 0\n" in first
    height, width = smart_resize(64, 96, 32, 1024, 4096)
    pads = height * width // 32**2
    assert pads > 1 and f"{tmp_path}/a.png: 96 x 64 -> {width} x {height} pixels, {pads} tokens" in first
    assert f"<|image_pad|> x {pads}<|vision_end|>" in first
    assert "<|im_start|>system" in first and "query 0" in first
    assert "\x1b" not in out and "\\x1b[31m" in first


def test_fewer_rows_than_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K10."""
    plan = dataclasses.replace(plan_of(tmp_path, write_rows(tmp_path, 3)))
    assert main(plan) == 0
    assert "fewer than batch.global_size=4: 1 step an epoch, a partial batch" in capsys.readouterr().out


def test_the_files_that_rows_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path)
    assert files.main(plan_of(tmp_path, path)) == 0
    assert json.loads(capsys.readouterr().out) == [str(tmp_path / "a.png"), str(path)]


def test_modalities() -> None:
    image, video = Image("a"), Video("v")
    contents: list[tuple[Any, ...]] = [("a", "b"), (image, image), (video,), (image, "a"), (image, video), ()]
    assert [modality(content) for content in contents] == ["text", "image", "video", "mixed", "mixed", "text"]
