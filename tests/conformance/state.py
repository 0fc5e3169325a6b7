"""What was found so far: a file with a line per kind and case, which an interrupted run goes on from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from packager.cache import tree_digest
from packager.model import sha256_file
from packager.planning import tool_versions
from packager.render import common_templates
from packager.room import kind_named, package_folder
from tests.conformance.worker import REFERENCE, Ending

JUDGES = ("cases.py", "tap.py", "worker.py", "forking.py", "preloaded.py")
"""Of these tests, what decides how a case ends."""


class State:
    """The ends by case and kind. One of another packager, room or runtime doesn't count, unless ``keep``."""

    def __init__(self, file: Path, kinds: Sequence[str], *, keep: bool = False) -> None:
        self._file = file
        self._as_of = {kind: as_of(kind) for kind in kinds}
        self.ends: dict[tuple[str, str], Ending] = {}
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:
                continue  # cut off when the run was killed
            if keep or self._as_of.get(found["kind"]) == found["as of"]:
                self.ends[found["case"], found["kind"]] = Ending(found["end"], found["why"])

    def has(self, case: str, kind: str) -> bool:
        """Whether the end is known."""
        return (case, kind) in self.ends

    def add(self, case: str, ends: Mapping[str, Ending]) -> None:
        """Remember, and write down, how kinds ended on a case."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as stream:
            for kind, ending in ends.items():
                self.ends[case, kind] = ending
                told = {"case": case, "kind": kind, "as of": self._as_of[kind], "end": ending.end, "why": ending.why}
                stream.write(json.dumps(told) + "\n")


def as_of(kind: str) -> str:
    """A digest of all that decides how a case ends with a kind."""
    versions = {"onnx": importlib.metadata.version("onnx"), "onnxruntime": importlib.metadata.version("onnxruntime")}
    folders = [package_folder("packager")]
    ours = [sha256_file(Path(__file__).with_name(name)) for name in JUDGES]
    if kind != REFERENCE:
        room = kind_named(kind)
        versions |= tool_versions(room)
        folders += [room.folder, common_templates(), *([room.templates] if room.templates else [])]
    return hashlib.sha256(repr((sorted(versions.items()), ours, tree_digest(*folders))).encode()).hexdigest()[:16]
