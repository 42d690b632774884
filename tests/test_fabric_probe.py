"""What is seen of a host's network, GPU links and NCCL: hosts are synthetic (`tests.fabrics`), the probe is real."""

from __future__ import annotations

import ast
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.fabric import Fabric
from launcher.running import fabric_probe, probe
from launcher.running.fabric import with_addresses
from launcher.running.panel import Panel
from launcher.running.transport import BOOT, Channel, Door
from tests import fabrics
from tests.fabrics import KINDS, Synthetic


def asked(folder: Path, *names: str, site: Path | None = None, **env: str) -> dict[str, Any]:
    """The question, with a cache and a working folder of the test's own."""
    path = [] if site is None else [str(site)]
    about = {"env": {"XDG_CACHE_HOME": str(folder / "cache"), **env}, "names": list(names)}
    return {"do": "fabric", "cwd": "/home/me/qwen", "path": path, **about}


def seen(made: Synthetic, folder: Path) -> Fabric:
    """What the probe sees of a synthetic host."""
    return with_addresses(fabric_probe.fabric(asked(folder), made.machine()), made.addresses)


def test_probe_is_one_file_for_any_python_of_the_last_years() -> None:
    tree = ast.parse(Path(fabric_probe.__file__).read_text(), feature_version=(3, 6))
    froms = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in [*froms, *names]} <= set(sys.stdlib_module_names)


def test_ports_cards_and_gpus_of_a_node_with_infiniband(tmp_path: Path) -> None:
    fabric = seen(fabrics.ib_node(tmp_path / "ib", down=["mlx5_3"], storage=True), tmp_path)
    assert fabric.ports is not None and fabric.interfaces is not None
    assert [port.device for port in fabric.ports] == [f"mlx5_{n}" for n in range(9)]
    first, fourth, storage = fabric.ports[0], fabric.ports[3], fabric.ports[8]
    assert (first.kind, first.up, first.rate_gbps, first.driver, first.netdev) == ("ib", True, 400, "mlx5_core", "ib0")
    assert (fourth.up, fourth.state, fourth.phys_state) == (False, "DOWN", "Disabled")
    assert (storage.kind, storage.netdev, storage.has_roce_v2) == ("roce", "ens9f0", True)
    assert [(gid.index, gid.kind) for gid in storage.gids] == [(0, "IB/RoCE v1"), (1, "RoCE v2")] + [
        (2, "IB/RoCE v1"),
        (3, "RoCE v2"),
    ]
    assert fabric.gpus == (fabrics.H100,) * 8 and fabric.driver == fabrics.DRIVER
    assert set(fabric.among(range(8))) == {"NV18"} and len(fabric.among(range(8))) == 28
    assert (fabric.fabric_state, fabric.fabric_status, fabric.fabric_manager) == ("Completed", "Success", "active")
    assert (fabric.fabric_manager_version, fabric.gpudirect) == (fabrics.DRIVER, "nvidia_peermem")
    assert fabric.memlock_bytes == -1
    eno1 = fabric.interface("eno1")
    assert eno1 is not None and (eno1.speed_mbps, eno1.physical, eno1.addresses) == (25000, True, ("10.0.0.1",))


def test_what_tells_clouds_and_virtual_machines(tmp_path: Path) -> None:
    found = {kind: seen(make(tmp_path / kind), tmp_path) for kind, make in KINDS.items()}
    told = {kind: (fabric.cloud, fabric.virtual, len(fabric.ports or ())) for kind, fabric in found.items()}
    assert told == {
        "ib": ("none", False, 8),
        "roce": ("none", False, 8),
        "efa": ("aws", True, 32),
        "gib": ("gcp", True, 8),
        "tcpxo": ("gcp", True, 0),
        "azure": ("azure", True, 9),
        "tcp": ("none", False, 0),
        "pcie": ("none", False, 0),
        "vm": ("none", True, 0),
    }
    assert {port.kind for port in found["efa"].ports or ()} == {"efa"}
    assert found["efa"].efa_plugin == "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so"
    assert found["tcpxo"].efa_plugin is None
    assert found["gib"].gcp_profile == "/usr/local/gib/scripts/set_nccl_env.sh"
    assert found["azure"].topo_file == "/opt/microsoft/ndv5/topo.xml"
    assert [file.path for file in found["azure"].files or ()] == ["/etc/nccl.conf"]
    assert (found["azure"].files or ())[0].variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert found["azure"].product == "Virtual Machine" and found["efa"].product == "p5.48xlarge"
    slave = found["azure"].interface("enP2s1")
    assert slave is not None and slave.master == "eth0"
    assert found["pcie"].iommu is True and found["pcie"].among((0, 1, 2)) == ("PHB", "SYS", "SYS")
    assert (found["pcie"].p2p or ())[0] == ("X", "CNS", "CNS", "CNS")
    assert (found["vm"].fabric_state, found["vm"].fabric_manager) == ("N/A", None)
    virtual = {one.name: one.usable for one in found["vm"].interfaces or ()}
    assert virtual.pop("eth0") is True and len(virtual) == 5 and not any(virtual.values())
    speeds = {one.name: one.speed_mbps for one in found["vm"].interfaces or ()}
    assert (speeds["eth0"], speeds["veth1f2e3d4"]) == (None, 10000)


