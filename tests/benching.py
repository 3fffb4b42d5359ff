"""What the tests of the benchmark share.

The GPU's clock is stood in for by one that takes wall time on the processor, so that every case of
the suite, shrunk, goes through everything but the few calls to torch.cuda.
"""

import time

import torch

from convt_reduce._bench import _timing
from convt_reduce._bench._cases import all_cases
from convt_reduce._bench._peers import PEERS

CPU = torch.device("cpu")
CASES = all_cases()
BY_ID = {case.id: case for case in CASES}
# Compiling takes seconds per case: that is done for a few of them, in a test of its own.
PLAIN_PEERS = {name: peer for name, peer in PEERS.items() if not peer.compiled}


class OnCpu(_timing.Cuda):
    """The GPU's clock without a GPU: the same samples, taken on the wall clock."""

    def __init__(self):
        self.device, self.l2_bytes, self._flush = CPU, 2**16, None

    def free_bytes(self):
        return 3 * 2**20

    def synchronize(self):
        pass

    def graph(self, calls, keep=False):
        results = [call() for call in calls]
        del results
        return _timing.summary([self._between_events(call) for call in calls], 1)

    def peak_bytes(self, call):
        call()
        return 1000

    def _between_events(self, call):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start + 1e-9  # never nothing, however coarse the clock


def make_haste(monkeypatch):
    """As few repeats as there can be."""
    for name, value in {
        "MIN_REPEATS": 2,
        "MAX_REPEATS": 2,
        "MAX_COPIES": 3,
        "EAGER_CALLS": 2,
        "FLUSH_BYTES": 2**10,
        "SECONDS_PER_TIMING": 0.0,
    }.items():
        monkeypatch.setattr(_timing, name, value)
