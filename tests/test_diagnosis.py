"""After a failure: which side is off, and the first node that goes its own way, found by narrowing."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from packager import child, diagnosis, golden_store
from packager.diagnosis import DiagnosisJob, SettleJob, break_tie, diagnose, find_divergence, settle
from packager.errors import BuildError
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.host import this_host
from packager.model import Model, open_model
from packager.parity import OutputRule, Tolerance
from packager.reference import OrtSession
from packager.room import Plan, PlanRequest, RuntimeInfo, Stage, kind_named
from tests.builders import BOOL, FLOAT, model, relu, save, value

RULE = OutputRule(Tolerance(1e-3, 1e-4))
X = np.array([[1.0, 2.0, 3.0]], np.float32)


def chain(path: Path, length: int) -> Path:
    """``t0 = x + 1, t1 = t0 + 1, ...``"""
    names = ["x", *(f"t{at}" for at in range(length - 1)), "y"]
    nodes = [
        helper.make_node("Add", [before, "one"], [after], name=f"n{at}")
        for at, (before, after) in enumerate(pairwise(names))
    ]
    one = numpy_helper.from_array(np.float32(1), "one")
    return save(model(nodes, [value("x")], [value("y")], [one]), path)


@dataclass
class Spoilt:
    """A target's runtime: ONNX Runtime, with tensors spoilt by name. ``asked`` are the outputs of each probe."""

    spoil: Callable[[str], float]
    asked: list[list[str]] = field(default_factory=list)

    @contextmanager
    def runner(self, bundle: Path) -> Iterator[Spoilt]:
        self.session = OrtSession(bundle / "model.onnx", quantized=False)
        self.info = RuntimeInfo("Fast", "1.2", "CPU", "runtime")
        yield self

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        names = [spec.name for spec in open_model(Path(self.session._path)).signature.outputs]
        self.asked.append(names)
        found = self.session.run(feeds, names, "case")
        return {name: np.add(array, np.float32(self.spoil(name))) for name, array in found.items()}


