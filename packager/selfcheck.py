"""What lets a partner run and check a bundle without packager: its loader, the comparator and ``verify.py``.

A room's loader is a module of its own, ``infer.py``, that packager imports to verify and that ships as it is but for
one line: where packager says ``packager.feeds``, a bundle's neighbour is ``feeds``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from packager.errors import InternalError
from packager.files import clone_file, storage_errors, write_text
from packager.render import common_templates
from packager.room import package_folder

LOADER = "infer.py"
FEEDS = "feeds.py"
NONE: Mapping[str, Path] = MappingProxyType({})
HERE, THERE = "from packager.feeds import", "from feeds import"


def ship_loader(source: Path, folder: Path, more: Mapping[str, Path] = NONE, package: str = "") -> None:
    """Write a room's ``infer.py``, the ``feeds.py`` it uses and its other shipped modules into a bundle.

    Args:
        source: the room's own module, which has a class ``Model(folder)`` with ``run`` and ``info``.
        folder: the bundle's.
        more: other modules that ship, by the path they have in the bundle.
        package: the room's own package, as those modules spell it; a bundle's modules are found without it.

    Raises:
        StorageError: it can't be written.
        InternalError: a module needs another part of packager, which no partner has.
    """
    with storage_errors(f"writing {LOADER}"):
        for name, file in {LOADER: source, **more}.items():
            text = _shipped(file, package)
            (folder / name).parent.mkdir(exist_ok=True)
            write_text(folder / name, text)
            if THERE in text:
                clone_file(package_folder("packager") / FEEDS, folder / FEEDS)


def _shipped(source: Path, package: str) -> str:
    """A module's text as it ships: what it imports lies beside it."""
    text = source.read_text(encoding="utf-8").replace(HERE, THERE)
    if package:
        text = text.replace(f"from {package}.", "from ")
    if "from packager" in text or "import packager" in text:
        raise InternalError(
            f"{source} ships in bundles, so it may import nothing of packager but packager.feeds and its neighbours"
        )
    return text


def add_selfcheck(folder: Path) -> None:
    """Copy the comparator and the self-check script beside the bundle's own ``infer.py``, if it has one."""
    if (folder / LOADER).exists():
        clone_file(package_folder("packager") / "parity.py", folder / "parity.py")
        clone_file(common_templates() / "verify.py", folder / "verify.py")
