"""The program that looks at hosts, and what is concluded from what it sees."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.running import probe
from launcher.running.addresses import candidates_of, choose_interface, nccl_fits, pairs
from launcher.running.binding import bind
from launcher.running.crew import Stopped
from launcher.running.findings import Finding, problems
from launcher.running.machines import Reference, imported, judge
from launcher.running.oddities import oddities
from launcher.running.panel import Panel, Silence
from launcher.running.transport import BOOT, LOST, Channel, Door
from launcher.running.unreachable import unreachable
from launcher.spec import AttentionConfig, Host, RunPlan, plan_to_json
from tests import fabrics
from tests.planning_support import plan as planned

SOURCE = Path(probe.__file__).read_text()
ASKED: dict[str, Any] = {
    "do": "look",
    "cwd": "/",
    "path": [],
    "modules": ["json", "no_such_module"],
    "packages": ["pytest", "no-such-package"],
    "digest": None,
    "files": [],
    "programs": ["sh", "no-such-program"],
    "search": None,
    "hub": None,
    "run_dir": "/nowhere/runs/mine",
    "token": None,
    "gpus": False,
}


@contextlib.contextmanager
def probing(*names: str) -> Iterator[Panel]:
    """Probes on this machine, as hosts of these names."""
    inbox: queue.Queue[Any] = queue.Queue()
    door = (sys.executable, "-c", BOOT)
    channels = {name: Channel(Door(name, door, True), inbox) for name in names}
    try:
        yield Panel(channels)
    finally:
        for channel in channels.values():
            channel.close()


def test_probe_is_one_file_for_any_python_of_the_last_years() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 6))
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= set(sys.stdlib_module_names) - {"__future__"}  # its annotations came with 3.7


def test_probe_says_what_it_sees(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    asked = {**ASKED, "cwd": str(Path(probe.__file__).parents[2]), "files": [str(rows), "/gone"], "token": str(token)}
    with probing("here") as panel:
        look = panel.start(asked, 10.0)["here"]
        panel.end()
    assert (look["python"], look["executable"]) == (sys.version.split()[0], sys.executable)
    assert look["missing"] == ["no_such_module"]
    assert look["versions"] == {"pytest": pytest.__version__}
    assert look["programs"]["sh"] and look["programs"]["no-such-program"] is None
    assert look["folder"]["where"] == "/" and look["folder"]["shared"] is True
    assert look["launcher"]["digest"] == probe.digest_of(probe.sources(str(Path(probe.__file__).parents[1])))
    assert look["files"]["/gone"] == {"failed": "No such file or directory"}
    assert look["files"][str(rows)] == probe.mark(str(rows)) != {"failed": "No such file or directory"}
    assert look["processors"]["allowed"] == sorted(os.sched_getaffinity(0))
    assert {"interface": "lo", "address": "127.0.0.1"}.items() <= look["addresses"][0].items()
    assert abs(look["ahead_s"]) < 2


def test_a_module_inside_a_package_is_found_without_an_import(tmp_path: Path) -> None:
    """flash-attn 4 lies in a folder without __init__.py, or inside flash-attn 2, whose import takes seconds."""
    (bare := tmp_path / "bare" / "flash_attn" / "cute").mkdir(parents=True)
    (inside := tmp_path / "inside" / "flash_attn" / "cute").mkdir(parents=True)
    for folder in (bare, inside):
        (folder / "interface.py").touch()
    (inside.parent / "__init__.py").write_text("raise SystemExit('was imported')")
    for folder in (bare, inside):
        path = [str(folder.parents[1])]
        assert probe.locate("flash_attn.cute.interface", path) == str(folder / "interface.py")
        assert probe.locate("flash_attn.cute.other", path) is None
        assert probe.locate("flash_attn.none.interface", path) is None
    assert probe.locate("flash_attn", [str(bare.parents[1])]) is None  # a folder alone is no package
    assert probe.locate("no_such_package.cute", [str(tmp_path)]) is None


def test_a_working_folder_that_comes_after_the_first_look_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "sent"
    asked = {**ASKED, "cwd": str(folder)}
    before = probe.look(asked)
    (folder / "launcher").mkdir(parents=True)
    (folder / "launcher" / "__init__.py").touch()
    assert not before["cwd"] and before["launcher"]["where"] != str(folder / "launcher")
    assert probe.look(asked)["launcher"]["where"] == str(folder / "launcher")


def test_gpus_tell_their_compute_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver knows the question: those of the oldest do not, and tell the rest."""
    made = fabrics.host(tmp_path / "root", gpus=["NVIDIA GeForce RTX 2080 Ti"] * 2)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for answer, found in ((None, [None, None]), ("GPU-0, 7.5\nGPU-1, [N/A]\n", [[7, 5], None])):
        if answer is not None:
            made.commands["nvidia-smi", f"--query-gpu={probe.ABLE_FIELDS}", fabrics.FORM] = answer
        made.write_programs(tmp_path / "bin")
        assert [gpu["capability"] for gpu in probe.gpus()] == found


