"""Files on many hosts: nothing lands outside its folder or by half, and each host gets what it lacks, no more."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, MachineError
from launcher.rundir import RunDir, complete_checkpoints, damages, file_entry
from launcher.running import carry, sync
from launcher.running.crew import Crew, Stopped, door_here
from launcher.running.haul import Load, move
from launcher.running.meter import Meter
from launcher.running.transport import Door
from tests.cluster import Cluster, Host
from tests.tiny import tiny_plan

ROOT = Path(__file__).resolve().parent.parent
CARRIER = str(ROOT / "tests" / "processes" / "carrier.py")


def door(name: str) -> Door:
    return dataclasses.replace(door_here(), host=name)


def tar_of(*members: tuple[str, bytes, str], end: bool = True) -> io.BytesIO:
    """A tar of (name, type, content or target)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, text in [*members, *([(carry.LAST, tarfile.REGTYPE, "")] if end else [])]:
            info = tarfile.TarInfo(name)
            info.type, data = kind, text.encode() if kind == tarfile.REGTYPE else b""
            info.size, info.linkname = len(data), "" if data else text
            tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "members",
    [
        [("/etc/evil", tarfile.REGTYPE, "x")],
        [("../evil", tarfile.REGTYPE, "x")],
        [("a/../../evil", tarfile.REGTYPE, "x")],
        [("a", tarfile.SYMTYPE, "/etc")],
        [("a", tarfile.SYMTYPE, "../..")],
        [("d/a", tarfile.SYMTYPE, "../../x")],
        [("a", tarfile.LNKTYPE, "/etc/passwd")],
        [("a", tarfile.CHRTYPE, "")],
        [("a", tarfile.FIFOTYPE, "")],
        [("out/evil", tarfile.REGTYPE, "x")],  # `out` is a link that was there before
        [("b", tarfile.SYMTYPE, "out"), ("b/evil", tarfile.REGTYPE, "x")],
    ],
)
def test_nothing_is_written_outside_the_folder(members: list[tuple[str, bytes, str]], tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "out").symlink_to(outside)
    with pytest.raises(carry.Refused):
        carry.unpack_stream(tar_of(("fine", tarfile.REGTYPE, "1"), *members), str(root))
    assert (root / "fine").read_text() == "1"
    assert listing(tmp_path) - {"root/b"} == {"root", "root/out", "root/fine", "outside"}


def test_a_stream_that_is_cut_short_leaves_whole_files_only(tmp_path: Path) -> None:
    stream = tar_of(("one", tarfile.REGTYPE, "1" * 3000), ("two", tarfile.REGTYPE, "2" * 3000))
    (tmp_path / "two").write_text("before")
    with pytest.raises((carry.Refused, tarfile.TarError)):
        carry.unpack_stream(io.BytesIO(stream.read(6000)), str(tmp_path))
    assert listing(tmp_path) == {"one", "two"}
    assert (tmp_path / "two").read_text() == "before"
    with pytest.raises(carry.Refused, match="stopped coming"):  # at the seam between two files, too
        carry.unpack_stream(tar_of(("one", tarfile.REGTYPE, "1"), end=False), str(tmp_path))


def test_what_arrives_is_what_was_sent(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "sub").mkdir(parents=True)
    long = "n" * 200
    for name in ["plain", "sub/deep", long, os.fsdecode(b"latin-\xe9"), "with\nline end", "-rf"]:
        (source / name).write_bytes(os.urandom(1000))
    (source / "plain").chmod(0o750)
    (source / "empty").touch()
    (source / "link").symlink_to("sub/deep")
    os.utime(source / "plain", (1e9, 1e9))
    load = Load(
        source=door("a"),
        target=door("b"),
        root=str(source),
        paths=sorted(os.listdir(source)),
        to=str(target),
        size=6000,
        follow=False,
        label="x",
    )
    assert move([load], io.StringIO()) == {}
    assert listing(target) == listing(source)
    order = {"hash": "all", "follow": False}
    assert carry.tree({"root": str(target), **order})["files"] == carry.tree({"root": str(source), **order})["files"]
    assert (target / "plain").stat().st_mode & 0o777 == 0o750 and (target / "plain").stat().st_mtime == 1e9
    assert move([dataclasses.replace(load, to=str(target / "f"), follow=True, whole=True)], io.StringIO()) == {}
    assert not (target / "f" / "link").is_symlink() and len(listing(target / "f")) == 9


