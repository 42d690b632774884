"""The padded CPU kernel against one dense mask; the GPU kernels against the padded one (marked gpu)."""

from __future__ import annotations

import pytest
import torch

from launcher.training.attention import KERNELS, choose_kernel, make_layout, padded_attention

# Rows of two groups, one with a prefix of 5 and documents of 3, 1 and 4 rows, and a lone prompt of 6.
QUERIES = [(0, 5), (5, 8), (8, 9), (9, 13), (13, 19)]
PREFIXES = [(0, 0), (0, 5), (0, 5), (0, 5), (13, 13)]


def tensors(dtype: torch.dtype, device: str = "cpu", head: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(19, 4, head), (19, 2, head), (19, 2, head)]
    made = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return [t.to(device).requires_grad_() for t in made]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax over an explicit mask, row by row of the definition."""
    mask = torch.zeros(len(q), len(q), dtype=torch.bool)
    for (begin, end), (first, last) in zip(QUERIES, PREFIXES, strict=True):
        for row in range(begin, end):
            mask[row, first:last] = True
            mask[row, begin : row + 1] = True
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    weights = torch.einsum("qnd,knd->nqk", q, k) * scale
    return torch.einsum("nqk,knd->qnd", weights.masked_fill(~mask, float("-inf")).softmax(-1), v)


def test_padded_kernel_equals_the_dense_definition() -> None:
    ours, plain = tensors(torch.float64), tensors(torch.float64)
    layout = make_layout(QUERIES, PREFIXES, padded=True)
    got, wanted = padded_attention(*ours, layout, 0.25), dense(*plain, 0.25)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    weight = torch.randn(got.shape, dtype=torch.float64)
    (got * weight).sum().backward()
    (wanted * weight).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=1e-12)


def test_layout_sizes() -> None:
    layout = make_layout(QUERIES, PREFIXES, padded=False)
    assert layout.cu_q.tolist() == [0, 5, 8, 9, 13, 19] and layout.cu_k.tolist() == [0, 5, 13, 19, 28, 34]
    assert (layout.max_q, layout.max_k, layout.padded) == (6, 9, ())
    assert make_layout(QUERIES[:1], PREFIXES[:1], padded=False).key_rows is None


def test_a_kernel_that_cannot_run_here_is_refused() -> None:
    """G06."""
    cpu = torch.device("cpu")
    assert choose_kernel("auto", cpu, torch.float32)[0] == "reference"
    with pytest.raises(ValueError, match="needs a GPU"):
        choose_kernel("flash_attention_2", cpu, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["varlen", "flash_attention_2", "flash_attention_3"])
def test_flash_kernels_equal_the_cpu_reference(name: str) -> None:
    import importlib.util

    packages = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if name in packages and importlib.util.find_spec(packages[name]) is None:
        pytest.skip(f"{packages[name]} is not installed")
    gpu, cpu = tensors(torch.bfloat16, "cuda", head=64), tensors(torch.float32, head=64)
    cpu = [t.detach().bfloat16().float().requires_grad_() for t in cpu]
    device = torch.device("cuda")
    got = KERNELS[name](*gpu, make_layout(QUERIES, PREFIXES, padded=False).to(device), 0.125)
    wanted = padded_attention(*cpu, make_layout(QUERIES, PREFIXES, padded=True), 0.125)
    torch.testing.assert_close(got.float().cpu(), wanted, atol=2e-2, rtol=2e-2)
    weight = torch.randn(wanted.shape)
    (got * weight.to(device)).sum().backward()
    (wanted * weight).sum().backward()
    for a, b in zip(gpu, cpu, strict=True):
        torch.testing.assert_close(a.grad.float().cpu(), b.grad, atol=3e-2, rtol=3e-2)
