"""The benchmark of scaling: what it asks for, what it reads of a run, efficiencies, its table and its picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.plain import to_data
from launcher.reporting.record import read_record
from launcher.rundir import RunDir
from launcher.spec import RunPlan
from tests.bench import scaling, workloads
from tests.bench.scaling import Bench, drawing
from tests.bench.scaling_outcomes import FORETOLD, LINKS, Outcome, bare, efficiencies, measured, planned, read, table
from tests.bench.scaling_works import WORKS, Work
from tests.planning_support import gpus, plan

GIB = 2**30
TEXT, FULL = WORKS["text"], WORKS["full"]


def plan_for(work: Work, count: int, zero: str | None = None) -> RunPlan:
    """The plan of a work on H200s of one host."""
    words = work.words(count, zero or work.zeros[0], Path("rows.jsonl"))
    return plan(*words, f"gpus={count}", gpus=gpus(count), cpu_count=16)


@pytest.mark.parametrize("name", WORKS)
def test_every_work_is_a_command_that_fits_on_eight_gpus(name: str) -> None:
    found = plan_for(WORKS[name], 8, WORKS[name].zeros[-1])
    assert (found.world_size, found.batch.global_size) == (8, 8 * WORKS[name].rows)
    assert next(choice.fits for choice in found.choices if choice.verdict == "chosen")
    assert found.env["NCCL_NVLS_ENABLE"] == "0"
    saved = found.config.checkpoint.every_steps
    assert saved == (WORKS[name].steps - 1 if found.config.tune.name == "lora" else None)


def test_a_kernel_for_all_works_is_typed(tmp_path: Path) -> None:
    for attention in ("auto", "flash_attention_4"):
        bench = Bench(folder=tmp_path, small=False, data={"text": Path("rows.jsonl")}, attention=attention)
        for machine in (True, False):
            assert bench.words(TEXT, 2, "stage1", machine=machine).count(f"attention={attention}") == 1


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        (scaling, ("run", "made", "--gpus", "0"), "--gpus"),
        (scaling, ("run", "made", "--gpus", "two"), "--gpus"),
        (scaling, ("run", "made", "--works", "text,nothing"), "--works"),
        (workloads, ("made", "many"), "rows"),
        (workloads, (), "folder"),
    ],
)
def test_wrong_words_are_answered_and_write_nothing(
    script: Any,
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script.__name__, *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [script.__name__, "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0 and list(tmp_path.iterdir()) == []


def outcome(gpus: int, rate: float | None, *, work: Work = TEXT, status: str = "done", **fields: Any) -> Outcome:
    return replace(bare(work, gpus, status, ""), rate=rate, **fields)


def test_efficiency_is_against_the_fewest_gpus_with_as_many_rows() -> None:
    runs = [outcome(2, 14.0), outcome(1, None, status="failed"), outcome(8, 50.4), outcome(1, 9.0, work=FULL)]
    assert efficiencies(runs, lambda o: o.rate) == {
        (TEXT.name, 2): 1.0,
        (TEXT.name, 8): pytest.approx(0.9),
        (FULL.name, 1): 1.0,
    }
    other = [outcome(1, 8.0, rows=4), outcome(2, 14.0)]
    assert efficiencies(other, lambda o: o.rate)[TEXT.name, 2] == 1.0


def lines(file: Path, found: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in found))


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    run, made = RunDir(tmp_path), plan_for(TEXT, 2)
    run.plan.write_text(json.dumps(to_data(made)))
    run.outcome.write_text(json.dumps({"status": "done", "exit_code": 0}))
    run.environment.write_text(json.dumps({"torch": "9.9", "python": "3"}))
    seconds = [9.0, 4.0, 2.0, 2.2, 2.4, 2.2]
    step = {"kind": "step", "loss": 1.0, "micro_steps": 3, "tokens_per_s": 1e4, "data_wait_s": 0.022}
    memory = {"memory_gib": 60.0, "memory_reserved_gib": 61.0, "ranks": {"tokens": [30_000, 45_000]}}
    lines(
        run.metrics,
        [
            {**step, **memory, "step": n, "time": 100.0 + n, "step_s": s, "queries_per_s": 32 / s}
            for n, s in enumerate(seconds, start=1)
        ],
    )
    phases = [("training", 101.0), ("saving", 105.0), ("training", 106.5)]
    lines(run.events, [{"time": time, "event": "phase", "phase": name} for name, time in phases])

    found = measured(TEXT, 2, "stage1", read_record(run), begun=71.0)
    assert (found.status, found.note, found.seconds) == ("done", "", pytest.approx(2.2))
    assert found.rate == pytest.approx(32 / 2.2)
    assert (found.first_step_s, found.save_s, found.wait_share) == (30.0, 1.5, pytest.approx(0.01))
    assert (found.reserved_gib, found.tensors_gib) == (61.0, 60.0)
    assert made.time is not None
    assert (found.planned_step_s, found.planned_rate) == (made.time.step_s, made.time.queries_per_s)
    assert found.planned_tensors_gib is not None and found.planned_gib is not None
    assert found.planned_tensors_gib < found.planned_gib  # 15,000 tokens a micro-batch are less than planned for
    assert found.versions.endswith(", torch 9.9")
    short = replace(read_record(run), steps=read_record(run).steps[:2])
    assert (measured(TEXT, 2, "stage1", short, begun=71.0).rate, replace(found, step_s=(9.0, 4.0)).seconds) == (
        None,
        None,
    )
    kept = tmp_path / "kept.jsonl"
    lines(kept, [asdict(found)])
    assert read([kept]) == ([found], {})


def test_a_later_run_replaces_an_earlier_one_unless_it_failed(tmp_path: Path) -> None:
    first, second = tmp_path / "outcomes.jsonl", tmp_path / "more.jsonl"
    links = {"work": LINKS, "gpus": 4, "gbs": {"16": 150.0}}
    lines(first, [asdict(outcome(1, 6.0)), asdict(outcome(1, 7.0)), links])
    lines(second, [asdict(outcome(1, None, status="failed")), asdict(outcome(4, 27.0))])
    found, rates = read([tmp_path, second])
    assert [(o.gpus, o.rate) for o in found] == [(1, 7.0), (4, 27.0)]
    assert rates == {4: {"16": 150.0}}


def test_the_table_shows_what_came_of_what_was_foretold() -> None:
    told = [planned(TEXT, n, "stage1", to_data(plan_for(TEXT, n))) for n in (1, 2, 8)]
    one, two = (
        replace(told[0], status="done", rate=7.0),
        replace(told[1], status="done", rate=13.3, step_s=(9.0, 2.0, 2.0)),
    )
    left = bare(FULL, 1, "skipped", "needs 142.5 GiB a GPU")
    text = table([*told, one, two, left], {2: {"16": 148.2}}, WORKS.values())
    heads, *rows = text.splitlines()
    assert [row.split()[4] for row in rows[:3]] == ["1", "2", "8"], text
    assert "95.0%" in rows[1] and "6.85" in rows[0] and "13.30" in rows[1]
    assert "GiB" in heads.split() and "save" not in heads  # a column that no line has a value for is left out
    assert "all-gather on 2 GPUs, bus bandwidth, GB/s: 148 at 16 MiB" in rows
    assert f"{FULL.name}, 1 GPUs: skipped: needs 142.5 GiB a GPU" in rows
    alone = table([*told, one, two], {}, WORKS.values(), only=[two]).splitlines()
    assert len(alone) == 2 and "95.0%" in alone[1]


def test_the_picture_has_a_panel_a_work_with_both_lines() -> None:
    told = [replace(outcome(n, None, status=FORETOLD), planned_rate=7.0 * n) for n in (1, 2, 4, 8)]
    runs = [outcome(1, 7.0), outcome(2, 13.3), outcome(2, 20_000.0, work=FULL)]
    root = ET.fromstring(drawing([*told, *runs]))
    words = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in words if name in {work.name for work in WORKS.values()}] == [TEXT.name, FULL.name]
    assert "95.0% on 2" in words
    drawn = {
        element.get("class"): len(element.get("points", "").split())
        for element in root.iter("{http://www.w3.org/2000/svg}polyline")
        if element.get("class") == "told" or len(element.get("points", "").split()) > 1
    }
    assert drawn == {"told": 4, "seen": 2}
