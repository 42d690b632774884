"""The verdict over many hosts: who was first, what it means, what to do."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir import RunDir
from launcher.running import causes
from launcher.running.hang import Hang, Stack
from launcher.running.outcome import render_end, write_outcome
from launcher.running.verdict import Tally, Verdict, judge
from launcher.spec import Host

HOSTS = [Host(name="n1", gpus=(0, 1), address="10.7.0.1"), Host(name="n2", gpus=(0, 1), address="10.7.0.2")]
CLOCK = {"n1": 0.0, "n2": 30.0}  # seconds by which a host's clock is ahead
LATENCY_S = 0.02
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.7.0.2]:2341"


class Story:
    """Events of two hosts as the supervisor receives them; times are its own."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        self.tally = Tally.of(self.run, HOSTS, master_addr="10.7.0.1", port=29500)

    def host_of(self, rank: int) -> str:
        return "n1" if rank < 2 else "n2"

    def event(self, host: str, event: str, at: float, **fields: Any) -> None:
        said = {"event": event, "host": host, "time": at + CLOCK[host], "received": at + LATENCY_S, **fields}
        self.tally.add(said)

    def rank(self, rank: int, at: float, *, state: str = "running", **fields: Any) -> None:
        host = self.host_of(rank)
        status = {"rank": rank, "host": host, "state": state, "step": 12, "phase": "training", "time": at + CLOCK[host]}
        self.event(host, "rank", at, rank=rank, status=status | fields)

    def all_train(self) -> Story:
        for rank in range(4):
            self.rank(rank, 1.0)
        return self

    def fails(self, rank: int, at: float, kind: str, message: str, exit_code: int = 4) -> None:
        trace = f"Traceback (most recent call last):\n{kind}: {message}\n"
        error = {"type": kind, "message": message, "traceback": trace, "exit_code": exit_code}
        self.rank(rank, at, state="failed", error=error)
        self.event(self.host_of(rank), "ending", at, why="failure")
        self.dies(rank, at + 0.1, exit_code=exit_code)

    def dies(self, rank: int, at: float, exit_code: int | None = None, number: int | None = None, **more: Any) -> None:
        end = {"rank": rank, "pid": 7, "exit_code": exit_code, "signal": number, "by_us": False, "oom_kills": 0}
        self.event(self.host_of(rank), "rank_exit", at, **(end | more))

    def lost(self, host: str, at: float, seconds: float, reason: str, exit_code: int | None = 255) -> None:
        said = {"host": host, "time": at, "received": at, "seconds": seconds, "reason": reason, "exit_code": exit_code}
        self.tally.add({"event": "lost", **said})

    def end(self) -> tuple[Verdict, str]:
        verdict = judge(self.tally, None)
        return verdict, render_end(self.run, verdict, self.tally, "ndcg@10")


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path).all_train()


def test_the_first_failure_is_found_across_clocks_that_disagree(story: Story) -> None:
    story.fails(3, 100.0, "ValueError", "row 7")  # its host's clock says 130
    story.fails(0, 101.0, "ValueError", "row 9")
    verdict, text = story.end()
    assert [failure.rank for failure in verdict.failures] == [3, 0]
    assert verdict.failures[0].time == pytest.approx(100.0, abs=0.1)
    assert text.startswith("rank 3 on n2 failed: ValueError: row 7\n")
    assert (verdict.status, verdict.exit_code) == ("failed", 4)


def test_an_echo_is_never_first_while_there_is_a_cause(story: Story) -> None:
    story.fails(0, 99.0, "RuntimeError", GLOO)
    story.fails(1, 99.1, "DistBackendError", "NCCL error in: x.cpp:1, remote process exited")
    story.fails(3, 99.5, "KeyError", "'label'")
    verdict, _ = story.end()
    assert [failure.rank for failure in verdict.failures] == [3, 0, 1]


def test_echoes_alone_are_the_network(story: Story) -> None:
    story.fails(1, 99.0, "RuntimeError", GLOO)
    verdict, text = story.end()
    assert verdict.exit_code == 75
    assert verdict.failures[0].cause.name == "network"
    assert "  try     the same again: the connection between ranks broke" in text


