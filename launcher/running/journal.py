"""Reads what ranks write while they train: metrics.jsonl and events.jsonl."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.rundir import RunDir, read_json
from launcher.spec import is_better

Line = dict[str, Any]


class JsonTail:
    """Whole lines that were appended to a JSON-lines file since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0  # bytes that were read

    def read(self) -> list[Line]:
        """The new lines; one that is not JSON (a disk ran full) is left out."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [line for text in whole.splitlines() if (line := _parse(text)) is not None]


def read_quietly(path: Path) -> Line:
    """The JSON object in a file; empty when it is missing or damaged: showing a run must not depend on it."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def inside(value: Any, *keys: str) -> Any:
    """What lies in nested mappings under `keys`; None where one of them is missing or no mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def evaluations(run: RunDir) -> list[Line]:
    """The evaluations of a run by step; of a step that a resumed run took again, the last."""
    lines = [line for line in JsonTail(run.metrics).read() if _is(line, "eval", "step")]
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def last_step(run: RunDir) -> Line | None:
    """The last training step that was written down."""
    steps = [line for line in JsonTail(run.metrics).read() if _is(line, "step", "step", "total_steps")]
    return steps[-1] if steps else None


def eval_scores(line: Line) -> dict[str, float]:
    """The metrics of an evaluation line, without their prefix."""
    return {key[5:]: value for key, value in line.items() if key.startswith("eval/") and isinstance(value, int | float)}


def best_of(lines: Iterable[Line], metric: str) -> Line | None:
    """The evaluation line with the best value of a metric, of equal ones the first; None when none has one."""
    best, top = None, None
    for line in lines:
        value = eval_scores(line).get(metric.removeprefix("eval/"))
        if is_better(metric, value, top):
            best, top = line, value
    return best


def rank_statuses(run: RunDir) -> dict[int, Line]:
    """The state file of each rank that has written one."""
    found = {}
    for path in run.ranks.glob("[0-9]*.json"):
        try:
            found[int(path.stem)] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return dict(sorted(found.items()))


def short_path(path: str | Path) -> str:
    """The path as a person would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _is(line: Line, kind: str, *counts: str) -> bool:
    """Whether a line is of this kind and whole: has its counts."""
    return line.get("kind") == kind and all(isinstance(line.get(name), int) for name in counts)


def _parse(text: bytes) -> Line | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
