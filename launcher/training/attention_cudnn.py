"""cuDNN's flash attention as a Part, by its graph interface (package nvidia-cudnn-frontend), on Hopper.

PyTorch's own operators for it build a graph for every number of packed rows, which each micro-batch has another of.
Here sequences are ragged: a graph knows only upper bounds, rounded up, so that a run builds few. Ranges lie where they
lie in the packed rows; what no entry covers is neither read nor written.

Shapes: T packed rows, E entries of a call, n heads, n_kv key heads, d head size.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.training.attention_calls import Call
from launcher.training.attention_ways import Three

# Names of a graph's tensors, as numbers.
Q, K, V, OUT, STATS, DOUT, DQ, DK, DV, LENGTHS_Q, LENGTHS_K = range(1, 12)
AT = 20  # where a tensor's entries begin, in elements: AT + its number
ENTRIES, LENGTH, ROWS = 8, 128, 1024  # upper bounds are multiples of these
UPPER_LEFT, LOWER_RIGHT = "TOP_LEFT", "BOTTOM_RIGHT"  # cudnn.diagonal_alignment

OLDEST = 91900  # the oldest that was measured, PyTorch 2.11's


def unusable() -> str | None:
    """Why the installed package can't be used here, None where it can."""
    version = torch.backends.cudnn.version() or 0
    if version < OLDEST:
        return f"cuDNN {version} is older than {OLDEST}"
    try:
        import cudnn  # noqa: F401
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"its import fails: {error}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What a graph is built for."""

    backward: bool
    mask: str  # none, or causal to the upper left or to the lower right, where keys are more than queries
    entries: int
    max_q: int
    max_k: int
    rows_q: int  # of all entries, which bound the memory that a backward pass works in
    rows_k: int
    heads: int
    key_heads: int
    size: int
    strides: tuple[int, int, int]  # elements from a row to the next of q, k and v
    scale: float
    dtype: torch.dtype


