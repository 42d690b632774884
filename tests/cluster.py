"""Real hosts on one machine: namespaces with own network, name, processes and mounts, each with a real OpenSSH server.

    with make_cluster(folder) as cluster:
        cluster.head.run(["ssh", "n1", "hostname"])
        cluster.head.popen([sys.executable, "-m", "launcher", f"cluster.hostfile={cluster.hostfile(slots=2)}"])

Nothing of it has a name outside: the network is a bridge in a namespace of its own, and all ends with the process that
made it, however that ends. So any number of clusters can live side by side. The user's ~/.ssh and /etc/ssh are neither
read nor written: inside the hosts a passwd file of the cluster names another home. Needs root and `PROGRAMS`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.namespaces import in_new_pids, in_pids_of, kill, pids_in

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "pdsh", "ip", "nsenter", "setpriv", "rsync")
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
HOLDER = str(Path(__file__).resolve().parent / "processes" / "host.py")
HEAD = 100  # its number in the network; n1 has 1
USER = "trainer"  # another name for root: `ssh trainer@n1`
PORT = 2222  # sshd listens here too

SSHD = """\
Port 22
Port {port}
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/home/.ssh/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
UseDNS no
Subsystem sftp internal-sftp
"""


def why_not(programs: Sequence[str] = PROGRAMS) -> str:
    """Why there can be no cluster here; empty when there can."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    missing = [name for name in programs if shutil.which(name, path=SBIN) is None]
    if missing:
        return f"hosts in namespaces need {', '.join(missing)}; .ci/run installs them"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip()  # in a container that may not


