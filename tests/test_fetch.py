"""Weights and data reach each file system once, from the hub or from the machine that has them, and stay equal."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from launcher.errors import ConfigError
from launcher.hubs import local_folder, model_source
from launcher.running import download
from launcher.spec import ModelConfig
from tests.cluster import Cluster
from tests.test_files import ROOT, carrier, files_of, on

HUB = ROOT / "tests" / "processes" / "hub.py"
COMMIT, OLDER = "c" * 40, "a" * 40
REPO = {
    "config.json": b"{}",
    "tokenizer.json": b"{}" * 500,
    "preprocessor_config.json": b"{}",
    "chat_template.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "breaks.safetensors"}}
    ).encode(),
    "model-1.safetensors": os.urandom(3_000_000),
    "breaks.safetensors": os.urandom(1_000_000) * 24,  # more than huggingface_hub takes at once, or it begins anew
    "pytorch_model.bin": b"the same once more",
}
MODEL = {"name": "tiny", "family": "qwen3_vl", "weights": "pretrained", "repo": "org/tiny"}


@dataclass
class Hub:
    cluster: Cluster
    address: str
    log: Path

    def asked(self, *words: str) -> list[str]:
        """Requests so far that hold all the words."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if all(word in line for word in words)]

    def fetch(self, hosts: list[str], home: Path, **more: Any) -> tuple[int, str]:
        env = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), **more.pop("env", {})}
        config = {"model": MODEL, "dataset": {"name": "digits", "format": "digits"}, **more.pop("config", {})}
        cwd = self.cluster.private
        return carrier(self.cluster.head, cwd, do="fetch", hosts=hosts, env=env, config=config, **more)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repo")
    for name, content in REPO.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def hub(cluster: Cluster, repo: Path, tmp_path: Path) -> Iterator[Hub]:
    for host in (*cluster.hosts, cluster.head):
        host.run(["sh", "-c", f"rm -rf {cluster.private}/*"], check=True)
    log = tmp_path / "hub.log"
    with cluster.head.popen([sys.executable, HUB, repo, COMMIT, log], stdout=-1, text=True) as server:
        try:
            yield Hub(cluster, f"http://{cluster.head.address}:{server.stdout.readline().strip()}", log)
        finally:
            server.kill()
            for host in (*cluster.hosts, cluster.head):
                host.run(["sh", "-c", f"rm -rf {cluster.private}/*"], check=True)


def weights_on(host: Any, home: Path) -> set[str]:
    """Names in the snapshot that `main` means, each with its whole content."""
    folder = home / "hub" / "models--org--tiny"
    commit = on(host, "cat", folder / "refs" / "main")
    snapshot = folder / "snapshots" / commit
    names = files_of(host, snapshot)
    for name in names:
        assert on(host, "sha1sum", snapshot / name).split()[0] == sha1(REPO[name]), name
    return names


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


WANTED = set(REPO) - {"pytorch_model.bin"}


def test_each_file_system_gets_one_copy(hub: Hub, tmp_path: Path) -> None:
    shared = tmp_path / "hf"
    code, text = hub.fetch(["n1", "n2", "n3"], shared)
    assert code == 0, text
    assert weights_on(hub.cluster.hosts[1], shared) == WANTED
    got = hub.asked(" GET ", "model-1.safetensors")
    assert len(got) == 1 and hub.asked("pytorch_model.bin") == []
    assert len(hub.asked(" GET ", "breaks.safetensors", "bytes=")) == 1  # gone on with, not begun anew
    assert json.loads(text.splitlines()[-1])["HF_HUB_OFFLINE"] == "1"

    before = len(hub.asked())
    code, text = hub.fetch(["n1", "n2", "n3"], shared)
    assert (code, len(text.splitlines()), len(hub.asked())) == (0, 1, before)  # nobody is asked any more


def test_two_fetches_of_one_file_system_wait_for_each_other(hub: Hub, tmp_path: Path) -> None:
    home, both = tmp_path / "hf", ThreadPoolExecutor(2)
    done = list(both.map(lambda host: hub.fetch([host], home), ["n1", "n2"]))
    assert [code for code, _ in done] == [0, 0], done
    assert len(hub.asked(" GET ", "model-1.safetensors")) == 1
    assert any("another download of org/tiny is at work" in text for _, text in done)


def test_hosts_of_their_own_download_for_themselves_or_are_sent_it(hub: Hub) -> None:
    n1, n2, n3 = hub.cluster.hosts
    home = hub.cluster.private / "hf"
    nowhere = {"n2": {"HF_ENDPOINT": "http://127.0.0.1:9"}}
    code, text = hub.fetch(["n1", "n2", "n3"], home, host_env=nowhere)
    assert code == 0, text
    for host in (n1, n2, n3):
        assert weights_on(host, home) == WANTED
    loaders = {line.split()[0] for line in hub.asked(" GET ", "model-1")}
    assert loaders == {n1.address, n3.address}
    assert "sent org/tiny to n2 from n1: 27.0 MB" in text
    assert files_of(hub.cluster.head, hub.cluster.private) == set()

    on(n3, "sh", "-c", f"rm {home}/hub/models--org--tiny/snapshots/*/model-1.safetensors")
    code, text = hub.fetch(["n1", "n2", "n3"], home, host_env={"n3": {"HF_HUB_OFFLINE": "1"}})
    assert code == 0 and weights_on(n3, home) == WANTED, text


