"""Run the TensorRT engine of this folder: named numpy arrays in, named numpy arrays out.

Needs numpy, ``cuda-bindings`` and the library that ``engine.json`` names in exactly its version, with ``feeds.py``
and ``fit.py`` beside this file. From Python::

    from infer import Model

    model = Model(".")
    outputs = model.run({"x": x})

or from a shell, with one array per input in an ``.npz`` file: ``python infer.py input.npz``.

An engine fits one release of its library, and certain GPUs. Before the engine is read, ``engine.json`` is held
against this machine, and what doesn't fit is told: TensorRT itself may crash on a foreign engine. ``python build.py``
builds one that fits, into ``built/``, which is taken first.

``TENSORRT_THROUGH=onnxruntime`` runs ``model.onnx``, the file the engine was built from, in ONNX Runtime on CPU
instead. Nothing is written, unless ``TENSORRT_RUNTIME_CACHE`` (or ``runtime_cache``) names a file for compiled kernels.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packager.feeds import Array, Tensor, checked, read_description, run_file
from packager.targets.tensorrt.fit import (
    BUILT,
    ENGINE,
    SIDECAR,
    Misfit,
    load_cuda,
    load_library,
    look,
    misfits,
    read_sidecar,
    version_of,
)


class Model:
    """The loaded engine. One instance may be shared by threads: runs are serialised.

    Args:
        folder: the bundle.
        device: number of the CUDA device.
        runtime_cache: a file for the kernels that TensorRT for RTX compiles when an engine first runs: read if it is
            there, written after the first run. ``None`` takes ``TENSORRT_RUNTIME_CACHE`` of the environment, else none.
        through: ``engine`` or ``onnxruntime``; ``None`` takes ``TENSORRT_THROUGH`` of the environment, else ``engine``.
        onnx: the file that ``onnxruntime`` runs; ``None`` takes ``model.onnx``.

    Attributes:
        info: ``name``, ``version``, ``device`` and ``level`` of what runs the model.

    Raises:
        Misfit: the engine doesn't fit this machine.
        ValueError: the folder is no whole bundle.
        RuntimeError: the library can't load an engine that should fit.
    """

    def __init__(
        self,
        folder: str | Path,
        device: int = 0,
        runtime_cache: str | Path | None = None,
        through: str | None = None,
        onnx: str | Path | None = None,
    ) -> None:
        folder = Path(folder)
        self._description = read_description(folder)
        self._lock = threading.Lock()
        through = through or os.environ.get("TENSORRT_THROUGH") or "engine"
        if through not in ("engine", "onnxruntime"):
            raise ValueError(f"through is '{through}': it is engine or onnxruntime")
        cache = runtime_cache or os.environ.get("TENSORRT_RUNTIME_CACHE")
        self._session: _Engine | _Onnx = (
            _Engine(folder, device, None if cache is None else Path(cache))
            if through == "engine"
            else _Onnx(folder, Path(onnx or folder / "model.onnx"))
        )
        self.info = dict(self._session.info)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: one array per input, by exact name, of the input's dtype and shape.

        Returns:
            One new array per output, by exact name.

        Raises:
            ValueError: a name, dtype, rank or size is not the model's, or a size is beyond the engine's profile.
            RuntimeError: TensorRT or CUDA failed.
        """
        arrays = checked(self._description.inputs, feeds)
        with self._lock:
            return self._session.run(arrays, self._description.outputs)


class _Onnx:
    """``model.onnx`` in ONNX Runtime on CPU, without graph optimisation."""

    def __init__(self, folder: Path, file: Path) -> None:
        import onnxruntime as ort

        ort.disable_telemetry_events()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.x64quantprecision", "1")
        try:
            self._session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # it has no bfloat16 on CPU, for one
            raise RuntimeError(f"ONNX Runtime can't run {file.name}: {' '.join(str(error).split())[:500]}") from error
        # Of the engine itself this says nothing: it keeps the level of having been built.
        level = "none" if read_sidecar(folder)["recipe"] else "structural"
        reason = "model.onnx, from which the engine is built, ran instead of it: proxy for that file only"
        self.info = {"name": "ONNX Runtime", "version": ort.__version__, "device": "CPU"}
        self.info |= {"level": level, "reason": reason}

    def run(self, arrays: Mapping[str, Array], outputs: Sequence[Tensor]) -> dict[str, Array]:
        """Run once."""
        names = [tensor.name for tensor in outputs]
        try:
            made = self._session.run(names, dict(arrays))
        except Exception as error:
            raise RuntimeError(f"ONNX Runtime: {' '.join(str(error).split())[:500]}") from error
        return {name: np.asarray(value) for name, value in zip(names, made, strict=True)}


