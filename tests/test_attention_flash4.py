"""What we hand to flash-attn 4 and take from it: its two functions in plain torch, in its own order and layouts.

Its kernels need a GPU (tests/gpu/test_gpu_kernels.py); which words go where, and what is kept, do not.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.errors import TrainingError
from launcher.training import attention_flash4, attention_ways
from launcher.training.attention import make_layout, packed_attention, padded_attention
from launcher.training.attention_calls import Call
from launcher.training.attention_flash4 import KEEP, KEPT_IN, FlashAttn4
from tests.attention_parts import PlainPart

# A group with a prefix of 5, and a lone prompt.
QUERIES, PREFIXES = [(0, 5), (5, 8), (8, 12), (12, 18)], [(0, 0), (0, 5), (0, 5), (12, 12)]


class Package:
    """flash_attn.cute.interface as it is in 4.0.0b36, by PlainPart; `error` is what its compiler stumbles over."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, list[str]()
        self.longest: set[tuple[int, int]] = set()

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        """(result [T, n, d], log-sum-exp [n, T])."""
        self._note("forward")
        assert how.pop("return_lse")
        out, lse = PlainPart().forward(q, k, v, *self._asked(how))
        return out, lse.t().contiguous()

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **how: Any
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k and v, and more where it is asked for more."""
        self._note("backward")
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
        return (*PlainPart().backward(dout, (q, k, v), out, lse.t(), *self._asked(how)), torch.empty(0))

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error

    def _asked(self, how: dict[str, Any]) -> tuple[Call, float, bool]:
        longest = how["max_seqlen_q"], how["max_seqlen_k"]
        self.longest.add(longest)
        call = Call(how["cu_seqlens_q"], how["cu_seqlens_k"], *longest)
        return call, how["softmax_scale"], how["causal"]


def part_on(package: Package, monkeypatch: pytest.MonkeyPatch) -> FlashAttn4:
    monkeypatch.setattr(attention_flash4, "_interface", lambda: package)
    return FlashAttn4()


def rows(size: int) -> list[Tensor]:
    """q, k and v of 18 rows; two query heads share a key head."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(18, heads, size, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    return [t.requires_grad_() for t in made]


@pytest.mark.parametrize("gathers", [True, False], ids=["gather", "cascade"])
def test_values_and_gradients_are_those_of_the_reference(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ways, "gathers_keys", lambda *sizes: gathers)
    package, (ours, exact) = Package(), (rows(32), rows(32))
    part = part_on(package, monkeypatch)
    kernel = functools.partial(packed_attention, make_part=lambda: part)
    got = kernel(*ours, make_layout(QUERIES, PREFIXES, padded=False), 0.2)
    wanted = padded_attention(*exact, make_layout(QUERIES, PREFIXES, padded=True), 0.2)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), ours),
        torch.autograd.grad((wanted * weight).sum(), exact),
        strict=True,
    ):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert package.calls == (["forward", "backward"] if gathers else ["forward"] * 2 + ["backward"] * 2)
    # Kernels for one block, which a longer micro-batch would not take, are never asked for.
    assert package.longest == {(512, 512)}


@pytest.mark.parametrize(
    ("size", "by_package"), [(32, True), (64, True), (128, True), (16, False), (72, False), (80, False)]
)
def test_only_heads_whose_gradients_are_right_go_backwards_by_it(
    size: int, by_package: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200 with 4.0.0b36: gradients of heads of 16 and 72 are wrong, of 32, 64 and 128 right. Heads
    of 80 were not measured, and are not trusted."""
    package, seen = Package(), list[int]()
    part = part_on(package, monkeypatch)
    plain = PlainPart()
    monkeypatch.setattr(
        part, "other", SimpleNamespace(backward=lambda *words: (seen.append(size), plain.backward(*words))[1])
    )
    call = make_layout(QUERIES, [(0, 0)] * len(QUERIES), padded=False).own
    tensors = rows(size)
    q, k, v = (t.detach() for t in tensors)
    out, lse = part.forward(q, k, v, call, 0.2, True)
    found = part.backward(torch.ones_like(out), (q, k, v), out, lse, call, 0.2, True)
    wanted = plain.backward(torch.ones_like(out), (q, k, v), out, lse, call, 0.2, True)
    torch.testing.assert_close(found, wanted)
    assert (package.calls == ["forward", "backward"], seen == [size]) == (by_package, not by_package)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AssertionError("(head_dim, head_dim_v)=(80, 80) is not supported"), True),
        (RuntimeError("ptxas failed"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
    ids=["assertion", "compiler", "memory"],
)
def test_what_it_stumbles_over_is_told_and_memory_is_told_elsewhere(
    error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, (q, k, v) = part_on(Package(error), monkeypatch), (t.detach() for t in rows(32))
    call = make_layout(QUERIES, [(0, 0)] * len(QUERIES), padded=False).own
    with pytest.raises(TrainingError if told else torch.OutOfMemoryError) as caught:
        part.forward(q, k, v, call, 0.2, True)
    assert str(error) in str(caught.value)
    assert ("try  attention=varlen" in str(caught.value)) == told


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache, and an environment that says nothing of kept kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (KEEP, KEPT_IN):
        monkeypatch.setenv(name, "0")  # so that it is taken away again
        monkeypatch.delenv(name)
    return tmp_path / "cache" / "launcher" / "flash-attn-4"


def test_compiled_kernels_are_kept_in_the_users_cache(fresh: Path) -> None:
    attention_flash4.unusable()
    assert (os.environ[KEEP], os.environ[KEPT_IN]) == ("1", str(fresh))


@pytest.mark.parametrize(("name", "value"), [(KEEP, "0"), (KEPT_IN, "/elsewhere")])
def test_what_the_user_says_of_kept_kernels_stays(
    name: str, value: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    attention_flash4.unusable()
    assert {key: os.environ.get(key) for key in (KEEP, KEPT_IN)} == {KEEP: None, KEPT_IN: None} | {name: value}


def test_a_cache_that_cannot_be_locked_is_left_alone(fresh: Path) -> None:
    """The package would wait 15 seconds for each kernel, and end the run."""
    fresh.parent.parent.mkdir(parents=True)
    fresh.parent.write_text("no folder")
    attention_flash4.unusable()
    assert KEEP not in os.environ and KEPT_IN not in os.environ
