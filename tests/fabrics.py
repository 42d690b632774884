"""Synthetic hosts: trees of /sys, /etc and the like, and what commands print there.

No such machine was looked at: the forms are those of Linux, nvidia-smi and the clouds' images as they are documented
(one H200 was seen for the tables of nvidia-smi), the content is invented. `launcher.running.fabric_probe` itself reads
them: in place of the root folder, or on a host of `tests.cluster` that sees them in place of its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.running.fabric_probe import Machine
from launcher.running.probe import GPU_FIELDS

H100, L40S, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA GeForce RTX 4090"
DRIVER = "570.86.15"
QUERY = "--query-gpu=index,name,driver_version,fabric.state,fabric.status"
FORM = "--format=csv,noheader,nounits"
V1, V2 = "IB/RoCE v1", "RoCE v2"
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
LEGEND = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"


@dataclass(kw_only=True)
class Synthetic:
    """One host: its files below `root`, what its commands print, and the addresses that the other probe would see."""

    root: Path
    commands: dict[tuple[str, ...], str] = field(default_factory=dict)
    addresses: list[dict[str, Any]] = field(default_factory=list)
    gpus: tuple[str, ...] = ()

    def machine(self) -> Machine:
        """For the probe."""
        return Machine(str(self.root), run=self.run, home="/home/me", modules=[])

    def run(self, *argv: str) -> str | None:
        """What a command prints; None where there is none."""
        return self.commands.get(argv)

    def write(self, name: str, text: str) -> None:
        """A file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def link(self, name: str, target: str) -> None:
        """A link; of a target only the last part counts."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def write_programs(self, folder: Path) -> None:
        """Programs that print what the commands print, for a host that really runs them."""
        folder.mkdir(parents=True, exist_ok=True)
        for program in {argv[0] for argv in self.commands}:
            cases = [
                f"{shlex.quote(' '.join(argv[1:]))}) cat <<'END'\n{text}END\n;;"
                for argv, text in self.commands.items()
                if argv[0] == program
            ]
            lines = ["#!/bin/sh", 'case "$*" in', *cases, "*) exit 2;;", "esac"]
            (folder / program).write_text("\n".join(lines) + "\n")
            (folder / program).chmod(0o755)


def host(root: Path, *, gpus: Sequence[str] = (), links: str = "", p2p: str = "OK", switch: bool = False) -> Synthetic:
    """A host with GPUs, `links` between all of them, and nothing else but the loopback interface."""
    made = Synthetic(root=root, gpus=tuple(gpus))
    (root / "sys/class/net").mkdir(parents=True)
    interface(made, "lo", state="unknown", physical=False, mtu=65536, address="127.0.0.1")
    made.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme sse2\n")
    made.write("proc/sys/kernel/osrelease", "6.8.0-49-generic\n")
    limit(made)
    firmware(made, vendor="Supermicro", product="SYS-821GE-TNHR")
    (root / "sys/kernel/iommu_groups").mkdir(parents=True)
    if gpus:
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build\n"
        made.write("proc/driver/nvidia/version", text)
        state = "Completed, Success" if switch else "[N/A], [N/A]"
        rows = [f"{n}, {name}, {DRIVER}, {state}\n" for n, name in enumerate(gpus)]
        made.commands["nvidia-smi", QUERY, "--format=csv,noheader"] = "".join(rows)
        made.commands["nvidia-smi", f"--query-gpu={GPU_FIELDS}", FORM] = "".join(
            f"{n}, GPU-{n}, {name}, 81559, 4, Default, {DRIVER}, 00000000:{n + 1:02X}:00.0\n"
            for n, name in enumerate(gpus)
        )
        made.commands["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", FORM] = ""
        made.commands["nvidia-smi", "topo", "-m"] = topology(alike(len(gpus), links))
        made.commands["nvidia-smi", "topo", "-p2p", "r"] = readable(alike(len(gpus), p2p))
    if switch:
        show = ("systemctl", "show", "nvidia-fabricmanager", "--property=LoadState,ActiveState")
        made.commands[show] = "LoadState=loaded\nActiveState=active\n"
        made.commands["nv-fabricmanager", "--version"] = f"Fabric Manager version is : {DRIVER}\n"
    return made


def firmware(made: Synthetic, *, vendor: str, product: str, tag: str = "") -> None:
    """What DMI says."""
    for name, text in {"sys_vendor": vendor, "product_name": product, "chassis_asset_tag": tag}.items():
        made.write(f"sys/class/dmi/id/{name}", f"{text}\n")


def limit(made: Synthetic, memlock: str = "unlimited") -> None:
    """What a process may pin and open."""
    head = "Limit                     Soft Limit           Hard Limit           Units     \n"
    rows = [("Max open files", "1048576", "files"), ("Max locked memory", memlock, "bytes")]
    lines = [f"{name:<25} {value:<20} {value:<20} {unit:<10}\n" for name, value, unit in rows]
    made.write("proc/self/limits", head + "".join(lines))


def virtual(made: Synthetic) -> None:
    """A virtual machine's processor."""
    made.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme sse2 hypervisor\n")