class _Engine:
    """The engine on a CUDA device."""

    def __init__(self, folder: Path, device: int, runtime_cache: Path | None) -> None:
        home = folder / BUILT if (folder / BUILT / SIDECAR).is_file() else folder
        sidecar = read_sidecar(home)
        self._trt, self._cuda = load_library(sidecar["builder"]), load_cuda()
        machine = look(version_of(self._trt), self._cuda, sidecar["builder"], device)
        reasons = misfits(sidecar, machine)
        if reasons:
            raise Misfit(reasons)
        self._device = device
        self._call("cudaSetDevice", device)
        self._engine = self._load(home / ENGINE)
        self._cache_file = runtime_cache
        self._cache: Any = None
        self._context = self._make_context()
        self._profiles = {each["name"]: each["shapes"] for each in sidecar["profiles"]}
        self._names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        (self._stream,) = self._call("cudaStreamCreate")
        self._buffers: dict[str, tuple[int, int]] = {}
        self.info = {
            "name": str(sidecar["library"]),
            "version": machine.version,
            "device": f"CUDA device {device}, compute capability {machine.capability}",
            "level": "runtime",
            "engine": "built on this machine by build.py" if home != folder else "as shipped",
        }

    def _load(self, file: Path) -> Any:  # noqa: ANN401 - of two libraries
        trt = self._trt
        self._logger = _logger(trt)
        self._runtime = trt.Runtime(self._logger)
        data = file.read_bytes()
        validity = getattr(self._runtime, "get_engine_validity", None)
        if validity is not None:  # the library's own look at the header
            found, diagnostics = validity(data[: self._runtime.engine_header_size])
            if found == trt.EngineValidity.INVALID:
                raise Misfit([f"the library says the engine is invalid here (diagnostics {int(diagnostics)})"])
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise RuntimeError(
                "the engine can't be loaded: " + ("; ".join(self._logger.errors) or "no reason is given")
            )
        return engine

    def _make_context(self) -> Any:  # noqa: ANN401
        if not hasattr(self._engine, "create_runtime_config") or self._cache_file is None:
            return self._engine.create_execution_context()
        config = self._engine.create_runtime_config()
        if not hasattr(config, "create_runtime_cache"):  # TensorRT proper compiles nothing when it runs
            return self._engine.create_execution_context()
        self._cache = config.create_runtime_cache()
        if self._cache_file.is_file():
            self._cache.deserialize(self._cache_file.read_bytes())  # one that doesn't fit is passed over by the library
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(config)

    def _keep_cache(self) -> None:
        """Write the runtime cache once, whole."""
        if self._cache is None or self._cache_file is None:
            return
        data, self._cache = bytes(memoryview(self._cache.serialize())), None
        half = self._cache_file.with_name(self._cache_file.name + f".{os.getpid()}")
        half.write_bytes(data)
        half.replace(self._cache_file)

    def run(self, arrays: Mapping[str, Array], outputs: Sequence[Tensor]) -> dict[str, Array]:
        """Run once."""
        self._call("cudaSetDevice", self._device)
        for name, array in arrays.items():
            self._check_range(name, array.shape)
            if name in self._names:  # an input that nothing reads isn't one of the engine's
                self._give(name, array)
        allocators = {tensor.name: _allocator(self._trt, self) for tensor in outputs}
        hosted: dict[str, Array] = {}
        for tensor in outputs:
            if self._engine.is_shape_inference_io(tensor.name):
                hosted[tensor.name] = self._give_host_buffer(tensor)
            else:
                self._context.set_output_allocator(tensor.name, allocators[tensor.name])
        if not self._context.execute_async_v3(self._stream):
            raise RuntimeError("TensorRT failed: " + ("; ".join(self._logger.errors) or "no reason is given"))
        found = {
            tensor.name: self._fetched(tensor, allocators[tensor.name])
            for tensor in outputs
            if tensor.name not in hosted
        }
        self._call("cudaStreamSynchronize", self._stream)
        for name, buffer in hosted.items():
            shape = tuple(self._context.get_tensor_shape(name))
            found[name] = buffer[: int(np.prod(shape))].reshape(shape).copy()
        self._keep_cache()
        return {tensor.name: found[tensor.name] for tensor in outputs}

    def _check_range(self, name: str, shape: tuple[int, ...]) -> None:
        least, _, greatest = self._profiles[name]
        if any(not low <= size <= high for low, size, high in zip(least, shape, greatest, strict=True)):
            raise ValueError(
                f"input '{name}' has shape {list(shape)}, beyond what the engine was built for: "
                f"from {list(least)} to {list(greatest)}"
            )

    def _give(self, name: str, array: Array) -> None:
        if not self._context.set_input_shape(name, tuple(array.shape)):
            raise RuntimeError(f"TensorRT refuses shape {list(array.shape)} for input '{name}'")
        if self._engine.is_shape_inference_io(name):
            self._context.set_tensor_address(name, array.ctypes.data)  # read on the host
            return
        pointer = self.room(name, array.nbytes)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        if array.nbytes:
            self._call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, self._stream)
        self._context.set_tensor_address(name, pointer)

    def _give_host_buffer(self, tensor: Tensor) -> Array:
        """An output that is a shape is written on the host."""
        buffer = np.zeros(max(1, self._context.get_max_output_size(tensor.name)), tensor.dtype)
        self._context.set_tensor_address(tensor.name, buffer.ctypes.data)
        return buffer

    def _fetched(self, tensor: Tensor, made: Any) -> Array:  # noqa: ANN401 - an allocator
        array = np.empty(made.shape, tensor.dtype)
        if array.nbytes:
            kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
            self._call("cudaMemcpyAsync", array.ctypes.data, made.pointer, array.nbytes, kind, self._stream)
        return array

    def room(self, name: str, size: int) -> int:
        """A device buffer of at least that many bytes, kept by name for the next run."""
        pointer, capacity = self._buffers.get(name, (0, 0))
        if capacity < max(1, size):
            if pointer:
                self._call("cudaFree", pointer)
            (pointer,) = self._call("cudaMalloc", max(1, size))
            self._buffers[name] = (int(pointer), max(1, size))
        return int(self._buffers[name][0])

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:  # noqa: ANN401 - as many as CUDA's functions
        status, *found = getattr(self._cuda, name)(*arguments)
        if int(status):
            raise RuntimeError(f"CUDA: {name} failed: {status}")
        return tuple(found)


def _logger(trt: Any) -> Any:  # noqa: ANN401
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:  # noqa: ANN401
            """Called by the library."""
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()


def _allocator(trt: Any, engine: _Engine) -> Any:  # noqa: ANN401
    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Gives an output room when its size is known, which may be while it is computed."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.pointer = 0
            self.shape: tuple[int, ...] = ()

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            """Called by the library; CUDA aligns what it allocates to 256 bytes, more than any tensor needs."""
            self.pointer = engine.room(name, size)
            return self.pointer

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            """The form of older releases."""
            return self.reallocate_output_async(name, memory, size, alignment, 0)

        def notify_shape(self, name: str, shape: Sequence[int]) -> None:
            """Called by the library."""
            self.shape = tuple(shape)

    return Allocator()


def main(arguments: list[str]) -> int:
    """Run the model beside this file on the arrays of an ``.npz`` file and print the outputs' dtypes and shapes."""
    return run_file(
        arguments, lambda feeds: Model(Path(__file__).resolve().parent).run(feeds), "python infer.py input.npz"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
