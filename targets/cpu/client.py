"""Ask a running service of this bundle: named numpy arrays in, named numpy arrays out.

Needs numpy, ``feeds.py`` and ``service/protocol.py``; over HTTP nothing else, over gRPC also grpcio and protobuf.
From Python::

    from client import Client

    client = Client(".", "http://localhost:8080")  # or grpc://localhost:8081
    outputs = client.run({"x": x})

Tensors travel as bytes, by the protocol's binary extension. A proxy of the environment is not used.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from packager.feeds import Array, Tensor, checked, read_description
from packager.targets.cpu.service.protocol import DATATYPES, HEADER, Malformed, from_bytes, padded, to_bytes


class Client:
    """A connection to a service. An instance belongs to one thread.

    Args:
        folder: the bundle: ``bundle.json`` is read.
        url: ``http://host:8080``, ``https://host`` or ``grpc://host:8081``.
        seconds: how long one request may take.

    Attributes:
        info: ``name``, ``version`` and ``device`` (the service's address) of what runs the model.

    Raises:
        ValueError: the address makes no sense, or the service serves another model.
        RuntimeError: the service can't be reached.
    """

    def __init__(self, folder: str | Path, url: str, seconds: float = 300.0) -> None:
        self._model = read_description(folder)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
            raise ValueError(f"'{url}' is no service: give http://host:8080, https://host or grpc://host:8081")
        self._wire: _Http | _Grpc = (
            _Grpc(parts.netloc, seconds) if parts.scheme == "grpc" else _Http(parts.scheme, parts.netloc, seconds)
        )
        try:
            server, found = self._wire.metadata(self._model.name, self._model.version)
        except (OSError, RuntimeError) as error:
            self.close()
            raise RuntimeError(f"{url} doesn't serve '{self._model.name}' {self._model.version}: {error}") from error
        for side, tensors in (("inputs", self._model.inputs), ("outputs", self._model.outputs)):
            wanted = {tensor.name: DATATYPES[tensor.dtype] for tensor in tensors}
            if wanted != found[side]:
                self.close()
                raise ValueError(f"{url} serves a model with the {side} {found[side]}, the bundle has {wanted}")
        self.info = {"name": server[0], "version": server[1], "device": url}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: one array per input, by exact name, of the input's dtype and shape; strings as object arrays.

        Returns:
            One array per output, by exact name.

        Raises:
            ValueError: a name, dtype, rank or size is not the model's.
            RuntimeError: the service refused or failed; the message is its own.
        """
        arrays = checked(self._model.inputs, feeds)
        try:
            found = self._wire.infer(self._model.name, self._model.version, self._model.inputs, arrays)
        except (OSError, Malformed) as error:
            raise RuntimeError(f"the service can't be asked: {error}") from error
        lacking = [tensor.name for tensor in self._model.outputs if tensor.name not in found]
        if lacking:
            raise RuntimeError(f"the answer lacks output '{lacking[0]}'")
        return {tensor.name: found[tensor.name] for tensor in self._model.outputs}

    def close(self) -> None:
        """Hang up."""
        self._wire.close()


Metadata = tuple[tuple[str, str], dict[str, dict[str, str]]]


class _Http:
    def __init__(self, scheme: str, address: str, seconds: float) -> None:
        made = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        self._connection = made(address, timeout=seconds)

    def metadata(self, name: str, version: str) -> Metadata:
        server = json.loads(self._ask("GET", "/v2")[0])
        model = json.loads(self._ask("GET", self._path(name, version))[0])
        sides = {side: {each["name"]: each["datatype"] for each in model[side]} for side in ("inputs", "outputs")}
        return (str(server["name"]), str(server["version"])), sides

    def infer(
        self, name: str, version: str, tensors: tuple[Tensor, ...], arrays: Mapping[str, Array]
    ) -> dict[str, Array]:
        payloads = [to_bytes(arrays[tensor.name]) for tensor in tensors]
        inputs = [
            {
                "name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": list(arrays[tensor.name].shape),
                "parameters": {"binary_data_size": len(payload)},
            }
            for tensor, payload in zip(tensors, payloads, strict=True)
        ]  # fmt: skip
        head = padded(json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode())
        headers = {HEADER: str(len(head)), "Content-Type": "application/octet-stream"}
        body, length = self._ask("POST", f"{self._path(name, version)}/infer", b"".join([head, *payloads]), headers)
        rest, found = memoryview(body)[length:], {}
        for entry in json.loads(body[:length])["outputs"]:
            size = entry["parameters"]["binary_data_size"]
            found[entry["name"]] = from_bytes(entry["name"], entry["datatype"], tuple(entry["shape"]), rest[:size])
            rest = rest[size:]
        return found

    def close(self) -> None:
        self._connection.close()

    @staticmethod
    def _path(name: str, version: str) -> str:
        return f"/v2/models/{quote(name, safe='')}/versions/{quote(version, safe='')}"

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, int]:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # A service that refuses a body says so, and hangs up, before it has taken all of it.
                self._connection.request(method, path, body, dict(headers or {}))
            answer = self._connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            self._connection.close()
            raise RuntimeError(f"the connection failed: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {content[:2000].decode('utf-8', 'replace')}")
        return content, int(answer.headers.get(HEADER, len(content)))


class _Grpc:
    def __init__(self, address: str, seconds: float) -> None:
        import grpc

        from packager.targets.cpu.service.messages import METHODS, SERVICE, message

        # Whole tensors travel in one message, and a proxy of the environment isn't for a service in reach.
        options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        self._channel = grpc.insecure_channel(address, [*options, ("grpc.enable_http_proxy", 0)])
        self._message, self._seconds, self._failure = message, seconds, grpc.RpcError
        self._methods = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}", message(f"{name}Request").SerializeToString, message(f"{name}Response").FromString
            )
            for name in METHODS
        }

    def metadata(self, name: str, version: str) -> Metadata:
        server = self._ask("ServerMetadata")
        model = self._ask("ModelMetadata", name=name, version=version)
        sides = {
            side: {each.name: each.datatype for each in tensors}
            for side, tensors in (("inputs", model.inputs), ("outputs", model.outputs))
        }
        return (server.name, server.version), sides

    def infer(
        self, name: str, version: str, tensors: tuple[Tensor, ...], arrays: Mapping[str, Array]
    ) -> dict[str, Array]:
        kind = self._message("ModelInferRequest.InferInputTensor")
        inputs = [
            kind(name=tensor.name, datatype=DATATYPES[tensor.dtype], shape=arrays[tensor.name].shape)
            for tensor in tensors
        ]
        raw = [to_bytes(arrays[tensor.name]) for tensor in tensors]
        told = self._ask("ModelInfer", model_name=name, model_version=version, inputs=inputs, raw_input_contents=raw)
        return {
            each.name: from_bytes(each.name, each.datatype, tuple(each.shape), data)
            for each, data in zip(told.outputs, told.raw_output_contents, strict=True)
        }

    def close(self) -> None:
        self._channel.close()

    def _ask(self, method: str, **fields: Any) -> Any:  # noqa: ANN401 - messages that protobuf makes
        try:
            return self._methods[method](self._message(f"{method}Request")(**fields), timeout=self._seconds)
        except self._failure as error:
            raise RuntimeError(f"{error.code().name}: {error.details()}") from error
