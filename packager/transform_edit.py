"""What conversions of single nodes work with: what is known of their values, and small changes around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packager.graph import DTYPES, Dim
from packager.transform_graphs import constant, fresh
from packager.transform_inference import Known

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir


class Impossible(Exception):
    """There is no exact conversion; the text says why."""


@dataclass(frozen=True)
class Edit:
    """What an adapter may use: what is known of values, and names that are taken."""

    found: dict[ir.Value, Known]
    taken: set[str]

    def dims(self, value: ir.Value | None) -> tuple[Dim, ...] | None:
        """What is inferred of the value's dims, ``None`` where its rank is unknown."""
        known = None if value is None else self.found.get(value)
        return None if known is None else known.dims

    def dtype(self, value: ir.Value | None) -> str:
        """The value's dtype as far as it is known, else empty."""
        known = None if value is None else self.found.get(value)
        return "" if known is None else DTYPES.get(known.dtype, "")

    def constant(self, node: ir.Node, array: np.ndarray, hint: str) -> ir.Value:
        """A new initializer of the node's graph."""
        import onnx_ir as ir

        name = fresh(f"{node.outputs[0].name}_{hint}", self.taken)
        tensor = ir.tensor(array, name=name)
        made = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        _graph(node).register_initializer(made)
        return made

    def before(self, node: ir.Node, op_type: str, inputs: list[ir.Value | None], **attributes: Any) -> ir.Value:  # noqa: ANN401
        """A new node of one output before ``node``."""
        import onnx_ir as ir

        made = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=1)
        made.outputs[0].name = fresh(f"{node.outputs[0].name}_{op_type}", self.taken)
        _graph(node).insert_before(node, made)
        return made.outputs[0]

    def after(self, node: ir.Node, op_type: str, others: list[ir.Value | None], **attributes: Any) -> None:  # noqa: ANN401
        """A new node between ``node`` and all that used its first output; the output's name moves to the new one."""
        import onnx_ir as ir

        old = node.outputs[0]
        uses, is_output = list(old.uses()), old.is_graph_output()
        made = ir.Node("", op_type, [old, *others], ir.convenience.convert_attributes(attributes), num_outputs=1)
        new = made.outputs[0]
        name, old.name = old.name, fresh(f"{old.name}_{node.op_type}", self.taken)
        new.name, new.shape, new.type = name, old.shape, old.type
        old.shape = None
        if old in self.found:
            self.found[new] = self.found.pop(old)
        graph = _graph(node)
        graph.insert_after(node, made)
        for user, index in uses:
            user.replace_input_with(index, new)
        if is_output:
            for index, value in enumerate(graph.outputs):
                if value is old:
                    graph.outputs[index] = new


def _graph(node: ir.Node) -> Any:  # noqa: ANN401
    assert node.graph is not None  # noqa: S101 - for the type checker
    return node.graph


def given(node: ir.Node, index: int) -> ir.Value | None:
    """An input, ``None`` where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def fixed(node: ir.Node, index: int, what: str) -> np.ndarray | None:
    """A constant input's array, ``None`` where it is left out.

    Raises:
        Impossible: it is computed at run time.
    """
    value = given(node, index)
    if value is None:
        return None
    tensor = constant(value)
    if tensor is None:
        raise Impossible(f"its {what} are computed at run time ('{value.name}')")
    array: np.ndarray = tensor.numpy()
    return array


def take(node: ir.Node, name: str) -> Any:  # noqa: ANN401
    """An attribute's value, removed from the node; ``None`` where it isn't set."""
    found = node.attributes.pop(name, None)
    return None if found is None else found.value


def peek(node: ir.Node, name: str, default: Any = None) -> Any:  # noqa: ANN401
    """An attribute's value, or ``default``."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def put(node: ir.Node, name: str, value: Any) -> None:  # noqa: ANN401
    """Set an attribute."""
    import onnx_ir as ir

    node.attributes.update({item.name: item for item in ir.convenience.convert_attributes({name: value})})


def set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    """Set an input, growing the list with left-out ones."""
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def used(value: ir.Value) -> bool:
    """Whether anything reads the value."""
    return bool(value.uses()) or value.is_graph_output()
