"""The errors a person may see, and the exit code that says who must act."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from launcher.streams import printable


class ExitCode(IntEnum):
    """The launcher's own exit codes; a rank's code and signal are in outcome.json."""

    OK = 0
    INTERNAL = 1  # a mistake of ours
    CONFIG = 2  # the user edits the configuration or the data
    MACHINE = 3  # a machine must be fixed
    TRAINING = 4  # a rank failed
    RETRY = 75  # the same command may succeed later
    INTERRUPTED = 130  # Ctrl-C; a checkpoint was saved when training had begun
    TERMINATED = 143  # SIGTERM or SIGHUP; likewise


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing the user must change: what is wrong, where it came from, what to type.

    `text` names the value and what is allowed; `where` is a file (with line) or empty; `tries` are
    lines a person can type (`zero=stage2`) or do ("make the folder writable").
    """

    text: str
    where: str = ""
    tries: tuple[str, ...] = ()

    def render(self) -> str:
        """The problem as indented lines, `try` lines last."""
        where = f"    ({self.where})" if self.where else ""
        head, *rest = f"{self.text}{where}".splitlines()
        lines = [f"  {head}", *(f"    {line}" for line in rest)]
        return "\n".join(lines + [f"     try  {line}" for line in self.tries])


class LauncherError(Exception):
    """Base of every error shown without a traceback; carries all problems found, not the first."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, *problems: Problem | str, title: str = "with this run") -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p) for p in problems)
        self.title = title
        super().__init__(self.render())

    def render(self) -> str:
        """The whole message: a count, then each problem with what to type."""
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} {self.title}:"
        return printable("\n".join([head, *(p.render() for p in self.problems)]))


class ConfigError(LauncherError):
    """Configuration or data that the user must change before anything starts."""

    exit_code = ExitCode.CONFIG


class TrainingError(LauncherError):
    """Training itself went wrong, and would again: what was seen, and what to try."""

    exit_code = ExitCode.TRAINING


class GpuMemoryError(TrainingError):
    """A GPU's memory was too small. `details` are for a restart: {"tokens": of the micro-batch, "part": ...}."""

    def __init__(self, *problems: Problem | str, title: str, details: dict[str, Any]) -> None:
        super().__init__(*problems, title=title)
        self.details = details


class MachineError(LauncherError):
    """Something on a machine (disk, permission, missing program) that must be fixed."""

    exit_code = ExitCode.MACHINE
