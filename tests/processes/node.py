"""Stands in for DeepSpeed's node launcher where its start (an import of torch) costs more than it tells.

`node.py RANKS PROGRAM ARGUMENTS` starts the ranks the same way, reaps them once a second, and leaves with the code of
the first that failed.
"""

import os
import subprocess
import sys
import time

ranks, first = int(sys.argv[1]), int(os.environ.get("FIRST_RANK", "0"))
started = [
    subprocess.Popen([sys.executable, *sys.argv[2:]], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)})
    for rank in range(first, first + ranks)
]
for process in started:
    print(f"process {process.pid} spawned with command: {process.args}", flush=True)  # DeepSpeed's words
while started:
    for process in list(started):
        if process.poll() is None:
            continue
        if process.returncode != 0:
            for other in started:
                other.terminate()
            sys.exit(process.returncode)
        started.remove(process)
    time.sleep(1)
