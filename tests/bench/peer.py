"""ms-swift as the peer of a comparison: its rows, its command line, what its log says. See tests/bench/against_peer.py.

A setting is written as words joined by +, in any order:

    again   recompute all layers (its default)          keep    keep all activations
    liger   Liger kernels (RMSNorm, rotary, loss)       plain   transformers' own (the default)
    bf16    adapters in bf16, its --lora_dtype          m1 m2 m4 ...  rows of a micro-batch

Without a word on them: activations are recomputed, adapters are float32, one row a micro-batch. The rows of an
optimizer step are the same in all settings: gradients are accumulated over them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.training.schedule import Order

TYPES = {"rerank": "qwen3_vl_reranker", "sft": "qwen3_vl"}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The switches of the peer that change its speed and leave its loss as it is."""

    keeps: bool = False  # activations
    liger: bool = False
    bf16: bool = False  # adapters
    micro: int = 1

    def __str__(self) -> str:
        words = ["keep" if self.keeps else "again", "liger" if self.liger else "plain", *(["bf16"] * self.bf16)]
        return "+".join([*words, f"m{self.micro}"])


def read_setting(text: str) -> Setting:
    """The inverse of str(setting), for any order and choice of words.

    >>> str(read_setting("liger+m2+keep"))
    'keep+liger+m2'
    """
    words = set(text.split("+"))
    sizes = [word for word in words if word[:1] == "m" and word[1:].isdigit()]
    unknown = words - {"again", "keep", "liger", "plain", "bf16", *sizes}
    if unknown or len(sizes) > 1:
        raise ValueError(f"{text!r}: a setting is made of again, keep, liger, plain, bf16, and one of m1 m2 m4")
    micro = int(sizes[0][1:]) if sizes else 1
    return Setting(keeps="keep" in words, liger="liger" in words, bf16="bf16" in words, micro=micro)


def write_rows(ours: Path, out: Path, *, groups: int, steps: int, seed: int) -> None:
    """The rows of our file as ms-swift reads them, in the order in which our run draws them."""
    rows = [json.loads(line) for line in ours.read_text(encoding="utf-8").splitlines()]
    order = Order(len(rows), groups, seed)
    drawn = [rows[n] for step in range(steps) for n in order.batch(step)]
    out.write_text("".join(f"{json.dumps(_row(row, ours.parent))}\n" for row in drawn), encoding="utf-8")


def _row(row: Row, folder: Path) -> Row:
    """A chat is the same in both. Pictures are named by their whole path."""
    if "messages" in row:
        return row
    documents = {"positive": row["positives"], "negative": row["negatives"]}
    found: Row = {"messages": [_turn("user", row["query"])], "images": _images(row["query"], folder)}
    for side, contents in documents.items():
        found[f"{side}_messages"] = [[_turn("assistant", content)] for content in contents]
        found[f"{side}_images"] = [_images(content, folder) for content in contents]
    return found


def _turn(role: str, content: Any) -> dict[str, str]:
    return {"role": role, "content": content if isinstance(content, str) else "<image>"}


def _images(content: Any, folder: Path) -> list[str]:
    return [] if isinstance(content, str) else [str((folder / content["image"]).resolve())]


def arguments(
    setting: Setting, *, task: str, model: Path, rows: Path, out: Path, groups: int, steps: int, gpus: int, lr: float
) -> list[str]:
    """Options of `swift sft` for `groups` rows an optimizer step, over all GPUs.

    Rows stay in order, and AdamW's numbers are ours: without that its loss could not be compared.
    """
    if groups % (setting.micro * gpus):
        raise ValueError(f"{groups} rows a step do not divide into {gpus} x micro-batches of {setting.micro}")
    options: dict[str, Any] = {
        **{"model": model, "model_type": TYPES[task], "check_model": "false", "torch_dtype": "bfloat16"},
        **{"dataset": rows, "split_dataset_ratio": 0, "strict": "true", "max_length": 4096},
        **{"dataset_shuffle": "false", "train_dataloader_shuffle": "false", "dataloader_num_workers": 8},
        **{"tuner_type": "lora", "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"},
        **{"freeze_vit": "true", "freeze_aligner": "true", "seed": 42, "max_steps": steps},
        **{"per_device_train_batch_size": setting.micro},
        **{"gradient_accumulation_steps": groups // (setting.micro * gpus)},
        **{"learning_rate": lr, "lr_scheduler_type": "constant", "warmup_ratio": 0, "max_grad_norm": 1},
        **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0},
        **{"gradient_checkpointing": _said(not setting.keeps), "use_liger_kernel": _said(setting.liger)},
        **{"logging_steps": 1, "eval_strategy": "no", "save_strategy": "no", "report_to": "none"},
        **{"add_version": "false", "output_dir": out},
    }
    if task == "rerank":
        options |= {"task_type": "generative_reranker", "loss_type": "listwise_reranker"}
    if setting.bf16:
        options["lora_dtype"] = "bfloat16"
    if gpus > 1:
        options["deepspeed"] = "zero2"
    return [str(word) for key, value in options.items() for word in (f"--{key}", value)]


ON_GPU = ["--attn_impl", "flash_attn", "--padding_free", "true"]
ON_CPU = ["--attn_impl", "sdpa", "--use_cpu", "true", "--torch_dtype", "float32"]


def _said(value: bool) -> str:
    return "true" if value else "false"


def environment(documents: int, cache: Path, path: Iterable[str], *, on_gpu: bool) -> dict[str, str]:
    """Variables of its processes: all documents of a row, no network; `path` goes before PYTHONPATH."""
    found = {f"{name}_OFFLINE": "1" for name in ("HF_HUB", "TRANSFORMERS", "HF_DATASETS")}
    found |= {"MAX_POSITIVE_SAMPLES": "1", "MAX_NEGATIVE_SAMPLES": str(documents - 1), "IMAGE_MAX_TOKEN_NUM": "1280"}
    found |= {"MODELSCOPE_CACHE": str(cache), "HF_HOME": str(cache), "TOKENIZERS_PARALLELISM": "false"}
    found |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, **found, "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])])}


def sums(setting: Setting, *, task: str, groups: int, gpus: int) -> int:
    """By how much the loss of a step is too large: the reranker's trainer of 4.6.0 has a loss function of its own, for
    which neither it nor transformers divides by the accumulated micro-batches."""
    return groups // (setting.micro * gpus) if task == "rerank" else 1


@dataclass(frozen=True, kw_only=True)
class Log:
    """What its log tells, step by step."""

    losses: list[float]
    grad_norms: list[float]
    step_s: list[float]
    reserved_gib: float | None  # peak


def read_log(file: Path, summed: int = 1) -> Log:
    """Its seconds are means since the first step began; those of each step follow from their differences. `summed`:
    micro-batches whose losses and gradients it adds up for a step where their mean is meant (see `sums`)."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    steps = [line for line in lines if "loss" in line and "train_speed(s/it)" in line]
    whole = [line["train_speed(s/it)"] * number for number, line in enumerate(steps, 1)]
    return Log(
        losses=[float(line["loss"]) / summed for line in steps],
        grad_norms=[float(line.get("grad_norm", "nan")) / summed for line in steps],
        step_s=[after - before for before, after in zip([0.0, *whole], whole, strict=False)],
        reserved_gib=max((float(line["memory(GiB)"]) for line in steps if "memory(GiB)" in line), default=None),
    )
