"""TensorBoard's event files, with its own record format and protocol buffers, without torch or TensorFlow."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from launcher.running.scalars import Record, flat
from launcher.running.trackers import Ending, Subject


def start(subject: Subject) -> Board:
    """Begin a new file; TensorBoard reads all files of the folder as one run."""
    return Board(subject)


class Board:
    """One event file."""

    id: str | None = None
    where: str | None = None  # `tensorboard --logdir runs` shows all runs; nothing that each run must say

    def __init__(self, subject: Subject) -> None:
        subject.board.mkdir(exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010}.{socket.gethostname()}.{os.getpid()}.0"
        again = any(subject.board.iterdir())
        self._file = open(subject.board / name, "wb")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if not again:
            # Only a START that is not the first makes TensorBoard drop what it has read from that step on.
            self._write(Event(wall_time=now, step=0, session_log=SessionLog(status=SessionLog.START)))
            self._describe(subject.config, now)

    def log(self, records: Sequence[Record]) -> None:
        """Append and flush."""
        for record in records:
            if record.restart:
                log = SessionLog(status=SessionLog.START)
                self._write(Event(wall_time=record.time, step=record.step + 1, session_log=log))
                continue
            values = [Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
            self._write(Event(wall_time=record.time, step=record.step, summary=Summary(value=values)))
        self._file.flush()

    def finish(self, ending: Ending) -> None:
        """Close the file."""
        self._file.close()

    def _describe(self, config: Mapping[str, Any], now: float) -> None:
        """The configuration, for the tabs Text and HParams."""
        values = flat(config)
        text = "".join(f"    {name} = {value}\n" for name, value in values.items())  # indented: code, for Markdown
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        value = Summary.Value(tag="config", metadata=metadata, tensor=tensor)
        self._write(Event(wall_time=now, step=0, summary=Summary(value=[value])))
        self._write(Event(wall_time=now, step=0, summary=hparams_pb(values, start_time_secs=now)))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
