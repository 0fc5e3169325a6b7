"""A Triton server of our own: started on free loopback ports for one repository, asked, and gone without a trace.

Everything it leaves lies in one temporary folder, and its shared memory carries that folder's name. The folder is
locked while it is used, so that what a killed run left is recognised and removed by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from packager.errors import ToolchainMissing, VerificationError
from packager.targets.triton import kit as kits
from packager.traffic import die_with_parent, stop

PREFIX = "packager-triton-"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory
START_SECONDS = 60.0
LOAD_SECONDS = 600.0
STOP_SECONDS = 20.0
ATTEMPTS = 3
"""Starts that are tried where another process takes a port between our looking and the server's binding."""


@dataclass(frozen=True)
class Ports:
    """Where the server listens, on 127.0.0.1."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True)
class Server:
    """A running server. ``real_backend`` tells whether the C++ onnxruntime backend is what loads models."""

    ports: Ports
    log: Path
    real_backend: bool

    @property
    def http(self) -> str:
        """Its HTTP address."""
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def grpc(self) -> str:
        """Its gRPC address."""
        return f"grpc://127.0.0.1:{self.ports.grpc}"

    def load(self, model: str) -> None:
        """Load one model.

        Raises:
            VerificationError: Triton refuses it; the message has Triton's own reason.
        """
        before = self.log.stat().st_size
        status, body = self._ask(f"/v2/repository/models/{quote(model, safe='')}/load", b"{}", LOAD_SECONDS)
        if status == 200 and self._ask(f"/v2/models/{quote(model, safe='')}/ready", None)[0] == 200:
            return
        reason = load_failure(body, self.log.read_bytes()[before:].decode("utf-8", "replace"))
        raise VerificationError(f"Triton can't load model '{model}': {reason}", "build the bundle again")

    def get(self, path: str) -> dict[str, object]:
        """An answer of the server's HTTP interface.

        Raises:
            VerificationError: it isn't there.
        """
        status, body = self._ask(path, None)
        if status != 200:
            raise VerificationError(f"Triton answers {path} with status {status}: {body[:500]}")
        answer: dict[str, object] = json.loads(body)
        return answer

    def inferences_by_metrics(self, model: str) -> int:
        """What the metrics a monitoring system reads count for a model.

        Raises:
            VerificationError: they have no such count.
        """
        status, body = self._ask("/metrics", None, at=f"http://127.0.0.1:{self.ports.metrics}")
        found = re.findall(
            rf'^nv_inference_count{{[^}}\n]*model="{re.escape(model)}"[^}}\n]*}} (\d+)', body, re.MULTILINE
        )
        if status != 200 or not found:
            raise VerificationError(f"Triton's metrics have no nv_inference_count of model '{model}'")
        return sum(int(each) for each in found)

    def _ask(self, path: str, data: bytes | None, seconds: float = 30.0, at: str = "") -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request((at or self.http) + path, data=data)  # noqa: S310 - our own loopback server
        try:
            with opener.open(request, timeout=seconds) as answer:
                return answer.status, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode("utf-8", "replace")
        except (OSError, urllib.error.URLError) as error:
            return 0, str(error)


def load_failure(body: str, log: str) -> str:
    """Why a model didn't load: the answer's own words, or the log's where the answer has none."""
    with contextlib.suppress(ValueError, AttributeError):
        body = str(json.loads(body).get("error", body))
    told = " ".join(body.split())
    hidden = not told or "failed to poll from model repository" in told or told.endswith("no version is available")
    if hidden or "failed to load" in told:
        found = re.findall(r"(?:Poll failed for model directory|libprotobuf ERROR|failed to load)[^\n]*", log)
        told = "; ".join(dict.fromkeys(" ".join(line.split()) for line in (*found, told) if line))
    told = re.sub(r" At: (?:\S+\(\d+\): \w+ ?)+", "", told)  # the stand-in's own places
    return told[:2000].rstrip(" ;") or "it gives no reason"


