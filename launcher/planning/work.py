"""Seconds of one rank's micro-step: what its GPU computes, by part and pass, and what its host does meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.attention_needs import PADDED
from launcher.estimates import Load
from launcher.planning import fitted
from launcher.planning.flops import flops
from launcher.planning.links import Sizes
from launcher.planning.models import lora_modules
from launcher.planning.passes import Passes, reaches_language
from launcher.planning.rates import LAUNCH_S, Rates
from launcher.planning.setting import Setting, kernel_of
from launcher.planning.shapes import weights
from launcher.planning.traffic import traffic

TERA, GB = 1e12, 1e9
MOST_WORKERS = 16  # launcher.training.workers.MOST
# Where the elementwise work of a part of `traffic` is shown.
_SHOWN = {"language": "norms and activations", "adapters": "adapters", "vision": "vision", "head": "head"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Seconds of a micro-step."""

    gpu: dict[str, Passes]  # by part
    host: Passes  # the processor's own: kernels called, and ZeRO-3's Python
    pictures_s: float  # of all threads that make pictures

    @property
    def forward_s(self) -> float:
        """The GPU's forward pass."""
        return sum(passes.forward for passes in self.gpu.values())

    @property
    def backward_s(self) -> float:
        """Its backward pass, what is computed again included."""
        return sum(passes.backward + passes.again for passes in self.gpu.values())


def work(setting: Setting, load: Load, sizes: Sizes, rates: Rates) -> Work:
    """What a rank's GPU and its host do for one micro-batch."""
    products = {name: _products(name, passes, setting, load, rates) for name, passes in flops(setting, load).items()}
    gpu = {
        "language layers": products.get("language", Passes()),
        "attention": products.get("attention", Passes()) + _scattered(setting, load, rates),
        "adapters": products.get("adapters", Passes()),
        "norms and activations": Passes(),
        "vision": products.get("vision", Passes()) + products.get("vision attention", Passes()),
        "head": products.get("head", Passes()),
        "4-bit weights": _dequantised(setting, rates),
    }
    thin, memory = (fitted.FUSED_THIN, fitted.FUSED_MEMORY) if setting.fused else (fitted.THIN, 1.0)
    for name, passes in traffic(setting, load).items():
        slower = thin if name == "adapters" else 1 / memory if name == "language" else 1.0
        gpu[_SHOWN[name]] += passes.times(slower / (rates.memory_gbs * GB))
    return Work(
        gpu={name: passes for name, passes in gpu.items() if passes.total},
        host=_host(setting, load, sizes, rates),
        pictures_s=load.patches * fitted.PICTURE_S / _workers(setting),
    )


def _products(name: str, passes: Passes, setting: Setting, load: Load, rates: Rates) -> Passes:
    """Seconds of a part's FLOPs."""
    slow = fitted.FP32_SLOWDOWN if setting.precision == "fp32" else 1.0
    if name in ("attention", "vision attention") and setting.fused:
        return _attention(name, passes, setting, load, rates).times(slow)
    if name in ("attention", "vision attention"):
        rate, keys = rates.attention_tflops * TERA, load.pairs / load.tokens
        share = fitted.VISION_ATTENTION if name == "vision attention" else keys / (keys + fitted.HALF_KEYS)
        if setting.attention in PADDED:
            share *= fitted.PADDED_ATTENTION
        first, then = slow / (rate * share), slow / (rate * share * fitted.ATTENTION_BACKWARD)
        return Passes(forward=passes.forward * first, backward=passes.backward * then, again=passes.again * then)
    vision = setting.shape.vision
    width, rows = (vision.hidden, load.patches) if name == "vision" and vision else (setting.shape.hidden, load.tokens)
    best = fitted.FUSED_PRODUCTS if setting.fused else fitted.PRODUCTS
    share = best * width / (width + fitted.HALF_WIDTH) * rows / (rows + fitted.HALF_ROWS)
    return passes.times(slow / (rates.matmul_tflops * TERA * share))


def _attention(name: str, passes: Passes, setting: Setting, load: Load, rates: Rates) -> Passes:
    """Seconds of attention beside fused layers."""
    kernel = kernel_of(setting)
    known, rate = fitted.ATTENTION.get(kernel, fitted.FLASH), rates.attention_tflops * TERA
    seen = name == "vision attention"
    keys = load.patch_pairs / max(1, load.patches) if seen else load.pairs / load.tokens
    rate *= (known.vision if seen else 1.0) * (fitted.PADDED_ATTENTION if kernel in PADDED else 1.0)
    first = (keys + known.half_forward) / (rate * known.forward * keys) if keys else 0.0
    then = (keys + known.half_backward) / (rate * known.backward * keys) if keys else 0.0
    return Passes(forward=passes.forward * first, backward=passes.backward * then, again=passes.again * then)


