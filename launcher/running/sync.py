"""The working folder on other hosts: compared with the one here, or sent there, uncommitted changes included."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from launcher.errors import ConfigError, MachineError, Problem
from launcher.running import carry
from launcher.running.crew import HERE, TICK_S, Crew, GiveUp, Stopped, door_here, never, with_doors
from launcher.running.haul import Files, Load, move
from launcher.running.meter import files_text, size_text
from launcher.running.nodechannel import NodeChannel
from launcher.running.transport import Channel, Door
from launcher.spec import RunPlan

MANIFEST = ".launcher-sync.json"  # on the other side: what was sent
LEFT_OUT = (  # wherever they lie
    *(".git", ".hg", ".svn", "__pycache__", ".venv", "node_modules", ".tox", ".nox", ".ipynb_checkpoints"),
    *(".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", MANIFEST),
)
LIMIT_BYTES = 500_000_000
LIMIT_FILES = 20_000
PROJECT = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
NAMED = 3  # files in a message


def sync(
    plan: RunPlan, channels: Mapping[str, Channel | NodeChannel], out: IO[str], *, give_up: GiveUp = never
) -> None:
    """Do what `cluster.sync` says with the folder the user stands in; without effect for this machine's own hosts.

    The channels must be idle, and are again afterwards. Raises MachineError for hosts that differ or cannot be
    written to, ConfigError for a folder that is too large, and Stopped.
    """
    remote = {name: channel for name, channel in with_doors(channels).items() if not channel.local}
    folder, how = Path.cwd(), plan.config.cluster.sync
    if how == "none" or not remote:
        return
    if how == "rsync":
        paths = select(folder, plan.config.run.root)
        _refuse_large(folder, paths)
        with Crew(remote, {HERE: door_here()}, give_up=give_up) as crew:
            _ship(plan, folder, paths, crew, out, give_up)
    elif any((folder / name).exists() for name in PROJECT):
        with Crew(remote, give_up=give_up) as crew:
            _check(folder, select(folder, plan.config.run.root), crew)


def select(folder: Path, run_root: str) -> list[str]:
    """Relative paths of what belongs to the working tree below `folder`: what git does not ignore, else nearly all.

    Runs, virtual environments, caches and the repository itself are left out either way.
    """
    listed = _git_files(folder)
    paths = sorted(set(listed if listed is not None else carry.walk(str(folder), LEFT_OUT)))
    out = [os.path.dirname(path) for path in paths if os.path.basename(path) == "pyvenv.cfg"]
    runs = os.path.relpath(folder / run_root, folder)
    out += [name for name in (runs,) if not name.startswith("..") and name != "."]
    return [path for path in paths if not _is_below(path, out) and not set(path.split("/")) & set(LEFT_OUT)]


def local_files(folder: Path, paths: Sequence[str]) -> Files:
    """The files here as `carry` describes them on a host."""
    files: Files = carry.tree({"root": str(folder), "paths": list(paths), "hash": "all", "follow": False})["files"]
    return files


def _git_files(folder: Path) -> Iterator[str] | None:
    """What git tracks or does not ignore, nested repositories included; None where git knows nothing."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return _present(folder, [os.fsdecode(name) for name in listed.split(b"\0") if name])


