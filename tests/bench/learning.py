"""Whether a model learns from every form of row: the same small task written in each, before and after a short run.

    python -m tests.bench.learning FOLDER [NAME ...]

The task: which document is the digit that the query names? A digit is a word or a real handwritten
picture; held-out rows have queries, or pictures, that no training row has. Each form is trained by the
launcher's own command on the CPU, from the same random tiny model. Forms that hold all of a text query's documents
begin at the same NDCG, since their held-out rows say the same: a wrong reader would show there too. FOLDER gets the
rows, the runs and `table.md`; NAMEs choose among the forms.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.training.digits import WORDS, read_digits
from launcher.training.images import open_image
from launcher.training.rows import Image

ROWS = {"train": 384, "eval": 48}
DIGITS = 4  # zero to three: so small a model learns which word goes with which within some tens of steps
NEGATIVES = DIGITS - 1
SEED = 42
PICTURES_OF = 1200  # groups of the demo, one picture each; fewer are different
NOISE = ("red", "page", "shows", "some", "picture", "cat", "there", "user", "green", "over")
INSTRUCTION = "Find the document with the digit."

Content = str | Path  # a text, or a picture's file
Rows = Iterable[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A query and its documents, the right one first."""

    number: int
    digit: int
    query: Content
    documents: tuple[Content, ...]

    @property
    def place(self) -> int:
        """Where the right document stands when they are listed in no particular order."""
        return self.number % len(self.documents)

    @property
    def listed(self) -> list[tuple[Content, int]]:
        """(document, label) with the right one at `place`."""
        found = [(document, 0) for document in self.documents[1:]]
        found.insert(self.place, (self.documents[0], 1))
        return found


def make_samples(folder: Path, split: str, query: str, documents: str) -> list[Sample]:
    """The task with `query` and `documents` as "text" or "picture"; text queries are all different."""
    draw = random.Random(f"{SEED} {split} {query} {documents}")
    pictures = write_pictures(folder, split) if "picture" in (query, documents) else {}

    def document(digit: int) -> Content:
        if documents == "picture":
            return draw.choice(pictures[digit])
        return WORDS[digit]

    samples = []
    for number in range(ROWS[split]):
        digit = number % DIGITS
        others = draw.sample([other for other in range(DIGITS) if other != digit], NEGATIVES)
        asked: Content = f"{split} {number}: the digit {WORDS[digit]}"
        if query == "picture":
            asked = draw.choice(pictures[digit])
        found = tuple(document(each) for each in (digit, *others))
        samples.append(Sample(number=number, digit=digit, query=asked, documents=found))
    return samples


def write_pictures(folder: Path, split: str) -> dict[int, list[Path]]:
    """Handwritten digits as PNG files, by digit; the demo's own division into training and held-out ones."""
    folder = folder / "pictures" / split
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[int, dict[Path, None]] = {digit: {} for digit in range(10)}
    for row, group in enumerate(read_digits(split, seed=SEED, max_rows=PICTURES_OF)):
        image = group.documents[0][0]
        assert isinstance(image, Image)
        assert image.data is not None
        path = folder / f"{row % 10}-{hashlib.sha256(image.data).hexdigest()[:12]}.png"
        found[row % 10][path] = None
        if row % 10 < DIGITS and not path.exists():
            open_image(image).save(path)
    return {digit: list(paths) for digit, paths in found.items()}


def native(content: Content) -> Any:
    """Content as the native form has it."""
    return {"image": str(content)} if isinstance(content, Path) else content


def native_rows(samples: Sequence[Sample]) -> Rows:
    """{"query", "positives", "negatives"}."""
    for s in samples:
        right, *wrong = map(native, s.documents)
        yield {"query": native(s.query), "positives": [right], "negatives": wrong}


def swift_rows(samples: Sequence[Sample]) -> Rows:
    """ms-swift's reranker rows: messages, with pictures as tags and lists."""
    for s in samples:
        row: dict[str, Any] = {"messages": _turn(s.query), "images": _files(s.query)}
        for side, documents in (("positive", s.documents[:1]), ("negative", s.documents[1:])):
            row[f"{side}_messages"] = [_turn(document) for document in documents]
            row[f"{side}_images"] = [_files(document) for document in documents]
        yield row


def _turn(content: Content) -> list[dict[str, str]]:
    return [{"role": "user", "content": "<image>" if isinstance(content, Path) else content}]


