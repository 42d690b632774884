"""Look at this machine, the files and the earlier run that a configuration names; decide nothing.

What cannot be read becomes a problem in the result, so that a plan reports it with everything else.
"""

from __future__ import annotations

import difflib
import errno
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher import datafiles
from launcher.attention_needs import missing
from launcher.errors import ConfigError, Problem
from launcher.hubs import hf_cache, local_folder
from launcher.measured import read_speeds
from launcher.planning import grammar
from launcher.planning.fabric import Fabric
from launcher.planning.facts import Facts, LocalGpu, Resume, TextFile
from launcher.prepared import read_summary
from launcher.resources import ds_configs_dir, hostfiles_dir
from launcher.rundir import RunDir, complete_checkpoints, resolve_resume
from launcher.spec import MISSING, RunConfig
from launcher.weightheaders import damage

AUTO = "auto"
DEFAULT_HOSTFILE = Path("hostfiles/default")
# The demo's rows; `launcher.training.digits` makes them, and a test holds the two equal.
ADAPTER = "adapter_config.json"
DIGITS_ROWS = {"train": 6400, "eval": 256}
NVIDIA_SMI = "nvidia-smi --query-gpu=index,uuid,name,memory.total,compute_cap --format=csv,noheader,nounits"
NO_DEVICE = ("-1", "NoDevFiles")  # how GPUs are hidden; the second is Slurm's
PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def gather_facts(config: RunConfig, cwd: Path | None = None) -> Facts:
    """Everything outside `config` that its plan depends on. Reads files and asks `nvidia-smi`; changes nothing."""
    return _Gatherer(config, Path.cwd() if cwd is None else cwd).gather()


