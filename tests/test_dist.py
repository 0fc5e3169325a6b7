"""The output folder: archives that are the same from run to run, and indexes that tools can read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packager.archives import unpacked
from packager.dist import archive, junit, write_indexes
from packager.results import Report, Status, TargetResult
from packager.verdict import Verdict

HOSTILE = "a<b>&\"'\x00\x1b\x0b\ud800\ufffe]]> 名前\nsecond line"
PASSED = Verdict("passed", "runtime", "", "Fast", "1.2", "CPU", 3, 1e-6, 1e-7, 1.0, None, "default-1", "fp32")


def result(status: Status = "passed", code: int = 0, **more) -> TargetResult:
    return TargetResult("edge", "some", "fp32", status, code, **more)


def report(*targets: TargetResult, name: str = "ranker") -> Report:
    return Report("0.1.0", "ranker.onnx", name, "1.4.0", "sha256:0", 17, "dist", (), None, targets, 1.5)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    for name, mode in (("model.bin", 0o644), ("run.sh", 0o755), ("golden/名前.json", 0o600), ("empty", 0o444)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"" if name == "empty" else name.encode() * 1000)
        (folder / name).chmod(mode)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/x.pyc").write_bytes(b"x")
    return folder


@pytest.mark.parametrize("suffix", ["tar.gz", "zip"])
def test_an_archive_does_not_depend_on_when_and_how_files_were_made(bundle: Path, tmp_path: Path, suffix: str):
    archive(bundle, tmp_path / f"one.{suffix}", "ranker-1.4.0-edge")
    for path in sorted(bundle.rglob("*"), reverse=True):
        os.utime(path, (86400 * 365, 86400 * 365))
        if path.is_file():
            path.chmod(path.stat().st_mode | 0o060)
    archive(bundle, tmp_path / f"two.{suffix}", "ranker-1.4.0-edge")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", ["tar.gz", "zip"])
def test_an_archive_unpacks_to_the_folder_it_was_made_of(bundle: Path, tmp_path: Path, suffix: str):
    archive(bundle, tmp_path / f"a.{suffix}", "ranker-1.4.0-edge")
    with unpacked(tmp_path / f"a.{suffix}") as folder:
        assert folder.name == "ranker-1.4.0-edge"
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {
        name: (bundle / name).read_bytes() for name in ("model.bin", "run.sh", "golden/名前.json", "empty")
    }


def test_a_tar_has_no_owner_and_no_time(bundle: Path, tmp_path: Path):
    archive(bundle, tmp_path / "a.tar.gz", "top")
    assert (tmp_path / "a.tar.gz").read_bytes()[4:8] == b"\0\0\0\0", "gzip's own time"
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in members} == {
        (0, 0, "", "", 0)
    }
    assert {member.name: member.mode for member in members} == {
        "top/model.bin": 0o644, "top/run.sh": 0o755, "top/golden/名前.json": 0o644, "top/empty": 0o644,
    }  # fmt: skip


def test_a_zip_has_modes_and_the_earliest_time(bundle: Path, tmp_path: Path):
    archive(bundle, tmp_path / "a.zip", "top")
    with zipfile.ZipFile(tmp_path / "a.zip") as zipped:
        infos = {info.filename: info for info in zipped.infolist()}
        assert zipped.testzip() is None
    assert list(infos) == sorted(infos)
    assert {info.date_time for info in infos.values()} == {(1980, 1, 1, 0, 0, 0)}
    assert stat.S_IMODE(infos["top/run.sh"].external_attr >> 16) == 0o755
    assert stat.S_IMODE(infos["top/model.bin"].external_attr >> 16) == 0o644


def suite(text: str) -> ElementTree.Element:
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n')
    return ElementTree.fromstring(text.encode("utf-8"))  # noqa: S314 - our own text


def test_junit_counts_and_explains():
    failed = result("failed", 6, message="output 'y' is off\nmore", hint="look", diagnosis=("first divergence: n",))
    found = suite(
        junit(report(result(verdict=PASSED), failed, result("unverified", message="off"), result("missing", 4)))
    )
    assert {key: found.get(key) for key in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "4", "failures": "2", "errors": "0", "skipped": "1", "time": "1.500",
    }  # fmt: skip
    failure = found.findall("testcase")[1].find("failure")
    assert failure is not None and failure.get("message") == "output 'y' is off" and failure.get("type") == "failed"
    assert failure.text == "output 'y' is off\nmore\nfirst divergence: n\nhint: look"
    assert [case.get("classname") for case in found] == ["packager.some"] * 4
    assert found.findtext("testcase/system-out") == "level runtime, Fast 1.2, max abs 1e-06"
    last = found.findall("testcase")[3].find("failure")
    assert last is not None and last.get("message") == "missing"


@given(st.text() | st.just(HOSTILE))
def test_junit_is_well_formed_whatever_a_model_is_called(text: str):
    failed = result("error", 5, message=text, hint=text, diagnosis=(text,))
    found = suite(junit(report(failed, result("unverified", message=text), name=text)))
    assert found.get("failures") == "1" and found.get("skipped") == "1"


def test_junit_keeps_what_xml_can_hold():
    failure = suite(junit(report(result("error", 5, message=HOSTILE)))).find("testcase/failure")
    assert failure is not None
    assert failure.text == "a<b>&\"'\ufffd\ufffd\ufffd\ufffd\ufffd]]> 名前\nsecond line"


def test_indexes_list_the_archives_of_this_run(tmp_path: Path):
    packed = result(verdict=PASSED, bundle="b", bundle_digest="sha256:1", bytes=7, archive="b.tar.gz",
                    archive_sha256="f" * 64, archive_bytes=9)  # fmt: skip
    lost = result("error", 5, message="no")
    write_indexes(tmp_path, report(packed, lost))
    artifacts = json.loads((tmp_path / "artifacts.json").read_text())
    assert artifacts["schema"] == "packager.artifacts/1"
    assert [(item["archive"], item["level"], item["max_abs"]) for item in artifacts["artifacts"]] == [
        ("b.tar.gz", "runtime", 1e-6)
    ]
    own = hashlib.sha256((tmp_path / "artifacts.json").read_bytes()).hexdigest()
    assert (tmp_path / "checksums.txt").read_text() == f"{'f' * 64}  b.tar.gz\n{own}  artifacts.json\n"
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["schema"], document["exit_code"]) == ("packager.report/1", 5)
    assert "FAILED to build" in (tmp_path / "report.html").read_text()


def test_reports_of_numbers_that_json_lacks_are_json(tmp_path: Path):
    verdict = Verdict(
        "failed", "runtime", "", "Fast", "1", "CPU", 1, float("inf"), float("nan"), None, None, "p", "fp32"
    )
    write_indexes(tmp_path, report(result("failed", 6, verdict=verdict, bundle="rejected/b")))
    document = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert document["targets"][0]["verdict"]["max_abs"] == "inf"
