"""The rewrite inside torch.compile: a backend, and a pass for whoever stays with inductor's.

A captured graph is flat and knows its sizes, so here nothing is left to be decided per call: a site
either holds for the sizes that the graph was captured for, which torch.compile guards, or stays. It
is rewritten before autograd is traced through it, so training takes the operator's own gradients.
Then inductor compiles the rest.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

import convt_reduce
from convt_reduce._emit import check_captured, emit_captured
from convt_reduce._match import find_convolutions, match
from convt_reduce._report import Entry, Refusal, Report

__all__ = ["backend", "fuse_graph", "inductor_pass"]
_log = logging.getLogger(__name__)
# In torch.compile's options, this name is the backend's own; the others are inductor's.
COST_RULE = "convt_reduce.cost_rule"


def backend(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="convt_reduce")``: the rewrite, then inductor.

    Args:
        graph_module: what Dynamo captured; it is rewritten in place.
        example_inputs: its inputs, fake or real.
        mode: as for torch.compile with inductor.
        options: inductor's, and ``"convt_reduce.cost_rule"``: False to fuse whether it pays or not.

    Returns:
        The compiled function.
    """
    patches = dict(options or {})
    cost_rule = patches.pop(COST_RULE, True)
    fuse_graph(graph_module, cost_rule=cost_rule)
    if mode is not None and mode != "default":
        patches = {**torch._inductor.list_mode_options(mode), **patches}
    patches = {key.replace("-", "_"): value for key, value in patches.items()}
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph_module, example_inputs, config_patches=patches or None)


def fuse_graph(graph_module: GraphModule, *, cost_rule: bool = True) -> Report:
    """Rewrites a captured graph in place.

    Args:
        graph_module: from Dynamo or torch.export: each node records its value in ``node.meta``,
            under "example_value" or "val".
        cost_rule: leave alone what would not pay.

    Returns:
        What was fused, and why the rest was not. It is also logged, by the logger
        ``convt_reduce.compiler``, at level INFO.
    """
    report = _rewrite(graph_module.graph, graph_module, cost_rule)
    if report.fused:
        graph_module.graph.lint()
        graph_module.recompile()
    return report


def _rewrite(graph: Graph, root: torch.nn.Module, cost_rule: bool) -> Report:
    entries = _fuse_sites(graph, root, cost_rule)
    for node in graph.nodes:
        # What activation checkpointing recomputes is captured as a graph of its own.
        if getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            body = root.get_submodule(node.args[0].target)
            entries += fuse_graph(body, cost_rule=cost_rule).entries
    report = Report(tuple(entries))
    if entries:
        _log.info("%s", report)
    return report


def _fuse_sites(graph: Graph, root: torch.nn.Module, cost_rule: bool) -> list[Entry]:
    entries = []
    for conv in find_convolutions(graph, root):
        where = _where(conv, root)
        try:
            site = match(conv, root)
            check_captured(site, root, cost_rule)
        except Refusal as reason:
            entries.append(Entry(where, False, str(reason)))
            continue
        entries.append(Entry(where, True, " -> ".join(step.name for step in site.steps)))
        emit_captured(site, graph, root)
    return entries


def _where(conv: Node, root: torch.nn.Module) -> str:
    """The layer that called the convolution, as far as the capture tells, and the node."""
    stack = conv.meta.get("nn_module_stack") or {}
    names = [value[0] for value in stack.values() if isinstance(value, tuple)]
    return f"{conv} in {names[-1]}" if names and names[-1] else f"{conv}"


class InductorPass(CustomGraphPass):
    """The rewrite as a pass before autograd, for ``torch._inductor.config.pre_grad_custom_pass``.

    Args:
        cost_rule: leave alone what would not pay.
    """

    def __init__(self, *, cost_rule: bool = True) -> None:
        self.cost_rule = cost_rule

    def __call__(self, graph: Graph) -> None:
        _rewrite(graph, graph.owning_module, self.cost_rule)

    def uuid(self) -> str:
        """What inductor's cache must know of the pass: a digest of the package's sources."""
        digest = hashlib.sha256(f"{convt_reduce.__version__} {self.cost_rule}".encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()


inductor_pass = InductorPass()
