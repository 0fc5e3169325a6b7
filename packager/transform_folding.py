"""One round of constant folding over all graphs of a model. See :class:`packager.transform_shapes.Fold`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packager.graph import BITS, DTYPES, Dim
from packager.hazards import RANDOM_OPERATORS
from packager.transform_graphs import all_names, constant, drop_dead, fresh, inner_graphs, remove, replace_value
from packager.transform_inference import Known

if TYPE_CHECKING:
    import onnx_ir as ir

KEPT = RANDOM_OPERATORS | {"Constant", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Dropout"}
"""Never folded: random, already constant, or (quantisation) meant for the runtime to see."""

DATA_SIZED = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})
"""Output sizes follow from values and are bounded by the inputs' sizes; all others must have a known output size."""

GROWN_BYTES = 16 << 10
"""A fold may make more bytes than it takes in only up to this: weights kept small on purpose (int8, cast to float at
run time) stay small, and so does a large tensor of zeros."""

Partial = dict["ir.Value", tuple[int | None, ...]]
"""1-D int64 values some elements of which are known: shapes on their way."""


def fold_graph(
    model: ir.Model, found: Mapping[ir.Value, Known], *, max_bytes: int, total: int, inside: bool
) -> tuple[bool, int]:
    """Fold once, in place.

    Args:
        model: changed in place.
        found: what is inferred of its values.
        max_bytes: most a folded tensor may take.
        total: most that all of them may take.
        inside: whether graphs inside the main one are folded too.

    Returns:
        Whether anything changed, and how many bytes the new constants take.
    """
    taken, changed, spent = all_names(model), False, 0
    partial: Partial = {}
    for graph in list(model.graphs()) if inside else [model.graph]:
        for node in list(graph):
            if node.graph is not graph or node.domain not in ("", "ai.onnx"):
                continue
            if node.op_type == "If" and _inline_if(model, node, graph, taken):
                # The other graphs of this round may have gone with the branch not taken: begin anew.
                drop_dead(model)
                return True, spent
            _note_partial(node, found, partial)
            made = _folded(model, node, found, partial, max_bytes)
            size = sum(int(tensor.nbytes) for tensor in made)
            if not made or spent + size > total:
                continue
            for value, tensor in zip(node.outputs, made, strict=True):
                _to_constant(value, tensor, graph)
            graph.remove(node, safe=True)
            changed, spent = True, spent + size
    if changed:
        drop_dead(model)
    return changed, spent


def _to_constant(value: ir.Value, tensor: Any, graph: ir.Graph) -> None:  # noqa: ANN401
    import onnx_ir as ir

    name = value.name or ""
    if not name:
        return
    value.name = f"{name}\0folded"
    tensor.name = name
    made = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(made)
    value.replace_all_uses_with(made)


def _folded(
    model: ir.Model, node: ir.Node, found: Mapping[ir.Value, Known], partial: Partial, max_bytes: int
) -> list[Any]:
    """Tensors for the node's outputs, or none where it stays."""
    import numpy as np
    import onnx_ir as ir

    if node.op_type in KEPT or any(value.is_graph_output() for value in node.outputs) or any(inner_graphs(node)):
        return []
    known = partial.get(node.outputs[0]) if len(node.outputs) == 1 else None
    if known is not None and all(size is not None for size in known):
        scalar = node.op_type in ("Size", "Gather", "Squeeze") and found.get(node.outputs[0], Known(0, (0,))).dims == ()
        array = np.array(known[0] if scalar else known, dtype=np.int64)
        return [ir.tensor(array)]
    tensors = [constant(value) if value is not None else None for value in node.inputs]
    if not tensors or any(
        value is not None and (tensor is None or _bytes(tensor) > max_bytes)
        for value, tensor in zip(node.inputs, tensors, strict=True)
    ):
        return []
    if not all(_small(node, value, found, max_bytes) for value in node.outputs):
        return []
    made = _evaluate(model, node, tensors)
    size, given = sum(map(_bytes, made)), sum(_bytes(tensor) for tensor in tensors if tensor is not None)
    return made if size <= max_bytes and size <= max(given, GROWN_BYTES) else []