def test_this_machine_stands_in_for_the_hub(hub: Hub) -> None:
    home = hub.cluster.private / "hf"
    nowhere = {name: {"HF_ENDPOINT": "http://127.0.0.1:9"} for name in ("n1", "n2")}
    code, text = hub.fetch(["n1", "n2"], home, host_env=nowhere, env={"HF_HUB_OFFLINE": "0"})
    assert code == 0 and "sent org/tiny to n2 from this machine" in text, text
    for host in (*hub.cluster.hosts[:2], hub.cluster.head):
        assert weights_on(host, home) == WANTED
    assert {line.split()[0] for line in hub.asked(" GET ", "model-1")} == {hub.cluster.head.address}


def test_offline_mode_asks_nobody_and_says_what_is_missing(hub: Hub) -> None:
    home = hub.cluster.private / "hf"
    code, text = hub.fetch(["n1", "n2"], home, env={"HF_HUB_OFFLINE": "1"})
    assert code == 3
    folder = home / "hub" / "models--org--tiny"
    assert f"n1 has not all of org/tiny in {folder}, and HF_HUB_OFFLINE=1 keeps it from asking the hub" in text
    assert "n2 has not all" in text and "try  model.path=FOLDER" in text
    assert hub.asked() == []


def test_a_repository_that_is_not_there_is_named(hub: Hub) -> None:
    model = {**MODEL, "repo": "org/wrong"}
    code, text = hub.fetch(["n1"], hub.cluster.private / "hf", config={"model": model})
    assert code == 3 and "org/wrong" in text and "RepositoryNotFoundError" in text


def test_all_hosts_have_the_same_commit(hub: Hub) -> None:
    n2 = hub.cluster.hosts[1]
    home = hub.cluster.private / "hf"
    folder = home / "hub" / "models--org--tiny"
    older = "; ".join(
        [f"mkdir -p {folder}/snapshots/{OLDER} {folder}/refs", f"cd {folder}/snapshots/{OLDER}"]
        + [f"echo {name} > {name}" for name in ("config.json", "tokenizer.json", "model.safetensors")]
        + [f"printf {OLDER} > {folder}/refs/main"]
    )
    assert hub.fetch(["n1"], home)[0] == 0
    on(n2, "sh", "-c", older)
    assert hub.fetch(["n1", "n2"], home)[0] == 0
    assert on(n2, "cat", f"{folder}/refs/main") == COMMIT
    assert weights_on(n2, home) == WANTED


def test_files_of_this_machine_go_to_hosts_that_lack_them(hub: Hub, tmp_path: Path) -> None:
    n1, n2, _ = hub.cluster.hosts
    work = hub.cluster.private / "data"
    make = tmp_path / "data"
    (make / "model" / ".cache").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.bin", ".cache/x.json"):
        (make / "model" / name).write_text(name)
    Image.new("RGB", (40, 40)).save(make / "a.png")
    Image.new("RGB", (40, 40)).save(make / "unused.png")
    (make / "train.jsonl").write_text('{"query": "q", "positives": [{"image": "a.png"}], "negatives": ["d"]}\n')
    on(hub.cluster.head, "cp", "-a", make, work)
    config = {
        "model": {**MODEL, "repo": None, "path": str(work / "model")},
        "dataset": {"name": "jsonl", "train": str(work / "train.jsonl")},
    }
    code, text = hub.fetch(["n1", "n2"], work, config=config, times=2)
    assert code == 0 and text.count("sent ") == 4, text
    wanted = {"train.jsonl", "a.png", *(f"model/{n}" for n in ("config.json", "tokenizer.json", "model.safetensors"))}
    assert files_of(n1, work) == files_of(n2, work) == wanted
    assert hub.asked() == []

    on(
        hub.cluster.head,
        "sh",
        "-c",
        f"cat {work}/train.jsonl >> {work}/train.jsonl.2; cat {work}/train.jsonl.2 >> {work}/train.jsonl",
    )
    on(n2, "sh", "-c", f"echo 'mine' > {work}/model/config.json")
    code, text = hub.fetch(["n1", "n2"], work, config=config)
    assert code == 3 and f"n2 has other content than this machine in {work}/model/config.json" in text
    assert on(n2, "cat", work / "model" / "config.json") == "mine\n"
    on(n2, "rm", work / "model" / "config.json")
    code, text = hub.fetch(["n1", "n2"], work, config=config)
    assert code == 0, text
    assert on(n2, "wc", "-l", work / "train.jsonl").split()[0] == "2"  # we had put it there