def test_a_killed_rank_is_the_cause_of_what_the_others_say(story: Story) -> None:
    story.fails(0, 50.0, "RuntimeError", GLOO)
    story.dies(2, 50.2, number=signal.SIGKILL, oom_kills=1)
    verdict, text = story.end()
    assert verdict.exit_code == 4  # not 137: the launcher's own codes say who must act
    assert text.startswith(
        "rank 2 on n2 died of SIGKILL: killed, most likely by the kernel for lack of host memory "
        "(the kernel counted 1 out-of-memory kills in this control group meanwhile)\n"
    )
    assert "  try     dmesg -T | grep -i oom   (on n2)" in text


def test_a_host_that_was_lost_is_named_with_the_reason(story: Story) -> None:
    story.fails(0, 70.0, "RuntimeError", GLOO)  # the ranks notice before the supervisor gives up
    story.lost("n2", 185.0, 120.0, "ssh: connect to host n2 port 22: No route to host")
    verdict, text = story.end()
    assert verdict.exit_code == 75
    first = verdict.failures[0]
    assert (first.host, first.rank, first.cause.name) == ("n2", None, "lost_host")
    reason = "contact with n2 was lost for 120 s (ssh: connect to host n2 port 22: No route to host)"
    assert text.startswith(f"{reason}\n")
    assert len(verdict.failures) == 2  # its ranks, of which nothing is known, are not listed


def test_an_agent_that_was_killed_is_told(tmp_path: Path) -> None:
    story = Story(tmp_path).all_train()
    story.lost("n1", 60.0, 0.0, "", exit_code=-9)
    verdict, text = story.end()
    assert text.startswith("the agent on n1 died of SIGKILL: killed, most likely by the kernel")
    assert (verdict.exit_code, verdict.failures[0].signal) == (4, 9)


def test_an_agent_that_is_not_there_any_more_is_no_lost_connection(story: Story) -> None:
    gone = {"agent_gone": True, "exit_code": None, "reason": "its agent is gone: Connection refused", "seconds": 1.0}
    story.tally.add({"event": "lost", "host": "n2", "time": 60.0, "received": 60.0, **gone})
    verdict, text = story.end()
    assert text.startswith("the agent on n2 is gone, and its ranks with it")
    assert verdict.exit_code == 75 and "lost_contact_s" not in text


def test_hosts_that_stop_because_nobody_spoke_to_them_are_no_stop_that_was_asked_for(story: Story) -> None:
    for host, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        story.event(host, "ending", 200.0, why="stop", unheard_s=120.0)
        for rank in ranks:
            story.rank(rank, 201.0, state="stopped")
            story.dies(rank, 202.0, exit_code=0)
    verdict, text = story.end()
    assert verdict.exit_code == 75
    assert text.startswith("n1 had no word from the launcher for 120 s, and stopped its ranks")


def test_a_node_launcher_that_died_takes_its_own_ranks_only(story: Story) -> None:
    story.dies(2, 80.0, number=signal.SIGKILL)
    story.event("n2", "ending", 80.0, why="failure")
    story.event("n2", "launcher_exit", 80.1, exit_code=None, signal=signal.SIGKILL, by_us=False)
    story.dies(0, 90.0, number=signal.SIGSEGV)
    verdict, text = story.end()
    assert [(failure.host, failure.rank) for failure in verdict.failures] == [("n2", None), ("n1", 0)]
    assert text.startswith("DeepSpeed's node launcher on n2 died of SIGKILL")


def test_what_we_ended_is_no_failure(story: Story) -> None:
    story.fails(3, 100.0, "ValueError", "row 7")
    story.event("n1", "ending", 100.1, why="failure")
    for rank in (0, 1):
        story.dies(rank, 101.0, number=signal.SIGTERM, by_us=True)
    story.event("n1", "launcher_exit", 102.0, exit_code=241, signal=None, by_us=False)  # passes that SIGTERM on
    story.event("n2", "launcher_exit", 102.0, exit_code=4, signal=None, by_us=False)
    verdict, _ = story.end()
    assert [failure.rank for failure in verdict.failures] == [3]


