"""The demo on GPUs through `python -m launcher`: it learns as on the CPU, and its folder tells about the GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir import RunDir, read_json

STEPS = 200


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("gpus", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (1, 2)])
def test_the_demo_learns_on_gpus(gpus: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    keys = {"run.dir": run.path, "gpus": gpus, "train.max_steps": STEPS, "logging.monitor_every_s": 1}
    keys |= {"eval.every_steps": "null", "checkpoint.every_steps": "null"}
    command = [sys.executable, "-m", "launcher", *(f"{key}={value}" for key, value in keys.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    plan, outcome = read_json(run.plan), read_json(run.outcome)
    assert (plan["device"], plan["precision"], len(plan["hosts"][0]["gpus"])) == ("cuda", "bf16", gpus)
    assert outcome["status"] == "done" and run.export.is_dir()

    lines = json_lines(run.metrics)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    values = [line["eval/ndcg@10"] for line in lines if line["kind"] == "eval"]
    assert values[0] < 0.6 and values[-1] > 0.62  # chance is 0.49

    last = steps[-1]
    assert 0 < last["memory_gib"] <= last["memory_reserved_gib"] < 8
    assert len(last["ranks"]["tokens"]) == len(last["ranks"]["memory_gib"]) == gpus
    assert all(
        0 < line["forward_s"] + line["backward_s"] + line["optimizer_s"] < line["step_s"] * 1.1 for line in steps
    )

    samples = [sample for sample in json_lines(run.monitor) if sample["gpus"]]
    assert samples and all(len(sample["gpus"]) == gpus for sample in samples)
    busiest = max((gpu for sample in samples for gpu in sample["gpus"]), key=lambda gpu: gpu["memory_used_gib"])
    assert busiest["memory_used_gib"] > last["memory_gib"] and busiest["memory_total_gib"] > 8
    page = run.report.read_text(encoding="utf-8")
    assert len(page) > 100_000 and json.dumps(plan["gpu_kind"])[1:-1] in page
