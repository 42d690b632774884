"""Run folders as a run on two GPUs leaves them, written by hand so that every number is known."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from launcher.rundir import COMPLETE, RunDir, write_json
from launcher.spec import RunPlan, plan_to_json
from tests import planning_support
from tests.foretold import foretell

START = 1_790_000_000.0
TRAINING = START + 60  # the first step begins here
STEP_S = 1.2
QUERIES, TOKENS = 16, 24_000
MICRO_STEPS = 2
WORDS = ("model=qwen3_vl_reranker_8b", "dataset=jsonl", "dataset.train=/home/me/train.jsonl", "train.max_steps=200")


def plan_of(folder: Path, *words: str, gpus: int = 2) -> RunPlan:
    """A plan of the 8B reranker that lives in `folder`."""
    made = foretell(planning_support.plan(*WORDS, *words, gpus=planning_support.gpus(gpus)))
    return dataclasses.replace(made, run_dir=str(folder), created_at=stamp(START))


def stamp(moment: float) -> str:
    """As outcome.json and plan.json write times."""
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="seconds")


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    """Step `step` of a run of 200: a falling loss, rank 1 slower in its forward pass, each tenth step slow."""
    seconds = STEP_S * (2 if step % 10 == 0 else 1) + 0.05 * math.sin(step)
    forward = [0.30, 0.36]
    line = {
        "kind": "step",
        "step": step,
        "total_steps": 200,
        "epoch": step / 62.5,
        "loss": 2.0 * math.exp(-step / 80) + 0.2 + 0.1 * math.sin(7 * step),
        "lr": 1e-4 * min(step / 10, 1 - step / 250),
        "grad_norm": 3 + math.sin(step),
        "queries_per_s": QUERIES / seconds,
        "tokens_per_s": TOKENS / seconds,
        "step_s": seconds,
        "skipped": 0,
        "data_wait_s": 0.06,
        "forward_s": sum(forward) / 2,
        "backward_s": 0.6,
        "optimizer_s": 0.05,
        "micro_steps": MICRO_STEPS,
        "memory_gib": 41.0 + min(step, 20) / 20,
        "memory_reserved_gib": 47.5,
        "memory_moment": "forward",
        "ranks": {
            "data_wait_s": [0.06, 0.02 + 0.01 * (step % 3)],
            "forward_s": [value + 0.004 * math.sin(step * (rank + 3)) for rank, value in enumerate(forward)],
            "backward_s": [0.6, 0.6],
            "optimizer_s": [0.05, 0.05],
            "tokens": [12_400, 11_600],
            "memory_gib": [41.0 + min(step, 20) / 20, 39.5],
            "memory_reserved_gib": [47.5, 44.0],
        },
        "time": TRAINING + step * 1.35,
    }
    return {**line, **changes}


def eval_line(step: int, ndcg: float) -> dict[str, Any]:
    """An evaluation after `step`."""
    scores = {
        "eval/ndcg@10": ndcg,
        "eval/mrr@10": ndcg - 0.05,
        "eval/recall@1": ndcg - 0.2,
        "eval/recall@5": ndcg + 0.05,
    }
    return {"kind": "eval", "step": step, **scores, "groups": 120, "time": TRAINING + step * 1.35 + 0.1}


def monitor_line(number: int, *, gpus: int = 2) -> dict[str, Any]:
    """The monitor's look after 5 seconds times `number`; GPU 1 is held back by power now and then."""
    busy = number >= 10
    cards = [
        {
            "index": gpu,
            "name": "NVIDIA H200",
            "uuid": f"GPU-{gpu}",
            "util_percent": (90 - 10 * gpu if busy else 0),
            "memory_used_gib": (50.0 + gpu if busy else 1.0),
            "memory_total_gib": 140.4,
            "sm_clock_mhz": 1980 if busy else 345,
            "memory_clock_mhz": 3201,
            "power_w": 620 + 20 * math.sin(number / 3) if busy else 75,
            "power_limit_w": 700,
            "temperature_c": min(66, 35 + number),
            "throttle": ["sw_power_cap"] if gpu == 1 and number % 9 == 0 and busy else [] if busy else ["gpu_idle"],
        }
        for gpu in range(gpus)
    ]
    return {
        "time": START + 5 * number,
        "host": "desk",
        "interval_s": 5.0,
        "cpu_percent": 35 + 10 * math.sin(number),
        "load_1m": 6.5,
        "memory": {
            "total_gib": 128.0,
            "used_gib": 20 + min(number, 30),
            "available_gib": 80,
            "swap_used_gib": 0,
            "shm_used_gib": 0.4,
        },
        "gpus": cards,
        "network": {"eth0": {"rx_mib_s": 12 + 3 * math.sin(number), "tx_mib_s": 2.0, "errors": 0, "drops": 0}},
        "infiniband": {
            f"mlx5_{n}/1": {
                "rx_mib_s": 9000 * busy + n,
                "tx_mib_s": 8900 * busy,
                "state": "ACTIVE",
                "rate_gb_s": 50,
                "errors": 3 * n,
            }
            for n in range(2)
        },
        "disk_free_gib": 500 - number / 10,
        "notes": [],
    }


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def phases(*changes: tuple[str, float]) -> list[dict[str, Any]]:
    """Events of a change of phase, at seconds after the start."""
    return [{"time": START + after, "event": "phase", "phase": name} for name, after in changes]


PHASES = phases(
    ("reading data", 10),
    ("loading model", 25),
    ("starting DeepSpeed", 45),
    ("evaluating", 50),
    ("training", 60),
    ("evaluating", 195),
    ("training", 205),
    ("saving", 330),
    ("exporting", 340),
    ("ended", 355),
)


