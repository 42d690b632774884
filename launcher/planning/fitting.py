"""Whether what was chosen fits the GPUs and the hosts, and what to type where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from launcher.errors import ConfigError, Problem
from launcher.planning.auto import choose
from launcher.planning.candidates import AUTO, OFFLOADED, Ask, Weighed
from launcher.planning.gpus import GIB
from launcher.planning.models import check_targets
from launcher.planning.scaling import MOST_GPUS, most_frugal, offloaded, relaxed, smallest
from launcher.spec import Host, RunConfig, TuneConfig

MARK = "memory:"  # begins warnings that are made anew once GPUs have been looked at


def shortfall(ask: Ask, chosen: Weighed) -> tuple[list[Problem], list[str]]:
    """A problem when the GPU is known to be too small, a warning when only what is to stay free is used, when the kind
    of GPU is assumed, or when zero=auto had to take what is slow."""
    if chosen.fits:
        slow = ask.config.zero.name == AUTO and chosen.zero in OFFLOADED
        text = f"{MARK} without main memory nothing fits, and zero={chosen.zero} is slow; {_least(ask)}" if slow else ""
        return [], [text] if slow else []
    room, total = ask.room, chosen.memory.total
    if ask.device == "cpu":
        text = f"{MARK} about {_gib(total)} GiB a rank are needed, and {room.gib} GiB are usable of {room.whose}"
        return [], [text + (": fewer ranks (gpus=1) have more each" if ask.world > 1 else "")]
    needs = f"{_called(ask.config)} needs about {_gib(total)} GiB a GPU with {_settings(chosen)} on {_gpus(ask.world)}"
    if total <= room.whole:
        left = f"memory.headroom={ask.config.memory.headroom:g} leaves {room.gib} GiB to plan with"
        return [], [f"{MARK} {needs}, nearly all of {room.whose}; {left}; {_least(ask)}"]
    tries = tuple(_tries(ask))
    text = f"{needs}, more than {room.whose}; {_least(ask)}"
    if not room.known:
        return [], [f"{MARK} {text}" + (f" (try  {tries[0]})" if tries else "")]
    return [Problem(text, "", tries)], []


def _called(config: RunConfig) -> str:
    return f"model={config.model.name} tune={config.tune.name}"


def _settings(one: Weighed) -> str:
    layers = "no layer" if one.layers == 0 else "all layers" if one.layers == one.setting.shape.layers else one.layers
    return f"zero={one.zero}, {layers} recomputed and {one.max_tokens:,} tokens a micro-batch"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _least(ask: Ask) -> str:
    """The sentence with the smallest number of GPUs."""
    found = smallest(relaxed(ask))
    if found is None:
        return f"it fits on no number of such GPUs up to {MOST_GPUS}"
    count, one = found
    return f"the smallest number of such GPUs that fits is {count}, with {_settings(one)}"


def _tries(ask: Ask) -> Iterator[str]:
    """What to type, each of it found to fit."""
    config, free = ask.config, relaxed(ask)
    for words, changed in _lighter(config):
        one = _chosen(replace(ask, config=changed, own=None if changed.zero.name == AUTO else ask.own))
        if one is not None and one.fits:
            yield f"{words}   ({one.zero}, {_gib(one.memory.total)} GiB)"
            break
    found, left = smallest(free), _left_to_planner(config)
    if found is not None and found[0] > ask.world:
        yield " ".join([_number(found[0], ask.per_host), *left])
    for name, tune in _lighter_tuning(config):
        one = most_frugal(replace(free, config=replace(free.config, tune=tune)))
        if one is not None and one.fits and not check_targets(ask.shape, tune):
            yield " ".join([f"tune={name}", *left]) + "   (fits here)"
    host = offloaded(free)
    if host is not None and config.zero.name != AUTO:
        others = (word for word in left if not word.startswith("zero="))
        yield " ".join([f"zero={host.zero}", *others]) + "   (slow: states cross the host link)"


def _left_to_planner(config: RunConfig) -> list[str]:
    """What to type so that nothing that decides memory is fixed."""
    return [
        *(["zero=auto"] if config.zero.name != AUTO else []),
        *(["memory.gradient_checkpointing=auto"] if config.memory.gradient_checkpointing != AUTO else []),
        *(["batch.max_tokens=auto"] if config.batch.max_tokens != AUTO else []),
    ]


def _lighter(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The configuration with more and more left to the planner, and the words for it."""
    words = []
    if config.memory.gradient_checkpointing != AUTO:
        words.append("memory.gradient_checkpointing=auto")
        config = replace(config, memory=replace(config.memory, gradient_checkpointing=AUTO))
        yield " ".join(words), config
    if config.zero.name != AUTO:
        words.append("zero=auto")
        config = replace(config, zero=replace(config.zero, name=AUTO, file=AUTO, config=None))
        yield " ".join(words), config
    if config.batch.max_tokens != AUTO:
        words.append("batch.max_tokens=auto")
        config = replace(config, batch=replace(config.batch, max_tokens=AUTO))
        yield " ".join(words), config


def _lighter_tuning(config: RunConfig) -> Iterator[tuple[str, TuneConfig]]:
    """Tuning that trains less: adapters alone, then adapters beside 4-bit weights."""
    tune = replace(config.tune, language="lora", vision="frozen", projector="frozen", target_modules=None)
    if config.tune.name == "full":
        yield "lora", replace(tune, name="lora", head="frozen")
    if config.tune.name != "qlora":
        yield "qlora", replace(tune, name="qlora", head="frozen")


def _chosen(ask: Ask) -> Weighed | None:
    try:
        return choose(ask).chosen
    except ConfigError:
        return None


def _number(gpus: int, per_host: int) -> str:
    """How a number of GPUs is typed."""
    return f"gpus={gpus}" if gpus <= per_host else f"nodes={-(-gpus // per_host)}"


def host_problems(
    ram: Mapping[str, int], hosts: Sequence[Host], needed: Mapping[str, int], *, zero: str
) -> dict[str, Problem]:
    """Host -> what is wrong with its main memory; `ram`: bytes of the hosts whose size is known.

    `needed`: MemoryEstimate.host, for a host with the most ranks; only such are judged. `zero`: as asked.
    """
    need, most = sum(needed.values()), max(host.slots for host in hosts)
    found = {}
    for host in hosts:
        size = ram.get(host.name)
        if needed and host.slots == most and size is not None and size < need:
            part = max(needed, key=lambda name: needed[name])
            needs = f"{_gib(need)} GiB of main memory are needed for {most} rank{'s' if most > 1 else ''} of a host"
            text = f"{needs}, {_gib(needed[part])} GiB of it for {part}, and {host.name} has {_gib(size)} GiB"
            offload = ("zero=auto   (offloads only what must be)",) if "offload" in zero else ()
            fewer = ("gpus=1   (fewer ranks a host)",) if most > 1 else ()
            found[host.name] = Problem(text, "", (*offload, *fewer, "hosts with more memory"))
    return found
