"""Cases from public reports about launching on hosts, each through the whole command line and real ssh.

The numbers in the tests of this repository (H01, T06, ...) are one list: H hostfiles, F filters and GPU selection,
T transport and environment, N addresses and ports, P processes. `grep -rnw T06 tests` finds what holds a case.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import pytest

from launcher.__main__ import main
from launcher.rundir import RunDir, read_json
from tests.cluster import PORT, USER, Cluster, await_that
from tests.conftest import REPO
from tests.running_support import command_of

CASES = REPO / "tests" / "cases"
HOSTFILES, ENV_FILES = CASES / "hostfiles", CASES / "env_files"
FILTERS = json.loads((HOSTFILES / "filters.json").read_text())
LIGHT = REPO / "tests" / "processes" / "light"


# What `plan` says of a hostfile and of a choice among its hosts.


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`python -m launcher plan WORDS` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        code = main(["plan", *words])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return f"cluster.hostfile={name}"


GOOD = {  # hosts, slots and what else the plan must hold
    "ok_comments.txt": ("worker-1 0-3 0-3", "worker-2 4-5 0-1"),
    "crlf.txt": ("worker-1 0-3 0-3", "worker-2 4-5 0-1"),
    "bom_host.txt": ("worker-1 0-3 0-3", "worker-2 4-5 0-1"),
    "bracket_range.txt": ("node01 0-7 0-7", "node02 8-15 0-7", "node03 16-23 0-7", "node04 24-31 0-7"),
    "user_at_host.txt": ("worker-1 0-1 0-1 worker-1 user=trainer", "worker-2 2 0 worker-2 user=root"),
    "per_host_port.txt": ("worker-1 0-3 0-3 worker-1 port=2222", "worker-2 4-7 0-3 worker-2 port=2223"),
    "order_w10_w2_w1.txt": ("w10 0 0", "w2 1 0", "w1 2 0"),
    "same_short_name.txt": ("gpu1.siteA.example 0 0", "gpu1.siteB.example 1 0"),
    "unequal_3_2.txt": ("worker-1 0-2 0-2", "worker-2 3-4 1,0"),
}
BAD = {
    "missing_slots.txt": (2, "worker-2 has no slots=N"),
    "misspelt_slots.txt": (2, "unknown field lots"),
    "spaced_equals.txt": (1, "no spaces round `=`"),
    "trailing_junk.txt": (1, "slots=8abc is no whole number"),
    "two_on_one_line.txt": (1, "one host a line"),
    "zero_slots_first.txt": (1, "slots must be >= 1"),
    "duplicate_exact.txt": (2, "worker-1 twice"),
    "duplicate_alias.txt": (2, "are the same machine"),
    "loopback_twice.txt": (2, "are the same machine"),
    "nbsp.txt": (1, "U+00A0"),
    "arabic_digit.txt": (1, "U+0664"),
}


@pytest.mark.parametrize("name", GOOD)
def test_plan_of_a_good_hostfile(name: str, plan: Any) -> None:
    """H11 H12 H14 H15 H20 T07 T09: ranks in the order of lines; MASTER_ADDR belongs to the first."""
    said = plan(f"cluster.hostfile={HOSTFILES / name}")
    assert said.code == 0, said.err
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    rows = lines[2 : 2 + len(GOOD[name])]
    for row, want in zip(rows, GOOD[name], strict=True):
        assert row.startswith(want)
    assert f" over ssh meet at {GOOD[name][0].split()[0]}, a free port" in " ".join(lines)


@pytest.mark.parametrize("name", BAD)
def test_plan_of_a_bad_hostfile(name: str, plan: Any) -> None:
    """H04 H06 H08 H09: refused before any ssh, with file, line, the line itself and what to type."""
    number, text = BAD[name]
    said = plan(f"cluster.hostfile={HOSTFILES / name}")
    assert (said.code, said.out) == (2, "")
    assert text in said.err and f"{HOSTFILES / name}:{number}" in said.err
    assert said.err.count("\n     try  ") == 1, said.err


def test_a_hostfile_that_is_not_there(plan: Any, tmp_path: Path) -> None:
    """H01: never this machine instead; the absolute path is shown."""
    for word in ("nope", "$UNSET/hosts", "../elsewhere/hosts"):
        said = plan(f"cluster.hostfile={word}", "gpus=1")
        assert said.code == 2
        assert f"{os.path.normpath(tmp_path / word)}: no such file" in said.err
    assert plan("cluster.hostfile=").code == 2, "an unset variable of the shell leaves nothing"


def test_more_nodes_than_hosts(plan: Any) -> None:
    """H02: two asked for, one there."""
    said = plan("nodes=2", write("single", "worker-1 slots=2\n"))
    assert said.code == 2 and "nodes=2, but single has 1 host: worker-1" in said.err


def test_one_host_that_is_not_this_machine(plan: Any) -> None:
    """H03: it runs there, also when a filter leaves one."""
    for words in (
        (write("single", "worker-1 slots=2\n"),),
        (write("two", "a slots=1\nworker-1 slots=2\n"), "cluster.include=worker-1"),
    ):
        said = plan("--json", *words)
        made = json.loads(said.out)
        assert [host["name"] for host in made["hosts"]] == ["worker-1"] and made["world_size"] == 2
        assert made["master_addr"] == "worker-1"


def test_localhost_beside_remote_hosts(plan: Any) -> None:
    """H13: refused until an address is given that the others reach."""
    word = f"cluster.hostfile={HOSTFILES / 'localhost_and_remote.txt'}"
    assert "would be told to meet at 127.0.0.1" in plan(word).err
    assert plan(word, "cluster.master_addr=10.0.0.5").code == 0


def test_unequal_slots_are_counted(plan: Any) -> None:
    """H15: the batch is divided by five ranks."""
    made = json.loads(plan("--json", f"cluster.hostfile={HOSTFILES / 'unequal_3_2.txt'}").out)
    assert made["world_size"] == 5
    assert made["deepspeed"]["train_batch_size"] % 5 == 0


def test_no_path_is_read_that_was_not_given() -> None:
    """H19: DeepSpeed's own default is nowhere."""
    files = [*(REPO / "launcher").rglob("*.py"), *(REPO / "conf").rglob("*.yaml")]
    assert [path for path in files if "/job/" in path.read_text()] == []