def test_every_source_counts_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.py").touch()
    (tmp_path / "a.py").write_text("a = 1")
    (tmp_path / "notes.txt").write_text("b")
    before = probe.sources(str(tmp_path))
    assert set(before) == {"a.py"}
    (tmp_path / "a.py").write_text("a = 2")
    assert probe.digest_of(probe.sources(str(tmp_path))) != probe.digest_of(before)


def test_long_files_are_known_by_size_and_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ENDS", 4)
    file = tmp_path / "weights"
    seen = set()
    for content in (b"abcdefghij", b"abcdefghiX", b"Xbcdefghij", b"abcdefghijk", b"ab"):
        file.write_bytes(content)
        seen.add(tuple(probe.mark(str(file))))
    assert len(seen) == 5


def test_addresses_and_routes_without_the_program_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    """N04."""

    def no_ip(*argv: str) -> str:
        raise FileNotFoundError

    told = {(a["interface"], a["address"], a["prefix"]) for a in probe.addresses()}
    route = probe.route_to("127.0.0.1")
    monkeypatch.setattr(probe, "output", no_ip)
    found = {(a["interface"], a["address"], a["prefix"]) for a in probe.addresses()}
    assert ("lo", "127.0.0.1", 8) in found <= told
    assert probe.route_to("127.0.0.1") == route == {"interface": "lo", "source": "127.0.0.1"}


def test_hosts_know_who_answers() -> None:
    with probing("a", "b") as panel:
        panel.start(ASKED, 10.0)
        ask = {"do": "listen", "ports": [0], "address": None}
        ears = panel.ask({"a": {**ask, "word": "i am a"}, "b": {**ask, "word": "i am b"}}, 5.0)
        a, b = ears["a"]["port"], ears["b"]["port"]
        targets = [["a", "127.0.0.1", a, "i am a"], ["b", "127.0.0.1", b, "i am a"], ["none", "127.0.0.1", 1, "x"]]
        calls = panel.ask({"b": {"do": "dial", "targets": targets, "wait_s": 2.0}}, 5.0)["b"]
        again = panel.ask({"b": {**ask, "ports": [a, 0], "word": "x"}}, 5.0)["b"]
        foreign = panel.ask({"b": {**ask, "address": "192.0.2.77", "word": "x"}}, 5.0)["b"]
        taken = panel.ask({"b": {**ask, "ports": [a], "word": "x"}}, 5.0)["b"]
        panel.end()
    assert calls == {
        "a": {},
        "b": {"failed": "another machine answers"},
        "none": {"failed": "Connection refused"},
    }
    assert again["port"] not in (a, b)
    assert (foreign["what"], taken["what"]) == ("address", "port")
    with socket.create_server(("", a)):  # nothing listens there any more
        pass


def test_the_end_of_a_connection_that_was_replaced_says_nothing() -> None:
    """Before a restart, a lost host may be heard of late, and only the first host is asked."""
    with probing("a") as panel:
        for host in ("a", "gone"):
            panel._inbox.put({"event": LOST, "host": host, "reason": "Timeout", "exit_code": 255})
        assert set(panel.start(ASKED, 20.0)) == {"a"}
        panel.end()
    assert panel.silent == {}


def test_nobody_waits_for_a_dead_host_after_a_stop() -> None:
    channel, began = Channel(Door("dumb", ("sleep", "60"), False), queue.Queue()), time.monotonic()
    with pytest.raises(Stopped):
        Panel({"dumb": channel}, lambda: True).start(ASKED, 20.0)
    assert time.monotonic() - began < 5
    channel.kill()
    channel.close()


