"""Seconds of every start that buy nothing: libraries that others import merely because they are installed, what they
look up again each time, and the garbage collector's looks at what imports have just made.

Third-party code is changed here alone. Seen with torch 2.11 and 2.14, transformers 5.17 and 5.24; outside of these
versions everything is imported as it comes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial, wraps
from importlib import metadata
from importlib.abc import Loader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from launcher.prepared import cache_dir
from launcher.rundir import write_atomic
from launcher.spec import RunPlan
from launcher.training.postponed import Change, Finder, Waiting

# DeepSpeed's autotuner imports mlflow (autotuning/autotuner.py).
NEVER = ("mlflow",)
# peft imports bitsandbytes (helpers.py, tuners/lora/bnb.py) and with it torch's compiler, transformers scipy for losses
# of object detection (loss/) and scikit-learn for speculative decoding (generation/candidate_generator.py).
WITHOUT_BITS = ("bitsandbytes", "scipy", "sklearn")
# DeepSpeed 0.19.8 asks whether an optimizer is Muon, in modules that have torch compile functions when they are
# imported: a second, for an answer that no optimizer of ours gives.
MUON = "deepspeed.runtime.zero.muon"
# torchvision imports its own of these, and torch's compiler with them, where image processors want its transforms;
# transformers and torch's optimizers import that compiler to mark functions. With each: what is imported without it.
ALONE = {
    "torch._dynamo": ("config", "_trace_wrapped_higher_order_op"),
    "torchvision.datasets": (),
    "torchvision.models": (),
    "torchvision.ops": ("boxes", "_box_convert", "_utils"),
}
NOT_THERE = ("is_torch_distributed_available", "is_torch_flex_attn_available")
KEPT = 16  # files of each kind, an environment each
TORCH, TRANSFORMERS = ((2, 11), (2, 14)), ((5, 17), (5, 24))  # versions, the first and the last


class MuonWithAuxAdam:
    """Stands for DeepSpeed's optimizer of this name: no optimizer is one."""


def muon_update(*args: Any, **kwargs: Any) -> None:
    """Stands for the update of that optimizer."""
    raise RuntimeError("no optimizer is Muon")


def spare_imports(plan: RunPlan, modules: dict[str, Any] = sys.modules) -> None:
    """Let those that this run has no use for seem not installed; to be called before torch is imported."""
    for name in NEVER if plan.config.few_bits else (*NEVER, *WITHOUT_BITS):
        modules.setdefault(name, None)
    for name, content in (("muon_optimizer", MuonWithAuxAdam), ("original_muon", muon_update)):
        stand_in = ModuleType(f"{MUON}.{name}")
        vars(stand_in)[content.__name__] = content
        modules.setdefault(stand_in.__name__, stand_in)


def change_imports(plan: RunPlan) -> None:
    """Have packages of ALONE run when they are needed, and transformers ask for less; to be called before torch is
    imported."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path) or not _is_known("torch", TORCH):
        return
    marks = Marks()
    waiting = {name: Waiting(alone) for name, alone in ALONE.items()}
    waiting["torch._dynamo"] = Waiting(ALONE["torch._dynamo"], has=marks.names, runs=marks.tell)
    changes: dict[str, Change] = {}
    if _is_known("transformers", TRANSFORMERS):
        # A user's function may want from transformers what a rank never does.
        has_less = not has_own_code(plan)
        changes["transformers.utils.import_utils"] = partial(_quicken, has_less=has_less)
        if has_less:
            changes["peft.tuners.tuners_utils"] = _without_tensors
    sys.meta_path.insert(0, Finder(changes, waiting))


def has_own_code(plan: RunPlan) -> bool:
    """Whether a function of the user's runs in a rank."""
    return plan.config.loss.function is not None or ":" in plan.config.dataset.format


