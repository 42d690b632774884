"""An export in other programs: sentence-transformers, plain transformers, servers; and what SERVE.md says to type."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import MachineError
from launcher.golden import read_golden, sigmoid
from launcher.rundir import read_json
from launcher.running.served import check_server
from launcher.training.export import export_from_checkpoint
from launcher.training.golden import Exported, picture, suspicions
from tests.test_export import LORA, make_plan, trained
from tests.tiny import INSTRUCTION


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a trained tiny model."""
    root = tmp_path_factory.mktemp("serving")
    plan = make_plan(root, LORA, True)
    (root / "run").mkdir()
    lines = [{"step": 7, "loss": 0.5}, {"step": 7, "eval/ndcg@10": 0.75}, {"step": 9, "eval/ndcg@10": 0.25}]
    (root / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained(plan, root / "step-000007")
    return export_from_checkpoint(plan, root / "step-000007", root / "export")


@pytest.fixture(scope="module")
def exported(folder: Path) -> Exported:
    return Exported(folder)


def as_input(content: list[dict[str, str]]) -> Any:
    """Content as sentence-transformers takes it."""
    parts = {item["type"]: item["text"] if "text" in item else picture(item["image"]) for item in content}
    return parts if len(parts) > 1 else next(iter(parts.values()), "")


def test_sentence_transformers_gives_the_golden_scores(folder: Path) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu")
    golden = read_golden(folder)
    assert len(golden.pairs) == 12
    for instruction in {pair.instruction for pair in golden.pairs}:
        for images in (False, True):
            pairs = [
                pair
                for pair in golden.pairs
                if pair.instruction == instruction and images == ("image" in str([pair.query, pair.document]))
            ]
            inputs = [(as_input(pair.query), as_input(pair.document)) for pair in pairs]
            found = [float(model.predict([one], prompt=instruction)[0]) for one in inputs]
            assert found == pytest.approx([pair.score for pair in pairs], abs=1e-5)
            if not images:  # a padded batch
                batch = model.predict(inputs, prompt=instruction, activation_fn=torch.nn.Identity())
                assert batch.tolist() == pytest.approx([pair.logit for pair in pairs], abs=1e-5)


def test_the_published_formula_gives_the_golden_scores(folder: Path, exported: Exported) -> None:
    """Softmax over the full lm_head's logits of yes and no, by the class that config.json names."""
    golden = read_golden(folder)
    ids = read_json(folder / "1_LogitScore/config.json")
    for pair in golden.pairs:
        messages = [{"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}]
        prompt = exported.processor.apply_chat_template(
            messages, chat_template="reranker", tokenize=False, instruction=pair.instruction
        )
        images = [picture(item["image"]) for item in (*pair.query, *pair.document) if "image" in item]
        inputs = exported.processor(text=[prompt], images=images or None, return_tensors="pt")
        with torch.no_grad():
            logits = exported.model(**inputs, use_cache=False).logits[0, -1]
        both = torch.softmax(logits[[ids["true_token_id"], ids["false_token_id"]]], dim=0)
        assert float(both[0]) == pytest.approx(pair.score, abs=1e-5)
    assert golden.spread > 0.01


def test_readers_from_before_transformers_5_find_their_files(folder: Path) -> None:
    from transformers import AutoConfig

    config = read_json(folder / "config.json")["text_config"]
    rope = config["rope_parameters"]
    assert config["rope_theta"] == rope["rope_theta"]
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert AutoConfig.from_pretrained(folder).text_config.rope_parameters == rope
    old, new = read_json(folder / "preprocessor_config.json"), read_json(folder / "processor_config.json")
    assert {key: old[key] for key in ("size", "patch_size", "merge_size")} == {
        key: new["image_processor"][key] for key in ("size", "patch_size", "merge_size")
    }
    assert (folder / "video_preprocessor_config.json").is_file()


def test_vllm_finds_its_keys_and_a_prompt_of_flat_text(folder: Path, exported: Exported) -> None:
    config = read_json(folder / "config.json")
    assert config["classifier_from_token"] == ["no", "yes"]
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is True
    template = (folder / "additional_chat_templates/reranker.jinja").read_text()
    image = {"type": "image"}, "<|vision_start|><|image_pad|><|vision_end|>"

    def prompt(query: Any, document: Any, **words: str) -> str:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return str(exported.processor.apply_chat_template(messages, chat_template=template, tokenize=False, **words))

    text = {"type": "text", "text": "a ring"}
    flat = prompt("why", image[1] + "a ring", instruction="Look.")
    assert flat == prompt([{"type": "text", "text": "why"}], [text, image[0]], instruction="Look.")
    assert flat.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "<Instruct>: Look.<Query>:why\n<Document>:<|vision_start|>" in flat
    assert INSTRUCTION in prompt("why", "")
    assert prompt("why", "").endswith("<Document>:NULL<|im_end|>\n<|im_start|>assistant\n")


class Server(BaseHTTPRequestHandler):
    """The address and answer of vLLM's Score and Rerank API, scores by the export itself."""

    exported: Exported
    shift = 0.0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        query = body["queries"] if self.path == "/score" else body["query"]
        instruction = body.get("chat_template_kwargs", {}).get("instruction")
        scores = [
            sigmoid(self.exported.logit(_items(query), _items(document), instruction)) + self.shift
            for document in body["documents"]
        ]
        rows: dict[str, Any] = {"data": [{"index": i, "score": score} for i, score in enumerate(scores)]}
        if self.path == "/rerank":
            rows = {"results": [{"index": i, "relevance_score": score} for i, score in enumerate(scores)]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(rows).encode())

    def log_message(self, *args: Any) -> None:
        pass


def _items(content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts = content["content"]
    return [p if p["type"] == "text" else {"type": "image", "image": p["image_url"]["url"]} for p in parts]


@contextlib.contextmanager
def serving(exported: Exported, shift: float = 0.0) -> Iterator[str]:
    handler = type("Handler", (Server,), {"exported": exported, "shift": shift})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_is_held_to_the_golden_scores(
    folder: Path, exported: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(exported) as url:
        assert check_server(folder, url, None) == 0
    assert "the scores agree" in capsys.readouterr().out
    with serving(exported, shift=0.01) as url:
        assert check_server(folder, f"{url}/score", None) == 4
        assert check_server(folder, url, 0.02) == 0
    assert "do NOT agree" in capsys.readouterr().out
    with pytest.raises(MachineError, match="no answer"):
        check_server(folder, url, None)


def test_what_serve_md_says_runs(folder: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block, and the body of the curl line; of `vllm serve` only the template and the class."""
    monkeypatch.chdir(folder)
    picture(read_golden(folder).pairs[8].document[0]["image"]).save("page.png")
    guide = Path("SERVE.md").read_text()
    assert not re.findall(r"@[A-Z_]+@", guide)
    assert Path(re.search(r"--chat-template (\S+)", guide)[1]).is_file()  # type: ignore[index]
    override = json.loads(re.search(r"--hf-overrides '(.+)'", guide)[1])  # type: ignore[index]
    assert override["architectures"] == ["Qwen3VLForSequenceClassification"]
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 4
    with serving(exported) as url:
        said = [_printed(block.replace("http://localhost:8000", url)) for block in blocks]
        body = json.loads(re.search(r"-d '(.+?)'", guide, re.DOTALL)[1])  # type: ignore[index]
        assert body.keys() == {"query", "documents"}
    os.remove("page.png")
    numbers = [[float(n) for n in re.findall(r"0\.\d+", text)] for text in said]
    assert [len(found) for found in numbers] == [2, 1, 4, 1]
    assert numbers[1][0] == pytest.approx(read_golden(folder).pairs[8].score, abs=1e-5)
    assert numbers[2][:2] == pytest.approx(numbers[2][2:], abs=1e-5)  # the template's own instruction, given
    assert numbers[3][0] == pytest.approx(numbers[2][0], abs=1e-5)


def _printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "SERVE.md", "exec"), {})
    return out.getvalue()


def test_the_card_has_the_facts_of_the_run_and_no_path(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    for fact in ("| Steps | 7;", "rerank, listwise", "LoRA r 4, alpha 12", "| ndcg@10 | 0.7500 |", INSTRUCTION):
        assert fact in card
    assert str(folder.parent) not in card + (folder / "SERVE.md").read_text()


def test_scores_that_are_all_alike_are_suspicious(folder: Path) -> None:
    """R07."""
    golden = read_golden(folder)
    assert suspicions(golden) == []
    alike = replace(golden, pairs=[replace(pair, logit=0.25) for pair in golden.pairs])
    assert "alike" in suspicions(alike)[0]
    broken = replace(golden, pairs=[replace(golden.pairs[0], logit=float("nan")), *golden.pairs[1:]])
    assert "not finite" in suspicions(broken)[0]
