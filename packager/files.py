"""File work with the promises the engine makes: whole or not at all, copied by the kernel, errors in plain words."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from packager.errors import StorageError, UsageError

OLD = ".old-"
"""How the hidden names of folders begin that are about to be deleted."""

UNFINISHED = ".new-"
"""How the names of files begin that :func:`write_text` is still writing."""

FICLONE = 0x40049409
"""Linux ioctl that shares a file's extents (``linux/fs.h``); btrfs and XFS have it."""


@contextlib.contextmanager
def storage_errors(what: str, where: Path | None = None) -> Iterator[None]:
    """Turn operating-system write errors into a :class:`StorageError` that says what was being done, and where.

    Args:
        what: a gerund phrase, such as ``archiving``.
        where: the place to name where the error itself names none: a write to an open file doesn't.

    Raises:
        StorageError: the disk is full, the folder vanished or isn't writable.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(what, error, where) from error


def storage_error(what: str, error: OSError, where: Path | None = None) -> StorageError:
    """The error for a failed write; arguments as for :func:`storage_errors`."""
    known = error.filename or where
    place = f" ({known})" if known else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        disks = "" if known else f", on the disk of the output folder or of {tempfile.gettempdir()}"
        return StorageError(f"{what}: no space left on the device{place}", f"free some space and run again{disks}")
    if error.errno == errno.EFBIG:
        return StorageError(f"{what}: larger than files may be here{place}", "raise the limit (`ulimit -f`), or move")
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


# Whether something is there. pathlib's own methods raise for a name that is too long, up to Python 3.13; a path that a
# user, a manifest or a model gives may be anything, and nothing can be there.


def exists(path: Path) -> bool:
    """Whether there is something, links followed."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Whether there is a file, links followed."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Whether there is a folder, links followed."""
    return os.path.isdir(path)  # noqa: PTH112


def is_link(path: Path) -> bool:
    """Whether there is a symbolic link."""
    return os.path.islink(path)  # noqa: PTH114


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with LF line ends, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
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
    old = _aside(final)
    new.rename(final)
    remove_tree(old)


def remove_folder(path: Path) -> None:
    """Delete a finished folder, or whatever has its name, so that no half of it is ever seen under its name.

    Raises:
        OSError: it can't be moved aside.
    """
    remove_tree(_aside(path))


def _aside(path: Path) -> Path:
    """Move what is there to a hidden name beside it; gives that name."""
    old = path.with_name(f"{OLD}{path.name}")
    remove_tree(old)
    if path.is_dir() and not path.is_symlink():
        path.rename(old)
    elif path.exists() or path.is_symlink():
        path.unlink()
    return old


def remove_tree(path: Path) -> None:
    """Delete a folder if it is there; what can't be deleted stays."""
    shutil.rmtree(path, ignore_errors=True)
