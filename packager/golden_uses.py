"""What the graph does with each input: the facts from which synthesised values are kept in range.

Each input is followed forward through operators that only move, cast or select values, into branches, loop bodies and
model-local functions, up to the operators that give its values a meaning: a row of a table, a length, a mask, one of
a few known codes, a feature compared with thresholds. Those are its *uses*. Nothing is computed and no weights are
read: constants small enough to be kept in :class:`packager.graph.Tensor` and shapes are all there is.

What an operator's input means is data, in :mod:`packager.golden_roles`; this page only follows values.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

from packager.golden_roles import Trace, Use, View, roles
from packager.golden_shapes import dim_key
from packager.graph import MAX_DEPTH, Function, Graph, Node, Tensor, Value
from packager.model import Model, TensorSpec

Traces = tuple[Trace, ...]


@dataclass
class _Scope:
    """Names visible at a place of the graph; subgraphs see the outer ones."""

    traces: MutableMapping[str, Traces] = field(default_factory=dict)
    constants: MutableMapping[str, Tensor] = field(default_factory=dict)
    dims: MutableMapping[str, tuple[int | str | None, ...]] = field(default_factory=dict)

    def inner(self) -> _Scope:
        """A scope of its own over this one: what is written there isn't seen here."""
        return _Scope(ChainMap({}, self.traces), ChainMap({}, self.constants), ChainMap({}, self.dims))


@dataclass(frozen=True)
class _Walk:
    """What is collected on the way (by input, in order), the model's functions, and the names of its outputs."""

    uses: dict[str, dict[Use, None]]
    functions: dict[tuple[str, str], Function]
    last: frozenset[str]


def find_uses(model: Model) -> dict[str, tuple[Use, ...]]:
    """The uses of every tensor input by name, in the order the graph has them; empty for an input never used."""
    uses: dict[str, dict[Use, None]] = {spec.name: {} for spec in model.signature.inputs}
    functions = {(function.domain, function.name): function for function in model.structure.functions}
    last = frozenset(spec.name for spec in model.signature.outputs)
    scope = _Scope()
    for spec in model.signature.inputs:
        scope.traces[spec.name] = (Trace(spec.name),)
        if spec.dims is not None:
            scope.dims[spec.name] = tuple(_size(spec, axis) for axis in range(len(spec.dims)))
    _enter(model.structure.graph, scope)
    _visit(model.structure.graph.nodes, scope, _Walk(uses, functions, last), 0)
    return {name: tuple(found) for name, found in uses.items()}


def _size(spec: TensorSpec, axis: int) -> int | str | None:
    dim = (spec.dims or ())[axis]
    return dim_key(spec, axis, dim) or dim


def _enter(graph: Graph, scope: _Scope) -> None:
    """Make a graph's constants and annotated shapes visible."""
    for tensor in graph.initializers:
        scope.constants[tensor.name] = tensor
        scope.dims[tensor.name] = tensor.dims
    for value in (*graph.values, *graph.outputs):
        _annotate(value, scope)


def _annotate(value: Value, scope: _Scope) -> None:
    if value.type.kind == "tensor" and value.type.dims is not None:
        known = tuple(None if isinstance(dim, int) and dim < 0 else dim for dim in value.type.dims)
        scope.dims.setdefault(value.name, known)


def _visit(nodes: Sequence[Node], scope: _Scope, walk: _Walk, depth: int) -> None:
    if depth > MAX_DEPTH:
        return
    for node in nodes:
        _learn(node, scope)
        traced = [(position, scope.traces[name]) for position, name in enumerate(node.inputs) if name in scope.traces]
        view = View(node, scope.constants, scope.dims, walk.last)
        for position, traces in traced:
            for trace in traces:
                for use in roles(view, position, trace):
                    walk.uses[trace.input][use] = None
        _pass_on(view, traced, scope)
        function = walk.functions.get((node.domain, node.op_type))
        if function is not None:
            _call(node, function, scope, walk, depth)
        for attribute in node.attributes:
            for graph in attribute.graphs:
                inner = scope.inner()
                _bind(node, graph, scope, inner)
                _enter(graph, inner)
                _visit(graph.nodes, inner, walk, depth + 1)
                _return(node, graph, inner, scope)


