"""cluster.transport=pdsh: DeepSpeed's own runner starts the node launchers, while agents watch what it has started.

What the runner and pdsh do to text on the way to a host decides what may travel: one path of plain characters, and
plain values of variables. All else each rank takes from plan.json. The runner is never asked to stop: it would end
every DeepSpeed job of this user on the hosts. The agents end the ranks, and it leaves after them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, MachineError, Problem
from launcher.planning.hosts import contiguous
from launcher.planning.secrets import is_secret
from launcher.rundir import RunDir, write_atomic
from launcher.running.agent import HOST, RUN_ID, bound_to
from launcher.running.transport import LOST, Event
from launcher.spec import RunPlan

INSTALL = "apt-get install pdsh   (or dnf install pdsh pdsh-rcmd-ssh)"
OTHER = "cluster.transport=ssh"
LINGER_S = 7.0  # for agents to end helper processes and report, after the runner has left with 0
ENV_FILE = "pdsh.env"
# The runner exports variables of its own environment whose names begin so, with odd characters live in a shell.
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
_PLAIN = re.compile(r"[\w@+=:,./-]*", re.ASCII)  # no % either: pdsh puts host names in its place
_ENDED = re.compile(r"pdsh@[^:]+: (?P<host>\S+): (?:ssh )?exited with exit code (?P<code>\d+)")


def check_pdsh(plan: RunPlan) -> None:
    """Raise what keeps this plan from being started through pdsh, as far as this machine tells."""
    edits = [*_unsafe(plan), *_hosts(plan)]
    if edits:
        raise ConfigError(*edits)
    modules = _modules()
    if modules is None:
        problem = Problem("cluster.transport=pdsh needs pdsh, and the PATH has none", tries=(INSTALL, OTHER))
        raise MachineError(problem, title="with this machine")
    if "ssh" not in modules:
        text = f"this pdsh cannot use ssh: it has the modules {', '.join(modules) or '(none)'}"
        raise MachineError(Problem(text, tries=(INSTALL, OTHER)), title="with this machine")


@contextmanager
def runner_of(plan: RunPlan) -> Iterator[Callable[[Collection[str]], list[Event]]]:
    """DeepSpeed's runner beside the agents of a plan that wants it; gives what tells of hosts that fail by it."""
    if plan.transport != "pdsh":
        yield lambda at_work: []
        return
    runner = Runner(plan)
    try:
        yield runner.poll
    finally:
        runner.close()


