"""Build every real model for a kind and write what came of it as a Markdown table: `make corpus`.

    python benchmarks/corpus_table.py docs/corpus.md

Each model ends as a verified bundle or as a refusal that names the node and the reason. Anything else (a fault of
packager's own, a bundle that fails verification without a diagnosis) makes the exit status 1.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from pathlib import Path

import packager
from packager.results import TargetResult
from packager.room import kinds

ROOT = Path(__file__).parents[1]
MODELS = ROOT / ".corpus"
PINS = ROOT / "examples" / "models.toml"
HEAD = """# Real models

What packager makes of real trained models that ship inside registry packages (`examples/models.toml` pins them).
Written by `make corpus`; every "passed" was executed in the kind's runtime and compared with ONNX Runtime.

| model | covers | kind | outcome | level | parity | judged as |
|---|---|---|---|---|---|---|
"""


def row(name: str, covers: str, result: TargetResult) -> str:
    """One line of the table."""
    verdict = result.verdict
    level = verdict.level if verdict else "none"
    parity = f"max abs {verdict.max_abs:.2g}" if verdict and verdict.max_abs is not None else "-"
    policy = f"{verdict.policy} for {verdict.precision}" if verdict else "-"
    words = "passed" if result.status == "passed" else f"{result.status}: {reason(result)}"
    cells = (name, covers, result.kind, words.replace("|", "\\|"), level, parity, policy)
    return "| " + " | ".join(cells) + " |\n"


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
            report = packager.build(MODELS / f"{name}.onnx", targets=list(kinds()), out=Path(folder) / name)
            for result in report.targets:
                text += row(name, pin["why"], result)
                unexplained = result.status == "failed" and not result.diagnosis
                bad += result.exit_code == 1 or unexplained
                print(f"{name}: {result.kind}: {result.status}", file=sys.stderr)
    path.write_text(text, encoding="utf-8", newline="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
