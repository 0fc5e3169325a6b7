"""Runs a browser or Node and leaves nothing behind: ``python supervise.py FOLDER COMMAND...``.

The command runs in a process group of its own, with its temporary files in FOLDER. When standard input closes, which it
does however the parent ends, or when the command ends by itself, the whole group is killed and FOLDER is removed. The
end of what the command said comes out here, once it has ended.
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
from pathlib import Path

TAIL_BYTES = 4000
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(folder: str, command: list[str]) -> int:
    """Run ``command`` until it ends or standard input closes; gives its exit status."""
    environment = {**os.environ, "TMPDIR": folder, "TEMP": folder, "TMP": folder, "HOME": folder}
    group: dict[str, int] = {} if sys.platform == "win32" else {"process_group": 0}
    _adopt()
    log = Path(folder) / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(  # type: ignore[call-overload]
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment, **group
        )

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        _end(process)

    threading.Thread(target=watch, daemon=True).start()
    status = int(process.wait())
    _end(process)
    _collect()
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(log.read_bytes()[-TAIL_BYTES:])
    for _ in range(50):  # children of a killed browser may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            break
        time.sleep(0.02)
    return status


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
