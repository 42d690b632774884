"""A node of a run over ranks without torch: `meet.py ROOT SECONDS [WORD ...] -- [RANK:DEED ...]`.

It is what `python -m launcher cluster.transport=env WORD ...` is, from the plan on, with the small ranks of `rank.py`
under `node.py`, and without the checks before a start. NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say which node.
SECONDS is how long the nodes wait for one another.
"""

import dataclasses
import os
import queue
import sys
from pathlib import Path

from launcher.errors import LauncherError
from launcher.rundir import RunDir, write_atomic
from launcher.running import meeting as meetings
from launcher.running.agent import Order
from launcher.running.meeting import Meeting
from launcher.running.ownhost import node_order
from launcher.running.restart import Restart, next_plan
from launcher.running.stops import StopSignals
from launcher.running.supervise import supervise
from launcher.running.supervisor import write_supervisor
from launcher.running.together import follow_leader, lead, open_all
from launcher.spec import RunPlan, plan_to_json
from tests.planning_support import plan as make_plan

HERE = Path(__file__).resolve().parent
root, seconds, *rest = sys.argv[1:]
meetings.LINGER_S = 1.0  # all nodes of a test are here by then
words, deeds = rest[: rest.index("--")], rest[rest.index("--") + 1 :]


def order(plan: RunPlan, node_rank: int) -> Order:
    made = node_order(plan, node_rank)
    argv = [sys.executable, str(HERE / "node.py"), str(len(made.ranks)), str(HERE / "rank.py"), "train", "--plan"]
    env = {**made.env, "FIRST_RANK": str(made.ranks[0]), "HOST": made.host, "PYTHONPATH": os.environ["PYTHONPATH"]}
    found = dataclasses.replace(made, argv=[*argv, "plan.json", *deeds], env=env, cwd=plan.run_dir)
    return found if node_rank else dataclasses.replace(found, lost_contact_s=None)


class Means:
    """What supervision needs, as far as these ranks have it."""

    def __init__(self, meeting: Meeting, plan: RunPlan) -> None:
        self.meeting, self.plan, self.run = meeting, plan, RunDir(Path(plan.run_dir))

    def orders(self, plan: RunPlan) -> list[Order]:
        return [order(plan, node_rank) for node_rank in range(len(plan.hosts))]

    def collect(self, unshared: object, give_up: object) -> list[str]:
        return []

    def again(self, restart: Restart) -> RunPlan:
        renewed = next_plan(self.plan, restart, 29998)
        write_atomic(self.run.plan, plan_to_json(renewed))
        write_supervisor(self.run, renewed.run_id)
        for path in self.run.ranks.iterdir():
            path.unlink()
        self.meeting.settle(renewed)
        return renewed


def work() -> int:
    plan = make_plan("cluster.transport=env", *words, environ=dict(os.environ), run_root=root, cwd=root)
    with StopSignals() as stop:
        code = follow_leader(plan, stop, sys.stdout, make_order=order, patience_s=float(seconds))
        if code is not None:
            return code
        inbox: queue.Queue = queue.Queue()
        with lead(plan, [], stop, sys.stdout) as meeting:
            if not meeting.gather(lambda: stop.count > 0, float(seconds)):
                meeting.end(stop.exit_code, "stopped before all nodes had reported")
                return stop.exit_code
            plan = dataclasses.replace(plan, master_addr=meeting.address, master_port=29999)
            run = RunDir(Path(plan.run_dir))
            for folder in (run.logs, run.ranks):
                folder.mkdir(parents=True)
            write_supervisor(run, plan.run_id)
            write_atomic(run.plan, plan_to_json(plan))
            meeting.settle(plan)
            channels = open_all(plan, meeting, inbox)
            code = supervise(plan, Means(meeting, plan), channels, inbox, stop, sys.stdout)
            meeting.end(code, f"node rank 0 says: {code}")
            return code


try:
    sys.exit(work())
except LauncherError as error:
    print(error.render(), file=sys.stderr)
    sys.exit(int(error.exit_code))
