"""Steps of a run, learning rates of its parts, sizes: the plan shows them and training uses the same rule.

Standard library only.
"""

from __future__ import annotations

import math

from launcher.spec import OptimConfig, TrainConfig

LOGIT_BYTES = 640 * 2**20  # of logits over the vocabulary that task=sft has at a time: 2,176 rows of Qwen3's in bf16
# Parameters of a model whose random weights are made all at once; an 80 GB GPU holds so many in bf16, with room for a
# shard. Those of a larger one are made module by module, each where it stays.
MOST_WHOLE = 32_000_000_000


def steps_per_epoch(rows: int, global_size: int) -> int:
    """Batches an epoch, the last one maybe smaller."""
    return math.ceil(rows / global_size)


def total_steps(train: TrainConfig, per_epoch: int) -> int:
    """Optimizer steps of the whole run; part of an epoch counts up to whole steps.

    Example:
        >>> total_steps(TrainConfig(epochs=1.1), per_epoch=10)
        11
    """
    return train.max_steps or _ceil(train.epochs * per_epoch)


def warmup_steps(optim: OptimConfig, total: int) -> int:
    """Warm-up steps: given, or a ratio of all steps, rounded up."""
    return _ceil(total * optim.warmup_ratio) if optim.warmup_steps is None else optim.warmup_steps


def peak_rate(optim: OptimConfig, part: str, lr: float) -> float:
    """Peak learning rate of a part of the model: its own, else `lr`; embeddings go with the language model.

    Example:
        >>> peak_rate(OptimConfig(lr_language=1e-5), "embeddings", 1e-4)
        1e-05
    """
    own: float | None = getattr(optim, f"lr_{'language' if part == 'embeddings' else part}")
    return lr if own is None else own


def smaller_micro_batch(max_tokens: int, failed: int) -> int:
    """`batch.max_tokens` after a micro-batch of `failed` tokens was too large: three quarters, in whole 64s.

    Example:
        >>> smaller_micro_batch(16384, 10833), smaller_micro_batch(50, 60)
        (8064, 37)
    """
    less = min(max_tokens, failed) * 3 // 4
    return max(1, less // 64 * 64 or less)


def logit_rows(vocabulary: int, width: int) -> int:
    """Answer tokens whose logits, of `width` bytes each, exist at a time: in whole 128s, the tiles of a GPU's products.

    Example:
        >>> logit_rows(151936, 2), logit_rows(151936, 4)
        (2176, 1024)
    """
    rows = LOGIT_BYTES // (width * vocabulary)
    return rows // 128 * 128 or max(1, rows)


def gathers_keys(rows: int, key_rows: int) -> bool:
    """Whether attention copies the keys of shared prefixes for every document, rather than make a second call.

    `rows` of a micro-batch, `key_rows` that its segments attend to together. A copy and its gradient cost about
    15 ns on an H200 for 8 key heads of 128, a second call 40 ns a row.

    Example:
        >>> gathers_keys(14_600, 20_400), gathers_keys(15_500, 71_000)  # prefixes of 120 and of 1,060 tokens
        (True, False)
    """
    return key_rows <= 2 * rows


def _ceil(value: float) -> int:
    return math.ceil(round(value, 6))  # 1.1 * 10 is a little more than 11 in binary
