"""The four ways in which time is taken, each in one place.

graph   A CUDA graph of many calls, each on the next of several inputs; an input comes round again
        only after others of at least four times the second-level cache were read. Time per call is
        that of a replay divided by its calls: the GPU's work, without the host's.
single  One call between two events, after 256 MiB were written, as KernelBench times.
eager   Many calls in a row on the wall clock, up to the GPU's last: `eager`; up to the return of
        the last call: `host`, what the host spends on a call.
cpu     Calls on the wall clock, on the next input each time, with a stated number of threads.

A timing is a median with its quartiles. Repeats are at least MIN_REPEATS and then as many as the
time for one measurement allows, so that slow peers do not eat the run.
"""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]

MIN_REPEATS, MAX_REPEATS = 5, 40
SECONDS_PER_TIMING = 0.3
FLUSH_BYTES = 256 * 2**20  # written before a single call
CACHES_BETWEEN = 4  # how many second-level caches are read before an input comes round again
MAX_COPIES = 512
MIN_CALLS = 16  # in one graph: what starting a replay costs is divided by them
EAGER_CALLS = 100  # in a row: few enough that the queue of launches never makes the host wait
CPU_ROTATION_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, lower and upper quartile and least of ``repeats`` samples."""

    median_s: float
    q1_s: float
    q3_s: float
    min_s: float
    repeats: int
    calls: int  # that one sample is the mean of


def summary(samples: Sequence[float], calls: int) -> Timing:
    """The timing from samples in seconds, each taken over ``calls`` calls."""
    per_call = [sample / calls for sample in samples]
    if len(per_call) == 1:
        q1 = q3 = per_call[0]
    else:
        q1, _, q3 = statistics.quantiles(per_call, n=4, method="inclusive")
    return Timing(statistics.median(per_call), q1, q3, min(per_call), len(per_call), calls)


def repeated(sample: Callable[[], float]) -> list[float]:
    """Samples until there are MIN_REPEATS and the time is over, or MAX_REPEATS."""
    samples: list[float] = []
    stop = time.perf_counter() + SECONDS_PER_TIMING
    while len(samples) < MIN_REPEATS or (time.perf_counter() < stop and len(samples) < MAX_REPEATS):
        samples.append(sample())
    return samples


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector kept from running inside a sample."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Cuda:
    """Times calls on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.l2_bytes: int = getattr(properties, "L2_cache_size", 0) or 64 * 2**20
        self._flush: Tensor | None = None
        # All graphs share two tensors of torch's random state, made with the first graph and
        # dropped with the last. Made under inference_mode they would be of no use outside it:
        # hence a first graph that stays.
        with torch.inference_mode(False):
            one = torch.zeros(1, device=device)
            one.neg()  # what a kernel's first call loads cannot be loaded inside a capture
            self._first_graph = self._capture([one.neg], None)

    def copies(self, nbytes: int) -> int:
        """How many inputs of that size keep a rotation cold."""
        wanted = math.ceil(CACHES_BETWEEN * self.l2_bytes / max(1, nbytes)) + 1
        return min(MAX_COPIES, max(2, wanted))

    def is_cold(self, nbytes: int, copies: int) -> bool:
        """Whether enough else is read before an input comes round again."""
        return (copies - 1) * nbytes >= CACHES_BETWEEN * self.l2_bytes

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """What the GPU has left, the allocator's own reserve not counted."""
        return torch.cuda.mem_get_info(self.device)[0]

    def graph(self, calls: Sequence[Call], keep: bool = False) -> Timing:
        """Replays of one graph that makes every call in turn.

        keep: hold each result until the capture ends. A result that is dropped gives its memory to
        the next call's; where results are large they would all be written into the same cache.
        """
        calls = list(calls) * math.ceil(MIN_CALLS / len(calls))
        current = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for call in calls[:3]:  # libraries set themselves up outside the capture
                call()
        current.wait_stream(stream)
        self.synchronize()
        held: list[object] = []
        graph = self._capture(calls, stream, held if keep else None)
        for _ in range(2):
            graph.replay()
        samples = repeated(lambda: self._between_events(graph.replay))
        self.synchronize()
        del held
        return summary(samples, len(calls))

    def _capture(
        self,
        calls: Sequence[Call],
        stream: torch.cuda.Stream | None,
        held: list[object] | None = None,
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        # The outer context brings the stream back where a capture fails and graph() does not.
        with torch.cuda.stream(current), torch.cuda.graph(graph, stream=stream):
            for call in calls:
                result = call()
                if held is not None:
                    held.append(result)
                del result
        return graph

    def single(self, call: Call) -> Timing:
        """Single calls, each after the caches were overwritten."""
        flush = self._flush
        if flush is None:
            with torch.inference_mode(False):  # it outlives whatever mode this call is made in
                flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
            self._flush = flush
        for _ in range(3):
            call()

        def sample() -> float:
            flush.zero_()
            return self._between_events(call)

        with no_collection():
            return summary(repeated(sample), 1)

    def eager(self, call: Call) -> tuple[Timing, Timing]:
        """Wall time per call, and host time per call, of EAGER_CALLS in a row."""
        for _ in range(20):
            call()
        host: list[float] = []

        def sample() -> float:
            self.synchronize()
            start = time.perf_counter()
            for _ in range(EAGER_CALLS):
                call()
            host.append(time.perf_counter() - start)
            self.synchronize()
            return time.perf_counter() - start

        with no_collection():
            wall = repeated(sample)
        return summary(wall, EAGER_CALLS), summary(host, EAGER_CALLS)

    def peak_bytes(self, call: Call) -> int:
        """How far one call lifts the allocator's peak above what was held, its results included."""
        call()
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = call()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del result
        return peak

    def _between_events(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class Cpu:
    """Times calls on the processor."""

    def copies(self, nbytes: int) -> int:
        return min(MAX_COPIES, max(2, math.ceil(CPU_ROTATION_BYTES / max(1, nbytes)) + 1))

    def is_cold(self, nbytes: int, copies: int) -> bool:
        return (copies - 1) * nbytes >= CPU_ROTATION_BYTES

    def synchronize(self) -> None:
        pass

    def cpu(self, calls: Sequence[Call]) -> Timing:
        """Single calls on the wall clock, on one input after another."""
        turn = 0

        def sample() -> float:
            nonlocal turn
            call = calls[turn % len(calls)]
            turn += 1
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        sample()
        with no_collection():
            return summary(repeated(sample), 1)
