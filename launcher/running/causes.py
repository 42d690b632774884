"""Why ranks fail: what an exception, a signal or an exit code means, whether it is an echo, and what to do about it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from launcher.errors import ExitCode, TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A class of failures."""

    name: str
    advice: str = ""  # one line; {host} is where it happened, {port} where ranks meet
    code: ExitCode = ExitCode.TRAINING
    retry: bool = True  # whether the same again may go well
    echo: bool = False  # whether it is what a rank says when another one has left it


_ALL = (
    Cause(name="config", code=ExitCode.CONFIG, retry=False),
    Cause(name="machine", code=ExitCode.MACHINE, retry=False),
    Cause(name="training", retry=False),
    Cause(name="exception"),
    Cause(name="left_early", advice="the end of its log: something in that process has ended it", retry=False),
    Cause(name="exit_code"),
    Cause(
        name="port_taken",
        advice="cluster.master_port=null   (port {port} on {host} is in use: a free one is chosen)",
        code=ExitCode.RETRY,
    ),
    Cause(
        name="rendezvous",
        advice="cluster.master_addr=ADDRESS that all hosts reach; a firewall between them; iface= in the hostfile",
        code=ExitCode.RETRY,
        echo=True,
    ),
    Cause(
        name="network",
        advice="the same again: the connection between ranks broke, and no rank says why (dmesg -T on the hosts)",
        code=ExitCode.RETRY,
        echo=True,
    ),
    Cause(
        name="gpu_memory",
        advice="batch.max_tokens=LESS, memory.gradient_checkpointing=all or zero=stage3",
    ),
    Cause(
        name="gpu_fault",
        advice="dmesg -T | grep -i xid   (on {host}); cluster.exclude={host} leaves it out",
    ),
    Cause(
        name="host_memory",
        advice="dmesg -T | grep -i oom   (on {host}); fewer GPUs there, more memory, or zero=... without offload",
    ),
    Cause(
        name="shared_memory",
        advice="df -h /dev/shm   (on {host}); in a container: docker run --shm-size=16g, or --ipc=host",
    ),
    Cause(
        name="disk_full",
        advice="run.root=FOLDER on a larger disk, or checkpoint.keep_last=1",
        code=ExitCode.MACHINE,
        retry=False,
    ),
    Cause(
        name="import_error",
        advice="python -m launcher env   (on {host} too: packages there differ, or one is missing)",
        retry=False,
    ),
    Cause(
        name="not_executable",
        advice="cluster.python=PATH of an interpreter on {host}",
        code=ExitCode.MACHINE,
        retry=False,
    ),
    Cause(name="diverged", advice="optim.lr=LOWER", retry=False),
    Cause(name="segfault", advice="the stack at the end of its log; python -m launcher env   (on {host})"),
    Cause(name="aborted", advice="the end of its log: native code says why it gave up"),
    Cause(name="terminated", advice="who sends SIGTERM there: a scheduler's time limit, systemd, or a person"),
    Cause(name="signal"),
    Cause(name="agent", advice="dmesg -T | grep -i oom   (on {host})"),
    Cause(name="agent_gone", advice="ssh {host} 'uptime; dmesg -T | grep -i oom'", code=ExitCode.RETRY),
    Cause(
        name="lost_host",
        advice="ssh {host} uptime; cluster.lost_contact_s=SECONDS gives a host longer",
        code=ExitCode.RETRY,
    ),
    Cause(name="hang", code=ExitCode.RETRY),
)
CAUSES = {cause.name: cause for cause in _ALL}

