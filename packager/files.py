"""File work with the promises the engine makes: whole or not at all, copied by the kernel, errors in plain words."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from packager.errors import PackagerError, StorageError, UsageError, VerificationError

FICLONE = 0x40049409
"""Linux ioctl that shares a file's extents (``linux/fs.h``); btrfs and XFS have it."""

MAX_UNPACKED_BYTES = 64 << 30
MAX_UNPACKED_FILES = 100_000

NOT_WHOLE = (
    OSError, EOFError, ValueError, RuntimeError, tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What the readers of the standard library raise for a damaged archive."""


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn operating-system write errors into a :class:`StorageError` that says what was being done.

    Raises:
        StorageError: the disk is full, the folder vanished or isn't writable.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(what, error) from error


def storage_error(what: str, error: OSError) -> StorageError:
    """The error for a failed write."""
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"{what}: no space left on the device{place}", "free some space and run again")
    return StorageError(f"{what}: {error.strerror or error}{place}", "check the folder and its permissions")


def writable_folder(path: Path) -> Path:
    """Make ``path`` a folder that can be written to; returns it absolute.

    Raises:
        UsageError: it is a file, or it can't be made or written.
    """
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError as error:
        raise UsageError(f"{path}: exists and is not a folder", "choose another output folder") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise storage_error("preparing the output folder", error) from error
        hint = "choose an output folder you may write to"
        raise UsageError(f"{path}: can't write there: {error.strerror}", hint) from error
    return path


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with LF line ends, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(document: object) -> str:
    """Canonical JSON text: two-space indent, keys in given order, real characters, final newline.

    JSON has no infinities and no NaN; they are written as the texts ``inf``, ``-inf`` and ``nan``.
    """
    return json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def clone_file(source: Path, target: Path) -> None:
    """Copy a file without its bytes passing through this process: by reflink where the file system can, else by
    the kernel's own copying.

    Hard links are not used on purpose: a partner who edits a bundle must not edit the user's model or the cache.
    """
    if sys.platform == "linux":
        import fcntl

        with source.open("rb") as reader, target.open("wb") as writer:
            try:
                fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
                return
            except OSError:
                pass
    shutil.copyfile(source, target)


def clone_tree(source: Path, target: Path) -> None:
    """Copy a folder of regular files with :func:`clone_file`; ``target`` must not exist."""
    target.mkdir(parents=True)
    for path in list_files(source):
        goal = target / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        clone_file(source / path, goal)
        shutil.copymode(source / path, goal)


def list_files(folder: Path) -> list[PurePosixPath]:
    """Every regular file under ``folder``, as sorted relative POSIX paths; byte-code caches are left out."""
    found = [
        PurePosixPath(path.relative_to(folder).as_posix())
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return sorted(found)


def replace_folder(new: Path, final: Path) -> None:
    """Move the finished folder ``new`` to ``final``, in place of what is there.

    Killed between the two renames, ``final`` is absent and the old folder lies hidden beside it; it is never half of
    one and half of the other.
    """
    old = final.with_name(f".old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.is_dir() and not final.is_symlink():
        final.rename(old)
    elif final.exists() or final.is_symlink():
        final.unlink()
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def remove_tree(path: Path) -> None:
    """Delete a folder if it is there; what can't be deleted stays."""
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Unpack a bundle archive (``.tar.gz`` or ``.zip``) into a temporary folder and give the bundle's folder.

    Raises:
        VerificationError: it is cut, holds members that leave the folder or aren't plain files, or is too large.
    """
    with tempfile.TemporaryDirectory(prefix="packager-") as name:
        folder = Path(name)
        try:
            if archive.name.endswith(".zip"):
                _unzip(archive, folder)
            else:
                _untar(archive, folder)
        except PackagerError:
            raise
        except NOT_WHOLE as error:
            raise VerificationError(f"{archive}: not a whole archive: {error}", "fetch it again") from error
        tops = list(folder.iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise VerificationError(f"{archive}: must hold exactly one folder, the bundle")
        yield tops[0]


def _untar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive, "r:gz") as tar:
        count = total = 0
        for member in tar:
            count, total = count + 1, total + member.size
            if not (member.isreg() or member.isdir()):
                raise VerificationError(f"{archive}: member '{member.name}' is not a plain file")
            _check_member(archive, member.name, count, total)
            tar.extract(member, folder, filter="data")


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as zipped:
        count = total = 0
        for info in zipped.infolist():
            count, total = count + 1, total + info.file_size
            _check_member(archive, info.filename, count, total)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise VerificationError(f"{archive}: member '{info.filename}' is compressed in an unknown way")
            zipped.extract(info, folder)


def _check_member(archive: Path, name: str, count: int, total: int) -> None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name:
        raise VerificationError(f"{archive}: member '{name}' leaves the archive's folder")
    if count > MAX_UNPACKED_FILES or total > MAX_UNPACKED_BYTES:
        raise VerificationError(f"{archive}: unpacks to more than {MAX_UNPACKED_BYTES} bytes or too many files")