def _scattered(setting: Setting, load: Load, rates: Rates) -> Passes:
    """Gradients of the keys and values that the documents of a query share."""
    if setting.fused or not reaches_language(setting.config.tune):
        return Passes()  # of fused layers: fused_work
    values = 2 * load.key_rows * setting.shape.kv_width * len(setting.shape.attending)
    return Passes(backward=values * fitted.SCATTER_BYTES / (rates.memory_gbs * GB))


def _dequantised(setting: Setting, rates: Rates) -> Passes:
    """4-bit weights, each time that a pass needs them."""
    shape = setting.shape
    if setting.config.tune.name != "qlora":
        return Passes()
    bytes_once = sum(weights(shape.decoder(n)) for n in range(shape.layers)) * fitted.DEQUANTISE_BYTES
    once = Passes(forward=bytes_once, backward=bytes_once, again=bytes_once * setting.recomputed)
    return once.times(1 / (rates.memory_gbs * GB))


def _workers(setting: Setting) -> int:
    """Threads that make a rank's pictures (launcher.training.workers)."""
    if setting.config.dataset.workers is not None:
        return setting.config.dataset.workers
    return fitted.WORKERS if setting.processors is None else min(max(setting.processors - 1, 1), MOST_WORKERS)


def _slower(rates: Rates) -> float:
    """How much slower Python runs on this host than where the constants were fitted."""
    return rates.launch_s / LAUNCH_S


def _host(setting: Setting, load: Load, sizes: Sizes, rates: Rates) -> Passes:
    """Kernels called, gradients taken by ZeRO, and in stage 3 its Python around every module."""
    shape, tune, v = setting.shape, setting.config.tune, setting.shape.vision
    adapters, trains_tower = len(lora_modules(shape, tune)), tune.vision != "frozen"
    blocks = v.depth if v is not None and load.patches > 0 else 0
    each = fitted.LAYER_KERNELS + (shape.experts.count * fitted.EXPERT_KERNELS if shape.experts else 0)
    deltas = shape.layers - len(shape.attending)
    language = shape.layers * each + adapters * fitted.ADAPTER_KERNELS + deltas * fitted.DELTA_KERNELS
    back = fitted.BACKWARD_KERNELS
    if setting.fused:
        language, back = shape.layers * fitted.FUSED_KERNELS, fitted.FUSED_BACKWARD_KERNELS / fitted.FUSED_KERNELS
    reached, again = reaches_language(tune), setting.recomputed
    tower = blocks * fitted.VISION_KERNELS
    called = reached * language + trains_tower * tower
    repeated = reached * language * again + trains_tower * tower * (again > 0)
    kernels = Passes(forward=language + tower, backward=back * called, again=repeated)
    host = kernels.times(rates.launch_s) + Passes(backward=sizes.tensors * fitted.TENSOR_MICRO_S * _slower(rates))
    return host if setting.stage < 3 else host + _zero3(setting, sizes, adapters, blocks).times(_slower(rates))


def _zero3(setting: Setting, sizes: Sizes, adapters: int, blocks: int) -> Passes:
    """ZeRO-3's Python around every module of the decoder's layers and of `blocks` of the tower."""
    shape, tune = setting.shape, setting.config.tune
    # Beside its linear modules a layer has norms, attention, MLP, activation and itself.
    layers = (shape.layers * (len(shape.decoder(0)) + 8) + 4 * adapters) * fitted.MODULE_S
    tower = 10 * blocks * fitted.MODULE_S
    if setting.fused:
        layers, tower = shape.layers * fitted.LEAF_S, blocks * fitted.BLOCK_S
    if setting.fast_tower:
        tower = blocks * fitted.WHOLE_BLOCK_S
    forward = layers + tower + sizes.gathers[0] * fitted.GATHER_S
    back = layers * reaches_language(tune) + tower * (tune.vision != "frozen") + sizes.gathers[1] * fitted.GATHER_S
    return Passes(forward=forward, backward=fitted.ZERO3_BACKWARD * back, again=back * setting.recomputed)
