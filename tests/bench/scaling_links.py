"""GB/s that an all-gather reaches between GPUs of this host, as JSON: `python -m tests.bench.scaling_links GPUS [cpu]`.

Bus bandwidth, what each GPU receives from others a second, at several sizes of what all of them hold together.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from launcher.training.calibrate import link_gbs
from tests.bench.scaling_works import NO_MULTICAST

MIB = 2**20
SIZES_MIB = (16, 64, 256, 1024)
BUDGET_S = 0.5  # of a size


def measure(rank: int, world: int, kind: str, folder: str) -> None:
    """One process; the first writes what all found, since they wait for one another."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    sizes = SIZES_MIB if kind == "cuda" else SIZES_MIB[:1]
    found = {f"{size}": round(link_gbs(device, size * MIB, BUDGET_S), 2) for size in sizes}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    count, where = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda"
    os.environ |= NO_MULTICAST
    with tempfile.TemporaryDirectory() as place:
        spawn(measure, (count, where, place), nprocs=count)  # type: ignore[no-untyped-call]
        print(Path(place, "found.json").read_text())
