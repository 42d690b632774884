"""Launchers that are started on every node by something else: they find each other and behave as one run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.planning.joining import join_lines, settled
from launcher.rundir import RunDir
from launcher.running import hello
from launcher.running.agent import processes, read_environment
from launcher.running.hello import Hello
from launcher.running.nodechannel import NodeChannel
from launcher.running.ownhost import OwnHost, node_order
from launcher.spec import RunPlan
from tests.planning_support import plan as make_plan
from tests.running_support import command_of, wait_until

PROGRAM = str(Path(__file__).parent / "processes" / "meet.py")
LEADER = "127.0.5.1"
ENVIRON = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "DS_ACCELERATOR": "cpu"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LEADER, 0))
        return int(probe.getsockname()[1])


class Job:
    """The launchers of one job, each a process; all of them end with the test."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root, self.nodes, self.port = root, nodes, free_port()
        self.mark = f"job-{self.port}-{os.getpid()}"
        self.launchers: list[subprocess.Popen[str]] = []

    def start(
        self,
        node_rank: int,
        *deeds: str,
        words: str = "",
        seconds: float = 30,
        at: tuple[str, int] | None = None,
        before: tuple[str, ...] = (),
        **environ: str,
    ) -> subprocess.Popen[str]:
        address, port = at or (LEADER, self.port)
        env = {**os.environ, "NNODES": str(self.nodes), "NODE_RANK": str(node_rank), "DS_ACCELERATOR": "cpu"}
        env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TEST_JOB": self.mark, **environ}
        argv = [*before, sys.executable, PROGRAM, str(self.root), str(seconds), "gpus=1", *words.split(), "--", *deeds]
        pipe = subprocess.PIPE
        launcher = subprocess.Popen(argv, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self.launchers.append(launcher)
        return launcher

    def start_all(self, *deeds: str, **options: Any) -> list[subprocess.Popen[str]]:
        return [self.start(node_rank, *deeds, **options) for node_rank in range(self.nodes)]

    @property
    def run(self) -> RunDir:
        return RunDir(next(self.root.glob("2026*")))

    def training(self, ranks: int) -> dict[int, dict[str, Any]]:
        """Wait until ranks have taken some steps; their states."""
        found: dict[int, dict[str, Any]] = {}

        def look() -> bool:
            for path in self.root.glob("2026*/ranks/[0-9].json"):
                status = json.loads(path.read_text())
                if status["state"] == "running" and status["step"] > 3:
                    found[status["rank"]] = status
            assert all(launcher.poll() is None for launcher in self.launchers)
            return len(found) == ranks

        wait_until(look, 60, f"{ranks} ranks train")
        return found

    def ends(self, timeout_s: float = 40) -> tuple[list[int], list[str]]:
        """Exit codes and texts of all launchers; nothing of the job may be left."""
        texts = [launcher.communicate(timeout=timeout_s)[0] for launcher in self.launchers]
        wait_until(lambda: not self.left(), 10, "nothing of the job is left")
        return [launcher.returncode for launcher in self.launchers], texts

    def left(self) -> dict[int, bytes]:
        """Processes of the job, and their commands."""
        found = [p.pid for p in processes() if not p.ended and read_environment(p.pid).get("TEST_JOB") == self.mark]
        return {pid: command_of(pid)[:300] for pid in found}


@pytest.fixture
def job(runs: Path) -> Iterator[Job]:
    made = Job(runs, 2)
    try:
        yield made
    finally:
        for launcher in made.launchers:
            launcher.kill()
            launcher.communicate()
        for pid in made.left():
            os.kill(pid, signal.SIGKILL)


def test_two_nodes_are_one_run(job: Job) -> None:
    """T18: no ssh is needed."""
    job.start_all("steps=20")
    codes, (leader, follower) = job.ends()
    assert codes == [0, 0], leader + follower
    assert "node rank 1 of 2: follows node rank 0" in follower
    assert f"run     {job.run.path}: rank 1 is started here" in follower
    assert follower.splitlines()[-1] == "node rank 0 says: 0"
    assert json.loads(job.run.outcome.read_text())["status"] == "done"
    assert {path.name for path in job.run.logs.glob("*.log")} >= {"node0.0.log", "node1.1.log"}


def test_a_failure_on_one_of_three_nodes_ends_all_with_its_verdict(job: Job) -> None:
    job.nodes = 3
    job.start_all("2:raise")
    started = time.monotonic()
    codes, texts = job.ends()
    assert codes == [4, 4, 4], texts
    assert "rank 2 on node2 failed: ValueError: row 7" in texts[0]
    assert time.monotonic() - started < 20


def test_a_run_folder_that_is_not_shared_is_brought_together(job: Job) -> None:
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    job.start(0, "steps=20")
    own = f'mount -t tmpfs none {shlex.quote(str(job.root))} && exec "$@"'
    job.start(1, "steps=20", before=("unshare", "--mount", "sh", "-c", own, "sh"))
    codes, texts = job.ends()
    assert codes == [0, 0], texts
    assert "rank 1 is here" in job.run.log("node1", 1).read_text()
    assert json.loads(job.run.rank(1).read_text())["state"] == "done"


def test_who_never_reports_is_named_on_every_node(job: Job) -> None:
    job.nodes = 3
    job.start(0, seconds=3)
    job.start(2)
    codes, texts = job.ends()
    assert codes == [3, 3], texts
    for text in texts:
        assert "node rank 1 (node1) never reported" in text
        assert "node rank 2" not in text.replace("node rank 2 of 3: follows", "")


def test_a_follower_that_finds_no_leader_says_where_it_looked(job: Job) -> None:
    job.start(1, seconds=2)
    codes, (text,) = job.ends()
    assert codes == [3]
    assert f"no launcher was found at {LEADER}:{job.port}" in text


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"node_rank": 1, "words": "train.seed=7"}, "train.seed: 42, there 7"),
        ({"node_rank": 1, "NNODES": "3"}, "has been told of 3 nodes, and node rank 0 of 2"),
        ({"node_rank": 0}, "says that it is node rank 0"),
    ],
)
def test_launchers_that_do_not_fit_together_all_say_why(job: Job, second: dict[str, Any], said: str) -> None:
    first = job.start(0)
    await_listener(job, first)
    job.start(**second)
    codes, texts = job.ends()
    assert codes == [2, 2], texts
    assert all(said in text for text in texts), texts


