"""What trackers are given: read back from their own files, through resumes, failures and a killed supervisor."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.rundir import RunDir, append_json, write_json
from launcher.running import scalars
from launcher.running.feed import Feed
from launcher.running.trackers import ready
from launcher.running.tracking import Tracking

START = 1_700_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "20261130-tiny")
    run.path.mkdir()
    return run


def planned(run: RunDir, *names: str) -> None:
    logging = {"trackers": list(names), "project": "demo"}
    env = {"file": None, "set": {"HF_TOKEN": "hf_secret"}}
    config = {"logging": logging, "env": env, "model": {"name": "tiny", "arch": {"big": 1}}, "optim": {"eps": 1e-8}}
    write_json(run.plan, {"config": config, "lr": 0.001, "hosts": [{"name": "localhost", "gpus": [0, 1]}]})


def step(run: RunDir, number: int, loss: float, at: float) -> None:
    line = {"kind": "step", "step": number, "loss": loss, "lr": 0.001, "grad_norm": None, "time": START + at}
    append_json(run.metrics, {**line, "step_s": 0.5, "ranks": {"tokens": [3, 4]}})


def evaluated(run: RunDir, number: int, ndcg: float, at: float) -> None:
    append_json(run.metrics, {"kind": "eval", "step": number, "eval/ndcg@10": ndcg, "groups": 8, "time": START + at})


def ended(run: RunDir, status: str = "done", code: int = 0, text: str | None = None) -> None:
    failure = {"text": text} if text else None
    best = {"best": {"step": 2, "eval/ndcg@10": 0.9, "time": 1.0}}
    write_json(run.outcome, {"status": status, "exit_code": code, "first_failure": failure, "eval": best})


def scalar(run: RunDir, tag: str) -> list[tuple[int, float, float]]:
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    return [(event.step, round(event.value, 6), event.wall_time - START) for event in board.Scalars(tag)]


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def records(path: Path) -> Iterator[bytes]:
    """Records of the log format that wandb and swanlab write: blocks of 32 KiB, parts of 7 bytes head and data."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def parsed(path: Path, kind: Any) -> list[Any]:
    found = []
    for data in records(path):
        found.append(kind())
        found[-1].ParseFromString(data)
    return found


def test_tensorboard_has_every_number_at_its_own_time_also_after_a_resume(run: RunDir) -> None:
    planned(run)
    tracking = Tracking.start(run)
    evaluated(run, 0, 0.4, 0.0)
    for number in (1, 2, 3, 4):
        step(run, number, 1.0 / number, number)
    assert tracking.finish() == []  # the supervisor ends without an outcome: killed, or its disk is full
    append_json(run.events, {"time": START + 10, "event": "resumed", "step": 2, "path": "x"})
    tracking = Tracking.start(run)
    for number in (3, 4):
        step(run, number, 0.1, 10 + number)
    ended(run)
    assert tracking.finish() == []
    losses = scalar(run, "train/loss")
    assert losses == [(1, 1.0, 1.0), (2, 0.5, 2.0), (3, 0.1, 13.0), (4, 0.1, 14.0)]
    assert scalar(run, "eval/ndcg@10") == [(0, 0.4, 0.0)]
    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    text = board.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert "optim.eps = 1e-08" in text
    assert "hf_secret" not in text and "big" not in text
    assert "_hparams_/session_start_info" in board.Tags()["tensors"]


