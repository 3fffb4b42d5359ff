"""Autocast: what the eager chain returns, on the CPU and on CUDA.

The chain's convolution runs in autocast's dtype and so its mean comes out in it, unless its tensors
are float64, which autocast leaves alone. Here tensors that share a dtype are read as they are, with
no copy in a narrower one, and only the result is rounded; tensors that do not are cast as the
convolution's would be. Gradients come back in each tensor's own dtype, through those casts.
"""

import torch

_library = torch.library.Library("convt_reduce", "IMPL")
_op = torch.ops.convt_reduce.fused_mean.default
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _rule_for(device_type: str):
    def eligible(tensor) -> bool:
        return (
            tensor.is_floating_point()
            and tensor.dtype != torch.float64
            and tensor.device.type == device_type
        )

    def rule(input, weight, bias=None, *settings):
        dtype = torch.get_autocast_dtype(device_type)
        tensors = [input, weight] if bias is None else [input, weight, bias]
        mixed = any(t.dtype != input.dtype for t in tensors)
        if mixed:
            tensors = [t.to(dtype) if eligible(t) else t for t in tensors]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            y = _op(*tensors, *[None] * (3 - len(tensors)), *settings)
        return y.to(dtype) if eligible(tensors[0]) else y

    return rule


_library.impl("fused_mean", _rule_for("cpu"), "AutocastCPU")
_library.impl("fused_mean", _rule_for("cuda"), "AutocastCUDA")
