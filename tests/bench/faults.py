"""What launchers do when things break: `python -m tests.bench.faults --out DIR`, real runs on two hosts over real ssh.

Every cell is a job of two hosts with one rank each (n1: rank 0, n2: rank 1), started on a terminal of a third machine.
One thing is broken, then the clock runs until nothing of the job is left on any host, at most LIMIT_S. Cells land in
DIR/results.json as they are done, with the terminal's whole text in DIR/LAUNCHER/FAULT; a cell that is there is
not run again without --again.

`deepspeed` (with pdsh) and `torchrun` (by a loop of ssh) run a plain torch.distributed program, `fault_rank.py`; ours
runs the digits demo. Faults inside a rank come by a signal to it, the same for all, from `at_start/sitecustomize.py`.
Ours is given shorter patience than its defaults: 20 s for a hang (600), 15 s for a lost host (120). Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launcher.rundir import write_json
from tests.bench.fault_jobs import LAUNCHERS, LOG, Job, command, parent, wait_for
from tests.bench.fault_table import LIMIT_S, Cell, blamed, table
from tests.cluster import Cluster, make_cluster, why_not

START_S = 120.0  # a start takes 12 s of two cores
WORKING = 3  # steps after which a job counts as running
GOES_ON_S = 15.0  # a job that still makes steps so long after the fault has not been hit by it
PORT = 29500  # what torchrun and DeepSpeed take unless told


def nothing(cluster: Cluster, job: Job) -> None:
    """What is broken is in the environment."""


def signal_rank(number: signal.Signals) -> Callable[[Cluster, Job], None]:
    """Signal rank 1."""
    return lambda cluster, job: os.kill(job.rank_pid(1), number)


def kill_node_launcher(cluster: Cluster, job: Job) -> None:
    """SIGKILL the process that started rank 1."""
    os.kill(parent(job.rank_pid(1)), signal.SIGKILL)


def kill_ssh(cluster: Cluster, job: Job) -> None:
    """SIGKILL the ssh client that leads to n2."""
    clients = [pid for pid in cluster.head.pids() if (words := command(pid)) and Path(words[0]).name == "ssh"]
    for pid in clients:
        if "n2" in command(pid):
            os.kill(pid, signal.SIGKILL)


def kill_command(cluster: Cluster, job: Job) -> None:
    """SIGKILL the process that was typed."""
    assert job.terminal is not None
    os.kill(job.terminal.pid, signal.SIGKILL)


def close_terminal(cluster: Cluster, job: Job) -> None:
    """Close the window."""
    assert job.terminal is not None
    job.terminal.close()


def ctrl_c(cluster: Cluster, job: Job) -> None:
    """Type Ctrl-C."""
    assert job.terminal is not None
    job.terminal.type(b"\x03")


def pull_cable(cluster: Cluster, job: Job) -> None:
    """No packet from or to n2 any more."""
    cluster.hosts[1].down()


def take_port(cluster: Cluster, job: Job) -> None:
    """Somebody else listens at the usual port of n1."""
    listen = f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(1e6)"
    cluster.hosts[0].daemon([sys.executable, "-c", listen], job.folder.parent / "listener.log")
    time.sleep(1)


def fill_shm(cluster: Cluster, job: Job) -> None:
    """No page is left in /dev/shm of n2."""
    cluster.hosts[1].run(["mount", "-o", "remount,size=64k", "/dev/shm"], check=True)
    cluster.hosts[1].run(["sh", "-c", "head -c 64k /dev/zero > /dev/shm/full"], check=True)


def forget_host_key(cluster: Cluster, job: Job) -> None:
    """The user has never been on n2."""
    known = cluster.ssh / "known_hosts"
    known.write_text("".join(line for line in known.read_text().splitlines(True) if not line.startswith("n2")))


def hide_python(cluster: Cluster, job: Job) -> None:
    """n2 has no virtual environment where the others have theirs."""
    cluster.hosts[1].run(["mount", "-t", "tmpfs", "none", sys.prefix], check=True)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What breaks, when, and what would be right."""

    text: str
    before: Callable[[Cluster, Job], None] = nothing
    strike: Callable[[Cluster, Job], None] | None = None  # once the job works
    env: dict[str, str] = field(default_factory=dict)
    host: str | None = None  # guilty
    rank: int | None = None
    goes_on: bool = False  # right is to train on
    second: bool = False  # another job runs on the same hosts