def _files(content: Content) -> list[str]:
    return [str(content)] if isinstance(content, Path) else []


def flag_rows(samples: Sequence[Sample]) -> Rows:
    """FlagEmbedding's rows, with an instruction of their own."""
    for s in samples:
        yield {"query": s.query, "pos": [s.documents[0]], "neg": list(s.documents[1:]), "prompt": INSTRUCTION}


def taught_rows(samples: Sequence[Sample]) -> Rows:
    """The same with a teacher's scores."""
    for row in flag_rows(samples):
        yield {**row, "pos_scores": [4.0], "neg_scores": [-4.0] * NEGATIVES}


def triplet_rows(samples: Sequence[Sample]) -> Rows:
    """sentence-transformers' (anchor, positive, negative): one row a negative."""
    for s in samples:
        for wrong in s.documents[1:]:
            yield {"anchor": s.query, "positive": s.documents[0], "negative": wrong}


def tuple_rows(samples: Sequence[Sample]) -> Rows:
    """sentence-transformers' (query, positive, negative_1, ...)."""
    for s in samples:
        wrong = {f"negative_{n}": document for n, document in enumerate(s.documents[1:], 1)}
        yield {"query": s.query, "positive": s.documents[0], **wrong}


def list_rows(samples: Sequence[Sample]) -> Rows:
    """sentence-transformers' (query, documents, labels)."""
    for s in samples:
        documents, labels = zip(*s.listed, strict=True)
        yield {"query": s.query, "docs": documents, "labels": labels}


def labelled_pair_rows(samples: Sequence[Sample]) -> Rows:
    """sentence-transformers' (sentence1, sentence2, label): one row a document."""
    for s in samples:
        yield from ({"sentence1": s.query, "sentence2": doc, "label": label} for doc, label in s.listed)


def mteb_rows(samples: Sequence[Sample]) -> Rows:
    """MTEB's reranking samples."""
    for s in samples:
        yield {"query": s.query, "positive": [s.documents[0]], "negative": list(s.documents[1:])}


def rejected_rows(samples: Sequence[Sample]) -> Rows:
    """Old ms-swift rows: a response and its rejected ones."""
    for s in samples:
        yield {"query": s.query, "response": s.documents[0], "rejected_response": list(s.documents[1:])}


def judged_rows(samples: Sequence[Sample]) -> Rows:
    """Old ms-swift rows: a judged response each."""
    for s in samples:
        yield from ({"query": s.query, "response": doc, "label": label} for doc, label in s.listed)


def yes_no_rows(samples: Sequence[Sample]) -> Rows:
    """Qwen3-Reranker's chat form: {"input", "output"}."""
    for s in samples:
        for doc, label in s.listed:
            asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {s.query}\n<Document>: {doc}"
            yield {"input": asked, "output": f"<think>\n\n</think>\n\n{'yes' if label else 'no'}"}


def visrag_rows(samples: Sequence[Sample]) -> Rows:
    """VisRAG's and vdr's rows: a page and pages that do not answer."""
    for s in samples:
        wrong = {f"negative_{n}": str(document) for n, document in enumerate(s.documents[1:])}
        yield {"query": s.query, "image": str(s.documents[0]), **wrong}


def page_rows(samples: Sequence[Sample]) -> Rows:
    """ColPali's rows: a page alone, its bytes in the table. Rows of a digit ask alike: none is another's negative."""
    for s in samples:
        page = s.documents[0]
        assert isinstance(page, Path)
        cell = {"bytes": page.read_bytes(), "path": page.name}
        yield {"query": f"the digit {WORDS[s.digit]}", "image": cell, "image_filename": page.name, "source": "pdf"}


def mmeb_rows(samples: Sequence[Sample]) -> Rows:
    """MMEB's rows: the query a picture, the documents words."""
    for s in samples:
        words: dict[str, Any] = {"pos_text": s.documents[0], "pos_image_path": ""}
        words |= {"neg_text": list(s.documents[1:]), "neg_image_path": [""] * NEGATIVES}
        yield {"qry": "<|image_1|>\nWhich digit?", "qry_image_path": str(s.query), **words}


