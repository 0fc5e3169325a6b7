"""Qualcomm's chips: the number QNN knows each by (``soc_model``) and the Hexagon architecture of its NPU.

Numbers are those of QNN's table of supported Snapdragon devices, as Qualcomm publishes them with ExecuTorch and LiteRT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Arch = Literal[68, 69, 73, 75, 79, 81]
"""Hexagon tensor processors that QNN 2.51 compiles for."""
DEFAULT_ARCH: Arch = 75


@dataclass(frozen=True)
class Chip:
    """A chip's name and the architecture of its NPU."""

    name: str
    arch: Arch


CHIPS: dict[int, Chip] = {
    30: Chip("SM8350", 68), 36: Chip("SM8450", 69), 39: Chip("SA8295", 68), 42: Chip("SM8475", 69),
    43: Chip("SM8550", 73), 45: Chip("SXR1230P", 73), 46: Chip("SSG2115P", 73), 52: Chip("SA8255", 73),
    53: Chip("SXR2230P", 69), 57: Chip("SM8650", 75), 58: Chip("SSG2125P", 73), 60: Chip("SC8380XP", 73),
    69: Chip("SM8750", 79), 75: Chip("SXR2330P", 79), 77: Chip("QCS9100", 73), 87: Chip("SM8850", 81),
    95: Chip("SAR2230P", 81), 96: Chip("SW6100", 81),
}  # fmt: skip
"""``soc_model`` to chip. SA8255 and SA8295 are those of car dashboards."""


def chip(soc_model: int) -> Chip:
    """The chip of that number.

    Raises:
        ValueError: none is known; the message lists those that are.
    """
    if soc_model not in CHIPS:
        known = ", ".join(f"{number} ({each.name})" for number, each in sorted(CHIPS.items()))
        raise ValueError(f"soc_model {soc_model} is no chip that is known here; known are {known}")
    return CHIPS[soc_model]
