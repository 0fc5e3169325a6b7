"""The plan for iOS: everything that can be decided, and refused, from the graph alone."""

from __future__ import annotations

import json
import re

from packager.errors import Objection, Refused
from packager.goldens import GoldenSet
from packager.graph import printable
from packager.limits import check_nodes, check_operators, check_precision, check_versions
from packager.model import Signature
from packager.room import Covered, Limits, Plan, PlanRequest, Step
from packager.shapes import pin_shapes
from packager.targets.ios.coverage import Coverage, coverage_of, inside, types_of
from packager.targets.ios.names import alike, module_name
from packager.targets.ios.options import Options

MAX_BYTES = 1_500_000_000
"""Model and weights in one file: protobuf stops at 2 GB, and the CoreML provider reads no weights outside the file."""

SHOWN = 4
READER = "ONNX Runtime's Swift package"


def plan_for(request: PlanRequest) -> Plan:
    """Decide what will be done.

    Raises:
        Refused: precision, versions, size, inputs and outputs that the Swift interface can't carry, or a coverage by
            Core ML below ``min_coverage``; every offending node and tensor is named.
    """
    model, facts = request.model, request.facts
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    check_precision(facts, request.precision)
    check_versions(model, facts.limits, READER)
    check_operators(request, READER)
    signature = pin_shapes(model.signature, request.shapes)
    _check_signature(signature, facts.limits)
    if sum(file.bytes for file in model.external) + model.bytes > MAX_BYTES:
        raise Refused(
            f"the model takes more than {MAX_BYTES} bytes; the CoreML provider needs its weights inside one file",
            "choose precision fp16, or a smaller model",
        )
    coverage = coverage_of(model.structure, types_of(model.structure), static=options.static_shapes)
    _check_coverage(coverage, options)
    return Plan(
        target=request.target,
        kind=request.kind,
        name=request.name,
        version=request.version,
        model_digest=model.digest,
        opset=model.opset,
        precision=request.precision,
        shapes=request.shapes,
        signature=signature,
        steps=_steps(request, options, coverage),
        options=options.model_dump_json(),
        notes=_notes(request, signature, coverage, options),
    )


def fallbacks(request: PlanRequest) -> tuple[Covered, ...]:
    """The nodes that Core ML leaves to the CPU, as the plan and ``coverage.json`` count them, and those inside them."""
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    structure = request.model.structure
    found = coverage_of(structure, types_of(structure), static=options.static_shapes)
    left = [node.covered() for node in found.nodes if not node.taken]
    return (*left, *inside(structure))


def _check_signature(signature: Signature, limits: Limits) -> None:
    wrong = []
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            name = printable(spec.name)
            if spec.kind != "tensor":
                wrong.append(f"{side} '{name}' is a {spec.dtype}; only tensors cross into Swift")
            elif spec.dtype not in limits.dtypes:
                wrong.append(f"{side} '{name}' is {spec.dtype}, which ORTTensorElementDataType doesn't have")
            if "\0" in spec.name:
                wrong.append(f"{side} {spec.name!a} has a NUL, at which C strings end; rename it")
        pairs = alike(spec.name for spec in specs)
        wrong += [f"{side}s {one!a} and {other!a} are the same text to Swift; rename one" for one, other in pairs]
    if not signature.outputs:
        wrong.append("it has no outputs")
    if wrong:
        raise Refused(
            "ONNX Runtime's Swift interface can't carry this signature:" + "".join(f"\n  {line}" for line in wrong),
            f"put a Cast at that end; it carries {', '.join(limits.dtypes)}",
        )


def _check_coverage(coverage: Coverage, options: Options) -> None:
    if coverage.share < options.min_coverage:
        check_nodes(
            [Objection(node.label, node.why) for node in coverage.nodes if not node.taken],
            f"Core ML takes {coverage.text()}, a part of {coverage.share:.2f}; min_coverage asks for "
            f"{options.min_coverage:g}",
            "fix free dims with `shapes`, or lower min_coverage",
        )


def _steps(request: PlanRequest, options: Options, coverage: Coverage) -> tuple[Step, ...]:
    pins = request.facts.pins
    steps = [
        Step("Copying the model", (("opset", str(request.model.opset)), ("Core ML takes", coverage.text()))),
        Step(
            "Writing the Swift package",
            (
                ("module", options.module or module_name(request.name)),
                ("onnxruntime", pins["runtime"]),
                ("iOS", options.deployment_target),
                *((key, value) for key, value in options.provider().items()),
            ),
        ),
    ]
    if options.mlpackage:
        steps.append(Step("Converting to a Core ML package", (("where", "every operator converts"),)))
    return tuple(steps)


def _notes(request: PlanRequest, signature: Signature, coverage: Coverage, options: Options) -> tuple[str, ...]:
    found = [f"Core ML will take {coverage.text()}"]
    left = coverage.left()
    if left:
        more = f"; and {len(left) - SHOWN} more kinds" if len(left) > SHOWN else ""
        found.append(f"left to the CPU: {'; '.join(left[:SHOWN])}{more}")
    free = _free(signature, request.goldens)
    if free and coverage.pinned > coverage.taken:
        sizes = ", ".join(f"{_key(name)} = {size}" for name, size in free)
        found.append(
            f"with fixed shapes Core ML would take {coverage.pinned} nodes instead of {coverage.taken}; "
            f"add under [targets.{request.target}]: shapes = {{ {sizes} }}"
        )
    if options.low_precision_accumulation:
        found.append("the GPU may sum in float16 (low_precision_accumulation); nothing of that is measured here")
    return tuple(found)


def _free(signature: Signature, goldens: GoldenSet) -> list[tuple[str, int]]:
    """What `shapes` may pin, symbols and ``input:axis`` of dims without a name, with the sizes of the first golden."""
    given = goldens.cases[0].inputs if goldens.cases else {}
    found: dict[str, int] = {}
    for spec in signature.inputs:
        sizes = given[spec.name].shape if spec.name in given else ()
        for axis, dim in enumerate(spec.dims or ()):
            if not isinstance(dim, int):
                found.setdefault(dim or f"{spec.name}:{axis}", max(sizes[axis], 1) if axis < len(sizes) else 1)
    return list(found.items())


def _key(name: str) -> str:
    """A TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
