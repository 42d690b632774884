"""What the value of each key of a DeepSpeed 0.19.8 configuration must be, section by section.

A test holds the sections against DeepSpeed's own classes, which refuse a wrong kind on every rank, after the model is
loaded; sections that DeepSpeed reads by hand, such as `aio`, it would take as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of value: in words, as an example to type, and as a test."""

    text: str
    example: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(least: int, example: str) -> Kind:
    text = f"a whole number of at least {least}"
    return Kind(text=text, example=example, fits=lambda v: _is_whole(v) and least <= v < 2**63)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


SWITCH = Kind(text="true or false", example="true", fits=lambda v: isinstance(v, bool))
SIZE, COUNT, FEW = _whole(0, "5e8"), _whole(1, "1"), _whole(0, "4")
BUCKET = _whole(1, "5e8")
INTEGER = Kind(text="a whole number", example="-1", fits=_is_whole)
SCALE = Kind(text="a number of at least 0", example="0", fits=lambda v: _is_number(v) and v >= 0)
PART = Kind(text="a number from 0 to 1", example="1.0", fits=lambda v: _is_number(v) and 0 <= v <= 1)
TEXT = Kind(text="a text", example='"..."', fits=lambda v: isinstance(v, str))
PATH = Kind(text="the path of a folder", example='"/local/nvme"', fits=TEXT.fits)
TEXTS = Kind(text="a list of texts", example='["..."]', fits=_are_texts)
NAMES = Kind(text="a text or a list of texts", example='["..."]', fits=lambda v: isinstance(v, str) or _are_texts(v))
DEVICE = Kind(text="none, cpu or nvme", example='"cpu"', fits=lambda v: v in ("none", "cpu", "nvme"))
SECTION = Kind(text="an object", example="{...}", fits=lambda v: isinstance(v, dict))

_SIZES = (
    "allgather_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
    "sub_group_size",
)  # fmt: skip
_SWITCHES = (
    "allgather_partitions", "compute_grad_norm", "contiguous_gradients", "elastic_checkpoint", "enable_sanity_checks",
    "ignore_unused_parameters", "load_from_fp32_weights", "log_trace_cache_warnings", "memory_efficient_linear",
    "overlap_comm", "override_module_apply", "parameter_alignment", "pipeline_loading_checkpoint", "reduce_scatter",
    "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce", "zero_quantized_gradients", "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
)  # fmt: skip
_OFFLOAD = {"device": DEVICE, "nvme_path": PATH, "pin_memory": SWITCH, "buffer_count": FEW}
_MONITOR = {"enabled": SWITCH, "output_path": TEXT, "job_name": TEXT}

# Section -> the keys in it; "" is the file's own level. What decides about other keys stands in `zero_keys`.
KINDS: Mapping[str, Mapping[str, Kind]] = {
    "": dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"), SWITCH),
    ZERO: {
        "stage": Kind(text="0, 1, 2 or 3", example="2", fits=lambda v: _is_whole(v) and 0 <= v <= 3),
        **dict.fromkeys(_SIZES, SIZE),
        **dict.fromkeys(_SWITCHES, SWITCH),
        "reduce_bucket_size": BUCKET,
        "stage3_module_granularity_threshold": SIZE,
        "zero_hpz_partition_size": COUNT,
        **dict.fromkeys(("leaf_module", "offload_optimizer", "offload_param", "zenflow"), SECTION),
    },
    f"{ZERO}.offload_optimizer": {
        **_OFFLOAD,
        **dict.fromkeys(("pipeline_read", "pipeline_write", "fast_init", "super_offload"), SWITCH),
        **dict.fromkeys(("ratio", "cpuadam_cores_perc"), PART),
    },
    f"{ZERO}.offload_param": {**_OFFLOAD, "buffer_size": SIZE, "max_in_cpu": SIZE},
    f"{ZERO}.leaf_module": dict.fromkeys(("classes", "names", "name_suffixes"), NAMES),
    "bf16": dict.fromkeys(
        (
            "enabled",
            "check_grad_overflow",
            "immediate_grad_update",
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        ),
        SWITCH,
    ),
    "fp16": {
        **dict.fromkeys(("enabled", "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"), SWITCH),
        "loss_scale": SCALE,
        "initial_scale_power": FEW,
        "loss_scale_window": COUNT,
        "hysteresis": FEW,
        "min_loss_scale": COUNT,
    },
    "aio": {
        **dict.fromkeys(("block_size", "queue_depth", "intra_op_parallelism"), COUNT),
        **dict.fromkeys(("single_submit", "overlap_events", "use_gds"), SWITCH),
    },
    "comms_logger": {**dict.fromkeys(("enabled", "prof_all", "verbose", "debug"), SWITCH), "prof_ops": TEXTS},
    "flops_profiler": {
        **dict.fromkeys(("enabled", "detailed"), SWITCH),
        "recompute_fwd_factor": SCALE,
        **dict.fromkeys(("profile_step", "top_modules"), COUNT),
        "module_depth": INTEGER,
        "output_file": TEXT,
    },
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": {"enabled": SWITCH, **dict.fromkeys(("group", "team", "project"), TEXT)},
    "comet": {
        **dict.fromkeys(("enabled", "online"), SWITCH),
        "samples_log_interval": COUNT,
        **dict.fromkeys(("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"), TEXT),
    },
}
# Values that stay text although they look like numbers, such as a project called 2026.
NAMED = {f"{section}.{key}" for section, keys in KINDS.items() for key, kind in keys.items() if kind in (TEXT, PATH)}
