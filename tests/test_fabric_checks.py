"""Hosts whose networks do not fit a run, seen by the real probe in synthetic trees: each fault has host and port."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.planning.fabric import Fabric, Port
from launcher.running import fabric_probe
from launcher.running.fabric import with_addresses
from launcher.running.fabric_checks import fabric_findings, fabric_oddities, read_hca
from launcher.spec import Host, RunPlan
from tests import fabrics
from tests.fabrics import Synthetic
from tests.planning_support import plan as planned

Make = Callable[[Path], Synthetic]


def seen(made: Synthetic, cache: Path) -> Fabric:
    """What the probe sees of a synthetic host."""
    question = {"cwd": "/home/me/qwen", "path": [], "env": {"XDG_CACHE_HOME": str(cache)}, "names": []}
    return with_addresses(fabric_probe.fabric(question, made.machine()), made.addresses)


def on(*names: str, profile: str = "auto") -> RunPlan:
    """A plan for GPUs of these hosts."""
    plan = planned()
    nccl = dataclasses.replace(plan.config.nccl, name=profile)
    config = dataclasses.replace(plan.config, nccl=nccl)
    hosts = tuple(Host(name=name, gpus=(0,)) for name in names)
    return dataclasses.replace(plan, config=config, hosts=hosts, device="cuda")


def down(*ports: str) -> Make:
    """An InfiniBand node with ports down."""
    return lambda root: fabrics.ib_node(root, down=ports)


def fewer_gids(root: Path) -> Synthetic:
    """A RoCE node whose first card has lost its IPv4 address."""
    made = fabrics.roce_node(root)
    for index in (2, 3):
        made.write(f"sys/class/infiniband/mlx5_0/ports/1/gids/{index}", "0000:" * 7 + "0000\n")
    return made


EVERY = [f"mlx5_{n}" for n in range(8)]
FAULTS: dict[str, tuple[Make, Make, dict[str, str], str, str]] = {
    "a port that is named is down": (
        fabrics.ib_node,
        down("mlx5_3"),
        {"NCCL_IB_HCA": "=mlx5_2,mlx5_3"},
        "auto",
        "n2: port mlx5_3:1 is DOWN / Disabled, and NCCL_IB_HCA names it",
    ),
    "a device that is named is missing": (
        fabrics.ib_node,
        fabrics.azure_node,
        {"NCCL_IB_HCA": "=mlx5_0"},
        "ib",
        "n2: NCCL_IB_HCA names mlx5_0, which is not there; there is mlx5_an0, mlx5_ib0, mlx5_ib1, mlx5_ib2 and 5 more",
    ),
    "all ports of a host are down": (
        fabrics.ib_node,
        down(*EVERY),
        {},
        "auto",
        "n2: no port for InfiniBand is up (mlx5_0:1 is DOWN / Disabled, mlx5_1:1 is DOWN / Disabled, "
        "mlx5_2:1 is DOWN / Disabled, mlx5_3:1 is DOWN / Disabled and 4 more), and n1 uses InfiniBand",
    ),
    "a host has no card": (
        fabrics.ib_node,
        fabrics.tcp_node,
        {},
        "auto",
        "n2: no port for InfiniBand is up (it has no RDMA card), and n1 uses InfiniBand",
    ),
    "a host has another kind of network": (
        fabrics.ib_node,
        fabrics.roce_node,
        {},
        "auto",
        "n2: port mlx5_0:1 is Ethernet (RoCE), and n1 uses InfiniBand",
    ),
    "the profile means another kind": (
        fabrics.ib_node,
        fabrics.ib_node,
        {},
        "roce",
        "n1, n2: port mlx5_0:1 is InfiniBand, and nccl=roce wants Ethernet (RoCE)",
    ),
    "the address index is out of range": (
        fabrics.roce_node,
        fewer_gids,
        {"NCCL_IB_GID_INDEX": "3"},
        "auto",
        "n2: port mlx5_0:1 has no address at NCCL_IB_GID_INDEX=3; it has no address of RoCE v2",
    ),
    "the address index is of none": (
        fabrics.roce_node,
        fabrics.roce_node,
        {"NCCL_IB_GID_INDEX": "5", "NCCL_IB_HCA": "=mlx5_7"},
        "auto",
        "n1, n2: port mlx5_7:1 has no address at NCCL_IB_GID_INDEX=5; RoCE v2 has 3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_network_are_named_with_host_and_port(fault: str, tmp_path: Path) -> None:
    """N07."""
    first, second, variables, profile, said = FAULTS[fault]
    plan = on("n1", "n2", profile=profile)
    found = {"n1": seen(first(tmp_path / "1"), tmp_path), "n2": seen(second(tmp_path / "2"), tmp_path)}
    rows: dict[str, list[str]] = {}
    for row in fabric_findings(plan, found, dict.fromkeys(found, variables)):
        assert row.what == "RDMA" and row.tries
        rows.setdefault(row.reason, []).append(row.host)
    assert [f"{', '.join(hosts)}: {reason}" for reason, hosts in rows.items()] == [said]


def test_what_fits_or_is_not_used_is_no_fault(tmp_path: Path) -> None:
    """A port that no cable is in is down on every host, a host alone needs none, and sockets need no card."""
    ib, partly = (seen(down(*ports)(tmp_path / str(len(ports))), tmp_path) for ports in ((), ("mlx5_3",)))
    tcp = seen(fabrics.tcp_node(tmp_path / "tcp"), tmp_path)
    plan = on("n1", "n2")
    assert fabric_findings(plan, {"n1": ib, "n2": ib}, {}) == []
    assert fabric_findings(plan, {"n1": partly, "n2": partly}, {}) == []
    assert list(fabric_oddities(plan, {"n1": partly, "n2": partly}, {})) == []
    assert fabric_findings(plan, {"n1": tcp, "n2": tcp}, {}) == []
    sockets = {name: {"NCCL_NET": "Socket"} for name in ("n1", "n2")}
    assert fabric_findings(plan, {"n1": ib, "n2": tcp}, sockets) == []
    assert fabric_findings(on("n1"), {"n1": partly}, {"n1": {"NCCL_IB_HCA": "mlx5_3"}}) == []
    assert fabric_findings(plan, {"n1": ib, "n2": Fabric()}, {}) == []  # not known
    cpu = dataclasses.replace(plan, device="cpu")
    assert fabric_findings(cpu, {"n1": ib, "n2": tcp}, {}) == []


def test_fewer_ports_than_elsewhere_are_a_warning(tmp_path: Path) -> None:
    ib, partly = (seen(down(*ports)(tmp_path / str(len(ports))), tmp_path) for ports in ((), ("mlx5_3",)))
    plan, found = on("n1", "n2", "n3"), {"n1": ib, "n2": partly, "n3": ib}
    assert fabric_findings(plan, found, {}) == []
    assert list(fabric_oddities(plan, found, {})) == [
        "n2: 7 RDMA ports are up, and 8 on n1, n3: mlx5_3:1 is down; all wait for the slowest host"
    ]
    named = {name: {"NCCL_IB_HCA": "^=mlx5_3"} for name in found}
    assert list(fabric_oddities(plan, found, named)) == []


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("^mlx5_1", ["mlx5_0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10"]),
        ("=mlx5_0:1,mlx5_1:2", ["mlx5_0"]),
    ],
)
def test_names_of_cards_are_read_as_nccl_reads_them(value: str, fits: list[str]) -> None:
    ports = [Port(device=name) for name in ("mlx5_0", "mlx5_1", "mlx5_10")]
    assert [port.device for port in ports if read_hca(value).fits(port)] == fits
