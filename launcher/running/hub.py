"""Models and data sets of a hub: the same commit on every file system, downloaded there or brought there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from launcher.errors import MachineError, Problem
from launcher.running.crew import HERE, Crew, GiveUp, Heard, door_here, ignore, why_not
from launcher.running.haul import Load, move
from launcher.running.meter import Meter, size_text
from launcher.running.transport import Channel, Event
from launcher.spec import RunPlan


@dataclass(frozen=True, slots=True)
class Wanted:
    """A repository that ranks read."""

    repo: str
    kind: str  # models | datasets
    source: str  # hf | modelscope
    tries: tuple[str, ...]  # what to type when it cannot be had

    @property
    def title(self) -> str:
        """Of a list of problems with it."""
        return "with the weights" if self.kind == "models" else "with the data"


def fetch_repository(
    plan: RunPlan, wanted: Wanted, channels: Mapping[str, Channel], out: IO[str], give_up: GiveUp
) -> None:
    """Make a repository present and equal on all hosts; one question to each when it is.

    Raises MachineError with every host that does not get it, and Stopped.
    """
    fetching = _Fetching(plan, wanted, channels, out, give_up)
    states = fetching.ask("find", channels)
    if not fetching.lacking(states):
        return
    fetching.fetch(states)


class _Fetching:
    """One repository on its way to the hosts of a plan, and to this machine when it has to stand in for the hub."""

    def __init__(
        self, plan: RunPlan, wanted: Wanted, channels: Mapping[str, Channel], out: IO[str], give_up: GiveUp
    ) -> None:
        self._plan, self._channels, self._out, self._give_up = plan, channels, out, give_up
        self._wanted, self._repo = wanted, wanted.repo
        # When no host is this machine, it may have the files, or reach the hub when no host does.
        away = all(not channel.local for channel in channels.values())
        self._extra = {HERE: door_here()} if away else {}
        self._commit: str | None = None
        self._refusals: dict[str, str] = {}  # host -> why the hub gives it nothing

    def fetch(self, states: dict[str, Event]) -> None:
        """Bring what is lacking; `states` is what `find` said of each host."""
        states |= self.ask("find", self._extra)
        whole = [name for name, state in states.items() if state["whole"]]
        self._commit = states[whole[0]]["commit"] if whole else None
        lacking = self.lacking(states)
        if not whole and all(state["offline"] for state in states.values()):
            raise self._nowhere(lacking, states)
        with self._crew("carry", lacking) as crew:
            owners = crew.file_systems({name: states[name]["folder"] for name in lacking})
        targets = [name for name in lacking if owners[name] == name]
        sources = [name for name in whole if states[name]["commit"] == self._commit]
        got = self._download([name for name in targets if not states[name]["offline"]])
        rest = [name for name in targets if name not in got and not self._is_enough(states[name])]
        sources += got
        if rest and not sources and HERE in self._extra and not states[HERE]["offline"]:
            sources += self._download([HERE])
        if rest and not sources:
            raise self._nowhere(rest, states)
        if rest:
            self._bring(sources[0], rest, states)
        self._check()

    def lacking(self, states: Mapping[str, Event]) -> list[str]:
        """Hosts of the plan that have not all, or another commit than the first that has."""
        mine = {name: states[name] for name in self._channels}
        commit = self._commit or next((state["commit"] for state in mine.values() if state["whole"]), None)
        return [
            name
            for name, state in mine.items()
            if not (state["whole"] and state["commit"] == commit and (state["complete"] or state["offline"]))
        ]

    def ask(self, what: str, names: Iterable[str], heard: Heard = ignore) -> dict[str, Event]:
        """The answers of hosts to one order; why others refuse is kept."""
        wanted = list(names)
        if not wanted:
            return {}
        order = {"do": what, "repo": self._repo, "commit": self._commit}
        order |= {"kind": self._wanted.kind, "source": self._wanted.source}
        env = {name: {**self._plan.env, **self._plan.host_env.get(name, {})} for name in wanted}
        with self._crew("download", wanted) as crew:
            answers = crew.try_ask({name: {**order, "env": env[name]} for name in wanted}, heard)
        self._refusals |= {name: why for name, answer in answers.items() if (why := why_not(answer))}
        return {name: answer for name, answer in answers.items() if not why_not(answer)}

    def _crew(self, program: str, names: Iterable[str]) -> Crew:
        channels = {name: self._channels[name] for name in names if name in self._channels}
        doors = {name: self._extra[name] for name in names if name in self._extra}
        return Crew(channels, doors, give_up=self._give_up, program=program)

    def _is_enough(self, state: Event) -> bool:
        """Whether a host can do with what it has, should nothing more be had."""
        return bool(state["whole"]) and state["commit"] == self._commit

    def _download(self, names: Sequence[str]) -> list[str]:
        """Those of the hosts that have all after they have asked the hub, each for itself."""
        newest = self.ask("resolve", names)
        if not newest:
            return []
        self._commit = self._commit or next(iter(newest.values()))["commit"]
        meter = Meter(self._out, {f"{self._repo} to {name}": None for name in newest})

        def heard(name: str | None, event: Event | None) -> None:
            if event is not None and event["event"] == "progress":
                meter.set(f"{self._repo} to {name}", event["bytes"], event["total"])
            elif event is not None and event["event"] == "waiting":
                print(f"{name}: another download of {self._repo} is at work there", file=self._out, flush=True)
            meter.show()

        try:
            return list(self.ask("download", newest, heard))
        finally:
            meter.close()

    def _bring(self, source: str, names: Sequence[str], states: Mapping[str, Event]) -> None:
        """Send the commit from one that has it: first contents, then the names that point to them."""
        listed = self.ask("files", [source])[source]
        with self._crew("carry", [source, *names]) as crew:
            roots = {name: states[name]["folder"] for name in names}
            order = {"do": "tree", "paths": list(listed["blobs"]), "hash": "none"}
            there = crew.ask({name: {**order, "root": root} for name, root in roots.items()})
            loads = []
            for name in names:
                blobs = [p for p, size in listed["blobs"].items() if there[name]["files"].get(p, [None])[0] != size]
                loads.append(
                    Load(
                        source=crew.doors[source],
                        target=crew.doors[name],
                        root=states[source]["folder"],
                        paths=[*blobs, *listed["links"]],
                        to=roots[name],
                        follow=False,
                        size=sum(listed["blobs"][path] for path in blobs),
                        label=f"{self._repo} to {name}",
                    )
                )
            failed = move(loads, self._out, give_up=self._give_up)
        if failed:
            problems = [Problem(f"{label} was not sent: {why}") for label, why in failed.items()]
            raise MachineError(*problems, title=self._wanted.title)
        self.ask("adopt", names)
        for load in loads:
            print(f"sent {load.label} from {source}: {size_text(load.size)}", file=self._out, flush=True)

    def _check(self) -> None:
        states = self.ask("find", self._channels)
        wrong = [name for name in self._channels if name not in states or not self._is_enough(states[name])]
        if wrong:
            problems = [Problem(f"{name}: {self._refusals.get(name, 'files are missing')}") for name in wrong]
            raise MachineError(*problems, title=f"{self._wanted.title} of {self._repo}")

    def _nowhere(self, names: Sequence[str], states: Mapping[str, Event]) -> MachineError:
        problems = []
        for name in names:
            offline = states[name]["offline"]
            why = "HF_HUB_OFFLINE=1 keeps it from asking the hub" if offline else self._refusals.get(name, "no word")
            tries = ("HF_HUB_OFFLINE=0   (in the environment of this command)",) if offline else ()
            text = f"{name} has not all of {self._repo} in {states[name]['folder']}, and {why}"
            problems.append(Problem(text, tries=(*tries, *self._wanted.tries)))
        return MachineError(*problems, title=self._wanted.title)
