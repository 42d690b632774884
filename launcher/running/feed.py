"""`python -m launcher.running.feed RUN_DIR TRACKER`: hands what a run writes to one tracker, until the run is over.

A process of its own, since a tracker may be slow, hang or crash. It ends when its standard input does: the supervisor
closes it, also by dying. What was handed over is noted in `trackers/TRACKER.json`, so that the next part of the run,
or the same command by hand, goes on exactly there.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.rundir import RunDir, append_json, write_json
from launcher.running import scalars, trackers
from launcher.running.journal import JsonTail, Line, inside, read_quietly
from launcher.running.scalars import Record

LOOK_S = 1.0
AGAIN_S = 30.0  # after a tracker has failed
NOTE_S = 5.0  # between notes of what was handed over
MESSAGE = 200  # characters of an error that are told
END_S = 20.0  # after the supervisor is gone; it waits less long itself


def main(argv: Sequence[str]) -> int:
    """Feed one tracker; the exit code."""
    folder, name = argv
    over = threading.Event()
    run = RunDir(Path(folder))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor has them too, and says when it is over
    if run.outcome.exists():
        over.set()  # started by hand, to catch up
    else:
        threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    os.nice(5)
    feed = Feed(run, name)
    if not feed.open():
        return 1
    while not over.wait(LOOK_S):
        feed.look()
    return 0 if feed.finish() else 1


def _wait_for_end(over: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    over.set()
    time.sleep(END_S)
    os._exit(1)  # a tracker hangs


class Feed:
    """Reads the files of a run and hands records to its tracker."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.run, self.name = run, name
        self._note = run.path / "trackers" / f"{name}.json"
        noted = read_quietly(self._note)
        self._id = inside(noted, "id")
        self._tails = {path.name: JsonTail(path) for path in (run.events, run.metrics, run.monitor)}
        for file, tail in self._tails.items():
            tail.offset = int(inside(noted, "read", file) or 0)
        self._tracker: trackers.Tracker | None = None
        self._step = int(inside(noted, "step") or 0)
        self._samples: list[Line] = []  # of the monitor, since the last step
        self._records: list[Record] = []  # not handed over yet
        self._told = False
        self._again = self._noted = 0.0

    def open(self) -> bool:
        """Open the tracker; False, with a sentence for the person, when that fails."""
        plan = read_quietly(self.run.plan)
        subject = trackers.Subject(
            name=_name(self.run),
            project=str(inside(plan, "config", "logging", "project") or "launcher"),
            config=_config(plan),
            board=self.run.tensorboard,
            folder=self._note.parent,
            id=self._id,
        )
        try:
            self._note.parent.mkdir(exist_ok=True)
            self._tracker = trackers.start(self.name, subject)
        except (Exception, SystemExit) as error:
            self._tell(error, "nothing is sent there")
            return False
        self._id = self._tracker.id
        self._write_note()
        if self._tracker.where:
            self._event("tracker", name=self.name, where=_safe(self._tracker.where))
        return True

    def look(self) -> bool:
        """Hand over what is new; False when the tracker did not take it, and it has to be tried again."""
        if time.monotonic() < self._again:
            return False
        self._records += [record for line in self._read_new() if (record := self._take(line)) is not None]
        assert self._tracker is not None
        try:
            if self._records:
                self._tracker.log(self._records)
        except Exception as error:
            self._again = time.monotonic() + AGAIN_S
            self._tell(error, f"it is tried again every {AGAIN_S:.0f} s")
            return False
        self._records = []
        if time.monotonic() - self._noted > NOTE_S:
            self._write_note()
        return True

    def finish(self) -> bool:
        """Hand over the rest and how the run ended; whether all has arrived."""
        self._again, self._told = 0.0, False
        if not self.look():
            return False
        assert self._tracker is not None
        self._write_note()
        try:
            self._tracker.finish(_ending(self.run))
        except (Exception, SystemExit) as error:
            self._tell(error, "it may lack how the run ended")
            return False
        return True

    def _read_new(self) -> list[Line]:
        lines = [{**line, "file": file} for file, tail in self._tails.items() for line in tail.read()]
        return sorted(lines, key=lambda line: line["time"] if isinstance(line.get("time"), int | float) else 0.0)

    def _take(self, line: Line) -> Record | None:
        """The record of a line; None when there is nothing in it for a tracker."""
        if line["file"] == self.run.monitor.name:
            self._samples.append(line)
            return None
        if line.get("event") == "phase":
            self._samples = []  # what GPUs do while a model is loaded is no part of the next step
        step, at = line.get("step"), line.get("time")
        if not isinstance(step, int) or not isinstance(at, int | float):
            return None
        if line.get("event") == "resumed":
            restart, self._step = self._step > step, step
            return Record(step=step, time=at, values={}, restart=True) if restart else None
        self._step = max(step, self._step)
        if line.get("kind") == "step":
            values = scalars.of_step(line) | scalars.of_samples(self._samples)
            self._samples = []
            return Record(step=step, time=at, values=values)
        return Record(step=step, time=at, values=scalars.of_eval(line)) if line.get("kind") == "eval" else None

    def _write_note(self) -> None:
        self._noted = time.monotonic()
        read = {file: tail.offset for file, tail in self._tails.items()}
        with contextlib.suppress(OSError):  # a full disk: at worst something is handed over twice
            write_json(self._note, {"id": self._id, "step": self._step, "read": read})

    def _tell(self, error: BaseException, so: str) -> None:
        """Report a failure in one sentence, once; all of it stands in the log."""
        print(_safe("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        if not self._told:
            first = next(iter(_safe(str(error)).strip().splitlines()), "")[:MESSAGE]
            text = f"{self.name}: {type(error).__name__}{f': {first}' if first else ''}; {so} (logs/tracking.log)"
            self._event("warning", text=text, tracker=self.name)
        self._told = True

    def _event(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            append_json(self.run.events, {"time": time.time(), "event": event, **fields})


def _name(run: RunDir) -> str:
    """What the run is called there: its folder, with the sweep's in front where the folder is but a number."""
    path = run.path.resolve()
    return f"{path.parent.name}-{path.name}" if (path.parent / "sweep.json").exists() else path.name


def _safe(text: str) -> str:
    """The text without the passwords of addresses: MLFLOW_TRACKING_URI may hold one."""
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def _config(plan: Line) -> dict[str, Any]:
    try:
        return scalars.config_of(plan)
    except (AttributeError, TypeError):  # a plan of another version, or none
        return {}


def _ending(run: RunDir) -> trackers.Ending:
    outcome = read_quietly(run.outcome)
    best = inside(outcome, "eval", "best")
    scores = scalars.of_eval(best) if isinstance(best, dict) else {}
    return trackers.Ending(
        status=str(inside(outcome, "status") or "lost"),
        exit_code=inside(outcome, "exit_code"),
        text=str(inside(outcome, "first_failure", "text") or ""),
        best={name.removeprefix("eval/"): value for name, value in scores.items()},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
