"""The plan for Triton: everything that can be decided, and refused, from the graph alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from packager.errors import Objection, Refused
from packager.graph import Node, Structure, format_dims
from packager.limits import check_nodes, check_operators, check_versions
from packager.model import Signature, open_model
from packager.room import Limits, Plan, PlanRequest, Step
from packager.rows import fixed_batch
from packager.shapes import pin_shapes
from packager.targets.triton.accelerators import objections
from packager.targets.triton.config import DTYPES
from packager.targets.triton.ensemble import chained
from packager.targets.triton.options import Options

AUTO_BATCH = 8
NO_QLINEAR = 21
"""The operator set for which ONNX Runtime 1.19 has no QLinearMatMul."""

CACHE_BYTES = 64 << 20
"""Size of the server's response cache in the deployment files."""


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
    _check_quantised(request.model.structure, reader)
    signature = pin_shapes(request.model.signature, request.shapes)
    _check_signature(signature, request.facts.limits)
    _check_options(signature, options, pins["release"])
    batch, why = batching(signature, options)
    _check_batching(batch, why, options)
    _check_steps(request, options, signature, reader)
    notes = (f"requests aren't batched: {why}",) if not batch and why else ()
    return request.plan(signature, _steps(request, options, batch), notes, options)


def _check_quantised(structure: Structure, reader: str) -> None:
    """Refuse what ONNX Runtime 1.19 makes a QLinearMatMul of operator set 21 of: it has a kernel for older ones only.

    That is a MatMul between two DequantizeLinear and one QuantizeLinear, all of 8 bits, and nothing else takes its
    result.

    Raises:
        Refused: every such node is named.
    """
    if dict(structure.opsets).get("", 0) < NO_QLINEAR:
        return
    nodes = [node for node in structure.walk() if not node.domain]
    makers = {name: node for node in nodes for name in node.outputs}
    takers = Counter(name for node in nodes for name in node.inputs)
    takers.update(value.name for value in structure.graph.outputs)
    rounding = {node.inputs[0]: node for node in nodes if node.op_type == "QuantizeLinear"}
    dtypes = {tensor.name: tensor.dtype for tensor in structure.graph.initializers}

    def is_byte(node: Node | None, operator: str) -> bool:
        if node is None or node.op_type != operator:
            return False
        zero = node.inputs[2] if len(node.inputs) > 2 else node.inputs[0]
        return dtypes.get(zero, "uint8") in ("int8", "uint8")

    def is_fused(node: Node) -> bool:
        return (
            node.op_type == "MatMul"
            and takers[node.outputs[0]] == 1
            and all(is_byte(makers.get(name), "DequantizeLinear") for name in node.inputs)
            and is_byte(rounding.get(node.outputs[0]), "QuantizeLinear")
        )

    reason = f"there is no QLinearMatMul of operator set {NO_QLINEAR}, and it is run as one"
    found = [Objection(node.label, reason) for node in nodes if node.op_type == "QLinearMatMul" or is_fused(node)]
    check_nodes(found, f"{reader} can't run the model", f"export the model for operator set {NO_QLINEAR - 1}")


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
            elif not _is_unicode(spec.name):
                wrong.append(f"{side} {spec.name!a} has a name that is no valid Unicode, which config.pbtxt can't hold")
    if wrong:
        raise Refused(
            "Triton can't serve this signature:" + "".join(f"\n  {line}" for line in wrong),
            "export the model with inputs and outputs of declared rank and of Triton's types",
        )


def _check_steps(request: PlanRequest, options: Options, signature: Signature, reader: str) -> None:
    """Hold the steps of an ensemble to what the model itself is held to, and to each other.

    Raises:
        Refused: one can't be served, or they don't fit together; its file is named.
    """
    if not options.steps():
        return
    files = {file.name: file.path for file in request.files}
    signatures = {"model": signature}
    for part, name in options.steps().items():
        try:
            model = open_model(files[name])
            if model.external:
                raise Refused("it keeps weights in other files", "save it as one file")
            check_versions(model, request.facts.limits, reader)
            check_operators(replace(request, model=model), reader)
            _check_quantised(model.structure, reader)
            _check_signature(model.signature, request.facts.limits)
            _check_batching(*batching(model.signature, options), options)
        except Refused as error:
            raise Refused(f"{part} = '{name}': {error.message}", error.hint) from error
        signatures[part] = model.signature
    chained(signatures)


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_options(signature: Signature, options: Options, release: str) -> None:
    wrong = objections(options, release)
    if options.gpus and options.device != "gpu":
        wrong.append(f'gpus names some, and device is {options.device}: set device = "gpu"')
    outputs = {spec.name: spec for spec in signature.outputs}
    for name, labels in options.labels.items():
        spec = outputs.get(name)
        if spec is None:
            wrong.append(f"labels has '{name}', and the outputs are {', '.join(map(repr, outputs))}")
        elif not labels or any("\n" in label or "\r" in label or not _is_unicode(label) for label in labels):
            wrong.append(f"labels of '{name}' must be one or more texts of one line each")
        elif spec.dims and isinstance(spec.dims[-1], int) and spec.dims[-1] != len(labels):
            wrong.append(f"labels of '{name}' are {len(labels)}, and it has {spec.dims[-1]} classes")
    if wrong:
        raise Refused(
            "these options make no sense together:" + "".join(f"\n  {line}" for line in wrong),
            "correct them in the manifest",
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
    if options.steps():
        named = [f"{part} '{name}'" for part, name in options.steps().items()]
        steps.append(Step("Building the ensemble", (("around the model", " and ".join(named)),)))
    running = [("instances", str(options.instances)), ("device", options.device)]
    running += [("warm-up", "the first golden case")] if options.warm_up else []
    if options.accelerator != "none":
        given = "".join(f", {key} {value}" for key, value in sorted(options.accelerator_options.items()))
        running.append(("accelerator", options.accelerator + given))
    running += [("server options", " ".join(flags(options)))] if flags(options) else []
    steps.append(Step("Adding client, manifests and measurement", tuple(running)))
    return tuple(steps)


def flags(options: Options) -> tuple[str, ...]:
    """What a server must be started with beyond the usual, for options that are in vain without."""
    found = [f"--cache-config=local,size={CACHE_BYTES}"] if options.response_cache else []
    return (*found, *(["--rate-limit=execution_count"] if options.rate_limit else []))
