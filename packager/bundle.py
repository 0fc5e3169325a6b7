"""The bundle: sealing a finished folder, opening one, and telling whether it is still what was sealed.

``bundle.json`` names every file with its digest and carries no time and no host, so the same build gives the same
bytes. ``verdict.json`` lies beside it, outside the content digest: what was executed is a fact about a machine.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from packager import __version__
from packager.errors import UsageError, VerificationError
from packager.files import is_file, is_folder, list_files, to_json, write_text
from packager.graph import Dim
from packager.model import Signature, TensorSpec, sha256_file
from packager.room import Plan
from packager.verdict import Distance

SCHEMA = "packager.bundle/1"
SEAL = "bundle.json"
VERDICT = "verdict.json"
MAX_SEAL_BYTES = 64 << 20

COMMON_ROLES = {
    "golden/*": "golden",
    "README.md": "documentation",
    "verify.py": "self-check",
    "parity.py": "self-check",
    "feeds.py": "loader",
}
"""Roles of the files the engine adds; a room's ``target.toml`` adds its own under ``[roles]``."""


@dataclass(frozen=True)
class BundleFile:
    """One file of a bundle: relative POSIX path, SHA-256 in hex, size in bytes, and what it is for."""

    path: str
    sha256: str
    bytes: int
    role: str


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. ``digest`` is ``sha256:<hex>`` of ``bundle.json``, which covers every other file.

    ``shapes``, ``options``, ``transforms`` and ``notes`` are those of the plan it was built by. ``transform`` is what
    transforms cost, measured when it was built; ``None`` where the model is as it was.
    """

    folder: Path
    name: str
    version: str
    target: str
    kind: str
    precision: str
    model_digest: str
    signature: Signature
    files: tuple[BundleFile, ...]
    digest: str
    opset: int
    shapes: tuple[tuple[str, int], ...] = ()
    options: str = "{}"
    transforms: str = "[]"
    notes: tuple[str, ...] = ()
    transform: Distance | None = None

    @property
    def total_bytes(self) -> int:
        """Size of all sealed files."""
        return sum(file.bytes for file in self.files)


def seal(
    folder: Path, plan: Plan, tools: Mapping[str, str], roles: Mapping[str, str], transform: Distance | None = None
) -> Bundle:
    """Write ``bundle.json`` over everything in ``folder`` (``verdict.json`` excepted) and open the result.

    Args:
        folder: the finished files.
        plan: what was done.
        tools: distribution name to exact version.
        roles: glob patterns of this kind's files to their roles.
        transform: how far transforms took the model from the reference, where there were any.
    """
    known = {**COMMON_ROLES, **roles}
    files = [
        {
            "path": str(path),
            "sha256": sha256_file(folder / path),
            "bytes": (folder / path).stat().st_size,
            "role": next((role for pattern, role in known.items() if fnmatch.fnmatchcase(str(path), pattern)), "file"),
        }
        for path in list_files(folder)
        if str(path) not in (SEAL, VERDICT)
    ]
    document = {
        "schema": SCHEMA,
        "name": plan.name,
        "version": plan.version,
        "target": plan.target,
        "kind": plan.kind,
        "model": {"digest": plan.model_digest, "opset": plan.opset},
        "precision": plan.precision,
        "signature": signature_document(plan.signature),
        "plan": {
            "shapes": dict(plan.shapes),
            "options": plan.options,
            "steps": [{"title": step.title, "settings": dict(step.settings)} for step in plan.steps],
            "notes": list(plan.notes),
            "transforms": json.loads(plan.transforms),
        },
        "transform": None if transform is None else asdict(transform),
        "packager": __version__,
        "tools": dict(sorted(tools.items())),
        "files": files,
    }
    write_text(folder / SEAL, to_json(document))
    return open_bundle(folder)


def signature_document(signature: Signature) -> dict[str, list[dict[str, object]]]:
    """The signature as JSON: dims are sizes, names of symbolic ones, or null."""
    return {
        part: [
            {"name": spec.name, "dtype": spec.dtype, "dims": None if spec.dims is None else list(spec.dims)}
            for spec in specs
        ]
        for part, specs in (("inputs", signature.inputs), ("outputs", signature.outputs))
    }


def open_bundle(folder: Path) -> Bundle:
    """Read a bundle's seal; the files themselves are not looked at (see :func:`damage`).

    Raises:
        UsageError: there is no such folder, or it is no bundle.
        VerificationError: ``bundle.json`` is malformed; the message names the key.
    """
    path = folder / SEAL
    if not is_folder(folder):
        raise UsageError(f"{folder}: no such bundle", "give a bundle's folder or its archive")
    if not is_file(path):
        raise UsageError(f"{folder}: not a bundle: it has no {SEAL}", "give the folder that holds it")
    if path.stat().st_size > MAX_SEAL_BYTES:
        raise VerificationError(f"{path}: larger than {MAX_SEAL_BYTES} bytes")
    data = path.read_bytes()
    try:
        return _parse(folder, data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise VerificationError(
            f"{path}: malformed: {what}", "the bundle is damaged; fetch or build it again"
        ) from error


def _parse(folder: Path, data: bytes) -> Bundle:
    document = json.loads(data.decode("utf-8"))
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema is {document['schema']!r}, this packager reads {SCHEMA!r}")
    files = tuple(_parse_file(entry) for entry in document["files"])
    if len({file.path for file in files}) != len(files):
        raise ValueError("a file is listed twice")
    texts = {key: document[key] for key in ("name", "version", "target", "kind", "precision")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("name, version, target, kind and precision must be texts")
    return Bundle(
        folder=folder,
        model_digest=str(document["model"]["digest"]),
        signature=Signature(
            tuple(_parse_spec(spec) for spec in document["signature"]["inputs"]),
            tuple(_parse_spec(spec) for spec in document["signature"]["outputs"]),
        ),
        files=files,
        opset=int(document["model"]["opset"]),
        shapes=tuple((str(name), int(size)) for name, size in document["plan"]["shapes"].items()),
        options=str(document["plan"]["options"]),
        transforms=json.dumps(document["plan"]["transforms"], sort_keys=True),
        notes=tuple(str(note) for note in document["plan"]["notes"]),
        transform=_parse_distance(document["transform"]),
        digest="sha256:" + hashlib.sha256(data).hexdigest(),
        **texts,
    )


def _parse_file(entry: dict[str, object]) -> BundleFile:
    path, digest, size, role = entry["path"], entry["sha256"], entry["bytes"], entry["role"]
    if not (isinstance(path, str) and isinstance(digest, str) and isinstance(size, int) and isinstance(role, str)):
        raise ValueError(f"a file entry has values of wrong types: {entry}")
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or os.path.splitdrive(path)[0]:
        raise ValueError(f"file '{path}' leaves the bundle's folder")
    return BundleFile(path, digest, size, role)


def _parse_distance(entry: dict[str, object] | None) -> Distance | None:
    if entry is None:
        return None
    numbers = {name: entry[name] for name in ("max_abs", "scaled", "cosine", "top1")}
    parsed: dict[str, float | None] = {}
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise ValueError(f"transform.{name} is {number!r}, not a number")
        parsed[name] = None if number is None else float(number)
    return Distance(**parsed)


def _parse_spec(entry: dict[str, object]) -> TensorSpec:
    name, dtype, dims = entry["name"], entry["dtype"], entry["dims"]
    if not (isinstance(name, str) and isinstance(dtype, str) and (dims is None or isinstance(dims, list))):
        raise ValueError(f"a signature entry has values of wrong types: {entry}")
    parsed: list[Dim] = list(dims or ())
    return TensorSpec(name, dtype, None if dims is None else tuple(parsed))


def damage(bundle: Bundle) -> list[str]:
    """What is wrong with the bundle's files, one sentence each; empty when all are as sealed."""
    return [told for told in (_damage(bundle.folder / file.path, file) for file in bundle.files) if told]


def _damage(path: Path, file: BundleFile) -> str | None:
    try:
        if path.is_symlink():
            return f"{file.path} is a link"
        if not path.is_file():
            return f"{file.path} ({file.role}) is missing"
        if (size := path.stat().st_size) != file.bytes:
            return f"{file.path} ({file.role}) has {size} bytes, sealed with {file.bytes}"
        if sha256_file(path) != file.sha256:
            return f"{file.path} ({file.role}) was changed: its SHA-256 is not the sealed one"
    except OSError as error:
        return f"{file.path} ({file.role}) can't be read: {error.strerror}"
    return None


def strangers(bundle: Bundle) -> list[str]:
    """Files in the folder that the seal doesn't name."""
    named = {file.path for file in bundle.files} | {SEAL, VERDICT}
    return [str(path) for path in list_files(bundle.folder) if str(path) not in named]
