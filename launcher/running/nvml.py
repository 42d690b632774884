"""What the NVIDIA driver tells of the GPUs of a run, through NVML; what it refuses is None."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

GIB = 2**30
# Why the clocks are lower than they could be: nvmlClocksEventReason* of nvml.h, named as nvidia-smi names them.
THROTTLE = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}


def throttle_names(bits: int) -> list[str]:
    """Names of the reasons in NVML's mask, lowest bit first; a bit of a later driver keeps its number.

    Example:
        >>> throttle_names(0x24), throttle_names(0x8001)
        (['sw_power_cap', 'sw_thermal_slowdown'], ['gpu_idle', 'bit_0x8000'])
    """
    return [THROTTLE.get(1 << n, f"bit_{1 << n:#x}") for n in range(bits.bit_length()) if bits >> n & 1]


class Gpus:
    """The GPUs with these numbers (the driver's, as `nvidia-smi` counts; the place in the list is the local rank)."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.notes: list[str] = []  # why there is nothing to see
        self._nvml: Any = None
        self._handles: list[tuple[int, Any]] = []
        if not numbers:
            self.notes.append("no GPU is watched: the run uses none on this host")
            return
        try:
            import pynvml
        except ImportError as error:
            self.notes.append(f"no GPU is watched: {error}; pip install nvidia-ml-py")
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.notes.append(f"no GPU is watched: {self._no_driver(error)}")
            return
        self._handles = [(number, handle) for number in numbers if (handle := self._find(number)) is not None]

    def _no_driver(self, error: Exception) -> str:
        if isinstance(error, self._nvml.NVMLError_LibraryNotFound):
            return (
                "libnvidia-ml.so.1 is not found; install the NVIDIA driver, or start the container with "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        return f"NVML says: {error}"

    def _find(self, number: int) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(number)
        except self._nvml.NVMLError as error:
            self.notes.append(f"GPU {number} is not watched: NVML says: {error}")
            return None

    def look(self) -> list[dict[str, Any]]:
        """One entry a GPU."""
        return [{"index": number, **self._look_at(handle)} for number, handle in self._handles]

    def _look_at(self, gpu: Any) -> dict[str, Any]:
        nvml, ask = self._nvml, self._ask
        memory = ask(  # the first, as nvidia-smi: without what the driver keeps for itself
            lambda: nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2),
            lambda: nvml.nvmlDeviceGetMemoryInfo(gpu),
        )
        power = ask(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        limit = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
        throttle = ask(  # the second: drivers before 535
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        )
        return {
            "name": ask(lambda: nvml.nvmlDeviceGetName(gpu)),
            "uuid": ask(lambda: nvml.nvmlDeviceGetUUID(gpu)),
            "util_percent": ask(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            "memory_used_gib": None if memory is None else round(memory.used / GIB, 3),
            "memory_total_gib": None if memory is None else round(memory.total / GIB, 3),
            "sm_clock_mhz": ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            "power_w": None if power is None else round(power / 1000, 1),
            "power_limit_w": None if limit is None else round(limit / 1000, 1),
            "temperature_c": ask(  # the first is gone with CUDA 14, the second is new
                lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                lambda: nvml.nvmlDeviceGetTemperatureV(gpu, nvml.NVML_TEMPERATURE_GPU),
            ),
            "throttle": None if throttle is None else throttle_names(throttle),
        }

    def _ask(self, *ways: Callable[[], Any]) -> Any:
        """The answer of the first way that the driver and this version of pynvml know; None when there is none."""
        for way in ways:
            try:
                return way()
            except (self._nvml.NVMLError, AttributeError):
                continue
        return None
