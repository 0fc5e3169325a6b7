"""The plan for the web: everything that can be decided, and refused, from the graph alone."""

from __future__ import annotations

from dataclasses import replace

from packager.errors import Refused
from packager.limits import check_operators, check_versions
from packager.model import Model, Signature, TensorSpec
from packager.room import Limits, Plan, PlanRequest, Step
from packager.shapes import pin_shapes
from packager.targets.web.options import Options

RUNTIME = "onnxruntime-web"
RUNTIME_DIR = "runtime_dir"
WEBGPU_FOLDER = "webgpu"

MAX_BYTES = 3_700_000_000
"""Model and external data together that still loaded in Chromium: WASM addresses 4 GiB."""

MAX_TENSOR_BYTES = 1 << 30
"""A browser's ArrayBuffer of more than this may not be given, and one tensor can't be in two files."""


def plan_for(request: PlanRequest) -> Plan:
    """Decide what will be done.

    Raises:
        Refused: versions, operators, size, or inputs and outputs that onnxruntime-web can't take; each is named.
    """
    model, facts = request.model, request.facts
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    check_versions(model, facts.limits, RUNTIME)
    check_operators(request, RUNTIME)
    signature = pin_shapes(model.signature, request.shapes)
    _check_signature(signature, facts.limits)
    _check_sizes(model, options)
    notes = _notes(signature, request.precision, options)
    plan = request.plan(signature, _steps(model, options, facts.pins), notes, options)
    return replace(plan, local=((RUNTIME_DIR, options.runtime_dir),) if options.runtime_dir else ())


def total_bytes(model: Model) -> int:
    """The model file and its external data."""
    return model.bytes + sum(file.bytes for file in model.external)


def _check_signature(signature: Signature, limits: Limits) -> None:
    wrong = []
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.kind != "tensor":
                wrong.append(f"{side} '{spec.name}' is a {spec.dtype}; JavaScript gets tensors only: {_flat(spec)}")
            elif spec.dtype not in limits.dtypes:
                wrong.append(f"{side} '{spec.name}' is {spec.dtype}, which has no array in JavaScript")
            if spec.name == "__proto__":
                wrong.append(f"{side} '__proto__' can't be a key of a JavaScript object; rename it")
            if "\0" in spec.name:
                wrong.append(f"{side} {spec.name!a} has a NUL, at which onnxruntime-web cuts names; rename it")
    if not signature.outputs:
        wrong.append("it has no outputs")
    if wrong:
        raise Refused(
            "onnxruntime-web can't take this signature:" + "".join(f"\n  {line}" for line in wrong),
            "export the model with tensors of plain dtypes at its ends (a Cast does), under other names where named",
        )


def _flat(spec: TensorSpec) -> str:
    """What to do about an input or output that is no tensor."""
    if spec.kind == "sequence":
        return "join its parts with ConcatFromSequence, or give each a name of its own"
    if spec.kind == "optional":
        return "make it a plain tensor"
    return "export probabilities as a tensor (skl2onnx: zipmap=False)"


def _check_sizes(model: Model, options: Options) -> None:
    if options.format == "ort" and total_bytes(model) > options.max_file_mb << 20:
        raise Refused(
            f"the model takes {total_bytes(model)} bytes; an .ort file holds all weights, and max_file_mb is "
            f"{options.max_file_mb}",
            'choose format = "onnx", which splits weights off',
        )
    found = [
        f"constant '{tensor.name}' takes {tensor.nbytes} bytes; a browser holds {MAX_TENSOR_BYTES} in one piece"
        for tensor in model.structure.tensors()
        if (tensor.nbytes or 0) > MAX_TENSOR_BYTES
    ]
    if total_bytes(model) > MAX_BYTES:
        found.append(f"the model takes {total_bytes(model)} bytes; WASM has room for {MAX_BYTES}")
    if found:
        raise Refused(
            "the model is too large for a browser:" + "".join(f"\n  {line}" for line in found),
            "choose a smaller precision (fp16 halves it, int8 quarters it)",
        )


def is_split(model: Model, options: Options) -> bool:
    """Whether weights go into files of their own."""
    return bool(model.external) or model.bytes > options.max_file_mb << 20


def model_file(options: Options) -> str:
    """The model's name in the bundle."""
    return f"model.{options.format}"


def _steps(model: Model, options: Options, pins: dict[str, str]) -> tuple[Step, ...]:
    if options.format == "ort":
        saving = Step("Saving the model as .ort", (("optimised", "extended"),))
    elif is_split(model, options):
        saving = Step("Splitting weights off the model", (("largest file", f"{options.max_file_mb} MiB"),))
    else:
        saving = Step("Copying the model", (("opset", str(model.opset)),))
    return (
        saving,
        Step(
            "Adding the runtime",
            (
                ("package", pins["package"]),
                ("version", pins["version"]),
                *((("builds", "wasm, webgpu"),) if options.webgpu else ()),
            ),
        ),
        Step("Writing the loader", (("threads", "1, or more where the page is cross-origin isolated"),)),
        Step("Writing pages and server settings"),
    )


def _notes(signature: Signature, precision: str, options: Options) -> tuple[str, ...]:
    found = []
    if precision.startswith("int8"):
        found.append("int8 makes the download smaller, not the answers quicker: WASM has no int8 instructions")
    if precision == "fp16":
        found.append("fp16 halves the download; onnxruntime-web computes most of it in float32")
    if options.webgpu:
        found.append("WebGPU is smoke-run on a software adapter; the verdict's level and numbers are those of WASM")
    texts = [spec.name for spec in signature.inputs if spec.dtype == "string"]
    if texts:
        found.append(f"onnxruntime-web cuts strings at a NUL; the loader refuses such ({', '.join(texts)})")
    return tuple(found)
