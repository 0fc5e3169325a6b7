"""Speed, as ratios taken in one run: `make bench`. Nothing here fails a test; machines are noisy, ratios less so.

Each line names what is measured, what it is held against, and the bound that the project aims at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packager.child import QUIET

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".corpus" / "text_encoder.onnx"
PACKAGER = str(Path(sys.executable).with_name("packager"))
ROUNDS = 7

BARE = """
import sys
import numpy as np
import onnxruntime as ort
import openvino as ov

path, out = sys.argv[1:]
ov.save_model(ov.convert_model(path), out, compress_to_fp16=False)
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
ids = np.arange(48, dtype=np.int64).reshape(3, 16)
ones = np.ones_like(ids)
session.run(None, {"input_ids": ids, "attention_mask": ones, "token_type_ids": ones * 0})
"""


def seconds(command: list[str], **variables: str) -> float:
    """Wall time of a command, which must succeed."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **QUIET, **variables})
    return time.perf_counter() - begun


def best(*commands: list[str], **variables: str) -> list[float]:
    """The best time of each command, the commands taken in turn so that noise meets all alike."""
    times = [[seconds(command, **variables) for command in commands] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*times, strict=True)]


def line(what: str, value: float, unit: str, bound: str) -> None:
    """One result."""
    print(f"{what:<72} {value:8.2f} {unit:<2} (aim: {bound})")


def main() -> None:
    """Measure and print."""
    python = sys.executable
    click, version = best([python, "-c", "import click"], [PACKAGER, "--version"])
    line("packager --version / python -c 'import click'", version / click, "x", "2 at most")
    (inspect,) = best([PACKAGER, "inspect", str(MODEL)])
    line("packager inspect, 23 MB text encoder", inspect, "s", "1.5 s at most")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "bare.py"
        script.write_text(BARE)
        build = [PACKAGER, "build", str(MODEL), "-t", "openvino", "-o", str(folder / "dist")]
        bare, ours = best(
            [python, str(script), str(MODEL), str(folder / "bare.xml")], [*build, "--no-verify", "--no-cache"]
        )
        line("build --no-verify --no-cache / bare convert, save, reference run", ours / bare, "x", "1.3 at most")
        (whole,) = best([*build, "--no-cache"])
        line("the same build, verified and archived / bare script", whole / bare, "x", "for information")
        cache = str(folder / "cache")
        seconds(build, PACKAGER_CACHE_DIR=cache)
        (cached,) = best(build, PACKAGER_CACHE_DIR=cache)
        line("a fully cached rebuild", cached, "s", "1 s at most")


if __name__ == "__main__":
    main()
