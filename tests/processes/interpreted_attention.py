"""Attention's Triton kernels, interpreted on CPU (TRITON_INTERPRET=1), against plain torch; prints its cases.

A process of its own: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import itertools

import torch

from launcher.training import attention_kernels, attention_rows

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def main() -> None:
    """All kernels, in both orders of the log-sum-exp, for heads that fill their block and heads that don't."""
    attention_kernels.HEADS, attention_kernels.COLUMNS, attention_kernels.NARROW = 4, 32, 32
    for dtype, heads, size, turned in itertools.product(CLOSE, (3, 7), (12,), (False, True)):
        generator = torch.Generator().manual_seed(heads)
        out, other = (torch.randn(6, heads, size, generator=generator).to(dtype) for _ in range(2))
        lse, other_lse = (30 * torch.randn(6, heads, generator=generator) for _ in range(2))
        if turned:  # as flash kernels keep it
            other_lse = other_lse.t().contiguous().t()
        rows = torch.tensor([4, 1, 2], dtype=torch.int32)
        expected, got = [(t[0].clone(), t[1].clone()) for t in [(out, lse)] * 2]
        attention_rows.merge_(*expected, other, other_lse, rows)
        attention_kernels.merge_(*got, other, other_lse, rows)
        assert not expected[0][rows].equal(out[rows]) and expected[0][[0, 3, 5]].equal(out[[0, 3, 5]])
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        attention_rows.add_(expected[0], other, rows)
        attention_kernels.add_(got[0], other, rows)
        torch.testing.assert_close(got[0], expected[0], atol=CLOSE[dtype], rtol=2 * CLOSE[dtype])
        rows = torch.tensor([0, 1, 5, 0, 2, 0, 4])
        order = rows.sort(stable=True)
        begins = torch.searchsorted(order.values, torch.arange(7))
        gathered = [t[rows] for t in (out, other)]
        summed = attention_kernels.sum_rows(*gathered, order.indices, begins)
        for ours, theirs in zip(summed, attention_rows.sum_rows(*gathered, 6, rows, {}), strict=True):
            assert theirs[0].any() and not theirs[3].any()
            torch.testing.assert_close(ours, theirs, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        print(f"{dtype} {heads} {size} {turned}")


if __name__ == "__main__":
    main()
