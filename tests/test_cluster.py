"""The make-believe hosts are real enough: ssh checks keys, cables can be pulled, names, files and processes are own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import PORT, USER, Cluster, await_that
from tests.slurm import Slurm

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1"]
PDSH = ["pdsh", "-S", "-R", "ssh", "-w"]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _as_new(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()


def test_ssh_by_name_and_address_with_checked_keys(cluster: Cluster) -> None:
    n1, n2, n3 = cluster.hosts
    said = cluster.head.run([*SSH, "n1", "hostname; echo $SSH_CONNECTION; echo ~"], check=True).stdout.split()
    assert said[0] == "n1" and said[1] == cluster.head.address and said[3] == n1.address
    assert said[-1] == str(cluster.folder / "home") != os.path.expanduser("~")
    assert cluster.head.run([*SSH, n2.address, "hostname"], check=True).stdout == "n2\n"
    assert n1.run([*SSH, n3.address6, "hostname"], check=True).stdout == "n3\n"


def test_another_user_another_port_and_a_jump(cluster: Cluster) -> None:
    n1, _, _ = cluster.hosts
    cluster.ssh_config.write_text("Host far\n  HostName n3\n  ProxyJump n1\n")
    try:
        far = cluster.head.run([*SSH, f"{USER}@far", "whoami; echo $USER $SSH_CONNECTION"], check=True).stdout.split()
    finally:
        cluster.ssh_config.unlink()
    assert far[:3] == ["root", USER, n1.address]
    assert cluster.head.run([*SSH, "-p", str(PORT), "n2", "hostname"], check=True).stdout == "n2\n"


def test_an_unknown_host_key_is_refused(cluster: Cluster) -> None:
    known = cluster.ssh / "known_hosts"
    before = known.read_text()
    known.write_text("".join(line for line in before.splitlines(keepends=True) if not line.startswith("n2,")))
    try:
        done = cluster.head.run([*SSH, "n2", "hostname"])
    finally:
        known.write_text(before)
    assert done.returncode == 255 and "Host key verification failed" in done.stderr


def test_pdsh_reaches_all_and_returns_the_worst_code(cluster: Cluster) -> None:
    done = cluster.head.run([*PDSH, "n1,n2", "hostname; test $(hostname) = n1"])
    assert sorted(done.stdout.split("\n")[:2]) == ["n1: n1", "n2: n2"] and done.returncode == 1


def test_a_pulled_cable_is_felt_and_put_back(cluster: Cluster) -> None:
    n1, n2, _ = cluster.hosts
    n2.down()
    assert cluster.head.run([*SSH, "n2", "true"]).returncode == 255
    assert n1.run([*SSH, "n2", "true"]).returncode == 255
    assert n2.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "0\n"
    n2.up()
    assert cluster.head.run([*SSH, "n2", "true"], check=True).returncode == 0


def test_name_files_and_memory_are_a_hosts_own(cluster: Cluster) -> None:
    n1, n2, _ = cluster.hosts
    for folder in (cluster.private, Path("/dev/shm"), Path("/run/sshd")):
        n1.run(["touch", folder / "mine"], check=True)
        assert n2.run(["ls", folder]).stdout == ""
        assert cluster.head.run(["ls", folder]).stdout == "" and not (folder / "mine").exists()
        n1.run(["rm", folder / "mine"], check=True)
    assert n1.run(["cat", "/proc/sys/kernel/hostname"]).stdout == "n1\n"
    assert n1.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
    assert n1.run(["ls", ROOT], check=True).stdout.split() == sorted(
        name for name in os.listdir(ROOT) if not name.startswith(".")
    )


def test_a_second_network_is_reached_by_nobody_else(cluster: Cluster) -> None:
    n1, n2, _ = cluster.hosts
    with n1.network("docker0", "172.17.0.1/16"):
        assert n1.run(["hostname", "-I"]).stdout.split()[:2] == [n1.address, "172.17.0.1"]
        assert n2.run([*SSH, "172.17.0.1", "true"]).returncode == 255
    assert "docker0" not in n1.run(["ls", "/sys/class/net"]).stdout


def test_processes_are_counted_and_signalled_where_they_are(cluster: Cluster) -> None:
    n1, n2, _ = cluster.hosts
    assert n1.pids() == []
    child = n1.popen(["sh", "-c", "echo $$; exec sleep 100"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    number = int(child.stdout.readline())
    assert n1.pids() == [child.pid] and n2.pids() == [] and number != child.pid
    n1.kill(number, signal.SIGTERM)
    assert child.wait(5) == -signal.SIGTERM and n1.pids() == []
    orphan = n1.run(["sh", "-c", "sleep 0.05 & exit 3"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert orphan.returncode == 3
    await_that(lambda: n1.pids() == [], 5, lambda: f"zombies stay: {n1.pids()}")


def test_srun_places_one_task_on_each_host(slurm: Slurm) -> None:
    say = "echo $SLURM_NODEID $(hostname) $PWD"
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", "sh", "-c", say], cwd=slurm.folder, check=True)
    assert sorted(done.stdout.splitlines()) == [f"0 n1 {slurm.folder}", f"1 n2 {slurm.folder}"]
    refused = slurm.run(["srun", "-N2", "sh", "-c", "test $(hostname) = n1 || exit 7"])
    assert refused.returncode == 7 and "n2: task 1: Exited with exit code 7" in refused.stderr


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.cluster import await_that, make_cluster

with make_cluster(Path(sys.argv[1])) as cluster:
    cluster.hosts[0].popen(["sleep", "1000"])
    await_that(cluster.hosts[0].pids, 5, lambda: "it has not come")  # a child is on its host a moment after its start
    print(*[host.holder.pid for host in cluster.hosts], *cluster.hosts[0].pids(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_killed_test_process(tmp_path: Path) -> None:
    began = time.monotonic()
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL and len(done.stdout.split()) == 4
    await_that(lambda: not any(map(_alive, done.stdout.split())), 5, lambda: f"still there: {done.stdout}")
    assert time.monotonic() - began < 10


def _alive(pid: str) -> bool:
    return Path("/proc", pid).exists() and " Z " not in Path("/proc", pid, "stat").read_text()
