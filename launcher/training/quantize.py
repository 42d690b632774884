"""tune=qlora: linear layers of the language model in 4 bits (bitsandbytes NF4), everything else as it was.

The vision tower, its mergers, the embeddings and lm_head stay in the run's precision; whether that came out is
checked against the live model's own module names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.families import Family
from launcher.spec import TuneConfig


def loading_options(family: Family, tune: TuneConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs to quantise each weight as it is read, straight onto `device`."""
    from transformers import BitsAndBytesConfig

    skipped = [prefix for part, prefix in family.prefixes if part != "language"]
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=tune.double_quant,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skipped,  # its name is older than 4 bits
    )
    return {"quantization_config": config, "device_map": {"": device}}


def quantize_language(model: Any, family: Family, tune: TuneConfig, dtype: torch.dtype) -> None:
    """Replace the linear layers of a model that is built already, one at a time: never two copies of all of it."""
    bnb, how = _layers(), {"compress_statistics": tune.double_quant, "quant_type": "nf4"}
    for name, linear in _language_linears(model, family).items():
        with torch.device("meta"):
            new = bnb.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, **how)
        weight = linear.weight.detach()
        new.weight = bnb.Params4bit(weight.to("cpu", copy=True), requires_grad=False, module=new, **how).to(
            weight.device
        )
        new.bias = linear.bias
        model.set_submodule(name, new)
    model.is_loaded_in_4bit = True  # peft chooses its layers by this


def check_quantized(model: Any, family: Family) -> None:
    """Raise RuntimeError unless exactly the linear layers of the language model have 4 bits."""
    four = _layers().Linear4bit
    wanted = set(_language_linears(model, family))
    found = {name for name, module in model.named_modules() if isinstance(module, four)}
    if not wanted or wanted != found:
        first = min(wanted ^ found, default="no linear layer at all")
        raise RuntimeError(f"4 bits did not come where they belong: {first} ({len(wanted ^ found)} layers differ)")


def _language_linears(model: Any, family: Family) -> dict[str, nn.Linear]:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linears.items() if family.part_of(name) == "language"}


def _layers() -> Any:
    from bitsandbytes import nn as layers  # imported only where it is used: it is an extra package

    return layers
