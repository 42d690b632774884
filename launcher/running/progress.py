"""Shows a run while it runs: a live block in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from launcher.rundir import RunDir
from launcher.running.curve import Curve
from launcher.running.journal import JsonTail, Line, best_of, eval_scores, inside, read_quietly, short_path
from launcher.spec import metric_of

PLAIN_EVERY_S = 10.0
RATE_STEPS = 5  # the time left is told from the pace of so many steps on
WAIT_SHARE = 0.2  # of a step spent on waiting for data, from which on it is worth a word


@dataclass(slots=True)
class Snapshot:
    """What is known of a run at one moment."""

    phase: str = "starting"
    step: Line | None = None
    last_eval: Line | None = None
    best_eval: Line | None = None
    first: tuple[int, float] | None = None  # step and time at which the pace is measured from
    started: float = field(default_factory=time.time)
    losses: Curve = field(default_factory=Curve)
    statuses: dict[int, Line] = field(default_factory=dict)  # by rank, see `launcher.training.rankstatus`
    samples: dict[str, Line] = field(default_factory=dict)  # the monitor's last of each host
    lost: dict[str, float] = field(default_factory=dict)  # hosts that are out of contact, since when
    metric: str = "ndcg@10"  # decides which evaluation is the best
    messages: int = 0  # said so far
    warning: tuple[int, float, str] | None = None  # the last one: its number among the messages, time, text

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
        self._run = run
        self._metrics = JsonTail(run.metrics, from_end=True)  # a resumed run has a past
        self._events = JsonTail(run.events, from_end=True)
        self._failed = False
        self.snapshot.metric = metric_of(inside(read_quietly(run.plan), "config") or {})

    def update(self, statuses: dict[int, dict[str, Any]]) -> None:
        """Take in what was written since, and show it. `statuses` are the state files of the ranks.

        Never raises: that would end the run.
        """
        for line in self._events.read():
            self._guarded(self._take_event, line)
        for line in self._metrics.read():
            self._guarded(self._take_metrics, line)
        self._guarded(self._show, statuses)

    def _guarded(self, action: Callable[[Any], None], value: Any) -> None:
        """Do without what cannot be shown, whatever a line holds; a person hears of it once."""
        try:
            action(value)
        except Exception as error:
            if not self._failed:
                self._failed = True
                self.display.say(f"warning: not all can be shown: {type(error).__name__}: {error}; the run goes on")

    def _show(self, statuses: dict[int, dict[str, Any]]) -> None:
        if statuses:
            self.snapshot.phase = str(statuses[min(statuses)].get("phase", ""))
        self.snapshot.statuses = statuses
        self.display.show(self.snapshot)

    def take_sample(self, host: str, sample: dict[str, Any]) -> None:
        """Take in what the monitor of `host` saw, one line of monitor.jsonl."""
        self.snapshot.samples[host] = sample

    def _take_metrics(self, line: Line) -> None:
        snapshot = self.snapshot
        if line.get("kind") == "eval":
            snapshot.last_eval = line
            snapshot.best_eval = best_of([*([snapshot.best_eval] if snapshot.best_eval else []), line], snapshot.metric)
            self._say(f"evaluated at step {line['step']}: {render_scores(line)}")
        elif line.get("kind") == "step":
            snapshot.step = line
            snapshot.losses.add(line.get("loss"))
            if snapshot.first is None:
                snapshot.first = (line["step"], line["time"])

    def _take_event(self, line: Line) -> None:
        event = line.get("event")
        if event == "phase":
            self.snapshot.phase = str(line.get("phase"))
        elif event == "warning":
            self._say(f"warning: {line.get('text')}")
            self.snapshot.warning = (self.snapshot.messages, time.time(), str(line.get("text")))
        elif event in ("contact_lost", "contact_back"):
            self._take_contact(line)
        elif event == "resumed":
            self._take_past(line)
            self._say(f"resumed after step {line.get('step')} from {_shown(line)}")
        elif event == "profile":
            for path in line.get("paths") or ():
                self._say(f"profile: {short_path(self._run.path / path)}")
            self._say(f"to open it: {line.get('open')}")
        elif event in SENTENCES:
            self._say(SENTENCES[event](line))

    def _take_contact(self, line: Line) -> None:
        """Hosts that go out of contact and come back."""
        self._say(SENTENCES[line["event"]](line))
        self.snapshot.lost.pop(str(line.get("host")), None)
        if line["event"] == "contact_lost":
            self.snapshot.lost[str(line.get("host"))] = float(line["time"])

    def _take_past(self, resumed: Line) -> None:
        """Show the curve and the best evaluation of the part of the run that is continued."""
        last = resumed.get("step") or 0
        lines = [x for x in JsonTail(self._run.metrics).read() if isinstance(x.get("step"), int) and x["step"] <= last]
        self.snapshot.losses = Curve()
        for line in {line["step"]: line for line in lines if line.get("kind") == "step"}.values():
            self.snapshot.losses.add(line.get("loss"))
        evals = {line["step"]: line for line in lines if line.get("kind") == "eval"}.values()
        self.snapshot.best_eval = best_of(evals, self.snapshot.metric)

    def _say(self, text: str) -> None:
        self.snapshot.messages += 1
        self.display.say(text)


def render_scores(line: Line) -> str:
    """The metrics of an evaluation in one line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in eval_scores(line).items())


