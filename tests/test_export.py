"""Checkpoint -> Hugging Face folder: it loads whole, and scores as the trained model does."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.errors import ConfigError
from launcher.rundir import RunDir
from launcher.running.trained import find_target, usable_plan
from launcher.training import adapters, finished, layerwise, processors
from launcher.training.batching import collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.export import checkpoint_to_export, export_from_checkpoint, verify_export
from launcher.training.golden import Exported, NotLoadable
from launcher.training.pixels import Pixels
from launcher.training.rows import Group, Image
from tests.groups import GROUPS
from tests.tiny import INSTRUCTION, tiny_plan

FULL = {"name": "full", "language": "full", "vision": "full", "projector": "full"}
LORA = {"name": "lora", "language": "lora", "vision": "lora", "projector": "full", "r": 4, "lora_alpha": 12.0}
CASES = {
    "full, tied embeddings trained": (FULL, True),
    "full, head too, tied": ({**FULL, "head": "full"}, True),
    "full, untied": (FULL, False),
    "lora, tied": (LORA, True),
    "lora and head, untied": ({**LORA, "head": "full"}, False),
    "dora, rank-stabilised, tied": ({**LORA, "use_dora": True, "use_rslora": True}, True),
}
LARGE = "lora, tied"  # this one as a model whose random weights no GPU holds


def make_plan(tmp_path: Path, tune: dict[str, Any], tied: bool) -> Any:
    plan = tiny_plan(tmp_path / "run", tune=tune)
    plan.arch["tie_word_embeddings"] = tied
    return plan


def trained(plan: Any, folder: Path) -> Any:
    """A scorer whose every trainable parameter has moved, and its masters in a checkpoint folder."""
    scorer = build_scorer(plan, processors.load_processor(plan), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        moved = {name: p for name, p in scorer.named_parameters() if p.requires_grad}
        for p in moved.values():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    folder.mkdir(parents=True)
    save_file({f"master/{name}": p.detach().clone() for name, p in moved.items()}, folder / "part.safetensors")
    parameters = {name: {"shape": list(p.shape), "file": "part.safetensors"} for name, p in moved.items()}
    (folder / "state.json").write_text(json.dumps({"step": 7, "best": None, "parameters": parameters}))
    return scorer


def packed_scores(plan: Any, scorer: Any, groups: list[Group]) -> torch.Tensor:
    processor = processors.load_processor(plan)
    encoded = [make_encoder(plan, processor).encode(group) for group in groups]
    pixels = Pixels(processor)
    needed = {slot.key: pixels.rows(slot) for e in encoded for p in e.prompts for slot in p.media}
    with torch.no_grad():
        return scorer(collate(encoded, make_units(encoded, plan.cost, 8192, splittable=False), needed, padded=True))


def exported_scores(out: Path, groups: list[Group]) -> torch.Tensor:
    """One document at a time through transformers and the export's own template."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    processor = AutoProcessor.from_pretrained(out)
    ids = processors.token_ids(processor)
    scores = []
    for group in groups:
        for document in group.documents:
            messages = [
                {"role": "query", "content": items(group.query)},
                {"role": "document", "content": items(document)},
            ]
            prompt = processor.apply_chat_template(messages, chat_template="reranker", tokenize=False)
            images = [picture(p) for content in (group.query, document) for p in content if isinstance(p, Image)]
            inputs = processor(text=[prompt], images=images or None, return_tensors="pt")
            with torch.no_grad():
                logits = model(**inputs, use_cache=False).logits[0, -1]
            scores.append(logits[ids["yes"]] - logits[ids["no"]])
    return torch.stack(scores)


