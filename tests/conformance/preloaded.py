"""What children of a build need, imported once before they are forked (see :mod:`tests.conformance.forking`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from packager.child import QUIET
from packager.room import kinds
from tests.conformance import tap

MODULES = (
    "numpy", "onnx", "onnx.reference", "onnx_ir", "onnxruntime", "pydantic", "ml_dtypes", "safetensors.numpy",
    "jinja2", "tritonclient.http", "tritonclient.grpc", "grpc", "packager.reference", "packager.strength",
    "packager.mutants", "packager.building", "packager.verifying", "packager.diagnosis", "packager.transforming",
    "packager.transform_steps", "packager.selfcheck", "packager.dialect",
)  # fmt: skip


def load() -> None:
    """Import it all, as far as it is there."""
    os.environ.update(QUIET)
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from packager.targets.openvino.infer import load_openvino

        load_openvino()
    for kind in kinds().values():
        importlib.import_module(kind.module)
    tap.install()
    gc.collect()
    gc.freeze()


load()
