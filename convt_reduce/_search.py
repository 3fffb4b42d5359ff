"""The sites of a whole model, and the plans that fuse them.

The decision that shaped it: touch as little as possible. The model is traced whole to find the
sites, but only the forward of the innermost module that holds a site is replaced, and inside that
one only those modules are traced through that the site needs. A part that cannot be traced stays as
it is and its own parts are looked at one by one.
"""

from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule, Node

from convt_reduce._arguments import required_parameters
from convt_reduce._emit import emit_traced
from convt_reduce._fused import Plan, make_plan
from convt_reduce._guards import Collector
from convt_reduce._match import Site, find_convolutions, is_layer, match
from convt_reduce._report import Entry, Refusal, Untraceable
from convt_reduce._spelling import settings_of, spell
from convt_reduce._trace import ForwardTracer, copy_sharing, trace

BACKEND = 'torch.compile(model, backend="convt_reduce") may see it'


class Search:
    """What is found in a model in one setting of train and eval modes.

    Args:
        model: stays as it is.
        mode: True or False to look at it in train or eval mode; None: as it is.
        cost_rule: whether the plans leave the convolution in where fusing would not pay.

    Attributes:
        entries: per call of a convolution, by where it is.
        notes: why parts of the model were not looked at.
        plans: by the name of the module whose forward each replaces.
    """

    def __init__(self, model: nn.Module, mode: bool | None, cost_rule: bool) -> None:
        self.model, self.mode, self.cost_rule = model, mode, cost_rule
        self.entries: dict[str, Entry] = {}
        self.notes: list[str] = []
        self.plans: dict[str, Plan] = {}
        self._inlined: dict[str, frozenset[str]] = {}
        self._seen: set[str] = set()
        self._closed: dict[str, str] = {}  # name of a module that cannot be traced -> why
        todo, done = [""], set()
        while todo:
            path = todo.pop(0)
            if path not in done:
                done.add(path)
                todo += self._look_into(path)
        self._account_for_the_unseen()

    def _probe(self, path: str) -> nn.Module:
        """A throw-away copy of a part of the model, in this search's modes."""
        probe = copy_sharing(self.model.get_submodule(path))
        return probe if self.mode is None else probe.train(self.mode)

    def _look_into(self, path: str) -> list[str]:
        """Traces a module and plans its sites; returns the modules to look into next."""
        module = self._probe(path)
        children = [_join(path, name) for name, _ in module.named_children()]
        if is_layer(module) or (not children and _is_torchs_own(module)):
            return []
        if _is_torchs_own(module):
            return children
        try:
            check_host(module)
            graph, tracer = trace(module)
        except Untraceable as why:
            self._closed[path] = str(why)
            return children
        pending = []
        for conv in find_convolutions(graph, module):
            where = self._where(conv, module, path)
            try:
                site = match(conv, module)
            except Refusal as reason:
                self.entries[where] = Entry(where, False, str(reason))
            else:
                self.entries[where] = Entry(where, True, _describe(site))
                pending.append((where, list(_hosts(site, tracer))))
        self._plan(path, pending)
        return [_join(path, name) for name in tracer.opaque]

    def _where(self, conv: Node, module: nn.Module, path: str) -> str:
        if conv.op == "call_module":
            where = _join(path, conv.target)
            self._seen.add(where)
        else:
            callers = conv.meta["callers"]
            owner = _join(path, callers[-1][0] if callers else "")
            where = f"{spell(conv, module).name} in {owner or type(self.model).__name__}"
        calls = sum(key == where or key.startswith(f"{where} (call ") for key in self.entries)
        return f"{where} (call {calls + 1})" if calls else where

    def _plan(self, root: str, pending: list) -> None:
        """Plans each site in the innermost module that can hold it."""
        while pending:
            host, _ = pending[0][1][0]
            group = [item for item in pending if item[1][0][0] == host]
            full = _join(root, host)
            inline = self._inlined.get(full, frozenset()).union(*(c[0][1] for _, c in group))
            try:
                self.plans[full] = self._make_plan(full, inline, len(group))
                self._inlined[full] = inline
            except Untraceable as why:
                for where, candidates in group:
                    del candidates[0]
                    if not candidates:
                        sentence = f"its module's forward cannot be traced: {why}; {BACKEND}"
                        self.entries[where] = Entry(where, False, sentence)
                pending = [item for item in pending if item[1]]
            else:
                pending = [item for item in pending if item not in group]

    def _make_plan(self, host: str, inline: frozenset[str], expected: int) -> Plan:
        module = self._probe(host)
        check_host(module)
        graph, tracer = trace(module, inline)
        watch = tracer.watch
        collector = Collector(module, tracer.tensor_attrs, watch.asks_types)
        for path in ("", *inline):
            collector.replaces(_split(path), traced=True)
        for part, names in watch.reads.values():
            for name in names:
                collector.read(part, name)
        sites = 0
        for conv in find_convolutions(graph, module):
            try:
                site = match(conv, module)
            except Refusal:
                continue
            sites += 1
            _collect(collector, site, module)
            emit_traced(site, graph, self.cost_rule)
        if sites < expected:
            raise Untraceable("on its own, less is known of its inputs")
        variables = [(owner, name) for owner, name, _ in watch.variables.values()]
        guards = collector.guards(variables, watch.answers)
        return make_plan(graph, required_parameters(module), guards)

    def _account_for_the_unseen(self) -> None:
        """An entry for each layer that no trace came by, and a note for each closed module."""
        for name, layer in self.model.named_modules():
            if is_layer(layer) and name not in self._seen:
                above = [path for path in self._closed if name.startswith(_join(path, ""))]
                sentence = "no forward that was traced calls it"
                if above:
                    path = max(above, key=len)
                    sentence = f"the forward of {self._name(path)} cannot be traced: "
                    sentence += f"{self._closed[path]}; {BACKEND}"
                self.entries[name] = Entry(name, False, sentence)
        for path, why in self._closed.items():
            module = self.model.get_submodule(path)
            if not path or any(is_layer(part) for part in module.modules()):
                name = self._name(path)
                self.notes.append(f"the forward of {name} cannot be traced: {why}; {BACKEND}")

    def _name(self, path: str) -> str:
        return f"'{path}'" if path else type(self.model).__name__


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _is_torchs_own(module: nn.Module) -> bool:
    own = type(module).__module__.startswith("torch.") and not isinstance(module, GraphModule)
    return own and not isinstance(module, nn.Sequential)


