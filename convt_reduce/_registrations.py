"""Everything the operators have besides their native kernels; importing this registers it."""

from convt_reduce import _autocast, _autograd, _fake, _layouts, _vmap

__all__ = ["_autocast", "_autograd", "_fake", "_layouts", "_vmap"]
