"""What tests/bench/scaling.py runs: the work of each GPU stays the same whatever their number."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Ranks of hosts whose GPUs others share: a program that uses NVLink multicast can put those out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
COMMON = {
    **{"model.weights": "random", "dataset": "jsonl", "optim.warmup_steps": 1, "eval.every_steps": "null"},
    **{"checkpoint.at_end": "false", "checkpoint.keep_best": "false", "checkpoint.export": "false"},
    **{"checkpoint.keep_last": 1, "logging.monitor_every_s": "null"},
}
RERANK = {"model": "qwen3_vl_reranker_8b", "loss": "listwise"}
SFT = {"task": "sft", "loss": "cross_entropy"}
LORA, FULL = {"tune": "lora", "tune.r": 8}, {"tune": "full"}
LORA_SCALES, FULL_SCALES = 0.95, 0.90  # of the goals: tokens/s a GPU beside those of the fewest GPUs


@dataclass(frozen=True, kw_only=True)
class Work:
    """A kind of run; of `zeros` the first that fits is taken."""

    name: str
    data: str  # of tests.bench.workloads
    unit: str  # groups | tokens, whose number a second is told
    keys: dict[str, Any]
    zeros: tuple[str, ...]
    rows: int  # a GPU and optimizer step
    steps: int = 5
    start_s: float = 30.0  # from the command to the first step, about
    limit_s: float = 150.0
    scales: float = LORA_SCALES
    goals: dict[int, float] = field(default_factory=dict)  # GPUs -> units a second of them all

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is written: that of full tuning is larger than many a disk."""
        return bool(self.keys["tune"] != "full")

    @property
    def lengths(self) -> tuple[str, str]:
        """Works of which these are equal have rows of the same lengths."""
        return self.keys["model"], self.data

    def words(self, gpus: int, zero: str, rows: Path) -> list[str]:
        """Of the command line, but for the run's folder and what tells which GPUs."""
        save = self.steps - 1 if self.saves else "null"
        keys = COMMON | self.keys | {"zero": zero, "dataset.train": rows, "train.max_steps": self.steps}
        keys |= {"batch.global_size": self.rows * gpus, "checkpoint.every_steps": save}
        if gpus > 1:
            keys |= {f"env.set.{name}": f"'{value}'" for name, value in NO_MULTICAST.items()}
        return [f"{key}={value}" for key, value in keys.items()]

    def small(self) -> Work:
        """The same on the tiny model, to try the script on a CPU."""
        keys = self.keys | {"model": "tiny", "precision": "fp32"}
        return replace(self, keys=keys, zeros=self.zeros[:1], rows=2, steps=4, start_s=20.0, goals={})


def _reranker(name: str, second: float) -> Work:
    """`second`: groups of one GPU, a goal."""
    return Work(
        name=f"reranker 8B LoRA, {name}",
        data=name,
        unit="groups",
        keys=RERANK | LORA,
        zeros=("stage1",),
        rows=16,
        steps=6,
        goals={1: second},
    )


def _chat(name: str, model: str, tune: dict[str, Any], *zeros: str, **fields: Any) -> Work:
    scales = FULL_SCALES if tune == FULL else LORA_SCALES
    keys = {"model": model} | SFT | tune
    return Work(name=name, data="chat", unit="tokens", keys=keys, zeros=zeros, scales=scales, **fields)


LARGE: dict[str, Any] = {"start_s": 60.0, "limit_s": 240.0, "steps": 4}
WORKS: dict[str, Work] = {
    "text": _reranker("text", 6.85),
    "page": _reranker("page", 3.70),
    "imgq": _reranker("imgq", 8.47),
    "sft": _chat("SFT 8B LoRA, ZeRO-2", "qwen3_vl_8b", LORA, "stage2", rows=16, goals={2: 34_000}),
    "full": _chat("SFT 8B full, ZeRO-3", "qwen3_vl_8b", FULL, "stage3", rows=8, goals={2: 24_000}),
    "32b": _chat("SFT 32B LoRA, ZeRO-3", "qwen3_vl_32b", LORA, "stage3", rows=4, start_s=40.0),
    "72b": _chat("SFT 72B LoRA, ZeRO-3", "qwen2_5_vl_72b", LORA, "stage3", rows=4, goals={2: 2_900}, **LARGE),
    "72b-full": _chat("SFT 72B full, ZeRO-3", "qwen2_5_vl_72b", FULL, "stage3", "stage3_bf16_states", rows=4, **LARGE),
}
