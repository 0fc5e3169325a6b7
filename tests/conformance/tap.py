"""Look at what a bundle really answers: its runner's outputs are held against what onnx expects, beside the verdict.

Imported where the children of a build run. The verdict itself is left as it is: the comparison goes into a file in the
output folder, ``answers-<target>.json``, ``answers-reference.json`` for the reference's own. It holds how the answers
differ by onnx's rule, and by the rules that packager judges this bundle by.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from packager import golden_store, parity, reference, verifying
from packager.goldens import Array
from packager.reference import Reference, ReferenceJob
from packager.room import Runner
from packager.verdict import Verdict
from packager.verifying import VerifyJob
from tests.conformance.cases import differences, expected

CASE, OUT = "CONFORMANCE_CASE", "CONFORMANCE_OUT"
"""Where the case is, and where the comparison goes."""

_answer, _execute, _run = reference.answer, verifying.execute, verifying._run
_given: list[Mapping[str, np.ndarray]] = []


def answers_file(out: Path, who: str) -> Path:
    """Where the comparison of a target's answers lies, or the ``reference``'s."""
    return out / f"answers-{who}.json"


def _tell(who: str, answers: list[Mapping[str, np.ndarray]], golden: Path) -> None:
    rules = parity.read_golden(golden).rules
    wanted = {name: array for name, array in expected(Path(os.environ[CASE])).items() if name in rules}
    told = [text for each in answers for text in differences(wanted, each)]
    judged = [parity.compare_case("", wanted, {name: each[name] for name in rules}, rules) for each in answers]
    document = {
        "compared": sum(len(rules) for _ in answers),
        "differences": told,
        "reasons": [reason for each in judged for reason in each.reasons],
    }
    answers_file(Path(os.environ[OUT]), who).write_text(json.dumps(document), encoding="utf-8")


@functools.wraps(_run)
def _run_and_keep(runner: Runner, feeds: Mapping[str, Array]) -> dict[str, Array] | str:
    outputs = _run(runner, feeds)
    if not isinstance(outputs, str):
        _given.append(outputs)
    return outputs


@functools.wraps(_execute)
def _execute_and_tell(job: VerifyJob) -> Verdict:
    _given.clear()
    verdict = _execute(job)
    if verdict.status == "passed":
        _tell(job.bundle.parts[-3], _given, job.bundle / verifying.GOLDEN)
    return verdict


@functools.wraps(_answer)
def _answer_and_tell(job: ReferenceJob) -> Reference:
    record = _answer(job)
    _tell("reference", [case.outputs for case in golden_store.read(job.out).cases], job.out)
    return record


def install() -> None:
    """Put the taps in place, for every child forked from here."""
    reference.answer, verifying.execute, verifying._run = _answer_and_tell, _execute_and_tell, _run_and_keep
