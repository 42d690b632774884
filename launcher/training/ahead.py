"""Bring weight files into the page cache while a rank imports its libraries. Standard library only.

Imports take seconds of one processor and nothing of the disk. The ranks of a host share the files, so that each byte is
read once; what is in memory already costs a look at one page in 16 MiB.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.hubs import weights_folder
from launcher.spec import RunPlan

CHUNK = 16 * 2**20
SPARE = 1.5  # free memory for every byte: the cache must not push out what others need


def start_reading(plan: RunPlan, rank: int, ranks: int) -> threading.Thread | None:
    """Begin to read a pretrained model's files, the part of `rank` of a host's `ranks`; None when there is nothing to
    do."""
    model = plan.config.model
    folder = weights_folder(model) if model.weights == "pretrained" and _all_is_needed(plan) else None
    try:
        files = sorted(folder.glob("*.safetensors")) if folder is not None else []
        wanted = list(chunks(files, rank, ranks))
        if not wanted or sum(file.stat().st_size for file in files) * SPARE > free_bytes():
            return None
    except OSError:  # a link to nothing in a hub's cache: told when the weights are loaded
        return None
    thread = threading.Thread(target=read, args=(wanted,), daemon=True, name="ahead")
    thread.start()
    return thread


def _all_is_needed(plan: RunPlan) -> bool:
    """Whether a host needs every byte: of shards over several hosts it needs its own, and hosts may share a disk."""
    zero = plan.deepspeed.get("zero_optimization", {})
    return len(plan.hosts) == 1 or zero.get("stage") != 3 or zero.get("zero_hpz_partition_size", 1) > 1


def chunks(files: Sequence[Path], rank: int, ranks: int) -> Iterator[tuple[Path, int]]:
    """(file, first byte) of every chunk that a rank reads; together the ranks read all, in the order of the files."""
    every = ((file, at) for file in files for at in range(0, file.stat().st_size, CHUNK))
    return (chunk for number, chunk in enumerate(every) if number % ranks == rank)


def read(wanted: Sequence[tuple[Path, int]]) -> int:
    """Read chunks that are not in memory; how many. What fails here is told when the weights are loaded."""
    count, buffer, page = 0, bytearray(CHUNK), bytearray(1)
    for file, at in wanted:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            continue
        try:
            if not _in_memory(descriptor, page, at + CHUNK // 2) or not _in_memory(descriptor, page, at):
                os.preadv(descriptor, [buffer], at)
                count += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return count


def _in_memory(descriptor: int, page: bytearray, at: int) -> bool:
    try:
        os.preadv(descriptor, [page], at, os.RWF_NOWAIT)
    except OSError:  # it would have to wait, or this file system cannot say
        return False
    return True


def free_bytes() -> int:
    """What the kernel could give without swapping; 0 when it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
