"""The monitor: it reads what real kernels and drivers write, and nothing that becomes of it touches the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.command import with_port
from launcher.running import agent, monitor
from launcher.running.agent import RUN_ID, Process, is_alive, processes, read_environment
from launcher.running.monitor import Monitor, Traffic
from launcher.running.nvml import THROTTLE, Gpus, throttle_names
from launcher.running.orders import order_of
from tests.planning_support import gpus, plan
from tests.running_support import Watched, order, running, stand_in, wait_until

# As machines wrote them: a DGX node for memory, an older kernel without a blank after the colon for the network.
STAT = "cpu  1000 20 300 8000 400 30 50 200 900 0\ncpu0 500 10 150 4000 200 15 25 100 450 0\nintr 12345 0 9\n"
LATER = "cpu  1600 20 500 8600 500 30 50 200 1400 0\ncpu0 800 10 250 4300 250 15 25 100 700 0\nintr 12999 0 9\n"
MEMINFO = """MemTotal:       2113548476 kB
MemFree:        1510392840 kB
MemAvailable:   2010304512 kB
Buffers:           77964 kB
SwapTotal:       8388604 kB
SwapFree:        7340028 kB
Shmem:           4194304 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
DirectMap1G:    2124414976 kB
"""
NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 104424569373 5551494    0    0    0     0          0         0 104424569373 5551494    0    0    0     0       0          0
  ifb0:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0
  eth0:5107471131  119696    1    2    0     0          0         0  5661814   67973    4    8    0     0       0          0
bond0.12: 52428800    1000    0    0    0     0          0         7        0       0    0    0    0     0       0          0
"""  # noqa: E501
CONTRACT = ["interval_s", "cpu_percent", "load_1m", "memory", "gpus", "network", "infiniband", "disk_free_gib", "notes"]