def test_a_second_start_of_a_node_is_an_error_everywhere(job: Job) -> None:
    """T20: on the nodes' own rendezvous."""
    job.nodes = 3
    job.start(0)
    first = job.start(1)
    assert "follows node rank 0" in read_line(first)
    job.start(1)
    codes, texts = job.ends()
    assert codes == [2, 2, 2], texts
    assert all("two launchers say that they are node rank 1" in text for text in texts), texts


def test_a_second_start_does_not_harm_a_run_that_has_begun(job: Job) -> None:
    leader, _ = job.start_all()
    before = job.training(2)
    for again in [job.start(node_rank) for node_rank in (0, 1)]:
        text, _ = again.communicate(timeout=30)
        assert again.returncode == 2
        assert "node rank 0 has begun" in text
        job.launchers.remove(again)

    def goes_on() -> bool:
        after = job.training(2)
        return all(after[rank]["step"] > before[rank]["step"] for rank in (0, 1))

    wait_until(goes_on, 10, "both ranks take further steps")  # of which not each is written down
    leader.send_signal(signal.SIGINT)
    codes, texts = job.ends()
    assert codes == [130, 130], texts
    assert json.loads(job.run.outcome.read_text())["status"] == "stopped"


def test_strangers_at_the_port_are_sent_away(job: Job) -> None:
    leader = job.start(0, "steps=20")
    await_listener(job, leader)
    where = (LEADER, job.port)
    silent = [socket.create_connection(where) for _ in range(3)]
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 300_000, b"[]\n", b"{" * 100_000 + b"\n", b'{"version": 1}\n'):
        with socket.create_connection(where) as line:
            line.sendall(said)
            line.settimeout(20)
            while line.recv(65536):  # until it is ended from there
                pass
    job.start(1, "steps=20")
    codes, texts = job.ends()
    assert codes == [0, 0], texts
    assert f"a connection from {LEADER.rsplit('.', 2)[0]}" in texts[0] or "none of a node of this run" in texts[0]
    for line in silent:
        line.close()


