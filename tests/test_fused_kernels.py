"""The Triton kernels against the plain definitions: interpreted where no GPU is, compiled where one is."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from launcher.training.fused import kernels, ops
from launcher.training.fused.ops import Low

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"  # tests/conftest.py sets it
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.bfloat16]
HEADS = (4, 2)


class Maker:
    """Tensors of one type, made in a fixed order."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def strided(self, rows: int, columns: int) -> Tensor:
        """Some columns of a wider tensor."""
        return self(rows, columns + 16)[:, 8 : 8 + columns]

    def low(self, tokens: int, size: int, rank: int, transposed: bool = False) -> Low | None:
        if not rank:
            return None
        h = self(tokens, rank + 16)[:, :rank]
        return Low(h, self(rank, size).T if transposed else self(size, rank))


def check(name: str, *args: object, roundings: int = 1, **options: int) -> None:
    """`name` of the kernels does what `name` of ops does, in place too; the interpreter rounds bfloat16 down."""
    wanted_args, got_args = copies(args, "cpu"), copies(args, DEVICE)
    wanted, got = getattr(ops, name)(*wanted_args, **options), getattr(kernels, name)(*got_args, **options)
    assert [t.stride() for t in as_tuple(got)] == [t.stride() for t in as_tuple(wanted)]  # spare columns too
    tensors = [(a, b) for a, b in zip(got_args, wanted_args, strict=True) if isinstance(a, Tensor)]
    both = zip(as_tuple(got), as_tuple(wanted), strict=True)
    for a, b in [*both, *tensors]:
        assert a.dtype == b.dtype and a.shape == b.shape
        tolerance = roundings * TOLERANCES[wanted_args[0].dtype]
        torch.testing.assert_close(a.cpu(), b, atol=tolerance, rtol=tolerance)


def as_tuple(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def copies(args: tuple, device: str) -> list:
    """Of every tensor with its strides, since operations may write in place."""
    return [copy(a, device) for a in args]


def copy(value: object, device: str) -> object:
    if isinstance(value, Low):
        return Low(copy(value.h, device), copy(value.b, device))
    if isinstance(value, tuple):
        return tuple(copy(v, device) for v in value)
    if not isinstance(value, Tensor):
        return value
    held = value if value._base is None else value._base
    moved = held.clone().to(device)
    return moved.as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "spare"), [(1, 0), (19, 16)])
def test_rms_norm(dtype: torch.dtype, tokens: int, spare: int) -> None:
    make = Maker(dtype)
    check("rms_norm", make.strided(tokens, 96), make(96), 1e-6, spare=spare)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size", "rank"), [(1, 96, 0), (19, 96, 16), (5, 600, 48)])
def test_sums(dtype: torch.dtype, tokens: int, size: int, rank: int) -> None:
    make = Maker(dtype)
    x, delta, low = make.strided(tokens, size), make(tokens, size), make.low(tokens, size, rank)
    roundings = 3 if rank else 1  # a step of a larger number may be lost before the sum
    check("add", x, delta, low, roundings=roundings)
    check("add_norm", x, delta, low, make(size), 1e-6, spare=rank, roundings=roundings)


def test_what_is_too_small_for_a_sum_leaves_it_as_it_is() -> None:
    """Half of these sums lie half-way between two numbers: a product of low rank must not push them all its own way."""
    make = Maker(torch.float16)
    x, delta = 2 * make(19, 128), make(19, 128).abs() + 0.5
    low = Low(1e-6 * make(19, 16).abs(), make(128, 16).abs())
    for functions, device in ((ops, "cpu"), (kernels, DEVICE)):
        with_low, without = (functions.add(*copies((x, delta, some), device)) for some in (low, None))
        assert torch.equal(with_low, without)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size", "spare"), [(1, 96, 0), (19, 600, 16)])
@pytest.mark.parametrize("residual", [False, True])
def test_gradient_of_rms_norm(dtype: torch.dtype, tokens: int, size: int, spare: int, residual: bool) -> None:
    make = Maker(dtype)
    x, weight = make(tokens, size), make(size)
    rstd = ops.rms_norm(x, weight, 1e-6)[1]
    plus = make(tokens, size) if residual else None
    check("norm_backward", make.strided(tokens, size), x, rstd, weight, plus, spare=spare)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 96), (19, 600), (1100, 24)]
)  # the last: more rows than one step takes
def test_gradient_of_the_weight_of_rms_norm(dtype: torch.dtype, tokens: int, size: int) -> None:
    make = Maker(dtype)
    x = make.strided(tokens, size)
    check("norm_weight_gradient", make.strided(tokens, size), x, ops.rms_norm(x, make(size), 1e-6)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 32), (19, 3, 32), (33, 2, 24)])
