"""Stands in for one job of a sweep: takes its words as the launcher does, then does what env.set.DEED says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from launcher.running.supervisor import Supervisor, boot_id

words = json.load(sys.stdin)
values = {word.partition("=")[0]: word.partition("=")[2] for word in words}
folder = Path(values["run.dir"])
deed = values.get("env.set.DEED", "done")
folder.mkdir(exist_ok=True)
(folder / "environment.json").write_text(json.dumps([sys.argv, words, dict(os.environ)]))
os.environ["MASTER_PORT"] = "1"  # must not reach the next job


def outcome(status: str, code: int) -> None:
    (folder / "outcome.json").write_text(json.dumps({"status": status, "exit_code": code, "steps": 3}))


def stopped(number: int, frame: object) -> None:
    with open(folder / "signals", "a") as file:
        file.write(f"{number}\n")
    if deed != "deaf" or (folder / "signals").read_text().count("\n") > 1:
        outcome("stopped", 128 + number)
        sys.exit(128 + number)


print(f"deed {deed}", flush=True)
if deed == "done":
    (folder / "plan.json").write_text("{}")
    seed = int(values["train.seed"])
    step = {"kind": "step", "total_steps": 1, "step": 1, "time": time.time(), "loss": seed, "step_s": 1.0}
    scores = {"kind": "eval", "step": 1, "time": time.time(), "eval/ndcg@10": 1 / seed}
    step.update(tokens_per_s=100 * seed, queries_per_s=seed, memory_gib=2.0)
    (folder / "metrics.jsonl").write_text(json.dumps(step) + "\n" + json.dumps(scores) + "\n")
    outcome("done", 0)
elif deed == "odd":
    (folder / "plan.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(f'{{"kind": "step", "time": 1, "step": 1, "loss": 1{"0" * 400}}}\n')
    sys.exit(4)
elif deed.startswith("signal"):
    os.kill(os.getpid(), int(deed[6:]))
elif deed.isdigit():
    sys.exit(int(deed))
elif deed == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif deed == "orphan":
    run_id = f"test-{os.getpid()}"
    environment = {**os.environ, "LAUNCHER_RUN_ID": run_id}
    child = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    (folder / "orphan").write_text(str(child.pid))
    supervisor = Supervisor(os.getpid(), 0, boot_id(), "here", run_id)
    (folder / "supervisor.json").write_text(json.dumps(asdict(supervisor)))
    os.kill(os.getpid(), signal.SIGKILL)
elif deed in ("hang", "deaf"):
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, stopped)
    (folder / "ready").touch()
    time.sleep(600)
