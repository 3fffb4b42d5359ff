"""Tensors that are not plain memory: sparse, quantized, nested and mkldnn ones are refused.

The dispatcher sends each kind to a key of its own and, finding nothing there, would answer with a
page about backends. These kernels answer with one sentence instead, that of _validation.
"""

from typing import NoReturn

import torch

from convt_reduce import _validation

KEYS = tuple(
    key
    for kind in ("Sparse", "SparseCsr", "Quantized", "NestedTensor", "Mkldnn")
    for key in (f"{kind}CPU", f"{kind}CUDA")
    if key != "MkldnnCUDA"  # there is none
)
# The tensor arguments of each operator, in order.
TENSORS = {
    "fused_mean": ("input", "weight", "bias"),
    "_fused_mean_with_sums": ("input", "weight", "bias"),
    "_tap_sums": ("input",),
    "_tap_spread": ("tap_grads",),
    "_combine_backward": ("grad", "weight", "tap_sums"),
}

_library = torch.library.Library("convt_reduce", "IMPL")


def _refusal_of(operator: str):
    # The user called fused_mean; autograd came to the other for him.
    name = "fused_mean" if "fused_mean" in operator else operator

    def refuse(*arguments: object, **_: object) -> NoReturn:
        for argument, tensor in zip(TENSORS[operator], arguments, strict=False):
            if tensor is not None:
                _validation.check_plain(name, argument, tensor)
        raise RuntimeError(f"{name}: every tensor must be a dense, strided one, got another kind")

    return refuse


for _operator in TENSORS:
    for _key in KEYS:
        _library.impl(_operator, _refusal_of(_operator), _key)