def items(content: Any) -> list[dict[str, str]]:
    """A content without text or image is an empty list: the template writes NULL for it, as training does."""
    kept = [part for part in content if part != ""]
    return [{"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part} for part in kept]


def picture(image: Image) -> Any:
    return PIL.Image.open(io.BytesIO(image.data))


@pytest.mark.parametrize("case", CASES)
def test_the_export_scores_as_the_trained_model(tmp_path, case, monkeypatch):
    """Z18, C14: tied or not, the head that was trained is the one that is loaded."""
    tune, tied = CASES[case]
    kept_on, fill = [], layerwise.fill
    monkeypatch.setattr(layerwise, "fill", lambda *a, **k: (kept_on.append(k["rests_on"]), fill(*a, **k))[1])
    if case == LARGE:
        monkeypatch.setattr(layerwise, "MOST_WHOLE", 0)
    plan = make_plan(tmp_path, tune, tied)
    checkpoint = tmp_path / "step-000007"
    scorer = trained(plan, checkpoint)
    groups = [*GROUPS["text"], *GROUPS["image documents"]]
    expected = packed_scores(plan, scorer, groups)
    out = export_from_checkpoint(plan, checkpoint, tmp_path / "export")
    # A large model trains where its weights are made; for its export they go to main memory, module by module.
    assert kept_on == ([None, torch.device("cpu")] if case == LARGE else [])
    assert expected.std() > 1e-3  # documents score differently
    torch.testing.assert_close(exported_scores(out, groups), expected, atol=1e-5, rtol=1e-5)

    config = json.loads((out / "config.json").read_text())
    still_tied = case in ("lora, tied", "dora, rank-stabilised, tied")
    assert config["tie_word_embeddings"] is still_tied
    assert config["text_config"]["tie_word_embeddings"] is still_tied
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not still_tied
    assert json.loads((out / "launcher.json").read_text())["instruction"] == INSTRUCTION
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]
    assert {file.stat().st_mode & 0o777 for file in out.glob("*.*")} == {out.stat().st_mode & 0o666}


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_alone_scores_as_the_trained_model_on_its_base(tmp_path, dora):
    """peft loads it, the parts that trained whole included; so does a process that scores with it."""
    base = tmp_path / "base"
    first = make_plan(tmp_path, {"language": "frozen", "vision": "frozen", "projector": "frozen"}, True)
    processor = processors.load_processor(first)
    build_scorer(first, processor, torch.device("cpu")).model.save_pretrained(base)
    processor.save_pretrained(base)
    (base / "LICENSE").write_text("do as you like")
    plan = make_plan(tmp_path, {**LORA, "use_dora": dora}, True)
    model = replace(plan.config.model, path=str(base), weights="pretrained")
    checkpoint = replace(plan.config.checkpoint, merge=False)
    plan = replace(plan, config=replace(plan.config, model=model, checkpoint=checkpoint))
    scorer = trained(plan, tmp_path / "step-000007")
    expected = packed_scores(plan, scorer, GROUPS["image documents"])

    out = export_from_checkpoint(plan, tmp_path / "step-000007", tmp_path / "export")
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["r"] == 4
    assert "model.visual.merger.linear_fc1" in settings["modules_to_save"]
    saved = load_file(out / "adapter_model.safetensors")
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_B.weight"
    assert saved[name].shape == (128, 4)
    assert not any("language_model" in key and ".lora_" not in key for key in saved)  # what is frozen stays in the base
    loaded = Exported(out)
    scores = [
        loaded.logit(with_data(group.query), with_data(document), None)
        for group in GROUPS["image documents"]
        for document in group.documents
    ]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    target = find_target(str(out), "runs")
    again = finished.load(usable_plan(target, [], "cpu"), out)
    torch.testing.assert_close(packed_scores(plan, again.scorer, GROUPS["image documents"]), expected)

    chats = replace(plan, config=replace(plan.config, task=replace(plan.config.task, name="sft")))
    assert (export_from_checkpoint(chats, tmp_path / "step-000007", tmp_path / "chats") / "README.md").is_file()
    merged = replace(plan, config=replace(plan.config, checkpoint=replace(checkpoint, merge=True)))
    whole = export_from_checkpoint(merged, tmp_path / "step-000007", tmp_path / "merged")
    assert (whole / "LICENSE").read_text() == "do as you like"
    torch.testing.assert_close(exported_scores(whole, GROUPS["image documents"]), expected, atol=1e-5, rtol=1e-5)


def with_data(content: Any) -> list[dict[str, str]]:
    """Content as golden.json has it."""
    return [
        {"type": "image", "image": "data:image/png;base64," + base64.b64encode(part.data).decode()}
        if isinstance(part, Image)
        else {"type": "text", "text": part}
        for part in content
    ]


def test_an_adapter_that_changes_nothing_or_fits_nothing_is_refused(tmp_path):
    """Z06."""
    plan = make_plan(tmp_path, {**LORA, "head": "full"}, True)
    alone = replace(plan, config=replace(plan.config, checkpoint=replace(plan.config.checkpoint, merge=False)))
    with pytest.raises(ConfigError) as refused:
        export_from_checkpoint(alone, tmp_path / "step-000007", tmp_path / "export")
    assert len(refused.value.problems) == 2  # the head, and a base that nobody has
    assert not list(tmp_path.iterdir())
    model = replace(alone.config.model, weights="pretrained", path="base")
    alone = replace(alone, config=replace(alone.config, model=model))
    name = "model.base_model.model.model.language_model.layers.0.mlp.up_proj.lora_{}.default.weight"
    for b, why in ((torch.zeros(8, 4), "every lora_B is zero"), (torch.empty(0), "was not saved whole")):
        masters = [(name.format("A"), torch.ones(4, 6)), (name.format("B"), b)]
        with pytest.raises(RuntimeError, match=why):
            adapters.write(alone, masters, tmp_path)


def test_a_folder_that_would_not_load_is_refused(tmp_path):
    """Z17, C14: a key that is missing or renamed is no warning."""
    plan = make_plan(tmp_path, LORA, True)
    trained(plan, tmp_path / "step-000007")
    out = export_from_checkpoint(plan, tmp_path / "step-000007", tmp_path / "export")
    whole = load_file(out / "model.safetensors")
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    for tensor in (None, torch.zeros(0), torch.zeros(3, 3)):
        changed = {key: value for key, value in whole.items() if key != name}
        save_file(changed if tensor is None else {**changed, name: tensor}, out / "model.safetensors")
        with pytest.raises(NotLoadable, match=r"1 (missing|mismatched) keys, the first is .*q_proj"):
            verify_export(out)


def test_only_an_export_is_replaced(tmp_path):
    plan = make_plan(tmp_path, LORA, True)
    trained(plan, tmp_path / "step-000007")
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        export_from_checkpoint(plan, tmp_path / "step-000007", out)
    (out / "notes.txt").unlink()
    for _ in range(2):
        assert (export_from_checkpoint(plan, tmp_path / "step-000007", out) / "config.json").is_file()


def test_the_best_checkpoint_is_exported_while_it_exists(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoint_to_export(run)
    for step, best in ((100, None), (200, {"step": 100, "value": 0.9}), (300, {"step": 50, "value": 0.95})):
        folder = run.checkpoint(step)
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"serial": step, "best": best}))
        (folder / "COMPLETE").touch()
        assert checkpoint_to_export(run) == (run.checkpoint(100) if step < 300 else folder)
