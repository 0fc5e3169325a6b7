"""The kit: a real Triton server and what hosts ONNX Runtime in it, without a container.

The PyPI wheel of ``nvidia-pytriton`` carries ``tritonserver`` and its python backend. With an ONNX Runtime of the
release's age, and a numpy that the python backend can use, it is installed into a folder of its own, by digest, never
into packager's environment. ``python -m packager.targets.triton.kit`` makes it (pip, as the user has it configured);
a build never does. ``PACKAGER_TRITON_KIT`` names one made elsewhere.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packager.cache import default_cache
from packager.errors import StorageError, ToolchainMissing
from packager.files import replace_folder
from packager.host import Host
from packager.room import Missing, kind_named

KIT_VARIABLE = "PACKAGER_TRITON_KIT"
BACKENDS_VARIABLE = "PACKAGER_TRITON_BACKENDS"
REAL_BACKEND = Path("onnxruntime/libtriton_onnxruntime.so")
STAND_IN = "packager-stand-in"
"""What a server calls itself that hosts our stand-in, so that nobody takes it for one with the real backend."""

MAKE = "python -m packager.targets.triton.kit"
PARTS = ("nvidia-pytriton", "numpy", "onnxruntime")
PYTHONS = ((3, 11), (3, 12))
"""Versions of Python that the kit's stub, numpy and ONNX Runtime all exist for."""

PIP_SECONDS = 1800.0


@dataclass(frozen=True)
class Kit:
    """An installed kit: its folder and the files in it that matter."""

    folder: Path

    @property
    def triton(self) -> Path:
        """The server's own tree."""
        return self.folder / "pytriton/tritonserver"

    @property
    def server(self) -> Path:
        """The ``tritonserver`` executable."""
        return self.triton / "bin/tritonserver"

    @property
    def python_backend(self) -> Path:
        """The folder of the python backend's library and utilities."""
        return self.triton / "backends/python"

    @property
    def stub(self) -> Path:
        """The process that hosts Python of the version that runs packager."""
        return self.triton / f"python_backend_stubs/{python_version()}/triton_python_backend_stub"

    @property
    def libraries(self) -> Path:
        """Shared libraries the server is linked with."""
        return self.folder / "nvidia_pytriton.libs"

    @property
    def whole(self) -> bool:
        """Whether everything that is used is there."""
        parts = (self.server, self.python_backend, self.stub, self.libraries)
        return all(path.exists() for path in (*parts, self.folder / "numpy", self.folder / "onnxruntime"))


@dataclass(frozen=True)
class Program:
    """A server that can be started: its executable, the kit it is of, and its backends.

    ``kit`` is ``None`` for a server that is installed on this machine. ``backends`` is a folder with the real
    onnxruntime backend; where it is ``None``, the kit hosts a stand-in.
    """

    server: Path
    kit: Kit | None
    backends: Path | None = None


@cache
def pins() -> dict[str, str]:
    """The pins of ``target.toml``."""
    return dict(kind_named("triton").facts.pins)


def python_version() -> str:
    """``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def kit_name() -> str:
    """The folder's name: every pin is in it, so that new pins make a new kit."""
    known = pins()
    return "-".join(["triton", *(f"{part}-{known[part]}" for part in PARTS), f"py{python_version()}"])


def find_kit() -> Kit | None:
    """The kit that is used: the one the environment names, else the one in packager's cache or the platform's."""
    chosen = os.environ.get(KIT_VARIABLE)
    places = [Path(chosen)] if chosen else [root / "runtimes" / kit_name() for root in _roots()]
    return next((kit for kit in map(Kit, places) if kit.whole), None)


def _roots() -> list[Path]:
    import platformdirs

    moved = default_cache().root
    usual = Path(platformdirs.user_cache_dir("packager", appauthor=False))
    return [usual] if moved is None or moved == usual else [moved, usual]


def find_libpython() -> Path | None:
    """The shared library of the running Python's version, which the stub is linked with."""
    name = f"libpython{python_version()}.so.1.0"
    places = [
        sysconfig.get_config_var("LIBDIR"),
        Path(sys.base_prefix) / "lib",
        Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"),
        "/usr/lib64",
        "/usr/local/lib",
    ]
    return next((Path(place) / name for place in places if place and (Path(place) / name).is_file()), None)


def find_backends() -> Path | None:
    """A folder with the real onnxruntime backend, where the environment names one that has it."""
    chosen = os.environ.get(BACKENDS_VARIABLE)
    if not chosen:
        return None
    folder = Path(chosen).absolute()
    return folder if (folder / REAL_BACKEND).is_file() else None