def write(root: Path, files: dict[str, str]) -> Path:
    """A tree of files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def port(device: str, number: int, **files: str) -> dict[str, str]:
    """Files of one InfiniBand port as mlx5 has them; `files` replace counters."""
    folder = f"class/infiniband/{device}/ports/{number}"
    counters = dict.fromkeys(monitor.IB_ERRORS, "0\n")
    counters |= {"port_rcv_data": "1000\n", "port_xmit_data": "2000\n"} | files
    shown = {f"{folder}/counters/{name}": text for name, text in counters.items()}
    return shown | {f"{folder}/state": "4: ACTIVE\n", f"{folder}/rate": "400 Gb/sec (4X NDR)\n"}


def test_cpu_time_is_shared_between_work_and_waiting() -> None:
    before, now = monitor.cpu_times(STAT), monitor.cpu_times(LATER)
    assert before == (1600, 10000)  # time of guests is in user time and must not count twice
    assert monitor.cpu_percent(before, now) == 53.3  # 800 of 1500 ticks: neither idle nor waiting for a disk
    assert monitor.cpu_percent(now, before) is None
    assert monitor.cpu_percent(None, now) is None
    assert monitor.cpu_times("") is None


def test_memory_of_a_whole_machine(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO})
    found = monitor.memory(proc, tmp_path / "sys", tmp_path / "no such folder")
    assert found == {
        "total_gib": 2015.637,
        "used_gib": 98.461,
        "available_gib": 1917.176,
        "swap_used_gib": 1.0,
        "shm_used_gib": None,
    }


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/job_7/step_0\n", {"job_7/memory.max": "{limit}", "job_7/memory.current": "{used}"}),
        (
            "9:name=systemd:/\n4:cpuset,memory:/x\n",
            {"memory/memory.limit_in_bytes": "{limit}", "memory/memory.usage_in_bytes": "{used}"},
        ),
    ],
    ids=["version 2", "another controller beside it"],
)
def test_memory_of_a_control_group(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    """A container or Slurm job is killed at its own limit, whatever the machine has left."""
    numbers = {"limit": 64 * 2**30, "used": 50 * 2**30}
    sys_root = write(tmp_path, {f"fs/cgroup/{name}": text.format(**numbers) + "\n" for name, text in files.items()})
    folder = "job_7" if "job_7/memory.max" in files else "memory"
    stat = f"anon 1\ninactive_file {10 * 2**30}\ntotal_inactive_file {10 * 2**30}\n"
    write(sys_root, {f"fs/cgroup/{folder}/memory.stat": stat, "fs/cgroup/memory.max": "max\n"})
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": groups})
    found = monitor.memory(proc, sys_root, tmp_path)
    assert [found[name] for name in ("total_gib", "used_gib", "available_gib")] == [64.0, 40.0, 24.0]


def test_interfaces_that_moved_something() -> None:
    assert monitor.network_counters(NET_DEV) == {
        "eth0": {"rx": 5107471131, "tx": 5661814, "errors": 5, "drops": 10},
        "bond0.12": {"rx": 52428800, "tx": 0, "errors": 0, "drops": 0},
    }


def test_rates_are_never_negative_and_faults_count_from_the_start() -> None:
    mib = 2**20

    def at(rx: int, errors: int) -> dict[str, int]:
        return {"rx": rx * mib, "tx": 0, "errors": errors, "drops": 0}

    traffic = Traffic({"eth0": at(100, 7)}, ("errors", "drops"))
    assert traffic.look({"eth0": at(110, 9)}, 5.0)["eth0"] == {
        "rx_mib_s": 2.0,
        "tx_mib_s": 0.0,
        "errors": 2,
        "drops": 0,
    }
    back = traffic.look({"eth0": at(3, 1), "ib0": at(50, 4)}, 5.0)  # set back; and a new one
    assert (back["eth0"]["rx_mib_s"], back["eth0"]["errors"]) == (None, 2)
    assert (back["ib0"]["rx_mib_s"], back["ib0"]["errors"]) == (None, 0)
    assert traffic.look({"eth0": at(8, 1)}, 5.0) == {
        "eth0": {"rx_mib_s": 1.0, "tx_mib_s": 0.0, "errors": 2, "drops": 0}
    }
    again = traffic.look({"eth0": at(8, 1), "ib0": at(5000, 4)}, 5.0)
    assert again["ib0"]["rx_mib_s"] is None  # it was away: what it moved meanwhile was not moved in these 5 s


def test_infiniband_ports(tmp_path: Path) -> None:
    files = port("mlx5_0", 1, symbol_error="3\n", link_downed="2\n", port_xmit_discards="N/A (no PMA)\n")
    files |= port("mlx5_bond_0", 2)
    efa = "class/infiniband/rdmap16s27/ports/1"  # no counters that a subnet manager knows, but bytes
    files |= {f"{efa}/hw_counters/rx_bytes": "4096\n", f"{efa}/hw_counters/tx_bytes": "8192\n"}
    files |= {f"{efa}/state": "4: ACTIVE\n", f"{efa}/rate": "100 Gb/sec (4X EDR)\n"}
    ports = monitor.infiniband_ports(write(tmp_path, files))
    assert list(ports) == ["mlx5_0/1", "mlx5_bond_0/2", "rdmap16s27/1"]
    assert monitor.infiniband_counters(ports["mlx5_0/1"]) == {"rx": 4000, "tx": 8000, "errors": 5}
    assert monitor.infiniband_counters(ports["rdmap16s27/1"]) == {"rx": 4096, "tx": 8192}
    assert monitor.infiniband_link(ports["mlx5_0/1"]) == {"state": "ACTIVE", "rate_gb_s": 400.0}
    write(tmp_path, {"class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"})
    assert monitor.infiniband_link(ports["mlx5_0/1"])["state"] == "DOWN"


def test_a_whole_look_at_a_machine_of_files(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"stat": STAT, "meminfo": MEMINFO, "net/dev": NET_DEV, "loadavg": "3.5 1 1 1/9 7"})
    sys_root = write(tmp_path / "sys", port("mlx5_0", 1))
    watching = Monitor(tmp_path, Gpus([]), proc=proc, sys=sys_root, shm=tmp_path)
    write(proc, {"stat": LATER, "net/dev": NET_DEV.replace("5107471131", str(5107471131 + 2**30))})
    write(sys_root, {"class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": str(1000 + 2**28)})
    time.sleep(0.1)
    first = watching.look()
    assert list(first) == CONTRACT
    assert (first["cpu_percent"], first["load_1m"], first["gpus"]) == (53.3, 3.5, [])
    moved = first["network"]["eth0"]["rx_mib_s"] * first["interval_s"]
    assert moved == pytest.approx(1024, rel=0.02)  # the interval is rounded to milliseconds
    infiniband = first["infiniband"]["mlx5_0/1"]
    assert infiniband["rx_mib_s"] == pytest.approx(first["network"]["eth0"]["rx_mib_s"], rel=1e-3)  # both 1 GiB
    assert (infiniband["tx_mib_s"], infiniband["state"], infiniband["errors"]) == (0.0, "ACTIVE", 0)
    assert first["notes"] == ["no GPU is watched: the run uses none on this host"]
    assert watching.look()["notes"] == []


def test_nothing_to_read_is_nothing_known(tmp_path: Path) -> None:
    """Another kernel, or a container that shows none of it."""
    away = tmp_path / "away"
    sample = Monitor(away, Gpus([]), proc=away, sys=away, shm=away).look()
    assert list(sample) == CONTRACT
    assert {sample[name] for name in ("cpu_percent", "load_1m", "disk_free_gib")} == {None}
    assert set(sample["memory"].values()) == {None}
    assert (sample["network"], sample["infiniband"]) == ({}, {})


def test_throttle_reasons_are_those_of_the_driver() -> None:
    import pynvml

    for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
        for name, bit in vars(pynvml).items():
            if not name.startswith(prefix) or name in (f"{prefix}None", f"{prefix}All", f"{prefix}UserDefinedClocks"):
                continue
            assert THROTTLE[bit].replace("_", "") == name.removeprefix(prefix).lower()
    assert throttle_names(sum(THROTTLE)) == list(THROTTLE.values())
    assert throttle_names(pynvml.nvmlClocksThrottleReasonSwPowerCap | 0x100000) == ["sw_power_cap", "bit_0x100000"]
    assert throttle_names(0) == []


def test_why_a_gpu_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Gpus([97])  # with a driver there is no such GPU, without one there is none
    assert (absent.look(), len(absent.notes)) == ([], 1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    without = Gpus([0])
    assert (without.look(), len(without.notes)) == ([], 1)
    assert "pip install nvidia-ml-py" in without.notes[0]


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    query = "index,name,uuid,memory.total,memory.used,temperature.gpu"
    smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    listed = [line.split(", ") for line in subprocess.check_output(smi, text=True).splitlines()]
    watching = Gpus([int(words[0]) for words in listed])
    assert watching.notes == []
    for gpu, (index, name, uuid, memory, used, temperature) in zip(watching.look(), listed, strict=True):
        assert (gpu["index"], gpu["name"], gpu["uuid"]) == (int(index), name, uuid)
        assert gpu["memory_total_gib"] == pytest.approx(int(memory) / 1024, rel=0.02)
        assert gpu["memory_used_gib"] == pytest.approx(int(used) / 1024, abs=0.2)
        assert 0 <= gpu["util_percent"] <= 100
        assert 0 < gpu["sm_clock_mhz"] < 5000 < 100 * gpu["memory_clock_mhz"]
        assert 0 < gpu["power_w"] < 1.2 * gpu["power_limit_w"]
        assert abs(gpu["temperature_c"] - int(temperature)) < 15
        assert set(gpu["throttle"]) <= set(THROTTLE.values())
    assert [gpu["index"] for gpu in Gpus([int(words[0]) for words in listed[::-1]]).look()] == [
        int(words[0]) for words in listed[::-1]
    ]


# Real agents from here on.


def monitors(run: Path) -> list[Process]:
    """Live monitors of a run folder, found by their command line."""
    found = []
    for process in processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            if not process.ended and f"--run-dir={run}".encode() in words:
                found.append(process)
    return found


def instead(run: Path, program: str) -> None:
    """Have the agent start another program as its monitor: ranks find the package elsewhere, by PYTHONPATH."""
    write(run, {"launcher/__init__.py": "", "launcher/running/__init__.py": "", "launcher/running/monitor.py": program})


def samples(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was seen."""
    return [event["sample"] for event in events if event["event"] == "monitor"]