def test_named_trackers_keep_everything_offline(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlflow import MlflowClient
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record as SwanlabRecord
    from swanlab.proto.swanlab.run.v1.run_pb2 import RUN_STATE_CRASHED
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    store = (tmp_path / "store").as_uri()
    for name, value in (("WANDB_MODE", "offline"), ("SWANLAB_MODE", "offline"), ("MLFLOW_TRACKING_URI", store)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the client of this test
    monkeypatch.setenv("HOME", str(tmp_path))
    planned(run, "wandb", "mlflow", "swanlab")
    tracking = Tracking.start(run)
    step(run, 1, 0.5, 1.0)
    evaluated(run, 1, 0.9, 2.0)
    wait_until(lambda: len(list(run.path.glob("trackers/*.json"))) == 4)
    ended(run, "failed", 4, "rank 1 failed")
    assert tracking.finish() == []

    (file,) = run.path.glob("trackers/wandb/offline-run-*/*.wandb")
    lines = parsed(file, WandbRecord)
    history = [{i.nested_key[0]: json.loads(i.value_json) for i in x.history.item} for x in lines if x.history.item]
    assert [(h["step"], h.get("train/loss"), h.get("eval/ndcg@10")) for h in history] == [
        (1, 0.5, None),
        (1, None, 0.9),
    ]
    (begun,) = [x.run for x in lines if x.HasField("run")]
    assert (begun.project, begun.display_name) == ("demo", "20261130-tiny")
    assert [x.exit.exit_code for x in lines if x.HasField("exit")] == [4]
    assert b"hf_secret" not in file.read_bytes()
    assert sorted(p.name for p in file.parent.rglob("*") if p.suffix in (".txt", ".diff", ".patch", ".py")) == []

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("demo")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("20261130-tiny", "FAILED")
    assert kept.data.params["optim.eps"] == "1e-08" and kept.data.params["env.set.HF_TOKEN"] == "***"
    (loss,) = client.get_metric_history(kept.info.run_id, "train/loss")
    assert (loss.step, loss.value, loss.timestamp) == (1, 0.5, int((START + 1) * 1000))
    assert kept.data.metrics["eval/ndcg_at_10"] == kept.data.metrics["best/ndcg_at_10"] == 0.9

    (file,) = run.path.glob("trackers/swanlab/run-*/*.swanlab")
    seen = parsed(file, SwanlabRecord)
    assert {(x.scalar.key, x.scalar.step, x.scalar.value.number) for x in seen if x.HasField("scalar")} >= {
        ("train/loss", 1, 0.5),
        ("eval/ndcg@10", 1, 0.9),
    }
    assert [(x.finish.state, x.finish.error) for x in seen if x.HasField("finish")] == [
        (RUN_STATE_CRASHED, "rank 1 failed")
    ]


def test_resumed_run_is_the_same_run_in_mlflow(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    planned(run, "mlflow")
    step(run, 1, 0.5, 1.0)
    for number, status in ((1, "stopped"), (2, "done")):
        run.outcome.unlink(missing_ok=True)
        feed = Feed(run, "mlflow")
        assert feed.open()
        step(run, 1 + number, 0.25, 1.0 + number)
        ended(run, status, 130 if status == "stopped" else 0)
        assert feed.finish()
        client = MlflowClient((tmp_path / "store").as_uri())
        (kept,) = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
        assert kept.info.status == {"stopped": "KILLED", "done": "FINISHED"}[status]
    steps = [metric.step for metric in client.get_metric_history(kept.info.run_id, "train/loss")]
    assert steps == [1, 2, 3]


def test_tracker_that_cannot_start_is_told_once_and_the_others_go_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://me:hunter2@nowhere")
    planned(run, "mlflow")
    tracking = Tracking.start(run)
    step(run, 1, 0.5, 1.0)
    wait_until(run.events.exists)
    ended(run)
    (sentence,) = tracking.finish()
    assert sentence.startswith("mlflow: ") and sentence.endswith("nothing is sent there (logs/tracking.log)")
    assert scalar(run, "train/loss") == [(1, 0.5, 1.0)]
    assert "hunter2" not in run.events.read_text() + (run.logs / "tracking.log").read_text()


def test_tracker_that_hangs_does_not_hold_the_end_up(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(run, "mlflow")
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and never answers
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("launcher.running.tracking.PATIENCE_S", 1.0)
        tracking = Tracking.start(run)
        server.accept()
        ended(run)
        (sentence,) = tracking.finish()
    assert sentence.startswith("mlflow: not all was sent within 1 s; python -m launcher.running.feed ")
    assert all(process.returncode is not None for process in tracking._processes.values())


def test_nobody_in_a_hurry_waits_for_a_tracker(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(run, "mlflow")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        tracking = Tracking.start(run)
        server.accept()
        ended(run)
        began = time.monotonic()
        said = tracking.finish(lambda: True)
    assert time.monotonic() - began < 5
    assert any(sentence.startswith("mlflow: not all was sent within 0 s; ") for sentence in said)


def test_what_a_tracker_does_not_take_comes_again(run: RunDir) -> None:
    class Refusing:
        id, where, deaf = None, None, True

        def __init__(self) -> None:
            self.seen: list[int] = []

        def log(self, records: list[scalars.Record]) -> None:
            if self.deaf:
                raise ConnectionError("server is down")
            self.seen += [record.step for record in records]

        def finish(self, ending: object) -> None:
            """Nothing to close."""

    planned(run)
    feed, tracker = Feed(run, "tensorboard"), Refusing()
    feed._tracker = tracker
    (run.path / "trackers").mkdir()
    for number in (1, 2):
        step(run, number, 0.5, number)
        assert not feed.look()
    tracker.deaf = False
    assert feed.finish()
    assert tracker.seen == [1, 2]
    told = [json.loads(line)["text"] for line in run.events.read_text().splitlines()]
    assert told == ["tensorboard: ConnectionError: server is down; it is tried again every 30 s (logs/tracking.log)"]


def test_killed_supervisor_takes_the_trackers_with_it(run: RunDir) -> None:
    planned(run)
    run.logs.mkdir()
    code = "import sys, time; from pathlib import Path; from launcher.rundir import RunDir\n"
    code += "from launcher.running.tracking import Tracking\n"
    code += "t = Tracking.start(RunDir(Path(sys.argv[1])))\n"
    code += "print(t._processes['tensorboard'].pid, flush=True); time.sleep(60)"
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    wait_until(lambda: run.tensorboard.is_dir() and any(run.tensorboard.iterdir()))
    os.kill(pid, signal.SIGINT)  # a terminal's Ctrl-C does not even reach it
    step(run, 1, 0.5, 1.0)
    supervisor.kill()
    supervisor.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), 8.0)
    assert scalar(run, "train/loss") == [(1, 0.5, 1.0)]


def test_missing_plan_does_no_harm(run: RunDir) -> None:
    tracking = Tracking.start(run)
    step(run, 1, 0.5, 1.0)
    ended(run)
    assert tracking.finish() == []
    assert scalar(run, "train/lr") == [(1, 0.001, 1.0)]


def test_monitor_is_averaged_between_steps() -> None:
    def sample(used: float, util: float | None) -> dict[str, Any]:
        gpu = {"index": 3, "util_percent": util, "memory_used_gib": used, "power_w": None, "throttle": []}
        return {"host": "a", "gpus": [gpu], "network": {"eth0": {"rx_mib_s": used, "tx_mib_s": 0, "errors": 1}}}

    assert scalars.of_samples([sample(60.0, 90), sample(70.0, 100), sample(62.0, None)]) == {
        "monitor/a/gpu3/util_percent": 95.0,
        "monitor/a/gpu3/memory_used_gib": 70.0,
        "monitor/a/eth0/rx_mib_s": 64.0,
        "monitor/a/eth0/tx_mib_s": 0.0,
    }


def test_trackers_are_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def told(env: dict[str, str], *names: str) -> list[str]:
        return [problem.text for problem in ready.problems(names, env, tmp_path)]

    assert told({"WANDB_API_KEY": "k", "SWANLAB_MODE": "local", "MLFLOW_TRACKING_URI": "http://h"}, *ready.CHECKS) == []
    texts = told({}, *ready.CHECKS)
    for text, variable in zip(texts, ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "SWANLAB_API_KEY"), strict=True):
        assert variable in text
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    assert told({}, "wandb") == []
    assert len(told({"WANDB_BASE_URL": "https://wandb.corp"}, "wandb")) == 1
    (tmp_path / "no_such_tracker").mkdir()  # a folder where one stands is no package
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ready.PACKAGES, "no_such_tracker", "x")
    (problem,) = ready.problems(["no_such_tracker"], {}, tmp_path)
    assert "not installed" in problem.text and "pip install x" in problem.tries