def test_failures_name_the_host_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken").write_text("x")
    load = Load(
        source=door("n1"),
        target=door("n2"),
        root=str(tmp_path),
        paths=["file"],
        to=str(tmp_path / "new"),
        size=1,
        label="l",
        whole=True,
    )
    dead = Door("n2", ("sh", "-c", "echo no route to n2 >&2; exit 255"), False)
    loads = {
        "absent": dataclasses.replace(load, paths=["file", "absent"]),
        "full": dataclasses.replace(load, size=10**18),
        "taken": dataclasses.replace(load, to=str(tmp_path / "taken" / "sub")),
        "dead": dataclasses.replace(load, target=dead),
    }
    failed = move([dataclasses.replace(load, label=label) for label, load in loads.items()], io.StringIO())
    assert failed["absent"].startswith("n1: ") and "absent: No such file" in failed["absent"]
    assert failed["full"].startswith("n2: ") and "MB are needed" in failed["full"]
    assert failed["taken"].startswith("n2: ") and "taken" in failed["taken"]
    assert failed["dead"] == "n2: no route to n2"
    assert listing(tmp_path) == {"file", "taken"}


def test_a_stop_ends_a_transfer_and_leaves_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**40)  # terabytes of nothing
    load = Load(
        source=door("a"),
        target=door("b"),
        root=str(tmp_path),
        paths=["large"],
        to=str(tmp_path / "to"),
        size=1,
        label="x",
    )
    started = time.monotonic()
    with pytest.raises(Stopped):
        move([load], io.StringIO(), give_up=lambda: time.monotonic() - started > 0.5)
    assert time.monotonic() - started < 10
    deadline = time.monotonic() + 5
    while listing(tmp_path) - {"large", "to"} and time.monotonic() < deadline:
        time.sleep(0.05)  # a host finds out by itself
    assert listing(tmp_path) == {"large", "to"}


def test_samples_find_a_change_in_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = bytearray(os.urandom(carry.WHOLE_BYTES * 2))
    path.write_bytes(data)
    before = carry.digest(str(path), len(data), "some")
    assert before != carry.digest(str(path), len(data), "all")
    data[::1000] = bytes(len(data[::1000]))
    path.write_bytes(data)
    assert carry.digest(str(path), len(data), "some") != before


def test_hosts_answer_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Crew({}, {"n1": door("n1"), "n2": door("n2")}) as crew:
        same = {"n1": str(tmp_path / "a"), "n2": str(tmp_path / "a")}
        assert crew.file_systems(same) == {"n1": "n1", "n2": "n1"}
        assert crew.file_systems({**same, "n2": str(tmp_path / "b")}) == {"n1": "n1", "n2": "n2"}
        assert listing(tmp_path) == {"a", "b"}
        many = [f"{number:0100d}" for number in range(3000)]
        assert crew.ask_all({"do": "tree", "root": "/", "paths": many, "hash": "all"})["n1"]["files"] == {}
        with pytest.raises(MachineError, match="n2: .*null.*") as caught:
            crew.ask(
                {
                    name: {"do": "mark", "root": root, "name": "m"}
                    for name, root in {"n1": str(tmp_path), "n2": "/dev/null/x"}.items()
                }
            )
        assert len(caught.value.problems) == 1


