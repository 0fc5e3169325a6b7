"""Verification: the engine where a GPU fits it; elsewhere the ONNX file it was built from, and the verdict says so.

Three cases. The engine runs here: level ``runtime``. It can't: the golden cases run through ``model.onnx`` in ONNX
Runtime. That is ``proxy`` for the ONNX file; of the engine it is known only that it was parsed, built and has the right
bindings, which is ``structural``. The bundle's level is the engine's, since the engine is what a partner deploys, and
the verdict states both. A recipe has no engine at all: ``none``, and nothing is run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packager.bundle import open_bundle
from packager.errors import VerificationError
from packager.float16_rounding import STANDS_IN, computes_in_bfloat16, runnable
from packager.model import open_model
from packager.room import Runner, RuntimeInfo
from packager.targets.tensorrt.building import binding_differences
from packager.targets.tensorrt.compile import ONNX
from packager.targets.tensorrt.ep_context import CONTEXT, context_faults
from packager.targets.tensorrt.fit import BUILT, ENGINE, SIDECAR, Misfit, read_sidecar
from packager.targets.tensorrt.infer import Model

if TYPE_CHECKING:
    import numpy as np


@contextmanager
def loaded(bundle: Path) -> Iterator[Runner]:
    """Load the engine of a bundle, or what stands for it.

    Raises:
        VerificationError: the bundle isn't whole, its engine and its signature differ, or TensorRT can't load an engine
            that should fit.
    """
    try:
        sidecar = read_sidecar(bundle)
        if sidecar["recipe"] and not (bundle / BUILT / SIDECAR).is_file():
            yield _Recipe(str(sidecar["library"]))
            return
        _check_engine(bundle)
        try:
            model, info = _engine(bundle)
        except Misfit as error:
            with tempfile.TemporaryDirectory(prefix="packager-tensorrt-") as name:
                model, info = _proxy(bundle, error, f"{sidecar['library']} {sidecar['version']}", Path(name))
    except (ValueError, RuntimeError) as error:
        raise VerificationError(str(error), "build the bundle again") from error
    yield _Runner(model, info)


def _engine(bundle: Path) -> tuple[Model, RuntimeInfo]:
    model = Model(bundle, through="engine")
    info = RuntimeInfo(
        model.info["name"],
        model.info["version"],
        model.info["device"],
        "runtime",
        details=(("engine", model.info["engine"]), *_context_details(bundle)),
    )
    return model, info


def _proxy(bundle: Path, why: Misfit, builder: str, folder: Path) -> tuple[Model, RuntimeInfo]:
    """``model.onnx`` in ONNX Runtime, or what stands in for it where that has no kernels."""
    opened = open_model(bundle / ONNX)
    model = Model(bundle, through="onnxruntime", onnx=runnable(opened, folder))
    ran = f"{model.info['name']} {model.info['version']}"
    ran += f", {STANDS_IN}" if computes_in_bfloat16(opened) else ""
    reason = (
        f"the engine wasn't executed here ({'; '.join(why.reasons)}): structural, it was parsed and built by {builder} "
        f"and its bindings are the model's; model.onnx, which it was built from, answered the goldens: proxy, {ran}"
    )
    details = (
        ("engine", f"structural: parsed and built by {builder}, bindings checked, not executed"),
        (ONNX, f"proxy: executed on CPU by {ran}"),
        *_context_details(bundle),
        ("reproducible", "model.engine's bytes may differ from build to build; all other files are the same"),
    )
    return model, RuntimeInfo(model.info["name"], model.info["version"], "CPU", "structural", reason, details)


def _context_details(bundle: Path) -> tuple[tuple[str, str], ...]:
    if not _has_context(bundle):
        return ()
    return ((CONTEXT, "structural: a valid model whose engine and signature are the bundle's, not executed"),)


def _check_engine(bundle: Path) -> None:
    """The engine is there and was built with the bindings that the bundle promises."""
    home = bundle / BUILT if (bundle / BUILT / SIDECAR).is_file() else bundle
    engine = home / ENGINE
    if not engine.is_file() or not engine.stat().st_size:
        raise ValueError(f"{engine} is missing or empty")
    differences = list(binding_differences(open_bundle(bundle).signature, read_sidecar(home)["bindings"]))
    if differences:
        raise ValueError(f"{home / SIDECAR} and bundle.json differ: {'; '.join(differences)}")
    # build.py leaves the file out on a machine without the package onnx; in the bundle itself it must be.
    if _has_context(bundle) and (home == bundle or (home / CONTEXT).is_file()):
        faults = context_faults(home, read_sidecar(home))
        if faults:
            raise ValueError("; ".join(faults))


def _has_context(bundle: Path) -> bool:
    return bool(read_sidecar(bundle).get("ep_context", "off") != "off")


class _Runner:
    """A loaded model behind the engine's Protocol."""

    def __init__(self, model: Model, info: RuntimeInfo) -> None:
        self._model, self.info = model, info

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once.

        Raises:
            VerificationError: the inputs don't fit, or the runtime failed.
        """
        try:
            outputs: dict[str, np.ndarray] = self._model.run(feeds)
        except (ValueError, RuntimeError) as error:
            raise VerificationError(str(error)) from error
        return outputs


class _Recipe:
    """What a recipe can run: nothing."""

    def __init__(self, library: str) -> None:
        reason = "a recipe: its engine is built on the GPU machine, by `python build.py`, and checked there"
        self.info = RuntimeInfo(library, "", "", "none", reason)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Never.

        Raises:
            VerificationError: always.
        """
        raise VerificationError(self.info.reason)
