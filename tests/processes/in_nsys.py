"""A rank inside a stand-in for nsys: `in_nsys.py RUN NSYS... -- DEED`; the deed is exit, fail, kill9 or train.

NSYS is the command of an nsys; the rank itself is this program again. `train` goes on until told to stop, then takes a
second to save, longer than nsys stays after SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path

from launcher.errors import ExitCode
from launcher.rundir import RunDir
from launcher.training import nsys
from launcher.training.rankstatus import RankStatus


def main() -> None:
    run, cut = RunDir(Path(sys.argv[1])), sys.argv.index("--")
    command, deed = sys.argv[2:cut], sys.argv[cut + 1]
    status = RankStatus.open(run, 0, "localhost")
    if nsys.GUARD not in os.environ:
        line = nsys.command(run, 0, nsys.program())
        os._exit(nsys.stand_for(run, 0, status, [*command, *line[1:]]))
    nsys.die_with_guard()
    status.update(state="running", phase="training", step=1)
    if deed == "fail":
        status.fail(ValueError("broken"), ExitCode.TRAINING)
        os._exit(ExitCode.TRAINING)
    if deed == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    while deed == "train" and not status.stop_requested:
        time.sleep(0.05)
    if deed == "train":
        time.sleep(1.0)
        print("saved", flush=True)
    status.update(state="stopped" if deed == "train" else "done", phase="ended")
    os._exit(0)


main()