def test_a_machine_that_tells_nothing_is_not_known(tmp_path: Path) -> None:
    """No file, no program: every answer is null, and none is an error."""
    empty = Synthetic(root=tmp_path / "empty")
    told = fabric_probe.fabric(asked(tmp_path), empty.machine())
    known = {key for key, value in told.items() if value is not None}
    assert known == {"files"}
    assert told["files"] == []
    fabric = with_addresses(told, {"failed": "no network"})
    assert fabric.ports is None and fabric.interfaces is None and fabric.links is None
    assert with_addresses(None, []) == Fabric()


def test_a_driver_that_hangs_keeps_nothing_else_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, never = fabrics.ib_node(tmp_path / "ib"), threading.Event()
    monkeypatch.setattr(fabric_probe, "COMMAND_S", -1.0)
    machine = made.machine()
    machine.run = lambda *argv: str(never.wait(60)) if argv[0] == "nvidia-smi" else made.run(*argv)
    told = fabric_probe.fabric(asked(tmp_path), machine)
    never.set()
    assert told["links"] is None and told.get("gpus") is None and len(told["ports"]) == 8


def test_older_drivers_tell_of_nvswitch_in_their_long_answer(tmp_path: Path) -> None:
    made = fabrics.host(tmp_path / "old", gpus=[fabrics.H100] * 2, links="NV18")
    query = ("nvidia-smi", fabrics.QUERY, "--format=csv,noheader")
    rows = [", ".join(row.split(", ")[:3]) for row in made.commands.pop(query).splitlines()]
    made.commands["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"] = "\n".join(rows)
    section = (
        "    Fabric\n        State                             : {}\n        Status                            : {}\n"
    )
    texts = [section.format("Completed", "Success"), section.format("In Progress", "N/A")]
    made.commands["nvidia-smi", "-q"] = "GPU 00000000:18:00.0\n" + "GPU 00000000:2A:00.0\n".join(texts)
    fabric = seen(made, tmp_path)
    assert (fabric.driver, fabric.fabric_state, fabric.fabric_status) == (fabrics.DRIVER, "In Progress", "N/A")


