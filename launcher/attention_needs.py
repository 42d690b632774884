"""What each attention kernel that can be asked for needs, as far as that is known before it runs.

Standard library only: planner and ranks ask, so that a plan refuses what a rank would.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)  # compute capabilities
PADDED = ("sdpa", "reference")  # kernels of rows with padding and a mask, which run everywhere


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Of one kernel; all of them take 16-bit numbers on a GPU."""

    since: tuple[int, int] = AMPERE  # the oldest compute capability it runs on
    before: tuple[int, int] | None = None  # the first it runs on no more
    repeats: bool = False  # with train.deterministic=true its gradients are the same every time
    file: str | None = None  # that its package must have; None: PyTorch's own
    install: str = ""  # how


# cuDNN takes sequences of unequal length on Hopper and newer (NVIDIA/cudnn-frontend, test/python: "only supported
# hopper"). flash-attn 3 is built for 8.x and 9.0 (Dao-AILab/flash-attention, hopper/setup.py). flash-attn 4 has no
# backward pass for older than 9.0 (flash_attn/cute/interface.py). Some packages have an option for gradients that
# repeat, which is not used here: PyTorch's kernel has it too. flash-attn-4 lies in a folder of the name of flash-attn,
# so that the folder alone tells nothing.
KERNELS = {
    "cudnn": Needs(
        since=HOPPER, file="cudnn/__init__.py", install="nvidia-cudnn-frontend: pip install nvidia-cudnn-frontend"
    ),
    "flash_attention_4": Needs(
        since=HOPPER, file="flash_attn/cute/interface.py", install="flash-attn-4: pip install flash-attn-4"
    ),
    "flash_attention_3": Needs(
        before=BLACKWELL,
        file="flash_attn_interface.py",
        install="flash-attn 3, built from the folder hopper of its repository",
    ),
    "flash_attention_2": Needs(
        file="flash_attn/__init__.py", install="flash-attn: pip install flash-attn --no-build-isolation"
    ),
    "varlen": Needs(repeats=True),
}


def attention_problem(
    asked: str, *, device: str, precision: str, capability: tuple[int, int] | None, deterministic: bool
) -> Problem | None:
    """Why attention=`asked` cannot compute a run; None where nothing that is known speaks against it.

    `device`: cuda or cpu; `capability`: of the oldest GPU, None where it is not known.
    """
    needs = KERNELS.get(asked)
    if needs is None:  # auto, and what runs everywhere
        return None
    auto = ("attention=auto",)
    if device == "cpu":
        return Problem(f"attention={asked} needs a GPU, and this run uses the CPU", tries=auto)
    if precision == "fp32":
        other = attention_problem(
            asked, device=device, precision="bf16", capability=capability, deterministic=deterministic
        )
        half = ("precision=bf16",) if other is None else ()
        return Problem(f"attention={asked} takes 16-bit numbers, and this run computes in fp32", tries=(*auto, *half))
    if capability is not None and (
        capability < needs.since or (needs.before is not None and capability >= needs.before)
    ):
        most = "" if needs.before is None else f", and below {_shown(needs.before)}"
        text = f"attention={asked} needs compute capability {_shown(needs.since)}{most}; the GPU has"
        return Problem(f"{text} {_shown(capability)}", tries=auto)
    if deterministic and not needs.repeats:
        text = f"attention={asked} with train.deterministic=true: its gradients add up in another order every time"
        return Problem(text, tries=("attention=auto   (takes one that repeats)", "train.deterministic=false"))
    return None


def missing(asked: str) -> str | None:
    """What to install for a kernel, None where it is installed or is PyTorch's."""
    needs = KERNELS.get(asked)
    if needs is None or needs.file is None:
        return None
    spec = importlib.util.find_spec(needs.file.split("/")[0].removesuffix(".py"))
    if spec is None:
        return needs.install
    folders = [Path(folder).parent for folder in spec.submodule_search_locations or ()]
    folders += [Path(spec.origin).parent] if spec.origin and not folders else []
    return None if any((folder / needs.file).is_file() for folder in folders) else needs.install


def missing_problem(asked: str, install: str) -> Problem:
    """That a kernel's package is not installed where ranks run."""
    return Problem(f"attention={asked} needs {install}", tries=("attention=auto   (uses what is there)",))


def module_of(asked: str) -> str | None:
    """The module that a kernel needs, as an import names it; None for PyTorch's own."""
    needs = KERNELS.get(asked)
    if needs is None or needs.file is None:
        return None
    return needs.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _shown(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
