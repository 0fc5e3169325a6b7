"""What OpenVINO 2026.4 can't convert, and what it converts and computes differently, as far as the graph shows it.

Each rule was found by running ONNX's node tests and small variations of them in OpenVINO on CPU against ONNX Runtime.
Three outcomes: the node is *refused* (it never converts, or its answer is always wrong), it is *rewritten*
(:mod:`.rewrite` puts an exact equivalent in its place), or it is *noted* (wrong for some values only, so that the
golden cases must tell).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from packager.errors import Objection
from packager.graph import Node, Structure, Tensor, Value
from packager.room import Limits

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
ACTIVATIONS = frozenset({"sigmoid", "tanh", "relu"})
"""Activation functions of recurrent operators that OpenVINO compiles; all others fail."""

REDUCTIONS = frozenset({"ReduceL1", "ReduceLogSum", "ReduceLogSumExp"})
"""Read with the axes-as-input rule of opset 18 from opset 13 on, so that an ``axes`` attribute is dropped."""

INEXACT_INTEGERS = frozenset(
    {"Div", "Mod", "Pow", "Relu", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "MatMul", "ReduceSum",
     "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare"}
)  # fmt: skip
"""Computed through float32 on CPU for integer tensors: exact up to 2**24, rounded beyond."""

INTEGERS = frozenset({"int32", "int64", "uint32", "uint64"})

REWRITES: Mapping[str, str] = {
    "inline": "Inlining local functions",
    "reduce": "Rewriting reductions whose axes OpenVINO drops",
    "softmax": "Rewriting Softmax of opset 11 and 12, which OpenVINO takes over one axis only",
    "layout": "Rewriting batch-first recurrent operators, whose layout OpenVINO misreads",
}
"""Kinds of rewrites and the titles of their steps, in the order they are listed."""


@dataclass(frozen=True)
class Scoped:
    """A node with the operator set version it is read by."""

    node: Node
    opset: int


def scoped_nodes(structure: Structure) -> Iterator[Scoped]:
    """Every node in file order: main graph, subgraphs in place, then local functions with their own operator set."""
    opset = structure.opset() or 0
    for node in structure.graph.walk():
        yield Scoped(node, opset)
    for function in structure.functions:
        own = dict(function.opsets).get("", opset)
        for node in function.nodes:
            yield Scoped(node, own)
            for inner in node.subgraphs():
                yield from (Scoped(deep, own) for deep in inner.walk())


def refusals(structure: Structure, limits: Limits) -> list[Objection]:
    """Nodes that never convert or are always computed wrongly, in file order."""
    constants = constant_values(structure)
    local = {(function.domain, function.name) for function in structure.functions}
    given = {each.name for each in structure.graph.inputs} - set(constants)
    found = []
    for scoped in scoped_nodes(structure):
        node = scoped.node
        if (node.domain, node.op_type) in local:
            continue
        reason = _listed(node, limits) or ("" if node.domain else _refused(scoped, constants) or _rankless(node, given))
        if reason:
            found.append(Objection(node.label, reason))
    return found


def _listed(node: Node, limits: Limits) -> str:
    if node.domain in limits.refused_domains:
        return f"OpenVINO converts no operator of domain {node.domain}"
    return limits.refused_operators.get(node.operator, "")


def _refused(scoped: Scoped, constants: Mapping[str, Tensor | None]) -> str:
    node = scoped.node
    if node.op_type in RECURRENT:
        return _refused_recurrent(node, constants)
    if node.op_type == "DFT" and _given(node, 2) and node.inputs[2] not in constants:
        return f"OpenVINO ignores its axis '{node.inputs[2]}', which is not a constant"
    if node.op_type == "Attention":
        # Attributes of Attention in opset 25, whose schema OpenVINO carries and whose rule ignores them.
        window = [name for name in ("left_window_size", "right_window_size") if node.integer(name, -1) >= 0]
        return f"OpenVINO ignores its {' and '.join(window)}" if window else ""
    if node.op_type == "Resize":
        mode = _text(node, "coordinate_transformation_mode")
        if mode in ("tf_crop_and_resize", "half_pixel_symmetric"):
            return f"OpenVINO has no coordinate_transformation_mode '{mode}'"
        if node.integer("exclude_outside", 0) and _text(node, "mode") == "cubic":
            return "OpenVINO ignores its exclude_outside, so that values near the edges are wrong"
    if node.op_type == "Pad" and _text(node, "mode") == "wrap":
        return "OpenVINO has no padding mode 'wrap'"
    return ""


def _rankless(node: Node, given: Set[str]) -> str:
    """Nodes whose output has as many dims as an input of the model says, and which the CPU plug-in doesn't compile."""
    changes = node.op_type == "Unsqueeze" or (node.op_type == "ReduceLogSum" and not node.integer("keepdims", 1))
    if changes and _given(node, 1) and node.inputs[1] in given:
        return f"the rank of its output depends on the model's input '{node.inputs[1]}'; make its axes a constant"
    return ""


