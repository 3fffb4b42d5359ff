"""What a record says about where it was made: the machine, the versions, the commit."""

import platform
import subprocess
from pathlib import Path

import torch

import convt_reduce


def machine(cuda: bool) -> dict:
    """The processor and, if ``cuda``, the current GPU. What the system does not tell is None."""
    cuda = cuda and torch.cuda.is_available()
    found: dict = {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": None,
    }
    if cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "clock_mhz": _clock_mhz(),
            "driver": _driver(),
        }
    return found


def versions(repository: Path | None) -> dict:
    """Of everything whose change may change a figure. repository: the tree the run belongs to."""
    return {
        "convt_reduce": convt_reduce.__version__,
        "build": {
            key: convt_reduce.build_info()[key] for key in ("torch", "cuda", "archs", "compiler")
        },
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "python": platform.python_version(),
        "commit": _commit(repository) if repository else None,
    }


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _cudnn() -> int | None:
    try:
        return torch.backends.cudnn.version()
    except Exception:  # it compares itself with the GPU and raises where they do not fit
        return None


def _clock_mhz() -> int | None:
    """The clock of the multiprocessors now; torch asks a library that not every machine has."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # the library is missing, or of another version: no reason to stop
        return None


def _driver() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _commit(repository: Path) -> str | None:
    """The commit of the tree, with a + if files in it were changed since."""
    git = ["git", "-C", str(repository)]
    commit = _first_line([*git, "rev-parse", "HEAD"])
    changed = _first_line([*git, "status", "--porcelain", "--untracked-files=no"])
    return commit + ("+" if changed else "") if commit else None


def _first_line(command: list[str]) -> str | None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = run.stdout.splitlines()
    return lines[0].strip() if run.returncode == 0 and lines else None
