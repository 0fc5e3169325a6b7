"""One target from plan to placed bundle.

plan -> cache? -> build in a child -> goldens and self-check added -> sealed -> verified in a child -> README ->
sealed for good -> archived -> moved into place. Whatever goes wrong ends as a :class:`TargetResult`, so that the
other targets go on; a bundle that failed verification goes to ``rejected/`` for a look and nowhere else.
"""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time
import traceback
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from packager import child, diagnosis, golden_store
from packager.bundle import VERDICT, Bundle, open_bundle, seal
from packager.cache import Cache, Ingredients, tree_digest
from packager.dist import archive
from packager.errors import (
    GoldenError,
    InternalError,
    PackagerError,
    ToolchainMissing,
    VerificationError,
)
from packager.files import (
    clone_file,
    remove_tree,
    storage_error,
    storage_errors,
    to_json,
    write_text,
)
from packager.goldens import GoldenCase, GoldenSet
from packager.goldens_ready import Answered, Ready, prepare
from packager.host import this_host
from packager.levels import below
from packager.manifest import Manifest, Target
from packager.model import Model, Signature
from packager.placing import REJECTED, Kept, keep, place, reject, take, withdraw
from packager.policy import judged_precision, judging
from packager.readme import write_readme
from packager.reference import ReferenceJob, SynthesisSettings
from packager.render import common_templates
from packager.report import Listener
from packager.results import Status, TargetResult
from packager.room import Kind, Plan, PlanRequest, Stage, kind_named, missing_requirements, package_folder
from packager.verdict import Verdict, unverified
from packager.verifying import GOLDEN, VerifyJob, execute

Shapes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Run:
    """What all targets of a run share. ``started`` holds the reference runs by the shapes they were made for."""

    manifest: Manifest
    model: Model
    out: Path
    work: Path
    cache: Cache
    code: str
    verify: bool
    listener: Listener
    pool: Executor
    started: dict[Shapes, Ready] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def key(self, shapes: Shapes) -> Shapes:
        """What the golden cases of a target depend on; empty for those that the whole run shares."""
        return () if self.manifest.golden.path is not None else tuple(sorted(shapes))

    def goldens(self, shapes: Shapes) -> Ready:
        """The golden cases for a target with these pinned shapes.

        Cases from files serve every target; synthesised ones are made anew for each set of shapes.
        """
        section = self.manifest.golden
        key = self.key(shapes)
        with self.guard:
            if key not in self.started:
                self.listener.step(self.manifest.model.name, "running the reference")
                dims = {**dict(section.dims), **dict(key)}
                synthesis = SynthesisSettings(section.cases, section.seed, tuple(sorted(dims.items())), section.ranges)
                job = ReferenceJob(
                    model=self.model.path,
                    goldens=section.path,
                    synthesis=synthesis,
                    exclude=section.exclude,
                    allow_nan=section.allow_nan,
                    policy=self.manifest.policy,
                    precision=self.model.precision,
                    out=self.work / f"reference-{len(self.started)}",
                )
                self.started[key] = prepare(self.model, job, self.cache, self.code, self.pool)
            return self.started[key]


def plan_target(run: Run, target: Target, goldens: GoldenSet | None = None) -> Plan:
    """Decide what will be done for a target.

    Raises:
        Refused: the target can't take the model; nodes and reasons are in the message.
    """
    kind = kind_named(target.kind)
    chosen = goldens or run.goldens(target.shapes).inputs
    request = PlanRequest(
        target=target.name,
        kind=target.kind,
        name=run.manifest.model.name,
        version=run.manifest.model.version,
        model=run.model,
        goldens=chosen,
        precision=target.precision,
        shapes=target.shapes,
        options=target.options,
        facts=kind.facts,
    )
    return kind.load().plan(request)


