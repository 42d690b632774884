"""A pretrained model whose weights are read straight to where training needs them: a GPU, or this rank's shard.

transformers' from_pretrained holds a model in host memory first, and under ZeRO-3 reads it on rank 0, which hands every
layer to the others. Here the model is made without weights, and each rank reads its own bytes. Names and shapes are
matched with transformers' own rules; what they would have to compute on the way is left to from_pretrained.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.errors import MachineError, Problem
from launcher.training.weightfiles import Part, read_parts
from launcher.weightheaders import Stored, Unreadable, stored_tensors

GENERATION = "generation_config.json"
Gather = Callable[[Any], list[Any]]  # every rank's value, on every rank


class NotDirect(Exception):
    """Why this model's files must be left to from_pretrained."""


@dataclass(frozen=True, slots=True)
class Direct:
    """A model with its weights, and how many bytes this rank has read for it."""

    model: Any
    read_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """A model without weights, and where in its files they are."""

    folder: Path
    model: Any
    places: Mapping[torch.nn.Parameter, Stored]

    def digests(self) -> dict[str, str]:
        """Of each file by its name: what it holds. Where in it does not count: headers may be of other lengths."""
        held: dict[str, list[str]] = {}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, stored in self.places.items():
            held.setdefault(stored.file.name, []).append(f"{names[parameter]} {stored.shape} {stored.dtype}")
        return {name: hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() for name, lines in held.items()}


def match(model_class: Any, folder: Path, dtype: torch.dtype, *, deepspeed: Mapping[str, Any] | None = None) -> Matched:
    """A model without weights, and which tensors of `folder` it gets; reads no more than headers.

    `deepspeed`: see fill. Raises NotDirect, Damaged.
    """
    if not folder.is_dir():
        raise NotDirect(f"{folder} is no folder")
    if deepspeed is not None:
        _check_shards(deepspeed)
    try:
        stored = stored_tensors(folder)
    except Unreadable as error:
        raise NotDirect(str(error)) from error
    model = _without_weights(model_class, folder, dtype)
    return Matched(folder=folder, model=model, places=_places(model, _renamed(model, stored), dtype))


def fill(
    matched: Matched, device: torch.device, *, deepspeed: Mapping[str, Any] | None = None, turn: float = 0.0
) -> Direct:
    """The model, what from_pretrained gives, with its weights read to `device`.

    `deepspeed` (a finished configuration of ZeRO-3): each rank holds its shard only, where DeepSpeed would put it;
    collective, and ranks must have agreed before. `turn`: see read_parts. Raises OSError.
    """
    model, places = matched.model, matched.places
    parts = list(_sharded(model, places, deepspeed, device) if deepspeed else _whole(model, places, device))
    read_bytes = read_parts(parts, turn=turn)
    buffers_to(model, device)
    if (matched.folder / GENERATION).is_file():
        model.generation_config = type(model.generation_config).from_pretrained(matched.folder)
    return Direct(model.eval(), read_bytes)


def agreed(gather: Gather, matched: Matched | None, reason: str) -> str:
    """Why no rank reads its weights directly, "" where all do; `reason` is this rank's, which then has no Matched.

    Collective. Raises MachineError on every rank where files differ.
    """
    told = gather((socket.gethostname(), {} if matched is None else matched.digests(), reason))
    for rank, (host, _, why) in enumerate(told):
        if why:
            return str(reason or f"rank {rank} on {host} says: {why}")
    first_host, first, _ = told[0]
    for rank, (host, digests, _) in enumerate(told):
        if digests != first:
            name = min(name for name in first.keys() | digests.keys() if first.get(name) != digests.get(name))
            text = f"the weight files of rank {rank} on {host} are not those of rank 0 on {first_host}: {name} differs"
            raise MachineError(Problem(text, tries=("the same files in model.path=FOLDER on every host",)))
    return ""


