"""A few kills and small disks, at moments spread over a build; `make fuzz` draws them at random."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.fuzz.killing import Undisturbed, can_starve, killed, starved, undisturbed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

TARGETS = ("openvino", "cpu")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("calm") / "build", TARGETS)


@pytest.mark.parametrize(
    ("how", "share"),
    [(signal.SIGKILL, 0.3), (signal.SIGKILL, 0.85), (signal.SIGTERM, 0.6)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_killed_build_leaves_nothing_but_whole_bundles(
    tmp_path: Path, calm: Undisturbed, how: signal.Signals, share: float
):
    assert killed(tmp_path / "build", calm, how, share * calm.seconds) == []


@pytest.mark.parametrize(("kilobytes", "starve"), [(300, ("work/dist",)), (60, ("tmp", "cache"))])
def test_a_full_disk_is_told_and_leaves_nothing_but_whole_bundles(
    tmp_path: Path, calm: Undisturbed, kilobytes: int, starve: tuple[str, ...]
):
    reason = can_starve(tmp_path / "probe")
    if reason:
        pytest.skip(f"no small disk can be made here: {reason}")
    assert starved(tmp_path / "build", calm, kilobytes, starve) == []
