"""File work: whole or not at all, never outside of its folder, and its failures in plain words."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import math
import os
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packager import files
from packager.errors import PackagerError, StorageError, UsageError, VerificationError


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_text_is_written_whole_with_lf(tmp_path: Path):
    files.write_text(tmp_path / "new/deep/a.txt", "one\ntwo 名前\n")
    assert (tmp_path / "new/deep/a.txt").read_bytes() == "one\ntwo 名前\n".encode()
    assert stat.S_IMODE((tmp_path / "new/deep/a.txt").stat().st_mode) == 0o644
    assert listing(tmp_path) == ["new", "new/deep", "new/deep/a.txt"]


@pytest.mark.parametrize("text", ["new", "\ud800 can't be encoded"])
def test_a_write_that_fails_leaves_the_old_text_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def refuse(*_: object) -> Path:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises((OSError, UnicodeEncodeError)):
        files.write_text(path, text)
    assert path.read_text() == "old" and listing(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("number", "words", "hint"),
    [
        (errno.ENOSPC, "no space left on the device (/out/a)", "free some space"),
        (errno.EDQUOT, "no space left on the device (/out/a)", "free some space"),
        (errno.EACCES, "Permission denied (/out/a)", "permissions"),
        (errno.ENOENT, "No such file or directory (/out/a)", "check the folder"),
    ],
)
def test_write_errors_say_what_was_being_done(number: int, words: str, hint: str):
    with pytest.raises(StorageError) as caught, files.storage_errors("archiving"):
        raise OSError(number, os.strerror(number), "/out/a")
    assert caught.value.message == f"archiving: {words}"
    assert hint in str(caught.value.hint) and caught.value.exit_code == 5


def test_a_write_error_without_a_number_still_says_something():
    assert files.storage_error("placing", OSError("odd")).message == "placing: odd"


def test_an_output_folder_is_made_and_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert files.writable_folder(Path("a/b")) == tmp_path / "a/b"
    assert listing(tmp_path) == ["a", "a/b"]


def test_an_output_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="exists and is not a folder"):
        files.writable_folder(tmp_path / "file")
    with pytest.raises(UsageError, match="can't write there"):
        files.writable_folder(tmp_path / "file/below")

    def no_space(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_space)
    with pytest.raises(StorageError, match="no space left"):
        files.writable_folder(tmp_path / "other")


def test_json_is_canonical_and_has_no_infinities():
    text = files.to_json({"b": math.inf, "a": [math.nan, (-math.inf, 1.5)], "名": "前"})
    assert (
        text
        == '{\n  "b": "inf",\n  "a": [\n    "nan",\n    [\n      "-inf",\n      1.5\n    ]\n  ],\n  "名": "前"\n}\n'
    )
    assert json.loads(text)["a"][1] == ["-inf", 1.5]


def test_a_copy_is_no_hard_link(tmp_path: Path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(os.urandom(100_000))
    files.clone_file(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_ino != source.stat().st_ino and source.stat().st_nlink == 1
    target.write_bytes(b"edited")
    assert source.stat().st_size == 100_000


def test_a_copied_tree_keeps_what_is_executable(tmp_path: Path):
    (tmp_path / "a/deep").mkdir(parents=True)
    for name, mode in (("run.sh", 0o755), ("deep/data", 0o640)):
        (tmp_path / "a" / name).write_text(name)
        (tmp_path / "a" / name).chmod(mode)
    files.clone_tree(tmp_path / "a", tmp_path / "b")
    assert listing(tmp_path / "b") == ["deep", "deep/data", "run.sh"]
    for name, mode in (("run.sh", 0o755), ("deep/data", 0o640)):
        assert (tmp_path / "b" / name).read_text() == name
        assert stat.S_IMODE((tmp_path / "b" / name).stat().st_mode) == mode
    with pytest.raises(FileExistsError):
        files.clone_tree(tmp_path / "a", tmp_path / "b")


def test_files_are_listed_sorted_without_byte_code(tmp_path: Path):
    for name in ("b/z", "a", "b/__pycache__/x.pyc", "B"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [str(path) for path in files.list_files(tmp_path)] == ["B", "a", "b/z"]


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / text).write_text(text)
    return path


def test_a_folder_is_replaced_whole(tmp_path: Path):
    final = folder_with(tmp_path / "final", "old")
    folder_with(tmp_path / ".old-final", "older leavings")
    files.replace_folder(folder_with(tmp_path / "new", "new"), final)
    assert listing(tmp_path) == ["final", "final/new"]


def test_a_file_or_a_link_in_the_way_is_replaced_but_not_followed(tmp_path: Path):
    elsewhere = folder_with(tmp_path / "elsewhere", "kept")
    (tmp_path / "final").symlink_to(elsewhere)
    files.replace_folder(folder_with(tmp_path / "new", "new"), tmp_path / "final")
    assert not (tmp_path / "final").is_symlink() and listing(elsewhere) == ["kept"]
    (tmp_path / "file").write_text("")
    files.replace_folder(folder_with(tmp_path / "new", "new"), tmp_path / "file")
    assert listing(tmp_path / "file") == ["new"]


def test_removing_what_is_not_there_is_no_error(tmp_path: Path):
    files.remove_tree(tmp_path / "absent")
    files.remove_tree(folder_with(tmp_path / "here", "x"))
    assert listing(tmp_path) == []


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), link
    return info, data


def tar(path: Path, *members: Member) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for info, data in members:
            packed.addfile(info, io.BytesIO(data))
    return path


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    return path


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_an_archive_is_unpacked_and_tidied_away(tmp_path: Path, suffix: str):
    path = tmp_path / f"b{suffix}"
    if suffix == ".zip":
        zipped(path, **{"b/": b"", "b/a": b"1", "b/deep/c": b"22"})
    else:
        tar(path, member("b", kind=tarfile.DIRTYPE), member("b/a", b"1"), member("b/deep/c", b"22"))
    with files.unpacked(path) as folder:
        assert folder.name == "b" and listing(folder) == ["a", "deep", "deep/c"]
        assert (folder / "deep/c").read_bytes() == b"22"
    assert not folder.exists()


HOSTILE: dict[str, Member] = {
    "absolute": member("/evil", b"x"),
    "parent": member("../evil", b"x"),
    "parent inside": member("b/../../evil", b"x"),
    "backslash": member("b\\..\\..\\evil", b"x"),
    "symbolic link": member("b/link", kind=tarfile.SYMTYPE, link="/etc"),
    "symbolic link inside": member("b/link", kind=tarfile.SYMTYPE, link="good"),
    "hard link inside": member("b/link", kind=tarfile.LNKTYPE, link="b/good"),
    "hard link": member("b/link", kind=tarfile.LNKTYPE, link="/etc/passwd"),
    "device": member("b/null", kind=tarfile.CHRTYPE),
    "block device": member("b/disk", kind=tarfile.BLKTYPE),
    "pipe": member("b/pipe", kind=tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_member_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    inside = tmp_path / "temporary"
    inside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(inside))
    path = tar(tmp_path / "b.tar.gz", member("b/good", b"x"), HOSTILE[what])
    with pytest.raises(VerificationError) as caught, files.unpacked(path):
        raise AssertionError("must not be reached")
    assert HOSTILE[what][0].name in caught.value.message
    assert listing(tmp_path) == ["b.tar.gz", "temporary"]


@pytest.mark.parametrize("name", ["/evil", "../evil", "b/../../evil", "b\\..\\evil"])
def test_a_hostile_zip_member_is_refused_and_named(tmp_path: Path, name: str):
    path = zipped(tmp_path / "b.zip", **{"b/good": b"x", name: b"x"})
    with pytest.raises(VerificationError, match="leaves the archive's folder"), files.unpacked(path):
        raise AssertionError("must not be reached")


def test_a_link_in_a_zip_becomes_a_plain_file(tmp_path: Path):
    info = zipfile.ZipInfo("b/link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as packed:
        packed.writestr(info, "/etc/passwd")
    with files.unpacked(tmp_path / "b.zip") as folder:
        assert not (folder / "link").is_symlink() and (folder / "link").read_text() == "/etc/passwd"


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
@pytest.mark.parametrize("limit", ["MAX_UNPACKED_BYTES", "MAX_UNPACKED_FILES"])
def test_a_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, limit: str
):
    monkeypatch.setattr(files, limit, 1000 if limit == "MAX_UNPACKED_BYTES" else 2)
    contents = {"b/1": bytes(400), "b/2": bytes(400), "b/3": bytes(400)}
    path = tmp_path / f"b{suffix}"
    if suffix == ".zip":
        zipped(path, **contents)
    else:
        tar(path, *(member(name, data) for name, data in contents.items()))
    with pytest.raises(VerificationError, match="unpacks to more than"), files.unpacked(path):
        raise AssertionError("must not be reached")


def test_a_zip_that_lies_about_its_size_is_not_unpacked_beyond_it(tmp_path: Path):
    data = bytearray(zipped(tmp_path / "b.zip", **{"b/big": bytes(1_000_000)}).read_bytes())
    size = (1_000_000).to_bytes(4, "little")
    while size in data:
        data[data.index(size) : data.index(size) + 4] = (10).to_bytes(4, "little")
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(VerificationError, match="not a whole archive"), files.unpacked(tmp_path / "b.zip"):
        raise AssertionError("must not be reached")


@pytest.mark.parametrize(
    "members", [(), (member("a", b"file, no folder"),), (member("a/x", b""), member("b/x", b""))], ids=len
)
def test_an_archive_holds_exactly_one_folder(tmp_path: Path, members: tuple[Member, ...]):
    with (
        pytest.raises(VerificationError, match="exactly one folder"),
        files.unpacked(tar(tmp_path / "b.tar.gz", *members)),
    ):
        raise AssertionError("must not be reached")


def whole_tar() -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as made,
    ):
        for name in ("b/one", "b/two"):
            info, data = member(name, bytes(range(256)) * 8)
            made.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def whole_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in ("b/one", "b/two"):
            packed.writestr(zipfile.ZipInfo(name), bytes(range(256)) * 8, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


@pytest.mark.parametrize(("suffix", "make"), [(".tar.gz", whole_tar), (".zip", whole_zip)])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_archive_is_never_a_traceback(
    tmp_path: Path, suffix: str, make: Callable[[], bytes], data: st.DataObject
):
    whole = bytearray(make())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / f"b{suffix}"
    path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), len(whole), len(whole) // 2]))])
    with contextlib.suppress(PackagerError), files.unpacked(path) as folder:
        assert folder.is_dir()