def test_samples_arrive_while_a_run_goes_on_and_nothing_is_left(runs: Path) -> None:
    watched = Watched(runs, stand_in(), monitor_every_s=0.2)
    watched.until("monitor")
    (process,) = monitors(runs)
    assert RUN_ID not in read_environment(process.pid)
    assert process.pid not in watched.left()
    watched.all_running()
    for _ in range(2):
        watched.until("monitor")
    watched.link.send({"do": "stop"})
    seen = watched.done()
    assert not is_alive(process.pid, process.start)
    found = samples(seen)
    assert [list(sample) for sample in found] == [CONTRACT] * len(found)
    assert len(found[0]["notes"]) == 1
    assert not any(sample["notes"] for sample in found[1:])
    assert max(sample["cpu_percent"] for sample in found) > 0
    assert watched.whys() == ["stop"]


def test_no_monitor_unless_asked(runs: Path) -> None:
    process = agent.MonitorProcess(
        agent.Order(**order(runs, [sys.executable])), sys.executable, lambda event, **fields: None
    )
    process.poll()
    assert monitors(runs) == []
    assert process.end() == []


BAD = {
    "raises": ("raise OSError('no such device')", "it ended with exit code 1: OSError: no such device"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "it ended with signal 9"),
    "garbage": ("while True: print('garbage')", "it wrote what is no sample: garbage"),
    "no end of line": ("while True: print('x' * 4096, end='')", "it wrote what is no sample: b'xxx"),
    "no text": (
        'import os, time; os.write(1, b\'\\xff\\n[1]\\n{"a":"\\\\ud800"}\\n\' * 40); time.sleep(60)',
        "it wrote what is no sample: ",
    ),
    "silent": ("import time; time.sleep(60)", None),
    "closes its output": ("import os, time; os.close(1); os.close(2); time.sleep(60)", None),
}


