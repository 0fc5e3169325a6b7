"""ONNX Runtime optimises a graph ahead of time and saves it, in a process that makes the same bytes each time.

ONNX Runtime writes its own format in the order of hash tables that are seeded by where the process was loaded. So it
runs in a child whose addresses aren't randomised. Only Linux can do that, and a container may forbid it; there, files
of the same model in ONNX Runtime's own format differ from build to build in their order, and in nothing else.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from packager.errors import BuildError
from packager.model import open_model
from packager.targets.cpu import infer

LAYOUT = "NchwcTransformer"
"""The one graph optimisation of the CPU provider whose result depends on the CPU: the block of its layout."""

NO_RANDOMISATION = 0x0040000
"""``ADDR_NO_RANDOMIZE`` of personality(2)."""


def optimise(source: Path, target: Path, *, portable: bool) -> None:
    """Save what ONNX Runtime makes of a model, in the format of ``target``'s suffix.

    Args:
        source: the model, only read.
        target: ``model.onnx`` or ``model.ort``, which mustn't exist.
        portable: leave out what depends on this CPU.

    Raises:
        BuildError: ONNX Runtime refuses the model.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "packager.targets.cpu.optimising", source, target, "1" if portable else "0"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        preexec_fn=_fixed_addresses(),
    )  # fmt: skip
    if done.returncode or not target.is_file():
        told = done.stdout.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise BuildError(f"ONNX Runtime can't optimise the model: {told[0][:600]}", "build without optimize_for")


def _fixed_addresses() -> Callable[[], object] | None:
    if sys.platform != "linux":
        return None
    personality = ctypes.CDLL(None).personality
    return lambda: personality(NO_RANDOMISATION)


def main(source: Path, target: Path, portable: bool) -> None:
    """Child side: load, optimise, save."""
    import onnxruntime as ort

    model = open_model(source)
    options = infer.session_options({"quantized": model.is_quantized}, 1, source)
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT" if target.suffix == ".ort" else "ONNX")
    if model.external and target.suffix == ".onnx":
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", f"{target.stem}.weights")
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "1024")
    left_out = [LAYOUT] if portable else []
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"], disabled_optimizers=left_out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
