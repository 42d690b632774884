"""What a run folder says about speed and memory, as one line of a table.

wait    share of the steps spent waiting for data      max tok  batch.max_tokens      recomp  recomputed layers
alloc   peak of tensors, worst rank, GiB               resvd    peak held by torch    GPU     peak of the whole GPU
plan    the plan's total less the CUDA context         util     per cent, mean over GPUs while training
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from launcher.estimates import CONTEXT
from launcher.rundir import RunDir
from tests.bench.steady import steady

GIB = 2**30
WARM_UP = 5  # steps that are not counted, at most a third of all


@dataclass(kw_only=True)
class Result:
    """One run; what its folder does not tell is None."""

    name: str
    gpus: int
    status: str = "-"
    note: str = ""
    steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    s_group: float | None = None  # wall time of a query with its documents, all GPUs together; median
    queries_s: float | None = None
    tokens_s: float | None = None
    step_s: float | None = None
    wait_share: float | None = None  # of step time, waiting for data
    max_tokens: int | None = None
    recomputed: int | None = None
    micro_steps: float | None = None
    allocated_gib: float | None = None  # peak of tensors, worst rank
    reserved_gib: float | None = None
    device_gib: float | None = None  # peak of the whole GPU, seen by the monitor
    planned_gib: float | None = None  # the plan's total less the CUDA context: to compare with allocated_gib
    first_step_s: float | None = None  # from the command to the end of step 1
    utilisation: float | None = None  # percent, mean over GPUs and samples while it trained
    whole_s: float | None = None

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def read_result(name: str, gpus: int, run: RunDir, begun: float, ended: float) -> Result:
    """Everything a run folder tells, of a run that failed too."""
    result = Result(name=name, gpus=gpus, whole_s=ended - begun, status="no outcome")
    if run.outcome.is_file():
        outcome = json.loads(run.outcome.read_text())
        result.status = outcome["status"]
        result.note = str((outcome.get("first_failure") or {}).get("text") or "")
    if run.plan.is_file():
        plan = json.loads(run.plan.read_text())
        result.planned_gib = (sum(plan["memory"].values()) - plan["memory"].get(CONTEXT, 0)) / GIB
        result.max_tokens, result.recomputed = plan["batch"]["max_tokens"], plan["checkpointed_layers"]
    lines = {line["step"]: line for line in _lines(run.metrics) if line["kind"] == "step"}  # the last of a step counts
    if lines:
        _read_steps(result, list(lines.values()), begun)
        _read_monitor(result, run, *(list(lines.values())[i]["time"] for i in (0, -1)))
    return result


def _read_steps(result: Result, lines: list[dict[str, Any]], begun: float) -> None:
    counted = steady(lines, WARM_UP)
    result.steps = len(lines)
    result.loss_first, result.loss_last = lines[0]["loss"], lines[-1]["loss"]
    result.first_step_s = lines[0]["time"] - begun
    result.step_s = median(line["step_s"] for line in counted)
    result.queries_s = median(line["queries_per_s"] for line in counted)
    result.tokens_s = median(line["tokens_per_s"] for line in counted)
    result.s_group = 1 / result.queries_s
    if all("data_wait_s" in line for line in counted):
        result.wait_share = sum(line["data_wait_s"] for line in counted) / sum(line["step_s"] for line in counted)
        result.micro_steps = mean(line["micro_steps"] for line in counted)
    result.allocated_gib = _largest(line.get("memory_gib") for line in lines)
    result.reserved_gib = _largest(line.get("memory_reserved_gib") for line in lines)


def _read_monitor(result: Result, run: RunDir, first: float, last: float) -> None:
    gpus = [gpu for line in _lines(run.monitor) if first <= line["time"] <= last for gpu in line["gpus"]]
    used = [gpu["util_percent"] for gpu in gpus if gpu["util_percent"] is not None]
    result.utilisation = mean(used) if used else None
    result.device_gib = _largest(gpu["memory_used_gib"] for gpu in gpus)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Lines of a JSON-lines file that are whole; none when it is not there."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:  # the last line of a run that was killed
            continue
    return found


COLUMNS = {
    "run": (lambda r: r.name, ""),
    "GPUs": (lambda r: r.gpus, "d"),
    "outcome": (lambda r: r.status, ""),
    "steps": (lambda r: r.steps, "d"),
    "loss 1": (lambda r: r.loss_first, ".4f"),
    "loss n": (lambda r: r.loss_last, ".4f"),
    "s/group": (lambda r: r.s_group, ".3f"),
    "queries/s": (lambda r: r.queries_s, ".2f"),
    "tokens/s": (lambda r: r.tokens_s, ",.0f"),
    "step s": (lambda r: r.step_s, ".2f"),
    "wait": (lambda r: r.wait_share, ".1%"),
    "max tok": (lambda r: r.max_tokens, ",d"),
    "recomp": (lambda r: r.recomputed, "d"),
    "micro": (lambda r: r.micro_steps, ".1f"),
    "alloc": (lambda r: r.allocated_gib, ".1f"),
    "resvd": (lambda r: r.reserved_gib, ".1f"),
    "GPU": (lambda r: r.device_gib, ".1f"),
    "plan": (lambda r: r.planned_gib, ".1f"),
    "alloc/plan": (lambda r: r.allocated_gib / r.planned_gib if r.allocated_gib and r.planned_gib else None, ".2f"),
    "1st step": (lambda r: r.first_step_s, ".0f"),
    "util": (lambda r: r.utilisation, ".0f"),
    "all s": (lambda r: r.whole_s, ".0f"),
}


def table(results: list[Result]) -> str:
    """Aligned columns; memory in GiB; under them what went wrong."""
    rows = [list(COLUMNS)]
    for result in results:
        values = [(get(result), form) for get, form in COLUMNS.values()]
        rows.append(["-" if value is None else format(value, form) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [
        f"{row[0]:{widths[0]}}" + "".join(f"  {c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    notes = [f"  {result.name}: {' '.join(result.note.split())[:300]}" for result in results if result.note]
    return "\n".join([*text, *notes])
