"""The checks of a start against real hosts with real ssh: each fault is named with its host, its reason and a fix."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import fabrics
from tests.cluster import Cluster, Host
from tests.conftest import REPO
from tests.fabrics import Synthetic

Done = CompletedProcess[str]


@pytest.fixture
def hosts(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, put in order afterwards."""
    known = (cluster.ssh / "known_hosts").read_text()
    yield cluster
    (cluster.ssh / "known_hosts").write_text(known)
    cluster.clear()
    for host in [*cluster.hosts, cluster.head]:
        host.run(["sh", "-c", "rm -rf /srv/private/*"], check=True)


def check(
    cluster: Cluster,
    *words: str,
    lines: tuple[str, ...] = ("n1 slots=1", "n2 slots=1"),
    path: str = os.environ["PYTHONPATH"],
    device: str = "cpu",
) -> Done:
    """`check hosts` from the head, in a folder that every host has and that is not the checkout."""
    hostfile = cluster.hostfile(*lines, name="checked")
    (cluster.folder / "work").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "launcher", "check", "hosts", f"cluster.hostfile={hostfile}"]
    command += [f"env.set.DS_ACCELERATOR={device}", f"env.set.PYTHONPATH='{path}'", *words]
    return cluster.head.run(command, cwd=cluster.folder / "work")


def rows(done: Done) -> list[list[str]]:
    """The cells of the table's rows."""
    return [line.split() for line in done.stdout.splitlines() if line.startswith(("n1 ", "n2 ", "n3 "))]


def test_hosts_that_can_start(hosts: Cluster) -> None:
    """N03: the address of Docker's network, the same on two hosts, is not where they meet."""
    with hosts.hosts[0].network("docker0", "172.17.0.1/16"), hosts.hosts[1].network("docker0", "172.17.0.1/16"):
        done = check(hosts, lines=("n1 slots=2", "n2 slots=1", "n3 slots=1"))
    assert done.returncode == 0, done.stderr
    for host, cells in zip(hosts.hosts, rows(done), strict=True):
        assert cells[0] == host.name and cells[2] == "ms" and cells[3] == sys.version.split()[0]
        assert cells[-3:] == ["shared", host.address, "(eth0)"]
    assert f"ranks meet at {hosts.hosts[0].address} (n1 as n2 knows it), reached from n2, n3" in done.stdout
    assert "they talk over eth0" in done.stdout
    count = len(os.sched_getaffinity(0))
    assert f"OMP_NUM_THREADS={count // 2 or 1}: {count} processors for 2 ranks" in done.stdout
    assert "n1, n2, n3: nothing keeps 4 ranks from starting" in done.stdout
    assert not list((hosts.folder / "work").iterdir())


def test_every_host_that_is_not_reached_has_a_row(hosts: Cluster) -> None:
    """T10: unknown and changed host keys, no such name, no such login."""
    known = (hosts.ssh / "known_hosts").read_text().splitlines()
    n1 = next(line for line in known if line.startswith("n1"))
    changed = "n2,10.77.0.2,fd77::2 " + n1.partition(" ")[2]
    (hosts.ssh / "known_hosts").write_text(f"{n1}\n{changed}\n")
    done = check(hosts, lines=("n1 slots=1", "n2 slots=1", "n3 slots=1", "gpu-x slots=1", "nobody@10.77.0.1 slots=1"))
    assert done.returncode == 3
    text = done.stderr
    assert text.startswith("4 problems with the hosts:")
    assert "  n2         host key  its ssh host key is not the one that is known here" in text
    assert "  n3         host key  its ssh host key is not known here" in text and "try  ssh n3   (once" in text
    assert "  gpu-x      name      this machine knows no address for gpu-x" in text
    assert "  10.77.0.1  login     Permission denied (publickey)" in text and "ssh-copy-id nobody@10.77.0.1" in text
    assert rows(done)[0][2] == "ms" and rows(done)[1][1:] == ["-"] * (len(rows(done)[1]) - 1)


def test_host_that_is_down_is_named_in_time(hosts: Cluster) -> None:
    """T11."""
    hosts.hosts[1].down()
    done = check(hosts, "cluster.connect_s=1")
    assert done.returncode == 3
    assert "n2  unreachable  " in done.stderr and "is it switched on" in done.stderr


