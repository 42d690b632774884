"""Asks a server of an export for its golden scores: vLLM's /score, or the /rerank that most rerank servers have."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, ExitCode, MachineError, Problem
from launcher.golden import Item, Pair, read_golden, verdict

TIMEOUT_S = 120.0


def check_server(folder: Path, url: str, tolerance: float | None) -> int:
    """Print golden scores beside the server's; 0 when they agree, else 4. Raises MachineError when nobody answers."""
    golden = read_golden(folder)
    base = url.rstrip("/").removesuffix("/score").removesuffix("/rerank").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(Problem(f"--golden {url}: an address begins with http://", tries=(f"--golden http://{url}",)))
    ask = _score
    try:
        ask(base, golden.pairs[0])
    except _NoSuchPath:
        ask = _rerank
    found: list[float | str] = []
    for pair in golden.pairs:
        try:
            found.append(ask(base, pair))
        except (_Refused, _NoSuchPath) as error:
            found.append(str(error))
    lines, good = verdict(golden, found, tolerance or golden.tolerance)
    print("\n".join(lines))
    return int(ExitCode.OK if good else ExitCode.TRAINING)


class _Refused(Exception):
    """The server answered, with an error or without a score."""


class _NoSuchPath(Exception):
    """The server has no such address."""


def _score(base: str, pair: Pair) -> float:
    """vLLM, since 0.14: https://docs.vllm.ai, Score API. Its own instruction is the template's."""
    body: dict[str, Any] = {"queries": _content(pair.query), "documents": [_content(pair.document)]}
    if pair.instruction is not None:
        body["chat_template_kwargs"] = {"instruction": pair.instruction}
    return _number(_post(f"{base}/score", body), "data")


def _rerank(base: str, pair: Pair) -> float:
    """Text pairs with the template's own instruction: more this API cannot say."""
    if pair.instruction is not None or any(item["type"] != "text" for item in (*pair.query, *pair.document)):
        raise _Refused("this server's /rerank takes neither pictures nor an instruction")
    documents = [_content(pair.document)]
    return _number(_post(f"{base}/rerank", {"query": _content(pair.query), "documents": documents, "texts": documents}))


def _content(items: list[Item]) -> Any:
    if all(item["type"] == "text" for item in items):
        return "".join(item["text"] for item in items)
    parts = [
        {"type": "text", "text": item["text"]}
        if item["type"] == "text"
        else {"type": "image_url", "image_url": {"url": item["image"]}}
        for item in items
    ]
    return {"content": parts}


def _number(answer: Any, key: str = "results") -> float:
    rows = answer.get(key) if isinstance(answer, dict) else answer
    row = rows[0] if isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], dict) else {}
    score = row.get("score", row.get("relevance_score"))
    if not isinstance(score, int | float):
        raise _Refused(f"no score in the answer: {json.dumps(answer)[:200]}")
    return float(score)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(400).decode("utf-8", "replace")
        if error.code == 404:
            raise _NoSuchPath(f"{url} is not there: {said}") from None
        raise _Refused(f"HTTP {error.code}: {' '.join(said.split())}") from None
    except (OSError, ValueError) as error:
        problem = Problem(f"no answer from {url}: {error}", tries=("start the server: SERVE.md of the export",))
        raise MachineError(problem, title="with this server") from None
