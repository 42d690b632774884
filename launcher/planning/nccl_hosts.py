"""What NCCL must be told on one host, and what stands in its way there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.planning.fabric import Fabric, Port, version_of
from launcher.planning.nccl_lint import Found
from launcher.planning.nccl_rules import ERROR, NOTICE, WARNING
from launcher.spec import NcclConfig

LABELS = {"ib": "InfiniBand", "roce": "RoCE", "efa": "EFA", "gcp": "GCP's plugin", "tcp": "TCP"}
RDMA = ("ib", "roce")
PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # of nvidia-smi topo -m, the nearest first
MEMLOCK = 2**30  # bytes that a process may pin, below which registering NCCL's buffers fails sooner or later
FAST_MBPS, SLOW_MBPS = 25_000, 10_000
P2P_ON_RTX_40 = (550, 40, 7)  # the first driver that says the truth about it: accelerate's check_cuda_p2p_ib_support
# EFA devices that an instance has, by the health suite of AWS.
EFA_DEVICES = {"p4d.24xlarge": 4, "p4de.24xlarge": 4, "p5.48xlarge": 32, "p5e.48xlarge": 32, "p5en.48xlarge": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One variable for the ranks of a host, and why."""

    name: str
    value: str
    reason: str


Told = Iterator[Variable | Found]


def network_of(fabric: Fabric) -> str | None:
    """By what the host talks to others: efa, gcp, ib, roce or tcp; None where its cards are not known."""
    if fabric.ports is None:
        return None
    active = [port for port in fabric.ports if port.up]
    if any(port.kind == "efa" for port in active):
        return "efa"
    if fabric.gcp_profile:
        return "gcp"
    rates = {kind: sum(port.rate_gbps or 1 for port in active if port.kind == kind) for kind in RDMA}
    best = max(RDMA, key=lambda kind: rates[kind])
    if best == "roce" and rates[best] and not _addressed(active):
        return "tcp"
    return best if rates[best] else "tcp"


def links_of(fabric: Fabric, slots: Sequence[int]) -> str | None:
    """nvlink when each two of these GPUs have it, else pcie; none for a single GPU; None where not known."""
    if len(slots) < 2:
        return "none"
    links = fabric.among(slots)
    if not links:
        return None
    return "nvlink" if all(link.startswith("NV") for link in links) else "pcie"


def rdma(fabric: Fabric, kind: str, config: NcclConfig) -> Told:
    """InfiniBand or RoCE: which cards, and whether they can be used."""
    active = [port for port in fabric.ports or () if port.kind == kind and port.up]
    if not active:
        return  # the checks of a host's network say so
    if not config.hca:
        yield from _cards(fabric, kind, active)
    if kind == "roce":
        yield from _gids(active, config)
    yield from _pinning(fabric)
    if fabric.gpudirect == "none":
        text = "GPUDirect RDMA is not there, so what GPUs send passes through host memory"
        yield Found(level=WARNING, text=text, tries=("modprobe nvidia-peermem",), machine=True)


def efa(fabric: Fabric) -> Told:
    """AWS: aws-ofi-nccl sets what an instance needs, so nothing is set here."""
    if fabric.efa_plugin is None:
        text = "there are EFA devices, and no aws-ofi-nccl is found: without it NCCL talks over TCP"
        yield Found(level=WARNING, text=text, tries=("install aws-ofi-nccl, in the container too",), machine=True)
    usual = EFA_DEVICES.get(fabric.product or "")
    count = sum(port.up for port in fabric.ports or ())
    if usual and count < usual:
        yield Found(
            level=WARNING, text=f"{count} of {usual} EFA devices of a {fabric.product} are active", machine=True
        )
    yield from _pinning(fabric)


def azure(fabric: Fabric) -> Told:
    """What Azure's images set in /etc/nccl.conf, and containers lack."""
    if fabric.cloud != "azure":
        return
    if fabric.topo_file:
        yield Variable(
            name="NCCL_TOPO_FILE", value=fabric.topo_file, reason="Azure's machines hide how PCIe is laid out"
        )
    else:
        text = "Azure's file of the PCIe layout is not there, so NCCL may pair GPUs with far cards"
        yield Found(level=WARNING, text=text, tries=("mount /opt/microsoft into the container",), machine=True)
    yield Variable(name="NCCL_IB_PCI_RELAXED_ORDERING", value="1", reason="writes over virtual PCIe need not wait")


