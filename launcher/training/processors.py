"""Tokenizer and image processor of a run: the model's own, or built on the spot for random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.families import FAMILIES, Family, family_of, instruction_of
from launcher.hubs import model_source
from launcher.spec import RunPlan
from launcher.training.bpe import PUBLISHED_SIZE, build_tokenizer
from launcher.training.templates import CHAT_TEMPLATE, reranker_template

# What the published rerankers were trained with: 4 to 1280 visual tokens an image
MIN_PIXELS, MAX_PIXELS = 4 * 32 * 32, 1280 * 32 * 32
PUBLISHED_IMAGE_TOKEN = 151655
WORDS = {"yes": "yes", "no": "no"}
VISION_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """transformers' classes for a kind of vision tower, and what its pixels are normalised with."""

    processor: str
    videos: str
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


_KINDS = {  # by Family.tower
    "qwen3": _Kind(processor="Qwen3VLProcessor", videos="Qwen3VLVideoProcessor"),
    "qwen2_5": _Kind(
        processor="Qwen2_5_VLProcessor",
        videos="Qwen2VLVideoProcessor",
        mean=(0.48145466, 0.4578275, 0.40821073),  # CLIP's
        std=(0.26862954, 0.26130258, 0.27577711),
    ),
}


def load_processor(plan: RunPlan, *, local_only: bool = False) -> Any:
    """The processor that this run trains and exports with, its `reranker` chat template included; of a model that
    reads text only, its tokenizer.

    From `model.path`, else from the repository of pretrained weights, else built. The template's default
    instruction is the run's. Raises ConfigError when the files are not there; `local_only` asks no network.
    """
    model, family = plan.config.model, family_of(plan.config.model, plan.arch)
    if model.path and model.weights == "pretrained" and not _has_tokenizer(Path(model.path)):
        # transformers would make an empty one
        raise ConfigError(
            Problem(f"model.path={model.path} has no tokenizer.json", tries=("add the tokenizer's files",))
        )
    if model.path and _has_tokenizer(Path(model.path)):
        processor = _from_pretrained(model.path, family, local_only=local_only)
    elif model.weights == "pretrained":
        processor = _from_pretrained(model_source(model), family, local_only=local_only)
    else:
        processor = build_processor(plan.arch, family=family)
    _check_vocabulary(plan, tokenizer_of(processor))
    if family.sees:
        size = processor.image_processor.size
        processor.image_processor.size = type(size)(
            shortest_edge=model.min_pixels or size["shortest_edge"],  # these "edges" are areas
            longest_edge=model.max_pixels or size["longest_edge"],
        )
    plain = processor.chat_template
    # A folder may have additional templates alone.
    templates = {"default": CHAT_TEMPLATE} | (plain if isinstance(plain, dict) else {"default": plain or CHAT_TEMPLATE})
    processor.chat_template = templates | {"reranker": reranker_template(instruction_of(plan), family.prompt)}
    return processor


def _check_vocabulary(plan: RunPlan, tokenizer: Any) -> None:
    """Each token has a row of the embeddings, which are never made larger; else a GPU's kernel would stop on the text
    that holds the first one without."""
    rows = (plan.arch.get("text_config") or plan.arch).get("vocab_size", len(tokenizer))
    if len(tokenizer) > rows:
        text = f"the tokenizer has {len(tokenizer)} tokens and the model's embeddings {rows} rows"
        tries = ("model.path=FOLDER with the tokenizer of these weights", "tokens renamed from the spare ones it has")
        raise ConfigError(Problem(text, tries=tries), title="with the tokenizer")


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of what `load_processor` gives."""
    return getattr(processor, "tokenizer", processor)


def build_processor(
    arch: dict[str, Any],
    min_pixels: int = MIN_PIXELS,
    max_pixels: int = MAX_PIXELS,
    family: Family = FAMILIES["qwen3_vl"],
) -> Any:
    """A family's processor (its tokenizer when it reads text only) for `arch`, config.json's structure, without any
    download.

    For the vocabulary of Qwen3-VL and Qwen3 the special tokens, "yes" and "no" have the published ids; for any other
    the tokenizer has its own, and the model's configuration must take them from `special_ids`.
    """
    import transformers

    vocab_size = (arch.get("text_config") or arch)["vocab_size"]
    image_token = arch.get("image_token_id", PUBLISHED_IMAGE_TOKEN)
    published = vocab_size >= PUBLISHED_SIZE and image_token == PUBLISHED_IMAGE_TOKEN
    try:
        tokenizer = build_tokenizer(vocab_size, published=published)
    except ValueError as error:
        raise ConfigError(Problem(str(error), where="model.arch.text_config.vocab_size")) from None
    if family.tower is None:
        tokenizer.chat_template = {"default": CHAT_TEMPLATE}
        return tokenizer
    kind, vision = _KINDS[family.tower], arch["vision_config"]
    patches = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "image_mean": list(kind.mean),
        "image_std": list(kind.std),
    }
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    return getattr(transformers, kind.processor)(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **patches),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, kind.videos)(**patches),
        chat_template={"default": CHAT_TEMPLATE},
    )


def token_ids(processor: Any) -> dict[str, int]:
    """Ids of the answer words and, of a model that sees, of its vision tokens, each checked to be exactly one known
    token."""
    tokenizer = tokenizer_of(processor)
    found: dict[str, int] = {}
    problems = []
    for name, text in (WORDS if tokenizer is processor else WORDS | VISION_TOKENS).items():
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            found[name] = ids[0]
        else:
            problems.append(Problem(f"the tokenizer reads {text!r} as tokens {ids}; it must be one known token"))
    if problems:
        raise ConfigError(*problems, title="with the tokenizer")
    return found


def special_ids(processor: Any) -> dict[str, int]:
    """Token ids of a model configuration that must agree with a processor's tokenizer, under config.json's names."""
    tokenizer = tokenizer_of(processor)
    texts = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": "<|im_end|>",
        "pad_token_id": "<|endoftext|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(text) for name, text in texts.items()}


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def _from_pretrained(source: str, family: Family, *, local_only: bool) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    auto = AutoProcessor if family.sees else AutoTokenizer
    try:
        return auto.from_pretrained(source, local_files_only=local_only, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        what = "tokenizer and image processor" if family.sees else "tokenizer"
        raise ConfigError(
            Problem(
                f"no {what} could be loaded from {source}: {first}",
                tries=("model.path=FOLDER that holds tokenizer and processor files", "model.weights=random"),
            )
        ) from error
