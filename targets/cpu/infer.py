"""Run the model of this folder on the CPU by ONNX Runtime: named numpy arrays in, named numpy arrays out.

Needs numpy and onnxruntime, and ``feeds.py`` beside it: no server. From Python::

    from infer import Model

    model = Model(".")
    outputs = model.run({"x": x})

or from a shell, with one array per input in an ``.npz`` file: ``python infer.py input.npz``.

Where ``url`` or the environment variable ``SERVICE_URL`` names a running service (``http://host:8080`` or
``grpc://host:8081``), the same calls ask that instead, so ``SERVICE_URL=... python verify.py`` checks what is deployed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# ONNX Runtime's wheels report usage unless told not to before they are loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from packager.feeds import Array, checked, read_description, run_file

FILES = ("model.onnx", "model.ort")
LEVELS = {
    "x86-64-v2": {"sse4_2"},
    "x86-64-v3": {"avx2", "fma", "f16c"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Levels of the x86-64 psABI by what tells them apart, as Linux spells CPU features."""


class Session:
    """The model in this process. One instance may be shared by threads.

    Args:
        folder: the bundle.
        threads: threads of one run; 0 takes one for each physical core, ``None`` what the bundle says.

    Attributes:
        name: the model's name.
        version: its version.
        inputs: the signature's inputs.
        outputs: its outputs.
        info: ``name``, ``version`` and ``device`` of what runs the model.
        settings: those of ``service.json``.

    Raises:
        ValueError: the folder is no whole bundle, or the model isn't the one that ``bundle.json`` describes.
        RuntimeError: ONNX Runtime can't load the model, or it was optimised for CPUs that this one isn't.
    """

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        import onnxruntime as ort

        described = read_description(folder)
        self.name, self.version = described.name, described.version
        self.inputs, self.outputs = described.inputs, described.outputs
        self.settings = read_settings(folder)
        file = next((Path(folder) / name for name in FILES if (Path(folder) / name).is_file()), None)
        if file is None:
            raise ValueError(f"{folder} has neither {' nor '.join(FILES)}; keep the files of the bundle together")
        check_level(str(self.settings.get("optimize_for", "none")))
        count = int(self.settings.get("threads", 0)) if threads is None else threads
        try:
            self._session = ort.InferenceSession(
                str(file), session_options(self.settings, count, file), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ORT's exception types are not public
            raise RuntimeError(f"ONNX Runtime can't load {file.name}: {_one_line(error)}") from error
        for side, tensors, found in (
            ("inputs", self.inputs, self._session.get_inputs()),
            ("outputs", self.outputs, self._session.get_outputs()),
        ):
            names = [tensor.name for tensor in tensors]
            if sorted(names) != sorted(each.name for each in found):
                raise ValueError(f"{file.name} has the {side} {[each.name for each in found]}, bundle.json has {names}")
        self._names = [tensor.name for tensor in self.outputs]
        self.info = {"name": "ONNX Runtime", "version": str(ort.__version__), "device": "CPU"}

    def check(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays as they will be run.

        Raises:
            ValueError: a name, dtype, rank or size is not the model's.
        """
        made: dict[str, Array] = checked(self.inputs, feeds)
        return made

    def run_checked(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run arrays that :meth:`check` gave.

        Raises:
            RuntimeError: ONNX Runtime can't; the message is its own.
        """
        try:
            values = self._session.run(self._names, dict(arrays))
        except MemoryError:
            raise
        except Exception as error:  # ORT's exception types are not public
            raise RuntimeError(_one_line(error)) from error
        return dict(zip(self._names, values, strict=True))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: one array per input, by exact name, of the input's dtype and shape; strings as object arrays.

        Returns:
            One new array per output, by exact name.

        Raises:
            ValueError: a name, dtype, rank or size is not the model's.
            RuntimeError: ONNX Runtime can't run these; the message is its own.
        """
        return self.run_checked(self.check(feeds))

    def close(self) -> None:
        """Nothing to do: the session goes with the object."""


class Model:
    """The model, in this process or behind a service's address.

    Args:
        folder: the bundle.
        url: a running service of this bundle; ``None`` takes ``SERVICE_URL``, and without it nobody is asked.

    Attributes:
        info: ``name``, ``version`` and ``device`` of what runs the model.

    Raises:
        ValueError: the folder is no whole bundle, or the service serves another model.
        RuntimeError: the model can't be loaded here, or the service can't be reached.
    """

    def __init__(self, folder: str | Path, url: str | None = None) -> None:
        address = url or os.environ.get("SERVICE_URL", "")
        self._runs: Any
        if address:
            from packager.targets.cpu.client import Client

            self._runs = Client(folder, address)
        else:
            self._runs = Session(folder)
        self.info: dict[str, str] = self._runs.info

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once: see :meth:`Session.run`."""
        outputs: dict[str, Array] = self._runs.run(feeds)
        return outputs

    def close(self) -> None:
        """Let go."""
        self._runs.close()


def read_settings(folder: str | Path) -> dict[str, Any]:
    """What the bundle says of running and serving its model.

    Raises:
        ValueError: ``service.json`` is missing or malformed.
    """
    file = Path(folder) / "service.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read: {error}; keep the files of the bundle together") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is malformed; unpack the bundle again")
    return settings


def session_options(settings: Mapping[str, Any], threads: int, file: Path) -> Any:  # noqa: ANN401 - of ONNX Runtime
    """ONNX Runtime's options for a bundle's model; why each is set is in the bundle's README."""
    import onnxruntime as ort

    ort.disable_telemetry_events()
    made = ort.SessionOptions()
    made.log_severity_level = 3
    made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    made.intra_op_num_threads = threads
    made.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    made.enable_mem_pattern = bool(settings.get("memory_pattern", True))
    made.enable_cpu_mem_arena = bool(settings.get("memory_arena", True))
    made.add_session_config_entry("session.intra_op.allow_spinning", "1" if settings.get("spinning", True) else "0")
    if settings.get("quantized", False):
        made.add_session_config_entry("session.x64quantprecision", "1")
    if file.suffix == ".ort":
        made.add_session_config_entry("session.load_model_format", "ORT")
    return made


def check_level(wanted: str) -> None:
    """Refuse a CPU below the level that a model was optimised for.

    Raises:
        RuntimeError: it is below, or can't be told.
    """
    if wanted not in LEVELS:
        return
    lacking = sorted({feature for level in _up_to(wanted) for feature in LEVELS[level]} - cpu_features())
    if lacking:
        told = f"this CPU ({platform.machine()}) lacks {', '.join(lacking)}"
        raise RuntimeError(f"the model was optimised for {wanted}, and {told}; build it with optimize_for = 'portable'")


def cpu_level() -> str:
    """The highest level of this CPU; empty where it is none of them, or can't be told."""
    features = cpu_features()
    reached = [level for level in LEVELS if all(LEVELS[below] <= features for below in _up_to(level))]
    return reached[-1] if reached else ""


def cpu_features() -> set[str]:
    """What Linux says of the first CPU; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")), set())


def _up_to(level: str) -> list[str]:
    names = list(LEVELS)
    return names[: names.index(level) + 1]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


def main(arguments: list[str]) -> int:
    """Run the model on the arrays of an ``.npz`` file and print the outputs' dtypes and shapes."""
    usage = "[SERVICE_URL=http://localhost:8080] python infer.py input.npz"
    status: int = run_file(arguments, lambda feeds: Model(Path(__file__).resolve().parent).run(feeds), usage)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
