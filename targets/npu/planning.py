"""The plan for the NPU: everything that can be decided, and refused, from the quantised graph alone."""

from __future__ import annotations

from packager.errors import Refused
from packager.limits import check_operators, check_versions
from packager.model import Signature
from packager.room import Limits, Plan, PlanRequest, Step
from packager.targets.npu.chips import CHIPS
from packager.targets.npu.options import Options

READER = "QNN"


def plan_for(request: PlanRequest) -> Plan:
    """Decide what will be done.

    Raises:
        Refused: the model is newer than what QNN takes, or has operators, inputs or outputs it never takes; every
            one of them is named.
    """
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    model, limits = request.model, request.facts.limits
    check_versions(model, limits, READER)
    check_operators(request, READER)
    _check_signature(model.signature, limits)
    model_number = options.soc_model
    soc = "any" if model_number is None else f"{model_number} ({CHIPS[model_number].name})"
    steps = (
        Step(
            "Compiling the context binary",
            (
                ("htp_arch", str(options.htp_arch)),
                ("soc_model", soc),
                ("optimisation", str(options.optimisation)),
                ("nodes on the CPU", "allowed" if options.allow_fallback else "refused"),
            ),
        ),
        Step("Adding loaders", (("languages", "Python, C++, Kotlin"), ("performance mode", options.performance))),
    )
    notes = (
        f"model_qnn.bin runs on HTP v{options.htp_arch} only; on anything else model.qdq.onnx is the model to load",
        "Qualcomm's libraries are not in the bundle: onnxruntime-qnn brings them, under Qualcomm's own licence",
    )
    return request.plan(model.signature, steps, notes, options)


def _check_signature(signature: Signature, limits: Limits) -> None:
    wrong = []
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.kind != "tensor":
                wrong.append(f"{side} '{spec.name}' is a {spec.dtype}; the NPU takes and gives tensors only")
            elif spec.dtype not in limits.dtypes:
                wrong.append(f"{side} '{spec.name}' is {spec.dtype}, which the NPU doesn't take or give")
    if not signature.inputs:
        wrong.append("the model has no inputs")
    if wrong:
        raise Refused(
            f"{READER} can't take this signature:" + "".join(f"\n  {line}" for line in wrong),
            "export the model so that its inputs and outputs are float32, int32, int64, uint8 or bool tensors",
        )
