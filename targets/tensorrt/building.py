"""Building: the model as TensorRT takes it, the engine, ``engine.json`` and what loads them.

The engine is built from the very ``model.onnx`` that ships, so whoever runs that file in ONNX Runtime runs what
TensorRT was given. What the network takes and gives is held against the plan before the engine is written.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from packager.errors import BuildError, Objection, Refused, StorageError, ToolchainMissing
from packager.files import storage_errors, to_json, write_text
from packager.model import Model, Signature, open_model
from packager.render import render
from packager.room import Answer, Plan, Stage, kind_named
from packager.selfcheck import ship_loader
from packager.targets.tensorrt import compile as compiling
from packager.targets.tensorrt import ep_context, fit, infer
from packager.targets.tensorrt.capabilities import capabilities
from packager.targets.tensorrt.library import Chosen, choose
from packager.targets.tensorrt.options import Options
from packager.targets.tensorrt.profiles import profiles_for, toml_key
from packager.targets.tensorrt.rewrite import ForTensorRT
from packager.targets.tensorrt.rules import grid_sample_modes, rewrites

CPP = ("CMakeLists.txt", "engine.hpp", "engine.cpp", "main.cpp")


def build_bundle(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``.

    Raises:
        Refused: TensorRT's parser can't take nodes; each is named, with its reason.
        BuildError: TensorRT refused, or its network has another signature than the plan.
        ToolchainMissing: the builder's library isn't here.
        StorageError: a file could not be written.
    """
    options = Options.model_validate_json(plan.options)
    chosen = choose(options)
    with storage_errors("placing the model"):
        onnx = _place_model(stage)
    model = open_model(onnx)
    sidecar = _wanted(plan, stage, model, options, chosen)
    engine = None
    if not chosen.lacking:
        engine, facts = _compile(onnx, sidecar, plan)
        sidecar |= facts
    with storage_errors("writing the engine"):
        if engine is not None:
            (stage.folder / fit.ENGINE).write_bytes(engine)
        write_text(stage.folder / fit.SIDECAR, to_json(sidecar))
    if engine is not None and options.ep_context != "off":
        _write_context(onnx, stage.folder, sidecar)
    beside = {"fit.py": Path(fit.__file__), "build.py": Path(compiling.__file__)}
    if options.ep_context != "off":
        beside["ep_context.py"] = Path(ep_context.__file__)
    ship_loader(Path(infer.__file__), stage.folder, beside, package=__package__)
    _write_templates(plan, stage, sidecar)


def queried(plan: Plan, stage: Stage) -> Answer:
    """Place the model as :func:`build_bundle` does, and let the parser read it.

    Raises:
        Refused: the parser can't take nodes; each is named, with its reason.
        ToolchainMissing: the builder's library isn't here.
    """
    options = Options.model_validate_json(plan.options)
    chosen = choose(options)
    onnx = _place_model(stage)
    name, trt = _library(chosen.builder)
    judge = f"{name} {trt.__version__}"
    try:
        compiling.parse_only(trt, onnx, _wanted(plan, stage, open_model(onnx), options, chosen))
    except compiling.Unsupported as error:
        raise _refused(judge, error, onnx, plan) from error
    return Answer(f"the parser of {judge}")


def _write_context(onnx: Path, folder: Path, sidecar: Mapping[str, Any]) -> None:
    with storage_errors("writing the engine for ONNX Runtime"):
        try:
            ep_context.write_context(onnx, folder, sidecar)
        except ValueError as error:
            raise BuildError(str(error), "leave the engine in its file") from error
    faults = ep_context.context_faults(folder, sidecar)
    if faults:
        raise BuildError("; ".join(faults), "leave ep_context off, and report this model")


def _place_model(stage: Stage) -> Path:
    """``model.onnx``, rewritten where it must be; data files have names of our own."""
    from packager.files import clone_file
    from packager.transform import Context
    from packager.transforming import apply

    target: Path = stage.folder / compiling.ONNX
    model = open_model(stage.model)
    needed = rewrites(model.structure)
    if not needed and not model.external:
        clone_file(stage.model, target)
        return target
    with tempfile.TemporaryDirectory(prefix="packager-tensorrt-") as name:
        apply((ForTensorRT(),) if needed else (), Context(stage.model, Path(name), stage.goldens), target)
    return target


