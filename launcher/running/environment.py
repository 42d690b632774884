"""What a bug report needs: versions, machine, GPUs and the variables that change how a run behaves."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import launcher
from launcher.errors import ExitCode
from launcher.planning.secrets import masked
from launcher.running.facts import cpu_count, ram_bytes
from launcher.streams import printable

PACKAGES = (
    *("torch", "torchvision", "deepspeed", "transformers", "peft", "accelerate", "datasets", "tokenizers"),
    *(
        "safetensors",
        "flash-attn",
        "flash-attn-3",
        "flash-attn-4",
        "nvidia-cudnn-frontend",
        "bitsandbytes",
        "liger-kernel",
        "triton",
    ),
    *("hydra-core", "omegaconf", "numpy", "pyarrow", "pillow", "nvidia-ml-py"),
    *("tensorboard", "wandb", "mlflow", "mlflow-skinny", "swanlab"),
)
LIBRARIES = re.compile(r"nvidia-(nccl|cudnn|cuda-runtime)(-cu\d+)?$")  # in the version that torch brought
# NVIDIA_REQUIRE_CUDA and its like are an image's own business, and long.
VARIABLES = re.compile(
    r"(ACCELERATE|CUDA|DS|GLOO|HF|MASTER|NCCL|OMP|PYTORCH|SLURM|TORCH|TRANSFORMERS)_\w+|NVIDIA_VISIBLE_DEVICES"
)
METADATA = re.compile(r"([^-]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")
VERSIONS = (
    "import json, platform; from importlib import metadata; "
    "found = {d.metadata['Name'] or '': d.version for d in metadata.distributions()}; "
    "print(json.dumps([platform.python_version(), found]))"
)
SMI = "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader"


def main(argv: Sequence[str]) -> int:
    """Print the environment, one `name  value` a line, or as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m launcher env", description="Versions and machine, to paste into a bug report."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(list(argv))
    found = describe_environment()
    if options.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
    return ExitCode.OK


def describe_environment(python: str | None = None) -> dict[str, str]:
    """Name -> value, in the order to show; secrets are masked. Imports none of the packages it names.

    The packages are those of the interpreter `python`, by default of this one.
    """
    commit = _commit(Path(__file__).resolve().parents[2])
    own = python is None or python == sys.executable
    version, packages = _installed() if own else _asked(str(python))
    return {
        "launcher": launcher.__version__ + (f" ({commit})" if commit else ""),
        "python": f"{version} ({python or sys.executable})",
        **_machine(),
        **_chosen(packages),
        **_variables(),
    }


def _commit(folder: Path) -> str:
    """Commit of a checkout, and whether files differ from it; empty for an installed package."""
    if not (folder / ".git").exists():
        return ""
    commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD").strip()
    changed = len(_output("git", "-C", str(folder), "status", "--porcelain").splitlines())
    files = f", {changed} {'file' if changed == 1 else 'files'} changed" if changed else ""
    return f"commit {commit or 'unknown'}{files}"


def _machine() -> dict[str, str]:
    ram = ram_bytes()
    shown = "memory unknown" if ram is None else f"{ram / 2**30:.1f} GiB memory"
    found = {"system": f"{platform.platform()}, {cpu_count()} cores, {shown}"}
    gpus = [line.strip() for line in _output(*SMI.split()).splitlines() if line.count(",") == 2]
    for number, gpu in enumerate(gpus):
        name, memory, driver = (word.strip() for word in gpu.split(","))
        found[f"gpu {number}"] = f"{name}, {memory}, driver {driver}"
    if not gpus:
        found["gpu"] = "none that nvidia-smi names" if shutil.which("nvidia-smi") else "none: there is no nvidia-smi"
    return found


def _installed() -> tuple[str, dict[str, str]]:
    # By the names of their metadata folders: reading what is in hundreds of them takes a fifth of a second.
    names = (match for path in sys.path for match in map(METADATA.fullmatch, _listed(path)) if match)
    versions: dict[str, str] = {}
    for match in names:
        versions.setdefault(match[1], match[2])  # the first on the path is imported
    return platform.python_version(), versions


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except OSError:
        return []


def _asked(python: str) -> tuple[str, dict[str, str]]:
    """The same of another interpreter; its version is "unknown" when it does not answer."""
    try:
        version, versions = json.loads(_output(python, "-c", VERSIONS))
    except ValueError:
        return "unknown", {}
    return version, versions


def _chosen(packages: dict[str, str]) -> dict[str, str]:
    versions = {name.lower().replace("_", "-"): version for name, version in packages.items()}
    libraries = sorted(name for name in versions if LIBRARIES.fullmatch(name))
    return {name: versions[name] for name in (*PACKAGES, *libraries) if name in versions}


def _variables() -> dict[str, str]:
    found = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}
    return {name: printable(value, keep="") for name, value in masked(found).items()}


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
