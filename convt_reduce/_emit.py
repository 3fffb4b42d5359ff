"""Writing a matched site into its graph.

Only the convolution's node changes its meaning: it becomes the operator, and everything behind it
stays and works on the averaged tensor, so that dtypes, gradients and what parameters do are what
they were. The reductions stay too, since autocast and ``dtype=`` decide what they return; a sum is
multiplied by the number of positions, and a pooling gets a window of size 1.

There are two ways, because there are two kinds of graph. One that was traced without inputs gets
the functions of `_site`, which decide per call; one that was captured with its sizes gets the
operator itself.
"""

import contextlib
import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from convt_reduce import _cost, _site
from convt_reduce._facts import evaluate, facts_of
from convt_reduce._match import Site
from convt_reduce._report import Refusal

# What Dynamo and torch.export record where a forward switches a mode: parts of the names.
_SWITCHES = (
    "grad_enabled",
    "inference_mode",
    "autocast",
    "nesting",
    "fwd_grad",
    "_enter_",
    "_exit_",
)


def emit_traced(site: Site, graph: Graph, cost_rule: bool) -> None:
    """Rewrites a site of a graph that knows no sizes."""
    conv, function = site.conv, graph.call_function
    with graph.inserting_before(conv):
        if site.call.module is not None:
            mean, shape = _site.layer_mean, _site.layer_shape
            given = (graph.get_attr(site.call.path), site.call.get("input"))
            if site.call.get("output_size") is not None:
                given += (site.call.get("output_size"),)
        else:
            mean, shape = _site.function_mean, _site.function_shape
            given = (site.spatial, *_function_arguments(site))
        options: dict[str, Any] = {"cost_rule": cost_rule}
        if site.rank is not None:
            options["rank"] = site.rank
        if site.kernel is not None:
            options["window"] = site.kernel
        if site.multiplier != 1:
            options["multiplier"] = site.multiplier
        if site.dtype is not None:
            options["dtype"] = site.dtype
        fused = function(mean, given, options)
        sizes = None
        if site.readers or any(step.kind in ("sum", "pool") for step in site.steps):
            sizes = function(shape, given)
    for reader in site.readers:
        with graph.inserting_before(reader):
            _replace(graph, reader, _read(graph, reader, sizes, site.spatial))
    _replace(graph, conv, fused)
    for step in site.steps:
        node = step.node
        with graph.inserting_before(node):
            if step.kind == "scale":
                _replace(graph, node, fused)
            elif step.kind == "pool" and step.window is None:
                _replace(graph, node, function(_site.pool_all, (_input(node), site.spatial)))
            elif step.kind == "pool":
                given = (_input(node), sizes, step.window, step.settings)
                _replace(graph, node, function(_site.pool, given))
            elif step.kind == "sum" and step.axes:
                axes = tuple(axis - site.spatial for axis in step.axes)
                count = function(_site.positions, (fused, sizes, axes))
                _multiply(graph, node, _site.times, count)


def _function_arguments(site: Site) -> tuple:
    defaults = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1}
    defaults["dilation"] = 1
    named = (site.call.get(name, default) for name, default in defaults.items())
    return (site.call.get("input"), site.call.get("weight"), *named)


def _multiply(graph: Graph, node: Node, function: Any, count: Any) -> None:
    """Multiplies a node's result by a number, or by a node's."""
    with graph.inserting_after(node):
        scaled = graph.call_function(function, (node, count))
    scaled.meta = dict(node.meta)
    node.replace_all_uses_with(scaled, lambda user: user is not scaled)


def _read(graph: Graph, reader: Node, sizes: Node, spatial: int) -> Node:
    """The size that a reader wants: in space from the convolution, else from what is there."""
    sizes = graph.call_function(_site.shape_of, (_input(reader), sizes, spatial))
    if reader.op == "call_method" and (len(reader.args) > 1 or reader.kwargs):
        dim = reader.args[1] if len(reader.args) > 1 else reader.kwargs["dim"]
        return graph.call_function(operator.getitem, (sizes, dim))
    return sizes


def _input(node: Node) -> Node:
    return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))


def _replace(graph: Graph, old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)


# ---- graphs that know their sizes ---------------------------------------------------------------


