"""Looks at this host every few seconds and prints one JSON line a look; a process of its own, started by the agent.

`python -m launcher.running.monitor --every 5 --gpus 0,1 --run-dir RUN`. A driver or file system that hangs can
hang only this process. A line holds, besides what its names say:

    interval_s        seconds since the last look; rates and cpu_percent are means over it
    cpu_percent       of all cores together
    memory            of the control group when that is given less than the machine has
    gpus              one entry a GPU of the run (`launcher.running.nvml`), in the order of local ranks
    network           interfaces that have moved something, without lo
    infiniband        ports by DEVICE/PORT: rate_gb_s is the link's speed in Gbit/s, errors the sum of its counters
    errors, drops     since this monitor began
    disk_free_gib     where the run folder is
    notes             sentences for people, each once

A rate of a counter that is new, or was set back, is null: it is known again at the next look.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.running.nvml import GIB, Gpus

MIB = 2**20
FIRST_LOOK_S = 1.0  # rates need two readings; the first look need not wait for the whole interval
IB_WORD = 4  # bytes: port_rcv_data and port_xmit_data count words of four octets (InfiniBand spec 16.1.3.5)
IB_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_constraint_errors",
    "port_xmit_constraint_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
)
Counters = dict[str, int]  # of one interface or port: rx and tx in bytes, errors, drops


def read_text(path: Path) -> str:
    """A small file of the kernel; empty when it is not there or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """A file that holds one number; None when it holds none, such as `max` or `N/A (no PMA)`."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def cpu_times(stat: str) -> tuple[int, int] | None:
    """Busy and all clock ticks of all cores together, from the text of /proc/stat."""
    name, *words = stat.partition("\n")[0].split() or [""]
    if name != "cpu" or len(words) < 5:
        return None
    ticks = [int(word) for word in words[:8]]  # time of guests is in user time already
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def cpu_percent(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """Share of time in which cores worked between two `cpu_times`."""
    if before is None or now is None or now[1] <= before[1]:
        return None
    share = (now[0] - before[0]) / (now[1] - before[1])
    return round(100 * min(1.0, max(0.0, share)), 1)  # iowait may run backwards


def load_1m(loadavg: str) -> float | None:
    """Mean count of processes that ran or waited in the last minute, from the text of /proc/loadavg."""
    words = loadavg.split()
    return float(words[0]) if words else None


def memory_bytes(meminfo: str) -> dict[str, int]:
    """The lines of /proc/meminfo that are sizes, in bytes."""
    found = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def group_memory(proc: Path, sys: Path) -> tuple[int, int] | None:
    """Limit and use in bytes of the control group with the least memory that this process is in; None without one.

    Pages of files that can be dropped are not counted as used.
    """
    found = []
    for line in read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used, dropped = sys / "fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, dropped = sys / "fs/cgroup/memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1):  # a limit may stand at any level above
            folder = root.joinpath(*parts[:depth])
            at_most, now = read_number(folder / limit), read_number(folder / used)
            if at_most is not None and now is not None:
                stat = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
                found.append((at_most, max(0, now - int(stat.get(dropped, 0)))))
    return min(found, key=lambda group: (group[0], -group[1]), default=None)


def memory(proc: Path, sys: Path, shm: Path) -> dict[str, float | None]:
    """Main memory, swap and /dev/shm in GiB."""
    sizes = memory_bytes(read_text(proc / "meminfo"))
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    used = None if total is None or available is None else total - available
    group = group_memory(proc, sys)
    if group is not None and total is not None and group[0] < total:
        total, used = group
        available = total - used if available is None else max(0, min(available, total - used))
    swap = sizes["SwapTotal"] - sizes["SwapFree"] if {"SwapTotal", "SwapFree"} <= sizes.keys() else None
    room = _room(shm)
    shared = None if room is None else room.f_frsize * (room.f_blocks - room.f_bfree)
    return {
        "total_gib": _gib(total),
        "used_gib": _gib(used),
        "available_gib": _gib(available),
        "swap_used_gib": _gib(swap),
        "shm_used_gib": _gib(shared),
    }


def network_counters(net_dev: str) -> dict[str, Counters]:
    """Counters of each interface but lo that has moved something, from the text of /proc/net/dev."""
    found = {}
    for line in net_dev.splitlines():
        name, colon, rest = line.rpartition(":")  # no blank need follow it, and a name may hold one
        words = rest.split()
        if not colon or len(words) < 12 or name.strip() == "lo":
            continue
        numbers = [int(word) for word in words[:12]]
        if numbers[0] or numbers[8]:
            errors, drops = numbers[2] + numbers[10], numbers[3] + numbers[11]
            found[name.strip()] = {"rx": numbers[0], "tx": numbers[8], "errors": errors, "drops": drops}
    return found


def infiniband_ports(sys: Path) -> dict[str, Path]:
    """Folder of each port by DEVICE/PORT."""
    return {f"{p.parent.parent.name}/{p.name}": p for p in sorted(sys.glob("class/infiniband/*/ports/*"))}


def infiniband_counters(port: Path) -> Counters:
    """Counters of one port; those that its driver does not have are left out."""
    found = {}
    for name, word, byte in (("rx", "port_rcv_data", "rx_bytes"), ("tx", "port_xmit_data", "tx_bytes")):
        words = read_number(port / "counters" / word)
        number = read_number(port / "hw_counters" / byte) if words is None else words * IB_WORD  # EFA has bytes only
        if number is not None:
            found[name] = number
    errors = [n for name in IB_ERRORS if (n := read_number(port / "counters" / name)) is not None]
    return found | ({"errors": sum(errors)} if errors else {})


def infiniband_link(port: Path) -> dict[str, Any]:
    """State and speed: `4: ACTIVE` and `400 Gb/sec (4X NDR)` become ACTIVE and 400.0."""
    rate = read_text(port / "rate").split()
    return {
        "state": read_text(port / "state").rpartition(":")[2].strip() or None,
        "rate_gb_s": float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else None,
    }


class Traffic:
    """Turns counters of interfaces or ports into rates since the last look and faults since the first."""

    def __init__(self, counters: Mapping[str, Counters], faults: Sequence[str]) -> None:
        self._before = dict(counters)
        self._faults: dict[str, Counters] = {}
        self._names = faults

    def look(self, counters: Mapping[str, Counters], seconds: float) -> dict[str, dict[str, Any]]:
        """Rates in MiB/s and faults of what is there now."""
        told: dict[str, dict[str, Any]] = {}
        for name, now in counters.items():
            before = self._before.get(name, {})
            grown = {key: now[key] - before[key] for key in now if key in before and now[key] >= before[key]}
            faults = self._faults.setdefault(name, {})
            for key in self._names:
                faults[key] = faults.get(key, 0) + grown.get(key, 0)
            rates = {f"{way}_mib_s": _rate(grown.get(way), seconds) for way in ("rx", "tx")}
            told[name] = rates | {key: faults[key] if key in now else None for key in self._names}
        self._before = dict(counters)
        return told


class Monitor:
    """One host. The roots are parameters so that tests can give the files of other machines."""

    def __init__(
        self,
        run_dir: Path,
        gpus: Gpus,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        shm: Path = Path("/dev/shm"),
    ) -> None:
        self.run_dir, self.gpus, self.proc, self.sys, self.shm = run_dir, gpus, proc, sys, shm
        self._notes = list(gpus.notes)
        self._ports = infiniband_ports(sys)
        self._cpu = cpu_times(read_text(proc / "stat"))
        self._network = Traffic(network_counters(read_text(proc / "net/dev")), ("errors", "drops"))
        self._infiniband = Traffic(self._port_counters(), ("errors",))
        self._at = time.monotonic()

    def look(self) -> dict[str, Any]:
        """One sample."""
        at = time.monotonic()
        seconds, self._at = at - self._at, at
        before, self._cpu = self._cpu, cpu_times(read_text(self.proc / "stat"))
        network = self._network.look(network_counters(read_text(self.proc / "net/dev")), seconds)
        infiniband = self._infiniband.look(self._port_counters(), seconds)
        room = _room(self.run_dir)
        notes, self._notes = self._notes, []
        return {
            "interval_s": round(seconds, 3),
            "cpu_percent": cpu_percent(before, self._cpu),
            "load_1m": load_1m(read_text(self.proc / "loadavg")),
            "memory": memory(self.proc, self.sys, self.shm),
            "gpus": self.gpus.look(),
            "network": network,
            "infiniband": {name: told | infiniband_link(self._ports[name]) for name, told in infiniband.items()},
            "disk_free_gib": None if room is None else _gib(room.f_frsize * room.f_bavail),
            "notes": notes,
        }

    def _port_counters(self) -> dict[str, Counters]:
        return {name: infiniband_counters(port) for name, port in self._ports.items()}


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 3)


def _rate(size: int | None, seconds: float) -> float | None:
    return None if size is None or seconds <= 0 else round(size / seconds / MIB, 3)


def _room(path: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(path)
    except OSError:
        return None


def main() -> int:
    """Look until nobody reads any more."""
    parser = argparse.ArgumentParser(prog="python -m launcher.running.monitor")
    parser.add_argument("--every", type=float, required=True, help="seconds between looks")
    parser.add_argument("--gpus", default="", help="numbers of the run's GPUs, with commas")
    parser.add_argument("--run-dir", type=Path, required=True, help="whose file system is watched")
    options = parser.parse_args()
    monitor = Monitor(options.run_dir, Gpus([int(word) for word in options.gpus.split(",") if word]))
    due = time.monotonic() + min(FIRST_LOOK_S, options.every)
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        line = json.dumps(monitor.look()) + "\n"
        try:
            os.write(1, line.encode())
        except OSError:  # the agent is gone
            return 0
        due = max(due + options.every, time.monotonic())


if __name__ == "__main__":
    raise SystemExit(main())
