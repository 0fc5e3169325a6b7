"""Verification: the bundle's own files executed in its runtime, every golden compared, and a verdict written.

:func:`execute` runs in a child process. It loads the bundle through its room's runner and judges with
:mod:`packager.parity`, the very comparator the bundle carries for its self-check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packager import child, parity
from packager.bundle import SEAL, VERDICT, Bundle, damage, open_bundle, strangers
from packager.errors import PackagerError, ToolchainMissing, VerificationError
from packager.files import to_json, write_text
from packager.goldens import Array
from packager.host import this_host
from packager.room import Runner, RuntimeInfo, kind_named, missing_requirements, missing_tools
from packager.scratch import scratch
from packager.verdict import Distance, Verdict, plain_document, recipe

GOLDEN = "golden"
MAX_FAILURES = 20


@dataclass(frozen=True)
class VerifyJob:
    """Input of :func:`execute`: the bundle's folder, the seal it must have, and where the verdict goes.

    ``transformed`` is a golden folder with the transformed model's answers in ONNX Runtime, where there is one and the
    bundle doesn't hold them itself.
    ``endpoint`` is the address of a running service to ask in place of a runtime of our own.
    """

    bundle: Path
    digest: str
    verdict: Path
    transformed: Path | None = None
    endpoint: str | None = None


def execute(job: VerifyJob) -> Verdict:
    """Run every golden case of a bundle in its runtime and write the verdict.

    A runner of level ``none`` says that another machine has to finish the bundle: nothing is run, and it is a recipe.

    Raises:
        VerificationError: the bundle can't be read or loaded at all.
    """
    bundle = open_bundle(job.bundle)
    if bundle.digest != job.digest:
        raise VerificationError(f"{job.bundle}: changed while it was verified")
    try:
        golden = parity.read_golden(job.bundle / GOLDEN)
    except parity.GoldenFileError as error:
        raise VerificationError(str(error), "the bundle is damaged; build it again") from error
    results: list[parity.CaseResult] = []
    against_transformed: list[parity.CaseResult] = []
    transformed = _answers(job.transformed)
    with _runner(bundle.kind, job) as runner:
        if runner.info.level == "none":
            verdict = recipe(runner.info.reason, golden.policy, golden.precision)
            write_text(job.verdict, to_json(plain_document(verdict)))
            return verdict
        for case in golden.cases:
            outcome = _run(runner, case.inputs)
            if isinstance(outcome, str):
                results.append(parity.failed_case(case.name, outcome))
                continue
            results.append(golden.judge(case, outcome))
            expected = case.transformed or transformed.get(case.name)
            if expected:
                found = parity.compare_case(case.name, expected, outcome, golden.rules, golden.excluded_names)
                against_transformed.append(found)
        info = runner.info
    target = distance(parity.judge(against_transformed)) if against_transformed else None
    document = parity.verdict_document(
        results,
        level=info.level,
        level_reason=info.reason,
        runtime={"name": info.name, "version": info.version, "device": info.device, **dict(info.details)},
        host=asdict(this_host()),
        policy={"name": golden.policy, "precision": golden.precision},
        excluded=golden.excluded,
        target=bundle.target,
        kind=bundle.kind,
        name=bundle.name,
        version=bundle.version,
        bundle_digest=bundle.digest,
    )
    if bundle.transform is not None:
        document["parities"] = {
            "transformed model against reference": asdict(bundle.transform),
            "bundle against transformed model": None if target is None else asdict(target),
        }
    write_text(job.verdict, to_json(document))
    verdict = _summary(parity.judge(results), info, golden, len(results))
    return replace(verdict, transform=bundle.transform, target=target)


def _runner(kind: str, job: VerifyJob) -> AbstractContextManager[Runner]:
    room = kind_named(kind)
    return (
        room.load().runner(job.bundle) if job.endpoint is None else room.load_remote().remote(job.bundle, job.endpoint)
    )


def _answers(folder: Path | None) -> dict[str, Mapping[str, Array]]:
    """Outputs by case."""
    return {} if folder is None else {case.name: case.outputs for case in parity.read_golden(folder).cases}


def distance(overall: parity.Overall) -> Distance:
    """The worst of each metric."""

    def value(extreme: parity.Extreme | None) -> float | None:
        return None if extreme is None else extreme.value

    return Distance(value(overall.max_abs), value(overall.scaled), value(overall.cosine), value(overall.top1))


def _run(runner: Runner, feeds: Mapping[str, Array]) -> dict[str, Array] | str:
    """Outputs, or the reason there are none."""
    try:
        return runner.run(feeds)
    except PackagerError as error:
        return f"the runtime failed: {error.message}"
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises is this case's failure
        return f"the runtime failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _summary(overall: parity.Overall, info: RuntimeInfo, golden: parity.Golden, cases: int) -> Verdict:
    far = distance(overall)
    return Verdict(
        status="passed" if overall.passed else "failed",
        level=info.level,
        level_reason=info.reason,
        runtime=info.name,
        version=info.version,
        device=info.device,
        cases=cases,
        max_abs=far.max_abs,
        scaled=far.scaled,
        cosine=far.cosine,
        top1=far.top1,
        policy=golden.policy,
        precision=golden.precision,
        failures=overall.reasons[:MAX_FAILURES],
    )


def _check_stamp(bundle: Bundle) -> None:
    """The verdict that a bundle carries was given to a certain seal, which nothing else protects.

    Raises:
        VerificationError: the bundle's seal is another.
    """
    try:
        stamp = json.loads((bundle.folder / VERDICT).read_text(encoding="utf-8")).get("bundle_digest")
    except (OSError, ValueError, AttributeError):
        return  # a verdict that can't be read says nothing; a fresh one is about to be given
    if isinstance(stamp, str) and stamp != bundle.digest:
        raise VerificationError(
            f"not what was verified: {VERDICT} belongs to another {SEAL}",
            f"one of the two was edited, or comes from elsewhere; fetch both again, or remove {VERDICT}",
        )


def verify_folder(bundle: Bundle, endpoint: str | None = None) -> tuple[Verdict, tuple[str, ...]]:
    """Check an opened bundle's files, run it in a child process, and write its new ``verdict.json``.

    With an ``endpoint``, the service running there is asked, and no runtime is needed here.
    Gives the verdict and warnings. A folder that can't be written keeps its old verdict, with a warning.

    Raises:
        UsageError: there is an endpoint, and none that bundles of this kind could be verified against.
        VerificationError: files are missing or changed (each is named), or the bundle can't be loaded.
        ToolchainMissing: the kind's runtime isn't installed here.
    """
    damaged = damage(bundle)
    if damaged:
        listed = "".join(f"\n  {line}" for line in damaged)
        raise VerificationError(f"not what was sealed:{listed}", "the bundle is damaged or was edited; fetch it again")
    _check_stamp(bundle)
    kind = kind_named(bundle.kind)
    if endpoint is not None:
        kind.load_remote()
    missing = missing_requirements(kind, this_host()) if endpoint is None else missing_tools(kind)
    if missing:
        listed = "; ".join(f"{item.what} is missing" for item in missing)
        raise ToolchainMissing(f"can't verify here: {listed}", "; ".join(item.how for item in missing))
    warnings = [f"{name} is not part of the bundle" for name in strangers(bundle)]
    with scratch() as folder:
        written = folder / VERDICT
        job = VerifyJob(bundle.folder, bundle.digest, written, endpoint=endpoint)
        verdict = child.call(execute, job, seconds=kind.facts.time_limits.verify, what="verifying")
        try:
            write_text(bundle.folder / VERDICT, written.read_text(encoding="utf-8"))
        except OSError as error:
            warnings.append(f"{VERDICT} was not refreshed: {error.strerror}")
    return verdict, tuple(warnings)
