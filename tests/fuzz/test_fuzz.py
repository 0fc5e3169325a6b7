"""A short look at every surface with the same cases each time; `make fuzz` looks for as long as it is given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests import builders
from tests.fuzz.cases import SURFACES, Good, bomb_cases, good
from tests.fuzz.oracle import Case, Worker, complaints, run
from tests.fuzz.worker import Answer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="commands run in forks")

EXAMPLES = {"looks": 60, "model": 8, "model bytes": 20, "manifest": 40, "golden": 20, "bundle": 20, "archive": 25}
"""What each costs is what a survivor costs: a model or a bundle that is fine is run."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("surface", EXAMPLES)
def test_no_input_breaks_a_promise(surface: str, worker: Worker, made: Good, tmp_path: Path):
    @settings(
        max_examples=EXAMPLES[surface], derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SURFACES[surface](made))
    def look(case: Case) -> None:
        answer, wrong = run(worker, case, tmp_path / "case")
        assert wrong == [], f"packager {' '.join(case.arguments)}\n{answer.out}{answer.err}"

    look()


def test_bombs_cost_nothing(worker: Worker, tmp_path: Path):
    for name, case in bomb_cases().items():
        answer, wrong = run(worker, case, tmp_path / "case")
        assert (answer.status, wrong) == (6, []), f"{name}: {answer.out}{answer.err}"


def test_what_breaks_a_promise_is_told(worker: Worker, tmp_path: Path):
    """The oracle itself: a check that can't fail checks nothing."""
    case = Case(("inspect", "absent.onnx"), {}, names=("absent.onnx",))
    fine, wrong = run(worker, case, tmp_path / "case")
    assert (fine.status, wrong) == (2, [])
    trace = "Traceback (most recent call last)"
    for answer, words in (
        (Answer(1, False, 0.1, 0, "", "absent.onnx"), "ended with status 1"),
        (Answer(-11, False, 0.1, 0, "", "absent.onnx"), "ended with status -11"),
        (Answer(2, False, 0.1, 0, "", f"absent.onnx {trace}"), "showed a traceback"),
        (Answer(2, False, 0.1, 2 << 30, "", "absent.onnx"), "took 2048 MiB"),
        (Answer(2, False, 0.1, 0, "", "something is wrong"), "name none of absent.onnx"),
        (Answer(-9, True, 60.1, 0, "", "absent.onnx"), "ran longer than"),
        (Answer(2, False, 0.1, 0, "absent.onnx a secret beside the folder", ""), "gave away"),
    ):
        assert any(words in line for line in complaints(case, answer)), words
    model = builders.relu(tmp_path / "m.onnx").read_bytes()
    _, wrong = run(worker, Case(("golden", "m.onnx", "-o", "elsewhere"), {"m.onnx": model}), tmp_path / "case")
    assert "it wrote work/elsewhere/golden.json" in wrong