def unconfigured(fabric: Fabric) -> Told:
    """RoCE cards that nobody has given an address: NCCL would take them, and fail long after the start."""
    active = [port for port in fabric.ports or () if port.up and port.kind == "roce"]
    if active and not _addressed(active):
        devices = ", ".join(port.device for port in active)
        yield Variable(name="NCCL_IB_DISABLE", value="1", reason=f"no IPv4 address of RoCE v2 on {devices}")
        text = f"{devices} would be faster than TCP, but has no IPv4 address"
        yield Found(level=WARNING, text=text, tries=("give its interface an address, then nccl=roce",), machine=True)


def sockets(interface: str, speed_mbps: int | None, cloud: str | None) -> Told:
    """TCP: sockets enough to fill a fast link; NCCL does that by itself on AWS and GCP."""
    if speed_mbps is None:
        return
    speed = f"{interface} is {speed_mbps / 1000:g} Gb/s"
    if speed_mbps >= FAST_MBPS and cloud not in ("aws", "gcp"):
        yield Variable(name="NCCL_SOCKET_NTHREADS", value="4", reason=f"{speed}, which one thread seldom fills")
        yield Variable(name="NCCL_NSOCKS_PERTHREAD", value="4", reason=f"{speed}, which one socket seldom fills")
    elif speed_mbps <= SLOW_MBPS:
        text = f"{speed}: the network will decide the speed of this run; zero=stage3 sends the most"
        yield Found(level=NOTICE, text=text)


def links(fabric: Fabric, slots: Sequence[int], profile: str) -> Told:
    """What joins the GPUs of the host: NVLink and its switches, or PCIe."""
    yield from _switches(fabric)
    kind, p2p = links_of(fabric, slots), _p2p(fabric, slots)
    if profile == "nvlink" and kind == "pcie":
        text = f"nccl=nvlink, and some of its GPUs are joined by {', '.join(sorted(_far(fabric, slots)))} only"
        yield Found(level=ERROR, text=text, tries=("nccl=auto", "gpus=[...] of one NVLink domain"))
    if kind != "pcie":
        return
    names = [fabric.gpus[slot] for slot in slots if slot < len(fabric.gpus)] if fabric.gpus else []
    driver = version_of(fabric.driver)
    if any("RTX 40" in name for name in names) and driver is not None and driver < P2P_ON_RTX_40:
        reason = f"driver {fabric.driver} claims access between RTX 40 GPUs that they do not have"
        yield Variable(name="NCCL_P2P_DISABLE", value="1", reason=reason)
        return
    if profile == "pcie" and p2p == {"OK"}:
        level = "SYS" if _far(fabric, slots) & {"NODE", "SYS"} else "PHB"
        reason = "nvidia-smi topo -p2p says OK for all, and NCCL alone goes no further than a PCIe switch"
        yield Variable(name="NCCL_P2P_LEVEL", value=level, reason=reason)
        text = "access between GPUs over PCIe gives wrong data on some machines: compare the loss with nccl=auto once"
        yield Found(level=WARNING, text=text)
    if fabric.iommu and not fabric.virtual and p2p == {"OK"}:
        text = "the IOMMU is on, with which GPUs that talk over PCIe may hang or get wrong data (NVIDIA/nccl#631)"
        yield Found(level=WARNING, text=text, tries=("iommu=pt on the kernel's command line",), machine=True)


def _switches(fabric: Fabric) -> Told:
    state, status = fabric.fabric_state, fabric.fabric_status
    bad = [word for word in (state, status) if word and word.lower() not in ("completed", "success", "n/a")]
    if not bad:
        return
    text = f"the NVSwitches are not ready ({', '.join(bad)}), and CUDA cannot start"
    if fabric.fabric_manager not in (None, "active"):
        text += f": nvidia-fabricmanager is {fabric.fabric_manager}"
    elif fabric.fabric_manager_version and fabric.driver and fabric.fabric_manager_version != fabric.driver:
        text += f": the Fabric Manager is {fabric.fabric_manager_version}, the driver {fabric.driver}"
    yield Found(level=ERROR, text=text, tries=("systemctl restart nvidia-fabricmanager",), machine=True)


