"""Giving a converted OpenVINO model the exact input and output names of the ONNX graph.

The frontend merges tensors that are the same: an input that only passes a default Dropout takes the output's name, a
single-input Max or Sum leaves one tensor with two names, an input whose value isn't used is gone. Here every input is
one Parameter and every output one Result over a tensor of its own, each with its ONNX name and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from packager.errors import BuildError
from packager.graph import Graph, Node, Structure
from packager.model import Signature, TensorSpec

if TYPE_CHECKING:
    import openvino

VALUE_FREE = {
    "Dropout": 1, "CastLike": 1, "Shape": 0, "Size": 0, "EyeLike": 0, "RandomNormalLike": 0, "RandomUniformLike": 0,
}  # fmt: skip
"""Operators that don't look at the values of their inputs from this position on, only at types, shapes or nothing.

Dropout's ratio and training_mode don't matter in inference; OpenVINO refuses training_mode that isn't constant.
"""

TYPES = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "bool": "boolean"}


def restore_names(model: openvino.Model, structure: Structure, signature: Signature) -> None:
    """Name every input and output of ``model`` (changed in place) as the signature does.

    Args:
        model: as converted from the graph of ``structure``.
        structure: the ONNX graph that was converted.
        signature: the names wanted, pinned dims included.

    Raises:
        BuildError: OpenVINO dropped an input whose value decides an output; the message names the nodes that read it.
    """
    # Inputs first: the names that outputs lose next are what an input is recognised by.
    parameters: dict[str, openvino.Node] = {}
    for parameter in model.get_parameters():
        name = _origin(parameter, structure.graph, [spec.name for spec in signature.inputs])
        if name is None or name in parameters:
            shown = parameter.get_friendly_name()
            raise BuildError(f"OpenVINO made an input '{shown}' that can't be matched to one input of the ONNX graph")
        parameters[name] = parameter
    _give_outputs_their_own_tensor(model, signature)
    for spec in signature.inputs:
        if spec.name not in parameters:
            _check_unused(structure.graph, spec)
            parameters[spec.name] = _add_parameter(model, spec)
    for name, parameter in parameters.items():
        parameter.set_friendly_name(name)
        parameter.output(0).get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()


def _give_outputs_their_own_tensor(model: openvino.Model, signature: Signature) -> None:
    """Put an Identity before each Result that reads an input, a tensor of several names or one another Result reads."""
    from openvino import opset16

    results = model.get_results()
    if len(results) != len(signature.outputs):
        raise BuildError(f"OpenVINO made {len(results)} outputs of the {len(signature.outputs)} of the ONNX graph")
    sources = [result.input_value(0) for result in results]
    keys = [(source.get_node().get_friendly_name(), source.get_index()) for source in sources]
    for spec, result, source, key in zip(signature.outputs, results, sources, keys, strict=True):
        node = source.get_node()
        alone = keys.count(key) == 1 and node.get_type_name() not in ("Parameter", "Constant")
        if alone and source.get_names() == {spec.name}:
            continue
        identity = opset16.identity(source)
        identity.set_friendly_name(f"{spec.name}/output")
        others = source.get_names() - {spec.name}
        source.get_tensor().set_names(others)
        identity.output(0).get_tensor().set_names({spec.name})
        result.input(0).replace_source_output(identity.output(0))


def _origin(parameter: openvino.Node, graph: Graph, wanted: list[str]) -> str | None:
    """The ONNX input a Parameter stands for: by its names, or by following a name back through what passed it on."""
    names: list[str] = [*sorted(parameter.output(0).get_names()), parameter.get_friendly_name()]
    found = [name for name in names if name in wanted]
    if found:
        return found[0]
    makers = {output: node for node in graph.nodes for output in node.outputs if output}
    for name in names:
        seen: set[str] = set()
        while name in makers and name not in seen and makers[name].inputs:
            seen.add(name)
            name = makers[name].inputs[0]  # noqa: PLW2901 -- walking back
        if name in wanted:
            return name
    return None


def _add_parameter(model: openvino.Model, spec: TensorSpec) -> openvino.Node:
    import openvino
    from openvino import opset13

    dims = None if spec.dims is None else [dim if isinstance(dim, int) else -1 for dim in spec.dims]
    shape = openvino.PartialShape.dynamic() if dims is None else openvino.PartialShape(dims)
    made = opset13.parameter(shape, getattr(openvino.Type, element_type(spec.dtype)), name=spec.name)
    model.add_parameters([made])
    return made


def element_type(dtype: str) -> str:
    """OpenVINO's name of a dtype: ``f32``, ``i64``, ``u8``, ``boolean``, ..."""
    return TYPES.get(dtype) or dtype.replace("uint", "u").replace("int", "i")


def _check_unused(graph: Graph, spec: TensorSpec) -> None:
    readers = [node.label for node in _deciding_readers(graph, spec.name)]
    if readers and not (spec.dims and 0 in spec.dims):
        raise BuildError(
            f"OpenVINO drops input '{spec.name}', which decides what {', '.join(readers)} gives",
            "make it a constant of the model, or compute that operator outside the model",
        )


def _deciding_readers(graph: Graph, name: str) -> Iterator[Node]:
    """Nodes that read the values of ``name`` and reach an output."""
    needed = {value.name for value in graph.outputs}
    for node in reversed(graph.nodes):
        if not needed.intersection(node.outputs):
            continue
        read = list(node.inputs[: VALUE_FREE.get(node.op_type, len(node.inputs))])
        for inner in node.subgraphs():
            read.extend(captured for deep in inner.walk() for captured in deep.inputs)
            read.extend(value.name for value in inner.outputs)
        if node.op_type == "Resize" and len(read) > 1:
            read[1] = ""  # the region of interest matters to tf_crop_and_resize only, which is refused
        needed.update(read)
        if name in read:
            yield node