def _wanted(plan: Plan, stage: Stage, model: Model, options: Options, chosen: Chosen) -> dict[str, Any]:
    """``engine.json`` as far as it is known before building; what building adds is empty."""
    profiles = profiles_for(plan.target, plan.signature, stage.goldens, options)
    served, later = capabilities(options, model.structure, chosen)
    return {
        "schema": fit.SCHEMA,
        "recipe": bool(chosen.lacking),
        "builder": chosen.builder,
        "library": fit.NAMES[chosen.builder],
        "version": "",
        "compute_capabilities": list(served) if chosen.builder == "rtx" else [],
        "compute_capabilities_named": bool(options.compute_capabilities),
        "later_too": later,
        "systems": [],
        "machines": [],
        "cuda": "",
        "precision": plan.precision,
        "strongly_typed": True,
        "tf32": options.tf32,
        "optimization_level": options.optimization_level,
        "ep_context": options.ep_context,
        "profiles": [asdict(each) for each in profiles],
        "grid_sample": grid_sample_modes(model.structure),
        "wide_constants": _wide_constants(model.path) if chosen.builder == "tensorrt" else [],
        "bindings": [],
    }  # fmt: skip


def _wide_constants(path: Path) -> list[str]:
    """Names of 64-bit integer constants with values beyond 32 bits, which releases before 10 clamp."""
    import onnx_ir as ir

    model, limits = ir.load(path), np.iinfo(np.int32)
    found = []
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.dtype != ir.DataType.INT64 or not tensor.size:
                continue
            array = tensor.numpy()
            if array.min() < limits.min or array.max() > limits.max:
                found.append(name)
    return found


def _compile(onnx: Path, sidecar: Mapping[str, Any], plan: Plan) -> tuple[bytes, dict[str, Any]]:
    """The engine, and what building adds to ``engine.json``."""
    name, trt = _library(sidecar["builder"])
    try:
        facts = compiling.shipped_facts(trt, sidecar["builder"])
        made = compiling.compile_engine(trt, onnx, sidecar)
    except compiling.Missing as error:
        raise ToolchainMissing(f"can't build an engine by {name}: {error}", "build on the GPU machine") from error
    except compiling.Unsupported as error:
        raise _refused(f"{name} {trt.__version__}", error, onnx, plan) from error
    except compiling.Failed as error:
        raise BuildError(
            f"{name} {trt.__version__} can't build the engine: {error}", _failed_hint(str(error))
        ) from error
    except OSError as error:
        raise StorageError(f"building the engine: {error}") from error
    differences = list(binding_differences(plan.signature, made.bindings))
    if differences:
        raise BuildError(f"{name} sees another signature: " + "; ".join(differences), "export the model again")
    if sidecar["builder"] == "rtx":
        facts["cuda"] = kind_named(plan.kind).facts.pins["cuda"]
    return made.data, {**facts, "bindings": list(made.bindings)}


def _library(builder: str) -> tuple[str, Any]:
    """What the builder's library is called, and its module.

    Raises:
        ToolchainMissing: it isn't here.
    """
    name = fit.NAMES[builder]
    trt = fit.load_library(builder)
    if trt is None:
        raise ToolchainMissing(f"{name} can't be imported", "pip install 'packager[tensorrt]'")
    return name, trt


def _refused(parser: str, error: compiling.Unsupported, onnx: Path, plan: Plan) -> Refused:
    listed = "".join(f"\n  {line}" for line in str(error).split("\n"))
    graph = open_model(onnx).structure.graph
    labels = {node.name: node.label for node in graph.walk() if node.name}
    nodes = [
        Objection(labels.get(each.name) or graph.nodes[each.number].label, each.reason)
        for each in error.nodes
        if each.operator and (each.name in labels or 0 <= each.number < len(graph.nodes))
    ]
    hint = _values_hint(plan, str(error)) or "export the model without them, or choose another target"
    return Refused(f"{parser} can't take the model:{listed}", hint, nodes)


