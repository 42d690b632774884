"""Shows a run while it runs: a live block in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from launcher.rundir import RunDir
from launcher.running.journal import JsonTail, Line, eval_scores, short_path
from launcher.streams import silence

PLAIN_EVERY_S = 10.0
RATE_STEPS = 5  # the time left is told from the pace of so many steps on


@dataclass(slots=True)
class Snapshot:
    """What is known of a run at one moment."""

    phase: str = "starting"
    step: Line | None = None
    last_eval: Line | None = None
    first: tuple[int, float] | None = None  # step and time at which the pace is measured from

    @property
    def done(self) -> int:
        """Optimizer steps taken."""
        return int(self.step["step"]) if self.step else 0

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run; unknown before the first."""
        return int(self.step["total_steps"]) if self.step else None

    def seconds_left(self, now: float) -> float | None:
        """By the pace so far, evaluations and saves included."""
        if self.step is None or self.total is None or self.first is None or self.done - self.first[0] < RATE_STEPS:
            return None
        last = float(self.step["time"])
        pace = (last - self.first[1]) / (self.done - self.first[0])
        return max(0.0, pace * (self.total - self.done) - (now - last))


class Display(Protocol):
    """A way to show snapshots, and sentences between them."""

    def show(self, snapshot: Snapshot) -> None:
        """Show where the run is; called several times a second."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Progress:
    """Follows the files of a run and hands what is new to a display."""

    def __init__(self, run: RunDir, display: Display) -> None:
        self.display = display
        self.snapshot = Snapshot()
        self._metrics = JsonTail(run.metrics, from_end=True)  # a resumed run has a past
        self._events = JsonTail(run.events, from_end=True)

    def update(self, statuses: dict[int, dict[str, Any]]) -> None:
        """Take in what was written since, and show it. `statuses` are the state files of the ranks."""
        for line in self._events.read():
            self._take_event(line)
        for line in self._metrics.read():
            self._take_metrics(line)
        if statuses:
            self.snapshot.phase = str(statuses[min(statuses)].get("phase", ""))
        self.display.show(self.snapshot)

    def _take_metrics(self, line: Line) -> None:
        if line.get("kind") == "eval":
            self.snapshot.last_eval = line
            self.display.say(f"evaluated at step {line['step']}: {render_scores(line)}")
        elif line.get("kind") == "step":
            self.snapshot.step = line
            if self.snapshot.first is None:
                self.snapshot.first = (line["step"], line["time"])

    def _take_event(self, line: Line) -> None:
        event = line.get("event")
        if event == "phase":
            self.snapshot.phase = str(line.get("phase"))
        elif event == "checkpoint":
            self.display.say(f"saved step {line.get('step')}: {_shown(line)}")
        elif event == "resumed":
            self.display.say(f"resumed after step {line.get('step')} from {_shown(line)}")
        elif event == "export":
            self.display.say(f"exported: {_shown(line)}")
        elif event == "warning":
            self.display.say(f"warning: {line.get('text')}")


def render_scores(line: Line) -> str:
    """The metrics of an evaluation in one line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in eval_scores(line).items())


def render_numbers(step: Line) -> str:
    """Loss and speed of a step in one line."""
    parts = [f"loss {_number(step.get('loss'), '.4f')}", f"lr {_number(step.get('lr'), '.2e')}"]
    if step.get("grad_norm") is not None:
        parts.append(f"grad norm {step['grad_norm']:.3g}")
    parts.append(f"{_number(step.get('queries_per_s'), ',.1f')} queries/s")
    parts.append(f"{_number(step.get('tokens_per_s'), ',.0f')} tokens/s")
    if step.get("skipped"):
        parts.append(f"{step['skipped']} steps skipped (gradient not finite)")
    return "  ".join(parts)


def render_time(seconds: float | None) -> str:
    """Time left as h:mm:ss; empty when it is not known."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} left"


def _shown(line: Line) -> str:
    return short_path(str(line.get("path", "")))


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


@dataclass(slots=True)
class PlainDisplay:
    """One line each ten seconds, at the first and last step, and when the phase changes before training."""

    out: IO[str]
    _phase: str = ""
    _shown: float = 0.0
    _step: int = field(default=0)

    def show(self, snapshot: Snapshot) -> None:
        """Print a line when one is due."""
        now = time.monotonic()
        if snapshot.phase != self._phase and not snapshot.step:
            self.say(snapshot.phase)
        self._phase = snapshot.phase
        done, total = snapshot.done, snapshot.total
        if done == self._step or not snapshot.step:
            return
        if self._step and done != total and now - self._shown < PLAIN_EVERY_S:
            return
        self._step, self._shown = done, now
        left = render_time(snapshot.seconds_left(time.time()))
        self.say("  ".join(part for part in (f"step {done}/{total}", render_numbers(snapshot.step), left) if part))

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=self.out, flush=True)

    def close(self) -> None:
        """Nothing to put back."""


class LiveDisplay:
    """A block of up to three lines at the bottom of a terminal, drawn anew; sentences scroll above it."""

    def __init__(self, out: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out, force_terminal=True, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._started = time.monotonic()
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Draw the block."""
        from rich.console import Group
        from rich.text import Text

        lines = [self._bar(snapshot)]
        if snapshot.step:
            lines.append(Text(render_numbers(snapshot.step), no_wrap=True, overflow="ellipsis"))
        if snapshot.last_eval:
            text = f"last evaluation, step {snapshot.last_eval['step']}: {render_scores(snapshot.last_eval)}"
            lines.append(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        self._live.update(Group(*lines), refresh=True)

    def say(self, text: str) -> None:
        """Print above the block."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Leave the last block standing."""
        self._live.stop()

    def _bar(self, snapshot: Snapshot) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        if snapshot.total is None:
            elapsed = time.monotonic() - self._started
            grid.add_row(snapshot.phase, f"{elapsed:.0f} s")
            return grid
        left = render_time(snapshot.seconds_left(time.time()))
        bar = ProgressBar(total=snapshot.total, completed=snapshot.done, width=30)
        grid.add_row(snapshot.phase, f"{snapshot.done}/{snapshot.total}", bar, left)
        return grid


class SafeStream:
    """A text stream whose reader may leave (a closed terminal, `| head`) without ending the supervisor."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written; once that fails, nothing more is shown."""
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        """Of the stream; rich asks for it."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        """Of the stream; rich asks it for the size of the terminal."""
        return self._stream.fileno()


def make_display(out: IO[str]) -> Display:
    """A live display in a terminal that can redraw, a plain one elsewhere."""
    live = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveDisplay(out) if live else PlainDisplay(out)
