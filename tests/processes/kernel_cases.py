"""`python kernel_cases.py FOLDER`, for tests/test_warmup.py: kernels that steps start, and those of a step in small.

Prints a line of JSON: for each case, what a step of a real scorer starts on torch's meta device and what the rehearsal
does, and how many folders Triton's cache has after compiling ahead and after kernels were started in earnest. Needs no
GPU, and Triton that compiles (without TRITON_INTERPRET).
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from launcher.training import precompile, processors, token_loss
from launcher.training.attention import KERNELS
from launcher.training.backbone import language_of
from launcher.training.batching import collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.fused import layer
from launcher.training.rehearsal import Rehearsal, attend_nothing
from launcher.training.spared import change_imports, spare_imports
from tests.groups import GROUPS
from tests.tiny import family_plan

LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}
FULL = {"name": "full", "language": "full", "vision": "frozen", "projector": "frozen"}
CASES = {
    "qwen3_vl lora": ("qwen3_vl", LORA, 2),
    "qwen3 sharded lora": ("qwen3", LORA, 3),
    "qwen2 full": ("qwen2", FULL, 2),
}
TARGET, META = GPUTarget("cuda", 90, 32), torch.device("meta")


def step(plan, groups, *, sharded):
    """The kernels of a forward and a backward pass of the plan's own model; `sharded`: weights stay apart."""
    KERNELS["reference"] = attend_nothing
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu")).to(torch.bfloat16).train()
    encoder = make_encoder(plan, processor)
    encoded = [encoder.encode(group) for group in groups]
    batch = collate(encoded, make_units(encoded, plan.cost, 8192, splittable=False), {}, padded=False)
    scorer.to(META)
    if not sharded:
        layer.lay_together(language_of(scorer.core))
    with precompile.noted(TARGET) as kernels:
        scorer(batch.to(META)).sum().backward()
    return kernels


def answers():
    """The kernels of the loss of answers under a frozen head."""
    hidden = torch.zeros(24, 64, dtype=torch.bfloat16, device=META, requires_grad=True)
    weight = torch.zeros(151936, 64, dtype=torch.bfloat16, device=META)
    with precompile.noted(TARGET) as kernels:
        token_loss.token_losses(hidden, weight, torch.zeros(24, dtype=torch.int64, device=META)).sum().backward()
    return kernels


def told(kernels):
    return sorted(f"{kernel.function.module}.{kernel.function.__name__} {kernel.data}" for kernel in kernels)


def started(plan):
    """Start them all as a step does, but for what needs a GPU."""
    run = JITFunction.run
    JITFunction.run = lambda self, *args, warmup, **options: run(self, *args, warmup=True, **options)
    precompile.aim(TARGET)
    Rehearsal(plan, META).everything(attend_nothing)
    JITFunction.run = run


def main():
    folder = Path(sys.argv[1])
    cache, found = Path(os.environ["TRITON_CACHE_DIR"]), {}
    for number, (name, (family, tune, stage)) in enumerate(CASES.items()):
        plan = family_plan(folder / str(number), family, tune=tune, train={"kernels": "fused"})
        spare_imports(plan)
        change_imports(plan)
        of_step = told(step(plan, GROUPS["text"], sharded=stage == 3))
        plan = replace(plan, precision="bf16", deepspeed={"zero_optimization": {"stage": stage}})
        found[name] = of_step, told(precompile.kernels_of(plan, TARGET))
    config = replace(
        plan.config, task=replace(plan.config.task, name="sft"), train=replace(plan.config.train, kernels="plain")
    )
    plan = replace(plan, config=config)
    kernels = precompile.kernels_of(plan, TARGET)
    found["answers"] = told(answers()), told(kernels)
    failed = precompile.compile_all(kernels, 2, starters=False)
    folders = len(list(cache.iterdir()))
    started(plan)
    print(json.dumps({"cases": found, "failed": failed, "folders": [folders, len(list(cache.iterdir()))]}))


main()
