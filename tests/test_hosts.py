"""Hostfiles and host filters: the grammar, each kind of mistake, and what DeepSpeed makes of our text."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.planning import hosts as hosts_module
from launcher.planning.hosts import parse_hostfile, render_hosts
from launcher.planning.placement import check_loopback
from launcher.planning.ranges import expand_list
from launcher.planning.selection import filter_hosts, limit_gpus, take_nodes
from launcher.planning.visible import through_visible
from launcher.resources import hostfiles_dir
from launcher.spec import Host

CASES = Path(__file__).parent / "cases" / "hostfiles"
EXPECTED = json.loads((CASES / "expected.json").read_text())
FILTERS = json.loads((CASES / "filters.json").read_text())

OK = {
    "ok_comments.txt": "worker-1:4, worker-2:2",
    "crlf.txt": "worker-1:4, worker-2:2",
    "bom_host.txt": "worker-1:4, worker-2:2",
    "bracket_range.txt": "node01:8, node02:8, node03:8, node04:8",
    "user_at_host.txt": "worker-1:2, worker-2:1",
    "per_host_port.txt": "worker-1:4, worker-2:4",
    "order_w10_w2_w1.txt": "w10:1, w2:1, w1:1",
    "same_short_name.txt": "gpu1.siteA.example:1, gpu1.siteB.example:1",
}
BAD = {
    "missing_slots.txt": ("missing_slots.txt:2", "worker-2 has no slots=N"),
    "misspelt_slots.txt": ("misspelt_slots.txt:2", "unknown field lots; did you mean slots?"),
    "spaced_equals.txt": ("spaced_equals.txt:1", "no spaces round `=`"),
    "trailing_junk.txt": ("trailing_junk.txt:1", "slots=8abc is no whole number"),
    "two_on_one_line.txt": ("two_on_one_line.txt:1", "one host a line"),
    "zero_slots_first.txt": ("zero_slots_first.txt:1", "slots must be >= 1"),
    "duplicate_exact.txt": ("duplicate_exact.txt:2", "lines 1 and 2: worker-1 twice"),
    "duplicate_alias.txt": ("duplicate_alias.txt:2", "worker-1 and Worker-1.cluster.example are the same machine"),
    "loopback_twice.txt": ("loopback_twice.txt:2", "127.0.0.1 and localhost are the same machine"),
    "nbsp.txt": ("nbsp.txt:1", "U+00A0"),
    "arabic_digit.txt": ("arabic_digit.txt:1", "U+0664"),
}


def read(name: str) -> tuple[Host, ...]:
    """Hosts of one case file."""
    return parse_hostfile((CASES / name).read_bytes().decode(), name)


def summary(hosts: tuple[Host, ...]) -> str:
    """Name and slots of each host."""
    return ", ".join(f"{host.name}:{host.slots}" for host in hosts)


def test_every_case_file_has_an_outcome() -> None:
    assert {case["file"] for case in EXPECTED} == {*OK, *BAD, "localhost_and_remote.txt"}


@pytest.mark.parametrize("name", OK)
def test_good_hostfiles(name: str) -> None:
    assert summary(read(name)) == OK[name]


@pytest.mark.parametrize("name", BAD)
def test_bad_hostfiles_name_file_line_and_reason(name: str) -> None:
    where, text = BAD[name]
    with pytest.raises(ConfigError) as caught:
        read(name)
    problem = caught.value.problems[0]
    assert problem.where == where
    assert text in problem.text
    number = int(where.rpartition(":")[2])
    line = (CASES / name).read_text(encoding="utf-8").splitlines()[number - 1].strip()
    shown = line.replace("\u00a0", "<U+00A0>").replace("\u0664", "<U+0664>")
    assert problem.text.splitlines()[1:] == [shown]
    assert problem.tries


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("n1 slot=2 user=bob", "n1 slots=2 user=bob"),
        ("bob@n1 slots=4 prot=22  # mine", "bob@n1 slots=4 port=22"),
        ("n1: slots=2", "n1 slots=2"),
        ("n1 slots=two", "n1 slots=8"),
        ("n1 slots=1 slot=2", "n1 slots=8"),
        ("n1 slots = 4", "n1 slots=4"),
        ("n1 slots:4", "n1 slots=4"),
        ("n1:4", "n1 slots=4"),
        ("= slots=2", "worker-1 slots=8"),
    ],
)
def test_a_bad_line_is_shown_as_it_should_be(line: str, typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(line, "hosts")
    assert caught.value.problems[0].tries == (typed,)


def test_localhost_beside_other_hosts_needs_an_address_that_they_can_reach() -> None:
    hosts = read("localhost_and_remote.txt")
    assert "127.0.0.1" in check_loopback(hosts, master_addr=None)[0].text
    assert not check_loopback(hosts, master_addr="10.0.0.1")
    assert not check_loopback(hosts[:1], master_addr=None)


def test_fields_behind_slots() -> None:
    first, second = parse_hostfile(
        "root@a slots=4 gpus=1,3 port=2222 addr=10.0.0.1 iface=eth0 weight=.5\n[2001:db8::11] gpus=0 # note\n", "f"
    )
    assert first == Host(name="a", gpus=(1, 3), address="10.0.0.1", port=2222, user="root", iface="eth0", weight=0.5)
    assert second == Host(name="2001:db8::11", gpus=(0,))


def test_weights_of_gpus() -> None:
    a, b, c = parse_hostfile("a slots=3 weight=1,1,2\nb slots=4 gpus=3,0 weight=3,0.5\nc slots=2 weight=2\n", "f")
    assert (a.weights, b.gpus, b.weights) == ((1.0, 1.0, 2.0), (0, 3), (0.5, 3.0))
    # LOCAL_RANK is the rank modulo the ranks of its host: b begins with rank 3, on its second GPU.
    assert (a.speeds(0), b.speeds(3), c.speeds(5)) == ([1.0, 1.0, 2.0], [3.0, 0.5], [2.0, 2.0])
    assert limit_gpus([a], [1, 2])[0].weights == (1.0, 2.0)
    assert filter_hosts([a], None, "a:0")[0].weights == (1.0, 2.0)
    turned = through_visible(a, [7, 1, 4])
    assert (turned.gpus, turned.weights) == ((1, 4, 7), (1.0, 2.0, 1.0))
    (d,) = parse_hostfile("d slots=2 weight=auto\n", "f")
    assert (d.weight, d.speeds(0)) == ("auto", [1.0, 1.0])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("a:22 slots=2", "ssh port has its own field"),
        ("[2001:db8::1]:22 slots=2", "ssh port has its own field"),
        ("2001:db8::zz slots=2", "neither a host name nor an address"),
        ("a slots=2 gpus=0,0", "names a slot twice"),
        ("node[0-9999] slots=8", "names more than 4096 hosts"),
        ("node[0-99][0-99] slots=8", "names more than 4096 hosts"),
        ("node[1-2 slots=8", "neither a host name nor an address"),
        ("u@v@a slots=2", "user u@v is no user name"),
        ("a slots=2 gpus=0,2", "numbered 0 to 1"),
        ("a slots=2 port=0", "port must be >= 1"),
        ("a slots=2 slots=3", "stands twice"),
        ("a slots=2 weight=0", "no number above 0"),
        ("a slots=2 weight=nan", "no number above 0"),
        ("a slots=2 weight=1,x", "no number above 0"),
        ("a slots=2 weight=1,2,3", "has 3 numbers for 2 GPUs"),
        ("a slots=2 weight=auto\nb slots=2 weight=2", "measures all ranks of a run, and another line has numbers"),
        ("a slots=-1", "slots must be >= 1"),
        ("a slots=2 fast", "is no KEY=VALUE"),
        ("slots=4 a", "the host name comes first"),
        ("a,b slots=8", "neither a host name nor an address"),
        ("node[4-1] slots=8", "must rise"),
        ("node[1-2] slots=8 addr=10.0.0.1", "names one machine"),
        ("-oProxyCommand=id slots=1", "the host name comes first"),
        ("-v slots=1", "neither a host name nor an address"),
        ("a..b slots=1", "neither a host name nor an address"),
        ("0.0.0.0 slots=1", "address of no one machine"),
        (":: slots=1", "address of no one machine"),
        ("a slots=1 addr=224.0.0.1", "address of no one machine"),
        ("", "names no host"),
    ],
)
def test_bad_lines(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match="problem") as caught:
        parse_hostfile(line + "\n", "f")
    assert text in caught.value.problems[0].text


def test_all_bad_lines_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile("a\nb slots=0\nc slots=1\nd slots=x\n", "f")
    assert [p.where for p in caught.value.problems] == ["f:1", "f:2", "f:4"]


def words(pattern: str) -> st.SearchStrategy[str]:
    """Strings that match the whole pattern."""
    return st.from_regex(pattern, fullmatch=True)


ADDRESSES = st.ip_addresses().filter(lambda one: not (one.is_unspecified or one.is_multicast)).map(str)
NAMES = words(r"[a-z]{1,6}-?[0-9]{1,2}(\.[a-z]{1,3})?") | ADDRESSES.filter(lambda one: ":" in one)
HOST = st.builds(
    Host,
    name=NAMES,
    gpus=st.sets(st.integers(0, 9), min_size=1).map(lambda s: tuple(sorted(s))),
    address=st.none() | ADDRESSES.filter(lambda one: one != "255.255.255.255"),
    port=st.none() | st.integers(1, 65535),
    user=st.none() | words(r"[a-z][a-z0-9]{0,4}"),
    iface=st.none() | words(r"[a-z]{2,4}[0-9]"),
    weight=st.none() | st.floats(0.001, 1e6) | st.just("auto"),
)


def alike(hosts: list[Host]) -> bool:
    """Whether their weights are all measured, or none."""
    return len({host.weight == "auto" for host in hosts if host.weight is not None}) < 2


def different(hosts: list[Host]) -> bool:
    """Whether no two of the hosts are one machine."""
    return not list(hosts_module._duplicates(list(enumerate(hosts))))


SAME = [
    ("a", "a", "a twice"),
    ("a", "A", "A twice"),
    ("a", "root@a", "a twice"),
    ("a", "a.", "neither a host name"),
    ("a", "a.site", "the same machine by two names"),
    ("A.site", "a", "the same machine by two names"),
    ("a.site", "A.Site port=2222", "A.Site twice"),
    ("10.0.0.1", "a addr=10.0.0.1", "the same address, 10.0.0.1"),
    ("a addr=10.0.0.1", "b addr=10.0.0.1", "the same address, 10.0.0.1"),
    ("2001:db8::1", "[2001:DB8:0:0::1]", "the same address"),
    ("b", "a addr=b", "the same address, b"),
    ("localhost", "127.0.0.1", "the same machine"),
    ("::1", "ip6-localhost", "the same machine"),
]


@pytest.mark.parametrize(("one", "two", "text"), SAME)
def test_one_machine_by_two_names(one: str, two: str, text: str) -> None:
    def line(word: str) -> str:
        name, _, fields = word.partition(" ")
        return f"{name} slots=1 {fields}\n"

    with pytest.raises(ConfigError) as caught:
        parse_hostfile(line("other") + line(one) + line(two), "f")
    assert text in caught.value.problems[-1].text
    assert caught.value.problems[-1].where == "f:3"


def test_names_that_only_look_alike_are_different_machines() -> None:
    lines = ["a.site1 slots=1", "a.site2 slots=1", "a1 slots=1", "10.0.0.1 slots=1", "10.0.0.11 slots=1"]
    lines += ["c1 slots=1 addr=10.0.0.9 port=2201", "c2 slots=1 addr=10.0.0.9 port=2202"]  # two containers
    assert len(parse_hostfile("\n".join(lines), "f")) == len(lines)


def test_many_hosts_are_read_at_once() -> None:
    started = time.process_time()
    hosts = parse_hostfile("node[0001-4096] slots=8\n", "f")
    assert (len(hosts), hosts[-1].name) == (4096, "node4096")
    assert time.process_time() - started < 2.0, "each line is compared with marks, not with every line"


PREFIX = st.from_regex(r"[a-z]{1,4}-?", fullmatch=True)


@given(
    st.lists(st.tuples(PREFIX, st.lists(st.integers(0, 120), max_size=5, unique=True), st.integers(1, 3)), min_size=1)
)
def test_lists_of_names_are_expanded(groups: list[tuple[str, list[int], int]]) -> None:
    pieces, names = [], []
    for prefix, numbers, width in groups:
        texts = [str(number).zfill(width) for number in numbers]
        pieces.append(f"{prefix}[{','.join(texts)}]" if texts else prefix)
        names += [prefix + text for text in texts] or [prefix]
    assert expand_list(",".join(pieces)) == names


def test_ranges() -> None:
    assert expand_list("gpu[01-03,07],login2") == ["gpu01", "gpu02", "gpu03", "gpu07", "login2"]
    assert expand_list("r[1-2]n[08,9]") == ["r1n08", "r1n9", "r2n08", "r2n9"]
    assert expand_list("n[9-11]-ib") == ["n9-ib", "n10-ib", "n11-ib"]
    for text in ("n[3-1]", "n[]", "n[a-b]", "n[1-2-3]", "n[-1]"):
        with pytest.raises(ValueError, match="range"):
            expand_list(text)


@given(st.lists(HOST, min_size=1, max_size=5).filter(different).filter(alike))
def test_rendered_hosts_read_back_the_same(hosts: list[Host]) -> None:
    text = render_hosts(hosts)
    assert parse_hostfile(text, "f") == tuple(hosts)
    assert parse_hostfile("\ufeff" + text.replace("\n", "  # note\r\n"), "f") == tuple(hosts)


@given(st.text(max_size=60))
def test_no_text_makes_the_parser_fail_otherwise(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "f")
    except ConfigError:
        return
    assert all(host.gpus for host in hosts)


def test_example_hostfiles_are_good() -> None:
    for path in sorted(hostfiles_dir().iterdir()):
        assert len(parse_hostfile(path.read_text(), path.name)) >= 2


POOL = tuple(Host(name=name, gpus=tuple(range(slots))) for name, slots in FILTERS["pool"].items())
FILTER_ERRORS = {
    "worker-1:7": "slot 7 of worker-1, which has 4 slots",
    "worker-1:-1": "slots of worker-1 are numbers with commas, not '-1'",
    "worker-1:0-2": "slots of worker-1 are numbers with commas, not '0-2'",
    "worker-1:": "slots of worker-1 are numbers with commas, not ''",
    "worker-9": "no host worker-9; known are worker-1, worker-2",
    "2001:db8::11:0": "no host 2001:db8::11:0",
    "worker-1@worker-2": "leaves no host",
    "worker-1:9": "slot 9 of worker-1, which has 4 slots",
    "worker-1": "exclude each other",
    "worker-1,worker-2": "hosts are separated by @",
    "worker-1@ worker-2": "no blanks",
}


@pytest.mark.parametrize("case", [c for c in FILTERS["cases"] if "num_gpus" not in c and "env" not in c], ids=str)
def test_filters(case: dict[str, Any]) -> None:
    include, exclude = case.get("include"), case.get("exclude")
    if isinstance(case["want"], dict):
        kept = filter_hosts(POOL, include, exclude)
        assert {host.name: list(host.gpus) for host in kept} == case["want"]
        return
    with pytest.raises(ConfigError) as caught:
        filter_hosts(POOL, include, exclude)
    assert FILTER_ERRORS[include or exclude] in caught.value.problems[0].text
    assert caught.value.problems[0].tries


@pytest.mark.parametrize("spec", ["worker-1,worker-2", "worker-1@ worker-2"])
def test_more_bad_filters(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        filter_hosts(POOL, spec, None)
    assert FILTER_ERRORS[spec] in caught.value.problems[0].text


@pytest.mark.parametrize(
    ("spec", "typed"),
    [
        ("WORKER-1", "worker-1"),
        ("worker-[1-2]", "worker-1@worker-2"),
        ("worker-*", "worker-1@worker-2"),
        ("worker-1:0-2", "worker-1:0,1,2"),
        ("worker-1:2-9", "worker-1:2,3"),
    ],
)
def test_a_bad_filter_is_shown_as_it_should_be(spec: str, typed: str) -> None:
    """F06."""
    with pytest.raises(ConfigError) as caught:
        filter_hosts(POOL, spec, None)
    (tried,) = caught.value.problems[0].tries
    assert tried in (f"cluster.include={typed}", f"'cluster.include=\"{typed}\"'")


def test_filters_match_with_and_without_user_and_for_ipv6() -> None:
    hosts = parse_hostfile("trainer@a slots=2\nroot@b slots=2\n2001:db8::11 slots=2\n", "f")
    for spec in ("a:1@b:0", "trainer@a:1@root@b:0"):
        assert [(h.name, h.gpus) for h in filter_hosts(hosts, spec, None)] == [("a", (1,)), ("b", (0,))]
    assert filter_hosts(hosts, "2001:db8::11:0", None) == (Host(name="2001:db8::11", gpus=(0,)),)
    assert [h.name for h in filter_hosts(hosts, None, "root@b@2001:db8::11")] == ["a"]


@pytest.fixture(scope="module")
def deepspeed_runner() -> ModuleType:
    """DeepSpeed's front end; importing it takes seconds, so only this file's contract test does."""
    return importlib.import_module("deepspeed.launcher.runner")


@given(tokens=st.sets(st.sampled_from(["worker-1:0", "worker-1:2", "worker-1", "worker-2:1", "worker-2"]), min_size=1))
def test_include_agrees_with_deepspeed_where_both_accept(deepspeed_runner: ModuleType, tokens: set[str]) -> None:
    # `h:0@h` keeps slot 0 for DeepSpeed; here naming the whole host wins, so such pairs are left out.
    whole = {t for t in tokens if ":" not in t}
    spec = "@".join(sorted(t for t in tokens if t in whole or t.partition(":")[0] not in whole))
    theirs = deepspeed_runner.parse_inclusion_exclusion({h.name: h.slots for h in POOL}, spec, "")
    assert {h.name: list(h.gpus) for h in filter_hosts(POOL, spec, None)} == dict(theirs)


def test_deepspeed_reads_the_examples_too(deepspeed_runner: ModuleType) -> None:
    """It takes a range for one name, and leaves out the fields behind slots; of `user@host` it keeps both."""
    for path in sorted(hostfiles_dir().glob("example*")):
        theirs = deepspeed_runner.fetch_hostfile(str(path))
        ours = parse_hostfile(path.read_text(), path.name)
        if path.name == "example_range":
            assert dict(theirs) == {"node[01-04]": 8} and len(ours) == 4
        else:
            assert {name.rpartition("@")[2]: count for name, count in theirs.items()} == {
                line.partition(" ")[0].rpartition("@")[2]: 8 for line in path.read_text().splitlines() if line[0] != "#"
            }
            assert [host.name for host in ours] == [name.rpartition("@")[2] for name in theirs]


def test_nodes_and_gpus() -> None:
    assert take_nodes(POOL, 1, "f") == POOL[:1]
    assert summary(limit_gpus(POOL, 2)) == "worker-1:2, worker-2:2"
    assert limit_gpus(POOL[:1], [2, 0])[0].gpus == (0, 2)
    with pytest.raises(ConfigError, match="nodes=3, but f has 2 hosts: worker-1, worker-2"):
        take_nodes(POOL, 3, "f")
    with pytest.raises(ConfigError, match="gpus=3, but worker-2 has 2 slots: 0,1"):
        limit_gpus(POOL, 3)
    with pytest.raises(ConfigError, match="gpus=5, but worker-2 has 2 slots: 0,1; too few also on worker-1") as caught:
        limit_gpus(POOL, 5)
    assert caught.value.problems[0].tries == ("gpus=2",)
