"""SwanLab: one experiment of a project; only numbers and the configuration are sent."""

from __future__ import annotations

from collections.abc import Sequence

import swanlab

from launcher.running.journal import short_path
from launcher.running.scalars import Record
from launcher.running.trackers import Ending, Subject

# No git state, packages, hardware, console, nor a monitor of its own.
QUIET = ("hardware", "runtime", "requirements", "conda", "git", "monitor")
STATES = {"done": "success", "failed": "crashed"}


def start(subject: Subject) -> SwanlabRun:
    """Open the experiment, or the same one again after a resume."""
    return SwanlabRun(subject)


class SwanlabRun:
    """An experiment on the server, or in a folder when SWANLAB_MODE is offline or local."""

    def __init__(self, subject: Subject) -> None:
        settings = swanlab.Settings(
            interactive=False,
            probe=swanlab.Settings.Probe(**dict.fromkeys(QUIET, False)),
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
        )
        folder = subject.folder / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=subject.project,
            name=subject.name,
            log_dir=str(folder),
            config=dict(subject.config),
            settings=settings,
            **({"id": subject.id, "resume": "allow"} if subject.id else {}),
        )
        self.id: str | None = self._run.id
        kept = short_path(self._run.dir)
        later = f"offline; to upload it later: swanlab sync {kept}"
        self.where: str | None = self._run.url if self._run.mode == "online" else later

    def log(self, records: Sequence[Record]) -> None:
        """Queue; a thread of swanlab sends."""
        for record in records:
            if record.values:
                self._run.log(dict(record.values), step=record.step)

    def finish(self, ending: Ending) -> None:
        """Set the best numbers and the state that the page shows."""
        self._run.config.update({"outcome": ending.status, "best": dict(ending.best)})
        self._run.finish(state=STATES.get(ending.status, "aborted"), error=ending.text or None)
