"""What lets a partner run and check a bundle without packager: its loader, the comparator and ``verify.py``.

A room's loader is a module of its own, ``infer.py``, that packager imports to verify and that ships as it is but for
one line: where packager says ``packager.feeds``, a bundle's neighbour is ``feeds``.
"""

from __future__ import annotations

import re
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


def ship_loader(source: Path, folder: Path, beside: Mapping[str, Path] = NONE) -> None:
    """Write a room's ``infer.py``, and the ``feeds.py`` it uses, into a bundle.

    Args:
        source: the room's own module, which has a class ``Model(folder)`` with ``run`` and ``info``.
        folder: the bundle's.
        beside: other modules of the room that ship, by the name they have in the bundle. What imports one of them from
            the room imports its neighbour there.

    Raises:
        StorageError: it can't be written.
        InternalError: the module needs another part of packager, which no partner has.
    """
    texts = {name: _shipped(path, beside) for name, path in {LOADER: source, **beside}.items()}
    with storage_errors(f"writing {LOADER}"):
        for name, text in texts.items():
            write_text(folder / name, text)
        if any(THERE in text for text in texts.values()):
            clone_file(package_folder("packager") / FEEDS, folder / FEEDS)


def _shipped(source: Path, beside: Mapping[str, Path]) -> str:
    """A module's text as it ships: it imports neighbours."""
    text = source.read_text(encoding="utf-8").replace(HERE, THERE)
    for name, path in beside.items():
        text = re.sub(
            rf"^from packager\.[\w.]+\.{path.stem} import", f"from {Path(name).stem} import", text, flags=re.M
        )
    if "from packager" in text or "import packager" in text:
        raise InternalError(
            f"{source} ships in bundles, so it may import nothing of packager but packager.feeds and neighbours"
        )
    return text


def add_selfcheck(folder: Path) -> None:
    """Copy the comparator and the self-check script beside the bundle's own ``infer.py``, if it has one."""
    if (folder / LOADER).exists():
        clone_file(package_folder("packager") / "parity.py", folder / "parity.py")
        clone_file(common_templates() / "verify.py", folder / "verify.py")