FAULTS = {
    "raise": Fault(
        text="a rank raises an exception", strike=signal_rank(signal.SIGUSR2), env={"PYTHON_BENCH_FAULT": "raise"},
        host="n2", rank=1,
    ),
    "kill": Fault(text="a rank is killed (SIGKILL)", strike=signal_rank(signal.SIGKILL), host="n2", rank=1),
    "leave": Fault(
        text="a rank leaves early with 0", strike=signal_rank(signal.SIGUSR2), env={"PYTHON_BENCH_FAULT": "leave"},
        host="n2", rank=1,
    ),
    "stop": Fault(text="a rank hangs (SIGSTOP)", strike=signal_rank(signal.SIGSTOP), host="n2", rank=1),
    "shm": Fault(
        text="/dev/shm is full", before=fill_shm, strike=signal_rank(signal.SIGUSR2), host="n2", rank=1,
        env={"PYTHON_BENCH_FAULT": "shm"},
    ),
    "agent": Fault(text="the node's launcher is killed", strike=kill_node_launcher, host="n2"),
    "lost": Fault(text="a host is lost", strike=pull_cable, host="n2"),
    "ssh": Fault(text="one ssh connection breaks", strike=kill_ssh, goes_on=True),
    "command": Fault(text="the launching process is killed", strike=kill_command),
    "terminal": Fault(text="the terminal is closed", strike=close_terminal),
    "ctrl-c": Fault(text="Ctrl-C", strike=ctrl_c),
    "second": Fault(text="Ctrl-C, another job on the hosts", strike=ctrl_c, second=True),
    "unreachable": Fault(text="a host is unreachable", before=pull_cable, host="n2"),
    "port": Fault(text="port 29500 is taken", before=take_port, goes_on=True),
    "interface": Fault(text="wrong interface (GLOO_SOCKET_IFNAME)", env={"GLOO_SOCKET_IFNAME": "eth9"}),
    "host-key": Fault(text="an ssh host key is unknown", before=forget_host_key, host="n2"),
    "python": Fault(text="no Python on a host", before=hide_python, host="n2"),
}  # fmt: skip


def run_cell(launcher: str, fault: Fault, folder: Path) -> Cell:
    """One real run."""
    with tempfile.TemporaryDirectory(prefix="faults-") as home, make_cluster(Path(home), nodes=2) as cluster:
        job = Job("first", cluster, folder / "first", None, fault.env)
        other = Job("other", cluster, folder / "other", PORT + 100) if fault.second else None
        folder.mkdir(parents=True)
        fault.before(cluster, job)
        started = time.monotonic()
        jobs = [job, other] if other else [job]
        for one in jobs:
            one.start(launcher)
        try:
            return _watch(fault, job, other, started)
        finally:
            for one in jobs:
                assert one.terminal is not None
                one.terminal.close()
            cluster.clear()
            for one in jobs:
                assert one.terminal is not None
                one.terminal.shell.wait()


def _watch(fault: Fault, job: Job, other: Job | None, started: float) -> Cell:
    assert job.terminal is not None
    terminal, cell = job.terminal, Cell()
    if fault.strike is not None:
        jobs = [job, other] if other else [job]
        if not wait_for(lambda: terminal.ended or all(j.steps() >= WORKING for j in jobs), START_S):
            cell.note = "did not begin to train"
        elif terminal.ended:
            cell.note = "ended before the fault"
        else:
            started = time.monotonic()
            fault.strike(job.cluster, job)
    before = job.steps()

    def over() -> bool:
        if cell.command_s is None and terminal.ended:
            cell.command_s = time.monotonic() - started
        return terminal.ended and not job.left(tagged=other is not None)

    def goes_on() -> bool:
        enough = GOES_ON_S if fault.strike is not None else 0
        return fault.goes_on and time.monotonic() - started > enough and job.steps() >= before + WORKING

    wait_for(lambda: over() or goes_on(), LIMIT_S)
    if goes_on():
        cell.trains_on = True
        terminal.type(b"\x03")
        started = time.monotonic()
        wait_for(over, LIMIT_S)
    cell.left = job.left(tagged=other is not None)
    cell.gone_s = None if cell.left else time.monotonic() - started
    wait_for(lambda: terminal.exit_code is not None, 1)
    cell.exit_code = terminal.exit_code
    if other is not None:
        steps = other.steps()
        cell.other_unharmed = wait_for(lambda: other.steps() >= steps + 10, 20)
    return cell


def read_results(folder: Path) -> dict[str, Cell]:
    """Cells that have been run; whom they blame is read anew from what their terminals showed."""
    if not (folder / "results.json").exists():
        return {}
    cells = {name: Cell(**data) for name, data in json.loads((folder / "results.json").read_text()).items()}
    for name, cell in cells.items():
        cell.hosts, cell.ranks = blamed((folder / name / "first" / LOG).read_text(errors="replace"))
    return cells


def write_results(folder: Path, cells: dict[str, Cell]) -> None:
    """Keep the cells, whole or not at all."""
    write_json(folder / "results.json", {name: asdict(cell) for name, cell in cells.items()})


def main() -> None:
    """Parse, run what is wanted, print the table of all that is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    parser.add_argument("--again", action="store_true", help="run cells that have a result, too")
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = read_results(options.out)
    for fault in options.faults.split(","):
        for launcher in options.launchers.split(","):
            name = f"{launcher}/{fault}"
            if name in cells and not options.again:
                continue
            shutil.rmtree(options.out / name, ignore_errors=True)
            cells[name] = run_cell(launcher, FAULTS[fault], options.out / name)
            write_results(options.out, cells)
            cells = read_results(options.out)
            said = cells[name].text(FAULTS[fault].host, FAULTS[fault].rank)
            print(f"{time.strftime('%H:%M:%S')}  {name:24} {said}", flush=True)
    print(f"\n{table(cells, {name: (f.text, f.host, f.rank) for name, f in FAULTS.items()}, list(LAUNCHERS))}")


if __name__ == "__main__":
    main()
