"""The plan for OpenVINO: everything that can be decided, and refused, from the graph alone."""

from __future__ import annotations

from packager.errors import Objection, Refused
from packager.graph import format_dims
from packager.limits import check_nodes, check_versions
from packager.model import Model, Signature
from packager.room import Limits, Plan, PlanRequest, Step
from packager.shapes import pin_shapes
from packager.targets.openvino.hazards import REWRITES, notes, refusals, rewrites
from packager.targets.openvino.options import Options

WIDE = {"int64": "32-bit integers", "uint64": "32-bit integers", "float64": "float32"}
"""Signature dtypes that OpenVINO's CPU plugin takes and gives but computes in something smaller."""


def plan_for(request: PlanRequest) -> Plan:
    """Decide what will be done.

    Raises:
        Refused: a pinned shape makes no sense, the model is newer than what OpenVINO reads, or nodes,
            inputs or outputs can't be converted; every one of them is named.
    """
    model, limits = request.model, request.facts.limits
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    check_versions(model, limits, "OpenVINO", "newer forms would be misread: lower it with onnx.version_converter")
    _check_signature(model.signature, limits)
    _check_nodes(refusals(model.structure, limits))
    signature = pin_shapes(model.signature, request.shapes)
    steps = _steps(model, signature, request.precision, options)
    return request.plan(signature, steps, _notes(model, signature, request.precision), options)


def _check_signature(signature: Signature, limits: Limits) -> None:
    wrong = []
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.kind != "tensor":
                wrong.append(f"{side} '{spec.name}' is a {spec.dtype}; OpenVINO takes and gives tensors only")
            elif spec.dtype == "string":
                wrong.append(f"{side} '{spec.name}' holds strings, which OpenVINO computes only with its tokenizers")
            elif spec.dtype not in limits.dtypes:
                wrong.append(f"{side} '{spec.name}' is {spec.dtype}, which OpenVINO doesn't take or give")
    if wrong:
        raise Refused(
            "OpenVINO can't take this signature:" + "".join(f"\n  {line}" for line in wrong),
            "export the model so that its inputs and outputs are numeric tensors; keep lookups and classes outside",
        )


def _check_nodes(found: list[Objection]) -> None:
    word = "node" if len(found) == 1 else "nodes"
    check_nodes(
        found,
        f"OpenVINO can't take {len(found)} {word} of the model",
        "export the model without them, or choose a target whose runtime has them (ONNX Runtime based ones do)",
    )


def _steps(model: Model, signature: Signature, precision: str, options: Options) -> tuple[Step, ...]:
    reading = [("opset", str(model.opset)), ("ir version", str(model.structure.ir_version))]
    if model.external:
        reading.append(("external data", f"{len(model.external)} files, read in place"))
    steps = [Step(REWRITES[kind], (("nodes", ", ".join(nodes)),)) for kind, nodes in rewrites(model.structure).items()]
    steps.append(Step("Reading the ONNX graph", tuple(reading)))
    pins = tuple(
        (after.name, format_dims(after.dims or ()))
        for before, after in zip(model.signature.inputs, signature.inputs, strict=True)
        if before.dims != after.dims
    )
    if pins:
        steps.append(Step("Pinning shapes", pins))
    count = f"{len(signature.inputs)} inputs, {len(signature.outputs)} outputs"
    steps.append(Step("Restoring tensor names", (("names", count),)))
    steps.append(Step("Saving IR", (("weights", "fp16" if precision == "fp16" else "as they are"),)))
    quantised = "on" if options.dynamic_quantization else "off"
    running = (("inference precision", options.inference_precision), ("dynamic quantisation", quantised))
    steps.append(Step("Adding the loader", running))
    return tuple(steps)


def _notes(model: Model, signature: Signature, precision: str) -> tuple[str, ...]:
    found = []
    if precision == "fp16":
        found.append("weights are stored as fp16; OpenVINO computes in the inference precision all the same")
    for dtype, smaller in WIDE.items():
        names = [spec.name for spec in (*signature.inputs, *signature.outputs) if spec.dtype == dtype]
        if names:
            found.append(
                f"OpenVINO computes {dtype} in {smaller}; infer.py refuses inputs beyond that ({', '.join(names)})"
            )
    return (*found, *notes(model.structure))
