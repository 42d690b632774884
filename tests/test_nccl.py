"""NCCL's variables by fabric: the fewest, each with a reason, never against the user's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.plain import to_data
from launcher.planning.fabric import Fabric, Interface, SetFile, from_probe
from launcher.planning.nccl import NcclChoice, choose
from launcher.planning.nccl_plan import completed
from launcher.running.causes import CAUSES, of_text
from launcher.spec import Host, NcclConfig, RunConfig
from tests.nccl_support import L40S, RTX, efa, eight, eth, hosts, ib, node, roce
from tests.planning_support import gpus, plan

QUIET = {"NCCL_DEBUG": "WARN"}


def chosen(*fabrics: Fabric, env: dict[str, str] | None = None, **nccl: Any) -> NcclChoice:
    """The choice for these hosts, with all their GPUs."""
    known = hosts(fabrics)
    machines = [Host(name=name, gpus=tuple(range(len(one.gpus or ())))) for name, one in known.items()]
    config = RunConfig(nccl=NcclConfig(**nccl))
    routes = dict.fromkeys(known, "eth0")
    return choose(config, known, hosts=machines, device="cuda", env=env or {}, interfaces=routes)


def shown(choice: NcclChoice) -> list[str]:
    """VAR=value (reason) of what the hosts call for, once where it is alike."""
    return [note for note in choice.notes if "=" in note]


THREADS = [
    "NCCL_SOCKET_NTHREADS=4 (eth0 is {} Gb/s, which one thread seldom fills)",
    "NCCL_NSOCKS_PERTHREAD=4 (eth0 is {} Gb/s, which one socket seldom fills)",
]
ETHERNET: dict[str, Any] = {"interfaces": (eth("eth0", 100_000),)}
AZURE: dict[str, Any] = {
    "cloud": "azure",
    "product": "Virtual Machine",
    "virtual": True,
    "topo_file": "/opt/microsoft/ndv5/topo.xml",
}
DOCKER = tuple(Interface(name=name, state="up") for name in ("lo", "docker0", "br-1a2b3c4d5e6f", "veth12"))
BRIDGES: tuple[Interface, ...] = (eth("ens3", None), *DOCKER)

FABRICS: dict[str, tuple[list[Fabric], list[str]]] = {
    "one NVSwitch node": ([node()], []),
    "NVSwitch and InfiniBand": ([node(ports=eight(ib))] * 2, []),
    "InfiniBand beside a slow card for storage and a bond": (
        [node(ports=(*eight(ib), ib("mlx5_8", 100.0), roce("mlx5_bond_0", 100.0)))] * 2,
        [
            "NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7 "
            "(without mlx5_8: 100 of 400 Gb/s; without mlx5_bond_0: RoCE beside InfiniBand)"
        ],
    ),
    "cards named otherwise on each host": (
        [node(ports=(ib("ibp1"), roce("eno1"))), node(ports=(ib("mlx5_3"), roce("mlx5_0")))],
        [
            "a: NCCL_IB_HCA==ibp1 (a: without eno1: RoCE beside InfiniBand; b: without mlx5_0: RoCE beside InfiniBand)",
            "b: NCCL_IB_HCA==mlx5_3 "
            "(a: without eno1: RoCE beside InfiniBand; b: without mlx5_0: RoCE beside InfiniBand)",
        ],
    ),
    "RoCE": ([node(ports=eight(roce))] * 2, []),
    "RoCE of which one card has no address": (
        [node(ports=(roce("mlx5_0"), roce("mlx5_1", address=None)))] * 2,
        ["NCCL_IB_HCA==mlx5_0 (without mlx5_1: no IPv4 address of RoCE v2)"],
    ),
    "RoCE without any address": (
        [node(ports=(roce("mlx5_0", address=None),))] * 2,
        ["NCCL_IB_DISABLE=1 (no IPv4 address of RoCE v2 on mlx5_0)"],
    ),
    "EFA": ([node(ports=efa(32), cloud="aws", product="p5.48xlarge", efa_plugin="/opt/amazon/x.so")] * 2, []),
    "GCP A3 Ultra": ([node(ports=eight(roce), cloud="gcp", gcp_profile="/usr/local/gib/s.sh")] * 2, []),
    "Azure ND, image's own file": (
        [
            node(
                ports=eight(ib),
                files=(
                    SetFile(
                        path="/etc/nccl.conf",
                        variables={"NCCL_TOPO_FILE": "/x", "NCCL_IB_PCI_RELAXED_ORDERING": "1"},
                    ),
                ),
                **AZURE,
            )
        ]
        * 2,
        [],
    ),
    "Azure ND in a container": (
        [node(ports=eight(ib), **AZURE)] * 2,
        [
            "NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml (Azure's machines hide how PCIe is laid out)",
            "NCCL_IB_PCI_RELAXED_ORDERING=1 (writes over virtual PCIe need not wait)",
        ],
    ),
    "100 GbE": ([node(**ETHERNET)] * 2, [line.format(100) for line in THREADS]),
    "25 GbE on the slower of two": (
        [node(**ETHERNET), node(interfaces=(eth("eth0", 25_000),))],
        [line.format(25) for line in THREADS],
    ),
    "100 GbE on AWS, where NCCL knows": ([node(cloud="aws", **ETHERNET)] * 2, []),
    "10 GbE": ([node()] * 2, []),
    "four RTX 4090": ([node(RTX, 4, "PHB")], []),
    "four RTX 4090 with an old driver": (
        [node(RTX, 4, "PHB", driver="535.54.03")],
        ["NCCL_P2P_DISABLE=1 (driver 535.54.03 claims access between RTX 40 GPUs that they do not have)"],
    ),
    "L40S": ([node(L40S, 4, "NODE")], []),
    "virtual machines with Docker's bridges": ([node(L40S, 2, "PHB", interfaces=BRIDGES, virtual=True)] * 2, []),
    "one GPU": ([node(count=1)], []),
}


@pytest.mark.parametrize("name", FABRICS)
def test_fewest_variables_each_with_its_reason(name: str) -> None:
    fabrics, expected = FABRICS[name]
    choice = chosen(*fabrics)
    assert shown(choice) == expected
    assert choice.env == ({} if name == "one GPU" else QUIET)
    assert choice.errors == ()


def test_what_the_hosts_are_joined_by_is_said() -> None:
    first = "GPUs talk over NVLink inside a host, InfiniBand between hosts, for which NCCL needs no variable"
    assert chosen(*[node(ports=eight(ib))] * 2).notes == (first,)
    assert chosen(node(L40S, 2, "PHB")).notes == (
        "GPUs talk over PCIe inside a host, for which NCCL needs no variable",
    )


PROFILES: list[tuple[dict[str, Any], list[Fabric], dict[str, str], list[str]]] = [
    ({"name": "tcp"}, [node(ports=eight(ib), **ETHERNET)] * 2, {"NCCL_NET": "Socket"}, ["NCCL_SOCKET_NTHREADS"]),
    ({"name": "ib", "hca": ["mlx5_0", "mlx5_1"]}, [node(ports=eight(ib))] * 2, {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}, []),
    (
        {"name": "roce", "traffic_class": 106, "cross_nic": 0},
        [node(ports=eight(roce))] * 2,
        {"NCCL_IB_TC": "106", "NCCL_CROSS_NIC": "0"},
        [],
    ),
    ({"name": "pcie"}, [node(L40S, 4, "PHB")], {}, ["NCCL_P2P_LEVEL"]),
    ({"name": "nvlink"}, [node()], {}, []),
    ({"interface": "eth0"}, [node()] * 2, {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}, []),
]


@pytest.mark.parametrize(("nccl", "fabrics", "env", "found"), PROFILES)
def test_profiles_and_keys(nccl: dict[str, Any], fabrics: list[Fabric], env: dict[str, str], found: list[str]) -> None:
    choice = chosen(*fabrics, **nccl)
    assert choice.env == {**QUIET, **env}
    assert [name for name in choice.host_env.get("a", {}) if name != "NCCL_NSOCKS_PERTHREAD"] == found
    assert not choice.errors
    assert choice.env.keys() | set(found) <= choice.reasons.keys()


def texts(choice: NcclChoice) -> str:
    return "\n".join(f"{one.level}: {one.sentence()}" for one in choice.found)


@pytest.mark.parametrize(
    ("fabrics", "nccl", "text"),
    [
        (
            [node(count=2, link="SYS")],
            {"name": "nvlink"},
            "error: a: nccl=nvlink, and some of its GPUs are joined by SYS",
        ),
        ([node(fabric_state="In Progress")], {}, "error: a: the NVSwitches are not ready (In Progress)"),
        (
            [node(fabric_state="In Progress", fabric_manager="failed")],
            {},
            "and CUDA cannot start: nvidia-fabricmanager is failed",
        ),
        (
            [node(ports=(roce("m", address=None),))] * 2,
            {"name": "roce"},
            "error: a, b: no IPv4 address of RoCE v2 on m",
        ),
        ([node(ports=(roce("m"),))] * 2, {"gid_index": 2}, "error: a, b: nccl.gid_index=2 is IB/RoCE v1 "),
        ([node(ports=eight(ib), gpudirect="none")] * 2, {}, "warning: a, b: GPUDirect RDMA is not there"),
        (
            [node(ports=eight(ib)), node(ports=eight(ib), memlock_bytes=65536)],
            {},
            "warning: b: a process may pin 0.0625",
        ),
        ([node(ports=efa(31), product="p5.48xlarge", efa_plugin="x")] * 2, {}, "31 of 32 EFA devices"),
        ([node(ports=efa(32))] * 2, {}, "no aws-ofi-nccl is found"),
        ([node(gcp_profile="/gib.sh")] * 2, {}, "warning: a, b: Google's plugin needs the variables of /gib.sh"),
        ([node(ports=(ib("m"), ib("n", 200.0)))] * 2, {}, "n at 200 of 400 Gb/s"),
        ([node(ports=eight(ib), cloud="azure")] * 2, {}, "Azure's file of the PCIe layout is not there"),
        ([node(L40S, 2, "PHB", iommu=True)], {}, "the IOMMU is on"),
        ([node()] * 2, {}, "notice: a, b: eth0 is 10 Gb/s: the network will decide"),
        ([node()], {"hca": ["mlx5_0"]}, "warning: nccl.hca has no effect on one host"),
        ([node()], {"name": "tcp"}, "nccl=tcp is about the network between hosts"),
        ([node()], {"name": "debug"}, "warning: nccl=debug is for finding out"),
    ],
)
def test_what_stands_in_the_way(fabrics: list[Fabric], nccl: dict[str, Any], text: str) -> None:
    assert text in texts(chosen(*fabrics, **nccl))


def test_the_users_own_variables_are_never_set_here() -> None:
    fabrics = [node(ports=(*eight(ib), roce("mlx5_bond_0", 100.0)))] * 2
    assert shown(chosen(*fabrics)) != []
    assert shown(chosen(*fabrics, env={"NCCL_IB_HCA": "mlx5"})) == []
    assert chosen(*fabrics, env={"NCCL_DEBUG": "INFO"}).env == {}
    own = dataclasses.replace(fabrics[0], files=(SetFile(path="/etc/nccl.conf", variables={"NCCL_IB_HCA": "x"}),))
    assert "NCCL_IB_HCA" not in chosen(own, fabrics[1]).host_env.get("a", {})
    assert "NCCL_IB_HCA" in chosen(own, fabrics[1]).host_env["b"]
    said = texts(chosen(*fabrics, env={"NCCL_IB_HCA": "x"}, hca=["mlx5_0"]))
    assert "error: nccl.hca means NCCL_IB_HCA==mlx5_0, and the environment of the ranks has x" in said


PORTS = st.lists(
    st.one_of(
        st.builds(
            ib, st.sampled_from("abcdef"), st.sampled_from([100.0, 200.0, 400.0]), st.sampled_from(["ACTIVE", "DOWN"])
        ),
        st.builds(roce, st.sampled_from("abcdef"), st.just(100.0), st.sampled_from([None, "10.0.0.1"])),
    ),
    max_size=6,
    unique_by=lambda port: port.device,
)
NODES = st.builds(
    node,
    st.sampled_from([RTX, L40S]),
    st.integers(1, 4),
    st.sampled_from(["NV18", "PIX", "SYS"]),
    ports=PORTS.map(tuple),
    driver=st.sampled_from([None, "535.1.2", "570.86.15"]),
    interfaces=st.sampled_from([(eth("eth0", 100_000),), ()]),
    cloud=st.sampled_from([None, "aws", "azure"]),
    topo_file=st.sampled_from([None, "/t.xml"]),
)
OWN = st.dictionaries(
    st.sampled_from(["NCCL_IB_HCA", "NCCL_SOCKET_NTHREADS", "NCCL_IB_DISABLE", "NCCL_DEBUG", "NCCL_TOPO_FILE"]),
    st.just("1"),
)


@settings(max_examples=150, deadline=None)
@given(
    fabrics=st.lists(NODES, min_size=1, max_size=3),
    env=OWN,
    name=st.sampled_from(["auto", "ib", "roce", "tcp", "pcie", "nvlink", "debug"]),
)
def test_never_a_variable_without_a_reason_or_against_the_user(
    fabrics: list[Fabric], env: dict[str, str], name: str
) -> None:
    choice = chosen(*fabrics, env=env, name=name)
    for variables in (choice.env, *choice.host_env.values()):
        assert all(choice.reasons[variable] for variable in variables)
        assert not variables.keys() & env.keys()
    for host, fabric in hosts(fabrics).items():
        named = choice.host_env.get(host, {}).get("NCCL_IB_HCA", "").removeprefix("=")
        up = {port.device for port in fabric.ports or () if port.up}
        assert {label.partition(":")[0] for label in filter(None, named.split(","))} < up or not named


@settings(max_examples=50, deadline=None)
@given(fabric=NODES)
def test_a_fabric_survives_the_probes_json(fabric: Fabric) -> None:
    assert from_probe(to_data(fabric)) == fabric


def test_a_probe_that_says_nonsense_leaves_things_unknown() -> None:
    told = {
        "ports": [{"device": "m"}, {"number": 1}],
        "interfaces": [{"name": "e", "speed_mbps": "x"}],
        "driver": 5,
        "new": 1,
    }
    assert from_probe(told) == Fabric(interfaces=(Interface(name="e"),))
    assert from_probe(None) == from_probe([1]) == Fabric()


def test_a_plan_shows_what_keys_say_and_a_preflight_completes_it() -> None:
    two = plan("model=qwen3_vl_2b", "nodes=2", "gpus=2", "cluster.gpu=h100", "nccl.cross_nic=0")
    assert (two.env["NCCL_CROSS_NIC"], two.env_sources["NCCL_CROSS_NIC"]) == ("0", "nccl")
    assert two.env_reasons["NCCL_DEBUG"] == "NCCL says why it failed, and else nothing"
    names = [host.name for host in two.hosts]
    kept = {name: {"NCCL_SOCKET_IFNAME": "=eth0", "OMP_NUM_THREADS": "4"} for name in names}
    met = dataclasses.replace(two, host_env=kept)
    done = completed(met, dict.fromkeys(names, node(count=2, **ETHERNET)), dict.fromkeys(names, "eth0"))
    assert done.found == ()
    assert done.plan.host_env[names[1]] == {
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "OMP_NUM_THREADS": "4",
    }
    assert done.plan.env == two.env
    assert done.plan.env_reasons["NCCL_SOCKET_IFNAME"] == "the interface whose route reaches the other hosts"
    again = completed(done.plan, dict.fromkeys(names, node(count=2, **ETHERNET)), dict.fromkeys(names, "eth0"))
    assert again.plan == done.plan


def test_this_machines_links_are_known_when_planning() -> None:
    known = {"gpus": gpus(4, name=RTX, gib=24.0, capability=(8, 9))}
    old = plan("model=qwen3_vl_2b", **known, fabric=node(RTX, 4, "PHB", driver="535.54.03"))
    assert (old.env["NCCL_P2P_DISABLE"], old.env_sources["NCCL_P2P_DISABLE"]) == ("1", "nccl")
    waiting = plan("model=qwen3_vl_2b", **known, fabric=node(RTX, 4, fabric_state="In Progress"))
    assert any("the NVSwitches are not ready (In Progress)" in text for text in waiting.warnings)
    with pytest.raises(ConfigError, match="nccl=nvlink, and some of its GPUs are joined by PHB only"):
        plan("model=qwen3_vl_2b", "nccl=nvlink", **known, fabric=node(RTX, 4, "PHB"))


def test_a_warning_of_nccl_about_another_jobs_port_is_no_cause() -> None:
    warned = "a:1:2 [0] ras/client_support.cc:181 NCCL WARN Call to bind failed: Address already in use"
    assert of_text(warned) is None
    assert of_text("RuntimeError: The server socket has failed to bind: Address already in use") is CAUSES["port_taken"]


def test_on_the_cpu_only_gloo_is_told() -> None:
    one = plan("nccl.interface=eth0")
    assert one.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert not [name for name in one.env if name.startswith("NCCL")]
