"""Bytes of one host's main memory, all of its ranks, and of the disk: from how this launcher loads, saves and exports.

Files that are mapped into memory (safetensors read by rank 0 under ZeRO-3) are counted where every page is touched.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.estimates import Load
from launcher.planning.gpus import GIB
from launcher.planning.setting import Setting
from launcher.planning.states import Parts, States, numbers
from launcher.spec import RunConfig

# Resident bytes of one rank that has imported everything and does nothing. On CPU 0.96 GB were measured (torch 2.14,
# deepspeed 0.19.8, transformers 5.24). With CUDA and NCCL loaded it is more: a guess until it is measured.
RANK_BYTES = {"cpu": int(0.97e9), "cuda": int(2.2 * GIB)}
PIXEL_CACHE = 256 * 2**20  # training.pixels: decoded pictures that are kept
MICRO_STEPS = 2  # taken to be in a step of a rank
AHEAD = 5  # micro-batches: training.workers makes 3 beside the one in use, and one is packed out of its pictures
FEATURES = "features of images"  # memory.vision_cache_gib
SHARD = 2 * GIB  # training.checkpoint.SHARD_BYTES: tensors that rank 0 holds while it writes


def host_parts(setting: Setting, states: States, load: Load) -> Parts:
    """The fullest of loading, training and exporting, for the host of rank 0."""
    begin = {"Python and libraries": RANK_BYTES[setting.device] * setting.slots}
    moments = [
        {**begin, "loading": _loading(setting)},
        {**begin, **_training(setting, states, load)},
    ]
    if setting.config.checkpoint.export:
        # After the engine has gone: rank 0 builds the model again, and then loads what it wrote.
        moments.append({**begin, "export": _whole(setting) + 4 * _largest(setting)})
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in fullest.items() if size}


def _whole(setting: Setting) -> int:
    """Bytes of all weights in the run's number format."""
    n = numbers(setting)
    return n.weight * sum(t.elements for t in n.all)


def _largest(setting: Setting) -> int:
    return max(t.size for t in numbers(setting).all)


def _loading(setting: Setting) -> int:
    """Weights that pass through main memory before an engine takes them to the GPU.

    In the files' own bf16 they are mapped, and the ranks of a host share the pages (of 1,018 MiB, 126 were a process's
    own); what is converted, or put together from single experts, each rank holds itself. Under ZeRO-3 only rank 0
    reads. None with 4 bits, which go to the GPU one tensor at a time, and with random weights.
    """
    model, tune = setting.config.model, setting.config.tune
    if setting.device == "cpu" or model.weights == "random" or tune.name == "qlora":
        return 0  # on CPU they are the rank's own memory
    mapped = setting.precision == "bf16" and setting.shape.experts is None
    return _whole(setting) * (1 if setting.stage == 3 or mapped else setting.slots)


def _training(setting: Setting, states: States, load: Load) -> Parts:
    v, slots = setting.shape.vision, setting.slots
    values = v.patch_values if v is not None else 0
    # Bytes. A picture's two frames are one there, and page-locked memory is taken in powers of two.
    pixels = load.patches * values * AHEAD
    kept = int(setting.config.memory.vision_cache_gib * GIB) * slots
    pictures = slots * (pixels + min(PIXEL_CACHE, load.patches * values * MICRO_STEPS))
    offloaded = {f"offloaded {name}": size * slots for name, size in states.host.items()}
    n = numbers(setting)
    saved = min(SHARD, 12 * n.trained) if _saves(setting.config) else 0
    return {**offloaded, "pictures": pictures, FEATURES: kept, "saving": saved}


def _saves(config: RunConfig) -> bool:
    options = config.checkpoint
    return any((options.every_steps, options.every_epoch, options.at_end, options.keep_best, options.export))


def disk_parts(config: RunConfig, precision: str, parameters: Mapping[str, int], trainable: Mapping[str, int]) -> Parts:
    """What a run writes to its folder, about: the checkpoints it keeps, the one written beside them, and the export."""
    options, weight = config.checkpoint, 4 if precision == "fp32" else 2
    checkpoints = options.keep_last + int(options.keep_best) + 1 if _saves(config) else 0
    state = 12 + weight  # bytes of a trained parameter: float32 master and two moments, and the weight
    export = weight * sum((parameters if options.merge else trainable).values()) if options.export else 0
    parts = {"checkpoints": checkpoints * state * sum(trainable.values()), "export": export}
    return {name: size for name, size in parts.items() if size}
