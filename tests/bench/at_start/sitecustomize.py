"""Runs as the first Python line of every rank that has this folder on its PYTHONPATH, whoever launched it.

FIRST_LINE=FOLDER   write the time to FOLDER/RANK
FAULT=KIND          on SIGUSR2 raise an exception, leave with 0, or write into /dev/shm; see `tests.bench.faults`

Variables have a prefix that DeepSpeed forwards to other hosts, PYTHON_BENCH_.
"""

import os
import signal
import time


def _break(kind):
    if kind == "raise":
        raise RuntimeError("a rank was told to fail")
    if kind == "leave":
        os._exit(0)
    from multiprocessing.shared_memory import SharedMemory

    block = SharedMemory(create=True, size=64 * 2**20)
    block.buf[:] = bytes(block.size)  # a full /dev/shm is answered with SIGBUS


if "RANK" in os.environ:
    if "PYTHON_BENCH_FIRST_LINE" in os.environ:
        with open(os.path.join(os.environ["PYTHON_BENCH_FIRST_LINE"], os.environ["RANK"]), "w") as file:
            file.write(str(time.monotonic()))
    if "PYTHON_BENCH_FAULT" in os.environ:
        signal.signal(signal.SIGUSR2, lambda *_: _break(os.environ["PYTHON_BENCH_FAULT"]))
