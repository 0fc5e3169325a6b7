"""``packager explain``: where a bundle drifts from its model, node by node, worst first.

Two drifts are told apart. What transforms cost: the model and its transformed form side by side in ONNX Runtime. What
the target cost: intermediate tensors of the transformed model in ONNX Runtime and in the target's own runtime, through
probe models that the room builds by the bundle's own plan.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packager import child, golden_store, parity
from packager.bundle import Bundle, open_bundle
from packager.diagnosis import MAX_MODEL_BYTES, DiagnosisJob, computed_tensors, run_probe
from packager.errors import GoldenError, PackagerError, Refused
from packager.goldens import Array, GoldenCase
from packager.model import Model, open_model
from packager.room import Plan
from packager.transform import Context
from packager.transform_registry import load_pass
from packager.verifying import GOLDEN

EXPLAIN_SECONDS = 3600.0
PER_PROBE = 64


@dataclass(frozen=True)
class Drift:
    """How far one node's output is off: ``scaled`` is the largest difference over the output's largest magnitude.

    ``max_abs`` is in the output's units; both are ``None`` for exact outputs and for what can't be measured (another
    shape, values no longer finite), which ``words`` then describes.
    """

    node: str
    tensor: str
    max_abs: float | None
    scaled: float | None
    words: str


@dataclass(frozen=True)
class Explanation:
    """Drifts of one golden case, worst first. A side that can't be told has a sentence in ``notes`` instead."""

    bundle: str
    case: str
    transform: tuple[Drift, ...]
    target: tuple[Drift, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ExplainJob:
    """Input of :func:`explain_here`: the bundle, the model it was built from, the case, how many nodes to name."""

    bundle: Path
    model: Path
    case: str
    most: int


def explain(bundle: Path, model: Path, case: str | None, most: int) -> Explanation:
    """Explain a bundle in a child process.

    Args:
        bundle: its folder.
        model: the ONNX file it was built from, which the bundle doesn't carry.
        case: a golden case's name; ``None`` for the first.
        most: how many nodes of each side to name.

    Raises:
        Refused: the model isn't the one the bundle was built from.
        GoldenError: there is no such case.
    """
    opened, source = open_bundle(bundle), open_model(model)
    if source.digest != opened.model_digest:
        raise Refused(
            f"{model}: not the model that {bundle} was built from: its digest is {source.digest}",
            f"give the model with the digest {opened.model_digest}",
        )
    names = [golden.name for golden in golden_store.read(bundle / GOLDEN).cases]
    if case is not None and case not in names:
        raise GoldenError(f"{bundle}: no golden case '{case}'", f"cases: {', '.join(names)}")
    job = ExplainJob(bundle, model, case or names[0], most)
    return child.call(explain_here, job, seconds=EXPLAIN_SECONDS, what="explaining")


def explain_here(job: ExplainJob) -> Explanation:
    """Child side of :func:`explain`."""
    bundle = open_bundle(job.bundle)
    goldens = golden_store.read(job.bundle / GOLDEN)
    case = next(case for case in goldens.cases if case.name == job.case)
    notes: list[str] = []
    transformed: tuple[Drift, ...] = ()
    with tempfile.TemporaryDirectory(prefix="packager-explain-") as name:
        folder = Path(name)
        model = open_model(job.model)
        passes = tuple(load_pass(settings) for settings in json.loads(bundle.transforms))
        if passes:
            from packager.transforming import apply

            (folder / "temporary").mkdir()
            (folder / "dialect").mkdir()
            rules = parity.read_golden(job.bundle / GOLDEN).rules
            context = Context(job.model, folder / "temporary", goldens, rules)
            model = open_model(apply(passes, context, folder / "dialect" / "model.onnx").path)
            transformed = _transform_drift(job.model, model.path, case, job.most)
        else:
            notes.append("the model was not transformed for this target")
        target: tuple[Drift, ...] = ()
        try:
            target = _target_drift(job, bundle, model, case)
        except PackagerError as error:
            notes.append(f"the target's intermediate tensors can't be had: {error.message}")
    return Explanation(str(job.bundle), job.case, transformed, target, tuple(notes))


def _transform_drift(before: Path, after: Path, case: GoldenCase, most: int) -> tuple[Drift, ...]:
    from packager.transform_drift import drift, worst_first

    found = worst_first(drift(before, after, case.inputs))[:most]
    return tuple(Drift(each.node, each.tensor, each.max_abs, each.scaled, str(each)) for each in found)


def _target_drift(job: ExplainJob, bundle: Bundle, model: Model, case: GoldenCase) -> tuple[Drift, ...]:
    import onnx

    if model.bytes + sum(file.bytes for file in model.external) > MAX_MODEL_BYTES:
        raise Refused("the model is too large for probe models")
    labels = {name: node.label for node in model.structure.graph.nodes for name in node.outputs if name}
    proto, names = onnx.load(str(model.path)), computed_tensors(model)
    probing = DiagnosisJob(bundle.kind, _plan_of(bundle), model.path, job.bundle, job.case)
    found: list[tuple[float, Drift]] = []
    for start in range(0, len(names), PER_PROBE):
        pairs = run_probe(proto, names[start : start + PER_PROBE], probing, case.inputs)
        found += [_compared(labels[name], name, *pair) for name, pair in pairs.items()]
    found.sort(key=lambda ranked: -ranked[0])
    return tuple(drift for _, drift in found[: job.most])


def _compared(node: str, tensor: str, expected: Array, actual: Array) -> tuple[float, Drift]:
    """How bad it is and the drift: infinite where values are no longer finite or comparable; of exact ones the share
    that differs."""
    result = parity.compare_output(tensor, expected, actual, parity.Tolerance(max_abs=0.0), None)
    metrics = result.metrics
    if metrics is None:
        return float("inf"), Drift(node, tensor, None, None, "; ".join(result.reasons))
    strange = (metrics.nan_expected, metrics.inf_expected) != (metrics.nan_actual, metrics.inf_actual)
    if strange or metrics.expected_shape != metrics.actual_shape:
        return float("inf"), Drift(node, tensor, None, None, "; ".join(result.reasons))
    if metrics.scaled is None:
        share = (metrics.mismatches or 0) / max(1, metrics.elements)
        return share, Drift(node, tensor, None, None, "; ".join(result.reasons) or "exact")
    words = f"off by {metrics.scaled:.2g} of its magnitude"
    return metrics.scaled, Drift(node, tensor, metrics.max_abs, metrics.scaled, words)


def _plan_of(bundle: Bundle) -> Plan:
    """The plan a bundle was built by, as far as building it again needs it."""
    return Plan(
        target=bundle.target,
        kind=bundle.kind,
        name=bundle.name,
        version=bundle.version,
        model_digest=bundle.model_digest,
        opset=bundle.opset,
        precision=bundle.precision,
        shapes=bundle.shapes,
        signature=bundle.signature,
        steps=(),
        options=bundle.options,
        transforms=bundle.transforms,
    )
