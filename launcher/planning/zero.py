"""A file of ds_configs/ (or a user's JSON) + numbers -> the finished DeepSpeed configuration, without any `auto`.

DeepSpeed's batch numbers are nominal: the training loop fills micro-batches by tokens, sets the
accumulation boundary itself and divides by the true count, so that the loss is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning import incompatible
from launcher.planning.facts import TextFile
from launcher.planning.hjson_file import read_hjson
from launcher.planning.zero_keys import BELOW_3_ONLY, STAGE_3_ONLY
from launcher.planning.zero_lint import Linter, Settings

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
    layer: int = 0  # of a decoder layer that ZeRO-3 gathers whole, 0 where it gathers linear layers one by one


def finish_zero(
    group: TextFile, user: TextFile | None, settings: Settings, trained: Trained
) -> tuple[dict[str, Any], list[str]]:
    """The finished configuration and notices about what was dropped; problems are one ConfigError."""
    base = read_hjson(group).value
    if not isinstance(base.get("zero_optimization"), dict) or "stage" not in base["zero_optimization"]:
        text = "a file of ds_configs/ needs a zero_optimization section with a stage"
        raise ConfigError(Problem(text, group.path, ('"zero_optimization": {"stage": 2}',)))
    linter = None if user is None else Linter(user, settings)
    own = {} if linter is None else linter.clean()
    notices = [] if linter is None else linter.notices
    given = own.get("zero_optimization", {})

    def where(key: str) -> str:
        return linter.file.where(key) if linter is not None and _sets(own, key) else group.path

    zero = _with_path(_merge_zero(base["zero_optimization"], given), settings, where)
    merged = {**base, **own, "zero_optimization": zero}
    for name in ("bf16", "fp16", "data_types"):
        merged[name] = {**base.get(name, {}), **own.get(name, {})}
    found = incompatible.judge(_combination(merged, settings, trained), where)
    problems = [*([] if linter is None else linter.problems), *found.problems]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    stage: int = zero["stage"]
    notices = [*notices, *_drop_unused(zero, given, user), *found.warnings]
    if stage < 2 and zero.get("overlap_comm"):
        zero["overlap_comm"] = False  # a row of `incompatible` says why
    zero = {**zero, **{key: size for key, size in _buckets(zero, trained).items() if key not in given}}
    if stage == 3 and "stage3_param_persistence_threshold" not in given:
        # Adapters that stay whole are not gathered layer by layer: half the all-gathers.
        threshold = max(zero["stage3_param_persistence_threshold"], trained.largest_adapter)
        zero["stage3_param_persistence_threshold"] = threshold
    if stage == 3 and trained.layer:
        zero = {**zero, **{key: size for key, size in _whole_layers(zero, trained.layer).items() if key not in given}}
    if HPZ in zero:
        zero[HPZ] = _copy_size(zero[HPZ], stage, settings, where(f"zero_optimization.{HPZ}"))
    return _whole(merged, zero, settings), notices


def _sets(own: dict[str, Any], key: str) -> bool:
    value: Any = own
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def _combination(merged: dict[str, Any], settings: Settings, trained: Trained) -> incompatible.Combination:
    return incompatible.combination(
        merged,
        settings.config,
        precision=settings.precision,
        device=settings.device,
        hosts=max(1, len(settings.slots)),
        lr=settings.lr,
        own_values=trained.parameters // settings.world_size,
    )


def _whole(merged: dict[str, Any], zero: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Every key that DeepSpeed gets: the launcher's own first, then what files set."""
    stage: int = zero["stage"]
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
        config["bf16"] = {"enabled": True, **merged["bf16"]}
    if settings.precision == "fp16":
        config["fp16"] = {**FP16, **merged["fp16"]}
    if stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32", **merged["data_types"]}
    decided = {*config, "bf16", "fp16", "data_types"}
    return {**config, **{key: merged[key] for key in merged if key not in decided}}


def _with_path(zero: dict[str, Any], settings: Settings, where: Callable[[str], str]) -> dict[str, Any]:
    """`zero` with zero.nvme_path where a file leaves the folder open."""
    path = settings.config.zero.nvme_path
    left = {
        name: section
        for name, section in zero.items()
        if isinstance(section, dict) and section.get("nvme_path") == "auto"
    }
    if path is not None and not left:
        place = where("zero_optimization.offload_optimizer")
        text = f"zero.nvme_path={path} has no effect: {place} leaves no folder open"
        raise ConfigError(Problem(text, "", ("zero=stage3_nvme", "zero.nvme_path=null")))
    if path is None and left:
        text = "zero.nvme_path is missing: the folder, on a fast local disk, for what does not fit in memory"
        raise ConfigError(
            Problem(text, where(f"zero_optimization.{next(iter(left))}"), ("zero.nvme_path=/local/nvme",))
        )
    return {**zero, **{name: {**section, "nvme_path": path} for name, section in left.items()}}


def _drop_unused(zero: dict[str, Any], given: dict[str, Any], user: TextFile | None) -> list[str]:
    """Take tuning of other stages out of `zero`; a notice for what the user's file had of it."""
    stage = zero["stage"]
    names = BELOW_3_ONLY if stage == 3 else STAGE_3_ONLY
    dropped = [key for key in names if key in zero]
    for key in dropped:
        del zero[key]
    told = [key for key in dropped if key in given]
    if not told or user is None:
        return []
    return [f"{user.path}: {', '.join(told)} {'has' if len(told) == 1 else 'have'} no effect in stage {stage}"]


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


def _copy_size(asked: Any, stage: int, settings: Settings, where: str) -> int:
    """Ranks that share a copy of the weights: those of a host, where it is `auto`. DeepSpeed takes consecutive ranks,
    cuts a size above the world down to it in silence, and asserts in the middle of loading that it divides the world.
    """
    slots, world = settings.slots or (settings.world_size,), settings.world_size
    size = slots[0] if asked == "auto" else asked
    text = ""
    if stage != 3 and size != 1:
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


def _whole_layers(zero: dict[str, Any], layer: int) -> dict[str, int]:
    """Sizes for decoder layers of so many elements, each gathered as one.

    The next one travels while one is computed. Every module that is reached, the tower's small ones too, fetches ahead
    until stage3_max_live_parameters are there, so that this is what bounds memory: two layers, and a third for
    embeddings and what is left of other modules, without which the next layer would come in two pieces, the second
    waited for. Only the last layer stays for its backward pass; others kept would leave no room to fetch ahead.
    """
    ahead = max(layer, zero["stage3_prefetch_bucket_size"])
    return {
        "stage3_prefetch_bucket_size": ahead,
        "stage3_max_live_parameters": 2 * layer + ahead,
        "stage3_max_reuse_distance": layer // 2,
    }


def _buckets(zero: dict[str, Any], trained: Trained) -> dict[str, int]:
    """Buckets no larger than all that trains: a LoRA run would hold hundreds of MB for nothing."""
    enough = max(trained.parameters, SMALLEST_BUCKET)
    return {key: min(zero[key], enough) for key in ("reduce_bucket_size", "allgather_bucket_size")}
