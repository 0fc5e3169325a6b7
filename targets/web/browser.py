"""Finding a Chromium, and how to open one page in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packager.supervise import Running, running

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


@contextlib.contextmanager
def browsing(program: str, url: str, gpu: tuple[str, ...] = NO_GPU) -> Iterator[Running]:
    """Open ``url`` in a browser with an empty profile until the block ends."""
    own = scratch()
    with running(browser_command(program, str(own / "profile"), url, gpu), own) as made:
        yield made
