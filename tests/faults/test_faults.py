"""Faults on the smallest room there is, all of them; `make faults` breaks bundles of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.faults.files import FILE_FAULTS
from tests.faults.harness import Subject, allowed, file_fault, model_fault, other_faults, subject
from tests.faults.honest import honest, reordered, session, thresholds
from tests.faults.models import MODEL_FAULTS, witness

SAID_OF = {
    "NaN in one weight": "no finite value", "two outputs swapped": "'scores'", "an output of another dtype": "float64",
    "an output transposed": "shape",
}  # fmt: skip
"""Faults whose words must say what is wrong."""


@pytest.fixture
def good(tiny: str, tmp_path: Path) -> Subject:
    return subject(tiny, tmp_path / "good")


def test_there_are_many_faults_and_each_changes_the_witness() -> None:
    assert len(MODEL_FAULTS) + len(FILE_FAULTS) >= 50
    right = witness().SerializeToString()
    for fault, change in MODEL_FAULTS.items():
        proto = witness()
        change(proto)
        assert proto.SerializeToString() != right, fault


def test_every_model_fault_is_caught_by_its_answers(good: Subject, tmp_path: Path) -> None:
    for number, (fault, change) in enumerate(MODEL_FAULTS.items()):
        outcome = model_fault(good, fault, change, tmp_path / str(number))
        assert outcome.caught and outcome.words, fault
        assert SAID_OF.get(fault, "") in outcome.words


def test_what_a_tolerance_allows_is_told_from_what_it_misses(good: Subject) -> None:
    fault = witness()
    MODEL_FAULTS["a layer's weights scaled by 1.01"](fault)
    assert allowed(good, witness()) and not allowed(good, fault)
    golden = good.bundle / "golden/golden.json"
    document = json.loads(golden.read_text(encoding="utf-8"))
    for rule in document["outputs"]:
        rule["tolerance"] = {"max_abs": None, "scaled": 0.1, "cosine": 0.99, "top1": None}
    golden.write_text(json.dumps(document), encoding="utf-8")
    assert allowed(good, fault)


def test_every_harmed_file_is_caught_and_named(good: Subject, tmp_path: Path) -> None:
    for number, (fault, harm) in enumerate(FILE_FAULTS.items()):
        outcome = file_fault(good, fault, harm, tmp_path / str(number))
        assert outcome.caught and outcome.words, (fault, outcome.words)


def test_archives_and_forged_verdicts_are_caught(good: Subject, tmp_path: Path) -> None:
    found = list(other_faults(good, tmp_path / "other"))
    assert [outcome.fault for outcome in found] == [
        "the archive cut", "an archive that leaves its folder", "a forged verdict",
    ]  # fmt: skip
    assert all(outcome.caught and outcome.words for outcome in found), found


def test_what_is_honest_raises_no_alarm(tmp_path: Path) -> None:
    found = list(honest(tmp_path, 20))
    assert len(found) == 60
    assert [name for name, passed, _ in found if not passed] == []


def test_the_reordered_witness_differs_in_the_last_bits_only(tmp_path: Path) -> None:
    onnx.save(witness(), tmp_path / "m.onnx")
    feeds = {"image": np.random.default_rng(0).random((2, 3, 16, 16), np.float32)}
    one, other = session(witness(), optimised=False)(feeds), session(reordered(3), optimised=False)(feeds)
    np.testing.assert_allclose(one["levels"], other["levels"], rtol=1e-5, atol=1e-6)


def test_our_policy_sees_smaller_faults_than_the_usual_rules(tmp_path: Path) -> None:
    found = {each.rule: each.smallest for each in thresholds(tmp_path)}
    fp32, loose, psnr = found["packager, fp32"], found["max abs 1e-3"], found["PSNR 30 dB"]
    assert fp32 is not None and loose is not None and psnr is not None
    assert fp32 < loose < psnr
    allclose = found["numpy.allclose (rtol 1e-5, atol 1e-8)"]
    assert allclose is not None and allclose < fp32, "it sees rounding too, and would cry wolf"
