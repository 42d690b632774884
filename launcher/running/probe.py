"""Says what a host is like and tries its network: the program of the checks before a run. It changes nothing there.

One file, standard library only, for any Python from 3.6 on, since it also judges an interpreter that is too old.
Messages are JSON lines on descriptor 0, with "do" and "id"; `end` or the end of input ends it. Events:

    hello    it runs
    answer   to the message with this id: what was found under "value", or under "failed" why nothing was
    bye      it has ended, nothing listens any more

What cannot be found out of many things is {"failed": REASON} in its place.
"""

import errno
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from typing import Any, Callable, Dict, List, Optional, Tuple

Fields = Dict[str, Any]

RUN_ID = "LAUNCHER_RUN_ID"
SOURCES = (".py", ".yaml", ".json")
ENDS = 2**20  # bytes of each end of a file that are compared; hashing hundreds of gigabytes would take minutes
SMI = ("nvidia-smi", "/usr/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
APP_FIELDS, ABLE_FIELDS = "gpu_uuid,pid,process_name,used_memory", "uuid,compute_cap"
GPU_FIELDS = "index,uuid,name,memory.total,memory.used,compute_mode,driver_version,pci.bus_id"
SMI_S = 20.0  # without the persistence daemon the driver starts up first
NONCE_S = 5.0  # for a caller to read who answers
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


def tried(find: Callable[..., Any], *args: Any) -> Any:
    """What `find` finds, or why it finds nothing."""
    try:
        return find(*args)
    except Exception as error:  # whatever it is, the other answers matter
        return {"failed": reason_of(error)}


def failed(value: Any) -> bool:
    """Whether `tried` found nothing."""
    return isinstance(value, dict) and isinstance(value.get("failed"), str)


def reason_of(error: BaseException) -> str:
    """A short reason for people."""
    if isinstance(error, socket.timeout):
        return "no answer"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "%s: %s" % (type(error).__name__, error)


def read(path: str) -> str:
    """Text of a file of /proc or /sys."""
    with open(path, errors="replace") as file:
        return file.read()


def look(asked: Fields) -> Fields:
    """What this host is like, for a run that is started in `cwd` with `path` in front of the module search path."""
    path = [asked["cwd"]] + asked["path"] + sys.path
    importlib.invalidate_caches()  # the working folder may have come since an earlier look, which found none
    return {
        "time": time.time(),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "cwd": os.path.isdir(asked["cwd"]),
        "missing": tried(lambda: [name for name in asked["modules"] if not locate(name, path)]),
        "versions": tried(versions, asked["packages"], path),
        "launcher": tried(package, path, asked["digest"]),
        "files": {name: tried(mark, name) for name in asked["files"]},
        "programs": {name: shutil.which(name, path=asked["search"]) for name in asked["programs"]},
        "hub": None if asked["hub"] is None else tried(hub, asked["hub"]),
        "folder": tried(folder, asked["run_dir"], asked["token"]),
        "scratch": tried(folder, asked["scratch"], None) if asked.get("scratch") else None,
        "shm": tried(space, "/dev/shm"),
        "memory": tried(memory),
        "processors": tried(processors),
        "numa": tried(numa),
        "limits": tried(limits),
        "machine": tried(machine),
        "addresses": tried(addresses),
        "ssh_address": os.environ.get("SSH_CONNECTION", "").split()[2:3],
        "gpus": tried(gpus) if asked["gpus"] else [],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "leftovers": tried(leftovers),
        "twins": tried(twins, asked.get("words")),
    }


def locate(name: str, path: List[str]) -> Optional[str]:
    """The file that an import of `name`, a module or one inside a package, reads; None when there is none."""
    first, *inner = name.split(".")
    spec = PathFinder.find_spec(first, path) or importlib.util.find_spec(first)
    for part in inner:  # without an import of what is around it
        folders = None if spec is None else spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(part, list(folders))
    # A folder without __init__.py is found too, with no origin: wandb makes one of its name where it is used.
    return spec.origin if spec is not None and spec.origin != "namespace" else None


def versions(names: List[str], path: List[str]) -> Dict[str, str]:
    """Versions of the packages that are installed, by the names of their metadata folders."""
    wanted = {re.sub(r"[-_.]+", "_", name).lower(): name for name in names}
    found: Dict[str, str] = {}
    for entry in path:
        try:
            listed = os.listdir(entry or ".")
        except OSError:
            continue
        for file in listed:
            match = re.match(r"([^-]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info$", file)
            name = wanted.get(re.sub(r"[-_.]+", "_", match.group(1)).lower()) if match else None
            if match and name:
                found.setdefault(name, match.group(2))
    return found


def package(path: List[str], digest: Optional[str]) -> Fields:
    """Where the launcher lies and the hash of its sources; file by file too when that is not `digest`."""
    init = locate("launcher", path)
    if init is None:
        return {"where": None}
    files = sources(os.path.dirname(init))
    own = digest_of(files)
    return {"where": os.path.dirname(init), "digest": own, "files": files if digest not in (None, own) else None}


def sources(folder: str) -> Dict[str, str]:
    """Relative path -> hash of every file below `folder` that a run depends on."""
    found = {}
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if name.endswith(SOURCES):
                with open(os.path.join(where, name), "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()[:16]
                found[os.path.relpath(os.path.join(where, name), folder)] = content
    return found


def digest_of(files: Dict[str, str]) -> str:
    """One hash over what `sources` found."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def mark(name: str) -> Any:
    """What tells a file from another: its size and the hash of both its ends; for a folder, the sizes in it."""
    if os.path.isdir(name):
        files = [file for file in sorted(os.listdir(name)) if os.path.isfile(os.path.join(name, file))]
        return {file: os.path.getsize(os.path.join(name, file)) for file in files}
    size, content = os.path.getsize(name), hashlib.sha256()
    with open(name, "rb") as file:
        content.update(file.read(ENDS))
        file.seek(max(ENDS, size - ENDS))
        content.update(file.read(ENDS))
    return [size, content.hexdigest()[:16]]


def hub(asked: Fields) -> bool:
    """Whether weights of a repository lie in the cache that the ranks would look into."""
    env = dict(os.environ, **asked["env"])
    home = env.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = env.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    snapshots = os.path.join(cache, "models--" + asked["repo"].replace("/", "--"), "snapshots")
    return any(name.endswith(".safetensors") for _, _, names in os.walk(snapshots) for name in names)


def folder(run_dir: str, token: Optional[str]) -> Fields:
    """Where a run folder would be made; shared: whether a file that lies there on the launching machine does here."""
    where = run_dir
    while not os.path.exists(where):
        where = os.path.dirname(where)
    writable = os.path.isdir(where) and os.access(where, os.W_OK | os.X_OK)
    return dict(space(where), where=where, writable=writable, shared=None if token is None else os.path.exists(token))


def space(where: str) -> Fields:
    """Bytes of a file system."""
    usage = shutil.disk_usage(where)
    return {"total": usage.total, "free": usage.free}


def memory() -> Fields:
    """Bytes of main memory."""
    fields = dict(line.split(":") for line in read("/proc/meminfo").splitlines())
    return {name: int(fields[key].split()[0]) * 1024 for name, key in (("total", "MemTotal"), ("free", "MemAvailable"))}


def processors() -> Fields:
    """Numbers of the processors this process may use, and how much of their time: null = all of it."""
    quota = None
    for file in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            words = read(file).split()
            period = words[1] if len(words) > 1 else read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
            quota = float(words[0]) / float(period) if float(words[0]) > 0 else None
            break
        except (OSError, ValueError):  # `max`, or another version of cgroups
            continue
    return {"allowed": sorted(os.sched_getaffinity(0)), "quota": quota}


def numa() -> Dict[str, List[int]]:
    """Memory node -> the processors beside it."""
    root, found = "/sys/devices/system/node", {}
    for name in os.listdir(root):
        if re.match(r"node\d+$", name):
            found[name[4:]] = span(read("%s/%s/cpulist" % (root, name)))
    return found


def span(text: str) -> List[int]:
    """`0-2,8` -> 0, 1, 2, 8."""
    numbers: List[int] = []
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def limits() -> Fields:
    """Soft limits of this process; null = none."""
    import resource

    found = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    values = {name: resource.getrlimit(number)[0] for name, number in found.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in values.items()}


def machine() -> Fields:
    """What tells this machine, and the network it sees, from any other."""
    return {
        "hostname": socket.gethostname(),
        "boot": read("/proc/sys/kernel/random/boot_id").strip(),
        "network": os.readlink("/proc/self/ns/net"),
    }


def addresses() -> List[Fields]:
    """Addresses of interfaces that are up."""
    try:
        told = json.loads(output("ip", "-j", "addr"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return addresses_of_kernel()
    return [
        entry(link["ifname"], one["local"], one["prefixlen"], one["scope"])
        for link in told
        if "UP" in link.get("flags", [])
        for one in link.get("addr_info", [])
        if "local" in one
    ]


def entry(interface: str, address: str, prefix: int, scope: str) -> Fields:
    """One address; `physical`: whether a device is behind the interface, rather than a bridge or a tunnel."""
    physical = os.path.exists("/sys/class/net/%s/device" % interface)
    return {"interface": interface, "address": address, "prefix": prefix, "scope": scope, "physical": physical}


def addresses_of_kernel() -> List[Fields]:
    """The same without the program `ip`."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = name.encode().ljust(40, b"\0")
            try:
                numbers = [fcntl.ioctl(asker, call, request)[20:24] for call in (SIOCGIFADDR, SIOCGIFNETMASK)]
            except OSError:
                continue  # it has no address
            prefix = bin(int.from_bytes(numbers[1], "big")).count("1")
            scope = "host" if numbers[0][0] == 127 else "link" if numbers[0][:2] == b"\xa9\xfe" else "global"
            found.append(entry(name, socket.inet_ntoa(numbers[0]), prefix, scope))
    for line in read("/proc/net/if_inet6").splitlines() if os.path.exists("/proc/net/if_inet6") else ():
        number, _, prefix6, scope6, _, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
        scope = {"00": "global", "10": "host", "20": "link"}.get(scope6, "site")
        found.append(entry(name, address, int(prefix6, 16), scope))
    return found


def output(*argv: str) -> str:
    """What a program prints."""
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        universal_newlines=True,
        timeout=SMI_S,
        check=True,
    ).stdout


def gpus() -> List[Fields]:
    """GPUs as the driver numbers them, with who uses them."""
    program = next(filter(None, map(shutil.which, SMI)), None)
    if program is None:
        raise OSError(errno.ENOENT, "no nvidia-smi")
    form = "--format=csv,noheader,nounits"
    with ThreadPoolExecutor(3) as pool:  # each takes up to a second
        asked = [pool.submit(output, program, "--query-gpu=" + GPU_FIELDS, form)]
        asked += [pool.submit(output, program, "--query-compute-apps=" + APP_FIELDS, form)]
        able = pool.submit(tried, output, program, "--query-gpu=" + ABLE_FIELDS, form)  # old drivers know no such field
    listed, used = [answer.result() for answer in asked]
    able_of = {} if failed(able.result()) else {uuid: numbers(text) for uuid, text in rows(able.result(), 2)}
    users: Dict[str, List[Fields]] = {}
    for words in rows(used, 4):
        user = {"pid": int(words[1]), "name": words[2], "user": owner(words[1]), "bytes": mebibytes(words[3])}
        users.setdefault(words[0], []).append(user)
    found = []
    for index, uuid, name, total, busy, mode, driver, bus in rows(listed, 8):
        gpu = {"index": int(index), "uuid": uuid, "name": name, "total": mebibytes(total), "used": mebibytes(busy)}
        gpu["capability"] = able_of.get(uuid)
        found.append(dict(gpu, mode=mode, driver=driver, node=node_of(bus), users=users.get(uuid, [])))
    return found


def numbers(text: str) -> Optional[List[int]]:
    """`7.5` -> 7, 5; None for what is not told."""
    return [int(word) for word in text.split(".")] if re.match(r"\d+\.\d+$", text) else None


def rows(text: str, width: int) -> List[List[str]]:
    """Cells of comma-separated lines; other lines are remarks such as that a GPU has failed."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [cells for cells in lines if len(cells) == width]


def mebibytes(text: str) -> Optional[int]:
    """Bytes; None for what is not told."""
    return int(text) * 2**20 if text.isdigit() else None


def owner(pid: str) -> Optional[str]:
    """Name of the user of a process; None when it is in another container."""
    import pwd

    try:
        return pwd.getpwuid(os.stat("/proc/" + pid).st_uid).pw_name
    except (OSError, KeyError):
        return None


def node_of(bus: str) -> Optional[int]:
    """Memory node beside a GPU; None when the machine has one, or hides it."""
    try:
        node = int(read("/sys/bus/pci/devices/%s/numa_node" % bus.lower()[-12:]))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def leftovers() -> Dict[str, List[int]]:
    """Run id -> processes of this user's runs whose agent is gone."""
    found: Dict[int, Tuple[int, str]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                ids = re.findall(rb"(?:^|\0)%s=([^\0]+)" % RUN_ID.encode(), file.read())
            if ids:
                found[pid] = (int(read("/proc/%d/stat" % pid).rpartition(")")[2].split()[1]), ids[0].decode())
        except (OSError, UnicodeDecodeError):
            continue  # another user's, or gone by now
    orphaned = {run for pid, (parent, run) in found.items() if parent not in found and is_reaper(parent)}
    return {run: sorted(pid for pid, (_, one) in found.items() if one == run) for run in sorted(orphaned)}


def words_mark() -> Dict[str, str]:
    """What tells this process's command line from others, without its secrets, and this machine's processes."""
    return {"digest": words_digest("self"), "processes": processes()}


def words_digest(pid: str) -> str:
    """SHA-256 of what follows the program on a command line."""
    with open("/proc/%s/cmdline" % pid, "rb") as file:
        return hashlib.sha256(file.read().partition(b"\0")[2]).hexdigest()


def processes() -> str:
    """Names the processes that are seen from here: those of one machine, or of one container."""
    return read("/proc/sys/kernel/random/boot_id").strip() + os.readlink("/proc/self/ns/pid")


def twins(mark: Optional[Dict[str, str]]) -> List[int]:
    """Processes here with the command line of the launcher that asks, which runs elsewhere."""
    if mark is None or mark["processes"] == processes():
        return []
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if words_digest(pid) == mark["digest"]:
                found.append(int(pid))
        except OSError:
            continue  # gone by now
    return sorted(found)


def is_reaper(pid: int) -> bool:
    """Whether a process is the one that orphans are given to."""
    try:
        return pid <= 1 or read("/proc/%d/comm" % pid).strip() in ("systemd", "init")
    except OSError:
        return False


def resolve(asked: Fields) -> Fields:
    """Name -> its addresses as this host sees them."""
    return {name: tried(addresses_of, name) for name in asked["names"]}


def addresses_of(name: str) -> List[str]:
    """Addresses of a name, each once."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def route(asked: Fields) -> Fields:
    """Address -> interface and own address that packets to it leave by."""
    return {address: tried(route_to, address) for address in asked["to"]}


def route_to(address: str) -> Fields:
    """The kernel's answer, through `ip`, else by the source that an unsent datagram gets."""
    try:
        told = json.loads(output("ip", "-j", "route", "get", address))[0]
        return {"interface": told["dev"], "source": told["prefsrc"]}
    except (OSError, ValueError, LookupError, subprocess.SubprocessError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = probe.getsockname()[0]
        return {"interface": next(a["interface"] for a in addresses() if a["address"] == source), "source": source}


class Ears:
    """Sockets that listen here; to each caller they say a word by which it knows that it has reached this host."""

    def __init__(self) -> None:
        self._open: List[socket.socket] = []

    def listen(self, asked: Fields) -> Fields:
        """Listen at the first of `ports` that is free; `address`, when given, must be one of this machine."""
        if asked["address"] is not None:
            family, kind, _, _, where = socket.getaddrinfo(asked["address"], 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as own:
                try:
                    own.bind(where)
                except OSError as error:
                    return {"failed": reason_of(error), "what": "address"}
        reason = "no port is free"
        for port in asked["ports"]:
            try:
                ear = everywhere(port)
            except OSError as error:
                reason = reason_of(error)
                continue
            self._open.append(ear)
            threading.Thread(target=self._answer, args=(ear, asked["word"].encode()), daemon=True).start()
            return {"port": ear.getsockname()[1]}
        return {"failed": reason, "what": "port"}

    def close(self) -> None:
        """Stop listening."""
        for ear in self._open:
            try:
                ear.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            except OSError:
                pass
            ear.close()
        self._open = []

    @staticmethod
    def _answer(ear: socket.socket, word: bytes) -> None:
        while True:
            try:
                caller, _ = ear.accept()
            except OSError:
                return
            with caller:
                try:
                    caller.settimeout(NONCE_S)
                    caller.sendall(word + b"\n")
                    caller.recv(1)  # the caller hangs up first: this port must stay free for the ranks
                except OSError:
                    pass


def everywhere(port: int) -> socket.socket:
    """A socket that listens at `port` (0: any) of every address, as the ranks' own store does."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            ear = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        try:
            ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            ear.bind(("", port))
            ear.listen(1024)
            return ear
        except OSError as error:
            ear.close()
            if family == socket.AF_INET or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    raise OSError(errno.EAFNOSUPPORT, "no network")


def dial(asked: Fields) -> Fields:
    """Call all targets at once: name -> {} when the right host answered, else why not."""
    found: Fields = {}
    callers = []
    for name, address, port, word in asked["targets"]:

        def call(name: str = name, address: str = address, port: int = port, word: str = word) -> None:
            found[name] = tried(reach, address, port, word, asked["wait_s"])

        callers.append(threading.Thread(target=call, daemon=True))
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return found


def reach(address: str, port: int, word: str, wait_s: float) -> Fields:
    """Call one; somebody else may have the same address, as docker's bridge has on every machine."""
    with socket.create_connection((address, port), wait_s) as line:
        said = b""
        while not said.endswith(b"\n"):
            more = line.recv(256)
            if not more:
                break
            said += more
    return {} if said.decode(errors="replace").strip() == word else {"failed": "another machine answers"}


def emit(event: str, **fields: Any) -> None:
    """Write one event."""
    left = json.dumps(dict(fields, event=event, time=time.time())).encode() + b"\n"
    while left:
        left = left[os.write(1, left) :]


def next_message() -> Optional[Fields]:
    """The next message; None at the end of input. Byte by byte: what follows `end` is another program's."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    message: Fields = json.loads(line.decode())
    return message


def main() -> int:
    """Answer messages until told to end."""
    emit("hello")
    ears = Ears()
    can = {"look": look, "resolve": resolve, "route": route, "listen": ears.listen, "dial": dial}
    while True:
        message = next_message()
        if message is None or message["do"] == "end":
            break
        value = tried(can[message["do"]], message)
        emit("answer", id=message["id"], value=value)
    ears.close()
    emit("bye")
    return 0