def _values_hint(plan: Plan, message: str) -> str:
    """The manifest's lines for an input whose values decide shapes, where that is what was missing."""
    lines = [
        f"  {toml_key(spec.name)} = [[1], [1], [1]]"
        for spec in plan.signature.inputs
        if f"input '{spec.name}' decides shapes" in message
    ]
    if not lines:
        return ""
    return "add least, usual and greatest values, one for each element:\n" + "\n".join(
        [f"  [targets.{toml_key(plan.target)}.values]", *lines]
    )


def _failed_hint(message: str) -> str:
    if "rofile" in message or "imension" in message:
        return "correct the ranges under [targets.<name>.profiles], or pin dims with `shapes`"
    return "choose another target for this model, or another precision"


def binding_differences(signature: Signature, bindings: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """What of the network's inputs and outputs isn't the plan's: names, dtypes, ranks and fixed dims.

    Raises nothing; gives a phrase for each. An input that nothing reads may be gone from a network.
    """
    found = {(each["side"], each["name"]): each for each in bindings}
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            binding = found.pop((side, spec.name), None)
            if binding is None:
                yield f"{side} '{spec.name}' is gone"
                continue
            if binding["dtype"] != spec.dtype:
                yield f"{side} '{spec.name}' is {binding['dtype']}, not {spec.dtype}"
            dims = spec.dims
            if dims is not None and not _fit(dims, binding["dims"]):
                yield f"{side} '{spec.name}' has dims {binding['dims']}, not {list(dims)}"
    yield from (f"{side} '{name}' is new" for side, name in found)


def _fit(dims: tuple[object, ...], found: list[int]) -> bool:
    """Whether dims say the same where both are sizes."""
    return len(dims) == len(found) and all(
        not isinstance(dim, int) or size < 0 or dim == size for dim, size in zip(dims, found, strict=True)
    )


def _write_templates(plan: Plan, stage: Stage, sidecar: Mapping[str, Any]) -> None:
    kind = kind_named(plan.kind)
    values = {"name": plan.name, "signature": plan.signature, "sidecar": sidecar}
    with storage_errors("writing the C++ loader"):
        (stage.folder / "cpp").mkdir()
        for name in CPP:
            write_text(stage.folder / "cpp" / name, render(kind, f"{kind.name}/cpp/{name}.j2", **values))
        text = render(kind, f"{kind.name}/polygraphy_data.py.j2")
        write_text(stage.folder / "polygraphy_data.py", text)
        command = " \\\n  ".join(shlex.quote(word) for word in command_line(sidecar))
        write_text(stage.folder / "trtexec.sh", render(kind, f"{kind.name}/trtexec.sh.j2", command=command))


def command_line(sidecar: Mapping[str, Any]) -> list[str]:
    """NVIDIA's command-line tool with what builds the same engine, word by word.

    Names are in single quotes, as the tool wants those with colons.
    """
    words = ["tensorrt_rtx" if sidecar["builder"] == "rtx" else "trtexec", f"--onnx={compiling.ONNX}"]
    free = [each for each in sidecar["profiles"] if each["shapes"][0] != each["shapes"][2]]
    for index, flag in enumerate(("--minShapes", "--optShapes", "--maxShapes") if free else ()):
        shapes = (f"'{each['name']}':" + "x".join(str(size) for size in each["shapes"][index]) for each in free)
        words.append(f"{flag}={','.join(shapes)}")
    words += [] if sidecar["tf32"] else ["--noTF32"]
    if sidecar["builder"] == "rtx":
        named = sidecar["compute_capabilities"] if sidecar["compute_capabilities_named"] else []
        return words + ([f"--computeCapabilities={','.join(named)}"] if named else [])
    return [*words, "--stronglyTyped"]
