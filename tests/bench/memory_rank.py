"""One rank of a measured case, started by tests.bench.memory: `... tests.bench.memory_rank SET CASE FOLDER DEVICE`.

It imports everything, prints "ready" and waits for a line: while one case is measured the next one's processes load
their libraries, without touching the GPU. Then FOLDER/records/CASE.rankN.json tells what was measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from launcher.families import family_of
from launcher.spec import RunPlan
from launcher.training import losses, models, processors, quantize
from launcher.training.engine import _step, build_scorer, make_engine
from launcher.training.runtime import Rank, distributed
from tests.bench.memory_cases import MICRO_STEPS, SETS, Case

MOMENTS = ("loading", "start", "forward", "backward", "optimizer")


@dataclass
class Meter:
    """Most bytes at each moment, those that stay after it, and its seconds in every step."""

    on_gpu: bool
    allocated: dict[str, int] = field(default_factory=dict)  # most, at any time of the moment
    reserved: dict[str, int] = field(default_factory=dict)
    kept: dict[str, list[int]] = field(default_factory=dict)  # allocated when the moment ends, every time
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def moment(self, name: str) -> Iterator[None]:
        """Watch the body."""
        self._wait()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        yield
        self._wait()
        self.seconds.setdefault(name, []).append(round(time.perf_counter() - begun, 5))
        if not self.on_gpu:
            return
        self.allocated[name] = max(self.allocated.get(name, 0), torch.cuda.max_memory_allocated())
        self.reserved[name] = max(self.reserved.get(name, 0), torch.cuda.max_memory_reserved())
        self.kept.setdefault(name, []).append(torch.cuda.memory_allocated())

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def measure(case: Case, plan: RunPlan, rank: Rank, found: dict[str, Any]) -> None:
    """Build and train the case; `found` holds what is known so far whenever an error ends it."""
    meter = Meter(rank.device.type == "cuda")
    found.update(memory=asdict(meter), load=asdict(case.work.load))
    found["other_bytes_at_start"] = _not_torch(rank.device)
    try:
        _train(case, plan, rank, meter, found)
    finally:
        found.update(memory=asdict(meter), other_bytes=_not_torch(rank.device))
        if meter.on_gpu:
            stats = torch.cuda.memory_stats()
            names = ("num_alloc_retries", "num_ooms", "requested_bytes.all.peak", "inactive_split_bytes.all.peak")
            found["stats"] = {name: stats.get(name) for name in names}


def _train(case: Case, plan: RunPlan, rank: Rank, meter: Meter, found: dict[str, Any]) -> None:
    processor = processors.load_processor(plan)
    with meter.moment("loading"), _built_in_4_bits(plan):
        scorer = build_scorer(plan, processor, rank.device)
    with meter.moment("start"):
        engine = make_engine(scorer, plan)
    engine.train()
    loss_of, loss = losses.loss_of(plan.config), plan.config.loss
    batches = [case.work.micro_batch(plan, padded=scorer.padded, seed=rank.rank + n) for n in range(MICRO_STEPS)]
    for batch in batches:
        _check_load(case, batch)
    found["step_s"] = []
    for _ in range(case.steps):
        begun = time.perf_counter()
        for batch in batches:
            with meter.moment("forward"):
                batch = batch.to(rank.device)
                value = loss_of(engine(batch), batch, loss) / (100.0 * MICRO_STEPS)
            with meter.moment("backward"):
                engine.backward(value * engine.dp_world_size)
                total = value.detach()
            del value
        with meter.moment("optimizer"):
            _step(engine)
        found["step_s"].append(round(time.perf_counter() - begun, 5))
        found["loss"] = float(total)


def _check_load(case: Case, batch: Any) -> None:
    load = case.work.load
    rows, pixels, visual = batch.layout.key_rows, batch.pixel_values, batch.visual_rows
    counted = {
        "tokens": batch.tokens,
        "visual": 0 if visual is None else len(visual),
        "patches": 0 if pixels is None else len(pixels),
        "key_rows": 0 if rows is None else len(rows),
        "documents": len(batch.last),
        "answers": len(batch.predicted),
    }
    told = {name: getattr(load, name) for name in counted}
    assert counted == told, f"{counted} is not {told}"


def _not_torch(device: torch.device) -> int:
    """Bytes in use on the GPU beside what torch's allocator holds: context, NCCL, and whoever else is there."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@contextlib.contextmanager