def test_what_runs_python_passes_through_every_login_shell() -> None:
    """The rules of csh in quotes: no ends of lines, no `!`."""
    assert not set("\n!'") & set(BOOT)


def test_a_host_that_says_nothing_is_an_answer() -> None:
    inbox: queue.Queue[Any] = queue.Queue()
    channels = {
        "dumb": Channel(Door("dumb", ("sleep", "60"), False), inbox),
        "gone": Channel(Door("gone", ("sh", "-c", "echo no >&2; exit 127"), False), inbox),
        "here": Channel(Door("here", (sys.executable, "-c", BOOT), True), inbox),
    }
    panel = Panel(channels)
    looks = panel.start(ASKED, -1.0)
    panel.end()
    channels["dumb"].kill()
    for channel in channels.values():
        channel.close()
    assert set(looks) == {"here"}
    assert panel.silent["gone"] == Silence(said="no", exit_code=127)
    assert panel.silent["dumb"].said == "no answer within 1 s"


UNREACHABLE = {
    "No ED25519 host key is known for n2 and you have requested strict checking.\r\nHost key verification failed.": (
        "host key",
        "is not known here",
        "ssh -p 22 me@n2   (once, and compare the key)",
    ),
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.": (
        "host key",
        "another machine has its name",
        "ssh-keygen -R n2   (once you know why), then  ssh -p 22 me@n2",
    ),
    "me@n2: Permission denied (publickey,password).": ("login", "(publickey,password)", "ssh-copy-id -p 22 me@n2"),
    "ssh: Could not resolve hostname n2: Name or service not known": (
        "name",
        "no address for n2",
        "addr=ADDRESS in its line of the hostfile",
    ),
    "ssh: connect to host n2 port 22: Connection refused": ("unreachable", "no sshd", "port=NUMBER in its line"),
    "ssh: connect to host n2 port 22: No route to host": ("unreachable", "No route to host; is it", "ping n2"),
    "bash: line 1: /opt/python: No such file or directory": ("python", "/opt/python: No such file", "cluster.python="),
    "/usr/bin/python3: command not found": ("python", "command not found", "cluster.python=PATH"),
    'OCI runtime exec failed: exec failed: exec: "/venv/python": stat': ("python", "OCI runtime", "cluster.python="),
    "Error response from daemon: No such container: qwen": ("container", "No such container: qwen", "docker ps"),
    "srun: error: Unable to create step for job 7: Requested nodes are busy": ("slurm", "nodes are busy", "squeue"),
    '  File "<string>", line 5\nSyntaxError: invalid syntax': ("python", "too old", "cluster.python=PATH"),
}


@pytest.mark.parametrize("said", UNREACHABLE)
def test_last_words_become_a_cause_and_a_fix(said: str) -> None:
    what, reason, fix = UNREACHABLE[said]
    host = Host(name="n2", gpus=(0,), user="me", port=22)
    row = unreachable(planned(), host, Silence(said=said, exit_code=255))
    assert row.what == what
    assert reason in row.reason
    assert any(fix in line for line in row.tries)


def test_a_host_that_only_its_line_gives_an_address_is_called_by_that() -> None:
    host = Host(name="no-such-name", gpus=(0,), user="me", address="10.77.0.2")
    row = unreachable(planned(), host, Silence(said="Host key verification failed.", exit_code=255))
    assert row.tries == ("ssh -oHostKeyAlias=no-such-name me@10.77.0.2   (once, and compare the key)",)


def test_a_wrapper_that_is_not_there_is_no_fault_of_python() -> None:
    cluster = dataclasses.replace(planned().config.cluster, wrap=("dokcer", "exec"))
    wrapped = dataclasses.replace(planned(), config=dataclasses.replace(planned().config, cluster=cluster))
    row = unreachable(wrapped, wrapped.hosts[0], Silence(said="dokcer: command not found", exit_code=127))
    assert (row.what, row.tries) == ("wrap", ("cluster.wrap=[PROGRAM,ARGUMENT]",))


def test_unknown_last_words_are_passed_on() -> None:
    away = dataclasses.replace(planned(), transport="ssh")
    row = unreachable(away, Host(name="n2", gpus=(0,)), Silence(said="hello\nkernel panic", exit_code=255))
    assert row.reason == "hello; kernel panic (exit code 255)"
    assert row.tries == ("ssh n2",)


