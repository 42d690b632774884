"""What stops a run before it starts, on the command line and where two starts meet."""

from __future__ import annotations

import dataclasses
import json
import queue
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, MachineError
from launcher.planning.command import with_port
from launcher.planning.config import read_config
from launcher.planning.plan import make_plan
from launcher.running import preflight as preflights
from launcher.running.addresses import PORTS
from launcher.running.facts import gather_facts
from launcher.running.folder import claim, write_files
from launcher.running.start import run_plan
from launcher.running.transport import close_all, open_channels
from launcher.spec import RunPlan, plan_from_json, plan_to_json


def plan_of(*words: str) -> RunPlan:
    """The plan of a command line, on this machine."""
    config = read_config([*words, "gpus=2"]).config
    return make_plan(config, gather_facts(config), now=datetime.now(timezone.utc))


def preflight(plan: RunPlan) -> RunPlan:
    """The checks of a start, over channels of their own."""
    channels = open_channels(plan, queue.Queue())
    try:
        return preflights.preflight(plan, channels)
    finally:
        close_all(list(channels.values()))


def with_cluster(plan: RunPlan, **fields: Any) -> RunPlan:
    """The plan with other keys of `cluster`."""
    cluster = dataclasses.replace(plan.config.cluster, **fields)
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, cluster=cluster))


