"""Children forked from an interpreter that has imported everything, in place of fresh ones that import it anew.

A node case is done in milliseconds; starting an interpreter with its libraries takes a second, a dozen times a case.
A forked child is still a process of its own: it runs the same job by the same function, crashes alone, and is killed
at the same time limit. No runtime has a session, a thread or a device open where the fork happens.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
import threading
from multiprocessing.connection import wait
from pathlib import Path

from packager import child

_context = multiprocessing.get_context("forkserver")


class Forked:
    """A child at work on a job's folder, as :class:`packager.child.Process` says."""

    def __init__(self, folder: Path) -> None:
        given = dict(os.environ, **child.QUIET)
        self._process = _context.Process(target=_live, args=(folder, given))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, negative for a signal."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a job", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Let go of it."""
        self._process.close()


def _live(folder: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with (folder / child.LOG).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    child.work(folder)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            wait([parent.sentinel])
    os._exit(1)


def fork_children(preloaded: str) -> None:
    """From now on jobs run in children forked from a process that has imported the module ``preloaded``."""
    multiprocessing.forkserver.set_forkserver_preload([preloaded])
    main = sys.modules["__main__"]
    main.__spec__ = None  # a child needs nothing of the program that asks
    if hasattr(main, "__file__"):
        del main.__file__
    child.start = Forked


def cpu_seconds() -> float:
    """CPU time of this process, the one that forks, and every child that ended, with what those waited for."""
    ours = sum(os.times()[:4])
    forking = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if forking is None:
        return ours
    fields = Path(f"/proc/{forking}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return ours + sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
