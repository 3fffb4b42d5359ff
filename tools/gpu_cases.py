"""Small calls that together run every kernel of the CUDA half: what the sanitizers are given.

    compute-sanitizer --tool memcheck python tools/gpu_cases.py
    python tools/gpu_cases.py --instantiations       which kernels of the library were not run
    python tools/gpu_cases.py --cover FILE           a few of the cases that run as many kernels,
    compute-sanitizer --tool racecheck python tools/gpu_cases.py --of FILE    and only these

A case is a dtype, a layout and a shape, each with value, tap sums, both derivatives and spread. The
results are compared with the closed form, so that a list that computes nonsense fails here too.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parent.parent / "tests")
import layouts  # noqa: E402
import reference  # noqa: E402

import convt_reduce  # noqa: E402
from convt_reduce import _products  # noqa: E402

ops = torch.ops.convt_reduce
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def channels_last_shifted(x):
    """Channels as neighbours, from an address that is aligned to no more than one element."""
    if x.dim() < 4:
        return layouts.shifted(1)(x)
    order = [0, *range(2, x.dim()), 1]
    return layouts.shifted(1)(x.permute(order).contiguous()).permute(
        0, x.dim() - 1, *range(1, x.dim() - 1)
    )


LAYOUTS = (
    layouts.contiguous,
    layouts.channels_last,
    channels_last_shifted,
    layouts.shifted(1),  # not aligned for any wide load
    layouts.shifted(2),  # two halves make a word
    layouts.sliced,
    layouts.every_second,
    layouts.reversed_axes,
    layouts.expanded_all,
)
# (input, channels out, groups, kernel, stride, padding, output_padding)
SHAPES = (
    ((2, 8, 7, 7), 6, 1, 3, 2, 1, 1),  # small planes
    ((3, 4, 8, 8), 6, 2, 3, 2, 1, 1),
    ((2, 64, 5, 6), 70, 1, 3, 2, 1, 1),  # more channels than a tile
    ((2, 3, 33, 35), 4, 1, 3, 2, 1, 1),  # rows around a warp
    ((2, 8, 40, 300), 4, 1, 3, 2, 1, 1),  # columns that stay with their threads
    ((70, 4, 5, 6), 6, 2, 3, 2, 1, 1),  # a batch above the limit for folding once
    ((130, 40, 9, 9), 70, 1, 3, 2, 1, 1),
    ((1, 4, 40, 50), 4, 1, 7, 1, 3, 0),  # many cells
    ((1, 2, 60, 60), 2, 1, 21, 1, 20, 0),  # more bands than fit in the arguments
    ((1, 4, 30, 30), 2, 1, 21, 1, 20, 0),
    ((1, 8, 30, 30), 2, 1, 21, 1, 20, 0),
    ((1, 1, 60, 60), 1, 1, 25, 1, 24, 0),  # more cells than spread keeps in shared memory,
    ((1, 1, 60, 263), 1, 1, 25, 1, 24, 0),  # and columns that change their threads
    ((9, 3, 70, 40), 4, 1, 3, 2, 1, 1),  # rows of a warp's loads: one to four of them,
    ((2, 3, 70, 41), 4, 1, 3, 2, 1, 1),
    ((2, 3, 20, 201), 4, 1, 3, 2, 1, 1),  # up to eight,
    ((2, 3, 12, 301), 4, 1, 3, 2, 1, 1),  # up to sixteen, and the same for pairs
    ((2, 3, 12, 400), 4, 1, 3, 2, 1, 1),
    ((2, 3, 8, 700), 4, 1, 3, 2, 1, 1),
    ((2, 3, 3000), 4, 1, 3, 2, 1, 1),
    ((1, 1, 200_003), 2, 1, 3, 2, 1, 1),  # several chunks of a plane
    ((1, 2, 700, 701), 2, 1, 3, 2, 1, 1),
    ((2, 4, 5, 6, 7), 4, 2, 3, 2, 1, 1),
    ((1, 1, 1, 1), 1, 1, 1, 1, 0, 0),
    ((0, 3, 4, 4), 2, 1, 3, 2, 1, 1),
)
# Both memory formats: the forms of small planes, of spread, and the matrix products of combine.
FORMATS = (
    ((2, 3, 18, 18), 4, 1, 3, 2, 1, 1),
    ((2, 3, 25, 25), 4, 1, 3, 2, 1, 1),
    ((2, 3, 36, 36), 4, 1, 3, 2, 1, 1),
    ((2, 8, 14, 14), 9, 1, 3, 2, 1, 1),
    ((2, 3, 24, 140), 4, 1, 3, 2, 1, 1),  # columns for five slots of a lane, six and eight
    ((2, 3, 24, 170), 4, 1, 3, 2, 1, 1),
    ((2, 3, 24, 250), 4, 1, 3, 2, 1, 1),
    ((1, 28, 210, 200), 8, 1, 3, 1, 1, 0),  # so many chunks that combine takes few batch elements
    ((1, 28, 420, 200), 8, 1, 3, 1, 1, 0),  # to a block, for 32 and 16 bits
    ((2, 4, 50, 50), 4, 1, 3, 2, 1, 1),
    ((2, 3, 70, 64), 4, 1, 3, 2, 1, 1),
    ((1, 1, 22, 601), 2, 1, 21, 1, 20, 0),
    ((12, 3, 9, 9), 70, 1, 4, 2, 1, 0),  # on ordinary cores: terms that are no whole vectors,
    ((40, 3, 9, 9), 70, 1, 4, 2, 1, 0),
    ((3, 512, 3, 3), 511, 1, 3, 2, 1, 1),  # and parts that are no whole vectors
    ((3, 512, 3, 3), 512, 1, 4, 2, 1, 0),  # more weights than blocks that fold, more taps
    ((3, 600, 3, 3), 512, 1, 3, 2, 1, 1),  # slices of few batch elements,
    ((200, 600, 2, 2), 512, 1, 3, 2, 1, 1),  # of many
    ((9000, 64, 2, 2), 64, 1, 3, 2, 1, 1),  # weights that stay in shared memory, 64 channels,
    ((26000, 64, 2, 2), 96, 1, 3, 2, 1, 1),  # 96,
    ((21400, 64, 2, 2), 128, 1, 3, 2, 1, 1),  # 128,
    ((34000, 64, 2, 2), 32, 1, 3, 2, 1, 1),  # and so few that a warp multiplies by itself
    ((1024, 16, 5, 5), 128, 1, 3, 2, 1, 1),  # square tiles
    ((300, 128, 6, 6), 4, 1, 3, 2, 1, 1),  # many blocks for neighbouring channels
    ((130, 4, 7, 7), 6, 1, 3, 2, 1, 1),  # narrow tiles, up to 9 taps
    ((130, 8, 6, 6), 20, 1, 4, 2, 1, 0),  # middle ones, up to 16 taps
    ((131, 4, 6, 6), 34, 1, 5, 2, 2, 1),  # up to 32
    ((130, 4, 8, 8), 70, 1, 7, 1, 3, 0),  # up to 64
    ((130, 6, 12, 12), 70, 1, 9, 1, 4, 0),  # any number
    ((1472, 64, 2, 2), 130, 1, 3, 2, 1, 1),  # wide ones
    ((3, 512, 3, 3), 512, 1, 3, 2, 1, 1),  # low ones, for large weights
    ((200, 36, 5, 5), 45, 3, 3, 2, 1, 1),
    ((4100, 3, 7, 7), 4, 1, 3, 2, 1, 1),  # many planes, for spread
    ((800, 64, 4, 4), 6, 1, 3, 2, 1, 1),  # of the input itself: one fragment, several slices,
    ((1600, 16, 3, 3), 14, 1, 3, 2, 1, 1),  # two
    ((1600, 3, 5, 5), 8, 1, 3, 2, 1, 1),  # and not where channels are neighbours
    ((11, 33, 100, 101), 2, 1, 7, 1, 3, 0),  # many chunks of many cells
)


def copied(t: torch.Tensor) -> torch.Tensor:
    """The same strides on the GPU, over a copy of all that lies between the elements too.

    Copied and not written by a kernel: what torch's kernels write counts as unwritten where
    initcheck looks at ours alone.
    """
    elements = t.untyped_storage().nbytes() // t.element_size()
    everything = torch.as_strided(t, (elements,), (1,), 0).cuda()
    return torch.as_strided(everything, t.size(), t.stride(), t.storage_offset())


def run(shape, layout, dtype, direct: bool = False) -> None:
    size, c_out, groups, k, s, p, op = shape
    g = torch.Generator().manual_seed(1)
    axes = len(size) - 2
    x = torch.randn(size, generator=g).to(dtype)
    x = copied(layout(x) if x.numel() else x)
    w = torch.randn(size[1], c_out // groups, *[k] * axes, generator=g).to(dtype).cuda()
    b = torch.randn(c_out, generator=g).to(dtype).cuda()
    settings = ([s], [p], [op], groups, [1], 0.5)
    with torch.no_grad():
        y = ops.fused_mean(x, w, b, *settings)
    given = [t.cpu() for t in (x, w, b)]
    terms = x[0].numel() * k**axes if size[0] else 1
    reference.assert_closed_form(y, terms, settings, *given)
    ops._tap_sums(x, [k] * axes, [s], [p], [op])
    grad = torch.ones(y.shape, dtype=dtype).cuda()
    if not direct:
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        grads = torch.autograd.grad(ops.fused_mean(*leaves, *settings), leaves, grad)
        assert all(t.isfinite().all() for t in grads)
        return
    # What autograd would do, without a tensor that a kernel of torch has written.
    ops._fused_mean_with_sums(x, w, b, *settings)
    sums = torch.randn(
        *size[:2], *[k] * axes, generator=g, dtype=torch.promote_types(dtype, torch.float32)
    )
    ops._tap_spread(copied(sums), size[2:], dtype, [s], [p], [op])
    if size[0] * w.numel() <= _products._MOST_MULTIPLICATIONS["cuda"]:
        ops._combine_backward(grad, w, copied(sums), [k] * axes, groups, 0.25, 0.5, True, False)


# What kernels of the cases above do besides, which has no name of its own.
BRANCHES = (
    ((4, 4, 130, 260), 16, 1, 4, 2, 1, 0),  # weights folded beside stats,
    ((2, 4, 401, 327), 16, 1, 4, 2, 1, 0),  # and several chunks that combine adds,
    ((2, 12, 130, 260), 1100, 1, 4, 2, 1, 0),  # for wider tiles too
    ((128, 272, 3, 3), 160, 1, 3, 2, 1, 1),  # clusters of square tiles,
    ((160, 280, 2, 2), 8, 1, 3, 2, 1, 1),  # and of low ones, for a large batch
    ((1, 64, 8, 8), 128, 1, 3, 2, 1, 1),  # all in one kernel: clusters of eight,
    ((17, 64, 8, 8), 72, 1, 3, 2, 1, 1),  # whose last blocks have no channels of their own,
    ((3, 20, 9, 9), 27, 1, 3, 2, 1, 1),  # of fewer,
    ((4, 96, 16, 16), 132, 3, 3, 2, 1, 1),  # groups,
    ((128, 64, 7, 7), 64, 1, 3, 2, 1, 1),  # and several tiles of a warp
)
CASES = (
    *itertools.product(SHAPES, LAYOUTS, DTYPES),
    *itertools.product(FORMATS, LAYOUTS[:2], DTYPES),
    *itertools.product(BRANCHES, LAYOUTS[:2], (torch.float32, torch.bfloat16)),
)


def run_cases(indices, direct: bool, part: int = 0, parts: int = 1) -> int:
    mine = indices[part::parts]
    for index in mine:
        run(*CASES[index], direct)
    torch.cuda.synchronize()
    return len(mine)


# ---- which kernels ------------------------------------------------------------------------------


# Planes that no list of small calls can have: test_sizes.py runs these. And the product of 16 and
# 32 bits on ordinary cores, which compute capability 7.5 takes; and what is only asked what it is.
ELSEWHERE = re.compile(
    r", long>$|plain::(fold|multiply)_kernel<(float|__half|__nv_bfloat16)>$|probe_kernel$"
)


def built_kernels() -> set[str]:
    """The kernels in the library, as cuobjdump and c++filt name them."""
    library = Path(convt_reduce.__file__).parent / "_C_cuda.so"
    command = ["cuobjdump", "--dump-resource-usage", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    mangled = sorted(set(re.findall(r"Function (\w+):", text)))
    names = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout
    return {without_arguments(name) for name in names.splitlines()}


def without_arguments(name: str) -> str:
    """`void f<int, 4>(float*)` -> `f<int, 4>`; what the two tools print alike."""
    return re.sub(r"\(anonymous namespace\)::", "", name).partition("(")[0].removeprefix("void ")


def kernels_of_cases() -> list[set[str]]:
    """For each case, the kernels that it runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for case in CASES:
            torch.cuda._sleep(1)  # a kernel that no case has: it marks where the next one begins
            run(*case)
        torch.cuda.synchronize()
    found: list[set[str]] = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            found.append(set())
        elif "convt_reduce" in event.name:
            found[-1].add(without_arguments(event.name))
    assert len(found) == len(CASES)
    return found


