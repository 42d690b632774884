"""Finds run folders and says what a run is doing, by what lies in its folder and which of its processes live."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.rundir import RunDir, read_json
from launcher.running.agent import find_run
from launcher.running.supervisor import Supervisor, read_supervisor

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class State:
    """What a run is doing, seen from outside."""

    name: str  # running | ending | lost | unknown, or the outcome's status
    text: str
    supervisor: Supervisor | None

    @property
    def over(self) -> bool:
        """Whether nothing of it lives."""
        return self.name not in ("running", "ending", "unknown")


def find_state(run: RunDir) -> State:
    """Whether the run lives, by its processes; how it ended, by its outcome."""
    supervisor = read_supervisor(run)
    if supervisor is not None and supervisor.alive:
        return State("running", f"running, supervised by process {supervisor.pid}", supervisor)
    outcome = read_object(run.outcome)
    if outcome is not None:
        first = (outcome.get("first_failure") or {}).get("text")
        text = f"{outcome.get('status')} (exit code {outcome.get('exit_code')}){f': {first}' if first else ''}"
        return State(str(outcome.get("status")), text, supervisor)
    if supervisor is None:
        return State("lost", "never started", None)
    if not supervisor.here:
        text = f"started on {supervisor.host}; whether it runs cannot be seen from here"
        return State("unknown", text, supervisor)
    left = find_run(supervisor.run_id)
    if left:
        text = f"its launching process is gone; {len(left)} processes of it still live and are being ended"
        return State("ending", text, supervisor)
    return State("lost", "ended without an outcome: its launching process was killed", supervisor)


def find_folder(name: str, root: str) -> RunDir:
    """The run folder that a person means: a path, a name below `root`, or `latest`; ConfigError if there is none."""
    known = list_runs(root)
    if name == LATEST:
        if not known:
            raise _no_run(f"no run in {Path(root).absolute()}", "python -m launcher")
        return known[0]
    for path in (Path(name), Path(root, name)):
        if path.is_dir():
            if not (path / "plan.json").exists():
                raise _no_run(f"{path} is no run folder: it has no plan.json", "python -m launcher status")
            return RunDir(path)
    names = [run.path.name for run in known[:3]]
    raise _no_run(f"no run folder {name}, here or in {root}", *(names or ["python -m launcher"]))


def list_runs(root: str) -> list[RunDir]:
    """Run folders below `root`, the newest first."""
    plans = sorted(Path(root).glob("*/plan.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [RunDir(path.parent) for path in plans]


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None when the file is missing, ConfigError when it is damaged."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _no_run(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise _no_run(f"{path} holds no JSON object")
    return value


def _no_run(text: str, *tries: str) -> ConfigError:
    return ConfigError(Problem(text, tries=tries), title="with this run folder")
