"""What a command is about: which manifest, and which of its targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from packager import manifest as manifests
from packager.errors import UsageError
from packager.host import this_host
from packager.manifest import Manifest, Target
from packager.precisions import AUTO
from packager.report import Listener
from packager.room import kind_named, missing_requirements

MANIFEST = "packager.toml"


def read_manifest(
    model: Path | None,
    manifest: Path | None,
    targets: Sequence[str] | None,
    golden: Path | None,
) -> Manifest:
    """The manifest of a command: the file named, ``./packager.toml`` where neither it nor a model is, else defaults.

    Raises:
        UsageError: both or neither can be found, or a target is unknown.
        ManifestError: the file has mistakes.
    """
    if model is not None and manifest is not None:
        raise UsageError("give a model or a manifest, not both", "the manifest names its model under [model] path")
    if model is not None:
        return manifests.default(model, targets, golden)
    path = manifest or Path(MANIFEST)
    if manifest is None and not path.exists():
        raise UsageError(f"no model given and no {MANIFEST} here", "packager build MODEL, or packager init MODEL")
    loaded = manifests.load(path)
    if golden is not None:
        loaded = manifests.with_golden(loaded, golden)
    return loaded if targets is None else manifests.select(loaded, targets)


def rungs(chosen: Manifest) -> Iterator[Target]:
    """Every target, one of precision ``auto`` once for each precision it may take."""
    for target in chosen.targets:
        if target.precision == AUTO:
            ladder = kind_named(target.kind).facts.dialect.ladder
            yield from (manifests.at_precision(chosen, target, precision) for precision in ladder)
        else:
            yield target


def buildable(chosen: Manifest, listener: Listener) -> Manifest:
    """Without a manifest and without names: the kinds whose toolchain is here; the others are named."""
    keep = []
    for target in chosen.targets:
        absent = missing_requirements(kind_named(target.kind), this_host())
        if absent:
            listener.warn(f"leaving out {target.name}: {absent[0].what} is missing ({absent[0].how})")
        else:
            keep.append(target.name)
    if not keep:
        raise UsageError("no target kind can be built on this machine", "run `packager doctor`")
    return manifests.select(chosen, keep)
