"""The verdict in short: what was executed and how far from its goldens it was. The whole of it is ``verdict.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from packager.levels import Level
from packager.parity import VERDICT_SCHEMA


@dataclass(frozen=True)
class Distance:
    """How far one set of answers is from another: the worst over all float outputs and cases.

    ``max_abs`` in the output's units, ``scaled`` relative to its largest magnitude, ``cosine`` and ``top1`` the
    lowest; ``None`` where nothing of the sort was measured (exact outputs only).
    """

    max_abs: float | None
    scaled: float | None
    cosine: float | None
    top1: float | None


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    ``status`` is ``passed``, ``failed``, ``unverified`` or ``recipe``. ``max_abs`` (in the output's units) and
    ``scaled`` (relative to the output's largest magnitude) are the worst over all float outputs and cases, ``cosine``
    and ``top1`` the lowest; ``None`` where nothing of the sort was measured. ``policy`` and ``precision`` say how it
    was judged.
    """

    status: str
    level: Level
    level_reason: str
    runtime: str
    version: str
    device: str
    cases: int
    max_abs: float | None
    scaled: float | None
    cosine: float | None
    top1: float | None
    policy: str
    precision: str
    failures: tuple[str, ...] = ()
    transform: Distance | None = None
    target: Distance | None = None

    @property
    def executed(self) -> bool:
        """Whether golden cases were run."""
        return self.status in ("passed", "failed")


def plain_document(verdict: Verdict) -> dict[str, object]:
    """``verdict.json`` of a bundle that nobody executed."""
    return {"schema": VERDICT_SCHEMA, **asdict(verdict)}


def unverified(reason: str, policy: str, precision: str) -> Verdict:
    """The verdict of a bundle that nobody executed."""
    return Verdict("unverified", "none", reason, "", "", "", 0, None, None, None, None, policy, precision)


def recipe(reason: str, policy: str, precision: str) -> Verdict:
    """The verdict of a bundle that another machine has to finish before anything of it can be executed."""
    return replace(unverified(reason, policy, precision), status="recipe")
