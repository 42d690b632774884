"""Bytes of one GPU (or CPU rank) by part; from them the micro-batch and how many layers are recomputed.

A first estimate from closed forms: model states by ZeRO stage, buckets, kept activations. It counts no
fragmentation, which the margin covers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.arithmetic import LOGIT_BYTES
from launcher.errors import ConfigError, Problem
from launcher.estimates import CONTEXT, Load, MemoryEstimate
from launcher.families import trains_fully
from launcher.planning.gpus import ASSUMED_KIND, GIB, GPU_KINDS
from launcher.planning.models import parameter_counts, trainable_counts
from launcher.planning.setting import Setting
from launcher.planning.shapes import Shape, weights
from launcher.spec import RunConfig, RunPlan

USABLE = 0.9  # of a GPU: the rest is fragmentation and what this estimate does not see
CONTEXT_BYTES = {"cuda": 2 * GIB, "cpu": GIB // 2}  # CUDA context and NCCL; Python and its libraries
TOKEN_STEP = 1024
CPU_TOKENS = 8192
# bitsandbytes: a float32 constant for each 64 weights of 4 bits; double_quant stores 256 of them in a byte each and
# one more float32. Moments of 8 bits have a float32 for each 256 values.
CONSTANTS, CONSTANTS_TWICE = 4 / 64, 1 / 64 + 4 / (64 * 256)
MOMENTS_8BIT = 2 * (1 + 4 / 256)
GPU_TOKENS = 32768  # a GPU is busy long before this; more only costs memory


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What was chosen, and the table behind it."""

    parts: dict[str, int]
    max_tokens: int
    checkpointed_layers: int
    warnings: tuple[str, ...]


def plan_memory(setting: Setting, *, memory_bytes: int | None) -> MemoryPlan:
    """Choose `max_tokens` and checkpointed layers where they are `auto`; warn when it does not fit."""
    config, shape, device = setting.config, setting.shape, setting.device
    layers = _asked_layers(config.memory.gradient_checkpointing, shape.layers)
    tokens: int | None = None if config.batch.max_tokens == "auto" else config.batch.max_tokens
    capacity = GPU_KINDS[ASSUMED_KIND].memory_bytes if memory_bytes is None else memory_bytes
    room = USABLE * capacity

    def parts(max_tokens: int, checkpointed: int) -> dict[str, int]:
        return estimate(
            replace(setting, checkpointed_layers=checkpointed), Load(tokens=max_tokens, visual=max_tokens)
        ).gpu

    def largest(checkpointed: int) -> int:
        fixed = sum(parts(0, checkpointed).values())
        slope = (sum(parts(TOKEN_STEP, checkpointed).values()) - fixed) / TOKEN_STEP
        return max(0, int((room - fixed) / slope)) // TOKEN_STEP * TOKEN_STEP

    need = _round_up(config.dataset.max_length)
    if device == "cpu":
        layers = 0 if layers is None else layers
        tokens = max(CPU_TOKENS, need) if tokens is None else tokens
    else:
        if layers is None:
            layers = 0 if largest(0) >= (tokens or max(need, CPU_TOKENS)) else shape.layers
        if tokens is None:
            tokens = max(need, min(GPU_TOKENS, largest(layers)))
    table = parts(tokens, layers)
    total = sum(table.values())
    warnings = []
    if memory_bytes is not None and total > room:
        unit = "GPU" if device == "cuda" else "rank"
        text = f"about {total / GIB:.1f} GiB a {unit} are needed, and {room / GIB:.1f} GiB are usable"
        warnings.append(f"{text} ({100 * USABLE:.0f} % of {capacity / GIB:.1f} GiB): {_advice(config, shape, layers)}")
    return MemoryPlan(parts=table, max_tokens=tokens, checkpointed_layers=layers, warnings=tuple(warnings))


