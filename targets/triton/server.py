"""A Triton server of our own: started on free loopback ports for one repository, asked, and gone without a trace.

Everything it leaves lies in one temporary folder, and its shared memory carries that folder's name. It runs under
:mod:`packager.supervise`, which ends it and removes both however the run ends. The folder is locked while it is used:
where even the supervisor was killed, the next run recognises what is left and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
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

from packager.cache import default_cache
from packager.errors import ToolchainMissing, VerificationError
from packager.supervise import Running, clean, running
from packager.targets.triton import kit as kits

PREFIX = "packager-triton-"
START_SECONDS = 60.0
LOAD_SECONDS = 600.0
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

    def load(self, model: str, override: str = "") -> None:
        """Load one model, with a configuration in JSON in place of its file's where there is one.

        Raises:
            VerificationError: Triton refuses it; the message has Triton's own reason.
        """
        before = self.log.stat().st_size
        asked = json.dumps({"parameters": {"config": override}} if override else {}).encode("ascii")
        status, body = self._ask(f"/v2/repository/models/{quote(model, safe='')}/load", asked, LOAD_SECONDS)
        if status == 200 and self._ask(f"/v2/models/{quote(model, safe='')}/ready", None)[0] == 200:
            return
        reason = load_failure(body, self.log.read_bytes()[before:].decode("utf-8", "replace"))
        raise VerificationError(f"Triton can't load model '{model}': {reason}", "build the bundle again")

    def live(self) -> bool:
        """Whether it answers."""
        return self._ask("/v2/health/live", None, 5.0)[0] == 200

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
def serving(repository: Path, rate_limited: bool = False) -> Iterator[Server]:
    """Start a server for a model repository, in explicit mode and without completing configurations.

    Args:
        repository: the model repository, which is only read.
        rate_limited: whether instances wait for the resources that their configuration says.

    Raises:
        ToolchainMissing: there is none that could be started.
        VerificationError: the server doesn't start, or what is done with it fails. Its log is kept then, and the
            message says where.
    """
    program = kits.find_program()
    if program is None:
        raise ToolchainMissing("no Triton server to verify with", kits.MAKE)
    for attempt in range(ATTEMPTS):
        with work_folder() as folder:
            ports = _free_ports()
            command = command_line(program, folder, repository, ports)
            command += ["--rate-limit=execution_count"] if rate_limited else []
            server = Server(ports, folder / "log", program.backends is not None)
            with running(command, folder, environment(program, folder)) as process:
                told = _await(process, server)
                if "ddress already in use" in told and attempt + 1 < ATTEMPTS:
                    continue
                try:
                    if told:
                        raise VerificationError(f"Triton doesn't start: {told}")
                    yield server
                    ended = process.ended()
                    if ended is not None:
                        raise VerificationError(f"Triton is gone: {ended}")
                except VerificationError as error:
                    kept = keep_log(server.log)
                    where = f"\n  Triton's log: {kept}" if kept else ""
                    raise VerificationError(error.message + where, error.hint) from error
            return


def keep_log(log: Path) -> Path | None:
    """Copy a server's log to where packager keeps the last one; ``None`` where there is none or no place for it."""
    root = default_cache().root
    if root is None:
        return None
    kept = root / "logs" / "triton.log"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, kept)
    except OSError:
        return None
    return kept


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


def environment(program: kits.Program, folder: Path) -> dict[str, str]:
    """What the server runs in. An installed one runs in the user's own; the kit's in one made for it: the stub that
    hosts Python ignores PYTHONPATH and finds its prefix by the first Python on PATH, so that is a virtual environment
    in which the kit is all there is."""
    libpython = kits.find_libpython()
    if program.kit is None or libpython is None:
        return dict(os.environ)
    packages = folder / f"venv/lib/python{kits.python_version()}/site-packages"
    packages.mkdir(parents=True)
    (packages / "kit.pth").write_text(f"{program.kit.folder.resolve()}\n", encoding="utf-8")
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
        "LD_LIBRARY_PATH": f"{program.kit.libraries}:{libpython.parent}",
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
        clean(folder)
        os.close(handle)


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clean(folder)
            finally:
                os.close(handle)


def command_line(program: kits.Program, folder: Path, repository: Path, ports: Ports) -> list[str]:
    """How the server is started; a stand-in for its backend is laid out in ``folder`` where it has none."""
    served = folder / "repository"
    served.symlink_to(repository.resolve(), target_is_directory=True)  # its path may hold a space, this doesn't
    backends = program.backends or (stand_in(program.kit, folder / "backends") if program.kit else None)
    local = [f"--{what}-address=127.0.0.1" for what in ("http", "grpc", "metrics")]
    return [
        str(program.server), f"--model-repository={served}", f"--backend-directory={backends}",
        "--model-control-mode=explicit", "--disable-auto-complete-config", *local,
        f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false", "--exit-timeout-secs=5",
        f"--backend-config=python,shm-region-prefix-name={folder.name}_",
        *([] if program.backends else [f"--id={kits.STAND_IN}"]),
    ]  # fmt: skip


def _free_ports() -> Ports:
    """Three ports nobody listens on: Triton doesn't take port 0."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def _await(process: Running, server: Server) -> str:
    """Wait until it answers; why it doesn't, or nothing."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        ended = process.ended()
        if ended is not None:
            return ended
        if server.live():
            return ""
        time.sleep(0.02)
    return f"it doesn't answer within {START_SECONDS:g} s"
