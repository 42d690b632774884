"""Errors of one rank reach all: the alternative is a hang in the next collective call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors import SafetensorError

from launcher.errors import MachineError, Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def together(group: ProcessGroup | None, action: Callable[[], Any] | None) -> None:
    """Run `action` (None: nothing to do on this rank); raise on every rank when it failed on any.

    Collective. `action` itself must not communicate. The rank that failed raises its own error, a
    failed read or write as MachineError; the others raise the same text.
    """
    own: BaseException | None = None
    try:
        if action is not None:
            action()
    except Exception as error:
        own = error
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, None if own is None else f"{type(own).__name__}: {own}", group=group)
    if isinstance(own, OSError | SafetensorError):
        advice = ("check the disk (free space, permission, mount), then resume=RUN",)
        raise MachineError(Problem(str(own), tries=advice)) from own
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"rank {rank} failed: {text}")
