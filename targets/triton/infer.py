"""Ask a Triton server that serves the model of this folder: named numpy arrays in, named numpy arrays out.

Needs numpy and tritonclient (``pip install "tritonclient[grpc,http]"``), and ``feeds.py`` beside it. From Python::

    from infer import Model

    model = Model(".", "grpc://triton.example:8001")
    outputs = model.run({"x": x})

or from a shell, with one array per input in an ``.npz`` file: ``python infer.py input.npz``.

The server is the one the environment variable ``TRITON_URL`` names where none is given: ``http://host:8000``,
``https://``, ``grpc://host:8001`` or ``grpcs://``; else ``http://localhost:8000``. The signature (exact names, dtypes
and shapes), the model's name and its version are read from ``bundle.json``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packager.feeds import Array, Tensor, checked, read_description, run_file

DEFAULT_URL = "http://localhost:8000"
DATATYPES = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "bool": "BOOL",
    "string": "BYTES",
}  # fmt: skip
"""dtype names of ``bundle.json`` to those of Triton's protocol."""


class Model:
    """The model as a server serves it. An instance belongs to one thread where it speaks HTTP.

    Args:
        folder: the bundle: ``bundle.json`` is read.
        url: the server; ``None`` takes ``TRITON_URL`` of the environment, else ``http://localhost:8000``.
        seconds: how long one request may take.

    Attributes:
        info: ``name``, ``version`` and ``device`` (the server's address) of what runs the model.
        max_batch: rows a request may have; 0 where the server takes full shapes.

    Raises:
        ValueError: the address makes no sense, or the server's model isn't this bundle's.
        RuntimeError: the server can't be reached, or hasn't the model ready.
    """

    def __init__(self, folder: str | Path, url: str | None = None, seconds: float = 300.0) -> None:
        self._model = read_description(folder)
        self._version = str(self._model.options["model_version"])
        self._seconds = seconds
        self._client, self._types, self._failures, self._http = _connect(
            url or os.environ.get("TRITON_URL") or DEFAULT_URL, seconds
        )
        self._url = url or os.environ.get("TRITON_URL") or DEFAULT_URL
        try:
            server, self.max_batch = self._look()
        except BaseException:
            self.close()
            raise
        self.info = {"name": server[0], "version": server[1], "device": self._url}

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. More rows than the server merges are sent in several requests.

        Args:
            feeds: one array per input, by exact name, of the input's dtype and shape; strings as object arrays.

        Returns:
            One new array per output, by exact name.

        Raises:
            ValueError: a name, dtype, rank or size is not the model's, or a string can't travel.
            RuntimeError: the server refused or failed; the message is its own.
        """
        arrays = checked(self._model.inputs, feeds)
        for tensor in self._model.inputs:
            _check_strings(tensor, arrays[tensor.name])
        if not self.max_batch:
            return self._ask(arrays)
        sizes = {len(array) for array in arrays.values()}
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(f"all inputs have the same number of rows, at least 1; these have {sorted(sizes)}")
        (rows,) = sizes
        parts = [
            self._ask({name: array[start : start + self.max_batch] for name, array in arrays.items()})
            for start in range(0, rows, self.max_batch)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _look(self) -> tuple[tuple[str, str], int]:
        """Server's name and version, and the batch limit, after holding the server's model against the bundle's."""
        name, version = self._model.name, self._version
        more = {} if self._http else {"as_json": True}
        try:
            server = self._client.get_server_metadata(**more)
            found = self._client.get_model_metadata(name, version, **more)
            config = self._client.get_model_config(name, version, **more)
        except self._failures as error:
            raise RuntimeError(f"{self._url} has no model '{name}', version {version}, ready: {error}") from error
        for side, tensors in (("inputs", self._model.inputs), ("outputs", self._model.outputs)):
            wanted = {tensor.name: DATATYPES[tensor.dtype] for tensor in tensors}
            served = {tensor["name"]: tensor["datatype"] for tensor in found.get(side, [])}
            if wanted != served:
                raise ValueError(f"{self._url} serves '{name}' with the {side} {served}, the bundle has {wanted}")
        described = config if self._http else config["config"]
        return (str(server["name"]), str(server["version"])), int(described.get("max_batch_size", 0))

    def _ask(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        inputs = []
        for tensor in self._model.inputs:
            array = self._outward(tensor, arrays[tensor.name])
            given = self._types.InferInput(tensor.name, list(array.shape), DATATYPES[tensor.dtype])
            given.set_data_from_numpy(array)
            inputs.append(given)
        outputs = [self._types.InferRequestedOutput(tensor.name) for tensor in self._model.outputs]
        limit = {} if self._http else {"client_timeout": self._seconds}
        try:
            answer = self._client.infer(self._model.name, inputs, self._version, outputs=outputs, **limit)
            return {tensor.name: self._inward(tensor, answer) for tensor in self._model.outputs}
        except self._failures as error:
            raise RuntimeError(f"Triton: {error}") from error

    def _outward(self, tensor: Tensor, array: Array) -> Array:
        """As it travels: Triton has no scalars, and no rows without dims; both get a dim of 1."""
        if len(tensor.dims or ()) == (1 if self.max_batch else 0):
            array = array.reshape((*array.shape, 1))
        if tensor.dtype == "string":
            flat = [str(each).encode("utf-8") for each in array.ravel()]
            array = np.array(flat, object).reshape(array.shape)
        return np.ascontiguousarray(array)

    def _inward(self, tensor: Tensor, answer: Any) -> Array:  # noqa: ANN401 - of two clients
        array: Array = answer.as_numpy(tensor.name)
        if array is None:
            raise RuntimeError(f"Triton: the answer lacks output '{tensor.name}'")
        if len(tensor.dims or ()) == (1 if self.max_batch else 0) and array.shape[-1:] == (1,):
            array = array.reshape(array.shape[:-1])
        if tensor.dtype == "string":
            flat = [each.decode("utf-8") if isinstance(each, bytes) else str(each) for each in array.ravel()]
            return np.array(flat, object).reshape(array.shape)
        return np.array(array)


def _connect(url: str, seconds: float) -> tuple[Any, Any, tuple[type[Exception], ...], bool]:
    """A client for the address, the module of its types, what it raises, and whether it speaks HTTP."""
    scheme, separator, address = url.partition("://")
    address = address.rstrip("/")
    if not separator or not address or scheme not in ("http", "https", "grpc", "grpcs"):
        raise ValueError(f"'{url}' is no server: give http://host:8000, https://, grpc://host:8001 or grpcs://")
    if scheme.startswith("http"):
        import tritonclient.http as types

        client = types.InferenceServerClient(
            address, ssl=scheme == "https", connection_timeout=seconds, network_timeout=seconds
        )
        return client, types, (types.InferenceServerException, OSError), True
    import grpc
    import tritonclient.grpc as types

    # Whole tensors travel in one message, and a proxy of the environment isn't for a server on this machine.
    local = address.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")
    limits = [("grpc.max_send_message_length", 2**31 - 1), ("grpc.max_receive_message_length", 2**31 - 1)]
    more = [("grpc.enable_http_proxy", 0)] if local else []
    client = types.InferenceServerClient(address, ssl=scheme == "grpcs", channel_args=limits + more)
    return client, types, (types.InferenceServerException, grpc.RpcError), False


def _check_strings(tensor: Tensor, array: Array) -> None:
    if tensor.dtype == "string" and any("\0" in str(each) for each in array.ravel()):
        raise ValueError(f"input '{tensor.name}' has a string with a NUL in it, at which Triton's backend would cut")


def main(arguments: list[str]) -> int:
    """Run the model on the arrays of an ``.npz`` file and print the outputs' dtypes and shapes."""
    usage = "[TRITON_URL=http://localhost:8000] python infer.py input.npz"
    return run_file(arguments, lambda feeds: Model(Path(__file__).resolve().parent).run(feeds), usage)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
