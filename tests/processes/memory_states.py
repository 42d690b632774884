"""What real DeepSpeed engines hold, counted tensor by tensor: `run` is called by the ranks of zero_cases."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.training import losses, processors
from launcher.training.engine import _step, build_scorer, make_engine
from launcher.training.runtime import Rank
from tests.bench.memory_cases import Work
from tests.tiny import tiny_arch, tiny_plan

LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen", "r": 8, "lora_alpha": 16}
FULL = {"name": "full", "language": "full", "vision": "full", "projector": "full"}
BF16_STATES = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FEW = {  # of more than a million elements that the model has
    "stage3_prefetch_bucket_size": 60_000,
    "stage3_max_live_parameters": 400_000,
    "stage3_max_reuse_distance": 300_000,
}

# name -> (ranks, ZeRO stage, tuning, options of `make`)
CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "stage 0, float32": (1, 0, FULL, {"bf16": False}),
    "stage 1": (2, 1, FULL, {}),
    "stage 2": (2, 2, FULL, {}),
    "stage 2, lora": (2, 2, LORA, {}),
    "stage 2, bf16 states": (2, 2, FULL, {"states": BF16_STATES}),
    "stage 2, offload": (2, 2, FULL, {"zero": OFFLOAD}),
    "stage 3, few weights at a time": (2, 3, FULL, {"zero": FEW | {"sub_group_size": 150_000}}),
    "stage 3, lora, few weights at a time": (2, 3, LORA, {"zero": FEW}),
}
WORK = Work(prefix=10, own=(20, 30, 25))
LET_GO_S = 0.05  # gloo's threads hold what they summed a little longer than the sum takes


def make(folder: Path, name: str) -> Any:
    """The plan of a case."""
    ranks, stage, tune, options = CASES[name]
    half = options.get("bf16", True)
    arch = tiny_arch(
        hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    arch["vision_config"]["out_hidden_size"] = 128
    arch["dtype"] = "bfloat16" if half else "float32"
    plan = tiny_plan(folder, stage=stage, ranks=ranks, max_tokens=600, tune=tune)
    zero = {"stage": stage, "reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000, "overlap_comm": False}
    zero |= {"stage3_param_persistence_threshold": 1000} if stage == 3 else {}
    config = plan.deepspeed | {"zero_optimization": zero | options.get("zero", {})}
    if "offload_optimizer" in options.get("zero", {}):
        config["zero_force_ds_cpu_optimizer"] = False
    states = options.get("states", {})
    config |= {"bf16": {"enabled": True, **states}} if half else {}
    config |= {"data_types": {"grad_accum_dtype": "bf16" if states else "fp32"}} if stage else {}
    return dataclasses.replace(plan, arch=arch, precision="bf16" if half else "fp32", deepspeed=config)


class Live(TorchDispatchMode):
    """Bytes of all tensors made inside: now, and the most since `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def reset(self) -> int:
        gc.collect()
        self.most = self.now
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, out)):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._note(value.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self._forget, key)
        more = size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.now += more  # nothing is called in between: threads of gloo let go of tensors too
        self.most = max(self.most, self.now)

    def _forget(self, key: int) -> None:
        less = self.sizes.pop(key, 0)
        self.now -= less


def measure(plan: Any, rank: Rank, processor: Any) -> dict[str, int]:
    """Bytes at some moments of two steps, the second of two micro-batches."""
    found = {}
    with Live() as live:
        scorer = build_scorer(plan, processor, rank.device)
        engine = make_engine(scorer, plan)
        found["loading"] = live.most
        engine.train()
        batch = WORK.micro_batch(plan, padded=scorer.padded)
        own = sum(t.nbytes for t in _tensors(batch))
        for micro in range(3):
            value = losses.loss_of(plan.config)(engine(batch), batch, plan.config.loss) / 10
            found["after forward"] = live.now - own
            engine.backward(value * engine.dp_world_size)
            del value
            time.sleep(LET_GO_S)
            found["between passes"] = live.reset() - own
            if micro != 1:
                _step(engine)
                found["most in step"] = live.most - own
        engine.destroy()
    return found


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    values += [getattr(batch.layout, f.name) for f in dataclasses.fields(batch.layout)]
    values += [getattr(p, f.name) for p in batch.layout.padded for f in dataclasses.fields(p)]
    return [v for v in values if isinstance(v, torch.Tensor)]


def run(out: Path, rank: Rank) -> None:
    """Count for every case of this number of ranks; rank 0 writes memory-N.json."""
    linear, found = torch.nn.functional.linear, {}
    names = [name for name, (ranks, *_) in CASES.items() if ranks == rank.world_size]
    plans = {name: make(out, name) for name in names}
    processor = processors.load_processor(plans[names[0]])
    gc.freeze()  # collecting is asked for often, and libraries have a million objects
    for name, plan in plans.items():
        found[name] = measure(plan, rank, processor)
    gc.unfreeze()
    torch.nn.functional.linear = linear  # ZeRO-3 replaces it for good, and the cases that follow want torch's own
    if rank.rank == 0:
        (out / f"memory-{rank.world_size}.json").write_text(json.dumps(found))
