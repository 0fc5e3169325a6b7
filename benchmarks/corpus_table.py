"""Build every real model for every kind at every precision and write what came of it as a table: `make corpus`.

    python benchmarks/corpus_table.py docs/corpus.md

Each ends as a verified bundle or as a refusal that names the node and the reason. Anything else (a fault of
packager's own, a bundle that fails verification without a diagnosis) makes the exit status 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from pathlib import Path

import packager
from packager.precisions import AUTO
from packager.report import human_bytes
from packager.results import TargetResult
from packager.room import kinds

ROOT = Path(__file__).parents[1]
MODELS = ROOT / ".corpus"
PINS = ROOT / "examples" / "models.toml"
HEAD = """# Real models

What packager makes of real trained models that ship inside registry packages (`examples/models.toml` pins them).
Written by `make corpus`; every "passed" was executed in the kind's runtime and compared with ONNX Runtime, on inputs
synthesised from a seed. "Precision cost" is the transformed model against the original, both in ONNX Runtime, where a
shared transform made it; "parity" is the bundle against the original. Sizes are of all the bundle's files.

Nodes that a precision can't bear are looked for and kept in float; the outcome names them. A model that drifts past
the policy whatever is kept is refused, and so is int8 that would leave more than a third of the weights in float: fp16
is smaller then.

| model | kind | precision | outcome | level | parity | cosine | precision cost | size |
|---|---|---|---|---|---|---|---|---|
"""
MAX_KEPT = 160
"""Characters of what is said of nodes kept in float."""
MANIFEST = """[model]
path = {path}
{targets}"""
TARGET = """[targets.{kind}-{precision}]
kind = "{kind}"
precision = "{precision}"
"""


def manifest(model: Path) -> str:
    """A target for every kind and precision."""
    pairs = [(kind, precision) for kind, room in kinds().items() for precision in room.facts.choices]
    targets = "".join(TARGET.format(kind=kind, precision=precision) for kind, precision in pairs)
    return MANIFEST.format(path=json.dumps(str(model)), targets=targets)


def row(name: str, result: TargetResult) -> str:
    """One line of the table."""
    verdict = result.verdict
    precision = result.target.removeprefix(f"{result.kind}-")
    words = "passed" if result.status == "passed" else f"{result.status}: {reason(result)}"
    if precision == AUTO and result.status == "passed":
        words = f"passed as {result.precision}"
    kept = "; ".join(note for note in result.notes if note.startswith("kept in f"))
    words += f" ({kept if len(kept) <= MAX_KEPT else kept[:MAX_KEPT] + ' ...'})" if kept else ""
    cells = (
        name,
        result.kind,
        precision,
        words.replace("|", "\\|"),
        verdict.level if verdict else "none",
        number(verdict.max_abs if verdict else None),
        "-" if verdict is None or verdict.cosine is None else f"{verdict.cosine:.5f}",
        number(verdict.transform.max_abs if verdict and verdict.transform else None),
        human_bytes(result.bytes),
    )
    return "| " + " | ".join(cells) + " |\n"


def number(value: float | None) -> str:
    """A difference, to two digits."""
    return "-" if value is None else f"max abs {value:.2g}"


def reason(result: TargetResult) -> str:
    """Why there is no bundle: the message's lines, at most four."""
    lines = [line.strip() for line in (*result.message.splitlines(), *result.diagnosis) if line.strip()]
    more = [f"and {len(lines) - 4} more"] if len(lines) > 4 else []
    return "; ".join(lines[:4] + more).replace(":;", ":")


def main(path: Path) -> int:
    """Build all and write the table."""
    pins = tomllib.loads(PINS.read_text(encoding="utf-8"))
    text, bad = HEAD, 0
    with tempfile.TemporaryDirectory() as folder:
        for name, pin in pins.items():
            model, written = MODELS / f"{name}.onnx", Path(folder) / f"{name}.toml"
            written.write_text(manifest(model), encoding="utf-8")
            report = packager.build(manifest=written, out=Path(folder) / name)
            size = human_bytes(model.stat().st_size)
            text += f"| **{name}** | | | {pin['why']} | | | | | {size} |\n"
            for result in report.targets:
                text += row(name, result)
                unexplained = result.status == "failed" and not (result.diagnosis or result.precision != "fp32")
                bad += result.exit_code == 1 or unexplained
                print(f"{name}: {result.kind}: {result.status}", file=sys.stderr)
    path.write_text(text, encoding="utf-8", newline="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
