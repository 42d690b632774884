"""Supervises a run of rank programs: `supervisor.py RUN ORDERS.json`, as `launcher run` does after its preparations."""

import dataclasses
import json
import queue
import signal
import sys
from pathlib import Path

from launcher.rundir import RunDir
from launcher.running.agent import Order
from launcher.running.restart import next_plan, restarts_of
from launcher.running.stops import StopSignals
from launcher.running.supervise import supervise
from launcher.running.supervisor import write_supervisor
from launcher.running.transport import open_channels
from launcher.spec import plan_from_json, plan_to_json
from launcher.streams import SafeStream

run = RunDir(Path(sys.argv[1]))
orders = [Order(**order) for order in json.loads(Path(sys.argv[2]).read_text())]
plan = plan_from_json(run.plan.read_text())
write_supervisor(run, orders[0].run_id)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
inbox = queue.Queue()
channels = open_channels(plan, inbox)


class Means:
    """The orders as they are written down, for each start."""

    def orders(self, plan):
        again = restarts_of(plan.run_id)
        return [dataclasses.replace(order, run_id=plan.run_id) if again else order for order in orders]

    def collect(self, unshared, give_up):
        return []

    def again(self, restart):
        renewed = next_plan(plan, restart, 0)
        run.plan.write_text(plan_to_json(renewed))
        for path in run.ranks.iterdir():
            path.unlink()
        write_supervisor(run, renewed.run_id)
        return renewed


with StopSignals() as stop:
    sys.exit(supervise(plan, Means(), channels, inbox, stop, SafeStream(sys.stdout)))
