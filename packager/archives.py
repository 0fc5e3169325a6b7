"""Bundle archives that come from anywhere: unpacked within bounds, or refused in plain words.

Nothing is believed of an archive: members must be plain files inside one folder, what a header declares is bounded
before it is read into memory, and what comes out is bounded by what went in. A full disk while unpacking is told as
such, not as a damaged archive.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from packager.errors import PackagerError, VerificationError
from packager.files import storage_error
from packager.scratch import scratch

MAX_UNPACKED_BYTES = 64 << 30
MAX_UNPACKED_FILES = 100_000

FREE_BYTES = 1 << 30
MAX_RATIO = 200
"""What unpacks to more than :data:`FREE_BYTES` and to more than this many times its size is a bomb. Deflate reaches
1032; weights and goldens, which are numbers, stay below 20."""

MAX_READ_BYTES = 4 << 20
"""Most that is read of a tar file at once. Extended headers and long names are read whole, and may declare anything."""

NOT_WHOLE = (
    OSError, EOFError, ValueError, RuntimeError, tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What the readers of the standard library raise for a damaged archive."""


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Unpack a bundle archive (``.tar.gz`` or ``.zip``) into a temporary folder and give the bundle's folder.

    Raises:
        VerificationError: it is cut, holds members that leave the folder or aren't plain files, or is too large.
        StorageError: there is no room for it.
    """
    with scratch() as folder:
        try:
            if archive.name.endswith(".zip"):
                _unzip(archive, folder)
            else:
                _untar(archive, folder)
        except PackagerError:
            raise
        except NOT_WHOLE as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise storage_error(f"unpacking {archive} into {folder}", error) from error
            raise VerificationError(f"{archive}: not a whole archive: {error}", "fetch it again") from error
        tops = list(folder.iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise VerificationError(f"{archive}: must hold exactly one folder, the bundle")
        yield tops[0]


def is_bomb(packed: int, unpacked: int) -> bool:
    """Whether something of ``packed`` bytes that unpacks to ``unpacked`` was made to fill memory or disks."""
    return unpacked > FREE_BYTES and unpacked > MAX_RATIO * packed


class _Sips(io.RawIOBase):
    """A stream to read little at a time from: tarfile asks for a whole header at once, however large."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise ValueError(f"a header of {size} bytes, {MAX_READ_BYTES} are allowed")
        return self._stream.read(size)


def _untar(archive: Path, folder: Path) -> None:
    packed = archive.stat().st_size
    with gzip.open(archive, "rb") as stream, tarfile.open(fileobj=_Sips(stream), mode="r:") as tar:
        count = total = 0
        for member in tar:
            count, total = count + 1, total + member.size
            if not (member.isreg() or member.isdir()) or member.issparse():
                raise VerificationError(f"{archive}: member '{member.name}' is not a plain file")
            _check_member(archive, member.name, count, total, packed)
            tar.extract(member, folder, filter="data")


def _unzip(archive: Path, folder: Path) -> None:
    packed = archive.stat().st_size
    with zipfile.ZipFile(archive) as zipped:
        count = total = 0
        for info in zipped.infolist():
            count, total = count + 1, total + info.file_size
            _check_member(archive, info.filename, count, total, packed)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise VerificationError(f"{archive}: member '{info.filename}' is compressed in an unknown way")
            zipped.extract(info, folder)


def _check_member(archive: Path, name: str, count: int, total: int, packed: int) -> None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name:
        raise VerificationError(f"{archive}: member '{name}' leaves the archive's folder")
    if count > MAX_UNPACKED_FILES or total > MAX_UNPACKED_BYTES:
        raise VerificationError(f"{archive}: unpacks to more than {MAX_UNPACKED_BYTES} bytes or too many files")
    if is_bomb(packed, total):
        raise VerificationError(
            f"{archive}: its {packed} bytes unpack to {total} or more, an archive bomb", "don't use it"
        )
