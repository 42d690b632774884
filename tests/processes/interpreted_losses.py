"""The loss head's Triton kernels, interpreted on CPU (TRITON_INTERPRET=1), against plain torch; prints its cases.

A process of its own: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import itertools

import torch

from launcher.training import token_loss, token_loss_kernels

CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # a step of the format, where slopes are 1


def logits_of(dtype: torch.dtype, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five rows: ordinary ones, one that is all but certain, one whose first block is all -inf."""
    make = torch.Generator().manual_seed(columns)
    logits = 4 * torch.randn(5, columns, generator=make)
    wanted = torch.randint(columns, (5,), generator=make)
    wanted[1], wanted[2] = columns - 1, columns - 2  # in the last block, which the columns fill in part
    logits[1, wanted[1]] = 25.0
    logits[2, :16] = -torch.inf
    return logits.to(dtype), wanted


def main() -> None:
    """Both kernels, for every format, widths of one block and of several, factors of each row and one for all."""
    token_loss_kernels.BLOCK = 16
    factors = (torch.linspace(0.5, 2.0, 5), torch.tensor(3.0).expand(5))
    for dtype, columns, factor in itertools.product(CLOSE, (18, 53, 64), factors):
        logits, wanted = logits_of(dtype, columns)
        expected, got = token_loss.statistics(logits, wanted), token_loss_kernels.statistics(logits, wanted)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
        copy = logits.clone()
        token_loss.slope_(logits, wanted, *expected[1:], factor)
        token_loss_kernels.slope_(copy, wanted, *got[1:], factor)
        assert copy.isfinite().all() and copy.abs().sum() > 1
        torch.testing.assert_close(copy, logits, atol=max(2e-6, CLOSE[dtype] / 16), rtol=CLOSE[dtype])
        print(f"{dtype} {columns} {factor.stride(0)}")


if __name__ == "__main__":
    main()
