"""What other programs want beside the weights: sentence-transformers' modules, vLLM's keys, older readers' files.

Held to sentence-transformers 6.2 by tests; the vLLM part was run with its CPU build 0.32 by hand.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from launcher.rundir import read_json, write_atomic, write_json

TEMPLATE = "additional_chat_templates/reranker.jinja"  # where transformers keeps a processor's named template
MODULE = "sentence_transformers.base.modules.transformer.Transformer"
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
OUTPUT = "causal_logits"
VLLM_KEYS = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
# Of a base model's folder; all else is weights, or written anew.
KEPT = ("LICENSE*", "LICENCE*", "NOTICE*", "generation_config.json", "vocab.json", "merges.txt")


def write_older_files(folder: Path, processor: Any) -> None:
    """Repeat in the old spelling what transformers 5 writes in a new one only: rope, image and video processors.

    Readers of config.json from before version 5 take the missing keys for their defaults, without a word.
    """
    config = read_json(folder / "config.json")
    _spell_rope(config)
    write_json(folder / "config.json", config)
    for name in ("image_processor", "video_processor"):
        if hasattr(processor, name):
            getattr(processor, name).save_pretrained(folder)


def _spell_rope(config: dict[str, Any]) -> None:
    for part in (config, config.get("text_config", {})):
        rope = dict(part.get("rope_parameters") or {})
        if "rope_theta" in rope:
            part["rope_theta"] = rope.pop("rope_theta")
            part["rope_scaling"] = rope if rope.keys() - {"rope_type"} or rope["rope_type"] != "default" else None


def copy_side_files(base: str | None, folder: Path) -> None:
    """Bring along what a local base model's folder has beside weights and this folder lacks, its licence first."""
    if base is None or not Path(base).is_dir():
        return
    for pattern in KEPT:
        for file in sorted(Path(base).glob(pattern)):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def write_cross_encoder(folder: Path, ids: dict[str, int], *, sees: bool) -> None:
    """Make the folder load as sentence_transformers.CrossEncoder; its scores are P(yes) as with the published models.

    `CrossEncoder(folder, activation_fn=torch.nn.Identity())` gives the logit differences that training sees.
    """
    forward = {"method": "forward", "method_output_name": "logits"}
    kinds = ("text", "image", "video") if sees else ("text",)
    write_json(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": MODULE},
            {"idx": 1, "name": "1", "path": "1_LogitScore", "type": LOGIT_SCORE},
        ],
    )
    write_json(
        folder / "1_LogitScore" / "config.json",
        {"true_token_id": ids["yes"], "false_token_id": ids["no"], "module_input_name": OUTPUT},
    )
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "any-to-any" if sees else "text-generation",
            "modality_config": {
                **dict.fromkeys(kinds, forward),
                "message": {**forward, "format": "structured"},
            },
            "module_output_name": OUTPUT,
            "processing_kwargs": {"chat_template": {"chat_template": "reranker", "add_generation_prompt": True}},
        },
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.activation.Sigmoid",
            "prompts": {},
            "default_prompt_name": None,
        },
    )


def write_vllm_keys(folder: Path) -> None:
    """Tell vLLM, in config.json, which two words the score lies between.

    `architectures` stays what transformers loads; the override is on vLLM's command line (`overrides`).
    """
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, **VLLM_KEYS})


