"""What HTTP and gRPC share: the model, its limits, and the answers to everything but the tensors' form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from .batching import Array, Batcher
from .metrics import Metrics
from .protocol import DATATYPES, Malformed

EXTENSIONS = ("binary_tensor_data",)
PLATFORM = "onnxruntime_onnxv1"
"""How Triton calls it, and clients expect it."""


class Tensor(Protocol):
    """An input or output of the model, as ``feeds.py`` has it."""

    name: str
    dtype: str
    dims: tuple[int | str | None, ...] | None


class Served(Protocol):
    """A model that can be served: ``infer.Session``."""

    name: str
    version: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    info: Mapping[str, str]

    def check(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays in order, or ``ValueError``."""
        ...

    def run_checked(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run arrays that are checked; ``RuntimeError`` where the runtime refuses them."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a sender may use up: bytes of a body, requests being answered, seconds a body may take to arrive."""

    body: int
    in_flight: int
    body_seconds: float = 60.0


class Refusal(Exception):
    """A request that isn't answered, with the HTTP status for it (gRPC has one for each)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Core:
    """A model with its batcher, limits and counts."""

    def __init__(self, model: Served, batcher: Batcher, limits: Limits, metrics: Metrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._batcher = batcher
        self._in_flight = 0
        metrics.in_flight.set_function(lambda: self._in_flight)
        self.ready = True
        self.outputs = [tensor.name for tensor in model.outputs]

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A place among the requests being answered.

        Raises:
            Refusal: the service is stopping, or has as many as it takes.
        """
        if not self.ready:
            raise Refusal(503, "the service is stopping")
        if self._in_flight >= self.limits.in_flight:
            raise Refusal(429, f"{self._in_flight} requests are being answered, which is the limit; try again")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def check_model(self, name: str, version: str) -> None:
        """Refuse another model or version; an empty version is any.

        Raises:
            Refusal: with what is served.
        """
        if name != self.model.name or version not in ("", self.model.version):
            told = f"model '{self.model.name}', version '{self.model.version}'"
            raise Refusal(404, f"there is no model {name!a}, version {version!a}; {told} is served")

    async def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model.

        Raises:
            Malformed: names, dtypes or shapes aren't the model's, or the runtime refuses what the shapes come to.
        """
        try:
            arrays = self.model.check(feeds)
        except ValueError as error:
            raise Malformed(str(error)) from error
        try:
            return await self._batcher.submit(arrays)
        except RuntimeError as error:
            raise Malformed(f"the model can't be run on these inputs: {error}") from error

    def server_metadata(self) -> dict[str, Any]:
        """Name and version of the runtime, and the extensions of the protocol."""
        return {"name": self.model.info["name"], "version": self.model.info["version"], "extensions": [*EXTENSIONS]}

    def model_metadata(self) -> dict[str, Any]:
        """Signature of the model; free dims are -1."""
        return {
            "name": self.model.name,
            "versions": [self.model.version],
            "platform": PLATFORM,
            "inputs": _listed(self.model.inputs),
            "outputs": _listed(self.model.outputs),
        }


def _listed(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "datatype": DATATYPES[tensor.dtype],
            "shape": [dim if isinstance(dim, int) else -1 for dim in tensor.dims or ()],
        }
        for tensor in tensors
    ]