FILTER_WORDS = {  # what is said of a filter that is refused
    "worker-1:7": "slot 7 of worker-1, which has 4 slots",
    "worker-1:-1": "numbers with commas, not '-1'",
    "worker-1:0-2": "numbers with commas, not '0-2'",
    "worker-1:": "numbers with commas, not ''",
    "worker-9": "known are worker-1, worker-2",
    "2001:db8::11:0": "no host 2001:db8::11:0",
    "worker-1@worker-2": "leaves no host",
    "worker-1:9": "slot 9 of worker-1, which has 4 slots",
    "worker-1": "exclude each other",
    "worker-1@ worker-2": "no blanks",
    "worker-1 @worker-2": "no blanks",
    "@": "no empty names",
    "worker-1@@worker-2": "no empty names",
}
MORE = (
    {"include": spec, "want": "error"}
    for spec in ("worker-1@ worker-2", "worker-1 @worker-2", "@", "worker-1@@worker-2")
)


@pytest.mark.parametrize("case", [*(c for c in FILTERS["cases"] if "env" not in c), *MORE], ids=str)
def test_plan_with_a_filter(case: dict[str, Any], plan: Any) -> None:
    """F04 F05 F06 F07: DeepSpeed's syntax; what is wrong is refused before the start and answered with the grammar."""
    words = [write("hosts", "".join(f"{name} slots={count}\n" for name, count in FILTERS["pool"].items()))]
    words += [f'cluster.{kind}="{case[kind]}"' for kind in ("include", "exclude") if kind in case]
    words += [f"gpus={case['num_gpus']}"] if "num_gpus" in case else []
    said = plan("--json", *words)
    if isinstance(case["want"], dict):
        assert {host["name"]: host["gpus"] for host in json.loads(said.out)["hosts"]} == case["want"]
        return
    assert (said.code, said.out) == (2, "")
    text = "cannot be combined" if "num_gpus" in case else FILTER_WORDS[case.get("include") or case["exclude"]]
    assert text in said.err and "\n     try  " in said.err, said.err


