"""A stand-in for Triton's onnxruntime backend, hosted by Triton's own python backend.

The server of the runtime kit has no ``libtriton_onnxruntime.so``. Triton also serves *python-based backends*: where a
backend folder ``onnxruntime/`` holds this file as ``model.py``, every model of that backend is loaded by it, from an
unmodified repository, in the real core. The file runs inside the core's stub process, where only its own folder, the
kit and the site-packages of packager's environment can be imported.

What it accepts and refuses, and the order and wording of the reasons, follow the C++ backend of release 24.10
(``ModelInstanceState::ValidateInputs`` and ``ValidateOutputs``, ``CompareDimsSupported``): names, dtypes, the number
of inputs, dims exact for outputs and at least compatible for inputs, the first dim free where requests are batched,
scalars as ``[1]``. Requests that the core hands over together are concatenated and run once, as the C++ backend does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # of the server, present only in its stub

DTYPES = {
    "tensor(bool)": "TYPE_BOOL", "tensor(uint8)": "TYPE_UINT8", "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32", "tensor(uint64)": "TYPE_UINT64", "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16", "tensor(int32)": "TYPE_INT32", "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16", "tensor(float)": "TYPE_FP32", "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}  # fmt: skip
"""ONNX Runtime's types to those of a model configuration; bfloat16 has none in this release."""


LARGE_BYTES = 1 << 29
"""A version's folder larger than this is loaded for little memory rather than for speed, its weights left in their
files: verifying must not need a server's machine. The arithmetic is the same, without the optimiser's fusions."""


