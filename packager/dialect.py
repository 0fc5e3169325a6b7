"""A target's dialect: which shared transforms its room wants, and running them before the room plans.

The room says it as data, in ``target.toml`` under ``[dialect]``. The transforms run in a child process on the golden
cases' own model, and what they cost is measured there: the transformed model in ONNX Runtime against the reference.
So a verdict can tell what a precision cost from what a runtime cost.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from packager import child, golden_store, parity
from packager.cache import Cache, Ingredients
from packager.errors import GoldenError, InternalError, Refused, UsageError, VerificationError
from packager.files import clone_tree, to_json
from packager.goldens import GoldenCase, GoldenSet
from packager.goldens_ready import files_digest
from packager.limits import ONNX
from packager.model import Model, open_model
from packager.precisions import AS_IS, Conversion
from packager.room import Kind, Step
from packager.transform import Context
from packager.transform_registry import AnyPass, dump_pass, load_pass
from packager.verdict import Distance
from packager.verifying import distance

MODEL = "model.onnx"
ANSWERS = "golden"
RECORD = "transformed.json"
TRANSFORM_SECONDS = 3600.0
MAX_CULPRITS = 3


@dataclass(frozen=True)
class Transformed:
    """What transforms made of a model, and how far its answers in ONNX Runtime are from the reference's.

    ``failures`` says which outputs left their tolerance, and ``culprits`` then which nodes did it, worst first.
    """

    passes: tuple[str, ...]
    notes: tuple[str, ...]
    bytes: int
    distance: Distance
    failures: tuple[str, ...]
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialected:
    """A model in the target's dialect: the opened result, the record of it, and its answers to the golden cases."""

    model: Model
    record: Transformed
    answers: Path


@dataclass(frozen=True)
class TransformJob:
    """Input of :func:`transform`: the model, the passes, the golden cases by which the result is judged, and where.

    ``calibration`` are files that a pass is calibrated with; the pass holds their digest.
    """

    source: Path
    passes: tuple[AnyPass, ...]
    goldens: Path
    out: Path
    calibration: Path | None = None


def passes_for(
    kind: Kind,
    model: Model,
    precision: str,
    shapes: tuple[tuple[str, int], ...],
    asked: Conversion = AS_IS,
) -> tuple[AnyPass, ...]:
    """The transforms a target needs, in order; none where the room does everything itself.

    Raises:
        InternalError: the room's ``target.toml`` names a pass or a setting that doesn't exist.
        Refused: nodes are to stay in float, and what makes the precision can't leave out any.
    """
    dialect, limits, structure = kind.facts.dialect, kind.facts.limits, model.structure
    chosen: list[AnyPass] = []
    if dialect.inline and structure.functions:
        chosen.append(load_pass({"name": "inline-functions"}))
    if dialect.strip_zipmap:
        from packager.transform_cleaning import planned_strip

        strip = planned_strip(structure)
        chosen += [] if strip is None else [strip]
    if dialect.pin and shapes:
        # Folding first takes away branches that the pinned sizes would contradict.
        fold, pin = load_pass({"name": "fold"}), load_pass({"name": "pin-shapes", "shapes": shapes})
        chosen += [fold, pin, fold]
    if dialect.clean:
        chosen.append(load_pass({"name": "clean"}))
    if dialect.lower:
        from packager.transform_versions import planned_versions

        most = dialect.maximum_opset.get(precision)
        opsets = limits.opset if most is None else {**limits.opset, ONNX: most}
        versions = planned_versions(structure, opsets, limits.ir)
        if versions is not None:
            chosen += [load_pass({"name": "drop-unused-imports"}), versions]
    if dialect.exact_int8 != "no":
        from packager.transform_exact_int8 import planned_exact

        exact = planned_exact(structure, setting=dialect.exact_int8 == "set")
        chosen += [] if exact is None else [exact]
    minimum = dialect.minimum_opset.get(precision, 0)
    if model.opset < minimum:
        chosen.append(load_pass({"name": "set-versions", "opsets": [["", minimum]], "ir": None}))
    chosen += [load_pass({"name": name}) for name in dialect.own]
    for settings in dialect.precisions.get(precision, ()):
        try:
            chosen.append(_as_asked(load_pass(settings), asked, precision))
        except ValueError as error:
            raise InternalError(f"{kind.folder / 'target.toml'}: [dialect] precision '{precision}': {error}") from error
    return tuple(chosen)


def _as_asked(made: AnyPass, asked: Conversion, precision: str) -> AnyPass:
    """A pass with what the manifest asks put into the settings of its own that mean it."""
    known: set[str] = {field.name for field in fields(made)} if is_dataclass(made) else set()
    changes: dict[str, object] = {}
    for key, names, settings in (
        ("keep", asked.keep, ("exclude", "keep")),
        ("keep_operators", asked.keep_operators, ("exclude_types", "keep_types")),
    ):
        field = next((setting for setting in settings if setting in known), None)
        if names and field is None:
            raise Refused(f"{precision} leaves no node out for this kind, so `{key}` can't be done", f"remove `{key}`")
        if names and field is not None:
            changes[field] = (*getattr(made, field), *(name for name in names if name not in getattr(made, field)))
    if "method" in known:
        changes["method"] = asked.calibration
    if asked.data is not None:
        if "calibration" not in known:
            raise Refused(f"{precision} isn't calibrated, so `calibration_data` can't be done", "remove it")
        changes["calibration"] = _digest(asked.data)
    return cast(AnyPass, replace(cast(Any, made), **changes)) if changes else made


