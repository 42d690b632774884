"""Write a checkpoint of random weights within seconds: `python -m tests.bench.peer_model FOLDER [small]`.

What save_pretrained would write: config.json, safetensors files with their index, tokenizer and processor. Tensors are
made on the GPU and written by several threads. Both sides of a comparison read these files, so that they start from
the same weights. The tokenizer is the one that `model.weights=random` builds: special tokens, "yes" and "no" have the
ids of Qwen's own, which ms-swift knows by number.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from launcher.planning.config import read_config
from launcher.training.bpe import PUBLISHED_SIZE
from launcher.training.processors import build_processor

COMPLETE = "written"  # this file is there once all others are
FILES = 8
STD = 0.02  # of every matrix, as transformers initialises
SMALL: dict[str, dict[str, Any]] = {  # a model of the same structure for a CPU
    "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": PUBLISHED_SIZE},
    "vision_config": {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}
SMALL_ROPE = {"rope_type": "default", "rope_theta": 5000000, "mrope_section": [6, 5, 5], "mrope_interleaved": True}

Sizes = dict[str, torch.Size]


def write_checkpoint(folder: Path, model: str = "qwen3_vl_reranker_8b", *, small: bool = False) -> None:
    """Write the model of conf/model/MODEL.yaml, unless FOLDER holds it whole; `small` shrinks it."""
    if (folder / COMPLETE).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model, small=small)
    sizes = _sizes(config)
    shares = list(_shares(sizes))
    names = [f"model-{n:05}-of-{len(shares):05}.safetensors" for n in range(1, len(shares) + 1)]
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(_write_file, [folder / name for name in names], shares, range(len(shares))))
    where = {tensor: name for name, share in zip(names, shares, strict=True) for tensor in share}
    total = 2 * sum(size.numel() for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    processor = build_processor(config.to_dict())
    processor.chat_template = processor.chat_template["default"]  # transformers would write several as a folder
    for part in (config, processor):
        part.save_pretrained(folder)
    (folder / COMPLETE).touch()


def _config(model: str, *, small: bool) -> Any:
    from transformers import Qwen3VLConfig

    arch = read_config([f"model={model}"]).config.model.arch
    parts = {name: dict(arch[name]) for name in ("text_config", "vision_config")}
    if small:
        parts = {name: part | SMALL[name] for name, part in parts.items()}
        parts["text_config"]["rope_parameters"] = SMALL_ROPE
    config = Qwen3VLConfig(**{key: value for key, value in arch.items() if key != "model_type"} | parts)
    config.architectures, config.dtype = ["Qwen3VLForConditionalGeneration"], "bfloat16"
    return config


def _sizes(config: Any) -> Sizes:
    """Of every tensor, in the model's order."""
    from transformers import Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        return {name: value.shape for name, value in Qwen3VLForConditionalGeneration(config).state_dict().items()}


def _shares(sizes: Sizes) -> Iterator[Sizes]:
    """FILES parts of about the same number of bytes, the tensors in order."""
    whole, begun = sum(size.numel() for size in sizes.values()), 0
    share: Sizes = {}
    number = 0
    for name, size in sizes.items():
        if share and begun * FILES >= (number + 1) * whole:
            yield share
            share, number = {}, number + 1
        share[name] = size
        begun += size.numel()
    yield share


def _write_file(path: Path, share: Sizes, seed: int) -> None:
    """The safetensors format: length of the header, the header, the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in share.items():
        begin, end = end, end + 2 * size.numel()
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    with path.open("wb", buffering=0) as file:
        _write(file, len(text).to_bytes(8, "little") + text)
        for name, size in share.items():
            bytes_of: Any = _values(name, size, device, generator).cpu().view(torch.uint8).numpy()
            _write(file, memoryview(bytes_of).cast("B"))


def _write(file: RawIOBase, data: bytes | memoryview) -> None:
    """All of it: one write takes at most 2 GB."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def _values(name: str, size: torch.Size, device: str, generator: torch.Generator) -> torch.Tensor:
    """Norms begin as ones, biases as zeros."""
    tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
    if name.endswith(".bias"):
        return tensor.zero_()
    return tensor.fill_(1) if "norm" in name.split(".")[-2] else tensor.normal_(0, STD, generator=generator)


if __name__ == "__main__":
    begun, parser = time.time(), argparse.ArgumentParser(prog="python -m tests.bench.peer_model")
    parser.add_argument("folder", type=Path, help="where it is written: 16 GB")
    parser.add_argument("size", nargs="?", choices=["small"], help="a model for a CPU")
    asked = parser.parse_args()
    write_checkpoint(asked.folder, small=asked.size is not None)
    print(f"{asked.folder}: {time.time() - begun:.1f} s")
