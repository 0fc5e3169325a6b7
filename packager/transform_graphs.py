"""Small changes to onnx-ir graphs that several passes make: names, dead nodes, constants, moved values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from packager.graph import DTYPES

if TYPE_CHECKING:
    import onnx_ir as ir


def label(node: ir.Node) -> str:
    """How messages name the node, as :attr:`packager.graph.Node.label` does."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"{operator} '{node.name}'"
    made = next((value.name for value in node.outputs if value.name), "")
    return f"{operator} (unnamed, makes '{made}')" if made else f"{operator} (unnamed)"


def inner_graphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Graphs in the node's attributes: branches and bodies."""
    import onnx_ir as ir

    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def constant(value: ir.Value | None) -> Any:  # noqa: ANN401 - onnx-ir's tensors are a protocol of its own
    """The tensor of a value that is the same in every run, else ``None``.

    An initializer that is also a graph input can be overridden by the caller, so it doesn't count.
    """
    import onnx_ir as ir

    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attributes) != 1:
        return None
    attribute = next(iter(node.attributes.values()))
    if attribute.is_ref():
        return None
    if attribute.name == "value":
        return attribute.as_tensor()
    if attribute.name in ("value_int", "value_ints"):
        return ir.tensor(attribute.value, dtype=ir.DataType.INT64)
    if attribute.name in ("value_float", "value_floats"):
        return ir.tensor(attribute.value, dtype=ir.DataType.FLOAT)
    return None


def all_names(model: ir.Model) -> set[str]:
    """Names of every value anywhere in the main graph and the graphs inside it."""
    found: set[str] = set()
    for graph in model.graphs():
        values = (*graph.inputs, *graph.initializers.values(), *(made for node in graph for made in node.outputs))
        found.update(value.name for value in values if value.name)
    return found


def fresh(wanted: str, taken: set[str]) -> str:
    """``wanted``, or the first ``wanted_1``, ``wanted_2``, ... that isn't taken; it is taken afterwards."""
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken.add(name)
    return name


def drop_dead(model: ir.Model) -> tuple[int, int]:
    """Remove nodes and initializers nothing uses, inside out; gives how many of each.

    ONNX nodes have no side effects, so one whose outputs are unused is dead. Graph outputs count as used.
    """
    nodes = initializers = 0
    changed = True
    while changed:
        changed = False
        for graph in model.graphs():
            for node in reversed(list(graph)):
                if not any(value.uses() or value.is_graph_output() for value in node.outputs):
                    _release(node)
                    graph.remove(node, safe=True)
                    nodes, changed = nodes + 1, True
    for graph in model.graphs():
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                if value.is_graph_input():
                    continue
                del graph.initializers[name]
                initializers += 1
    return nodes, initializers


def _release(node: ir.Node) -> None:
    """Make the nodes inside a node that goes let go of the outer values they use."""
    for graph in inner_graphs(node):
        for inner in graph:
            _release(inner)
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)


def remove(node: ir.Node) -> None:
    """Take a node whose outputs are unused out of its graph, together with the graphs inside it."""
    graph = node.graph
    assert graph is not None  # noqa: S101 - for the type checker
    _release(node)
    graph.remove(node, safe=True)


def replace_value(old: ir.Value, new: ir.Value, graph: ir.Graph, taken: set[str]) -> None:
    """Let ``new`` stand for ``old`` everywhere; a graph output keeps its name.

    Where ``old`` is a graph output, ``new`` is renamed after it if a node of the same graph makes it and it isn't an
    output itself; otherwise an Identity node gives the output its name.
    """
    import onnx_ir as ir

    if old.is_graph_output():
        producer = new.producer()
        if producer is not None and producer.graph is graph and not new.is_graph_output():
            name, old.name = old.name, fresh(f"{old.name}_before", taken)
            new.name, new.shape, new.type = name, old.shape, old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            return
        keep = ir.Node("", "Identity", [new], num_outputs=1)
        made = keep.outputs[0]
        made.shape, made.type = old.shape, old.type
        name, old.name = old.name, fresh(f"{old.name}_before", taken)
        made.name = name
        graph.append(keep)
        old.replace_all_uses_with(made, replace_graph_outputs=True)
        return
    old.replace_all_uses_with(new)


def dtype_name(value: ir.Value | None) -> str:
    """The dtype's name, empty where it isn't known."""
    dtype = None if value is None else value.dtype
    return "" if dtype is None else DTYPES.get(int(dtype), "")
