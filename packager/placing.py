"""Where finished bundles go: into the output folder, among the rejected, into the cache and out of it.

Everything is moved or copied whole. A copy in the cache is a copy, never a link: whoever edits a placed bundle edits
that one only.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packager.cache import Cache, Ingredients
from packager.dist import INDEXES
from packager.errors import UsageError
from packager.files import (
    OLD,
    UNFINISHED,
    clone_file,
    clone_tree,
    exists,
    remove_folder,
    remove_tree,
    replace_folder,
    storage_error,
    storage_errors,
    writable_folder,
)
from packager.model import sha256_file
from packager.results import Status, TargetResult
from packager.verdict import Verdict

REJECTED = "rejected"
STAGING = ".staging-"
"""How the name of the folder begins in which a run works, inside the output folder."""

BUNDLE, ARCHIVE, SUMMARY = "bundle", "archive", "verdict-summary.json"


@dataclass(frozen=True)
class Kept:
    """A finished bundle: its folder, its archive (``None`` where it was not verified) and its verdict."""

    folder: Path
    packed: Path | None
    verdict: Verdict


def keep(cache: Cache, ingredients: Ingredients, kept: Kept) -> None:
    """Put a copy into the cache."""

    def fill(entry: Path) -> None:
        from pydantic import TypeAdapter

        clone_tree(kept.folder, entry / BUNDLE)
        (entry / SUMMARY).write_bytes(TypeAdapter(Verdict).dump_json(kept.verdict))
        if kept.packed is not None:
            clone_file(kept.packed, entry / ARCHIVE)

    cache.store(ingredients, fill)


def take(entry: Path, work: Path, archive_name: str) -> Kept:
    """Copy a cache entry into the folder ``work``, its archive under the name it will be placed by.

    Raises:
        StorageError: it can't be copied.
    """
    from pydantic import TypeAdapter

    verdict = TypeAdapter(Verdict).validate_json((entry / SUMMARY).read_bytes())
    packed = None
    with storage_errors("copying from the cache", work):
        clone_tree(entry / BUNDLE, work / BUNDLE)
        if (entry / ARCHIVE).exists():
            packed = work / archive_name
            clone_file(entry / ARCHIVE, packed)
    return Kept(work / BUNDLE, packed, verdict)


def place(out: Path, name: str, result: TargetResult, folder: Path, packed: Path | None) -> TargetResult:
    """Move a finished bundle and its archive into the output folder; gives the result with their places.

    Raises:
        StorageError: they can't be moved.
    """
    with storage_errors("placing the bundle", out):
        withdraw(out, name)
        remove_folder(out / REJECTED / name)
        replace_folder(folder, out / name)
        result = replace(result, bundle=name)
        if packed is None:
            reason = result.verdict.level_reason if result.verdict else ""
            status: Status = "recipe" if result.verdict and result.verdict.status == "recipe" else "unverified"
            return replace(result, status=status, message=reason)
        digest, size = sha256_file(packed), packed.stat().st_size
        packed.replace(out / packed.name)
    return replace(result, archive=packed.name, archive_sha256=digest, archive_bytes=size)


def sweep_output(out: Path) -> None:
    """Remove what killed runs left in an output folder that is ours alone now."""
    for folder in (out, out / REJECTED):
        for pattern in (STAGING, OLD):
            for stale in folder.glob(f"{pattern}*"):
                remove_tree(stale)
        for stale in folder.glob(f"{UNFINISHED}*"):
            stale.unlink(missing_ok=True)


def reject(out: Path, name: str, folder: Path) -> str:
    """Move a bundle that failed verification among the rejected; gives its place relative to ``out``.

    Raises:
        StorageError: it can't be moved.
    """
    with storage_errors("keeping the rejected bundle", out):
        (out / REJECTED).mkdir(exist_ok=True)
        replace_folder(folder, out / REJECTED / name)
    return f"{REJECTED}/{name}"


def withdraw(out: Path, name: str) -> None:
    """Take away an older bundle of this name: after a failure it must not pass for the new one.

    The indexes of the run before go first, since they name it; those of this run are written at its end.
    """
    for index in INDEXES:
        (out / index).unlink(missing_ok=True)
    remove_folder(out / name)
    for suffix in (".tar.gz", ".zip"):
        (out / f"{name}{suffix}").unlink(missing_ok=True)


@contextlib.contextmanager
def output_folder(out: Path) -> Iterator[Path]:
    """The output folder, ours alone while the run lasts; gone again if it was made for nothing."""
    import filelock

    existed = exists(out)
    folder = writable_folder(out)
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]
    try:
        lock = filelock.FileLock(Path(tempfile.gettempdir()) / f"packager-{name}.lock")
        lock.acquire(timeout=0)
    except filelock.Timeout:
        hint = "wait for it, or choose another folder with -o"
        raise UsageError(f"{folder}: another packager run is writing there", hint) from None
    except OSError as error:
        raise storage_error("locking the output folder", error) from error
    try:
        sweep_output(folder)
        yield folder
    finally:
        lock.release()
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
