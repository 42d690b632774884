"""What is looked at on every machine before anything starts, in parallel; all problems are reported together."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import datafiles
from launcher.errors import ConfigError, LauncherError, MachineError, Problem
from launcher.planning.command import with_port
from launcher.planning.fabric import Fabric
from launcher.planning.known_bad import CUDNN
from launcher.planning.memory import disk_bytes
from launcher.rundir import COMPLETE, RunDir
from launcher.running import probe
from launcher.running.addresses import Met, meet, meet_alone
from launcher.running.binding import THREADS, bind
from launcher.running.crew import GiveUp, never
from launcher.running.fabric import ask_fabrics, join
from launcher.running.findings import Finding, error_of, sentences
from launcher.running.fit import fitted
from launcher.running.folder import names_itself
from launcher.running.machines import GB, Reference, by_schedulers, compared, imported, judge, nvme_path
from launcher.running.nodechannel import NodeChannel
from launcher.running.oddities import oddities
from launcher.running.panel import Panel
from launcher.running.state import find_state
from launcher.running.trackers import ready
from launcher.running.transport import Channel
from launcher.running.unreachable import unreachable
from launcher.spec import RunPlan

OFFLINE = ("1", "true", "yes", "on")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What a preflight found; `plan` is complete only without an error."""

    plan: RunPlan
    error: LauncherError | None
    looks: dict[str, Any]  # host -> what its probe saw
    met: Met | None
    reached_after_s: dict[str, float]  # host -> until its first word
    notes: tuple[str, ...] = ()  # what was decided, and why
    fabrics: Mapping[str, Fabric] = field(default_factory=dict)  # host -> its network and GPU links, on GPU runs
    nccl: tuple[str, ...] = ()  # how GPUs talk, and each variable for it with its reason


def startable(plan: RunPlan) -> None:
    """Raise what can be said without asking any host."""
    if sys.platform != "linux":
        text = f"runs need Linux, and this is {sys.platform}; plan, config, status and logs work here"
        raise MachineError(Problem(text, tries=("start the run on a Linux machine",)))
    if plan.hosts_assumed:
        names = ", ".join(host.name for host in plan.hosts)
        text = f"nothing can start on hosts that are only assumed: {names} ({plan.hosts_source})"
        tries = ("cluster.hostfile=FILE", "nodes=1", "without cluster.gpu   (this machine's own GPUs are used)")
        raise ConfigError(Problem(text, tries=tries if plan.config.cluster.gpu else tries[:2]))


def preflight(
    plan: RunPlan,
    channels: Mapping[str, Channel | NodeChannel],
    note: Callable[[str, str], None] = lambda about, text: None,
    *,
    give_up: GiveUp = never,
) -> RunPlan:
    """The plan with what only the hosts could tell filled in: address and port to meet at, interfaces, threads, cores.

    Raises ConfigError when the user must change something, else MachineError when machines must be mended; either
    carries every problem found; Stopped as soon as `give_up` says so. `note` gets the decisions with their reasons,
    each after what it is about: hosts or nccl.
    The channels are as before: another program can be started on them.
    """
    startable(plan)
    checked = check(plan, channels, give_up=give_up)
    if checked.error is not None:
        raise checked.error
    for about, texts in (("hosts", checked.notes), ("nccl", checked.nccl)):
        for text in texts:
            note(about, text)
    return checked.plan


def check(
    plan: RunPlan,
    channels: Mapping[str, Channel | NodeChannel],
    *,
    supplied: bool = True,
    give_up: GiveUp = never,
) -> Checked:
    """Look at this machine and at all hosts; nothing is written but a file that is there for a moment.

    Unless the hosts are `supplied`, what a run would bring to them itself is a note and no error.
    """
    edits = [*_run_folder(plan), *_inputs(plan)]
    mends = [*_writable(plan), *_disk(plan)]
    mends += ready.problems(plan.config.logging.trackers, os.environ, Path.home())
    reference = _reference(plan, channels)
    panel = Panel(channels, give_up)
    looks = _look(plan, panel, channels, reference)
    plan = by_schedulers(plan, looks)
    findings = [*judge(plan, looks, reference), *_offline(plan, looks)]
    told: tuple[str, ...] = ()
    well = not panel.silent and all("failed" not in look for look in looks.values())
    if well:
        refitted, small = fitted(plan, looks)
        plan, told, findings = refitted.plan, refitted.notes, [*findings, *small]
    coming = [] if supplied else [finding for finding in findings if finding.comes]
    met = _meet(plan, panel, looks) if well else None
    panel.end()
    fabrics = ask_fabrics(plan, channels, looks, give_up=give_up) if well and plan.device == "cuda" else {}
    joined = join(plan, fabrics, met.interfaces if met else {})
    silent = [unreachable(plan, host, panel.silent[host.name]) for host in plan.hosts if host.name in panel.silent]
    findings = [finding for finding in findings if finding not in coming]
    findings += [*(met.findings if met else ()), *joined.findings]
    edits += joined.problems
    found = Checked(
        plan=plan,
        error=error_of([*silent, *findings], *edits, *mends, config=bool(edits)),
        looks=looks,
        met=met,
        reached_after_s=panel.reached_after_s,
        notes=(*told, *(f"{text}: a run sends it" for text in sentences(coming))),
        fabrics=fabrics,
        nccl=joined.notes,
    )
    if met is None or met.port is None:
        return found
    return _complete(dataclasses.replace(found, plan=joined.plan), met, reference)