def find_installed() -> Program | None:
    """The ``tritonserver`` on PATH, where it has the real onnxruntime backend: beside it, as in Triton's container, or
    in the folder that the environment names."""
    found = shutil.which("tritonserver")
    if found is None:
        return None
    beside = Path(found).resolve().parent.parent / "backends"
    backends = find_backends() or (beside if (beside / REAL_BACKEND).is_file() else None)
    return None if backends is None else Program(Path(found), None, backends)


def find_program() -> Program | None:
    """The server that verifies: an installed one, else the kit's with the backends that the environment names, else
    the kit's with our stand-in."""
    installed, kit = find_installed(), find_kit()
    if installed is not None or kit is None:
        return installed
    backends = find_backends()
    return Program(kit.server, kit, backends) if backends or find_libpython() else None


def missing_parts(host: Host) -> list[Missing]:
    """What this machine lacks for starting the server, each with how to get it."""
    if (host.system, host.machine) != ("Linux", "x86_64"):
        return [Missing(f"Triton on {host.system} {host.machine}", "build on Linux on x86_64")]
    if os.environ.get(BACKENDS_VARIABLE) and find_backends() is None:
        where = f"{os.environ[BACKENDS_VARIABLE]} has no {REAL_BACKEND.as_posix()}"
        return [
            Missing(f"the backend that {BACKENDS_VARIABLE} names ({where})", f"correct or unset {BACKENDS_VARIABLE}")
        ]
    if find_installed() is not None:
        return []
    if sys.version_info[:2] not in PYTHONS:
        listed = " or ".join(".".join(map(str, version)) for version in PYTHONS)
        return [
            Missing(
                f"a Python that the server's python backend can host (this is {python_version()})",
                f"run packager with Python {listed}",
            )
        ]
    found: list[Missing] = []
    if find_kit() is None:
        chosen = os.environ.get(KIT_VARIABLE)
        where = f" ({KIT_VARIABLE} is '{chosen}', which is no whole kit)" if chosen else ""
        found.append(Missing(f"Triton {pins()['server']} to verify with{where}", MAKE))
    if find_libpython() is None:
        version = python_version()
        found.append(
            Missing(
                f"libpython{version}.so.1.0, which Triton's python backend loads",
                f"apt-get install libpython{version}, or a Python built with --enable-shared",
            )
        )
    return found


def make_kit() -> Kit:
    """Install the kit where it is looked for, whole or not at all; one that is there is left alone.

    Raises:
        ToolchainMissing: pip can't get it, or this machine can't run it.
        StorageError: the cache folder can't be written.
    """
    there = find_kit()
    if there is not None:
        return there
    root = default_cache().root
    if root is None or sys.platform != "linux" or sys.version_info[:2] not in PYTHONS:
        raise ToolchainMissing("the kit can't be made here", "use Linux on x86_64 with Python 3.11 or 3.12")
    from filelock import FileLock

    runtimes = root / "runtimes"
    try:
        runtimes.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(runtimes / "making.lock"),
            tempfile.TemporaryDirectory(dir=runtimes, prefix="new-", ignore_cleanup_errors=True) as name,
        ):
            made = find_kit()
            if made is not None:  # by another process, while this one waited
                return made
            stage = Path(name) / "kit"
            _install(stage, Path(name) / "requirements.txt")
            if not Kit(stage).whole:
                raise ToolchainMissing("what pip installed is no whole kit", "report the platform and Python version")
            replace_folder(stage, runtimes / kit_name())
    except OSError as error:
        raise StorageError(f"the kit can't be written: {error}", "make room, or set PACKAGER_CACHE_DIR") from error
    return Kit(runtimes / kit_name())


def requirements() -> str:
    """The kit as pip's requirements, every file by digest."""
    known = pins()
    lines = []
    for part in PARTS:
        digests = " ".join(f"--hash=sha256:{digest}" for digest in known[f"{part}.sha256"].split())
        lines.append(f"{part}=={known[part]} {digests}\n")
    return "".join(lines)


def _install(target: Path, file: Path) -> None:
    file.write_text(requirements(), encoding="utf-8")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile",
        "--only-binary", ":all:", "--require-hashes", "--target", str(target), "--requirement", str(file),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ToolchainMissing(f"pip took longer than {PIP_SECONDS:g} s", "try again with a nearer index") from error
    if done.returncode != 0:
        said = "\n".join(line for line in done.stderr.splitlines() if "WARNING" not in line)[-1500:]
        raise ToolchainMissing(f"pip can't install the kit:\n{said}", "check pip's index and network, and try again")


def main() -> int:
    """Make the kit and print where it lies."""
    from packager.errors import PackagerError

    try:
        sys.stdout.write(f"{make_kit().folder}\n")
    except PackagerError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
