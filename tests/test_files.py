"""File work: whole or not at all, never outside of its folder, and its failures in plain words."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from packager import files
from packager.errors import StorageError, UsageError


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


def test_a_name_too_long_is_nothing_that_is_there(tmp_path: Path):
    for asked in (files.exists, files.is_file, files.is_folder, files.is_link):
        assert not asked(tmp_path / ("n" * 5000))
    assert files.exists(tmp_path) and files.is_folder(tmp_path) and not files.is_file(tmp_path)


def test_a_folder_is_never_seen_half_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if killed before the first file went
    files.remove_folder(folder_with(tmp_path / "bundle", "weights"))
    assert listing(tmp_path) == [".old-bundle", ".old-bundle/weights"]


def test_a_full_disk_is_named_by_who_knows_it(tmp_path: Path):
    named = files.storage_error("sealing", OSError(errno.ENOSPC, "", "/out/a"), tmp_path)
    assert (named.message, named.hint) == (
        "sealing: no space left on the device (/out/a)",
        "free some space and run again",
    )
    assert files.storage_error("sealing", OSError(errno.ENOSPC, ""), tmp_path).message.endswith(f"({tmp_path})")
    nameless = files.storage_error("writing", OSError(errno.ENOSPC, ""))
    assert nameless.hint is not None and nameless.hint.endswith(f"the output folder or of {tempfile.gettempdir()}")
