"""Versions of packages that are known to go wrong here: a table, a row for each, with where it is known from.

Pure: `launcher.running` asks each host for its versions, and calls `known_bad` with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.families import family_of
from launcher.planning.consistency import uses_lora
from launcher.planning.fabric import version_of
from launcher.spec import RunPlan

NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
HELD = "0.19.8"  # the DeepSpeed that the tests hold


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """Versions from `since` to below `until` (None: no end) of one of `packages`, in a run that is as `when` says."""

    packages: tuple[str, ...]
    text: str
    source: str
    install: str  # what to type; {python} is the host's interpreter
    since: str = "0"
    until: str | None = None
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unless: tuple[tuple[str, ...], str] | None = None  # fine with one of these packages from this version on
    warning: bool = False  # it runs, and is told


TABLE = (
    Bad(
        packages=("transformers",),
        until="4.57",
        when={"model_type": ("qwen3_vl", "qwen3_vl_moe")},
        text="it does not know Qwen3-VL",
        source="1038lab/ComfyUI-QwenVL#30, hiyouga/LLaMA-Factory#10238",
        install='{python} -m pip install "transformers>=5.17,<6"',
    ),
    Bad(
        packages=("transformers",),
        until="5.17",
        text="the trainer calls parts of models as they are named from 5.17 on",
        source="pyproject.toml",
        install='{python} -m pip install "transformers>=5.17,<6"',
    ),
    Bad(
        packages=("deepspeed",),
        since="0.17.6",
        until="0.18.3",
        when={"stage": (2,)},
        text="its ZeRO stage 2 computes wrong gradients",
        source="deepspeedai/DeepSpeed#7718, huggingface/trl#4540",
        install=f"{{python}} -m pip install deepspeed=={HELD}",
    ),
    Bad(
        packages=("deepspeed",),
        until="0.19.3",
        when={"stage": (3,), "lora": (True,), "recomputes": (True,)},
        text="recomputed layers with adapters fail in its ZeRO stage 3",
        source="deepspeedai/DeepSpeed#8130, #8148, huggingface/transformers#47254",
        install=f"{{python}} -m pip install deepspeed=={HELD}",
    ),
    Bad(
        packages=("deepspeed",),
        until=HELD,
        text=f"it passes over keys of {HELD} without a word, the accumulation boundary among them",
        source="pyproject.toml: batch arithmetic, checkpoints and configurations are held to this version",
        install=f"{{python}} -m pip install deepspeed=={HELD}",
    ),
    Bad(
        packages=("deepspeed",),
        since="0.19.9",
        text=f"checkpoints and losses are tested with {HELD} alone",
        source="pyproject.toml",
        install=f"{{python}} -m pip install deepspeed=={HELD}",
        warning=True,
    ),
    Bad(
        packages=("torch",),
        until="2.9",
        text="the trainer is written for 2.9 and newer",
        source="pyproject.toml",
        install='{python} -m pip install "torch>=2.10"',
    ),
    Bad(
        packages=("torch",),
        since="2.9",
        until="2.9.1",
        when={"device": ("cuda",), "sees": (True,), "precision": ("bf16", "fp16")},
        text="the Conv3d that cuts pictures into patches takes 10 to 20 times its time and several times its memory",
        source="pytorch/pytorch#166643, #174051, QwenLM/Qwen3-VL#1701",
        install='{python} -m pip install "torch>=2.10" torchvision',
        warning=True,
    ),
    Bad(
        packages=("torch",),
        since="2.9.1",
        until="2.10",
        when={"device": ("cuda",), "sees": (True,), "precision": ("bf16", "fp16")},
        unless=(CUDNN, "9.15"),
        text="with cuDNN below 9.15 the Conv3d that cuts pictures into patches takes 10 to 20 times its time and "
        "several times its memory",
        source="pytorch/pytorch#166643, #174051, nvidia-cosmos/cosmos-transfer2.5#227",
        install='{python} -m pip install "torch>=2.10" torchvision',
        warning=True,
    ),
    Bad(
        packages=NCCL,
        since="2.27",
        until="2.28.9",
        when={"device": ("cuda",), "several": (True,)},
        text="it leaves NVLink SHARP without a word where that fails, and can hang when it fails on some ranks only",
        source="NVIDIA/nccl#1788, pytorch/pytorch#177472; release notes of 2.28.9 and 2.29",
        install='{python} -m pip install "torch>=2.11"   (brings a newer NCCL)',
        warning=True,
    ),
    Bad(
        packages=("peft",),
        until="0.17",
        when={"lora": (True,)},
        text="adapters of fused experts and their merging are those of 0.17 and newer",
        source="pyproject.toml",
        install='{python} -m pip install "peft>=0.17"',
    ),
    Bad(
        packages=("bitsandbytes",),
        until="0.48",
        text="weights of 4 bits and moments of 8 are those of 0.48 and newer",
        source="pyproject.toml",
        install='{python} -m pip install "bitsandbytes>=0.48"',
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What one package of a host means for a run."""

    text: str
    tries: tuple[str, ...]
    warning: bool


def known_bad(plan: RunPlan, versions: Mapping[str, str], python: str = "python") -> Iterator[Verdict]:
    """Rows that hold for the packages of one host; of each package the first problem, and every warning."""
    uses = _uses(plan)
    failed: set[str] = set()
    for row in TABLE:
        for package in row.packages:
            version = versions.get(package)
            if version is None or package in failed or not _within(version, row):
                continue
            fits = all(uses[name] in values for name, values in row.when.items())
            if fits and not _excused(row, versions):
                failed |= set() if row.warning else {package}
                text = f"{package} {version}: {row.text} ({row.source})"
                yield Verdict(text=text, tries=(row.install.format(python=python),), warning=row.warning)


def _uses(plan: RunPlan) -> dict[str, Any]:
    return {
        "device": plan.device,
        "precision": plan.precision,
        "several": plan.world_size > 1,
        "stage": plan.deepspeed.get("zero_optimization", {}).get("stage", 0),
        "lora": uses_lora(plan.config.tune),
        "recomputes": plan.checkpointed_layers > 0,
        "model_type": plan.arch.get("model_type"),
        "sees": family_of(plan.config.model, plan.arch).sees,
    }


def _excused(row: Bad, versions: Mapping[str, str]) -> bool:
    if row.unless is None:
        return False
    packages, enough = row.unless
    return any(_reaches(versions[name], enough) for name in packages if name in versions)


def _within(version: str, row: Bad) -> bool:
    return _reaches(version, row.since) and (row.until is None or not _reaches(version, row.until))


def _reaches(version: str, other: str) -> bool:
    """Whether a version is that or newer; one without a number is neither old nor new."""
    return (version_of(version) or ()) >= (version_of(other) or ())
