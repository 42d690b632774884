"""What a person sees while a run goes on: often enough, never a line for each fast step."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir import RunDir, append_json
from launcher.running.block import compose
from launcher.running.curve import Curve, sparkline
from launcher.running.journal import JsonTail
from launcher.running.live import LiveDisplay
from launcher.running.progress import PlainDisplay, Progress, Snapshot, make_display, render_time


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
    append_json(run.events, {"time": 0.0, "event": "early_stop", "step": 50, "evaluations": 3})
    progress.update({0: {"phase": "evaluating"}})
    lines = out.getvalue().splitlines()
    assert lines[0] == "loading model"
    assert lines[1] == "step 1/50  loss 0.5000  lr 3.00e-03  grad norm 1.25  31.0 queries/s  4,200 tokens/s"
    assert lines[2].startswith("step 50/50")
    assert "evaluated at step 50: ndcg@10 0.9700" in lines[3:]
    assert "stopped early at step 50: 3 evaluations in a row without a new best" in lines[3:]


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


def test_waiting_for_data_is_told_when_it_is_much(tmp_path: Path) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    progress = Progress(run, PlainDisplay(out))
    for number, wait_s in ((1, 0.5), (50, 0.1)):
        append_json(run.metrics, {**step(number), "step_s": 1.0, "data_wait_s": wait_s})
        progress.update({})
    first, last = out.getvalue().splitlines()
    assert first.endswith("4,200 tokens/s  data wait 50%")
    assert "data wait" not in last


def test_curve_keeps_its_shape_in_little_memory() -> None:
    curve = Curve()
    for number in range(10_000):
        curve.add(float(number))
    curve.add(None)
    curve.add(float("nan"))
    means = curve.means(60)
    assert 30 <= len(means) <= 60
    assert means == sorted(means) and means[0] < 200 and means[-1] > 9800
    assert (curve.least, curve.last) == (0.0, 9999.0)
    assert sparkline([1.0, 1.0]) == "▁▁"


def snapshot_of(ranks: int, now: float) -> Snapshot:
    """A run in the middle of training on hosts of eight GPUs, of which rank 1 is silent and rank 2 is hot."""
    snapshot = Snapshot(phase="training", step={**step(20, now), "epoch": 1.5, "step_s": 0.5}, first=(1, now - 19))
    snapshot.started = now - 100
    for number in range(20):
        snapshot.losses.add(1.0 / (number + 1))
    snapshot.last_eval = {"step": 20, "eval/ndcg@10": 0.5, "eval/mrr@10": 0.4}
    snapshot.best_eval = {"step": 10, "eval/ndcg@10": 0.6, "eval/mrr@10": 0.4}
    for rank in range(ranks):
        said = now - (200.0 if rank == 1 else 1.0)
        status = {"host": f"gpu-{rank // 8}", "state": "running", "phase": "training", "step": 20, "time": said}
        snapshot.statuses[rank] = status
    for host in range((ranks + 7) // 8):
        gpus = [
            {"memory_used_gib": 61.2, "memory_total_gib": 139.8, "util_percent": 98, "power_w": 412.0}
            | {"throttle": ["hw_thermal_slowdown"] if number == 2 else ["sw_power_cap"]}
            for number in range(8)
        ]
        snapshot.samples[f"gpu-{host}"] = {"gpus": gpus, "memory": {"total_gib": 64.0, "available_gib": 3.2}}
    return snapshot


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_block_fits_every_terminal(ranks: int) -> None:
    now = time.time()
    snapshot = snapshot_of(ranks, now)
    for columns in (1, 20, 59, 79, 139, 300):
        for rows in (1, 5, 9, 18, 60):
            lines = compose(snapshot, columns=columns, rows=rows, now=now)
            assert 1 <= len(lines) <= rows
            assert max(line.cell_len for line in lines) <= columns


def test_block_says_what_matters() -> None:
    now = time.time()
    wide = "\n".join(line.plain for line in compose(snapshot_of(4, now), columns=139, rows=30, now=now))
    for part in (
        "40%  20/50  epoch 1.50  0:01:40 elapsed  0:00:30 left",
        "0.5 s/step",
        "min 0.0500  last 0.0500",
        "last eval, step 20: ndcg@10 0.5000  mrr@10 0.4000  best, step 10: ndcg@10 0.6000",
        "host gpu-0: 60.8 of 64.0 GiB memory in use (95%)",
        "rank 0   training  step 20   61.2/140 GiB   98 %  412 W",
        "rank 1   training  no news for 3 min",
        "412 W  hw thermal slowdown",
    ):
        assert part in wide
    short = [line.plain for line in compose(snapshot_of(64, now), columns=59, rows=7, now=now)]
    assert short[0].startswith("training") and short[0].endswith("left")
    assert "64 ranks  64 training" in short
    assert any(line.startswith("gpu-0.1   training  no news for 3 min") for line in short)
    ascii_only = compose(snapshot_of(2, now), columns=79, rows=20, now=now, ascii_only=True)
    assert ascii_only[0].plain.isascii()


def test_failed_and_late_ranks_are_told_of_many() -> None:
    now = time.time()
    snapshot = snapshot_of(16, now)
    snapshot.statuses[9] |= {"state": "failed", "error": {"type": "OutOfMemoryError"}}
    snapshot.statuses[5]["step"] = 15
    text = "\n".join(line.plain for line in compose(snapshot, columns=100, rows=30, now=now))
    assert "16 ranks  15 training  1 failed  behind: rank 5 at step 15" in text
    assert "gpu-1.9   failed: OutOfMemoryError" in text
    assert "16 GPUs  61.2 GiB  98 %  412 W  2 slowed down by heat or power supply" in text
    assert "gpu-0  8 training  steps 15 to 20  61.2 GiB  98 %  412 W" in text
    assert "gpu-1  7 training  1 failed  step 20" in text
    assert "■!■■■■■■■✗■■■■■■" in text


def test_host_out_of_contact_is_told_until_it_is_back(tmp_path: Path) -> None:
    run, out = RunDir(tmp_path), io.StringIO()
    progress = Progress(run, PlainDisplay(out))
    now = time.time()
    append_json(run.events, {"event": "contact_lost", "host": "n2", "time": now - 40, "reason": "ssh: timed out"})
    progress.update({})
    assert [line.plain for line in compose(progress.snapshot, columns=79, rows=3, now=now)][1:] == [
        "out of contact: n2 for 40 s"
    ]
    append_json(run.events, {"event": "contact_back", "host": "n2", "time": now, "seconds": 40.2})
    progress.update({})
    assert len(compose(progress.snapshot, columns=79, rows=3, now=now)) == 1
    assert [line for line in out.getvalue().splitlines() if line != "starting"] == [
        "contact with n2 is lost (ssh: timed out): trying again",
        "contact with n2 is back after 40 s",
    ]


def test_old_warning_comes_back_into_the_block(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    progress = Progress(run, PlainDisplay(io.StringIO()))
    append_json(run.events, {"event": "warning", "text": "the disk is nearly full"})
    for saves in (0, 5):
        for number in range(saves):
            append_json(run.events, {"event": "checkpoint", "step": number, "path": "x"})
        progress.update({})
        lines = compose(progress.snapshot, columns=79, rows=20, now=time.time())
        assert any("the disk is nearly full" in line.plain for line in lines) is (saves == 5)


def test_curve_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number, loss in ((1, 3.0), (2, 2.0), (3, 9.0)):
        append_json(run.metrics, {**step(number), "loss": loss})
    append_json(run.metrics, {"kind": "eval", "step": 2, "eval/ndcg@10": 0.8})
    progress = Progress(run, PlainDisplay(io.StringIO()))
    append_json(run.events, {"event": "resumed", "step": 2, "path": "x"})
    append_json(run.metrics, {**step(3), "loss": 1.0})
    progress.update({})
    assert progress.snapshot.losses.means(60) == [3.0, 2.0, 1.0]
    assert progress.snapshot.best_eval is not None and progress.snapshot.best_eval["step"] == 2


class Terminal:
    """A pseudo-terminal with a live display, and what was written to it since the last look."""

    def __init__(self, columns: int, lines: int) -> None:
        self.reader, writer = os.openpty()
        self.resize(columns, lines)
        self.out = os.fdopen(writer, "w", encoding="utf-8")
        display = make_display(self.out)
        assert isinstance(display, LiveDisplay)
        self.display = display

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.reader, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def written(self) -> str:
        os.set_blocking(self.reader, False)
        data = b""
        try:
            while True:
                data += os.read(self.reader, 65536)
        except BlockingIOError:
            return data.decode()

    def close(self) -> None:
        self.out.close()
        os.close(self.reader)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("launcher.running.live.DRAW_S", 0.0)
    terminal = Terminal(80, 24)
    yield terminal
    terminal.close()


def test_terminal_gets_a_live_block(terminal: Terminal) -> None:
    terminal.display.say("saved step 3")
    terminal.display.show(Snapshot(phase="training", step=step(3)))
    terminal.display.close()
    text = terminal.written()
    for part in ("saved step 3", "training", "3/50", "loss 0.5000", "\x1b[1m"):
        assert part in text
    assert "\x1b[?25l" not in text  # the cursor is never hidden, so that no end can leave it so


def test_block_is_drawn_anew_only_when_it_has_changed(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("launcher.running.live.time.time", lambda: now)
    snapshot = snapshot_of(2, now)
    terminal.display.show(snapshot)
    rows = terminal.written().count("\n")
    terminal.display.show(snapshot)
    assert terminal.written() == ""
    snapshot.statuses[0]["step"] = 21
    terminal.display.show(snapshot)
    assert terminal.written().startswith(f"\r\x1b[{rows}A")
    terminal.resize(40, 24)  # the terminal folds what is wider than it
    folded = sum(-(-line.cell_len // 40) for line in compose(snapshot, columns=79, rows=18, now=now))
    terminal.display.show(snapshot)
    assert folded > rows
    assert terminal.written().startswith(f"\r\x1b[{folded}A")


@pytest.mark.parametrize("kind", ["", "dumb"])
def test_terminal_that_cannot_redraw_gets_lines(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", kind)
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as out:
        assert isinstance(make_display(out), PlainDisplay)
    os.close(reader)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal(80, 24)
    terminal.display.say("warning: \x1b[31mred")
    terminal.display.show(snapshot_of(4, time.time()))
    text = terminal.written()
    terminal.close()
    assert "warning: ?[31mred" in text
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", text) for code in found.split(";")}
    assert codes <= {"", "0", "1", "2"}  # bold and dim are no colours
