"""One target from plan to placed bundle.

dialect -> plan -> cache? -> build, seal and verify -> archive -> place. Whatever goes wrong ends as a
:class:`TargetResult`, so that the other targets go on; a bundle that failed verification goes to ``rejected/`` for a
look and nowhere else. With precision ``auto``, the room's ladder of precisions is climbed until one passes.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import replace
from pathlib import Path

from packager import diagnosis
from packager.building import Made, build_bundle
from packager.bundle import Bundle, open_bundle
from packager.cache import Ingredients, tree_digest
from packager.dist import archive
from packager.errors import InternalError, PackagerError, Refused, ToolchainMissing, VerificationError
from packager.files import storage_error, storage_errors
from packager.host import this_host
from packager.levels import below
from packager.manifest import Manifest, Target, at_precision
from packager.placing import REJECTED, Kept, keep, place, reject, take, withdraw
from packager.planning import Source, open_source, plan_target, tool_versions
from packager.precisions import AUTO
from packager.render import common_templates
from packager.results import Status, TargetResult
from packager.room import Kind, Plan, kind_named, missing_requirements
from packager.run import ReferenceRefused, Run, answered
from packager.verdict import Verdict


def run_target(run: Run, target: Target) -> TargetResult:
    """Build, verify and place one target; never raises for what is only this target's trouble.

    Raises:
        Refused: the model or its goldens are refused, which ends the whole run.
    """
    begun = time.monotonic()
    name = bundle_name(run.manifest, target)
    try:
        result = _run_target(run, target)
    except ReferenceRefused as error:
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
    return _climb(run, target, kind) if target.precision == AUTO else _attempt(run, target)


def _climb(run: Run, target: Target, kind: Kind) -> TargetResult:
    """Try the room's ladder of precisions, the smallest bundle first, and take the first that passes.

    Raises:
        Refused: the room can't take the model at any.
        VerificationError: none passes; what became of each is in the message.
    """
    tried: list[str] = []
    refused = True
    for precision in kind.facts.dialect.ladder:
        try:
            result = _attempt(run, at_precision(run.manifest, target, precision))
        except PackagerError as error:
            tried.append(f"{precision}: {' '.join(error.message.split())}")
            refused = refused and isinstance(error, Refused)
            continue
        if result.exit_code == 0:
            ladder = "".join(f"; {line}" for line in tried)
            return replace(result, notes=(f"auto took {precision}{ladder}", *result.notes))
        tried.append(f"{precision}: {' '.join(result.message.split())}")
        refused = False
    listed = "".join(f"\n  {line}" for line in tried)
    if refused:
        raise Refused(f"no precision that `auto` may take can be built{listed}", "choose another target for this model")
    raise VerificationError(
        f"no precision that `auto` may take passes{listed}",
        "give goldens that are like real inputs, or choose a precision and a tolerance yourself",
    )


def _attempt(run: Run, target: Target) -> TargetResult:
    """One target at one precision."""
    source = open_source(run, target)
    plan = plan_target(run, target, source)
    ingredients = _ingredients(run, target, plan, source)
    entry = run.cache.find(ingredients)
    if entry is not None:
        answered(run, target)
        return _from_cache(run, target, entry)
    misses = tuple(run.cache.explain(f"{run.manifest.model.path} {target.name} {target.precision}", ingredients))
    made = build_bundle(run, target, source, plan)
    return _finish(run, target, made, source, (ingredients, misses))


def _ingredients(run: Run, target: Target, plan: Plan, source: Source) -> Ingredients:
    from pydantic import TypeAdapter

    kind = source.kind
    folders = [kind.folder, common_templates(), *([kind.templates] if kind.templates else [])]
    reference = json.dumps(dict(source.ready.ingredients), sort_keys=True)
    return {
        "what": "bundle",
        "packager code": run.code,
        "room and templates": tree_digest(*folders),
        "model": run.model.digest,
        "plan": TypeAdapter(Plan).dump_json(replace(plan, local=())).decode(),
        "reference": reference,
        "tools": json.dumps(tool_versions(kind), sort_keys=True),
        "tolerance": repr((run.manifest.policy, target.tolerance)),
        "verified": str(run.verify),
        "min level": target.min_level,
        "archive": target.archive,
        "host": " ".join((this_host().system, this_host().machine, *this_host().features)),
    }


def _finish(
    run: Run, target: Target, made: Made, source: Source, looked_up: tuple[Ingredients, tuple[str, ...]]
) -> TargetResult:
    """Judge the verdict, then archive, place and cache the bundle, or reject it."""
    ingredients, misses = looked_up
    verdict, name = made.verdict, bundle_name(run.manifest, target)
    base = replace(_passed(target, made.bundle, verdict), misses=misses)
    trouble = _trouble(target, verdict)
    if trouble is not None:
        diagnosed: tuple[str, ...] = ()
        if verdict.status == "failed":
            run.listener.step(target.name, "looking for the node at fault")
            diagnosed = diagnosis.diagnose(source.model, made.plan, made.folder)
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
        packed = source.work / f"{name}.{target.archive}"
        with storage_errors("archiving", packed):
            archive(made.folder, packed, name)
    keep(run.cache, ingredients, Kept(made.folder, packed, verdict))
    return place(run.out, name, base, made.folder, packed)


def _from_cache(run: Run, target: Target, entry: Path) -> TargetResult:
    run.listener.step(target.name, "taking the bundle from the cache")
    name = bundle_name(run.manifest, target)
    kept = take(entry, run.work / target.name / target.precision, f"{name}.{target.archive}")
    bundle = open_bundle(kept.folder)
    base = _passed(target, bundle, kept.verdict)
    return place(run.out, name, replace(base, cached=True), kept.folder, kept.packed)


def _passed(target: Target, bundle: Bundle, verdict: Verdict) -> TargetResult:
    """The result of a target with whose bundle nothing is wrong."""
    return TargetResult(
        target=target.name,
        kind=target.kind,
        precision=target.precision,
        status="passed",
        exit_code=0,
        verdict=verdict,
        bundle_digest=bundle.digest,
        bytes=bundle.total_bytes,
        notes=bundle.notes,
    )


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


__all__ = ["bundle_name", "run_target"]
