"""What can happen to a bundle's files on their way: damage, mix-ups and edits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from packager.bundle import SEAL, VERDICT

Harm = Callable[[Path], object]


def largest(bundle: Path) -> Path:
    """The largest file beside goldens and seals: the model, an engine, a runtime."""
    listed = json.loads((bundle / SEAL).read_text(encoding="utf-8"))["files"]
    return bundle / str(max(listed, key=lambda each: each["bytes"] * (each["role"] != "golden"))["path"])


def flip(path: Path, place: float) -> None:
    """One bit of the file, at a share of its length."""
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * place), len(data) - 1)] ^= 4
    path.write_bytes(bytes(data))


def edit(name: str, old: str, new: str) -> Harm:
    """Replace a text in a file; it must be there."""

    def apply(bundle: Path) -> None:
        text = (bundle / name).read_text(encoding="utf-8")
        if old not in text:
            raise LookupError(f"{name} has no {old!r}")
        (bundle / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    return apply


def edit_golden(change: Callable[[dict[str, object]], None]) -> Harm:
    """Change ``golden.json``."""

    def apply(bundle: Path) -> None:
        path = bundle / "golden/golden.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        change(document)
        path.write_text(json.dumps(document), encoding="utf-8")

    return apply


def drop_case(document: dict[str, object]) -> None:
    """One golden case less."""
    cases = document["cases"]
    assert isinstance(cases, list)
    cases.pop()


def widen(document: dict[str, object]) -> None:
    """A tolerance that lets everything pass."""
    outputs = document["outputs"]
    assert isinstance(outputs, list)
    outputs[0]["tolerance"] = {"max_abs": 1e9}


def cut(path: Path) -> None:
    """The file's second half lost."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILE_FAULTS: dict[str, Harm] = {
    "a bit at the start of the largest file": lambda bundle: flip(largest(bundle), 0.01),
    "a bit in the middle of the largest file": lambda bundle: flip(largest(bundle), 0.5),
    "a bit at the end of the largest file": lambda bundle: flip(largest(bundle), 0.999),
    "the largest file cut": lambda bundle: cut(largest(bundle)),
    "the largest file missing": lambda bundle: largest(bundle).unlink(),
    "the largest file empty": lambda bundle: largest(bundle).write_bytes(b""),
    "the largest file replaced by a web page": lambda bundle: largest(bundle).write_text("<html>404</html>"),
    "a golden value changed": lambda bundle: flip(bundle / "golden/golden.safetensors", 0.9),
    "goldens missing": lambda bundle: (bundle / "golden/golden.safetensors").unlink(),
    "a golden case dropped": edit_golden(drop_case),
    "a tolerance edited": edit_golden(widen),
    "the model's digest edited": edit(SEAL, '"digest": "', '"digest": "0'),
    "the signature edited": edit(SEAL, '"image"', '"picture"'),
    "a file's digest edited": edit(SEAL, '"sha256": "', '"sha256": "0'),
    "the seal cut": lambda bundle: cut(bundle / SEAL),
    "the seal missing": lambda bundle: (bundle / SEAL).unlink(),
    "the README edited": lambda bundle: flip(bundle / "README.md", 0.5),
}
"""Sentences and what they do to a good bundle, its seal left as it is unless it is what is changed."""


def forge_verdict(bundle: Path) -> None:
    """A verdict that says what was never measured."""
    path = bundle / VERDICT
    document = json.loads(path.read_text(encoding="utf-8"))
    document["status"], document["level"] = "passed", "runtime"
    path.write_text(json.dumps(document), encoding="utf-8")
