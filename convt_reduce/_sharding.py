"""How DTensor may split the operators over devices.

Stats and combine are sums, so three splits need no communication before the result: the batch, the
output channels, and the input channels, whose results are partial sums of the whole. Any other
placement is first redistributed by DTensor to one of these, or to copies.

Importing torch.distributed.tensor takes half a second, so it is left to the program that uses it:
the operators' own call paths ask `ensure_registered` once it is there.
"""

import sys

import torch

_ops = torch.ops.convt_reduce
_registered = False


def ensure_registered() -> None:
    """Registers the strategies with DTensor if this program uses DTensor; cheap to call again."""
    if not _registered and "torch.distributed.tensor" in sys.modules:
        _register()


def _register() -> None:
    global _registered
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(_ops.fused_mean.default)(_fused_mean_strategies)
    register_sharding(_ops._fused_mean_with_sums.default)(_fused_mean_with_sums_strategies)
    register_sharding([_ops._tap_sums.default, _ops._tap_spread.default])(_tap_strategies)
    _registered = True


def _splits(mesh, channels: int) -> bool:
    """Whether each device gets at least one channel; no batch is a batch, no channel is none."""
    return all(-(-channels // -(-channels // devices)) == devices for devices in mesh.shape)


def _fused_mean_strategies(input, weight, bias=None, *settings):
    # Without the tap sums that _fused_mean_with_sums returns second.
    both = _fused_mean_with_sums_strategies(input, weight, bias, *settings)
    return [(outputs[:1], inputs) for outputs, inputs in both]


def _fused_mean_with_sums_strategies(input, weight, bias=None, *settings):
    """(placements of y and tap sums, placements of the arguments), for one mesh dimension."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    groups = settings[3] if len(settings) > 3 else 1
    batched = input.ndim == weight.ndim
    channel = 1 if batched else 0
    others = [None] * len(settings)

    def strategy(y, sums, x, w, b):
        return [y, sums], [x, w, None if bias is None else b, *others]

    replicate = Replicate()
    strategies = [strategy(replicate, replicate, replicate, replicate, replicate)]
    if batched:
        strategies.append(strategy(Shard(0), Shard(0), Shard(0), replicate, replicate))
    if groups == 1 and _splits(weight.mesh, weight.shape[1]):
        # The output channels. With groups the weight holds a part of every group's.
        strategies.append(strategy(Shard(channel), replicate, replicate, Shard(1), Shard(0)))
    if groups == 1 and _splits(input.mesh, input.shape[channel]):
        # The input channels. A partial bias is one that the sum over devices counts once.
        strategies.append(strategy(Partial(), Shard(channel), Shard(channel), Shard(0), Partial()))
    return strategies


def _tap_strategies(tensor, sizes, *rest):
    from torch.distributed.tensor import Partial, Replicate, Shard

    others = [None] * (1 + len(rest))
    # Both operators are linear and work on each plane for itself.
    channel = tensor.ndim - len(sizes) - 1
    placements = [Replicate(), Partial(), *(Shard(dim) for dim in range(channel))]
    if _splits(tensor.mesh, tensor.shape[channel]):
        placements.append(Shard(channel))
    return [([placement], [placement, *others]) for placement in placements]
