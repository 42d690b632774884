"""Whether one value fits its key: type, allowed values, range. Cross-key checks are in plan.py."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import shlex
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.planning import habits, keys
from launcher.spec import METRICS_OF_TASK

PARTS = ("lora", "full", "frozen")
METRICS = tuple(dict.fromkeys(metric for metrics in METRICS_OF_TASK.values() for metric in metrics))
# What `dataset.format` may name; launcher.training.formats reads them, and a test holds the two equal.
FORMATS = (
    *("auto", "native", "swift", "flagembedding", "sentence_transformers", "mteb", "beir", "colpali", "visrag"),
    *("mmeb", "pairs", "swift_chat", "qwen_chat", "sharegpt", "labelled", "digits"),
)
TRACKERS = ("wandb", "mlflow", "swanlab")
TRANSPORTS = ("local", "ssh", "env", "manual", "slurm", "pdsh")
NCCL_PROFILES = ("auto", "nvlink", "ib", "roce", "efa", "gcp", "tcp", "pcie", "debug")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy, in words that follow 'must be'; `values` are all allowed ones, if few."""

    words: str
    holds: Callable[[Any], bool]
    values: tuple[str, ...] = ()


def _one_of(*values: str) -> Rule:
    return Rule(f"one of {', '.join(values)}", lambda value: value in values, values)


def _from(low: float, high: float = math.inf) -> Rule:
    words = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:.10g}"
    return Rule(words, lambda value: low <= value <= high)


def _below(high: float) -> Rule:
    return Rule(f"from 0 to below {high:g}", lambda value: 0 <= value < high)


_ABOVE_0 = Rule("above 0", lambda value: value > 0)
_COUNT = _from(1)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_gpus(value: Any) -> bool:
    if not isinstance(value, list):
        return _is_count(value)
    slots = all(type(slot) is int and slot >= 0 for slot in value)
    return slots and len(value) > 0 and len(set(value)) == len(value)


def _is_regex(value: Any) -> bool:
    try:
        re.compile(value)
    except re.error:
        return False
    return True


def _is_folder_name(value: str) -> bool:
    # 200: the longest name of a file is 255 bytes, and some room is left for the names that write aside
    fits = 0 < len(value.encode()) <= 200 and value == value.strip() and value.isprintable()
    return fits and value not in (".", "..", "latest") and not set(value) & {"/", "\\"}


