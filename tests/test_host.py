"""The machine as verdicts record it: CPU features where they can be read, and no guess where they can't."""

from __future__ import annotations

import os
import platform
import runpy
from pathlib import Path

import pytest

from packager import host

INTEL = (
    "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu sse4_2 avx2 avx512_vnni madeup\n\n"
    "processor\t: 1\nmodel name\t: Other\nflags\t\t: amx_int8\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd40\n"


def described(monkeypatch: pytest.MonkeyPatch, text: str | None) -> host.Host:
    def read(path: Path, **_: object) -> str:
        assert path == Path("/proc/cpuinfo")
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    return host.this_host.__wrapped__()


def test_features_that_change_arithmetic_are_read_from_the_first_cpu(monkeypatch: pytest.MonkeyPatch):
    found = described(monkeypatch, INTEL)
    assert found.cpu == "Some CPU @ 2.0GHz" and found.features == ("avx2", "avx512_vnni", "sse4_2")


def test_arm_features_are_read_too(monkeypatch: pytest.MonkeyPatch):
    assert described(monkeypatch, ARM).features == ("asimd", "asimddp", "i8mm")


@pytest.mark.parametrize("text", [None, "", "nothing of the sort"])
def test_where_features_cannot_be_read_there_are_none(monkeypatch: pytest.MonkeyPatch, text: str | None):
    found = described(monkeypatch, text)
    assert found.features == () and found.cpu == platform.processor()
    assert (found.system, found.machine, found.cores) == (platform.system(), platform.machine(), os.cpu_count())
    assert found.python == platform.python_version()


def test_this_machine_is_described_once():
    assert host.this_host() is host.this_host()


def test_the_self_check_of_bundles_knows_the_same_features():
    script = Path(host.__file__).parents[1] / "templates/common/verify.py"
    assert runpy.run_path(str(script))["FEATURES"] == frozenset(host.FEATURES)
