"""The programs that a node's own launcher runs for the leader of its run, and what the leader may say to them."""

from __future__ import annotations

import json
import os
import queue
import re
from collections.abc import Callable
from dataclasses import asdict

from launcher.planning.hosts import render_hosts
from launcher.running.agent import Order, kill_run
from launcher.running.fabric import deciding
from launcher.running.folder import without_secrets
from launcher.running.guard import Guard
from launcher.running.hello import Message
from launcher.running.orders import order_of
from launcher.running.transport import LOST, Channel, Door, Event, python_argv
from launcher.spec import RunPlan, plan_to_json

# What a leader may have done here: it looks, and it guides the agent. Nothing that writes a file of its choice.
TOLD = {
    "probe": ("look", "resolve", "route", "listen", "dial", "end"),
    "fabric_probe": ("fabric", "end"),
    "agent": ("stop", "fail", "kill", "heard", "alive", "gone", "stacks", "clean"),
    "carry": ("tree", "look", "mark", "unmark", "which", "end"),
}
_MARK = re.compile(r"\.launcher-mark-[0-9a-f]+(-[0-9]+)?")

MakeOrder = Callable[[RunPlan, int], Order]


class OwnHost:
    """This node as a host of the run; `plan` is completed by what the leader says before the agent starts."""

    def __init__(self, plan: RunPlan, node_rank: int, emit: Callable[[Event], None], make_order: MakeOrder) -> None:
        self.plan, self.node_rank = plan, node_rank
        self.busy = False  # an agent has an order and is not done
        self._emit, self._make_order = emit, make_order
        self._inbox: queue.Queue[Event] = queue.Queue()
        self._channel: Channel | None = None
        self._program = ""
        self._guard: Guard | None = None
        self._guarded = False

    @property
    def name(self) -> str:
        """Of this host in the plan."""
        return self.plan.hosts[self.node_rank].name

    def start(self, program: str) -> None:
        """Run this node's copy of a program. ValueError for one that a leader may not start."""
        if program not in TOLD:
            raise ValueError(f"a start of {program!r}")
        if self._channel is None:
            self._channel = Channel(Door(self.name, python_argv(self.plan.config.cluster), True), self._inbox)
        self._channel.start(program)
        self._program = program

    def order(self) -> None:
        """Give the agent its order, made here."""
        if self._channel is None or self._program != "agent":
            raise ValueError("an order for no agent")
        self._channel.send(asdict(self._make_order(self.plan, self.node_rank)))
        self.busy = True

    def tell(self, message: Message) -> None:
        """Pass on what the leader says to the program. ValueError for what it may not say."""
        if "bytes" in message and "do" not in message:
            return  # how long the next line is, which is as well read to its end
        do = message.get("do")
        if do not in TOLD.get(self._program, ()):
            raise ValueError(f"{do!r} for {self._program or 'no program'}")
        if self._program == "carry" and do in ("mark", "unmark") and not _MARK.fullmatch(str(message.get("name"))):
            raise ValueError(f"a mark {message.get('name')!r}")
        if self._program == "agent":
            message = {"do": do} if do != "clean" else {"do": do, "run_id": self.plan.run_id}
        if (do == "look" and self._program == "probe") or do == "fabric":
            path = [entry for entry in self.plan.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
            message = {**message, "cwd": os.getcwd(), "path": path}
            if do == "fabric":
                message["env"] = deciding(self.plan.env)
            if isinstance(message.get("hub"), dict):
                message["hub"] = {**message["hub"], "env": self.plan.env}
        if self._channel is not None:
            self._channel.send(message)

    def tell_agent(self, do: str) -> None:
        """Say something to the agent, if there is one."""
        if self.busy and self._channel is not None:
            self._channel.send({"do": do})

    def poll(self) -> None:
        """Pass on what the program says, and guard the agent against our own death."""
        while not self._inbox.empty():
            event = self._inbox.get()
            if event["event"] == LOST and self.busy:
                kill_run(self.plan.run_id)  # the kernel has killed its ranks; helper processes may be left
            if event["event"] in ("done", LOST):
                self._leave_agent()
            if event["event"] == LOST:
                self.close()
            self._emit({key: value for key, value in event.items() if key != "received"})
        if self.busy and not self._guarded and self._channel is not None and self._channel.idle:
            self._guard = self._guard or Guard(self.plan.config.cluster.lost_contact_s)
            self._guard.watch(self.name, self._channel.stdin)
            self._guarded = True

    def kill(self) -> None:
        """End the program at once."""
        if self._channel is not None:
            self._channel.kill()

    def close(self) -> None:
        """End the program by the end of its input."""
        self._leave_agent()
        if self._channel is not None:
            self._channel.close()
        self._channel, self._program = None, ""

    def leave(self) -> None:
        """End everything."""
        self.close()
        if self._guard is not None:
            self._guard.close()

    def _leave_agent(self) -> None:
        if self._guarded and self._guard is not None:
            self._guard.forget(self.name)
        self.busy = self._guarded = False


def node_order(plan: RunPlan, node_rank: int) -> Order:
    """The order for this node's agent; its files are for a run folder that the leader's machine does not share."""
    files = {
        "plan.json": plan_to_json(without_secrets(plan)),
        "ds_config.json": json.dumps(plan.deepspeed, indent=2, ensure_ascii=False) + "\n",
        "hostfile": render_hosts(plan.hosts),
    }
    return order_of(plan, node_rank, files=files, lost_contact_s=plan.config.cluster.lost_contact_s)