class CudnnRagged:
    """launcher.training.attention_ways.Part, on the GPU that is current when it is made."""

    def __init__(self) -> None:
        import cudnn

        self.cudnn: Any = cudnn
        self.handle = cudnn.create_handle()
        self.graphs: dict[Key, tuple[Any, int]] = {}  # and bytes of workspace
        atexit.register(self.graphs.clear)  # or the package tells at length of each one that outlives the interpreter

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Of Part; the log-sum-exp lies as [T, n]."""
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
        key = _key((q, k, v), call, scale, causal, backward=False)
        self._run(key, {**_inputs(key, (q, k, v), call), OUT: out, STATS: lse})
        return out, lse

    def backward(
        self, grad: Tensor, tensors: Three, out: Tensor, lse: Tensor, call: Call, scale: float, causal: bool
    ) -> Three:
        """Of Part."""
        dq, dk, dv = (t.new_empty(t.shape) for t in tensors)
        key = _key(tensors, call, scale, causal, backward=True)
        inputs = {**_inputs(key, tensors, call), OUT: out, STATS: lse, DOUT: grad}
        self._run(key, {**inputs, DQ: dq, DK: dk, DV: dv})
        return dq, dk, dv

    def _run(self, key: Key, tensors: dict[int, Tensor]) -> None:
        if key not in self.graphs:
            graph = _build(self.cudnn, self.handle, key)
            self.graphs[key] = graph, max(1, graph.get_workspace_size())
        graph, size = self.graphs[key]
        device = tensors[Q].device
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(tensors, torch.empty(size, dtype=torch.uint8, device=device), handle=self.handle)


def bound(number: int, step: int) -> int:
    """The next of four sizes an octave that is a multiple of `step`: near bounds are no faster, only more to build."""
    grain = max(step, 1 << max(0, number.bit_length() - 3))
    return -(-number // grain) * grain


def _key(tensors: Three, call: Call, scale: float, causal: bool, *, backward: bool) -> Key:
    q, k, v = tensors
    return Key(
        backward=backward,
        mask="none" if not causal else UPPER_LEFT if call.square else LOWER_RIGHT,
        entries=bound(len(call.cu_q) - 1, ENTRIES),
        max_q=bound(call.max_q, LENGTH),
        max_k=bound(call.max_k, LENGTH),
        rows_q=bound(len(q), ROWS) if backward else 0,
        rows_k=bound(len(k), ROWS) if backward else 0,
        heads=q.shape[1],
        key_heads=k.shape[1],
        size=q.shape[2],
        strides=(q.stride(0), k.stride(0), v.stride(0)),
        scale=scale,
        dtype=q.dtype,
    )


def _inputs(key: Key, tensors: Three, call: Call) -> dict[int, Tensor]:
    """q, k and v, lengths and beginnings; the last two are computed once for all layers that share a call."""
    name = (key.entries, key.strides, key.heads, key.key_heads, key.size, key.backward)
    if name not in call.derived:
        call.derived[name] = _indices(key, call)
    return {Q: tensors[0], K: tensors[1], V: tensors[2], **call.derived[name]}


def _indices(key: Key, call: Call) -> dict[int, Tensor]:
    long_q, long_k = call.cu_q.diff(), call.cu_k.diff()
    both = (long_q > 0) & (long_k > 0)
    more = key.entries - len(long_q)
    bounds_q, bounds_k = (torch.cat((t, t[-1:].expand(more))) for t in (call.cu_q, call.cu_k))
    found = {n: torch.nn.functional.pad(t * both, (0, more)) for n, t in ((LENGTHS_Q, long_q), (LENGTHS_K, long_k))}
    for number, stride in _row_strides(key).items():
        found[AT + number] = (bounds_q if number in _OF_QUERIES else bounds_k) * stride
    return found


_OF_QUERIES = (Q, OUT, STATS)


def _row_strides(key: Key) -> dict[int, int]:
    """Of the tensors that have a beginning of their own: gradients and results lie as OUT and DK do."""
    q, k, v = key.strides
    mine, keys = key.heads * key.size, key.key_heads * key.size
    return {Q: q, K: k, V: v, OUT: mine, STATS: key.heads, **({DK: keys} if key.backward else {})}


def _build(cudnn: Any, handle: Any, key: Key) -> Any:
    """A graph of one call, ready to run."""
    kind, wide = cudnn.data_type, cudnn.data_type.FLOAT
    io = kind.BFLOAT16 if key.dtype == torch.bfloat16 else kind.HALF
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=wide, compute_data_type=wide, handle=handle)

    def numbers(uid: int, count: int) -> Any:
        return graph.tensor(
            name=f"numbers{uid}", dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind.INT32, uid=uid
        )

    strides = _row_strides(key)
    begins = {number: numbers(AT + number, key.entries + 1) for number in strides}

    def lay_out(uid: int, like: int) -> dict[str, Any]:
        """Shape, strides and beginnings of a tensor that lies as `like` does; the stride of entries is never used."""
        of_queries = like in _OF_QUERIES
        length, heads = (key.max_q, key.heads) if of_queries else (key.max_k, key.key_heads)
        size = 1 if like == STATS else key.size
        row = strides[like]
        return {"dim": [key.entries, heads, length, size], "stride": [length * row, size, row, 1], "uid": uid}

    def given(uid: int, like: int, data_type: Any = io) -> Any:
        return graph.tensor(name=f"given{uid}", data_type=data_type, ragged_offset=begins[like], **lay_out(uid, like))

    def result(tensor: Any, uid: int, like: int, data_type: Any = io) -> None:
        place = lay_out(uid, like)
        tensor.set_output(True).set_data_type(data_type).set_dim(place["dim"]).set_stride(place["stride"]).set_uid(uid)
        tensor.set_ragged_offset(begins[like])

    lengths = numbers(LENGTHS_Q, key.entries), numbers(LENGTHS_K, key.entries)
    _attention(cudnn, graph, key, given, result, lengths)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


def _attention(
    cudnn: Any, graph: Any, key: Key, given: Callable[..., Any], result: Callable[..., None], lengths: tuple[Any, Any]
) -> None:
    """Put the operation with its tensors into a graph."""
    options = {"attn_scale": key.scale, "use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    if key.mask != "none":
        options |= {"diagonal_alignment": getattr(cudnn.diagonal_alignment, key.mask), "diagonal_band_right_bound": 0}
    wide = cudnn.data_type.FLOAT
    q, k, v = (given(uid, uid) for uid in (Q, K, V))
    if not key.backward:
        out, stats = graph.sdpa(name="forward", q=q, k=k, v=v, generate_stats=True, **options)
        result(out, OUT, OUT)
        result(stats, STATS, STATS, wide)
        return
    options |= {"max_total_seq_len_q": key.rows_q, "max_total_seq_len_kv": key.rows_k}
    before = {"o": given(OUT, OUT), "dO": given(DOUT, OUT), "stats": given(STATS, STATS, wide)}
    gradients = graph.sdpa_backward(name="backward", q=q, k=k, v=v, **before, **options)
    for tensor, uid, like in zip(gradients, (DQ, DK, DV), (OUT, DK, DK), strict=True):
        result(tensor, uid, like)
