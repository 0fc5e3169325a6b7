"""Seals for bundles that a test has tampered with."""

from __future__ import annotations

import json
from pathlib import Path

from packager.bundle import SEAL, VERDICT
from packager.files import list_files, to_json
from packager.model import sha256_file


def reseal(bundle: Path) -> None:
    """A seal that fits what the files are now, and no verdict, as somebody leaves it who tampers."""
    (bundle / VERDICT).unlink(missing_ok=True)
    document = json.loads((bundle / SEAL).read_text(encoding="utf-8"))
    roles = {entry["path"]: entry["role"] for entry in document["files"]}
    document["files"] = [
        {
            "path": str(path), "sha256": sha256_file(bundle / path), "bytes": (bundle / path).stat().st_size,
            "role": roles.get(str(path), "file"),
        }
        for path in list_files(bundle) if str(path) != SEAL
    ]  # fmt: skip
    (bundle / SEAL).write_text(to_json(document), encoding="utf-8")
