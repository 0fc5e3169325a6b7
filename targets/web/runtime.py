"""The runtime that ships: three files a build of onnxruntime-web, fetched through npm by pin and checked by digest.

npm uses its own configuration, so a company's mirror works and no host is named here. The tarball is checked against
the registry's SHA-512 that ``target.toml`` pins, each file against its own SHA-256. What is cached is what ships:
scripts named ``.js`` (servers know that type; few know ``.mjs``) that call one another so, without the pointer to a
source map that isn't shipped, with the licence text that the tarball lacks, and compressed once for all bundles.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packager.cache import default_cache, tree_digest
from packager.errors import BuildError, ToolchainMissing
from packager.files import clone_tree, remove_tree
from packager.targets.web.node import HOW, find_npm

SHIPPED = {
    "ort.wasm.min.mjs": "ort.wasm.min.js",
    "ort-wasm-simd-threaded.mjs": "ort-wasm-simd-threaded.js",
    "ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
}
"""Files of the package's ``dist`` folder that ship, and what they are called in the bundle's ``runtime/``."""

WEBGPU = {
    "ort.webgpu.min.mjs": "ort.webgpu.min.js",
    "ort-wasm-simd-threaded.asyncify.mjs": "ort-wasm-simd-threaded.asyncify.js",
    "ort-wasm-simd-threaded.asyncify.wasm": "ort-wasm-simd-threaded.asyncify.wasm",
}
"""The same of the build that computes on WebGPU, for the bundle's ``webgpu/``."""

# Node's own threads aren't used. webpack's minimizer reads a .js asset as a script, where `await` can't stand.
_NODE_THREADS = (b'if(isNode)isPthread=(await import("worker_threads")).workerData==="em-pthread";', b"")
EDITS = {
    "ort.wasm.min.mjs": (
        (b'"ort.wasm.min.mjs"', b'"ort.wasm.min.js"'),
        (b'"ort-wasm-simd-threaded.mjs"', b'"ort-wasm-simd-threaded.js"'),
    ),
    "ort-wasm-simd-threaded.mjs": (_NODE_THREADS,),
    "ort.webgpu.min.mjs": (
        (b'"ort.webgpu.min.mjs"', b'"ort.webgpu.min.js"'),
        (b'"ort-wasm-simd-threaded.asyncify.mjs"', b'"ort-wasm-simd-threaded.asyncify.js"'),
    ),
    "ort-wasm-simd-threaded.asyncify.mjs": (_NODE_THREADS,),
}
"""What is replaced in scripts as they are shipped: each text must be there exactly once."""

LICENCE = "LICENSE.txt"
NPM_SECONDS = 600.0
BROTLI_QUALITY = 9
"""Of the WASM file: 2.69 MB in 1.5 s; the highest quality (11) gains 12 % more and takes a minute."""


def place_runtime(
    pins: Mapping[str, str], licence: str, runtime_dir: str, target: Path, shipped: Mapping[str, str] = SHIPPED
) -> None:
    """Put the runtime's files, as they ship, into the new folder ``target``.

    Args:
        pins: ``[pins]`` of ``target.toml``.
        licence: text of the runtime's licence.
        runtime_dir: where its files or tarball are, or empty to use the cache and npm.
        target: a folder that doesn't exist yet.
        shipped: which files, and what they are called: :data:`SHIPPED` or :data:`WEBGPU`.

    Raises:
        ToolchainMissing: nothing is cached, and npm is absent or couldn't fetch.
        BuildError: a file isn't the pinned one.
    """
    deciding = sorted((name, pins[name]) for name in ("package", "version", "integrity", *shipped))
    key = hashlib.sha256(repr((deciding, licence, _recipe(shipped))).encode()).hexdigest()[:16]
    root = _runtimes()
    ready = None if root is None else root / f"{pins['package']}-{pins['version']}-{key}"
    if ready is not None and _is_whole(ready):
        clone_tree(ready / "files", target)
        return
    with tempfile.TemporaryDirectory(prefix="packager-runtime-") as name:
        work = Path(name)
        made = work / "ready" / "files"
        made.mkdir(parents=True)
        _ship(_sources(pins, runtime_dir, work, shipped), pins, licence, made, shipped)
        (made.parent / "digest").write_text(tree_digest(made), encoding="utf-8")
        if ready is not None:
            _keep(made.parent, ready)
        clone_tree(made, target)


def _runtimes() -> Path | None:
    """Where fetched runtimes are kept: in the cache, unless ``PACKAGER_RUNTIME_DIR`` says where."""
    chosen = os.environ.get("PACKAGER_RUNTIME_DIR")
    root = default_cache().root
    return Path(chosen).absolute() if chosen else None if root is None else root / "runtimes"


def _recipe(shipped: Mapping[str, str]) -> str:
    """What decides the shipped bytes beside the pins."""
    import brotli

    edits = {name: EDITS[name] for name in shipped if name in EDITS}
    return f"brotli {brotli.__version__} q{BROTLI_QUALITY} {edits!r}"


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / "digest").read_text(encoding="utf-8") == tree_digest(folder / "files")
    except OSError:
        return False


