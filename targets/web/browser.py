"""Finding a Chromium, and running it (or Node) on one page without leaving a process or a folder behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packager.targets.web import supervise

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "msedge")
PLACES = {
    "darwin": (
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    ),
    "win32": (
        "C:/Program Files/Google/Chrome/Application/chrome.exe",
        "C:/Program Files (x86)/Google/Chrome/Application/chrome.exe",
        "C:/Program Files (x86)/Microsoft/Edge/Application/msedge.exe",
    ),
}
CHOSEN = "PACKAGER_BROWSER"
HOW = f"install Chromium or Chrome (Debian: apt-get install chromium), or give its path in {CHOSEN}"

FLAGS = (
    "--headless=new", "--disable-quic", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-breakpad", "--disable-crash-reporter", "--disable-default-apps", "--disable-dev-shm-usage",
    "--disable-features=Translate,OptimizationHints,MediaRouter,DialMediaRouteProvider", "--metrics-recording-only",
    "--mute-audio", "--password-store=basic", "--use-mock-keychain", "--disable-renderer-backgrounding",
    "--disable-background-timer-throttling",
)  # fmt: skip
"""No window, no network of its own, no throttling; ``--disable-dev-shm-usage`` since containers have 64 MiB there."""

NO_GPU = ("--disable-gpu",)
SOFTWARE_GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
"""WebGPU by SwiftShader, on any machine."""

LOG_LINES = 8
MAX_TEMP_BYTES = 104 - 46 - len("/packager-web-12345678")


def find_browser() -> str | None:
    """The browser's program, or ``None``. ``PACKAGER_BROWSER`` decides where it is set, to nothing for no browser."""
    chosen = os.environ.get(CHOSEN)
    if chosen is not None:
        return shutil.which(chosen) if chosen else None
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or next((place for place in PLACES.get(sys.platform, ()) if Path(place).is_file()), None)


def browser_command(program: str, profile: str, url: str, gpu: tuple[str, ...] = NO_GPU) -> list[str]:
    """How to open ``url`` in a headless browser with an empty profile; ``gpu`` are its flags on that matter."""
    # A sandbox needs a user other than root; the page is our own, served from this machine.
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [program, *FLAGS, *gpu, *sandbox, f"--user-data-dir={profile}", url]


def scratch() -> Path:
    """A new folder for a browser's temporary files, short enough for the socket that Chromium puts into it.

    A Unix socket's path has at most 104 bytes on macOS (107 on Linux), of which Chromium's own part takes 46.
    """
    long = sys.platform != "win32" and len(os.fsencode(tempfile.gettempdir())) > MAX_TEMP_BYTES
    return Path(tempfile.mkdtemp(prefix="packager-web-", dir="/tmp" if long else None))  # noqa: S108 - see above


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
def running(command: list[str], folder: Path) -> Iterator[Running]:
    """Run a command until the block ends. ``folder`` holds its temporary files and is removed with it."""
    options: dict[str, object] = (
        {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
    )  # CREATE_NEW_PROCESS_GROUP; in a session of its own the supervisor outlives the killing of ours, to clean up
    process = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-I", "-S", supervise.__file__, str(folder), *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip
    made = Running(process)
    try:
        yield made
    finally:
        made.stop()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def browsing(program: str, url: str, gpu: tuple[str, ...] = NO_GPU) -> Iterator[Running]:
    """Open ``url`` in a browser with an empty profile until the block ends."""
    own = scratch()
    with running(browser_command(program, str(own / "profile"), url, gpu), own) as made:
        yield made