def _built_in_4_bits(plan: RunPlan) -> Iterator[None]:
    """Have `models.load_model` build random 4-bit weights one at a time, as pretrained ones load: 72B in 16 bits does
    not fit on a GPU. Layers of one shape get the same numbers."""
    if plan.config.tune.name != "qlora":
        yield
        return
    before = models.load_model
    models.load_model = _quantized_model
    try:
        yield
    finally:
        models.load_model = before


def _quantized_model(plan: RunPlan, special_ids: dict[str, int], device: torch.device, **_: Any) -> Any:
    family, tune, dtype = family_of(plan.config.model, plan.arch), plan.config.tune, models.DTYPES[plan.precision]
    torch.manual_seed(plan.config.train.seed)
    with _parameters_on_meta(), device:
        model = models._model_class(plan)._from_config(models.model_config(plan, special_ids), dtype=dtype)
    bnb, how = quantize._layers(), {"compress_statistics": tune.double_quant, "quant_type": "nf4"}
    numbers: dict[tuple[int, ...], torch.Tensor] = {}
    for name, linear in quantize._language_linears(model, family).items():
        shape = tuple(linear.weight.shape)
        if shape not in numbers:
            numbers[shape] = (torch.randn(shape, dtype=dtype, device=device) * 0.02).cpu().pin_memory()
        with torch.device("meta"):
            new = bnb.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, **how)
        new.weight = bnb.Params4bit(numbers[shape], requires_grad=False, module=new, **how).to(device)
        new.bias = linear.bias
        model.set_submodule(name, new)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = torch.empty(parameter.shape, dtype=dtype, device=device)
                value = value.fill_(1.0) if value.ndim == 1 else value.normal_(std=0.02)
                setattr(module, name, torch.nn.Parameter(value))
    model.tie_weights()
    model.is_loaded_in_4bit = True
    quantize.check_quantized(model, family)
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters take no memory as soon as their module has them; buffers stay."""
    register = torch.nn.Module.register_parameter

    def onto_meta(module: Any, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    torch.nn.Module.register_parameter = onto_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def main() -> None:
    """Wait to be told, measure, write."""
    import deepspeed  # noqa: F401  the slow imports, while another case is measured
    import transformers  # noqa: F401

    group, name, folder, device = sys.argv[1:]
    case = next(case for case in SETS[group] if case.name == name)
    plan = case.plan(device=device)
    if plan.config.tune.name != "full":
        import peft  # noqa: F401
    print("ready", flush=True)
    sys.stdin.readline()
    number = int(os.environ["RANK"])
    found: dict[str, Any] = {"case": name, "rank": number, "device": device}
    code = 0
    try:
        with distributed(plan) as rank:
            if device == "cuda":
                found["gpu"] = torch.cuda.get_device_name()
            kernel, _ = _kernel(plan, rank)
            found |= {"kernel": kernel, "torch": torch.__version__, "transformers": version("transformers")}
            measure(case, plan, rank, found)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
        code = 1
        import traceback

        traceback.print_exc()
    path = Path(folder) / "records" / f"{name}.rank{number}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _kernel(plan: RunPlan, rank: Rank) -> tuple[str, str]:
    from launcher.training.attention import choose_kernel

    return choose_kernel(plan.config.attention.name, rank.device, models.DTYPES[plan.precision])


if __name__ == "__main__":
    main()