class Host:
    """One host: `name`, `address`, `address6`, `etc_hosts` (what its /etc/hosts holds), and what can be done to it.

    A program on a host other than the head counts processes from 1, as on another machine: never `os.kill` a pid that
    such a program names, `host.kill(pid)` does. A `Popen` and `pids()` have this machine's numbers.
    """

    def __init__(self, name: str, number: int, folder: Path, *, own_pids: bool = True) -> None:
        self.name, self.folder = name, folder
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        self.etc_hosts = folder / f"{name}.hosts"
        self.network_space = ""
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.cable: Callable[[str], None] = lambda state: None
        argv = [sys.executable, "-I", "-S", HOLDER, name, str(folder / "etc"), str(self.etc_hosts)]
        with in_new_pids() if own_pids else ExitStack():
            self.holder = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def await_ready(self) -> None:
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {self.name} could not be made; standard error says why")
        self.network_space = os.readlink(f"/proc/{self.holder.pid}/ns/net")

    def popen(
        self, argv: Sequence[str | Path], *, env: dict[str, str] | None = None, cwd: str | Path | None = None, **kw: Any
    ) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on the host, with `env` on top of this process's environment."""
        spaces = f"/proc/{self.holder.pid}/ns"
        # nsenter and env become the program, so the Popen is the program itself.
        enter = ["nsenter", f"--net={spaces}/net", f"--uts={spaces}/uts", f"--mount={spaces}/mnt"]
        enter += ["env", f"--chdir={cwd or os.getcwd()}"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}
        whole = {**inherited, "HOME": str(self.folder / "home"), **(env or {})}
        with in_pids_of(self.holder.pid):
            return subprocess.Popen([*enter, *map(str, argv)], env=whole, **kw)

    def run(
        self, argv: Sequence[str | Path], *, timeout: float = 60, check: bool = False, input: str = "", **kw: Any
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` on the host, with text captured."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with self.popen(argv, **{**pipes, "text": True, **kw}) as process:
            try:
                out, errors = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode != 0:
            raise AssertionError(f"{self.name}: {argv} ended with {process.returncode}\n{out}{errors}")
        return subprocess.CompletedProcess(list(map(str, argv)), process.returncode, out, errors)

    def daemon(self, argv: Sequence[str | Path], log: Path, **kw: Any) -> subprocess.Popen[bytes]:
        """Start a program that belongs to the host: not among its `pids()`, and ended with the cluster."""
        bound = ["setpriv", "--pdeathsig", "KILL", *argv]
        with log.open("ab") as output:
            process = self.popen(bound, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **kw)
        self.daemons.append(process)
        return process

    def down(self) -> None:
        """Pull the network cable."""
        self.cable("down")

    def up(self) -> None:
        """Put the cable in again."""
        self.cable("up")

    @contextmanager
    def network(self, name: str, address: str) -> Iterator[None]:
        """A second network that no other host reaches, like Docker's: `network("docker0", "172.17.0.1/16")`."""
        self.run(["ip", "link", "add", name, "type", "bridge"], check=True)
        try:
            self.run(["ip", "-batch", "-"], input=f"addr add {address} dev {name}\nlink set {name} up\n", check=True)
            yield
        finally:
            self.run(["ip", "link", "del", name], check=True)

    def pids(self) -> list[int]:
        """Every process on the host but its daemons, in this machine's numbers; an open ssh connection has some."""
        own = {self.holder.pid, *(daemon.pid for daemon in self.daemons)}
        return [pid for pid in pids_in(self.network_space) if pid not in own]

    def path(self, path: str | Path) -> Path:
        """Where this process finds what the host has at an absolute path, its private folders too."""
        return Path(f"/proc/{self.holder.pid}/root", str(path).lstrip("/"))

    def kill(self, pid: int, sign: int = signal.SIGKILL) -> None:
        """Send a signal to the process that the host itself knows as `pid`."""
        self.run(["kill", f"-{int(sign)}", str(pid)], check=True)

    def clear(self) -> None:
        """Put the cable in and kill all but the daemons: what a test that failed may have left."""
        self.up()
        self._kill_all()

    def close(self) -> None:
        for process in [*self.daemons, self.holder]:
            process.kill()
        if self.network_space:
            self._kill_all()  # on the head; elsewhere all ended with the holder
        for process in [*self.daemons, self.holder]:
            process.wait()

    def _kill_all(self) -> None:
        await_that(lambda: not list(map(kill, self.pids())), 10, lambda: f"{self.name} keeps {self.pids()}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts n1, n2, ... with ssh servers, and the head, which has none and from which all of them are reached."""

    folder: Path
    hosts: tuple[Host, ...]
    head: Host
    private: Path = Path("/srv/private")  # on each host another, empty folder
    env: dict[str, str]  # set for every program on a host

    @property
    def ssh(self) -> Path:
        """The user's ~/.ssh on every host: id_ed25519, authorized_keys, known_hosts."""
        return self.folder / "home" / ".ssh"

    @property
    def ssh_config(self) -> Path:
        """The user's ssh configuration, read by every ssh on a host; there is none until a test writes it."""
        return self.ssh / "config"

    def hostfile(self, *lines: str, slots: int = 1, nodes: int = 2, name: str = "hostfile") -> Path:
        """Write a hostfile: these lines, or one `nI slots=SLOTS` for each of the first `nodes` hosts."""
        path = self.folder / name
        lines = lines or tuple(f"{host.name} slots={slots}" for host in self.hosts[:nodes])
        path.write_text("\n".join(lines) + "\n")
        return path

    def clear(self) -> None:
        """Make all hosts as new: cables in, nothing running; files stay."""
        for host in [*self.hosts, self.head]:
            host.clear()


@contextmanager
def make_cluster(folder: Path, nodes: int = 3) -> Iterator[Cluster]:
    """Make the hosts and take them away; `folder` is their shared home and must be empty."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    numbers = {**{name: number for number, name in enumerate(names, 1)}, "head": HEAD}
    _write_files(folder, numbers)
    made: list[Host] = []
    try:
        for name, number in [*numbers.items(), ("switch", HEAD + 1)]:
            made.append(Host(name, number, folder, own_pids=name in names))
        for host in made:
            host.await_ready()
        *hosts, switch = made
        _connect(switch, hosts)
        for host in hosts[:-1]:
            _start_sshd(host)
        yield Cluster(folder=folder, hosts=tuple(hosts[:-1]), head=hosts[-1], env={"HOME": str(folder / "home")})
    finally:
        for host in made:
            host.close()


def _write_files(folder: Path, numbers: dict[str, int]) -> None:
    """The home with its keys, the hosts' keys, and what covers /etc/passwd, /etc/shadow and /etc/hosts."""
    ssh, etc = folder / "home" / ".ssh", folder / "etc"
    ssh.mkdir(parents=True, mode=0o700)
    etc.mkdir()
    keys = [ssh / "id_ed25519", *(folder / f"{name}.key" for name in numbers)]
    making = [subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]) for key in keys]
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
    users = [f"{name}:x:0:0::{folder}/home:/bin/bash" for name in ("root", USER)]
    (etc / "passwd").write_text("\n".join([*users, *others]) + "\n")
    # "!" instead of "*", as some images have for root, would lock ssh out too.
    (etc / "shadow").write_text(f"root:*:20000::::::\n{USER}:*:20000::::::\n")
    (etc / "shadow").chmod(0o600)
    table = "".join(f"10.77.0.{number}\t{name}\n" for name, number in numbers.items())
    for name in [*numbers, "switch"]:
        (folder / f"{name}.hosts").write_text(f"127.0.0.1\tlocalhost\n{table}")
    for key, process in zip(keys, making, strict=True):
        if process.wait() != 0:
            raise RuntimeError(f"ssh-keygen could not write {key}")
    shutil.copyfile(ssh / "id_ed25519.pub", ssh / "authorized_keys")
    (ssh / "known_hosts").write_text("".join(_known(folder, name, number) for name, number in numbers.items()))


def _known(folder: Path, name: str, number: int) -> str:
    called = [name, f"10.77.0.{number}", f"fd77::{number}"]
    called += [f"[{one}]:{PORT}" for one in called]
    return f"{','.join(called)} {(folder / f'{name}.key.pub').read_text()}"


def _connect(switch: Host, hosts: list[Host]) -> None:
    """A bridge on the switch, and a cable from it to eth0 of each host."""
    lines = ["link add bridge type bridge", "link set bridge up"]
    for host in hosts:
        lines += [
            f"link add {host.name} type veth peer name eth0 netns {host.holder.pid}",
            f"link set {host.name} master bridge up",
        ]
    switch.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", check=True)
    for host in hosts:
        lines = ["link set lo up", f"addr add {host.address}/24 dev eth0"]
        if Path("/proc/net/if_inet6").exists():
            lines.append(f"addr add {host.address6}/64 dev eth0 nodad")
        lines.append("link set eth0 up")
        host.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", check=True)
        host.cable = partial(_set_cable, switch, host.name)


def _set_cable(switch: Host, name: str, state: str) -> None:
    switch.run(["ip", "link", "set", name, state], check=True)


def _start_sshd(host: Host) -> None:
    config, log = host.folder / f"{host.name}.sshd", host.folder / f"{host.name}.sshd.log"
    config.write_text(SSHD.format(folder=host.folder, name=host.name, port=PORT))
    program = shutil.which("sshd", path=SBIN)
    assert program is not None
    host.daemon([program, "-D", "-e", "-f", config], log)  # sshd starts itself anew, by its whole path
    await_that(lambda: "listening on" in log.read_text(), 10, lambda: f"{host.name}: sshd: {log.read_text()}")


def await_that(true: Callable[[], bool], within_s: float, otherwise: Callable[[], str]) -> None:
    """Wait until something is true; an AssertionError with `otherwise()` when it does not come."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            raise AssertionError(otherwise())
        time.sleep(0.02)