class TritonPythonModel:
    """One instance of one version of a model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Create the session and hold the configuration against it.

        Raises:
            TritonModelException: the model doesn't load, or the configuration isn't the model's.
        """
        self._config: dict[str, Any] = json.loads(args["model_config"])
        self._name: str = args["model_name"]
        self._batching: bool = self._config["max_batch_size"] > 0
        file = self._config.get("default_model_filename") or "model.onnx"
        path = Path(args["model_repository"]) / args["model_version"] / file
        if not path.exists():
            raise pb.TritonModelException(f"unable to find '{path}' for model instance '{self._name}'")
        tuning = self._config.get("optimization", {})
        self._check_accelerators(tuning.get("execution_accelerators", {}))
        self._session = session(str(path), tuning.get("graph", {}).get("level", 0))
        self._inputs = {each.name: (each.type, dims(each.shape)) for each in self._session.get_inputs()}
        self._outputs = {each.name: (each.type, dims(each.shape)) for each in self._session.get_outputs()}
        self._check_inputs()
        self._check_outputs()
        self._wanted: list[str] = [each["name"] for each in self._config["output"]]

    def _check_accelerators(self, chosen: dict[str, Any]) -> None:
        """Those of a GPU are looked at for instances on one only, and there are none here."""
        for each in chosen.get("cpu_execution_accelerator", []):
            if each["name"] != "openvino":
                raise pb.TritonModelException(f"unknown Execution Accelerator '{each['name']}' is requested")

    def _check_inputs(self) -> None:
        given, found = self._config["input"], self._inputs
        if len(found) != len(given):
            self._refuse(f"configuration expects {len(given)} inputs, model provides {len(found)}")
        for each in given:
            if each.get("optional") and self._batching:
                self._refuse(f"optional input '{each['name']}' is not supported for models that support batching")
            self._check(each, found, "input", exact=False)

    def _check_outputs(self) -> None:
        for each in self._config["output"]:
            self._check(each, self._outputs, "output", exact=True)

    def _check(self, given: dict[str, Any], found: dict[str, Any], side: str, exact: bool) -> None:
        name = given["name"]
        if name not in found:
            allowed = ", ".join(sorted(found))
            self._refuse(f"unexpected inference {side} '{name}', allowed {side}s are: {allowed}")
        onnx_type, model_dims = found[name]
        if given["data_type"] not in DTYPES.values():
            self._refuse(f"unsupported datatype {given['data_type']} for {side} '{name}'")
        if DTYPES.get(onnx_type) != given["data_type"]:
            provided = DTYPES.get(onnx_type, onnx_type)
            expects = f"configuration expects datatype {given['data_type']} for {side} '{name}'"
            self._refuse(f"{expects}, model provides {provided}")
        reshape = given.get("reshape")
        wanted = [int(dim) for dim in (reshape["shape"] if reshape else given["dims"])]
        if not model_dims:
            if any(dim != 1 for dim in wanted):
                scalar = f"scalar tensor '{name}', should only provide 1 in the model configuration when the model"
                self._refuse(f"{scalar} doesn't support batching. Model configuration provided: {text(wanted)}.")
            return
        self._compare(name, model_dims, wanted, exact)

    def _compare(self, name: str, model_dims: list[int], wanted: list[int], exact: bool) -> None:
        full = [-1, *wanted] if self._batching else wanted
        if self._batching and model_dims[0] != -1:
            raise pb.TritonModelException(
                f"model '{self._name}', tensor '{name}': for the model to support batching the shape should have at "
                f"least 1 dimension and the first dimension must be -1; but shape expected by the model is "
                f"{text(model_dims)}"
            )
        same = len(model_dims) == len(full) and all(
            one == other or (one == -1 and not exact) for one, other in zip(model_dims, full, strict=True)
        )
        if not same:
            how = " (an initial batch dimension because max_batch_size > 0)" if self._batching else ""
            raise pb.TritonModelException(
                f"model '{self._name}', tensor '{name}': the model expects {len(model_dims)} dimensions (shape "
                f"{text(model_dims)}) but the model configuration specifies {len(full)} dimensions{how} (shape "
                f"{text(full)})"
            )

    def _refuse(self, reason: str) -> None:
        raise pb.TritonModelException(f"unable to load model '{self._name}', {reason}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the requests the core handed over together as one batch, or one by one where nothing is batched."""
        if not self._batching:
            return [self._answer([request])[0] for request in requests]
        return self._answer(requests)

    def _answer(self, requests: list[Any]) -> list[Any]:
        try:
            feeds, sizes = self._feeds(requests)
            outputs = dict(zip(self._wanted, self._session.run(self._wanted, feeds), strict=True))
            parts = self._parts(outputs, sizes) if self._batching else [outputs]
        except Exception as error:  # noqa: BLE001 - whatever ONNX Runtime raises is the answer to these requests
            failed = pb.InferenceResponse(error=pb.TritonError(f"onnx runtime error: {error}"))
            return [failed for _ in requests]
        return [self._response(request, part) for request, part in zip(requests, parts, strict=True)]

    def _feeds(self, requests: list[Any]) -> tuple[dict[str, Any], list[int]]:
        given = [{each.name(): each.as_numpy() for each in request.inputs()} for request in requests]
        feeds = {}
        for name in given[0]:
            arrays = [each[name] for each in given]
            array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
            onnx_type, model_dims = self._inputs[name]
            if onnx_type == "tensor(string)":
                array = np.array([each.decode("utf-8") for each in array.ravel()], object).reshape(array.shape)
            feeds[name] = array if model_dims else array.reshape(())
        first = next(iter(given[0]), None)
        return feeds, [len(each[first]) if self._batching else 1 for each in given]

    def _parts(self, outputs: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
        total = sum(sizes)
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != total:
                raise ValueError(
                    f"output '{name}' has shape {list(array.shape)}, which doesn't cover a batch of {total}"
                )
        ends = np.cumsum(sizes)
        return [
            {name: array[end - size : end] for name, array in outputs.items()}
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _response(self, request: Any, outputs: dict[str, Any]) -> Any:  # noqa: ANN401 - of the server
        asked = set(request.requested_output_names())
        tensors = []
        for name, found in outputs.items():
            if name not in asked:
                continue
            array = found.reshape(found.shape or (1,))
            if self._outputs[name][0] == "tensor(string)":
                flat = [str(each).encode("utf-8") for each in array.ravel()]
                array = np.array(flat, object).reshape(array.shape)
            tensors.append(pb.Tensor(name, np.ascontiguousarray(array)))
        return pb.InferenceResponse(output_tensors=tensors)


def session(path: str, level: int) -> Any:  # noqa: ANN401 - of ONNX Runtime
    """A session of ONNX Runtime, on CPU and quiet; ``level`` is a configuration's ``optimization.graph.level``.

    Raises:
        TritonModelException: it can't load the model.
    """
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    chosen = {-1: levels.ORT_ENABLE_BASIC, 1: levels.ORT_ENABLE_EXTENDED, 2: levels.ORT_DISABLE_ALL}
    options.graph_optimization_level = chosen.get(level, levels.ORT_ENABLE_ALL)
    if sum(file.stat().st_size for file in Path(path).parent.iterdir()) > LARGE_BYTES:
        # Folding would widen every half-precision weight at once, and packing copy it again. By priority each Cast runs
        # when it is needed, and without an arena its memory goes back at once.
        options.graph_optimization_level = levels.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise pb.TritonModelException(f"onnx runtime error: {' '.join(str(error).split())}") from error


def dims(shape: list[Any] | None) -> list[int]:
    """Dims as the C++ backend sees them: -1 for a free one, none for a scalar."""
    return [dim if isinstance(dim, int) else -1 for dim in shape or []]


def text(shape: list[int]) -> str:
    """Dims as Triton prints them."""
    return "[" + ",".join(str(dim) for dim in shape) + "]"
