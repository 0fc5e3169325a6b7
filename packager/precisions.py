"""Precisions as manifests spell them (``fp32``, ``fp16``, ``int8-static``) and as tolerance policies know them.

The part before the first dash is what a policy judges by: how an int8 model was quantised doesn't change what is
expected of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

AUTO = "auto"
"""In a manifest: the smallest precision that passes the policy."""

COARSENESS = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
"""Precisions of policies from the finest to the coarsest, as far as judging goes."""


@dataclass(frozen=True)
class Conversion:
    """What a manifest asks of the passes that make a target's precision.

    ``keep`` names nodes, ``keep_operators`` operators, that stay in float. ``calibration`` is how static quantisation
    finds the range of activations: ``minmax``, ``entropy`` or ``percentile``; ``data`` are golden files whose inputs it
    runs for that, ``None`` for the golden cases.
    """

    keep: tuple[str, ...] = ()
    keep_operators: tuple[str, ...] = ()
    calibration: str = "minmax"
    data: Path | None = None


AS_IS = Conversion()
"""Nothing asked."""


def policy_precision(precision: str) -> str:
    """``int8`` of ``int8-static``: the name a tolerance policy knows a precision by."""
    return precision.partition("-")[0]


def coarser(one: str, other: str) -> str:
    """The coarser of two precisions, as a policy names it.

    Raises:
        ValueError: one of them is none of :data:`COARSENESS`.
    """
    return max(policy_precision(one), policy_precision(other), key=COARSENESS.index)
