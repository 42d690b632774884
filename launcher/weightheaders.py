"""What lies in safetensors files, by their headers alone; no torch.

A file is 8 bytes (the header's length), a JSON header (name -> dtype, shape, place) and the tensors' bytes:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # bytes of a number
INTEGERS = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


class Unreadable(Exception):
    """The files are not of the kind that is read here; the text says how."""


class Damaged(OSError):
    """A file that is not whole, whatever its kind; the text names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor in a file; `start` is its first byte there."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: str  # as the header has it

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model's folder by its name there. Raises Unreadable, Damaged."""
    found: dict[str, Stored] = {}
    for file in _files(folder):
        found |= _header(file)
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS:
            raise Unreadable(f"{name} is {tensor.dtype}")
    return found


def damage(folder: Path) -> Damaged | None:
    """The first file of a model's folder that is not whole, or that holds no weights."""
    with contextlib.suppress(Unreadable):
        whole = _has_floats(folder)
        for file in _files(folder):
            try:
                found = _header(file)
            except Damaged as error:
                return error
            wrong = next((name for name, tensor in found.items() if whole and tensor.dtype in INTEGERS), None)
            if wrong is not None:
                text = f"{wrong} is {found[wrong].dtype}, and the weights of this model are floating-point numbers"
                return Damaged(f"{file} is damaged: {text}")
    return None


def _has_floats(folder: Path) -> bool:
    """Whether a model's weights are not quantized, by its config.json."""
    try:
        return not json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return False


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        if not index.is_file():
            return [folder / SINGLE]
        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{index} cannot be read: {error}") from error


def _header(file: Path) -> dict[str, Stored]:
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size
            text = opened.read(length) if length <= size else b""
    except IsADirectoryError as error:
        raise Damaged(f"{file} is a folder, and should be a file of weights") from error
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}") from error
    found = {}
    try:
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            if 8 + length + end > size:
                raise Damaged(f"{file} is cut short: it has {size:,} bytes, and {name} lies beyond them")
            dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
            width = (FLOATS | INTEGERS).get(dtype)
            if width is not None and end - first != math.prod(shape) * width:
                raise Damaged(f"{file} is damaged: {name} does not lie in it as its header says")
            found[name] = Stored(file=file, start=8 + length + first, shape=shape, dtype=dtype)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file} is damaged, or no safetensors file: its header cannot be read") from error
    return found