class Runner:
    """DeepSpeed's runner at work. Its output goes to logs/HOST.node.log, and what is of no host to logs/pdsh.log."""

    def __init__(self, plan: RunPlan) -> None:
        self._run, self._hosts = RunDir(Path(plan.run_dir)), [host.name for host in plan.hosts]
        self._unread = b""
        self._ended: dict[str, int] = {}  # host -> exit code of its command, where that is not 0
        self._said = ""  # the last line of anybody
        self._left_at: float | None = None
        write_env_file(plan)
        python = plan.config.cluster.python or sys.executable
        words = pdsh_words(plan.config.cluster.pdsh_args)
        self._process = subprocess.Popen(
            runner_argv(plan, python, words),
            env=runner_environment(plan, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it never, see above
            preexec_fn=bound_to(os.getpid()),  # noqa: PLW1509  it calls prctl and getppid
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def poll(self, at_work: Collection[str]) -> list[Event]:
        """What has gone wrong since on hosts that are at work: `launcher_exit` where pdsh names one, else `lost`."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(2**20) or b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))
        if self._left_at is None and not data and self._process.poll() is not None:
            self._left_at = time.monotonic()
        found = [self._event(host, "launcher_exit", exit_code=code) for host, code in self._ended.items()]
        if self._left_at is not None:
            code = self._process.returncode
            if code != 0 or time.monotonic() - self._left_at > LINGER_S:
                reason = (
                    f"DeepSpeed's runner has left with exit code {code} before the ranks: {self._said or 'no word'}"
                )
                left = [host for host in self._hosts if host not in self._ended]
                found += [self._event(host, LOST, exit_code=None, reason=reason) for host in left]
        return [event for event in found if event["host"] in at_work]

    def close(self) -> None:
        """End it, pdsh and its ssh clients; call it when all agents are done."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self.poll(())
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _take(self, line: str) -> None:
        host, colon, text = line.partition(": ")
        known = colon and host in self._hosts
        log = self._run.node_log(host) if known else self._run.logs / "pdsh.log"
        with open(log, "a", encoding="utf-8") as file:
            print(text if known else line, file=file)
        ended = _ENDED.search(line)
        if ended is not None:
            self._ended.setdefault(ended["host"], int(ended["code"]))
        elif line.strip() and "[INFO]" not in line:
            self._said = text if known else line

    def _event(self, host: str, kind: str, **fields: Any) -> Event:
        now = time.time()
        return {"event": kind, "host": host, "time": now, "received": now, "signal": None, "by_us": False, **fields}


def runner_argv(plan: RunPlan, python: str, pdsh_options: Sequence[str]) -> list[str]:
    """The `deepspeed` line that starts all ranks; what follows --module is all that goes through remote shells."""
    run = RunDir(Path(plan.run_dir))
    chosen: list[str] = []
    if not all(contiguous(host) for host in plan.hosts):
        chosen = [f"--include={'@'.join(f'{h.name}:' + ','.join(map(str, h.gpus)) for h in plan.hosts)}"]
    return [
        *(python, "-u", "-m", "deepspeed.launcher.runner"),
        *(f"--hostfile={run.hostfile}", *chosen, "--launcher=pdsh", "--force_multi", "--no_ssh_check"),
        *([f"--launcher_args={shlex.join(pdsh_options)}"] if pdsh_options else []),
        *(f"--master_addr={plan.master_addr}", f"--master_port={plan.master_port}", "--no_local_rank"),
        *("--module", "launcher.training", "train", "--plan", str(run.plan)),
    ]


def pdsh_words(typed: list[str]) -> list[str]:
    """Options for pdsh: those that were typed, and -k, which ends all when one fails, where pdsh has it."""
    usage = subprocess.run(["pdsh", "-h"], capture_output=True, text=True, check=False)
    has = re.search(r"^-k\s", usage.stdout + usage.stderr, re.MULTILINE)
    return [*(["-k"] if has and "-k" not in typed else []), *typed]


def runner_environment(plan: RunPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the runner itself: what it would export by itself is left out."""
    kept = {name: value for name, value in environ.items() if not name.startswith(EXPORTED)}
    options = shlex.join([f"-oConnectTimeout={plan.config.cluster.connect_s:.0f}", "-oBatchMode=yes"])
    needed: dict[str, str] = {name: plan.env[name] for name in ("PYTHONPATH", "DS_ACCELERATOR") if name in plan.env}
    return {
        **kept,
        **needed,
        "PDSH_RCMD_TYPE": "ssh",
        "PDSH_SSH_ARGS_APPEND": f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {options}".strip(),
        "DS_ENV_FILE": str(RunDir(Path(plan.run_dir)).path / ENV_FILE),
    }


def write_env_file(plan: RunPlan) -> None:
    """Variables that must be there before Python is; each would be on a command line, so no secret is among them.

    pdsh puts the host's name for `%h`, and the host expands `$PATH`: ninja, which builds DeepSpeed's operators, lies
    beside the interpreter.
    """
    path = RunDir(Path(plan.run_dir)).path / ENV_FILE
    python = plan.config.cluster.python or sys.executable
    lines = [f"{name}={value}" for name, value in _plain(plan).items() if name != "PATH"]
    lines += [
        f"{RUN_ID}={plan.run_id}",
        f"{HOST}=%h",
        f"PATH={os.path.dirname(python)}:{plan.env.get('PATH', '$PATH')}",
    ]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    path.chmod(0o600)


def _plain(plan: RunPlan) -> dict[str, str]:
    return {name: value for name, value in plan.env.items() if not is_secret(name, value) and _PLAIN.fullmatch(value)}


def _modules() -> list[str] | None:
    """Ways in which pdsh can run a command; None without pdsh."""
    if shutil.which("pdsh") is None:
        return None
    said = subprocess.run(["pdsh", "-V"], capture_output=True, text=True, check=False)
    found = re.search(r"rcmd modules:\s*([\w,]+)", said.stdout + said.stderr)
    return found.group(1).split(",") if found else []


def _unsafe(plan: RunPlan) -> Iterator[Problem]:
    cluster, run = plan.config.cluster, plan.run_dir
    python = cluster.python or sys.executable
    for what, value, tries in (
        ("the run folder", run, ("run.root=FOLDER", "run.name=NAME")),
        ("the working folder", os.getcwd(), ("start the run in another folder",)),
        ("the interpreter", python, ("cluster.python=PATH",)),
    ):
        if not _PLAIN.fullmatch(value):
            text = f"{what} {value} has characters that shells on the hosts would change: pdsh passes text unquoted"
            yield Problem(text, tries=(*tries, OTHER))
    for name in ("activate", "wrap"):
        if getattr(cluster, name):
            text = f"cluster.{name} has no effect with cluster.transport=pdsh: DeepSpeed's runner starts Python itself"
            yield Problem(text, tries=(f"cluster.{name}=null" if name == "activate" else "cluster.wrap=[]", OTHER))
    for name, value in plan.env.items():
        early = name.startswith(("LD_", "PYTHON"))  # a rank cannot take these from plan.json: it runs by then
        if early and not _PLAIN.fullmatch(value):
            text = f"{name} has characters that shells on the hosts would change: {value}"
            yield Problem(text, tries=(f"env.set.{name}=VALUE", OTHER))


def _hosts(plan: RunPlan) -> Iterator[Problem]:
    for host in plan.hosts:
        if ":" in host.name:
            yield Problem(f"pdsh cannot name a host by its IPv6 address {host.name}", tries=(OTHER,))
        fields = [f"{key}={value}" for key, value in (("user", host.user), ("port", host.port)) if value is not None]
        if fields:
            text = f"pdsh cannot take {' '.join(fields)} of {host.name} from the hostfile"
            yield Problem(text, tries=(f"`Host {host.name}` with User and Port in ~/.ssh/config", OTHER))
