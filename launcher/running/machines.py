"""What probes saw of hosts, judged: interpreters, packages, code, files, folders, GPUs. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.attention_needs import KERNELS, missing_problem, module_of
from launcher.planning.consistency import uses_lora
from launcher.planning.known_bad import NCCL, known_bad
from launcher.planning.memory import disk_bytes
from launcher.planning.visible import through_visible
from launcher.running import probe
from launcher.running.findings import Finding, several
from launcher.spec import Host, RunPlan

GB = 1e9
MIB = 2**20
OLDEST = (3, 10)
FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
SCRATCH_BYTES = 16  # of a trained parameter on NVMe: float32 master, two moments and the gradient
SHM_A_GPU = 32 * MIB  # NCCL's segments between the GPUs of a host
NSYS = (
    "apt-get install nsight-systems-cli   (from NVIDIA's CUDA repository; the CUDA toolkit has it too)",
    "profile=torch",
)
THIS = "this machine"
Looks = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What hosts are held against: the launching machine's own answers, as far as they apply."""

    cwd: str
    versions: dict[str, str] = field(default_factory=dict)  # `python` among them; empty: hosts run another interpreter
    digest: str | None = None  # of the launcher's sources; None: not looked at
    files: dict[str, str] = field(default_factory=dict)  # the sources one by one
    marks: dict[str, Any] = field(default_factory=dict)  # path -> what tells an input file from another
    keys: dict[str, str] = field(default_factory=dict)  # path -> key of the configuration that names it
    here: frozenset[str] = frozenset()  # hosts that are this machine and run this very interpreter


def modules(plan: RunPlan) -> list[str]:
    """What ranks import."""
    config = plan.config
    more = [*(["peft"] if uses_lora(config.tune) else []), *(["bitsandbytes"] if config.few_bits else [])]
    return ["torch", "deepspeed", "transformers", *more, "launcher"]


def imported(plan: RunPlan) -> list[str]:
    """What ranks import, the package of an attention kernel that was asked for with it."""
    kernel = module_of(plan.config.attention.name)
    return [*modules(plan), *([kernel] if kernel else [])]


def compared(plan: RunPlan) -> list[str]:
    """Packages that ranks must have in the same version."""
    flash = FLASH if plan.attention == "auto" or plan.attention.startswith("flash") else ()
    return [name for name in modules(plan) if name != "launcher"] + ([*flash, *NCCL] if plan.device == "cuda" else [])


def judge(plan: RunPlan, looks: Looks, reference: Reference) -> list[Finding]:
    """Everything that keeps the run from starting on these hosts."""
    found: list[Finding] = []
    for host in plan.hosts:
        look = looks.get(host.name)
        if look is None:
            continue
        if "failed" in look:
            found.append(Finding(host=host.name, what="probe", reason=f"its look at itself failed: {look['failed']}"))
        elif _minor(look) < OLDEST:
            found.append(_old_python(plan, host, look))
        else:
            found += [*_software(plan, host, look, reference), *_inputs(host, look, reference), *_started(host, look)]
            found += [*_known_bad(plan, host, look), *_scratch(plan, host, look)]
            found += [*_folder(plan, host, look), *_gpus(plan, host, look, reference), *_shm(plan, host, look)]
    return [*found, *_versions(plan, looks, reference), *_twice(plan, looks)]


def _minor(look: Any) -> tuple[int, ...]:
    return tuple(map(int, look["python"].split(".")[:2]))


def _old_python(plan: RunPlan, host: Host, look: Any) -> Finding:
    reason = f"{look['executable']} is Python {look['python']}, and 3.10 or newer is needed"
    config = plan.config.cluster.python is not None
    return Finding(host=host.name, what="python", reason=reason, tries=("cluster.python=PATH",), config=config)


