"""From what hosts are to the variables of their ranks: probe, planner and checks joined. The hosts are synthetic."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.fabric import Fabric
from launcher.planning.joining import GIVEN
from launcher.running.fabric import Joined, join
from launcher.spec import Host, RunPlan
from tests import fabrics
from tests.fabrics import Synthetic
from tests.planning_support import gpus
from tests.planning_support import plan as planned
from tests.test_fabric_checks import seen

Make = Callable[[Path], Synthetic]
CARDS = "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7"
AZURE = "=mlx5_ib0,mlx5_ib1,mlx5_ib2,mlx5_ib3,mlx5_ib4,mlx5_ib5,mlx5_ib6,mlx5_ib7"


@functools.cache
def on_gpus(*words: str) -> RunPlan:
    """The plan of a command line on an invented machine with GPUs."""
    return planned("gpus=2", "model=tiny", "zero=stage2", *words, gpus=gpus(2))


def plan_for(fabric: Fabric, *words: str, hosts: int = 2) -> RunPlan:
    """A plan for all GPUs of hosts n1, n2, ..., made before any of them is asked."""
    here = on_gpus(*words)
    slots = tuple(range(len(fabric.gpus or ())))
    assert here.device == "cuda" and slots
    return dataclasses.replace(here, hosts=tuple(Host(name=f"n{n + 1}", gpus=slots) for n in range(hosts)))


def joined(make: Make, folder: Path, interface: str, *words: str, hosts: int = 2, **env: str) -> Joined:
    """What becomes of a plan on so many hosts of one kind."""
    fabric = seen(make(folder / "host"), folder)
    plan = plan_for(fabric, *words, hosts=hosts)
    plan = dataclasses.replace(
        plan, env={**plan.env, **env}, env_sources={**plan.env_sources, **dict.fromkeys(env, "env.set")}
    )
    names = [host.name for host in plan.hosts]
    return join(plan, dict.fromkeys(names, fabric), dict.fromkeys(names, interface) if hosts > 1 else {})


def without_image_settings(root: Path) -> Synthetic:
    """Azure in a container: its image's nccl.conf is not there."""
    made = fabrics.azure_node(root)
    (root / "etc/nccl.conf").unlink()
    return made


def unaddressed(root: Path) -> Synthetic:
    """Fast Ethernet cards with RDMA that nobody has given an IPv4 address."""
    made = fabrics.tcp_node(root)
    gids = fabrics.roce_gids("0.0.0.0")[:2]
    fabrics.port(made, "mlx5_0", layer="Ethernet", rate="100 Gb/sec (4X EDR)", netdev="ens4", gids=gids)
    return made


def before_550(root: Path) -> Synthetic:
    """RTX 40 cards whose driver claims access between them."""
    made = fabrics.pcie_node(root)
    query = ("nvidia-smi", fabrics.QUERY, "--format=csv,noheader")
    made.commands[query] = made.commands[query].replace(fabrics.DRIVER, "535.54.03")
    return made