def _bytes(tensor: Any) -> int:  # noqa: ANN401
    import onnx_ir as ir

    if tensor.dtype == ir.DataType.STRING:
        return sum(len(text) for text in tensor.string_data())
    return int(tensor.nbytes)


def _small(node: ir.Node, value: ir.Value, found: Mapping[ir.Value, Known], max_bytes: int) -> bool:
    known = found.get(value)
    sizes = None if known is None else known.sizes
    if known is None or sizes is None:
        return node.op_type in DATA_SIZED
    bits = BITS.get(DTYPES.get(known.dtype, ""), 64)
    return math.prod(sizes) * bits <= 8 * max_bytes


def _evaluate(model: ir.Model, node: ir.Node, tensors: list[Any]) -> list[Any]:
    """Run the node alone in ONNX Runtime; none where that can't be done.

    Inputs go in as initializers under names of our own, so any name and any dtype will do.
    """
    import numpy as np
    import onnx
    import onnx_ir as ir
    import onnxruntime as ort

    alone = ir.serde.serialize_node(node)
    names = [f"in{index}" if tensor is not None else "" for index, tensor in enumerate(tensors)]
    outputs = [f"out{index}" if value.name else "" for index, value in enumerate(node.outputs)]
    alone.ClearField("input")
    alone.ClearField("output")
    alone.ClearField("metadata_props")
    alone.input.extend(names)
    alone.output.extend(outputs)
    graph = onnx.GraphProto(name="alone", node=[alone])
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None:
            proto = graph.initializer.add()
            proto.CopyFrom(ir.serde.serialize_tensor(tensor))
            proto.name = name
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs if name)
    opsets = [onnx.OperatorSetIdProto(domain="", version=model.opset_imports.get("", 1))]
    whole = onnx.ModelProto(ir_version=model.ir_version, graph=graph, opset_import=opsets)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = session.run(None, {})
    except Exception:  # noqa: BLE001 - a kernel that isn't there, a dtype numpy hasn't: the node just stays
        return []
    if len(values) != len(node.outputs) or not all(isinstance(value, np.ndarray) for value in values):
        return []
    made: list[Any] = []
    for value in values:
        if value.dtype == object:
            texts = np.array([str(text).encode() for text in value.ravel()], dtype=object).reshape(value.shape)
            made.append(ir.StringTensor(texts, shape=ir.Shape(value.shape)))
        else:
            made.append(ir.tensor(np.array(value, order="C")))  # ascontiguousarray would lift a scalar to [1]
    return made


def _note_partial(node: ir.Node, found: Mapping[ir.Value, Known], partial: Partial) -> None:
    """Follow shapes through Shape, Gather, Slice, Concat, Squeeze, Unsqueeze and Cast, element by element."""
    made = _partial(node, found, partial)
    if made is not None:
        partial[node.outputs[0]] = made


def _partial(node: ir.Node, found: Mapping[ir.Value, Known], partial: Partial) -> tuple[int | None, ...] | None:
    if not node.inputs or node.inputs[0] is None:
        return None
    first = node.inputs[0]
    if node.op_type in ("Shape", "Size"):
        known = found.get(first)
        if known is None or known.dims is None:
            return None
        sizes = tuple(dim if isinstance(dim, int) else None for dim in known.dims)
        return _shape(node, sizes) if node.op_type == "Shape" else (_product(sizes),)
    if node.op_type == "Concat":
        parts = [_elements(value, partial) for value in node.inputs]
        if any(part is None for part in parts) or not any(value in partial for value in node.inputs):
            return None
        return tuple(size for part in parts if part is not None for size in part)
    if first not in partial:
        return None
    if node.op_type == "Gather":
        indices = constant(node.inputs[1])
        known_dims = found.get(node.outputs[0], Known(0, None)).dims
        if indices is None or known_dims is None or len(known_dims) > 1:
            return None
        picked = indices.numpy().reshape(-1).tolist()
        row = partial[first]
        return tuple(row[index] for index in picked) if all(-len(row) <= index < len(row) for index in picked) else None
    if node.op_type == "Slice":
        return _slice(node, partial[first])
    if node.op_type in ("Squeeze", "Unsqueeze"):
        dims = found.get(node.outputs[0], Known(0, None)).dims
        return partial[first] if dims is not None and len(dims) <= 1 else None
    if node.op_type == "Identity" or (node.op_type == "Cast" and node.attributes["to"].as_int() == 7):
        return partial[first]
    return None


