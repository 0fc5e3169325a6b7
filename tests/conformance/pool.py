"""Worker processes that do one case after another; one that dies or hangs is replaced, and its case booked so."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from tests.conformance.worker import REFERENCE, Ending, Request

LIMIT = 900.0
"""Seconds that all of a case may take; the limits of its single steps are far below."""

ROOT = Path(__file__).parents[2]
Told = Callable[[Request, dict[str, Ending], float], None]


class Worker:
    """One worker process; what it leaves lies in ``scratch``."""

    def __init__(self, scratch: str) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
        )

    def do(self, request: Request) -> tuple[dict[str, Ending], float] | Ending:
        """The ends of a case and the CPU seconds it took, or how the worker itself ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            self._process.stdin.flush()
            line = _line(self._process.stdout)
        except BrokenPipeError:
            line = b""
        if line is None:
            return Ending("hang", f"the whole case took longer than {LIMIT:g} s")
        if not line:
            return Ending("crash", f"packager itself died with status {self._process.wait()}")
        answer = json.loads(line)
        return {kind: Ending(**ending) for kind, ending in answer["ends"].items()}, float(answer["cpu"])

    def stop(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _line(stream: IO[bytes]) -> bytes | None:
    """The next line; ``None`` where none comes in time, empty at the end. Nothing is ever left in the buffer."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(LIMIT) else None


def do_all(requests: Iterable[Request], jobs: int, told: Told) -> None:
    """Do every request with ``jobs`` workers and tell how each ended, from the thread of the worker.

    Raises:
        KeyboardInterrupt: interrupted; the workers are gone, what was told is whole.
    """
    with tempfile.TemporaryDirectory(prefix="packager-c-", ignore_cleanup_errors=True) as scratch:
        _do_all(requests, jobs, told, scratch)


def _do_all(requests: Iterable[Request], jobs: int, told: Told, scratch: str) -> None:
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    workers: list[Worker] = []
    stopping = threading.Event()

    def work() -> None:
        worker = Worker(scratch)
        workers.append(worker)
        while not stopping.is_set():
            try:
                request = waiting.get_nowait()
            except queue.Empty:
                break
            done = worker.do(request)
            if stopping.is_set():
                break
            if isinstance(done, Ending):
                worker.stop()
                worker = Worker(scratch)
                workers.append(worker)
                done = dict.fromkeys((REFERENCE, *request.kinds), done), 0.0
            told(request, *done)
        worker.stop()

    threads = [threading.Thread(target=work, name=f"worker-{number}", daemon=True) for number in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        heeded = signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever is impatient must not leave workers behind
        stopping.set()
        for worker in workers:
            worker.stop()
        signal.signal(signal.SIGINT, heeded)
