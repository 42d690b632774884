"""One rank of the checkpoint tests: real DeepSpeed engines around a small module, many cases in one process.

python checkpoint_cases.py FOLDER MODE; rank 0 writes FOLDER/MODE.json, {case: result}.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist

from launcher.errors import ConfigError, MachineError
from launcher.resources import ds_configs_dir
from launcher.rundir import RunDir, resolve_resume
from launcher.spec import RunPlan, plan_from_json
from launcher.training import checkpoint, engine_state
from launcher.training.rng import get_rng

CASES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
# Of ds_configs/: (name, precision). Their sharding keys, with the sizes of this small module.
PRESETS = [(f"stage{stage}_{kind}", "bf16") for stage in (2, 3) for kind in ("offload", "bf16_states")]
BATCH, WIDTH = 12, 7


class Net(torch.nn.Module):
    """Odd sizes (so that partitions need padding), a frozen layer, a small parameter that ZeRO-3 keeps gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(WIDTH, 13)
        self.frozen.requires_grad_(False)
        self.wide = torch.nn.Linear(13, 101)
        self.out = torch.nn.Linear(101, 1)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.wide.weight.dtype
        hidden = torch.tanh(self.wide(torch.tanh(self.frozen(x.to(dtype)))))
        return (self.out(torch.nn.functional.dropout(hidden, 0.1 if self.noisy else 0.0)) * self.scale).float()

    noisy = False


