"""Looks for weights in a host's Hugging Face cache and downloads them: a program of its own for that host.

One file that needs the standard library, and huggingface_hub only to download. Orders come as JSON lines on descriptor
0, and each is answered by a JSON line on descriptor 1, its "event" the order's "do", or "refused" with a text:

    find      `commit` and `folder` of `repo` in the cache, `whole`, `complete` (with templates too), `offline`
    resolve   asks the hub for the newest `commit`
    download  gets that `commit`; until then says "progress" with bytes and total
    files     relative paths below `folder` that make up `commit`, with sizes
    adopt     makes `commit` the one that the name of the repository means
    end       the last order, without an answer: another program may follow

Each order has `env`, what ranks will get: where the cache is, which hub, which token, whether it may be asked at all.
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


def repo_folder(repo: str) -> str:
    """The repository's folder in the cache, found as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = os.path.expandvars(os.path.expanduser(named or os.path.join(home, "hub")))
    return os.path.join(cache, "models--" + repo.replace("/", "--"))


def find(order: Order) -> Order:
    """What of a repository is here."""
    folder = repo_folder(order["repo"])
    commit = current(folder)
    snapshot = os.path.join(folder, "snapshots", commit or "-")
    whole = is_whole(snapshot)
    complete = whole and is_complete(folder, snapshot)
    return {"commit": commit, "folder": folder, "whole": whole, "complete": complete, "offline": is_offline()}


def is_complete(folder: str, snapshot: str) -> bool:
    """Whether all is here that `download` would get; newer versions of huggingface_hub keep the list."""
    try:
        with open(os.path.join(folder, "trees", f"{os.path.basename(snapshot)}.json"), encoding="utf-8") as file:
            return all(_has(snapshot, name) for name in json.load(file)["files"] if is_wanted(name))
    except (OSError, ValueError, KeyError, TypeError):
        return all(any(_has(snapshot, name) for name in names) for names in WELCOME)


def is_wanted(name: str) -> bool:
    """Whether transformers may read a file of this name."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)


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
    from huggingface_hub import HfApi

    return {"commit": HfApi().model_info(order["repo"], timeout=ASK_S).sha}


def download(order: Order) -> Order:
    """Get a commit; what an earlier try has left is gone on with. Another one on this file system is waited for."""
    from huggingface_hub import HfApi, snapshot_download

    repo, commit, folder = order["repo"], order["commit"], repo_folder(order["repo"])
    with _lock(folder), _told(repo, commit, folder, HfApi()):
        snapshot = snapshot_download(repo, revision=commit, allow_patterns=list(PATTERNS))
        if not is_whole(snapshot):
            raise Refused(f"{repo} has no whole model at {commit}: config.json, tokenizer and *.safetensors are needed")
        adopt(order)
    return {}


@contextlib.contextmanager
def _lock(folder: str) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".launcher.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say({"event": "waiting"})
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


@contextlib.contextmanager
def _told(repo: str, commit: str, folder: str, api: Any) -> Iterator[None]:
    """Say now and then how many bytes there are, and end this process when nobody listens any more."""
    listed = api.model_info(repo, revision=commit, files_metadata=True, timeout=4 * ASK_S).siblings or []
    snapshot = os.path.join(folder, "snapshots", commit)
    wanted = {s.rfilename: s.size or 0 for s in listed if is_wanted(s.rfilename)}
    total = sum(size for name, size in wanted.items() if not _has(snapshot, name))
    before, over = blob_bytes(folder), threading.Event()

    def tell() -> None:
        while not over.wait(TOLD_S):
            if _nobody_listens():
                os._exit(1)
            _say({"event": "progress", "bytes": max(0, blob_bytes(folder) - before), "total": total})

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


def _nobody_listens() -> bool:
    poll = select.poll()
    poll.register(0, select.POLLHUP | select.POLLRDHUP)
    return any(event & (select.POLLHUP | select.POLLRDHUP) for _, event in poll.poll(0))


def files(order: Order) -> Order:
    """Blobs first, then the names that point to them, then what makes the commit the current one."""
    folder, commit = repo_folder(order["repo"]), order["commit"]
    links, blobs = [], {}
    for at, _, names in os.walk(os.path.join(folder, "snapshots", commit)):
        for name in names:
            path = os.path.join(at, name)
            if is_wanted(name) and os.path.isfile(path):
                links.append(os.path.relpath(path, folder))
                blobs[os.path.relpath(os.path.realpath(path), os.path.realpath(folder))] = os.path.getsize(path)
    blobs = {path: size for path, size in blobs.items() if path not in links}
    trees = [name for name in [f"trees/{commit}.json"] if os.path.isfile(os.path.join(folder, name))]
    return {"blobs": blobs, "links": sorted(links) + trees}


def adopt(order: Order) -> Order:
    """Write the reference that huggingface_hub reads, as it does when it is asked for a branch."""
    refs = os.path.join(repo_folder(order["repo"]), "refs")
    os.makedirs(refs, exist_ok=True)
    aside = os.path.join(refs, f".main.{uuid.uuid4().hex[:12]}")
    with open(aside, "w", encoding="ascii") as file:
        file.write(order["commit"])
    os.replace(aside, os.path.join(refs, "main"))
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
