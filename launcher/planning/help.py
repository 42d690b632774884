"""What the launcher says about itself: the help screen and the listing of groups and keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import ConfigError, Problem
from launcher.planning import keys

VERBS = (
    *("run", "plan", "config", "check", "fetch", "status", "logs", "stop", "resume", "report"),
    *("evaluate", "score", "export", "env", "help"),
)

HELP = """\
Fine-tune a Qwen-VL model with DeepSpeed, from one command.

  python -m launcher [run] GROUP=OPTION GROUP.KEY=VALUE ...   plan, check, start and watch a run
  python -m launcher plan ...          what that run would be, without starting anything; --json for programs
  python -m launcher -m KEY=A,B ...    a sweep: one run for each combination of values; plan -m shows them
  python -m launcher check data|hosts|speed  read every row (--show 3 of them); compare hosts; time these GPUs
  python -m launcher fetch ...         put weights and data onto the hosts' disks; a run does so itself
  python -m launcher config [GROUP]    groups, options and keys, what they mean; --config-dir FOLDER adds your own
  python -m launcher status [RUN]      how a run is doing; without RUN, all runs here; RUN may be `latest`
  python -m launcher logs RUN          what its ranks printed; -f follows, --errors, --host H, --rank N
  python -m launcher stop RUN          finish the step, save, end
  python -m launcher resume RUN ...    go on from its last checkpoint
  python -m launcher report [RUN ...]  report.html: plots and tables of a run; of several compare.html; --open
  python -m launcher evaluate [RUN]    a run, checkpoint or export on held-out rows; --golden checks a server of it
  python -m launcher score FILE        P(yes) of each document of a file's rows, with --model RUN
  python -m launcher export [RUN]      a checkpoint as a folder that loads elsewhere; --adapter, --push
  python -m launcher env               versions and machine, for a bug report

Examples
  python -m launcher                                          a small demo on handwritten digits, minutes on a CPU
  python -m launcher plan model=qwen3_vl_reranker_8b zero=stage3 nodes=2
  python -m launcher model=qwen3_vl_reranker_8b dataset=jsonl dataset.train=train.jsonl dataset.eval=eval.jsonl

Groups (* when none is named)
{groups}

Often typed
  nodes=2  gpus=4  gpus=[0,1]        which machines and GPUs; cluster.hostfile=FILE names the hosts
  cluster.transport=slurm            how they are reached: ssh, slurm, env (one command on every node), manual, pdsh
  train.epochs=3  train.max_steps=500  batch.global_size=32   (queries an optimizer step, over all GPUs)
  run.dir=FOLDER  --detach           where the run lives (nothing is overwritten); it goes on without this terminal
  resume=RUN  restart.max=2          goes on from a run folder or a checkpoint; after failures, so many times
  'logging.trackers=[wandb]'         metrics to wandb, mlflow or swanlab too; profile=torch looks at a few steps

Values: null is nothing, [a,b] a list; text with a comma is typed 'key="a, b"'. In zsh, quote words with [ ].
Exit codes: 0 done, 1 internal error, 2 change the configuration or data, 3 fix a machine, 4 training failed,
  75 try again (host or network lost, hang), 130 Ctrl-C and 143 SIGTERM, both saved if training had begun.
