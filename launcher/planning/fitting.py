"""Whether what was chosen fits the GPUs and the hosts, and what to type where it does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from launcher.errors import ConfigError, Problem
from launcher.estimates import grows_with_tokens
from launcher.planning.auto import choose
from launcher.planning.candidates import AUTO, OFFLOADED, Ask, Weighed, is_measured, needed_tokens
from launcher.planning.gpus import GIB
from launcher.planning.hostram import FEATURES
from launcher.planning.models import check_targets
from launcher.planning.scaling import MOST_GPUS, most_frugal, offloaded, relaxed, smallest
from launcher.spec import Host, RunConfig, TuneConfig

HEADROOM, SHORTEST = 0.05, 256  # of a GPU, as conf/memory/auto.yaml has it; tokens of a prompt that are worth advising
MOST_TRIES = 4
ELSEWHERE = (
    "hosts with GPUs, or with more main memory   (cluster.hostfile=FILE)",
    "cluster.gpu=h200   (with `plan`: for GPUs that are not in this machine)",
)
MARK = "memory:"  # begins warnings that are made anew once GPUs have been looked at


def shortfall(ask: Ask, chosen: Weighed, ram: int | None = None) -> tuple[list[Problem], list[str]]:
    """A problem when the GPU is known to be too small, a warning when only what is to stay free is used, when the kind
    of GPU is assumed, or when zero=auto had to take what is slow.

    `ram`: bytes of the smallest host, where known. What is proposed against a GPU needs no more of them, or no more
    than the run as it is, which `host_problems` judges.
    """
    if chosen.fits:
        slow = ask.config.zero.name == AUTO and chosen.zero in OFFLOADED
        text = f"{MARK} without main memory nothing fits, and zero={chosen.zero} is slow; {_least(ask)}" if slow else ""
        return [], [text] if slow else []
    room, total = ask.room, chosen.memory.total
    if ask.device == "cpu":
        return _short_of_main_memory(ask, chosen)
    needs = f"{_called(ask.config)} needs about {_gib(total)} GiB a GPU with {_settings(chosen)} on {_gpus(ask.world)}"
    if total <= room.whole:
        left = f"memory.headroom={ask.config.memory.headroom:g} leaves {room.gib} GiB to plan with"
        return [], [f"{MARK} {needs}, nearly all of {room.whose}; {left}; {_least(ask)}"]
    limit = None if ram is None else max(ram, _of_host(chosen))
    tries = tuple(_tries(ask, limit))
    text = f"{needs}, more than {room.whose}; {_least(ask)}"
    if not room.known:
        return [], [f"{MARK} {text}" + (f" (try  {tries[0]})" if tries else "")]
    return [Problem(text, "", tries)], []


def _short_of_main_memory(ask: Ask, chosen: Weighed) -> tuple[list[Problem], list[str]]:
    """Of a run on CPUs: a problem where what any micro-batch needs is too much already, else a warning, for how much of
    the rest processors keep is not measured."""
    room, memory = ask.room, chosen.memory
    least = sum(size for part, size in memory.gpu.items() if not grows_with_tokens(part))
    needs = f"{_called(ask.config)} needs about {_gib(memory.total)} GiB a rank with {_settings(chosen)}"
    tries = (*itertools.islice(_fitting_main_memory(ask, chosen), MOST_TRIES), *ELSEWHERE)
    if least > room.whole:
        text = f"{needs}, {_gib(least)} GiB of it with any micro-batch: more than {room.whose}"
        return [Problem(text, "", tries)], []
    text = f"{MARK} {needs}, and {room.gib} GiB are usable of {room.whose}: it may run out of memory"
    return [], [f"{text} (try  {tries[0]})"]


def _fitting_main_memory(ask: Ask, chosen: Weighed) -> Iterator[str]:
    """What to type, each of it found to fit: the fewest changes that do."""
    kinds = [kind for kind in _cpu_changes(ask, chosen) if kind]
    for count in range(1, len(kinds) + 1):
        found = False
        for some in itertools.combinations(kinds, count):
            for picked in itertools.product(*some):
                changed = ask
                for _, change in picked:
                    changed = change(changed)
                one = _chosen(changed)
                if one is not None and one.fits:
                    found = True
                    words = " ".join(words for words, _ in picked)
                    yield f"{words}   ({_gib(one.memory.total)} GiB a rank{_needs(words)})"
        if found:
            return


def _cpu_changes(ask: Ask, chosen: Weighed) -> Iterator[list[tuple[str, Callable[[Ask], Ask]]]]:
    """Kinds of changes that take less main memory, each with the ways to make it: words, and the run with them."""
    config, most, need = ask.config, max(ask.slots), needed_tokens(ask)
    kept = int((ask.room.usable - chosen.memory.total) * 4 // GIB) / 4 + config.memory.vision_cache_gib
    if config.memory.vision_cache_gib > max(0.0, kept):
        yield [_change(f"memory.vision_cache_gib={max(0.0, kept):g}", vision_cache_gib=max(0.0, kept))]
    if config.memory.gradient_checkpointing != "all":
        yield [_change("memory.gradient_checkpointing=all", gradient_checkpointing="all")]
    if chosen.max_tokens > need:
        batch = replace(config.batch, max_tokens=need)
        yield [(f"batch.max_tokens={need}", lambda one: replace(one, config=replace(one.config, batch=batch)))]
    if not (config.cluster.include or config.cluster.exclude):  # which gpus= cannot stand beside
        yield [(f"gpus={count}", partial(_ranks, count=count)) for count in sorted({most // 2, 1}) if 0 < count < most]
    yield [
        (" ".join([f"tune={name}", *_parts_to_type(config.tune, name)]), partial(_tuned, tune=tune))
        for name, tune in _lighter_tuning(config)
        if not check_targets(ask.shape, tune)
    ]


def _change(words: str, **fields: Any) -> tuple[str, Callable[[Ask], Ask]]:
    """Of `memory`."""
    return words, lambda ask: replace(ask, config=replace(ask.config, memory=replace(ask.config.memory, **fields)))


def _tuned(ask: Ask, tune: TuneConfig) -> Ask:
    return replace(ask, config=replace(ask.config, tune=tune))


def _ranks(ask: Ask, count: int) -> Ask:
    """With so many ranks on each host, which share its main memory."""
    more, room = max(ask.slots) / count, ask.room
    room = replace(room, whole=int(room.whole * more), usable=int(room.usable * more))
    return replace(ask, slots=(count,) * len(ask.slots), room=room)


def _called(config: RunConfig) -> str:
    return f"model={config.model.name} tune={config.tune.name}"


def _settings(one: Weighed) -> str:
    most = one.setting.shape.layers
    layers = {0: "no layer", most: "all layers"}.get(one.layers, f"{one.layers} of {most} layers")
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


def _tries(ask: Ask, ram: int | None) -> Iterator[str]:
    """What to type, each of it found to fit the GPUs, and hosts of `ram` bytes; else what would make it smaller."""
    found = list(_fitting(ask, ram))
    return iter(found or ["GPUs with more memory, or a smaller model"])


def _of_host(one: Weighed) -> int:
    """Bytes of a host's main memory, with GPUs in it."""
    return sum(one.memory.host.values())