@contextmanager
def serving(repository: Path) -> Iterator[Server]:
    """Start a server for a model repository, in explicit mode and without completing configurations.

    Raises:
        ToolchainMissing: there is no kit.
        VerificationError: the server doesn't start; the message ends with its log.
    """
    kit, libpython = kits.find_kit(), kits.find_libpython()
    if kit is None or libpython is None:
        raise ToolchainMissing("no Triton server to verify with", kits.MAKE)
    with work_folder() as folder:
        served = folder / "repository"
        served.symlink_to(repository.resolve(), target_is_directory=True)  # its path may hold a space, this doesn't
        real = kits.find_backends()
        backends = real or stand_in(kit, folder / "backends")
        with _started(kit, libpython, folder, backends, served) as (process, ports):
            yield Server(ports, folder / "log", real is not None)
            if process.poll() is not None:
                raise VerificationError(f"Triton ended with status {process.returncode}{_tail(folder / 'log')}")


def stand_in(kit: kits.Kit, folder: Path) -> Path:
    """Lay out a backend folder in which models of ``onnxruntime`` are loaded by :mod:`.standin`."""
    python, ours = folder / "python", folder / "onnxruntime"
    python.mkdir(parents=True)
    ours.mkdir()
    shutil.copyfile(kit.python_backend / "libtriton_python.so", python / "libtriton_python.so")
    shutil.copy(kit.stub, python / "triton_python_backend_stub")
    (python / "triton_python_backend_stub").chmod(0o755)
    utilities = "triton_python_backend_utils.py"
    shutil.copyfile(kit.python_backend / utilities, python / utilities)
    shutil.copyfile(Path(__file__).with_name("standin.py"), ours / "model.py")
    return folder


def environment(kit: kits.Kit, libpython: Path, folder: Path) -> dict[str, str]:
    """What the server runs in. The stub that hosts Python ignores PYTHONPATH and finds its prefix by the first Python
    on PATH: a virtual environment of its own, in which the kit is all there is."""
    packages = folder / f"venv/lib/python{kits.python_version()}/site-packages"
    packages.mkdir(parents=True)
    (packages / "kit.pth").write_text(f"{kit.folder.resolve()}\n", encoding="utf-8")
    programs = folder / "venv/bin"
    programs.mkdir()
    python = Path(sys._base_executable)  # type: ignore[attr-defined]  # what venv itself uses
    for name in ("python", "python3"):
        (programs / name).symlink_to(python)
    (folder / "venv/pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = false\n", encoding="utf-8"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **kept,
        "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": f"{kit.libraries}:{libpython.parent}",
    }


@contextmanager
def work_folder() -> Iterator[Path]:
    """A locked temporary folder without a space in its path; what dead runs left is removed first."""
    base = Path(tempfile.gettempdir())
    if " " in str(base):
        base = Path("/tmp")  # noqa: S108 - mkdtemp makes a folder of our own in it
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(handle)


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(handle)


def _remove(folder: Path) -> None:
    for region in SHARED_MEMORY.glob(f"{folder.name}_*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(
    kit: kits.Kit, libpython: Path, folder: Path, backends: Path, repository: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Ports]]:
    surroundings = environment(kit, libpython, folder)
    for attempt in range(ATTEMPTS):
        ports = _free_ports()
        command = command_line(kit.server, repository, backends, ports, folder.name)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=surroundings,
                cwd=folder, preexec_fn=die_with_parent(),  # noqa: PLW1509 - nothing but one system call after fork
            )  # fmt: skip
        try:
            if _alive(process, Server(ports, folder / "log", False)):
                yield process, ports
                return
            if attempt + 1 == ATTEMPTS or "ddress already in use" not in _tail(folder / "log"):
                raise VerificationError(f"Triton doesn't start{_tail(folder / 'log')}")
        finally:
            stop(process, STOP_SECONDS)


def command_line(server: Path, repository: Path, backends: Path, ports: Ports, region: str) -> list[str]:
    """How the server is started. ``region`` begins the names of its shared memory."""
    local = [f"--{what}-address=127.0.0.1" for what in ("http", "grpc", "metrics")]
    return [
        str(server), f"--model-repository={repository}", f"--backend-directory={backends}",
        "--model-control-mode=explicit", "--disable-auto-complete-config", *local,
        f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false", "--exit-timeout-secs=5",
        f"--backend-config=python,shm-region-prefix-name={region}_",
    ]  # fmt: skip


def _free_ports() -> Ports:
    """Three ports nobody listens on: Triton doesn't take port 0."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def _alive(process: subprocess.Popen[bytes], server: Server) -> bool:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            return False
        if server._ask("/v2/health/live", None, 5.0)[0] == 200:
            return True
        time.sleep(0.02)
    return False


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return "".join(f"\n  {line}" for line in lines)
    return ""