SIGNAL_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "killed, most likely by the kernel for lack of host memory",
    signal.SIGSEGV: "segmentation fault in native code",
    signal.SIGBUS: "bus error, often a full /dev/shm or disk",
    signal.SIGABRT: "aborted by native code",
    signal.SIGTERM: "ended by somebody else",
}
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "host_memory",
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "shared_memory",
    signal.SIGABRT: "aborted",
    signal.SIGTERM: "terminated",
}
# "Type: message" of an exception, or the end of a log; the first pattern that fits.
_TEXTS = (
    # NCCL warns so when RAS, which nothing here asks, finds its port taken by another user's job, and goes on.
    ("port_taken", r"EADDRINUSE|(?<!Call to bind failed: )address already in use"),
    (
        "gpu_memory",
        r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    (
        "shared_memory",
        r"/dev/shm|unable to (?:open|write|mmap|resize) .*(?:shared memory|</?torch_)|insufficient shared m",
    ),
    ("disk_full", r"No space left on device|Disk quota exceeded"),
    ("host_memory", r"^MemoryError|DefaultCPUAllocator|Cannot allocate memory|std::bad_alloc"),
    ("import_error", r"^(?:ImportError|ModuleNotFoundError)\b|No module named|cannot open shared object file"),
    ("diverged", r"is not finite: training has diverged"),
    (
        "rendezvous",
        r"client socket has (?:timed out|failed)|connectFullMesh|waiting for clients"
        r"|(?:RuntimeError|Dist\w+Error|gloo|c10d|NCCL).*connect.{0,60}"
        r"(?:timed out|refused|No route to host|unreachable)",
    ),
    (
        "network",
        r"^Dist\w+Error|NCCL error|nccl(?:Remote|System|Internal|UnhandledCuda)Error|NCCL communicator was aborted"
        r"|\[Rank \d+\].*[Ww]atchdog|watchdog (?:got stuck|thread)|HeartbeatMonitor|[Hh]eartbeat monitor"
        r"|Socket Timeout|wait timeout after|Connection was likely closed|recvValue failed|sendBytes failed"
        r"|(?:gloo|RuntimeError|TCPStore).*(?:closed by peer|reset by peer|[Bb]roken pipe)"
        r"|Timed out waiting \d+ ?ms|Application timeout caused pair closure",
    ),
    (
        "gpu_fault",
        r"uncorrectable ECC|GPU is lost|fallen off the bus|unspecified launch failure|Xid|hardware error"
        r"|CUDA error: (?:an illegal memory|unknown|all CUDA)",
    ),
)
_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE | re.MULTILINE)) for name, pattern in _TEXTS]
_DEADLY = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


def of_text(text: str) -> Cause | None:
    """What an error message, or the end of a log, tells of; None when nothing known is in it."""
    return next((CAUSES[name] for name, pattern in _PATTERNS if pattern.search(text)), None)


def of_error(kind: str, message: str, exit_code: int) -> Cause:
    """What an exception that a rank wrote down tells of."""
    if exit_code == ExitCode.CONFIG:
        return CAUSES["config"]
    if kind == TrainingError.__name__:
        return CAUSES["training"]
    found = of_text(f"{kind}: {message}")
    return found or CAUSES["machine" if exit_code == ExitCode.MACHINE else "exception"]


def of_death(exit_code: int | None, number: int | None, log: str) -> Cause:
    """What the end of a process without an exception tells of; `log` is the end of what it wrote."""
    number = number or signal_of(exit_code)
    if number in (None, signal.SIGABRT):  # else the log is of before
        if exit_code in (126, 127):
            return CAUSES["not_executable"]
        if exit_code == 0:
            return CAUSES["left_early"]
        found = of_text(log)
        if found is not None:
            return found
    return CAUSES["exit_code" if number is None else _SIGNALS.get(number, "signal")]


def signal_of(exit_code: int | None) -> int | None:
    """The signal that an exit code passes on: 128 + N as shells do, 256 - N as DeepSpeed's node launcher does.

    Example:
        >>> signal_of(137), signal_of(247), signal_of(1)
        (9, 9, None)
    """
    return next((int(number) for number in _DEADLY if exit_code in (128 + number, 256 - number)), None)


def signal_name(number: int) -> str:
    """The name of a signal; most of the real-time ones have none.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_text(number: int) -> str:
    """The name of a signal and what it mostly means."""
    meaning = SIGNAL_MEANINGS.get(number)
    return signal_name(number) + (f": {meaning}" if meaning else "")