def test_rows_of_many_hosts_are_one() -> None:
    rows = [Finding(host=f"n{n}", what="code", reason="other", tries=("sync",)) for n in range(9)]
    rows += [Finding(host="n1", what="GPUs", reason="none")]
    assert [problem.text for problem in problems(rows)] == [
        "n0, n1, n2, n3 and 5 more  code  other",
        "n1                         GPUs  none",
    ]


NETWORKS = itertools.count()
GPU = {"uuid": "GPU-0", "name": "H200", "total": 2**37, "used": 0, "mode": "Default", "driver": "570", "users": []}


def gpus(count: int, **fields: Any) -> list[dict[str, Any]]:
    """GPUs as a probe sees them, half of them on each of two memory nodes."""
    return [{**GPU, "index": n, "uuid": f"GPU-{n:04}", "node": 2 * n // count, **fields} for n in range(count)]


def look(**fields: Any) -> dict[str, Any]:
    """What a probe might say."""
    versions = {"torch": "2.12", "deepspeed": "0.19.8", "transformers": "5.24", "peft": "0.19"}
    machine = {"hostname": "a", "boot": "b", "network": f"net:[{next(NETWORKS)}]"}
    return {
        "python": "3.11.7",
        "executable": "/venv/python",
        "cwd": True,
        "missing": [],
        "versions": versions,
        "launcher": {"where": "/w/launcher", "digest": "d", "files": None},
        "files": {},
        "programs": {},
        "hub": None,
        "folder": {"where": "/w", "writable": True, "free": 10**15, "shared": True},
        "shm": {"free": 10**12},
        "processors": {"allowed": list(range(16)), "quota": None},
        "numa": {"0": list(range(8)), "1": list(range(8, 16))},
        "machine": machine,
        "addresses": [],
        "ssh_address": [],
        "gpus": gpus(8),
        "visible": None,
        "leftovers": {},
        "ahead_s": 0.0,
        **fields,
    }


def two(first: dict[str, Any] | None = None, **second: Any) -> tuple[RunPlan, dict[str, Any]]:
    """A plan on two hosts of eight GPUs, and what their probes see."""
    hosts = tuple(Host(name=name, gpus=tuple(range(8))) for name in ("a", "b"))
    plan = dataclasses.replace(planned(), hosts=hosts, transport="ssh", device="cuda", attention="auto")
    env = {name: value for name, value in plan.env.items() if name != "OMP_NUM_THREADS"}
    config = dataclasses.replace(plan.config, attention=AttentionConfig(name="cudnn"))
    return dataclasses.replace(plan, env=env, config=config), {"a": look(**(first or {})), "b": look(**second)}


JUDGED = [
    ({"python": "3.8.1"}, "python", "3.10 or newer"),
    ({"python": "3.12.1"}, "versions", "python 3.12, but 3.11 on this machine, a"),
    ({"versions": {**look()["versions"], "torch": "2.11"}}, "versions", "torch 2.11, but 2.12 on this machine, a"),
    (
        {"versions": {**look()["versions"], "deepspeed": "0.18.2"}},
        "versions",
        "computes wrong gradients (deepspeedai",
    ),  # G11
    ({"versions": {**look()["versions"], "flash-attn": "2.8"}}, "versions", "flash-attn 2.8, but not installed on a"),
    (
        {"versions": {**look()["versions"], "flash-attn-4": "4.0"}},
        "versions",
        "flash-attn-4 4.0, but not installed on a",
    ),
    ({"missing": ["deepspeed"]}, "packages", "/venv/python lacks deepspeed"),
    ({"missing": ["cudnn"]}, "packages", "attention=cudnn needs nvidia-cudnn-frontend: pip install"),
    ({"cwd": False}, "folder", "the working folder /w is not there"),
    ({"launcher": {"where": None}}, "code", "no package launcher"),
    (
        {"launcher": {"where": "/x", "digest": "e", "files": {"spec.py": "2", "errors.py": "1"}}},
        "code",
        "in /x is not the one here: spec.py differs",
    ),
    ({"files": {"/w/rows": {"failed": "No such file or directory"}}}, "inputs", "dataset.train=/w/rows: no such file"),
    ({"files": {"/w/rows": [4, "x"]}}, "inputs", "4 bytes instead of 3"),
    ({"files": {"/w/rows": [3, "y"]}}, "inputs", "its content differs"),
    ({"gpus": {"failed": "no nvidia-smi"}}, "GPUs", "no GPU answers (no nvidia-smi)"),
    ({"gpus": gpus(4)}, "GPUs", "slot 4,5,6,7 is not there: it has 4 GPUs"),
    ({"gpus": gpus(8, mode="Prohibited")}, "GPUs", "GPU 7 is in compute mode Prohibited"),
    ({"visible": "0,1"}, "GPUs", "CUDA_VISIBLE_DEVICES=0,1 is set there, and slots 0,1,2,3,4,5,6,7 are not in it"),
    ({"visible": "MIG-1234"}, "GPUs", "CUDA_VISIBLE_DEVICES=MIG-1234"),
    # K14: no data worker needs it, NCCL does
    ({"shm": {"free": 2**20}}, "/dev/shm", "1 MiB are free in /dev/shm, and 8 GPUs need about 256 MiB"),
    ({"programs": {"nsys": None}}, "profiler", "needs nsys"),
    ({"twins": [7]}, "started twice", "this very command runs there too (pid 7)"),
    (
        {"folder": {"where": "/w", "writable": False, "free": 10**15, "shared": False}},
        "run folder",
        "no permission to write in /w",
    ),
    ({"folder": {"where": "/w", "writable": True, "free": 1, "shared": False}}, "disk", "0.0 GB are free"),
]


@pytest.mark.parametrize(("seen", "what", "reason"), JUDGED)
def test_each_difference_names_its_host(seen: dict[str, Any], what: str, reason: str) -> None:
    plan, looks = two(**seen)
    reference = Reference(
        cwd="/w",
        versions={"python": "3.11", "torch": "2.12"},
        digest="d",
        files={"spec.py": "1", "errors.py": "1"},
        marks={"/w/rows": [3, "x"]},
        keys={"/w/rows": "dataset.train"},
    )
    for one in looks.values():
        one["files"] = one["files"] or {"/w/rows": [3, "x"]}
    found = judge(plan, looks, reference)
    assert {row.host for row in found} == {"b"}
    assert any(row.what == what and reason in row.reason for row in found), found


def test_hosts_are_asked_for_the_very_module_of_a_kernel() -> None:
    plan, looks = two(missing=["flash_attn.cute.interface"])
    config = dataclasses.replace(plan.config, attention=AttentionConfig(name="flash_attention_4"))
    plan = dataclasses.replace(plan, config=config)
    assert "flash_attn.cute.interface" in imported(plan)
    (found,) = judge(plan, looks, Reference(cwd="/w", digest="d", versions={"python": "3.11"}))
    assert (found.host, found.what) == ("b", "packages")
    assert found.reason == "attention=flash_attention_4 needs flash-attn-4: pip install flash-attn-4"


def test_equal_hosts_have_no_findings() -> None:
    plan, looks = two(visible="GPU-0000,GPU-0001,2,3,4,5,6,7")
    assert judge(plan, looks, Reference(cwd="/w", digest="d", versions={"python": "3.11"})) == []
    assert oddities(plan, looks, Reference(cwd="/w")) == []


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (
            {"where": "/local", "writable": False, "free": 10**15},
            "/local/nvme cannot be written",
        ),
        ({"where": "/local/nvme", "writable": True, "free": 10**6}, "0.0 GB are free in /local/nvme, and optimizer"),
        ({"where": "/local/nvme", "writable": True, "free": 10**15}, None),
    ],
)
def test_the_folder_on_nvme_is_looked_at_on_every_host(seen: dict[str, Any], reason: str | None) -> None:
    plan, looks = two({"scratch": {**seen, "writable": True, "free": 10**15}}, scratch=seen)
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local/nvme"}}
    plan = dataclasses.replace(plan, deepspeed={"zero_optimization": zero}, trainable={"language": 10**9})
    found = [(row.host, row.reason) for row in judge(plan, looks, Reference(cwd="/w")) if row.what == "nvme folder"]
    assert [host for host, _ in found] == (["b"] if reason else [])
    assert reason is None or reason in found[0][1]


