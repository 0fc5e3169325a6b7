"""Verification: every case executed and judged, failures of a case kept apart from failures of the bundle."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packager import child, golden_store, verifying
from packager.bundle import Bundle, open_bundle, seal
from packager.errors import ToolchainMissing, UsageError, VerificationError
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import open_model
from packager.parity import OutputRule, Tolerance
from packager.room import Missing, PlanRequest, RuntimeInfo, Stage, kind_named
from packager.verifying import VerifyJob, execute, verify_folder
from tests.builders import relu

X = np.array([[-1.0, 2.0, 3.0]], np.float32)


@pytest.fixture
def bundle(tiny: str, tmp_path: Path) -> Bundle:
    """A sealed bundle of ``y = Relu(x)`` with two golden cases."""
    path = relu(tmp_path / "m.onnx")
    made = importlib.import_module("tiny")
    goldens = GoldenSet(
        tuple(GoldenCase(name, {"x": x}, {"y": np.maximum(x, 0)}) for name, x in (("one", X), ("two", X * 2)))
    )
    kind = kind_named(tiny)
    request = PlanRequest("edge", "tiny", "m", "1", open_model(path), goldens, "fp32", (), made.Options(), kind.facts)
    folder = tmp_path / "bundle"
    folder.mkdir()
    plan = made.plan(request)
    made.build(plan, Stage(folder, path, goldens))
    rules = {"y": OutputRule(Tolerance(1e-3, 1e-4))}
    golden_store.write(folder / "golden", goldens, rules, policy="mine-1", precision="fp32", excluded={})
    return seal(folder, plan, {}, kind.facts.roles)


def job(bundle: Bundle) -> VerifyJob:
    return VerifyJob(bundle.folder, bundle.digest, bundle.folder / "verdict.json")


def answering(monkeypatch: pytest.MonkeyPatch, run: Callable[[Mapping[str, Array]], dict[str, Array]]) -> None:
    """Let the room's runner answer so."""

    class Runner:
        info = RuntimeInfo("Fast", "1.2", "CPU", "proxy", "a stand-in", (("threads", "2"),))

        def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
            return run(feeds)

    @contextmanager
    def runner(folder: Path) -> Iterator[Runner]:
        yield Runner()

    monkeypatch.setattr(importlib.import_module("tiny"), "runner", runner)


def test_every_case_is_run_and_the_verdict_written(bundle: Bundle):
    verdict = execute(job(bundle))
    assert (verdict.status, verdict.level, verdict.cases, verdict.max_abs) == ("passed", "runtime", 2, 0.0)
    assert (verdict.policy, verdict.precision, verdict.failures) == ("mine-1", "fp32", ())
    document = json.loads((bundle.folder / "verdict.json").read_text())
    assert document["status"] == "passed" and document["bundle_digest"] == bundle.digest
    assert [case["name"] for case in document["cases"]] == ["one", "two"]
    assert document["host"]["cores"] >= 1 and document["policy"] == {"name": "mine-1", "precision": "fp32"}


def test_the_verdict_says_what_executed_and_how_honest_that_is(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch, lambda feeds: {"y": np.maximum(feeds["x"], 0)})
    verdict = execute(job(bundle))
    assert (verdict.runtime, verdict.version, verdict.device) == ("Fast", "1.2", "CPU")
    assert (verdict.level, verdict.level_reason) == ("proxy", "a stand-in")
    document = json.loads((bundle.folder / "verdict.json").read_text())
    assert document["runtime"] == {"name": "Fast", "version": "1.2", "device": "CPU", "threads": "2"}
    assert document["level_reason"] == "a stand-in"


def test_a_bundle_that_another_machine_has_to_finish_is_a_recipe(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    class Runner:
        info = RuntimeInfo("Fast", "", "", "none", "built elsewhere")

        def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
            raise AssertionError("nothing may be run")

    @contextmanager
    def runner(folder: Path) -> Iterator[Runner]:
        yield Runner()

    monkeypatch.setattr(importlib.import_module("tiny"), "runner", runner)
    verdict = execute(job(bundle))
    assert (verdict.status, verdict.level, verdict.level_reason, verdict.cases) == (
        "recipe",
        "none",
        "built elsewhere",
        0,
    )
    assert not verdict.executed
    document = json.loads((bundle.folder / "verdict.json").read_text())
    assert (document["schema"], document["status"]) == ("packager.verdict/1", "recipe")


def only_the_second(feeds: Mapping[str, Array]) -> dict[str, Array]:
    if feeds["x"][0, 1] == 4:
        raise MemoryError("no\nroom")
    return {"y": np.maximum(feeds["x"], 0)}


def refuses(feeds: Mapping[str, Array]) -> dict[str, Array]:
    raise VerificationError("it does not fit", "never")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda feeds: {"y": feeds["x"]}, "max abs 2 is over 0.001"),
        (lambda feeds: {}, "y"),
        (lambda feeds: {"y": np.maximum(feeds["x"], 0).astype(np.float64)}, "float64"),
        (lambda feeds: {"y": np.maximum(feeds["x"], 0)[0]}, "rank differs"),
        (lambda feeds: {"y": feeds["x"] * np.float32("nan")}, "NaN"),
        (only_the_second, "the runtime failed: MemoryError: no room"),
        (refuses, "the runtime failed: it does not fit"),
    ],
)
def test_a_wrong_or_missing_answer_fails(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, run, words: str):
    answering(monkeypatch, run)
    verdict = execute(job(bundle))
    assert verdict.status == "failed" and verdict.cases == 2
    assert words in " ".join(verdict.failures)
    assert json.loads((bundle.folder / "verdict.json").read_text())["status"] == "failed"


