"""Slurm: how a host of an allocation is reached, and how a run is handed to the queue from outside one."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ConfigError, ExitCode, MachineError, Problem
from launcher.planning.batch_script import batch_script, odd_path, without_owned
from launcher.planning.grammar import as_typed
from launcher.planning.nodes import allocation
from launcher.planning.secrets import is_secret
from launcher.rundir import COMPLETE, SWEEP, RunDir, complete_checkpoints, read_json, write_atomic, write_json
from launcher.running.folder import make_new, names_itself
from launcher.running.journal import short_path
from launcher.running.state import find_state
from launcher.spec import Host, RunPlan

SECRETS = "LAUNCHER_SECRETS"  # variable of a job: values of env.set that no file and no command line may hold
ASK_S = 60.0  # a busy controller answers late
# Options of the allocation that srun would take for its own, and for which it would start several tasks, give the one
# task a part of the GPUs or processors, put a number before each line, or refuse.
_INHERITED = (
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "NTASKS_PER_GPU", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET"),
    *("GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "GPU_BIND", "TRES_PER_TASK", "TRES_BIND"),
    *("CPUS_PER_TASK", "CPUS_PER_GPU", "CPU_BIND", "MEM_BIND", "HINT", "THREADS_PER_CORE", "DISTRIBUTION"),
    *("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE", "EXACT", "EXCLUSIVE", "CORE_SPEC"),
    *("LABELIO", "UNBUFFEREDIO", "STDINMODE", "STDOUTMODE", "STDERRMODE", "MULTI_PROG", "PROLOG", "EPILOG"),
)


def srun_argv(host: Host, device: str) -> tuple[str, ...]:
    """The command that runs what follows it as one task on a host of the allocation, over plain pipes.

    --overlap: several such steps share a host's processors and GPUs, and --mem=0 its memory. --gres: without it a step
    has none of the GPUs of an exclusive job, and one of those that were asked for by task. Not --unbuffered: it makes
    standard output a terminal; without it only an unfinished line waits, until it is finished or the program ends.
    """
    return (
        "env",
        *(word for name in _INHERITED for word in ("-u", f"SLURM_{name}")),
        *("-u", "SRUN_CPUS_PER_TASK", "srun"),
        *(f"--nodelist={host.name}", "--nodes=1", "--ntasks=1"),
        *("--overlap", "--mem=0", *(["--cpu-bind=none"] if _binds() else [])),
        f"--gres=gpu:{host.slots}" if device == "cuda" else "--gres=none",
        *("--export=ALL", "--input=all", "--quiet"),
    )


@functools.cache
def _binds() -> bool:
    """Whether this Slurm binds tasks to processors; where it does not, srun grumbles at --cpu-bind."""
    try:
        said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return re.search(r"^TaskPlugin\s*=.*(affinity|cgroup)", said.stdout, re.MULTILINE) is not None


def is_for_queue(plan: RunPlan) -> bool:
    """Whether the plan is to be submitted: it asks for Slurm's hosts, and this process has none of them."""
    return plan.transport == "slurm" and allocation(os.environ) is None


def preview(plan: RunPlan) -> str:
    """The script that `submit` would write, unless the run folder's name is taken until then."""
    return batch_script(plan, folder=RunDir(Path(plan.run_dir)).slurm, cwd=os.getcwd(), python=sys.executable)


def submit(plan: RunPlan, *, overrides: Sequence[str]) -> int:
    """Write script and words into the run folder, submit them, and say where to look; 0 once Slurm has the job.

    Raises ConfigError when Slurm or we refuse what was asked, MachineError when Slurm cannot be asked; then nothing
    is left behind.
    """
    _check(plan)
    run, made = _make_folder(plan)
    secrets = {name: value for name, value in plan.config.env.set.items() if is_secret(name, value)}
    try:
        _write(run, plan, overrides, secrets)
        job_id = _sbatch(run.slurm, {SECRETS: _words_of(secrets)} if secrets else {})
    except BaseException:
        shutil.rmtree(run.path if made else run.slurm)
        raise
    write_json(run.slurm / "job.json", {**read_json(run.slurm / "job.json"), "job_id": job_id})
    print("\n".join(_submitted(plan, run, job_id)))
    return int(ExitCode.OK)


def newest_checkpoint(run: RunDir) -> str | None:
    """Name of the whole checkpoint that was saved last, and its mark, which no other has."""
    found = complete_checkpoints(run)
    return f"{found[-1].name} {(found[-1] / COMPLETE).read_text().strip()}" if found else None


