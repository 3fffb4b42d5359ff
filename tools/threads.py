"""The threaded part of the CPU half, with every loop on several threads and several calls at once.

Run under ThreadSanitizer by tools/sanitize_cpu.sh thread; it compares bits, so it is a test by
itself too. torch's intra-op pool is OpenMP, whose barriers ThreadSanitizer does not see: the calls
therefore come from Python threads, each with a pool of one thread, and share their inputs; and the
loop body is run by several pool threads in a second part, whose reports are judged by where they
point.
"""

import argparse
import itertools
import sys
import threading

import torch

import convt_reduce  # noqa: F401

ops = torch.ops.convt_reduce
SHAPES = (
    ((2, 6, 33, 35), (6, 4, 3, 3), (2, 1, 1)),
    ((3, 64, 9, 11), (64, 4, 3, 2), (2, 1, 1)),
    ((1, 2, 300, 260), (2, 3, 3, 3), (2, 1, 1)),
    ((2, 3, 70000), (3, 2, 5), (1, 2, 0)),
    ((2, 2, 8, 7, 9), (2, 2, 5, 4, 5), (1, 2, 0)),
)


def everything(x, w, settings):
    lists = [[s] for s in settings]
    y, sums = ops._fused_mean_with_sums(x, w, None, *lists)
    size = list(x.shape[2:])
    return (
        y,
        sums,
        ops._tap_spread(sums, size, sums.dtype, *lists),
        ops.fused_mean(x, w, None, *lists),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool", type=int, default=1, help="threads of torch's own pool")
    options = parser.parse_args()
    torch.set_num_threads(options.pool)
    torch.manual_seed(0)
    problems, wrong = [], []
    for (x, w, settings), dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        for layout in (lambda t: t, lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1)):
            given = layout(torch.randn(x).to(dtype)), torch.randn(w).to(dtype), settings
            problems.append((given, everything(*given)))

    def work(first: int) -> None:
        torch.set_num_threads(options.pool)
        for i in range(options.rounds * len(problems)):
            given, expected = problems[(first + i) % len(problems)]
            found = everything(*given)
            wrong.extend(a for a, b in zip(found, expected, strict=True) if not torch.equal(a, b))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(options.threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    calls = options.threads * options.rounds * len(problems)
    print(f"{calls} rounds of 4 operators on {options.threads} threads, {len(wrong)} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
