"""What launchers say to each other when they meet: who they are, and what their plans must have in common.

The node of rank 0 (the leader) and the others (followers) greet each other with three JSON lines: the leader's
`{"launcher": PROTOCOL, "nonce", "token"}`, the follower's `Hello`, the leader's welcome or refusal. Where
LAUNCHER_JOB_TOKEN is set on the nodes, both prove that they know it; it is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.plain import to_data
from launcher.planning import keys
from launcher.planning.secrets import is_secret
from launcher.spec import RunPlan

PROTOCOL = 1
TOKEN = "LAUNCHER_JOB_TOKEN"  # a secret that a job's nodes may share
GREETING_S = 10.0  # for a line of the greeting
HELLO_BYTES = 256 * 1024  # of a line of the greeting; one of ours has 15,000
SHOWN = 8  # differences that are shown
TEXT = 200  # letters kept of a value
# What may differ: where things lie on a node, and what only the leader uses.
_OWN_KEYS = re.compile(
    r"run\..*|env\.(file|forward)|notify\..*|sweep\..*|restart\..*|logging\.(trackers|project)|profile\.name"
    r"|cluster\.(name|hostfile|include|exclude|transport|python|activate|wrap|sync|slurm_args|pdsh_args)"
    r"|cluster\.(master_addr|master_port|connect_s|gpu)"
)
_PLANNED = ("device", "precision", "attention", "checkpointed_layers", "lr", "warmup_steps", "trainable", "batch")
SAME = "the same command, and the same version of the launcher, on every node"

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a follower says of itself."""

    version: str  # of its launcher
    node_rank: int
    nodes: int  # that it expects
    machine: str  # its host name
    process: str  # a random name: another one with the same rank is a second start
    run_id: str | None = None  # of the run it comes back to
    heard: int = 0  # messages that it has had
    common: dict[str, str] = field(default_factory=dict)  # see `common`


def read_hello(data: Any) -> Hello:
    """The hello in a line of JSON from anybody; ValueError when it is none."""
    kinds = {"version": str, "node_rank": int, "nodes": int, "machine": str, "process": str, "heard": int}
    if not isinstance(data, dict) or not all(type(data.get(name)) is kind for name, kind in kinds.items()):
        raise ValueError("no hello")
    common = data.get("common")
    if not isinstance(common, dict) or not all(isinstance(v, str) and len(v) <= TEXT for v in common.values()):
        raise ValueError("no common part")
    run_id = data.get("run_id")
    if run_id is not None and not isinstance(run_id, str):
        raise ValueError("no run")
    return Hello(**{name: data[name] for name in kinds}, run_id=run_id, common=common)


def common(plan: RunPlan) -> dict[str, str]:
    """Everything of a plan in which the nodes of a run must agree, by name, as short texts without secrets."""
    data = to_data(plan)
    found = {key: _text(key, value) for key, value in _leaves(data["config"], "") if not _OWN_KEYS.fullmatch(key)}
    found = {key: value for key, value in found.items() if not is_secret(key.removeprefix("env.set."), value)}
    for name in _PLANNED:
        found |= {key: _text(key, value) for key, value in _leaves({name: data[name]}, "plan: ")}
    found |= {key: _text(key, value) for key, value in _leaves({"deepspeed": plan.deepspeed}, "plan: ")}
    found |= {f"ranks on {host.name}": str(host.slots) for host in plan.hosts}
    found["architecture"] = hashlib.sha256(_canonical(plan.arch)).hexdigest()[:12]
    return found


def differences(ours: Hello, theirs: Hello) -> list[Problem]:
    """Why a follower cannot be part of the leader's run; `ours` is the leader's own hello."""
    who = f"node rank {theirs.node_rank} ({shown(theirs.machine)})"
    if theirs.version != ours.version:
        text = f"{who} runs launcher {shown(theirs.version)}, and node rank 0 runs {ours.version}"
        return [Problem(text, tries=(SAME,))]
    if theirs.nodes != ours.nodes:
        text = f"{who} has been told of {theirs.nodes} nodes, and node rank 0 of {ours.nodes}"
        return [Problem(text, tries=("the same NNODES (or nodes=) on every node",))]
    if not 0 < theirs.node_rank < ours.nodes:
        text = f"{shown(theirs.machine)} says that it is node rank {theirs.node_rank}"
        if theirs.node_rank == 0:
            text += ", which is this one's: the command was started twice, or a node lacks its own NODE_RANK"
        return [Problem(text, tries=(f"NODE_RANK from 1 to {ours.nodes - 1} on the other nodes, each its own",))]
    return _differing(ours, theirs, who)


def _differing(ours: Hello, theirs: Hello, who: str) -> list[Problem]:
    names = [*ours.common, *(name for name in theirs.common if name not in ours.common)]
    unlike = [name for name in names if ours.common.get(name) != theirs.common.get(name)]
    if not unlike:
        return []
    lines = [f"{shown(name)}: {_shown(ours.common, name)}, there {_shown(theirs.common, name)}" for name in unlike]
    more = [f"and {len(unlike) - SHOWN} more"] if len(unlike) > SHOWN else []
    text = "\n".join([f"{who} has another plan than node rank 0:", *lines[:SHOWN], *more])
    return [Problem(text, tries=(SAME,))]


def same_rank(first: Hello, second: Hello) -> Problem:
    """Two launchers say that they are the same node."""
    text = f"two launchers say that they are node rank {second.node_rank}: on {shown(first.machine)} and on "
    text += f"{shown(second.machine)}; the command was started twice, or a node lacks its own NODE_RANK"
    return Problem(text, tries=("NODE_RANK=1, 2, ... on the other nodes, each its own, started once",))


def prove(token: str, who: str, nonce: str, message: Message) -> str:
    """What only somebody who knows the token can say about a message and the other side's nonce."""
    said = _canonical({key: value for key, value in message.items() if key != "proof"})
    return hmac.new(token.encode(), f"{who} {nonce} ".encode() + said, hashlib.sha256).hexdigest()


def is_proven(token: str, who: str, nonce: str, message: Message) -> bool:
    """Whether the message's `proof` is right."""
    proof = message.get("proof")
    return isinstance(proof, str) and hmac.compare_digest(
        prove(token, who, nonce, message).encode(), proof.encode(errors="replace")
    )


def problems_to_data(problems: Sequence[Problem]) -> list[Message]:
    """For a refusal."""
    return [{"text": p.text, "where": p.where, "tries": list(p.tries)} for p in problems]


def problems_from_data(data: Any) -> tuple[Problem, ...]:
    """Problems that came over the network; what is none of ours is left out."""
    found = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    return tuple(
        Problem(
            shown(item.get("text", ""), 4000),
            shown(item.get("where", ""), 1000),
            tuple(shown(text, 1000) for text in item.get("tries", ()) if isinstance(text, str))[:SHOWN],
        )
        for item in found[:SHOWN]
    )


def shown(text: Any, limit: int = TEXT) -> str:
    """A text from the network as it may be printed: no control characters, not endless."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text)[:limit])


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line; ValueError when there is none."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _text(key: str, value: Any) -> str:
    if key in keys.PATHS and isinstance(value, str):
        value = Path(value).name  # folders differ between machines
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= TEXT else f"{text[:40]}... {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _shown(values: Mapping[str, str], name: str) -> str:
    return shown(values.get(name, "(nothing)"))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")