def _digest(files: Path) -> str:
    if not files.exists():
        raise UsageError(f"{files}: no such file or folder", "calibration_data is relative to the manifest")
    return hashlib.sha256(files_digest(files).encode()).hexdigest()


def steps_of(passes: tuple[AnyPass, ...]) -> tuple[Step, ...]:
    """The lines of the plan."""
    return tuple(each.step() for each in passes)


def passes_text(passes: tuple[AnyPass, ...]) -> str:
    """The passes as canonical JSON: what enters cache keys and seals."""
    return json.dumps([dump_pass(each) for each in passes], sort_keys=True)


def transform(job: TransformJob) -> Transformed:
    """Child side: run the passes and measure the result against the golden cases it still takes.

    Raises:
        Refused: a pass can't transform the model; nodes or tensors are named.
    """
    from packager.float16_rounding import runnable
    from packager.reference import OrtSession, is_large
    from packager.transforming import apply

    golden = parity.read_golden(job.goldens)
    goldens = _fitting(job, golden_store.read(job.goldens))
    with tempfile.TemporaryDirectory(prefix="packager-transform-") as name:
        context = Context(job.source, Path(name), goldens, golden.rules, job.calibration)
        applied = apply(job.passes, context, job.out / MODEL)
    model = open_model(job.out / MODEL)
    wanted = [spec.name for spec in model.signature.outputs if spec.name in golden.rules]
    with tempfile.TemporaryDirectory(prefix="packager-transform-") as name:
        session = OrtSession(runnable(model, Path(name)), quantized=model.is_quantized, mapped=is_large(model))
        answered = [
            GoldenCase(case.name, case.inputs, session.run(case.inputs, wanted, case.name), case.source, "transformed")
            for case in goldens.cases
        ]
    expected = {case.name: case.outputs for case in goldens.cases}
    rules = {name: golden.rules[name] for name in wanted}
    results = [parity.compare_case(case.name, expected[case.name], case.outputs, rules) for case in answered]
    excluded = golden.excluded
    golden_store.write(
        job.out / ANSWERS, GoldenSet(tuple(answered)), rules, policy=golden.policy, precision=golden.precision,
        excluded=excluded,
    )  # fmt: skip
    overall = parity.judge(results)
    failed = next((case for case, result in zip(answered, results, strict=True) if not result.passed), None)
    culprits = () if failed is None else _culprits(job.source, model, failed)
    return Transformed(applied.passes, applied.notes, applied.bytes, distance(overall), overall.reasons, culprits)


def _fitting(job: TransformJob, goldens: GoldenSet) -> GoldenSet:
    """The cases that the model will still take: those of other sizes than it is pinned to go.

    Raises:
        GoldenError: none is left.
    """
    signature = open_model(job.source).signature
    for each in job.passes:
        signature = each.signature(signature)
    fitting = tuple(case for case in goldens.cases if signature.takes(case.inputs))
    if not fitting:
        raise GoldenError(
            "no golden case has the sizes that `shapes` pins",
            "give golden cases of those sizes, or leave [golden] path out to have some synthesised",
        )
    return GoldenSet(fitting)


def _culprits(before: Path, after: Model, case: GoldenCase) -> tuple[str, ...]:
    """Where the transformed model leaves the model: the first node that differs clearly, then those that add most."""
    from packager.float16_rounding import runnable
    from packager.transform_drift import drift, first_diverging, worst_first

    with tempfile.TemporaryDirectory(prefix="packager-drift-") as name:
        found = drift(before, runnable(after, Path(name)), case.inputs)
    first = first_diverging(found)
    worst = [str(each) for each in worst_first(found)[:MAX_CULPRITS]]
    return (*((f"the first to drift: {first}",) if first else ()), *(f"drifts most: {line}" for line in worst))


def in_dialect(job: TransformJob, ingredients: Ingredients, cache: Cache) -> Dialected:
    """Transform a model in a child process, or take the result from the cache.

    Args:
        job: what to do; ``goldens`` carry the rules by which the result is judged, ``out`` must not exist.
        ingredients: everything that decides the result.
        cache: where results are kept.

    Raises:
        Refused: a pass can't transform the model.
        VerificationError: the transformed model's answers are not the reference's, by the rules of its precision.
    """
    from pydantic import TypeAdapter

    adapter = TypeAdapter(Transformed)
    entry = cache.find(ingredients)
    if entry is not None:
        record = adapter.validate_json((entry / RECORD).read_bytes())
        return Dialected(open_model(entry / MODEL), record, entry / ANSWERS)
    job.out.mkdir(parents=True)
    record = child.call(transform, job, seconds=TRANSFORM_SECONDS, what="transforming the model")
    if record.failures:
        listed = "".join(f"\n  {failure}" for failure in record.failures[:5])
        listed += "".join(f"\n  {line}" for line in record.culprits)
        raise VerificationError(
            f"the transformed model ({', '.join(record.passes)}) no longer answers as the model does{listed}",
            "choose another precision, exclude sensitive nodes, or give goldens that are like real inputs",
        )

    def fill(folder: Path) -> None:
        clone_tree(job.out, folder / "all")
        for item in (folder / "all").iterdir():
            item.rename(folder / item.name)
        (folder / "all").rmdir()
        (folder / RECORD).write_text(to_json(adapter.dump_python(record, mode="json")), encoding="utf-8")

    cache.store(ingredients, fill)
    return Dialected(open_model(job.out / MODEL), record, job.out / ANSWERS)
