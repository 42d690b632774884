"""What can be weighed against each other: a run's question to the planner, and settings that answer it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.estimates import Choice, MemoryEstimate, TimeEstimate
from launcher.kernels import fused_layers
from launcher.planning import load, memory, rates, speed
from launcher.planning.facts import TextFile
from launcher.planning.groups import layer_elements
from launcher.planning.models import largest_adapter, trainable_counts
from launcher.planning.room import Room
from launcher.planning.setting import Setting
from launcher.planning.shapes import Shape
from launcher.planning.zero import Trained, finish_zero
from launcher.planning.zero_lint import Settings
from launcher.spec import RunConfig

AUTO = "auto"
# What zero=auto weighs. Stage 0 keeps everything whole for nothing that stage 1 does not do as fast; what changes
# results (zeropp, bf16 states) is never chosen for anybody.
SHARDED = ("stage2", "stage1", "stage3", "stage3_hpz")
OFFLOADED = ("stage2_offload", "stage3_offload")  # weighed where none of the others fits: slow
TOKEN_STEP = 1024
CPU_TOKENS = 8192
GPU_TOKENS = 49152  # a GPU is busy long before this; beyond it only ever more memory is taken
GROWTH = 4 / 3
SPLITS = 8  # micro-batches a step up to which each number of them gives a size to try


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Everything that a choice follows from."""

    config: RunConfig  # as typed: auto where the planner is to choose
    shape: Shape
    files: Mapping[str, TextFile]  # of ds_configs/, by file name
    own: TextFile | None  # the user's DeepSpeed JSON
    precision: str
    lr: float
    device: str  # cuda | cpu
    gpu_kind: str | None
    capability: tuple[int, int] | None  # as RunPlan.capability
    attention: str
    slots: tuple[int, ...]  # ranks of each host
    per_host: int  # GPUs of a host, for other numbers of them
    room: Room
    data: Mapping[str, Any]  # RunPlan.data
    measured: Mapping[str, Any] | None = None  # rates that `check speed` found on the GPUs
    steps_per_epoch: int | None = None
    processors: int | None = None  # of a host, None where they are not known

    @property
    def world(self) -> int:
        """Ranks."""
        return sum(self.slots)

    def on(self, gpus: int) -> Ask:
        """The same on another number of GPUs, on as few hosts as they need."""
        each = min(gpus, self.per_host)
        rest = gpus % each
        return replace(self, slots=(each,) * (gpus // each) + ((rest,) if rest else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """One setting, what it needs and how fast it is."""

    setting: Setting
    max_tokens: int
    memory: MemoryEstimate
    spare: int  # bytes that stay usable on the GPU, below 0 when it does not fit
    time: TimeEstimate | None = None

    @property
    def fits(self) -> bool:
        """Whether a plan may take it."""
        return self.spare >= 0

    @property
    def zero(self) -> str:
        """Its `zero=`."""
        return self.setting.config.zero.name

    @property
    def layers(self) -> int:
        """Decoder layers recomputed."""
        return self.setting.checkpointed_layers

    @property
    def step_s(self) -> float:
        """Seconds of a step, infinite where nothing was predicted."""
        return math.inf if self.time is None else self.time.step_s

    def choice(self, verdict: str) -> Choice:
        """The row of a table."""
        return Choice(
            zero=self.zero,
            checkpointed_layers=self.layers,
            max_tokens=self.max_tokens,
            gpu_bytes=self.memory.total,
            step_s=None if self.time is None else self.time.step_s,
            fits=self.fits,
            verdict=verdict,
        )


def finished(ask: Ask, names: Sequence[str]) -> Iterator[tuple[Setting, tuple[str, ...]]]:
    """The named ones of ds_configs/ as settings with no layer recomputed, and notices; without those that are refused
    here (hpZ on one host, stage 3 with qlora)."""
    for name in names:
        file = f"{name}.json"
        if file in ask.files:
            zero = replace(ask.config.zero, name=name, file=file, config=None)
            try:
                yield setting_of(replace(ask, config=replace(ask.config, zero=zero), own=None))
            except ConfigError:
                continue


def sharded(ask: Ask) -> tuple[str, ...]:
    """What zero=auto weighs; one GPU has nobody to share with: stage 1 makes fewest calls for an adapter's many small
    parameters, and among large ones stage 2 is as good as any."""
    if ask.world > 1:
        return SHARDED
    return ("stage1",) if ask.config.tune.name in ("lora", "qlora") else SHARDED[:1]


def setting_of(ask: Ask) -> tuple[Setting, tuple[str, ...]]:
    """The setting with the `zero=` that is named, and notices; ConfigError when it cannot be."""
    config, shape = ask.config, ask.shape
    settings = Settings(
        world_size=ask.world, precision=ask.precision, lr=ask.lr, config=config, slots=ask.slots, device=ask.device
    )
    fused, _ = fused_layers(config, shape.family, ask.device, ask.capability)
    trained = Trained(
        parameters=sum(trainable_counts(shape, config.tune, config.task).values()),
        largest_adapter=largest_adapter(shape, config.tune),
        layer=layer_elements(shape, config.tune) if fused else 0,
    )
    deepspeed, notices = finish_zero(ask.files[config.zero.file], ask.own, settings, trained)
    setting = Setting(
        config=config,
        shape=shape,
        deepspeed=deepspeed,
        precision=ask.precision,
        device=ask.device,
        gpu_kind=ask.gpu_kind,
        capability=ask.capability,
        world=ask.world,
        slots=max(ask.slots),
        checkpointed_layers=0,
        attention=ask.attention,
        processors=None if ask.processors is None else max(1, ask.processors // max(ask.slots)),
    )
    return setting, tuple(notices)


def asked_layers(config: RunConfig, layers: int) -> int | None:
    """`memory.gradient_checkpointing` as a number, None where it is auto. Raises ConfigError above all layers."""
    asked = config.memory.gradient_checkpointing
    if asked in (AUTO, "all", "none"):
        return {AUTO: None, "all": layers, "none": 0}[asked]
    if int(asked) > layers:
        text = f"memory.gradient_checkpointing={asked}, but the model has {layers} decoder layers"
        raise ConfigError(Problem(text, "", ("memory.gradient_checkpointing=all",)))
    return int(asked)


def needed_tokens(ask: Ask) -> int:
    """The least `max_tokens` that auto may choose: the longest row's, where rows are measured and stay whole, else
    those of the longest prompt that is allowed."""
    config = ask.config
    lengths = [(split.get("lengths") or {}).get("longest", {}).get("tokens") for split in ask.data.values()]
    known = [length for length in lengths if length is not None]
    longest = max(known, default=config.dataset.max_length)
    return round_up(longest if config.whole_groups else min(longest, config.dataset.max_length))


def is_measured(ask: Ask) -> bool:
    """Whether the lengths of the training rows are known."""
    return bool((ask.data.get("train") or {}).get("lengths"))


def assumed_row_tokens(ask: Ask) -> float:
    """Tokens of a row that nobody has read, all of its documents together."""
    step, _, _ = load.step_load(ask.config, ask.shape, ask.data, ask.world, GPU_TOKENS)
    return step.tokens / ask.config.batch.global_size


def token_sizes(ask: Ask) -> list[int]:
    """Values of `max_tokens` worth trying, ascending: those that cut a step into 1, 2, 3 ... micro-batches a rank, and
    each a third above the one before."""
    typed = ask.config.batch.max_tokens
    if typed != AUTO:
        return [int(typed)]
    need = needed_tokens(ask)
    if ask.device == "cpu":
        return [max(CPU_TOKENS, need)]
    step, _, _ = load.step_load(ask.config, ask.shape, ask.data, ask.world, GPU_TOKENS)
    top = max(need, min(GPU_TOKENS, round_up(step.tokens / ask.world)))
    cuts = {round_up(step.tokens / ask.world / count) for count in range(1, SPLITS + 1)}
    grown = {round_up(need * GROWTH**n) for n in range(1, 9)}
    return sorted({need, top} | {size for size in cuts | grown if need < size < top})


def round_up(tokens: float) -> int:
    """In whole thousands of 1,024, at least one."""
    return max(1, math.ceil(tokens / TOKEN_STEP)) * TOKEN_STEP


class Scales:
    """Estimates for one question, each load and each rate looked up once."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._micro = functools.cache(
            lambda tokens: load.micro_load(ask.config, ask.shape, ask.data, tokens, world=ask.world)
        )
        self._step = functools.cache(lambda tokens: load.step_load(ask.config, ask.shape, ask.data, ask.world, tokens))
        self._rates = functools.cache(lambda: rates.rates_of(ask.gpu_kind, ask.measured, hosts=len(ask.slots)))

    def weigh(self, setting: Setting, tokens: int, layers: int) -> Weighed:
        """What a setting needs."""
        setting = replace(setting, checkpointed_layers=layers)
        moments = memory.moments(setting, self._micro(tokens))
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        estimate = MemoryEstimate(gpu=moments[moment], moment=moment)
        spare = self.ask.room.usable - estimate.total
        return Weighed(setting=setting, max_tokens=tokens, memory=estimate, spare=spare)

    def whole(self, weighed: Weighed) -> Weighed:
        """With host and disk too, which nothing is chosen by."""
        return replace(weighed, memory=memory.estimate(weighed.setting, self._micro(weighed.max_tokens)))

    def timed(self, weighed: Weighed) -> Weighed:
        """With its seconds a step; on CPU none are foretold."""
        if self.ask.device == "cpu":
            return weighed
        step, micro_steps, said = self._step(weighed.max_tokens)
        time = speed.predict(weighed.setting, step, micro_steps, self._rates())
        return replace(weighed, time=replace(time, load=said))


def largest(weigh: Callable[[int], Weighed], least: int, most: int) -> Weighed | None:
    """With the largest micro-batch between two sizes that fits, None when not even the least does."""
    low = weigh(least)
    if not low.fits:
        return None
    high = weigh(most)
    if high.fits:
        return high
    return _edge(lambda size: weigh(size * TOKEN_STEP), least // TOKEN_STEP, low, most // TOKEN_STEP, high)


def fewest_layers(weigh: Callable[[int], Weighed], layers: int) -> Weighed:
    """With as few recomputed layers as fit, all of them when none do. From one recomputed layer on, each further one
    takes less memory; the first one also needs room to be computed again."""
    none = weigh(0)
    if none.fits or layers == 0:
        return none
    most = weigh(layers)
    if not most.fits:
        return min(none, most, key=lambda one: one.memory.total)
    first = weigh(1) if layers > 1 else most
    return first if first.fits else _edge(weigh, layers, most, 1, first)


def _edge(weigh: Callable[[int], Weighed], fits: int, good: Weighed, fails: int, bad: Weighed) -> Weighed:
    """The last number that fits on the way from one that does to one that does not.

    Bytes are nearly a straight line between them: where it crosses what is usable is tried first, then the number
    beside it, then halves.
    """
    way, tries, fitted = 1 if fails > fits else -1, 0, False
    while (gap := abs(fails - fits)) > 1:
        if tries == 0:
            step = int(gap * good.spare / (good.spare - bad.spare))
        else:
            step = (1 if fitted else gap - 1) if tries == 1 else gap // 2
        tried = fits + way * min(max(1, step), gap - 1)
        one = weigh(tried)
        fitted, tries = one.fits, tries + 1
        if fitted:
            fits, good = tried, one
        else:
            fails, bad = tried, one
    return good
