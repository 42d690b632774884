"""A run folder that hosts do not share: results come here at its end, and a checkpoint to resume from goes there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from launcher.errors import MachineError, Problem
from launcher.rundir import COMPLETE, RunDir, checkpoint_step, complete_checkpoints, damages
from launcher.running import carry
from launcher.running.crew import HERE, Crew, GiveUp, Stopped, door_here, never, why_not, with_doors
from launcher.running.haul import Files, Load, move
from launcher.running.nodechannel import NodeChannel
from launcher.running.transport import Channel, Door
from launcher.spec import RunPlan

FROM_FIRST = ("profile", "tensorboard", "bad_rows.json", "data.json", "fusion.json")
FROM_OTHERS = ("profile",)
LIVE = ("logs", "ranks")  # come while the run goes on


def gather(
    plan: RunPlan, doors: Mapping[str, Door], shared: Mapping[str, bool], out: IO[str], *, give_up: GiveUp = never
) -> list[str]:
    """Fetch what ranks left on hosts that do not share the run folder; sentences about what could not be fetched.

    Small files first, then the export, then checkpoints from the newest on, each of them whole or not at all.
    """
    away = {host.name: doors[host.name] for host in plan.hosts if not shared.get(host.name, True)}
    if not away:
        return []
    try:
        return _Gathering(plan, away, out, give_up).run()
    except Stopped:
        return [f"fetching was stopped; the rest is in {plan.run_dir} on {', '.join(away)}"]


class _Gathering:
    """What is on the hosts, what is here, and what has to come."""

    def __init__(self, plan: RunPlan, away: Mapping[str, Door], out: IO[str], give_up: GiveUp) -> None:
        self._plan, self._away, self._out, self._give_up = plan, away, out, give_up
        self._run = RunDir(Path(plan.run_dir))
        self._sentences: list[str] = []

    def run(self) -> list[str]:
        order = {"do": "tree", "root": str(self._run.path), "hash": "some", "ignore": LIVE}
        with Crew({}, self._away, give_up=self._give_up) as crew:
            answers = crew.try_ask(dict.fromkeys(self._away, order))
        for name, answer in answers.items():
            if why := why_not(answer):
                self._sentences.append(f"nothing was fetched from {name}: {why}")
        there: dict[str, Files] = {name: answer["files"] for name, answer in answers.items() if not why_not(answer)}
        here: Files = carry.tree(order)["files"]
        first = self._plan.hosts[0].name
        self._small(there, here, first)
        if first in there:
            self._export(there[first], here, first)
            self._checkpoints(there[first], here, first)
        return self._sentences

    def _small(self, there: dict[str, Files], here: Files, first: str) -> None:
        loads = []
        for name, files in there.items():
            wanted = FROM_FIRST if name == first else FROM_OTHERS
            paths = [p for p, entry in files.items() if p.split("/")[0] in wanted and here.get(p) != entry]
            if paths:
                loads.append(self._load(name, "small files", self._run.path, self._run.path, paths, files))
        self._note(move(loads, self._out, give_up=self._give_up))

    def _export(self, there: Files, here: Files, first: str) -> None:
        files = _below(there, "export")
        if files and files != _below(here, "export"):
            self._fetch(first, self._run.export, files, lambda folder: [])

    def _checkpoints(self, there: Files, here: Files, first: str) -> None:
        marks = [Path(path) for path in there if path.startswith("checkpoints/") and path.endswith(f"/{COMPLETE}")]
        names = [mark.parent.name for mark in marks if checkpoint_step(mark.parent) is not None]
        whole = {name: _below(there, f"checkpoints/{name}") for name in names}
        for name in sorted(whole, reverse=True):
            if whole[name] != _below(here, f"checkpoints/{name}"):
                self._fetch(first, self._run.checkpoints / name, whole[name], damages)
        _rotate(self._run, set(whole), self._plan.config.checkpoint.keep_last)

    def _fetch(self, host: str, folder: Path, files: Files, check: Callable[[Path], list[str]]) -> None:
        """Bring a folder here, which appears whole or not at all."""
        aside = folder.with_name(f".{folder.name}.fetched")
        shutil.rmtree(aside, ignore_errors=True)  # of a fetch that was killed
        paths = sorted(files, key=lambda path: path == COMPLETE)
        try:
            failed = move(
                [self._load(host, folder.name, folder, aside, paths, files)], self._out, give_up=self._give_up
            )
            broken = [] if failed else check(aside)
            self._note(failed)
            self._sentences += [f"what came from {host} is damaged and was not kept: {text}" for text in broken[:1]]
            if not failed and not broken:
                _keep(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _load(self, host: str, what: str, root: Path, to: Path, paths: list[str], files: Files) -> Load:
        size = sum(files[path][0] for path in paths)
        return Load(
            source=self._away[host],
            target=door_here(),
            root=str(root),
            paths=paths,
            to=str(to),
            size=size,
            label=f"{what} from {host}",
        )

    def _note(self, failed: dict[str, str]) -> None:
        path = self._run.path
        self._sentences += [f"not fetched: {label}: {why}   (it is in {path} there)" for label, why in failed.items()]


def _below(files: Files, folder: str) -> Files:
    return {path[len(folder) + 1 :]: entry for path, entry in files.items() if path.startswith(f"{folder}/")}


def _keep(aside: Path, folder: Path) -> None:
    """Put a folder that came in its place, on the disk before it counts."""
    for path in (*aside.rglob("*"), aside):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(aside, folder)
    shutil.rmtree(old, ignore_errors=True)


def _rotate(run: RunDir, there: set[str], keep_last: int) -> None:
    """Remove checkpoints that were removed there: those that so many later ones of that host have replaced.

    One that the host never had, since another was the first one then, stays.
    """
    complete = complete_checkpoints(run)
    for place, folder in enumerate(complete):
        later = [other for other in complete[place + 1 :] if other.name in there]
        if folder.name not in there and len(later) >= max(1, keep_last):
            (folder / COMPLETE).unlink()  # first, so that a removal cut short leaves no damaged checkpoint
            shutil.rmtree(folder)


def place(
    plan: RunPlan,
    channels: Mapping[str, Channel | NodeChannel],
    shared: Mapping[str, bool],
    out: IO[str],
    *,
    give_up: GiveUp = never,
) -> None:
    """Send the checkpoint to resume from to each host that does not share the run folder and lacks it.

    The channels must be idle, and are again afterwards. Raises MachineError with every host that does not get it,
    and Stopped.
    """
    away = {name: channel for name, channel in with_doors(channels).items() if not shared.get(name, True)}
    if plan.resume_from is None or not away:
        return
    checkpoint = Path(plan.resume_from)
    order = {"do": "tree", "root": str(checkpoint), "hash": "some"}
    ours: Files = carry.tree(order)["files"]
    with Crew(away, give_up=give_up) as crew:
        answers = crew.ask_all(order)
        lacking = [name for name, answer in answers.items() if answer["files"] != ours]
        owners = crew.file_systems(dict.fromkeys(lacking, str(checkpoint.parent)))
        source, size = door_here(), sum(entry[0] for entry in ours.values())
        loads = [
            Load(
                source=source,
                target=away[name].door,
                root=str(checkpoint),
                paths=list(ours),
                to=str(checkpoint),
                size=size,
                whole=True,
                label=f"{checkpoint.name} to {name}",
            )
            for name in lacking
            if owners[name] == name
        ]
        failed = move(loads, out, give_up=give_up)
    if failed:
        problems = [Problem(f"{label} was not sent: {why}") for label, why in failed.items()]
        raise MachineError(*problems, title=f"with sending {HERE}'s checkpoint")
