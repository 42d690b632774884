"""What a batch job of Slurm runs: the run of job.json, from its last whole checkpoint when the job is started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from launcher.errors import MachineError, Problem
from launcher.planning.resumed import resumed_words
from launcher.rundir import RunDir, read_json
from launcher.running.slurm import ASK_S, SECRETS, newest_checkpoint


def run_job(folder: Path, run_words: Callable[[list[str]], int]) -> int:
    """Run what job.json in `folder` says through `run_words`; the exit code, for Slurm to keep.

    A run that was stopped for the time limit and has saved since this start waits in the queue again. One that failed,
    was stopped by somebody, or has nothing new to go on from does not.
    """
    run, limit = RunDir(folder.parent), TimeLimit()
    words = _words(run, read_json(folder / "job.json"))
    before = newest_checkpoint(run)
    signal.signal(signal.SIGUSR2, limit.take)
    code = run_words(words)
    if not limit.near or code == 0:
        return code
    after = newest_checkpoint(run)
    if after == before:
        text = "the job's time limit came before a checkpoint was saved; it is not queued again"
        tries = ("'cluster.slurm_args=[--time=24:00:00]'", "checkpoint.every_steps=100")
        raise MachineError(Problem(text, tries=tries), title="with this job")
    # Said before: Slurm ends this process as soon as it has taken the job back.
    step = str(after).partition(" ")[0]
    print(f"the job's time limit is near: it waits in the queue again, to go on from {step}", flush=True)
    _requeue(run)
    return code


class TimeLimit:
    """Takes Slurm's word that the time limit is near, and stops the run as SIGTERM does."""

    def __init__(self) -> None:
        self.near = False

    def take(self, number: int, frame: FrameType | None) -> None:
        """For signal.signal."""
        self.near = True
        os.kill(os.getpid(), signal.SIGTERM)


def _words(run: RunDir, job: dict[str, object]) -> list[str]:
    """The words to run with at this start of the job."""
    secrets: list[str] = json.loads(os.environ.pop(SECRETS, "[]"))
    newest = newest_checkpoint(run)
    if newest is not None and newest != job["newest_checkpoint"]:
        return resumed_words([str(run.path), *secrets])
    if job["newest_checkpoint"] is None:
        _set_aside(run)
    words = job["words"]
    assert isinstance(words, list)
    return [*words, *secrets]


def _set_aside(run: RunDir) -> None:
    """Make room for a run from the beginning; what an earlier start of the job has left is kept in slurm/."""
    left = [path for path in run.path.iterdir() if path != run.slurm]
    if not left:
        return
    number = 1
    while (run.slurm / f"start-{number}").exists():
        number += 1
    (run.slurm / f"start-{number}").mkdir()
    for path in left:
        shutil.move(path, run.slurm / f"start-{number}" / path.name)


def _requeue(run: RunDir) -> None:
    argv = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        text = f"the job's time limit is near and the run has saved, but Slurm does not queue the job again: {said}"
        resume = f"python -m launcher resume {run.path}"
        raise MachineError(Problem(text, tries=(resume,)), title="with Slurm") from None