def test_the_odd_one_of_three_is_named_and_not_this_machine() -> None:
    plan, looks = two()
    looks["c"] = look(versions={**look()["versions"], "transformers": "5.23"})
    plan = dataclasses.replace(plan, hosts=(*plan.hosts, Host(name="c", gpus=(0,))))
    found = judge(plan, looks, Reference(cwd="/w", versions={"transformers": "5.20"}))
    assert [(row.host, row.reason) for row in found] == [("c", "transformers 5.23, but 5.24 on a, b")]


def test_one_machine_by_two_names() -> None:
    same = {"hostname": "a", "boot": "1", "network": "net:[1]"}
    plan, looks = two({"machine": same}, machine=same)
    (row,) = judge(plan, looks, Reference(cwd="/w"))
    assert (row.host, row.config) == ("b", True)
    assert "the same machine as a" in row.reason
    assert judge(dataclasses.replace(plan, transport="manual"), looks, Reference(cwd="/w")) == []
    looks["b"]["machine"] = {**same, "network": "net:[2]"}  # two containers with addresses of their own
    assert judge(plan, looks, Reference(cwd="/w")) == []


def test_what_a_person_should_know() -> None:
    user = {"pid": 7, "name": "/usr/bin/python", "user": "eve", "bytes": 10**9}
    busy = [*gpus(7), {**GPU, "index": 7, "node": 1, "used": 10**10, "users": [user]}]
    plan, looks = two(gpus=busy, ahead_s=-60.0, leftovers={"old": [4, 5]}, shm={"free": 300 * 2**20}, hub=False)
    looks["a"]["gpus"] = gpus(8, name="A100", driver="560")
    text = "\n".join(oddities(plan, looks, Reference(cwd="/w")))
    assert "b: GPU 7 is in use, 10.0 GB of 137, by python of eve (pid 7, 1.0 GB)" in text
    assert "b: its clock is 60 s behind" in text
    assert "b: 2 process(es) of run old, which has ended, are left there: kill 4, 5" in text
    assert "b: 300 MiB are free in /dev/shm" in text
    assert "GPUs differ: A100 on a; H200 on b; the smallest decides" in text
    assert "GPU drivers differ: 560 on a; 570 on b" in text
    assert "are not on b: they are fetched" in text


