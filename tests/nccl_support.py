"""Invented hosts for tests of NCCL's variables: values as the probe of a real one would give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.planning.fabric import Fabric, Gid, Interface, Port

H100, L40S, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA GeForce RTX 4090"
MLX: dict[str, Any] = {"driver": "mlx5_core", "phys_state": "LinkUp"}


def node(name: str = H100, count: int = 8, link: str = "NV18", **changed: Any) -> Fabric:
    """GPUs that are all joined alike, one Ethernet interface and no RDMA."""
    off = [["X" if a == b else link for b in range(count)] for a in range(count)]
    p2p = [["X" if a == b else "OK" for b in range(count)] for a in range(count)]
    values: dict[str, Any] = {
        "ports": (),
        "interfaces": (Interface(name="eth0", state="up", speed_mbps=10000, physical=True),),
        "gpus": (name,) * count,
        "links": tuple(map(tuple, off)),
        "p2p": tuple(map(tuple, p2p)),
        "driver": "570.86.15",
        "nccl_version": "2.30.7",
        "unknown": (),
        "files": (),
        "memlock_bytes": -1,
        "gpudirect": "nvidia_peermem",
    }
    return Fabric(**{**values, **changed})


def ib(device: str, rate: float = 400.0, state: str = "ACTIVE") -> Port:
    """An InfiniBand port."""
    physical = "LinkUp" if state == "ACTIVE" else "Polling"
    return Port(device=device, link_layer="InfiniBand", state=state, rate_gbps=rate, **{**MLX, "phys_state": physical})


def roce(device: str, rate: float = 400.0, address: str | None = "10.0.0.1") -> Port:
    """A RoCE port; without an address it has the GIDs of its link only."""
    gids = [Gid(index=0, kind="IB/RoCE v1", gid="fe80:0000:0000:0000:0ac0:ebff:fe00:0001")]
    gids.append(Gid(index=1, kind="RoCE v2", gid="fe80:0000:0000:0000:0ac0:ebff:fe00:0001"))
    if address is not None:
        numbers = [int(part) for part in address.split(".")]
        mapped = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*numbers)
        gids += [Gid(index=2, kind="IB/RoCE v1", gid=mapped), Gid(index=3, kind="RoCE v2", gid=mapped)]
    return Port(device=device, link_layer="Ethernet", state="ACTIVE", rate_gbps=rate, gids=tuple(gids), **MLX)


def efa(count: int) -> tuple[Port, ...]:
    """Devices of AWS."""
    return tuple(
        Port(device=f"rdmap{n}s0", link_layer="Unspecified", state="ACTIVE", driver="efa", rate_gbps=100.0)
        for n in range(count)
    )


def eth(name: str, speed: int | None, **changed: Any) -> Interface:
    """A network interface that is up."""
    return Interface(name=name, state="up", speed_mbps=speed, physical=True, **changed)


def eight(make: Any, *names: str) -> tuple[Port, ...]:
    """mlx5_0 to mlx5_7."""
    return tuple(make(f"mlx5_{n}") for n in range(8))


def hosts(fabrics: Sequence[Fabric]) -> dict[str, Fabric]:
    """Named a, b and so on."""
    return {chr(ord("a") + n): fabric for n, fabric in enumerate(fabrics)}
