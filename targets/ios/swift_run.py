"""Running the generated Swift package here: build it over the stand-in, feed it, read what it gives.

A work folder holds the bundle's package as it ships, the stand-in (:mod:`standin`), a small program that answers
requests through the package's typed interface (``harness``), and ONNX Runtime's library. Requests and answers are a
JSON file and a file of bytes each.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packager.errors import VerificationError
from packager.files import clone_file, clone_tree, write_text
from packager.render import render
from packager.room import kind_named
from packager.targets.ios.toolchain import Toolchain

if TYPE_CHECKING:
    from packager.goldens import Array

STANDIN = "onnxruntime-swift-package-manager"
BUILD_SECONDS = 1200.0
DTYPES = {
    "float32": "<f4", "int8": "<i1", "uint8": "<u1", "int32": "<i4", "uint32": "<u4", "int64": "<i8",
    "uint64": "<u8", "bool": "?",
}  # fmt: skip


def lay_out(bundle: Path, work: Path) -> None:
    """Put the package, the stand-in and the library into ``work``."""
    clone_tree(bundle, work / "bundle")
    clone_tree(Path(__file__).with_name("standin"), work / STANDIN)
    (work / "home").mkdir()
    (work / "lib").mkdir()
    clone_file(_library(), work / "lib" / "libonnxruntime.so.1")
    (work / "lib" / "libonnxruntime.so").symlink_to("libonnxruntime.so.1")


def _library() -> Path:
    import onnxruntime

    return next(iter(sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1.*"))))


def linking(toolchain: Toolchain, work: Path) -> tuple[str, ...]:
    """Arguments of ``swift build`` and ``swift test`` that find the library."""
    library = f"{toolchain.inside(work)}/lib"
    return ("-Xlinker", f"-L{library}", "-Xlinker", "-rpath", "-Xlinker", library)


def build(toolchain: Toolchain, work: Path, module: str) -> None:
    """Compile the package and the harness.

    Raises:
        VerificationError: the generated package doesn't compile; the compiler's own lines are given.
    """
    kind = kind_named(Path(__file__).parent.name)
    (work / "harness/Sources/Harness").mkdir(parents=True)
    for template, target in (("Package.swift", "Package.swift"), ("main.swift", "Sources/Harness/main.swift")):
        write_text(work / "harness" / target, render(kind, f"{kind.name}/harness/{template}.j2", module=module))
    path = f"{toolchain.inside(work)}/harness"
    done = toolchain.run(
        work,
        "swift",
        "build",
        "--disable-index-store",
        "--package-path",
        path,
        *linking(toolchain, work),
        seconds=BUILD_SECONDS,
    )
    if done.returncode:
        errors = list(
            dict.fromkeys(line for line in done.stdout.splitlines() if re.match(r"\S.*: error: |error: ", line))
        )
        listed = "".join(f"\n  {line.strip()}" for line in (errors or done.stdout.splitlines()[-5:])[:5])
        raise VerificationError(f"the Swift package doesn't build:{listed}")


class SwiftModel:
    """The generated package, loaded and waiting for inputs."""

    def __init__(self, toolchain: Toolchain, work: Path) -> None:
        """Start the program; it loads the model at once.

        Raises:
            VerificationError: the package's own error, such as a damaged model file.
        """
        self._work, self._inside = work, toolchain.inside(work)
        program = f"{self._inside}/harness/.build/debug/Harness"
        self._process = subprocess.Popen(
            toolchain.command(work, program, self._inside), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._count = 0
        try:
            self._answer()
        except VerificationError:
            self.close()
            raise

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Raises:
            VerificationError: the package's own error.
        """
        self._count += 1
        name = f"case{self._count}"
        _write(self._work / f"{name}-in", feeds)
        assert self._process.stdin is not None  # noqa: S101 - it was opened with a pipe
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        self._answer()
        return _read(self._work / f"{name}-out")

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - it was opened with a pipe
        line = self._process.stdout.readline().rstrip("\n")
        status, _, text = line.partition(" ")
        if status != "ok":
            raise VerificationError(f"the Swift package failed: {text or 'the program ended'}")
        return text


@contextmanager
def swift_model(toolchain: Toolchain, bundle: Path, module: str) -> Iterator[SwiftModel]:
    """Build and start the package of ``bundle`` in a folder that goes afterwards.

    Raises:
        VerificationError: it doesn't build or doesn't load.
    """
    with tempfile.TemporaryDirectory(prefix="packager-ios-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        lay_out(bundle, work)
        build(toolchain, work, module)
        model = SwiftModel(toolchain, work)
        try:
            yield model
        finally:
            model.close()


def module_in(bundle: Path) -> str:
    """The module's name as ``Package.swift`` has it.

    Raises:
        VerificationError: there is none.
    """
    found = re.search(r'^    name: "(\w+)",$', (bundle / "Package.swift").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise VerificationError(f"{bundle / 'Package.swift'} names no package", "build the bundle again")
    return found[1]


def _write(path: Path, tensors: Mapping[str, Array]) -> None:
    entries: list[dict[str, object]] = []
    payload = bytearray()
    for name, array in tensors.items():
        entry: dict[str, object] = {"name": name, "shape": list(array.shape)}
        if array.dtype.kind in "OUS":
            entry |= {"dtype": "string", "strings": [str(text) for text in array.reshape(-1)]}
        else:
            data = np.ascontiguousarray(array).tobytes()
            entry |= {"dtype": array.dtype.name, "start": len(payload), "length": len(data)}
            payload += data
        entries.append(entry)
    path.with_suffix(".json").write_text(json.dumps(entries), encoding="utf-8")
    path.with_suffix(".bin").write_bytes(payload)


def _read(path: Path) -> dict[str, Array]:
    payload = path.with_suffix(".bin").read_bytes()
    found: dict[str, Array] = {}
    for entry in json.loads(path.with_suffix(".json").read_text(encoding="utf-8")):
        if entry["dtype"] == "string":
            flat = np.array(entry["strings"], dtype=object)
        else:
            part = payload[entry["start"] : entry["start"] + entry["length"]]
            flat = np.frombuffer(part, dtype=DTYPES[entry["dtype"]]).copy()
        found[entry["name"]] = flat.reshape(entry["shape"])
    return found
