"""Weights & Biases: one run of a project, continued by its id; only numbers and the configuration are sent."""

from __future__ import annotations

from collections.abc import Sequence

import wandb

from launcher.running.journal import short_path
from launcher.running.scalars import Record
from launcher.running.trackers import Ending, Subject

# Nothing but what is handed over: no code, git state, packages, program arguments, console, nor a monitor of its own.
QUIET = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
KILLED = 255  # what wandb itself reports after Ctrl-C


def start(subject: Subject) -> WandbRun:
    """Open the run, or the same one again after a resume."""
    return WandbRun(subject)


class WandbRun:
    """A run on the server, or in a folder when WANDB_MODE=offline."""

    def __init__(self, subject: Subject) -> None:
        settings = wandb.Settings(**{key: QUIET[key] for key in QUIET if key in wandb.Settings.model_fields})
        self._run = wandb.init(
            project=subject.project,
            name=subject.name,
            id=subject.id,
            resume="allow",
            dir=subject.folder,
            config=dict(subject.config),
            settings=settings,
        )
        # An axis of our own: on wandb's, steps that a resumed run takes again would be dropped.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.id: str | None = self._run.id
        folder = short_path(self._run.settings.sync_dir)
        self.where: str | None = self._run.url or f"offline; to upload it later: wandb sync {folder}"

    def log(self, records: Sequence[Record]) -> None:
        """Queue; wandb's own process sends."""
        for record in records:
            if record.values:
                self._run.log({**record.values, "step": record.step})

    def finish(self, ending: Ending) -> None:
        """Set the summary and the state that the page shows."""
        self._run.summary.update({"outcome": ending.status, **{f"best/{k}": v for k, v in ending.best.items()}})
        if ending.text:
            self._run.summary.update({"failure": ending.text})
        code = 0 if ending.status == "done" else (ending.exit_code or 1) if ending.status == "failed" else KILLED
        self._run.finish(exit_code=code)
