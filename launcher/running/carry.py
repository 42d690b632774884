"""Looks at files on a host, packs them and unpacks them: one program for everything that travels between hosts.

Standard library only and one file, since it is sent. Orders come as JSON lines on descriptor 0, and each is answered
by a JSON line on descriptor 1, its "event" the order's "do", or "refused" with a text:

    tree     files under `root` (all, or `paths`): relative path -> [bytes, SHA-256 or ""]; `free` bytes on its disk
             with `follow` false, a link is [0, where it points to]
    mark     makes an empty file `name` in `root`, so that another host can say whether it sees the same folder
    look     which of `names` are in `root`
    unmark   removes that file again
    lock     waits ("waiting" is said then) until nobody else holds the lock `name`; held until the program ends
    which    where a command is, or null
    record   notes in `manifest` that `paths` of `root` are ours, as they are now
    sent     which paths `manifest` names that are still as they were noted
    remove   removes `paths` if they are among these, and folders left empty by that
    pack     the last order: after its answer, a tar of `paths` below `root` until the end of output
    unpack   the last order: a tar until the end of input is written below `root`, then answered with its counts
    end      the last order, without an answer: another program may follow

The order {"bytes": N} says that the next line has N bytes, which is faster for long ones. A file that is unpacked
appears whole or not at all; with `whole`, so does all of `root`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

CHUNK = 2**20  # bytes a read
WHOLE_BYTES = 4 * CHUNK  # files up to this size are always hashed as a whole
SAMPLES = 64  # places of this size at which a larger file is looked at, when all of it would take too long
SAMPLE_BYTES = 2**16
LAST = ".carry-end"  # the last member, without which a tar was cut short
RESERVE_BYTES = 2**24  # left on a disk

Order = dict[str, Any]

_locks: list[int] = []  # descriptors of lock files


class Refused(Exception):
    """Why an order is not carried out, for people."""


def main() -> None:
    """Carry out orders until `end`, the end of input, or an order that is the last."""
    for descriptor in (0, 1):
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, CHUNK)
        except OSError:
            pass  # a socket, or more than a user may have
    while (order := _read_order()) is not None and order["do"] != "end":
        try:
            answer = ORDERS[order["do"]](order)
        except (OSError, Refused, tarfile.TarError) as error:
            if order["do"] == "pack":
                sys.exit(explain(error))  # on standard error: the stream is cut short, and that is all its reader sees
            _say({"event": "refused", "text": explain(error)})
            if order["do"] == "unpack":
                sys.exit(1)
            continue
        if order["do"] == "pack":
            sys.exit()
        _say({"event": order["do"], **answer})
    while _locks:
        os.close(_locks.pop())


def explain(error: Exception) -> str:
    """An error in the words that name the file first."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def tree(order: Order) -> Order:
    """Sizes and hashes; `hash` is all, some (samples of large files) or none. What is not there is left out."""
    root, found = os.path.expanduser(order["root"]), {}
    for path in order["paths"] if order.get("paths") is not None else walk(root, order.get("ignore", ())):
        full = os.path.join(root, path)
        if not order.get("follow", True) and os.path.islink(full):
            found[path] = [0, f"-> {os.readlink(full)}"]
        elif os.path.isfile(full):
            size = os.stat(full).st_size
            found[path] = [size, digest(full, size, order["hash"])]
    return {"files": found, "exists": os.path.isdir(root), "free": shutil.disk_usage(existing(root)).free}


