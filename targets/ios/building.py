"""Filling the bundle: the Swift package round the model, and what Core ML will make of it."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from packager.coverage import SCHEMA
from packager.errors import BuildError
from packager.files import clone_file, to_json, write_text
from packager.graph import format_dims
from packager.model import TensorSpec, open_model, sha256_file
from packager.render import render
from packager.room import Kind, Plan, Stage, kind_named
from packager.targets.ios.coverage import coverage_of, types_of
from packager.targets.ios.fitting import BEFORE
from packager.targets.ios.mlpackage import PACKAGE, write_mlpackage
from packager.targets.ios.names import identifiers, module_name
from packager.targets.ios.options import Options

MODEL = "model.onnx"
LIBRARY = ("Tensor.swift", "ModelError.swift", "Digest.swift", "Session.swift")
TESTS = ("Golden.swift", "Judge.swift")
TYPES = {
    "float32": ("Float", "0"), "int8": ("Int8", "0"), "uint8": ("UInt8", "0"), "int32": ("Int32", "0"),
    "uint32": ("UInt32", "0"), "int64": ("Int64", "0"), "uint64": ("UInt64", "0"), "bool": ("Bool", "false"),
    "string": ("String", '""'),
}  # fmt: skip
"""Swift's type for a dtype, and how its zero is written."""


def module_of(plan: Plan) -> str:
    """The Swift module's name."""
    chosen: str = Options.model_validate_json(plan.options).module or module_name(plan.name)
    return chosen


def build_bundle(plan: Plan, stage: Stage) -> None:
    """Fill ``stage.folder``.

    Raises:
        BuildError: the model can't be written as one file.
        StorageError: a file can't be written.
    """
    kind, options = kind_named(plan.kind), Options.model_validate_json(plan.options)
    module = module_of(plan)
    sources = stage.folder / "Sources" / module
    (sources / "Resources").mkdir(parents=True)
    model = sources / "Resources" / MODEL
    _place_model(stage, model)
    converted = write_mlpackage(plan, stage, options) if options.mlpackage else None
    coverage = _coverage(model, options)
    if converted is not None:
        coverage["core ml package"] = converted.document()
    write_text(stage.folder / "coverage.json", to_json(coverage))
    packaged = converted is not None and converted.made
    _write_package(kind, plan, stage.folder, sha256_file(model), packaged=packaged)


def _place_model(stage: Stage, target: Path) -> None:
    """The model's own bytes, or, where weights lie beside it, saved anew in one file."""
    if not open_model(stage.model).external:
        clone_file(stage.model, target)
        return
    from packager.transform import Context
    from packager.transforming import apply

    with tempfile.TemporaryDirectory(prefix="packager-ios-") as name:
        apply((), Context(stage.model, Path(name), stage.goldens), target, check_runtime=False)
    if open_model(target).external:
        raise BuildError("the model is too large for one file", "choose precision fp16, or a smaller model")


def _coverage(path: Path, options: Options) -> dict[str, object]:
    """``coverage.json``: what Core ML takes of the model as it was given, and of the one that ships."""
    import onnx

    model = open_model(path)
    after = coverage_of(model.structure, types_of(model.structure), static=options.static_shapes)
    proto = onnx.load(str(path), load_external_data=False)
    before = next((json.loads(entry.value) for entry in proto.metadata_props if entry.key == BEFORE), None)
    return {"schema": SCHEMA, "before": before, "after": after.document()}


def _write_package(kind: Kind, plan: Plan, folder: Path, digest: str, *, packaged: bool) -> None:
    assert kind.templates is not None  # noqa: S101 - the templates of this room lie in the same package
    options, module = Options.model_validate_json(plan.options), module_of(plan)
    sources, tests = folder / "Sources" / module, folder / "Tests" / f"{module}Tests"
    excluded = ["Package.swift", "README.md", "Sources", "coverage.json", f"{module}.podspec", "verdict.json"]
    values: dict[str, object] = {
        "module": module,
        "title": f"{plan.name} {plan.version}",
        "name": plan.name,
        "version": plan.version,
        "target": plan.target,
        "kind": plan.kind,
        "pins": kind.facts.pins,
        "runtime": kind.facts.pins["runtime"],
        "deployment": options.deployment_target,
        "provider": sorted(options.provider().items()),
        "digest": digest,
        "inputs": _typed(plan.signature.inputs, "input"),
        "outputs": _typed(plan.signature.outputs, "output"),
        "excluded": [*excluded, *([PACKAGE] if packaged else [])],
    }
    for template, target in (
        ("Package.swift", folder / "Package.swift"),
        ("podspec", folder / f"{module}.podspec"),
        ("model.swift", sources / f"{module}Model.swift"),
        ("sample.swift", folder / "Sources" / f"{module}Sample" / "Sample.swift"),
        ("tests.swift", tests / f"{module}Tests.swift"),
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, render(kind, f"{kind.name}/{template}.j2", **values))
    for part, names, place in (
        ("library", LIBRARY, sources),
        ("library", ("PrivacyInfo.xcprivacy",), sources / "Resources"),
        ("selfcheck", TESTS, tests),
    ):
        for name in names:
            write_text(place / name, (kind.templates / part / name).read_text(encoding="utf-8"))


def _typed(specs: tuple[TensorSpec, ...], fallback: str) -> list[dict[str, object]]:
    """What the templates need of each tensor: its own name, Swift's name and type, sizes, and an example's shape."""
    found = []
    for spec, swift in zip(specs, identifiers((spec.name for spec in specs), fallback), strict=True):
        kind, zero = TYPES[spec.dtype]
        sizes = [dim if isinstance(dim, int) else None for dim in spec.dims or ()]
        example = [1 if size is None else size for size in sizes]
        listed = ", ".join("nil" if size is None else str(size) for size in sizes)
        found.append(
            {
                "name": spec.name,
                "swift": swift,
                "dtype": spec.dtype,
                "type": kind,
                "zero": zero,
                "count": math.prod(example),
                "shape": "any rank" if spec.dims is None else format_dims(spec.dims),
                "sizes": "nil" if spec.dims is None else f"[{listed}]",
                "example": example,
            }
        )
    return found
