"""What `profile=TOOL` records with: PyTorch's profiler, nsys, DeepSpeed's FLOPs profiler and communication logger."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from launcher.rundir import write_atomic
from launcher.training.runtime import Rank

TABLE_ROWS = 60


@dataclass(frozen=True, slots=True)
class Context:
    """What recorders may need."""

    folder: Path
    rank: Rank
    engine: Any


@dataclass(frozen=True, slots=True)
class Recording:
    """What one rank wrote: files, how they are opened, numbers for the event."""

    paths: tuple[Path, ...] = ()
    open: str = ""
    numbers: dict[str, float] | None = None
    failure: str = ""  # why there are no files


class Recorder(Protocol):
    """Records from the moment it is made until `stop`, on one rank."""

    def label(self, name: str) -> AbstractContextManager[Any]:
        """Names what runs inside: a part of a step, or `step N`."""
        ...

    def stop(self, steps: range) -> Recording:
        """Ends recording and writes what was recorded in `steps`."""
        ...


class TorchRecorder:
    """PyTorch's profiler: a trace with every operator and kernel, and a table of the dearest."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._on_gpu = context.rank.device.type == "cuda"
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def label(self, name: str) -> AbstractContextManager[Any]:
        """A row of the trace."""
        return torch.profiler.record_function(name)

    def stop(self, steps: range) -> Recording:
        """torch.rankN.stepsA-B.json.gz and torch.rankN.txt."""
        self._profiler.stop()
        name, folder = f"torch.rank{self._context.rank.rank}", self._context.folder
        trace = folder / f"{name}.steps{steps[0]}-{steps[-1]}.json.gz"
        folder.mkdir(exist_ok=True)
        aside = trace.with_name(f".{trace.name}")
        try:
            self._profiler.export_chrome_trace(str(aside))
            os.replace(aside, trace)
        finally:
            aside.unlink(missing_ok=True)  # a half of it would keep a full disk full
        key = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        rows = self._profiler.key_averages().table(sort_by=key, row_limit=TABLE_ROWS, max_name_column_width=80)
        table = folder / f"{name}.txt"
        write_atomic(table, f"{span(steps)} of rank {self._context.rank.rank}, sorted by {key}\n{rows}\n")
        return Recording((trace, table), "drag the .json.gz into https://ui.perfetto.dev; the .txt is the summary")


class NsysRecorder:
    """Tells the nsys around this rank when to record; `launcher.training.nsys` tells of the file that nsys writes."""

    def __init__(self, context: Context) -> None:
        torch.cuda.synchronize(context.rank.device)
        torch.cuda.profiler.start()
        self._device = context.rank.device

    def label(self, name: str) -> AbstractContextManager[Any]:
        """An NVTX range."""
        return torch.cuda.nvtx.range(name)

    def stop(self, steps: range) -> Recording:
        """Ends the range that nsys captures, all kernels of the steps inside."""
        torch.cuda.synchronize(self._device)
        torch.cuda.profiler.stop()
        return Recording()


class FlopsRecorder:
    """DeepSpeed's FLOPs profiler around each forward pass of one step, added up.

    Not by its section in DeepSpeed's configuration: that counts the last micro-batch of a step alone, and makes every
    step of the run wait for its timers.
    """

    def __init__(self, context: Context) -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        self._context, self._module = context, context.engine.module
        self._profiler = FlopsProfiler(self._module)
        self._passes = 0

    def label(self, name: str) -> AbstractContextManager[Any]:
        """Counts in forward passes only: a recomputed layer would count twice."""
        return self._counted() if name == "forward" else nullcontext()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        from deepspeed.runtime.zero.linear import zero3_linear_wrap

        by_zero3 = F.linear is zero3_linear_wrap
        self._profiler.start_profile()
        if by_zero3:  # a Python function around matmul, which is counted: with it every layer would count twice
            F.linear = zero3_linear_wrap
        if self._passes == 0:
            self._profiler.reset_profile = lambda: None  # later passes add to the first
            for module in self._module.modules():  # DeepSpeed takes what ZeRO-3 shards for empty
                module.__params__ = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
        self._passes += 1
        yield
        self._profiler.stop_profile()

    def stop(self, steps: range) -> Recording:
        """deepspeed.rank0.txt and the totals."""
        profiler, folder = self._profiler, self._context.folder
        path = folder / f"deepspeed.rank{self._context.rank.rank}.txt"
        folder.mkdir(exist_ok=True)
        numbers = {
            "flops": profiler.get_total_flops(),
            "macs": profiler.get_total_macs(),
            "params": profiler.get_total_params(),
            "latency_s": profiler.get_total_duration(),
        }
        with contextlib.redirect_stdout(io.StringIO()) as report:
            profiler.print_model_profile(profile_step=steps[0], top_modules=5)
        profiler.end_profile()
        lines = report.getvalue().splitlines()
        known = [line for line in lines if " of model = " not in line]  # of model parallelism, which there is none of
        write_atomic(path, self._head(steps[0]) + "\n".join(known) + "\n")
        return Recording((path,), "any text viewer", numbers)

    def _head(self, step: int) -> str:
        if self._module.padded:
            attention = "Attention is counted with its padding."
        else:
            attention = "Attention's own FLOPs are missing: DeepSpeed does not know the flash kernel that computes it."
        return (
            f"Forward passes of step {step} on rank 0, {self._passes} micro-batches added up. {attention}\n"
            "Counting waits for the GPU at every module, so latencies are longer than in other steps.\n"
        )