def render_numbers(step: Line) -> str:
    """Loss and speed of a step in one line."""
    return "  ".join(part for _, part in number_parts(step))


def number_parts(step: Line) -> list[tuple[int, str]]:
    """Loss and speed of a step, each with its importance: 0 is kept longest where room is short."""
    parts = [(0, f"loss {_number(step.get('loss'), '.4f')}"), (3, f"lr {_number(step.get('lr'), '.2e')}")]
    if step.get("grad_norm") is not None:
        parts.append((2, f"grad norm {step['grad_norm']:.3g}"))
    parts.append((1, f"{_number(step.get('queries_per_s'), ',.1f')} queries/s"))
    parts.append((2, f"{_number(step.get('tokens_per_s'), ',.0f')} tokens/s"))
    share = wait_share(step)
    if share > WAIT_SHARE:
        parts.append((0, f"data wait {share:.0%}"))
    if step.get("skipped"):
        parts.append((0, f"{step['skipped']} steps skipped (gradient not finite)"))
    if (step.get("bad_steps") or 0) > (step.get("skipped") or 0):
        parts.append((0, f"{step['bad_steps']} bad steps (loss not finite, 0, or skipped)"))
    if step.get("loss_scale"):
        parts.append((3, f"loss scale {step['loss_scale']:g}"))
    return parts


def fitting(parts: Sequence[tuple[int, str]], columns: int, gap: int = 2) -> list[str]:
    """The texts that fit in one line; the least important go first, the last one stays whatever its length.

    Example:
        >>> fitting([(0, "loss 0.5"), (2, "lr 1e-3"), (1, "30 queries/s")], 22)
        ['loss 0.5', '30 queries/s']
    """
    kept = [part for part in parts if part[1]]
    while len(kept) > 1 and sum(len(text) + gap for _, text in kept) - gap > columns:
        worst = max(importance for importance, _ in kept)
        kept.pop(max(index for index, part in enumerate(kept) if part[0] == worst))
    return [text for _, text in kept]


def wait_share(step: Line) -> float:
    """Part of a step in which a rank waited for its data."""
    wait_s, step_s = step.get("data_wait_s"), step.get("step_s")
    return wait_s / step_s if wait_s and step_s else 0.0


def render_clock(seconds: float) -> str:
    """A duration as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def render_time(seconds: float | None) -> str:
    """Time left as h:mm:ss; empty when it is not known."""
    return "" if seconds is None else f"{render_clock(seconds)} left"


SENTENCES: dict[str, Callable[[Line], str]] = {
    "checkpoint": lambda line: f"saved step {line.get('step')}: {_shown(line)}",
    "export": lambda line: f"exported: {_shown(line)}",
    "early_stop": lambda line: (
        f"stopped early at step {line.get('step')}: {line.get('evaluations')} evaluations in a row without a new best"
    ),
    "contact_lost": lambda line: f"contact with {line.get('host')} is lost ({line.get('reason')}): trying again",
    "contact_back": lambda line: f"contact with {line.get('host')} is back after {line.get('seconds', 0):.0f} s",
    "tracker": lambda line: f"{line.get('name')}: {line.get('where')}",
}


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


def make_display(out: IO[str]) -> Display:
    """A live display in a terminal that can redraw, a plain one elsewhere."""
    if not out.isatty() or os.environ.get("TERM") in (None, "", "dumb"):
        return PlainDisplay(out)

    from launcher.running.live import LiveDisplay  # it imports rich, which a pipe does without

    return LiveDisplay(out)
