"""FLOPs of a load by part and pass, two for each multiply and add.

Matrix products and attention only; elementwise work is memory traffic (launcher.planning.traffic).
"""

from __future__ import annotations

import functools

from launcher.estimates import Load
from launcher.planning import fused_work
from launcher.planning.models import linear_modules, lora_modules
from launcher.planning.passes import Passes, reaches_input, reaches_language
from launcher.planning.setting import Setting
from launcher.planning.shapes import Linears, Shape, VisionShape, weights
from launcher.spec import TuneConfig

BACKWARD = 2.0  # attention, of its forward: four products where the forward pass has two
AGAIN = 2.5  # of its forward, with the scores that flash kernels compute again


def flops(setting: Setting, load: Load) -> dict[str, Passes]:
    """FLOPs by part: language, adapters, attention, vision, vision attention, head; parts without any are left out."""
    config, shape = setting.config, setting.shape
    visible = load.patches > 0 and shape.vision is not None
    parts = {
        "language": _language(setting, load),
        "adapters": _adapters(setting, load),
        "attention": _attention(setting, load),
        "vision": _vision(setting, load) if visible else Passes(),
        "vision attention": _vision_attention(setting, load) if visible else Passes(),
        "head": _head(setting, load) if config.task.name == "sft" else Passes(),
    }
    return {name: passes for name, passes in parts.items() if passes.total}


def _language(setting: Setting, load: Load) -> Passes:
    """Linear layers of the decoder, the experts that a token takes included."""
    if setting.fused:
        return fused_work.language(setting, load)
    shape, tune = setting.shape, setting.config.tune
    forward = 2.0 * shape.token_weights * load.tokens
    backward = 0.0
    if reaches_language(tune):
        backward = forward
        if not reaches_input(tune, sees=load.patches > 0):
            backward -= 2.0 * weights(_entrance(shape)) * load.tokens
    if tune.language == "full":
        backward += forward
    again = 0.0
    if reaches_language(tune):
        last = (0, 0) if shape.experts is not None else shape.decoder(0)["mlp.down_proj"]
        skipped = 0 if tune.language == "lora" else last[0] * last[1]
        layers = range(setting.checkpointed_layers)
        again = forward * len(layers) / shape.layers - 2.0 * skipped * len(layers) * load.tokens
    return Passes(forward=forward, backward=backward, again=again)