# Kind of hosts -> by which interface they reach one another, what their ranks get beside it, and words of a note.
TABLE: dict[str, tuple[Make, str, dict[str, str], str]] = {
    "ib": (fabrics.ib_node, "eno1", {}, "NVLink inside a host, InfiniBand between hosts, for which NCCL needs no"),
    "ib and storage": (
        lambda root: fabrics.ib_node(root, storage=True),
        "eno1",
        {"NCCL_IB_HCA": CARDS},
        "without mlx5_8: RoCE beside InfiniBand",
    ),
    "roce": (fabrics.roce_node, "eno1", {}, "RoCE between hosts, for which NCCL needs no"),
    "efa": (fabrics.efa_node, "enp71s0", {}, "EFA between hosts, for which NCCL needs no"),
    "gib": (fabrics.gib_node, "enp0s19", {}, "GCP's plugin between hosts"),
    "tcpxo": (fabrics.tcpxo_node, "eth0", {}, "GCP's plugin between hosts"),
    "azure": (fabrics.azure_node, "eth0", {"NCCL_IB_HCA": AZURE}, "InfiniBand between hosts"),
    "azure in a container": (
        without_image_settings,
        "eth0",
        {
            "NCCL_IB_HCA": AZURE,
            "NCCL_TOPO_FILE": "/opt/microsoft/ndv5/topo.xml",
            "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        },
        "Azure's machines hide how PCIe is laid out",
    ),
    "tcp": (
        fabrics.tcp_node,
        "ens3",
        {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
        "ens3 is 100 Gb/s",
    ),
    "slow tcp": (lambda root: fabrics.tcp_node(root, speed=10000), "ens3", {}, "TCP between hosts"),
    "cards without an address": (
        unaddressed,
        "ens3",
        {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
        "no IPv4 address of RoCE v2 on mlx5_0",
    ),
    "pcie": (fabrics.pcie_node, "enp5s0", {}, "PCIe inside a host, TCP between hosts"),
    "pcie with an old driver": (before_550, "enp5s0", {"NCCL_P2P_DISABLE": "1"}, "driver 535.54.03 claims access"),
    "vm": (fabrics.vm_node, "eth0", {}, "PCIe inside a host, TCP between hosts"),
}


@pytest.mark.parametrize("kind", TABLE)
def test_hosts_of_one_kind_get_the_fewest_variables(kind: str, tmp_path: Path) -> None:
    """Each with its reason; and a launcher on another node takes every one of them from node rank 0."""
    make, interface, wanted, said = TABLE[kind]
    done = joined(make, tmp_path, interface)
    assert done.findings == () and done.problems == ()
    ways = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    assert done.plan.host_env == {host: {**wanted, **ways} for host in ("n1", "n2")}
    assert done.plan.env["NCCL_DEBUG"] == "WARN"
    assert set(done.plan.env_reasons) >= {*wanted, *ways, "NCCL_DEBUG"}
    assert any(said in note for note in done.notes), done.notes
    for name, value in {**wanted, **ways, "NCCL_DEBUG": "WARN"}.items():
        assert any(note.startswith(f"{name}={value} (") for note in done.notes), (name, done.notes)
    assert all(GIVEN.fullmatch(name) for name in done.plan.host_env["n2"])
    alone = joined(make, tmp_path / "alone", interface, hosts=1)
    kept = {name: value for name, value in wanted.items() if name == "NCCL_P2P_DISABLE"}
    assert alone.plan.host_env == ({"n1": kept} if kept else {})


WARNINGS: dict[str, tuple[Make, dict[str, Any], str]] = {
    "little memory may be pinned": (
        lambda root: limited(fabrics.ib_node(root)),
        {},
        "n1, n2: a process may pin 0.0625 MiB, and RDMA needs to pin NCCL's buffers",
    ),
    "the script of Google's plugin": (
        fabrics.gib_node,
        {},
        "n1, n2: Google's plugin needs the variables of /usr/local/gib/scripts/set_nccl_env.sh",
    ),
    "a slow network": (lambda root: fabrics.tcp_node(root, speed=10000), {}, "n1, n2: ens3 is 10 Gb/s"),
    "a name that nobody reads": (
        fabrics.ib_node,
        {"NCCL_IB_HAC": "mlx5_0"},
        "NCCL_IB_HAC=mlx5_0 is ignored by NCCL; did you mean NCCL_IB_HCA?",
    ),
}


def limited(made: Synthetic) -> Synthetic:
    """Docker's default."""
    fabrics.limit(made, "65536")
    return made


@pytest.mark.parametrize("what", WARNINGS)
def test_what_is_odd_is_a_warning(what: str, tmp_path: Path) -> None:
    make, env, said = WARNINGS[what]
    done = joined(make, tmp_path, "ens3", **env)
    assert done.findings == () and done.problems == ()
    assert any(text.startswith(said) for text in done.plan.warnings), done.plan.warnings


def test_variables_of_the_user_are_kept_and_judged_by_what_the_hosts_have(tmp_path: Path) -> None:
    kept = joined(fabrics.tcp_node, tmp_path / "a", "ens3", NCCL_SOCKET_NTHREADS="2", NCCL_IB_DISABLE="1")
    assert kept.plan.host_env["n1"]["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert "NCCL_SOCKET_NTHREADS" not in kept.plan.host_env["n1"] and kept.problems == ()
    off = joined(fabrics.ib_node, tmp_path / "b", "eno1", NCCL_IB_DISABLE="1")
    assert ["NCCL_IB_DISABLE=1 turns off the InfiniBand" in problem.text for problem in off.problems] == [True]
    forced = joined(fabrics.ib_node, tmp_path / "c", "eno1", "nccl.force=true", NCCL_IB_DISABLE="1")
    assert forced.problems == () and any("NCCL_IB_DISABLE=1 turns off" in text for text in forced.plan.warnings)
    named = joined(fabrics.ib_node, tmp_path / "d", "eno1", NCCL_IB_HCA="=mlx5_9")
    assert {row.host: row.what for row in named.findings} == {"n1": "RDMA", "n2": "RDMA"}


def test_hosts_on_the_cpu_get_no_variable_of_nccl(tmp_path: Path) -> None:
    plan = dataclasses.replace(planned(), hosts=(Host(name="n1", gpus=(0,)), Host(name="n2", gpus=(0,))))
    assert plan.device == "cpu"
    done = join(plan, {}, dict.fromkeys(("n1", "n2"), "eno1"))
    assert done.plan.host_env == {host: {"GLOO_SOCKET_IFNAME": "eno1"} for host in ("n1", "n2")}
    assert not [name for name in done.plan.env if name.startswith("NCCL")]
    assert (done.findings, done.problems, done.notes) == ((), (), ()) and done.plan.warnings == plan.warnings