def run_target(run: Run, target: Target) -> TargetResult:
    """Build, verify and place one target; never raises for what is only this target's trouble.

    Raises:
        Refused: the model or its goldens are refused, which ends the whole run.
    """
    begun = time.monotonic()
    name = bundle_name(run.manifest, target)
    try:
        result = _run_target(run, target)
    except _ReferenceRefused as error:
        raise error.cause from None
    except PackagerError as error:
        result = _failed(target, error)
    except OSError as error:
        result = _failed(target, storage_error(f"building {target.name}", error))
    except Exception as error:  # noqa: BLE001 - a fault of ours in one target must not take the others along
        run.listener.warn(f"a fault in packager itself; please report it\n{traceback.format_exc()}")
        result = _failed(target, InternalError(f"a fault in packager itself: {type(error).__name__}: {error}"))
    if result.exit_code:
        withdraw(run.out, name)
    result = replace(result, seconds=time.monotonic() - begun)
    run.listener.done(result)
    return result


class _ReferenceRefused(Exception):
    """Carries a refusal of the goldens past the handling of a target's own errors."""

    def __init__(self, cause: PackagerError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def bundle_name(manifest: Manifest, target: Target) -> str:
    """``<name>-<version>-<target>``."""
    return f"{manifest.model.name}-{manifest.model.version}-{target.name}"


def _failed(target: Target, error: PackagerError) -> TargetResult:
    status: dict[int, Status] = {3: "refused", 4: "missing", 6: "failed"}
    return TargetResult(
        target=target.name,
        kind=target.kind,
        precision=target.precision,
        status=status.get(error.exit_code, "error"),
        exit_code=error.exit_code,
        message=error.message,
        hint=error.hint,
    )


def _run_target(run: Run, target: Target) -> TargetResult:
    kind = kind_named(target.kind)
    missing = missing_requirements(kind, this_host())
    if missing:
        listed = "; ".join(f"{item.what} is missing" for item in missing)
        raise ToolchainMissing(f"can't build {target.name}: {listed}", "; ".join(item.how for item in missing))
    ready = run.goldens(target.shapes)
    plan = plan_target(run, target, ready.inputs)
    ingredients = _ingredients(run, target, plan, ready)
    entry = run.cache.find(ingredients)
    if entry is not None:
        _answered(run, target)
        return _from_cache(run, target, plan, entry)
    misses = tuple(run.cache.explain(f"{run.manifest.model.path} {target.name}", ingredients))
    made = _build(run, target, plan, ready)
    return _finish(run, target, made, ingredients, misses)


def _answered(run: Run, target: Target) -> Answered:
    """The target's golden cases with the reference's answers, once those the whole run shares are there too.

    A refusal of the shared ones ends the run before anything is placed; one of cases made for a target's own shapes
    is that target's failure.
    """
    try:
        if () in run.started:
            run.started[()].answered.result()
    except PackagerError as error:
        raise _ReferenceRefused(error) from error
    return run.goldens(target.shapes).answered.result()


@dataclass(frozen=True)
class BuildJob:
    """Input of :func:`build_stage`: what to build, where, from which model and golden inputs."""

    kind: str
    plan: Plan
    folder: Path
    model: Path
    goldens: Path


@dataclass(frozen=True)
class Done:
    """An empty answer: the work is in the folder."""

    ok: bool = True


def build_stage(job: BuildJob) -> Done:
    """Child side of a build: let the room fill the folder.

    Raises:
        BuildError: the room's toolchain refused.
    """
    kind_named(job.kind).load().build(job.plan, Stage(job.folder, job.model, golden_store.read(job.goldens)))
    return Done()


@dataclass(frozen=True)
class _Made:
    """A built bundle in staging, with its plan, the goldens it was judged by and what was found."""

    folder: Path
    plan: Plan
    bundle: Bundle
    verdict: Verdict
    goldens: GoldenSet


def _build(run: Run, target: Target, plan: Plan, ready: Ready) -> _Made:
    folder = run.work / target.name / "bundle"
    _build_in_child(run, target, plan, ready.inputs, folder)
    answered = _answered(run, target)
    if _inputs_digest(answered.goldens) != _inputs_digest(ready.inputs):
        # The first guess at inputs didn't run; plan with those that did, and build again if that changes anything.
        again = plan_target(run, target, answered.goldens)
        if again != plan:
            plan = again
            remove_tree(folder)
            _build_in_child(run, target, plan, answered.goldens, folder)
    kind = kind_named(target.kind)
    goldens = _fitting(answered.goldens, plan, target)
    precision = judged_precision(run.model, target.precision)
    judged = judging(
        run.manifest.policy,
        precision,
        run.model,
        answered.reference.excluded,
        kind.facts,
        target.tolerance,
    )
    with storage_errors("adding goldens and self-check"):
        golden_store.write(
            folder / GOLDEN,
            goldens,
            judged.rules,
            policy=judged.description,
            precision=precision,
            excluded=dict(answered.reference.excluded),
        )
        add_selfcheck(folder)
        bundle = seal(folder, plan, tool_versions(kind), kind.facts.roles)
    verdict = unverified("not executed: verification was switched off", judged.description, precision)
    if run.verify:
        run.listener.step(target.name, "verifying")
        job = VerifyJob(folder, bundle.digest, folder / VERDICT)
        verdict = child.call(execute, job, seconds=target.verify_timeout, what="verifying")
    with storage_errors("sealing"):
        write_readme(folder, kind, plan, verdict, bundle)
        bundle = seal(folder, plan, tool_versions(kind), kind.facts.roles)
        _stamp_verdict(folder, verdict, bundle)
    return _Made(folder, plan, bundle, verdict, goldens)


def _build_in_child(run: Run, target: Target, plan: Plan, inputs: GoldenSet, folder: Path) -> None:
    run.listener.step(target.name, "building")
    with storage_errors("preparing the build"):
        folder.mkdir(parents=True)
        given = folder.parent / "inputs"
        bare = GoldenSet(tuple(GoldenCase(case.name, case.inputs, {}, case.source) for case in inputs.cases))
        golden_store.write(given, bare, {}, policy="", precision=target.precision, excluded={})
    job = BuildJob(target.kind, plan, folder, run.model.path, given)
    child.call(build_stage, job, seconds=target.build_timeout, what="building")


def _inputs_digest(goldens: GoldenSet) -> str:
    return GoldenSet(tuple(GoldenCase(case.name, case.inputs) for case in goldens.cases)).digest()


def _fitting(goldens: GoldenSet, plan: Plan, target: Target) -> GoldenSet:
    """The cases that the planned signature takes: with pinned shapes, others may have been given.

    Raises:
        GoldenError: none fits.
    """
    fitting = tuple(case for case in goldens.cases if _fits(case, plan.signature))
    if not fitting:
        pinned = ", ".join(f"{name} = {size}" for name, size in target.shapes)
        raise GoldenError(
            f"no golden case fits the pinned shapes of {target.name} ({pinned})",
            "give golden cases of that size, or leave [golden] path out to have some synthesised",
        )
    return GoldenSet(fitting)


def _fits(case: GoldenCase, signature: Signature) -> bool:
    return all(
        spec.dims is None
        or (
            len(spec.dims) == case.inputs[spec.name].ndim
            and all(
                not isinstance(dim, int) or dim == size
                for dim, size in zip(spec.dims, case.inputs[spec.name].shape, strict=True)
            )
        )
        for spec in signature.inputs
        if spec.name in case.inputs
    )


def add_selfcheck(folder: Path) -> None:
    """Copy the comparator and the self-check script beside the bundle's own ``infer.py``, if it has one."""
    if (folder / "infer.py").exists():
        clone_file(package_folder("packager") / "parity.py", folder / "parity.py")
        clone_file(common_templates() / "verify.py", folder / "verify.py")


def tool_versions(kind: Kind) -> dict[str, str]:
    """Exact versions of the distributions that decide this kind's result."""
    return {name: importlib.metadata.version(name) for name in ("numpy", "onnx", *kind.facts.tools)}


def _stamp_verdict(folder: Path, verdict: Verdict, bundle: Bundle) -> None:
    """Tie ``verdict.json`` to the final seal: the README, which quotes the verdict, was added after it."""
    path = folder / VERDICT
    if verdict.status == "unverified":
        document = {"schema": "packager.verdict/1", **asdict(verdict)}
    else:
        document = json.loads(path.read_text(encoding="utf-8"))
    document["bundle_digest"] = bundle.digest
    write_text(path, to_json(document))


def _ingredients(run: Run, target: Target, plan: Plan, ready: Ready) -> Ingredients:
    from pydantic import TypeAdapter

    kind = kind_named(target.kind)
    folders = [kind.folder, common_templates(), *([kind.templates] if kind.templates else [])]
    reference = json.dumps(dict(ready.ingredients), sort_keys=True)
    return {
        "what": "bundle",
        "packager code": run.code,
        "room and templates": tree_digest(*folders),
        "model": run.model.digest,
        "plan": TypeAdapter(Plan).dump_json(plan).decode(),
        "reference": reference,
        "tools": json.dumps(tool_versions(kind), sort_keys=True),
        "tolerance": repr((run.manifest.policy, target.tolerance)),
        "verified": str(run.verify),
        "min level": target.min_level,
        "archive": target.archive,
        "host": " ".join((this_host().system, this_host().machine, *this_host().features)),
    }


def _finish(run: Run, target: Target, made: _Made, ingredients: Ingredients, misses: tuple[str, ...]) -> TargetResult:
    """Judge the verdict, then archive, place and cache the bundle, or reject it."""
    verdict, name = made.verdict, bundle_name(run.manifest, target)
    base = TargetResult(
        target=target.name,
        kind=target.kind,
        precision=target.precision,
        status="passed",
        exit_code=0,
        verdict=verdict,
        bundle_digest=made.bundle.digest,
        bytes=made.bundle.total_bytes,
        misses=misses,
        notes=made.plan.notes,
    )
    trouble = _trouble(target, verdict)
    if trouble is not None:
        diagnosed: tuple[str, ...] = ()
        if verdict.status == "failed":
            run.listener.step(target.name, "looking for the node at fault")
            diagnosed = diagnosis.diagnose(run.model, made.plan, made.folder)
        return replace(
            base,
            status="failed",
            exit_code=trouble.exit_code,
            message=trouble.message,
            hint=trouble.hint,
            bundle=reject(run.out, name, made.folder),
            diagnosis=diagnosed,
        )
    packed = None
    if verdict.status == "passed":
        run.listener.step(target.name, "archiving")
        packed = run.work / target.name / f"{name}.{target.archive}"
        with storage_errors("archiving"):
            archive(made.folder, packed, name)
    keep(run.cache, ingredients, Kept(made.folder, packed, verdict))
    return place(run.out, name, base, made.folder, packed)


def _from_cache(run: Run, target: Target, plan: Plan, entry: Path) -> TargetResult:
    run.listener.step(target.name, "taking the bundle from the cache")
    name = bundle_name(run.manifest, target)
    kept = take(entry, run.work / target.name, f"{name}.{target.archive}")
    bundle = open_bundle(kept.folder)
    base = TargetResult(
        target=target.name,
        kind=target.kind,
        precision=target.precision,
        status="passed",
        exit_code=0,
        verdict=kept.verdict,
        bundle_digest=bundle.digest,
        bytes=bundle.total_bytes,
        cached=True,
        notes=plan.notes,
    )
    return place(run.out, name, base, kept.folder, kept.packed)


def _trouble(target: Target, verdict: Verdict) -> VerificationError | None:
    if verdict.status == "failed":
        listed = "".join(f"\n  {failure}" for failure in verdict.failures[:5])
        more = f"\n  and {len(verdict.failures) - 5} more" if len(verdict.failures) > 5 else ""
        return VerificationError(
            f"the bundle's answers are not its goldens{listed}{more}",
            f"the bundle is kept under {REJECTED}/ with its verdict.json; widen [tolerance] only if the loss is wanted",
        )
    if below(verdict.level, target.min_level):
        return VerificationError(
            f"verified only at level {verdict.level}, but min_level is {target.min_level}"
            + (f": {verdict.level_reason}" if verdict.level_reason else ""),
            "build on a machine that can execute the target, or lower min_level",
        )
    return None


__all__ = ["BuildJob", "Run", "build_stage", "bundle_name", "plan_target", "run_target", "tool_versions"]
