"""What the READMEs show of the launcher against ms-swift: a picture and a table, from tests/bench/against_peer.py.

    cp FOLDER/outcomes.jsonl tests/bench/against_peer_h200.jsonl
    python -m tests.bench.peer_picture

writes against_peer.svg beside that file, and the blocks of README.md and README.zh-CN.md. Of the peer its fastest run
is shown, of ours the last one; work that only one side did is left out. Nothing is written when losses differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peer import Setting, read_setting
from tests.bench.peer_drawing import drawn
from tests.bench.peer_runs import Outcome
from tests.bench.peer_table import LIMIT_TFLOPS, least, parity
from tests.bench.speed_runs import LOADS
from tests.bench.steady import steady

REPO = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("against_peer_h200.jsonl")
PICTURE = Path(__file__).with_name("against_peer.svg")
BEGIN, END = "<!-- against the peer -->\n", "<!-- end of against the peer -->\n"


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a page says in its language."""

    work: dict[str, str]
    heads: tuple[str, ...]
    nothing: str  # recomputed
    everything: str
    adapters: str
    micro: str
    alt: str
    note: str
    ours: str
    stop: str  # between parts of a setting


ENGLISH = Words(
    work={
        "text": "text query, 8 text documents",
        "page": "text query, 4 page images",
        "imgq": "image query, 8 text documents",
        "chat": "chat of about 3,950 tokens",
    },
    heads=(
        *("a row", "ms-swift, its fastest setting", "s a row: ms-swift, here", "times as fast"),
        *("of the limit", "GiB", "first loss"),
    ),
    nothing="nothing recomputed",
    everything="all recomputed",
    adapters="adapters in bf16",
    micro="{} a micro-batch",
    alt="Rows trained a second, ms-swift and launcher",
    note=(
        "One H200, Qwen3-VL-Reranker-8B with LoRA of rank 8, listwise loss (chats: cross-entropy on the answers).\n"
        "Both sides ran in one go, on the same random weights and the same {rows} rows a step; medians of {steps}\n"
        "steps or more. The limit is the time that the arithmetic takes at {limit:.0f} TFLOP/s with each query's\n"
        "prefix computed once. No two rows share a page.\n"
        "GiB: held by torch. Every step stands in `tests/bench/against_peer_h200.jsonl`; command, versions and what\n"
        "each part gains in [RESULTS.md](tests/bench/RESULTS.md)."
    ),
    ours=" Here with {}.",
    stop=", ",
)
CHINESE = Words(
    work={
        "text": "文本查询，8 个文本文档",
        "page": "文本查询，4 张页面图像",
        "imgq": "图像查询，8 个文本文档",
        "chat": "约 3,950 个词元的对话",
    },
    heads=(
        *("一行数据", "ms-swift 最快的设置", "秒/行：ms-swift，本工具", "快几倍"),
        *("占极限", "GiB", "首步损失"),
    ),
    nothing="不重算",
    everything="全部重算",
    adapters="bf16 适配器",
    micro="每个微批 {} 行",
    alt="每秒训练的行数，ms-swift 与 launcher",
    note=(
        "一块 H200，Qwen3-VL-Reranker-8B，秩为 8 的 LoRA，listwise 损失（对话：回答部分的交叉熵）。双方一次连续跑完，\n"
        "随机权重相同，每步是相同的 {rows} 行数据；取至少 {steps} 步的中位数。极限：每个查询的前缀只算一次时，\n"
        "以 {limit:.0f} TFLOP/s 完成这些算术所需的时间。各行的页面互不相同。\n"
        "GiB：torch 占用的显存。每一步见\n"
        "`tests/bench/against_peer_h200.jsonl`；命令、版本以及各部分的收益见 [RESULTS.md](tests/bench/RESULTS.md)。"
    ),
    ours="本工具设了 {}。",
    stop="，",
)
PAGES = {"README.md": ENGLISH, "README.zh-CN.md": CHINESE}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Both sides of one kind of work."""

    peer: Outcome
    ours: Outcome

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a row: the peer's and ours."""
        assert self.peer.seconds and self.ours.seconds
        return self.peer.seconds, self.ours.seconds

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer."""
        return self.seconds[0] / self.seconds[1]


def read(file: Path) -> list[Outcome]:
    """The outcomes that were kept; none where nothing was measured yet."""
    return [Outcome(**json.loads(line)) for line in file.read_text().splitlines()] if file.is_file() else []


def pairs(outcomes: Sequence[Outcome]) -> list[Pair]:
    """The peer's fastest run and our last one of each kind of work that both did."""
    found = []
    for workload in LOADS:
        timed = [outcome for outcome in outcomes if outcome.workload == workload and outcome.seconds]
        peers = [outcome for outcome in timed if outcome.side != "launcher"]
        ours = [outcome for outcome in timed if outcome.side == "launcher"]
        if peers and ours:
            found.append(Pair(peer=min(peers, key=lambda outcome: outcome.seconds or 0.0), ours=ours[-1]))
    return found


