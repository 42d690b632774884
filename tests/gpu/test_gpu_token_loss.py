"""The loss head's Triton kernels on a GPU against cross-entropy of float32 logits, several blocks of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from launcher import arithmetic
from launcher.training.token_loss import token_losses

pytestmark = pytest.mark.gpu

VOCABULARY, WIDTH, ROWS = 20_003, 256, 128  # a vocabulary of no whole block of 16 bytes; rows of a block of logits
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative, of norms


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("answers", [0, 1, 300])
@pytest.mark.parametrize("dtype", CLOSE)
def test_losses_and_gradients(monkeypatch: Any, dtype: torch.dtype, answers: int, trains: bool) -> None:
    monkeypatch.setattr(arithmetic, "LOGIT_BYTES", ROWS * VOCABULARY * dtype.itemsize)
    make = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, device="cuda").div(8).to(dtype)
    wanted = torch.randint(VOCABULARY, (answers,), generator=make, device="cuda")
    hidden = torch.randn(answers, WIDTH, generator=make, device="cuda")
    hidden[::2] += 4 * weight[wanted[::2]].float()  # some tokens are likely
    hidden = hidden.to(dtype).requires_grad_()
    weight.requires_grad_(trains)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, wanted, reduction="none")
    losses = token_losses(hidden, weight, wanted)
    scale = torch.linspace(0.5, 2.0, answers, device="cuda")
    (losses * scale).sum().backward()
    (expected * scale).sum().backward()
    pairs = [(losses, expected), (hidden.grad, exact[0].grad), *([(weight.grad, exact[1].grad)] if trains else [])]
    for got, want in pairs:
        assert got is not None and want is not None and got.shape == want.shape
        # What is left of a likely token's loss and gradients moves with its logit, 16 here, by whole roundings of it:
        # where it is the only answer, it is held to the size that an unlikely one has.
        assert (got - want).norm() <= CLOSE[dtype] * max(want.norm(), 0.5)
    assert answers == 0 or exact[0].grad.norm() > 0.01
