"""Temporary folders that don't outlive their makers for long: removed at the end, or by the next run after a kill.

A killed process can't clean up, so each folder holds a lock for as long as its maker lives; the system lets go of the
lock with the process. Whoever makes a folder first removes those beside it whose lock is free.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packager.files import remove_tree

PREFIX = "packager-"
LOCK, CONTENTS = "lock", "in"
TRIES = 20


@contextlib.contextmanager
def scratch(parent: Path | None = None, prefix: str = PREFIX) -> Iterator[Path]:
    """An empty temporary folder until the block ends.

    Args:
        parent: where to; ``None`` for the system's temporary folder.
        prefix: how its name begins. Folders of that name whose makers are gone are removed first.

    Raises:
        OSError: it can't be made.
    """
    import filelock

    base = Path(tempfile.gettempdir()) if parent is None else parent
    sweep(base, prefix)
    for _ in range(TRIES):
        folder = Path(tempfile.mkdtemp(dir=base, prefix=prefix))
        lock = filelock.FileLock(folder / LOCK)
        # Another run that sweeps may take the folder for a dead one's until its lock is ours: then make another.
        with contextlib.suppress(filelock.Timeout, FileNotFoundError):
            lock.acquire(timeout=0)
            if (folder / LOCK).exists():
                break
    else:
        raise FileNotFoundError(f"{base}: temporary folders vanish there")
    try:
        (folder / CONTENTS).mkdir()
        yield folder / CONTENTS
    finally:
        remove_tree(folder / CONTENTS)
        lock.release()
        remove_tree(folder)


def sweep(base: Path, prefix: str) -> None:
    """Remove the scratch folders in ``base`` whose makers are gone. Those of other users are left alone."""
    import filelock

    for lock_file in base.glob(f"{prefix}*/{LOCK}"):
        folder = lock_file.parent
        try:
            if folder.is_symlink() or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):
                continue
            lock = filelock.FileLock(lock_file)
            lock.acquire(timeout=0)
        except (OSError, filelock.Timeout):  # somebody's, alive; Timeout is an OSError of Python's own name
            continue
        remove_tree(folder / CONTENTS)
        lock.release()
        remove_tree(folder)