def _is_function(value: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", value) is not None


def _is_format(value: str) -> bool:
    return value in FORMATS or _is_function(value)


def _are_sources(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) > 0 and all(isinstance(text, str) and text for text in texts)


def _are_trackers(value: list[str]) -> bool:
    return set(value) <= set(TRACKERS) and len(set(value)) == len(value)


def _is_script_line(value: str) -> bool:
    try:
        return bool(shlex.split(value)) and value.isprintable()
    except ValueError:  # a quote is not closed
        return False


def _are_words(value: list[str]) -> bool:
    return all(word.strip() and word.isprintable() for word in value)


def _are_options(value: list[str]) -> bool:
    """Options, each with its value in it or behind it; any other word would be taken for a script."""
    before = [None, *value]
    takes = (word.startswith("-") or _may_take(last) for last, word in zip(before, value, strict=False))
    return _are_words(value) and all(takes)


def _may_take(word: str | None) -> bool:
    return word is not None and word.startswith("-") and "=" not in word


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", value) is not None
    return True


def _is_interface(value: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}", value) is not None  # the kernel keeps 15 letters


def _are_devices(value: list[str]) -> bool:
    return all(re.fullmatch(r"[A-Za-z0-9_.-]+(:[1-9])?", name) for name in value) and len(set(value)) == len(value)


def _are_patterns(value: list[str]) -> bool:
    return all(re.fullmatch(r"[A-Za-z0-9_*?\[\]!-]+", pattern) for pattern in value)


def _are_ranks(value: list[Any]) -> bool:
    return all(type(rank) is int and rank >= 0 for rank in value) and 0 < len(value) == len(set(value))


RULES: dict[str, Rule] = {
    "nodes": _COUNT,
    "run.name": Rule("the name of one folder, without / and up to 200 bytes (run.dir takes a path)", _is_folder_name),
    "gpus": Rule("a count (gpus=2) or slot numbers from 0, each once (gpus=[0,1])", _is_gpus),
    "model.weights": _one_of("pretrained", "random"),
    "model.min_pixels": _COUNT,
    "model.max_pixels": _COUNT,
    "model.source": _one_of("hf", "modelscope"),
    "dataset.format": Rule(
        f"one of {', '.join(FORMATS)}, or a function of yours as package.module:function", _is_format, FORMATS
    ),
    "dataset.source": _one_of("hf", "modelscope"),
    "dataset.train": Rule("a file, a folder or the name of a hub data set, or a list of them", _are_sources),
    "dataset.eval": Rule("a file, a folder or the name of a hub data set, or a list of them", _are_sources),
    "dataset.weights": Rule("numbers above 0, one for each of dataset.train", lambda v: all(w > 0 for w in v)),
    "dataset.eval_fraction": _below(1),
    "dataset.over_long": _one_of("drop", "shrink"),
    "dataset.max_positives": _COUNT,
    "dataset.max_negatives": _COUNT,
    "dataset.random_negatives": _from(0),
    "dataset.min_pixels": _COUNT,
    "dataset.max_pixels": _COUNT,
    "dataset.max_bad_fraction": _from(0, 1),
    "dataset.video.fps": _ABOVE_0,
    "dataset.video.min_frames": _COUNT,
    "dataset.video.max_frames": _COUNT,
    "dataset.video.max_pixels": _COUNT,
    "dataset.video.total_pixels": _COUNT,
    "dataset.video.segment_s": _ABOVE_0,
    "dataset.video.fuse": _one_of("max", "mean", "top_k", "logistic"),
    "dataset.video.top_k": _COUNT,
    "dataset.max_length": _COUNT,
    "dataset.max_rows": _COUNT,
    "dataset.on_bad": _one_of("error", "skip"),
    "dataset.workers": _COUNT,
    "task.name": _one_of("rerank", "sft", "classify"),
    "loss.name": _one_of("pointwise", "listwise", "pairwise", "distill", "cross_entropy", "custom"),
    "loss.form": _one_of("ranknet", "margin", "margin_mse", "kl"),
    "loss.margin": _ABOVE_0,
    "loss.function": Rule("a function of yours as package.module:function", _is_function),
    "loss.unit": _one_of("document", "group"),
    "loss.temperature": _ABOVE_0,
    "loss.positive_weight": _ABOVE_0,
    "tune.name": _one_of("lora", "full", "qlora"),
    "tune.language": _one_of(*PARTS),
    "tune.vision": _one_of(*PARTS),
    "tune.projector": _one_of(*PARTS),
    "tune.head": _one_of("frozen", "full"),
    "tune.r": _COUNT,
    "tune.lora_alpha": _ABOVE_0,
    "tune.lora_dropout": _below(1),
    "tune.target_modules": Rule("all-linear, qwen, or a regular expression", _is_regex),
    "train.epochs": _ABOVE_0,
    "train.max_steps": _COUNT,
    "train.seed": _from(0, 2**32 - 1),
    "train.max_bad_steps": _COUNT,
    "optim.name": _one_of("adamw", "adamw8bit"),
    **{f"optim.{name}": _ABOVE_0 for name in ("lr", "lr_language", "lr_vision", "lr_projector", "lr_head")},
    "optim.betas": Rule("two numbers from 0 to below 1", lambda v: len(v) == 2 and all(0 <= b < 1 for b in v)),
    "optim.eps": _ABOVE_0,
    "optim.weight_decay": _from(0),
    "optim.max_grad_norm": _ABOVE_0,
    "optim.schedule": _one_of("linear", "cosine", "constant"),
    "optim.warmup_ratio": _from(0, 1),
    "optim.warmup_steps": _from(0),
    "optim.min_lr_ratio": _from(0, 1),
    "batch.global_size": _COUNT,
    "batch.max_tokens": Rule("a whole number of 1 or more, or auto", lambda v: v == "auto" or _is_count(v), ("auto",)),
    "zero.file": Rule("the name of a file in ds_configs/ (zero.config takes a file of your own)", _is_folder_name),
    "train.kernels": _one_of("auto", "fused", "plain"),
    "precision.name": _one_of("auto", "bf16", "fp16", "fp32"),
    "attention.name": _one_of(
        *("auto", "cudnn", "flash_attention_4", "flash_attention_3", "flash_attention_2", "varlen", "sdpa")
    ),
    "memory.gradient_checkpointing": Rule(
        "one of auto, all, none, or a number of layers",
        lambda value: value in ("auto", "all", "none") or re.fullmatch(r"[0-9]+", value) is not None,
        ("auto", "all", "none"),
    ),
    "memory.headroom": _below(1),
    "memory.vision_cache_gib": Rule("0, or 0.25 or more", lambda value: value == 0 or value >= 0.25),  # a slab
    "nccl.name": _one_of(*NCCL_PROFILES),
    "nccl.interface": Rule("the name of one network interface: eth0", _is_interface),
    "nccl.hca": Rule("RDMA devices by their exact names, each once: [mlx5_0,mlx5_3]", _are_devices),
    "nccl.gid_index": _from(0, 255),
    "nccl.traffic_class": _from(0, 255),
    "nccl.service_level": _from(0, 15),
    "nccl.cross_nic": _from(0, 2),
    "cluster.transport": _one_of("auto", *TRANSPORTS),
    "cluster.activate": Rule('a script and its arguments, as a shell splits them: "FILE ARGUMENT"', _is_script_line),
    "cluster.wrap": Rule("words of a command: [docker,exec,-i,NAME]", _are_words),
    "cluster.sync": _one_of("check", "rsync", "none"),
    "cluster.slurm_args": Rule("options for sbatch: [--partition=gpu,--time=08:00:00]", _are_options),
    "cluster.pdsh_args": Rule("options for pdsh: [-f,64]", _are_words),
    "cluster.master_addr": Rule("a host name or an address", _is_address),
    "cluster.master_port": _from(1, 65535),
    "cluster.bind_cores": _one_of("auto", "none"),
    **{f"cluster.{name}": _ABOVE_0 for name in ("connect_s", "stop_grace_s", "lost_contact_s", "hang_s")},
    "env.forward": Rule("names of variables, where * stands for any letters: [HF_*,NCCL_DEBUG]", _are_patterns),
    "restart.max": _from(0),
    "notify.command": Rule("a program and its arguments: [/usr/local/bin/tell,--team,vision]", _are_words),
    "eval.metric": _one_of("auto", *METRICS),
    "eval.patience": _COUNT,
    "eval.every_steps": _COUNT,
    "checkpoint.every_steps": _COUNT,
    "checkpoint.keep_last": _COUNT,
    "logging.every_steps": _COUNT,
    "logging.monitor_every_s": _from(0.5),
    "logging.trackers": Rule("names out of wandb, mlflow, swanlab, each once", _are_trackers, TRACKERS),
    "sweep.metric": _one_of(*METRICS, "eval/loss", "tokens_per_s", "queries_per_s"),
    "profile.name": _one_of("none", "torch", "nsys", "deepspeed", "comms"),
    "profile.first_step": _COUNT,
    "profile.steps": _COUNT,
    "profile.ranks": Rule("ranks from 0, each once: [0]", _are_ranks),
}


def type_problem(key: str, value: Any) -> str | None:
    """What is expected when `value` is not of the type of `key`, None when it is.

    Stricter than OmegaConf, which takes 08 for 8, true for 1 and false for the text False.
    """
    kind = keys.kind_of(key)
    if value is None:
        return None if keys.is_optional(kind) else "a value is needed"
    kind = keys.base(kind)
    if kind is Any:
        return None
    if kind is bool:
        return None if isinstance(value, bool) else "true or false is expected"
    if kind is int:
        return None if type(value) is int else "a whole number is expected"
    if kind is float:
        return None if _is_number(value) else "a finite number is expected"
    if kind is str:
        return None if isinstance(value, str) else "text is expected"
    if typing.get_origin(kind) is list:
        texts = typing.get_args(kind) == (str,)
        fits = isinstance(value, list) and all(isinstance(v, str) if texts else _is_number(v) for v in value)
        return None if fits else f"a list of {'names' if texts else 'numbers'} is expected"
    return None if isinstance(value, dict) else "a mapping {name: value} is expected"


def _numbers(value: Any) -> list[float] | None:
    """The numbers that 0,1 or 0-3 names, or a list of such texts; None when it has others.

    Example:
        >>> _numbers("0,2-4")
        [0, 2, 3, 4]
    """
    texts = [
        text.strip(" []") for one in (value if isinstance(value, list) else [value]) for text in str(one).split(",")
    ]
    found: list[float] = []
    for text in texts:
        span = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", text)
        if span:
            found += range(int(span[1]), int(span[2]) + 1)
        elif re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?", text):
            number = float(text)
            found.append(int(number) if number.is_integer() else number)
        else:
            return None
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _may_be_empty(key: str) -> bool:
    """Whether no text is a text for `key`; as a path it would be the current folder, as a filter no filter."""
    return not keys.is_text(key) or key.startswith(("env.set.", "task."))


def _homeless(value: Any) -> str | None:
    """The user in ~USER/... whose home folder this machine doesn't know; None when it knows, or none is named."""
    for path in value if isinstance(value, list) else [value]:
        if isinstance(path, str) and path.startswith("~") and os.path.expanduser(path) == path:
            return path[1:].partition("/")[0] or None
    return None


def rule_problem(key: str, value: Any) -> str | None:
    """What `value` of the right type must be, None when it is."""
    if isinstance(value, str) and not value.strip() and not _may_be_empty(key):
        return "must not be empty (an unset variable?)"
    if key in keys.PATHS and (lost := _homeless(value)):
        return f"there is no user {lost} here"
    rule = RULES.get(key)
    return None if value is None or rule is None or rule.holds(value) else f"must be {rule.words}"


def repaired(key: str, value: Any) -> Any:
    """A value near `value` that fits `key`, None when there is no obvious one."""
    kind = keys.base(keys.kind_of(key))
    if key == "gpus" or (typing.get_origin(kind) is list and kind != list[str]):
        numbers: Any = _numbers(value)
        if key == "gpus" and numbers and len(numbers) == 1 and not isinstance(value, list):
            numbers = numbers[0]  # a count
        fits = numbers is not None and type_problem(key, numbers) is None and rule_problem(key, numbers) is None
        return numbers if fits else None
    if kind is bool:
        words = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}
        return words.get(str(value).lower())
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            return None
        number = int(number) if math.isfinite(number) and number.is_integer() else number
        number = 1 if RULES.get(key) is _COUNT and number < 1 else number
        fits = type_problem(key, number) is None and rule_problem(key, number) is None
        return number if fits else None
    if typing.get_origin(kind) is list and key in RULES and RULES[key].values:
        typed = value if isinstance(value, list) else str(value).split(",")
        near = (keys.nearest(str(name).lower(), RULES[key].values) for name in typed)
        return list(dict.fromkeys(name for name in near if name)) or None
    if kind == list[str] and isinstance(value, str):
        value = value.removeprefix("=") if key == "nccl.hca" else value  # as NCCL_IB_HCA has it
        parts = [part.strip() for part in value.split(",")] if "," in value else []
        parts = parts or (shlex.split(value) if _is_script_line(value) else [])
        return parts if parts and rule_problem(key, parts) is None else None
    if key in RULES and isinstance(value, str):
        known = habits.VALUES.get(key, {}).get(value.lower())
        return known or keys.nearest(value.lower(), RULES[key].values)
    return None
