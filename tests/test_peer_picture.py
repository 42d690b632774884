"""The comparison that the READMEs show is the one that was measured."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.bench import peer_picture
from tests.bench.peer_drawing import LONGEST, drawn
from tests.bench.peer_picture import CHINESE, ENGLISH, PAGES, block, pairs, picture, read, written
from tests.bench.peer_runs import Outcome

SVG = "{http://www.w3.org/2000/svg}"


def outcome(workload: str, side: str, seconds: float | None, *, loss: float = 2.0, setting: str = "") -> Outcome:
    """A run of three steps of four rows, each of so many seconds."""
    setting = setting or ("keep+liger+bf16+m1" if side == "ms-swift" else "")
    steps = () if seconds is None else (9.0, 4 * seconds, 4 * seconds)
    losses = () if seconds is None else (loss, loss, loss)
    return Outcome(workload=workload, side=side, setting=setting, groups=4, losses=losses, step_s=steps)


MEASURED = [
    outcome("text", "ms-swift", 0.4),
    outcome("text", "ms-swift", 0.3, setting="again+plain+m2"),
    outcome("text", "launcher", 0.9),
    outcome("text", "launcher", 0.15),
    outcome("page", "ms-swift", 0.5),
    outcome("page", "launcher", None),
    outcome("imgq", "launcher", 0.1),
]


def test_the_fastest_of_theirs_and_the_last_of_ours_where_both_were_measured() -> None:
    (pair,) = pairs(MEASURED)
    assert (pair.ours.workload, pair.peer.setting, pair.seconds) == ("text", "again+plain+m2", (0.3, 0.15))
    assert pair.ratio == pytest.approx(2)


def test_a_line_of_the_table_says_both_sides_numbers() -> None:
    lines = block(pairs(MEASURED), ENGLISH).splitlines()
    assert lines[4].startswith(
        "| text query, 8 text documents | all recomputed, 2 a micro-batch | 0.300, 0.150 | **2.0** |"
    )
    assert [line.count("|") for line in lines[2:5]] == [lines[2].count("|")] * 3
    assert block([], ENGLISH) == ""


def test_both_languages_say_the_same_numbers() -> None:
    english, chinese = (block(pairs(MEASURED), words) for words in (ENGLISH, CHINESE))
    assert english.count("|") == chinese.count("|") and english.count("`") == chinese.count("`")
    assert "0.300, 0.150 | **2.0**" in chinese and "0.300, 0.150 | **2.0**" in english


def test_bars_are_as_long_as_their_values() -> None:
    root = ET.fromstring(drawn("a < b", "c", [("text", "d", 2.0, 4.0), ("page", "e", 1.0, 8.0)]))
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("class") in ("peer", "ours") and r.get("height") != "12"]
    assert [float(bar.get("width", "")) * 8 / LONGEST for bar in bars] == pytest.approx([2, 4, 1, 8])
    assert [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "ratio"] == ["2.0 ×", "8.0 ×"]
    assert "http" not in picture(pairs(MEASURED)).replace("http://www.w3.org/2000/svg", "")


def test_nothing_is_shown_of_other_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outcomes.jsonl"
    rows = [outcome("text", "ms-swift", 0.3), outcome("text", "launcher", 0.1, loss=2.5)]
    file.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    page = tmp_path / "README.md"
    page.write_text(f"{peer_picture.BEGIN}{peer_picture.END}")
    for name, value in {
        "FILE": file,
        "PICTURE": tmp_path / "x.svg",
        "REPO": tmp_path,
        "PAGES": {"README.md": ENGLISH},
    }.items():
        monkeypatch.setattr(peer_picture, name, value)
    assert peer_picture.main() == 1
    assert not (tmp_path / "x.svg").exists() and page.read_text() == f"{peer_picture.BEGIN}{peer_picture.END}"
    file.write_text("".join(f"{json.dumps(asdict(outcome('text', side, 0.3)))}\n" for side in ("ms-swift", "launcher")))
    assert peer_picture.main() == 0
    assert (tmp_path / "x.svg").exists() and "| **1.0** |" in page.read_text()


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_was_measured(page: str) -> None:
    """Else: python -m tests.bench.peer_picture"""
    text = (peer_picture.REPO / page).read_text(encoding="utf-8")
    assert written(text, block(pairs(read(peer_picture.FILE)), PAGES[page])) == text


def test_the_picture_is_of_what_was_measured() -> None:
    """Else: python -m tests.bench.peer_picture"""
    found = pairs(read(peer_picture.FILE))
    kept = peer_picture.PICTURE.read_text(encoding="utf-8") if peer_picture.PICTURE.exists() else None
    assert kept == (picture(found) if found else None)