def test_progress_is_silent_when_short_and_plain_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("launcher.running.meter.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    meter = Meter(out, {"x to n1": 10_000_000_000})
    meter.show()
    meter.close()
    assert out.getvalue() == ""
    for second in range(1, 30):
        clock[0] = second
        meter.add("x to n1", 100_000_000)
        meter.show()
    assert out.getvalue().splitlines()[0] == "x to n1: 0.2 GB of 10.0 GB, 100.0 MB/s".replace("0.2 GB", "200.0 MB")
    assert len(out.getvalue().splitlines()) == 3


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    fill_project(folder)
    return folder


def fill_project(folder: Path) -> None:
    """A repository with changes, and beside them all that must not travel."""
    for name, text in {
        "train.py": "committed",
        "pkg/mod.py": "committed",
        "gone.py": "committed",
        ".gitignore": "/data/\n*.log\n",
        "new.py": "not committed",
        "data/big.bin": "ignored",
        "x.log": "ignored",
        "runs/r/plan.json": "a run",
        "venv/pyvenv.cfg": "",
        "venv/lib/a.py": "",
        "pkg/__pycache__/m.pyc": "",
        "with space; $(x)\n.py": "odd",
        "sub/inner.py": "of a repository in this one",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main", "-C"]
    subprocess.run([*git, str(folder / "sub"), "init", "-q"], check=True)
    subprocess.run([*git, str(folder), "init", "-q"], check=True)
    subprocess.run([*git, str(folder), "add", "train.py", "pkg/mod.py", "gone.py", ".gitignore"], check=True)
    subprocess.run([*git, str(folder), "commit", "-qm", "x"], check=True)
    (folder / "gone.py").unlink()
    (folder / "train.py").write_text("changed")


SENT = {".gitignore", "train.py", "pkg/mod.py", "new.py", "with space; $(x)\n.py", "sub/inner.py"}


def test_the_working_tree_is_what_git_does_not_ignore(project: Path) -> None:
    assert set(sync.select(project, "runs")) == SENT
    subprocess.run(["rm", "-r", str(project / ".git"), str(project / "sub" / ".git")], check=True)
    assert set(sync.select(project, "runs")) == SENT | {"data/big.bin", "x.log"}


def test_a_large_folder_is_refused_by_its_largest_files(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(project / "images.tar", "wb") as file:
        file.truncate(10**9)
    with pytest.raises(ConfigError, match=r"images\.tar \(1\.0 GB\)"):
        sync._refuse_large(project, sync.select(project, "runs"))


def carrier(host: Host, cwd: Path, path: str = os.environ["PATH"], **job: Any) -> tuple[int, str]:
    """Exit code and text of a job that is done from a host."""
    done = host.run([sys.executable, CARRIER], cwd=cwd, env={"PATH": path}, input=json.dumps(job), timeout=60)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def private(cluster: Cluster) -> Iterator[Path]:
    """A folder that is another one on each host; empty."""
    hosts = [*cluster.hosts, cluster.head]
    for host in hosts:
        host.run(["sh", "-c", f"rm -rf {cluster.private}/*; mkdir -p {cluster.private}/w"], check=True)
    yield cluster.private
    for host in hosts:
        host.run(["sh", "-c", f"rm -rf {cluster.private}/*"], check=True)


def on(host: Host, *argv: str | Path) -> str:
    return host.run(argv, check=True).stdout


@pytest.mark.parametrize("with_rsync", [True, False])
def test_the_working_folder_is_sent(cluster: Cluster, private: Path, with_rsync: bool, tmp_path: Path) -> None:
    work = private / "w" / "my work"
    fill = f"from tests.test_files import fill_project; from pathlib import Path; fill_project(Path({str(work)!r}))"
    on(cluster.head, sys.executable, "-c", fill)
    n1, n2, n3 = cluster.hosts
    on(n2, "sh", "-c", f"mkdir -p '{work}'; echo mine > '{work}/own.txt'; echo old > '{work}/train.py'")
    job = {"do": "sync", "hosts": ["n1", "n2"], "config": {"cluster": {"name": "c", "sync": "rsync"}}}
    if not with_rsync:
        job["config"]["cluster"]["wrap"] = ["env"]  # rsync would not go through what is wrapped around Python
    code, text = carrier(cluster.head, work, spied_rsync(tmp_path), times=2, **job)
    assert (code, text.count("6 files")) == (0, 2), text  # nothing the second time
    calls = (tmp_path / "calls").read_text().splitlines() if with_rsync else []
    assert len(calls) == 2 * with_rsync and not any("train.py" in call for call in calls)
    assert files_of(n1, work) == SENT | {sync.MANIFEST}
    assert files_of(n2, work) == SENT | {sync.MANIFEST, "own.txt"}
    assert on(n2, "cat", work / "train.py") == "changed"
    assert files_of(n3, private) == set()

    on(cluster.head, "sh", "-c", f"cd '{work}'; rm new.py; git rm -q --cached pkg/mod.py; rm -r pkg; echo 2 > train.py")
    on(n1, "sh", "-c", f"echo changed there > '{work}/new.py'")
    code, text = carrier(cluster.head, work, **job)
    assert (code, text.count("1 file,")) == (0, 2), text
    assert files_of(n1, work) == SENT - {"pkg/mod.py"} | {sync.MANIFEST}  # what was changed there is no longer ours
    assert files_of(n2, work) == SENT - {"pkg/mod.py", "new.py"} | {sync.MANIFEST, "own.txt"}


def test_a_login_script_that_prints_is_in_nobodys_way(cluster: Cluster, private: Path) -> None:
    """rsync does not bear it, and what it prints last may have no end of line."""
    script, work = cluster.folder / "home" / ".bashrc", private / "w"
    on(cluster.head, "sh", "-c", f"mkdir {work}; echo 1 > {work}/train.py")
    script.write_text("echo Welcome; printf 'to this {machine'; echo by the way >&2\n")
    try:
        job = {"do": "sync", "hosts": ["n1", "n2"], "config": {"cluster": {"name": "c", "sync": "rsync"}}}
        code, text = carrier(cluster.head, work, **job)
    finally:
        script.unlink()
    assert (code, text.count("1 file")) == (0, 2), text
    assert files_of(cluster.hosts[1], work) == {"train.py", sync.MANIFEST}


def spied_rsync(folder: Path) -> str:
    """A PATH on which rsync notes its calls in `folder`."""
    (folder / "rsync").write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls\nexec {shutil.which("rsync")} "$@"\n')
    (folder / "rsync").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def files_of(host: Host, folder: Path) -> set[str]:
    found = on(host, "find", folder, "-mindepth", "1", "-not", "-type", "d", "-printf", "%P\\0")
    return set(found.split("\0")) - {""}


def test_a_shared_folder_is_left_alone(cluster: Cluster, project: Path) -> None:
    before = listing(project)
    job = {"do": "sync", "hosts": ["n1", "n2"], "config": {"cluster": {"name": "c", "sync": "rsync"}}}
    assert carrier(cluster.head, project, **job) == (0, "")
    assert listing(project) == before


def test_a_folder_that_differs_is_named(cluster: Cluster, private: Path, project: Path) -> None:
    job: dict[str, Any] = {"do": "sync", "hosts": ["n1", "n2"], "config": {"cluster": {"name": "c"}}}
    assert carrier(cluster.head, project, **job) == (0, "")
    work = private / "w"
    on(cluster.head, "cp", "-a", f"{project}/.", work)
    on(cluster.hosts[0], "cp", "-a", f"{project}/.", work)
    on(cluster.hosts[0], "sh", "-c", f"echo other > {work}/train.py; rm {work}/new.py; echo x > {work}/data/big.bin")
    on(cluster.hosts[1], "rm", "-r", work)
    code, text = carrier(cluster.head, work, **job)
    assert code == 3
    assert f"n1: 2 Python files in {work} not as here: new.py, train.py" in text
    assert f"n2 has no folder {work}" in text and "try  cluster.sync=rsync" in text


def make_checkpoint(run: Path, step: int, serial: int, size: int = 5000) -> Path:
    """A whole checkpoint with made-up content."""
    folder = RunDir(run).checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "part.safetensors").write_bytes(os.urandom(size))
    state = {"format": 1, "step": step, "serial": serial}
    text = json.dumps({**state, "files": {"part.safetensors": file_entry(folder / "part.safetensors")}})
    (folder / "state.json").write_text(text)
    (folder / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    return folder


def test_results_come_back_whole(cluster: Cluster, private: Path, tmp_path: Path) -> None:
    n1, n2, _ = cluster.hosts
    run, made = private / "w" / "run", tmp_path / "run"
    for step in (2, 4, 6):
        make_checkpoint(made, step, step)
    (made / "checkpoints" / "step-000006" / "part.safetensors").write_bytes(b"damaged")
    make_checkpoint(made, 8, 8).joinpath("COMPLETE").unlink()
    for name in ("export/model.safetensors", "profile/rank0.json", "logs/n1.0.log", "metrics.jsonl", "bad_rows.json"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(name)
    on(n1, "cp", "-a", made, run)
    on(n1, "rm", "-r", run / "checkpoints" / "step-000002")
    on(n2, "mkdir", "-p", run / "profile", run / "export")
    on(n2, "touch", run / "profile" / "rank1.json", run / "export" / "not from here")
    here = "checkpoints/step-000002"  # of the part before, and rotated on n1 since
    on(cluster.head, "mkdir", "-p", run / "checkpoints", run / "export")
    on(cluster.head, "cp", "-a", made / here, run / here)
    on(cluster.head, "sh", "-c", f"echo old > {run}/export/old.safetensors")
    job = {"do": "gather", "hosts": ["n1", "n2", "n3"], "run_dir": str(run)}
    job["config"] = {"checkpoint": {"keep_last": 1, "every_steps": None, "export": True}}
    code, text = carrier(cluster.head, private, **job)
    assert code == 0
    assert "what came from n1 is damaged" in text and "step-000006" in text
    assert len(text.splitlines()) == 1
    assert files_of(cluster.head, run) == {
        *(f"checkpoints/step-000004/{name}" for name in ("COMPLETE", "part.safetensors", "state.json")),
        *("export/model.safetensors", "profile/rank0.json", "profile/rank1.json", "bad_rows.json"),
    }
    on(cluster.head, "cp", "-a", run, tmp_path / "came")
    came = RunDir(tmp_path / "came")
    assert [damages(folder) for folder in complete_checkpoints(came)] == [[]]


def test_a_host_that_is_gone_is_said(cluster: Cluster, private: Path) -> None:
    job = {"do": "gather", "hosts": ["n1", "n2"], "run_dir": str(private / "w" / "run")}
    job["config"] = {"cluster": {"name": "c", "connect_s": 1.0}}
    cluster.hosts[0].down()
    try:
        code, text = carrier(cluster.head, private, **job)
    finally:
        cluster.hosts[0].up()
    assert code == 0 and text.startswith("nothing was fetched from n1: lost: ssh: ")


def test_a_checkpoint_goes_to_hosts_that_lack_it(cluster: Cluster, private: Path, tmp_path: Path) -> None:
    """C07: each host has the whole of it, though they share no disk."""
    made = make_checkpoint(tmp_path / "run", 4, 1, size=10_000_000)
    checkpoint = private / "w" / "run" / "checkpoints" / made.name
    n1, n2, _ = cluster.hosts
    for host in (cluster.head, n2):
        on(host, "mkdir", "-p", checkpoint.parent)
        on(host, "cp", "-a", made, checkpoint)
    on(n2, "rm", checkpoint / "COMPLETE")
    job = {"do": "place", "hosts": ["n1", "n2"], "run_dir": str(private / "w" / "run"), "resume_from": str(checkpoint)}
    assert carrier(cluster.head, private, times=2, **job) == (0, "")
    ours = carry.tree({"root": str(made), "hash": "all"})["files"]
    for host in (n1, n2):
        assert files_of(host, checkpoint.parent) == {f"{made.name}/{name}" for name in ours}
        assert on(host, "sha256sum", checkpoint / "part.safetensors").split()[0] == ours["part.safetensors"][1]
    on(n1, "sh", "-c", f"rm -r {private}/w/run; touch {private}/w/run")
    code, text = carrier(cluster.head, private, **job)
    assert code == 3 and "n1: " in text and "n2" not in text


def test_a_plan_of_this_machine_costs_nothing(tmp_path: Path) -> None:
    sync.sync(tiny_plan(tmp_path), {}, io.StringIO())
