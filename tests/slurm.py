"""A real Slurm on the make-believe hosts: the controller on the head, one slurmd on each of the first two hosts.

Everything it writes lies in one folder, it runs as root, and nothing of the distribution's services or /etc is used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import SBIN, Cluster, Host, await_that

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")
CPUS = 4  # said of each host, whatever the machine has: jobs are to start, not to wait for each other

CONFIG = """\
ClusterName=test
SlurmctldHost={head.name}({head.address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n.spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
JobRequeue=1
KillWait=5
MailProg=/bin/true
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# cred_expire is also how long a requeued job waits (slurm.conf(5), AuthInfo): 120 s by default, at least 5.


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Slurm over n1 and n2, used from the head."""

    head: Host
    folder: Path
    hosts: tuple[Host, ...]

    @property
    def env(self) -> dict[str, str]:
        """What makes srun, sbatch and the rest of any host use it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, argv: Sequence[str | Path], **kw: Any) -> subprocess.CompletedProcess[str]:
        """`Host.run` on the head, with Slurm's configuration."""
        return self.head.run(argv, **{**kw, "env": {**self.env, **kw.get("env", {})}})

    def popen(self, argv: Sequence[str | Path], **kw: Any) -> subprocess.Popen[Any]:
        """`Host.popen` on the head, with Slurm's configuration."""
        return self.head.popen(argv, **{**kw, "env": {**self.env, **kw.get("env", {})}})

    def job(self, number: str) -> dict[str, str]:
        """A job's fields as `scontrol show job` names them."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run(["scontrol", "show", "job", number], check=True).stdout))

    def clear(self) -> None:
        """Cancel all jobs and wait until they are gone."""
        self.run(["scancel", "--user=root"])
        await_that(lambda: not self._jobs(), 30, lambda: f"jobs stay: {self._jobs()}")

    def _jobs(self) -> list[str]:
        return self.run(["squeue", "--noheader", "--format=%A"], check=True).stdout.split()


@contextmanager
def start_slurm(cluster: Cluster, folder: Path) -> Iterator[Slurm]:
    """Start munge, the controller and the hosts' daemons; they end with the cluster."""
    slurm = Slurm(head=cluster.head, folder=folder, hosts=cluster.hosts[:2])
    config = CONFIG.format(head=slurm.head, folder=folder)
    for host in slurm.hosts:
        config += f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS} State=UNKNOWN\n"
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n")
    (folder / "state").mkdir()
    _start_munge(slurm)
    slurm.head.daemon([_program("slurmctld"), "-D"], folder / "slurmctld.log", env=slurm.env)
    for host in slurm.hosts:
        host.daemon([_program("slurmd"), "-D"], folder / f"{host.name}.log", env=slurm.env)
    await_that(lambda: _idle(slurm) == len(slurm.hosts), 30, lambda: _logs(folder))
    yield slurm


def _start_munge(slurm: Slurm) -> None:
    """One munged for all hosts: its socket is a file, and files are shared."""
    key = slurm.folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {f"--{name}-file": slurm.folder / f"munge.{name}" for name in ("key", "log", "pid", "seed")}
    options = [f"{option}={path}" for option, path in files.items()]
    argv = [_program("munged"), "--foreground", "--force", f"--socket={slurm.folder}/munge.socket", *options]
    slurm.head.daemon(argv, slurm.folder / "munged.log")
    socket = slurm.folder / "munge.socket"
    await_that(socket.exists, 10, lambda: _logs(slurm.folder))


def _idle(slurm: Slurm) -> int:
    return slurm.run(["sinfo", "--noheader", "--Node", "--format=%T"]).stdout.split().count("idle")


def _program(name: str) -> str:
    found = shutil.which(name, path=SBIN)
    assert found is not None
    return found


def _logs(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')}" for log in folder.glob("*.log"))