def test_failures_in_the_summary_are_bounded(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "MAX_FAILURES", 1)
    answering(monkeypatch, refuses)
    assert len(execute(job(bundle)).failures) == 1
    assert len(json.loads((bundle.folder / "verdict.json").read_text())["failures"]) == 3


def test_a_bundle_that_changes_while_it_is_verified_is_refused(bundle: Bundle):
    with pytest.raises(VerificationError, match="changed while it was verified"):
        execute(VerifyJob(bundle.folder, "sha256:other", bundle.folder / "verdict.json"))


def test_goldens_that_cannot_be_read_are_told(bundle: Bundle):
    (bundle.folder / "golden/golden.json").write_text("{")
    with pytest.raises(VerificationError, match=r"golden\.json"):
        execute(job(bundle))


def test_damage_is_told_before_anything_runs(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("must not run")

    monkeypatch.setattr(child, "call", never)
    (bundle.folder / "model.onnx").write_bytes(b"x")
    (bundle.folder / "options.json").unlink()
    with pytest.raises(VerificationError) as caught:
        verify_folder(open_bundle(bundle.folder))
    assert caught.value.message.count("\n") == 2
    assert "model.onnx (model) has 1 bytes" in caught.value.message
    assert "options.json (file) is missing" in caught.value.message


def test_a_missing_runtime_is_no_failure_of_the_bundle(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.import_module("tiny"), "missing", lambda host: [Missing("program x", "get x")])
    with pytest.raises(ToolchainMissing, match="can't verify here: program x is missing") as caught:
        verify_folder(bundle)
    assert caught.value.hint == "get x" and caught.value.exit_code == 4


def test_a_folder_is_verified_in_a_child_and_gets_a_fresh_verdict(bundle: Bundle):
    (bundle.folder / "extra").write_text("")
    verdict, warnings = verify_folder(bundle)
    assert verdict.status == "passed" and warnings == ("extra is not part of the bundle",)
    assert json.loads((bundle.folder / "verdict.json").read_text())["bundle_digest"] == bundle.digest


def test_a_folder_that_cannot_be_written_keeps_its_old_verdict(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(verifying, "write_text", refuse)
    verdict, warnings = verify_folder(bundle)
    assert verdict.status == "passed" and not (bundle.folder / "verdict.json").exists()
    assert warnings == ("verdict.json was not refreshed: Permission denied",)


def test_an_unknown_kind_is_told(bundle: Bundle):
    path = bundle.folder / "bundle.json"
    path.write_text(path.read_text().replace('"kind": "tiny"', '"kind": "gone"'))
    with pytest.raises(UsageError, match="no target kind 'gone'"):
        verify_folder(open_bundle(bundle.folder))


def test_a_running_service_is_asked_in_place_of_a_runtime_here(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.import_module("tiny"), "missing", lambda host: [Missing("an SDK", "buy one")])
    with pytest.raises(ToolchainMissing):
        verify_folder(bundle)
    verdict, warnings = verify_folder(bundle, "tiny://here")
    assert (verdict.status, verdict.device, warnings) == ("passed", "tiny://here", ())
    assert json.loads((bundle.folder / "verdict.json").read_text())["runtime"]["device"] == "tiny://here"
    with pytest.raises(UsageError, match="is no tiny service"):
        verify_folder(bundle, "here")


def test_a_kind_without_services_takes_no_endpoint(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    kind = kind_named("tiny")
    monkeypatch.setattr(
        verifying, "kind_named", lambda name: replace(kind, facts=kind.facts.model_copy(update={"endpoint": None}))
    )
    with pytest.raises(UsageError, match="can't be verified against a service"):
        verify_folder(bundle, "tiny://here")