def reach(plan: RunPlan, channels: Mapping[str, Channel | NodeChannel], *, give_up: GiveUp = never) -> dict[str, bool]:
    """Whether each host sees the folder that the run folder is or will be in; MachineError names those out of reach."""
    panel = Panel(channels, give_up)
    looks = _look(plan, panel, channels, Reference(cwd=os.getcwd(), here=frozenset()))
    panel.end()
    silent = [unreachable(plan, host, panel.silent[host.name]) for host in plan.hosts if host.name in panel.silent]
    error = error_of(silent)
    if error is not None:
        raise error
    return {host: look.get("folder", {}).get("shared") is not False for host, look in looks.items()}


def fresh_port(plan: RunPlan, channels: Mapping[str, Channel | NodeChannel]) -> int:
    """A port of the first host for another start of the ranks: the one that the user gave, else one that is free.

    Raises MachineError when the host does not answer.
    """
    first = plan.hosts[0]
    panel = Panel({first.name: channels[first.name]})
    panel.start({"do": "listen", "ports": [0], "word": "", "address": None}, plan.config.cluster.connect_s)
    asked = dataclasses.replace(plan, master_port=plan.config.cluster.master_port)
    met = meet_alone(asked, panel, plan.master_addr)
    panel.end()
    if met.port is None:
        raise MachineError(Problem(f"{first.name} has no port for the ranks to meet at"), title="with the hosts")
    return met.port


