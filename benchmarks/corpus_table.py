"""Build every real model for every kind at every precision and write what came of it as a page: `make corpus`.

    python benchmarks/corpus_table.py docs/corpus.md [--kinds a,b] [MODEL ...]

The page is written after each model, and the sections of models that aren't named stay as they are, as do the rows of
kinds that aren't. Each build ends as a verified bundle or as a refusal that names the node and the reason. Anything
else (a fault of packager's own, a bundle that fails verification without a diagnosis) makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
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
Written by `make corpus`; every "passed" was executed in the kind's runtime, as far as the level says, and compared with
ONNX Runtime, on inputs synthesised from a seed. "Precision cost" is the transformed model against the original, both in
ONNX Runtime, where a shared transform made it; "parity" is the bundle against the original. Sizes are of all the
bundle's files. Kinds that run one size only get the sizes that their rows name.

Nodes that a precision can't bear are looked for and kept in float; the outcome names them. A model that drifts past
the policy whatever is kept is refused, and so is int8 that would leave more than a third of the weights in float: fp16
is smaller then.

"""
SUMMARY = """| precision | {kinds} |
|---|{rule}
"""
MODEL = """| kind | precision | outcome | level | parity | cosine | precision cost | size |
|---|---|---|---|---|---|---|---|
"""
SECTION = "\n## "
MAX_KEPT = 160
"""Characters of what is said of nodes kept in float."""
MANIFEST = """[model]
path = {path}
{targets}"""
TARGET = """[targets.{kind}-{precision}]
kind = "{kind}"
precision = "{precision}"
"""


def manifest(model: Path, sizes: Mapping[str, int], wanted: Sequence[str]) -> str:
    """A target for every precision of the kinds wanted; what runs one size only gets ``sizes``."""
    pins = ", ".join(f"{json.dumps(key)} = {size}" for key, size in sizes.items())
    targets = ""
    for kind in wanted:
        room = kinds()[kind]
        for precision in room.facts.choices:
            targets += TARGET.format(kind=kind, precision=precision)
            targets += f"shapes = {{ {pins} }}\n" if room.facts.limits.fixed_shapes else ""
    return MANIFEST.format(path=json.dumps(str(model)), targets=targets)


def row(result: TargetResult, sizes: Mapping[str, int]) -> str:
    """One line of a model's table."""
    verdict = result.verdict
    precision = result.target.removeprefix(f"{result.kind}-")
    words = "passed" if result.status == "passed" else f"{result.status}: {reason(result)}"
    if precision == AUTO and result.status == "passed":
        words = f"passed as {result.precision}"
    if kinds()[result.kind].facts.limits.fixed_shapes and result.status == "passed":
        words += f", for {', '.join(f'{key} = {size}' for key, size in sizes.items())}"
    kept = "; ".join(note for note in result.notes if note.startswith("kept in f"))
    words += f" ({kept if len(kept) <= MAX_KEPT else kept[:MAX_KEPT] + ' ...'})" if kept else ""
    cells = (
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


def summary(sections: Sequence[str]) -> str:
    """How many models passed, were refused and failed, by kind and precision."""
    counted: dict[tuple[str, str], Counter[str]] = {}
    for line in "".join(sections).splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        kind = cells[0].removeprefix("| ")
        if kind in kinds():
            counted.setdefault((cells[1], kind), Counter())[cells[2].partition(" ")[0].rstrip(":,")] += 1
    columns = [kind for kind in kinds() if any(kind == each for _, each in counted)]
    text = SUMMARY.format(kinds=" | ".join(columns), rule="---|" * len(columns))
    for precision in dict.fromkeys(precision for kind in kinds().values() for precision in kind.facts.choices):
        found = [counted.get((precision, kind), Counter()) for kind in columns]
        cells = [", ".join(f"{count} {word}" for word, count in sorted(each.items(), key=order)) for each in found]
        text += f"| {precision} | " + " | ".join(cell or "-" for cell in cells) + " |\n"
    return text


def order(item: tuple[str, int]) -> tuple[bool, str]:
    """What passed comes first."""
    return item[0] != "passed", item[0]


def main(arguments: Sequence[str]) -> int:
    """Build and write, model after model."""
    parser = argparse.ArgumentParser(description="What packager makes of real models.")
    parser.add_argument("page", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--kinds", default=",".join(kinds()), help="default: all")
    chosen = parser.parse_intermixed_args(arguments)
    pins, bad, wanted = tomllib.loads(PINS.read_text(encoding="utf-8")), 0, chosen.kinds.split(",")
    old = chosen.page.read_text(encoding="utf-8").split(SECTION)[1:] if chosen.page.exists() else []
    sections = {name: text for text in old if (name := text.partition("\n")[0]) in pins}
    for name in chosen.models or pins:
        model, pin = MODELS / f"{name}.onnx", pins[name]
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / f"{name}.toml"
            written.write_text(manifest(model, pin["sizes"], wanted), encoding="utf-8")
            report = packager.build(manifest=written, out=Path(folder) / "dist")
        rows = dict.fromkeys(wanted, "")
        for result in report.targets:
            rows[result.kind] += row(result, pin["sizes"])
            unexplained = result.status == "failed" and not (result.diagnosis or result.precision != "fp32")
            bad += result.exit_code == 1 or unexplained
            print(f"{name}: {result.target}: {result.status}", file=sys.stderr)
        for line in sections.get(name, "").splitlines(keepends=True):
            kind = line.split(" ")[1] if line.startswith("| ") else ""
            if kind in kinds() and kind not in wanted:
                rows[kind] = rows.get(kind, "") + line
        head = f"{name}\n\n{pin['why']}; {human_bytes(model.stat().st_size)}.\n\n{MODEL}"
        sections[name] = head + "".join(rows[kind] for kind in kinds() if kind in rows)
        there = [sections[each] for each in pins if each in sections]
        page = HEAD + summary(there) + "".join(SECTION + each.rstrip("\n") + "\n" for each in there)
        chosen.page.write_text(page, encoding="utf-8", newline="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
