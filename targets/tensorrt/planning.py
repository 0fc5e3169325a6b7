"""The plan for TensorRT: everything that can be decided, and refused, from the graph and the golden inputs alone."""

from __future__ import annotations

from packager.errors import Objection, Refused
from packager.limits import check_nodes, check_operators, check_versions
from packager.model import Signature
from packager.room import Limits, Plan, PlanRequest, Step
from packager.shapes import pin_shapes
from packager.targets.tensorrt.capabilities import capabilities
from packager.targets.tensorrt.ep_context import SOURCES
from packager.targets.tensorrt.library import Chosen, choose
from packager.targets.tensorrt.options import Options
from packager.targets.tensorrt.profiles import Profile, dim_keys, profiles_for
from packager.targets.tensorrt.rules import notes, refusals, rewrites

READER = "TensorRT's ONNX parser"
PLUGIN = "onnxruntime-ep-nv-tensorrt-rtx-cu12"
"""The package that brings ONNX Runtime's execution provider for TensorRT for RTX; ``target.toml`` pins it."""


def plan_for(request: PlanRequest) -> Plan:
    """Decide what will be done.

    Raises:
        Refused: the model is newer than what the parser reads, an input or output has no type in TensorRT, nodes would
            be misread, or a range of sizes is missing; every one of them is named.
        ToolchainMissing: TensorRT proper is asked for and can't build here.
    """
    options = request.options if isinstance(request.options, Options) else Options.model_validate({})
    check_versions(request.model, request.facts.limits, READER)
    check_operators(request, READER)
    _check_signature(request.model.signature, request.facts.limits)
    _check_nodes(refusals(request.model.structure))
    signature = pin_shapes(request.model.signature, request.shapes)
    profiles = profiles_for(request.target, signature, request.goldens, options)
    _check_options(options)
    chosen = choose(options)
    served = capabilities(options, request.model.structure, chosen)
    steps = (
        *_reading(request),
        *_building(signature, chosen, profiles, _settings(request, options, chosen, served)),
        *_for_runtime(request, options, chosen),
        Step("Adding loaders in Python and C++"),
    )
    return request.plan(signature, steps, _notes(request, chosen, options, signature), options)


def _check_signature(signature: Signature, limits: Limits) -> None:
    wrong = []
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.kind != "tensor":
                wrong.append(f"{side} '{spec.name}' is a {spec.dtype}; TensorRT takes and gives tensors only")
            elif spec.dtype == "float64":
                wrong.append(f"{side} '{spec.name}' is float64, which TensorRT would compute in float32")
            elif spec.dtype not in limits.dtypes:
                wrong.append(f"{side} '{spec.name}' is {spec.dtype}, which TensorRT doesn't have")
    if wrong:
        raise Refused(
            "TensorRT can't take this signature:" + "".join(f"\n  {line}" for line in wrong),
            "export the model with inputs and outputs of its types: " + ", ".join(limits.dtypes),
        )


def _check_nodes(found: list[Objection]) -> None:
    word = "node" if len(found) == 1 else "nodes"
    check_nodes(
        found,
        f"TensorRT can't take {len(found)} {word} of the model",
        "export the model without them; quantise with precision = \"int8-static\" or export symmetric int8",
    )  # fmt: skip


def _check_options(options: Options) -> None:
    if options.compute_capabilities and options.builder == "tensorrt":
        raise Refused(
            "compute_capabilities are for builder rtx; TensorRT builds for the GPU it finds", "leave one of them out"
        )


def _reading(request: PlanRequest) -> tuple[Step, ...]:
    structure = request.model.structure
    steps = [Step(title, (("in", _shown(labels)),)) for title, labels in rewrites(structure).items()]
    reading = [("opset", str(request.model.opset)), ("ir version", str(structure.ir_version))]
    if request.model.external:
        reading.append(("external data", f"{len(request.model.external)} files"))
    return (*steps, Step("Parsing the ONNX graph", tuple(reading)))


def _building(
    signature: Signature,
    chosen: Chosen,
    profiles: tuple[Profile, ...],
    settings: tuple[tuple[str, str], ...],
) -> tuple[Step, ...]:
    ranges = {
        key: " to ".join(str(profile.shapes[which][axis]) for which in (0, 1, 2))
        for spec, profile in zip(signature.inputs, profiles, strict=True)
        for axis, key in dim_keys(spec).items()
    }
    steps = [Step("Giving the profile", tuple(ranges.items()))] if ranges else []
    title = "Writing the recipe that builds the engine on the GPU machine" if chosen.lacking else "Building the engine"
    return (*steps, Step(title, settings))


def _settings(
    request: PlanRequest, options: Options, chosen: Chosen, served: tuple[tuple[str, ...], bool]
) -> tuple[tuple[str, str], ...]:
    """What decides the engine beside model and profile."""
    capable, later = served
    found = [("builder", chosen.builder), ("precision", request.precision), ("TF32", "on" if options.tf32 else "off")]
    if chosen.builder == "rtx":
        least = f"{capable[0]} and later"
        return (*found, ("compute capabilities", least if later else ", ".join(capable)))
    found += [("version", chosen.version)] if chosen.version else []
    found += [("compute capability", chosen.capability)] if chosen.capability else []
    found += [("level", str(options.optimization_level))] if options.optimization_level is not None else []
    return tuple(found)


def _for_runtime(request: PlanRequest, options: Options, chosen: Chosen) -> tuple[Step, ...]:
    """The step that makes ``model_ctx.onnx``, where one is asked for, with the package that loads it."""
    if options.ep_context == "off":
        return ()
    package = f"{PLUGIN}=={request.facts.pins[PLUGIN]}" if chosen.builder == "rtx" else "onnxruntime-gpu"
    settings = (("engine", options.ep_context), ("provider", SOURCES[chosen.builder]), ("package", package))
    return (Step("Adding the engine as ONNX Runtime takes it", settings),)


def _notes(request: PlanRequest, chosen: Chosen, options: Options, signature: Signature) -> tuple[str, ...]:
    found = []
    if chosen.lacking:
        found.append(f"a recipe, not an engine: {chosen.lacking}")
    else:
        found.append("model.engine isn't byte-reproducible: TensorRT lays many engines out anew with every build")
    derived = [key for spec in signature.inputs for key in dim_keys(spec).values() if key not in options.profiles]
    if derived:
        listed = ", ".join(dict.fromkeys(derived))
        found.append(
            f"the engine takes only sizes that golden cases show of {listed}; `profiles` in the manifest widens"
        )
    return (*found, *notes(request.model.structure))


def _shown(labels: list[str], most: int = 5) -> str:
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more