def _reference(plan: RunPlan, channels: Mapping[str, Channel | NodeChannel]) -> Reference:
    """This machine's own answers; few when no other runs anything."""
    cluster, cwd = plan.config.cluster, os.getcwd()
    same_python = not (cluster.python or cluster.activate or cluster.wrap)
    here = frozenset(host for host, channel in channels.items() if channel.local and same_python)
    if len(here) == len(channels):
        return Reference(cwd=cwd, here=here)
    files = probe.sources(str(Path(probe.__file__).parent.parent)) if cluster.sync != "none" else {}
    versions = probe.versions(compared(plan), [*_search_path(plan), *sys.path]) if same_python else {}
    if same_python:
        versions["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    keys = {str(Path(cwd, path)): key for key, path in _shipped(plan)}
    marks = {path: probe.tried(probe.mark, path) for path in keys}
    return Reference(
        cwd=cwd,
        versions=versions,
        digest=probe.digest_of(files) if files else None,
        files=files,
        marks={path: mark for path, mark in marks.items() if not probe.failed(mark)},
        keys=keys,
        here=here,
    )


def _shipped(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """(key, path) of what ranks read on their own host."""
    config = plan.config
    if config.model.path is not None:
        yield "model.path", config.model.path
    if config.model.adapter is not None and plan.resume_from is None:
        yield "model.adapter", config.model.adapter
    yield from datafiles.paths(config.dataset)
    if plan.resume_from is not None:
        yield "resume", str(Path(plan.resume_from, COMPLETE))


def _search_path(plan: RunPlan) -> list[str]:
    """Where ranks look for modules first: PYTHONPATH as they get it."""
    return [entry for entry in plan.env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _look(
    plan: RunPlan, panel: Panel, channels: Mapping[str, Channel | NodeChannel], reference: Reference
) -> dict[str, Any]:
    model = plan.config.model
    named = model.path is None and model.weights == "pretrained" and model.source == "hf"
    hub = model.repo if named else None
    folder = _existing(Path(plan.run_dir))
    token = folder / f".launcher-{secrets.token_hex(8)}"
    apart = not all(channel.local for channel in channels.values())
    asked = {
        "do": "look",
        "cwd": reference.cwd,
        "path": _search_path(plan),
        "modules": imported(plan),
        "packages": [*compared(plan), *CUDNN],
        "digest": reference.digest,
        "files": list(reference.marks),
        "programs": ["nsys"] if plan.config.profile.name == "nsys" else [],
        "search": plan.env.get("PATH"),
        "hub": None
        if hub is None
        else {"repo": hub, "env": {k: v for k, v in plan.env.items() if k.startswith("HF_H")}},
        "run_dir": plan.run_dir,
        "token": str(token) if apart else None,
        "scratch": nvme_path(plan),
        "gpus": plan.device == "cuda",
        "words": probe.tried(probe.words_mark) if apart and plan.transport in ("ssh", "pdsh") else None,
    }
    if apart:
        token.touch()
    try:
        return panel.start(asked, plan.config.cluster.connect_s)
    finally:
        token.unlink(missing_ok=True)


def _meet(plan: RunPlan, panel: Panel, looks: Mapping[str, Any]) -> Met:
    if len(plan.hosts) > 1:
        return meet(plan, panel, looks)
    return meet_alone(plan, panel, plan.config.cluster.master_addr or "127.0.0.1", looks[plan.hosts[0].name])


def _complete(found: Checked, met: Met, reference: Reference) -> Checked:
    """With all that the hosts have told in the plan."""
    plan, looks = found.plan, found.looks
    threads, cores, why_threads = bind(plan, looks)
    env = {host.name: dict(plan.host_env.get(host.name, {})) for host in plan.hosts}
    for host in plan.hosts:
        if host.name in threads:
            env[host.name][THREADS] = threads[host.name]
    plan = dataclasses.replace(
        with_port(dataclasses.replace(plan, master_addr=met.address), met.port),
        host_env={host: variables for host, variables in env.items() if variables},
        cores=cores,
        warnings=(*plan.warnings, *oddities(plan, looks, reference)),
    )
    return dataclasses.replace(found, plan=plan, notes=(*met.notes, *why_threads, *found.notes))


def _offline(plan: RunPlan, looks: Mapping[str, Any]) -> Iterator[Finding]:
    if plan.env.get("HF_HUB_OFFLINE", "").lower() not in OFFLINE:
        return
    for host, look in looks.items():
        if look.get("hub") is False:
            reason = f"HF_HUB_OFFLINE is set, and the weights of {plan.config.model.repo} are not in its cache"
            tries = ("python -m launcher fetch ...", "model.path=FOLDER")
            yield Finding(host=host, what="weights", reason=reason, tries=tries)


def _run_folder(plan: RunPlan) -> Iterator[Problem]:
    run = RunDir(Path(plan.run_dir))
    if not run.path.exists() or names_itself(plan):
        return
    state = find_state(run) if run.path.is_dir() else None
    if state is not None and state.name in ("queued", "running", "ending"):
        text = f"{run.path} belongs to a run that goes on: {state.text}"
        yield Problem(text, tries=("run.name=ANOTHER", f"python -m launcher stop {run.path}"))
    elif plan.resume_from is None and run.used:
        yield Problem(f"{run.path} exists; nothing is overwritten", tries=(f"resume={run.path}", "run.name=ANOTHER"))


def _inputs(plan: RunPlan) -> Iterator[Problem]:
    config = plan.config
    for key, value in (
        ("model.path", config.model.path),
        *datafiles.paths(config.dataset),
        ("resume", plan.resume_from),
    ):
        if value is not None and not os.access(value, os.R_OK):
            what = "cannot be read" if Path(value).exists() else "does not exist"
            yield Problem(f"{key}={value} {what} ({Path(value).absolute()})", tries=(f"{key}=PATH",))


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _writable(plan: RunPlan) -> Iterator[Problem]:
    folder = _existing(Path(plan.run_dir))
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"the run folder {plan.run_dir} cannot be made: no permission to write in {folder}"
        yield Problem(text, tries=("run.root=FOLDER", f"chmod u+w {folder}"))


def _disk(plan: RunPlan) -> Iterator[Problem]:
    """Looked at again: planning may have been long ago."""
    folder = _existing(Path(plan.run_dir))
    needed, free = disk_bytes(plan), shutil.disk_usage(folder).free
    if free < needed:
        text = f"{free / GB:,.1f} GB are free in {folder}, and checkpoints and export need about {needed / GB:,.1f} GB"
        yield Problem(text, tries=("run.root=FOLDER on a larger disk",))