DATA = {
    "rows": 3200,
    "bad": {"no positives": 2, "not JSON": 1},
    "images": 7,
    "videos": 0,
    "modality": {"queries": {"text": 3200, "image": 0, "video": 0, "mixed": 0}, "documents": {"image": 5, "mixed": 9}},
    "lengths": {"too_long": 4, "cut": 11, "tokens": 123456, "histogram": [[96, 128, 3000], [128, 192, 200]]},
}


def make_run(folder: Path, *words: str, steps: int = 200, plan: RunPlan | None = None) -> RunDir:
    """A run that is done: 200 steps, three evaluations, two checkpoints, a warning, a profile, a monitor."""
    run = RunDir(folder)
    run.logs.mkdir(parents=True)
    run.ranks.mkdir()
    made = plan or plan_of(folder, *words)
    run.plan.write_text(plan_to_json(made), encoding="utf-8")
    write_json(run.ds_config, made.deepspeed)
    run.config.write_text("train:\n  max_steps: 200\n")
    run.overrides.write_text("".join(f"{word}\n" for word in words))
    run.env.write_text("HF_TOKEN=***\nNCCL_DEBUG=INFO\n")
    write_json(run.environment, {"launcher": "0.1.0", "python": "3.11.9", "torch": "2.9.1"})
    write_json(folder / "bad_rows.json", [{"where": "train.jsonl:7", "reason": "no positive document"}])
    write_json(run.data, {"train": DATA, "eval": {**DATA, "rows": 12}})
    evals = [eval_line(0, 0.41), eval_line(100, 0.77), eval_line(200, 0.74)]
    lines = [step_line(step) for step in range(1, steps + 1)]
    write_lines(run.metrics, sorted([*lines, *(e for e in evals if e["step"] <= steps)], key=lambda line: line["time"]))
    happened = [
        {"time": TRAINING + 136, "event": "checkpoint", "step": 100, "path": f"{folder}/checkpoints/step-000100"},
        {"time": TRAINING + 271, "event": "checkpoint", "step": 200, "path": f"{folder}/checkpoints/step-000200"},
        {"time": TRAINING + 55, "event": "warning", "text": "3 documents of the train data lose their end"},
        {
            "time": TRAINING + 20,
            "event": "profile",
            "tool": "torch",
            "paths": ["profile/rank0.json.gz"],
            "open": "https://ui.perfetto.dev",
        },
    ]
    write_lines(run.events, sorted([*PHASES, *happened], key=lambda line: line["time"]))
    for step in (100, 200):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / COMPLETE).touch()
    write_lines(run.monitor, [monitor_line(number) for number in range(72)])
    for rank in range(2):
        write_json(
            run.rank(rank),
            {
                "rank": rank,
                "host": "desk",
                "pid": 1,
                "state": "done",
                "step": steps,
                "phase": "ended",
                "error": None,
                "time": START + 350,
            },
        )
        run.log("desk", rank).write_text("".join(f"line {n} of rank {rank}\n" for n in range(50)))
    write_outcome(run, "done", 0)
    return run


def write_outcome(
    run: RunDir, status: str, code: int, failures: list[dict[str, Any]] | None = None, **changes: Any
) -> None:
    """outcome.json, of a run that took six minutes."""
    found = failures or []
    end = {"status": status, "exit_code": code, "started": stamp(START), "ended": stamp(START + 360), "seconds": 360.0}
    write_json(
        run.outcome, {**end, "first_failure": found[0] if found else None, "failures": found, "steps": 200, **changes}
    )


def failure(run: RunDir, rank: int, text: str, traceback: str) -> dict[str, Any]:
    """An entry of outcome.json's failures."""
    error = {"type": "ValueError", "message": text, "traceback": traceback, "exit_code": 4}
    return {
        **{"host": "desk", "rank": rank, "time": stamp(START + 200), "log": str(run.log("desk", rank)), "exit_code": 4},
        **{
            "signal": None,
            "signal_name": None,
            "error": error,
            "note": "",
            "text": f"rank {rank} on desk failed: ValueError: {text}",
        },
    }


class Page(HTMLParser):
    """What a page holds: elements with their attributes, tables by title, scripts, and the text a person reads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[str] = []
        self.style = ""
        self.text = ""
        self.titles: list[str] = []
        self.best: list[str] = []  # text of the marked cells
        self._inside = ""
        self._tile_names: list[str] = []
        self._tile_values: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    @property
    def figures(self) -> dict[str, Any]:
        """The plots that are drawn, by name."""
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    @property
    def tiles(self) -> dict[str, str]:
        """The key numbers, by name."""
        return dict(zip(self._tile_names, self._tile_values, strict=True))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag != "a":  # its text is that of the cell
            self._inside = found.get("class") or tag if tag == "span" else tag
        if tag == "h3":
            self.titles.append("")
        elif tag == "tr":
            self.tables.setdefault(self.titles[-1], []).append([])
        elif tag in ("td", "th"):
            if "best" in str(found.get("class")):
                self._inside = "best"
            self.tables[self.titles[-1]][-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        """What follows is in nothing."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Put it where it belongs."""
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.style += data
        else:
            self.text += data
        if self._inside == "h3":
            self.titles[-1] += data
        elif self._inside in ("td", "th", "best"):
            if self._inside == "best":
                self.best.append(data)
            self.tables[self.titles[-1]][-1][-1] += data
        elif self._inside == "name":
            self._tile_names.append(data)
        elif self._inside == "value":
            self._tile_values.append(data)
