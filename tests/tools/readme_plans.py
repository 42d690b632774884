"""What both READMEs show of plans, as the planner says it now: a plan's text, and the table of what fits where.

python -m tests.tools.readme_plans          prints both
python -m tests.tools.readme_plans --write  puts them into README.md and README.zh-CN.md
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from launcher.errors import ConfigError
from launcher.planning.config import read_config
from launcher.planning.describe import describe
from launcher.planning.facts import Facts, TextFile
from launcher.planning.gpus import GIB
from launcher.planning.plan import make_plan
from launcher.resources import ds_configs_dir
from launcher.spec import RunConfig, RunPlan

REPO = Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", "README.zh-CN.md")
ROWS = 10_000  # of the data set of the plan that is shown
COMMAND = "model=qwen3_vl_reranker_8b zero=auto cluster.gpu=h200 nodes=1 gpus=2 dataset=jsonl dataset.train=train.jsonl"
SHOWN = ("Memory of one GPU", "Time of an average step", "Settings that were weighed", "The same run on other numbers")
MODELS = ("qwen3_vl_2b", "qwen3_vl_8b", "qwen3_vl_32b", "qwen2_5_vl_72b")
TUNES = ("qlora", "lora", "full")
KINDS = (("h200",), ("h100", "a100_80g"), ("rtx4090",))  # a plan is made for the first of each
HOSTS = 8  # of 8 GPUs: the plan tells of 1, 2, 4, 8 and 16 GPUs beside its own 64
NONE = "–"


@functools.cache
def plan_text() -> str:
    """Those parts of a plan's text that are about memory and time."""
    sections = describe(planned(read_config(COMMAND.split()).config)).split("\n\n")
    shown = [section for section in sections if section.startswith(SHOWN)]
    return f"$ python -m launcher plan {COMMAND}\n...\n" + "\n\n".join(shown) + "\n...\n"


@functools.cache
def fit_table() -> str:
    """The smallest number of GPUs of each kind, and the ZeRO setting there, for each model and tuning."""
    head = ["model", "tuning", *(", ".join(f"`{name}`" for name in kinds) for kinds in KINDS)]
    lines = [head, ["---"] * len(head), *_rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows() -> Iterator[list[str]]:
    for model in MODELS:
        for tune in TUNES:
            yield [f"`{model}`", f"`{tune}`", *(cell(model, tune, kinds[0]) for kinds in KINDS)]


def cell(model: str, tune: str, kind: str) -> str:
    """`2, stage3`: what the planner finds; a dash when the run fits on none of these numbers of GPUs."""
    config = _config(model, tune)
    try:
        plan = planned(replace(config, cluster=replace(config.cluster, gpu=kind)))
    except ConfigError:
        return NONE
    fits = next((scale for scale in plan.scaling if scale.fits), None)
    if fits is None:
        return NONE
    host = f" ({fits.host_bytes / GIB:,.0f} GiB of main memory)" if "offload" in fits.zero else ""
    return f"{fits.gpus}, `{fits.zero}`{host}"


@functools.cache
def _config(model: str, tune: str) -> RunConfig:
    words = [f"model={model}", f"tune={tune}", "zero=auto", "dataset=jsonl", "dataset.train=train.jsonl"]
    return read_config([*words, f"nodes={HOSTS}"]).config


def planned(config: RunConfig) -> RunPlan:
    """The plan on machines of which nothing is known but the kind of their GPUs."""
    paths = sorted(ds_configs_dir().glob("*.json"))
    facts = Facts(
        cwd="/",
        hostname="here",
        cpu_count=1,
        ram_bytes=None,
        disk_free_bytes=None,
        run_root="/runs",
        train_rows=ROWS,
        zero_files={path.name: TextFile(path=f"ds_configs/{path.name}", text=path.read_text()) for path in paths},
    )
    return make_plan(config, facts, now=datetime(2026, 1, 1, tzinfo=timezone.utc))


def written(page: str) -> str:
    """A README with what the planner says now."""
    for begin, text, end in (
        ("<!-- plan text -->\n```text\n", plan_text(), "```\n"),
        ("<!-- fit table -->\n", fit_table(), "<!-- end of fit table -->\n"),
    ):
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"the page has no {begin!r} with {end!r} behind it")
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for name in PAGES:
            path = REPO / name
            path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(plan_text(), fit_table(), sep="\n", end="")