"""

WIDEST_KEY = 60  # columns, beside which a comment still has room
ARCH = "model.arch"  # a model's config.json: dozens of values that few want to see
_KEY = re.compile(r"(?P<indent> *)(?P<key>[\w]+):(?: +(?P<value>[^#\s][^#]*?))?(?:\s+# (?P<comment>.*))?$")


def help_text(folders: Sequence[Path]) -> str:
    """The help screen, at most one page."""
    lines = []
    for group, names in keys.options(folders).items():
        usual = keys.default_options().get(group)
        shown = " ".join(f"{name}*" if name == usual else name for name in names)
        lines += _wrapped(f"  {group:<11}", shown)
    return HELP.format(groups="\n".join(lines))


def config_text(folders: Sequence[Path], group: str | None) -> str:
    """Keys, defaults and comments of one group's options, or the table of contents.

    Raises ConfigError for an unknown group.
    """
    if group is None:
        return (folders[0] / "config.yaml").read_text(encoding="utf-8")
    options = keys.options(folders)
    name = group.split(".")[0].split("=")[0]
    if name in keys.SECTIONS or name in keys.kinds():
        lines = [line for line in _keys_of(folders[0] / "config.yaml", "") if line.startswith(f"  {name}")]
        return "\n".join(re.sub(r"\s+->", "  ->", line) for line in lines) + "\n"
    if name not in options:
        near = keys.nearest(name, options) or next(iter(keys.meant_keys(group)), "").split(".")[0]
        tries = (f"python -m launcher config {near}",) if near else ("python -m launcher config",)
        raise ConfigError(Problem(f"there is no group {group}; there are {', '.join(options)}", tries=tries))
    return "\n\n".join(_option_text(folders, name, option, group) for option in options[name]) + "\n"


def _option_text(folders: Sequence[Path], group: str, option: str, asked: str) -> str:
    """One option's comment and keys; what lies inside `model.arch` only when it is asked for."""
    file = keys.option_file(folders, group, option)
    assert file is not None
    text = file.read_text(encoding="utf-8").splitlines()
    about = [
        re.sub(r"\s+->", "  ->", line.lstrip("# ")) for line in _heading(text) if not line.startswith("# @package")
    ]
    usual = "   (when none is named)" if option == keys.default_options().get(group) else ""
    prefix = "" if group == keys.EXPERIMENT else f"{group}."
    listed = list(_keys_of(file, prefix))
    if not asked.startswith(ARCH):
        inside = sum(line.startswith(f"  {ARCH}.") for line in listed)
        listed = [line for line in listed if not line.startswith(f"  {ARCH}.")]
        listed += [f"  {ARCH}.*{'':26}  {inside} values: python -m launcher config {ARCH}"] if inside else []
    return "\n".join([f"{group}={option}{usual}", *(f"  {line}" for line in about), *listed])


def _heading(text: Sequence[str]) -> Iterator[str]:
    for line in text:
        if not line.startswith("#"):
            return
        yield line


def _keys_of(file: Path, prefix: str) -> Iterator[str]:
    """Lines `key = value  comment` of a file in the style of conf/: one key a line, its comment beside or above it."""
    above: list[str] = []
    path: list[tuple[int, str]] = []  # (indent, key) of the mappings we are in
    started = in_defaults = False
    text = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(text):
        if line.startswith("#"):
            above.append(line.lstrip("# ")) if started else None
            continue
        chosen = re.match(r"  - override /(\w+): (\w+)$", line)
        if chosen:
            yield f"  {chosen[1]} = {chosen[2]}"
        found = _KEY.match(line)
        if not found or (in_defaults and line.startswith(" ")):
            above = []
            continue
        started, in_defaults = True, found["key"] == "defaults"
        indent = len(found["indent"])
        path = [(i, key) for i, key in path if i < indent]
        full = prefix + ".".join([*(key for _, key in path), found["key"]])
        path.append((indent, found["key"]))
        comment = " ".join([found["comment"], *_more(text[number + 1 :])]) if found["comment"] else " ".join(above)
        above = []
        if not in_defaults and found["value"] is not None:
            yield _commented(full + " = " + found["value"].strip(), comment)
        elif not in_defaults and comment:
            listed = "".join(f"\n    {row}" for row in _list_below(text[number + 1 :]))
            yield _commented(full, comment) + listed


def _more(lines: Sequence[str]) -> Iterator[str]:
    """Further lines of the comment beside a key: nothing but a comment, and not at the margin."""
    for line in lines:
        if not line.lstrip().startswith("#") or line.startswith("#"):
            return
        yield line.lstrip("# ")


def _commented(key: str, comment: str) -> str:
    head = f"  {key:<38}  "
    return "\n".join(_wrapped(head, comment)) if comment and len(head) < WIDEST_KEY else f"{head}{comment}".rstrip()


def _list_below(lines: Sequence[str]) -> list[str]:
    """The lines of a list that begins below its key, without quotes; none where no list does."""
    if not lines or not lines[0].lstrip().startswith("["):
        return []
    end = next(number for number, line in enumerate(lines) if line.rstrip().endswith("]"))
    return [line.strip().replace('"', "") for line in lines[: end + 1]]


def _wrapped(head: str, text: str, width: int = 118) -> list[str]:
    import textwrap

    return textwrap.wrap(head + text, width, subsequent_indent=" " * len(head), break_on_hyphens=False)
