"""Chooses what is `auto`: the fastest ZeRO setting, number of recomputed layers and micro-batch that fit the GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from launcher.errors import Problem
from launcher.estimates import Choice
from launcher.planning.candidates import (
    AUTO,
    OFFLOADED,
    Ask,
    Scales,
    Weighed,
    asked_layers,
    assumed_row_tokens,
    fewest_layers,
    finished,
    is_measured,
    largest,
    setting_of,
    sharded,
    token_sizes,
)
from launcher.planning.gpus import GIB
from launcher.planning.setting import Setting
from launcher.spec import RunConfig

ALIKE = 0.01  # a prediction tells no two settings apart that differ by less: the simpler one is taken
SHOWN = 6  # runners-up
Finished = tuple[Setting, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was chosen, and over what."""

    chosen: Weighed
    notices: tuple[str, ...]  # of the DeepSpeed configuration
    choices: tuple[Choice, ...]  # the chosen one first; empty where nothing is auto


def choose(ask: Ask) -> Decision:
    """The fastest setting that fits; where none does, the one that needs least. ConfigError for one that is refused."""
    scales = Scales(ask)
    settings, found = _candidates(scales)
    chosen = scales.whole(best(holding_groups(ask, found)))
    notices = next(said for setting, said in settings if setting.config.zero == chosen.setting.config.zero)
    if ask.config.zero.name == AUTO and ask.device == "cuda" and chosen.fits and chosen.layers == ask.shape.layers:
        found += _beside_the_gpus(scales, found)
    return Decision(chosen=chosen, notices=notices, choices=_choices(scales, found, chosen))


def fastest(ask: Ask) -> Weighed:
    """The setting that `choose` takes, not compared with others."""
    scales = Scales(ask)
    return scales.whole(best(holding_groups(ask, _candidates(scales)[1])))


def _candidates(scales: Scales) -> tuple[list[Finished], list[Weighed]]:
    """The settings that may be taken, and each of them weighed; those that offload where none of the others fits."""
    ask = scales.ask
    named = ask.config.zero.name != AUTO
    settings = [setting_of(ask)] if named else list(finished(ask, sharded(ask)))
    found = [one for setting, _ in settings for one in weighed(scales, setting)]
    if not named and ask.device == "cuda" and not any(one.fits for one in found):
        offloaded = list(finished(ask, OFFLOADED))
        settings += offloaded
        found += [one for setting, _ in offloaded for one in weighed(scales, setting)]
    return settings, found


def _beside_the_gpus(scales: Scales, found: Sequence[Weighed]) -> Iterator[Weighed]:
    """The best of each setting that takes main memory: shown, not chosen, for what processors do is not measured."""
    known = {one.zero for one in found}
    for setting, _ in finished(scales.ask, [name for name in OFFLOADED if name not in known]):
        one = best(weighed(scales, setting))
        if one.fits:
            yield scales.whole(one)


def own_beside_auto(config: RunConfig) -> Problem:
    """What is wrong with a DeepSpeed file of the user's beside zero=auto."""
    own = config.zero.config
    text = f"zero=auto chooses one of ds_configs/, and zero.config={own} is a configuration of your own"
    return Problem(text, "", (f"zero=stage2 zero.config={own}", "zero=auto zero.config=null"))


def weighed(scales: Scales, setting: Setting) -> list[Weighed]:
    """A setting with each size of micro-batch worth trying; those that fit have their seconds."""
    ask = scales.ask
    typed, most = asked_layers(ask.config, ask.shape.layers), ask.shape.layers
    if ask.device == "cpu" and typed is None:
        typed = 0
    sizes, found = token_sizes(ask), list[Weighed]()
    for tokens in sizes:
        weigh = partial(scales.weigh, setting, tokens)
        found.append(fewest_layers(weigh, most) if typed is None else weigh(typed))
        if not found[-1].fits:
            break  # nor do larger ones
    for layers in {0, most} if typed is None else {typed}:
        # Between those sizes may lie the one that just fills the GPU.
        filling = largest(partial(scales.weigh, setting, layers=layers), sizes[0], sizes[-1])
        found += [filling] if filling is not None and len(sizes) > 1 else []
    if not any(one.fits for one in found):
        least = min(found, key=lambda one: one.memory.total)
        return [scales.timed(least)]
    return [scales.timed(one) for one in found if one.fits]


def holding_groups(ask: Ask, found: Sequence[Weighed]) -> Sequence[Weighed]:
    """Without micro-batches too small for the documents of a row that must stay together, while rows are not measured
    and others fit."""
    if not ask.config.whole_groups or ask.config.batch.max_tokens != AUTO or ask.device == "cpu" or is_measured(ask):
        return found
    fitting = [one.max_tokens for one in found if one.fits]
    least = min(max(fitting, default=0), assumed_row_tokens(ask))
    return [one for one in found if one.max_tokens >= least]


