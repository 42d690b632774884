"""Where hosts come from, how they are reached, and what CUDA_VISIBLE_DEVICES does to them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.planning.describe import describe
from launcher.planning.facts import TextFile
from launcher.planning.nodes import NodeIdentity, allocation, node_identity
from launcher.planning.visible import through_visible
from launcher.spec import Host, RunPlan
from tests.planning_support import gpus, plan

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02],x3"}
SRUN = {**SLURM, "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu02,x3"}
NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}
PYTORCHJOB = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "29400"}
CPU = "env.set.DS_ACCELERATOR=cpu"


def file(text: str, path: str = "h") -> dict[str, Any]:
    """The fact of a hostfile."""
    return {"hostfile": TextFile(path=path, text=text)}


def refused(*words: str, **facts: Any) -> str:
    """What a plan is refused with."""
    with pytest.raises(ConfigError) as caught:
        plan(*words, **facts)
    assert all(problem.tries for problem in caught.value.problems)
    return caught.value.render()


def first_line(made: RunPlan) -> str:
    return describe(made).splitlines()[0]


TWO = file("a slots=2\nb slots=2\n")
ORDER: list[tuple[str, tuple[str, ...], dict[str, Any], str, str, str]] = [
    # what is there, what is typed, facts -> first line, transport, hosts
    ("nothing", (), {}, "this machine, which has no GPU", "local", "localhost:2"),
    ("GPUs", (), {"gpus": gpus(2)}, "this machine", "local", "localhost:2"),
    ("hostfiles/default", (), TWO, "h: all 2 hosts", "ssh", "a:2 b:2"),
    ("one remote host", (), file("a slots=2\n"), "h: 1 host", "ssh", "a:2"),
    ("one of two", ("cluster.include=b",), TWO, "h: 1 of its 2 hosts", "ssh", "b:2"),
    ("a file of this machine", (), file("desk slots=3\n"), "h: 1 host", "local", "desk:3"),
    ("its own address", (), {**file("10.0.0.7 slots=3\n"), "addresses": ("10.0.0.7",)}, "h: 1 host", "local", ""),
    ("this machine first", ("nodes=1",), file("desk slots=2\nb slots=2\n"), "h: 1 of its 2 hosts", "local", "desk:2"),
    ("this machine only", ("cluster.transport=local",), {**TWO, "environ": SLURM}, "this machine, which", "local", ""),
    ("pdsh", ("cluster.transport=pdsh",), TWO, "h: all 2 hosts", "pdsh", "a:2 b:2"),
    (
        "by hand",
        ("cluster.transport=manual", "nodes=2"),
        {"gpus": gpus(4)},
        "nodes that you",
        "manual",
        "node0:4 node1:4",
    ),
    (
        "Slurm before hostfiles/default",
        (),
        {**TWO, "environ": {**SLURM, "SLURM_GPUS_ON_NODE": "4"}},
        "Slurm job 7: all 3 hosts",
        "slurm",
        "gpu01:4 gpu02:4 x3:4",
    ),
    (
        "a named file before Slurm",
        ("cluster.hostfile=/h",),
        {**TWO, "environ": {**SLURM, "SLURM_GPUS_ON_NODE": "4"}},
        "h: all 2 hosts",
        "ssh",
        "a:2 b:2",
    ),
    (
        "a named file of Slurm's hosts",
        ("cluster.hostfile=/h",),
        {**file("x3 slots=2\ngpu01 slots=2\n"), "environ": SLURM},
        "h: all 2 hosts",
        "slurm",
        "x3:2 gpu01:2",
    ),
    ("this host alone", (), {"environ": SLURM | {"SLURM_JOB_NODELIST": "desk"}}, "this machine (Slurm", "local", ""),
    (
        "srun on this host alone",
        ("cluster.transport=slurm",),
        {"environ": SLURM | {"SLURM_JOB_NODELIST": "desk"}},
        "Slurm job 7: 1 host",
        "slurm",
        "desk:2",
    ),
    ("Slurm without GPUs", (CPU,), {"environ": SLURM}, "Slurm job 7", "slurm", "gpu01:2 gpu02:2 x3:2"),
    (
        "ssh inside Slurm",
        ("gpus=1", "cluster.transport=ssh"),
        {"environ": SLURM},
        "Slurm",
        "ssh",
        "gpu01:1 gpu02:1 x3:1",
    ),
    ("a queue", ("cluster.transport=slurm", "nodes=2", "gpus=4"), {}, "a Slurm job that", "slurm", "node0:4 node1:4"),
    ("nodes", ("cluster.transport=env",), {"environ": NODE}, "the environment of each node: 2 hosts", "env", ""),
    (
        "nodes with GPUs",
        ("cluster.transport=env", "gpus=2"),
        {"environ": NODE, "gpus": gpus(4)},
        "the environment",
        "env",
        "node0:2 node1:2",
    ),
    (
        "nodes of a file",
        ("cluster.transport=env", "cluster.hostfile=/h"),
        {**TWO, "environ": NODE},
        "h: all 2 hosts",
        "env",
        "a:2 b:2",
    ),
    ("nodes of srun", ("cluster.transport=env",), {"environ": SRUN}, "the environment", "env", "gpu02:2 x3:2"),
]


@pytest.mark.parametrize(
    ("words", "facts", "first", "transport", "hosts"), [case[1:] for case in ORDER], ids=[case[0] for case in ORDER]
)
def test_where_hosts_come_from(
    words: tuple[str, ...], facts: dict[str, Any], first: str, transport: str, hosts: str
) -> None:
    made = plan(*words, **facts)
    assert first_line(made).startswith(f"Hosts  {first}")
    assert made.transport == transport
    assert not made.hosts_assumed
    assert hosts in ("", " ".join(f"{host.name}:{host.slots}" for host in made.hosts))


REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str, str]] = [
    (("cluster.transport=local", "cluster.hostfile=/h"), TWO, "runs on this machine, desk, and h names a, b", "auto"),
    (("cluster.transport=ssh",), {}, "needs hosts, and none is named", "cluster.hostfile=FILE"),
    (("cluster.transport=manual",), {}, "needs hosts, or how many", "nodes=2"),
    (
        ("cluster.transport=manual", "nodes=2", "cluster.sync=rsync"),
        {},
        "cluster.sync=rsync sends the working folder by ssh, which no node is reached by with cluster.transport=manual",
        "cluster.sync=check",
    ),
    (("cluster.transport=slurm",), {}, "must know how many a host", "gpus=8"),
    ((), {"environ": SLURM}, "does not say how many GPUs each host has", "gpus=8"),
    ((), {"environ": SLURM | {"SLURM_JOB_NODELIST": "gpu[2-1]"}}, "range 2-1 must rise", "cluster.hostfile=FILE"),
    (
        (),
        {"environ": SLURM | {"SLURM_STEP_NUM_TASKS": "3"}},
        "srun has started this command 3 times",
        "cluster.transport=env",
    ),
    (("gpus=5",), {"environ": SLURM | {"SLURM_GPUS_ON_NODE": "4"}}, "gpu01 has 4 slots", "gpus=4"),
    ((), {"environ": NODE}, "this is node 1 of 2 by its environment", "cluster.transport=env"),
    (("cluster.transport=env",), {}, "needs NNODES, NODE_RANK and MASTER_ADDR", "NNODES=2 NODE_RANK=0"),
    (("cluster.transport=env",), {"environ": {"NNODES": "2"}}, "NODE_RANK, MASTER_ADDR must be set too", "NNODES=2"),
    (("cluster.transport=env",), {"environ": NODE | {"NODE_RANK": "2"}}, "NODE_RANK=2 must be from 0 to 1", "NNODES"),
    (("cluster.transport=env",), {"environ": NODE | {"NNODES": "1:2"}}, "cannot change during a run", "NNODES"),
    (("cluster.transport=env",), {"environ": NODE | {"NNODES": "x"}}, "NNODES=x is no whole number", "NNODES"),
    (("cluster.transport=env", "nodes=1"), {"environ": NODE}, "2 nodes have started this command, and 1", "nodes=2"),
    (
        ("cluster.transport=env", "cluster.hostfile=/h"),
        {**file("a slots=1\n"), "environ": NODE},
        "and 1 of h",
        "nodes=2",
    ),
    (
        ("cluster.transport=env",),
        {"environ": SRUN | {"SLURM_STEP_NUM_TASKS": "16"}},
        "srun starts 16 tasks on 2 nodes",
        "--ntasks-per-node=1",
    ),
    (("nodes=2", "cluster.transport=local"), {}, "nodes=2, but this machine has 1 host", "nodes=1"),
]


@pytest.mark.parametrize(("words", "facts", "text", "attempt"), REFUSED)
def test_hosts_that_cannot_be_used(words: tuple[str, ...], facts: dict[str, Any], text: str, attempt: str) -> None:
    said = refused(*words, **facts)
    assert text in said
    assert attempt in said.split("try  ", 1)[1]


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        ({}, None),
        ({"MASTER_ADDR": "a"}, None),
        (NODE, NodeIdentity(node_rank=1, num_nodes=2, master_addr="10.0.0.1", master_port=29511)),
        (PYTORCHJOB, NodeIdentity(node_rank=1, num_nodes=2, master_addr="job-master-0", master_port=23456)),
        (KUBEFLOW, NodeIdentity(node_rank=1, num_nodes=2, master_addr="job-0", master_port=29400)),
        (
            KUBEFLOW | PYTORCHJOB | {"WORLD_SIZE": "16"},
            NodeIdentity(node_rank=1, num_nodes=2, master_addr="job-master-0", master_port=23456),
        ),
        ({**PYTORCHJOB, "LOCAL_RANK": "1"}, None),  # a rank of torchrun, whose numbers count processes
        (SRUN, NodeIdentity(node_rank=1, num_nodes=2, master_addr="gpu02", master_port=None, hosts=("gpu02", "x3"))),
        (
            {**SLURM, "SLURM_NODEID": "2"},
            NodeIdentity(
                node_rank=2, num_nodes=3, master_addr="gpu01", master_port=None, hosts=("gpu01", "gpu02", "x3")
            ),
        ),
    ],
)
def test_which_node_this_is(environ: dict[str, str], want: NodeIdentity | None) -> None:
    assert node_identity(environ) == want


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_JOB_GPUS": "0,1,5"}, 3),
        ({"SLURM_GPUS_PER_NODE": "h100:8"}, 8),
        ({"SLURM_GPUS": "6"}, 2),
        ({"SLURM_GPUS": "7"}, None),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
    ],
)
def test_gpus_of_an_allocation(variables: dict[str, str], count: int | None) -> None:
    job = allocation({**SLURM, **variables})
    assert job is not None
    assert job.gpus == count
    assert allocation({**variables, "SLURM_JOB_NODELIST": "a"}) is None


@pytest.mark.parametrize("environ", [NODE, PYTORCHJOB, KUBEFLOW])
def test_every_node_plans_the_same(environ: dict[str, str]) -> None:
    rank = next(name for name in ("NODE_RANK", "PET_NODE_RANK", "RANK") if name in environ)
    words = ("cluster.transport=env", "gpus=2")
    machines = [{"hostname": f"pod-{n}", "gpus": gpus(2), "environ": {**environ, rank: str(n)}} for n in range(2)]
    first, second = (plan(*words, **machine) for machine in machines)
    assert first == second
    assert first.master_addr == environ.get("MASTER_ADDR", environ.get("PET_MASTER_ADDR"))
    assert not any(rank in warning for warning in first.warnings)


def test_memory_of_a_node_does_not_change_the_plan_of_several() -> None:
    made = [plan("cluster.transport=env", environ=NODE, ram_bytes=size) for size in (10**9, 10**12)]
    assert made[0] == made[1]


# CUDA_VISIBLE_DEVICES: used, refused or told, never dropped.


def test_a_hostfile_of_this_machine_counts_the_visible_gpus() -> None:
    """F01 F02 F08."""
    visible = {"gpus": gpus(8)[2:4], "visible_devices": "2,3"}
    made = plan(**file("desk slots=2\n"), **visible)
    assert [host.gpus for host in made.hosts] == [(2, 3)]
    assert made.warnings == plan().warnings
    assert plan("gpus=[1]", **file("desk slots=2\n"), **visible).hosts[0].gpus == (3,)
    said = refused(**file("desk slots=8\n"), **visible)
    assert "h gives desk slot 2, and CUDA_VISIBLE_DEVICES=2,3 leaves slots 0 to 1" in said
    assert "try  gpus=2" in said
    assert "try  unset CUDA_VISIBLE_DEVICES" in said
    assert "this machine has 2 GPUs: 0, 1" in refused(**file("desk slots=3\n"), gpus=gpus(2))


def test_other_hosts_are_not_limited_and_that_is_said() -> None:
    """F01."""
    visible = {"gpus": gpus(8)[2:4], "visible_devices": "2,3"}
    made = plan(**TWO, **visible)
    assert [host.gpus for host in made.hosts] == [(0, 1), (0, 1)]
    (said,) = [text for text in made.warnings if "CUDA_VISIBLE_DEVICES" in text]
    assert said.startswith(
        "CUDA_VISIBLE_DEVICES=2,3 counts only on this machine, which is none of the hosts: h decides"
    )
    made = plan(**file("desk slots=2\nb slots=8\n"), **visible)
    assert [host.gpus for host in made.hosts] == [(2, 3), tuple(range(8))]
    (said,) = [text for text in made.warnings if "CUDA_VISIBLE_DEVICES" in text]
    assert "only on desk, which is this machine: h decides for the other hosts" in said
    assert "CUDA_VISIBLE_DEVICES=2,3 leaves slots 0 to 1" in refused(**file("desk slots=8\nb slots=8\n"), **visible)


def test_slots_of_a_host_through_its_visible_gpus() -> None:
    host = Host(name="a", gpus=(0, 2))
    assert through_visible(host, [7, 5, 4]).gpus == (4, 7)
    assert through_visible(host, []) == host
    with pytest.raises(ConfigError, match="a has no slot 2"):
        through_visible(host, [7, 5])


def test_hidden_gpus_leave_the_cpu() -> None:
    made = plan(visible_devices="")
    assert first_line(made) == "Hosts  this machine, which has no GPU (CUDA_VISIBLE_DEVICES=)"
    made = plan(CPU, gpus=gpus(2))
    assert (made.device, first_line(made)) == ("cpu", "Hosts  this machine, by DS_ACCELERATOR=cpu")
    made = plan(CPU, **TWO)
    assert (made.device, made.precision, made.gpu_kind) == ("cpu", "fp32", None)
    assert plan(**TWO, environ={"DS_ACCELERATOR": "cpu"}).device == "cpu"
    assert plan("env.forward=[]", **TWO, environ={"DS_ACCELERATOR": "cpu"}).device == "cuda"
    assert "DS_ACCELERATOR=cuda, and the run uses the CPU" in refused("env.set.DS_ACCELERATOR=cuda")
    assert "DS_ACCELERATOR=xpu" in refused("env.set.DS_ACCELERATOR=xpu")


# The table.


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_ranks_and_slots_are_those_that_deepspeed_gives(slots: list[int]) -> None:
    text = describe(plan(**file("".join(f"h{n} slots={count}\n" for n, count in enumerate(slots)))))
    rank = 0
    for n, count in enumerate(slots):
        row = next(line.split() for line in text.splitlines() if line.split()[:1] == [f"h{n}"])
        first, _, last = row[1].partition("-")
        assert (int(first), int(last or first)) == (rank, rank + count - 1)
        assert _unfolded(row[2]) == [(rank + i) % count for i in range(count)]
        rank += count


def _unfolded(spans: str) -> list[int]:
    pairs = [span.partition("-") for span in spans.split(",")]
    return [n for low, _, high in pairs for n in range(int(low), int(high or low) + 1)]


def test_many_hosts_stay_short_and_quick(tmp_path: Path) -> None:
    made = plan(**file("node[001-256] slots=8\n"))
    text = describe(made)
    assert len(text.splitlines()) < 170
    assert "  ... and 240 more to node256, ranks 128-2047" in text
    assert "  2,048 ranks (planned as h100; cluster.gpu=KIND) over ssh meet at node001, a free port" in text
    assert "... and 252 more, with --node_rank 4 to 255" in text
    (tmp_path / "h").write_text("node[001-256] slots=8\n")
    assert min(_cpu_seconds(tmp_path, "cluster.hostfile=h", "--json") for _ in range(2)) < 1.0
    assert max(map(len, refused("gpus=9", **file("node[001-256] slots=8\n")).splitlines())) < 200


def _cpu_seconds(cwd: Path, *words: str) -> float:
    """Processor time of one `plan`: what it takes on a machine that does nothing else."""
    command = [sys.executable, "-m", "launcher", "plan", *words]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(json.loads(done.stdout)["hosts"]) == 256
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