def _fitting(ask: Ask, ram: int | None) -> Iterator[str]:
    def held(one: Weighed | None) -> TypeGuard[Weighed]:
        return one is not None and one.fits and (ram is None or _of_host(one) <= ram)

    config, free, slow = ask.config, relaxed(ask), False
    for words, changed in _lighter(config):
        one = _chosen(replace(ask, config=changed, own=None if changed.zero.name == AUTO else ask.own))
        if held(one):
            slow = one.zero in OFFLOADED
            yield f"{words}   ({one.zero}, {_gib(one.memory.total)} GiB)"
            break
    found, left = smallest(free), _left_to_planner(config)
    more = found is None or found[0] > ask.world
    if found is not None and more and held(found[1]):
        yield " ".join([_number(found[0], ask), *left]) + f"   ({_gpus(found[0])} or more)"
    for name, tune in _lighter_tuning(config):
        one = most_frugal(replace(free, config=replace(free.config, tune=tune)))
        if held(one) and not check_targets(ask.shape, tune):
            yield (
                " ".join([f"tune={name}", *_parts_to_type(config.tune, name), *left]) + f"   (fits here{_needs(name)})"
            )
    if found is None:
        yield from _shorter(free, left)
    host = offloaded(free) if more and not slow and config.zero.name != AUTO else None
    if held(host):
        others = (word for word in left if not word.startswith("zero="))
        yield " ".join([f"zero={host.zero}{_without_own(config)}", *others]) + "   (slow: states cross the host link)"


