"""What is looked at on this machine before anything starts; all problems are reported together."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import ConfigError, MachineError, Problem
from launcher.planning import placement
from launcher.planning.command import with_port
from launcher.planning.memory import disk_bytes
from launcher.rundir import RunDir
from launcher.running.folder import names_itself
from launcher.running.state import find_state
from launcher.running.trackers import ready
from launcher.spec import Host, RunPlan

GB = 1e9
PORTS = range(20000, 32768)  # below the range from which Linux gives ports to outgoing connections
PROBE = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"


def preflight(plan: RunPlan) -> RunPlan:
    """The plan with what only this machine could tell filled in: a free port to meet at.

    Raises ConfigError when the user must change something, else MachineError when the machine must be mended; either
    carries every problem found.
    """
    if sys.platform != "linux":
        text = f"runs need Linux, and this is {sys.platform}; plan, config, status and logs work here"
        raise MachineError(Problem(text, tries=("start the run on a Linux machine",)))
    config = [*_hosts(plan)]
    if config:  # the rest would be about the wrong machine
        raise ConfigError(*config)
    port, port_problems = _port(plan)
    config = [*_run_folder(plan), *_inputs(plan), *port_problems]
    machine = [*_writable(plan), *_disk(plan), *_packages(plan), *_profiler(plan)]
    machine += ready.problems(plan.config.logging.trackers, os.environ, Path.home())
    if config:
        raise ConfigError(*config, *machine)
    if machine:
        raise MachineError(*machine, title="with this machine")
    assert port is not None
    return with_port(plan, port)


def is_this_machine(host: Host) -> bool:
    """Whether the host is this machine: by its name, or because only a machine's own addresses can be bound."""
    return placement.is_this_machine(host, socket.gethostname()) or _bind(host.address or host.name, 0) is None


def _hosts(plan: RunPlan) -> Iterator[Problem]:
    here = ("nodes=1", "cluster.hostfile=null")
    if plan.hosts_assumed:
        names = ", ".join(host.name for host in plan.hosts)
        text = f"nothing can start on hosts that are only assumed: {names} ({plan.hosts_source})"
        yield Problem(text, tries=("cluster.hostfile=FILE", here[0]))
        return
    remote = [host.name for host in plan.hosts if not is_this_machine(host)]
    if remote or len(plan.hosts) > 1:
        away = f"{', '.join(remote)} cannot be reached from here" if remote else "each host here is this machine"
        text = f"this version runs on one machine, the one it is started on: {away} ({plan.hosts_source})"
        yield Problem(text, tries=here)


def _run_folder(plan: RunPlan) -> Iterator[Problem]:
    run = RunDir(Path(plan.run_dir))
    if not run.path.exists() or names_itself(plan):
        return
    state = find_state(run) if run.path.is_dir() else None
    if state is not None and state.name in ("running", "ending"):
        text = f"{run.path} belongs to a run that goes on: {state.text}"
        yield Problem(text, tries=("run.name=ANOTHER", f"python -m launcher stop {run.path}"))
    elif plan.resume_from is None and (not run.path.is_dir() or any(run.path.iterdir())):
        yield Problem(f"{run.path} exists; nothing is overwritten", tries=(f"resume={run.path}", "run.name=ANOTHER"))


def _inputs(plan: RunPlan) -> Iterator[Problem]:
    config = plan.config
    for key, value in (
        ("model.path", config.model.path),
        ("dataset.train", config.dataset.train),
        ("dataset.eval", config.dataset.eval),
        ("resume", plan.resume_from),
    ):
        if value is not None and not os.access(value, os.R_OK):
            what = "cannot be read" if Path(value).exists() else "does not exist"
            yield Problem(f"{key}={value} {what} ({Path(value).absolute()})", tries=(f"{key}=PATH",))


def _port(plan: RunPlan) -> tuple[int | None, list[Problem]]:
    """The port at which ranks meet: the one given, else a free one."""
    address, given = plan.master_addr, plan.master_port
    failed = _bind(address, given or 0)
    if failed is None:
        return given or next(port for port in random.sample(PORTS, len(PORTS)) if _bind(address, port) is None), []
    if given is not None and failed.errno == errno.EADDRINUSE:
        tries = ("cluster.master_port=null   (a free one is chosen)",)
        return None, [Problem(f"cluster.master_port={given} is taken on {address}", tries=tries)]
    if given is not None and failed.errno == errno.EACCES:
        return None, [Problem(f"cluster.master_port={given}: {failed.strerror}", tries=("cluster.master_port=null",))]
    text = f"cluster.master_addr={address} is no address of this machine: {failed.strerror or failed}"
    return None, [Problem(text, tries=("cluster.master_addr=127.0.0.1",))]


def _bind(address: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the ranks' own store does
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _writable(plan: RunPlan) -> Iterator[Problem]:
    folder = _existing(Path(plan.run_dir))
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"the run folder {plan.run_dir} cannot be made: no permission to write in {folder}"
        yield Problem(text, tries=("run.root=FOLDER", f"chmod u+w {folder}"))


def _disk(plan: RunPlan) -> Iterator[Problem]:
    """Looked at again: planning may have been long ago, and knows no folder of another machine."""
    folder = _existing(Path(plan.run_dir))
    needed, free = disk_bytes(plan), shutil.disk_usage(folder).free
    if free < needed:
        text = f"{free / GB:,.1f} GB are free in {folder}, and checkpoints and export need about {needed / GB:,.1f} GB"
        yield Problem(text, tries=("run.root=FOLDER on a larger disk",))


def _profiler(plan: RunPlan) -> Iterator[Problem]:
    path = plan.env.get("PATH", os.environ.get("PATH", os.defpath))
    if plan.config.profile.name == "nsys" and shutil.which("nsys", path=path) is None:
        tries = (
            "apt-get install nsight-systems-cli   (from NVIDIA's CUDA repository; the CUDA toolkit has it too)",
            "profile=torch",
        )
        yield Problem("profile=nsys needs NVIDIA's nsys, and the PATH has none", tries=tries)


def _packages(plan: RunPlan) -> Iterator[Problem]:
    names = ["torch", "deepspeed", "transformers"]
    if "lora" in (plan.config.tune.language, plan.config.tune.vision, plan.config.tune.projector):
        names.append("peft")
    python = plan.config.cluster.python
    if python is None:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        python = sys.executable
    else:
        try:
            missing = subprocess.check_output([python, "-c", PROBE, *names], text=True, timeout=60).split()
        except (OSError, subprocess.SubprocessError) as error:
            text = f"cluster.python={python} cannot be run: {error}"
            yield Problem(text, tries=(f"cluster.python={sys.executable}",))
            return
    if missing:
        yield Problem(
            f"{python} lacks {', '.join(missing)}",
            tries=(f"{python} -m pip install .   (in the launcher's own folder; or its wheel)",),
        )
