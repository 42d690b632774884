"""Brings weights and data onto each file system once, before any rank starts."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from launcher import datafiles
from launcher.errors import ConfigError, ExitCode, MachineError, Problem
from launcher.running import carry
from launcher.running.crew import HERE, Crew, GiveUp, door_here, never, with_doors
from launcher.running.download import is_wanted
from launcher.running.haul import Files, Load, move
from launcher.running.hub import Wanted, fetch_repository
from launcher.running.meter import files_text, size_text
from launcher.running.nodechannel import NodeChannel
from launcher.running.transport import Channel, Event, close_all, open_channels
from launcher.spec import RunPlan, plan_to_json

OURS = "~/.cache/launcher"  # on the other side
MANIFEST = f"{OURS}/sent.json"  # what was sent
NAMED = 3  # files in a message


def main(plan: RunPlan, out: IO[str]) -> int:
    """The verb `fetch`: put there what is missing, and say where everything is."""
    if plan.hosts_assumed:
        text = f"nothing can be fetched for hosts that are only assumed ({plan.hosts_source})"
        raise ConfigError(Problem(text, tries=("cluster.hostfile=FILE", "nodes=1")))
    inbox: queue.Queue[Event] = queue.Queue()
    channels = {HERE: Channel(door_here(), inbox)} if _is_for_here(plan) else open_channels(plan, inbox)
    try:
        fetch(plan, channels, out)
    finally:
        close_all(list(channels.values()))
    what = [*(wanted.repo for wanted in from_hub(plan)), *_named_inputs(plan)]
    print(f"on {', '.join(channels)}: {', '.join(what) or 'nothing is needed'}", file=out, flush=True)
    return int(ExitCode.OK)


def _is_for_here(plan: RunPlan) -> bool:
    """Whether nothing leads from here to the hosts yet: each node fetches for itself, a front end for its queue."""
    return plan.transport in ("env", "manual") or (plan.transport == "slurm" and "SLURM_JOB_ID" not in os.environ)


def fetch(
    plan: RunPlan, channels: Mapping[str, Channel | NodeChannel], out: IO[str], *, give_up: GiveUp = never
) -> RunPlan:
    """Put weights, data files and their images onto the file system of each host where they are missing.

    The channels must be idle, and are again afterwards. The plan that comes back has HF_HUB_OFFLINE=1 for the ranks,
    whose files are all there then, unless it says something about that itself. Raises MachineError with every host
    that does not get what it needs, and Stopped.
    """
    behind = with_doors(channels)
    remote = {name: channel for name, channel in behind.items() if not channel.local}
    if remote:
        _send_inputs(plan, remote, out, give_up)
    if not from_hub(plan) or len(behind) < len(channels):
        return plan
    for wanted in from_hub(plan):
        fetch_repository(plan, wanted, behind, out, give_up)
    if {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & plan.env.keys():
        return plan
    return dataclasses.replace(
        plan,
        env={**plan.env, "HF_HUB_OFFLINE": "1"},
        env_sources={**plan.env_sources, "HF_HUB_OFFLINE": "launcher"},
    )


def from_hub(plan: RunPlan) -> list[Wanted]:
    """What ranks read by the name of a repository: the model, data sets."""
    model, data = plan.config.model, plan.config.dataset
    found = []
    if model.weights == "pretrained" and model.path is None and model.repo is not None:
        found.append(Wanted(model.repo, "models", model.source, ("model.path=FOLDER", "model.weights=random")))
    tries = ("dataset.train=FILE or FOLDER",)
    return found + [Wanted(name, "datasets", data.source, tries) for name in datafiles.hub_names(data)]


def _named_inputs(plan: RunPlan) -> list[str]:
    """Paths that the configuration names on this machine's disk."""
    model = plan.config.model.path
    return [*([model] if model is not None else []), *(path for _, path in datafiles.paths(plan.config.dataset))]


def _send_inputs(plan: RunPlan, remote: Mapping[str, Channel], out: IO[str], give_up: GiveUp) -> None:
    """Send model folder, data files and images to hosts that lack them, by their absolute paths."""
    units = _units(plan)
    with Crew(remote, give_up=give_up) as crew:
        names = {name for _, wanted in units for name in _lacking(crew, wanted, list(remote))}
        if not names:
            return
        wait_for_turn(crew, sorted(names), out)  # another fetch may be at work, so all is looked at again
        for folder, wanted in units:
            lacking = _lacking(crew, wanted, sorted(names))
            owners = crew.file_systems(dict.fromkeys(lacking, folder))
            targets = {name: paths for name, paths in lacking.items() if owners[name] == name}
            _send(crew, folder, wanted, targets, out, give_up)