def _left_to_planner(config: RunConfig) -> list[str]:
    """What to type so that nothing that decides memory is fixed."""
    return [
        *([f"zero=auto{_without_own(config)}"] if config.zero.name != AUTO else []),
        *(["memory.gradient_checkpointing=auto"] if config.memory.gradient_checkpointing != AUTO else []),
        *(["batch.max_tokens=auto"] if config.batch.max_tokens != AUTO else []),
    ]


def _without_own(config: RunConfig) -> str:
    return "" if config.zero.config is None else " zero.config=null"


def _lighter(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The configuration with more and more left to the planner, and the words for it; the fewest words first."""
    fixed = sorted(_left_to_planner(config), key=lambda word: word.startswith("zero="))
    for words in (words for count in range(1, len(fixed) + 1) for words in itertools.combinations(fixed, count)):
        zero, kept, batch = config.zero, config.memory, config.batch
        if any(word.startswith("zero=") for word in words):
            zero = replace(zero, name=AUTO, file=AUTO, config=None)
        if "memory.gradient_checkpointing=auto" in words:
            kept = replace(kept, gradient_checkpointing=AUTO)
        if "batch.max_tokens=auto" in words:
            batch = replace(batch, max_tokens=AUTO)
        yield " ".join(words), replace(config, zero=zero, memory=kept, batch=batch)


def _lighter_tuning(config: RunConfig) -> Iterator[tuple[str, TuneConfig]]:
    """Tuning that trains less: adapters alone, then adapters beside 4-bit weights."""
    tune = replace(config.tune, language="lora", vision="frozen", projector="frozen", target_modules=None)
    if config.tune.name == "full" or config.tune.use_dora:
        yield "lora", replace(tune, name="lora", head="frozen", use_dora=False)
    if config.tune.name != "qlora" and not config.tune.use_dora:
        yield "qlora", replace(tune, name="qlora", head="frozen")


def _needs(words: str) -> str:
    return "; needs bitsandbytes" if "qlora" in words else ""


def _parts_to_type(tune: TuneConfig, name: str) -> Iterator[str]:
    """What else to type beside `tune=name`, so that nothing but adapters trains: parts keep what was typed for them."""
    usual = "full" if tune.name == "full" else "lora"
    if tune.language != usual:
        yield "tune.language=lora"
    if tune.vision != "frozen":
        yield "tune.vision=frozen"
    if tune.projector not in ("frozen", usual):
        yield "tune.projector=frozen"
    if tune.head != "frozen":
        yield "tune.head=frozen"
    if tune.target_modules is not None:
        yield "tune.target_modules=null"
    if tune.use_dora:
        yield "tune.use_dora=false"


def _shorter(free: Ask, left: Sequence[str]) -> Iterator[str]:
    """Less that stays free, or shorter prompts, where that alone makes it fit."""
    config, room, length = free.config, free.room, free.config.dataset.max_length
    if config.memory.headroom > HEADROOM:
        kept = int((room.whole - room.usable) * HEADROOM / config.memory.headroom)
        one = most_frugal(replace(free, room=replace(room, usable=room.whole - kept)))
        if one is not None and one.fits:
            yield " ".join([f"memory.headroom={HEADROOM:g}", *left])
    while not is_measured(free) and (length := length // 2) >= SHORTEST:
        one = most_frugal(replace(free, config=replace(config, dataset=replace(config.dataset, max_length=length))))
        if one is not None and one.fits:
            yield " ".join([f"dataset.max_length={length}", *left]) + "   (longer documents are cut)"
            return


def _chosen(ask: Ask) -> Weighed | None:
    try:
        return choose(ask).chosen
    except ConfigError:
        return None


def _number(gpus: int, ask: Ask) -> str:
    """How a number of GPUs is typed: all of a host's before another host."""
    if gpus <= ask.per_host:
        return f"gpus={gpus}"
    return f"nodes={-(-gpus // ask.per_host)}" + (f" gpus={ask.per_host}" if min(ask.slots) < ask.per_host else "")


def of_host(needed: Mapping[str, int], device: str) -> Mapping[str, int]:
    """The part of MemoryEstimate.host that is not judged with the ranks: on CPUs, where these share it, the export."""
    return needed if device == "cuda" or "export" in needed else {}


def host_problems(
    ram: Mapping[str, int], hosts: Sequence[Host], needed: Mapping[str, int], ask: Ask
) -> dict[str, Problem]:
    """Host -> what is wrong with its main memory; `ram`: bytes of the hosts whose size is known.

    `needed`: MemoryEstimate.host, for a host with the most ranks; only such are judged.
    """
    need, most = sum(needed.values()), max(host.slots for host in hosts)
    found = {}
    for host in hosts:
        size = ram.get(host.name)
        if needed and host.slots == most and size is not None and size < need:
            part = max(needed, key=lambda name: needed[name])
            needs = f"{_gib(need)} GiB of main memory are needed for {most} rank{'s' if most > 1 else ''} of a host"
            text = f"{needs}, {_gib(needed[part])} GiB of it for {part}, and {host.name} has {_gib(size)} GiB"
            left = size - size // 10 - (need - needed[part])  # a tenth for the host's own
            changes = _host_changes(part, ask, left=left)
            tries = tuple(words for words, changed in changes if _held_by_host(changed, size))
            more = "more hosts: each keeps its part of the states" if part.startswith("offloaded") else ""
            found[host.name] = Problem(text, "", (*tries, *filter(None, [more]), "hosts with more memory"))
    return found


def _held_by_host(ask: Ask, size: int) -> bool:
    """Whether a host of `size` bytes holds a run that fits its GPUs too."""
    one = _chosen(ask)
    if one is None or not (one.fits or ask.device == "cpu"):
        return False
    return sum(of_host(one.memory.host, ask.device).values()) <= size


def _host_changes(part: str, ask: Ask, *, left: int) -> Iterator[tuple[str, Ask]]:
    """What may be typed against the largest part of a host's main memory, and the run with it; `left`: bytes that the
    others leave it."""
    config, ranks = ask.config, max(ask.slots)

    def with_(**parts: Any) -> Ask:
        return replace(ask, config=replace(config, **parts))

    if part == FEATURES:
        slabs = max(0, left // ranks * 4 // GIB)  # the cache takes a quarter of a GiB at a time
        yield f"memory.vision_cache_gib={slabs / 4:g}", with_(memory=replace(config.memory, vision_cache_gib=slabs / 4))
    if part == "export":
        text = "checkpoint.export=false   (`python -m launcher export RUN` makes it elsewhere)"
        yield text, with_(checkpoint=replace(config.checkpoint, export=False))
    if part == "loading":
        zero = replace(config.zero, name="stage3", file="stage3.json", config=None)
        yield "zero=stage3   (one rank alone reads the weights)", replace(with_(zero=zero), own=None)
    if "offload" in config.zero.name:
        zero = replace(config.zero, name=AUTO, config=None)
        yield "zero=auto   (offloads only what must be)", replace(with_(zero=zero), own=None)
    for fewer in sorted({max(1, ranks // 2), 1} - {ranks}, reverse=True):
        changed = replace(ask, slots=(fewer,) * len(ask.slots)) if ask.device == "cuda" else _ranks(ask, fewer)
        yield f"gpus={fewer}   (fewer ranks a host)", changed
