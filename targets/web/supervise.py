"""Runs a browser or Node and leaves nothing behind: ``python supervise.py FOLDER COMMAND...``.

The command runs in a process group of its own, with its temporary files in FOLDER. When standard input closes, which it
does however the parent ends, or when the command ends by itself, the whole group is killed and FOLDER is removed.
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


def main(folder: str, command: list[str]) -> int:
    """Run ``command`` until it ends or standard input closes; gives its exit status."""
    environment = {**os.environ, "TMPDIR": folder, "TEMP": folder, "TMP": folder, "HOME": folder}
    group: dict[str, int] = {} if sys.platform == "win32" else {"process_group": 0}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, **group)  # type: ignore[call-overload]

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        _end(process)

    threading.Thread(target=watch, daemon=True).start()
    status = process.wait()
    _end(process)
    for _ in range(50):  # children of a killed browser may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):  # noqa: PTH110 - this file starts in every verification, so it imports little
            break
        time.sleep(0.02)
    return status


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it started."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)  # noqa: S607
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
