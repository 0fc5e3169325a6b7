"""Running a bundle here: the generated Swift where there is a toolchain, else ONNX Runtime on the very model file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packager.errors import ModelError, VerificationError
from packager.room import Runner, RuntimeInfo
from packager.targets.ios.building import MODEL
from packager.targets.ios.mlcheck import check_mlpackage
from packager.targets.ios.swift_run import SwiftModel, module_in, swift_model
from packager.targets.ios.toolchain import HOW, find_toolchain

if TYPE_CHECKING:
    from packager.goldens import Array
    from packager.reference import OrtSession

SWIFT = "there is no Core ML here: the generated Swift ran over a stand-in, computed by ONNX Runtime's CPU provider"
PROXY = f"no Swift toolchain here ({HOW}), nor Core ML: ONNX Runtime's CPU provider ran the model file of the package"


@contextmanager
def run_bundle(bundle: Path) -> Iterator[Runner]:
    """Load the bundle, and check its Core ML package where it has one.

    Raises:
        VerificationError: the model or the Swift package doesn't load, or the Core ML package answers wrongly.
    """
    module = module_in(bundle)
    model = bundle / "Sources" / module / "Resources" / MODEL
    proxy, outputs = _session(model)
    details = check_mlpackage(bundle)
    toolchain = find_toolchain()
    if toolchain is None:
        info = RuntimeInfo("ONNX Runtime", proxy.version, "CPU", "proxy", PROXY, details)
        yield _Proxy(proxy, outputs, info)
        return
    with swift_model(toolchain, bundle, module) as swift:
        info = RuntimeInfo("ONNX Runtime (Swift)", proxy.version, "CPU", "emulated", SWIFT, details)
        yield _Swift(swift, info)


def _session(path: Path) -> tuple[OrtSession, list[str]]:
    """ONNX Runtime on a model file, and the names of its outputs."""
    from packager.model import open_model
    from packager.reference import OrtSession

    try:
        model = open_model(path)
        return OrtSession(path, quantized=model.is_quantized), [spec.name for spec in model.signature.outputs]
    except ModelError as error:
        raise VerificationError(error.message, "build the bundle again") from error


class _Proxy:
    """ONNX Runtime behind the engine's Protocol."""

    def __init__(self, session: OrtSession, outputs: list[str], info: RuntimeInfo) -> None:
        self._session, self._outputs = session, outputs
        self.info = info

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Raises:
            ModelError: ONNX Runtime failed.
        """
        return self._session.run(feeds, self._outputs, "golden")


class _Swift:
    """The generated package behind the engine's Protocol."""

    def __init__(self, model: SwiftModel, info: RuntimeInfo) -> None:
        self._model = model
        self.info = info

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Raises:
            VerificationError: the package failed; its error is given.
        """
        outputs: dict[str, Array] = self._model.run(feeds)
        return outputs
