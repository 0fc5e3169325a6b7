"""Archives from anywhere: unpacked within bounds, or refused in plain words."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packager import archives
from packager.archives import unpacked
from packager.errors import PackagerError, StorageError, VerificationError


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


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
    with unpacked(path) as folder:
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
    with pytest.raises(VerificationError) as caught, unpacked(path):
        raise AssertionError("must not be reached")
    assert HOSTILE[what][0].name in caught.value.message
    assert listing(tmp_path) == ["b.tar.gz", "temporary"]


@pytest.mark.parametrize("name", ["/evil", "../evil", "b/../../evil", "b\\..\\evil"])
def test_a_hostile_zip_member_is_refused_and_named(tmp_path: Path, name: str):
    path = zipped(tmp_path / "b.zip", **{"b/good": b"x", name: b"x"})
    with pytest.raises(VerificationError, match="leaves the archive's folder"), unpacked(path):
        raise AssertionError("must not be reached")


def test_a_link_in_a_zip_becomes_a_plain_file(tmp_path: Path):
    info = zipfile.ZipInfo("b/link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as packed:
        packed.writestr(info, "/etc/passwd")
    with unpacked(tmp_path / "b.zip") as folder:
        assert not (folder / "link").is_symlink() and (folder / "link").read_text() == "/etc/passwd"


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
@pytest.mark.parametrize("limit", ["MAX_UNPACKED_BYTES", "MAX_UNPACKED_FILES"])
def test_a_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, limit: str
):
    monkeypatch.setattr(archives, limit, 1000 if limit == "MAX_UNPACKED_BYTES" else 2)
    contents = {"b/1": bytes(400), "b/2": bytes(400), "b/3": bytes(400)}
    path = tmp_path / f"b{suffix}"
    if suffix == ".zip":
        zipped(path, **contents)
    else:
        tar(path, *(member(name, data) for name, data in contents.items()))
    with pytest.raises(VerificationError, match="unpacks to more than"), unpacked(path):
        raise AssertionError("must not be reached")


def test_a_zip_that_lies_about_its_size_is_not_unpacked_beyond_it(tmp_path: Path):
    data = bytearray(zipped(tmp_path / "b.zip", **{"b/big": bytes(1_000_000)}).read_bytes())
    size = (1_000_000).to_bytes(4, "little")
    while size in data:
        data[data.index(size) : data.index(size) + 4] = (10).to_bytes(4, "little")
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(VerificationError, match="not a whole archive"), unpacked(tmp_path / "b.zip"):
        raise AssertionError("must not be reached")


@pytest.mark.parametrize(
    "members", [(), (member("a", b"file, no folder"),), (member("a/x", b""), member("b/x", b""))], ids=len
)
def test_an_archive_holds_exactly_one_folder(tmp_path: Path, members: tuple[Member, ...]):
    with (
        pytest.raises(VerificationError, match="exactly one folder"),
        unpacked(tar(tmp_path / "b.tar.gz", *members)),
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
    with contextlib.suppress(PackagerError), unpacked(path) as folder:
        assert folder.is_dir()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME], ids=["extended header", "long name"])
def test_a_header_is_not_read_whole_whatever_it_declares(tmp_path: Path, kind: bytes):
    info = tarfile.TarInfo("b/x")
    info.type, info.size = kind, archives.MAX_READ_BYTES + 1
    with gzip.open(tmp_path / "b.tar.gz", "wb", compresslevel=1) as packed:
        packed.write(info.tobuf(tarfile.USTAR_FORMAT) + bytes(archives.MAX_READ_BYTES + 1024))
    with pytest.raises(VerificationError, match=r"a header of \d+ bytes, 4194304 are allowed"):
        unpacked(tmp_path / "b.tar.gz").__enter__()


def test_a_sparse_file_is_no_plain_file(tmp_path: Path):
    path = tar(tmp_path / "b.tar.gz", member("b/hole", kind=tarfile.GNUTYPE_SPARSE))
    with pytest.raises(VerificationError, match="'b/hole' is not a plain file"), unpacked(path):
        raise AssertionError("must not be reached")


def test_what_unpacks_to_far_more_than_it_is_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert archives.is_bomb(1 << 20, (1 << 30) + 1) and not archives.is_bomb(1 << 20, 1 << 30)
    assert not archives.is_bomb(1 << 30, 20 << 30)
    monkeypatch.setattr(archives, "FREE_BYTES", 100_000)
    path = tar(tmp_path / "b.tar.gz", member("b/zeros", bytes(200_000)))
    with pytest.raises(VerificationError, match="unpack to 200000 or more, an archive bomb"), unpacked(path):
        raise AssertionError("must not be reached")


def test_a_full_disk_is_no_damaged_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tar(tmp_path / "b.tar.gz", member("b/x", b"1"))
    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    with pytest.raises(StorageError, match=r"unpacking .*b\.tar\.gz into .*: no space left on the device"):
        unpacked(path).__enter__()