def block(found: Sequence[Pair], words: Words) -> str:
    """Picture, table and what was measured, in Markdown; empty without a pair."""
    if not found:
        return ""
    picture = PICTURE.relative_to(REPO).as_posix()
    lines = [words.heads, ("---",) * len(words.heads), *(_cells(pair, words) for pair in found)]
    rows = "/".join(sorted({str(pair.ours.groups) for pair in found}))
    steps = min(len(steady(outcome.step_s)) for pair in found for outcome in (pair.peer, pair.ours))
    note = words.note.format(rows=rows, steps=steps, limit=LIMIT_TFLOPS)
    set_here = dict.fromkeys(word for pair in found for word in pair.ours.setting.split())
    note += words.ours.format(", ".join(f"`{word}`" for word in set_here)) if set_here else ""
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"![{words.alt}]({picture})\n\n{table}\n{note}\n"


def _cells(pair: Pair, words: Words) -> tuple[str, ...]:
    both = (pair.peer, pair.ours)
    needed = least(pair.ours.workload, shared=True)[1]
    shares = (needed / seconds / LIMIT_TFLOPS / 1e12 for seconds in pair.seconds)
    return (
        words.work[pair.ours.workload],
        _setting(read_setting(pair.peer.setting), words),
        ", ".join(f"{seconds:.3f}" for seconds in pair.seconds),
        f"**{pair.ratio:.1f}**",
        ", ".join(f"{100 * share:.0f} %" for share in shares),
        ", ".join("–" if one.reserved_gib is None else f"{one.reserved_gib:.0f}" for one in both),
        ", ".join(f"{one.losses[0]:.3f}" for one in both),
    )


def _setting(setting: Setting, words: Words) -> str:
    parts = [words.nothing if setting.keeps else words.everything, *(["Liger"] * setting.liger)]
    parts += [words.adapters] * setting.bf16
    return words.stop.join([*parts, words.micro.format(setting.micro)])


def written(page: str, text: str) -> str:
    """A page with `text` between its two comments."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"the page has no {BEGIN!r} with {END!r} behind it")
    return f"{before}{BEGIN}{text}{END}{after}"


def picture(found: Sequence[Pair]) -> str:
    """Rows a second of both sides, as an SVG file."""
    bars = [
        (pair.ours.workload, ENGLISH.work[pair.ours.workload], 1 / pair.seconds[0], 1 / pair.seconds[1])
        for pair in found
    ]
    return drawn("Rows trained a second, one H200", "Qwen3-VL-Reranker-8B, LoRA of rank 8", bars)


def main() -> int:
    """Write all three files, or say why not."""
    found = pairs(read(FILE))
    if not found:
        print(f"{FILE}: no work that both sides did; tests/bench/against_peer.py measures it", file=sys.stderr)
        return 2
    same, said = parity([outcome for pair in found for outcome in (pair.peer, pair.ours)])
    print(said)
    if not same:
        return 1
    PICTURE.write_text(picture(found), encoding="utf-8")
    for name, words in PAGES.items():
        page = REPO / name
        page.write_text(written(page.read_text(encoding="utf-8"), block(found, words)), encoding="utf-8")
    print(block(found, ENGLISH), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
