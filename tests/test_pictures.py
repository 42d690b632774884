"""Pictures of a plan in characters: every cell where the numbers put it, and all numbers of the plan in words."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.__main__ import plan_data
from launcher.estimates import Span
from launcher.planning.describe import describe
from launcher.planning.lines import WIDTH
from launcher.planning.pictures import bar, cells, cut_names, lane, letters, memory_bar
from launcher.spec import RunPlan, plan_from_json, plan_to_json
from tests.foretold import CHOICES, GIB, MEMORY, SCALING, TIME, foretell
from tests.planning_support import plan

SIZES = st.lists(st.floats(0, 1e12), min_size=1, max_size=15)


@pytest.fixture(scope="module")
def foretold() -> RunPlan:
    return foretell(plan())


def section(made: RunPlan, begin: str) -> list[str]:
    """The lines of one section of the plan's text."""
    found = [text.splitlines() for text in describe(made).split("\n\n") if text.startswith(begin)]
    assert len(found) == 1, begin
    return found[0]


@given(SIZES, st.integers(1, 200))
def test_cells_end_where_the_numbers_do(sizes: list[float], width: int) -> None:
    found = cells(sizes, width)
    whole = sum(sizes)
    if whole == 0:
        assert found == [0] * len(sizes)
        return
    assert sum(found) == width
    for end, truth in zip(itertools.accumulate(found), itertools.accumulate(sizes), strict=True):
        assert abs(end - width * truth / whole) <= 0.5 + 1e-6 * width


@given(st.lists(st.text("abc dé_9", max_size=6), max_size=40, unique=True))
def test_every_name_has_a_letter_of_its_own(names: list[str]) -> None:
    found = letters(names)
    assert list(found) == names and len(set(found.values())) == len(names)
    assert all(len(letter) == 1 and letter.isascii() and letter.isalpha() for letter in found.values())


def test_a_memory_that_fits() -> None:
    parts = {"weights": 20.0, "kept": 30.0}
    marks = {"weights": "w", "kept": "k"}
    assert memory_bar(parts, 100, 0.1, marks, 20) == "[wwwwkkkkkk........|--]"
    assert memory_bar(parts, 100, 0.0, marks, 20) == "[wwwwkkkkkk..........]"
    assert memory_bar(parts, None, 0.1, marks, 10) == bar(parts, marks, 10) == "[wwwwkkkkkk]"


def test_a_memory_that_does_not_fit_goes_on_behind_its_edge() -> None:
    parts = {"weights": 50.0, "kept": 150.0}
    marks = {"weights": "w", "kept": "k"}
    assert memory_bar(parts, 100, 0.1, marks, 20) == "[wwwwwkkkk|k|kkkkkkkkkk]"
    assert memory_bar({"weights": 95.0}, 100, 0.1, marks, 20) == "[wwwwwwwwwwwwwwwwww|w-]"  # in what is kept free


def test_a_lane_writes_names_as_far_as_they_have_room() -> None:
    spans = [
        Span(lane="GPU", name="forward", begin_s=0.0, end_s=1.0),
        Span(lane="GPU", name="optimizer", begin_s=3.0, end_s=3.5),
        Span(lane="GPU", name="tiny", begin_s=3.9, end_s=3.91),
    ]
    assert lane(spans, 0.0, 4.0, 40) == "forward==|                    opti|    t"
    assert cut_names(spans, 0.0, 4.0, 40) == ["optimizer", "tiny"]
    assert len(lane(spans, 0.0, 4.0, 7)) <= 7


def test_memory_in_words(foretold: RunPlan) -> None:
    title, drawn, *rows = section(foretold, "Memory of one GPU")
    assert title == "Memory of one GPU, GiB, estimated, fullest in the backward pass"
    inside = drawn.strip()[1:-1].replace("|", "")
    assert len(inside) == 74 and len(drawn) <= 80
    assert (inside.count("."), inside.count("-")) == (28, 4)  # of 140 GiB 53 are free and 7 kept free
    said = {tuple(row.split()) for row in rows}
    for name, size in MEMORY.items():
        (row,) = (row for row in rows if f"  {name}  " in row)
        mark, share = row.split()[0], 100 * size / 140
        assert row.split()[-3:] == [f"{size:.2f}", f"{share:.1f}", "%"]
        assert abs(inside.count(mark) - 0.74 * share) < 1
    assert ("total", "80.00", "57.1", "%") in said
    assert (".", "free", "53.00", "37.9", "%") in said
    assert ("-", "kept", "free", "(memory.headroom)", "7.00", "5.0", "%") in said
    assert any("weights while they load 32.00, data workers 8.00" in row and "40.00" in row for row in rows)
    assert any(row.split()[:2] == ["disk", "16.25"] for row in rows)


def test_memory_that_is_too_small_is_said(foretold: RunPlan) -> None:
    rows = section(dataclasses.replace(foretold, memory_capacity=60 * GIB), "Memory of one GPU")
    assert any(row.split() == ["too", "much", "23.00", "38.3", "%"] for row in rows)  # 80 of 57 usable
    assert not any(" free " in row and "kept" not in row for row in rows)


