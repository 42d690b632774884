"""Looks for a hub's model or data set on a host and downloads it there: a program of its own for that host.

One file that needs the standard library, and huggingface_hub or modelscope only to download. What comes from Hugging
Face lies in its cache; what comes from ModelScope in a folder beside its own, as launcher.hubs says.

Orders come as JSON lines on descriptor 0, and each is answered by a JSON line on descriptor 1, its "event" the order's
"do", or "refused" with a text:

    find      `commit` and `folder` of `repo` in the cache, `whole`, `complete` (with templates too), `offline`
    resolve   asks the hub for the newest `commit`
    download  gets that `commit`; until then says "progress" with bytes and total
    files     relative paths below `folder` that make up `commit`, with sizes
    adopt     makes `commit` the one that the name of the repository means
    end       the last order, without an answer: another program may follow

Each order has `env`, what ranks will get: where the cache is, which hub, which token, whether it may be asked at all;
`kind`, models or datasets; and `source`, hf or modelscope, which has no commits: its is called master.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import os
import select
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

# What transformers reads. Repositories hold the same weights in other forms too, which nobody needs here.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
NEEDED = (("config.json",), ("tokenizer.json", "vocab.json", "tokenizer.model"))
WELCOME = (("preprocessor_config.json", "processor_config.json"), ("chat_template.json", "chat_template.jinja"))
MASTER, MARK, LOCK = "master", ".launcher-complete", ".launcher.lock"  # the mark: launcher.hubs.WHOLE
ASK_S = 5.0  # for the hub to answer a question
TOLD_S = 0.5  # between words about progress

Order = dict[str, Any]


class Refused(Exception):
    """Why an order is not carried out, for people."""


def main() -> None:
    """Carry out orders until `end` or the end of input."""
    while (order := _read_order()) is not None and order["do"] != "end":
        os.environ.update({"HF_HUB_DISABLE_PROGRESS_BARS": "1", **order["env"]})
        try:
            answer = ORDERS[order["do"]](order)
        except Exception as error:  # whatever a library of any version raises
            _say({"event": "refused", "text": explain(error)})
        else:
            _say({"event": order["do"], **answer})


def explain(error: Exception) -> str:
    """The first sentence of an error that has many, with its kind where that says more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, Refused):
        return str(error)
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def is_of_modelscope(order: Order) -> bool:
    """Whether ModelScope is to be asked."""
    return order.get("source") == "modelscope"