def zero_files() -> dict[str, TextFile]:
    """What zero=auto chooses from: the readable files of ds_configs/, by name."""
    found = {}
    for path in sorted(ds_configs_dir().glob("*.json")):
        try:
            found[path.name] = TextFile(path=f"ds_configs/{path.name}", text=path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue  # a problem once it is named
    return found


class _Gatherer:
    """Collects problems while it reads."""

    def __init__(self, config: RunConfig, cwd: Path) -> None:
        self.config = config
        self.cwd = cwd
        self.problems: list[Problem] = []

    def gather(self) -> Facts:
        """All facts; what failed is in `problems`."""
        config, root = self.config, self.cwd / self.config.run.root
        resume = self._resume()
        gpus, hostfile = self._gpus(), self._hostfile()
        self._adapter()
        data = config.dataset
        digits = data.format == "digits" or data.name == "digits"
        named = Path(config.run.dir) if config.run.dir else root / config.run.name if config.run.name else None
        folder = named or (Path(resume.run_dir) if resume else root)
        return Facts(
            cwd=str(self.cwd),
            environ=dict(os.environ),
            hostname=socket.gethostname(),
            addresses=_own_addresses(hostfile.text) if hostfile else (),
            hostfile=hostfile,
            gpus=gpus,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            fabric=self._fabric(gpus, hostfile),
            cpu_count=cpu_count(),
            ram_bytes=ram_bytes(),
            disk_free_bytes=self._disk(self.cwd / folder),
            run_root=str(root),
            taken=_listed(root),
            run_dir_used=named is not None and _is_used(self.cwd / named),
            run_dir_saved=named is not None and bool(complete_checkpoints(RunDir(self.cwd / named))),
            train_rows=DIGITS_ROWS["train"] if digits else self._rows("train"),
            eval_rows=DIGITS_ROWS["eval"] if digits else self._rows("eval"),
            data_elsewhere=tuple(
                name for name in datafiles.hub_names(data) if local_folder(name, data.source, "datasets") is None
            ),
            prepared=self._prepared(),
            measured=tuple(read_speeds()),
            arch=self._arch(),
            lacking=missing(config.attention.name) if self._own_python() else None,
            lacks_bits=bool(config.few_bits) and self._own_python() and find_spec("bitsandbytes") is None,
            weights_on_disk=self._weights(),
            zero_file=self._zero_file(),
            zero_files=zero_files(),
            zero_config=self._text("zero.config", config.zero.config),
            env_file=self._text("env.file", config.env.file),
            resume=resume,
            problems=tuple(self.problems),
        )

    def _problem(self, text: str, *tries: str) -> None:
        self.problems.append(Problem(text, "", tries))

    def _named(self, key: str, name: str | Path) -> str:
        """KEY=VALUE as typed, and the whole path where that is not the same."""
        path = self.cwd / name
        return f"{key}={name}" if str(path) == str(name) else f"{key}={name} ({path})"

    def _shown(self, path: Path) -> str:
        """The path as a person would type it here."""
        return str(path.relative_to(self.cwd)) if path.is_relative_to(self.cwd) else str(path)

    def _text(self, key: str, name: str | Path | None, shown: str | None = None) -> TextFile | None:
        if name is None:
            return None
        path = self.cwd / name
        try:
            return TextFile(path=shown or self._shown(path), text=path.read_bytes().decode())
        except UnicodeDecodeError as error:
            self._problem(f"{self._named(key, name)}: byte {error.start} is not UTF-8", "save the file as UTF-8")
        except OSError as error:
            self._problem(f"{self._named(key, name)}: {_reason(error)}", self._near(key, name))
        return None

    def _near(self, key: str, name: str | Path) -> str:
        """KEY=FILE with a file beside, of nearly that name, where there is one."""
        path = Path(name)
        beside = [one for one in _listed(self.cwd / path.parent) if os.path.isfile(self.cwd / path.parent / one)]
        near = difflib.get_close_matches(path.name, set(beside) - {path.name}, n=1, cutoff=0.8)
        return grammar.shell(f"{key}={grammar.as_typed(str(path.with_name(near[0])))}") if near else f"{key}=FILE"

    def _zero_file(self) -> TextFile | None:
        zero = self.config.zero
        if zero.name == AUTO:
            return None
        return self._text("zero.file", ds_configs_dir() / zero.file, f"ds_configs/{zero.file}")

    def _hostfile(self) -> TextFile | None:
        name = self.config.cluster.hostfile
        if name is not None:
            shipped = hostfiles_dir() / Path(name).name
            if Path(name).parent.name == "hostfiles" and not os.path.exists(self.cwd / name) and shipped.is_file():
                name = str(shipped)  # the examples of an installed package, from any folder
            return self._text("cluster.hostfile", name)
        found = os.path.isfile(self.cwd / DEFAULT_HOSTFILE)
        return self._text("cluster.hostfile", DEFAULT_HOSTFILE) if found else None

    def _rows(self, split: str) -> int | None:
        """Rows of a split where they are quickly counted; what is in them, `check data` reads."""
        data = self.config.dataset
        divided = datafiles.is_divided(data)
        if divided and split == "eval":
            return None
        key = "dataset.eval" if split == "eval" and data.eval is not None else "dataset.train"
        found = [self._rows_of(key, split, name) for name in datafiles.sources_of(data, split)]
        return None if divided or not found or None in found else sum(filter(None, found))

    def _rows_of(self, key: str, split: str, name: str) -> int | None:
        data, hub = self.config.dataset, datafiles.is_hub_name(name)
        if not hub:
            try:
                os.stat(self.cwd / name)
                if os.path.isfile(self.cwd / name):
                    open(self.cwd / name, "rb").close()
            except OSError as error:
                self._problem(f"{self._named(key, name)}: {_reason(error)}", self._near(key, name))
                return None
        elif local_folder(name, data.source, "datasets") is None:
            return None  # fetched before ranks start
        try:
            rows = datafiles.count_rows(datafiles.files_of(data, name if hub else str(self.cwd / name), split))
        except ConfigError as error:
            self.problems.extend(error.problems)
            return None
        except OSError as error:
            self._problem(f"{self._named(key, name)}: {_reason(error)}", f"{key}=FILE")
            return None
        if rows == 0:
            self._problem(f"{self._named(key, name)} has no rows", f"{key}=FILE with one JSON object a line")
            return None
        return rows

    def _prepared(self) -> dict[str, Any]:
        """What is known of rows that were prepared before; files that cannot be read are problems already."""
        try:
            return read_summary(self.config)
        except OSError:
            return {}

    def _arch(self) -> dict[str, Any] | None:
        folder = self.config.model.path
        if folder is None or folder == MISSING:
            return None
        path = self.cwd / folder
        if not os.path.isdir(path):
            what = "not a folder" if os.path.exists(path) else "no such folder"
            self._problem(f"{self._named('model.path', folder)}: {what}", "model.path=FOLDER with config.json")
            return None
        text = self._text("model.path", path / "config.json")
        if text is None:
            return None
        try:
            arch = json.loads(text.text)
        except json.JSONDecodeError as error:
            self._problem(f"{text.path}:{error.lineno}: {error.msg}", "model.path=FOLDER with a whole config.json")
            return None
        if not isinstance(arch, dict):
            self._problem(f"{text.path} holds no JSON object", "model.path=FOLDER with a whole config.json")
            return None
        return arch

    def _adapter(self) -> None:
        """Note that model.adapter is no folder of an adapter; what it holds, the ranks look at."""
        folder = self.config.model.adapter
        if folder is None or self.config.resume is not None:  # a checkpoint has the weights that it began with
            return
        if not os.path.isfile(self.cwd / folder / ADAPTER):
            text = f"{self._named('model.adapter', folder)}: no {ADAPTER} in it"
            self._problem(text, "model.adapter=FOLDER as peft, or export RUN --adapter, writes it")

    def _own_python(self) -> bool:
        """Whether ranks run by this interpreter, whose packages are seen; others are asked before ranks start."""
        cluster = self.config.cluster
        return not (cluster.python or cluster.activate or cluster.wrap)

    def _weights(self) -> bool:
        model = self.config.model
        if model.path is not None:
            folder = self.cwd / model.path
            found = any(name.endswith(".safetensors") for name in _listed(folder))
            if os.path.isdir(folder) and not found and model.weights == "pretrained":
                self._problem(
                    f"{self._named('model.path', model.path)}: no *.safetensors in it", "model.weights=random"
                )
            if found and model.weights == "pretrained":
                self._shards(model.path)
                if (damaged := damage(folder)) is not None:
                    self._problem(str(damaged), "copy or download that file again")
            return found
        if model.repo is None:
            return False
        if model.source == "modelscope":
            return local_folder(model.repo, model.source, "models") is not None
        cached = hf_cache() / f"models--{model.repo.replace('/', '--')}" / "snapshots"
        return any(cached.glob("*/*.safetensors"))

    def _shards(self, name: str) -> None:
        """Note which of the files that the weights' index names are not there."""
        folder = self.cwd / name
        try:
            files = set(json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"].values())
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._problem(f"{folder}/model.safetensors.index.json cannot be read", "model.path=FOLDER")
            return
        missing = sorted(files - set(_listed(folder)))
        if missing:
            text = f"{self._named('model.path', name)} lacks {len(missing)} of {len(files)} weight files: {missing[0]}"
            self._problem(text, "model.path=FOLDER with all of its weight files")

    def _disk(self, folder: Path) -> int | None:
        # os.path says False, where Path raises, for what lies in a folder that must not be entered.
        existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
            why = "no permission to write in it" if os.path.isdir(existing) else "it is not a folder"
            self._problem(f"the run folder cannot be made in {existing}: {why}", "run.root=FOLDER")
            return None
        return shutil.disk_usage(existing).free

    def _resume(self) -> Resume | None:
        if self.config.resume is None:
            return None
        try:
            checkpoint, state = resolve_resume((self.cwd / self.config.resume).resolve())
        except ConfigError as error:
            self.problems.extend(error.problems)
            return None
        run = RunDir(checkpoint.parent.parent)
        exported = run.export.is_dir()
        return Resume(checkpoint=str(checkpoint), run_dir=str(run.path), state=state, exported=exported)

    def _gpus(self) -> tuple[LocalGpu, ...]:
        """GPUs that this process may use."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = {} if os.environ.get("DS_ACCELERATOR") == "cpu" else _local_gpus()
        if visible is None or not found:
            return tuple(found.values())
        chosen: list[LocalGpu] = []
        for word in filter(None, (word.strip() for word in visible.split(","))):
            if word in NO_DEVICE:
                break  # as CUDA does: it and all behind it name nothing
            match = [gpu for uuid, gpu in found.items() if word == str(gpu.index) or _is_uuid_of(word, uuid)]
            if len(match) == 1 and match[0] not in chosen:
                chosen.append(match[0])
            else:
                self._not_a_gpu(visible, word, [gpu.index for gpu in found.values()], twice=len(match) == 1)
        return tuple(chosen)

    def _fabric(self, gpus: tuple[LocalGpu, ...], hostfile: TextFile | None) -> Fabric | None:
        """How this machine's GPUs are linked, where the run is on them; other hosts are asked when it starts."""
        config = self.config
        local = hostfile is None and config.nodes in (None, 1) and config.cluster.transport in ("auto", "local")
        if not gpus or not local:
            return None
        from launcher.running.fabric import local_fabric  # a machine without GPUs need not load it

        return local_fabric(os.environ, str(self.cwd))

    def _not_a_gpu(self, visible: str, word: str, known: list[int], *, twice: bool) -> None:
        text = f"CUDA_VISIBLE_DEVICES={visible}: "
        if word.startswith("MIG-"):
            text += f"{word} is a part of a GPU, and DeepSpeed gives ranks whole ones by number"
        elif twice:
            text += f"{word} is named twice"
        else:
            text += f"{word} is none of this machine's GPUs, {', '.join(map(str, known))}"
        self._problem(text, f"CUDA_VISIBLE_DEVICES={known[0]}", "unset CUDA_VISIBLE_DEVICES")


def _local_gpus() -> dict[str, LocalGpu]:
    """UUID -> GPU of this machine, from `nvidia-smi`, else from the driver's files; nothing without a driver."""
    try:
        listed = subprocess.run(NVIDIA_SMI.split(), capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return _driver_gpus()
    gpus: dict[str, LocalGpu] = {}
    for line in listed.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 5:  # "No devices were found", or that one of them has failed
            continue
        index, uuid, name, memory, capability = words
        major, _, minor = capability.partition(".")
        gpus[uuid] = LocalGpu(
            index=int(index),
            name=name,
            memory_bytes=int(memory) * 2**20 if memory.isdigit() else None,
            capability=(int(major), int(minor)) if major.isdigit() and minor.isdigit() else None,
        )
    return gpus


def _driver_gpus() -> dict[str, LocalGpu]:
    gpus: dict[str, LocalGpu] = {}
    for path in PROC_GPUS.glob("*/information"):
        text = path.read_text()
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*)$", text, re.MULTILINE))
        index = int(fields.get("Device Minor", len(gpus)))
        gpus[fields.get("GPU UUID", str(path))] = LocalGpu(index=index, name=fields.get("Model", "NVIDIA GPU"))
    return dict(sorted(gpus.items(), key=lambda item: item[1].index))


def _own_addresses(hostfile: str) -> tuple[str, ...]:
    """Addresses in a hostfile that are this machine's: only those can be bound. No name is looked up."""
    own = []
    for word in dict.fromkeys(re.split(r"[\s=@\[\]]+", hostfile)):
        try:
            version = ipaddress.ip_address(word).version
            with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
                probe.bind((word, 0))
        except (ValueError, OSError):
            continue
        own.append(word)
    return tuple(own)


def _is_uuid_of(word: str, uuid: str) -> bool:
    """CUDA takes any beginning of a UUID that is long enough to be the only one."""
    return word.startswith("GPU-") and len(word) > 4 and uuid.startswith(word)


def cpu_count() -> int:
    """Cores that this process may use; a container often may use fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ram_bytes() -> int | None:
    """Main memory of this machine; None where it is not told."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _is_used(folder: Path) -> bool:
    return os.path.exists(folder) and (not os.path.isdir(folder) or bool({*_listed(folder)} - {"slurm"}))


def _listed(folder: Path) -> tuple[str, ...]:
    """Names in a folder, none when it cannot be read."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _reason(error: OSError) -> str:
    known = {
        errno.ENOENT: "no such file",
        errno.EISDIR: "a folder, not a file",
        errno.EACCES: "no permission to read it",
    }
    return known.get(error.errno or 0, error.strerror or str(error))
