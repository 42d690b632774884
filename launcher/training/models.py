"""Load or build the model of a plan, as transformers has it."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from launcher.errors import ConfigError, Problem
from launcher.families import Family, family_of
from launcher.hubs import model_source, weights_folder
from launcher.spec import RunPlan
from launcher.training import direct, layerwise, layouts, quantize
from launcher.weightheaders import Damaged, damage

TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of special_ids: what a model without a tower has
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_model(
    plan: RunPlan,
    special_ids: dict[str, int],
    device: torch.device,
    *,
    partitioned: bool = False,
    quantized: bool = False,
    to_device: bool = False,
    gather: direct.Gather = lambda value: [value],
    large_on: torch.device | None = None,
) -> Any:
    """The model of a plan, nothing frozen, in the plan's precision.

    Random weights are a function of `train.seed` and the device kind: every rank builds the same ones.
    `partitioned` (ZeRO-3) shards pretrained weights over the ranks while they load: no rank holds them all.
    `to_device`: pretrained weights come straight to `device`, or as this rank's shard, where `direct` can read them;
    `gather` lets the ranks decide that alike.
    `large_on`: a random model too large for a GPU is kept there, made on `device` module by module.
    `quantized` (tune.name=qlora) gives the language model's linear layers 4 bits, on `device`; an export's base is not.
    `special_ids` are the tokenizer's ids of the image and vision tokens, which the config must agree with.
    """
    model_class, tune = _model_class(plan), plan.config.tune
    family, dtype = family_of(plan.config.model, plan.arch), DTYPES[plan.precision]
    if plan.config.model.weights == "random":
        large = None if quantized else _large(plan, special_ids, device, large_on, partitioned=partitioned)
        if large is not None:
            return large
        with seeded(plan.config.train.seed, device), device:
            model = model_class._from_config(model_config(plan, special_ids), dtype=dtype)
        if quantized:
            quantize.quantize_language(model, family, tune, dtype)
            quantize.check_quantized(model, family)
        if partitioned:
            keep_no_gathered_weights(plan)
        return model
    source = model_source(plan.config.model)
    if to_device and not quantized:
        model = _read_direct(plan, model_class, source, device, gather, partitioned=partitioned)
        if model is not None:
            return model
    folder = weights_folder(plan.config.model)
    if folder is not None and (damaged := damage(folder)) is not None:  # safetensors does not name the file
        raise _unloadable(source, damaged)
    options = quantize.loading_options(family, tune, dtype, device) if quantized else {}
    if partitioned and family.turned and plan.config.model.path:
        layouts.check_published(Path(source), family, plan.arch["text_config"]["moe_intermediate_size"])
    try:
        with _partitioned_load(plan) if partitioned else contextlib.nullcontext():
            model, info = model_class.from_pretrained(
                source, dtype=dtype, output_loading_info=True, trust_remote_code=False, use_safetensors=True, **options
            )
    except (OSError, SafetensorError) as error:
        raise _unloadable(source, error) from error
    missing = [key for key in info["missing_keys"] if not (key == "lm_head.weight" and _tied(model))]
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        raise _unusable(
            f"{source} does not hold this model: missing {missing[:5]}, unexpected "
            f"{list(info['unexpected_keys'])[:5]}, mismatched {list(info['mismatched_keys'])[:5]}"
        )
    if quantized:
        quantize.check_quantized(model, family)
    return model


def _read_direct(
    plan: RunPlan, model_class: Any, source: str, device: torch.device, gather: direct.Gather, *, partitioned: bool
) -> Any:
    """The model with its weights where training needs them; None, the reason printed, where transformers must load."""
    folder, dtype = weights_folder(plan.config.model), DTYPES[plan.precision]
    local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_SIZE", "1"))
    begun, shards = time.monotonic(), plan.deepspeed if partitioned else None
    matched, reason = None, f"{source} is not on this machine's disk"
    try:
        if folder is not None:
            matched = direct.match(model_class, folder, dtype, deepspeed=shards)
            reason = ""
    except direct.NotDirect as error:
        reason = str(error)
    except OSError as error:
        raise _unloadable(source, error) from error
    reason = direct.agreed(gather, matched, reason)
    if reason or matched is None:
        print(f"weights: loaded by transformers ({reason})")
        return None
    try:
        found = direct.fill(matched, device, deepspeed=shards, turn=0.0 if partitioned else local[0] / local[1])
    except OSError as error:
        raise _unloadable(source, error) from error
    text, seconds = f"{found.read_bytes / 1e9:,.2f} GB", time.monotonic() - begun
    print(f"weights: {text} read straight to {device} in {seconds:.2f} s", flush=True)
    return found.model


def _large(
    plan: RunPlan, special_ids: dict[str, int], device: torch.device, kept_on: torch.device | None, *, partitioned: bool
) -> Any:
    """A model too large to be made whole, with random weights; None for a smaller one."""
    model = direct.structure(_model_class(plan), model_config(plan, special_ids), DTYPES[plan.precision])
    if sum(parameter.numel() for parameter in model.parameters()) <= layerwise.MOST_WHOLE:
        return None
    shards = plan.deepspeed if partitioned else None
    return layerwise.fill(model, device, seed=plan.config.train.seed, deepspeed=shards, rests_on=kept_on)


def _unloadable(source: str, error: Exception) -> ConfigError:
    """A damaged file is named in its error."""
    text = str(error).strip()
    if isinstance(error, Damaged):
        return ConfigError(Problem(text, tries=("copy or download that file again", "model.path=FOLDER")))
    return _unusable(f"the weights of {source} cannot be loaded: {text}")


def _unusable(text: str) -> ConfigError:
    return ConfigError(Problem(text, tries=("model.path=FOLDER with all of its weight files", "model.weights=random")))


def model_config(plan: RunPlan, special_ids: dict[str, int]) -> Any:
    """transformers' config of `plan.arch`, its special token ids taken from the tokenizer in use."""
    sees = family_of(plan.config.model, plan.arch).sees
    ids = {name: index for name, index in special_ids.items() if sees or name in TEXT_IDS}
    arch = {key: value for key, value in copy.deepcopy(plan.arch).items() if key != "architectures"}
    return _model_class(plan).config_class(**arch | ids)


