"""How honest a verdict is.

``runtime``: the target's own runtime executed the bundle's own files. ``emulated``: the vendor's emulator, or the
generated code over a stand-in provider. ``proxy``: another runtime executed the very model file shipped.
``structural``: parsed, compiled or planned, not executed. ``none``: nothing of these.
"""

from __future__ import annotations

from typing import Literal

Level = Literal["none", "structural", "proxy", "emulated", "runtime"]
LEVELS: tuple[Level, ...] = ("none", "structural", "proxy", "emulated", "runtime")
"""From the least evidence to the most."""


def below(level: Level, minimum: Level) -> bool:
    """Whether ``level`` is weaker evidence than ``minimum``."""
    return LEVELS.index(level) < LEVELS.index(minimum)