def test_a_node_launcher_that_cannot_start_is_its_machine(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.run.logs.mkdir()
    story.run.node_log("n2").write_text("/opt/x/python: No module named deepspeed\n")
    story.rank(0, 1.0)
    story.event("n2", "launcher_exit", 2.0, exit_code=1, signal=None, by_us=False)
    story.event("n2", "ending", 2.0, why="failure")
    verdict, text = story.end()
    assert verdict.exit_code == 3
    assert text.startswith("DeepSpeed's node launcher on n2 left with exit code 1 before a rank had started\n")
    assert "No module named deepspeed" in text
    assert "python -m launcher env   (on n2 too" in text


def test_a_rank_that_never_reported_has_the_host_of_the_plan(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for rank in (0, 1, 2):
        story.rank(rank, 1.0, state="done")
    verdict, text = story.end()
    assert text.startswith("rank 3 on n2 left with exit code unknown")
    assert verdict.failures[0].log == str(story.run.node_log("n2"))


def test_a_rank_that_left_early_is_told_from_its_step(story: Story) -> None:
    story.dies(1, 60.0, exit_code=0)
    _, text = story.end()
    assert text.startswith("rank 1 on n1 left with exit code 0 at step 12, before the run was finished\n")


def test_what_is_said_again_after_a_lost_connection_counts_once(story: Story) -> None:
    story.dies(3, 60.0, number=signal.SIGBUS, shm_free=2**20)
    story.fails(0, 61.0, "ValueError", "row 7")
    for at in (60.5, 70.0):  # an agent that was attached to anew
        story.dies(3, at, number=signal.SIGBUS, shm_free=2**20)
        story.event("n2", "done", at, survivors=[77])
    verdict, text = story.end()
    assert [failure.rank for failure in verdict.failures] == [3, 0]
    assert "(0.00 GiB were free in /dev/shm after it)" in text.splitlines()[0]
    assert "docker run --shm-size=16g, or --ipc=host" in text
    assert story.tally.survivors == [77]


def test_a_hang_is_told_with_the_frames_of_the_guilty_one(story: Story) -> None:
    frames = 'Current thread 0x1 (most recent call first):\n  File "/v/launcher/training/images.py", line 9 in open\n'
    status = story.tally.statuses[2]
    hang = Hang(rank=2, host="n2", why="is behind", silent_s=600, status=status, stacks={2: Stack("S", frames)})
    story.tally.note_hang(hang, 700.0)
    story.fails(0, 701.0, "RuntimeError", GLOO)
    verdict, text = story.end()
    assert (verdict.exit_code, verdict.failures[0].time) == (75, 100.0)
    head, frame, where, *_ = text.splitlines()
    assert head == "no sign of progress for 600 s: rank 2 on n2 is behind, last at step 12 in training"
    assert frame.strip() == 'File "/v/launcher/training/images.py", line 9 in open'
    assert where.strip() == f"the stacks of all ranks are in {story.run.path}/stacks.txt"


def test_ranks_that_cannot_meet_name_both_hosts(tmp_path: Path) -> None:
    story = Story(tmp_path)
    message = "The client socket has timed out after 60000ms while trying to connect to (10.7.0.1, 29500)."
    story.fails(2, 60.0, "DistNetworkError", message)
    verdict, text = story.end()
    assert verdict.exit_code == 75
    assert text.startswith("rank 2 on n2 cannot reach n1 (10.7.0.1, port 29500): DistNetworkError: The client socket")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    story = Story(tmp_path)
    message = (
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, "
        "code: -98, name: EADDRINUSE, message: address already in use"
    )
    story.fails(0, 5.0, "DistNetworkError", message)
    story.fails(2, 4.0, "DistNetworkError", "The client socket has timed out after 60000ms (10.7.0.1, 29500)")
    verdict, text = story.end()
    assert (verdict.exit_code, verdict.failures[0].cause.name) == (75, "port_taken")
    assert "(port 29500 on n1 is in use: a free one is chosen)" in text


def test_outcome_says_who_why_and_what_to_do(story: Story) -> None:
    story.dies(2, 50.2, number=signal.SIGSEGV)
    verdict, _ = story.end()
    write_outcome(story.run, verdict, story.tally, started=0.0, ended=60.0, metric="ndcg@10", attempt=2)
    outcome = json.loads(story.run.outcome.read_text())
    assert (outcome["attempt"], outcome["hosts"], outcome["exit_code"]) == (2, ["n1", "n2"], 4)
    first = outcome["first_failure"]
    told = {key: first[key] for key in ("host", "rank", "signal", "signal_name", "exit_code", "cause")}
    assert told == {
        "host": "n2",
        "rank": 2,
        "signal": 11,
        "signal_name": "SIGSEGV",
        "exit_code": None,
        "cause": "segfault",
    }
    assert first["advice"] == "the stack at the end of its log; python -m launcher env   (on n2)"
    assert first["log"] == str(story.run.log("n2", 2))


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (247, "left with exit code 247, which stands for SIGKILL: killed"),
        (245, "left with exit code 245, which stands for SIGSEGV: segmentation fault"),
        (250, "left with exit code 250, which stands for SIGABRT: aborted"),
        (137, "left with exit code 137, which stands for SIGKILL"),
        (143, "left with exit code 143, which stands for SIGTERM"),
        (127, "left with exit code 127\n"),
        (1, "left with exit code 1\n"),
    ],
)
def test_exit_codes_are_decoded(story: Story, exit_code: int, text: str) -> None:
    story.dies(2, 50.0, exit_code=exit_code)
    assert f"rank 2 on n2 {text}" in story.end()[1]


