"""Cross-entropy over the vocabulary in chunks: value and gradient against torch's own in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from launcher import arithmetic
from launcher.training.heads import AnswerLoss, ClassHead, YesNoHead
from launcher.training.token_loss import token_losses

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
VOCABULARY = 40


def tokens(answers: int, dtype: torch.dtype, *, width: int = 16, vocabulary: int = VOCABULARY) -> list[torch.Tensor]:
    """Hidden states, a weight, the ids wanted."""
    make = torch.Generator().manual_seed(answers)
    hidden = torch.randn(answers, width, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=make, dtype=torch.float64).to(dtype)
    return [hidden, weight, torch.randint(vocabulary, (answers,), generator=make)]


def plain(hidden: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(hidden @ weight.T, wanted, reduction="none")


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("answers", [0, 1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_of_tokens_in_chunks(
    monkeypatch: Any, trains: bool, chunk: int, answers: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(arithmetic, "LOGIT_BYTES", chunk * VOCABULARY * dtype.itemsize)
    assert arithmetic.logit_rows(VOCABULARY, dtype.itemsize) == chunk
    hidden, weight, wanted = tokens(answers, dtype)
    weight.requires_grad_(trains)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected, losses = plain(*exact, wanted), token_losses(hidden, weight, wanted)
    scale = torch.linspace(0.0, 2.0, answers)  # every token's gradient has its own factor
    (losses * scale).sum().backward()
    (expected * scale).sum().backward()
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    pairs = [(losses, expected), (hidden.grad, exact[0].grad), *([(weight.grad, exact[1].grad)] if trains else [])]
    for got, want in pairs:
        assert got is not None and want is not None and got.shape == want.shape
        torch.testing.assert_close(got.double(), want, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    assert (weight.grad is None) != trains
    assert answers < 2 or exact[0].grad.abs().sum() > 1, "there was a gradient to compare"


@pytest.mark.parametrize("trains", [True, False])
def test_without_a_gradient_the_losses_are_the_same(trains: bool) -> None:
    hidden, weight, wanted = tokens(5, torch.float32)
    weight.requires_grad_(trains)
    losses = token_losses(hidden, weight, wanted)
    with torch.no_grad():
        held = token_losses(hidden, weight, wanted)
    fixed = token_losses(hidden.detach(), weight.detach(), wanted)
    assert losses.requires_grad and not held.requires_grad and not fixed.requires_grad
    assert torch.equal(held, losses) and torch.equal(fixed, losses)


def test_only_the_weight_trains() -> None:
    hidden, weight, wanted = tokens(5, torch.float64)
    other = weight.clone().requires_grad_()
    weight.requires_grad_()
    token_losses(hidden.detach(), weight, wanted).sum().backward()
    plain(hidden.detach(), other, wanted).sum().backward()
    assert weight.grad is not None and hidden.grad is None
    torch.testing.assert_close(weight.grad, other.grad)


def test_a_frozen_weight_is_not_needed_again() -> None:
    """In the backward pass ZeRO-3 has partitioned it, or would gather it for nothing."""
    hidden, weight, wanted = tokens(5, torch.float64)
    other = hidden.detach().clone().requires_grad_()
    plain(other, weight, wanted).sum().backward()
    loss = token_losses(hidden, weight, wanted).sum()
    weight.zero_()
    loss.backward()
    torch.testing.assert_close(hidden.grad, other.grad)


def test_rounded_logits_move_a_loss_by_their_own_rounding_alone() -> None:
    """Bfloat16 has 8 bits: a logit is off by 1/512 of itself at most, so a loss by twice that, either way.

    Against float32 logits of the same hidden states and weight, as trainers that convert logits first have them too.
    """
    hidden, weight, wanted = tokens(600, torch.bfloat16, width=64, vocabulary=512)
    with torch.no_grad():
        weight /= 8
        hidden[::2] += 2 * weight[wanted[::2]]  # some that are likely
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    expected, losses = plain(*exact, wanted), token_losses(hidden, weight, wanted)
    expected.sum().backward()
    losses.sum().backward()
    off = (losses - expected).abs()
    assert (off <= 2 * logits.abs().amax(dim=1) / 512 + 1e-5).all() and off.max() > 1e-4
    assert (losses.sum() - expected.sum()).abs() < 2e-4 * expected.sum()  # up and down cancel
    error = (hidden.grad.float() - exact[0].grad).norm(dim=1) / exact[0].grad.norm(dim=1)
    assert error.mean() < 0.006 and error.max() < 0.03


def test_float16_keeps_small_slopes() -> None:
    """Of a token that is all but certain: 2,047 others of 5e-8 each, which float16 itself would round by a fifth."""
    weight = torch.zeros(2048, 4, dtype=torch.float16)
    weight[:, 0] = 1.0
    weight[7] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    hidden = torch.tensor([[0.0, 16.8, 0.0, 0.0]], dtype=torch.float16).requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    (token_losses(hidden, weight, torch.tensor([7])) * 4096).sum().backward()  # the loss's scale, as in training
    (plain(exact, weight.double(), torch.tensor([7])) * 4096).sum().backward()
    assert exact.grad is not None and exact.grad[0, 0] > 0.1 and exact.grad[0, 1] < -0.1
    # Float32 itself is off by 1 %: each of the others is half a step of a sum that is 1.
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=0.02, atol=0.0)


def test_heads_take_no_rows() -> None:
    """A micro-batch without documents or answers runs on its rank like the others' and gives every gradient, of 0."""
    hidden = torch.zeros(0, 8, requires_grad=True)
    linear = AnswerLoss(torch.nn.Linear(8, 5, bias=False))
    classes, choice = ClassHead(3, 8, torch.device("cpu")), YesNoHead(torch.randn(2, 8), train=True)
    for given, weight, shape in (
        (classes(hidden, None), classes.weight, (0, 3)),
        (choice(hidden, None), choice.rows, (0,)),
        (linear(hidden, torch.zeros(0, dtype=torch.int64)), linear.weight, (0,)),
    ):
        assert given.shape == shape
        given.sum().backward()
        assert weight.grad is not None and not weight.grad.any()
    assert hidden.grad is not None


def test_kernels_interpreted_equal_plain_torch() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.processes.interpreted_losses"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 18
