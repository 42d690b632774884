"""Hosts that exist only as a thread: they answer the launcher's programs at once, for `tests.bench.launch_cost`.

What a host would find out about itself is found out once, by the real program on this machine, and told by all; what
differs by host, and what would need a network, is made up.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

from launcher.running import carry, probe

LONGEST = 2**26  # bytes of a line

Message = dict[str, Any]


class Hosts:
    """They listen at FOLDER/hosts.sock; FOLDER/orders gets a line "HOST SECONDS" from each that has its orders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True).start()
        self._ready.wait()

    def forget(self) -> None:
        """Find all out anew: somebody may be changing the working tree meanwhile."""
        self._known.clear()

    async def _listen(self) -> None:
        where = self._folder / "hosts.sock"
        where.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, where, limit=LONGEST, backlog=1024)
        self._ready.set()
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, program = (await reader.readline()).decode().strip(), ""
        while line := await reader.readline():
            if line[:1] != b"{":
                name, size = line.split()
                program = name.decode()
                await reader.readexactly(int(size))
                answers = [{"event": "hello"}] if program == "probe" else []
            else:
                answers = self._answer(host, program, json.loads(line))
            for answer in answers:
                writer.write(json.dumps({**answer, "time": time.time()}).encode() + b"\n")
        writer.close()

    def _answer(self, host: str, program: str, message: Message) -> list[Message]:
        if program == "agent":
            if "argv" in message:
                with open(self._folder / "orders", "a") as file:
                    file.write(f"{host} {time.monotonic()}\n")
            return []
        if "do" not in message:  # it announces a long one
            return []
        if message["do"] == "end":
            return [{"event": "bye"}] if program == "probe" else []
        if program == "carry":
            return [{"event": message["do"], **self._once(message)}]
        return [{"event": "answer", "id": message["id"], "value": self._probe(host, message)}]

    def _probe(self, host: str, message: Message) -> Message:
        if message["do"] == "resolve":
            return {name: [name] for name in message["names"]}
        if message["do"] == "route":
            return {address: {"interface": "eth0", "source": host} for address in message["to"]}
        if message["do"] == "listen":
            return {"port": message["ports"][0]}
        if message["do"] == "dial":
            return {target[0]: {} for target in message["targets"]}
        address = {"interface": "eth0", "address": host, "prefix": 8, "scope": "global", "physical": True}
        machine = {"hostname": host, "boot": host, "network": host}
        own = {"time": time.time(), "machine": machine, "addresses": [address], "ssh_address": [host]}
        return {**self._once({name: value for name, value in message.items() if name != "id"}), **own}

    def _once(self, message: Message) -> Message:
        key = json.dumps(message, sort_keys=True)
        if key not in self._known:
            look = {"look": probe.look} if "cwd" in message else carry.ORDERS
            self._known[key] = look[message["do"]](message)
        found: Message = self._known[key]
        return found