def _software(plan: RunPlan, host: Host, look: Any, reference: Reference) -> Iterator[Finding]:
    python, missing, sources = look["executable"], look["missing"], look["launcher"]
    sent = plan.config.cluster.sync == "rsync"
    if not look["cwd"]:
        reason = f"the working folder {reference.cwd} is not there"
        tries = ("cluster.sync=rsync   (sends it)", "start from a folder that every host has")
        yield Finding(host=host.name, what="folder", reason=reason, tries=tries, comes=sent)
    lacking = [name for name in missing if name != "launcher"] if isinstance(missing, list) else []
    asked = plan.config.attention.name
    if (kernel := module_of(asked)) in lacking:
        lacking.remove(kernel)
        needed = missing_problem(asked, KERNELS[asked].install)
        yield Finding(host=host.name, what="packages", reason=needed.text, tries=needed.tries)
    if lacking:
        reason = f"{python} lacks {', '.join(lacking)}"
        install = (f"{python} -m pip install .   (in the launcher's own folder; or its wheel)", "cluster.python=PATH")
        if lacking == ["bitsandbytes"]:  # which only some settings need
            install = (f"{python} -m pip install bitsandbytes", "tune=lora and optim=adamw, which do without")
        yield Finding(host=host.name, what="packages", reason=reason, tries=install)
    if sources.get("where") is None:
        reason = f"{python} finds no package launcher in the working folder, nor installed"
        tries = ("cluster.sync=rsync   (sends this one)", f"{python} -m pip install .   (there)")
        yield Finding(host=host.name, what="code", reason=reason, tries=tries, comes=sent)
    elif reference.digest is not None and host.name not in reference.here and sources["digest"] != reference.digest:
        reason = f"the launcher in {sources['where']} is not the one here: {_difference(sources, reference)}"
        tries = ("cluster.sync=rsync   (sends this one)", "cluster.sync=none   (takes it as it is)")
        yield Finding(host=host.name, what="code", reason=reason, tries=tries, comes=sent)
    for name, where in look["programs"].items():
        if where is None:
            reason = f"profile={plan.config.profile.name} needs {name}, and the PATH has none"
            yield Finding(host=host.name, what="profiler", reason=reason, tries=NSYS)


def _known_bad(plan: RunPlan, host: Host, look: Any) -> Iterator[Finding]:
    """Versions with which this run would go wrong, whichever the other hosts have."""
    for verdict in known_bad(plan, look["versions"], look["executable"]):
        if not verdict.warning:
            yield Finding(host=host.name, what="versions", reason=verdict.text, tries=verdict.tries)


def _started(host: Host, look: Any) -> Iterator[Finding]:
    """The command that one machine starts for all, started on each."""
    twins = look.get("twins")
    if isinstance(twins, list) and twins:
        reason = f"this very command runs there too (pid {twins[0]}), and one start is for all hosts"
        tries = ("start it on one machine", "cluster.transport=env   (for what is started on every node)")
        yield Finding(host=host.name, what="started twice", reason=reason, tries=tries, config=True)


def _difference(sources: Any, reference: Reference) -> str:
    theirs, ours = sources.get("files") or {}, reference.files
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} differ{'s' if len(names) == 1 else ''}"


def _inputs(host: Host, look: Any, reference: Reference) -> Iterator[Finding]:
    if host.name in reference.here:
        return
    fetch = "python -m launcher fetch ...   (puts it there)"
    for path, ours in reference.marks.items():
        theirs = look["files"].get(path)
        key = reference.keys[path]
        if probe.failed(theirs):
            reason = f"{key}={path}: {theirs['failed'].lower()}"
            yield Finding(host=host.name, what="inputs", reason=reason, tries=(fetch, f"{key}=PATH"), comes=True)
        elif not _same(ours, theirs):
            reason = f"{key}={path} is not what it is here: {_unlike(ours, theirs)}"
            yield Finding(host=host.name, what="inputs", reason=reason, tries=(fetch,))


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(theirs.get(name) == size for name, size in ours.items())  # more files do no harm
    return bool(ours == theirs)


