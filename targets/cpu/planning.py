"""The plan for the CPU service: everything that can be decided, and refused, from the graph alone."""

from __future__ import annotations

from packager.errors import Refused
from packager.graph import format_dims
from packager.limits import check_operators, check_versions
from packager.model import Signature
from packager.room import Limits, Plan, PlanRequest, Step
from packager.rows import fixed_batch
from packager.shapes import pin_shapes
from packager.targets.cpu.options import Options

AUTO_BATCH = 8
READER = "ONNX Runtime"


def plan_for(request: PlanRequest) -> Plan:
    """Decide what will be done.

    Raises:
        Refused: shapes or batching make no sense, the model is newer than what ONNX Runtime reads, or an input or
            output can't travel; every one of them is named.
    """
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    check_versions(request.model, request.facts.limits, READER)
    check_operators(request, READER)
    signature = pin_shapes(request.model.signature, request.shapes)
    _check_signature(signature, request.facts.limits)
    batch, why = batching(signature, options)
    if options.max_batch not in ("auto", 0) and not batch:
        raise Refused(
            f"max_batch is {options.max_batch}, but the model can't be batched: {why}",
            "leave max_batch out, or export the model with a free first dim on every input and output",
        )
    notes = [f"requests aren't merged: {why}"] if not batch else []
    if optimisation(options) not in ("none", "portable"):
        notes.append(f"the model runs on CPUs of level {options.optimize_for} and above only")
    return request.plan(signature, _steps(request, options, batch), tuple(notes), options)


def batching(signature: Signature, options: Options) -> tuple[int, str]:
    """The rows that may be merged, if goldens prove it: (``max_batch``, why not where it is 0)."""
    if options.max_batch == 0:
        return 0, "the manifest says max_batch = 0"
    why = fixed_batch(signature) if signature.inputs else "the model has no inputs"
    return (0, why) if why else (AUTO_BATCH if options.max_batch == "auto" else options.max_batch, "")


def optimisation(options: Options) -> str:
    """What the graph is optimised for ahead of time. ONNX Runtime doesn't optimise its own format when it loads it."""
    return "portable" if options.format == "ort" and options.optimize_for == "none" else options.optimize_for


def _check_signature(signature: Signature, limits: Limits) -> None:
    wrong = []
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            what = f"{side} '{spec.name}'"
            if spec.kind != "tensor":
                wrong.append(f"{what} is a {spec.dtype}; the protocol has tensors only")
            elif spec.dtype not in limits.dtypes:
                wrong.append(f"{what} is {spec.dtype}, which the protocol has no type for")
    if wrong:
        raise Refused(
            "this signature can't be served:" + "".join(f"\n  {line}" for line in wrong),
            "export the model with tensors of the protocol's types as inputs and outputs",
        )


def _steps(request: PlanRequest, options: Options, batch: int) -> tuple[Step, ...]:
    model, ahead = request.model, optimisation(options)
    reading = [("opset", str(model.opset)), ("ir version", str(model.structure.ir_version))]
    if model.external:
        reading.append(("external data", f"{len(model.external)} files"))
    pins = tuple((name, format_dims((size,))) for name, size in request.shapes)
    placing = Step("Copying the model") if ahead == "none" else Step("Optimising the graph", (("for", ahead),))
    steps = [Step("Reading the ONNX graph", tuple(reading)), placing]
    if options.format == "ort":
        steps.append(Step("Saving in ONNX Runtime's format"))
    if pins:
        steps.append(Step("Serving pinned shapes", pins))
    if batch:
        size = f"{batch}, if rows don't influence each other"
        steps.append(Step("Proving that requests can be merged", (("max batch", size),)))
    threads = "one for each core" if not options.threads else str(options.threads)
    serving = (("threads", threads), ("runs", str(options.runs)), ("merged", str(batch) if batch else "no"))
    steps.append(Step("Adding the service, client and deployment files", serving))
    return tuple(steps)
