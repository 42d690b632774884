"""What is known of variables of NCCL, torch and their plugins: one row for each, as data.

Sources: "env" is NVIDIA's docs/userguide/source/env.rst of NCCL 2.30, others are named. A row's level is what the row
says, whatever wrote it: a measurement that finds otherwise changes the row and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.planning.nccl_rules import (
    ALGORITHMS,
    ERROR,
    NOTICE,
    PROTOCOLS,
    WARNING,
    Rule,
    Scene,
    above,
    both,
    fits_longer_names,
    forces_ll128,
    is_no_number,
    is_off,
    is_on,
    is_one_of,
    is_unreached,
    names_ll128,
    number,
    readmits_lo,
    unreadable,
    without_nvls,
    without_ring,
)
from launcher.planning.torch_table import TORCH_RULES

_FLAGS = (
    r"NCCL_(\w+_DISABLE|NVLS_ENABLE|CUMEM_ENABLE|CROSS_NIC|IB_(TC|SL|TIMEOUT|RETRY_CNT|GID_INDEX|QPS_PER_CONNECTION)"
    r"|SOCKET_NTHREADS|NSOCKS_PERTHREAD|BUFFSIZE|M(IN|AX)_(CTAS|NCHANNELS)|IB_PCI_RELAXED_ORDERING)"
)
_TREE = (
    "allows no ring for all-gather, reduce-scatter or broadcast, which ZeRO calls and trees cannot do: "
    "NCCL 2.24 and newer ends with `no algorithm/protocol available`"
)

RULES: tuple[Rule, ...] = (
    # The two variables of the article; levels by NVIDIA's issues 317, 1670 and 1709, to be set by measurement.
    Rule(
        name="NCCL_ALGO",
        level=ERROR,
        when=both(without_ring, lambda value, scene: scene.since(2, 24)),
        text=_TREE,
        instead="allreduce:tree",
        source="NVIDIA/nccl#1670",
    ),
    Rule(
        name="NCCL_PROTO",
        level=WARNING,
        when=lambda value, scene: not names_ll128(value, scene),
        text="keeps NCCL from choosing the protocol by the size of each message, which is meant for debugging only",
    ),
    # Algorithms, protocols, channels
    Rule(
        name="NCCL_ALGO",
        level=ERROR,
        when=unreadable(ALGORITHMS),
        text="is nothing that NCCL can read: FUNCTION:LIST;FUNCTION:LIST, out of " + ", ".join(ALGORITHMS),
        instead="allreduce:tree",
    ),
    Rule(
        name="NCCL_PROTO",
        level=ERROR,
        when=unreadable(PROTOCOLS),
        text="is nothing that NCCL can read: FUNCTION:LIST;FUNCTION:LIST, out of " + ", ".join(PROTOCOLS),
        instead="^LL128",
    ),
    Rule(
        name="NCCL_PROTO",
        level=ERROR,
        when=forces_ll128,
        text="forces LL128, which corrupts data where 128 bytes are not stored at once; NCCL takes it where it is safe",
    ),
    Rule(
        name="NCCL_PROTO",
        level=WARNING,
        when=lambda value, scene: names_ll128(value, scene) and not forces_ll128(value, scene),
        text="names LL128, which NCCL by itself takes only where it is safe: over PCIe it corrupts data",
        source="env; GCP's nccl-env-profile.sh sets it for GPUs on an NVSwitch",
    ),
    Rule(
        name="NCCL_ALGO",
        level=WARNING,
        when=both(without_nvls, lambda v, s: ":" not in v and s.nvlink is not False),
        text="turns off NVLS: all-reduce on 8 H200 falls from 482 to 368 GB/s",
        source="stas00/ml-engineering",
    ),
    Rule(
        name="NCCL_ALGO",
        level=NOTICE,
        when=both(without_nvls, lambda v, s: ":" in v and s.nvlink is not False),
        text="keeps all-reduce from NVLS, the fastest way between GPUs on an NVSwitch",
    ),
    Rule(
        name="NCCL_MIN_(NCHANNELS|NRINGS)",
        level=WARNING,
        text="was replaced in NCCL 2.17, and more channels take processors from the computation",
        instead="NCCL_MIN_CTAS={value}",
    ),
    Rule(
        name="NCCL_MAX_(NCHANNELS|NRINGS)",
        level=WARNING,
        text="was replaced in NCCL 2.17",
        instead="NCCL_MAX_CTAS={value}",
    ),
    Rule(name="NCCL_BUFFSIZE", level=NOTICE, text="takes memory of the GPU for each channel and peer; 4 MiB is usual"),
    Rule(name=_FLAGS, level=WARNING, when=is_no_number, text="is no number, so NCCL takes its default"),
    # GPU links
    Rule(
        name="NCCL_(P2P|SHM)_DISABLE",
        level=ERROR,
        when=lambda v, s: is_on(v, s) and s.nvlink is True,
        text="sends what NVLink would carry through host memory or the network",
    ),
    Rule(
        name="NCCL_(P2P|SHM)_DISABLE",
        level=WARNING,
        when=lambda v, s: is_on(v, s) and s.nvlink is not True,
        text="is for hosts where GPUs that talk directly hang or corrupt data; elsewhere it halves the speed or worse",
        source="NVIDIA/nccl#631",
    ),
    Rule(
        name="NCCL_NVLS_ENABLE",
        level=WARNING,
        when=both(is_off, lambda v, s: s.since(2, 18, 5)),
        text="is an old workaround that costs a quarter of all-reduce on an NVSwitch; mend the Fabric Manager",
    ),
    Rule(
        name="NCCL_(P2P_LEVEL|NET_GDR_LEVEL)",
        level=WARNING,
        when=lambda v, s: number(v) is not None,
        text="is a number whose meaning has changed between versions",
        instead="PHB",
    ),
    # Network
    Rule(
        name="NCCL_IB_DISABLE",
        level=ERROR,
        when=lambda v, s: is_on(v, s) and s.hosts > 1 and s.rdma is True and not s.efa,
        text="turns off the InfiniBand or RoCE cards that are active on the hosts: 2 to 10 times slower over TCP",
    ),
    Rule(
        name="NCCL_IB_DISABLE",
        level=WARNING,
        when=lambda v, s: is_on(v, s) and s.hosts > 1 and s.rdma is None,
        text="turns off InfiniBand and RoCE: right only where no RDMA card is for data",
        instead="0",
    ),
    Rule(
        name="NCCL_NET",
        level=ERROR,
        when=lambda v, s: v.lower() == "socket" and s.hosts > 1 and s.rdma is True,
        text="leaves the active RDMA cards unused; nccl=tcp says the same on purpose",
    ),
    Rule(
        name="NCCL_NET",
        level=WARNING,
        when=lambda v, s: v.lower() == "socket" and s.hosts > 1 and s.rdma is None,
        text="leaves RDMA cards unused; nccl=tcp says the same on purpose",
    ),
    Rule(name="(NCCL|GLOO)_SOCKET_IFNAME", level=ERROR, when=is_unreached, text="names what no other host reaches"),
    Rule(
        name="NCCL_SOCKET_IFNAME",
        level=WARNING,
        when=readmits_lo,
        text="excludes some interfaces and so lets NCCL take lo, which it leaves out by itself",
        instead="{value},lo",
        source="horovod/horovod#700",
    ),
    Rule(
        name="GLOO_SOCKET_IFNAME",
        level=ERROR,
        when=lambda v, s: v[:1] in ("=", "^"),
        text="has a mark that only NCCL reads: gloo takes plain names",
        source="torch",
    ),
    Rule(
        name="NCCL_SOCKET_IFNAME",
        level=WARNING,
        when=fits_longer_names("interfaces"),
        text="also fits longer names that are there",
        instead="={value}",
    ),
    Rule(
        name="NCCL_IB_HCA",
        level=WARNING,
        when=fits_longer_names("devices"),
        text="also fits longer names that are there",
        instead="={value}",
    ),
    Rule(
        name="NCCL_IB_TIMEOUT",
        level=WARNING,
        when=lambda v, s: number(v) == 0 or (number(v) or 0) >= 32,
        text="waits for ever on a link that is dead; 20 is usual",
    ),
    Rule(
        name="NCCL_IB_TIMEOUT",
        level=WARNING,
        when=lambda v, s: 22 <= (number(v) or 0) < 32,
        text="notices a dead link only after 2 minutes or more; 20, which is usual, takes half a minute",
    ),
    Rule(name="NCCL_IB_RETRY_CNT", level=WARNING, when=above(7), text="is above 7, the most there is", instead="7"),
    Rule(
        name="NCCL_IB_GID_INDEX",
        level=WARNING,
        when=lambda v, s: s.since(2, 21) and number(v) not in (None, -1.0),
        text="is not needed since NCCL 2.21, which finds the address itself; the index may change with a restart",
        source="NVIDIA/nccl#1333",
    ),
    Rule(name="NCCL_IB_SPLIT_DATA_ON_QPS", level=NOTICE, when=is_on, text="cuts each message over all queue pairs"),
    Rule(
        name="NCCL_SOCKET_(RETRY_CNT)",
        level=WARNING,
        when=above(48),
        text="waits more than 2 minutes for a host that does not answer: the wait grows with the square",
        instead="34",
    ),
    Rule(
        name="(FI_PROVIDER|FI_EFA_USE_DEVICE_RDMA|FI_EFA_FORK_SAFE|RDMAV_FORK_SAFE)",
        level=NOTICE,
        text="is not needed with aws-ofi-nccl above 1.5, which sets what an instance needs",
        source="aws/aws-ofi-nccl doc/efa-env-var.md",
    ),
    # Removed and renamed
    Rule(
        name="NCCL_(TREE_THRESHOLD|LL_THRESHOLD|SINGLE_RING_THRESHOLD)",
        level=NOTICE,
        text="was removed from NCCL years ago and does nothing",
    ),
    Rule(
        name="NCCL_IB_(CUDA_SUPPORT|GDR_LEVEL)",
        level=NOTICE,
        text="was renamed years ago and does nothing",
        instead="NCCL_NET_GDR_LEVEL=PHB",
    ),
    Rule(
        name="NCCL_CHECKS_DISABLE", level=NOTICE, text="was replaced and does nothing", instead="NCCL_CHECK_POINTERS=0"
    ),
    Rule(name="NCCL_LAUNCH_MODE", level=NOTICE, text="is deprecated"),
    # Logs
    Rule(
        name="NCCL_DEBUG",
        level=NOTICE,
        when=is_one_of("info", "trace", "abort"),
        text="fills the log of each rank and slows the start; nccl=debug for a short run",
        instead="WARN",
    ),
    *TORCH_RULES,
)

# NCCL from, before -> what is wrong with it.
VERSIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = (
    (
        (2, 27, 0),
        (2, 28, 9),
        "falls back without a word where NVLS fails on some ranks, and may hang; 2.28.9 is the first without it",
    ),
)


def rules_for(name: str, value: str, scene: Scene) -> Iterator[Rule]:
    """The rows that hold for one variable, the gravest first; of one text once."""
    held = [rule for rule in RULES if re.fullmatch(rule.name, name) and rule.when(value, scene)]
    yield from sorted(held, key=lambda rule: (ERROR, WARNING, NOTICE).index(rule.level))
