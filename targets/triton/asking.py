"""Verification against a Triton server that runs already: whoever runs packager names its address.

The server tells its name and version, and that is what the verdict says. A server that hosts packager's stand-in for
the onnxruntime backend calls itself so, and gets the level that it has anywhere else. Others may be asking the same
server, so its statistics prove nothing here: golden cases, and rows alone, together and in parallel, must be answered
rightly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from packager import parity
from packager.errors import UsageError, VerificationError
from packager.goldens import Array
from packager.room import Runner, RuntimeInfo
from packager.targets.triton import kit
from packager.targets.triton.infer import Model
from packager.targets.triton.traffic import ask, check_alike, check_steps

SCHEMES = ("http://", "https://", "grpc://", "grpcs://")


@contextmanager
def asked(bundle: Path, endpoint: str) -> Iterator[Runner]:
    """Run a bundle's goldens on the server at ``endpoint``, such as ``grpc://host:8001``.

    Raises:
        UsageError: that is no address of a Triton server.
        VerificationError: nobody answers, the server hasn't this bundle's model ready, or it answers requests that
            meet differently from single ones.
    """
    if not endpoint.startswith(SCHEMES):
        raise UsageError(f"'{endpoint}' is no Triton server", f"write {' or '.join(SCHEMES)}host:port")
    try:
        golden = parity.read_golden(bundle / "golden")
    except ValueError as error:
        raise VerificationError(str(error), "build the bundle again") from error
    try:
        model = Model(bundle, endpoint)
    except (ValueError, RuntimeError) as error:
        raise VerificationError(
            f"{endpoint} doesn't serve this bundle: {error}",
            "deploy model_repository/ there, load the model, and check the address",
        ) from error
    with closing(model):
        check_alike(model, lambda: closing(Model(bundle, endpoint)), golden)
        check_steps(bundle, endpoint)
        yield _Runner(model, remote_info(model.info["name"], model.info["version"], endpoint))


def remote_info(name: str, version: str, endpoint: str) -> RuntimeInfo:
    """What answered, by its own word."""
    if name == kit.STAND_IN:
        return RuntimeInfo(
            f"Triton core {version} + python-hosted onnxruntime", version, endpoint, "emulated",
            f"the server at {endpoint} says that it hosts packager's stand-in for the C++ onnxruntime backend",
        )  # fmt: skip
    return RuntimeInfo(
        f"{name} {version}",
        version,
        endpoint,
        "runtime",
        details=(("told by", "the server's own metadata"), ("made for release", kit.pins()["release"])),
    )


class _Runner:
    """A model of that server behind the engine's Protocol."""

    def __init__(self, model: Model, info: RuntimeInfo) -> None:
        self._model = model
        self.info = info

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Ask once.

        Raises:
            VerificationError: the server refused or failed.
        """
        outputs: dict[str, Array] = ask(self._model, feeds)
        return outputs
