"""After a failed verification: which side is off, and where the target first goes its own way.

Two questions, each answered in a child process and best effort: a diagnosis that can't be made says so and never
hides the failure it belongs to.

- The tie-breaker: ONNX's own reference evaluator answers the failing case too, and is compared with both sides.
- The first divergence: intermediate tensors are made outputs of probe models, which the same room builds by the same
  plan; the first tensor, in graph order, that leaves the tolerance names its node. Many tensors are searched in
  rounds, each narrowing the stretch between the last agreeing and the first diverging one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packager import child, golden_store, parity
from packager.bundle import VERDICT, seal
from packager.errors import PackagerError
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import Model, open_model
from packager.reference import OrtSession
from packager.room import Kind, Plan, PlanRequest, Stage, kind_named
from packager.verifying import GOLDEN

if TYPE_CHECKING:
    import onnx

TIE_BREAK_SECONDS = 180.0
SEARCH_SECONDS = 600.0
MAX_MODEL_BYTES = 1_500_000_000
"""Probe models are written inline, and a protobuf message ends at 2 GB."""
PER_ROUND = 48
MAX_ROUNDS = 8


@dataclass(frozen=True)
class DiagnosisJob:
    """Input of both child functions: the rejected bundle, the case that failed, the plan it was built by."""

    kind: str
    plan: Plan
    model: Path
    bundle: Path
    case: str


@dataclass(frozen=True)
class Finding:
    """One sentence."""

    text: str


def diagnose(model: Model, plan: Plan, bundle: Path) -> tuple[str, ...]:
    """Sentences on a bundle that failed verification; its ``verdict.json`` names the failing case."""
    case = _failing_case(bundle)
    if case is None:
        return ()
    job = DiagnosisJob(plan.kind, plan, model.path, bundle, case)
    found: list[str] = []
    for function, seconds, what in (
        (break_tie, TIE_BREAK_SECONDS, "asking the ONNX reference evaluator"),
        (find_divergence, SEARCH_SECONDS, "searching for the first diverging node"),
    ):
        if function is find_divergence and model.bytes + sum(file.bytes for file in model.external) > MAX_MODEL_BYTES:
            found.append("the first diverging node was not searched for: the model is too large for probe models")
            continue
        try:
            found.append(child.call(function, job, seconds=seconds, what=what).text)
        except PackagerError as error:
            found.append(f"{what} gave no answer: {error.message.splitlines()[0]}")
    return tuple(found)


def _failing_case(bundle: Path) -> str | None:
    document = json.loads((bundle / VERDICT).read_text(encoding="utf-8"))
    return next((str(case["name"]) for case in document.get("cases", ()) if not case["passed"]), None)


def break_tie(job: DiagnosisJob) -> Finding:
    """Child side: the failing case through ONNX's reference evaluator, compared with both sides.

    Raises:
        ModelError, BuildError: the evaluator or the runtime can't run the case.
    """
    from onnx.reference import ReferenceEvaluator

    golden = parity.read_golden(job.bundle / GOLDEN)
    case = next(case for case in golden.cases if case.name == job.case)
    names = list(case.outputs)
    third = dict(zip(names, ReferenceEvaluator(str(job.model)).run(names, dict(case.inputs)), strict=True))
    third = {name: _as_array(value) for name, value in third.items()}
    with kind_named(job.kind).load().runner(job.bundle) as runner:
        actual = runner.run(case.inputs)
        target = f"{runner.info.name} {runner.info.version}"
    with_reference = _agree(third, case.outputs, golden.rules)
    with_target = _agree(third, actual, golden.rules)
    if with_reference and not with_target:
        return Finding(f"tie-breaker: the ONNX reference evaluator agrees with ONNX Runtime; {target} is off")
    if with_target and not with_reference:
        return Finding(f"tie-breaker: the ONNX reference evaluator agrees with {target}; ONNX Runtime is off")
    return Finding("tie-breaker: the ONNX reference evaluator agrees with neither side clearly")


@dataclass(frozen=True)
class SettleJob:
    """Input of :func:`settle`: the model, the bundle that failed, and a folder for settled goldens."""

    kind: str
    model: Path
    bundle: Path
    out: Path


@dataclass(frozen=True)
class Settled:
    """The cases in which ONNX Runtime, not the target, was off; empty where that isn't so of every failing case."""

    cases: tuple[str, ...]


