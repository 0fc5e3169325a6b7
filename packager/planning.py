"""Planning one target: its dialect of the model, then what the room will do with it. Nothing is built here.

Where a room wants shared transforms, they run first (in a child process, or out of the cache), since a room plans by
looking at the graph it will get. The plan shows them as its first steps.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, replace
from pathlib import Path

from packager import golden_store
from packager.cache import Ingredients, key_of, tree_digest
from packager.dialect import Dialected, TransformJob, in_dialect, passes_for, passes_text, steps_of
from packager.errors import UsageError
from packager.files import storage_errors
from packager.goldens import GoldenCase, GoldenSet
from packager.goldens_ready import Answered, Ready
from packager.host import this_host
from packager.limits import check_precision, check_shapes
from packager.manifest import Target
from packager.model import Model, sha256_file
from packager.policy import Judging, judged_precision, judging
from packager.room import ExtraFile, Kind, Plan, PlanRequest, kind_named
from packager.run import Run, answered
from packager.shapes import pin_shapes
from packager.transform_registry import AnyPass


@dataclass(frozen=True)
class Source:
    """What a target starts from: the model its room gets, the golden inputs, and a folder to work in.

    ``passes`` made ``dialected`` of the user's model; without passes the room gets the user's own file.
    """

    kind: Kind
    model: Model
    inputs: GoldenSet
    ready: Ready
    work: Path
    passes: tuple[AnyPass, ...] = ()
    dialected: Dialected | None = None


def open_source(run: Run, target: Target) -> Source:
    """Put the model into the target's dialect, where its room has one.

    Raises:
        Refused: a transform can't be done; nodes or tensors are named.
        VerificationError: the transformed model no longer answers as the model does.
        ReferenceRefused: the reference refused the goldens of the whole run.
    """
    kind = kind_named(target.kind)
    ready = run.goldens(target.shapes)
    signature = pin_shapes(run.model.signature, target.shapes)
    # The hint names sizes: those of inputs that ran, not of a first guess.
    sizes = answered(run, target).goldens if kind.facts.limits.fixed_shapes else ready.inputs
    check_shapes(kind.facts, target.name, signature, sizes)
    work = run.work / target.name / target.precision
    passes = passes_for(kind, run.model, target.precision, target.shapes, target.conversion)
    if not passes:
        inputs = answered(run, target).goldens if kind.facts.dialect.settled_goldens else ready.inputs
        return Source(kind, run.model, inputs, ready, work)
    reference = answered(run, target)
    run.listener.step(target.name, "transforming the model")
    judged = judge_target(run, target, reference)
    goldens = work / "judged"
    with storage_errors("preparing the transforms", work):
        work.mkdir(parents=True, exist_ok=True)
        golden_store.write(
            goldens,
            reference.goldens,
            judged.rules,
            policy=judged.description,
            precision=judged.precision,
            excluded=dict(reference.reference.excluded),
        )
    job = TransformJob(run.model.path, passes, goldens, work / "dialect", target.conversion.data)
    ingredients = _ingredients(run, kind, passes, ready, judged)
    made = run.transform_once(key_of(ingredients), lambda: in_dialect(job, ingredients, run.cache))
    return Source(kind, made.model, reference.goldens, ready, work, passes, made)


def plan_target(run: Run, target: Target, source: Source) -> Plan:
    """The room's plan, with the steps of its dialect before its own.

    Raises:
        Refused: the target can't take the model; nodes and reasons are in the message.
        UsageError: a file that its options name isn't there.
    """
    kind = source.kind
    check_precision(kind.facts, target.precision)
    plan = kind.load().plan(request_for(run, target, source))
    if source.dialected is None:
        return plan
    return replace(
        plan,
        model_digest=run.model.digest,
        shapes=target.shapes,
        steps=(*steps_of(source.passes), *plan.steps),
        notes=(*source.dialected.record.notes, *plan.notes),
        transforms=passes_text(source.passes),
    )


def request_for(run: Run, target: Target, source: Source) -> PlanRequest:
    """What the room plans from.

    Raises:
        UsageError: a file that its options name isn't there.
    """
    kind = source.kind
    return PlanRequest(
        target=target.name,
        kind=target.kind,
        name=run.manifest.model.name,
        version=run.manifest.model.version,
        model=source.model,
        goldens=source.inputs,
        precision=target.precision,
        shapes=() if kind.facts.dialect.pin else target.shapes,
        options=target.options,
        facts=kind.facts,
        files=extra_files(run.manifest.root, target),
    )


def extra_files(root: Path, target: Target) -> tuple[ExtraFile, ...]:
    """The files that a target's options name, relative to the manifest's folder ``root``.

    Raises:
        UsageError: one isn't there, or can't be read.
    """
    found = []
    for name in dict.fromkeys(target.options.files()):
        path = root / name
        try:
            found.append(ExtraFile(name, path, sha256_file(path)))
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror or error}, and an option of target '{target.name}' names it",
                "paths in a manifest are relative to its folder",
            ) from error
    return tuple(found)


def judge_target(run: Run, target: Target, reference: Answered) -> Judging:
    """The rules by which a target's outputs are judged.

    Raises:
        ManifestError: the manifest gives a tolerance for an output that doesn't exist.
    """
    return judging(
        run.manifest.policy,
        judged_precision(run.model, target.precision),
        run.model,
        reference.reference.excluded,
        kind_named(target.kind).facts,
        target.tolerance,
        target.precision if target.precision in kind_named(target.kind).facts.dialect.precisions else None,
    )


def inputs_digest(goldens: GoldenSet) -> str:
    """A digest of the inputs alone."""
    return GoldenSet(tuple(GoldenCase(case.name, case.inputs) for case in goldens.cases)).digest()


def tool_versions(kind: Kind) -> dict[str, str]:
    """Exact versions of the distributions that decide this kind's result."""
    return versions("numpy", "onnx", *kind.facts.tools)


def versions(*distributions: str) -> dict[str, str]:
    """Exact versions of installed distributions."""
    return {name: importlib.metadata.version(name) for name in distributions}


def _ingredients(run: Run, kind: Kind, passes: tuple[AnyPass, ...], ready: Ready, judged: Judging) -> Ingredients:
    host = this_host()
    return {
        "what": "transformed model",
        "packager code": run.code,
        "model": run.model.digest,
        "passes": passes_text(passes),
        "room": tree_digest(kind.folder) if kind.facts.dialect.own else "",
        "reference": json.dumps(dict(ready.ingredients), sort_keys=True),
        "tolerance": repr(sorted(judged.rules.items())),
        "tools": json.dumps(versions("numpy", "onnx", "onnx-ir", "onnxruntime"), sort_keys=True),
        "host": " ".join((host.system, host.machine, *host.features)),
    }
