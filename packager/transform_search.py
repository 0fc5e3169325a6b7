"""The search for what a conversion can't bear: candidates run on the golden cases, and nodes that drift stay in float.

Half precision and int8 search alike: convert, run, judge the outputs by the rules that will judge the bundle; where
they leave them, run the model and its converted form side by side, take the nodes that add most error, convert again
without them. Each round may take twice as many as the one before, so the number of rounds is bounded and small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packager import parity
from packager.goldens import Array, GoldenCase
from packager.model import open_model
from packager.policy import judged_precision, rules_for
from packager.transform import Context
from packager.transform_drift import NodeDrift, as_dtype, load_session, run_session

POLICY = "default-1"
MAX_SEARCH_BYTES = 1_500_000_000
"""Larger models aren't searched: it runs them several times in memory. Verification judges them all the same."""
_SHOWN, _NAMED = 3, 5


@dataclass(frozen=True)
class Goal:
    """What a converted model must reach: golden cases with the outputs expected, and the rules that judge them."""

    cases: tuple[GoldenCase, ...]
    rules: Mapping[str, parity.OutputRule]


@dataclass(frozen=True)
class Trial:
    """One candidate, run: the first case that fails with why, or ``None``; ``path`` is the model that was run."""

    path: Path
    case: GoldenCase | None
    reasons: tuple[str, ...] = ()


def goal(before: Path, context: Context, precision: str) -> Goal:
    """The outputs to reach are the goldens' own, or those of the model before the conversion.

    Args:
        before: the model to convert.
        context: its golden cases and, where they are known, its rules.
        precision: what it becomes, as policies name it.
    """
    model = open_model(before)
    rules = rules_for(POLICY, judged_precision(model, precision), model) if context.rules is None else context.rules
    names = [spec.name for spec in model.signature.outputs if spec.kind == "tensor"]
    session = load_session(before, before.parent, quantized=model.is_quantized)
    made: list[GoldenCase] = []
    for case in context.goldens.cases:
        if model.signature.takes(case.inputs):
            given = {name: case.outputs[name] for name in names if name in case.outputs}
            made.append(replace(case, outputs=given or run_session(session, names, case.inputs)))
    return Goal(tuple(made), rules)


def trial(path: Path, reached: Goal) -> Trial:
    """Run a candidate case by case until one fails."""
    session = load_session(path, path.parent, quantized=open_model(path).is_quantized)
    for case in reached.cases:
        reasons = _judge(run_session(session, list(case.outputs), case.inputs), case, reached.rules)
        if reasons:
            return Trial(path, case, reasons)
    return Trial(path, None)


def _judge(actual: Mapping[str, Array], case: GoldenCase, rules: Mapping[str, parity.OutputRule]) -> tuple[str, ...]:
    reasons: list[str] = []
    for name, rule in rules.items():
        if name in case.outputs and name in actual:
            value = as_dtype(actual[name], case.outputs[name])
            result = parity.compare_output(
                name, case.outputs[name], value, rule.tolerance, rule.score_axis, rounding=rule.rounding
            )
            reasons += [f"output '{name}': {reason}" for reason in result.reasons]
    return tuple(reasons)


def excess(actual: Mapping[str, Array], case: GoldenCase, rules: Mapping[str, parity.OutputRule]) -> float:
    """How far outputs are beyond their rules, as one number to compare candidates by: the worst of error / allowed.

    1 is the bound. Infinite where something is not finite or can't be compared.
    """
    worst = 0.0
    for name, rule in rules.items():
        if name not in case.outputs or name not in actual:
            continue
        expected, allowed = case.outputs[name], rule.tolerance
        found = parity.compare_output(
            name, expected, as_dtype(actual[name], expected), allowed, rule.score_axis
        ).metrics
        if found is None or found.nan_actual > found.nan_expected or found.inf_actual > found.inf_expected:
            return float("inf")
        if found.mismatches:
            worst = max(worst, 1 + found.mismatches / found.elements)
        pairs = (
            (found.max_abs, allowed.max_abs),
            (found.scaled, allowed.scaled),
            (
                None if found.cosine is None else 1 - found.cosine,
                None if allowed.cosine is None else 1 - allowed.cosine,
            ),
            (None if found.top1 is None else 1 - found.top1, None if allowed.top1 is None else 1 - allowed.top1),
        )
        ratios = [error / bound for error, bound in pairs if error is not None and bound]
        worst = max([worst, *ratios])
    return worst


def failure(what: str, failed: Trial, drifts: Sequence[NodeDrift], kept: int) -> str:
    """The message where nothing helped: why the outputs fail, how many nodes were kept, and the worst ones by name."""
    named = sorted({each.node: each for each in drifts if each.severity > 0}.values(), key=lambda each: -each.severity)
    listed = "".join(f"\n  {each}" for each in named[:_NAMED])
    reasons = "; ".join(failed.reasons[:_SHOWN])
    return f"the model drifts past what {what} may cost ({reasons}), with {kept} nodes kept in float{listed}"
