"""Runs a program and leaves nothing behind: ``python supervise.py FOLDER COMMAND...``.

The command runs in a process group of its own, with its temporary files in FOLDER. When standard input closes, which it
does however the parent ends, or when the command ends by itself, the whole group is killed and FOLDER is removed, with
POSIX shared memory whose name begins with the folder's. All that the command says is in ``FOLDER/log``; the end of it
comes out here, once it has ended.

Rooms use :func:`running`; the rest of this file is what that starts, by path: it imports nothing of packager.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 4000
LOG_LINES = 8
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Running:
    """A program under supervision."""

    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Have it killed, without waiting."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def ended(self) -> str | None:
        """How it ended and what it said last, or ``None`` while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        said = b"" if self.process.stdout is None else self.process.stdout.read()
        lines = said.decode("utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        return f"it ended with status {status}" + "".join(f"\n  | {line[:300]}" for line in lines)


@contextlib.contextmanager
def running(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Run a command until the block ends.

    Args:
        command: the program and its arguments.
        folder: holds its temporary files, and is removed with all it holds.
        environment: variables in place of this process's own; ``None`` for those.
    """
    options: dict[str, object] = (
        {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
    )  # CREATE_NEW_PROCESS_GROUP; in a session of its own the supervisor outlives the killing of ours, to clean up
    process = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-I", "-S", __file__, str(folder), *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, **options,
    )  # fmt: skip
    made = Running(process)
    try:
        yield made
    finally:
        made.stop()
        process.wait()
        process.stdout.close()
        clean(folder)


def main(folder: str, command: list[str]) -> int:
    """Run ``command`` until it ends or standard input closes; gives its exit status.

    Where the command ended by itself, FOLDER and the log in it stay for a parent that is there to look and clean up.
    """
    environment = {**os.environ, "TMPDIR": folder, "TEMP": folder, "TMP": folder, "HOME": folder}
    group: dict[str, int] = {} if sys.platform == "win32" else {"process_group": 0}
    _adopt()
    log = Path(folder) / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(  # type: ignore[call-overload]
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment, **group
        )

    left_alone = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        left_alone.set()
        _end(process)

    threading.Thread(target=watch, daemon=True).start()
    status = int(process.wait())
    _end(process)
    _collect()
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(log.read_bytes()[-TAIL_BYTES:])
    if left_alone.is_set():
        clean(Path(folder))
    return status


def clean(folder: Path) -> None:
    """Remove a folder and the shared memory named after it."""
    for region in SHARED_MEMORY.glob(f"{folder.name}*"):
        with contextlib.suppress(OSError):
            region.unlink()
    for _ in range(50):  # children of a killed program may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.02)


def _adopt() -> None:
    """Make orphans of the command ours (Linux), so that it can be seen when the last of them is gone."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _collect() -> None:
    """Wait for killed orphans, for a few seconds at most."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(ChildProcessError):
        for _ in range(500):
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it started."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)  # noqa: S607
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
