"""The rewriting of a float32 model in half precision, once it is decided which nodes stay.

Every float32 value gets the dtype its maker gives it; every slot that wants the other one reads it through a Cast,
one for each value and dtype, placed right behind the maker so that If and Loop bodies see it too. Constants aren't
cast: they are stored in the dtype wanted, in both where a kept node and a converted node share one. Casts that were
there before become what their consumers need. A value of the graph's signature keeps its name: where the signature
stays float32, what the last node makes gets another name and a Cast makes the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from packager.float16_rules import MOVING, constant, largest, subgraphs
from packager.float16_slots import Need, Slots, is_float32, slots_of

if TYPE_CHECKING:
    import onnx_ir as ir

_SCHEMA_TYPES = {"FLOAT16": "tensor(float16)", "BFLOAT16": "tensor(bfloat16)"}
CAST_OPSET = 13
"""Imported for Casts where a model uses other domains only (IR version 7 and later know it)."""
STORED_ELEMENTS = 256
"""Smaller constants aren't worth a Cast."""
_TAGS = {"FLOAT16": "fp16", "BFLOAT16": "bf16", "FLOAT": "fp32"}


def graphs_of(model: ir.Model) -> dict[ir.Graph, ir.Node | None]:
    """Every graph of a model, outer before inner, each subgraph with the node that holds it."""
    found: dict[ir.Graph, ir.Node | None] = {model.graph: None}
    todo: list[ir.Graph] = [model.graph]
    while todo:
        for node in todo.pop():
            for graph in subgraphs(node):
                found[graph] = node
                todo.append(graph)
    return found


@dataclass
class Work:
    """What the rewriting of one model knows: its graphs, what every node does and what names are taken."""

    graphs: dict[ir.Graph, ir.Node | None]
    low: ir.DataType
    keep_io: bool
    slots: dict[ir.Node, Slots]
    stored: set[ir.Node] = field(default_factory=set)
    is_low: set[ir.Node] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    @property
    def main(self) -> ir.Graph:
        """The main graph."""
        return next(iter(self.graphs))

    def reads(self, node: ir.Node, index: int) -> Need:
        """What the node takes at input ``index``."""
        need = self.slots[node].inputs.get(index, "any")
        return "wide" if need == "low" and node not in self.is_low else need

    def gives(self, node: ir.Node, index: int) -> Need:
        """What the node makes at output ``index``."""
        need = self.slots[node].outputs.get(index, "any")
        return "wide" if need == "low" and node not in self.is_low else need

    def boundary(self, graph: ir.Graph) -> Need:
        """What a graph's inputs and outputs hold: the signature's dtype, or that of the node it belongs to."""
        holder = self.graphs[graph]
        if holder is None:
            return "wide" if self.keep_io else "low"
        return "low" if holder in self.is_low else "wide"

    def made(self, value: ir.Value) -> Need | None:
        """What the maker of a value gives; ``None`` for constants, which come in any dtype."""
        if value.is_graph_input():
            graph = value.graph
            return "wide" if value.is_initializer() or graph is None else self.boundary(graph)
        producer = value.producer()
        if producer is None or (producer.op_type == "Constant" and not producer.domain):
            return None
        return self.gives(producer, value.index() or 0)

    def dtype(self, need: Need) -> ir.DataType:
        """The onnx-ir dtype of a need."""
        import onnx_ir as ir

        return self.low if need == "low" else ir.DataType.FLOAT

    def fresh(self, name: str, need: Need) -> str:
        """A name nobody uses yet, for the value ``name`` in the dtype of ``need``."""
        stem = f"{name}_{_TAGS[self.dtype(need).name]}"
        found, number = stem, 1
        while found in self.names:
            number += 1
            found = f"{stem}_{number}"
        self.names.add(found)
        return found


