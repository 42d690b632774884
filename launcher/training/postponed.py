"""Packages that run once somebody asks for something of theirs; which ones, launcher.training.spared says.

The module is there from the start, and it stays the same object: when it is asked for a name that it lacks, its own
code runs in it. A submodule runs its package first, as ever, but for those that are told to do without.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Change = Callable[[Loader], None]

# Of importlib: a lock that raises where two threads would wait for each other, whichever of the modules' locks, which
# are of the same kind, they wait for.
_BOOTSTRAP: Any = vars(importlib)["_bootstrap"]
ModuleLock, Deadlock = _BOOTSTRAP._ModuleLock, _BOOTSTRAP._DeadlockError


class Finder(MetaPathFinder):
    """Changes the loaders of some modules."""

    def __init__(self, changes: Mapping[str, Change], waiting: Mapping[str, Waiting]) -> None:
        self._changes, self._waiting = changes, waiting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of importlib, which holds all other imports up meanwhile: nothing runs here."""
        package, _, child = name.rpartition(".")
        change = self._changes.get(name)
        if (waiting := self._waiting.get(package)) is not None and waiting.comes_before(child):
            change = waiting.go_before
        elif name in self._waiting:
            change = self._waiting[name].hold
        if change is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            change(spec.loader)
        return spec


class Waiting:
    """A package that is loaded without running it."""

    def __init__(
        self,
        alone: Collection[str] = (),
        has: Callable[[ModuleType], Mapping[str, Any]] = lambda module: {},
        runs: Callable[[ModuleType], None] = lambda module: None,
    ) -> None:
        """`alone`: submodules that do without it. `has`: names that it has all the same. `runs` is called when its code
        has run."""
        self._alone, self._has, self._runs = alone, has, runs
        self._state, self._claim, self._lock = "waiting", threading.Lock(), ModuleLock(__name__)

    def hold(self, loader: Loader) -> None:
        """Have it there without running it."""
        self._execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._module = module
            vars(module).update(self._has(module), __getattr__=self._lacks)

        vars(loader)["exec_module"] = exec_module

    def comes_before(self, child: str) -> bool:
        """Whether it is to run before a submodule."""
        return self._state == "waiting" and child not in self._alone

    def go_before(self, loader: Loader) -> None:
        """Have it run before a submodule, which it may import itself: that one is then not loaded again."""
        create, execute, found = loader.create_module, loader.exec_module, {}

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            # Whoever runs it already may wait for this submodule, as in any import: nobody waits for that here.
            self._run(waits=False)
            if (module := sys.modules.get(spec.name)) is not None:
                found[spec.name] = module.__spec__
                return module
            return create(spec)

        def exec_module(module: ModuleType) -> None:
            if module.__name__ in found:
                module.__spec__ = found[module.__name__]
            else:
                execute(module)

        vars(loader).update(create_module=create_module, exec_module=exec_module)

    def _lacks(self, name: str) -> Any:
        module = self._module
        if name.startswith("__") and name != "__all__":  # whoever looks at all modules asks for these
            raise AttributeError(name)
        if name in self._alone and self._state == "waiting":
            return importlib.import_module(f"{module.__name__}.{name}")
        self._run()
        if name not in vars(module):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return vars(module)[name]

    def _run(self, *, waits: bool = True) -> None:
        """Run it once; `waits`: until another thread has, where one is at it."""
        with self._claim:
            begins = self._state == "waiting"
            if begins:
                self._state = "running"
                self._lock.acquire()
        if not begins:
            # This thread's own imports may come back to it; what waits for this thread is seen as far as it is.
            with suppress(Deadlock):
                if self._state == "running" and waits:
                    self._lock.acquire()
                    self._lock.release()
            return
        asked = vars(self._module)["__getattr__"]
        try:
            self._execute(self._module)
            self._state = "done"
            if vars(self._module).get("__getattr__") == asked:
                del vars(self._module)["__getattr__"]
            self._runs(self._module)
        except BaseException:
            self._state = "waiting"
            raise
        finally:
            self._lock.release()