def swift_chats(samples: Sequence[Sample]) -> Rows:
    """Chats of messages; the answer is the digit's word."""
    for s in samples:
        asked = f"<image>{s.number}" if isinstance(s.query, Path) else f"{NOISE[s.number % 7]} {s.digit}?"
        messages = [*_turn(asked), {"role": "assistant", "content": WORDS[s.digit]}]
        yield {"messages": messages, **({"images": _files(s.query)} if _files(s.query) else {})}


def qwen_chats(samples: Sequence[Sample]) -> Rows:
    """Qwen's fine-tuning rows: a picture, and the digit's word."""
    for s in samples:
        said = [{"from": "human", "value": "<image>Which digit?"}, {"from": "gpt", "value": WORDS[s.digit]}]
        yield {"image": str(s.query), "conversations": said}


def sharegpt_chats(samples: Sequence[Sample]) -> Rows:
    """ShareGPT's rows, with a system message."""
    for s in samples:
        asked = f"{NOISE[s.number % 7]} {s.digit}?"
        said = [{"from": "user", "value": asked}, {"from": "assistant", "value": WORDS[s.digit]}]
        yield {"system": "Spell.", "conversations": said}


def labelled_texts(samples: Sequence[Sample]) -> Rows:
    """A text and its class."""
    yield from ({"text": s.query, "label": WORDS[s.digit]} for s in samples)


def labelled_pictures(samples: Sequence[Sample]) -> Rows:
    """A picture and its class, a number."""
    yield from ({"image": str(s.query), "label": s.digit} for s in samples)


Write = Callable[[Path, Rows], Path]


def write_lines(stem: Path, rows: Rows) -> Path:
    """JSON lines."""
    file = stem.with_suffix(".jsonl")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(stem: Path, rows: Rows) -> Path:
    """A Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = stem.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


def write_beir(stem: Path, rows: Rows) -> Path:
    """BEIR's folder, from rows of (query, documents, labels)."""
    (stem / "qrels").mkdir(parents=True, exist_ok=True)
    queries, corpus, judged = [], [], ["query-id\tcorpus-id\tscore"]
    for q, row in enumerate(rows):
        queries.append({"_id": f"q{q}", "text": row["query"]})
        for d, (text, label) in enumerate(zip(row["docs"], row["labels"], strict=True)):
            corpus.append({"_id": f"d{q}-{d}", "title": "", "text": text})
            judged.append(f"q{q}\td{q}-{d}\t{label}")
    write_lines(stem / "queries", queries)
    write_lines(stem / "corpus", corpus)
    (stem / "qrels" / "train.tsv").write_text("\n".join(judged) + "\n", encoding="utf-8")
    return stem


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of row, what its run is told besides, and what it is measured by."""

    rows: Callable[[Sequence[Sample]], Rows]
    query: str = "text"
    documents: str = "text"
    write: Write = write_lines
    words: tuple[str, ...] = ("loss=listwise",)
    held_out: Callable[[Sequence[Sample]], Rows] | None = None  # when the form cannot hold all documents of a query
    metric: str = "ndcg@10"
    steps: int = 60
    lr: float = 2e-3
    better: float = 0.9  # at least so good afterwards (of a loss: at most)


PICTURES: dict[str, Any] = {"steps": 80, "better": 0.85}
# Documents that are pictures take longer: 80 steps at 2e-3 were seen to leave the loss at chance.
PAGES: dict[str, Any] = {"documents": "picture", "steps": 300, "lr": 1e-3, "better": 0.8}
FORMS = {
    "native": Form(rows=native_rows),
    "ms-swift": Form(rows=swift_rows),
    "FlagEmbedding": Form(rows=flag_rows, words=("loss=pairwise",)),
    "FlagEmbedding, teacher's scores": Form(rows=taught_rows, words=("loss=distill",)),
    "sentence-transformers triplets": Form(rows=triplet_rows, held_out=tuple_rows),
    "sentence-transformers n-tuples": Form(rows=tuple_rows, words=("loss=pairwise", "loss.form=margin")),
    "sentence-transformers lists": Form(rows=list_rows, write=write_parquet),
    "sentence-transformers labelled pairs": Form(rows=labelled_pair_rows, words=("loss=pointwise",)),
    "MTEB": Form(rows=mteb_rows),
    "BEIR folder": Form(rows=list_rows, write=write_beir),
    "old pairs, rejected": Form(rows=rejected_rows),
    "old pairs, judged": Form(rows=judged_rows, words=("loss=pointwise",)),
    "old pairs, yes or no": Form(rows=yes_no_rows),
    "VisRAG": Form(rows=visrag_rows, **PAGES),
    "ColPali, random negatives": Form(
        rows=page_rows, write=write_parquet, words=("loss=listwise", "dataset.random_negatives=3"), **PAGES,
    ),
    "MMEB, picture query": Form(rows=mmeb_rows, query="picture", **PICTURES),
    "ms-swift, picture query": Form(rows=swift_rows, query="picture", **PICTURES),
    "native, picture query and documents": Form(rows=native_rows, query="picture", **PAGES),
    "chats of ms-swift": Form(rows=swift_chats, words=("task=sft",), metric="loss", better=0.2),
    "chats of ShareGPT": Form(rows=sharegpt_chats, words=("task=sft",), metric="loss", better=0.2),
    "chats of Qwen, picture": Form(
        rows=qwen_chats, query="picture", words=("task=sft",), metric="loss", steps=80, better=0.5
    ),
    "reranker rows as chats": Form(rows=native_rows, words=("task=sft",), metric="loss", better=0.2),
    "labelled texts": Form(rows=labelled_texts, words=("task=classify",), metric="accuracy"),
    "labelled pictures": Form(
        rows=labelled_pictures, query="picture", words=("task=classify",), metric="accuracy", **PICTURES
    ),
}  # fmt: skip


def write_form(folder: Path, form: Form, most: int | None = None) -> dict[str, Path]:
    """The rows of both splits, as `dataset.train` and `dataset.eval` take them; of `most` samples."""
    files = {}
    folder.mkdir(parents=True, exist_ok=True)
    for split in ROWS:
        samples = make_samples(folder.parent, split, form.query, form.documents)[:most]
        make = form.held_out if split == "eval" and form.held_out else form.rows
        files[split] = form.write(folder / split, make(samples))
    return files


def command(files: dict[str, Path], form: Form, run: Path) -> list[str]:
    """The launcher's own command."""
    sees = "full" if "picture" in (form.query, form.documents) else "frozen"
    words = ["model=tiny", "tune=full", f"tune.vision={sees}", f"tune.projector={sees}", "dataset=jsonl", *form.words]
    words += [f"dataset.{split}={path}" for split, path in files.items()]
    words += [f"train.max_steps={form.steps}", f"train.seed={SEED}", "batch.global_size=8", "gpus=1", "zero=stage0"]
    words += [f"optim.lr={form.lr}", "optim.warmup_steps=5", "optim.schedule=constant"]
    words += ["eval.every_steps=null", "checkpoint.every_steps=null", "checkpoint.keep_best=false"]
    words += ["checkpoint.at_end=false", "checkpoint.export=false", f"run.dir={run}"]
    return [sys.executable, "-m", "launcher", *words]


