"""Run the OpenVINO model of this folder: named numpy arrays in, named numpy arrays out.

Needs numpy and openvino, and ``feeds.py`` beside it. From Python::

    from infer import Model

    model = Model(".")
    outputs = model.run({"x": x})

or from a shell, with one array per input in an ``.npz`` file: ``python infer.py input.npz``.

The signature (exact names, dtypes and shapes) and the inference precision are read from ``bundle.json``, which lies
beside ``model.xml`` and ``model.bin``. OpenVINO's usage reporting is switched off, and nothing is written anywhere.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from packager.feeds import Array, Tensor, checked, read_description, run_file

PRECISIONS = ("f32", "bf16", "f16")
"""Values of OpenVINO's ``INFERENCE_PRECISION_HINT`` that are offered here."""

GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"

ELEMENT_TYPES = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "int16": "i16",
    "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "bool": "boolean",
}  # fmt: skip
"""dtype names of ``bundle.json`` to OpenVINO's element types."""

INT32 = np.iinfo(np.int32)
FLOAT32 = np.finfo(np.float32)


def load_openvino() -> ModuleType:
    """Import openvino without its usage reporting.

    ``import openvino`` reports the import to a web service when the package ``openvino_telemetry`` is there and the
    user has not opted out. OpenVINO falls back to a stub that reports nothing when that package can't be imported, so
    it is hidden from this process first. No opt-out file is written. A process that imported openvino earlier is left
    as it is.
    """
    if "openvino" not in sys.modules:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # the import system's own "not found"
    import openvino

    module: ModuleType = openvino
    return module


class Model:
    """The compiled model. One instance may be shared by threads: runs are serialised.

    Args:
        folder: the bundle: ``model.xml``, ``model.bin`` and ``bundle.json``.
        device: an OpenVINO device, ``CPU``, ``GPU``, ``NPU``, ...
        inference_precision: ``f32``, ``bf16`` or ``f16``; ``None`` takes what the bundle was verified with. Without
            it OpenVINO picks bf16 by itself on CPUs with AMX, and outputs differ by about 1e-2.

    Attributes:
        info: ``name``, ``version``, ``device``, ``inference_precision`` and ``dynamic_quantization`` (``on`` or
            ``off``) of what runs the model.

    Raises:
        ValueError: the folder is no whole bundle, or names and dtypes of model and ``bundle.json`` differ.
        RuntimeError: OpenVINO can't load the model on that device.
    """

    def __init__(self, folder: str | Path, device: str = "CPU", inference_precision: str | None = None) -> None:
        folder = Path(folder)
        description = read_description(folder)
        precision = inference_precision or description.options.get("inference_precision", "f32")
        quantised = bool(description.options.get("dynamic_quantization", False))
        if precision not in PRECISIONS:
            raise ValueError(f"inference precision '{precision}' is unknown; choose one of {', '.join(PRECISIONS)}")
        for name in ("model.xml", "model.bin"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name} is missing; keep the files of the bundle together")
        self.inputs, self.outputs = description.inputs, description.outputs
        self._openvino = load_openvino()
        core = self._openvino.Core()
        model = core.read_model(folder / "model.xml", folder / "model.bin")
        config: dict[str, object] = {"INFERENCE_PRECISION_HINT": precision}
        # Where weights are int8, OpenVINO quantises activations too, unless the group size is 0.
        if not quantised and GROUP_SIZE in core.get_property(device, "SUPPORTED_PROPERTIES"):
            config[GROUP_SIZE] = 0
        self._compiled = core.compile_model(model, device, config)
        self._inputs = [self._port(tensor, "input") for tensor in self.inputs]
        self._outputs = [self._port(tensor, "output") for tensor in self.outputs]
        self._request = self._compiled.create_infer_request()
        self._lock = threading.Lock()
        used = self._compiled.get_property("INFERENCE_PRECISION_HINT")
        self.info = {
            "name": "OpenVINO",
            "version": str(self._openvino.__version__),
            "device": device,
            "inference_precision": used.to_string() if hasattr(used, "to_string") else str(used),
            "dynamic_quantization": "on" if quantised else "off",
        }

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: one array per input, by exact name, of the input's dtype and shape. bfloat16 arrays are those of
                the package ml_dtypes.

        Returns:
            One new array per output, by exact name.

        Raises:
            ValueError: a name, dtype, rank or size is not the model's, or values are beyond what OpenVINO computes.
        """
        arrays = checked(self.inputs, feeds)
        for tensor in self.inputs:
            _check_range(tensor, arrays[tensor.name])
        with self._lock:
            for port, array in zip(self._inputs, arrays.values(), strict=True):
                self._request.set_tensor(port, self._wrapped(array, port.get_element_type()))
            self._request.infer()
            return {
                tensor.name: self._copied(tensor, self._request.get_tensor(port))
                for tensor, port in zip(self.outputs, self._outputs, strict=True)
            }

    def _port(self, tensor: Tensor, side: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 -- openvino's type
        try:
            port = getattr(self._compiled, side)(tensor.name)
        except RuntimeError as error:
            raise ValueError(f"model.xml has no {side} '{tensor.name}', which bundle.json lists") from error
        found = port.get_element_type().get_type_name()
        if found != ELEMENT_TYPES.get(tensor.dtype):
            raise ValueError(f"{side} '{tensor.name}' is {tensor.dtype} in bundle.json but {found} in model.xml")
        return port

    def _wrapped(self, array: Array, element_type: object):  # type: ignore[no-untyped-def]  # noqa: ANN202
        if array.dtype.name == "bfloat16":  # numpy has no bfloat16 of its own: hand over the bits
            bits = array.view(np.uint16)
            return self._openvino.Tensor(bits, self._openvino.Shape(list(array.shape)), element_type)
        return self._openvino.Tensor(array)

    def _copied(self, tensor: Tensor, result) -> Array:  # type: ignore[no-untyped-def]  # noqa: ANN001
        if tensor.dtype == "bfloat16":
            import ml_dtypes

            bits: Array = np.array(result.data).view(np.uint16)
            return bits.view(ml_dtypes.bfloat16)
        return np.array(result.data)


def _check_range(tensor: Tensor, array: Array) -> None:
    """OpenVINO computes 64-bit integers in 32 bits and float64 in float32 and says nothing: 2**40 becomes 0."""
    if not array.size:
        return
    if tensor.dtype in ("int64", "uint64") and (array.min() < INT32.min or array.max() > INT32.max):
        raise ValueError(
            f"input '{tensor.name}' holds {tensor.dtype} values beyond 32 bits, which OpenVINO would cut; "
            f"keep them between {INT32.min} and {INT32.max}"
        )
    if tensor.dtype == "float64" and bool(np.any(np.abs(array.astype(np.float64)) > FLOAT32.max)):
        raise ValueError(
            f"input '{tensor.name}' holds float64 values beyond float32 (infinity included), which OpenVINO would turn "
            f"into {FLOAT32.max:.4g}"
        )


def main(arguments: list[str]) -> int:
    """Run the model beside this file on the arrays of an ``.npz`` file and print the outputs' dtypes and shapes."""
    return run_file(
        arguments, lambda feeds: Model(Path(__file__).resolve().parent).run(feeds), "python infer.py input.npz"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
