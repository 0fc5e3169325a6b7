"""Exact equivalents for operators that OpenVINO's frontend reads wrongly, put into a copy of the model.

The copy is made in memory, and only when :func:`packager.targets.openvino.hazards.rewrites` finds something. External
data stays where it is; weights inside the model file pass through memory, 2 GB at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from packager.errors import BuildError
from packager.graph import Structure, read_structure
from packager.targets.openvino.hazards import known_ranks, rewrite_of, scoped_nodes

if TYPE_CHECKING:
    import onnx

    Nodes = list[onnx.NodeProto]
    Rule = Callable[["onnx.NodeProto", "Names"], Nodes]


class Names:
    """Gives names nobody uses."""

    def __init__(self, used: set[str]) -> None:
        self._used = used

    def new(self, base: str, what: str) -> str:
        """``base/what``, with a number behind it where that is taken."""
        name, count = f"{base}/{what}", 1
        while name in self._used:
            count += 1
            name = f"{base}/{what}_{count}"
        self._used.add(name)
        return name


def rewritten(path: Path) -> tuple[bytes, Structure]:
    """The model with every node replaced that :func:`packager.targets.openvino.hazards.rewrites` lists.

    Args:
        path: the ONNX file; external data is neither read nor copied.

    Returns:
        The serialized model, which names external data relative to the folder of ``path``, and its structure.

    Raises:
        BuildError: a local function can't be inlined, or the model file is beyond protobuf's 2 GB.
    """
    import onnx
    import onnx.checker
    import onnx.inliner

    if path.stat().st_size >= onnx.checker.MAXIMUM_PROTOBUF:
        raise BuildError(
            f"{path}: too large to be rewritten for OpenVINO: {path.stat().st_size} bytes, protobuf takes 2 GB",
            "save the model with its weights as external data",
        )
    try:
        proto = onnx.load(path, load_external_data=False)
        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
        structure = read_structure(data := proto.SerializeToString(), len(data))
        ranks = known_ranks(structure)
        # Both walks meet the nodes in file order, subgraphs right after the node that holds them.
        kinds = [rewrite_of(scoped, ranks) for scoped in scoped_nodes(structure)]
        _rewrite_graph(proto.graph, iter(kinds), Names(_names(proto.graph)))
        data = proto.SerializeToString()
    except (RuntimeError, ValueError) as error:
        raise BuildError(
            f"the model can't be rewritten for OpenVINO: {error}",
            "inline its local functions before packaging (onnx.inliner)",
        ) from error
    return data, read_structure(data, len(data))


def _rewrite_graph(graph: onnx.GraphProto, kinds: Iterator[str | None], names: Names) -> None:
    made: Nodes = []
    for node in graph.node:
        kind = next(kinds)
        for inner in _subgraphs(node):
            _rewrite_graph(inner, kinds, names)
        made.extend([node] if kind is None else RULES[kind](node, names))
    kept = [_copy(node) for node in made]
    del graph.node[:]
    graph.node.extend(kept)


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    import onnx

    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _names(graph: onnx.GraphProto) -> set[str]:
    found = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    found.update(tensor.name for tensor in graph.initializer)
    for node in graph.node:
        found.update((node.name, *node.input, *node.output))
        for inner in _subgraphs(node):
            found |= _names(inner)
    return found


def _reduce(node: onnx.NodeProto, names: Names) -> Nodes:
    """Reductions by their definitions (ONNX operator pages): L1 sums magnitudes, LogSum takes the logarithm of the sum.

    LogSumExp takes the maximum out first, as every implementation does: log(sum(exp(x))) = m + log(sum(exp(x - m))).
    """
    from onnx import helper

    base, source, result = node.output[0], node.input[0], node.output[0]
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    axes, keepdims = list(attributes["axes"]), int(attributes.get("keepdims", 1))
    axes_name = names.new(base, "axes")
    made = [helper.make_node("Constant", [], [axes_name], value_ints=axes, name=axes_name)]

    def call(operator: str, inputs: list[str], output: str = "", **settings: object) -> str:
        name = output or names.new(base, operator)
        made.append(helper.make_node(operator, inputs, [name], name=names.new(base, f"{operator}_node"), **settings))
        return name

    if node.op_type == "ReduceL1":
        call("ReduceSum", [call("Abs", [source]), axes_name], result, keepdims=keepdims)
    elif node.op_type == "ReduceLogSum":
        call("Log", [call("ReduceSum", [source, axes_name], keepdims=keepdims)], result)
    else:
        highest = call("ReduceMax", [source], axes=axes, keepdims=1)
        powers = call("Exp", [call("Sub", [source, highest])])
        logarithm = call("Log", [call("ReduceSum", [powers, axes_name], keepdims=keepdims)])
        shift = highest if keepdims else call("Squeeze", [highest, axes_name])
        call("Add", [logarithm, shift], result)
    return made


def _softmax(node: onnx.NodeProto, names: Names) -> Nodes:
    """Before opset 13, Softmax works on the input flattened to two axes at ``axis``, and gives the shape back."""
    from onnx import helper

    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    base = node.output[0]
    shape, flat, result = (names.new(base, what) for what in ("shape", "flat", "softmax"))
    return [
        helper.make_node("Shape", [node.input[0]], [shape], name=names.new(base, "Shape")),
        helper.make_node("Flatten", [node.input[0]], [flat], name=names.new(base, "Flatten"), axis=axis),
        helper.make_node("Softmax", [flat], [result], name=node.name or names.new(base, "Softmax"), axis=1),
        helper.make_node("Reshape", [result, shape], [base], name=names.new(base, "Reshape")),
    ]


BATCH_FIRST = (1, 0, 2)
"""Between [batch, sequence or directions, size] and [sequence or directions, batch, size]."""


def _layout(node: onnx.NodeProto, names: Names) -> Nodes:
    """``layout=1`` is ``layout=0`` with transposed X, initial states and outputs (ONNX operator pages, opset 14)."""
    from onnx import helper

    base = next(name for name in node.output if name)
    before: Nodes = []
    after: Nodes = []
    inner = _copy(node)
    kept = [attribute for attribute in node.attribute if attribute.name != "layout"]
    del inner.attribute[:]
    inner.attribute.extend(kept)
    for position in (0, 5, 6):  # X, initial_h, initial_c
        if position < len(node.input) and node.input[position]:
            turned = names.new(base, f"in{position}")
            name = names.new(base, "Transpose")
            before.append(helper.make_node("Transpose", [node.input[position]], [turned], name=name, perm=BATCH_FIRST))
            inner.input[position] = turned
    for position, output in enumerate(node.output):
        if output:
            turned = names.new(base, f"out{position}")
            # Y: [sequence, directions, batch, size] to [batch, sequence, directions, size]
            perm = (2, 0, 1, 3) if position == 0 else BATCH_FIRST
            name = names.new(base, "Transpose")
            after.append(helper.make_node("Transpose", [turned], [output], name=name, perm=perm))
            inner.output[position] = turned
    return [*before, inner, *after]


RULES: dict[str, Rule] = {"reduce": _reduce, "softmax": _softmax, "layout": _layout}
