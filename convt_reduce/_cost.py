"""When fusing pays: the cost rule.

Per pair of channels, a convolution multiplies once for each tap at each input position. The fused
operator folds each tap once, however many positions there are, and then multiplies once per cell
and image; but a multiplication of those takes longer, because the convolution's run in a tuned
matrix product. Channels and groups cancel out, so the rule sees positions and taps alone:

    fuse if  batch * positions * taps  >  fold * taps + combine * batch * cells

What it leaves out: the pass over the input, which the convolution makes as well, and what a call
costs however small it is, which is less for the operator. With a handful of channels it may
therefore say no where fusing would have been somewhat quicker.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Prices(NamedTuple):
    """What the operator's steps cost, in units of one multiplication of the convolution.

    They depend on how the operator is written for a device. ``tools/cost_rule.py`` measures both
    ways, and lists where the rule errs: run it when one of the two has changed.

    Attributes:
        fold: of folding one tap of one pair of channels.
        combine: of one multiplication of a cell's sum by a folded weight.
    """

    fold: float
    combine: float


# CPU: fitted with that script to 1 to 1024 channels, 1 to 1024 images, 1 to 4096 positions and 1x1
# to 31x31 kernels, on one thread. CUDA: nothing is charged, so that everything is fused.
PRICES = {"cpu": Prices(fold=700, combine=10), "cuda": Prices(fold=0, combine=0)}
FREE = Prices(0, 0)


def pays(batch: int, size: Sequence[int], kernel_size: Sequence[int], device_type: str) -> bool:
    """Whether a call is worth fusing.

    Args:
        batch: the number of images; 1 if unbatched.
        size: the input's spatial sizes. They and ``batch`` may be symbols: a guard is made then, as
            by any branch on a size.
        kernel_size: the taps per axis.
        device_type: "cpu" or "cuda"; elsewhere everything pays.
    """
    prices = PRICES.get(device_type, FREE)
    if prices == FREE:
        return True
    positions, taps = math.prod(size), math.prod(kernel_size)
    cells = min(positions, taps)  # about; there are no more than that in any usual setting
    return batch * positions * taps > prices.fold * taps + prices.combine * batch * cells


def reason(batch: int, size: Sequence[int], kernel_size: Sequence[int], device_type: str) -> str:
    """The sentence for a call that does not pay."""
    shape = "x".join(str(n) for n in size)
    kernel = "x".join(str(k) for k in kernel_size)
    return (
        f"must do enough work to be worth fusing, got {batch} inputs of {shape} with a {kernel} "
        f"kernel on {device_type}, which the convolution does as quickly"
    )