def estimate(setting: Setting, load: Load) -> MemoryEstimate:
    """Bytes by part for one micro-batch."""
    config, shape, deepspeed, world = setting.config, setting.shape, setting.deepspeed, setting.world
    zero = deepspeed["zero_optimization"]
    stage: int = zero["stage"]
    size = 2 if any(deepspeed.get(name, {}).get("enabled") for name in ("bf16", "fp16")) else 4
    counts = parameter_counts(shape)
    head = config.task.name == "sft" and config.tune.head == "full"
    whole = [part for part in counts if trains_fully(part, config.tune) or (part == "head" and head)]
    frozen = sum(count for part, count in counts.items() if part not in whole)
    trained = sum(trainable_counts(shape, config.tune, config.task).values())

    def shard(count: float, from_stage: int) -> int:
        return int(count / world) if stage >= from_stage else int(count)

    # Gradients accumulate in float32 (data_types.grad_accum_dtype), beside those of the backward pass.
    gradients = shard(4 * trained, 2) + (size * trained if size == 2 and stage < 2 else 0)
    # Adam's two moments, and the master copy that ZeRO keeps even of float32 weights.
    moments = 8 if config.optim.name == "adamw" else MOMENTS_8BIT
    optimizer = shard((moments + (0 if stage == 0 and size == 4 else 4)) * trained, 1)
    bucket = zero.get("reduce_bucket_size", 0) * size * (2 if zero.get("overlap_comm") else 1)
    gathered = 0
    if stage == 3:
        bucket += zero.get("stage3_prefetch_bucket_size", 0) * size
        gathered = size * max(2 * shape.layer_weights, shape.vocab * shape.hidden)
    sharers = zero.get("zero_hpz_partition_size", 1)
    parts = {
        "frozen weights": shard(size * frozen - _saved_by_4bit(config, shape, size), 3),
        "trained weights": shard(size * trained, 3),
        "gradients": gradients,
        "optimizer": optimizer,
        "buckets": bucket,
        "gathered layers": gathered,
        **({"copy on the host": size * (frozen + trained) // sharers} if sharers > 1 else {}),
        "activations": load.tokens * size * _kept_values(config, shape, setting.checkpointed_layers),
        "vision": load.visual * size * _vision_values(config, shape),
        **({"logits": _logit_bytes(config, shape, size, load.tokens)} if config.task.name == "sft" else {}),
        CONTEXT: CONTEXT_BYTES[setting.device],
    }
    return MemoryEstimate(gpu=parts, moment="backward")


def _logit_bytes(config: RunConfig, shape: Shape, size: int, max_tokens: int) -> int:
    """The chunk of vocabulary-wide logits that training.heads computes at a time: float32, softmax and a copy in the
    model's format; and the weight's gradient, summed in float32, where it trains."""
    chunk = min(LOGIT_BYTES, 4 * max_tokens * shape.vocab)
    trains = config.tune.head == "full" or (shape.tied and config.tune.language == "full")
    return 2 * chunk + chunk * size // 4 + ((4 + size) * shape.vocab * shape.hidden if trains else 0)


def _saved_by_4bit(config: RunConfig, shape: Shape, size: int) -> float:
    """Bytes that tune=qlora takes off the linear layers of the language model."""
    if config.tune.name != "qlora":
        return 0.0
    each = 0.5 + (CONSTANTS_TWICE if config.tune.double_quant else CONSTANTS)
    return (size - each) * sum(weights(shape.decoder(n)) for n in range(shape.layers))


def disk_bytes(plan: RunPlan) -> int:
    """What a run writes, about: the checkpoints it keeps, the one written beside them, and the export."""
    options = plan.config.checkpoint
    weight = 4 if plan.precision == "fp32" else 2
    saves = (options.every_steps, options.every_epoch, options.at_end, options.keep_best, options.export)
    checkpoints = options.keep_last + int(options.keep_best) + 1 if any(saves) else 0
    state = 12 + weight  # bytes of a trained parameter: float32 master and two moments, and the weight
    export = weight * sum(plan.parameters.values()) if options.export else 0
    return checkpoints * state * sum(plan.trainable.values()) + export


def _kept_values(config: RunConfig, shape: Shape, checkpointed: int) -> int:
    """Values a token keeps for the backward pass of the decoder: all of a layer, or its input only.

    Counted through our own scorer with saved-tensor hooks on a scaled-down model: frozen weights keep no input of
    their own, trained ones do.
    """
    layer = 4 * shape.mlp_width + 6 * shape.hidden + 4 * shape.q_width + 6 * shape.kv_width
    if config.tune.language == "full":
        layer += 2 * shape.hidden + shape.q_width + shape.kv_width
    kept = (shape.layers - checkpointed) * layer + checkpointed * shape.hidden
    return kept + (layer if checkpointed else 0) + 4 * shape.hidden


def _vision_values(config: RunConfig, shape: Shape) -> int:
    """Values a visual token keeps in the tower: every block when it trains, one block when it is frozen."""
    v = shape.vision
    if v is None:
        return 0
    block = 8 * v.hidden + 2 * v.intermediate
    blocks = v.depth if config.tune.vision != "frozen" else 1
    return v.merge**2 * blocks * block + (1 + v.deepstack) * (2 * v.merged + shape.hidden)


def _asked_layers(asked: str, layers: int) -> int | None:
    if asked in ("auto", "all", "none"):
        return {"auto": None, "all": layers, "none": 0}[asked]
    if int(asked) > layers:
        text = f"memory.gradient_checkpointing={asked}, but the model has {layers} decoder layers"
        raise ConfigError(Problem(text, "", ("memory.gradient_checkpointing=all",)))
    return int(asked)


def _round_up(tokens: int) -> int:
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP


def _advice(config: RunConfig, shape: Shape, checkpointed: int) -> str:
    steps = []
    if checkpointed < shape.layers:
        steps.append("memory.gradient_checkpointing=all")
    if config.batch.max_tokens != "auto":
        steps.append("a smaller batch.max_tokens")
    if config.zero.name != "stage3" and config.tune.name != "qlora":
        steps.append("zero=stage3")
    if config.tune.language == "full":
        steps.append("tune=lora")
    return "try " + ", ".join([*steps, "more GPUs"])
