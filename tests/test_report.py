"""What people and scripts read: tables, progress lines and JSON, with nothing cut and no control characters."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packager import report as reports
from packager.engine import Planned, Verified
from packager.errors import ManifestError, Problem, Refused, VerificationError
from packager.model import open_model
from packager.results import STATUS_WORDS, Report, Status, TargetResult
from packager.room import Missing, Reach, Readiness, kinds
from packager.verdict import Verdict, unverified
from tests import builders

PASSED = Verdict("passed", "runtime", "", "Fast", "1.2", "CPU", 3, 1.234e-6, 1e-7, 1.0, None, "default-1", "fp32")
HOSTILE = "x\x1b[31m\x07\r名前"


def result(status: Status = "passed", code: int = 0, **more) -> TargetResult:
    return TargetResult("edge", "some", "fp32", status, code, **more)


def report(*targets: TargetResult) -> Report:
    return Report("0.1.0", "ranker.onnx", "ranker", "1.4.0", "sha256:0", 17, "out", (), None, targets, 1.5)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1500, "1.5 kB"), (999_949, "999.9 kB"),
        (999_950, "1.0 MB"), (3_200_000, "3.2 MB"), (999_999_999, "1.0 GB"), (5_000_000_000_000, "5000.0 GB"),
    ],
)  # fmt: skip
def test_sizes_are_decimal(size: int | None, words: str):
    assert reports.human_bytes(size) == words


@given(st.integers(0, 10**14))
def test_a_size_is_a_number_and_a_unit_close_to_the_truth(size: int):
    number, unit = reports.human_bytes(size).split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert abs(float(number) * factor - size) <= 0.051 * factor
    assert unit == "GB" or float(number) < 1000


def test_columns_line_up_and_nothing_is_cut():
    rows = [("A", "LONG HEADER", "C"), ("x" * 50, "y", "z" * 3)]
    assert reports.columns(rows) == [f"{'A':50}  LONG HEADER  C", f"{'x' * 50}  y            zzz"]


def test_the_table_says_where_bundles_are_and_why_targets_failed():
    passed = result(verdict=PASSED, bundle="b", archive="b.tar.gz", bytes=3_200_000, seconds=2.34, notes=("mind",))
    failed = result("failed", 6, message="off\n  by much", hint="look", diagnosis=("first divergence: node n",))
    lines = reports.table(report(passed, failed)).splitlines()
    assert re.split("  +", lines[1]) == [
        "edge", "some", "fp32", "passed", "runtime", "max abs 1.23e-06", "3.2 MB", "2.3 s",
    ]  # fmt: skip
    assert re.split("  +", lines[2])[3:] == ["FAILED verification", "none", "-", "-", "0.0 s"]
    assert lines[3:] == [
        "edge: out/b.tar.gz", "edge: note: mind", "edge: off", "  by much", "  first divergence: node n",
        "  hint: look",
    ]  # fmt: skip


def test_a_weaker_level_comes_with_its_reason():
    emulated = replace(PASSED, level="emulated", level_reason="a stand-in <hosts> it")
    built = result("unverified", 6, verdict=replace(emulated, status="unverified"))
    made = report(result(verdict=emulated), replace(built, target="other"))
    assert "edge: level emulated: a stand-in <hosts> it\n" in reports.table(made)
    assert "other: level" not in reports.table(made)
    assert "<p>level emulated: a stand-in &lt;hosts&gt; it</p>" in reports.report_html(made)
    best = report(result(verdict=PASSED))
    assert "level runtime:" not in reports.table(best) and "level runtime:" not in reports.report_html(best)


def test_a_cached_target_says_so():
    assert reports.table(report(result(verdict=PASSED, cached=True))).splitlines()[1].endswith("cached")
    assert reports.outcome(result(verdict=PASSED, cached=True)).endswith("max abs 1.23e-06 (cached)")


@pytest.mark.parametrize("status", STATUS_WORDS)
def test_each_status_has_its_words_and_only_a_pass_is_called_one(status: Status):
    words = reports.outcome(result(status, message="why\nmore"))
    assert words.startswith(STATUS_WORDS[status])
    assert ("passed" in words) == (status == "passed")
    assert reports.outcome(result(status)) == STATUS_WORDS[status]


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (None, "-"),
        (unverified("off", "p", "fp32"), "-"),
        (replace(PASSED, max_abs=None), "exact"),
        (replace(PASSED, max_abs=0.0), "max abs 0"),
        (replace(PASSED, status="failed", max_abs=None), "nothing compared"),
        (replace(PASSED, max_abs=float("inf")), "max abs inf"),
    ],
)
def test_parity_is_a_number_only_where_something_was_measured(verdict: Verdict | None, words: str):
    assert reports.parity_number(result(verdict=verdict)) == words


def clean(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def test_names_of_a_model_reach_no_terminal_raw():
    failed = result("refused", 3, message=f"node {HOSTILE}\n  and {HOSTILE}", hint=HOSTILE, diagnosis=(HOSTILE,),
                    notes=(HOSTILE,))  # fmt: skip
    table = reports.table(report(failed))
    assert clean(table) and "名前" in table and "x\\x1b[31m\\x07\\r名前" in table
    error = Refused(f"node {HOSTILE}\n  line two", HOSTILE)
    assert clean(reports.error_text(error)) and "\n  line two\nhint: x" in reports.error_text(error)
    assert clean(reports.plans_text([Planned("edge", "some", None, error)]))
    assert clean(reports.verified_text([Verified("b", "n", "t", "k", None, error, (HOSTILE,))]))
    stream = io.StringIO()
    progress = reports.PlainProgress(stream)
    progress.step(HOSTILE, HOSTILE)
    progress.done(failed)
    progress.warn(f"one\ntwo {HOSTILE}")
    assert clean(stream.getvalue()) and stream.getvalue().endswith("warning: one\ntwo x\\x1b[31m\\x07\\r名前\n")


def test_plain_progress_is_one_line_per_event():
    stream = io.StringIO()
    progress = reports.PlainProgress(stream)
    progress.step("edge", "building")
    progress.done(result(verdict=PASSED))
    progress.done(result("error", 5, message="first\nsecond"))
    progress.warn("mind")
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"\[ +\d+\.\d s\] edge: building", lines[0])
    assert lines[1].endswith("edge: passed at level runtime, max abs 1.23e-06")
    assert lines[2].endswith("edge: FAILED to build: first")
    assert lines[3] == "warning: mind" and len(lines) == 4


def test_a_terminal_gets_a_spinner_per_subject(capsys: pytest.CaptureFixture[str]):
    with reports.RichProgress() as progress:
        progress.step("edge", "building [bold]not markup[/bold]")
        progress.step("edge", "verifying")
        progress.warn("mind [this]")
        progress.done(result(verdict=PASSED))
    said = capsys.readouterr()
    assert said.out == "" and "warning: mind [this]" in said.err
    assert said.err.count("edge") == said.err.count("max abs 1.23e-06") >= 1


def test_errors_are_shown_with_their_hint():
    assert reports.error_text(Refused("no", "do")) == "error: no\nhint: do\n"
    assert reports.error_text(Refused("no")) == "error: no\n"
    listed = ManifestError("2 mistakes", problems=(Problem("a", "x", 3, "h"), Problem("b", "y")))
    assert reports.error_text(listed) == "error: 2 mistakes\n  line 3: a: x (h)\n  b: y\n"


def test_verified_bundles_as_text_and_json():
    good = Verified("b1", "n", "t", "k", PASSED, None, ("extra is not part of the bundle",))
    bad = Verified("b2", "n", "t", "k", replace(PASSED, status="failed", failures=("y is off",)), None)
    broken = Verified("b3", "", "", "", None, VerificationError("not sealed:\n  model is missing", "fetch"))
    assert [one.exit_code for one in (good, bad, broken)] == [0, 6, 6]
    assert reports.verified_text([good, bad, broken]).splitlines() == [
        "b1: passed at level runtime, 3 cases, max abs 1.23e-06, Fast 1.2 on CPU",
        "  warning: extra is not part of the bundle",
        "b2: failed at level runtime, 3 cases, max abs 1.23e-06, Fast 1.2 on CPU",
        "  y is off",
        "b3: FAILED: not sealed:",
        "  model is missing",
        "  hint: fetch",
    ]
    document = json.loads(reports.verified_json([good, bad, broken]))
    assert [one["exit_code"] for one in document["bundles"]] == [0, 6, 6]
    assert document["bundles"][2]["error"] == {
        "type": "VerificationError", "exit_code": 6, "message": "not sealed:\n  model is missing",
        "hint": "fetch",
    }  # fmt: skip


def test_refused_plans_as_text_and_json():
    planned = [Planned("edge", "some", None, Refused("2 nodes:\n  node n\n  node m", "another"))]
    assert reports.plans_text(planned).splitlines() == [
        "edge (some): refused: 2 nodes:", "  node n", "  node m", "  hint: another",
    ]  # fmt: skip
    assert json.loads(reports.plans_json(planned))["plans"][0]["error"]["message"].startswith("2 nodes:\n")


def test_doctor_says_what_is_missing_and_how_far_verification_goes_here():
    kind = next(kind for kind in kinds().values() if kind.facts.level == "runtime")
    found = [
        Readiness(kind, (), Reach("runtime")),
        Readiness(kind, (), Reach("proxy", "no device is here")),
        Readiness(kind, (Missing("program x", "apt install x"),), Reach("runtime")),
    ]
    assert reports.doctor_text(found).splitlines() == [
        f"{kind.name}: ready; builds here and verifies up to level runtime",
        f"{kind.name}: ready; builds here and verifies up to level proxy",
        "  elsewhere up to level runtime: no device is here",
        f"{kind.name}: NOT ready",
        "  program x is missing",
        "    get it: apt install x",
    ]
    told = json.loads(reports.doctor_json(found))["kinds"]
    assert [(item["ready"], item["level"], item["here"], item["reason"]) for item in told] == [
        (True, "runtime", "runtime", ""),
        (True, "runtime", "proxy", "no device is here"),
        (False, "runtime", "none", ""),
    ]


def test_a_model_as_text_and_json_agree(tmp_path: Path):
    model = open_model(builders.relu(tmp_path / "m.onnx", shape=("n", None)))
    assert "input     x: float32[n, ?]" in reports.model_text(model)
    document = reports.model_document(model)
    assert document["nodes"] == 1 and document["signature"] == {
        "inputs": [{"name": "x", "dtype": "float32", "dims": ["n", None]}],
        "outputs": [{"name": "y", "dtype": "float32", "dims": ["n", None]}],
    }