@pytest.fixture
def failed(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make the job for a bundle of the model at ``path`` whose runtime spoils tensors."""

    def make(
        path: Path,
        spoil: Callable[[str], float],
        outputs: Mapping[str, Array] | None = None,
        inputs: Mapping[str, Array] | None = None,
    ) -> tuple[DiagnosisJob, Spoilt]:
        kind = kind_named(tiny)
        room = importlib.import_module("tiny")
        runtime = Spoilt(spoil)
        monkeypatch.setattr(room, "runner", runtime.runner)
        opened = open_model(path)
        feeds = dict(inputs or {"x": X})
        names = [spec.name for spec in opened.signature.outputs]
        answers = outputs or OrtSession(path, quantized=False).run(feeds, names, "case")
        goldens = GoldenSet((GoldenCase("good", feeds, answers), GoldenCase("bad", feeds, answers)))
        request = PlanRequest("tiny", "tiny", "m", "1", opened, goldens, "fp32", (), room.Options(), kind.facts)
        bundle = tmp_path / "bundle"
        bundle.mkdir()
        plan: Plan = room.plan(request)
        room.build(plan, Stage(bundle, path, goldens))
        rules = dict.fromkeys(names, RULE)
        golden_store.write(bundle / "golden", goldens, rules, policy="p", precision="fp32", excluded={})
        cases = [{"name": "good", "passed": True}, {"name": "bad", "passed": False}]
        (bundle / "verdict.json").write_text(json.dumps({"cases": cases}))
        return DiagnosisJob("tiny", plan, path, bundle, "bad"), runtime

    assert this_host().cores
    return make


def late(first: int) -> Callable[[str], float]:
    """Every tensor of a chain from number ``first`` on is off by 1."""
    return lambda name: 1.0 if name == "y" or int(name[1:]) >= first else 0.0


@pytest.mark.parametrize("first", [0, 1, 37, 46, 47, 58])
def test_the_first_diverging_node_of_a_chain_of_sixty_is_found(failed, tmp_path: Path, first: int):
    job, runtime = failed(chain(tmp_path / "m.onnx", 60), late(first))
    finding = find_divergence(job)
    assert finding.text == f"first divergence: node Add 'n{first}', output 't{first}': max abs 1 is over 0.001"
    assert len(runtime.asked) <= 2, "sixty tensors take one round, or two where the first round skipped some"


def test_a_long_chain_is_narrowed_in_rounds(failed, tmp_path: Path):
    job, runtime = failed(chain(tmp_path / "m.onnx", 2000), late(1234))
    assert "node Add 'n1234', output 't1234'" in find_divergence(job).text
    assert all(len(names) <= diagnosis.PER_ROUND for names in runtime.asked)
    assert len(runtime.asked) <= 3


def test_a_fault_in_the_last_node_only_is_found(failed, tmp_path: Path):
    job, _ = failed(chain(tmp_path / "m.onnx", 60), lambda name: float(name == "y"))
    assert "node Add 'n59', output 'y'" in find_divergence(job).text


def test_where_no_tensor_differs_alone_optimisation_is_suspected(failed, tmp_path: Path):
    job, _ = failed(chain(tmp_path / "m.onnx", 60), lambda name: 0.0)
    assert "none of the intermediate tensors differs" in find_divergence(job).text


def test_tensors_of_constants_and_sequences_do_not_stop_the_search(failed, tmp_path: Path):
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32(2))),
        helper.make_node("SequenceConstruct", ["x"], ["s"], name="pack"),
        helper.make_node("Mul", ["x", "c"], ["m"], name="twice"),
        helper.make_node("Relu", ["m"], ["y"], name="act"),
    ]
    path = save(model(nodes, [value("x")], [value("y")]), tmp_path / "m.onnx")
    job, runtime = failed(path, lambda name: float(name in ("m", "y")))
    assert "first divergence: node Mul 'twice', output 'm'" in find_divergence(job).text
    assert all("c" not in names and "s" not in names for names in runtime.asked)


def test_a_node_that_feeds_a_branch_only_is_found(failed, tmp_path: Path):
    body = helper.make_graph([helper.make_node("Relu", ["m"], ["b"])], "body", [], [value("b", FLOAT, None)])
    nodes = [
        helper.make_node("Neg", ["x"], ["m"], name="turn"),
        helper.make_node("If", ["flag"], ["y"], name="branch", then_branch=body, else_branch=body),
    ]
    path = save(model(nodes, [value("x"), value("flag", BOOL, [])], [value("y")]), tmp_path / "m.onnx")
    job, _ = failed(path, lambda name: float(name in ("m", "y")), inputs={"x": X, "flag": np.array(True)})
    assert "node Neg 'turn'" in find_divergence(job).text


def test_the_tie_breaker_says_that_the_target_is_off(failed, tmp_path: Path):
    job, _ = failed(relu(tmp_path / "m.onnx"), lambda name: 1.0)
    assert break_tie(job).text == (
        "tie-breaker: the ONNX reference evaluator agrees with ONNX Runtime; Fast 1.2 is off"
    )


def test_the_tie_breaker_says_that_the_reference_is_off(failed, tmp_path: Path):
    job, _ = failed(relu(tmp_path / "m.onnx"), lambda name: 0.0, outputs={"y": X + 1})
    assert break_tie(job).text == (
        "tie-breaker: the ONNX reference evaluator agrees with Fast 1.2; ONNX Runtime is off"
    )


def test_the_tie_breaker_takes_no_side_where_all_three_differ(failed, tmp_path: Path):
    job, _ = failed(relu(tmp_path / "m.onnx"), lambda name: 1.0, outputs={"y": X - 1})
    assert break_tie(job).text == "tie-breaker: the ONNX reference evaluator agrees with neither side clearly"


Call = Callable[..., object]


def in_this_process(function: Call, job: DiagnosisJob, **_: object) -> object:
    return function(job)


def test_a_diagnosis_asks_both_questions_of_the_failing_case(failed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = relu(tmp_path / "m.onnx")
    job, _ = failed(path, lambda name: 1.0)
    monkeypatch.setattr(child, "call", in_this_process)
    told = diagnose(open_model(path), job.plan, job.bundle)
    assert [sentence.partition(":")[0] for sentence in told] == ["tie-breaker", "first divergence"]


def test_a_question_without_an_answer_hides_nothing(failed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = relu(tmp_path / "m.onnx")
    job, _ = failed(path, lambda name: 1.0)

    def call(function: Call, argument: DiagnosisJob, **_: object) -> object:
        if function is break_tie:
            raise BuildError("no such operator\nand a log")
        return function(argument)

    monkeypatch.setattr(child, "call", call)
    first, second = diagnose(open_model(path), job.plan, job.bundle)
    assert first == "asking the ONNX reference evaluator gave no answer: no such operator"
    assert second.startswith("first divergence: node Relu 'act'")


def test_a_model_too_large_for_probes_is_not_searched(failed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = relu(tmp_path / "m.onnx")
    job, _ = failed(path, lambda name: 1.0)
    monkeypatch.setattr(child, "call", in_this_process)
    huge: Model = replace(open_model(path), bytes=2_000_000_000)
    assert "was not searched for: the model is too large" in diagnose(huge, job.plan, job.bundle)[1]


def test_without_a_failing_case_there_is_nothing_to_diagnose(failed, tmp_path: Path):
    path = relu(tmp_path / "m.onnx")
    job, _ = failed(path, lambda name: 1.0)
    (job.bundle / "verdict.json").write_text('{"cases": []}')
    assert diagnose(open_model(path), job.plan, job.bundle) == ()


def test_a_near_miss_is_settled_by_the_evaluator_where_the_reference_is_off(failed, tmp_path: Path):
    path = chain(tmp_path / "m.onnx", 3)
    right = OrtSession(path, quantized=False).run({"x": X}, ["y"], "case")["y"]
    job, _ = failed(path, lambda name: 0.0, outputs={"y": np.add(right, np.float32(2e-3))})
    settled = settle(SettleJob("tiny", path, job.bundle, tmp_path / "settled"))
    assert settled.cases == ("bad",)
    good, bad = golden_store.read(tmp_path / "settled").cases
    np.testing.assert_array_equal(bad.outputs["y"], right)
    assert bad.outputs_from == "ONNX reference evaluator"
    np.testing.assert_array_equal(good.outputs["y"], np.add(right, np.float32(2e-3)))


def test_a_target_that_is_off_is_not_settled(failed, tmp_path: Path):
    job, _ = failed(chain(tmp_path / "m.onnx", 3), late(0))
    assert settle(SettleJob("tiny", job.model, job.bundle, tmp_path / "settled")).cases == ()
    assert not (tmp_path / "settled").exists()
