"""A file of ds_configs/ (or a user's JSON) + numbers -> the finished DeepSpeed configuration, without any `auto`.

DeepSpeed's batch numbers are nominal: the training loop fills micro-batches by tokens, sets the
accumulation boundary itself and divides by the true count, so that the loss is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.consistency import uses_lora
from launcher.planning.facts import TextFile
from launcher.planning.zero_lint import Linter, Settings, parse_json

NEVER = 10**9  # steps_per_print: the launcher's own log has these numbers
# Dynamic loss scale. From 2^12 down, not DeepSpeed's 2^16: the ten skipped steps in a row that end a run
# (train.max_bad_steps) bring it near its minimum, so that no healthy search for a scale is taken for a broken run.
FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 1000, "min_loss_scale": 1}
SMALLEST_BUCKET = 10**6
HPZ = "zero_hpz_partition_size"  # ranks that share one more copy of the weights; `auto` in ds_configs/stage3_hpz.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the sizes of buckets and thresholds follow from."""

    parameters: int  # that train
    largest_adapter: int  # elements of the largest LoRA matrix, 0 without LoRA


def finish_zero(
    group: TextFile, user: TextFile | None, settings: Settings, trained: Trained
) -> tuple[dict[str, Any], list[str]]:
    """The finished configuration and notices about what was dropped; problems are one ConfigError."""
    base = parse_json(group)
    notices: list[str] = []
    own: dict[str, Any] = {}
    if user is not None:
        linter = Linter(user, settings)
        own, notices = linter.clean(), linter.notices
    zero = _merge_zero(base["zero_optimization"], own.get("zero_optimization", {}))
    stage: int = zero["stage"]
    _check_stage(stage, settings, user)
    given = own.get("zero_optimization", {})
    zero = {**zero, **{key: size for key, size in _buckets(zero, trained).items() if key not in given}}
    if stage == 3 and "stage3_param_persistence_threshold" not in given:
        # Adapters that stay whole are not gathered layer by layer: half the all-gathers.
        threshold = max(zero["stage3_param_persistence_threshold"], trained.largest_adapter)
        zero["stage3_param_persistence_threshold"] = threshold
    if HPZ in zero:
        zero[HPZ] = _copy_size(zero[HPZ], stage, settings, user.path if user and HPZ in given else group.path)
    config: dict[str, Any] = {
        "train_batch_size": settings.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.config.optim.max_grad_norm,
        "steps_per_print": NEVER,
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW needs no compiled op
        "zero_optimization": zero,
    }
    if "offload_optimizer" in zero:
        config["zero_force_ds_cpu_optimizer"] = False
    if settings.precision == "bf16":
        config["bf16"] = {"enabled": True, **own.get("bf16", {})}
    if settings.precision == "fp16":
        config["fp16"] = {**FP16, **own.get("fp16", {})}
    if stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32", **own.get("data_types", {})}
    rest = {**base, **own}
    return {**config, **{key: rest[key] for key in rest if key not in config and key != "data_types"}}, notices


def _merge_zero(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The user's section decides; the group's numbers fill in where both are of the same stage."""
    if own.get("stage", base["stage"]) != base["stage"]:
        sizes = ("reduce_bucket_size", "allgather_bucket_size")
        base = {
            **{key: base[key] for key in sizes},
            "overlap_comm": own["stage"] == 3,
            **_stage3_defaults(own["stage"]),
        }
    return {**base, **own}


def _stage3_defaults(stage: int) -> dict[str, Any]:
    """What stage 3 needs when only a user's JSON asks for it: never left to DeepSpeed's defaults."""
    if stage != 3:
        return {}
    return {
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


def _check_stage(stage: int, settings: Settings, user: TextFile | None) -> None:
    tune, precision, where = settings.config.tune, settings.precision, user.path if user else ""
    problems = []
    if stage == 0 and precision in ("bf16", "fp16"):
        text = f"zero stage 0 in {precision} would add up gradients in {precision}"
        text = f"{text}: DeepSpeed offers float32 sums from stage 1 on"
        problems.append(Problem(text, where, ("zero=stage1", "precision=fp32")))
    if stage == 3 and tune.name == "qlora":
        text = "tune=qlora with zero stage 3: every GPU would hold all of the 4-bit weights, since they are not sharded"
        problems.append(Problem(text, where, ("zero=stage2", "tune=lora")))
    if stage == 3 and tune.use_dora and uses_lora(tune):
        text = "tune.use_dora=true needs whole weight matrices for their lengths, and zero stage 3 keeps them sharded"
        problems.append(Problem(text, where, ("zero=stage2", "tune.use_dora=false")))
    if problems:
        raise ConfigError(*problems)


def _copy_size(asked: Any, stage: int, settings: Settings, where: str) -> int:
    """Ranks that share a copy of the weights: those of a host, where it is `auto`. DeepSpeed takes consecutive ranks,
    cuts a size above the world down to it in silence, and asserts in the middle of loading that it divides the world.
    """
    slots, world = settings.slots or (settings.world_size,), settings.world_size
    size = slots[0] if asked == "auto" else asked
    text = ""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        text = f"{HPZ} is {size!r}, but must be a whole number of at least 1"
    elif stage != 3 and size != 1:
        text = f"zero_optimization.{HPZ} has no effect below stage 3"
    elif asked == "auto" and len(slots) == 1:
        text = "hpZ keeps a copy of the weights on every host, and one host has them all already"
    elif asked == "auto" and len(set(slots)) > 1:
        text = f"hpZ needs hosts of equally many ranks, and these have {', '.join(map(str, slots))}"
    elif asked == "auto" and size == 1:
        text = "hpZ shares a copy of the weights among the ranks of a host, and every host has one"
    elif world % size or size > world:
        text = f"{HPZ} is {size}, which does not divide {world} rank{'s' if world > 1 else ''}"
    if text:
        raise ConfigError(Problem(text, where, ("zero=stage3",)))
    return int(size)


def _buckets(zero: dict[str, Any], trained: Trained) -> dict[str, int]:
    """Buckets no larger than all that trains: a LoRA run would hold hundreds of MB for nothing."""
    enough = max(trained.parameters, SMALLEST_BUCKET)
    return {key: min(zero[key], enough) for key in ("reduce_bucket_size", "allgather_bucket_size")}