def check_captured(site: Site, root: torch.nn.Module, cost_rule: bool) -> None:
    """Refuses a site of a captured graph whose sizes do not agree, or that does not pay."""
    if site.call.module is not None:
        raise Refusal(f"'{site.conv}' must be a function's call in a captured graph, got a layer's")
    _check_modes(site)
    output, input = facts_of(site.conv, root), facts_of(site.call.get("input"), root)
    if output is None or input is None:
        raise Refusal(f"'{site.conv}' must have known shapes, got a graph that records none")
    sizes = list(output.shape[-site.spatial :])
    known = all(isinstance(size, int) for size in sizes)  # comparing a symbol would pin it
    if site.kernel is not None and not (known and tuple(sizes) == site.kernel):
        raise Refusal(
            f"the window {list(site.kernel)} must be known to be the whole output of "
            f"'{site.conv}', got size {sizes}"
        )
    weight = facts_of(site.call.get("weight"), root)
    if weight is None:
        return
    _, _, _, stride, padding, output_padding, _, dilation = _function_arguments(site)
    settings = (stride, padding, output_padding, dilation)
    nothing = _site.may_leave_nothing(weight.shape[2:], settings)
    if nothing and not all(size > 0 for size in sizes):  # of a symbol, that is a guard
        raise Refusal(f"'{site.conv}' must have an output of at least 1 on every axis, got {sizes}")
    if not cost_rule:
        return
    batch = input.shape[0] if len(input.shape) == site.spatial + 2 else 1
    size, kernel = input.shape[-site.spatial :], weight.shape[2:]
    if not all(isinstance(n, int) for n in (batch, *size, *kernel)):
        return  # a graph for many sizes is for large ones too
    if not _cost.pays(batch, size, kernel, input.device.type):
        raise Refusal(f"'{site.conv}' {_cost.reason(batch, size, kernel, input.device.type)}")


def _check_modes(site: Site) -> None:
    """Refuses a site across which a mode is switched: its work would move to the other side."""
    last, node = site.nodes[-1], site.conv
    while node is not last:
        node = node.next
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_function" and any(word in name for word in _SWITCHES):
            raise Refusal(
                f"'{last}' must run in the gradient and autocast modes of '{site.conv}', got {name}"
            )


def emit_captured(site: Site, graph: Graph, root: torch.nn.Module) -> None:
    """Rewrites a site of a graph from torch.compile or torch.export."""
    conv = site.conv
    shape = facts_of(conv, root).shape
    given = _function_arguments(site)
    input, weight, bias, *settings, groups, dilation = given
    lists = [_site.per_axis(value, site.spatial) for value in (*settings, dilation)]
    arguments = (input, weight, bias, *lists[:3], groups, lists[3], site.multiplier)
    with graph.inserting_before(conv):
        fused = graph.call_function(torch.ops.convt_reduce.fused_mean.default, arguments)
        fused.meta = dict(conv.meta)
    counts = {
        step.node: _count(graph, conv, shape, (site.spatial, *given), step.axes)
        for step in site.steps
        if step.kind == "sum" and step.axes
    }
    _replace(graph, conv, fused)
    _infer(fused, root)
    for step in site.steps:
        node = step.node
        if step.kind == "scale":
            _replace(graph, node, fused)
        elif step.kind == "pool":
            with graph.inserting_before(node):
                pool = graph.call_function(_site.POOLS[site.spatial], (_input(node), 1))
            pool.meta = dict(node.meta)
            _replace(graph, node, pool)
        else:
            _infer(node, root)
            if node in counts:
                _multiply(graph, node, torch.mul, counts[node])


def _count(graph: Graph, conv: Node, shape: tuple, given: tuple, axes: tuple) -> Any:
    """The number of positions along some spatial axes: a constant, or a node if it is a symbol."""
    count = math.prod(shape[len(shape) - given[0] + axis] for axis in axes)
    if isinstance(count, int):
        return count
    with graph.inserting_before(conv):
        node = graph.call_function(_site.function_positions, (axes, *given))
    node.meta["example_value"] = count
    return node


def _infer(node: Node, root: torch.nn.Module) -> None:
    """Brings the recorded value of a node up to date with its inputs."""
    for key in ("example_value", "val"):
        if node.meta.pop(key, None) is not None:
            # What cannot be inferred is left out: the compiler traces the graph again anyway.
            with contextlib.suppress(Exception):
                node.meta[key] = evaluate(node, root)
