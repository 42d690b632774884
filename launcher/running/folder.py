"""Makes a run folder and writes what is known before the start; two starts never share one."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ConfigError, MachineError, Problem
from launcher.planning.command import command_script, with_port
from launcher.planning.environ import render_env
from launcher.planning.hosts import render_hosts
from launcher.planning.secrets import is_secret, masked
from launcher.rundir import RunDir, write_atomic, write_json
from launcher.running.environment import describe_environment
from launcher.running.supervisor import write_supervisor
from launcher.spec import RunPlan, plan_to_json


class Folder:
    """A run folder that belongs to this process until it is closed, or the process ends."""

    def __init__(self, plan: RunPlan, lock: int, *, made: bool) -> None:
        self.plan = plan  # with this folder in it, should its name have been made longer
        self.run = run = RunDir(Path(plan.run_dir))
        self._lock = lock
        self._made = made  # by this start, not by the user beforehand
        self._asked = _contents(run)  # of the part before this one
        self._past = _keep_past(run) if run.plan.exists() else None  # plan.N.json holds that part's plan

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def go_on(self, plan: RunPlan) -> None:
        """Make room for another start of the same run; the last one's plan and outcome are kept beside."""
        self._past = _keep_past(self.run)
        self.plan = plan

    def give_back(self) -> None:
        """Undo the claim when nothing was run: remove a new folder, put the files of an old one back."""
        if self._past is not None:
            for name in ("plan", "outcome"):
                if (kept := self.run.path / f"{name}.{self._past}.json").exists():
                    os.replace(kept, self.run.path / f"{name}.json")
            for path, content in self._asked.items():
                write_atomic(path, content)
        elif self._made:
            shutil.rmtree(self.run.path)
        else:
            for path in set(self.run.path.iterdir()) - {self.run.slurm}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def claim(plan: RunPlan) -> Folder:
    """Make the folder of `plan` and lock it for this process; the earlier part of a resumed run is kept beside.

    A name that was made from the time gives way to another start's: the plan with the folder that is taken is in
    the result. Raises ConfigError when another start has a folder that the user named or, unless resumed, when a run
    is in it; MachineError when the folder cannot be made.
    """
    made = names_itself(plan) or not Path(plan.run_dir).exists()
    try:
        if names_itself(plan):
            plan = dataclasses.replace(plan, run_dir=str(make_new(Path(plan.run_dir))))
            plan = with_port(plan, plan.master_port)  # the commands name the folder
        run = RunDir(Path(plan.run_dir))
        run.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(run.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        text = f"the run folder cannot be made: {error}"
        raise MachineError(Problem(text, tries=("run.root=FOLDER",)), title="with this machine") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        text = f"{run.path} belongs to a run that goes on"
        raise ConfigError(Problem(text, tries=("run.name=ANOTHER", f"python -m launcher stop {run.path}"))) from None
    except OSError:
        pass  # a file system without locks
    if run.plan.exists() and plan.resume_from is None:
        os.close(lock)
        raise ConfigError(Problem(f"{run.path} was taken by another start", tries=("run.name=ANOTHER",)))
    return Folder(plan, lock, made=made)


def names_itself(plan: RunPlan) -> bool:
    """Whether the folder's name was made from the time, so that another would do as well."""
    return plan.config.run.dir is None and plan.config.run.name is None and plan.resume_from is None


def make_new(path: Path) -> Path:
    """Make a folder that nobody else has: `path`, else `path-2` and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found, number = path, 1
    while True:
        try:
            found.mkdir()
            return found
        except FileExistsError:
            number += 1
            found = path.with_name(f"{path.name}-{number}")


def write_files(run: RunDir, plan: RunPlan, *, config_yaml: str, overrides: Sequence[str]) -> None:
    """Write everything a claimed folder holds before its ranks start; MachineError when that fails."""
    try:
        write_supervisor(run, plan.run_id)
        for folder in (run.logs, run.ranks):
            folder.mkdir(exist_ok=True)
        write_atomic(run.plan, plan_to_json(without_secrets(plan)))
        write_atomic(run.config, config_yaml)
        write_json(run.ds_config, plan.deepspeed)
        write_atomic(run.hostfile, render_hosts(plan.hosts))
        write_atomic(run.command, command_script(plan))
        write_atomic(run.overrides, "".join(f"{override}\n" for override in overrides))
        write_json(run.environment, describe_environment(plan.config.cluster.python))
        write_atomic(run.env, render_env(masked(plan.env)))
    except OSError as error:
        text = f"the run folder cannot be written: {error}"
        raise MachineError(Problem(text, tries=("run.root=FOLDER",)), title="with this machine") from None


def without_secrets(plan: RunPlan) -> RunPlan:
    """Ranks have their environment from the agent; a secret has no place in a file."""
    env = {name: value for name, value in plan.env.items() if not is_secret(name, value)}
    host_env = {
        host: {name: value for name, value in own.items() if not is_secret(name, value)}
        for host, own in plan.host_env.items()
    }
    typed = {name: value for name, value in plan.config.env.set.items() if not is_secret(name, value)}
    config = dataclasses.replace(plan.config, env=dataclasses.replace(plan.config.env, set=typed))
    return dataclasses.replace(plan, env=env, host_env=host_env, config=config)


def _contents(run: RunDir) -> dict[Path, bytes]:
    """What `write_files` replaces, but for the plan: few and small files."""
    paths = (run.config, run.ds_config, run.hostfile, run.command, run.overrides, run.env, run.environment)
    return {path: path.read_bytes() for path in paths if path.is_file()}


def _keep_past(run: RunDir) -> int:
    number = 1
    while (run.path / f"plan.{number}.json").exists():
        number += 1
    os.rename(run.plan, run.path / f"plan.{number}.json")
    if run.outcome.exists():
        os.rename(run.outcome, run.path / f"outcome.{number}.json")
    shutil.rmtree(run.ranks, ignore_errors=True)  # states of processes that are gone
    return number