def test_ranks_run_beside_their_gpus() -> None:
    plan, looks = two(processors={"allowed": list(range(4)), "quota": None})
    threads, cores, notes = bind(plan, looks)
    low, high = tuple(range(8)), tuple(range(8, 16))
    assert cores == {"a": (low,) * 4 + (high,) * 4}  # b may use one group of processors only
    assert threads == {"a": "2", "b": "1"}
    assert notes[0] == "a: each rank runs on the processors beside its GPU: 2 groups of them"
    assert notes[1] == "a: OMP_NUM_THREADS=2: 8 processors for the 4 GPUs beside them"
    assert notes[2] == "b: OMP_NUM_THREADS=1: 4 processors for 8 ranks"


def test_ranks_are_not_bound_when_asked_not_to_or_when_it_is_not_told() -> None:
    plan, looks = two(gpus=gpus(8, node=None))
    cluster = dataclasses.replace(plan.config.cluster, bind_cores="none")
    free = dataclasses.replace(plan, config=dataclasses.replace(plan.config, cluster=cluster))
    assert bind(free, looks)[1] == {}
    assert set(bind(plan, looks)[1]) == {"a"}
    own = dataclasses.replace(plan, env={"OMP_NUM_THREADS": "3"}, device="cpu")
    assert bind(own, looks) == ({}, {}, [])
    looks["a"]["processors"] = {"allowed": list(range(16)), "quota": 4.0}
    cpu = dataclasses.replace(plan, device="cpu", hosts=plan.hosts[:1])
    assert bind(cpu, looks)[0] == {"a": "1"}


def own(interface: str, address: str, *, physical: bool = True, scope: str = "global") -> dict[str, Any]:
    return {"interface": interface, "address": address, "prefix": 24, "scope": scope, "physical": physical}