def _keep(made: Path, ready: Path) -> None:
    """Put a finished runtime into the cache by one rename; whoever comes second leaves the first one's in place."""
    try:
        ready.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(dir=ready.parent, prefix=".new-"))
        try:
            clone_tree(made, stage / "ready")
            if ready.exists() and not _is_whole(ready):
                ready.rename(stage / "spoilt")
            (stage / "ready").rename(ready)
        finally:
            remove_tree(stage)
    except OSError:
        return  # another process was quicker, or the cache can't be written: neither is a reason to fail


def _sources(pins: Mapping[str, str], runtime_dir: str, work: Path, shipped: Mapping[str, str]) -> Path:
    """A folder that holds the package's files under their own names."""
    tarball = f"{pins['package']}-{pins['version']}.tgz"
    if runtime_dir:
        folder = Path(runtime_dir)
        if (folder / tarball).is_file():
            return _unpack(folder / tarball, pins, work, shipped)
        if all((folder / name).is_file() for name in shipped):
            return folder
        raise ToolchainMissing(
            f"runtime_dir {folder} holds neither {tarball} nor the files {', '.join(shipped)}",
            f"run `npm pack {pins['package']}@{pins['version']}` there on a machine with a network",
        )
    return _unpack(_fetch(pins, work, tarball), pins, work, shipped)


def _fetch(pins: Mapping[str, str], work: Path, tarball: str) -> Path:
    npm = find_npm()
    wanted = f"{pins['package']}@{pins['version']}"
    if npm is None:
        raise ToolchainMissing(f"{wanted} isn't cached and there is no npm to fetch it with", HOW)
    command = [*npm, "pack", wanted, "--ignore-scripts", "--loglevel=error", "--pack-destination", str(work)]
    try:
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, errors="replace", timeout=NPM_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ToolchainMissing(f"npm didn't fetch {wanted} within {NPM_SECONDS:g} s", _offline(wanted)) from error
    if done.returncode or not (work / tarball).is_file():
        said = " ".join(re.sub(r"npm (ERR!|error)", "", done.stderr or done.stdout).split())[:400]
        raise ToolchainMissing(f"npm can't fetch {wanted}: {said or 'it gives no reason'}", _offline(wanted))
    return work / tarball


def _offline(wanted: str) -> str:
    return f"check `npm view {wanted}`, or run `npm pack {wanted}` elsewhere and give its folder as runtime_dir"


def _unpack(tarball: Path, pins: Mapping[str, str], work: Path, shipped: Mapping[str, str]) -> Path:
    """Check the tarball and take the files out of it.

    Raises:
        BuildError: it isn't the pinned one, or lacks a file.
    """
    algorithm, _, wanted = pins["integrity"].partition("-")
    with tarball.open("rb") as stream:
        found = base64.b64encode(hashlib.file_digest(stream, algorithm).digest()).decode()
    if found != wanted:
        raise BuildError(
            f"{tarball.name} is not the pinned package: its {algorithm} is {found}, target.toml says {wanted}",
            "fetch it again; if it stays so, the registry's or mirror's copy was changed",
        )
    folder = work / "dist"
    folder.mkdir()
    with tarfile.open(tarball, "r:gz") as tar:
        for name in shipped:
            try:
                member = tar.extractfile(f"package/dist/{name}")
            except KeyError:
                member = None
            if member is None:
                raise BuildError(f"{tarball.name} holds no dist/{name}")
            with member, (folder / name).open("wb") as out:
                shutil.copyfileobj(member, out)
    return folder


def _ship(source: Path, pins: Mapping[str, str], licence: str, made: Path, shipped: Mapping[str, str]) -> None:
    """Write the files as they ship.

    Raises:
        BuildError: a file isn't the pinned one.
    """
    for name, called in shipped.items():
        data = (source / name).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != pins[name]:
            raise BuildError(
                f"{name} is not that of {pins['package']} {pins['version']}: its SHA-256 is {found}",
                "give the folder of exactly that version, unchanged",
            )
        if called.endswith(".js"):
            data = re.sub(rb"\n?//# sourceMappingURL=\S*\s*$", b"\n", data)
        for before, after in EDITS.get(name, ()):
            if data.count(before) != 1:
                raise BuildError(f"{name}: {before.decode()} is there {data.count(before)} times, not once")
            data = data.replace(before, after)
        (made / called).write_bytes(data)
        compress(made / called, data)
    (made / LICENCE).write_text(licence, encoding="utf-8", newline="\n")


def compress(path: Path, data: bytes) -> None:
    """Write ``<path>.gz`` and ``<path>.br``; the same data gives the same bytes."""
    import brotli

    gzipped = gzip.compress(data, 9, mtime=0)
    path.with_name(f"{path.name}.gz").write_bytes(gzipped)
    path.with_name(f"{path.name}.br").write_bytes(brotli.compress(data, quality=BROTLI_QUALITY))