def _model_class(plan: RunPlan) -> Any:
    import transformers

    return getattr(transformers, family_of(plan.config.model, plan.arch).model_class)


def mark_leaves(model: Any, family: Family) -> None:
    """Have ZeRO-3 gather sparse and fused layers whole, before a forward and before a backward pass through them.

    Which experts run, and when, differs between ranks. Fused layers (`launcher.training.fused`) and the fast tower
    (`vision_tower`) read weights without calling the modules that hold them. They are no leaves of DeepSpeed's, which
    reduces the gradients of a leaf when its input's gradient is known: at once where the input needs none, before
    there are any.
    Before deepspeed.initialize. Raises ConfigError for a sparse layer that the family does not name.
    """
    from deepspeed.runtime.zero import register_external_parameter
    from deepspeed.utils import set_z3_leaf_modules

    for module in model.modules():
        for parameter in module.parameters() if hasattr(module, "fused") else ():
            register_external_parameter(module, parameter)
    kinds = {type(module).__name__ for module in model.modules()}
    if family.leaves:
        set_z3_leaf_modules(model, list(family.leaves))
    elif sparse := sorted(kind for kind in kinds if "Experts" in kind or "Moe" in kind):
        text = f"the layers {', '.join(sparse)} hold experts, and family {family.model_type} names none for ZeRO-3"
        raise ConfigError(Problem(text, "launcher/families.py", ("zero=stage2",)))


def restore_tied_head(model: Any) -> None:
    """Give a tied model its own lm_head: the rerank head must not follow the embeddings as they train."""
    if _tied(model):
        head = model.lm_head
        head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False


def _tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators started from `seed` inside, and as they were after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def keep_no_gathered_weights(plan: RunPlan) -> None:
    """Have linear layers under ZeRO-3 find their weight again in the backward pass, as loading pretrained ones does.

    torch's own keeps a view of it from the forward pass on, and with that every gathered weight. DeepSpeed replaces
    the function for good when zero.Init is entered (partition_parameters.py, memory_efficient_linear).
    """
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=plan.deepspeed):
        pass


@contextlib.contextmanager
def _partitioned_load(plan: RunPlan) -> Iterator[None]:
    """transformers partitions weights while loading as long as this object lives (it keeps a weak reference)."""
    from transformers.integrations import HfDeepSpeedConfig

    keep_alive = HfDeepSpeedConfig(plan.deepspeed)
    yield
    del keep_alive
