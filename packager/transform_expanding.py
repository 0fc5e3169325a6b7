"""Operators that an older operator set lacks, expanded by ONNX's own definition of them.

Many operators come with a function body in ONNX: LayerNormalization (17), Gelu (20), RMSNormalization (23) and others
are defined by older operators. Where a target's operator set ends before them, their nodes give way to that body.
A body is written for an operator set of its own, so its nodes are converted from there; a body may hold operators that
have bodies themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from packager.transform_edit import Impossible
from packager.transform_graphs import label
from packager.transform_inference import Known, infer

if TYPE_CHECKING:
    import onnx
    import onnx.defs
    import onnx_ir as ir

DOMAIN = "packager.expanded"
"""Of the local functions that bodies pass through on their way into the graph."""
RANDOM = frozenset({"Bernoulli"})
"""Not expanded: the body draws other numbers."""
FLOAT32_ONLY = frozenset({"Attention"})
"""Not expanded in half precision: runtimes compute its softmax at another precision than the body does."""
_HALF = (10, 16)
MAX_DEPTH = 6
"""Bodies within bodies."""


def body(node: ir.Node, version: int, known: dict[ir.Value, Known]) -> tuple[onnx.FunctionProto, int] | None:
    """The function that ONNX defines a node's operator by, and the operator set it is written for.

    Args:
        node: of the default domain.
        version: the operator set the node is of.
        known: inferred types; a body may depend on them.
    """
    import onnx
    import onnx.defs
    import onnx_ir as ir

    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return None
    dtypes = {known[value].dtype for value in node.inputs if value is not None and value in known}
    if node.op_type in RANDOM or (node.op_type in FLOAT32_ONLY and dtypes.intersection(_HALF)):
        return None
    _fill_defaults(node, schema)
    for written_for in sorted(schema.function_opset_versions, reverse=True):
        if written_for <= version:
            made = onnx.FunctionProto()
            made.ParseFromString(schema.get_function_with_opset_version(written_for))
            return made, written_for
    types = [_type(value, known).SerializeToString() for value in node.inputs]
    for written_for in sorted(schema.context_dependent_function_opset_versions, reverse=True):
        if written_for <= version:
            serialized = ir.serde.serialize_node(node).SerializeToString()
            found = schema.get_context_dependent_function_with_opset_version(written_for, serialized, types)
            made = onnx.FunctionProto()
            made.ParseFromString(found)
            return (made, written_for) if made.node else None
    return None


def _fill_defaults(node: ir.Node, schema: onnx.defs.OpSchema) -> None:
    """Say what the schema leaves unsaid: inside a body, an attribute that isn't given would be the inner operator's."""
    import onnx
    import onnx_ir as ir

    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.type:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            value = value.decode() if isinstance(value, bytes) else value
            node.attributes.update({item.name: item for item in ir.convenience.convert_attributes({name: value})})


def _type(value: ir.Value | None, known: dict[ir.Value, Known]) -> onnx.TypeProto:
    import onnx

    found = None if value is None else known.get(value)
    if found is None:
        return onnx.TypeProto()
    dims = None if found.dims is None else [dim if isinstance(dim, (int, str)) else None for dim in found.dims]
    return onnx.helper.make_tensor_type_proto(found.dtype, dims)


def expand(model: ir.Model, version: int, absent: Callable[[str], bool]) -> tuple[dict[ir.Node, int], tuple[str, ...]]:
    """Expand nodes of the main graph and its bodies that have no form at an older operator set.

    Args:
        model: changed in place.
        version: the operator set of the default domain to go to.
        absent: whether an operator has no form there.

    Returns:
        New nodes, each with the operator set it is of, and the labels of the nodes that were expanded.
    """
    starts: dict[ir.Node, int] = {}
    labels: list[str] = []
    current = model.graph.opset_imports.get("", 0)
    for _ in range(MAX_DEPTH):
        wanted = [node for node in model.graph.all_nodes() if not node.domain and absent(node.op_type)]
        if not wanted:
            break
        known = infer(model)
        found = [(node, made) for node in wanted if (made := body(node, starts.get(node, current), known))]
        if not found:
            break
        for written_for in sorted({made[1] for _, made in found}):
            chosen = [(node, made[0]) for node, made in found if made[1] == written_for]
            labels += [label(node) for node, _ in chosen if node not in starts]
            starts |= dict.fromkeys(_inlined(model, chosen), written_for)
    return starts, tuple(labels)


def _inlined(model: ir.Model, chosen: Iterable[tuple[ir.Node, onnx.FunctionProto]]) -> set[ir.Node]:
    """Put bodies in place of nodes; gives the new nodes.

    Raises:
        Impossible: a body can't be put there.
    """
    import onnx_ir as ir
    from onnx_ir import passes
    from onnx_ir.passes import common

    labels = []
    for number, (node, proto) in enumerate(chosen):
        labels.append(label(node))
        made = {*proto.input, *(name for inner in proto.node for name in inner.output)}
        outputs = [name for name in proto.output if name in made]  # a body leaves out what the node doesn't ask for
        del proto.output[:], proto.opset_import[:]
        proto.output.extend(outputs)
        for domain, version in model.graph.opset_imports.items():
            proto.opset_import.add(domain=domain, version=version)
        proto.domain, proto.name, proto.overload = DOMAIN, f"{node.op_type}_{number}", ""
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
        node.domain, node.op_type = DOMAIN, proto.name
    before = set(model.graph.all_nodes())
    try:
        common.InlinePass(criteria=lambda function: function.domain == DOMAIN)(model)
    except (passes.PassError, ValueError) as error:
        named = ", ".join(labels)
        why = " ".join(str(error.__cause__ or error).split())
        raise Impossible(f"ONNX's own definition can't be put in place of node {named}: {why}") from error
    finally:
        model.graph.opset_imports.pop(DOMAIN, None)
    return set(model.graph.all_nodes()) - before
