"""How much of a GPU a run may fill: all of it, less what others hold, less `memory.headroom`."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.planning.gpus import ASSUMED_KIND, GIB, GPU_KINDS

SHOWN_BYTES = GIB  # held by others, from which on it is said: a driver alone holds some hundred MiB

NO_LIMIT = 2**62  # main memory of hosts that nobody has looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The smallest GPU of a run (or the RAM of one CPU rank)."""

    whole: int  # bytes, less what others hold
    usable: int  # of these, what a plan fills: memory.headroom stays free
    whose: str  # within a sentence: "the 140.4 GiB of a GPU (NVIDIA H200)"
    known: bool  # False: only assumed, so that nothing is refused for it

    @property
    def gib(self) -> str:
        """The usable part for a person."""
        return f"{self.usable / GIB:.1f}"


def room_of(
    memory_bytes: int | None,
    *,
    headroom: float,
    device: str,
    kind: str | None,
    which: str = "",
    used: int = 0,
    users: str = "",
) -> Room:
    """`memory_bytes`: of one GPU or rank, None when not known; `which` one, where that is; `used` of them others hold,
    named by `users`."""
    known = memory_bytes is not None
    if memory_bytes is None and device == "cpu":
        return Room(whole=NO_LIMIT, usable=NO_LIMIT, whose="the main memory of a rank", known=False)
    size = GPU_KINDS[ASSUMED_KIND].memory_bytes if memory_bytes is None else memory_bytes
    each = which or ("a GPU" if device == "cuda" else "a rank")
    name = f" ({kind})" if kind and known else "" if known else f" ({ASSUMED_KIND}, assumed)"
    whose = f"the {size / GIB:.1f} GiB of {each}{name}"
    if used >= SHOWN_BYTES:
        whose += f", of which {used / GIB:.1f} GiB are in use{f' by {users}' if users else ''}"
    return Room(whole=size - used, usable=int(size * (1 - headroom)) - used, whose=whose, known=known)
