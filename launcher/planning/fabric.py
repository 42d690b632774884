"""What one host's network and GPU links are, as its probe tells it: values only, nothing is asked here.

The probe answers with one JSON object whose keys are the fields of `Fabric`, nested as the classes below nest; lists
stand for tuples. A key that is missing or null is not known, which is something else than an empty list. An example,
of a host with one InfiniBand card, shortened:

    {"ports": [{"device": "mlx5_0", "number": 1, "link_layer": "InfiniBand", "state": "ACTIVE",
                "phys_state": "LinkUp", "rate_gbps": 400.0, "driver": "mlx5_core", "netdev": "ib0",
                "gids": [{"index": 0, "kind": "IB/RoCE v1", "gid": "fe80:0000:...", "netdev": null}]}],
     "interfaces": [{"name": "eno1", "state": "up", "speed_mbps": 25000, "physical": true, "master": null,
                     "addresses": ["10.0.0.1"]}],
     "gpus": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"],
     "links": [["X", "NV18"], ["NV18", "X"]], "p2p": [["X", "OK"], ["OK", "X"]],
     "fabric_state": "Completed", "fabric_status": "Success", "driver": "570.86.15",
     "nccl_version": "2.30.7", "nccl_path": "/venv/lib/.../libnccl.so.2", "unknown": ["NCCL_SOKET_IFNAME"],
     "files": [{"path": "/etc/nccl.conf", "variables": {"NCCL_IB_PCI_RELAXED_ORDERING": "1"}}],
     "gpudirect": "nvidia_peermem", "memlock_bytes": -1}
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Interfaces that containers, virtual machines and tunnels make.
VIRTUAL = re.compile(r"(lo$|docker|br-|virbr|veth|cni|flannel|cali|vxlan|podman|lxc|lxd|kube|tun|tap|wg|tailscale)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gid:
    """One address of an RDMA port, from gids/INDEX, gid_attrs/types/INDEX and gid_attrs/ndevs/INDEX."""

    index: int
    kind: str  # "IB/RoCE v1" | "RoCE v2"
    gid: str  # as sysfs prints it: 0000:0000:0000:0000:0000:ffff:0a00:0001; entries of zeros only are left out
    netdev: str | None = None

    @property
    def is_v4(self) -> bool:
        """Whether it stands for an IPv4 address."""
        try:
            return ipaddress.IPv6Address(self.gid).ipv4_mapped is not None
        except ValueError:
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One port of an RDMA device, from /sys/class/infiniband/DEVICE/ports/NUMBER."""

    device: str  # mlx5_0
    number: int = 1
    link_layer: str | None = None  # InfiniBand | Ethernet | Unspecified
    state: str | None = None  # ACTIVE | DOWN | INIT | ARMED: sysfs' "4: ACTIVE" without its number
    phys_state: str | None = None  # LinkUp | Polling | Disabled | ...
    rate_gbps: float | None = None  # of "400 Gb/sec (4X NDR)"
    driver: str | None = None  # name of device/driver: mlx5_core | efa | irdma | bnxt_re
    netdev: str | None = None  # the network interface of the same card
    gids: tuple[Gid, ...] = ()

    @property
    def up(self) -> bool:
        """Whether data can travel through it."""
        return self.state == "ACTIVE"

    @property
    def kind(self) -> str:
        """ib | roce | efa."""
        if self.driver == "efa":
            return "efa"
        return "ib" if self.link_layer == "InfiniBand" else "roce"

    @property
    def has_roce_v2(self) -> bool:
        """Whether an IPv4 address of RoCE v2 is on it, which traffic through routers needs."""
        return any(gid.kind == "RoCE v2" and gid.is_v4 for gid in self.gids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """One network interface, from /sys/class/net/NAME."""

    name: str
    state: str | None = None  # operstate: up | down | unknown (lo says so)
    speed_mbps: int | None = None  # None where the kernel says -1 or nothing
    physical: bool = False  # has a `device` link
    master: str | None = None  # bond or bridge that it belongs to
    addresses: tuple[str, ...] = ()  # without prefix lengths

    @property
    def usable(self) -> bool:
        """Whether hosts may talk over it: up, no member of a bond, and not made by containers or tunnels."""
        return self.state != "down" and self.master is None and (self.physical or not VIRTUAL.match(self.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class SetFile:
    """A file that NCCL or DeepSpeed reads variables from, as the user of the ranks finds it."""

    path: str  # /etc/nccl.conf, ~/.nccl.conf (absolute), $NCCL_CONF_FILE, ~/.deepspeed_env, ./.deepspeed_env
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """One host; None = not known."""

    ports: tuple[Port, ...] | None = None
    interfaces: tuple[Interface, ...] | None = None
    gpus: tuple[str, ...] | None = None  # names, by slot number
    links: tuple[tuple[str, ...], ...] | None = None  # nvidia-smi topo -m, GPU by GPU: X NV18 PIX PXB PHB NODE SYS
    p2p: tuple[tuple[str, ...], ...] | None = None  # nvidia-smi topo -p2p r, GPU by GPU: X OK CNS GNS TNS NS U
    driver: str | None = None  # NVIDIA's: 570.86.15
    fabric_state: str | None = None  # nvidia-smi -q, Fabric: Completed | In Progress | N/A (no NVSwitch)
    fabric_status: str | None = None  # Success | an error | N/A
    fabric_manager: str | None = None  # active | inactive | failed: nvidia-fabricmanager; None also without the service
    fabric_manager_version: str | None = None  # must be the driver's
    gpudirect: str | None = None  # nvidia_peermem | dmabuf | none
    cloud: str | None = None  # aws | gcp | azure | none, from DMI
    product: str | None = None  # DMI product_name: p5.48xlarge
    virtual: bool | None = None  # a virtual machine: flag `hypervisor` of /proc/cpuinfo
    efa_plugin: str | None = None  # path of the library of aws-ofi-nccl
    gcp_profile: str | None = None  # path of set_nccl_env.sh (gIB) or nccl-env-profile.sh (FasTrak)
    topo_file: str | None = None  # /opt/microsoft/.../topo.xml
    iommu: bool | None = None  # groups in /sys/kernel/iommu_groups, on bare metal
    nccl_version: str | None = None  # of the library that ranks load: 2.30.7
    nccl_path: str | None = None
    unknown: tuple[str, ...] | None = None  # of the names asked about, those in neither libnccl, libtorch nor a plugin
    files: tuple[SetFile, ...] | None = None
    memlock_bytes: int | None = None  # soft limit; -1 = unlimited

    def among(self, slots: typing.Iterable[int]) -> tuple[str, ...]:
        """Links between each two GPUs of these slots; empty where not known."""
        chosen = sorted(slots)
        if self.links is None or not all(slot < len(self.links) for slot in chosen):
            return ()
        return tuple(self.links[a][b] for a in chosen for b in chosen if a < b and b < len(self.links[a]))

    @property
    def version(self) -> tuple[int, ...] | None:
        """NCCL's version as numbers."""
        return version_of(self.nccl_version)

    def interface(self, name: str) -> Interface | None:
        """The interface of this name."""
        return next((one for one in self.interfaces or () if one.name == name), None)

    def speed_mbps(self, name: str) -> int | None:
        """Of an interface; of a bond or bridge without a speed of its own, that of its members."""
        one = self.interface(name)
        own = None if one is None else one.speed_mbps
        below = [other.speed_mbps for other in self.interfaces or () if other.master == name and other.speed_mbps]
        return own or (sum(below) if below else None)


def version_of(text: str | None) -> tuple[int, ...] | None:
    """Numbers of a version, of what follows them nothing.

    Example:
        >>> version_of("2.30.7+cuda13.0"), version_of("2.9"), version_of(None)
        ((2, 30, 7), (2, 9), None)
    """
    found = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in found.group().split(".")) if found else None


def from_probe(data: Any) -> Fabric:
    """The host that a probe's answer describes; what does not have the form given above is not known."""
    read = _read(Fabric, data)
    return read if isinstance(read, Fabric) else Fabric()


class _Unfit(Exception):
    pass


def _read(kind: Any, data: Any) -> Any:
    """`data` as a value of `kind`; a field that does not fit is left out, a value that does not is _Unfit."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, data if isinstance(data, Mapping) else {})
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _read(next(a for a in args if a is not type(None)), data)
    if origin is tuple and isinstance(data, list | tuple):
        return tuple(_read(args[0], item) for item in data)
    if origin is dict and isinstance(data, Mapping):
        return {str(key): _read(args[1], item) for key, item in data.items()}
    if kind is float and type(data) in (int, float):
        return float(data)
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise _Unfit


def _record(kind: type, data: Mapping[str, Any]) -> Any:
    hints, values = typing.get_type_hints(kind), {}
    for name, hint in hints.items():
        if data.get(name) is not None:
            try:
                values[name] = _read(hint, data[name])
            except _Unfit:
                continue
    try:
        return kind(**values)
    except TypeError:  # a field without which the others mean nothing, such as a name, is missing
        raise _Unfit from None
