"""The model as an ML Program: converted by onnx2coreml, saved by coremltools on any machine, in bytes that repeat.

Core ML takes fixed shapes and has no texts, so a model with free dims, strings or an operator without a conversion has
no package, nor has one that comes out with another interface; the reason is kept. Precision follows the ONNX model node
by node: what the dialect keeps in float32 stays float32.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from packager.errors import BuildError
from packager.files import write_text
from packager.model import Signature, TensorSpec, open_model
from packager.room import Plan, Stage
from packager.targets.ios.mil_program import SPEC, WEIGHTS, Feature, MalformedProgram, Program, read_program
from packager.targets.ios.options import Options

PACKAGE = "Model.mlpackage"
FEATURES = {"float32": "float32", "float16": "float16", "int32": "int32", "int64": "int32", "bool": "bool"}
"""A tensor's dtype to that of its Core ML feature: Core ML has no 64-bit integers."""
TARGETS = ("iOS15", "iOS16", "iOS17", "iOS18")
"""Deployment targets that coremltools 9 and onnx2coreml 1.1 both know; an operator set of Core ML each."""


@dataclass(frozen=True)
class Converted:
    """Whether there is a package, and if not, why. ``names`` maps the model's tensor names to Core ML's features."""

    made: bool
    reason: str = ""
    names: tuple[tuple[str, str], ...] = ()

    def document(self) -> dict[str, object]:
        """As ``coverage.json`` has it."""
        return {**asdict(self), "names": dict(self.names)}


def write_mlpackage(plan: Plan, stage: Stage, options: Options) -> Converted:
    """Convert ``stage.model`` and save the package into the bundle; say why there is none otherwise.

    Raises:
        BuildError: the package was saved with other files than are expected.
    """
    if any(not isinstance(dim, int) for spec in plan.signature.inputs for dim in spec.dims or (None,)):
        return Converted(False, "its inputs have free dims; Core ML packages are made for fixed ones")
    target = stage.folder / PACKAGE
    try:
        with _quietly():
            _convert(stage.model, target, deployment(options.deployment_target))
    except Exception as error:  # noqa: BLE001 - onnx2coreml and coremltools raise types of all kinds
        return Converted(False, f"onnx2coreml can't convert it: {' '.join(str(error).split())[:300]}")
    _settle(target)
    inputs, outputs = features(target)
    signature = open_model(stage.model).signature
    names = (*(spec.name for spec in signature.inputs), *(spec.name for spec in signature.outputs))
    found = (*inputs, *outputs)
    if len(names) != len(found):
        raise BuildError(f"the Core ML package has {len(found)} features for {len(names)} tensors")
    paired = tuple(zip(names, found, strict=True))
    try:
        wrong = feature_differences(read_program(target), signature, dict(paired))
    except MalformedProgram as error:
        wrong = [str(error)]
    if wrong:
        shutil.rmtree(target)
        return Converted(False, f"onnx2coreml converts it wrongly: {'; '.join(wrong)}")
    return Converted(True, "", paired)


def feature_differences(program: Program, signature: Signature, names: Mapping[str, str]) -> list[str]:
    """How a program's features differ from a model's tensors: order, dtypes, shapes. A line each.

    Args:
        program: of the package.
        signature: of the model.
        names: of features by those of tensors.
    """
    wrong = []
    for side, specs, features in (
        ("input", signature.inputs, program.inputs),
        ("output", signature.outputs, program.outputs),
    ):
        if [names.get(spec.name) for spec in specs] != [feature.name for feature in features]:
            listed = ", ".join(f"'{feature.name}'" for feature in features)
            wrong.append(f"{side}s are {listed}, not those of the model")
            continue
        wrong += [
            f"{side} '{feature.name}': {reason}"
            for spec, feature in zip(specs, features, strict=True)
            if (reason := _mismatch(spec, feature))
        ]
    return wrong


def _mismatch(spec: TensorSpec, feature: Feature) -> str:
    if feature.dtype != FEATURES.get(spec.dtype):
        return f"is {feature.dtype} for a tensor of {spec.dtype}"
    if feature.dims and spec.dims is not None and all(isinstance(dim, int) for dim in spec.dims):
        sizes = tuple(spec.dims) or (1,)
        if feature.dims != sizes:
            return f"has shape {list(feature.dims)}, the tensor {list(spec.dims)}"
    return ""


def deployment(version: str) -> str:
    """The newest target that still runs on iOS ``version``."""
    major = int(version.partition(".")[0])
    return TARGETS[min(major - 15, len(TARGETS) - 1)]


def _convert(model: Path, target: Path, minimum: str) -> None:
    import onnx2coreml

    converted = onnx2coreml.convert(
        str(model), format="mlpackage", minimum_deployment_target=minimum, compute_precision="fp32"
    )
    with tempfile.TemporaryDirectory(prefix="packager-ios-") as name:
        saved = Path(name) / PACKAGE
        converted.save(str(saved))
        for part in (SPEC, WEIGHTS):
            if (saved / part).exists():
                (target / part).parent.mkdir(parents=True, exist_ok=True)
                (target / part).write_bytes((saved / part).read_bytes())


def _settle(target: Path) -> None:
    """Write the spec in a fixed order and the package's manifest with identifiers made of its content's names.

    coremltools gives every package random ones. The layout is that of Core ML packages of version 1.0.0.
    """
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((target / SPEC).read_bytes())
    spec.description.metadata.userDefined.clear()
    (target / SPEC).write_bytes(spec.SerializeToString(deterministic=True))
    entries = {"model.mlmodel": "CoreML Model Specification", "weights": "CoreML Model Weights"}
    items = {
        str(uuid.uuid5(uuid.NAMESPACE_URL, f"packager:{name}")).upper(): {
            "author": "com.apple.CoreML", "description": what, "name": name, "path": f"com.apple.CoreML/{name}",
        }
        for name, what in entries.items()
        if (target / "Data/com.apple.CoreML" / name).exists()
    }  # fmt: skip
    root = next(key for key, item in items.items() if item["name"] == "model.mlmodel")
    manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": root}
    write_text(target / "Manifest.json", json.dumps(manifest, indent=4, sort_keys=True) + "\n")


def features(package: Path) -> tuple[list[str], list[str]]:
    """Names of the inputs and outputs of a saved package, in order."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((package / SPEC).read_bytes())
    return [each.name for each in spec.description.input], [each.name for each in spec.description.output]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep progress bars, warnings about parts for Macs and the like off this process's streams."""
    root = logging.getLogger()
    level, sink = root.level, io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(sink), contextlib.redirect_stdout(sink):
            warnings.simplefilter("ignore")
            root.setLevel(logging.CRITICAL)
            logging.disable(logging.CRITICAL)
            yield
    finally:
        logging.disable(logging.NOTSET)
        root.setLevel(level)
