"""Weight files by their headers: what is whole, what is not, and what nobody here can judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launcher.weightheaders import INDEX, SINGLE, Damaged, Unreadable, damage, stored_tensors


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, *shape: int, end: int, begin: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with two whole files of weights."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "two.safetensors")
    names = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    return tmp_path


def test_whole_files_are_told_tensor_by_tensor(model: Path) -> None:
    found = stored_tensors(model)
    assert {name: (t.file.name, t.shape, t.dtype, t.numel) for name, t in found.items()} == {
        "a": ("one.safetensors", (2, 3), "F32", 6),
        "b": ("one.safetensors", (4,), "BF16", 4),
        "c": ("two.safetensors", (), "F32", 1),
    }
    place = found["b"]
    raw = place.file.read_bytes()[place.start : place.start + 8]
    assert torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).tolist() == [1.0] * 4
    assert damage(model) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "its header cannot be read"),
        (b"\x08\0\0\0", "its header cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "its header cannot be read"),
        (file_of(b"[]"), "its header cannot be read"),
        (file_of(b'{"c": 1}'), "its header cannot be read"),
        (file_of(b"[" * 100_000), "its header cannot be read"),
        (file_of({"c": {"dtype": "F32", "shape": []}}, bytes(4)), "its header cannot be read"),
        (file_of({"c": entry("F32", 2, end=8)}, bytes(7)), "is cut short: it has 76 bytes, and c lies beyond them"),
        (file_of({"c": entry("F32", 2, end=4)}, bytes(4)), "c does not lie in it as its header says"),
        (file_of({"c": entry("I32", 2, end=8)}, bytes(8)), "c is I32, and the weights of this model are floating"),
        (file_of({"c": entry("U8", 8, end=8)}, bytes(8)), "c is U8, and the weights"),
    ],
    ids=["empty", "eight bytes", "LFS pointer", "list", "number", "deep", "no place", "cut", "size", "I32", "U8"],
)  # fmt: skip
def test_a_file_that_is_not_whole_is_named(content: bytes, said: str, model: Path) -> None:
    file = model / "two.safetensors"
    file.write_bytes(content)
    found = damage(model)
    assert isinstance(found, Damaged) and str(found).startswith(str(file)) and said in str(found)


def test_a_folder_in_place_of_a_file_is_named(model: Path) -> None:
    (model / "one.safetensors").unlink()
    (model / "one.safetensors").mkdir()
    assert str(damage(model)) == f"{model}/one.safetensors is a folder, and should be a file of weights"


@pytest.mark.parametrize("dtype", ["F8_E4M3", "C64"])
def test_types_that_are_not_read_here_are_no_damage(dtype: str, model: Path) -> None:
    (model / "two.safetensors").write_bytes(file_of({"c": entry(dtype, 8, end=8)}, bytes(8)))
    assert damage(model) is None
    with pytest.raises(Unreadable, match=f"c is {dtype}"):
        stored_tensors(model)


@pytest.mark.parametrize("config", ['{"quantization_config": {"quant_method": "awq"}}', "{", "[]", None])
def test_integers_are_no_damage_where_weights_may_be_quantized(config: str | None, model: Path) -> None:
    (model / "two.safetensors").write_bytes(file_of({"c": entry("I32", 2, end=8)}, bytes(8)))
    assert damage(model) is not None
    (model / "config.json").unlink() if config is None else (model / "config.json").write_text(config)
    assert damage(model) is None


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": ["one.safetensors"]}', "{}"])
def test_an_index_that_cannot_be_read_is_left_to_who_loads(index: str, model: Path) -> None:
    (model / INDEX).write_text(index)
    assert damage(model) is None
    with pytest.raises(Unreadable, match=r"model\.safetensors\.index\.json cannot be read"):
        stored_tensors(model)


def test_a_single_file_needs_no_index(model: Path) -> None:
    (model / INDEX).unlink()
    assert damage(model) is None  # an adapter's folder has no weights of a model
    save_file({"a": torch.zeros(2)}, model / SINGLE)
    assert list(stored_tensors(model)) == ["a"]
    (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:-1])
    assert "is cut short" in str(damage(model))
