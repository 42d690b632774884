"""The padded CPU kernel and the cascade against one dense mask; the GPU kernels against the padded one (marked gpu)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launcher import attention_needs
from launcher.errors import ConfigError, TrainingError
from launcher.running.probe import locate
from launcher.training import attention, attention_flash4, attention_packages, attention_ways
from launcher.training.attention import KERNELS, Layout, choose_kernel, make_layout, packed_attention, padded_attention
from launcher.training.attention_cudnn import bound
from tests.attention_parts import PlainPart

Kernel = Callable[..., torch.Tensor]

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


plain = functools.partial(packed_attention, make_part=PlainPart)


@pytest.mark.parametrize(
    ("kernel", "gathers"),
    [(padded_attention, False), (plain, True), (plain, False)],
    ids=["padded", "gather", "cascade"],
)
def test_kernels_equal_the_dense_definition(kernel: Kernel, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(attention_ways, "gathers_keys", lambda *sizes: asked.append(sizes) or gathers)
    ours, exact = tensors(torch.float64), tensors(torch.float64)
    layout = make_layout(QUERIES, PREFIXES, padded=kernel is padded_attention)
    got, wanted = kernel(*ours, layout, 0.25), dense(*exact, 0.25)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    weight = torch.randn(got.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad((x * weight).sum(), t) for x, t in ((got, ours), (wanted, exact))]
    assert asked == ([] if kernel is padded_attention else [(19, 34)])
    for a, b in zip(*gradients, strict=True):
        assert b[:5].any()  # of the prefix too
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_segments_without_prefixes_and_whole_images() -> None:
    ours, exact = tensors(torch.float64), tensors(torch.float64)
    alone = [(0, 0)] * len(QUERIES)
    layout, padded = (make_layout(QUERIES, alone, padded=padded) for padded in (False, True))
    assert layout.shared is None
    got = plain(*ours, layout, None)
    torch.testing.assert_close(got, padded_attention(*exact, padded, None), atol=1e-12, rtol=1e-12)
    images = torch.tensor([0, 4, 19], dtype=torch.int32)
    k, v = (t.repeat_interleave(2, dim=1) for t in exact[1:])
    got = plain(*ours, Layout(images, images, None, 15, 15), 0.3, causal=False)
    for rows in (slice(0, 4), slice(4, 19)):
        q, keys, values = (t[rows].transpose(0, 1) for t in (exact[0], k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=0.3)
        torch.testing.assert_close(got[rows], wanted.transpose(0, 1), atol=1e-12, rtol=1e-12)


def test_calls_of_shared_prefixes() -> None:
    """Rows between the entries belong to entries without keys or without queries; bounds only ascend."""
    queries = [*QUERIES, (19, 21), (21, 25), (25, 26)]
    prefixes = [*PREFIXES, (19, 19), (19, 21), (19, 21)]
    shared = make_layout(queries, prefixes, padded=False).shared
    assert shared is not None
    assert (shared.queries, shared.keys) == ((5, 26), (0, 21))
    assert shared.call.cu_q.tolist() == [0, 8, 16, 16, 21]
    assert shared.call.cu_k.tolist() == [0, 5, 5, 19, 21]
    assert (shared.call.max_q, shared.call.max_k) == (8, 5)
    assert shared.documents.tolist() == [*range(8), *range(16, 21)]
    assert shared.prefixes.tolist() == [*range(5), 19, 20]
    assert shared.to(torch.device("meta")).call.cu_q.is_meta


def test_prefixes_out_of_order_are_left_to_gathered_keys() -> None:
    layout = make_layout([(0, 4), (4, 6), (6, 9), (9, 19)], [(0, 0), (4, 4), (4, 6), (0, 4)], padded=False)
    assert layout.shared is None
    padded = make_layout([(0, 4), (4, 6), (6, 9), (9, 19)], [(0, 0), (4, 4), (4, 6), (0, 4)], padded=True)
    rows = tensors(torch.float64)
    wanted = padded_attention(*rows, padded, None)
    torch.testing.assert_close(plain(*rows, layout, None), wanted, atol=1e-12, rtol=1e-12)


def test_gradients_of_gathered_rows_are_added_up_in_float32() -> None:
    """256 + 1 is 256 in bf16."""
    source = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = attention_packages.Gather.apply(source, torch.tensor([0, 1, 1, 1, 1, 1]))
    weight = torch.tensor([3.0, 256.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    (gathered[:, 0] * weight).sum().backward()
    assert source.grad is not None and source.grad[:, 0].tolist() == [3.0, 260.0, 0.0]


def test_merging_kernels_interpreted_equal_plain_torch() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.processes.interpreted_attention"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 8


def test_upper_bounds_of_graphs_are_few_and_near() -> None:
    """cuDNN builds a graph for each: at most a third more than needed, or the least step."""
    for step in (8, 1024):
        bounds = {number: bound(number, step) for number in range(1, 20_000)}
        assert all(number <= b < number + max(step, number / 3.9) and b % step == 0 for number, b in bounds.items())
        assert len(set(bounds.values())) < 50


def test_layout_sizes() -> None:
    layout = make_layout(QUERIES, PREFIXES, padded=False)
    assert layout.cu_q.tolist() == [0, 5, 8, 9, 13, 19] and layout.cu_k.tolist() == [0, 5, 13, 19, 28, 34]
    assert (layout.max_q, layout.max_k, layout.padded) == (6, 9, ())
    assert make_layout(QUERIES[:1], PREFIXES[:1], padded=False).key_rows is None


def test_a_kernel_that_cannot_run_here_is_refused() -> None:
    """G06."""
    cpu = torch.device("cpu")
    assert choose_kernel("auto", cpu, torch.float32)[0] == "reference"
    with pytest.raises(ConfigError, match="needs a GPU"):
        choose_kernel("flash_attention_2", cpu, torch.bfloat16)


def test_auto_takes_what_the_gpu_and_the_run_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention._fastest((7, 5))[0] == "sdpa"  # flash kernels refuse it
    assert attention._fastest((8, 9))[0] == attention._fastest((10, 0))[0] == "varlen"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert attention._fastest((9, 0)) == (
        "varlen", "PyTorch's own flash kernel gives the same numbers every time: train.deterministic=true"
    )  # fmt: skip


def test_a_kernel_that_is_not_installed_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 lies in a folder of flash-attn's name, and is not flash-attn."""
    monkeypatch.setattr(attention_needs.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert attention_needs.missing("varlen") is None
    for name, package in (("cudnn", "nvidia-cudnn-frontend"), ("flash_attention_4", "flash-attn-4")):
        with pytest.raises(ConfigError, match=f"attention={name} needs {package}: pip install {package}"):
            choose_kernel(name, torch.device("cuda"), torch.bfloat16)
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "interface.py").touch()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention_needs.missing("flash_attention_4") is None
    assert "pip install flash-attn " in str(attention_needs.missing("flash_attention_2"))
    for kernel in ("flash_attention_4", "flash_attention_2"):  # as hosts look for them
        module = str(attention_needs.module_of(kernel))
        assert (locate(module, [str(tmp_path)]) is None) == (kernel == "flash_attention_2")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k,\n"
         "    max_seqlen_q, max_seqlen_k): ...", None),
        ("def _flash_attn_bwd(dout, q, k, v, out, lse): ...", "its backward pass is not that of 4.0.0"),
        ("import no_such_compiler", "its import fails: No module named 'no_such_compiler'"),
    ],
)  # fmt: skip
def test_a_flash_attn_4_of_another_kind_is_not_called(
    source: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flash_attn" / "cute" / "interface.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that it is taken away again
        monkeypatch.delitem(sys.modules, name)
    for name in (attention_flash4.KEEP, attention_flash4.KEPT_IN):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    assert attention_flash4.unusable() == reason
    assert (tmp_path / "launcher" / "flash-attn-4").is_dir()  # where its kernels are kept
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    if reason is None:  # what goes wrong in it says what to type
        q = torch.zeros(2, 1, 32)
        call = make_layout([(0, 2)], [(0, 0)], padded=False).own
        with pytest.raises(TrainingError, match=r"AttributeError: [^$]*try  attention=cudnn"):
            attention_flash4.FlashAttn4().forward(q, q, q, call, 1.0, True)
    chosen, why = attention._fastest((9, 0))
    assert (chosen == "flash_attention_4") == (reason is None) and (reason is None or reason in why)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in attention_needs.KERNELS if attention_needs.missing(name) is None])
def test_flash_kernels_equal_the_cpu_reference(name: str) -> None:
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
