"""Matching: from a transposed convolution to a reduction over all of its space.

The walk starts at the convolution and follows its only user, step by step, until the rules say that
no spatial axis is left. It starts there, and not at the reduction, because the report owes every
convolution an answer. Where the rank of the input is unknown it is walked both ways, batched and
unbatched, and what only one of them allows becomes a condition on the rank.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node

from convt_reduce._facts import facts_of
from convt_reduce._report import Refusal
from convt_reduce._rules import take
from convt_reduce._spelling import Call, hooks_of, spell
from convt_reduce._walk import Label, Step, Walk, is_spatial, read_size

LAYERS = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Site:
    """A convolution and its way to a reduction.

    Attributes:
        conv: the convolution's node; ``call`` is what it computes, ``spatial`` its spatial axes.
        steps: the nodes after it, up to the reduction and the repeated means behind it.
        rank: the only rank of the input for which this holds; None: any.
        kernel: the only output size for which this holds; None: any.
        multiplier: what the operator multiplies by.
        eval_only: names of the layers that must be in eval mode.
        readers: nodes that read the shape of a tensor that will have shrunk.
        dtype: the only dtype of the convolution for which this holds; None: any.
        sized: whether it relies on the number of the convolution's channels.
    """

    conv: Node
    call: Call
    spatial: int
    steps: tuple[Step, ...]
    rank: int | None
    kernel: tuple[int, ...] | None
    multiplier: float
    eval_only: tuple[str, ...]
    readers: tuple[Node, ...]
    dtype: torch.dtype | None
    sized: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.conv, *(step.node for step in self.steps))


def find_convolutions(graph: torch.fx.Graph, root: nn.Module) -> list[Node]:
    """The nodes that call a transposed convolution of any kind, fusable or not."""
    return [node for node in graph.nodes if _is_convolution(node, root)]


def is_layer(module: nn.Module) -> bool:
    """Whether it is a transposed convolution of torch, in any version: lazy, quantised, derived."""
    from convt_reduce.nn import _ConvTransposeMean

    if isinstance(module, _ConvTransposeMean):
        return False  # it is fused already
    return isinstance(module, nn.modules.conv._ConvTransposeNd) or (
        "ConvTranspose" in type(module).__name__ and type(module).__module__.startswith("torch.")
    )


def _is_convolution(node: Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return is_layer(root.get_submodule(node.target))
    if node.op != "call_function":
        return False
    try:
        return spell(node, root).name.startswith("conv_transpose")
    except Refusal:
        return False


def match(conv: Node, root: nn.Module) -> Site:
    """The site of a convolution's node in a graph whose modules and tensors ``root`` holds.

    Raises:
        Refusal: there is none; the message is the first reason.
    """
    call, spatial, dtype, channels = _convolution(conv, root)
    facts = facts_of(conv, root)
    ranks = (spatial + 2, spatial + 1) if facts is None else (len(facts.shape),)
    found: dict[int, Site] = {}
    refusal = None
    for rank in ranks:
        labels = [Label("n"), Label("c"), *(Label([a]) for a in range(spatial))][-rank:]
        walk = Walk(root, conv, labels, spatial, dtype, channels, facts is not None)
        try:
            readers = _follow(walk)
        except Refusal as error:
            refusal = refusal or error
            continue
        only = rank if len(ranks) > 1 else None
        common = (tuple(walk.steps), only, walk.kernel, walk.multiplier, tuple(walk.eval_only))
        found[rank] = Site(conv, call, spatial, *common, readers, walk.pinned, walk.sized)
    if not found:
        raise refusal
    sites = list(found.values())
    if len(sites) == 2 and sites[0].steps == sites[1].steps:
        return Site(**{**vars(sites[0]), "rank": None})
    return sites[0]


def _convolution(conv: Node, root: nn.Module) -> tuple[Call, int, torch.dtype | None, int | None]:
    """The call, its spatial axes, its dtype and C_out where known."""
    if conv.op == "call_module":
        return _layer(conv, root)
    call = spell(conv, root)
    weight = facts_of(call.get("weight"), root)
    for name in ("input", "weight"):
        facts = facts_of(call.get(name), root)
        if facts is None:
            continue
        if facts.dtype not in DTYPES:
            raise Refusal(f"'{conv}' must have a floating-point {name}, got {facts.dtype}")
        if facts.wrapper not in ("", "DTensor"):
            raise Refusal(f"'{conv}' must have a plain {name}, got a {facts.wrapper}")
        if facts.device.type not in ("cpu", "cuda", "meta"):
            raise Refusal(f"'{conv}' must run on the CPU or CUDA, got {facts.device.type}")
    result = facts_of(conv, root) or weight
    groups = call.get("groups", 1)
    known = weight is not None and isinstance(groups, int)
    channels = weight.shape[1] * groups if known else None
    return call, int(call.name[-2]), result.dtype if result else None, channels


def _layer(conv: Node, root: nn.Module) -> tuple[Call, int, torch.dtype | None, int | None]:
    layer = root.get_submodule(conv.target)
    kind = type(layer)
    if nn.utils.parametrize.is_parametrized(layer):
        kind = kind.__bases__[0]  # its weight is computed by the layer, and read from it each time
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise Refusal(f"'{conv.target}' must be initialised, got {kind.__name__}: call it once")
    if kind not in LAYERS:
        raise Refusal(
            f"'{conv.target}' must be exactly an nn.ConvTransposeNd, "
            f"got {kind.__module__}.{kind.__qualname__}"
        )
    hooks = hooks_of(layer)
    if hooks is not None:
        raise Refusal(f"'{conv.target}' must have no hooks, got {hooks}")
    if "forward" in vars(layer):
        raise Refusal(f"'{conv.target}' must have its class's forward, got one of its own")
    tensors = list(layer.parameters())
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise Refusal(f"'{conv.target}' must be of a floating-point dtype, got {tensor.dtype}")
        if type(tensor) is not nn.Parameter:
            raise Refusal(
                f"'{conv.target}' must have plain parameters, got a {type(tensor).__name__}"
            )
    given = dict(zip(("input", "output_size"), conv.args, strict=False)) | dict(conv.kwargs)
    call = Call("layer", given, module=layer, path=conv.target)
    return call, LAYERS[kind], tensors[0].dtype if tensors else None, layer.out_channels


def _follow(walk: Walk) -> tuple[Node, ...]:
    """Walks to the reduction and over the repeated means behind it; returns the shape readers."""
    readers: list[Node] = []
    while walk.live():
        user = _only_user(walk, readers)
        take(walk, user, spell(user, walk.root))
    while len(walk.node.users) == 1:
        (user,) = walk.node.users
        after = Walk(walk.root, walk.node, list(walk.labels), walk.spatial, walk.dtype)
        try:
            take(after, user, spell(user, walk.root))
        except Refusal:
            break
        if after.steps[0].kind != "mean":
            break
        walk.steps, walk.labels, walk.node = walk.steps + after.steps, after.labels, user
        walk.pinned = walk.pinned or after.pinned
    return tuple(readers)


def _only_user(walk: Walk, readers: list[Node]) -> Node:
    users = []
    for user in walk.node.users:
        reads = _reading(walk, user)
        if reads is None:
            users.append(user)
        elif reads:
            readers.append(user)
    if not users:
        raise Refusal(f"'{walk.node}' must be reduced over space, got no user of it")
    if len(users) > 1:
        names = " and ".join(f"'{user}'" for user in users)
        raise Refusal(f"'{walk.node}' must have one user, got {names}")
    if users[0].op == "output":
        raise Refusal(f"'{walk.node}' must be reduced over space, got returned as it is")
    return users[0]


def _reading(walk: Walk, user: Node) -> bool | None:
    """None: a step. False: reads something that stays. True: reads a shape that changes."""
    if not user.users and user.op == "call_method" and user.target == "size":
        return False
    if user.op == "call_method" and user.target in ("dim", "ndimension"):
        return False
    if user.op == "call_function" and user.target is getattr and user.args[1] != "shape":
        return False if user.args[1] in ("dtype", "device", "ndim") else None
    read = read_size(user)
    if read is None or read[0] is not walk.node:
        return None
    if isinstance(read[1], int) and -len(walk.labels) <= read[1] < len(walk.labels):
        label = walk.labels[read[1]]
        if not is_spatial(label):
            return False
    # Only a graph that was traced without sizes is given others to read.
    return True if walk.full() and not walk.captured else None
