"""A graph that is quantised throughout: what integer accelerators want of ONNX Runtime's quantiser.

Left to itself the quantiser gives integers to the operators that profit on a CPU. An accelerator that computes in
integers only needs a scale for every tensor, of every operator, or the graph falls apart where one is missing. And
some of its kernels fix the scale themselves: a Sigmoid of 16 bits ends at 1.0 exactly, a Tanh at -1.0 and 1.0. ONNX
Runtime ships both rules as ``get_qnn_qdq_config``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Throughout:
    """What the quantiser is told: which operators, which nodes not, and its extra options."""

    operators: tuple[str, ...]
    excluded: tuple[str, ...]
    options: Mapping[str, Any]


def throughout(
    source: Path, activation: object, weight: object, *, per_channel: bool, excluded: Sequence[str]
) -> Throughout:
    """Settings that quantise every operator of a model, but for those excluded by name.

    Args:
        source: the model, prepared for the quantiser.
        activation: ``QuantType`` of activations, unsigned.
        weight: ``QuantType`` of weights; a signed one is symmetric.
        per_channel: a scale per channel, of convolutions only: no kernel multiplies matrices so.
        excluded: names of nodes to leave in float.
    """
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    left = sorted({*excluded, *_unscalable(source)})
    found = get_qnn_qdq_config(
        source, None, activation_type=activation, weight_type=weight, per_channel=per_channel,
        nodes_to_exclude=left,
    )  # fmt: skip
    return Throughout(tuple(sorted(found.op_types_to_quantize)), tuple(left), found.extra_options)


def _unscalable(source: Path) -> list[str]:
    """Names of nodes with a constant that is not finite: no scale has room for infinity beside other values."""
    import numpy as np
    import onnx

    proto = onnx.load(source, load_external_data=False)
    infinite = {
        tensor.name
        for tensor in proto.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
        and tensor.data_location != onnx.TensorProto.EXTERNAL
        and not np.isfinite(onnx.numpy_helper.to_array(tensor)).all()
    }
    return [node.name for node in proto.graph.node if infinite.intersection(node.input)]