@pytest.fixture
def plan(runs: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    """The default plan, its run folder named and not yet there."""
    monkeypatch.chdir(runs)
    return plan_of("run.name=mine")


def test_free_port_is_chosen_and_stands_in_the_commands(plan: RunPlan) -> None:
    ready = preflight(plan)
    assert ready.master_port in PORTS
    assert str(ready.master_port) in ready.commands["localhost"]
    assert not Path(plan.run_dir).exists()


def test_taken_port_is_refused(plan: RunPlan) -> None:
    """N01."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cluster.master_port={port} is taken") as caught:
            preflight(dataclasses.replace(plan, master_port=port))
    assert "cluster.master_port=null" in str(caught.value)


def test_foreign_master_address_is_refused(plan: RunPlan) -> None:
    with pytest.raises(ConfigError, match="cluster.master_addr=203.0.113.1 is no address of localhost"):
        preflight(with_cluster(plan, master_addr="203.0.113.1"))


def test_assumed_hosts_start_nothing() -> None:
    with pytest.raises(ConfigError, match="only assumed: node1, node2") as caught:
        run_plan(plan_of("nodes=2"), config_yaml="", overrides=[])
    assert "cluster.hostfile=FILE" in str(caught.value)


def test_all_problems_come_together(plan: RunPlan, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    plan = with_cluster(plan, python="/no/such/python")
    config = dataclasses.replace(
        plan.config, dataset=dataclasses.replace(plan.config.dataset, format="auto", train="gone.jsonl")
    )
    with pytest.raises(ConfigError) as caught:
        preflight(dataclasses.replace(plan, run_dir=str(used), config=config))
    text = str(caught.value)
    assert text.startswith("3 problems")
    assert "used exists; nothing is overwritten" in text
    assert "dataset.train=gone.jsonl does not exist" in text
    assert "/no/such/python: No such file or directory" in text


def test_machine_without_room_is_code_3(plan: RunPlan) -> None:
    huge = dict.fromkeys(plan.parameters, 10**15)
    with pytest.raises(MachineError, match="GB are free") as caught:
        preflight(dataclasses.replace(plan, parameters=huge, trainable=huge))
    assert caught.value.exit_code == 3


def test_folder_that_cannot_be_made_is_code_3(plan: RunPlan) -> None:
    with pytest.raises(MachineError, match="cannot be made"):
        claim(dataclasses.replace(plan, run_dir="/proc/nowhere/run"))


def test_two_starts_never_share_a_folder(plan: RunPlan) -> None:
    with claim(plan) as first:
        write_files(first.run, with_port(plan, 20000), config_yaml="a: 1\n", overrides=["a=1"])
        with pytest.raises(ConfigError, match="belongs to a run that goes on"):
            claim(plan)
    with pytest.raises(ConfigError, match="was taken by another start"):
        claim(plan)


CLAIM = """import queue, sys
from pathlib import Path
from launcher.running.folder import claim
from launcher.running.preflight import preflight
from launcher.running.transport import open_channels
from launcher.spec import plan_from_json
plan = plan_from_json(Path(sys.argv[1]).read_text())
print("ready", flush=True)
sys.stdin.readline()
with claim(preflight(plan, open_channels(plan, queue.Queue()))) as folder:
    print(folder.run.path.name, folder.plan.run_dir, *folder.plan.commands["localhost"])
"""


def test_runs_of_the_same_second_have_a_folder_each(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    plan = plan_of()
    (runs / "plan.json").write_text(plan_to_json(plan))
    command = [sys.executable, "-c", CLAIM, "plan.json"]
    starts = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for start in starts:
        assert start.stdout is not None
        assert start.stdout.readline() == "ready\n"
    said = [start.communicate("go\n")[0].split() for start in starts]
    name = Path(plan.run_dir).name
    assert sorted(words[0] for words in said) == [name, f"{name}-2", f"{name}-3"]
    for words in said:
        assert Path(words[1]).name == words[0]
        assert any(word.endswith(f"{words[0]}/plan.json") for word in words)  # what is started lies there too


def test_resumed_run_keeps_its_past(plan: RunPlan) -> None:
    ready = with_port(plan, 20000)
    with claim(plan) as folder:
        write_files(folder.run, ready, config_yaml="", overrides=["optim.lr=1e-4"])
    folder.run.outcome.write_text('{"status": "stopped"}')
    folder.run.rank(0).write_text("{}")
    before = folder.run.plan.read_text()
    again = dataclasses.replace(ready, resume_from=str(folder.run.path), master_port=20001)
    with claim(again) as second:
        write_files(second.run, again, config_yaml="", overrides=["dataset.eval=wrong.jsonl"])
        assert (folder.run.path / "plan.1.json").read_text() == before
        assert json.loads((folder.run.path / "outcome.1.json").read_text()) == {"status": "stopped"}
        assert not folder.run.outcome.exists()
        assert not folder.run.rank(0).exists()
        second.give_back()
    assert folder.run.plan.read_text() == before
    assert folder.run.outcome.exists()
    assert folder.run.overrides.read_text() == "optim.lr=1e-4\n"  # what was refused is not resumed with


def test_folder_is_gone_when_nothing_was_run(plan: RunPlan, tmp_path: Path) -> None:
    with claim(plan) as folder:
        write_files(folder.run, with_port(plan, 20000), config_yaml="", overrides=[])
        folder.give_back()
    assert not folder.run.path.exists()
    own = tmp_path / "own"
    own.mkdir()
    with claim(dataclasses.replace(plan, run_dir=str(own))) as folder:
        folder.give_back()
    assert own.is_dir()
    assert not any(own.iterdir())


def test_secrets_are_in_no_file(plan: RunPlan) -> None:
    env = {**plan.env, "HF_TOKEN": "hf_secret"}
    typed = dataclasses.replace(plan.config, env=dataclasses.replace(plan.config.env, set={"HF_TOKEN": "hf_secret"}))
    with claim(plan) as folder:
        ready = dataclasses.replace(with_port(plan, 20000), env=env, config=typed)
        write_files(folder.run, ready, config_yaml="", overrides=[])
    for path in folder.run.path.rglob("*"):
        assert not path.is_file() or "hf_secret" not in path.read_text()
    assert "HF_TOKEN=***" in folder.run.env.read_text()
    assert plan_from_json(folder.run.plan.read_text()).env == plan.env


def test_bad_data_ends_before_any_rank(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """N08: every row is read before a process group exists, so none waits for it."""
    monkeypatch.chdir(runs)
    row = {"query": "a", "positives": ["b"], "negatives": ["c"]}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n{{\n")
    plan = plan_of("dataset=jsonl", "dataset.train=rows.jsonl", "model=tiny")
    assert run_plan(plan, config_yaml="", overrides=[]) == 2
    assert "rows.jsonl:2" in capfd.readouterr().err
    assert not Path(plan.run_dir).exists()