def _send(crew: Crew, folder: str, wanted: Files, lacking: dict[str, list[str]], out: IO[str], give_up: GiveUp) -> None:
    loads = [
        Load(
            source=door_here(),
            target=crew.doors[name],
            root="/",
            paths=paths,
            to="/",
            size=sum(wanted[path][0] for path in paths),
            label=f"{folder} to {name}",
        )
        for name, paths in lacking.items()
    ]
    failed = move(loads, out, give_up=give_up)
    if failed:
        problems = [Problem(f"{label} was not sent: {why}") for label, why in failed.items()]
        raise MachineError(*problems, title="with files for other hosts")
    for name, paths in lacking.items():  # one after another: they may share a home, and so these notes
        crew.ask({name: {"do": "record", "root": "/", "manifest": MANIFEST, "paths": paths}})
    for load in loads:
        print(f"sent {load.label}: {files_text(len(load.paths))}, {size_text(load.size)}", file=out, flush=True)


def wait_for_turn(crew: Crew, names: Sequence[str], out: IO[str]) -> None:
    """Hold the lock of fetches on each host, in one order, so that no two wait for each other."""

    def heard(host: str | None, event: Event | None) -> None:
        if event is not None and event["event"] == "waiting":
            print(f"{host}: another fetch is at work there; waiting for it", file=out, flush=True)

    owners = crew.file_systems(dict.fromkeys(sorted(names), OURS))
    for name in sorted(set(owners.values())):
        crew.ask({name: {"do": "lock", "name": f"{OURS}/fetch.lock"}}, heard)


def _units(plan: RunPlan) -> list[tuple[str, Files]]:
    """What ranks read from paths on this machine, by the folder that may be shared.

    Each is the path relative to / -> size and hash; of images, which may be many, the size alone.
    """
    config = plan.config
    units: list[tuple[str, Files]] = []
    if config.model.path is not None:
        folder = str(Path(config.model.path).absolute())
        weights = config.model.weights == "pretrained"
        names = [
            p
            for p in carry.walk(folder, (".git", ".cache"))
            if is_wanted(p) and (weights or not p.endswith(".safetensors"))
        ]
        units.append((folder, _looked_at([f"{folder}/{name}" for name in names], "some")))
    if not datafiles.paths(config.dataset):
        return units
    data, images = _data_files(plan)
    for folder in sorted({os.path.dirname(path) for path in data}):
        mine = [path for path in images if path.startswith(f"{folder}/")]
        images = [path for path in images if path not in set(mine)]
        files = _looked_at([path for path in data if os.path.dirname(path) == folder], "some")
        units.append((folder, files | _looked_at(mine, "none")))
    if images:
        units.append((os.path.dirname(os.path.commonpath(images) + "/"), _looked_at(images, "none")))
    return units


def _looked_at(paths: Sequence[str], how: str) -> Files:
    files: Files = carry.tree({"root": "/", "paths": [path.lstrip("/") for path in paths], "hash": how})["files"]
    return files


def _data_files(plan: RunPlan) -> tuple[list[str], list[str]]:
    """Data files and images; the trainer's own reader names them, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.write_text(plan_to_json(plan), encoding="utf-8")
        argv = [sys.executable, "-m", "launcher.training", "files", "--plan", str(file)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        raise MachineError(Problem(f"the files that rows name cannot be listed: {last}"), title="with the data")
    named = [datafiles.known_files(plan.config.dataset, split, of_hubs=False) for split in ("train", "eval")]
    data = list(dict.fromkeys(str(file.absolute()) for files in named for file in files))
    return data, [path for path in json.loads(done.stdout) if path not in data]


def _lacking(crew: Crew, wanted: Files, names: Sequence[str]) -> dict[str, list[str]]:
    """Host -> files that it has not. Raises MachineError for others of the same name that we have not put there."""
    images = [path for path, entry in wanted.items() if not entry[1]]
    rest = [path for path in wanted if wanted[path][1]]
    found = {name: {} for name in names}  # type: dict[str, Files]
    for paths, how in ((rest, "some"), (images, "none")):
        for name, answer in crew.ask_all({"do": "tree", "root": "/", "paths": paths, "hash": how}, names).items():
            found[name] |= answer["files"]
    problems = []
    notes = crew.ask_all({"do": "sent", "root": "/", "manifest": MANIFEST}, names)
    for name in names:
        others = [p for p, entry in found[name].items() if entry != wanted[p] and p not in notes[name]["paths"]]
        if others:
            shown = ", ".join(f"/{path}" for path in others[:NAMED]) + (" ..." if len(others) > NAMED else "")
            text = f"{name} has other content than {HERE} in {shown}; "
            text += "it is not, or no longer, what a fetch has put there, and stays as it is"
            problems.append(Problem(text, tries=("make the files equal", "remove them there")))
    if problems:
        raise MachineError(*problems, title="with files that differ")
    lacking = {name: [path for path in wanted if found[name].get(path) != wanted[path]] for name in names}
    return {name: paths for name, paths in lacking.items() if paths}