def values(run: Path, metric: str) -> tuple[float, float]:
    """A metric before the first step and after the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [float(line[f"eval/{metric}"]) for line in lines if f"eval/{metric}" in line]
    return found[0], found[-1]


def main(folder: Path, names: Sequence[str]) -> int:
    """Train from every form, print the table; 1 when a run failed or did not learn."""
    folder = folder.resolve()
    table = ["| rows | told | measured | before | after | steps | command, s |", "|---" * 7 + "|"]
    failed = 0
    for name in names or FORMS:
        form = FORMS[name]
        place = folder / name.replace(" ", "_").replace(",", "").replace("'", "")
        files = write_form(place, form)
        begun = time.monotonic()
        with open(f"{place}.log", "w") as log:
            environ = {**os.environ, "DS_ACCELERATOR": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
            argv = command(files, form, place / "run")
            code = subprocess.run(argv, check=False, stdout=log, stderr=subprocess.STDOUT, env=environ).returncode
        if code:
            line, learned = f"| {name} | ended with {code}: {place}.log |", False
        else:
            before, after = values(place / "run", form.metric)
            learned = after <= form.better if form.metric == "loss" else after >= form.better
            told = " ".join(form.words)
            line = f"| {name} | `{told}` | {form.metric} | {before:.3f} | {after:.3f} | {form.steps} | "
            line += f"{time.monotonic() - begun:.0f} |{'' if learned else ' not learned'}"
        failed += not learned
        table.append(line)
        print(line, flush=True)
        (folder / "table.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