def _learn(node: Node, scope: _Scope) -> None:
    """Record a constant's value, and the shape of what is made by operators that keep it or say it."""
    if not node.outputs or node.domain not in ("", "com.microsoft"):
        return
    made = node.outputs[0]
    if node.op_type == "Constant":
        for attribute in node.attributes:
            if attribute.tensors:
                scope.constants[made] = attribute.tensors[0]
                scope.dims[made] = attribute.tensors[0].dims
            elif isinstance(attribute.value, int | float):
                scope.constants[made] = Tensor(made, "int64", (), values=(attribute.value,))
                scope.dims[made] = ()
        return
    source = scope.dims.get(node.inputs[0]) if node.inputs else None
    if source is None:
        return
    if node.op_type in ("Identity", "Cast", "DequantizeLinear", "QuantizeLinear", "Relu", "Abs", "Neg"):
        scope.dims[made] = source
        if node.op_type in ("Identity", "Cast") and node.inputs[0] in scope.constants:
            scope.constants[made] = scope.constants[node.inputs[0]]
    elif node.op_type == "Transpose":
        found = node.attribute("perm")
        perm = found.value if found is not None and isinstance(found.value, tuple) else range(len(source))[::-1]
        order = [int(axis) for axis in perm]
        if sorted(order) == list(range(len(source))):
            scope.dims[made] = tuple(source[axis] for axis in order)


def _pass_on(view: View, traced: list[tuple[int, Traces]], scope: _Scope) -> None:
    """Let an operator's outputs carry on the inputs whose values they hold."""
    node = view.node
    if node.domain or not node.outputs:
        return
    kept: dict[Trace, None] = {}
    for position, traces in traced:
        for trace in traces:
            onward = view.onward(position, trace)
            if onward is not None:
                kept[onward] = None
    if not kept:
        return
    targets = node.outputs if node.op_type in ("Split", "Identity") else node.outputs[:1]
    for name in targets:
        scope.traces[name] = tuple(kept)


def _call(node: Node, function: Function, scope: _Scope, walk: _Walk, depth: int) -> None:
    """Follow values into a model-local function, which sees its arguments and nothing else, and back."""
    inner = _Scope()
    for formal, actual in zip(function.inputs, node.inputs, strict=False):
        _same(scope, actual, inner, formal)
    _visit(function.nodes, inner, walk, depth + 1)
    for formal, actual in zip(function.outputs, node.outputs, strict=False):
        _same(inner, formal, scope, actual)


def _bind(node: Node, graph: Graph, outer: _Scope, inner: _Scope) -> None:
    """Give a loop body's formal inputs what is passed to them: Loop's carried values, Scan's states and slices."""
    actual: tuple[str, ...] = ()
    if node.op_type == "Loop":
        actual = ("", "", *node.inputs[2:])
    elif node.op_type == "Scan":
        actual = node.inputs
    for value, name in zip(graph.inputs, actual, strict=False):
        if name in outer.traces:
            inner.traces[value.name] = outer.traces[name]
        _annotate(value, inner)


def _return(node: Node, graph: Graph, inner: _Scope, outer: _Scope) -> None:
    """Let a node's outputs carry on what its branches and bodies give."""
    given = [value.name for value in graph.outputs]
    if node.op_type == "Loop":
        given = given[1:]
    for name, made in zip(given, node.outputs, strict=False):
        if name in inner.traces and made:
            merged = dict.fromkeys((*outer.traces.get(made, ()), *inner.traces[name]))
            outer.traces[made] = tuple(merged)


def _same(source: _Scope, name: str, target: _Scope, other: str) -> None:
    if name in source.traces:
        target.traces[other] = source.traces[name]
    if name in source.constants:
        target.constants[other] = source.constants[name]
    if name in source.dims:
        target.dims[other] = source.dims[name]
