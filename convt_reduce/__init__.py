"""The spatial mean of a transposed convolution, without the convolution.

``convt_reduce.fused_mean`` and the operator behind it, ``torch.ops.convt_reduce.fused_mean``,
return ``(F.conv_transposeNd(x, w, b, ...) * multiplier).mean(spatial_dims, keepdim=True)`` from
sums over the input. ``fuse`` finds that computation in a model. Importing this package loads the
operators; it asks no GPU and compiles nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from convt_reduce import _loader

_loader.load()

from convt_reduce import _registrations  # noqa: E402, F401
from convt_reduce._loader import build_info  # noqa: E402
from convt_reduce.ops import fused_mean  # noqa: E402

if TYPE_CHECKING:
    from convt_reduce.rewrite import explain, fuse

__version__: str = build_info()["version"]

__all__ = ["__version__", "build_info", "explain", "fuse", "fused_mean", "kernelbench", "nn"]


def __getattr__(name: str) -> Any:
    # What not every program needs is imported when it is asked for.
    if name in ("explain", "fuse"):
        return getattr(importlib.import_module("convt_reduce.rewrite"), name)
    if name in ("compiler", "kernelbench", "nn", "rewrite"):
        return importlib.import_module(f"convt_reduce.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