def _without_weights(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    config = model_class.config_class.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise NotDirect("its weights are quantized")
    config.name_or_path = str(folder)
    model = structure(model_class, config, dtype)
    if model._get_dtype_plan(dtype):
        raise NotDirect("some of its weights keep a precision of their own")
    if {name for name, _ in model.named_buffers()} & model.state_dict().keys():
        raise NotDirect("its files hold buffers")
    return model


def structure(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters on torch's meta device, tied; its buffers, which are no weights, as they should be."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]  # peft needs it too
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        model = model_class._from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def buffers_to(model: Any, device: torch.device) -> None:
    """Move buffers alone: parameters are where they should be."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _renamed(model: Any, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Stored tensors by the names of the model's parameters, by the rules that from_pretrained follows."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    if len(renamings) + len(converters) < len(rules):
        raise NotDirect("transformers knows a rule for its names that is not known here")
    known, prefix = model.state_dict(), model.base_model_prefix
    ignored = re.compile("|".join([r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())]))
    found: dict[str, Stored] = {}
    for key in sorted(stored):
        name, converted = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, converted = rename_source_key(key, [], [], prefix, known)
        if converted is not None and name in known:
            raise NotDirect(f"{key} is not stored as it is used")
        if name in found:
            raise NotDirect(f"{name} is there twice")
        if name in known:
            found[name] = stored[key]
        elif not ignored.search(name):
            raise NotDirect(f"{key} has no place in the model")
    return found


def _places(model: Any, stored: Mapping[str, Stored], dtype: torch.dtype) -> dict[torch.nn.Parameter, Stored]:
    """Which tensor each parameter gets; tied ones are one parameter."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    places = {}
    for parameter, own in names.items():
        there = [name for name in own if name in stored]
        if not there:
            raise NotDirect(f"{own[0]} is missing")
        if len(there) > 1:
            raise NotDirect(f"{' and '.join(there)} are one weight, and stored twice")
        if stored[there[0]].shape != tuple(parameter.shape):
            raise NotDirect(f"{there[0]} is stored as {stored[there[0]].shape}, not {tuple(parameter.shape)}")
        if parameter.dtype != dtype:
            raise NotDirect(f"{own[0]} is {parameter.dtype}")
        places[parameter] = stored[there[0]]
    return places


def replace(module: Any, new: Mapping[torch.nn.Parameter, torch.nn.Parameter], *, recurse: bool = True) -> None:
    """Put new parameters where old ones are; tied ones stay tied."""
    for one in module.modules() if recurse else (module,):
        for name, parameter in one._parameters.items():
            if parameter in new:
                one._parameters[name] = new[parameter]


def _whole(model: Any, places: Mapping[torch.nn.Parameter, Stored], device: torch.device) -> Iterator[Part]:
    """Give every parameter its memory on `device`; what has to be read into it."""
    # Not empty_like: on the meta device that runs in Python, and imports sympy.
    new = {
        old: torch.nn.Parameter(torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=device))
        for old in places
    }
    replace(model, new)
    for old, stored in places.items():
        yield Part(stored=stored, first=0, target=new[old].detach().view(-1))


def _sharded(
    model: Any, places: Mapping[torch.nn.Parameter, Stored], config: Mapping[str, Any], device: torch.device
) -> Iterator[Part]:
    """Give every parameter its shard of this rank; what has to be read into it."""
    shard = sharder(config)
    new: dict[torch.nn.Parameter, Any] = {}  # DeepSpeed gives parameters attributes of its own
    for old in places:
        new[old] = whole = torch.nn.Parameter(torch.empty_like(old, device=shards_on(config, device)))
        shard(whole)  # without content, and whole for a moment only
    replace(model, new)
    for old, stored in places.items():
        for held, place in _held(new[old]):
            first, count = share(stored.numel, held.ds_numel, place)
            if count:
                yield Part(stored=stored, first=first, target=held.detach().view(-1)[:count])


def _check_shards(config: Mapping[str, Any]) -> None:
    zero = config.get("zero_optimization", {})
    if offload_of(config) == "nvme":
        raise NotDirect("its shards lie on NVMe")
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights"):
        raise NotDirect("its shards are quantized")


def _held(parameter: Any) -> Iterator[tuple[Any, int]]:
    """What this rank holds of a sharded parameter, and its place among the ranks that hold the rest: its shard, and
    with hpZ one of the copy that the ranks of a host share, which is what DeepSpeed then gathers weights from."""
    yield parameter.ds_tensor, parameter.ds_zero_partition_rank
    if parameter.ds_secondary_tensor is not None:
        yield parameter.ds_secondary_tensor, torch.distributed.get_rank(parameter.ds_zero_param_process_group)


def sharder(config: Mapping[str, Any]) -> Callable[[torch.nn.Parameter], None]:
    """What makes a whole parameter this rank's shard, as DeepSpeed 0.19.8's zero.Init does while it loads.

    (runtime/zero/partition_parameters.py, _zero_init_param, whose broadcast from rank 0 is left out: the ranks agree.)
    """
    import deepspeed

    init = deepspeed.zero.Init(config_dict_or_path=dict(config))
    with init:  # linear layers find their weight again in the backward pass: see models.keep_no_gathered_weights
        pass

    def shard(parameter: Any) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return shard


def offload_of(config: Mapping[str, Any]) -> str:
    """Where a ZeRO-3 configuration keeps shards between uses: none (the GPU), cpu or nvme."""
    return str((config.get("zero_optimization", {}).get("offload_param") or {}).get("device", "none"))


def shards_on(config: Mapping[str, Any], device: torch.device) -> torch.device:
    """The device that a whole parameter is made on before it is sharded: where its shard will lie."""
    return device if offload_of(config) == "none" else torch.device("cpu")


def share(numel: int, size: int, rank: int) -> tuple[int, int]:
    """First element and number of elements of a rank's shard of `size`; the last shards may be padded, or empty.

    Example:
        >>> [share(10, 4, rank) for rank in range(4)]
        [(0, 4), (4, 4), (8, 2), (12, 0)]
    """
    first = rank * size
    return first, max(0, min(size, numel - first))