def _refused_recurrent(node: Node, constants: Mapping[str, Tensor | None]) -> str:
    functions = node.attribute("activations")
    listed = functions.value if functions is not None and isinstance(functions.value, tuple) else ()
    names = {name.decode("utf-8", "replace") for name in listed if isinstance(name, bytes)}
    other = sorted(name for name in names if name.lower() not in ACTIVATIONS)
    if other:
        return f"OpenVINO's recurrent operators have no activation {', '.join(other)}"
    if node.op_type == "LSTM" and node.integer("input_forget", 0):
        return "OpenVINO ignores its input_forget"
    if node.op_type == "LSTM" and _given(node, 7) and not _is_zero(constants.get(node.inputs[7])):
        return f"OpenVINO ignores its peephole weights '{node.inputs[7]}'"
    return ""


def rewrite_of(scoped: Scoped, ranks: Mapping[str, int]) -> str | None:
    """The kind of rewrite a node needs, a key of :data:`REWRITES`, or ``None``.

    ``ranks`` are the ranks known of values in the main graph. A Softmax over the last axis needs none.
    """
    node, opset = scoped.node, scoped.opset
    if node.domain:
        return None
    if node.op_type in REDUCTIONS and 13 <= opset < 18 and node.attribute("axes") is not None:
        return "reduce"
    if node.op_type == "Softmax" and opset in (11, 12):
        axis = node.integer("axis", 1)
        rank = ranks.get(node.inputs[0]) if node.inputs else None
        return None if axis == -1 or (rank is not None and axis == rank - 1) else "softmax"
    if node.op_type in RECURRENT and node.integer("layout", 0) == 1:
        return "layout"
    return None


def rewrites(structure: Structure) -> dict[str, list[str]]:
    """What will be rewritten: kinds of :data:`REWRITES`, in that order, each with its nodes' labels, or, for those that
    are inlined, the functions' names."""
    nodes = rewritten_nodes(structure)
    found = {kind: [node.label for node in nodes.get(kind, ())] for kind in REWRITES}
    found["inline"] = sorted({f"{function.domain}.{function.name}" for function in structure.functions})
    return {kind: labels for kind, labels in found.items() if labels}


def rewritten_nodes(structure: Structure) -> dict[str, list[Node]]:
    """The nodes that will be rewritten, by kind of :data:`REWRITES`; calls of local functions are inlined."""
    ranks = known_ranks(structure)
    local = {(function.domain, function.name) for function in structure.functions}
    found: dict[str, list[Node]] = {kind: [] for kind in REWRITES}
    for scoped in scoped_nodes(structure):
        node = scoped.node
        kind = "inline" if (node.domain, node.op_type) in local else rewrite_of(scoped, ranks)
        if kind is not None:
            found[kind].append(node)
    return {kind: nodes for kind, nodes in found.items() if nodes}


