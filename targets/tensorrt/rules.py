"""What TensorRT's parser reads in another sense than ONNX, without a word, as far as the graph shows it.

What the parser refuses by itself it says better (:mod:`.compile` asks it for every node). These rules are for what it
takes: each was found by parsing a small model with TensorRT for RTX 1.7.1 and looking at the layers it made. A node is
*refused*, or *rewritten* (:mod:`.rewrite` puts an exact equivalent in its place), or noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packager.errors import Objection
from packager.graph import Graph, Node, Structure, Tensor

UNSIGNED = ("uint8", "uint16", "uint4", "int16")
"""Dtypes of zero points that mean a quantised dtype TensorRT hasn't: it reads their values as int8."""

CARRIERS = ("QuantizeLinear", "DequantizeLinear")


def refusals(structure: Structure) -> list[Objection]:
    """Nodes that TensorRT would compute wrongly, or that aren't ONNX's own, in file order."""
    constants = dict(constant_values(structure.graph))
    makers = {output: node for node in structure.graph.walk() for output in node.outputs if output}
    found = []
    for node in structure.walk():
        reason = _refused(node, constants) or _uneven_branches(node, makers, constants)
        if reason:
            found.append(Objection(node.label, reason))
    return found


def _refused(node: Node, constants: Mapping[str, Tensor]) -> str:
    if node.domain:
        return (
            f"it is of domain {node.domain}; TensorRT's parser ignores domains, and takes such a node for ONNX's "
            f"own {node.op_type} where there is one"
        )
    if node.op_type in CARRIERS:
        return _misread_quantisation(node, constants)
    if node.op_type == "Resize":
        turned = _text(node, "coordinate_transformation_mode") == "tf_half_pixel_for_nn"
        if turned and _text(node, "mode") not in ("", "nearest"):
            return "TensorRT reads tf_half_pixel_for_nn as half_pixel, half a pixel off, where it interpolates"
    return ""


def _misread_quantisation(node: Node, constants: Mapping[str, Tensor]) -> str:
    """Why TensorRT can't take a (de)quantising node: it has symmetric int8 (and fp8 and int4) only."""
    zero = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2] else ""
    if not zero:
        # Without a zero point QuantizeLinear makes uint8, unless an output dtype is named (opset 21).
        if node.op_type == "QuantizeLinear" and not node.integer("output_dtype", 0):
            return "without a zero point it makes uint8, which TensorRT reads as int8; it takes symmetric int8 only"
        return ""
    tensor = constants.get(zero)
    if tensor is None:
        return f"its zero point '{zero}' is no constant"
    if tensor.dtype in UNSIGNED:
        return f"its zero point '{zero}' is {tensor.dtype}, which TensorRT reads as int8; it takes symmetric int8 only"
    numbers = tensor.numbers()
    if numbers is not None and any(numbers):
        return f"its zero point '{zero}' isn't zero; TensorRT takes symmetric quantisation only"
    return ""


def _uneven_branches(node: Node, makers: Mapping[str, Node], constants: Mapping[str, Tensor]) -> str:
    """TensorRT needs both branches to give tensors of one rank, unless it knows the condition when it builds."""
    if node.op_type != "If" or node.domain or not _depends_on_values(node.inputs[0], makers, constants):
        return ""
    branches = list(node.subgraphs())
    if len(branches) != 2:
        return ""
    for index, (one, other) in enumerate(zip(branches[0].outputs, branches[1].outputs, strict=False)):
        if one.type.dims is not None and other.type.dims is not None and len(one.type.dims) != len(other.type.dims):
            ranks = f"{len(one.type.dims)} and {len(other.type.dims)}"
            return f"its branches give output {index} with ranks {ranks}; TensorRT takes branches of one rank only"
    return ""


def _depends_on_values(name: str, makers: Mapping[str, Node], constants: Mapping[str, Tensor]) -> bool:
    """Whether a value depends on what inputs hold, not only on their sizes, which TensorRT may know when it builds."""
    todo, seen = [name], {name}
    while todo:
        maker = makers.get(todo.pop())
        if maker is None:
            continue
        if not maker.domain and maker.op_type in ("Shape", "Size", "Constant"):
            continue
        for source in maker.inputs:
            if source and source not in seen:
                seen.add(source)
                todo.append(source)
    return bool(seen - set(makers) - set(constants))


def rewrites(structure: Structure) -> dict[str, list[str]]:
    """What will be rewritten: titles of steps, each with labels of nodes, or names of inputs.

    A dim that an exporter knows nothing of has no name here, but may be called ``?`` in the file, as all such are.
    """
    found: dict[str, list[str]] = {}
    nameless = [value.name for value in structure.graph.inputs if None in (value.type.dims or ())]
    if nameless:
        found["Leaving nameless dims without a name, since TensorRT takes dims of one name for one size"] = nameless
    for node, title in rewritten_nodes(structure):
        found.setdefault(title, []).append(node.label)
    return found


def rewritten_nodes(structure: Structure) -> Iterator[tuple[Node, str]]:
    """Every node that will be rewritten, with the title of the step that does it."""
    constants = dict(constant_values(structure.graph))
    for node in structure.graph.walk():
        title = _rewrite_title(node, constants)
        if title:
            yield node, title


def _rewrite_title(node: Node, constants: Mapping[str, Tensor]) -> str:
    if node.domain:
        return ""
    if is_floor_resize(node.op_type, _text(node, "coordinate_transformation_mode"), _text(node, "nearest_mode")):
        return "Rewriting Resize with tf_half_pixel_for_nn and floor as half_pixel"
    if node.op_type == "Cast" and node.inputs[0] in constants and constants[node.inputs[0]].dtype == "int8":
        return "Turning weights stored as int8 behind a Cast into DequantizeLinear"
    return ""


def is_floor_resize(op_type: str, transformation: str, rounding: str) -> bool:
    """Whether a Resize takes floor((x + 0.5) / scale), which half_pixel and round_prefer_ceil say just as well.

    half_pixel is v - 0.5 with v = (x + 0.5) / scale, and round_prefer_ceil(v - 0.5) = floor(v - 0.5 + 0.5).
    """
    return op_type == "Resize" and transformation == "tf_half_pixel_for_nn" and rounding == "floor"


def grid_sample_modes(structure: Structure) -> list[str]:
    """The modes of all GridSample nodes, by the names of opset 20."""
    newer = {"bilinear": "linear", "bicubic": "cubic", "": "linear"}
    modes = [_text(node, "mode") for node in structure.walk() if node.op_type == "GridSample" and not node.domain]
    return sorted(newer.get(mode, mode) for mode in modes)


def notes(structure: Structure) -> list[str]:
    """What the user should know though nothing is refused."""
    doubles = [tensor.name for tensor in structure.tensors() if tensor.dtype == "float64"]
    if not doubles:
        return []
    more = ", ..." if len(doubles) > 3 else ""
    return [f"TensorRT computes float64 in float32 (constants {', '.join(doubles[:3])}{more})"]


def constant_values(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """Every constant of the graph by name, those in Constant nodes and subgraphs included."""
    yield from ((tensor.name, tensor) for tensor in graph.initializers)
    for node in graph.nodes:
        attribute = node.attribute("value")
        if node.op_type == "Constant" and not node.domain and attribute is not None and attribute.tensors:
            yield node.outputs[0], attribute.tensors[0]
        for inner in node.subgraphs():
            yield from constant_values(inner)


def _text(node: Node, name: str) -> str:
    attribute = node.attribute(name)
    return attribute.value if attribute is not None and isinstance(attribute.value, str) else ""
