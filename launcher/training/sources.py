"""The rows of a split as they stand in the files of its sources, one source after another. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.datafiles import beir_tables, files_of, locate, sources_of, wanted_split
from launcher.errors import ConfigError, Problem
from launcher.spec import DatasetConfig
from launcher.training.formats import Raw
from launcher.training.jsonl import BadRow
from launcher.training.readers import read_file, read_saved

QUERY_IDS = ("query-id", "query_id", "qid", "_id", "id")
DOCUMENT_IDS = ("corpus-id", "corpus_id", "doc-id", "docid", "doc_id", "_id", "id")


def read_sources(data: DatasetConfig, split: str) -> Iterator[Raw]:
    """Every row of "train" or "eval"; raises ConfigError for a source that is not there or holds no data."""
    names = sources_of(data, split)
    if split == "train" and not names:
        raise ConfigError(Problem("dataset.train is not given: rows to train on", tries=("dataset.train=FILE.jsonl",)))
    for number, name in enumerate(names):
        key = "dataset.eval" if split == "eval" and data.eval is not None else "dataset.train"
        root = locate(data, name, key)
        tables = beir_tables(root, wanted_split(data, name, split))
        if tables:
            yield from _read_beir(data, number, root, tables)
            continue
        if data.format == "beir":
            text = f"{key}={name}: format beir is a folder with queries, corpus and qrels"
            raise ConfigError(Problem(text, tries=(f"{key}=FOLDER", "dataset.format=auto")))
        files = files_of(data, name, split)
        for place in files if root.is_file() else dict.fromkeys(map(_saved_with, files)):
            saved = place.is_dir()
            folder = data.image_root or str(place if saved else place.parent)
            for line, row in read_saved(place) if saved else read_file(place):
                yield Raw(number, f"{place}:{line}", folder, row)


def _saved_with(file: Path) -> Path:
    """The folder of what `datasets` saved, for one of its files: another file there may be a copy in its cache."""
    return file.parent if file.suffix == ".arrow" and (file.parent / "state.json").is_file() else file


def _read_beir(data: DatasetConfig, number: int, root: Path, tables: dict[str, list[Path]]) -> Iterator[Raw]:
    """One native row a judged query, in the order of the judgements; documents without a judgement are left alone."""
    folder = data.image_root or str(root)
    bad: list[BadRow] = []
    judged: dict[str, list[tuple[str, Any]]] = {}
    places: dict[str, str] = {}
    for where, row in _rows(tables["qrels"], bad):
        query, document = _id(row, QUERY_IDS[:3]), _id(row, DOCUMENT_IDS[:5])
        if query is None or document is None:
            bad.append(BadRow(where, where.rpartition(":")[2], "no ids: a judgement needs query-id and corpus-id"))
            continue
        judged.setdefault(query, []).append((document, _grade(row.get("score", row.get("label", 1)))))
        places.setdefault(query, where)
    wanted = {document for documents in judged.values() for document, _ in documents}
    queries = _contents(tables["queries"], QUERY_IDS, judged.keys(), bad)
    corpus = _contents(tables["corpus"], DOCUMENT_IDS, wanted, bad)
    for broken in bad:
        yield Raw(number, broken.where, folder, broken)
    for query, documents in judged.items():
        missing = [document for document, _ in documents if document not in corpus]
        if query not in queries or missing:
            what = f"query {query}" if query not in queries else f"document {missing[0]}"
            yield Raw(number, places[query], folder, BadRow(places[query], query, f"judged but not there: {what}"))
            continue
        content = {"documents": [corpus[d] for d, _ in documents], "labels": [label for _, label in documents]}
        yield Raw(number, places[query], folder, {"id": query, "query": queries[query], **content})


def _grade(score: Any) -> Any:
    """A judgement; below 0 is TREC's mark of junk, which is as little an answer as what is judged 0."""
    try:
        return 0 if float(score) < 0 else score
    except (TypeError, ValueError):
        return score


def _contents(files: list[Path], ids: tuple[str, ...], wanted: Any, bad: list[BadRow]) -> dict[str, dict[str, Any]]:
    """Id -> content of the wanted rows of a table: title and text joined as BEIR does it, or a picture."""
    found = {}
    for _, row in _rows(files, bad):
        name = _id(row, ids)
        if name is None or name not in wanted:
            continue
        text = " ".join(str(row[key]) for key in ("title", "text", "query") if row.get(key))
        content: dict[str, Any] = {"text": text} if text else {}
        content |= {key: row[key] for key in ("image", "video") if row.get(key) is not None}
        found[name] = content
    return found


def _id(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    return None if value is None else str(value)


def _rows(files: list[Path], bad: list[BadRow]) -> Iterator[tuple[str, dict[str, Any]]]:
    from launcher.training.jsonl import RowError, parse_line

    for file in files:
        for line, row in read_file(file):
            where = f"{file}:{line}"
            if isinstance(row, bytes):
                try:
                    row = parse_line(row)
                except RowError as error:
                    row = BadRow(where, str(line), str(error))
            if isinstance(row, BadRow):
                bad.append(row)
            else:
                yield where, row
