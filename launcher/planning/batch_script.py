"""A plan -> the sbatch script that runs it as a Slurm job, and what keeps cluster.slurm_args from being part of it.

The script holds no word of the command line: those lie beside it in job.json, and secrets travel in the environment
that sbatch gives to the job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import Problem
from launcher.spec import RunConfig, RunPlan

MARGIN_S = 60  # after finishing the step and saving: to end all ranks, write the outcome and ask for another turn
EARLY_S = 60  # by which Slurm may be early (sbatch(1), --signal)
LONGEST_S = 65535  # that Slurm takes
CPUS_PER_GPU = 8  # preparing images and video keeps that many busy

# Options of sbatch that the launcher sets, and what to type instead. Slurm takes the beginning of a name for the whole.
OWNED = {
    "nodes": "nodes=2",
    "ntasks": "gpus=8   (one task a host is started, and the ranks by it)",
    "ntasks-per-node": "gpus=8   (one task a host is started, and the ranks by it)",
    "ntasks-per-gpu": "gpus=8   (one task a host is started, and the ranks by it)",
    "gpus": "gpus=8   (of each host)",
    "gpus-per-task": "gpus=8   (of each host)",
    "gpus-per-socket": "gpus=8   (of each host)",
    "signal": "cluster.stop_grace_s=120",
    "export": "env.forward=[NAME,...]   (all variables of this shell reach the job; this says which the ranks get)",
    "export-file": "env.file=FILE",
    "chdir": "cd FOLDER, then the same command",
    "output": "run.dir=FOLDER   (the job's output lies in it)",
    "error": "run.dir=FOLDER   (the job's output lies in it)",
    "open-mode": "remove it   (a job that is started again goes on in the same file)",
    "array": "-m KEY=VALUE,VALUE inside an allocation   (a sweep)",
    "no-requeue": "remove it   (the job goes on after the time limit)",
    "wait": "python -m launcher logs -f RUN   (after the job was submitted)",
    "test-only": "python -m launcher plan ...",
    "wrap": "remove it",
    "help": "sbatch --help",
    "usage": "sbatch --usage",
    "version": "sbatch --version",
}
# Variables of sbatch that say nothing the script says; the others would win over its lines.
LEFT = frozenset(
    f"SBATCH_{name}"
    for name in (
        "ACCOUNT",
        "PARTITION",
        "QOS",
        "RESERVATION",
        "CONSTRAINT",
        "TIMELIMIT",
        "CLUSTERS",
        "WCKEY",
        "COMMENT",
    )
)
_CPU_OPTIONS = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def slurm_problems(config: RunConfig, slots: int) -> Iterator[Problem]:
    """What is wrong with cluster.slurm_args for a run with `slots` ranks on each host."""
    for word in config.cluster.slurm_args:
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not re.fullmatch(r"[a-z][a-z-]*", name) or not word.isprintable():
            text = f"cluster.slurm_args has {word!r}; each is one long option of sbatch: --NAME or --NAME=VALUE"
            yield Problem(text, "", ("'cluster.slurm_args=[--partition=gpu,--time=08:00:00]'",))
        elif (count := _gpus_of(word)) is not None:
            if count != slots:
                text = f"cluster.slurm_args has {word}, and the run has {slots} ranks a host"
                yield Problem(text, "", (f"gpus={count}",))
        elif owned := next((full for full in OWNED if full.startswith(name)), None):
            yield Problem(f"cluster.slurm_args has {word}, which the launcher sets itself", "", (OWNED[owned],))
        elif name == "time" and (limit := _seconds(value)) is not None and limit < stop_seconds(config) + EARLY_S:
            text = f"--time={value} leaves no time to train: the run is asked to stop {stop_seconds(config)} s before"
            text += f" its end (cluster.stop_grace_s and {MARGIN_S} s), and Slurm may ask {EARLY_S} s too early"
            yield Problem(text, "", ("'cluster.slurm_args=[--time=08:00:00]'", "cluster.stop_grace_s=30"))


def stop_seconds(config: RunConfig) -> int:
    """How long before its time limit a job is asked to stop."""
    return min(round(config.cluster.stop_grace_s) + MARGIN_S, LONGEST_S)


def batch_script(plan: RunPlan, *, folder: Path, cwd: str, python: str) -> str:
    """The script; `folder` is where it lies, with job.json and the job's output. What a person typed for Slurm wins."""
    options = {
        "job-name": Path(plan.run_dir).name,
        "nodes": str(len(plan.hosts)),
        "ntasks-per-node": "1",
        **_hardware(plan),
        "output": str(folder / "output.txt").replace("%", "%%"),
        "open-mode": "append",
        "export": "ALL",
        "requeue": None,
        "signal": f"B:USR2@{stop_seconds(plan.config)}",
    }
    typed = plan.config.cluster.slurm_args
    given = {_name(word) for word in typed}
    lines = [f"--{name}" + ("" if value is None else f"={value}") for name, value in options.items()]
    lines = [line for line in lines if _name(line) not in given] + list(typed)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_quoted(line)}" for line in lines),
            "# Starts the run that job.json beside this file describes, or goes on from its last whole checkpoint.",
            f"cd -- {shlex.quote(cwd)} || exit 3",
            f"exec {shlex.join([python, '-m', 'launcher', '--slurm-job', str(folder)])}",
            "",
        ]
    )


def without_owned(environ: dict[str, str]) -> dict[str, str]:
    """The environment for sbatch, without the variables that would win over lines of the script."""
    return {name: value for name, value in environ.items() if not name.startswith("SBATCH_") or name in LEFT}


def _hardware(plan: RunPlan) -> dict[str, str | None]:
    """GPUs and processors of each host; a run on processors takes whole hosts."""
    slots, typed = plan.hosts[0].slots, plan.config.cluster.slurm_args
    said = any(_name(word) in _CPU_OPTIONS for word in typed)
    if plan.device == "cpu":
        return {} if said else {"exclusive": None}
    gpus: dict[str, str | None] = (
        {} if any(_gpus_of(word) is not None for word in typed) else {"gpus-per-node": str(slots)}
    )
    return gpus if said else {**gpus, "cpus-per-task": str(CPUS_PER_GPU * slots)}


def _gpus_of(word: str) -> int | None:
    """How many GPUs of a host an option asks for: --gpus-per-node=h100:8, --gres=gpu:8; None when it is another."""
    name, _, value = word.removeprefix("--").partition("=")
    if name == "gres":
        value = next((item.removeprefix("gpu:") for item in value.split(",") if item.startswith("gpu:")), "")
    elif name != "gpus-per-node":
        return None
    match = re.fullmatch(r"(?:[A-Za-z0-9_.-]+:)?([0-9]+)", value)
    return int(match.group(1)) if match else None


def _seconds(value: str) -> int | None:
    """A time as Slurm reads it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, or with DAYS- before the hours."""
    match = _TIME.fullmatch(value)
    if match is None:
        return None
    days, *rest = (None if part is None else int(part) for part in match.groups())
    first, second, third = (part or 0 for part in rest)
    if days is not None:
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if rest[2] is not None else first * 60 + second


def _name(option: str) -> str:
    return option.removeprefix("--").partition("=")[0]


def _quoted(option: str) -> str:
    """As Slurm reads a line of a script: quotes and backslashes much as a shell's, and a `#` begins a comment."""
    return shlex.quote(option)


def odd_path(*paths: Sequence[str]) -> str | None:
    """The first path that cannot stand in a line of a script."""
    return next((str(path) for path in paths if not str(path).isprintable()), None)