def settle(job: SettleJob) -> Settled:
    """Child side: whether ONNX's own reference evaluator takes the target's side in every failing case.

    If so, the golden cases go to ``job.out`` with the evaluator's outputs in those cases: ONNX's own definition of its
    operators, where an optimised kernel (an LSTM's, say) was too coarse to be a reference.

    Raises:
        GoldenFileError, BuildError: the evaluator or the runtime can't run a case.
    """
    from onnx.reference import ReferenceEvaluator

    golden = parity.read_golden(job.bundle / GOLDEN)
    document = json.loads((job.bundle / VERDICT).read_text(encoding="utf-8"))
    failing = {str(case["name"]) for case in document["cases"] if not case["passed"]}
    evaluator = ReferenceEvaluator(str(job.model))
    cases: list[GoldenCase] = []
    with kind_named(job.kind).load().runner(job.bundle) as runner:
        for case in golden.cases:
            outputs, origin = case.outputs, case.outputs_from
            if case.name in failing:
                names = list(case.outputs)
                found = evaluator.run(names, dict(case.inputs))
                outputs = {name: _as_array(value) for name, value in zip(names, found, strict=True)}
                origin = "ONNX reference evaluator"
                actual = runner.run(case.inputs)
                with_target = parity.compare_case(case.name, outputs, actual, golden.rules, golden.excluded_names)
                with_reference = parity.compare_case(case.name, outputs, case.outputs, golden.rules)
                if not with_target.passed or with_reference.passed:
                    return Settled(())
            cases.append(GoldenCase(case.name, case.inputs, outputs, case.source, origin))
    golden_store.write(
        job.out, GoldenSet(tuple(cases)), golden.rules, policy=golden.policy, precision=golden.precision,
        excluded=golden.excluded,
    )  # fmt: skip
    return Settled(tuple(sorted(failing)))


def _as_array(value: object) -> Array:
    import numpy as np

    return np.asarray(value)


def _agree(one: Mapping[str, Array], other: Mapping[str, Array], rules: Mapping[str, parity.OutputRule]) -> bool:
    return all(
        parity.compare_output(name, one[name], other[name], rule.tolerance, None, rounding=rule.rounding).passed
        for name, rule in rules.items()
        if name in one and name in other
    )


def find_divergence(job: DiagnosisJob) -> Finding:
    """Child side: the first node whose output leaves the tolerance.

    Raises:
        PackagerError: no probe model could be built.
    """
    import onnx

    golden = parity.read_golden(job.bundle / GOLDEN)
    case = next(case for case in golden.cases if case.name == job.case)
    tolerance = _loosest(golden.rules)
    model = open_model(job.model)
    labels = {name: node.label for node in model.structure.graph.nodes for name in node.outputs if name}
    tensors = computed_tensors(model)
    proto = onnx.load(str(job.model))
    low, worst = 0, ""
    for _ in range(MAX_ROUNDS):
        chosen = _spread(tensors[low:], PER_ROUND)
        outcome = _probe(proto, chosen, job, case.inputs, tolerance)
        bad = next((name for name in chosen if name in outcome), None)
        if bad is None:
            break
        worst = outcome[bad]
        before = chosen[: chosen.index(bad)]
        low = tensors.index(before[-1]) + 1 if before else low
        tensors = tensors[: tensors.index(bad) + 1]
        if len(tensors) - low <= 1 or len(chosen) == len(tensors) - low:
            return Finding(f"first divergence: node {labels[bad]}, output '{bad}': {worst}")
    if worst:
        return Finding(f"first divergence: at or before node {labels[tensors[-1]]}: {worst}")
    return Finding(
        "first divergence: none of the intermediate tensors differs when it is made an output, so an optimisation "
        "across nodes is at fault"
    )


def _loosest(rules: Mapping[str, parity.OutputRule]) -> parity.Tolerance:
    """One tolerance for intermediate tensors: that of the outputs, the loosest where they differ; no top-1."""
    bounds = [rule.tolerance for rule in rules.values()]
    absolute = [bound.max_abs for bound in bounds if bound.max_abs is not None]
    scaled = [bound.scaled for bound in bounds if bound.scaled is not None]
    cosine = [bound.cosine for bound in bounds if bound.cosine is not None]
    return parity.Tolerance(max(absolute, default=None), max(scaled, default=None), min(cosine, default=None))


