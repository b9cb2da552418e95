"""The measuring instruments: GPU time by events, host time by the clock, memory, bandwidth, and arms that take turns."""

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import launches

# A millisecond or so at any clock a GPU has: longer than the host needs to enqueue one eager chain.
_HEAD_START_CYCLES = 2_000_000
_COPY_BYTES = 2**31


class Sample(NamedTuple):
    """One timed call: milliseconds of GPU time, and milliseconds of host time until the call returned."""

    gpu_ms: float
    host_ms: float


def interleave(
    arms: dict[str, Callable[[], object]], measure: Callable[[Callable], Sample], repeats: int
) -> dict[str, list[Sample]]:
    """Measure every arm once a round, each round beginning with the next arm, so that none always follows the same other.

    A GPU at its power limit runs slower the warmer it is, so only arms of the same rounds can be compared.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(repeats):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            samples[name].append(measure(arms[name]))
    return samples


def summary(samples: list[Sample]) -> dict:
    """Medians and the raw values they are medians of, in milliseconds to the tenth of a microsecond."""
    gpu, host = ([round(milliseconds, 4) for milliseconds in column] for column in zip(*samples))
    return {"gpu_ms": statistics.median(gpu), "host_ms": statistics.median(host), "raw_gpu_ms": gpu, "raw_host_ms": host}


class CudaMeter:
    """Measures calls on the current CUDA device and stream."""

    @functools.cached_property
    def _pool(self) -> torch.Tensor:
        """Four times what L2 holds."""
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        return torch.zeros(4 * l2_bytes, dtype=torch.uint8, device="cuda").view(torch.float32)

    @staticmethod
    def synchronisations(call: Callable) -> int:
        """How often `call` makes the host wait for the GPU, as far as torch knows."""
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    def seconds(self, call: Callable) -> float:
        """Seconds from an idle GPU to an idle GPU."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def peak(self, call: Callable) -> tuple[object, int]:
        """The result of a call, and the most bytes that were allocated while it ran, weights and inputs included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated()

    def time(self, call: Callable) -> Sample:
        """A long call from an idle GPU on.

        The host time is that of enqueuing, unless the GPU is so far behind that the launch queue is full.
        """
        torch.cuda.synchronize()
        return self._timed(call)

    def time_cold(self, call: Callable) -> Sample:
        """A short call that finds none of its data in L2, with the host far enough ahead that no launch is waited for."""
        torch.cuda.synchronize()
        self._pool.sum()  # read, not written: dirty lines would be written back during the call
        torch.cuda._sleep(_HEAD_START_CYCLES)
        return self._timed(call)

    def _timed(self, call: Callable) -> Sample:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        began = time.perf_counter()
        result = call()  # kept until the GPU is done: freeing is not part of the call
        host_s = time.perf_counter() - began
        end.record()
        end.synchronize()
        del result
        return Sample(start.elapsed_time(end), 1e3 * host_s)

    def kernels(self, call: Callable) -> list[tuple[str, float]]:
        """Name and microseconds of everything that a call runs on the GPU, in order."""
        return launches.profile(call)

    def copy_bandwidth(self, repeats: int = 20) -> float:
        """Bytes a second, read and written, of a device-to-device copy far larger than L2: a median."""
        count = min(_COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
        source = torch.zeros(count, dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        times = [self.time_cold(lambda: target.copy_(source)).gpu_ms for _ in range(repeats + 1)]
        return 2 * count / (1e-3 * statistics.median(times[1:]))
