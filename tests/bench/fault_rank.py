"""A plain torch.distributed program for other launchers: all-reduces until it is ended.

Like any such script it knows nothing of who started it: no log of its own, no signal handler, no death with a parent.
It keeps the number of its steps in FOLDER/RANK, for the bench.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Join the others, and work."""
    folder = Path(sys.argv[-1])
    dist.init_process_group("gloo")
    step = 0
    while True:
        numbers = torch.ones(1000)
        dist.all_reduce(numbers)
        assert numbers[0] == dist.get_world_size()
        step += 1
        (folder / str(dist.get_rank())).write_text(str(step))
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