def computed_tensors(model: Model) -> list[str]:
    """Tensors that nodes of the main graph compute from the inputs, in graph order; constants are left out."""
    fed = {spec.name for spec in model.signature.inputs}
    found: list[str] = []
    for node in model.structure.graph.nodes:
        inside = {name for graph in node.subgraphs() for inner in graph.walk() for name in inner.inputs}
        if fed.intersection(node.inputs) or fed.intersection(inside):
            made = [name for name in node.outputs if name]
            fed.update(made)
            found += made
    return found


def _spread(names: Sequence[str], most: int) -> list[str]:
    """At most ``most`` names, evenly spread, the last one included."""
    if len(names) <= most:
        return list(names)
    picks = sorted({round((index + 1) * len(names) / most) - 1 for index in range(most)})
    return [names[pick] for pick in picks]


def _probe(
    proto: onnx.ModelProto, chosen: list[str], job: DiagnosisJob, feeds: Mapping[str, Array], tol: parity.Tolerance
) -> dict[str, str]:
    """Those of the chosen tensors that differ, with the reason."""
    differing: dict[str, str] = {}
    for tensor, (expected, actual) in run_probe(proto, chosen, job, feeds).items():
        result = parity.compare_output(tensor, expected, actual, tol, None)
        if not result.passed:
            differing[tensor] = result.reasons[0]
    return differing


def run_probe(
    proto: onnx.ModelProto, chosen: list[str], job: DiagnosisJob, feeds: Mapping[str, Array]
) -> dict[str, tuple[Array, Array]]:
    """What ONNX Runtime and the target give for intermediate tensors, found by building a model that outputs them.

    Args:
        proto: the model the bundle was built from.
        chosen: names of tensors of its main graph; those that aren't tensors at run time are left out.
        job: the bundle and how it was built.
        feeds: inputs by name.

    Raises:
        PackagerError: the probe model can't be built or run.
    """
    with tempfile.TemporaryDirectory(prefix="packager-probe-") as name:
        folder = Path(name)
        path = folder / "probe.onnx"
        expected = _with_outputs(proto, chosen, path, feeds)
        kind = kind_named(job.kind)
        stage = folder / "bundle"
        stage.mkdir()
        goldens = golden_store.read(job.bundle / GOLDEN)
        plan = _probe_plan(kind, job.plan, open_model(path), goldens)
        kind.load().build(plan, Stage(stage, path, goldens))
        # A runner may look at golden cases before it is asked: those of the probe are what it is about to be asked.
        loosest = _loosest(parity.read_golden(job.bundle / GOLDEN).rules)
        asked = GoldenSet((GoldenCase(job.case, feeds, expected, "probe", "reference"),))
        rules = {tensor: parity.OutputRule(loosest) for tensor in expected}
        golden_store.write(stage / GOLDEN, asked, rules, policy="", precision=plan.precision, excluded={})
        seal(stage, plan, {}, {})
        with kind.load().runner(stage) as runner:
            actual = runner.run(feeds)
    return {tensor: (value, actual[tensor]) for tensor, value in expected.items()}


def _probe_plan(kind: Kind, plan: Plan, model: Model, goldens: GoldenSet) -> Plan:
    room = kind.load()
    options = room.Options.model_validate_json(plan.options)
    request = PlanRequest(
        target=plan.target,
        kind=plan.kind,
        name=plan.name,
        version=plan.version,
        model=model,
        goldens=goldens,
        precision=plan.precision,
        shapes=() if kind.facts.dialect.pin else plan.shapes,
        options=options,
        facts=kind.facts,
    )
    return room.plan(request)


def _with_outputs(
    proto: onnx.ModelProto, chosen: list[str], path: Path, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """Write a model that gives ``chosen`` and run it in the reference; tensors only, with what it answered.

    Two passes: the first finds what the tensors are, the second declares them.
    """
    from onnx import helper

    probe = type(proto)()
    probe.CopyFrom(proto)
    del probe.graph.output[:]
    probe.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in chosen)
    path.write_bytes(probe.SerializeToString())
    session = OrtSession(path, quantized=open_model(path).is_quantized)
    values = session.run_any(feeds, chosen)
    tensors = {name: value for name, value in values.items() if value.dtype != object}
    del probe.graph.output[:]
    probe.graph.output.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
        for name, value in tensors.items()
    )
    path.write_bytes(probe.SerializeToString())
    return tensors