def walk(root: str, ignore: tuple[str, ...] = ()) -> Iterator[str]:
    """Relative paths of all files below `root`; `ignore` holds names of files and folders to pass over."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in ignore)
        for name in sorted(files):
            if name not in ignore:
                yield os.path.relpath(os.path.join(folder, name), root)


def digest(path: str, size: int, how: str) -> str:
    """SHA-256 of a file, of places spread over it when `how` is some and it is large, empty when none."""
    if how == "none":
        return ""
    total = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        if how == "all" or size <= WHOLE_BYTES:
            while chunk := file.read(CHUNK):
                total.update(chunk)
        else:
            for place in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()


def mark(order: Order) -> Order:
    """Make an empty file."""
    path = os.path.join(os.path.expanduser(order["root"]), order["name"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    return {}


def look(order: Order) -> Order:
    """By name, since a network file system may show an old listing of a folder."""
    root = os.path.expanduser(order["root"])
    return {"names": [name for name in order["names"] if os.path.exists(os.path.join(root, name))]}


def unmark(order: Order) -> Order:
    """Remove a mark."""
    os.unlink(os.path.join(os.path.expanduser(order["root"]), order["name"]))
    return {}


def lock(order: Order) -> Order:
    """Wait for a lock."""
    path = os.path.expanduser(order["name"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _locks.append(os.open(path, os.O_CREAT | os.O_RDWR, 0o644))
    try:
        fcntl.flock(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say({"event": "waiting"})
        fcntl.flock(_locks[-1], fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks
    return {}


def which(order: Order) -> Order:
    """Where a command is."""
    return {"path": shutil.which(order["name"])}


def sent(order: Order) -> Order:
    """What was noted as ours and has not been changed since."""
    noted = read_manifest(order["manifest"])
    return {"paths": [path for path, stamp in noted.items() if _stamp(os.path.join(order["root"], path)) == stamp]}


def record(order: Order) -> Order:
    """Note files as ours, as they are now."""
    noted = read_manifest(order["manifest"])
    noted.update({path: _stamp(os.path.join(order["root"], path)) for path in order["paths"]})
    _write_manifest(order["manifest"], noted)
    return {}


def remove(order: Order) -> Order:
    """Remove files of ours; one that was changed since is no longer ours and stays."""
    noted, removed = read_manifest(order["manifest"]), 0
    for path in order["paths"]:
        full, stamp = os.path.join(order["root"], path), noted.pop(path, None)
        if stamp is not None and _stamp(full) == stamp:
            os.unlink(full)
            removed += 1
            _remove_empty(os.path.dirname(full), order["root"])
    _write_manifest(order["manifest"], noted)
    return {"removed": removed}


def _remove_empty(folder: str, root: str) -> None:
    while os.path.normpath(folder) != os.path.normpath(root):
        try:
            os.rmdir(folder)
        except OSError:
            return
        folder = os.path.dirname(folder)


def read_manifest(file: str) -> dict[str, list[int]]:
    """The notes in a manifest; empty when there is none, or a damaged one."""
    try:
        with open(os.path.expanduser(file), encoding="utf-8") as opened:
            noted = json.load(opened)
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _write_manifest(file: str, noted: dict[str, list[int]]) -> None:
    path = os.path.expanduser(file)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aside = _aside(path)
    with open(aside, "w", encoding="utf-8") as opened:
        json.dump(noted, opened)
    os.replace(aside, path)


def _stamp(path: str) -> list[int]:
    try:
        found = os.lstat(path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns // 10**9]


def pack(order: Order) -> Order:
    """Write the tar to descriptor 1; `follow` sends what a link points to, else links travel as links."""
    root, follow = os.path.expanduser(order["root"]), order["follow"]
    _say({"event": "pack"})
    for path in order["paths"]:
        full = os.path.join(root, path)
        is_folder = os.path.isdir(full) and (follow or not os.path.islink(full))
        for name in _within(root, path) if is_folder else [path]:
            _pack_one(root, name, follow)
    _write(_header(LAST, tarfile.REGTYPE))
    _write(bytes(2 * tarfile.BLOCKSIZE))
    return {}


def _within(root: str, path: str) -> Iterator[str]:
    return (os.path.normpath(os.path.join(path, name)) for name in walk(os.path.join(root, path)))


def _pack_one(root: str, name: str, follow: bool) -> None:
    full = os.path.join(root, name)
    if os.path.islink(full) and not follow:
        _write(_header(name, tarfile.SYMTYPE, linkname=os.readlink(full)))
        return
    with open(full, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        left = found.st_size
        _write(_header(name, tarfile.REGTYPE, size=left, mode=found.st_mode & 0o777, mtime=int(found.st_mtime)))
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise Refused(f"{full} became shorter while it was read")
            left -= len(chunk)
            _write(chunk)
        _write(bytes(-found.st_size % tarfile.BLOCKSIZE))


def _header(name: str, kind: bytes, **fields: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def unpack(order: Order) -> Order:
    """Write what a tar on descriptor 0 holds; `bytes` is how much that will be."""
    root = final = os.path.abspath(os.path.expanduser(order["root"]))
    free = shutil.disk_usage(existing(root)).free
    if free < order.get("bytes", 0) + RESERVE_BYTES:
        raise Refused(
            f"{free / 1e6:,.1f} MB are free in {existing(root)}, and {order['bytes'] / 1e6:,.1f} MB are needed"
        )
    if order.get("whole"):
        root = _aside(final)
    os.makedirs(root, exist_ok=True)
    _say({"event": "ready"})
    try:
        counts = unpack_stream(Input(), root)
        if root != final:
            _put_in_place(root, final)
    finally:
        if root != final:
            shutil.rmtree(root, ignore_errors=True)
    return counts


def _put_in_place(folder: str, final: str) -> None:
    old = _aside(final)
    if os.path.lexists(final):
        os.rename(final, old)
    os.rename(folder, final)
    if os.path.isdir(old):
        shutil.rmtree(old)


def unpack_stream(stream: Any, root: str) -> Order:
    """Write the files of a tar below `root`; raises Refused for what does not belong there or is cut short."""
    count, size, over = 0, 0, False
    base = os.path.realpath(root)
    with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK, encoding="utf-8", errors="surrogateescape") as tar:
        for info in tar:
            over = info.name == LAST
            if over:
                break
            path = checked(info, root, base)
            os.makedirs(path if info.isdir() else os.path.dirname(path), exist_ok=True)
            if not info.isdir():
                _unpack_one(tar, info, path)
                count, size = count + 1, size + info.size
    if not over:
        raise Refused("the files stopped coming before the last")
    return {"files": count, "bytes": size}


def checked(info: tarfile.TarInfo, root: str, base: str) -> str:
    """The path to write a member to; `base` is the root without links. Raises Refused for one that leads elsewhere."""
    name = info.name
    if not (info.isreg() or info.isdir() or info.issym()):
        raise Refused(f"{name} is neither file, folder nor link")
    if os.path.isabs(name) or ".." in name.split("/"):
        raise Refused(f"{name} does not lie in the folder that is sent")
    if info.issym():
        target = os.path.normpath(os.path.join(os.path.dirname(name), info.linkname))
        if os.path.isabs(info.linkname) or target.split("/")[0] == "..":
            raise Refused(f"the link {name} leads out of the folder that is sent, to {info.linkname}")
    path = os.path.join(root, name)
    above = os.path.realpath(os.path.dirname(path))
    if os.path.commonpath([above, base]) != base:
        raise Refused(f"{name} would be written outside {root}, to {above}")
    return path


def _unpack_one(tar: tarfile.TarFile, info: tarfile.TarInfo, path: str) -> None:
    aside = _aside(path)
    try:
        if info.issym():
            os.symlink(info.linkname, aside)
        else:
            source, left = tar.extractfile(info), info.size
            assert source is not None
            with open(aside, "xb", buffering=0) as file:
                while left:
                    chunk = source.read(min(CHUNK, left))
                    if not chunk:
                        raise Refused(f"{info.name} stopped coming")
                    left -= len(chunk)
                    _write(chunk, file.fileno())
                os.fchmod(file.fileno(), info.mode & 0o777)
            os.utime(aside, (info.mtime, info.mtime))
        os.replace(aside, path)
    except BaseException:
        if os.path.lexists(aside):
            os.unlink(aside)
        raise


def _aside(path: str) -> str:
    head, tail = os.path.split(os.path.normpath(path))
    return os.path.join(head, f".{tail[:100]}.{uuid.uuid4().hex[:12]}.part")


def existing(path: str) -> str:
    """The nearest folder above `path`, or itself, that is there."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


class Input:
    """Descriptor 0 as tarfile reads it."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""
        return os.read(0, size)


def _read_order() -> Order | None:
    """One line, no byte more: what follows may be for another program."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    order: Order = json.loads(line)
    return order if "bytes" not in order or "do" in order else _read_long(order["bytes"])


def _read_long(size: int) -> Order | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, min(CHUNK, size - len(data)))
        if not chunk:
            return None
        data += chunk
    order: Order = json.loads(data)
    return order


def _say(event: Order) -> None:
    _write(json.dumps(event).encode() + b"\n")


def _write(data: bytes, descriptor: int = 1) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


ORDERS: dict[str, Callable[[Order], Order]] = {
    **{"tree": tree, "mark": mark, "look": look, "unmark": unmark, "lock": lock, "which": which},
    **{"sent": sent, "record": record, "remove": remove, "pack": pack, "unpack": unpack},
}
