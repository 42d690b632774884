"""Write reranker rows of a known size, for timing: `python -m tests.bench.workloads FOLDER [ROWS]`.

text   text query of 103 tokens, 8 text documents of 50 to 570 tokens
page   text query of 20 tokens, 4 pages of 896 x 1152 pixels (1,008 visual tokens each)
imgq   the query is one such page, 8 text documents of 100 tokens
chat   one question of 1,980 tokens with an answer of as many, for task=sft

Sizes are tokens of the tokenizer that `model.weights=random` builds, which cuts words smaller than Qwen's own: what
a group costs is its tokens, so a count of words would not compare.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from launcher.training.bpe import build_tokenizer

ROWS = 64
PER_ROW = 4  # pages; no two rows share one, or a step would see fewer than it has
WIDTH, HEIGHT = 896, 1152
WORDS = [
    "the", "and", "that", "query", "document", "red", "green", "blue",
    "door", "house", "street", "letter", "number", "market", "river", "winter",
    "summer", "paper", "garden", "engine", "carriage", "window", "picture", "morning",
    "evening", "harbour", "bridge", "village", "mountain", "copper", "silver", "history",
]  # fmt: skip

Row = dict[str, Any]
Text = Callable[[int], str]  # number of tokens -> a text of so many


def write_workloads(folder: Path, rows: int = ROWS, seed: int = 0) -> dict[str, Path]:
    """Name -> file of each workload; pages lie in FOLDER/pages. The same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = _write_pages(folder / "pages", PER_ROW * rows, seed)
    found = {}
    for name, make in {"text": text_rows, "page": page_rows, "imgq": imgq_rows, "chat": chat_rows}.items():
        rng = random.Random(f"{seed} {name}")
        found[name] = folder / f"{name}.jsonl"
        lines = (json.dumps(row) for row in make(rows, rng, _texts(rng), pages))
        found[name].write_text("".join(f"{line}\n" for line in lines))
    return found


def text_rows(count: int, rng: random.Random, text: Text, pages: list[str]) -> Iterator[Row]:
    """Eight documents whose lengths are spread evenly in every row, so that rows cost alike."""
    for _ in range(count):
        sizes = [50 + int(520 * (part + rng.random()) / 8) for part in range(8)]
        rng.shuffle(sizes)
        yield _row(text(103), [text(size) for size in sizes])


def page_rows(count: int, rng: random.Random, text: Text, pages: list[str]) -> Iterator[Row]:
    """Four pages that no other row has."""
    for row in range(count):
        yield _row(text(20), [{"image": page} for page in pages[PER_ROW * row : PER_ROW * (row + 1)]])


def imgq_rows(count: int, rng: random.Random, text: Text, pages: list[str]) -> Iterator[Row]:
    """A page that no other row has as the query."""
    for row in range(count):
        yield _row({"image": pages[row]}, [text(100) for _ in range(8)])


def chat_rows(count: int, rng: random.Random, text: Text, pages: list[str]) -> Iterator[Row]:
    """A long question and a long answer."""
    for _ in range(count):
        yield {"messages": [{"role": "user", "content": text(1972)}, {"role": "assistant", "content": text(1972)}]}


def _row(query: Any, documents: list[Any]) -> Row:
    return {"query": query, "positives": documents[:1], "negatives": documents[1:]}


def _texts(rng: random.Random) -> Text:
    """Random words; the last ones are chosen to make the number of tokens come out."""
    tokenizer = build_tokenizer(512, published=False)

    @lru_cache
    def cost(word: str) -> int:
        return len(tokenizer(f" {word}", add_special_tokens=False).input_ids)

    def text(tokens: int) -> str:
        words = []
        while tokens > 0:
            word = rng.choice(WORDS)
            word = word if cost(word) <= tokens else "the"
            words.append(word)
            tokens -= cost(word)
        return " ".join(words)

    return text


def _write_pages(folder: Path, count: int, seed: int) -> list[str]:
    """Pictures of blurred noise, JPEG as most scans are: never blank. Names are relative to the rows' file."""
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda number: _page(seed, number).save(folder / f"{number:03}.jpg", quality=90), range(count)))
    return [f"{folder.name}/{number:03}.jpg" for number in range(count)]


def _page(seed: int, number: int) -> Image.Image:
    coarse = np.random.default_rng((seed, number)).integers(0, 256, (HEIGHT // 32, WIDTH // 32, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def main() -> None:
    """Write what the command line asks for, and name the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int, nargs="?", default=ROWS)
    options = parser.parse_args()
    for name, file in write_workloads(options.folder, options.rows).items():
        print(name, file)


if __name__ == "__main__":
    main()
