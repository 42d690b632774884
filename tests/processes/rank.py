"""A rank without torch: `rank.py train --plan RUN/plan.json [RANK:DEED ...]` steps until told to stop, saves, leaves.

It goes on from the plan's checkpoint. A deed happens at step 3 of that rank, unless it has gone on: raise, config,
full, kill9, segfault, exit0, stop, wait (for a minute), killparent. Others hold from the start: deaf (ignores SIGTERM),
load (for a minute), helper (has a child that outlives it), die (fails before its log is open). abort comes after the
end, which `steps=N` sets.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launcher.errors import ConfigError, LauncherError, MachineError
from launcher.rundir import RunDir, append_json, checkpoint_step
from launcher.training.rankstatus import RankStatus

STEP_S = 0.05


def main() -> int:
    arguments = sys.argv[sys.argv.index("--plan") + 1 :]
    rank, run = int(os.environ["RANK"]), RunDir(Path(arguments[0]).parent)
    deeds = {deed for number, _, deed in (word.partition(":") for word in arguments[1:]) if number == str(rank)}
    total = next((int(word[6:]) for word in arguments if word.startswith("steps=")), 1_000_000)
    if "die" in deeds:
        raise ImportError("no such library")
    status = RankStatus.open(run, rank, os.environ.get("HOST", "localhost"))
    print(f"rank {rank} is here")
    if "deaf" in deeds:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "helper" in deeds:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    if "load" in deeds:
        time.sleep(60)
    try:
        return train(status, run, rank, total, deeds)
    except LauncherError as error:
        status.fail(error, error.exit_code)
        return error.exit_code
    except Exception as error:
        status.fail(error, 4)
        return 4


def train(status: RankStatus, run: RunDir, rank: int, total: int, deeds: set[str]) -> int:
    resumed = json.loads(run.plan.read_text()).get("resume_from") if run.plan.exists() else None
    if rank == 0 and not resumed:
        evaluate(run, 0, 0.49)
    for step in range(checkpoint_step(Path(resumed)) + 1 if resumed else 1, total + 1):
        time.sleep(STEP_S)
        status.update(state="running", step=step, phase="training")
        if rank == 0:
            line = {"kind": "step", "step": step, "total_steps": total, "epoch": 0.0, "loss": 2.0 / step, "lr": 1e-3}
            line |= {"grad_norm": 1.0, "queries_per_s": 20.0, "tokens_per_s": 900.0, "step_s": STEP_S, "skipped": 0}
            append_json(run.metrics, line | {"time": time.time()})
        if step == 3 and not resumed:
            do(deeds)
        if status.stop_requested:
            save(run, step, rank)
            status.update(state="stopped", phase="stopped")
            return 0
    if rank == 0:
        evaluate(run, total, 0.97)
    status.update(state="done", phase="done")
    if "abort" in deeds:
        time.sleep(0.5)
        os.abort()
    return 0


def do(deeds: set[str]) -> None:
    if "raise" in deeds:
        raise ValueError("row 7 has no positive document")
    if "config" in deeds:
        raise ConfigError("dataset.max_length=4 is shorter than the prompt")
    if "full" in deeds:
        raise MachineError("/runs/x: No space left on device")
    if "kill9" in deeds:
        os.kill(os.getpid(), signal.SIGKILL)
    if "segfault" in deeds:
        ctypes.string_at(0)
    if "exit0" in deeds:
        os._exit(0)
    if "stop" in deeds:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "wait" in deeds:
        time.sleep(60)
    if "killparent" in deeds:
        os.kill(os.getppid(), signal.SIGKILL)


def evaluate(run: RunDir, step: int, score: float) -> None:
    append_json(run.metrics, {"kind": "eval", "step": step, "eval/ndcg@10": score, "groups": 8, "time": time.time()})


def save(run: RunDir, step: int, rank: int) -> None:
    if rank == 0:
        folder = run.checkpoint(step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "COMPLETE").write_text("")
        append_json(run.events, {"time": time.time(), "event": "checkpoint", "step": step, "path": str(folder)})


if __name__ == "__main__":
    sys.exit(main())