def _present(folder: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        full = folder / name
        if full.is_dir() and not full.is_symlink():  # a repository in this one
            inner = _git_files(full)
            inside = inner if inner is not None and (full / ".git").exists() else carry.walk(str(full), LEFT_OUT)
            yield from (os.path.join(name.rstrip("/"), path) for path in inside)
        elif os.path.lexists(full):  # git still tracks a file that was removed
            yield name


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(not folder or path == folder or path.startswith(f"{folder}/") for folder in folders)


def _refuse_large(folder: Path, paths: Sequence[str]) -> None:
    sizes = {path: (folder / path).lstat().st_size for path in paths}
    total = sum(sizes.values())
    if total <= LIMIT_BYTES and len(paths) <= LIMIT_FILES:
        return
    largest = sorted(sizes, key=lambda path: -sizes[path])[:NAMED]
    shown = ", ".join(f"{path} ({size_text(sizes[path])})" for path in largest)
    text = f"the working folder {folder} is too large to be sent: {len(paths):,} files, {size_text(total)}; "
    text += f"at most {LIMIT_FILES:,} and {size_text(LIMIT_BYTES)}; the largest are {shown}"
    raise ConfigError(Problem(text, tries=("name them in .gitignore", "cluster.sync=none")))


def _check(folder: Path, paths: Sequence[str], crew: Crew) -> None:
    """Compare the Python files; those that only the other side has are not known here."""
    code = [path for path in paths if path.endswith(".py")][:LIMIT_FILES]
    ours = local_files(folder, code)
    answers = crew.ask_all({"do": "tree", "root": str(folder), "paths": code, "hash": "all", "follow": False})
    tries = ("cluster.sync=rsync   (sends the working folder)", "cluster.sync=none   (does not look)")
    problems = []
    for host, answer in answers.items():
        differing = [path for path in code if answer["files"].get(path) != ours[path]]
        if differing and not answer["exists"]:
            problems.append(Problem(f"{host} has no folder {folder}", tries=tries))
        elif differing:
            named = ", ".join(differing[:NAMED]) + (" ..." if len(differing) > NAMED else "")
            count = f"{len(differing)} Python file{'s' if len(differing) != 1 else ''}"
            problems.append(Problem(f"{host}: {count} in {folder} not as here: {named}", tries=tries))
    if problems:
        raise MachineError(*problems, title="with the working folder on other hosts")


def _ship(plan: RunPlan, folder: Path, paths: list[str], crew: Crew, out: IO[str], give_up: GiveUp) -> None:
    """Make the folder of each host that does not see this one like it; nothing is removed that we did not send."""
    doors = crew.doors
    owners = crew.file_systems(dict.fromkeys([HERE, *(name for name in doors if name != HERE)], str(folder)))
    targets = [name for name, owner in owners.items() if owner == name and name != HERE]
    ours, at = local_files(folder, paths), {"root": str(folder), "manifest": str(folder / MANIFEST)}
    there = crew.ask_all({"do": "tree", "paths": paths, "hash": "all", "follow": False, **at}, targets)
    noted = crew.ask_all({"do": "sent", **at}, targets)
    gone = {name: sorted(set(noted[name]["paths"]) - set(paths)) for name in targets}
    crew.ask({name: {"do": "remove", "paths": files, **at} for name, files in gone.items() if files})
    lacking = {name: [path for path in paths if there[name]["files"].get(path) != ours[path]] for name in targets}
    lacking = {name: files for name, files in lacking.items() if files}
    where = crew.ask_all({"do": "which", "name": "rsync"}, [name for name in lacking if has_rsync(doors[name], plan)])
    by_rsync = {name: lacking[name] for name, answer in where.items() if answer["path"]}
    sent = _rsync_all(folder, by_rsync, doors, give_up)
    sizes = {name: sum(ours[path][0] for path in files) for name, files in lacking.items()}
    # rsync fails where a login script prints, what we send over Python does not; when that fails too, it says why.
    loads = [
        _load(doors[HERE], doors[name], folder, files, sizes[name])
        for name, files in lacking.items()
        if name not in sent
    ]
    failed = move(loads, out, give_up=give_up)
    if failed:
        raise MachineError(*map(Problem, failed.values()), title="with sending the working folder")
    crew.ask({name: {"do": "record", "paths": files, **at} for name, files in lacking.items()})
    for name, files in lacking.items():
        print(f"sent the working folder to {name}: {files_text(len(files))}, {size_text(sizes[name])}", file=out)


def _load(source: Door, target: Door, folder: Path, paths: list[str], size: int) -> Load:
    label, root = f"working folder to {target.host}", str(folder)
    return Load(source=source, target=target, root=root, paths=paths, to=root, size=size, follow=False, label=label)


def has_rsync(door: Door, plan: RunPlan) -> bool:
    """Whether rsync can go the same way as Python does: by plain ssh, whose options survive rsync's own splitting."""
    plain = all(not set(word) & set(" \t\"'\\") for word in door.argv[:-3])
    return door.argv[0] == "ssh" and plain and not plan.config.cluster.wrap and shutil.which("rsync") is not None


def _rsync_all(folder: Path, files: dict[str, list[str]], doors: dict[str, Door], give_up: GiveUp) -> set[str]:
    """Hosts to which it has sent their files."""
    if not files:
        return set()
    with ThreadPoolExecutor(len(files)) as pool:
        sent = pool.map(lambda name: _rsync(folder, files[name], doors[name], give_up), files)
        found = {name for name, all_sent in zip(files, sent, strict=True) if all_sent}
    if give_up():
        raise Stopped
    return found


def _rsync(folder: Path, paths: Sequence[str], door: Door, give_up: GiveUp) -> bool:
    """Send files; whether all were. Their names go by a file, and the folder's past the far side's shell (-s)."""
    *options, _, host, _ = door.argv
    target = f"[{host}]:{folder}/" if ":" in host else f"{host}:{folder}/"
    with tempfile.TemporaryFile() as listed:
        listed.write(b"\0".join(map(os.fsencode, paths)))
        listed.seek(0)
        command = ["rsync", "-lptIs", "--from0", "--files-from=-", "-e", " ".join(options), "--", f"{folder}/", target]
        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=listed, stdout=null, stderr=null, start_new_session=True) as process:
            while process.poll() is None:
                if give_up():
                    process.kill()
                time.sleep(TICK_S / 4)
    return process.returncode == 0
