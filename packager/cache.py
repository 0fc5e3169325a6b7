"""The cache: finished work under the digest of everything that decided it.

An entry is a folder named by its key, the SHA-256 of a flat list of named ingredients. It is put in place by one
rename, so it is whole or absent, and it is checked against its own seal when it is used, so an edited or rotten entry
is a miss, not a wrong answer. ``PACKAGER_CACHE_DIR`` moves the cache; ``PACKAGER_CACHE_MAX_GB`` (default 20) bounds it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packager.errors import UsageError
from packager.files import list_files, remove_tree, replace_folder, to_json, write_text
from packager.scratch import scratch

Ingredients = Mapping[str, str]

CONTENTS = ".contents.json"


@dataclass(frozen=True)
class Cache:
    """A cache folder; ``root`` ``None`` is a cache that never holds anything."""

    root: Path | None

    def find(self, ingredients: Ingredients) -> Path | None:
        """The whole entry for these ingredients, or ``None``. Hashes the entry's files."""
        if self.root is None:
            return None
        folder = self.root / "entries" / key_of(ingredients)
        if not folder.is_dir():
            return None
        if not _whole(folder):
            remove_tree(folder)
            return None
        os.utime(folder)
        return folder

    def store(self, ingredients: Ingredients, fill: Callable[[Path], None]) -> Path | None:
        """Make the entry by letting ``fill`` write into an empty folder; returns where it lies.

        A cache that can't be written is no reason to fail a build: ``None`` then.
        """
        if self.root is None:
            return None
        entries = self.root / "entries"
        try:
            entries.mkdir(parents=True, exist_ok=True)
            with scratch(self.root, "new-") as folder:
                stage = folder / "entry"
                stage.mkdir()
                fill(stage)
                write_text(stage / CONTENTS, to_json(_contents(stage)))
                final = entries / key_of(ingredients)
                replace_folder(stage, final)
            _prune(self.root, keep=final)
            return final
        except OSError:
            return None

    def explain(self, subject: str, ingredients: Ingredients) -> list[str]:
        """Which ingredients changed since ``subject`` was last recorded: one sentence each; then record these."""
        if self.root is None:
            return ["the cache is off"]
        path = self.root / "last" / f"{hashlib.sha256(subject.encode()).hexdigest()}.json"
        before = _recorded(path)
        try:
            write_text(path, to_json(dict(ingredients)))
        except OSError:
            return ["the cache folder can't be written"]
        if before is None:
            return ["nothing was built for this target before"]
        changed = [
            f"{name} changed ({_short(before.get(name))} -> {_short(ingredients.get(name))})"
            for name in sorted({*before, *ingredients})
            if before.get(name) != ingredients.get(name)
        ]
        return changed or ["the entry was pruned or damaged"]


def default_cache() -> Cache:
    """The user's cache, where the platform keeps such things.

    Raises:
        UsageError: ``PACKAGER_CACHE_MAX_GB`` is no size.
    """
    _bound()
    chosen = os.environ.get("PACKAGER_CACHE_DIR")
    if chosen:
        return Cache(Path(chosen).absolute())
    import platformdirs

    return Cache(Path(platformdirs.user_cache_dir("packager", appauthor=False)))


def key_of(ingredients: Ingredients) -> str:
    """Hex SHA-256 of the canonical JSON of the ingredients."""
    text = json.dumps(dict(ingredients), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def tree_digest(*folders: Path) -> str:
    """Hex SHA-256 over the paths and bytes of all files under ``folders``: how code and templates enter a key."""
    state = hashlib.sha256()
    for folder in folders:
        for path in list_files(folder):
            data = (folder / path).read_bytes()
            state.update(f"{path} {len(data)}\n".encode())
            state.update(data)
    return state.hexdigest()


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= 24 else value[:21] + "..."


def _recorded(path: Path) -> dict[str, str] | None:
    """The ingredients recorded last; ``None`` where there are none, or where the record is spoilt."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    return found if sound else None


def _bound() -> float:
    """How many bytes the cache may hold."""
    text = os.environ.get("PACKAGER_CACHE_MAX_GB") or "20"
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not size >= 0:
        raise UsageError(f"PACKAGER_CACHE_MAX_GB is '{text}', which is no size", "give a number of GB, such as 20")
    return size * 1e9


def _contents(folder: Path) -> dict[str, list[object]]:
    from packager.model import sha256_file

    return {
        str(path): [(folder / path).stat().st_size, sha256_file(folder / path)]
        for path in list_files(folder)
        if str(path) != CONTENTS
    }


def _whole(folder: Path) -> bool:
    try:
        listed = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        return bool(listed == _contents(folder))
    except (OSError, ValueError, RecursionError):
        return False


def _prune(root: Path, keep: Path) -> None:
    """Drop the entries unused for longest until the cache fits its bound."""
    limit = _bound()
    sizes = {
        entry: sum((entry / path).stat().st_size for path in list_files(entry))
        for entry in (root / "entries").iterdir()
    }
    total = sum(sizes.values())
    for entry in sorted(sizes, key=lambda entry: entry.stat().st_mtime):
        if total <= limit:
            return
        if entry != keep:
            remove_tree(entry)
            total -= sizes[entry]