def folder_of(order: Order) -> str:
    """Where the repository of an order lies, or will."""
    kind = order.get("kind", "models")
    if not is_of_modelscope(order):
        return repo_folder(order["repo"], kind)
    cache = os.path.expandvars(os.path.expanduser(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope"))
    return os.path.join(cache, "launcher", kind, *order["repo"].split("/"))


def repo_folder(repo: str, kind: str = "models") -> str:
    """The repository's folder in the cache, found as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = os.path.expandvars(os.path.expanduser(named or os.path.join(home, "hub")))
    return os.path.join(cache, f"{kind}--" + repo.replace("/", "--"))


def find(order: Order) -> Order:
    """What of a repository is here."""
    folder = folder_of(order)
    if is_of_modelscope(order):
        whole = os.path.isfile(os.path.join(folder, MARK))
        commit = MASTER if whole else None
        return {"commit": commit, "folder": folder, "whole": whole, "complete": whole, "offline": is_offline()}
    commit = current(folder)
    snapshot = os.path.join(folder, "snapshots", commit or "-")
    data = order.get("kind") == "datasets"
    whole = os.path.isdir(snapshot) and is_listed(folder, snapshot) if data else is_whole(snapshot)
    complete = whole and (data or is_complete(folder, snapshot))
    return {"commit": commit, "folder": folder, "whole": whole, "complete": complete, "offline": is_offline()}


def is_complete(folder: str, snapshot: str) -> bool:
    """Whether all is here that `download` would get; newer versions of huggingface_hub keep the list."""
    try:
        with open(os.path.join(folder, "trees", f"{os.path.basename(snapshot)}.json"), encoding="utf-8") as file:
            return all(_has(snapshot, name) for name in json.load(file)["files"] if is_wanted(name))
    except (OSError, ValueError, KeyError, TypeError):
        return all(any(_has(snapshot, name) for name in names) for names in WELCOME)


def is_listed(folder: str, snapshot: str) -> bool:
    """Whether every file of a data set is here that the list names; older versions of huggingface_hub keep none."""
    try:
        with open(os.path.join(folder, "trees", f"{os.path.basename(snapshot)}.json"), encoding="utf-8") as file:
            return all(_has(snapshot, name) for name in json.load(file)["files"])
    except FileNotFoundError:
        return bool(os.listdir(snapshot))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_wanted(name: str, kind: str = "models") -> bool:
    """Whether a file of this name may be read: by transformers, of a model; of a data set every one."""
    return kind == "datasets" or any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)


def current(folder: str) -> str | None:
    """The commit that the name of the repository means here."""
    try:
        with open(os.path.join(folder, "refs", "main"), encoding="ascii") as file:
            return file.read().strip() or None
    except (OSError, ValueError):
        return None


def is_whole(snapshot: str) -> bool:
    """Whether nothing is missing without which a model cannot be loaded."""
    if not all(any(_has(snapshot, name) for name in names) for names in NEEDED):
        return False
    try:
        with open(os.path.join(snapshot, "model.safetensors.index.json"), encoding="utf-8") as file:
            names = set(json.load(file)["weight_map"].values())
    except FileNotFoundError:
        return any(name.endswith(".safetensors") and _has(snapshot, name) for name in os.listdir(snapshot))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(_has(snapshot, name) for name in names)


def _has(snapshot: str, name: str) -> bool:
    return os.path.isfile(os.path.join(snapshot, name))


def is_offline() -> bool:
    """Whether the hub must not be asked."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def resolve(order: Order) -> Order:
    """Ask the hub."""
    if is_of_modelscope(order):
        return {"commit": MASTER}
    from huggingface_hub import HfApi

    kind = order["kind"].removesuffix("s")
    return {"commit": HfApi().repo_info(order["repo"], repo_type=kind, timeout=ASK_S).sha}


def download(order: Order) -> Order:
    """Get a commit; what an earlier try has left is gone on with. Another one on this file system is waited for."""
    if is_of_modelscope(order):
        return _from_modelscope(order)
    from huggingface_hub import HfApi, snapshot_download

    repo, commit, folder, kind = order["repo"], order["commit"], folder_of(order), order["kind"]
    patterns = list(PATTERNS) if kind == "models" else None
    with _lock(folder), _told(order, lambda: blob_bytes(folder), _lacking(order, HfApi())):
        snapshot = snapshot_download(repo, revision=commit, repo_type=kind.removesuffix("s"), allow_patterns=patterns)
        if kind == "models" and not is_whole(snapshot):
            raise Refused(f"{repo} has no whole model at {commit}: config.json, tokenizer and *.safetensors are needed")
        adopt(order)
    return {}


def _from_modelscope(order: Order) -> Order:
    """ModelScope's own download, which goes on with what an earlier try has left."""
    try:
        from modelscope.hub import snapshot_download as module  # type: ignore[import-not-found]
    except ImportError as error:
        text = "modelscope is not installed here: pip install modelscope, or source=hf"
        raise Refused(text) from error
    folder, kind = folder_of(order), order["kind"]
    get = module.snapshot_download if kind == "models" else module.dataset_snapshot_download
    with _lock(folder), _told(order, lambda: tree_bytes(folder), None):
        get(order["repo"], local_dir=folder)
        adopt(order)
    return {}


@contextlib.contextmanager
def _lock(folder: str) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, LOCK), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say({"event": "waiting"})
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


def _lacking(order: Order, api: Any) -> int:
    """How many bytes of a commit are not here yet."""
    repo, kind = order["repo"], order["kind"]
    found = api.repo_info(
        repo, revision=order["commit"], repo_type=kind.removesuffix("s"), files_metadata=True, timeout=4 * ASK_S
    )
    snapshot = os.path.join(folder_of(order), "snapshots", order["commit"])
    wanted = {s.rfilename: s.size or 0 for s in found.siblings or [] if is_wanted(s.rfilename, kind)}
    return sum(size for name, size in wanted.items() if not _has(snapshot, name))


@contextlib.contextmanager
def _told(order: Order, count: Callable[[], int], total: int | None) -> Iterator[None]:
    """Say now and then how many bytes there are, and end this process when nobody listens any more."""
    before, over = count(), threading.Event()

    def tell() -> None:
        while not over.wait(TOLD_S):
            if _nobody_listens():
                os._exit(1)
            _say({"event": "progress", "bytes": max(0, count() - before), "total": total})

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def blob_bytes(folder: str) -> int:
    """Bytes of a repository on the disk; a file that is filled in any order counts by its blocks."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.join(folder, "blobs")):
            with contextlib.suppress(OSError):
                found = entry.stat()
                total += min(found.st_size, found.st_blocks * 512)
    return total


def tree_bytes(folder: str) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(at, name))
    return total


def _nobody_listens() -> bool:
    poll = select.poll()
    poll.register(0, select.POLLHUP | select.POLLRDHUP)
    return any(event & (select.POLLHUP | select.POLLRDHUP) for _, event in poll.poll(0))


def files(order: Order) -> Order:
    """Blobs first, then the names that point to them, then what makes the commit the current one."""
    folder, commit, kind = folder_of(order), order["commit"], order["kind"]
    links: list[str] = []
    blobs: dict[str, int] = {}
    if is_of_modelscope(order):
        for at, _, names in os.walk(folder):
            paths = [os.path.join(at, name) for name in names if name not in (MARK, LOCK)]
            blobs |= {os.path.relpath(path, folder): os.path.getsize(path) for path in paths}
        return {"blobs": blobs, "links": []}
    for at, _, names in os.walk(os.path.join(folder, "snapshots", commit)):
        for name in names:
            path = os.path.join(at, name)
            if is_wanted(name, kind) and os.path.isfile(path):
                links.append(os.path.relpath(path, folder))
                blobs[os.path.relpath(os.path.realpath(path), os.path.realpath(folder))] = os.path.getsize(path)
    blobs = {path: size for path, size in blobs.items() if path not in links}
    trees = [name for name in [f"trees/{commit}.json"] if os.path.isfile(os.path.join(folder, name))]
    return {"blobs": blobs, "links": sorted(links) + trees}


def adopt(order: Order) -> Order:
    """Write the reference that huggingface_hub reads, as it does when it is asked for a branch; else the mark."""
    folder = folder_of(order)
    target = os.path.join(folder, MARK) if is_of_modelscope(order) else os.path.join(folder, "refs", "main")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    aside = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{uuid.uuid4().hex[:12]}")
    with open(aside, "w", encoding="ascii") as file:
        file.write(order["commit"])
    os.replace(aside, target)
    return {}


def _read_order() -> Order | None:
    """One line, no byte more: what follows may be for another program."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    order: Order = json.loads(line)
    return order


def _say(event: Order) -> None:
    data = json.dumps(event).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


ORDERS: dict[str, Callable[[Order], Order]] = {
    **{"find": find, "resolve": resolve, "download": download, "files": files, "adopt": adopt},
}
