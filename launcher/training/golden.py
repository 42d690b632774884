"""Scores of built-in pairs, computed by an exported folder itself with plain transformers: none of our own forward.

The pairs are neutral texts and drawn pictures, never rows of the user: an export is given away.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import torch
from safetensors import SafetensorError

from launcher.golden import TOLERANCES, Golden, Item, Pair, sigmoid
from launcher.training import processors
from launcher.training.adapters import SETTINGS
from launcher.training.backbone import core_of

ABOUT = (
    "Scores of built-in pairs, computed by this folder when it was written: python -m launcher evaluate FOLDER --golden"
)
PACKAGES = ("torch", "transformers")
_QUESTION = "Retrieve text that answers the question."


class NotLoadable(RuntimeError):
    """A folder that transformers would not load whole."""


class Exported:
    """An export, merged or an adapter on its base, as any user of transformers loads it."""

    def __init__(self, folder: Path, device: torch.device | None = None, base: str | None = None) -> None:
        """`base` is where an adapter's base lies, by default what the adapter names.

        Raises NotLoadable unless every tensor of the model is in the files, in its shape, and no other.
        """
        self.device = device or torch.device("cpu")
        self.model = load_exported(folder, base).to(self.device).eval()
        self.processor = load_processor(folder)
        ids = processors.token_ids(self.processor)
        rows = self.model.get_output_embeddings().weight.detach()
        self.delta = rows[ids["yes"]].float() - rows[ids["no"]].float()

    @property
    def sees(self) -> bool:
        """Whether it takes pictures."""
        return hasattr(self.processor, "image_processor")

    @torch.no_grad()
    def logit(self, query: list[Item], document: list[Item], instruction: str | None) -> float:
        """z_yes - z_no of one pair, by the published formula in float32."""
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": instruction}]})
        prompt = self.processor.apply_chat_template(messages, chat_template="reranker", tokenize=False)
        images = [picture(item["image"]) for item in (*query, *document) if item["type"] == "image"]
        media = {"images": images} if images else {}
        inputs = self.processor(text=[prompt], return_tensors="pt", **media).to(self.device)
        hidden = core_of(self.model)(**inputs, use_cache=False).last_hidden_state[0, -1]
        return float(hidden.float() @ self.delta)


def compute(exported: Exported, precision: str, each: Callable[[Iterable[Any]], Iterator[Any]] = iter) -> Golden:
    """The golden scores of an export; `each` takes the pairs through a sign of progress."""
    pairs = []
    for query, document, instruction in each(built_in(images=exported.sees)):
        logit = exported.logit(query, document, instruction)
        pairs.append(Pair(query=query, document=document, instruction=instruction, logit=logit, score=sigmoid(logit)))
    versions = {name: version(name) for name in PACKAGES}
    return Golden(about=ABOUT, precision=precision, tolerance=TOLERANCES[precision], versions=versions, pairs=pairs)


def suspicions(golden: Golden) -> list[str]:
    """What is wrong with scores that are all alike or not finite."""
    logits = [pair.logit for pair in golden.pairs]
    if not all(map(torch.isfinite, map(torch.tensor, logits))):
        return ["the export gives scores that are not finite"]
    if max(logits) - min(logits) < 1e-6:
        return [f"the export scores all built-in pairs alike ({golden.pairs[0].score:.4f}): it tells nothing apart"]
    return []


def built_in(*, images: bool) -> list[tuple[list[Item], list[Item], str | None]]:
    """(query, document, instruction) of a dozen pairs; the last four have pictures."""
    capital, egg = "What is the capital of France?", "How long does an egg have to boil?"
    text = [
        (_text(capital), _text("Paris is the capital and the largest city of France."), None),
        (_text(capital), _text("Bread is baked from flour, water, yeast and salt."), None),
        (_text(capital), _text("Paris is the capital and the largest city of France."), _QUESTION),
        (_text(egg), _text("A soft egg takes about six minutes in boiling water."), None),
        (_text(egg), _text(":) The Moon goes round the Earth\nin about 27 days."), None),
        (_text("水在多少度沸腾?"), _text("在标准大气压下,水在100摄氏度沸腾。"), None),
        (_text("水在多少度沸腾?"), _text("月球大约每27天绕地球一圈。"), None),
        (_text(egg), [], None),  # empty content reads NULL
    ]
    if not images:
        return text
    red, blue = _image(_drawing("red", round_=True)), _image(_drawing("blue", round_=False))
    return [
        *text,
        (_text("a red circle"), red, None),
        (_text("a red circle"), blue, None),
        (red, _text("The picture shows a red circle on white."), "Retrieve the caption of the picture."),
        (red, [*blue, *_text("A blue square.")], None),
    ]


def picture(uri: str) -> PIL.Image.Image:
    """The picture in a data URI."""
    return PIL.Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")


def _text(text: str) -> list[Item]:
    return [{"type": "text", "text": text}]


def _image(drawn: PIL.Image.Image) -> list[Item]:
    file = io.BytesIO()
    drawn.save(file, "PNG")
    return [{"type": "image", "image": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}]


def _drawing(color: str, *, round_: bool) -> PIL.Image.Image:
    """Its sides are multiples of every family's patches, so that no resize backend changes a pixel."""
    drawn = PIL.Image.new("RGB", (224, 224), "white")
    pen = PIL.ImageDraw.Draw(drawn)
    (pen.ellipse if round_ else pen.rectangle)((48, 48, 176, 176), fill=color)
    return drawn


def load_processor(folder: Path) -> Any:
    """The processor of an export; raises NotLoadable when it lost its reranker template."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    templates = processor.chat_template
    if not isinstance(templates, dict) or "reranker" not in templates:
        raise NotLoadable(f"the export in {folder} lost its reranker chat template")
    return processor


def load_exported(folder: Path, base: str | None) -> Any:
    """The model of an export, on `base` or on what its adapter_config.json names when it is an adapter."""
    if not (folder / SETTINGS).is_file():
        return load_whole(folder)
    from peft import PeftConfig, PeftModel

    base = base or str(PeftConfig.from_pretrained(folder).base_model_name_or_path)
    return PeftModel.from_pretrained(load_whole(base), folder, autocast_adapter_dtype=False)


def load_whole(source: str | Path) -> Any:
    """A model by the class that its config.json names; raises NotLoadable when a tensor is missing, strange or left."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(source)
    kind = getattr(transformers, config.architectures[0])
    try:
        # Sizes are let pass here: transformers' own error names no tensor, what it reports does.
        model, info = kind.from_pretrained(
            source, output_loading_info=True, use_safetensors=True, ignore_mismatched_sizes=True
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise NotLoadable(f"{source} would not load: {str(error).strip()}") from error
    wrong = [
        f"{len(info[key])} {key.replace('_', ' ')}, the first is {min(map(str, info[key]))}"
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[key]
    ]
    if wrong:
        raise NotLoadable(f"{source} would not load whole: {'; '.join(wrong)}")
    return model
