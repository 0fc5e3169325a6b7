"""The Swift toolchain, where this machine has one: on its path, or in a Debian root that ``make swift-toolchain`` made.

A root is entered with ``unshare`` and ``chroot`` in namespaces of its own: what is mounted there is seen by nobody
else and goes when the command ends, however it ends. ``PACKAGER_SWIFT`` names a root; set to nothing, it means none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

HEADER = "usr/include/onnxruntime/onnxruntime_c_api.h"
HOW = "make swift-toolchain"
INSIDE = "/mnt/work"
ENTER = (
    'set -e; mkdir -p "$1/mnt/work"; mount --bind "$2" "$1/mnt/work"; mount -t proc proc "$1/proc"; '
    'mount --rbind /dev "$1/dev"; root="$1"; shift 2; '
    'exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root ORT_DISABLE_TELEMETRY=1 "$@"'
)
"""Shell: arguments are the root, the folder that is worked in, and the command with its arguments."""


@dataclass(frozen=True)
class Toolchain:
    """Swift and ONNX Runtime's C headers, in the Debian root ``root``, or installed where that is ``None``."""

    root: Path | None

    def inside(self, folder: Path) -> str:
        """How commands call the folder that is worked in."""
        return str(folder) if self.root is None else INSIDE

    def command(self, folder: Path, *arguments: str) -> list[str]:
        """The whole command that runs ``arguments`` with ``folder`` at :meth:`inside`."""
        if self.root is None:
            home = f"HOME={folder / 'home'}"
            return ["/usr/bin/env", home, "ORT_DISABLE_TELEMETRY=1", *arguments]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        if os.geteuid() != 0:
            unshare.append("--map-root-user")
        return [*unshare, "sh", "-c", ENTER, "enter", str(self.root), str(folder), *arguments]

    def run(self, folder: Path, *arguments: str, seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run to the end; standard error joins standard output."""
        return subprocess.run(
            self.command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=seconds, check=False,
        )  # fmt: skip


def default_root() -> Path:
    """Where ``make swift-toolchain`` puts the Debian root: 2 GB that all checkouts of a user share."""
    return Path(platformdirs.user_cache_dir("packager-swift")) / "trixie"


def find_toolchain() -> Toolchain | None:
    """The toolchain of this machine, or ``None``."""
    if sys.platform != "linux":
        return None
    named = os.environ.get("PACKAGER_SWIFT")
    if named == "":
        return None
    root = Path(named) if named else default_root()
    there = (root / "usr/libexec/swift/bin/swift").exists() and (root / HEADER).exists()
    if there and shutil.which("unshare") and _enters(Toolchain(root)):
        return Toolchain(root)
    if named is None and shutil.which("swift") and (Path("/") / HEADER).exists():
        return Toolchain(None)
    return None


def _enters(toolchain: Toolchain) -> bool:
    """Whether the root can be entered: a container may forbid namespaces and mounts."""
    with tempfile.TemporaryDirectory(prefix="packager-ios-") as name:
        return toolchain.run(Path(name), "true").returncode == 0