def _unlike(ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        missing = [name for name in ours if name not in theirs]
        if missing:
            return f"{missing[0]} is missing" + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
        name = next(name for name in ours if ours[name] != theirs[name])
        return f"{name} has {theirs[name]:,} bytes instead of {ours[name]:,}"
    if isinstance(ours, list) and isinstance(theirs, list):
        same_size = ours[0] == theirs[0]
        return "its content differs" if same_size else f"{theirs[0]:,} bytes instead of {ours[0]:,}"
    return "one is a file, the other a folder"


def _folder(plan: RunPlan, host: Host, look: Any) -> Iterator[Finding]:
    folder = look["folder"]
    if folder.get("failed"):
        yield Finding(host=host.name, what="run folder", reason=folder["failed"], tries=("run.root=FOLDER",))
    elif folder["shared"] is False and plan.transport == "pdsh":
        reason = f"{plan.run_dir} is not the folder of this machine, and pdsh brings nothing else to the ranks"
        tries = ("run.root=FOLDER on a shared file system", "cluster.transport=ssh")
        yield Finding(host=host.name, what="run folder", reason=reason, tries=tries)
    elif folder["shared"] is False:
        needed = disk_bytes(plan) * (1 if host == plan.hosts[0] else host.slots / plan.world_size)
        if not folder["writable"]:
            reason = f"{plan.run_dir} cannot be made: no permission to write in {folder['where']}"
            tries = ("run.root=FOLDER", f"chmod u+w {folder['where']}   (there)")
            yield Finding(host=host.name, what="run folder", reason=reason, tries=tries)
        elif folder["free"] < needed:
            free = folder["free"] / GB
            reason = f"{free:,.1f} GB are free in {folder['where']}, and checkpoints need about {needed / GB:,.1f} GB"
            yield Finding(host=host.name, what="disk", reason=reason, tries=("run.root=FOLDER on a larger disk",))


def nvme_path(plan: RunPlan) -> str | None:
    """The folder in which DeepSpeed keeps what it offloads to a disk."""
    zero = plan.deepspeed.get("zero_optimization", {})
    sections = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    return next((str(s["nvme_path"]) for s in sections if s.get("device") == "nvme" and s.get("nvme_path")), None)


def _scratch(plan: RunPlan, host: Host, look: Any) -> Iterator[Finding]:
    path, seen = nvme_path(plan), look.get("scratch")
    if path is None or not seen:
        return
    needed = SCRATCH_BYTES * sum(plan.trainable.values()) * host.slots / plan.world_size
    tries = ("zero.nvme_path=FOLDER   (on a local disk of every host)", "zero=stage3_offload")
    if seen.get("failed"):
        yield Finding(host=host.name, what="nvme folder", reason=f"{path}: {seen['failed']}", tries=tries)
    elif not seen["writable"]:
        reason = f"{path} cannot be written: no permission in {seen['where']}"
        yield Finding(host=host.name, what="nvme folder", reason=reason, tries=tries)
    elif seen["free"] < needed:
        free = f"{seen['free'] / GB:,.1f} GB are free in {seen['where']}"
        reason = f"{free}, and optimizer states take {needed / GB:,.1f} GB"
        yield Finding(host=host.name, what="nvme folder", reason=reason, tries=tries)


def _gpus(plan: RunPlan, host: Host, look: Any, reference: Reference) -> Iterator[Finding]:
    if plan.device != "cuda":
        return
    gpus = look["gpus"]
    slots = ",".join(map(str, host.gpus))
    if isinstance(gpus, dict):
        reason = f"no GPU answers ({gpus['failed']}), and it is to run on GPU {slots}"
        cpu = "env.set.DS_ACCELERATOR=cpu   (to train without GPUs)"
        tries = ("nvidia-smi   (there)", "docker run --gpus all ...   (for a container)", cpu)
        yield Finding(host=host.name, what="GPUs", reason=reason, tries=tries)
        return
    missing = [slot for slot in host.gpus if slot not in {gpu["index"] for gpu in gpus}]
    if missing:
        reason = f"slot {','.join(map(str, missing))} is not there: it has {len(gpus)} GPUs, from 0"
        fix = f"{host.name} slots={len(gpus)}   (in the hostfile)"
        yield Finding(host=host.name, what="GPUs", reason=reason, tries=(fix,), config=True)
    visible = look["visible"]
    if visible is not None:
        yield from _visible(host, visible, gpus)
    for gpu in gpus:
        taken = gpu["mode"].startswith("Exclusive") and gpu["users"]
        if gpu["index"] in host.gpus and (gpu["mode"] == "Prohibited" or taken):
            reason = f"GPU {gpu['index']} is in compute mode {gpu['mode']}" + (", and in use" if taken else "")
            yield Finding(host=host.name, what="GPUs", reason=reason, tries=(f"cluster.exclude={host.name}",))


def by_schedulers(plan: RunPlan, looks: Looks) -> RunPlan:
    """The plan with the machines' own numbers of GPUs, where a scheduler has picked them on each host."""
    if plan.transport not in ("slurm", "env", "manual"):
        return plan
    hosts = []
    for host in plan.hosts:
        look = looks.get(host.name, {})
        known = look.get("visible") is not None and isinstance(look.get("gpus"), list)
        seen = list(_seen(look["visible"], look["gpus"])) if known else []
        counted = not set(host.gpus) <= set(seen) and max(host.gpus) < len(seen)
        hosts.append(through_visible(host, seen) if counted else host)
    return dataclasses.replace(plan, hosts=tuple(hosts))


def _seen(visible: str, gpus: Any) -> dict[int, str]:
    """Number of each GPU that CUDA_VISIBLE_DEVICES names -> the word that names it, in its order."""
    return {
        gpu["index"]: word
        for word in _words(visible)
        for gpu in gpus
        if word == str(gpu["index"]) or (word.startswith("GPU-") and len(word) > 4 and gpu["uuid"].startswith(word))
    }


def _words(visible: str) -> list[str]:
    return [word.strip() for word in visible.split(",") if word.strip()]


def _visible(host: Host, visible: str, gpus: Any) -> Iterator[Finding]:
    words, seen = _words(visible), _seen(visible, gpus)
    if set(host.gpus) <= set(seen):
        return
    reason = f"CUDA_VISIBLE_DEVICES={visible} is set there, and slots {','.join(map(str, host.gpus))} are not in it"
    own = ",".join(map(str, sorted(seen)))
    use = [f"{host.name} gpus={own}   (in the hostfile)"] if own and len(seen) == len(words) else []
    tries = (*use, "unset CUDA_VISIBLE_DEVICES   (in what its login runs)")
    yield Finding(host=host.name, what="GPUs", reason=reason, tries=tries, config=True)


def _shm(plan: RunPlan, host: Host, look: Any) -> Iterator[Finding]:
    shm = look["shm"]
    if plan.device == "cuda" and host.slots > 1 and shm.get("free", SHM_A_GPU * host.slots) < SHM_A_GPU * host.slots:
        need = SHM_A_GPU * host.slots // MIB
        reason = f"{shm['free'] / MIB:,.0f} MiB are free in /dev/shm, and {host.slots} GPUs need about {need} MiB"
        tries = ("ls -l /dev/shm   (there: left by a run that was killed?)", "docker run --shm-size=16g ...")
        yield Finding(host=host.name, what="/dev/shm", reason=reason, tries=tries)


def _versions(plan: RunPlan, looks: Looks, reference: Reference) -> list[Finding]:
    """Hosts whose versions differ from those of most, this machine counted as one of them."""
    found = []
    usable = {host: look for host, look in looks.items() if "failed" not in look and _minor(look) >= OLDEST}
    for package in ("python", *compared(plan)) if usable else ():
        installed = {host: _version(look, package) for host, look in usable.items()}
        ours = reference.versions.get(package)
        usual = _usual([*([ours] if ours else []), *installed.values()], ours)
        for host, version in installed.items():
            if version == usual or (version is None and package in _missing(usable[host])):
                continue
            here = [THIS] if ours is not None and ours == usual else []
            others = several([*here, *(other for other in installed if installed[other] == usual)])
            reason = f"{package} {version or 'is not installed'}, but {usual or 'not installed'} on {others}"
            tries: tuple[str, ...] = (f"{usable[host]['executable']} -m pip install {package}=={usual}   (there)",)
            python = ("cluster.python=PATH   (of an interpreter that every host has)",)
            fix = python if package == "python" or usual is None else (*tries, *python)
            found.append(Finding(host=host, what="versions", reason=reason, tries=fix))
    return found


def _missing(look: Any) -> list[str]:
    """Modules that a host was found to lack."""
    return look["missing"] if isinstance(look["missing"], list) else []


def _version(look: Any, package: str) -> str | None:
    if package == "python":
        return ".".join(map(str, _minor(look)))
    version: str | None = look["versions"].get(package)
    return version


def _usual(versions: list[str | None], ours: str | None) -> str | None:
    """What most have; when two are as frequent, this machine's, else the first."""
    counts = Counter(versions)
    most = max(counts.values())
    return ours if ours is not None and counts[ours] == most else next(v for v in versions if counts[v] == most)


def _twice(plan: RunPlan, looks: Looks) -> list[Finding]:
    """The same machine under two names: ports, folders and GPUs would be shared without anybody knowing."""
    if plan.transport in ("env", "manual"):
        return []  # a person starts each by hand, and may share a machine out
    first: dict[tuple[str, str], str] = {}
    found = []
    for host in plan.hosts:
        machine = looks.get(host.name, {}).get("machine", {})
        if "boot" in machine:
            earlier = first.setdefault((machine["boot"], machine["network"]), host.name)
            if earlier != host.name:
                reason = f"it is the same machine as {earlier} ({machine['hostname']})"
                tries = (f"cluster.exclude={host.name}", f"one line for {earlier}, with all of its slots")
                found.append(Finding(host=host.name, what="twice", reason=reason, tries=tries, config=True))
    return found