def test_likely_addresses_come_first() -> None:
    plan, _ = two()
    there = [
        own("lo", "127.0.0.1", scope="host"),
        own("docker0", "172.17.0.1", physical=False),
        own("eth1", "fd00::1"),
        own("eth0", "10.0.0.1"),
        own("bond0", "10.1.0.1", physical=False),
        own("eth0", "fe80::1", scope="link"),
    ]
    seen = look(addresses=there, ssh_address=["10.2.0.1"])
    found = candidates_of(plan, seen, {"b": {"a": ["127.0.1.1", "fd00::9", "10.3.0.1"]}})
    assert list(found) == ["10.3.0.1", "fd00::9", "10.2.0.1", "10.0.0.1", "fd00::1", "10.1.0.1"]
    assert list(candidates_of(plan, look(addresses=there[:2]), {"b": None})) == ["172.17.0.1"]
    assert list(candidates_of(plan, look(addresses=there[:1]), {"b": None})) == ["127.0.0.1"]
    named = dataclasses.replace(plan, hosts=(dataclasses.replace(plan.hosts[0], address="10.9.0.1"), plan.hosts[1]))
    for way, source in (("ssh", "addr= of the hostfile"), ("env", "MASTER_ADDR")):
        assert candidates_of(dataclasses.replace(named, transport=way), seen, {})["10.9.0.1"] == source


def test_names_of_interfaces_are_read_as_nccl_reads_them() -> None:
    """N05."""
    cases = {"eth": "eth0", "=eth0": "eth0", "^lo,docker": "eth0", "ib0,eth": "eth0", "^=eth1": "eth0"}
    assert all(nccl_fits(value, name) for value, name in cases.items())
    assert not any(nccl_fits(value, "eth0") for value in ("=eth", "^eth", "^=eth0", "ib"))


def test_interface_that_is_not_there_is_refused() -> None:
    plan, _ = two()
    seen = look(addresses=[own("eno1", "10.0.0.2"), own("ib0", "10.1.0.2")])
    host = plan.hosts[1]
    assert choose_interface(plan, host, seen, "eno1") == ("eno1", None)
    assert choose_interface(plan, dataclasses.replace(host, iface="ib0"), seen, "eno1") == ("ib0", None)
    nccl = dataclasses.replace(plan.config.nccl, interface="eth9")
    wide = dataclasses.replace(plan, config=dataclasses.replace(plan.config, nccl=nccl))
    row = choose_interface(wide, host, seen, "eno1")[1]
    assert row is not None and row.reason.startswith("nccl.interface=eth9 is not up there or has no address; there are")
    assert choose_interface(wide, dataclasses.replace(host, iface="ib0"), seen, "eno1") == ("ib0", None)
    typed = dataclasses.replace(plan, env={"NCCL_SOCKET_IFNAME": "ib"})
    assert choose_interface(typed, host, seen, "eno1") == ("ib0", None)
    typed = dataclasses.replace(plan, env={"GLOO_SOCKET_IFNAME": "eth0"})
    row = choose_interface(typed, host, seen, "eno1")[1]
    assert row is not None and row.config
    assert "GLOO_SOCKET_IFNAME=eth0 fits no interface; there are eno1, ib0" in row.reason


def test_few_hosts_call_all_and_many_their_neighbours() -> None:
    assert pairs(["a", "b", "c"]) == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}
    many = pairs([str(n) for n in range(64)])
    assert len(many["0"]) == 63
    assert all(len(callees) <= 3 for host, callees in many.items() if host != "0")
    assert all(any(host in callees for callees in many.values()) for host in many)


TORCH = "import os\nprint(sorted(os.sched_getaffinity(0)), flush=True)\nos._exit(0)\n"


def test_rank_is_on_its_processors_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    last = max(os.sched_getaffinity(0))
    for cores, said, refused in ((last, [last], False), (4000, sorted(os.sched_getaffinity(0)), True)):
        plan = dataclasses.replace(planned(), run_dir=str(tmp_path), cores={"localhost": ((0,), (cores,))})
        (tmp_path / "plan.json").write_text(plan_to_json(plan))
        path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        subprocess.run(
            [sys.executable, "-m", "launcher.training", "train", "--plan", str(tmp_path / "plan.json")],
            env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": path},
            check=True,
        )
        log = next((tmp_path / "logs").iterdir())
        *warned, printed = log.read_text().splitlines()
        log.unlink()
        assert printed == str(said)
        assert any("rank 1 of localhost is not bound to its processors" in line for line in warned) == refused
