"""packager: one ONNX model and a target manifest in, one verified bundle per target out.

The verbs of the command line are functions here: :func:`build`, :func:`plan`, :func:`verify`, :func:`inspect`,
:func:`cover` (``inspect --targets``), :func:`explain` and :func:`golden`. They are imported on first use, so that
``import packager`` (and ``packager --version``) stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["PackagerError", "__version__", "build", "cover", "explain", "golden", "inspect", "plan", "verify"]

if TYPE_CHECKING:
    from packager.engine import build, cover, explain, golden, inspect, plan, verify
    from packager.errors import PackagerError


def __getattr__(name: str) -> object:
    if name == "PackagerError":
        from packager.errors import PackagerError

        return PackagerError
    if name in __all__:
        from packager import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'packager' has no attribute {name!r}")