def test_a_secret_of_the_job_keeps_others_out(job: Job) -> None:
    leader = job.start(0, "steps=20", LAUNCHER_JOB_TOKEN="s3cret-of-the-job")
    await_listener(job, leader)
    for other in [job.start(1, "steps=20", **token) for token in ({}, {"LAUNCHER_JOB_TOKEN": "another"})]:
        text, _ = other.communicate(timeout=30)
        assert other.returncode == 2
        assert "LAUNCHER_JOB_TOKEN" in text
        job.launchers.remove(other)
    job.start(1, "steps=20", LAUNCHER_JOB_TOKEN="s3cret-of-the-job")
    codes, texts = job.ends()
    assert codes == [0, 0], texts
    assert not any("s3cret" in text for text in texts)
    assert not any("s3cret" in path.read_text(errors="replace") for path in job.run.path.rglob("*") if path.is_file())


class Proxy:
    """Stands between a follower and the leader; `cut` ends every connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.5.2", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        ended, self._open = self._open, []
        for line in ended:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    @staticmethod
    def _pass(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_connection_that_is_cut_comes_back_and_nothing_is_lost(job: Job) -> None:
    leader = job.start(0, "steps=90")
    await_listener(job, leader)
    proxy = Proxy((LEADER, job.port))
    job.start(1, "steps=90", at=proxy.address)
    job.training(2)
    for _ in range(3):
        proxy.cut()
        time.sleep(0.8)
    codes, texts = job.ends()
    proxy.close()
    assert codes == [0, 0], texts
    assert texts[1].count("contact with node rank 0 is back") == 3
    assert json.loads(job.run.outcome.read_text())["status"] == "done"


def test_a_follower_that_is_killed_is_named_and_leaves_nothing(job: Job) -> None:
    _, follower = job.start_all(words="cluster.lost_contact_s=3")
    job.training(2)
    follower.kill()
    codes, texts = job.ends()
    assert codes == [75, -signal.SIGKILL], texts
    assert "contact with node1 was lost" in texts[0]


def test_a_leader_that_is_killed_ends_its_followers(job: Job) -> None:
    leader, _ = job.start_all()
    job.training(2)
    leader.kill()
    started = time.monotonic()
    codes, texts = job.ends()
    assert codes == [-signal.SIGKILL, 75], texts
    assert "node rank 0 is gone" in texts[1]
    assert time.monotonic() - started < 15


def test_ctrl_c_on_a_follower_stops_the_run_and_saves(job: Job) -> None:
    _, follower = job.start_all()
    job.training(2)
    follower.send_signal(signal.SIGINT)
    codes, texts = job.ends()
    assert codes == [130, 130], texts
    assert "SIGINT: node rank 0 is asked to stop the run" in texts[1]
    assert list(job.run.checkpoints.glob("step-*/COMPLETE"))


def test_a_second_ctrl_c_on_a_follower_ends_the_run_at_once(job: Job) -> None:
    _, follower = job.start_all("0:deaf", "1:deaf")
    job.training(2)
    follower.send_signal(signal.SIGINT)
    assert "asked to stop" in read_until(follower, "asked to stop")
    started = time.monotonic()
    follower.send_signal(signal.SIGINT)
    codes, texts = job.ends()
    assert codes == [130, 130], texts
    assert time.monotonic() - started < 15


def test_sigterm_on_all_nodes_at_once_is_one_request(job: Job) -> None:
    launchers = job.start_all()
    job.training(2)
    for launcher in reversed(launchers):
        launcher.send_signal(signal.SIGTERM)
    codes, texts = job.ends()
    assert codes == [143, 143], texts
    assert json.loads(job.run.outcome.read_text())["status"] == "stopped"
    assert "ending at once" not in texts[0]


def test_ctrl_c_while_nodes_are_awaited_ends_all(job: Job) -> None:
    job.nodes = 3
    leader, follower = job.start(0), job.start(1)
    read_until(follower, "follows node rank 0")
    leader.send_signal(signal.SIGINT)
    codes, texts = job.ends()
    assert codes == [130, 130], texts


def await_listener(job: Job, leader: subprocess.Popen[str]) -> None:
    assert "awaited at" in read_line(leader)


def read_line(launcher: subprocess.Popen[str]) -> str:
    assert launcher.stdout is not None
    return launcher.stdout.readline()


def read_until(launcher: subprocess.Popen[str], words: str) -> str:
    while words not in (line := read_line(launcher)):
        assert line, f"no {words}"
    return line


def follower_plan(*words: str, **environ: str) -> RunPlan:
    return make_plan("cluster.transport=env", "gpus=1", *words, environ={**ENVIRON, **environ})


def said(plan: RunPlan, **changed: Any) -> dict[str, Any]:
    """What a leader says of its finished plan."""
    own = {"run_id": "20260102-030405-abcdef", "run_dir": plan.run_dir, "created_at": plan.created_at}
    own |= {"master_addr": "10.0.0.1", "master_port": 23456, "resume_from": None, "cores": [[0, 1]]}
    return {**own, "host_env": {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4"}, **changed}


def test_a_follower_takes_over_what_only_the_leader_knows() -> None:
    plan = follower_plan()
    whole = settled(plan, said(plan, run_dir=f"{Path(plan.run_dir).parent}/another"), 1)
    assert (whole.run_id, whole.master_port, whole.run_dir) == (
        "20260102-030405-abcdef",
        23456,
        "/home/me/runs/another",
    )
    assert whole.host_env == {"node1": {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4"}}
    assert whole.cores == {"node1": ((0, 1),)}
    assert "--master_port=23456" in node_order(whole, 1).argv
    assert "/home/me/runs/another/plan.json" in whole.commands["node1"]
    own = f"{plan.run_dir}/checkpoints/step-000040"
    assert settled(plan, said(plan, run_id="20260102-030405-abcdef.1", resume_from=own), 1).resume_from == own


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"run_dir": "/etc/cron.d/x"}, ConfigError),
        ({"run_dir": "/home/me/runs/../../x"}, ValueError),
        ({"run_dir": "runs/x"}, ValueError),
        ({"run_id": "a b"}, ValueError),
        ({"run_id": 7}, ValueError),
        ({"master_port": 0}, ValueError),
        ({"master_port": True}, ValueError),
        ({"master_addr": "-x; id"}, ValueError),
        ({"host_env": {"LD_PRELOAD": "/tmp/x.so"}}, ValueError),
        ({"host_env": {"NCCL_NET_PLUGIN": "/tmp/x.so"}}, ValueError),
        ({"host_env": {"GLOO_SOCKET_IFNAME": 1}}, ValueError),
        ({"host_env": [1]}, ValueError),
        ({"cores": [["0"]]}, ValueError),
        ({"resume_from": "/tmp/checkpoints/step-1"}, ValueError),
        ({"resume_from": "../checkpoints/step-1"}, ValueError),
    ],
)
def test_a_follower_takes_nothing_else(changed: dict[str, Any], error: type[Exception]) -> None:
    plan = follower_plan()
    with pytest.raises(error):
        settled(plan, said(plan, **changed), 1)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("agent", {"do": "attach", "socket": "/tmp/x"}),
        ("agent", {"run_id": "x", "argv": ["id"], "env": {}}),
        ("carry", {"do": "unpack", "root": "/home/other/.ssh"}),
        ("carry", {"do": "remove", "root": "/", "paths": ["etc/passwd"]}),
        ("carry", {"do": "unmark", "root": "/etc", "name": "passwd"}),
        ("carry", {"do": "record", "root": "/", "paths": [], "manifest": "/etc/passwd"}),
        ("probe", {"do": "run"}),
        ("fabric_probe", {"do": "look"}),
    ],
)
def test_a_leader_can_have_nothing_written_or_run(program: str, message: dict[str, Any]) -> None:
    own = OwnHost(follower_plan(), 1, lambda event: None, node_order)
    try:
        own.start(program)
        with pytest.raises(ValueError, match="for agent|for carry|for (fabric_)?probe|a mark"):
            own.tell(message)
        with pytest.raises(ValueError, match="a start of"):
            own.start("../../tmp/x")
    finally:
        own.leave()


def test_a_nodes_libraries_are_those_that_its_own_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    leader = NodeChannel("node1", queue.Queue(), told.append)
    leader.send(
        {"do": "fabric", "cwd": "/leader", "path": ["/leader"], "env": {"LD_PRELOAD": "/x"}, "names": ["NCCL_X"]}
    )
    own = OwnHost(follower_plan("env.set.LD_LIBRARY_PATH=/opt/own"), 1, lambda event: None, node_order)
    try:
        own.start("fabric_probe")
        monkeypatch.setattr(own._channel, "send", told.append)
        own.tell(told[0]["tell"])
    finally:
        own.leave()
        leader.close()
    assert "/x" not in str(told[0]) and told[1]["names"] == ["NCCL_X"]
    assert (told[1]["env"], told[1]["cwd"]) == ({"LD_LIBRARY_PATH": "/opt/own"}, os.getcwd())


def test_secrets_are_none_of_what_launchers_tell_each_other() -> None:
    plan = follower_plan("env.set.HF_TOKEN=hf_secret", "env.set.NCCL_DEBUG=INFO")
    assert plan.env["HF_TOKEN"] == "hf_secret"
    assert "hf_secret" not in json.dumps(hello.common(plan))
    assert hello.common(plan)["env.set.NCCL_DEBUG"] == '"INFO"'
    assert hello.common(plan) == hello.common(follower_plan("env.set.HF_TOKEN=hf_other", "env.set.NCCL_DEBUG=INFO"))


def test_what_lies_elsewhere_on_a_node_is_no_difference() -> None:
    plan = follower_plan()
    other = follower_plan("run.root=/scratch", "cluster.python=/opt/python")
    assert hello.common(plan) == hello.common(other)
    manual = make_plan("cluster.transport=manual", "nodes=2", "gpus=1", environ={"DS_ACCELERATOR": "cpu"})
    assert hello.common(manual)["ranks on node1"] == "1"
    assert hello.common(manual) == hello.common(follower_plan("nodes=2"))


def test_a_proof_is_for_one_message_and_one_nonce() -> None:
    message = {"node_rank": 1, "nonce": "n"}
    message["proof"] = hello.prove("token", "follower", "abc", message)
    assert hello.is_proven("token", "follower", "abc", message)
    assert not hello.is_proven("token", "leader", "abc", message)
    assert not hello.is_proven("token", "follower", "abd", message)
    assert not hello.is_proven("token", "follower", "abc", {**message, "node_rank": 2})
    assert not hello.is_proven("other", "follower", "abc", message)
    assert not hello.is_proven("token", "follower", "abc", {"node_rank": 1})


@pytest.mark.parametrize("data", [None, [], {}, {"version": 1}, {"node_rank": True}])
def test_a_malformed_hello_is_none(data: Any) -> None:
    with pytest.raises(ValueError, match="no hello"):
        hello.read_hello(data)


def test_a_hello_survives_the_way() -> None:
    mine = Hello(version="1", node_rank=1, nodes=2, machine="a", process="p", heard=3, common={"a": "1"})
    assert hello.read_hello(hello.decode(hello.encode(dataclasses.asdict(mine)))) == mine


def test_the_line_for_a_node_means_the_same_in_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a b;$c"
    folder.mkdir()
    environ = {"DS_ACCELERATOR": "cpu", "NCCL_DEBUG": "IN'FO $x", "WANDB_API_KEY": "k3y"}
    words = ("cluster.transport=manual", "nodes=3", "gpus=1", "env.set.MY_TOKEN=t0ken", "env.set.A=b $(id)")
    plan = make_plan(*words, environ=environ)
    lines, secret = join_lines(plan, words, address="10.0.0.1", port=23456, cwd=str(folder), python="/usr/bin/python3")
    assert secret == ["MY_TOKEN", "WANDB_API_KEY"]
    assert len(lines) == 2
    assert "t0ken" not in "".join(lines)
    assert "k3y" not in "".join(lines)
    show = "import json,os,sys; print(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]))"
    line = lines[1].replace("/usr/bin/python3 -m launcher", f"{sys.executable} -c {shlex.quote(show)}")
    cwd, argv, env = json.loads(subprocess.check_output(["sh", "-c", line], text=True))
    assert cwd == str(folder)
    assert argv == ["nodes=3", "gpus=1", "env.set.A=b $(id)", "cluster.transport=env"]
    assert env["NCCL_DEBUG"] == "IN'FO $x"
    meet = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [env[name] for name in meet] == ["3", "2", "10.0.0.1", "23456"]