@pytest.mark.parametrize("piece", [7, 2**24])
def test_names_that_no_library_reads_are_told(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name must stand there whole, also where pieces meet; one that torch or a plugin reads is known too."""
    monkeypatch.setattr(fabric_probe, "PIECE", piece)
    monkeypatch.setattr(fabric_probe, "OVERLAP", 26)  # a byte more than the longest name here
    site = tmp_path / "site"
    fabrics.libraries(
        site,
        names=["NCCL_DEBUG", "NCCL_NET_PLUGIN", "NCCL_IB_HCA"],
        torch=["NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"],
    )
    made = fabrics.tcpxo_node(tmp_path / "tcpxo")
    made.write("etc/nccl.conf", "NCCL_IB_HAC=mlx5_0\nNCCL_DEBUG=WARN\n#NCCL_REMARK=1\nTOKEN=secret\n")
    names = ["NCCL_NET", "NCCL_IB_HCA", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_FASTRAK_CTRL_DEV", "TORCH_NCCL_BLOCKING_WAI"]
    question = asked(tmp_path, *names, "TORCH_HOME", site=site)
    told = fabric_probe.fabric(question, made.machine())
    assert told["unknown"] == ["NCCL_IB_HAC", "NCCL_NET", "TORCH_NCCL_BLOCKING_WAI"]
    assert told["nccl_version"] == "2.30.7" and told["nccl_path"].endswith("site/nvidia/nccl/lib/libnccl.so.2")
    assert told["files"] == [{"path": "/etc/nccl.conf", "variables": {"NCCL_IB_HAC": "mlx5_0", "NCCL_DEBUG": "WARN"}}]
    (site / "torch/lib/libtorch_cpu.so").unlink()
    (site / "torch/lib/libtorch_cuda.so").unlink()
    assert fabric_probe.fabric(question, made.machine())["unknown"] is None


def test_libraries_are_read_anew_only_when_they_have_changed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    library = site / "nvidia/nccl/lib/libnccl.so.2"
    machine = fabrics.tcp_node(tmp_path / "tcp").machine()

    def unknown() -> Any:
        told = fabric_probe.fabric(asked(tmp_path, "NCCL_DEBUG", "NCCL_PROTO", site=site), machine)
        return told["nccl_version"], told["unknown"]

    fabrics.libraries(site, names=["NCCL_DEBUG"])
    stamp = library.stat()
    assert unknown() == ("2.30.7", ["NCCL_PROTO"])
    content = library.read_bytes()
    library.write_bytes(content.replace(b"DEBUG", b"PROTO").replace(b"2.30.7", b"2.31.2"))
    os.utime(library, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert unknown() == ("2.30.7", ["NCCL_PROTO"])  # from the cache: neither size nor time has changed
    os.utime(library, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    assert unknown() == ("2.31.2", ["NCCL_DEBUG"])
    (tmp_path / "cache/launcher/libraries.json").write_text('{"/x": 3')
    assert unknown() == ("2.31.2", ["NCCL_DEBUG"])


def test_which_library_ranks_load(tmp_path: Path) -> None:
    """As the dynamic linker chooses for torch's wheels, which name their own NCCL before LD_LIBRARY_PATH."""
    machine = fabrics.tcp_node(tmp_path / "tcp").machine()
    for name in ("usr/lib/x86_64-linux-gnu", "opt/nccl", "pre"):
        folder = Path(machine.path(name))
        folder.mkdir(parents=True)
        (folder / "libnccl.so.2").write_text("x")
    fabrics.libraries(tmp_path / "site")
    path, preload = [str(tmp_path / "site")], machine.path("pre/libnccl.so.2")
    chosen = [
        fabric_probe.nccl_library(machine, [], {}),
        fabric_probe.nccl_library(machine, [], {"LD_LIBRARY_PATH": "/gone:/opt/nccl"}),
        fabric_probe.nccl_library(machine, path, {"LD_LIBRARY_PATH": "/opt/nccl"}),
        fabric_probe.nccl_library(machine, path, {"LD_PRELOAD": f"/lib/x.so {preload}"}),
    ]
    assert chosen == [
        machine.path("usr/lib/x86_64-linux-gnu/libnccl.so.2"),
        machine.path("opt/nccl/libnccl.so.2"),
        str(tmp_path / "site/nvidia/nccl/lib/libnccl.so.2"),
        preload,
    ]


def test_probe_answers_over_a_channel_after_another_program(tmp_path: Path) -> None:
    """This very machine, as it is: what it has of /sys/class/net is there, and the next program can start."""
    channel = Channel(Door("here", (sys.executable, "-c", BOOT), True), queue.Queue())
    try:
        for _ in range(2):
            panel = Panel({"here": channel})
            told = panel.start(asked(tmp_path), 10.0, "fabric_probe")["here"]
            panel.end()
        again = Panel({"here": channel})
        assert again.start({"do": "resolve", "names": ["127.0.0.1"]}, 10.0) == {"here": {"127.0.0.1": ["127.0.0.1"]}}
        again.end()
    finally:
        channel.close()
    fabric = with_addresses(told, probe.addresses())
    lo = fabric.interface("lo")
    assert lo is not None and not lo.physical and "127.0.0.1" in lo.addresses
    assert {one.name for one in fabric.interfaces or ()} == {
        name for name in os.listdir("/sys/class/net") if (Path("/sys/class/net") / name).is_dir()
    }
