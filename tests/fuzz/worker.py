"""Runs packager's command line again and again in forks of one warm process: ``python -m tests.fuzz.worker``.

Starting an interpreter and importing takes longer than most commands do. One request a line comes in on standard input,
one answer a line goes out on standard output, both JSON. Each command runs in a fork of its own, in a process group of
its own, with a limit on its address space and on its time. POSIX only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ADDRESS_SPACE = 16 << 30
"""Bytes. A guard for the machine, not the bound that is checked: runtimes reserve much more than they use."""


@dataclass(frozen=True)
class Request:
    """A command: arguments of ``packager``, the folder it runs in, its environment, and its time in seconds."""

    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class Answer:
    """How a command ended.

    ``status`` is negative for a signal, as in :mod:`subprocess`; ``peak`` is the largest resident size in bytes of the
    command or of a process it waited for.
    """

    status: int
    timed_out: bool
    seconds: float
    peak: int
    out: str
    err: str


def serve() -> None:
    """Answer requests until standard input closes."""
    _warm()
    for line in sys.stdin:
        request = Request(**json.loads(line))
        sys.stdout.write(json.dumps(asdict(_run(request))) + "\n")
        sys.stdout.flush()


def _warm() -> None:
    """Import what commands import. Nothing that starts threads: a fork has only one."""
    import numpy as np
    import onnx.checker  # noqa: F401

    from packager import cli, engine, golden_formats, golden_store, report  # noqa: F401
    from packager.manifest_tables import room_options
    from packager.room import kinds

    np.random.default_rng(0)
    for kind in kinds().values():
        room_options(kind)


def _run(request: Request) -> Answer:
    said = [Path(request.folder).with_name(f"{Path(request.folder).name}.{name}") for name in ("out", "err")]
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _command(request, *said)
    timed_out = False
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if not timed_out and time.monotonic() - begun > request.seconds:
            timed_out = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in said]
    for path in said:
        path.unlink()
    return Answer(
        os.waitstatus_to_exitcode(status), timed_out, time.monotonic() - begun, usage.ru_maxrss * 1024, *texts
    )


def _command(request: Request, out: Path, err: Path) -> None:
    """In the fork: never returns."""
    status = 70
    try:
        os.setsid()
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        from packager import cli

        try:
            cli.main(list(request.arguments))
        except SystemExit as ended:
            status = int(ended.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
