"""Run the model of this folder on a Qualcomm NPU: named numpy arrays in, named numpy arrays out.

Needs numpy and onnxruntime-qnn (which brings onnxruntime and Qualcomm's libraries), and ``feeds.py`` beside it. From
Python::

    from infer import Model

    model = Model(".")                  # the context binary, on the NPU, or on x86 in QNN's emulator
    model = Model(".", device="cpu")    # the quantised ONNX model, on any CPU
    outputs = model.run({"x": x})

or from a shell, with one array per input in an ``.npz`` file: ``python infer.py input.npz``.

Names, dtypes, shapes and QNN's settings are read from ``bundle.json``. What QNN is given is first compared with the
digests there: it reads a damaged binary without checking. ONNX Runtime's usage reporting is switched off, and nothing
is written anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from packager.feeds import Array, checked, read_description, run_file

CONTEXT, BINARY, FALLBACK = "model.onnx", "model_qnn.bin", "model.qdq.onnx"
PROVIDER = "QNNExecutionProvider"
EMULATED = "QNN's HTP emulator ran the context binary on a CPU; no NPU was found"
FATAL = 4
"""Log level of ONNX Runtime: what goes wrong is raised, and need not be printed too."""


class Model:
    """The loaded model. One instance may be shared by threads: runs are serialised.

    Args:
        folder: the bundle.
        device: ``npu`` for the context binary, ``cpu`` for the fallback model.

    Attributes:
        info: ``name``, ``version`` and ``device`` of what runs the model; ``level``, which is ``emulated`` where there
            is no NPU, with the ``reason``; and QNN's settings.

    Raises:
        ValueError: the folder is no whole bundle, or a file of it was changed.
        RuntimeError: the runtime can't load the model.
    """

    def __init__(self, folder: str | Path, device: str = "npu") -> None:
        folder = Path(folder)
        if device not in ("npu", "cpu"):
            raise ValueError(f"device '{device}' is unknown; choose npu or cpu")
        description = read_description(folder)
        self.inputs, self.outputs = description.inputs, description.outputs
        check_whole(folder, (CONTEXT, BINARY) if device == "npu" else (FALLBACK,))
        self._lock = threading.Lock()
        runtime = load_runtime()
        options = runtime.SessionOptions()
        options.log_severity_level = FATAL
        self.info = {"name": "ONNX Runtime", "version": str(runtime.__version__), "device": "CPU"}
        self.info |= {"level": "runtime", "reason": ""}
        if device == "npu":
            self._add_npu(runtime, options, description.options)
        else:
            # Products of two bytes would saturate on x86 CPUs without VNNI.
            options.add_session_config_entry("session.x64quantprecision", "1")
        file = folder / (CONTEXT if device == "npu" else FALLBACK)
        providers = None if device == "npu" else ["CPUExecutionProvider"]
        try:
            self._session = runtime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:  # ONNX Runtime's exception types are not public
            raise RuntimeError(f"{file.name}: {one_line(error)}") from error

    def _add_npu(self, runtime: ModuleType, options: Any, settings: Mapping[str, Any]) -> None:  # noqa: ANN401
        import onnxruntime_qnn

        device = find_device(runtime)
        chosen = provider_options(settings, onnxruntime_qnn.get_qnn_htp_path())
        options.add_provider_for_devices([device], chosen)
        if not settings.get("allow_fallback", False):
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        real = device.device.type == runtime.OrtHardwareDeviceType.NPU
        self.info |= {
            "name": "QNN",
            "version": f"{onnxruntime_qnn.__version__} (ONNX Runtime {runtime.__version__})",
            "device": f"HTP v{chosen['htp_arch']}" + ("" if real else " emulator"),
            "level": "runtime" if real else "emulated",
            "reason": "" if real else EMULATED,
            "soc_model": chosen.get("soc_model", "any"),
        }

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: one array per input, by exact name, of the input's dtype and shape.

        Returns:
            One new array per output, by exact name.

        Raises:
            ValueError: a name, dtype or shape is not the model's.
            RuntimeError: the runtime failed.
        """
        arrays = checked(self.inputs, feeds)
        names = [tensor.name for tensor in self.outputs]
        with self._lock:
            try:
                values = self._session.run(names, arrays)
            except Exception as error:  # ONNX Runtime's exception types are not public
                raise RuntimeError(f"{self.info['name']} failed: {one_line(error)}") from error
        return dict(zip(names, values, strict=True))


def load_runtime() -> ModuleType:
    """Import onnxruntime without its usage reporting, which must be off before the library is loaded."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    module: ModuleType = onnxruntime
    return module


def find_device(runtime: ModuleType) -> Any:  # noqa: ANN401 - a type of onnxruntime's
    """QNN's device on this machine: the NPU where there is one.

    Raises:
        RuntimeError: QNN finds none.
    """
    import onnxruntime_qnn

    def listed() -> list[Any]:
        return [device for device in runtime.get_ep_devices() if device.ep_name == PROVIDER]

    if not listed():  # a library may be registered once in a process
        try:
            runtime.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
        except Exception as error:  # ONNX Runtime's exception types are not public
            raise RuntimeError(f"QNN's execution provider doesn't load: {one_line(error)}") from error
    kinds = (runtime.OrtHardwareDeviceType.NPU, runtime.OrtHardwareDeviceType.CPU)
    found = [device for kind in kinds for device in listed() if device.device.type == kind]
    if not found:
        raise RuntimeError("QNN finds no device it could use on this machine")
    return found[0]


def provider_options(settings: Mapping[str, Any], backend: str) -> dict[str, str]:
    """QNN's options for what the bundle was built with.

    Args:
        settings: the target's options, as ``bundle.json`` has them.
        backend: path of QNN's HTP library.
    """
    options = {
        "backend_path": backend,
        "htp_arch": str(settings["htp_arch"]),
        "htp_performance_mode": str(settings.get("performance", "default")),
        # Or the first and last nodes, which quantise inputs and dequantise outputs, would run on the CPU.
        "offload_graph_io_quantization": "0",
    }
    if settings.get("soc_model") is not None:
        options["soc_model"] = str(settings["soc_model"])
    return options


def check_whole(folder: Path, names: tuple[str, ...]) -> None:
    """Compare files with the digests of ``bundle.json``.

    Raises:
        ValueError: one is missing, was changed, or isn't part of the bundle.
    """
    sealed = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))["files"]
    digests = {entry["path"]: entry["sha256"] for entry in sealed}
    for name in names:
        file = folder / name
        if name not in digests or not file.is_file():
            raise ValueError(f"{file} is missing; keep the files of the bundle together")
        if hashlib.sha256(file.read_bytes()).hexdigest() != digests[name]:
            raise ValueError(f"{file} was changed since it was sealed; unpack the bundle again")


def one_line(error: Exception) -> str:
    """An exception's message, short and on one line."""
    return " ".join(str(error).split())[:600]


def main(arguments: list[str]) -> int:
    """Run the model beside this file on the arrays of an ``.npz`` file and print the outputs' dtypes and shapes."""
    return run_file(
        arguments, lambda feeds: Model(Path(__file__).resolve().parent).run(feeds), "python infer.py input.npz"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