def instantiations() -> int:
    if shutil.which("cuobjdump") is None or shutil.which("c++filt") is None:
        print("gpu_cases: cuobjdump and c++filt are needed to list the kernels, got none")
        return 2
    run_names = set().union(*kernels_of_cases())
    built = built_kernels()
    elsewhere = {name for name in built if ELSEWHERE.search(name)}
    missed = sorted(built - run_names - elsewhere)
    print(f"{len(built & run_names)} of {len(built)} kernels were run, {len(elsewhere)} are for")
    print("planes of more than 2**30 elements or GPUs without tensor cores; missed:")
    print("\n".join(f"  {name}" for name in missed) or "  none")
    return 1 if missed else 0


def write_cover(path: str) -> int:
    """All of BRANCHES, then always the case that adds most kernels, until none adds any.

    The file has their indices, one per line.
    """
    kernels = kernels_of_cases()
    left = set().union(*kernels)
    total = len(left)
    chosen = [index for index, case in enumerate(CASES) if case[0] in BRANCHES]
    left -= set().union(*(kernels[index] for index in chosen))
    while left:
        best = max(range(len(CASES)), key=lambda index: len(kernels[index] & left))
        left -= kernels[best]
        chosen.append(best)
    Path(path).write_text("".join(f"{index}\n" for index in chosen))
    print(f"{len(chosen)} of {len(CASES)} cases run all {total} kernels")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instantiations", action="store_true")
    parser.add_argument("--cover", metavar="FILE", help="write which cases run every kernel")
    parser.add_argument("--of", metavar="FILE", help="only the cases that --cover has written")
    parser.add_argument(
        "--direct",
        action="store_true",
        help="derivatives by their operators, with inputs from the host: for initcheck",
    )
    parser.add_argument("--part", default="0/1", help="2/4: the third of four shares of the cases")
    options = parser.parse_args()
    if options.instantiations:
        return instantiations()
    if options.cover:
        return write_cover(options.cover)
    indices = range(len(CASES))
    if options.of:
        indices = [int(line) for line in Path(options.of).read_text().split()]
    print(f"{run_cases(indices, options.direct, *map(int, options.part.split('/')))} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
