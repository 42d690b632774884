"""First process of a make-believe host: makes what is the host's own, says "ready", and holds it until it is killed.

    host.py NAME ETC HOSTS     files of the folder ETC cover those of /etc, and HOSTS covers /etc/hosts

Started in a new process namespace, it is the host's process 1: with it ends everything that runs there. It ends with
the process that started it, however that ends. The host's own are: name, network, mounts, /sys of its network,
/dev/shm, /srv/private, /run/sshd. All else (the checkout, /tmp, Python) is the machine's, as on a shared file system.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

# linux/sched.h, linux/mount.h, linux/prctl.h
NEW_MOUNTS, NEW_NAME, NEW_NET = 0x00020000, 0x04000000, 0x40000000
BIND, WITH_BELOW, PRIVATE = 0x1000, 0x4000, 0x40000
DEATH_SIGNAL = 1

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    name, etc, hosts = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    call("unshare", NEW_MOUNTS | NEW_NAME | NEW_NET)
    socket.sethostname(name)
    mount("none", "/", "", PRIVATE | WITH_BELOW)
    if os.getpid() == 1:
        mount("proc", "/proc", "proc")
    own_sys()
    mount("shm", "/dev/shm", "tmpfs", options="mode=1777")
    add_folder("/srv", "private")
    add_folder("/run", "sshd")
    for file in etc.iterdir():
        mount(str(file), f"/etc/{file.name}", "", BIND)
    mount(str(hosts), "/etc/hosts", "", BIND)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as an init does: orphans that end do not stay as zombies
    os.write(1, b"ready\n")
    while True:
        signal.pause()


def own_sys() -> None:
    """Mount /sys anew, since it shows the network of who mounts it, with the cgroups below it (Slurm looks there)."""
    machine = os.open("/sys", os.O_PATH)
    mount("sysfs", "/sys", "sysfs")
    mount(f"/proc/self/fd/{machine}/fs/cgroup", "/sys/fs/cgroup", "", BIND | WITH_BELOW)
    os.close(machine)


def add_folder(parent: str, name: str) -> None:
    """Give the host a folder PARENT/NAME without making it on the machine; other folders of PARENT stay in sight."""
    machine = os.open(parent, os.O_PATH)
    seen = [entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False) and entry.name != name]
    mount("own", parent, "tmpfs", options="mode=755")
    for entry in seen:
        os.mkdir(f"{parent}/{entry}")
        mount(f"/proc/self/fd/{machine}/{entry}", f"{parent}/{entry}", "", BIND | WITH_BELOW)
    os.close(machine)
    os.mkdir(f"{parent}/{name}")


def mount(source: str, target: str, kind: str, flags: int = 0, *, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
