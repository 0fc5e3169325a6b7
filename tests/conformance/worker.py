"""One process that builds and verifies case after case, by packager's own API, and books how each kind ended.

    python -m tests.conformance.worker

reads a request a line (JSON, :class:`Request`) and answers each with a line: the case, an :class:`Ending` a kind, and
the CPU seconds it took.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import packager
from packager import targeting
from packager.errors import PackagerError, TargetCrashed, TimeLimit
from packager.results import TargetResult
from packager.witness import CODE as DISPUTED
from tests.conformance import tap
from tests.conformance.cases import Case
from tests.conformance.forking import cpu_seconds, fork_children

REFERENCE = "reference"
SECONDS = 120
"""Time limit of a build, and of a verification."""

BROWSER = "PACKAGER_BROWSER"

ENDS = ("pass", "near", "refused", "caught", "crash", "hang", "wrong")
"""``near``: passed by packager's tolerances, against onnx's expected outputs too, but beyond onnx's own for a node."""

BAD = ("crash", "hang", "wrong")
"""What may never be: a traceback or a dead process, a time limit, a verdict that passed a wrong answer."""


@dataclass(frozen=True)
class Request:
    """A case to do: by which kinds, and whether in a browser where one would do it."""

    name: str
    folder: str
    kinds: tuple[str, ...]
    browser: bool


@dataclass(frozen=True)
class Ending:
    """How a kind ended on a case, and why."""

    end: str
    why: str = ""


def book(request: Request) -> dict[str, Ending]:
    """Build and verify a case; every kind's end, the reference's first."""
    case = Case(request.name, Path(request.folder))
    with tempfile.TemporaryDirectory(prefix="packager-case-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        out = folder / "dist"
        out.mkdir()
        os.environ[tap.CASE], os.environ[tap.OUT] = str(case.folder), str(folder)
        if not request.browser:
            os.environ[BROWSER] = ""
        else:
            os.environ.pop(BROWSER, None)
        shutil.copyfile(case.model, folder / f"{case.name}.onnx")
        manifest = folder / "packager.toml"
        manifest.write_text(_manifest(case, request.kinds), encoding="utf-8")
        try:
            report = packager.build(manifest=manifest, out=out, cache=False, jobs=len(request.kinds))
        except PackagerError as error:
            ending = _of_error(error.message, error.exit_code, error)
            return dict.fromkeys((REFERENCE, *request.kinds), ending)
        except Exception:  # noqa: BLE001 - a fault of packager is what is looked for
            return dict.fromkeys((REFERENCE, *request.kinds), Ending("crash", traceback.format_exc()[-1500:]))
        ends = {REFERENCE: _judged(folder, REFERENCE)}
        ends.update({result.target: _of_result(folder, result) for result in report.targets})
        disputed = [hazard.message for hazard in report.hazards if hazard.code == DISPUTED]
        return {kind: _told(ending, disputed) for kind, ending in ends.items()}


def _manifest(case: Case, kinds: Sequence[str]) -> str:
    lines = [f'[model]\npath = "{case.name}.onnx"\n[golden]\nallow_nan = true\n']
    lines += [f'path = "{case.inputs.parent}"\n'] if any(case.inputs.iterdir()) else []  # some take no inputs
    lines += [f"[targets.{kind}]\nbuild_timeout = {SECONDS}\nverify_timeout = {SECONDS}\n" for kind in kinds]
    return "".join(lines)


def _judged(folder: Path, who: str) -> Ending:
    """The end of who passed: its answers must be those that onnx expects."""
    file = tap.answers_file(folder, who)
    if not file.exists():
        return Ending("wrong", "nothing was answered")
    told = json.loads(file.read_text(encoding="utf-8"))
    if not told["compared"]:
        return Ending("wrong", "nothing was compared")
    if not told["differences"]:
        return Ending("pass")
    if told["reasons"]:
        return Ending("wrong", "; ".join(told["reasons"]))
    return Ending("near", "; ".join(told["differences"]))


def _told(ending: Ending, disputed: Sequence[str]) -> Ending:
    """A wrong answer that the report warned of, naming the output, was caught by that."""
    return Ending("caught", f"warned: {'; '.join(disputed)}") if ending.end == "wrong" and disputed else ending


def _of_result(folder: Path, result: TargetResult) -> Ending:
    if result.exit_code == 0:
        return _judged(folder, result.target)
    return _of_error(result.message, result.exit_code, None)


def _of_error(message: str, status: int, error: PackagerError | None) -> Ending:
    text = " ".join(message.split())
    if isinstance(error, TimeLimit) or re.search(r"took longer than \d+ s and was stopped", text):
        return Ending("hang", text)
    died = re.search(r": the process (died of|ended with)", text)
    raised = re.match(r"[a-z][\w' ]*: [A-Z]\w+: ", text)
    if status == 1 or died or raised or isinstance(error, TargetCrashed):
        return Ending("crash", text)
    return Ending("caught" if status == 6 else "refused", text)


def _left_out(folder: Path, target: Path, name: str) -> None:
    """In place of an archive: packing a sealed bundle takes longer than all the rest, and its files are judged."""
    target.touch()


def main() -> None:
    """Answer requests until there are no more."""
    fork_children("tests.conformance.preloaded")
    vars(targeting)["archive"] = _left_out
    for line in sys.stdin:
        given = json.loads(line)
        request = Request(given["name"], given["folder"], tuple(given["kinds"]), given["browser"])
        before = cpu_seconds()
        ends = book(request)
        answer = {"case": request.name, "cpu": round(cpu_seconds() - before, 3)}
        answer["ends"] = {kind: asdict(ending) for kind, ending in ends.items()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