def check_host(module: nn.Module) -> None:
    """Raises Untraceable for a module whose forward could not be replaced by its class's."""
    if "forward" in vars(module):
        raise Untraceable("it is not its class's")
    if isinstance(module, torch.jit.ScriptModule):
        raise Untraceable("it is compiled by TorchScript")
    if isinstance(module, GraphModule):
        raise Untraceable("it is generated by torch.fx; fuse the module that it was traced from")
    if nn.utils.parametrize.is_parametrized(module):
        raise Untraceable("its module is parametrised")
    for cls in type(module).__mro__:
        if cls.__module__.split(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for name in ("__init_subclass__", "__reduce__", "__reduce_ex__", "__deepcopy__"):
            if name in vars(cls) and "_convt_reduce_base" not in vars(cls):
                raise Untraceable(f"its class has its own {name}")
    if type(type(module)) not in (type, ABCMeta):
        raise Untraceable(f"its class has the metaclass {type(type(module)).__name__}")


def _collect(collector: Collector, site: Site, root: nn.Module) -> None:
    """What a site takes for granted: its layers, their settings, and the shapes of its operands."""
    for node in site.nodes:
        if node.op == "call_module":
            layer = root.get_submodule(node.target)
            collector.replaces(_split(node.target), traced=False)
            for name in settings_of(layer):  # none of a convolution: it reads them at every call
                collector.read(layer, name)
    if site.sized:
        for name in ("out_channels", "groups") if site.call.module is not None else ():
            collector.read(site.call.module, name)
        collector.shape(f"{site.call.path}.weight".lstrip("."))
    known = [node for step in site.steps for node in step.node.all_input_nodes]
    known += [node for node in site.conv.all_input_nodes if node is not site.call.get("input")]
    done = set(site.nodes)
    while known:
        node = known.pop()
        if node not in done:
            done.add(node)
            known += node.all_input_nodes
            if node.op == "get_attr":
                collector.shape(node.target)


def _split(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def _hosts(site: Site, tracer: ForwardTracer) -> Iterator[tuple[str, frozenset[str]]]:
    """From the innermost on, the modules that hold a site, with those inside to trace through."""
    callers = [node.meta["callers"] for node in site.nodes]
    depth = 0
    while all(len(c) > depth and c[depth] == callers[0][depth] for c in callers):
        depth += 1
    for level in range(depth, -1, -1):
        host = callers[0][level - 1] if level else ("", 0)
        if level and not tracer.hostable[host]:
            continue
        prefix = f"{host[0]}." if host[0] else ""
        inner = {path for c in callers for path, _ in c[level:]}
        if all(path.startswith(prefix) for path in inner):
            yield host[0], frozenset(path.removeprefix(prefix) for path in inner)


def _describe(site: Site) -> str:
    parts = [" -> ".join(step.name for step in site.steps)]
    if site.eval_only:
        names = " and ".join(f"'{path}'" for path in dict.fromkeys(site.eval_only))
        parts.append(f"while {names} {'is' if len(site.eval_only) == 1 else 'are'} in eval mode")
    if site.rank is not None:
        parts.append(f"for inputs of {site.rank} dimensions")
    if site.kernel is not None:
        parts.append(f"where its output has size {list(site.kernel)}")
    return ", ".join(parts)


def merge_entries(searches: list[Search]) -> tuple[Entry, ...]:
    """The first search's entries, with a word on the modes in which another one could fuse."""
    entries = []
    for where, entry in searches[0].entries.items():
        for other in searches[1:]:
            alternative = other.entries.get(where)
            if not entry.fused and alternative is not None and alternative.fused:
                mode = "train" if other.mode else "eval"
                entry = replace(entry, detail=f"{entry.detail}; fused once in {mode} mode")
        entries.append(entry)
    return tuple(entries)
