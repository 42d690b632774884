"""What a rank's first step would wait for, made while the rank still loads its model: kernels, handles, libraries.

Two helpers. A process of its own, one a host, compiles Triton's kernels (launcher.training.precompile); it begins with
the rank and imports on a processor of its own. Then a thread of the rank makes a step in small
(launcher.training.rehearsal): CUDA's context, cuBLAS, cuDNN and its first graphs, kernels loaded. What fails in either
is told in the rank's log and left to the first step. Neither changes a result: nothing here draws random numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.attention_needs import PADDED
from launcher.kernels import without_triton
from launcher.spec import RunPlan
from launcher.training.precompile import mark_of

if TYPE_CHECKING:
    import torch

TICK_S = 1.0  # between two signs of progress while the first step waits
COMPILING_S = 120.0  # what takes longer is left to the first step
DRIVER = Path("/dev/nvidiactl")
ELSEWHERE_S, POLL_S = 30.0, 0.05  # of another rank, which may have died


def start_compiling(plan: RunPlan, plan_file: str, local_rank: int) -> subprocess.Popen[bytes] | None:
    """Have the kernels of a plan compiled, by a host's first rank; None where there is nothing to do. No torch."""
    if plan.device != "cuda" or plan.precision == "fp32" or local_rank > 0 or not DRIVER.exists():
        return None
    try:
        if mark_of(plan).exists():
            return None
        argv = [sys.executable, "-m", "launcher.training", "kernels", "--plan", plan_file]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except Exception as error:  # no package of this name, no process: the first step compiles
        print(f"kernels are not compiled ahead: {type(error).__name__}: {error}", flush=True)
        return None


class Warmup:
    """The thread; made with `start`."""

    def __init__(self, work: Callable[[], str]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True, name="warmup")

    @classmethod
    def start(cls, plan: RunPlan, device: torch.device, compiling: subprocess.Popen[bytes] | None) -> Warmup:
        """Begin; does nothing on a CPU.

        To be called when torch is imported: what the thread needs is imported here, since two threads that import
        modules which import each other may see half of them.
        """
        warmup = cls(lambda: "")
        if device.type == "cuda":
            import launcher.training.rehearsal  # noqa: F401
            from launcher.training import attention_kernels, token_loss_kernels, vision_kernels  # noqa: F401
            from launcher.training.fused import kernels  # noqa: F401

            warmup = cls(lambda: _rehearse(plan, device, compiling))
        warmup._thread.start()
        return warmup

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """Until the thread has ended; `beat` is called meanwhile, as long as what it does may take.

        Before a step, which uses the same handles, and before ZeRO-3 loads a model: DeepSpeed then gives every new
        tensor another type.
        """
        end = time.monotonic() + COMPILING_S + ELSEWHERE_S  # a rank that is stuck in the driver must count as hung
        while self._thread.is_alive():
            self._thread.join(TICK_S)
            if time.monotonic() < end:
                beat()

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            told = self._work()
        except Exception as error:  # as text: the error itself would keep what it was working on
            told = f"failed, and the first step does its work: {type(error).__name__}: {error}"
        if told:
            print(f"warm-up: {told} ({time.monotonic() - begun:.2f} s beside the start)", flush=True)


def _rehearse(plan: RunPlan, device: torch.device, compiling: subprocess.Popen[bytes] | None) -> str:
    """Both halves, in the thread; what came of it."""
    import torch

    from launcher.training import attention
    from launcher.training.rehearsal import FORMATS, Rehearsal

    # Numbers that must repeat need a setting of cuBLAS that is made before its first use (runtime.seed_everything).
    if plan.precision not in FORMATS or without_triton(torch.cuda.get_device_capability(device)) is not None:
        return ""
    if plan.config.train.deterministic:
        _wait_for_kernels(plan, compiling)
        return ""
    torch.cuda.set_device(device)  # of this thread
    begun = time.monotonic()
    kernel, _ = attention.choose_kernel(plan.config.attention.name, device, FORMATS[plan.precision])
    rehearsal = Rehearsal(plan, device, padded=kernel in PADDED)
    rehearsal.attention(attention.KERNELS[kernel])
    torch.cuda.synchronize(device)
    attended = time.monotonic()
    _wait_for_kernels(plan, compiling)
    compiled = time.monotonic()
    rehearsal.everything(attention.KERNELS[kernel])
    torch.cuda.synchronize(device)
    spans = (attended - begun, compiled - attended, time.monotonic() - compiled)
    return "CUDA and attention {:.2f} s, waiting for kernels {:.2f} s, all others {:.2f} s".format(*spans)


def _wait_for_kernels(plan: RunPlan, compiling: subprocess.Popen[bytes] | None) -> None:
    """Until a host's first rank has had them compiled; the others look for its mark."""
    if compiling is not None:
        compiling.wait(COMPILING_S)
    elif int(os.environ["LOCAL_RANK"]) > 0 and DRIVER.exists():
        mark, end = mark_of(plan), time.monotonic() + ELSEWHERE_S
        while not mark.exists() and time.monotonic() < end:
            time.sleep(POLL_S)


def local_device(plan: RunPlan) -> torch.device:
    """This rank's."""
    import torch

    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if plan.device == "cuda" else torch.device("cpu")
