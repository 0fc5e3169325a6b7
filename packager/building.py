"""Building one bundle: the room's work in a child process, then goldens, self-check, seal, verdict and README.

The room gets the user's model, or the one its dialect made of it. A bundle is sealed before it is verified, since
runners read the seal, and again when the README that quotes the verdict is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from packager import child, golden_store
from packager.bundle import VERDICT, Bundle, seal
from packager.diagnosis import TIE_BREAK_SECONDS, SettleJob, settle
from packager.errors import BuildError, GoldenError, PackagerError
from packager.files import remove_tree, storage_errors, to_json, write_text
from packager.goldens import GoldenCase, GoldenSet
from packager.goldens_ready import Answered
from packager.manifest import Target
from packager.model import sha256_file
from packager.planning import Source, inputs_digest, judge_target, plan_target, tool_versions
from packager.policy import Judging
from packager.readme import write_readme
from packager.room import Plan, Stage, kind_named
from packager.run import Run, answered
from packager.selfcheck import add_selfcheck
from packager.verdict import Verdict, plain_document, unverified
from packager.verifying import GOLDEN, VerifyJob, execute
from packager.witness import NEAR_MISS


@dataclass(frozen=True)
class BuildJob:
    """Input of :func:`build_stage`: what to build, where, from which model, golden inputs and further files."""

    kind: str
    plan: Plan
    folder: Path
    model: Path
    goldens: Path
    files: tuple[tuple[str, Path], ...] = ()


@dataclass(frozen=True)
class Done:
    """An empty answer: the work is in the folder."""

    ok: bool = True


def build_stage(job: BuildJob) -> Done:
    """Child side of a build: let the room fill the folder.

    Raises:
        BuildError: the room's toolchain refused, or a file changed since the plan was made.
    """
    kind_named(job.kind).load().build(job.plan, stage_of(job))
    return Done()


def stage_of(job: BuildJob) -> Stage:
    """Where the room works, in the child.

    Raises:
        BuildError: a file changed since the plan was made.
    """
    changed = [name for name, path in job.files if sha256_file(path) != dict(job.plan.files)[name]]
    if changed:
        raise BuildError(f"{', '.join(changed)} changed while the target was planned", "build again")
    goldens = golden_store.read(job.goldens)
    return Stage(job.folder, job.model, goldens, dict(job.files))


@dataclass(frozen=True)
class Made:
    """A built bundle in staging, with its plan and what was found."""

    folder: Path
    plan: Plan
    bundle: Bundle
    verdict: Verdict


def build_bundle(run: Run, target: Target, source: Source, plan: Plan) -> Made:
    """Build in a child process, add goldens and self-check, seal, verify, write the README and seal for good.

    Raises:
        PackagerError: the room refused, crashed or ran out of time, or the bundle can't be executed at all.
        ReferenceRefused: the reference refused the goldens of the whole run.
    """
    folder = source.work / "bundle"
    _build_in_child(run, target, source, plan, folder)
    reference = answered(run, target)
    if inputs_digest(reference.goldens) != inputs_digest(source.inputs):
        # The first guess at inputs didn't run; plan with those that did, and build again if that changes anything.
        source = replace(source, inputs=reference.goldens)
        again = plan_target(run, target, source)
        if again != plan:
            plan = again
            remove_tree(folder)
            _build_in_child(run, target, source, plan, folder)
    return _seal_and_verify(run, target, source, plan, folder, reference)


def _build_in_child(run: Run, target: Target, source: Source, plan: Plan, folder: Path) -> None:
    run.listener.step(target.name, "building")
    job = prepared(run, target, source, plan, folder)
    child.call(build_stage, job, seconds=target.build_timeout, what="building")


def prepared(run: Run, target: Target, source: Source, plan: Plan, folder: Path) -> BuildJob:
    """A build's input, with ``folder`` made for it and the golden inputs beside it.

    Raises:
        StorageError: the disk is full or can't be written.
    """
    with storage_errors("preparing the build", folder):
        folder.mkdir(parents=True)
        given = folder.parent / "inputs"
        bare = GoldenSet(tuple(GoldenCase(case.name, case.inputs, {}, case.source) for case in source.inputs.cases))
        golden_store.write(given, bare, {}, policy="", precision=target.precision, excluded={})
    files = tuple((name, run.manifest.root / name) for name, _ in plan.files)
    return BuildJob(target.kind, plan, folder, source.model.path, given, files)


def _seal_and_verify(run: Run, target: Target, source: Source, plan: Plan, folder: Path, reference: Answered) -> Made:
    kind, judged = source.kind, judge_target(run, target, reference)
    cost = None if source.dialected is None else source.dialected.record.distance
    excluded = dict(reference.reference.excluded)

    def sealed(goldens: GoldenSet, plan: Plan) -> Bundle:
        with storage_errors("adding goldens and self-check", folder):
            golden_store.write(
                folder / GOLDEN, goldens, judged.rules, policy=judged.description, precision=judged.precision,
                excluded=excluded, transformed=_transformed(source, judged),
            )  # fmt: skip
            add_selfcheck(folder)
            return seal(folder, plan, tool_versions(kind), kind.facts.roles, cost)

    bundle = sealed(_fitting(reference.goldens, plan, target), plan)
    verdict = unverified("not executed: verification was switched off", judged.description, judged.precision)
    if run.verify:
        run.listener.step(target.name, "verifying")
        verdict = _execute(target, source, folder, bundle)
        settled = _settled(source, folder, verdict)
        if settled is not None:
            goldens, note = settled
            plan = replace(plan, notes=(*plan.notes, note))
            bundle = sealed(goldens, plan)
            verdict = _execute(target, source, folder, bundle)
    with storage_errors("sealing", folder):
        write_readme(folder, kind, plan, verdict, bundle)
        bundle = seal(folder, plan, tool_versions(kind), kind.facts.roles, cost)
        _stamp_verdict(folder, verdict, bundle)
    return Made(folder, plan, bundle, verdict)


def _transformed(source: Source, judged: Judging) -> golden_store.Transformed | None:
    """What the target was given answers, where the policy says how near to that it must be."""
    if source.dialected is None or not judged.transformed:
        return None
    return golden_store.Transformed(golden_store.read(source.dialected.answers), judged.transformed)


def _execute(target: Target, source: Source, folder: Path, bundle: Bundle) -> Verdict:
    transformed = None if source.dialected is None else source.dialected.answers
    job = VerifyJob(folder, bundle.digest, folder / VERDICT, transformed)
    return child.call(execute, job, seconds=target.verify_timeout, what="verifying")


def _settled(source: Source, folder: Path, verdict: Verdict) -> tuple[GoldenSet, str] | None:
    """Golden cases by ONNX's reference evaluator, where ONNX Runtime and the target narrowly disagree and it says the
    target is right. A model that was transformed, or is far off, is not looked at."""
    near = verdict.status == "failed" and verdict.scaled is not None and verdict.scaled <= NEAR_MISS
    if not near or source.dialected is not None:
        return None
    job = SettleJob(source.kind.name, source.model.path, folder, source.work / "settled")
    try:
        found = child.call(settle, job, seconds=TIE_BREAK_SECONDS, what="asking the ONNX reference evaluator")
    except PackagerError:
        return None  # then the diagnosis says why it gave no answer
    if not found.cases:
        return None
    listed = ", ".join(f"'{case}'" for case in found.cases)
    return golden_store.read(job.out), (
        f"ONNX Runtime was too far from ONNX's own reference evaluator in golden case {listed}; "
        "the evaluator's outputs are the golden ones there"
    )


def _fitting(goldens: GoldenSet, plan: Plan, target: Target) -> GoldenSet:
    """The cases that the planned signature takes: with pinned shapes, others may have been given.

    Raises:
        GoldenError: none fits.
    """
    fitting = tuple(case for case in goldens.cases if plan.signature.takes(case.inputs))
    if not fitting:
        pinned = ", ".join(f"{name} = {size}" for name, size in target.shapes)
        raise GoldenError(
            f"no golden case fits the pinned shapes of {target.name} ({pinned})",
            "give golden cases of that size, or leave [golden] path out to have some synthesised",
        )
    return GoldenSet(fitting)


def _stamp_verdict(folder: Path, verdict: Verdict, bundle: Bundle) -> None:
    """Tie ``verdict.json`` to the final seal: the README, which quotes the verdict, was added after it."""
    path = folder / VERDICT
    document = json.loads(path.read_text(encoding="utf-8")) if verdict.executed else plain_document(verdict)
    document["bundle_digest"] = bundle.digest
    write_text(path, to_json(document))
