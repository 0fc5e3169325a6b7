"""ONNX Runtime's own form of an engine: ``model_ctx.onnx``, a model of one EPContext node.

ONNX Runtime gives such a node to the execution provider that its ``source`` names: NvTensorRTRTXExecutionProvider, or
TensorrtExecutionProvider for TensorRT proper. That one takes the engine as it is, from a file beside the model or out
of the node, and compiles nothing. Inputs and outputs are those of ``model.onnx``: the provider finds the engine's by
name. Ships beside ``build.py``; needs the package onnx.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packager.targets.tensorrt.fit import ENGINE

CONTEXT = "model_ctx.onnx"
DOMAIN, OPERATOR = "com.microsoft", "EPContext"
SOURCES = {"rtx": "NvTensorRTRTXExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
"""By builder: the execution provider that reads the engine."""

MAX_INSIDE = 2_000_000_000
"""Bytes of an engine that still fits into a node: a protobuf message ends at 2 GiB."""


def write_context(onnx_file: Path, folder: Path, sidecar: Mapping[str, Any]) -> Path:
    """Write ``model_ctx.onnx`` around the engine of ``folder``.

    Args:
        onnx_file: the model that the engine was built from; its inputs and outputs are taken over, dims' names too.
        folder: where the engine lies, and where the file goes.
        sidecar: ``engine.json``; its ``ep_context`` says ``beside`` or ``inside``.

    Raises:
        ValueError: the engine is too large for a node.
    """
    import onnx

    engine = (folder / ENGINE).read_bytes()
    inside = sidecar["ep_context"] == "inside"
    if inside and len(engine) > MAX_INSIDE:
        raise ValueError(f"an engine of {len(engine)} bytes doesn't fit into an ONNX node; take ep_context = 'beside'")
    source = onnx.load(str(onnx_file), load_external_data=False)
    constants = {tensor.name for tensor in source.graph.initializer}
    inputs = [each for each in source.graph.input if each.name not in constants]
    outputs = list(source.graph.output)
    # Compiled kernels are cached under partition_name: it changes with the engine.
    name = f"model_{hashlib.sha256(engine).hexdigest()[:16]}"
    node = onnx.helper.make_node(
        OPERATOR, [each.name for each in inputs], [each.name for each in outputs], name, domain=DOMAIN,
        main_context=1, embed_mode=int(inside), ep_cache_context=engine if inside else ENGINE,
        ep_sdk_version=sidecar["version"], source=SOURCES[sidecar["builder"]], partition_name=name,
        onnx_model_filename=onnx_file.name, **_architecture(sidecar),
    )  # fmt: skip
    graph = onnx.helper.make_graph([node], source.graph.name, inputs, outputs)
    made = onnx.helper.make_model(
        graph,
        producer_name="packager",
        ir_version=source.ir_version,
        opset_imports=[each for each in source.opset_import if not each.domain] + [onnx.helper.make_opsetid(DOMAIN, 1)],
    )
    file = folder / CONTEXT
    file.write_bytes(made.SerializeToString(deterministic=True))
    return file


def _architecture(sidecar: Mapping[str, Any]) -> dict[str, str]:
    """What the provider compares with the GPU, for a warning: ``89``, or ``80+`` for Ampere and later.

    It has no word for several GPUs, nor for "8.9 and later": then nothing is said, and it compares nothing.
    """
    capabilities = sidecar["compute_capabilities"]
    if sidecar["later_too"]:
        return {"hardware_architecture": "80+"} if min(capabilities, key=float) == "8.0" else {}
    return {"hardware_architecture": capabilities[0].replace(".", "")} if len(capabilities) == 1 else {}


def context_faults(folder: Path, sidecar: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``model_ctx.onnx``, a phrase each: as far as can be told without the provider.

    Args:
        folder: where it lies, the engine beside it.
        sidecar: ``engine.json`` of that engine.
    """
    import onnx

    file = folder / CONTEXT
    if not file.is_file():
        return [f"{file} is missing"]
    try:
        model = onnx.load(str(file))
        onnx.checker.check_model(model)
    except Exception as error:  # noqa: BLE001 - protobuf's and the checker's exceptions share no base
        return [f"{file} is no ONNX model: {' '.join(str(error).split())[:200]}"]
    if [(node.domain, node.op_type) for node in model.graph.node] != [(DOMAIN, OPERATOR)]:
        return [f"{file} isn't one {OPERATOR} node"]
    found = {each.name: onnx.helper.get_attribute_value(each) for each in model.graph.node[0].attribute}
    wrong = []
    if found.get("source") != SOURCES[sidecar["builder"]].encode():
        wrong.append(f"{file} is for {found.get('source')!r}, the engine for {SOURCES[sidecar['builder']]}")
    wanted = (folder / ENGINE).read_bytes() if found.get("embed_mode") else ENGINE.encode()
    if found.get("ep_cache_context") != wanted:
        wrong.append(f"{file} holds or names another engine than {folder / ENGINE}")
    return wrong + _signature_faults(file, model.graph, sidecar["bindings"])


def _signature_faults(file: Path, graph: Any, bindings: list[Mapping[str, Any]]) -> list[str]:  # noqa: ANN401
    """Bindings of the engine that the node doesn't have; an input that nothing reads isn't the engine's."""
    import onnx

    def described(values: Any) -> dict[str, tuple[str, int]]:  # noqa: ANN401 - protobuf's repeated field
        return {
            each.name: (
                onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type).name,
                len(each.type.tensor_type.shape.dim),
            )
            for each in values
        }

    found = {"input": described(graph.input), "output": described(graph.output)}
    return [
        f"{file} lacks the engine's {each['side']} '{each['name']}' of {each['dtype']} with {len(each['dims'])} dims"
        for each in bindings
        if found[each["side"]].get(each["name"]) != (each["dtype"], len(each["dims"]))
    ]
