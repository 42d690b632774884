"""Packages that wait until something of theirs is wanted."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.training.postponed import Finder, Waiting

NAME = "waits_for_it"
FILES = {
    "__init__": "import time\n\nSTARTED.set()\ntime.sleep(PAUSE_S)\nfrom . import within\n\nVALUE = within.VALUE\n",
    "within": "from .alone import RUNS\n\nRUNS.append(__name__)\nVALUE = object()\n",
    "alone": "RUNS = []\n",
    "beyond": "from . import VALUE\n",
}
PAUSE_S = 0.1  # in which another thread begins to import


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set once the package runs; it is on the search path, and waits."""
    (folder := tmp_path / NAME).mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    event = threading.Event()
    waiting = Waiting(("alone",), has=lambda module: {"STARTED": event, "PAUSE_S": PAUSE_S})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [Finder({}, {NAME: waiting}), *sys.meta_path])
    yield event
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.mark.parametrize("first", ["within", "beyond"])
def test_a_submodule_runs_once_after_its_package(first: str, started: threading.Event) -> None:
    package, alone = importlib.import_module(NAME), importlib.import_module(f"{NAME}.alone")
    assert not started.is_set()
    module = importlib.import_module(f"{NAME}.{first}")
    assert started.is_set()
    assert [f"{NAME}.within"] == alone.RUNS
    assert module is sys.modules[f"{NAME}.{first}"] is getattr(package, first)
    assert module.VALUE is package.VALUE is package.within.VALUE
    assert module.__spec__ is not None
    assert module.__spec__.origin == module.__file__


def test_threads_that_want_a_package_and_a_part_of_it_wait_for_neither(started: threading.Event) -> None:
    package, seen = importlib.import_module(NAME), []

    def want_part() -> None:
        started.wait()
        seen.append(importlib.import_module(f"{NAME}.within").VALUE)

    threads = [threading.Thread(target=lambda: seen.append(package.VALUE), daemon=True) for _ in range(2)]
    threads.append(threading.Thread(target=want_part, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert seen == [package.within.VALUE] * 3
