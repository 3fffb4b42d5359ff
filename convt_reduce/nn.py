"""Layers: a transposed convolution whose output is averaged over space."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from convt_reduce.ops import fused_mean

__all__ = ["ConvTransposeMean1d", "ConvTransposeMean2d", "ConvTransposeMean3d"]


class _ConvTransposeMean:
    """What the three layers share; mixed in before ``nn.ConvTransposeNd``."""

    _layer: type[nn.Module]

    def __init__(self, *args: Any, multiplier: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.multiplier = multiplier

    @classmethod
    def from_conv(cls, layer: nn.Module, multiplier: float = 1.0) -> "_ConvTransposeMean":
        """A layer of this class with the very parameters of ``layer``.

        Args:
            layer: an ``nn.ConvTransposeNd`` of this class's number of axes, initialised.
            multiplier: the number that the mean is multiplied by.

        Raises:
            TypeError: ``layer`` is of another type. A subclass may compute something else, a
                parametrised layer computes its weight anew at each call, and a lazy one has no
                weight yet.
            ValueError: the layer has hooks, buffers, submodules or a forward of its own, which the
            new one would silently lose.
        """
        if type(layer) is not cls._layer:
            raise TypeError(
                f"layer must be exactly an nn.{cls._layer.__name__}, got {type(layer).__name__}"
            )
        extras = [k for k, v in vars(layer).items() if k.endswith("_hooks") and v]
        extras += [k for k in ("_buffers", "_modules", "forward") if vars(layer).get(k)]
        if extras:
            raise ValueError(
                "layer must have no hooks, buffers, submodules or forward of its own, got "
                f"{', '.join(extras)}"
            )
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        own = {k: v for k, v in vars(layer).items() if k not in vars(new)}
        new.__dict__.update(own)
        new.training = layer.training
        for name, parameter in layer._parameters.items():
            new.register_parameter(name, parameter)
        new.multiplier = multiplier
        return new

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """The mean over space of what the parent layer would return, times the multiplier.

        Args:
            input: ``[N, in_channels, *spatial]`` or ``[in_channels, *spatial]``.
            output_size: as for the parent layer: the spatial sizes of the output that is averaged,
                from which output_padding follows.

        Returns:
            ``[N, out_channels, 1, ..., 1]`` or ``[out_channels, 1, ..., 1]``.
        """
        axes = len(self.kernel_size)
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,
            self.padding,
            self.kernel_size,
            axes,
            self.dilation,
        )
        return fused_mean(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
            self.multiplier,
        )

    def extra_repr(self) -> str:
        """The parent layer's, and the multiplier."""
        return f"{super().extra_repr()}, multiplier={self.multiplier}"


_DOCSTRING = """``nn.{layer}``, then the mean over space, times a number, without the convolution.

Equal to ``nn.{layer}(...)(x).mul(multiplier).mean({dims}, keepdim=True)``. It is a subclass of
``nn.{layer}``: constructor, initialisation, parameters, state_dict and attributes are that layer's.

Args:
    *args, **kwargs: of ``nn.{layer}``. ``padding_mode`` must be ``"zeros"``, as there.
    multiplier: the number that the mean is multiplied by.

Input ``[N, in_channels, {sizes}]`` or ``[in_channels, {sizes}]``; result
``[N, out_channels, {ones}]`` or ``[out_channels, {ones}]``.
"""


class ConvTransposeMean1d(_ConvTransposeMean, nn.ConvTranspose1d):
    __doc__ = _DOCSTRING.format(layer="ConvTranspose1d", dims="2", sizes="L", ones="1")
    _layer = nn.ConvTranspose1d


class ConvTransposeMean2d(_ConvTransposeMean, nn.ConvTranspose2d):
    __doc__ = _DOCSTRING.format(layer="ConvTranspose2d", dims="(2, 3)", sizes="H, W", ones="1, 1")
    _layer = nn.ConvTranspose2d


class ConvTransposeMean3d(_ConvTransposeMean, nn.ConvTranspose3d):
    __doc__ = _DOCSTRING.format(
        layer="ConvTranspose3d", dims="(2, 3, 4)", sizes="D, H, W", ones="1, 1, 1"
    )
    _layer = nn.ConvTranspose3d
