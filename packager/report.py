"""How packager speaks: tables and JSON for standard output, progress for standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Protocol

from packager.errors import PackagerError
from packager.files import to_json
from packager.graph import printable
from packager.results import STATUS_WORDS, Report, TargetResult

if TYPE_CHECKING:
    from packager.capture import Captured
    from packager.engine import Planned, Verified
    from packager.explaining import Explanation
    from packager.model import Model
    from packager.room import Kind, Readiness
    from packager.verdict import Distance, Verdict


class Listener(Protocol):
    """What the engine tells while it works."""

    def step(self, subject: str, text: str) -> None:
        """``subject`` (a target's name or the model's) is now at ``text``."""
        ...

    def done(self, result: TargetResult) -> None:
        """A target ended."""
        ...

    def warn(self, text: str) -> None:
        """Something the user should know."""
        ...


class Silent:
    """A listener that keeps quiet: the default of the Python API."""

    def step(self, subject: str, text: str) -> None:
        """Say nothing."""

    def done(self, result: TargetResult) -> None:
        """Say nothing."""

    def warn(self, text: str) -> None:
        """Say nothing."""


class PlainProgress:
    """One line per event, for logs and pipes."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._guard = threading.Lock()

    def step(self, subject: str, text: str) -> None:
        """A line with the seconds since the start."""
        self._say(f"[{time.monotonic() - self._start:6.1f} s] {subject}: {text}")

    def done(self, result: TargetResult) -> None:
        """A line with the outcome."""
        self._say(f"[{time.monotonic() - self._start:6.1f} s] {result.target}: {outcome(result)}")

    def warn(self, text: str) -> None:
        """A warning line."""
        self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        with self._guard:
            self._stream.write(lines_of(text))
            self._stream.flush()