class CommsRecorder:
    """DeepSpeed's communication logger, switched on inside the chosen steps only."""

    def __init__(self, context: Context) -> None:
        import deepspeed.comm

        self._context = context
        _mend_comms_timers()
        deepspeed.comm.configure(prof_all=True, verbose=False)
        deepspeed.comm.reset_log()

    def label(self, name: str) -> AbstractContextManager[Any]:
        """Logs inside `step N`."""
        return self._logged() if name.startswith("step ") else nullcontext()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        import deepspeed.comm

        deepspeed.comm.configure(enabled=True)
        yield
        deepspeed.comm.configure(enabled=False)

    def stop(self, steps: range) -> Recording:
        """comms.txt, by rank 0; collective."""
        import deepspeed.comm

        rank, logged = self._context.rank, deepspeed.comm.comms_logger.comms_dict
        counts = [(op, [(size, entry[0]) for size, entry in sorted(sizes.items())]) for op, sizes in logged.items()]
        alike = all(one == counts for one in rank.gather(counts))
        with contextlib.redirect_stdout(io.StringIO()) as report:
            # Its comparison of ranks meets the others once a row: where rows differ it would never end.
            deepspeed.comm.log_summary(show_straggler=alike)
        if rank.rank != 0:
            return Recording()
        path = self._context.folder / "comms.txt"
        write_atomic(path, _comms_head(steps, rank, alike) + report.getvalue())
        return Recording((path,), "any text viewer")


def _mend_comms_timers() -> None:
    """DeepSpeed 0.19.8 never resets the timers of its communication logger: every call would be told the time of all
    calls before it as well, and take longer to add them up. tests/test_profile.py sees when that is mended."""
    from deepspeed.comm import comm
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    class Timers(SynchronizedWallClockTimer):  # type: ignore[misc]
        class Timer(SynchronizedWallClockTimer.Timer):  # type: ignore[misc]
            def elapsed(self, reset: bool = True) -> float:
                return float(super().elapsed(reset=True))

    comm.timers = Timers()


def _comms_head(steps: range, rank: Rank, alike: bool) -> str:
    lines = [f"DeepSpeed's collectives in {span(steps)} as rank 0 of {rank.world_size} saw them."]
    if rank.device.type == "cuda":
        lines.append("Each was waited for, so that nothing overlaps and these steps were slower than others.")
    else:
        lines.append("On CPU, a call that DeepSpeed leaves running counts only until it returns.")
    lines.append("A time has in it the wait for the slowest rank; that share is the straggler's in the second table.")
    lines.append("Not seen: collectives that go past deepspeed.comm, such as the launcher's own small sums over ranks.")
    if not alike:
        lines.append("Ranks made different calls, so the second table is left out.")
    return "\n".join(lines) + "\n\n"


def span(steps: range) -> str:
    """`step 10` or `steps 10 to 12`."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


RECORDERS: dict[str, Callable[[Context], Recorder]] = {
    "torch": TorchRecorder,
    "nsys": NsysRecorder,
    "deepspeed": FlopsRecorder,
    "comms": CommsRecorder,
}
