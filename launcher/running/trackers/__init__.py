"""Where metrics go: one module for each tracker, imported only in the process that feeds it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.running.scalars import Record

ALWAYS = "tensorboard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The run that is tracked."""

    name: str  # of the run folder
    project: str
    config: Mapping[str, Any]  # without secrets
    board: Path  # folder of TensorBoard's files
    folder: Path  # for what other trackers keep on disk
    id: str | None  # under which the tracker knows an earlier part of this run


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the run ended, with the numbers it is compared by."""

    status: str  # done | failed | stopped | interrupted, or lost when nobody was there to say
    exit_code: int | None
    text: str  # why it failed; else empty
    best: Mapping[str, float]


class Tracker(Protocol):
    """A run as a tracker sees it."""

    id: str | None  # to go on with after a resume
    where: str | None  # a sentence or address for people: where to look at it

    def log(self, records: Sequence[Record]) -> None:
        """Hand over; an exception means that nothing of it counts, and all comes again later."""

    def finish(self, ending: Ending) -> None:
        """Say how the run ended, and wait until everything has arrived."""


def start(name: str, subject: Subject) -> Tracker:
    """Open the tracker `name`; whatever its package raises is passed on."""
    tracker: Tracker = importlib.import_module(f"{__name__}.{name}").start(subject)
    return tracker
