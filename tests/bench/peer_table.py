"""What the runs of tests/bench/against_peer.py come to: a table, and whether both sides' losses are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from launcher.estimates import Load
from launcher.planning.flops import flops
from tests.bench.peer_runs import Outcome
from tests.bench.speed_runs import LOADS, LORA, RERANKER, setting_of, times

LIMIT_TFLOPS = 790.0  # an H200's bf16 products at their best
ROWS = 4  # that LOADS are of
SEES = ("imgq",)  # the query is a picture: without a shared prefix every document brings it along
FIRST, MEAN = 0.05, 0.05  # largest difference of the first losses and of the means; bf16 moves a score of 4 by 0.02


def least(workload: str, *, shared: bool) -> tuple[float, float]:
    """Tokens and FLOPs of a row; without `shared` each document repeats the query."""
    load = LOADS[workload]
    words = (RERANKER, *LORA, *(("task=sft", "loss=cross_entropy") if workload == "chat" else ()))
    setting = setting_of(words)
    if not shared and load.key_rows:
        load = _alone(load, sees=workload in SEES)
    load = times(load, 1 / ROWS)
    return load.tokens, sum(passes.needed for passes in flops(setting, load).values())


def _alone(load: Load, *, sees: bool) -> Load:
    """The same rows when every document repeats the prefix; of `key_rows` and `tokens` it is known how long that is."""
    documents = load.documents // ROWS
    prefix = (load.key_rows - load.tokens) / documents / ROWS
    copies = documents if sees else 1
    return replace(
        load,
        tokens=round(load.key_rows - prefix * ROWS),
        key_rows=0,
        pairs=load.pairs + ROWS * (documents - 1) * prefix * (prefix + 1) / 2,
        visual=load.visual * copies,
        patches=load.patches * copies,
        patch_pairs=load.patch_pairs * copies,
    )


HEAD = (
    *("workload", "side", "setting", "s/group", "ratio", "groups/s", "tokens", "tokens/s", "GiB", "limit", "measured"),
    *("own", "wait", "loss 1", "loss n", "grad 1", "all s"),
)
_WIDTHS = (8, 8, 16, 7, 6, 8, 7, 8, 6, 6, 8, 6, 6, 7, 7, 7, 5)  # of single lines


def table(outcomes: Sequence[Outcome], rates: dict[str, float], *, heading: bool = True) -> str:
    """Aligned columns. tokens: of a group, as that side packs it; GiB: held by torch at most; limit, measured: share of
    the least time at LIMIT_TFLOPS, and at what products reached here; own: share of LIMIT_TFLOPS that its own packing
    makes use of; ratio: the workload's fastest peer over this."""
    order = sorted(outcomes, key=lambda o: list(LOADS).index(o.workload))
    rows = [HEAD] * heading + [_cells(outcome, outcomes, rates) for outcome in order]
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)] if heading else _WIDTHS
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"  {o.workload} {o.setting or o.side}: {o.note}" for o in order if o.note]
    said = ", ".join(f"{shape}: {rate:.0f}" for shape, rate in rates.items())
    return "\n".join([*lines, *notes, *([f"limit {LIMIT_TFLOPS:.0f} TFLOP/s; measured here {said}"] * heading)])


def _cells(outcome: Outcome, outcomes: Sequence[Outcome], rates: dict[str, float]) -> tuple[str, ...]:
    ours = outcome.side == "launcher"
    seconds = outcome.seconds
    tokens, own = least(outcome.workload, shared=ours)
    tokens = outcome.tokens / outcome.groups if outcome.tokens else tokens
    needed = least(outcome.workload, shared=True)[1]
    peers = [o.seconds for o in outcomes if o.workload == outcome.workload and o.side != "launcher" and o.seconds]
    values: list[tuple[float | None, str]] = [
        (seconds, ".3f"),
        (min(peers) / seconds if peers and seconds else None, ".2f"),
        (1 / seconds if seconds else None, ".2f"),
        (tokens, ",.0f"),
        (tokens / seconds if seconds else None, ",.0f"),
        (outcome.reserved_gib, ".1f"),
        (_share(needed, seconds, LIMIT_TFLOPS), ".1%"),
        (_share(needed, seconds, max(rates.values(), default=0.0)), ".1%"),
        (_share(own, seconds, LIMIT_TFLOPS), ".1%"),
        (outcome.wait_share, ".1%"),
        (outcome.losses[0] if outcome.losses else None, ".4f"),
        (outcome.losses[-1] if outcome.losses else None, ".4f"),
        (outcome.grad_norms[0] if outcome.grad_norms else None, ".3g"),
        (outcome.whole_s, ".0f"),
    ]
    named = (outcome.workload, outcome.side, outcome.setting if not ours else outcome.setting[:16])
    return (*named, *("-" if value is None else format(value, form) for value, form in values))


def _share(needed: float, seconds: float | None, tflops: float) -> float | None:
    return needed / (seconds * tflops * 1e12) if seconds and tflops else None


def parity(outcomes: Sequence[Outcome]) -> tuple[bool, str]:
    """Whether all losses of a workload agree with the fastest peer's, and how well: one line a run.

    The first step's loss is of the same weights and rows. Later ones tell that rows stay the same and that both learn
    alike; adapters begin with other random numbers on each side. How much losses differ from row to row is told, since
    only that makes their agreement mean something.
    """
    same, lines = True, []
    for workload in LOADS:
        peers = [o for o in outcomes if o.workload == workload and o.side != "launcher" and o.seconds]
        if not peers:
            continue
        peer = min(peers, key=lambda o: o.seconds or 0.0)
        for other in (o for o in outcomes if o.workload == workload and o is not peer and o.losses):
            pairs = list(zip(other.losses, peer.losses, strict=False))
            differences = [a - b for a, b in pairs]
            agrees = abs(differences[0]) <= FIRST and abs(fmean(differences)) <= MEAN
            same &= agrees
            largest = max(map(abs, differences))
            spread = max(peer.losses) - min(peer.losses)
            lines.append(
                f"{workload}: loss of {other.side} {other.setting[:40]} less that of {peer.side} {peer.setting}: "
                f"step 1 {differences[0]:+.4f}, mean of {len(pairs)} {fmean(differences):+.4f}, largest {largest:.4f} "
                f"(from step to step up to {spread:.3f}): {'same' if agrees else 'DIFFERENT'}"
            )
    return same, "\n".join(lines)