def private(host: Host, name: str, text: str, mode: int = 0o644) -> None:
    """Write a file that this host alone has."""
    path = Path("/srv/private", name)
    host.run(["mkdir", "-p", path.parent], check=True)
    host.run(["tee", path], input=text, check=True)
    host.run(["chmod", f"{mode:o}", path], check=True)


def test_interpreter_that_one_host_lacks(hosts: Cluster) -> None:
    """T14: the very interpreter is tried on each host."""
    private(hosts.hosts[0], "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n', 0o755)
    done = check(hosts, "cluster.python=/srv/private/python")
    assert done.returncode == 2
    assert "n2  python  " in done.stderr and "/srv/private/python: No such file or directory" in done.stderr
    assert "cluster.python=PATH" in done.stderr


def test_other_versions_other_code_and_missing_data_are_named(hosts: Cluster) -> None:
    """T16, G11."""
    n2 = hosts.hosts[1]
    private(n2, "site/torch-0.1.dist-info/METADATA", "")
    n2.run(["cp", "-r", str(REPO / "launcher"), "/srv/private/site/launcher"], check=True)
    private(n2, "site/launcher/spec.py", "MISSING = 1\n")
    for host in (hosts.head, hosts.hosts[0]):
        private(host, "rows.jsonl", '{"query": "a", "positives": ["b"], "negatives": ["c"]}\n')
    path = os.pathsep.join(["/srv/private/site", os.environ["PYTHONPATH"]])
    data = ("dataset=jsonl", "dataset.train=/srv/private/rows.jsonl", "model=tiny")
    done = check(hosts, *data, path=path)
    assert done.returncode == 3, done.stderr
    text = done.stderr
    assert text.startswith("3 problems"), text  # too old for the trainer, and not as here
    assert "n2  versions  torch 0.1, but" in text and "on this machine, n1" in text
    assert "n2  code      the launcher in /srv/private/site/launcher is not the one here: spec.py differs" in text
    comes = "n2: dataset.train=/srv/private/rows.jsonl: no such file or directory: a run sends it"
    assert comes in done.stdout.splitlines()
    quiet = check(hosts, "cluster.sync=none", path=path)
    assert "the launcher in" not in quiet.stderr
    sent = check(hosts, "cluster.sync=rsync", path=path)
    assert sent.stderr.startswith("2 problems with") and "versions" in sent.stderr
    assert "is not the one here: spec.py differs: a run sends it" in sent.stdout


def test_folder_of_runs_that_is_not_shared(hosts: Cluster) -> None:
    """C07: what is written on one host is looked for on the others."""
    done = check(hosts, "run.root=/srv/private/runs")
    assert done.returncode == 0, done.stderr
    assert [cells[-4:-2] for cells in rows(done)] == [["its", "own"], ["its", "own"]]


def test_port_that_is_taken_on_the_first_host(hosts: Cluster) -> None:
    """N01: refused before the start."""
    n1 = hosts.hosts[0]
    code = "import socket; s = socket.create_server(('', 21212)); print(flush=True); s.accept()"
    with n1.popen([sys.executable, "-c", code], stdout=-1, text=True) as taken:
        assert taken.stdout is not None
        taken.stdout.readline()
        done = check(hosts, "cluster.master_port=21212")
        taken.kill()
    assert done.returncode == 2
    assert "n1  port  cluster.master_port=21212 is taken on n1" in done.stderr


@contextlib.contextmanager
def no_answers(host: Host, to: str) -> Iterator[None]:
    """What a firewall does: packets from `host` to this address vanish."""
    host.run(["ip", "route", "add", "blackhole", f"{to}/32"], check=True)
    try:
        yield
    finally:
        host.run(["ip", "route", "del", "blackhole", f"{to}/32"], check=True)


def test_pair_that_cannot_talk_is_named(hosts: Cluster) -> None:
    """N09: high ports are tried in both directions."""
    n2, n3 = hosts.hosts[1:]
    with no_answers(n3, n2.address):
        done = check(hosts, lines=("n1 slots=1", "n2 slots=1", "n3 slots=1"))
    assert done.returncode == 3
    assert f"n3  network  n2 cannot reach it at {n3.address} (eth0), at a high port: no answer" in done.stderr
    assert "n1 " not in done.stderr


def test_first_host_that_one_cannot_reach_has_its_addresses_listed(hosts: Cluster) -> None:
    """N03: candidates are listed."""
    n1, n2 = hosts.hosts[:2]
    with no_answers(n1, n2.address):
        done = check(hosts, "cluster.master_addr=n1", lines=("n1 slots=1", "n2 slots=1", "n3 slots=1"))
    assert done.returncode == 2
    assert "n1  address  no address of it is reached at port" in done.stderr
    assert "n1 (cluster.master_addr): no answer from n2" in done.stderr
    assert "cluster.master_addr=null" in done.stderr


def test_address_that_every_host_has_is_not_the_first_hosts(hosts: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        for host in hosts.hosts[:2]:
            stack.enter_context(host.network("docker0", "172.17.0.1/16"))
        done = check(hosts, "cluster.master_addr=172.17.0.1")
    assert done.returncode == 2
    assert "172.17.0.1 (cluster.master_addr): Connection refused from n2" in done.stderr


def test_interfaces_that_are_wrong(hosts: Cluster) -> None:
    """N05: names of interfaces are looked up on each host."""
    done = check(hosts, lines=("n1 slots=1", "n2 slots=1 iface=eth9"))
    assert done.returncode == 2
    assert (
        "n2  interface  iface=eth9 of the hostfile is not up there or has no address; there are lo, eth0" in done.stderr
    )
    done = check(hosts, "env.set.GLOO_SOCKET_IFNAME=lo", "nccl.force=true")
    assert done.returncode == 3
    assert "n2  network  n1 cannot reach it at 127.0.0.1 (lo)" in done.stderr


def test_one_machine_by_two_names(hosts: Cluster) -> None:
    """H06: after names are resolved."""
    done = check(hosts, lines=("n1 slots=1", "10.77.0.1 slots=1"))
    assert done.returncode == 2
    assert "10.77.0.1  twice  it is the same machine as n1 (n1)" in done.stderr


@contextlib.contextmanager
def seeing(cluster: Cluster, host: Host, made: Synthetic) -> Iterator[None]:
    """The host with a synthetic tree in place of /sys/class, and with the programs that belong to it."""
    made.write_programs(cluster.folder / "programs" / host.name)
    host.run(["mkdir", "-p", "/srv/private"], check=True)
    host.run(["cp", "-r", cluster.folder / "programs" / host.name, "/srv/private/bin"], check=True)
    host.run(["mount", "--bind", made.root / "sys/class", "/sys/class"], check=True)
    try:
        yield
    finally:
        host.run(["umount", "/sys/class"], check=True)


def test_networks_and_gpu_links_of_hosts_are_told_and_judged(hosts: Cluster) -> None:
    """N07, through ssh. Cards and GPUs are synthetic."""
    with contextlib.ExitStack() as stack:
        for host, down in zip(hosts.hosts, ((), ("mlx5_3",)), strict=False):
            made = fabrics.ib_node(hosts.folder / f"tree-{host.name}", down=down)
            fabrics.interface(made, "eth0", speed=25000)
            stack.enter_context(seeing(hosts, host, made))
        wrap = f"cluster.wrap=[env,'PATH=/srv/private/bin:{os.environ['PATH']}']"
        words = (wrap, "model=tiny", "zero=stage2", "nccl.hca=[mlx5_0,mlx5_3]")
        done = check(hosts, *words, lines=("n1 slots=2", "n2 slots=2"), device="cuda")
    assert done.returncode == 3, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for row in ("n1 InfiniBand 8 up, 400 Gb/s eth0 25 Gb/s", "n2 InfiniBand 7 of 8 up, 400 Gb/s eth0 25 Gb/s"):
        assert any(line.startswith(f"{row} NVLink (NV18)") for line in lines), done.stdout
    assert "NCCL_IB_HCA==mlx5_0,mlx5_3 (nccl.hca, by exact names)" in done.stdout
    assert "NCCL_SOCKET_IFNAME==eth0 (the interface whose route reaches the other hosts)" in done.stdout
    assert "n2  RDMA  port mlx5_3:1 is DOWN / Disabled, and NCCL_IB_HCA names it" in done.stderr
    assert "all wait for the slowest" not in done.stdout  # n2 has a row of its own