def test_gradient_of_the_weight_of_norm_by_head(dtype: torch.dtype, tokens: int, heads: int, size: int) -> None:
    make = Maker(dtype)
    raw, dturned = make.strided(tokens, heads * size).unflatten(1, (heads, size)), make(heads, tokens, size + 8)
    cos, sin = (turn(make(tokens, size // 2)).repeat(1, 2) for turn in (torch.cos, torch.sin))
    check("head_norm_weight_gradient", dturned[..., :size].transpose(0, 1), raw, cos, sin, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size", "rank"), [(3, 32, 0), (19, 16, 48)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation(dtype: torch.dtype, tokens: int, size: int, rank: int, normed: bool) -> None:
    make, (n, m) = Maker(dtype), HEADS
    qkv, low = make.strided(tokens, (n + 2 * m) * size), make.low(tokens, (n + 2 * m) * size, rank)
    norms = (make(size), make(size), 1e-6) if normed else None
    cos, sin = (turn(make(tokens, size // 2)).repeat(1, 2) for turn in (torch.cos, torch.sin))
    check("rotate", qkv, low, norms, cos, sin, HEADS)
    dq, dk, dv = make(n, tokens, size).transpose(0, 1), make(tokens, m, size), make(tokens, m, size + 8)[..., :size]
    check("rotate_backward", dq, dk, dv, qkv, low, norms, cos, sin, spare=rank)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size", "rank"), [(1, 40, 0), (67, 72, 32), (520, 16, 16)])
def test_swiglu(dtype: torch.dtype, tokens: int, size: int, rank: int) -> None:
    make = Maker(dtype)
    gate_up, low = make.strided(tokens, 2 * size), make.low(tokens, 2 * size, rank)
    check("swiglu", gate_up, low, spare=rank)
    check("swiglu_backward", make.strided(tokens, size), gate_up, low)


def test_no_rows() -> None:
    make = Maker(torch.float32)
    none, weight = make(0, 32), make(32)
    rstd = torch.empty(0)
    check("rms_norm", none, weight, 1e-6)
    check("add", none, none, None)
    check("add_norm", none, none, None, weight, 1e-6)
    check("norm_backward", none, none, rstd, weight, None)
    check("swiglu", none, None)
    check("swiglu_backward", make(0, 16), none, None)
    cos = make(0, 8)
    check("norm_weight_gradient", none, none, rstd)
    check("head_norm_weight_gradient", make(0, 4, 8), make(0, 4, 8), cos, cos, 1e-6)
    check("rotate", make(0, 64), None, None, cos, cos, HEADS)
    check("rotate_backward", make(0, 4, 8), make(0, 2, 8), make(0, 2, 8), make(0, 64), None, None, cos, cos)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 16, 32])
def test_real_sizes_on_a_gpu(rank: int) -> None:
    make, tokens, size, inner = Maker(torch.bfloat16), 333, 4096, 12288
    x, weight, low = make(tokens, size), make(size), make.low(tokens, size, rank)
    check("rms_norm", x, weight, 1e-6)
    check("add", x, make(tokens, size), low)
    check("add_norm", x, make(tokens, size), low, weight, 1e-6)
    rstd = ops.rms_norm(x, weight, 1e-6)[1]
    check("norm_backward", make(tokens, size), x, rstd, weight, make(tokens, size), spare=rank)
    check("norm_weight_gradient", make(tokens, size), x, rstd)
    gate_up, low = make(tokens, 2 * inner), make.low(tokens, 2 * inner, rank)
    check("swiglu", gate_up, low)
    check("swiglu_backward", make(tokens, inner), gate_up, low)
    qkv, low, norms = make(tokens, 48 * 128), make.low(tokens, 48 * 128, rank), (make(128), make(128), 1e-6)
    cos, sin = (turn(make(tokens, 64)).repeat(1, 2) for turn in (torch.cos, torch.sin))
    check("rotate", qkv, low, norms, cos, sin, (32, 8))
    dq, dk, dv = make(tokens, 32, 128), make(tokens, 8, 128), make(tokens, 8, 128)
    check("rotate_backward", dq, dk, dv, qkv, low, norms, cos, sin)
    check("head_norm_weight_gradient", dq, qkv[:, : 32 * 128].unflatten(1, (32, 128)), cos, sin, 1e-6)
