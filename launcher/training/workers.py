"""Threads that make micro-batches ahead of their use, so that a GPU waits for none.

Threads and not processes: Pillow, NumPy and torch do their work outside the interpreter's lock, and nothing is copied
from one process to another. Whatever their number, what they make comes out the same and in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

from launcher.spec import RunPlan

AHEAD = 3  # micro-batches that are made, or wait, beside the one in use
MOST = 16  # threads that are started unasked

T = TypeVar("T")
Mark = TypeVar("Mark")


class Pool(Protocol):
    """Where work is given to."""

    def submit(self, work: Callable[..., T], /, *args: Any) -> Future[T]:
        """Begin it; what was given first begins first."""
        ...


class Here:
    """Does all work at once, in the thread that asks."""

    def submit(self, work: Callable[..., T], /, *args: Any) -> Future[T]:
        """Do it."""
        future: Future[T] = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def data_workers(plan: RunPlan) -> int:
    """Threads of one rank: `dataset.workers`, or one less than its processors, which a launcher told it by
    OMP_NUM_THREADS: it knows of other ranks and of a container's share."""
    if plan.config.dataset.workers is not None:
        return plan.config.dataset.workers
    told = os.environ.get("OMP_NUM_THREADS", "")
    own = int(told) if told.isdigit() else len(os.sched_getaffinity(0)) // max(host.slots for host in plan.hosts)
    return min(max(own - 1, 1), MOST)


@contextmanager
def threads(count: int, device: torch.device) -> Iterator[tuple[Pool, Pool]]:
    """A single thread that plans, and `count` that work; nothing is begun any more once the body ends."""
    on_gpu = device.type == "cuda"
    begin = (lambda: torch.cuda.set_device(device)) if on_gpu else None  # page-locking would else take the first GPU
    planner = ThreadPoolExecutor(1, "data", begin)
    pool = ThreadPoolExecutor(count, "pixels", begin)
    try:
        yield planner, pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # first: a planner may wait for what is cancelled here
        planner.shutdown(cancel_futures=True)
        pool.shutdown()


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class Ahead(Generic[Mark, T]):
    """What a source gives, taken out of it in another thread, never more than `depth` results ahead.

    The source yields marks and futures of results; they are asked for in the same order. No thread ever waits for
    the one that asks: an iterator that is dropped leaves none hanging.
    """

    def __init__(self, source: Iterator[Mark | Future[T]], planner: Pool, depth: int = AHEAD) -> None:
        self._source, self._planner, self._depth = source, planner, depth
        self._given, self._taken = 0, 0  # results; each is written by one thread
        self._ended = False
        self._queue: SimpleQueue[Any] = SimpleQueue()
        planner.submit(self._fill)

    def mark(self) -> Mark | None:
        """The next mark, None at the end."""
        found = self._next()
        assert not isinstance(found, Future), "results are left that were not asked for"
        return found  # type: ignore[no-any-return]

    def result(self) -> T:
        """The next result; raises what went wrong with it."""
        found = self._next()
        self._taken += 1
        self._planner.submit(self._fill)
        return found.result()  # type: ignore[no-any-return]

    def _next(self) -> Any:
        found = self._queue.get()
        if found is None or isinstance(found, _Failed):
            self._queue.put(found)  # whoever asks again hears it again
        if isinstance(found, _Failed):
            raise found.error
        return found

    def _fill(self) -> None:
        try:
            while not self._ended and self._given - self._taken < self._depth:
                item = next(self._source, None)
                self._ended = item is None
                self._given += isinstance(item, Future)
                self._queue.put(item)
        except BaseException as error:
            self._ended = True
            self._queue.put(_Failed(error))