def overrides(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM's --hf-overrides: its class that scores, found by name, and how its one row comes from lm_head.

    `method` says for every family what `is_original_qwen3_reranker` says for Qwen3 and Qwen3-VL only.
    """
    name = config["architectures"][0]
    for ending in ("ForConditionalGeneration", "ForCausalLM"):
        name = name.replace(ending, "ForSequenceClassification")
    return {"architectures": [name], **VLLM_KEYS, "method": "from_2_way_softmax"}


def write_guide(folder: Path, instruction: str, *, sees: bool) -> None:
    """SERVE.md: what to type to serve and to call it, with this folder's own values."""
    config = read_json(folder / "config.json")
    parts = {
        "@IMAGES@": _IMAGES if sees else "",
        "@ST_IMAGE@": _ST_IMAGE if sees else "",
        "@OVERRIDES@": json.dumps(overrides(config)),
        "@TEMPLATE@": TEMPLATE,
        "@INSTRUCTION@": json.dumps(instruction, ensure_ascii=False),
        "@CLASS@": config["architectures"][0],
    }
    text = _GUIDE
    for name, part in parts.items():
        text = text.replace(name, part)
    write_atomic(folder / "SERVE.md", text)


_IMAGES = """
A picture is a content part, in the query or in a document; an `http://` address does as well as a data URI:

```python
import base64, requests

picture = base64.b64encode(open("page.png", "rb").read()).decode()
page = {"content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}]}
answer = requests.post("http://localhost:8000/score", json={"queries": "a red circle", "documents": [page]})
print(answer.json()["data"][0]["score"])
```
"""

_ST_IMAGE = """
A document may be a picture too: `model.predict([("a red circle", PIL.Image.open("page.png"))])`, or both:
`("a red circle", {"image": PIL.Image.open("page.png"), "text": "the first page"})`.
"""

_GUIDE = """# How to serve this model

A score is P(yes): the probability that the model answers *yes* rather than *no*, between 0 and 1. Compare scores of
this model only with each other. The prompt is in `@TEMPLATE@`; trained with the instruction
@INSTRUCTION@.

## vLLM

Run in this folder; without `--chat-template` the scores are wrong, and vLLM only warns:

```bash
vllm serve . --runner pooling --max-model-len 8192 \\
  --served-model-name reranker --chat-template @TEMPLATE@ \\
  --hf-overrides '@OVERRIDES@'
```

```bash
curl -s http://localhost:8000/rerank -H 'Content-Type: application/json' -d '{
  "query": "What is the capital of France?",
  "documents": ["Paris is the capital of France.", "Bread is baked from flour."]}'
```

```python
import requests

body = {
    "queries": "What is the capital of France?",
    "documents": ["Paris is the capital of France.", "Bread is baked from flour."],
    "chat_template_kwargs": {"instruction": @INSTRUCTION@},
}
answer = requests.post("http://localhost:8000/score", json=body)
print([row["score"] for row in answer.json()["data"]])
```
@IMAGES@
`"use_activation": false` in a request gives logit differences instead of probabilities.

Check a server against the scores that this folder gave when it was written, from another terminal:

```bash
python -m launcher evaluate . --golden http://localhost:8000
```

## sentence-transformers (6.2 or newer)

```python
from sentence_transformers import CrossEncoder

model = CrossEncoder(".")
pairs = [("What is the capital of France?", text) for text in ("Paris is its capital.", "Bread is baked from flour.")]
print(model.predict(pairs))
print(model.predict(pairs, prompt=@INSTRUCTION@))  # another instruction
```
@ST_IMAGE@
`CrossEncoder(".", activation_fn=torch.nn.Identity())` gives logit differences.

## transformers (5.17 or newer)

```python
import torch
from transformers import AutoProcessor, @CLASS@

model = @CLASS@.from_pretrained(".").eval()
processor = AutoProcessor.from_pretrained(".")
tokenizer = getattr(processor, "tokenizer", processor)
messages = [
    {"role": "query", "content": [{"type": "text", "text": "What is the capital of France?"}]},
    {"role": "document", "content": [{"type": "text", "text": "Paris is its capital."}]},
]
prompt = processor.apply_chat_template(messages, chat_template="reranker", tokenize=False)
inputs = processor(text=[prompt], return_tensors="pt")  # images=[...] for pictures, in reading order
yes, no = (tokenizer(word, add_special_tokens=False).input_ids[0] for word in ("yes", "no"))
with torch.no_grad():
    logits = model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()
print(torch.sigmoid(logits[yes] - logits[no]).item())
```
"""
