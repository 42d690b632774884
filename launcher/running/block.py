"""The live block of a run as lines of text that fit a terminal: what matters less is dropped first."""

from __future__ import annotations

from rich.text import Text

from launcher.running.curve import sparkline
from launcher.running.journal import eval_scores
from launcher.running.progress import Snapshot, fitting, number_parts, render_clock, render_scores, render_time
from launcher.running.ranktable import age, host_lines, rank_lines

BAR = 40  # columns at most
CURVE = 60
HIDDEN_AFTER = 5  # messages after which a warning may have scrolled away

Row = tuple[int, Text]  # importance, 0 is kept longest


def compose(snapshot: Snapshot, *, columns: int, rows: int, now: float, ascii_only: bool = False) -> list[Text]:
    """The lines of the block, at most `rows` of at most `columns` cells each."""
    found: list[Row] = [(0, _headline(snapshot, columns, now, ascii_only))]
    if snapshot.step:
        found.append((1, Text("  ".join(fitting(_numbers(snapshot), columns)))))
    if not ascii_only and len(snapshot.losses.means(2)) > 1:
        found.append((4, _curve(snapshot, columns)))
    found += [(3, Text(text)) for text in _evaluation(snapshot, columns)]
    found += host_lines(snapshot, now)
    if snapshot.warning and snapshot.messages - snapshot.warning[0] >= HIDDEN_AFTER:
        text = f"last warning, {age(now - snapshot.warning[1])} ago: {snapshot.warning[2]}"
        found.append((5, Text(text, style="yellow")))
    found += rank_lines(snapshot, columns, rows - len(found), now)
    kept = sorted(sorted(range(len(found)), key=lambda index: found[index][0])[: max(1, rows)])
    lines = [found[index][1] for index in kept]
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


def _headline(snapshot: Snapshot, columns: int, now: float, ascii_only: bool) -> Text:
    elapsed = render_clock(now - snapshot.started)
    total = snapshot.total
    if snapshot.step is None or not total:
        return Text.assemble((snapshot.phase, "bold"), f"  {elapsed} elapsed")
    epoch = snapshot.step.get("epoch")
    parts = [
        (0, snapshot.phase),
        (1, f"{'#' * 10}"),  # the least room for the bar
        (2, f"{snapshot.done / total:.0%}"),
        (0, f"{snapshot.done}/{total}"),
        (4, f"epoch {epoch:.2f}" if isinstance(epoch, int | float) else ""),
        (3, f"{elapsed} elapsed"),
        (1, "" if snapshot.phase == "ended" else render_time(snapshot.seconds_left(now))),
    ]
    phase, *rest = fitting(parts, columns)
    line = Text(phase, style="bold")
    if rest and rest[0] == parts[1][1]:
        room = columns - len(phase) - sum(len(text) + 2 for text in rest[1:]) - 2
        line.append("  ").append_text(_bar(snapshot.done / total, min(BAR, room), ascii_only))
        rest = rest[1:]
    return line.append("".join(f"  {text}" for text in rest), style="not bold")


def _bar(share: float, width: int, ascii_only: bool) -> Text:
    full = min(width, int(share * width))
    done, left = ("#", "-") if ascii_only else ("━", "─")
    return Text.assemble((done * full, "not bold green"), (left * (width - full), "not bold dim"))


def _numbers(snapshot: Snapshot) -> list[tuple[int, str]]:
    step = snapshot.step or {}
    parts = number_parts(step)
    if isinstance(step.get("step_s"), int | float):
        parts.insert(len(parts) - bool(step.get("skipped")), (3, f"{step['step_s']:.3g} s/step"))
    return parts


def _curve(snapshot: Snapshot, columns: int) -> Text:
    losses = snapshot.losses
    ends = f"  min {losses.least:.4f}  last {losses.last:.4f}"
    room = min(CURVE, columns - len("loss  ") - len(ends))
    return Text.assemble("loss  ", (sparkline(losses.means(max(1, room))), "cyan"), ends)


def _evaluation(snapshot: Snapshot, columns: int) -> list[str]:
    """Last and best evaluation, in one line where they fit."""
    last, best, metric = snapshot.last_eval, snapshot.best_eval, snapshot.metric
    parts: list[tuple[int, str]] = []
    if last:
        short = f"last eval, step {last['step']}: {metric} {eval_scores(last).get(metric, float('nan')):.4f}"
        whole = f"last eval, step {last['step']}: {render_scores(last)}"
        parts.append((0, whole if len(whole) <= columns else short))
    if best and best is not last:
        parts.append((1, f"best, step {best['step']}: {metric} {eval_scores(best).get(metric, float('nan')):.4f}"))
    return ["  ".join(fitting(parts, columns))] if parts else []
