"""What a run found: plain frozen data that every report (table, JSON, JUnit, HTML) is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packager.hazards import Hazard
from packager.reference import Reference
from packager.strength import Strength
from packager.verdict import Verdict

Status = Literal["passed", "failed", "unverified", "recipe", "refused", "missing", "error"]

STATUS_WORDS: dict[Status, str] = {
    "passed": "passed",
    "failed": "FAILED verification",
    "unverified": "built, NOT verified",
    "recipe": "recipe, NOT verified",
    "refused": "REFUSED",
    "missing": "toolchain MISSING",
    "error": "FAILED to build",
}


@dataclass(frozen=True)
class TargetResult:
    """How one target ended.

    ``bundle`` and ``archive`` are paths relative to the output folder; ``bytes`` is the size of the bundle's files,
    ``seconds`` wall time. ``misses`` says why the cache didn't have it. ``diagnosis`` says, after a failed
    verification, which side is off and at which node the target first diverges.
    """

    target: str
    kind: str
    precision: str
    status: Status
    exit_code: int
    message: str = ""
    hint: str | None = None
    verdict: Verdict | None = None
    bundle: str | None = None
    bundle_digest: str | None = None
    bytes: int | None = None
    archive: str | None = None
    archive_sha256: str | None = None
    archive_bytes: int | None = None
    seconds: float = 0.0
    cached: bool = False
    misses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A whole run. ``exit_code`` is the largest that applies."""

    packager: str
    model: str
    name: str
    version: str
    digest: str
    opset: int
    out: str
    hazards: tuple[Hazard, ...]
    reference: Reference | None
    targets: tuple[TargetResult, ...]
    seconds: float
    strength: Strength | None = None

    @property
    def exit_code(self) -> int:
        """The largest exit status of all targets (0 where all passed)."""
        return max((target.exit_code for target in self.targets), default=0)
