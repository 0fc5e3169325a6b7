"""Verification: the bundle's own service, started on free loopback ports, asked in every way that could tell a fault.

Rows are sent alone, two together and many at the same time, then what nobody should send (:mod:`.abuse`). Every golden
case then goes over HTTP, over gRPC and through the library form in this process; the three must agree. At the end the
service must stop by itself, with status 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from packager import parity
from packager.errors import VerificationError
from packager.goldens import Array
from packager.room import Runner, RuntimeInfo
from packager.rows import joined
from packager.targets.cpu import abuse
from packager.targets.cpu.client import Client
from packager.targets.cpu.infer import Session, read_settings
from packager.traffic import die_with_parent, difference, in_parallel, requests_of, stop

START_SECONDS = 300.0
STOP_SECONDS = 40.0
PARALLEL = 8
"""Requests sent at the same time."""


@dataclass(frozen=True)
class Service:
    """A running service: where it answers, its process and what it said."""

    http: str
    grpc: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Hold that it still runs.

        Raises:
            VerificationError: it ended; the message ends with what it said last.
        """
        if self.process.poll() is not None:
            raise VerificationError(f"the service ended with status {self.process.returncode}{tail(self.log)}")


@contextmanager
def running(bundle: Path, *flags: str) -> Iterator[Service]:
    """Start a bundle's ``serve.py``; end it, and hold that it ends well.

    Args:
        bundle: its folder, in which nothing is written.
        flags: more flags of ``serve.py``.

    Raises:
        VerificationError: it doesn't start, ends early, or doesn't end with status 0 when told to.
    """
    with started(bundle, *flags) as service:
        yield service
        service.check()
        status = stop(service.process, STOP_SECONDS)
        if status != 0:
            raise VerificationError(f"told to stop, the service ended with status {status}{tail(service.log)}")


@contextmanager
def started(bundle: Path, *flags: str) -> Iterator[Service]:
    """Start a bundle's ``serve.py`` on free ports of 127.0.0.1; it is gone afterwards, however it ended.

    Raises:
        VerificationError: it doesn't start.
    """
    command = [sys.executable, str(bundle.resolve() / "serve.py"), "--http-port", "0", "--grpc-port", "0", *flags]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SERVICE_")}
    surroundings = {**kept, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="packager-service-") as name:
        log = Path(name) / "log"
        with log.open("wb") as told:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=told, env=surroundings, cwd=name,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - nothing but one system call after fork
            )  # fmt: skip
        try:
            yield Service(*_addresses(process, log), process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _addresses(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """What the service says once it takes requests."""
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        line = process.stdout.readline() if process.stdout is not None else b""
    finally:
        timer.cancel()
    try:
        told = json.loads(line)
        return str(told["http"]), str(told["grpc"])
    except (ValueError, KeyError, TypeError):
        process.kill()
        raise VerificationError(f"the service doesn't start{tail(log)}", "build the bundle again") from None


def tail(log: Path) -> str:
    """The last lines of a log, indented."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return "".join(f"\n  | {line[:300]}" for line in lines)
    return ""


@contextmanager
def served(bundle: Path) -> Iterator[Runner]:
    """Serve a bundle's model, and try its service.

    Raises:
        VerificationError: see the module; the message says which request, and how.
    """
    try:
        golden = parity.read_golden(bundle / "golden")
        library = Session(bundle)
        limit = int(read_settings(bundle)["max_body_mb"])
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise VerificationError(str(error), "build the bundle again") from error
    with running(bundle) as service, ExitStack() as stack:
        try:
            clients = [stack.enter_context(closing(Client(bundle, url))) for url in (service.http, service.grpc)]
        except (ValueError, RuntimeError) as error:
            raise VerificationError(f"the service can't be asked: {error}{tail(service.log)}") from error
        _check_traffic(bundle, service, library, golden)
        told = abuse.survived(service.http, service.grpc, library, golden.cases[0].inputs, limit << 20)
        service.check()
        if told:
            raise VerificationError("the service doesn't refuse what is malformed:" + "".join(f"\n  {t}" for t in told))
        yield _Runner(library, clients, golden)


class _Runner:
    """Service and library behind the engine's Protocol."""

    def __init__(self, library: Session, clients: list[Client], golden: parity.Golden) -> None:
        self._library, self._clients, self._golden = library, clients, golden
        self.info = RuntimeInfo(
            name=library.info["name"],
            version=library.info["version"],
            device="CPU",
            level="runtime",
            details=(("asked over", "HTTP, gRPC and in process"),),
        )

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Ask over both protocols and in process; the answers must be the same.

        Raises:
            VerificationError: the service refused or failed, or the answers disagree.
        """
        alone, *others = [ask(each, feeds) for each in (self._library, *self._clients)]
        for how, other in zip(("HTTP", "gRPC"), others, strict=True):
            told = difference(alone, other, self._golden)
            if told:
                raise VerificationError(f"over {how} the answer is another than in process: {told}")
        return others[0]


def ask(model: Session | Client, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run once.

    Raises:
        VerificationError: it refused or failed, in its own words.
    """
    try:
        outputs: dict[str, Array] = model.run(feeds)
        return outputs
    except (ValueError, RuntimeError) as error:
        raise VerificationError(str(error)) from error


def _check_traffic(bundle: Path, service: Service, library: Session, golden: parity.Golden) -> None:
    """Alone, together and in parallel, over both protocols: all the same answers.

    Raises:
        VerificationError: an answer differs or fails.
    """
    merged = int(library.settings.get("max_batch", 0)) > 1
    requests = requests_of(golden, merged, PARALLEL)
    alone = [ask(library, feeds) for feeds in requests]
    if merged:
        with closing(Client(bundle, service.http)) as client:
            two = ask(client, joined(requests[:2]))
        for index in range(2):
            _agree(alone[index], {name: array[index : index + 1] for name, array in two.items()}, golden, "two rows")
    for url in (service.http, service.grpc):

        def fresh(feeds: Mapping[str, Array], url: str = url) -> dict[str, Array]:
            with closing(Client(bundle, url)) as client:
                return ask(client, feeds)

        for one, answer in zip(alone, in_parallel(fresh, requests), strict=True):
            _agree(one, answer, golden, f"parallel requests over {url.partition(':')[0]}")
    service.check()


def _agree(alone: Mapping[str, Array], other: Mapping[str, Array], golden: parity.Golden, how: str) -> None:
    told = difference(alone, other, golden)
    if told:
        raise VerificationError(
            f"the service answers differently to {how} than the model does alone: {told}",
            "the rows of a batch influence each other: build with max_batch = 0",
        )