@pytest.mark.parametrize(("program", "why"), BAD.values(), ids=BAD)
def test_a_bad_monitor_is_given_up_with_its_reason(runs: Path, program: str, why: str | None) -> None:
    instead(runs, program)
    events: list[dict[str, Any]] = []
    asked = agent.Order(**order(runs, [sys.executable], monitor_every_s=0.2))
    process = agent.MonitorProcess(
        asked, asked.argv[0], lambda event, **fields: events.append({"event": event, **fields})
    )
    end, slowest = time.monotonic() + (20 if why else 0.5), 0.0
    while time.monotonic() < end and not events:
        begun = time.monotonic()
        process.poll()
        slowest = max(slowest, time.monotonic() - begun)
        time.sleep(0.01)
    process.poll()
    assert process.end() == []
    assert monitors(runs) == []
    assert slowest < 0.5  # the agent has ranks to guard
    assert [event["event"] for event in events] == ["monitor_lost"] * (why is not None)
    if why is not None:
        assert events[0]["why"].startswith(why)
        assert len(events[0]["why"]) < 400


@pytest.mark.parametrize("kind", ["no end of line", "silent"])
def test_a_bad_monitor_does_not_touch_the_run(runs: Path, kind: str) -> None:
    instead(runs, BAD[kind][0])
    watched = Watched(runs, stand_in("steps=5"), monitor_every_s=0.2)
    seen = watched.done()
    assert {event["exit_code"] for event in watched.exits().values()} == {0}
    assert watched.whys() == []
    assert monitors(runs) == []
    assert [event["event"] for event in seen].count("monitor_lost") == (BAD[kind][1] is not None)


def test_killed_agent_takes_its_monitor_along(runs: Path) -> None:
    watched = Watched(runs, stand_in(), monitor_every_s=0.2)
    watched.all_running()
    watched.until("monitor")
    watched.link.process.kill()
    watched.until("lost")
    wait_until(lambda: not monitors(runs) and not watched.left(), 5, "no process is left")


def test_samples_wait_for_no_reader() -> None:
    """A supervisor suspended for days must not fill the agent's memory with what it will not read; the rest it must."""
    program = (
        "from launcher.running.agent import BACKLOG, Wire; import sys; wire = Wire()\n"
        "for _ in range(40): wire.emit('monitor', sample={'text': 'x' * 100_000})\n"
        "full = len(wire.unsent); wire.emit('rank', rank=0)\n"
        "print(full - BACKLOG, len(wire.unsent) - full, file=sys.stderr)"
    )
    unread, end = os.pipe()
    done = subprocess.run([sys.executable, "-c", program], stdout=end, stderr=subprocess.PIPE, text=True, check=True)
    over, more = map(int, done.stderr.split())
    os.close(unread)
    os.close(end)
    assert 0 < over < 200_000
    assert more > 0


def test_supervisor_keeps_the_samples(runs: Path) -> None:
    with running(runs, stand_in("steps=20"), monitor_every_s=0.2) as run:
        code, text, _ = run.end()
    assert code == 0
    assert "warning" not in text
    lines = [json.loads(line) for line in run.dir.monitor.read_text().splitlines()]
    assert len(lines) >= 2
    assert [list(line) for line in lines] == [["time", "host", *CONTRACT]] * len(lines)
    assert {line["host"] for line in lines} == {"localhost"}
    assert 0 < lines[1]["time"] - lines[0]["time"] < 5
    assert monitors(runs) == []


def test_what_goes_wrong_with_samples_is_told_once(runs: Path) -> None:
    (runs / "monitor.jsonl").mkdir()  # nothing can be written there
    with running(runs, stand_in("steps=40"), monitor_every_s=0.2) as run:
        wait_until(lambda: monitors(runs), 20, "a monitor runs")
        time.sleep(1)
        for process in monitors(runs):
            os.kill(process.pid, signal.SIGKILL)
        code, text, outcome = run.end()
    assert (code, outcome["status"]) == (0, "done")
    assert text.count("monitor.jsonl cannot be written: ") == 1
    assert "warning: localhost is no longer monitored: it ended with signal 9\n" in text


def test_the_order_names_the_gpus_of_the_run() -> None:
    def asked(*words: str, **facts: Any) -> agent.Order:
        return order_of(with_port(plan(*words, **facts), 29500), 0, files={}, lost_contact_s=None)

    three = tuple(replace(gpu, index=number) for gpu, number in zip(gpus(3), (6, 2, 4), strict=True))
    on_gpus = asked("gpus=[0,2]", gpus=three, visible_devices="6,2,4")  # the machine's own numbers, by local rank
    assert (on_gpus.gpus, on_gpus.monitor_every_s) == ([4, 6], 5.0)
    assert asked().gpus == []
    assert asked("logging.monitor_every_s=null").monitor_every_s is None