def rewrite(
    model: ir.Model, kept: Iterable[ir.Node], low: ir.DataType, *, keep_io: bool, stored: Iterable[ir.Node] = ()
) -> bool:
    """Make the model half precision in place, all but ``kept``; types of all values must be known (inferred) before.

    Args:
        model: without local functions.
        kept: nodes that compute in float32; a kept If, Loop or Scan keeps all that is in it.
        low: FLOAT16 or BFLOAT16.
        keep_io: leave the signature float32.
        stored: those of ``kept`` that read their large constants through a Cast, so that these still take half the
            bytes.

    Returns:
        Whether anything became half precision.
    """
    graphs = graphs_of(model)
    opsets = {"" if domain == "ai.onnx" else domain: version for domain, version in model.opset_imports.items()}
    slots = {node: slots_of(node, opsets, _SCHEMA_TYPES[low.name]) for graph in graphs for node in graph}
    work = Work(graphs, low, keep_io, slots, _with_bodies(stored))
    values = list(values_of(graphs))
    work.names.update(value.name for value in values if value.name)
    work.names.update(node.name for node in slots if node.name)
    _decide(work, _with_bodies(kept))
    outputs = outputs_of(graphs)
    makers = [value for value in values if is_float32(value)]
    plans = [(value, work.made(value), _wanted(work, value, outputs)) for value in makers]
    final = {value: work.dtype(need) for value, need, _ in plans if need is not None}
    for node in work.is_low:
        _retype_attributes(node, low)
    for node in slots:
        _fix_dtype(node)
    for value, need, wanted in plans:
        if need is None:
            _place_constant(work, value, wanted)
        else:
            value.dtype = work.dtype(need)
            _addcast_of(work, value, need, wanted, final)
    for node in [node for graph in graphs for node in graph if node.op_type == "Cast" and not node.domain]:
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output() and node.graph is not None:
            node.graph.remove(node, safe=True)
    if "" not in model.graph.opset_imports and any(node.op_type == "Cast" for graph in graphs for node in graph):
        model.graph.opset_imports[""] = CAST_OPSET
    return any(value.dtype == low for value in makers)


def values_of(graphs: Iterable[ir.Graph]) -> Iterator[ir.Value]:
    """Every value of the graphs, once: inputs, initializers, then what nodes make, in order."""
    seen: set[ir.Value] = set()
    for graph in graphs:
        made = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *made):
            if value not in seen:
                seen.add(value)
                yield value


def _with_bodies(kept: Iterable[ir.Node]) -> set[ir.Node]:
    found: set[ir.Node] = set()
    todo = list(kept)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [inner for graph in subgraphs(node) for inner in graph]
    return found


def _decide(work: Work, kept: set[ir.Node]) -> None:
    """Which nodes compute in half precision.

    What moves values or makes them from nothing goes with its neighbours: half where its source is half already, or
    where all that read it want half; so no value is rounded on the way from one float32 node to another.
    """
    free = {node for node, slots in work.slots.items() if node not in kept and slots.can_be_low}
    moving = {node for node in free if _is_moving(node)}
    work.is_low |= free - moving
    outputs = outputs_of(work.graphs)
    changed = True
    while changed:
        turned = {node for node in moving - work.is_low if _goes_low(work, node, outputs)}
        work.is_low |= turned
        changed = bool(turned)


def _is_moving(node: ir.Node) -> bool:
    return not node.domain and node.op_type in (MOVING | {"Cast", "ConstantOfShape"})


def _goes_low(work: Work, node: ir.Node, outputs: dict[ir.Value, list[tuple[ir.Graph, int]]]) -> bool:
    sources = [work.made(value) for value in node.inputs if value is not None and is_float32(value)]
    if "low" in sources:
        return True
    wanted: list[Need] = []
    for value in node.outputs:
        if is_float32(value):
            uses = _wanted(work, value, outputs)
            wanted += ["low"] * (len(uses.low) + len(uses.low_outputs))
            wanted += ["wide"] * (len(uses.wide) + len(uses.wide_outputs))
    return "low" in wanted and "wide" not in wanted


