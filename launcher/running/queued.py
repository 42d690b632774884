"""What Slurm's queue knows of a run that was handed to it, before its first rank starts and between two starts."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass

from launcher.rundir import RunDir
from launcher.running.journal import inside, read_quietly

ASK_S = 20.0  # a busy controller answers late
KNOWN_S = 3.0  # who looks at a run again and again asks the controller no more often
_WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_WORKS = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")


@dataclass(frozen=True, slots=True)
class Answer:
    """What squeue says of a job."""

    state: str | None  # as Slurm has it (PENDING, RUNNING, ...); None when the job has ended, or nobody has answered
    text: str  # that in words
    heard: bool = True  # whether anybody has answered

    @property
    def waits(self) -> bool:
        """Whether the job is yet to start."""
        return self.state in _WAITS

    @property
    def works(self) -> bool:
        """Whether its script runs, or is about to."""
        return self.state in _WORKS


_answers: dict[tuple[str, Answer], float] = {}  # what was said of which job -> when


def was_submitted(run: RunDir) -> bool:
    """Whether the folder was handed to Slurm."""
    return (run.slurm / "job.json").is_file()


def is_new(run: RunDir) -> bool:
    """Whether the folder was handed to Slurm and no start of the run has left anything in it yet."""
    return was_submitted(run) and not run.plan.exists()


def job_of(run: RunDir) -> str | None:
    """Number of the job that is to run it; None when it has none (yet), or is the job in which this process runs."""
    number = inside(read_quietly(run.slurm / "job.json"), "job_id")
    own = os.environ.get("SLURM_JOB_ID")
    return number if isinstance(number, str) and number.isdecimal() and number != own else None


def ask(job: str) -> Answer:
    """What the queue says of a job."""
    for (about, answer), when in _answers.items():
        if (about == job or not answer.heard) and time.monotonic() - when < KNOWN_S:
            return answer
    answer = _ask(job)
    _answers[job, answer] = time.monotonic()
    return answer


def _ask(job: str) -> Answer:
    code, said = _run(["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"])
    if code is None or (code != 0 and "nvalid job id" not in said):  # Slurm forgets a job some minutes after its end
        return Answer(None, said, heard=False)
    state, _, reason = (said if code == 0 else "").partition(" ")
    if state not in (*_WAITS, *_WORKS):
        return Answer(None, f"its Slurm job {job} is gone")
    return Answer(state, f"Slurm job {job}: {state}{f' ({reason})' if reason not in ('', 'None') else ''}")


def cancel_waiting(job: str) -> str:
    """Take a job out of the queue unless it has started meanwhile; why that failed, empty when it did not."""
    return _scancel(["--state=PENDING", job])


def stop_working(job: str) -> str:
    """Have a job that works finish the step and save; why that failed, empty when it did not."""
    return _scancel(["--signal=TERM", "--batch", job])


def _scancel(words: list[str]) -> str:
    code, said = _run(["scancel", *words])
    _answers.clear()  # they are no longer true
    return "" if code == 0 else said or f"scancel ends with {code}"


def _run(argv: list[str]) -> tuple[int | None, str]:
    """Exit code and last words of one of Slurm's programs; None when it could not be run to its end."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except FileNotFoundError:
        return None, f"this machine has no {argv[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip()
