"""The harness tells right from wrong, goes on where it was, and a spread of cases over all operators ends as known."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from tests.builders import model, save, value
from tests.conformance import baseline, run, state, table
from tests.conformance.cases import Case, differences
from tests.conformance.pool import do_all
from tests.conformance.tap import answers_file
from tests.conformance.worker import REFERENCE, Ending, Request, _judged, _of_error

SPREAD = 110
"""Of so many cases, in order of their names, one is run by every test run."""


def test_a_spread_of_cases_ends_as_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    kinds = [kind for kind in run.KINDS.split(",") if not run.lacking(kind)]
    assert kinds, "no kind can be built here"
    file = tmp_path / "state.jsonl"
    arguments = ["--kinds", ",".join(kinds), "--every", str(SPREAD), "--state", str(file)]
    status = run.main(arguments)
    out, err = capfd.readouterr()
    assert status == 0, err
    done = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len({line["case"] for line in done}) >= 15
    assert len([line for line in done if line["end"] == "pass"]) > len(done) / 2, out
    assert run.main(arguments) == 0
    assert len(file.read_text(encoding="utf-8").splitlines()) == len(done), "what is known isn't done again"


def test_answers_are_held_to_onnx_s_tolerance():
    wanted = {"y": np.array([1.0, 0.0, np.nan], np.float32), "n": np.array([1, 2])}
    assert differences(wanted, {**wanted, "more": np.zeros(1)}) == []
    near = np.array([1.0009, 0.0, np.nan], np.float32)
    assert differences(wanted, {**wanted, "y": near}) == []
    (told,) = differences(wanted, {**wanted, "y": np.array([1.0, 1e-6, np.nan], np.float32)})
    assert told.startswith("output 'y': 1 of 3 values differ, first at [1]: ")
    assert differences(wanted, {**wanted, "n": np.array([1, 3])}) == [
        "output 'n': 1 of 2 values differ, first at [1]: 3, expected 2"
    ]
    assert differences(wanted, {**wanted, "n": np.array([[1, 2]])}) == ["output 'n': shape [1, 2], expected [2]"]
    assert differences(wanted, {**wanted, "n": np.array([1, 2], np.int32)}) == ["output 'n': int32, expected int64"]


def test_bfloat16_may_be_two_steps_off_and_no_more():
    wanted = np.array([1.0], ml_dtypes.bfloat16)
    assert not differences({"y": wanted}, {"y": np.array([1 + 2**-6], ml_dtypes.bfloat16)})
    assert differences({"y": wanted}, {"y": np.array([1 + 2**-5], ml_dtypes.bfloat16)})


def test_strings_are_compared():
    wanted = {"y": np.array(["a", "b"], object)}
    assert differences(wanted, {"y": np.array(["a", "b"])}) == []
    assert differences(wanted, {"y": np.array(["a", "c"])}) == ["output 'y': other strings"]


@pytest.mark.parametrize(
    ("message", "status", "end"),
    [
        ("building: KeyError: 'x'\n  | Traceback", 5, "crash"),
        ("verifying: the process died of SIGSEGV (signal 11)", 5, "crash"),
        ("a fault in packager itself: KeyError: 'x'", 1, "crash"),
        ("verifying took longer than 120 s and was stopped", 5, "hang"),
        ("the bundle's answers are not its goldens", 6, "caught"),
        ("OpenVINO can't take 1 node of the model: node Det 'd': no rule", 3, "refused"),
    ],
)
def test_errors_are_booked_as_what_they_are(message: str, status: int, end: str):
    assert _of_error(message, status, None).end == end


@pytest.mark.parametrize(
    ("compared", "differences", "reasons", "end"),
    [(1, [], [], "pass"), (1, [], ["coarse"], "pass"), (1, ["off"], [], "near"), (1, ["off"], ["far"], "wrong"),
     (0, [], [], "wrong")],
)  # fmt: skip
def test_a_verdict_that_passed_is_held_to_what_onnx_expects(
    tmp_path: Path, compared: int, differences: list[str], reasons: list[str], end: str
):
    document = {"compared": compared, "differences": differences, "reasons": reasons}
    answers_file(tmp_path, "web").write_text(json.dumps(document), encoding="utf-8")
    assert _judged(tmp_path, "web").end == end
    assert _judged(tmp_path, "another") == Ending("wrong", "nothing was answered")


def test_reasons_lose_the_names_of_one_case():
    one = "OpenVINO can't take 1 node of the model: node Det (unnamed, makes 'y'): OpenVINO has no rule for it"
    other = "OpenVINO can't take 1 node of the model: node 'a' (Det, makes 'b'): OpenVINO has no rule for it"
    assert table.reason(one) == table.reason(other) == "OpenVINO has no rule for it"
    load = "x.onnx: ONNX Runtime can't load the model: [E] : 9 : Could not find an implementation for Add(14)"
    assert table.reason(load) == "ONNX Runtime has no kernel for it"


def test_a_run_of_some_kinds_leaves_what_the_page_says_of_others(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"head\n{table.BEGIN}{table.END}tail\n", encoding="utf-8")
    cases = [Case(name, tmp_path / name) for name in ("test_a", "test_b")]
    for case in cases:
        case.folder.mkdir()
        save(model([helper.make_node("Relu", ["x"], ["y"])], [value("x")], [value("y")]), case.model)
    first = {("test_a", "web"): Ending("pass"), ("test_b", "web"): Ending("caught", "off")}
    table.write(page, cases, first, ["web"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("head\n") and text.endswith("tail\n")
    assert "| web | 1 | 0 | 0 | 1 | 0 | 0 | 0 |\n" in text and "### web\n\n2 cases; " in text
    assert "caught, 1:\n\n- Relu: `b`\n" in text
    table.write(page, cases, {("test_a", "openvino"): Ending("pass"), **first}, ["openvino"])
    both = page.read_text(encoding="utf-8")
    assert (
        both.index("| openvino | 1 | 0 |") < both.index("| web | 1 | 0 |") and "### openvino\n\n1 of 2 cases; " in both
    )
    assert both.endswith(text[text.index("### web") :])


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "FILE", tmp_path / "expected.json")
    ends = {
        ("test_a", REFERENCE): Ending("pass"), ("test_a", "web"): Ending("pass"),
        ("test_b", REFERENCE): Ending("refused", "it is random"), ("test_b", "web"): Ending("refused", "it is random"),
        ("test_c", REFERENCE): Ending("pass"), ("test_c", "web"): Ending("caught", "wrong values"),
    }  # fmt: skip
    baseline.write(ends, (REFERENCE, "web"))


def test_what_is_expected_is_written_compactly_and_read_back(known: None):
    document = json.loads(baseline.FILE.read_text(encoding="utf-8"))
    assert document == {
        "reference": {"refused": {"it is random": ["b"]}}, "web": {"caught": ["c"], "refused": {}},
    }  # fmt: skip
    ends = {case: baseline.expected_end(baseline.read(), case, "web") for case in ("test_a", "test_b", "test_c")}
    assert ends == {"test_a": "pass", "test_b": "refused", "test_c": "caught"}


def test_worse_ends_and_bad_ones_fail_and_better_ones_are_told(known: None):
    ends = {
        ("test_a", "web"): Ending("caught", "it is off"),
        ("test_b", "web"): Ending("wrong", "it is off"),
        ("test_c", "web"): Ending("pass"),
    }
    assert list(baseline.failures(ends)) == [
        "REGRESSION test_a web: was pass, is caught: it is off", "WRONG test_b web: it is off",
    ]  # fmt: skip
    assert baseline.improvements(ends) == ["test_c web: was caught, is pass"]
    others = {("test_a", "npu"): Ending("refused", "it can't"), ("test_c", "npu"): Ending("hang", "it is slow")}
    assert list(baseline.failures(others)) == ["HANG test_c npu: it is slow"], "nothing else is known of that kind"


def test_ends_hold_until_packager_or_a_runtime_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "state.jsonl"
    state.State(file, [REFERENCE]).add("test_a", {REFERENCE: Ending("pass")})
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"case": "test_b", "kind')
    assert state.State(file, [REFERENCE]).ends == {("test_a", REFERENCE): Ending("pass")}
    monkeypatch.setattr(state, "as_of", lambda kind: "another")
    assert state.State(file, [REFERENCE]).ends == {}
    assert state.State(file, [REFERENCE], keep=True).has("test_a", REFERENCE)


def test_a_worker_that_dies_is_a_crash_and_is_replaced(tmp_path: Path):
    told: list[tuple[str, str]] = []

    def keep(request: Request, ends: dict[str, Ending], cpu: float) -> None:
        told.extend((request.name, ending.end) for ending in ends.values())

    lost = Request("lost", str(tmp_path / "nowhere"), (), False)
    do_all([lost, lost], 1, keep)
    assert told == [("lost", "crash"), ("lost", "crash")]