def _shape(node: ir.Node, sizes: tuple[Dim, ...]) -> tuple[int | None, ...]:
    """Shape's ``start`` and ``end`` clamp as Python's slices do."""
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else None
    return tuple(dim if isinstance(dim, int) else None for dim in sizes[start:end])


def _product(sizes: tuple[int | None, ...]) -> int | None:
    numbers = [size for size in sizes if size is not None]
    return math.prod(numbers) if len(numbers) == len(sizes) else None


def _elements(value: ir.Value | None, partial: Partial) -> tuple[int | None, ...] | None:
    if value in partial:
        return partial[value]
    tensor = constant(value)
    if tensor is None or len(tensor.shape) != 1 or int(tensor.dtype) != 7:
        return None
    return tuple(tensor.numpy().tolist())


def _slice(node: ir.Node, row: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """A slice of a 1-D value. ONNX clamps starts and ends as Python does for positive steps."""
    if "starts" in node.attributes:
        numbers = [list(node.attributes[name].as_ints()) for name in ("starts", "ends")]
    else:
        tensors = [constant(value) for value in node.inputs[1:]]
        if any(tensor is None for tensor in tensors) or len(tensors) < 2:
            return None
        if len(tensors) == 4 and tensors[3].numpy().reshape(-1).tolist() != [1]:
            return None
        numbers = [tensor.numpy().reshape(-1).tolist() for tensor in tensors[:2]]
    return row[int(numbers[0][0]) : int(numbers[1][0])] if len(numbers[0]) == 1 else None


def _inline_if(model: ir.Model, node: ir.Node, graph: ir.Graph, taken: set[str]) -> bool:
    """Put the branch a constant condition takes in place of the If; says whether it did.

    Values of the branch whose names are used elsewhere (the other branch, other Ifs) get fresh ones.
    """
    condition = constant(node.inputs[0])
    if condition is None or condition.size != 1:
        return False
    branch = node.attributes["then_branch" if bool(condition.numpy().reshape(-1)[0]) else "else_branch"].as_graph()
    other = node.attributes["else_branch" if bool(condition.numpy().reshape(-1)[0]) else "then_branch"].as_graph()
    counts = _names_outside(model, branch)
    outputs = list(branch.outputs)
    if len(outputs) != len(node.outputs):
        return False
    branch.outputs.clear()
    for name, value in list(branch.initializers.items()):
        del branch.initializers[name]
        value.name = fresh(name, counts)
        graph.register_initializer(value)
    nodes = list(branch)
    branch.remove(nodes)
    for inner in nodes:
        for value in inner.outputs:
            if value.name:
                value.name = fresh(value.name, counts)
        for nested in inner_graphs(inner):
            _rename_inside(nested, counts)
    graph.insert_before(node, nodes)
    taken.update(counts)
    for old, new in zip(node.outputs, outputs, strict=True):
        replace_value(old, new, graph, taken)
    for dead in list(other):
        for index in range(len(dead.inputs)):
            dead.replace_input_with(index, None)
    remove(node)
    return True


def _names_outside(model: ir.Model, branch: ir.Graph) -> set[str]:
    """Names of all values but those of ``branch`` and the graphs inside it."""
    inside = {id(branch), *(id(graph) for graph in branch.subgraphs())}
    found: set[str] = set()
    for graph in model.graphs():
        if id(graph) in inside:
            continue
        values = (*graph.inputs, *graph.initializers.values(), *(made for node in graph for made in node.outputs))
        found.update(value.name for value in values if value.name)
    return found


def _rename_inside(graph: ir.Graph, taken: set[str]) -> None:
    for value in (*graph.inputs, *list(graph.initializers.values())):
        if value.name:
            value.name = fresh(value.name, taken)
    for node in graph:
        for value in node.outputs:
            if value.name:
                value.name = fresh(value.name, taken)
        for inner in inner_graphs(node):
            _rename_inside(inner, taken)
