"""Fixtures that several test modules share: a cache of the test's own, the tiny third-party room, the real models."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packager import room
from packager.child import QUIET

os.environ.update(QUIET)  # before a test imports ONNX Runtime in this process
os.environ.setdefault(
    "PACKAGER_RUNTIME_DIR", str(Path(__file__).parents[1] / ".runtimes")
)  # fetched once for all tests

ROOMS = Path(__file__).with_name("rooms")
CORPUS = Path(__file__).parents[1] / ".corpus"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has an empty cache, so that nothing it sees was built by another."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACKAGER_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kind of a third party's room, found by its entry point as an installed distribution's would be."""
    monkeypatch.setattr(sys, "path", [str(ROOMS), *sys.path])
    room.kinds.cache_clear()
    yield "tiny"
    room.kinds.cache_clear()
    for name in [name for name in sys.modules if name == "tiny" or name.startswith("tiny.")]:
        del sys.modules[name]


@pytest.fixture
def corpus() -> Path:
    """The folder of real trained models that ``make test`` fetches.

    Absent models fail the test rather than skip it: `make test` and CI fetch them first.
    """
    if not CORPUS.is_dir():
        pytest.fail("the real models are absent; run `python examples/fetch.py .corpus` (make test does)")
    return CORPUS


_skipped: list[str] = []
_optional: set[str] = set()
OPTIONAL = "Skipped: not required: "
"""How the reason of a skip begins that doesn't fail continuous integration: a toolchain no machine is asked to have."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what was skipped of the tests that drive real runtimes."""
    if report.skipped and report.nodeid.startswith("tests/targets/"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if reason.startswith(OPTIONAL):
            _optional.add(reason.removeprefix(OPTIONAL))
        else:
            _skipped.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In continuous integration every kind's runtime must be driven: a skip there is a failure, and is named."""
    if os.environ.get("CI") and _skipped and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which skips made the run fail, and what was left out for want of something optional."""
    for reason in sorted(_optional):
        terminalreporter.write_line(f"left out: {reason}", yellow=True)
    if os.environ.get("CI"):
        for line in _skipped:
            terminalreporter.write_line(f"must not be skipped in CI: {line}", red=True)