def best(found: Sequence[Weighed]) -> Weighed:
    """The fastest that fits, the simplest of those as fast; where none fits, what needs least."""
    fitting = [one for one in found if one.fits]
    if not fitting:
        return min(found, key=lambda one: one.memory.total)
    if fitting[0].time is None:
        return fitting[0]
    least = min(one.step_s for one in fitting)
    order = list(dict.fromkeys(one.zero for one in found))
    alike = (one for one in fitting if one.step_s <= (1 + ALIKE) * least)
    return min(alike, key=lambda one: (order.index(one.zero), one.memory.total))


def _choices(scales: Scales, found: Sequence[Weighed], chosen: Weighed) -> tuple[Choice, ...]:
    config = scales.ask.config
    by_zero = config.zero.name == AUTO
    by_size = scales.ask.device == "cuda" and AUTO in (config.memory.gradient_checkpointing, config.batch.max_tokens)
    if not by_zero and not by_size:
        return ()
    others = [best([one for one in found if one.zero == zero]) for zero in dict.fromkeys(one.zero for one in found)]
    others += _neighbours(scales, found, chosen) if by_size else []
    known = {_name(chosen)}
    runners = []
    for one in sorted(others, key=lambda one: (not one.fits, one.step_s)):
        if _name(one) not in known:
            known.add(_name(one))
            runners.append(one.choice(verdict(one, chosen, scales.ask.room.gib)))
    return (chosen.choice("chosen" if chosen.fits else "needs least, and does not fit"), *runners[:SHOWN])


def _name(one: Weighed) -> tuple[str, int, int]:
    return one.zero, one.layers, one.max_tokens


def _neighbours(scales: Scales, found: Sequence[Weighed], chosen: Weighed) -> Iterator[Weighed]:
    """Of the chosen `zero=`: all layers or none recomputed, and the best with a larger or smaller micro-batch."""
    config, most = scales.ask.config, scales.ask.shape.layers
    if config.memory.gradient_checkpointing == AUTO:
        for layers in {0, most} - {chosen.layers}:
            yield scales.timed(scales.weigh(chosen.setting, chosen.max_tokens, layers))
    same = [one for one in found if one.zero == chosen.zero]
    for side in (
        [one for one in same if one.max_tokens > chosen.max_tokens],
        [one for one in same if one.max_tokens < chosen.max_tokens],
    ):
        if side:
            yield min(side, key=lambda one: (not one.fits, one.step_s))


def verdict(one: Weighed, chosen: Weighed, usable_gib: str) -> str:
    """Why a setting lost."""
    if not one.fits:
        return f"does not fit: {one.memory.total / GIB:.1f} of {usable_gib} GiB"
    if one.time is None or chosen.time is None:
        return "not needed"
    slower = one.step_s / chosen.step_s - 1
    if slower < -ALIKE and "offload_optimizer" in _zero(one):
        host = sum(one.memory.host.values()) / GIB
        return f"{chosen.step_s / one.step_s:.1f} times as fast where processors are as assumed; {host:,.0f} GiB a host"
    if slower < -ALIKE:
        return f"{-100 * slower:.0f} % faster, but too small for a row's documents, which this loss compares"
    more = (one.memory.total - chosen.memory.total) / GIB
    size = f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'}" if abs(more) >= 0.05 else "as much memory"
    if slower <= ALIKE:
        why = next(_burdens(one, chosen), None) if more <= 0 else None
        return f"as fast, with {size}" + (f", but {why}" if why else "")
    reasons = list(_burdens(one, chosen)) or [_longest(one, chosen)]
    return f"{100 * slower:.0f} % slower: {' and '.join(reasons[:2])}"


def _burdens(one: Weighed, chosen: Weighed) -> Iterator[str]:
    """What a setting does that the chosen one does not."""
    for key, what in (("offload_param", "weights"), ("offload_optimizer", "optimizer states")):
        if key in _zero(one) and key not in _zero(chosen):
            yield f"keeps {what} in main memory"
    if one.setting.stage == 3 and chosen.setting.stage < 3:
        yield "gathers weights in every micro-batch"
    if one.layers > chosen.layers:
        again = one.layers - chosen.layers
        yield f"recomputes {again} more layer{'s' if again > 1 else ''}"
    if one.max_tokens < chosen.max_tokens:
        yield "more and smaller micro-batches"


def _zero(one: Weighed) -> Iterable[str]:
    zero: dict[str, object] = one.setting.deepspeed["zero_optimization"]
    return zero


def _longest(one: Weighed, chosen: Weighed) -> str:
    """The part of a step that grows most."""
    assert one.time is not None
    assert chosen.time is not None
    before = chosen.time.parts
    grown = {part: seconds - before.get(part, 0.0) for part, seconds in one.time.parts.items()}
    part = max(grown, key=lambda name: grown[name])
    return f"{part} takes {grown[part]:.2g} s longer"
