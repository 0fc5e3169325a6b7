"""Checking a bundle's Core ML package: its features are the model's tensors, and its operations give the goldens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from packager import parity
from packager.bundle import open_bundle
from packager.errors import ModelError, VerificationError
from packager.goldens import Array
from packager.model import Signature
from packager.reference import OrtSession
from packager.targets.ios.mil_onnx import Untranslated, translate
from packager.targets.ios.mil_program import MalformedProgram, Program, read_program
from packager.targets.ios.mlpackage import PACKAGE, feature_differences
from packager.verifying import GOLDEN

KEY = "core_ml_package"
HINT = "build the bundle again; if it stays so, set mlpackage = false and report the model"


def check_mlpackage(bundle: Path) -> tuple[tuple[str, str], ...]:
    """What the verdict says of the package: how it was checked, or why there is none.

    Raises:
        VerificationError: its features aren't the model's tensors, or its arithmetic misses the goldens.
    """
    told = json.loads((bundle / "coverage.json").read_text(encoding="utf-8")).get("core ml package")
    if told is None or not told["made"]:
        return ((KEY, "none: " + ("it wasn't asked for" if told is None else told["reason"])),)
    signature = open_bundle(bundle).signature
    try:
        program = read_program(bundle / PACKAGE)
        names = _check_features(program, signature, told["names"])
        overall = _run(translate(program).SerializeToString(), bundle, signature, names)
    except MalformedProgram as error:
        raise VerificationError(f"the Core ML package can't be read: {error}", HINT) from error
    except Untranslated as error:
        return ((KEY, f"structural: its interface was checked, its operations were not carried out: {error}"),)
    if not overall.passed:
        listed = "".join(f"\n  {reason}" for reason in overall.reasons[:5])
        raise VerificationError(f"the Core ML package's operations don't give the goldens:{listed}", HINT)
    kinds = len({operation.type for operation in program.operations})
    worst = "" if overall.max_abs is None else f", max abs {overall.max_abs.value:.3g}"
    return ((KEY, f"{len(program.operations)} operations of {kinds} types carried out one by one here{worst}"),)


def _check_features(program: Program, signature: Signature, names: Mapping[str, str]) -> dict[str, str]:
    """Tensor names to feature names, after comparing order, dtypes and shapes.

    Raises:
        VerificationError: a feature isn't its tensor.
    """
    if wrong := feature_differences(program, signature, names):
        listed = "".join(f"\n  {line}" for line in wrong)
        raise VerificationError(f"the Core ML package has another interface than the model:{listed}", HINT)
    return dict(names)


def _run(model: bytes, bundle: Path, signature: Signature, names: Mapping[str, str]) -> parity.Overall:
    """Every golden case through the translated program.

    Raises:
        Untranslated: ONNX Runtime can't carry the translation out, or Core ML can't take a golden input.
    """
    golden = parity.read_golden(bundle / GOLDEN)
    wanted = [spec.name for spec in signature.outputs if spec.name in golden.rules]
    results = []
    with tempfile.TemporaryDirectory(prefix="packager-ios-") as folder:
        path = Path(folder) / "program.onnx"
        path.write_bytes(model)
        try:
            session = OrtSession(path, quantized=False)
            for case in golden.cases:
                feeds = {names[name]: _narrow(name, array) for name, array in case.inputs.items()}
                made = session.run(feeds, [names[name] for name in wanted], case.name)
                outputs = {name: _widened(made[names[name]], case.outputs[name]) for name in wanted}
                expected = {name: case.outputs[name] for name in wanted}
                results.append(parity.compare_case(case.name, expected, outputs, golden.rules, golden.excluded_names))
        except ModelError as error:
            raise Untranslated(error.message) from error
    return parity.judge(results)


def _narrow(name: str, array: Array) -> Array:
    """An array as Core ML takes it.

    Raises:
        Untranslated: a whole number doesn't fit into 32 bits.
    """
    if array.dtype.name != "int64":
        return array
    small = array.astype(np.int32)
    if not np.array_equal(small, array):
        raise Untranslated(f"input '{name}' holds numbers beyond 32 bits, which Core ML can't take")
    return small


def _widened(array: Array, expected: Array) -> Array:
    """Core ML's 32-bit integers as the model gives them, and its one-element arrays as the scalars they stand for."""
    if expected.dtype.name == "int64" and array.dtype.name == "int32":
        array = array.astype(np.int64)
    return array.reshape(()) if expected.shape == () and array.shape == (1,) else array