def test_include_with_nodes(plan: Any) -> None:
    """F05: which of the two would count is not guessed."""
    word = f"cluster.hostfile={HOSTFILES / 'ok_comments.txt'}"
    said = plan(word, "cluster.include=worker-1", "nodes=1")
    assert said.code == 2 and "nodes= and cluster.include= cannot be combined" in said.err


def test_more_gpus_than_slots(plan: Any) -> None:
    """F08: never several ranks on one GPU."""
    said = plan(f"cluster.hostfile={HOSTFILES / 'ok_comments.txt'}", "gpus=3")
    assert said.code == 2 and "gpus=3, but worker-2 has 2 slots" in said.err and "try  gpus=2" in said.err
    said = plan(f"cluster.hostfile={HOSTFILES / 'ok_comments.txt'}", "gpus=[2]")
    assert said.code == 2 and "worker-2 has 2 slots" in said.err


def test_visible_devices_of_the_shell_beside_a_filter(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F01: the plan says which of the two counts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,4")
    said = plan(f"cluster.hostfile={HOSTFILES / 'ok_comments.txt'}", "cluster.include=worker-1")
    assert said.code == 0
    assert "CUDA_VISIBLE_DEVICES=2,4 counts only on this machine" in " ".join(said.out.split())


@pytest.fixture
def six_gpus(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`plan` on a machine whose `nvidia-smi` lists six GPUs."""
    rows = "".join(f"{n}, GPU-{n}{n}{n}abc, NVIDIA H200, 143771, 9.0\n" for n in range(6))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{rows}END\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return plan


@pytest.mark.parametrize(
    ("visible", "words", "want"),
    [
        ("2,4", (), [2, 4]),
        ("4,5", ("gpus=1",), [4]),
        ("GPU-333abc", (), [3]),
        ("2,4", ("gpus=3",), "gpus=3"),
        ("7", (), "7 is none of this machine's GPUs"),
        ("GPU-1234abcd", (), "GPU-1234abcd is none of this machine's GPUs"),
        ("MIG-1234", (), "MIG-1234 is a part of a GPU"),
    ],
)
def test_visible_devices(visible: str, words: tuple[str, ...], want: Any, six_gpus: Any, monkeypatch: Any) -> None:
    """F01 F02 F08 F09: the GPUs that the shell leaves are used, by number or UUID, and never others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = six_gpus("--json", *words)
    if isinstance(want, list):
        assert said.code == 0 and json.loads(said.out)["hosts"][0]["gpus"] == want, said.err
    else:
        assert said.code == 2 and want in said.err and "try  " in said.err


@pytest.mark.parametrize("case", json.loads((ENV_FILES / "expected.json").read_text()), ids=lambda case: case["file"])
def test_plan_with_an_env_file(case: dict[str, Any], plan: Any) -> None:
    """T02: every line is read as it stands, and a bad one is named."""
    said = plan("--json", f"env.file={ENV_FILES / case['file']}")
    if isinstance(case["want"], dict):
        assert case["want"].items() <= json.loads(said.out)["env"].items()
        return
    assert said.code == 2 and f"'FOO' has no =    ({ENV_FILES / case['file']}:1)" in said.err


# What reaches the ranks, over real ssh and on one machine. No torch: `tests/processes/light` stands in for the loop.

WORDS = (
    *("env.set.DS_ACCELERATOR=cpu", "checkpoint.export=false", "logging.monitor_every_s=null", "logging.trackers=[]"),
    *("cluster.stop_grace_s=20", "cluster.sync=none"),
)


@pytest.fixture
def hosts(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, put in order afterwards."""
    yield cluster
    cluster.ssh_config.unlink(missing_ok=True)
    cluster.clear()


def start(cluster: Cluster, folder: Path, *words: str | Path, steps: int = 2, **options: Any) -> Popen[str]:
    """`python -m launcher WORDS` on the head, in this folder."""
    env = {"PYTHONPATH": f"{LIGHT}:{REPO}", **options.pop("env", {})}
    argv = [sys.executable, "-m", "launcher", *WORDS, f"train.max_steps={steps}", *words]
    return cluster.head.popen(argv, cwd=folder, env=env, stdout=-1, stderr=-1, text=True, **options)


def finish(cluster: Cluster, folder: Path, *words: str | Path, **options: Any) -> CompletedProcess[str]:
    """The same, to its end."""
    process = start(cluster, folder, *words, **options)
    out, errors = process.communicate(timeout=90)
    return CompletedProcess(list(map(str, words)), process.returncode, out, errors)


def of_ranks(run: Path, count: int = 2) -> list[dict[str, str]]:
    """The environment that each rank has seen."""
    return [read_json(run / f"env.{rank}.json") for rank in range(count)]


def typed(text: str) -> str:
    """A text as Hydra's grammar has it in quotes."""
    text = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", text)
    return "'" + re.sub(r"\\+$", lambda found: found[0] * 2, text) + "'"


ARGUMENTS = [case["arg"] for case in json.loads((CASES / "hydra" / "argv_roundtrip.json").read_text())]
ARGUMENTS += [
    "x=a;id",
    "optim={lr:1,wd:0}",
    "a\\",
    "\\'",
    "(",
    "it's",
    '"a b"',
    "$HOME",
    "64(x2)",
    "%h %u",
    "a\r\nb",
    "*",
    "!x",
]
FORWARDED = {
    "HF_HOME": "/data/hf cache",
    "WANDB_NOTES": "a\nb $(id) %h 'c\"",
    "TOKENIZERS_PARALLELISM": "true",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "LD_LIBRARY_PATH": "/opt/lib:/usr/lib/x y",
}


def test_words_and_variables_are_the_same_on_one_host_and_on_two(hosts: Cluster, tmp_path: Path) -> None:
    """T01 T03 T04 T06 T21 X03: every byte arrives, nothing is run by a shell, and secrets are in no file."""
    lines = [
        (CASES / "env_files" / case["file"], case["want"])
        for case in json.loads((ENV_FILES / "expected.json").read_text())
    ]
    wanted = dict(FORWARDED)
    text = ""
    for number, (path, want) in enumerate(line for line in lines if isinstance(line[1], dict)):
        [(name, value)] = want.items()
        text += path.read_text("utf-8-sig").replace(name, f"FILE_{number}") + "\n# note\n"
        wanted[f"FILE_{number}"] = value
    (tmp_path / "vars.env").write_text("\ufeff" + text)
    wanted |= {f"WANDB_ARG_{n}": argument for n, argument in enumerate(ARGUMENTS)}
    env = {**FORWARDED, **{name: wanted[name] for name in wanted if name.startswith("WANDB_ARG")}, "HF_TOKEN": "hush-1"}
    # A run's words are recorded one a line, so that a value of two lines comes from this shell.
    typed_here = {f"ARG_{n}": argument for n, argument in enumerate(ARGUMENTS) if "\n" not in argument}
    wanted |= typed_here
    words = ["env.file=vars.env", f"task.instruction={typed(ARGUMENTS[3])}"]
    words += [f"env.set.{name}={typed(argument)}" for name, argument in typed_here.items()]
    name = "a run;touch pwned $(touch pwned) `touch pwned` 'q' é"
    for folder, hostfile in ((tmp_path / "one", ()), (tmp_path / "two", (f"cluster.hostfile={hosts.hostfile()}",))):
        folder.mkdir()
        (folder / "vars.env").write_text((tmp_path / "vars.env").read_text())
        done = finish(hosts, folder, *words, *(hostfile or ["gpus=2"]), f"run.dir={typed(str(folder / name))}", env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        for seen in of_ranks(folder / name):
            assert {key: seen.get(key) for key in wanted} == wanted
            assert seen["HF_TOKEN"] == "hush-1"
        assert read_json(folder / name / "plan.json")["config"]["task"]["instruction"] == ARGUMENTS[3]
        assert [
            path
            for path in folder.rglob("*")
            if path.is_file() and not re.fullmatch(r"env\.\d\.json", path.name) and b"hush" in path.read_bytes()
        ] == []
        assert "hush" not in done.stdout + done.stderr
    assert list(tmp_path.rglob("pwned")) == [] and not (Path(hosts.folder) / "home" / "pwned").exists()


def test_hosts_by_other_names_ports_and_users(hosts: Cluster, tmp_path: Path) -> None:
    """H12 H14 H20 T07 T08 T09: the user's ssh config counts; rank 0 is on the first line; logs have whole names."""
    n1, n2, _ = hosts.hosts
    hosts.ssh_config.write_text("Host gpu1.siteA.example\n  HostName n1\n\nHost gpu1.siteB.example\n  HostName n2\n")
    lines = (f"{USER}@gpu1.siteB.example slots=1 port={PORT}", "gpu1.siteA.example slots=1")
    done = finish(hosts, tmp_path, f"cluster.hostfile={hosts.hostfile(*lines)}", "run.name=r")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs" / "r")
    first, second = of_ranks(run.path)
    assert first["USER"] == USER and first["SSH_CONNECTION"].split()[2:] == [n2.address, str(PORT)]
    assert second["USER"] == "root" and second["SSH_CONNECTION"].split()[2:] == [n1.address, "22"]
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == n2.address
    assert sorted(path.name for path in run.logs.glob("gpu1.*.[01].log")) == [
        "gpu1.siteA.example.1.log",
        "gpu1.siteB.example.0.log",
    ]
    for rank in (0, 1):
        asked = [sys.executable, "-m", "launcher", "logs", run.path, "--rank", str(rank)]
        assert hosts.head.run(asked, cwd=tmp_path).stdout.strip().endswith("from step 0")


def test_one_far_host_with_an_activated_environment(hosts: Cluster, tmp_path: Path) -> None:
    """H03 T14 T15: ranks run there and not here, in what the script has activated, and PYTHONPATH is kept."""
    (hosts.folder / "activate").write_text(
        f'export ACTIVATED="$1" PYTHONPATH=/opt/env\nPATH={Path(sys.executable).parent}:$PATH\n'
    )
    words = (f"cluster.hostfile={hosts.hostfile('n2 slots=2')}", f"cluster.activate='{hosts.folder}/activate qwen'")
    done = finish(hosts, tmp_path, *words, "run.name=r")
    assert done.returncode == 0, done.stdout + done.stderr
    for seen in of_ranks(tmp_path / "runs" / "r"):
        assert seen["SSH_CONNECTION"].split()[2] == hosts.hosts[1].address
        assert seen["ACTIVATED"] == "qwen" and str(Path(sys.executable).parent) in seen["PATH"].split(":")
        assert str(REPO) in seen["PYTHONPATH"].split(":")


def test_a_host_that_is_down_starts_nothing(hosts: Cluster, tmp_path: Path) -> None:
    """T10 T11: it is named with the reason, and no rank has run on the other."""
    hosts.hosts[1].down()
    done = finish(hosts, tmp_path, f"cluster.hostfile={hosts.hostfile()}", "run.name=r", "cluster.connect_s=2")
    assert done.returncode in (3, 75) and "n2" in done.stderr and "unreachable" in done.stderr, done.stderr
    assert list(tmp_path.rglob("env.*.json")) == [] and not (tmp_path / "runs" / "r").exists()
    await_that(lambda: hosts.hosts[0].pids() == [], 5, lambda: str(hosts.hosts[0].pids()))


def test_two_jobs_at_once(hosts: Cluster, tmp_path: Path) -> None:
    """N01 P05 P09 T01: each has its own port and files, Ctrl-C ends one alone, and no command line has a secret."""
    word = f"cluster.hostfile={hosts.hostfile()}"
    env = {"HF_TOKEN": "hush-2"}
    jobs = {name: start(hosts, tmp_path, word, f"run.name={name}", steps=9999, env=env) for name in "ab"}
    runs = {name: RunDir(tmp_path / "runs" / name) for name in jobs}

    def step(name: str) -> int:
        return min((read_json(runs[name].rank(rank)).get("step") or 0 for rank in (0, 1)), default=0)

    begun = [runs[name].path / f"env.{rank}.json" for name in runs for rank in (0, 1)]
    await_that(lambda: all(path.exists() for path in begun), 90, lambda: str(list(tmp_path.rglob("env.*"))))
    ports = {name: {seen["MASTER_PORT"] for seen in of_ranks(run.path)} for name, run in runs.items()}
    assert all(len(found) == 1 for found in ports.values()) and ports["a"] != ports["b"]
    shown = [command_of(pid) for host in (*hosts.hosts, hosts.head) for pid in host.pids()]
    assert len(shown) > 8 and not [command for command in shown if b"hush" in command]
    jobs["a"].send_signal(signal.SIGINT)
    out, errors = jobs["a"].communicate(timeout=60)
    assert jobs["a"].returncode == 130, out + errors
    reached = step("b")
    await_that(lambda: step("b") > reached + 10, 20, lambda: f"b stands at {step('b')}")
    jobs["b"].send_signal(signal.SIGTERM)
    out, errors = jobs["b"].communicate(timeout=60)
    assert jobs["b"].returncode == 143, out + errors


def test_hosts_without_programs_and_with_other_interfaces(hosts: Cluster, tmp_path: Path) -> None:
    """N03 N04 N05: neither `hostname` nor `ip` is there, docker0 comes first on both, and n2 calls its card eno1."""
    n1, n2, _ = hosts.hosts
    hidden = [path for path in ("/usr/bin/hostname", "/usr/bin/ip", "/usr/sbin/ip") if Path(path).exists()]

    def rename(old: str, new: str) -> None:
        n2.run(
            ["ip", "-batch", "-"],
            input=f"link set {old} down\nlink set {old} name {new}\nlink set {new} up\n",
            check=True,
        )

    with n1.network("docker0", "172.17.0.1/16"), n2.network("docker0", "172.17.0.1/16"):
        rename("eth0", "eno1")
        for host in (n1, n2):
            for path in hidden:
                host.run(["mount", "--bind", "/dev/null", path], check=True)
        try:
            done = finish(hosts, tmp_path, f"cluster.hostfile={hosts.hostfile()}", "run.name=r")
        finally:
            for host in (n1, n2):
                for path in hidden:
                    host.run(["umount", path], check=True)
            rename("eno1", "eth0")
            n2.run(["ip", "addr", "add", f"{n2.address6}/64", "dev", "eth0", "nodad"])
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = of_ranks(tmp_path / "runs" / "r")
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == n1.address
    assert (first["GLOO_SOCKET_IFNAME"], second["GLOO_SOCKET_IFNAME"]) == ("eth0", "eno1")


def test_the_command_started_on_every_host(hosts: Cluster, tmp_path: Path) -> None:
    """T20: the same words on both hosts at once."""
    env = {"PYTHONPATH": f"{LIGHT}:{REPO}"}
    argv = [sys.executable, "-m", "launcher", *WORDS, f"cluster.hostfile={hosts.hostfile()}", "train.max_steps=60"]
    started = [host.popen(argv, cwd=tmp_path, env=env, stdout=-1, stderr=-1, text=True) for host in hosts.hosts[:2]]
    said = [process.communicate(timeout=90)[1] for process in started]
    # Whoever looks second sees the first; which one it is, and whether both do, is chance.
    refused = [text for process, text in zip(started, said, strict=True) if process.returncode == 2]
    assert refused, said
    for text in refused:
        assert "this very command runs there too" in text and "cluster.transport=env" in text