class RichProgress:
    """A spinner per target, for terminals. Use as a context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.fields[subject]}", style="bold", markup=False),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=False,
        )
        self._tasks: dict[str, int] = {}
        self._guard = threading.Lock()

    def __enter__(self) -> RichProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._progress.task_ids:
            self._progress.update(task, completed=1)
        self._progress.stop()

    def step(self, subject: str, text: str) -> None:
        """Show what the subject is at."""
        self._show(subject, text, finished=False)

    def done(self, result: TargetResult) -> None:
        """Show how the target ended."""
        self._show(result.target, outcome(result), finished=True)

    def warn(self, text: str) -> None:
        """Print the warning above the spinners."""
        self._progress.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)

    def _show(self, subject: str, text: str, *, finished: bool) -> None:
        from rich.progress import TaskID

        with self._guard:
            known = self._tasks.get(subject)
            if known is None:
                known = self._progress.add_task("", total=1, subject=subject, text=text)
                self._tasks[subject] = known
            self._progress.update(TaskID(known), text=text, completed=1 if finished else 0)


def outcome(result: TargetResult) -> str:
    """``passed at level runtime, max abs 1.2e-06``, or what went wrong in one line."""
    words = STATUS_WORDS[result.status]
    if result.verdict is not None and result.status == "passed":
        suffix = " (cached)" if result.cached else ""
        return f"{words} at level {result.verdict.level}, {parity_number(result)}{suffix}"
    return printable(f"{words}: {result.message.splitlines()[0]}") if result.message else words


def parity_number(result: TargetResult) -> str:
    """The worst absolute difference of the bundle from its goldens, or ``exact``, or ``-``."""
    verdict = result.verdict
    if verdict is None or not verdict.executed:
        return "-"
    if verdict.max_abs is None:
        return "exact" if verdict.status == "passed" else "nothing compared"
    return f"max abs {verdict.max_abs:.3g}"


def evidence_reason(result: TargetResult) -> str:
    """Why a bundle that was executed has no better level, as its runner said; empty where there is nothing to say."""
    verdict = result.verdict
    if verdict is None or not verdict.executed or not verdict.level_reason:
        return ""
    return f"level {verdict.level}: {verdict.level_reason}"


def costs(verdict: Verdict) -> str:
    """What transforms cost and what the target cost, apart from each other."""

    def shown(distance: Distance | None) -> str:
        if distance is None:
            return "not measured here"
        return "exact" if distance.max_abs is None else f"max abs {distance.max_abs:.3g}"

    return f"the transformed model against the reference: {shown(verdict.transform)}; " + (
        f"the bundle against the transformed model: {shown(verdict.target)}"
    )


def table(report: Report) -> str:
    """The result table, then what failed and why. Plain text, no colour needed."""
    rows = [("TARGET", "KIND", "PRECISION", "STATUS", "LEVEL", "PARITY", "SIZE", "TIME")]
    rows += [
        (
            result.target,
            result.kind,
            result.precision,
            STATUS_WORDS[result.status],
            result.verdict.level if result.verdict else "none",
            parity_number(result),
            human_bytes(result.bytes),
            "cached" if result.cached else f"{result.seconds:.1f} s",
        )
        for result in report.targets
    ]
    lines = columns(rows)
    for result in report.targets:
        if result.bundle is not None and result.exit_code == 0:
            lines.append(f"{result.target}: {report.out}/{result.archive or result.bundle}")
        if evidence := evidence_reason(result):
            lines.append(f"{result.target}: {evidence}")
        if result.verdict is not None and result.verdict.transform is not None:
            lines.append(f"{result.target}: {costs(result.verdict)}")
        lines += [f"{result.target}: note: {note}" for note in result.notes]
        if result.exit_code:
            lines.append(f"{result.target}: {result.message}")
            lines += [f"  {line}" for line in result.diagnosis]
            if result.hint:
                lines.append(f"  hint: {result.hint}")
    if report.strength is not None:
        lines.append(f"golden cases: {report.strength.text}")
    return lines_of("\n".join(lines))


def lines_of(text: str) -> str:
    """The text line by line, each printable, with a final newline."""
    return "".join(printable(line) + "\n" for line in text.split("\n"))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns two spaces apart; nothing is cut."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def human_bytes(size: int | None) -> str:
    """``3.2 MB``: decimal units, as registries and file managers show them."""
    if size is None:
        return "-"
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95 or unit == "GB":
            break
    return f"{value:.1f} {unit}"


def error_text(error: PackagerError) -> str:
    """The lines an error is shown as."""
    return lines_of(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))


def report_document(report: Report) -> dict[str, object]:
    """``report.json``."""
    return {"schema": "packager.report/1", "exit_code": report.exit_code, **asdict(report)}


def report_html(report: Report) -> str:
    """``report.html``: the same, for people; one file, no script."""
    from packager.render import render_common

    return render_common(
        "report.html.j2",
        report=report,
        words=STATUS_WORDS,
        parity={result.target: parity_number(result) for result in report.targets},
        evidence={result.target: evidence_reason(result) for result in report.targets},
        sizes={result.target: human_bytes(result.bytes) for result in report.targets},
    )


def model_document(model: Model) -> dict[str, object]:
    """``inspect --format json``."""
    from packager.bundle import signature_document

    structure = model.structure
    return {
        "schema": "packager.model/1",
        "path": str(model.path),
        "bytes": model.bytes,
        "digest": model.digest,
        "producer": structure.producer,
        "ir_version": structure.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in structure.opsets},
        "signature": signature_document(model.signature),
        "nodes": sum(1 for _ in structure.walk()),
        "operators": operators(model),
        "functions": [f"{function.domain}.{function.name}" for function in structure.functions],
        "constants": sum(tensor.elements for tensor in structure.tensors()),
        "quantized": model.is_quantized,
        "external": [
            {"location": file.location, "bytes": file.bytes, "sha256": file.sha256} for file in model.external
        ],
        "hazards": [asdict(hazard) for hazard in model.hazards],
    }


def operators(model: Model) -> dict[str, int]:
    """How often each operator occurs, subgraphs and functions included, most frequent first."""
    counts: dict[str, int] = {}
    for node in model.structure.walk():
        counts[node.operator] = counts.get(node.operator, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def model_text(model: Model) -> str:
    """``inspect`` as text."""
    structure = model.structure
    used = operators(model)
    external = sum(file.bytes for file in model.external)
    top = ", ".join(f"{name} x{count}" for name, count in list(used.items())[:8])
    lines = [
        f"{model.path}  {human_bytes(model.bytes)}"
        + (f" + {human_bytes(external)} external in {len(model.external)} files" if model.external else ""),
        f"digest    {model.digest}",
        f"format    IR {structure.ir_version}, "
        + ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in structure.opsets)
        + (f", by {structure.producer}" if structure.producer else ""),
        f"graph     {sum(used.values())} nodes, {len(used)} operators: {top}{', ...' if len(used) > 8 else ''}",
        f"constants {sum(tensor.elements for tensor in structure.tensors()):,} elements",
    ]
    lines += [f"input     {spec}" for spec in model.signature.inputs]
    lines += [f"output    {spec}" for spec in model.signature.outputs]
    for hazard in model.hazards:
        lines.append(f"hazard    {hazard.message} [{hazard.code}]" + (f"; {hazard.hint}" if hazard.hint else ""))
    return "\n".join(printable(line) for line in lines) + "\n"


def plans_text(planned: Sequence[Planned]) -> str:
    """``plan`` as text: a heading and numbered steps per target."""
    lines: list[str] = []
    for item in planned:
        if item.plan is None:
            error = item.error
            lines += f"{item.target} ({item.kind}): refused: {error.message if error else ''}".split("\n")
            if error is not None and error.hint:
                lines.append(f"  hint: {error.hint}")
            continue
        plan = item.plan
        lines.append(f"{plan.target} ({plan.kind}), precision {plan.precision}, {plan.name} {plan.version}")
        lines += [f"  in   {spec}" for spec in plan.signature.inputs]
        lines += [f"  out  {spec}" for spec in plan.signature.outputs]
        for number, step in enumerate(plan.steps, start=1):
            settings = ", ".join(f"{key} {value}" for key, value in step.settings)
            lines.append(f"  {number}. {step.title}" + (f": {settings}" if settings else ""))
        lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(printable(line) for line in lines) + "\n"


def plans_json(planned: Sequence[Planned]) -> str:
    """``plan --format json``."""
    document = [
        {
            "target": item.target,
            "kind": item.kind,
            "plan": None if item.plan is None else asdict(item.plan),
            "error": _error_document(item.error),
        }
        for item in planned
    ]
    return to_json({"schema": "packager.plans/1", "plans": document})


def _error_document(error: PackagerError | None) -> dict[str, object] | None:
    if error is None:
        return None
    return {"type": type(error).__name__, "exit_code": error.exit_code, "message": error.message, "hint": error.hint}


def verified_text(results: Sequence[Verified]) -> str:
    """``verify`` as text."""
    lines: list[str] = []
    for result in results:
        verdict = result.verdict
        if verdict is None:
            error = result.error
            lines += f"{result.bundle}: FAILED: {error.message if error else 'no verdict'}".split("\n")
            if error is not None and error.hint:
                lines.append(f"  hint: {error.hint}")
        else:
            parity = "exact" if verdict.max_abs is None else f"max abs {verdict.max_abs:.3g}"
            if not verdict.executed:
                lines.append(f"{result.bundle}: {verdict.status}, NOT verified: {verdict.level_reason}")
                continue
            lines.append(
                f"{result.bundle}: {verdict.status} at level {verdict.level}, {verdict.cases} cases, {parity}, "
                f"{verdict.runtime} {verdict.version} on {verdict.device}"
            )
            lines += [f"  {failure}" for failure in verdict.failures]
        lines += [f"  warning: {warning}" for warning in result.warnings]
    return "\n".join(printable(line) for line in lines) + "\n"


def verified_json(results: Sequence[Verified]) -> str:
    """``verify --format json``."""
    document = [
        {
            "bundle": result.bundle,
            "name": result.name,
            "target": result.target,
            "kind": result.kind,
            "exit_code": result.exit_code,
            "verdict": None if result.verdict is None else asdict(result.verdict),
            "error": _error_document(result.error),
            "warnings": list(result.warnings),
        }
        for result in results
    ]
    return to_json({"schema": "packager.verified/1", "bundles": document})


def explained_text(found: Explanation) -> str:
    """``explain`` as text."""
    lines = [f"{found.bundle}, golden case '{found.case}'"]
    for title, drifts in (
        ("what transforms cost: the model against its transformed form, in ONNX Runtime", found.transform),
        ("what the target cost: its runtime against ONNX Runtime, on the model it was given", found.target),
    ):
        if drifts:
            rows = [("  MAX ABS", "SCALED", "NODE", "TENSOR")]
            rows += [
                (f"  {_number(drift.max_abs)}", _number(drift.scaled) or drift.words, drift.node, drift.tensor)
                for drift in drifts
            ]
            lines += [title, *columns(rows)]
    lines += [f"note: {note}" for note in found.notes]
    return lines_of("\n".join(lines))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def explained_json(found: Explanation) -> str:
    """``explain --format json``."""
    return to_json({"schema": "packager.explanation/1", **asdict(found)})


def captured_text(made: Captured) -> str:
    """``golden`` as text."""
    lines = [f"{made.folder}: {made.cases} cases, inputs {made.source}, outputs from {made.outputs_from}"]
    if made.artifact is not None:
        worst = "exact" if made.artifact.max_abs is None else f"max abs diff {made.artifact.max_abs:.3g}"
        bound = "" if made.artifact.tolerance is None else f", tolerance {made.artifact.tolerance:g}"
        words = "agrees with its source" if made.artifact.passed else "DIFFERS from its source"
        lines.append(f"the artifact {words}: {worst}{bound}")
        lines += [f"  {reason}" for reason in made.artifact.reasons[:5]]
    if made.strength is not None:
        lines.append(made.strength.text)
        lines += [f"  missed: {text}" for text in made.strength.missed]
        lines += [f"  nothing moves output '{name}'" for name in made.strength.insensitive]
    return lines_of("\n".join(lines))


def captured_json(made: Captured) -> str:
    """``golden --format json``."""
    return to_json({"schema": "packager.captured/1", **asdict(made), "folder": str(made.folder)})


def doctor_text(found: Sequence[Readiness]) -> str:
    """``doctor`` as text."""
    lines: list[str] = []
    for each in found:
        name, highest, reach = each.kind.name, each.kind.facts.level, each.reach
        if each.missing:
            lines.append(f"{name}: NOT ready")
            lines += [f"  {item.what} is missing\n    get it: {item.how}" for item in each.missing]
            continue
        lines.append(f"{name}: ready; builds here and verifies up to level {reach.level}")
        if reach.level != highest:
            lines.append(f"  elsewhere up to level {highest}: {reach.reason}")
    return "\n".join(lines) + "\n"


def doctor_json(found: Sequence[Readiness]) -> str:
    """``doctor --format json``: ``level`` is the kind's highest, ``here`` what this machine reaches, ``reason`` why no
    more."""
    document = [
        {
            "kind": each.kind.name,
            "ready": not each.missing,
            "level": each.kind.facts.level,
            "here": "none" if each.missing else each.reach.level,
            "reason": each.reach.reason,
            "missing": [{"what": item.what, "how": item.how} for item in each.missing],
        }
        for each in found
    ]
    return to_json({"schema": "packager.doctor/1", "kinds": document})


def kinds_text(chosen: Sequence[Kind]) -> str:
    """``targets`` as text."""
    rows = [("KIND", "LEVEL", "PRECISIONS", "WHAT")]
    rows += [
        (kind.name, kind.facts.level, ", ".join(kind.facts.choices), f"{kind.facts.title}: {kind.facts.summary}")
        for kind in chosen
    ]
    return "\n".join(columns(rows)) + "\n"


def kinds_json(chosen: Sequence[Kind]) -> str:
    """``targets --format json``."""
    return to_json({"schema": "packager.kinds/1", "kinds": [kind.facts.model_dump(mode="json") for kind in chosen]})
