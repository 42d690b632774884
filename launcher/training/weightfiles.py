"""Tensors of safetensors files, read by several threads straight to where they are needed.

A part of a tensor is a range of a file (launcher.weightheaders), so a rank under ZeRO-3 reads its own part and nothing
else; the ranks of a host share the disk's work through the page cache.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher.weightheaders import FLOATS, Stored

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
CHUNK = 16 * 2**20  # bytes of one read: long enough for a disk, and two a thread are little to pin
MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Elements of a stored tensor from `first` on, which fill `target` (flat, of any dtype and device)."""

    stored: Stored
    first: int
    target: torch.Tensor


def read_parts(parts: Sequence[Part], *, turn: float = 0.0) -> int:
    """Fill every target; the bytes read. Raises OSError.

    `turn` (0 to 1) is where in the files to begin: ranks of a host that all read the same begin apart, so that each
    byte comes from the disk once. Targets on a GPU are filled through pinned memory.
    """
    chunks = [chunk for part in sorted(parts, key=_place) for chunk in _chunks(part)]
    first = int(len(chunks) * turn) % max(1, len(chunks))
    waiting: queue.SimpleQueue[Part] = queue.SimpleQueue()
    for chunk in (*chunks[first:], *chunks[:first]):
        waiting.put(chunk)
    count = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), len(chunks)))
    threads = [_Reader(waiting) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.error is not None:
            raise thread.error
    return sum(chunk.target.numel() * _width(chunk.stored) for chunk in chunks)


def _width(stored: Stored) -> int:
    return FLOATS[stored.dtype]


def _place(part: Part) -> tuple[str, int]:
    return str(part.stored.file), part.stored.start + part.first * _width(part.stored)


def _chunks(part: Part) -> Iterable[Part]:
    size = CHUNK // _width(part.stored)
    for at in range(0, part.target.numel(), size):
        target = part.target[at : at + size]
        yield Part(stored=part.stored, first=part.first + at, target=target)


class _Reader(threading.Thread):
    """Takes chunks until none is left; two buffers, so that a copy to the GPU runs while the next is read."""

    def __init__(self, waiting: queue.SimpleQueue[Part]) -> None:
        super().__init__(daemon=True, name="weights")
        self.error: BaseException | None = None
        self._waiting = waiting
        self._files: dict[Path, int] = {}
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def run(self) -> None:
        try:
            with torch.no_grad():
                for number in range(2**62):
                    try:
                        part = self._waiting.get_nowait()
                    except queue.Empty:
                        break
                    self._take(part, number % 2)
            for event in self._copied:
                if event is not None:
                    event.synchronize()
        except BaseException as error:  # told to whoever waits
            self.error = error
        finally:
            for descriptor in self._files.values():
                os.close(descriptor)

    def _take(self, part: Part, which: int) -> None:
        target, dtype = part.target, DTYPES[part.stored.dtype]
        if target.device.type == "cpu" and target.dtype == dtype:
            self._read(part, target)
            return
        on_gpu = target.device.type == "cuda"
        if not self._buffers:
            if on_gpu:
                torch.cuda.set_device(target.device)  # a thread begins on the first GPU, and would take memory there
            self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        event = self._copied[which]
        if event is not None:
            event.synchronize()
        staged = self._buffers[which][: target.numel() * dtype.itemsize].view(dtype)
        self._read(part, staged)
        # Over the bus as it is: a conversion on the way would be the processor's.
        target.copy_(staged.to(target.device, non_blocking=True) if on_gpu else staged)
        if on_gpu:
            self._copied[which] = event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(target.device))

    def _read(self, part: Part, into: torch.Tensor) -> None:
        file, at = part.stored.file, part.stored.start + part.first * _width(part.stored)
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        view = memoryview(into.view(torch.uint8).numpy().data)
        done = 0
        while done < len(view):
            got = os.preadv(self._files[file], [view[done:]], at + done)
            if got == 0:
                raise OSError(f"{file} ends early: it was cut short while it was read")
            done += got
