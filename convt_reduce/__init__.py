"""The spatial mean of a transposed convolution, without the convolution.

``convt_reduce.fused_mean`` and the operator behind it, ``torch.ops.convt_reduce.fused_mean``,
return ``(F.conv_transposeNd(x, w, b, ...) * multiplier).mean(spatial_dims, keepdim=True)`` from
sums over the input. Importing this package loads the operators; it asks no GPU and compiles
nothing.
"""

from convt_reduce import _loader

_loader.load()

from convt_reduce import _registrations  # noqa: E402, F401
from convt_reduce._loader import build_info  # noqa: E402
from convt_reduce.ops import fused_mean  # noqa: E402

__version__: str = build_info()["version"]

__all__ = ["__version__", "build_info", "fused_mean"]