@dataclass
class _Wanted:
    """Who reads a value, by the dtype wanted: slots of nodes, and places in the outputs of graphs."""

    low: list[tuple[ir.Node, int]] = field(default_factory=list)
    wide: list[tuple[ir.Node, int]] = field(default_factory=list)
    low_outputs: list[tuple[ir.Graph, int]] = field(default_factory=list)
    wide_outputs: list[tuple[ir.Graph, int]] = field(default_factory=list)


def outputs_of(graphs: Iterable[ir.Graph]) -> dict[ir.Value, list[tuple[ir.Graph, int]]]:
    """Values that graphs give, with the graph and the place among its outputs."""
    found: dict[ir.Value, list[tuple[ir.Graph, int]]] = {}
    for graph in graphs:
        for index, value in enumerate(graph.outputs):
            found.setdefault(value, []).append((graph, index))
    return found


def _wanted(work: Work, value: ir.Value, outputs: dict[ir.Value, list[tuple[ir.Graph, int]]]) -> _Wanted:
    found = _Wanted()
    for node, index in value.uses():
        need = work.reads(node, index)
        if need != "any":
            (found.low if need == "low" else found.wide).append((node, index))
    for graph, index in outputs.get(value, ()):
        (found.low_outputs if work.boundary(graph) == "low" else found.wide_outputs).append((graph, index))
    return found


def to_low(tensor: ir.TensorProtocol, low: ir.DataType) -> ir.TensorProtocol:
    """A float32 tensor in half precision, rounded to nearest even; converted when it is saved, not kept in memory."""
    import onnx_ir as ir

    def convert() -> ir.TensorProtocol:
        with np.errstate(over="ignore"):  # bounds of Clip, Min and Max become infinity on purpose
            array = np.asarray(tensor.numpy()).astype(low.numpy())
        return ir.Tensor(array, dtype=low, name=tensor.name)

    return ir.LazyTensor(convert, low, ir.Shape(tensor.shape), name=tensor.name)


def _place_constant(work: Work, value: ir.Value, wanted: _Wanted) -> None:
    """Store a constant in half, in float32, or in both."""
    tensor = constant(value)
    if tensor is None:
        return
    through = [slot for slot in wanted.wide if slot[0] in work.stored] if tensor.size >= STORED_ELEMENTS else []
    if len(through) < len(wanted.wide) or wanted.wide_outputs or largest(tensor) > float(np.finfo(np.float16).max):
        through = []  # float32 is stored in any case
    if not (wanted.low or wanted.low_outputs or through):
        return
    half = to_low(tensor, work.low)
    if through:
        made = cast_of(work, value, "wide", work.fresh(value.name or "constant", "wide"), value)
        insert_behind(value, made)
        redirect(made.outputs[0], through, ())
        wanted.low += [(made, 0)]
    if len(value.uses()) == len(wanted.low) and not wanted.wide_outputs:
        value.dtype = work.low
        _set_constant(value, half)
        return
    other = _new_constant(value, half, work.fresh(value.name or "constant", "low"), work.low)
    redirect(other, wanted.low, wanted.low_outputs)


def _set_constant(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    import onnx_ir as ir

    node = value.producer()
    if node is None:
        value.const_value = tensor
        return
    for name in ("value_float", "value_floats"):
        node.attributes.pop(name, None)
    node.attributes["value"] = ir.AttrTensor("value", tensor)


def _new_constant(value: ir.Value, tensor: ir.TensorProtocol, name: str, low: ir.DataType) -> ir.Value:
    import onnx_ir as ir

    node = value.producer()
    if node is None:
        made = ir.Value(name=name, shape=value.shape, type=ir.TensorType(low), const_value=tensor)
        if value.graph is not None:
            value.graph.register_initializer(made)
        return made
    twin = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1, name=name)
    made = twin.outputs[0]
    made.name, made.shape, made.type = name, value.shape, ir.TensorType(low)
    node.append(twin)
    return made