def notes(structure: Structure) -> list[str]:
    """Known hazards: nodes whose answer OpenVINO gets wrong for some values, which only golden cases can show."""
    integers = _integer_values(structure)
    exactness = [
        node.label
        for node in structure.walk()
        if not node.domain and node.op_type in INEXACT_INTEGERS and integers.intersection(_operands(node))
    ]
    found = []
    if exactness:
        found.append(
            f"known hazard: OpenVINO computes integers beyond 2**24 through float32, rounded, in {_shown(exactness)}"
        )
    by_reason: dict[str, list[str]] = {}
    constants = constant_values(structure)
    for node in structure.walk():
        if not node.domain and (reason := _noted(node, constants)):
            by_reason.setdefault(reason, []).append(node.label)
    found.extend(f"known hazard: OpenVINO {reason}: {_shown(nodes)}" for reason, nodes in by_reason.items())
    return found


def _operands(node: Node) -> tuple[str, ...]:
    """The inputs that are computed with: not the axes of a reduction."""
    return node.inputs[:1] if node.op_type.startswith("Reduce") else node.inputs[:2]


def _noted(node: Node, constants: Mapping[str, Tensor | None]) -> str:
    if node.op_type == "Tile" and _given(node, 1) and node.inputs[1] not in constants:
        return "gives wrong values where computed repeats repeat four axes or more"
    if node.op_type == "Resize" and node.integer("antialias", 0):
        return "ignores antialias when it shrinks"
    if node.op_type == "Resize" and _text(node, "keep_aspect_ratio_policy") not in ("", "stretch"):
        return "ignores keep_aspect_ratio_policy"
    if (
        node.op_type == "Resize"
        and _text(node, "coordinate_transformation_mode") == "align_corners"
        and _given(node, 2)
    ):
        return "aligns corners by the rounded size when scales give a fraction"
    if node.op_type == "Attention" and node.integer("is_causal", 0) and _given(node, 3) and _given(node, 4):
        return "masks differently when is_causal meets both a mask and past keys"
    if node.op_type in ("MaxPool", "AveragePool") and node.integer("ceil_mode", 0):
        return "may count one window too many with ceil_mode"
    if node.op_type == "RoiAlign" and _text(node, "mode") == "max":
        return "samples differently in mode max"
    if node.op_type == "TopK":
        return "may order equal values differently"
    if node.op_type == "BitShift":
        return "shifts negative numbers towards zero"
    return ""


def known_ranks(structure: Structure) -> dict[str, int]:
    """Ranks of the main graph's values, as declared."""
    graph = structure.graph
    values: Iterable[Value] = (*graph.values, *graph.inputs, *graph.outputs)
    return {value.name: len(value.type.dims) for value in values if value.type.dims is not None}


def constant_values(structure: Structure) -> dict[str, Tensor | None]:
    """Names whose value is fixed in the file, with the tensor where it is one."""
    found: dict[str, Tensor | None] = {tensor.name: tensor for tensor in structure.graph.initializers}
    for node in structure.walk():
        if node.op_type == "Constant" and not node.domain and node.outputs:
            attribute = node.attribute("value")
            found[node.outputs[0]] = attribute.tensors[0] if attribute is not None and attribute.tensors else None
    return found


def _integer_values(structure: Structure) -> set[str]:
    """Names in the main graph known to be integer tensors of 32 or 64 bits."""
    graph = structure.graph
    declared = (*graph.inputs, *graph.outputs, *graph.values)
    names = {value.name for value in declared if value.type.kind == "tensor" and value.type.dtype in INTEGERS}
    return names | {tensor.name for tensor in graph.initializers if tensor.dtype in INTEGERS}


def _given(node: Node, position: int) -> bool:
    return len(node.inputs) > position and bool(node.inputs[position])


def _is_zero(tensor: Tensor | None) -> bool:
    numbers = None if tensor is None else tensor.numbers()
    return numbers is not None and not any(numbers)


def _text(node: Node, name: str) -> str:
    attribute = node.attribute(name)
    return attribute.value if attribute is not None and isinstance(attribute.value, str) else ""


def _shown(labels: list[str], most: int = 5) -> str:
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more