def alike(count: int, word: str) -> list[list[str]]:
    """A matrix with the same word between each two."""
    return [["X" if row == column else word for column in range(count)] for row in range(count)]


def topology(links: list[list[str]], nics: Sequence[str] = ()) -> str:
    """`nvidia-smi topo -m`: the first line is underlined for terminals, cells stand between tabs."""
    names = [f"GPU{n}" for n in range(len(links))] + [f"NIC{n}" for n in range(len(nics))]
    lines = ["\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for n, row in enumerate(links):
        cells = [" X " if cell == "X" else cell for cell in row] + [
            "PIX" if n == m else "NODE" for m in range(len(nics))
        ]
        lines.append("\t".join([f"GPU{n}", *cells, "0-51", "0", "", "N/A"]))
    for m in range(len(nics)):
        lines.append(
            "\t".join([f"NIC{m}", *["NODE"] * len(links), *[" X " if m == k else "NODE" for k in range(len(nics))]])
        )
    legend = ["", "NIC Legend:", "", *(f"  NIC{m}: {name}" for m, name in enumerate(nics))] if nics else []
    return "\n".join([*lines, LEGEND, *legend, ""])


def readable(cells: list[list[str]]) -> str:
    """`nvidia-smi topo -p2p r`."""
    head = " \t\x1b[4m" + "".join(f"GPU{n}\t" for n in range(len(cells))) + "\x1b[0m"
    rows = [f" GPU{n}\t" + "".join(f"{cell}\t" for cell in row) for n, row in enumerate(cells)]
    return "\n".join([head, *rows, "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"])


def interface(
    made: Synthetic,
    name: str,
    *,
    speed: int | None = None,
    state: str = "up",
    physical: bool = True,
    master: str | None = None,
    mtu: int = 1500,
    address: str | None = None,
) -> None:
    """A network interface; the kernel gives -1 for a speed that it does not know."""
    at = f"sys/class/net/{name}"
    made.write(f"{at}/operstate", f"{state}\n")
    made.write(f"{at}/speed", f"{-1 if speed is None else speed}\n")
    made.write(f"{at}/mtu", f"{mtu}\n")
    if physical:
        (made.root / at / "device").mkdir()
    if master is not None:
        made.link(f"{at}/master", f"../{master}")
    if address is not None:
        scope = "host" if name == "lo" else "global"
        found = {"interface": name, "address": address, "prefix": 24, "scope": scope, "physical": physical}
        made.addresses.append(found)


def port(
    made: Synthetic,
    device: str,
    *,
    layer: str,
    rate: str,
    driver: str = "mlx5_core",
    netdev: str | None = None,
    up: bool = True,
    gids: Iterable[tuple[str, str]] = (("fe80:0000:0000:0000:a088:c203:00aa:0001", V1),),
) -> None:
    """An RDMA device with one port. `gids`: (address, kind); more places of the table are there, and empty."""
    at = f"sys/class/infiniband/{device}"
    ports = f"{at}/ports/1"
    made.write(f"{ports}/link_layer", f"{layer}\n")
    made.write(f"{ports}/state", "4: ACTIVE\n" if up else "1: DOWN\n")
    made.write(f"{ports}/phys_state", "5: LinkUp\n" if up else "3: Disabled\n")
    made.write(f"{ports}/rate", f"{rate}\n")
    made.link(f"{at}/device/driver", f"../../../../bus/pci/drivers/{driver}")
    if netdev is not None:
        (made.root / at / "device/net" / netdev).mkdir(parents=True)
    table = list(gids)
    for index, (gid, kind) in enumerate([*table, *[("0000:" * 7 + "0000", "")] * 3]):
        made.write(f"{ports}/gids/{index}", f"{gid}\n")
        if kind:  # of an empty place it cannot be read
            made.write(f"{ports}/gid_attrs/types/{index}", f"{kind}\n")
        if kind and layer == "Ethernet" and netdev is not None:
            made.write(f"{ports}/gid_attrs/ndevs/{index}", f"{netdev}\n")


def roce_gids(address: str) -> list[tuple[str, str]]:
    """The four that a card with one IPv4 address has: link-local and mapped, each of both versions."""
    numbers = [int(part) for part in address.split(".")]
    mapped = f"{'0000:' * 5}ffff:{numbers[0]:02x}{numbers[1]:02x}:{numbers[2]:02x}{numbers[3]:02x}"
    local = "fe80:0000:0000:0000:0ac0:ebff:fe0a:0b0c"
    return [(local, V1), (local, V2), (mapped, V1), (mapped, V2)]


def ib_node(root: Path, *, down: Sequence[str] = (), storage: bool = False) -> Synthetic:
    """Eight H100 on NVSwitch, eight InfiniBand cards, one Ethernet interface; `storage`: an RDMA Ethernet card too."""
    made = host(root, gpus=[H100] * 8, links="NV18", switch=True)
    cards = [f"mlx5_{n}" for n in range(8)]
    for n, card in enumerate(cards):
        port(made, card, layer="InfiniBand", rate="400 Gb/sec (4X NDR)", netdev=f"ib{n}", up=card not in down)
        interface(made, f"ib{n}", speed=400000, state="down" if card in down else "up", mtu=4092)
    interface(made, "eno1", speed=25000, address="10.0.0.1")
    if storage:
        gids = roce_gids("10.9.0.1")
        port(made, "mlx5_8", layer="Ethernet", rate="100 Gb/sec (4X EDR)", netdev="ens9f0", gids=gids)
        interface(made, "ens9f0", speed=100000, address="10.9.0.1")
        cards.append("mlx5_8")
    made.write("sys/module/nvidia_peermem/version", f"{DRIVER}\n")
    made.commands["nvidia-smi", "topo", "-m"] = topology(alike(8, "NV18"), cards)
    return made


def roce_node(root: Path) -> Synthetic:
    """Eight H100 on NVSwitch, eight Ethernet cards with RDMA, each in a network of its own."""
    made = host(root, gpus=[H100] * 8, links="NV18", switch=True)
    for n in range(8):
        address, name = f"10.1.{n}.1", f"ens{n + 1}f0np0"
        rate = "400 Gb/sec (4X NDR)"
        port(made, f"mlx5_{n}", layer="Ethernet", rate=rate, netdev=name, gids=roce_gids(address))
        interface(made, name, speed=400000, mtu=9000, address=address)
    interface(made, "eno1", speed=25000, address="10.0.0.1")
    return made


def efa_node(root: Path) -> Synthetic:
    """AWS p5.48xlarge: 32 EFA devices, four a GPU, and AWS's plugin."""
    made = host(root, gpus=[H100] * 8, links="NV18", switch=True)
    firmware(made, vendor="Amazon EC2", product="p5.48xlarge")
    virtual(made)
    for n in range(32):
        gids = [("fe80:0000:0000:0000:08ff:e6ff:fe00:0001", V1)]
        port(made, f"rdmap{79 + n}s0", layer="Unknown", rate="100 Gb/sec (4X EDR)", driver="efa", gids=gids)
    interface(made, "enp71s0", mtu=9001, address="172.31.0.1")
    interface(made, "docker0", state="down", physical=False, address="172.17.0.1")
    made.write("opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so", "\x7fELF\0OFI_NCCL_PROTOCOL\0")
    return made


def gib_node(root: Path) -> Synthetic:
    """GCP a3-ultragpu-8g: eight RDMA cards for GPUs, two network interfaces, Google's gIB."""
    made = host(root, gpus=["NVIDIA H200"] * 8, links="NV18", switch=True)
    firmware(made, vendor="Google", product="Google Compute Engine")
    virtual(made)
    for n in range(8):
        address, name = f"192.168.{n}.2", f"gpu{n}rdma0"
        rate = "400 Gb/sec (4X NDR)"
        port(made, f"rocep{145 + n}s0", layer="Ethernet", rate=rate, netdev=name, gids=roce_gids(address))
        interface(made, name, speed=400000, mtu=8896, address=address)
    interface(made, "enp0s19", speed=200000, mtu=8896, address="10.0.0.1")
    interface(made, "enp192s20", speed=200000, mtu=8896, address="10.1.0.1")
    made.write("usr/local/gib/scripts/set_nccl_env.sh", "export NCCL_NET=gIB\n")
    made.write("usr/local/gib/lib64/libnccl-net_internal.so", "\x7fELF\0NCCL_GIB_ONLY\0")
    return made


def tcpxo_node(root: Path) -> Synthetic:
    """GCP a3-megagpu-8g: no RDMA, a network interface beside each GPU, Google's FasTrak."""
    made = host(root, gpus=[H100] * 8, links="NV18", switch=True)
    firmware(made, vendor="Google", product="Google Compute Engine")
    virtual(made)
    for n in range(9):
        interface(made, f"eth{n}", speed=200000, mtu=8244, address=f"10.{n}.0.1")
    made.write("var/lib/tcpxo/lib64/nccl-env-profile.sh", "export NCCL_NET=FasTrak\n")
    made.write("var/lib/tcpxo/lib64/libnccl-net.so", "\x7fELF\0NCCL_FASTRAK_CTRL_DEV\0")
    return made


def azure_node(root: Path) -> Synthetic:
    """Azure ND96isr_H100_v5: eight InfiniBand cards, an Ethernet one of Azure's own, its image's nccl.conf."""
    made = host(root, gpus=[H100] * 8, links="NV18", switch=True)
    firmware(made, vendor="Microsoft Corporation", product="Virtual Machine", tag=AZURE_TAG)
    virtual(made)
    for n in range(8):
        port(made, f"mlx5_ib{n}", layer="InfiniBand", rate="400 Gb/sec (4X NDR)", netdev=f"ib{n}")
        interface(made, f"ib{n}", speed=400000, mtu=2044, address=f"172.16.{n}.1")
    gids = roce_gids("10.0.0.1")
    port(made, "mlx5_an0", layer="Ethernet", rate="100 Gb/sec (4X EDR)", netdev="enP2s1", gids=gids)
    interface(made, "enP2s1", speed=100000, master="eth0")
    interface(made, "eth0", speed=100000, address="10.0.0.1")
    made.write("opt/microsoft/ndv5/topo.xml", "<system/>\n")
    conf = "NCCL_IB_PCI_RELAXED_ORDERING=1\nNCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml\nNCCL_SOCKET_IFNAME=eth0\n"
    made.write("etc/nccl.conf", f"# by the image\n{conf}")
    return made


def tcp_node(root: Path, *, speed: int = 100000) -> Synthetic:
    """Eight H100 on NVSwitch and one Ethernet interface without RDMA."""
    made = host(root, gpus=[H100] * 8, links="NV18", switch=True)
    interface(made, "ens3", speed=speed, address="10.0.0.1")
    return made


def pcie_node(root: Path) -> Synthetic:
    """Four RTX 4090 below two processors, without direct access between them, and the IOMMU on."""
    made = host(root, gpus=[RTX] * 4, p2p="CNS")
    links = [
        ["X", "PHB", "SYS", "SYS"],
        ["PHB", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "PHB"],
        ["SYS", "SYS", "PHB", "X"],
    ]
    made.commands["nvidia-smi", "topo", "-m"] = topology(links)
    (made.root / "sys/kernel/iommu_groups/0").mkdir()
    interface(made, "enp5s0", speed=10000, address="192.168.1.10")
    return made


def vm_node(root: Path) -> Synthetic:
    """A virtual machine with two L40S and a workstation's clutter: bridges of Docker, a VPN."""
    made = host(root, gpus=[L40S] * 2, links="PHB")
    firmware(made, vendor="QEMU", product="Standard PC (Q35 + ICH9, 2009)")
    virtual(made)
    interface(made, "eth0", address="10.0.0.1")
    for name, address in {"docker0": "172.17.0.1", "br-1a2b3c4d5e6f": "172.18.0.1"}.items():
        interface(made, name, physical=False, address=address)
    interface(made, "veth1f2e3d4", speed=10000, physical=False, master="docker0")
    interface(made, "tailscale0", state="unknown", physical=False, mtu=1280, address="100.64.0.7")
    return made


KINDS = {
    "ib": ib_node,
    "roce": roce_node,
    "efa": efa_node,
    "gib": gib_node,
    "tcpxo": tcpxo_node,
    "azure": azure_node,
    "tcp": tcp_node,
    "pcie": pcie_node,
    "vm": vm_node,
}


def libraries(site: Path, *, nccl: str = "2.30.7", names: Iterable[str] = (), torch: Iterable[str] = ()) -> None:
    """Files in which these names stand, where Python's packages of NCCL and torch have theirs."""
    contents: Mapping[Path, str] = {
        site / "nvidia/nccl/lib/libnccl.so.2": "\0".join([f"NCCL version {nccl}+cuda13.0", *names, ""]),
        site / "torch/lib/libtorch_cpu.so": "\0".join(["", *torch, ""]),
        site / "torch/lib/libtorch_cuda.so": "\0libtorch\0",
    }
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
