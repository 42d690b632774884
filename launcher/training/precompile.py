"""`python -m launcher.training kernels --plan PLAN`: compile the Triton kernels of a plan's steps, before a rank starts
them. A rank begins this beside its imports; what is compiled lies in Triton's cache, where the ranks of a host find it.

Triton compiles a kernel when it is first started, one after another, in Python for the most part. Here a step in small
runs on torch's meta device and only notes what it would start (Triton's jit_cache_hook); processes compile it side by
side (JITFunction.preload). Written against Triton 3.6 to 3.8; what another one refuses is compiled when it is started.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.kernels import without_triton
from launcher.spec import RunPlan
from launcher.training.rankstatus import die_with_parent

MOST = 16  # processes


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton function and, in Triton's own words, how it is to be specialised."""

    function: Any
    data: str


class Aimed:
    """Stands for Triton's driver where nothing runs: kernels are compiled for `target`."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        """Of the only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Of the only one."""
        return 0

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return self._target


def aim(target: Any) -> None:
    """Have Triton compile for `target` in this process, which starts no kernel from here on."""
    from triton.runtime import driver

    driver.set_active(Aimed(target))


@contextmanager
def noted(target: Any) -> Iterator[list[Kernel]]:
    """The kernels that are started meanwhile, each specialisation once; none of them is compiled or runs."""
    from triton import knobs

    found: dict[tuple[str, str], Kernel] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # Triton's names
        kernel = Kernel(fn.jit_function, compile["specialization_data"])
        found.setdefault((f"{fn.module}.{fn.name}", kernel.data), kernel)
        return True

    kernels: list[Kernel] = []
    aim(target)
    knobs.runtime.jit_cache_hook = note
    try:
        yield kernels
    finally:
        knobs.runtime.jit_cache_hook = None
        kernels += found.values()


def kernels_of(plan: RunPlan, target: Any) -> list[Kernel]:
    """Those that a step of a plan starts; none in float32, which no kernel of ours takes."""
    import torch

    from launcher.training.rehearsal import FORMATS, Rehearsal, attend_nothing

    if plan.precision not in FORMATS:
        return []
    with noted(target) as kernels:
        Rehearsal(plan, torch.device("meta")).everything(attend_nothing)
    return kernels


_TO_DO: list[Kernel] = []  # what processes find when they are forked: kernels cannot be sent to them


def compile_all(kernels: list[Kernel], processes: int, *, starters: bool = True) -> list[str]:
    """Compile into Triton's cache, in as many processes; what went wrong, a line for each kernel.

    `starters`: what starts them too, which needs a driver.
    """
    _TO_DO[:] = kernels
    work = [*((number, starters) for number in range(len(kernels))), *([(-1, True)] if starters else [])]
    # They end with this process, however it ends: one that goes on would tell at length of a pipe without a reader.
    with multiprocessing.get_context("fork").Pool(min(processes, len(work), MOST), die_with_parent) as pool:
        said = pool.starmap(_compile, reversed(work), chunksize=1)
    return [text for text in said if text]


def _compile(number: int, starter: bool) -> str:
    """One of what is to do, or, for -1, what Triton itself needs of CUDA."""
    from triton.backends.nvidia import driver

    try:
        if number < 0:
            driver.CudaUtils()
            return ""
        compiled = _TO_DO[number].function.preload(_TO_DO[number].data)
        if starter and hasattr(driver, "make_launcher"):
            # Up to Triton 3.6 a C compiler makes a function for each signature, which takes as long as the kernel.
            driver.CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # whatever another version does not know: it is made when it is needed
        what = "CUDA" if number < 0 else _TO_DO[number].function.__name__
        return f"{what}: {type(error).__name__}: {error}"
    return ""


def main(plan: RunPlan) -> int:
    """Compile what a plan needs on this machine's first GPU, and say so."""
    import torch
    from triton.backends.compiler import GPUTarget

    begun, mark = time.monotonic(), mark_of(plan)
    try:
        major, minor = torch.cuda.get_device_capability(0)
        if without_triton((major, minor)) is not None:
            return 0
        kernels = kernels_of(plan, GPUTarget("cuda", 10 * major + minor, 32))
        failed = compile_all(kernels, len(os.sched_getaffinity(0)))
    finally:
        # What failed too: the first step compiles it, and then it lies there as well.
        with suppress(OSError):  # a folder that cannot be written holds no kernel either, and each has told so
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    print(f"kernels: {len(kernels)} compiled in {time.monotonic() - begun:.2f} s beside the start", flush=True)
    for text in failed:
        print(f"kernels: left to the first step: {text}", flush=True)
    return 0


def mark_of(plan: RunPlan) -> Path:
    """A file beside compiled kernels: those of plans like this one have been compiled. No torch."""
    config, found = plan.config, hashlib.sha256()
    sizes = (plan.arch, plan.precision, plan.gpu_kind, config.tune, config.task.name, config.train.kernels)
    found.update(repr((sizes, plan.deepspeed.get("zero_optimization", {}).get("stage"))).encode())
    found.update(repr([metadata.version(name) for name in ("torch", "triton")]).encode())
    package = Path(__file__).parents[1]
    for file in (*sorted((package / "training").rglob("*.py")), package / "kernels.py", package / "families.py"):
        found.update(file.read_bytes())
    return _cache() / f"launcher-{found.hexdigest()[:16]}"


def _cache() -> Path:
    """Where Triton keeps what it has compiled (triton/knobs.py)."""
    home = os.environ.get("TRITON_HOME", "").strip() or "~"
    return Path(os.path.expanduser(os.environ.get("TRITON_CACHE_DIR", "").strip() or f"{home}/.triton/cache"))
