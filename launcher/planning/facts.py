"""What is known about machines, files and earlier runs when a plan is made: a value, gathered elsewhere.

`launcher.running.facts.gather_facts` fills it; golden tests write it down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import Problem
from launcher.planning.fabric import Fabric


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file that was read, and how a person calls it."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalGpu:
    """One GPU of this machine; unknown numbers are None."""

    index: int
    name: str
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None  # CUDA compute capability


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """The checkpoint that `resume=` names."""

    checkpoint: str  # absolute
    run_dir: str  # absolute, of the run that saved it
    state: dict[str, Any]  # its state.json
    exported: bool = True  # that run has its export


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything outside the configuration that a plan depends on."""

    cwd: str
    environ: Mapping[str, str] = field(default_factory=dict)  # of the launching shell
    hostname: str = "localhost"
    addresses: tuple[str, ...] = ()  # of this machine, among those that the hostfile names
    hostfile: TextFile | None = None  # cluster.hostfile, else hostfiles/default of the working folder
    gpus: tuple[LocalGpu, ...] = ()  # those that CUDA_VISIBLE_DEVICES allows
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES when it is set
    fabric: Fabric | None = None  # of this machine; None where other hosts run the ranks, or there is no GPU
    cpu_count: int = 1
    ram_bytes: int | None = None
    disk_free_bytes: int | None = None  # where the run folder will be
    run_root: str = "runs"  # absolute
    taken: tuple[str, ...] = ()  # names in run_root
    run_dir_used: bool = False  # the folder that run.dir or run.name names exists and is not empty
    run_dir_saved: bool = False  # and holds a whole checkpoint to resume from
    train_rows: int | None = None
    eval_rows: int | None = None
    data_elsewhere: tuple[str, ...] = ()  # names of a hub's data sets that are not on this machine
    prepared: Mapping[str, Any] = field(default_factory=dict)  # launcher.prepared.read_summary: split -> what it holds
    measured: tuple[Mapping[str, Any], ...] = ()  # launcher.measured.read_speeds: what `check speed` found
    arch: dict[str, Any] | None = None  # config.json of model.path
    lacking: str | None = None  # what to install here for the attention kernel that is asked for
    lacks_bits: bool = False  # bitsandbytes is not installed here, and the run needs it
    weights_on_disk: bool = False  # safetensors in model.path, or the repo in the Hugging Face cache
    zero_file: TextFile | None = None  # ds_configs/NAME.json of zero=NAME; None where zero=auto is to choose
    zero_files: Mapping[str, TextFile] = field(default_factory=dict)  # all of ds_configs/, by file name
    zero_config: TextFile | None = None  # the user's own DeepSpeed JSON
    env_file: TextFile | None = None
    resume: Resume | None = None
    problems: tuple[Problem, ...] = field(default=())  # found while gathering: missing, unreadable, empty
