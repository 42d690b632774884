"""Supervises a run of rank programs: `supervisor.py RUN ORDER.json`, as `launcher run` does after its preparations."""

import json
import signal
import sys
from pathlib import Path

from launcher.rundir import RunDir
from launcher.running.agent import Order
from launcher.running.supervise import StopSignals, supervise
from launcher.running.supervisor import write_supervisor
from launcher.streams import SafeStream

run = RunDir(Path(sys.argv[1]))
order = Order(**json.loads(Path(sys.argv[2]).read_text()))
write_supervisor(run, order.run_id)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
with StopSignals() as stop:
    sys.exit(supervise(order, stop, SafeStream(sys.stdout), metric="ndcg@10"))