def make_engine(stage: int, precision: str, *, groups: int = 1, noisy: bool = False, preset: str | None = None):
    torch.manual_seed(0)
    net = Net()
    net.noisy = noisy
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    split = [[p for _, p in named[i::groups]] for i in range(groups)]
    kinds = [{"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0}][:groups]
    optimizer = torch.optim.AdamW([{"params": ps, **kind} for ps, kind in zip(split, kinds, strict=True)], fused=True)
    config = {
        "train_batch_size": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if preset is not None:
        shipped = json.loads((ds_configs_dir() / f"{preset}.json").read_text())
        sizes = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "stage3_param_persistence_threshold": 8}
        config |= {**shipped, "zero_optimization": {**shipped["zero_optimization"], **sizes}}
        config["zero_force_ds_cpu_optimizer"] = False
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return engine


def train(engine, first: int, last: int) -> list[float]:
    """Steps first..last-1 on a fixed global batch that the ranks divide; global losses."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        share = BATCH // dist.get_world_size()
        mine = x[dist.get_rank() * share :][:share]
        loss = ((engine(mine).squeeze(1) - mine.sum(1)) ** 2).mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def moved(run: RunDir, plan: RunPlan, source: Path, stage: int, precision: str, **kind) -> list[float]:
    engine = make_engine(stage, precision, **kind)
    state = checkpoint.load(engine, source, plan)
    losses = train(engine, state["step"], state["step"] + 3)
    engine.destroy()
    return losses


def unbroken(run: RunDir, plan: RunPlan, stage: int, precision: str, **kind) -> dict:
    """Three steps, a save, three more; then another engine from the save."""
    engine = make_engine(stage, precision, **kind)
    train(engine, 0, 3)
    folder = checkpoint.save(engine, run=run, step=3, state={"epoch": 0, "position": [0, 3]}, plan=plan)
    before = get_rng()["torch"]
    expected = train(engine, 3, 6)
    weights = dict(engine_state.full_weights(engine))
    engine.destroy()
    torch.manual_seed(99)
    fresh = make_engine(stage, precision, **kind)
    train(fresh, 50, 51)  # what was computed before the load must leave no trace
    state = checkpoint.load(fresh, folder, plan)
    same_rng = get_rng()["torch"] == before
    got = train(fresh, 3, 6)
    again = dict(engine_state.full_weights(fresh))
    same = dist.get_rank() != 0 or all(torch.equal(weights[name], again[name]) for name in weights)
    shapes = dist.get_rank() != 0 or {name: list(w.shape) for name, w in weights.items()}
    fresh.destroy()
    return {
        "expected": expected,
        "got": got,
        "same_weights": same,
        "same_rng": same_rng,
        "state": {key: state[key] for key in ("step", "position", "adam_step", "zero_stage", "world_size", "engine")},
        "saved": sorted(state["parameters"]),
        "shapes": shapes,
    }


def write_error(run: RunDir, plan: RunPlan) -> dict:
    """Rank 0 may not write past a few bytes, as on a full disk; later it may again."""
    engine = make_engine(3, "fp32")
    train(engine, 0, 1)
    checkpoint.save(engine, run=run, step=1, state={}, plan=plan)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        checkpoint.save(engine, run=run, step=2, state={}, plan=plan)
        raised = None
    except Exception as error:
        raised = [type(error).__name__, isinstance(error, MachineError), str(error)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors: list = [None] * dist.get_world_size()
    dist.all_gather_object(errors, raised)
    after_error, _ = resolve_resume(run.path)
    checkpoint.save(engine, run=run, step=2, state={}, plan=plan)
    engine.destroy()
    dist.barrier()
    return {
        "errors": errors,
        "after_error": after_error.name,
        "after": resolve_resume(run.path)[0].name,
        "left": sorted(f.name for f in run.checkpoints.iterdir()),
    }


def other_shape(run: RunDir, plan: RunPlan, source: Path) -> str:
    engine = make_engine(2, "fp32")
    engine.module.scale.requires_grad_(False)
    try:
        checkpoint.load(engine, source, plan)
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()
    return "loaded"


def two_ranks(folder: Path, plan: RunPlan) -> dict:
    results: dict = {}
    for stage, precision in CASES:
        name = f"stage{stage}-{precision}"
        results[name] = unbroken(RunDir(folder / name), plan, stage, precision)
    for preset, precision in PRESETS:
        results[preset] = unbroken(RunDir(folder / preset), plan, int(preset[5]), precision, preset=preset)
    results["dropout"] = unbroken(RunDir(folder / "dropout"), plan, 2, "fp32", noisy=True)
    results["two_groups"] = unbroken(RunDir(folder / "two_groups"), plan, 3, "fp32", groups=2)
    results["stage2-groups"] = unbroken(RunDir(folder / "stage2-groups"), plan, 2, "fp32", groups=2)
    for source, target in (("two_groups", 1), ("stage2-groups", 3)):
        saved = RunDir(folder / source).checkpoint(3)
        results[f"{source}-to-stage{target}"] = moved(RunDir(folder), plan, saved, target, "fp32", groups=2)
    for source, target in ((1, 3), (3, 2), (2, 0), (0, 3)):
        saved = RunDir(folder / f"stage{source}-fp32").checkpoint(3)
        results[f"stage{source}-to-stage{target}"] = moved(RunDir(folder), plan, saved, target, "fp32")
    for preset, source in (("stage3_offload", "stage2-bf16"), ("stage2_bf16_states", "stage3-bf16")):
        saved = RunDir(folder / source).checkpoint(3)
        results[f"{source}-to-{preset}"] = moved(RunDir(folder), plan, saved, int(preset[5]), "bf16", preset=preset)
    for source in ("stage2_offload", "stage3_bf16_states"):
        saved = RunDir(folder / source).checkpoint(3)
        results[f"{source}-to-stage1"] = moved(RunDir(folder), plan, saved, 1, "bf16")
    results["write_error"] = write_error(RunDir(folder / "write_error"), plan)
    results["other_shape"] = other_shape(RunDir(folder), plan, RunDir(folder / "stage2-fp32").checkpoint(3))
    return results


def three_ranks(folder: Path, plan: RunPlan) -> dict:
    saved = {stage: RunDir(folder / f"stage{stage}-fp32").checkpoint(3) for stage in (2, 3)}
    groups = moved(RunDir(folder), plan, RunDir(folder / "two_groups").checkpoint(3), 2, "fp32", groups=2)
    alone = {f"stage{s}-3-ranks": moved(RunDir(folder), plan, path, s, "fp32") for s, path in saved.items()}
    return {**alone, "groups-3-ranks": groups}


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    checkpoint.SHARD_BYTES = 10_000  # several files
    deepspeed.init_distributed("gloo", verbose=False)
    plan = plan_from_json((folder / "plan.json").read_text())
    results = {"two": two_ranks, "three": three_ranks}[mode](folder, plan)
    if dist.get_rank() == 0:
        (folder / f"{mode}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as a rank of a run leaves: gloo's threads may abort in the interpreter's own end


if __name__ == "__main__":
    main()