def _cards(fabric: Fabric, kind: str, active: Sequence[Port]) -> Told:
    """NCCL_IB_HCA where some active card is not for this."""
    fastest = max(port.rate_gbps or 0 for port in active)
    addressed = kind != "roce" or not any(port.has_roce_v2 for port in active)
    tests: list[tuple[Callable[[Port], bool], Callable[[Port], str]]] = [
        (lambda port: port.kind != kind, lambda port: f"{LABELS.get(port.kind, port.kind)} beside {LABELS[kind]}"),
        (
            lambda port: 2 * (port.rate_gbps or fastest) < fastest,
            lambda port: f"{port.rate_gbps:g} of {fastest:g} Gb/s",
        ),
        (lambda port: not addressed and not port.has_roce_v2, lambda port: "no IPv4 address of RoCE v2"),
    ]
    left: dict[str, list[str]] = {}
    chosen = []
    for port in (port for port in fabric.ports or () if port.up):
        why = next((say(port) for is_so, say in tests if is_so(port)), None)
        if why is None:
            chosen.append(port)
        else:
            left.setdefault(why, []).append(port.device)
    slower = [port for port in chosen if (port.rate_gbps or fastest) < fastest]
    if slower:
        listed = ", ".join(f"{port.device} at {port.rate_gbps:g}" for port in slower)
        yield Found(level=WARNING, text=f"{listed} of {fastest:g} Gb/s: a cable or a switch?", machine=True)
    if left:
        reason = "; ".join(f"without {', '.join(devices)}: {why}" for why, devices in left.items())
        names = ",".join(_label(port, chosen, fabric.ports or ()) for port in chosen)
        yield Variable(name="NCCL_IB_HCA", value=f"={names}", reason=reason)


def _label(port: Port, chosen: Sequence[Port], ports: Sequence[Port]) -> str:
    whole = all(other in chosen for other in ports if other.device == port.device)
    return port.device if whole else f"{port.device}:{port.number}"


def _gids(active: Sequence[Port], config: NcclConfig) -> Told:
    if not _addressed(active):
        devices = ", ".join(port.device for port in active)
        text = f"no IPv4 address of RoCE v2 on {devices}"
        yield Found(level=ERROR, text=text, tries=("give its interface an address", "nccl=tcp"), machine=True)
        return
    for port in active:
        gid = next((gid for gid in port.gids if gid.index == config.gid_index), None)
        if gid is not None and not (gid.kind == "RoCE v2" and gid.is_v4):
            good = [gid.index for gid in port.gids if gid.kind == "RoCE v2" and gid.is_v4]
            text = f"nccl.gid_index={config.gid_index} is {gid.kind} {gid.gid} on {port.device}"
            fixes = tuple(f"nccl.gid_index={index}" for index in good[:1])
            yield Found(level=ERROR, text=text, tries=(*fixes, "nccl.gid_index=null   (NCCL 2.21 and newer find it)"))


def _addressed(ports: Sequence[Port]) -> bool:
    """Whether a port has an IPv4 address of RoCE v2, or no port's addresses are known."""
    return any(port.has_roce_v2 for port in ports) or not any(port.gids for port in ports)


def _pinning(fabric: Fabric) -> Told:
    limit = fabric.memlock_bytes
    if limit is not None and 0 <= limit < MEMLOCK:
        text = f"a process may pin {limit / 2**20:g} MiB, and RDMA needs to pin NCCL's buffers"
        tries = ("ulimit -l unlimited", "docker run --ulimit memlock=-1")
        yield Found(level=WARNING, text=text, tries=tries, machine=True)


def _p2p(fabric: Fabric, slots: Sequence[int]) -> set[str]:
    """What nvidia-smi says of direct access between these GPUs."""
    rows = fabric.p2p or ()
    return {rows[a][b] for a in slots for b in slots if a != b and a < len(rows) and b < len(rows[a])}


def _far(fabric: Fabric, slots: Sequence[int]) -> set[str]:
    return {link for link in fabric.among(slots) if not link.startswith("NV")}