def _check(plan: RunPlan) -> None:
    if shutil.which("sbatch") is None:
        tries = ("the same command on a machine that has sbatch", "cluster.transport=ssh cluster.hostfile=FILE")
        raise MachineError(Problem("cluster.transport=slurm needs sbatch, and the PATH has none", tries=tries))
    path, cwd = Path(plan.run_dir), os.getcwd()
    odd = odd_path(plan.run_dir, cwd, sys.executable)
    if odd is not None:
        text = f"{odd!r} holds a character that cannot stand in a script for Slurm"
        raise ConfigError(Problem(text, tries=("run.dir=FOLDER", "start the run in another folder")))
    if (path.parent / SWEEP).is_file():
        text = "the jobs of a sweep cannot be handed to Slurm's queue one by one"
        raise ConfigError(Problem(text, tries=("salloc --nodes=1 --gpus-per-node=8, and -m inside it",)))
    if plan.resume_from is not None and (state := find_state(RunDir(path))).name in ("queued", "running", "ending"):
        text = f"{path} belongs to a run that goes on: {state.text}"
        raise ConfigError(Problem(text, tries=(f"python -m launcher stop {path}",)))
    slots = {host.slots for host in plan.hosts}
    if len(slots) > 1:
        text = f"Slurm gives each host of a job as many GPUs, and these have {', '.join(map(str, sorted(slots)))}"
        raise ConfigError(Problem(text, tries=("gpus=8",)))


def _make_folder(plan: RunPlan) -> tuple[RunDir, bool]:
    """The run folder, with an empty folder slurm/ in it, and whether it is new."""
    path = Path(plan.run_dir)
    try:
        if names_itself(plan):
            run, made = RunDir(make_new(path)), True
        else:
            run, made = RunDir(path), not path.exists()
        run.slurm.mkdir(parents=True, exist_ok=plan.resume_from is not None)
    except FileExistsError:
        text = f"{run.path} was handed to Slurm before"
        raise ConfigError(Problem(text, tries=("run.name=ANOTHER", f"resume={run.path}"))) from None
    except OSError as error:
        text = f"the run folder cannot be made: {error}"
        raise MachineError(Problem(text, tries=("run.root=FOLDER",)), title="with this machine") from None
    return run, made


def _write(run: RunDir, plan: RunPlan, overrides: Sequence[str], secrets: dict[str, object]) -> None:
    place = {"run.name", "run.root", "run.dir"}
    hidden = {f"env.set.{name}" for name in secrets}
    words = [word for word in overrides if word.partition("=")[0] not in place | hidden]
    if plan.resume_from is None:
        words.append(f"run.dir={as_typed(str(run.path))}")
    job = {"job_id": None, "words": words, "newest_checkpoint": newest_checkpoint(run)}
    write_json(run.slurm / "job.json", job)
    plan = dataclasses.replace(plan, run_dir=str(run.path))
    write_atomic(run.slurm / "job.sh", batch_script(plan, folder=run.slurm, cwd=os.getcwd(), python=sys.executable))


def _words_of(secrets: dict[str, object]) -> str:
    return json.dumps([f"env.set.{name}={as_typed(value)}" for name, value in secrets.items()])


def _sbatch(folder: Path, secrets: dict[str, str]) -> str:
    """Submit; the job's number."""
    argv = ["sbatch", "--parsable", str(folder / "job.sh")]
    env = {**without_owned(dict(os.environ)), **secrets}
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(Problem(f"sbatch: {error}", tries=("sinfo",))) from None
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
    text = "\n".join(["Slurm does not take the job:", *said])
    if any("slurm controller" in line or "onfiguration source" in line for line in said):
        raise MachineError(Problem(text, tries=("sinfo", "scontrol ping")))
    raise ConfigError(Problem(text, tries=("sinfo", "'cluster.slurm_args=[--partition=NAME,--time=08:00:00]'")))


def _submitted(plan: RunPlan, run: RunDir, job_id: str) -> list[str]:
    count, what = len(plan.hosts), "GPU" if plan.device == "cuda" else "rank"
    each = plan.hosts[0].slots
    hosts = f"{count} host{'s' if count > 1 else ''} of {each} {what}{'s' if each > 1 else ''}"
    path = short_path(run.path)
    return [
        f"submitted  Slurm job {job_id}: {hosts}",
        f"run        {path}",
        f"output     {path}/slurm/output.txt",
        f"look       python -m launcher status {path}",
        f"stop       python -m launcher stop {path}   (once it runs, it finishes the step and saves)",
        *(f"warning: {text}" for text in plan.warnings),
    ]
