"""When something else goes wrong: no memory is left, a thread or a signal comes between, a fork.

Each in a process of its own, since the fault is done to the whole process. The call gives an error
that can be caught or the right result, the next call is right, and nothing is kept.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

ops = torch.ops.convt_reduce

PRELUDE = """
import gc, os, resource, signal, sys, threading, time
import torch, convt_reduce
ops = torch.ops.convt_reduce
g = torch.Generator().manual_seed(1)
x = torch.randn(3, 8, 33, 35, generator=g)
w = torch.randn(8, 6, 3, 3, generator=g)
b = torch.randn(6, generator=g)
SETTINGS = ([2], [1], [1])

def everything():
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    y = ops.fused_mean(*leaves, *SETTINGS)
    return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))

expected = everything()

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
"""


def run(program, timeout=300, **environment):
    """Runs the program behind the prelude; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# ---- threads ------------------------------------------------------------------------------------


def test_eight_threads_at_once():
    """Each with its own inputs, forward and backward, no lock anywhere: nothing is shared."""
    inputs = [torch.randn(2, 5, 20 + i, 30, requires_grad=True) for i in range(8)]
    w = torch.randn(5, 4, 3, 3)

    def step(x):
        y = ops.fused_mean(x, w, None, [2], [1], [1])
        return y.detach(), *torch.autograd.grad(y.sum(), x)

    expected, wrong = [step(x) for x in inputs], []

    def work(first):
        for i in range(200):
            which = (first + i) % len(inputs)
            wrong.extend(
                i
                for a, e in zip(step(inputs[which]), expected[which], strict=True)
                if not torch.equal(a, e)
            )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_that_fail_beside_threads_that_do_not():
    """An error of one call is not seen by another."""
    x, w = torch.randn(2, 4, 9, 9), torch.randn(4, 3, 3, 3)
    expected, wrong = ops.fused_mean(x, w), []

    def right():
        wrong.extend(i for i in range(500) if not torch.equal(ops.fused_mean(x, w), expected))

    def bad():
        for i in range(500):
            with pytest.raises(RuntimeError, match=f"stride must be at least 1.*{-i}"):
                ops.fused_mean(x, w, stride=[-i])

    threads = [threading.Thread(target=f) for f in (right, bad) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fused_mean", "gradients", "_tap_spread"])
def test_no_memory_for_the_result(call):
    """A result or gradient beyond the limit of the address space: an error that says so."""
    out = run(
        f"""
        call = {call!r}
        limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**28
        one = torch.ones(1, 1, 1, 1)
        big = one.expand(1, 1, 2**14, 2**14)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for _ in range(3):
            try:
                if call == "fused_mean":
                    ops.fused_mean(one.expand(2**20, 1, 1, 1), one.expand(1, 2**20, 1, 1))
                elif call == "gradients":
                    y = ops.fused_mean(big.requires_grad_(), one)  # 1 GiB of gradient for 4 bytes
                    torch.autograd.grad(y.sum(), big)
                else:
                    ops._tap_spread(one.expand(2**15, 1, 1, 1), [2**12, 2**12], torch.float32)
            except RuntimeError as error:
                text = str(error)
            else:
                raise SystemExit("it did not run out of memory")
            assert same(everything(), expected)
        print(text)
        """
    )
    assert "memory" in out


def test_memory_that_runs_out_inside_a_call():
    """The kernels' own std::vector scratch: bad_alloc becomes an error, also from a pool thread.

    The limit is lowered until the first calls fail; those that do not must be right.
    """
    out = run(
        """
        wide = torch.randn(2, 64, 400, 400)
        many = torch.ones(64, 1, 41, 41)
        settings = (None, [1], [20])
        right = ops.fused_mean(wide, many, *settings)
        statm = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        failed = worked = 0
        # An arena grows by steps of up to 64 MiB; every step of the limit below is tried.
        for spare in range(0, 2**27, 2**21):
            resource.setrlimit(resource.RLIMIT_AS, (statm + spare, resource.RLIM_INFINITY))
            try:
                y = ops.fused_mean(wide, many, *settings)
            except (RuntimeError, MemoryError):
                failed += 1
            else:
                assert torch.equal(y, right)
                worked += 1
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert torch.equal(ops.fused_mean(wide, many, *settings), right)
        assert same(everything(), expected)
        print("ran", failed, worked)
        """
    )
    assert out.startswith("ran")


FAILING_MALLOC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
// Fails the n-th allocation of at least `least` bytes after fail_after(n, least); 0: none.
static _Atomic long left = 0;
static size_t least = 0;
void fail_after(long n, size_t bytes) { least = bytes; left = n; }
long fail_left(void) { return left; }
static int fails(size_t bytes) { return left > 0 && bytes >= least && --left == 0; }
#define REAL(type, name, arguments) static type(*real) arguments; \
  if (!real) real = (type(*) arguments)dlsym(RTLD_NEXT, #name)
void *malloc(size_t n) { REAL(void *, malloc, (size_t)); return fails(n) ? NULL : real(n); }
int posix_memalign(void **p, size_t a, size_t n) {
  REAL(int, posix_memalign, (void **, size_t, size_t));
  return fails(n) ? ENOMEM : real(p, a, n);
}
"""


def test_each_allocation_fails_once(tmp_path):
    """The n-th allocation of a call fails, for every n until the call gets through.

    Allocations of 1 KiB and more: those of torch's allocator and of the kernels' scratch memory.
    Smaller ones belong to Python and the dispatcher, which do not promise to survive.
    """
    source, library = tmp_path / "failing.c", tmp_path / "failing.so"
    source.write_text(FAILING_MALLOC)
    compiler = os.environ.get("CC", "gcc")
    build = [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    try:
        subprocess.run(build, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {compiler}")
    out = run(
        """
        import ctypes
        failing = ctypes.CDLL(os.environ["FAILING"])
        failing.fail_after.argtypes = (ctypes.c_long, ctypes.c_size_t)
        failing.fail_left.restype = ctypes.c_long
        torch.set_num_threads(1)
        wide = torch.randn(2, 16, 300, 300)  # several pieces, more than 12 bands: every scratch
        taps = torch.randn(16, 4, 15, 15)
        half = wide.bfloat16().movedim(1, -1).contiguous().movedim(-1, 1)
        sums = ops._tap_sums(wide, [15, 15], [1], [7])
        calls = {
            "fused_mean": lambda: ops.fused_mean(wide, taps, None, [1], [7]),
            "pair": lambda: ops._fused_mean_with_sums(wide, taps, None, [1], [7])[1],
            "_tap_sums": lambda: ops._tap_sums(half, [15, 15], [1], [7]),
            "_tap_spread": lambda: ops._tap_spread(sums, [300, 300], torch.float32, [1], [7]),
        }
        for name, call in calls.items():
            right = call()
            count = 0
            while True:
                failing.fail_after(count + 1, 1024)
                try:
                    y, error = call(), None
                except (RuntimeError, MemoryError) as caught:
                    y, error = None, str(caught)
                through = failing.fail_left() > 0
                failing.fail_after(0, 0)
                assert torch.equal(call(), right), name
                if through:
                    assert error is None and torch.equal(y, right), (name, count, error)
                    break
                assert error is not None or torch.equal(y, right), (name, count)
                count += 1
            print(name, count)
        before = resident_bytes()
        for _ in range(300):
            failing.fail_after(2, 1024)
            try:
                calls["fused_mean"]()
            except (RuntimeError, MemoryError):
                pass
        failing.fail_after(0, 0)
        assert resident_bytes() - before < 2**24
        """,
        LD_PRELOAD=str(library),
        FAILING=str(library),
    )
    counts = dict(line.split() for line in out.splitlines())
    assert counts.keys() == {"fused_mean", "pair", "_tap_sums", "_tap_spread"}
    assert all(int(count) >= 1 for count in counts.values()), counts


@pytest.mark.slow
def test_a_million_calls_keep_nothing():
    """Memory, threads and open files are where they were."""
    run(
        """
        small, one = torch.randn(2, 3, 4, 5), torch.randn(3, 2, 2, 2)
        leaf = one.clone().requires_grad_()

        def rounds(count):
            with torch.inference_mode():
                for _ in range(count):
                    ops.fused_mean(small, one)
            for _ in range(count // 50):
                ops.fused_mean(small, leaf).sum().backward()
                leaf.grad = None
            for _ in range(count // 50):
                try:
                    ops.fused_mean(small, one, stride=[0])
                except RuntimeError:
                    pass

        def held():
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        rounds(20_000)
        handles, before = held(), resident_bytes()
        rounds(1_000_000)
        assert held() == handles
        grown = resident_bytes() - before
        assert grown < 2**21, grown
        """,
        timeout=900,
    )


# ---- signals and forks --------------------------------------------------------------------------


def test_interrupted_during_a_long_call():
    """Ctrl-C raises KeyboardInterrupt once the call returns, as with PyTorch's own operators."""
    out = run(
        """
        one = torch.ones(1, 1, 1, 1)
        long = one.expand(1, 1, 2**13, 2**14)  # the time is that of 2**27 elements, the memory of 1
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            for _ in range(200):
                y = ops.fused_mean(long, one)
                assert y.item() == 1
        except KeyboardInterrupt:
            print("interrupted")
        timer.join()
        assert same(everything(), expected)
        """
    )
    assert out == "interrupted\n"


def test_killed_during_a_call_by_a_signal_with_a_handler():
    """A handler may itself call the operator."""
    out = run(
        """
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(same(everything(), expected)))
        for _ in range(50):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert same(everything(), expected)
        print(len(seen) > 0 and all(seen))
        """
    )
    assert out == "True\n"


@pytest.mark.parametrize("threads", [1, 2])
def test_fork_after_use(threads):
    """The child of a process that has used the operator gets the same bits.

    Those of the value: gradients hold torch's matrix products, whose bits may depend on the number
    of threads.

    With several threads the child must not use the parent's pool, which no fork copies; PyTorch's
    own operators hang there too, so the child asks for one thread, as DataLoader's workers do.
    """
    out = run(
        f"""
        torch.set_num_threads({threads})
        large = torch.randn(4, 8, 256, 256)
        first = ops.fused_mean(large, w)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            right = torch.equal(ops.fused_mean(x, w, b, *SETTINGS), expected[0])
            right = right and torch.equal(ops.fused_mean(large, w), first)
            os._exit(0 if right else 3)
        deadline = time.time() + 60
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            assert time.time() < deadline, "the child hangs"
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.equal(ops.fused_mean(large, w), first)
        print("both")
        """
    )
    assert out == "both\n"


def test_signals_are_not_ours():
    """Importing and calling leave the handlers as they were."""
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)]
    ops.fused_mean(torch.ones(1, 1, 2), torch.ones(1, 1, 1))
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)] == before
