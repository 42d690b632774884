"""Start and end of a rank's distributed life: device, process groups, seeds."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launcher.spec import RunPlan


@dataclass(frozen=True, slots=True)
class Rank:
    """Who this process is among the ranks, and how to talk to them."""

    rank: int
    world_size: int
    device: torch.device
    cpu_group: Any  # gloo: small numbers without touching the GPU

    def sum(self, *values: float) -> list[float]:
        """Each value summed over ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.cpu_group)
        return tensor.tolist()

    def table(self, row: Sequence[float]) -> list[list[float]]:
        """Every rank's row of numbers, equally many on each, in float64; for what `gather` is too slow for."""
        rows = [torch.empty(len(row), dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(rows, torch.tensor(row, dtype=torch.float64), group=self.cpu_group)
        return [one.tolist() for one in rows]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, on every rank."""
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.cpu_group)
        return out


@contextmanager
def distributed(plan: RunPlan) -> Iterator[Rank]:
    """Join the process group that the node launcher's variables name; leave it cleanly when the body ends well.

    After an error the group is left as it is: the other ranks are ended from outside, and waiting for them here
    would only delay that.
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = plan.device == "cuda"
    if not on_gpu:
        _without_shared_memory_op()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # DeepSpeed 0.19.8 calls torch.distributed by names that torch 2.14 is about to drop.
    warnings.filterwarnings(
        "ignore", category=FutureWarning, message=".*all_gather_into_tensor|.*reduce_scatter_tensor"
    )
    import deepspeed

    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        # The patch embedding is a convolution, where torch's default is TF32: float32 means float32.
        torch.backends.cudnn.allow_tf32 = plan.precision != "fp32"
    # Rank 0 may load and check for long while the others wait: DeepSpeed's 10 minutes are short for 72B.
    patience = timedelta(minutes=30)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", timeout=patience, verbose=False)
    group: Any = dist.new_group(backend="gloo", timeout=patience) if on_gpu else dist.group.WORLD
    seed_everything(plan.config.train.seed, deterministic=plan.config.train.deterministic)
    yield Rank(rank, dist.get_world_size(), device, group)
    dist.barrier(group=group)
    dist.destroy_process_group()


def _without_shared_memory_op() -> None:
    """Use gloo alone on CPU: DeepSpeed's shared-memory op needs a compiler and two minutes, and leaks /dev/shm."""
    import deepspeed.ops

    # Before DeepSpeed looks for what compilers can build, which its release 0.19.8 does when this is first asked for.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Equal generators on every rank; what must differ by rank is derived where it is used."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
