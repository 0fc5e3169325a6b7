"""Quantise, compile and run every real model for the NPU, in QNN's emulator, and write what came of it as a table.

    python benchmarks/npu_table.py docs/npu.md

The table takes the place of what is between the two marks in the page. OCR models get drawn lines of text (those of
`examples/orientation`), the others inputs synthesised from a seed, which say less. Calibration sees the same inputs.
The bound on the largest single error is lifted, so that it is measured and not refused; those on direction (cosine)
and decision (top-1) are the policy's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np

import packager
from packager.report import human_bytes
from packager.results import TargetResult
from packager.room import kind_named
from packager.verdict import Distance

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = """| model | shapes | precision | outcome | fp32 to QDQ | QDQ to NPU | fp32 to NPU | largest error | bundle |
|---|---|---|---|---|---|---|---|---|
"""
TOLERANCE = "[tolerance.int8]\nscaled = 1e9\n"
DYNAMIC = "p2o.DynamicDimension"
MODELS = tomllib.loads((ROOT / "examples" / "models.toml").read_text(encoding="utf-8"))
SHAPES: dict[str, dict[str, int]] = {name: pin["sizes"] for name, pin in MODELS.items()}
"""Sizes that each model is compiled for."""


def lines() -> list[np.ndarray]:
    """Drawn lines of text, float32 [1, 3, 48, 192] in [-1, 1]."""
    folder = ROOT / "examples" / "orientation" / "goldens"
    return [row[None] for file in sorted(folder.glob("*.npz")) for row in np.load(file)["x"]]


def page(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Two lines one above the other, normalised as the detector wants them: float32 [1, 3, 96, 192]."""
    mean = np.array((0.485, 0.456, 0.406), np.float32).reshape(1, 3, 1, 1)
    deviation = np.array((0.229, 0.224, 0.225), np.float32).reshape(1, 3, 1, 1)
    pixels = np.concatenate([top, bottom], axis=2) * 0.5 + 0.5
    return ((pixels - mean) / deviation).astype(np.float32)


def inputs(name: str) -> list[np.ndarray]:
    """Inputs like real ones, where there are any."""
    drawn = lines()
    if name in ("orientation", "ocr_recogniser"):
        return drawn
    return [page(one, other) for one, other in pairwise(drawn)] if name == "ocr_detector" else []


def manifest(name: str, folder: Path) -> Path:
    """A manifest with a target for each precision, and golden cases where there are any."""
    cases, goldens = inputs(name), folder / "goldens"
    goldens.mkdir()
    for number, case in enumerate(cases):
        np.savez(goldens / f"{number}.npz", x=case)
    pins = ", ".join(f"{json.dumps(key)} = {size}" for key, size in SHAPES[name].items())
    text = f"[model]\npath = {json.dumps(str(ROOT / '.corpus' / f'{name}.onnx'))}\n"
    text += f"[golden]\npath = {json.dumps(str(goldens))}\n" if cases else ""
    for precision in kind_named("npu").facts.precisions:
        text += f'[targets.{precision}]\nkind = "npu"\nprecision = "{precision}"\nshapes = {{ {pins} }}\n'
    text += TOLERANCE
    file = folder / "packager.toml"
    file.write_text(text, encoding="utf-8")
    return file


def row(name: str, result: TargetResult) -> str:
    """One line of the table."""
    verdict = result.verdict
    whole = None if verdict is None else Distance(verdict.max_abs, verdict.scaled, verdict.cosine, verdict.top1)
    size = human_bytes(result.bytes) if result.bytes else "-"
    words = "passed" if result.status == "passed" else f"{result.status}: {reason(result)}"
    pins = ", ".join(f"{key.removeprefix(DYNAMIC + '.')} {size}" for key, size in SHAPES[name].items())
    cells = (
        name, pins, result.precision, words.replace("|", "\\|"), cosine(verdict.transform if verdict else None),
        cosine(verdict.target if verdict else None), cosine(whole),
        "-" if whole is None or whole.scaled is None else f"{whole.scaled:.2g}", size,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def cosine(distance: Distance | None) -> str:
    """The worst cosine similarity of any case and output."""
    return "-" if distance is None or distance.cosine is None else f"{distance.cosine:.5f}"


def reason(result: TargetResult) -> str:
    """Why there is no bundle: the message's lines, at most four."""
    found = [line.strip() for line in (*result.message.splitlines(), *result.diagnosis) if line.strip()]
    more = [f"and {len(found) - 4} more"] if len(found) > 4 else []
    return "; ".join(found[:4] + more).replace(":;", ":")


def main(path: Path) -> int:
    """Build all and write the table, as far as it is, after each model; 1 where packager itself is at fault."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text, bad = HEAD, 0
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            written = manifest(name, Path(folder))
            report = packager.build(manifest=written, out=Path(folder) / "dist", jobs=1)
        for result in report.targets:
            text += row(name, result)
            bad += result.exit_code == 1
            print(f"{name}: {result.precision}: {result.status}", file=sys.stderr)
        path.write_text(before + BEGIN + text + END + after, encoding="utf-8", newline="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