@functools.lru_cache(maxsize=64)
def _entrance(shape: Shape) -> Linears:
    """Linear modules of the first layer whose inputs are the embeddings."""
    first = ("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
    return {name: size for name, size in shape.decoder(0).items() if name.rpartition(".")[2] in first}


def _adapters(setting: Setting, load: Load) -> Passes:
    """LoRA matrices of all parts; a gradient of each and one of each one's input."""
    reached = reaches_input(setting.config.tune, sees=load.patches > 0)
    each = _adapters_a_row(setting.shape, setting.config.tune, setting.checkpointed_layers, reached)
    found = fused_work.adapters(setting, load) if setting.fused else Passes()
    for kind, count in _rows(setting.shape, load).items():
        if kind == "language" and setting.fused:
            continue
        passes = each.get(kind, Passes())
        found += passes.times(count)
    return found


@functools.lru_cache(maxsize=1024)  # hundreds of loads of one setting are weighed for a plan
def _adapters_a_row(shape: Shape, tune: TuneConfig, recomputed: int, reached: bool) -> dict[str, Passes]:
    """Kind of rows -> FLOPs of one of them in all of its adapters."""
    sizes = linear_modules(shape)
    found: dict[str, Passes] = {}
    for name in lora_modules(shape, tune):
        inner, outer = sizes[name]
        part = shape.family.part_of(name)
        kind = "merger" if part == "projector" else part
        forward = 2.0 * tune.r * (inner + outer)
        lacking = _is_entrance(shape, tune, name, reached=reached)
        backward = 2 * forward - (2.0 * tune.r * inner if lacking else 0.0)
        again = 0.0
        if _is_recomputed(shape, name, recomputed):
            last = name.endswith(("mlp.down_proj", "mlp.linear_fc2"))
            again = forward - (2.0 * tune.r * outer if last else 0.0)
        found[kind] = found.get(kind, Passes()) + Passes(forward=forward, backward=backward, again=again)
    return found


def _rows(shape: Shape, load: Load) -> dict[str, float]:
    """Rows that pass through the linear modules of a part."""
    merged = load.patches / shape.vision.merge**2 if shape.vision else 0.0
    return {"language": load.tokens, "vision": load.patches, "merger": merged, "head": 0.0}


def _is_entrance(shape: Shape, tune: TuneConfig, name: str, *, reached: bool) -> bool:
    """Whether nothing wants the gradient of a module's input."""
    if name.startswith("model.visual.blocks.0.attn.qkv"):
        return tune.vision != "full"
    if shape.family.part_of(name) == "projector" and tune.vision == "frozen":
        return name.endswith(("linear_fc1", "mlp.0"))
    if reached or not name.startswith(f"{shape.family.language}.layers.0."):
        return False
    return name.rpartition(".")[2] in {module.rpartition(".")[2] for module in _entrance(shape)}


def _is_recomputed(shape: Shape, name: str, recomputed: int) -> bool:
    family = shape.family
    if family.part_of(name) == "vision":
        return recomputed > 0
    layers = f"{family.language}.layers."
    return name.startswith(layers) and int(name[len(layers) :].partition(".")[0]) < recomputed


def _attention(setting: Setting, load: Load) -> Passes:
    """Scores and mixtures of the layers with attention."""
    shape, config = setting.shape, setting.config
    attending = sorted(shape.attending)
    layer = 4.0 * shape.q_width * load.pairs
    forward = layer * len(attending)
    if not reaches_language(config.tune):
        return Passes(forward=forward)
    recomputed = sum(1 for n in attending if n < setting.checkpointed_layers)
    again = (AGAIN - BACKWARD) * forward + layer * recomputed
    return Passes(forward=forward, backward=BACKWARD * forward, again=again)


def _vision(setting: Setting, load: Load) -> Passes:
    """Linear layers of the tower and its mergers."""
    tune, v = setting.config.tune, _seen(setting.shape)
    patches, merged = load.patches, load.patches / v.merge**2
    embed = 2.0 * v.patch_values * v.hidden * patches
    blocks = 2.0 * v.depth * weights(v.block) * patches
    mergers = 2.0 * (1 + v.deepstack) * weights(v.merger) * merged
    first, second = (2.0 * (1 + v.deepstack) * a * b * merged for a, b in v.merger.values())
    backward = again = 0.0
    if tune.vision != "frozen" or tune.projector == "full":  # a merger begins with a norm, which trains too
        backward += first
    if tune.vision != "frozen":
        backward += blocks
        if tune.vision == "lora":
            backward -= 2.0 * _product(v.block["attn.qkv"]) * patches
        if setting.checkpointed_layers:
            last = list(v.block.values())[-1]
            again = blocks - (2.0 * v.depth * _product(last) * patches if tune.vision == "full" else 0.0)
    if tune.vision == "full":
        backward += blocks + embed
    if tune.vision != "frozen" or tune.projector != "frozen":
        backward += second
    if tune.projector == "full":
        backward += mergers
    return Passes(forward=embed + blocks + mergers, backward=backward, again=again)


def _product(size: tuple[int, int]) -> int:
    """Weights of a linear module of that input and output width."""
    return size[0] * size[1]


def _vision_attention(setting: Setting, load: Load) -> Passes:
    v = _seen(setting.shape)
    whole = 4.0 * (v.depth - v.windowed) * v.hidden * load.patch_pairs
    windows = 4.0 * v.windowed * v.hidden * v.window_patches * load.patches
    forward = whole + windows
    if setting.config.tune.vision == "frozen":
        return Passes(forward=forward)
    again = (AGAIN - BACKWARD) * forward + (forward if setting.checkpointed_layers else 0.0)
    return Passes(forward=forward, backward=BACKWARD * forward, again=again)


def _head(setting: Setting, load: Load) -> Passes:
    """Logits of the answers. Of a frozen head the gradient is computed in the forward pass (training.token_loss)."""
    config, shape = setting.config, setting.shape
    forward = 2.0 * shape.hidden * shape.vocab * load.answers
    trains = config.tune.head == "full" or (shape.tied and config.tune.language == "full")
    backward = forward * (reaches_language(config.tune) + trains)
    return Passes(forward=forward, backward=backward, again=forward * trains)


def _seen(shape: Shape) -> VisionShape:
    assert shape.vision is not None
    return shape.vision
