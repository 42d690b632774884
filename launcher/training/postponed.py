"""Packages that run once somebody asks for something of theirs; which ones, launcher.training.spared says.

The module is there from the start, and it stays the same object: when it is asked for a name that it lacks, its own
code runs in it. A submodule runs its package first, as ever, but for those that are told to do without.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Change = Callable[[Loader], None]


class Finder(MetaPathFinder):
    """Changes the loaders of some modules."""

    def __init__(self, changes: Mapping[str, Change], alone: Mapping[str, Collection[str]]) -> None:
        """`alone`: of packages that wait, the submodules that do without them."""
        self._changes, self._alone = changes, alone

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of importlib."""
        package, _, child = name.rpartition(".")
        if package in self._alone and child not in self._alone[package]:
            getattr(sys.modules[package], "__all__", None)  # it runs for that
            if name in sys.modules:
                return ModuleSpec(name, Already(sys.modules[name]))
        if name not in self._changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._changes[name](spec.loader)
        return spec


class Already(Loader):
    """Gives the module that is there: running its package has imported it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Of importlib."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Of importlib."""
        module.__spec__ = self._spec


def wait(
    loader: Loader,
    alone: Collection[str] = (),
    has: Callable[[ModuleType], Mapping[str, Any]] = lambda module: {},
    runs: Callable[[ModuleType], None] = lambda module: None,
) -> None:
    """Have a module loaded without running it.

    `alone`: submodules that do without it. `has`: names that it has all the same. `runs` is called when its code has
    run.
    """
    execute, lock, state = loader.exec_module, threading.RLock(), ["waiting"]

    def run(module: ModuleType) -> None:
        with lock:  # other threads wait for it; this one's own imports may come back to it
            if state[0] != "waiting":
                return
            state[0], asked = "running", vars(module)["__getattr__"]
            try:
                execute(module)
            except BaseException:
                state[0] = "waiting"
                raise
            state[0] = "done"
            if vars(module).get("__getattr__") is asked:
                del vars(module)["__getattr__"]
            runs(module)

    def hold(module: ModuleType) -> None:
        def lacks(name: str) -> Any:
            if name.startswith("__") and name != "__all__":  # whoever looks at all modules asks for these
                raise AttributeError(name)
            if name in alone and state[0] == "waiting":
                return importlib.import_module(f"{module.__name__}.{name}")
            run(module)
            if name not in vars(module):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return vars(module)[name]

        vars(module).update(has(module), __getattr__=lacks)

    vars(loader)["exec_module"] = hold
