"""Cross-entropy of answer tokens under the whole vocabulary, some rows of logits at a time.

Logits have the format of the model, as a matrix product rounds them; everything read off them is float32. They live in
one block of memory, where their slope (softmax - one-hot: the loss's gradient) replaces them, and the next chunk that.
On a GPU what lies between the products are Triton kernels (token_loss_kernels); elsewhere plain torch, which is also
what the kernels are tested against.

Shapes: A answer tokens, R rows of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from launcher.arithmetic import logit_rows
from launcher.kernels import without_triton

# A slope's rows are kept for the backward pass before the loss's scale is known, so in float16, whose smallest number
# is 6e-8, they are kept larger by this much. Sums with any head's weights stay far below float16's largest, 65,504.
LIFTED = {torch.float16: 1024.0}


def token_losses(hidden: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T)[wanted], [A], at least float32.

    Inputs: hidden [A, H], weight [V, H] of its dtype, wanted [A] ids; A may be 0. Gradients of hidden and weight are
    exact whatever each token's loss is multiplied by. A weight that does not train costs two products, since a row of
    hidden's gradient is its loss's factor times what the forward pass can already compute; one that trains costs four:
    its gradient sums over rows, so factors come first, and logits are computed again for them.
    """
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Again.apply(hidden, weight, wanted)  # type: ignore[no-any-return, no-untyped-call]
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _Ahead.apply(hidden, weight, wanted)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(hidden, weight, wanted)[0]


class _Ahead(torch.autograd.Function):
    """Of a frozen weight: [A, H] numbers are kept, and the backward pass multiplies each row by its factor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
        losses, kept = hidden.new_empty(len(hidden), dtype=_wide(hidden)), torch.empty_like(hidden)
        lift = torch.full_like(losses, LIFTED.get(hidden.dtype, 1.0))
        for rows, logits in _logits(hidden, weight):
            losses[rows], top, log_sum = statistics(logits, wanted[rows])
            slope_(logits, wanted[rows], top, log_sum, lift[rows])
            torch.mm(logits, weight, out=kept[rows])
        ctx.save_for_backward(kept)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        factor = grad / LIFTED.get(kept.dtype, 1.0)
        return torch.mul(kept, factor[:, None], out=torch.empty_like(kept)), None, None  # rounds once


class _Again(torch.autograd.Function):
    """Of a weight that trains: logits are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
        losses, tops, log_sums = _forward(hidden, weight, wanted)
        ctx.save_for_backward(hidden, weight, wanted, tops, log_sums)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        hidden, weight, *saved = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed over chunks in float32: in bf16 the later ones would be rounded away.
        of_weight = torch.zeros_like(weight, dtype=_wide(weight))
        _add_gradients(of_hidden, of_weight, hidden, weight, (*saved, grad))  # the block of logits is gone after it
        return of_hidden, of_weight.to(weight.dtype), None


def _add_gradients(
    of_hidden: Tensor | None, of_weight: Tensor, hidden: Tensor, weight: Tensor, by_row: tuple[Tensor, ...]
) -> None:
    """`by_row`: what slope_ is given beside logits, of all rows."""
    for rows, logits in _logits(hidden, weight):
        slope_(logits, *(values[rows] for values in by_row))
        if of_hidden is not None:
            torch.mm(logits, weight, out=of_hidden[rows])
        add_product_(of_weight, logits.T, hidden[rows])


def _forward(hidden: Tensor, weight: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    losses, tops, log_sums = (hidden.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(3))
    for rows, logits in _logits(hidden, weight):
        losses[rows], tops[rows], log_sums[rows] = statistics(logits, wanted[rows])
    return losses, tops, log_sums


def _logits(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits [R, V], in memory that the next ones take over."""
    size = logit_rows(len(weight), hidden.element_size())
    block = hidden.new_empty(min(size, len(hidden)), len(weight))
    for start in range(0, len(hidden), size):
        part = hidden[start : start + size]
        yield slice(start, start + len(part)), torch.mm(part, weight.T, out=block[: len(part)])


def statistics(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, largest logits, logs of the sum of exp(logit - largest)), each [R], at least float32.

    The last two are not added up: of a token that is all but certain, rounding would leave nothing of 1 - p.
    """
    if _has_kernels(logits):
        return _kernels().statistics(logits, wanted)  # type: ignore[no-any-return]
    wide = logits.to(_wide(logits))
    top = wide.amax(dim=-1)
    log_sum = (wide - top[:, None]).exp().sum(dim=-1).log()
    return log_sum - (wide.gather(1, wanted[:, None])[:, 0] - top), top, log_sum


def slope_(logits: Tensor, wanted: Tensor, top: Tensor, log_sum: Tensor, factor: Tensor) -> None:
    """Replaces logits [R, V] by (softmax - one-hot of wanted) * factor; all others [R]."""
    if _has_kernels(logits):
        _kernels().slope_(logits, wanted, top, log_sum, factor)
        return
    slope = (logits - top[:, None] - log_sum[:, None]).exp()
    slope[torch.arange(len(slope), device=slope.device), wanted] -= 1.0
    logits.copy_(slope * factor[:, None])


def add_product_(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """sums += a @ b, in one product where there is one for numbers that are wider than a's."""
    if sums.dtype == a.dtype:
        torch.addmm(sums, a, b, out=sums)
    elif sums.is_cuda:
        torch.addmm(sums, a, b, out_dtype=sums.dtype, out=sums)
    else:
        sums += a @ b


def _has_kernels(tensor: Tensor) -> bool:
    """On GPUs that Triton knows, and where a step is only looked at for what it would start (meta)."""
    old = tensor.is_cuda and without_triton(torch.cuda.get_device_capability(tensor.device)) is not None
    return not tensor.is_cpu and not old


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _kernels() -> Any:
    from launcher.training import token_loss_kernels  # Triton comes with torch's builds for GPUs only

    return token_loss_kernels
