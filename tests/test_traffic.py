"""Requests made of goldens, asked at the same time, compared by the bundle's own tolerances; servers that end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from packager import golden_store, parity
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import open_model
from packager.policy import rules_for
from packager.traffic import difference, in_parallel, requests_of, stop
from tests.builders import relu


@pytest.fixture
def golden(tmp_path: Path) -> parity.Golden:
    """Two cases of two rows and one row of ``y = Relu(x)``."""
    model = open_model(relu(tmp_path / "m.onnx"))
    two, one = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([[7, 8, 9]], np.float32)
    cases = tuple(GoldenCase(name, {"x": x}, {"y": x}, "given", "reference") for name, x in (("a", two), ("b", one)))
    rules = rules_for("default-1", "fp32", model)
    golden_store.write(tmp_path / "golden", GoldenSet(cases), rules, policy="default-1", precision="fp32", excluded={})
    return parity.read_golden(tmp_path / "golden")


def test_requests_are_rows_where_they_may_be_merged_and_cases_where_not(golden: parity.Golden):
    rows = requests_of(golden, True, 4)
    assert [row["x"][0, 0] for row in rows] == [1, 4, 7, 1]
    assert all(row["x"].shape == (1, 3) for row in rows)
    assert [case["x"].shape for case in requests_of(golden, False, 3)] == [(2, 3), (1, 3), (2, 3)]


def test_all_are_asked_at_the_same_time(golden: parity.Golden):
    meeting = Barrier(3, timeout=30)

    def ask(feeds: Mapping[str, Array]) -> dict[str, Array]:
        meeting.wait()  # breaks unless the others are asked too
        return {"y": feeds["x"]}

    answers = in_parallel(ask, requests_of(golden, True, 3))
    assert [answer["y"][0, 0] for answer in answers] == [1, 4, 7]


def test_a_difference_is_one_by_the_bundles_tolerances(golden: parity.Golden):
    y = np.array([[1, 2, 3]], np.float32)
    assert difference({"y": y}, {"y": y + np.float32(1e-6)}, golden) == ""
    assert "'y'" in difference({"y": y}, {"y": y + 1}, golden)
    assert difference({"y": y}, {"y": y[0]}, golden) == "output 'y' has shape [1, 3] and [3]"
    assert difference({"y": y[:0]}, {"y": y[:0]}, golden) == ""


def test_a_server_that_does_not_listen_is_ended_by_force():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert stop(process, 0.2) == -9
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert stop(process, 20) == -15