def _is_known(name: str, versions: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
    return found is not None and versions[0] <= (int(found[1]), int(found[2])) <= versions[1]


class Marks:
    """What says how torch's compiler is to treat a function, noted until it is there to be told."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, Any]] = []
        self._compiler: ModuleType | None = None  # once it has run

    def names(self, module: ModuleType) -> Mapping[str, Any]:
        """Those that transformers and torch's optimizers use, as torch._dynamo has them."""
        self._module = module
        marks = {name: partial(self._note, name) for name in ("allow_in_graph", "assume_constant_result")}
        return {**marks, "disable": self._disable, "graph_break": lambda *args, **kwargs: None}

    def tell(self, module: ModuleType) -> None:
        """Tell the compiler, which is there now."""
        self._compiler = module
        for name, function in self._noted:
            getattr(module, name)(function)

    def _note(self, name: str, function: Any) -> Any:
        if self._compiler is not None:
            return getattr(self._compiler, name)(function)
        self._noted.append((name, function))
        return function

    def _disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return partial(self._disable, recursive=recursive, **options)
        if self._compiler is not None or not isinstance(function, FunctionType):
            getattr(self._module, "__all__")  # noqa: B009 - it runs for that
            return self._module.disable(function, recursive, **options)
        made: list[Any] = []

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._compiler is None:  # nothing is compiled, and this neither
                return function(*args, **kwargs)
            if not made:
                made.append(self._compiler.disable(function, recursive, **options))
            return made[0](*args, **kwargs)

        return call


def _quicken(loader: Loader, *, has_less: bool) -> None:
    """transformers.utils.import_utils looks at all that is installed and reads the names of all models: both come from
    files that an earlier start has left.

    `has_less`: transformers seems to run on a torch without distributed tensors and flex attention, which it supports;
    importing those takes longer than all models.
    """
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        whose = metadata.packages_distributions
        metadata.packages_distributions = lambda: _kept("packages", _installed(), whose, _lists)
        try:
            execute(module)
        finally:
            metadata.packages_distributions = whose
        names, package = vars(module), Path(str(module.__file__)).parents[1]
        names["define_import_structure"] = partial(_structure, names["define_import_structure"], package)
        if has_less:
            names.update(dict.fromkeys(NOT_THERE, cache(lambda: False)))

    vars(loader)["exec_module"] = exec_module


def _without_tensors(loader: Loader) -> None:
    """peft.tuners.tuners_utils asks whether weights are distributed tensors, and expects transformers to have imported
    these."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        vars(module)["_torch_supports_distributed"] = False

    vars(loader)["exec_module"] = exec_module


def _structure(real: Callable[..., Any], package: Path, path: Any, prefix: str | None = None) -> Any:
    """Of transformers: the names that its files have, by the packages that they need. `path`: a folder or a file in
    it."""
    folder, record = Path(path), [*package.parent.glob("transformers-*.dist-info/RECORD")]
    folder = folder.parent if folder.suffix == ".py" else folder
    if folder != package / "models" or len(record) != 1:
        return real(path, prefix)
    mark = (str(record[0]), record[0].stat().st_mtime_ns, prefix)

    def packed() -> Any:
        return [
            [sorted(needs), {k: sorted(v) for k, v in files.items()}] for needs, files in real(path, prefix).items()
        ]

    def unpacked(found: Any) -> Any:
        return {frozenset(needs): {k: set(v) for k, v in files.items()} for needs, files in found}

    return _kept("names", mark, packed, unpacked)


def _installed() -> Any:
    """Folders of metadata, which carry names and versions, on the search path."""
    found = []
    for entry in sys.path:
        with suppress(OSError):
            found.append((entry, sorted(name for name in os.listdir(entry or ".") if name.endswith("-info"))))
    return found


def _lists(found: Any) -> dict[str, list[str]]:
    return {name: list(values) for name, values in found.items()}


def _kept(name: str, mark: Any, make: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    """What `make` gives, through `read`; from a file of an earlier start with the same mark, if there is one."""
    key = hashlib.sha256(repr((mark, sys.version_info)).encode()).hexdigest()[:16]
    file = cache_dir().parent / "imports" / f"{name}-{key}.json"
    with suppress(OSError, ValueError, TypeError, AttributeError):  # none, or not what a start has left
        return read(json.loads(file.read_bytes()))
    made = make()
    with suppress(OSError):
        write_atomic(file, json.dumps(made))
        for old in sorted(file.parent.glob(f"{name}-*.json"), key=os.path.getmtime)[:-KEPT]:
            old.unlink(missing_ok=True)  # of environments that are no more
    return read(made)


def bring_back(modules: dict[str, Any] = sys.modules) -> None:
    """Let them be installed again, for code that is not ours."""
    for name in (*NEVER, *WITHOUT_BITS):
        if name in modules and modules[name] is None:
            del modules[name]


def pause_collection() -> None:
    """Collect no garbage while a rank starts: imports make millions of objects that stay, each looked at many times."""
    gc.disable()


def resume_collection() -> None:
    """Collect garbage again, of what comes from here on: what the start has made is never looked at."""
    gc.freeze()
    gc.enable()