def test_a_data_set_of_a_hub_is_fetched_whole_by_each_file_system(hub: Hub) -> None:
    home = hub.cluster.private / "hf"
    data = {"name": "jsonl", "format": "auto", "train": "org/tiny"}
    model = {**MODEL, "weights": "random"}
    env = {"HF_HUB_OFFLINE": "0"}
    code, text = hub.fetch(["n1", "n2"], home, config={"model": model, "dataset": data}, env=env)
    assert code == 0, text
    snapshot = home / "hub" / "datasets--org--tiny" / "snapshots" / COMMIT
    for host in hub.cluster.hosts[:2]:
        assert set(on(host, "ls", snapshot).split()) == set(REPO), "pytorch_model.bin too: any file may be data"
    asked = len(hub.asked())
    assert hub.fetch(["n1", "n2"], home, config={"model": model, "dataset": data}, env=env)[0] == 0
    assert len(hub.asked()) == asked, "nobody is asked for what is there"
    code, text = hub.fetch(["n1"], home, config={"model": model, "dataset": {**data, "train": "org/wrong"}}, env=env)
    assert code == 3 and "org/wrong" in text and "dataset.train=FILE or FOLDER" in text


def test_what_modelscope_gives_lies_beside_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is stood in for: it asks a server of its own that no test can be."""
    package = tmp_path / "site" / "modelscope" / "hub"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "snapshot_download.py").write_text(
        "from pathlib import Path\n"
        "def snapshot_download(name, local_dir): Path(local_dir, 'config.json').write_text(name)\n"
        "def dataset_snapshot_download(name, local_dir): Path(local_dir, 'rows.jsonl').write_text(name)\n"
    )
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    order = {"repo": "org/name", "source": "modelscope", "kind": "datasets", "commit": "master", "env": {}}
    assert local_folder("org/name", "modelscope", "datasets") is None

    def carry_out(*what: str, site: Path) -> list[dict[str, Any]]:
        orders = "".join(json.dumps({**order, "do": do}) + "\n" for do in what)
        env = {**os.environ, "PYTHONPATH": str(site)}
        argv = [sys.executable, "-c", "from launcher.running.download import main; main()"]
        # Standard input stays open: the program ends when nobody listens.
        with subprocess.Popen(argv, env=env, cwd=ROOT, stdin=-1, stdout=-1, text=True) as process:
            process.stdin.write(orders + '{"do": "end"}\n')
            process.stdin.flush()
            return [event for line in process.stdout if (event := json.loads(line))["event"] != "progress"]

    refused = carry_out("find", "download", site=tmp_path)
    assert not refused[0]["whole"] and "pip install modelscope" in refused[1]["text"]
    found = carry_out("resolve", "download", "find", "files", site=tmp_path / "site")
    assert [event["event"] for event in found] == ["resolve", "download", "find", "files"]
    assert found[2]["whole"] and found[3]["blobs"] == {"rows.jsonl": len("org/name")}
    folder = local_folder("org/name", "modelscope", "datasets")
    assert folder is not None and (folder / "rows.jsonl").read_text() == "org/name"
    order["kind"] = "models"
    carry_out("download", site=tmp_path / "site")
    assert model_source(ModelConfig(repo="org/name", source="modelscope")) == found[2]["folder"].replace(
        "datasets", "models"
    )
    with pytest.raises(ConfigError, match="org/other of ModelScope is not on this machine"):
        model_source(ModelConfig(repo="org/other", source="modelscope"))


def test_the_verb(hub: Hub) -> None:
    home = hub.cluster.private / "hf"
    verb = [sys.executable, "-m", "launcher", "fetch", f"cluster.hostfile={hub.cluster.hostfile()}"]
    env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home)}
    model = ["model=qwen3_vl_reranker_2b", "model.repo=org/tiny"]
    done = hub.cluster.head.run([*verb, *model], env=env, cwd=hub.cluster.private)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", done.stderr) and "HF_HUB_OFFLINE=1" in done.stderr
    done = hub.cluster.head.run([*verb, *model, "env.set.HF_HUB_OFFLINE=0"], env=env, cwd=hub.cluster.private)
    assert done.returncode == 0 and done.stdout.endswith("on n1, n2: org/tiny\n"), done.stderr
    assert weights_on(hub.cluster.hosts[0], home) == weights_on(hub.cluster.hosts[1], home) == WANTED


@pytest.mark.parametrize(
    ("names", "whole", "complete"),
    [
        (["config.json", "tokenizer.json", "model.safetensors"], True, False),
        (
            ["config.json", "vocab.json", "model.safetensors", "processor_config.json", "chat_template.jinja"],
            True,
            True,
        ),
        (["config.json", "model.safetensors"], False, False),
        (["config.json", "tokenizer.json"], False, False),
        (["config.json", "tokenizer.json", "model-1.safetensors", "model.safetensors.index.json"], False, False),
    ],
)
def test_what_counts_as_whole(
    names: list[str], whole: bool, complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    for name in names:
        (folder / "snapshots" / COMMIT / name).write_bytes(REPO.get(name, b"x"))
    found = download.find({"repo": "org/tiny"})
    assert (found["whole"], found["complete"], found["folder"]) == (whole, complete, str(folder))
