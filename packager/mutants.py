"""Small wrong models, made of a right one on purpose: a layer's weights scaled, two channels swapped, a bias gone.

Each mutant is one change that a broken converter or exporter could have made, with a sentence that says which. They
are what golden cases are scored with (:mod:`packager.strength`): cases that can't tell a mutant from the model can't
tell a broken bundle either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packager.goldens import Array

if TYPE_CHECKING:
    import onnx

SCALE = 1.1
"""Weights times this: far more than rounding does, far less than a wrong layout."""

NEAR = {
    "Relu": "Identity", "Sigmoid": "HardSigmoid", "Tanh": "Softsign", "Add": "Sub", "Sub": "Add", "Max": "Min",
    "Min": "Max", "GlobalMaxPool": "GlobalAveragePool", "GlobalAveragePool": "GlobalMaxPool",
    "ReduceMax": "ReduceMean", "ReduceMean": "ReduceMax", "Floor": "Ceil", "Ceil": "Floor",
    "Greater": "GreaterOrEqual", "Less": "LessOrEqual", "And": "Or", "Or": "And",
}  # fmt: skip
"""Operators that are taken for each other, with inputs, outputs and attributes of the same form."""

FLOAT_ATTRIBUTES = frozenset({
    "coefficients", "class_weights", "target_weights", "scale", "nodes_values", "leaf_weights", "nodes_splits",
})  # fmt: skip
"""Attributes, lists of floats or tensors, that hold the weights of ai.onnx.ml's operators."""

Place = tuple[tuple[int, int], ...]
"""Where a graph is: from the main graph, the number of a node and of its attribute, again and again."""


@dataclass(frozen=True)
class Mutant:
    """One change: the node it is felt at, what was done, and the function that does it to a copy of the model."""

    node: str
    change: str
    apply: Callable[[onnx.ModelProto], None]

    @property
    def text(self) -> str:
        """``node Conv 'c1': 'w' scaled by 1.1``."""
        return f"node {self.node}: {self.change}"


def find_mutants(model: onnx.ModelProto) -> list[Mutant]:
    """Every mutant of a model, branches and loop bodies included, in graph order.

    Args:
        model: weights inline.
    """
    return list(_of_graph(model.graph, (), {}))


def _of_graph(graph: onnx.GraphProto, path: Place, outer: dict[str, tuple[Place, int, bool]]) -> Iterator[Mutant]:
    """Mutants of a graph. ``outer`` holds the constants it sees: where, which number, whether a Constant node."""
    held = {**outer, **{tensor.name: (path, index, False) for index, tensor in enumerate(graph.initializer)}}
    for index, node in enumerate(graph.node):
        if node.op_type == "Constant" and not node.domain and node.attribute and node.attribute[0].HasField("t"):
            held[node.output[0]] = (path, index, True)
    used: set[str] = set()
    tensors = {
        name: _tensor_in(graph, index, constant) for name, (where, index, constant) in held.items() if where == path
    }
    for index, node in enumerate(graph.node):
        label = _label(node)
        if not node.domain and node.op_type in NEAR:
            yield Mutant(label, f"computed as {NEAR[node.op_type]}", _renaming(path, index))
        for place, attribute in enumerate(node.attribute):
            if attribute.name in FLOAT_ATTRIBUTES:
                yield from _of_attribute(attribute, path, index, place, label)
            if attribute.HasField("g"):
                yield from _of_graph(attribute.g, (*path, (index, place)), held)
        for name in node.input:
            if name in tensors and name not in used:
                used.add(name)
                yield from _of_tensor(tensors[name], held[name], name, label)


def _label(node: onnx.NodeProto) -> str:
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{operator} '{node.name or (node.output[0] if node.output else '')}'"


def _graph(model: onnx.ModelProto, path: Place) -> onnx.GraphProto:
    graph = model.graph
    for node, attribute in path:
        graph = graph.node[node].attribute[attribute].g
    return graph


def _tensor_in(graph: onnx.GraphProto, index: int, constant: bool) -> onnx.TensorProto:
    return graph.node[index].attribute[0].t if constant else graph.initializer[index]


def _renaming(path: Place, index: int) -> Callable[[onnx.ModelProto], None]:
    def rename(model: onnx.ModelProto) -> None:
        node = _graph(model, path).node[index]
        node.op_type = NEAR[node.op_type]

    return rename


def _of_attribute(attribute: onnx.AttributeProto, path: Place, index: int, place: int, label: str) -> Iterator[Mutant]:
    from onnx import numpy_helper

    def scale(model: onnx.ModelProto) -> None:
        held = _graph(model, path).node[index].attribute[place]
        scaled = [each * SCALE for each in held.floats]
        del held.floats[:]
        held.floats.extend(scaled)
        if held.HasField("t"):
            array = numpy_helper.to_array(held.t)
            held.t.CopyFrom(numpy_helper.from_array((array * SCALE).astype(array.dtype), held.t.name))

    if any(attribute.floats) or attribute.HasField("t"):
        yield Mutant(label, f"{attribute.name} scaled by {SCALE}", scale)


def _of_tensor(tensor: onnx.TensorProto, place: tuple[Place, int, bool], name: str, label: str) -> Iterator[Mutant]:
    """Mutants of a float constant: scaled; and its first two channels swapped, or a bias zeroed."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        return
    array = numpy_helper.to_array(tensor)
    if not array.size or not np.any(array):
        return
    path, index, constant = place

    def changing(change: Callable[[Array], Array]) -> Callable[[onnx.ModelProto], None]:
        def apply(model: onnx.ModelProto) -> None:
            target = _tensor_in(_graph(model, path), index, constant)
            made = change(numpy_helper.to_array(target)).astype(array.dtype)
            target.CopyFrom(numpy_helper.from_array(made, target.name))

        return apply

    yield Mutant(label, f"'{name}' scaled by {SCALE}", changing(lambda held: held.astype(np.float64) * SCALE))
    if array.ndim >= 2 and array.shape[0] > 1 and not np.array_equal(array[0], array[1]):
        yield Mutant(label, f"channels 0 and 1 of '{name}' swapped", changing(_swapped))
    elif array.ndim == 1 and array.size > 1:
        yield Mutant(label, f"'{name}' zeroed", changing(np.zeros_like))


def _swapped(array: Array) -> Array:
    made = array.copy()
    made[[0, 1]] = array[[1, 0]]
    return made
