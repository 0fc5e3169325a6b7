"""Small ONNX models for tests, built with onnx's own helper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

FLOAT, INT32, INT64, BOOL, STRING = (
    TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING,
)  # fmt: skip


def value(name: str, dtype: int = FLOAT, shape: Sequence[int | str | None] | None = ("n", 3)) -> onnx.ValueInfoProto:
    """A typed graph input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
    ir: int = 8,
    domains: Sequence[tuple[str, int]] = (),
) -> onnx.ModelProto:
    """A model proto; nothing is checked, so that broken ones can be made too."""
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), list(initializers))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*domain) for domain in domains)]
    made = helper.make_model(graph, opset_imports=imports)
    made.ir_version = ir
    return made


def save(proto: onnx.ModelProto, path: Path) -> Path:
    """Write the bytes as they are."""
    path.write_bytes(proto.SerializeToString())
    return path


def relu(path: Path, name_in: str = "x", name_out: str = "y", shape: Sequence[int | str | None] = ("n", 3)) -> Path:
    """The smallest working model: ``y = Relu(x)``."""
    node = helper.make_node("Relu", [name_in], [name_out], name="act")
    return save(model([node], [value(name_in, shape=shape)], [value(name_out, shape=shape)]), path)
