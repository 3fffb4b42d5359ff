"""When fusing pays: the cost rule.

Per pair of channels, a convolution multiplies once for each tap at each input position. The fused
operator folds each tap once, however many positions there are, and then multiplies once per cell
and image; but a multiplication of those takes longer, because the convolution's run in a tuned
matrix product. Channels and groups cancel out, so the rule sees positions and taps alone.
"""

import math
from collections.abc import Sequence

# In units of one multiplication of the convolution: what folding a tap costs, and what combining a
# cell does. On the CPU they were fitted to 1 to 512 channels, 1 to 256 images, 1 to 4096 positions
# and 1x1 to 31x31 kernels, on one thread. On a GPU everything is fused.
FOLD = {"cpu": 1000, "cuda": 0}
COMBINE = {"cpu": 25, "cuda": 0}


def pays(batch: int, size: Sequence[int], kernel_size: Sequence[int], device_type: str) -> bool:
    """Whether a call is worth fusing.

    Args:
        batch: the number of images; 1 if unbatched.
        size: the input's spatial sizes. They and ``batch`` may be symbols: a guard is made then, as
            by any branch on a size.
        kernel_size: the taps per axis.
        device_type: "cpu" or "cuda"; elsewhere everything pays.
    """
    fold, combine = FOLD.get(device_type, 0), COMBINE.get(device_type, 0)
    if fold == combine == 0:
        return True
    positions, taps = math.prod(size), math.prod(kernel_size)
    cells = min(positions, taps)  # about; there are no more than that in any usual setting
    return batch * positions * taps > fold * taps + combine * batch * cells


def reason(batch: int, size: Sequence[int], kernel_size: Sequence[int], device_type: str) -> str:
    """The sentence for a call that does not pay."""
    shape = "x".join(str(n) for n in size)
    kernel = "x".join(str(k) for k in kernel_size)
    return (
        f"must do enough work to be worth fusing, got {batch} inputs of {shape} with a {kernel} "
        f"kernel on {device_type}, which the convolution does as quickly"
    )
