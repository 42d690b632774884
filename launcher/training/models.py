"""Load or build the model of a plan, as transformers has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError

from launcher.errors import ConfigError, Problem
from launcher.spec import RunPlan

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_model(plan: RunPlan, special_ids: dict[str, int], device: torch.device, *, partitioned: bool = False) -> Any:
    """The Qwen3-VL model of a plan, nothing frozen, in the plan's precision.

    Random weights are a function of `train.seed` and the device kind: every rank builds the same ones.
    `partitioned` (ZeRO-3) shards pretrained weights over the ranks while they load: no rank holds them all.
    `special_ids` are the tokenizer's ids of the image and vision tokens, which the config must agree with.
    """
    from transformers import Qwen3VLForConditionalGeneration

    dtype = DTYPES[plan.precision]
    if plan.config.model.weights == "random":
        with seeded(plan.config.train.seed, device), device:
            return Qwen3VLForConditionalGeneration._from_config(model_config(plan, special_ids), dtype=dtype)
    source = plan.config.model.path or plan.config.model.repo
    try:
        with _partitioned_load(plan) if partitioned else contextlib.nullcontext():
            model, info = Qwen3VLForConditionalGeneration.from_pretrained(
                source, dtype=dtype, output_loading_info=True, trust_remote_code=False, use_safetensors=True
            )
    except (OSError, SafetensorError) as error:
        raise _unusable(f"the weights of {source} cannot be loaded: {str(error).strip()}") from error
    missing = [key for key in info["missing_keys"] if not (key == "lm_head.weight" and _tied(model))]
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        raise _unusable(
            f"{source} does not hold this model: missing {missing[:5]}, unexpected "
            f"{list(info['unexpected_keys'])[:5]}, mismatched {list(info['mismatched_keys'])[:5]}"
        )
    return model


def _unusable(text: str) -> ConfigError:
    return ConfigError(Problem(text, tries=("model.path=FOLDER with all of its weight files", "model.weights=random")))


def model_config(plan: RunPlan, special_ids: dict[str, int]) -> Any:
    """transformers' config of `plan.arch`, its special token ids taken from the tokenizer in use."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(**{key: value for key, value in plan.arch.items() if key != "architectures"} | special_ids)


def restore_tied_head(model: Any) -> None:
    """Give a tied model its own lm_head: the rerank head must not follow the embeddings as they train."""
    if _tied(model):
        head = model.lm_head
        head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
        model.config.text_config.tie_word_embeddings = False


def _tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators started from `seed` inside, and as they were after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _partitioned_load(plan: RunPlan) -> Iterator[None]:
    """transformers partitions weights while loading as long as this object lives (it keeps a weak reference)."""
    from transformers.integrations import HfDeepSpeedConfig

    keep_alive = HfDeepSpeedConfig(plan.deepspeed)
    yield
    del keep_alive
