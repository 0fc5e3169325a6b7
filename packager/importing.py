"""Taking back a verdict from a partner's machine: a phone, a GPU server, a browser that isn't here.

A self-check writes the same document as a build. It is believed only as far as it can be checked here: it must name
this bundle's seal, hold every golden case and every output, and its numbers must keep the tolerances that the bundle's
own goldens state. Who ran it is for the sender to vouch for; the verdict says that it was imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packager import parity
from packager.bundle import VERDICT, Bundle, damage
from packager.errors import UsageError, VerificationError
from packager.files import is_file, to_json, write_text
from packager.levels import LEVELS, Level
from packager.verdict import Verdict
from packager.verifying import GOLDEN

MAX_VERDICT_BYTES = 64 << 20
SLACK = 1e-9
"""Relative. Numbers cross as decimal text."""


@dataclass(frozen=True)
class _Said:
    """One output as the imported verdict tells it."""

    passed: bool
    compared: int
    elements: int
    numbers: Mapping[str, float | None]


def import_verdict(bundle: Bundle, path: Path) -> Verdict:
    """Check a verdict made elsewhere and put it beside the bundle's seal as its ``verdict.json``.

    Raises:
        UsageError: there is no such file.
        VerificationError: it isn't a verdict of this bundle, is incomplete, or says of itself that it failed; or the
            bundle here is damaged.
    """
    damaged = damage(bundle)
    if damaged:
        raise VerificationError(f"{bundle.folder}: not what was sealed: {damaged[0]}", "fetch the bundle again")
    document = _read(path)
    if document.get("bundle_digest") != bundle.digest:
        other = document.get("bundle_digest")
        raise VerificationError(
            f"{path}: a verdict of another bundle: it says {other}, this one is {bundle.digest}",
            "run the self-check of this very bundle",
        )
    try:
        golden = parity.read_golden(bundle.folder / GOLDEN)
        verdict = _checked(path, document, golden)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise VerificationError(f"{path}: malformed: {error!r}", "run the self-check again") from error
    document["imported"] = True
    write_text(bundle.folder / VERDICT, to_json(document))
    return verdict


def _read(path: Path) -> dict[str, object]:
    if not is_file(path):
        raise UsageError(f"{path}: no such file", "give the verdict that the self-check wrote")
    if path.stat().st_size > MAX_VERDICT_BYTES:
        raise VerificationError(f"{path}: larger than {MAX_VERDICT_BYTES} bytes")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"{path}: not a verdict: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != parity.VERDICT_SCHEMA:
        raise VerificationError(f"{path}: not a verdict of schema {parity.VERDICT_SCHEMA}")
    return document


def _checked(path: Path, document: Mapping[str, object], golden: parity.Golden) -> Verdict:
    """The verdict in short, if it is complete and keeps what the goldens ask for.

    Raises:
        VerificationError: it doesn't.
    """
    level = document["level"]
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}")
    if level == "none":
        raise VerificationError(f"{path}: what the bundle is for was not executed there", "run the self-check as it is")
    cases: dict[str, Mapping[str, object]] = {case["name"]: case for case in document["cases"]}  # type: ignore[attr-defined]
    absent = [case.name for case in golden.cases if case.name not in cases]
    if absent:
        raise VerificationError(f"{path}: golden case '{absent[0]}' was not run", "run the whole self-check")
    reasons: list[str] = []
    numbers: list[Mapping[str, float | None]] = []
    for case in golden.cases:
        said = _outputs(cases[case.name])
        for name, rule in golden.rules.items():
            where = f"case '{case.name}', output '{name}'"
            if name not in said:
                reasons.append(f"{where}: was not compared")
                continue
            reasons += [f"{where}: {reason}" for reason in _broken(said[name], rule)]
            numbers.append(said[name].numbers)
    if reasons or document["status"] != "passed":
        listed = "".join(f"\n  {reason}" for reason in reasons[:5]) or "\n  it says so itself"
        raise VerificationError(f"{path}: the bundle failed there{listed}", "see the verdict's own cases and outputs")
    return _verdict(document, golden, numbers)


def _outputs(case: Mapping[str, object]) -> dict[str, _Said]:
    found: dict[str, _Said] = {}
    for output in case["outputs"]:  # type: ignore[attr-defined]
        metrics = output["metrics"]
        numbers = {name: _number(metrics[name]) for name in ("max_abs", "scaled", "cosine", "top1")}
        found[str(output["name"])] = _Said(
            passed=output["passed"] is True and case["passed"] is True,
            compared=int(metrics["compared"]),
            elements=int(metrics["elements"]),
            numbers=numbers,
        )
    return found


def _number(value: object) -> float | None:
    """A metric: JSON has texts for the numbers it lacks, none of which a passed output has."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"a metric is {value!r}")
    return float(value)


def _broken(said: _Said, rule: parity.OutputRule) -> list[str]:
    reasons = [] if said.passed else ["failed"]
    if said.elements and not said.compared:
        reasons.append("nothing was compared")
    limits = (
        ("scaled", rule.tolerance.scaled, 1),
        ("cosine", rule.tolerance.cosine, -1),
        ("top1", rule.tolerance.top1, -1),
    )
    excused = (said.numbers["max_abs"] or 0.0) <= max(rule.rounding, parity.TINY)
    for name, bound, sign in limits:
        value = said.numbers[name]
        if bound is None or value is None or (excused and name != "top1"):
            continue
        if sign * value > sign * bound + SLACK * abs(bound):
            reasons.append(f"claims to have passed with {name} {value:g}, where the bound is {bound:g}")
    return reasons


def _verdict(
    document: Mapping[str, object], golden: parity.Golden, numbers: list[Mapping[str, float | None]]
) -> Verdict:
    runtime: Mapping[str, object] = document["runtime"]  # type: ignore[assignment]
    level: Level = document["level"]  # type: ignore[assignment]

    def worst(name: str) -> float | None:
        values = [value for each in numbers if (value := each[name]) is not None]
        return (max if name in ("max_abs", "scaled") else min)(values) if values else None

    return Verdict(
        status="passed",
        level=level,
        level_reason=str(document.get("level_reason", "")),
        runtime=str(runtime["name"]),
        version=str(runtime["version"]),
        device=str(runtime["device"]),
        cases=len(golden.cases),
        max_abs=worst("max_abs"),
        scaled=worst("scaled"),
        cosine=worst("cosine"),
        top1=worst("top1"),
        policy=golden.policy,
        precision=golden.precision,
    )
