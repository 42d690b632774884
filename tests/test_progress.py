"""What a person sees while a run goes on: often enough, never a line for each fast step."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from launcher.rundir import RunDir, append_json
from launcher.running.journal import JsonTail
from launcher.running.progress import LiveDisplay, PlainDisplay, Progress, Snapshot, make_display, render_time


def step(number: int, at: float = 0.0) -> dict[str, object]:
    line = {
        "kind": "step",
        "step": number,
        "total_steps": 50,
        "loss": 0.5,
        "lr": 0.003,
        "grad_norm": 1.25,
        "skipped": 0,
    }
    return {**line, "skipped": 0, "queries_per_s": 31.0, "tokens_per_s": 4200.0, "time": at}


def test_plain_lines_are_few(tmp_path: Path) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    progress = Progress(run, PlainDisplay(out))
    append_json(run.events, {"time": 0.0, "event": "phase", "phase": "loading model"})
    progress.update({})
    for number in range(1, 51):
        append_json(run.metrics, step(number, time.time()))
        progress.update({0: {"phase": "training"}})
    append_json(run.metrics, {"kind": "eval", "step": 50, "eval/ndcg@10": 0.97, "groups": 8})
    progress.update({0: {"phase": "evaluating"}})
    lines = out.getvalue().splitlines()
    assert lines[0] == "loading model"
    assert lines[1] == "step 1/50  loss 0.5000  lr 3.00e-03  grad norm 1.25  31.0 queries/s  4,200 tokens/s"
    assert lines[2].startswith("step 50/50")
    assert lines[3:] == ["evaluated at step 50: ndcg@10 0.9700"]


def test_past_of_a_resumed_run_is_not_shown_again(tmp_path: Path) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    append_json(run.metrics, step(7))
    progress = Progress(run, PlainDisplay(out))
    progress.update({})
    assert "step 7" not in out.getvalue()


def test_time_left_counts_evaluations_and_saves() -> None:
    snapshot = Snapshot(step=step(20, at=200.0), first=(10, 100.0))  # 10 s a step, whatever a step itself took
    assert snapshot.seconds_left(now=205.0) == 295.0
    assert Snapshot(step=step(11, at=200.0), first=(10, 100.0)).seconds_left(now=200.0) is None
    assert render_time(3725.0) == "1:02:05 left"


def test_half_written_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    tail = JsonTail(tmp_path / "metrics.jsonl")
    tail.path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with open(tail.path, "a") as file:
        file.write('ep": 2}\nnot json\n')
    assert tail.read() == [{"step": 2}]


def test_terminal_gets_a_live_block(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writer, "w") as terminal:
        display = make_display(terminal)
        assert isinstance(display, LiveDisplay)
        display.say("saved step 3")
        display.show(Snapshot(phase="training", step=step(3)))
        display.close()
        text = os.read(reader, 65536).decode()
    os.close(reader)
    for part in ("saved step 3", "training", "3/50", "loss 0.5000"):
        assert part in text