def redirect(made: ir.Value, slots: Iterable[tuple[ir.Node, int]], outputs: Iterable[tuple[ir.Graph, int]]) -> None:
    """Let these input slots and graph outputs read another value."""
    for node, index in slots:
        node.replace_input_with(index, made)
    for graph, index in outputs:
        graph.outputs[index] = made


def _addcast_of(work: Work, value: ir.Value, need: Need, wanted: _Wanted, final: dict[ir.Value, ir.DataType]) -> None:
    """Give the readers that want the other dtype a Cast of the value."""
    other: Need = "wide" if need == "low" else "low"
    slots = wanted.wide if need == "low" else wanted.low
    outputs = wanted.wide_outputs if need == "low" else wanted.low_outputs
    if not (slots or outputs):
        return
    source = _behind_cast(value, final)
    if not outputs and source is not value and final.get(source, source.dtype) == work.dtype(other):
        redirect(source, slots, ())
        return
    in_main = any(graph is work.main for graph, _ in outputs)
    name = value.name or "value"
    if in_main:  # the wire name belongs to the output
        value.name = work.fresh(name, need)
    inner = [(graph, index) for graph, index in outputs if graph is not value.graph]
    if slots or len(inner) < len(outputs):
        made = cast_of(work, source, other, name if in_main else work.fresh(name, other), value)
        insert_behind(value, made)
        redirect(made.outputs[0], slots, [place for place in outputs if place not in inner])
    for graph, index in inner:  # a body that gives an outer value as it is
        made = cast_of(work, value, other, work.fresh(name, other), value)
        graph.append(made)
        graph.outputs[index] = made.outputs[0]


def _behind_cast(value: ir.Value, final: dict[ir.Value, ir.DataType]) -> ir.Value:
    """What a Cast that makes the value casts: casting that anew spares one Cast of a pair, and one rounding."""
    node = value.producer()
    if node is None or node.domain or node.op_type != "Cast":
        return value
    source = node.inputs[0]
    if source is None or source.dtype is None or source.dtype.is_string():
        return value
    if is_float32(source) and source not in final and constant(source) is not None:
        return value
    return source


def cast_of(work: Work, source: ir.Value, need: Need, name: str, like: ir.Value) -> ir.Node:
    """A Cast of ``source``, not yet in a graph, that makes ``name`` with the shape of ``like``."""
    import onnx_ir as ir

    work.names.add(name)
    target = work.dtype(need)
    node = ir.Node("", "Cast", [source], [ir.AttrInt64("to", int(target))], num_outputs=1, name=work.fresh(name, need))
    made = node.outputs[0]
    made.name, made.shape, made.type = name, like.shape, ir.TensorType(target)
    return node


def insert_behind(value: ir.Value, node: ir.Node) -> None:
    """Put a node right behind what makes the value: the earliest place, so that subgraphs see its output too."""
    producer, graph = value.producer(), value.graph
    if producer is not None:
        producer.append(node)
    elif graph is not None:
        first = next(iter(graph), None)
        if first is None:
            graph.append(node)
        else:
            graph.insert_before(first, node)


def _fix_dtype(node: ir.Node) -> None:
    """Say the dtype of what would follow an input that may become half."""
    import onnx_ir as ir

    like = not node.domain and node.op_type in ("RandomNormalLike", "RandomUniformLike", "EyeLike", "Bernoulli")
    if like and "dtype" not in node.attributes and is_float32(node.outputs[0]):
        node.attributes["dtype"] = ir.AttrInt64("dtype", int(ir.DataType.FLOAT))


def _retype_attributes(node: ir.Node, low: ir.DataType) -> None:
    import onnx_ir as ir

    if node.domain:
        return
    if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
        node.attributes["to"] = ir.AttrInt64("to", int(low))
    if node.op_type == "ConstantOfShape":
        tensor = constant(node.outputs[0])
        if tensor is not None:
            node.attributes["value"] = ir.AttrTensor("value", to_low(tensor, low))
