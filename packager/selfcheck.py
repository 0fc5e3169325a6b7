"""What lets a partner run and check a bundle without packager: its loader, the comparator and ``verify.py``.

A room's loader is a module of its own, ``infer.py``, that packager imports to verify and that ships as it is but for
one line: where packager says ``packager.feeds``, a bundle's neighbour is ``feeds``.
"""

from __future__ import annotations

from pathlib import Path

from packager.errors import InternalError
from packager.files import clone_file, storage_errors, write_text
from packager.render import common_templates
from packager.room import package_folder

LOADER = "infer.py"
FEEDS = "feeds.py"
HERE, THERE = "from packager.feeds import", "from feeds import"


def ship_loader(source: Path, folder: Path) -> None:
    """Write a room's ``infer.py``, and the ``feeds.py`` it uses, into a bundle.

    Args:
        source: the room's own module, which has a class ``Model(folder)`` with ``run`` and ``info``.
        folder: the bundle's.

    Raises:
        StorageError: it can't be written.
        InternalError: the module needs another part of packager, which no partner has.
    """
    text = source.read_text(encoding="utf-8").replace(HERE, THERE)
    if "from packager" in text or "import packager" in text:
        raise InternalError(f"{source} ships in bundles, so it may import nothing of packager but packager.feeds")
    with storage_errors(f"writing {LOADER}"):
        write_text(folder / LOADER, text)
        if THERE in text:
            clone_file(package_folder("packager") / FEEDS, folder / FEEDS)


def add_selfcheck(folder: Path) -> None:
    """Copy the comparator and the self-check script beside the bundle's own ``infer.py``, if it has one."""
    if (folder / LOADER).exists():
        clone_file(package_folder("packager") / "parity.py", folder / "parity.py")
        clone_file(common_templates() / "verify.py", folder / "verify.py")
