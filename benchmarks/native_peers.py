"""The peers that need a C++ compiler: compiled by load_inline when they are first wanted.

Building takes half a minute and more, so it starts in a process of its own while other cases are
measured; this process then finds the libraries built and only loads them. A build that fails makes
its peer fail, with the compiler's last words, and nothing else.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from convt_reduce._bench._case import Case
from convt_reduce._bench._peers import Function, Peer

HERE = Path(__file__).resolve().parent
# Peer -> the function that its source file of the same name defines, and how C++ sees it.
FUNCTIONS = {
    "one block per item": (
        "one_block_per_item",
        "torch::Tensor one_block_per_item(torch::Tensor x, torch::Tensor weight, "
        "torch::Tensor bias, double multiplier);",
    ),
    "CUB segmented sum": (
        "cub_segmented_sum",
        "torch::Tensor cub_segmented_sum(torch::Tensor x);",
    ),
}
BUILD_SECONDS = 300  # a build that takes longer counts as failed


def set_cuda_home() -> None:
    """Where nvcc on PATH is a small script that starts the real one elsewhere, torch would look for
    headers and libraries beside the script: nvcc itself is asked, as in setup.py."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ:
        return
    if (Path(nvcc).parent.parent / "include" / "cuda_runtime.h").exists():
        return
    dryrun = [nvcc, "--dryrun", "-x", "cu", "-c", __file__]
    said = subprocess.run(dryrun, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", said.stdout, re.MULTILINE)
    if top:
        os.environ["CUDA_HOME"] = str(Path(top[1]).resolve())


@functools.cache
def load(name: str):
    """The function of a peer, compiled unless that was done before."""
    set_cuda_home()  # read when cpp_extension is imported
    from torch.utils.cpp_extension import load_inline

    function, declaration = FUNCTIONS[name]
    module = load_inline(
        name=f"convt_reduce_bench_{function}",
        cpp_sources=declaration,
        cuda_sources=(HERE / f"{function}.cu").read_text(),
        functions=[function],
        extra_cuda_cflags=["-O3"],
    )
    return getattr(module, function)


class Builds:
    """The builds under way, one process each."""

    def __init__(self) -> None:
        # Here, too, and early: torch.compile also imports cpp_extension, and flags other than the
        # builders' would build everything again.
        set_cuda_home()
        if "TORCH_CUDA_ARCH_LIST" not in os.environ:
            # Said once, so that the processes that build need not ask the GPU.
            major, minor = torch.cuda.get_device_capability()
            os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, __file__, name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in FUNCTIONS
        }
        self._said: dict[str, str] = {}

    def wait(self, name: str) -> None:
        """Until a peer's library is built. Raises RuntimeError if it could not be."""
        process = self._processes[name]
        if name not in self._said:
            try:
                self._said[name], _ = process.communicate(timeout=BUILD_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                self._said[name], _ = process.communicate()
        if process.returncode != 0:
            lines = self._said[name].strip().splitlines() or ["no output"]
            of_compiler = [line for line in lines if re.search(r"\berror: ", line)]
            raise RuntimeError(f"the build of {name!r} failed: {(of_compiler or lines[-1:])[0]}")

    def seconds(self) -> dict[str, float | None]:
        """How long each build took; None for one that failed or was not waited for."""
        return {
            name: json.loads(self._said[name].splitlines()[-1])["build_s"]
            if process.returncode == 0 and name in self._said
            else None
            for name, process in self._processes.items()
        }

    def stop(self) -> None:
        """Ends the builds that nobody waited for."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


def peers(builds: Builds) -> dict[str, Peer]:
    """The native peers, each of which waits for its build when it is first made."""

    def one_block(case: Case, device: torch.device) -> Function:
        builds.wait("one block per item")
        function, multiplier = load("one block per item"), case.multiplier
        return lambda x, weight, bias: function(x, weight, bias, multiplier)

    def segmented_sum(case: Case, device: torch.device) -> Function:
        builds.wait("CUB segmented sum")
        function = load("CUB segmented sum")

        def summed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return function(x)

        return summed

    return {
        peer.name: peer
        for peer in (
            Peer("one block per item", one_block, refuses=one_block_refuses),
            Peer("CUB segmented sum", segmented_sum, computes="sum", refuses=segmented_refuses),
        )
    }


def one_block_refuses(case: Case) -> str | None:
    """Why the kernel of that name cannot do a case, or None."""
    settings = (case.kernel, case.stride, case.padding, case.output_padding, case.dilation)
    if case.axes != 2 or settings != (3, 2, 1, 1, 1) or case.groups != 1:
        return "2-D k3 s2 p1 op1 without groups"
    return segmented_refuses(case)


def segmented_refuses(case: Case) -> str | None:
    """The same for CUB's sum."""
    if case.dtype != "float32" or case.layout not in ("contiguous", "misaligned"):
        return "contiguous float32"
    return None if case.device == "cuda" else "CUDA"


if __name__ == "__main__":
    start = time.perf_counter()
    load(sys.argv[1])
    print("\n" + json.dumps({"build_s": time.perf_counter() - start}))
