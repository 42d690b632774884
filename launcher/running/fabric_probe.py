"""Says what a host's network cards, GPU links and NCCL are: a program of the checks before a run on GPUs.

One file, standard library only, for any Python from 3.6 on, and it loads neither torch nor NCCL. It changes nothing but
a cache of its own: which names of variables occur in which library. Messages and events are those of
`launcher.running.probe`; the one question is {"do": "fabric"} with the fields of `fabric`, and the answer is what
`launcher.planning.fabric` describes, without the addresses of interfaces. What cannot be found out is null.
"""

import glob
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

Fields = Dict[str, Any]
Run = Callable[..., Optional[str]]

COMMAND_S = 15.0  # for nvidia-smi; without the persistence daemon the driver starts up first
SMI = ("nvidia-smi", "/usr/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
LIBRARY = "libnccl.so.2"
SYSTEM_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")
TORCH_LIBRARIES = ("libtorch_cpu.so", "libtorch_cuda.so")
# Where AWS's plugin is put by its installer, by images and by containers.
OFI = (
    "opt/amazon/ofi-nccl/lib*/libnccl-net*.so",
    "opt/amazon/ofi-nccl/lib*/*/libnccl-net*.so",
    "opt/aws-ofi-nccl/lib*/libnccl-net*.so",
    "opt/aws-ofi-nccl/install/lib*/libnccl-net*.so",
)
GCP_PROFILES = ("usr/local/gib/scripts/set_nccl_env.sh", "var/lib/tcpxo/lib64/nccl-env-profile.sh")
GCP_PLUGINS = ("usr/local/gib/lib64/*.so", "var/lib/tcpxo/lib64/*.so", "var/lib/tcpx/lib64/*.so")
AZURE_TOPOLOGY = ("opt/microsoft/*/topo.xml", "opt/microsoft/*topo*.xml")
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # chassis of every Azure machine; other Hyper-V machines have another
PIECE, OVERLAP = 2**24, 2**8  # bytes of a library that are searched at once, and more than a name has
NAMES = re.compile(r"(NCCL|TORCH_NCCL|TORCH_FR)_\w+")  # variables that a library alone reads
PASSED = re.compile(r"(NCCL|TORCH|PYTORCH|GLOO|UCX|FI|OFI|RDMAV|CUDA|MV2|DS)_\w+|LD_\w+")  # no secrets among them
ZERO_GID = re.compile(r"[0:]*")


class Machine:
    """Files below `root`, commands by `run`, and Python's `modules`: tests put others in place of the machine's own."""

    def __init__(
        self,
        root: str = "/",
        run: Optional[Run] = None,
        home: Optional[str] = None,
        modules: Optional[List[str]] = None,
    ) -> None:
        self.root = root
        self.run = run or output
        self.home = os.path.expanduser("~") if home is None else home
        self.modules = sys.path if modules is None else modules

    def path(self, name: str) -> str:
        """Where a file of the machine lies."""
        return os.path.join(self.root, name.lstrip("/"))

    def name(self, path: str) -> str:
        """The machine's own name of what lies at `path`."""
        return "/" + os.path.relpath(path, self.root)

    def text(self, name: str) -> Optional[str]:
        """What a file holds, without blanks around it; None where it cannot be read, as files of /sys often cannot."""
        try:
            with open(self.path(name), errors="replace") as file:
                return file.read().strip()
        except (OSError, ValueError):
            return None

    def list(self, name: str) -> Optional[List[str]]:
        """Names in a folder, in order of their numbers; None when there is none."""
        try:
            return sorted(os.listdir(self.path(name)), key=natural)
        except OSError:
            return None

    def target(self, name: str) -> Optional[str]:
        """Last part of what a link points to."""
        try:
            return os.path.basename(os.readlink(self.path(name)))
        except OSError:
            return None

    def has(self, name: str) -> bool:
        """Whether there is such a file or folder."""
        return os.path.exists(self.path(name))

    def find(self, patterns: Iterable[str]) -> Iterator[str]:
        """Paths of files that match."""
        for pattern in patterns:
            yield from sorted(glob.glob(self.path(pattern)))


def fabric(asked: Fields, machine: Optional[Machine] = None) -> Fields:
    """What this host is like, for ranks started in `cwd` that look for modules in `path` first.

    `env`: variables that decide which libraries and files they read; `names`: those that are set for them.
    """
    here = machine or Machine()
    env = dict(os.environ, **asked["env"])
    files = tried(set_files, here, asked["cwd"], env)
    names = set(asked["names"]).union(*(file["variables"] for file in files or ()))
    path = [asked["cwd"]] + asked["path"] + here.modules
    found = together(
        {
            "gpus": lambda: gpus(here),
            "links": lambda: matrix(smi(here, "topo", "-m")),
            "p2p": lambda: matrix(smi(here, "topo", "-p2p", "r")),
            "manager": lambda: fabric_manager(here),
            "nccl": lambda: nccl(here, path, env, sorted(filter(NAMES.fullmatch, names))),
            "ports": lambda: ports(here),
            "interfaces": lambda: interfaces(here),
        }
    )
    told = {key: found[key] for key in ("links", "p2p", "ports", "interfaces")}
    for key in ("gpus", "manager", "nccl"):
        told.update(found[key] or {})
    told.update(tried(cloud, here) or {})
    return dict(
        told,
        files=files,
        gpudirect=tried(gpudirect, here),
        memlock_bytes=tried(memlock, here),
        virtual=tried(virtual, here),
        iommu=tried(iommu, here),
        efa_plugin=tried(efa_plugin, here, env),
        gcp_profile=next(map(here.name, here.find(GCP_PROFILES)), None),
        topo_file=next(map(here.name, here.find(AZURE_TOPOLOGY)), None),
    )


def tried(find: Callable[..., Any], *args: Any) -> Any:
    """What `find` finds; None when it fails, whatever it is: the other answers matter."""
    try:
        return find(*args)
    except Exception:
        return None


def together(finds: Dict[str, Callable[[], Any]]) -> Fields:
    """All at once; None for what is not found in time: a driver that hangs holds even the one that kills its asker."""
    found = dict.fromkeys(finds)  # type: Fields

    def find(key: str, how: Callable[[], Any]) -> None:
        found[key] = tried(how)

    threads = [threading.Thread(target=find, args=one, daemon=True) for one in finds.items()]
    deadline = time.monotonic() + COMMAND_S + 2.0
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def output(*argv: str) -> Optional[str]:
    """What a program prints; None when there is none, or it fails."""
    program = shutil.which(argv[0])
    if program is None:
        return None
    try:
        return subprocess.run(
            (program,) + argv[1:],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            timeout=COMMAND_S,
            check=True,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def smi(here: Machine, *words: str) -> Optional[str]:
    """What nvidia-smi says, wherever it lies."""
    return next(filter(None, (here.run(program, *words) for program in SMI)), None)


def natural(name: str) -> List[Any]:
    """mlx5_2 before mlx5_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def number(text: Optional[str]) -> Optional[int]:
    """A whole number; None for anything else, and for -1, which stands for not known."""
    return int(text) if text is not None and text.isdigit() else None


def ports(here: Machine) -> Optional[List[Fields]]:
    """Ports of all RDMA devices; none where the kernel has no such class."""
    if here.list("sys/class") is None:
        return None
    root, found = "sys/class/infiniband", []
    for device in here.list(root) or ():
        for port in filter(str.isdigit, here.list("%s/%s/ports" % (root, device)) or ()):
            at = "%s/%s/ports/%s" % (root, device, port)
            gids = gids_of(here, at)
            netdev = next((gid["netdev"] for gid in gids if gid["netdev"]), None)
            rate = re.match(r"[\d.]+", here.text(at + "/rate") or "")
            found.append(
                {
                    "device": device,
                    "number": int(port),
                    "link_layer": here.text(at + "/link_layer"),
                    "state": after_colon(here.text(at + "/state")),
                    "phys_state": after_colon(here.text(at + "/phys_state")),
                    "rate_gbps": float(rate.group()) if rate else None,
                    "driver": here.target("%s/%s/device/driver" % (root, device)),
                    "netdev": netdev or netdev_of(here, "%s/%s/device/net" % (root, device), int(port)),
                    "gids": gids,
                }
            )
    return found


def after_colon(text: Optional[str]) -> Optional[str]:
    """`4: ACTIVE` -> ACTIVE."""
    return None if text is None else text.rpartition(":")[2].strip()


def gids_of(here: Machine, port: str) -> List[Fields]:
    """Addresses of a port; its table has up to 256 places, most of them empty."""
    found = []
    for index in filter(str.isdigit, here.list(port + "/gids") or ()):
        gid = here.text("%s/gids/%s" % (port, index))
        if gid and not ZERO_GID.fullmatch(gid):
            kind = here.text("%s/gid_attrs/types/%s" % (port, index)) or ""
            netdev = here.text("%s/gid_attrs/ndevs/%s" % (port, index))
            found.append({"index": int(index), "kind": kind, "gid": gid, "netdev": netdev or None})
    return found


def netdev_of(here: Machine, folder: str, port: int) -> Optional[str]:
    """The network interface of a card's port, which counts from 0."""
    names = here.list(folder) or []
    fits = [name for name in names if number(here.text("sys/class/net/%s/dev_port" % name)) == port - 1]
    return next(iter(fits or names), None)


def interfaces(here: Machine) -> Optional[List[Fields]]:
    """Network interfaces; `addresses` are told by the other probe."""
    root, names = "sys/class/net", here.list("sys/class/net")
    if names is None:
        return None
    return [
        {
            "name": name,
            "state": here.text("%s/%s/operstate" % (root, name)),
            "speed_mbps": number(here.text("%s/%s/speed" % (root, name))),
            "physical": here.has("%s/%s/device" % (root, name)),
            "master": here.target("%s/%s/master" % (root, name)),
        }
        for name in names
        if os.path.isdir(here.path("%s/%s" % (root, name)))  # bonding_masters is a file
    ]


def gpus(here: Machine) -> Fields:
    """Names by slot, the driver, and what it says of NVSwitch: the GPU in the worst state counts."""
    known = ["index", "name", "driver_version"]
    told = smi(here, "--query-gpu=" + ",".join(known + ["fabric.state", "fabric.status"]), "--format=csv,noheader")
    if told is None:  # older drivers refuse the last two
        told = smi(here, "--query-gpu=" + ",".join(known), "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in (told or "").splitlines()]
    rows = [row for row in rows if len(row) in (3, 5) and row[0].isdigit()]
    names = {int(row[0]): row[1] for row in rows}
    states = [plain(row[3:]) for row in rows if len(row) == 5] or fabric_states(smi(here, "-q") if rows else None)
    worst = next((s for s in states if s[:1] != ["Completed"] and s[:1] != ["N/A"]), next(iter(states), []))
    return {
        "gpus": [names.get(index, "") for index in range(max(names) + 1)] if names else None,
        "driver": rows[0][2] if rows else None,
        "fabric_state": worst[0] if worst else None,
        "fabric_status": worst[1] if len(worst) > 1 else None,
    }


def plain(words: List[str]) -> List[str]:
    """`[N/A]`, as tables write it -> N/A."""
    return [word.strip("[]") for word in words]


def fabric_states(text: Optional[str]) -> List[List[str]]:
    """State and status of each GPU, of `nvidia-smi -q`."""
    return [list(pair) for pair in re.findall(r"\n\s+Fabric\n\s+State\s+: (.*)\n\s+Status\s+: (.*)", text or "")]


def matrix(text: Optional[str]) -> Optional[List[List[str]]]:
    """GPU by GPU, of a table of `nvidia-smi topo`; its first line is underlined for terminals."""
    lines = [line.split("\t") for line in re.sub(r"\x1b\[[\d;]*m", "", text or "").splitlines()]
    table = [[cell.strip() for cell in line] for line in lines]
    head = next((row for row in table if "GPU0" in row[1:]), None)
    if head is None:
        return None
    columns = [n for n, cell in enumerate(head) if n and re.match(r"GPU\d+$", cell)]
    rows = [row for row in table if re.match(r"GPU\d+$", row[0]) and row is not head and len(row) > columns[-1]]
    return [[row[n] for n in columns] for row in rows]


def fabric_manager(here: Machine) -> Fields:
    """State of the service that sets NVSwitch up; without the service, or where services are not seen, None."""
    shown = here.run("systemctl", "show", "nvidia-fabricmanager", "--property=LoadState,ActiveState") or ""
    said = dict(line.partition("=")[::2] for line in shown.splitlines())
    version = re.search(r"\d+\.\d+[.\d]*", here.run("nv-fabricmanager", "--version") or "")
    active = said.get("ActiveState") if said.get("LoadState") == "loaded" else None
    return {"fabric_manager": active, "fabric_manager_version": version.group() if version else None}


def gpudirect(here: Machine) -> Optional[str]:
    """By what network cards reach GPU memory; None without NVIDIA's driver."""
    if here.has("sys/module/nvidia_peermem") or here.has("sys/kernel/mm/memory_peers/nv_mem"):
        return "nvidia_peermem"
    driver = here.text("proc/driver/nvidia/version")
    if driver is None:
        return None
    release = re.match(r"(\d+)\.(\d+)", here.text("proc/sys/kernel/osrelease") or "")
    new = release is not None and (int(release.group(1)), int(release.group(2))) >= (5, 12)
    return "dmabuf" if new and "Open Kernel Module" in driver else "none"


def cloud(here: Machine) -> Fields:
    """Whose machine it is, by what its firmware says."""
    fields = ("sys_vendor", "board_vendor", "product_name", "chassis_asset_tag")
    told = {name: here.text("sys/class/dmi/id/" + name) for name in fields}
    if not any(told.values()):
        return {"cloud": None, "product": None}
    vendor = "%s %s" % (told["sys_vendor"], told["board_vendor"])
    azure = told["chassis_asset_tag"] == AZURE_TAG
    whose = "aws" if "Amazon" in vendor else "gcp" if "Google" in vendor else "azure" if azure else "none"
    return {"cloud": whose, "product": told["product_name"]}


def virtual(here: Machine) -> Optional[bool]:
    """Whether this is a virtual machine, as the processor says."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", here.text("proc/cpuinfo") or "", re.MULTILINE)
    return None if flags is None else "hypervisor" in flags.group(1).split()


def iommu(here: Machine) -> Optional[bool]:
    """Whether the kernel puts an IOMMU between devices."""
    groups = here.list("sys/kernel/iommu_groups")
    return None if groups is None else bool(groups)


def memlock(here: Machine) -> Optional[int]:
    """Bytes that this process, and so each rank, may pin; -1 = no limit."""
    found = re.search(r"Max locked memory\s+(\S+)", here.text("proc/self/limits") or "")
    return None if found is None else -1 if found.group(1) == "unlimited" else number(found.group(1))


def efa_plugin(here: Machine, env: Dict[str, str]) -> Optional[str]:
    """AWS's plugin; others have files of the same name, so it is known by the variables that it reads."""
    beside = [os.path.join(folder, "libnccl-net*.so") for folder in searched(env)]
    for path in [*here.find(OFI), *here.find(beside)]:
        if "ofi" in os.path.basename(path) or tried(occur, path, ["OFI_NCCL_PROTOCOL"]) == {"OFI_NCCL_PROTOCOL": True}:
            return here.name(path)
    return None


def searched(env: Dict[str, str]) -> List[str]:
    """Folders that the dynamic linker is told to look into."""
    return [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")]


def set_files(here: Machine, cwd: str, env: Dict[str, str]) -> List[Fields]:
    """Files that set variables behind the environment's back; the process's own value wins over NCCL's two."""
    own = env.get("NCCL_CONF_FILE") or os.path.join(here.home, ".nccl.conf")
    names = ["/etc/nccl.conf", os.path.expanduser(own)]
    names += [os.path.join(folder, env.get("DS_ENV_FILE", ".deepspeed_env")) for folder in (here.home, cwd)]
    texts = [(name, here.text(name)) for name in dict.fromkeys(names)]
    return [{"path": name, "variables": settings(text)} for name, text in texts if text is not None]


def settings(text: str) -> Dict[str, str]:
    """NAME=VALUE lines of variables that concern GPUs and networks; a `#` begins a remark."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    found = {re.sub(r"^export\s+", "", name.strip()): value.strip() for name, _, value in pairs}
    return {name: value for name, value in found.items() if PASSED.fullmatch(name)}


def nccl(here: Machine, path: List[str], env: Dict[str, str], names: List[str]) -> Fields:
    """The library that ranks will load, and which of the names nothing reads that they load."""
    library = nccl_library(here, path, env)
    if library is None:
        return {"nccl_version": None, "nccl_path": None, "unknown": None}
    known = Known(env)
    version = known.version(library)
    readers = [library, *plugins(here, env)]
    torch = [file for file in torch_libraries(path) if os.path.isfile(file)]
    unknown = names
    for reader in [*readers, *torch]:
        unknown = known.lacking(reader, unknown) if unknown else []
    known.keep()
    # Some old names are read by torch and not by NCCL, so without torch nothing is said.
    return {
        "nccl_version": version,
        "nccl_path": library if here.root == "/" else here.name(library),
        "unknown": unknown if torch or not unknown else None,
    }


def nccl_library(here: Machine, path: List[str], env: Dict[str, str]) -> Optional[str]:
    """LD_PRELOAD's, else the wheel's beside torch, which torch's own search path names first, else the system's."""
    preloaded = [word for word in re.split(r"[:\s]+", env.get("LD_PRELOAD", "")) if "libnccl.so" in word]
    wheels = [os.path.join(entry, "nvidia", "nccl", "lib", LIBRARY) for entry in path]
    folders = [*searched(env), *SYSTEM_LIBRARIES]
    system = [here.path(os.path.join(folder, LIBRARY)) for folder in folders]
    return next((file for file in [*preloaded, *wheels, *system] if os.path.isfile(file)), None)


def torch_libraries(path: List[str]) -> List[str]:
    """Those of the torch that would be imported."""
    for entry in path:
        folder = os.path.join(entry, "torch", "lib")
        if os.path.isdir(folder):
            return [os.path.join(folder, name) for name in TORCH_LIBRARIES]
    return []


def plugins(here: Machine, env: Dict[str, str]) -> List[str]:
    """Libraries that NCCL loads for a network, or for its tuning, which have variables of their own."""
    kinds = ["libnccl-net*.so", "libnccl-tuner*.so"]
    given = [env.get(name, "") for name in ("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN")]
    kinds += [name if ".so" in name else "libnccl-net-%s.so" % name for name in given if name and "/" not in name]
    beside = [os.path.join(folder, kind) for folder in searched(env) for kind in kinds]
    paths = [name for name in given if name.startswith("/")]
    found = [os.path.realpath(file) for file in here.find([*paths, *beside, *OFI, *GCP_PLUGINS])]
    return list(dict.fromkeys(found))


def occur(library: str, names: Iterable[str]) -> Dict[str, bool]:
    """Whether each name stands in a file, and not merely as the beginning of another.

    What stands before it tells nothing: linkers keep one string for TORCH_NCCL_BLOCKING_WAIT and its own tail.
    """
    found = dict.fromkeys(names, False)
    for content, start, end in pieces(library) if found else ():
        for name in [name for name in found if not found[name]]:
            found[name] = stands(content, name.encode(), start, end)
    return found


def stands(content: Any, word: bytes, start: int, end: int) -> bool:
    """Whether a word is in a piece of a file with no letter of a name after it. Three times as fast as `re`."""
    at = content.find(word, start, end)
    while at >= 0 and re.match(rb"[A-Z0-9_]", content[at + len(word) : at + len(word) + 1]):
        at = content.find(word, at + 1, end)
    return bool(at >= 0)


def version_in(library: str) -> Optional[str]:
    """`NCCL version 2.30.7+cuda13.3`, which every build of the library holds -> 2.30.7."""
    word = re.compile(rb"NCCL version (\d+\.\d+[.\d]*)")
    for content, start, end in pieces(library):
        found = word.search(content, start, end)
        if found is not None:
            return found.group(1).decode()
    return None


def pieces(library: str) -> Iterator[Any]:
    """A file and where each of its overlapping pieces begins and ends: a search holds all threads up while it reads."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for start in range(0, len(content), PIECE):
            yield content, start, start + PIECE + OVERLAP


class Known:
    """What has been found in libraries, kept per user: reading half a gigabyte anew takes seconds on a network disk."""

    def __init__(self, env: Dict[str, str]) -> None:
        cache = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._file = os.path.join(cache, "launcher", "libraries.json")
        self._said = tried(self._read) or {}
        self._new = False

    def _read(self) -> Fields:
        with open(self._file) as file:
            said = json.load(file)
        return {key: value for key, value in said.items() if isinstance(value.get("names"), dict)}

    def _of(self, library: str) -> Fields:
        about = os.stat(library)
        stamp = [about.st_size, about.st_mtime_ns]
        entry = self._said.get(library)
        if entry is None or entry.get("stamp") != stamp:
            entry = self._said[library] = {"stamp": stamp, "names": {}}
        return entry

    def version(self, library: str) -> Optional[str]:
        """Of NCCL."""
        entry = self._of(library)
        if "version" not in entry:
            entry["version"], self._new = version_in(library), True
        found = entry["version"]
        return found if isinstance(found, str) else None

    def lacking(self, library: str, names: List[str]) -> List[str]:
        """Those that do not occur; all of them when the file cannot be read."""
        try:
            entry = self._of(library)
            more = occur(library, [name for name in names if name not in entry["names"]])
        except (OSError, ValueError):
            return names
        self._new = self._new or bool(more)
        entry["names"].update(more)
        return [name for name in names if not entry["names"][name]]

    def keep(self) -> None:
        """Write the cache, whole or not at all; without room or permission there is none."""
        if not self._new:
            return
        try:
            os.makedirs(os.path.dirname(self._file), exist_ok=True)
            number, aside = tempfile.mkstemp(dir=os.path.dirname(self._file), prefix=".libraries-")
            with os.fdopen(number, "w") as file:
                json.dump(self._said, file)
            os.replace(aside, self._file)
        except OSError:
            pass


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
    message = json.loads(line.decode())  # type: Fields
    return message


def main() -> int:
    """Answer messages until told to end."""
    emit("hello")
    while True:
        message = next_message()
        if message is None or message["do"] == "end":
            break
        emit("answer", id=message["id"], value=tried(fabric, message) or {})
    emit("bye")
    return 0
