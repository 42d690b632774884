"""Variables that people copy: how grave each is, where it was set, what to write instead."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.planning.checks import NCCL_PROFILES
from launcher.planning.config import read_config
from launcher.planning.fabric import SetFile
from launcher.planning.nccl_lint import Given, forced, given_by_user, lint
from launcher.planning.nccl_names import NCCL_NAMES, TORCH_NAMES
from launcher.planning.nccl_plan import completed
from launcher.planning.nccl_rules import ALGORITHMS, Scene, parsed
from launcher.planning.nccl_table import RULES
from launcher.resources import conf_dir
from launcher.spec import RunPlan
from tests.nccl_support import eight, eth, ib, node
from tests.planning_support import compose, plan

TWO = Scene(hosts=2)
NVLINK = dataclasses.replace(TWO, nvlink=True)
PCIE = dataclasses.replace(TWO, nvlink=False)
RDMA = dataclasses.replace(TWO, rdma=True)
EFA = dataclasses.replace(RDMA, efa=True)
NO_RDMA = dataclasses.replace(TWO, rdma=False)
OLD = dataclasses.replace(TWO, nccl=(2, 20, 5))
ETHS = dataclasses.replace(TWO, interfaces=("eth1", "eth10"), devices=("mlx5_1", "mlx5_10"))

# NAME=VALUE, where, level and a piece of the text ("" = nothing is said), the first thing to try.
TABLE: list[tuple[str, Scene, str, str]] = [
    ("NCCL_ALGO=Tree", TWO, "error: allows no ring", "env.set.NCCL_ALGO=allreduce:tree"),
    ("NCCL_ALGO=Tree", OLD, "warning: turns off NVLS", "unset NCCL_ALGO"),
    ("NCCL_ALGO=^ring", TWO, "error: allows no ring", "env.set.NCCL_ALGO=allreduce:tree"),
    ("NCCL_ALGO=nvls", TWO, "error: allows no ring", "env.set.NCCL_ALGO=allreduce:tree"),
    ("NCCL_ALGO=ring;allgather:pat", TWO, "error: allows no ring", "env.set.NCCL_ALGO=allreduce:tree"),
    ("NCCL_ALGO=tree,ring,nvls", TWO, "", ""),
    ("NCCL_ALGO=Ring", TWO, "warning: turns off NVLS", "unset NCCL_ALGO"),
    ("NCCL_ALGO=Ring", PCIE, "", ""),
    ("NCCL_ALGO=allreduce:tree", TWO, "notice: keeps all-reduce from NVLS", "unset NCCL_ALGO"),
    ("NCCL_ALGO=allgather:nvls,reducescatter:nvls", TWO, "error: is nothing that NCCL can read", ""),
    ("NCCL_ALGO=trees", TWO, "error: is nothing that NCCL can read", "env.set.NCCL_ALGO=allreduce:tree"),
    ("NCCL_PROTO=Simple", TWO, "warning: keeps NCCL from choosing", "unset NCCL_PROTO"),
    ("NCCL_PROTO=^LL128", TWO, "warning: keeps NCCL from choosing", "unset NCCL_PROTO"),
    ("NCCL_PROTO=LL128", TWO, "error: forces LL128", "unset NCCL_PROTO"),
    ("NCCL_PROTO=^LL,Simple", TWO, "error: forces LL128", "unset NCCL_PROTO"),
    ("NCCL_PROTO=Simple,LL128", TWO, "warning: names LL128", "unset NCCL_PROTO"),  # GCP's own profile
    ("NCCL_PROTO=LL,LL128,Simple", PCIE, "error: forces LL128", "unset NCCL_PROTO"),
    ("NCCL_PROTO=fast", TWO, "error: is nothing that NCCL can read", "'env.set.NCCL_PROTO=^LL128'"),
    ("NCCL_P2P_DISABLE=1", NVLINK, "error: sends what NVLink", "unset NCCL_P2P_DISABLE"),
    ("NCCL_SHM_DISABLE=1", PCIE, "warning: is for hosts where", "unset NCCL_SHM_DISABLE"),
    ("NCCL_P2P_DISABLE=0", NVLINK, "", ""),
    ("NCCL_IB_DISABLE=1", RDMA, "error: turns off the InfiniBand", "unset NCCL_IB_DISABLE"),
    ("NCCL_IB_DISABLE=1", EFA, "", ""),
    ("NCCL_IB_DISABLE=1", TWO, "warning: turns off InfiniBand", "env.set.NCCL_IB_DISABLE=0"),
    ("NCCL_IB_DISABLE=1", NO_RDMA, "", ""),
    ("NCCL_IB_DISABLE=1", Scene(hosts=1, rdma=True), "", ""),
    ("NCCL_IB_DISABLE=true", NO_RDMA, "warning: is no number", "unset NCCL_IB_DISABLE"),
    ("NCCL_NET=Socket", RDMA, "error: leaves the active RDMA cards", "unset NCCL_NET"),
    ("NCCL_NET=Socket", TWO, "warning: leaves RDMA cards", "unset NCCL_NET"),
    ("NCCL_NET=gIB", RDMA, "", ""),
    ("NCCL_MIN_NCHANNELS=32", TWO, "warning: was replaced in NCCL 2.17", "env.set.NCCL_MIN_CTAS=32"),
    ("NCCL_MAX_NRINGS=8", TWO, "warning: was replaced in NCCL 2.17", "env.set.NCCL_MAX_CTAS=8"),
    ("NCCL_TREE_THRESHOLD=0", TWO, "notice: was removed", "unset NCCL_TREE_THRESHOLD"),
    ("NCCL_IB_GDR_LEVEL=2", TWO, "notice: was renamed", "env.set.NCCL_NET_GDR_LEVEL=PHB"),
    ("NCCL_CHECKS_DISABLE=1", TWO, "notice: was replaced", "env.set.NCCL_CHECK_POINTERS=0"),
    ("NCCL_LAUNCH_MODE=PARALLEL", TWO, "notice: is deprecated", "unset NCCL_LAUNCH_MODE"),
    ("NCCL_IB_GID_INDEX=3", TWO, "warning: is not needed since", "unset NCCL_IB_GID_INDEX"),
    ("NCCL_IB_GID_INDEX=3", OLD, "", ""),
    ("NCCL_IB_TIMEOUT=22", TWO, "warning: notices a dead link only after", "unset NCCL_IB_TIMEOUT"),
    ("NCCL_IB_TIMEOUT=0", TWO, "warning: waits for ever", "unset NCCL_IB_TIMEOUT"),
    ("NCCL_IB_TIMEOUT=022", TWO, "", ""),  # 18, as C reads it
    ("NCCL_IB_RETRY_CNT=10", TWO, "warning: is above 7", "env.set.NCCL_IB_RETRY_CNT=7"),
    ("NCCL_IB_SPLIT_DATA_ON_QPS=1", TWO, "notice: cuts each message", "unset NCCL_IB_SPLIT_DATA_ON_QPS"),
    ("NCCL_BUFFSIZE=16777216", TWO, "notice: takes memory", "unset NCCL_BUFFSIZE"),
    ("NCCL_P2P_LEVEL=5", TWO, "warning: is a number whose meaning", "env.set.NCCL_P2P_LEVEL=PHB"),
    ("NCCL_P2P_LEVEL=NVL", TWO, "", ""),
    ("NCCL_IB_HCA=mlx5_1", ETHS, "warning: also fits longer names", "env.set.NCCL_IB_HCA==mlx5_1"),
    ("NCCL_IB_HCA==mlx5_1", ETHS, "", ""),
    ("NCCL_SOCKET_IFNAME=eth1", ETHS, "warning: also fits longer names", "env.set.NCCL_SOCKET_IFNAME==eth1"),
    ("NCCL_SOCKET_IFNAME=eth", ETHS, "", ""),
    ("NCCL_SOCKET_IFNAME=lo", TWO, "error: names what no other host", "unset NCCL_SOCKET_IFNAME"),
    ("NCCL_SOCKET_IFNAME=lo", Scene(hosts=1), "", ""),
    ("NCCL_SOCKET_IFNAME=docker0,br-1a2b3c4d5e6f", TWO, "error: names what no other host", "unset NCCL_SOCKET_IFNAME"),
    ("NCCL_SOCKET_IFNAME=docker0,eth0", TWO, "", ""),
    ("NCCL_SOCKET_IFNAME=^docker0", TWO, "warning: excludes", """'env.set.NCCL_SOCKET_IFNAME="^docker0,lo"'"""),
    ("NCCL_SOCKET_IFNAME=^lo,docker", TWO, "", ""),
    ("GLOO_SOCKET_IFNAME==eth0", TWO, "error: has a mark that only NCCL", "unset GLOO_SOCKET_IFNAME"),
    ("GLOO_SOCKET_IFNAME=docker0", TWO, "error: names what no other host", "unset GLOO_SOCKET_IFNAME"),
    ("NCCL_SOCKET_RETRY_CNT=100", TWO, "warning: waits more than 2 minutes", "env.set.NCCL_SOCKET_RETRY_CNT=34"),
    ("FI_PROVIDER=efa", TWO, "notice: is not needed with aws-ofi-nccl", "unset FI_PROVIDER"),
    ("NCCL_NVLS_ENABLE=0", TWO, "warning: is an old workaround", "unset NCCL_NVLS_ENABLE"),
    ("NCCL_DEBUG=INFO", TWO, "notice: fills the log", "env.set.NCCL_DEBUG=WARN"),
    ("NCCL_DEBUG=WARN", TWO, "", ""),
    ("NCCL_ASYNC_ERROR_HANDLING=1", TWO, "warning: is the old name", "env.set.TORCH_NCCL_ASYNC_ERROR_HANDLING=1"),
    ("NCCL_ASYNC_ERROR_HANDLING=0", TWO, "error: lets ranks wait for ever", "unset NCCL_ASYNC_ERROR_HANDLING"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", TWO, "error: lets ranks wait for ever", ""),
    ("TORCH_NCCL_BLOCKING_WAIT=1", TWO, "error: turns off the watchdog", "unset TORCH_NCCL_BLOCKING_WAIT"),
    ("NCCL_BLOCKING_WAIT=1", TWO, "error: turns off the watchdog", "unset NCCL_BLOCKING_WAIT"),
    ("TORCH_NCCL_AVOID_RECORD_STREAMS=1", TWO, "notice: changed its default", ""),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE=2000", TWO, "notice: was renamed", "env.set.TORCH_FR_BUFFER_SIZE=2000"),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/x", TWO, "notice: was renamed", "env.set.TORCH_FR_DUMP_TEMP_FILE=/x"),
    ("TORCH_FR_BUFFER_SIZE=0", TWO, "warning: turns off the flight recorder", "env.set.TORCH_FR_BUFFER_SIZE=2000"),
    ("TORCH_NCCL_ENABLE_MONITORING=0", TWO, "warning: leaves a hang without", ""),
    ("TORCH_NCCL_NAN_CHECK=1", TWO, "warning: is for debugging", ""),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=7200", TWO, "warning: lets a rank whose watchdog hangs", ""),
    ("DEEPSPEED_TIMEOUT=120", TWO, "warning: turns each hang into", "env.set.DEEPSPEED_TIMEOUT=10"),
    ("TORCH_DISTRIBUTED_DEBUG=DETAIL", TWO, "warning: checks every collective", "env.set.TORCH_DISTRIBUTED_DEBUG=INFO"),
    ("CUDA_LAUNCH_BLOCKING=1", TWO, "warning: makes the CPU wait", "unset CUDA_LAUNCH_BLOCKING"),
    ("CUDA_DEVICE_MAX_CONNECTIONS=1", TWO, "notice: is advice for Megatron", ""),
    ("NCCL_SOKET_IFNAME=eth0", TWO, "warning: is ignored by NCCL; did you mean NCCL_SOCKET_IFNAME?", ""),
    ("TORCH_NCCL_DUMP_ON_TIMOUT=1", TWO, "warning: is ignored by NCCL; did you mean TORCH_NCCL_DUMP_ON_TIMEOUT?", ""),
    ("NCCL_FASTRAK_CTRL_DEV=eth0", TWO, "", ""),
    ("NCCL_VERSION=2.27.3", TWO, "", ""),  # images say which they were built with
    ("NCCL_ALGO=", TWO, "", ""),
]


def of(setting: str) -> Given:
    name, _, value = setting.partition("=")
    return given_by_user({name: value}, {name: "forwarded"}, None)[0]


@pytest.mark.parametrize(("setting", "scene", "said", "first"), TABLE)
def test_each_variable(setting: str, scene: Scene, said: str, first: str) -> None:
    found = lint([of(setting)], scene)
    assert [f"{one.level}: {one.text.removeprefix(setting).strip()}"[: len(said)] for one in found] == [said] * bool(
        said
    )
    for one in found:
        assert one.where == "this shell"
        assert not first or one.tries[0] == first
        assert (one.level == "error") == any("nccl.force=true" in line for line in one.tries)
        assert f"unset {setting.partition('=')[0]}" in one.tries


def test_every_row_is_needed_by_some_case() -> None:
    """A row that no setting of the table calls up is dead, or hidden behind another."""
    said = {one.text for setting, scene, *_ in TABLE for one in lint([of(setting)], scene)}
    rows = [rule for rule in RULES if not any(text.endswith(rule.text) for text in said)]
    assert [rule.name for rule in rows] == []


def test_what_is_offered_instead_can_be_typed_and_is_no_error_itself() -> None:
    offered = [line for setting, scene, *_ in TABLE for one in lint([of(setting)], scene) for line in one.tries]
    typed = sorted({shlex.split(line)[0] for line in offered if "env.set." in line})
    assert len(typed) > 15
    while typed:  # one value a variable at a time
        words = {word.partition("=")[0]: word for word in typed}
        typed = [word for word in typed if word not in words.values()]
        for name, value in read_config([*words.values()]).config.env.set.items():
            assert name in (*NCCL_NAMES, *TORCH_NAMES) or not name.startswith(("NCCL_", "TORCH_NCCL"))
            assert [one for one in lint([of(f"{name}={value}")], TWO) if one.level == "error"] == []


NAMES = st.lists(st.sampled_from(ALGORITHMS), min_size=1, max_size=3, unique=True)
LISTS = st.builds(lambda mark, names: mark + ",".join(names), st.sampled_from(["", "^"]), NAMES)


@given(first=LISTS, tree=LISTS)
def test_lists_of_algorithms_are_read_as_nccl_reads_them(first: str, tree: str) -> None:
    def meant(text: str) -> set[str]:
        names = set(text.removeprefix("^").split(","))
        return set(ALGORITHMS) - names if text.startswith("^") else names

    assert parsed(first.upper(), ALGORITHMS) == {"": meant(first)}
    assert parsed(f"{first};AllReduce:{tree}", ALGORITHMS) == {"": meant(first), "allreduce": meant(tree)}
    for bad in (f"{first};{tree}", f"{first};all:{tree}", f"{first}, ring", "", ","):
        with pytest.raises(ValueError, match="is no|has no"):
            parsed(bad, ALGORITHMS)
    assert parsed(f"{first},;", ALGORITHMS) == {"": meant(first)}  # strtok passes over what is empty


def test_a_run_stops_before_it_starts_unless_forced() -> None:
    words = ("model=qwen3_vl_2b", "nodes=2", "gpus=2", "cluster.gpu=h100")
    tree = ("env.set.NCCL_ALGO=Tree", "env.set.NCCL_PROTO=Simple")
    with pytest.raises(ConfigError) as caught:
        plan(*words, *tree, environ={"TORCH_NCCL_BLOCKING_WAIT": "1"})
    first, second = sorted(caught.value.problems, key=lambda problem: problem.text)
    assert (first.where, second.where) == ("env.set", "this shell")
    assert first.tries == ("env.set.NCCL_ALGO=allreduce:tree", "nccl.force=true   (it is kept, with a warning)")
    kept = plan(*words, *tree, "nccl.force=true")
    assert (kept.env["NCCL_ALGO"], kept.env["NCCL_PROTO"]) == ("Tree", "Simple")
    assert sum(text.startswith(("NCCL_ALGO=Tree allows", "NCCL_PROTO=Simple keeps")) for text in kept.warnings) == 2
    assert plan(*tree).env["NCCL_ALGO"] == "Tree"  # on the CPU nobody reads it


def test_an_interface_that_leads_nowhere_is_refused_by_its_key() -> None:
    words = ("model=qwen3_vl_2b", "nodes=2", "gpus=2", "cluster.gpu=h100")
    with pytest.raises(ConfigError, match="names what no other host reaches") as caught:
        plan(*words, "nccl.interface=docker0")
    assert {problem.where for problem in caught.value.problems} == {"nccl.interface"}
    assert plan("model=tiny", "gpus=2", "nccl.interface=lo", gpus=()).env["GLOO_SOCKET_IFNAME"] == "lo"


def two_hosts(*words: str, **facts: Any) -> tuple[RunPlan, list[str]]:
    made = plan("model=qwen3_vl_2b", "nodes=2", "gpus=2", "cluster.gpu=h100", *words, **facts)
    return made, [host.name for host in made.hosts]


def test_files_of_the_hosts_are_read_and_named() -> None:
    made, (first, second) = two_hosts()
    conf = SetFile(path="/etc/nccl.conf", variables={"NCCL_IB_TIMEOUT": "23", "NCCL_DEBUG": "INFO"})
    own = SetFile(path="/home/me/.deepspeed_env", variables={"NCCL_ALGO": "Tree"})
    known = node(count=2, ports=eight(ib), files=(conf,))
    done = completed(made, {first: known, second: dataclasses.replace(known, files=(conf, own))}, {})
    text = "\n".join(done.plan.warnings)
    said = (
        "NCCL_IB_TIMEOUT=23 notices a dead link only after 2 minutes or more; 20, which is usual, takes half a minute"
    )
    assert f"{said} (/etc/nccl.conf of {first}, {second}); try remove NCCL_IB_TIMEOUT from /etc/nccl.conf" in text
    assert "NCCL_DEBUG=INFO" not in text  # ours, in the environment, stands before it
    assert f"{second}: /home/me/.deepspeed_env has no effect" in text
    assert done.found == ()


def test_the_installed_library_says_what_it_does_not_know() -> None:
    made, names = two_hosts("env.set.NCCL_SHM_USE_CUDA_MEMCPY=1", "env.set.NCCL_CUMEM_ENABEL=1")
    known = node(count=2, unknown=("NCCL_SHM_USE_CUDA_MEMCPY", "NCCL_CUMEM_ENABEL"))
    text = "\n".join(completed(made, dict.fromkeys(names, known), {}).plan.warnings)
    assert "NCCL_SHM_USE_CUDA_MEMCPY=1 is ignored by NCCL 2.30.7 (env.set); try remove env.set" in text
    assert "NCCL_CUMEM_ENABEL=1 is ignored by NCCL 2.30.7; did you mean NCCL_CUMEM_ENABLE?" in text


def test_what_the_hosts_are_found_to_be_makes_a_warning_an_error() -> None:
    made, names = two_hosts("env.set.NCCL_IB_DISABLE=1")
    done = completed(made, dict.fromkeys(names, node(count=2, ports=eight(ib))), {})
    assert [one.level for one in done.found] == ["error"]
    assert "turns off the InfiniBand or RoCE cards that are active" in done.found[0].text
    without = completed(made, dict.fromkeys(names, node(count=2)), {})
    assert without.found == ()


@pytest.mark.parametrize(
    ("version", "said"), [("2.28.3", True), ("2.28.9", False), ("2.30.7", False), ("2.26.2", False)]
)
def test_versions_known_to_be_bad(version: str, said: bool) -> None:
    made, names = two_hosts()
    done = completed(made, dict.fromkeys(names, node(count=2, nccl_version=version)), {})
    assert any(f"NCCL {version} falls back without a word" in text for text in done.plan.warnings) == said


def test_hosts_with_different_versions_do_not_start() -> None:
    made, (first, second) = two_hosts()
    mixed = {first: node(count=2), second: node(count=2, nccl_version="2.27.3")}
    (found,) = completed(made, mixed, {}).found
    assert found.text == f"NCCL differs: 2.30.7 on {first}; 2.27.3 on {second}"
    assert found.machine


def test_names_that_fit_longer_names_are_seen_on_the_hosts() -> None:
    made, names = two_hosts("env.set.NCCL_SOCKET_IFNAME=eth1")
    known = node(count=2, interfaces=(eth("eth1", 10000), eth("eth10", 10000)))
    warnings = completed(made, dict.fromkeys(names, known), {}).plan.warnings
    assert any("NCCL_SOCKET_IFNAME=eth1 also fits longer names" in text for text in warnings)


def test_force_takes_the_offer_to_force_away() -> None:
    (kept,) = forced(lint([of("NCCL_ALGO=Tree")], TWO))
    assert kept.level == "warning"
    assert not any("nccl.force" in line for line in kept.tries)


def test_each_profile_reads_the_keys_that_it_lists() -> None:
    files = {path.stem: path.read_text() for path in (conf_dir() / "nccl").glob("*.yaml")}
    assert sorted(files) == sorted(NCCL_PROFILES)
    given = {"hca": "[mlx5_0]", "gid_index": "3", "service_level": "1", "traffic_class": "106", "cross_nic": "0"}
    for name, text in files.items():
        said = _problems(f"nccl={name}", *(f"nccl.{key}={value}" for key, value in given.items()))
        refused = {key for key, value in given.items() if f"nccl.{key}={value} has no effect with nccl={name}" in said}
        listed = set(re.findall(r"^(\w+):", text, re.MULTILINE)) & set(given)
        assert refused == set(given) - listed


def _problems(*words: str) -> str:
    try:
        compose(*words)
    except ConfigError as error:
        return str(error)
    return ""