@pytest.mark.parametrize(
    ("kind", "message", "name"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", "gpu_memory"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "host_memory"),
        ("MemoryError", "", "host_memory"),
        ("ModuleNotFoundError", "No module named 'peft'", "import_error"),
        ("ImportError", "libcudart.so.12: cannot open shared object file: No such file", "import_error"),
        ("RuntimeError", "unable to write to file </torch_123_4>: No space left on device (28)", "shared_memory"),
        ("OSError", "[Errno 28] No space left on device: 'runs/x'", "disk_full"),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "gpu_fault"),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "gpu_fault"),
        ("RuntimeError", "NCCL communicator was aborted on rank 1.", "network"),
        ("DistBackendError", "ncclRemoteError: A call failed possibly due to a network error", "network"),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", "network"),
        ("DistStoreError", "wait timeout after 1800000ms, keys: /default_pg/0//cuda//0", "network"),
        (
            "ConnectionError",
            "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
            "exception",
        ),
        ("ReadTimeout", "HTTPSConnectionPool(host='huggingface.co'): Read timed out.", "exception"),
        ("RuntimeError", "x is not finite: training has diverged, and its state is not worth saving", "diverged"),
        ("ValueError", "row 7 has no positive document", "exception"),
        ("DistStoreError", "Timed out after 4 seconds waiting for clients. 1/2 clients joined.", "rendezvous"),
        ("RuntimeError", "Gloo connectFullMesh failed with [pair.cc:144] no error", "rendezvous"),
        ("RuntimeError", "[gloo/transport/tcp/device.cc:83] connect [10.7.0.2]:4242: No route to host", "rendezvous"),
    ],
)
def test_errors_have_their_cause(kind: str, message: str, name: str) -> None:
    assert causes.of_error(kind, message, 4).name == name


def test_native_deaths_are_told_from_echoes_by_their_log() -> None:
    log = "[rank1]:[E] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7\nterminate called"
    assert causes.of_death(None, signal.SIGABRT, log).echo
    assert causes.of_death(None, signal.SIGABRT, "free(): invalid pointer").name == "aborted"
    assert causes.of_death(None, signal.SIGKILL, log).name == "host_memory"  # the log is of before
    assert causes.of_death(1, None, "ImportError: libmpi.so").name == "import_error"