def test_time_in_words(foretold: RunPlan) -> None:
    text = "\n".join(section(foretold, "Time of an average step"))
    said = " ".join(text.split())
    assert "4.00 s, 12,000 tokens/s, 4.00 queries/s" in text
    for name, value in TIME.parts.items():
        shown = f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
        assert f"{name} {shown} {25 * value:.1f} %" in said
    assert "it waits for computing on the GPUs" in said
    assert "25 %: the 8,000 TFLOP that the step needs (nothing twice)" in said  # least_s / step_s
    h200 = dataclasses.replace(foretold, gpu_kind="NVIDIA H200")
    used = f"MFU, against the 989 TFLOP/s of the data sheet: {100 * 8e15 / (4 * 2 * 989e12):.0f} %"
    assert used in " ".join(" ".join(section(h200, "Time of an average step")).split())
    limit = f"above about 9,000 tokens a GPU and micro-batch; here at most {foretold.batch.max_tokens:,}"
    assert "gathering weights" not in said  # stage 2
    sharded = dataclasses.replace(foretold, deepspeed={"zero_optimization": {"stage": 3}})
    lines = " ".join(" ".join(section(sharded, "Time of an average step")).split())
    assert f"gathering weights hides behind computing {limit}, so the GPUs wait for weights" in lines
    assert TIME.rates in said and TIME.load in said
    assert "one micro-step and the optimizer, 2.00 s (a step: 2 x 1.75 s + 500 ms)" in text
    lanes = {line.split()[0]: line for line in text.splitlines() if line.startswith(("    GPU", "    network"))}
    start = lanes["GPU"].index("forward")
    assert lanes["GPU"].index("backward") - start == round(64 * 0.25)
    assert lanes["network"].index("reduce") - start == round(64 * 0.5)
    assert "too short for a name: gather weights 20.0 ms" in said
    assert max(len(line) for line in lanes.values()) <= 80


def test_choices_and_other_numbers_of_gpus(foretold: RunPlan) -> None:
    rows = section(foretold, "Settings that were weighed, the chosen one first")[2:]
    said = " ".join(" ".join(rows).split())
    assert rows[0].split() == ["stage2", "0", "16,384", "80.00", "4.00", "s", "chosen"]
    assert all(choice.verdict in said for choice in CHOICES)
    (_, head, *rows) = section(dataclasses.replace(foretold, hosts=foretold.hosts[:1]), "The same run on other numbers")
    assert "GPU-hours" in head and len(rows) == len(SCALING)
    assert rows[0].split()[-3:] == ["does", "not", "fit"]
    assert rows[1].split()[:7] == ["2", "stage2", "80.00", "12.00", "4.00", "s", "4.00"]
    assert foretold.world_size == 2 and rows[1].endswith("<- this plan")
    assert [row.count("#") for row in rows] == [0, 20, 13]  # 4 and 2.5 hours
    uncounted = tuple(dataclasses.replace(scale, epoch_hours=None, epoch_gpu_hours=None) for scale in SCALING)
    text = "\n".join(section(dataclasses.replace(foretold, scaling=uncounted), "The same run on other numbers"))
    assert "once the rows are counted" in text and "#" not in text


def test_a_cpu_has_no_time_and_no_choices() -> None:
    made = plan()
    assert made.time is None
    for left_out in ("Time of", "Settings that were weighed", "The same run on other numbers"):
        assert left_out not in describe(made)


def test_reasons_stand_beside_variables_and_lines_are_short(foretold: RunPlan) -> None:
    name = next(name for name, source in foretold.env_sources.items() if source == "launcher")
    rows = section(foretold, "Environment")
    assert f"  launcher  {name}={foretold.env[name]}  (a reason)" in rows
    reason = "because of this, and of that, " * 6
    long = dataclasses.replace(foretold, env_reasons={name: reason})
    found = " ".join(" ".join(section(long, "Environment")).split())
    assert f"{name}={foretold.env[name]} ({' '.join(reason.split())}" in found
    for made in (foretold, long):
        assert max(len(line) for line in describe(made).splitlines()) <= WIDTH


def test_a_plan_for_programs_has_all_of_it(foretold: RunPlan) -> None:
    data = json.loads(json.dumps(plan_data(foretold)))
    assert data["memory"] == {name: size * GIB for name, size in MEMORY.items()}
    assert data["memory_capacity"] == 140 * GIB and data["host_memory"]["data workers"] == 8 * GIB
    assert data["time"]["parts"] == TIME.parts and len(data["time"]["timeline"]) == len(TIME.timeline)
    assert [choice["verdict"] for choice in data["choices"]] == [choice.verdict for choice in CHOICES]
    assert [scale["epoch_gpu_hours"] for scale in data["scaling"]] == [8.0, 8.0, 10.0]
    assert plan_from_json(plan_to_json(foretold)) == foretold
