"""The plan for Triton: everything that can be decided, and refused, from the graph alone."""

from __future__ import annotations

from packager.errors import Refused
from packager.graph import format_dims
from packager.limits import check_operators, check_versions
from packager.model import Signature
from packager.room import Limits, Plan, PlanRequest, Step
from packager.rows import fixed_batch
from packager.shapes import pin_shapes
from packager.targets.triton.config import DTYPES
from packager.targets.triton.options import Options

AUTO_BATCH = 8


def plan_for(request: PlanRequest) -> Plan:
    """Decide what will be done.

    Raises:
        Refused: name, shapes or batching make no sense, the model is newer than what the release's ONNX Runtime
            reads, or an input or output can't be served; every one of them is named.
    """
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    if "+" in request.name:
        raise Refused(
            f"Triton can't serve a model called '{request.name}': its HTTP interface doesn't decode the plus sign",
            "give another `name` under [model] in the manifest",
        )
    pins = request.facts.pins
    reader = f"the ONNX Runtime {pins['onnxruntime']} of Triton {pins['release']}"
    check_versions(request.model, request.facts.limits, reader)
    check_operators(request, reader)
    signature = pin_shapes(request.model.signature, request.shapes)
    _check_signature(signature, request.facts.limits)
    batch, why = batching(signature, options)
    _check_batching(batch, why, options)
    notes = (f"requests aren't batched: {why}",) if not batch and why else ()
    return request.plan(signature, _steps(request, options, batch), notes, options)


def _check_signature(signature: Signature, limits: Limits) -> None:
    wrong = []
    if not signature.inputs:
        wrong.append("the model has no inputs, and a request without any is refused")
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            what = f"{side} '{spec.name}'"
            if spec.kind != "tensor":
                wrong.append(f"{what} is a {spec.dtype}; Triton takes and gives tensors only")
            elif spec.dtype not in limits.dtypes or spec.dtype not in DTYPES:
                wrong.append(f"{what} is {spec.dtype}, which the onnxruntime backend doesn't take or give")
            elif spec.dims is None:
                wrong.append(f"{what} has no declared rank, and Triton would take it for a scalar")
            elif 0 in spec.dims:
                wrong.append(f"{what} is {format_dims(spec.dims)}, and Triton refuses dims of 0")
            elif not spec.dims and side == "input" and spec.dtype == "string":
                wrong.append(f"{what} is a scalar string, which the backend would hand over with shape [1]")
    if wrong:
        raise Refused(
            "Triton can't serve this signature:" + "".join(f"\n  {line}" for line in wrong),
            "export the model with inputs and outputs of declared rank and of Triton's types",
        )


def batching(signature: Signature, options: Options) -> tuple[int, str]:
    """The batch size the signature allows, if goldens prove it: (``max_batch_size``, why not where it is 0)."""
    if options.max_batch == 0:
        return 0, "the manifest says max_batch = 0"
    why = fixed_batch(signature)
    if why:
        return 0, why
    return (AUTO_BATCH if options.max_batch == "auto" else options.max_batch), ""


def _check_batching(batch: int, why: str, options: Options) -> None:
    if options.max_batch not in ("auto", 0) and not batch:
        raise Refused(
            f"max_batch is {options.max_batch}, but the model can't be batched: {why}",
            "leave max_batch out, or export the model with a free first dim on every input and output",
        )
    beyond = [size for size in options.preferred_batch_sizes if size > batch]
    if options.preferred_batch_sizes and beyond:
        reason = f"requests aren't batched: {why}" if not batch else f"max_batch is {batch}"
        raise Refused(
            f"preferred_batch_sizes has {', '.join(map(str, beyond))}, but {reason}",
            "give a larger max_batch, or leave preferred_batch_sizes out",
        )


def _steps(request: PlanRequest, options: Options, batch: int) -> tuple[Step, ...]:
    pins, model = request.facts.pins, request.model
    reading = [("opset", str(model.opset)), ("ir version", str(model.structure.ir_version))]
    if model.external:
        reading.append(("external data", f"{len(model.external)} files"))
    steps = [
        Step("Reading the ONNX graph", tuple(reading)),
        Step(
            "Laying out the model repository", (("release", pins["release"]), ("version", str(options.model_version)))
        ),
    ]
    if batch:
        size = f"{batch}, if rows don't influence each other"
        steps.append(Step("Proving that requests can be batched", (("max batch size", size),)))
    else:
        steps.append(Step("Configuring for full shapes", (("max batch size", "0"),)))
    running = [("instances", str(options.instances)), ("device", options.device)]
    running += [("warm-up", "the first golden case")] if options.warm_up else []
    steps.append(Step("Adding client, manifests and measurement", tuple(running)))
    return tuple(steps)
